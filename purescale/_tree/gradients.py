"""Gradients as dense, real tensors of this rank: one record from their window to the kernel."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch import donation, dtensor, foreach
from .._torch.dtypes import wide_dtype
from .._torch.tensor_list import TensorList
from .._tree.leaves import are_plain_dense, as_dense_real
from .._tree.pytree import FlatTree


class Pending(NamedTuple):
    """The operations that are not yet applied to gradients, in their order: a division, a product,
    and a clamp to plus and minus a bound. None leaves one out. Each is elementwise, because pieces
    of leaves and shards are stepped alone.
    """

    # the scale of the loss; after `fold_clip_factor`, that over the clip factor
    divisor: Tensor | None = None
    # of clipping, in the widest dtype of the device; a float where the host knows it
    clip_factor: float | Tensor | None = None
    clip_value: float | Tensor | None = None


NOTHING_PENDING = Pending()


class Gradients(NamedTuple):
    """Gradients as dense, real, strided tensors of this rank, without `None`, and the operations
    that are not yet applied to them. What a kernel cannot do, `apply_pending` does first.

    A DTensor becomes its local shard, a complex tensor a view as reals, a sparse COO tensor dense.
    """

    tensor_list: TensorList  # of the tensors
    # The leaves whose form results get, with None and without a Partial placement. None if all are
    # dense and real, so that a result has the form of its leaf.
    source_leaves: Sequence[Any] | None = None
    pending: Pending = NOTHING_PENDING
    owned: bool = False  # nobody else can see their memory, so it may be overwritten

    @classmethod
    def of_dense(
        cls, tensors: list[Tensor], pending: Pending = NOTHING_PENDING, *, owned: bool = False
    ) -> Gradients:
        """Return gradients of dense, real, strided tensors, which are not checked."""
        return cls(TensorList(tensors), None, pending, owned)

    @classmethod
    def of(cls, flat_grads: FlatTree) -> Gradients:
        """Return checked leaves as gradients. A partial DTensor is reduced."""
        if flat_grads.tensor_list.dense_without_history:
            return cls(flat_grads.tensor_list)
        return cls.of_leaves(flat_grads.leaves)

    @classmethod
    def of_leaves(
        cls,
        leaves: Sequence[Any],
        pending: Pending = NOTHING_PENDING,
        *,
        owned: bool = False,
        param_list: TensorList | None = None,
    ) -> Gradients:
        """Return checked leaves as gradients. A partial DTensor is reduced. What is
        known of `param_list`, of which these are the gradients, is known of them if they are alike.
        """
        if param_list is not None and param_list.matches(leaves):
            return cls(TensorList(list(leaves), param_list.metadata), None, pending, owned)
        if are_plain_dense(leaves):
            return cls.of_dense(list(leaves), pending, owned=owned)
        source_leaves = [dtensor.reduce_partial(leaf) for leaf in leaves]
        tensors = [
            as_dense_real(dtensor.local_shard(leaf)) for leaf in source_leaves if leaf is not None
        ]
        return cls(TensorList(tensors), source_leaves, pending, owned)

    @property
    def tensors(self) -> list[Tensor]:
        return self.tensor_list.tensors

    @property
    def leaves(self) -> list[Any]:
        """The gradients in the form of their leaves."""
        return self.as_leaves(self.tensors)

    @property
    def present_sources(self) -> list[Any]:
        """The leaf that each tensor stands for."""
        if self.source_leaves is None:
            return self.tensors
        return [source for source in self.source_leaves if source is not None]

    @property
    def are_sharded(self) -> bool:
        """True if one of them is the shard of a DTensor."""
        return self.source_leaves is not None and dtensor.any_dtensor(self.source_leaves)

    @property
    def scalar_dtype(self) -> torch.dtype:
        """The dtype of a factor of them, and of a norm that is reported: float64 if a gradient
        has it, else float32. A float64 factor would take float32 gradients through a slower kernel.
        """
        return torch.float64 if torch.float64 in self.tensor_list.dtypes else torch.float32

    def as_leaves(self, results: Sequence[Tensor]) -> list[Any]:
        """Return the results in the form of their leaves: complex, a DTensor, or None for None."""
        if self.source_leaves is None:
            return list(results)
        remaining = iter(results)
        return [
            None if source is None else _in_form_of(source, next(remaining))
            for source in self.source_leaves
        ]

    def take(self, indices: Sequence[int | None]) -> Gradients:
        """Return the gradients with these indices among the tensors, in rising order. None stands
        for a leaf that is None.
        """
        if self.source_leaves is None:
            taken = self.tensor_list.take(indices)  # type: ignore[arg-type]
            return self if taken is self.tensor_list else self._replace(tensor_list=taken)
        sources = self.present_sources
        return self._replace(
            tensor_list=self.tensor_list.take([n for n in indices if n is not None]),
            source_leaves=[None if n is None else sources[n] for n in indices],
        )

    def owned_unless_shared(self, others: Sequence[Any]) -> Gradients:
        """Return them, which were given up, owned if `others` do not share their memory."""
        return self._replace(owned=donation.can_write_each([self.tensor_list], others)[0])

    def apply_pending(self, *, wide: bool = False) -> Gradients:
        """Return them for an optimizer, unscaled and clipped: in place if they are owned, so these
        must not be used again. float16 becomes float32 where it is divided, and all half gradients
        if `wide`: in half precision they would lose bits.
        """
        grads, pending = self.widened() if wide else self, self.pending
        if pending.divisor is not None:
            grads = grads.divided(pending.divisor)
        if pending.clip_factor is not None:
            grads = grads.multiplied(pending.clip_factor)
        if pending.clip_value is not None:
            grads = grads.clamped(pending.clip_value)
        return grads._replace(pending=NOTHING_PENDING)

    def widened(self) -> Gradients:
        """Return them in float32 where they are narrower."""
        tensors = foreach.cast_list_saturating(
            self.tensors, [wide_dtype(t.dtype) for t in self.tensors]
        )
        fresh = all([new is not old for new, old in zip(tensors, self.tensors, strict=True)])
        return self.with_tensors(tensors, owned=self.owned or fresh)

    def divided(self, divisor: Tensor) -> Gradients:
        """Return them divided by a 0-d tensor, in place if they are owned, like the next two."""
        return self._with_results(foreach.divide(self.tensors, divisor, in_place=self.owned))

    def multiplied(self, factor: float | Tensor) -> Gradients:
        """Return them multiplied by a number, or a 0-d tensor."""
        if isinstance(factor, float):
            factor = torch.full((), factor, dtype=self.scalar_dtype, device="cpu")
        factor = factor.to(self.scalar_dtype)
        return self._with_results(foreach.multiply(self.tensors, factor, in_place=self.owned))

    def clamped(self, bound: float | Tensor) -> Gradients:
        """Return them clamped to plus and minus `bound`."""
        return self._with_results(foreach.clamp(self.tensors, bound, in_place=self.owned))

    def zeroed(self, skip: Tensor) -> Gradients:
        """Return zeros in their place if `skip`, a 0-d bool tensor."""
        return self._with_results([tensor.masked_fill(skip, 0.0) for tensor in self.tensors])

    def with_tensors(self, tensors: list[Tensor], *, owned: bool) -> Gradients:
        """Return other tensors in place of these. `owned` ones nobody else can see."""
        return self._replace(tensor_list=TensorList(tensors), owned=owned)

    def _with_results(self, tensors: list[Tensor]) -> Gradients:
        if torch.compiler.is_compiling():  # it fuses what follows; a write would only add work
            return self.with_tensors(tensors, owned=False)
        if all(map(operator.is_, tensors, self.tensors)):
            return self._replace(owned=True)
        return self.with_tensors(tensors, owned=True)


def _in_form_of(like: Tensor, result: Tensor) -> Tensor:
    if like.is_complex():
        result = torch.view_as_complex(result)
    restored: Tensor = dtensor.from_local_like(like, result)
    return restored
