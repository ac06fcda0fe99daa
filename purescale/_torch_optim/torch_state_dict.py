"""torch's state dicts of an optimizer: written with names, read by name, or from one group."""

from __future__ import annotations

import copy
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._optim.opt_state import OptState
from .._torch_optim.formulas import LeafSlots
from .._torch_optim.in_state import (
    as_float32,
    map_numbers,
    read_numbers,
    stored_settings,
    with_stored,
)
from .._torch_optim.param_groups import ParamGroup, build_param_groups
from .._torch_optim.settings import (
    IMPLEMENTATION_FLAGS,
    ConfiguredSettings,
    OptimizerConfig,
)
from .._torch_optim.slots import COUNT, param_names, was_python_scalar, with_tensor_scalars
from .._tree import pytree
from .._tree.scalars import checked_whole, short_repr

NAME_THEM = (
    "Fix: names, which `to_state_dict` writes, and torch for an optimizer that was made from "
    "`model.named_parameters()`. For another one `names = {id(p): n for n, p in "
    "model.named_parameters()}` and `for group, live in zip(sd['param_groups'], "
    "torch_optimizer.param_groups): group['param_names'] = [names[id(p)] for p in live['params']]`."
)

_LISTS = ("params", "param_names")  # of a group, beside its settings

# ---- written -------------------------------------------------------------------------------------


