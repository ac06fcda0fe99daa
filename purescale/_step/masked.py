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
from .._optim.step_inputs import StepInputs
from .._optim.updater import Updater
from .._step.memory import Memory
from .._torch.dtypes import on_device
from .._torch.foreach import weighted_sum
from .._tree.gradients import Gradients
from .._tree.select import select_masked
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
    """The engine that reads nothing, with one exception: the flag of an optimizer that
    `may_add_slots`.
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
        """Return the norm or amax that a step reports: inf or NaN if the step is skipped, also if
        another microbatch, its weight or another rank is the cause.
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
        """Return `sums + new * share` if it `counts`, else `sums`, which may be overwritten if
        `owned`.
        """
        return weighted_sum(sums, new, share, counts, owned=owned)

    @staticmethod
    def select(skip: Tensor | bool, old: Leaves, new: Leaves, *, overwrite: bool = False) -> Leaves:
        """Return the old leaves if `skip`, else the new ones, in fresh memory, or in that of the
        old ones if `overwrite`.
        """
        return select_masked(skip, old, new, in_place=overwrite)

    @classmethod
    def update(
        cls, optimizer: Updater, inputs: StepInputs, skip: Tensor | bool, memory: Memory
    ) -> tuple[Tree, Tree]:
        """Return the old parameters and state if `skip`, else those after the step, in the trees of
        the arguments.
        """
        if torch.compiler.is_compiling():  # which fuses; writing into gradients would only add work
            inputs = inputs._replace(grads=inputs.grads._replace(owned=False))
        in_place, prepared = memory.optimizer, optimizer.prepare(inputs)
        stepped = optimizer.apply_step_unless(skip, inputs, prepared, in_place=in_place)
        return inputs.restore(*stepped)


def _is_unbounded(clip: Clip) -> bool:
    """Return True if the norm is only measured."""
    return not isinstance(clip.max_norm, Tensor) and clip.max_norm == math.inf
