"""The settings of `train_step`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from torch import Tensor

from .._distributed.process_group import Group
from .._grads.accumulate import OnNonfinite, check_on_nonfinite
from .._grads.clip import ClipOptions
from .._loss_scale.rules import Rule, RuleTraits, StaticScale
from .._optim.optimizer import FlatOptimizer
from .._step.forward_backward import LossFn
from .._step.spike_guard import Guard
from .._torch.tracing import refuse_in_trace_or_capture
from .._tree.scalars import is_whole, short_repr

BNUpdate = Literal["each", "window"]


class TrainStepOptions(NamedTuple):
    """The settings of `train_step`: those of clipping in one record, and what is known of the rule.
    `check_options` refuses what does not go together.
    """

    loss_fn: LossFn
    optimizer: FlatOptimizer
    rule: Rule[Any]
    clip: ClipOptions
    weight_fn: Callable[[Any], float | Tensor] | None
    on_nonfinite: OnNonfinite
    bn_update: BNUpdate
    group: Group | None
    max_retries: int
    donate: bool
    guard: Guard[Any] | None
    window_size: int | None  # of a full window
    rule_traits: RuleTraits

    @property
    def drops_microbatches(self) -> bool:
        """True if an overflow drops its microbatch; False if it skips the step."""
        return self.on_nonfinite == "drop_microbatch"

    @property
    def measures_microbatches(self) -> bool:
        """True if each microbatch of several is measured; False if the mean alone is."""
        return self.drops_microbatches or self.max_retries > 0

    @property
    def agreed_settings(self) -> dict[str, Any]:
        """Return by name what all ranks of a group must have alike."""
        same = ("optimizer", "rule", "guard", "on_nonfinite", "bn_update")
        return {
            **{name: getattr(self, name) for name in (*same, "max_retries", "window_size")},
            **self.clip._asdict(),
            # Its values may be of a rank's data, so only whether there is one must agree.
            "weight_fn": None if self.weight_fn is None else "a function",
        }


def check_options(options: TrainStepOptions) -> None:
    """Refuse settings that are out of range or do not go together."""
    rule, max_retries = options.rule, options.max_retries
    check_on_nonfinite(options.on_nonfinite)
    if options.bn_update not in ("each", "window"):
        raise ValueError(f"bn_update must be 'each' or 'window', got {options.bn_update!r}.")
    if not is_whole(max_retries) or max_retries < 0:
        raise ValueError(
            f"max_retries must be a whole number, 0 or more, got {short_repr(max_retries)}."
        )
    window_size = options.window_size
    if window_size is not None and not (is_whole(window_size) and window_size > 0):
        raise ValueError(
            f"window_size must be a whole number above 0 or None, got {short_repr(window_size)}."
        )
    if max_retries and isinstance(rule, StaticScale):
        raise ValueError(
            f"max_retries={max_retries} with {rule!r}, whose scale never moves: every retry would "
            "overflow again. Fix: DynamicScale(), or max_retries=0."
        )
    if max_retries:
        refuse_in_trace_or_capture(
            "max_retries reads a flag on the host, which a traced or captured step cannot do.",
            "max_retries=0 under torch.compile, torch.func and capture; the next step uses the "
            "lower scale anyway.",
        )
