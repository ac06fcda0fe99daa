"""The step of a class of a user's own: its `step`, on copies, the only one that is called."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from .._optim.in_state import as_number, each_number
from .._optim.opt_state import Slots, Tensors, as_tensors, with_python_scalars
from .._optim.param_groups import OptimizerSettings, Tables
from .._torch import foreach
from .._torch.dtypes import wide_dtype


class ClassStep:
    """The `step` of a user's class with these settings."""

    def __init__(self, settings: OptimizerSettings) -> None:
        self._settings, self._layout = settings, settings.slot_layout

    def __call__(self, params: Tensors, gradients: Tensors, slots: Slots, current: Tables) -> Slots:
        """Make the step in place, on tensors that nobody else sees, and return the slots. Half
        tensors are computed in float32.
        """
        current = [each_number(as_number, table) for table in current]
        narrow = params, slots
        if any([param.dtype.itemsize == 2 for param in params.values()]):
            params, gradients = _widened(params), _widened(gradients)
            slots = {name: self._widened_slot(slot) for name, slot in slots.items()}
        with torch.no_grad():
            new = self._run(params, gradients, slots, current)
            if params is narrow[0]:
                return new
            for target, wide in zip(narrow[0].values(), params.values(), strict=True):
                target.copy_(wide)
            return {name: _copied_into(narrow[1][name], slot) for name, slot in new.items()}

    def _widened_slot(self, slot: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            key: value if self._layout.is_count(key) else value.to(_wide_dtype_of(value))
            for key, value in slot.items()
        }

    def _run(self, params: Tensors, gradients: Tensors, slots: Slots, current: Tables) -> Slots:
        """Run the class's `step` on a copy of an optimizer that holds these tensors."""
        optimizer: Any = object.__new__(self._settings.cls)
        vars(optimizer).update(vars(self._settings.template))
        optimizer.param_groups, optimizer.state = [], defaultdict(dict)
        for group in self._settings.torch_groups(tuple(params), current):
            present = self._settings.stepped_names(group.names, params, gradients)
            members = {"params": [params[name] for name in present]}
            optimizer.param_groups.append(group.settings | members)
        try:
            for name, gradient in gradients.items():
                params[name].grad = gradient
                optimizer.state[params[name]] = with_python_scalars(slots[name], params[name])
            self._settings.cls.step(optimizer)
        except KeyError as error:  # the slots of such a class are not known
            raise self._layout.foreign(str(error)) from None
        finally:
            for name in gradients:
                params[name].grad = None
        states = {name: optimizer.state[params[name]] for name in gradients}
        return slots | {name: as_tensors(state, name) for name, state in states.items()}


def _wide_dtype_of(tensor: Tensor) -> torch.dtype:
    number = tensor.is_floating_point() or tensor.is_complex()
    return wide_dtype(tensor.dtype) if number else tensor.dtype


def _widened(tensors: Tensors) -> Tensors:
    dtypes = [_wide_dtype_of(tensor) for tensor in tensors.values()]
    return dict(zip(tensors, foreach.cast(list(tensors.values()), dtypes), strict=True))


def _copied_into(old: dict[str, Tensor], new: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: old[key].copy_(value) if key in old else value for key, value in new.items()}
