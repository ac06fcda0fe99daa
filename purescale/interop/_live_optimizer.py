"""A live optimizer of torch as a pure one, by name: its groups and its state, and back."""

from __future__ import annotations

import array
import copy
import glob
import inspect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._optim.opt_state import OptState, is_wrapped
from .._torch_optim.from_torch import from_torch, optimizer_of, spec_of_class
from .._torch_optim.in_state import read_numbers
from .._torch_optim.param_group_optimizer import ParamGroupOptimizer
from .._torch_optim.schedule import ScheduleBy
from .._torch_optim.settings import IMPLEMENTATION_FLAGS, OptimizerConfig
from .._torch_optim.slots import with_python_scalars
from .._torch_optim.torch_state_dict import common_value, write_state_dict
from .._tree.pytree import Tree
from .._wrappers.schedule_free import ScheduleFreeState
from .._wrappers.wrapper import Wrapper


def from_torch_optimizer(
    torch_optimizer: torch.optim.Optimizer, model: nn.Module, in_state: Sequence[str] = ()
) -> tuple[ParamGroupOptimizer, OptState]:
    """Equal to `optimizer = from_torch(type(torch_optimizer), overrides=groups)` and `opt_state =
    optimizer.from_state_dict(torch_optimizer.state_dict(), params)`, by the names of parameters in
    `model`. Syncs with the host.

    Parameter groups are those of the live optimizer, in any order: what library code such as timm's
    has made, or your own lines. The next step is the one that it would make next. Everything is
    copied, and the live optimizer does not change. `to_torch_optimizer` is the inverse.

    Args:
        torch_optimizer: An optimizer of a class of torch.optim, or of your own, before its first
            step or later. Its step hooks do not run, and its flags (`foreach`, `fused`,
            `capturable`, `differentiable`) are left to `from_torch`. Of a class of your own the
            other attributes are used too; they must not change in a step.
        model: The model whose parameters it steps; `nn.ModuleDict({"a": a, "b": b})` for several.
        in_state: Names of settings that the state holds, as in `from_torch`: one number for all
            groups. A group in which it is 0, as the weight decay of biases, keeps that.

    Returns:
        The optimizer, and its state for the parameters of `make_functional(model)` that it steps.
        If it steps some of them only, it is a part of a `partition`, as Muon beside AdamW.

    Raises:
        TypeError: If `torch_optimizer` is not an optimizer of torch.
        ValueError: If it has a parameter that is not in the model, or groups with several numbers
            for a name in `in_state`; and all that `from_torch` and `from_state_dict` refuse.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> groups = [{"params": [model.bias], "lr": 0.1}, {"params": [model.weight]}]
        >>> sgd = torch.optim.SGD(groups, lr=0.5)
        >>> optimizer, opt_state = from_torch_optimizer(sgd, model)
        >>> optimizer
        from_torch(SGD, lr=0.1, overrides={('weight',): {'lr': 0.5}})
    """
    named = dict(model.named_parameters())
    trained = {name: p for name, p in named.items() if p.requires_grad} or named
    names = names_by_group(torch_optimizer, model, trained)
    stepped = {name for group in names for name in group}
    params = {name: p for name, p in trained.items() if name in stepped}
    rates = [read_numbers({"lr": g.get("lr", 0.0)}) for g in torch_optimizer.param_groups]
    return convert_optimizer(torch_optimizer, model, params, names, rates, in_state)


def to_torch_optimizer(
    opt_state: Tree, optimizer: Any, torch_optimizer: torch.optim.Optimizer, model: nn.Module
) -> None:
    """Equal to `torch_optimizer.load_state_dict(optimizer.to_state_dict(opt_state, like=...))`, by
    the names of parameters in `model`, in the groups of the live optimizer. Syncs with the host.

    The inverse of `from_torch_optimizer`. Nothing is written unless everything fits. The groups
    stay the same objects and keep torch's settings, except those that the state holds. State of
    parameters that are frozen stays.

    Args:
        opt_state: The state that the last step returned. It is not changed.
        optimizer: The optimizer of `from_torch_optimizer`, or a wrapper of it that is not
            `with_schedule_free`.
        torch_optimizer: The live optimizer.
        model: The model whose parameters it steps.

    Raises:
        ValueError: If `optimizer` is not of `from_torch`, if the live optimizer is of another class
            or has other parameters, or if the state is stacked.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.5)
        >>> optimizer, opt_state = from_torch_optimizer(sgd, model, in_state=("lr",))
        >>> to_torch_optimizer(opt_state._replace(lr=torch.tensor(0.25)), optimizer, sgd, model)
        >>> sgd.param_groups[0]["lr"]
        0.25
    """
    inner, of_torch = check_innermost(opt_state, optimizer, torch_optimizer)
    loaded = state_dict_with(torch_optimizer, model, inner.config, of_torch)
    load_state(torch_optimizer, loaded, inner.config.in_state)


