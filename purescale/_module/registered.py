"""Parameters and buffers of a module by name; tensors over the same memory share one name."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._torch import dtensor

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


def registered_tensors(model: nn.Module, state: Tensors | None = None) -> RegisteredTensors:
    """Return the parameters and buffers of `model`, and the tensors of `state` as buffers. A tensor
    that is registered twice, and two tensors with the same elements in the same memory, count as
    one.

    Raises:
        ValueError: Two tensors share memory in another way, or only one of the two is trained.
    """
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    buffers |= state or {}
    names: dict[int, str] = {}
    aliases: Tensors = {}
    spans: dict[Any, _Span] = {}
    all_frozen = not any(param.requires_grad for param in params.values())

    def is_trained(tensor: Tensor) -> bool:
        return isinstance(tensor, nn.Parameter) and (tensor.requires_grad or all_frozen)

    for place, (name, tensor) in enumerate((*params.items(), *buffers.items())):
        if id(tensor) in names:  # a parameter that is a buffer too
            continue
        span = _span(place, name, tensor)
        first = span and spans.setdefault(span.elements, span)
        names[id(tensor)] = first.name if first else name
        if first and span and first is not span:
            aliases[name] = tensor
            if is_trained(tensor) != is_trained(first.tensor):
                raise _sharing_error(first, span)
    _refuse_overlaps(list(spans.values()))
    return RegisteredTensors(
        {name: tensor for name, tensor in params.items() if names[id(tensor)] == name},
        {name: tensor for name, tensor in buffers.items() if names[id(tensor)] == name},
        names,
        aliases,
    )


# ---- memory --------------------------------------------------------------------------------------


class _Span(NamedTuple):
    """The range of memory that holds the elements of a tensor, in bytes."""

    place: int  # index among the registered tensors
    name: str
    tensor: Tensor
    local: Tensor  # the shard of this rank
    device: str
    start: int
    end: int
    elements: Any  # equal for two tensors with the same elements in the same memory


def _span(place: int, name: str, tensor: Tensor) -> _Span | None:
    """Return the span of a dense tensor; None for one without an address: empty, sparse, on meta,
    fake, or a subclass that wraps other tensors.
    """
    if nn.parameter.is_lazy(tensor) or tensor.is_nested or tensor.layout is not torch.strided:
        return None
    local = dtensor.shard(tensor.detach(), on_graph=False)
    try:
        start = local.data_ptr()
    except (RuntimeError, NotImplementedError):
        return None
    if not start:
        return None
    shape, device = tuple(local.shape), str(local.device)
    strides = tuple(s if n > 1 else 0 for n, s in zip(shape, local.stride(), strict=True))
    last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    read_as = (tuple(tensor.shape), local.dtype, local.is_conj(), local.is_neg())
    elements = (device, start, shape, strides, read_as)
    end = start + (last + 1) * local.itemsize
    return _Span(place, name, tensor, local, device, start, end, elements)


def _refuse_overlaps(spans: list[_Span]) -> None:
    """Refuse two tensors that share an element. Columns of a matrix do not, though their spans
    overlap.
    """
    clusters: list[list[_Span]] = []  # of spans that overlap, directly or through others
    end = 0
    for span in sorted(spans, key=lambda span: (span.device, span.start)):
        if not clusters or span.device != clusters[-1][0].device or span.start >= end:
            clusters.append([])
            end = 0
        clusters[-1].append(span)
        end = max(end, span.end)
    for cluster in clusters:
        if len(cluster) > 1:
            _refuse_common_elements(cluster)


def _refuse_common_elements(spans: list[_Span]) -> None:
    owners = torch.zeros(
        max(s.end for s in spans) - spans[0].start, dtype=torch.int32, device="cpu"
    )
    for number, span in enumerate(spans, 1):
        _, _, shape, strides, _ = span.elements
        size = span.local.itemsize
        owned = owners.as_strided(
            (*shape, size), (*(size * s for s in strides), 1), span.start - spans[0].start
        )
        if owner := int(owned.max()):
            raise _sharing_error(*sorted([spans[owner - 1], span], key=lambda span: span.place))
        owned.fill_(number)


def _sharing_error(span: _Span, another: _Span) -> ValueError:
    name, other = span.name, another.name
    return ValueError(
        f"{name} and {other} of the model share memory but are not one tensor: {name} is "
        f"{_described(span.tensor)}, {other} is {_described(another.tensor)}. In the model a write "
        "into one, such as an optimizer's step, changes the other; as arguments they would be "
        f"separate. Likely cause: {other} was made from a view of {name}, such as `.detach()`, "
        "`.data`, `.t()` or a slice. Fix: compute the view in forward; tie two weights by setting "
        "the parameter, `head.weight = embed.weight`; for a separate value `.clone()` it."
    )


def _described(tensor: Tensor) -> str:
    kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
    grad = "requires a gradient" if tensor.requires_grad else "does not require a gradient"
    return f"a {kind} of {tensor.dtype} and shape {tuple(tensor.shape)} that {grad}"
