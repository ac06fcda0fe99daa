"""The step of a class of torch.optim by torch's own kernels: its launches, planned and made. In a
trace see `kernel_in_trace.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._optim.opt_state import OptState, with_step_counted
from .._optim.optimizer_inputs import OptimizerInputs
from .._torch import foreach, memory_order
from .._torch.memory_order import same_memory_order
from .._torch.tracing import host_can_read
from .._torch.transfer import to_device
from .._torch_optim.in_state import numbers_of
from .._torch_optim.kernels import Kernel, KernelCall
from .._torch_optim.param_groups import ParamGroup
from .._torch_optim.settings import OptimizerConfig, StepSettings
from .._torch_optim.slots import COUNT, SlotLists, slot_lists_of
from .._tree.gradients import Gradients


class LaunchPlan(NamedTuple):
    """The plan of one `KernelCall`: the parameters of one group, device and dtype that have a
    gradient. Parameters, slots and counts are known by their index among all leaves of the inputs.
    """

    group: ParamGroup
    # of the parameters, then of each slot of the kernel, empty for one that does not exist
    param_and_slot_indices: list[list[int]]
    count_indices: list[int]  # of the steps of each; empty if one count is for all
    grad_indices: list[int]  # among the gradients
    function: Callable[..., None]  # with the settings of the group, if these are constant


class KernelStep:
    """The step of a class of torch.optim by one of torch's own kernels, planned for inputs like
    those that it is made with.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        kernel: Kernel,
        inputs: OptimizerInputs,
        groups: list[ParamGroup],
    ) -> None:
        self._config, self.kernel = config, kernel
        leaves, structure = inputs.leaves_and_state_structure()
        indices_as_state = structure.unflatten(range(len(inputs.params), len(leaves)))
        slot_lists = slot_lists_of(indices_as_state, inputs.param_structure)
        self.launches = self._plan_launches(inputs, slot_lists, groups)
        pairs = [
            pair
            for launch in self.launches
            for slots in launch.param_and_slot_indices[1:]
            if slots
            for pair in zip(launch.param_and_slot_indices[0], slots, strict=True)
        ]
        tensors = inputs.params_and_state
        are_writable = tensors is not None and tensors.are_gapless and not tensors.any_requires_grad
        param_slot_pairs = [(leaves[n], leaves[slot]) for n, slot in pairs]
        # All leaves are off graph, each fills a range of memory, slots in the order of their
        # parameter.
        self.leaves_are_writable = are_writable and slots_follow_params(param_slot_pairs)
        # The indices of each parameter with each of its slots, if these do not fit.
        self.pairs_to_lay_out = [] if self.leaves_are_writable else pairs

    def _plan_launches(
        self, inputs: OptimizerInputs, slot_lists: SlotLists, groups: list[ParamGroup]
    ) -> list[LaunchPlan]:
        """Return the launches of a step. `slot_lists` are those of the state, with the index of
        each leaf in its place.
        """
        launches, grad_indices = [], inputs.param_structure.grad_indices
        for group in groups:
            members, settings = set(group.indices), group.settings
            for same_kind in inputs.param_list.indices_by_kind:
                indices = [n for n in same_kind if n in members and grad_indices[n] is not None]
                if not indices:
                    continue
                param_and_slot_indices = [indices]
                for slot, setting in self.kernel.slot_conditions.items():
                    exists = not setting or settings[setting]
                    param_and_slot_indices.append(
                        [slot_lists[slot][n] for n in indices] if exists else []
                    )
                counts = [slot_lists[COUNT][n] for n in indices] if COUNT in slot_lists else []
                launches.append(
                    LaunchPlan(
                        group,
                        param_and_slot_indices,
                        count_indices=counts,
                        grad_indices=[grad_indices[n] for n in indices],
                        function=self.kernel.bind(settings),
                    )
                )
        return launches

    def supports_step(self, inputs: OptimizerInputs, grads: Gradients, skip: Tensor | None) -> bool:
        """Return True if the kernel takes the values of this step. The host must be able to read
        its settings, and a rate on an accelerator must be float32.
        """
        if skip is not None and not self.kernel.supports_skip:
            return False
        if self._config.settings_are_constant:
            return True
        numbers = numbers_of(inputs.opt_state.hyper)
        if numbers and not host_can_read(numbers):
            return False
        # On an accelerator it reads a rate as float32.
        rates = [settings.get("lr") for settings in inputs.step_settings]
        tensors = [rate for rate in rates if isinstance(rate, Tensor)]
        return all([rate.dtype is torch.float32 or rate.is_cpu for rate in tensors])

    def run(
        self,
        inputs: OptimizerInputs,
        grads: Gradients,
        skip: Tensor | None,
        *,
        in_place: bool,
    ) -> tuple[list[Tensor], OptState]:
        """Return parameters and state after the step, the old ones if it is skipped."""
        leaves, structure = inputs.leaves_and_state_structure()
        if not (self.leaves_are_writable and in_place):
            leaves = writable_leaves(leaves, self.pairs_to_lay_out, in_place=in_place)
        step_settings = inputs.step_settings
        if not self._config.settings_are_constant:
            step_settings = list(map(self.kernel.convert_settings, step_settings))
        num_params = len(inputs.params)
        grads = self.kernel.fold_clip_factor(grads)
        state = structure.unflatten(leaves[num_params:])
        # The counts that kernels read are fresh, those of the leaves are written after each launch:
        # what raises, for want of memory, counts nothing.
        # `make_calls` yields, so each launch runs before the next call is made.
        applied = state.applied + (1 if skip is None else ~skip)
        kernel_leaves = list(leaves)
        for launch in self.launches:
            add_to_counts(kernel_leaves, launch.count_indices, skip)
        calls = self.make_calls(kernel_leaves, applied, grads, step_settings)
        with torch.set_grad_enabled(False):  # `no_grad` makes more calls
            for launch, call in calls:
                self.kernel.run(call, skip)
                add_to_counts(leaves, launch.count_indices, skip, in_place=True)
        return leaves[:num_params], with_step_counted(state, skip, in_place=True)

    def make_calls(
        self,
        leaves: list[Any],
        applied: Tensor,
        grads: Gradients,
        step_settings: StepSettings,
    ) -> Iterator[tuple[LaunchPlan, KernelCall]]:
        """Yield each launch with its call, over these tensors and settings."""
        t_by_device: dict[torch.device, Tensor] = {}  # cast once for each
        for launch in self.launches:
            function, settings = launch.function, launch.group.settings
            if not self._config.settings_are_constant:
                settings = self._config.settings_of(launch.group.override_indices, step_settings)
                function = self.kernel.bind(settings)
            columns = launch.param_and_slot_indices
            params, *slots = [list(map(leaves.__getitem__, column)) for column in columns]
            counts = [leaves[index] for index in launch.count_indices]
            if self.kernel.reads_counts and not counts:
                device = params[0].device
                if device not in t_by_device:
                    t_by_device[device] = applied.to(device, torch.float32)
                counts = [t_by_device[device]]
            call = KernelCall(
                function,
                settings,
                params,
                slots,
                grads=grads.take(launch.grad_indices),
                counts=counts,
            )
            yield launch, call


