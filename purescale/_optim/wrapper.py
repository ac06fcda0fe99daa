"""Optimizers around another one: decode what is stored, make its step, encode the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .._optim.opt_state import OptState, Tensors, without_wrappers
from .._optim.partition import PartitionOptimizer
from .._optim.protocol import Optimizer
from .._optim.step_inputs import StepInputs
from .._optim.updater import Updater, as_updater
from .._torch import dtensor, foreach
from .._torch.dtypes import is_half, wide_dtype
from .._torch.tracing import is_differentiated, traced
from .._tree import tree as _tree
from .._tree.gradients import as_gradients
from .._tree.leaves import describe
from .._tree.states import select_masked, write_over
from .._tree.tree import Leaves, Tree

# The number of elements that are widened at a time. An element takes 6 to 26 bytes meanwhile,
# depending on class and wrapper: at most 64 MiB in all. On an accelerator, where a launch takes the
# time of many elements, it is 8 times that number and at most 1 GiB.
PIECE_NUMEL = 2**20
# The fields of a state that are cut with the parameters: by name in an OptState, else a tree like
# these.
BY_PARAM = ("counts", "rest", "iterate")


class Wrapper(Updater):
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
        self.updater = as_updater(optimizer)
        for inner in _wrappers_in(optimizer):
            if self.widens_params and inner.widens_params:
                raise ValueError(
                    f"{inner!r} is inside of another optimizer that steps half parameters in "
                    "float32, so it would be given float32 parameters and do nothing. Fix: one of "
                    "the two, `with_master_weights` (exact) or `with_stochastic_rounding` (no "
                    "memory)."
                )
        self.differentiable = self.updater.differentiable and not self.rounds
        self.elementwise = self.updater.elementwise
        self.calls_step, self.may_raise = self.updater.calls_step, self.updater.may_raise
        self.may_add_slots = self.updater.may_add_slots
        self.wide_grads = self.widens_params or self.updater.wide_grads
        self.compared = (optimizer, *settings)

    def __repr__(self) -> str:
        return f"{self.made_by}({', '.join(map(repr, self.compared))})"

    # ---- for subclasses

    def init(self, params: Tree) -> Tree:
        """Return the state before the first step."""
        raise NotImplementedError

    def decode(self, inputs: StepInputs) -> StepInputs:
        """Return the inputs of the inner optimizer's step. What is not stored in another form stays
        the same tensor.
        """
        raise NotImplementedError

    def encode(self, inputs: StepInputs, params: Tensors, state: Tree) -> tuple[Tensors, Tree]:
        """Return parameters by name and the state after the step, from those of the inner
        optimizer.
        """
        raise NotImplementedError

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

    def check(self, inputs: StepInputs) -> None:
        """Refuse a state that does not belong to these parameters."""
        params = inputs.params
        if self.widens_params:
            wide = [torch.float32 if is_half(param) else None for param in params.values()]
            params = dict(zip(params, stand_ins(list(params.values()), wide), strict=True))
        self.updater.check(inputs.with_params(params, self.inner_state(inputs.opt_state)))

    def current_settings(self, opt_state: Tree) -> Any:
        """Return the settings of the inner optimizer's step."""
        with self.grad_mode():
            return self.updater.current_settings(self.inner_state(opt_state))

    def apply_step(self, inputs: StepInputs, current: Any) -> tuple[Tree, Tree]:
        """Return parameters and state after the step: decoded, stepped and encoded."""
        return self._stepped(inputs, lambda inner: self.updater.apply_step(inner, current))[0]

    def apply_step_unless(
        self, skip: Tensor, inputs: StepInputs, current: Any, *, in_place: bool = False
    ) -> tuple[Tree, Tree]:
        """Return the step of a large model piece by piece, which bounds the memory for what is
        decoded.
        """
        in_one_piece = self.calls_step or self.differentiable or torch.compiler.is_compiling()
        if in_one_piece or not isinstance(without_wrappers(inputs.opt_state), OptState):
            return super().apply_step_unless(skip, inputs, current, in_place=in_place)

        def step(inner: StepInputs) -> tuple[Tree, Tree]:
            return self.updater.apply_step_unless(skip, inner, current, in_place=not traced())

        if traced():
            new, chosen = self._stepped(inputs, step)
            before, after, structure = _tree.matching_leaves(inputs.trees, new, "old", "new")
            done = set(map(id, chosen))
            leaves = [
                b if id(b) in done else select_masked(skip, [a], [b])[0]
                for a, b in zip(before, after, strict=True)
            ]
            return structure.unflatten(leaves)
        with torch.no_grad():
            old = inputs.trees
            inputs = _off_graph(inputs, copy=self.may_raise or not in_place)
            for piece in self._pieces(inputs):
                leaves = _tree.flatten(piece.trees)[0]
                results = _tree.flatten(self._stepped(piece, step)[0])[0]
                pairs = [(a, b) for a, b in zip(leaves, results, strict=True) if a is not b]
                select_masked(skip, [a for a, _ in pairs], [b for _, b in pairs], in_place=True)
        return write_over(old, inputs.trees) if self.may_raise and in_place else inputs.trees

    def _stepped(
        self, inputs: StepInputs, step: Callable[[StepInputs], tuple[Tree, Tree]]
    ) -> tuple[tuple[Tree, Tree], Leaves]:
        """Return parameters and state after `step` of what is decoded, and the leaves of what that
        returned.
        """
        inputs = inputs.unscaled(wide=self.wide_grads)
        if self.rounds and traced():
            leaves = _tree.flatten(inputs.trees)[0]
            self._reject_derivatives([*leaves, *inputs.grads.tensors])
        with self.grad_mode():
            params, state = stepped = step(self.decode(inputs))
            encoded, state = self.encode(inputs, inputs.named(params), state)
        return (inputs.params_tree(encoded), state), _tree.flatten(stepped)[0]

    def _reject_derivatives(self, leaves: Sequence[Any]) -> None:
        """Refuse a derivative through rounding, which would come out as zeros."""
        if torch.compiler.is_dynamo_compiling() or not any(map(is_half, leaves)):
            return
        if any([isinstance(leaf, Tensor) and is_differentiated(leaf) for leaf in leaves]):
            raise ValueError(
                f"a derivative is taken through a step of {self!r}, which rounds to half precision "
                "and has no derivative. Likely cause: torch.func.grad or jvp around the step, with "
                "respect to parameters, gradients or settings. Fix: the optimizer without wrappers "
                "over float32 parameters."
            )

    # ---- pieces

    def _pieces(self, inputs: StepInputs) -> Iterator[StepInputs]:
        """Yield a step that can be cut in pieces of a bounded number of elements, which share the
        memory of `inputs`.
        """
        params = inputs.params
        launch_bound = any(map(foreach.is_launch_bound, params.values()))
        size = 8 * PIECE_NUMEL if launch_bound else PIECE_NUMEL
        if sum([leaf.numel() for leaf in params.values()]) <= size:
            yield inputs
            return
        grads, positions = inputs.local_grads, inputs.all_positions
        cuts = _cuts(inputs, size, cut_leaves=self.elementwise is True)
        for cut in cuts:
            of_piece = as_gradients(list(_cut_each(grads, params, cut).values()))
            yield StepInputs.of_dict(
                _cut_each(params, params, cut),
                inputs.grads.with_tensors_of(of_piece),
                _cut_state(inputs.opt_state, inputs, cut, last=cut is cuts[-1]),
                positions={
                    name: positions[name]._replace(start=positions[name].start + span.start)
                    for name, span in cut.items()
                },
            )


