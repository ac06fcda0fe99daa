"""torch.amp.GradScaler: its rule, whose floats are multiplied in double precision, its state dict,
which holds the settings too; and a whole job of torch.amp in mid-run, both ways.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from .._loss_scale.rules import NoScale, ScalerState, check_factors, scaler_state
from .._module.functional import Apply, load_into, make_functional
from .._optim.schedule import advance, stand_in
from .._optim.torch_optim import TorchOptimizer
from .._step.train_step import TrainState
from .._torch.dtypes import widest_float
from .._tree.scalars import whole
from ._common import (
    Device,
    ScaleAndCount,
    check_dict,
    check_saveable,
    saved_scale,
    settle,
    settle_counts,
    with_settings,
)
from ._live_optimizer import (
    as_from_torch,
    names_by_group,
    rates_from_now,
    slots_of,
    steps_since,
    unwrapped,
    weights_of,
    with_slots,
)

_SETTINGS = ("growth_factor", "backoff_factor", "growth_interval")
_KEYS = ("scale", *_SETTINGS, "_growth_tracker")


@dataclasses.dataclass(frozen=True)
class TorchAmpScale(ScaleAndCount):
    """Equal to `aten._amp_update_scale(scale, growth_tracker, found_inf, growth_factor,
    backoff_factor, growth_interval)`.

    Bit for bit with any setting, powers of two or not. What `DynamicScale` does otherwise, and this
    does as torch does:
    - no floor and no ceiling: the scale can become 0 and stays so (no step is taken then,
      `check_scaler` raises); growth beyond float32 is refused, and the count starts anew.
    - the count is compared with `==`: with an interval below the count nothing grows until the next
      overflow.

    `init_scale`, `growth_factor > 1`, `0 < backoff_factor < 1`: positive float32.
    `growth_interval`: steps. Changed in mid-run, as with `set_growth_factor`, by
    `dataclasses.replace(rule, growth_factor=...)`; `update(new_scale)` is
    `state._replace(scale=torch.tensor(new_scale))`.

    Raises `ValueError` and `TypeError` for other settings when made. GradScaler itself takes
    negative and NaN ones.

    >>> import torch
    >>> scaler = rule(init_scale=3.0, backoff_factor=0.3)
    >>> scaler.update(scaler.init(), torch.tensor(True)).scale
    tensor(0.9000)

    Source of the rule: aten/src/ATen/native/cpu/AmpGradScalerKernels.cpp, the same in the CUDA
    kernel. ShardedGradScaler with a scale on the CPU has a rule of its own, without the guard
    against growth to inf.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        settle(self, "init_scale", "growth_factor", "backoff_factor")
        check_factors(self, "growth_factor", "backoff_factor")
        settle_counts(self, "growth_interval")

    def init(self, device: Device = None) -> ScalerState:
        """The state to start from, on `device` (that of the gradients)."""
        return scaler_state(self.init_scale, device=device)

    def _next(self, scale: Tensor, count: Tensor, bad: Tensor) -> tuple[Tensor, Tensor]:
        # In double, as the kernel does: a factor that is no float32 would otherwise be rounded
        # before it multiplies.
        wide = scale.to(widest_float(scale.device))
        grown = (wide * self.growth_factor).to(torch.float32)
        lowered = (wide * self.backoff_factor).to(torch.float32)
        clean_steps = count + 1
        interval_reached = ~bad & (clean_steps == self.growth_interval)
        grows = interval_reached & torch.isfinite(grown)
        return (
            torch.where(bad, lowered, torch.where(grows, grown, scale)),
            torch.where(bad | interval_reached, 0, clean_steps),
        )


rule = TorchAmpScale