def write_state_dict(
    config: OptimizerConfig,
    opt_state: OptState,
    initial_lr: float | None = None,
    like: Mapping[str, Any] | None = None,
    written: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Return a state in torch's format, as `ParamGroupOptimizer.to_state_dict`. Groups of `like`
    keep all settings but those that are `written`, by default all.
    """
    state: dict[int, dict[str, Any]] = {}
    groups, slots = [], slots_by_parameter(config, opt_state)
    for group in _current_groups(config, opt_state, list(slots), initial_lr):
        start, names, values = len(state), group.names, group.settings
        state.update(enumerate([_save_entry(slots[name]) for name in names], start))
        lr = values["lr"]
        lr = lr.clone() if isinstance(lr, Tensor) else lr
        indices = list(range(start, len(state)))
        groups.append({**values, "lr": lr, "params": indices, "param_names": list(names)})
    kept = {index: entry for index, entry in state.items() if entry}
    sd = {"state": kept, "param_groups": groups}
    return sd if like is None else _fill(like, sd, list(slots), written)


def slots_by_parameter(config: OptimizerConfig, opt_state: OptState) -> dict[str, LeafSlots]:
    """Return the slots of each parameter as torch has them, with a count of steps if it has one."""
    formula = config.spec.formula
    if formula is None:
        return opt_state.slots
    names, counts = param_names(opt_state), pytree.flatten(opt_state.counts)[0]
    counts = counts or [opt_state.applied.float()] * len(names)
    slots: dict[str, LeafSlots] = {name: {} for name in names}
    for name, count in zip(names, counts, strict=True):
        if formula.has_step_slot:
            slots[name][COUNT] = count
    for key, tree in opt_state.slots.items():
        for name, value in zip(pytree.dotted_names(tree), pytree.flatten(tree)[0], strict=True):
            slots[name][key] = value
    if formula.makes_buffer_in_first_step:
        slots = {n: slots[n] if count else {} for n, count in zip(names, counts, strict=True)}
    return slots


def _current_groups(
    config: OptimizerConfig,
    opt_state: OptState,
    names: list[str],
    initial_lr: float | None,
) -> list[ParamGroup]:
    """Return torch's parameter groups with the current settings and rates: Python numbers, except a
    rate that was given as a tensor. `initial_lr` is that of the first group; None takes it from the
    schedule.
    """
    config.check_state(opt_state)
    zero = torch.zeros_like(opt_state.applied)
    first = config.evaluate_settings(opt_state._replace(applied=zero, iteration=zero))
    now, stored = config.evaluate_settings(opt_state), stored_settings(opt_state)
    defaults = _with_initial(config.for_all, now[0], first[0], stored)
    if initial_lr is not None:
        defaults["initial_lr"] = float(initial_lr)
    # A setting that an override names has an initial value of its own, or none.
    by_override = [
        {f"initial_{name}": None for name in configured.values}
        | _with_initial(configured, current, initial, {})
        for configured, current, initial in zip(config.by_override, now[1:], first[1:], strict=True)
    ]
    step_settings = [defaults, *by_override]
    groups = []
    for group in build_param_groups(config, tuple(names), step_settings):
        pairs = group.settings.items()
        complete = {n: v for n, v in pairs if v is not None or not n.startswith("initial_")}
        groups.append(group._replace(settings=complete))
    return groups


def _with_initial(
    configured: ConfiguredSettings,
    now: dict[str, Any],
    first: Mapping[str, Any],
    stored: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the settings of a step, with Python numbers for those stored or scheduled, and
    `initial_<name>` for each that is scheduled, as torch's schedulers write it.
    """
    now = now | map_numbers(float, {name: now[name] for name in {**stored, **configured.schedules}})
    initial = {
        name: stored[name] if name in stored else max(float(first[name]), now[name])
        for name in configured.schedules
    }
    return now | {f"initial_{n}": value for n, value in map_numbers(float, initial).items()}


def _save_entry(entry: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return copies of the slots of a parameter."""
    # torch keeps step counts on the CPU, and moves them itself if an implementation needs it.
    return {
        key: value.item()
        if was_python_scalar(value)
        else (value.cpu() if key == COUNT else value).clone()
        for key, value in entry.items()
    }


def _fill(
    like: Any, sd: dict[str, Any], names: Sequence[str], written: Sequence[str] | None
) -> dict[str, Any]:
    """Return `sd` with the groups, the order and the flags of the state dict `like`, which keeps
    what it has of other parameters.
    """
    saved_groups, states = _checked_groups_and_states(like)
    saved_params = _find_parameters(saved_groups, names)
    written_as = {
        name: (group, key)
        for group in sd["param_groups"]
        for name, key in zip(group["param_names"], group["params"], strict=True)
    }
    groups = []
    for index, saved in enumerate(saved_groups):
        members = [name for name, param in saved_params.items() if param.group == index]
        own = [
            {
                n: value
                for n, value in written_as[name][0].items()
                if n not in _LISTS and (written is None or n in written)
            }
            for name in members
        ]
        if any(settings != own[0] for settings in own):
            raise ValueError(
                f"like: param_groups[{index}] has {pytree.join_names(members)}, which are in "
                "several groups here. Fix: a torch optimizer with the groups of "
                "`optimizer.to_state_dict(opt_state)`."
            )
        flags = saved.keys() & IMPLEMENTATION_FLAGS
        changed = {n: value for n, value in (own or [{}])[0].items() if n not in flags}
        groups.append({**saved, **changed})
    new = {param.key: sd["state"].get(written_as[name][1]) for name, param in saved_params.items()}
    state = {
        key: new[key] if key in new else copy.deepcopy(states.get(key))
        for group in saved_groups
        for key in group["params"]
    }
    return {"state": {key: entry for key, entry in state.items() if entry}, "param_groups": groups}


# ---- read ----------------------------------------------------------------------------------------


def read_state_dict(
    config: OptimizerConfig,
    sd: Mapping[str, Any],
    fresh: OptState,
    slots: dict[str, LeafSlots],
    applied: int | Tensor | None,
    iteration: int | Tensor | None,
) -> tuple[OptState, dict[str, LeafSlots]]:
    """Return the state in torch's format, for `ParamGroupOptimizer.from_state_dict`, and its slots
    by parameter, with the count of each if one count is not that of all. `fresh` and `slots` are a
    new state and its slots, which are replaced one by one, so that memory holds one state only.
    """
    groups, states = _checked_groups_and_states(sd)
    saved_params = _find_parameters(groups, list(slots))
    counts: dict[str, Any] = {}
    has_step_slot = config.spec.formula is not None and config.spec.formula.has_step_slot
    for name, param in saved_params.items():
        saved = states.get(param.key, {})
        if config.spec.formula is None:
            slots[name] = pytree.clone(with_tensor_scalars(saved, name))
            continue
        if has_step_slot:
            zero = torch.zeros((), dtype=torch.float32, device=fresh.applied.device)
            slots[name] = {COUNT: zero, **slots[name]}
        slots[name] = _restore_entry(name, saved, slots[name])
        counts[name] = slots[name].pop(COUNT) if has_step_slot else bool(saved)
    of_steps = [entry[COUNT] for entry in slots.values() if COUNT in entry]  # of a class
    steps = [count.cpu() for count in (counts.values() if has_step_slot else of_steps)]
    count, iterations = _read_counts(
        config, fresh, steps, applied, iteration, has_state=bool(states)
    )
    if not has_step_slot:  # torch's SGD makes its buffer in the first step
        later = count.clamp(min=1).float()
        counts = {name: later * is_later for name, is_later in counts.items()}
    differ = any([bool(number.cpu() != count.cpu()) for number in counts.values()])
    if config.needs_counts and (differ or config.counts == "each"):
        for name, number in counts.items():
            device = next((slot.device for slot in slots[name].values()), count.device)
            slots[name][COUNT] = number.to(device)
    stored = _read_stored(config, groups, saved_params, fresh)
    return with_stored(OptState(count, {}, iteration=iterations), stored), slots


def _checked_groups_and_states(sd: Any) -> tuple[list[Mapping[str, Any]], Mapping[Any, Any]]:
    """Return the groups and states of `torch.optim.Optimizer.state_dict()`, or refuse the dict."""
    parts = sd if isinstance(sd, Mapping) else {}
    groups, states = parts.get("param_groups"), parts.get("state")
    if not (
        isinstance(groups, (list, tuple))
        and all(isinstance(group, Mapping) and "params" in group for group in groups)
        and isinstance(states, Mapping)
        and all(isinstance(state, Mapping) for state in states.values())
    ):
        what = sorted(map(str, sd)) if isinstance(sd, Mapping) else type(sd).__name__
        raise ValueError(
            f"sd is {short_repr(what)}; expected {{'state': {{index: slots}}, 'param_groups': "
            "[{'params': [index, ...], ...}]}. Likely cause: a whole checkpoint, or the state dict "
            "of a module. Fix: `optimizer.from_state_dict(checkpoint['optimizer'], params)`."
        )
    return list(groups), states


class SavedParam(NamedTuple):
    """A parameter in a state dict."""

    group: int  # index in sd["param_groups"]
    key: Any  # in sd["state"]


def _find_parameters(
    saved_groups: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> dict[str, SavedParam]:
    """Return where a state dict has each of these parameters: by name, or in this order if it is
    one group without names.
    """
    params = [SavedParam(i, key) for i, group in enumerate(saved_groups) for key in group["params"]]
    # The state dicts of torch.distributed.checkpoint have names in place of positions.
    columns = [group.get("param_names", group["params"]) for group in saved_groups]
    sizes = [len(group["params"]) for group in saved_groups]
    saved_names = [name for column in columns for name in column]
    kinds = {isinstance(name, str) for name in saved_names}
    if list(map(len, columns)) != sizes or len(set(saved_names)) < len(params) or len(kinds) > 1:
        raise ValueError(
            f"the state dict has the names {pytree.join_names(list(map(str, saved_names)))} for "
            f"groups of {sizes} parameters. Fix: in `param_names` a name of its own for each."
        )
    if kinds != {True}:
        sizes = [size for size in sizes if size]
        if sum(sizes) != len(names) or len(sizes) > 1:
            raise ValueError(
                f"the state dict has groups of {sizes} parameters and no names, this optimizer has "
                f"{len(names)} parameters. Only one group of as many is read without names. "
                f"{NAME_THEM}"
            )
        saved_names = list(names)
    saved_params = dict(zip(saved_names, params, strict=True))
    missing = [name for name in names if name not in saved_params]
    if missing:
        raise ValueError(
            f"the state dict has no {pytree.join_names(missing)}; it has "
            f"{pytree.join_names(list(saved_params))}. Likely cause: the names of a wrapped "
            "model (`module.`, `_orig_mod.`), or another model. Fix: `for group in "
            "sd['param_groups']: group['param_names'] = [name.removeprefix('module.') for name "
            "in group['param_names']]`."
        )
    return {name: saved_params[name] for name in names}


def _restore_entry(
    name: str, saved: Mapping[str, Any], fresh: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the slots of one parameter in a state dict, copied; the fresh ones if it has none."""
    saved = {key: value for key, value in saved.items() if value is not None}
    if not saved:
        return fresh
    if saved.keys() != fresh.keys():
        raise ValueError(
            f"the state of {name} has {sorted(map(str, saved))}, this optimizer keeps "
            f"{sorted(fresh)}. Fix: from_torch with the class and the settings (momentum, amsgrad, "
            "centered) that wrote it."
        )
    new = {}
    for key, like in fresh.items():
        value = saved[key]
        if isinstance(value, numbers.Real):
            value = torch.tensor(float(value), dtype=torch.float64, device="cpu")
        if not isinstance(value, Tensor):
            raise TypeError(
                f"the state of {name} has {key} = {type(value).__name__}; expected a tensor. Fix: "
                "`opt.state_dict()`, unchanged."
            )
        if value.shape != like.shape or (value.is_complex() and not like.is_complex()):
            raise ValueError(
                f"the state of {name} has {key} of shape {tuple(value.shape)}, {value.dtype}, "
                f"expected {tuple(like.shape)}, {like.dtype}. Likely cause: another model, or a "
                f"dict without names whose optimizer had another order. {NAME_THEM}"
            )
        new[key] = value.detach().to(like.device, like.dtype, copy=True)
    return new


# ---- stored settings -----------------------------------------------------------------------


def _read_stored(
    config: OptimizerConfig,
    saved_groups: Sequence[Mapping[str, Any]],
    saved_params: Mapping[str, SavedParam],
    fresh: OptState,
) -> dict[str, Any]:
    """Return the stored settings from those groups of a state dict that take theirs from the state,
    or the fresh ones if the dict has none.
    """
    stored, device = stored_settings(fresh), fresh.applied.device
    pairs = [
        (group, saved_groups[index])
        for group in build_param_groups(config, tuple(saved_params))
        for index in dict.fromkeys([saved_params[name].group for name in group.names])
    ]
    for name in config.in_state:
        key = f"initial_{name}" if name in config.for_all.schedules else name
        taken = [
            saved
            for group, saved in pairs
            if not any(name in config.by_override[at].values for at in group.override_indices)
        ]
        if key == "initial_lr" and not all(key in saved for saved in taken):
            raise ValueError(
                "the state dict has no initial_lr, the rate in the state that the schedule "
                "multiplies. Likely cause: the state dict of an optimizer without a scheduler. "
                "Fix: `group['initial_lr'] = 1e-3` for its param_groups."
            )
        value = common_value(key, taken)
        if value is None:
            continue
        if isinstance(value, tuple) != isinstance(stored[name], tuple):
            raise ValueError(
                f"the state dict has {name} = {value}; expected what {config.spec.name} has "
                f"there, such as {config.first_stored[name]}. Likely cause: the state dict of "
                "another class."
            )
        stored |= map_numbers(lambda number: as_float32(number, device), {name: value})
    return stored


def common_value(name: str, groups: Sequence[Mapping[str, Any]]) -> Any:
    """Return the value that all these parameter groups share; None if no group has one."""
    values = [read_numbers({name: group[name]})[name] for group in groups if name in group]
    if len(set(values)) > 1:
        raise ValueError(
            f"the groups of the torch optimizer have {name} = {values}, and the state holds one "
            f"number for all. Fix: leave {name} out of in_state; or say which parameters keep "
            f"theirs, `from_torch(cls, overrides={{pattern: {{{name!r}: ...}}}}, in_state="
            f"({name!r},))`; to change each, a `partition` with an optimizer for each group."
        )
    return values[0] if values else None


# ---- counts of steps -----------------------------------------------------------------------------


def _read_counts(
    config: OptimizerConfig,
    fresh: OptState,
    steps: list[Tensor],
    applied: Any,
    iteration: Any,
    *,
    has_state: bool,
) -> tuple[Tensor, Any]:
    """Return the number of applied steps, and that of iterations or (), of a restored state: as
    given, else by its step counts.
    """
    number, iterations = _whole_count("applied", applied), _whole_count("iteration", iteration)
    by_applied, scheduled = config.schedule_by == "applied", config.has_schedules
    if steps and not bool(torch.isfinite(torch.stack(steps)).all()):
        raise ValueError(
            "the state dict has a step count that is inf or NaN. Fix: one that is not damaged."
        )
    of_formula = config.spec.made_by == "from_formula" and has_state
    if number is None and not steps and ((by_applied and scheduled) or of_formula):
        raise ValueError(
            f"{config.spec.name} is given the number of the step, or its schedule is, and a "
            "state dict with no step count does not tell it. Fix: `optimizer.from_state_dict(sd, "
            "params, applied=scheduler.last_epoch)`, the number of steps made so far."
        )
    if by_applied and iterations is not None:
        raise ValueError(
            f"iteration is {iteration}, but the schedules of this optimizer count applied steps. "
            'Fix: from_torch(..., schedule_by="iteration"), or `applied=` in its place.'
        )
    if not by_applied and scheduled and iterations is None:
        raise ValueError(
            "a schedule goes by iteration, and a state dict of torch.optim counts applied steps at "
            "most. Fix: `optimizer.from_state_dict(sd, params, iteration=scheduler.last_epoch)`, "
            "the number of steps so far with the skipped ones; of a state `opt_state.iteration`."
        )
    if number is not None:
        count = torch.full_like(fresh.applied, number)
    elif steps:
        count = torch.stack(steps).max().to(fresh.applied.device, torch.int64)
    else:
        count = fresh.applied + has_state
    if by_applied:
        return count, ()
    return count, count.clone() if iterations is None else torch.full_like(count, iterations)


def _whole_count(name: str, count: Any) -> int | None:
    if isinstance(count, Tensor) and count.ndim == 0:
        count = count.item()
    return None if count is None else checked_whole(name, count, least=0)
