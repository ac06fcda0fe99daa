"""The settings of a class of torch.optim: parameter groups, overrides, learning rates."""

from __future__ import annotations

import fnmatch
import functools
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from .._optim.formulas import Formula, formula_of
from .._optim.in_state import (
    check_hyper,
    check_setting,
    each_number,
    float32,
    is_float_scalar,
    is_scheduled,
)
from .._optim.opt_state import OptState, ParamGroup, SlotLayout, Slots, each_of
from .._optim.schedule import ScheduleBy, check_scheduled, checked_rate, first_numbers
from .._torch import private
from .._torch.dtypes import on_device
from .._torch.tracing import (
    any_requires_grad,
    constant_while_compiling,
    host_can_read,
    traced,
)
from .._tree import tree as _tree
from .._tree.leaves import describe

Pattern = str | tuple[str, ...]  # a dotted name or a glob, or several
Overrides = Mapping[Any, Mapping[str, Any]]  # by `Pattern`
FLAGS = ("foreach", "fused", "capturable", "differentiable")
_ANY_LR = 1e-3  # for torch to check in place of a schedule or a tensor


class CurrentSettings(NamedTuple):
    """The settings of one step that may differ from those of the step before."""

    lrs: list[Any]  # of from_torch or of the state, then of each override; None if it has none
    hyper: Any  # the other settings in the state, each times its schedule; () without


