"""MMEngine's AmpOptimWrapper and ApexOptimWrapper: their scalers and state dict entries."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from . import apex, torch_amp
from ._common import Device, ScaleAndCount, check_dict


@dataclasses.dataclass(frozen=True)
class FixedAmpScale(ScaleAndCount):
    """Equal to `GradScaler.update(new_scale=loss_scale)`: steps that overflow are skipped, and the
    scale is `loss_scale` after each step.

    As in AmpOptimWrapper, a restored state with another scale uses it for one step. The count is
    kept and not used.

    Args:
        loss_scale: The scale, a positive float32.

    Example:
        >>> FixedAmpScale(512.0).init().scale
        tensor(512.)

    Source of the rule: AmpOptimWrapper.step, with a float as `loss_scale`.
    """

    first_scale = "loss_scale"

    loss_scale: float

    def __post_init__(self) -> None:
        self._check_positive("loss_scale")

    def _next(self, scale: Tensor, count: Tensor, bad: Tensor) -> tuple[Tensor, Tensor]:
        return torch.full_like(scale, self.loss_scale), count.clone()


def rule(
    loss_scale: float | str | Mapping[str, Any] = "dynamic",
) -> torch_amp.TorchAmpScale | FixedAmpScale:
    """Equal to the scaler of `AmpOptimWrapper(loss_scale=loss_scale)`.

    For ApexOptimWrapper see `interop.apex.initialize`, which takes its arguments of precision.

    Args:
        loss_scale: "dynamic", a float, or a dict of GradScaler's arguments.

    Returns:
        A `FixedAmpScale` for a float, else a `TorchAmpScale`.

    Raises:
        TypeError: As `interop.torch_amp.rule`.
        ValueError: Another string, or as `interop.torch_amp.rule`.

    Example:
        >>> rule({"init_scale": 512.0, "growth_interval": 100})
        TorchAmpScale(init_scale=512.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=100)

    Source of the rule: mmengine/optim/optimizer/amp_optimizer_wrapper.py.
    """
    if isinstance(loss_scale, Mapping):
        return torch_amp.rule(**loss_scale)
    if isinstance(loss_scale, str):
        if loss_scale != "dynamic":
            raise ValueError(
                "loss_scale must be 'dynamic', a float, or a dict of GradScaler's arguments, got "
                f"{loss_scale!r}. Fix: loss_scale='dynamic'."
            )
        return torch_amp.rule()
    return FixedAmpScale(loss_scale)


def from_state_dict(
    d: Mapping[str, Any], *, device: Device = None, **settings: Any
) -> tuple[Any, Any]:
    """Equal to `torch_amp.from_state_dict(d["loss_scaler"])`, or to
    `apex.from_state_dict(d["apex_amp"], **settings)`.

    For the optimizer's part of the state dict see `Optimizer.from_state_dict`.

    Args:
        d: The state dict of an AmpOptimWrapper or an ApexOptimWrapper.
        device: The device of the gradients.
        settings: For AmpOptimWrapper `loss_scale`, required if it was a float, as `d` does not hold
            that. For ApexOptimWrapper the settings of `interop.apex.rule`.

    Returns:
        The rule and its state.

    Raises:
        TypeError: A value is not a number.
        ValueError: `d` is another library's dict, that of an OptimWrapper without a scaler, or the
            `{}` of a disabled one; its scale cannot train, or a setting contradicts it.

    Example:
        >>> scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        >>> d = {"state": {}, "param_groups": [], "loss_scaler": scaler.state_dict()}
        >>> from_state_dict(d)[1].scale
        tensor(8.)

    Source of the format: state_dict of mmengine's amp_optimizer_wrapper.py and
    apex_optimizer_wrapper.py.
    """
    if isinstance(d, Mapping) and "apex_amp" in d:
        return apex.from_state_dict(d["apex_amp"], device=device, **settings)
    check_dict(d, "mmengine", ("loss_scaler",), None)
    scaler_dict = d["loss_scaler"]
    loss_scale = settings.pop("loss_scale", "dynamic")
    if isinstance(loss_scale, Mapping) or loss_scale == "dynamic":
        scaler_settings = dict(loss_scale) if isinstance(loss_scale, Mapping) else {}
        return torch_amp.from_state_dict(scaler_dict, device=device, **scaler_settings, **settings)
    return rule(loss_scale, **settings), torch_amp.from_state_dict(scaler_dict, device=device)[1]


def to_state_dict(rule: Any, scaler: Any) -> dict[str, Any]:
    """Syncs with the host. Equal to the scaler's part of the wrapper's state dict:
    `{"loss_scaler": ...}` or `{"apex_amp": ...}`.

    For the wrapper's `load_state_dict` add the optimizer's part:
    `{**optimizer.to_state_dict(opt_state), **d}`.

    Args:
        rule: A rule of `interop.mmengine`, `interop.torch_amp` or `interop.apex`.
        scaler: Its state.

    Returns:
        The scaler's part of the state dict.

    Raises:
        TypeError: The rule is not one of these wrappers.
        ValueError: The state is stacked.

    Example:
        >>> to_state_dict(rule(512.0), rule(512.0).init())["loss_scaler"]["scale"]
        512.0
    """
    first = rule[0] if isinstance(rule, tuple) and rule else rule  # of several losses
    if isinstance(first, apex.ApexScale):
        return {"apex_amp": apex.to_state_dict(rule, scaler)}
    # A wrapper with a fixed scale has a GradScaler with torch's default settings, unused.
    scaler_rule = torch_amp.rule() if isinstance(rule, FixedAmpScale) else rule
    return {"loss_scaler": torch_amp.to_state_dict(scaler_rule, scaler)}
