"""jmp's DynamicLossScale: no growth to inf, and a count that wraps around."""

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
    if `counter == period - 1`.

    Equal bit for bit from 2**-126 up if `factor` is a power of two; jax on CPU rounds smaller
    scales to 0. A growth to inf is dropped. The next count is `(counter + 1) % period`, so the
    scale still grows if the count is above a new `period`.

    Args:
        loss_scale: The first scale, a positive float32, as a number or a 0-d array.
        counter: The first count.
        period: The number of clean steps before a growth.
        factor: The factor of growth and backoff, above 1.
        min_loss_scale: The floor. jmp resets its own to 1.0 in every pytree round trip, such as
            jax.jit: leave it at 1.0 for such a job.

    Raises:
        TypeError: A setting is not a number.
        ValueError: A setting is out of range.

    Example:
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
        """The floor under the name that `check_scaler` reads."""
        return self.min_loss_scale

    def init(self, device: Device = None) -> ScalerState:
        """Return the initial state, on `device` (that of the gradients)."""
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

    Args:
        d: `dataclasses.asdict(loss_scale)`, as jmp does not have a state dict, or only its two
            leaves `loss_scale` and `counter`. The values are numbers or 0-d arrays.
        device: The device of the gradients.
        settings: Settings of `rule` that `d` does not hold.

    Returns:
        The rule and its state.

    Raises:
        TypeError: A value is not a number.
        ValueError: `d` is another library's dict or empty, its scale cannot train, or a setting
            contradicts it.

    Example:
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

    To continue in jmp, restore the arrays:
    `jmp.DynamicLossScale(jnp.float32(d["loss_scale"]), jnp.int32(d["counter"]),
    d["period"], d["factor"], jnp.float32(d["min_loss_scale"]))`.

    Args:
        rule: A `JmpScale`.
        scaler: Its state.

    Returns:
        The attributes as a dict.

    Raises:
        TypeError: `rule` is another library's.
        ValueError: The state is stacked.

    Example:
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
