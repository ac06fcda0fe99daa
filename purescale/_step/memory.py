"""The memory that a step may write into, decided once, before any work."""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor

from .._optim.step_inputs import StepInputs
from .._step.step_options import FlatState
from .._step.train_state import TrainState
from .._torch.donation import can_write_each, storage_pointers
from .._torch.tracing import traced
from .._tree import tree as _tree
from .._tree.leaves import is_constant


class Memory(NamedTuple):
    """The memory that a step may write into.

    What a loss returns is copied if it shares memory with what the step was given, so the answers
    stay right until the step ends.
    """

    # the storages of what the step was given; None while tracing, where they cannot be compared
    given: Set[int | None] | None
    optimizer: bool = False  # parameters and the state of the optimizer may be overwritten
    buffers: bool = False
    rest: bool = False  # scaler, step count, generator and guard


def memory_of_step(
    state: TrainState,
    flat: FlatState,
    inputs: StepInputs,
    microbatches: list[Any],
    bounds: Sequence[Tensor],
    *,
    donate: bool,
) -> Memory:
    """Return the memory of one step. `bounds`: the tensors of its clipping, which are read last."""
    others = (*flat.scaler.leaves, state.step, state.rng, *_tree.all_tensors(state.guard))
    rest = [other for other in others if isinstance(other, Tensor)]
    buffers = flat.buffers.leaves
    if not flat.buffers.dense_off_graph:
        buffers = [leaf for leaf in buffers if not is_constant(leaf)]
    read_only = [] if traced() else [*_tree.all_tensors(microbatches), *bounds]
    # Without donation nothing is written into the state of the optimizer.
    lists = [*inputs.replaced, buffers, rest] if donate else [inputs.params, buffers, rest]
    pointers = [] if traced() else list(map(storage_pointers, [*lists, read_only]))
    given = {None, *chain.from_iterable(pointers)} if pointers else None
    if not donate:
        return Memory(given)
    known = [*[inputs.dense_off_graph] * 2, flat.buffers.dense_off_graph, False]
    of_params, of_numbers, of_buffers, of_rest = can_write_each(lists, read_only, known, pointers)
    return Memory(given, of_params and of_numbers, of_buffers, of_rest)


def can_replace(
    inputs: StepInputs, read_only: Sequence[Tensor], *, grads: bool = False
) -> tuple[bool, bool]:
    """Return True if a step may overwrite parameters and state, and True if it may overwrite
    gradients, which are compared only if `grads`.
    """
    lists = [*inputs.replaced, inputs.grads.tensors]
    if not grads:
        lists, read_only = lists[:-1], [*read_only, *lists[-1]]
    allowed = can_write_each(lists, read_only, [inputs.dense_off_graph] * len(lists))
    return allowed[0] and allowed[1], grads and allowed[2]
