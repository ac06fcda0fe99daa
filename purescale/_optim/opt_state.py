"""The state of a class of torch.optim: its slots for each parameter, and their checks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._optim.formulas import FIRST_STEP, Formula
from .._torch.tensor_list import TensorList
from .._torch.tracing import traced
from .._tree.hints import document_fields
from .._tree.leaves import describe
from .._tree.tree import Tree

Tensors = dict[str, Tensor]  # by the dotted name of a parameter
Slots = dict[str, dict[str, Tensor]]


class ParamGroup(NamedTuple):
    """A parameter group of torch."""

    names: list[str]  # of its parameters
    settings: dict[str, Any]  # complete
    overridden: frozenset[str] = frozenset()  # the settings that an override names
    lr_varies: bool = False  # its learning rate may differ in a later step


@document_fields
class OptState(NamedTuple):
    """The state of a torch optimizer. Its structure is final from `init` on, but for a class
    of your own, which makes slots in its first step.

    Attributes:
        applied: int64 []. The number of applied steps.
        slots: What the class keeps for each parameter, by its dotted name and by torch's names:
            `{"conv.weight": {"step": ..., "exp_avg": ...}}`.
        lr: float32 []. The rate that steps use (with a schedule a factor of it), with
            `in_state=("lr",)`; else `()`.
        hyper: The other settings in the state, float32 [] each, by name: `{"weight_decay": ...,
            "betas": (..., ...)}`; `()` if there are none.
        iteration: int64 []. The number of steps, skipped ones too, with `schedule_by="iteration"`;
            else `()`.
    """

    applied: Tensor
    slots: Slots
    lr: Any = ()
    hyper: Any = ()
    iteration: Any = ()


def values_of(slots: Slots) -> list[Tensor]:
    """Return the tensors of all slots, in order."""
    return list(itertools.chain.from_iterable(map(dict.values, slots.values())))


def slots_like(slots: Slots, values: Iterable[Tensor]) -> Slots:
    """Return slots of these names with the next of these values, the inverse of `values_of`."""
    remaining = iter(values)
    return {name: dict(zip(slot, remaining, strict=False)) for name, slot in slots.items()}


def is_wrapped(state: Tree) -> bool:
    """Return True for the state of a wrapper, with another state inside. Tensors have a method
    `inner`.
    """
    return isinstance(state, tuple) and hasattr(state, "inner")


def without_wrappers(state: Tree) -> Tree:
    """Return the state of the innermost optimizer."""
    while is_wrapped(state):
        state = state.inner
    return state


def is_of_torch(state: Tree) -> bool:
    """Return True for the state of a class of torch, with slots that can be listed."""
    return isinstance(state, OptState) and type(state.slots) is dict


def are_parts(state: Tree) -> bool:
    """Return True for a dict of states of torch's classes, as in `partition`."""
    return type(state) is dict and len(state) > 0 and all(map(is_of_torch, state.values()))


def parts_of(state: Tree) -> list[OptState]:
    """Return the states of torch's classes in one state or a dict of states, else an empty list."""
    if are_parts(state):
        return list(state.values())
    return [state] if isinstance(state, OptState) else []


def tensors_of(opt_state: OptState) -> list[Tensor]:
    """Return all tensors of a state, faster than a walk through its dicts."""
    return [opt_state.applied, *values_of(opt_state.slots), *scalars_of(opt_state)]


def scalars_of(opt_state: OptState) -> list[Tensor]:
    """Return the settings in the state, then the number of iterations."""
    numbers, iteration = each_of(stored_settings(opt_state)), opt_state.iteration
    return [*numbers, iteration] if isinstance(iteration, Tensor) else numbers


def stored_settings(opt_state: OptState) -> dict[str, Any]:
    """Return all settings in a state, the learning rate too."""
    lr = {"lr": opt_state.lr} if isinstance(opt_state.lr, Tensor) else {}
    return {**lr, **(opt_state.hyper or {})}


def with_stored(opt_state: OptState, stored: Mapping[str, Any]) -> OptState:
    """Return the state with these settings, the inverse of `stored_settings`."""
    hyper = {name: value for name, value in stored.items() if name != "lr"}
    return opt_state._replace(lr=stored.get("lr", ()), hyper=hyper or ())


