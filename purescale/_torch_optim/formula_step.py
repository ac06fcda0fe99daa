"""A step by formulas, leaf by leaf or over leaves that are joined into one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._optim.opt_state import OptState, with_step_counted
from .._optim.optimizer_inputs import OptimizerInputs
from .._torch import flat_buffer, foreach, private
from .._torch.dtypes import wide_dtype, widest_float
from .._torch.transfer import send_once, to_device
from .._torch_optim.formulas import SIZES, LeafSlots, NewLeaf, Settings
from .._torch_optim.in_state import map_numbers
from .._torch_optim.param_groups import ParamGroup, build_param_groups
from .._torch_optim.schedule import is_scheduled
from .._torch_optim.settings import OptimizerConfig, StepSettings
from .._torch_optim.slots import COUNT, SlotLists, SlotSpec, slot_lists_of, with_slot_lists
from .._tree.gradients import Gradients


class Row(NamedTuple):
    """A parameter with what belongs to it."""

    param: Tensor
    grad: Tensor
    slots: LeafSlots


class FormulaStep:
    """The step by a formula, of a class of torch.optim or a user's. It reads no value."""

    def __init__(self, config: OptimizerConfig, slot_spec: SlotSpec) -> None:
        self._config, self._slot_spec = config, slot_spec
        self._formula = config.spec.formula
        # Dynamo does not trace a torch optimizer, but the compiler behind it traces this Python.
        self._opaque = _nonstrict_traced(config, self._step_groups)
        self._sizes: dict[tuple[Any, ...], Tensor] = {}  # of `send_once`

    def run(
        self,
        inputs: OptimizerInputs,
        grads: Gradients,
    ) -> tuple[list[Tensor], OptState]:
        """Return parameters and state after the step with unscaled gradients, in fresh memory. Each
        leaf is stepped alone and keeps its graph if the step may be differentiated.
        """
        param_structure, params = inputs.param_structure, inputs.params
        opt_state = with_step_counted(inputs.opt_state)
        slot_lists, applied = slot_lists_of(opt_state, param_structure), opt_state.applied
        t = applied.to(widest_float(applied.device))
        step_settings = [_as_arguments(each, applied.device) for each in inputs.step_settings]
        per_leaf = self._config.differentiable or inputs.context.traced
        grad_leaves = inputs.grads_in_param_dtypes(grads)
        operands = params, grad_leaves, slot_lists, t, step_settings, per_leaf
        if torch.compiler.is_dynamo_compiling():
            new_params, new_slot_lists = self._opaque(list(param_structure.names), *operands)
        else:
            new_params, new_slot_lists = self._step_groups(inputs.plan.groups, *operands)
        return new_params, with_slot_lists(opt_state, new_slot_lists, param_structure)

    def _step_groups(
        self,
        groups: list[ParamGroup],
        params: list[Tensor],
        grad_leaves: list[Tensor | None],
        slot_lists: SlotLists,
        t: Tensor,
        step_settings: StepSettings,
        per_leaf: bool,
    ) -> tuple[list[Tensor], SlotLists]:
        """Return all new parameters and slot lists."""
        new_params: list[Any] = list(params)
        new_slot_lists = {key: list(slot_list) for key, slot_list in slot_lists.items()}
        slots: list[LeafSlots] = [
            {key: c[index] for key, c in slot_lists.items() if isinstance(c[index], Tensor)}
            for index in range(len(params))
        ]
        for group in groups:
            settings = self._config.settings_of(group.override_indices, step_settings)
            present = [
                (index, gradient)
                for index in group.indices
                # A formula that is not elementwise divides by a size, which may be 0.
                if (gradient := grad_leaves[index]) is not None
                and (self._formula.elementwise or params[index].numel())
            ]
            rows = [Row(params[index], grad, slots[index]) for index, grad in present]
            stepped = self._step_group(rows, settings, t, per_leaf=per_leaf)
            for (index, _), (param, leaf_slots) in zip(present, stepped, strict=True):
                new_params[index] = param
                for key, slot in leaf_slots.items():
                    new_slot_lists[key][index] = slot
        return _fresh(new_params, params), {
            key: _fresh(new_slot_lists[key], slot_list) for key, slot_list in slot_lists.items()
        }

    def _step_group(
        self, rows: list[Row], settings: Settings, t: Tensor, *, per_leaf: bool
    ) -> list[NewLeaf]:
        """Return the new parameter and slots of each row."""
        if per_leaf or not self._formula.elementwise:
            return [self._step_leaf(row, settings, t) for row in rows]
        stepped: list[Any] = [None] * len(rows)
        params = [row.param for row in rows]
        kinds = [(row.param.device, row.param.dtype, tuple(row.slots)) for row in rows]
        on_accelerator = any(map(foreach.is_on_accelerator, params))
        max_numel = flat_buffer.MAX_JOINED_NUMEL if on_accelerator else flat_buffer.CACHE_NUMEL
        for indices in flat_buffer.bounded_groups(params, kinds, max_numel):
            some = [rows[index] for index in indices]
            if len(some) > 1:
                new = self._step_joined(some, settings, t)
            else:
                new = [self._step_leaf(some[0], settings, t)]
            for index, result in zip(indices, new, strict=True):
                stepped[index] = result
        return stepped

    def _step_leaf(self, row: Row, settings: Settings, t: Tensor) -> NewLeaf:
        param, grad, leaf_slots = row
        slots = {
            key: _widest_scalar(value) if self._slot_spec.is_scalar(key) else _widen(value)
            for key, value in leaf_slots.items()
        }
        new, new_slots = self._apply_formula(_widen(param), _widen(grad), slots, settings, t)
        return _narrow(new, param), {
            key: _narrow(new_slots[key], old) if key in new_slots else old.clone()
            for key, old in leaf_slots.items()
        }

    def _step_joined(self, rows: list[Row], settings: Settings, t: Tensor) -> list[NewLeaf]:
        """Step leaves of one kind as one leaf. Each count becomes a vector with a number for each
        leaf.
        """
        params, grads = [row.param for row in rows], [row.grad for row in rows]
        slot_lists = {key: [row.slots[key] for row in rows] for key in rows[0].slots}
        slots, likes = {}, {}
        for key, slot_list in slot_lists.items():
            is_scalar = self._slot_spec.is_scalar(key)
            likes[key] = slot_list if is_scalar else params
            slots[key] = (
                _widest_scalar(torch.stack(slot_list)) if is_scalar else _join(slot_list, params)
            )
        if any(map(self._slot_spec.is_scalar, slot_lists)):
            reals = 2 if params[0].is_complex() else 1
            sizes = tuple([reals * param.numel() for param in params])
            slots[SIZES] = send_once(sizes, params[0].device, self._sizes)
            t = t.expand(len(rows))
        new, new_slots = self._apply_formula(
            _join(params, params), _join(grads, params), slots, settings, t
        )
        new_slot_lists = {
            key: _split_joined(new_slots.get(key, slots[key]), slot_list, likes[key])
            for key, slot_list in slot_lists.items()
        }
        new_leaf_slots = [
            {key: slot_list[index] for key, slot_list in new_slot_lists.items()}
            for index in range(len(rows))
        ]
        return list(zip(_split_joined(new, params, params), new_leaf_slots, strict=True))

    def _apply_formula(
        self, param: Tensor, grad: Tensor, slots: LeafSlots, settings: Settings, t: Tensor
    ) -> NewLeaf:
        """Call the formula with the gradient of what is minimised, and with the number of the
        leaf's own step if its slots count them.
        """
        grad = -grad if settings.get("maximize") else grad
        if COUNT not in slots:
            return self._formula.step(param, grad, slots, settings, to_device(t, param.device))
        t = slots[COUNT] + 1
        slots = {key: value for key, value in slots.items() if key != COUNT}
        new, new_slots = self._formula.step(param, grad, slots, settings, t)
        return new, {**new_slots, COUNT: t}


