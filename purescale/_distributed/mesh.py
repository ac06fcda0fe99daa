"""All-gather of a row of numbers over a device mesh or a process group."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .._distributed.process_group import Group, all_reduce, resolve_group
from .._torch.tracing import constant_while_compiling

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def num_replicas(leaf: DTensor) -> int:
    """Return the number of ranks that store the same element."""
    count = 1
    for placement, size in zip(leaf.placements, mesh_sizes(leaf.device_mesh), strict=True):
        count *= size if placement.is_replicate() else 1
    return count


# Dynamo cannot trace into the mesh of a computed DTensor, for which it has no source.
@constant_while_compiling
def mesh_sizes(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return the number of ranks in each dimension of a mesh."""
    return tuple(mesh.shape)


@constant_while_compiling
def _mesh_rank(mesh: DeviceMesh) -> int | None:
    """Return the index of this rank in a mesh, None outside of it."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    rank = 0
    for index, size in zip(coordinate, mesh.shape, strict=True):
        rank = rank * size + index
    return rank


@constant_while_compiling
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
