"""One time through the microbatches of a step: gradients averaged, buffers threaded through."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from . import _dtensor, _foreach, _meshes, _tree
from ._accum import AccumState, OnNonfinite, add, as_weight, init_accum, is_weight
from ._bn import (
    absorb,
    check_flat,
    has_layers,
    init_bn_stats,
    over_ranks,
    updated_once,
    without_update,
)
from ._bn_catch import CatchBatchNorm, named_calls
from ._buckets import Reduction, reduction_of, share_of
from ._checks import as_float
from ._differentiate import Differentiate, LossFn
from ._group import all_reduce
from ._headroom import grad_amax
from ._scaler import HasScale, overflowed, unscale_and_check
from ._select import where
from ._spread import read
from ._tree import Flat, Leaves, Tree

BNUpdate = Literal["each", "window"]


class Gathered(NamedTuple):
    """What the microbatches amount to."""

    grads: Tree  # their mean
    scaled: bool  # `grads` still are, and one pass unscales and steps
    norm: Tensor | None  # of the unscaled gradients, where it is known
    loss: Tensor  # the mean of those that count
    found_inf: Tensor  # the step must be skipped
    overflow: Tensor  # a microbatch that has a weight overflowed
    # at a lower scale fewer microbatches may be lost: what overflowed has a finite loss
    curable: Tensor
    lost: Tensor  # how many overflowed, or that the mean did; these two where it was asked for
    finite: bool  # known on the host that `found_inf` is False
    amax: Any  # the largest of the unscaled gradients, where the rule takes it; else ()
    buffers: Leaves
    aux: tuple[Any, ...]
    seen: list[Tensor]  # in the microbatches
    # Of a group: by which the mean of this rank is divided in that of all, inf where it counts for
    # nothing, and what is on its way already.
    divisor: Tensor | None = None
    reduction: Reduction | None = None


def gather(
    params: Flat,
    buffers: Flat,
    scaler: Flat,
    microbatches: list[Any],
    loss_fn: LossFn,
    weight_fn: Callable[[Any], float | Tensor] | None,
    on_nonfinite: OnNonfinite,
    bn_update: BNUpdate,
    norm_type: float | None,
    exact: bool,
    amax: bool = False,
    group: Any = None,
) -> Gathered:
    """The weighted mean of the microbatches' gradients and losses, and what they make of the
    buffers.

    `exact`: say which microbatches overflowed also where one drops them all, for which each has to
    be read. `amax`: say how large the largest gradient is. With a `group` losses and flags are
    those of all its ranks; gradients and buffers are still to be reduced, and unless `exact` they
    have not been looked at.
    """
    if bn_update == "window" and buffers.tree:
        check_flat(buffers.tree)
    settings: Any = (weight_fn, on_nonfinite, norm_type, exact, amax, group, buffers.leaves)
    if bn_update == "each" or not has_layers(buffers.tree):
        return _gather(params, buffers, scaler, microbatches, loss_fn, *settings)
    momenta: dict[str, float] = {}

    def catching(params: Tree, carried: Tree, microbatch: Any) -> Any:
        buffers, stats = carried
        with CatchBatchNorm(evaluating=False) as caught:
            returned = loss_fn(params, buffers, microbatch)
        if (
            not isinstance(returned, tuple)
            or len(returned) < 2
            or not isinstance(returned[1], dict)
        ):
            return returned  # to be refused
        loss, new_buffers, *aux = returned
        calls = named_calls(caught, new_buffers)
        for name, call in calls:
            momenta.setdefault(name, call.momentum)
        return loss, (without_update(new_buffers, buffers, momenta), absorb(stats, calls)), *aux

    # The statistics travel with the buffers, so whatever is dropped is dropped from them too.
    carrying = _tree.flat((buffers.tree, init_bn_stats(buffers.tree)))
    gathered = _gather(params, carrying, scaler, microbatches, catching, *settings)
    carried, stats = carrying.structure.unflatten(gathered.buffers)
    known: Mapping[str, float | Tensor] = momenta
    if group is not None:
        stats, known = over_ranks(stats, momenta, group)
    return gathered._replace(buffers=_tree.flatten(updated_once(carried, stats, known))[0])


def _gather(
    params: Flat,
    buffers: Flat,
    scaler: Flat,
    microbatches: list[Any],
    loss_fn: LossFn,
    weight_fn: Callable[[Any], float | Tensor] | None,
    on_nonfinite: OnNonfinite,
    norm_type: float | None,
    exact: bool,
    amax: bool,
    group: Any,
    sent_along: Leaves,
) -> Gathered:
    differentiate = Differentiate(params, buffers, scaler, loss_fn)
    scale: Tensor = differentiate.scaler.scale
    weights = _weights(microbatches, weight_fn, scale)
    reduction: Reduction | None = None
    early = on_nonfinite == "drop_window" and not (exact or _tree.traced())
    if group is not None and early:
        # What follows from the weights alone is known before the gradients are, so that these can
        # leave as the last backward makes them.
        counted = torch.where(is_weight(weights.vector), weights.vector, 0).sum()
        divisor = share_of(counted, all_reduce(counted, "sum", group))
        reduction = reduction_of(params.leaves, sent_along, divisor, group)
    amax = amax and group is None  # of a group it is that of the mean of all
    alone = len(microbatches) == 1
    single = alone and group is None
    together = single or on_nonfinite == "drop_window"
    carried = buffers.leaves
    mean: Leaves | None = None
    accum: AccumState | None = None
    losses: list[Tensor] = []
    overflows: list[Tensor] = []
    aux: tuple[Any, ...] = ()
    for index, microbatch in enumerate(microbatches):
        counts: bool | Tensor = weights.counts[index]
        share = weights.shares[index]
        put: Callable[[int, Tensor], None] | None = None
        sent = reduction is not None and index == len(microbatches) - 1
        if reduction is not None and sent:
            put = _sent_to(reduction, differentiate, mean, weights, index)
        grads, (loss, new_buffers, new_aux) = differentiate(carried, microbatch, put, own=single)
        if group is not None:  # the ranks hold other rows of what is sparse
            grads = [None if leaf is None else _foreach.dense(leaf) for leaf in grads]
        losses.append(loss)
        aux += tuple(new_aux)
        if index == 0 and not all(leaf is None or leaf.layout is torch.strided for leaf in grads):
            together = False  # duplicate indices are summed after unscaling
        if single:
            mean, counts = grads, True  # what is dropped is the step
        elif together:
            if exact:
                size = _meshes.extent(grads, scale.device)
                overflows.append(overflowed(size, scale, scaled=False))
            flag = counts if isinstance(counts, Tensor) else None
            if sent:
                mean = None
            elif alone and counts is True:
                mean = grads
            elif counts is not False:
                mean = _mixed(mean, grads, share, flag)
        else:
            accum, overflow = _add(accum, grads, weights.vector[index], differentiate.scaler)
            overflows.append(overflow)
            counts = counts & ~overflow if on_nonfinite == "drop_microbatch" else counts
        del grads  # before the next are made: their memory serves again
        if counts is True:
            carried = new_buffers
        elif counts is not False:
            carried = where(~counts, carried, new_buffers, donate=False)

    norm: Tensor | None = None
    most: Any = ()
    finite = False
    if accum is not None:
        mean, overflow = accum.grads, torch.stack(overflows)
        most = grad_amax(mean) if amax else ()
    elif not together:
        mean, overflow = unscale_and_check(differentiate.scaler, mean)
        most = grad_amax(mean) if amax else ()
    elif group is not None:
        if mean is None and reduction is None:
            mean = differentiate.zeros()
        none = torch.zeros((), dtype=torch.bool, device=scale.device)
        overflow = torch.stack(overflows) if overflows else none
    else:
        mean = differentiate.zeros() if mean is None else mean
        # one read gives the norm too
        overflow, norm, most, finite = read(mean, norm_type, scale, scaled=True, amax=amax)
        if norm is not None and not single:
            norm = torch.where(overflow, torch.inf, norm)
        if overflows:
            each = torch.stack(overflows)
            overflow, finite = torch.where(each.any(), each, overflow), False
    facts = _summary(weights, losses, overflow, on_nonfinite, group, exact=exact)
    return Gathered(
        grads=() if mean is None else differentiate.tree(mean),
        scaled=together,
        norm=norm,
        amax=most,
        finite=finite and weights.equal,
        buffers=carried,
        aux=aux,
        seen=differentiate.seen,
        reduction=reduction,
        **facts,
    )


def _mixed(mean: Leaves | None, grads: Leaves, share: Any, counts: Tensor | None) -> Leaves:
    """`_foreach.mix` of leaves that may be DTensors."""
    if not _dtensor.among(grads):
        return _foreach.mix(mean, grads, share, counts)
    shards = _dtensor.shards(grads)
    sums = None if mean is None else _dtensor.shards(mean).local
    return shards.back(_foreach.mix(sums, list(shards.local), share, counts))


def _sent_to(
    reduction: Reduction,
    differentiate: Differentiate,
    mean: Leaves | None,
    weights: _Weights,
    index: int,
) -> Callable[[int, Tensor], None]:
    """What takes a gradient of the last microbatch, adds it to the mean and sends it."""
    places = [place for place, here in enumerate(differentiate.present) if here]
    counts, share = weights.counts[index], weights.shares[index]
    flag = counts if isinstance(counts, Tensor) else None

    def put(index: int, gradient: Tensor) -> None:
        before = None if mean is None else [mean[index]]
        gradient = _foreach.dense(gradient)
        if counts is not True or len(weights.counts) > 1:
            if counts is not False:
                gradient = _foreach.mix(before, [gradient], share, flag)[0]
            else:
                gradient = torch.zeros_like(gradient) if before is None else before[0]
        reduction.put(places[index], gradient, own=True)

    return put


def _add(
    accum: AccumState | None, grads: Leaves, weight: Tensor, scaler: HasScale
) -> tuple[AccumState, Tensor]:
    """The exact way: a microbatch looked at by itself, then averaged with those before it."""
    scale: Tensor | None = scaler.scale
    if all(_foreach.is_dense(gradient) for gradient in grads):
        overflow = overflowed(_meshes.extent(grads, scaler.scale.device), scaler.scale, scaled=True)
    else:
        grads, overflow = unscale_and_check(scaler, grads)
        scale = None
    # Not unscaled in place: a gradient may be the very tensor that a custom backward keeps.
    return add(
        accum or init_accum(grads), grads, weight, overflow, scale=scale, donate=True
    ), overflow


class _Weights(NamedTuple):
    """Of the microbatches of a window, before the first of them is looked at."""

    vector: Tensor  # [k]
    shares: Sequence[float | Tensor]  # of the mean: none negative, their sum 1
    counts: Sequence[bool | Tensor]  # what has weight 0 does not
    equal: bool


def _weights(
    microbatches: list[Any], weight_fn: Callable[[Any], float | Tensor] | None, scale: Tensor
) -> _Weights:
    number = len(microbatches)
    if weight_fn is None:
        vector = torch.ones(number, dtype=_foreach.widest_float(scale.device), device=scale.device)
        return _Weights(vector, [1 / number] * number, [True] * number, equal=True)
    given = [weight_fn(microbatch) for microbatch in microbatches]
    vector = torch.stack([as_weight("weight_fn returned", weight, scale) for weight in given])
    if not _tree.traced() and not any(isinstance(weight, Tensor) for weight in given):
        numbers = [as_float(weight) or 0.0 for weight in given]
        total = sum(numbers) or 1.0
        return _Weights(vector, [n / total for n in numbers], [n > 0 for n in numbers], equal=False)
    counts = is_weight(vector) & (vector > 0)
    shares = torch.where(counts, vector, 0)
    shares = shares / torch.where(counts.any(), shares.sum(), 1)
    return _Weights(vector, shares.unbind(), counts.unbind(), equal=False)


def check_weights(
    microbatches: list[Any], weight_fn: Callable[[Any], float | Tensor], scale: Tensor
) -> None:
    """Refuse what `weight_fn` must not return."""
    for microbatch in microbatches:
        as_weight("weight_fn returned", weight_fn(microbatch), scale)


def _summary(
    weights: _Weights,
    losses: list[Tensor],
    overflow: Tensor,
    on_nonfinite: OnNonfinite,
    group: Any,
    *,
    exact: bool,
) -> dict[str, Tensor]:
    """`loss`, `found_inf`, `overflow`, `curable` and `lost` of a window, from those of its
    microbatches or of their mean; with a `group` from those of all its ranks, and `divisor`.
    """
    weight = weights.vector
    loss = torch.stack(losses)
    if group is None and weights.equal and not overflow.ndim:
        mean = loss.mean(dtype=weight.dtype).to(loss.dtype) if len(losses) > 1 else loss[0]
        told = dict.fromkeys(("found_inf", "overflow", "curable", "lost"), overflow)
        if exact:
            told["curable"] = overflow & torch.isfinite(loss).all()
        return {"loss": mean, **told}
    invalid = ~is_weight(weight)
    counts = ~invalid & (weight > 0)
    overflow = overflow & counts
    good = counts & ~overflow
    finite = torch.isfinite(loss)
    # Where all were dropped, the loss of all says why.
    means = torch.stack([_mean(loss, weight, some) for some in (good, counts)])
    facts = torch.stack(
        [
            *(torch.where(some, weight, 0).sum() for some in (good, counts)),
            *(
                some.sum().to(weight.dtype)
                for some in (good, invalid, overflow, overflow & finite, counts & ~finite)
            ),
        ]
    )
    ours = facts[:2]
    if group is not None:
        mine = torch.where(ours > 0, ours * means, 0)
        facts = all_reduce(torch.cat([facts, mine]), "sum", group)
        every = facts[:2]
        means = facts[-2:] / torch.where(every > 0, every, 1)
    some_good, some_invalid, lost, tame, wild = (facts[2:7] > 0).unbind()
    if on_nonfinite == "drop_microbatch":
        found_inf, curable = ~some_good, tame
        mean = torch.where(some_good, means[0], means[1])
    else:
        found_inf = some_invalid | lost | ~some_good
        curable = lost & ~wild & ~some_invalid
        mean = means[1]
    told = {
        "loss": mean.to(loss.dtype),
        "found_inf": found_inf,
        "overflow": lost,
        "curable": curable,
        "lost": facts[4].to(torch.int64),
    }
    if group is not None:
        place = 0 if on_nonfinite == "drop_microbatch" else 1
        told["divisor"] = share_of(ours[place], facts[place])
    return told


def _mean(loss: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    share = torch.where(counts, weight, 0)
    share = share / torch.where(counts.any(), share.sum(), 1)
    return (torch.where(counts, loss, 0) * share).sum()
