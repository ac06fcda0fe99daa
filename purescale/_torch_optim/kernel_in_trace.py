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
from .._optim.optimizer_inputs import OptimizerInputs
from .._torch.operators import define_operators
from .._torch.tracing import host_can_read, may_be_opaque
from .._torch_optim.kernel_step import (
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
from .._tree.gradients import Gradients, Pending


class KernelStepInTrace(KernelStep):
    """The step in a trace: each launch is one operator of the graph."""

    kernel: FusedKernel  # others read values

    def supports_step(self, inputs: OptimizerInputs, grads: Gradients, skip: Tensor | None) -> bool:
        """Return True if the kernel takes the values of this step, and one opaque operator may
        stand for it. It returns slots as they are laid out, and the kernel walks them as the
        parameter.
        """
        if not super().supports_step(inputs, grads, skip):
            return False
        numbers = [number for each in inputs.step_settings for number in each.values()]
        scalars = [n for n in (*numbers, *grads.pending) if isinstance(n, Tensor)]
        leaves, _ = inputs.leaves_and_state_structure()
        pairs = [(leaves[n], leaves[slot]) for n, slot in self.pairs_to_lay_out]
        slots = [slot for _, slot in pairs]
        opaque = may_be_opaque(inputs.params, grads.tensors, slots, scalars)
        return opaque and slots_follow_params(pairs)

    def run(
        self,
        inputs: OptimizerInputs,
        grads: Gradients,
        skip: Tensor | None,
        *,
        in_place: bool,
    ) -> tuple[list[Tensor], OptState]:
        """Return parameters and state after the step, the old ones if it is skipped. Dynamo may
        write into the old ones; a graph of `jit` has no writes.
        """
        old, _ = inputs.leaves_and_state_structure()
        inputs = inputs.with_state(with_step_counted(inputs.opt_state, skip))
        leaves, structure = inputs.leaves_and_state_structure()
        num_params, stepped = len(inputs.params), list(leaves)
        writes = in_place and torch.compiler.is_dynamo_compiling()
        if writes:
            stepped = writable_leaves(stepped, (), in_place=True)
        for launch in self.launches:
            add_to_counts(stepped, launch.count_indices, skip, in_place=writes)
        operands = stepped, inputs.opt_state.applied, grads, inputs.step_settings
        for launch, call in self.make_calls(*operands):
            arguments = _operator_arguments(self.kernel, call, skip)
            if writes:
                torch.ops.purescale.fused_update_(*arguments)
                continue
            new = torch.ops.purescale.fused_update(*arguments)
            for index, tensor in zip(
                itertools.chain(*launch.param_and_slot_indices), new, strict=True
            ):
                stepped[index] = tensor
        if not in_place:  # what took no part is still an argument
            stepped = [n.clone() if n is o else n for n, o in zip(stepped, old, strict=True)]
        return stepped[:num_params], structure.unflatten(stepped[num_params:])


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


define_operators("fused_update", _update_targets)


def _operator_arguments(
    kernel: FusedKernel, call: KernelCall, skip: Tensor | None
) -> tuple[Any, ...]:
    """Return the arguments of the operator `fused_update`."""
    settings, grads, lr = call.settings, call.grads, call.settings["lr"]
    targets = [target for column in (call.params, *call.slots) for target in column]
    lr_number, lr_tensor = (0.0, lr) if isinstance(lr, Tensor) else (lr, None)
    float_args = [lr_number, *keyword_arguments(settings, kernel.setting_names).values()]
    pending = [
        torch.full((), number, dtype=grads.scalar_dtype, device=targets[0].device)
        if isinstance(number, float)
        else number
        for number in grads.pending
    ]
    arguments = targets, grads.tensors, kernel.name, list(map(float, float_args)), call.counts
    return *arguments, [lr_tensor, skip, *pending]
