"""The settings of a class of torch.optim: numbers, tuples of numbers and constants by name, for all
parameters and for those of each override.

configured     given to `from_torch` or `from_formula`, or a default of torch
scheduled      a function of a count stands for the number
stored         the state holds the number, in `lr` or `hyper`: a factor of it if it is scheduled too
step settings  the numbers of one step: what is scheduled or stored, and a rate that is a tensor
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from .._optim.opt_state import OptState
from .._torch.tracing import traced
from .._torch.transfer import to_device
from .._torch_optim.in_state import (
    as_float32,
    check_stored,
    copied_number,
    is_float_scalar,
    map_numbers,
    stored_settings,
)
from .._torch_optim.schedule import (
    ScheduleBy,
    check_scheduled,
    first_numbers,
    first_rate,
    is_scheduled,
)
from .._tree.leaves import describe
from .._tree.scalars import as_float

Pattern = str | tuple[str, ...]  # a dotted name or a glob, or several
Overrides = Mapping[Any, Mapping[str, Any]]  # by `Pattern`
Counts = Literal["one", "each"]
IMPLEMENTATION_FLAGS = ("foreach", "fused", "capturable", "differentiable")


class OptimizerSpec(NamedTuple):
    """The class of torch.optim or the formula that settings are given to."""

    name: str
    made_by: str  # the public function that makes it
    formula: Any  # a `Formula`; None for a user's class, whose `step` is called
    cls: Any  # the class of torch; None of `from_formula`
    setting_names: Sequence[str] | None  # that it takes; None of a live optimizer
    default_lr: Any
    # an optimizer over these tensors with these settings, or what stands for one: its `defaults`
    # are all settings
    construct: Callable[[list[Tensor], Mapping[str, Any]], Any]

    @property
    def runs_user_code(self) -> bool:
        """True if the `step` of a user's class runs, on copies, or a formula of a user's."""
        return self.cls is None or self.formula is None

    @property
    def elementwise(self) -> bool | None:
        """True if elements are stepped independently; None if the class takes DTensors itself."""
        return None if self.formula is None else self.formula.elementwise


class ConfiguredSettings(NamedTuple):
    """The settings for all parameters, or those of one override, as they were configured."""

    values: dict[str, Any]  # those for all parameters with the defaults of the class
    # The functions of a count by name. If the state has the setting too, `values` has its first
    # number.
    schedules: dict[str, Any]


# The numbers of one step that may differ from those of the step before: for all parameters, then
# those of each override.
StepSettings = list[dict[str, Any]]


class OptimizerConfig:
    """The settings that `from_torch` or `from_formula` was given, and what follows from them. No
    state.

    A setting of a parameter is that of the last matching override that names it; else the number in
    the state times the schedule, if it has these; else the argument.
    `prototype` is what `OptimizerSpec.construct` returned over a probe: of a class, the optimizer
    from which that of a user's class is copied.
    """

    def __init__(
        self,
        spec: OptimizerSpec,
        lr: Any,
        overrides: Overrides,
        arguments: dict[str, Any],
        *,
        in_state: Sequence[str] = (),
        schedule_by: ScheduleBy = "applied",
        counts: Counts = "one",
    ) -> None:
        if schedule_by not in get_args(ScheduleBy):
            raise ValueError(f'schedule_by is {schedule_by!r}, expected "applied" or "iteration".')
        if counts not in get_args(Counts):
            raise ValueError(f'counts is {counts!r}, expected "one" or "each".')
        if not isinstance(in_state, (tuple, list)):  # a set has another order on each rank
            raise TypeError(
                f"in_state is {in_state!r}, expected a tuple of names of settings. Fix: "
                'in_state=("lr", "weight_decay"), or in_state=("lr",) with a comma.'
            )
        self.spec, self.arguments = spec, arguments
        self.lr = spec.default_lr if lr is None else lr
        self.overrides = {pattern: dict(extra) for pattern, extra in overrides.items()}
        self.in_state = tuple(dict.fromkeys(in_state))
        self.schedule_by, self.counts = schedule_by, counts

        schedules = _scheduled({**arguments, "lr": self.lr}, ("lr", *self.in_state))
        self.prototype = self._checked_prototype(schedules)
        values = {**self.prototype.defaults, "lr": self.lr}
        self.for_all = ConfiguredSettings(_with_copied_tensors(values), schedules)
        self.by_override = [
            ConfiguredSettings(_with_copied_tensors(extra), _scheduled(extra, ("lr",)))
            for extra in self.overrides.values()
        ]
        self.no_step_settings: StepSettings = [{}, *({} for _ in self.by_override)]
        all_values = [value for each in self._configured() for value in each.values.values()]
        tensors = [value for value in all_values if isinstance(value, Tensor)]
        self.settings_are_constant = not (self.has_schedules or self.in_state or tensors)
        # The number of a parameter's own steps is a part of its state, as in torch.
        formula = spec.formula
        self.needs_counts = formula is not None and any(
            map(formula.needs_counts, self.settings_for_slots())
        )
        stored = {name: {**values, **schedules}[name] for name in self.in_state}
        # The numbers of a new state. That of a schedule is a factor.
        self.first_stored = map_numbers(lambda number: 1.0 if callable(number) else number, stored)
        self.init_stored(None)  # refuses what float32 cannot hold

    def __repr__(self) -> str:
        extra = {"lr": self.lr, **self.arguments}
        defaults = {"in_state": (), "schedule_by": "applied", "counts": "one", "overrides": {}}
        extra |= {n: getattr(self, n) for n, value in defaults.items() if getattr(self, n) != value}
        settings = ", ".join(f"{name}={value!r}" for name, value in extra.items())
        return f"{self.spec.made_by}({self.spec.name}, {settings})"

    @property
    def differentiable(self) -> bool:
        """True if `.backward()` may go through a step."""
        return bool(self.arguments.get("differentiable"))

    @property
    def has_schedules(self) -> bool:
        """True if a schedule stands for any setting."""
        return any([each.schedules for each in self._configured()])

    @property
    def all_settings(self) -> dict[str, Any]:
        """The settings for all parameters, including defaults, which ranks compare too."""
        settings = {**self.prototype.defaults, "lr": self.lr, **self.arguments}
        return dict(sorted(settings.items()))

    @property
    def agreed_settings(self) -> tuple[Any, ...]:
        """The settings that the ranks of a group compare."""
        kind = self.spec.name if self.spec.cls is None else self.spec.cls
        return kind, self.all_settings, self.overrides, self.in_state, self.schedule_by

    @property
    def nonzero_for_slots(self) -> dict[str, float]:
        """Settings from which slots are made in place of those that were given. Momentum in the
        state may become nonzero later, so its buffer exists while it is 0.
        """
        return dict.fromkeys({"momentum", "dampening"} & {*self.in_state}, 0.5)

    def settings_for_slots(self) -> list[dict[str, Any]]:
        """Return the settings from which slots are made: for all parameters, then those with each
        override alone.
        """
        return [
            {**self.for_all.values, **each.values, **self.nonzero_for_slots}
            for each in self._configured()
        ]

    def _configured(self) -> list[ConfiguredSettings]:
        """Return the settings for all parameters, then those of each override."""
        return [self.for_all, *self.by_override]

    def settings_of(
        self, override_indices: tuple[int, ...], step_settings: StepSettings
    ) -> dict[str, Any]:
        """Return the settings of parameters to which these overrides apply."""
        settings = {**self.for_all.values, **step_settings[0]}
        for index in override_indices:
            settings |= self.by_override[index].values | step_settings[1 + index]
        return settings

    def evaluate_settings(self, opt_state: OptState) -> StepSettings:
        """Return the settings of the next step that may differ from those of the last one."""
        if self.settings_are_constant:
            return self.no_step_settings
        count = opt_state.applied if self.schedule_by == "applied" else opt_state.iteration

        def put(value: Any) -> Any:
            return to_device(value, count.device) if isinstance(value, Tensor) else value

        def number(name: str, value: Any, stored: Any) -> Any:
            if isinstance(stored, tuple):
                return tuple([number(name, *pair) for pair in zip(value, stored, strict=True)])
            if callable(value):
                check_scheduled(name, scheduled := value(count))
                value = put(scheduled) if stored is None else stored * put(scheduled)
            elif stored is not None:
                value = stored
            if isinstance(value, Tensor) and value.requires_grad:
                self._refuse_graph(name)
            return put(value)

        stored_of = [stored_settings(opt_state), *self.no_step_settings[1:]]  # none of overrides
        return [
            {
                name: number(name, value, stored.get(name))
                for name, value in {**each.values, **each.schedules}.items()
                if name in each.schedules or name in stored or isinstance(value, Tensor)
            }
            for each, stored in zip(self._configured(), stored_of, strict=True)
        ]

    def _refuse_graph(self, name: str) -> None:
        if torch.is_grad_enabled() and not (self.differentiable or traced()):
            what = "the learning rate" if name == "lr" else f"opt_state.hyper[{name!r}]"
            raise ValueError(
                f"{what} requires a gradient, and `.backward()` cannot go through a step. Fix: "
                "torch.func.grad of a function that makes the step, or "
                "from_torch(..., differentiable=True)."
            )

    def init_stored(self, device: torch.device | None) -> dict[str, Any]:
        """Return the settings that a new state holds."""
        return map_numbers(lambda number: as_float32(number, device), self.first_stored)

    def check_state(self, opt_state: OptState) -> None:
        """Refuse a state whose settings do not match `in_state`, or without the count."""
        iteration, by_iteration = opt_state.iteration, self.schedule_by == "iteration"
        if not (_is_count(iteration) if by_iteration else isinstance(iteration, tuple)):
            value = "opt_state.applied.clone()" if by_iteration else "()"
            raise ValueError(
                f"opt_state.iteration is {describe(iteration)}, and this optimizer was made with "
                f"schedule_by={self.schedule_by!r}; expected "
                f"{'a 0-d int64 tensor' if by_iteration else '()'}. Fix: the schedule_by that the "
                "state was made with, or `opt_state = optimizer.init(params)`; if no step was "
                f"skipped, `opt_state._replace(iteration={value})`; for an ensemble torch.vmap."
            )
        check_stored(opt_state, self.first_stored)

    def _checked_prototype(self, schedules: Mapping[str, Any]) -> Any:
        """Return an optimizer over one parameter. What the class refuses, also in an override,
        raises torch's own error.
        """
        first = {n: first_numbers(n, value) for n, value in schedules.items() if n != "lr"}
        settings = {**self.arguments, **first, "lr": self.lr}
        prototype = self._construct_checked(self.spec.made_by, settings)
        for pattern, extra in self.overrides.items():
            self._construct_checked(f"overrides[{pattern!r}]", {**settings, **extra})
        for name in self.in_state:
            check_storable(self.spec, name, {**prototype.defaults, "lr": 0.0})
        return prototype

    def _construct_checked(self, where: str, settings: dict[str, Any]) -> Any:
        """Return an optimizer over a probe. Refuse an unknown setting, and a value that cannot be
        one. `where` says in an error where the settings are from.
        """
        for name, value in settings.items():
            accepted = self.spec.setting_names
            if accepted is not None and name not in accepted:
                raise ValueError(
                    f"{where}: {self.spec.name} has no setting {name!r}. It has: "
                    f"{', '.join(accepted)}."
                )
            for one in value if isinstance(value, (tuple, list)) else (value,):
                what = f"{where}: {name} {'is' if one is value else 'holds'}"
                if callable(one) and name != "lr" and self.spec.formula is not None:
                    raise TypeError(
                        f"{what} {one!r}; a schedule stands for lr, or for a number in the state, "
                        "and not in overrides. Fix: "
                        f"{self.spec.made_by}(..., {name}=schedule, in_state=({name!r},))."
                    )
                if isinstance(one, Tensor) and not (name == "lr" and is_float_scalar(one)):
                    raise TypeError(
                        f"{what} a tensor of shape {tuple(one.shape)}, {one.dtype}; only lr may be "
                        "one, floating and 0-d. Fix: a number to start from and "
                        f"in_state=({name!r},)."
                    )
        rate = first_rate(where, settings["lr"])
        probe = torch.zeros(2, 3, dtype=torch.float32, device="cpu")
        return self.spec.construct([probe], {**settings, "lr": rate})


def _scheduled(settings: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return those of the settings with these names that are schedules."""
    return {name: settings[name] for name in names if is_scheduled(settings.get(name))}


def _with_copied_tensors(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: copied_number(value) for name, value in settings.items()}


def _is_count(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim == 0 and leaf.dtype is torch.int64


# ---- settings in the state -----------------------------------------------------------------------


def check_storable(spec: OptimizerSpec, name: Any, values: Mapping[str, Any]) -> None:
    """Refuse a setting that a state cannot hold."""
    if name not in values:
        raise ValueError(
            f"in_state: {spec.name} has no setting {name!r}. It has: {', '.join(values)}."
        )
    value = values[name]
    numbers = value if isinstance(value, (tuple, list)) else (value,)
    is_fixed = spec.formula is not None and name in spec.formula.not_in_state
    if is_fixed or any(as_float(number) is None for number in numbers):
        got = "is not read by each step" if is_fixed else f"is {value!r}"
        raise TypeError(
            f"in_state: {name} of {spec.name} {got}; expected a number, or a tuple of "
            f"numbers, that each step takes as data. Fix: leave {name} out of in_state, and make "
            "an optimizer for each value."
        )
