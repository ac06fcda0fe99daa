"""Stats of gradients over the ranks of a mesh, and over the parts of a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._distributed.process_group import (
    Group,
    all_gather_row,
    all_gather_row_of_group,
    mesh_sizes,
    num_replicas,
)
from .._grads.local_stats import LocalStats, local_stats, norm_of_norms
from .._torch import dtensor
from .._torch.dtypes import widest_float


def stats_over_meshes(
    tensors: Sequence[Tensor],
    source_leaves: Sequence[Any],
    divisor: Tensor,
    norm_type: float | None,
) -> LocalStats:
    """Return the stats of shards of these leaves, which `divisor` unscales, the same on all ranks
    of their meshes. Plain tensors count once. Every rank makes the same reductions, also with an
    empty shard.
    """
    shards: dict[Any, list[Tensor]] = {(None, 1): []}
    for tensor, source in zip(tensors, source_leaves, strict=True):
        sharded = dtensor.is_dtensor(source)
        key = (source.device_mesh, num_replicas(source)) if sharded else (None, 1)
        shards.setdefault(key, []).append(tensor)
    stats = {key: local_stats(shard, divisor, norm_type) for key, shard in shards.items()}
    plain = stats.pop((None, 1))
    amax = _amax_or_inf(plain, divisor)
    norms = [] if plain.norm is None else [plain.norm]
    # The largest mesh last, so that its ranks learn the results of the smaller meshes too.
    meshes = dict.fromkeys(mesh for mesh, _ in stats)
    for mesh in sorted(meshes, key=lambda mesh: math.prod(mesh_sizes(mesh))):
        mesh_norms = []
        for (other, replicas), local in stats.items():
            if other == mesh:
                amax = torch.maximum(amax, _amax_or_inf(local, divisor))
                if local.norm is not None and norm_type is not None:
                    # r replicas are r rows of the table, which multiplies the norm by r**(1/p).
                    mesh_norms.append(local.norm * replicas ** (-1 / norm_type))
        row = [amax] if norm_type is None else [amax, norm_of_norms(mesh_norms, norm_type)]
        table = all_gather_row(torch.stack(row), mesh)
        amax = table[:, 0].amax()
        norms += [] if norm_type is None else [norm_of_norms(table[:, 1].unbind(), norm_type)]
    return _combine_stats(amax, norms, norm_type)


def stats_over_group(
    local: LocalStats, divisor: Tensor, norm_type: float | None, group: Group | None
) -> LocalStats:
    """Return the stats of a model whose parts are on the ranks of `group`, the same on all of them,
    from one reduction.
    """
    row = [_amax_or_inf(local, divisor)]
    if local.norm is not None:
        row.append(local.norm.to(row[0].dtype))
    table = all_gather_row_of_group(torch.stack(row), group)
    norms = [] if norm_type is None else list(table[:, 1].unbind())
    return _combine_stats(table[:, 0].amax(), norms, norm_type)


def _combine_stats(amax: Tensor, norms: Sequence[Tensor], norm_type: float | None) -> LocalStats:
    """Return the stats of all parts. The norm is inf or NaN if `amax` is."""
    if norm_type is None:
        return LocalStats({amax.dtype: amax}, None)
    norm = norm_of_norms(norms, norm_type)
    norm = torch.where(torch.isfinite(amax), norm, norm.clamp(min=torch.inf))
    return LocalStats({amax.dtype: amax}, norm)


def _amax_or_inf(local: LocalStats, divisor: Tensor) -> Tensor:
    """Return the largest magnitude of any dtype, or inf if an element is not finite over `divisor`:
    a bfloat16 may overflow at a value that float32 holds.
    """
    zero = torch.zeros((), dtype=widest_float(divisor.device), device=divisor.device)
    amaxes = [amax.to(zero.dtype) for amax in local.scaled_amaxes.values()]
    amax = torch.stack([zero, *amaxes]).amax()
    return torch.where(local.are_finite(divisor), amax, torch.inf)
