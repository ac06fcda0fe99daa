"""The mean gradients of a window: the weights of its microbatches, their mean, and its way to other
ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._distributed.buckets import Reduction, mean_divisor, reduction_of
from .._distributed.process_group import all_reduce
from .._grads.accumulate import AccumState, add, as_weight, init_accum, is_weight
from .._grads.measure import measure
from .._step.step_options import StepOptions
from .._step.value_and_grad import ValueAndGrad
from .._torch.dtypes import wide_dtype, widest_float
from .._torch.foreach import weighted_sum
from .._torch.private import listops
from .._tree.gradients import Gradients, as_gradients
from .._tree.leaves import as_tensor_list
from .._tree.scalars import as_floats
from .._tree.tree import Leaves


class MicrobatchWeights(NamedTuple):
    """The weights of a window's microbatches, known before the first one runs."""

    vector: Any  # Tensor [k]; None without a group if all are 1 and only the mean is measured
    shares: Sequence[float | Tensor]  # of the mean: 0 or more, with sum 1
    is_counted: Sequence[bool | Tensor]  # the weight is valid and above 0


def weigh(options: StepOptions, microbatches: list[Any], scale: Tensor) -> MicrobatchWeights:
    """Return the weights of all microbatches, by `weight_fn` or equal."""
    number, weight_fn = len(microbatches), options.weight_fn
    if weight_fn is None:
        vector = None
        only_mean = options.on_nonfinite == "drop_window" and not options.max_retries
        if options.group is not None or not (number == 1 or only_mean):
            vector = torch.ones(number, dtype=widest_float(scale.device), device=scale.device)
        return MicrobatchWeights(vector, [1 / number] * number, [True] * number)
    returned = [weight_fn(microbatch) for microbatch in microbatches]
    vector = torch.stack([as_weight("weight_fn returned", weight, scale) for weight in returned])
    numbers = as_floats(returned)
    if numbers is not None:
        total = sum(numbers) or 1.0
        return MicrobatchWeights(vector, [n / total for n in numbers], [n > 0 for n in numbers])
    is_counted = is_weight(vector) & (vector > 0)
    return MicrobatchWeights(vector, shares(vector, is_counted).unbind(), is_counted.unbind())


def check_weights(
    microbatches: list[Any], weight_fn: Callable[[Any], float | Tensor], scale: Tensor
) -> None:
    """Refuse invalid return values of `weight_fn`."""
    for microbatch in microbatches:
        as_weight("weight_fn returned", weight_fn(microbatch), scale)


def shares(weight: Tensor, is_counted: Tensor) -> Tensor:
    """Return the weights of those that count over their sum, zeros if none does."""
    shares = torch.where(is_counted, weight, 0)
    return shares / torch.where(is_counted.any(), shares.sum(), 1)


# ---- the mean ------------------------------------------------------------------------------------


class WindowMean:
    """The mean gradients of a window so far.

    If an overflow skips the window, the mean stays scaled, so that an overflow in it is seen at the
    end: it is the gradients of a single microbatch, unchanged, or the sum of those of several times
    their shares. If an overflow drops its microbatch, the mean is an `AccumState`.
    """

    def __init__(
        self, options: StepOptions, weights: MicrobatchWeights, value_and_grad: ValueAndGrad
    ) -> None:
        self.options = options
        self.weights, self.value_and_grad = weights, value_and_grad
        self.scale, self.owned = value_and_grad.scale, value_and_grad.owns_gradients
        self.is_single = len(weights.is_counted) == 1 and options.group is None
        self.stays_scaled = self.is_single or options.on_nonfinite == "drop_window"
        self.sums: list[Tensor] | None = None  # before the first microbatch that counts
        self.accum: AccumState | None = None  # unless the mean stays scaled
        self.overflows: list[Tensor] = []  # of each microbatch that was measured

    def add(self, index: int, grads: Gradients) -> bool | Tensor:
        """Average gradients in. Return True if their microbatch counts for the buffers."""
        if self.is_single:
            self.sums = grads.tensors
            return True  # an overflow skips the whole step
        is_counted = self.weights.is_counted[index]
        if self.options.max_retries or not self.stays_scaled:
            self.overflows.append(measure(grads, self.scale).overflow)
        if self.stays_scaled:
            self.sums = self.with_share(self.sums, grads.tensors, index)
            return is_counted
        accum = init_accum(grads.tensors) if self.accum is None else self.accum
        weight, overflow = self.weights.vector[index], self.overflows[-1]
        self.accum = add(accum, grads, weight, overflow, owned=self.owned)
        return is_counted & ~overflow

    def with_share(
        self, sums: list[Tensor] | None, new: list[Tensor], index: int
    ) -> list[Tensor] | None:
        """Return `sums + new * share`, at least in float32, if microbatch `index` counts. None is
        an empty sum. The shares of a window sum to 1, so the sum does not overflow.
        """
        share, is_counted = self.weights.shares[index], self.weights.is_counted[index]
        if is_counted is False:
            return sums
        if sums is None and self.owned and not isinstance(share, Tensor):
            sums = [t.to(wide_dtype(t.dtype)) if t.dtype.itemsize < 4 else t for t in new]
            listops.mul_(sums, share)  # in place: these gradients are owned
            return sums
        sums = sums or [torch.zeros_like(n, dtype=wide_dtype(n.dtype)) for n in new]
        return weighted_sum(sums, new, share, is_counted, owned=self.owned)

    def result(self) -> Gradients:
        """Return the mean: zeros if nothing counted."""
        sums, scale = self.sums, self.scale
        if self.accum is not None:
            sums, scale = self.accum.grads, None
        elif sums is None:
            sums = as_gradients(self.value_and_grad.zeros()).tensors
        likes, dense_real = self.value_and_grad.params.leaves, self.value_and_grad.dense_real
        return Gradients(as_tensor_list(sums), likes, dense_real, scale, owned=self.owned)

    # ---- sent during the last backward ----

    def start_reduction(self, buffers: Leaves) -> Reduction | None:
        """Return the reduction to which `send` sends the mean, and `buffers` after it; None without
        a group, in a trace, or if the last microbatch has to be measured first.
        """
        group = self.options.group
        if group is None or self.options.max_retries or not (self.stays_scaled and self.owned):
            return None
        # The divisor depends on the weights only, so it is known before the gradients.
        vector = self.weights.vector
        weight = torch.where(is_weight(vector), vector, 0).sum()
        divisor = mean_divisor(weight, all_reduce(weight, "sum", group))
        return reduction_of(self.value_and_grad.params.leaves, buffers, divisor, group)

    def send(self, reduction: Reduction, place: int, gradient: Tensor) -> None:
        """Add a gradient of the last microbatch to the mean, and send it."""
        new, last = as_gradients([gradient]), len(self.weights.is_counted) - 1
        before = None if self.sums is None else [self.sums[place]]
        sums = self.with_share(before, new.tensors, last)
        tensors = [torch.zeros_like(t) for t in new.tensors] if sums is None else sums
        index = self.value_and_grad.present[place]
        nan = sent_for_nan(self.options, last + 1)
        reduction.put(index, new.restore(tensors)[0], owned=True, nan=nan)


def sent_for_nan(options: StepOptions, num_microbatches: int) -> float | None:
    """Return the value that a NaN of a mean over microbatches is sent as; None if no norm is
    measured, so that it is sent as it is. It is inf for several, as with
    `StatsOptions(of_sum=True)`.
    """
    if options.clip.norm_type is None and not options.takes_amax:
        return None
    return math.nan if num_microbatches == 1 else math.inf