# ---- from torch ----------------------------------------------------------------------------------


def convert_optimizer(
    torch_optimizer: torch.optim.Optimizer,
    model: nn.Module,
    params: Mapping[str, Tensor],
    names: list[tuple[str, ...]],
    settings: Sequence[Mapping[str, Any]],
    in_state: Sequence[str],
    schedule_by: ScheduleBy = "applied",
    count: int | None = None,
) -> tuple[ParamGroupOptimizer, OptState]:
    """Return a live optimizer with these names of its groups, with the rate and other settings in
    place of theirs, and its state for `params`. `count` is that from which schedules go on.
    """
    optimizer = _make_optimizer(torch_optimizer, names, settings, in_state, schedule_by)
    # One group, in the order of `params`, because groups with equal settings are one here.
    live = dict(model.named_parameters())
    state = {index: torch_optimizer.state.get(live[name], {}) for index, name in enumerate(params)}
    group = {"params": list(state), "param_names": list(params)}
    sd = {"state": state, "param_groups": [group]}
    counts = {} if count is None else {str(schedule_by): count}
    return optimizer, optimizer.from_state_dict(sd, params, **counts)


def _name_by_id(model: nn.Module) -> dict[int, str]:
    """Return the name of each parameter by id."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def names_by_group(
    torch_optimizer: torch.optim.Optimizer, model: nn.Module, params: Mapping[str, Tensor]
) -> list[tuple[str, ...]]:
    """Return the names of the trained parameters in each group of a live optimizer."""
    if not isinstance(torch_optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"the optimizer is {type(torch_optimizer).__name__}; expected a live one of "
            "torch.optim. Fix: `torch.optim.AdamW(model.parameters())`, or without one from_torch."
        )
    names = _name_by_id(model)
    groups = []
    for index, group in enumerate(torch_optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ValueError(
                    f"param_groups[{index}] of the optimizer has a parameter of shape "
                    f"{tuple(parameter.shape)} that is not in the model. Fix: the model that it "
                    "steps; for several `nn.ModuleDict({'a': a, 'b': b})`."
                )
        group_names = [names[id(parameter)] for parameter in group["params"]]
        groups.append(tuple(name for name in group_names if name in params))
    return groups


def _make_optimizer(
    torch_optimizer: torch.optim.Optimizer,
    names: list[tuple[str, ...]],
    settings: Sequence[Mapping[str, Any]],
    in_state: Sequence[str],
    schedule_by: ScheduleBy,
) -> ParamGroupOptimizer:
    """Return a pure optimizer with the settings of the first group, except what the state holds for
    all, and overrides for groups that differ.
    """
    cls = type(torch_optimizer)
    is_torchs = getattr(torch.optim, cls.__name__, None) is cls
    defaults = inspect.signature(cls).parameters
    groups = [  # those of a user's class may differ in their names
        {**_settings_of(group, defaults if is_torchs else group), **others}
        for group, others in zip(torch_optimizer.param_groups, settings, strict=True)
    ]
    stepped = [group for members, group in zip(names, groups, strict=True) if members]
    first = {**groups[0], **_common_numbers(stepped, in_state)}
    overrides = {}
    for members, group in zip(names, groups, strict=True):
        differing = {k: v for k, v in group.items() if k not in first or v != first[k]}
        if differing and members:
            overrides[tuple(map(glob.escape, members))] = differing
    if is_torchs:
        changed = {name: value for name, value in first.items() if value != defaults[name].default}
        changed["lr"] = first["lr"]
        return from_torch(
            cls, overrides=overrides, in_state=in_state, schedule_by=schedule_by, **changed
        )
    lr, template = first.pop("lr"), _template(torch_optimizer, first)
    spec = spec_of_class(cls)._replace(setting_names=None, construct=lambda *_: template)
    return optimizer_of(
        OptimizerConfig(spec, lr, overrides, first, in_state=in_state, schedule_by=schedule_by)
    )


def _common_numbers(groups: Sequence[Mapping[str, Any]], in_state: Sequence[str]) -> dict[str, Any]:
    """Return the numbers that the state holds, each that of all groups in which it is not 0."""
    numbers = {}
    for name in in_state:
        having = [group for group in groups if name in group]
        if having:
            numbers[name] = common_value(
                name, [group for group in having if group[name] != 0] or having
            )
    return numbers


def _settings_of(group: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the settings of a parameter group that are among `names`, as Python numbers, without
    the rate and flags.
    """
    kept = set(names) - {"params", "param_names", "initial_lr", "lr", *IMPLEMENTATION_FLAGS}
    return read_numbers({n: value for n, value in group.items() if n in kept})


