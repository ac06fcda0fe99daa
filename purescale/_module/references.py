"""References from a module to lists, helper objects, closures and hooks, and those that are refused
because calls would share them.
"""

from __future__ import annotations

import collections
import dis
import functools
import gc
import types
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._torch import private
from .._torch.donation import storage_pointer

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


def references(obj: Any, path: str, seen: set[int]) -> Iterator[Reference]:
    """Yield all references that can be reached from an object, except through those in `seen`, to
    which it adds. A tensor is yielded and not followed.
    """
    waiting = [Reference(path, obj)]
    while waiting:
        path, obj = waiting.pop()
        if id(obj) in seen:
            continue
        seen.add(id(obj))
        for reference in _references_from(obj, path):
            yield reference
            value = reference.value
            if type(value) not in ATOMS and not isinstance(value, (Tensor, type)):
                waiting.append(reference)


def _references_from(obj: Any, path: str) -> Iterator[Reference]:
    """Yield the references of one object."""
    base = next((base for base in _CONTAINERS if isinstance(obj, base)), None)
    if base is dict:  # the methods of the built-in type, as those of a user's may do anything
        for key, value in list(dict.items(obj)):
            yield Reference(f"{path}[{key!r}]", value)
            yield Reference(f"a key of {path}", key)
    elif base is not None:
        for index, value in enumerate(list(base.__iter__(obj))):
            yield Reference(f"{path}[{index}]", value)
    elif isinstance(obj, types.FunctionType):
        for name, value in _captured(obj):
            yield Reference(f"{path} (its {name!r})", value)
    elif isinstance(obj, functools.partial):
        for part in (obj.func, obj.args, obj.keywords):
            yield Reference(path, part)
    elif isinstance(obj, _BOUND):
        yield Reference(f"{path} (its 'self')", obj.__self__)
        if isinstance(obj, types.MethodType):
            yield Reference(path, obj.__func__)
    elif isinstance(obj, BaseException):
        yield Reference(f"{path}.args", obj.args)
    elif isinstance(obj, weakref.ref):
        yield Reference(f"{path} (a weak reference)", obj())
    elif is_array(obj):  # the garbage collector does not know its elements
        for value in obj.ravel().tolist():
            yield Reference(f"{path} (an array)", value)
    elif not hasattr(obj, "__dict__") and not _has_slots(obj):
        # Only the garbage collector knows what an object that is not written in Python holds.
        for value in gc.get_referents(obj):
            yield Reference(f"{path} (a {type(obj).__name__})", value)
    yield from _attributes(obj, path)


def is_array(obj: Any) -> bool:
    """Return True for an array of NumPy, which may not be installed."""
    return (type(obj).__module__, type(obj).__name__) == ("numpy", "ndarray")


def _has_slots(obj: Any) -> bool:
    return any("__slots__" in vars(cls) for cls in type(obj).__mro__)


def _attributes(obj: Any, path: str) -> Iterator[Reference]:
    attributes = getattr(obj, "__dict__", None)
    if isinstance(attributes, dict):
        for key, value in list(attributes.items()):
            yield Reference(f"{path}.{key}", value)
    for key in slots(obj):
        yield Reference(f"{path}.{key}", getattr(obj, key, None))


def slots(obj: Any) -> Iterator[str]:
    """Yield the names of attributes in `__slots__`."""
    for cls in type(obj).__mro__:
        if "__slots__" in vars(cls):
            for key, member in vars(cls).items():
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


# ---- references that are refused -----------------------------------------------------------------


def check_shared(
    shared: list[tuple[str, Any]],
    registered: list[tuple[str, Tensor]],
    modules: dict[str, nn.Module],
) -> None:
    """Refuse a registered tensor or a module of the live model in an object that calls share."""
    live = {id(module): f"module {path or 'itself'}" for path, module in modules.items()}
    live |= {id(tensor): f"tensor {name}" for name, tensor in registered}
    seen: set[int] = set()
    for path, obj in shared:
        for reference in references(obj, path, seen):
            if id(reference.value) in live:
                raise ValueError(
                    f"{reference.path} of the model holds its {live[id(reference.value)]}, "
                    "which `apply` cannot replace there, so it would use the live model and "
                    "not params. Likely cause: a hook or a patched forward that is a closure "
                    "over the model, a compiled method, or an object that is not written in "
                    "Python. Fix: pass the module as an argument, functools.partial(function, "
                    "module), or use a method of it; keep a tensor in a list, a dict or an "
                    "attribute; compile `apply`, not a part; put torch.utils.checkpoint around "
                    "`apply`."
                )


def check_classes(
    objects: list[tuple[str, Any]],
    registered: list[tuple[str, Tensor]],
    modules: dict[str, nn.Module],
) -> None:
    """Refuse a parameter in a class attribute of one of `objects`, which all calls share."""
    attributes = list(_class_attributes(objects))
    if not attributes:
        return
    params = [(name, tensor) for name, tensor in registered if isinstance(tensor, nn.Parameter)]
    trained = {id(param): f"its {name}" for name, param in params}
    trained |= {
        id(module): f"its {path}"
        for path, module in modules.items()
        if path and next(module.parameters(), None) is not None
    }
    by_memory = {storage_pointer(param): f"a view of its {name}" for name, param in params}
    for path, cls, key, value in attributes:
        memory = storage_pointer(value)
        what = trained.get(id(value)) or (by_memory.get(memory) if memory else None)
        if what is None and isinstance(value, nn.Parameter) and value.requires_grad:
            what = "a parameter that is not registered"
        if what is not None:
            raise ValueError(
                f"{path} of the model is an attribute of its class {cls.__name__} and holds "
                f"{what}. A call would read it from the class, so it would follow the live model "
                f"and not params. Fix: register it in `__init__`, `self.{key} = "
                "nn.Parameter(...)`, and remove it from the class."
            )


def _class_attributes(objects: list[tuple[str, Any]]) -> Iterator[tuple[str, type, str, Any]]:
    """Yield the modules and tensors in class attributes of some objects with paths: the path, the
    class, the attribute and the value.
    """
    seen = set()
    for path, obj in objects:
        for cls in type(obj).__mro__:
            if cls in seen:
                continue
            seen.add(cls)
            for key, value in list(vars(cls).items()):
                inside = isinstance(value, (dict, list, tuple))
                for part in private.pytree.tree_leaves(value) if inside else [value]:
                    if isinstance(part, Tensor) or (part is value and isinstance(part, nn.Module)):
                        yield f"{path}.{key}" if path else key, cls, key, part
