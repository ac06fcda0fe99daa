"""Optimizers around another one: widen its inputs, make its step, narrow the result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._optim.opt_state import OptState, is_wrapped, without_wrappers
from .._optim.partition import PartitionOptimizer
from .._optim.protocol import Optimizer, as_updater
from .._optim.step_inputs import StepInputs, flatten_step, present
from .._torch import dtensor, foreach
from .._torch.autocast import outside_autocast
from .._torch.dtensor import any_dtensor
from .._torch.dtypes import HALF
from .._torch.tracing import is_differentiated, traced
from .._tree import tree as _tree
from .._tree.gradients import as_gradients
from .._tree.scalars import not_made
from .._tree.tree import FlatDict, Leaves, Tree

# The number of elements that are widened at a time. An element takes 6 to 26 bytes meanwhile,
# depending on class and wrapper: 12 to 52 MiB in all.
PIECE = 2**21


def _widening(optimizer: Any) -> Any:
    """Return the first wrapper in `optimizer` that steps half parameters in float32, or None."""
    if isinstance(optimizer, PartitionOptimizer):
        return next(filter(None, map(_widening, optimizer.optimizers.values())), None)
    if not isinstance(optimizer, Wrapper):
        return None
    return optimizer if optimizer.widens_params else _widening(optimizer.optimizer)


class Wrapper:
    """The base of optimizers around others. A subclass has `init`, `stand_ins`, `widen` and
    `narrow`.
    """

    # A rounded result has no derivative.
    differentiable = False
    # True if the inner optimizer steps half parameters in float32.
    widens_params = True

    def __init__(self, optimizer: Optimizer, *settings: Any) -> None:
        if not_made(optimizer, "init", "step"):
            raise TypeError(
                f"expected an optimizer, an object with `init` and `step`, got {optimizer!r}. Fix: "
                "from_torch(torch.optim.AdamW, lr=1e-3), or from_transformation(tx)."
            )
        if self.widens_params and (inner := _widening(optimizer)) is not None:
            raise ValueError(
                f"{inner!r} is inside of another optimizer that steps half parameters in float32, "
                "so it would be given float32 parameters and do nothing. Fix: one of the two, "
                "`with_master_weights` (exact) or `with_stochastic_rounding` (no memory)."
            )
        self.optimizer = optimizer
        self.updater = as_updater(optimizer)
        self.elementwise = self.updater.elementwise
        self.calls_step = self.updater.calls_step
        self.may_add_slots = self.updater.may_add_slots
        self.wide_grads = self.widens_params or self.updater.wide_grads
        self.summary = (optimizer, *settings)

    def __repr__(self) -> str:
        name = type(self).__name__
        return f"{name}({', '.join(map(repr, self.summary))})"

    # ---- for subclasses

    def init(self, params: Tree) -> Tree:
        """Return the state before the first step."""
        raise NotImplementedError

    def inner_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which the innermost optimizer steps a parameter of this dtype."""
        dtype = widened(dtype) if self.widens_params else dtype
        inner = getattr(self.optimizer, "inner_dtype", None)
        return dtype if inner is None else inner(dtype)

    def stand_ins(self, inputs: StepInputs) -> StepInputs:
        """Return tensors with the shapes, dtypes and devices of the result of `widen`. Refuse a
        state that is not this wrapper's.
        """
        raise NotImplementedError

    def widen(self, inputs: StepInputs) -> StepInputs:
        """Return the inputs of the inner optimizer's step, except gradients. Widened tensors are in
        fresh memory.
        """
        raise NotImplementedError

    def narrow(
        self,
        inputs: StepInputs,
        stepped: tuple[Leaves, Any],
        *,
        write: bool,
    ) -> tuple[Leaves, Any]:
        """Return parameters, a list in the order of `inputs`, and the state after the step, from
        those of the inner optimizer. `write` allows writing into the tensors of `inputs` to save
        memory; other results are copied there.
        """
        raise NotImplementedError

    # ---- the step

    @outside_autocast()
    def step(self, params: Tree, grads: Tree, opt_state: Tree) -> tuple[Tree, Tree]:
        """Return parameters and state after one step, in fresh memory."""
        inputs = flatten_step(self, params, grads, opt_state)
        self.check(inputs)
        if self.wide_grads:
            inputs = inputs._replace(grads=inputs.grads.widened())
        return inputs.restore(*self.applied(inputs))

    def check(self, inputs: StepInputs) -> None:
        """Refuse a state that does not belong to these parameters."""
        self.updater.check(self.stand_ins(inputs))

    def prepare(self, inputs: StepInputs, *, in_place: bool = False) -> Any:
        """Return what the inner optimizer prepares."""
        if self.calls_step or traced():
            return None
        state = inputs.opt_state
        if isinstance(without_wrappers(state), OptState):  # its rates are asked without parameters
            own = inputs._replace(opt_state=state.inner if is_wrapped(state) else state)
        else:
            own = self.stand_ins(inputs)
        with torch.no_grad():
            return self.updater.prepare(own, in_place=in_place)

    def applied(
        self, inputs: StepInputs, *, in_place: bool = False, prepared: Any = None
    ) -> tuple[Tree, Tree]:
        """Return parameters and state after the step, as in `Updater`."""
        leaves = _tree.flatten((inputs.params, inputs.opt_state))[0]
        in_place = in_place and not any_dtensor(leaves)  # list operators do not take shards
        if in_place:
            inputs = off_graph(inputs, copy=False)
        old = inputs.params, inputs.opt_state
        if traced():
            self._reject_derivatives([*leaves, *inputs.grads.tensors])
        with torch.set_grad_enabled(torch.is_grad_enabled() and traced()):
            wide = self.widen(inputs)
            stepped, state = self.updater.applied(wide, in_place=in_place, prepared=prepared)
            stepped = _tree.flatten(stepped)[0], state
            params, state = self.narrow(inputs, stepped, write=in_place)
            if in_place:
                _put(_tree.flatten(old)[0], _tree.flatten((params, state))[0])
                params, state = old
        return inputs.params_tree(params), state

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

    def can_be_cut(self, inputs: StepInputs) -> bool:
        """Return True if a step in pieces is that of the whole, and no piece can raise."""
        return (
            not (self.calls_step or traced())
            and isinstance(without_wrappers(inputs.opt_state), OptState)
            and not any_dtensor(_tree.flatten((inputs.params, inputs.opt_state))[0])
        )

    def pieces(self, inputs: StepInputs) -> Iterator[StepInputs]:
        """Yield a step that can be cut in pieces of at most `PIECE` elements, which share the
        memory of `inputs`.
        """
        total = sum([leaf.numel() for leaf in inputs.named_params.values()])
        if total <= PIECE:
            yield inputs
            return
        # A part of a tensor in another memory order would be a copy, and writes into it lost.
        state = _tree.tensors(inputs.opt_state)
        whole_shapes = {leaf.shape for leaf in state if not leaf.is_contiguous()}
        cuts = _cuts(inputs.named_params, whole_shapes, cut_leaves=self.elementwise is True)
        grads = dict(zip(inputs.names, inputs.local_grads(inputs.grads.tensors), strict=True))
        places = inputs.all_places
        for number, cut in enumerate(cuts):
            whole = inputs.named_params
            params = {name: _cut(whole[name], whole[name], span) for name, span in cut.items()}
            yield StepInputs(
                FlatDict(tuple(params)),
                list(params),
                list(params.values()),
                as_gradients(
                    [_cut(grads[name], whole[name], span) for name, span in cut.items()],
                    inputs.grads.scale,
                    owned=inputs.grads.owned,
                ),
                _state_of(inputs.opt_state, inputs, cut, last=number == len(cuts) - 1),
                params,
                inputs.dense_off_graph,
                places={
                    name: places[name]._replace(start=places[name].start + span.start)
                    for name, span in cut.items()
                },
            )


