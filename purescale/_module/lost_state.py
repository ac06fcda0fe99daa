"""Warnings of state that ends with a call: what a forward leaves in plain attributes, and what a
backward writes into buffers.
"""

from __future__ import annotations

import collections
import functools
import warnings
import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from .._module.recipe import ModelCopy, Recipe
from .._module.registered import MODULE_ATTRIBUTES
from .._torch import private
from .._torch.tracing import host_can_read, innermost, is_on_a_graph
from .._tree.fingerprint import fingerprint
from .._tree.leaves import is_constant, versions
from .._tree.pytree import join_names

Names = tuple[str, str]  # of an attribute, and of a tensor for state_attributes, or ""
Bits = tuple[list[torch.Size], int] | None  # of tensors that the host can read
# Off every graph, where no tensor was before. It is state or a cache, and a cache has the same bits
# in another call.
NewTensors = dict[Names, Bits]

_SEQUENCES = (list, tuple, collections.deque)
_VALUES = (Tensor, int, float, complex)


# ---- of what a forward leaves in plain attributes, once each -------------------------------------


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
    changed, new_tensors = _changes(recipe.make_copy(copy.arguments), copy, trains=train)
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
        pairs = _attribute_pairs(module, copy.objects[number_of[id(module)]], path)
        waiting += [(*pair, name, name) for *pair, name in pairs]
    while waiting:
        old, new, attribute, name = waiting.pop()
        if new is None or new is old or arguments & {id(old), id(new)}:
            continue
        if isinstance(old, _VALUES) and isinstance(new, _VALUES):
            if isinstance(new, Tensor):
                is_own = id(old) in number_of and copy.objects[number_of[id(old)]] is new
                if not (_are_equal(old, new) or (is_own and not _was_written(new))):
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
            waiting += [(*pair, path, "") for *pair, path in _attribute_pairs(old, new, attribute)]
        for key, *pair in items:
            waiting.append((*pair, attribute, f"{name}.{key}" if has_names else ""))
    return changed, new_tensors


@private.only_inlined
def _attribute_pairs(old: Any, new: Any, path: str) -> list[tuple[Any, Any, str]]:
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
def _was_written(tensor: Tensor) -> bool:
    """Return True if a tensor of a copy was written into after the copy was made."""
    return any(versions([innermost(tensor)]))


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


# ---- of what a backward writes into buffers ------------------------------------------------------


@private.only_inlined
def watch_backward(copy: ModelCopy, names: Collection[str]) -> None:
    """Warn if a backward writes into one of the named buffers of a copy: the call has returned its
    new buffers before. A backward that runs a part of the forward again writes into those that the
    forward has written; that is meant to be lost, and these are left out.

    A buffer is looked at when it is freed, with the graph that keeps it.
    """
    for name, (first, *_) in zip(
        copy.layout.arguments, copy.layout.places_of_arguments, strict=True
    ):
        buffer = copy.value(first)
        if name in names and isinstance(buffer, Tensor) and not _was_written(buffer):
            # A detached tensor counts the same writes.
            end = weakref.ref(buffer, functools.partial(_warn_if_written, name, buffer.detach()))
            _ends[id(end)] = end


# By id: calls `_warn_if_written` when its buffer is freed. Python's `weakref.finalize` does the
# same in Python code, which torch would compile after a graph break.
_ends: dict[int, Any] = {}


@private.only_inlined
def _warn_if_written(name: str, same_memory: Tensor, end: Any) -> None:
    del _ends[id(end)]
    if _was_written(same_memory):
        warnings.warn(
            f"a backward of the model wrote into its buffer {name} after the call had returned the "
            "new buffers, so the write is lost. Likely cause: a backward hook that keeps a number. "
            "Fix: compute the number from the gradients, between value_and_grad and the step.",
            stacklevel=2,
        )
