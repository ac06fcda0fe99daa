"""The measurements of a step: whether gradients are finite, their norm and their amax, over shards
and over the parts of a model too.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._distributed.collectives import all_reduce_found_inf
from .._distributed.process_group import Group, all_reduce
from .._grads.local_stats import LocalStats, local_stats, norm_on_host
from .._grads.stats_over_ranks import stats_over_group, stats_over_meshes
from .._torch import private
from .._torch.dtypes import HALF, cast_saturating, widest_float
from .._torch.tracing import host_can_decide
from .._tree.gradients import NOTHING_PENDING, Gradients


class StatsOptions(NamedTuple):
    """The measurements to make besides whether gradients overflow, and over which ranks."""

    norm_type: float | None = None  # the p of the norm; None for no norm
    amax: bool = False
    # The gradients are a sum over microbatches or ranks, in which inf and -inf give NaN or inf,
    # depending on the order of the terms; their norm is then inf.
    nan_norm_is_inf: bool = False
    # The ranks that decide together; None in a `train_step`, which reduces before it measures.
    group: Group | None = None
    norm_group: Group | None = None  # the ranks that hold other parts of the model
    all_readable: bool = False  # it is known that the host may read the gradients and the scale

    @property
    def only_overflow(self) -> bool:
        """True if nothing else is measured, and on this rank alone."""
        return self.norm_type is None and not self.amax and self.one_part

    @property
    def one_part(self) -> bool:
        """True if this rank measures alone."""
        return self.group is None and self.norm_group is None


OVERFLOW_ONLY = StatsOptions()


class GradStats(NamedTuple):
    """The measurements of the gradients, over all ranks that share them: 0-d tensors, but for a
    norm that the host has read.
    """

    overflow: Tensor  # bool: a gradient, or one over the scale, is not finite
    norm: Any  # of the unscaled gradients; None if not asked for; a float if `known_finite`
    amax: Any  # the largest unscaled magnitude; None if not asked for
    # the host has read that no gradient overflows, and the norm, if it was asked for
    known_finite: bool = False


def measure(
    grads: Gradients, scale: Tensor, options: StatsOptions = OVERFLOW_ONLY
) -> tuple[GradStats, Gradients]:
    """Return the stats of `grads` over their divisor, and the same gradients: unscaled, if that
    takes no pass of its own. `scale` is the loss scale. An unusable one (0, negative, inf or NaN)
    counts as overflow, even for unscaled gradients.

    On an accelerator and in a trace nothing is read. On a CPU torch's operator checks and divides
    owned gradients of which only the overflow is asked, if it is exact. Otherwise, for the 2-norm
    or the overflow alone, of one part without shards, that norm is read. What it tells too little
    about, and all the rest, is measured exactly.
    """
    if options.all_readable or host_can_decide([scale], grads.tensors):
        if options.only_overflow and grads.owned and _amp_operator_is_exact(grads, scale):
            return _stats_from_amp_operator(grads, scale)
        stats = _stats_from_norm(grads, scale, options)
        if stats is not None:
            return stats, grads
    return measure_exactly(grads, scale, options), grads


def measure_exactly(grads: Gradients, scale: Tensor, options: StatsOptions) -> GradStats:
    """Return the stats of `measure`, by their specification: the largest magnitudes and the norm in
    the widest dtype of the device. Nothing is read.
    """
    divisor = _divisor(grads, scale)
    stats = _collect_stats(grads, divisor, options.norm_type)
    if options.norm_group is not None:
        stats = stats_over_group(stats, divisor, options.norm_type, options.norm_group)
    overflow = ~(stats.are_finite(divisor) & is_usable(scale))
    if options.group is not None:
        overflow = all_reduce_found_inf(overflow, options.group)
    norm = stats.norm
    if norm is not None and options.nan_norm_is_inf:
        norm = norm.nan_to_num(math.inf, math.inf)
    return GradStats(overflow, norm, _amax(stats, divisor, options.group) if options.amax else None)


def norm_as_tensor(stats: GradStats, device: torch.device) -> Tensor:
    """Return the norm as a tensor, in the widest dtype of the device."""
    if isinstance(stats.norm, Tensor):
        return stats.norm
    return torch.full((), stats.norm, dtype=widest_float(device), device=device)


def measure_amax(grads: Gradients, divisor: Tensor, group: Group | None = None) -> Tensor:
    """Return the largest magnitude of gradients that `divisor` unscales."""
    return _amax(_collect_stats(grads, divisor, None), divisor, group)


def _collect_stats(grads: Gradients, divisor: Tensor, norm_type: float | None) -> LocalStats:
    """Return the stats of this rank, or of all ranks of a mesh if gradients are sharded. A complex
    number counts with its magnitude in the norm, with its two parts in the rest.
    """

    def stats_of(tensors: list[Tensor], norm_type: float | None) -> LocalStats:
        if grads.are_sharded:
            return stats_over_meshes(tensors, grads.present_sources, divisor, norm_type)
        return local_stats(tensors, divisor, norm_type)

    # For p = 2 the parts give the same norm.
    if norm_type in (None, 2) or not any(map(Tensor.is_complex, grads.present_sources)):
        return stats_of(grads.tensors, norm_type)
    stats = stats_of(grads.tensors, None)
    return stats._replace(norm=stats_of(_magnitudes(grads), norm_type).norm)


def _magnitudes(grads: Gradients) -> list[Tensor]:
    """Return the gradients with the magnitude in place of each complex number."""
    return [
        torch.linalg.vector_norm(tensor, dim=-1, dtype=widest_float(tensor.device))
        if source.is_complex()
        else tensor
        for tensor, source in zip(grads.tensors, grads.present_sources, strict=True)
    ]


def is_usable(scale: Tensor) -> Tensor:
    """Return True if gradients scaled by `scale` can be trusted: division by 0, inf or NaN could
    turn garbage into finite numbers.
    """
    return (scale > 0) & (scale < math.inf)


def _divisor(grads: Gradients, scale: Tensor) -> Tensor:
    """Return the scale by which the gradients are still multiplied, or 1."""
    divisor = grads.pending.divisor
    return torch.ones_like(scale) if divisor is None else divisor


# ---- the fastest reads of a CPU -----------------------------------------------------------------


def _amp_operator_is_exact(grads: Gradients, scale: Tensor) -> bool:
    """Return True if torch's operator of GradScaler unscales with the bits of a division, and sees
    all overflows: it multiplies by the inverse, and looks at the gradients before. Half gradients
    may be divided in float32.
    """
    if grads.pending.divisor is not scale or not private.unscale_and_check_:
        return False
    tensor_list = grads.tensor_list
    full_precision = tensor_list.dtypes.isdisjoint(HALF)
    if grads.are_sharded or not (full_precision and tensor_list.num_elements):
        return False
    number, is_float32 = scale.item(), scale.dtype is torch.float32
    is_power_of_two = math.frexp(number)[0] == 0.5
    return is_float32 and is_power_of_two and 1 <= number <= 2.0**126


def _stats_from_amp_operator(grads: Gradients, scale: Tensor) -> tuple[GradStats, Gradients]:
    """Return the stats, and the gradients unscaled in place."""
    numbers = 0.0, 1 / scale.item()
    # By `full`, as all numbers of a step: an operator that has just run takes a fifth of the time.
    flag, inverse = [torch.full((), n, dtype=torch.float32, device="cpu") for n in numbers]
    private.unscale_and_check_(grads.tensors, flag, inverse)
    torch.autograd.graph.increment_version(grads.tensors)  # the operator does not count its write
    finite = flag.item() == 0
    overflow = torch.full((), not finite, device="cpu")
    stats = GradStats(overflow, None, None, known_finite=finite)
    return stats, grads._replace(pending=NOTHING_PENDING)


def _stats_from_norm(grads: Gradients, scale: Tensor, options: StatsOptions) -> GradStats | None:
    """Return the stats if the norm, which is read, shows them."""
    has_norm = options.norm_type is not None
    enough = options.norm_type == 2 if has_norm else not options.amax
    num_elements = grads.tensor_list.num_elements
    if not (enough and options.one_part and num_elements) or grads.are_sharded:
        return None
    norm, loss_scale = norm_on_host(grads.tensor_list), scale.item()
    divisor = 1.0 if grads.pending.divisor is None else grads.pending.divisor.item()
    # No element is larger than the norm.
    if not (0 < loss_scale < math.inf and divisor > 0 and norm / divisor < _SMALLEST_RANGE):
        return None
    # If the norm is this small, squares that float32 has lost could matter.
    if has_norm and norm * norm < num_elements * 2.0**-100:
        return None
    amax = measure_amax(grads, _divisor(grads, scale)) if options.amax else None
    overflow = torch.full((), False, device=scale.device)
    return GradStats(overflow, norm / divisor if has_norm else None, amax, known_finite=True)


# of bfloat16, whose largest number is a little below that of float32
_SMALLEST_RANGE = torch.finfo(torch.bfloat16).max


# ---- the largest magnitude -----------------------------------------------------------------------


def _amax(stats: LocalStats, divisor: Tensor, group: Group | None) -> Tensor:
    """Return the largest unscaled magnitude in float32; a finite float64 stays finite."""
    amaxes = [cast_saturating(top / divisor, torch.float32) for top in stats.scaled_amaxes.values()]
    if not amaxes:
        amax = torch.zeros((), dtype=torch.float32, device=divisor.device)
    else:
        amax = amaxes[0] if len(amaxes) == 1 else torch.stack(amaxes).amax()
    if group is None:
        return amax
    # Reduced as integers, because libraries of collectives disagree on the maximum of NaN and 1.
    # The bits of numbers that are not negative have the order of the numbers, with NaN above all.
    return all_reduce(amax.abs().view(torch.int32), "max", group).view(torch.float32)