def from_state_dict(
    d: Mapping[str, Any], *, device: Device = None, accumulated: int = 1, **settings: Any
) -> tuple[TorchAmpScale, ScalerState]:
    """Equal to `rule(init_scale=d["scale"], growth_factor=d["growth_factor"],
    ...), state of d["scale"], d["_growth_tracker"]`.

    `d`: what `torch.amp.GradScaler.state_dict()` returned. It holds every setting; `settings` under
    `rule()`'s names may repeat them. `init_scale` becomes the saved scale, as in
    GradScaler.load_state_dict. `device`: that of the gradients.

    `accumulated=k`, a power of two: of a job that made a step of k times
    `scaler.scale(loss / k).backward()`. Here the mean of each microbatch is scaled whole, so the
    same gradients need a scale that is k times lower: the saved one over k. Without it the first
    steps may overflow, about log2(k) of them, until the scale has come down by itself.

    Raises `ValueError` for another library's dict, the `{}` of a disabled scaler, a scale that
    cannot train, a setting that contradicts `d` and an `accumulated` that is no power of two;
    `TypeError` for what is no number.

    >>> d = torch.amp.GradScaler("cpu", init_scale=8.0).state_dict()
    >>> from_state_dict(d)[0]
    TorchAmpScale(init_scale=8.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000)

    Source of the format: torch.amp.GradScaler.state_dict.
    """
    check_dict(d, "torch_amp", _KEYS)
    scale = saved_scale("scale", saved_scale("scale", d["scale"]) / _parts(accumulated))
    made = rule(**{"init_scale": scale, **with_settings(d, _SETTINGS, settings)})
    return made, scaler_state(scale, whole("_growth_tracker", d["_growth_tracker"]), device=device)


def to_state_dict(rule: TorchAmpScale, scaler: ScalerState, accumulated: int = 1) -> dict[str, Any]:
    """Syncs with the host. Equal to what `GradScaler.state_dict()` returns at this point;
    `load_state_dict` takes it.

    `accumulated=k`, as in `from_state_dict`, of a job that will go on with `loss / k`: the scale
    times k.

    Raises `TypeError` for another library's rule, `ValueError` for stacked states and an
    `accumulated` that is no power of two.

    >>> sorted(to_state_dict(rule(), rule().init()))
    ['_growth_tracker', 'backoff_factor', 'growth_factor', 'growth_interval', 'scale']

    Source of the format: torch.amp.GradScaler.state_dict.
    """
    check_saveable("torch_amp", rule, (TorchAmpScale,), scaler, ScalerState)
    return {
        "scale": float(scaler.scale) * _parts(accumulated),
        "growth_factor": rule.growth_factor,
        "backoff_factor": rule.backoff_factor,
        "growth_interval": rule.growth_interval,
        "_growth_tracker": int(scaler.growth_tracker),
    }


def _parts(accumulated: Any) -> int:
    count = whole("accumulated", accumulated, least=1)
    if count & (count - 1):
        raise ValueError(
            f"accumulated must be a power of two, got {count}: any other would round every "
            f"gradient from here on. Fix: the next one, accumulated={1 << count.bit_length()}; "
            "the scale grows back by itself."
        )
    return count


# ---- a job in mid-run ----------------------------------------------------------------------------


