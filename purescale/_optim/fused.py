"""torch's fused optimizer kernels: unscale, skip and update in one pass over memory, in place."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._optim import formulas
from .._optim.formulas import Settings
from .._optim.opt_state import (
    STEP,
    Columns,
    OptState,
    map_numbers,
    numbers_of,
    python_numbers,
    values_of,
)
from .._optim.settings import CurrentSettings, OptimizerSettings, ParamGroup
from .._optim.slot_layout import SlotLayout
from .._optim.step_inputs import StepInputs
from .._torch import foreach, private
from .._torch.dtypes import on_device
from .._torch.foreach import have_one_order, same_memory_order
from .._torch.operators import define
from .._torch.tensor_list import TensorList
from .._torch.tracing import host_can_read, may_be_opaque, traced
from .._tree.gradients import Gradients

# ---- the kernels ---------------------------------------------------------------------------------


class Kernel(NamedTuple):
    """One of torch's fused kernels."""

    name: str  # torch's
    slots: tuple[str, ...]  # that it updates besides the parameter
    optional: str  # the setting without which the last of them is absent; "" if all are there
    settings: tuple[str, ...]  # torch's names, without the learning rate
    takes_step: bool = True  # it reads the number of the step

    def slots_with(self, settings: Settings) -> tuple[str, ...]:
        """Return the slots that it updates with these settings."""
        is_complete = not self.optional or settings[self.optional]
        return self.slots if is_complete else self.slots[:-1]

    def arguments(self, settings: Settings) -> dict[str, Any]:
        """Return the settings, but for the rate, by the names that the function gives them."""
        if "betas" in settings:
            beta1, beta2 = settings["betas"]
            settings = {**settings, "beta1": beta1, "beta2": beta2}
        return {name: settings[name] for name in self.settings}

    def bound(self, arguments: dict[str, Any]) -> Callable[..., None]:
        """Return torch's function with these arguments, which takes lists of tensors and the rate,
        and updates parameters and slots in place, and with `grad_scale` the gradients too.
        """
        name, arguments = self.name, dict(arguments)
        if "decoupled_weight_decay" in arguments:
            name = "adamw" if arguments.pop("decoupled_weight_decay") else "adam"
        if not self.takes_step:
            arguments["is_first_step"] = False  # a buffer is there before it
        function: Any = private.fused_kernel(name)
        return functools.partial(function, **arguments)

    def lists(self, operands: KernelOperands) -> list[list[Tensor]]:
        """Return the lists of tensors that the function takes."""
        params, slots, steps = operands.params, operands.slots, operands.steps
        absent: list[list[Tensor]] = [[]] * (len(self.slots) - len(slots))
        lists = [params, operands.grads.tensors, *slots, *absent]
        if self.takes_step:
            lists.append(steps * len(params) if len(steps) == 1 else steps)
        return lists


_BOOLEANS = ("amsgrad", "maximize", "nesterov", "decoupled_weight_decay")
_ADAM = ("beta1", "beta2", "weight_decay", "eps", "amsgrad", "maximize", "decoupled_weight_decay")
_SGD = ("weight_decay", "momentum", "dampening", "nesterov", "maximize")
_KERNELS: dict[Any, Kernel] = {
    formulas.adam: Kernel("adam", ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), "amsgrad", _ADAM),
    formulas.sgd: Kernel("sgd", ("momentum_buffer",), "momentum", _SGD, takes_step=False),
    formulas.adagrad: Kernel(
        "adagrad", ("sum",), "", ("lr_decay", "weight_decay", "eps", "maximize")
    ),
}
_BY_NAME = {kernel.name: kernel for kernel in _KERNELS.values()}


def kernel_of(formula: formulas.Formula | None) -> Kernel | None:
    """Return the kernel that makes the steps of a class with this formula."""
    kernel = _KERNELS.get(formula.step) if formula else None
    return kernel if kernel and private.fused_kernel(kernel.name) else None


# ---- one launch ----------------------------------------------------------------------------------


class KernelOperands(NamedTuple):
    """The tensors of one device and dtype that one kernel reads and updates, in one order."""

    params: list[Tensor]
    grads: Gradients
    slots: list[list[Tensor]]  # of each of `Kernel.slots_with`
    steps: list[Tensor]  # the number of the step of each, or one for all: float32, read only


# Accelerators whose fused kernels take `grad_scale` and `found_inf`. Those of MPS ignore both.
SKIP_IN_KERNEL = {"cuda", "xpu"}


