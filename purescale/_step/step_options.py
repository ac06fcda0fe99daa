"""The settings of a step in one frozen record."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from torch import Tensor

from .._grads.accumulate import OnNonfinite
from .._grads.clip import Clip
from .._loss_scale.rule_protocol import Rule
from .._optim.protocol import Conditional
from .._step.spike_guard import Guard
from .._step.value_and_grad import LossFn
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
    optimizer: Conditional
    rule: Rule[Any]
    clip: Clip
    weight_fn: Callable[[Any], float | Tensor] | None = None
    on_nonfinite: OnNonfinite = "drop_window"
    bn_update: BNUpdate = "each"
    group: Any = None
    max_retries: int = 0
    donate: bool = False
    takes_amax: bool = False  # the rule uses the largest gradient
    guard: Guard[Any] | None = None
    unroll: bool = True  # False: the microbatches of a compiled window share their code
