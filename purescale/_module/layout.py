"""The layout of the copies of a model: numbers of objects, and the links between them."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from .._module.kinds import (
    Argument,
    BuiltinContainer,
    Computed,
    Instance,
    Node,
    PlainTensor,
    Refilled,
    Row,
    TensorView,
)
from .._module.object_graph import ObjectGraph
from .._module.registered import STORES
from .._module.state_attributes import keys_of
from .._torch import private

# (container, key, object): `contents[container][key] = objects[object]`. It is a plain tuple: a
# call unpacks thousands, and Python unpacks a NamedTuple seven times as slowly.
Link = tuple[int, Any, int]


class Place(NamedTuple):
    """A place in which a copy has a parameter or buffer: `contents[container][key]`."""

    container: int
    key: Any
    path: str  # in the model
    in_store: bool  # in `_parameters` or `_buffers` of a module


# The name of an argument, and its places; those in stores come first.
ArgumentPlaces = tuple[str, tuple[Place, ...]]


class StateContainer(NamedTuple):
    """A list or dict with state attributes: its keys and its places in a copy of the model."""

    container: int
    keys: tuple[Any, ...]
    places: tuple[Place, ...]


class Store(NamedTuple):
    """The container of what is registered in a module: `getattr(objects[module], attribute)`."""

    container: int
    module: int
    attribute: str


@dataclasses.dataclass(frozen=True)
class Layout:
    """The place of everything in a copy of a model. Those of models that are alike are equal.

    Objects are known by their numbers. A container is the number of an instance, whose content is
    its `__dict__`, or of a container of a built-in type.
    """

    links: tuple[Link, ...]
    arguments: tuple[ArgumentPlaces, ...]  # in the order of their numbers
    buffers: tuple[ArgumentPlaces, ...]  # those that are registered as one, and state attributes
    state: tuple[Place, ...]  # all places of state attributes
    state_containers: tuple[StateContainer, ...]
    modules: tuple[int, ...]  # in the order of `model.modules()`
    stores: tuple[Store, ...]
    plain_tensors: tuple[tuple[int, str], ...]  # with their paths in the model
    # (module, container): its store of buffers, if it has the `register_buffer` of torch.
    registers: tuple[tuple[int, int], ...]


class Numbers:
    """The numbers of the objects in each copy of a model. Those of one kind follow each other.

    Args:
        graph: The objects of the model.
        hooks: More objects that need a number.
    """

    def __init__(self, graph: ObjectGraph, hooks: list[Any]) -> None:
        self.instances, self.containers = graph.all_of(Instance), graph.all_of(BuiltinContainer)
        self.arguments, computed = graph.all_of(Argument), graph.all_of(Computed)
        tensors, views = graph.all_of(PlainTensor), graph.all_of(TensorView)
        self.plain_tensors: list[PlainTensor | TensorView] = [*tensors, *views]
        self.rows: list[Row] = [
            *tensors,
            *views,
            *graph.all_of(Refilled),
            *graph.copied_immutables(),
        ]
        # What copies share has a number if a hook or a row refers to it.
        components = (*hooks, *(component for row in self.rows for component in row.components))
        shared = {id(obj): obj for obj in components if not graph.is_copied(obj)}
        self.shared = [*(node.placeholder for node in computed), *shared.values()]
        order: tuple[Node | int, ...] = (
            *self.instances,
            *self.containers,
            *self.arguments,
            *computed,
            *shared,
            *self.rows,
        )
        self._numbers = {key: number for number, key in enumerate(order)}
        self._copied = {
            key: self._numbers[node] for key, node in graph.nodes.items() if node in self._numbers
        }

    def copied(self, obj: Any) -> int | None:
        """Return the number of an object of the user's model; None if copies share it."""
        return self._copied.get(id(obj))

    def of(self, obj: Any) -> int:
        """Return the number of an object of the user's model, which copies may share."""
        number = self._copied.get(id(obj))
        return self._numbers[id(obj)] if number is None else number

    def first(self, nodes: Sequence[Node]) -> int:
        """Return the smallest number of the objects of a kind; 0 if there are none."""
        return self._numbers[nodes[0]] if nodes else 0


def lay_out(graph: ObjectGraph, numbers: Numbers, state_containers: list[Any]) -> Layout:
    """Return the layout of the copies of a model, some of whose containers have its state."""
    stores = {
        numbers.of(part.value): Store(numbers.of(part.value), module, part.key)
        for module, instance in enumerate(numbers.instances)
        if issubclass(instance.cls, nn.Module)
        for part in instance.parts
        if part.key in STORES
    }
    links: list[Link] = []
    first_argument = numbers.first(numbers.arguments)
    names = {n: node.name for n, node in enumerate(numbers.arguments, first_argument)}
    places: dict[str, list[Place]] = {name: [] for name in names.values()}
    containers: dict[int, list[Place]] = {numbers.of(value): [] for value in state_containers}
    for container, composite in enumerate((*numbers.instances, *numbers.containers)):
        for key, value, path in composite.parts:
            number = numbers.copied(value)
            if number is not None:
                links.append((container, key, number))
                if number in names:
                    places[names[number]].append(Place(container, key, path, container in stores))
                if number in containers:
                    containers[number].append(Place(container, key, path, in_store=False))
    arguments = [
        (name, tuple(sorted(some, key=lambda place: not place.in_store)))
        for name, some in places.items()
    ]
    state = {name: some for name, some in arguments if not any(place.in_store for place in some)}
    buffers = {store.container for store in stores.values() if store.attribute == "_buffers"}
    return Layout(
        links=tuple(links),
        arguments=tuple(arguments),
        buffers=tuple(
            (name, some)
            for name, some in arguments
            if name in state or any(place.container in buffers for place in some)
        ),
        state=tuple(place for some in state.values() for place in some),
        state_containers=tuple(
            StateContainer(number, tuple(keys_of(value)), tuple(containers[number]))
            for number, value in {numbers.of(v): v for v in state_containers}.items()
        ),
        modules=tuple(map(numbers.of, graph.modules.values())),
        stores=tuple(stores.values()),
        plain_tensors=tuple(
            (number, node.path)
            for number, node in enumerate(
                numbers.plain_tensors, numbers.first(numbers.plain_tensors)
            )
        ),
        registers=tuple(
            (store.module, store.container)
            for store in stores.values()
            if store.attribute == "_buffers"
            and numbers.instances[store.module].cls.register_buffer is nn.Module.register_buffer
        ),
    )


# ---- layouts of models that are alike ------------------------------------------------------------

# torch.compile guards the key alone: guards on thousands of numbers would be slow to make and to
# check. Models that are alike have the same key, and so share a graph.
_keys: weakref.WeakKeyDictionary[Layout, str] = weakref.WeakKeyDictionary()
_by_key: weakref.WeakValueDictionary[str, Layout] = weakref.WeakValueDictionary()
_key_numbers = itertools.count()


def share_layout(layout: Layout) -> tuple[str, Layout]:
    """Return a key and the layout that it stands for, which is equal to `layout`."""
    key = _keys.setdefault(layout, f"layout {next(_key_numbers)}")
    return key, _by_key.setdefault(key, layout)


@private.constant_while_compiling
def layout_of(key: str) -> Layout:
    """Return the layout with a key, which a blueprint holds."""
    return _by_key[key]
