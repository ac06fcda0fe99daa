"""flax's DynamicScale: growth one step later, and a ceiling that is not a power of two."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._loss_scale.rules import ScalerState
from .._tree.scalars import increment
from ._common import COUNT, SCALE, Device, Format, ScaleAndCount

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
        TypeError, ValueError: A setting is not a number, or out of range.

    Example:
        >>> from purescale.simulate import simulate
        >>> simulate(rule(scale=8.0, growth_interval=1), [False] * 2).scale
        tensor([ 8.,  8., 16.])

    Source of the rule: flax/training/dynamic_scale.py.
    """

    first_scale = "scale"
    first_count = "fin_steps"

    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    fin_steps: int = 0
    scale: float = 65536.0
    minimum_scale: float | None = _FLOAT32.tiny

    def __post_init__(self) -> None:
        self._check_positive("scale")
        if self.minimum_scale is not None:
            self._check_positive("minimum_scale")
        self._check_counts("fin_steps", least=0)
        self._check_factors("growth_factor", "backoff_factor")
        self._check_counts("growth_interval")

    @property
    def min_scale(self) -> float | None:
        """The floor under the name that `check_scaler` reads."""
        return self.minimum_scale

    def _next(self, scale: Tensor, count: Tensor, bad: Tensor) -> tuple[Tensor, Tensor]:
        grows = count == self.growth_interval
        grown = (scale * self.growth_factor).clamp(max=_FLOAT32.max)
        lowered = scale * self.backoff_factor
        if self.minimum_scale is not None:
            lowered = lowered.clamp(min=self.minimum_scale)
        return (
            torch.where(bad, lowered, torch.where(grows, grown, scale)),
            torch.where(bad | grows, 0, increment(count, True)),
        )


rule = FlaxScale
_FORMAT = Format("flax", FlaxScale, {"fin_steps": COUNT, "scale": SCALE})


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
        ValueError: `d` is not such a dict, its scale cannot train, or a setting contradicts it.

    Example:
        >>> from_state_dict({"fin_steps": 7, "scale": 1024.0}, growth_interval=100)[1].scale
        tensor(1024.)

    Source of the format: the leaves of flax.training.dynamic_scale.DynamicScale.
    """
    _FORMAT.check(d)
    return _FORMAT.read(d, settings, device)


def to_state_dict(rule: FlaxScale, scaler: ScalerState) -> dict[str, Any]:
    """Syncs with the host. Equal to `flax.serialization.to_state_dict(dynamic_scale)`, for
    flax.serialization.from_state_dict.

    Args:
        rule, scaler: A `FlaxScale` and its state.

    Returns:
        The state dict.

    Raises:
        TypeError, ValueError: `rule` is another library's, or the state is stacked.

    Example:
        >>> to_state_dict(rule(), rule().init())
        {'fin_steps': 0, 'scale': 65536.0}
    """
    return _FORMAT.write(rule, scaler)
