"""Rounding to half precision on the bits of float32, because compilers remove pairs of casts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._torch.tracing import under_transform

_HAS_BATCHING_RULE = torch.__version__ >= "2.12"


def bitcast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Equal to `x.view(dtype)` for a dtype of the same width, read-only. It also works under
    `torch.vmap` of torch 2.11, which has no batching rule for that view.
    """
    if _HAS_BATCHING_RULE or not under_transform():
        return x.view(dtype)
    copied: Tensor = _bitcast(x, dtype)
    return copied


@torch.library.custom_op("purescale::bitcast", mutates_args=())
def _bitcast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.view(dtype).clone()


@_bitcast.register_fake
def _(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


@_bitcast.register_vmap
def _(info: Any, in_dims: Any, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Any]:
    return _bitcast(x, dtype), in_dims[0]


def rounded_on_bits(
    x: Tensor,
    dtype: torch.dtype,
    added: Callable[[Tensor, int], Tensor],
    multiple: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return a real tensor in half precision. Finite values stay finite, inf and NaN stay.

    `added(bits, n)` is below 2**n and is added to the bits before the last n are dropped.
    `multiple(x)` returns the rounded multiple of 2**-24 for magnitudes that are subnormal in
    float16.
    """
    limit = torch.finfo(dtype).max
    bounded = x.clamp(-limit, limit).to(torch.float32)
    bits = bitcast(bounded, torch.int32)
    if dtype is torch.bfloat16:
        halves = (bits + added(bits, 16)) >> 16
    else:
        magnitude = bits & 0x7FFFFFFF
        # The exponent of float16 begins at 2**-14; numbers below are multiples of 2**-24.
        normal = (magnitude - (112 << 23) + added(magnitude, 13)) >> 13
        small = multiple(bounded.abs().clamp(max=2.0**-14))
        halves = torch.where(magnitude < 113 << 23, small, normal) | ((bits >> 16) & 0x8000)
    rounded = bitcast(halves.to(torch.int16), dtype)
    return torch.where(torch.isfinite(x), rounded, x.to(dtype))


def nearest_on_bits(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `saturating` of a float32 or float64 tensor to half precision, with the same bits."""

    def half_and_even(bits: Tensor, n: int) -> Tensor:
        return ((bits >> n) & 1) + ((1 << (n - 1)) - 1)

    def multiple(small: Tensor) -> Tensor:
        # Numbers from 0.5 to 1 are multiples of 2**-24: the sum rounds to the nearest.
        return bitcast(small + 0.5, torch.int32) - 0x3F000000

    return rounded_on_bits(x, dtype, half_and_even, multiple)
