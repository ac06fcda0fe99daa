"""The buffers that a forward has left in its copy of the model, or a refusal."""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor, nn

from .._module.blueprint import ModelCopy
from .._module.recorder import STORES
from .._module.registered import Tensors
from .._module.side_effects import FIX
from .._torch import private
from .._tree import tree as _tree


@private.only_inlined
def new_buffers(copy: ModelCopy, tensors: Tensors, buffers: Tensors) -> Tensors:
    """Return the buffers after the forward, which wrote into `buffers` or replaced them."""
    now, before = copy.registered(), copy.before
    if len(now) == len(before) and all(map(operator.is_, now, before)):
        return buffers
    _refuse_registered(copy, tensors)
    return {**buffers, **_replaced(copy, tensors, buffers)}


def _refuse_registered(copy: ModelCopy, tensors: Tensors) -> None:
    """Refuse a parameter, buffer or module that was not there before the forward."""
    before = {(number, key): tensors[name] for number, key, name, _ in copy.links.tensors}
    before |= {(number, key): copy.objects[part] for number, key, part in copy.links.objects}
    for number, module, store in copy.links.stores:
        for key, value in copy.containers[number].items():
            may_replace = store != "_modules" and (number, key) in before
            if not may_replace and value is not before.get((number, key)):
                raise _registered_error(copy.objects[module], store, key)


def refuse_filled(copy: ModelCopy) -> None:
    """Refuse what the forward registered in an empty container that all copies share."""
    for module, attributes in zip(copy.objects, copy.plan.attributes, strict=False):
        for store in STORES:
            if isinstance(module, nn.Module) and attributes.get(store):
                raise _registered_error(module, store, next(iter(attributes[store])))


def _registered_error(module: Any, store: str, key: str) -> RuntimeError:
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


def _replaced(copy: ModelCopy, tensors: Tensors, buffers: Tensors) -> Tensors:
    """Return the buffers that the forward replaced."""
    stores = {number for number, _, _ in copy.links.stores}
    attributes = {(number, key) for number, key, _, _ in copy.links.state}
    in_attributes = {name for _, _, name, _ in copy.links.state}
    values: dict[str, Any] = {}  # at the first place where each is registered
    for number, key, name, _ in copy.links.tensors:
        if number in stores or (number, key) in attributes:
            values.setdefault(name, copy.get(number, key))
    new = {}
    for name, value in values.items():
        if value is tensors[name]:
            continue
        if name not in buffers:
            raise RuntimeError(
                f"the forward of the model replaced its parameter {name} by another tensor. {FIX}"
            )
        if value is None:
            raise RuntimeError(
                f"the forward of the model removed its buffer {name}, or set it to None. "
                "Buffers are the state of a step and must be the same ones before and after. "
                "Fix: fill it with zeros, or keep values of one forward in a plain attribute."
            )
        if name in in_attributes:
            _check_state(name, value, buffers[name])
        value = value.clone()  # it may be an argument
        if value.is_floating_point() and buffers[name].is_floating_point():
            value = value.to(buffers[name].dtype)
        new[name] = value
    for number, key, name, path in copy.links.tensors:
        value = copy.get(number, key)
        # An attribute that a forward sets to something new is not state.
        is_state = number in stores or (number, key) in attributes or value is tensors[name]
        if is_state and value is not values[name]:
            raise RuntimeError(
                f"the forward of the model replaced only one of its buffer {name} and {path}, "
                "which were one tensor with one value in `buffers`. Fix: write into it, "
                "`self.buffer.copy_(new)`, which both places see; or `.clone()` the second one "
                "where it is set."
            )
    return new


def _check_state(name: str, value: Any, before: Tensor) -> None:
    """Refuse a value of a state attribute that another call could not start from."""
    if isinstance(value, Tensor) and value.shape == before.shape:
        return
    now = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else _tree.described(value)
    raise RuntimeError(
        f"the forward of the model set {name}, which state_attributes names, to {now}; expected a "
        f"tensor of shape {tuple(before.shape)}, as before. Likely cause: another batch size than "
        "that of the batch that made it, or a reset in forward. Fix: run `model(example_batch)` "
        "with the batch size of the calls before make_functional, and reset by "
        f"`buffers | {{{name!r}: torch.zeros(...)}}`."
    )
