"""The start of a step: its state flat and checked, and what structure and metadata decide about it,
planned once for states that are alike.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .._grads.clip import check_ordered
from .._loss_scale.scaling import check_scale
from .._optim.optimizer import PlannedStep
from .._optim.step_inputs import flatten_opt_state, make_step_inputs
from .._step.train_state import FlatState, StepOptions, TrainState
from .._torch.tracing import current_eager_mode
from .._tree import pytree
from .._tree.matching import check_parameters
from .._tree.pytree import FlatTree


class Start(NamedTuple):
    """The state of a step, flat and checked, and the planned step of its optimizer."""

    flat_state: FlatState
    control_leaves: list[Tensor]  # those of scaler, step count, generator and guard
    planned: PlannedStep


def start_step(state: TrainState, options: StepOptions) -> Start:
    """Return the start of a step. Refuse a state that does not fit the optimizer."""
    optimizer, step_rng_guard = options.optimizer, (state.step, state.rng, state.guard)

    eager_mode = current_eager_mode()
    arguments = state.params, state.opt_state, state.buffers, state.scaler, step_rng_guard
    planned = optimizer.find_step(eager_mode, arguments)
    if planned is None:
        trees = state.params, state.buffers, state.scaler
        params, buffers, scaler = map(FlatTree.of, trees)
        opt_state = flatten_opt_state(state.opt_state)
        _check(state, options, params)
        inputs = make_step_inputs(optimizer, params, opt_state)
        flat_trees = [params, opt_state, buffers, scaler, FlatTree.of(step_rng_guard)]
        planned = optimizer.plan_step(eager_mode, flat_trees, inputs)
    flat_state = FlatState(planned.params, *planned.others)
    control_leaves = [*flat_state.scaler.leaves, *flat_state.step_rng_guard.leaves]
    if not pytree.are_tensors(control_leaves):
        control_leaves = pytree.all_tensors(control_leaves)
    return Start(flat_state, control_leaves, planned)


def _check(state: TrainState, options: StepOptions, params: FlatTree) -> None:
    """Refuse parameters of the wrong kind, on another device than the scale, or without order where
    they are clipped by value.
    """
    check_parameters(params, "state.params")
    leaves, scale = params.leaves, state.scaler.scale
    check_scale(scale, state.params, leaves, "state.params", params.tensor_list)
    if options.clip.clip_value is not None:
        check_ordered(state.params, leaves, "params")
