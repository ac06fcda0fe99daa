"""Donated memory: which tensors may be overwritten, because they were given up or made here."""

from __future__ import annotations

import itertools
import operator
import os
from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import Tensor

from .._torch import dtensor, private
from .._torch.foreach import are_gapless, clone_listed, is_gapless
from .._torch.metadata import Metadata
from .._torch.tracing import PLAIN_TYPES, traced, under_transform

DEBUG = os.environ.get("PURESCALE_DEBUG_DONATION", "0") not in ("", "0")


_layout = operator.attrgetter("layout")
_grad_fn = operator.attrgetter("grad_fn")


def storage_pointers(leaves: Sequence[Any]) -> list[int | None]:
    """Return the storage pointer of each leaf, which is equal for leaves that share memory. It is
    None for a leaf without a storage, such as a subclass that wraps other tensors.
    """
    if set(map(type, leaves)) <= PLAIN_TYPES:
        try:
            storages = map(Tensor.untyped_storage, leaves)
            return list(map(torch.UntypedStorage.data_ptr, storages))
        except (RuntimeError, NotImplementedError):  # one of them is sparse
            pass
    return list(map(storage_pointer, leaves))


def storage_pointer(leaf: Any) -> int | None:
    """Return the storage pointer of one leaf, as in `storage_pointers`."""
    if not isinstance(leaf, Tensor):
        return None
    try:
        if leaf.layout is torch.strided:
            local = dtensor.shard(leaf) if dtensor.is_dtensor(leaf) else leaf
            return local.untyped_storage().data_ptr()
        values = private.values(leaf) if leaf.layout is torch.sparse_coo else leaf.values()
        return values.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return None


def pointers_of_each(lists: Sequence[Sequence[Any]]) -> list[list[int | None]]:
    """Return the storage pointers of each list; none in a trace, where they cannot be compared."""
    return [] if traced() else list(map(storage_pointers, lists))


def repeated(pointers: list[int | None], taken: set[int | None]) -> list[int]:
    """Return the indices of pointers that are in `taken` or occur earlier, and add all to it."""
    indices = []
    for index, pointer in enumerate(pointers):
        if pointer in taken:
            indices.append(index)
        taken.add(pointer)
    return indices


def can_write(tensors: Sequence[Tensor], others: Sequence[Any] = ()) -> bool:
    """Return True if all tensors may be overwritten: each is gapless, off every graph, and alone in
    its storage among them and `others`.

    A parameter that requires a gradient may be overwritten off the graph, as torch.optim does.
    While compiling, storages cannot be compared.
    """
    return can_write_each([Metadata(list(tensors))], others)[0]


def can_write_each(
    lists: Sequence[Metadata],
    others: Sequence[Any] = (),
    pointers: Sequence[list[int | None]] = (),
) -> list[bool]:
    """Return `can_write` for each list, where the other lists count among its `others`. `pointers`
    are the storage pointers of each list and of `others`, if they are known.
    """
    if under_transform() or DEBUG:
        return [False] * len(lists)
    allowed = [
        some.are_gapless if some.dense_off_graph else _are_writable(some.tensors) for some in lists
    ]
    if torch.compiler.is_dynamo_compiling() or not any(allowed):
        return allowed
    if not pointers:
        pointers = list(map(storage_pointers, [*[some.tensors for some in lists], others]))
    *of_lists, of_others = pointers
    of_lists = list(map(_of_values, lists, of_lists))
    union, kept = set(itertools.chain(*of_lists)), set(of_others)
    if len(union) == sum(map(len, of_lists)) and None not in union and union.isdisjoint(kept):
        return allowed
    for index, own in enumerate(of_lists):
        alone = set(own)
        apart = len(alone) == len(own) and None not in alone and alone.isdisjoint(kept)
        rest = (other for place, other in enumerate(of_lists) if place != index)
        allowed[index] = allowed[index] and apart and all(map(alone.isdisjoint, rest))
    return allowed


def _are_writable(tensors: Sequence[Tensor]) -> bool:
    """Return True if each tensor by itself may be overwritten, storages aside."""
    if torch.compiler.is_dynamo_compiling():
        return all(
            tensor.layout is torch.strided
            and is_gapless(tensor)
            and not tensor.requires_grad
            and not _is_number(tensor)
            for tensor in tensors
        )
    if any(map(_grad_fn, tensors)) or any(map(Tensor.is_neg, tensors)):
        return False
    # Outside of inference mode torch refuses to write into tensors made in it.
    if not torch.is_inference_mode_enabled() and any(map(Tensor.is_inference, tensors)):
        return False
    return set(map(_layout, tensors)) <= {torch.strided} and are_gapless(tensors)


def _is_number(tensor: Tensor) -> bool:
    """Return True if the compiler passes an input as a Python float, as it does for a 0-d float64
    on a CPU: in-place writes to it are lost (torch 2.13).
    """
    return not tensor.ndim and tensor.dtype is torch.float64 and tensor.is_cpu


def _of_values(metadata: Metadata, pointers: list[int | None]) -> list[int | None]:
    """Return the pointers of the tensors that have elements; empty ones cannot share memory."""
    counts = metadata.elements
    if 0 not in counts:
        return pointers
    return [pointer for pointer, count in zip(pointers, counts, strict=True) if count]


# ---- gradients -----------------------------------------------------------------------------------


def take_ownership(
    gradients: list[Tensor], arguments: Set[int | None] | None = None
) -> list[Tensor]:
    """Return gradients that `.backward()` has left in `.grad`, in memory that they share neither
    with each other nor with the storages of `arguments`.

    AccumulateGrad has copied what a hook or a custom backward still held. What is left are views:
    of one tensor by a backward of torch's own, or of an argument by a custom one.
    """
    if set(map(type, gradients)) != {Tensor} or set(map(_layout, gradients)) != {torch.strided}:
        return [gradient.detach().clone() for gradient in gradients]
    pointers = storage_pointers(gradients)
    if len(set(pointers)) == len(pointers) and (not arguments or arguments.isdisjoint(pointers)):
        return gradients
    owned, shared = list(gradients), repeated(pointers, {*(arguments or ())})
    copies = clone_listed([gradients[index] for index in shared])
    for index, copy in zip(shared, copies, strict=True):
        owned[index] = copy
    return owned


# ---- debugging -----------------------------------------------------------------------------------


def poison(donated: Sequence[Any], keep: Sequence[Any]) -> None:
    """Fill donated tensors with NaN, so that a later use is seen, with
    `PURESCALE_DEBUG_DONATION=1`.

    In this mode nothing is written in place; results are in fresh memory and have the same bits.
    Every floating tensor of `donated` that donation might have overwritten becomes NaN, unless it
    shares memory with another of them or with `keep`.
    """
    if not DEBUG or traced():
        return
    kept, storages = set(storage_pointers(keep)), storage_pointers(donated)
    for leaf, storage in zip(donated, storages, strict=True):
        alone = storage is not None and storage not in kept and storages.count(storage) == 1
        floating = isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
        if alone and floating and not leaf.requires_grad and leaf.layout is torch.strided:
            leaf.fill_(float("nan"))
