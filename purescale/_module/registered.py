"""Parameters and buffers of a module by name; tensors over the same memory share one name."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._torch import dtensor, private

Tensors = dict[str, Tensor]

# The attributes that torch gives each module, with their types. What is registered is in these.
MODULE_ATTRIBUTES = {key: type(value) for key, value in vars(nn.Module()).items()}
STORES = ("_parameters", "_buffers", "_modules")


class RegisteredTensors(NamedTuple):
    """The tensors of a module by first name, parameters before buffers."""

    params: Tensors
    buffers: Tensors
    names: dict[int, str]  # by the id of every registered tensor: the first name of its memory
    aliases: Tensors  # by own name: tensors over the same memory as an earlier one
    overlaps: list[tuple[str, str]]  # names of two tensors that share a part of their memory


def registered_tensors(model: nn.Module, state: Tensors | None = None) -> RegisteredTensors:
    """Return the parameters and buffers of `model`, and the tensors of `state` as buffers. A tensor
    that is registered twice, and two tensors with the same elements in the same memory, count as
    one.
    """
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    buffers |= state or {}
    names: dict[int, str] = {}
    aliases: Tensors = {}
    spans: dict[Any, _Span] = {}
    for place, (name, tensor) in enumerate((*params.items(), *buffers.items())):
        if id(tensor) in names:  # a parameter that is a buffer too
            continue
        span = _span(place, name, tensor)
        names[id(tensor)] = name if span is None else spans.setdefault(span.elements, span).name
        if names[id(tensor)] != name:
            aliases[name] = tensor
    return RegisteredTensors(
        {name: tensor for name, tensor in params.items() if names[id(tensor)] == name},
        {name: tensor for name, tensor in buffers.items() if names[id(tensor)] == name},
        names,
        aliases,
        [(first.name, other.name) for first, other in _overlaps(list(spans.values()))],
    )


def check_shared_memory(registered: RegisteredTensors) -> None:
    """Refuse a trained tensor that shares memory with another, unless both are trained as one."""
    tensors = registered.params | registered.buffers
    all_frozen = not any(param.requires_grad for param in registered.params.values())

    def is_trained(tensor: Tensor) -> bool:
        return isinstance(tensor, nn.Parameter) and (tensor.requires_grad or all_frozen)

    for name, alias in registered.aliases.items():
        first = registered.names[id(alias)]
        tensor = tensors[first]
        hooked = _has_hooks(tensor) or _has_hooks(alias)
        if is_trained(tensor) != is_trained(alias) or (is_trained(tensor) and hooked):
            raise _sharing_error(first, tensor, name, alias)
    for first, other in registered.overlaps:
        if is_trained(tensors[first]) or is_trained(tensors[other]):
            raise _sharing_error(first, tensors[first], other, tensors[other])


def _has_hooks(tensor: Tensor) -> bool:
    return bool(private.gradient_hooks(tensor)) or private.has_accumulated_hooks(tensor)


def _sharing_error(name: str, tensor: Tensor, other: str, another: Tensor) -> ValueError:
    return ValueError(
        f"{name} and {other} of the model share memory but are not one tensor: {name} is "
        f"{_described(tensor)}, {other} is {_described(another)}. In the model a write into one, "
        "such as an optimizer's step, changes the other; as arguments they would be separate. "
        f"Likely cause: {other} was made from a view of {name}, such as `.detach()`, `.data`, "
        "`.t()` or a slice. Fix: compute the view in forward; tie two weights by setting the "
        "parameter, `head.weight = embed.weight`; for a separate value `.clone()` it."
    )


def _described(tensor: Tensor) -> str:
    kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
    grad = "requires a gradient" if tensor.requires_grad else "does not require a gradient"
    hooked = " and has hooks" if _has_hooks(tensor) else ""
    return f"a {kind} of {tensor.dtype} and shape {tuple(tensor.shape)} that {grad}{hooked}"


def disagree(*targets_and_sources: Tensor) -> bool:
    """Return True if no memory holds the values of both sources in two overlapping targets."""
    a, b, for_a, for_b = (
        dtensor.shard(tensor.detach(), on_graph=False) for tensor in targets_and_sources
    )
    scratch = a.untyped_storage().clone()
    a, b = (
        torch.empty(0, dtype=t.dtype, device=t.device).set_(
            scratch, t.storage_offset(), t.shape, t.stride()
        )
        for t in (a, b)
    )
    b.copy_(for_b)
    a.copy_(for_a)
    before = scratch.clone()
    b.copy_(for_b)
    bytes_before, bytes_after = (
        torch.empty(0, dtype=torch.uint8, device=a.device).set_(memory)
        for memory in (before, scratch)
    )
    return not torch.equal(bytes_before, bytes_after)


# ---- memory --------------------------------------------------------------------------------------


class _Span(NamedTuple):
    """The range of memory that holds the elements of a tensor, in bytes."""

    place: int  # index among the registered tensors
    name: str
    tensor: Tensor
    device: str
    start: int
    end: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # 0 for a dimension with one element
    elements: Any  # equal for two tensors with the same elements in the same memory


def _span(place: int, name: str, tensor: Tensor) -> _Span | None:
    """Return the span of a dense tensor; None for one without an address: empty, sparse, on meta,
    fake, or a subclass that wraps other tensors.
    """
    if nn.parameter.is_lazy(tensor) or tensor.is_nested or tensor.layout is not torch.strided:
        return None
    local = dtensor.shard(tensor, on_graph=False)
    try:
        start = local.data_ptr()
    except (RuntimeError, NotImplementedError):
        return None
    if not start:
        return None
    shape, size = tuple(local.shape), local.itemsize
    strides = tuple(size * s if n > 1 else 0 for n, s in zip(shape, local.stride(), strict=True))
    end = start + size + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    device = str(local.device)
    read_as = (tuple(tensor.shape), local.dtype, local.is_conj(), local.is_neg())
    elements = (device, start, shape, strides, read_as)
    return _Span(place, name, tensor, device, start, end, shape, strides, elements)


def _overlaps(spans: list[_Span]) -> Iterator[tuple[_Span, _Span]]:
    """Yield pairs that share an element. Columns of a matrix do not, though their spans overlap."""
    for cluster in _clusters(spans):
        start, end = cluster[0].start, max(span.end for span in cluster)
        sizes = [span.tensor.itemsize for span in cluster]
        unit = math.gcd(*sizes, *(span.start - start for span in cluster))
        owners = torch.zeros((end - start) // unit, dtype=torch.int32, device="cpu")
        for number, (span, size) in enumerate(zip(cluster, sizes, strict=True), 1):
            view = owners.as_strided(
                # an expanded dimension repeats one element
                [
                    *(n if s else 1 for n, s in zip(span.shape, span.strides, strict=True)),
                    size // unit,
                ],
                [*(s // unit for s in span.strides), 1],
                (span.start - start) // unit,
            )
            if owner := int(view.max()):
                first, other = sorted([cluster[owner - 1], span], key=lambda span: span.place)
                yield first, other
            view.fill_(number)


def _clusters(spans: list[_Span]) -> Iterator[list[_Span]]:
    """Yield groups of spans that overlap, directly or through others. Single spans are left out."""
    cluster: list[_Span] = []
    for span in sorted(spans, key=lambda span: (span.device, span.start)):
        last = max((other.end for other in cluster), default=0)
        if cluster and (span.device != cluster[0].device or span.start >= last):
            if len(cluster) > 1:
                yield cluster
            cluster = []
        cluster.append(span)
    if len(cluster) > 1:
        yield cluster
