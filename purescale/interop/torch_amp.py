"""torch.amp.GradScaler: its scale rule, its state dict, and the transfer of a running job of
torch.amp in both directions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from .._loss_scale.rules import NoScale, ScalerState
from .._module.functional import Apply, make_functional
from .._module.load_into import load_into
from .._optim.opt_state import OptState
from .._step.train_state import TrainState
from .._torch.dtypes import widest_float
from .._torch_optim.param_group_optimizer import ParamGroupOptimizer
from .._torch_optim.schedule import ScheduleBy
from .._tree.pytree import join_names
from .._tree.scalars import checked_positive, checked_whole, increment
from .._wrappers.master_weights import MasterState, master_weights, masters_within
from . import _live_optimizer, _schedulers
from ._common import COUNT, SCALE, Device, Format, ScaleAndCount


@dataclasses.dataclass(frozen=True)
class TorchAmpScale(ScaleAndCount):
    """Equal to `aten._amp_update_scale(scale, growth_tracker, found_inf, growth_factor,
    backoff_factor, growth_interval)`.

    Equal bit for bit with any setting, as factors are multiplied in double precision. It follows
    torch where `DynamicScale` does not:

    - The scale has no floor and no ceiling. It can become 0 and then stays 0: no step is taken, and
      `check_scaler` raises. A growth beyond float32 is dropped, and the count restarts.
    - The count is compared with `==`. If it is already above `growth_interval`, the scale does not
      grow until the next overflow.

    Change a setting of a running job with `dataclasses.replace(rule, growth_factor=...)`. In place
    of `update(new_scale)` use `state._replace(scale=torch.tensor(new_scale))`.

    Args:
        init_scale: The first scale, a positive float32.
        growth_factor: The factor of a growth, above 1.
        backoff_factor: The factor after an overflow, above 0 and below 1.
        growth_interval: The number of clean steps before a growth.

    Raises:
        TypeError: A setting is not a number.
        ValueError: A setting is out of range. GradScaler itself accepts negative and NaN ones.

    Example:
        >>> import torch
        >>> scaler = rule(init_scale=3.0, backoff_factor=0.3)
        >>> scaler.update(scaler.init(), torch.tensor(True)).scale
        tensor(0.9000)

    Source of the rule: aten/src/ATen/native/cpu/AmpGradScalerKernels.cpp, the same in the CUDA
    kernel. ShardedGradScaler with a scale on the CPU has its own rule, which can grow to inf.
    """

    first_scale = "init_scale"

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        self._check_positive("init_scale")
        self._check_factors("growth_factor", "backoff_factor")
        self._check_counts("growth_interval")

    def _next(self, scale: Tensor, count: Tensor, bad: Tensor) -> tuple[Tensor, Tensor]:
        # The kernel multiplies in double, so that a factor is not first rounded to float32.
        wide = scale.to(widest_float(scale.device))
        grown = (wide * self.growth_factor).to(torch.float32)
        lowered = (wide * self.backoff_factor).to(torch.float32)
        clean_steps = increment(count, True)
        interval_reached = ~bad & (clean_steps == self.growth_interval)
        grows = interval_reached & torch.isfinite(grown)
        return (
            torch.where(bad, lowered, torch.where(grows, grown, scale)),
            torch.where(bad | interval_reached, 0, clean_steps),
        )


rule = TorchAmpScale
_FORMAT = Format(
    "torch_amp",
    TorchAmpScale,
    {"scale": SCALE, "_growth_tracker": COUNT},
    ("growth_factor", "backoff_factor", "growth_interval"),
)


def from_state_dict(
    d: Mapping[str, Any], *, device: Device = None, accumulated: int = 1, **settings: Any
) -> tuple[TorchAmpScale, ScalerState]:
    """Equal to `rule(init_scale=d["scale"], growth_factor=d["growth_factor"],
    ...), state of d["scale"], d["_growth_tracker"]`.

    Args:
        d: What `torch.amp.GradScaler.state_dict()` returned. Its scale becomes `init_scale`, as in
            GradScaler.load_state_dict.
        device: The device of the gradients.
        accumulated: The k of a job that runs `scaler.scale(loss / k).backward()` k times a step, a
            power of two. The saved scale is divided by k, because here each microbatch's loss is
            scaled whole; otherwise about log2(k) of the first steps overflow.
        settings: Settings of `rule`, which must agree with `d`.

    Returns:
        The rule and its state.

    Raises:
        TypeError: A value is not a number.
        ValueError: `d` is another library's dict or the `{}` of a disabled scaler, its scale cannot
            train, a setting contradicts it, or `accumulated` is not a power of two.

    Example:
        >>> d = torch.amp.GradScaler("cpu", init_scale=8.0).state_dict()
        >>> from_state_dict(d)[0]
        TorchAmpScale(init_scale=8.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000)

    Source of the format: torch.amp.GradScaler.state_dict.
    """
    _FORMAT.check(d)
    scale = checked_positive("scale", d["scale"]) / _check_accumulated(accumulated)
    return _FORMAT.read({**d, "scale": scale}, settings, device)


def to_state_dict(rule: TorchAmpScale, scaler: ScalerState, accumulated: int = 1) -> dict[str, Any]:
    """Syncs with the host. Equal to what `GradScaler.state_dict()` returns at this point, for its
    `load_state_dict`.

    Args:
        rule, scaler: A `TorchAmpScale` and its state.
        accumulated: The k of a job that goes on with `loss / k`, as in `from_state_dict`: the
            scale is multiplied by k.

    Returns:
        The state dict.

    Raises:
        TypeError: `rule` is another library's.
        ValueError: The state is stacked, or `accumulated` is not a power of two.

    Example:
        >>> sorted(to_state_dict(rule(), rule().init()))
        ['_growth_tracker', 'backoff_factor', 'growth_factor', 'growth_interval', 'scale']
    """
    d = _FORMAT.write(rule, scaler)
    return {**d, "scale": d["scale"] * _check_accumulated(accumulated)}


def _check_accumulated(accumulated: Any) -> int:
    """Return the number of microbatches, a power of two."""
    count = checked_whole("accumulated", accumulated, least=1)
    if count & (count - 1):
        raise ValueError(
            f"accumulated must be a power of two, got {count}: any other rounds all gradients. "
            f"Fix: accumulated={1 << count.bit_length()}, the next one."
        )
    return count


# ---- a job in mid-run ----------------------------------------------------------------------------


def take_over(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    scheduler: LRScheduler | None = None,
    steps: int | None = None,
    schedule_by: ScheduleBy = "applied",
    in_state: Sequence[str] = (),
) -> tuple[Apply, ParamGroupOptimizer, Any, TrainState]:
    """Syncs with the host. Equal to `apply, params, buffers = make_functional(model)`,
    `optimizer, opt_state = from_torch_optimizer(optimizer, model, in_state)`, with the schedule as
    its rate, and `rule, scaler = from_state_dict(scaler.state_dict())`: the next `train_step` makes
    the step that torch's own loop would make next.

    Copies everything and changes none of the live objects. The function of a `LambdaLR` must be a
    function of the step, which is called here for each. `give_back` is the inverse. Call it between
    two iterations, after `scaler.update()` and `optimizer.zero_grad()`.

    Args:
        model: The model that `optimizer` trains; `model.module` of a DistributedDataParallel.
        optimizer: An optimizer of a class that `from_torch` takes; its parameter groups become
            `overrides`. Its step hooks do not run, and its flags (`foreach`, `fused`,
            `capturable`, `differentiable`) are left to `from_torch`.
        scaler: A GradScaler; None or a disabled one gives `NoScale()`. For a job that scales
            `loss / k` use the rule and state of `from_state_dict(d, accumulated=k)`, or about
            log2(k) of the first steps overflow.
        scheduler: A scheduler of torch that steps with the optimizer, also a chained or sequential
            one. A momentum that it cycles is in the state, as a factor. Leave out a scheduler that
            steps once an epoch: the rate is then constant until `give_back`.
        steps: The number of coming steps whose rates are tabulated, needed with a `scheduler`.
            Later steps keep the last rate, and `give_back` refuses them.
        schedule_by: `"iteration"` for a loop that calls `scheduler.step()` once a batch, whether
            the optimizer's step was skipped or not, as most loops do; `"applied"` for one that
            calls it after applied steps only. It is `schedule_by` of `from_torch`.
        in_state: Names of settings that the state holds, as in `from_torch_optimizer`, for
            `replace_settings(state, weight_decay=...)`; the rate only without a `scheduler`.

    Returns:
        `apply, optimizer, rule, state`, for `with_policy` and `train_step`. A schedule goes on from
        the scheduler's `last_epoch`, which is `state.opt_state.applied`, or `.iteration` with
        `schedule_by="iteration"`; else `applied` is the largest step count of the optimizer.
        `state.step` starts from `applied`.

    Raises:
        TypeError: `model`, `optimizer` or `scheduler` is not one of torch.
        ValueError: The parameters of optimizer and model differ; a parameter has a gradient that is
            not 0, as in half a window; ReduceLROnPlateau, a scheduler of another optimizer, without
            `steps`, or that moves a setting in the state; and all that `make_functional`,
            `from_torch_optimizer` and `from_state_dict` refuse.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        >>> apply, optimizer, rule, state = take_over(model, adamw, scaler)
        >>> optimizer, state.scaler.scale
        (from_torch(AdamW, lr=0.001), tensor(8.))

    Source of the rules: torch.optim, torch.amp.GradScaler.
    """
    apply, params, buffers = make_functional(model)
    names = _live_optimizer.names_by_group(optimizer, model, params)
    missing = params.keys() - {name for group in names for name in group}
    if missing:
        raise ValueError(
            f"the optimizer does not have {join_names(sorted(missing))} of the model. Fix: "
            "`requires_grad_(False)` of what is not trained."
        )
    _check_no_gradients(optimizer, model)
    settings, place = _settings_from_now(optimizer, scheduler, steps)
    if scheduler is not None:
        scheduled = dict.fromkeys(name for group in settings for name in group)
        for name in in_state:
            if name in scheduled:
                raise _error_of_both(name)
        in_state = [*in_state, *(name for name in scheduled if name != "lr")]
    ours, opt_state = _live_optimizer.convert_optimizer(
        optimizer, model, params, names, settings, in_state, schedule_by, place
    )
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
    `to_torch_optimizer(state.opt_state, optimizer, torch_optimizer, model)`,
    `scaler.load_state_dict(to_state_dict(rule, state.scaler))` and one `scheduler.step()` for each
    step that was applied, or for each step with `schedule_by="iteration"`.

    The inverse of `take_over`: copies the state into the live objects, so that torch's own loop can
    go on. Nothing is written unless everything fits. Parameter groups keep torch's settings, except
    those that the state holds; their rates are those of the scheduler, or without one unchanged.
    The optimizer keeps its state of frozen parameters. The scaler is ready for the next iteration,
    also after an `unscale_` without a step.

    Args:
        state: The state that the last `train_step` returned. It is not changed.
        optimizer: The optimizer from `take_over`, or a wrapper of it that is not
            `with_schedule_free`. From `with_master_weights` the model gets the float32 masters.
        rule: The rule from `take_over`.
        model: The live model that `take_over` was given.
        torch_optimizer: The live optimizer that `take_over` was given.
        scaler: The live scaler that `take_over` was given.
        scheduler: The live scheduler that `take_over` was given.

    Raises:
        TypeError: `rule` is not of `take_over`.
        ValueError: The model or the class of optimizer is another, the scheduler was stepped
            meanwhile or ends before the last step, more steps were made than the `steps` of
            `take_over`, the state holds the rate beside a scheduler, or it is stacked.

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
    inner, opt_state = _live_optimizer.check_innermost(state.opt_state, optimizer, torch_optimizer)
    if scheduler is not None and "lr" in inner.config.in_state:
        raise _error_of_both("lr")
    params, masters = state.params, masters_within(state.opt_state)
    if isinstance(masters, MasterState):
        params = master_weights(params, masters)
    loaded = _live_optimizer.state_dict_with(torch_optimizer, model, inner.config, opt_state)
    enabled = scaler if scaler is not None and scaler.is_enabled() else None
    saved = {} if enabled is None else to_state_dict(rule, state.scaler)
    steps = _steps_since(scheduler, torch_optimizer, inner, opt_state)

    load_into(model, params, state.buffers)
    _live_optimizer.load_state(torch_optimizer, loaded, inner.config.in_state)
    if enabled is not None:
        enabled.load_state_dict(saved)
        enabled.scale(state.scaler.scale)  # makes its tensors, which `update` needs
        enabled.update(saved["scale"])  # forgets an `unscale_` that no step followed
    if scheduler is not None:
        _schedulers.step_scheduler(scheduler, steps)


def _error_of_both(name: str) -> ValueError:
    return ValueError(
        f"{name} is in the state, and a scheduler moves that of torch's optimizer. Fix: leave "
        f"{name} out of in_state, or the scheduler out of take_over and give_back."
    )


def _check_no_gradients(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Refuse gradients that the optimizer's next step would use, frozen parameters' too."""
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    waiting = [
        name
        for name, p in model.named_parameters()
        if id(p) in stepped and p.grad is not None and bool(p.grad.to_dense().any())
    ]
    if waiting:
        raise ValueError(
            f"{join_names(waiting)}: `.grad` is not 0. Fix: finish the step that it waits for, "
            "`scaler.step(optimizer)` and `scaler.update()`; then `optimizer.zero_grad()`."
        )


