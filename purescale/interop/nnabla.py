"""nnabla's DynamicLossScalingUpdater: growth after N + 2 clean steps, then every N + 1."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._loss_scale.rules import ScalerState
from .._tree.scalars import increment
from ._common import COUNT, SCALE, Device, Format, ScaleAndCount


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
        TypeError, ValueError: A setting is not a number, or out of range.

    Example:
        >>> from purescale.simulate import simulate
        >>> simulate(rule(scale=8.0, N=1), [False] * 5).scale
        tensor([ 8.,  8.,  8., 16., 16., 32.])

    Source of the rule: nnabla/experimental/mixed_precision_training.py.
    """

    first_scale = "scale"

    scale: float = 8.0
    scaling_factor: float = 2.0
    N: int = 2000

    def __post_init__(self) -> None:
        self._check_positive("scale")
        self._check_factors("scaling_factor")
        self._check_counts("N", least=0)

    def _next(self, scale: Tensor, count: Tensor, bad: Tensor) -> tuple[Tensor, Tensor]:
        grows = count > self.N
        grown, lowered = scale * self.scaling_factor, scale / self.scaling_factor
        return (
            torch.where(bad, lowered, torch.where(grows, grown, scale)),
            torch.where(bad, 0, increment(torch.where(grows, 0, count), True)),
        )


rule = NnablaScale
_FORMAT = Format(
    "nnabla",
    NnablaScale,
    {"scale": SCALE, "_counter": COUNT},
    ("scaling_factor", "N"),
)


def from_state_dict(
    d: Mapping[str, Any], *, device: Device = None, **settings: Any
) -> tuple[NnablaScale, ScalerState]:
    """Equal to `rule(d["scale"], d["scaling_factor"], d["N"]), state of d["scale"], d["_counter"]`.

    Args:
        d: The updater's attributes `{name: getattr(updater, name) for name in ("scale",
            "scaling_factor", "N", "_counter")}`, as nnabla does not save its state.
        device: The device of the gradients.
        settings: Settings of `rule`, which must agree with `d`.

    Returns:
        The rule and its state.

    Raises:
        TypeError: A value is not a number.
        ValueError: `d` is not such a dict, its scale cannot train, or a setting contradicts it.

    Example:
        >>> d = {"scale": 16.0, "scaling_factor": 2.0, "N": 2000, "_counter": 7}
        >>> from_state_dict(d)[1].growth_tracker
        tensor(7, dtype=torch.int32)

    Source of the names: the attributes of DynamicLossScalingUpdater.
    """
    _FORMAT.check(d)
    return _FORMAT.read(d, settings, device)


def to_state_dict(rule: NnablaScale, scaler: ScalerState) -> dict[str, Any]:
    """Syncs with the host. Equal to the updater's attributes at this point;
    `vars(updater).update(d)` restores them.

    Args:
        rule, scaler: An `NnablaScale` and its state.

    Returns:
        The attributes as a dict.

    Raises:
        TypeError, ValueError: `rule` is another library's, or the state is stacked.

    Example:
        >>> to_state_dict(rule(), rule().init())
        {'scale': 8.0, '_counter': 0, 'scaling_factor': 2.0, 'N': 2000}
    """
    return _FORMAT.write(rule, scaler)
