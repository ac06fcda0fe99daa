"""A guard that rejects steps whose loss or gradient norm spikes, and the protocol of guards."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from .._torch.dtypes import widest_float
from .._tree import scalars
from .._tree.hints import document_fields
from .._tree.pytree import Tree
from .._tree.scalars import increment

State = TypeVar("State")


class Guard(Protocol[State]):
    """The protocol of a guard: any object with these two pure methods, and a NamedTuple of tensors
    as its state. Neither method reads a tensor's value.

    `update` is given the loss and the gradient norm of a step, 0-d tensors as in `StepInfo`;
    `grad_norm` is `()` if `train_step` has no `max_norm`. It returns the next state and `bad`, a
    0-d bool tensor: True rejects the step. If something else skips the step, both are dropped.
    """

    def init(self, device: torch.device | str | None = None) -> State: ...

    def update(self, state: State, loss: Tensor, grad_norm: Any, /) -> tuple[State, Tensor]: ...


@document_fields
class SpikeStats(NamedTuple):
    """Running statistics of one measured number: 0-d tensors on one device.

    Attributes:
        mean: float64 [] (float32 on mps). The running mean.
        variance: float64 [] (float32 on mps). The running variance.
        num_steps: int32 []. The number of steps in them.
    """

    mean: Tensor
    variance: Tensor
    num_steps: Tensor


@document_fields
class SpikeState(NamedTuple):
    """The state of a `SpikeGuard`. Make it with `guard.init(device)`.

    Attributes:
        loss: The `SpikeStats` of the loss: `mean`, `variance`, `num_steps`.
        grad_norm: The `SpikeStats` of the gradient norm.
        consecutive_rejections: int32 []. The number of rejections in a row, for `check_guard`.
    """

    loss: SpikeStats
    grad_norm: SpikeStats
    consecutive_rejections: Tensor


@dataclasses.dataclass(frozen=True)
class SpikeGuard:
    """Reject a step whose loss or gradient norm is more than `sigma` standard deviations above its
    running mean.

    For `train_step(..., guard=guard)`, over a state of `init_train_state(..., guard=guard)`. With
    `max_norm=math.inf` the norm is judged without clipping; without `max_norm` only the loss is
    judged.

    The guard does not learn from a step that it rejects, nor from one whose loss or norm is not
    finite, or so large that its square is not (1e154, on mps 1e19); it never rejects NaN. It does
    not count an exact 0, which says nothing about the usual size, for example with sparse rewards.
    Deviations below a millionth of the mean may be rounding, so they count as a millionth.

    `state.consecutive_rejections` counts up to `patience`, for `check_guard`. An accepted step ends
    the row if it moves something: its numbers are finite, and its gradient norm (without one, its
    loss) is not 0.

    Args:
        sigma: The number of standard deviations, above 0.
        decay: The decay of the running mean and variance, between 0 and 1. The first
            `1 / (1 - decay)` steps have equal weights.
        warmup: The number of accepted steps before the first is judged, at least 2.
        patience: The number of rejections in a row, at least 1. The spike after them is accepted,
            and the guard learns everything anew, `warmup` included, because the loss has risen for
            good.

    Raises:
        ValueError: A setting is out of range.
        TypeError: A setting is not a number.

    Example:
        >>> import torch
        >>> guard = SpikeGuard(warmup=4)
        >>> state, verdicts = guard.init(), []
        >>> for loss in (2.0, 2.1, 1.9, 2.0, 2.1, 9.0, 2.0):
        ...     state, bad = guard.update(state, torch.tensor(loss), ())
        ...     verdicts.append(bad.item())
        >>> verdicts
        [False, False, False, False, False, True, False]

    Source of the rule: OLMo-core's SkipStepOptimizer and levanter's skip_bad_steps, over a window;
    ZClip (arXiv 2504.02507), by moving averages. The variance is West's, Communications of the ACM
    22 (1979).
    """

    sigma: float = 6.0
    decay: float = 0.99
    warmup: int = 20
    patience: int = 10

    def __post_init__(self) -> None:
        scalars.normalize_fields(self, scalars.checked_positive, "sigma", "decay")
        scalars.normalize_fields(self, functools.partial(scalars.checked_whole, least=2), "warmup")
        scalars.normalize_fields(
            self, functools.partial(scalars.checked_whole, least=1), "patience"
        )
        if not self.decay < 1:
            raise ValueError(f"decay must be between 0 and 1, got {self.decay!r}. Fix: decay=0.99.")

    def init(self, device: torch.device | str | None = None) -> SpikeState:
        """Return the state to start from, without any statistics."""

        def nothing() -> SpikeStats:
            count = torch.zeros((), dtype=torch.int32, device=device)
            mean, variance = (
                torch.zeros((), dtype=widest_float(count.device), device=device) for _ in range(2)
            )
            return SpikeStats(mean, variance, count)

        rejections = torch.zeros((), dtype=torch.int32, device=device)
        return SpikeState(nothing(), nothing(), rejections)

    def update(
        self, state: SpikeState, loss: Tensor, grad_norm: Any = (), /
    ) -> tuple[SpikeState, Tensor]:
        """Return the next state, and a 0-d bool: True rejects the step, because loss or norm is a
        spike and fewer than `patience` steps before it in a row were rejected. `grad_norm`: a 0-d
        tensor, or `()` if it was not measured.
        """
        if not isinstance(state, SpikeState):
            raise TypeError(
                f"state is {type(state).__name__}; expected a SpikeState. Fix: "
                "`guard.init(device)`, or `guard.update(train_state.guard, loss, grad_norm)`."
            )
        numbers = (loss, grad_norm) if isinstance(grad_norm, Tensor) else (loss,)
        learnt = (state.loss, state.grad_norm)
        pairs = [(stats, x.to(stats.mean.dtype)) for stats, x in zip(learnt, numbers, strict=False)]
        spike = torch.stack([self._is_spike(stats, x) for stats, x in pairs]).any()
        rejections = state.consecutive_rejections
        gives_in = spike & (rejections >= self.patience)
        bad = spike & ~gives_in
        learn = ~bad & torch.isfinite(torch.stack([x for _, x in pairs])).all()
        new = [self._learnt(_forgotten(stats, gives_in), x, learn) for stats, x in pairs]
        new += [_forgotten(stats, gives_in) for stats in learnt[len(pairs) :]]
        # A step whose gradients are all 0 moves nothing, so it must not end the row.
        ends = gives_in | (learn & (pairs[-1][1] != 0))
        rejections = torch.where(ends, 0, increment(rejections, bad))
        return SpikeState(new[0], new[1], rejections), bad

    def _is_spike(self, stats: SpikeStats, value: Tensor) -> Tensor:
        deviation = torch.maximum(stats.variance.sqrt(), stats.mean.abs() * _RESOLUTION)
        return (value > stats.mean + self.sigma * deviation) & (stats.num_steps >= self.warmup)

    def _learnt(self, stats: SpikeStats, value: Tensor, learn: Tensor) -> SpikeStats:
        rate = (1 / (stats.num_steps.to(value.dtype) + 1)).clamp(min=1 - self.decay)
        change = value - stats.mean
        mean = stats.mean + rate * change
        variance = (1 - rate) * (stats.variance + rate * change * change)
        # A value whose square is out of range would make every later variance inf or NaN.
        learn = learn & (value != 0) & torch.isfinite(variance)
        return SpikeStats(
            torch.where(learn, mean, stats.mean),
            torch.where(learn, variance, stats.variance),
            increment(stats.num_steps, learn),
        )


def _forgotten(stats: SpikeStats, forget: Tensor) -> SpikeStats:
    """Return the statistics in fresh memory, reset if `forget` is True."""
    return SpikeStats(*[torch.where(forget, 0, number) for number in stats])


_RESOLUTION = 2.0**-20  # relative, of a float32 loss or norm, a sum of many numbers


def check_guard(state: Any, max_rejections: int) -> None:
    """Raise `FloatingPointError` if a guard has rejected too many steps in a row. Syncs with the
    host.

    Args:
        state: The state of one guard, `state.guard` of a TrainState, whose field
            `consecutive_rejections` is the count.
        max_rejections: How many rejections in a row are allowed. A `SpikeGuard` accepts a spike
            after `patience` of them, so allow fewer, and call this at least every
            `patience - max_rejections` steps.

    Raises:
        FloatingPointError: The count is above `max_rejections`.
        TypeError: The state has no such count.

    Example:
        >>> import torch
        >>> guard = SpikeGuard(warmup=2, patience=10)
        >>> state = guard.init()
        >>> for loss in (2.0, 2.1, 9.0, 9.0, 9.0):
        ...     state, bad = guard.update(state, torch.tensor(loss), ())
        >>> check_guard(state, max_rejections=3)
        >>> check_guard(state, max_rejections=2)
        Traceback (most recent call last):
        FloatingPointError: 3 steps in a row were rejected by the guard, more than max_rej...
    """
    most = scalars.checked_whole("max_rejections", max_rejections)
    count = getattr(state, "consecutive_rejections", None)
    if not isinstance(count, Tensor) or count.ndim:
        raise TypeError(
            "check_guard takes the state of one guard, its `consecutive_rejections` a 0-d tensor, "
            f"got {scalars.short_repr(state)}. Fix: `check_guard(state.guard, {most})`; in a guard "
            "of your own, a field of that name."
        )
    if int(count) > most:
        raise FloatingPointError(
            f"{int(count)} steps in a row were rejected by the guard, more than "
            f"max_rejections={most}. Likely cause: loss or gradient norm has risen for good. Fix: "
            "a checkpoint before the rise, or `state._replace(guard=guard.init(device))`."
        )


# ---- how a step calls a guard --------------------------------------------------------------------


def check_is_guard(guard: Any) -> None:
    """Refuse an object that is not a guard."""
    if what := scalars.protocol_violation(guard, "init", "update"):
        raise TypeError(
            f"guard is {what}; expected an object with `init(device)` and `update(state, loss, "
            "grad_norm)`. Fix: SpikeGuard(), or None; docs/recipes.md has a guard of your own."
        )


def check_guard_state(guard: Any, state: Tree) -> None:
    """Refuse a guard without its state, and a state without its guard."""
    if guard is None:
        raise ValueError(
            f"state.guard is a {type(state).__name__}, but the step has no guard. Fix: "
            "`train_step(..., guard=guard)`, or `state._replace(guard=())`."
        )
    check_is_guard(guard)
    if state == () and guard.init(None) != ():  # the state of a guard may be ()
        raise ValueError(
            "the step has a guard, but state.guard is (). Fix: `init_train_state(..., "
            "guard=guard)`, or `state._replace(guard=guard.init(device))`."
        )
