"""The stage `accumulate` of a step: the mean gradients over the microbatches of a window."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._batch_norm.bn_stats import (
    add_batch,
    check_flat_buffers,
    init_bn_stats,
    reduce_stats_and_momenta,
    restore_running_stats,
    update_running_stats,
)
from .._batch_norm.capture import CaptureBatchNorm, layers_of, named_calls
from .._distributed.buckets import Reduction, mean_divisor, reduction_of
from .._distributed.process_group import all_reduce
from .._grads.accumulate import AccumState, add, as_weight, init_accum, is_weight
from .._grads.measure import GradStats, measure
from .._step.compiled_window import RegionCaller, can_repeat, keep_buffers_if_dropped
from .._step.step_options import StepOptions
from .._step.value_and_grad import ValueAndGrad
from .._torch import foreach, private
from .._torch.dtypes import wide_dtype, widest_float
from .._torch.private import listops
from .._torch.tracing import host_can_read, traced
from .._tree import tree as _tree
from .._tree.leaves import Normalized, lookup, normalize
from .._tree.scalars import as_float
from .._tree.tree import Flat, Leaves, Tree


class WindowGrads(NamedTuple):
    """The results of the microbatches of a step, on this rank or on all of a group."""

    grads: Normalized  # the mean
    scaled: bool  # the gradients are still scaled
    stats: GradStats | None  # of the mean; None before the reduction over a group
    loss: Tensor  # the mean over the microbatches that count
    must_skip: Tensor | None  # bool []: for any mean; None if the mean alone decides
    overflow: Tensor  # bool []: a microbatch with a weight overflowed; the scale follows it
    # bool []: fewer may overflow at a lower scale, because the loss of what overflowed is finite
    retryable: Tensor
    num_overflowed: Tensor
    buffers: Leaves
    aux: tuple[Any, ...]
    seen: list[Tensor]  # the tensors of the microbatches
    divisor: Tensor | None = None  # of this rank's mean in that of a group; inf without a weight
    reduction: Reduction | None = None  # on its way to the other ranks
    nan: float | None = None  # sent in place of a NaN of this rank; None: sent as it is


# ---- two ways to average -------------------------------------------------------------------------


def add_share(
    sums: list[Tensor] | None,
    new: list[Tensor],
    share: float | Tensor,
    counts: bool | Tensor,
    *,
    is_traced: bool,
) -> list[Tensor] | None:
    """Return `sums + new * share`, at least in float32, if it `counts`. None is an empty sum. The
    shares sum to 1, so the sum does not overflow.
    """
    if counts is False:
        return sums
    if is_traced or isinstance(share, Tensor):
        return _add_unread(sums, new, share, counts, is_traced=is_traced)
    if sums is None:
        sums = [t.to(wide_dtype(t.dtype)) if t.dtype.itemsize < 4 else t for t in new]
        listops.mul_(sums, share)  # in place: the step owns the gradients of a microbatch
    else:
        listops.add_(sums, new, alpha=share)
    return sums


def _add_unread(
    sums: list[Tensor] | None,
    new: list[Tensor],
    share: float | Tensor,
    counts: bool | Tensor,
    *,
    is_traced: bool,
) -> list[Tensor]:
    sums = sums or [torch.zeros_like(n, dtype=wide_dtype(n.dtype)) for n in new]
    if isinstance(share, Tensor) and not is_traced:
        foreach.add_where_(sums, new, share, counts)  # type: ignore[arg-type]
        return sums
    wide = [n.to(total.dtype) for total, n in zip(sums, new, strict=True)]
    if counts is not True:
        wide = [torch.where(counts, n, 0) for n in wide]  # type: ignore[arg-type]
    factors = [share.to(n.dtype) if isinstance(share, Tensor) else share for n in wide]
    return [total + n * f for total, n, f in zip(sums, wide, factors, strict=True)]


# ---- the window ----------------------------------------------------------------------------------


def accumulate_microbatches(
    options: StepOptions, params: Flat, buffers: Flat, scaler: Flat, microbatches: list[Any]
) -> WindowGrads:
    """Return the weighted mean of the microbatches' gradients and losses, and the buffers after
    them.

    With a group, losses and flags are those of all its ranks; gradients and buffers are still to be
    reduced.
    """
    sent_with = buffers.leaves
    once = options.bn_update == "window" and bool(buffers.tree)
    if once:
        check_flat_buffers(buffers.tree)
    if not (once and layers_of(buffers.tree)):
        return _accumulate(
            options, options.loss_fn, params, buffers, scaler, microbatches, sent_with
        )
    momenta: dict[str, float] = {}

    def loss_and_stats(params: Tree, carried: Tree, microbatch: Any) -> Any:
        buffers, stats = carried
        with CaptureBatchNorm(evaluating=False) as caught:
            returned = options.loss_fn(params, buffers, microbatch)
        several = isinstance(returned, tuple) and len(returned) > 1
        if not (several and isinstance(returned[1], dict)):
            return returned  # ValueAndGrad refuses it
        loss, new_buffers, *aux = returned
        calls = named_calls(caught, new_buffers)
        for name, call in calls:
            momenta.setdefault(name, call.momentum)
        return (
            loss,
            (restore_running_stats(new_buffers, buffers, momenta), add_batch(stats, calls)),
            *aux,
        )

    # The statistics travel with the buffers, so that a dropped microbatch leaves both unchanged.
    carrying = _tree.flatten_once((buffers.tree, init_bn_stats(buffers.tree)))
    window = _accumulate(options, loss_and_stats, params, carrying, scaler, microbatches, sent_with)
    carried, stats = carrying.structure.unflatten(window.buffers)
    known: Mapping[str, float | Tensor] = momenta
    if options.group is not None:
        stats, known = reduce_stats_and_momenta(stats, momenta, options.group)
    return window._replace(buffers=_tree.flatten(update_running_stats(carried, stats, known))[0])


def _accumulate(
    options: StepOptions,
    loss_fn: Any,
    params: Flat,
    buffers: Flat,
    scaler: Flat,
    microbatches: list[Any],
    sent_with: Leaves,
) -> WindowGrads:
    # gradients from other ranks have no graph
    differentiable = options.optimizer.differentiable and options.group is None
    value_and_grad = ValueAndGrad(params, buffers, scaler, loss_fn, differentiable=differentiable)
    scale: Tensor = scaler.tree.scale
    weights = _weights(options, microbatches, scale)
    mean = _Mean(options, weights, scale, is_traced=value_and_grad.is_traced)
    reduction = _reduction(options, weights, params, sent_with) if mean.is_summed else None
    carried, last = buffers.leaves, len(microbatches) - 1
    repeated = None
    if can_repeat(options, value_and_grad, carried, len(microbatches)):
        mean.start(value_and_grad)
        # Copies, because the inputs of a region must not share memory.
        repeated, carried = RegionCaller(mean, value_and_grad), [leaf.clone() for leaf in carried]
    losses: list[Tensor] = []
    aux: tuple[Any, ...] = ()
    for index, microbatch in enumerate(microbatches):
        counts = weights.counts[index]
        if reduction is not None and index == last:
            out = value_and_grad(carried, microbatch, _taker(reduction, value_and_grad, mean))
            carried = keep_buffers_if_dropped(counts, carried, out.buffers)
        elif repeated is not None and _tree.are_tensors(private.pytree.tree_leaves(microbatch)):
            out = repeated(index, carried, microbatch)
            carried = out.buffers
        else:
            out = value_and_grad(carried, microbatch)
            counts = mean.add(index, normalize(out.grads))
            carried = keep_buffers_if_dropped(counts, carried, out.buffers)
        losses.append(out.loss)
        aux += tuple(out.aux)
        del out  # so that the next gradients reuse its memory
    grads = mean.mean()
    if grads is None:
        grads = normalize([] if reduction is not None else value_and_grad.zeros())
    grads = grads._replace(tensors=lookup(grads.tensors)[0])
    stats = None if options.group is not None else mean.measured(grads)
    facts = _summary(weights, losses, mean.overflows, options, scale)
    return WindowGrads(
        grads=grads,
        scaled=mean.is_summed,
        stats=stats,
        buffers=carried,
        aux=aux,
        seen=value_and_grad.seen,
        reduction=reduction,
        nan=mean.nan,
        **facts,
    )


class _Mean:
    """The mean gradients of a window: those of a single microbatch unchanged, of several a scaled
    sum, or a running mean if each microbatch is checked.
    """

    def __init__(
        self, options: StepOptions, weights: _Weights, scale: Tensor, *, is_traced: bool
    ) -> None:
        self.options, self.weights, self.scale = options, weights, scale
        self.is_single = len(weights.counts) == 1 and options.group is None
        self.is_summed = self.is_single or options.on_nonfinite == "drop_window"
        self.is_traced = is_traced
        self.flat: Normalized | None = None  # restores leaves from tensors
        self.sums: list[Tensor] | None = None
        self.accum: AccumState | None = None
        self.overflows: list[Tensor] = []  # of each measured microbatch, or of the mean

    @property
    def nan(self) -> float | None:
        """The value that a NaN of this rank is sent as; None if no norm is measured. It is inf for
        several microbatches, as in `measured`.
        """
        if self.options.clip.norm_type is None and not self.options.takes_amax:
            return None
        return math.nan if len(self.weights.counts) == 1 else math.inf

    def start(self, value_and_grad: ValueAndGrad) -> None:
        """Start with a mean of 0 that has the tensors of every later one."""
        self.flat = normalize(value_and_grad.zeros())
        if self.is_summed:
            self.sums = self.flat.tensors
        else:
            self.accum = init_accum(self.flat.tensors)

    @property
    def state(self) -> list[Tensor]:
        """The tensors that change with each microbatch."""
        if self.is_summed:
            return list(self.sums or [])
        accum: Any = self.accum
        return [*accum.grads, *accum[1:]]

    @state.setter
    def state(self, tensors: list[Tensor]) -> None:
        if self.is_summed:
            self.sums = tensors
        else:
            count = len(tensors) - len(AccumState._fields) + 1
            self.accum = AccumState(tensors[:count], *tensors[count:])

    def resumed(self, state: list[Tensor], scale: Tensor, weighed: list[Any]) -> _Mean:
        """Return a mean with this state, whose microbatches all have the weight `weighed`."""
        number = len(self.weights.counts)
        weights = _Weights(*[value if value is None else [value] * number for value in weighed])  # type: ignore[arg-type]
        new = _Mean(self.options, weights, scale, is_traced=True)
        new.flat = self.flat
        new.state = state
        return new

    def add(self, index: int, grads: Normalized) -> bool | Tensor:
        """Average gradients in. Return whether their microbatch counts for the buffers."""
        self.flat = self.flat or grads
        counts, new = self.weights.counts[index], grads.tensors
        if self.is_single:
            self.sums = new
            return True  # an overflow skips the whole step
        if self.is_summed:
            if self.options.max_retries:
                self.overflows.append(measure(grads, self.scale, scaled=True).nonfinite)
            share = self.weights.shares[index]
            self.sums = add_share(self.sums, new, share, counts, is_traced=self.is_traced)
            return counts
        stats = measure(grads, self.scale, scaled=True)
        self.overflows.append(stats.nonfinite)
        self.accum = add(
            self.accum or init_accum(new),
            new,
            self.weights.vector[index],
            stats.nonfinite,
            scale=self.scale,
            in_place=not self.is_traced,
        )
        if self.options.on_nonfinite != "drop_microbatch":
            return counts
        if stats.nonfinite_on_host is not None and not isinstance(counts, Tensor):
            return counts and not stats.nonfinite_on_host
        return counts & ~stats.nonfinite

    def mean(self) -> Normalized | None:
        """Return the mean; None if nothing counted, or if all of it is on its way to
        other ranks.
        """
        tensors: Any = self.sums if self.accum is None else self.accum.grads
        return None if self.flat is None or tensors is None else self.flat._replace(tensors=tensors)

    def measured(self, grads: Normalized) -> GradStats:
        """Return the stats of the mean. Its overflow is that of the window."""
        stats = measure(
            grads,
            self.scale,
            scaled=self.is_summed,
            norm_type=self.options.clip.norm_type,
            amax=self.options.takes_amax,
        )
        if not self.is_single and stats.norm is not None and stats.nonfinite_on_host is not False:
            # inf and -inf in one sum give NaN or inf, depending on the order of the microbatches.
            stats = stats._replace(norm=stats.norm.nan_to_num(math.inf, math.inf))
        if self.is_summed and self.overflows:
            each = torch.stack(self.overflows)
            self.overflows = list(torch.where(each.any(), each, stats.nonfinite))
        elif self.is_summed:
            self.overflows = [stats.nonfinite]
        return stats


# ---- over ranks ----------------------------------------------------------------------------------


def _taker(
    reduction: Reduction, value_and_grad: ValueAndGrad, mean: _Mean
) -> Callable[[int, Tensor], None]:
    """Return a function that adds a gradient of the last microbatch to the mean and sends it."""
    share, counts = mean.weights.shares[-1], mean.weights.counts[-1]

    def take(place: int, gradient: Tensor) -> None:
        flat = normalize([gradient])
        before = None if mean.sums is None else [mean.sums[place]]
        sums = add_share(before, flat.tensors, share, counts, is_traced=False)
        tensors = [torch.zeros_like(t) for t in flat.tensors] if sums is None else sums
        gradient = flat.restore(tensors)[0]
        reduction.put(value_and_grad.present[place], gradient, own=True, nan=mean.nan)

    return take


def _reduction(
    options: StepOptions, weights: _Weights, params: Flat, buffers: Leaves
) -> Reduction | None:
    """Return the reduction that sends gradients during the last backward; None if nothing is sent
    then, or if each microbatch has to be measured first.
    """
    if options.group is None or options.max_retries or traced():
        return None
    # The divisor depends on the weights only, so it is known before the gradients.
    counted = torch.where(is_weight(weights.vector), weights.vector, 0).sum()
    divisor = mean_divisor(counted, all_reduce(counted, "sum", options.group))
    return reduction_of(params.leaves, buffers, divisor, options.group)


# ---- weights and losses --------------------------------------------------------------------------


class _Weights(NamedTuple):
    """The weights of a window's microbatches, known before the first one runs."""

    vector: Any  # Tensor [k]; None if all are 1 and only the mean is measured
    shares: Sequence[float | Tensor]  # of the mean: 0 or more, with sum 1
    counts: Sequence[bool | Tensor]  # the weight is valid and above 0

    def of(self, index: int) -> list[Any]:
        """Return vector, share and count of one microbatch."""
        return [None if values is None else values[index] for values in self]


