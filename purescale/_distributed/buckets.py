"""Bucketed all-reduce: many tensors in few messages, each sent while the next is filled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._distributed.process_group import Group, naming_other_ranks
from .._torch import dtensor, private
from .._torch.dtypes import real_dtype, wide_dtype
from .._torch.memory_order import is_gapless
from .._torch.tracing import traced_or_recorded
from .._tree.leaves import as_dense_real
from .._tree.pytree import Leaves

SIZE = 25 * 2**20  # bytes, as DistributedDataParallel
LARGE = 2**20  # bytes: on a CPU such a leaf is sent in place, because fresh memory is slow


class Reduction:
    """The sums of `leaf / divisor` over the ranks, dense and at least in float32.

    Leaves are `put` in any order; each goes with the one of the same index in `like`. A bucket
    holds up to `size` bytes of one dtype and device, and is sent when it and all before it are
    full. Buckets follow `order`, by default that of `like`, which must be the same on every rank.
    `keep_strides`: the sums have the strides of `like` instead of being contiguous, and a large
    leaf on a CPU is a bucket of its own. DTensors and leaves that are not tensors are left out.
    """

    def __init__(
        self,
        like: Sequence[Any],
        divisor: float | Tensor,
        group: Group | None,
        size: float = SIZE,
        *,
        order: Iterable[int] | None = None,
        keep_strides: bool = False,
    ) -> None:
        self.like, self.divisor, self.group = like, divisor, group
        self.keep_strides = keep_strides
        self.is_recorded = traced_or_recorded()
        self.buckets: list[list[int]] = []
        filling: dict[Any, tuple[list[int], float]] = {}
        dtensor_class = dtensor.dtensor_class()
        order = list(range(len(like)) if order is None else order)
        for index in order:
            leaf = like[index]
            if not isinstance(leaf, Tensor) or isinstance(leaf, dtensor_class):
                continue
            dtype = wide_dtype(leaf.dtype)
            nbytes = leaf.numel() * dtype.itemsize
            if keep_strides and leaf.is_cpu and nbytes >= LARGE:
                self.buckets.append([index])
                continue
            bucket, filled = filling.get((leaf.device, dtype), ([], size))
            if not bucket or filled + nbytes > size:
                bucket, filled = [], 0.0
                self.buckets.append(bucket)
            bucket.append(index)
            filling[leaf.device, dtype] = bucket, filled + nbytes
        position = {index: place for place, index in enumerate(order)}
        self.buckets.sort(key=lambda indices: position[indices[-1]])  # as they fill up
        self.bucket_of = {index: b for b, indices in enumerate(self.buckets) for index in indices}
        self.num_missing = list(map(len, self.buckets))
        self.parts: dict[int, Tensor] = {}  # for each leaf, a view of its bucket's row
        self.rows: list[Any] = [None] * len(self.buckets)  # the messages
        self.works: list[Any] = []  # of the buckets that are sent; None: nothing to wait for

    def put(self, index: int, leaf: Tensor, *, is_last_use: bool = False) -> None:
        """Add a leaf, and send the buckets that are full. If it `is_last_use`, nobody else will use
        this tensor, though another may share its memory.
        """
        bucket = self.bucket_of[index]
        values = as_dense_real(leaf)
        dtype = real_dtype(wide_dtype(self.like[index].dtype))
        divisor: Tensor | float = self.divisor
        divisor = divisor.to(dtype) if isinstance(divisor, Tensor) else divisor
        if self.is_recorded:
            self.parts[index] = torch.div(values.to(dtype), divisor)
        else:
            with torch.no_grad():
                if is_last_use and self._can_be_sent(index, values):
                    self.parts[index] = values.div_(divisor)
                    self.rows[bucket] = values.as_strided((values.numel(),), (1,))  # gapless
                else:
                    self._copy(index, values, dtype, divisor)
        self.num_missing[bucket] -= 1
        while len(self.works) < len(self.buckets) and not self.num_missing[len(self.works)]:
            self._send(len(self.works))

    def get(self) -> Leaves:
        """Return the sums in the order of `like`, None for the leaves that were left out."""
        results: Leaves = [None] * len(self.like)
        for indices, row, work in zip(self.buckets, self.rows, self.works, strict=True):
            if work is not None:
                with naming_other_ranks():
                    work.wait()
            if self.is_recorded:
                sums = torch.split(row, [self.parts[index].numel() for index in indices])
                for index, part in zip(indices, sums, strict=True):
                    self.parts[index] = part.view(self.parts[index].shape)
            for index in indices:
                part = self.parts[index]
                results[index] = (
                    torch.view_as_complex(part) if self.like[index].is_complex() else part
                )
        return results

    def _can_be_sent(self, index: int, values: Tensor) -> bool:
        """Return True if the sum can be made in the memory of the tensor itself."""
        like, is_alone = self.like[index], len(self.buckets[self.bucket_of[index]]) == 1
        same_dtype = values.dtype is like.dtype is wide_dtype(like.dtype)
        same_layout = self.keep_strides and values.stride() == like.stride() and is_gapless(values)
        memory = values.untyped_storage()
        # Two uses: the tensor, and the variable `memory`.
        unshared = memory.resizable() and private.storage_uses_or_zero(memory._cdata) == 2
        is_whole = unshared and memory.nbytes() == values.nbytes
        return is_alone and same_dtype and same_layout and is_whole

    def _copy(
        self, index: int, values: Tensor, dtype: torch.dtype, divisor: Tensor | float
    ) -> None:
        if self.rows[self.bucket_of[index]] is None:
            self._allocate(self.bucket_of[index], dtype)
        part = self.parts[index]
        # Widened first, because the quotient may be beyond the range of a narrower dtype.
        values = values if values.dtype is dtype else part.copy_(values)
        torch.div(values, divisor, out=part)

    def _allocate(self, bucket: int, dtype: torch.dtype) -> None:
        """Make the message of a bucket, and the views of it that its leaves are copied into."""
        likes = [as_dense_real(self.like[index]) for index in self.buckets[bucket]]
        sizes = list(map(Tensor.numel, likes))
        self.rows[bucket] = row = likes[0].new_empty(sum(sizes), dtype=dtype, requires_grad=False)
        parts = torch.split(row, sizes)
        for index, like, part in zip(self.buckets[bucket], likes, parts, strict=True):
            if self.keep_strides and not like.is_contiguous() and is_gapless(like):
                offset = part.storage_offset()
                self.parts[index] = part.as_strided(like.shape, like.stride(), offset)
            else:
                self.parts[index] = part.view(like.shape)

    def _send(self, bucket: int) -> None:
        """Start the all-reduce of a full bucket."""
        work: Any = None
        if self.is_recorded:
            row = torch.cat([self.parts[index].reshape(-1) for index in self.buckets[bucket]])
            self.rows[bucket] = private.all_reduce(row, "sum", self.group)
        elif self.rows[bucket].numel():
            with naming_other_ranks():
                work = dist.all_reduce(self.rows[bucket], group=self.group, async_op=True)
        self.works.append(work)


def reduction_of(leaves: Leaves, buffers: Leaves, divisor: Any, group: Group | None) -> Reduction:
    """Return the reduction for the gradients of `leaves` and the changes and values of `buffers`,
    in the order in which a backward computes them.
    """
    order = [*reversed(range(len(leaves))), *range(len(leaves), len(leaves) + len(buffers))]
    floating = [
        leaf.expand(2, *leaf.shape)
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
        else None
        for leaf in buffers
    ]
    return Reduction([*leaves, *floating], divisor, group, order=order, keep_strides=True)


def mean_divisor(weight: Tensor, total: Tensor) -> Tensor:
    """Return `total / weight`, by which to divide one mean before all are summed."""
    return torch.where(weight > 0, total / weight, torch.inf)
