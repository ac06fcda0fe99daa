"""Arithmetic over lists of dense, real tensors: on an accelerator in few operators for any number
of tensors, but for a clamp to a tensor.

Plain operators are used while compiling, where both kinds fuse equally well, and under torch.func
transforms, which have no rules for lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import private
from .._torch.dtypes import cast_saturating, largest_within, unscaled_dtype, wide_dtype
from .._torch.flat_buffer import bounded_groups, join, split_copies, split_views
from .._torch.memory_order import is_gapless
from .._torch.private import listops
from .._torch.tracing import (
    PLAIN_OR_FAKE,
    PLAIN_TYPES,
    host_can_decide,
    host_can_read,
    is_on_a_graph,
    traced,
    under_transform,
)
from .._torch.transfer import to_device


def can_use_foreach(tensors: Sequence[Tensor]) -> bool:
    """Return True if list operators may make a pass over these tensors. Transforms and graphs of
    torch.autograd have no rules for them, and a compiler needs none.
    """
    return not (traced() or is_on_a_graph(tensors))


def is_on_accelerator(tensor: Tensor) -> bool:
    """Return True if every operator on `tensor` has a launch cost, however small it is."""
    return not tensor.is_cpu


def by_kind(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the indices of tensors by device and dtype: list kernels take one kind at a time."""
    kinds = [(tensor.device, tensor.dtype) for tensor in tensors]
    if len(set(kinds)) <= 1:
        return [list(range(len(tensors)))] if tensors else []
    return [[i for i, kind in enumerate(kinds) if kind == one] for one in dict.fromkeys(kinds)]