def _weights(options: StepOptions, microbatches: list[Any], scale: Tensor) -> _Weights:
    number, weight_fn = len(microbatches), options.weight_fn
    if weight_fn is None:
        vector = None
        looks_once = options.on_nonfinite == "drop_window" and not options.max_retries
        if options.group is not None or not (number == 1 or looks_once):
            vector = torch.ones(number, dtype=widest_float(scale.device), device=scale.device)
        return _Weights(vector, [1 / number] * number, [True] * number)
    given = [weight_fn(microbatch) for microbatch in microbatches]
    vector = torch.stack([as_weight("weight_fn returned", weight, scale) for weight in given])
    if not traced() and not any(isinstance(weight, Tensor) for weight in given):
        numbers = [as_float(weight) or 0.0 for weight in given]
        total = sum(numbers) or 1.0
        return _Weights(vector, [n / total for n in numbers], [n > 0 for n in numbers])
    counts = is_weight(vector) & (vector > 0)
    shares = torch.where(counts, vector, 0)
    shares = shares / torch.where(counts.any(), shares.sum(), 1)
    if host_can_read([shares]):
        return _Weights(vector, shares.tolist(), counts.tolist())
    return _Weights(vector, shares.unbind(), counts.unbind())


def check_weights(
    microbatches: list[Any], weight_fn: Callable[[Any], float | Tensor], scale: Tensor
) -> None:
    """Refuse invalid return values of `weight_fn`."""
    for microbatch in microbatches:
        as_weight("weight_fn returned", weight_fn(microbatch), scale)


