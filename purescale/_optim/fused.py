"""torch's fused optimizer kernels: unscale, skip and update in one pass over memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import adagrad, adam, sgd

from .._optim import formulas
from .._optim.decision import Decision, unscale_and_clip
from .._torch import foreach
from .._torch.foreach import same_memory_order
from .._torch.metadata import Metadata, have_one_order

Settings = Mapping[str, Any]


# ---- the kernels ---------------------------------------------------------------------------------


class Kernel(NamedTuple):
    """One of torch's fused kernels, by the function of torch that launches it."""

    function: Callable[..., None]
    columns: tuple[str, ...]  # the slots that it updates besides the parameter
    optional: str  # the setting without which the last of them is absent; "" if all are there
    settings: tuple[str, ...]  # torch's names, without the learning rate
    counts: bool = True  # the function takes step counts

    def slots(self, settings: Settings) -> tuple[str, ...]:
        """Return the slots that it updates with these settings."""
        is_complete = not self.optional or settings[self.optional]
        return self.columns if is_complete else self.columns[:-1]

    def arguments(self, settings: Settings) -> dict[str, Any]:
        """Return the settings by the names that the function gives them."""
        if "betas" in settings:
            beta1, beta2 = settings["betas"]
            settings = {**settings, "beta1": beta1, "beta2": beta2}
        return {name: settings[name] for name in self.settings}

    def update(
        self, columns: Columns, lr: float | Tensor, arguments: dict[str, Any], **amp: Any
    ) -> None:
        """Update the parameters and slots in place."""
        params, slots = columns.params.tensors, list(columns.slots)
        if len(slots) < len(self.columns):
            slots.append([] if self.counts else [None] * len(params))  # type: ignore[list-item]
        if self.counts:
            slots.append(columns.steps)
        grads = columns.grads.tensors
        self.function(params, grads, *slots, fused=True, foreach=False, lr=lr, **arguments, **amp)


_FLAGS = ("amsgrad", "maximize", "nesterov", "decoupled_weight_decay")
_ADAM = ("beta1", "beta2", "weight_decay", "eps", "amsgrad", "maximize", "decoupled_weight_decay")
_SGD = ("weight_decay", "momentum", "dampening", "nesterov", "maximize")
_KERNELS: dict[Any, Kernel] = {
    formulas.adam: Kernel(adam.adam, ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), "amsgrad", _ADAM),
    formulas.sgd: Kernel(sgd.sgd, ("momentum_buffer",), "momentum", _SGD, counts=False),
    formulas.adagrad: Kernel(
        adagrad.adagrad, ("sum",), "", ("lr_decay", "weight_decay", "eps", "maximize")
    ),
}
_BY_NAME = {kernel.function.__name__: kernel for kernel in _KERNELS.values()}


def kernel_of(formula: formulas.Formula | None) -> Kernel | None:
    """Return the kernel that makes the steps of a class with this formula."""
    return _KERNELS.get(formula.step) if formula is not None else None


# ---- one launch ----------------------------------------------------------------------------------


class Columns(NamedTuple):
    """The tensors of one device and dtype that one kernel reads and updates, in one order."""

    params: Metadata
    grads: Metadata
    steps: list[Tensor]  # one per parameter; empty if the kernel counts no steps
    slots: list[list[Tensor]]  # of each slot that the kernel names
    owned: bool = False  # nobody else can see the gradients, so they may be overwritten


# Accelerators whose fused kernels take `grad_scale` and `found_inf`. Those of MPS ignore both.
MASKED_BY_KERNELS = {"cuda", "xpu"}


def can_launch(params: Metadata, grads: Metadata) -> bool:
    """Return True if a fused kernel is right for these tensors: on an accelerator whose kernels
    unscale and skip; on a CPU only in float32 and float64, because in half precision it leaves
    whole vector lanes unchanged.
    """
    for device in params.devices:
        on_cpu = device.type == "cpu" and params.dtypes <= {torch.float32, torch.float64}
        if not (on_cpu or (device.type in MASKED_BY_KERNELS and _are_floating(params))):
            return False
    return _are_floating(grads)


