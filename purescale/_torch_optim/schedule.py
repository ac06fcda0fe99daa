"""Schedules: functions of a count of steps that stand for a setting."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from .._torch import private
from .._torch.reads import NoReads, ReadError
from .._torch.tracing import host_can_read, traced
from .._torch_optim.in_state import is_float_scalar
from .._tree.leaves import describe
from .._tree.scalars import as_float, short_repr

Schedule = Callable[[Tensor], "Tensor | float"]
ScheduleBy = Literal["applied", "iteration"]
PARAMETERS_GIVEN = (
    "Likely cause: parameters, which torch's classes take and from_torch does not. Fix: "
    "`optimizer = from_torch(torch.optim.AdamW, lr=1e-3)`, then `optimizer.init(params)`."
)

_ROUNDING = 1e-7  # of a float32 rate below 1 that should be 0


def check_rate(rate: float, what: str) -> None:
    """Refuse a rate that torch's classes refuse as a number: a negative one, or NaN."""
    if not rate >= -_ROUNDING:
        raise ValueError(
            f"{what} is {rate:g}; torch's optimizers refuse negative rates and NaN. Likely cause: "
            "a schedule that runs on below 0 after its end. Fix: `.clamp(min=0)`, eta_min or "
            "end_factor; maximize=True to go up the gradient."
        )


# `take` would be shorter, but has no batching rule for vmap.
_LOOKED_UP = "rates.gather(0, applied.clamp(max=len(rates) - 1).view(1))[0]"


def is_scheduled(value: Any) -> bool:
    """Return True if a setting, or a number of a tuple of them, is a schedule."""
    return any(map(callable, value)) if isinstance(value, (tuple, list)) else callable(value)


def first_rate(where: str, lr: Any) -> Any:
    """Return the first rate that a step is given. Refuse anything but a learning rate, and a
    schedule that reads the count, which would fail later in a traced step.
    """
    if isinstance(lr, (bool, type)) or not (callable(lr) or isinstance(lr, (Tensor, numbers.Real))):
        got = short_repr(lr)
        fix = (
            "Fix: lr=1e-3, or lr=lambda applied: 1e-3 * 0.95**applied; of a scheduler of torch "
            "lr=schedule_from_torch(lambda opt: LambdaLR(opt, f), lr, steps)."
        )
        if isinstance(lr, Iterable) and not isinstance(lr, str):
            got, fix = type(lr).__name__, PARAMETERS_GIVEN
        raise TypeError(
            f"{where}: lr must be a number, a 0-d tensor or a function of the step count, got "
            f"{got}. {fix}"
        )
    return _first_number(where, "lr", lr) if callable(lr) and not traced() else lr


def first_numbers(name: str, value: Any) -> Any:
    """Return the Python numbers of a setting before the first step."""
    if isinstance(value, (tuple, list)):
        return tuple([first_numbers(name, one) for one in value])
    if not callable(value):
        return value
    return float(private.outside_of_modes(lambda: _first_number("from_torch", name, value)))


def _first_number(where: str, name: str, schedule: Schedule) -> Any:
    """Return the number of a schedule at 0. Refuse one that reads the count."""
    try:
        with NoReads():
            number = schedule(torch.zeros((), dtype=torch.int64, device="cpu"))
    except ReadError:
        raise TypeError(
            f"{where}: the schedule {schedule!r} reads the value of the step count. Likely cause: "
            "math.cos, an `if`, `int(applied)` or a list indexed by the count. Fix: torch.cos, "
            f"torch.where(applied < 100, a, b); for a table, {_LOOKED_UP}; for a scheduler of "
            "torch, schedule_from_torch(make, lr, steps)."
        ) from None
    check_scheduled(name, number)
    return number


def check_scheduled(name: str, number: Any) -> None:
    """Refuse what a schedule returned that is not a number, or not a rate."""
    value = number.detach() if is_float_scalar(number) else as_float(number)
    if value is not None or isinstance(number, torch.SymFloat):
        if name != "lr" or value is None:
            return
        if isinstance(value, float) or host_can_read([value]):
            check_rate(float(value), "the rate that the schedule lr returned")
        return
    what = f"a tensor {describe(number)}" if isinstance(number, Tensor) else repr(number)
    raise TypeError(
        f"the schedule {name} returned {what}; expected a number or a floating 0-d tensor. Likely "
        "cause: a missing `return`, or a table of rates. Fix: `lambda applied: 1e-3 * "
        f"0.95**applied`; for a table, `{_LOOKED_UP}`."
    )