def _summary(
    weights: _Weights,
    losses: list[Tensor],
    overflows: list[Tensor],
    options: StepOptions,
    scale: Tensor,
) -> dict[str, Any]:
    """Return the loss and the flags of a window, from the flags of its microbatches or the one of
    their mean. With a group they are over all its ranks, and `divisor` is returned too.
    """
    weight, group = weights.vector, options.group
    if weight is None:
        return _summary_of_mean(losses, overflows[0], widest_float(scale.device), options)
    loss = torch.stack(losses)
    overflow = torch.zeros((), dtype=torch.bool, device=scale.device)
    if overflows:
        overflow = torch.stack(overflows) if len(overflows) == len(losses) else overflows[0]
    invalid = ~is_weight(weight)
    counts = ~invalid & (weight > 0)
    overflow = overflow & counts
    good, finite = counts & ~overflow, torch.isfinite(loss)
    # If all were dropped, the loss of all of them shows why.
    means = torch.stack([_mean(loss, weight, some) for some in (good, counts)])
    weight_of = [torch.where(some, weight, 0).sum() for some in (good, counts)]
    flags = (good, invalid, overflow, overflow & finite, counts & ~finite)
    facts = torch.stack([*weight_of, *(flag.sum().to(weight.dtype) for flag in flags)])
    local = facts[:2]
    if group is not None:
        weighted = torch.where(local > 0, local * means, 0)
        facts = all_reduce(torch.cat([facts, weighted]), "sum", group)
        total = facts[:2]
        means = facts[-2:] / torch.where(total > 0, total, 1)
    any_good, any_invalid, any_overflow, overflow_of_finite, not_finite = (facts[2:7] > 0).unbind()
    drops_one = options.on_nonfinite == "drop_microbatch"
    if drops_one:
        skip, retryable = ~any_good, overflow_of_finite
        mean = torch.where(any_good, means[0], means[1])
    else:
        skip = any_invalid | any_overflow | ~any_good
        retryable = any_overflow & ~not_finite & ~any_invalid
        mean = means[1]
    summary = {
        "loss": mean.to(loss.dtype),
        "must_skip": skip,
        "overflow": any_overflow,
        "retryable": retryable,
        "num_overflowed": facts[4].to(torch.int64),
    }
    if group is not None:
        which = 0 if drops_one else 1
        summary["divisor"] = mean_divisor(local[which], facts[which])
    return summary


def _summary_of_mean(
    losses: list[Tensor], flag: Tensor, dtype: torch.dtype, options: StepOptions
) -> dict[str, Any]:
    """`_summary` for microbatches of equal weight of which only the mean is measured."""
    mean = losses[0]
    if len(losses) > 1:
        mean = torch.stack(losses).mean(dtype=dtype).to(mean.dtype)
    retryable = flag & torch.isfinite(mean) if options.max_retries else flag
    flags = {"overflow": flag, "num_overflowed": flag, "retryable": retryable}
    return {"loss": mean, "must_skip": None, **flags}


def _mean(loss: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    share = torch.where(counts, weight, 0)
    share = share / torch.where(counts.any(), share.sum(), 1)
    return (torch.where(counts, loss, 0) * share).sum()
