"""The buffers that a forward has left in its copy of the model, or a refusal."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .._module.layout import StateContainer
from .._module.model_copy import ModelCopy
from .._module.registered import Tensors
from .._module.side_effects import FIX
from .._torch import private
from .._tree import tree as _tree


@private.only_inlined
def new_buffers(copy: ModelCopy, buffers: Tensors) -> Tensors:
    """Return the buffers after the forward, which wrote into `buffers` or replaced them."""
    if copy.registers_as_before():
        return buffers
    refuse_new_registrations(copy)
    for state in copy.layout.state_containers:
        if not copy.follow(state):
            raise _container_error(copy, state)
    return {**buffers, **_replaced(copy, buffers)}


def refuse_new_registrations(copy: ModelCopy) -> None:
    """Refuse a parameter, buffer or module that was not there before the forward."""
    for registration in copy.new_registrations():
        raise _registered_error(*registration)


def _container_error(copy: ModelCopy, state: StateContainer) -> RuntimeError:
    path = state.places[0].path
    return RuntimeError(
        f"the forward of the model left {_tree.described(copy.value(state.places[0]))} in {path}, "
        "whose elements state_attributes names; expected in all its places one "
        f"{type(copy.objects[state.container]).__name__} with the keys {list(state.keys)}, as "
        "before. Likely cause: it grows in each call, or the first calls fill it. Fix: run "
        "`model(example_batch)` until it is full before make_functional, and keep its length: "
        "`self.h = self.h[1:] + [x]`."
    )


def _registered_error(module: nn.Module, store: str, key: str) -> RuntimeError:
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


def _replaced(copy: ModelCopy, buffers: Tensors) -> Tensors:
    """Return the buffers that the forward replaced."""
    new = {}
    for name, (first, *others) in copy.layout.arguments:
        before, value = copy.arguments[name], copy.value(first)
        if value is not before:
            if name not in buffers:
                raise RuntimeError(
                    f"the forward of the model replaced its parameter {name} by another tensor. "
                    f"{FIX}"
                )
            new[name] = _new_buffer(name, value, buffers[name], is_attribute=not first.in_store)
        for place in others:
            other = copy.value(place)
            # An attribute that a forward sets to something new is not state.
            is_state = place.in_store or not first.in_store or other is before
            if is_state and other is not value:
                raise RuntimeError(
                    f"the forward of the model replaced only one of its buffer {name} and "
                    f"{place.path}, which were one tensor with one value in `buffers`. Fix: write "
                    "into it, `self.buffer.copy_(new)`, which both places see; or `.clone()` the "
                    "second one where it is set."
                )
    return new


def _new_buffer(name: str, value: Any, before: Tensor, *, is_attribute: bool) -> Tensor:
    """Return the new value of a buffer that the forward replaced."""
    if value is None:
        raise RuntimeError(
            f"the forward of the model removed its buffer {name}, or set it to None. "
            "Buffers are the state of a step and must be the same ones before and after. "
            "Fix: fill it with zeros, or keep values of one forward in a plain attribute."
        )
    if is_attribute:
        _check_state(name, value, before)
    new: Tensor = value.clone()  # it may be an argument
    if new.is_floating_point() and before.is_floating_point():
        new = new.to(before.dtype)
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
