"""How large gradients of several ranks are: one reduction per mesh of shards, and one over ranks
that hold other parts of a model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._distributed.mesh import all_gather_row, all_gather_row_of_group, mesh_sizes, num_replicas
from .._grads.grad_stats import LocalStats, local_stats, norm_of_norms
from .._torch.dtypes import widest_float


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
    plain = stats.pop((None, 1))
    amax = _amax(plain, divisor)
    norms = [] if plain.norm is None else [plain.norm]
    # The largest mesh last: then all ranks know of everything, be it another mesh's.
    meshes = dict.fromkeys(mesh for mesh, _ in stats)
    for mesh in sorted(meshes, key=lambda mesh: math.prod(mesh_sizes(mesh))):
        here = []
        for (other, replicas), local in stats.items():
            if other == mesh:
                amax = torch.maximum(amax, _amax(local, divisor))
                if local.norm is not None and norm_type is not None:
                    # A norm is that of its replicas over the p-th root of their number.
                    here.append(local.norm * replicas ** (-1 / norm_type))
        row = [amax] if norm_type is None else [amax, norm_of_norms(here, norm_type)]
        table = all_gather_row(torch.stack(row), mesh)
        amax = table[:, 0].amax()
        norms += [] if norm_type is None else [norm_of_norms(table[:, 1].unbind(), norm_type)]
    return _stats_of(amax, norms, norm_type)


def stats_of_parts(
    local: LocalStats, divisor: Tensor, norm_type: float | None, group: Any
) -> LocalStats:
    """The stats of a model of which each rank of `group` holds another part, the same on all of
    them, from one reduction.
    """
    row = [_amax(local, divisor)]
    if local.norm is not None:
        row.append(local.norm.to(row[0].dtype))
    table = all_gather_row_of_group(torch.stack(row), group)
    norms = [] if norm_type is None else list(table[:, 1].unbind())
    return _stats_of(table[:, 0].amax(), norms, norm_type)


def _stats_of(amax: Tensor, norms: Sequence[Tensor], norm_type: float | None) -> LocalStats:
    if norm_type is None:
        return LocalStats({amax.dtype: amax}, None)
    norm = norm_of_norms(norms, norm_type)
    norm = torch.where(torch.isfinite(amax), norm, norm.clamp(min=torch.inf))
    return LocalStats({amax.dtype: amax}, norm)


def _amax(local: LocalStats, divisor: Tensor) -> Tensor:
    """The largest magnitude of any dtype; inf where one is not finite over `divisor`, since what a
    float32 holds a bfloat16 need not.
    """
    wide = widest_float(divisor.device)
    tops = [value.to(wide) for value in local.amax.values()]
    amax = torch.stack(tops).amax() if tops else torch.zeros((), dtype=wide, device=divisor.device)
    return torch.where(local.are_finite(divisor), amax, torch.inf)
