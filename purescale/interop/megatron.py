"""Megatron-LM's DynamicGradScaler: hysteresis that only growth refills, and a state dict without
settings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._loss_scale.rules import ScalerState, scaler_state
from .._tree.scalars import checked_positive, checked_real, increment
from ._common import SCALE, Device, Entry, Format, PeerRule


@dataclasses.dataclass(frozen=True)
class MegatronScale(PeerRule[ScalerState]):
    """Equal to `DynamicGradScaler.update(found_inf)`, bit for bit with any setting.

    It follows Megatron where `DynamicScale` does not:

    - Overflows beyond the tolerance are counted below 0.
    - The scale has no ceiling. It can become inf and then stays inf: no step is taken, and
      `check_scaler` raises.
    - The count is compared with `==`. If it is already above `growth_interval`, the scale does not
      grow until the next overflow.

    The defaults are those of Megatron-LM's OptimizerConfig.

    Args:
        initial_scale: The first scale, at least `min_scale`.
        min_scale: The floor, a positive float32.
        growth_factor: The factor of a growth, above 1.
        backoff_factor: The factor of a backoff, above 0 and below 1.
        growth_interval: The number of clean steps before a growth.
        hysteresis: The first overflow after the start or a growth that backs off, counted from 1.

    Raises:
        TypeError, ValueError: A setting is not a number, or out of range.

    Example:
        >>> from purescale.simulate import simulate
        >>> simulate(rule(initial_scale=16.0, hysteresis=2), [True, False, True]).scale
        tensor([16., 16., 16.,  8.])

    Source of the rule: megatron/core/optimizer/grad_scaler.py; its docstring says "in a row", but
    its code does not require that.
    """

    state_kind = ScalerState
    first_scale = "initial_scale"

    initial_scale: float = 2.0**32
    min_scale: float = 1.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2

    def __post_init__(self) -> None:
        self._check_positive("initial_scale", "min_scale")
        self._check_factors("growth_factor", "backoff_factor")
        self._check_counts("growth_interval", "hysteresis")
        if self.min_scale > self.initial_scale:
            raise ValueError(
                f"min_scale <= initial_scale must hold, got {self.min_scale!r} and "
                f"{self.initial_scale!r}. Fix: initial_scale={self.min_scale!r} or above."
            )

    def init(self, device: Device = None) -> ScalerState:
        """Return the initial state, on `device` (that of the gradients)."""
        return scaler_state(self.initial_scale, hysteresis_tracker=self.hysteresis, device=device)

    def _transition(self, state: ScalerState, bad: Tensor) -> dict[str, Tensor]:
        clean_steps = increment(state.growth_tracker, True)
        interval_reached = ~bad & (clean_steps == self.growth_interval)
        # Megatron's count is a Python int. An int32 must not wrap around to a positive tolerance.
        tolerance = state.hysteresis_tracker
        tolerance = torch.where(bad, tolerance.clamp(min=1 - 2**31) - 1, tolerance)

        scale = torch.where(interval_reached, state.scale * self.growth_factor, state.scale)
        lowered = (state.scale * self.backoff_factor).clamp(min=self.min_scale)
        return {
            "scale": torch.where(bad & (tolerance <= 0), lowered, scale),
            "growth_tracker": torch.where(bad | interval_reached, 0, clean_steps),
            "hysteresis_tracker": torch.where(interval_reached, self.hysteresis, tolerance),
        }


rule = MegatronScale
_FORMAT = Format(
    "megatron",
    MegatronScale,
    {
        "scale": SCALE,
        "growth_tracker": Entry("growth_tracker"),
        "hysteresis_tracker": Entry("hysteresis_tracker", least=-(2**31)),
    },
)


def from_state_dict(
    d: Mapping[str, Any], *, device: Device = None, **settings: Any
) -> tuple[MegatronScale, ScalerState]:
    """Syncs with the host. Equal to
    `rule(**settings), state of d["scale"], d["growth_tracker"], d["hysteresis_tracker"]`.

    Args:
        d: What `DynamicGradScaler.state_dict()` returned. Its scale is a tensor of one element,
            which is read, or a number; it does not hold settings.
        device: The device of the gradients.
        settings: The job's settings of `rule`; `initial_scale` may be left out.

    Returns:
        The rule and its state.

    Raises:
        TypeError: A value is not a number.
        ValueError: `d` is not such a dict, or the `{}` of a ConstantGradScaler; its scale cannot
            train.

    Example:
        >>> d = {"scale": torch.tensor([256.0]), "growth_tracker": 3, "hysteresis_tracker": 1}
        >>> from_state_dict(d, growth_interval=500)[1].scale
        tensor(256.)

    Source of the format: megatron.core.optimizer.grad_scaler.DynamicGradScaler.state_dict.
    """
    _FORMAT.check(d)
    saved = d["scale"]
    is_one = isinstance(saved, Tensor) and saved.numel() == 1
    scale = checked_positive("scale", saved.item() if is_one else saved)
    floor = checked_real("min_scale", settings.get("min_scale", rule.min_scale))
    return _FORMAT.read({**d, "scale": scale}, settings, device, initial_scale=max(scale, floor))


def to_state_dict(rule: MegatronScale, scaler: ScalerState) -> dict[str, Any]:
    """Syncs with the host. Equal to what `DynamicGradScaler.state_dict()` returns at this point,
    for its `load_state_dict`.

    Args:
        rule, scaler: A `MegatronScale` and its state.

    Returns:
        The state dict. Its scale is a copy of shape [1] on the device of the state.

    Raises:
        TypeError, ValueError: `rule` is another library's, or the state is stacked.

    Example:
        >>> to_state_dict(rule(), rule().init())
        {'scale': tensor([4.2950e+09]), 'growth_tracker': 0, 'hysteresis_tracker': 2}
    """
    d = _FORMAT.write(rule, scaler)
    return {**d, "scale": scaler.scale.detach().clone().reshape(1)}
