"""The engine of a step in eager mode on a CPU, where a read does not wait: `masked.py` with bools
and floats. A skipped step is the old state, and an applied one is torch's own step, in place where
memory allows; nothing is masked.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .._grads.clip import Clip, clip_factor_on_host, factor_dtype
from .._grads.measure import FINITE, GradStats, Want, stats_on_host
from .._optim.decision import Decision, unscaled
from .._optim.protocol import Updater
from .._optim.step_inputs import StepInputs
from .._step.masked import Masked, Outcome, WindowFlags, is_unbounded, unchanged
from .._step.memory import Memory
from .._step.spike_guard import Verdict
from .._torch.metadata import Metadata
from .._torch.private import listops
from .._torch.tracing import host_can_read
from .._tree.gradients import Gradients
from .._tree.select import copies
from .._tree.tree import Leaves, Tree


class OnHost(Masked):
    """The engine that reads flags and norm. They are bools and floats, and so is `skip`."""

    may_be_captured = False

    @staticmethod
    def read(flags: Tensor) -> Any:
        return flags.tolist()

    @staticmethod
    def measure(grads: Gradients, scale: Tensor, want: Want = FINITE) -> GradStats:
        return stats_on_host(grads, scale, want)

    @staticmethod
    def decide(
        stats: GradStats,
        clip: Clip,
        grads: Gradients,
        flags: WindowFlags | None = None,
        verdict: Verdict | None = None,
    ) -> Outcome:
        causes = [stats.nonfinite, *[not bool(bound > 0) for bound in clip.tensor_bounds]]
        if flags is not None and flags.must_skip is not None:
            causes.append(bool(flags.must_skip))
        failed = any(causes)
        rejected = verdict is not None and not failed and bool(verdict.bad)
        skip = failed or rejected
        decision = Decision(skip, grads.scale, clip_value=clip.value, divisor=grads.scale)
        norm: Any = ()
        if stats.norm is not None:
            dtype = factor_dtype(grads)
            norm = _reported(stats.norm, failed, dtype)
            if not (skip or is_unbounded(clip)):
                decision = _clipped(decision, clip, stats.norm, dtype)
        return Outcome(
            decision,
            failed,
            skip and flags is not None and not bool(flags.overflow),
            torch.full((), skip, dtype=torch.bool, device="cpu"),
            norm,
            () if stats.amax is None else _reported(stats.amax, failed, torch.float32),
            () if verdict is None else torch.full_like(verdict.bad, rejected),
        )

    @staticmethod
    def add(
        sums: list[Tensor],
        new: list[Tensor],
        share: float | Tensor,
        good: bool | Tensor,
        *,
        owned: bool,
    ) -> list[Tensor]:
        if good:
            listops.add_(sums, new, alpha=share)
        return sums

    @staticmethod
    def choose(skip: Tensor | bool, old: Leaves, new: Leaves, *, overwrite: bool = False) -> Leaves:
        return list(old) if skip and overwrite else copies(old if skip else new)

    @classmethod
    def update(
        cls, optimizer: Updater, inputs: StepInputs, decision: Decision, memory: Memory
    ) -> tuple[Tree, Tree]:
        if not decision.skip:
            return super().update(optimizer, inputs, decision, memory)
        old = inputs.params_tree(inputs.params), inputs.opt_state
        return inputs.restore(*unchanged(old, overwrite=memory.optimizer))

    @staticmethod
    def _step_and_choose(
        optimizer: Updater, inputs: StepInputs, decision: Decision, prepared: Any, *, in_place: bool
    ) -> tuple[Tree, Tree]:
        if optimizer.calls_step:
            stepped: tuple[Tree, Tree] = prepared
            return stepped
        own = unscaled(inputs, decision, wide=optimizer.wide_grads)
        return optimizer.applied(own, in_place=in_place, prepared=prepared)


def engine_for(optimizer: Updater, tensors: Metadata, numbers: list[Tensor]) -> type[Masked]:
    """Return the engine of a step over these tensors. Derivatives flow through a skipped step and
    an applied one alike, so a step that is to be differentiated is masked.
    """
    on_host = not optimizer.differentiable and host_can_read(numbers) and tensors.are_on_a_cpu
    return OnHost if on_host else Masked


def _clipped(decision: Decision, clip: Clip, norm: float, dtype: torch.dtype) -> Decision:
    """Return the decision with the clip factor, and one divisor for scale and factor."""
    factor = clip_factor_on_host(norm, float(clip.max_norm))  # type: ignore[arg-type]
    if factor >= 1:
        return decision
    unscaling = 1.0 if decision.scale is None else decision.scale.item()
    fits = factor * torch.finfo(dtype).max >= unscaling
    return decision._replace(
        factor=torch.full((), factor, dtype=dtype, device="cpu"),
        divisor=torch.full((), unscaling / factor, dtype=dtype, device="cpu") if fits else None,
    )


def _reported(measured: float, failed: bool, dtype: torch.dtype) -> Tensor:
    number = math.inf if failed and not math.isnan(measured) else measured
    return torch.tensor(number, dtype=dtype, device="cpu")  # `full` would refuse 1e39
