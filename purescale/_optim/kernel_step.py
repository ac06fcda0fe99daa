"""The step of a class of torch.optim by torch's own kernels: its launches, planned, and its three
ways: eager, in a graph of `jit`, and in one of Dynamo.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._optim.in_state import map_numbers, numbers_of
from .._optim.kernels import (
    BoundKernel,
    FusedKernel,
    KernelCall,
    arguments_of_operator,
    copied_number,
    kernel_of,
)
from .._optim.opt_state import (
    STEP,
    OptState,
    SlotLists,
    count_step,
    slot_lists_like,
    slot_lists_of,
    values_of,
    with_slot_lists,
)
from .._optim.settings import OptimizerConfig, ParamGroup, StepSettings
from .._optim.step_inputs import StepInputs
from .._torch import foreach
from .._torch.dtypes import to_device
from .._torch.foreach import same_memory_order
from .._torch.tensor_list import TensorList
from .._torch.tracing import host_can_read, may_be_opaque
from .._tree.gradients import Gradients, Pending


class LaunchPlan(NamedTuple):
    """The parameters of one group, device and dtype that have a gradient: one call of a kernel.
    Parameters, slots and counts are known by their index among all leaves of the inputs.
    """

    group: ParamGroup
    param_indices: list[int]
    slot_indices: list[list[int]]  # of each slot of the kernel, empty for one that does not exist
    count_indices: list[int]  # of the steps of each; empty if one count is for all
    grad_indices: list[int]  # among the gradients
    pick: Callable[[list[Any]], list[list[Any]]]  # returns parameters, then each slot
    bound_kernel: BoundKernel  # with the settings of the group, of which a step may replace some


class ParamGroupPlan(NamedTuple):
    """The plan of a `ParamGroupOptimizer`: its parameter groups, the launches of torch's kernel,
    and what is known of the tensors that they take.
    """

    groups: list[ParamGroup]
    # None if no kernel takes these tensors; empty in Dynamo, which does not trace launches
    launches: list[LaunchPlan] | None = None
    # the indices of each parameter with each of its slots
    param_slot_pairs: Sequence[tuple[int, int]] = ()
    # all leaves are off graph, each fills a range of memory, slots in the order of their parameter
    leaves_fit_kernel: bool = False


def _picker(columns: list[list[int]]) -> Callable[[list[Any]], list[list[Any]]]:
    """Return a function of leaves that returns those of each column, by its indices."""

    def getter(column: list[int]) -> Callable[[list[Any]], Sequence[Any]]:
        first, last = (column[0], column[-1]) if column else (0, -1)
        is_range = column == list(range(first, last + 1))
        return operator.itemgetter(*([slice(first, last + 1)] if is_range else column))

    getters = list(map(getter, columns))
    return lambda leaves: [list(get(leaves)) for get in getters]


class KernelStep:
    """The step of a class of torch.optim by torch's own kernel, if it has one."""

    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config
        kernel: Any = kernel_of(config.spec.formula)
        flags = {config.arguments.get(name) for name in ("foreach", "fused", "capturable")}
        is_fused = isinstance(kernel, FusedKernel)
        ruled_out = (
            # torch's own class runs no fused kernel then
            is_fused and flags != {None} and not config.arguments.get("fused"),
            config.differentiable and not config.arguments.get("fused"),
            # it cannot tell a parameter's first step
            config.needs_step_count and config.spec.formula.makes_buffer_in_first_step,
            # with momentum 0 it does not update the buffer, which a later momentum needs
            "momentum" in config.in_state,
            # it divides numbers by 1 - beta, which float32 may round to 0
            not is_fused and "betas" in config.in_state,
        )
        self.kernel: Any = None if any(ruled_out) else kernel
        self._opaque = config.opaque_in_dynamo(
            self._step_for_dynamo, lambda: torch.compiler.allow_in_graph
        )

    def plan(self, inputs: StepInputs, groups: list[ParamGroup]) -> ParamGroupPlan:
        """Return the plan of a step."""
        if self.kernel is None or not self.kernel.takes(inputs.param_list, inputs.context):
            return ParamGroupPlan(groups)
        if torch.compiler.is_dynamo_compiling():
            return ParamGroupPlan(groups, launches=[])
        leaves, structure = inputs.leaves_and_state_structure()
        state = structure.unflatten(range(len(inputs.params), len(leaves)))
        slot_lists = slot_lists_of(state, inputs.layout)
        launches = self._launches(inputs.param_list, inputs.layout.grad_indices, slot_lists, groups)
        pairs = [
            pair
            for launch in launches
            for slots in launch.slot_indices
            if slots
            for pair in zip(launch.param_indices, slots, strict=True)
        ]
        dense = inputs.leaves_if_dense
        is_dense = dense is not None and dense.are_gapless and not dense.any_requires_grad
        in_order = _slots_follow_params([(leaves[n], leaves[slot]) for n, slot in pairs])
        fits = is_dense and in_order
        return ParamGroupPlan(groups, launches, pairs, leaves_fit_kernel=fits)

    def _launches(
        self,
        params: TensorList,
        grad_indices: Sequence[int | None],
        slot_lists: SlotLists,
        groups: list[ParamGroup],
    ) -> list[LaunchPlan]:
        """Return the launches of a step. `slot_lists` are those of the state, with the index of
        each leaf in its place.
        """
        launches = []
        for group in groups:
            members, settings = set(group.indices), group.settings
            for same_kind in params.indices_by_kind:
                grad_index_of = {n: grad_indices[n] for n in same_kind if n in members}
                indices = [n for n, index in grad_index_of.items() if index is not None]
                with_grad = [index for index in grad_index_of.values() if index is not None]
                if not indices:
                    continue
                slots = [
                    [slot_lists[slot][n] for n in indices]
                    if not setting or settings[setting]
                    else []
                    for slot, setting in self.kernel.slot_conditions.items()
                ]
                counts = [slot_lists[STEP][n] for n in indices] if STEP in slot_lists else []
                launches.append(
                    LaunchPlan(
                        group,
                        param_indices=indices,
                        slot_indices=slots,
                        count_indices=counts,
                        grad_indices=with_grad,
                        pick=_picker([indices, *slots]),
                        bound_kernel=self.kernel.bind(group.settings),
                    )
                )
        return launches

    def can_run(self, inputs: StepInputs, grads: Gradients, skip: Tensor | None) -> bool:
        """Return True if the planned kernel takes the values of this step. The host must be able to
        read its settings, and the flag of a skip for a `ForLoopKernel`, which takes none. A rate on
        an accelerator must be float32. In a trace, one opaque operator must stand for the kernel.
        """
        plan, step_settings = inputs.plan, inputs.step_settings
        if plan.launches is None:
            return False
        if skip is not None and not (self.kernel.takes_skip or host_can_read([skip])):
            return False
        if not self._config.settings_are_constant:
            numbers = numbers_of(inputs.opt_state.hyper)
            if numbers and not host_can_read(numbers):
                return False
            # On an accelerator it reads a rate as float32.
            rates = [table.get("lr") for table in step_settings.tables()]
            tensors = [rate for rate in rates if isinstance(rate, Tensor)]
            if any([rate.dtype is not torch.float32 and not rate.is_cpu for rate in tensors]):
                return False
        if not inputs.context.traced:
            return True
        numbers = [value for table in step_settings.tables() for value in table.values()]
        scalars = [n for n in (*numbers, *grads.pending) if isinstance(n, Tensor)]
        params, slot_lists = inputs.params, slot_lists_of(inputs.opt_state, inputs.layout)
        if not may_be_opaque(params, grads.tensors, values_of(slot_lists), scalars):
            return False
        # The operator returns slots as they are laid out; the kernel walks them as the parameter.
        pairs = [
            pair
            for slot_list in slot_lists.values()
            for pair in zip(params, slot_list, strict=True)
        ]
        return torch.compiler.is_compiling() or _slots_follow_params(pairs)

    def __call__(
        self,
        inputs: StepInputs,
        grads: Gradients,
        skip: Tensor | None,
        *,
        in_place: bool,
    ) -> tuple[list[Tensor], OptState]:
        """Return parameters and state after the step, unless it is skipped."""
        if not inputs.context.traced:
            return self._in_eager(inputs, grads, skip, in_place=in_place)
        inputs = inputs.with_state(count_step(inputs.opt_state, skip))
        if torch.compiler.is_dynamo_compiling():
            return self._in_dynamo(inputs, grads, skip, in_place=in_place)
        return self._as_operators(inputs, grads, skip)

    def _in_eager(
        self,
        inputs: StepInputs,
        grads: Gradients,
        skip: Tensor | None,
        *,
        in_place: bool,
    ) -> tuple[list[Tensor], OptState]:
        plan, step_settings = inputs.plan, inputs.step_settings
        leaves, structure = inputs.leaves_and_state_structure()
        if plan.leaves_fit_kernel:
            leaves = leaves if in_place else foreach.clone_list(leaves)
        else:
            listed = inputs.leaves_if_dense is not None
            leaves = _writable_leaves(
                leaves, plan.param_slot_pairs, listed=listed, in_place=in_place
            )
        if not self._config.settings_are_constant:
            step_settings = step_settings.map(self.kernel.kernel_settings)
        num_params = len(inputs.params)
        grads = self.kernel.fold_factor(grads)
        state = structure.unflatten(leaves[num_params:])
        # A kernel that takes no flag has one that can be read: `can_run` has asked.
        if skip is not None and (not self.kernel.takes_skip or host_can_read([skip])):
            if skip:
                return leaves[:num_params], count_step(state, skip, in_place=True)
            skip = None
        # The counts that kernels read are fresh: what raises, for want of memory, counts nothing.
        applied = state.applied + (1 if skip is None else ~skip)
        are_alike = inputs.param_list.shares_metadata(grads.tensor_list)
        grads_match_params = plan.leaves_fit_kernel and are_alike
        counted = list(leaves)
        for launch in plan.launches:
            _add_to_counts(counted, launch.count_indices, skip)
        operands = counted, applied, grads, step_settings, grads_match_params
        for launch, call in self._calls(plan.launches, *operands):
            self.kernel.update(call, skip)
            _add_to_counts(leaves, launch.count_indices, skip, in_place=True)
        return leaves[:num_params], count_step(state, skip, in_place=True)

    def _as_operators(
        self, inputs: StepInputs, grads: Gradients, skip: Tensor | None
    ) -> tuple[list[Tensor], OptState]:
        """Make the step from operators, which end a graph of `jit`."""
        launches = inputs.plan.launches
        leaves, structure = inputs.leaves_and_state_structure()
        num_params, stepped = len(inputs.params), list(leaves)
        for launch in launches:
            _add_to_counts(stepped, launch.count_indices, skip)
        operands = stepped, inputs.opt_state.applied, grads, inputs.step_settings
        for launch, call in self._calls(launches, *operands):
            new = torch.ops.purescale.fused_update(*arguments_of_operator(self.kernel, call, skip))
            indices = itertools.chain(launch.param_indices, *launch.slot_indices)
            for index, tensor in zip(indices, new, strict=True):
                stepped[index] = tensor
        return stepped[:num_params], structure.unflatten(stepped[num_params:])

    def _in_dynamo(
        self,
        inputs: StepInputs,
        grads: Gradients,
        skip: Tensor | None,
        *,
        in_place: bool,
    ) -> tuple[list[Tensor], OptState]:
        """Make the step as one function, which Dynamo does not trace."""
        step_settings, layout = inputs.step_settings, inputs.layout
        params, slot_lists = _writable_slot_lists(inputs, in_place=in_place)
        state = with_slot_lists(inputs.opt_state, slot_lists, layout)
        if not self._config.settings_are_constant:
            step_settings = step_settings.map(lambda table: map_numbers(copied_number, table))
        grad_indices = list(layout.grad_indices)
        if STEP in slot_lists:
            with_grad = [n for n, index in enumerate(grad_indices) if index is not None]
            _add_to_counts(slot_lists[STEP], with_grad, skip, in_place=True)
        tensors, scalars = (params, grads.tensors, slot_lists), (state.applied, skip, grads.pending)
        self._opaque(list(layout.names), grad_indices, tensors, scalars, step_settings)
        return params, state

    def _step_for_dynamo(
        self,
        groups: list[ParamGroup],
        grad_indices: list[int | None],
        tensors: tuple[list[Tensor], list[Tensor], SlotLists],
        scalars: tuple[Tensor, Tensor | None, Pending],
        step_settings: StepSettings,
    ) -> None:
        """Make the step of `_in_dynamo` from a compiled one."""
        (params, grad_tensors, slot_lists), (applied, skip, pending) = tensors, scalars
        grads = Gradients.of_dense(grad_tensors, pending)
        indices_of_slots = slot_lists_like(slot_lists, itertools.count(len(params)))
        launches = self._launches(TensorList(params), grad_indices, indices_of_slots, groups)
        leaves = [*params, *values_of(slot_lists)]
        for _, call in self._calls(launches, leaves, applied, grads, step_settings):
            torch.ops.purescale.fused_update_(*arguments_of_operator(self.kernel, call, skip))

    def _calls(
        self,
        launches: list[LaunchPlan],
        leaves: list[Any],
        applied: Tensor,
        grads: Gradients,
        step_settings: StepSettings,
        grads_match_params: bool = False,
    ) -> Iterator[tuple[LaunchPlan, KernelCall]]:
        """Yield each launch with its call, over these tensors and settings."""
        t_by_device: dict[torch.device, Tensor] = {}  # float32, where the kernel reads it
        for launch in launches:
            bound_kernel = launch.bound_kernel
            if not self._config.settings_are_constant:
                settings = self._config.settings_of(launch.group.override_indices, step_settings)
                bound_kernel = self.kernel.bind(settings)
            params, *slots = launch.pick(leaves)
            state_steps = [leaves[index] for index in launch.count_indices]
            if self.kernel.reads_counts and not state_steps:
                device = params[0].device
                if device not in t_by_device:
                    t_by_device[device] = applied.to(device, torch.float32)
                state_steps = [t_by_device[device]]
            picked = grads.picked(launch.grad_indices)
            yield (
                launch,
                KernelCall(bound_kernel, params, slots, picked, state_steps, grads_match_params),
            )


