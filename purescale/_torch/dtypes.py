"""Dtypes for computation, and casts that keep finite values finite."""

from __future__ import annotations

import math
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