def each_of(hyper: Any) -> list[Any]:
    """Return every number of the settings in the state, also those within tuples."""
    values = hyper.values() if hyper else ()
    return [one for v in values for one in (v if isinstance(v, tuple) else (v,))]


def map_opt_states(
    change: Callable[[OptState, tuple[str, ...]], OptState], state: Tree, keys: tuple[str, ...] = ()
) -> Tree:
    """Return a state with `change(opt_state, keys)` in place of each state of torch's classes in
    it, wherever it is. `keys` are those of the dicts around it, such as the parts of a `partition`.
    """
    if isinstance(state, OptState):
        return change(state, keys)
    if isinstance(state, dict):
        children = {k: map_opt_states(change, part, (*keys, k)) for k, part in state.items()}
        return state if all(children[k] is part for k, part in state.items()) else children
    if not isinstance(state, (tuple, list)):
        return state
    parts = [map_opt_states(change, part, keys) for part in state]
    if all(new is old for new, old in zip(parts, state, strict=True)):
        return state
    return type(state)(*parts) if hasattr(state, "_fields") else type(state)(parts)


def after_skip(state: Tree, *, in_place: bool) -> Tree:
    """Return the state after a skipped step: one more iteration, and nothing else changes. A
    captured CUDA graph needs the count `in_place`.
    """

    def counted(opt_state: OptState, keys: tuple[str, ...]) -> OptState:
        applied, slots, lr, hyper, iteration = opt_state
        if not isinstance(iteration, Tensor):
            return opt_state
        iteration = iteration.add_(1) if in_place else iteration + 1
        return OptState(applied, slots, lr, hyper, iteration)

    return map_opt_states(counted, state)


# ---- slots of a user's class ---------------------------------------------------------------------

_NUMBERS = (torch.int64, torch.bool)


def as_tensors(slot: Mapping[str, Any], name: str) -> dict[str, Tensor]:
    """Return a slot with a 0-d tensor on the CPU for each Python number."""
    tensors = {
        # What was a float stays a tensor, with which one calculates as with a number.
        key: torch.tensor(
            value, dtype=torch.float64 if type(value) is float else None, device="cpu"
        )
        if isinstance(value, (bool, int, float))
        else value
        for key, value in slot.items()
    }
    for key, value in tensors.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"the step left {key} of {name} = {value!r} in the optimizer's state; expected a "
                "tensor or a number. Fix: a tensor for each, or an optimizer of your own with "
                "`init` and `step`."
            )
    return tensors


def with_python_scalars(slot: Mapping[str, Tensor], param: Tensor) -> dict[str, Any]:
    """Return a slot with the Python numbers that `as_tensors` stored, the inverse of it."""
    if param.ndim == 0:  # its moments look like numbers
        return dict(slot)
    return {key: value.item() if is_python_scalar(value) else value for key, value in slot.items()}


def is_python_scalar(value: Tensor) -> bool:
    """Return True if a slot of a user's class was an int or a bool before it was a tensor."""
    return value.ndim == 0 and value.is_cpu and value.dtype in _NUMBERS


# ---- slots of a class of torch -------------------------------------------------------------------


