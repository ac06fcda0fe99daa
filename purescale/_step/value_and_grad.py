"""The loss and the gradients of a microbatch, for a loop by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .._loss_scale.rules import HasScale, NoScale
from .._loss_scale.scaling import check_device_of_scale
from .._optim.param_structure import ParamStructure
from .._step.forward_backward import ForwardBackward, LossFn, check_loss_fn, check_unwritten
from .._step.memory import ArgumentMemory
from .._torch.autocast import outside_autocast
from .._torch.donation import pointers_of_each
from .._torch.tracing import CallContext, current_context
from .._tree import pytree
from .._tree.cache import TreeCache
from .._tree.hints import hint_keywords
from .._tree.leaves import versions
from .._tree.matching import check_parameters, device_of, refuse_autograd_history
from .._tree.pytree import FlatTree, Tree
from .._tree.scalars import short_repr


@hint_keywords
def value_and_grad(
    loss_fn: LossFn,
) -> Callable[..., tuple[tuple[Tensor, Tree] | tuple[Tensor, Tree, Any], Tree]]:
    """Return `fn(params, buffers, microbatch, scaler=None)`, equal to

        def scaled(params):
            loss, new_buffers, *aux = loss_fn(params, buffers, microbatch)
            return scale_loss(scaler, loss), (loss.float(), new_buffers, *aux)

        grads, (_, value) = torch.func.grad_and_value(scaled, has_aux=True)(params)
        return value, grads

    The gradients for a loop by hand, with the `loss_fn` of `train_step` and the same bits. In eager
    mode torch's ordinary backward makes them. It takes two thirds of the time of `torch.func` and
    accepts activation checkpointing and autograd Functions of the older form. Inside
    `torch.compile`, `torch.vmap` and `torch.func.grad` the gradients come from `torch.func`, so
    that the result can be differentiated again.

    Args:
        loss_fn: As in `train_step`. It returns `(loss, new_buffers)` or `(loss, new_buffers, aux)`:
            a real loss of one element, not scaled, and `buffers` if nothing changes them.
        params: The first argument of `fn`, as are all that follow. A pytree of floating or complex
            tensors and None, to be differentiated.
        buffers, microbatch: The other arguments of `loss_fn`. They have no gradient.
        scaler: The state that scales the loss, from `rule.init(device)`. Unscale with the same one.
            Without it the gradients are those of the loss itself.

    Returns:
        `(loss, new_buffers), grads`, or `(loss, new_buffers, aux), grads` if `loss_fn` returns aux.
        `loss` is 0-d, not scaled, in float32 or float64. `grads` are of the scaled loss, a tree
        like `params` in their dtypes: 0 for a parameter that the loss does not use, None for a leaf
        None. In eager mode the results are on no graph and share memory neither with the arguments
        nor with each other, so that a later step may take any of them with `donate=True`. Inside
        the caller's `torch.autocast` only `loss_fn` runs under autocast.

    Raises:
        TypeError: `loss_fn` is not a function of three arguments, `scaler` is not the state of one
            scaler, a parameter is an integer, or `loss_fn` returned something else. An option of
            `jax.value_and_grad` was given, such as `has_aux`.
        ValueError: There is no parameter, a tensor is on another device or on a graph of
            torch.autograd, the new buffers do not match, or the loss gives no parameter a gradient,
            as one of `model(x)` in place of `apply(params, buffers, x)`.
        RuntimeError: `loss_fn` wrote into a parameter, a buffer or a tensor of its microbatch.

    Example:
        >>> import torch
        >>> from purescale import DynamicScale, unscale_and_check
        >>> def loss_fn(params, buffers, x):
        ...     return (params["w"] * x).sum(), {"seen": buffers["seen"] + 1}
        >>> fn, scaler = value_and_grad(loss_fn), DynamicScale(init_scale=8.0).init()
        >>> params, buffers = {"w": torch.ones(2)}, {"seen": torch.tensor(0)}
        >>> (loss, buffers), grads = fn(params, buffers, torch.tensor([1.0, 2.0]), scaler=scaler)
        >>> loss, buffers, grads
        (tensor(3.), {'seen': tensor(1)}, {'w': tensor([ 8., 16.])})
        >>> unscale_and_check(scaler, grads)
        ({'w': tensor([1., 2.])}, tensor(False))

    Source of the rule: `jax.value_and_grad(..., has_aux=True)`; torch.amp's
    `scaler.scale(loss).backward()`.
    """
    if not callable(loss_fn):
        raise TypeError(
            f"value_and_grad takes a function, got {type(loss_fn).__name__} {short_repr(loss_fn)}. "
            "Fix: `(loss, buffers), grads = value_and_grad(loss_fn)(params, buffers, microbatch, "
            "scaler)`."
        )
    check_loss_fn(loss_fn)
    return functools.partial(_value_and_grad, loss_fn)


@outside_autocast("loss_fn")
def _value_and_grad(
    loss_fn: LossFn, params: Tree, buffers: Tree, microbatch: Any, scaler: HasScale | None = None
) -> tuple[Any, Tree]:
    context = current_context()
    trees, param_structure = _flatten(params, buffers, scaler, context)
    flat_params, flat_buffers, flat_scaler = trees
    batch = pytree.all_tensors(microbatch)
    arguments = [*flat_params.leaves, *flat_buffers.leaves, *flat_scaler.leaves, *batch]
    memory = ArgumentMemory.of(pointers_of_each([arguments]), batch)
    before = versions(memory.batch_tensors)
    forward_backward = ForwardBackward(
        flat_params,
        param_structure,
        flat_buffers,
        flat_scaler.tree.scale,
        loss_fn,
        context,
    )
    out = forward_backward.run(flat_buffers.leaves, microbatch, memory.pointers)
    check_unwritten(memory.batch_tensors, before)
    new_buffers = flat_buffers.structure.unflatten(out.buffers)
    return (out.loss, new_buffers, *out.aux), flat_params.structure.unflatten(out.grads)


_cache = TreeCache(16)  # the structure of parameters that were checked


def _flatten(
    params: Tree, buffers: Tree, scaler: HasScale | None, context: CallContext
) -> tuple[list[FlatTree], ParamStructure]:
    """Check parameters, buffers and scaler. Return them flat, and the structure of the first."""
    trees = params, buffers, () if scaler is None else scaler
    if cached := _cache.find_trees(context, trees):
        return cached
    flat_trees = list(map(FlatTree.of, trees))
    flat_params, flat_buffers, flat_scaler = flat_trees
    if all([leaf is None for leaf in flat_params.leaves]):
        raise ValueError(
            f"params has no tensor: {short_repr(params)}. Fix: `apply, params, buffers = "
            "make_functional(model)`."
        )
    check_parameters(flat_params)
    refuse_autograd_history(params=flat_params, buffers=flat_buffers)
    if scaler is None:
        device = device_of(params, flat_params.leaves, "params")
        flat_scaler = FlatTree.of(NoScale().init(device))
    scale = getattr(flat_scaler.tree, "scale", None)
    if not isinstance(scale, Tensor) or scale.ndim:
        raise TypeError(
            f"scaler is {short_repr(scaler)}; expected the state of one scaler, its `scale` a 0-d "
            "tensor. Fix: `scaler = rule.init(device)`, or `state.scaler` of a TrainState; for "
            "stacked states call this under torch.vmap."
        )
    check_device_of_scale(scale, params, flat_params.leaves, "params", flat_params.tensor_list)
    param_structure = ParamStructure.of(flat_params)
    if scaler is not None:
        _cache.add_trees(context, flat_trees, param_structure)
    return [flat_params, flat_buffers, flat_scaler], param_structure
