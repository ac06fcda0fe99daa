"""Megatron-LM's DynamicGradScaler: hysteresis that only growth refills, and a state dict without
settings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._loss_scale.rule_protocol import flag, without_amax
from .._loss_scale.rules import ScalerState, check_factors, scaler_state
from .._tree.scalars import real, whole
from ._common import (
    Device,
    check_dict,
    check_saveable,
    next_skips,
    saved_scale,
    settle,
    settle_counts,
)

_KEYS = ("scale", "growth_tracker", "hysteresis_tracker")


@dataclasses.dataclass(frozen=True)
class MegatronScale:
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
        TypeError: A setting is not a number.
        ValueError: A setting is out of range.

    Example:
        >>> import torch
        >>> scaler = rule(initial_scale=16.0, hysteresis=2)
        >>> state = scaler.init()
        >>> for overflow in [True, False, True]:
        ...     state = scaler.update(state, torch.tensor(overflow))
        ...     print(state.scale.item())
        16.0
        16.0
        8.0

    Source of the rule: megatron/core/optimizer/grad_scaler.py; its docstring says "in a row", but
    its code does not require that.
    """

    initial_scale: float = 2.0**32
    min_scale: float = 1.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2

    def __post_init__(self) -> None:
        settle(self, "initial_scale", "min_scale", "growth_factor", "backoff_factor")
        check_factors(self, "growth_factor", "backoff_factor")
        settle_counts(self, "growth_interval", "hysteresis")
        if self.min_scale > self.initial_scale:
            raise ValueError(
                f"min_scale <= initial_scale must hold, got {self.min_scale!r} and "
                f"{self.initial_scale!r}. Fix: initial_scale={self.min_scale!r} or above."
            )

    def init(self, device: Device = None) -> ScalerState:
        """Return the initial state, on `device` (that of the gradients)."""
        return scaler_state(self.initial_scale, hysteresis_tracker=self.hysteresis, device=device)

    @without_amax
    def update(self, scaler: ScalerState, found_inf: Tensor) -> ScalerState:
        """Return the state for the next step. `found_inf`: 0-d bool, True if the step was bad.
        Reads no value; raises only for another rule's state.
        """
        bad = flag(found_inf, scaler, ScalerState)
        clean_steps = scaler.growth_tracker + 1
        interval_reached = ~bad & (clean_steps == self.growth_interval)
        # Megatron's count is a Python int. An int32 must not wrap around to a positive tolerance.
        tolerance = torch.where(
            bad, scaler.hysteresis_tracker.clamp(min=1 - 2**31) - 1, scaler.hysteresis_tracker
        )

        scale = torch.where(interval_reached, scaler.scale * self.growth_factor, scaler.scale)
        lowered = (scaler.scale * self.backoff_factor).clamp(min=self.min_scale)
        return ScalerState(
            scale=torch.where(bad & (tolerance <= 0), lowered, scale),
            growth_tracker=torch.where(bad | interval_reached, 0, clean_steps),
            hysteresis_tracker=torch.where(interval_reached, self.hysteresis, tolerance),
            consecutive_skips=next_skips(scaler.consecutive_skips, bad),
        )


rule = MegatronScale


def from_state_dict(
    d: Mapping[str, Any], *, device: Device = None, **settings: Any
) -> tuple[MegatronScale, ScalerState]:
    """Syncs with the host. Equal to
    `rule(**settings), state of d["scale"], d["growth_tracker"], d["hysteresis_tracker"]`.

    Args:
        d: What `DynamicGradScaler.state_dict()` returned. Its scale is a tensor of one element,
            which is read; it does not hold settings.
        device: The device of the gradients.
        settings: The job's settings of `rule`; `initial_scale` may be left out.

    Returns:
        The rule and its state.

    Raises:
        TypeError: The scale is not a tensor, or a count is not a number.
        ValueError: `d` is another library's dict or the `{}` of a ConstantGradScaler, or its scale
            cannot train.

    Example:
        >>> d = {"scale": torch.tensor([256.0]), "growth_tracker": 3, "hysteresis_tracker": 1}
        >>> from_state_dict(d, growth_interval=500)[1].scale
        tensor(256.)

    Source of the format: megatron.core.optimizer.grad_scaler.DynamicGradScaler.state_dict.
    """
    check_dict(d, "megatron", _KEYS)
    saved = d["scale"]
    if not isinstance(saved, Tensor) or saved.numel() != 1 or not saved.is_floating_point():
        got = (
            f"of shape {tuple(saved.shape)}, {saved.dtype}"
            if isinstance(saved, Tensor)
            else repr(saved)
        )
        raise TypeError(
            "scale in Megatron-LM's state dict must be a float32 tensor of one element, got "
            f"{type(saved).__name__} {got}. Likely cause: a dict that was converted, or another "
            "library's. Fix: `d['scale'] = torch.tensor([65536.0])`, with the scale of the job."
        )
    scale = saved_scale("scale", saved.item())
    if "initial_scale" not in settings:
        settings["initial_scale"] = max(
            scale, real("min_scale", settings.get("min_scale", rule.min_scale))
        )
    counts = (
        whole("growth_tracker", d["growth_tracker"]),
        whole("hysteresis_tracker", d["hysteresis_tracker"], least=-(2**31)),
    )
    return rule(**settings), scaler_state(scale, *counts, device=device)


def to_state_dict(rule: MegatronScale, scaler: ScalerState) -> dict[str, Any]:
    """Syncs with the host. Equal to what `DynamicGradScaler.state_dict()` returns at this point,
    for its `load_state_dict`.

    Args:
        rule: A `MegatronScale`.
        scaler: Its state.

    Returns:
        The state dict. Its scale is a copy of shape [1] on the device of the state.

    Raises:
        TypeError: `rule` is another library's.
        ValueError: The state is stacked.

    Example:
        >>> to_state_dict(rule(), rule().init())
        {'scale': tensor([4.2950e+09]), 'growth_tracker': 0, 'hysteresis_tracker': 2}

    Source of the format: megatron.core.optimizer.grad_scaler.DynamicGradScaler.state_dict.
    """
    check_saveable("megatron", rule, (MegatronScale,), scaler, ScalerState)
    return {
        "scale": scaler.scale.detach().clone().reshape(1),
        "growth_tracker": int(scaler.growth_tracker),
        "hysteresis_tracker": int(scaler.hysteresis_tracker),
    }
