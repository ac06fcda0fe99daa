"""Keras' LossScaleOptimizer: factors of 2, without floor and ceiling."""

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
class KerasScale(ScaleAndCount):
    """Equal to `scale / 2, 0` when bad, else
    `(scale * 2, 0) if step_counter == dynamic_growth_steps - 1 else (scale, step_counter + 1)`.

    Equal bit for bit from 2**-126 up; jax, as a backend of Keras, rounds smaller scales to 0. The
    scale has no floor and no ceiling. At 0 or inf no step is taken, and `check_scaler` raises.

    Args:
        initial_scale: The first scale, a positive float32.
        dynamic_growth_steps: The number of clean steps before a growth.

    Raises:
        TypeError, ValueError: A setting is not a number, or out of range.

    Example:
        >>> import torch
        >>> scaler = rule(initial_scale=8.0, dynamic_growth_steps=1)
        >>> scaler.update(scaler.init(), torch.tensor(False)).scale
        tensor(16.)

    Source of the rule: keras/src/optimizers/loss_scale_optimizer.py.
    """

    first_scale = "initial_scale"

    initial_scale: float = 2.0**15
    dynamic_growth_steps: int = 2000

    def __post_init__(self) -> None:
        self._check_positive("initial_scale")
        self._check_counts("dynamic_growth_steps")

    def _next(self, scale: Tensor, count: Tensor, bad: Tensor) -> tuple[Tensor, Tensor]:
        grows = count == self.dynamic_growth_steps - 1
        return (
            torch.where(bad, scale * 0.5, torch.where(grows, scale * 2, scale)),
            torch.where(bad | grows, 0, increment(count, True)),
        )


rule = KerasScale
_FORMAT = Format(
    "keras",
    KerasScale,
    {"step_counter": COUNT, "dynamic_scale": SCALE},
    ("initial_scale", "dynamic_growth_steps"),
    settings_required=False,
)


def from_state_dict(
    d: Mapping[str, Any], *, device: Device = None, **settings: Any
) -> tuple[KerasScale, ScalerState]:
    """Equal to `rule(**settings), state of d["dynamic_scale"], d["step_counter"]`.

    Args:
        d: The attributes `{"step_counter": int(optimizer.step_counter), "dynamic_scale":
            float(optimizer.dynamic_scale)}`, which Keras saves among the optimizer's variables.
        device: The device of the gradients.
        settings: Settings of `rule`, which may also be in `d`.

    Returns:
        The rule and its state.

    Raises:
        TypeError: A value is not a number.
        ValueError: `d` is not such a dict, its scale cannot train, or a setting contradicts it.

    Example:
        >>> d = {"step_counter": 7, "dynamic_scale": 1024.0}
        >>> from_state_dict(d, dynamic_growth_steps=100)[1].scale
        tensor(1024.)

    Source of the names: the variables and arguments of keras.optimizers.LossScaleOptimizer.
    """
    _FORMAT.check(d)
    return _FORMAT.read(d, settings, device)


def to_state_dict(rule: KerasScale, scaler: ScalerState) -> dict[str, Any]:
    """Syncs with the host. Equal to the optimizer's attributes at this point.

    Construct the optimizer with the last two, then restore the others with
    `optimizer.step_counter.assign(d["step_counter"])` and
    `optimizer.dynamic_scale.assign(d["dynamic_scale"])`.

    Args:
        rule, scaler: A `KerasScale` and its state.

    Returns:
        The attributes as a dict.

    Raises:
        TypeError, ValueError: `rule` is another library's, or the state is stacked.

    Example:
        >>> d = to_state_dict(rule(), rule().init())
        >>> d["step_counter"], d["dynamic_scale"], d["initial_scale"], d["dynamic_growth_steps"]
        (0, 32768.0, 32768.0, 2000)
    """
    return _FORMAT.write(rule, scaler)
