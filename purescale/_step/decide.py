"""The stage `decide` of a step: skip or apply, and how gradients are clipped. Nothing is read."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._grads.clip import Clip, clip_factor
from .._grads.measure import GradStats, norm_of
from .._step.window_result import WindowFlags
from .._torch.dtypes import on_device
from .._tree.gradients import Gradients


class Decision(NamedTuple):
    """The decision about a step, and what the step reports."""

    skip: Tensor  # bool []
    rejected: Tensor | None  # bool []: a guard alone skips the step; None without a guard
    grads: Gradients  # with the factor and the bound by which they are still to be clipped
    # before clipping; not finite if the step is skipped, unless rejected; None without max_norm
    grad_norm: Tensor | None
    grad_amax: Tensor | None  # likewise; None if not asked for
    only_overflow_skips: bool  # nothing else can skip the step: `skip` is the flag of an overflow
    is_applied: bool = False  # the host knows that `skip` is False

    @property
    def known_skip(self) -> Tensor | bool:
        """`skip`, or False where the host knows it."""
        return False if self.is_applied else self.skip


def decide(
    stats: GradStats,
    clip: Clip,
    grads: Gradients,
    flags: WindowFlags | None = None,
    rejects: Tensor | None = None,
) -> Decision:
    """Decide whether to skip the step, and how to clip the gradients.

    A step is skipped if its gradients overflow, if `flags` say so (for its weights, a microbatch or
    another rank), if a bound is 0, negative or NaN, or if a guard `rejects` it.
    """
    overflow = stats.overflow if flags is None else flags.overflow
    skip = stats.overflow if flags is None else flags.skip
    if stats.is_read and skip is stats.overflow and rejects is None and not clip.tensor_bounds:
        return _decide_on_host(stats, clip, grads)
    for bound in clip.tensor_bounds:
        skip = skip | ~(on_device(bound, skip.device) > 0)
    norm, measured = None, stats.norm
    if measured is not None:
        measured = norm_of(stats, skip.device)
        norm = _reported(measured, skip, grads.factor_dtype)
    amax = None if stats.amax is None else _reported(stats.amax, skip, torch.float32)
    rejected = None
    if rejects is not None:
        rejected = rejects & ~skip
        skip = skip | rejected
    factor = None
    if measured is not None and (isinstance(clip.max_norm, Tensor) or clip.max_norm != math.inf):
        # In the derivative of a step that is skipped, 0 * NaN would be NaN.
        finite = torch.where(skip, 1.0, measured)
        factor = clip_factor(finite, clip.max_norm)  # type: ignore[arg-type]
    if factor is not None or clip.value is not None:
        grads = grads._replace(factor=factor, clip_value=clip.value)
    return Decision(skip, rejected, grads, norm, amax, only_overflow_skips=skip is overflow)


def _decide_on_host(stats: GradStats, clip: Clip, grads: Gradients) -> Decision:
    """Return the decision about gradients that the host knows to be finite: to apply them, and how
    to clip them, in the arithmetic of Python's floats.
    """
    norm, factor, max_norm, skip = None, None, clip.max_norm, stats.overflow
    if stats.norm is not None:
        norm = torch.full((), stats.norm, dtype=grads.factor_dtype, device=skip.device)
        if max_norm is not None and max_norm != math.inf:
            factor = min(float(max_norm) / (stats.norm + 1e-6), 1.0)
    if factor is not None or clip.value is not None:
        grads = grads._replace(factor=factor, clip_value=clip.value)
    return Decision(skip, None, grads, norm, stats.amax, only_overflow_skips=True, is_applied=True)


def or_empty(value: Tensor | None) -> Any:
    """Return what public records and guards get for a number: `()` if it is absent."""
    return () if value is None else value


def _reported(measured: Tensor, skip: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the norm or amax that a step reports: inf or NaN if the step is skipped, also if
    another microbatch, its weight or another rank is the cause.
    """
    number = measured.to(dtype)
    return torch.where(skip, number.clamp(min=math.inf), number)
