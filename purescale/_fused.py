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


class Row(NamedTuple):
    """A parameter in an update. All of its tensors are dense and laid out alike."""

    gradient: Tensor
    step: Tensor | None
    targets: list[Tensor]  # the parameter and the slots that its kernel names, written into
    fresh: list[int]  # which of `targets` hold nothing yet
    old: list[Tensor]  # what they shall hold


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


# ---- one pass --------------------------------------------------------------------------------------------------------

_TILE = 2**19  # elements: what a CPU has just unscaled is still in its cache when the kernel reads it


def counts_launches(device: torch.device) -> bool:
    """Whether an operation costs by itself, however small; on a CPU what it leaves in the cache is worth more."""
    return device.type != "cpu"


def update(kernel: Kernel, settings: Settings, rows: list[Row], found_inf: Tensor | None, treatment: Treatment, *, spent: bool) -> None:
    """The update of `rows`, in place, unless `found_inf`. `spent`: the gradients may be overwritten."""
    lr, numbers = settings["lr"], kernel.numbers(settings)
    if not rows:
        return
    if not torch.compiler.is_compiling():
        _update(kernel, lr, numbers, rows, found_inf, treatment, spent=spent)
        return
    scale, factor, bound = treatment
    columns = [
        [row.gradient for row in rows],
        [row.step for row in rows if row.step is not None],
        [target for row in rows for target in row.targets],
        [len(row.targets) * index + place for index, row in enumerate(rows) for place in row.fresh],
        [tensor for row in rows for tensor in row.old],
    ]
    rate, lr = (0.0, lr) if isinstance(lr, Tensor) else (float(lr), None)
    bound, limit = (0.0, bound) if isinstance(bound, Tensor) else (float(bound or 0.0), None)
    _node(kernel.name, *columns, rate, lr, numbers, found_inf, scale, factor, bound, limit)


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
    scale: Tensor | None,
    factor: Tensor | None,
    bound: float,
    limit: Tensor | None,
) -> None:
    """`_update` as one node of a compiled graph: traced op by op, the compiler would take minutes over a hundred parameters."""
    width = len(targets) // len(grads)
    into = dict(zip(fresh, old, strict=True))
    rows = []
    for index, gradient in enumerate(grads):
        first = index * width
        missing = [place for place in range(width) if first + place in into]
        step = steps[index] if steps else None
        rows.append(Row(gradient, step, list(targets[first : first + width]), missing, [into[first + place] for place in missing]))
    treatment = Treatment(scale, factor, limit if limit is not None else bound or None)
    _update(_BY_NAME[kernel], rate if lr is None else lr, numbers, rows, found_inf, treatment, spent=False)


def _update(
    kernel: Kernel,
    lr: Any,
    numbers: Sequence[float],
    rows: list[Row],
    found_inf: Tensor | None,
    treatment: Treatment,
    *,
    spent: bool,
) -> None:
    kinds = {(row.targets[0].device, row.targets[0].dtype) for row in rows}
    for device, dtype in kinds:
        alike = rows if len(kinds) == 1 else [row for row in rows if (row.targets[0].device, row.targets[0].dtype) == (device, dtype)]
        skip = None if found_inf is None else found_inf.to(device, torch.float32)
        steps = [row.step for row in alike if row.step is not None]
        if steps:
            one = torch.ones_like(steps[0])
            _foreach.add_unless(None if skip is None else skip.to(one.device), steps, [one] * len(steps), 1.0)
        divisor = _one_divisor(alike, treatment, device, dtype)
        whole = spent and divisor is not None
        then = treatment if divisor is None else Treatment(scale=divisor)
        tiled = not whole and not counts_launches(device) and (not _is_nothing(then) or any(row.fresh for row in alike))
        scratch = torch.empty(
            2 * _TILE if tiled and not _is_nothing(then) else 0, dtype=torch.promote_types(dtype, torch.float32), device="cpu"
        )
        for grads, counts, targets, fresh, old in _tiles(alike) if tiled else [_columns(alike)]:
            if fresh:
                torch._foreach_copy_(fresh, old)
            ready = grads if whole else _treated_in(scratch, grads, then, dtype) if tiled else _treated(grads, then, dtype)
            kernel.launch(lr, numbers, ready, counts, *targets, grad_scale=divisor if whole else None, found_inf=skip)


