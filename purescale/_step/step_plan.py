"""The start of a step: its state flat and checked, and what structure and metadata decide about the
update, planned once for states that are alike.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from .._grads.clip import check_ordered
from .._loss_scale.scaling import check_scale
from .._optim.step_inputs import StepInputs, flatten_together, step_inputs
from .._optim.updater import can_keep_plan, keep_plan, known_plan
from .._step.train_state import FlatState, StepOptions, TrainState
from .._torch.tensor_list import TensorList
from .._torch.tracing import host_reads
from .._tree import tree as _tree
from .._tree.gradients import Gradients


class Start(NamedTuple):
    """The state of a step, flat and checked, and the plan of its update."""

    flat: FlatState
    inputs: StepInputs  # of the optimizer
    update: Any  # what the optimizer planned
    others: list[Tensor]  # scale, count, generator and guard
    host_reads: bool  # known of all tensors of the state

    @property
    def tensors(self) -> list[Tensor]:
        """All leaves of a state that is dense."""
        flat = self.flat
        return [*flat.params.leaves, *flat.buffers.leaves, *flat.opt_state.leaves, *self.others]


def start_step(state: TrainState, options: StepOptions) -> Start:
    """Return the start of a step. Refuse a state that does not fit the optimizer."""
    optimizer, others = options.optimizer, (state.step, state.rng, state.guard)
    trees = state.params, state.buffers, state.scaler, state.opt_state
    if known := known_plan(optimizer, (*trees, others)):
        (params, buffers, scaler, opt_state, of_others), planned = known
        inputs = planned.inputs(params, Gradients(TensorList([]), [], False), opt_state)
        update, reads = planned.update, planned.on_cpu and host_reads()
        numbers = [*scaler.leaves, *of_others.leaves]
    else:
        params, buffers, scaler, opt_state = flatten_together(trees[:3], state.opt_state)
        _check(state, options, params)
        inputs = step_inputs(optimizer, params, opt_state)
        update, reads = optimizer.plan(inputs), False
        numbers = _tree.all_tensors((state.scaler, others))
        if can_keep_plan(optimizer, inputs):
            flat_trees = params, buffers, scaler, opt_state, _tree.flatten_once(others)
            keep_plan(optimizer, flat_trees, inputs, update)
    flat = TrainState(params, buffers, opt_state, scaler, *others)
    return Start(flat, inputs, update, numbers, reads)


def _check(state: TrainState, options: StepOptions, params: _tree.FlatTree) -> None:
    """Refuse parameters of the wrong kind, on another device than the scale, or without order where
    they are clipped by value.
    """
    _tree.check_parameters(params, "state.params")
    leaves, scale = params.leaves, state.scaler.scale
    check_scale(scale, state.params, leaves, "state.params", params.tensor_list)
    if options.clip.value is not None:
        check_ordered(state.params, leaves, "params")