def _writable_leaves(
    leaves: list[Any], pairs: Sequence[tuple[int, int]], *, listed: bool = False, in_place: bool
) -> list[Any]:
    """Return leaves that a kernel may write into: these, off the graph, if `in_place`, else copies.
    Slots get the memory order of their parameter, by `pairs` of both. If all leaves are plain
    tensors, they can be `listed`: one operator copies them.
    """

    def off_graph(leaf: Tensor) -> Tensor:
        leaf = leaf.detach() if leaf.requires_grad else leaf
        return leaf if in_place else leaf.clone()

    if listed and not in_place:
        writable = foreach.detach_and_clone(leaves)
    else:
        writable = [leaf if not isinstance(leaf, Tensor) else off_graph(leaf) for leaf in leaves]
    for param, slot in pairs:
        if writable[slot].shape == writable[param].shape:
            writable[slot] = foreach.laid_out_like(writable[slot], writable[param])
    return writable


def _writable_slot_lists(inputs: StepInputs, *, in_place: bool) -> tuple[list[Tensor], SlotLists]:
    """Return parameters and slot lists that a kernel may write into, as `_writable_leaves`."""
    old, slot_lists = inputs.params, slot_lists_of(inputs.opt_state, inputs.layout)
    leaves = [*old, *values_of(slot_lists)]
    numbered = slot_lists_like(slot_lists, range(len(old), len(leaves)))
    places = [pair for slot_list in numbered.values() for pair in enumerate(slot_list)]
    pairs = [(n, place) for n, place in places if isinstance(place, int)]
    new = iter(_writable_leaves(leaves, pairs, in_place=in_place))
    return list(itertools.islice(new, len(old))), slot_lists_like(slot_lists, new)


def _slots_follow_params(param_slot_pairs: list[tuple[Tensor, Any]]) -> bool:
    """Return True if each slot of the shape of its parameter has its memory order."""
    like = [(p, s) for p, s in param_slot_pairs if isinstance(s, Tensor) and p.shape == s.shape]
    return all([same_memory_order(slot, param) for param, slot in like])


def _add_to_counts(
    leaves: list[Any], indices: Sequence[int], skip: Tensor | None, *, in_place: bool = False
) -> None:
    """Add 1 to the leaves with these indices, which count steps, unless the step is skipped."""
    for index in indices:
        count = leaves[index]
        increment = 1 if skip is None else to_device(~skip, count.device, count.dtype)
        leaves[index] = count.add_(increment) if in_place else count + increment
