"""References from a module to lists, helper objects, closures and hooks."""

from __future__ import annotations

import collections
import dis
import functools
import gc
import types
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from .._torch import private

_ATOMS = (bool, int, float, complex, str, bytes, type, type(None), types.ModuleType, types.CodeType)
_BOUND = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)


class Reference(NamedTuple):
    """A reference from one object of the model to another."""

    where: str  # as a user would write it
    holder: Any  # the object that refers
    key: Any  # the key or index, if the holder is a dict or list
    value: Any  # the object referred to
    owner: Any = None  # the object whose attributes the holder is, if it is one's `__dict__`


def references(root: Any, where: str = "") -> Iterator[Reference]:
    """Yield all references that can be reached from a module, or from functions attached to one,
    except its registered tensors.
    """
    modules = dict(root.named_modules()) if isinstance(root, nn.Module) else {}
    names = {id(module): name for name, module in modules.items()}
    waiting = [(root, where), *((module, name) for name, module in modules.items())]
    seen = set()
    while waiting:
        holder, where = waiting.pop()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        for reference in _of(holder, names.get(id(holder), where), id(holder) in names):
            yield reference
            if not isinstance(reference.value, (Tensor, *_ATOMS)):
                waiting.append((reference.value, reference.where))


def class_attributes(root: nn.Module) -> Iterator[tuple[str, type, str, Any]]:
    """Yield the modules and tensors in class attributes of all objects that can be reached: the
    path, the class, the attribute and the value.
    """
    holders = [(reference.where, reference.value) for reference in references(root)]
    seen = set()
    for where, holder in (*root.named_modules(), *holders):
        for kind in type(holder).__mro__:
            if kind in seen:
                continue
            seen.add(kind)
            for key, value in list(vars(kind).items()):
                inside = isinstance(value, (dict, list, tuple))
                for part in private.pytree.tree_leaves(value) if inside else [value]:
                    if isinstance(part, Tensor) or (part is value and isinstance(part, nn.Module)):
                        yield f"{where}.{key}" if where else key, kind, key, part


def _of(holder: Any, where: str, registered: bool) -> Iterator[Reference]:
    if isinstance(holder, dict):
        for key, value in list(holder.items()):
            yield Reference(f"{where}[{key!r}]", holder, key, value)
            yield Reference(f"a key of {where}", None, None, key)
    elif isinstance(holder, list):
        for index, value in enumerate(list(holder)):
            yield Reference(f"{where}[{index}]", holder, index, value)
    elif isinstance(holder, (tuple, set, frozenset, collections.deque)):
        for index, value in enumerate(list(holder)):
            yield Reference(f"{where}[{index}]", holder, None, value)
    elif isinstance(holder, types.FunctionType):
        for name, value in _captured(holder):
            yield Reference(f"{where} (its {name!r})", holder, None, value)
    elif isinstance(holder, functools.partial):
        for part in (holder.func, holder.args, holder.keywords):
            yield Reference(where, holder, None, part)
    elif isinstance(holder, _BOUND):
        yield Reference(f"{where} (its 'self')", holder, None, holder.__self__)
        if isinstance(holder, types.MethodType):
            yield Reference(where, holder, None, holder.__func__)
    elif isinstance(holder, BaseException):
        yield Reference(f"{where}.args", holder, None, holder.args)
    elif isinstance(holder, weakref.ref):
        yield Reference(f"{where} (a weak reference)", holder, None, holder())
    elif not hasattr(holder, "__dict__") and not _has_slots(holder):
        # Only the garbage collector knows what an object that is not written in Python holds.
        for value in gc.get_referents(holder):
            yield Reference(f"{where} (a {type(holder).__name__})", holder, None, value)
    yield from _attributes(holder, where, registered)


def _has_slots(holder: Any) -> bool:
    return any("__slots__" in vars(kind) for kind in type(holder).__mro__)


def _attributes(holder: Any, where: str, registered: bool) -> Iterator[Reference]:
    attributes = getattr(holder, "__dict__", None)
    left_out = private.NOT_FOR_FORWARD if registered else ()
    if isinstance(attributes, dict):
        for key, value in list(attributes.items()):
            if key not in left_out:
                name = f"{where}.{key}" if where else str(key)
                yield Reference(name, attributes, key, value, holder)
    for key in slots(holder):
        yield Reference(f"{where}.{key}", holder, None, getattr(holder, key, None))


def slots(holder: Any) -> Iterator[str]:
    """Yield the names of attributes in `__slots__`."""
    for kind in type(holder).__mro__:
        if "__slots__" in vars(kind):
            for key, found in vars(kind).items():
                if isinstance(found, types.MemberDescriptorType):
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
