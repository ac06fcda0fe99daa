"""torch's fused optimizer kernels on values: unscale, clip, skip and update in one pass over memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _foreach

Settings = Mapping[str, Any]


class Treatment(NamedTuple):
    """What happens to a gradient on its way into the update, in this order; `None` leaves a part out."""

    scale: Tensor | None = None  # divided by this
    factor: Tensor | None = None  # times this
    bound: float | Tensor | None = None  # clamped to plus and minus this

    @property
    def is_nothing(self) -> bool:
        return self.scale is None and self.factor is None and self.bound is None


class Row(NamedTuple):
    """A parameter in an update. All of its tensors are dense and laid out alike."""

    gradient: Tensor
    step: Tensor | None
    targets: list[Tensor]  # the parameter and the slots that its kernel names, written into
    fresh: list[Tensor]  # those of `targets` that hold nothing yet
    old: list[Tensor]  # what they shall hold


# ---- the kernels -----------------------------------------------------------------------------------------------------


class Kernel(NamedTuple):
    """One of torch's fused kernels."""

    slots: Callable[[Settings], tuple[str, ...]]  # what it updates besides the parameter
    launch: Callable[..., None]  # (settings, gradients, steps, weights, *slots, **amp)


def _adam(settings: Settings, grads: list[Tensor], steps: list[Tensor], *targets: list[Tensor], **amp: Any) -> None:
    weights, means, squares, *maxima = targets
    kernel: Any = torch._fused_adamw_ if settings["decoupled_weight_decay"] else torch._fused_adam_
    beta1, beta2 = settings["betas"]
    named = {name: settings[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
    kernel(weights, grads, means, squares, *(maxima or [[]]), steps, beta1=beta1, beta2=beta2, **named, **amp)


def _adam_slots(settings: Settings) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if settings["amsgrad"] else ("exp_avg", "exp_avg_sq")


def _sgd(settings: Settings, grads: list[Tensor], steps: list[Tensor], *targets: list[Tensor], **amp: Any) -> None:
    weights, *momenta = targets
    named = {name: settings[name] for name in ("lr", "weight_decay", "momentum", "dampening", "nesterov", "maximize")}
    kernel: Any = torch._fused_sgd_
    kernel(weights, grads, *(momenta or [[]]), is_first_step=False, **named, **amp)


_PLUS = {"lr": -1.0, "weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "maximize": False}


def _adagrad(settings: Settings, grads: list[Tensor], steps: list[Tensor], *targets: list[Tensor], **amp: Any) -> None:
    named = {name: settings[name] for name in ("lr", "lr_decay", "weight_decay", "eps", "maximize")}
    kernel: Any = torch._fused_adagrad_
    kernel(targets[0], grads, targets[1], steps, **named, **amp)


_KERNELS: dict[Any, Kernel] = {
    torch.optim.Adam: Kernel(_adam_slots, _adam),  # and AdamW, its subclass
    torch.optim.SGD: Kernel(lambda settings: ("momentum_buffer",) if settings["momentum"] else (), _sgd),
    torch.optim.Adagrad: Kernel(lambda settings: ("sum",), _adagrad),
}


def kernel_of(cls: Any) -> Kernel | None:
    """The kernel that makes the steps of `cls`, a class of torch.optim or one that keeps its step and its state."""
    for base, kernel in _KERNELS.items():
        # Dynamo wraps these methods, of each class apart.
        if issubclass(cls, base) and all(
            inspect.unwrap(getattr(cls, name)) is inspect.unwrap(getattr(base, name)) for name in ("step", "_init_group")
        ):
            return kernel
    return None


# ---- one pass --------------------------------------------------------------------------------------------------------

_TILE = 2**18  # elements: what a CPU has just unscaled is still in its cache when the kernel reads it


def overwrites_gradients(grads: Sequence[Tensor]) -> bool:
    """Whether a pass over memory is saved by leaving unscaling to the kernel, which writes the gradients back; not tile by tile."""
    return not all(g.is_cpu for g in grads)


def update(kernel: Kernel, settings: Settings, rows: list[Row], found_inf: Tensor | None, treatment: Treatment, *, spent: bool) -> None:
    """The update of `rows`, in place, unless `found_inf`. `spent`: the gradients may be overwritten."""
    kinds = {(row.targets[0].device, row.targets[0].dtype) for row in rows}
    for device, dtype in kinds:
        alike = rows if len(kinds) == 1 else [row for row in rows if (row.targets[0].device, row.targets[0].dtype) == (device, dtype)]
        skip = None if found_inf is None else found_inf.to(device, torch.float32)
        steps = [row.step for row in alike if row.step is not None]
        if steps:
            # Plus 1, unless the flag forbids it: the one list kernel that leaves that to the device.
            one = torch.ones_like(steps[0])
            flag = None if skip is None else skip.to(one.device)
            _sgd(_PLUS, [one] * len(steps), [], steps, found_inf=flag)
        tiled = not overwrites_gradients([row.gradient for row in alike]) and (not treatment.is_nothing or any(row.fresh for row in alike))
        for grads, counts, targets, fresh, old in _tiles(alike) if tiled else [_columns(alike)]:
            if fresh:
                torch._foreach_copy_(fresh, old)
            divisor = None
            if spent and not tiled:
                divisor = _one_divisor(grads, treatment, dtype)
            ready = grads if divisor is not None else _treated(grads, treatment, dtype)
            kernel.launch(settings, ready, counts, *targets, grad_scale=divisor, found_inf=skip)


def _treated(grads: list[Tensor], treatment: Treatment, dtype: torch.dtype) -> list[Tensor]:
    """The gradients as the kernel is to see them, in memory of their own but for those that nothing changes."""
    scale, factor, bound = treatment
    if treatment.is_nothing:
        return [_foreach.saturating(g, dtype) for g in grads]
    if all(g.is_cpu and g.dtype is grads[0].dtype for g in grads) and len(grads) > 1:
        # One operation for all: what is spent on a small tensor is the call.
        sizes = [g.numel() for g in grads]
        return list(torch.split(_treated([torch._utils._flatten_dense_tensors(grads)], treatment, dtype)[0], sizes))
    if scale is not None:
        grads = list(torch._foreach_div([_foreach.at_least_float32(g) for g in grads], scale))
    if factor is not None and scale is not None:
        torch._foreach_mul_(grads, factor)
    elif factor is not None:
        grads = list(torch._foreach_mul(grads, factor))
    if bound is not None:
        grads = [_foreach.clamp(g, bound) for g in grads]
    return [_foreach.saturating(g, dtype) for g in grads]


def _one_divisor(grads: list[Tensor], treatment: Treatment, dtype: torch.dtype) -> Tensor | None:
    """What the kernel itself can divide by, in place of all treatment: a pass less, and clipping rounds once and not twice."""
    scale, factor, bound = treatment
    if scale is None or bound is not None or any(g.dtype is not dtype for g in grads) or dtype.itemsize < 4:
        return None
    return scale if factor is None else scale / factor.to(scale.dtype)


_Columns = tuple[list[Tensor], list[Tensor], list[list[Tensor]], list[Tensor], list[Tensor]]


def _columns(rows: list[Row]) -> _Columns:
    """`rows` as the lists that a kernel takes."""
    return (
        [row.gradient for row in rows],
        [row.step for row in rows if row.step is not None],
        [list(column) for column in zip(*(row.targets for row in rows), strict=True)],
        [tensor for row in rows for tensor in row.fresh],
        [tensor for row in rows for tensor in row.old],
    )


def _tiles(rows: list[Row]) -> Iterator[_Columns]:
    """`rows` in tiles: large ones cut, small ones together. The last first, since of the gradients those were read last."""
    small: list[Row] = []
    size = 0
    for row in reversed(rows):
        if row.gradient.numel() > _TILE:
            tensors = (row.gradient, *row.targets, *row.fresh, *row.old)
            count, middle = 1 + len(row.targets), 1 + len(row.targets) + len(row.fresh)
            for pieces in reversed(list(zip(*map(_cut, tensors), strict=True))):
                targets, fresh, old = pieces[1:count], list(pieces[count:middle]), list(pieces[middle:])
                yield [pieces[0]], [] if row.step is None else [row.step], [[piece] for piece in targets], fresh, old
            continue
        small.append(row)
        size += row.gradient.numel()
        if size > _TILE:
            yield _columns(small)
            small, size = [], 0
    if small:
        yield _columns(small)


def _cut(tensor: Tensor) -> Sequence[Tensor]:
    return torch.split(tensor.as_strided((tensor.numel(),), (1,)), _TILE)
