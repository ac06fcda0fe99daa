"""torch's fused optimizer kernels on values: unscale, clip, skip and update in one pass over
memory.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _foreach, _torch
from ._torch import foreach, fused

Settings = Mapping[str, Any]


class Treatment(NamedTuple):
    """What happens to a gradient on its way into the update, in this order; `None` leaves a part
    out.
    """

    divisor: Tensor | None = None  # 0-d: the loss scale
    factor: Tensor | None = None  # 0-d, from 0 to 1: of clipping by norm
    bound: float | Tensor | None = None  # clamped to plus and minus this


class Batch(NamedTuple):
    """What one launch updates: columns, all of one device and dtype. What stands in one place of
    each is laid out alike.
    """

    gradients: list[Tensor]
    steps: list[Tensor]  # one a parameter; none where the kernel keeps none
    targets: list[list[Tensor]]  # the parameters and the slots that the kernel names, written into
    # what each target shall hold first, None where it does already; no columns where all do
    old: list[list[Tensor | None]]


# ---- the kernels ---------------------------------------------------------------------------------


class Kernel(NamedTuple):
    """One of torch's fused kernels."""

    name: str
    slots: Callable[[Settings], tuple[str, ...]]  # what it updates besides the parameter
    numbers: Callable[[Settings], list[float]]  # its settings but for the learning rate
    launch: Callable[..., None]  # (lr, numbers, gradients, steps, weights, *slots, **amp)


def _adam(
    lr: Any,
    numbers: Sequence[float],
    grads: list[Tensor],
    steps: list[Tensor],
    *targets: list[Tensor],
    **amp: Any,
) -> None:
    weights, means, squares, *maxima = targets
    beta1, beta2, weight_decay, eps, amsgrad, maximize, decoupled = numbers
    kernel = fused.adamw_ if decoupled else fused.adam_
    settings = {
        "weight_decay": weight_decay,
        "eps": eps,
        "amsgrad": bool(amsgrad),
        "maximize": bool(maximize),
    }
    kernel(
        weights,
        grads,
        means,
        squares,
        *(maxima or [[]]),
        steps,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        **settings,
        **amp,
    )


def _sgd(
    lr: Any,
    numbers: Sequence[float],
    grads: list[Tensor],
    steps: list[Tensor],
    *targets: list[Tensor],
    **amp: Any,
) -> None:
    weights, *momenta = targets
    weight_decay, momentum, dampening, nesterov, maximize = numbers
    settings = {"weight_decay": weight_decay, "momentum": momentum, "dampening": dampening}
    flags = {"nesterov": bool(nesterov), "maximize": bool(maximize), "is_first_step": False}
    fused.sgd_(weights, grads, *(momenta or [[]]), lr=lr, **settings, **flags, **amp)


def _adagrad(
    lr: Any,
    numbers: Sequence[float],
    grads: list[Tensor],
    steps: list[Tensor],
    *targets: list[Tensor],
    **amp: Any,
) -> None:
    weights, sums = targets
    lr_decay, weight_decay, eps, maximize = numbers
    settings = {
        "lr_decay": lr_decay,
        "weight_decay": weight_decay,
        "eps": eps,
        "maximize": bool(maximize),
    }
    fused.adagrad_(weights, grads, sums, steps, lr=lr, **settings, **amp)


def _named(*names: str) -> Callable[[Settings], list[float]]:
    return lambda settings: [float(settings[name]) for name in names]


_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_KERNELS: dict[Any, Kernel] = {
    torch.optim.Adam: Kernel(  # and AdamW, its subclass
        "adam",
        lambda settings: _MOMENTS if settings["amsgrad"] else _MOMENTS[:2],
        lambda settings: [
            *map(float, settings["betas"]),
            *_named("weight_decay", "eps", "amsgrad", "maximize", "decoupled_weight_decay")(
                settings
            ),
        ],
        _adam,
    ),
    torch.optim.SGD: Kernel(
        "sgd",
        lambda settings: ("momentum_buffer",) if settings["momentum"] else (),
        _named("weight_decay", "momentum", "dampening", "nesterov", "maximize"),
        _sgd,
    ),
    torch.optim.Adagrad: Kernel(
        "adagrad",
        lambda settings: ("sum",),
        _named("lr_decay", "weight_decay", "eps", "maximize"),
        _adagrad,
    ),
}
_BY_NAME = {kernel.name: kernel for kernel in _KERNELS.values()}


