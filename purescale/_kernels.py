"""torch's fused optimizer kernels on values: unscale, clip, skip and update in one pass over memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _foreach

Settings = Mapping[str, Any]


class Treatment(NamedTuple):
    """What happens to a gradient on its way into the update, in this order; `None` leaves a part out."""

    divisor: Tensor | None = None  # 0-d: the loss scale over the factor of clipping
    bound: float | Tensor | None = None  # clamped to plus and minus this


class Batch(NamedTuple):
    """What one launch updates: columns, all of one device and dtype. What stands in one place of each is laid out alike."""

    gradients: list[Tensor]
    steps: list[Tensor]  # one a parameter; none where the kernel keeps none
    targets: list[list[Tensor]]  # the parameters and the slots that the kernel names, written into
    fresh: list[tuple[Tensor, Tensor]]  # targets that hold nothing yet, and what they shall hold


# ---- the kernels -----------------------------------------------------------------------------------------------------


class Kernel(NamedTuple):
    """One of torch's fused kernels."""

    name: str
    slots: Callable[[Settings], tuple[str, ...]]  # what it updates besides the parameter
    numbers: Callable[[Settings], list[float]]  # its settings but for the learning rate
    launch: Callable[..., None]  # (lr, numbers, gradients, steps, weights, *slots, **amp)


def _adam(lr: Any, numbers: Sequence[float], grads: list[Tensor], steps: list[Tensor], *targets: list[Tensor], **amp: Any) -> None:
    weights, means, squares, *maxima = targets
    beta1, beta2, weight_decay, eps, amsgrad, maximize, decoupled = numbers
    kernel: Any = torch._fused_adamw_ if decoupled else torch._fused_adam_
    settings = {"weight_decay": weight_decay, "eps": eps, "amsgrad": bool(amsgrad), "maximize": bool(maximize)}
    kernel(weights, grads, means, squares, *(maxima or [[]]), steps, lr=lr, beta1=beta1, beta2=beta2, **settings, **amp)


def _sgd(lr: Any, numbers: Sequence[float], grads: list[Tensor], steps: list[Tensor], *targets: list[Tensor], **amp: Any) -> None:
    weights, *momenta = targets
    weight_decay, momentum, dampening, nesterov, maximize = numbers
    settings = {"weight_decay": weight_decay, "momentum": momentum, "dampening": dampening}
    flags = {"nesterov": bool(nesterov), "maximize": bool(maximize), "is_first_step": False}
    kernel: Any = torch._fused_sgd_
    kernel(weights, grads, *(momenta or [[]]), lr=lr, **settings, **flags, **amp)


def _adagrad(lr: Any, numbers: Sequence[float], grads: list[Tensor], steps: list[Tensor], *targets: list[Tensor], **amp: Any) -> None:
    weights, sums = targets
    lr_decay, weight_decay, eps, maximize = numbers
    settings = {"lr_decay": lr_decay, "weight_decay": weight_decay, "eps": eps, "maximize": bool(maximize)}
    kernel: Any = torch._fused_adagrad_
    kernel(weights, grads, sums, steps, lr=lr, **settings, **amp)


def _named(*names: str) -> Callable[[Settings], list[float]]:
    return lambda settings: [float(settings[name]) for name in names]


_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_KERNELS: dict[Any, Kernel] = {
    torch.optim.Adam: Kernel(  # and AdamW, its subclass
        "adam",
        lambda settings: _MOMENTS if settings["amsgrad"] else _MOMENTS[:2],
        lambda settings: [
            *map(float, settings["betas"]),
            *_named("weight_decay", "eps", "amsgrad", "maximize", "decoupled_weight_decay")(settings),
        ],
        _adam,
    ),
    torch.optim.SGD: Kernel(
        "sgd",
        lambda settings: ("momentum_buffer",) if settings["momentum"] else (),
        _named("weight_decay", "momentum", "dampening", "nesterov", "maximize"),
        _sgd,
    ),
    torch.optim.Adagrad: Kernel("adagrad", lambda settings: ("sum",), _named("lr_decay", "weight_decay", "eps", "maximize"), _adagrad),
}
_BY_NAME = {kernel.name: kernel for kernel in _KERNELS.values()}


