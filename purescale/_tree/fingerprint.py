"""One number of the bits of a state, by which a replay is compared."""

from __future__ import annotations

import torch
from torch import Tensor

from .._tree import pytree
from .._tree.leaves import describe, is_constant
from .._tree.pytree import Tree

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
