"""DTensors as the shards that this rank holds, and back; what all ranks of a mesh know together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from . import _torch
from ._collectives import all_reduce


def among(leaves: Sequence[Any]) -> bool:
    """Whether a leaf is a DTensor, or a parameter that is one."""
    return any(issubclass(kind, DTensor) for kind in set(map(type, leaves)))


class Shards(NamedTuple):
    """Leaves, and what this rank holds of them: of a plain one all. No more DTensors are in there."""

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
    local = [_local(leaf, on_graph) if isinstance(leaf, DTensor) else leaf for leaf in given]
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


def like(leaf: Any, other: Any) -> Any:
    """`leaf` where `other` lies: the gradient of a sharded parameter may come otherwise."""
    if not (isinstance(leaf, DTensor) and isinstance(other, DTensor)):
        return leaf
    return (
        leaf
        if leaf.placements == other.placements
        else leaf.redistribute(placements=other.placements)
    )


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


def _local(leaf: DTensor, on_graph: bool) -> Tensor:
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
    for placement, size in zip(leaf.placements, leaf.device_mesh.shape, strict=True):
        count *= size if placement.is_replicate() else 1
    return count


def rows(row: Tensor, mesh: DeviceMesh) -> Tensor:
    """`row` of each rank of `mesh`, the same on all of them, from one all-reduce.

    A sum in which each rank has a place of its own: so a row may hold sums, maxima, inf and NaN
    alike, and nothing overflows. It costs 8 bytes a number and rank. A mesh of several dimensions
    that is not all there is takes one all-reduce for each.
    """
    place = mesh.get_coordinate()
    if mesh.size() == 1 or place is None:
        return row[None]
    mine = 0
    for index, size in zip(place, mesh.shape, strict=True):
        mine = mine * size + index
    table = F.pad(row[None], (0, 0, mine, mesh.size() - 1 - mine))
    if mesh.ndim > 1 and mesh.size() == dist.get_world_size():
        return all_reduce(table, "sum", None)
    for dim, size in enumerate(mesh.shape):
        table = all_reduce(table, "sum", (mesh, dim)) if size > 1 else table
    return table
