"""flax's DynamicScale: growth one step later, and a ceiling that is not a power of two."""

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

_KEYS = ("fin_steps", "scale")
_FLOAT32 = torch.finfo(torch.float32)


@dataclasses.dataclass(frozen=True)
class FlaxScale(ScaleAndCount):
    """Equal to `max(scale * backoff_factor, minimum_scale), 0` when bad, else
    `min(scale * growth_factor, 3.4e38)` in time.

    Equal bit for bit from 2**-126 up if the factors are powers of two; jax on CPU rounds smaller
    scales to 0. It follows flax where `DynamicScale` does not:

    - The count is tested before it is increased, so the scale grows on clean step
      `growth_interval + 1`.
    - The ceiling is the largest float32. It is not a power of two, so later scales are not either.

    Args:
        growth_factor: The factor of a growth, above 1.
        backoff_factor: The factor of a backoff, above 0 and below 1.
        growth_interval: The count of clean steps after which the scale grows.
        fin_steps: The first count.
        scale: The first scale, a positive float32.
        minimum_scale: The floor, or None.

    Raises:
        TypeError: A setting is not a number.
        ValueError: A setting is out of range.

    Example:
        >>> import torch
        >>> scaler = rule(scale=8.0, growth_interval=1)
        >>> state = scaler.init()
        >>> for _ in range(2):
        ...     state = scaler.update(state, torch.tensor(False))
        ...     print(state.scale.item())
        8.0
        16.0

    Source of the rule: flax/training/dynamic_scale.py.
    """

    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    fin_steps: int = 0
    scale: float = 65536.0
    minimum_scale: float | None = _FLOAT32.tiny

    def __post_init__(self) -> None:
        settle(self, "growth_factor", "backoff_factor", "scale")
        if self.minimum_scale is not None:
            settle(self, "minimum_scale")
        settle_counts(self, "fin_steps", least=0)
        check_factors(self, "growth_factor", "backoff_factor")
        settle_counts(self, "growth_interval")

    @property
    def min_scale(self) -> float | None:
        """The floor under the name that `check_scaler` reads."""
        return self.minimum_scale

    def init(self, device: Device = None) -> ScalerState:
        """Return the initial state, on `device` (that of the gradients)."""
        return scaler_state(self.scale, self.fin_steps, device=device)

    def _next(self, scale: Tensor, count: Tensor, bad: Tensor) -> tuple[Tensor, Tensor]:
        grows = count == self.growth_interval
        grown = (scale * self.growth_factor).clamp(max=_FLOAT32.max)
        lowered = scale * self.backoff_factor
        if self.minimum_scale is not None:
            lowered = lowered.clamp(min=self.minimum_scale)
        return (
            torch.where(bad, lowered, torch.where(grows, grown, scale)),
            torch.where(bad | grows, 0, count + 1),
        )


rule = FlaxScale


def from_state_dict(
    d: Mapping[str, Any], *, device: Device = None, **settings: Any
) -> tuple[FlaxScale, ScalerState]:
    """Equal to `rule(**settings), state of d["scale"], d["fin_steps"]`.

    Args:
        d: What `flax.serialization.to_state_dict(dynamic_scale)` returned, numbers or 0-d arrays.
            It does not hold settings.
        device: The device of the gradients.
        settings: The job's settings of `rule`.

    Returns:
        The rule and its state.

    Raises:
        TypeError: A value is not a number.
        ValueError: `d` is another library's dict or empty, its scale cannot train, or a setting
            contradicts it.

    Example:
        >>> from_state_dict({"fin_steps": 7, "scale": 1024.0}, growth_interval=100)[1].scale
        tensor(1024.)

    Source of the format: the leaves of flax.training.dynamic_scale.DynamicScale.
    """
    check_dict(d, "flax", _KEYS)
    scale, fin_steps = saved_scale("scale", d["scale"]), whole("fin_steps", d["fin_steps"])
    return rule(**with_settings(d, _KEYS, settings)), scaler_state(scale, fin_steps, device=device)


def to_state_dict(rule: FlaxScale, scaler: ScalerState) -> dict[str, Any]:
    """Syncs with the host. Equal to `flax.serialization.to_state_dict(dynamic_scale)`, for
    flax.serialization.from_state_dict.

    Args:
        rule: A `FlaxScale`.
        scaler: Its state.

    Returns:
        The state dict.

    Raises:
        TypeError: `rule` is another library's.
        ValueError: The state is stacked.

    Example:
        >>> to_state_dict(rule(), rule().init())
        {'fin_steps': 0, 'scale': 65536.0}

    Source of the format: the leaves of flax.training.dynamic_scale.DynamicScale.
    """
    check_saveable("flax", rule, (FlaxScale,), scaler, ScalerState)
    return {"fin_steps": int(scaler.growth_tracker), "scale": float(scaler.scale)}
