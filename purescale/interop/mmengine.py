"""MMEngine's AmpOptimWrapper and ApexOptimWrapper: the scaler that each holds, and its entry in the
state dict.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._loss_scale.rules import ScalerState, scaler_state
from . import apex, torch_amp
from ._common import Device, ScaleAndCount, check_dict, check_saveable, refuse, settle


@dataclasses.dataclass(frozen=True)
class FixedAmpScale(ScaleAndCount):
    """Equal to `GradScaler.update(new_scale=loss_scale)`: steps that overflow are skipped, the
    scale stays or comes back.

    `loss_scale`: positive float32, a power of two or not. A restored state with another scale is
    used for one step, then replaced, as in AmpOptimWrapper; the count, which is not used, is kept.

    >>> FixedAmpScale(512.0).init().scale
    tensor(512.)

    Source of the rule: AmpOptimWrapper.step, with a float as `loss_scale`.
    """

    loss_scale: float

    def __post_init__(self) -> None:
        settle(self, "loss_scale")

    def init(self, device: Device = None) -> ScalerState:
        """The state to start from, on `device` (that of the gradients)."""
        return scaler_state(self.loss_scale, device=device)

    def _next(self, scale: Tensor, count: Tensor, bad: Tensor) -> tuple[Tensor, Tensor]:
        return torch.full_like(scale, self.loss_scale), count.clone()


def rule(
    loss_scale: float | str | Mapping[str, Any] = "dynamic",
) -> torch_amp.TorchAmpScale | FixedAmpScale:
    """Equal to the scaler of `AmpOptimWrapper(loss_scale=loss_scale)`: "dynamic", a float, or a
    dict of GradScaler's arguments.

    For ApexOptimWrapper see `interop.apex.initialize`, which takes all of its arguments.

    Raises `ValueError` for another string, and what `interop.torch_amp.rule` raises.

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

    `d`: the state dict of an AmpOptimWrapper or an ApexOptimWrapper, its optimizer's part included;
    for that see `Optimizer.from_state_dict`. `settings`: for AmpOptimWrapper `loss_scale`, needed
    where it was a float: the dict does not say that the scale was fixed. For ApexOptimWrapper those
    of `interop.apex.rule`. `device`: that of the gradients.

    Raises `ValueError` for another library's dict, that of an OptimWrapper without a scaler, the
    `{}` of a disabled one, a scale that cannot train and a setting that contradicts `d`;
    `TypeError` for what is no number.

    >>> scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    >>> d = {"state": {}, "param_groups": [], "loss_scaler": scaler.state_dict()}
    >>> from_state_dict(d)[1].scale
    tensor(8.)

    Source of the format: state_dict of mmengine's amp_optimizer_wrapper.py and
    apex_optimizer_wrapper.py.
    """
    check_dict(d, "mmengine", (), None)
    if isinstance(d.get("apex_amp"), Mapping):
        return apex.from_state_dict(d["apex_amp"], device=device, **settings)
    held = d.get("loss_scaler")
    if not isinstance(held, Mapping) or "cur_scale" in held:
        missing = () if "loss_scaler" in d else ("loss_scaler",)
        refuse(d, "mmengine", ("loss_scaler", "param_groups"), missing)
    loss_scale = settings.pop("loss_scale", "dynamic")
    if isinstance(loss_scale, Mapping) or loss_scale == "dynamic":
        given = dict(loss_scale) if isinstance(loss_scale, Mapping) else {}
        return torch_amp.from_state_dict(held, device=device, **given, **settings)
    return rule(loss_scale, **settings), torch_amp.from_state_dict(held, device=device)[1]


def to_state_dict(rule: Any, scaler: Any) -> dict[str, Any]:
    """Syncs with the host. Equal to the scaler's part of the wrapper's state dict:
    `{"loss_scaler": ...}` or `{"apex_amp": ...}`.

    Put the optimizer's part beside it, `{**optimizer.to_state_dict(opt_state), **d}`, and the
    wrapper's `load_state_dict` takes it.

    Raises `TypeError` for a rule that neither wrapper has, `ValueError` for stacked states.

    >>> to_state_dict(rule(512.0), rule(512.0).init())["loss_scaler"]["scale"]
    512.0

    Source of the format: state_dict of mmengine's amp_optimizer_wrapper.py and
    apex_optimizer_wrapper.py.
    """
    if isinstance(rule, apex.ApexScale) or (
        isinstance(rule, tuple) and rule and isinstance(rule[0], apex.ApexScale)
    ):
        return {"apex_amp": apex.to_state_dict(rule, scaler)}
    check_saveable("mmengine", rule, (torch_amp.TorchAmpScale, FixedAmpScale), scaler, ScalerState)
    # That of a fixed scale is a GradScaler with torch's own settings, which it does not use.
    held = rule if isinstance(rule, torch_amp.TorchAmpScale) else torch_amp.rule()
    return {"loss_scaler": torch_amp.to_state_dict(held, scaler)}
