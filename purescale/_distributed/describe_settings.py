"""What an object was made with, as text: the same in every process with the same settings."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import numbers
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

_WHOLE = 64  # values: a tensor of more is told by dtype and shape


def described(setting: Any) -> str:
    """All that can be compared of `setting` over processes: numbers, strings, dtypes, containers,
    small tensors on a CPU by value; functions by their code and what it refers to; rules and
    optimizers by their fields. Of any other object, and of an accelerator's tensor, which would
    have to be waited for, the kind.
    """
    return _told(setting, ())


def _told(value: Any, above: tuple[int, ...]) -> str:
    if value is None or isinstance(value, (bool, str, bytes, complex, torch.dtype)):
        return repr(value)
    if isinstance(value, numbers.Real):  # 1 and 1.0 are one setting
        return repr(float(value))
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if id(value) in above:  # it holds itself
        return "..."
    above = (*above, id(value))
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_told(k, above)}: {_told(v, above)}' for k, v in value.items())}}}"
    if isinstance(value, (set, frozenset)):  # each process has an order of its own
        return f"{{{', '.join(sorted(_told(item, above) for item in value))}}}"
    if isinstance(value, (list, tuple)):
        name = type(value).__name__ if hasattr(value, "_fields") else ""
        return f"{name}({', '.join(_told(item, above) for item in value)})"
    if isinstance(value, functools.partial):
        return _told((value.func, value.args, sorted(value.keywords.items())), above)
    if isinstance(value, types.MethodType):
        return f"{_told(value.__self__, above)}.{_told(value.__func__, above)}"
    if isinstance(value, types.FunctionType):
        return _function(value, above)
    return _object(value, above)


def _tensor(tensor: Tensor) -> str:
    kind = f"{tensor.dtype} {tuple(tensor.shape)}"
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not plain or tensor.device.type != "cpu" or tensor.numel() > _WHOLE:
        return kind
    return f"{kind} {tensor.tolist()}"


def _function(function: Any, above: tuple[int, ...]) -> str:
    """By name and a digest of what it computes with: `schedule` of 1e-3 is not that of 1e-2."""
    name = f"{function.__module__}.{function.__qualname__}"
    wrapped = getattr(function, "__wrapped__", None)
    if str(function.__globals__.get("__name__")).startswith("torch."):  # as of torch.compile
        return name if wrapped is None else _told(wrapped, above)
    parts = [
        *_code(function.__code__, function.__globals__),
        *(_told(value, above) for value in function.__defaults__ or ()),
        _told(sorted((function.__kwdefaults__ or {}).items()), above),
    ]
    for cell in function.__closure__ or ():
        try:
            parts.append(_told(cell.cell_contents, above))
        except ValueError:  # nothing stands in it yet
            parts.append("nothing")
    digest = hashlib.blake2b("\n".join(parts).encode(), digest_size=4).hexdigest()
    return f"{name}#{digest}"


def _code(code: types.CodeType, names: Mapping[str, Any]) -> list[str]:
    """What is run, its constants, and the global numbers and strings that it refers to."""
    parts = [code.co_code.hex(), repr(code.co_names)]
    for constant in code.co_consts:
        nested = isinstance(constant, types.CodeType)
        parts += _code(constant, names) if nested else [_told(constant, ())]
    plain = (bool, str, numbers.Real, Tensor)
    parts += [_told(names[n], ()) for n in code.co_names if isinstance(names.get(n), plain)]
    return parts


def _object(value: Any, above: tuple[int, ...]) -> str:
    """A rule, an optimizer, a schedule that is an object: its class and its fields. What it was
    told where it says so, since other fields may remember what one process has seen.
    """
    name = type(value).__qualname__
    if hasattr(value, "told"):
        return f"{name}{_told(value.told, above)}"
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        fields = {key: getattr(value, key, None) for key in names}
    elif _has_settings(value):
        fields = dict(getattr(value, "__dict__", {}))
    else:
        return name
    return f"{name}({', '.join(f'{key}={_told(v, above)}' for key, v in fields.items())})"


def _has_settings(value: Any) -> bool:
    """Whether the fields of an object are looked into: not those of a logger, a module, a lock."""
    known = any(callable(getattr(value, name, None)) for name in ("init", "update", "step"))
    own = not type(value).__module__.startswith(("torch.", "builtins", "logging"))
    return own and (known or callable(value)) and not inspect.ismodule(value)
