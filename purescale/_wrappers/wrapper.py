"""Optimizers around another one: decode what is stored, make its step, encode the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .._optim.optimizer import FlatOptimizer, Optimizer, as_flat_optimizer
from .._optim.optimizer_inputs import OptimizerInputs
from .._torch import dtensor, foreach
from .._torch.dtypes import is_half, wide_dtype
from .._torch.tracing import is_differentiated
from .._tree import pytree
from .._tree.gradients import Gradients
from .._tree.leaves import describe
from .._tree.matching import matching_leaves
from .._tree.pytree import Leaves, Tree
from .._tree.select import overwrite_tree, select_leaves
from .._wrappers.pieces import Piece, grads_of_piece, inputs_of_pieces, plan_cuts


class Wrapper(FlatOptimizer):
    """The base of optimizers around others, whose parameters and state have another form. A
    subclass has `init`, `decode` and its inverse `encode`. Its state has the inner one as `inner`;
    its fields with something for each parameter are in `BY_PARAM`.
    """

    made_by: str  # the public function that makes it
    # True if `encode` rounds what the inner optimizer returns, which has no derivative then.
    rounds = True
    # True if the inner optimizer steps half parameters in float32.
    widens_params = True

    def __init__(self, optimizer: Optimizer, *settings: Any) -> None:
        self.optimizer = optimizer
        self.flat_optimizer = as_flat_optimizer(optimizer)
        self.differentiable = self.flat_optimizer.differentiable and not self.rounds
        self.elementwise = self.flat_optimizer.elementwise
        self.runs_user_code = self.flat_optimizer.runs_user_code
        self.may_add_slots = self.flat_optimizer.may_add_slots
        self.can_step_in_pieces = self.flat_optimizer.can_step_in_pieces
        self.wide_grads = self.widens_params or self.flat_optimizer.wide_grads
        self.agreed_settings = (optimizer, *settings)

    def __repr__(self) -> str:
        return f"{self.made_by}({', '.join(map(repr, self.agreed_settings))})"

    # ---- for subclasses

    def decode(self, inputs: OptimizerInputs) -> OptimizerInputs:
        """Return the inputs of the inner optimizer's step. What is not stored in another form stays
        the same tensor.
        """
        raise NotImplementedError

    def encode(
        self, inputs: OptimizerInputs, params: list[Tensor], state: Tree
    ) -> tuple[list[Tensor], Tree]:
        """Return parameters and the state after the step, from those of the inner optimizer."""
        raise NotImplementedError

    def check_state(self, inputs: OptimizerInputs) -> None:
        """Refuse a state that does not belong to these parameters."""

    def inner_state(self, opt_state: Tree) -> Tree:
        """Return the part of a state that has the form of the inner optimizer's."""
        return opt_state.inner

    def slot_dtype(
        self, path: tuple[str, ...], slot: Any, dtype: torch.dtype
    ) -> torch.dtype | None:
        """Return the dtype in which a state keeps this slot of a parameter of this dtype."""
        dtype = wide_dtype(dtype) if self.widens_params else dtype
        inner = self.optimizer
        return inner.slot_dtype(path, slot, dtype) if isinstance(inner, Wrapper) else dtype

    # ---- the step

    def plan(self, inputs: OptimizerInputs) -> list[Piece]:
        """Return the pieces of a step. Refuse a state that does not belong to these parameters, and
        what the inner optimizer refuses.
        """
        self.check_state(inputs)
        pieces = [Piece(None, self.flat_optimizer.plan(self._decoded_stand_ins(inputs)))]
        can_cut = self._inner_decides(inputs) and not inputs.context.traced
        cuts = plan_cuts(inputs, cut_leaves=self.elementwise is True) if can_cut else []
        if len(cuts) > 1:
            decoded = map(self._decoded_stand_ins, inputs_of_pieces(inputs, cuts))
            pieces = list(map(Piece, cuts, map(self.flat_optimizer.plan, decoded)))
        return pieces

    def _inner_decides(self, inputs: OptimizerInputs) -> bool:
        """Return True if the inner optimizer is given the flag of a skip; otherwise old or new is
        selected after `encode`.
        """
        is_compiled = inputs.context.traced and torch.compiler.is_compiling()
        return self.can_step_in_pieces and not (is_compiled or self.differentiable)

    def _decoded_stand_ins(self, inputs: OptimizerInputs) -> OptimizerInputs:
        """Return inputs with the metadata of `decode(inputs)`."""
        params = inputs.params
        if self.widens_params:
            wide = [torch.float32 if is_half(param) else None for param in params]
            params = stand_ins(params, wide)
        return inputs.with_params_and_state(params, self.inner_state(inputs.opt_state))

    def evaluate_settings(self, opt_state: Tree) -> Any:
        """Return the settings of the inner optimizer's step."""
        return self.flat_optimizer.evaluate_settings(self.inner_state(opt_state))

    def compute_step(self, inputs: OptimizerInputs, grads: Gradients) -> tuple[list[Tensor], Tree]:
        """Return parameters and state after the step with unscaled gradients."""
        [piece] = inputs.plan
        return self._step_piece(piece, inputs, grads)[0]

    def step_or_skip(
        self,
        inputs: OptimizerInputs,
        grads: Gradients,
        skip: Tensor | None = None,
        *,
        in_place: bool = False,
    ) -> tuple[list[Tensor], Tree]:
        """Return parameters and state after the step, the old ones if it is skipped."""
        pieces: list[Piece] = inputs.plan
        is_whole = skip is None and not in_place and len(pieces) == 1
        if is_whole or not self._inner_decides(inputs):
            return super().step_or_skip(inputs, grads, skip, in_place=in_place)
        if inputs.context.traced:
            return self._step_in_trace(pieces[0], inputs, grads, skip)
        return self._step_in_pieces(pieces, inputs, grads, skip, in_place=in_place)

    def _step_in_trace(
        self, piece: Piece, inputs: OptimizerInputs, grads: Gradients, skip: Tensor | None
    ) -> tuple[list[Tensor], Tree]:
        """Return the step as a whole. What the inner optimizer has not chosen is selected."""
        old, flag = (inputs.params, inputs.opt_state), False if skip is None else skip
        unscaled = self.unscale_and_clip(inputs, grads, skip)
        new, chosen = self._step_piece(piece, inputs, unscaled, skip)
        before, after, structure = matching_leaves(old, new, "old", "new")
        done = set(map(id, chosen))
        leaves = [
            b if id(b) in done else select_leaves(flag, [a], [b])[0]
            for a, b in zip(before, after, strict=True)
        ]
        return structure.unflatten(leaves)

    def _step_in_pieces(
        self,
        pieces: list[Piece],
        inputs: OptimizerInputs,
        grads: Gradients,
        skip: Tensor | None,
        *,
        in_place: bool,
    ) -> tuple[list[Tensor], Tree]:
        """Return the step, made piece by piece: that bounds the memory for what is decoded."""
        old, flag = (inputs.params, inputs.opt_state), False if skip is None else skip
        with torch.no_grad():
            inputs = _off_graph(inputs, copy=self.runs_user_code or not in_place)
            cuts = [piece.cut for piece in pieces if piece.cut is not None]
            parts = inputs_of_pieces(inputs, cuts) if cuts else [inputs]
            for piece, own_inputs in zip(pieces, parts, strict=True):
                own_grads = grads if piece.cut is None else grads_of_piece(inputs, grads, piece.cut)
                leaves = pytree.flatten((own_inputs.params, own_inputs.opt_state))[0]
                unscaled = own_grads.apply_pending(wide=self.wide_grads)
                stepped = self._step_piece(piece, own_inputs, unscaled, skip, in_place=True)[0]
                results = pytree.flatten(stepped)[0]
                pairs = [(a, b) for a, b in zip(leaves, results, strict=True) if a is not b]
                select_leaves(flag, [a for a, _ in pairs], [b for _, b in pairs], in_place=True)
        new = inputs.params, inputs.opt_state
        return overwrite_tree(old, new) if self.runs_user_code and in_place else new

    def _step_piece(
        self,
        piece: Piece,
        inputs: OptimizerInputs,
        grads: Gradients,
        skip: Tensor | None = None,
        *,
        in_place: bool = False,
    ) -> tuple[tuple[list[Tensor], Tree], Leaves]:
        """Return parameters and state after a step with unscaled gradients: decoded, stepped and
        encoded; and the leaves of what the inner step returned.
        """
        if self.rounds and inputs.context.traced and not torch.compiler.is_dynamo_compiling():
            self._refuse_derivatives([inputs.params, inputs.opt_state, grads.tensors])
        with self.grad_mode(inputs.context):
            inner = self.decode(inputs)._replace(plan=piece.plan)
            stepped = self.flat_optimizer.step_or_skip(inner, grads, skip, in_place=in_place)
            return self.encode(inputs, *stepped), pytree.flatten(stepped)[0]

    def _refuse_derivatives(self, trees: Tree) -> None:
        """Refuse a derivative through rounding, which would come out as zeros."""
        tensors = pytree.tensors(trees)
        if any(map(is_half, tensors)) and any(map(is_differentiated, tensors)):
            raise ValueError(
                f"a derivative is taken through a step of {self!r}, which rounds to half precision "
                "and has no derivative. Fix: the optimizer without wrappers, of float32 parameters."
            )


