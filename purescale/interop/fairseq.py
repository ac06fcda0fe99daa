"""fairseq's DynamicLossScaler: an overflow backs off only when overflows are frequent enough."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._loss_scale.rule_protocol import flag, without_amax
from .._loss_scale.rules import check_factors
from .._torch.dtypes import widest_float
from .._tree.scalars import real, short_repr, whole
from ._common import (
    Device,
    check_dict,
    check_saveable,
    next_skips,
    refuse,
    saved_scale,
    scalar,
    settle,
    settle_counts,
    with_settings,
)

_COUNTS = ("_iter", "_last_overflow_iter", "_last_rescale_iter", "_overflows_since_rescale")
_SETTINGS = ("scale_factor", "scale_window", "tolerance", "threshold", "min_loss_scale")
_MOST = 2**63 - 1


class FairseqState(NamedTuple):
    """The state of fairseq's scaler, which counts iterations and not clean steps."""

    scale: Tensor  # float32
    iteration: Tensor  # int64
    last_overflow_iter: Tensor  # int64; -1 before the first
    last_rescale_iter: Tensor  # int64; -1 before the first
    overflows_since_rescale: Tensor  # int64
    consecutive_skips: Tensor  # int32: overflows in a row, for check_scaler


@dataclasses.dataclass(frozen=True)
class FairseqScale:
    """Equal to `check_overflow(grad_norm)`, and `update()` after a clean step, of fairseq's
    DynamicLossScaler.

    Equal bit for bit within float32's range if `scale_factor` is a power of two; fairseq computes
    in Python floats. The scale has no ceiling.

    If the scale would fall to `min_loss_scale` or below, fairseq restores it and raises
    FloatingPointError. Here the scale takes this last step and stays there until it grows, and
    `check_scaler` raises, at the same overflow.

    Args:
        init_scale: The first scale, a positive float32.
        scale_factor: The factor of growth and backoff, above 1.
        scale_window: The scale grows every `scale_window` steps after the last overflow.
        tolerance: An overflow backs off if at least this share, from 0 to 1, of the steps since the
            scale last moved overflowed.
        threshold: A bound below which a backoff does not go, not negative, or None.
        min_loss_scale: The scale at which fairseq raises, not negative.

    Raises:
        TypeError: A setting is not a number.
        ValueError: A setting is out of range.

    Example:
        >>> import torch
        >>> scaler = rule(init_scale=16.0, tolerance=0.5)
        >>> state = scaler.init()
        >>> for overflow in [False, False, True, True]:
        ...     state = scaler.update(state, torch.tensor(overflow))
        ...     print(state.scale.item())
        16.0
        16.0
        16.0
        8.0

    Source of the rule: fairseq/optim/dynamic_loss_scaler.py.
    """

    init_scale: float = 2.0**15
    scale_factor: float = 2.0
    scale_window: int = 2000
    tolerance: float = 0.0
    threshold: float | None = None
    min_loss_scale: float = 1e-4

    def __post_init__(self) -> None:
        settle(self, "init_scale", "scale_factor")
        check_factors(self, "scale_factor")
        settle_counts(self, "scale_window")
        for name in ("tolerance", "min_loss_scale", "threshold"):
            value = getattr(self, name)
            if name == "threshold" and value is None:
                continue
            number = real(name, value)
            if not 0 <= number <= (1.0 if name == "tolerance" else torch.finfo(torch.float32).max):
                expected = "from 0 to 1" if name == "tolerance" else "finite and not negative"
                raise ValueError(
                    f"{name} must be {expected}, got {short_repr(value)}. Fix: leave it out for "
                    "fairseq's default."
                )
            object.__setattr__(self, name, number)

    @property
    def min_scale(self) -> float:
        """The floor under the name that `check_scaler` reads."""
        return self.min_loss_scale

    def init(self, device: Device = None) -> FairseqState:
        """Return the initial state, on `device` (that of the gradients)."""
        return _state(self.init_scale, (0, -1, -1, 0), device)

    @without_amax
    def update(self, scaler: FairseqState, found_inf: Tensor) -> FairseqState:
        """Return the state for the next step. `found_inf`: 0-d bool, True if the step was bad.
        Reads no value; raises only for another rule's state.
        """
        bad = flag(found_inf, scaler, FairseqState)
        iteration, scale = scaler.iteration, scaler.scale
        wide = widest_float(scale.device)

        overflows = torch.where(
            bad, scaler.overflows_since_rescale + 1, scaler.overflows_since_rescale
        )
        steps = iteration - scaler.last_rescale_iter
        # 0 only in a state saved right after a FloatingPointError; fairseq then divides by 1000.
        share = overflows.to(wide) / torch.where(steps == 0, 1000, steps).to(wide)
        backs_off = bad & (share >= self.tolerance)
        grows = ~bad & ((iteration - scaler.last_overflow_iter) % self.scale_window == 0)

        lowered = scale / self.scale_factor
        if self.threshold is not None:
            lowered = lowered.clamp(min=self.threshold)
        lowered = torch.where(scale <= self.min_loss_scale, scale, lowered)
        return FairseqState(
            scale=torch.where(
                backs_off, lowered, torch.where(grows, scale * self.scale_factor, scale)
            ),
            iteration=iteration + 1,
            last_overflow_iter=torch.where(bad, iteration, scaler.last_overflow_iter),
            last_rescale_iter=torch.where(backs_off | grows, iteration, scaler.last_rescale_iter),
            overflows_since_rescale=torch.where(backs_off, 0, overflows),
            consecutive_skips=next_skips(scaler.consecutive_skips, bad),
        )


