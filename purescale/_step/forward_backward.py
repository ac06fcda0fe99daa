"""The loss and the gradients of one microbatch, for a step and for a loop by hand."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from .._loss_scale.scaling import wide_loss
from .._optim.param_structure import ParamStructure
from .._step.backward import (
    OnGrad,
    compute_gradients,
    independent_loss_error,
    materialize_grads,
    stream_gradients,
)
from .._torch import donation, dtensor, private
from .._torch.tracing import CallContext, refuse_graph_end
from .._tree import pytree
from .._tree.aliasing import detach_and_unalias
from .._tree.leaves import versions
from .._tree.matching import matching_leaves
from .._tree.pytree import FlatTree, Leaves, Tree


class LossFn(Protocol):
    """The protocol of the function that `train_step` and `value_and_grad` differentiate: a pure
    function of params, buffers and one microbatch.
    """

    def __call__(
        self, params: Tree, buffers: Tree, microbatch: Any, /
    ) -> tuple[Tensor, Tree] | tuple[Tensor, Tree, Any]:
        """Return the unscaled loss, the new buffers (`buffers` if nothing changes them) and,
        optionally, aux: anything else that the step returns.
        """


class MicrobatchResult(NamedTuple):
    """Loss, gradients, buffers and aux of one microbatch: off the graph, unless the step is
    differentiable or under torch.func. Their memory is shared neither with the state, the
    microbatch nor each other, except that of gradients which are only to be read; `loss_fn` may
    still hold the buffers and aux that it returned.
    """

    grads: Leaves  # of the scaled loss, None for a leaf None; empty if `on_grad` took them
    owned: bool  # nobody else can see the memory of the gradients, so they may be overwritten
    loss: Tensor  # unscaled, 0-d
    buffers: Leaves  # the new ones
    aux: list[Any]


class LossOutputs(NamedTuple):
    """The results of `loss_fn`, checked, on the graph of its forward."""

    loss: Tensor  # unscaled, 0-d, at least float32
    buffers: Leaves
    aux: list[Any]


class ForwardBackward:
    """The loss, the gradients and the new buffers of each microbatch of a step.

    Work that is the same for all microbatches is done once. If it is `differentiable`, the
    gradients stay on the graph.
    """

    def __init__(
        self,
        flat_params: FlatTree,
        param_structure: ParamStructure,
        flat_buffers: FlatTree,
        scale: Tensor,
        loss_fn: LossFn,
        context: CallContext,
        *,
        differentiable: bool = False,
    ) -> None:
        self.scale, self.loss_fn, self.flat_buffers = scale, loss_fn, flat_buffers
        self.flat_params, self.param_structure = flat_params, param_structure
        self.present_params = param_structure.pick_present(flat_params.leaves)
        dense_without_history = flat_params.tensor_list.dense_without_history
        self.sharded = not dense_without_history and dtensor.any_dtensor(self.present_params)
        self.create_graph = differentiable and not context.traced
        self.off_graph = not (context.traced or self.create_graph)
        self.context = context
        if not context.reuses_plans and self.off_graph:
            refuse_graph_end()
        if not (context.traced or (dense_without_history and not scale.is_inference())):
            *self.present_params, self.scale = _normal_tensors([*self.present_params, self.scale])

    def run(
        self,
        buffers: Leaves,
        microbatch: Any,
        pointers: donation.Pointers | None,
        *,
        owned: bool = True,
        on_grad: OnGrad | None = None,
        refuse_repeats: bool = True,
    ) -> MicrobatchResult:
        """Return the result of one microbatch. Off the graph it shares no storage of these
        `pointers`; None if they are not known. If `on_grad(index, grad_cell)` is given, it takes
        each gradient out of its cell as the backward makes it, as in `stream_gradients`, and the
        result has none. Unless they are to be `owned`, which they can be off the graph, a custom
        backward or a hook may still hold the gradients, so they must only be read.
        """
        if self.context.traced:
            return self._call_torch_func(buffers, microbatch)
        # torch.func.grad would give the same bits, but refuses checkpointing around `apply` and
        # custom Functions of the older form.
        param_leaves, outputs = self.run_forward(buffers, microbatch)
        # The bits of a product with the scale. A copy, because a custom backward or a hook may
        # write into it; autograd casts it to the dtype of the loss.
        scale = self.scale if self.create_graph else self.scale.detach()
        loss, loss_grad = outputs.loss, scale.clone()
        grads: list[Tensor] = []
        if on_grad is not None:
            stream_gradients(loss, loss_grad, param_leaves, on_grad, refuse_repeats=refuse_repeats)
        elif self.create_graph:
            grads_on_graph = torch.autograd.grad(
                loss, param_leaves, loss_grad, create_graph=True, allow_unused=True
            )
            grads = materialize_grads(grads_on_graph, param_leaves)
        else:
            raw = compute_gradients(loss, loss_grad, param_leaves)
            del loss_grad  # a gradient may be a view of it
            grads = donation.take_ownership(raw) if owned else list(map(Tensor.detach, raw))
            if self.sharded:
                pairs = zip(grads, param_leaves, strict=True)
                grads = [dtensor.redistribute_like(*pair) for pair in pairs]
        pointers, owned = (pointers, owned) if self.off_graph else (None, False)
        result = self._result(grads, outputs, pointers, owned=owned)
        del param_leaves, loss, outputs  # frees the graph
        return result

    def _call_torch_func(self, buffers: Leaves, microbatch: Any) -> MicrobatchResult:
        static_outputs: list[Any] = []  # torch.func returns tensors only

        def scaled(param_leaves: Leaves) -> tuple[Tensor, list[Tensor]]:
            outputs = self._call_loss_fn(buffers, microbatch, param_leaves)
            loss = outputs.loss * self.scale
            if not loss.requires_grad:  # by this transform; the module's own graph does not count
                raise independent_loss_error()
            leaves, structure = private.pytree.tree_flatten(outputs)
            others = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]
            static_outputs.extend((structure, others))
            return loss, [leaf for leaf in leaves if isinstance(leaf, Tensor)]

        grads, (_, tensors) = torch.func.grad_and_value(scaled, has_aux=True)(self.present_params)
        structure, others = static_outputs
        leaves = [tensors.pop(0) if other is None else other[0] for other in others]
        outputs = private.pytree.tree_unflatten(leaves, structure)
        return self._result(list(grads), outputs, None, owned=False)

    def _result(
        self,
        grads: Leaves,
        outputs: LossOutputs,
        pointers: donation.Pointers | None,
        *,
        owned: bool,
    ) -> MicrobatchResult:
        aux = outputs.aux
        detached = detach_and_unalias([outputs.loss, *outputs.buffers], pointers)
        loss, *buffers = detached
        if aux:
            leaves, structure = pytree.flatten(aux)
            if pointers is not None:
                pointers = {*pointers, *donation.storage_pointers(detached)}
            aux = structure.unflatten(detach_and_unalias(leaves, pointers))
        if grads:
            grads = self.param_structure.with_none(grads)
        return MicrobatchResult(grads, owned, loss, buffers, aux)

    def run_forward(self, buffers: Leaves, microbatch: Any) -> tuple[Leaves, LossOutputs]:
        """Return the parameters, and the outputs on their graph over them, in eager mode."""
        if not torch.is_grad_enabled():
            with torch.enable_grad():
                return self.run_forward(buffers, microbatch)
        if (
            buffers is not self.flat_buffers.leaves
            or not self.flat_buffers.tensor_list.dense_without_history
        ):
            buffers = _normal_tensors(buffers)
        # New tensors, because a loss may register hooks on them: leaves, because autocast caches
        # the cast of a leaf; on a graph aliases, so that a gradient ends there. Leaves pass
        # `isinstance(leaf, nn.Parameter)` unless make_fx records them: it does not see that a
        # subclass is made, and would take parameters for constants.
        if self.create_graph:
            param_leaves = list(map(_alias, self.present_params))
        else:
            param_leaves = [
                nn.Parameter(tensor)
                if type(tensor) is Tensor and not self.context.recorded_by_make_fx
                else tensor.detach().requires_grad_()
                for tensor in self.present_params
            ]
        read_only = [*param_leaves, *buffers]
        before = versions(read_only)
        outputs = self._call_loss_fn(buffers, microbatch, param_leaves)
        if not outputs.loss.requires_grad:
            raise independent_loss_error()
        if versions(read_only) != before:
            self._refuse_write(_written(read_only, before))
        return param_leaves, outputs

    def _refuse_write(self, index: int) -> None:
        """Refuse a write into the parameter or, counted after these, the buffer of this number."""
        of_buffer = index - len(self.present_params)
        if of_buffer < 0:
            raise RuntimeError(
                f"loss_fn wrote into the parameter {self.param_structure.names[index]}; a step "
                "must not change its arguments. Fix: a new tensor, `w = w / w.norm()`, or the "
                "change between two steps."
            )
        raise RuntimeError(
            f"loss_fn wrote into {pytree.path(self.flat_buffers.tree, 'buffers', of_buffer)}; a "
            "step must not change its arguments. Fix: return a new tensor, `{**buffers, 'mean': "
            "0.9 * buffers['mean'] + 0.1 * x}`."
        )

    def _call_loss_fn(self, buffers: Leaves, microbatch: Any, param_leaves: Leaves) -> LossOutputs:
        """Return the results of a call of `loss_fn`, checked."""
        params = self.param_structure.unflatten(param_leaves)
        buffer_tree = self.flat_buffers.structure.unflatten(buffers)
        try:
            returned = self.loss_fn(params, buffer_tree, microbatch)
        except TypeError:
            check_loss_fn(self.loss_fn)
            raise
        except RuntimeError as error:
            if "Tensor.requires_grad_()" in str(error):
                error.add_note(_REQUIRES_GRAD)
            raise
        loss, new_buffers, *aux = checked_returned(returned)
        if type(loss) is not Tensor:
            loss = dtensor.full_tensor(loss)
        alike = self.flat_buffers.leaves_if_matching(new_buffers)
        if alike is None:
            check_container(new_buffers, self.flat_buffers.tree)
            alike = matching_leaves(
                self.flat_buffers.tree,
                new_buffers,
                "buffers",
                "new_buffers",
                _ONE_SHAPE,
                flat=self.flat_buffers,
            )[1]
        loss = wide_loss(loss, self.scale)
        return LossOutputs(loss.reshape(()) if loss.ndim else loss, alike, aux)


_REQUIRES_GRAD = (
    "loss_fn calls requires_grad_, and a step that is compiled, mapped or jitted takes gradients "
    "by torch.func. Fix: `slope = torch.func.grad(function)(x)` in place of `x.requires_grad_()` "
    "and `torch.autograd.grad(function(x), x)`."
)


def checked_returned(returned: Any) -> tuple[Any, ...]:
    """Return what loss_fn returned. Refuse all but a tuple of a loss, new buffers and, optionally,
    aux.
    """
    if not (isinstance(returned, tuple) and len(returned) in (2, 3)):
        kind = type(returned).__name__
        what = f"a tuple of {len(returned)}" if isinstance(returned, tuple) else kind
        raise TypeError(
            f"loss_fn returned {what}; expected (loss, new_buffers) or (loss, new_buffers, aux). "
            "Fix: `return loss, new_buffers`, or `return loss, buffers` if nothing changes them."
        )
    if not isinstance(returned[0], Tensor):
        raise TypeError(
            f"loss_fn returned {type(returned[0]).__name__} as its loss; expected a tensor of one "
            "element. Fix: return the loss first, `return loss, new_buffers`."
        )
    return returned


def check_container(new_buffers: Any, buffers: Tree) -> None:
    """Refuse what is not a container of buffers, such as aux in their place."""
    expected: type[Any] = dict if isinstance(buffers, dict) else type(buffers)
    fits = isinstance(new_buffers, expected)
    if fits and expected is dict and new_buffers:
        fits = any([name in buffers for name in new_buffers])
    if not fits:
        raise ValueError(
            "new_buffers does not match buffers: loss_fn returned "
            f"{pytree.describe_argument(new_buffers)} where the new buffers belong, "
            f"{pytree.describe_argument(buffers)}. Fix: `return loss, new_buffers, "
            "aux`, or `return loss, buffers, aux`."
        )


def check_loss_fn(loss_fn: Callable[..., Any]) -> None:
    """Refuse a loss_fn that does not take three arguments."""
    if torch.compiler.is_dynamo_compiling():  # refuses it in words of its own
        return
    try:
        signature = inspect.signature(loss_fn)
    except ValueError:  # a function in C may have none
        return
    try:
        signature.bind(None, None, None)
    except TypeError:
        raise TypeError(
            f"loss_fn takes {signature}; it is called as loss_fn(params, buffers, microbatch). "
            "Fix: `def loss_fn(params, buffers, microbatch)` that ends with `return loss, "
            "buffers`."
        ) from None


_ONE_SHAPE = (
    "A skipped step returns the old buffers and an applied step the new ones, so both must match. "
    "If the first forward of a module gives the buffer its shape, call the module once before "
    "`make_functional`."
)


def _alias(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()


def _normal_tensors(leaves: Leaves) -> Leaves:
    """Replace tensors made under inference_mode by copies that autograd accepts."""
    if pytree.are_tensors(leaves) and not any(map(Tensor.is_inference, leaves)):
        return leaves
    return [pytree.as_normal_tensor(leaf) for leaf in leaves]


def _written(leaves: Leaves, before: list[int]) -> int:
    """Return the index of the first leaf with another version than before."""
    return next(i for i, new in enumerate(versions(leaves)) if new != before[i])


def check_unwritten(batch: list[Tensor], before: list[int]) -> None:
    """Refuse a write into tensors of microbatches that had these versions before."""
    if versions(batch) == before:
        return
    raise RuntimeError(
        f"loss_fn wrote into its microbatch, into tensor {_written(batch, before)} of "
        f"{len(batch)}; a step must not change its arguments. Likely cause: `x.div_(255)`, or a "
        "first layer with inplace=True. Fix: `x = x / 255`, or `x = x.clone()` first."
    )
