"""The decision of a step: skip, or unscale and clip."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

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

    @property
    def skip_on_host(self) -> bool | None:
        """The skip as a bool; None if the host does not know it."""
        return self.skip if isinstance(self.skip, bool) else None


APPLY = Decision(skip=False)


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
