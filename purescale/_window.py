"""One time through the microbatches of a step: gradients averaged, buffers threaded through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from . import _foreach, _tree
from ._accum import AccumState, OnNonfinite, add, as_weight, init_accum, is_weight
from ._argument import argument
from ._bn import CatchBatchNorm, absorb, check_flat, has_layers, init_bn_stats, named_calls, updated_once, without_update
from ._scaler import HasScale, overflowed, scale_loss, unscale_and_check
from ._tree import Tree

BNUpdate = Literal["each", "window"]


class LossFn(Protocol):
    """What `train_step` differentiates: a pure function of parameters, buffers and one microbatch."""

    def __call__(self, params: Tree, buffers: Tree, microbatch: Any, /) -> tuple[Tensor, Tree] | tuple[Tensor, Tree, Any]:
        """The unscaled loss, the new buffers (`buffers` where nothing changes them), and what else the step shall return."""


class Gathered(NamedTuple):
    """What the microbatches amount to."""

    grads: Tree  # their mean
    scaled: bool  # `grads` still are: those of a single microbatch, which one pass unscales and steps
    norm: Tensor | None  # of the unscaled gradients, where it is known
    loss: Tensor  # the mean of those that count
    found_inf: Tensor  # the step must be skipped
    overflow: Tensor  # a microbatch that has a weight overflowed
    curable: Tensor  # at a lower scale fewer microbatches may be lost: what overflowed has a finite loss
    lost: Tensor  # how many overflowed
    buffers: Tree
    aux: tuple[Any, ...]


def gather(
    params: Tree,
    buffers: Tree,
    scaler: HasScale,
    microbatches: list[Any],
    loss_fn: LossFn,
    weight_fn: Callable[[Any], float | Tensor] | None,
    on_nonfinite: OnNonfinite,
    bn_update: BNUpdate,
    norm_type: float | None,
) -> Gathered:
    """The weighted mean of the microbatches' gradients and losses, and what they make of the buffers."""
    if bn_update == "window" and buffers:
        check_flat(buffers)
    if bn_update == "each" or not has_layers(buffers):
        return _gather(params, buffers, scaler, microbatches, loss_fn, weight_fn, on_nonfinite, norm_type)
    momenta: dict[str, float] = {}

    def catching(params: Tree, carried: Tree, microbatch: Any) -> Any:
        buffers, stats = carried
        with CatchBatchNorm(evaluating=False) as caught:
            returned = loss_fn(params, buffers, microbatch)
        if not isinstance(returned, tuple) or len(returned) < 2 or not isinstance(returned[1], dict):
            return returned  # to be refused
        loss, new_buffers, *aux = returned
        calls = named_calls(caught, new_buffers)
        for name, call in calls:
            momenta.setdefault(name, call.momentum)
        return loss, (without_update(new_buffers, buffers, momenta), absorb(stats, calls)), *aux

    # The statistics travel with the buffers, so whatever is dropped is dropped from them too.
    gathered = _gather(params, (buffers, init_bn_stats(buffers)), scaler, microbatches, catching, weight_fn, on_nonfinite, norm_type)
    carried, stats = gathered.buffers
    return gathered._replace(buffers=updated_once(carried, stats, momenta))


def _gather(
    params: Tree,
    buffers: Tree,
    scaler: HasScale,
    microbatches: list[Any],
    loss_fn: LossFn,
    weight_fn: Callable[[Any], float | Tensor] | None,
    on_nonfinite: OnNonfinite,
    norm_type: float | None,
) -> Gathered:
    single = len(microbatches) == 1
    accum: AccumState | None = None
    weights: list[Tensor] = []
    losses: list[Tensor] = []
    overflows: list[Tensor] = []
    aux: tuple[Any, ...] = ()
    norm: Tensor | None = None
    for microbatch in microbatches:
        weight = as_weight("weight_fn returned", 1.0 if weight_fn is None else weight_fn(microbatch), scaler.scale)
        grads, (loss, new_buffers, new_aux) = _scaled_grads(params, buffers, scaler, microbatch, loss_fn)
        aux += tuple(new_aux)
        scale: Tensor | None = scaler.scale
        leaves = _tree.flatten(grads)[0]
        if all(_foreach.is_dense(leaf) for leaf in leaves if leaf is not None):
            # Of a single microbatch one read gives the norm too.
            size = _foreach.extent(leaves, scaler.scale.device, norm_type if single else None)
            overflow = overflowed(size, scaler.scale, scaled=True)
            norm = None if size.norm is None else size.norm / scaler.scale
        else:  # duplicate indices are summed after unscaling
            grads, overflow = unscale_and_check(scaler, grads)
            leaves, scale = _tree.flatten(grads)[0], None
        if single and weight_fn is None:
            facts = {
                "loss": loss,
                "found_inf": overflow,
                "overflow": overflow,
                "curable": overflow & torch.isfinite(loss),
                "lost": overflow,
            }
            return Gathered(grads=grads, scaled=scale is not None, norm=norm, buffers=new_buffers, aux=aux, **facts)
        if not single:
            # Not unscaled in place: a gradient may be the very tensor that a custom backward keeps.
            accum = add(accum or init_accum(grads), leaves, weight, overflow, scale=scale, donate=True)
        if weight_fn is not None or on_nonfinite == "drop_microbatch":
            dropped = ~(is_weight(weight) & (weight > 0))
            dropped = dropped | overflow if on_nonfinite == "drop_microbatch" else dropped
            new_buffers = _tree.where(dropped, buffers, new_buffers, donate=False)
        buffers = new_buffers
        weights.append(weight)
        losses.append(loss)
        overflows.append(overflow)

    if accum is not None:
        grads, scale = accum.grads, None
    facts = _summary(torch.stack(weights), torch.stack(losses), torch.stack(overflows), on_nonfinite)
    return Gathered(grads=grads, scaled=scale is not None, norm=norm, buffers=buffers, aux=aux, **facts)


