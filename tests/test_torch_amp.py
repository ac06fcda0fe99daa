"""A job of torch.amp in mid-run, taken over and given back."""

import copy
import dataclasses
import functools
import re

import pytest
import torch
import torch.nn.functional as F
from helpers import Untouched, clone, same_bits, shares_memory, tensors
from torch import nn
from torch.optim import lr_scheduler

import purescale as ps
from purescale.interop import torch_amp

# ---- torch's own loop, the oracle


class Net(nn.Module):
    """A batch norm, tied weights, a frozen parameter."""

    def __init__(self):
        super().__init__()
        # a bias before a batch norm has a gradient of rounding errors, which Adam makes steps of
        self.first, self.norm = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8)
        self.second, self.tied = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.tied.weight = self.second.weight
        self.frozen, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        x = F.gelu(self.norm(self.first(x)))
        x = self.tied(F.gelu(self.second(x)))
        return self.head(F.gelu(self.frozen(x)))


def batches(count=21, overflows=(3, 9, 16)):
    generator = torch.Generator().manual_seed(0)
    for step in range(count):
        x = torch.randn(16, 6, generator=generator)
        y = torch.randint(0, 3, (16,), generator=generator)
        yield x, y, torch.tensor(1e38 if step in overflows else 1.0)


def warm_up(optimizer):
    """From 0, and of another shape for the second group."""
    rates = [lambda n: min(n / 12, 1.0), lambda n: min(n / 6, 1.0) * 0.97**n]
    count = len(optimizer.param_groups)
    return lr_scheduler.LambdaLR(optimizer, [rates[i % 2] for i in range(count)])


def warm_up_and_cosine(optimizer):
    parts = [
        lr_scheduler.LinearLR(optimizer, start_factor=1e-9, total_iters=9),
        lr_scheduler.CosineAnnealingLR(optimizer, T_max=25),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[9])


def chained(optimizer):
    parts = [
        lr_scheduler.LambdaLR(optimizer, lambda n: min(n / 5, 1.0)),
        lr_scheduler.MultiplicativeLR(optimizer, lambda n: 0.98),
        lr_scheduler.MultiStepLR(optimizer, [4, 9, 17]),
    ]
    return lr_scheduler.ChainedScheduler(parts)


MAKES = {"warm-up": warm_up, "sequential": warm_up_and_cosine, "chained": chained}


def made(name, **settings):
    return functools.partial(getattr(torch.optim, name), **{"lr": 1e-2, **settings})


CLASSES = {  # for others see test_live_optimizer.py
    "AdamW": made("AdamW", foreach=False),
    "AdamW-foreach": made("AdamW", foreach=True),
    "AdamW-fused": made("AdamW", fused=True),
    "SGD": made("SGD", lr=1e-1, momentum=0.9, nesterov=True),
    "SGD-plain": made("SGD", lr=1e-1),
}


@dataclasses.dataclass
class Job:
    """Live objects of torch."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    scheduler: lr_scheduler.LRScheduler | None
    schedule_by: str

    @property
    def all(self):
        return self.model, self.optimizer, self.scaler, self.scheduler

    def train(self, steps):
        """Torch's own loop. What a skipped step leaves alone is as it was: torch itself would keep
        the batch norm's statistics of it.
        """
        for x, y, factor in steps:
            before = clone(dict(self.model.named_buffers()))
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(x), y) * factor
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            scale = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if self.scaler.get_scale() < scale:
                for name, buffer in self.model.named_buffers():
                    buffer.copy_(before[name])
                if self.schedule_by == "applied":
                    continue
            if self.scheduler is not None:
                self.scheduler.step()
        self.optimizer.zero_grad()

    def values(self):
        """All that a checkpoint of torch's would hold."""
        theirs = self.optimizer.state_dict()
        saved = [self.model.state_dict(), theirs["state"], self.scaler.state_dict()]
        saved.append([(g["lr"], g.get("initial_lr"), g["params"]) for g in theirs["param_groups"]])
        if self.scheduler is not None:
            saved.append([place(self.scheduler), self.scheduler.get_last_lr()])
        return saved


def place(scheduler):
    nested = getattr(scheduler, "_schedulers", [])
    return getattr(scheduler, "last_epoch", None), list(map(place, nested))


