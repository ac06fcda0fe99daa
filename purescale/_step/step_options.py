"""The settings of a step in one frozen record, and what is refused as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

from .._distributed.process_group import Group
from .._grads.accumulate import OnNonfinite, check_on_nonfinite
from .._grads.clip import Clip, check_clip
from .._loss_scale.rules import Rule, StaticScale, takes_amax
from .._optim.protocol import Optimizer
from .._optim.updater import Updater, as_updater
from .._step.spike_guard import Guard
from .._step.train_state import check_parts
from .._step.value_and_grad import LossFn
from .._torch.tracing import refuse_in_a_trace
from .._tree.scalars import is_whole, short_repr

BNUpdate = Literal["each", "window"]


@dataclasses.dataclass(frozen=True, eq=False)
class StepOptions:
    """The arguments of `train_step` besides its state and its microbatches, checked by
    `step_options`.
    """

    loss_fn: LossFn
    optimizer: Updater
    rule: Rule[Any]
    clip: Clip
    weight_fn: Callable[[Any], float | Tensor] | None = None
    on_nonfinite: OnNonfinite = "drop_window"
    bn_update: BNUpdate = "each"
    group: Group | None = None
    max_retries: int = 0
    donate: bool = False
    takes_amax: bool = False  # the rule uses the largest gradient
    guard: Guard[Any] | None = None
    window_size: int | None = None  # of a full window

    def compared(self) -> dict[str, Any]:
        """Return by name what all ranks of a group must have alike."""
        same = ("optimizer", "rule", "guard", "on_nonfinite", "bn_update")
        return {
            **{name: getattr(self, name) for name in (*same, "max_retries", "window_size")},
            "max_norm": self.clip.max_norm,
            "clip_value": self.clip.value,
            "norm_type": self.clip.norm_type,
            # Its values may be of a rank's data, so only whether there is one must agree.
            "weight_fn": None if self.weight_fn is None else "a function",
        }


def step_options(
    optimizer: Optimizer,
    rule: Rule[Any],
    max_norm: float | Tensor | None,
    clip_value: float | Tensor | None,
    norm_type: float,
    **settings: Any,
) -> StepOptions:
    """Return the settings of a step. Refuse those that are out of range or do not go together."""
    check_parts(optimizer, rule)
    options = StepOptions(
        optimizer=as_updater(optimizer),
        rule=rule,
        clip=check_clip(max_norm, clip_value, norm_type),
        takes_amax=takes_amax(rule),
        **settings,
    )
    _check(options)
    return options


def _check(options: StepOptions) -> None:
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
        refuse_in_a_trace(
            "max_retries reads a flag on the host, which a traced step cannot do.",
            "max_retries=0 under torch.compile and torch.func; the next step uses the lower scale "
            "anyway.",
        )
