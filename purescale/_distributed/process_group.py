"""The ranks of a process group or of a device mesh, and an all-reduce or all-gather over them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .._torch import private
from .._torch.dtensor import wait_for
from .._torch.tracing import PLAIN_TYPES, is_on_a_graph, refuse_in_capture, traced_or_recorded
from .._tree.scalars import short_repr

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

Group: TypeAlias = dist.ProcessGroup


def all_reduce(tensor: Tensor, op: str, group: Group | str | None) -> Tensor:
    """Return the "sum" or "max" of `tensor` over the ranks of `group`, a process group, its name,
    or None for all ranks; out of place.
    """
    group = resolve_group(group)
    if torch.compiler.is_compiling():
        # Inductor (torch 2.13) reduces a result of torch.cat in place, although the inputs of
        # torch.cat share its memory: read again, they are the sum. A negation has its own memory.
        return -private.all_reduce(-tensor, "min" if op == "max" else op, group)
    recorded = traced_or_recorded() or is_on_a_graph([tensor])
    with naming_other_ranks():
        if type(tensor) in PLAIN_TYPES and isinstance(group, dist.ProcessGroup) and not recorded:
            # It loads no compiler, as the functional collectives do, which then keeps the group for
            # good; and a group that is kept may abort a process that ends (pytorch/pytorch#190489).
            total = tensor.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(total, getattr(dist.ReduceOp, op.upper()), group)
            return total
        # Waited for here, because a view of a pending result would not wait for it.
        return wait_for(private.all_reduce(tensor, op, group))


@contextmanager
def naming_other_ranks() -> Iterator[None]:
    """Add the likely cause to torch's error about a collective that ran out of time or lost a rank:
    a RuntimeError with gloo, and with NCCL a class of it.
    """
    try:
        yield
    except RuntimeError as error:
        error.add_note(
            "This rank was in a collective. Likely cause: another rank has raised before it came "
            "here, or has ended. Fix: look for the first error in the output of that rank, which "
            "`torchrun --log-dir logs --redirects 3` writes into a file."
        )
        raise


def object_device(group: Group | None) -> str:
    """Return the type of the device on which the ranks of `group` exchange objects: the CPU if the
    group has a backend for it, as in torch's own collectives of objects.
    """
    backends = dist.get_backend_config(group).split(",")
    devices = [backend.partition(":")[0] for backend in backends]
    return "cpu" if "cpu" in devices else devices[0]


def is_single_process(group: Group | None) -> bool:
    """Return True if `group` is the default one and there is no process group."""
    return group is None and not (dist.is_available() and dist.is_initialized())


def resolve_group(group: Any) -> Any:
    """Return the process group (None: of all ranks); refuse one that does not hold this rank or was
    destroyed.
    """
    if torch.compiler.is_compiling():
        return dist.group.WORLD if group is None else group
    refuse_in_capture("has no collectives.", "group=None, or the step without capture.")
    if private.transforms_active():
        raise ValueError(
            "a group inside of torch.vmap or another transform of torch.func: torch has no rule "
            "for collectives there, and would read sums that have not arrived. Fix: a loop over "
            "the members, `[step(member(states, i), batch) for i in range(n)]`; for a derivative "
            "group=None, with the microbatches of all ranks on one."
        )
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "this rank is not in group: `dist.new_group(ranks)` returns a placeholder on other "
            "ranks. Fix: `if dist.get_rank() in ranks:` around what the group does."
        )
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "group is given, but there is no process group. Fix: `dist.init_process_group(...)` "
            "first, under torchrun; group=None for one rank."
        )
    group = dist.group.WORLD if group is None else group
    if isinstance(group, dist.ProcessGroup):
        try:
            dist.get_process_group_ranks(group)
        except (KeyError, ValueError):
            raise ValueError(
                "group no longer exists: it was destroyed, or the default group was made anew. "
                "Fix: pass the current group, `dist.group.WORLD` for all ranks."
            ) from None
    return group


def as_group(group: Any) -> Group:
    """`resolve_group` for callers that need a `dist.ProcessGroup`."""
    group = resolve_group(group)
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group is {short_repr(group)} ({type(group).__name__}); expected a process group. "
            "Fix: `dist.group.WORLD`, or `mesh.get_group('dp')` of a DeviceMesh."
        )
    return group


# ---- a mesh --------------------------------------------------------------------------------------


def num_replicas(leaf: DTensor) -> int:
    """Return the number of ranks that store the same element."""
    count = 1
    for placement, size in zip(leaf.placements, mesh_sizes(leaf.device_mesh), strict=True):
        count *= size if placement.is_replicate() else 1
    return count


# Dynamo cannot trace into the mesh of a computed DTensor, for which it has no source.
@private.constant_while_compiling
def mesh_sizes(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return the number of ranks in each dimension of a mesh."""
    return tuple(mesh.shape)


@private.constant_while_compiling
def _mesh_rank(mesh: DeviceMesh) -> int | None:
    """Return the index of this rank in a mesh, None outside of it."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    rank = 0
    for index, size in zip(coordinate, mesh.shape, strict=True):
        rank = rank * size + index
    return rank


@private.constant_while_compiling
def _groups(mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the names of the groups over which to sum, one after the other, for the sum over a
    mesh.
    """
    if mesh.ndim > 1 and mesh.size() == dist.get_world_size():
        return (dist.group.WORLD.group_name,)  # type: ignore[union-attr]
    return tuple(mesh.get_group(d).group_name for d in range(mesh.ndim) if mesh.shape[d] > 1)


def all_gather_row(row: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the `row` of each rank of `mesh`, the same table on all of them, from one all-reduce.

    The all-reduce is a sum in which each rank fills its own row, so a row may hold sums, maxima,
    inf and NaN, and nothing overflows. A mesh of several dimensions that does not hold all ranks
    takes one all-reduce per dimension.
    """
    rank = _mesh_rank(mesh)
    if rank is None:
        return row[None]
    table = _in_place_of_rank(row, rank, math.prod(mesh_sizes(mesh)))
    for group in _groups(mesh):
        table = all_reduce(table, "sum", group)
    return table


def all_gather_row_of_group(row: Tensor, group: Group | None) -> Tensor:
    """`all_gather_row` over the ranks of a process group."""
    group = resolve_group(group)
    table = _in_place_of_rank(row, dist.get_rank(group), dist.get_world_size(group))
    return all_reduce(table, "sum", group)


def _in_place_of_rank(row: Tensor, rank: int, size: int) -> Tensor:
    """Return a table of zeros with the row of this rank."""
    return F.pad(row[None], (0, 0, rank, size - 1 - rank))
