"""The stage `decide` of a step: one record says what happens, before anything moves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._grads.clip import Clip, clip_factor, clip_factor_on_host, factor_dtype, inf_where_skipped
from .._grads.measure import GradStats
from .._optim.decision import Decision


class Outcome(NamedTuple):
    """What a step does, and what it reports of the gradients."""

    decision: Decision
    found_inf: Tensor  # bool []: the step is skipped, for whatever reason
    # before clipping; not finite where the step is skipped, unless a guard alone skips it; ()
    # without max_norm
    grad_norm: Any
    grad_amax: Any  # likewise; () where it was not asked for
    rejected: Any = ()  # bool []: a guard skips the step, and nothing else does; () without one


def decide(
    stats: GradStats,
    clip: Clip,
    scale: Tensor | None,
    grads: Sequence[Tensor],
    must_skip: Tensor | None = None,
    bad: Tensor | None = None,
) -> Outcome:
    """Skip or apply, and by what the gradients are divided. `scale`: what they are still scaled by;
    None of unscaled ones.

    Skipped is a step whose gradients are not finite, one with a bound that is 0, negative or NaN,
    and one of which `must_skip` says so: its weights, a microbatch of it or another rank. `bad`: a
    guard rejects the step. Where the host can see, what follows from the norm are Python numbers;
    elsewhere tensors that nobody reads.
    """
    causes = [~(bound.to(stats.nonfinite.device) > 0) for bound in clip.bounds]
    if must_skip is not None:
        causes.append(must_skip)
    if stats.nonfinite_on_host is not None and all([bound.is_cpu for bound in clip.bounds]):
        other_cause = any([bool(cause) for cause in causes])
        return _decide_on_host(stats, clip, scale, grads, other_cause, bad)
    failed = stats.nonfinite
    for cause in causes:
        failed = failed | cause
    found_inf = failed if bad is None else failed | bad
    factor, divisor, prefactor, norm = None, scale, None, ()
    if clip.max_norm is not None:
        dtype = factor_dtype(grads)
        exact: Any = stats.norm
        norm = exact.to(dtype)
        if not _is_unbounded(clip):
            wide = clip_factor(exact, clip.max_norm)
            factor, one = wide.to(dtype), torch.ones_like(norm)
            unscaling = one if scale is None else scale.to(dtype)
            divisor = (unscaling / wide).to(dtype)
            fits = torch.isfinite(divisor)
            divisor, prefactor = (
                torch.where(fits, divisor, unscaling),
                torch.where(fits, one, factor),
            )
    decision = Decision(found_inf, None, scale, factor, clip.value, divisor, prefactor)
    rejected = () if bad is None else bad & ~failed
    amax = inf_where_skipped(stats.amax, failed)
    return Outcome(decision, found_inf, inf_where_skipped(norm, failed), amax, rejected)


def _decide_on_host(
    stats: GradStats,
    clip: Clip,
    scale: Tensor | None,
    grads: Sequence[Tensor],
    other_cause: bool,
    bad: Tensor | None,
) -> Outcome:
    failed = stats.nonfinite_on_host or other_cause
    rejects = bad is not None and not failed and bool(bad)
    rejected = () if bad is None else torch.full_like(stats.nonfinite, rejects)
    skipped = other_cause or rejects
    found_inf = torch.ones_like(stats.nonfinite) if skipped else stats.nonfinite
    norm: Any = () if stats.norm is None else stats.norm.to(factor_dtype(grads))
    if failed or rejects:
        decision, amax = Decision(found_inf, True), stats.amax
        if failed:
            norm, amax = _inf_if_finite(norm), _inf_if_finite(amax)
        return Outcome(decision, found_inf, norm, amax, rejected)
    factor, divisor = None, scale
    if clip.max_norm is not None and not _is_unbounded(clip):
        wide = clip_factor_on_host(stats.norm_on_host, float(clip.max_norm))  # type: ignore[arg-type]
        if wide < 1:
            factor = torch.full_like(norm, wide)
            unscaling = 1.0 if scale is None else scale.item()
            fits = wide * torch.finfo(norm.dtype).max >= unscaling
            divisor = torch.full_like(norm, unscaling / wide) if fits else None
    decision = Decision(None, False, scale, factor, clip.value, divisor)
    return Outcome(decision, found_inf, norm, stats.amax, rejected)


def _is_unbounded(clip: Clip) -> bool:
    return not isinstance(clip.max_norm, Tensor) and clip.max_norm == math.inf


def _inf_if_finite(measured: Any) -> Any:
    return measured.clamp(min=math.inf) if isinstance(measured, Tensor) else measured