def _is_nothing(treatment: Treatment) -> bool:
    return treatment.scale is None and treatment.factor is None and treatment.bound is None


def _one_divisor(rows: list[Row], treatment: Treatment, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    """What the kernel could divide by in place of all treatment, overwriting the gradients: a pass less."""
    scale, factor, bound = treatment
    if scale is None or bound is not None or dtype.itemsize < 4 or any(row.gradient.dtype is not dtype for row in rows):
        return None
    if factor is None:
        return scale
    return scale / factor.to(scale.dtype) if counts_launches(device) else None  # rounds once, and not twice as the parts do


def _treated(grads: list[Tensor], treatment: Treatment, dtype: torch.dtype) -> list[Tensor]:
    """The gradients as the kernel is to see them, in memory of their own but for those that nothing changes."""
    scale, factor, bound = treatment
    grads = [g.reshape(1) if g.ndim == 0 else g for g in grads]  # two 0-d tensors would promote to the wider dtype
    if scale is not None:
        grads = list(torch._foreach_div([_foreach.at_least_float32(g) for g in grads], scale))
    if factor is not None:
        grads = list(torch._foreach_mul(grads, factor))
    if bound is not None:
        grads = [_foreach.clamp(g, bound) for g in grads]
    return [_foreach.saturating(g, dtype) for g in grads]


def _treated_in(scratch: Tensor, grads: list[Tensor], treatment: Treatment, dtype: torch.dtype) -> list[Tensor]:
    """`_treated` of a tile in memory that is used again, since fresh memory is what is slow."""
    scale, factor, bound = treatment
    if _is_nothing(treatment) or any(g.dtype is not scratch.dtype for g in grads):
        return _treated(grads, treatment, dtype)
    sizes = [g.numel() for g in grads]
    row = scratch[: sum(sizes)]
    places = list(torch.split(row, sizes))
    if scale is not None and sizes[0] > _foreach.SMALL:
        for place, gradient in zip(places, grads, strict=True):
            torch.div(_foreach.in_memory_order(gradient), scale, out=place)
    else:  # one operation for all: what is spent on a small tensor is the call
        torch.cat([_foreach.in_memory_order(g) for g in grads], out=row)
        if scale is not None:
            row.div_(scale)
    if factor is not None:
        row.mul_(factor)
    if bound is not None:
        _foreach.clamp(row, bound, in_place=True)
    return [_foreach.saturating(place, dtype) for place in places]


_Columns = tuple[list[Tensor], list[Tensor], list[list[Tensor]], list[Tensor], list[Tensor]]


def _columns(rows: list[Row]) -> _Columns:
    """`rows` as the lists that a kernel takes."""
    return (
        [row.gradient for row in rows],
        [row.step for row in rows if row.step is not None],
        [list(column) for column in zip(*(row.targets for row in rows), strict=True)],
        [row.targets[place] for row in rows for place in row.fresh],
        [tensor for row in rows for tensor in row.old],
    )


def _tiles(rows: list[Row]) -> Iterator[_Columns]:
    """`rows` in tiles of about that size: large ones cut, small ones apart. The last first, since of the gradients those were read last."""
    waiting: dict[bool, list[Row]] = {True: [], False: []}
    sizes = {True: 0, False: 0}
    for row in reversed(rows):
        for piece in _pieces(row):
            size = piece.gradient.numel()
            small = size <= _foreach.SMALL
            waiting[small].append(piece)
            sizes[small] += size
            if sizes[small] >= _TILE:
                yield _columns(waiting[small])
                waiting[small], sizes[small] = [], 0
    yield from (_columns(pieces) for pieces in waiting.values() if pieces)


def _pieces(row: Row) -> list[Row]:
    if row.gradient.numel() <= _TILE:
        return [row]
    width = len(row.targets)
    pieces = reversed(_foreach.cut((row.gradient, *row.targets, *row.old), _TILE))
    return [Row(first, row.step, list(rest[:width]), row.fresh, list(rest[width:])) for first, *rest in pieces]
