"""The old or the new tree: by a flag, or written over the old one."""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from .._torch import dtensor, foreach
from .._torch.autocast import outside_autocast
from .._torch.tracing import CallContext, current_context, is_on_a_graph
from .._tree import pytree
from .._tree.cache import TreeCache
from .._tree.leaves import are_plain_dense, as_tensor_list, is_constant
from .._tree.matching import matching_leaves
from .._tree.pytree import FlatTree, Leaves, Tree, TreeT
from .._tree.scalars import as_flag


@outside_autocast()
def select(found_inf: Tensor | bool, old: TreeT, new: TreeT) -> TreeT:
    """Equal to `tree_map(lambda o, n: torch.where(found_inf, o, n), old, new)`: `old` if the step
    is bad, else `new`.

    It is for anything of your own that a skipped step must not change: an EMA of the weights,
    buffers, a schedule's state. It selects and never multiplies, so a NaN in `new` cannot leak
    through (`0 * nan` is `nan`).

    Args:
        found_inf: A bool or a 0-d bool tensor, True = bad.
        old: The tree before the step.
        new: A tree of the same structure, shapes and dtypes. A tensor that is not dense must
            be the same object in both, and a leaf that is not a tensor must be equal.

    Returns:
        A tree in fresh memory.

    Raises:
        ValueError: If the trees differ in structure, shapes or dtypes.
        TypeError: If the flag comes last, or a tensor that is not dense is another object in `new`.

    Example:
        >>> import torch
        >>> old, new = {"ema": torch.tensor(1.0)}, {"ema": torch.tensor(float("nan"))}
        >>> select(torch.tensor(True), old, new)
        {'ema': tensor(1.)}

    Source of the rule: `select_tree` of jmp.
    """
    context, arguments = current_context(), (found_inf, old, new)
    if context.host_can_read_cpu and (cached := _cache.find_trees(context, arguments)):
        _, before, after = cached[0]
        chosen = before if found_inf else after
        return before.structure.unflatten(foreach.clone_list(chosen.leaves))
    if _is_flag(new) and not _is_flag(old):
        raise TypeError(
            "new is a flag and old is not. Likely cause: `select(old, new, found_inf)`. Fix: "
            "`select(found_inf, old, new)`, as torch.where."
        )
    leaves, others, structure = matching_leaves(old, new, "old", "new")
    if context.host_can_read_cpu:
        _cache_match(context, arguments, leaves, others)
    return structure.unflatten(select_leaves(found_inf, leaves, others))


_cache = TreeCache(16)  # of `select`, which say that the trees match


def _cache_match(
    context: CallContext, arguments: tuple[Tree, ...], old: Leaves, new: Leaves
) -> None:
    """Keep a plan of `select` for arguments like these on a CPU, if the leaves, which match, are in
    the order of both trees.
    """
    tensors = as_tensor_list([arguments[0], *old, *new])
    if not tensors.dense_without_history or tensors.any_requires_grad or not tensors.are_on_cpu:
        return
    trees = list(map(FlatTree.of, arguments))
    if all(map(operator.is_, trees[2].leaves, new)):
        _cache.add_trees(context, trees, None)


def _is_flag(tree: Tree) -> bool:
    if isinstance(tree, Tensor):
        return tree.dtype is torch.bool and not tree.ndim
    return isinstance(tree, bool)


def select_leaves(
    skip: Tensor | bool, old: Leaves, new: Leaves, *, in_place: bool = False
) -> Leaves:
    """Select like `select` from two matching lists, by `foreach.where`. With `in_place`, the caller
    guarantees that nothing else shares the memory of `old`: results are written there.
    """
    if are_plain_dense([*old, *new]):
        return _select_dense(skip, old, new, in_place=in_place)
    indices = [index for index, leaf in enumerate(old) if not is_constant(leaf)]
    before = [dtensor.local_shard(old[index]) for index in indices]
    after = [dtensor.local_shard(new[index]) for index in indices]
    chosen = _select_dense(skip, before, after, in_place=in_place)
    results = list(old)
    for index, tensor in zip(indices, chosen, strict=True):
        results[index] = dtensor.from_local_like(old[index], tensor)
    return results


def _select_dense(
    skip: Tensor | bool, old: list[Tensor], new: list[Tensor], *, in_place: bool
) -> list[Tensor]:
    # torch refuses in-place writes to a leaf that requires grad
    if any([leaf.requires_grad for leaf in old]):
        if is_on_a_graph(old):
            in_place = False
        else:
            old = [leaf.detach() if leaf.requires_grad else leaf for leaf in old]
    flag = as_flag(skip, like=old[0] if old else None)
    return foreach.where(flag, old, new, in_place=in_place)


def overwrite_tree(old: Tree, new: Tree) -> Tree:
    """Write `new`, which differs in values only, into the tensors of `old`, of which the caller
    guarantees that nothing else shares their memory: a captured step is replayed over the memory
    that it was captured with.
    """
    leaves, structure = pytree.flatten(old)
    return structure.unflatten(overwrite_leaves(leaves, structure.flatten_up_to(new)))


def overwrite_leaves(old: Leaves, new: Leaves) -> Leaves:
    """Return the leaves of `overwrite_tree` from those of both trees."""
    if any(map(is_constant, old)) or is_on_a_graph([*old, *new]):
        return new
    old = [leaf.detach() if leaf.requires_grad else leaf for leaf in old]
    foreach.detach_and_copy_(
        list(map(dtensor.local_shard, old)), list(map(dtensor.local_shard, new))
    )
    return old