def _summary(weight: Tensor, loss: Tensor, overflow: Tensor, on_nonfinite: OnNonfinite) -> dict[str, Tensor]:
    """`loss`, `found_inf`, `overflow`, `curable` and `lost` of a window, from those of its microbatches."""
    invalid = ~is_weight(weight)
    counts = ~invalid & (weight > 0)
    overflow = overflow & counts
    good = counts & ~overflow
    if on_nonfinite == "drop_microbatch":
        found_inf, curable = ~good.any(), (overflow & torch.isfinite(loss)).any()
        counts = torch.where(good.any(), good, counts)  # where all were dropped, the loss of all says why
    else:
        found_inf = (invalid | overflow).any() | ~good.any()
        curable = overflow.any() & (torch.isfinite(loss) | ~counts).all() & ~invalid.any()
    share = torch.where(counts, weight, 0)
    share = share / torch.where(counts.any(), share.sum(), 1)
    mean = (torch.where(counts, loss, 0) * share).sum().to(loss.dtype)
    return {"loss": mean, "found_inf": found_inf, "overflow": overflow.any(), "curable": curable, "lost": overflow.sum()}


def _scaled_grads(
    params: Tree, buffers: Tree, scaler: HasScale, microbatch: Any, loss_fn: LossFn
) -> tuple[Tree, tuple[Tensor, Tree, list[Any]]]:
    """The gradients of the scaled loss; the unscaled loss, the new buffers and aux, off the graph and in memory of their own."""
    leaves, structure = _tree.flatten(params)
    inputs = [leaf for leaf in leaves if leaf is not None]

    def scaled(inputs: list[Tensor]) -> tuple[Tensor, tuple[Tensor, Tree, list[Any]]]:
        present = iter(inputs)
        weights = structure.unflatten([None if leaf is None else next(present) for leaf in leaves])
        loss, new_buffers, aux = _checked(loss_fn(weights, buffers, microbatch), buffers)
        unscaled = loss.to(_foreach.wide_dtype(loss.dtype))
        return scale_loss(scaler, loss).reshape(()), (unscaled.reshape(()), new_buffers, aux)

    if _tree.traced():
        grads, (_, outputs) = torch.func.grad_and_value(scaled, has_aux=True)(inputs)
        outputs = _tree.fresh(outputs)
    else:
        # torch.func.grad would give the same bits; this also takes checkpointing around `apply` and custom Functions of the older form.
        with torch.enable_grad():
            # Leaves, so that autocast casts a weight once however often it is used.
            names = [name for name, leaf in zip(_tree.names(params), leaves, strict=True) if leaf is not None]
            inputs = [argument(name, _tree.recordable(leaf).detach()).requires_grad_() for name, leaf in zip(names, inputs, strict=True)]
            buffers = _tree.map(_tree.recordable, buffers)
            loss, outputs = scaled(inputs)
            if not loss.requires_grad:
                raise ValueError(
                    "the loss does not depend on params. Likely cause: loss_fn calls the module and not `apply(params, buffers, ...)`, or "
                    "runs under torch.no_grad or inference_mode. Cure: `out, buffers = apply(params, buffers, x)` and a loss of that `out`."
                )
            grads = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
            grads = [grad.detach() if grad.requires_grad else grad for grad in grads]  # a backward may return what it was given
        outputs = _tree.fresh(outputs, (params, buffers, scaler, microbatch))
    present = iter(grads)
    return structure.unflatten([None if leaf is None else next(present) for leaf in leaves]), outputs


def _checked(returned: Any, buffers: Tree) -> tuple[Tensor, Tree, list[Any]]:
    if not (isinstance(returned, tuple) and len(returned) in (2, 3)):
        what = f"a tuple of {len(returned)}" if isinstance(returned, tuple) else type(returned).__name__
        raise TypeError(
            f"loss_fn returned {what}; expected (loss, new_buffers) or (loss, new_buffers, aux). "
            f"Cure: `return loss, new_buffers`, or `return loss, buffers` where nothing changes them."
        )
    loss, new_buffers, *aux = returned
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"loss_fn returned {type(loss).__name__} as its loss; expected a tensor of one element. "
            f"Cure: loss first, `return loss, new_buffers`."
        )
    if not _like_buffers(new_buffers, buffers):
        raise ValueError(
            f"new_buffers does not match buffers: loss_fn returned {_described(new_buffers)} where the new buffers belong, "
            f"{_described(buffers)}. Likely cause: `return loss, aux`. Cure: `return loss, new_buffers, aux`, or "
            f"`return loss, buffers, aux` where nothing changes them."
        )
    _tree.paired(buffers, new_buffers, "buffers", "new_buffers")
    return loss, new_buffers, aux


def _like_buffers(returned: Any, buffers: Tree) -> bool:
    """Whether it can be meant for the new buffers: of their kind, with a name in common."""
    if isinstance(buffers, dict):
        return isinstance(returned, dict) and (not returned or any(name in buffers for name in returned))
    return type(returned) is type(buffers)


def _described(tree: Any) -> str:
    if isinstance(tree, Tensor):
        return f"a tensor of shape {tuple(tree.shape)}"
    if isinstance(tree, dict):
        return f"a dict of {_tree.some([repr(name) for name in tree])}"
    return type(tree).__name__