def kernel_of(cls: Any) -> Kernel | None:
    """The kernel that makes the steps of `cls`, a class of torch.optim or one that keeps its step
    and its state.
    """
    for base, kernel in _KERNELS.items():
        # Dynamo wraps these methods, of each class apart.
        if issubclass(cls, base) and all(
            inspect.unwrap(getattr(cls, name)) is inspect.unwrap(getattr(base, name))
            for name in _torch.MADE_BY
        ):
            return kernel
    return None


def fused_is_right(weights: Iterable[Tensor]) -> bool:
    """Whether torch's fused kernels step right on all of these. On a CPU, where torch never takes
    them by itself, they leave half parameters beyond the first vector lanes as they are.
    """
    return not any(weight.is_cpu and weight.dtype.itemsize < 4 for weight in weights)


# ---- one launch ----------------------------------------------------------------------------------


def update(
    kernel: Kernel,
    settings: Settings,
    batch: Batch,
    found_inf: Tensor | None,
    treatment: Treatment,
    *,
    spent: bool,
) -> None:
    """The update of a batch, in place, unless `found_inf`. `spent`: the gradients may be
    overwritten.
    """
    lr, numbers = settings["lr"], kernel.numbers(settings)
    if not torch.compiler.is_compiling():
        _update(kernel, lr, numbers, batch, found_inf, treatment, spent=spent)
        return
    flat = [target for column in batch.targets for target in column]
    held = [old for column in batch.old for old in column]
    places = [place for place, old in enumerate(held) if old is not None]
    old = [tensor for tensor in held if tensor is not None]
    rate, lr = (0.0, lr) if isinstance(lr, Tensor) else (float(lr), None)
    bound = treatment.bound
    bound, limit = (0.0, bound) if isinstance(bound, Tensor) else (float(bound or 0.0), None)
    columns = (batch.gradients, batch.steps, flat, places, old)
    treated = (treatment.divisor, treatment.factor, bound, limit)
    _node(kernel.name, *columns, rate, lr, numbers, found_inf, *treated)


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
    factor: Tensor | None,
    bound: float,
    limit: Tensor | None,
) -> None:
    """`_update` as one node of a compiled graph: traced op by op, the compiler would take minutes
    over a hundred parameters.
    """
    count = len(grads)
    held: list[Tensor | None] = [None] * (len(targets) if old else 0)
    for place, tensor in zip(fresh, old, strict=True):
        held[place] = tensor
    cuts = [slice(first, first + count) for first in range(0, len(targets), count)]
    columns = [list(targets[cut]) for cut in cuts]
    batch = Batch(list(grads), list(steps), columns, [held[cut] for cut in cuts] if old else [])
    treatment = Treatment(divisor, factor, limit if limit is not None else bound or None)
    _update(
        _BY_NAME[kernel],
        rate if lr is None else lr,
        numbers,
        batch,
        found_inf,
        folded(treatment),
        spent=False,
    )


