"""Dtypes for computation, casts that keep finite values finite, and rounding on bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._torch.tracing import host_can_read

HALF = (torch.float16, torch.bfloat16)
_PARTS = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}


def is_half(value: Any) -> bool:
    """Return True for a tensor in half precision."""
    return isinstance(value, Tensor) and value.dtype in HALF


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return `dtype`, or float32 if that is wider; complex64 for half complex."""
    return torch.promote_types(dtype, torch.float32)


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the two parts of a complex number; any other dtype unchanged."""
    return _PARTS.get(dtype, dtype)


WITHOUT_FLOAT64 = ("mps",)


def widest_float(device: torch.device) -> torch.dtype:
    """Return the widest dtype of the device, for a few 0-d tensors whose precision costs
    nothing.
    """
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def to_device(number: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return a few numbers on a device. The host does not wait for one that it sends; for one that
    it gets it must.
    """
    return number.to(device, dtype, non_blocking=number.is_cpu)


def send_once(
    numbers: tuple[Any, ...], device: torch.device, cache: dict[tuple[Any, ...], Tensor]
) -> Tensor:
    """Return whole numbers as a tensor on a device, which `cache` keeps. A graph cannot be captured
    while they are sent, and needs them at a fixed address.
    """
    if (numbers, device) in cache:
        return cache[numbers, device]
    tensor = to_device(torch.tensor(numbers, device="cpu"), device)
    if type(tensor) is Tensor:  # a fake one has no values for the next step
        cache[numbers, device] = tensor
    return tensor


def unscaled_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of an unscaled gradient: float32 for float16, whose range is too small.
    bfloat16 has the range of float32 and stays.
    """
    return torch.float32 if dtype is torch.float16 else dtype


def cast_saturating(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `tensor.to(dtype)`, but finite values stay finite if `dtype` has a smaller range."""
    if tensor.dtype is dtype:
        return tensor
    limit = None if tensor.is_complex() else largest_within(tensor.dtype, dtype)
    if limit is None:
        return tensor.to(dtype)
    if host_can_read([tensor]):
        # A sum is finite only if every element is, and takes a tenth of the work below.
        narrow = tensor.to(dtype)
        if math.isfinite(narrow.detach().sum()):
            return narrow
    bounded = tensor.clamp(-limit, limit)
    return torch.where(torch.isfinite(tensor), bounded, tensor).to(dtype)


def largest_within(old: torch.dtype, new: torch.dtype) -> float | None:
    """Return the largest number of `old` that `new` holds; None if `new` holds all of them."""
    limit = torch.finfo(new).max
    if limit >= torch.finfo(old).max:
        return None
    part, exponent = math.frexp(limit)
    step = torch.finfo(old).eps / 2  # bfloat16 lacks 65504, which would round to 65536
    return math.ldexp(part // step * step, exponent)


# ---- rounding on the bits of float32, because compilers remove pairs of casts --------------------


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
