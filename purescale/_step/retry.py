"""A window with its random numbers, and again at a lower loss scale."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .._grads.measure import is_usable
from .._loss_scale.rules import HasScale, Rule, call_rule
from .._step.flat_state import FlatState
from .._step.train_state import TrainStepOptions
from .._step.window_result import Attempt
from .._torch.dtensor import any_dtensor
from .._tree.pytree import FlatTree

# Runs the microbatches at the loss scale of this state.
RunWindow: TypeAlias = Callable[[FlatTree], Attempt]


def run_with_retries(
    options: TrainStepOptions, flat_state: FlatState, run_window: RunWindow
) -> Attempt:
    """Return the result of `run_window(flat_scaler)`: with `max_retries` at the first scale at
    which the window is finite, for which the host reads flags.

    If no try is finite, return the one that lost the fewest microbatches, and of those the one at
    the highest scale. All ranks of a group read the same flags, so they retry together.
    """
    if not options.max_retries:
        return _run_with_rng(flat_state.rng, run_window, flat_state.scaler)
    if any_dtensor(flat_state.params.leaves):
        raise ValueError(
            f"max_retries={options.max_retries} with parameters that are DTensors: ranks that "
            "disagree about a retry would deadlock. Fix: max_retries=0."
        )
    best: Attempt | None = None
    flat_scaler, retries = flat_state.scaler, 0
    generators = Generators.of(flat_scaler.tree.scale.device)
    with generators.locked():
        before = generators.states()
        while True:
            attempt = _run_with_rng(flat_state.rng, run_window, flat_scaler)
            if best is None or bool(attempt.num_overflows < best.num_overflows):
                best = attempt
            lower = None
            if retries < options.max_retries and bool(attempt.retryable):
                lower = backed_off(options.rule, flat_scaler.tree)
            if lower is None:
                return best._replace(retries=retries)
            flat_scaler, retries = FlatTree.of(lower), retries + 1
            generators.restore(before)


def _run_with_rng(rng: Any, run_window: RunWindow, flat_scaler: FlatTree) -> Attempt:
    """Run a window with random numbers from `rng`, the state of a generator. With `()` it uses the
    global generator; with a state it leaves that one unchanged.
    """
    if isinstance(rng, tuple):
        return run_window(flat_scaler)
    generator = Generators(Generators.of(flat_scaler.tree.scale.device).sources[-1:])
    with generator.locked(), generator.unchanged():
        generator.restore([rng.clone()])
        attempt = run_window(flat_scaler)
        return attempt._replace(rng=generator.states()[0])


_MAX_UPDATES = 100  # overflows that a rule may let pass before it lowers the scale


def backed_off(rule: Rule[Any], scaler: HasScale) -> HasScale | None:
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


# A loss may make steps itself, so a thread may take its turn again.
_locks: dict[tuple[Any, ...], Any] = {}


class Generators(NamedTuple):
    """Global generators of torch, which are of the whole process: each one as the module that has
    it and its device.
    """

    sources: list[tuple[Any, tuple[Any, ...]]]

    @classmethod
    def of(cls, device: torch.device) -> Generators:
        """Return the generators that a loss may use."""
        sources: list[tuple[Any, tuple[Any, ...]]] = [(torch, ())]
        if device.type != "cpu":
            sources.append((getattr(torch, device.type), (device,)))
        return cls(sources)

    def states(self) -> list[Tensor]:
        return [module.get_rng_state(*where) for module, where in self.sources]

    def restore(self, states: list[Tensor]) -> None:
        for (module, where), state in zip(self.sources, states, strict=True):
            module.set_rng_state(state, *where)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Wait for the other threads whose steps set these generators."""
        with contextlib.ExitStack() as stack:
            for _, where in self.sources:
                stack.enter_context(_locks.setdefault(where, threading.RLock()))
            yield

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restore the states at the end, whatever is drawn or set."""
        before = self.states()
        try:
            yield
        finally:
            self.restore(before)