class SlotLayout:
    """The slots of one class, by those of a probe parameter of shape (2, 3)."""

    def __init__(
        self,
        cls: Any,
        formula: Formula | None,
        probed: Mapping[str, Tensor],
        settings: Sequence[Mapping[str, Any]],
    ) -> None:
        self._cls, self._formula = cls, formula
        self._cache_key = object()  # keeps nothing else alive
        self._complete: Any = None  # the names of the last slots that lacked none
        self._counts = {key: value.dtype for key, value in probed.items() if value.ndim == 0}
        self._shaped = {key for key, value in probed.items() if value.shape == (2, 3)} | {
            "momentum_buffer"
        }
        # torch's SGD ignores dampening in the step that makes a parameter's momentum buffer.
        self.first_step_differs = issubclass(cls, torch.optim.SGD) and any(
            extra.get("dampening") for extra in settings
        )
        if self.first_step_differs:
            self._counts = {**self._counts, FIRST_STEP: torch.bool}

    def new(self, param: Tensor, settings: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the slots of a parameter before its first step; none of a user's class, whose step
        makes them.
        """
        if self._formula is None:
            return {}
        if param.is_complex() and not self._formula.elementwise:
            raise ValueError(
                f"{self._cls.__name__} was given a complex parameter {tuple(param.shape)}; it has "
                "no rule for it. Fix: a partition with AdamW for complex parameters."
            )
        slot = self._formula.slots(param.detach(), settings)
        if self.first_step_differs and "momentum_buffer" in slot:
            slot[FIRST_STEP] = torch.ones((), dtype=torch.bool, device=param.device)
        return slot

    def is_count(self, key: str) -> bool:
        """Return True if this slot is one number for each parameter, whatever its shape."""
        return key in self._counts

    def _misfit_error(self, key: str, value: Tensor, name: str, param: Tensor) -> ValueError:
        expected = f"a count {self._counts[key]} ()" if key in self._counts else describe(param)
        return ValueError(
            f"opt_state: {key} of {name} is {describe(value)} on {value.device}; expected "
            f"{expected} on {param.device}. Likely cause: the state of another model, or stacked "
            "states outside of torch.vmap. Fix: `opt_state = optimizer.init(params)`, or "
            "`torch.vmap(optimizer.step)(params, grads, opt_state)`."
        )

    def check(
        self,
        slots: Slots,
        params: Mapping[str, Tensor],
        groups: Callable[[Mapping[str, Tensor]], list[ParamGroup]],
        targets: TensorList | None = None,
    ) -> None:
        """Refuse slots that differ from those that `new` makes for these parameters in `groups`,
        because torch's kernels do not check what they read. `targets` is the tensor_list of
        parameters, then slots, if all are dense and off graph.
        """
        if self._formula is None:  # a user's class, whose slots nobody knows
            return

        def match() -> bool:
            for name, key in self._misfits(slots, params):
                raise self._misfit_error(key, slots[name][key], name, params[name])
            return self._check_keys(slots, params, groups)

        in_order = targets is not None and list(slots) == list(params)
        keys = set(map(tuple, slots.values())) if in_order else set()
        if targets is not None and len(keys) == 1:
            targets.cached((self._cache_key, *keys, *params), match)
        else:
            match()

    def _misfits(self, slots: Slots, params: Mapping[str, Tensor]) -> list[tuple[str, str]]:
        """Return the parameter and the key of slots that do not fit. It avoids calls, which a
        compiler traces slowly.
        """
        counts, known = self._counts, {*self._counts, *self._shaped}
        rows = [
            (name, key, value, params[name], counts.get(key))
            for name, slot in slots.items()
            for key, value in slot.items()
            if key in known
        ]
        return [
            (name, key)
            for name, key, value, param, count in rows
            if value.is_nested
            or value.layout is not torch.strided
            or value.device != param.device
            or value.dtype is not (count or param.dtype)
            or value.shape != (() if count else param.shape)
        ]

    def _check_keys(
        self,
        slots: Slots,
        params: Mapping[str, Tensor],
        groups: Callable[[Mapping[str, Tensor]], list[ParamGroup]],
    ) -> bool:
        """Refuse slots that lack one of those that `new` makes with the settings of their group.
        Return True.
        """
        if traced():  # where a step that raises later has changed nothing
            return True
        names_of_slots = tuple((name, params[name].ndim, *slot) for name, slot in slots.items())
        if names_of_slots == self._complete:
            return True
        formula: Any = self._formula
        for group in groups(params):
            settings = {**group.settings, "lr": 0.0}  # any rate has the same slots
            needed: dict[int, list[str]] = {}
            for name in group.names:
                ndim = params[name].ndim
                if ndim not in needed:
                    like = torch.empty([1] * ndim, device="cpu")  # "meta" imports sympy
                    needed[ndim] = list(formula.slots(like, settings))
                for key in needed[ndim]:
                    if key not in slots[name]:
                        raise self.foreign(key)
        self._complete = names_of_slots
        return True

    def foreign(self, missing: str) -> ValueError:
        return ValueError(
            f"opt_state has no {missing} that {self._cls.__name__} keeps. Likely cause: the state "
            "of another class or of other settings. Fix: `opt_state = optimizer.init(params)`."
        )
