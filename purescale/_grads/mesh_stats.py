"""How large gradients are of which a rank may hold a shard: one reduction per mesh tells all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._distributed.mesh import all_gather_row, mesh_sizes, num_replicas
from .._grads.grad_stats import LocalStats, local_stats, norm_of_norms
from .._torch.dtypes import widest_float

# Columns of the row that a rank sends: what is finite as a float32 need not be as a bfloat16.
_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def mesh_stats(
    tensors: Sequence[Tensor], origins: Sequence[Any], divisor: Tensor, norm_type: float | None
) -> LocalStats:
    """The stats of shards that `divisor` unscales, the same on all ranks of their meshes; plain
    tensors count once.

    `origins`: the leaf that each tensor is the shard of. Every rank makes the same reductions,
    whatever it holds: with an empty shard too.
    """
    shards: dict[Any, list[Tensor]] = {(None, 1): []}
    for tensor, origin in zip(tensors, origins, strict=True):
        sharded = isinstance(origin, DTensor)
        key = (origin.device_mesh, num_replicas(origin)) if sharded else (None, 1)
        shards.setdefault(key, []).append(tensor)
    stats = {key: local_stats(some, divisor, norm_type) for key, some in shards.items()}
    wide = widest_float(divisor.device)
    amax = {dtype: torch.zeros((), dtype=wide, device=divisor.device) for dtype in _DTYPES}

    def add(local: LocalStats) -> None:
        for dtype, value in local.amax.items():
            column = dtype if dtype in amax else torch.float32
            amax[column] = torch.maximum(amax[column], value.to(wide))

    plain = stats.pop((None, 1))
    add(plain)
    norms = [] if plain.norm is None else [plain.norm]
    # The largest mesh last: then all ranks know of everything, be it another mesh's.
    for mesh in sorted(dict.fromkeys(mesh for mesh, _ in stats), key=_size):
        here = []
        for (other, replicas), local in stats.items():
            if other == mesh:
                add(local)
                if local.norm is not None and norm_type is not None:
                    # A norm is that of its replicas over the p-th root of their number.
                    here.append(local.norm * replicas ** (-1 / norm_type))
        row = [amax[dtype] for dtype in _DTYPES]
        row += [] if norm_type is None else [norm_of_norms(here, norm_type)]
        table = all_gather_row(torch.stack(row), mesh)
        amax = {dtype: table[:, column].amax() for column, dtype in enumerate(_DTYPES)}
        norms += [] if norm_type is None else [norm_of_norms(table[:, -1].unbind(), norm_type)]
    found = {dtype: amax[dtype].to(torch.promote_types(dtype, torch.float32)) for dtype in _DTYPES}
    if norm_type is None:
        return LocalStats(found, None)
    finite = torch.stack([torch.isfinite(value) for value in found.values()]).all()
    norm = norm_of_norms(norms, norm_type)
    return LocalStats(found, torch.where(finite, norm, norm.clamp(min=torch.inf)))


def _size(mesh: DeviceMesh) -> int:
    return math.prod(mesh_sizes(mesh))
