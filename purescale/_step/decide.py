"""The stages `call_guard` and `decide`: skip or apply, and how to clip. Nothing is read."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._grads.clip import ClipOptions, clip_factor, clip_factor_of_number, is_unbounded
from .._grads.measure import GradStats, norm_as_tensor
from .._step.spike_guard import Guard
from .._step.window_result import WindowFlags, WindowResult
from .._torch.transfer import to_device
from .._tree import scalars
from .._tree.gradients import Gradients
from .._tree.pytree import Tree


class Decision(NamedTuple):
    """The decision about a step, and what the step reports."""

    skip: Tensor  # bool []
    overflow: Tensor  # bool []: the scale follows it
    rejected: Tensor | Any  # as in `StepInfo`, like the next two
    grad_norm: Tensor | Any
    grad_amax: Tensor | Any
    grads: Gradients  # with the factor and the bound by which they are still to be clipped
    known_applied: bool  # the host knows that `skip` is False

    @property
    def skip_or_none(self) -> Tensor | None:
        """`skip`, or None where the host knows that the step is applied."""
        return None if self.known_applied else self.skip


def call_guard(
    guard: Guard[Any] | None, state: Tree, window: WindowResult, stats: GradStats
) -> tuple[Tree, Tensor | None]:
    """Return what `guard.update` returns about a window. Refuse all but a state and a flag. Without
    a guard the state stays, and there is no flag.
    """
    if guard is None:
        return state, None
    norm: Any = ()
    if stats.norm is not None:
        norm = norm_as_tensor(stats, window.loss.device).to(window.grads.scalar_dtype)
    returned = guard.update(state, window.loss, norm)
    pair = isinstance(returned, tuple) and len(returned) == 2
    bad = returned[1] if pair else None
    if not isinstance(bad, Tensor) or bad.dtype is not torch.bool or bad.ndim:
        what = f"{type(returned).__name__}" if not pair else f"(state, {scalars.short_repr(bad)})"
        raise TypeError(
            f"{type(guard).__name__}.update returned {what}; expected (state, bad), bad a 0-d bool "
            "tensor. Fix: `return new_state, loss > limit`, both of tensors."
        )
    return returned[0], bad


def decide(
    stats: GradStats,
    clip: ClipOptions,
    grads: Gradients,
    flags: WindowFlags | None = None,
    guard_rejects: Tensor | None = None,
) -> Decision:
    """Decide whether to skip the step, and how to clip the gradients.

    A step is skipped if its gradients overflow, if `flags` say so (for its weights, a microbatch or
    another rank), if a bound is 0, negative or NaN, or if `guard_rejects`.
    """
    overflow = skip = stats.overflow
    if flags is not None:
        overflow, skip = flags.overflow, flags.skip
    only_overflow_skips = flags is None and guard_rejects is None and len(clip.tensor_bounds) == 0
    known_applied = only_overflow_skips and stats.known_finite
    rejected: Any = ()
    grad_norm: Any = ()
    grad_amax: Any = () if stats.amax is None else stats.amax
    factor: float | Tensor | None = None
    if known_applied:  # in the arithmetic of Python's floats
        if stats.norm is not None:
            grad_norm = torch.full((), stats.norm, dtype=grads.scalar_dtype, device=skip.device)
            factor = clip_factor_of_number(stats.norm, clip.max_norm)
    else:
        for bound in clip.tensor_bounds:
            skip = skip | ~(to_device(bound, skip.device) > 0)
        norm = None if stats.norm is None else norm_as_tensor(stats, skip.device)
        if norm is not None:
            grad_norm = _reported(norm, skip, grads.scalar_dtype)
        if stats.amax is not None:
            grad_amax = _reported(stats.amax, skip, torch.float32)
        if guard_rejects is not None:
            rejected = guard_rejects & ~skip
            skip = skip | rejected
        if norm is not None and not is_unbounded(clip.max_norm):
            # In the derivative of a step that is skipped, 0 * NaN would be NaN.
            finite = torch.where(skip, 1.0, norm)
            factor = clip_factor(finite, clip.max_norm)  # type: ignore[arg-type]
    if factor is not None or clip.clip_value is not None:
        pending = grads.pending._replace(clip_factor=factor, clip_value=clip.clip_value)
        grads = grads._replace(pending=pending)
    return Decision(skip, overflow, rejected, grad_norm, grad_amax, grads, known_applied)


def _reported(measured: Tensor, skip: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the norm or amax that a step reports: inf or NaN if the step is skipped, also if
    another microbatch, its weight or another rank is the cause.
    """
    number = measured.to(dtype)
    return torch.where(skip, number.clamp(min=math.inf), number)
