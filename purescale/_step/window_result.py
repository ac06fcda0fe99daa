"""The weights of the microbatches of a window, and its result: mean gradients, loss, and the flags
that follow from totals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from .._distributed.buckets import Reduction
from .._distributed.process_group import Group, all_reduce
from .._grads.accumulate import is_valid_weight
from .._grads.measure import GradStats
from .._loss_scale.rules import HasScale
from .._step.options import TrainStepOptions
from .._torch.dtypes import widest_float
from .._tree.gradients import Gradients
from .._tree.pytree import Leaves


class MicrobatchWeights(NamedTuple):
    """The weights of a window's microbatches, known before the first one runs."""

    # Tensor [k]; None without `weight_fn` and a group if only the mean is measured
    unnormalized: Any
    normalized: Sequence[float | Tensor]  # of the mean: with sum 1, or 0 if no weight counts
    has_weight: Sequence[bool | Tensor]  # the weight is valid and above 0


class WindowResult(NamedTuple):
    """The results of the microbatches of a step, on this rank or on all of a group."""

    # the mean; before `reduce_window` has run that of this rank, or empty if it is sent already
    grads: Gradients
    loss: Tensor  # the mean over the microbatches that count and are not dropped
    buffers: Leaves
    aux: tuple[Any, ...]
    reduction: Reduction | None = None  # on its way to the other ranks
    # as `Totals`; None if the weights have no `unnormalized`
    totals_row: Tensor | None = None
    # Microbatches that overflowed are not in the mean. False for a single one without a group.
    excludes_overflows: bool = False


class Totals(NamedTuple):
    """Sums over the microbatches of a window. One counts if its weight is valid and above 0, and is
    good if it counts and did not overflow.
    """

    good_weight: Any  # the weight of the good ones
    valid_weight: Any  # of all that count
    num_microbatches: Any
    num_good: Any
    num_invalid: Any  # with an invalid weight
    num_overflowed: Any
    num_retryable: Any  # overflowed, with a finite loss
    num_nonfinite_losses: Any  # with a loss that is not finite

    @classmethod
    def of(cls, totals_row: Tensor) -> Self:
        """Return the fields of totals that are one tensor."""
        return cls(*totals_row.unbind())


class WindowFlags(NamedTuple):
    """The flags of a window with `Totals`, on this rank or on all of a group: 0-d tensors."""

    overflow: Tensor  # bool: a microbatch with a weight overflowed; the scale follows it
    skip: Tensor  # bool: for an overflow, or because no weight is left
    # bool: fewer may overflow at a lower scale, because the loss of what overflowed is finite
    retryable: Tensor
    # of microbatches, and one more if the mean of all that count overflowed; of several tries the
    # one with the least is returned
    num_overflows: Tensor


class MeasuredWindow(NamedTuple):
    """A window at one loss scale, measured."""

    window: WindowResult
    stats: GradStats
    flags: WindowFlags | None  # None without totals
    scaler: HasScale  # the state that scaled it
    rng: Any = ()  # the next state of the generator
    retries: int = 0  # how often the step ran its window again

    @property
    def num_overflows(self) -> Tensor:
        """The number of overflows, or whether there is one, by which tries are compared."""
        return self.stats.overflow if self.flags is None else self.flags.num_overflows

    @property
    def retryable(self) -> Tensor:
        """bool []. Fewer may overflow at a lower scale: the loss of what overflowed is finite."""
        if self.flags is not None:
            return self.flags.retryable
        return self.stats.overflow & torch.isfinite(self.window.loss)


def normalize_weights(weight: Tensor, has_weight: Tensor) -> Tensor:
    """Return the weights of those that count over their sum, zeros if none does."""
    valid = torch.where(has_weight, weight, 0)
    return valid / torch.where(has_weight.any(), valid.sum(), 1)


def compute_totals(weight: Tensor, loss: Tensor, overflows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return `Totals` as one tensor, and the mean losses of the good ones and of all that
    count.
    """
    invalid = ~is_valid_weight(weight)
    has_weight = ~invalid & (weight > 0)
    overflow = torch.stack(overflows) & has_weight if overflows else torch.zeros_like(has_weight)
    good, finite = has_weight & ~overflow, torch.isfinite(loss)
    weights = [torch.where(flag, weight, 0).sum() for flag in (good, has_weight)]
    means = [
        (torch.where(flag, loss, 0) * normalize_weights(weight, flag)).sum()
        for flag in (good, has_weight)
    ]
    flags = torch.ones_like(good), good, invalid, overflow, overflow & finite, has_weight & ~finite
    totals_row = torch.stack([*weights, *(flag.sum().to(weight.dtype) for flag in flags)])
    return totals_row, torch.stack(means)


def all_reduce_totals(totals_row: Tensor, means: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Return the totals and mean losses of all ranks, from one reduction."""
    weights = totals_row[:2]  # those of the mean losses: `good_weight` and `valid_weight`
    row = torch.cat([totals_row, torch.where(weights > 0, weights * means, 0)])
    totals_row, weighted = torch.split(all_reduce(row, "sum", group), [len(totals_row), len(means)])
    weights = totals_row[:2]
    return totals_row, weighted / torch.where(weights > 0, weights, 1)


def window_fraction(
    options: TrainStepOptions,
    totals_row: Tensor | None,
    num_microbatches: int,
    device: torch.device,
) -> Tensor | None:
    """Return the part of a full window that is in the mean over all ranks; None for 1. It does not
    shrink if all microbatches were dropped.
    """
    size, group, fraction = options.window_size, options.group, None
    if size is None:
        return None
    total = None if totals_row is None else Totals.of(totals_row)
    if group is not None and total is not None:
        fraction = total.num_microbatches / (size * dist.get_world_size(group))
    elif size != num_microbatches:
        widest = widest_float(device)
        fraction = torch.full((), num_microbatches / size, dtype=widest, device=device)
    if options.drops_microbatches and total is not None:
        kept = total.good_weight / torch.where(total.valid_weight > 0, total.valid_weight, 1)
        kept = torch.where(total.num_good > 0, kept, 1)
        fraction = kept if fraction is None else kept * fraction
    return fraction


def window_flags(window: WindowResult, overflow: Tensor) -> WindowFlags | None:
    """Return the flags of a window whose mean was measured; None without totals. An `overflow` of
    the mean lowers the scale and skips the step. If the mean leaves out what overflows, it only
    skips.
    """
    totals_row = window.totals_row
    if totals_row is None:
        return None
    nonzero = Totals.of(totals_row > 0)
    num_overflows = Totals.of(totals_row).num_overflowed.to(torch.int64)
    if window.excludes_overflows:
        skip, retryable = ~nonzero.num_good | overflow, nonzero.num_retryable
        return WindowFlags(nonzero.num_overflowed, skip, retryable, num_overflows)
    skip = nonzero.num_invalid | nonzero.num_overflowed | ~nonzero.num_good | overflow
    overflow = overflow & nonzero.valid_weight
    num_overflows = num_overflows + overflow
    overflow = nonzero.num_overflowed | overflow
    retryable = overflow & ~(nonzero.num_nonfinite_losses | nonzero.num_invalid)
    return WindowFlags(overflow, skip, retryable, num_overflows)
