"""One leaf: what may be one, which two go together, whose memory it is in. It knows no trees."""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _columns, _dtensor, _torch
from ._torch import TensorGuards

SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_PACKED = getattr(torch, "float4_e2m1fn_x2", None)
# What everything here computes in; a look-up takes a third of the time of asking a tensor.
_USUAL = frozenset(
    (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.complex128)
)


def parts(leaf: Tensor) -> list[Tensor]:
    """The dense tensors that a sparse one is made of: indices, and values last."""
    if leaf.layout is torch.sparse_coo:
        return [_torch.indices(leaf), _torch.values(leaf)]
    if leaf.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [leaf.crow_indices(), leaf.col_indices(), leaf.values()]
    return [leaf.ccol_indices(), leaf.row_indices(), leaf.values()]


_SOUND = _USUAL | {torch.bool, torch.uint8, torch.int32, torch.int64}
_STRIDED = {torch.strided}
_dtype, _layout = operator.attrgetter("dtype"), operator.attrgetter("layout")
is_nested = operator.attrgetter("is_nested")  # torch's guards end the process where one is


# ---- what may be one -----------------------------------------------------------------------------


def unfit(leaf: Tensor) -> str:
    """What keeps a tensor out of every tree here, and the cure; nothing for the usual kinds."""
    if leaf.is_nested:
        return (
            "is a nested tensor, whose parts differ in shape. Cure: "
            "`torch.nested.to_padded_tensor(t, 0.0)`, or a list of its parts."
        )
    if leaf.layout is not torch.strided and leaf.layout not in SPARSE:
        return (
            f"has the layout {leaf.layout}, which most of torch's operators do not take. Cure: "
            "`.to_dense()`."
        )
    if leaf.is_quantized:
        return f"is quantized, {leaf.dtype}. Cure: `.dequantize()`."
    if leaf.dtype is _PACKED:
        return (
            f"has dtype {leaf.dtype}, two numbers a byte, which torch cannot compute with. Cure: "
            "what it was packed from."
        )
    return ""


def unusual(leaves: Sequence[Any]) -> list[tuple[int, Any]]:
    """The leaves that need a second look, and where they stand."""
    usual, strided = _USUAL, torch.strided
    return [
        (index, leaf)
        for index, leaf in enumerate(leaves)
        if leaf is not None
        and not (
            isinstance(leaf, Tensor)
            and leaf.dtype in usual
            and leaf.layout is strided
            and not leaf.is_nested
        )
    ]


def check_gradient(leaf: Any, at: str) -> None:
    """Refuse what cannot be a gradient or have one; it stands `at`."""
    if not isinstance(leaf, Tensor):
        raise TypeError(
            f"{at} is {type(leaf).__name__} {leaf!r}; every gradient must be a tensor or None. "
            "Cure: put tensors into the tree; dict, list, tuple and NamedTuple are looked into, "
            "other containers are not."
        )
    if not (leaf.is_floating_point() or leaf.is_complex()):
        raise TypeError(
            f"{at} has dtype {leaf.dtype}; a gradient is floating or complex. Likely cause: an "
            "integer buffer, a mask or a token count stands in the tree of gradients. Cure: leave "
            "it out, or put None in its place."
        )
    misfit = unfit(leaf)
    if misfit:
        raise TypeError(f"{at} {misfit}")


def check_parameter(leaf: Any, at: str) -> None:
    """Refuse what no step can be taken from; it stands `at`."""
    check_gradient(leaf, at)
    if leaf.dtype.itemsize == 1:
        raise TypeError(
            f"{at} has dtype {leaf.dtype}, in which torch cannot compute and a step would "
            "round to nothing. Cure: float32 parameters, cast where they are used."
        )


def elsewhere(device: torch.device) -> str:
    """Why a leaf may be on another device than the rest, and the cure."""
    if device.type == "meta":
        return (
            "A tensor on meta has no values. Likely cause: a model that was never filled. Cure: "
            "load or initialise it, then begin."
        )
    return "Cure: `.to(device)` of what was left behind."


# ---- which two go together -----------------------------------------------------------------------


def misfit(gradient: Tensor, weight: Tensor) -> str:
    """Why one cannot be added to the other; nothing where it can."""
    if gradient.shape != weight.shape:
        return f"shape {tuple(gradient.shape)}, its parameter {tuple(weight.shape)}"
    if gradient.device != weight.device:
        return f"device {gradient.device}, its parameter {weight.device}"
    if gradient.is_complex() and not weight.is_complex():
        return f"dtype {gradient.dtype}, its parameter {weight.dtype}, which has no imaginary part"
    return ""


