"""Checks on leaves (parameters, gradients, constants), and leaves as dense, real tensors."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from .._torch import dtensor, private
from .._torch.dtypes import wide_dtype
from .._torch.tensor_list import TensorList
from .._torch.tracing import PLAIN_OR_FAKE, traced
from .._tree.scalars import short_repr

_REAL = frozenset((torch.float32, torch.float16, torch.bfloat16, torch.float64))
_FLOATING = _REAL | {torch.complex64, torch.complex128}
_WHOLE = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool))
_PLAIN_DTYPES = _REAL | _WHOLE


_dtype, _layout = operator.attrgetter("dtype"), operator.attrgetter("layout")
_is_nested, _grad_fn = operator.attrgetter("is_nested"), operator.attrgetter("grad_fn")


# ---- checks of whole lists -----------------------------------------------------------------------


def are_plain_dense(leaves: Sequence[Any]) -> bool:
    """Return True if each leaf is a dense, real tensor of torch's own types, without lazy negation.
    This is one fast check of the whole list; other leaves are checked one by one.
    """
    if torch.compiler.is_dynamo_compiling():  # which cannot follow the maps below
        return all(
            [
                type(leaf) in PLAIN_OR_FAKE
                and leaf.dtype in _PLAIN_DTYPES
                and leaf.layout is torch.strided
                and not leaf.is_nested
                for leaf in leaves
            ]
        )
    return (
        set(map(type, leaves)) <= PLAIN_OR_FAKE
        and set(map(_dtype, leaves)) <= _PLAIN_DTYPES
        and set(map(_layout, leaves)) <= {torch.strided}
        and not any(map(_is_nested, leaves))
        and not any(map(Tensor.is_neg, leaves))
    )


def are_dense_without_history(leaves: Sequence[Any]) -> bool:
    """Return True if `are_plain_dense`, without a `grad_fn`, and made outside of inference mode."""
    return (
        not torch.compiler.is_dynamo_compiling()
        and are_plain_dense(leaves)
        and not any(map(_grad_fn, leaves))
        and not any(map(Tensor.is_inference, leaves))
    )


def as_tensor_list(leaves: list[Any]) -> TensorList:
    """Return leaves as a list that knows if they are dense and off graph."""
    return TensorList(leaves, dense_without_history=are_dense_without_history(leaves))


def are_real_floating(dtypes: Set[torch.dtype]) -> bool:
    """Return True if a parameter may have each of these dtypes and is then real."""
    return dtypes <= _REAL


def versions(leaves: Collection[Any]) -> list[int]:
    """Return the number of in-place writes to each tensor; torch does not count them for inference
    tensors. For other leaves it is 0.
    """
    try:
        return list(map(private.version, leaves))
    except (RuntimeError, TypeError):
        return [
            private.version(leaf) if isinstance(leaf, Tensor) and not leaf.is_inference() else 0
            for leaf in leaves
        ]


# ---- which leaves are supported ------------------------------------------------------------------


def is_dense_floating(leaf: Any) -> bool:
    """Return True for a dense tensor of floating or complex numbers, which may be a parameter or a
    gradient.
    """
    return (
        isinstance(leaf, Tensor)
        and leaf.dtype in _FLOATING
        and leaf.layout is torch.strided
        and not leaf.is_nested
    )


def unsupported_reason(leaf: Tensor, *, sparse: bool = False) -> str:
    """Return why a tensor is not supported, and the fix; "" if it is supported. With `sparse`, COO
    tensors are supported, since they are made dense.
    """
    if leaf.is_nested:
        return (
            "is a nested tensor, whose parts differ in shape. Fix: "
            "`torch.nested.to_padded_tensor(t, 0.0)`, or a list of its parts."
        )
    if leaf.layout is not torch.strided and not (sparse and leaf.layout is torch.sparse_coo):
        also = " or sparse COO" if sparse else ""
        return f"has the layout {leaf.layout}; expected dense{also}. Fix: `.to_dense()`."
    if leaf.dtype.itemsize == 1 and leaf.dtype not in (torch.bool, torch.uint8, torch.int8):
        return (
            f"has dtype {leaf.dtype}, in which torch cannot compute. Fix: `.to(torch.float32)`; "
            "fp8 training needs kernels that take a scale for each tensor, as in torchao or "
            "TransformerEngine."
        )
    return ""


def check_leaf(leaf: Any, at: str, what: str) -> None:
    """Refuse a leaf that cannot be a `what`, "gradient" or "parameter". `at` is its path."""
    if not isinstance(leaf, Tensor):
        raise TypeError(
            f"{at} is {type(leaf).__name__} {leaf!r}; every {what} must be a tensor or None. "
            "Fix: put tensors into the tree; containers are dict, list, tuple and NamedTuple."
        )
    if not (leaf.is_floating_point() or leaf.is_complex()):
        raise TypeError(
            f"{at} has dtype {leaf.dtype}; a {what} is floating or complex. Likely cause: an "
            "integer buffer, a mask or a token count is in the tree. Fix: leave it out, or put "
            "None in its place."
        )
    if reason := unsupported_reason(leaf, sparse=what == "gradient"):
        raise TypeError(f"{at} {reason}")


def device_hint(device: torch.device) -> str:
    """Return why a leaf may be on another device than the rest, and the fix."""
    if device.type == "meta":
        return (
            "A tensor on meta has no values. Likely cause: a model without weights. Fix: "
            "load or initialise it first."
        )
    return "Fix: `.to(device)` of what was left behind."


# ---- dense and real ------------------------------------------------------------------------------


def as_dense_real(leaf: Tensor) -> Tensor:
    leaf = dense(leaf)
    if not leaf.is_complex():
        resolved: Tensor = leaf.resolve_neg()
        return resolved
    return torch.view_as_real(leaf.resolve_conj().resolve_neg())


def dense(leaf: Tensor) -> Tensor:
    """Return a sparse tensor as a dense one. Duplicate rows are summed at least in float32, because
    a sum in half precision may overflow.
    """
    if leaf.layout is torch.strided:
        return leaf
    leaf = leaf.to(wide_dtype(leaf.dtype))
    if leaf.is_cpu and not traced():
        # `to_dense` loses a single value of stride 0, as the gradient of a sum over an embedding of
        # width 1 has it (torch 2.13). A product has other strides.
        leaf = leaf * 1
    result: Tensor = leaf.to_dense()
    return result


def explicit_values(leaf: Tensor) -> Tensor:
    """Return the values that a leaf stores, as reals: the summed values of a sparse leaf, both
    parts of a complex leaf.
    """
    return as_dense_real(leaf.coalesce().values() if leaf.layout is torch.sparse_coo else leaf)


# ---- one leaf ------------------------------------------------------------------------------------


def is_constant(leaf: Any) -> bool:
    """Return True if a leaf is not a dense tensor. Steps do not change it, and it must come back as
    the same object.
    """
    return (
        not isinstance(leaf, Tensor)
        or leaf.layout is not torch.strided
        or leaf.is_nested
        or leaf.is_quantized
    )


def describe(leaf: Any) -> str:
    """Return dtype, shape, layout and placements of a tensor for an error message, but for its
    device, or the repr of another object.
    """
    if not isinstance(leaf, Tensor):
        return short_repr(leaf)
    if leaf.is_nested:
        return f"a nested tensor of {leaf.dtype}"
    layout = "" if leaf.layout is torch.strided else f" {leaf.layout}"
    placements = f" DTensor {leaf.placements}" if dtensor.is_dtensor(leaf) else ""
    values = " without values, on meta" if leaf.is_meta else ""
    return f"{leaf.dtype} {tuple(leaf.shape)}{layout}{placements}{values}"


def describe_with_device(leaf: Any) -> str:
    """Return `describe(leaf)`, with its device if that is an accelerator."""
    elsewhere = isinstance(leaf, Tensor) and leaf.device.type not in ("cpu", "meta")
    return describe(leaf) + (f" on {leaf.device}" if elsewhere else "")
