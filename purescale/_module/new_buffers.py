"""The buffers that a forward has left in the modules of its call, or a refusal."""

from __future__ import annotations

import operator
from typing import Any

from .._module.blueprint import Objects
from .._module.registered import Tensors
from .._module.side_effects import FIX
from .._torch import private


@private.only_inlined
def new_buffers(objects: Objects, tensors: Tensors, copies: Tensors) -> Tensors:
    """Return the buffers after the forward, which wrote into the `copies` or replaced them."""
    now, before = objects.in_stores(), objects.registered
    if len(now) == len(before) and all(map(operator.is_, now, before)):
        return copies
    _check_registered(objects)
    _check_places(objects, tensors)
    return {**copies, **_replaced(objects, tensors, copies)}


def _check_registered(objects: Objects) -> None:
    """Refuse a parameter, buffer or module that was not there before the forward."""
    links, things = objects.links, objects.things
    places = {(number, key): None for number, key, _ in links.tensors}
    places |= {(number, key): things[other] for number, key, other in links.parts}
    for number, module, store in links.stores:
        for key, value in objects.holders[number].items():
            replaced = store != "_modules" and (number, key) in places
            if value is not places.get((number, key)) and not replaced:
                raise registered_error(things[module], store, key)


def registered_error(module: Any, store: str, key: str) -> RuntimeError:
    """Return the refusal of what a forward registered as `key` in a `store` of `module`."""
    if store == "_modules":
        return RuntimeError(
            f"the forward of the model put another module into {type(module).__name__}. Its "
            "tensors would not be arguments of `apply`. Fix: make it in `__init__`, or run "
            "`model(example_batch)` once before make_functional(model)."
        )
    return RuntimeError(
        f"the forward of the model registered {key!r} in its {type(module).__name__}. Parameters "
        "and buffers are arguments and results of `apply`, so all must exist from the start. "
        "Likely cause: the first forward makes it. Fix: run `model(example_batch)` once before "
        "make_functional(model)."
    )


def _replaced(objects: Objects, tensors: Tensors, copies: Tensors) -> Tensors:
    """Return the buffers that the forward replaced."""
    new = {}
    stores = {number for number, _, key in objects.links.stores}
    for number, key, name in objects.links.tensors:
        value = objects.part(number, key)
        if number not in stores or value is tensors[name]:
            continue
        if name not in copies:
            raise RuntimeError(
                f"the forward of the model replaced its parameter {name} by another tensor. {FIX}"
            )
        if value is None:
            raise RuntimeError(
                f"the forward of the model removed its buffer {name}, or set it to None. "
                "Buffers are the state of a step and must be the same ones before and after. "
                "Fix: fill it with zeros, or keep values of one forward in a plain attribute."
            )
        value = value.clone()  # it may be an argument
        if value.is_floating_point() and copies[name].is_floating_point():
            value = value.to(copies[name].dtype)
        new[name] = value
    return new


def _check_places(objects: Objects, tensors: Tensors) -> None:
    """Refuse a buffer that the forward replaced in only one of its places: the next call would put
    the new value in all.
    """
    stores = {number: key for number, _, key in objects.links.stores}
    first: dict[str, Any] = {}
    for number, key, name in objects.links.tensors:
        if number in stores:
            first.setdefault(name, objects.part(number, key))
    for (number, key, name), path in zip(objects.links.tensors, objects.links.paths, strict=True):
        value = objects.part(number, key)
        if name not in first or value is first[name]:
            continue
        # An attribute that a forward sets to something new is not state.
        if number in stores or value is tensors[name]:
            raise RuntimeError(
                f"the forward of the model replaced only one of its buffer {name} and {path}, "
                "which were one tensor with one value in `buffers`. Fix: write into it, "
                "`self.buffer.copy_(new)`, which both places see; or `.clone()` the second one "
                "where it is set."
            )