def _wrappers_in(optimizer: Any) -> Iterator[Wrapper]:
    """Yield the wrappers in an optimizer, itself and those in parts of a partition too."""
    if isinstance(optimizer, Wrapper):
        yield optimizer
        yield from _wrappers_in(optimizer.optimizer)
    if isinstance(optimizer, PartitionOptimizer):
        for part in optimizer.optimizers.values():
            yield from _wrappers_in(part)


Cut = dict[str, slice]  # the elements of each parameter in a piece


def _cuts(inputs: StepInputs, size: int, *, cut_leaves: bool) -> list[Cut]:
    """Return the elements of the parameters in each piece: whole parameters up to `size` elements,
    or a part of a larger one.
    """
    # A part of a tensor in another memory order would be a copy, and writes into it lost.
    state = _tree.tensors(inputs.opt_state)
    whole_shapes = {leaf.shape for leaf in state if not leaf.is_contiguous()}
    cuts: list[Cut] = [{}]
    room = size
    for name, leaf in inputs.params.items():
        count = max(leaf.numel(), 1)
        may_cut = cut_leaves and leaf.is_contiguous() and leaf.shape not in whole_shapes
        step = size if may_cut else count
        for start in range(0, count, step):
            stop = min(start + step, leaf.numel())
            if stop - start > room and cuts[-1]:
                cuts.append({})
                room = size
            cuts[-1][name] = slice(start, stop)
            room -= stop - start
    return cuts


