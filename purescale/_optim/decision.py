"""The decision of a step: skip, or unscale and clip."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .._optim.step_inputs import StepInputs
from .._torch.metadata import Metadata
from .._tree.gradients import Gradients


class Decision(NamedTuple):
    """The decision about parameters, optimizer state and gradients in this step."""

    skip: Tensor | bool  # bool []: True keeps everything; a bool if the host knows it
    # Gradients are divided by `scale`, then multiplied by `factor`, then clamped to plus and minus
    # `clip_value`; None leaves a part out.
    scale: Tensor | None = None
    factor: Tensor | None = None
    clip_value: float | Tensor | None = None
    # `scale / factor`, for a kernel that divides once. If it is out of float32's range, it is
    # `scale`, and gradients are multiplied by `prefactor` first. None applies both separately.
    divisor: Tensor | None = None
    prefactor: Tensor | None = None  # multiplied before that division; None for 1


APPLY = Decision(skip=False)


def unscaled(inputs: StepInputs, decision: Decision, *, wide: bool) -> StepInputs:
    """Return the inputs with the gradients for the update, unscaled and clipped. float16 becomes
    float32, and all half gradients if `wide`: in half precision they would lose bits.
    """
    grads = inputs.grads.widened() if wide else inputs.grads
    return inputs._replace(grads=_unscaled_and_clipped(grads, decision))


def unscale_and_clip(
    grads: list[Tensor], decision: Decision, *, in_place: bool = False
) -> list[Tensor]:
    """Return the gradients for the update, unscaled and clipped, with float16 in float32.
    `in_place` allows overwriting `grads`.
    """
    gradients = Gradients(Metadata(grads), grads, dense_real=True, owned=in_place)
    return _unscaled_and_clipped(gradients, decision).tensors


def _unscaled_and_clipped(grads: Gradients, decision: Decision) -> Gradients:
    if decision.scale is not None:
        grads = grads.divided(decision.scale)
    if decision.factor is not None:
        grads = grads.multiplied(decision.factor)
    if decision.clip_value is not None:
        grads = grads.clamped(decision.clip_value)
    return grads