def can_launch(params: TensorList) -> bool:
    """Return True if a fused kernel is right for these parameters: on an accelerator whose kernels
    unscale and skip; on a CPU only in float32 and float64, because in half precision it leaves
    whole vector lanes unchanged.
    """
    for device in params.devices:
        on_cpu = device.type == "cpu" and params.dtypes <= {torch.float32, torch.float64}
        if not (on_cpu or device.type in SKIP_IN_KERNEL):
            return False
    return all([dtype.is_floating_point for dtype in params.dtypes])


def fused_update(
    kernel: Kernel,
    run: Callable[..., None],
    lr: float | Tensor,
    operands: KernelOperands,
    skip: Tensor | None,
) -> None:
    """Update the operands in place by `run`, of `Kernel.bound`, unless the step is skipped. If its
    gradients are owned, the kernel itself divides them. On a CPU the flag is read.
    """
    if skip is not None and host_can_read([skip]):
        if skip:
            return
        skip = None
    if not _kernel_divides(operands):
        operands = operands._replace(grads=_prepare_gradients(operands))
    found_inf, divisor = None, operands.grads.divisor
    if skip is not None:
        found_inf = skip.to(operands.params[0].device, torch.float32)
    with torch.no_grad():
        run(*kernel.lists(operands), lr=lr, grad_scale=divisor, found_inf=found_inf)
    # torch's fused kernels leave versions as they were: a graph that saved an old value would take
    # the new one for it.
    written = [*operands.params, *itertools.chain(*operands.slots)]
    if divisor is not None:
        written += operands.grads.tensors
    torch.autograd.graph.increment_version(written)


def _kernel_divides(operands: KernelOperands) -> bool:
    """Return True if the kernel can divide: by a float32 number only, and it overwrites the
    gradients with the result.
    """
    params, grads = operands.params, operands.grads
    dtype, divisor = params[0].dtype, grads.divisor
    return (
        divisor is not None
        and grads.clip_value is None
        and grads.tensor_list.dtypes == {dtype}
        and dtype.itemsize >= 4
        and divisor.dtype is torch.float32
        and grads.owned
        and have_one_order(grads.tensors, params)
    )


def _prepare_gradients(operands: KernelOperands) -> Gradients:
    """Return the gradients unscaled and clipped, in the parameters' dtype and memory order."""
    params = operands.params
    with torch.no_grad():
        grads = operands.grads.unscaled()
        tensors = foreach.cast(grads.tensors, params[0].dtype)
    if not have_one_order(tensors, params):
        tensors = list(map(foreach.laid_out_like, tensors, params))
    return grads._replace(tensor_list=TensorList(tensors))


# ---- one launch as an operator -------------------------------------------------------------------


def _update_targets(
    targets: Sequence[Tensor],
    grads: Sequence[Tensor],
    name: str,
    numbers: Sequence[float],
    steps: Sequence[Tensor],
    lr: Tensor | None,
    skip: Tensor | None,
    divisor: Tensor | None,
    factor: Tensor | None,
    clip_value: Tensor | None,
    owned: bool,
) -> None:
    """`fused_update` as an operator of a graph. Traced operator by operator, a hundred parameters
    would take minutes to compile. `targets`: the parameters, then each slot. `numbers`: the rate,
    unless it is the tensor `lr`, then the other settings.
    """
    count, kernel = len(grads), _BY_NAME[name]
    params, *slots = [list(targets[at : at + count]) for at in range(0, len(targets), count)]
    lr_number, *others = numbers
    arguments = {
        key: bool(number) if key in _BOOLEANS else number
        for key, number in zip(kernel.settings, others, strict=True)
    }
    tensor_list = TensorList(list(grads))
    gradients = Gradients(tensor_list, grads, True, divisor, owned, factor, clip_value)
    operands = KernelOperands(params, gradients.with_one_divisor(), slots, list(steps))
    run, rate = kernel.bound(arguments), lr_number if lr is None else lr
    fused_update(kernel, run, rate, operands, skip)


define("fused_update", _update_targets)


def _arguments_of_operator(
    kernel: Kernel, settings: Settings, operands: KernelOperands, skip: Tensor | None
) -> tuple[Any, ...]:
    """Return the arguments of the operator `fused_update`."""
    grads, lr, bound = operands.grads, settings["lr"], operands.grads.clip_value
    targets = [target for column in (operands.params, *operands.slots) for target in column]
    numbers = [0.0 if isinstance(lr, Tensor) else lr, *kernel.arguments(settings).values()]
    lr_tensor = lr if isinstance(lr, Tensor) else None
    if bound is not None and not isinstance(bound, Tensor):
        bound = torch.full((), bound, dtype=grads.factor_dtype, device=targets[0].device)
    pending = grads.divisor, grads.factor, bound
    arguments = targets, grads.tensors, kernel.name, list(map(float, numbers)), operands.steps
    return *arguments, lr_tensor, skip, *pending


# ---- a step --------------------------------------------------------------------------------------


