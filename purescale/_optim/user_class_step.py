"""The step of a class of a user's own: its `step`, on copies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._optim.in_state import read_numbers
from .._optim.opt_state import OptState
from .._optim.settings import OptimizerConfig, ParamGroup, StepSettings
from .._optim.step_inputs import StepInputs
from .._torch.dtypes import is_half, wide_dtype
from .._tree import pytree
from .._tree.aliasing import copy_aliased
from .._tree.leaves import describe

Slots = dict[str, dict[str, Tensor]]  # by parameter


def step_of_user_class(
    config: OptimizerConfig,
    inputs: StepInputs,
    grad_leaves: list[Tensor | None],
) -> tuple[list[Tensor], OptState]:
    """Return parameters and state after the `step` of a user's class with these settings, in fresh
    memory. The state has counted the step. Half parameters and their slots are computed in float32.
    """
    params, slots = (
        dict(zip(inputs.layout.names, inputs.params, strict=True)),
        inputs.opt_state.slots,
    )

    def copy(value: Tensor, name: str) -> Tensor:
        wide = is_half(params[name]) and is_half(value)
        return value.detach().to(wide_dtype(value.dtype) if wide else value.dtype, copy=True)

    new_params = {name: copy(param, name) for name, param in params.items()}
    copies = {
        name: {key: copy(value, name) for key, value in leaf_slots.items()}
        for name, leaf_slots in slots.items()
    }
    copied_grads = {
        name: g.detach().to(new_params[name].dtype, copy=True)
        for name, g in zip(params, grad_leaves, strict=True)
        if g is not None
    }
    step_settings = inputs.step_settings.map(read_numbers)
    with torch.no_grad():
        new_slots = _run(
            config, new_params, copied_grads, copies, inputs.plan.groups, step_settings
        )
    stepped = [new.to(params[name].dtype) for name, new in new_params.items()]
    new_slots = {
        name: {key: _narrow(value, slots[name].get(key)) for key, value in leaf_slots.items()}
        for name, leaf_slots in new_slots.items()
    }
    stepped, new_slots = copy_aliased((stepped, new_slots), ())
    return stepped, inputs.opt_state._replace(slots=new_slots)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and not value.requires_grad else value


def _run(
    config: OptimizerConfig,
    params: dict[str, Tensor],
    gradients: dict[str, Tensor],
    slots: Slots,
    groups: list[ParamGroup],
    step_settings: StepSettings,
) -> Slots:
    """Run the class's `step` on a copy of an optimizer that holds these tensors."""
    optimizer: Any = object.__new__(config.spec.cls)
    # Lists, dicts and tensors are copied: a step would change those of later steps.
    vars(optimizer).update(pytree.map(_copied, vars(config.prototype)))
    optimizer.param_groups, optimizer.state = [], defaultdict(dict)
    for group in groups:
        present = [name for name in group.names if name in gradients]
        members = {"params": [params[name] for name in present]}
        settings = config.settings_of(group.override_indices, step_settings)
        optimizer.param_groups.append(settings | members)
    try:
        for name, gradient in gradients.items():
            params[name].grad = gradient
            optimizer.state[params[name]] = with_python_scalars(slots[name], params[name])
        config.spec.cls.step(optimizer)
    finally:
        for name in gradients:
            params[name].grad = None
    states = {name: optimizer.state[params[name]] for name in gradients}
    return slots | {name: as_tensors(state, name) for name, state in states.items()}


# ---- its slots, which may be Python numbers ------------------------------------------------------

_NUMBER_DTYPES = (torch.int64, torch.bool)


def as_tensors(leaf_slots: Mapping[str, Any], name: str) -> dict[str, Tensor]:
    """Return the slots of a parameter with a 0-d tensor on the CPU for each Python number."""
    tensors = {
        # What was a float stays a tensor, with which one calculates as with a number.
        key: torch.tensor(
            value, dtype=torch.float64 if type(value) is float else None, device="cpu"
        )
        if isinstance(value, (bool, int, float))
        else value
        for key, value in leaf_slots.items()
    }
    for key, value in leaf_slots.items():
        if not isinstance(tensors[key], Tensor) or was_python(value):
            raise TypeError(
                f"the optimizer's state has {key} of {name} = {describe(value)}; expected a tensor "
                "or a number. A 0-d tensor of int64 or bool on the CPU stands for a Python number. "
                "Fix: a number for it, or `torch.tensor(0, dtype=torch.int32)`; for other objects "
                "an optimizer of your own with `init` and `step`."
            )
    return tensors


def with_python_scalars(
    leaf_slots: Mapping[str, Any], param: Tensor, dtypes: Sequence[torch.dtype] = _NUMBER_DTYPES
) -> dict[str, Any]:
    """Return the slots of a parameter with the Python numbers that `as_tensors` made tensors of
    these dtypes. The moments of a 0-d parameter stay.
    """
    return {
        key: value.item()
        if was_python(value, dtypes) and not (param.ndim == 0 and value.dtype is param.dtype)
        else value
        for key, value in leaf_slots.items()
    }


def was_python(value: Any, dtypes: Sequence[torch.dtype] = _NUMBER_DTYPES) -> bool:
    """Return True for a 0-d tensor of these dtypes on the CPU, which stands for a Python number."""
    is_scalar = isinstance(value, Tensor) and value.ndim == 0 and value.is_cpu
    return is_scalar and value.dtype in dtypes


# ---- dtypes --------------------------------------------------------------------------------------


def _narrow(new: Tensor, old: Tensor | None) -> Tensor:
    return new.to(old.dtype) if old is not None and is_half(old) else new
