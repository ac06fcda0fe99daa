"""Host values checked: settings, weights, counts, entries of state dicts; and flags as tensors."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch.tracing import traced


def as_float(value: Any) -> float | None:
    """Return a real number of any type as a float; None for anything else, such as a bool or a
    tensor.
    """
    if type(value) is float:
        return value
    number = _plain(value)
    is_real = isinstance(number, numbers.Real) and not isinstance(number, bool)
    return float(number) if is_real else None


def as_floats(values: Sequence[Any]) -> list[float] | None:
    """Return real numbers as floats; None if one is a tensor, and in a trace, in which a number may
    be symbolic.
    """
    if traced() or any([isinstance(value, Tensor) for value in values]):
        return None
    return [as_float(value) or 0.0 for value in values]


def checked_real(name: str, value: Any) -> float:
    """Return `value` as a float."""
    number = as_float(value)
    if number is None:
        raise _number_error(name, value, float)
    return number


def is_whole(value: Any) -> bool:
    """Return True for a whole number of any type, except bool."""
    if type(value) is int:
        return True
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def checked_whole(name: str, value: Any, least: int = 0, most: int | None = 2**31 - 1) -> int:
    """Return `value` as an int from `least` to `most`."""
    plain = _plain(value)
    if not is_whole(plain):
        raise _number_error(name, value, int)
    number = int(plain)
    if number < least or (most is not None and number > most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        nearest = least if number < least else most
        raise ValueError(
            f"{name} must be {bounds}, got {short_repr(value)}. Fix: the nearest that fits, "
            f"{nearest}."
        )
    return number


def checked_positive(name: str, value: Any) -> float:
    """Return `value` as a float, if it is positive and finite in float32."""
    number = checked_real(name, value)
    if not 2.0**-149 <= number <= torch.finfo(torch.float32).max:  # nor NaN
        raise ValueError(
            f"{name} must be positive and finite in float32, got {short_repr(value)}. Fix: a "
            f"power of two, such as {name}=2.0."
        )
    return number


def checked_power_of_two(name: str, value: Any) -> float:
    """Return `value` as a float, if it is a power of two in the range of float32, which keeps all
    bits of a mantissa.
    """
    number = checked_real(name, value)
    if not 2.0**-149 <= number <= 2.0**127 or math.frexp(number)[0] != 0.5:
        usual = {"growth_factor": 2.0, "backoff_factor": 0.5}.get(name, 2.0**16)
        raise ValueError(
            f"{name} must be a power of two between 2**-149 and 2**127, got {short_repr(value)}: "
            f"any other factor rounds every gradient. Fix: {name}={usual!r}."
        )
    return number


def normalize_fields(rule: Any, check: Callable[[str, Any], Any], *names: str) -> None:
    """Replace fields of a frozen dataclass by the result of `check`, so that equal settings of
    different types make equal objects.
    """
    for name in names:
        object.__setattr__(rule, name, check(name, getattr(rule, name)))


def checked_bound(name: str, value: Any) -> float | Tensor:
    """Return `value` as a float above 0, or a 0-d tensor, which is not read."""
    if type(value) is float and value > 0:
        return value
    if isinstance(value, Tensor):
        if value.ndim:
            raise ValueError(
                f"{name} must be a number or a 0-d tensor, got shape {tuple(value.shape)}. Fix: "
                f"`{name}=1.0`, one bound for all gradients."
            )
        if value.is_complex() or value.dtype is torch.bool:
            raise TypeError(
                f"{name} must be a real number, got a tensor of {value.dtype}. Fix: "
                "`torch.tensor(1.0)`."
            )
        return value
    number = checked_real(name, value)
    if not number > 0:
        raise ValueError(
            f"{name} must be above 0, got {short_repr(value)}. Fix: None to leave this clipping "
            "out."
        )
    return number


def _plain(value: Any) -> Any:
    """Return 0-d arrays of jax and numpy as Python numbers."""
    if type(value) in (float, int) or isinstance(value, Tensor):
        return value
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def _number_error(name: str, value: Any, kind: type[int] | type[float]) -> TypeError:
    what = "a number" if kind is float else "a whole number"
    if isinstance(value, Tensor):
        return TypeError(
            f"{name} is a tensor of shape {tuple(value.shape)}, {value.dtype}; expected {what}. "
            "Likely cause: a dict whose numbers were turned into tensors, or that comes from "
            f"another library. Fix: `{name}.item()`."
        )
    return TypeError(
        f"{name} must be {what}, got {short_repr(value)} ({type(value).__name__}). Fix: an "
        f"{'int' if kind is int else 'int or a float'}, such as {kind(1)!r}."
    )


def protocol_violation(value: Any, *methods: str) -> str:
    """Return a description of `value` if it is a class or lacks one of these methods, else ""."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    will_do = all([callable(getattr(value, name, None)) for name in methods])
    return "" if will_do else type(value).__name__


def short_repr(value: Any) -> str:
    """Return `repr(value)`, shortened for an error message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:40]}... ({len(text)} characters)"


# ---- flags and counts ----------------------------------------------------------------------------


def as_flag(found_inf: Tensor | bool, like: Tensor | None = None) -> Tensor:
    """Return `found_inf` as a 0-d bool tensor; a Python bool is put on the device of `like`."""
    if isinstance(found_inf, Tensor):
        if found_inf.ndim != 0:
            raise ValueError(
                f"found_inf has shape {tuple(found_inf.shape)}; one flag decides for everything, "
                "so it must be 0-d. Fix: `found_inf.any()`; for stacked states, call this under "
                "`torch.vmap`."
            )
        return found_inf if found_inf.dtype is torch.bool else found_inf != 0
    if isinstance(found_inf, bool):
        # Not `torch.tensor`, whose copy to a device the host waits for.
        return torch.full((), found_inf, device=None if like is None else like.device)
    raise TypeError(
        f"found_inf must be a 0-d bool tensor (True = bad), got {found_inf!r}. Fix: "
        "`torch.tensor(found_inf)`."
    )


def increment(count: Tensor, happened: Tensor | bool) -> Tensor:
    """Return `count + happened`, which stays near the largest number of its dtype: a counter that
    wraps around would turn a decision.
    """
    return count.clamp(max=torch.iinfo(count.dtype).max - 1) + happened
