"""A copy of a model in a call, and what the forward has left in it."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from .._module.layout import Layout, Place, StateContainer
from .._module.registered import STORES, Tensors
from .._module.state_attributes import keys_of


class Registration(NamedTuple):
    """A registration that a forward has made: `getattr(module, store)[key]`."""

    module: nn.Module
    store: str
    key: str


class ModelCopy:
    """A copy of a model around the tensors of a call."""

    layout: Layout
    arguments: Tensors  # all parameters and buffers, as they are in it before the forward
    objects: list[Any]  # by number
    contents: list[Any]  # by number: the `__dict__` of an instance, a container itself
    stores: list[dict[str, Any]]  # the contents of `layout.stores`
    root: nn.Module
    before: list[Any]  # what was registered before the forward

    def modules(self) -> list[nn.Module]:
        """Return the copies of `model.modules()`."""
        return [self.objects[number] for number in self.layout.modules]

    # ---- what is in it now

    def value(self, place: Place) -> Any:
        """Return what is in a place of an argument; None if nothing is."""
        return self._get(place.container, place.key)

    def _get(self, container: int, key: Any) -> Any:
        content = self.contents[container]
        if isinstance(content, dict):
            return content.get(key)
        return content[key] if key < len(content) else None

    def registered(self) -> list[Any]:
        """Return all parameters, buffers and modules that are registered, and the state."""
        registered = list(itertools.chain.from_iterable(map(dict.values, self.stores)))
        if self.layout.state:
            registered += map(self.value, self.layout.state)
        for container, _, places in self.layout.state_containers:
            content = self.contents[container]
            registered += content.values() if isinstance(content, dict) else content
            registered += map(self.value, places)
        return registered

    def registers_as_before(self) -> bool:
        """Return True if the forward has left all that was registered where it was."""
        now = self.registered()
        return len(now) == len(self.before) and all(map(operator.is_, now, self.before))

    def new_registrations(self) -> list[Registration]:
        """Return what was not registered before the forward. A tensor may have replaced another."""
        before = {(container, key): self.objects[n] for container, key, n in self.layout.links}
        containers = {(s.module, s.attribute): s.container for s in self.layout.stores}
        new = []
        for module in self.layout.modules:
            for store in STORES:
                container = containers.get((module, store), -1)
                for key, value in self.contents[module].get(store, {}).items():
                    may_replace = store != "_modules" and (container, key) in before
                    if not may_replace and value is not before.get((container, key)):
                        new.append(Registration(self.objects[module], store, key))
        return new

    def follow(self, state: StateContainer) -> bool:
        """Let the list or dict that the forward has put in place of one with state be that one.
        Return False if it is not like it, or is not in all of its places.
        """
        first, *others = map(self.value, state.places)
        before = self.contents[state.container]
        if type(first) is not type(before) or any(other is not first for other in others):
            return False
        self.contents[state.container] = first
        return tuple(keys_of(first)) == state.keys

    def buffers(self) -> dict[str, Any]:
        """Return by name what is in the first place of each buffer, none of which was removed."""
        return {
            name: self.contents[places[0].container][places[0].key]
            for name, places in self.layout.buffers
        }

    def plain_tensors(self) -> Iterator[tuple[str, Tensor, bool]]:
        """Yield all tensors that are not arguments: the path in the model, the tensor that it had
        before the forward, and True if it has another one now.
        """
        replaced = {
            number
            for container, key, number in self.layout.links
            if self._get(container, key) is not self.objects[number]
        }
        for number, path in self.layout.plain_tensors:
            yield path, self.objects[number], number in replaced

    # ---- changes after the forward

    def replace(self, values: dict[str, Any]) -> None:
        """Put values in place of arguments: in the stores of modules, and wherever else these still
        are.
        """
        for name, places in self.layout.arguments:
            for place in places if name in values else ():
                if place.in_store or self.value(place) is self.arguments[name]:
                    self.contents[place.container][place.key] = values[name]