def job(name, schedule=None, schedule_by="applied", *, grouped=True):
    torch.manual_seed(1)
    model = Net()
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": rest, "weight_decay": 0.0, "lr": 3e-3},
        {"params": decay[:2]},
        {"params": decay[2:], "weight_decay": 0.1},
    ]
    optimizer = CLASSES[name](groups if grouped else model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=4)
    make = MAKES.get(schedule, schedule)
    return Job(model, optimizer, scaler, make(optimizer) if make else None, schedule_by)


def loss_fn(apply, params, buffers, batch):
    x, y, factor = batch
    logits, buffers = apply(params, buffers, x)
    return F.cross_entropy(logits, y) * factor, buffers


def train_here(taken, steps):
    """The same steps by `train_step`."""
    apply, optimizer, rule, state = taken
    run = functools.partial(
        ps.train_step, loss_fn=functools.partial(loss_fn, apply), optimizer=optimizer, rule=rule
    )
    for batch in steps:
        state, _ = run(state, [batch], max_norm=1.0)
    return state


def carried(live, some, steps=None):
    """These steps made here: what was taken over, and the state that is given back."""
    taken = torch_amp.take_over(*live.all, steps=steps, schedule_by=live.schedule_by)
    state = train_here(taken, some)
    torch_amp.give_back(state, taken[1], taken[2], *live.all)
    return taken, state


def there_and_back(live, splits, steps):
    """Torch, here, torch, here, ..."""
    steps = iter(steps)
    for index, count in enumerate(splits):
        some = [next(steps) for _ in range(count)]
        if index % 2:
            carried(live, some, count if live.scheduler else None)
        else:
            live.train(some)
    return live


def assert_is_torchs_own(make, splits):
    """So many steps of torch, here, of torch, ... are those of torch alone. Return both jobs."""
    expected, live = make(), make()
    steps = list(batches(sum(splits)))
    expected.train(steps)
    there_and_back(live, splits, steps)
    torch.testing.assert_close(live.values(), expected.values(), rtol=1e-4, atol=1e-6)
    return live, expected


# ---- the law: torch, here and torch is torch


@pytest.mark.parametrize(
    ("splits", "name", "schedule", "schedule_by"),
    [
        *(((7, 7, 7), name, "chained", "iteration") for name in CLASSES),
        ((7, 7, 7), "AdamW", None, "applied"),
        *(((7, 7, 7), "AdamW", schedule, "applied") for schedule in MAKES),
        # at any step and more than once, also from a rate of 0
        ((0, 9, 9), "SGD", "warm-up", "applied"),
        *((splits, "SGD", "sequential", "applied") for splits in ((6, 3, 0, 3, 6), (20, 1))),
    ],
)
def test_steps_of_torch_steps_here_and_steps_of_torch_are_torchs_own(
    splits, name, schedule, schedule_by
):
    live, _ = assert_is_torchs_own(functools.partial(job, name, schedule, schedule_by), splits)
    assert live.model.norm.num_batches_tracked == sum(splits) - 3  # that overflow


def one_cycle(optimizer):
    rates = [group["lr"] for group in optimizer.param_groups]
    return lr_scheduler.OneCycleLR(optimizer, max_lr=rates, total_steps=22)


def cyclic(optimizer):
    return lr_scheduler.CyclicLR(
        optimizer, 1e-3, 1e-2, step_size_up=7, base_momentum=0.5, max_momentum=0.9
    )


@pytest.mark.parametrize("make", [one_cycle, cyclic])
@pytest.mark.parametrize("name", ["AdamW-fused", "SGD-plain"])
def test_a_momentum_that_cycles_is_followed_and_given_back(name, make):
    live, expected = assert_is_torchs_own(
        functools.partial(job, name, make, "iteration"), (0, 4, 4, 7, 3, 3)
    )
    ours, theirs = (
        [(group.get("betas"), group.get("momentum")) for group in each.optimizer.param_groups]
        for each in (live, expected)
    )
    assert ours == theirs


# ---- the rates ahead


def picture(live):
    groups = [{**group, "params": None} for group in live.optimizer.param_groups]
    return repr((groups, place(live.scheduler), live.scheduler.get_last_lr()))


@pytest.mark.parametrize("make", [*MAKES.values(), cyclic])
def test_the_rates_ahead_move_neither_the_scheduler_nor_the_optimizer(make):
    live = job("SGD")
    live.optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    live.scheduler = make(live.optimizer)
    before, parameter = picture(live), live.model.head.weight
    momentum = live.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    parameter.__deepcopy__ = momentum.__deepcopy__ = lambda memo: pytest.fail("copied")
    torch_amp.take_over(*live.all, steps=5)
    assert picture(live) == before


