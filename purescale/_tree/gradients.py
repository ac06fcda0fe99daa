"""Gradients as dense, real tensors of this rank: one record from the backward to the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch import dtensor
from .._tree.leaves import are_dense_real, dense_real


class Gradients(NamedTuple):
    """Gradients as dense, real, strided tensors of this rank, without `None`.

    A DTensor becomes its local shard, a complex tensor a view as reals, a sparse COO tensor dense.
    """

    tensors: list[Tensor]
    likes: Sequence[Any]  # leaves in the form of the results, with None; no Partial placement
    dense_real: bool  # True if the likes are dense and real, so that tensors are leaves
    scale: Tensor | None = None  # of the loss, by which they are still multiplied
    owned: bool = False  # nobody else can see their memory, so it may be overwritten

    def restore(self, results: Sequence[Tensor]) -> list[Any]:
        """Return the results in the form of their leaves: complex, a DTensor, or None for None."""
        if self.dense_real:
            return list(results)
        found = iter(results)
        return [None if like is None else _in_form_of(like, next(found)) for like in self.likes]

    @property
    def present_likes(self) -> list[Any]:
        """The leaf that each tensor stands for."""
        return [like for like in self.likes if like is not None]


def as_gradients(
    leaves: Sequence[Any], scale: Tensor | None = None, *, owned: bool = False
) -> Gradients:
    """Return checked leaves as dense, real, strided tensors. A partial DTensor is reduced."""
    if are_dense_real(leaves):
        return Gradients(list(leaves), leaves, True, scale, owned)
    likes = [dtensor.reduce_partial(leaf) for leaf in leaves]
    tensors = [dense_real(dtensor.shard(leaf)) for leaf in likes if leaf is not None]
    return Gradients(tensors, likes, False, scale, owned)


def _in_form_of(like: Tensor, result: Tensor) -> Tensor:
    if like.is_complex():
        result = torch.view_as_complex(result)
    restored: Tensor = dtensor.from_local_like(like, result)
    return restored
