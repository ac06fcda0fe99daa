"""The step by torch's fused kernels in a trace, in a graph of `jit` or of Dynamo, of more tensors
than `may_be_opaque` leaves to a compiler: operator by operator, they would take minutes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._optim.opt_state import OptState, with_step_counted
from .._optim.step_inputs import StepInputs
from .._torch.operators import define
from .._torch.tensor_list import TensorList
from .._torch.tracing import host_can_read, may_be_opaque
from .._torch_optim.in_state import copied_number, map_numbers
from .._torch_optim.kernel_step import (
    KernelOrFormulaPlan,
    KernelStep,
    add_to_counts,
    slots_follow_params,
    writable_leaves,
)
from .._torch_optim.kernels import (
    BOOLEAN_SETTINGS,
    FUSED_KERNELS,
    FusedKernel,
    KernelCall,
    keyword_arguments,
)
from .._torch_optim.settings import OptimizerConfig, ParamGroup, StepSettings
from .._torch_optim.slots import (
    STEP,
    SlotLists,
    slot_lists_like,
    slot_lists_of,
    values_of,
    with_slot_lists,
)
from .._tree.gradients import Gradients, Pending


class _KernelStepInTrace(KernelStep):
    """The step of a class of torch.optim by torch's fused kernel, in a trace."""

    kernel: FusedKernel

    def supports_step(self, inputs: StepInputs, grads: Gradients, skip: Tensor | None) -> bool:
        """Return True if the kernel takes the values of this step, and one opaque operator may
        stand for it.
        """
        if not super().supports_step(inputs, grads, skip):
            return False
        numbers = [number for each in inputs.step_settings for number in each.values()]
        scalars = [n for n in (*numbers, *grads.pending) if isinstance(n, Tensor)]
        slots = values_of(slot_lists_of(inputs.opt_state, inputs.param_structure))
        return may_be_opaque(inputs.params, grads.tensors, slots, scalars)


class KernelStepInJit(_KernelStepInTrace):
    """The step in a graph of operators, as `jit` records it: each launch is one operator."""

    def supports_step(self, inputs: StepInputs, grads: Gradients, skip: Tensor | None) -> bool:
        """Return True if the operator takes the values of this step. It returns slots as they are
        laid out, and the kernel walks them as the parameter.
        """
        if not super().supports_step(inputs, grads, skip):
            return False
        leaves, _ = inputs.leaves_and_state_structure()
        pairs = inputs.plan.pairs_to_lay_out
        return slots_follow_params([(leaves[n], leaves[slot]) for n, slot in pairs])

    def __call__(
        self,
        inputs: StepInputs,
        grads: Gradients,
        skip: Tensor | None,
        *,
        in_place: bool,
    ) -> tuple[list[Tensor], OptState]:
        """Return parameters and state after the step, unless it is skipped."""
        inputs = inputs.with_state(with_step_counted(inputs.opt_state, skip))
        launches = inputs.plan.launches
        leaves, structure = inputs.leaves_and_state_structure()
        num_params, stepped = len(inputs.params), list(leaves)
        for launch in launches:
            add_to_counts(stepped, launch.count_indices, skip)
        operands = stepped, inputs.opt_state.applied, grads, inputs.step_settings
        for launch, call in self.make_calls(launches, *operands):
            new = torch.ops.purescale.fused_update(*_operator_arguments(self.kernel, call, skip))
            for index, tensor in zip(
                itertools.chain(*launch.param_and_slot_indices), new, strict=True
            ):
                stepped[index] = tensor
        return stepped[:num_params], structure.unflatten(stepped[num_params:])


