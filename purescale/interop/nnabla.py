"""nnabla's DynamicLossScalingUpdater: growth after N + 2 clean steps, then after N + 1; no state
dict of its own.
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

_SETTINGS = ("scaling_factor", "N")
_KEYS = ("scale", *_SETTINGS, "_counter")


@dataclasses.dataclass(frozen=True)
class NnablaScale(ScaleAndCount):
    """Equal to `scale / scaling_factor, 0` when bad, else
    `(scale * scaling_factor, 1) if counter > N else (scale, counter + 1)`.

    Bit for bit with a power of two as `scaling_factor`, within float32's range; nnabla computes in
    Python floats. The count is tested before it is moved, and left at 1 by growth: the scale grows
    on clean step N + 2, then every N + 1. There is no floor and no ceiling; a scale of 0 or inf
    takes no step, and `check_scaler` raises.

    One `update` is one check of gradients. nnabla's own `update()` tries again, with new data, up
    to 100 times after an overflow: each of its tries is one of ours. For a retry on the same data
    see `max_retries` of `train_step`.

    `scale`, `scaling_factor > 1`: positive float32; `N >= 0`. Raises `ValueError` and `TypeError`
    otherwise, when made.

    >>> import torch
    >>> updater = rule(scale=8.0, N=1)
    >>> state = updater.init()
    >>> for _ in range(5):
    ...     state = updater.update(state, torch.tensor(False))
    ...     print(state.scale.item())
    8.0
    8.0
    16.0
    16.0
    32.0

    Source of the rule: nnabla/experimental/mixed_precision_training.py.
    """

    scale: float = 8.0
    scaling_factor: float = 2.0
    N: int = 2000

    def __post_init__(self) -> None:
        settle(self, "scale", "scaling_factor")
        check_factors(self, "scaling_factor")
        settle_counts(self, "N", least=0)

    def init(self, device: Device = None) -> ScalerState:
        """The state to start from, on `device` (that of the gradients)."""
        return scaler_state(self.scale, device=device)

    def _next(self, scale: Tensor, count: Tensor, bad: Tensor) -> tuple[Tensor, Tensor]:
        grows = count > self.N
        grown, lowered = scale * self.scaling_factor, scale / self.scaling_factor
        return (
            torch.where(bad, lowered, torch.where(grows, grown, scale)),
            torch.where(bad, 0, torch.where(grows, 0, count) + 1),
        )


rule = NnablaScale


def from_state_dict(
    d: Mapping[str, Any], *, device: Device = None, **settings: Any
) -> tuple[NnablaScale, ScalerState]:
    """Equal to `rule(d["scale"], d["scaling_factor"], d["N"]), state of d["scale"], d["_counter"]`.

    `d`: nnabla saves nothing, so take the updater's attributes:
    `{name: getattr(updater, name) for name in ("scale", "scaling_factor", "N", "_counter")}`.
    `settings` under `rule()`'s names may repeat them. `device`: that of the gradients.

    Raises `ValueError` for another library's dict, an empty one, a scale that cannot train and a
    setting that contradicts `d`; `TypeError` for what is no number.

    >>> d = {"scale": 16.0, "scaling_factor": 2.0, "N": 2000, "_counter": 7}
    >>> from_state_dict(d)[1].growth_tracker
    tensor(7, dtype=torch.int32)

    Source of the names: the attributes of DynamicLossScalingUpdater.
    """
    check_dict(d, "nnabla", _KEYS)
    scale = saved_scale("scale", d["scale"])
    made = rule(**with_settings(d, ("scale", *_SETTINGS), settings))
    return made, scaler_state(scale, whole("_counter", d["_counter"]), device=device)


def to_state_dict(rule: NnablaScale, scaler: ScalerState) -> dict[str, Any]:
    """Syncs with the host. Equal to the updater's attributes at this point;
    `vars(updater).update(d)` restores them.

    Raises `TypeError` for another library's rule, `ValueError` for stacked states.

    >>> to_state_dict(rule(), rule().init())
    {'scale': 8.0, 'scaling_factor': 2.0, 'N': 2000, '_counter': 0}

    Source of the names: the attributes of DynamicLossScalingUpdater.
    """
    check_saveable("nnabla", rule, (NnablaScale,), scaler, ScalerState)
    return {
        "scale": float(scaler.scale),
        "scaling_factor": rule.scaling_factor,
        "N": rule.N,
        "_counter": int(scaler.growth_tracker),
    }
