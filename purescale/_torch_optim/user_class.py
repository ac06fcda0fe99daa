"""An optimizer of a class of a user's own, whose `step` is called, on copies."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from .._optim.opt_state import OptState, with_step_counted
from .._optim.optimizer_inputs import OptimizerInputs
from .._optim.param_structure import foreign_parameters_error
from .._torch.dtypes import is_half, wide_dtype
from .._torch_optim.formulas import LeafSlots
from .._torch_optim.in_state import read_numbers
from .._torch_optim.param_group_optimizer import ParamGroupOptimizer
from .._torch_optim.param_groups import ParamGroup
from .._torch_optim.settings import StepSettings
from .._torch_optim.slots import with_python_scalars, with_tensor_scalars
from .._tree import pytree
from .._tree.aliasing import copy_aliased
from .._tree.gradients import Gradients


class UserClassOptimizer(ParamGroupOptimizer):
    """A class of a user's own, whose `step` is called, on copies. It makes its slots in its first
    step, and a state has them by parameter.
    """

    may_add_slots = True

    def plan(self, inputs: OptimizerInputs) -> list[ParamGroup]:
        """Return the parameter groups. Refuse a state that does not belong to these parameters."""
        if inputs.context.traced or inputs.context.captured:
            raise ValueError(
                f"{self.config.spec.name} has a step of its own, which is called and cannot "
                "be compiled, captured, mapped or differentiated. Fix: call the step eagerly, take "
                "a class of torch.optim, or write an (init, update) pair for from_transformation."
            )
        groups = self._checked_groups(inputs)
        slots, names = inputs.opt_state.slots, inputs.param_structure.names
        if slots.keys() != set(names):
            raise foreign_parameters_error(list(slots), names)
        return groups

    def compute_step(
        self, inputs: OptimizerInputs, grads: Gradients
    ) -> tuple[list[Tensor], OptState]:
        """Return parameters and state after the step of the class, in fresh memory. Half parameters
        and their slots are computed in float32.
        """
        counted = with_step_counted(inputs.opt_state)
        names, slots = inputs.param_structure.names, counted.slots
        params = dict(zip(names, inputs.params, strict=True))

        def copy(value: Tensor, name: str) -> Tensor:
            widens = is_half(params[name]) and is_half(value)
            return value.detach().to(wide_dtype(value.dtype) if widens else value.dtype, copy=True)

        new_params = {name: copy(param, name) for name, param in params.items()}
        copied_grads = {
            name: g.detach().to(new_params[name].dtype, copy=True)
            for name, g in zip(names, inputs.grads_in_param_dtypes(grads), strict=True)
            if g is not None
        }
        copied_slots = {
            name: {key: copy(value, name) for key, value in leaf_slots.items()}
            for name, leaf_slots in slots.items()
        }
        step_settings = list(map(read_numbers, inputs.step_settings))
        with torch.no_grad():
            new_slots = self._run(
                new_params, copied_grads, copied_slots, inputs.plan, step_settings
            )
        stepped = [new.to(params[name].dtype) for name, new in new_params.items()]
        new_slots = {
            name: {key: _narrowed(value, slots[name].get(key)) for key, value in leaf_slots.items()}
            for name, leaf_slots in new_slots.items()
        }
        stepped, new_slots = copy_aliased((stepped, new_slots), ())
        return stepped, counted._replace(slots=new_slots)

    def _run(
        self,
        params: dict[str, Tensor],
        gradients: dict[str, Tensor],
        slots: dict[str, LeafSlots],
        groups: list[ParamGroup],
        step_settings: StepSettings,
    ) -> dict[str, LeafSlots]:
        """Run the class's `step` on a copy of an optimizer that holds these tensors."""
        config = self.config
        optimizer: Any = object.__new__(config.spec.cls)
        # Lists, dicts and tensors are copied: a step would change those of later steps.
        vars(optimizer).update(pytree.map(_copied_attribute, vars(config.prototype)))
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
        return slots | {name: with_tensor_scalars(state, name) for name, state in states.items()}


def _copied_attribute(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and not value.requires_grad else value


def _narrowed(new: Tensor, old: Tensor | None) -> Tensor:
    return new.to(old.dtype) if old is not None and is_half(old) else new
