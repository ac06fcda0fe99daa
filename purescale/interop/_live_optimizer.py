"""Transfer of a live torch optimizer and its scheduler to `from_torch` and back."""

from __future__ import annotations

import glob
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._optim.master_weights import MasterState, master_weights, masters_within
from .._optim.opt_state import OptState, without_wrappers
from .._optim.param_groups import FLAGS
from .._optim.partition import PartitionOptimizer
from .._optim.schedule import RateTable, ScheduleBy, check_scheduler, place_of, rates_ahead
from .._optim.torch_optim import TorchOptimizer, from_torch
from .._optim.torch_state_dict import state_dict
from .._step.train_state import TrainState
from .._tree.scalars import whole
from .._tree.tree import join_names

# ---- into purescale


def names_by_group(
    optimizer: torch.optim.Optimizer, model: nn.Module, params: Mapping[str, Tensor]
) -> list[tuple[str, ...]]:
    """Return the names of the trained parameters in each group of a live optimizer."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ValueError(
                    f"param_groups[{index}] of the optimizer has a parameter of shape "
                    f"{tuple(parameter.shape)} that is not in the model. Likely cause: the "
                    "optimizer of another model, of several, or of this one before its parameters "
                    "were replaced. Fix: pass the model whose `.parameters()` the optimizer was "
                    "given; for several `nn.ModuleDict({'a': a, 'b': b})`."
                )
        group_names = [names[id(parameter)] for parameter in group["params"]]
        groups.append(tuple(name for name in group_names if name in params))
    missing = params.keys() - {name for group in groups for name in group}
    if missing:
        raise ValueError(
            f"the optimizer does not have {join_names(sorted(missing))} of the model, and here "
            "every parameter that requires a gradient is trained. Fix: before take_over, "
            f"`model.get_parameter({min(missing)!r}).requires_grad_(False)` for each that is not "
            "trained."
        )
    return groups


def check_no_gradients(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Refuse gradients that the optimizer's next step would use, frozen parameters' too."""
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    waiting = [
        name
        for name, p in model.named_parameters()
        if id(p) in stepped
        and p.grad is not None
        and (p.grad.layout is not torch.strided or bool(p.grad.any()))
    ]
    if waiting:
        raise ValueError(
            f"{join_names(waiting)} {'have gradients' if waiting[1:] else 'has a gradient'} in "
            "`.grad`, which a step here would not have. Likely cause: half a window, or gradients "
            "that the loop clears before its next backward. Fix: if they wait for a step, finish "
            "it, `scaler.step(optimizer)` and `scaler.update()`; then `optimizer.zero_grad()`."
        )


def rates_from_now(
    optimizer: torch.optim.Optimizer, scheduler: Any, steps: int | None
) -> tuple[list[Any], int | None]:
    """Return the rate of each parameter group, a table if there is a scheduler, and its step."""
    if scheduler is None:
        if steps is not None:
            raise ValueError(
                f"steps={steps} without a scheduler, so the rates would not change. Fix: "
                "take_over(model, optimizer, scaler, scheduler, steps=...), or leave steps out."
            )
        return [float(group["lr"]) for group in optimizer.param_groups], None
    check_scheduler(scheduler, optimizer, "scheduler")
    if steps is None:
        raise ValueError(
            "take_over got a scheduler, whose rates are tabulated, and no `steps`. Fix: "
            "take_over(..., scheduler, steps=10_000), the largest number of steps made here."
        )
    count, place = whole("steps", steps, least=1), place_of(scheduler)
    rates = rates_ahead(scheduler, count)
    return [RateTable.of(column, place) for column in rates], place


def as_from_torch(
    optimizer: torch.optim.Optimizer,
    names: list[tuple[str, ...]],
    rates: list[Any],
    schedule_by: ScheduleBy,
) -> TorchOptimizer:
    """Return a `from_torch` optimizer with the settings of the first group, and overrides for the
    others.
    """
    cls = type(optimizer)
    groups = [
        {**_settings_of(cls, group), "lr": rate}
        for group, rate in zip(optimizer.param_groups, rates, strict=True)
    ]
    first, overrides = groups[0], {}
    for members, group in zip(names, groups, strict=True):
        differing = {name: value for name, value in group.items() if value != first[name]}
        if differing and members:
            overrides[tuple(map(glob.escape, members))] = differing
    defaults = inspect.signature(cls).parameters
    changed = {name: value for name, value in first.items() if value != defaults[name].default}
    changed["lr"] = first["lr"]
    return from_torch(cls, overrides=overrides, schedule_by=schedule_by, **changed)


