"""Pytrees of tensors: structure, copies, names, matching of two trees, by optree.

A tree is any nesting of dict, list, tuple and NamedTuple. `None` is a leaf and passes through every
function. Dicts keep their key order: outputs with sorted keys would retrace a compiled step.
"""

from __future__ import annotations

import operator
import typing
from collections.abc import Callable, Iterable, Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import optree
import torch
from torch import Tensor

from .._torch import dtensor, foreach, private
from .._torch.donation import storage_pointer, storage_pointers
from .._torch.tensor_list import TensorList
from .._torch.tracing import PLAIN_TYPES, refuse_graph_end, traced, under_transform
from .._tree import leaves as _leaf

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
_OPTREE: dict[str, Any] = {"none_is_leaf": True, "namespace": "purescale"}
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
        leaves, structure = optree.tree_flatten(tree, **_OPTREE)
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
    """A tree with its leaves and structure, flattened once at the start of a step."""

    tree: Tree
    leaves: Leaves
    structure: Any  # a `TreeDef`; None for a tree that is never rebuilt from its leaves
    tensor_list: TensorList  # of the leaves

    def leaves_if_matching(self, other: Tree) -> Leaves | None:
        """Return the leaves of a tree that is known to differ from this one in values only; None if
        that is not known.
        """
        if self.tensor_list.metadata.matcher is None:
            return None
        try:
            leaves: Leaves = self.structure.flatten_up_to(other)
        except ValueError:
            return None
        return leaves if self.tensor_list.matches(leaves) else None


def flatten_once(tree: Tree) -> FlatTree:
    leaves, structure = flatten(tree)
    return FlatTree(tree, leaves, structure, _leaf.as_tensor_list(leaves))


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
    if not traced() and _leaf.are_plain_dense(present):
        copies = iter(foreach.clone(present))
        return structure.unflatten([None if leaf is None else next(copies) for leaf in leaves])
    return structure.unflatten(list(_map(_copy, leaves)))


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return off_graph(leaf).clone()
    # a container that only torch's pytree knows, or no container
    return private.pytree.tree_map_only(Tensor, _copy, leaf)


def off_graph(leaf: Tensor) -> Tensor:
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


