"""Pytrees of tensors: structure, copies and names, by optree.

A tree is any nesting of dict, list, tuple and NamedTuple. `None` is a leaf and passes through every
function. Dicts keep their key order: outputs with sorted keys would retrace a compiled step.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import optree
import torch
from torch import Tensor

from .._torch import foreach, private
from .._torch.tensor_list import TensorList
from .._torch.tracing import PLAIN_TYPES, traced, under_transform
from .._tree.leaves import are_plain_dense, as_tensor_list

_map = map  # the builtin, which `map` over trees shadows below

Tree: TypeAlias = Any
if TYPE_CHECKING:
    # Only it has defaults before Python 3.13; with them `TrainState` alone is a type.
    from typing_extensions import TypeVar

    TreeT = TypeVar("TreeT", default=Any)  # a tree that comes back as one of its type
    StateT = TypeVar("StateT", default=Any)
else:
    TreeT, StateT = typing.TypeVar("TreeT"), typing.TypeVar("StateT")
Leaves: TypeAlias = list[Any]


class TreeDef(Protocol):
    """The structure of a tree: optree's, torch's while compiling, or a `DictDef`."""

    def unflatten(self, leaves: Iterable[Any], /) -> Tree: ...

    def flatten_up_to(self, tree: Tree, /) -> Leaves: ...


# optree sorts dict keys by default, but the state of a torch optimizer has the order of the
# parameters. The setting applies to this namespace only.
_insertion_ordered = optree.dict_insertion_ordered(True, namespace="purescale")
_insertion_ordered.__enter__()


# ---- structure -----------------------------------------------------------------------------------


def flatten(tree: Tree) -> tuple[Leaves, TreeDef]:
    """Return the leaves and the structure, which has `.unflatten(leaves)` and
    `.flatten_up_to(other)`.
    """
    if torch.compiler.is_dynamo_compiling():
        if _is_dict_of_leaves(tree):
            return list(tree.values()), DictDef(tuple(tree))  # compiles ten times as fast
        # Dynamo cannot trace optree through an empty dict, such as the buffers of a net without
        # BatchNorm.
        leaves, structure = private.pytree.tree_flatten(tree)
    else:
        leaves, structure = optree.tree_flatten(tree, **private.OPTREE)
    return leaves, structure


def is_of_builtins(structure: Any) -> bool:
    """Return True if a structure of optree has lists, tuples, NamedTuples and dicts by strings
    alone. Other nodes and keys are objects of a user's, and 1 and True are one key.
    """
    kind, kinds = structure.kind, optree.PyTreeKind
    if kind in (kinds.DICT, kinds.ORDEREDDICT):
        if not all(type(key) is str for key in structure.entries()):
            return False
    elif kind not in (kinds.LEAF, kinds.LIST, kinds.TUPLE, kinds.NAMEDTUPLE):
        return False
    return all(map(is_of_builtins, structure.children()))


def _is_dict_of_leaves(tree: Tree) -> bool:
    return type(tree) is dict and all(
        [type(x) is Tensor or x is None or isinstance(x, Tensor) for x in tree.values()]
    )


class DictDef(NamedTuple):
    """The structure of a dict of leaves."""

    names: tuple[Any, ...]

    def unflatten(self, leaves: Iterable[Any]) -> dict[Any, Any]:
        return dict(zip(self.names, leaves, strict=True))

    def flatten_up_to(self, tree: Tree) -> Leaves:
        if not isinstance(tree, dict) or tree.keys() != set(self.names):
            raise ValueError(f"not a dict of {self.names}")
        return [tree[name] for name in self.names]


class FlatTree(NamedTuple):
    """A tree with its leaves and structure, so that it is flattened once in a call."""

    tree: Tree
    leaves: Leaves
    structure: Any  # a `TreeDef`
    tensor_list: TensorList  # of the leaves

    @classmethod
    def of(cls, tree: Tree) -> FlatTree:
        """Flatten a tree."""
        leaves, structure = flatten(tree)
        return cls(tree, leaves, structure, as_tensor_list(leaves))

    def leaves_if_matching(self, other: Tree) -> Leaves | None:
        """Return the leaves of a tree that is known to differ from this one in values only; None if
        that is not known.
        """
        if (matches := self.tensor_list.metadata.matcher) is None:
            return None
        try:
            leaves: Leaves = self.structure.flatten_up_to(other)
        except ValueError:
            return None
        return leaves if matches(leaves) else None


def map(fn: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Map `fn` over the leaves of trees with the structure of `tree`; `None` stays `None`."""
    leaves, structure = flatten(tree)
    leaf_lists = [leaves, *(structure.flatten_up_to(other) for other in rest)]
    return structure.unflatten(
        [None if row[0] is None else fn(*row) for row in zip(*leaf_lists, strict=True)]
    )