rule = FairseqScale


def _state(scale: float, counts: tuple[int, ...], device: Device) -> FairseqState:
    whole_numbers = (scalar(count, torch.int64, device) for count in counts)
    return FairseqState._make(
        (scalar(scale, torch.float32, device), *whole_numbers, scalar(0, torch.int32, device))
    )


def from_state_dict(
    d: Mapping[str, Any], *, device: Device = None, **settings: Any
) -> tuple[FairseqScale, FairseqState]:
    """Equal to `rule(**settings), state of d["loss_scale"] and the counts, where d has them`.

    Args:
        d: The state dict of fairseq's FP16Optimizer, which does not hold the counts: they restart,
            as in fairseq. Or `vars(optimizer.scaler)`, which holds everything.
        device: The device of the gradients.
        settings: Settings of `rule` that `d` does not hold.

    Returns:
        The rule and its state.

    Raises:
        TypeError: A value is not a number.
        ValueError: `d` is another library's dict or empty, its scale cannot train, or a setting
            contradicts it.

    Example:
        >>> d = {"loss_scale": 1024.0, "state": {}, "param_groups": []}
        >>> from_state_dict(d, scale_window=256)[1].scale
        tensor(1024.)

    Source of the format: fairseq/optim/fp16_optimizer.py; the names of DynamicLossScaler's
    attributes.
    """
    check_dict(d, "fairseq", ("loss_scale",), None)
    missing = [key for key in _COUNTS if key not in d]
    counted = len(missing) < len(_COUNTS)
    if (counted and missing) or not (counted or "param_groups" in d):
        refuse(d, "fairseq", ("loss_scale", *_COUNTS), missing)
    scale = saved_scale("loss_scale", d["loss_scale"])
    made = rule(**{"init_scale": scale, **with_settings(d, _SETTINGS, settings)})
    least = {"_last_overflow_iter": -1, "_last_rescale_iter": -1}
    counts: tuple[int, ...] = (0, -1, -1, 0)
    if counted:
        counts = tuple(whole(key, d[key], least.get(key, 0), _MOST) for key in _COUNTS)
    return made, _state(scale, counts, device)


def to_state_dict(rule: FairseqScale, scaler: FairseqState) -> dict[str, Any]:
    """Syncs with the host. Equal to `vars(optimizer.scaler)` at this point;
    `vars(optimizer.scaler).update(d)` restores it.

    fairseq's FP16Optimizer saves only the scale:
    `{**state_dict_of_the_rest, "loss_scale": d["loss_scale"]}`.

    Args:
        rule: A `FairseqScale`.
        scaler: Its state.

    Returns:
        The attributes as a dict.

    Raises:
        TypeError: `rule` is another library's.
        ValueError: The state is stacked.

    Example:
        >>> d = to_state_dict(rule(), rule().init())
        >>> d["loss_scale"], d["_last_overflow_iter"]
        (32768.0, -1)

    Source of the names: the attributes of fairseq's DynamicLossScaler.
    """
    check_saveable("fairseq", rule, (FairseqScale,), scaler, FairseqState)
    return {
        "loss_scale": float(scaler.scale),
        "_iter": int(scaler.iteration),
        "_last_overflow_iter": int(scaler.last_overflow_iter),
        "_last_rescale_iter": int(scaler.last_rescale_iter),
        "_overflows_since_rescale": int(scaler.overflows_since_rescale),
        **{name: getattr(rule, name) for name in _SETTINGS},
    }
