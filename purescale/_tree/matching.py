"""Trees that belong together: their leaves in one order, or a refusal that names the leaf."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from .._torch import dtensor
from .._torch.tracing import refuse_graph_end, traced
from .._tree.leaves import (
    are_plain_dense,
    are_real_floating,
    as_tensor_list,
    check_leaf,
    device_hint,
    leaves_to_check,
    mismatch_error,
    mismatch_reason,
    same_metadata,
)
from .._tree.pytree import (
    FlatTree,
    Leaves,
    Tree,
    TreeDef,
    are_tensors,
    flatten,
    join_names,
    path,
    paths,
)

_shape, _dtype = operator.attrgetter("shape"), operator.attrgetter("dtype")
_device = operator.attrgetter("device")


def leaves_like(name: str, tree: Tree, like_name: str, like: Tree, structure: TreeDef) -> Leaves:
    """Return the leaves of `tree` in the order of those of `like`, which has this structure, or
    raise an error that lists the paths in which the two differ.
    """
    try:
        leaves: Leaves = structure.flatten_up_to(tree)
        if are_tensors(leaves) or not any(isinstance(x, (dict, list, tuple)) for x in leaves):
            return leaves
    except ValueError:
        pass
    got, expected = dict.fromkeys(paths(tree, "")), dict.fromkeys(paths(like, ""))
    missing = [path for path in expected if path not in got]
    extra = [path for path in got if path not in expected]
    raise ValueError(
        f"{name} does not match {like_name}: missing {join_names(missing)}; not in {like_name}: "
        f"{join_names(extra)}. Likely cause: leaves were dropped, which must be None. Fix: for "
        f"flat dicts `{name} = {{key: {name}.get(key) for key in {like_name}}}`."
    )


def flatten_gradients(grads: Tree) -> FlatTree:
    """Flatten a tree of gradients. Refuse, naming the leaf, a leaf that cannot be one."""
    flat = FlatTree.of(grads)
    tensor_list = flat.tensor_list
    if not (tensor_list.dense_without_history and are_real_floating(tensor_list.dtypes)):
        check_gradients(grads, flat.leaves)
    return flat


def grads_like_params(flat_params: FlatTree, grads: Tree) -> FlatTree:
    """Return `grads` with its leaves in the order of the parameters. Refuse, naming the leaf, a
    gradient that does not fit its parameter.
    """
    gradients = leaves_like("grads", grads, "params", flat_params.tree, flat_params.structure)
    tensor_list, of_params = as_tensor_list(gradients), flat_params.tensor_list
    flat_grads = FlatTree(grads, gradients, flat_params.structure, tensor_list)
    both_dense = of_params.dense_without_history and tensor_list.dense_without_history
    if both_dense and are_real_floating(tensor_list.dtypes):
        shapes = list(map(_shape, gradients)), list(map(_shape, flat_params.leaves))
        devices = list(map(_device, gradients)), list(map(_device, flat_params.leaves))
        if shapes[0] == shapes[1] and devices[0] == devices[1]:
            return flat_grads
    check_gradients(flat_params.tree, gradients)
    for index, (gradient, param) in enumerate(zip(gradients, flat_params.leaves, strict=True)):
        if gradient is None:
            continue
        cause = "no parameter there" if param is None else mismatch_reason(gradient, param)
        if cause:
            raise ValueError(
                f"{path(flat_params.tree, 'grads', index)} has {cause}. Fix: the gradients of "
                "these params, `value_and_grad(loss_fn)(params, buffers, batch, scaler=scaler)`."
            )
    return flat_grads


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
    leaves, structure = flatten(tree) if flat is None else (flat.leaves, flat.structure)
    others = leaves_like(other_name, other, name, tree, structure)
    if have_same_metadata(leaves, others):
        return leaves, others, structure
    for index, (a, b) in enumerate(zip(leaves, others, strict=True)):
        if not same_metadata(a, b):
            raise mismatch_error(a, b, path(tree, name, index), other_name, reason)
    others = [dtensor.redistribute_like(b, a) for a, b in zip(leaves, others, strict=True)]
    return leaves, others, structure


def have_same_metadata(leaves: Leaves, others: Leaves) -> bool:
    """Return True if the leaves agree pairwise in all but values and are dense and real. A fast
    check of whole lists.
    """
    return (
        not torch.compiler.is_dynamo_compiling()
        and are_plain_dense([*leaves, *others])
        and list(map(_shape, leaves)) == list(map(_shape, others))
        and list(map(_dtype, leaves)) == list(map(_dtype, others))
        and list(map(_device, leaves)) == list(map(_device, others))
    )


# ---- one tree ------------------------------------------------------------------------------------


def check_gradients(grads: Tree, leaves: Leaves, name: str = "grads") -> None:
    """Refuse, naming the leaf, a leaf that cannot be a gradient."""
    for index, leaf in leaves_to_check(leaves):
        check_leaf(leaf, path(grads, name, index), "gradient")


def check_names(dotted_names: Sequence[str]) -> None:
    """Refuse equal dotted names of parameters."""
    if len(set(dotted_names)) != len(dotted_names):
        raise ValueError(
            "params: two leaves have the same dotted name, such as {'a.b': ...} beside "
            "{'a': {'b': ...}}. Fix: rename one."
        )


def check_parameters(flat_params: FlatTree, name: str = "params") -> None:
    """Refuse, naming the leaf, a leaf that cannot be a parameter."""
    if flat_params.tensor_list.dense_without_history and are_real_floating(
        flat_params.tensor_list.dtypes
    ):
        return
    for index, leaf in leaves_to_check(flat_params.leaves):
        check_leaf(leaf, path(flat_params.tree, name, index), "parameter")


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
                f"they must be on one device. {device_hint(leaf.device)}"
            )
        device = leaf.device
    return torch.device("cpu") if device is None else device


def refuse_autograd_history(**trees: Tree) -> None:
    """Refuse tensors with autograd history, which a step would silently detach."""
    if traced() or not torch.is_grad_enabled():
        return
    for name, tree in trees.items():
        flat = tree if isinstance(tree, FlatTree) else FlatTree.of(tree)
        for index, leaf in enumerate([] if flat.tensor_list.dense_without_history else flat.leaves):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                refuse_graph_end()
                raise ValueError(
                    f"{paths(flat.tree, name)[index]} is a result of torch.autograd "
                    f"({leaf.grad_fn.name()}), and `.backward()` cannot go through a step. Fix: "
                    "`with torch.no_grad():` around the step; for a derivative torch.func.grad of "
                    "a function that makes it, or from_torch(..., differentiable=True)."
                )