def _cut_each(values: Mapping[str, Any], params: Tensors, cut: Cut) -> dict[str, Any]:
    """Return the parts of these values that belong to a piece, None for a parameter without."""
    return {name: _cut(values.get(name), params[name], span) for name, span in cut.items()}


def _cut(value: Any, param: Tensor, span: slice) -> Any:
    """Return this part of a tensor that belongs to a parameter. A tensor of another shape, such as
    a step count, belongs to the last part; the other parts get copies.
    """
    if not isinstance(value, Tensor) or span == slice(0, param.numel()):
        return value
    if value.shape == param.shape:
        return value.reshape(-1)[span]
    return value if span.stop == param.numel() else value.clone()


def _cut_state(state: Tree, inputs: StepInputs, cut: Cut, *, last: bool) -> Tree:
    """Return what a piece has of an optimizer's state. Numbers of the whole state belong to the
    last piece; the other pieces get copies.
    """
    fields = {}
    for field, value in state._asdict().items():
        if field == "inner":
            fields[field] = _cut_state(value, inputs, cut, last=last)
        elif field == "slots":
            fields[field] = {
                key: _cut_each(inputs.named(tree), inputs.params, cut)
                for key, tree in value.items()
            }
        elif field in BY_PARAM and value != ():
            fields[field] = _cut_each(inputs.named(value), inputs.params, cut)
        else:
            fields[field] = value if last else _tree.clone(value)
    return type(state)(**fields)


def _off_graph(inputs: StepInputs, *, copy: bool) -> StepInputs:
    """Return the inputs with parameters and state that may be overwritten."""
    leaves, structure = _tree.flatten((inputs.params, inputs.opt_state))
    tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]
    remaining = iter(foreach.clone(tensors) if copy else tensors)
    leaves = [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return inputs.with_params(*structure.unflatten(leaves))


# ---- for wrappers --------------------------------------------------------------------------------


def on_shards(function: Callable[..., Tensor], leaf: Tensor, *others: Tensor) -> Tensor:
    """Return an elementwise function of tensors, or of the local shards of DTensors alike."""
    result = function(*map(dtensor.shard, (leaf, *others)))
    return cast(Tensor, dtensor.from_local_like(leaf, result))


def stand_ins(leaves: Leaves, dtypes: Sequence[torch.dtype | None]) -> Leaves:
    """Return leaves with these dtypes and memory for one element. A leaf with None, or of this
    dtype already, is returned as it is.
    """
    empty: dict[Any, Tensor] = {}
    results = list(leaves)
    for index, (leaf, dtype) in enumerate(zip(leaves, dtypes, strict=True)):
        if dtype is not None and leaf.dtype is not dtype:
            local = dtensor.shard(leaf)
            key = local.shape, local.device, dtype
            if key not in empty:
                empty[key] = torch.empty((), dtype=dtype, device=local.device).expand(local.shape)
            results[index] = dtensor.from_local_like(leaf, empty[key])
    return results


def checked_state(state: Tree, kind: type) -> Tree:
    """Return the state, or refuse one that is not this wrapper's."""
    if not isinstance(state, kind):
        raise TypeError(
            f"opt_state is {type(state).__name__}, expected {kind.__name__}. Likely cause: the "
            "state of the inner optimizer, or of another. Fix: what `optimizer.init(params)` or "
            "the last step returned; for a TrainState `state.opt_state`."
        )
    return state


def leaves_by_param(
    state: Tree, field: str, params: Tree, fits: Callable[[Any, Any], bool], expected: str
) -> Leaves:
    """Return the leaves of a field of a state in the order of the parameters. Refuse a state of
    other parameters: one whose leaf does not `fit` its parameter.
    """
    leaves, structure = _tree.flatten(params)
    try:
        values: Leaves = structure.flatten_up_to(getattr(state, field))
    except (ValueError, KeyError):
        raise ValueError(
            f"opt_state.{field} has another structure than params. Likely cause: the state of "
            "other parameters. Fix: `opt_state = optimizer.init(params)` for these params."
        ) from None
    for index, (param, value) in enumerate(zip(leaves, values, strict=True)):
        if not fits(param, value):
            raise TypeError(
                f"{_tree.path(params, 'params', index)} is {describe(param)}, opt_state.{field} "
                f"there {describe(value)}; expected {expected}, of its shape and device. "
                "Likely cause: parameters that were cast after `init`. Fix: `opt_state = "
                "optimizer.init(params)`."
            )
    return values
