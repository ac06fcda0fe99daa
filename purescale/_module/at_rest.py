"""Snapshot and restore of everything that a forward may change in a module besides its tensors."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .._module.references import Reference, slots
from .._torch import private
from .._torch.tracing import constant_while_compiling

_CONTAINERS = (list, dict, set, collections.deque)
_PLAIN = (*_CONTAINERS, collections.OrderedDict, collections.defaultdict)

# The index of an object; an attribute, or "" for its elements; the value, as `_now` returns it.
_Change = tuple[int, str, Any]


class AtRest:
    """A snapshot of the attributes and elements of modules, their hooks, lists, dicts, sets, deques
    and helper objects.

    `found`: the references of the module; `own`: the ids of objects that belong to this module
    alone. Objects shared with others, such as a logger, are not restored.
    """

    def __init__(self, root: nn.Module, found: Iterable[Reference], own: set[int]) -> None:
        modules = list(root.modules())
        hooks = [held for module in modules for held in private.hook_dicts(module)]
        reached = [reference.value for reference in found if id(reference.value) in own]
        distinct = {id(held): held for held in (*modules, *hooks, *reached)}.values()
        self.objects = [held for held in distinct if not isinstance(held, Tensor)]
        self.attributes = list(map(_attributes, self.objects))
        self.elements = list(map(_elements, self.objects))
        self._for_eager_calls([store for module in modules for store in private.stores(module)])
        # Dynamo does not trace a hook put into an empty dict of hooks, so those are not replaced.
        left = set(map(id, (*modules, *(held for held in hooks if not held))))
        self._for_new_modules(left)
        self._asks = False
        _all[id(self)] = self

    def _for_eager_calls(self, stores: list[dict[str, Any]]) -> None:
        """Group the objects by the fastest way to restore them."""
        self._dicts = [vars(held) for held in self.objects if _has_dict(held)] + stores
        self._as_before = [(held, held.copy()) for held in self._dicts]
        self._lengths = list(map(len, self._dicts))
        both = list(zip(self.objects, self.elements, strict=True))
        self._empty = [held for held, before in both if before is not None and not before]
        self._lists = [(held, before) for held, before in both if before and type(held) is list]
        self._filled = [
            (held, before) for held, before in both if before and type(held) is not list
        ]
        self._slots = [
            (index, key) for index, held in enumerate(self.objects) for key in slots(held)
        ]

    @private.only_inlined
    def restore(self) -> None:
        """Restore everything after an eager call."""
        for held, before in self._as_before:
            held |= before
        if list(map(len, self._dicts)) != self._lengths:
            for held, before in self._as_before:
                held.clear()
                held |= before
        if any(self._empty):
            for held in self._empty:
                held.clear()
        for held, before in self._lists:
            held[:] = before
        for held, before in self._filled:
            _fill(held, before)
        for index, key in self._slots:
            self._put(index, key, self._before(index, key))

    # ---- traced by Dynamo, which guards every value that is read, so these read only changes -----

    def put_back(self) -> None:
        """Restore what Dynamo has seen change."""
        for index, key in self._changed():
            self._put(index, key, self._before(index, key))

    def changes(self) -> list[_Change]:
        """Return the current values of what Dynamo has seen change, for `put`."""
        return [(index, key, self._now(index, key)) for index, key in self._changed()]

    def put(self, changes: list[_Change]) -> None:
        """Put the values of `changes` back."""
        for index, key, state in changes:
            self._put(index, key, state)

    def _changed(self) -> list[tuple[int, str]]:
        # A value that identifies this `AtRest` would be guarded, so that each model would have its
        # own graph. A flag that is reset is not guarded.
        self._asks = True
        found = _seen_to_change()
        self._asks = False
        pairs = [entry.partition(" ") for entry in found.split("\n")] if found else []
        return [(int(index), key) for index, _, key in pairs]

    def _before(self, index: int, key: str) -> Any:
        if not key:
            return self.elements[index]
        attributes = self.attributes[index]
        return [attributes[key]] if key in attributes else []

    def _now(self, index: int, key: str) -> Any:
        held = self.objects[index]
        if not key:
            return _elements(held)
        return [getattr(held, key)] if hasattr(held, key) else []

    def _put(self, index: int, key: str, state: Any) -> None:
        """Set the elements of an object, or an attribute from a list with its value. An empty list
        deletes the attribute.
        """
        held = self.objects[index]
        if not key:
            _fill(held, state)
        elif state:
            object.__setattr__(held, key, state[0])
        elif hasattr(held, key):
            delattr(held, key)

    # ---- modules that are made for one call ------------------------------------------------------

    def _for_new_modules(self, left: set[int]) -> None:
        """Find the objects to make anew: all except those in `left` and those without a simple
        copy. `parts`: for each object, modules too, the keys under which it holds them.
        """
        everything = list(enumerate(self.objects))
        rest = [(index, held) for index, held in everything if id(held) not in left]
        # Dynamo cannot trace the handle of a hook at all.
        rest = [
            (index, held)
            for index, held in rest
            if not any(isinstance(part, RemovableHandle) for _, part in [("", held), *_parts(held)])
        ]
        self._copied = [index for index, held in rest if type(held) in _PLAIN]
        self._rebuilt = [index for index, held in rest if _is_simple(held)]
        index_of = {id(self.objects[i]): i for i in (*self._copied, *self._rebuilt)}
        self.parts = [
            {key: index_of[id(part)] for key, part in _parts(held) if id(part) in index_of}
            for held in self.objects
        ]

    def again(self) -> dict[int, Any]:
        """Return new copies of these objects by index, made by operations that Dynamo traces."""
        made = {index: self.objects[index].copy() for index in self._copied}
        for index in self._rebuilt:
            made[index] = object.__new__(type(self.objects[index]))
        for index in self._copied:
            for key, part in self.parts[index].items():
                made[index][key] = made[part]
        for index in self._rebuilt:
            for key, value in self.anew(index, made).items():
                object.__setattr__(made[index], key, value)
        return made

    def anew(self, index: int, made: dict[int, Any]) -> dict[str, Any]:
        """Return the attributes of an object, with the objects that were made anew."""
        parts, attributes = self.parts[index], self.attributes[index]
        return {key: made[parts[key]] if key in parts else attributes[key] for key in attributes}


_all: weakref.WeakValueDictionary[int, AtRest] = weakref.WeakValueDictionary()


@constant_while_compiling
def _seen_to_change() -> str:  # a str, as not every torch takes a list for a constant
    """Return what Dynamo has seen change in the `AtRest` that asks, one change a line."""
    [rest] = [_all[key] for key in private.raised("_asks") if key in _all]
    seen = private.attributes_set()
    found = []
    for index, held in enumerate(rest.objects):
        found += [f"{index} {key}" for key in seen.get(id(held), [])]
        if rest.elements[index] is not None and private.elements_changed(held):
            found.append(f"{index} ")
    return "\n".join(found)


def _has_dict(held: Any) -> bool:
    # A dict of hooks could have attributes, but nothing sets any.
    is_plain = type(held) is collections.OrderedDict
    return not is_plain and isinstance(getattr(held, "__dict__", None), dict)


def _is_simple(held: Any) -> bool:
    """Return True if a new object with the same attributes is a copy."""
    make: Any = type(held).__new__
    return make is object.__new__ and _has_dict(held)


def _attributes(held: Any) -> dict[str, Any]:
    own = vars(held).copy() if _has_dict(held) else {}
    return own | {key: getattr(held, key) for key in slots(held) if hasattr(held, key)}


def _elements(held: Any) -> Any:
    """Return a plain copy of a container's elements, or None for any other object."""
    if isinstance(held, dict):
        return dict(held)
    if isinstance(held, set):
        return set(held)
    return list(held) if isinstance(held, _CONTAINERS) else None


def _parts(held: Any) -> Iterable[tuple[Any, Any]]:
    """Return the replaceable parts of an object by key or attribute."""
    if type(held) in (list, collections.deque):
        return enumerate(held)
    if type(held) in _PLAIN:
        return [] if type(held) is set else held.items()
    return _attributes(held).items()


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
