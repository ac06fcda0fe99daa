"""torch's fused optimizer kernels: unscale, skip and update in one pass over memory, in place."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._optim import formulas
from .._optim.formulas import Settings
from .._optim.opt_state import (
    STEP,
    Columns,
    Tensors,
    map_numbers,
    numbers_of,
    python_numbers,
    values_of,
)
from .._optim.settings import CurrentSettings, OptimizerSettings
from .._optim.slot_layout import SlotLayout
from .._optim.step_inputs import StepInputs
from .._torch import foreach, private
from .._torch.dtypes import on_device
from .._torch.foreach import same_memory_order
from .._torch.operators import define
from .._torch.tensor_list import TensorList, have_one_order
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
        """Return the settings by the names that the function gives them."""
        if "betas" in settings:
            beta1, beta2 = settings["betas"]
            settings = {**settings, "beta1": beta1, "beta2": beta2}
        return {name: settings[name] for name in self.settings}

    def update(
        self, lists: KernelLists, lr: float | Tensor, arguments: dict[str, Any], **amp: Any
    ) -> None:
        """Update the parameters and slots in place, and with `grad_scale` the gradients too."""
        params, grads = lists.params.tensors, lists.grads.tensors
        absent: list[list[Tensor]] = [[]] * (len(self.slots) - len(lists.slots))
        operands = [params, grads, *lists.slots, *absent]
        if self.takes_step:
            operands.append(lists.steps * len(params) if len(lists.steps) == 1 else lists.steps)
            constants = {}
        else:
            constants = {"is_first_step": False}  # a buffer is there before it
        name, arguments = self.name, dict(arguments)
        if "decoupled_weight_decay" in arguments:
            name = "adamw" if arguments.pop("decoupled_weight_decay") else "adam"
        launch: Any = private.fused_kernel(name)
        launch(*operands, lr=lr, **arguments, **constants, **amp)
        # torch's fused kernels leave versions as they were: a graph that saved an old value would
        # take the new one for it.
        written = [*params, *itertools.chain(*lists.slots)]
        written += grads if amp["grad_scale"] is not None else []
        torch.autograd.graph.increment_version(written)


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


class KernelLists(NamedTuple):
    """The tensors of one device and dtype that one kernel reads and updates, in one order."""

    params: TensorList
    grads: Gradients
    slots: list[list[Tensor]]  # of each of `Kernel.slots_with`
    steps: list[Tensor]  # the number of the step of each, or one for all: float32, read only


# Accelerators whose fused kernels take `grad_scale` and `found_inf`. Those of MPS ignore both.
SKIP_IN_KERNEL = {"cuda", "xpu"}


def can_launch(params: TensorList, grads: TensorList) -> bool:
    """Return True if a fused kernel is right for these tensors: on an accelerator whose kernels
    unscale and skip; on a CPU only in float32 and float64, because in half precision it leaves
    whole vector lanes unchanged.
    """
    for device in params.devices:
        on_cpu = device.type == "cpu" and params.dtypes <= {torch.float32, torch.float64}
        if not (on_cpu or (device.type in SKIP_IN_KERNEL and _are_floating(params))):
            return False
    return _are_floating(grads)


def _are_floating(tensor_list: TensorList) -> bool:
    return all([dtype.is_floating_point for dtype in tensor_list.dtypes])


def fused_update(
    kernel: Kernel, settings: Settings, lists: KernelLists, skip: Tensor | None
) -> None:
    """Update `lists` in place unless the step is skipped. If its gradients are owned, the kernel
    itself divides them. On a CPU the flag is read.
    """
    if skip is not None and host_can_read([skip]):
        if skip:
            return
        skip = None
    if not _kernel_divides(lists):
        lists = lists._replace(grads=_prepare_gradients(lists))
    found_inf = None
    if skip is not None:
        found_inf = skip.to(lists.params.tensors[0].device, torch.float32)
    arguments, scale = kernel.arguments(settings), lists.grads.divisor
    with torch.no_grad():
        kernel.update(lists, settings["lr"], arguments, grad_scale=scale, found_inf=found_inf)


def _kernel_divides(lists: KernelLists) -> bool:
    """Return True if the kernel can divide: by a float32 number only, and it overwrites the
    gradients with the result.
    """
    grads, params = lists.grads, lists.params
    [dtype], divisor = params.dtypes, grads.divisor
    return (
        divisor is not None
        and grads.clip_value is None
        and grads.tensor_list.dtypes == {dtype}
        and dtype.itemsize >= 4
        and divisor.dtype is torch.float32
        and grads.owned
        and have_one_order(grads.tensor_list, params)
    )


def _prepare_gradients(lists: KernelLists) -> Gradients:
    """Return the gradients unscaled and clipped, in the parameters' dtype and memory order."""
    params = lists.params
    [dtype] = params.dtypes
    with torch.no_grad():
        grads = lists.grads.unscaled()
        tensor_list = TensorList(foreach.cast(grads.tensors, dtype))
    if not have_one_order(tensor_list, params):
        pairs = zip(tensor_list.tensors, params.tensors, strict=True)
        tensor_list = TensorList([_lay_out_like(*pair) for pair in pairs])
    return grads._replace(tensor_list=tensor_list)


