"""Whose memory may be written into: what was donated or made here, and nobody else can see."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._torch import dtensor, private
from .._torch.foreach import is_gapless
from .._torch.tracing import traced, under_transform

DEBUG = os.environ.get("PURESCALE_DEBUG_DONATION", "0") not in ("", "0")


def memory(leaf: Any) -> int | None:
    """The storage of a tensor, by which two are known to share memory; None where there is none, as
    in a subclass that wraps others.
    """
    if not isinstance(leaf, Tensor):
        return None
    try:
        if leaf.layout is torch.strided:
            local = dtensor.shard(leaf) if isinstance(leaf, DTensor) else leaf
            return local.untyped_storage().data_ptr()
        values = private.values(leaf) if leaf.layout is torch.sparse_coo else leaf.values()
        return values.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return None


def memories(leaves: Sequence[Any]) -> set[int | None]:
    """The storages of the tensors among `leaves`."""
    return {memory(leaf) for leaf in leaves if isinstance(leaf, Tensor)}


def can_write(tensors: Sequence[Tensor], others: Sequence[Any] = ()) -> bool:
    """Whether all of these may be written into: each is gapless, off every graph, and alone in its
    storage among them and `others`.

    A parameter that requires a gradient may be, off the graph, as torch.optim does. While compiling
    storages cannot be compared.
    """
    if under_transform() or DEBUG:
        return False
    if not all(map(_is_writable, tensors)):
        return False
    if torch.compiler.is_compiling():
        return True
    # An empty shard has no memory to share.
    held = [memory(tensor) for tensor in tensors if tensor.numel()]
    alone = set(held)
    if len(alone) != len(held) or None in alone:
        return False
    return not others or alone.isdisjoint(memories(others))


def _is_writable(tensor: Tensor) -> bool:
    if tensor.grad_fn is not None or tensor.layout is not torch.strided:
        return False
    if torch.compiler.is_compiling():
        return is_gapless(tensor) and not (tensor.requires_grad and tensor.is_leaf)
    # Outside of inference mode torch refuses to write into its tensors.
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return False
    return is_gapless(tensor) and not tensor.is_neg()


# ---- gradients -----------------------------------------------------------------------------------


def owned(found: list[Tensor]) -> list[Tensor]:
    """Gradients that a backward just made, off the graph, in memory that nobody else can see; what
    a custom backward or a hook may keep is copied. Empties `found`.
    """
    if set(map(type, found)) != {Tensor}:
        return [gradient.detach().clone() for gradient in found]
    # A result of torch's own backward can be a view of a tensor that only the view keeps alive.
    detached = [gradient.detach() for gradient in found]
    found.clear()
    return [
        gradient if _is_alone(gradient) and is_gapless(gradient) else gradient.clone()
        for gradient in detached
    ]


def _is_alone(tensor: Tensor) -> bool:
    """Whether no other tensor, array or saved value shares the memory of `tensor`."""
    if tensor.layout is not torch.strided:
        return False
    storage = tensor.untyped_storage()
    # Two uses: the tensor, and the name on the line above. Memory from outside cannot be resized.
    return storage.resizable() and private.storage_uses(storage._cdata) == 2


# ---- debugging -----------------------------------------------------------------------------------


def poison(given: Sequence[Any], keep: Sequence[Any]) -> None:
    """With `PURESCALE_DEBUG_DONATION=1`: fill with NaN what was donated, so that its use is seen.

    Nothing is written in place then; results are in fresh memory and have the same bits. Every
    tensor of `given` that donation might have written to becomes NaN, unless it shares memory with
    another of them or with `keep`. Integers and bools are left.
    """
    if not DEBUG or traced():
        return
    taken = memories(keep)
    held = [memory(leaf) for leaf in given]
    for leaf, storage in zip(given, held, strict=True):
        alone = storage is not None and storage not in taken and held.count(storage) == 1
        floating = isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
        if alone and floating and not leaf.requires_grad and _is_writable(leaf):
            leaf.fill_(float("nan"))