def writable_leaves(
    leaves: list[Tensor], pairs: Sequence[tuple[int, int]], *, in_place: bool
) -> list[Tensor]:
    """Return leaves that a kernel may write into: these, off the graph, if `in_place`, else copies.
    Slots get the memory order of their parameter, by `pairs` of both.
    """
    if in_place:
        writable = [leaf.detach() if leaf.requires_grad else leaf for leaf in leaves]
    else:
        writable = foreach.detach_and_clone(leaves)
    for param, slot in pairs:
        if writable[slot].shape == writable[param].shape:
            writable[slot] = memory_order.in_memory_order_of(writable[slot], writable[param])
    return writable


def slots_follow_params(pairs: list[tuple[Tensor, Tensor]]) -> bool:
    """Return True if each slot of the shape of its parameter has its memory order."""
    return all([same_memory_order(slot, p) for p, slot in pairs if p.shape == slot.shape])


def add_to_counts(
    leaves: list[Any], indices: Sequence[int], skip: Tensor | None, *, in_place: bool = False
) -> None:
    """Add 1 to the leaves with these indices, which count steps, unless the step is skipped."""
    for index in indices:
        count = leaves[index]
        increment = 1 if skip is None else to_device(~skip, count.device, count.dtype)
        leaves[index] = count.add_(increment) if in_place else count + increment
