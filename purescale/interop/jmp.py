"""jmp's DynamicLossScale: growth is refused where it would reach inf, the count wraps around by a
remainder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._loss_scale.rules import ScalerState, check_factors, scaler_state
from .._tree.scalars import whole
from ._common import (
    Device,
    ScaleAndCount,
    check_dict,
    check_saveable,
    saved_scale,
    settle,
    settle_counts,
    with_settings,
)

_STATE = ("loss_scale", "counter")
_SETTINGS = ("period", "factor", "min_loss_scale")


@dataclasses.dataclass(frozen=True)
class JmpScale(ScaleAndCount):
    """Equal to `max(min_loss_scale, loss_scale / factor), 0` when bad, else `loss_scale * factor`
    where `counter == period - 1`.

    Bit for bit with a power of two as `factor`, in float32 from 2**-126 up: jax on CPU rounds
    smaller scales to 0. A growth to inf leaves the scale where it is. The next count is
    `(counter + 1) % period`, so that a period below the count grows again.

    `loss_scale`, `factor > 1`, `min_loss_scale`: positive float32, as numbers or 0-d arrays.
    `period`: steps. `counter`: what `init` starts from. jmp forgets its `min_loss_scale` in every
    pytree round trip, jax.jit among them, and goes on with 1.0: for such a job leave it at 1.0
    here.

    Raises `ValueError` and `TypeError` for other settings when made.

    >>> import torch
    >>> scaler = rule(loss_scale=2.0, min_loss_scale=1.0)
    >>> state = scaler.init()
    >>> for _ in range(2):
    ...     state = scaler.update(state, torch.tensor(True))
    ...     print(state.scale.item())
    1.0
    1.0

    Source of the rule: jmp/_src/loss_scale.py.
    """

    loss_scale: float
    counter: int = 0
    period: int = 2000
    factor: float = 2.0
    min_loss_scale: float = 1.0

    def __post_init__(self) -> None:
        settle(self, "loss_scale", "factor", "min_loss_scale")
        settle_counts(self, "counter", least=0)
        check_factors(self, "factor")
        settle_counts(self, "period")

    @property
    def min_scale(self) -> float:
        """The floor, under the name that `check_scaler` knows."""
        return self.min_loss_scale

    def init(self, device: Device = None) -> ScalerState:
        """The state to start from, on `device` (that of the gradients)."""
        return scaler_state(self.loss_scale, self.counter, device=device)

    def _next(self, scale: Tensor, count: Tensor, bad: Tensor) -> tuple[Tensor, Tensor]:
        grown = scale * self.factor
        grows = (count == self.period - 1) & torch.isfinite(grown)
        lowered = (scale / self.factor).clamp(min=self.min_loss_scale)
        return (
            torch.where(bad, lowered, torch.where(grows, grown, scale)),
            torch.where(bad, 0, (count + 1) % self.period),
        )


rule = JmpScale


def from_state_dict(
    d: Mapping[str, Any], *, device: Device = None, **settings: Any
) -> tuple[JmpScale, ScalerState]:
    """Equal to `rule(d["loss_scale"], **settings), state of d["loss_scale"], d["counter"]`.

    `d`: jmp has no state dict, so take the attributes: `dataclasses.asdict(loss_scale)`, or only
    `loss_scale` and `counter`, its two leaves, with `period`, `factor` and `min_loss_scale` in
    `settings`. Numbers or 0-d arrays. `device`: that of the gradients.

    Raises `ValueError` for another library's dict, an empty one, a scale that cannot train and a
    setting that contradicts `d`; `TypeError` for what is no number.

    >>> from_state_dict({"loss_scale": 1024.0, "counter": 7}, period=100)[1].scale
    tensor(1024.)

    Source of the names: the fields of jmp.DynamicLossScale.
    """
    check_dict(d, "jmp", _STATE, _SETTINGS)
    scale, counter = saved_scale("loss_scale", d["loss_scale"]), whole("counter", d["counter"])
    return rule(**with_settings(d, (*_STATE, *_SETTINGS), settings)), scaler_state(
        scale, counter, device=device
    )


def to_state_dict(rule: JmpScale, scaler: ScalerState) -> dict[str, Any]:
    """Syncs with the host. Equal to `dataclasses.asdict(loss_scale)` at this point, in numbers.

    To go on in jmp, make arrays of those that are arrays there:
    `jmp.DynamicLossScale(jnp.float32(d["loss_scale"]), jnp.int32(d["counter"]),
    d["period"], d["factor"], jnp.float32(d["min_loss_scale"]))`.

    Raises `TypeError` for another library's rule, `ValueError` for stacked states.

    >>> to_state_dict(rule(1024.0), rule(1024.0).init())
    {'loss_scale': 1024.0, 'counter': 0, 'period': 2000, 'factor': 2.0, 'min_loss_scale': 1.0}

    Source of the names: the fields of jmp.DynamicLossScale.
    """
    check_saveable("jmp", rule, (JmpScale,), scaler, ScalerState)
    return {
        "loss_scale": float(scaler.scale),
        "counter": int(scaler.growth_tracker),
        "period": rule.period,
        "factor": rule.factor,
        "min_loss_scale": rule.min_loss_scale,
    }
