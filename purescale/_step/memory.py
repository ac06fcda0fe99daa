"""The stage `decide_writes`: the memory of the arguments, and what a step may overwrite."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple, Self

from torch import Tensor

from .._optim.optimizer import FlatOptimizer, PlannedStep
from .._optim.optimizer_inputs import OptimizerInputs
from .._step.prepare import PreparedStep
from .._torch import dtensor
from .._torch.donation import can_write_each, pointers_of_each, share_no_memory, storage_pointers
from .._torch.tensor_list import TensorList
from .._torch.tracing import is_on_a_graph
from .._tree import pytree
from .._tree.gradients import Gradients
from .._tree.leaves import is_constant


class ArgumentMemory(NamedTuple):
    """The memory of the arguments, from which results are copied, and by which a write of loss_fn
    into a microbatch is seen.
    """

    # of the storages of the arguments; None while tracing, where they cannot be compared
    pointers: set[int | None] | None
    batch_tensors: list[Tensor]  # those of the microbatches; empty while tracing

    @classmethod
    def of(cls, pointers: Sequence[list[int | None]], batch_tensors: list[Tensor]) -> Self:
        """Return the memory of arguments from their `pointers_of_each`."""
        if not pointers:
            return cls(None, [])
        return cls({None, *itertools.chain.from_iterable(pointers)}, batch_tensors)


class MayWrite(NamedTuple):
    """The arguments that a step may overwrite."""

    params_and_state: bool = False  # the parameters and the state of the optimizer
    buffers: bool = False
    control: bool = False  # scaler, step count, generator and guard


def decide_writes(prepared: PreparedStep) -> tuple[ArgumentMemory, MayWrite]:
    """Return the memory of the arguments, and what the step may overwrite. Without donation the
    state of the optimizer is not in that memory, because nothing writes into it.
    """
    flat_state, options = prepared.flat_state, prepared.options
    inputs = flat_state.optimizer_inputs
    donate = options.donate and not _on_graph(options.optimizer, inputs)
    batch = pytree.all_tensors(list(prepared.microbatches))
    read_only = [*options.clip.tensor_bounds, *batch]
    if donate and flat_state.all_writable:
        others = [*flat_state.buffers.leaves, *flat_state.control.leaves]
        tensors = [*_params_and_state(inputs).tensors, *others]
        pointers = [storage_pointers(tensors), storage_pointers(read_only)]
        if share_no_memory(*pointers):
            memory = ArgumentMemory.of(pointers, batch)
            return memory, MayWrite(params_and_state=True, buffers=True, control=True)
    replaced = _params_and_state(inputs) if donate else inputs.param_list
    buffers = flat_state.buffers.tensor_list
    if not buffers.dense_without_history:
        buffers = TensorList([leaf for leaf in buffers.tensors if not is_constant(leaf)])
    lists = [replaced, buffers]
    control = pytree.all_tensors(flat_state.control.leaves)
    if donate:
        lists.append(TensorList(control))
    else:
        read_only += control
    pointers = pointers_of_each([*[tensor_list.tensors for tensor_list in lists], read_only])
    memory = ArgumentMemory.of(pointers, batch)
    if memory.pointers is not None and not flat_state.params.tensor_list.dense_without_history:
        # Constant buffers, and parameters before a lazy negation was resolved.
        memory.pointers.update(
            storage_pointers([*flat_state.params.leaves, *flat_state.buffers.leaves])
        )
    if not donate:
        return memory, MayWrite()
    params_and_state, buffers_too, control_too = can_write_each(lists, read_only, pointers)
    # A step that is captured in a CUDA graph needs both at fixed addresses, or neither.
    return memory, MayWrite(params_and_state and control_too, buffers_too, control_too)


def decide_writes_by_hand(
    optimizer: FlatOptimizer, planned: PlannedStep, grads: Gradients, read_only: Sequence[Tensor]
) -> tuple[bool, bool]:
    """Return whether a step may overwrite its donated parameters and state, and its gradients."""
    lists = [_params_and_state(planned.inputs), grads.tensor_list]
    if planned.all_writable:
        tensors = [*lists[0].tensors, *lists[1].tensors]
        if share_no_memory(storage_pointers(tensors), storage_pointers(read_only)):
            return True, True
    params_and_state, grads_too = can_write_each(lists, read_only)
    return params_and_state and not _on_graph(optimizer, planned.inputs), grads_too


def _on_graph(optimizer: FlatOptimizer, inputs: OptimizerInputs) -> bool:
    """Return True if a derivative goes through the step, which must then overwrite nothing."""
    return optimizer.differentiable and is_on_a_graph(inputs.params)


def _params_and_state(inputs: OptimizerInputs) -> TensorList:
    """Return the tensors of this rank that a step replaces: parameters and state."""
    if inputs.params_and_state is not None:
        return inputs.params_and_state
    leaves = [*inputs.params, *pytree.flatten(inputs.opt_state)[0]]
    shards = [dtensor.local_shard(leaf, on_graph=False) for leaf in leaves if not is_constant(leaf)]
    return TensorList(shards)