def _nonstrict_traced(config: OptimizerConfig, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call(names, *operands)`, equal to `function(groups, *operands)` with the groups
    of these names, which Dynamo does not trace. Dynamo guards on arguments only: the constant
    settings are passed as text, so that others compile anew. Rates that are tensors or
    schedules reach `function` as operands.
    """

    def call(key: str, names: list[str], *operands: Any) -> Any:
        return function(build_param_groups(config, tuple(names)), *operands)

    constant = [
        {k: v for k, v in settings.items() if not (isinstance(v, Tensor) or is_scheduled(v))}
        for settings in (config.all_settings, *config.overrides.values())
    ]
    kind = config.spec.name, id(config.spec.cls), id(config.spec.formula)
    key = repr((kind, list(config.overrides), constant, config.in_state))
    traced_call = private.NonstrictTraced(call)
    return lambda names, *operands: traced_call(key, names, *operands)


def _fresh(new: list[Any], old: list[Any]) -> list[Any]:
    """Return new leaves, with a copy of what took no part in the step."""
    pairs = zip(new, old, strict=True)
    return [n.clone() if n is o and isinstance(n, Tensor) else n for n, o in pairs]


def _widen(tensor: Tensor) -> Tensor:
    """Return a half tensor in float32, a complex one as its reals, a single number as a vector:
    it would take the dtype of a setting that is a tensor.
    """
    wide = tensor.to(wide_dtype(tensor.dtype))
    wide = wide if wide.ndim else wide.reshape(1)
    return torch.view_as_real(wide) if wide.is_complex() else wide


def _narrow(new: Tensor, old: Tensor) -> Tensor:
    """Return a result in the dtype of the old value, the inverse of `_widen`."""
    new = torch.view_as_complex(new) if old.is_complex() else new
    new = new.to(old.dtype)
    return new if old.ndim else new.reshape(())


def _as_arguments(settings: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return settings as arguments of a compiled step, which would take a Python number for a
    constant, and wide enough for a formula, as `_widest_scalar`.
    """
    widest = widest_float(device)

    def argument(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device, torch.promote_types(value.dtype, widest))
        compiled = torch.compiler.is_compiling()
        return torch.full((), value, dtype=widest, device=device) if compiled else value

    return map_numbers(argument, settings)


def _widest_scalar(number: Tensor) -> Tensor:
    """Return a number in the widest dtype: a beta to the power of it needs more than float32."""
    return number if number.dtype is torch.bool else number.to(widest_float(number.device))


def _join(tensors: list[Tensor], likes: list[Tensor]) -> Tensor:
    return _widen(flat_buffer.join(tensors, likes)).reshape(-1)


def _split_joined(joined: Tensor, tensors: list[Tensor], likes: list[Tensor]) -> list[Tensor]:
    """Return the inverse of `_join`, in the dtypes of `tensors`."""
    if tensors[0].is_complex():
        joined = torch.view_as_complex(joined.view(-1, 2))
    return flat_buffer.split_copies(joined, tensors, likes)