def _lay_out_like(grad: Tensor, param: Tensor) -> Tensor:
    return grad if same_memory_order(grad, param) else torch.empty_like(param).copy_(grad)


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
    settings = {
        key: bool(number) if key in _BOOLEANS else number
        for key, number in zip(kernel.settings, others, strict=True)
    }
    tensor_list = TensorList(list(grads))
    gradients = Gradients(tensor_list, grads, True, divisor, owned, factor, clip_value)
    lists = KernelLists(TensorList(params), gradients.with_one_divisor(), slots, list(steps))
    fused_update(kernel, {**settings, "lr": lr_number if lr is None else lr}, lists, skip)


define("fused_update", _update_targets)


def _operands(
    kernel: Kernel, settings: Settings, lists: KernelLists, skip: Tensor | None
) -> tuple[Any, ...]:
    """Return the operands of the operator `fused_update`."""
    grads, lr, bound = lists.grads, settings["lr"], lists.grads.clip_value
    targets = [target for column in (lists.params.tensors, *lists.slots) for target in column]
    numbers = [0.0 if isinstance(lr, Tensor) else lr, *kernel.arguments(settings).values()]
    lr_tensor = lr if isinstance(lr, Tensor) else None
    if bound is not None and not isinstance(bound, Tensor):
        bound = torch.full((), bound, dtype=grads.factor_dtype, device=targets[0].device)
    pending = grads.divisor, grads.factor, bound
    operands = targets, grads.tensors, kernel.name, list(map(float, numbers)), lists.steps
    return *operands, lr_tensor, skip, *pending