def kernel_of(cls: Any) -> Kernel | None:
    """The kernel that makes the steps of `cls`, a class of torch.optim or one that keeps its step and its state."""
    for base, kernel in _KERNELS.items():
        # Dynamo wraps these methods, of each class apart.
        if issubclass(cls, base) and all(
            inspect.unwrap(getattr(cls, name)) is inspect.unwrap(getattr(base, name)) for name in ("step", "_init_group")
        ):
            return kernel
    return None


# ---- one launch ------------------------------------------------------------------------------------------------------


def update(kernel: Kernel, settings: Settings, batch: Batch, found_inf: Tensor | None, treatment: Treatment, *, spent: bool) -> None:
    """The update of a batch, in place, unless `found_inf`. `spent`: the gradients may be overwritten."""
    lr, numbers = settings["lr"], kernel.numbers(settings)
    if not torch.compiler.is_compiling():
        _update(kernel, lr, numbers, batch, found_inf, treatment, spent=spent)
        return
    fresh = {id(target): old for target, old in batch.fresh}
    flat = [target for column in batch.targets for target in column]
    places = [place for place, target in enumerate(flat) if id(target) in fresh]
    old = [fresh[id(flat[place])] for place in places]
    rate, lr = (0.0, lr) if isinstance(lr, Tensor) else (float(lr), None)
    bound = treatment.bound
    bound, limit = (0.0, bound) if isinstance(bound, Tensor) else (float(bound or 0.0), None)
    columns = (batch.gradients, batch.steps, flat, places, old)
    _node(kernel.name, *columns, rate, lr, numbers, found_inf, treatment.divisor, bound, limit)


@torch.library.custom_op("purescale::fused_update", mutates_args=("steps", "targets"))
def _node(
    kernel: str,
    grads: Sequence[Tensor],
    steps: Sequence[Tensor],
    targets: Sequence[Tensor],
    fresh: Sequence[int],
    old: Sequence[Tensor],
    rate: float,
    lr: Tensor | None,
    numbers: Sequence[float],
    found_inf: Tensor | None,
    divisor: Tensor | None,
    bound: float,
    limit: Tensor | None,
) -> None:
    """`_update` as one node of a compiled graph: traced op by op, the compiler would take minutes over a hundred parameters."""
    count = len(grads)
    columns = [list(targets[first : first + count]) for first in range(0, len(targets), count)]
    batch = Batch(list(grads), list(steps), columns, [(targets[place], tensor) for place, tensor in zip(fresh, old, strict=True)])
    treatment = Treatment(divisor, limit if limit is not None else bound or None)
    _update(_BY_NAME[kernel], rate if lr is None else lr, numbers, batch, found_inf, treatment, spent=False)


def _update(
    kernel: Kernel, lr: Any, numbers: Sequence[float], batch: Batch, found_inf: Tensor | None, treatment: Treatment, *, spent: bool
) -> None:
    grads, steps, targets, fresh = batch
    device, dtype = targets[0][0].device, targets[0][0].dtype
    skip = None if found_inf is None else found_inf.to(device, torch.float32)
    if fresh:
        torch._foreach_copy_([target for target, _ in fresh], [old for _, old in fresh])
    if steps:
        _foreach.add_unless(skip, steps, [torch.ones_like(steps[0])] * len(steps), 1.0)
    divisor, bound = treatment
    if divisor is not None and dtype is not torch.float64:
        divisor = divisor.to(torch.float32)
    # The kernel divides by a float32 number only, and leaves what it made of the gradients in their memory.
    divides = spent and bound is None and dtype.itemsize >= 4 and (divisor is None or divisor.dtype is torch.float32)
    if not (divides and {g.dtype for g in grads} == {dtype}):
        grads, divisor = _treated(grads, divisor, bound, dtype), None
    kernel.launch(lr, numbers, grads, steps, *targets, grad_scale=divisor, found_inf=skip)


def _treated(grads: list[Tensor], divisor: Tensor | None, bound: float | Tensor | None, dtype: torch.dtype) -> list[Tensor]:
    """The gradients as the kernel is to see them, in memory of their own but for those that nothing changes."""
    if divisor is not None:
        # Two 0-d tensors would promote to the wider dtype.
        grads = list(torch._foreach_div([_foreach.at_least_float32(g.reshape(1) if g.ndim == 0 else g) for g in grads], divisor))
    if bound is not None:
        alike = len({g.dtype for g in grads}) == 1
        grads = _foreach.clamp_list(grads, bound) if alike else [_foreach.clamp(g, bound) for g in grads]
    return [_foreach.saturating(g, dtype) for g in grads]
