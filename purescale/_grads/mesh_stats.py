"""How large leaves are of which a rank may hold a part only: one reduction a mesh tells it all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._grads import grad_stats as _extent
from .._grads.grad_stats import Extent
from .._torch import dtensor as _dtensor
from .._torch import foreach as _foreach


def extent(
    leaves: Sequence[Any],
    device: torch.device,
    norm_type: float | None = None,
    scale: Tensor | None = None,
    *,
    dense: bool = False,
    exact: bool = False,
    over: Sequence[Any] | None = None,
) -> Extent:
    """`_extent.extent` of leaves of which some may be DTensors; with them it is the same on all
    ranks of their meshes, and plain leaves count once.

    `over`: where `leaves` are shards, leaves that lie as they do. Every rank makes the same
    collectives, whatever it holds: with a shard without an element too.
    """
    if dense or not _dtensor.among(leaves if over is None else over):
        return _extent.extent(leaves, device, norm_type, scale, dense=dense, exact=exact)
    given, local, _ = _dtensor.shards(leaves) if over is None else (over, leaves, False)
    lists: dict[Any, list[Tensor]] = {(None, 1): []}
    for leaf, part in zip(given, local, strict=True):
        spread = isinstance(leaf, DTensor)
        place = (leaf.device_mesh, _dtensor.copies(leaf)) if spread else (None, 1)
        if part is not None:
            lists.setdefault(place, []).append(part)
    sizes = {
        place: _extent.extent(some, device, norm_type, scale, exact=exact)
        for place, some in lists.items()
    }

    wide = _foreach.widest_float(device)
    zero = torch.zeros((), dtype=wide, device=device)
    # What is finite as a float32 may not be over the scale, as a float64 it may: kept apart.
    tops = [[zero], [zero]]

    def gather(size: Extent, weight: float) -> Tensor:
        for top in size.tops:
            tops[1 if top.dtype is torch.float64 else 0].append(top.to(wide))
        return zero if size.norm is None else size.norm.to(wide) * weight

    norms = [gather(sizes.pop((None, 1)), 1.0)]
    # The largest mesh last: then all ranks know of everything, be it another mesh's.
    for mesh in sorted(dict.fromkeys(mesh for mesh, _ in sizes), key=_size):
        # A norm is that of its copies over the p-th root of their number.
        here = [
            gather(size, number ** (-1 / (norm_type or 1)))
            for (other, number), size in sizes.items()
            if other == mesh
        ]
        row = [torch.stack(column).amax() for column in tops]
        row += [] if norm_type is None else [_norm(torch.stack(here), norm_type)]
        everywhere = _dtensor.rows(torch.stack(row), mesh)
        tops = [[everywhere[:, column].amax()] for column in (0, 1)]
        norms += [] if norm_type is None else [_norm(everywhere[:, 2], norm_type)]
    (narrow,), (wider,) = tops
    narrow = narrow.to(torch.float32)
    if norm_type is None:
        return Extent([narrow, wider], None)
    norm, finite = (
        _norm(torch.stack(norms), norm_type),
        torch.isfinite(narrow) & torch.isfinite(wider),
    )
    return Extent([narrow, wider], torch.where(finite, norm, norm.clamp(min=torch.inf)))


def _size(mesh: DeviceMesh) -> int:
    return math.prod(_dtensor.sizes(mesh))


def _norm(norms: Tensor, norm_type: float) -> Tensor:
    """Of all from those of some; powers of them may be beyond what the dtype holds."""
    unit = norms.amax()
    unit = torch.where((unit > 0) & torch.isfinite(unit), unit, 1)
    norm: Tensor = torch.linalg.vector_norm(norms / unit, norm_type)
    return norm * unit


def all_finite(leaves: Sequence[Any], scale: Tensor) -> Tensor:
    """Whether every element of every `leaf / scale` is finite, on every rank: a 0-d bool tensor."""
    return _extent.fits(extent(leaves, scale.device), scale)
