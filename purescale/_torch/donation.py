"""Donated memory: which tensors may be overwritten, because they were given up or made here.

donate        an argument of a public function: the caller gives the tensors up
all_writable  of `PlannedStep`, by metadata: each tensor fills a range of memory, is not empty, and
              requires no gradient
can_write     by memory, too: nothing else shares it;  share_no_memory: so for known storages
MayWrite      the decision of a step (`_step/memory.py`), of all that it is given
in_place      an argument of an inner function: it writes into what it is given
owned         of gradients: made here, or given up, so that nobody else can see them
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence, Set
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .._torch import dtensor, private
from .._torch.foreach import clone_list
from .._torch.memory_order import are_gapless, is_gapless
from .._torch.tensor_list import TensorList
from .._torch.tracing import PLAIN_TYPES, traced, under_transform

Pointers: TypeAlias = Set[int | None]  # of storages, as `storage_pointers` returns them

_layout = operator.attrgetter("layout")
_grad_fn, _cdata = operator.attrgetter("grad_fn"), operator.attrgetter("_cdata")


def storage_pointers(leaves: Sequence[Any]) -> list[int | None]:
    """Return the storage pointer of each leaf, which is equal for leaves that share memory. It is
    None for a leaf without a storage, such as a subclass that wraps other tensors.
    """
    if set(map(type, leaves)) <= PLAIN_TYPES:
        try:
            storages = map(Tensor.untyped_storage, leaves)
            return list(map(torch.UntypedStorage.data_ptr, storages))
        except RuntimeError:  # one of them is sparse
            pass
    return list(map(storage_pointer, leaves))


def storage_pointer(leaf: Any) -> int | None:
    """Return the storage pointer of one leaf, as in `storage_pointers`."""
    if not isinstance(leaf, Tensor):
        return None
    try:
        if leaf.layout is torch.strided:
            local = dtensor.local_shard(leaf) if dtensor.is_dtensor(leaf) else leaf
            return local.untyped_storage().data_ptr()
        values = private.values(leaf) if leaf.layout is torch.sparse_coo else leaf.values()
        return values.untyped_storage().data_ptr()
    except RuntimeError:
        return None


def pointers_of_each(lists: Sequence[Sequence[Any]]) -> list[list[int | None]]:
    """Return the storage pointers of each list; none in a trace, where they cannot be compared."""
    return [] if traced() else list(map(storage_pointers, lists))


def can_write(tensors: Sequence[Tensor], others: Sequence[Any] = ()) -> bool:
    """Return True if all tensors may be overwritten: each is gapless, off every graph, and alone in
    its storage among them and `others`.

    A parameter that requires a gradient may be overwritten off the graph, as torch.optim does.
    While compiling, storages cannot be compared.
    """
    return can_write_each([TensorList(list(tensors))], others)[0]


def can_write_each(
    lists: Sequence[TensorList],
    others: Sequence[Any],
    pointers: Sequence[list[int | None]] = (),
) -> list[bool]:
    """Return `can_write` for each list, where the other lists count among its `others`. `pointers`
    are the storage pointers of each list and of `others`, if they are known.
    """
    if under_transform():
        return [False] * len(lists)
    allowed = [
        tensor_list.are_gapless
        if tensor_list.dense_without_history
        else _are_writable(tensor_list.tensors)
        for tensor_list in lists
    ]
    if torch.compiler.is_dynamo_compiling() or not any(allowed):
        return allowed
    if not pointers:
        pointers = list(map(storage_pointers, [*[each.tensors for each in lists], others]))
    *of_lists, of_others = pointers
    of_lists = list(map(_of_nonempty, lists, of_lists))
    if share_no_memory(list(itertools.chain(*of_lists)), of_others):
        return allowed
    for index, of_list in enumerate(of_lists):
        rest = [other for place, other in enumerate(of_lists) if place != index]
        others_too = list(itertools.chain(of_others, *rest))
        allowed[index] = allowed[index] and share_no_memory(of_list, others_too)
    return allowed


def share_no_memory(pointers: Sequence[int | None], others: Sequence[int | None]) -> bool:
    """Return True if these storages are known, and differ from each other and from others."""
    alone = set(pointers)
    return len(alone) == len(pointers) and None not in alone and alone.isdisjoint(others)


def _are_writable(tensors: Sequence[Tensor]) -> bool:
    """Return True if each tensor by itself may be overwritten, storages aside."""
    if torch.compiler.is_dynamo_compiling():
        # A 0-d float64 on a CPU comes as a Python float: in-place writes to it are lost (torch
        # 2.13).
        return all(
            tensor.layout is torch.strided
            and is_gapless(tensor)
            and not tensor.requires_grad
            and (tensor.ndim > 0 or tensor.dtype is not torch.float64 or not tensor.is_cpu)
            for tensor in tensors
        )
    if any(map(_grad_fn, tensors)) or any(map(Tensor.is_neg, tensors)):
        return False
    # Outside of inference mode torch refuses to write into tensors made in it.
    if not torch.is_inference_mode_enabled() and any(map(Tensor.is_inference, tensors)):
        return False
    return set(map(_layout, tensors)) <= {torch.strided} and are_gapless(tensors)


def _of_nonempty(tensor_list: TensorList, pointers: list[int | None]) -> list[int | None]:
    """Return the pointers of the tensors that have elements; empty ones cannot share memory."""
    if not tensor_list.any_empty:
        return pointers
    pairs = zip(pointers, tensor_list.tensors, strict=True)
    return [pointer for pointer, tensor in pairs if tensor.numel()]


# ---- gradients -----------------------------------------------------------------------------------


def take_ownership(gradients: list[Tensor]) -> list[Tensor]:
    """Return the gradients of a backward, off the graph, in memory that nobody else can see. A
    gradient that a custom backward or a hook may have kept is copied. Empties `gradients`, because
    its references would count as uses.
    """
    if set(map(type, gradients)) != {Tensor} or set(map(_layout, gradients)) != {torch.strided}:
        copies = [gradient.detach().clone() for gradient in gradients]
        gradients.clear()
        return copies
    # A result of torch's own backward can be a view of a tensor that only the view keeps alive.
    detached = list(map(Tensor.detach, gradients))
    gradients.clear()
    storages = list(map(Tensor.untyped_storage, detached))
    # Two uses: the tensor, and its place in `storages`. Memory from outside cannot be resized.
    uses = list(map(private.storage_uses_or_zero, map(_cdata, storages)))
    resizable = list(map(torch.UntypedStorage.resizable, storages))
    gapless = list(map(Tensor.is_contiguous, detached))
    if not all(gapless):
        gapless = list(map(is_gapless, detached))
    if set(uses) <= {2} and all(resizable) and all(gapless):
        return detached
    facts = enumerate(zip(uses, resizable, gapless, strict=True))
    shared = [i for i, (count, ours, whole) in facts if count != 2 or not ours or not whole]
    copies = clone_list([detached[index] for index in shared])
    for index, copy in zip(shared, copies, strict=True):
        detached[index] = copy
    return detached
