"""A training step as its specification: nothing is read, and `torch.where` decides.

This engine makes every step that is compiled, mapped or differentiated, and all steps on an
accelerator. `on_host.py` is the same after one read, in eager mode on a CPU; a law says that both
agree. Which of the two makes a step is decided once, by `on_host.engine_for`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._grads.clip import Clip, clip_factor, factor_dtype
from .._grads.measure import FINITE, GradStats, Want, stats_by_masks
from .._optim.decision import Decision, unscaled
from .._optim.partition import PartitionOptimizer
from .._optim.protocol import Updater
from .._optim.step_inputs import StepInputs
from .._optim.torch_optim import TorchOptimizer
from .._optim.wrapper import Wrapper, off_graph
from .._step.memory import Memory
from .._step.spike_guard import Verdict
from .._torch.dtypes import on_device
from .._torch.foreach import weighted_sum
from .._torch.tracing import traced, under_transform
from .._tree import select
from .._tree import tree as _tree
from .._tree.gradients import Gradients
from .._tree.tree import Leaves, Tree


class WindowFlags(NamedTuple):
    """The overflows of a window, on this rank or on all of a group."""

    overflow: Tensor  # bool []: a microbatch with a weight overflowed; the scale follows it
    # bool []: fewer may overflow at a lower scale, because the loss of what overflowed is finite
    retryable: Tensor
    num_overflowed: Tensor  # int64 []; bool [] if only the mean was measured
    must_skip: Tensor | None  # bool []: for any mean; None if the mean alone decides


class Outcome(NamedTuple):
    """The decision about a step, and what the step reports. The flags are bool [], or bools if the
    host has read them.
    """

    decision: Decision  # of the optimizer, with `skip`
    failed: Tensor | bool  # the step is skipped, whatever a guard says
    keeps_scale: Tensor | bool  # the step is skipped, and not for an overflow
    found_inf: Tensor  # bool []: the step is skipped, for any reason
    # before clipping; not finite if the step failed; () without max_norm
    grad_norm: Any
    grad_amax: Any  # likewise; () if not asked for
    rejected: Any  # bool []: a guard alone skips the step; () without a guard


class Masked:
    """The engine that reads nothing, but for an optimizer whose first step may add to its state."""

    # A step that the host does not see may be captured in a CUDA graph, which needs all numbers of
    # a state at fixed addresses.
    may_be_captured = True

    @staticmethod
    def read(flags: Tensor) -> Any:
        """Return flags or numbers as they are; `OnHost` returns Python's."""
        return flags

    @staticmethod
    def measure(grads: Gradients, scale: Tensor, want: Want = FINITE) -> GradStats:
        """Measure gradients: whether all are finite, their norm, the largest magnitude."""
        return stats_by_masks(grads, scale, want)

    @staticmethod
    def decide(
        stats: GradStats,
        clip: Clip,
        grads: Gradients,
        flags: WindowFlags | None = None,
        verdict: Verdict | None = None,
    ) -> Outcome:
        """Decide whether to skip the step, and by what to divide the gradients.

        A step is skipped if its gradients are not finite, if a bound is 0, negative or NaN, if
        `flags` say so (for its weights, a microbatch or another rank), or by `verdict`, a guard's.
        """
        failed = stats.nonfinite
        for bound in clip.tensor_bounds:
            failed = failed | ~(on_device(bound, failed.device) > 0)
        if flags is not None and flags.must_skip is not None:
            failed = failed | flags.must_skip
        skip = failed if verdict is None else failed | verdict.bad
        # If nothing but an overflow can skip the step, no mask is needed.
        keeps_scale: Tensor | bool = False
        others = len(clip.tensor_bounds) > 0 or verdict is not None
        if flags is not None and (others or flags.must_skip is not None):
            keeps_scale = skip & ~flags.overflow
        norm = None if stats.norm is None else stats.norm.to(factor_dtype(grads))
        return Outcome(
            Masked._divided(Decision(skip, grads.scale, None, clip.value), clip, stats.norm, norm),
            failed,
            keeps_scale,
            skip,
            _reported(norm, failed),
            _reported(stats.amax, failed),
            () if verdict is None else verdict.bad & ~failed,
        )

    @staticmethod
    def _divided(decision: Decision, clip: Clip, exact: Any, norm: Tensor | None) -> Decision:
        """Return the decision with the clip factor, and one divisor for scale and factor."""
        scale = decision.scale
        if norm is None or is_unbounded(clip):
            return decision._replace(divisor=scale)
        # In the derivative of a step that is skipped, 0 * NaN would be NaN.
        exact = torch.where(decision.skip, 1.0, exact)  # type: ignore[arg-type]
        wide = clip_factor(exact, clip.max_norm)  # type: ignore[arg-type]
        factor, one = wide.to(norm.dtype), torch.ones_like(norm)
        unscaling = one if scale is None else scale.to(norm.dtype)
        divisor = (unscaling / wide).to(norm.dtype)
        fits = torch.isfinite(divisor)
        return decision._replace(
            factor=factor,
            divisor=torch.where(fits, divisor, unscaling),
            prefactor=torch.where(fits, one, factor),
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
        """Return `sums + new * share` if `good`, else `sums`, which is overwritten if `owned`."""
        return weighted_sum(sums, new, share, good, owned=owned)

    @staticmethod
    def choose(skip: Tensor | bool, old: Leaves, new: Leaves, *, overwrite: bool = False) -> Leaves:
        """Return the old leaves if `skip`, else the new ones, in fresh memory, or in that of the
        old ones if `overwrite`.
        """
        return select.masked(skip, old, new, in_place=overwrite)

    @classmethod
    def update(
        cls, optimizer: Updater, inputs: StepInputs, decision: Decision, memory: Memory
    ) -> tuple[Tree, Tree]:
        """Return parameters and state after the decided step, in the trees of the arguments."""
        if torch.compiler.is_compiling():  # which fuses; writing into gradients would only add work
            inputs = inputs._replace(grads=inputs.grads._replace(owned=False))
        prepared = _prepared(optimizer, inputs, decision, in_place=memory.optimizer)
        stepped = cls._step(optimizer, inputs, decision, prepared, in_place=memory.optimizer)
        return inputs.restore(*stepped)

    @classmethod
    def _step(
        cls,
        optimizer: Updater,
        inputs: StepInputs,
        decision: Decision,
        prepared: Any,
        *,
        in_place: bool,
    ) -> tuple[Tree, Tree]:
        """Make the step: of a partition part by part, of a model under a wrapper piece by piece,
        which bounds the memory for wide copies.
        """
        if isinstance(optimizer, PartitionOptimizer):
            results = {}
            for part, ready in prepared:
                step = part.optimizer, part.inputs, decision, ready
                results[part.key] = part.inputs.restore(*cls._step(*step, in_place=in_place))
            return optimizer.join(inputs, results)
        if isinstance(optimizer, TorchOptimizer) and optimizer.fuses(inputs):
            return optimizer.masked(inputs, decision, in_place=in_place, prepared=prepared)
        if isinstance(optimizer, Wrapper) and optimizer.can_be_cut(inputs):
            with torch.no_grad():
                inputs = off_graph(inputs, copy=not in_place)
                for piece in optimizer.pieces(inputs):
                    cls._step_and_choose(optimizer, piece, decision, prepared, in_place=True)
            return inputs.params_tree(inputs.params), inputs.opt_state
        return cls._step_and_choose(optimizer, inputs, decision, prepared, in_place=in_place)

    @staticmethod
    def _step_and_choose(
        optimizer: Updater, inputs: StepInputs, decision: Decision, prepared: Any, *, in_place: bool
    ) -> tuple[Tree, Tree]:
        """Return the old parameters and state if the step is skipped, else those of the applied
        step.
        """
        old = inputs.params_tree(inputs.params), inputs.opt_state
        new = prepared
        if not optimizer.calls_step:
            if optimizer.differentiable or under_transform():
                # `where` sends a derivative of 0 into what it does not choose: 0 * inf is NaN.
                inputs = inputs._replace(grads=inputs.grads.zeroed(decision.skip))  # type: ignore[arg-type]
            own = unscaled(inputs, decision, wide=optimizer.wide_grads)
            new = optimizer.applied(own, prepared=prepared)
        if optimizer.may_add_slots:
            return unchanged(old, overwrite=in_place) if bool(decision.skip) else new
        keeps_graph = optimizer.differentiable or traced()
        with torch.set_grad_enabled(torch.is_grad_enabled() and keeps_graph):
            leaves, others, structure = _tree.matching_leaves(old, new, "old", "new")
            chosen = Masked.choose(decision.skip, leaves, others, overwrite=in_place)
            return structure.unflatten(chosen)


def unchanged(old: tuple[Tree, Tree], *, overwrite: bool) -> tuple[Tree, Tree]:
    """Return the old parameters and state, copied unless `overwrite`."""
    return _tree.map(_off_graph, old) if overwrite else _tree.clone(old)


def _off_graph(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) and leaf.requires_grad else leaf


def _prepared(optimizer: Updater, inputs: StepInputs, decision: Decision, *, in_place: bool) -> Any:
    """Run the user's code for an applied step, which may raise, before anything is overwritten."""
    if isinstance(optimizer, PartitionOptimizer):
        return [
            (part, _prepared(part.optimizer, part.inputs, decision, in_place=in_place))
            for part in optimizer.split(inputs)
        ]
    if optimizer.calls_step:
        return optimizer.applied(unscaled(inputs, decision, wide=optimizer.wide_grads))
    return optimizer.prepare(inputs, in_place=in_place)


def is_unbounded(clip: Clip) -> bool:
    """Return True if the norm is only measured."""
    return not isinstance(clip.max_norm, Tensor) and clip.max_norm == math.inf


def _reported(measured: Tensor | None, failed: Tensor) -> Any:
    """Return the norm or amax that a step reports: inf or NaN if the step failed, also for a
    dropped microbatch or another rank.
    """
    return () if measured is None else torch.where(failed, measured.clamp(min=math.inf), measured)
