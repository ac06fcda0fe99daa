"""Many states as one, for `torch.vmap` over a step, and one of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from .._torch.transfer import to_device
from .._tree import pytree, scalars
from .._tree.leaves import describe_with_device
from .._tree.matching import leaves_like, same_metadata
from .._tree.pytree import Leaves, Tree, TreeT


def stack_states(states: Iterable[TreeT]) -> TreeT:
    """Equal to `tree_map(lambda *leaves: torch.stack(leaves), *states)`: one tree, whose tensors
    have one more dimension in front, [len(states), ...].

    The result is for `torch.vmap` over a step; `member` picks one state of it.

    Args:
        states: Trees of one structure, such as TrainState, the state of an optimizer or a rule, or
            parameters. Dense tensors must agree in shape, dtype and device; other leaves must be
            equal, and a sparse tensor is the same object in all.

    Returns:
        A tree in fresh memory, on the graph of its arguments. `None` stays `None`.

    Raises:
        ValueError: If the list is empty, or, naming the leaf, if states differ in more than values.
        TypeError: If one state is given in place of a list.

    Example:
        >>> import torch
        >>> from purescale import DynamicScale
        >>> rules = DynamicScale(init_scale=8.0), DynamicScale(init_scale=2.0)
        >>> stack_states([rule.init() for rule in rules]).scale
        tensor([8., 2.])

    Source of the form: torch.func.stack_module_state, which takes modules.
    """
    is_one_state = isinstance(states, (Tensor, Mapping)) or hasattr(states, "_fields")
    if is_one_state or not isinstance(states, Iterable):
        raise TypeError(
            f"stack_states takes a list of states, got one {type(states).__name__}. Fix: "
            "`stack_states([state, other])`."
        )
    cause = (
        "Likely cause: states of other parameters, optimizers or rules, or a shorter last batch. "
        "Fix: make all states with one `init`, and a number that differs between members with "
        "`torch.tensor(...)`; for batches `DataLoader(..., drop_last=True)`."
    )
    return stacked("states", list(states), cause)


def stacked(name: str, trees: list[Tree], cause: str) -> Tree:
    """Stack the trees. `cause` ends the error message for trees that differ."""
    if not trees:
        raise ValueError(
            f"{name} is an empty list; expected at least one to stack. Fix: `[state]`."
        )
    first, structure = pytree.flatten(trees[0])
    rows = [
        leaves_like(f"{name}[{index}]", tree, f"{name}[0]", trees[0], structure)
        for index, tree in enumerate(trees)
    ]
    for index, row in enumerate(rows):
        for position, (leaf, like) in enumerate(zip(row, first, strict=True)):
            if not same_metadata(leaf, like):
                at = pytree.path(trees[0], f"{name}[{index}]", position)
                raise ValueError(
                    f"{at} is {describe_with_device(leaf)}, but {describe_with_device(like)} in "
                    f"{name}[0]. {cause}"
                )
    return structure.unflatten(
        [
            torch.stack(list(column)) if isinstance(column[0], Tensor) else column[0]
            for column in zip(*rows, strict=True)
        ]
    )


def member(states: TreeT, i: int | Tensor) -> TreeT:
    """Equal to `tree_map(lambda leaf: leaf[i].clone(), states)`: one of the states in the result of
    `stack_states`, in fresh memory.

    Args:
        states: A stacked tree. `None` and leaves that are not tensors are returned as they are.
        i: A whole number, negative from the end, or a 0-d integer tensor. A tensor is not read and
            not checked for range.

    Returns:
        One state.

    Raises:
        ValueError: If, naming the leaf, a tensor has no first dimension, or one of another size.
        IndexError: If a number `i` is out of range.
        TypeError: If `i` is not a whole number.

    Example:
        >>> import torch
        >>> weights = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
        >>> states = stack_states([{"w": w} for w in weights])
        >>> member(states, 1)
        {'w': tensor([3., 4.])}
    """
    leaves, structure = pytree.flatten(states)
    cause = (
        "Likely cause: one tree, or trees stacked in another way. Fix: what `stack_states` "
        "returned, or a step of it under `torch.vmap`."
    )
    size = num_members(states, leaves, "states", cause)
    if isinstance(i, Tensor):
        if i.ndim or i.is_floating_point() or i.is_complex() or i.dtype is torch.bool:
            raise TypeError(
                f"i is {i.dtype} {tuple(i.shape)}; expected a whole number or a 0-d integer tensor."
                " Fix: `i.long()`; for several members, `torch.vmap` over i."
            )
        row = torch.where(i < 0, i + size, i).to(torch.int64).reshape(1)
        picked = [
            leaf.index_select(0, to_device(row, leaf.device))[0]
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in leaves
        ]
        return structure.unflatten(picked)
    index = scalars.checked_whole("i", i, least=-(2**63), most=None)
    if not -size <= index < size:
        raise IndexError(
            f"i is {index}, and there are {size} states. Fix: from 0 to {size - 1}, or from -1 "
            f"to {-size}, from the end."
        )
    picked = [leaf[index].clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return structure.unflatten(picked)


def num_members(states: Tree, leaves: Leaves, name: str, cause: str) -> int:
    """Return the first dimension of all tensors. Refuse, naming the leaf, one of another size;
    `cause` ends the error message.
    """
    size: int | None = None
    for position, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            continue
        if leaf.ndim and (size is None or leaf.shape[0] == size):
            size = leaf.shape[0]
            continue
        others = "[n, ...]" if size is None else f"[{size}, ...], as the tensors before it"
        raise ValueError(
            f"{pytree.path(states, name, position)} has shape {tuple(leaf.shape)}; expected "
            f"{others}. {cause}"
        )
    if size is None:
        raise ValueError(f"{name} has no tensor, so it has no members. Fix: `stack_states(...)`.")
    return size
