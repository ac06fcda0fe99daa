"""The decision of a step: skip, or unscale and clip."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .._optim.step_inputs import StepInputs
from .._torch import foreach


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
    grads = inputs.grads
    if wide:
        grads = grads.widened()
    if decision.scale is not None:
        grads = grads.divided(decision.scale)
    if decision.factor is not None:
        grads = grads.multiplied(decision.factor)
    if decision.clip_value is not None:
        grads = grads.clamped(decision.clip_value)
    return inputs._replace(grads=grads)


def unscale_and_clip(
    grads: list[Tensor], decision: Decision, *, in_place: bool = False
) -> list[Tensor]:
    """Return the gradients for the update, unscaled and clipped, with float16 in float32.
    `in_place` allows overwriting `grads`.
    """
    made_here = in_place
    if decision.scale is not None:
        grads = foreach.divide(grads, decision.scale, in_place=in_place)
        made_here = True
    if decision.factor is not None:
        grads = foreach.multiply(grads, decision.factor, in_place=made_here)
        made_here = True
    if decision.clip_value is not None:
        grads = foreach.clamp(grads, decision.clip_value, in_place=made_here)
    return grads
