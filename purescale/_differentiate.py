"""The gradients of one microbatch, of a loss that is scaled."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from . import _dtensor, _foreach, _leaf, _torch, _tree
from ._scaler import scale_loss
from ._tree import Flat, Leaves, Tree


class LossFn(Protocol):
    """What `train_step` differentiates: a pure function of params, buffers and one microbatch."""

    def __call__(
        self, params: Tree, buffers: Tree, microbatch: Any, /
    ) -> tuple[Tensor, Tree] | tuple[Tensor, Tree, Any]:
        """The unscaled loss, the new buffers (`buffers` where nothing changes them), and what else
        the step shall return.
        """


class Differentiate:
    """The gradients of the scaled loss; the unscaled loss, new buffers and aux, off the graph and
    in memory of their own.

    What is the same for every microbatch is worked out once. Parameters without a tensor are left
    out until `tree`.
    """

    def __init__(self, params: Flat, buffers: Flat, scaler: Flat, loss_fn: LossFn) -> None:
        self.scaler, self.loss_fn, self.buffers = scaler.tree, loss_fn, buffers
        self.structure = params.structure
        self.present = [leaf is not None for leaf in params.leaves]
        self.inputs = [leaf for leaf in params.leaves if leaf is not None]
        self.seen: list[Tensor] = []  # in the microbatches
        self.spread = _dtensor.among(self.inputs)
        if not _tree.traced():
            names = zip(_tree.names(params.tree), self.present, strict=True)
            self.names = [name for name, here in names if here]
            given = [*self.inputs, *buffers.leaves, *scaler.leaves]
            self.taken = {None, *_leaf.storages(given)}
            self.inputs = _recordable(self.inputs)

    def zeros(self) -> Leaves:
        return [
            torch.zeros_like(leaf, dtype=_foreach.wide_dtype(leaf.dtype)) for leaf in self.inputs
        ]

    def tree(self, leaves: Leaves) -> Tree:
        present = iter(leaves)
        return self.structure.unflatten([next(present) if here else None for here in self.present])

    def __call__(
        self,
        buffers: Leaves,
        microbatch: Any,
        put: Callable[[int, Tensor], None] | None = None,
        least: int = 0,
    ) -> tuple[Leaves, tuple[Tensor, Leaves, list[Any]]]:
        """`put` takes gradients of at least so many elements as the backward makes them, in place
        of which None is returned.
        """
        if _tree.traced():
            scaled = functools.partial(self._scaled, buffers, microbatch)
            found, (_, outputs) = torch.func.grad_and_value(scaled, has_aux=True)(self.inputs)
            return list(found), _tree.fresh(outputs)
        # torch.func.grad would give the same bits; this also takes checkpointing around `apply` and
        # custom Functions of the older form.
        inputs, loss, outputs = self.graph(buffers, microbatch)
        if put is not None:
            grads = _put_each(put, least, loss, inputs)
        else:
            found = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
            # a backward may return what it was given, or what it keeps
            grads = [
                grad.detach().clone()
                if held > _ALONE
                else grad.detach()
                if grad.requires_grad
                else grad
                for grad, held in zip(found, _references(found), strict=True)
            ]
        if self.spread:
            grads = [_dtensor.like(grad, leaf) for grad, leaf in zip(grads, inputs, strict=True)]
        seen = _tree.all_tensors(microbatch)
        self.seen += seen
        return grads, _tree.fresh(outputs, self.taken.union(_leaf.storages(seen)))

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
            inputs = [_parameter(leaf) for leaf in self.inputs]
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
        given = self.buffers.structure.unflatten(buffers)
        loss, new_buffers, aux = self._checked(self.loss_fn(self.tree(inputs), given, microbatch))
        unscaled = loss.to(_foreach.wide_dtype(loss.dtype))
        scaled = scale_loss(self.scaler, loss).reshape(())
        return scaled, (unscaled.reshape(()), new_buffers, aux)

    def _checked(self, returned: Any) -> tuple[Tensor, Leaves, list[Any]]:
        buffers = self.buffers.tree
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
        leaves = _tree.paired(buffers, new_buffers, "buffers", "new_buffers", flat=self.buffers)[1]
        return loss, leaves, aux


def _parameter(leaf: Tensor) -> Tensor:
    """A leaf over the memory of a parameter, which isinstance takes for an nn.Parameter."""
    if type(leaf) is not Tensor:
        return leaf.detach().requires_grad_()
    parameter: Tensor = _torch.make_subclass(nn.Parameter, leaf, True)
    return parameter


def _references(tensors: Sequence[Tensor]) -> list[int]:
    return [sys.getrefcount(tensor) for tensor in tensors]


_ALONE = _references((torch.empty(0, device="cpu"),))[0]  # of what only its tuple holds


def _put_each(
    put: Callable[[int, Tensor], None], least: int, loss: Tensor, inputs: Leaves
) -> Leaves:
    """Put each gradient of at least that size as the backward makes it; nothing else holds on to
    it. Returns the others.

    torch hands over a tensor that nobody else has, or a copy of it.
    """
    waiting = [index for index, leaf in enumerate(inputs) if leaf.numel() >= least]
    taken: set[int] = set()

    def take(index: int, leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        taken.add(index)
        assert gradient is not None
        put(index, gradient)

    for index in waiting:
        inputs[index].register_post_accumulate_grad_hook(functools.partial(take, index))
    torch.autograd.backward(loss, inputs=inputs)
    grads = [leaf.grad for leaf in inputs]
    for index in reversed(range(len(inputs))):
        if grads[index] is None and index not in taken:
            zeros = torch.zeros_like(inputs[index].detach())
            if inputs[index].numel() >= least:
                put(index, zeros)
            else:
                grads[index] = zeros
    return grads


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
