"""torch's schedulers as tables of rates."""

from __future__ import annotations

import array
import contextlib
import copy
import dataclasses
import hashlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from .._torch import private
from .._torch.transfer import to_device
from .._torch_optim.schedule import check_rate
from .._tree.scalars import checked_real, checked_whole

Scheduled = Literal["lr", "momentum"]


def schedule_from_torch(
    make: Callable[[torch.optim.Optimizer], LRScheduler],
    lr: float,
    steps: int,
    setting: Scheduled = "lr",
) -> RateTable:
    """Equal to `lambda applied: table[min(applied, steps - 1)]`, where `table` is what torch's own
    loop uses, each rate rounded to float32:

        theirs = torch.optim.SGD([weight], lr=lr)
        scheduler, table = make(theirs), []
        for _ in range(steps):
            table.append(theirs.param_groups[0]["lr"])
            theirs.step()
            scheduler.step()

    The loop runs once, here, on the host. A step looks its rate up in the table, without a read, so
    one compiled step serves every count, and `torch.vmap` over states gives each member the rate of
    its own count. The table takes 4 bytes per step on each device that uses it.

    Args:
        make: A function from an optimizer to a scheduler of torch for it, chained and sequential
            ones too: `lambda opt: CosineAnnealingLR(opt, T_max=1000)`. It is called once.
        lr: The rate that the scheduler starts from, as in `torch.optim.SGD(..., lr=lr)`. Give 1.0
            for a schedule that multiplies a rate in the state (`in_state=("lr",)`).
        steps: The length of the table. Later steps use the last rate in it.
        setting: `"momentum"` for what OneCycleLR and CyclicLR cycle beside the rate: a `momentum`
            or the first of `betas` for `from_torch`, with its name in `in_state`.

    Returns:
        A function from a count (an integer tensor of any shape) to rates, float32 in that shape: an
        `lr` for `from_torch` and its `overrides`. For a loop that calls `scheduler.step()` once a
        batch, skipped or not, use `from_torch(..., schedule_by="iteration")`; for one that calls it
        once an epoch, `lr=lambda count: schedule(count // steps_per_epoch)` and
        `schedule_by="iteration"` too. By default only applied steps count, so each skip would make
        every later epoch begin a step late.

    Raises:
        TypeError: If `make` does not return a scheduler of torch.
        ValueError: If the scheduler is a ReduceLROnPlateau, which needs a loss, moves the momentum
            beside the rate (`cycle_momentum=False`), belongs to another optimizer, or gives a rate
            that is negative, NaN or out of the range of float32. One that ends before `steps`, as
            OneCycleLR does, raises its own error.

    Example:
        >>> from torch.optim.lr_scheduler import LinearLR
        >>> schedule = schedule_from_torch(
        ...     lambda opt: LinearLR(opt, start_factor=0.5, total_iters=2), lr=1.0, steps=3
        ... )
        >>> schedule(torch.arange(4))
        tensor([0.5000, 0.7500, 1.0000, 1.0000])

        Once an epoch of two steps, with skips, as in torch's loop:

        >>> from purescale import from_torch, maybe_step
        >>> optimizer = from_torch(
        ...     torch.optim.SGD, lr=lambda count: schedule(count // 2), schedule_by="iteration"
        ... )
        >>> ours, theirs, gradient = torch.zeros(()), torch.zeros(()), torch.tensor(-1.0)
        >>> state, sgd = optimizer.init(ours), torch.optim.SGD([theirs], lr=1.0)
        >>> scheduler, theirs.grad = LinearLR(sgd, 0.5, total_iters=2), gradient
        >>> for index, skipped in enumerate([True, False, False, True, False, False]):
        ...     ours, state = maybe_step(optimizer, ours, gradient, state, torch.tensor(skipped))
        ...     _ = None if skipped else sgd.step()
        ...     _ = scheduler.step() if index % 2 else None
        >>> ours, theirs
        (tensor(3.2500), tensor(3.2500))

    Source of the rule: torch.optim.lr_scheduler, which is what runs.
    """
    steps = checked_whole("steps", steps, least=1)
    if setting not in get_args(Scheduled):
        raise ValueError(f'setting is {setting!r}, expected "lr" or "momentum".')
    # Some schedulers require a momentum.
    weight = torch.zeros((), device="cpu")
    optimizer = torch.optim.SGD([weight], lr=checked_real("lr", lr), momentum=_MOMENTUM)
    scheduler = make(optimizer)
    check_scheduler(scheduler, optimizer, "make(optimizer)")
    ((rates, momenta),) = tabulate(scheduler, steps)
    moves = any(momentum != _MOMENTUM for momentum in momenta)
    if moves and setting == "lr":
        raise _moves_error(scheduler, ["momentum"])
    if setting == "momentum" and not moves:
        raise ValueError(
            f"{type(scheduler).__name__} does not move the momentum. Fix: cycle_momentum=True."
        )
    return RateTable.of(rates if setting == "lr" else momenta)


