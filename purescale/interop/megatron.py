"""Megatron-LM's DynamicGradScaler: hysteresis that growth alone refills; its state dict holds no
setting.
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

    What `DynamicScale` does otherwise, and this does as Megatron does: overflows beyond the
    tolerance go on being counted below 0; there is no ceiling, so the scale can become inf and
    stays so (no step is taken then, `check_scaler` raises); the count is compared with `==`, so
    that an interval below it stops growth until the next overflow.

    `initial_scale >= min_scale`, `growth_factor > 1`, `0 < backoff_factor < 1`: positive float32.
    `growth_interval`, `hysteresis`: steps. Megatron-LM itself has no defaults here; these are those
    of its OptimizerConfig.

    Raises `ValueError` and `TypeError` for other settings when made.

    >>> import torch
    >>> scaler = rule(initial_scale=16.0, hysteresis=2)
    >>> state = scaler.init()
    >>> for overflow in [True, False, True]:
    ...     state = scaler.update(state, torch.tensor(overflow))
    ...     print(state.scale.item())
    16.0
    16.0
    8.0

    Source of the rule: megatron/core/optimizer/grad_scaler.py, where the docstring says "in a row"
    and the code does not.
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
        """The state to start from, on `device` (that of the gradients)."""
        return scaler_state(self.initial_scale, hysteresis_tracker=self.hysteresis, device=device)

    @without_amax
    def update(self, scaler: ScalerState, found_inf: Tensor) -> ScalerState:
        """The state for the next step. `found_inf`: 0-d bool, True = the step was bad. Reads no
        value; raises only for another rule's state.
        """
        bad = flag(found_inf, scaler, ScalerState)
        clean_steps = scaler.growth_tracker + 1
        interval_reached = ~bad & (clean_steps == self.growth_interval)
        # Megatron's count is a Python int; here it must not wrap around to a tolerance without end.
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

    `d`: what `DynamicGradScaler.state_dict()` returned, its scale a float32 tensor of one element,
    which is read. It holds no setting: pass those of the job under `rule()`'s names;
    `initial_scale` may be left out. `device`: that of the gradients.

    Raises `ValueError` for another library's dict, the `{}` of a ConstantGradScaler and a scale
    that cannot train; `TypeError` for a scale that is no tensor and a count that is no number.

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
            "scale in Megatron-LM's state dict is a float32 tensor of one element, got "
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
    """Syncs with the host. Equal to what `DynamicGradScaler.state_dict()` returns at this point;
    `load_state_dict` takes it.

    The scale has shape [1] there, and is a copy on the device of the state.

    Raises `TypeError` for another library's rule, `ValueError` for stacked states.

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
