"""torch.amp.GradScaler: the state dict holds the settings too, floats are multiplied in double
precision.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._loss_scale.rules import ScalerState, check_factors, scaler_state
from .._torch.dtypes import widest_float
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

_SETTINGS = ("growth_factor", "backoff_factor", "growth_interval")
_KEYS = ("scale", *_SETTINGS, "_growth_tracker")


@dataclasses.dataclass(frozen=True)
class TorchAmpScale(ScaleAndCount):
    """Equal to `aten._amp_update_scale(scale, growth_tracker, found_inf, growth_factor,
    backoff_factor, growth_interval)`.

    Bit for bit with any setting, powers of two or not. What `DynamicScale` does otherwise, and this
    does as torch does:
    - no floor and no ceiling: the scale can become 0 and stays so (no step is taken then,
      `check_scaler` raises); growth beyond float32 is refused, and the count starts anew.
    - the count is compared with `==`: with an interval below the count nothing grows until the next
      overflow.

    `init_scale`, `growth_factor > 1`, `0 < backoff_factor < 1`: positive float32.
    `growth_interval`: steps. Changed in mid-run, as with `set_growth_factor`, by
    `dataclasses.replace(rule, growth_factor=...)`; `update(new_scale)` is
    `state._replace(scale=torch.tensor(new_scale))`.

    Raises `ValueError` and `TypeError` for other settings when made. GradScaler itself takes
    negative and NaN ones.

    >>> import torch
    >>> scaler = rule(init_scale=3.0, backoff_factor=0.3)
    >>> scaler.update(scaler.init(), torch.tensor(True)).scale
    tensor(0.9000)

    Source of the rule: aten/src/ATen/native/cpu/AmpGradScalerKernels.cpp, the same in the CUDA
    kernel. ShardedGradScaler with a scale on the CPU has a rule of its own, without the guard
    against growth to inf.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        settle(self, "init_scale", "growth_factor", "backoff_factor")
        check_factors(self, "growth_factor", "backoff_factor")
        settle_counts(self, "growth_interval")

    def init(self, device: Device = None) -> ScalerState:
        """The state to start from, on `device` (that of the gradients)."""
        return scaler_state(self.init_scale, device=device)

    def _next(self, scale: Tensor, count: Tensor, bad: Tensor) -> tuple[Tensor, Tensor]:
        # In double, as the kernel does: a factor that is no float32 would otherwise be rounded
        # before it multiplies.
        wide = scale.to(widest_float(scale.device))
        grown = (wide * self.growth_factor).to(torch.float32)
        lowered = (wide * self.backoff_factor).to(torch.float32)
        clean_steps = count + 1
        interval_reached = ~bad & (clean_steps == self.growth_interval)
        grows = interval_reached & torch.isfinite(grown)
        return (
            torch.where(bad, lowered, torch.where(grows, grown, scale)),
            torch.where(bad | interval_reached, 0, clean_steps),
        )


rule = TorchAmpScale


def from_state_dict(
    d: Mapping[str, Any], *, device: Device = None, accumulated: int = 1, **settings: Any
) -> tuple[TorchAmpScale, ScalerState]:
    """Equal to `rule(init_scale=d["scale"], growth_factor=d["growth_factor"],
    ...), state of d["scale"], d["_growth_tracker"]`.

    `d`: what `torch.amp.GradScaler.state_dict()` returned. It holds every setting; `settings` under
    `rule()`'s names may repeat them. `init_scale` becomes the saved scale, as in
    GradScaler.load_state_dict. `device`: that of the gradients.

    `accumulated=k`, a power of two: of a job that made a step of k times
    `scaler.scale(loss / k).backward()`. Here the mean of each microbatch is scaled whole, so the
    same gradients need a scale that is k times lower: the saved one over k. Without it the first
    steps may overflow, about log2(k) of them, until the scale has come down by itself.

    Raises `ValueError` for another library's dict, the `{}` of a disabled scaler, a scale that
    cannot train, a setting that contradicts `d` and an `accumulated` that is no power of two;
    `TypeError` for what is no number.

    >>> d = torch.amp.GradScaler("cpu", init_scale=8.0).state_dict()
    >>> from_state_dict(d)[0]
    TorchAmpScale(init_scale=8.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000)

    Source of the format: torch.amp.GradScaler.state_dict.
    """
    check_dict(d, "torch_amp", _KEYS)
    scale = saved_scale("scale", saved_scale("scale", d["scale"]) / _parts(accumulated))
    made = rule(**{"init_scale": scale, **with_settings(d, _SETTINGS, settings)})
    return made, scaler_state(scale, whole("_growth_tracker", d["_growth_tracker"]), device=device)


def to_state_dict(rule: TorchAmpScale, scaler: ScalerState, accumulated: int = 1) -> dict[str, Any]:
    """Syncs with the host. Equal to what `GradScaler.state_dict()` returns at this point;
    `load_state_dict` takes it.

    `accumulated=k`, as in `from_state_dict`, of a job that will go on with `loss / k`: the scale
    times k.

    Raises `TypeError` for another library's rule, `ValueError` for stacked states and an
    `accumulated` that is no power of two.

    >>> sorted(to_state_dict(rule(), rule().init()))
    ['_growth_tracker', 'backoff_factor', 'growth_factor', 'growth_interval', 'scale']

    Source of the format: torch.amp.GradScaler.state_dict.
    """
    check_saveable("torch_amp", rule, (TorchAmpScale,), scaler, ScalerState)
    return {
        "scale": float(scaler.scale) * _parts(accumulated),
        "growth_factor": rule.growth_factor,
        "backoff_factor": rule.backoff_factor,
        "growth_interval": rule.growth_interval,
        "_growth_tracker": int(scaler.growth_tracker),
    }


def _parts(accumulated: Any) -> int:
    count = whole("accumulated", accumulated, least=1)
    if count & (count - 1):
        raise ValueError(
            f"accumulated must be a power of two, got {count}: any other would round every "
            f"gradient from here on. Fix: the next one, accumulated={1 << count.bit_length()}; "
            "the scale grows back by itself."
        )
    return count
