"""What a forward leaves in its copy of the model: new buffers, or a refusal of what it did; and
the copy that a graph keeps, because its backward may run a part of the forward again.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import weakref
from collections.abc import Collection
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn

from .._module.recipe import ModelCopy, StateContainer
from .._module.registered import REGISTRY_NAMES, Tensors, keys_of
from .._torch import private
from .._torch.tracing import PLAIN_TYPES, innermost
from .._tree import pytree
from .._tree.leaves import is_constant, versions

_PARAMETER_FIX = (
    "A parameter is an argument here. Fix: compute with a changed copy in forward, or change "
    "params between steps. If the forward alone moves it, like a codebook, call "
    "`requires_grad_(False)` on it before make_functional: it is then a buffer."
)


@private.only_inlined
def new_buffers(copy: ModelCopy, own_buffers: Tensors) -> Tensors:
    """Return the buffers after the forward, which wrote into `own_buffers` or replaced them."""
    layout = copy.layout
    for number, path in layout.views:
        if not torch.compiler.is_dynamo_compiling() and versions([copy.objects[number]]) != [0]:
            raise RuntimeError(
                f"the forward of the model wrote into {path}, which shares memory with another "
                "plain attribute. In the model the write changes both; in a call they are "
                "separate. Fix: `.clone()` it where it is set."
            )
    if not layout.has_state:
        values = map(dict.values, copy.registries)
        now = list(itertools.chain.from_iterable(values))
        before = map(copy.objects.__getitem__, layout.registry_values)
        if len(now) == len(layout.registry_values) and all(map(operator.is_, now, before)):
            return own_buffers
    check_registrations(copy)
    for state in layout.state_containers:
        _adopt_container(copy, state)
    return {**own_buffers, **_replaced_buffers(copy, own_buffers)}


def check_registrations(copy: ModelCopy) -> None:
    """Refuse a parameter, buffer or module that was not there before the forward."""
    layout = copy.layout
    before_forward = {(h, key): copy.objects[number] for h, key, number in layout.links}
    number_of_registry = {(module, key): registry for registry, module, key in layout.registry_rows}
    for module in layout.modules:
        for name in REGISTRY_NAMES:
            registry = number_of_registry.get((module, name), -1)
            for key, value in copy.contents[module].get(name, {}).items():
                before = before_forward.get((registry, key))
                if value is not before and not _may_replace(before, value, copy):
                    raise RuntimeError(
                        f"the forward of the model registered {key!r} in its "
                        f"{type(copy.objects[module]).__name__}. Parameters, buffers and modules "
                        "must exist from the start. Likely cause: the first forward makes it. Fix: "
                        "run `model(example_batch)` once before make_functional(model)."
                    )


def _may_replace(before: Any, after: Any, copy: ModelCopy) -> bool:
    """Return True if a forward may put `after` in place of `before`: any tensor, None, or a module
    of arguments alone, such as the attention that BigBird makes for a short input.
    """
    if before is None or not isinstance(after, nn.Module):
        return before is not None
    arguments = set(map(id, copy.arguments.values()))
    return all(id(t) in arguments for t in (*after.parameters(), *after.buffers()))


def _adopt_container(copy: ModelCopy, state: StateContainer) -> None:
    """Let the list or dict that the forward has put in place of one with state be that one. Refuse
    one that is not like it, or is not in all of its places.
    """
    first, *others = map(copy.value, state.places)
    before = copy.contents[state.container]
    in_all_places = all(other is first for other in others)
    if not (in_all_places and type(first) is type(before) and tuple(keys_of(first)) == state.keys):
        raise RuntimeError(
            f"the forward of the model left {pytree.describe_argument(first)} in "
            f"{state.places[0].path}, whose elements state_attributes names; expected in all its "
            f"places one {type(before).__name__} with the keys {list(state.keys)} in this order, "
            "as before. Likely cause: it grows in each call, or the first calls fill it. Fix: run "
            "`model(example_batch)` until it is full before make_functional, and keep its length: "
            "`self.h = self.h[1:] + [x]`."
        )
    copy.contents[state.container] = first


def _replaced_buffers(copy: ModelCopy, own_buffers: Tensors) -> Tensors:
    """Return the buffers that the forward replaced."""
    new = {}
    for name, (first, *others) in zip(
        copy.layout.arguments, copy.layout.places_of_arguments, strict=True
    ):
        before, value = copy.arguments[name], copy.value(first)
        if value is not before:
            if name not in own_buffers:
                raise RuntimeError(
                    f"the forward of the model {'removed' if value is None else 'replaced'} its "
                    f"parameter {name}. {_PARAMETER_FIX}"
                )
            new[name] = _new_buffer(
                name, value, own_buffers[name], is_attribute=not first.in_registry
            )
        for place in others:
            other = copy.value(place)
            # An attribute that a forward sets to something new is not state.
            is_state = place.in_registry or not first.in_registry or other is before
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
    if value is None or (
        is_attribute and not (isinstance(value, Tensor) and value.shape == before.shape)
    ):
        raise RuntimeError(
            f"the forward of the model removed its buffer {name}, or set it to "
            f"{pytree.describe_argument(value)}; expected a tensor of shape {tuple(before.shape)}, "
            "as before. Likely cause: another batch size, or a reset in forward. Fix: run "
            "`model(example_batch)` with the batch size of the calls before make_functional, and "
            f"reset by `buffers | {{{name!r}: torch.zeros(...)}}`, or in forward by zeros."
        )
    new: Tensor = value.clone()  # it may be an argument
    if new.is_floating_point() and before.is_floating_point():
        new = new.to(before.dtype)
    return new


# ---- writes into tensors that are not the forward's own ------------------------------------------


def versions_and_addresses(
    tensors: Collection[Tensor], transformed: bool, *, addresses: bool
) -> list[int]:
    """Return what a write changes: for each tensor the count of writes, and with `addresses` after
    these for each its address, which a new `.data` moves. In a transform tensors have none.
    """
    if transformed:
        return versions(list(map(innermost, tensors)))
    if addresses and set(map(type, tensors)) <= PLAIN_TYPES:
        with suppress(RuntimeError):  # one is sparse, or was made under inference_mode
            return [*map(private.version, tensors), *map(Tensor.data_ptr, tensors)]
    return versions(tensors)


def check_writes(tensors: Tensors, before: list[int], after: list[int], values: Tensors) -> None:
    """Refuse a write into a parameter or constant. `values`: copies of parameters to compare."""
    n = len(tensors)
    written = [name for at, name in enumerate(tensors) if before[at::n] != after[at::n]]
    written += [
        name
        for name, value in values.items()
        if not torch.allclose(tensors[name], value, rtol=0, atol=0, equal_nan=True)
    ]
    for name in written[:1]:
        kind, cure = f"parameter {name}, so params[{name!r}] changed", _PARAMETER_FIX
        if is_constant(tensors[name]):
            kind = f"buffer {name}, which is not dense and therefore a constant"
            cure = f"buffers[{name!r}] has changed. Fix: `.to_dense()` it before make_functional."
        raise RuntimeError(f"the forward of the model wrote into its {kind}. {cure}")


# ---- the copy that a graph keeps -----------------------------------------------------------------


@private.only_inlined
def keep_modes_for_rerun(modes: list[Any], modules: list[nn.Module]) -> None:
    """Let what runs again run under these function modes, even after they were exited."""
    for module in modules:
        vars(module)["forward"] = functools.partial(_call_under, modes, _weak_forward(module))


def _call_under(modes: list[Any], forward: Any, *args: Any, **kwargs: Any) -> Any:
    with ExitStack() as entered:
        active = private.function_modes()
        for mode in modes:
            if not any(mode is other for other in active):
                entered.enter_context(mode)
        return forward()(*args, **kwargs)


@private.only_inlined
def _weak_forward(module: nn.Module) -> Any:
    """Return a function that returns the module's forward without keeping the module alive."""
    forward = module.forward
    if inspect.ismethod(forward) and forward.__self__ is module:
        return weakref.WeakMethod(forward)
    return lambda: forward
