"""How everything that a forward may change in a module stands between calls."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .._module.references import Reference, slots
from .._torch import private

_CONTAINERS = (list, dict, set, collections.deque)
_PLAIN = (*_CONTAINERS, collections.OrderedDict, collections.defaultdict)

# An object, by its index; its attribute, or "" for its elements; what stands there, as `_now` says.
_Change = tuple[int, str, Any]


class AtRest:
    """Modules, their hooks, lists, dicts, sets, deques and helper objects: which attributes they
    have and what they hold, as of now.

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
        self._for_eager_calls([store for module in modules for store in private.stores(module)])
        # No compiler follows a hook that is put into an empty dict of hooks, so that stays one.
        left = set(map(id, (*modules, *(held for held in hooks if not held))))
        self._for_new_modules(left)
        self._asks = False
        _all[id(self)] = self

    def _for_eager_calls(self, stores: list[dict[str, Any]]) -> None:
        """Sort it by what it costs to put it back."""
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
        """Put all of it back, after an eager call."""
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

    # ---- followed by a compiler, which guards all that it reads: so nothing else is read ---------

    def put_back(self) -> None:
        """Put back what the compiler has seen change."""
        for index, key in self._changed():
            self._put(index, key, self._before(index, key))

    def changes(self) -> list[_Change]:
        """What the compiler has seen change, as it stands now, for `put`."""
        return [(index, key, self._now(index, key)) for index, key in self._changed()]

    def put(self, changes: list[_Change]) -> None:
        """Put it there again."""
        for index, key, state in changes:
            self._put(index, key, state)

    def _changed(self) -> list[tuple[int, str]]:
        # Any value that tells one `AtRest` from another would be guarded, so that each model had a
        # graph of its own; a flag that comes down again is not.
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
        """Give an object its elements, or an attribute: of a list the one value, or none."""
        held = self.objects[index]
        if not key:
            _fill(held, state)
        elif state:
            object.__setattr__(held, key, state[0])
        elif hasattr(held, key):
            delattr(held, key)

    # ---- modules that are made for one call ------------------------------------------------------

    def _for_new_modules(self, left: set[int]) -> None:
        """Find what is made anew with them: all but what is in `left`, and what has no simple copy.
        Of each object, modules too: under which key it holds which of these.
        """
        everything = list(enumerate(self.objects))
        rest = [(index, held) for index, held in everything if id(held) not in left]
        # Of a handle of a hook the compiler does not even follow that it is there.
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
        """All of that anew, by index, in a way that the compiler follows."""
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
        """The attributes of an object, with what was made anew in them."""
        parts, attributes = self.parts[index], self.attributes[index]
        return {key: made[parts[key]] if key in parts else attributes[key] for key in attributes}


_all: weakref.WeakValueDictionary[int, AtRest] = weakref.WeakValueDictionary()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _seen_to_change() -> str:  # which every torch takes for a constant, as it does no list
    """What the compiler has seen change of the one `AtRest` that asks."""
    [rest] = [_all[key] for key in private.raised("_asks") if key in _all]
    seen = private.attributes_set()
    found = []
    for index, held in enumerate(rest.objects):
        found += [f"{index} {key}" for key in seen.get(id(held), [])]
        if rest.elements[index] is not None and private.elements_changed(held):
            found.append(f"{index} ")
    return "\n".join(found)


def _has_dict(held: Any) -> bool:
    # a dict of hooks could have attributes too, and nothing gives it any
    is_plain = type(held) is collections.OrderedDict
    return not is_plain and isinstance(getattr(held, "__dict__", None), dict)


def _is_simple(held: Any) -> bool:
    """Whether a new object with the same attributes is a copy."""
    make: Any = type(held).__new__
    return make is object.__new__ and _has_dict(held)


def _attributes(held: Any) -> dict[str, Any]:
    own = vars(held).copy() if _has_dict(held) else {}
    return own | {key: getattr(held, key) for key in slots(held) if hasattr(held, key)}


def _elements(held: Any) -> Any:
    """A plain copy of what a container holds; None of anything else."""
    if isinstance(held, dict):
        return dict(held)
    if isinstance(held, set):
        return set(held)
    return list(held) if isinstance(held, _CONTAINERS) else None


def _parts(held: Any) -> Iterable[tuple[Any, Any]]:
    """What an object holds, by the key or attribute under which another can be put there."""
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
