"""The caller's `torch.autocast`, which applies to the loss and to nothing else in a step."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch

from .._torch import private

P = ParamSpec("P")
T = TypeVar("T")


_NAMES = ["cpu", "cuda", "hpu", "ipu", "maia", "mps", "mtia", "privateuseone", "xla", "xpu"]
_DEVICES = tuple(filter(torch.amp.is_autocast_available, _NAMES))


# The autocast dtype of a device type, and whether casts of weights are cached.
_Autocast: TypeAlias = tuple[str, torch.dtype, bool]


def active_autocast() -> list[_Autocast]:
    """Return what autocast is active, of every device type."""
    if not (torch.compiler.is_dynamo_compiling() or private.any_autocast()):
        return []
    # A device of another library has a name of its own, which `torch.autocast` wants.
    return [
        (
            torch.device(device).type,
            torch.get_autocast_dtype(device),
            torch.is_autocast_cache_enabled(),
        )
        for device in _DEVICES
        if torch.is_autocast_enabled(device)
    ]


def outside_autocast(*called: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that makes a function compute in the dtypes of its arguments, whatever
    autocast is active. The arguments named in `called` are functions that still run under it.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        parameters = list(inspect.signature(function).parameters)
        places = {parameters.index(name) for name in called}

        @functools.wraps(function)
        def outside(*args: P.args, **kwargs: P.kwargs) -> T:
            active = active_autocast()
            if not active:
                return function(*args, **kwargs)
            positional = [
                _under(active, arg) if place in places else arg for place, arg in enumerate(args)
            ]
            named = {
                name: _under(active, arg) if name in called else arg for name, arg in kwargs.items()
            }
            returned: T = _call(active, False, function, positional, named)
            return returned

        return outside

    return decorate


def _under(active: list[_Autocast], function: Any) -> Any:
    if not callable(function):
        return function

    @functools.wraps(function, updated=())
    def called(*args: Any, **kwargs: Any) -> Any:
        return _call(active, True, function, args, kwargs)

    return called


def _call(active: list[_Autocast], enabled: bool, function: Any, args: Any, kwargs: Any) -> Any:
    # Recursion over device types, because an ExitStack cannot be traced everywhere.
    if not active:
        return function(*args, **kwargs)
    (device, dtype, cached), *others = active
    with torch.autocast(device, dtype, enabled=enabled, cache_enabled=cached):
        return _call(others, enabled, function, args, kwargs)