class Launch(NamedTuple):
    """The parameters of one group, device and dtype that have a gradient: one call of a kernel."""

    group: ParamGroup
    params: list[int]  # by index
    grads: list[int]  # by index among the gradients
    slots: tuple[str, ...]
    run: Callable[..., None]  # of `Kernel.bound`, if no setting is current


class FusedStep:
    """The step of a class of torch.optim by torch's fused kernel, if it has one."""

    def __init__(self, settings: OptimizerSettings, slot_layout: SlotLayout) -> None:
        self._settings, self._slot_layout = settings, slot_layout
        flags = {settings.arguments.get(name) for name in ("foreach", "fused", "capturable")}
        ruled_out = (
            # torch's own class runs no kernel then
            (settings.differentiable or flags != {None}) and not settings.arguments.get("fused"),
            # it does not know of a first step
            slot_layout.counts_steps and settings.spec.formula.step is formulas.sgd,
            # at 0 it leaves the buffer alone, which the formula updates for a later step
            "momentum" in settings.in_state,
        )
        self.kernel: Any = None if any(ruled_out) else kernel_of(settings.spec.formula)
        self._opaque = private.Opaque(
            lambda *args: self._step_for_dynamo(*args), lambda: torch.compiler.allow_in_graph
        )

    def plan(
        self, inputs: StepInputs, columns: Columns, groups: list[ParamGroup]
    ) -> list[Launch] | None:
        """Return the launches of a step, or None if the kernel is not right for its tensors."""
        if self.kernel is None or not can_launch(inputs.param_list):
            return None
        if torch.compiler.is_dynamo_compiling():  # which does not trace the launches
            return []
        return self._launches(groups, inputs.param_list, inputs.stepped, columns)

    def _launches(
        self,
        groups: list[ParamGroup],
        params: TensorList,
        stepped: Sequence[int],
        columns: Columns,
    ) -> list[Launch]:
        gradient_of = {index: number for number, index in enumerate(stepped)}
        launches = []
        for group in groups:
            members, slots = set(group.indices), self.kernel.slots_with(group.settings)
            for kind in params.kinds:
                indices = [n for n in kind if n in members and n in gradient_of]
                if not indices:
                    continue
                for key in slots:
                    column = columns.get(key)
                    if column is None or not all(isinstance(column[n], Tensor) for n in indices):
                        raise self._slot_layout.foreign_error(key)
                grads = [gradient_of[index] for index in indices]
                run = self.kernel.bound(self.kernel.arguments(group.settings))
                launches.append(Launch(group, indices, grads, slots, run))
        return launches

    def is_right_for(self, inputs: StepInputs, current: CurrentSettings) -> bool:
        """Return True if the kernel, for whose tensors there is a plan, makes this step: by the
        numbers of the step, and in a trace by where it runs.
        """
        if current is not self._settings.none_current:
            numbers = numbers_of(inputs.opt_state.hyper)
            if numbers and not host_can_read(numbers):
                return False
            # On an accelerator it reads a rate as float32.
            rates = [table.get("lr") for table in current.tables()]
            tensors = [rate for rate in rates if isinstance(rate, Tensor)]
            if any([rate.dtype is not torch.float32 and not rate.is_cpu for rate in tensors]):
                return False
        return not traced() or self._may_be_opaque(inputs, current)

    def _may_be_opaque(self, inputs: StepInputs, current: CurrentSettings) -> bool:
        """Return True if the operator may stand for the step in a graph."""
        grads, params, columns = inputs.grads, inputs.params, inputs.columns
        numbers = [value for table in current.tables() for value in table.values()]
        numbers += [grads.divisor, grads.factor, grads.clip_value]
        scalars = [number for number in numbers if isinstance(number, Tensor)]
        if not may_be_opaque(params, grads.tensors, values_of(columns), scalars):
            return False
        # The operator returns slots as they are laid out; the kernel walks them as the parameter.
        return torch.compiler.is_compiling() or all(
            not isinstance(slot, Tensor)
            or slot.shape != param.shape
            or same_memory_order(slot, param)
            for column in columns.values()
            for slot, param in zip(column, params, strict=True)
        )

    def __call__(
        self,
        inputs: StepInputs,
        launches: list[Launch],
        current: CurrentSettings,
        skip: Tensor | None,
    ) -> None:
        """Update parameters and state in place, unless the step is skipped."""
        columns, grads, stepped = inputs.columns, inputs.grads, inputs.stepped
        if current is not self._settings.none_current:
            # a rate that is not in the state may share a parameter's memory
            current = current.map(lambda table: map_numbers(_clone, table))
        if torch.compiler.is_dynamo_compiling():
            pending = grads.divisor, grads.factor, grads.clip_value, skip
            lists = list(inputs.names), inputs.params, list(stepped), grads.tensors, columns
            others = inputs.opt_state.applied, pending, current
            self._opaque(self._settings.guard_key, *lists, *others)
        else:
            if current is not self._settings.none_current:
                # The kernel takes a rate that is a tensor, and reads none.
                current = current.map(
                    lambda table: {
                        n: v if n == "lr" else python_numbers({n: v})[n] for n, v in table.items()
                    }
                )
            grads = grads.with_one_divisor()
            for launch, settings, operands in self._operands(
                launches, inputs, grads, columns, current
            ):
                run = launch.run
                if settings is not launch.group.settings:
                    run = self.kernel.bound(self.kernel.arguments(settings))
                fused_update(self.kernel, run, settings["lr"], operands, skip)
        if STEP in columns:
            _count(columns, stepped, skip, in_place=True)
        opt_state = inputs.opt_state
        # A captured CUDA graph needs its numbers at fixed addresses.
        opt_state.applied.add_(1 if skip is None else ~skip)
        if isinstance(opt_state.iteration, Tensor):
            opt_state.iteration.add_(1)

    def in_a_graph(
        self,
        inputs: StepInputs,
        launches: list[Launch],
        current: CurrentSettings,
        skip: Tensor | None,
    ) -> tuple[list[Tensor], Columns]:
        """Return new parameters and columns from operators, which end a graph of `jit`."""
        columns = inputs.columns
        params, new_columns = list(inputs.params), {key: list(c) for key, c in columns.items()}
        grads = inputs.grads
        for launch, settings, operands in self._operands(launches, inputs, grads, columns, current):
            arguments = _arguments_of_operator(self.kernel, settings, operands, skip)
            new = iter(torch.ops.purescale.fused_update(*arguments))
            for column in (params, *(new_columns[key] for key in launch.slots)):
                for index in launch.params:
                    column[index] = next(new)
        return params, _count(new_columns, inputs.stepped, skip)

    def _step_for_dynamo(
        self,
        guard_key: str,
        names: list[str],
        params: list[Tensor],
        stepped: list[int],
        grads: list[Tensor],
        columns: Columns,
        applied: Tensor,
        pending: tuple[Any, ...],
        current: CurrentSettings,
    ) -> None:
        """Make the step from a compiled one, which is guarded by `guard_key`."""
        divisor, factor, clip_value, skip = pending
        gradients = Gradients(
            *(TensorList(grads), grads, True), divisor=divisor, factor=factor, clip_value=clip_value
        )
        param_list = TensorList(params)
        inputs = StepInputs.of_part(names, param_list, gradients, OptState(applied, {}))
        groups = self._settings.torch_groups(tuple(names), self._settings.none_current)
        launches = self._launches(groups, param_list, stepped, columns)
        for _, settings, operands in self._operands(launches, inputs, gradients, columns, current):
            arguments = _arguments_of_operator(self.kernel, settings, operands, skip)
            torch.ops.purescale.fused_update_(*arguments)

    def _operands(
        self,
        launches: list[Launch],
        inputs: StepInputs,
        grads: Gradients,
        columns: Columns,
        current: CurrentSettings,
    ) -> Iterator[tuple[Launch, Settings, KernelOperands]]:
        """Yield each launch with its settings and tensors."""
        params, applied = inputs.params, inputs.opt_state.applied
        counts, numbers = columns.get(STEP), {}
        for launch in launches:
            group, indices = launch.group, launch.params
            settings = group.settings
            if current is not self._settings.none_current:
                settings = self._settings.settings_of(group.overrides, current)
            if counts is not None:
                steps = [counts[index] + 1 for index in indices]
            else:
                device = params[indices[0]].device
                if device not in numbers:
                    numbers[device] = (applied + 1).to(device, torch.float32)
                steps = [numbers[device]]
            slots = [picked(columns[key], indices) for key in launch.slots]
            of_launch = picked(params, indices), grads.picked(launch.grads)
            yield launch, settings, KernelOperands(*of_launch, slots, steps)


def picked(values: list[Any], indices: Sequence[int]) -> list[Any]:
    """Return the values with these indices, in rising order."""
    return values if len(indices) == len(values) else [values[index] for index in indices]


def _count(
    columns: Columns, stepped: Sequence[int], skip: Tensor | None, *, in_place: bool = False
) -> Columns:
    """Return the columns with one more step of these parameters, unless it is skipped."""
    if STEP not in columns:
        return columns
    counts = list(columns[STEP])
    for index in stepped:
        count = counts[index]
        more = 1 if skip is None else on_device(~skip, count.device, count.dtype)
        counts[index] = count.add_(more) if in_place else count + more
    return {**columns, STEP: counts}


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
