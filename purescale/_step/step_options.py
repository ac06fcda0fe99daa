"""The settings of a step in one frozen record, and what is refused as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from torch import Tensor

from .._distributed.process_group import Group
from .._grads.accumulate import OnNonfinite, check_on_nonfinite
from .._grads.clip import Clip
from .._loss_scale.rule_protocol import Rule
from .._loss_scale.rules import StaticScale
from .._optim.protocol import Updater
from .._step.spike_guard import Guard
from .._step.value_and_grad import LossFn
from .._torch.tracing import refuse_in_a_trace
from .._tree.scalars import is_whole, short_repr
from .._tree.tree import FlatTree

BNUpdate = Literal["each", "window"]


class FlatState(NamedTuple):
    """The parts of a state that the stages need flat, flattened once."""

    params: FlatTree
    buffers: FlatTree
    scaler: FlatTree
    opt_state: FlatTree


@dataclasses.dataclass(frozen=True, eq=False)
class StepOptions:
    """The arguments of `train_step` besides its state and its microbatches."""

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
    unroll: bool = True  # False: the microbatches of a compiled window share their code


def check_options(settings: Mapping[str, Any]) -> None:
    """Refuse settings that are out of range or do not go together."""
    rule, max_retries = settings["rule"], settings["max_retries"]
    check_on_nonfinite(settings["on_nonfinite"])
    if settings["bn_update"] not in ("each", "window"):
        raise ValueError(f"bn_update must be 'each' or 'window', got {settings['bn_update']!r}.")
    if not isinstance(settings["unroll"], bool):
        raise TypeError(f"unroll must be True or False, got {short_repr(settings['unroll'])}.")
    if not is_whole(max_retries) or max_retries < 0:
        raise ValueError(
            f"max_retries must be a whole number, 0 or more, got {short_repr(max_retries)}."
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
