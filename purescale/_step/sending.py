"""The mean of a window on its way to the other ranks of a group, from the last backward on."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .._distributed.buckets import Reduction, mean_divisor, reduction_of
from .._distributed.process_group import all_reduce
from .._grads.accumulate import is_weight
from .._step.window_mean import WindowMean
from .._torch import donation
from .._tree.gradients import Gradients, as_gradients
from .._tree.pytree import Leaves


def start_reduction(mean: WindowMean, buffers: Leaves) -> Reduction | None:
    """Return the reduction to which `send_gradient` sends the mean, and `buffers` after it; None
    without a group, in a trace, or if the last microbatch has to be measured first.
    """
    options, group = mean.options, mean.options.group
    if group is None or options.max_retries or not (mean.stays_scaled and mean.in_place):
        return None
    # The divisor depends on the weights only, so it is known before the gradients.
    weights = mean.weights.values
    weight = torch.where(is_weight(weights), weights, 0).sum()
    divisor = mean_divisor(weight, all_reduce(weight, "sum", group))
    return reduction_of(mean.loss_and_grads.params.leaves, buffers, divisor, group)


def send_gradient(
    mean: WindowMean, reduction: Reduction, tensor_index: int, gradient: list[Tensor]
) -> None:
    """Add a gradient of the last microbatch to the mean, and send it."""
    new = as_gradients(donation.take_ownership(gradient))
    last = len(mean.weights.is_counted) - 1
    before = None if mean.sums is None else [mean.sums[tensor_index]]
    sums = mean.with_share(before, new.tensors, last)
    tensors = [torch.zeros_like(t) for t in new.tensors] if sums is None else sums
    index = mean.loss_and_grads.layout.leaf_indices[tensor_index]
    reduction.put(index, new.as_leaves(tensors)[0], is_last_use=True, nan=_sent_for_nan(mean))


def send_mean(mean: WindowMean, grads: Gradients, buffers: Leaves, divisor: Any) -> Reduction:
    """Send the gradients of a mean that the last backward has not sent, as `send_gradient` does."""
    leaves, params = grads.leaves, mean.loss_and_grads.params.leaves
    reduction = reduction_of(params, buffers, divisor, mean.options.group)
    for index in reversed(range(len(params))):
        if index in reduction.bucket_of:
            reduction.put(index, leaves[index], nan=_sent_for_nan(mean))
    return reduction


def _sent_for_nan(mean: WindowMean) -> float | None:
    """Return the value that a NaN of a mean is sent as; None if no norm is measured, so that it is
    sent as it is. It is inf for several microbatches, as with `StatsOptions(is_sum=True)`.
    """
    if mean.options.clip.norm_type is None and not mean.options.rule_traits.takes_amax:
        return None
    return math.nan if len(mean.weights.is_counted) == 1 else math.inf