_MOMENTUM = 0.9


@dataclasses.dataclass(frozen=True)
class RateTable:
    """A number for each count of steps; made by `schedule_from_torch`."""

    digest: str  # a hash of the rates, by which tables are compared
    start: int  # the count of the first rate
    rates: Tensor = dataclasses.field(compare=False)  # float32 [steps], on a CPU
    # A copy on every device that uses it, so that a step copies nothing from the host.
    _copies: dict[torch.device, Tensor] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def of(cls, rates: Sequence[float], start: int = 0) -> RateTable:
        """Return the table of these rates, rounded to float32."""
        rounded = array.array("f", rates)
        for step, (rate, in_table) in enumerate(zip(rates, rounded, strict=True), start):
            check_rate(rate, f"the rate of step {step}")
            if not math.isfinite(in_table):
                raise ValueError(
                    f"the rate of step {step} is {rate:g}, out of the range of float32. Fix: a "
                    "smaller lr, or fewer steps."
                )
        digest = hashlib.blake2b(rounded.tobytes(), digest_size=16).hexdigest()
        return cls(digest, start, torch.tensor(rounded, dtype=torch.float32, device="cpu"))

    @property
    def agreed_settings(self) -> tuple[str, int]:
        """The values that ranks compare."""
        return self.digest, self.start

    def __call__(self, count: Tensor) -> Tensor:
        # `table[count]` would read the count, and `take` has no batching rule for vmap.
        index = (count - self.start).clamp(0, len(self.rates) - 1)
        rates: Tensor = self._on(count.device, self.digest)
        return rates.gather(0, index.reshape(-1)).reshape(count.shape)

    def __repr__(self) -> str:
        first, last = self.rates[0].item(), self.rates[-1].item()
        return f"<{len(self.rates)} rates, {first:g} to {last:g}>"

    # As a constant it is not copied from the host in each compiled step. The digest tells a
    # compiler the constants of two tables apart.
    @private.constant_while_compiling
    def _on(self, device: torch.device, digest: str) -> Tensor:
        if device not in self._copies:
            # Later calls need a real tensor, whatever modes or transforms are active now.
            self._copies[device] = private.outside_of_modes(lambda: to_device(self.rates, device))
        return self._copies[device]


# ---- schedulers of torch -------------------------------------------------------------------------


def check_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer, what: str) -> None:
    """Refuse a scheduler whose rates cannot be known before the training, or that does not move the
    rates of `optimizer`.
    """
    kind = type(scheduler).__name__
    if not isinstance(scheduler, LRScheduler):
        raise TypeError(
            f"{what} is {kind}; expected a scheduler of torch.optim.lr_scheduler. Fix: "
            "`lambda opt: CosineAnnealingLR(opt, T_max=1000)`."
        )
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError(
            f"{what} is a ReduceLROnPlateau, whose rates depend on losses. Fix: "
            "from_torch(..., in_state=('lr',)), and after each `scheduler.step(loss)` "
            "`replace_settings(state, lr=scheduler.get_last_lr()[0])`. With take_over, leave the "
            "scheduler out, and give back before each `scheduler.step(loss)`."
        )
    if scheduler.optimizer is not optimizer:
        raise ValueError(
            f"{what} is a {kind} of another optimizer. Fix: a scheduler of the given optimizer."
        )


