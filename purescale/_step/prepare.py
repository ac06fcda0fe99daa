"""The start of a step: its state flat and checked, and what structure and metadata decide about it,
once for states that are alike.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .._grads.clip import refuse_complex
from .._grads.measure import StatsOptions
from .._loss_scale.scaling import check_device_of_scale
from .._optim.optimizer_inputs import OptimizerInputs, make_optimizer_inputs
from .._step.options import TrainStepOptions
from .._step.train_state import TrainState
from .._step.window_result import MicrobatchWeights
from .._torch.tracing import current_context
from .._tree.matching import check_parameters
from .._tree.pytree import FlatTree


class FlatState(NamedTuple):
    """The state of a step, flat and checked, and the inputs of its optimizer."""

    train_state: TrainState
    params: FlatTree
    buffers: FlatTree
    control: FlatTree  # scaler, step count, generator and guard, as a tuple
    optimizer_inputs: OptimizerInputs
    all_writable: bool  # as in `PlannedStep`
    all_readable: bool


class PreparedStep(NamedTuple):
    """The arguments of a step, checked and planned. Each stage reads them, none changes them."""

    flat_state: FlatState
    options: TrainStepOptions
    microbatches: list[Any]
    weights: MicrobatchWeights

    @property
    def stats_options(self) -> StatsOptions:
        """The measurements of the mean."""
        return StatsOptions(
            self.options.clip.norm_type,
            amax=self.options.rule_traits.takes_amax,
            nan_norm_is_inf=len(self.microbatches) > 1 or self.options.group is not None,
            all_readable=self.flat_state.all_readable,
        )


def prepare_state(state: TrainState, options: TrainStepOptions) -> FlatState:
    """Return the flat state of a step. Refuse a state that does not fit the optimizer."""
    optimizer, context = options.optimizer, current_context()
    control = state.scaler, state.step, state.rng, state.guard
    trees = state.params, state.opt_state, state.buffers, control
    planned = optimizer.find_planned_step(context, trees)
    if planned is None:
        flat_trees = list(map(FlatTree.of, trees))
        _check_params(state, flat_trees[0])
        inputs = make_optimizer_inputs(optimizer, context, *flat_trees[:2])
        planned = optimizer.plan_step(flat_trees, inputs)
    flat_params, _, flat_buffers, flat_control = planned.flat_trees
    if options.clip.clip_value is not None and not flat_params.tensor_list.dense_without_history:
        refuse_complex(state.params, flat_params.leaves, "params")
    return FlatState(
        train_state=state,
        params=flat_params,
        buffers=flat_buffers,
        control=flat_control,
        optimizer_inputs=planned.inputs,
        all_writable=planned.all_writable,
        all_readable=planned.all_readable,
    )


def _check_params(state: TrainState, flat_params: FlatTree) -> None:
    """Refuse parameters of the wrong kind, or on another device than the scale. States for which a
    plan is found are not checked again: what depends on a setting is not checked here.
    """
    check_parameters(flat_params, "state.params")
    leaves, scale = flat_params.leaves, state.scaler.scale
    check_device_of_scale(scale, state.params, leaves, "state.params", flat_params.tensor_list)
