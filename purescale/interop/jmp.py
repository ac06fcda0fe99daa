"""jmp's DynamicLossScale: no growth to inf, and a count that wraps around."""

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
class JmpScale(ScaleAndCount):
    """Equal to `max(min_loss_scale, loss_scale / factor), 0` when bad, else `loss_scale * factor`
    if `counter == period - 1`.

    Equal bit for bit from 2**-126 up if `factor` is a power of two; jax on CPU rounds smaller
    scales to 0. A growth to inf is dropped. The next count is `(counter + 1) % period`, so the
    scale still grows if the count is above a new `period`.

    Args:
        loss_scale: The first scale, a positive float32, as a number or a 0-d array.
        counter: The first count.
        period: The number of clean steps before a growth.
        factor: The factor of growth and backoff, above 1.
        min_loss_scale: The floor. jmp resets its own to 1.0 in every pytree round trip, such as
            jax.jit: leave it at 1.0 for such a job.

    Raises:
        TypeError, ValueError: A setting is not a number, or out of range.

    Example:
        >>> from purescale.simulate import simulate
        >>> simulate(rule(loss_scale=2.0, min_loss_scale=1.0), [True] * 2).scale
        tensor([2., 1., 1.])

    Source of the rule: jmp/_src/loss_scale.py.
    """

    first_scale = "loss_scale"
    first_count = "counter"

    loss_scale: float
    counter: int = 0
    period: int = 2000
    factor: float = 2.0
    min_loss_scale: float = 1.0

    def __post_init__(self) -> None:
        self._check_positive("loss_scale", "min_loss_scale")
        self._check_counts("counter", least=0)
        self._check_factors("factor")
        self._check_counts("period")

    @property
    def min_scale(self) -> float:
        """The floor under the name that `check_scaler` reads."""
        return self.min_loss_scale

    def _next(self, scale: Tensor, count: Tensor, bad: Tensor) -> tuple[Tensor, Tensor]:
        grown = scale * self.factor
        grows = (count == self.period - 1) & torch.isfinite(grown)
        lowered = (scale / self.factor).clamp(min=self.min_loss_scale)
        return (
            torch.where(bad, lowered, torch.where(grows, grown, scale)),
            torch.where(bad, 0, increment(count, True) % self.period),
        )


rule = JmpScale
_FORMAT = Format(
    "jmp",
    JmpScale,
    {"loss_scale": SCALE, "counter": COUNT},
    ("period", "factor", "min_loss_scale"),
    settings_required=False,
)


def from_state_dict(
    d: Mapping[str, Any], *, device: Device = None, **settings: Any
) -> tuple[JmpScale, ScalerState]:
    """Equal to `rule(d["loss_scale"], **settings), state of d["loss_scale"], d["counter"]`.

    Args:
        d: `dataclasses.asdict(loss_scale)`, as jmp does not have a state dict, or only its two
            leaves `loss_scale` and `counter`. The values are numbers or 0-d arrays.
        device: The device of the gradients.
        settings: Settings of `rule` that `d` does not hold.

    Returns:
        The rule and its state.

    Raises:
        TypeError: A value is not a number.
        ValueError: `d` is not such a dict, its scale cannot train, or a setting contradicts it.

    Example:
        >>> from_state_dict({"loss_scale": 1024.0, "counter": 7}, period=100)[1].scale
        tensor(1024.)

    Source of the names: the fields of jmp.DynamicLossScale.
    """
    _FORMAT.check(d)
    return _FORMAT.read(d, settings, device)


def to_state_dict(rule: JmpScale, scaler: ScalerState) -> dict[str, Any]:
    """Syncs with the host. Equal to `dataclasses.asdict(loss_scale)` at this point, in numbers.

    To continue in jmp, restore the arrays:
    `jmp.DynamicLossScale(jnp.float32(d["loss_scale"]), jnp.int32(d["counter"]),
    d["period"], d["factor"], jnp.float32(d["min_loss_scale"]))`.

    Args:
        rule, scaler: A `JmpScale` and its state.

    Returns:
        The attributes as a dict.

    Raises:
        TypeError, ValueError: `rule` is another library's, or the state is stacked.

    Example:
        >>> to_state_dict(rule(1024.0), rule(1024.0).init())
        {'loss_scale': 1024.0, 'counter': 0, 'period': 2000, 'factor': 2.0, 'min_loss_scale': 1.0}
    """
    return _FORMAT.write(rule, scaler)
