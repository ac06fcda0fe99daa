"""A training step as its specification: nothing is read, and `torch.where` decides.

This engine makes every step that is compiled, mapped or differentiated, and all steps on an
accelerator. `on_host.py` is the same after reads, in eager mode on a CPU; a law says that both
agree. Which of the two makes a step is decided once, by `on_host.engine_for`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._grads.clip import Clip, clip_factor
from .._grads.measure import OVERFLOW_ONLY, GradStats, StatsOptions, stats_by_masks
from .._optim.opt_state import after_skip
from .._optim.partition import PartitionOptimizer
from .._optim.protocol import Updater
from .._optim.step_inputs import StepInputs
from .._optim.torch_optim import TorchOptimizer
from .._optim.wrapper import Wrapper, off_graph
from .._step.memory import Memory
from .._torch.dtypes import on_device
from .._torch.foreach import weighted_sum
from .._torch.tracing import traced, under_derivative
from .._tree import select
from .._tree import tree as _tree
from .._tree.gradients import Gradients
from .._tree.tree import Leaves, Tree, negated


class WindowFlags(NamedTuple):
    """The overflows of a window, on this rank or on all of a group: 0-d tensors, or Python's if the
    host has read them.
    """

    overflow: Tensor | bool  # a microbatch with a weight overflowed; the scale follows it
    skip: Tensor | bool  # for an overflow, or because no weight is left
    # fewer may overflow at a lower scale, because the loss of what overflowed is finite
    retryable: Tensor | bool
    num_overflowed: Tensor | int  # a flag if only the mean was measured


class Decision(NamedTuple):
    """The decision about a step, and what the step reports. `skip` and `rejected` are bool [], or
    bools if the host has read them.
    """

    skip: Tensor | bool
    rejected: Tensor | bool | None  # a guard alone skips the step; None without a guard
    grads: Gradients  # with the factor and the bound by which they are still to be clipped
    # before clipping; not finite if the step is skipped, unless rejected; () without max_norm
    grad_norm: Any
    grad_amax: Any  # likewise; () if not asked for


class Masked:
    """The engine that reads nothing, but for a class of a user's whose first step may add to its
    state.
    """

    # A step that the host does not see may be captured in a CUDA graph, which needs all numbers of
    # a state at fixed addresses.
    may_be_captured = True

    @staticmethod
    def read(flags: Tensor) -> Any:
        """Return flags or numbers as they are; `OnHost` returns Python's."""
        return flags

    @staticmethod
    def measure(
        grads: Gradients, scale: Tensor, options: StatsOptions = OVERFLOW_ONLY
    ) -> GradStats:
        """Measure gradients: whether one is not finite, their norm, the largest magnitude."""
        return stats_by_masks(grads, scale, options)

    @classmethod
    def decide(
        cls,
        stats: GradStats,
        clip: Clip,
        grads: Gradients,
        flags: WindowFlags | None = None,
        rejects: Tensor | None = None,
    ) -> Decision:
        """Decide whether to skip the step, and how to clip the gradients.

        A step is skipped if its gradients overflow, if `flags` say so (for its weights, a
        microbatch or another rank), if a bound is 0, negative or NaN, or if a guard `rejects` it.
        """
        skip = stats.overflow if flags is None else flags.skip
        for bound in clip.tensor_bounds:
            bound = on_device(bound, skip.device) if isinstance(skip, Tensor) else bound
            skip = skip | negated(cls.read(bound > 0))
        norm: Any = ()
        if stats.norm is not None:
            norm = cls._reported(stats.norm, skip, grads.factor_dtype)
        amax = () if stats.amax is None else cls._reported(stats.amax, skip, torch.float32)
        rejected = None
        if rejects is not None:
            rejected = cls.read(rejects) & negated(skip)
            skip = skip | rejected
        factor = None
        if stats.norm is not None and not _is_unbounded(clip):
            factor = cls._clip_factor(stats.norm, clip, skip)
        if factor is not None or clip.value is not None:
            grads = grads._replace(factor=factor, clip_value=clip.value)
        return Decision(skip, rejected, grads, norm, amax)

    @staticmethod
    def _clip_factor(norm: Any, clip: Clip, skip: Any) -> Any:
        # In the derivative of a step that is skipped, 0 * NaN would be NaN.
        return clip_factor(torch.where(skip, 1.0, norm), clip.max_norm)  # type: ignore[arg-type]

    @staticmethod
    def _reported(measured: Any, skip: Any, dtype: torch.dtype) -> Any:
        """Return the norm or amax that a step reports: inf or NaN if the step is skipped, also for
        a dropped microbatch or another rank.
        """
        number = measured.to(dtype)
        return torch.where(skip, number.clamp(min=math.inf), number)

    @staticmethod
    def add(
        sums: list[Tensor],
        new: list[Tensor],
        share: float | Tensor,
        counts: bool | Tensor,
        *,
        owned: bool,
    ) -> list[Tensor]:
        """Return `sums + new * share` if it `counts`, else `sums`. `owned` allows overwriting."""
        return weighted_sum(sums, new, share, counts, owned=owned)

    @staticmethod
    def choose(skip: Tensor | bool, old: Leaves, new: Leaves, *, overwrite: bool = False) -> Leaves:
        """Return the old leaves if `skip`, else the new ones, in fresh memory, or in that of the
        old ones if `overwrite`.
        """
        return select.masked(skip, old, new, in_place=overwrite)

    @classmethod
    def update(
        cls, optimizer: Updater, inputs: StepInputs, skip: Tensor | bool, memory: Memory
    ) -> tuple[Tree, Tree]:
        """Return the old parameters and state if `skip`, else those after the step, in the trees of
        the arguments.
        """
        if torch.compiler.is_compiling():  # which fuses; writing into gradients would only add work
            inputs = inputs._replace(grads=inputs.grads._replace(owned=False))
        prepared = _prepared(optimizer, inputs, in_place=memory.optimizer)
        stepped = cls._step(optimizer, inputs, skip, prepared, in_place=memory.optimizer)
        return inputs.restore(*stepped)

    @classmethod
    def _step(
        cls,
        optimizer: Updater,
        inputs: StepInputs,
        skip: Tensor | bool,
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
                step = part.optimizer, part.inputs, skip, ready
                results[part.key] = part.inputs.restore(*cls._step(*step, in_place=in_place))
            return optimizer.join(inputs, results)
        if isinstance(optimizer, TorchOptimizer) and optimizer.fuses(inputs):
            return optimizer.masked(inputs, skip, in_place=in_place, prepared=prepared)
        if isinstance(optimizer, Wrapper) and optimizer.can_be_cut(inputs):
            with torch.no_grad():
                inputs = off_graph(inputs, copy=not in_place)
                for piece in optimizer.pieces(inputs):
                    cls._step_and_choose(optimizer, piece, skip, prepared, in_place=True)
            return inputs.params_tree(inputs.params), inputs.opt_state
        return cls._step_and_choose(optimizer, inputs, skip, prepared, in_place=in_place)

    @staticmethod
    def _step_and_choose(
        optimizer: Updater, inputs: StepInputs, skip: Any, prepared: Any, *, in_place: bool
    ) -> tuple[Tree, Tree]:
        """Return the old parameters and state if the step is skipped, else those of the applied
        step.
        """
        new = prepared
        if not optimizer.calls_step:
            if optimizer.differentiable or under_derivative():
                # `where` sends a derivative of 0 into what it does not choose: 0 * inf is NaN.
                inputs = inputs._replace(grads=inputs.grads.zeroed(skip))
            own = inputs.unscaled(wide=optimizer.wide_grads)
            new = optimizer.applied(own, prepared=prepared)
        if optimizer.may_add_slots:
            return skipped(inputs, overwrite=in_place) if bool(skip) else new
        old = inputs.params_tree(inputs.params), after_skip(inputs.opt_state, in_place=in_place)
        keeps_graph = optimizer.differentiable or traced()
        with torch.set_grad_enabled(torch.is_grad_enabled() and keeps_graph):
            leaves, others, structure = _tree.matching_leaves(old, new, "old", "new")
            chosen = Masked.choose(skip, leaves, others, overwrite=in_place)
            return structure.unflatten(chosen)


def skipped(inputs: StepInputs, *, overwrite: bool) -> tuple[Tree, Tree]:
    """Return the parameters and the state after a skipped step, copied unless `overwrite`."""
    old = inputs.params_tree(inputs.params), after_skip(inputs.opt_state, in_place=overwrite)
    return _tree.map(_off_graph, old) if overwrite else _tree.clone(old)


def _off_graph(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) and leaf.requires_grad else leaf


def _prepared(optimizer: Updater, inputs: StepInputs, *, in_place: bool) -> Any:
    """Run the user's code for an applied step, which may raise, before anything is overwritten."""
    if isinstance(optimizer, PartitionOptimizer):
        return [
            (part, _prepared(part.optimizer, part.inputs, in_place=in_place))
            for part in optimizer.split(inputs)
        ]
    if optimizer.calls_step:
        return optimizer.applied(inputs.unscaled(wide=optimizer.wide_grads))
    return optimizer.prepare(inputs, in_place=in_place)


def _is_unbounded(clip: Clip) -> bool:
    """Return True if the norm is only measured."""
    return not isinstance(clip.max_norm, Tensor) and clip.max_norm == math.inf
