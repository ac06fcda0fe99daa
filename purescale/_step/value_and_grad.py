"""The loss and the gradients of one microbatch, of a loss that is scaled."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Set
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from .._loss_scale.scaling import wide_loss
from .._torch import donation, dtensor, functorch_kernels, private
from .._torch.dtypes import wide_dtype
from .._torch.tracing import traced
from .._tree import tree as _tree
from .._tree.leaves import versions
from .._tree.tree import Flat, Leaves, Tree

functorch_kernels.register()


class LossFn(Protocol):
    """What `train_step` differentiates: a pure function of params, buffers and one microbatch."""

    def __call__(
        self, params: Tree, buffers: Tree, microbatch: Any, /
    ) -> tuple[Tensor, Tree] | tuple[Tensor, Tree, Any]:
        """The unscaled loss, the new buffers (`buffers` where nothing changes them), and what else
        the step shall return.
        """


class MicrobatchResult(NamedTuple):
    """What one microbatch gives, off the graph and apart from the state. `loss_fn` may still hold
    the buffers and aux that it returned.
    """

    grads: Leaves  # of the scaled loss, one per parameter; None where that is
    loss: Tensor  # unscaled, 0-d
    buffers: Leaves  # the new ones
    aux: list[Any]


_ENABLED = contextlib.nullcontext()  # which costs a fifth of enabling again what is enabled


class ValueAndGrad:
    """The loss, the gradients and the new buffers of each microbatch of a step.

    What is the same for all of them is worked out once.
    """

    def __init__(self, params: Flat, buffers: Flat, scaler: Flat, loss_fn: LossFn) -> None:
        self.scale, self.loss_fn, self.buffers = scaler.tree.scale, loss_fn, buffers
        self.params, self.structure = params, params.structure
        self.present = [index for index, leaf in enumerate(params.leaves) if leaf is not None]
        self.inputs = [params.leaves[index] for index in self.present]
        self.are_all_present = len(self.inputs) == len(params.leaves)
        self.seen: list[Tensor] = []  # the tensors of the microbatches
        self.sharded = not params.ordinary and dtensor.any_dtensor(self.inputs)
        self.is_traced = traced()
        if not self.is_traced:
            given = [*self.inputs, *buffers.leaves, *scaler.leaves]
            self.taken = {None, *donation.memories(given)}
            if not (params.ordinary and scaler.ordinary):
                *self.inputs, self.scale = _recordable([*self.inputs, self.scale])

    def zeros(self) -> Leaves:
        """Gradients of a window in which nothing counts."""
        return self._leaves(
            [torch.zeros_like(leaf, dtype=wide_dtype(leaf.dtype)) for leaf in self.inputs]
        )

    def names(self) -> list[str]:
        """The dotted names of the parameters that are tensors."""
        every = _tree.names(self.params.tree)
        return [every[index] for index in self.present]

    def _leaves(self, tensors: list[Any]) -> Leaves:
        """One for each leaf of the parameters, None where they are None."""
        if self.are_all_present:
            return tensors
        leaves: Leaves = [None] * len(self.params.leaves)
        for index, tensor in zip(self.present, tensors, strict=True):
            leaves[index] = tensor
        return leaves

    def __call__(
        self, buffers: Leaves, microbatch: Any, on_grad: Callable[[int, Tensor], None] | None = None
    ) -> MicrobatchResult:
        """`on_grad(index, gradient)` takes each gradient as the backward makes it; then none are
        returned.
        """
        if self.is_traced:
            return self.traced(self.inputs, self.scale, buffers, microbatch)
        # torch.func.grad would give the same bits; this also takes checkpointing around `apply` and
        # custom Functions of the older form.
        inputs, loss, outputs = self.graph(buffers, microbatch)
        grads: list[Any] = []
        if on_grad is not None:
            _backward(loss, inputs, on_grad)
        else:
            found: list[Any] = list(_gradients(loss, inputs))
            for index, gradient in enumerate(found):
                if gradient is None:  # the loss does not use it
                    found[index] = torch.zeros_like(inputs[index].detach())
            grads = donation.owned(found)
            if self.sharded:
                pairs = zip(grads, inputs, strict=True)
                grads = [dtensor.redistribute_like(*pair) for pair in pairs]
        seen = _tree.all_tensors(microbatch)
        self.seen += seen
        return self._result(grads, outputs, self.taken.union(donation.memories(seen)))

    def traced(
        self, inputs: Leaves, scale: Tensor, buffers: Leaves, microbatch: Any
    ) -> MicrobatchResult:
        """In plain operators, of parameters and a scale that may stand for those of the step."""
        scaled = functools.partial(self._scaled, buffers, microbatch, scale=scale)
        found, (_, outputs) = torch.func.grad_and_value(scaled, has_aux=True)(inputs)
        return self._result(list(found), outputs, None)

    def _result(
        self,
        grads: Leaves,
        outputs: tuple[Tensor, Leaves, list[Any]],
        taken: Set[int | None] | None,
    ) -> MicrobatchResult:
        found = _tree.detach_unaliased([outputs[0], *outputs[1]], taken)
        loss, buffers = found[0], found[1:]  # an unpacked rest is no list to Dynamo of torch 2.11
        aux = outputs[2]
        if aux:
            leaves, structure = _tree.flatten(aux)
            aux = structure.unflatten(_tree.detach_unaliased(leaves, taken))
        return MicrobatchResult(self._leaves(grads) if grads else [], loss, buffers, aux)

    def graph(
        self, buffers: Leaves, microbatch: Any
    ) -> tuple[Leaves, Tensor, tuple[Tensor, Leaves, list[Any]]]:
        """The parameters, the scaled loss on its graph over them, and the outputs; where nothing is
        traced.
        """
        if buffers is not self.buffers.leaves or not self.buffers.ordinary:
            buffers = _recordable(buffers)
        with _ENABLED if torch.is_grad_enabled() else torch.enable_grad():
            # Leaves, so that autocast casts a weight once however often it is used; new ones, as a
            # loss may hang a hook on them.
            inputs = _parameters(self.inputs)
            before = versions(inputs)
            loss, outputs = self._scaled(buffers, microbatch, inputs, scale=self.scale)
        if not loss.requires_grad:
            raise ValueError(
                "the loss does not depend on params. Likely cause: loss_fn calls the module "
                "and not `apply(params, buffers, ...)`, or runs under torch.no_grad or "
                "inference_mode. Fix: `out, buffers = apply(params, buffers, x)` and a loss "
                "of that `out`."
            )
        if versions(inputs) != before:
            self._refuse_writes(inputs, before)
        return inputs, loss, outputs

    def _refuse_writes(self, inputs: Leaves, before: list[int]) -> None:
        index = next(i for i, new in enumerate(versions(inputs)) if new != before[i])
        name = self.names()[index]
        raise RuntimeError(
            f"loss_fn wrote into the parameter {name}. Parameters are the state of this step, "
            "which nothing may change. Likely cause: weights that are clipped, renormalised or "
            "initialised in forward, under torch.no_grad. Fix: compute a new tensor, "
            "`w = w / w.norm()`, or change the parameters between two steps."
        )

    def _scaled(
        self, buffers: Leaves, microbatch: Any, inputs: Leaves, *, scale: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Leaves, list[Any]]]:
        params = self.structure.unflatten(self._leaves(inputs))
        given = self.buffers.structure.unflatten(buffers)
        loss, new_buffers, aux = self._checked(self.loss_fn(params, given, microbatch))
        wide = wide_loss(loss, scale)
        wide = wide.reshape(()) if wide.ndim else wide
        unscaled = wide.clone() if aux else wide  # aux may hold the loss
        return wide * scale, (unscaled, new_buffers, aux)

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
                "aux). Fix: `return loss, new_buffers`, or `return loss, buffers` where nothing "
                "changes them."
            )
        loss, new_buffers, *aux = returned
        if type(loss) is not Tensor:
            loss = dtensor.full_tensor(loss)
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"loss_fn returned {type(loss).__name__} as its loss; expected a tensor of one "
                "element. Fix: loss first, `return loss, new_buffers`."
            )
        both = type(buffers) is dict and type(new_buffers) is dict
        alike = both and new_buffers.keys() == buffers.keys()
        if not (alike or _like_buffers(new_buffers, buffers)):
            raise ValueError(
                "new_buffers does not match buffers: loss_fn returned "
                f"{_tree.described(new_buffers)} where the new buffers belong, "
                f"{_tree.described(buffers)}. Likely cause: `return loss, aux`. Fix: `return loss, "
                "new_buffers, aux`, or `return loss, buffers, aux` where nothing changes them."
            )
        leaves = _tree.matching_leaves(
            buffers, new_buffers, "buffers", "new_buffers", flat=self.buffers
        )[1]
        return loss, leaves, aux


def _parameters(tensors: Leaves) -> Leaves:
    """Leaves over the memory of parameters, which isinstance takes for an nn.Parameter."""
    if set(map(type, tensors)) == {Tensor}:
        kind, requires_grad = itertools.repeat(nn.Parameter), itertools.repeat(True)
        return list(map(private.make_subclass, kind, tensors, requires_grad))
    return [
        private.make_subclass(nn.Parameter, tensor, True)
        if type(tensor) is Tensor
        else tensor.detach().requires_grad_()
        for tensor in tensors
    ]


def _gradients(loss: Tensor, inputs: Leaves) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad(loss, inputs, allow_unused=True)` without its checks of each input."""
    seed, once = (torch.ones_like(loss),), (False, False)
    return private.run_backward((loss,), seed, *once, tuple(inputs), True, accumulate_grad=False)


