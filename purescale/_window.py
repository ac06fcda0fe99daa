"""The microbatches of one step: their gradients averaged, their buffers threaded through."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _tree
from ._scaler import HasScale, scale_loss
from ._tree import Tree

LossFn = Callable[[Tree, Tree, Any], "tuple[Tensor, Tree] | tuple[Tensor, Tree, Any]"]


class Window(NamedTuple):
    """What the microbatches gone through amount to."""

    grads: Tree  # still scaled
    loss: Tensor
    empty: Tensor | bool  # nothing to step on: all weights 0, or one that is no weight; False where there is no weight_fn
    buffers: Tree
    aux: tuple[Any, ...]


def gather(
    params: Tree,
    buffers: Tree,
    scaler: HasScale,
    microbatches: list[Any],
    loss_fn: LossFn,
    weight_fn: Callable[[Any], float | Tensor] | None,
) -> Window:
    """The weighted mean of the microbatches' scaled gradients and unscaled losses; buffers thread through them."""
    mean: list[Any] = []
    structure: Any = None
    total: Any = 0.0
    weights_ok: Any = True
    aux: list[Any] = []
    for microbatch in microbatches:
        weight = 1.0 if weight_fn is None else _weight(weight_fn(microbatch), scaler.scale)
        grads, (loss, new_buffers, new_aux) = _scaled_grads(params, buffers, scaler, microbatch, loss_fn)
        new, structure = _tree.flatten((loss, grads))
        total = total + weight
        if isinstance(weight, Tensor):
            weights_ok = weights_ok & torch.isfinite(weight) & (weight >= 0)
            new_buffers = _tree.where(weight == 0, buffers, new_buffers, donate=False)
            mean = _mean(mean, new, torch.where(weight > 0, weight / total, 0.0))
        else:
            mean = _mean(mean, new, weight / total)
        buffers = new_buffers
        aux += new_aux
    loss, grads = structure.unflatten(mean)
    empty = False if weight_fn is None else (total == 0) | ~weights_ok
    return Window(grads, loss, empty, buffers, tuple(aux))


def _mean(mean: list[Any], new: list[Any], share: Any) -> list[Any]:
    """`mean * (1 - share) + new * share` in at least float32, which cannot overflow; at a share of 0 even inf and NaN count for nothing."""

    def counted(value: Tensor) -> Tensor:
        wide: Tensor = value.to(torch.promote_types(value.dtype, torch.float32))
        shared: Tensor = (torch.where(share > 0, wide, 0) if isinstance(share, Tensor) else wide) * share
        return shared.to(wide.dtype)

    if not isinstance(share, Tensor) and share == 1.0:
        return new
    parts: list[Any] = [None if value is None else _tree.on_values(counted, value) for value in new]
    if not mean:
        return parts
    return [part if old is None else (old * (1 - share) + part).to(part.dtype) for old, part in zip(mean, parts, strict=True)]


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
        unscaled = loss.to(torch.promote_types(loss.dtype, torch.float32))
        return scale_loss(scaler, loss).reshape(()), (unscaled.reshape(()), new_buffers, aux)

    if _tree.traced():
        grads, (_, outputs) = torch.func.grad_and_value(scaled, has_aux=True)(inputs)
        outputs = _tree.fresh(outputs)
    else:
        # torch.func.grad would give the same bits; this also takes checkpointing and custom Functions of the older form.
        with torch.enable_grad():
            inputs = [leaf.detach().requires_grad_() for leaf in inputs]
            loss, outputs = scaled(inputs)
            if not loss.requires_grad:
                raise ValueError(
                    "the loss does not depend on params. Likely cause: loss_fn calls the module and not `apply(params, buffers, ...)`, or "
                    "runs under torch.no_grad or inference_mode. Cure: `out, buffers = apply(params, buffers, x)` and a loss of that `out`."
                )
            grads = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
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
    new_leaves = _tree.leaves_like("new_buffers", new_buffers, "buffers", buffers)
    for index, (old, new) in enumerate(zip(_tree.flatten(buffers)[0], new_leaves, strict=True)):
        _tree.check_pair(old, new, buffers, index, "buffers", "new_buffers")
    return loss, new_buffers, aux


def _weight(weight: Any, like: Tensor) -> Tensor:
    if isinstance(weight, Tensor):
        if weight.ndim:
            raise ValueError(f"weight_fn returned a tensor of shape {tuple(weight.shape)}; a weight is 0-d. Cure: `mask.sum()`.")
        return weight.to(like.device, _tree.widest_float(like.device))
    if isinstance(weight, bool) or not isinstance(weight, numbers.Real):
        raise TypeError(
            f"weight_fn returned {weight!r}; a weight is a number or a 0-d tensor. Cure: `weight_fn=lambda batch: len(batch[0])`."
        )
    if not (math.isfinite(weight) and float(weight) >= 0):
        raise ValueError(f"weight_fn returned {weight!r}; a weight is finite and not negative: samples or tokens.")
    return torch.full((), float(weight), dtype=_tree.widest_float(like.device), device=like.device)
