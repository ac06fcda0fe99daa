"""One time through the microbatches of a step: gradients averaged, buffers threaded through."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from . import _dtensor, _foreach, _leaf, _meshes, _tree
from ._accum import AccumState, OnNonfinite, add, as_weight, init_accum, is_weight
from ._argument import argument
from ._bn import absorb, check_flat, has_layers, init_bn_stats, updated_once, without_update
from ._bn_catch import CatchBatchNorm, named_calls
from ._checks import as_float
from ._scaler import HasScale, overflowed, scale_loss, unscale_and_check
from ._tree import Leaves, Tree

BNUpdate = Literal["each", "window"]


class LossFn(Protocol):
    """What `train_step` differentiates: a pure function of params, buffers and one microbatch."""

    def __call__(
        self, params: Tree, buffers: Tree, microbatch: Any, /
    ) -> tuple[Tensor, Tree] | tuple[Tensor, Tree, Any]:
        """The unscaled loss, the new buffers (`buffers` where nothing changes them), and what else
        the step shall return.
        """


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
    # how many overflowed; of a mean that was looked at only once, all that are lost with it
    lost: Tensor
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
    exact: bool,
) -> Gathered:
    """The weighted mean of the microbatches' gradients and losses, and what they make of the
    buffers.

    `exact`: say which microbatches overflowed also where one drops them all, for which each has to
    be read.
    """
    if bn_update == "window" and buffers:
        check_flat(buffers)
    settings: Any = (weight_fn, on_nonfinite, norm_type, exact)
    if bn_update == "each" or not has_layers(buffers):
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
    gathered = _gather(
        params, (buffers, init_bn_stats(buffers)), scaler, microbatches, catching, *settings
    )
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
    exact: bool,
) -> Gathered:
    weights = _weights(microbatches, weight_fn, scaler.scale)
    differentiate = Differentiate(params, buffers, scaler, loss_fn)
    single = len(microbatches) == 1
    together = single or on_nonfinite == "drop_window"
    carried = differentiate.buffers
    mean: Leaves | None = None
    accum: AccumState | None = None
    losses: list[Tensor] = []
    overflows: list[Tensor] = []
    aux: tuple[Any, ...] = ()
    for index, microbatch in enumerate(microbatches):
        grads, (loss, new_buffers, new_aux) = differentiate(carried, microbatch)
        losses.append(loss)
        aux += tuple(new_aux)
        counts = weights.counts[index]
        if index == 0 and not all(gradient.layout is torch.strided for gradient in grads):
            together = False  # duplicate indices are summed after unscaling
        if single:
            mean, counts = grads, True  # what is dropped is the step
        elif together:
            if exact:
                size = _meshes.extent(grads, scaler.scale.device)
                overflows.append(overflowed(size, scaler.scale, scaled=False))
            flag = counts if isinstance(counts, Tensor) else None
            mean = mean if counts is False else _mixed(mean, grads, weights.shares[index], flag)
        else:
            accum, overflow = _add(accum, grads, weights.vector[index], scaler)
            overflows.append(overflow)
            counts = counts & ~overflow if on_nonfinite == "drop_microbatch" else counts
        del grads  # before the next are made: their memory serves again
        if counts is True:
            carried = new_buffers
        elif counts is not False:
            carried = _tree.where(~counts, carried, new_buffers, donate=False)

    norm: Tensor | None = None
    if accum is not None:
        mean, overflow = accum.grads, torch.stack(overflows)
    elif not together:
        mean, overflow = unscale_and_check(scaler, mean)
    else:
        mean = differentiate.zeros() if mean is None else mean
        # one read gives the norm too
        size = _meshes.extent(mean, scaler.scale.device, norm_type, scaler.scale)
        overflow = overflowed(size, scaler.scale, scaled=True)
        norm = None if size.norm is None else size.norm / scaler.scale
        if norm is not None and not single:
            norm = torch.where(overflow, torch.inf, norm)
        if overflows:
            each = torch.stack(overflows)
            overflow = torch.where(each.any(), each, overflow)
    facts = _summary(weights, torch.stack(losses), overflow, on_nonfinite)
    buffers = differentiate.buffer_structure.unflatten(carried)
    return Gathered(
        grads=differentiate.tree(mean),
        scaled=together,
        norm=norm,
        buffers=buffers,
        aux=aux,
        **facts,
    )


def _mixed(mean: Leaves | None, grads: Leaves, share: Any, counts: Tensor | None) -> Leaves:
    """`_foreach.mix` of leaves that may be DTensors."""
    if not _dtensor.among(grads):
        return _foreach.mix(mean, grads, share, counts)
    shards = _dtensor.shards(grads)
    sums = None if mean is None else _dtensor.shards(mean).local
    return shards.back(_foreach.mix(sums, list(shards.local), share, counts))


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


def _summary(
    weights: _Weights, loss: Tensor, overflow: Tensor, on_nonfinite: OnNonfinite
) -> dict[str, Tensor]:
    """`loss`, `found_inf`, `overflow`, `curable` and `lost` of a window, from those of its
    microbatches or of their mean.
    """
    if weights.equal and not overflow.ndim:
        mean = loss.mean(dtype=weights.vector.dtype).to(loss.dtype)
        curable = overflow & torch.isfinite(loss).all()
        return {
            "loss": mean,
            "found_inf": overflow,
            "overflow": overflow,
            "curable": curable,
            "lost": overflow * len(loss),
        }
    weight = weights.vector
    invalid = ~is_weight(weight)
    counts = ~invalid & (weight > 0)
    overflow = overflow & counts
    good = counts & ~overflow
    if on_nonfinite == "drop_microbatch":
        found_inf, curable = ~good.any(), (overflow & torch.isfinite(loss)).any()
        # where all were dropped, the loss of all says why
        counts = torch.where(good.any(), good, counts)
    else:
        found_inf = (invalid | overflow).any() | ~good.any()
        curable = overflow.any() & (torch.isfinite(loss) | ~counts).all() & ~invalid.any()
    share = torch.where(counts, weight, 0)
    share = share / torch.where(counts.any(), share.sum(), 1)
    mean = (torch.where(counts, loss, 0) * share).sum().to(loss.dtype)
    return {
        "loss": mean,
        "found_inf": found_inf,
        "overflow": overflow.any(),
        "curable": curable,
        "lost": overflow.sum(),
    }


class Differentiate:
    """The gradients of the scaled loss; the unscaled loss, new buffers and aux, off the graph and
    in memory of their own.

    What is the same for every microbatch is worked out once. Parameters without a tensor are left
    out until `tree`.
    """

    def __init__(self, params: Tree, buffers: Tree, scaler: HasScale, loss_fn: LossFn) -> None:
        self.scaler, self.loss_fn, self.buffer_tree = scaler, loss_fn, buffers
        leaves, self.structure = _tree.flatten(params)
        self.buffers, self.buffer_structure = _tree.flatten(buffers)
        self.present = [leaf is not None for leaf in leaves]
        self.inputs = [leaf for leaf in leaves if leaf is not None]
        self.spread = _dtensor.among(self.inputs)
        if not _tree.traced():
            self.names = [
                name for name, here in zip(_tree.names(params), self.present, strict=True) if here
            ]
            self.taken = {
                None,
                *_leaf.storages([*self.inputs, *self.buffers, *_tree.tensors(scaler)]),
            }
            self.inputs = _recordable(self.inputs)

    def zeros(self) -> Leaves:
        return [
            torch.zeros_like(leaf, dtype=_foreach.wide_dtype(leaf.dtype)) for leaf in self.inputs
        ]

    def tree(self, leaves: Leaves) -> Tree:
        present = iter(leaves)
        return self.structure.unflatten([next(present) if here else None for here in self.present])

    def __call__(
        self, buffers: Leaves, microbatch: Any
    ) -> tuple[Leaves, tuple[Tensor, Leaves, list[Any]]]:
        if _tree.traced():
            scaled = functools.partial(self._scaled, buffers, microbatch)
            grads, (_, outputs) = torch.func.grad_and_value(scaled, has_aux=True)(self.inputs)
            return list(grads), _tree.fresh(outputs)
        # torch.func.grad would give the same bits; this also takes checkpointing around `apply` and
        # custom Functions of the older form.
        inputs, loss, outputs = self.graph(buffers, microbatch)
        grads = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
        # a backward may return what it was given
        grads = [grad.detach() if grad.requires_grad else grad for grad in grads]
        if self.spread:
            grads = [_dtensor.like(grad, leaf) for grad, leaf in zip(grads, inputs, strict=True)]
        return grads, _tree.fresh(
            outputs, self.taken.union(_leaf.storages(_tree.all_tensors(microbatch)))
        )

    def graph(
        self, buffers: Leaves, microbatch: Any
    ) -> tuple[Leaves, Tensor, tuple[Tensor, Leaves, list[Any]]]:
        """The parameters, the scaled loss on its graph over them, and the outputs; where nothing is
        traced.
        """
        buffers = _recordable(buffers)
        with torch.enable_grad():
            # Leaves, so that autocast casts a weight once however often it is used; new ones, as a
            # loss may hang a hook on them.
            inputs = [
                argument(name, leaf.detach()).requires_grad_()
                for name, leaf in zip(self.names, self.inputs, strict=True)
            ]
            loss, outputs = self._scaled(buffers, microbatch, inputs)
        if not loss.requires_grad:
            raise ValueError(
                "the loss does not depend on params. Likely cause: loss_fn calls the module "
                "and not `apply(params, buffers, ...)`, or runs under torch.no_grad or "
                "inference_mode. Cure: `out, buffers = apply(params, buffers, x)` and a loss "
                "of that `out`."
            )
        return inputs, loss, outputs

    def _scaled(
        self, buffers: Leaves, microbatch: Any, inputs: Leaves
    ) -> tuple[Tensor, tuple[Tensor, Leaves, list[Any]]]:
        given = self.buffer_structure.unflatten(buffers)
        loss, new_buffers, aux = self._checked(self.loss_fn(self.tree(inputs), given, microbatch))
        unscaled = loss.to(_foreach.wide_dtype(loss.dtype))
        scaled = scale_loss(self.scaler, loss).reshape(())
        return scaled, (unscaled.reshape(()), new_buffers, aux)

    def _checked(self, returned: Any) -> tuple[Tensor, Leaves, list[Any]]:
        buffers = self.buffer_tree
        if not (isinstance(returned, tuple) and len(returned) in (2, 3)):
            what = (
                f"a tuple of {len(returned)}"
                if isinstance(returned, tuple)
                else type(returned).__name__
            )
            raise TypeError(
                f"loss_fn returned {what}; expected (loss, new_buffers) or (loss, new_buffers, "
                "aux). Cure: `return loss, new_buffers`, or `return loss, buffers` where nothing "
                "changes them."
            )
        loss, new_buffers, *aux = returned
        loss = _dtensor.full(loss)
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"loss_fn returned {type(loss).__name__} as its loss; expected a tensor of one "
                "element. Cure: loss first, `return loss, new_buffers`."
            )
        if not _like_buffers(new_buffers, buffers):
            raise ValueError(
                f"new_buffers does not match buffers: loss_fn returned {_described(new_buffers)} "
                f"where the new buffers belong, {_described(buffers)}. Likely cause: `return loss, "
                "aux`. Cure: `return loss, new_buffers, aux`, or `return loss, buffers, aux` "
                "where nothing changes them."
            )
        flat = self.buffers, self.buffer_structure
        leaves = _tree.paired(buffers, new_buffers, "buffers", "new_buffers", flat=flat)[1]
        return loss, leaves, aux


def _recordable(leaves: Leaves) -> Leaves:
    """Tensors made under inference_mode as copies that autograd takes; all others as they are."""
    return [
        leaf.clone() if isinstance(leaf, Tensor) and leaf.is_inference() else leaf
        for leaf in leaves
    ]


def _like_buffers(returned: Any, buffers: Tree) -> bool:
    """Whether it can be meant for the new buffers: of their kind, with a name in common."""
    if isinstance(buffers, dict):
        return isinstance(returned, dict) and (
            not returned or any(name in buffers for name in returned)
        )
    return type(returned) is type(buffers)


def _described(tree: Any) -> str:
    if isinstance(tree, Tensor):
        return f"a tensor of shape {tuple(tree.shape)}"
    if isinstance(tree, dict):
        return f"a dict of {_tree.some([repr(name) for name in tree])}"
    return type(tree).__name__