class Span(NamedTuple):
    """The elements of a parameter in a piece. `stop` None means all; `last` marks the last
    piece.
    """

    start: int
    stop: int | None
    last: bool


_ALL = Span(0, None, True)


def _cuts(
    params: Mapping[str, Tensor], whole: Set[torch.Size], *, cut_leaves: bool
) -> list[dict[str, Span]]:
    """Return the elements of the parameters in each piece: whole parameters up to `PIECE` elements,
    or a part of a larger one, unless its shape is in `whole`.
    """
    cuts: list[dict[str, Span]] = [{}]
    room = PIECE
    for name, leaf in params.items():
        count = leaf.numel()
        if count > PIECE and cut_leaves and leaf.is_contiguous() and leaf.shape not in whole:
            starts = range(0, count, PIECE)
            spans = [
                Span(start, min(start + PIECE, count), start + PIECE >= count) for start in starts
            ]
            cuts += [{name: span} for span in spans] + [{}]
            room = PIECE
            continue
        if count > room and cuts[-1]:
            cuts.append({})
            room = PIECE
        cuts[-1][name] = _ALL
        room -= count
    return [cut for cut in cuts if cut]


def _cut(value: Any, param: Tensor, span: Span) -> Any:
    """Return this part of a tensor that belongs to a parameter. A tensor of another shape, such as
    a step count, belongs to the last part; the other parts get copies.
    """
    if isinstance(value, dict):
        return {key: _cut(child, param, span) for key, child in value.items()}
    if not isinstance(value, Tensor) or span.stop is None:
        return value
    if value.shape == param.shape:
        return value.reshape(-1)[span.start : span.stop]
    return value if span.last else value.clone()