def take_over(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    scheduler: LRScheduler | None = None,
    steps: int | None = None,
) -> tuple[Apply, TorchOptimizer, Any, TrainState]:
    """Syncs with the host. Equal to `apply, params, buffers = make_functional(model)`,
    `optimizer = from_torch(type(optimizer), lr=schedule, overrides=groups)`,
    `rule, scaler = from_state_dict(scaler.state_dict())`, with the state of all of them as it is:
    the next `train_step` makes the step that torch's own loop would make next.

    Copies everything and changes none of the live objects; `give_back` is the way back.

    Args:
        model: What `optimizer` trains. Of a model in DistributedDataParallel: `model.module`.
        optimizer: Of a class that `from_torch` takes. Its parameter groups become `overrides`.
            Flags (`foreach`, `fused`, `capturable`, `differentiable`) are left out, so that
            `from_torch` chooses, and step hooks do not run.
        scaler: A GradScaler; None or a disabled one gives `NoScale()`. A job that scales `loss / k`
            for each of k microbatches has a scale that is k times too high here, and it overflows
            about log2(k) times; `from_state_dict(d, accumulated=k)` gives that of such a job.
        scheduler: Of torch, chained and sequential ones too, one that steps with the optimizer.
            One that steps once an epoch is left out: the rate stays as it is until `give_back`.
        steps: The number of steps to tabulate from now on, needed with a `scheduler`. Later steps
            keep the last rate.

    Returns:
        `apply, optimizer, rule, state`, for `with_policy` and `train_step`. A schedule goes on from
        `state.opt_state.applied`, which is the scheduler's `last_epoch`, else the largest step
        count of the optimizer; so does `state.step`.

    Raises:
        TypeError: What is not a model, an optimizer or a scheduler of torch.
        ValueError: The optimizer has a parameter that is not in the model, or the model one to be
            trained that is not in the optimizer; ReduceLROnPlateau, a momentum that cycles, a
            scheduler of another optimizer or without `steps`; and what `make_functional`,
            `from_torch` and `from_state_dict` refuse.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        >>> apply, optimizer, rule, state = take_over(model, adamw, scaler)
        >>> optimizer, state.scaler.scale
        (from_torch(AdamW, lr=0.001), tensor(8.))

    Source of the rules: torch.optim, torch.amp.GradScaler.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer is {type(optimizer).__name__}; expected one of torch.optim, the live one. "
            "Likely cause: arguments in another order. Fix: take_over(model, optimizer, scaler, "
            "scheduler, steps=...)."
        )
    apply, params, buffers = make_functional(model)
    names = names_by_group(optimizer, model, params)
    rates, place = rates_from_now(optimizer, scheduler, steps)
    ours = as_from_torch(optimizer, names, rates)
    opt_state = ours.from_state_dict(slots_of(optimizer, model, params), params, applied=place)
    device = opt_state.applied.device
    rule: Any = NoScale()
    state = rule.init(device)
    if scaler is not None and scaler.is_enabled():
        rule, state = from_state_dict(scaler.state_dict(), device=device)
    step = opt_state.applied.clone()
    return apply, ours, rule, TrainState(params, buffers, opt_state, state, step, rng=())


def give_back(
    state: TrainState,
    optimizer: Any,
    rule: Any,
    model: nn.Module,
    torch_optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    scheduler: LRScheduler | None = None,
) -> None:
    """Syncs with the host. Equal to `load_into(model, state.params, state.buffers)`,
    `torch_optimizer.load_state_dict(...)`, `scaler.load_state_dict(to_state_dict(rule,
    state.scaler))` and one `scheduler.step()` for each step that was applied.

    The way back of `take_over`: writes the state into the live objects, so that torch's own loop
    goes on. Nothing is written unless all of it fits. Parameter groups stay torch's own, and their
    rates are those of the scheduler; without one they are as they were. Parameters that are frozen
    keep what the optimizer has of them.

    Args:
        state: What the last `train_step` returned. It is copied, and stays as it is.
        optimizer: That of `take_over`, or one around it: of `with_master_weights` the model is
            given the float32 masters.
        rule: That of `take_over`.
        model: The live model, as are `torch_optimizer`, `scaler` and `scheduler`, all as
            `take_over` was given them.

    Raises:
        TypeError: A rule or state that is not of `take_over`.
        ValueError: Another model or class of optimizer, a scheduler that was stepped meanwhile or
            that ends before the last step, settings in the state, stacked states.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        >>> apply, optimizer, rule, state = take_over(model, adamw, scaler)
        >>> state = state._replace(scaler=rule.update(state.scaler, torch.tensor(True)))
        >>> give_back(state, optimizer, rule, model, adamw, scaler)
        >>> scaler.get_scale()
        4.0

    Source of the formats: torch.optim.Optimizer.load_state_dict, GradScaler.load_state_dict.
    """
    inner, opt_state = unwrapped(state, optimizer, torch_optimizer)
    params = weights_of(state)
    loaded = with_slots(torch_optimizer, model, opt_state)
    enabled = scaler if scaler is not None and scaler.is_enabled() else None
    saved = {} if enabled is None else to_state_dict(rule, state.scaler)
    steps = steps_since(scheduler, torch_optimizer, inner, opt_state)
    if scheduler is not None:
        # Where it ends before the last step this raises, and nothing has been changed.
        advance(stand_in(scheduler), steps)

    load_into(model, params, state.buffers)
    torch_optimizer.load_state_dict(loaded)
    if enabled is not None:
        enabled.load_state_dict(saved)
    if scheduler is not None:
        advance(scheduler, steps)
