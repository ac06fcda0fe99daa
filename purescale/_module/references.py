"""References from a module to lists, helper objects, closures and hooks."""

from __future__ import annotations

import collections
import dis
import functools
import gc
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._torch import private

# Never changed by a forward, and never a reference to the model.
ATOMS = frozenset(
    {
        *(bool, int, float, complex, str, bytes, range, type(None), type(...), types.ModuleType),
        *(types.CodeType, type, torch.dtype, torch.device, torch.Size, torch.fx.Graph),
    }
)
_CONTAINERS: tuple[Any, ...] = (dict, list, tuple, set, frozenset, collections.deque)
_BOUND = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)


class Reference(NamedTuple):
    """A reference from one object of the model to another."""

    path: str  # in the model, as a user would write it
    value: Any  # the object referred to


def references(holder: Any, path: str, seen: set[int]) -> Iterator[Reference]:
    """Yield all references that can be reached from an object, except through those in `seen`, to
    which it adds. A tensor is yielded and not followed.
    """
    waiting = [(holder, path)]
    while waiting:
        holder, path = waiting.pop()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        for reference in _of(holder, path):
            yield reference
            value = reference.value
            if type(value) not in ATOMS and not isinstance(value, (Tensor, type)):
                waiting.append((value, reference.path))


def class_attributes(holders: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, type, str, Any]]:
    """Yield the modules and tensors in class attributes of some objects with paths: the path, the
    class, the attribute and the value.
    """
    seen = set()
    for path, holder in holders:
        for kind in type(holder).__mro__:
            if kind in seen:
                continue
            seen.add(kind)
            for key, value in list(vars(kind).items()):
                inside = isinstance(value, (dict, list, tuple))
                for part in private.pytree.tree_leaves(value) if inside else [value]:
                    if isinstance(part, Tensor) or (part is value and isinstance(part, nn.Module)):
                        yield f"{path}.{key}" if path else key, kind, key, part


def _of(holder: Any, path: str) -> Iterator[Reference]:
    base = next((base for base in _CONTAINERS if isinstance(holder, base)), None)
    if base is dict:  # the methods of the built-in type, as those of a user's may do anything
        for key, value in list(dict.items(holder)):
            yield Reference(f"{path}[{key!r}]", value)
            yield Reference(f"a key of {path}", key)
    elif base is not None:
        for index, value in enumerate(list(base.__iter__(holder))):
            yield Reference(f"{path}[{index}]", value)
    elif isinstance(holder, types.FunctionType):
        for name, value in _captured(holder):
            yield Reference(f"{path} (its {name!r})", value)
    elif isinstance(holder, functools.partial):
        for part in (holder.func, holder.args, holder.keywords):
            yield Reference(path, part)
    elif isinstance(holder, _BOUND):
        yield Reference(f"{path} (its 'self')", holder.__self__)
        if isinstance(holder, types.MethodType):
            yield Reference(path, holder.__func__)
    elif isinstance(holder, BaseException):
        yield Reference(f"{path}.args", holder.args)
    elif isinstance(holder, weakref.ref):
        yield Reference(f"{path} (a weak reference)", holder())
    elif is_array(holder):  # the garbage collector does not know its elements
        for value in holder.ravel().tolist():
            yield Reference(f"{path} (an array)", value)
    elif not hasattr(holder, "__dict__") and not _has_slots(holder):
        # Only the garbage collector knows what an object that is not written in Python holds.
        for value in gc.get_referents(holder):
            yield Reference(f"{path} (a {type(holder).__name__})", value)
    yield from _attributes(holder, path)


def is_array(thing: Any) -> bool:
    """Return True for an array of NumPy, which may not be installed."""
    return (type(thing).__module__, type(thing).__name__) == ("numpy", "ndarray")


def _has_slots(holder: Any) -> bool:
    return any("__slots__" in vars(kind) for kind in type(holder).__mro__)


def _attributes(holder: Any, path: str) -> Iterator[Reference]:
    attributes = getattr(holder, "__dict__", None)
    if isinstance(attributes, dict):
        for key, value in list(attributes.items()):
            yield Reference(f"{path}.{key}", value)
    for key in slots(holder):
        yield Reference(f"{path}.{key}", getattr(holder, key, None))


def slots(holder: Any) -> Iterator[str]:
    """Yield the names of attributes in `__slots__`."""
    for kind in type(holder).__mro__:
        if "__slots__" in vars(kind):
            for key, member in vars(kind).items():
                if isinstance(member, types.MemberDescriptorType):
                    yield key


def _captured(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function uses besides its arguments: closure, defaults, and global modules and
    tensors.
    """
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not filled yet
            continue
    yield "defaults", function.__defaults__
    yield "defaults", function.__kwdefaults__
    for name in _global_names(function.__code__):
        value = function.__globals__.get(name)
        if isinstance(value, (nn.Module, Tensor, types.MethodType, functools.partial)):
            yield name, value


def _global_names(code: types.CodeType) -> set[str]:
    names = {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    inner = (part for part in code.co_consts if isinstance(part, types.CodeType))
    return names.union(*map(_global_names, inner))
