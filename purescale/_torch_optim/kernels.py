"""torch's own steps of lists of tensors, in place. A fused kernel unscales, skips and updates in
one pass over memory; where a class has none, its function goes leaf by leaf, on a CPU.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim.adadelta import adadelta
from torch.optim.adamax import adamax
from torch.optim.nadam import nadam
from torch.optim.radam import radam
from torch.optim.rmsprop import rmsprop

from .._torch import foreach, memory_order, private
from .._torch.memory_order import all_same_memory_order
from .._torch.tensor_list import TensorList, are_comparable
from .._torch.tracing import CallContext, host_can_read
from .._torch_optim import formulas
from .._torch_optim.formulas import Settings
from .._torch_optim.in_state import copied_number, read_numbers
from .._torch_optim.settings import OptimizerConfig
from .._tree.gradients import Gradients

# Accelerators whose fused kernels take `grad_scale` and `found_inf`. Those of MPS ignore both.
DEVICES_THAT_SKIP = {"cuda", "xpu"}
_FULL_PRECISION = {torch.float32, torch.float64}


@dataclasses.dataclass(frozen=True)
class FusedKernel:
    """One of torch's fused kernels: it unscales, skips and updates a list in one pass, in place."""

    name: str  # torch's; "adam" is that of AdamW too
    # of each slot that it updates, in its order, the setting that makes it; "" if it always exists
    slot_conditions: Mapping[str, str]
    setting_names: tuple[str, ...]  # of the function, beside the rate
    reads_counts: bool = True  # it reads the number of the step
    supports_skip: ClassVar[bool] = True  # the flag of a skip that the host has not read

    def supports_tensors(self, param_list: TensorList, context: CallContext) -> bool:
        """Return True if it is right for these parameters: on an accelerator whose kernels unscale
        and skip; on a CPU only in float32 and float64, because in half precision it leaves whole
        vector lanes unchanged.
        """
        for device in param_list.devices:
            on_cpu = device.type == "cpu" and param_list.dtypes <= _FULL_PRECISION
            if not (on_cpu or device.type in DEVICES_THAT_SKIP):
                return False
        return all([dtype.is_floating_point for dtype in param_list.dtypes])

    def bind(self, settings: Settings) -> Callable[..., None]:
        """Return torch's function with these settings."""
        name, arguments = self.name, keyword_arguments(settings, self.setting_names)
        if "decoupled_weight_decay" in arguments:
            name = "adamw" if arguments.pop("decoupled_weight_decay") else "adam"
        if not self.reads_counts:
            arguments["is_first_step"] = False  # a buffer is there before it
        function: Any = private.fused_kernel(name)
        return functools.partial(function, lr=settings["lr"], **arguments)

    def convert_settings(self, settings: Settings) -> dict[str, Any]:
        """Return settings as it takes them: a rate may be a tensor, and no other."""
        return {
            n: copied_number(v) if n == "lr" else read_numbers({n: v})[n]
            for n, v in settings.items()
        }

    def fold_clip_factor(self, grads: Gradients) -> Gradients:
        """Return the gradients with `divisor / factor` as their divisor, because the kernel divides
        once. If that is out of range, they are multiplied by the factor first.
        """
        divisor, factor = grads.pending.divisor, grads.pending.clip_factor
        if factor is None:
            return grads
        pending, dtype = grads.pending._replace(clip_factor=None), grads.scalar_dtype
        # Unless all gradients are float64, the divisor must fit into float32.
        only_double = grads.tensor_list.dtypes == {torch.float64}
        largest = torch.finfo(torch.float64 if only_double else torch.float32).max
        if isinstance(factor, Tensor) and host_can_read([factor], grads.tensors):
            factor = factor.item()
        if not isinstance(factor, Tensor):  # in numbers, which take no pass over the gradients
            number = 1.0 if divisor is None else divisor.item()
            if number <= factor * largest:
                divisor = torch.full((), number / factor, dtype=dtype, device="cpu")
                return grads._replace(pending=pending._replace(divisor=divisor))
            factor = torch.full((), factor, dtype=torch.float64, device="cpu")
        unscaling = torch.ones_like(factor) if divisor is None else divisor
        divisor = unscaling / factor
        fits = divisor <= largest  # if it is negative the step is skipped
        divisor = torch.where(fits, divisor, unscaling).to(dtype)
        multiplied = grads.multiplied(torch.where(fits, 1.0, factor))
        return multiplied._replace(pending=pending._replace(divisor=divisor))

    def run(self, call: KernelCall, skip: Tensor | None) -> None:
        """Make the call. It divides the gradients itself if it can."""
        if not _grads_are_ready(call):
            call = call._replace(grads=_grads_for_kernel(call))
        divisor = call.grads.pending.divisor
        found_inf = None if skip is None else skip.to(call.params[0].device, torch.float32)
        lists = [call.params, call.grads.tensors, *call.slots]
        if self.reads_counts:
            counts = call.counts
            lists.append(counts * len(call.params) if len(counts) == 1 else counts)
        call.function(*lists, grad_scale=divisor, found_inf=found_inf)
        # torch's fused kernels leave versions as they were: a graph that saved an old value would
        # take the new one for it.
        written = [*call.params, *itertools.chain(*call.slots)]
        if divisor is not None:
            written += call.grads.tensors
        torch.autograd.graph.increment_version(written)


