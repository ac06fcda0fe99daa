"""Gradients that are sent to the other ranks during the last backward of a window."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._distributed.buckets import Reduction, mean_divisor, reduction_of
from .._distributed.process_group import all_reduce
from .._grads.accumulate import is_weight
from .._step.step_options import StepOptions
from .._step.window_mean import GradientMean, ScaledSum
from .._tree.gradients import as_gradients
from .._tree.tree import Leaves


class GradientSender:
    """A mean whose last microbatch is added and sent gradient by gradient.

    Args:
        options: The settings of the step.
        mean: The mean of the microbatches before the last one.
        buffers: The leaves that are sent after the gradients.
    """

    def __init__(self, options: StepOptions, mean: ScaledSum, buffers: Leaves) -> None:
        self._mean, self._last = mean, len(mean.weights.is_counted) - 1
        self._nan = sent_for_nan(options, self._last + 1)
        # The divisor depends on the weights only, so it is known before the gradients.
        vector = mean.weights.vector
        counted = torch.where(is_weight(vector), vector, 0).sum()
        divisor = mean_divisor(counted, all_reduce(counted, "sum", options.group))
        params = mean.value_and_grad.params.leaves
        self.reduction: Reduction = reduction_of(params, buffers, divisor, options.group)

    @staticmethod
    def of(options: StepOptions, mean: GradientMean, buffers: Leaves) -> GradientSender | None:
        """Return the sender of a window; None without a group, in a trace, or if each microbatch
        has to be measured first.
        """
        alone = options.group is None or options.max_retries
        if alone or not (isinstance(mean, ScaledSum) and mean.owned):
            return None
        return GradientSender(options, mean, buffers)

    def send(self, place: int, gradient: Tensor) -> None:
        """Add a gradient of the last microbatch to the mean, and send it."""
        mean = self._mean
        new = as_gradients([gradient])
        before = None if mean.sums is None else [mean.sums[place]]
        sums = mean.with_share(before, new.tensors, self._last)
        tensors = [torch.zeros_like(t) for t in new.tensors] if sums is None else sums
        gradient = new.restore(tensors)[0]
        index = mean.value_and_grad.present[place]
        self.reduction.put(index, gradient, owned=True, nan=self._nan)


def sent_for_nan(options: StepOptions, num_microbatches: int) -> float | None:
    """Return the value that a NaN of a mean over microbatches is sent as; None if no norm is
    measured, so that it is sent as it is. It is inf for several, as with
    `StatsOptions(of_sum=True)`.
    """
    if options.clip.norm_type is None and not options.takes_amax:
        return None
    return math.nan if num_microbatches == 1 else math.inf
