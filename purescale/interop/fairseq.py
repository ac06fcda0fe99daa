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
    """What fairseq's scaler remembers: iterations, not clean steps."""

    scale: Tensor  # float32
    iteration: Tensor  # int64
    last_overflow_iter: Tensor  # int64; -1: none yet
    last_rescale_iter: Tensor  # int64; -1: none yet
    overflows_since_rescale: Tensor  # int64
    consecutive_skips: Tensor  # int32: overflows in a row, for check_scaler


@dataclasses.dataclass(frozen=True)
class FairseqScale:
    """Equal to `check_overflow(grad_norm)`, and `update()` after a clean step, of fairseq's
    DynamicLossScaler.

    Bit for bit with a power of two as `scale_factor` and within float32's range; fairseq computes
    in Python floats. An overflow backs off where overflows make up at least `tolerance` of the
    steps since the scale last moved, never below `threshold`. Growth comes every `scale_window`
    steps after the last overflow. There is no ceiling.

    Where fairseq restores the scale and raises FloatingPointError, because it would fall to
    `min_loss_scale` or below, this takes that last step down and stays there until it grows:
    `check_scaler` raises, at the same overflow.

    `init_scale`, `scale_factor > 1`: positive float32. `scale_window`: steps. `tolerance`: from 0
    to 1. `threshold`, `min_loss_scale`: not negative; `threshold` may be `None`. Raises
    `ValueError` and `TypeError` for other settings when made.

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
        """The floor, under the name that `check_scaler` knows."""
        return self.min_loss_scale

    def init(self, device: Device = None) -> FairseqState:
        """The state to start from, on `device` (that of the gradients)."""
        return _state(self.init_scale, (0, -1, -1, 0), device)

    @without_amax
    def update(self, scaler: FairseqState, found_inf: Tensor) -> FairseqState:
        """The state for the next step. `found_inf`: 0-d bool, True = the step was bad. Reads no
        value; raises only for another rule's state.
        """
        bad = flag(found_inf, scaler, FairseqState)
        iteration, scale = scaler.iteration, scaler.scale
        wide = widest_float(scale.device)

        overflows = torch.where(
            bad, scaler.overflows_since_rescale + 1, scaler.overflows_since_rescale
        )
        steps = iteration - scaler.last_rescale_iter
        # 0 only in a state saved right after a FloatingPointError; fairseq's own stand-in for it.
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

    `d`: the state dict of fairseq's FP16Optimizer, which keeps `loss_scale` among the optimizer's
    keys and loses the counts: as in fairseq they start anew. Or the scaler's attributes,
    `vars(optimizer.scaler)`, which lose nothing. `settings` under `rule()`'s names, for what `d`
    does not hold. `device`: that of the gradients.

    Raises `ValueError` for another library's dict, an empty one, a scale that cannot train and a
    setting that contradicts `d`; `TypeError` for what is no number.

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

    `loss_scale` alone is what fairseq's FP16Optimizer keeps:
    `{**state_dict_of_the_rest, "loss_scale": d["loss_scale"]}`.

    Raises `TypeError` for another library's rule, `ValueError` for stacked states.

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