@dataclasses.dataclass(frozen=True)
class ForLoopKernel:
    """torch's function for a class without a fused kernel, which steps a list leaf by leaf, in
    place. It takes unscaled gradients and no flag, so it runs on a CPU in eager mode. If it lacks
    memory, donated leaves stay half stepped, as in torch. ASGD and Rprop have none here: in the
    first step they read a slot where the formula reads the rate.
    """

    function: Callable[..., None]
    slot_conditions: Mapping[str, str]  # as in `FusedKernel`
    setting_names: tuple[str, ...]  # of the function
    reads_counts: ClassVar[bool] = True
    supports_skip: ClassVar[bool] = False

    def supports_tensors(self, param_list: TensorList, context: CallContext) -> bool:
        """Return True if it may step these parameters in place of the formula."""
        readable = context.host_can_read_cpu and param_list.are_on_cpu
        full_precision = param_list.dtypes <= _FULL_PRECISION
        return readable and full_precision and are_comparable(param_list.tensors)

    def bind(self, settings: Settings) -> Callable[..., None]:
        """Return the function with these settings."""
        arguments = keyword_arguments(settings, self.setting_names)
        return functools.partial(self.function, foreach=False, **arguments)

    def convert_settings(self, settings: Settings) -> dict[str, Any]:
        """Return settings as it takes them, as Python numbers."""
        return read_numbers(settings)

    def fold_clip_factor(self, grads: Gradients) -> Gradients:
        """Return the gradients as they are, because the function does not divide."""
        return grads

    def run(self, call: KernelCall, skip: Tensor | None) -> None:
        """Make the call, of a step that is not skipped."""
        assert skip is None
        before = [count - 1 for count in call.counts]  # the function adds 1 to each
        if len(before) == 1:
            before = list(before[0].repeat(len(call.params)).unbind())
        call.function(call.params, _grads_for_kernel(call).tensors, *call.slots, before)


Kernel = FusedKernel | ForLoopKernel


def keyword_arguments(settings: Settings, names: Sequence[str]) -> dict[str, Any]:
    """Return the settings with these names of a function of torch's."""
    if "betas" in settings:
        beta1, beta2 = settings["betas"]
        settings = {**settings, "beta1": beta1, "beta2": beta2}
    return {name: settings[name] for name in names}