def _update(
    kernel: Kernel,
    lr: Any,
    numbers: Sequence[float],
    batch: Batch,
    found_inf: Tensor | None,
    treatment: Treatment,
    *,
    spent: bool,
) -> None:
    grads, steps, targets, olds = batch
    device, dtype = targets[0][0].device, targets[0][0].dtype
    skip = None if found_inf is None else found_inf.to(device, torch.float32)
    if steps:
        _torch.masked_add_(steps, [torch.ones_like(steps[0])] * len(steps), 1.0, skip)
    divisor, factor, bound = treatment
    if factor is not None:
        grads = _foreach.at_least_float32_list(grads, apart=False)
        factor = factor.to(torch.promote_types(dtype, torch.float32))
        grads = _foreach.multiply(grads, factor, donate=spent)
    if divisor is not None and dtype is not torch.float64:
        divisor = divisor.to(torch.float32)
    # The kernel divides by a float32 number only, and leaves what it made of the gradients in their
    # memory.
    divides = (
        spent
        and bound is None
        and dtype.itemsize >= 4
        and (divisor is None or divisor.dtype is torch.float32)
    )
    divides = divides and set(map(_dtype, grads)) == {dtype}
    in_place = not any(old is not None for column in olds for old in column)
    scratch: list[Tensor] = []
    for some in (
        [slice(None)] if device.type != "cpu" or (divides and in_place) else _portions(grads)
    ):
        into = [column[some] for column in targets]
        pairs = [
            (t, o)
            for new, old in zip(into, olds, strict=False)
            for t, o in zip(new, old[some], strict=True)
            if o is not None
        ]
        if pairs:
            foreach.copy_([target for target, _ in pairs], [old for _, old in pairs])
        ready = grads[some]
        if not divides and (
            divisor is not None or bound is not None or set(map(_dtype, ready)) != {dtype}
        ):
            ready = _treated(ready, divisor, bound, dtype, scratch)
        kernel.launch(
            lr,
            numbers,
            ready,
            steps[some],
            *into,
            grad_scale=divisor if divides else None,
            found_inf=skip,
        )


def folded(treatment: Treatment) -> Treatment:
    """The same with one divisor that unscales and clips at once, where float32 holds it. It is
    looked at on a CPU only, where that waits for nothing.
    """
    divisor, factor, bound = treatment
    if factor is None:
        return treatment
    both = factor.reciprocal() if divisor is None else divisor / factor
    if type(both) is Tensor and both.is_cpu and both.item() <= torch.finfo(torch.float32).max:
        return Treatment(both, None, bound)
    return treatment


_dtype = operator.attrgetter("dtype")
# Elements: what a CPU has just copied is still in its cache when the kernel reads it.
_PORTION = 2**19


def _portions(grads: list[Tensor]) -> list[slice]:
    """The places of `grads` in portions of about that size."""
    cuts, size = [0], 0
    for place, count in enumerate(map(Tensor.numel, grads)):
        if size and size + count > _PORTION:
            cuts.append(place)
            size = 0
        size += count
    return [slice(first, last) for first, last in zip(cuts, [*cuts[1:], len(grads)], strict=True)]


def _treated(
    grads: list[Tensor],
    divisor: Tensor | None,
    bound: float | Tensor | None,
    dtype: torch.dtype,
    scratch: list[Tensor],
) -> list[Tensor]:
    """The gradients as the kernel is to see them, in memory of their own but for those that nothing
    changes.

    On a CPU, where fresh memory is what is slow, in that of `scratch`, which is used again.
    """
    if (
        divisor is not None
        and grads[0].is_cpu
        and {g.dtype for g in grads} == {divisor.dtype}
        and all(map(Tensor.is_contiguous, grads))
    ):
        sizes = list(map(Tensor.numel, grads))
        if not scratch or scratch[0].numel() < sum(sizes):
            scratch[:] = [torch.empty(max(sum(sizes), _PORTION), dtype=divisor.dtype, device="cpu")]
        places = list(torch.split(scratch[0][: sum(sizes)], sizes))
        for place, gradient in zip(places, grads, strict=True):
            torch.div(gradient.view(-1), divisor, out=place)
        grads, divisor = places, None
    if divisor is not None:
        # Two 0-d tensors would promote to the wider dtype.
        grads = [g.reshape(1) if g.ndim == 0 else g for g in grads]
        grads = list(foreach.div(_foreach.at_least_float32_list(grads, apart=False), divisor))
    if bound is not None:
        grads = _foreach.clamp_list(grads, bound)
    return _foreach.cast_list(grads, dtype, apart=False)
