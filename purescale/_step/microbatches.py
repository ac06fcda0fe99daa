"""The stages `weigh_microbatches` and `accumulate_microbatches`: the mean gradients over the
microbatches of a window.
"""

from __future__ import annotations

import functools
import operator
import types
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .._distributed.buckets import Reduction, mean_divisor
from .._grads.accumulate import as_weight, is_valid_weight
from .._step.forward_backward import ForwardBackward, LossFn, check_unwritten
from .._step.memory import ArgumentMemory
from .._step.options import TrainStepOptions
from .._step.prepare import PreparedStep
from .._step.reduce import send_gradient, send_mean, start_reduction
from .._step.window_mean import WindowMean
from .._step.window_result import (
    MicrobatchWeights,
    Totals,
    WindowResult,
    all_reduce_totals,
    compute_totals,
    normalize_weights,
)
from .._torch.donation import Pointers, storage_pointers
from .._torch.dtypes import widest_float
from .._torch.tracing import is_on_a_graph, under_derivative
from .._tree import pytree
from .._tree.gradients import Gradients, Pending
from .._tree.leaves import versions
from .._tree.pytree import FlatTree, Leaves
from .._tree.scalars import as_floats
from .._tree.select import select_leaves


def weigh_microbatches(
    options: TrainStepOptions, microbatches: list[Any], scale: Tensor
) -> MicrobatchWeights:
    """Return the weights of all microbatches, by `weight_fn` or equal."""
    num_microbatches, weight_fn = len(microbatches), options.weight_fn
    if weight_fn is None:
        ones = None
        if options.group is not None or (num_microbatches > 1 and options.measures_microbatches):
            widest = widest_float(scale.device)
            ones = torch.ones(num_microbatches, dtype=widest, device=scale.device)
        normalized = [1 / num_microbatches] * num_microbatches
        return MicrobatchWeights(ones, normalized, [True] * num_microbatches)
    returned = [weight_fn(microbatch) for microbatch in microbatches]
    weights = torch.stack([as_weight("weight_fn returned", weight, scale) for weight in returned])
    floats = as_floats(returned)
    if floats is not None:
        total = sum(floats) or 1.0
        return MicrobatchWeights(weights, [n / total for n in floats], [n > 0 for n in floats])
    has_weight = is_valid_weight(weights) & (weights > 0)
    return MicrobatchWeights(
        weights, normalize_weights(weights, has_weight).unbind(), has_weight.unbind()
    )


# ---- the window ----------------------------------------------------------------------------------


def accumulate_microbatches(
    prepared: PreparedStep,
    scale: Tensor,
    memory: ArgumentMemory,
    *,
    loss_fn: LossFn | None = None,
    flat_buffers: FlatTree | None = None,
) -> WindowResult:
    """Return the weighted mean of the microbatches' gradients and losses, and the buffers after
    them.

    With a group, loss and totals are over all ranks. Gradients, unless they are sent already, and
    buffers are still of this rank; `reduce_window` averages both. `loss_fn` and `flat_buffers`
    stand in for those of the step.
    """
    flat_state, options, microbatches = prepared.flat_state, prepared.options, prepared.microbatches
    params, buffers = flat_state.params, flat_buffers or flat_state.buffers
    differentiable = options.optimizer.differentiable and is_on_a_graph(
        pytree.all_tensors([params.leaves, buffers.leaves, scale, microbatches])
    )
    forward_backward = ForwardBackward(
        params,
        flat_state.optimizer_inputs.param_structure,
        buffers,
        scale,
        loss_fn or options.loss_fn,
        flat_state.optimizer_inputs.context,
        differentiable=differentiable,
    )
    if options.group is not None and (forward_backward.create_graph or under_derivative()):
        raise ValueError(
            "a derivative is taken through a step over a group: the gradients of other ranks "
            "arrive without a graph. Fix: group=None, with the microbatches of all ranks on one."
        )
    before = versions(memory.batch_tensors)
    if len(microbatches) == 1 and options.group is None:
        window = _accumulate_one(prepared, forward_backward, memory)
    else:
        window = _accumulate_several(prepared, forward_backward, memory)
    check_unwritten(memory.batch_tensors, before)
    return window


def _accumulate_one(
    prepared: PreparedStep, forward_backward: ForwardBackward, memory: ArgumentMemory
) -> WindowResult:
    """Return the result of a single microbatch. Its gradients are the mean, still scaled."""
    microbatch, pointers = _make_microbatch(prepared.microbatches[0], memory.pointers)
    out = forward_backward.run(forward_backward.flat_buffers.leaves, microbatch, pointers)
    grads = Gradients.of_leaves(
        out.grads,
        Pending(divisor=forward_backward.scale),
        owned=out.owned,
        param_list=forward_backward.flat_params.tensor_list,
    )
    loss, totals_row, _ = _mean_loss_and_totals(prepared, [out.loss], [])
    return WindowResult(grads, loss, out.buffers, tuple(out.aux), totals_row=totals_row)


