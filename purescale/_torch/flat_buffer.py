"""Many tensors of one kind as one flat tensor, and back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch.memory_order import are_contiguous, are_gapless, is_gapless
from .._torch.private import listops


def view_or_join(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements of tensors of one kind in one flat tensor, each in the order of its
    memory. Without a copy if they are already the `split_views` of one flat tensor.
    """
    first, numels = tensors[0], list(map(Tensor.numel, tensors))
    size, start = sum(numels), first.storage_offset()
    offsets = list(itertools.accumulate(numels[:-1], initial=start))
    if list(map(Tensor.storage_offset, tensors)) == offsets and are_gapless(tensors):
        storages = map(Tensor.untyped_storage, tensors)
        if len(set(map(torch.UntypedStorage.data_ptr, storages))) == 1:
            return first.detach().as_strided((size,), (1,), start)
    with torch.no_grad():
        return join(tensors, tensors)


def join_row_major(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements of tensors of one kind in one flat copy, each in row-major order."""
    return torch.cat(list(map(Tensor.flatten, tensors)))


def split_views(flat: Tensor, likes: Sequence[Tensor]) -> list[Tensor]:
    """Return views of `flat` laid out like these if they are gapless, the inverse of
    `view_or_join`.
    """
    parts = torch.split(flat, list(map(Tensor.numel, likes)))
    if are_contiguous(likes):
        return list(map(Tensor.view_as, parts, likes))
    return [
        part.as_strided(like.shape, like.stride()) if is_gapless(like) else part.view(like.shape)
        for part, like in zip(parts, likes, strict=True)
    ]


# The number of elements that are joined at a time: it bounds the memory for copies.
MAX_JOINED_NUMEL = 2**22
# The number that the caches of a CPU hold, for many operators over the same elements.
CACHE_NUMEL = 2**18


def bounded_groups(
    tensors: Sequence[Tensor], kinds: Sequence[Any], max_numel: int = MAX_JOINED_NUMEL
) -> list[list[int]]:
    """Return the indices of tensors of one kind, in groups of at most so many elements. A larger
    tensor is a group of its own.
    """
    groups: list[list[int]] = []
    last: dict[Any, tuple[list[int], int]] = {}
    for index, (tensor, kind) in enumerate(zip(tensors, kinds, strict=True)):
        group, size = last.get(kind, ([], max_numel + 1))
        if size + tensor.numel() > max_numel:
            group, size = [], 0
            groups.append(group)
        group.append(index)
        last[kind] = group, size + tensor.numel()
    return groups


def join(tensors: Sequence[Tensor], likes: Sequence[Tensor]) -> Tensor:
    """Return the elements of tensors of one kind in one flat tensor, in fresh memory, each in the
    memory order of its like.
    """
    if are_contiguous(tensors) and are_contiguous(likes):
        return join_row_major(tensors)
    flat = tensors[0].new_empty(sum(map(Tensor.numel, tensors)))
    listops.copy_(split_views(flat, likes), list(tensors))
    return flat


def split_copies(flat: Tensor, tensors: Sequence[Tensor], likes: Sequence[Tensor]) -> list[Tensor]:
    """Return the inverse of `join`, in tensors like these in fresh memory."""
    new = [torch.empty_like(tensor) for tensor in tensors]
    listops.copy_(new, split_views(flat, likes))
    return new
