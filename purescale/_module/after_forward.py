"""What a forward leaves in its copy of the model: new buffers, a refusal of what it did, a warning
of state that ends with the call; and the copy that a graph keeps, because its backward may run a
part of the forward again.
"""

from __future__ import annotations

import collections
import functools
import inspect
import itertools
import operator
import warnings
import weakref
from collections.abc import Collection
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn

from .._module.recipe import ModelCopy, Recipe, StateContainer
from .._module.registered import MODULE_ATTRIBUTES, STORE_NAMES, Tensors, keys_of
from .._torch import private
from .._torch.tracing import (
    PLAIN_TYPES,
    host_can_read,
    innermost,
    is_on_a_graph,
)
from .._tree import pytree
from .._tree.leaves import is_constant, versions
from .._tree.pytree import join_names
from .._tree.states import fingerprint

_FIX = (
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
        stores = map(dict.values, copy.store_dicts)
        now = list(itertools.chain.from_iterable(stores))
        before = map(copy.objects.__getitem__, layout.registered)
        if len(now) == len(layout.registered) and all(map(operator.is_, now, before)):
            return own_buffers
    check_registrations(copy)
    for state in layout.state_containers:
        _adopt_container(copy, state)
    return {**own_buffers, **_replaced(copy, own_buffers)}


def check_registrations(copy: ModelCopy) -> None:
    """Refuse a parameter, buffer or module that was not there before the forward."""
    layout = copy.layout
    before_forward = {(h, key): copy.objects[number] for h, key, number in layout.links}
    number_of_store = {(module, key): store for store, module, key in layout.store_rows}
    for module in layout.modules:
        for name in STORE_NAMES:
            store = number_of_store.get((module, name), -1)
            for key, value in copy.contents[module].get(name, {}).items():
                before = before_forward.get((store, key))
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


def _replaced(copy: ModelCopy, own_buffers: Tensors) -> Tensors:
    """Return the buffers that the forward replaced."""
    new = {}
    for name, (first, *others) in copy.layout.places_of_arguments:
        before, value = copy.arguments[name], copy.value(first)
        if value is not before:
            if name not in own_buffers:
                raise RuntimeError(
                    f"the forward of the model {'removed' if value is None else 'replaced'} its "
                    f"parameter {name}. {_FIX}"
                )
            new[name] = _new_buffer(name, value, own_buffers[name], is_attribute=not first.in_store)
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


def stamps(tensors: Collection[Tensor], transformed: bool, *, addresses: bool) -> list[int]:
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
        kind, cure = f"parameter {name}, so params[{name!r}] changed", _FIX
        if is_constant(tensors[name]):
            kind = f"buffer {name}, which is not dense and therefore a constant"
            cure = f"buffers[{name!r}] has changed. Fix: `.to_dense()` it before make_functional."
        raise RuntimeError(f"the forward of the model wrote into its {kind}. {cure}")


# ---- the copy that a graph keeps -----------------------------------------------------------------


@private.only_inlined
def rerun_under(modes: list[Any], modules: list[nn.Module]) -> None:
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


# ---- warnings, once each, of what a forward leaves in plain attributes ---------------------------

Names = tuple[str, str]  # of an attribute, and of a tensor for state_attributes, or ""
Bits = tuple[list[torch.Size], int] | None  # of tensors that the host can read
# Off every graph, where no tensor was before. It is state or a cache, and a cache has the same bits
# in another call.
NewTensors = dict[Names, Bits]

_SEQUENCES = (list, tuple, collections.deque)
_VALUES = (Tensor, int, float, complex)


@private.only_inlined
def warn_of_attributes(
    recipe: Recipe, copy: ModelCopy, train: bool, first_calls: dict[bool, NewTensors]
) -> None:
    """Warn of state in the attributes of a copy after its forward.

    Args:
        recipe: What the copy was made by.
        copy: The copy.
        train: The mode of the call.
        first_calls: By mode: {} before the first call; the new tensors of the first call if there
            were any, until the second one. All modes are removed after a warning.
    """
    first = first_calls.pop(train, {})
    changed, new_tensors = _changes(recipe.make(copy.arguments), copy, trains=train)
    for names, bits in new_tensors.items():
        before = first.get(names)
        if bits and before and bits[0] == before[0] and bits[1] != before[1]:
            changed.append(names)
    if changed:
        first_calls.clear()
        warnings.warn(_describe(changed), stacklevel=4)
    elif new_tensors and not first:
        first_calls[train] = new_tensors


@private.only_inlined
def _changes(before: ModelCopy, copy: ModelCopy, *, trains: bool) -> tuple[list[Names], NewTensors]:
    """Return the plain attributes whose values after the forward differ from those of a copy that
    did not run, and their new tensors.

    Left out is what holds no state: flags, such as one that a cache is full; tensors that are equal
    to those before; parameters and buffers.
    """
    changed: list[Names] = []
    new_tensors: NewTensors = {}
    arguments = set(map(id, copy.arguments.values()))
    number_of = {id(obj): number for number, obj in enumerate(before.objects)}
    seen = set(zip(map(id, before.modules()), map(id, copy.modules()), strict=True))
    # Old and new value, the name of the attribute, and the name for state_attributes or "".
    waiting: list[tuple[Any, Any, str, str]] = []
    for path, module in before.root.named_modules():
        pairs = _attributes(module, copy.objects[number_of[id(module)]], path)
        waiting += [(*pair, name, name) for *pair, name in pairs]
    while waiting:
        old, new, attribute, name = waiting.pop()
        if new is None or new is old or arguments & {id(old), id(new)}:
            continue
        if isinstance(old, _VALUES) and isinstance(new, _VALUES):
            if isinstance(new, Tensor):
                is_own = id(old) in number_of and copy.objects[number_of[id(old)]] is new
                if not (_are_equal(old, new) or (is_own and not any(versions([innermost(new)])))):
                    changed.append((attribute, name))
            elif not isinstance(new, bool) and not _are_equal(old, new):
                changed.append((attribute, ""))
            continue
        if (id(old), id(new)) in seen:
            continue
        seen.add((id(old), id(new)))
        items: list[tuple[Any, Any, Any]] = []
        has_names = name == attribute and type(new) in (list, dict)
        if isinstance(old, _SEQUENCES) and isinstance(new, _SEQUENCES):
            if len(old) != len(new):
                changed.append((attribute, ""))
            items = [(n, *pair) for n, pair in enumerate(zip(old, new, strict=False))]
        elif isinstance(old, dict) and isinstance(new, dict):
            items = [(key, old.get(key), value) for key, value in new.items()]
        elif old is None:
            leaves = [x for x in private.pytree.tree_leaves(new) if isinstance(x, Tensor)]
            leaves = [leaf for leaf in leaves if id(leaf) not in arguments]
            names = attribute, name if isinstance(new, Tensor) else ""
            if trains and is_on_a_graph(leaves):
                changed.append(names)
            elif leaves:
                new_tensors[names] = _bits(leaves)
        elif type(old) is type(new) and hasattr(old, "__dict__"):
            waiting += [(*pair, path, "") for *pair, path in _attributes(old, new, attribute)]
        for key, *pair in items:
            waiting.append((*pair, attribute, f"{name}.{key}" if has_names else ""))
    return changed, new_tensors


@private.only_inlined
def _attributes(old: Any, new: Any, path: str) -> list[tuple[Any, Any, str]]:
    """Return the old and new values of the attributes of an object, with their names."""
    skipped = MODULE_ATTRIBUTES if isinstance(new, nn.Module) else {}
    return [
        (vars(old).get(key, getattr(type(old), key, None)), value, f"{path}.{key}".lstrip("."))
        for key, value in vars(new).items()
        if key not in skipped
    ]


@private.only_inlined
def _are_equal(old: Any, new: Any) -> bool:
    """Return True if two values are equal. Tensors that the host cannot read are not."""
    if not (isinstance(old, Tensor) and isinstance(new, Tensor)):
        return not isinstance(new, Tensor) and bool(old == new or new != new)
    if (old.shape, old.dtype) != (new.shape, new.dtype) or is_constant(old) or is_constant(new):
        return False
    return host_can_read([old, new]) and torch.equal(old, new)


@private.only_inlined
def _bits(tensors: list[Tensor]) -> Bits:
    """Return the shapes of tensors and a number that their bits give; None if it cannot be read."""
    if any(map(is_constant, tensors)) or not host_can_read(tensors):
        return None
    return [tensor.shape for tensor in tensors], int(fingerprint(tensors))


@private.only_inlined
def _describe(changed: list[Names]) -> str:
    tensors = sorted({name for _, name in changed if name})
    others = sorted({attribute for attribute, name in changed if not name})
    cure = (
        f"state_attributes=({', '.join(map(repr, tensors[:5]))},) of make_functional makes buffers "
        "of such tensors, after `model(example_batch)` was run once"
        if tensors
        else "keep a count in a buffer, `self.register_buffer('count', torch.tensor(0))`, into "
        "which forward writes, and tensors in a list of fixed length, whose elements "
        "state_attributes names; what you only look at, let the call return, `method=lambda m, x: "
        f"(m(x), m.{others[0]})`"
    )
    return (
        f"the forward of the model left another value in its plain attributes "
        f"{join_names(tensors + others)}, which end with the call: the next one begins with those "
        f"of make_functional. Fix: {cure}. Ignore this where nothing reads them later."
    )


# ---- warnings of what a backward writes into buffers ---------------------------------------------


@private.only_inlined
def watch_backward(copy: ModelCopy, names: Collection[str]) -> None:
    """Warn if a backward writes into one of the named buffers of a copy: the call has returned its
    new buffers before. A backward that runs a part of the forward again writes into those that the
    forward has written; that is meant to be lost, and these are left out.

    A buffer is looked at when it is freed, with the graph that keeps it.
    """
    for name, (first, *_) in copy.layout.places_of_arguments:
        buffer = copy.value(first)
        if name in names and isinstance(buffer, Tensor) and not any(versions([innermost(buffer)])):
            # A detached tensor counts the same writes.
            end = weakref.ref(buffer, functools.partial(_warn_if_written, name, buffer.detach()))
            _ends[id(end)] = end


# By id: calls `_warn_if_written` when its buffer is freed. Python's `weakref.finalize` does the
# same in Python code, which torch would compile after a graph break.
_ends: dict[int, Any] = {}


@private.only_inlined
def _warn_if_written(name: str, same_memory: Tensor, end: Any) -> None:
    del _ends[id(end)]
    if any(versions([innermost(same_memory)])):
        warnings.warn(
            f"a backward of the model wrote into its buffer {name} after the call had returned the "
            "new buffers, so the write is lost. Likely cause: a backward hook that keeps a number. "
            "Fix: compute the number from the gradients, between value_and_grad and the step.",
            stacklevel=2,
        )