def detach_unaliased(leaves: Leaves, taken: Set[int | None] | None) -> Leaves:
    """Detach leaves, which may be containers that only torch's pytree knows. A leaf is copied if
    its memory is in `taken` or is that of an earlier leaf; if `taken` is None (traced), every leaf
    is. Constants that are not on a graph stay the same objects.
    """
    seen = set() if taken is None else {*taken}

    def detach(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or (_leaf.is_constant(leaf) and not leaf.requires_grad):
            return leaf
        if taken is None:
            return leaf.clone()
        storage = storage_pointer(leaf)
        shared = storage in seen
        seen.add(storage)
        return leaf.detach().clone() if shared else leaf.detach()

    if taken is not None and are_tensors(leaves):
        storages = storage_pointers(leaves)
        apart = len(set(storages)) == len(storages) and taken.isdisjoint(storages)
        # Some are shared if a loss returns the buffers that it was given.
        if apart or _leaf.are_plain_dense(leaves):
            detached = [leaf.detach() if leaf.requires_grad else leaf for leaf in leaves]
            shared = [] if apart else _repeated(storages, seen)
            copies = foreach.clone([detached[index] for index in shared]) if shared else []
            for index, copy in zip(shared, copies, strict=True):
                detached[index] = copy
            return detached
    return [private.pytree.tree_map(detach, leaf) for leaf in leaves]


def _repeated(storages: list[int | None], seen: set[int | None]) -> list[int]:
    """Return the indices of storages that are in `seen` or occur earlier, and add all to `seen`."""
    repeated = []
    for index, storage in enumerate(storages):
        if storage in seen:
            repeated.append(index)
        seen.add(storage)
    return repeated


def copy_aliased(tree: Tree, inputs: Tree) -> Tree:
    """Return `tree`, on its graph, with copies of leaves that may share memory with `inputs` or
    with each other.
    """
    leaves, structure = flatten(tree)
    return structure.unflatten(copy_aliased_leaves(leaves, tensors(inputs)))


def copy_aliased_leaves(leaves: Leaves, others: Leaves) -> Leaves:
    """Return the leaves, with copies of those that may share memory with `others` or each other."""
    if traced():
        return [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    taken, storages = set(storage_pointers(others)), storage_pointers(leaves)
    if len(set(storages)) == len(storages) and taken.isdisjoint(storages):
        return leaves
    apart = []
    for leaf, storage in zip(leaves, storages, strict=True):
        if isinstance(leaf, Tensor) and storage in taken:
            leaf = leaf.clone()
            storage = storage_pointer(leaf)
        taken.add(storage)
        apart.append(leaf)
    return apart


def paths(tree: Tree, name: str) -> list[str]:
    """Return the path of each leaf, as Python: `grads['conv']['weight']`."""
    return [accessor.codify(name) for accessor in optree.tree_accessors(tree, **_OPTREE)]


_shape, _dtype = operator.attrgetter("shape"), operator.attrgetter("dtype")
_device = operator.attrgetter("device")


def names(tree: Tree, *, holes: bool = False) -> list[str]:
    """Return the dotted name of each leaf, `conv.weight`, in the order of `flatten`. The names of a
    flat dict are its keys. With `holes`, `()` is a leaf.
    """
    if _is_dict_of_leaves(tree):
        return [str(key) for key in tree]
    if not torch.compiler.is_dynamo_compiling():
        is_leaf = (lambda node: node == ()) if holes else None
        paths = optree.tree_paths(tree, is_leaf, **_OPTREE)
        return [".".join(str(part) for part in path) for path in paths]
    if isinstance(tree, dict):
        children = list(tree.items())
    else:
        parts = private.pytree.tree_leaves(tree, is_leaf=lambda part: part is not tree)
        if parts and parts[0] is tree:
            return [""]
        children = list(enumerate(parts))
    return [
        f"{key}.{name}" if name else str(key) for key, child in children for name in names(child)
    ]


def keys(tree: Tree) -> list[tuple[str, ...]]:
    """Return the path of each leaf as strings: keys of dicts, fields of NamedTuples, positions in
    lists and tuples.
    """
    return [
        tuple(str(getattr(entry, "field", entry.entry)) for entry in accessor)
        for accessor in optree.tree_accessors(tree, **_OPTREE)
    ]


def path(tree: Tree, name: str, index: int) -> str:
    """Return the path of leaf `index`, as Python; while compiling, its number, because optree
    cannot be traced.
    """
    return f"leaf {index}" if torch.compiler.is_dynamo_compiling() else paths(tree, name)[index]


def leaves_like(
    name: str, tree: Tree, like_name: str, like: Tree, structure: TreeDef | None = None
) -> Leaves:
    """Return the leaves of `tree` in the order of those of `like`, or raise an error that lists the
    paths in which the two differ.
    """
    structure = flatten(like)[1] if structure is None else structure
    try:
        leaves: Leaves = structure.flatten_up_to(tree)
        if are_tensors(leaves) or not any(isinstance(x, (dict, list, tuple)) for x in leaves):
            return leaves
    except ValueError:
        pass
    if torch.compiler.is_dynamo_compiling():
        raise ValueError(
            f"{name} and {like_name} differ in structure. Fix: run the step once without "
            "torch.compile, which names the paths."
        )
    got, expected = dict.fromkeys(paths(tree, "")), dict.fromkeys(paths(like, ""))
    missing = [path for path in expected if path not in got]
    extra = [path for path in got if path not in expected]
    raise ValueError(
        f"{name} does not match {like_name}: missing {join_names(missing)}; not in {like_name}: "
        f"{join_names(extra)}. Likely cause: leaves were dropped, which must be None. Fix: for "
        f"flat dicts `{name} = {{key: {name}.get(key) for key in {like_name}}}`."
    )


def gradients_like(params: FlatTree, grads: Tree) -> FlatTree:
    """Return `grads` with its leaves in the order of `params`. Refuse, naming the leaf, a gradient
    that does not fit its parameter.
    """
    gradients = leaves_like("grads", grads, "params", params.tree, params.structure)
    tensor_list, of_params = _leaf.as_tensor_list(gradients), params.tensor_list
    flat_grads = FlatTree(grads, gradients, params.structure, tensor_list)
    both_dense = of_params.dense_off_graph and tensor_list.dense_off_graph
    if both_dense and _leaf.are_real_floating(tensor_list.dtypes):
        shapes = list(_map(_shape, gradients)), list(_map(_shape, params.leaves))
        devices = list(_map(_device, gradients)), list(_map(_device, params.leaves))
        if shapes[0] == shapes[1] and devices[0] == devices[1]:
            return flat_grads
    check_gradients(params.tree, gradients)
    for index, (gradient, param) in enumerate(zip(gradients, params.leaves, strict=True)):
        if gradient is None:
            continue
        cause = "no parameter there" if param is None else _leaf.mismatch_reason(gradient, param)
        if cause:
            raise ValueError(
                f"{path(params.tree, 'grads', index)} has {cause}. Fix: the gradients of these "
                "params, `value_and_grad(loss_fn)(params, buffers, batch, scaler=scaler)`."
            )
    return flat_grads


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


# ---- graphs --------------------------------------------------------------------------------------


def reject_autograd_history(**trees: Tree) -> None:
    """Refuse tensors with autograd history, which a step would silently detach."""
    if traced() or not torch.is_grad_enabled():
        return
    for name, tree in trees.items():
        flat = tree if isinstance(tree, FlatTree) else flatten_once(tree)
        for index, leaf in enumerate([] if flat.tensor_list.dense_off_graph else flat.leaves):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                refuse_graph_end()
                raise ValueError(
                    f"{paths(flat.tree, name)[index]} is a result of torch.autograd "
                    f"({leaf.grad_fn.name()}), and `.backward()` cannot go through a step. Fix: "
                    "`with torch.no_grad():` around the step; for a derivative torch.func.grad of "
                    "a function that makes it, or from_torch(..., differentiable=True)."
                )


# ---- leaves --------------------------------------------------------------------------------------


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


_REASON = "A skipped step returns the old one, an applied step the new one: both must match."


def matching_leaves(
    tree: Tree,
    other: Tree,
    name: str,
    other_name: str,
    reason: str = _REASON,
    flat: FlatTree | None = None,
) -> tuple[Leaves, Leaves, TreeDef]:
    """Return the leaves of two trees in one order, and the structure. Refuse, naming the leaf,
    trees that differ in anything but values. `flat` is `tree` flattened, if that is known.
    """
    if flat is not None and (alike := flat.leaves_if_matching(other)) is not None:
        return flat.leaves, alike, flat.structure
    leaves, structure = flatten(tree) if flat is None else (flat.leaves, flat.structure)
    others = leaves_like(other_name, other, name, tree, structure)
    if _have_same_metadata(leaves, others):
        return leaves, others, structure
    for index, (a, b) in enumerate(zip(leaves, others, strict=True)):
        if not _leaf.same_metadata(a, b):
            raise _leaf.mismatch_error(a, b, path(tree, name, index), other_name, reason)
    others = [dtensor.redistribute_like(b, a) for a, b in zip(leaves, others, strict=True)]
    return leaves, others, structure


def _have_same_metadata(leaves: Leaves, others: Leaves) -> bool:
    """Return True if the leaves agree pairwise in all but values and are dense and real. A fast
    check of whole lists.
    """
    return (
        not torch.compiler.is_dynamo_compiling()
        and _leaf.are_plain_dense([*leaves, *others])
        and list(_map(_shape, leaves)) == list(_map(_shape, others))
        and list(_map(_dtype, leaves)) == list(_map(_dtype, others))
        and list(_map(_device, leaves)) == list(_map(_device, others))
    )


def as_flag(found_inf: Tensor | bool, like: Tensor | None = None) -> Tensor:
    """Return `found_inf` as a 0-d bool tensor; a Python bool is put on the device of `like`."""
    if isinstance(found_inf, Tensor):
        if found_inf.ndim != 0:
            raise ValueError(
                f"found_inf has shape {tuple(found_inf.shape)}; one flag decides for everything, "
                "so it must be 0-d. Fix: `found_inf.any()`; for stacked states, call this under "
                "`torch.vmap`."
            )
        return found_inf if found_inf.dtype is torch.bool else found_inf != 0
    if isinstance(found_inf, bool):
        # Not `torch.tensor`, whose copy to a device the host waits for.
        return torch.full((), found_inf, device=None if like is None else like.device)
    raise TypeError(
        f"found_inf must be a 0-d bool tensor (True = bad), got {found_inf!r}. Fix: "
        "`torch.tensor(found_inf)`."
    )


def increment(count: Tensor, happened: Tensor | bool) -> Tensor:
    """Return `count + happened`, which stays near the largest number of its dtype: a counter that
    wraps around would turn a decision.
    """
    return count.clamp(max=torch.iinfo(count.dtype).max - 1) + happened


# ---- checks --------------------------------------------------------------------------------------


def check_gradients(grads: Tree, leaves: Leaves, name: str = "grads") -> None:
    """Refuse, naming the leaf, a leaf that cannot be a gradient."""
    for index, leaf in _leaf.leaves_to_check(leaves):
        _leaf.check_leaf(leaf, path(grads, name, index), "gradient")


def check_names(dotted_names: Sequence[str]) -> None:
    """Refuse equal dotted names of parameters."""
    if len(set(dotted_names)) != len(dotted_names):
        raise ValueError(
            "params: two leaves have the same dotted name, such as {'a.b': ...} beside "
            "{'a': {'b': ...}}. Fix: rename one."
        )


def check_parameters(params: FlatTree, name: str = "params") -> None:
    """Refuse, naming the leaf, a leaf that cannot be a parameter."""
    if params.tensor_list.dense_off_graph and _leaf.are_real_floating(params.tensor_list.dtypes):
        return
    for index, leaf in _leaf.leaves_to_check(params.leaves):
        _leaf.check_leaf(leaf, path(params.tree, name, index), "parameter")


def device_of(tree: Tree, leaves: Leaves, name: str) -> torch.device:
    """Return the device of the leaves, the CPU if there are no leaves. Refuse, naming the leaf,
    leaves on two devices.
    """
    device: torch.device | None = None
    for index, leaf in enumerate(leaves):
        if leaf is None or leaf.device == device:
            continue
        if device is not None:
            raise ValueError(
                f"{path(tree, name, index)} is on {leaf.device}, the leaves before it on {device}; "
                f"they must be on one device. {_leaf.device_hint(leaf.device)}"
            )
        device = leaf.device
    return torch.device("cpu") if device is None else device
