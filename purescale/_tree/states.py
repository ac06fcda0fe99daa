"""Operations on whole states: many as one for vmap, one of them, an exponential moving average, one
number that tells whether two have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .._torch.dtypes import to_device, wide_dtype
from .._tree import pytree, scalars
from .._tree.leaves import describe, is_constant, same_metadata
from .._tree.matching import leaves_like
from .._tree.pytree import Leaves, Tree, TreeT

# ---- many states as one --------------------------------------------------------------------------


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
                    f"{at} is {_with_device(leaf)}, but {_with_device(like)} in {name}[0]. {cause}"
                )
    return structure.unflatten(
        [
            torch.stack(list(column)) if isinstance(column[0], Tensor) else column[0]
            for column in zip(*rows, strict=True)
        ]
    )


def _with_device(leaf: Any) -> str:
    elsewhere = isinstance(leaf, Tensor) and leaf.device.type not in ("cpu", "meta")
    return describe(leaf) + (f" on {leaf.device}" if elsewhere else "")


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


def ema(old: TreeT, new: TreeT, decay: float | Tensor) -> TreeT:
    """Equal to `tree_map(lambda o, n: decay * o + (1 - decay) * n, old, new)`: an exponential
    moving average, one step on.

    It does not know which steps were skipped; to leave those out, use `select(info.found_inf,
    average, ema(average, params, 0.99))`. Derivatives pass through. Elements that are equal in
    `old` and `new` keep their bits.

    Args:
        old: The average. Keep that of half-precision weights in float32, because half precision
            rounds away a change of 1/1000.
        new: The latest value, a tree of the same structure, shapes and devices.
        decay: A number from 0 (`new`) to 1 (`old`), or a 0-d tensor, which is not read.

    Returns:
        A tree in fresh memory. Floating and complex leaves are averaged in at least float32 and
        have the dtype of `old`; other leaves come from `new`.

    Raises:
        ValueError: If, naming the leaf, the trees do not match, or `decay` is outside of [0, 1].
        TypeError: If `decay` is not a number, or a 0-d floating tensor.

    Example:
        >>> import torch
        >>> ema({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, 2.0])}, decay=0.75)
        {'w': tensor([1.5000, 2.0000])}

    Source of the rule: torch.optim.swa_utils.get_ema_multi_avg_fn, which writes into the average.
    """
    decay = _check_decay(decay)
    leaves, structure = pytree.flatten(old)
    others = leaves_like("new", new, "old", old, structure)
    for position, (a, b) in enumerate(zip(leaves, others, strict=True)):
        if not _have_average(a, b):
            raise ValueError(
                f"{pytree.path(old, 'new', position)} is {_with_device(b)}, but {_with_device(a)} "
                "in old; expected dense tensors of one shape, device and kind of number. Likely "
                "cause: the average of another model. Fix: start with a copy, `clone(params)`."
            )
    return structure.unflatten(
        [_averaged(a, b, decay) for a, b in zip(leaves, others, strict=True)]
    )


def _check_decay(decay: Any) -> float | Tensor:
    if isinstance(decay, Tensor):
        if decay.ndim or not decay.is_floating_point():
            raise TypeError(
                f"decay is {describe(decay)}; expected a number or a 0-d floating tensor. Fix: one "
                "decay for all leaves; for one a member, call this under `torch.vmap`."
            )
        return decay
    number = scalars.checked_real("decay", decay)
    if not 0 <= number <= 1:
        raise ValueError(f"decay must lie between 0 and 1, got {number!r}. Fix: decay=0.999.")
    return number


def _is_averaged(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _have_average(a: Any, b: Any) -> bool:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return type(a) is type(b)
    alike = a.shape == b.shape and a.device == b.device
    if not (alike and a.layout is torch.strided and b.layout is torch.strided):
        return False
    averaged = _is_averaged(a) and _is_averaged(b) and a.is_complex() is b.is_complex()
    return averaged or a.dtype is b.dtype


def _averaged(a: Any, b: Any, decay: float | Tensor) -> Any:
    if not isinstance(a, Tensor):
        return b
    if not _is_averaged(a):
        return b.clone()
    wide = torch.promote_types(wide_dtype(a.dtype), wide_dtype(b.dtype))
    share = 1 - (to_device(decay, a.device, wide) if isinstance(decay, Tensor) else decay)
    a_wide, b_wide = a.to(wide), b.to(wide)
    # lerp keeps equal elements, which a sum of two products would round. But it gives NaN for equal
    # infinities, is not finite if the difference overflows, and gives 0.0 for two -0.0.
    average = torch.lerp(a_wide, b_wide, share)
    products = a_wide * (1 - share) + b_wide * share
    return torch.where(average.isfinite() & (average != 0), average, products).to(a.dtype)


# ---- a state as one number -----------------------------------------------------------------------

_32_BITS, _31_BITS = 0xFFFFFFFF, 0x7FFFFFFF
_MULTIPLIER = 0x45D9F3B  # below 2**27: its product with 31 bits stays below 2**63
_STEP = 0x3C6EF372  # between the first places of two leaves
_CHUNK = 2**22  # elements; a chunk takes some 100 MiB
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(state: Tree) -> Tensor:
    """Equal to the sum over all 32-bit words of all leaves of `word * multiplier(leaf, place)`,
    modulo 2**64, with odd multipliers.

    One flipped bit of any leaf changes it for certain, any other change nearly so. NaN and -0.0
    count by their bits. It is the same in eager mode, compiled and mapped, and on every device. So
    a replay is compared by one number, without a copy of the state. It is not a cryptographic hash.

    Args:
        state: A tree of dense tensors of any dtype; `None` is left out.

    Returns:
        int64 [], on the device of the first tensor. Nothing is read.

    Raises:
        TypeError: A leaf is not a dense tensor.

    Example:
        >>> import torch
        >>> state = {"w": torch.ones(3), "count": torch.tensor(7)}
        >>> flipped = {**state, "w": torch.tensor([1.0, 1.0 + 2.0**-23, 1.0])}
        >>> fingerprint(state) == fingerprint(state), fingerprint(state) == fingerprint(flipped)
        (tensor(True), tensor(False))

    Source of the rule: multilinear hashing (Carter and Wegman 1979), with fixed multipliers.
    """
    leaves = pytree.flatten(state)[0]
    total = None
    for index, leaf in enumerate(leaves):
        if leaf is None:
            continue
        if is_constant(leaf):
            raise TypeError(
                f"{pytree.path(state, 'state', index)} is {describe(leaf)}; a fingerprint is of "
                "dense tensors. Fix: `.to_dense()`, `torch.tensor(...)` for a number."
            )
        number = _of_leaf(leaf, index)
        total = number if total is None else total + number.to(total.device)
    return torch.zeros((), dtype=torch.int64) if total is None else total


def _of_leaf(leaf: Tensor, index: int) -> Tensor:
    leaf = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf.resolve_neg()
    flat = leaf.detach().reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=leaf.device)
    for number, chunk in enumerate(torch.split(flat, _CHUNK)):
        if chunk.dtype is not torch.bool:
            chunk = chunk.view(_INTEGERS[chunk.dtype.itemsize])
        bits = chunk.to(torch.int64)
        places = torch.arange(len(chunk), device=leaf.device) + number * _CHUNK
        total = total + _weighted_sum(bits & _32_BITS, places, 2 * index)
        if flat.dtype.itemsize == 8:
            total = total + _weighted_sum((bits >> 32) & _32_BITS, places, 2 * index + 1)
    return total


def _weighted_sum(words: Tensor, places: Tensor, row: int) -> Tensor:
    x = (places + row * _STEP) & _31_BITS
    multipliers = (((x ^ (x >> 15)) * _MULTIPLIER) & _31_BITS) | 1
    products = words * multipliers  # below 2**63
    # In two halves, so that only a few 0-d numbers wrap around.
    return ((products >> 32).sum() << 32) + (products & _32_BITS).sum()
