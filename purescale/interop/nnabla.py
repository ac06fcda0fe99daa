"""nnabla's DynamicLossScalingUpdater: growth after N + 2 clean steps, then every N + 1."""

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

    Equal bit for bit within float32's range if `scaling_factor` is a power of two; nnabla computes
    in Python floats. The count is tested before it is increased, and a growth leaves it at 1: the
    scale grows on clean step N + 2, then every N + 1. The scale has no floor and no ceiling. At 0
    or inf no step is taken, and `check_scaler` raises.

    One `update` is one check of gradients. After an overflow nnabla's own `update()` retries up to
    100 times with new data; each try is one update here. For a retry on the same data see
    `max_retries` of `train_step`.

    Args:
        scale: The first scale, a positive float32.
        scaling_factor: The factor of growth and backoff, above 1.
        N: The scale grows if the count is above N.

    Raises:
        TypeError: A setting is not a number.
        ValueError: A setting is out of range.

    Example:
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
        """Return the initial state, on `device` (that of the gradients)."""
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

    nnabla does not save its state, so take the updater's attributes:
    `{name: getattr(updater, name) for name in ("scale", "scaling_factor", "N", "_counter")}`.

    Args:
        d: These attributes.
        device: The device of the gradients.
        settings: Settings of `rule`, which must agree with `d`.

    Returns:
        The rule and its state.

    Raises:
        TypeError: A value is not a number.
        ValueError: `d` is another library's dict or empty, its scale cannot train, or a setting
            contradicts it.

    Example:
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

    Args:
        rule: An `NnablaScale`.
        scaler: Its state.

    Returns:
        The attributes as a dict.

    Raises:
        TypeError: `rule` is another library's.
        ValueError: The state is stacked.

    Example:
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
