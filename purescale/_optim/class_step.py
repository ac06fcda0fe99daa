"""The step that a class has of its own, in place, on a host that reads its counts."""

from __future__ import annotations

import contextlib
import inspect
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._optim.formulas import FIRST_STEP, filled_like
from .._optim.fused import can_launch
from .._optim.in_state import each_number
from .._optim.opt_state import Slots, Tensors, as_tensors, with_python_scalars
from .._optim.param_groups import FLAGS, CurrentSettings, OptimizerSettings
from .._torch import foreach, private
from .._torch.dtypes import wide_dtype
from .._torch.tensor_list import TensorList


class ClassStep:
    """The `step` of a class of torch.optim, or of a user's class, with these settings."""

    def __init__(self, settings: OptimizerSettings) -> None:
        self._settings, self._layout, self._formula = settings, settings.layout, settings.formula
        # torch's `step` is wrapped for its profiler, its hooks and its compiler.
        self._step = (
            settings.cls.step if self._formula is None else inspect.unwrap(settings.cls.step)
        )
        # torch's SGD over lists adds the momentum to the gradients themselves.
        self._writes_gradients = bool(settings.settings.get("foreach")) and any(
            extra.get("nesterov") for extra in settings.named_settings
        )

    def __call__(
        self, params: Tensors, gradients: Tensors, slots: Slots, current: CurrentSettings
    ) -> Slots:
        """Make the step in place, on tensors that nobody else sees, and return the slots. Half
        tensors are computed in float32.
        """
        lrs = [lr.item() if isinstance(lr, Tensor) else lr for lr in current.lrs]
        hyper = each_number(Tensor.item, current.hyper) if current.hyper else ()
        current = CurrentSettings(lrs, hyper)
        if self._writes_gradients:
            gradients = dict(zip(gradients, foreach.clone(list(gradients.values())), strict=True))
        narrow = params, slots
        if any([param.dtype.itemsize == 2 for param in params.values()]):
            params, gradients = _widened(params), _widened(gradients)
            slots = {name: self._widened_slot(slot) for name, slot in slots.items()}
        first = {
            name: g for name, g in gradients.items() if bool(slots[name].get(FIRST_STEP, False))
        }
        later = {name: g for name, g in gradients.items() if name not in first}
        with torch.no_grad(), _factors_on_host():
            new = self._run(params, later, slots, current)
            if first:  # torch's SGD ignores dampening in the step that makes a momentum buffer
                self._run(params, first, slots, current, dampening=0)
                private.listops.zero_([slots[name][FIRST_STEP] for name in first])
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

    def _run(
        self,
        params: Tensors,
        gradients: Tensors,
        slots: Slots,
        current: CurrentSettings,
        **changed: Any,
    ) -> Slots:
        """Run the class's `step` on a copy of an optimizer that holds these tensors."""
        optimizer: Any = object.__new__(self._settings.cls)
        vars(optimizer).update(vars(self._settings.template))
        optimizer.param_groups, optimizer.state = [], defaultdict(dict)
        flags = {**self._flags(params, gradients), **changed}
        for group in self._settings.torch_groups(tuple(params), current.hyper):
            settings = group.with_lr(current.lrs)
            present = self._settings.stepped_names(group.names, params, gradients)
            if self._formula is not None:
                settings |= {name: flags[name] for name in flags.keys() & settings.keys()}
                if self._settings.lr_varies[group.lr_index]:
                    self._start([slots[name] for name in present], settings["lr"])
            settings["params"] = [params[name] for name in present]
            optimizer.param_groups.append(settings)
        try:
            for name, gradient in gradients.items():
                params[name].grad = gradient
                slot = slots[name]
                if self._formula is None:
                    slot = with_python_scalars(slot, params[name])
                optimizer.state[params[name]] = slot
            self._step(optimizer)
        except KeyError as error:  # of a class of a user's, whose slots nobody knows
            raise self._layout.foreign(str(error)) from None
        finally:
            for name in gradients:
                params[name].grad = None
        if self._formula is not None:
            return slots
        return {
            name: as_tensors(optimizer.state[param], name) if name in gradients else slots[name]
            for name, param in params.items()
        }

    def _flags(self, params: Tensors, gradients: Tensors) -> dict[str, bool]:
        """Return the flags of torch's default implementation, or those that were named, where they
        are right: a fused kernel is not in half precision on a CPU.
        """
        lists = [TensorList(list(tensors.values())) for tensors in (params, gradients)]
        fits = not self._settings.settings.get("fused") or can_launch(*lists)
        if self._settings.flag_named and fits:
            return {"capturable": False, "differentiable": False}
        return dict.fromkeys(FLAGS, False)

    def _start(self, slots: list[dict[str, Tensor]], lr: Any) -> None:
        """Fill the slots that start as the rate of the first step."""
        key = self._formula.lr_slot if self._formula is not None else ""
        for slot in slots if key else []:
            if slot["step"] == 0:
                slot[key].copy_(filled_like(slot[key], lr))


class _FactorsOnHost(TorchFunctionMode):
    """A mode in which torch's ASGD makes its factors in float32 on the CPU, whatever the default
    dtype and device are.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.as_tensor and not isinstance(args[0], Tensor):
            kwargs = {"dtype": torch.float32, "device": "cpu", **kwargs}
        return func(*args, **kwargs)


def _factors_on_host() -> Any:
    """Return that mode where it is needed: it intercepts every call, which doubles the time for
    small tensors.
    """
    usual = torch.get_default_dtype() is torch.float32
    usual = usual and torch.get_default_device() == torch.device("cpu")
    return contextlib.nullcontext() if usual else _FactorsOnHost()


def _wide_dtype_of(tensor: Tensor) -> torch.dtype:
    number = tensor.is_floating_point() or tensor.is_complex()
    return wide_dtype(tensor.dtype) if number else tensor.dtype


def _widened(tensors: Tensors) -> Tensors:
    dtypes = [_wide_dtype_of(tensor) for tensor in tensors.values()]
    return dict(zip(tensors, foreach.cast(list(tensors.values()), dtypes), strict=True))


def _copied_into(old: dict[str, Tensor], new: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: old[key].copy_(value) if key in old else value for key, value in new.items()}