def detach_and_clone(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return `[t.detach().clone() for t in tensors]`."""
    # Beside a tensor of a subclass, a list operator would make all of them tensors of it.
    if traced() or not PLAIN_OR_FAKE.issuperset(map(type, tensors)):
        return [tensor.detach().clone() for tensor in tensors]
    return clone_list([t.detach() if t.requires_grad else t for t in tensors])


def clone_list(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return `[t.clone() for t in tensors]` for tensors off every graph, outside of a trace."""
    if tensors and tensors[0].is_cpu:
        return list(private.clone_list(list(tensors)))
    copies = list(tensors)
    for indices in by_kind(tensors):
        cloned = private.clone_list([tensors[index] for index in indices])
        for index, copy in zip(indices, cloned, strict=True):
            copies[index] = copy
    return copies


def detach_and_copy_(targets: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Call `t.copy_(n)` for each pair, which must have one dtype and device."""
    if traced():
        for target, tensor in zip(targets, tensors, strict=True):
            target.copy_(tensor)
        return
    targets = [target.detach() if target.requires_grad else target for target in targets]
    tensors = [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]
    copy_list_(targets, tensors)


def copy_list_(targets: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Call `detach_and_copy_` for tensors off every graph, outside of a trace."""
    if targets and targets[0].is_cpu:
        listops.copy_(targets, tensors)
        return
    for indices in by_kind(targets):
        listops.copy_([targets[i] for i in indices], [tensors[i] for i in indices])


# ---- arithmetic ----------------------------------------------------------------------------------


def divide(tensors: Sequence[Tensor], divisor: Tensor, *, in_place: bool = False) -> list[Tensor]:
    """Divide each tensor by a 0-d tensor, float16 in float32, others in their own dtype."""
    ops = torch.div, listops.div, listops.div_
    if all([unscaled_dtype(t.dtype) is t.dtype for t in tensors]):
        return _with_operand(*ops, tensors, divisor, in_place=in_place)
    wide = cast_list_saturating(tensors, [unscaled_dtype(tensor.dtype) for tensor in tensors])
    is_fresh = all(new is not old for new, old in zip(wide, tensors, strict=True))
    return _with_operand(*ops, wide, divisor, in_place=in_place or (is_fresh and not traced()))


def multiply(tensors: Sequence[Tensor], factor: Tensor, *, in_place: bool) -> list[Tensor]:
    """Multiply each tensor by a 0-d tensor, in its own dtype."""
    ops = torch.mul, listops.mul, listops.mul_
    return _with_operand(*ops, tensors, factor, in_place=in_place)


def _with_operand(
    plain: Callable[..., Tensor],
    listed: Callable[..., Any],
    listed_: Callable[..., Any],
    tensors: Sequence[Tensor],
    operand: Tensor,
    *,
    in_place: bool,
) -> list[Tensor]:
    # List operators have no derivative with respect to the operand.
    if not can_use_foreach([*tensors, operand]):
        results = [_in_own_dtype(plain, tensor, operand) for tensor in tensors]
        if in_place and torch.compiler.is_compiling():
            return [old.copy_(new) for old, new in zip(tensors, results, strict=True)]
        return results
    results = list(tensors)
    with torch.no_grad():
        for indices in by_kind(tensors):
            # A 0-d tensor and a 0-d operand promote to the wider of their dtypes.
            rows = [t.reshape(1) if t.ndim == 0 else t for t in (tensors[i] for i in indices)]
            if in_place:
                listed_(rows, operand)
                continue
            for index, new in zip(indices, listed(rows, operand), strict=True):
                results[index] = new if tensors[index].ndim else new.reshape(())
    return results


def _in_own_dtype(plain: Callable[..., Tensor], tensor: Tensor, operand: Tensor) -> Tensor:
    if tensor.ndim:
        return plain(tensor, operand).to(tensor.dtype)
    return plain(tensor.reshape(1), operand).reshape(()).to(tensor.dtype)


def clamp(
    tensors: Sequence[Tensor], bound: float | Tensor, *, in_place: bool = False
) -> list[Tensor]:
    """Clamp each tensor to plus and minus `bound`; NaN stays NaN."""
    operand = [bound] if isinstance(bound, Tensor) else []
    if not can_use_foreach([*tensors, *operand]):
        return [_clamped(tensor, bound) for tensor in tensors]
    if not tensors or operand or not is_on_accelerator(tensors[0]):  # lists take bounds as numbers
        return [_clamped(tensor, bound, in_place=in_place) for tensor in tensors]
    results = list(tensors)
    for indices in by_kind(tensors):
        limit = _within_range(bound, tensors[indices[0]].dtype)  # type: ignore[arg-type]
        bounded = [tensors[index] for index in indices]
        if in_place:
            listops.clamp_min_(bounded, -limit)
        else:
            bounded = listops.clamp_min(bounded, -limit)
        listops.clamp_max_(bounded, limit)
        for index, tensor in zip(indices, bounded, strict=True):
            results[index] = tensor
    return results


def _clamped(tensor: Tensor, bound: float | Tensor, *, in_place: bool = False) -> Tensor:
    if isinstance(bound, Tensor):
        limit: Any = to_device(bound, tensor.device, tensor.dtype)
    else:
        limit = _within_range(bound, tensor.dtype)
    return tensor.clamp_(-limit, limit) if in_place else tensor.clamp(-limit, limit)


def _within_range(bound: float, dtype: torch.dtype) -> float:
    # torch refuses a finite bound beyond the range of the dtype.
    return bound if bound == math.inf else min(float(bound), torch.finfo(dtype).max)


def cast_list_saturating(
    tensors: Sequence[Tensor], dtypes: torch.dtype | Sequence[torch.dtype]
) -> list[Tensor]:
    """Return `cast_saturating` of each. A tensor that has its dtype already is returned as it
    is.
    """
    if isinstance(dtypes, torch.dtype):
        dtypes = [dtypes] * len(tensors)
    pairs = list(zip(tensors, dtypes, strict=True))
    if all(tensor.dtype is dtype for tensor, dtype in pairs):
        return list(tensors)
    if not (can_use_foreach(tensors) and is_on_accelerator(tensors[0])):
        return [cast_saturating(tensor, dtype) for tensor, dtype in pairs]
    results = list(tensors)
    kinds: dict[Any, list[int]] = {}
    for index, (tensor, dtype) in enumerate(pairs):
        if tensor.dtype is not dtype:
            kinds.setdefault((tensor.device, tensor.dtype, dtype), []).append(index)
    with torch.no_grad():
        for (_, old, new), indices in kinds.items():
            sources = [
                tensors[i] if is_gapless(tensors[i]) else tensors[i].contiguous() for i in indices
            ]
            wanted = [torch.empty_like(tensor, dtype=new) for tensor in sources]
            listops.copy_(wanted, _bounded(sources, old, new))
            for index, tensor in zip(indices, wanted, strict=True):
                results[index] = tensor
    return results


def _bounded(tensors: list[Tensor], old: torch.dtype, new: torch.dtype) -> Sequence[Tensor]:
    """Return the tensors with finite values, unless they are complex, clamped to the range of
    `new`.
    """
    limit = None if old.is_complex else largest_within(old, new)
    if limit is None:
        return tensors
    bounded: Sequence[Tensor] = listops.clamp_min(tensors, -limit)
    listops.clamp_max_(bounded, limit)
    # This restores inf, and adds too little to finite values to change a bit of `new`.
    listops.add_(bounded, tensors, alpha=torch.finfo(old).tiny)
    return bounded


# ---- old or new ----------------------------------------------------------------------------------


_pointer = torch.UntypedStorage.data_ptr


def where(
    skip: Tensor, old: Sequence[Tensor], new: Sequence[Tensor], *, in_place: bool = False
) -> list[Tensor]:
    """Return `[torch.where(skip, o, n) for o, n in zip(old, new)]`, written into `old` if
    `in_place`. An accelerator needs few operators for any number of small tensors. On a CPU the
    flag is read, and what it chooses is copied.
    """
    if host_can_decide([skip], old, new):
        if not in_place:
            return detach_and_clone(old if skip else new)
        if not skip:
            overwrite(old, new)
        return list(old)
    if not (can_use_foreach([*old, *new]) and all(map(is_on_accelerator, old))):
        # All are selected before any is written, because a new value may alias an old one.
        chosen = [torch.where(skip, a, b) for a, b in zip(old, new, strict=True)]
        return [a.copy_(c) for a, c in zip(old, chosen, strict=True)] if in_place else chosen
    results = list(old)
    with torch.no_grad():
        kinds = [(a.device, a.dtype, b.dtype) for a, b in zip(old, new, strict=True)]
        for indices in bounded_groups(old, kinds):
            olds, news = ([column[i] for i in indices] for column in (old, new))
            flag = skip.to(olds[0].device)
            if len(olds) == 1:
                results[indices[0]] = torch.where(flag, olds[0], news[0])
                continue
            joined = torch.where(flag, join(olds, olds), join(news, olds))
            chosen = split_views(joined, olds) if in_place else split_copies(joined, olds, olds)
            for index, result in zip(indices, chosen, strict=True):
                results[index] = result
    if in_place:
        detach_and_copy_(old, results)
        return list(old)
    return results


def overwrite(old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    """Write `new`, of which some may be other tensors of `old`, into `old`."""
    memories = set(map(_pointer, map(Tensor.untyped_storage, old)))
    shared = not memories.isdisjoint(map(_pointer, map(Tensor.untyped_storage, new)))
    detach_and_copy_(old, detach_and_clone(new) if shared else new)


# ---- sums ----------------------------------------------------------------------------------------

_IN_RANGE = 2.0**-100  # above it no bit of a factor is lost in float32
# The dtypes of sums that `_add_where_` adds to as its terms are.
_LIST_SUM_DTYPES = {torch.float32, torch.float64}


def multiply_by_number_(tensors: Sequence[Tensor], number: float) -> None:
    """Multiply tensors by a number, in place. On a CPU torch would wrap it once for each, in three
    times the time.
    """
    operand: float | Tensor = number
    dtypes = {tensor.dtype for tensor in tensors}
    are_plain = all([tensor.is_cpu and type(tensor) in PLAIN_TYPES for tensor in tensors])
    if dtypes in ({torch.float32}, {torch.float64}) and are_plain:
        operand = torch.full((), number, dtype=dtypes.pop(), device="cpu")
    listops.mul_(tensors, operand)


def weighted_sum(
    sums: list[Tensor],
    new: list[Tensor],
    weight: float | Tensor,
    good: bool | Tensor,
    *,
    old_weight: float | Tensor | None = None,
    scale: Tensor | None = None,
    in_place: bool,
) -> list[Tensor]:
    """Return `sums * old_weight + new / scale * weight` if `good`, else `sums`. None leaves a
    factor out.

    `weight` is a number only if `good` is True. The textbook `sums + (new - sums) * weight` would
    overflow on opposite signs.
    """
    factors = [factor for factor in (weight, old_weight, scale) if isinstance(factor, Tensor)]
    if (
        traced()
        or is_on_a_graph([*sums, *new, *factors])
        or not {total.dtype for total in sums} <= _LIST_SUM_DTYPES
    ):
        pairs = zip(sums, new, strict=True)
        totals = [_weighted(*pair, weight, good, old_weight, scale) for pair in pairs]
        if in_place and not under_transform():
            return [total.copy_(other) for total, other in zip(sums, totals, strict=True)]
        return totals
    sums = sums if in_place else detach_and_clone(sums)
    on_host = not isinstance(weight, Tensor) or host_can_read([weight], sums)
    if not sums or (on_host and not bool(good)):
        return sums
    with torch.no_grad():
        if on_host:
            number = weight.item() if isinstance(weight, Tensor) else weight
            if scale is not None and _IN_RANGE < number / scale.item() < 1 / _IN_RANGE:
                number, scale = number / scale.item(), None  # a pass less
            if old_weight is not None:
                multiply_by_number_(sums, float(old_weight))
            listops.add_(sums, new if scale is None else divide(new, scale), alpha=number)
            return sums
        new = new if scale is None else divide(new, scale)
    if old_weight is not None:
        sums = multiply(sums, old_weight, in_place=True)  # type: ignore[arg-type]
    _add_where_(sums, new, weight, good)  # type: ignore[arg-type]
    return sums


def _weighted(
    total: Tensor,
    new: Tensor,
    weight: float | Tensor,
    good: bool | Tensor,
    old_weight: float | Tensor | None,
    scale: Tensor | None,
) -> Tensor:
    """Return `weighted_sum` of one tensor, for a derivative, a compiler or a narrow sum."""
    wide = wide_dtype(total.dtype)
    added = new.to(wide) if scale is None else new.to(wide) / scale.to(wide)
    if isinstance(good, Tensor):
        added = torch.where(good, added, 0)
    added = added * (weight.to(wide) if isinstance(weight, Tensor) else weight)
    if isinstance(old_weight, Tensor):
        old_weight = old_weight.to(wide)
    kept = total.to(wide) if old_weight is None else total.to(wide) * old_weight
    return cast_saturating(kept + added, total.dtype)


def _add_where_(
    targets: Sequence[Tensor], new: Sequence[Tensor], factor: Tensor, good: Tensor
) -> None:
    """Add `new * factor` to each target in place if `good`; otherwise `new` may be NaN."""
    kinds = [(a.device, a.dtype, b.dtype) for a, b in zip(targets, new, strict=True)]
    with torch.no_grad():
        for indices in bounded_groups(targets, kinds):
            sums, addends = ([column[i] for i in indices] for column in (targets, new))
            dtype = sums[0].dtype
            terms = torch.where(good, join(addends, sums), 0).to(dtype) * factor.to(dtype)
            listops.add_(sums, split_views(terms, sums))
