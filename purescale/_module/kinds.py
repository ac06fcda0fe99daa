"""The kinds of objects in a model, and how a call makes its own of each.

An object has the same number in all copies of the model: its index in the list of their objects.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._module.unreadable import Unreadable
from .._torch import private

# torch 2.11 cannot trace `update` of the attributes of an object.
_TRACES_UPDATE = torch.__version__ >= "2.12"

# Of an object of the user's model: its number, and True if each copy has its own.
Number = Callable[[Any], int]
IsCopied = Callable[[Any], bool]


class Node:
    """An object of the user's model."""


@dataclasses.dataclass(frozen=True, eq=False)
class Shared(Node):
    """A function, file, lock, logger or the like, which calls share with the model."""


@dataclasses.dataclass(frozen=True, eq=False)
class Argument(Node):
    """A parameter, buffer or state attribute, which each call is given."""

    name: str


@dataclasses.dataclass(frozen=True, eq=False)
class Computed(Node):
    """A tensor that was computed from an argument, or is a view of one, before make_functional. A
    copy has a placeholder for it, which refuses to be read.
    """

    placeholder: Unreadable


# ---- objects of which a model has thousands: made all at once ------------------------------------


class Part(NamedTuple):
    """An object that another one holds at a key."""

    key: Any
    value: Any
    path: str  # in the model


@dataclasses.dataclass(frozen=True, eq=False)
class Composite(Node):
    """An object with content. A copy gets a template of it, in which its own parts are then set."""

    content: Any
    parts: list[Part]

    def template(self, is_copied: IsCopied) -> Any:
        """Return the content without the parts of which each copy has its own."""
        template = self.content.copy()
        for key, value, _ in self.parts:
            if is_copied(value):
                template[key] = None
        return template


@dataclasses.dataclass(frozen=True, eq=False)
class Instance(Composite):
    """A module, or a helper object of a Python class without `__slots__`; the content is its
    `__dict__`.
    """

    cls: Any
    empty: list[Any]  # containers in its attributes, as for hooks, that hardly any forward fills


@dataclasses.dataclass(frozen=True, eq=False)
class Instances:
    """A table of instances."""

    classes: list[type]
    attributes: list[dict[str, Any]]
    # Empty containers, which all copies share until a forward fills one.
    shared_empty: list[Any]
    # Then, by instance, the attributes in which each copy gets new ones, and their classes.
    own_empty: list[dict[str, type]]

    @staticmethod
    def of(nodes: list[Instance], is_copied: IsCopied) -> Instances:
        return Instances(
            classes=[node.cls for node in nodes],
            attributes=[node.template(is_copied) for node in nodes],
            shared_empty=[value for node in nodes for value in node.empty],
            own_empty=[],
        )

    def with_modes(self, modes: dict[int, bool]) -> Instances:
        """Return the table with modules in train or eval mode. `modes`: by number of a module."""
        attributes = list(self.attributes)
        for number, mode in modes.items():
            attributes[number] = {**attributes[number], "training": mode}
        return dataclasses.replace(self, attributes=attributes)

    def with_own_empty(self) -> Instances:
        """Return the table by which copies do not share empty containers."""
        shared = set(map(id, self.shared_empty))
        own = [
            {key: type(value) for key, value in attributes.items() if id(value) in shared}
            for attributes in self.attributes
        ]
        attributes = [
            {key: value for key, value in attributes.items() if key not in empty}
            for attributes, empty in zip(self.attributes, own, strict=True)
        ]
        return Instances(self.classes, attributes, [], own)

    @private.only_inlined
    def make(self) -> tuple[list[Any], list[Any]]:
        """Return the objects and their `__dict__`s."""
        objects: list[Any] = list(map(object.__new__, self.classes))
        contents = [instance.__dict__ for instance in objects]
        if _TRACES_UPDATE or not torch.compiler.is_dynamo_compiling():
            list(map(dict.update, contents, self.attributes))
        else:
            for content, attributes in zip(contents, self.attributes, strict=True):
                for key, value in attributes.items():
                    content[key] = value
        if self.own_empty:
            for content, empty in zip(contents, self.own_empty, strict=True):
                for key, cls in empty.items():
                    content[key] = cls()
        return objects, contents


@dataclasses.dataclass(frozen=True, eq=False)
class BuiltinContainer(Composite):
    """A dict, list, set or deque of a built-in type, or an array of NumPy. A copy has the same keys
    and the same elements of a set.
    """


# ---- objects of which a model has few: made one by one -------------------------------------------


class Row(Node):
    """An object that is made on its own. Each call makes it from a row of numbers."""

    @property
    def components(self) -> list[Any]:
        """The objects that it refers to."""
        return []

    def numbered(self, number: Number) -> Row:
        """Return the row, which has numbers in place of the objects that it refers to."""
        raise NotImplementedError

    def make(self, objects: list[Any]) -> Any:
        """Return a new object. `objects` has those of smaller numbers."""
        raise NotImplementedError

    def fill(self, obj: Any, objects: list[Any]) -> None:
        """Complete the new object, once `objects` has all."""


@dataclasses.dataclass(frozen=True, eq=False)
class PlainTensor(Row):
    """A tensor that is not an argument, as in a plain attribute or a list."""

    tensor: Tensor
    path: str  # in the model

    def numbered(self, _: Number) -> Row:
        return PlainTensor(self.tensor.detach().clone(), self.path)

    @private.only_inlined
    def make(self, _: list[Any]) -> Any:
        return self.tensor.clone()