def agree(a: Any, b: Any) -> bool:
    """Whether two leaves are alike in all but their values; what is no tensor in these too."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return not isinstance(a, Tensor) and type(a) is type(b) and bool(a == b)
    return (
        not (unfit(a) or unfit(b) or _dtensor.apart(a, b))
        and a.shape == b.shape
        and a.dtype == b.dtype
        and a.device == b.device
        and a.layout is b.layout
        and (a.layout not in SPARSE or _parts_agree(a, b))
    )


def surely_agree(leaves: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether one look at all of them shows that each two `agree`; only of the usual kinds, but at
    a tenth of the time.
    """
    every = [*leaves, *others]
    if not leaves or set(map(type, every)) != {Tensor} or set(map(_layout, every)) != _STRIDED:
        return False
    if not set(map(_dtype, every)) <= _SOUND or any(map(is_nested, every)):
        return False
    guards = TensorGuards(*leaves, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    return bool(guards.check(*others))


def _parts_agree(a: Tensor, b: Tensor) -> bool:
    return all(
        x.shape == y.shape and x.dtype == y.dtype for x, y in zip(parts(a), parts(b), strict=True)
    )


def disagreement(a: Any, b: Any, at: str, other: str, why: str) -> Exception:
    """What to raise of two that do not `agree`."""
    both = isinstance(a, Tensor) and isinstance(b, Tensor)
    if both and (cause := unfit(a) or unfit(b) or _dtensor.apart(a, b)):
        return TypeError(f"{at} {cause}")
    if both and a.layout is not b.layout:
        return ValueError(
            f"{at} is {a.layout}, but {b.layout} in {other}. {why} Cure: `.to_dense()` what was "
            "computed as a sparse tensor."
        )
    if both:
        if a.device != b.device:
            return ValueError(
                f"{at} is on {a.device}, but on {b.device} in {other}. {why} {elsewhere(b.device)}"
            )
        if a.shape == b.shape and a.dtype == b.dtype:
            return ValueError(
                f"{at} is sparse with {len(parts(a)[-1])} values, but with "
                f"{len(parts(b)[-1])} in {other}. {why} Which values there are cannot depend on a "
                "flag that is not read. Cure: the same number of values, zeros among them, or a "
                "dense tensor."
            )
        return ValueError(
            f"{at} is {a.dtype} {tuple(a.shape)}, but {b.dtype} {tuple(b.shape)} in {other}. {why} "
            f"Cure: `.to({a.dtype})` what was computed in another dtype."
        )
    return ValueError(
        f"{at} is {a!r}, but {b!r} in {other}. What changes in a step must be a tensor, or a "
        "skipped step could not keep the old value without reading the flag. Cure: "
        "`torch.tensor(...)`."
    )


# ---- whose memory --------------------------------------------------------------------------------


def storage(leaf: Tensor) -> int | None:
    """What two tensors have in common that share memory; `None` of one that has none of its own, as
    a subclass that wraps others.
    """
    try:
        if leaf.layout is torch.strided:
            memory: int = _dtensor.shard(leaf).untyped_storage().data_ptr()
            return memory
        return (
            (_torch.values(leaf) if leaf.layout is torch.sparse_coo else leaf.values())
            .untyped_storage()
            .data_ptr()
        )
    except RuntimeError:
        return None


def is_alone(leaf: Tensor) -> bool:
    """Whether nothing but this tensor stands in its memory: no other tensor, no array of numpy, and
    nobody holds the memory itself.
    """
    memory = leaf.untyped_storage()
    # Two uses: of the tensor, and of the name above; it and its argument are two references.
    uses = _torch.storage_uses(memory._cdata)
    return uses == 2 and sys.getrefcount(memory) <= 2 and memory.resizable()


def storages(leaves: Sequence[Any]) -> list[int | None]:
    """`storage` of each tensor; the usual case without a call."""
    return [
        leaf.untyped_storage().data_ptr()
        if type(leaf) is Tensor and leaf.layout is torch.strided
        else storage(leaf)
        if isinstance(leaf, Tensor)
        else None
        for leaf in leaves
    ]


def reach(tensor: Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    if tensor.numel() == 0:
        return 0
    return (
        1
        + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
    ) * tensor.element_size()


def overlapping(tensors: Sequence[Any], memories: Sequence[int | None]) -> list[bool]:
    """Which of the tensors, each with its `storage`, stand where another does too: in the same
    memory, and not in another piece of it, as the parts of a bucket do.
    """
    crowds: dict[int, list[int]] = {}
    for index, memory in enumerate(memories):
        if memory is not None:
            crowds.setdefault(memory, []).append(index)
    over = [False] * len(tensors)
    for crowd in crowds.values():
        if len(crowd) == 1:
            continue
        pieces = [(0, 1, index) for index in crowd]
        if all(_has_address(tensors[index]) for index in crowd):  # else nobody knows which
            starts = [tensors[index].data_ptr() for index in crowd]
            pieces = sorted(
                (start, start + reach(tensors[index]), index)
                for start, index in zip(starts, crowd, strict=True)
            )
        end, last = 0, crowd[0]
        for start, stop, index in pieces:
            if start < end:
                over[index] = over[last] = True
            if stop > end:
                end, last = stop, index
    return over


def _has_address(leaf: Any) -> bool:
    return type(leaf) in (Tensor, torch.nn.Parameter) and leaf.layout is torch.strided


def donatable(leaf: Tensor, *, leaves_too: bool = False) -> bool:
    """Whether `leaf` may be written to: dense, no two of its elements in one place, no leaf of an
    autograd graph.
    """
    if leaf.requires_grad and leaf.is_leaf and not leaves_too:
        return False
    if leaf.layout is not torch.strided:
        return False
    return _columns.is_gapless(leaf)
