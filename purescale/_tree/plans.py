"""Plans: what was decided for arguments of one structure and metadata, found again by these."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor

from .._torch.tensor_list import Cache, TensorList, metadata_guard
from .._torch.tracing import can_plan, captured
from .._tree.tree import FlatTree, Tree, flatten, is_of_builtins

PlanT = TypeVar("PlanT")

_grad_fn, _requires_grad = map(operator.attrgetter, ("grad_fn", "requires_grad"))


class Plans(Generic[PlanT]):
    """The plans of one function, the newest first.

    A plan is found for tensors that differ from those it was made for in values only, and a key
    that is equal: the structure of the arguments, and the settings that decide what is planned.
    A plan that is found changes no result: it holds what would be decided again, by indices and
    names, and no tensor of a call.

    Args:
        size: The number of plans that are kept; None keeps all.
    """

    def __init__(self, size: int | None = 8) -> None:
        self._size = size
        # Replaced as a whole, so that a thread which looks for a plan needs no lock.
        self._entries: tuple[tuple[Any, Any, PlanT], ...] = ()

    def matching(self, tensors: Sequence[Tensor], key: Any) -> Iterator[PlanT]:
        """Yield the plans for tensors like these and an equal key."""
        for key_of_plan, is_like, plan in self._entries:
            if _are_equal(key_of_plan, key) and is_like(tensors):
                yield plan

    def add(self, tensors: Sequence[Tensor], key: Any, plan: PlanT) -> None:
        """Keep a plan for plain, dense tensors like these, in place of the oldest one."""
        entry = key, metadata_guard(tensors), plan
        self._entries = (entry, *self._entries)[: self._size]

    def discard(self, plan: PlanT) -> None:
        """Forget a plan."""
        self._entries = tuple(entry for entry in self._entries if entry[2] is not plan)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles have no plans, because guards cannot be pickled."""
        return type(self), (self._size,)

    def __iter__(self) -> Iterator[PlanT]:
        """Iterate over all plans."""
        return (plan for _, _, plan in self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _are_equal(a: Any, b: Any) -> bool:
    """Return True if two keys are equal. Metadata of a user's containers may not be comparable."""
    try:
        return bool(a == b)
    except (TypeError, ValueError, RuntimeError):
        return False


# ---- plans for trees -----------------------------------------------------------------------------


def find_plan(plans: Plans[Any], trees: Sequence[Tree]) -> tuple[list[FlatTree], Any] | None:
    """Return the trees, flat, and what was planned for trees that differ from them in values only;
    None if nothing was. It is asked where `can_plan`.
    """
    leaves, structure = flatten(tuple(trees))
    for slices, caches, may_have_graph, decisions in plans.matching(leaves, _form(structure)):
        if may_have_graph and any(map(_grad_fn, leaves)):
            continue
        flat, structures = [], structure.children()  # type: ignore[attr-defined]
        for tree, child, at, cache in zip(trees, structures, slices, caches, strict=True):
            tensor_list = TensorList(leaves[at], cache, dense_off_graph=True)
            flat.append(FlatTree(tree, tensor_list.tensors, child, tensor_list))
        return flat, decisions
    return None


def add_plan(plans: Plans[Any], trees: Sequence[FlatTree], decisions: Any) -> None:
    """Keep decisions for trees like these, if all leaves are dense and off every graph, in
    containers of Python's that keep nothing of a user's alive. One tensor in two places is not
    alike to itself, and would only take the place of other plans.
    """
    if not (can_plan() and all([tree.tensor_list.dense_off_graph for tree in trees])):
        return
    leaves = [leaf for tree in trees for leaf in tree.leaves]
    structure: Any = flatten(tuple([tree.tree for tree in trees]))[1]
    if len(set(map(id, leaves))) == len(leaves) and is_of_builtins(structure):
        ends = list(itertools.accumulate([len(tree.leaves) for tree in trees], initial=0))
        slices = list(map(slice, ends, ends[1:]))
        caches = [Cache(metadata_guard(tree.leaves)) for tree in trees]
        may_have_graph = any(map(_requires_grad, leaves))
        plans.add(leaves, _form(structure), (slices, caches, may_have_graph, decisions))


def _form(structure: Any) -> Any:
    """Return what decides besides metadata: the structure, and whether a graph may be captured,
    which refuses more.
    """
    return captured(), structure
