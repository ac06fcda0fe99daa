"""Retries: a window that overflows is run again, at a lower loss scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from .._grads.measure import is_usable
from .._loss_scale.rules import HasScale, Rule, call_rule
from .._step.prepare import PreparedStep
from .._step.random_state import Generators, run_with_rng
from .._step.train_state import TrainState
from .._step.window_result import MeasuredWindow
from .._torch.dtensor import any_dtensor

# Runs the microbatches at the loss scale of this state.
RunWindow: TypeAlias = Callable[[HasScale], MeasuredWindow]


def run_with_retries(prepared: PreparedStep, run_window: RunWindow) -> MeasuredWindow:
    """Return the result of `run_window(scaler)`: with `max_retries` at the first scale at which the
    window is finite, for which the host reads flags.

    If no try is finite, return the one that lost the fewest microbatches, and of those the one at
    the highest scale. All ranks of a group read the same flags, so they retry together.
    """
    flat_state, options = prepared.flat_state, prepared.options
    if not options.max_retries:
        return _run_once(flat_state.train_state, run_window, flat_state.train_state.scaler)
    if any_dtensor(flat_state.params.leaves):
        raise ValueError(
            f"max_retries={options.max_retries} with parameters that are DTensors: ranks that "
            "disagree about a retry would deadlock. Fix: max_retries=0."
        )
    best: MeasuredWindow | None = None
    scaler, retries = flat_state.train_state.scaler, 0
    generators = Generators.of(scaler.scale.device)
    with generators.locked():
        before = generators.states()
        while True:
            attempt = _run_once(flat_state.train_state, run_window, scaler)
            if best is None or bool(attempt.num_overflows < best.num_overflows):
                best = attempt
            lower = None
            if retries < options.max_retries and bool(attempt.retryable):
                lower = lower_scale(options.rule, scaler)
            if lower is None:
                return best._replace(retries=retries)
            scaler, retries = lower, retries + 1
            generators.restore(before)


def _run_once(state: TrainState, run_window: RunWindow, scaler: HasScale) -> MeasuredWindow:
    """Run a window with the random numbers of the state, if it has some."""
    if isinstance(state.rng, tuple):
        return run_window(scaler)
    attempt, rng = run_with_rng(state.rng, scaler.scale.device, lambda: run_window(scaler))
    return attempt._replace(rng=rng)


_MAX_UPDATES = 100  # overflows that a rule may let pass before it lowers the scale


def lower_scale(rule: Rule[Any], scaler: HasScale) -> HasScale | None:
    """Return the first state with a lower scale, or a usable one, that overflows lead to; None at
    the smallest scale. Syncs with the host.
    """
    lower, overflow = scaler, torch.ones((), dtype=torch.bool, device=scaler.scale.device)
    amax = torch.full_like(scaler.scale, torch.inf)  # as in a skipped step
    for _ in range(_MAX_UPDATES):
        lower = call_rule(rule, lower, overflow, amax)
        usable = is_usable(lower.scale) & ~is_usable(scaler.scale)
        if bool((lower.scale < scaler.scale) | usable):
            return lower
    return None
