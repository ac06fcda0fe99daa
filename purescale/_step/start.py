"""The start of a step: its state flat and checked, and what structure and metadata decide about it,
planned once for states that are alike.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .._grads.clip import check_ordered
from .._loss_scale.scaling import check_scale
from .._optim.planned import PlannedStep, plan_step
from .._optim.step_inputs import StepInputs, flatten_together, step_inputs
from .._step.train_state import FlatState, StepOptions, TrainState
from .._tree import tree as _tree
from .._tree.tree import FlatTree


class Start(NamedTuple):
    """The state of a step, flat and checked, and the planned step of its optimizer."""

    flat: FlatState
    others: list[Tensor]  # scaler, count, generator and guard
    planned: PlannedStep


def start_step(state: TrainState, options: StepOptions) -> Start:
    """Return the start of a step. Refuse a state that does not fit the optimizer."""
    optimizer, others = options.optimizer, (state.step, state.rng, state.guard)

    def check() -> tuple[list[FlatTree], StepInputs]:
        trees = state.params, state.buffers, state.scaler
        params, buffers, scaler, opt_state = flatten_together(trees, state.opt_state)
        _check(state, options, params)
        inputs = step_inputs(optimizer, params, opt_state)
        return [params, opt_state, buffers, scaler, _tree.flatten_once(others)], inputs

    trees = state.params, state.opt_state, state.buffers, state.scaler, others
    planned = plan_step(optimizer, trees, check)
    params, opt_state, buffers, scaler, flat_others = planned.trees
    tensors = [*scaler.leaves, *flat_others.leaves]
    if not planned.was_found:
        tensors = _tree.all_tensors(tensors)
    flat = TrainState(params, buffers, opt_state, scaler, *others)
    return Start(flat, tensors, planned)


def _check(state: TrainState, options: StepOptions, params: FlatTree) -> None:
    """Refuse parameters of the wrong kind, on another device than the scale, or without order where
    they are clipped by value.
    """
    _tree.check_parameters(params, "state.params")
    leaves, scale = params.leaves, state.scaler.scale
    check_scale(scale, state.params, leaves, "state.params", params.tensor_list)
    if options.clip.clip_value is not None:
        check_ordered(state.params, leaves, "params")
