"""Settings of an object as text, equal in every process with the same settings."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import numbers
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

_MAX_VALUES = 64  # a tensor with more is compared by dtype and shape only


def describe_setting(setting: Any) -> str:
    """Return what can be compared of `setting` between processes. Numbers, strings, dtypes,
    containers and small tensors on a CPU have their values; functions their qualified name; rules,
    optimizers and functools.partial their fields. Other objects, and tensors on an accelerator,
    whose values would need a sync, have their type only.
    """
    return _text(setting, ())


def _text(value: Any, parents: tuple[int, ...]) -> str:
    if value is None or isinstance(value, (bool, str, bytes, complex, torch.dtype)):
        return repr(value)
    if isinstance(value, numbers.Integral):
        return repr(int(value))
    if isinstance(value, numbers.Real):  # 1 and 1.0 are the same setting
        number = float(value)
        return repr(int(number) if number.is_integer() else number)
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        return f"{value.__module__}.{value.__qualname__}"
    if id(value) in parents:  # it contains itself
        return "..."
    parents = (*parents, id(value))
    if isinstance(value, Mapping):
        items = (f"{_text(k, parents)}: {_text(v, parents)}" for k, v in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, (set, frozenset)):  # the order differs between processes
        return f"{{{', '.join(sorted(_text(item, parents) for item in value))}}}"
    if isinstance(value, (list, tuple)):
        name = type(value).__name__ if hasattr(value, "_fields") else ""
        return f"{name}({', '.join(_text(item, parents) for item in value)})"
    if isinstance(value, functools.partial):
        return _text((value.func, value.args, sorted(value.keywords.items())), parents)
    if isinstance(value, types.MethodType):
        return f"{_text(value.__self__, parents)}.{_text(value.__func__, parents)}"
    return _object(value, parents)


def _tensor(tensor: Tensor) -> str:
    kind = f"{tensor.dtype} {tuple(tensor.shape)}"
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not plain or tensor.device.type != "cpu" or tensor.numel() > _MAX_VALUES:
        return kind
    return f"{kind} {tensor.tolist()}"


def _object(value: Any, parents: tuple[int, ...]) -> str:
    """Return the class and the fields of a rule, an optimizer or another object with settings. If
    it has an attribute `summary`, only that is compared: other fields may hold what one process
    saw.
    """
    name = type(value).__qualname__
    if hasattr(value, "summary"):
        return f"{name}{_text(value.summary, parents)}"
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        fields = {key: getattr(value, key, None) for key in names}
    elif _has_settings(value):
        fields = dict(getattr(value, "__dict__", {}))
    else:
        return name
    settings = (f"{key}={_text(setting, parents)}" for key, setting in fields.items())
    return f"{name}({', '.join(settings)})"


def _has_settings(value: Any) -> bool:
    """Return True if the fields of an object are settings, unlike those of a logger or a lock."""
    methods = [callable(getattr(value, name, None)) for name in ("init", "update", "step")]
    of_a_user = not type(value).__module__.startswith(("torch.", "builtins", "logging"))
    return of_a_user and (any(methods) or callable(value)) and not inspect.ismodule(value)
