"""The settings of a class of torch.optim, in one table: constant, by schedule, in the state."""

from __future__ import annotations

import fnmatch
import functools
import inspect
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from .._optim.formulas import Formula, formula_of
from .._optim.in_state import (
    check_setting,
    check_stored,
    each_number,
    float32,
    is_float_scalar,
    is_scheduled,
)
from .._optim.opt_state import OptState, ParamGroup, SlotLayout, Slots, each_of, stored_settings
from .._optim.schedule import ScheduleBy, check_scheduled, checked_rate, first_numbers
from .._torch import private
from .._torch.dtypes import on_device
from .._torch.tracing import (
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


# The settings for all parameters by name, then those of each override. A parameter takes a setting
# from the last override that matches it and names the setting, else from those for all. There the
# number in the state stands for the one that was given; a schedule multiplies it.
Tables = list[dict[str, Any]]


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
            raise ValueError(f'schedule_by is {schedule_by!r}, expected "applied" or "iteration".')
        self.cls, self.schedule_by = cls, schedule_by
        self.formula: Formula | None = formula_of(cls)
        self._template = template
        accepted = inspect.signature(cls).parameters
        self.accepted = [name for name in accepted if name != "params"]
        lr = accepted["lr"].default if lr is None and "lr" in accepted else lr
        self._patterns = tuple(overrides)
        self._overrides = tuple(dict(extra) for extra in overrides.values())
        self.settings = settings
        self.flag_named = any(settings.get(name) is not None for name in FLAGS)
        self.in_state = tuple(in_state)
        # Schedules of settings in the state, alone or in a tuple. A schedule of lr needs no state.
        schedules = {n: settings[n] for n in in_state if is_scheduled(settings.get(n))}
        first = {name: first_numbers(name, value) for name, value in schedules.items()}
        start = {**settings, **first, "lr": lr}
        # An optimizer over a probe parameter, from which those of a step are copied.
        self.template, slots = self._probed("from_torch", start)
        defaults: dict[str, Any] = {"lr": lr, **self.template.defaults}
        for pattern, extra in overrides.items():
            slots |= self._probed(f"overrides[{pattern!r}]", {**start, **extra})[1]
        # Ranks compare all settings, including defaults.
        complete = dict(sorted({**defaults, **settings, "lr": lr}.items()))
        patterns = dict(zip(self._patterns, self._overrides, strict=True))
        self.summary = cls, complete, patterns, self.in_state, schedule_by
        self.differentiable = bool(settings.get("differentiable"))
        for name in self.in_state:
            check_setting(cls, name, {**defaults, "lr": 0.0}, self.formula)
        self.tables: Tables = [
            {n: v.clone() if isinstance(v, Tensor) else v for n, v in table.items()}
            for table in ({**defaults, "lr": lr}, *self._overrides)
        ]
        # The schedules in each table, alone or in a tuple.
        self.schedules: Tables = [
            {"lr": table["lr"]} if callable(table.get("lr")) else {} for table in self.tables
        ]
        self.schedules[0] |= schedules
        self._moving: Tables = [
            {name: value for name, value in table.items() if isinstance(value, Tensor)} | schedule
            for table, schedule in zip(self.tables, self.schedules, strict=True)
        ]
        # The first numbers of the settings in the state: 1 for a schedule, which it multiplies.
        initial = {**self.tables[0], **self.schedules[0]}
        in_the_state = {name: initial[name] for name in self.in_state}
        self._moving[0] |= in_the_state
        self.starts = each_number(lambda number: 1.0 if callable(number) else number, in_the_state)
        self.settings_in_new_state(None)  # refuses what float32 cannot hold
        # A setting in the state may become nonzero, so it counts as nonzero here.
        named = (settings, *self._overrides, dict.fromkeys(self.starts, True))
        self.slot_layout = SlotLayout(cls, self.formula, slots, named)

    def __repr__(self) -> str:
        extra = {"lr": self.summary[1]["lr"], **self.settings}
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

    def torch_groups(self, names: tuple[str, ...], current: Sequence[Any] = ()) -> list[ParamGroup]:
        """Return torch's parameter groups. `current` has the settings that go before `tables`."""
        pairs: Any = itertools.zip_longest(self.tables, current, fillvalue={})
        tables = [{**table, **moving} for table, moving in pairs]
        members: dict[tuple[int, ...], list[str]] = {}
        if self._patterns:
            matches = _matching(names, self._patterns)[0]
            canonical = {matching: self._canonical(matching) for matching in set(matches)}
            for name, matching in zip(names, matches, strict=True):
                members.setdefault(canonical[matching], []).append(name)
        elif names:
            members[()] = list(names)
        groups = []
        for matching in sorted(members):
            own = {n: index + 1 for index in matching for n in tables[index + 1]}
            settings = {**tables[0], **{name: tables[table][name] for name, table in own.items()}}
            table = own.get("lr", 0)
            varies = "lr" in self.schedules[table] or (not table and "lr" in self.in_state)
            groups.append(ParamGroup(members[matching], settings, frozenset(own), varies))
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
        return any(self.schedules)

    def current(self, opt_state: OptState) -> Tables:
        """Return the settings of the next step that may differ from those of another one, from the
        state and by schedule, and rates that are tensors.
        """
        count = opt_state.applied if self.schedule_by == "applied" else opt_state.iteration
        return self.at(count, stored_settings(opt_state))

    def at(self, count: Tensor, stored: Mapping[str, Any]) -> Tables:
        """Return `current` at this count of steps, with these settings in the state."""

        def number(name: str, value: Any, factor: Any) -> Any:
            if isinstance(factor, tuple):
                return tuple([number(name, *pair) for pair in zip(value, factor, strict=True)])
            if callable(value):
                value = value(count)
                check_scheduled(name, value)
                if isinstance(value, Tensor):
                    value = on_device(value, count.device)
                value = value if factor is None else factor * value
            elif factor is not None:
                value = factor
            if isinstance(value, Tensor) and value.requires_grad:
                self._refuse_graph(name)
            return on_device(value, count.device) if isinstance(value, Tensor) else value

        first, *others = self._moving
        return [
            {name: number(name, value, stored.get(name)) for name, value in first.items()},
            *({name: number(name, value, None) for name, value in each.items()} for each in others),
        ]

    def _refuse_graph(self, name: str) -> None:
        if torch.is_grad_enabled() and not (self.differentiable or traced()):
            what = "the learning rate" if name == "lr" else f"opt_state.hyper[{name!r}]"
            raise ValueError(
                f"{what} requires a gradient, and `.backward()` cannot go through a step. Fix: "
                "torch.func.grad of a function that makes the step, or "
                "from_torch(..., differentiable=True)."
            )

    def are_readable(self, opt_state: OptState) -> bool:
        """Return True if the host can read the settings in the state. Without momentum torch's
        implementations leave its buffer alone, which the formula updates for a later step.
        """
        return "momentum" not in self.starts and host_can_read(each_of(opt_state.hyper))

    def settings_in_new_state(self, device: torch.device | None) -> dict[str, Any]:
        """Return the settings that a new state holds."""
        return each_number(lambda number: float32(number, device), self.starts)

    def slot_groups(
        self, params: Mapping[str, Tensor], current: Sequence[Mapping[str, Any]] = ({},)
    ) -> list[ParamGroup]:
        """Return the groups with the settings from which slots are made: all that a later value of
        a setting in the state needs.
        """
        first, *others = ({n: v for n, v in table.items() if n == "lr"} for table in current)
        momentum = {"momentum": 0.5} if "momentum" in self.starts else {}
        return self.torch_groups(tuple(params), [{**first, **momentum}, *others])

    def new_slots(self, named: Mapping[str, Tensor], current: Tables) -> Slots:
        """Return the slots of these parameters before their first step."""
        slots: Slots = {}
        for group in self.slot_groups(named, current):
            # torch checks shapes, and needs no memory for it.
            shapes = [
                torch.empty(named[name].shape, dtype=named[name].dtype, device="meta")
                for name in group.names
            ]
            self._constructed(shapes, group.settings)
            new = {name: self.slot_layout.new(named[name], group.settings) for name in group.names}
            slots.update(new)
        return {name: slots[name] for name in named}

    def check(self, opt_state: OptState) -> None:
        """Refuse a state whose settings do not match `in_state`, or without the count."""
        iteration = opt_state.iteration
        if self.schedule_by == "iteration" and not _is_count(iteration):
            raise ValueError(
                f"opt_state.iteration is {describe(iteration)}, expected a 0-d int64 tensor: this "
                'optimizer was made with schedule_by="iteration". Fix: `opt_state = optimizer.init('
                "params)`; if no step was skipped, `opt_state._replace(iteration=opt_state.applied."
                "clone())`; for the states of an ensemble torch.vmap."
            )
        if self.schedule_by == "applied" and not isinstance(iteration, tuple):
            raise ValueError(
                f"opt_state.iteration is {iteration!r}, but the schedules of this optimizer count "
                'applied steps and would ignore it. Fix: from_torch(..., schedule_by="iteration").'
            )
        check_stored(opt_state, self.starts)

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
                        "stands for lr, or for a number in the state, and not in overrides. Fix: "
                        f"from_torch(..., {name}=schedule, in_state=({name!r},))."
                    )
                if isinstance(one, Tensor) and not (name == "lr" and is_float_scalar(one)):
                    raise TypeError(
                        f"{where}: {name} {'is' if one is value else 'holds'} a tensor of shape "
                        f"{tuple(one.shape)}, {one.dtype}; only lr may be one, floating and 0-d. "
                        f"Fix: a number to start from and in_state=({name!r},)."
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
