"""Lists of tensors, in operations whose number does not grow with the list. It knows no trees.

A column is one list: parameters, one moment, gradients, buffers.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import private as _torch
from .._torch.private import foreach, fused

_PLAIN = {Tensor, torch.nn.Parameter, _torch.FakeTensor}
_layout = operator.attrgetter("layout")
_EXACT = (torch.float32, torch.float64)
_HALF = (torch.float16, torch.bfloat16)


def counts_launches(tensor: Tensor) -> bool:
    """Whether an operation on `tensor` costs by itself, however small."""
    return not tensor.is_cpu


def is_plain(tensor: Tensor) -> bool:
    """Whether list operations take `tensor`: dense, of no type that wraps others, not lazily
    negated or conjugated.
    """
    plain = type(tensor) in _PLAIN and tensor.layout is torch.strided
    return plain and not (tensor.is_neg() or tensor.is_conj())


def are_plain(leaves: Sequence[Any]) -> bool:
    """Whether each of them `is_plain`, at one look."""
    if not set(map(type, leaves)) <= _PLAIN or not set(map(_layout, leaves)) <= {torch.strided}:
        return False
    return not (any(map(Tensor.is_neg, leaves)) or any(map(Tensor.is_conj, leaves)))


def clone(tensors: Sequence[Tensor]) -> list[Tensor]:
    """`[t.detach().clone() for t in tensors]`."""
    if torch.compiler.is_compiling():
        return [tensor.detach().clone() for tensor in tensors]
    copies: list[Any] = list(tensors)
    kinds: dict[Any, list[int]] = {}
    with torch.no_grad():
        for index, tensor in enumerate(tensors):
            if is_plain(tensor):
                kinds.setdefault((tensor.device, tensor.dtype), []).append(index)
            else:
                copies[index] = tensor.detach().clone()
        for places in kinds.values():
            for index, copy in zip(places, _clone([tensors[i] for i in places]), strict=True):
                copies[index] = copy
    return copies


_clone = _torch.clone_list


def is_gapless(tensor: Tensor) -> bool:
    """Whether its elements stand side by side, each in a place of its own, in whatever order."""
    if tensor.is_contiguous():
        return True
    if torch.compiler.is_compiling():  # sizes that it does not know cannot be sorted
        return tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    if tensor.is_nested:  # has no strides
        return False
    size = 1
    for stride, count in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if count != 1:
            if stride != size:
                return False
            size *= count
    return True


def walked_together(a: Tensor, b: Tensor) -> bool:
    """Whether list kernels walk two tensors of one shape by one pointer."""
    if a.stride() == b.stride():
        return is_gapless(a)
    return a.is_contiguous() and b.is_contiguous()


def room(like: Sequence[Tensor], dtype: torch.dtype, full: Tensor | None = None) -> list[Tensor]:
    """Memory for tensors of `dtype` laid out as these dense ones, `full` of a number: a piece for
    all of one layout, so that none of them can be donated.
    """
    rooms = list(like)
    layouts: dict[Any, list[int]] = {}
    for index, tensor in enumerate(like):
        layouts.setdefault((tensor.device, tensor.shape, tensor.stride()), []).append(index)
    for (device, shape, strides), places in layouts.items():
        apart = -(-shape.numel() // _ALIGNED) * _ALIGNED
        size, steps = (len(places), *shape), (apart, *strides)
        piece = torch.empty_strided(size, steps, dtype=dtype, device=device)
        if full is not None:
            piece.fill_(full)
        for index, part in zip(places, piece.unbind(), strict=True):
            rooms[index] = part
    return rooms


_ALIGNED = 64  # elements: list kernels read several at a time where a tensor begins at a multiple


# ---- old or new ----------------------------------------------------------------------------------


def chosen_together(old: Tensor, new: Tensor, *, own: bool) -> Any:
    """The kind of pairs with which `choose` does this one in one go; `None` where `torch.where` is
    to do it.

    `own`: `old` may be written into and `new` holds what nobody needs. Other pairs are copied
    first, which is worth it only where a launch is what costs.
    """
    dtype, few = old.dtype, counts_launches(old)
    if not (few or (own and dtype in _EXACT)) or not (is_plain(old) and is_plain(new)):
        return None
    if not (old.is_cpu or old.is_cuda):
        return None
    if dtype in _EXACT or dtype in _HALF:
        return (old.device, dtype) if walked_together(old, new) else None
    return (
        (old.device, dtype)
        if old.ndim == 0 and not (dtype.is_floating_point or dtype.is_complex)
        else None
    )


def choose(
    bad: Tensor, old: Sequence[Tensor], new: Sequence[Tensor], mine: Sequence[bool], *, spent: bool
) -> list[Tensor]:
    """`torch.where(bad, o, n)` of each pair of one kind, bit for bit; written into those of `old`
    that are `mine`.

    `spent`: `new` is memory that nobody else sees, and may hold anything afterwards. In half
    precision a NaN stays a NaN, of another payload.
    """
    kept = list(old)
    foreign = [index for index, own in enumerate(mine) if not own]
    if foreign:
        for index, copy in zip(foreign, clone([old[i] for i in foreign]), strict=True):
            kept[index] = copy
    with torch.no_grad():
        if kept[0].is_floating_point():
            keep_unless(
                bad.to(kept[0].device, torch.float32), kept, list(new) if spent else clone(new)
            )
        else:
            chosen = torch.where(bad.to(kept[0].device), torch.stack(kept), torch.stack(list(new)))
            foreach.copy_(kept, chosen.unbind())
    return kept


def keep_unless(bad: Tensor, targets: list[Tensor], new: list[Tensor]) -> None:
    """`target := new` unless `bad`, a flag in float32, in one pass; `new` holds anything
    afterwards.

    torch's SGD sets the momentum buffer to the gradient in its first step, which is all that is
    wanted of it.
    """
    numbers = {"lr": 0.0, "momentum": 1.0, "dampening": 0.0, "weight_decay": 0.0}
    flags = {"nesterov": False, "maximize": False, "is_first_step": True}
    fused.sgd_(new, new, targets, found_inf=bad, **numbers, **flags)
