"""The protocol of loss-scale rules, and those that use only the overflow flag: dynamic, static and
no loss scale.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from .._torch import private
from .._torch.tensor_list import metadata_matcher
from .._torch.tracing import PLAIN_OR_FAKE, current_context, traced
from .._tree import scalars
from .._tree.hints import document_fields
from .._tree.scalars import as_flag, increment


class HasScale(Protocol):
    """The protocol of the state of a rule: any NamedTuple of tensors with a 0-d `scale`."""

    @property
    def scale(self) -> Tensor: ...


State = TypeVar("State", bound=HasScale)


class Rule(Protocol[State]):
    """The protocol of a rule: any object with these two pure methods. Neither makes an accelerator
    wait; they raise only for wrong arguments, such as the state of another rule. If the class has
    `takes_amax = True`, `update` gets `grad_amax` as a third argument.
    """

    def init(self, device: torch.device | str | None = None) -> State: ...

    def update(self, scaler: State, found_inf: Tensor, /, *args: Any, **kwargs: Any) -> State: ...


def takes_amax(rule: Any) -> bool:
    """Return True if `rule.update` takes the largest gradient."""
    return bool(getattr(rule, "takes_amax", False))


def call_rule(rule: Any, scaler: Any, found_inf: Tensor, amax: Any) -> Any:
    """Call `rule.update`, with `amax` if the rule takes it."""
    return rule.update(scaler, found_inf, *([amax] if takes_amax(rule) else []))


class RuleTraits(NamedTuple):
    """The facts about a rule that a step needs."""

    takes_amax: bool
    # `update` is of this package: it returns a state that differs from its argument in values only,
    # each tensor in memory of its own, which a step then need not check
    is_builtin: bool = False
    is_dynamic: bool = False  # `update` is that of `DynamicScale`


def checked_rule_traits(rule: Any) -> RuleTraits:
    """Refuse an object that is not a rule, and an `update` that does not match `takes_amax`. Return
    the traits of a rule.
    """
    wants_amax = takes_amax(rule)
    if not torch.compiler.is_dynamo_compiling():
        update = getattr(type(rule), "update", None)
        if update in _OURS:
            is_dynamic = update is DynamicScale.update
            return RuleTraits(wants_amax, is_builtin=True, is_dynamic=is_dynamic)
        if _CHECKED.get(type(rule)) is wants_amax:
            return RuleTraits(wants_amax)
    if what := scalars.protocol_violation(rule, "init", "update"):
        raise TypeError(
            f"rule is {what}; expected an object with `init(device)` and `update(scaler, "
            "found_inf)`. Fix: DynamicScale(); docs/recipes.md has a rule of your own."
        )
    if torch.compiler.is_dynamo_compiling():
        return RuleTraits(wants_amax)
    arguments = "scaler, found_inf, amax" if wants_amax else "scaler, found_inf"
    try:
        inspect.signature(rule.update).bind(*arguments.split(", "))
    except ValueError:  # no signature, because it is not a Python function
        pass
    except TypeError:
        raise TypeError(
            f"{type(rule).__name__}.update cannot be called as update({arguments}), and takes_amax "
            f"is {wants_amax}. Fix: `takes_amax = True` in the class and `def update(self, scaler, "
            "found_inf, amax)` if the rule needs the largest gradient; otherwise neither."
        ) from None
    _CHECKED[type(rule)] = wants_amax
    return RuleTraits(wants_amax)


# The classes whose `update` was checked, because a signature costs as much as an update.
_CHECKED: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()

Update = TypeVar("Update", bound=Callable[..., Any])
_OURS: list[Any] = []


def builtin_update(update: Update) -> Update:
    """Decorate an `update` of this package, as in `RuleTraits`."""
    _OURS.append(update)
    return update


def checked_flag(found_inf: Any, scaler: Any, kind: type[Any]) -> Tensor:
    """Return `found_inf` as a 0-d bool tensor; refuse the state of another rule."""
    check_state(scaler, kind)
    return as_flag(found_inf, like=scaler.scale)


def check_state(scaler: Any, kind: type[Any]) -> None:
    """Refuse the state of another rule, which lacks fields that `update` uses."""
    if isinstance(scaler, kind):
        return
    present = [name for name in kind._fields if isinstance(getattr(scaler, name, None), Tensor)]
    missing = [name for name in kind._fields if name not in present]
    if not missing:
        return
    fix = "rule.init(device)"
    if "scale" in present:
        fix = f"rule.init({str(scaler.scale.device)!r})._replace(scale=scaler.scale)"
    raise TypeError(
        f"scaler is {type(scaler).__name__}; expected a {kind.__name__}, a tuple of "
        f"{', '.join(kind._fields)}, of which it lacks {', '.join(missing)}. Likely cause: a rule "
        "that was replaced in mid-run, the state of a whole step in place of `state.scaler`, or a "
        f"dict in place of `{kind.__name__}(**saved)`. Fix: `scaler = {fix}`."
    )


# ---- rules ---------------------------------------------------------------------------------------


@document_fields
class ScalerState(NamedTuple):
    """The state of a rule: four 0-d tensors on one device. Make it with `rule.init(device)`.

    Attributes:
        scale: float32 []. The factor of the loss.
        growth_tracker: int32 []. The number of clean steps since the scale last moved.
        hysteresis_tracker: int32 []. The number of overflows still tolerated before the scale backs
            off.
        consecutive_skips: int32 []. The number of overflows in a row, for `check_scaler`.
    """

    scale: Tensor
    growth_tracker: Tensor
    hysteresis_tracker: Tensor
    consecutive_skips: Tensor


def scaler_state(
    scale: float,
    growth_tracker: int = 0,
    hysteresis_tracker: int = 0,
    device: torch.device | str | None = None,
) -> ScalerState:
    """Return a `ScalerState` from host numbers."""

    def count(number: int) -> Tensor:
        return torch.full((), number, dtype=torch.int32, device=device)

    return ScalerState(
        scale=torch.full((), scale, dtype=torch.float32, device=device),
        growth_tracker=count(growth_tracker),
        hysteresis_tracker=count(hysteresis_tracker),
        consecutive_skips=count(0),
    )


def check_factors(rule: Any, growth: str, backoff: str | None = None) -> None:
    """Refuse a growth factor of at most 1 and a backoff factor of at least 1."""
    if getattr(rule, growth) <= 1:
        raise ValueError(
            f"{growth} must be above 1, got {getattr(rule, growth)!r}. Fix: {growth}=2.0."
        )
    if backoff is not None and getattr(rule, backoff) >= 1:
        raise ValueError(
            f"{backoff} must lie between 0 and 1, got {getattr(rule, backoff)!r}. Fix: "
            f"{backoff}=0.5."
        )


@dataclasses.dataclass(frozen=True)
class DynamicScale:
    """Halve the scale on an overflow, double it after `growth_interval` clean steps in a row.

    Equal bit for bit, for `hysteresis=1` and a scale within its bounds, to
    `torch.ops.aten._amp_update_scale(scale, growth_tracker, found_inf, growth_factor,
    backoff_factor, growth_interval)`.

    A scale of 0, inf or NaN, as a damaged checkpoint may have, becomes `min_scale` on the next
    update; one outside of `[min_scale, max_scale]` becomes the nearer bound.

    Args:
        init_scale: The first scale. This, the factors and the bounds are powers of two that float32
            holds, because any other scale rounds every gradient twice.
        growth_factor: The factor after `growth_interval` clean steps, above 1.
        backoff_factor: The factor after an overflow, between 0 and 1.
        growth_interval: The number of clean steps in a row, on the last of which the scale grows.
            It may be lowered in mid-run.
        min_scale, max_scale: The bounds, `min_scale <= init_scale <= max_scale`.
        hysteresis: The number of overflows after which the scale backs off. Each of them skips its
            step. It may be lowered in mid-run.
        refill: When the tolerance is restored: `"growth"`, after the growth interval (Megatron-LM,
            DeepSpeed's default), or `"clean"`, on every clean step (DeepSpeed's
            consecutive_hysteresis, apex's kernel). With `"clean"`, overflows that are never
            `hysteresis` in a row never lower the scale.

    Raises:
        ValueError: A setting is out of range.
        TypeError: A setting is not a number.

    Example:
        >>> import torch
        >>> rule = DynamicScale(init_scale=8.0, growth_interval=2)
        >>> state = rule.init()
        >>> for overflow in [True, False, False]:
        ...     state = rule.update(state, torch.tensor(overflow))
        ...     print(state.scale.item())
        4.0
        4.0
        8.0

    Source of the rule: Micikevicius et al., Mixed Precision Training (arXiv 1710.03740), and
    torch's `_amp_update_scale_`; hysteresis from Megatron-LM's DynamicGradScaler and apex's
    update_scale_hysteresis.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 2.0**-24
    max_scale: float = 2.0**24
    hysteresis: int = 1
    refill: str = "growth"

    def __post_init__(self) -> None:
        powers = ("init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale")
        scalars.normalize_fields(self, scalars.checked_power_of_two, *powers)
        scalars.normalize_fields(
            self, functools.partial(scalars.checked_whole, least=1), "growth_interval", "hysteresis"
        )
        check_factors(self, "growth_factor", "backoff_factor")
        if not self.min_scale <= self.init_scale <= self.max_scale:
            raise ValueError(
                f"min_scale <= init_scale <= max_scale must hold, got {self.min_scale!r}, "
                f"{self.init_scale!r}, {self.max_scale!r}. Fix: move the bound that is crossed."
            )
        if self.refill not in ("growth", "clean"):
            raise ValueError(f"refill must be 'growth' or 'clean', got {self.refill!r}.")

    def init(self, device: torch.device | str | None = None) -> ScalerState:
        """Return the state to start from, on `device` (that of the gradients)."""
        return scaler_state(self.init_scale, hysteresis_tracker=self.hysteresis, device=device)

    @builtin_update
    def update(self, scaler: ScalerState, found_inf: Tensor) -> ScalerState:
        """Return the state for the next step. `found_inf`: 0-d bool, True after an overflow.
        Reads a value on a CPU only; raises only for the state of another rule.
        """
        if current_context().host_can_read_cpu and may_update_on_host(scaler, found_inf):
            return update_on_host(self, scaler, overflow=bool(found_inf))
        found_inf = checked_flag(found_inf, scaler, ScalerState)
        # The operator leaves a scale alone that would grow to inf, the formula clamps it.
        never_inf = self.max_scale * self.growth_factor <= 2.0**127
        if self.hysteresis == 1 and never_inf and _takes_operator(scaler, found_inf):
            return self._update_by_operator(scaler, found_inf)
        # inf and NaN become 0, which the clamp repairs as it repairs what is below 0.
        scale = scaler.scale.nan_to_num(0.0, 0.0, 0.0)

        clean_steps = (scaler.growth_tracker.clamp(0, 2**31 - 2) + 1).masked_fill(found_inf, 0)
        # >= and not ==: growth_interval may be lowered below the count.
        interval_reached = clean_steps >= self.growth_interval
        tolerance = scaler.hysteresis_tracker.clamp(0, self.hysteresis)
        # Not below 0, because a job that overflows for ever must not wrap the counter around.
        tolerance = torch.add(tolerance, found_inf, alpha=-1).clamp(min=0)
        back_off = found_inf & (tolerance <= 0)

        moved = torch.where(interval_reached, scale * self.growth_factor, scale)
        moved = torch.where(back_off, scale * self.backoff_factor, moved)
        return ScalerState(
            scale=moved.clamp(self.min_scale, self.max_scale),
            growth_tracker=clean_steps.masked_fill(interval_reached, 0),
            hysteresis_tracker=tolerance.masked_fill(
                interval_reached if self.refill == "growth" else ~found_inf, self.hysteresis
            ),
            consecutive_skips=(scaler.consecutive_skips.clamp(max=2**31 - 2) + 1) * found_inf,
        )

    def _update_by_operator(self, scaler: ScalerState, found_inf: Tensor) -> ScalerState:
        """Equal to the formula for `hysteresis=1`, in fewer kernels."""
        scale = scaler.scale.nan_to_num(0.0, 0.0, 0.0)
        # The operator grows on ==, so a count beyond a lowered interval is brought back.
        count = scaler.growth_tracker.clamp(0, self.growth_interval - 1)
        factors = self.growth_factor, self.backoff_factor
        private.update_scale(scale, count, found_inf.float(), *factors, self.growth_interval)
        skips, skipped = scaler.consecutive_skips, found_inf.to(scaler.consecutive_skips.dtype)
        tolerance = scaler.hysteresis_tracker.clamp(0, 1)
        refilled = (count if self.refill == "growth" else found_inf).logical_not()
        return ScalerState(
            scale=scale.clamp_(self.min_scale, self.max_scale),
            growth_tracker=count,
            # An overflow resets the count too, and leaves no tolerance.
            hysteresis_tracker=tolerance.masked_fill_(refilled, 1).masked_fill_(found_inf, 0),
            consecutive_skips=torch.addcmul(skipped, skipped, skips.clamp(max=2**31 - 2)),
        )


def update_on_host(rule: DynamicScale, scaler: ScalerState, *, overflow: bool) -> ScalerState:
    """Equal to `rule.update(scaler, overflow)`, in numbers that the host has read."""
    scale, clean_steps, tolerance, skips = map(Tensor.item, scaler)
    scale = scale if math.isfinite(scale) else 0.0
    clean_steps = 0 if overflow else min(max(clean_steps, 0), 2**31 - 2) + 1
    interval_reached = clean_steps >= rule.growth_interval
    tolerance = max(min(max(tolerance, 0), rule.hysteresis) - overflow, 0)
    if interval_reached:
        scale, clean_steps = scale * rule.growth_factor, 0
    elif overflow and tolerance == 0:
        scale *= rule.backoff_factor
    if interval_reached if rule.refill == "growth" else not overflow:
        tolerance = rule.hysteresis
    scale = min(max(scale, rule.min_scale), rule.max_scale)
    skips = min(skips, 2**31 - 2) + 1 if overflow else 0
    numbers = scale, clean_steps, tolerance, skips
    pairs = zip(scaler, numbers, strict=True)
    return ScalerState(*[torch.full((), n, dtype=old.dtype, device="cpu") for old, n in pairs])


def may_update_on_host(scaler: Any, found_inf: Tensor) -> bool:
    """Return True if these are a state and a flag on a CPU, whose numbers give what tensors would;
    for a caller that may read.
    """
    # Another record may have these fields, and more.
    return isinstance(scaler, ScalerState) and _are_on_host()((*scaler, found_inf))


@functools.cache
def _are_on_host() -> Callable[[Sequence[Any]], bool]:
    """Return a function that is True for the tensors of a `ScalerState` on a CPU, then a flag."""

    def tensors() -> list[Tensor]:
        return [*scaler_state(1.0, device="cpu"), torch.zeros((), dtype=torch.bool, device="cpu")]

    return metadata_matcher(private.outside_of_modes(tensors))


def _takes_operator(scaler: ScalerState, found_inf: Tensor) -> bool:
    """Return True if torch's operator may update this state. It has kernels for a CPU and CUDA
    alone, so that must be in eager mode, on one such device, off every graph, without subclasses:
    the CUDA kernel may take addresses without asking whose they are.
    """
    scale, count = scaler.scale, scaler.growth_tracker
    tensors = scale, count, found_inf
    return (
        bool(private.update_scale)
        and not traced()
        and (scale.is_cpu or scale.is_cuda)
        and len({tensor.device for tensor in tensors}) == 1
        and {type(tensor) for tensor in tensors} <= PLAIN_OR_FAKE
        and not any([tensor.requires_grad for tensor in tensors])
        and scale.dtype is torch.float32
        and count.dtype is torch.int32
        and scale.ndim == count.ndim == 0
    )


@dataclasses.dataclass(frozen=True)
class StaticScale:
    """A scale that never changes. Steps that overflow are still skipped.

    The next update resets a restored state with another scale to `scale`.

    Args:
        scale: A power of two that float32 holds.

    Raises:
        ValueError: `scale` is not a power of two that float32 holds.

    Example:
        >>> StaticScale(512.0).init().scale
        tensor(512.)

    Source of the rule: mmpose's Fp16OptimizerHook (512) and apex's `loss_scale=128.0`, which both
    take a step on inf.
    """

    scale: float

    def __post_init__(self) -> None:
        scalars.normalize_fields(self, scalars.checked_power_of_two, "scale")

    def init(self, device: torch.device | str | None = None) -> ScalerState:
        """Return the state to start from, on `device` (that of the gradients)."""
        return scaler_state(self.scale, device=device)

    @builtin_update
    def update(self, scaler: ScalerState, found_inf: Tensor) -> ScalerState:
        """Return the scale of the rule, whatever the state holds. `consecutive_skips` counts, the
        other counters stay 0.
        """
        found_inf = checked_flag(found_inf, scaler, ScalerState)
        return ScalerState(
            scale=torch.full_like(scaler.scale, self.scale),
            growth_tracker=torch.zeros_like(scaler.growth_tracker),
            hysteresis_tracker=torch.zeros_like(scaler.hysteresis_tracker),
            consecutive_skips=torch.where(found_inf, increment(scaler.consecutive_skips, True), 0),
        )


@dataclasses.dataclass(frozen=True)
class NoScale(StaticScale):
    """A static scale of 1, for float32 and bfloat16: the loop needs no `enabled=` branch. Bad steps
    are still skipped.

    Example:
        >>> NoScale().init().scale
        tensor(1.)

    Source of the rule: jmp's NoOpLossScale.
    """

    scale: float = dataclasses.field(default=1.0, init=False)
