"""The order of elements in memory, by which list kernels walk several tensors at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def is_gapless(tensor: Tensor) -> bool:
    """Return True if the elements fill a range of memory once each, in any order."""
    if tensor.is_contiguous():
        return True
    sizes = (*tensor.stride(), *tensor.shape)
    if torch.compiler.is_dynamo_compiling() or {*map(type, sizes)} != {int}:  # symbolic sizes
        return tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    size = 1
    for stride, count in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if count != 1:
            if stride != size:
                return False
            size *= count
    return True


def are_contiguous(tensors: Sequence[Tensor]) -> bool:
    """Return True if all are known to be contiguous. A fast check of the whole list."""
    return not torch.compiler.is_dynamo_compiling() and all(map(Tensor.is_contiguous, tensors))


def are_gapless(tensors: Sequence[Tensor]) -> bool:
    return are_contiguous(tensors) or all(map(is_gapless, tensors))


def same_memory_order(a: Tensor, b: Tensor) -> bool:
    """Return True if list kernels can walk two tensors of one shape by one pointer."""
    if a.stride() == b.stride():
        return is_gapless(a)
    return a.is_contiguous() and b.is_contiguous()


def all_same_memory_order(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return True if `same_memory_order` of each two tensors."""
    if are_contiguous(some) and are_contiguous(others):
        return True
    return all(map(same_memory_order, some, others))


def in_memory_order_of(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a tensor in the memory order of another one of its shape."""
    if same_memory_order(tensor, like):
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
