"""Caches of what was decided about arguments, found again by structure and metadata."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from torch import Tensor

from .._torch.tensor_list import ListMetadata, TensorList, metadata_matcher
from .._torch.tracing import CallContext
from .._tree.pytree import FlatTree, Tree, flatten, is_of_builtins

ValueT = TypeVar("ValueT")

_grad_fn, _requires_grad = map(operator.attrgetter, ("grad_fn", "requires_grad"))


class MetadataCache(Generic[ValueT]):
    """A cache of values for lists of tensors, the newest first.

    A value is found for tensors that differ from those it was made for in values only, and an equal
    key: what else decides about the call.
    It changes no result: it holds what would be decided again, by indices and names, and no tensor
    of a call.

    Args:
        size: The number of values that are kept; None keeps all.
    """

    def __init__(self, size: int | None = 8) -> None:
        self._size = size
        # Replaced as a whole, so that a thread which looks for a value needs no lock.
        self.entries: tuple[tuple[Any, Callable[..., bool], ValueT], ...] = ()

    def matching(self, tensors: Sequence[Tensor], key: Any) -> Iterator[ValueT]:
        """Yield the values for tensors like these and an equal key."""
        for key_of_entry, matches, value in self.entries:
            if key_of_entry == key and matches(tensors):
                yield value

    def add(self, tensors: Sequence[Tensor], key: Any, value: ValueT) -> None:
        """Keep a value for plain, dense tensors like these, in place of the oldest one."""
        entry = key, metadata_matcher(tensors), value
        self.entries = (entry, *self.entries)[: self._size]

    def discard(self, value: ValueT) -> None:
        """Forget a value."""
        self.entries = tuple(entry for entry in self.entries if entry[2] is not value)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are empty, because matchers cannot be pickled."""
        return type(self), (self._size,)

    def __iter__(self) -> Iterator[ValueT]:
        """Iterate over all values."""
        return (value for _, _, value in self.entries)

    def __len__(self) -> int:
        return len(self.entries)


# ---- for trees -----------------------------------------------------------------------------------


# A container in a tree, below another one: the parent by number, in the order of the nodes, where 0
# is the root; the key in it; the type; the keys of a dict, in its order, else the length.
Node: TypeAlias = tuple[int, Any, Any, Any]


class TreeEntry(NamedTuple):
    """A value for arguments that are trees, with their form."""

    structure: Any  # of all of them, as a tuple
    nodes: list[Node]
    # the leaves of each tree, its structure, and their metadata
    parts: list[tuple[slice, Any, ListMetadata]]
    may_have_graph: bool
    value: Any  # for them


class TreeCache(MetadataCache[TreeEntry]):
    """A cache of values for arguments that are trees."""

    def find_trees(
        self, context: CallContext, trees: tuple[Tree, ...]
    ) -> tuple[list[FlatTree], Any] | None:
        """Return the trees, flat, and the value for trees that differ from them in values only, in
        calls that ran where this one does; None if there is none.
        """
        if not context.reuses_plans:
            return None
        for key, matches, entry in self.entries:
            if key != (context, len(trees)) or not _has_form(trees, entry.nodes):
                continue
            # By a known structure, which takes a sixth of the time of a new one.
            leaves = entry.structure.flatten_up_to(trees)
            if not matches(leaves):
                continue
            if entry.may_have_graph and any(map(_grad_fn, leaves)):
                continue
            flat_trees = []
            for tree, (at, structure, metadata) in zip(trees, entry.parts, strict=True):
                some = leaves[at]
                tensor_list = TensorList(some, metadata, dense_without_history=True)
                flat_trees.append(FlatTree(tree, some, structure, tensor_list))
            return flat_trees, entry.value
        return None

    def add_trees(self, context: CallContext, flat_trees: Sequence[FlatTree], value: Any) -> None:
        """Keep a value for trees like these. Left out are trees with a leaf that is None, is not
        plain, dense and real, or has a `grad_fn`; with containers other than Python's or keys that
        are not strings, which could keep an object of a user's alive; with one tensor twice,
        because their matcher never matches; and with leaves in the order of another tree.
        """
        all_dense = all([tree.tensor_list.dense_without_history for tree in flat_trees])
        if not (context.reuses_plans and all_dense):
            return
        arguments = tuple([tree.tree for tree in flat_trees])
        leaves, structure = flatten(arguments)
        all_differ = len(set(map(id, leaves))) == len(leaves)
        flat_leaves = itertools.chain.from_iterable([tree.leaves for tree in flat_trees])
        same_order = all(map(operator.is_, leaves, flat_leaves))
        if not (all_differ and same_order and is_of_builtins(structure)):
            return
        ends = list(itertools.accumulate([len(tree.leaves) for tree in flat_trees], initial=0))
        slices, structures = map(slice, ends, ends[1:]), structure.children()  # type: ignore[attr-defined]
        entry = TreeEntry(
            structure,
            nodes=_nodes_below(arguments),
            parts=list(zip(slices, structures, _metadata_of(flat_trees), strict=True)),
            may_have_graph=any(map(_requires_grad, leaves)),
            value=value,
        )
        self.add(leaves, (context, len(flat_trees)), entry)


def _has_form(root: tuple[Tree, ...], nodes: list[Node]) -> bool:
    """Return True if the containers in a tree are those of `nodes`. optree takes dicts whose keys
    have another order for equal, but a tree comes back in its own order.
    """
    walked: list[Any] = [root]
    for parent, key, kind, keys in nodes:
        node: Any = walked[parent][key]
        if type(node) is not kind or (list(node) if type(keys) is list else len(node)) != keys:
            return False
        walked.append(node)
    return True


def _metadata_of(flat_trees: Sequence[FlatTree]) -> list[ListMetadata]:
    """Return the metadata of each tree, which trees whose leaves are alike share."""
    of_trees: list[ListMetadata] = []
    for tree in flat_trees:
        alike = (each for each in of_trees if each.matcher and each.matcher(tree.leaves))
        of_trees.append(next(alike, None) or ListMetadata(metadata_matcher(tree.leaves)))
    return of_trees


def _nodes_below(root: tuple[Tree, ...]) -> list[Node]:
    """Return the containers in a tree, each after its parent."""
    nodes: list[Node] = []
    walked: list[Any] = [root]
    for parent, node in enumerate(walked):  # which grows
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, child in items:
            if isinstance(child, (dict, tuple, list)):
                keys = list(child) if isinstance(child, dict) else len(child)
                nodes.append((parent, key, type(child), keys))
                walked.append(child)
    return nodes