def _state_of(state: Tree, inputs: StepInputs, cut: Mapping[str, Span], *, last: bool) -> Tree:
    """Return the part of an optimizer's state for a piece. Numbers of the whole state belong to the
    last piece; the other pieces get copies.
    """

    def by_name(found: Mapping[str, Any]) -> dict[str, Any]:
        return {name: _cut(found[name], params[name], span) for name, span in cut.items()}

    params = inputs.named_params
    if isinstance(state, Tensor):
        return state if last else state.clone()
    if isinstance(state, tuple) and not state:
        return ()
    if isinstance(state, OptState):
        of_the_whole = state._replace(slots={})
        part = of_the_whole if last else _tree.clone(of_the_whole)
        return part._replace(slots=by_name(state.slots))
    if hasattr(state, "_fields"):
        return type(state)(*[_state_of(part, inputs, cut, last=last) for part in state])
    leaves = inputs.structure.flatten_up_to(state)  # like the parameters
    return by_name(dict(zip(inputs.names, leaves, strict=True)))


def off_graph(inputs: StepInputs, *, copy: bool) -> StepInputs:
    """Return the inputs with parameters and state that may be overwritten."""
    old = inputs.params, inputs.opt_state
    leaves, structure = _tree.flatten(old)
    indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if copy:
        for index, new in zip(indices, foreach.clone([leaves[i] for i in indices]), strict=True):
            leaves[index] = new
    elif not any([leaves[index].requires_grad for index in indices]):
        return inputs
    detached = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return with_params(inputs, *structure.unflatten(detached))


# ---- for wrappers --------------------------------------------------------------------------------


def _put(targets: Sequence[Any], results: Sequence[Any]) -> None:
    """Copy the results of a step into the given tensors, except those that are there already."""
    every = zip(targets, results, strict=True)
    pairs = [(a, b) for a, b in every if b is not a and isinstance(a, Tensor)]
    foreach.copy_([a for a, _ in pairs], [b for _, b in pairs])


def stand_in(like: Tensor, dtype: torch.dtype, made: dict[Any, Tensor]) -> Tensor:
    """Return a tensor with the shape and device of `like` and memory for one element."""
    local = dtensor.shard(like)
    key = local.shape, local.device, dtype
    if key not in made:
        made[key] = torch.empty((), dtype=dtype, device=local.device).expand(local.shape)
    return dtensor.from_local_like(like, made[key])


def with_stand_ins(inputs: StepInputs, opt_state: Tree) -> StepInputs:
    """Return the inputs with this state and float32 stand-ins for half parameters."""
    made: dict[Any, Tensor] = {}
    params = [
        stand_in(leaf, torch.float32, made) if is_half(leaf) else leaf for leaf in inputs.params
    ]
    return with_params(inputs, params, opt_state)


def with_params(inputs: StepInputs, params: Leaves, opt_state: Tree) -> StepInputs:
    """Return the inputs with these parameters, in their order, and this state."""
    named = present(inputs.names, params)
    return inputs._replace(params=params, named_params=named, opt_state=opt_state, known=())


def is_half(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype in HALF


def widened(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for a half dtype; any other dtype unchanged."""
    return torch.float32 if dtype in HALF else dtype


def checked_state(state: Tree, kind: type) -> Tree:
    """Return the state, or refuse one that is not this wrapper's."""
    if not isinstance(state, kind):
        raise TypeError(
            f"opt_state is {type(state).__name__}, expected {kind.__name__}. Likely cause: the "
            "state of the inner optimizer, or of another. Fix: what `optimizer.init(params)` or "
            "the last step returned; for a TrainState `state.opt_state`."
        )
    return state