# The settings of fused kernels that are not numbers.
BOOLEAN_SETTINGS = ("amsgrad", "maximize", "nesterov", "decoupled_weight_decay")
_ADAM = ("beta1", "beta2", "weight_decay", "eps", "maximize", "decoupled_weight_decay")
_MOMENTS = {"exp_avg": "", "exp_avg_sq": ""}
_FUSED: dict[Any, FusedKernel] = {
    formulas.adam: FusedKernel(
        "adam", _MOMENTS | {"max_exp_avg_sq": "amsgrad"}, (*_ADAM, "amsgrad")
    ),
    formulas.sgd: FusedKernel(
        "sgd",
        {"momentum_buffer": "momentum"},
        ("weight_decay", "momentum", "dampening", "nesterov", "maximize"),
        reads_counts=False,
    ),
    formulas.adagrad: FusedKernel(
        "adagrad", {"sum": ""}, ("lr_decay", "weight_decay", "eps", "maximize")
    ),
}
_FOR_LOOPS: dict[Any, ForLoopKernel] = {
    formulas.rmsprop: ForLoopKernel(
        rmsprop,
        {"square_avg": "", "grad_avg": "centered", "momentum_buffer": "momentum"},
        ("lr", "alpha", "eps", "weight_decay", "momentum", "centered", "maximize"),
    ),
    formulas.adadelta: ForLoopKernel(
        adadelta,
        {"square_avg": "", "acc_delta": ""},
        ("lr", "rho", "eps", "weight_decay", "maximize"),
    ),
    formulas.adamax: ForLoopKernel(
        adamax,
        {"exp_avg": "", "exp_inf": ""},
        ("lr", "beta1", "beta2", "eps", "weight_decay", "maximize"),
    ),
    formulas.nadam: ForLoopKernel(
        nadam, _MOMENTS | {"mu_product": ""}, ("lr", *_ADAM, "momentum_decay")
    ),
    formulas.radam: ForLoopKernel(radam, _MOMENTS, ("lr", *_ADAM)),
}
FUSED_KERNELS = {kernel.name: kernel for kernel in _FUSED.values()}


def kernel_for(config: OptimizerConfig) -> Kernel | None:
    """Return the kernel that makes steps with these settings; None if the formula makes them."""
    kernel: Any = _FUSED.get(config.spec.formula.step)
    if kernel is None or not private.fused_kernel(kernel.name):
        kernel = _FOR_LOOPS.get(config.spec.formula.step)
    flags = {config.arguments.get(name) for name in ("foreach", "fused", "capturable")}
    is_fused = isinstance(kernel, FusedKernel)
    ruled_out = (
        # torch's own class runs no fused kernel then
        is_fused and flags != {None} and not config.arguments.get("fused"),
        config.differentiable,
        # it cannot tell a parameter's first step
        config.needs_counts and config.spec.formula.makes_buffer_in_first_step,
        # with momentum 0 it does not update the buffer, which a later momentum needs
        "momentum" in config.in_state,
        # it divides numbers by 1 - beta, which float32 may round to 0
        not is_fused and "betas" in config.in_state,
    )
    return None if any(ruled_out) else kernel


# ---- one launch ----------------------------------------------------------------------------------


class KernelCall(NamedTuple):
    """One call of a kernel, without gradient mode: the tensors of one device and dtype that it
    reads and updates, in one order.
    """

    function: Callable[..., None]  # of `bind`, with these settings
    settings: Settings
    params: list[Tensor]
    slots: list[list[Tensor]]  # of each slot of the kernel, empty for one that does not exist
    grads: Gradients
    # of the steps of each, or one for all: float32, read only; empty if none is read
    counts: list[Tensor]


def _grads_are_ready(call: KernelCall) -> bool:
    """Return True if a fused kernel takes the gradients as they are. It can divide, by a float32
    number only, and overwrites the gradients with the result.
    """
    params, grads, dtype = call.params, call.grads, call.params[0].dtype
    divisor = grads.pending.divisor
    if grads.pending.clip_value is not None:  # the clip factor is folded into the divisor
        return False
    can_divide = grads.owned and dtype.itemsize >= 4
    if divisor is not None and not (can_divide and divisor.dtype is torch.float32):
        return False
    return grads.tensor_list.dtypes == {dtype} and all_same_memory_order(grads.tensors, params)


def _grads_for_kernel(call: KernelCall) -> Gradients:
    """Return the gradients unscaled and clipped, in the parameters' dtype and memory order."""
    params = call.params
    grads = call.grads.apply_pending()
    tensors = foreach.cast_list_saturating(grads.tensors, params[0].dtype)
    if not all_same_memory_order(tensors, params):
        tensors = list(map(memory_order.in_memory_order_of, tensors, params))
    return grads.with_tensors(tensors, owned=grads.owned)
