"""The spec of an optimizer: the class of torch.optim or the formula that settings are given to."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._optim.formulas import formula_of
from .._torch import private

_ANY_LR = 1e-3  # for torch to check in place of a schedule or a tensor


class OptimizerSpec(NamedTuple):
    """The class of torch.optim or the formula that settings are given to."""

    name: str
    made_by: str  # the public function that makes it
    formula: Any  # a `Formula`; None for a user's class, whose `step` is called
    cls: Any  # the class of torch; None of `from_formula`
    setting_names: Sequence[str] | None  # that it takes; None if they were taken before
    default_lr: Any
    # an optimizer over these tensors with these settings, whose `defaults` are all settings
    construct: Callable[[list[Tensor], Mapping[str, Any]], Any]

    @property
    def calls_step(self) -> bool:
        """True if the `step` of a user's class runs, on copies."""
        return self.formula is None

    @property
    def elementwise(self) -> bool | None:
        """True if elements are stepped independently; None if nobody knows."""
        return None if self.formula is None else self.formula.elementwise


def spec_of_class(cls: Any) -> OptimizerSpec:
    """Return the spec of a class of torch.optim, or refuse what has no pure step."""
    _check_class(cls)
    parameters = inspect.signature(cls).parameters
    names = [name for name in parameters if name != "params"]
    default = parameters["lr"].default if "lr" in parameters else inspect.Parameter.empty

    def construct(probes: list[Tensor], settings: Mapping[str, Any]) -> Any:
        arguments = {name: value for name, value in settings.items() if name in names}
        if isinstance(arguments["lr"], Tensor) or callable(arguments["lr"]):
            arguments["lr"] = _ANY_LR
        with torch.device("cpu"):  # torch keeps step counts there, whatever the default device is
            return private.without_compiler(cls)(probes, **arguments)

    default_lr = None if default is inspect.Parameter.empty else default
    formula = formula_of(cls)
    return OptimizerSpec(cls.__name__, "from_torch", formula, cls, names, default_lr, construct)


def spec_of_live(template: torch.optim.Optimizer) -> OptimizerSpec:
    """Return the spec of a live optimizer, which `template` is without its parameters."""
    spec = spec_of_class(type(template))
    return spec._replace(setting_names=None, construct=lambda probes, settings: template)


def _check_class(cls: Any) -> None:
    if isinstance(cls, torch.optim.Optimizer):
        raise TypeError(
            f"from_torch takes a class of torch.optim, got an instance of {type(cls).__name__}. "
            "Fix: `optimizer, opt_state = from_torch_optimizer(torch_optimizer, model)`, with its "
            f"groups and its state; for a new one `from_torch({type(cls).__name__}, ...)`."
        )
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise TypeError(
            f"from_torch takes a class of torch.optim, got {cls!r}. Fix: "
            "from_torch(torch.optim.AdamW, lr=1e-3)."
        )
    if issubclass(cls, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS evaluates the loss again in its step, so it is not a function of gradients. "
            "Fix: torch.optim.AdamW, or your own loop around LBFGS."
        )
    if issubclass(cls, torch.optim.SparseAdam):
        raise ValueError(
            "SparseAdam takes sparse gradients only and counts its steps in Python. Fix: SGD or "
            "Adagrad, which take sparse gradients here."
        )
