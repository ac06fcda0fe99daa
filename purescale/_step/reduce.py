"""The stage `reduce_window`: the windows of all ranks of a group as one window, and a window that
is a part of a full one. The mean is sent to the other ranks from the last backward on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._distributed.buckets import Reduction, mean_divisor, reduction_of
from .._distributed.process_group import Group, all_reduce
from .._grads.accumulate import is_valid_weight
from .._step.prepare import FlatState, PreparedStep
from .._step.window_mean import WindowMean
from .._step.window_result import WindowResult, window_fraction
from .._torch import donation
from .._torch.dtypes import wide_dtype
from .._tree.gradients import Gradients
from .._tree.pytree import Leaves


def reduce_window(window: WindowResult, prepared: PreparedStep) -> WindowResult:
    """Return the window of all ranks. Of a part of a full window, mean and loss are multiplied by
    that part.
    """
    if window.reduction is not None:
        window = _reduce_over_ranks(window, window.reduction, prepared.flat_state)
    loss, num_microbatches = window.loss, len(prepared.microbatches)
    fraction = window_fraction(prepared.options, window.totals_row, num_microbatches, loss.device)
    if fraction is None:
        return window
    grads = window.grads.multiplied(fraction)
    return window._replace(grads=grads, loss=(loss * fraction).to(loss.dtype))


def _reduce_over_ranks(
    window: WindowResult, reduction: Reduction, flat_state: FlatState
) -> WindowResult:
    """Return one window for all ranks: the mean of their means by weight, and of the buffers after
    them.

    Gradients are on their way already. A buffer that no rank has changed keeps its bits. Of integer
    buffers the largest is taken, because they count.

    If only the mean is measured, no flag tells of an overflow: that of one rank is inf or NaN in
    the sum, so every rank measures the same, and a norm of NaN counts as inf.
    `window_result.all_reduce_totals` has already reduced the flags of single microbatches and of
    weights.
    """
    params, before, after = flat_state.params.leaves, flat_state.buffers.leaves, window.buffers
    for index, (old, new) in enumerate(zip(before, after, strict=True), len(params)):
        if index in reduction.bucket_of:
            reduction.put(index, _change_and_value(old, new, reduction.divisor))
    largest = _largest_integers(before, after, reduction.group)
    sums = reduction.get()
    averaged = [
        other if pair is None else _apply_mean_change(old, *pair)
        for old, pair, other in zip(before, sums[len(params) :], largest, strict=True)
    ]
    grads = Gradients.of_leaves(sums[: len(params)], window.grads.pending, owned=window.grads.owned)
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


# ---- on its way, from the last backward on -------------------------------------------------------


def start_reduction(mean: WindowMean) -> Reduction | None:
    """Return the reduction to which `send_gradient` sends the mean, and `reduce_window` the buffers
    after it; None without a group, in a trace, or if the last microbatch has to be measured first.
    """
    group = mean.options.group
    if group is None or mean.options.measures_microbatches or not mean.off_graph:
        return None
    # The divisor depends on the weights only, so it is known before the gradients.
    weights = mean.weights.unnormalized
    weight = torch.where(is_valid_weight(weights), weights, 0).sum()
    divisor = mean_divisor(weight, all_reduce(weight, "sum", group))
    return reduction_of(
        mean.forward_backward.flat_params.leaves,
        mean.prepared.flat_state.buffers.leaves,
        divisor,
        group,
    )


def send_gradient(
    mean: WindowMean, reduction: Reduction, tensor_index: int, grad_cell: list[Tensor]
) -> None:
    """Add a gradient of the last microbatch to the mean, and send it."""
    new = Gradients.of_leaves(donation.take_ownership(grad_cell))
    last = len(mean.weights.has_weight) - 1
    before = None if mean.sums is None else [mean.sums[tensor_index]]
    sums = mean.add_weighted(before, new.tensors, last)
    tensors = [torch.zeros_like(t) for t in new.tensors] if sums is None else sums
    index = mean.forward_backward.param_structure.leaf_indices[tensor_index]
    reduction.put(index, new.as_leaves(tensors)[0], is_last_use=True)


def send_mean(mean: WindowMean, grads: Gradients, divisor: Any) -> Reduction:
    """Send the gradients of a mean that the last backward has not sent, as `send_gradient` does."""
    leaves, params = grads.leaves, mean.forward_backward.flat_params.leaves
    reduction = reduction_of(
        params, mean.prepared.flat_state.buffers.leaves, divisor, mean.options.group
    )
    for index in reversed(range(len(params))):
        if index in reduction.bucket_of:
            reduction.put(index, leaves[index])
    return reduction
