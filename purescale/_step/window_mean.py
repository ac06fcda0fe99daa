"""The mean gradients over the microbatches of a window, added one by one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._grads.accumulate import AccumState, add_microbatch, init_accum
from .._grads.measure import measure
from .._step.forward_backward import ForwardBackward
from .._step.prepare import PreparedStep
from .._torch import donation
from .._torch.dtypes import HALF, wide_dtype
from .._torch.foreach import multiply_by_number_, weighted_sum
from .._torch.private import listops
from .._tree.gradients import NOTHING_PENDING, Gradients, Pending
from .._tree.leaves import are_plain_dense, as_dense_real
from .._tree.pytree import Leaves

# The mean number of elements of a gradient above which it pays to add each one as it is made: that
# saves memory for all gradients, and costs a call for each.
_LARGE = 2**16


class WindowMean:
    """The mean gradients of a window so far.

    If an overflow skips the window, the mean stays scaled, so that an overflow in it is seen at the
    end: it is the sum of the gradients times their normalized weights. If an overflow drops its
    microbatch, the mean is an `AccumState`.
    """

    def __init__(self, prepared: PreparedStep, forward_backward: ForwardBackward) -> None:
        self.prepared, self.options, self.weights = prepared, prepared.options, prepared.weights
        self.forward_backward = forward_backward
        self.scale, self.off_graph = forward_backward.scale, forward_backward.off_graph
        self.pending = Pending(divisor=self.scale)
        self.sums: list[Any] | None = None  # before the first microbatch that counts
        self.accum: AccumState | None = None  # unless the mean stays scaled
        self.overflows: list[Tensor] = []  # of each microbatch that was measured

    @property
    def streams_gradients(self) -> bool:
        """True if each gradient can be added as its backward makes it, and is large: all those of a
        microbatch beside the mean need as much memory again.
        """
        param_list = self.forward_backward.flat_params.tensor_list
        return (
            self.off_graph
            and not self.options.measures_microbatches
            and not self.forward_backward.context.recorded_by_make_fx
            and param_list.dense_without_history
            and param_list.num_elements > _LARGE * len(param_list.tensors)
            and not any([isinstance(weight, Tensor) for weight in self.weights.normalized])
        )

    def add_gradient(
        self, microbatch_index: int, tensor_index: int, grad_cell: list[Tensor]
    ) -> None:
        """Average one gradient of a microbatch that counts in."""
        if self.sums is None:
            self.sums = [None] * len(self.forward_backward.present_params)
        if (total := self.sums[tensor_index]) is not None:
            weight = self.weights.normalized[microbatch_index]
            total.add_(as_dense_real(grad_cell.pop()), alpha=weight)
        else:
            new = [as_dense_real(donation.take_ownership(grad_cell)[0])]
            self.sums[tensor_index] = self.add_weighted(None, new, microbatch_index)[0]

    def add_microbatch_grads(self, microbatch_index: int, leaves: Leaves) -> bool | Tensor:
        """Add the gradients of a microbatch to the mean. Return True if it counts for the
        buffers.
        """
        param_list = self.forward_backward.flat_params.tensor_list
        grads = Gradients.of_leaves(leaves, self.pending, param_list=param_list)
        has_weight = self.weights.has_weight[microbatch_index]
        if self.options.measures_microbatches:
            self.overflows.append(measure(grads, self.scale)[0].overflow)
        if not self.options.drops_microbatches:
            self.sums = self.add_weighted(self.sums, grads.tensors, microbatch_index)
            return has_weight
        accum = init_accum(grads.tensors) if self.accum is None else self.accum
        weight, overflow = self.weights.unnormalized[microbatch_index], self.overflows[-1]
        self.accum = add_microbatch(accum, grads, weight, overflow, in_place=self.off_graph)
        return has_weight & ~overflow

    def add_weighted(
        self, sums: list[Tensor] | None, new: list[Tensor], microbatch_index: int
    ) -> Any:
        """Return `sums + new * weight`, at least in float32, if this microbatch counts. None is
        an empty sum. Normalized weights have a sum of at most 1, so this one does not overflow.
        """
        weight = self.weights.normalized[microbatch_index]
        has_weight = self.weights.has_weight[microbatch_index]
        if has_weight is False:
            return sums
        if self.off_graph and not isinstance(weight, Tensor):  # in place, and off every graph
            if sums is None:
                sums = new
                if any([n.dtype in HALF for n in new]):
                    sums = [n.to(wide_dtype(n.dtype)) for n in new]
                multiply_by_number_(sums, weight)
            else:
                listops.add_(sums, new, alpha=weight)
            return sums
        sums = sums or [torch.zeros_like(n, dtype=wide_dtype(n.dtype)) for n in new]
        return weighted_sum(sums, new, weight, has_weight, in_place=self.off_graph)

    def result(self) -> Gradients:
        """Return the mean: zeros if nothing counted."""
        sums, pending, source = self.sums, self.pending, self.forward_backward
        if self.accum is not None:
            sums, pending = self.accum.grads, NOTHING_PENDING
        elif sums is None:
            present = source.present_params
            zeros = [torch.zeros_like(p, dtype=wide_dtype(p.dtype)) for p in present]
            sums = Gradients.of_leaves(zeros).tensors
        leaves, param_list = source.flat_params.leaves, source.flat_params.tensor_list
        mean = Gradients.of_leaves(sums, pending, owned=self.off_graph, param_list=param_list)
        are_plain = param_list.dense_without_history or are_plain_dense(leaves)
        # It takes the form of the parameters.
        return mean._replace(source_leaves=None if are_plain else leaves)
