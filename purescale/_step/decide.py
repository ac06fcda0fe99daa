"""The stage `decide` of a step: skip or apply, and the clip factor, in one record."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._grads.clip import Clip, clip_factor, clip_factor_on_host, factor_dtype, inf_where_skipped
from .._grads.measure import GradStats
from .._optim.decision import Decision
from .._step.spike_guard import Guard, call_guard
from .._tree import tree as _tree
from .._tree.gradients import Gradients
from .._tree.tree import Leaves, TreeDef


class Verdict(NamedTuple):
    """The verdict of a guard on a step."""

    old: Leaves  # the state of the guard before and after, in one order
    new: Leaves
    structure: TreeDef
    bad: Tensor  # bool []: the step is rejected


class Outcome(NamedTuple):
    """The decision about a step, and the gradient numbers that it reports."""

    decision: Decision
    found_inf: Tensor  # bool []: the step is skipped, for any reason
    # before clipping; not finite if the step is skipped, unless a guard alone skips it; None
    # without max_norm
    grad_norm: Tensor | None
    grad_amax: Tensor | None  # likewise; None if not asked for
    rejected: Tensor | None = None  # bool []: a guard alone skips the step; None without a guard
    verdict: Verdict | None = None


def judge(
    guard: Guard[Any], state: Any, loss: Tensor, norm: Tensor | None, grads: Gradients
) -> Verdict:
    """Call the guard with the loss and norm that `StepInfo` reports."""
    reported: Any = () if norm is None else norm.to(factor_dtype(grads.tensors))
    new, bad = call_guard(guard, state, loss, reported)
    pair = _tree.matching_leaves(state, new, "state.guard", "the state that the guard returned")
    return Verdict(*pair, bad)


def decide(
    stats: GradStats,
    clip: Clip,
    grads: Gradients,
    must_skip: Tensor | None = None,
    verdict: Verdict | None = None,
) -> Outcome:
    """Decide whether to skip the step, and by what to divide the gradients.

    A step is skipped if its gradients are not finite, if a bound is 0, negative or NaN, or if
    `must_skip` is True: for its weights, a microbatch or another rank. `verdict`: of the guard.
    If the host can read the values, the decision is made in Python; otherwise by masks, and
    nothing is read.
    """
    bad = None if verdict is None else verdict.bad
    causes = [~(bound.to(stats.nonfinite.device) > 0) for bound in clip.tensor_bounds]
    if must_skip is not None:
        causes.append(must_skip)
    if stats.nonfinite_on_host is not None and all([bound.is_cpu for bound in clip.tensor_bounds]):
        other_cause = any([bool(cause) for cause in causes])
        return _decide_on_host(stats, clip, grads, other_cause, verdict)
    failed = stats.nonfinite
    for cause in causes:
        failed = failed | cause
    found_inf = failed if bad is None else failed | bad
    scale = grads.scale
    factor, divisor, prefactor, norm = None, scale, None, None
    if clip.max_norm is not None:
        dtype = factor_dtype(grads.tensors)
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
    rejected = None if bad is None else bad & ~failed
    amax = inf_where_skipped(stats.amax, failed)
    norm = inf_where_skipped(norm, failed)
    return Outcome(decision, found_inf, norm, amax, rejected, verdict)


def _decide_on_host(
    stats: GradStats,
    clip: Clip,
    grads: Gradients,
    other_cause: bool,
    verdict: Verdict | None,
) -> Outcome:
    failed = stats.nonfinite_on_host or other_cause
    rejects = verdict is not None and not failed and bool(verdict.bad)
    rejected = None if verdict is None else torch.full_like(stats.nonfinite, rejects)
    skipped_otherwise = other_cause or rejects
    found_inf = torch.ones_like(stats.nonfinite) if skipped_otherwise else stats.nonfinite
    norm: Any = None if stats.norm is None else stats.norm.to(factor_dtype(grads.tensors))
    if failed or rejects:
        decision, amax = Decision(found_inf, True), stats.amax
        if failed:
            norm, amax = _inf_if_finite(norm), _inf_if_finite(amax)
        return Outcome(decision, found_inf, norm, amax, rejected, verdict)
    scale = grads.scale
    factor, divisor = None, scale
    if clip.max_norm is not None and not _is_unbounded(clip):
        wide = clip_factor_on_host(stats.norm_on_host, float(clip.max_norm))  # type: ignore[arg-type]
        if wide < 1:
            factor = torch.full_like(norm, wide)
            unscaling = 1.0 if scale is None else scale.item()
            fits = wide * torch.finfo(norm.dtype).max >= unscaling
            divisor = torch.full_like(norm, unscaling / wide) if fits else None
    decision = Decision(None, False, scale, factor, clip.value, divisor)
    return Outcome(decision, found_inf, norm, stats.amax, rejected, verdict)


def _is_unbounded(clip: Clip) -> bool:
    return not isinstance(clip.max_norm, Tensor) and clip.max_norm == math.inf


def _inf_if_finite(measured: Tensor | None) -> Tensor | None:
    return None if measured is None else measured.clamp(min=math.inf)
