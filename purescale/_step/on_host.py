"""The engine of a step in eager mode on a CPU, where a read does not wait: `masked.py` with bools
and floats. A skipped step is the old state, and an applied one is torch's own step, in place where
memory allows; nothing is masked.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .._grads.clip import Clip, clip_factor_on_host
from .._grads.measure import OVERFLOW_ONLY, GradStats, StatsOptions, stats_on_host
from .._optim.step_inputs import StepInputs
from .._optim.updater import Updater, skipped_step
from .._step.masked import Masked
from .._step.memory import Memory
from .._torch.private import listops
from .._torch.tensor_list import TensorList
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
    def measure(
        grads: Gradients, scale: Tensor, options: StatsOptions = OVERFLOW_ONLY
    ) -> GradStats:
        return stats_on_host(grads, scale, options)

    @staticmethod
    def _clip_factor(norm: Any, clip: Clip, skip: Any) -> Any:
        if skip:
            return None
        factor = clip_factor_on_host(norm, float(clip.max_norm))  # type: ignore[arg-type]
        return factor if factor < 1 else None

    @staticmethod
    def _reported(measured: Any, skip: Any, dtype: torch.dtype) -> Any:
        number = math.inf if skip and not math.isnan(measured) else measured
        return torch.tensor(number, dtype=dtype, device="cpu")  # `full` would refuse 1e39

    @staticmethod
    def add(
        sums: list[Tensor],
        new: list[Tensor],
        share: float | Tensor,
        counts: bool | Tensor,
        *,
        owned: bool,
    ) -> list[Tensor]:
        if counts:
            listops.add_(sums, new, alpha=share)
        return sums

    @staticmethod
    def select(skip: Tensor | bool, old: Leaves, new: Leaves, *, overwrite: bool = False) -> Leaves:
        return list(old) if skip and overwrite else copies(old if skip else new)

    @classmethod
    def update(
        cls, optimizer: Updater, inputs: StepInputs, skip: Tensor | bool, memory: Memory
    ) -> tuple[Tree, Tree]:
        if not skip:
            return super().update(optimizer, inputs, skip, memory)
        return inputs.restore(*skipped_step(inputs, in_place=memory.optimizer))


def engine_for(optimizer: Updater, tensors: TensorList, numbers: list[Tensor]) -> type[Masked]:
    """Return the engine of a step over these tensors. Derivatives flow through a skipped step and
    an applied one alike, so a step that is to be differentiated is masked.
    """
    on_host = not optimizer.differentiable and host_can_read(numbers) and tensors.are_on_a_cpu
    return OnHost if on_host else Masked
