"""The slots that a class of torch.optim keeps for each parameter: those before the first step, and
the check of those that a step is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._optim.formulas import FIRST_STEP
from .._optim.opt_state import Slots
from .._optim.settings import CurrentSettings, OptimizerSettings, ParamGroup
from .._torch.tensor_list import TensorList
from .._torch.tracing import traced
from .._tree.leaves import describe

_NO_LR = {"lr": 0.0}  # the names and shapes of slots do not depend on it


class SlotLayout:
    """The slots of one class with these settings, by those of a probe of shape (2, 3). A user's
    class makes its own in its first step, and nobody knows them.
    """

    def __init__(self, settings: OptimizerSettings) -> None:
        self._settings, self._formula = settings, settings.spec.formula
        self._cache_key = object()  # keeps nothing else alive
        self._complete: Any = None  # the names of the last slots that lacked none
        # What a later value of a setting in the state needs is there from the start.
        may_move = {"momentum", "dampening"} & {*settings.in_state}
        self._nonzero: dict[str, Any] = dict.fromkeys(may_move, 0.5)
        probe = torch.zeros(2, 3, dtype=torch.float32, device="cpu")
        probed: dict[str, Tensor] = {}
        if not settings.spec.calls_step:
            for table in (settings.for_all, *settings.by_override):
                own = {**table.values, **self._nonzero, **_NO_LR}
                probed |= self._formula.init_slots(probe, {**settings.for_all.values, **own})
        # Of a slot that is one number its dtype, of one like its parameter None. The factors of
        # Adafactor are neither.
        alike = {key: value for key, value in probed.items() if value.shape in ((), probe.shape)}
        self._dtypes = {key: None if value.ndim else value.dtype for key, value in alike.items()}
        self.keys = set(probed)

    def is_scalar(self, key: str) -> bool:
        """Return True if this slot is one number for each parameter, whatever its shape."""
        return self._dtypes.get(key) is not None

    def new_slots(self, params: Mapping[str, Tensor], current: CurrentSettings) -> Slots:
        """Return the slots of these parameters before their first step."""
        if params:  # torch checks shapes, and needs no memory for it
            shapes = [torch.empty(p.shape, dtype=p.dtype, device="meta") for p in params.values()]
            self._settings.spec.construct(shapes, self._settings.for_all.values)
        slots = {
            name: self._init_slots(params[name], group.settings)
            for group in self._groups(params, current)
            for name in group.names
        }
        return {name: slots[name] for name in params}

    def _init_slots(self, param: Tensor, settings: Mapping[str, Any]) -> dict[str, Tensor]:
        if self._settings.spec.calls_step:
            return {}
        if param.is_complex() and not self._settings.spec.elementwise:
            raise ValueError(
                f"{self._settings.spec.name} was given a complex parameter "
                f"{tuple(param.shape)}; it has no rule for it. Fix: a partition with AdamW for "
                "complex parameters; from_formula(..., elementwise=True) for a formula that is."
            )
        return self._formula.init_slots(param.detach(), settings)

    def _groups(self, params: Mapping[str, Tensor], current: CurrentSettings) -> list[ParamGroup]:
        """Return the groups with the settings from which slots are made."""
        rates = current.map(lambda table: {n: v for n, v in table.items() if n == "lr"})
        rates.for_all.update(self._nonzero)
        return self._settings.torch_groups(tuple(params), rates)

    # ---- the check

    def check(
        self, slots: Slots, params: Mapping[str, Tensor], targets: TensorList | None = None
    ) -> None:
        """Refuse slots that differ from those of `new_slots`, because torch's kernels do not check
        what they read. `targets` lists parameters, then slots, if all are dense and off graph.
        """
        if self._settings.spec.calls_step:
            return

        def match() -> bool:
            for name, key in self._misfits(slots, params):
                self._refuse_misfit(key, slots[name][key], name, params[name])
            return self._check_keys(slots, params)

        in_order = targets is not None and list(slots) == list(params)
        keys = set(map(tuple, slots.values())) if in_order else set()
        if targets is not None and len(keys) == 1:
            targets.cached((self._cache_key, *keys, *params), match)
        else:
            match()

    def _misfits(self, slots: Slots, params: Mapping[str, Tensor]) -> list[tuple[str, str]]:
        """Return the parameter and the key of slots that do not fit. It avoids calls, which a
        compiler traces slowly.
        """
        dtypes = self._dtypes
        rows = [
            (name, key, value, params[name], dtypes[key])
            for name, entry in slots.items()
            for key, value in entry.items()
            if key in dtypes
        ]
        return [
            (name, key)
            for name, key, value, param, scalar_dtype in rows
            if value.is_nested
            or value.layout is not torch.strided
            or value.device != param.device
            or value.dtype is not (scalar_dtype or param.dtype)
            or value.shape != (() if scalar_dtype else param.shape)
        ]

    def _refuse_misfit(self, key: str, value: Tensor, name: str, param: Tensor) -> None:
        dtype = self._dtypes[key]
        expected = f"one number, {dtype} ()" if dtype else describe(param)
        if not self._formula.elementwise:  # it may have other slots in other dimensions than 2
            new = self._formula.init_slots(param.detach(), self._settings.for_all.values)[key]
            fits = value.device == param.device and not value.is_nested
            if fits and _kind(value) == _kind(new):
                return
            expected = describe(new)
        raise ValueError(
            f"opt_state: {key} of {name} is {describe(value)} on {value.device}; expected "
            f"{expected} on {param.device}. Likely cause: the state of another model, or stacked "
            "states outside of torch.vmap. Fix: `opt_state = optimizer.init(params)`, or "
            "`torch.vmap(optimizer.step)(params, grads, opt_state)`."
        )

    def _check_keys(self, slots: Slots, params: Mapping[str, Tensor]) -> bool:
        """Refuse slots that lack one of those of `new_slots` with the settings of their group.
        Return True.
        """
        if traced():  # where a step that raises later has changed nothing
            return True
        names_of_slots = tuple((name, params[name].ndim, *entry) for name, entry in slots.items())
        if names_of_slots == self._complete:
            return True
        for group in self._groups(params, self._settings.none_current):
            needed: dict[int, list[str]] = {}
            for name in group.names:
                ndim = params[name].ndim
                if ndim not in needed:
                    like = torch.empty([1] * ndim, device="cpu")  # "meta" imports sympy
                    needed[ndim] = list(
                        self._formula.init_slots(like, {**group.settings, **_NO_LR})
                    )
                for key in needed[ndim]:
                    if key not in slots[name] and key != FIRST_STEP:  # it never had dampening
                        raise self.foreign_error(key)
        self._complete = names_of_slots
        return True

    def foreign_error(self, missing: str) -> ValueError:
        """Return the error of slots without this one."""
        return ValueError(
            f"opt_state has no {missing} that {self._settings.spec.name} keeps. Likely cause: "
            "the state of another class or of other settings. Fix: `opt_state = "
            "optimizer.init(params)`."
        )


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.layout, tensor.dtype, tensor.shape