def test_what_a_schedule_asks_is_not_copied():
    class Trainer:
        """Has the loader and the model of a job, as most trainers have."""

        steps = 4

        def __deepcopy__(self, memo):
            raise AssertionError("copied")

        def warm_up(self, n):
            return min(1.0, n / self.steps)

    live = job("SGD")
    live.scheduler = lr_scheduler.LambdaLR(live.optimizer, Trainer().warm_up)
    optimizer = torch_amp.take_over(*live.all, steps=5)[1]
    assert optimizer.config.lr(torch.tensor(2)) == 3e-3 / 2


# ---- rates that are tensors


@pytest.mark.parametrize("shared", [True, False])
def test_a_rate_that_is_a_tensor_stays_that_tensor_and_has_torchs_values(shared):
    pairs = []
    for splits in ((9,), (3, 3, 3)):
        live, rate = job("SGD"), torch.tensor(0.1)
        rates = [rate if shared else rate.clone() for _ in live.optimizer.param_groups]
        for group, one in zip(live.optimizer.param_groups, rates, strict=True):
            group["lr"] = one
        live.scheduler = chained(live.optimizer)
        groups = live.optimizer.param_groups
        there_and_back(live, splits, batches(9, overflows=(4,)))
        now = live.optimizer.param_groups
        assert all(group is one for group, one in zip(groups, now, strict=True))
        assert all(group["lr"] is one for group, one in zip(now, rates, strict=True))
        pairs.append(live.values())
    torch.testing.assert_close(pairs[1], pairs[0], rtol=1e-4, atol=1e-6)


# ---- between two iterations


def backward(live, index=0):
    x, y, _ = list(batches(index + 1))[index]
    live.scaler.scale(F.cross_entropy(live.model(x), y)).backward()


def test_gradients_that_wait_for_a_step_are_refused_by_name():
    live = job("AdamW")
    backward(live)
    live.optimizer.zero_grad(set_to_none=False)  # zeros do not wait
    torch_amp.take_over(*live.all)
    live.train(batches(2))
    backward(live)
    message = r"first.weight, norm.weight.*: `.grad` is not 0.*Fix: .*optimizer.zero_grad\(\)"
    with pytest.raises(ValueError, match=message) as refusal:
        torch_amp.take_over(*live.all)
    scope = {"optimizer": live.optimizer, "scaler": live.scaler}
    for cure in re.findall(r"`(\w+\..*?)`", str(refusal.value)):
        exec(cure, scope)
    assert torch_amp.take_over(*live.all)[3].opt_state.applied == 3


def test_a_gradient_of_a_frozen_parameter_that_torch_would_step_is_refused():
    live = job("AdamW")
    live.model.frozen.weight.grad = torch.ones(8, 8)
    with pytest.raises(ValueError, match=r"frozen.weight: `.grad`"):
        torch_amp.take_over(*live.all)


def test_the_scaler_is_ready_after_an_unscale_without_a_step():
    expected, live = job("AdamW"), job("AdamW")
    steps = list(batches(9, overflows=(5,)))
    expected.train(steps)
    live.train(steps[:3])
    backward(live)
    live.scaler.unscale_(live.optimizer)
    live.optimizer.zero_grad()
    taken, state = carried(live, steps[3:6])
    assert torch_amp.to_state_dict(taken[2], state.scaler) == live.scaler.state_dict()
    live.train(steps[6:])
    torch.testing.assert_close(live.values()[1:], expected.values()[1:], rtol=1e-4, atol=1e-6)


# ---- what is taken


def test_taking_over_changes_none_of_the_live_objects_and_shares_no_memory():
    live = job("AdamW-foreach", "chained")
    live.train(batches(9))
    before = copy.deepcopy(live.values())
    kept = live.optimizer.param_groups, live.optimizer.state
    with Untouched([dict(live.model.state_dict()), live.optimizer.state_dict()["state"]]):
        taken = torch_amp.take_over(*live.all, steps=5)
        train_here(taken, batches(3))
    assert same_bits(tensors(live.values()), tensors(before))
    assert str(live.values()[2:]) == str(before[2:])
    assert (live.optimizer.param_groups, live.optimizer.state) == kept
    assert len(live.optimizer.state) == len(list(live.model.parameters())) - 2  # the frozen ones
    assert not shares_memory(tensors(taken[3]), tensors(live.values()))