def _template(torch_optimizer: torch.optim.Optimizer, settings: Mapping[str, Any]) -> Any:
    """Return an optimizer of a user's class without its parameters, state and hooks. It is not
    made by its own constructor, whose arguments nobody knows any more.
    """
    template: Any = object.__new__(type(torch_optimizer))
    probe = torch.zeros(2, 3, dtype=torch.float32, device="cpu")
    torch.optim.Optimizer.__init__(template, [probe], {**torch_optimizer.defaults, **settings})
    # A scheduler wraps `step`.
    for name in vars(torch_optimizer).keys() - vars(template).keys() - {"step"}:
        value = vars(torch_optimizer)[name]
        vars(template)[name] = copy.copy(value) if isinstance(value, (dict, list, set)) else value
    return template


# ---- into torch ----------------------------------------------------------------------------------


def check_innermost(opt_state: Tree, optimizer: Any, torch_optimizer: Any) -> tuple[Any, OptState]:
    """Return the innermost optimizer and its state, checked to fit `torch_optimizer`."""
    inner, of_torch = optimizer, opt_state
    while isinstance(inner, Wrapper):
        inner = inner.optimizer
    while is_wrapped(of_torch) and not isinstance(of_torch, ScheduleFreeState):
        of_torch = of_torch.inner
    fits = isinstance(inner, ParamGroupOptimizer) and isinstance(of_torch, OptState)
    if not fits or inner.config.spec.cls is not type(torch_optimizer) or of_torch.applied.ndim:
        what = inner if isinstance(inner, ParamGroupOptimizer) else type(inner).__name__
        raise ValueError(
            f"the state is {type(of_torch).__name__} of {what}, the live optimizer "
            f"{type(torch_optimizer).__name__}; expected one state of an optimizer of that class. "
            "Fix: of a partition each part, `opt_state[key]` and `optimizer.optimizers[key]`; of "
            "with_schedule_free `averaged(params, opt_state)`; of stacked ones `member(state, 0)`."
        )
    return inner, of_torch


def state_dict_with(
    torch_optimizer: torch.optim.Optimizer,
    model: nn.Module,
    config: OptimizerConfig,
    opt_state: OptState,
) -> dict[str, Any]:
    """Return the live optimizer's state dict with the slots and the settings of a state."""
    names, live = _name_by_id(model), torch_optimizer.state_dict()
    parameters = [group["params"] for group in torch_optimizer.param_groups]
    named = [
        {**saved, "param_names": [names.get(id(p), str(id(p))) for p in members]}
        for saved, members in zip(live["param_groups"], parameters, strict=True)
    ]
    like = {**live, "param_groups": named}
    sd = write_state_dict(config, opt_state, like=like, written=config.in_state)
    state = sd["state"]
    if config.spec.formula is None:  # torch would round a float64 to the parameter's dtype
        for place, parameter in enumerate(itertools.chain(*parameters)):
            if place in state:
                state[place] = with_python_scalars(state[place], parameter, (torch.float64,))
    return {**live, **sd}


def load_state(
    torch_optimizer: torch.optim.Optimizer, loaded: dict[str, Any], stored: Sequence[str]
) -> None:
    """Load what `state_dict_with` returned, with these stored settings. The groups stay the same
    objects with their tensors.
    """
    groups = torch_optimizer.param_groups
    torch_optimizer.load_state_dict(loaded)
    torch_optimizer.param_groups = groups
    for group, new in zip(groups, loaded["param_groups"], strict=True):
        for name in stored:
            live, value = group.get(name), new.get(name)
            if value is live:  # of parameters that are not stepped
                continue
            if isinstance(live, Tensor):  # groups may share it
                live.fill_(value)
            else:
                group[name] = _keep_if_rounded(live, value)


def _keep_if_rounded(live: Any, value: Any) -> Any:
    """Return the number of a state, or the live one if that is rounded to it in float32."""
    if isinstance(value, tuple):
        return tuple([_keep_if_rounded(*pair) for pair in zip(live, value, strict=True)])
    return live if array.array("f", [live])[0] == value else value
