"""The plan of a call of a model: the record of its objects, and how each of them is made."""

from __future__ import annotations

import dataclasses
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch import private

STORES = ("_parameters", "_buffers", "_modules")

# Where a call finds an object: the name of one of its tensors, or the number of an object that it
# makes. None: all calls share the object itself.
Place = str | int | None


class Part(NamedTuple):
    """A part of an object that a call replaces."""

    place: str | int


class Filled(NamedTuple):
    """An object that is made empty and filled element by element: a container of a user's class,
    one of which a call replaces keys, an object with `__slots__`.
    """

    kind: Any
    base: Any  # the built-in type that lays out its memory
    arguments: tuple[Any, ...]  # of `base.__init__`
    attributes: dict[str, Any]
    elements: list[tuple[Any, ...]]  # (key, value) of a dict, (value,) of others
    example: Any  # stands for one without parts of the call under torch.compile, or None


class Immutable(NamedTuple):
    """An object that is made once its parts are, as `build(pattern, parts)`."""

    build: Callable[[Any, list[Any]], Any]
    pattern: Any
    parts: list[Any]


# A part of an object, by numbers and names alone: the number of its holder, the key or attribute
# there, and the name of the tensor or the number of the other object.
TensorLink = tuple[int, Any, str]
PartLink = tuple[int, Any, int]
# A dict of parameters, buffers or modules: its number, that of its module, its attribute there.
StoreLink = tuple[int, int, str]


@dataclasses.dataclass(frozen=True)
class Links:
    """The places of parts in other objects."""

    tensors: tuple[TensorLink, ...]
    parts: tuple[PartLink, ...]
    modules: tuple[int, ...]
    stores: tuple[StoreLink, ...]
    buffers: tuple[TensorLink, ...]  # those of `tensors` that are registered buffers
    registers: tuple[tuple[int, int], ...]  # modules with torch's own `register_buffer`, `_buffers`
    paths: tuple[str, ...]  # of `tensors`, in the model


class Plan(NamedTuple):
    """The objects that a call makes, in this order: the number of an object is its position in
    `kinds`, then in `containers`, `tensors`, `filled`, `without_tensors`,
    `with_tensors`.
    """

    size: int  # the number of all
    kinds: list[type]  # of objects
    attributes: list[dict[str, Any]]  # of these
    containers: list[Any]
    tensors: list[Tensor]  # neither parameters nor buffers: each call has copies
    tensor_paths: list[str]  # of these, in the model
    filled: list[Filled]
    without_tensors: list[Immutable]  # of the call; they are made before hooks run, which hold them
    with_tensors: list[Immutable]
    # Empty containers of torch in a module, such as its dicts of hooks, are shared by all calls, as
    # hardly any forward fills one: the containers, and the number and attribute of each. Once one
    # was filled, each call makes all of them: the number, the attribute, the class of each.
    empty: list[Any]
    owners: list[tuple[int, str]]
    fresh: list[tuple[int, str, type]]


# ---- objects that are made one by one ------------------------------------------------------------


def resolved(value: Any, things: list[Any], tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, Part):
        return value
    return tensors[value.place] if isinstance(value.place, str) else things[value.place]


def built(record: Immutable, things: list[Any], tensors: dict[str, Tensor]) -> Any:
    return record.build(record.pattern, [resolved(part, things, tensors) for part in record.parts])


def empty(record: Filled) -> Any:
    if record.example is not None and torch.compiler.is_dynamo_compiling():
        return record.example
    if record.base is object:
        return object.__new__(record.kind)
    thing = record.base.__new__(record.kind)
    if record.arguments:
        record.base.__init__(thing, *record.arguments)
    return thing


def fill(thing: Any, record: Filled, things: list[Any], tensors: dict[str, Tensor]) -> None:
    """Set the elements and attributes of `thing`, by methods of the built-in types, as those of a
    user's class may do anything.
    """
    if thing is record.example:
        return
    for key, value in record.attributes.items():
        object.__setattr__(thing, key, resolved(value, things, tensors))
    for element in record.elements:
        parts = [resolved(part, things, tensors) for part in element]
        if issubclass(record.base, dict):
            record.base.__setitem__(thing, *parts)
        elif record.base is set:
            set.add(thing, *parts)
        elif record.base is list and record.kind.append is list.append:
            thing.append(*parts)  # torch.compile does not follow list.append
        else:
            record.base.append(thing, *parts)


# ---- the `build` of immutable objects ------------------------------------------------------------


def new_tuple(kind: type, parts: list[Any]) -> Any:
    return tuple.__new__(kind, parts)


def new_frozenset(kind: type, parts: list[Any]) -> Any:
    return frozenset.__new__(kind, parts)


def new_partial(keywords: list[str], parts: list[Any]) -> Any:
    count = len(parts) - len(keywords)
    function, *args = parts[:count]
    return functools.partial(function, *args, **dict(zip(keywords, parts[count:], strict=True)))


def new_method(function: Any, parts: list[Any]) -> Any:
    return types.MethodType(function, parts[0])


def new_method_of_class(name: str, parts: list[Any]) -> Any:
    return getattr(parts[0], name)  # torch.compile does not follow MethodType


def new_view(layout: Any, parts: list[Any]) -> Any:
    return parts[0].as_strided(*layout)


def new_reference(_: None, parts: list[Any]) -> Any:
    return weakref.ref(parts[0])


def unchanged(thing: Any, parts: list[Any]) -> Any:
    return thing


# ---- tensors without a value ---------------------------------------------------------------------


class Unreadable:
    """A placeholder that refuses every use, for a tensor that has no value in a call."""

    def __init__(self, why: str) -> None:
        vars(self)["why"] = why

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(vars(self)["why"])

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves = private.pytree.tree_leaves((args, kwargs))
        next(leaf for leaf in leaves if isinstance(leaf, cls))._refuse()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # what Python itself asks for, such as __deepcopy__
        self._refuse()

    def __reduce__(self) -> Any:
        return Unreadable, (vars(self)["why"],)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = _refuse
    __rmatmul__ = __truediv__ = __rtruediv__ = __pow__ = __neg__ = __getitem__ = _refuse
    __bool__ = __len__ = __iter__ = __float__ = __int__ = _refuse
