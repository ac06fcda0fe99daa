"""Tensors in plain attributes that are state, as those of spiking nets: they become buffers."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from .._module.registered import MODULE_ATTRIBUTES, Tensors
from .._tree import tree as _tree


def state_tensors(model: nn.Module, patterns: Sequence[str]) -> Tensors:
    """Return the tensors in plain attributes whose names match a pattern. The tensor of a list or
    dict in an attribute has the name `part.attribute.key`.

    Raises:
        TypeError: `patterns` is a string.
        ValueError: A pattern matches nothing, or what is not a tensor (yet).
    """
    if isinstance(patterns, str):
        raise TypeError(
            f"state_attributes is the string {patterns!r}; expected a tuple of them. Fix: "
            f"state_attributes=({patterns!r},)."
        )
    if not patterns:
        return {}
    attributes, buffers = dict(_attributes(model)), [name for name, _ in model.named_buffers()]
    tensors: Tensors = {}
    for pattern in patterns:
        matching = [n for n in attributes if fnmatch.fnmatchcase(n, pattern)]
        if not (matching or any(fnmatch.fnmatchcase(n, pattern) for n in buffers)):
            plain = _tree.join_names(list(tensors_in_attributes(model)), 8)
            raise ValueError(
                f"state_attributes has {pattern!r}, which matches no attribute of the model; its "
                f"tensors in plain attributes are {plain}. Likely cause: a typing error, or "
                "the first forward makes it. Fix: a dotted name or a glob, "
                '`state_attributes=("*.mem",)`, and `model(example_batch)` once before '
                "make_functional."
            )
        for name in matching:
            value = attributes[name]
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"{name} matches {pattern!r} of state_attributes and is "
                    f"{_tree.described(value)}; expected a tensor. Likely cause: the first forward "
                    "makes it. Fix: run `model(example_batch)` once before make_functional, or "
                    "name less."
                )
            tensors[name] = value
    return tensors


def state_containers(model: nn.Module, patterns: Sequence[str]) -> list[Any]:
    """Return the lists and dicts in plain attributes whose elements have names that match, which
    must be alike after each call. One that is empty is among them, as it would lose what it gets.
    """
    return [
        value
        for name, value in (_plain_attributes(model) if patterns else ())
        if type(value) in (list, dict)
        and any(
            fnmatch.fnmatchcase(f"{name}.{key}", pattern)
            for key in (keys_of(value) or [0])
            for pattern in patterns
        )
    ]


def keys_of(container: list[Any] | dict[Any, Any]) -> list[Any]:
    """Return the keys of a dict, or the indices of a list."""
    return list(container) if isinstance(container, dict) else list(range(len(container)))


def tensors_in_attributes(model: nn.Module) -> Tensors:
    """Return all tensors in plain attributes by name."""
    return {name: value for name, value in _attributes(model) if isinstance(value, Tensor)}


def _attributes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the plain attributes of all modules, and what is in lists and dicts there, by name."""
    for name, value in _plain_attributes(model):
        if type(value) in (list, dict):
            yield from ((f"{name}.{key}", value[key]) for key in keys_of(value))
        else:
            yield name, value


def _plain_attributes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in MODULE_ATTRIBUTES:
                yield (f"{path}.{key}" if path else key), value
