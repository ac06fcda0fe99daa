"""Rounding to half precision on the bits of float32, because compilers remove pairs of casts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._torch.dtypes import wide_dtype


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
    limit = torch.finfo(dtype).max  # which another half dtype may not hold
    bounded = x.to(wide_dtype(x.dtype)).clamp(-limit, limit).to(torch.float32)
    bits = bounded.view(torch.int32)
    if dtype is torch.bfloat16:
        halves = (bits + added(bits, 16)) >> 16
    else:
        magnitude = bits & 0x7FFFFFFF
        # The exponent of float16 begins at 2**-14; numbers below are multiples of 2**-24.
        normal = (magnitude - (112 << 23) + added(magnitude, 13)) >> 13
        small = multiple(bounded.abs().clamp(max=2.0**-14))
        halves = torch.where(magnitude < 113 << 23, small, normal) | ((bits >> 16) & 0x8000)
    rounded = halves.to(torch.int16).view(dtype)
    return torch.where(torch.isfinite(x), rounded, x.to(dtype))


def nearest_on_bits(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `cast_saturating` of a float32 or float64 tensor to half precision, with the same
    bits.
    """

    def half_and_even(bits: Tensor, n: int) -> Tensor:
        return ((bits >> n) & 1) + ((1 << (n - 1)) - 1)

    def multiple(small: Tensor) -> Tensor:
        # Numbers from 0.5 to 1 are multiples of 2**-24: the sum rounds to the nearest.
        return (small + 0.5).view(torch.int32) - 0x3F000000

    return rounded_on_bits(x, dtype, half_and_even, multiple)
