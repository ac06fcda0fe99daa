"""The memory that a step may write into, decided once, before any work."""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor

from .._optim.protocol import Conditional
from .._optim.step_inputs import StepInputs
from .._step.step_options import FlatState, StepOptions
from .._step.train_state import TrainState
from .._torch.donation import can_write_each, storage_pointers
from .._torch.tracing import host_can_read, is_on_a_graph, traced
from .._tree import tree as _tree
from .._tree.leaves import is_constant


class Memory(NamedTuple):
    """The memory that a step may write into.

    What a loss returns is copied if it shares memory with what the step was given, so the answers
    stay right until the step ends.
    """

    # the storages of what the step was given; None while tracing, where they cannot be compared
    given: Set[int | None] | None
    microbatches: list[Tensor]  # in them; none while tracing
    optimizer: bool = False  # parameters and the state of the optimizer may be overwritten
    buffers: bool = False
    numbers: bool = False  # scaler, step count, generator and guard


def memory_of_step(
    options: StepOptions,
    state: TrainState,
    flat: FlatState,
    inputs: StepInputs,
    microbatches: list[Any],
) -> Memory:
    """Return the memory of one step."""
    donate = options.donate and not _on_graph(options.optimizer, inputs)
    is_traced = traced()
    if is_traced and not donate:
        return Memory(None, [])
    # Without donation nothing is written into the state of the optimizer.
    tensors, numbers = inputs.replaced if donate else (inputs.params, [])
    numbers = [*numbers, *_tree.all_tensors((state.scaler, state.step, state.rng, state.guard))]
    buffers = flat.buffers.leaves
    if not flat.buffers.dense_off_graph:
        buffers = [leaf for leaf in buffers if not is_constant(leaf)]
    read_only = list(options.clip.tensor_bounds)
    batch = [] if is_traced else _tree.all_tensors(list(microbatches))
    read_only += batch
    lists, known = [tensors, buffers], [inputs.dense_off_graph, flat.buffers.dense_off_graph]
    # A step that the host does not see may be captured in a CUDA graph, which needs its numbers at
    # fixed addresses.
    captured = donate and not host_can_read([flat.scaler.tree.scale], inputs.params)
    if captured:
        lists.append(numbers)
        known.append(False)
    else:
        read_only += numbers
    pointers = [] if is_traced else list(map(storage_pointers, [*lists, read_only]))
    given = {None, *chain.from_iterable(pointers)} if pointers else None
    if given is not None and not flat.params.dense_off_graph:
        # Constant buffers, and parameters before a lazy negation was resolved.
        given.update(storage_pointers([*flat.params.leaves, *flat.buffers.leaves]))
    if not donate:
        return Memory(given, batch)
    allowed = can_write_each(lists, read_only, known, pointers)
    of_numbers = allowed[2] if captured else True
    return Memory(given, batch, allowed[0] and of_numbers, allowed[1], captured and of_numbers)


def can_replace(
    optimizer: Conditional, inputs: StepInputs, read_only: Sequence[Tensor], *, grads: bool = False
) -> tuple[bool, bool]:
    """Return True if a step may overwrite parameters and state, and True if it may overwrite the
    gradients, which needs `grads` too.
    """
    lists = [*inputs.replaced, inputs.grads.tensors]
    allowed = can_write_each(lists, read_only, [inputs.dense_off_graph] * 3)
    replaced = allowed[0] and allowed[1] and not _on_graph(optimizer, inputs)
    return replaced, grads and allowed[2]


def _on_graph(optimizer: Conditional, inputs: StepInputs) -> bool:
    """Return True if a derivative goes through the step, which must then overwrite nothing."""
    return optimizer.differentiable and is_on_a_graph(list(inputs.named_params.values()))
