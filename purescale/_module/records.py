"""Records of the objects of a model, each with all that a call needs to make it anew."""

from __future__ import annotations

import dataclasses
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._module.registered import Tensors
from .._torch import private


class Record:
    """An object that each call makes anew."""

    number: int  # its index in the list of objects of each copy of the model

    def of(self, objects: list[Any], tensors: Tensors) -> Any:
        """Return the object in the copy of the model with these objects and tensors."""
        return objects[self.number]

    def make(self, objects: list[Any], tensors: Tensors) -> Any:
        """Return a new object, once all that have smaller numbers are made."""
        raise NotImplementedError

    def fill(self, obj: Any, objects: list[Any], tensors: Tensors) -> None:
        """Complete the new object, once all are made."""


def resolve(part: Any, objects: list[Any], tensors: Tensors) -> Any:
    """Return the object of a record in a copy; what is not a record, all copies share."""
    return part.of(objects, tensors) if isinstance(part, Record) else part


@dataclasses.dataclass(eq=False)
class Registered(Record):
    """A parameter or buffer. Each call is given one; the record has no number."""

    name: str

    def of(self, objects: list[Any], tensors: Tensors) -> Any:
        return tensors[self.name]


# ---- objects of which a model has thousands; `Plan` has them as lists ----------------------------


class Part(NamedTuple):
    """A part of a composite that is another object of the copy."""

    key: Any
    record: Record
    path: str  # in the model


@dataclasses.dataclass(eq=False)
class Composite(Record):
    """An object with content that is copied, in which its parts are then set."""

    content: Any  # None at the keys of `parts`
    parts: list[Part] = dataclasses.field(default_factory=list, kw_only=True)


class Container(Composite):
    """A container of a built-in type, or an array."""


@dataclasses.dataclass(eq=False)
class Instance(Composite):
    """A module or helper object: made with `object.__new__`; the content is its `__dict__`."""

    cls: Any


# ---- objects that are made one by one ------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class PlainTensor(Record):
    """A tensor that is neither a parameter nor a buffer; each call has a copy."""

    tensor: Tensor
    path: str  # in the model
    # If several tensors share memory: all of it, and shape, strides and offset in it.
    memory: PlainTensor | None = None
    layout: tuple[Any, ...] = ()

    @private.only_inlined
    def make(self, objects: list[Any], tensors: Tensors) -> Any:
        if self.memory is None:
            return self.tensor.clone()
        return objects[self.memory.number].as_strided(*self.layout)


@dataclasses.dataclass(eq=False)
class Elementwise(Record):
    """An object that is made empty and filled element by element: a container of a user's class,
    one of which a call replaces keys, an object with `__slots__`.

    Parts are set by methods of the built-in types, as those of a user's class may do anything.
    """

    cls: Any
    base: Any  # the built-in type that lays out its memory
    arguments: tuple[Any, ...]  # of `base.__init__`
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    elements: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)  # and keys of a dict
    # torch.compile cannot make a container of a user's class, so one without tensors is shared.
    example: Any = None

    @private.only_inlined
    def make(self, objects: list[Any], tensors: Tensors) -> Any:
        if self.example is not None and torch.compiler.is_dynamo_compiling():
            return self.example
        if self.base is object:
            return object.__new__(self.cls)
        obj = self.base.__new__(self.cls)
        if self.arguments:
            self.base.__init__(obj, *self.arguments)
        return obj

    @private.only_inlined
    def fill(self, obj: Any, objects: list[Any], tensors: Tensors) -> None:
        if obj is self.example:
            return
        for key, value in self.attributes.items():
            object.__setattr__(obj, key, resolve(value, objects, tensors))
        for element in self.elements:
            parts = [resolve(part, objects, tensors) for part in element]
            if issubclass(self.base, dict):
                self.base.__setitem__(obj, *parts)
            elif self.base is set:
                set.add(obj, *parts)
            elif self.base is list and self.cls.append is list.append:
                obj.append(*parts)  # torch.compile does not follow list.append
            else:
                self.base.append(obj, *parts)


@dataclasses.dataclass(eq=False)
class Immutable(Record):
    """An object that is made of its components: `build(pattern, components)`."""

    build: Callable[[Any, list[Any]], Any]
    pattern: Any
    components: list[Any]

    @private.only_inlined
    def make(self, objects: list[Any], tensors: Tensors) -> Any:
        components = [resolve(component, objects, tensors) for component in self.components]
        return self.build(self.pattern, components)


def immutable_record(obj: Any) -> Immutable | None:
    """Return the record of an immutable object, with the components that it has; None for
    another."""
    cls = type(obj)
    if isinstance(obj, tuple):
        return Immutable(new_tuple, cls, list(tuple.__iter__(obj)))
    if isinstance(obj, frozenset):
        return Immutable(new_frozenset, cls, list(frozenset.__iter__(obj)))
    if cls is functools.partial:
        components = [obj.func, *obj.args, *obj.keywords.values()]
        return Immutable(new_partial, list(obj.keywords), components)
    if cls is types.MethodType:
        owner, function = obj.__self__, obj.__func__
        name = getattr(function, "__name__", "")
        if getattr(type(owner), name, None) is function:
            return Immutable(new_method_of_class, name, [owner])
        return Immutable(new_method, function, [owner])
    return None


def new_tuple(cls: type, components: list[Any]) -> Any:
    return tuple.__new__(cls, components)


def new_frozenset(cls: type, components: list[Any]) -> Any:
    return frozenset.__new__(cls, components)


def new_partial(keywords: list[str], components: list[Any]) -> Any:
    count = len(components) - len(keywords)
    function, *args = components[:count]
    return functools.partial(
        function, *args, **dict(zip(keywords, components[count:], strict=True))
    )


def new_method(function: Any, components: list[Any]) -> Any:
    return types.MethodType(function, components[0])


def new_method_of_class(name: str, components: list[Any]) -> Any:
    return getattr(components[0], name)  # torch.compile does not follow MethodType


def new_reference(reference: Any, components: list[Any]) -> Any:
    """Return a weak reference to the component; without one, that of the model, whose target all
    calls share.
    """
    return weakref.ref(components[0]) if components else reference


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