# ---- a step --------------------------------------------------------------------------------------


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

    def is_right_for(self, inputs: StepInputs, current: CurrentSettings) -> bool:
        """Return True if the kernel makes this step."""
        if self.kernel is None:
            return False
        if (numbers := numbers_of(inputs.opt_state.hyper)) and not host_can_read(numbers):
            return False
        # On an accelerator it reads a rate as float32.
        rates = [table["lr"] for table in current.tables() if isinstance(table.get("lr"), Tensor)]
        if any([rate.dtype is not torch.float32 and not rate.is_cpu for rate in rates]):
            return False
        params, grads = inputs.param_list, inputs.grads.tensor_list
        if traced() and not self._may_be_opaque(inputs, current):
            return False
        return can_launch(params, grads)

    def _may_be_opaque(self, inputs: StepInputs, current: CurrentSettings) -> bool:
        """Return True if the operator may stand for the step in a graph."""
        grads, params = inputs.grads, inputs.params
        numbers = [value for table in current.tables() for value in table.values()]
        numbers += [grads.divisor, grads.factor, grads.clip_value]
        scalars = [number for number in numbers if isinstance(number, Tensor)]
        columns = inputs.columns
        slots = values_of(columns)
        if not may_be_opaque(inputs.param_list.tensors, grads.tensors, slots, scalars):
            return False
        # The operator returns slots as they are laid out; the kernel walks them as the parameter.
        return torch.compiler.is_compiling() or all(
            value.shape != params[name].shape or same_memory_order(value, params[name])
            for column in columns.values()
            for name, value in column.items()
        )

    def __call__(
        self,
        inputs: StepInputs,
        current: CurrentSettings,
        skip: Tensor | None,
        *,
        in_place: bool = False,
    ) -> tuple[Tensors, Columns]:
        """Return parameters and columns after the step, unless it is skipped. With `in_place` those
        of `inputs` are overwritten.
        """
        applied = inputs.opt_state.applied
        if traced() and not torch.compiler.is_dynamo_compiling():
            return self._step_for_make_fx(inputs, current, skip)
        if in_place:  # a rate that is not in the state may share memory with a parameter
            current = current.map(lambda table: map_numbers(_clone, table))
        inputs, columns = inputs.writable(in_place=in_place)
        params, grads = inputs.params, inputs.grads
        if torch.compiler.is_dynamo_compiling():
            pending = grads.divisor, grads.factor, grads.clip_value, skip
            named = dict(zip(inputs.grad_names, grads.tensors, strict=True))
            operands = params, named, columns, applied, pending, current
            self._opaque(self._settings.guard_key, *operands)
            return params, _counted(columns, list(named), skip, in_place=True)
        # The kernel takes a rate that is a tensor, and reads none.
        current = current.map(
            lambda table: {
                n: v if n == "lr" else python_numbers({n: v})[n] for n, v in table.items()
            }
        )
        inputs = inputs._replace(grads=grads.with_one_divisor())
        for settings, _, lists in self._launches(inputs, columns, applied, current):
            fused_update(self.kernel, settings, lists, skip)
        return params, _counted(columns, inputs.grad_names, skip, in_place=True)

    def _step_for_make_fx(
        self, inputs: StepInputs, current: CurrentSettings, skip: Tensor | None
    ) -> tuple[Tensors, Columns]:
        """Return new parameters and columns from operators, which end a graph of `jit`."""
        params, columns = dict(inputs.params), inputs.columns
        applied = inputs.opt_state.applied
        new_columns = {key: dict(column) for key, column in columns.items()}
        for settings, names, lists in self._launches(inputs, columns, applied, current):
            operands = _operands(self.kernel, settings, lists, skip)
            new = iter(torch.ops.purescale.fused_update(*operands))
            params.update(zip(names, new, strict=False))
            for key in self.kernel.slots_with(settings):
                new_columns[key].update(zip(names, new, strict=False))
        return params, _counted(new_columns, inputs.grad_names, skip)

    def _step_for_dynamo(
        self,
        guard_key: str,
        params: Tensors,
        grads: Tensors,
        columns: Columns,
        applied: Tensor,
        pending: tuple[Any, ...],
        current: CurrentSettings,
    ) -> None:
        """Make the step from a compiled one, which is guarded by `guard_key`."""
        divisor, factor, clip_value, skip = pending
        likes, tensor_list = list(map(grads.get, params)), TensorList(list(grads.values()))
        gradients = Gradients(
            tensor_list, likes, False, divisor=divisor, factor=factor, clip_value=clip_value
        )
        inputs = StepInputs.of_dict(params, gradients, ())
        for settings, _, lists in self._launches(inputs, columns, applied, current):
            torch.ops.purescale.fused_update_(*_operands(self.kernel, settings, lists, skip))

    def _launches(
        self, inputs: StepInputs, columns: Columns, applied: Tensor, current: CurrentSettings
    ) -> Iterator[tuple[Settings, list[str], KernelLists]]:
        """Yield the settings, the names and the tensors of each group, device and dtype."""
        params, grads = inputs.param_list, inputs.grads
        names = list(inputs.params)
        gradient_of = {name: index for index, name in enumerate(inputs.grad_names)}
        counts, numbers = columns.get(STEP), {}
        for group in self._settings.torch_groups(tuple(names), current):
            settings = group.settings
            stepped = {name for name in group.names if name in gradient_of}
            for kind in params.kinds:
                indices = [index for index in kind if names[index] in stepped]
                if not indices:
                    continue
                of_kind, device = (
                    [names[index] for index in indices],
                    params.tensors[kind[0]].device,
                )
                if counts is not None:
                    steps = [counts[name] + 1 for name in of_kind]
                else:
                    if device not in numbers:
                        numbers[device] = (applied + 1).to(device, torch.float32)
                    steps = [numbers[device]]
                lists = KernelLists(
                    params.picked(indices),
                    grads.picked([gradient_of[name] for name in of_kind]),
                    [
                        self._column(columns, of_kind, key)
                        for key in self.kernel.slots_with(settings)
                    ],
                    steps,
                )
                yield settings, of_kind, lists

    def _column(self, columns: Columns, names: list[str], key: str) -> list[Tensor]:
        try:
            return [columns[key][name] for name in names]
        except KeyError:
            raise self._slot_layout.foreign_error(key) from None


def _counted(
    columns: Columns, names: list[str], skip: Tensor | None, *, in_place: bool = False
) -> Columns:
    """Return the columns with one more step of these parameters, unless it is skipped."""
    if STEP not in columns:
        return columns
    counts = dict(columns[STEP])
    for name in names:
        count = counts[name]
        more = 1 if skip is None else on_device(~skip, count.device, count.dtype)
        counts[name] = count.add_(more) if in_place else count + more
    return {**columns, STEP: counts}


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