def _settings_from_now(
    optimizer: torch.optim.Optimizer, scheduler: Any, steps: int | None
) -> tuple[list[dict[str, Any]], int | None]:
    """Return the rate of each parameter group, with a scheduler as a table beside all else that it
    moves, and the scheduler's step.
    """
    if (scheduler is None) != (steps is None):
        raise ValueError(
            "take_over tabulates the rates of a scheduler for the next `steps`, and got one of the "
            "two alone. Fix: take_over(..., scheduler, steps=10_000), at least those made here."
        )
    if scheduler is None:
        return [{"lr": float(group["lr"])} for group in optimizer.param_groups], None
    _schedulers.check_scheduler(scheduler, optimizer, "scheduler")
    count, place = checked_whole("steps", steps, least=1), _schedulers.steps_of(scheduler)
    with _schedulers.restoring(scheduler):
        moved = _schedulers.tabulate(scheduler, count)
    columns = zip(optimizer.param_groups, moved, strict=True)
    return [_schedulers.scheduled_settings(*column, place) for column in columns], place


def _steps_since(
    scheduler: Any, optimizer: torch.optim.Optimizer, ours: ParamGroupOptimizer, opt_state: OptState
) -> int:
    """Return the number of steps since the scheduler's last: applied ones, or iterations. Refuse
    what the scheduler cannot follow, before anything is changed.
    """
    table = ours.config.lr
    if callable(table) != (scheduler is not None):
        raise ValueError(
            "one of take_over and give_back was given a scheduler, and the other was not. Fix: "
            "give it to both or to none."
        )
    if scheduler is None:
        return 0
    _schedulers.check_scheduler(scheduler, optimizer, "scheduler")
    by_iteration = isinstance(opt_state.iteration, Tensor)
    count = int(opt_state.iteration if by_iteration else opt_state.applied)
    place = _schedulers.steps_of(scheduler)
    if count < place:
        raise ValueError(
            f"the scheduler is at step {place}, the state at {count}. Fix: leave it to give_back."
        )
    if isinstance(table, _schedulers.RateTable) and count > (end := table.start + len(table.rates)):
        raise ValueError(
            f"{count - end} steps were made beyond the {len(table.rates)} that take_over "
            f"tabulated. Fix: take_over(..., steps={count - table.start}), and the steps again."
        )
    with _schedulers.restoring(scheduler):
        _schedulers.step_scheduler(scheduler, count - place)
    return count - place
