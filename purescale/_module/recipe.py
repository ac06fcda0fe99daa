"""A recipe, from which each call makes a copy of the model: flat rows, and links between objects.

A forward may change whatever it likes in its copy, and `walk.py` lists what becomes of it. The copy
is dropped after the call, so nothing has to be put back. A graph whose backward runs a part of the
forward again (torch.utils.checkpoint) keeps the copy of its own call.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._module.registered import REGISTRY_NAMES, Tensors
from .._torch import private


class Place(NamedTuple):
    """A place in which a copy has an argument, or a list or dict with state:
    `contents[holder][key]`.
    """

    holder: int
    key: Any
    path: str  # in the model
    in_registry: bool  # in `_parameters` or `_buffers` of a module


class StateContainer(NamedTuple):
    """A list or dict with state attributes: its keys and its places in a copy of the model."""

    container: int
    keys: tuple[Any, ...]
    places: tuple[Place, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The place of everything in a copy of a model. Those of models that are alike are equal.

    An object is known by its number, its index in `ModelCopy.objects`, which is the same in all
    copies. A holder is the number of an instance, whose content is its `__dict__`, or of a
    container.
    """

    # (holder, key, object): `contents[holder][key] = objects[object]`. Plain tuples: a call
    # unpacks thousands, and Python unpacks a NamedTuple seven times as slowly.
    links: tuple[tuple[int, Any, int], ...]
    arguments: tuple[str, ...]  # parameters and buffers
    places_of_arguments: tuple[tuple[Place, ...], ...]  # of each; those in registries come first
    state_containers: tuple[StateContainer, ...]
    has_state: bool  # in plain attributes
    modules: tuple[int, ...]  # in the order of `model.modules()`
    registry_rows: tuple[tuple[int, int, str], ...]  # container, module, attribute
    registry_values: tuple[int, ...]  # the objects in all registries, in the order of their rows
    views: tuple[tuple[int, str], ...]  # tensors that share memory in the model, with their paths


class ModelCopy:
    """A copy of a model around the tensors of a call."""

    layout: Layout
    arguments: Tensors  # all parameters and buffers, as they are in it before the forward
    objects: list[Any]
    contents: list[Any]  # by number: the `__dict__` of an instance, a container itself
    registries: list[dict[str, Any]]  # of `layout.registry_rows`
    root: nn.Module

    def modules(self) -> list[nn.Module]:
        """Return the copies of `model.modules()`."""
        return [self.objects[number] for number in self.layout.modules]

    def value(self, place: Place) -> Any:
        """Return what is in a place now; None if nothing is."""
        content = self.contents[place.holder]
        if isinstance(content, dict):
            return content.get(place.key)
        return content[place.key] if place.key < len(content) else None


@dataclasses.dataclass(frozen=True, eq=False)
class Recipe:
    """The objects of a copy in the order of their numbers: instances, containers, the arguments of
    the call, plain tensors, shared parts, immutables. Each copy has its own, except shared parts.
    """

    classes: list[Any]  # of the instances: modules and helper objects
    attributes: list[dict[str, Any]]  # of the instances
    containers: list[Any]  # registries before others
    plain_tensors: list[Tensor]  # in plain attributes: those that are not arguments
    shared_parts: list[Any]  # of immutable objects; and placeholders that refuse to be read
    immutables: list[tuple[Callable[..., Any], list[int]]]  # `build(*parts)`
    # Empty containers in the attributes of modules, which copies share until a forward fills one,
    # as hardly any does. Then this is empty, and each copy has its own in the same places.
    shared_empty: list[Any]
    empty_places: list[tuple[int, str, type]]  # instance, attribute, class
    layout: Layout
    key: str  # of the layout

    @private.only_inlined
    def make_copy(self, arguments: Tensors) -> ModelCopy:
        """Return a copy of the model around `arguments`."""
        is_compiling = torch.compiler.is_dynamo_compiling()
        layout = layout_of(self.key) if is_compiling else self.layout
        objects: list[Any] = list(map(object.__new__, self.classes))
        contents: list[Any] = [instance.__dict__ for instance in objects]
        list(map(dict.update, contents, self.attributes))
        own_registries = []
        for number, key, cls in () if self.shared_empty else self.empty_places:
            contents[number][key] = cls()
            if key in REGISTRY_NAMES:
                own_registries.append(contents[number][key])
        containers = [template.copy() for template in self.containers]
        contents += containers
        objects += containers
        objects += map(arguments.__getitem__, layout.arguments)
        objects += map(Tensor.clone, self.plain_tensors)
        objects += self.shared_parts
        for build, parts in self.immutables:
            objects.append(build(*[objects[part] for part in parts]))
        for holder, key, number in layout.links:
            contents[holder][key] = objects[number]
        if is_compiling:
            # nn.Module.__setattr__ looks at its `__func__` where a forward replaces a buffer, which
            # torch.compile does not see of a method of a module that is made within the graph.
            for _, module, attribute in layout.registry_rows:
                register = self.classes[module].register_buffer
                if attribute == "_buffers" and register is nn.Module.register_buffer:
                    contents[module]["register_buffer"] = register.__get__(objects[module])
        # Attributes, because torch.compile would check arguments of the class for constants.
        copy = ModelCopy()
        copy.layout, copy.arguments = layout, arguments
        copy.objects, copy.contents = objects, contents
        copy.registries = containers[: len(layout.registry_rows)] + own_registries
        copy.root = objects[layout.modules[0]]
        return copy

    def with_modes(self, modes: list[bool]) -> Recipe:
        """Return a recipe of copies in which the modules have these modes, in the order of
        `model.modules()`.
        """
        mode_of = dict(zip(self.layout.modules, modes, strict=True))
        attributes = [
            {**row, "training": mode_of[number]} if number in mode_of else row
            for number, row in enumerate(self.attributes)
        ]
        return dataclasses.replace(self, attributes=attributes)

    def with_own_empty(self) -> Recipe:
        """Return a recipe whose copies share no empty containers, for use after a forward has
        filled one. Its copy keeps them, because its backward may run a part of it again.
        """
        if not self.shared_empty:
            return self
        attributes = list(map(dict.copy, self.attributes))
        for number, key, _ in self.empty_places:
            del attributes[number][key]
        return dataclasses.replace(self, attributes=attributes, shared_empty=[])

    def __setstate__(self, state: dict[str, Any]) -> None:
        key, layout = share_layout(state["layout"])
        vars(self).update(state, key=key, layout=layout)


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
    """Return the layout with a key, which a recipe holds."""
    return _by_key[key]
