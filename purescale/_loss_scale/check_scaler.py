"""A check that training still moves, from the state of a rule."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from .._loss_scale.rules import HasScale, StaticScale
from .._tree import scalars


def check_scaler(
    scaler: HasScale,
    rule: Any,
    max_skips: int | None = None,
    loss: Tensor | float | None = None,
) -> None:
    """Raise `FloatingPointError` if training has stopped moving. Syncs with the host: call it now
    and then, not in every step.

    Args:
        scaler: The state of one scaler.
        rule: Its rule.
        max_skips: How many steps in a row may be skipped for an overflow or a loss that is not
            finite, counted by the field `consecutive_skips` of the state. By default any number.
            Give it for a rule that never lowers its scale, such as StaticScale.
        loss: The loss of the last step, `info.loss`. It only makes the error say whether the loss
            itself is inf or NaN or the gradients overflow.

    Raises:
        FloatingPointError: The scale is not positive and finite; the last step overflowed with the
            scale at `rule.min_scale`; the scale fell to a `min_scale` below 1, where half-precision
            gradients are lost, even if the last step did not overflow; or more than `max_skips`
            steps in a row overflowed.
        TypeError: `scaler` is not the state of one scaler, or does not count skips for `max_skips`.

    Example:
        >>> from purescale import DynamicScale
        >>> rule = DynamicScale()
        >>> check_scaler(rule.init(), rule, max_skips=10)

    Source of the rule: fairseq's FloatingPointError at min_loss_scale, DeepSpeed's
    raise_error_at_min_scale.
    """
    max_skips = None if max_skips is None else scalars.checked_whole("max_skips", max_skips)
    _check_state_and_loss(scaler, max_skips, loss)
    scale = float(scaler.scale)
    skips = int(getattr(scaler, "consecutive_skips", 0))
    floor = getattr(rule, "min_scale", None)
    if not (math.isfinite(scale) and scale > 0):
        raise FloatingPointError(
            f"the loss scale is {scale}, so no step can be taken. Likely cause: a damaged state. "
            "Fix: `scaler = rule.init(device)`."
        )
    if skips and floor is not None and scale <= floor:
        raise FloatingPointError(
            f"gradients overflow at the smallest scale, {scale} (min_scale), {skips} step(s) in a "
            "row. No scale helps: the loss or its gradients are inf or NaN by themselves. "
            f"{_where_to_look(loss)}"
        )
    # min(): a rule that starts at its smallest scale has not fallen
    if floor is not None and scale <= floor and scale < min(1.0, float(rule.init("cpu").scale)):
        raise FloatingPointError(
            f"the loss scale is at the smallest that the rule allows, {scale} (min_scale), which "
            "makes float16 gradients 0. Fix: look at the data and the learning rate, then `scaler "
            "= rule.init(device)`."
        )
    if max_skips is not None and skips > max_skips:
        raise FloatingPointError(
            f"{skips} steps in a row were skipped, more than max_skips={max_skips}; the scale is "
            f"{scale}{', which never moves' if isinstance(rule, StaticScale) else ''}. "
            f"{_where_to_look(loss, max(scale, 2.0**-126))}"
        )


def _check_state_and_loss(scaler: Any, max_skips: Any, loss: Any) -> None:
    """Refuse a state that is not that of one scaler, and a loss that is not that of one step."""
    if not isinstance(getattr(scaler, "scale", None), Tensor) or scaler.scale.ndim:
        raise TypeError(
            "check_scaler takes the state of one scaler, its `scale` a 0-d tensor, got "
            f"{scalars.short_repr(scaler)}. Fix: `check_scaler(state.scaler, rule)`."
        )
    if max_skips is not None and not hasattr(scaler, "consecutive_skips"):
        raise TypeError(
            f"max_skips={max_skips} with a {type(scaler).__name__}, which does not count skips. "
            "Fix: a field `consecutive_skips`, an int32 tensor that `update` sets."
        )
    is_one_number = isinstance(loss, float | int) or (
        isinstance(loss, Tensor) and loss.numel() == 1 and not loss.is_complex()
    )
    if loss is not None and not is_one_number:
        raise TypeError(
            f"loss must be that of one step, a number or a tensor with one element, got "
            f"{scalars.short_repr(loss)}. Fix: loss=info.loss; for stacked infos `info.loss[-1]`."
        )


def _where_to_look(loss: Any, lower: float | None = None) -> str:
    """Return advice for a run of skips. `lower`: a scale to start from, if a lower one may help."""
    if loss is not None and not math.isfinite(loss):
        within = "" if lower is None else " A lower scale helps only if the loss holds a gradient "
        within += within and "of its own, scaled by the scale: DynamicScale() then lowers it."
        return (
            f"The loss itself is {float(loss)}. Look at the data, the learning rate, and whether "
            "parameters are finite; `forward_report(apply, params, buffers, *inputs).first` names "
            f"the module in which it arose.{within}"
        )
    look = "look at the data, the learning rate, a division or log of 0"
    if lower is not None:
        look += f"; at the start of a run fewer are skipped with DynamicScale(init_scale={lower!r})"
    if loss is not None:
        return (
            f"The loss is finite, {float(loss):.4g}, so its gradients overflow: `grad_report` "
            f"names them. Then {look}."
        )
    return (
        "First check whether the loss itself is inf or NaN: `check_scaler(..., loss=info.loss)`. "
        f"If it is finite, {look}."
    )