@pytest.mark.parametrize("scaler", [None, torch.amp.GradScaler("cpu", enabled=False)])
def test_without_a_scaler_nothing_is_scaled(scaler):
    live = job("AdamW")
    _, optimizer, rule, state = torch_amp.take_over(live.model, live.optimizer, scaler)
    assert rule == ps.NoScale()
    torch_amp.give_back(state, optimizer, rule, live.model, live.optimizer, scaler)


# ---- what is given back


def test_the_live_objects_stay_the_same_ones():
    live = job("AdamW", "chained")
    live.train(batches(4))
    weights = [(p, p.data_ptr()) for p in (*live.model.parameters(), *live.model.buffers())]
    nested = list(live.scheduler._schedulers)
    carried(live, batches(3), 3)
    now = (*live.model.parameters(), *live.model.buffers())
    assert all(p is q and q.data_ptr() == at for (p, at), q in zip(weights, now, strict=True))
    assert live.scheduler._schedulers == nested
    assert all(s.optimizer is live.optimizer for s in nested)
    listed = [p for group in live.optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in listed} == {id(p) for p in live.model.parameters()}
    assert all(isinstance(group["lr"], float) for group in live.optimizer.param_groups)


def test_the_state_stays_as_it_is():
    live = job("AdamW", "warm-up")
    taken, state = carried(live, batches(3), 6)
    with Untouched(state):
        torch_amp.give_back(state, *taken[1:3], *live.all)
        live.train(batches(3))
    assert not shares_memory(tensors(state), tensors(live.values()))


def test_what_the_optimizer_has_of_a_parameter_that_was_frozen_stays():
    live = job("AdamW")
    live.train(batches(3))
    live.model.head.requires_grad_(False)
    held = clone(live.optimizer.state[live.model.head.weight])
    carried(live, batches(3))
    assert same_bits(dict(live.optimizer.state[live.model.head.weight]), held)
    assert live.optimizer.state[live.model.first.weight]["step"] == 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_of_half_parameters_are_what_a_float32_model_is_given(dtype):
    live = job("AdamW")
    live.train(batches(3))
    _, inner, rule, state = torch_amp.take_over(*live.all)
    weights = live.model.state_dict()
    halves = {name: p.to(dtype) for name, p in state.params.items()}
    rest = state.params if dtype is torch.float16 else None
    if rest is None:
        halves, rest = ps.split_masters(state.params)
    optimizer = ps.with_master_weights(inner)
    state = state._replace(params=halves, opt_state=ps.MasterState(state.opt_state, rest))
    grads = {name: torch.ones_like(p) for name, p in halves.items()}
    torch_amp.give_back(state, optimizer, rule, *live.all)
    assert same_bits(dict(live.model.state_dict()), dict(weights))
    params, opt_state = optimizer.step(state.params, grads, state.opt_state)
    moved = state._replace(params=params, opt_state=opt_state)
    torch_amp.give_back(moved, optimizer, rule, *live.all)
    masters = ps.master_weights(params, opt_state)
    assert same_bits({n: live.model.get_parameter(n).detach() for n in masters}, masters)
    assert not same_bits(masters, {name: p.float() for name, p in params.items()})


# ---- words


def ended(live, total_steps=3):
    live.scheduler = lr_scheduler.OneCycleLR(
        live.optimizer, max_lr=0.1, total_steps=total_steps, cycle_momentum=False
    )


def with_lbfgs(live):
    live.optimizer, live.scheduler = torch.optim.LBFGS(live.model.parameters()), None


def another(name, make):
    """Sets this attribute of the live job, or of its model."""
    return lambda live: setattr(live.model if name == "extra" else live, name, make(live))


NOT_TAKEN = {  # what is changed, `steps`, and the words
    "not in the optimizer": (another("extra", lambda _: nn.Linear(2, 2)), 5,
        r"does not have extra.bias, extra.weight.*requires_grad_\(False\)"),
    "plateau": (
        another("scheduler", lambda live: lr_scheduler.ReduceLROnPlateau(live.optimizer)), 5,
        r"scheduler is a ReduceLROnPlateau.*in_state.*leave the scheduler"),
    "ends": (ended, 9, "Tried to step 4 times"),
    "of another": (another("scheduler", lambda _: job("AdamW", "warm-up").scheduler), 5,
        "scheduler is a LambdaLR of another optimizer"),
    "no steps": (lambda live: None, None, "one of the two alone.*steps=10_000"),
    "steps": (lambda live: None, 0, "steps must be from 1"),
    "no scheduler": (another("scheduler", lambda _: None), 5, "one of the two alone"),
    "lbfgs": (with_lbfgs, None, "LBFGS evaluates the loss again"),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_TAKEN)