def _backward(loss: Tensor, inputs: Leaves, on_grad: Callable[[int, Tensor], None]) -> None:
    """Hand over each gradient as the backward makes it; zeros of what the loss does not use."""
    taken: set[int] = set()

    def take(index: int, leaf: Tensor) -> None:
        found = [leaf.grad]
        leaf.grad = None
        taken.add(index)
        on_grad(index, donation.owned(found)[0])  # type: ignore[arg-type]

    for index, leaf in enumerate(inputs):
        leaf.grad = None  # of a backward inside of loss_fn
        leaf.register_post_accumulate_grad_hook(functools.partial(take, index))
    torch.autograd.backward(loss, inputs=inputs)
    for index in reversed(range(len(inputs))):
        if index not in taken:
            on_grad(index, torch.zeros_like(inputs[index].detach()))


def _recordable(leaves: Leaves) -> Leaves:
    """Tensors made under inference_mode as copies that autograd takes; all others as they are."""
    if _tree.are_tensors(leaves) and not any(map(Tensor.is_inference, leaves)):
        return leaves
    return [_tree.recordable(leaf) for leaf in leaves]


def _like_buffers(returned: Any, buffers: Tree) -> bool:
    """Whether it can be meant for the new buffers: of their kind, with a name in common."""
    if isinstance(buffers, dict):
        return isinstance(returned, dict) and (
            not returned or any(name in buffers for name in returned)
        )
    return type(returned) is type(buffers)
