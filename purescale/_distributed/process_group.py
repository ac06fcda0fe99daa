"""The process group of a call, and an all-reduce over it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch import private
from .._torch.dtensor import arrived
from .._tree.scalars import short_repr

Group: TypeAlias = dist.ProcessGroup


def all_reduce(tensor: Tensor, op: str, group: Group | str | None) -> Tensor:
    """Return the "sum" or "max" of `tensor` over the ranks of `group`, a process group, its name,
    or None for all ranks; out of place.
    """
    group = resolve_group(group)
    if not torch.compiler.is_compiling():
        # Waited for here, because a view of a pending result would not wait for it.
        with naming_other_ranks():
            return arrived(private.all_reduce(tensor, op, group))
    # Inductor (torch 2.13) reduces a result of torch.cat in place, although the inputs of
    # torch.cat share its memory: read again, they are the sum. A negation has its own memory.
    return -private.all_reduce(-tensor, "min" if op == "max" else op, group)


@contextmanager
def naming_other_ranks() -> Iterator[None]:
    """Add the likely cause to torch's error about a collective that ran out of time or lost a rank:
    a RuntimeError with gloo, and with NCCL a class of it.
    """
    try:
        yield
    except RuntimeError as error:
        error.add_note(
            "This rank was in a collective. Likely cause: another rank may have raised before it "
            "came here, or have ended; the first error is in the output of that rank. Fix: look "
            "for it there; `torchrun --log-dir logs --redirects 3` writes the output of each rank "
            "into a file of its own."
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


def check_group(group: Any) -> Group:
    """`resolve_group` for callers that need a `dist.ProcessGroup`."""
    group = resolve_group(group)
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group is {short_repr(group)} ({type(group).__name__}); expected a process group. "
            "Fix: `dist.group.WORLD`, or `mesh.get_group('dp')` of a DeviceMesh."
        )
    return group
