"""Trees that belong together: their leaves in one order, or a refusal that names the leaf."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import dtensor
from .._torch.tensor_list import TensorList
from .._torch.tracing import refuse_graph_end, traced
from .._tree.leaves import (
    are_plain_dense,
    are_real_floating,
    as_tensor_list,
    check_leaf,
    describe,
    device_hint,
    is_constant,
    is_dense_floating,
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
    missing = [each for each in expected if each not in got]
    extra = [each for each in got if each not in expected]
    raise ValueError(
        f"{name} does not match {like_name}: missing {join_names(missing)}; not in {like_name}: "
        f"{join_names(extra)}. Likely cause: leaves were dropped, which must be None. Fix: for "
        f"flat dicts `{name} = {{key: {name}.get(key) for key in {like_name}}}`."
    )


def flatten_gradients(grads: Tree) -> FlatTree:
    """Flatten a tree of gradients. Refuse, naming the leaf, a leaf that cannot be one."""
    flat = FlatTree.of(grads)
    if not _all_supported(flat.tensor_list):
        check_leaves(grads, flat.leaves, "grads", "gradient")
    return flat


def grads_like_params(flat_params: FlatTree, grads: Tree) -> FlatTree:
    """Return `grads` with its leaves in the order of the parameters. Refuse, naming the leaf, a
    gradient that does not fit its parameter.
    """
    gradients = leaves_like("grads", grads, "params", flat_params.tree, flat_params.structure)
    tensor_list, of_params = as_tensor_list(gradients), flat_params.tensor_list
    flat_grads = FlatTree(grads, gradients, flat_params.structure, tensor_list)
    if of_params.dense_without_history and _all_supported(tensor_list):
        shapes = list(map(_shape, gradients)), list(map(_shape, flat_params.leaves))
        devices = list(map(_device, gradients)), list(map(_device, flat_params.leaves))
        if shapes[0] == shapes[1] and devices[0] == devices[1]:
            return flat_grads
    check_leaves(flat_params.tree, gradients, "grads", "gradient")
    for index, (gradient, param) in enumerate(zip(gradients, flat_params.leaves, strict=True)):
        if gradient is None:
            continue
        cause = "no parameter there" if param is None else _mismatch_reason(gradient, param)
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
    if are_dense_alike(leaves, others):
        return leaves, others, structure
    for index, (a, b) in enumerate(zip(leaves, others, strict=True)):
        if not same_metadata(a, b):
            raise _mismatch_error(a, b, path(tree, name, index), other_name, reason)
    others = [dtensor.redistribute_like(b, a) for a, b in zip(leaves, others, strict=True)]
    return leaves, others, structure


def are_dense_alike(leaves: Leaves, others: Leaves) -> bool:
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


def check_leaves(tree: Tree, leaves: Leaves, name: str, what: str) -> None:
    """Refuse, naming the leaf, a leaf that cannot be a `what`, "gradient" or "parameter"."""
    for index, leaf in enumerate(leaves):
        if not (leaf is None or is_dense_floating(leaf)):
            check_leaf(leaf, path(tree, name, index), what)


def _all_supported(tensor_list: TensorList) -> bool:
    """Return True if it is known that each leaf can be a parameter and a gradient."""
    return tensor_list.dense_without_history and are_real_floating(tensor_list.dtypes)


def check_names(dotted_names: Sequence[str]) -> None:
    """Refuse equal dotted names of parameters."""
    if len(set(dotted_names)) != len(dotted_names):
        raise ValueError(
            "params: two leaves have the same dotted name, such as {'a.b': ...} beside "
            "{'a': {'b': ...}}. Fix: rename one."
        )


def check_parameters(flat_params: FlatTree, name: str = "params") -> None:
    """Refuse, naming the leaf, a leaf that cannot be a parameter."""
    if not _all_supported(flat_params.tensor_list):
        check_leaves(flat_params.tree, flat_params.leaves, name, "parameter")


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
                    f"{path(flat.tree, name, index)} is a result of torch.autograd "
                    f"({leaf.grad_fn.name()}), and `.backward()` cannot go through a step. Fix: "
                    "`with torch.no_grad():` around the step; for a derivative torch.func.grad of "
                    "a function that makes it, or from_torch(..., differentiable=True)."
                )


def _mismatch_reason(gradient: Tensor, param: Tensor) -> str:
    """Return why a gradient does not fit a parameter; "" if it does."""
    if gradient.shape != param.shape:
        return f"shape {tuple(gradient.shape)}, its parameter {tuple(param.shape)}"
    if gradient.device != param.device:
        return f"device {gradient.device}, its parameter {param.device}"
    if gradient.is_complex() and not param.is_complex():
        return f"dtype {gradient.dtype}, its parameter {param.dtype}, which has no imaginary part"
    return ""


def same_metadata(a: Any, b: Any) -> bool:
    """Return True if two leaves differ at most in values. Constants must be equal or the same
    object.
    """
    if is_constant(a) or is_constant(b):
        if isinstance(a, Tensor) or isinstance(b, Tensor):
            return a is b
        return _are_equal_constants(a, b)
    return (
        not dtensor.placement_mismatch(a, b)
        and a.shape == b.shape
        and a.dtype == b.dtype
        and a.device == b.device
    )


def _are_equal_constants(a: Any, b: Any) -> bool:
    """Return True if two constants that are not tensors are equal. Arrays, whose comparison is not
    a single bool, must be the same object.
    """
    try:
        return a is b or (type(a) is type(b) and bool(a == b))
    except ValueError:
        return False


def _mismatch_error(a: Any, b: Any, at: str, other: str, reason: str) -> Exception:
    """Return the error for `a` at path `at` and `b` in `other`, which fail `same_metadata`."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if is_constant(a) or is_constant(b):
            return TypeError(
                f"{at} is {describe(a)}, but another tensor, {describe(b)}, in {other}. Steps do "
                "not change what is not dense: it must come back as the same object. Fix: return "
                "what was given, or make it dense, `.to_dense()` or `.dequantize()`."
            )
        if cause := dtensor.placement_mismatch(a, b):
            return TypeError(f"{at} {cause}")
        cure = f"`.to('{a.device}', {a.dtype})`"
        if a.shape != b.shape:
            cure = f"return it in the shape {tuple(a.shape)}"
        return ValueError(
            f"{at} is {describe(a)} on {a.device}, but {describe(b)} on {b.device} in {other}. "
            f"{reason} Fix: {cure}."
        )
    return ValueError(
        f"{at} is {a!r}, but {b!r} in {other}. What changes in a step must be a tensor: a "
        "skipped step could keep the old value only by reading the flag. Fix: "
        "`torch.tensor(...)`."
    )