def _off_graph(inputs: OptimizerInputs, *, copy: bool) -> OptimizerInputs:
    """Return the inputs with parameters and state that may be overwritten."""
    leaves, structure = pytree.flatten((inputs.params, inputs.opt_state))
    tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]
    remaining = iter(foreach.detach_and_clone(tensors) if copy else tensors)
    leaves = [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return inputs.with_params_and_state(*structure.unflatten(leaves))


# ---- for wrappers --------------------------------------------------------------------------------


def on_shards(function: Callable[..., Tensor], leaf: Tensor, *others: Tensor) -> Tensor:
    """Return an elementwise function of tensors, or of the local shards of DTensors alike."""
    result = function(*map(dtensor.local_shard, (leaf, *others)))
    return cast(Tensor, dtensor.from_local_like(leaf, result))


def stand_ins(leaves: Leaves, dtypes: Sequence[torch.dtype | None]) -> Leaves:
    """Return leaves with these dtypes and memory for one element. A leaf with None, or of this
    dtype already, is returned as it is.
    """
    results = list(leaves)
    for index, (leaf, dtype) in enumerate(zip(leaves, dtypes, strict=True)):
        if dtype is not None and leaf.dtype is not dtype:
            local = dtensor.local_shard(leaf)
            stand_in = torch.empty((), dtype=dtype, device=local.device).expand(local.shape)
            results[index] = dtensor.from_local_like(leaf, stand_in)
    return results


def checked_state(state: Tree, kind: type) -> Tree:
    """Return the state, or refuse one that is not this wrapper's."""
    if not isinstance(state, kind):
        raise TypeError(
            f"opt_state is {type(state).__name__}, expected {kind.__name__}. Fix: what "
            "`optimizer.init(params)` or the last step returned; for a TrainState "
            "`state.opt_state`."
        )
    return state


def leaves_by_param(
    state: Tree, field: str, params: Tree, fits: Callable[[Any, Any], bool], expected: str
) -> Leaves:
    """Return the leaves of a field of a state in the order of the parameters. Refuse a state of
    other parameters: one whose leaf does not `fit` its parameter.
    """
    leaves, structure = pytree.flatten(params)
    try:
        values: Leaves = structure.flatten_up_to(getattr(state, field))
    except (ValueError, KeyError):
        raise ValueError(
            f"opt_state.{field} has another structure than params. Fix: `opt_state = "
            "optimizer.init(params)` for these params."
        ) from None
    for index, (param, value) in enumerate(zip(leaves, values, strict=True)):
        if not fits(param, value):
            raise TypeError(
                f"{pytree.path(params, 'params', index)} is {describe(param)}, opt_state.{field} "
                f"there {describe(value)}; expected {expected}, of its shape and device. Fix: "
                "`opt_state = optimizer.init(params)`, after a cast of params."
            )
    return values