def _are_floating(metadata: Metadata) -> bool:
    return all([dtype.is_floating_point for dtype in metadata.dtypes])


def fused_update(
    kernel: Kernel,
    settings: Settings,
    columns: Columns,
    decision: Decision,
) -> None:
    """Update `columns` in place unless the step is skipped. Its gradients are still scaled. If they
    are owned, the kernel itself divides by the scale.
    """
    columns, divisor = _prepare_columns(columns, decision)
    params = columns.params.tensors
    found_inf = None
    if isinstance(decision.skip, Tensor):
        found_inf = decision.skip.to(params[0].device, torch.float32)
    lr, arguments = settings["lr"], kernel.arguments(settings)
    if torch.compiler.is_compiling():
        targets = [target for column in (params, *columns.slots) for target in column]
        numbers = list(map(float, arguments.values()))
        rate, lr = (0.0, lr) if isinstance(lr, Tensor) else (float(lr), None)
        grads, name = columns.grads.tensors, kernel.function.__name__
        _fused_update_op(name, grads, columns.steps, targets, rate, lr, numbers, found_inf, divisor)
    else:
        with torch.no_grad():
            kernel.update(columns, lr, arguments, grad_scale=divisor, found_inf=found_inf)


def _prepare_columns(columns: Columns, decision: Decision) -> tuple[Columns, Tensor | None]:
    """Return the columns with gradients as the kernel takes them, and the divisor for the kernel or
    None.

    The kernel divides by a float32 number only, and overwrites the gradients with the result.
    """
    params, grads, owned = columns.params, columns.grads, columns.owned
    [dtype], divisor = params.dtypes, decision.divisor
    if decision.prefactor is not None:
        grads = Metadata(foreach.multiply(grads.tensors, decision.prefactor, in_place=owned))
        owned = not torch.compiler.is_compiling()
    by_kernel = divisor is not None and decision.clip_value is None and grads.dtypes == {dtype}
    by_kernel = by_kernel and dtype.itemsize >= 4 and divisor.dtype is torch.float32  # type: ignore[union-attr]
    if by_kernel and (owned or torch.compiler.is_compiling()) and have_one_order(grads, params):
        return columns._replace(grads=grads), divisor
    if divisor is not None and divisor is not decision.scale:  # one division, as in the kernel
        decision = decision._replace(scale=divisor, factor=None)
    with torch.no_grad():
        unscaled = unscale_and_clip(grads.tensors, decision, in_place=owned)
        grads = Metadata(foreach.cast(unscaled, dtype))
    if not have_one_order(grads, params):
        pairs = zip(grads.tensors, params.tensors, strict=True)
        grads = Metadata([_laid_out_like(*pair) for pair in pairs])
    return columns._replace(grads=grads), None


def _laid_out_like(grad: Tensor, param: Tensor) -> Tensor:
    return grad if same_memory_order(grad, param) else torch.empty_like(param).copy_(grad)


@torch.library.custom_op("purescale::fused_update", mutates_args=("steps", "targets"))
def _fused_update_op(
    kernel: str,
    grads: Sequence[Tensor],
    steps: Sequence[Tensor],
    targets: Sequence[Tensor],
    rate: float,
    lr: Tensor | None,
    numbers: Sequence[float],
    found_inf: Tensor | None,
    divisor: Tensor | None,
) -> None:
    """Run `Kernel.update` as one node of a compiled graph. Traced operator by operator, a hundred
    parameters would take minutes to compile.
    """
    count, own = len(grads), _BY_NAME[kernel]
    params, *slots = [list(targets[at : at + count]) for at in range(0, len(targets), count)]
    gradients = list(grads)
    if divisor is not None:  # the kernel would overwrite the gradients
        gradients, divisor = foreach.divide(gradients, divisor), None
    arguments = {
        name: bool(number) if name in _FLAGS else number
        for name, number in zip(own.settings, numbers, strict=True)
    }
    columns = Columns(Metadata(params), Metadata(gradients), list(steps), slots)
    rate_or_lr = rate if lr is None else lr
    own.update(columns, rate_or_lr, arguments, grad_scale=divisor, found_inf=found_inf)