def tensors(tree: Tree) -> list[Tensor]:
    leaves = flatten(tree)[0]
    return leaves if are_tensors(leaves) else [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def are_tensors(leaves: Leaves) -> bool:
    """Return True if each leaf is a tensor of a plain type. A fast check of the whole list."""
    return set(_map(type, leaves)) <= PLAIN_TYPES


def clone(tree: TreeT) -> TreeT:
    """Equal to `tree_map(lambda leaf: leaf.detach().clone(), tree)`: a copy of a state, to keep
    before a step that donates it.

    Args:
        tree: Any tree, such as a TrainState. `None` and leaves that are not tensors stay as they
            are.

    Returns:
        A tree in fresh memory, with the strides that `Tensor.clone` gives. Each leaf has memory of
        its own, so one tensor under two names becomes two, and all of them can be donated. It is
        off the graph of torch.autograd, and without `requires_grad`; derivatives of torch.func pass
        through.

    Example:
        >>> import torch
        >>> state = {"w": torch.ones(2), "none": None}
        >>> start = clone(state)
        >>> state["w"].add_(1.0), start
        (tensor([2., 2.]), {'w': tensor([1., 1.]), 'none': None})

    Source of the form: `torch.clone`, for one tensor.
    """
    leaves, structure = flatten(tree)
    present = [leaf for leaf in leaves if leaf is not None]
    if not traced() and are_plain_dense(present):
        copies = iter(foreach.detach_and_clone(present))
        return structure.unflatten([None if leaf is None else next(copies) for leaf in leaves])
    return structure.unflatten(list(_map(_copy, leaves)))


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return detach_unless_transformed(leaf).clone()
    # a container that only torch's pytree knows, or no container
    return private.pytree.tree_map_only(Tensor, _copy, leaf)


def detach_unless_transformed(leaf: Tensor) -> Tensor:
    """Return `leaf.detach()`, or `leaf` under torch.func, so that derivatives pass through."""
    return leaf if under_transform() else leaf.detach()


def all_tensors(tree: Any) -> list[Tensor]:
    """Like `tensors`, but also in containers that only torch's pytree knows."""
    kind = type(tree)
    if kind in PLAIN_TYPES:
        return [tree]
    if kind is list or kind is tuple or kind is dict:
        children = tree.values() if kind is dict else tree
        return [tensor for child in children for tensor in all_tensors(child)]
    parts = [] if kind in _NO_TREES else private.pytree.tree_leaves(flatten(tree)[0])
    return [part for part in parts if isinstance(part, Tensor)]


_NO_TREES = frozenset((int, float, bool, str, bytes, type(None)))


def paths(tree: Tree, name: str) -> list[str]:
    """Return the path of each leaf, as Python: `grads['conv']['weight']`."""
    return [accessor.codify(name) for accessor in optree.tree_accessors(tree, **private.OPTREE)]


def dotted_names(tree: Tree, *, holes: bool = False) -> list[str]:
    """Return the dotted name of each leaf, `conv.weight`, in the order of `flatten`. The names of a
    flat dict are its keys. With `holes`, `()` is a leaf.
    """
    if _is_dict_of_leaves(tree):
        return [str(key) for key in tree]
    if not torch.compiler.is_dynamo_compiling():
        is_leaf = (lambda node: node == ()) if holes else None
        key_paths = optree.tree_paths(tree, is_leaf, **private.OPTREE)
        return [".".join(map(str, parts)) for parts in key_paths]
    if isinstance(tree, dict):
        children = list(tree.items())
    else:
        parts = private.pytree.tree_leaves(tree, is_leaf=lambda part: part is not tree)
        if parts and parts[0] is tree:
            return [""]
        children = list(enumerate(parts))
    return [
        f"{key}.{name}" if name else str(key)
        for key, child in children
        for name in dotted_names(child)
    ]


def key_paths(tree: Tree) -> list[tuple[str, ...]]:
    """Return the path of each leaf as strings: keys of dicts, fields of NamedTuples, positions in
    lists and tuples.
    """
    return [
        tuple(str(getattr(entry, "field", entry.entry)) for entry in accessor)
        for accessor in optree.tree_accessors(tree, **private.OPTREE)
    ]


def path(tree: Tree, name: str, index: int) -> str:
    """Return the path of leaf `index`, as Python."""
    return paths(tree, name)[index]


def describe_argument(tree: Any) -> str:
    """Return a short description of an object that was passed in place of a tree."""
    if isinstance(tree, Tensor):
        return f"a tensor of shape {tuple(tree.shape)}"
    if isinstance(tree, dict):
        return f"a dict of {join_names([repr(name) for name in tree])}"
    return type(tree).__name__


def join_names(items: list[str], most: int = 5) -> str:
    if not items:
        return "nothing"
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")


def cast(tree: Tree, dtype: torch.dtype | None, *, copy: bool = False) -> Tree:
    """Cast the floating tensors of `tree` to `dtype`, None for their own, and leave everything
    else. Containers that only torch's pytree knows are cast too.
    """

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to((leaf.is_floating_point() and dtype) or leaf.dtype, copy=copy)

    return private.pytree.tree_map(convert, tree)


def as_normal_tensor(leaf: Any) -> Any:
    """Return the leaf, or a copy that autograd accepts if it was made under inference_mode."""
    return (
        leaf.clone() if isinstance(leaf, Tensor) and not traced() and leaf.is_inference() else leaf
    )
