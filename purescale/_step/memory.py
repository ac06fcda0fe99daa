"""The memory that a step may overwrite or share, decided once, before any work."""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor

from .._optim.opt_state import OptState, scalars_of
from .._optim.step_inputs import StepInputs
from .._optim.updater import Updater
from .._step.train_state import FlatState, StepOptions
from .._torch import dtensor
from .._torch.donation import can_write_each, pointers_of_each, storage_pointers
from .._torch.tensor_list import TensorList
from .._torch.tracing import is_on_a_graph
from .._tree import tree as _tree
from .._tree.leaves import is_constant


class Memory(NamedTuple):
    """The memory that a step may overwrite, and that which its results must not share.

    What a loss returns is copied if it shares memory with an argument of the step, so the answers
    stay right until the step ends.
    """

    # the storages of the step's arguments; None while tracing, where they cannot be compared
    arguments: Set[int | None] | None
    microbatches: list[Tensor]  # the tensors in them; empty while tracing
    may_write_optimizer: bool = False  # parameters and the state of the optimizer
    may_write_buffers: bool = False
    may_write_others: bool = False  # scaler, step count, generator and guard


def memory_of_step(
    options: StepOptions,
    flat: FlatState,
    inputs: StepInputs,
    microbatches: list[Any],
) -> Memory:
    """Return the memory of one step. One that is captured in a CUDA graph needs it all at
    fixed addresses, so either all of a donated state is overwritten or nothing.
    """
    donate = options.donate and not _on_graph(options.optimizer, inputs)
    # Without donation nothing is written into the state of the optimizer.
    replaced, numbers = _replaced(inputs) if donate else (inputs.param_list, [])
    others = [
        *numbers,
        *_tree.all_tensors((flat.scaler.tree, flat.step, flat.rng, flat.guard)),
    ]
    buffers = flat.buffers.tensor_list
    if not buffers.dense_off_graph:
        buffers = TensorList([leaf for leaf in buffers.tensors if not is_constant(leaf)])
    read_only = list(options.clip.tensor_bounds)
    batch = _tree.all_tensors(list(microbatches))
    read_only += batch
    lists = [replaced, buffers]
    if donate:
        lists.append(TensorList(others))
    else:
        read_only += others
    pointers = pointers_of_each([*[some.tensors for some in lists], read_only])
    arguments = {None, *chain.from_iterable(pointers)} if pointers else None
    if arguments is not None and not flat.params.tensor_list.dense_off_graph:
        # Constant buffers, and parameters before a lazy negation was resolved.
        arguments.update(storage_pointers([*flat.params.leaves, *flat.buffers.leaves]))
    watched = batch if pointers else []
    if not donate:
        return Memory(arguments, watched)
    allowed = can_write_each(lists, read_only, pointers)
    return Memory(arguments, watched, allowed[0] and allowed[2], allowed[1], allowed[2])


NO_MEMORY = Memory(None, [])


def donated_memory(
    optimizer: Updater, inputs: StepInputs, read_only: Sequence[Tensor]
) -> tuple[Memory, bool]:
    """Return the memory of a step over given gradients, and True if these may be overwritten."""
    replaced, numbers = _replaced(inputs)
    lists = [replaced, TensorList(numbers), inputs.grads.tensor_list]
    allowed = can_write_each(lists, read_only)
    in_place = allowed[0] and allowed[1] and not _on_graph(optimizer, inputs)
    return Memory(None, [], may_write_optimizer=in_place), allowed[2]


def _on_graph(optimizer: Updater, inputs: StepInputs) -> bool:
    """Return True if a derivative goes through the step, which must then overwrite nothing."""
    return optimizer.differentiable and is_on_a_graph(inputs.param_list.tensors)


def _replaced(inputs: StepInputs) -> tuple[TensorList, list[Tensor]]:
    """Return the tensors of this rank that a step replaces: parameters and slots, and the numbers
    in the state of a class of torch.
    """
    state = inputs.opt_state
    if inputs.targets is None:
        leaves = [*inputs.params.values(), *_tree.flatten(state)[0]]
        shards = [dtensor.shard(leaf, on_graph=False) for leaf in leaves if not is_constant(leaf)]
        return TensorList(shards), []
    numbers = [state.applied, *scalars_of(state)] if isinstance(state, OptState) else []
    return inputs.targets, numbers
