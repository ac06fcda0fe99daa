"""DTensors as the shards that this rank holds, and back; what all ranks of a mesh know together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from .._distributed.process_group import all_reduce
from .._torch import private as _torch


def among(leaves: Sequence[Any]) -> bool:
    """Whether a leaf is a DTensor, or a parameter that is one."""
    return any(issubclass(kind, DTensor) for kind in set(map(type, leaves)))


class Shards(NamedTuple):
    """Leaves, and what this rank holds of them, in plain tensors: of a plain one all."""

    given: Sequence[Any]
    local: list[Any]
    none: bool  # of the given ones is a DTensor

    def back(self, results: Sequence[Any]) -> list[Any]:
        """What was computed of each shard, as a DTensor that lies as the given one does."""
        if self.none:
            return list(results)
        rows = zip(self.given, self.local, results, strict=True)
        return [_back(leaf, local, result) for leaf, local, result in rows]


def shards(leaves: Sequence[Any], *, on_graph: bool = True) -> Shards:
    """The shards of leaves; what is a sum over ranks is summed first. Not `on_graph`: off that of
    torch.autograd.
    """
    if not among(leaves):
        return Shards(leaves, leaves if isinstance(leaves, list) else list(leaves), none=True)
    given = [whole(leaf) if isinstance(leaf, DTensor) else leaf for leaf in leaves]
    local = [shard(leaf, on_graph=on_graph) for leaf in given]
    return Shards(given, local, none=False)


def whole(leaf: DTensor) -> DTensor:
    """A DTensor whose value is a sum over ranks, as a gradient of a replicated parameter can be,
    with that sum on all of them.
    """
    if not any(placement.is_partial() for placement in leaf.placements):
        return leaf
    return leaf.redistribute(
        placements=[Replicate() if p.is_partial() else p for p in leaf.placements]
    )


def full(leaf: Any) -> Any:
    """All of a DTensor on every rank, on its graph; anything else as it is."""
    return leaf.full_tensor() if isinstance(leaf, DTensor) else leaf


def like(leaf: Any, other: Any) -> Any:
    """`leaf` where `other` lies: the gradient of a sharded parameter may come otherwise."""
    if not (isinstance(leaf, DTensor) and isinstance(other, DTensor)):
        return leaf
    return (
        leaf
        if leaf.placements == other.placements
        else leaf.redistribute(placements=other.placements)
    )


def alike(leaves: list[Any], others: list[Any]) -> list[Any]:
    """Each of the leaves as `like` has it."""
    if not among(leaves):
        return leaves
    return [like(leaf, other) for leaf, other in zip(leaves, others, strict=True)]


def apart(leaf: Any, other: Any) -> str:
    """What keeps two leaves from lying alike, and the cure; nothing where they do or could."""
    here, there = (x.device_mesh if isinstance(x, DTensor) else None for x in (leaf, other))
    if here is there or here == there:
        return ""
    if here is None or there is None:
        a, b = ("a plain tensor" if mesh is None else "a DTensor" for mesh in (here, there))
        return (
            f"is {a}, and {b}: a rank cannot tell what it holds of the other. Cure: "
            "`distribute_tensor(t, mesh, placements)` of the plain one."
        )
    return f"lies over {here}, and over {there}. Cure: both over one mesh."


def is_sharded(leaf: Any) -> bool:
    """Whether a rank holds a part of `leaf` only."""
    return isinstance(leaf, DTensor) and not all(p.is_replicate() for p in leaf.placements)


def shard(leaf: Any, *, on_graph: bool = True) -> Any:
    """What this rank holds of a DTensor, itself and no copy; anything else as it is."""
    if not isinstance(leaf, DTensor):
        return leaf
    if torch.compiler.is_compiling() or (
        on_graph and leaf.requires_grad and torch.is_grad_enabled()
    ):
        return leaf.to_local()
    return _torch.arrived(_torch.local(leaf))


def _back(leaf: Any, local: Any, result: Any) -> Any:
    if (
        not isinstance(leaf, DTensor)
        or not isinstance(result, Tensor)
        or isinstance(result, DTensor)
    ):
        return result
    if result is local:  # written where it stands
        return leaf.detach() if leaf.requires_grad else leaf
    shape: Any = leaf.shape
    return DTensor.from_local(
        result,
        leaf.device_mesh,
        leaf.placements,
        run_check=False,
        shape=shape,
        stride=leaf.stride(),
    )


# ---- over a mesh ---------------------------------------------------------------------------------


def copies(leaf: DTensor) -> int:
    """How many ranks hold one and the same element."""
    count = 1
    for placement, size in zip(leaf.placements, sizes(leaf.device_mesh), strict=True):
        count *= size if placement.is_replicate() else 1
    return count


# Dynamo does not look into a mesh that it has no source for, as that of what was computed.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def sizes(mesh: DeviceMesh) -> tuple[int, ...]:
    """How many ranks there are in each dimension of a mesh."""
    return tuple(mesh.shape)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _place(mesh: DeviceMesh) -> int | None:
    """Of this rank among those of a mesh; `None` outside."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    place = 0
    for index, size in zip(coordinate, mesh.shape, strict=True):
        place = place * size + index
    return place


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _groups(mesh: DeviceMesh) -> tuple[str, ...]:
    """Those over which a sum is one over all ranks of a mesh, by name."""
    if mesh.ndim > 1 and mesh.size() == dist.get_world_size():
        return (dist.group.WORLD.group_name,)  # type: ignore[union-attr]
    return tuple(mesh.get_group(d).group_name for d in range(mesh.ndim) if mesh.shape[d] > 1)


def rows(row: Tensor, mesh: DeviceMesh) -> Tensor:
    """`row` of each rank of `mesh`, the same on all of them, from one all-reduce.

    A sum in which each rank has a place of its own: so a row may hold sums, maxima, inf and NaN
    alike, and nothing overflows. It costs 8 bytes a number and rank. A mesh of several dimensions
    that is not all there is takes one all-reduce for each.
    """
    place = _place(mesh)
    if place is None:
        return row[None]
    after = math.prod(sizes(mesh)) - 1 - place
    table = F.pad(row[None], (0, 0, place, after))
    for group in _groups(mesh):
        table = all_reduce(table, "sum", group)
    return table
