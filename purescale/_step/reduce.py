"""The stage `reduce_window`: the windows of all ranks of a group as one window, and a window that
is a part of a full one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._distributed.buckets import Reduction
from .._distributed.process_group import Group, all_reduce
from .._step.start import Start
from .._step.window_result import WindowResult
from .._torch.dtypes import wide_dtype
from .._tree.gradients import as_gradients
from .._tree.pytree import Leaves


def reduce_window(window: WindowResult, start: Start) -> WindowResult:
    """Return the window of all ranks, with the mean times `fraction`."""
    if window.reduction is not None:
        window = _reduce_over_ranks(window, window.reduction, start)
    if window.fraction is None:
        return window
    return window._replace(grads=window.grads.multiplied(window.fraction), fraction=None)


def _reduce_over_ranks(window: WindowResult, reduction: Reduction, start: Start) -> WindowResult:
    """Return one window for all ranks: the mean of their means by weight, and of the buffers after
    them.

    Gradients are on their way already. A buffer that no rank has changed keeps its bits. Of integer
    buffers the largest is taken, because they count.

    If only the mean is measured, no flag tells of an overflow: that of one rank is inf or NaN in
    the sum, so every rank measures the same. If a norm is measured, -inf is sent as inf, so that an
    overflow on several ranks has the norm inf, as in one process. `window_result.sum_ranks` has
    already reduced the flags of single microbatches and of weights.
    """
    params, before, after = start.params.leaves, start.buffers.leaves, window.buffers
    for index, (old, new) in enumerate(zip(before, after, strict=True), len(params)):
        if index in reduction.bucket_of:
            reduction.put(index, _change_and_value(old, new, reduction.divisor))
    largest = _largest_integers(before, after, reduction.group)
    sums = reduction.get()
    averaged = [
        other if pair is None else _apply_mean_change(old, *pair)
        for old, pair, other in zip(before, sums[len(params) :], largest, strict=True)
    ]
    grads = as_gradients(sums[: len(params)], window.grads.pending, owned=window.grads.owned)
    return window._replace(grads=grads, buffers=averaged, reduction=None)


def _change_and_value(old: Tensor, new: Tensor, divisor: Any) -> Tensor:
    """Return the two tensors of a buffer to be averaged: its change and its new value."""
    wide = new.to(wide_dtype(old.dtype))
    pair = torch.stack([wide - old.to(wide.dtype), wide])
    # A rank without a weight has the divisor inf, and inf / inf would be NaN.
    return torch.where(torch.isinf(divisor), 0, pair)


def _apply_mean_change(old: Tensor, change: Tensor, value: Tensor) -> Tensor:
    """Return a buffer after the mean of both. A buffer that counts uses its change, because the
    mean of values would be rounded if the number of ranks is not a power of 2. One that falls below
    half uses its value, which the change does not hold; so does one that comes from inf, such as a
    running minimum.
    """
    wide = old.to(value.dtype)
    near = torch.isfinite(change) & (value.abs() >= wide.abs() / 2)
    moved = torch.where(near, wide + change, value)
    return torch.where(change == 0, wide, moved).to(old.dtype)


def _largest_integers(before: Leaves, after: Leaves, group: Group | None) -> Leaves:
    """Return `after` with the largest value of each integer over the ranks, from one reduction."""
    places = [
        place
        for place, old in enumerate(before)
        if isinstance(old, Tensor) and not (old.is_floating_point() or old.is_complex())
    ]
    results = list(after)
    if not places:
        return results
    row = torch.cat([after[place].to(torch.int64).reshape(-1) for place in places])
    most = torch.split(all_reduce(row, "max", group), [after[p].numel() for p in places])
    for place, part in zip(places, most, strict=True):
        results[place] = part.reshape(after[place].shape).to(after[place].dtype)
    return results
