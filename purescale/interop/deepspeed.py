"""DeepSpeed's DynamicLossScaler and the LossScaleConfig of its fused and unfused optimizers, two
formats of one rule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._tree.hints import document_fields
from ._common import SCALE, Device, Entry, Format, PeerRule, check_bool, check_dict, scalar


@document_fields
class DeepSpeedState(NamedTuple):
    """The state of DeepSpeed's scaler, which counts iterations and not clean steps.

    Attributes:
        scale: float32 []. The factor of the loss.
        cur_iter: int64 []. The number of iterations.
        last_overflow_iter: int64 []. The iteration of the last overflow; -1 before the first.
        cur_hysteresis: int32 []. The number of overflows up to and including the next that backs
            off.
        consecutive_skips: int32 []. The number of overflows in a row, for `check_scaler`.
    """

    scale: Tensor
    cur_iter: Tensor
    last_overflow_iter: Tensor
    cur_hysteresis: Tensor
    consecutive_skips: Tensor


@dataclasses.dataclass(frozen=True)
class DeepSpeedScale(PeerRule[DeepSpeedState]):
    """Equal to `DynamicLossScaler.update_scale(overflow)`; with `delayed_shift=1` to
    `FP16_Optimizer._update_scale(skip)`.

    Equal bit for bit within float32's range if `scale_factor` is a power of two; DeepSpeed computes
    in Python floats. It follows DeepSpeed where `DynamicScale` does not:

    - The scale grows on clean step `scale_window + 1` after the start or an overflow, then every
      `scale_window` steps.
    - Once the tolerance is used up, every overflow backs off until a growth refills it, or any
      clean step with `consecutive_hysteresis`.
    - An overflow raises a scale below `min_scale` to it. The scale has no ceiling.

    When DeepSpeed raises "already at minimum", the scale stays at `min_scale` here, and
    `check_scaler` raises, already for the overflow that led there.

    Args:
        init_scale: The first scale, 2**initial_scale_power in the config.
        scale_window: The steps between growths, loss_scale_window in the config.
        min_scale: The floor, min_loss_scale in the config.
        delayed_shift: The first overflow after a refill of the tolerance that backs off, counted
            from 1; hysteresis in the config.
        consecutive_hysteresis: If True, any clean step refills the tolerance.
        raise_error_at_min_scale: Not used; kept for DeepSpeed's own object.
        scale_factor: The factor of growth and backoff, above 1.
        dynamic: If False, the scale never moves, as that of the static LossScaler. Overflows are
            skipped.

    Raises:
        TypeError: A setting has the wrong type.
        ValueError: A setting is out of range.

    Example:
        >>> from purescale.simulate import simulate
        >>> simulate(rule(init_scale=16.0, delayed_shift=2), [True, False, True, True]).scale
        tensor([16., 16., 16.,  8.,  4.])

    Source of the rule: deepspeed/runtime/fp16/loss_scaler.py and fused_optimizer.py, which unscale
    with the next scale; purescale uses the current one.
    """

    state_kind = DeepSpeedState
    first_scale = "init_scale"

    init_scale: float = 2.0**16
    scale_window: int = 1000
    min_scale: float = 1.0
    delayed_shift: int = 2
    consecutive_hysteresis: bool = False
    raise_error_at_min_scale: bool = True
    scale_factor: float = 2.0
    dynamic: bool = True

    def __post_init__(self) -> None:
        self._check_positive("init_scale", "min_scale")
        self._check_factors("scale_factor")
        self._check_counts("scale_window", "delayed_shift")
        for name in ("consecutive_hysteresis", "raise_error_at_min_scale", "dynamic"):
            check_bool(name, getattr(self, name))

    def init(self, device: Device = None) -> DeepSpeedState:
        """Return the initial state, on `device` (that of the gradients)."""
        return DeepSpeedState(
            scale=scalar(self.init_scale, torch.float32, device),
            cur_iter=scalar(0, torch.int64, device),
            last_overflow_iter=scalar(-1, torch.int64, device),
            cur_hysteresis=scalar(self.delayed_shift, torch.int32, device),
            consecutive_skips=scalar(0, torch.int32, device),
        )

    def _transition(self, state: DeepSpeedState, bad: Tensor) -> dict[str, Tensor]:
        iteration, last = state.cur_iter, state.last_overflow_iter
        hysteresis, scale = state.cur_hysteresis, state.scale
        if not self.dynamic:
            last, hysteresis, scale = last.clone(), hysteresis.clone(), scale.clone()
        else:
            used_up = torch.ones_like(bad) if self.delayed_shift == 1 else hysteresis == 1
            clean_steps = iteration - last - 1
            grows = ~bad & (clean_steps > 0) & (clean_steps % self.scale_window == 0)
            lowered = (scale / self.scale_factor).clamp(min=self.min_scale)
            scale = torch.where(grows, scale * self.scale_factor, scale)
            scale = torch.where(bad & used_up, lowered, scale)
            refilled = ~bad if self.consecutive_hysteresis else grows
            hysteresis = torch.where(bad & ~used_up, hysteresis - 1, hysteresis)
            hysteresis = torch.where(refilled, self.delayed_shift, hysteresis)
            last = torch.where(bad, iteration, last)
        return {
            "scale": scale,
            "cur_iter": iteration + 1,
            "last_overflow_iter": last,
            "cur_hysteresis": hysteresis,
        }


rule = DeepSpeedScale
_FORMAT = Format(
    "deepspeed",
    DeepSpeedScale,
    {
        "cur_scale": SCALE,
        "cur_iter": Entry("cur_iter"),
        "last_overflow_iter": Entry("last_overflow_iter", least=-1),
        "cur_hysteresis": Entry("cur_hysteresis", least=-(2**31)),
    },
    (
        *("dynamic", "scale_window", "min_scale", "delayed_shift", "consecutive_hysteresis"),
        *("raise_error_at_min_scale", "scale_factor"),
    ),
)


def from_state_dict(
    d: Mapping[str, Any], *, device: Device = None, **settings: Any
) -> tuple[DeepSpeedScale, DeepSpeedState]:
    """Equal to `rule(**settings of d), state of cur_scale, cur_iter, last_overflow_iter,
    cur_hysteresis`.

    - ZeRO saves the scaler object under "loss_scaler". Unpickle it yourself; an object with its
      attributes, or their `vars`, also works.
    - The fused and unfused optimizers save `cur_scale`, `cur_iter` and others side by side. They
      have a hysteresis of 1 and do not save `min_scale`: pass 0.25 for the unfused one; that of the
      fused one is 1.0, the default.

    Args:
        d: The optimizer's state dict in either format. Other keys are ignored.
        device: The device of the gradients.
        settings: Settings of `rule` that `d` does not hold.

    Returns:
        The rule and its state.

    Raises:
        TypeError: A value is not a number.
        ValueError: `d` is not such a dict, its scale cannot train, or a setting contradicts it.

    Example:
        >>> d = {"dynamic_loss_scale": True, "cur_scale": 1024.0, "cur_iter": 9}
        >>> d |= {"last_overflow_iter": 4, "scale_factor": 2.0, "scale_window": 500}
        >>> scaler, state = from_state_dict(d)
        >>> scaler.scale_window, scaler.delayed_shift, state.scale
        (500, 1, tensor(1024.))

    Source of the formats: state_dict of deepspeed/runtime/zero/stage_1_and_2.py and of
    deepspeed/runtime/fp16/fused_optimizer.py.
    """
    check_dict(d, "deepspeed", (), None)
    fields = d.get("loss_scaler", d)
    fields = vars(fields) if hasattr(fields, "cur_scale") else fields
    check_dict(fields, "deepspeed", ("cur_scale",), None)
    dynamic = fields.get("dynamic", d.get("dynamic_loss_scale"))
    check_bool("dynamic_loss_scale", dynamic)
    if dynamic:
        needed = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
        check_dict(fields, "deepspeed", needed, None)
    flat = {"delayed_shift": 1, "raise_error_at_min_scale": False}
    defaults = flat if dynamic and "delayed_shift" not in fields else {}
    return _FORMAT.read({"dynamic": dynamic, **fields}, settings, device, **defaults)


def to_state_dict(rule: DeepSpeedScale, scaler: DeepSpeedState) -> dict[str, Any]:
    """Syncs with the host. Equal to both of DeepSpeed's formats in one dict of numbers, so that
    hysteresis is not lost.

    For a fused or unfused optimizer: `optimizer.load_state_dict({**state_dict_of_the_rest, **d})`.
    For ZeRO, whose format is a pickled object:
    `vars(optimizer.loss_scaler).update({k: d[k] for k in vars(optimizer.loss_scaler) if k in d})`.

    Args:
        rule, scaler: A `DeepSpeedScale` and its state.

    Returns:
        The state dict.

    Raises:
        TypeError, ValueError: `rule` is another library's, or the state is stacked.

    Example:
        >>> d = to_state_dict(rule(), rule().init())
        >>> d["cur_scale"], d["cur_iter"], d["cur_hysteresis"]
        (65536.0, 0, 2)
    """
    d = _FORMAT.write(rule, scaler)
    return {"dynamic_loss_scale": d["dynamic"], **d}
