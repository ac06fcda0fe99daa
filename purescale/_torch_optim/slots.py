"""The slots that a class keeps for each parameter: in a state, as lists beside the parameters, and
what they must be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._optim.opt_state import OptState
from .._optim.param_structure import ParamStructure, foreign_parameters_error
from .._torch.tracing import traced
from .._torch_optim.formulas import LeafSlots
from .._torch_optim.param_groups import ParamGroup, build_param_groups
from .._torch_optim.settings import OptimizerConfig, StepSettings
from .._tree import pytree
from .._tree.leaves import describe
from .._tree.matching import same_metadata

# By the name of a slot: a list like the parameters, with `()` for one that lacks the slot.
SlotLists = dict[str, list[Any]]

# The list of counts among the slot lists of a step, by torch's name.
COUNT = "step"
# A list of holes, by which a state without slots knows its parameters.
NO_SLOTS = "none"


# ---- as lists ------------------------------------------------------------------------------------


def slot_lists_of(opt_state: OptState, param_structure: ParamStructure) -> SlotLists:
    """Return the slots of a state, then its counts, as slot lists. Refuse a state for others than
    these parameters.
    """
    trees = opt_state.slots
    if has_counts(opt_state):
        trees = {**trees, COUNT: opt_state.counts}
    try:
        return {key: param_structure.flatten_up_to(tree) for key, tree in trees.items()}
    except ValueError:
        raise foreign_parameters_error(param_names(opt_state), param_structure.names) from None


def with_slot_lists(
    opt_state: OptState, slot_lists: SlotLists, param_structure: ParamStructure
) -> OptState:
    """Return the state with these slot lists, the inverse of `slot_lists_of`."""
    old = {**opt_state.slots, COUNT: opt_state.counts}
    slots = {
        key: param_structure.unflatten(slot_list, old[key]) for key, slot_list in slot_lists.items()
    }
    counts = slots.pop(COUNT, ())
    return opt_state._replace(slots=slots, counts=counts)


def has_counts(opt_state: OptState) -> bool:
    """Return True if a state counts the steps of each parameter, which may be those of a tuple."""
    return not isinstance(opt_state.counts, tuple) or len(opt_state.counts) > 0


def param_names(opt_state: OptState) -> list[str]:
    """Return the dotted names of the parameters of a state with slots like these."""
    return pytree.dotted_names(next(iter(opt_state.slots.values())), holes=True)


# ---- what they must be ---------------------------------------------------------------------------

_NO_LR = {"lr": 0.0}  # the names and shapes of slots do not depend on it


class SlotSpec:
    """The slots of a formula with these settings, by those of a probe of shape (2, 3)."""

    def __init__(self, config: OptimizerConfig) -> None:
        self._config, self._formula = config, config.spec.formula
        probe = torch.zeros(2, 3, dtype=torch.float32, device="cpu")
        probed: dict[str, Tensor] = {}
        for settings in config.settings_for_slots():
            probed |= self._formula.init_slots(probe, {**settings, **_NO_LR})
        # The dtype of a slot that is one number; None for one of the shape of its parameter. The
        # factors of Adafactor are neither, and are left out.
        alike = {key: value for key, value in probed.items() if value.shape in ((), probe.shape)}
        self._dtypes = {key: None if value.ndim else value.dtype for key, value in alike.items()}
        self._dtypes[COUNT] = torch.float32

    def is_scalar(self, key: str) -> bool:
        """Return True if this slot is one number for each parameter, whatever its shape."""
        return self._dtypes.get(key) is not None

    def init_slots(
        self, params: Mapping[str, Tensor], step_settings: StepSettings
    ) -> dict[str, LeafSlots]:
        """Return the slots of each parameter before its first step."""
        slots = {
            name: self._slots_of(params[name], group.settings)
            for group in self._groups(params, step_settings)
            for name in group.names
        }
        return {name: slots[name] for name in params}

    def _slots_of(self, param: Tensor, settings: Mapping[str, Any]) -> dict[str, Tensor]:
        if param.is_complex() and not self._config.spec.elementwise:
            raise ValueError(
                f"{self._config.spec.name} was given a complex parameter "
                f"{tuple(param.shape)}; it has no rule for it. Fix: a partition with AdamW for "
                "complex parameters; from_formula(..., elementwise=True) for a formula that is."
            )
        return self._formula.init_slots(param.detach(), settings)

    def _groups(
        self, params: Mapping[str, Tensor], step_settings: StepSettings
    ) -> list[ParamGroup]:
        """Return the groups with the settings from which slots are made."""
        rates = [{n: v for n, v in each.items() if n == "lr"} for each in step_settings]
        rates[0] |= self._config.nonzero_for_slots
        return build_param_groups(self._config, tuple(params), rates)

    # ---- the check

    def check_slots(self, slot_lists: SlotLists, params: Mapping[str, Tensor]) -> None:
        """Refuse slot lists that differ from those of `init_slots`, because torch's kernels do not
        check what they read.
        """
        # A compiler traces calls slowly.
        misfits = [
            (key, value, name, param)
            for key, slot_list in slot_lists.items()
            if key in self._dtypes
            for (name, param), value in zip(params.items(), slot_list, strict=True)
            if isinstance(value, Tensor)
            and (
                value.is_nested
                or value.layout is not torch.strided
                or value.device != param.device
                or value.dtype is not (self._dtypes[key] or param.dtype)
                or value.shape != (() if self._dtypes[key] else param.shape)
            )
        ]
        for misfit in misfits:
            self._refuse_misfit(*misfit)
        if not traced():  # there a missing slot raises in the formula, before anything is written
            self._check_keys(slot_lists, params)

    def _refuse_misfit(self, key: str, value: Tensor, name: str, param: Tensor) -> None:
        dtype = self._dtypes[key]
        expected = f"one number, {dtype} ()" if dtype else describe(param)
        if key != COUNT and not self._formula.elementwise:
            # It may have other slots in other dimensions than 2.
            new = self._formula.init_slots(param.detach(), self._config.for_all.values)[key]
            plain = not value.is_nested and value.layout is new.layout
            if plain and same_metadata(value, new):
                return
            expected = describe(new)
        raise ValueError(
            f"opt_state: {key} of {name} is {describe(value)} on {value.device}; expected "
            f"{expected} on {param.device}. Likely cause: the state of another model, or stacked "
            "states outside of torch.vmap. Fix: `opt_state = optimizer.init(params)`, or "
            "`torch.vmap(optimizer.step)(params, grads, opt_state)`."
        )

    def _check_keys(self, slot_lists: SlotLists, params: Mapping[str, Tensor]) -> None:
        """Refuse slot lists that lack one of `init_slots` with the settings of their group."""
        dims = [param.ndim for param in params.values()]
        for group in self._groups(params, self._config.no_step_settings):
            needed: dict[int, list[str]] = {}
            for index in group.indices:
                ndim = dims[index]
                if ndim not in needed:
                    like = torch.empty([1] * ndim, device="cpu")  # "meta" imports sympy
                    needed[ndim] = list(
                        self._formula.init_slots(like, {**group.settings, **_NO_LR})
                    )
                for key in needed[ndim]:
                    if key not in slot_lists or not isinstance(slot_lists[key][index], Tensor):
                        raise ValueError(
                            f"opt_state has no {key} that {self._config.spec.name} keeps. Likely "
                            "cause: the state of another class or of other settings. Fix: "
                            "`opt_state = optimizer.init(params)`."
                        )


# ---- Python numbers as tensors -------------------------------------------------------------------

_NUMBER_DTYPES = (torch.int64, torch.bool)


def with_tensor_scalars(leaf_slots: Mapping[str, Any], name: str) -> dict[str, Tensor]:
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
        if not isinstance(tensors[key], Tensor) or was_python_scalar(value):
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
    """Return the slots of a parameter with the Python numbers of which `with_tensor_scalars` made
    tensors of these dtypes. The moments of a 0-d parameter stay.
    """
    return {
        key: value.item()
        if was_python_scalar(value, dtypes) and not (param.ndim == 0 and value.dtype is param.dtype)
        else value
        for key, value in leaf_slots.items()
    }


def was_python_scalar(value: Any, dtypes: Sequence[torch.dtype] = _NUMBER_DTYPES) -> bool:
    """Return True for a 0-d tensor of these dtypes on the CPU, which stands for a Python number."""
    is_scalar = isinstance(value, Tensor) and value.ndim == 0 and value.is_cpu
    return is_scalar and value.dtype in dtypes
