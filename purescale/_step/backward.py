"""The backward of one microbatch: the gradients of a loss with respect to its parameters."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .._torch import private
from .._tree.pytree import Leaves

# A function of the index of an input and a cell, a list with its gradient, which it takes out: a
# reference from elsewhere would count as a use.
OnGrad: TypeAlias = Callable[[int, list[Tensor]], None]

_grad = operator.attrgetter("grad")


def compute_gradients(loss: Tensor, loss_grad: Tensor, param_leaves: Leaves) -> list[Tensor]:
    """`torch.autograd.grad(loss, leaves, loss_grad, materialize_grads=True)` without checking each
    leaf, with what a custom backward adds to `.grad`, as those of reversible layers do. Refuse a
    loss that uses none of them.
    """
    if set(map(_grad, param_leaves)) != {None}:
        _clear_grads(param_leaves)
    # The graph is neither kept nor made for a second derivative.
    arguments = (loss,), (loss_grad,), False, False, tuple(param_leaves), True
    gradients: list[Any] = list(private.run_backward(*arguments, accumulate_grad=False))
    if set(map(_grad, param_leaves)) != {None}:
        for index, leaf in enumerate(param_leaves):
            if (added := leaf.grad) is not None:
                gradient = gradients[index]
                gradients[index] = added if gradient is None else gradient + added
    if type(None) in set(map(type, gradients)):
        return materialize_grads(gradients, param_leaves)
    return gradients


def materialize_grads(gradients: Sequence[Tensor | None], param_leaves: Leaves) -> list[Tensor]:
    """Return the gradients, with zeros for a parameter that the loss does not use. Refuse a loss
    that uses none.
    """
    if all([gradient is None for gradient in gradients]):
        raise independent_loss_error()
    return [
        torch.zeros_like(leaf.detach()) if gradient is None else gradient
        for gradient, leaf in zip(gradients, param_leaves, strict=True)
    ]


def independent_loss_error() -> ValueError:
    """Return the error of a loss that gives no parameter a gradient."""
    return ValueError(
        "the loss does not depend on params: no parameter has a gradient. Likely cause: loss_fn "
        "calls the module, runs under torch.no_grad, or makes inner steps without "
        "differentiable=True. Fix: a loss of `out, buffers = apply(params, buffers, x)`."
    )


def _clear_grads(param_leaves: Leaves) -> None:
    """Forget what a backward inside of loss_fn has put into `.grad`."""
    for leaf in param_leaves:
        leaf.grad = None


def stream_gradients(
    loss: Tensor,
    loss_grad: Tensor,
    param_leaves: Leaves,
    on_grad: OnGrad,
    *,
    refuse_repeats: bool,
) -> None:
    """Hand over each gradient as the backward makes it; zeros for an unused input. With
    `refuse_repeats`, refuse a custom backward that gives one in two pieces, because the first has
    been sent.
    """
    taken: set[int] = set()
    num_params = len(param_leaves)  # hooks that held the leaves would keep them alive

    def take(index: int, leaf: Tensor) -> None:
        if leaf.grad is None:  # a compiled loss or a Function gave None; zeros follow
            return
        if refuse_repeats and index in taken:
            raise RuntimeError(
                f"parameter {index} of {num_params} got its gradient in two pieces, and the first "
                "was already sent to the other ranks. Likely cause: a custom backward that calls "
                "`.backward()` itself. Fix: all_reduce_grads by hand after value_and_grad."
            )
        grad_cell, leaf.grad = [leaf.grad.detach()], None
        taken.add(index)
        on_grad(index, grad_cell)

    def before_sum(leaf: Tensor, _: Tensor) -> None:
        if leaf.grad is not None:  # torch adds to it in place, and a custom backward may keep it
            leaf.grad = leaf.grad.detach().clone()

    _clear_grads(param_leaves)
    hooks = []
    for index, leaf in enumerate(param_leaves):
        hooks.append(leaf.register_hook(functools.partial(before_sum, leaf)))
        hooks.append(leaf.register_post_accumulate_grad_hook(functools.partial(take, index)))
    try:
        torch.autograd.backward(loss, loss_grad, inputs=param_leaves)
    finally:  # a loss may keep a parameter, and differentiate through it later
        for hook in hooks:
            hook.remove()
    for index, leaf in enumerate(param_leaves):  # what a custom backward has put there itself
        take(index, leaf)
    if not taken:
        raise independent_loss_error()
    for index in reversed(range(len(param_leaves))):
        if index not in taken:
            on_grad(index, [torch.zeros_like(param_leaves[index].detach())])