def _settings_of(cls: Any, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group as Python numbers, without the rate and flags."""
    accepted = inspect.signature(cls).parameters.keys() - {"params", "lr", *FLAGS}
    settings = {
        name: tuple(map(_number, value)) if isinstance(value, (tuple, list)) else _number(value)
        for name, value in group.items()
        if name in accepted
    }
    if issubclass(cls, torch.optim.Adafactor):  # from_torch requires it by name
        settings["foreach"] = bool(group["foreach"])
    return settings


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def state_dict_by_name(
    optimizer: torch.optim.Optimizer, model: nn.Module, params: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return the live optimizer's state dict with all trained parameters in one group, in the order
    of `params`, because groups with equal settings are one here.
    """
    live = dict(model.named_parameters())
    state = {index: optimizer.state.get(live[name], {}) for index, name in enumerate(params)}
    return {"state": state, "param_groups": [{"params": list(state), "param_names": list(params)}]}


# ---- back into torch


def innermost_optimizer(
    state: Any, optimizer: Any, torch_optimizer: Any
) -> tuple[TorchOptimizer, OptState]:
    """Return the innermost optimizer and its state, checked to fit `torch_optimizer`."""
    inner = optimizer
    while hasattr(inner, "optimizer"):
        inner = inner.optimizer
    if not (
        isinstance(state, TrainState) and isinstance(inner, (TorchOptimizer, PartitionOptimizer))
    ):
        raise TypeError(
            f"give_back got a {type(state).__name__} and a {type(optimizer).__name__}; expected "
            "the TrainState of train_step and the optimizer of take_over. Likely cause: arguments "
            "in the wrong order. Fix: give_back(state, optimizer, rule, model, torch_optimizer, "
            "scaler, scheduler)."
        )
    if isinstance(inner, PartitionOptimizer):
        raise ValueError(
            f"the optimizer has the parts {list(inner.optimizers)}; torch has one optimizer for "
            "each. Fix: `load_into(model, state.params, state.buffers)`, and for each key "
            "`torch_optimizers[key].load_state_dict("
            "optimizer.optimizers[key].to_state_dict(state.opt_state[key], "
            "like=torch_optimizers[key].state_dict()))`."
        )
    cls, opt_state = inner.summary[0], without_wrappers(state.opt_state)
    if not isinstance(opt_state, OptState) or cls is not type(torch_optimizer):
        raise ValueError(
            f"the state is a {type(opt_state).__name__} of {cls.__name__}, the live optimizer a "
            f"{type(torch_optimizer).__name__}. Fix: pass the live optimizer that take_over was "
            "given."
        )
    if opt_state.applied.ndim:
        raise ValueError(
            f"the state is {len(opt_state.applied)} stacked ones, of an ensemble. Fix: pass one at "
            "a time, `give_back(member(state, 0), ...)`."
        )
    if inner.summary[3]:
        raise ValueError(
            f"the optimizer has {', '.join(inner.summary[3])} in its state; torch's has them in "
            "its parameter groups. Fix: "
            "`torch_optimizer.load_state_dict(optimizer.to_state_dict(state.opt_state, "
            "like=torch_optimizer.state_dict()))`."
        )
    return inner, opt_state


def masters_or_params(state: TrainState) -> Any:
    """Return the parameters, or their float32 masters if the state has them."""
    inner = masters_within(state.opt_state)
    return master_weights(state.params, inner) if isinstance(inner, MasterState) else state.params


def state_dict_with(
    optimizer: torch.optim.Optimizer, model: nn.Module, opt_state: OptState
) -> dict[str, Any]:
    """Return the live optimizer's state dict with these slots. Its groups do not change, as a
    scheduler continues from their rates.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    places = {names.get(id(parameter)): place for place, parameter in enumerate(parameters)}
    missing = opt_state.slots.keys() - places.keys()
    if missing:
        raise ValueError(
            f"the state has {join_names(sorted(missing))}, the live optimizer does not. Likely "
            "cause: another model or optimizer than in take_over. Fix: pass those of take_over."
        )
    trained = list(opt_state.slots)
    by_index = state_dict(opt_state.slots, [(trained, {"lr": 0.0})])["state"]
    live = optimizer.state_dict()
    state = {places[trained[index]]: slot for index, slot in by_index.items()}
    return {**live, "state": {**live["state"], **state}}


def load_slots(optimizer: torch.optim.Optimizer, loaded: dict[str, Any]) -> None:
    """Load what `state_dict_with` returned. The groups stay the same objects with their tensors."""
    groups = optimizer.param_groups
    optimizer.load_state_dict(loaded)
    optimizer.param_groups = groups


def steps_since(
    scheduler: Any, optimizer: torch.optim.Optimizer, ours: TorchOptimizer, opt_state: OptState
) -> int:
    """Return the number of steps since the scheduler's last: applied ones, or iterations."""
    scheduled = callable(ours.summary[1]["lr"])
    if scheduled != (scheduler is not None):
        raise ValueError(
            "take_over was given a scheduler, and give_back is not. Fix: give_back(..., scheduler)."
            if scheduled
            else "give_back got a scheduler, but the rate of the optimizer is a number. Likely "
            "cause: take_over without it. Fix: leave it out here too, and step it yourself."
        )
    if scheduler is None:
        return 0
    check_scheduler(scheduler, optimizer, "scheduler")
    by_iteration = isinstance(opt_state.iteration, Tensor)
    count = int(opt_state.iteration if by_iteration else opt_state.applied)
    place = place_of(scheduler)
    if count < place:
        raise ValueError(
            f"the scheduler is at step {place}, the state at {count}. Likely cause: the "
            "scheduler was stepped after take_over. Fix: do not step it; give_back does."
        )
    return count - place
