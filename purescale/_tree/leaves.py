"""One leaf: what may be a parameter or a gradient; how it becomes dense, real and local."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch import dtensor, private
from .._torch.dtypes import wide_dtype
from .._torch.tracing import PLAIN_TYPES

_REAL = frozenset((torch.float32, torch.float16, torch.bfloat16, torch.float64))
_USUAL = _REAL | {torch.complex64, torch.complex128}
_PLAIN_TYPES = PLAIN_TYPES | {private.FakeTensor}


_dtype, _layout = operator.attrgetter("dtype"), operator.attrgetter("layout")
_is_nested = operator.attrgetter("is_nested")
_is_quantized = operator.attrgetter("is_quantized")


# ---- what may be one -----------------------------------------------------------------------------


def unusual(leaves: Sequence[Any]) -> list[tuple[int, Any]]:
    """The leaves that need a second look, with their indices."""
    if are_dense(leaves) and {leaf.dtype for leaf in leaves} <= _USUAL:
        return []
    return [
        (index, leaf)
        for index, leaf in enumerate(leaves)
        if leaf is not None
        and not (
            isinstance(leaf, Tensor)
            and leaf.dtype in _USUAL
            and leaf.layout is torch.strided
            and not leaf.is_nested
        )
    ]


def are_dense(leaves: Sequence[Any]) -> bool:
    """Whether one look shows that each leaf is a dense tensor of the usual types."""
    if torch.compiler.is_compiling():  # which follows no attrgetter
        plain = all([type(t) in _PLAIN_TYPES and t.layout is torch.strided for t in leaves])
        return plain and not any([t.is_nested or t.is_quantized for t in leaves])
    if not set(map(type, leaves)) <= _PLAIN_TYPES:
        return False
    if not set(map(_layout, leaves)) <= {torch.strided}:
        return False
    return not (any(map(_is_nested, leaves)) or any(map(_is_quantized, leaves)))


def unsupported_reason(leaf: Tensor, *, sparse: bool = False) -> str:
    """Why a tensor cannot be a leaf that is computed with, and the fix; nothing where it can.

    `sparse`: a COO tensor can, since it is made dense.
    """
    if leaf.is_nested:
        return (
            "is a nested tensor, whose parts differ in shape. Fix: "
            "`torch.nested.to_padded_tensor(t, 0.0)`, or a list of its parts."
        )
    if leaf.is_quantized:
        return f"is quantized, {leaf.dtype}. Fix: `.dequantize()`."
    if leaf.layout is not torch.strided and not (sparse and leaf.layout is torch.sparse_coo):
        also = " or sparse COO" if sparse else ""
        return f"has the layout {leaf.layout}; expected dense{also}. Fix: `.to_dense()`."
    if leaf.dtype.itemsize == 1 and leaf.dtype not in (torch.bool, torch.uint8, torch.int8):
        return (
            f"has dtype {leaf.dtype}, in which torch cannot compute. Fix: `.to(torch.float32)`; "
            "fp8 recipes keep scales of their own for each tensor, as torchao does."
        )
    return ""


def check_gradient(leaf: Any, at: str) -> None:
    """Refuse what cannot be a gradient; `at` is its path."""
    _check_floating(leaf, at, "gradient")
    reason = unsupported_reason(leaf, sparse=True)
    if reason:
        raise TypeError(f"{at} {reason}")


def check_parameter(leaf: Any, at: str) -> None:
    """Refuse what no step can be taken from; `at` is its path."""
    _check_floating(leaf, at, "parameter")
    reason = unsupported_reason(leaf)
    if reason:
        raise TypeError(f"{at} {reason}")


def _check_floating(leaf: Any, at: str, what: str) -> None:
    if not isinstance(leaf, Tensor):
        raise TypeError(
            f"{at} is {type(leaf).__name__} {leaf!r}; every {what} must be a tensor or None. "
            "Fix: put tensors into the tree; dict, list, tuple and NamedTuple are looked into, "
            "other containers are not."
        )
    if not (leaf.is_floating_point() or leaf.is_complex()):
        raise TypeError(
            f"{at} has dtype {leaf.dtype}; a {what} is floating or complex. Likely cause: an "
            "integer buffer, a mask or a token count is in the tree. Fix: leave it out, or put "
            "None in its place."
        )


def elsewhere(device: torch.device) -> str:
    """Why a leaf may be on another device than the rest, and the fix."""
    if device.type == "meta":
        return (
            "A tensor on meta has no values. Likely cause: a model that was never filled. Fix: "
            "load or initialise it, then begin."
        )
    return "Fix: `.to(device)` of what was left behind."


# ---- dense, real and local -----------------------------------------------------------------------


class Normalized(NamedTuple):
    """Leaves as dense, real, strided tensors of this rank, without those that are None.

    A DTensor is its local shard, a complex tensor its two reals, a sparse COO tensor dense.
    """

    tensors: list[Tensor]
    given: Sequence[Any]  # the leaves, with None; a DTensor whose value was a sum has that sum
    usual: bool  # they are the tensors

    def restore(self, results: Sequence[Tensor]) -> list[Any]:
        """What was computed of each tensor, as the leaf that it came from: complex, a DTensor, with
        None between them.
        """
        if self.usual:
            return list(results)
        found = iter(results)
        return [None if leaf is None else _restored(leaf, next(found)) for leaf in self.given]

    @property
    def origins(self) -> list[Any]:
        """The leaf that each tensor came from."""
        return [leaf for leaf in self.given if leaf is not None]


def normalize(leaves: Sequence[Any]) -> Normalized:
    """`leaves`, which are checked already, as dense, real, strided tensors."""
    if are_usual(leaves):
        return Normalized(list(leaves), leaves, usual=True)
    given = [dtensor.reduce_partial(leaf) for leaf in leaves]
    tensors = [_dense_real(dtensor.shard(leaf)) for leaf in given if leaf is not None]
    return Normalized(tensors, given, usual=False)


def are_usual(leaves: Sequence[Any]) -> bool:
    """Whether each leaf is a dense, real tensor already."""
    if torch.compiler.is_compiling():
        return all(
            type(leaf) in _PLAIN_TYPES and leaf.dtype in _REAL and leaf.layout is torch.strided
            for leaf in leaves
        )
    return (
        set(map(type, leaves)) <= _PLAIN_TYPES
        and set(map(_dtype, leaves)) <= _REAL
        and set(map(_layout, leaves)) <= {torch.strided}
        and not any(map(Tensor.is_neg, leaves))
    )


def _dense_real(leaf: Tensor) -> Tensor:
    leaf = dense(leaf)
    if not leaf.is_complex():
        resolved: Tensor = leaf.resolve_neg()
        return resolved
    return torch.view_as_real(leaf.resolve_conj().resolve_neg())


def dense(leaf: Tensor) -> Tensor:
    """A sparse tensor as a dense one. Rows that are there twice are summed at least in float32: in
    half precision their sum may be beyond its range.
    """
    if leaf.layout is torch.strided:
        return leaf
    made: Tensor = leaf.to(wide_dtype(leaf.dtype)).to_dense()
    return made


def stored_values(leaf: Tensor) -> Tensor:
    """The numbers that a leaf stores as reals: a sparse leaf's summed values, a complex leaf's two
    parts.
    """
    if leaf.layout is torch.sparse_coo:
        leaf = leaf.coalesce().values()
    return torch.view_as_real(leaf.resolve_conj().resolve_neg()) if leaf.is_complex() else leaf


def _restored(leaf: Tensor, result: Tensor) -> Tensor:
    if leaf.is_complex():
        result = torch.view_as_complex(result)
    restored: Tensor = dtensor.from_local_like(leaf, result)
    return restored


# ---- which two go together -----------------------------------------------------------------------


def mismatch_reason(gradient: Tensor, weight: Tensor) -> str:
    """Why a gradient cannot be that of a parameter; nothing where it can."""
    if gradient.shape != weight.shape:
        return f"shape {tuple(gradient.shape)}, its parameter {tuple(weight.shape)}"
    if gradient.device != weight.device:
        return f"device {gradient.device}, its parameter {weight.device}"
    if gradient.is_complex() and not weight.is_complex():
        return f"dtype {gradient.dtype}, its parameter {weight.dtype}, which has no imaginary part"
    return ""


def is_constant(leaf: Any) -> bool:
    """Whether no step changes a leaf: what is not a dense tensor has to come back as the same
    object.
    """
    return (
        not isinstance(leaf, Tensor)
        or leaf.layout is not torch.strided
        or leaf.is_nested
        or leaf.is_quantized
    )


def same_metadata(a: Any, b: Any) -> bool:
    """Whether two leaves are alike in all but their values; constants must be the same."""
    if is_constant(a) or is_constant(b):
        if isinstance(a, Tensor) or isinstance(b, Tensor):
            return a is b
        return a is b or (type(a) is type(b) and bool(a == b))
    return (
        not dtensor.placement_mismatch(a, b)
        and a.shape == b.shape
        and a.dtype == b.dtype
        and a.device == b.device
    )


def mismatch_error(a: Any, b: Any, at: str, other: str, why: str) -> Exception:
    """What to raise of two leaves without the `same_metadata`; `a` is `at`, `b` in `other`."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if is_constant(a) or is_constant(b):
            kinds = sorted({_kind(x) for x in (a, b) if is_constant(x)})
            return TypeError(
                f"{at} is {' and '.join(kinds)}, and another tensor in {other}. No step changes "
                "such a tensor: it must come back as the same object. Fix: return what was given, "
                "or keep it dense, `.to_dense()` or `.dequantize()`."
            )
        if cause := dtensor.placement_mismatch(a, b):
            return TypeError(f"{at} {cause}")
        if a.device != b.device:
            return ValueError(
                f"{at} is on {a.device}, but on {b.device} in {other}. {why} {elsewhere(b.device)}"
            )
        return ValueError(
            f"{at} is {a.dtype} {tuple(a.shape)}, but {b.dtype} {tuple(b.shape)} in {other}. {why} "
            f"Fix: `.to({a.dtype})` what was computed in another dtype."
        )
    return ValueError(
        f"{at} is {a!r}, but {b!r} in {other}. What changes in a step must be a tensor, or a "
        "skipped step could not keep the old value without reading the flag. Fix: "
        "`torch.tensor(...)`."
    )


def _kind(leaf: Any) -> str:
    if leaf.is_quantized:
        return f"quantized, {leaf.dtype}"
    return "a nested tensor" if leaf.is_nested else f"of the layout {leaf.layout}"