class OptimizerSettings:
    """The settings that from_torch was given, and what follows from them. No state."""

    def __init__(
        self,
        cls: Any,
        lr: Any,
        overrides: Overrides,
        settings: dict[str, Any],
        *,
        in_state: Sequence[str],
        schedule_by: ScheduleBy,
        template: Any = None,
    ) -> None:
        _check_class(cls)
        if schedule_by not in get_args(ScheduleBy):
            raise ValueError(
                f'schedule_by is {schedule_by!r}, expected "applied", the number of applied steps, '
                'or "iteration", which counts skipped ones too.'
            )
        self.cls, self.schedule_by = cls, schedule_by
        self.formula: Formula | None = formula_of(cls)
        self._template = template
        accepted = inspect.signature(cls).parameters
        self.accepted = [name for name in accepted if name != "params"]
        self._lr = accepted["lr"].default if lr is None and "lr" in accepted else lr
        self._patterns = tuple(overrides)
        self._overrides = tuple(dict(extra) for extra in overrides.values())
        self.settings = settings
        self.flag_named = any(settings.get(name) is not None for name in FLAGS)
        # The settings in the state that are schedules, or tuples with schedules in them.
        self._schedules = {
            name: settings[name]
            for name in in_state
            if name != "lr" and is_scheduled(settings.get(name))
        }
        first = {name: first_numbers(name, value) for name, value in self._schedules.items()}
        start = {**settings, **first, "lr": self._lr}
        # An optimizer over a probe parameter, from which those of a step are copied.
        self.template, slots = self._probed("from_torch", start)
        self.defaults: dict[str, Any] = {"lr": self._lr, **self.template.defaults}
        for pattern, extra in overrides.items():
            slots |= self._probed(f"overrides[{pattern!r}]", {**start, **extra})[1]
        # Ranks compare all settings, including defaults.
        complete = {**self.defaults, **settings, "lr": self._lr}
        patterns = dict(zip(self._patterns, self._overrides, strict=True))
        complete = dict(sorted(complete.items()))
        self.summary = cls, complete, patterns, tuple(in_state), schedule_by
        self.differentiable = bool(settings.get("differentiable"))
        self.lrs = tuple(
            rate.clone() if isinstance(rate, Tensor) else rate
            for rate in (self._lr, *(extra.get("lr") for extra in self._overrides))
        )
        self.in_state = tuple(in_state)
        for name in self.in_state:
            check_setting(cls, name, {**self.defaults, "lr": 0.0}, self.formula)
        # The initial numbers of the settings in the state, except the rate: 1 for a schedule,
        # which it multiplies.
        starts = {**self.defaults, **self._schedules}
        self.hyper = each_number(
            lambda number: 1.0 if callable(number) else float(number),
            {name: starts[name] for name in self.in_state if name != "lr"},
        )
        self.settings_in_new_state(None)  # refuses what float32 cannot hold
        # Per learning rate: True if it may differ in a later step.
        self.lr_varies = (callable(self._lr) or "lr" in self.in_state, *map(callable, self.lrs[1:]))
        # A setting in the state may become nonzero, so it counts as nonzero here.
        self.layout = SlotLayout(
            cls, self.formula, slots, (*self.named_settings, dict.fromkeys(self.hyper, True))
        )

    def __repr__(self) -> str:
        extra = {"lr": self._lr, **self.settings}
        *_, overrides, in_state, schedule_by = self.summary
        if in_state:
            extra["in_state"] = in_state
        if schedule_by != "applied":
            extra["schedule_by"] = schedule_by
        if overrides:
            extra["overrides"] = overrides
        settings = ", ".join(f"{name}={value!r}" for name, value in extra.items())
        door = "from_formula" if "formula" in vars(self.cls) else "from_torch"
        return f"{door}({self.cls.__name__}, {settings})"

    @property
    def named_settings(self) -> tuple[dict[str, Any], ...]:
        """The settings named for all parameters, then those of each override."""
        return (self.settings, *self._overrides)

    def key(self) -> str:
        """Return as text all settings that a step reads. Rates that are tensors or schedules are
        left out, because they reach the formula as arguments.
        """
        cls, complete, overrides, in_state, _ = self.summary
        constant = [
            {k: v for k, v in settings.items() if not (isinstance(v, Tensor) or is_scheduled(v))}
            for settings in (complete, *overrides.values())
        ]
        return repr((cls, id(cls), list(overrides), constant, in_state))

    def torch_groups(
        self, names: tuple[str, ...], hyper: Mapping[str, Any] | tuple[()] = ()
    ) -> list[ParamGroup]:
        """Return torch's parameter groups, in which `hyper` replaces the settings that are in the
        state.
        """
        defaults = {**self.defaults, **(hyper or {})}
        del defaults["lr"]
        if not self._patterns:
            return [ParamGroup(list(names), defaults)] if names else []
        matches, _ = _matching(names, self._patterns)
        canonical = {matching: self._canonical(matching) for matching in set(matches)}
        members: dict[tuple[int, ...], list[str]] = {}
        for name, matching in zip(names, matches, strict=True):
            members.setdefault(canonical[matching], []).append(name)
        groups = []
        for matching in sorted(members):
            settings: dict[str, Any] = {}
            lr_index = 0
            for index in matching:
                settings.update(self._overrides[index])
                lr_index = index + 1 if "lr" in self._overrides[index] else lr_index
            overridden = frozenset(settings)
            settings.pop("lr", None)
            group = ParamGroup(members[matching], {**defaults, **settings}, lr_index, overridden)
            groups.append(group)
        return groups

    def stepped_names(
        self, names: Sequence[str], weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
    ) -> list[str]:
        """Return the names of the parameters that a step moves. A formula that is not elementwise
        divides by a size, which may be 0.
        """
        whole = self.formula is not None and not self.formula.elementwise
        return [n for n in names if n in gradients and not (whole and not weights[n].numel())]

    def check_names(self, names: tuple[str, ...]) -> None:
        """Refuse a pattern that matches none of the names of all parameters."""
        unmatched = _matching(names, self._patterns)[1] if self._patterns else None
        if unmatched is not None:
            raise ValueError(
                f"overrides: {unmatched!r} matches no parameter. The names are: "
                f"{_tree.join_names(list(names), 20)}. Likely cause: a typing error, or a frozen "
                "parameter, which is a buffer. Fix: one of these names, or a glob, '*.bias'."
            )

    def _canonical(self, matching: tuple[int, ...]) -> tuple[int, ...]:
        """Return the first pattern with the same settings, so that `{"*.bias": no_decay, "norm.*":
        no_decay}` is one group.
        """
        if not matching:
            return matching
        merged: dict[str, Any] = {}
        for index in matching:
            merged.update(self._overrides[index])
        for index, extra in enumerate(self._overrides):
            if extra.keys() == merged.keys() and all(
                extra[k] is v or (not isinstance(v, Tensor) and extra[k] == v)
                for k, v in merged.items()
            ):
                return (index,)
        return matching

    @property
    def has_schedules(self) -> bool:
        """True if a setting follows a schedule."""
        return bool(self._schedules) or any(map(callable, self.lrs))

    @property
    def scheduled_in_state(self) -> set[str]:
        """The settings in the state that a schedule multiplies."""
        scheduled = {*self._schedules, "lr"} if callable(self._lr) else {*self._schedules}
        return scheduled & {*self.in_state}

    def current(self, opt_state: OptState) -> CurrentSettings:
        """Return the settings of the next step that may move, from the state and by schedule."""
        by_applied, hyper = self.schedule_by == "applied", opt_state.hyper
        count = opt_state.applied if by_applied else opt_state.iteration
        if self.hyper:
            hyper = {**hyper, **self._scheduled(count, hyper)}
            self._refuse_graphs(hyper)
        return CurrentSettings(self.lrs_at(count, opt_state.lr), hyper)

    def _scheduled(self, count: Tensor, hyper: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings in the state that have a schedule, multiplied by it."""

        def times(name: str, schedule: Any, factor: Any) -> Any:
            if isinstance(schedule, (tuple, list)):
                return tuple([times(name, *pair) for pair in zip(schedule, factor, strict=True)])
            if not callable(schedule):
                return factor
            number = schedule(count)
            check_scheduled(name, number)
            return factor * (on_device(number, count.device) if is_float_scalar(number) else number)

        return {name: times(name, each, hyper[name]) for name, each in self._schedules.items()}

    def lrs_at(self, count: Tensor, lr: Any) -> list[Any]:
        """Return the rate of from_torch or of the state, then that of each override (None if it
        names none), by schedules at `count`.
        """
        lrs: list[Any] = []
        for index, rate in enumerate(self.lrs):
            if callable(rate):
                rate = rate(count)
                check_scheduled("lr", rate)
            if index == 0 and "lr" in self.in_state:
                rate = lr * rate if callable(self._lr) else lr
            if isinstance(rate, Tensor) and rate.requires_grad:
                self._refuse_graph("the learning rate")
            lrs.append(on_device(rate, count.device) if isinstance(rate, Tensor) else rate)
        return lrs

    def _refuse_graph(self, what: str) -> None:
        if torch.is_grad_enabled() and not (self.differentiable or traced()):
            raise ValueError(
                f"{what} requires a gradient, and `.backward()` cannot go through a step. Fix: "
                "torch.func.grad of a function that makes the step, or "
                "from_torch(..., differentiable=True)."
            )

    def _refuse_graphs(self, hyper: Mapping[str, Any]) -> None:
        """Refuse settings, except the rate, with a graph that the step would drop."""
        for name, value in hyper.items():
            if any_requires_grad(each_of({name: value})):
                self._refuse_graph(f"opt_state.hyper[{name!r}]")

    def are_readable(self, opt_state: OptState) -> bool:
        """Return True if the host can read the settings in the state. Without momentum torch's
        implementations leave its buffer alone, which the formula updates for a later step.
        """
        return "momentum" not in self.hyper and host_can_read(each_of(opt_state.hyper))

    def settings_in_new_state(self, device: torch.device | None) -> tuple[Any, Any]:
        """Return the rate and the other settings of a new state, each () if the state does not hold
        it.
        """

        def start(number: Any) -> Tensor:
            return float32(number, device)

        lr = start(1.0 if callable(self._lr) else self.lrs[0]) if "lr" in self.in_state else ()
        return lr, each_number(start, self.hyper) or ()

    def settings_per_slot(self) -> dict[str, Any]:
        """Return settings with which a state has all slots that a later value needs."""
        return {"momentum": 0.5} if "momentum" in self.hyper else {}

    def slot_groups(self, params: Mapping[str, Tensor]) -> list[ParamGroup]:
        """Return the groups with the settings from which slots are made."""
        return self.torch_groups(tuple(params), self.settings_per_slot())

    def new_slots(self, named: Mapping[str, Tensor], lrs: Sequence[Any]) -> Slots:
        """Return the slots of these parameters before their first step."""
        slots: Slots = {}
        for group in self.slot_groups(named):
            settings = group.with_lr(lrs)
            # torch checks shapes, and needs no memory for it.
            shapes = [
                torch.empty(named[name].shape, dtype=named[name].dtype, device="meta")
                for name in group.names
            ]
            self._constructed(shapes, settings)
            slots.update({name: self.layout.new(named[name], settings) for name in group.names})
        return {name: slots[name] for name in named}

    def check(self, opt_state: OptState) -> None:
        """Refuse a state whose settings do not match `in_state`, or without the count."""
        lr, hyper, iteration = opt_state.lr, opt_state.hyper, opt_state.iteration
        if self.schedule_by == "iteration" and not _is_count(iteration):
            raise ValueError(
                f"opt_state.iteration is {describe(iteration)}, expected a 0-d int64 tensor: this "
                'optimizer was made with schedule_by="iteration". Likely cause: the state of one '
                "whose schedules count applied steps. Fix: `opt_state = optimizer.init(params)`, "
                "or `opt_state._replace(iteration=opt_state.applied.clone())` if no step was "
                "skipped; a count for each member of an ensemble goes through torch.vmap."
            )
        if self.schedule_by == "applied" and not isinstance(iteration, tuple):
            raise ValueError(
                f"opt_state.iteration is {iteration!r}, but the schedules of this optimizer count "
                'applied steps and would ignore it. Fix: from_torch(..., schedule_by="iteration").'
            )
        if hyper or self.hyper:
            check_hyper(hyper, self.hyper)
        if "lr" in self.in_state and not is_float_scalar(lr):
            raise ValueError(
                f"opt_state.lr is {describe(lr)}, expected a floating 0-d tensor: this optimizer "
                "was made with lr in the state. Fix: `opt_state = optimizer.init(params)`, or "
                "`opt_state._replace(lr=torch.tensor(1e-3))`; a rate for each member of an "
                "ensemble goes through torch.vmap."
            )
        if not ("lr" in self.in_state or isinstance(lr, tuple)):
            raise ValueError(
                f"opt_state.lr is {lr!r}, but this optimizer takes its rate from from_torch and "
                'would ignore it. Fix: from_torch(..., in_state=("lr",)).'
            )

    def _probed(self, where: str, settings: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
        """Return an optimizer over one parameter and the tensors that it keeps for it. Settings
        that the class refuses raise torch's own error.
        """
        for name, value in settings.items():
            if name not in self.accepted and self._template is None:
                raise ValueError(
                    f"{where}: {self.cls.__name__} has no setting {name!r}. It has: "
                    f"{', '.join(self.accepted)}."
                )
            for one in value if isinstance(value, (tuple, list)) else (value,):
                if self.formula is not None and name != "lr" and callable(one):
                    raise TypeError(
                        f"{where}: {name} {'is' if one is value else 'holds'} {one!r}; a schedule "
                        "stands for lr, or for a number in the state. Fix: "
                        f"from_torch(..., {name}=schedule, in_state=({name!r},)), and no schedule "
                        "in overrides."
                    )
                if isinstance(one, Tensor) and not (name == "lr" and is_float_scalar(one)):
                    raise TypeError(
                        f"{where}: {name} {'is' if one is value else 'holds'} a tensor of shape "
                        f"{tuple(one.shape)}, {one.dtype}; only lr may be one, floating and 0-d, "
                        f"since torch's {self.cls.__name__} reads the others in Python. "
                        f"Fix: a number to start from and in_state=({name!r},), and torch.vmap "
                        "for a value a member."
                    )
        rate = checked_rate(where, settings["lr"])
        probe = torch.zeros(2, 3, dtype=torch.float32, device="cpu")
        template = self._constructed([probe], {**settings, "lr": rate})
        if self.formula is None:
            return template, {}
        return template, self.formula.slots(probe, {**template.defaults, "lr": _ANY_LR})

    def _constructed(self, probes: list[Tensor], settings: Mapping[str, Any]) -> Any:
        """Return torch's own optimizer over these tensors. It refuses settings and shapes."""
        if self._template is not None:
            return self._template
        arguments = {name: value for name, value in settings.items() if name in self.accepted}
        if "lr" in arguments and (isinstance(arguments["lr"], Tensor) or callable(arguments["lr"])):
            arguments["lr"] = _ANY_LR
        with torch.device("cpu"):  # torch keeps step counts there, whatever the default device is
            return private.without_compiler(self.cls)(probes, **arguments)


def _is_count(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim == 0 and leaf.dtype is torch.int64


def _check_class(cls: Any) -> None:
    if isinstance(cls, torch.optim.Optimizer):
        raise TypeError(
            f"from_torch takes a class of torch.optim, got an instance of {type(cls).__name__}. "
            "Fix: `optimizer, opt_state = from_torch_optimizer(torch_optimizer, model)`, with its "
            f"groups and its state; for a new one `from_torch({type(cls).__name__}, ...)`."
        )
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise TypeError(
            f"from_torch takes a class of torch.optim, got {cls!r}. Fix: "
            "from_torch(torch.optim.AdamW, lr=1e-3)."
        )
    if issubclass(cls, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS evaluates the loss again in its step, so it is not a function of gradients. "
            "Fix: torch.optim.AdamW, or your own loop around LBFGS."
        )
    if issubclass(cls, torch.optim.SparseAdam):
        raise ValueError(
            "SparseAdam takes sparse gradients only and counts its steps in Python. Fix: SGD or "
            "Adagrad, which take sparse gradients here."
        )


# ---- patterns ------------------------------------------------------------------------------------


@constant_while_compiling  # Dynamo need not trace it
def _matching(
    names: tuple[str, ...], patterns: tuple[Pattern, ...]
) -> tuple[tuple[tuple[int, ...], ...], str | None]:
    """Return for each name the indices of the patterns that match it, and the first name or glob in
    them that matches none.
    """
    return _cached_matching(names, patterns)


@functools.lru_cache(maxsize=64)
def _cached_matching(
    names: tuple[str, ...], patterns: tuple[Pattern, ...]
) -> tuple[tuple[tuple[int, ...], ...], str | None]:
    matches: dict[str, list[int]] = {name: [] for name in names}
    unmatched = None
    for index, pattern in enumerate(patterns):
        for text in (pattern,) if isinstance(pattern, str) else pattern:
            matching = [text] if text in matches else []
            if re.search(r"[*?[]", text):
                matching = [name for name in names if fnmatch.fnmatchcase(name, text)]
            if not matching and unmatched is None:
                unmatched = text
            for name in matching:
                matches[name].append(index)
    return tuple([tuple(dict.fromkeys(indices)) for indices in matches.values()]), unmatched
