"""The stage `measure` of a step: whether gradients are finite, their norm and their amax."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._distributed.collectives import all_reduce_found_inf
from .._distributed.process_group import Group, all_reduce
from .._grads.grad_stats import LocalStats, local_stats, sum_of_squares
from .._grads.mesh_stats import mesh_stats, stats_of_parts
from .._torch.dtensor import any_dtensor
from .._torch.dtypes import saturating
from .._torch.metadata_cache import elements
from .._torch.tracing import PLAIN_TYPES, host_can_read, is_on_a_graph, traced
from .._tree.gradients import Gradients


class GradStats(NamedTuple):
    """The results of one read of the gradients, over all ranks that share them."""

    nonfinite: Tensor  # bool []: a gradient, or one over the scale, is not finite
    nonfinite_on_host: bool | None  # the same, if the host can read it
    norm: Tensor | None  # of the unscaled gradients; None if not asked for
    norm_on_host: float | None  # the same, if the host can read it
    amax: Tensor | None  # float32 []: the largest unscaled magnitude; None if not asked for


def measure(
    grads: Gradients,
    scale: Tensor,
    *,
    norm_type: float | None = None,
    amax: bool = False,
    of_sum: bool = False,
    group: Group | None = None,
    norm_group: Group | None = None,
) -> GradStats:
    """Return the stats of `grads` over their scale. `scale`: that of the loss, also if they are
    unscaled by now; gradients are not finite if it is 0, negative, inf or NaN.

    On a CPU in eager mode the sum of squares is read, and the exact way is taken only if that sum
    is not conclusive. On an accelerator and while tracing no value is read.

    `of_sum`: they are a sum, in which inf and -inf give NaN or inf, depending on the order of the
    terms; their norm is then inf. `group`: the ranks that decide together; a `train_step` has
    reduced the gradients before it measures them. `norm_group`: the ranks that hold other parts of
    the model; the stats are those of all parts.
    """
    tensors, divisor = grads.tensors, grads.scale
    if divisor is None:
        divisor = torch.ones_like(scale)
    on_host = host_can_read([scale], tensors)
    squares: Tensor | None = None
    one_part = norm_group is None and not _is_sharded(grads)
    if one_part and (norm_type == 2 or (norm_type is None and not amax)):
        squares = _squares(tensors, readable=on_host)
    if squares is not None and on_host and group is None:
        total, number = squares.item(), scale.item()
        usable, number = 0 < number < math.inf, 1.0 if grads.scale is None else number
        if usable and _sum_is_conclusive(tensors, total, number, norm=norm_type is not None):
            known = None if norm_type is None else math.sqrt(total) / number
            return GradStats(
                torch.zeros((), dtype=torch.bool, device=scale.device),
                False,
                None if known is None else torch.full_like(squares, known),
                known,
                _amax(local_stats(tensors, divisor, None), divisor) if amax else None,
            )
    stats = _exact_stats(grads, divisor, norm_type)
    if norm_group is not None:
        stats = stats_of_parts(stats, divisor, norm_type, norm_group)
    nonfinite = ~stats.are_finite(divisor) | ~is_usable(scale)
    if group is not None:
        nonfinite = all_reduce_found_inf(nonfinite, group)
    norm = None if stats.norm is None else _norm(tensors, stats.norm, squares, divisor)
    if of_sum and norm is not None:
        norm = norm.nan_to_num(math.inf, math.inf)
    on_host = on_host and not is_on_a_graph(tensors)  # the clip factor must keep its derivative
    return GradStats(
        nonfinite,
        bool(nonfinite) if on_host else None,
        norm,
        norm.item() if on_host and norm is not None else None,
        _amax(stats, divisor, group) if amax else None,
    )


def measure_amax(grads: Gradients, one: Tensor, group: Group | None = None) -> Tensor:
    """Return the largest magnitude of unscaled gradients. `one`: 1 on their device."""
    return _amax(_exact_stats(grads, one, None), one, group)


def _exact_stats(grads: Gradients, divisor: Tensor, norm_type: float | None) -> LocalStats:
    if _is_sharded(grads):
        return mesh_stats(grads.tensors, grads.present_likes, divisor, norm_type)
    return local_stats(grads.tensors, divisor, norm_type)


def _is_sharded(grads: Gradients) -> bool:
    return not grads.dense_real and any_dtensor(grads.likes)


def _squares(tensors: Sequence[Tensor], *, readable: bool) -> Tensor | None:
    """Return the sum of squares on a CPU, where it is the fastest read; None elsewhere. `readable`:
    the host can read the values.
    """
    present = tensors
    if 0 in elements(tensors):
        present = [tensor for tensor in tensors if tensor.numel()]
    if not present or is_on_a_graph(present):
        return None
    if readable or (present[0].is_cpu and not traced() and set(map(type, present)) <= PLAIN_TYPES):
        return sum_of_squares(present)
    return None


def _sum_is_conclusive(
    tensors: Sequence[Tensor], total: float, divisor: float, *, norm: bool
) -> bool:
    """Return True if a sum of squares shows that all elements are finite over `divisor`, a usable
    scale, and, if `norm`, that its root is their norm.
    """
    bound = math.sqrt(total) if total >= 0 else math.nan  # no element is larger
    return bound / divisor < _SMALLEST_RANGE and not (
        norm and total < _smallest_reliable_sum(tensors)
    )


# of bfloat16, whose largest number is a little below that of float32
_SMALLEST_RANGE = torch.finfo(torch.bfloat16).max


def _smallest_reliable_sum(tensors: Sequence[Tensor]) -> float:
    """Return the sum of squares above which lost squares do not matter: those below the range of
    float32 could add less to it than its rounding.
    """
    return float(sum(elements(tensors)) * 2.0**-100)


def _norm(
    tensors: Sequence[Tensor], exact: Tensor, squares: Tensor | None, divisor: Tensor
) -> Tensor:
    """Return the norm from the sum of squares if that is conclusive, with the bits that the host
    computes, else the exact norm.
    """
    if squares is None:
        return exact
    quick = squares.sqrt() / divisor
    conclusive = (quick < _SMALLEST_RANGE) & (squares >= _smallest_reliable_sum(tensors))
    return torch.where(conclusive, quick, exact)


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


def is_usable(scale: Tensor) -> Tensor:
    """Return True if gradients scaled by `scale` can be trusted: division by 0, inf or NaN could
    turn garbage into finite numbers.
    """
    return (scale > 0) & (scale < math.inf)