class KernelStepInDynamo(_KernelStepInTrace):
    """The step in a graph of Dynamo: one function for all launches, which Dynamo does not trace. It
    plans them in the compiled step.
    """

    def __init__(self, config: OptimizerConfig, kernel: FusedKernel) -> None:
        super().__init__(config, kernel)
        self._opaque = config.opaque_in_dynamo(
            self._make_step, lambda: torch.compiler.allow_in_graph
        )

    def plan(self, inputs: StepInputs, groups: list[ParamGroup]) -> KernelOrFormulaPlan:
        """Return the plan of a step, without launches."""
        return KernelOrFormulaPlan(groups, self)

    def __call__(
        self,
        inputs: StepInputs,
        grads: Gradients,
        skip: Tensor | None,
        *,
        in_place: bool,
    ) -> tuple[list[Tensor], OptState]:
        """Return parameters and state after the step, unless it is skipped."""
        inputs = inputs.with_state(with_step_counted(inputs.opt_state, skip))
        step_settings, param_structure = inputs.step_settings, inputs.param_structure
        params, slot_lists = _writable_slot_lists(inputs, in_place=in_place)
        state = with_slot_lists(inputs.opt_state, slot_lists, param_structure)
        if not self._config.settings_are_constant:
            step_settings = [map_numbers(copied_number, each) for each in step_settings]
        grad_indices = list(param_structure.grad_indices)
        if STEP in slot_lists:
            indices_with_grad = [n for n, index in enumerate(grad_indices) if index is not None]
            add_to_counts(slot_lists[STEP], indices_with_grad, skip, in_place=True)
        tensors, scalars = (params, grads.tensors, slot_lists), (state.applied, skip, grads.pending)
        self._opaque(list(param_structure.names), grad_indices, tensors, scalars, step_settings)
        return params, state

    def _make_step(
        self,
        groups: list[ParamGroup],
        grad_indices: list[int | None],
        tensors: tuple[list[Tensor], list[Tensor], SlotLists],
        scalars: tuple[Tensor, Tensor | None, Pending],
        step_settings: StepSettings,
    ) -> None:
        """Make the step, in the compiled one."""
        (params, grad_tensors, slot_lists), (applied, skip, pending) = tensors, scalars
        grads = Gradients.of_dense(grad_tensors, pending)
        indices_of_slots = slot_lists_like(slot_lists, itertools.count(len(params)))
        launches = self.plan_launches(TensorList(params), grad_indices, indices_of_slots, groups)
        leaves = [*params, *values_of(slot_lists)]
        for _, call in self.make_calls(launches, leaves, applied, grads, step_settings):
            torch.ops.purescale.fused_update_(*_operator_arguments(self.kernel, call, skip))


def _writable_slot_lists(inputs: StepInputs, *, in_place: bool) -> tuple[list[Tensor], SlotLists]:
    """Return parameters and slot lists that a kernel may write into, as `writable_leaves`."""
    old, slot_lists = inputs.params, slot_lists_of(inputs.opt_state, inputs.param_structure)
    leaves = [*old, *values_of(slot_lists)]
    numbered = slot_lists_like(slot_lists, range(len(old), len(leaves)))
    places = [pair for slot_list in numbered.values() for pair in enumerate(slot_list)]
    pairs = [(n, place) for n, place in places if isinstance(place, int)]
    new = iter(writable_leaves(leaves, pairs, in_place=in_place))
    return list(itertools.islice(new, len(old))), slot_lists_like(slot_lists, new)


# ---- the operator --------------------------------------------------------------------------------


def _update_targets(
    targets: Sequence[Tensor],
    grads: Sequence[Tensor],
    name: str,
    float_args: Sequence[float],
    counts: Sequence[Tensor],
    tensor_args: Sequence[Tensor | None],
    owned: bool,
) -> None:
    """`FusedKernel.run` as an operator of a graph, which reads the flag of a skip on a CPU.
    `targets`: the parameters, then each slot. `tensor_args`: the rate if it is a tensor, else None;
    `skip`; what the gradients wait for. `float_args`: the rate if it is a number, else 0; the other
    settings.
    """
    num_params, kernel, (lr, skip, *pending) = len(grads), FUSED_KERNELS[name], tensor_args
    if skip is not None and host_can_read([skip]):
        if skip:
            return
        skip = None
    lr_number, *others = float_args
    settings: dict[str, Any] = {
        key: bool(number) if key in BOOLEAN_SETTINGS else number
        for key, number in zip(kernel.setting_names, others, strict=True)
    }
    settings["lr"] = lr_number if lr is None else lr
    starts = range(0, len(targets), num_params)
    columns = iter([list(targets[start : start + num_params]) for start in starts])
    params = next(columns)
    slots = [
        next(columns) if not setting or settings[setting] else []
        for setting in kernel.slot_conditions.values()
    ]
    gradients = kernel.fold_clip_factor(
        Gradients.of_dense(list(grads), Pending(*pending), owned=owned)
    )
    operands = params, slots, gradients, list(counts)
    with torch.no_grad():
        kernel.run(KernelCall(kernel.bind(settings), settings, *operands), skip)


define("fused_update", _update_targets)


def _operator_arguments(
    kernel: FusedKernel, call: KernelCall, skip: Tensor | None
) -> tuple[Any, ...]:
    """Return the arguments of the operator `fused_update`."""
    settings, grads, lr = call.settings, call.grads, call.settings["lr"]
    targets = [target for column in (call.params, *call.slots) for target in column]
    lr_number, lr_tensor = (0.0, lr) if isinstance(lr, Tensor) else (lr, None)
    float_args = [lr_number, *keyword_arguments(settings, kernel.setting_names).values()]
    pending = [
        torch.full((), number, dtype=grads.factor_dtype, device=targets[0].device)
        if isinstance(number, float)
        else number
        for number in grads.pending
    ]
    arguments = targets, grads.tensors, kernel.name, list(map(float, float_args)), call.counts
    return *arguments, [lr_tensor, skip, *pending]
