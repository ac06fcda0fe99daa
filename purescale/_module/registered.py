"""The tensors of a module by name: parameters, buffers, and state in plain attributes. Tensors over
the same memory share one name.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._torch import dtensor
from .._tree import pytree

Tensors = dict[str, Tensor]

# The attributes that torch gives each module, with their types. What is registered is in these.
MODULE_ATTRIBUTES = {key: type(value) for key, value in vars(nn.Module()).items()}
REGISTRY_NAMES = ("_parameters", "_buffers", "_modules")


class RegisteredTensors(NamedTuple):
    """The tensors of a module by first name, parameters before buffers."""

    params: Tensors
    buffers: Tensors
    first_name_of: dict[int, str]  # by id of a registered tensor: the first name of its memory
    aliases: Tensors  # by own name: tensors over the same memory as an earlier one


def registered_tensors(model: nn.Module, state: Tensors | None = None) -> RegisteredTensors:
    """Return the parameters and buffers of `model`, and the tensors of `state` as buffers. A tensor
    that is registered twice, and two tensors with the same elements in the same memory, count as
    one.

    Raises:
        ValueError: Two tensors share memory in another way, or only one of the two is trained.
    """
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    buffers |= state or {}
    first_name_of: dict[int, str] = {}
    aliases: Tensors = {}
    spans: dict[Any, _Span] = {}
    all_frozen = not any(param.requires_grad for param in params.values())

    def is_trained(tensor: Tensor) -> bool:
        return isinstance(tensor, nn.Parameter) and (tensor.requires_grad or all_frozen)

    for name, tensor in (*params.items(), *buffers.items()):
        if id(tensor) in first_name_of:  # a parameter that is a buffer too
            continue
        span = _span(name, tensor)
        first = span and spans.setdefault(span.elements, span)
        first_name_of[id(tensor)] = first.name if first else name
        if first and span and first is not span:
            aliases[name] = tensor
            if is_trained(tensor) != is_trained(first.tensor):
                raise _sharing_error(first, span)
    in_order = sorted(spans.values(), key=lambda span: (span.device, span.start))
    for span, after in itertools.pairwise(in_order):
        if span.device == after.device and after.start < span.end:
            raise _sharing_error(span, after)
    return RegisteredTensors(
        {name: tensor for name, tensor in params.items() if first_name_of[id(tensor)] == name},
        {name: tensor for name, tensor in buffers.items() if first_name_of[id(tensor)] == name},
        first_name_of,
        aliases,
    )


# ---- memory --------------------------------------------------------------------------------------


class _Span(NamedTuple):
    """The range of memory that holds the elements of a tensor, in bytes."""

    name: str
    tensor: Tensor
    device: str
    start: int
    end: int
    elements: Any  # equal for two tensors with the same elements in the same memory


def _span(name: str, tensor: Tensor) -> _Span | None:
    """Return the span of a dense tensor; None for one without an address: empty, sparse, on meta,
    fake, or a subclass that wraps other tensors.
    """
    if nn.parameter.is_lazy(tensor) or tensor.is_nested or tensor.layout is not torch.strided:
        return None
    local = dtensor.local_shard(tensor.detach(), on_graph=False)
    try:
        start = local.data_ptr()
    except RuntimeError:
        return None
    if not start:
        return None
    shape, device = tuple(local.shape), str(local.device)
    strides = tuple(s if n > 1 else 0 for n, s in zip(shape, local.stride(), strict=True))
    last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    read_as = (tuple(tensor.shape), local.dtype, local.is_conj(), local.is_neg())
    elements = (device, start, shape, strides, read_as)
    end = start + (last + 1) * local.itemsize
    return _Span(name, tensor, device, start, end, elements)


def _sharing_error(one: _Span, other: _Span) -> ValueError:
    return ValueError(
        f"{one.name} and {other.name} of the model share memory but are not one tensor, or only "
        "one of them requires a gradient; as arguments they would be separate. Likely cause: one "
        "was made from a view of the other, such as `.detach()`, `.data` or a slice, or both from "
        "one tensor. Fix: `.clone()` one; to tie two weights `head.weight = embed.weight`."
    )


# ---- state in plain attributes, as that of spiking nets: it becomes buffers ----------------------


def state_in_attributes(model: nn.Module, patterns: Sequence[str]) -> Tensors:
    """Return the tensors in plain attributes whose names match a pattern. The tensor of a list or
    dict has the name `part.attribute.key`.

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
    attributes = plain_attributes(model)
    buffers = [name for name, _ in model.named_buffers()]
    tensors: Tensors = {}
    for pattern in patterns:
        matching = fnmatch.filter(attributes, pattern)
        others = [name for name in matching if not isinstance(attributes[name], Tensor)]
        if others or not (matching or fnmatch.filter(buffers, pattern)):
            what = "nothing"
            if others:
                what = f"{others[0]}, which is {pytree.describe_argument(attributes[others[0]])}"
            names = [name for name, value in attributes.items() if isinstance(value, Tensor)]
            raise ValueError(
                f"state_attributes has {pattern!r}, which matches {what}; the tensors in plain "
                f"attributes of the model are {pytree.join_names(names)}. Likely cause: the first "
                "forward makes it, or it is in a list or dict. Fix: run `model(example_batch)` "
                "once before make_functional; name the elements of a list of fixed length or of a "
                "dict, 'layer.attribute.*'."
            )
        tensors |= {name: attributes[name] for name in matching}
    return tensors


def keys_of(container: list[Any] | dict[Any, Any]) -> list[Any]:
    """Return the keys of a dict, or the indices of a list."""
    return list(container) if isinstance(container, dict) else list(range(len(container)))


def plain_attributes(model: nn.Module) -> dict[str, Any]:
    """Return the plain attributes of all modules by name, with what is in lists and dicts there in
    place of these.
    """
    attributes: dict[str, Any] = {}
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            name = f"{path}.{key}" if path else key
            if key in MODULE_ATTRIBUTES:
                continue
            if type(value) in (list, dict):
                attributes |= {f"{name}.{inner}": value[inner] for inner in keys_of(value)}
            else:
                attributes[name] = value
    return attributes


def check_dicts(params: Any, buffers: Any) -> None:
    """Check that `params` and `buffers` are dicts of tensors."""
    for which, tree in (("params", params), ("buffers", buffers)):
        if not isinstance(tree, dict):
            raise TypeError(
                f"{which} is {pytree.describe_argument(tree)}; expected the dict of tensors by "
                "dotted name that make_functional returns. Likely cause: a missing argument. Fix: "
                "`out, buffers = apply(params, buffers, x)`; a model without buffers takes {}."
            )
        for name, value in tree.items():
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"{which}[{name!r}] is {type(value).__name__} {value!r}; expected a tensor. "
                    f"Fix: pass the {which} that make_functional returned."
                )
