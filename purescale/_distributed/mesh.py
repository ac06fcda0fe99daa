"""What all ranks of a device mesh know together."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._distributed.process_group import all_reduce


def num_replicas(leaf: DTensor) -> int:
    """How many ranks hold one and the same element."""
    count = 1
    for placement, size in zip(leaf.placements, mesh_sizes(leaf.device_mesh), strict=True):
        count *= size if placement.is_replicate() else 1
    return count


# Dynamo does not look into a mesh that it has no source for, as that of what was computed.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def mesh_sizes(mesh: DeviceMesh) -> tuple[int, ...]:
    """How many ranks there are in each dimension of a mesh."""
    return tuple(mesh.shape)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _mesh_rank(mesh: DeviceMesh) -> int | None:
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


def all_gather_row(row: Tensor, mesh: DeviceMesh) -> Tensor:
    """`row` of each rank of `mesh`, the same on all of them, from one all-reduce.

    A sum in which each rank has a place of its own: so a row may hold sums, maxima, inf and NaN
    alike, and nothing overflows. It costs 8 bytes a number and rank. A mesh of several dimensions
    that is not all there is takes one all-reduce for each.
    """
    place = _mesh_rank(mesh)
    if place is None:
        return row[None]
    after = math.prod(mesh_sizes(mesh)) - 1 - place
    table = F.pad(row[None], (0, 0, place, after))
    for group in _groups(mesh):
        table = all_reduce(table, "sum", group)
    return table
