"""The mean gradients of a window: the weights of its microbatches, and two ways to average them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

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


class GradientMean:
    """The mean gradients of a window."""

    def __init__(
        self,
        options: StepOptions,
        weights: MicrobatchWeights,
        value_and_grad: ValueAndGrad,
    ) -> None:
        self.options = options
        self.weights, self.value_and_grad = weights, value_and_grad
        self.scale, self.owned = value_and_grad.scale, value_and_grad.owns_gradients
        self.overflows: list[Tensor] = []  # of each microbatch that was measured

    def add(self, index: int, grads: Gradients) -> bool | Tensor:
        """Average gradients in. Return True if their microbatch counts for the buffers."""
        raise NotImplementedError

    def result(self) -> Gradients:
        """Return the mean: zeros if nothing counted."""
        raise NotImplementedError

    def _gradients(self, tensors: list[Tensor], scale: Tensor | None) -> Gradients:
        likes, dense_real = self.value_and_grad.params.leaves, self.value_and_grad.dense_real
        return Gradients(as_tensor_list(tensors), likes, dense_real, scale, owned=self.owned)


class ScaledSum(GradientMean):
    """A mean that stays scaled: the gradients of a single microbatch, unchanged, or the sum of
    those of several times their shares. If one overflows, so does the sum.
    """

    sums: list[Tensor] | None = None  # before the first that counts

    def add(self, index: int, grads: Gradients) -> bool | Tensor:
        if self.is_single:
            self.sums = grads.tensors
            return True  # an overflow skips the whole step
        if self.options.max_retries:
            self.overflows.append(measure(grads, self.scale).overflow)
        self.sums = self.with_share(self.sums, grads.tensors, index)
        return self.weights.is_counted[index]

    @property
    def is_single(self) -> bool:
        return len(self.weights.is_counted) == 1 and self.options.group is None

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
        sums = self.sums
        if sums is None:
            sums = as_gradients(self.value_and_grad.zeros()).tensors
        return self._gradients(sums, self.scale)


class RunningMean(GradientMean):
    """An unscaled mean of the microbatches that do not overflow."""

    accum: AccumState  # from the first microbatch on

    def add(self, index: int, grads: Gradients) -> bool | Tensor:
        overflow = measure(grads, self.scale).overflow
        self.overflows.append(overflow)
        if index == 0:
            self.accum = init_accum(grads.tensors)
        self.accum = add(self.accum, grads, self.weights.vector[index], overflow, owned=self.owned)
        return self.weights.is_counted[index] & ~overflow  # it is dropped

    def result(self) -> Gradients:
        return self._gradients(self.accum.grads, None)
