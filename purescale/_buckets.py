"""Many tensors reduced over the ranks in few messages, one on its way while the next is filled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from . import _foreach, _leaf, _torch, _tree
from ._tree import Leaves

SIZE = 25 * 2**20  # bytes, as DistributedDataParallel
LARGE = 2**20  # bytes: on a CPU, where fresh memory is what is slow, sent from where it stands


class Reduction:
    """The sums of `leaf / divisor` over the ranks, dense and at least in float32.

    A leaf is `put` in when there is one like it in `like`, in any order; a bucket of up to `size`
    bytes, of one dtype and device, leaves when it and those before it are full. Buckets follow
    `order`, by default that of `like`, which are the same on every rank. `laid`: in memory as
    `like`, else in rows, and what is large on a CPU by itself. What is no tensor, and DTensors, are
    left out.
    """

    def __init__(
        self,
        like: Sequence[Any],
        divisor: float | Tensor,
        group: Any,
        size: float = SIZE,
        *,
        order: Iterable[int] | None = None,
        laid: bool = False,
    ) -> None:
        self.like, self.divisor, self.group, self.laid = like, divisor, group, laid
        self.buckets: list[list[int]] = []
        filling: dict[Any, tuple[list[int], float]] = {}
        order = list(range(len(like)) if order is None else order)
        for place in order:
            leaf = like[place]
            if not isinstance(leaf, Tensor) or isinstance(leaf, DTensor):
                continue
            dtype = _foreach.wide_dtype(leaf.dtype)
            width = leaf.numel() * dtype.itemsize
            if laid and leaf.is_cpu and width >= LARGE:
                self.buckets.append([place])
                continue
            bucket, filled = filling.get((leaf.device, dtype), ([], size))
            if not bucket or filled + width > size:
                bucket, filled = [], 0.0
                self.buckets.append(bucket)
            bucket.append(place)
            filling[leaf.device, dtype] = bucket, filled + width
        turn = {place: index for index, place in enumerate(order)}
        self.buckets.sort(key=lambda places: turn[places[-1]])  # as they become full
        self.bucket_of = {p: index for index, places in enumerate(self.buckets) for p in places}
        self.missing = list(map(len, self.buckets))
        self.parts: dict[int, Tensor] = {}
        self.rows: list[Any] = [None] * len(self.buckets)
        self.away: list[Any] = []

    def put(self, place: int, leaf: Tensor, *, own: bool = False) -> None:
        """Take a leaf along, and send what is full. `own`: nobody else will use the tensor, though
        others may stand in its memory.
        """
        index = self.bucket_of[place]
        number = _numbers(leaf)
        dtype = _foreach.real_dtype(_foreach.wide_dtype(self.like[place].dtype))
        divisor: Any = self.divisor
        divisor = divisor.to(dtype) if isinstance(divisor, Tensor) else divisor
        if _tree.traced():
            self.parts[place] = torch.div(number.to(dtype), divisor)
        else:
            with torch.no_grad():
                if own and len(self.buckets[index]) == 1 and self._fits(place, number):
                    self.parts[place] = number.div_(divisor)
                    self.rows[index] = _foreach.in_memory_order(number)
                else:
                    self._copy(place, number, dtype, divisor)
        self.missing[index] -= 1
        while len(self.away) < len(self.buckets) and not self.missing[len(self.away)]:
            self._send(len(self.away))

    def get(self) -> Leaves:
        """The sums, in the places of `like`; `None` for what was left out."""
        results: Leaves = [None] * len(self.like)
        for places, row, work in zip(self.buckets, self.rows, self.away, strict=True):
            if work is not None:
                work.wait()
            if _tree.traced():
                sums = torch.split(row, [self.parts[place].numel() for place in places])
                for place, part in zip(places, sums, strict=True):
                    self.parts[place] = part.view(self.parts[place].shape)
            for place in places:
                part = self.parts[place]
                results[place] = (
                    torch.view_as_complex(part) if self.like[place].is_complex() else part
                )
        return results

    def _fits(self, place: int, number: Tensor) -> bool:
        """Whether a leaf can be sent and received where it stands."""
        like = self.like[place]
        alike = number.dtype is like.dtype is _foreach.wide_dtype(like.dtype)
        laid = self.laid and number.stride() == like.stride() and _leaf.donatable(number)
        whole = number.untyped_storage().nbytes() == number.nbytes
        return alike and laid and whole and _leaf.is_alone(number)

    def _copy(self, place: int, number: Tensor, dtype: torch.dtype, divisor: Any) -> None:
        index = self.bucket_of[place]
        if self.rows[index] is None:
            self._make_room(index, dtype)
        part = self.parts[place]
        # In the dtype of the row also where that of the leaf is narrower.
        number = number if number.dtype is dtype else part.copy_(number)
        torch.div(number, divisor, out=part)

    def _make_room(self, index: int, dtype: torch.dtype) -> None:
        likes = [_numbers(self.like[place]) for place in self.buckets[index]]
        sizes = list(map(Tensor.numel, likes))
        self.rows[index] = row = likes[0].new_empty(sum(sizes), dtype=dtype, requires_grad=False)
        parts = torch.split(row, sizes)
        for place, like, part in zip(self.buckets[index], likes, parts, strict=True):
            if self.laid and not like.is_contiguous() and _leaf.donatable(like.detach()):
                offset = part.storage_offset()
                self.parts[place] = part.as_strided(like.shape, like.stride(), offset)
            else:
                self.parts[place] = part.view(like.shape)

    def _send(self, index: int) -> None:
        work: Any = None
        if _tree.traced():
            row = torch.cat([self.parts[place].reshape(-1) for place in self.buckets[index]])
            self.rows[index] = _torch.all_reduce(row, "sum", self.group)
        elif self.rows[index].numel():
            work = dist.all_reduce(self.rows[index], group=self.group, async_op=True)
        self.away.append(work)


def _numbers(leaf: Tensor) -> Tensor:
    """A leaf as dense, real numbers."""
    leaf = _foreach.dense(leaf)
    if not leaf.is_complex():
        return leaf
    return torch.view_as_real(leaf.to(_foreach.wide_dtype(leaf.dtype)).resolve_conj())


def reduction_of(leaves: Leaves, buffers: Leaves, divisor: Any, group: Any) -> Reduction:
    """The gradients of parameters and what became of buffers, two numbers for each, as a backward
    makes them in turn.
    """
    order = [*reversed(range(len(leaves))), *range(len(leaves), len(leaves) + len(buffers))]
    floating = [
        leaf.expand(2, *leaf.shape)
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
        else None
        for leaf in buffers
    ]
    return Reduction([*leaves, *floating], divisor, group, order=order, laid=True)


def share_of(mine: Tensor, every: Tensor) -> Tensor:
    """By which a mean of this weight is divided in the mean of all."""
    return torch.where(mine > 0, every / mine, torch.inf)
