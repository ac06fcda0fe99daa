"""Results apart from their arguments: leaves copied where they share memory."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._torch import foreach, private
from .._torch.donation import Pointers, storage_pointer, storage_pointers
from .._torch.tracing import traced
from .._tree import pytree
from .._tree.leaves import are_plain_dense, is_constant
from .._tree.pytree import Leaves, Tree


def detach_and_unalias(leaves: Leaves, occupied: Pointers | None) -> Leaves:
    """Detach leaves, which may be containers that only torch's pytree knows. A leaf is copied if
    its memory is in `occupied` or is that of an earlier leaf; if `occupied` is None (traced), every
    leaf is. Constants that are not on a graph stay the same objects.
    """
    if occupied is not None and pytree.are_tensors(leaves):
        pointers = storage_pointers(leaves)
        apart = len(set(pointers)) == len(pointers) and occupied.isdisjoint(pointers)
        # Some are shared if a loss returns the buffers that it was given.
        if apart or are_plain_dense(leaves):
            detached = [leaf.detach() if leaf.requires_grad else leaf for leaf in leaves]
            if not apart:
                shared = _repeated(pointers, {*occupied})
                copies = foreach.detach_and_clone([detached[index] for index in shared])
                for index, copy in zip(shared, copies, strict=True):
                    detached[index] = copy
            return detached
    seen = set() if occupied is None else {*occupied}

    def detach(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or (is_constant(leaf) and not leaf.requires_grad):
            return leaf
        if occupied is None:
            return leaf.clone()
        storage = storage_pointer(leaf)
        shared = storage in seen
        seen.add(storage)
        return leaf.detach().clone() if shared else leaf.detach()

    return [private.pytree.tree_map(detach, leaf) for leaf in leaves]


def _repeated(pointers: list[int | None], seen: set[int | None]) -> list[int]:
    """Return the indices of pointers that are in `seen` or occur earlier, and add all to `seen`."""
    repeated = []
    for index, pointer in enumerate(pointers):
        if pointer in seen:
            repeated.append(index)
        seen.add(pointer)
    return repeated


def copy_aliased(tree: Tree, others: Tree) -> Tree:
    """Return `tree`, on its graph, with copies of leaves that may share memory with `others` or
    with each other.
    """
    leaves, structure = pytree.flatten(tree)
    return structure.unflatten(copy_aliased_leaves(leaves, pytree.tensors(others)))


def copy_aliased_leaves(leaves: Leaves, others: Leaves) -> Leaves:
    """Return the leaves, with copies of those that may share memory with `others` or each other."""
    if traced():
        return [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    apart = list(leaves)
    for index in _repeated(storage_pointers(leaves), set(storage_pointers(others))):
        if isinstance(apart[index], Tensor):
            apart[index] = apart[index].clone()
    return apart