def test_what_cannot_be_taken_over_is_refused(case):
    live = job("AdamW", "warm-up")
    change, steps, message = NOT_TAKEN[case]
    change(live)
    with pytest.raises((ValueError, TypeError), match=message):
        torch_amp.take_over(*live.all, steps=steps)


@pytest.mark.parametrize("name", ["lr", "betas"])
def test_a_setting_in_the_state_that_a_scheduler_moves_is_refused(name):
    live = job("AdamW", grouped=False)
    live.scheduler = one_cycle(live.optimizer)
    words = rf"{name} is in the state, and a scheduler moves .*Fix: leave {name} out"
    with pytest.raises(ValueError, match=words):
        torch_amp.take_over(*live.all, steps=5, in_state=(name,))


def moved(state, applied):
    return state._replace(opt_state=state.opt_state._replace(applied=applied))


# What is given instead, of the live job, the optimizer and the state; and the words.
NOT_GIVEN = {
    "class": (lambda live, *_: {"torch_optimizer": torch.optim.SGD(live.model.parameters())},
        r"OptState of from_torch\(AdamW.*live optimizer SGD"),
    "rule": (lambda *_: {"rule": ps.DynamicScale()}, "a rule that `interop.torch_amp.rule"),
    "model": (lambda *_: {"model": nn.Linear(2, 2)}, "the state dict has no first.weight"),
    "shapes": (
        lambda live, _, s: {"state": s._replace(params={n: p[:1] for n, p in s.params.items()})},
        "do not fit the model"),
    "no scheduler": (lambda *_: {"scheduler": None},
        r"was given a scheduler, and the other was not"),
    "stepped meanwhile": (lambda live, _, s: {"state": moved(s, s.opt_state.applied - 9)},
        "the scheduler is at step 3, the state at -3"),
    "beyond the table": (lambda live, _, s: {"state": moved(s, s.opt_state.applied + 10)},
        r"4 steps were made beyond the 9 .*steps=13\)"),
    "in the state": (lambda *_: {"optimizer": ps.from_torch(torch.optim.AdamW, in_state=("lr",))},
        "lr is in the state, and a scheduler moves .*leave lr out"),
}  # fmt: skip


def refused(live, words, back):
    """The call is refused, and nothing is half written."""
    before = copy.deepcopy(live.values())
    with pytest.raises((ValueError, TypeError, IndexError), match=words):
        back()
    assert same_bits(tensors(live.values()), tensors(before))
    assert str(live.values()[2:]) == str(before[2:])


@pytest.mark.parametrize("case", NOT_GIVEN)
def test_what_does_not_fit_is_refused_and_nothing_is_half_written(case):
    live = job("AdamW")
    ended(live, 50)
    live.train(batches(4))
    taken = torch_amp.take_over(*live.all, steps=9)
    state = train_here(taken, batches(3))
    spoil, words = NOT_GIVEN[case]
    names = "model", "torch_optimizer", "scaler", "scheduler"
    given = {"state": state, "optimizer": taken[1], "rule": taken[2]}
    given |= dict(zip(names, live.all, strict=True)) | spoil(live, taken[1], state)
    refused(live, words, lambda: torch_amp.give_back(**given))


def test_a_scheduler_that_ends_at_the_last_step_is_refused_and_nothing_is_half_written():
    live, rates = job("SGD"), [0.1, 0.2, 0.3]
    live.scheduler = lr_scheduler.LambdaLR(live.optimizer, lambda n: rates[n])
    taken = torch_amp.take_over(*live.all, steps=3)
    state = train_here(taken, batches(3))
    back = functools.partial(torch_amp.give_back, state, *taken[1:3], *live.all)
    refused(live, "out of range", back)


def test_a_number_in_the_state_stands_beside_a_scheduled_rate():
    model = nn.Linear(2, 1)
    theirs = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = lr_scheduler.StepLR(theirs, 3)
    took = torch_amp.take_over(model, theirs, None, scheduler, steps=6, in_state=("momentum",))
    assert took[-1].opt_state.hyper["momentum"] == torch.tensor(0.9)
