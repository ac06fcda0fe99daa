"""What a step does, decided before any part of the state moves; what an optimizer is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from .._torch import foreach


class Decision(NamedTuple):
    """What happens to parameters, optimizer state and gradients in this step."""

    skip: Tensor | None  # bool []: nothing moves; None where it is known that the step is applied
    skip_on_host: bool | None  # the same, where the host can see it
    # Gradients are divided by `scale`, then multiplied by `factor`, then clamped to plus and minus
    # `clip_value`; None leaves a part out.
    scale: Tensor | None = None
    factor: Tensor | None = None
    clip_value: float | Tensor | None = None
    # `scale / factor`, for a kernel that divides once. Where float32 does not hold it, it is
    # `scale`, and gradients are multiplied by `prefactor` before; on the host None: both apart.
    divisor: Tensor | None = None
    prefactor: Tensor | None = None  # what they are multiplied by before that division; None for 1


class Memory(NamedTuple):
    """Whose memory a step may write into."""

    donate: bool = False  # that of parameters and state, where nothing else shares it
    donate_grads: bool = False  # that of gradients, likewise
    may_overwrite_grads: bool = False  # that of gradients: nothing else does, as was proved
    may_overwrite_state: bool = False  # that of parameters and state, likewise
    read_only: Sequence[Tensor] = ()  # what must not be written into


FRESH = Memory()
APPLY = Decision(skip=None, skip_on_host=False)


def unscale_and_clip(
    grads: list[Tensor], decision: Decision, *, in_place: bool = False
) -> list[Tensor]:
    """The gradients that the update is made of, float16 in float32. `in_place`: the memory of
    `grads` may be written into.
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
