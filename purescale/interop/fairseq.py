"""fairseq's DynamicLossScaler: an overflow backs off only when overflows are frequent enough."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch.dtypes import widest_float
from .._tree.hints import document_fields
from .._tree.scalars import checked_real
from ._common import SCALE, Device, Entry, Format, PeerRule, check_dict, scalar


@document_fields
class FairseqState(NamedTuple):
    """The state of fairseq's scaler, which counts iterations and not clean steps.

    Attributes:
        scale: float32 []. The factor of the loss.
        iteration: int64 []. The number of iterations.
        last_overflow_iter: int64 []. The iteration of the last overflow; -1 before the first.
        last_rescale_iter: int64 []. The iteration in which the scale last moved; -1 before the
            first.
        overflows_since_rescale: int64 []. The number of overflows since the scale last backed off.
        consecutive_skips: int32 []. The number of overflows in a row, for `check_scaler`.
    """

    scale: Tensor
    iteration: Tensor
    last_overflow_iter: Tensor
    last_rescale_iter: Tensor
    overflows_since_rescale: Tensor
    consecutive_skips: Tensor


@dataclasses.dataclass(frozen=True)
class FairseqScale(PeerRule[FairseqState]):
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
        TypeError, ValueError: A setting is not a number, or out of range.

    Example:
        >>> from purescale.simulate import simulate
        >>> simulate(rule(init_scale=16.0, tolerance=0.5), [False, False, True, True]).scale
        tensor([16., 16., 16., 16.,  8.])

    Source of the rule: fairseq/optim/dynamic_loss_scaler.py.
    """

    state_kind = FairseqState
    first_scale = "init_scale"

    init_scale: float = 2.0**15
    scale_factor: float = 2.0
    scale_window: int = 2000
    tolerance: float = 0.0
    threshold: float | None = None
    min_loss_scale: float = 1e-4

    def __post_init__(self) -> None:
        self._check_positive("init_scale")
        self._check_factors("scale_factor")
        self._check_counts("scale_window")
        largest = torch.finfo(torch.float32).max
        bounds = {"tolerance": 1.0, "min_loss_scale": largest, "threshold": largest}
        for name, most in bounds.items():
            if name == "threshold" and self.threshold is None:
                continue
            number = checked_real(name, getattr(self, name))
            if not 0 <= number <= most:
                raise ValueError(
                    f"{name} must be from 0 to {most:g}, got {number}. Fix: leave it out."
                )
            object.__setattr__(self, name, number)

    @property
    def min_scale(self) -> float:
        """The floor under the name that `check_scaler` reads."""
        return self.min_loss_scale

    def init(self, device: Device = None) -> FairseqState:
        """Return the initial state, on `device` (that of the gradients)."""
        return FairseqState(
            scale=scalar(self.init_scale, torch.float32, device),
            iteration=scalar(0, torch.int64, device),
            last_overflow_iter=scalar(-1, torch.int64, device),
            last_rescale_iter=scalar(-1, torch.int64, device),
            overflows_since_rescale=scalar(0, torch.int64, device),
            consecutive_skips=scalar(0, torch.int32, device),
        )

    def _transition(self, state: FairseqState, bad: Tensor) -> dict[str, Tensor]:
        iteration, scale = state.iteration, state.scale
        wide = widest_float(scale.device)

        overflows = state.overflows_since_rescale
        overflows = torch.where(bad, overflows + 1, overflows)
        steps = iteration - state.last_rescale_iter
        # 0 only in a state saved right after a FloatingPointError; fairseq then divides by 1000.
        share = overflows.to(wide) / torch.where(steps == 0, 1000, steps).to(wide)
        backs_off = bad & (share >= self.tolerance)
        grows = ~bad & ((iteration - state.last_overflow_iter) % self.scale_window == 0)

        lowered = scale / self.scale_factor
        if self.threshold is not None:
            lowered = lowered.clamp(min=self.threshold)
        lowered = torch.where(scale <= self.min_loss_scale, scale, lowered)
        moved = torch.where(grows, scale * self.scale_factor, scale)
        return {
            "scale": torch.where(backs_off, lowered, moved),
            "iteration": iteration + 1,
            "last_overflow_iter": torch.where(bad, iteration, state.last_overflow_iter),
            "last_rescale_iter": torch.where(backs_off | grows, iteration, state.last_rescale_iter),
            "overflows_since_rescale": torch.where(backs_off, 0, overflows),
        }


rule = FairseqScale
_COUNTS = {
    "_iter": Entry("iteration"),
    "_last_overflow_iter": Entry("last_overflow_iter", least=-1),
    "_last_rescale_iter": Entry("last_rescale_iter", least=-1),
    "_overflows_since_rescale": Entry("overflows_since_rescale"),
}
_SETTINGS = ("scale_factor", "scale_window", "tolerance", "threshold", "min_loss_scale")
_FORMAT = Format("fairseq", FairseqScale, {"loss_scale": SCALE, **_COUNTS}, _SETTINGS)


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
        ValueError: `d` is not such a dict, its scale cannot train, or a setting contradicts it.

    Example:
        >>> d = {"loss_scale": 1024.0, "state": {}, "param_groups": []}
        >>> from_state_dict(d, scale_window=256)[1].scale
        tensor(1024.)

    Source of the format: fairseq/optim/fp16_optimizer.py; the names of DynamicLossScaler's
    attributes.
    """
    has_counts = isinstance(d, Mapping) and any(key in d for key in _COUNTS)
    others = _COUNTS if has_counts else ("param_groups",)
    check_dict(d, "fairseq", ("loss_scale", *others), None)
    return _FORMAT.read(d, settings, device)


def to_state_dict(rule: FairseqScale, scaler: FairseqState) -> dict[str, Any]:
    """Syncs with the host. Equal to `vars(optimizer.scaler)` at this point;
    `vars(optimizer.scaler).update(d)` restores it.

    fairseq's FP16Optimizer saves only the scale:
    `{**state_dict_of_the_rest, "loss_scale": d["loss_scale"]}`.

    Args:
        rule, scaler: A `FairseqScale` and its state.

    Returns:
        The attributes as a dict.

    Raises:
        TypeError, ValueError: `rule` is another library's, or the state is stacked.

    Example:
        >>> d = to_state_dict(rule(), rule().init())
        >>> d["loss_scale"], d["_last_overflow_iter"]
        (32768.0, -1)
    """
    return _FORMAT.write(rule, scaler)