@dataclasses.dataclass(frozen=True, eq=False)
class TensorView(Row):
    """A plain tensor that shares its memory with others."""

    memory: Any  # a plain tensor
    layout: tuple[Any, ...]  # shape, strides and offset in it
    path: str  # in the model

    def numbered(self, number: Number) -> Row:
        return dataclasses.replace(self, memory=number(self.memory))

    @private.only_inlined
    def make(self, objects: list[Any]) -> Any:
        return objects[self.memory].as_strided(*self.layout)


@dataclasses.dataclass(frozen=True, eq=False)
class Refilled(Row):
    """A container of a user's class, a container with keys of which each call has its own, a
    SimpleNamespace, or an object with `__slots__`. It is made empty and filled part by part.

    Parts are set by methods of the built-in types, as those of a user's class may do anything.
    """

    cls: Any
    base: Any  # the built-in type that lays out its memory
    arguments: tuple[Any, ...]  # of `base.__init__`
    attributes: dict[str, Any]
    elements: list[tuple[Any, ...]]  # with their keys in a dict
    # torch.compile cannot make a container of a user's class, so calls share one without tensors.
    example: Any = None

    @property
    def components(self) -> list[Any]:
        return [*self.attributes.values(), *(part for parts in self.elements for part in parts)]

    def with_example(self) -> Refilled:
        components = self.components
        numbers = {id(part): number for number, part in enumerate(components)}
        example = self.make([])
        self.numbered(lambda part: numbers[id(part)]).fill(example, components)
        return dataclasses.replace(self, example=example)

    def numbered(self, number: Number) -> Row:
        return dataclasses.replace(
            self,
            attributes={key: number(value) for key, value in self.attributes.items()},
            elements=[tuple(map(number, parts)) for parts in self.elements],
        )

    @private.only_inlined
    def make(self, _: list[Any]) -> Any:
        if self.example is not None and torch.compiler.is_dynamo_compiling():
            return self.example
        if self.base is object:
            return object.__new__(self.cls)
        obj = self.base.__new__(self.cls)
        if self.arguments:
            self.base.__init__(obj, *self.arguments)
        return obj

    @private.only_inlined
    def fill(self, obj: Any, objects: list[Any]) -> None:
        if obj is self.example:
            return
        for key, value in self.attributes.items():
            object.__setattr__(obj, key, objects[value])
        for element in self.elements:
            parts = [objects[part] for part in element]
            if issubclass(self.base, dict):
                self.base.__setitem__(obj, *parts)
            elif self.base is set:
                set.add(obj, *parts)
            elif self.base is list and self.cls.append is list.append:
                obj.append(*parts)  # torch.compile does not follow list.append
            else:
                self.base.append(obj, *parts)


@dataclasses.dataclass(frozen=True, eq=False)
class Immutable(Row):
    """A tuple, frozenset, partial, bound method or weak reference: `build(pattern, components)`. If
    a call has its own of no component, it shares the object too.
    """

    build: Callable[[Any, list[Any]], Any]
    pattern: Any
    parts: list[Any]

    @staticmethod
    def of(obj: Any) -> Immutable | None:
        """Return the node of an object; None for an object of another kind."""
        cls = type(obj)
        if isinstance(obj, tuple):
            return Immutable(_new_tuple, cls, list(tuple.__iter__(obj)))
        if isinstance(obj, frozenset):
            return Immutable(_new_frozenset, cls, list(frozenset.__iter__(obj)))
        if cls is functools.partial:
            parts = [obj.func, *obj.args, *obj.keywords.values()]
            return Immutable(_new_partial, list(obj.keywords), parts)
        if cls is types.MethodType:
            owner, function = obj.__self__, obj.__func__
            name = getattr(function, "__name__", "")
            if getattr(type(owner), name, None) is function:
                return Immutable(_new_method_of_class, name, [owner])
            return Immutable(_new_method, function, [owner])
        if cls is weakref.ref:
            return Immutable(_new_reference, None, [obj()])
        return None

    @property
    def components(self) -> list[Any]:
        return self.parts

    def numbered(self, number: Number) -> Row:
        return dataclasses.replace(self, parts=list(map(number, self.parts)))

    @private.only_inlined
    def make(self, objects: list[Any]) -> Any:
        return self.build(self.pattern, [objects[part] for part in self.parts])


def _new_tuple(cls: type, components: list[Any]) -> Any:
    return tuple.__new__(cls, components)


def _new_frozenset(cls: type, components: list[Any]) -> Any:
    return frozenset.__new__(cls, components)


def _new_partial(keywords: list[str], components: list[Any]) -> Any:
    count = len(components) - len(keywords)
    function, *args = components[:count]
    return functools.partial(
        function, *args, **dict(zip(keywords, components[count:], strict=True))
    )


def _new_method(function: Any, components: list[Any]) -> Any:
    return types.MethodType(function, components[0])


def _new_method_of_class(name: str, components: list[Any]) -> Any:
    return getattr(components[0], name)  # torch.compile does not follow MethodType


def _new_reference(_: None, components: list[Any]) -> Any:
    return weakref.ref(components[0])
