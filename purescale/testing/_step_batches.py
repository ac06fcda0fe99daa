"""The batches of `assert_step`, joined, split, and made to overflow."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .._torch import private
from .._tree.tree import join_names


class StepBatches(NamedTuple):
    """The batches, and the functions that make others of them."""

    batches: list[Any]
    overflow: Callable[[Any], Any]
    join: Callable[[list[Any]], Any] | Literal[False] | None
    split: Callable[[Any], list[Any]] | None

    def in_parts(self, law: str) -> tuple[list[Any], Any] | None:
        """Return the parts of a batch and the whole of it for a law; None if there are none."""
        if law == "window" and self.join is not False:
            some = self.batches[:2]
            return some, (self.join or _joined)(some)
        if law == "weights" and (self.split or self.join is not False):
            return (self.split or _third_and_rest)(self.batches[0]), self.batches[0]
        return None

    @property
    def sizes(self) -> str:
        """The sizes of the first dimension of a batch's tensors, in words."""
        leaves = private.pytree.tree_leaves(self.batches[0])
        return join_names([str(len(t)) for t in leaves if isinstance(t, Tensor) and t.ndim])


def not_finite(batch: Any) -> Any:
    """Return a batch with inf in its floating tensors."""

    def spoilt(leaf: Tensor) -> Tensor:
        return torch.full_like(leaf, math.inf) if leaf.is_floating_point() else leaf

    return private.pytree.tree_map_only(Tensor, spoilt, batch)


def _joined(batches: list[Any]) -> Any:
    """Return batches as one, joined along the first dimension."""

    def cat(*leaves: Any) -> Any:
        first = leaves[0]
        return torch.cat(leaves) if isinstance(first, Tensor) and first.ndim else first

    return private.pytree.tree_map(cat, *batches)


def _third_and_rest(batch: Any) -> list[Any]:
    """Return the first third of a batch's samples, at least one, and the others."""

    def part(index: int) -> Any:
        def cut(leaf: Tensor) -> Tensor:
            if not leaf.ndim:
                return leaf
            first = max(1, len(leaf) // 3)
            return leaf[first:] if index else leaf[:first]

        return private.pytree.tree_map_only(Tensor, cut, batch)

    return [part(0), part(1)]