def _accumulate_several(
    prepared: PreparedStep, forward_backward: ForwardBackward, memory: ArgumentMemory
) -> WindowResult:
    """Return the mean over several microbatches, or over those of a group."""
    mean = WindowMean(prepared, forward_backward)
    options, microbatches, weights = prepared.options, prepared.microbatches, prepared.weights
    reduction, streams_gradients = start_reduction(mean), mean.streams_gradients
    buffers, last = forward_backward.flat_buffers.leaves, len(microbatches) - 1
    losses: list[Tensor] = []
    aux: tuple[Any, ...] = ()
    pointers: Pointers | None = memory.pointers
    for index, entry in enumerate(microbatches):
        counts = weights.has_weight[index]
        microbatch, pointers = _make_microbatch(entry, pointers)
        if reduction is not None and index == last:
            send = functools.partial(send_gradient, mean, reduction)
            out = forward_backward.run(buffers, microbatch, pointers, on_grad=send)
        elif streams_gradients and counts:
            add = functools.partial(mean.add_gradient, index)
            out = forward_backward.run(
                buffers, microbatch, pointers, on_grad=add, refuse_repeats=False
            )
        else:
            # The first gradients of a sum become the sum; others are only read.
            first = mean.sums is None and not options.drops_microbatches
            if forward_backward.create_graph:
                # The graph of one microbatch at a time: each is made again in the backward.
                arguments = buffers, microbatch, pointers
                out = checkpoint(forward_backward.run, *arguments, use_reentrant=False)
            else:
                out = forward_backward.run(buffers, microbatch, pointers, owned=first)
            counts = mean.add_microbatch_grads(index, out.grads)
        # If a microbatch is dropped, what it did to the buffers is too.
        if isinstance(counts, Tensor):
            buffers = select_leaves(~counts, buffers, out.buffers)
        elif counts:
            buffers = out.buffers
        losses.append(out.loss)
        aux += tuple(out.aux)
        del out, microbatch  # so that the next ones reuse their memory
    return _finish_window(mean, losses, buffers, aux, reduction)


# Functions in a window, each of which makes a microbatch when its turn comes. Other objects may be
# callable, as graphs of torch_geometric are.
FUNCTION_TYPES = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.MethodWrapperType,  # `iterator.__next__`
    functools.partial,
)


def _make_microbatch(entry: Any, pointers: Pointers | None) -> tuple[Any, Pointers | None]:
    """Return the microbatch of an entry of a window, and the storage pointers that the results from
    it on must not share: these, and those of what a function has made, which it may keep.
    """
    if not isinstance(entry, FUNCTION_TYPES):
        return entry, pointers
    microbatch = entry()
    if pointers is not None:
        pointers = {*pointers, *storage_pointers(pytree.all_tensors(microbatch))}
    return microbatch, pointers


def _finish_window(
    mean: WindowMean,
    losses: list[Tensor],
    buffers: Leaves,
    aux: tuple[Any, ...],
    reduction: Reduction | None,
) -> WindowResult:
    """Return the mean, the loss and the totals. With a group the mean is sent, and the other two
    are over all ranks.
    """
    options = mean.options
    loss, totals_row, rank_divisor = _mean_loss_and_totals(mean.prepared, losses, mean.overflows)
    if reduction is not None:  # the gradients are sent already
        grads = Gradients.of_dense([], mean.pending, owned=mean.off_graph)
    else:
        grads = mean.result()
        if options.group is not None:
            reduction = send_mean(mean, grads, rank_divisor)
    return WindowResult(
        grads,
        loss,
        buffers,
        aux,
        reduction=reduction,
        totals_row=totals_row,
        excludes_overflows=options.drops_microbatches,
    )


def _mean_loss_and_totals(
    prepared: PreparedStep, losses: list[Tensor], overflows: list[Tensor]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the mean loss of a window and its totals, over all ranks of a group, and the divisor
    of this rank's mean there.
    """
    options, context = prepared.options, prepared.flat_state.optimizer_inputs.context
    loss, weight = losses[0], prepared.weights.unnormalized
    dtype, device = loss.dtype, loss.device
    totals_row, rank_divisor = None, None
    if weight is not None:
        totals_row, means = compute_totals(weight, torch.stack(losses), overflows)
        if options.group is not None:
            own = Totals.of(totals_row)
            totals_row, means = all_reduce_totals(totals_row, means, options.group)
            drops = options.drops_microbatches
            in_mean = operator.attrgetter("good_weight" if drops else "valid_weight")
            rank_divisor = mean_divisor(in_mean(own), in_mean(Totals.of(totals_row)))
        loss_of_good, loss = means.unbind()
        if options.drops_microbatches:  # if all were dropped, the loss of all of them shows why
            loss = torch.where(Totals.of(totals_row).good_weight > 0, loss_of_good, loss)
    elif len(losses) > 1 and context.host_can_decide(losses):
        average = sum([loss.item() for loss in losses]) / len(losses)
        loss = torch.full((), average, dtype=dtype, device=device)
    elif len(losses) > 1:
        loss = torch.stack(losses).mean(dtype=widest_float(device)).to(dtype)
    return loss if loss.dtype is dtype else loss.to(dtype), totals_row, rank_divisor
