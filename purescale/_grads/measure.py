"""The measurements of a step: whether gradients are finite, their norm and their amax."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._distributed.collectives import all_reduce_found_inf
from .._distributed.process_group import Group, all_reduce
from .._grads.grad_stats import LocalStats, local_stats, sum_of_squares
from .._grads.mesh_stats import mesh_stats, stats_of_parts
from .._torch.dtensor import any_dtensor
from .._torch.dtypes import saturating, widest_float
from .._torch.tracing import host_can_read, is_eager_on_a_cpu, is_on_a_graph
from .._tree.gradients import Gradients


class StatsOptions(NamedTuple):
    """The measurements to make besides whether gradients overflow, and over which ranks."""

    norm_type: float | None = None  # the p of the norm; None for no norm
    amax: bool = False
    # The gradients are a sum over ranks or microbatches, in which inf and -inf give NaN or inf,
    # depending on the order of the terms; their norm is then inf.
    of_sum: bool = False
    # The ranks that decide together; None in a `train_step`, which reduces before it measures.
    group: Group | None = None
    norm_group: Group | None = None  # the ranks that hold other parts of the model


OVERFLOW_ONLY = StatsOptions()


class GradStats(NamedTuple):
    """The results of one read of the gradients, over all ranks that share them: 0-d tensors, or
    Python numbers if the host has read them.
    """

    overflow: Any  # bool: a gradient, or one over the scale, is not finite
    norm: Any  # of the unscaled gradients; None if not asked for
    amax: Any  # the largest unscaled magnitude; None if not asked for


def measure(grads: Gradients, scale: Tensor, options: StatsOptions = OVERFLOW_ONLY) -> GradStats:
    """Return `stats_by_masks`, from the fastest read, for a function that is called by hand."""
    stats, tensors = None, grads.tensors
    if not options.amax and host_can_read([scale], tensors) and not is_on_a_graph(tensors):
        stats = _from_squares(grads, scale, options)
    if stats is None:
        return stats_by_masks(grads, scale, options)
    device = scale.device
    norm, dtype = stats.norm, widest_float(device)
    if norm is not None:
        norm = torch.full((), norm, dtype=dtype, device=device)
    return GradStats(torch.zeros((), dtype=torch.bool, device=device), norm, None)


def stats_by_masks(
    grads: Gradients, scale: Tensor, options: StatsOptions = OVERFLOW_ONLY
) -> GradStats:
    """Return the stats of `grads` over their divisor, and read nothing. `scale` is the loss scale.
    An unusable one (0, negative, inf or NaN) counts as overflow, even for unscaled gradients.
    """
    divisor = _divisor(grads, scale)
    stats = _exact_stats(grads, divisor, options.norm_type)
    if options.norm_group is not None:
        stats = stats_of_parts(stats, divisor, options.norm_type, options.norm_group)
    overflow = ~stats.are_finite(divisor) | ~is_usable(scale)
    if options.group is not None:
        overflow = all_reduce_found_inf(overflow, options.group)
    norm = stats.norm
    if norm is not None:
        if options.norm_type == 2 and _is_one_part(grads, options):
            norm = _match_host_rounding(grads, norm, divisor)
        if options.of_sum:
            norm = norm.nan_to_num(math.inf, math.inf)
    return GradStats(overflow, norm, _amax(stats, divisor, options.group) if options.amax else None)


def stats_on_host(
    grads: Gradients, scale: Tensor, options: StatsOptions = OVERFLOW_ONLY
) -> GradStats:
    """Return `stats_by_masks` as Python numbers, where a read does not wait. The sum of squares is
    read, and the exact way is taken only if that sum is not conclusive.
    """
    stats = _from_squares(grads, scale, options)
    if stats is None:
        stats = stats_by_masks(grads, scale, options)
        stats = GradStats(*[None if x is None else x.item() for x in stats])
    return stats


def measure_amax(grads: Gradients, divisor: Tensor, group: Group | None = None) -> Tensor:
    """Return the largest magnitude of gradients that `divisor` unscales."""
    return _amax(_exact_stats(grads, divisor, None), divisor, group)


def _exact_stats(grads: Gradients, divisor: Tensor, norm_type: float | None) -> LocalStats:
    """Return the stats of this rank, or of all ranks of a mesh if gradients are sharded."""
    if _is_sharded(grads):
        return mesh_stats(grads.tensors, grads.present_likes, divisor, norm_type)
    return local_stats(grads.tensors, divisor, norm_type)


def is_usable(scale: Tensor) -> Tensor:
    """Return True if gradients scaled by `scale` can be trusted: division by 0, inf or NaN could
    turn garbage into finite numbers.
    """
    return (scale > 0) & (scale < math.inf)


def _divisor(grads: Gradients, scale: Tensor) -> Tensor:
    """Return the scale by which the gradients are still multiplied, or 1."""
    return torch.ones_like(scale) if grads.divisor is None else grads.divisor


def _is_sharded(grads: Gradients) -> bool:
    return not grads.dense_real and any_dtensor(grads.likes)


def _is_one_part(grads: Gradients, options: StatsOptions) -> bool:
    """Return True if these gradients are those of the whole model."""
    return options.norm_group is None and not _is_sharded(grads)


# ---- the sum of squares, the fastest read of a CPU -----------------------------------------------


def _from_squares(grads: Gradients, scale: Tensor, options: StatsOptions) -> GradStats | None:
    """Return the stats as Python numbers if the sum of squares shows them."""
    has_norm = options.norm_type is not None
    enough = options.norm_type == 2 if has_norm else not options.amax
    any_element = any(grads.tensor_list.elements)
    if not (enough and any_element and options.group is None and _is_one_part(grads, options)):
        return None
    squares, loss_scale = sum_of_squares(grads.tensor_list).item(), scale.item()
    divisor = 1.0 if grads.divisor is None else loss_scale
    root = math.sqrt(squares) if squares >= 0 else math.nan  # no element is larger
    if not (0 < loss_scale < math.inf and root / divisor < _SMALLEST_RANGE):
        return None
    if has_norm and squares < _smallest_reliable_sum(grads):
        return None
    amax = None
    if options.amax:
        amax = measure_amax(grads, _divisor(grads, scale)).item()
    return GradStats(False, root / divisor if has_norm else None, amax)


# of bfloat16, whose largest number is a little below that of float32
_SMALLEST_RANGE = torch.finfo(torch.bfloat16).max


def _smallest_reliable_sum(grads: Gradients) -> float:
    """Return the sum of squares above which lost squares do not matter: those below the range of
    float32 could add less to it than its rounding.
    """
    return float(sum(grads.tensor_list.elements) * 2.0**-100)


def _match_host_rounding(grads: Gradients, exact: Tensor, divisor: Tensor) -> Tensor:
    """Return the norm that a host computes, on a CPU: from the sum of squares, if that is
    conclusive.
    """
    tensors = grads.tensors
    if (
        not is_eager_on_a_cpu(tensors)
        or is_on_a_graph(tensors)
        or not any(grads.tensor_list.elements)
    ):
        return exact
    squares = sum_of_squares(grads.tensor_list)
    quick = squares.sqrt() / divisor
    conclusive = (quick < _SMALLEST_RANGE) & (squares >= _smallest_reliable_sum(grads))
    return torch.where(conclusive, quick, exact)


# ---- the largest magnitude -----------------------------------------------------------------------


def _amax(stats: LocalStats, divisor: Tensor, group: Group | None = None) -> Tensor:
    """Return the largest unscaled magnitude in float32; a finite float64 stays finite."""
    tops = [saturating(top / divisor, torch.float32) for top in stats.amax.values()]
    if not tops:
        amax = torch.zeros((), dtype=torch.float32, device=divisor.device)
    else:
        amax = tops[0] if len(tops) == 1 else torch.stack(tops).amax()
    if group is None:
        return amax
    # Reduced as integers, because libraries of collectives disagree on the maximum of NaN and 1.
    # The bits of numbers that are not negative have the order of the numbers, with NaN above all.
    return all_reduce(amax.abs().view(torch.int32), "max", group).view(torch.float32)