class GroupNumbers(NamedTuple):
    """The settings that a scheduler changes in a parameter group, by step."""

    rates: list[float]
    momenta: list[Any]  # the first of `betas`, or `momentum`


def tabulate(scheduler: LRScheduler, steps: int) -> list[GroupNumbers]:
    """Step `scheduler`, and return for each parameter group the rates and momenta of the next
    `steps` steps.
    """
    groups = scheduler.optimizer.param_groups
    moved = [GroupNumbers([], []) for _ in groups]
    fixed = [_fixed_settings(group) for group in groups]
    for done in range(steps):
        step_scheduler(scheduler, min(done, 1))
        for group, settings, (rates, momenta) in zip(groups, fixed, moved, strict=True):
            now = _fixed_settings(group)
            if now != settings:
                raise _moves_error(scheduler, [n for n in settings if now[n] != settings[n]])
            rates.append(float(group["lr"]))
            momenta.append(_betas(group)[0] if _betas(group) else group.get("momentum"))
    return moved


def scheduled_settings(group: Mapping[str, Any], moved: GroupNumbers, start: int) -> dict[str, Any]:
    """Return the settings of a parameter group that a scheduler moves, as tables from the count
    `start`.
    """
    settings: dict[str, Any] = {"lr": RateTable.of(moved.rates, start)}
    if any(momentum != moved.momenta[0] for momentum in moved.momenta):
        table = RateTable.of(moved.momenta, start)
        others = tuple(map(float, _betas(group)[1:]))
        settings |= {"betas": (table, *others)} if others else {"momentum": table}
    return settings


def step_scheduler(scheduler: LRScheduler, steps: int) -> None:
    """Step a scheduler so many times."""
    with warnings.catch_warnings():
        # torch warns if the optimizer was not stepped first; here it never is.
        warnings.simplefilter("ignore")
        for _ in range(steps):
            scheduler.step()


@contextlib.contextmanager
def restoring(scheduler: LRScheduler) -> Iterator[None]:
    """Restore a scheduler and its groups at the end. What a function of the user's counts stays."""
    groups = scheduler.optimizer.param_groups
    attributes = [
        (vars(each), {name: _copy(value) for name, value in vars(each).items()})
        for each in _schedulers_in(scheduler)
    ]
    settings = [
        {name: _copy(value) for name, value in group.items() if name != "params"}
        for group in groups
    ]
    try:
        yield
    finally:
        for current, before in attributes:
            current.clear()
            current.update(before)
        for group, before in zip(groups, settings, strict=True):
            for name, value in before.items():
                if isinstance(value, Tensor):  # groups may share it
                    group[name].copy_(value)
                else:
                    group[name] = value


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return copy.copy(value) if isinstance(value, (list, dict)) else value


def _schedulers_in(scheduler: LRScheduler) -> Iterator[LRScheduler]:
    """Yield a scheduler and those that it is made of."""
    yield scheduler
    for value in vars(scheduler).values():
        for entry in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(entry, LRScheduler):
                yield from _schedulers_in(entry)


def steps_of(scheduler: Any) -> int:
    """Return how often a scheduler was stepped. A ChainedScheduler does not count, but its parts
    do.
    """
    counts = [vars(each).get("last_epoch") for each in _schedulers_in(scheduler)]
    return int(next(count for count in counts if count is not None))


def _betas(group: Mapping[str, Any]) -> Sequence[Any]:
    """Return the betas of a parameter group, () for a class without."""
    betas = group.get("betas", ())
    return betas if isinstance(betas, (tuple, list)) else ()


def _fixed_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group except rate and momentum."""
    left_out = ("params", "lr", "betas" if _betas(group) else "momentum")
    others = {name: value for name, value in group.items() if name not in left_out}
    return {**others, "betas": _betas(group)[1:]}


def _moves_error(scheduler: LRScheduler, names: list[str]) -> ValueError:
    return ValueError(
        f"{type(scheduler).__name__} moves {', '.join(names)}, and a schedule is a rate by step. "
        "Fix: cycle_momentum=False; or a momentum that moves too as a schedule of its own, "
        "`schedule_from_torch(..., setting='momentum')`, with its name in in_state."
    )
