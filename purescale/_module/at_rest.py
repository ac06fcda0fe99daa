"""How everything that a forward may change in a module stands between calls."""

from __future__ import annotations

import collections
import itertools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .._module.references import Reference, slots
from .._torch import private

_CONTAINERS = (list, dict, set, collections.deque)


class AtRest:
    """The attributes of modules and of other objects, hooks, and what is in lists, dicts, sets and
    deques: how they stand now.

    `found`: the references of the module; `own`: the ids of what is there for this module alone.
    What it shares with others, such as a logger, is left alone.
    """

    def __init__(self, root: nn.Module, found: Iterable[Reference], own: set[int]) -> None:
        modules = list(root.modules())
        hooks = [held for module in modules for held in private.hook_dicts(module)]
        reached = [reference.value for reference in found if id(reference.value) in own]
        distinct = {id(held): held for held in (*modules, *hooks, *reached)}.values()
        self.objects = [held for held in distinct if not isinstance(held, Tensor)]
        self.attributes = list(map(_attributes, self.objects))
        self.elements = list(map(_elements, self.objects))
        self._number = str(next(_numbers))
        _made[self._number] = self
        # For `restore`, by what costs least.
        stores = [store for module in modules for store in private.stores(module)]
        dicts = [vars(held) for held in self.objects if _has_dict(held)] + stores
        self._dicts = [(held, held.copy()) for held in dicts]
        self._counted = dicts
        self._counts = list(map(len, dicts))
        both = [
            (held, before)
            for held, before in zip(self.objects, self.elements, strict=True)
            if before is not None
        ]
        self._empty = [held for held, before in both if not before]
        self._lists = [(held, before) for held, before in both if before and type(held) is list]
        self._others = [
            (held, before) for held, before in both if before and type(held) is not list
        ]
        self._slots = [
            (index, key) for index, held in enumerate(self.objects) for key in slots(held)
        ]

    @private.only_inlined
    def restore(self) -> None:
        """Put all of it back, after an eager call."""
        for held, before in self._dicts:
            held |= before
        if list(map(len, self._counted)) != self._counts:
            for held, before in self._dicts:
                held.clear()
                held |= before
        if any(self._empty):
            for held in self._empty:
                held.clear()
        for held, before in self._lists:
            held[:] = before
        for held, before in self._others:
            _fill(held, before)
        for index, key in self._slots:
            self._put(index, key, _of(self.attributes[index], key))

    def put_back(self) -> None:
        """Put back what the compiler that follows this has seen change: all else it would guard."""
        for index, key in self._changed():
            own = self.attributes[index]
            self._put(index, key, _of(own, key) if key else self.elements[index])

    def changes(self) -> list[tuple[int, str, Any]]:
        """What the compiler has seen change so far, as it is, for `put`."""
        return [(index, key, self._now(self.objects[index], key)) for index, key in self._changed()]

    def put(self, changes: list[tuple[int, str, Any]]) -> None:
        """Put the `changes` there, in a way that the compiler follows."""
        for index, key, state in changes:
            self._put(index, key, state)

    def _changed(self) -> list[tuple[int, str]]:
        """Each changed object by its index, and which of its attributes; "" for its elements."""
        found = _seen_to_change(self._number)
        pairs = [entry.partition(" ") for entry in found.split("\n")] if found else []
        return [(int(index), key) for index, _, key in pairs]

    def _now(self, held: Any, key: str) -> Any:
        if key:
            return [getattr(held, key)] if hasattr(held, key) else []
        return _elements(held)

    def _put(self, index: int, key: str, state: Any) -> None:
        """Give an object its elements; or an attribute: a list of its value, or of none."""
        held = self.objects[index]
        if not key:
            _fill(held, state)
        elif state:
            object.__setattr__(held, key, state[0])
        elif hasattr(held, key):
            delattr(held, key)


_numbers = itertools.count(1)
_made: weakref.WeakValueDictionary[str, AtRest] = weakref.WeakValueDictionary()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _seen_to_change(number: str) -> str:  # both strings, which every torch takes for constants
    rest = _made[number]
    return "\n".join(
        f"{index} {key}"
        for index, key, is_deleted in private.seen_to_change(rest.objects)
        if not is_deleted or key in rest.attributes[index]
    )


def _has_dict(held: Any) -> bool:
    # of hooks: an OrderedDict could have attributes besides, and nothing gives it any
    is_plain = type(held) is collections.OrderedDict
    return not is_plain and isinstance(getattr(held, "__dict__", None), dict)


def _attributes(held: Any) -> dict[str, Any]:
    own = vars(held).copy() if _has_dict(held) else {}
    return own | {key: getattr(held, key) for key in slots(held) if hasattr(held, key)}


def _of(attributes: dict[str, Any], key: str) -> list[Any]:
    return [attributes[key]] if key in attributes else []


def _elements(held: Any) -> Any:
    """A plain copy of what a container holds; None of anything else."""
    if isinstance(held, dict):
        return dict(held)
    if isinstance(held, set):
        return set(held)
    return list(held) if isinstance(held, _CONTAINERS) else None


@private.only_inlined
def _fill(held: Any, elements: Any) -> None:
    if isinstance(held, list):
        held[:] = elements
    elif isinstance(held, collections.deque):
        held.clear()
        held.extend(elements)
    elif isinstance(held, dict) or held != elements:  # a set that is filled again may change order
        held.clear()
        held.update(elements)
