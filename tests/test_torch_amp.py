"""A job of torch.amp in mid-run, taken over and given back."""

import copy
import dataclasses
import functools
import re

import pytest
import torch
import torch.nn.functional as F
from helpers import AsOnAnAccelerator, Untouched, clone, same_bits, shares_memory, slots_of, tensors
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


def batches(count=45, overflows=(7, 22, 37)):
    generator = torch.Generator().manual_seed(0)
    for step in range(count):
        x = torch.randn(16, 6, generator=generator)
        y = torch.randint(0, 3, (16,), generator=generator)
        yield x, y, torch.tensor(1e38 if step in overflows else 1.0)


def warm_up(optimizer):
    """From 0, and of another shape for the second group."""
    rates = [lambda n: min(n / 20, 1.0), lambda n: min(n / 10, 1.0) * 0.97**n]
    count = len(optimizer.param_groups)
    return lr_scheduler.LambdaLR(optimizer, [rates[i % 2] for i in range(count)])


def warm_up_and_cosine(optimizer):
    parts = [
        lr_scheduler.LinearLR(optimizer, start_factor=1e-9, total_iters=20),
        lr_scheduler.CosineAnnealingLR(optimizer, T_max=25),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[20])


def chained(optimizer):
    parts = [
        lr_scheduler.LambdaLR(optimizer, lambda n: min(n / 5, 1.0)),
        lr_scheduler.MultiplicativeLR(optimizer, lambda n: 0.98),
        lr_scheduler.MultiStepLR(optimizer, [9, 17, 33]),
    ]
    return lr_scheduler.ChainedScheduler(parts)


MAKES = {"warm-up": warm_up, "sequential": warm_up_and_cosine, "chained": chained}
CLASSES = {
    "AdamW": functools.partial(torch.optim.AdamW, lr=1e-2, foreach=False),
    "AdamW-foreach": functools.partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "AdamW-fused": functools.partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "AdamW-amsgrad": functools.partial(torch.optim.AdamW, lr=1e-2, amsgrad=True),
    "SGD": functools.partial(torch.optim.SGD, lr=1e-1, momentum=0.9, nesterov=True),
    "SGD-dampening": functools.partial(torch.optim.SGD, lr=1e-1, momentum=0.9, dampening=0.5),
    "SGD-plain": functools.partial(torch.optim.SGD, lr=1e-1),
    "Adam": functools.partial(torch.optim.Adam, lr=1e-2, betas=(0.8, 0.99)),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=1e-3, momentum=0.5),
    "Adafactor": functools.partial(torch.optim.Adafactor, lr=1e-2),
}


@dataclasses.dataclass
class Job:
    """Live objects of torch."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    scheduler: lr_scheduler.LRScheduler | None
    schedule_by: str = "applied"

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


def job(name, schedule=None, *, grouped=True):
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
    return Job(model, optimizer, scaler, MAKES[schedule](optimizer) if schedule else None)


def loss_fn(apply, params, buffers, batch):
    x, y, factor = batch
    logits, buffers = apply(params, buffers, x)
    return F.cross_entropy(logits, y) * factor, buffers


def train_here(taken, steps, wrap=None):
    """The same steps by `train_step`."""
    apply, optimizer, rule, state = taken
    run = functools.partial(
        ps.train_step,
        loss_fn=functools.partial(loss_fn, apply),
        optimizer=optimizer,
        rule=rule,
        max_norm=1.0,
    )
    for batch in steps:
        state, _ = run(state, [batch])
    return state


def there_and_back(live, splits, steps):
    """Torch, here, torch, here, ..."""
    steps = iter(steps)
    for index, count in enumerate(splits):
        some = [next(steps) for _ in range(count)]
        if index % 2 == 0:
            live.train(some)
            continue
        taken = torch_amp.take_over(
            *live.all, steps=count if live.scheduler else None, schedule_by=live.schedule_by
        )
        state = train_here(taken, some)
        torch_amp.give_back(state, taken[1], taken[2], *live.all)


# ---- the law: torch, here and torch is torch


@pytest.mark.parametrize("schedule", [None, *MAKES])
@pytest.mark.parametrize("name", CLASSES)
def test_fifteen_steps_of_torch_fifteen_here_and_fifteen_of_torch_are_torchs_own(name, schedule):
    expected, live = job(name, schedule), job(name, schedule)
    expected.train(batches())
    there_and_back(live, (15, 15, 15), batches())
    torch.testing.assert_close(live.values(), expected.values(), rtol=1e-4, atol=1e-6)
    assert live.model.norm.num_batches_tracked == 42


def one_cycle(optimizer):
    rates = [group["lr"] for group in optimizer.param_groups]
    return lr_scheduler.OneCycleLR(optimizer, max_lr=rates, total_steps=46)


def cyclic(optimizer):
    return lr_scheduler.CyclicLR(
        optimizer, 1e-3, 1e-2, step_size_up=7, base_momentum=0.5, max_momentum=0.9
    )


@pytest.mark.parametrize("make", [one_cycle, cyclic])
@pytest.mark.parametrize("name", ["AdamW", "AdamW-fused", "Adam", "SGD", "SGD-plain", "RMSprop"])
def test_a_momentum_that_cycles_is_followed_and_given_back(name, make):
    expected, live = job(name), job(name)
    for each in (expected, live):
        each.scheduler, each.schedule_by = make(each.optimizer), "iteration"
    expected.train(batches())
    there_and_back(live, (0, 10, 10, 15, 5, 5), batches())
    torch.testing.assert_close(live.values(), expected.values(), rtol=1e-4, atol=1e-6)
    for group, of_torch in zip(
        live.optimizer.param_groups, expected.optimizer.param_groups, strict=True
    ):
        assert group.get("betas") == of_torch.get("betas")
        assert group.get("momentum") == of_torch.get("momentum")


@pytest.mark.parametrize("splits", [(0, 15, 15), (10, 5, 0, 5, 10), (0, 30), (44, 1)], ids=str)
@pytest.mark.parametrize("name", ["AdamW", "AdamW-fused", "SGD"])
def test_a_job_may_be_taken_over_at_any_step_and_more_than_once(name, splits):
    expected, live = job(name, "sequential"), job(name, "sequential")
    steps = list(batches(sum(splits)))
    expected.train(steps)
    there_and_back(live, splits, steps)
    torch.testing.assert_close(live.values(), expected.values(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("schedule", MAKES)
@pytest.mark.parametrize("name", CLASSES)
def test_a_scheduler_that_steps_once_a_batch_is_followed_over_skipped_steps(name, schedule):
    expected, live = job(name, schedule), job(name, schedule)
    expected.schedule_by = live.schedule_by = "iteration"
    expected.train(batches())
    assert place(expected.scheduler) != place(job_after(batches(), name, schedule).scheduler)
    there_and_back(live, (15, 15, 15), batches())
    torch.testing.assert_close(live.values(), expected.values(), rtol=1e-4, atol=1e-6)


def job_after(steps, name, schedule):
    """A job whose scheduler did not step where the optimizer did not."""
    finished = job(name, schedule)
    finished.train(steps)
    return finished


@pytest.mark.parametrize("schedule", [None, "sequential"])
def test_numbers_in_the_state_are_replaced_and_given_back_into_the_groups(schedule):
    numbers = {"weight_decay": 0.25, "betas": (0.5, 0.75)} | ({} if schedule else {"lr": 2.0**-10})
    expected, live = (job("AdamW", schedule, grouped=False) for _ in range(2))
    steps = list(batches(15))
    expected.train(steps[:5])
    for group in expected.optimizer.param_groups:
        group.update(numbers)
    expected.train(steps[5:])
    live.train(steps[:5])
    apply, optimizer, rule, state = torch_amp.take_over(
        *live.all, steps=5 if schedule else None, in_state=tuple(numbers)
    )
    state = ps.replace_settings(state, **numbers)
    state = train_here((apply, optimizer, rule, state), steps[5:10])
    torch_amp.give_back(state, optimizer, rule, *live.all)
    (group,) = live.optimizer.param_groups
    assert {name: group[name] for name in numbers} == numbers
    live.train(steps[10:])
    torch.testing.assert_close(live.values(), expected.values(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("schedule_by", ["applied", "iteration"])
def test_a_warm_up_from_0_may_begin_here(schedule_by):
    expected, live = job("AdamW", "warm-up"), job("AdamW", "warm-up")
    expected.schedule_by = live.schedule_by = schedule_by
    steps = list(batches(12))
    expected.train(steps)
    there_and_back(live, (0, 6, 6), steps)
    torch.testing.assert_close(live.values(), expected.values(), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_compiled_steps_are_taken_over_too():
    live, forced = job("AdamW", "sequential"), job("AdamW", "sequential")
    steps = list(batches(14, overflows=(9,)))
    for each in (live, forced):
        each.train(steps[:7])
    apply, optimizer, rule, state = torch_amp.take_over(*live.all, steps=7)
    one_step = torch.compile(
        functools.partial(
            ps.train_step,
            loss_fn=functools.partial(loss_fn, apply),
            optimizer=optimizer,
            rule=rule,
            max_norm=1.0,
        ),
        fullgraph=True,
        backend="aot_eager",
    )
    torch.compiler.reset()
    state, _ = one_step(state, [steps[7]])
    with torch.compiler.set_stance("fail_on_recompile"):
        for batch in steps[8:]:
            state, _ = one_step(state, [batch])
    torch_amp.give_back(state, optimizer, rule, *live.all)
    forced.train(steps[7:])
    torch.testing.assert_close(live.values(), forced.values(), rtol=1e-3, atol=1e-5)


def taken_over():
    live = job("AdamW", "warm-up")
    live.train(batches(3))
    apply, optimizer, rule, state = torch_amp.take_over(*live.all, steps=5)
    given = {"loss_fn": functools.partial(loss_fn, apply), "optimizer": optimizer, "rule": rule}
    return state, functools.partial(ps.train_step, **given)


def test_a_step_here_reads_nothing():
    state, run = taken_over()
    batch = next(batches())
    expected = run(state, [batch])
    with AsOnAnAccelerator() as ran:
        forced = run(state, [batch])
    assert ran.reads == 0
    torch.testing.assert_close(forced, expected, rtol=1e-4, atol=1e-6)


def test_an_ensemble_may_begin_with_what_was_taken_over():
    state, run = taken_over()
    later = state._replace(opt_state=state.opt_state._replace(applied=torch.tensor(5)))
    members, batch = [state, later], next(batches())
    mapped = torch.vmap(lambda s: run(s, [batch]))(ps.stack_states(members))
    for index, member in enumerate(members):
        expected = run(member, [batch])
        torch.testing.assert_close(ps.member(mapped[0], index), expected[0], rtol=1e-4, atol=1e-6)


# ---- the rates ahead


def picture(live):
    groups = [{**group, "params": None} for group in live.optimizer.param_groups]
    state = live.scheduler.state_dict()
    return repr((groups, {**state, "lr_lambdas": None}))


def sequential_lambdas(optimizer):
    parts = [lr_scheduler.LambdaLR(optimizer, lambda n: 0.9**n) for _ in range(2)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])


SCHEDULERS = {
    "sequential": sequential_lambdas,
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.StepLR(optimizer, 1), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(
        optimizer, 1e-4, 1e-2, step_size_up=2, cycle_momentum=False
    ),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=2),
    "swa": lambda optimizer: torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.01, anneal_epochs=3),
}


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_the_rates_ahead_move_neither_the_scheduler_nor_the_optimizer(kind, as_tensor):
    live = job("SGD")
    if as_tensor:
        for group in live.optimizer.param_groups:
            group["lr"] = torch.tensor(0.1)
    live.scheduler = SCHEDULERS[kind](live.optimizer)
    before = picture(live)
    torch_amp.take_over(*live.all, steps=5)
    assert picture(live) == before


def test_a_scheduler_that_ends_before_the_table_moves_nothing_either():
    live = job("SGD")
    live.scheduler = lr_scheduler.OneCycleLR(
        live.optimizer, max_lr=0.1, total_steps=4, cycle_momentum=False
    )
    before = picture(live)
    with pytest.raises(ValueError, match="OneCycleLR ends after"):
        torch_amp.take_over(*live.all, steps=9)
    assert picture(live) == before


def test_a_schedule_that_reads_the_optimizer_reads_that_of_the_table():
    live = job("SGD", grouped=False)
    group = live.optimizer
    live.scheduler = lr_scheduler.MultiplicativeLR(
        live.optimizer, lambda n: 0.5 if group.param_groups[0]["lr"] > 0.05 else 0.9
    )
    optimizer = torch_amp.take_over(*live.all, steps=3)[1]
    rates = optimizer.settings.lr(torch.arange(3))
    assert rates.tolist() == pytest.approx([0.1, 0.05, 0.045])


class Uncopied(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __deepcopy__(self, memo):
        raise AssertionError("copied")


class Trainer:
    """A loop in a class, with what such loops hold."""

    def __init__(self, live):
        self.model, self.optimizer = live.model, live.optimizer
        self.loader = torch.utils.data.DataLoader(Uncopied(), batch_size=2)

    def rate(self, n):
        return min(1.0, n / len(self.loader))


@pytest.mark.parametrize("form", ["function", "method", "function of a method"])
def test_what_a_schedule_only_asks_for_its_length_is_not_copied(form):
    live = job("SGD")
    trainer = Trainer(live)
    loader = trainer.loader
    rate = {
        "function": lambda n: min(1.0, n / len(loader)),
        "method": trainer.rate,
        "function of a method": lambda n: trainer.rate(n),
    }[form]
    live.scheduler = lr_scheduler.LambdaLR(live.optimizer, rate)
    optimizer = torch_amp.take_over(*live.all, steps=5)[1]
    assert optimizer.settings.lr(torch.tensor(2)) == 3e-3 / 2


# ---- rates that are tensors


@pytest.mark.parametrize("schedule", ["warm-up", "sequential", "chained"])
@pytest.mark.parametrize("shared", [True, False])
def test_a_rate_that_is_a_tensor_stays_that_tensor_and_has_torchs_values(schedule, shared):
    pairs = []
    for splits in ((9,), (3, 3, 3)):
        live, rate = job("SGD"), torch.tensor(0.1)
        rates = [rate if shared else rate.clone() for _ in live.optimizer.param_groups]
        for group, one in zip(live.optimizer.param_groups, rates, strict=True):
            group["lr"] = one
        live.scheduler = MAKES[schedule](live.optimizer)
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
    live.train(batches(2))
    backward(live)
    message = r"first.weight, norm.weight.* have gradients.*Fix: .*optimizer.zero_grad\(\)"
    with pytest.raises(ValueError, match=message) as refusal:
        torch_amp.take_over(*live.all)
    scope = {"optimizer": live.optimizer, "scaler": live.scaler}
    for cure in re.findall("`(.*?)`", str(refusal.value)):
        if "(" in cure and "backward" not in cure:
            exec(cure, scope)
    assert torch_amp.take_over(*live.all)[3].opt_state.applied == 3


def test_a_gradient_of_a_frozen_parameter_that_torch_would_step_is_refused():
    live = job("AdamW")
    live.model.frozen.weight.grad = torch.ones(8, 8)
    with pytest.raises(ValueError, match=r"frozen.weight has a gradient"):
        torch_amp.take_over(*live.all)


def test_gradients_that_were_set_to_zero_do_not_wait():
    live = job("AdamW")
    backward(live)
    live.optimizer.zero_grad(set_to_none=False)
    assert live.model.head.weight.grad is not None
    torch_amp.take_over(*live.all)


@pytest.mark.parametrize("used", [True, False])
def test_the_scaler_is_ready_after_an_unscale_without_a_step(used):
    expected, live = job("AdamW"), job("AdamW")
    steps = list(batches(9, overflows=(5,)))
    expected.train(steps)
    if used:
        live.train(steps[:3])
        backward(live)
        live.scaler.unscale_(live.optimizer)
        live.optimizer.zero_grad()
    taken = torch_amp.take_over(*live.all)
    state = train_here(taken, steps[3 if used else 0 : 6])
    torch_amp.give_back(state, taken[1], taken[2], *live.all)
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


def test_everything_is_there():
    live = job("AdamW-fused", "warm-up")
    live.train(batches(11))
    _, optimizer, rule, state = torch_amp.take_over(*live.all, steps=100)
    assert state.step == state.opt_state.applied == place(live.scheduler)[0] == 10
    assert state.buffers["norm.num_batches_tracked"] == 10
    assert "frozen.weight" in state.buffers
    assert set(state.params) == {n for n, p in live.model.named_parameters() if p.requires_grad}
    assert torch_amp.to_state_dict(rule, state.scaler) == live.scaler.state_dict()
    for name in state.params:
        theirs = live.optimizer.state[live.model.get_parameter(name)]
        assert same_bits(slots_of(state.opt_state, name, theirs), dict(theirs))
    groups = {
        tuple(sorted(map(id, group["params"]))): (group["lr"], group["weight_decay"])
        for group in live.optimizer.param_groups
    }
    for group in optimizer.to_state_dict(state.opt_state)["param_groups"]:
        assert (pytest.approx(float(group["lr"])), group["weight_decay"]) in groups.values()


def test_groups_are_overrides_by_name():
    live = job("SGD")
    optimizer = torch_amp.take_over(*live.all)[1]
    expected = ps.from_torch(
        torch.optim.SGD,
        lr=3e-3,
        momentum=0.9,
        nesterov=True,
        overrides={
            ("first.weight", "second.weight"): {"lr": 0.1},
            ("head.weight",): {"weight_decay": 0.1, "lr": 0.1},
        },
    )
    assert repr(optimizer) == repr(expected)


def test_a_name_with_the_signs_of_a_glob_is_a_name():
    model = nn.ModuleDict({"a[0]": nn.Linear(1, 1), "a0": nn.Linear(1, 1), "a*": nn.Linear(1, 1)})
    groups = [{"params": part.parameters(), "lr": i} for i, part in enumerate(model.values(), 1)]
    sgd = torch.optim.SGD(groups)
    _, optimizer, _, state = torch_amp.take_over(model, sgd, None)
    grads = {name: torch.ones_like(p) for name, p in state.params.items()}
    new, _ = optimizer.step(state.params, grads, state.opt_state)
    moved = {name: (state.params[name] - p).round().item() for name, p in new.items()}
    assert moved == {
        f"{name}.{kind}": i for i, name in enumerate(model, 1) for kind in ("weight", "bias")
    }


def test_settings_that_are_tensors_are_numbers_here():
    model = nn.Linear(2, 2)
    adam = torch.optim.Adam(
        model.parameters(),
        lr=torch.tensor(0.25),
        betas=(torch.tensor(0.5), torch.tensor(0.75)),
        foreach=False,
        capturable=False,
    )
    optimizer = torch_amp.take_over(model, adam, None)[1]
    assert repr(optimizer) == "from_torch(Adam, lr=0.25, betas=(0.5, 0.75))"


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
    apply, optimizer, rule, state = torch_amp.take_over(*live.all, steps=3)
    state = train_here((apply, optimizer, rule, state), batches(3))
    torch_amp.give_back(state, optimizer, rule, *live.all)
    now = (*live.model.parameters(), *live.model.buffers())
    assert all(p is q and q.data_ptr() == at for (p, at), q in zip(weights, now, strict=True))
    assert live.scheduler._schedulers == nested
    assert all(s.optimizer is live.optimizer for s in nested)
    listed = [p for group in live.optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in listed} == {id(p) for p in live.model.parameters()}
    assert all(isinstance(group["lr"], float) for group in live.optimizer.param_groups)


def test_the_state_stays_as_it_is():
    live = job("AdamW", "warm-up")
    apply, optimizer, rule, state = torch_amp.take_over(*live.all, steps=6)
    state = train_here((apply, optimizer, rule, state), batches(3))
    with Untouched(state):
        torch_amp.give_back(state, optimizer, rule, *live.all)
        live.train(batches(3))
    assert not shares_memory(tensors(state), tensors(live.values()))


def test_what_the_optimizer_has_of_a_parameter_that_was_frozen_stays():
    live = job("AdamW")
    live.train(batches(3))
    live.model.head.requires_grad_(False)
    held = clone(live.optimizer.state[live.model.head.weight])
    apply, optimizer, rule, state = torch_amp.take_over(*live.all)
    state = train_here((apply, optimizer, rule, state), batches(3))
    torch_amp.give_back(state, optimizer, rule, *live.all)
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


def test_a_narrow_state_is_given_back_in_the_dtype_of_torch():
    live = job("AdamW")
    live.train(batches(3))
    taken = torch_amp.take_over(*live.all)
    optimizer = ps.with_state_dtype(taken[1], {"exp_avg": torch.bfloat16})
    state = taken[3]._replace(opt_state=optimizer.init(taken[3].params))
    state = train_here((taken[0], optimizer, taken[2], state), batches(2))
    torch_amp.give_back(state, optimizer, taken[2], *live.all)
    held = live.optimizer.state[live.model.head.weight]
    assert {value.dtype for value in held.values()} == {torch.float32}
    assert same_bits(held["exp_avg"].bfloat16(), state.opt_state.slots["exp_avg"]["head.weight"])
    live.train(batches(2))


@pytest.mark.parametrize("around", [lambda free: free, ps.with_master_weights])
def test_an_iterate_that_torch_has_no_place_for_is_refused_before_anything_is_written(around):
    live = job("AdamW")
    live.train(batches(3))
    _, inner, rule, state = torch_amp.take_over(*live.all)
    optimizer = around(ps.with_schedule_free(inner))
    state = state._replace(
        params={name: p + 1 for name, p in state.params.items()},
        opt_state=optimizer.init(state.params),
    )
    before = copy.deepcopy((live.model.state_dict(), live.optimizer.state_dict()))
    for back in (
        lambda: torch_amp.give_back(state, optimizer, rule, *live.all),
        lambda: ps.to_torch_optimizer(state.opt_state, optimizer, live.optimizer, live.model),
        lambda: ps.to_torch_optimizer(state.opt_state, inner, live.optimizer, live.model),
    ):
        with pytest.raises(ValueError, match=r"with_schedule_free.*averaged\(params, opt_state\)"):
            back()
    after = live.model.state_dict(), live.optimizer.state_dict()
    assert same_bits(*(dict(model) for model, _ in (before, after)))
    assert same_bits(before[1]["state"], after[1]["state"])


def test_half_parameters_without_masters_are_stepped_as_torch_does():
    def half_job():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3)).bfloat16()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)

    def loss_of(logits, y):
        return F.cross_entropy(logits.float(), y)

    def train(model, optimizer, steps):
        for x, y, _ in steps:
            loss_of(model(x.bfloat16()), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    steps = list(batches(9))
    expected, live = half_job(), half_job()
    train(*expected, steps)
    train(*live, steps[:3])
    apply, optimizer, rule, state = torch_amp.take_over(*live, None)

    def half_loss(params, buffers, batch):
        logits, buffers = apply(params, buffers, batch[0].bfloat16())
        return loss_of(logits, batch[1]), buffers

    for batch in steps[3:6]:
        state, _ = ps.train_step(state, [batch], loss_fn=half_loss, optimizer=optimizer, rule=rule)
    torch_amp.give_back(state, optimizer, rule, *live, None)
    train(*live, steps[6:])
    torch.testing.assert_close(live[0].state_dict(), expected[0].state_dict(), rtol=1e-2, atol=1e-3)
    held, theirs = (adamw.state_dict()["state"] for _, adamw in (live, expected))
    torch.testing.assert_close(held, theirs, rtol=1e-2, atol=1e-3)


# ---- words


def not_in_the_model(live):
    live.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(5))]})


def not_in_the_optimizer(live):
    live.model.extra = nn.Linear(2, 2)


def with_plateau(live):
    live.scheduler = lr_scheduler.ReduceLROnPlateau(live.optimizer)


def with_an_end(live):
    live.scheduler = lr_scheduler.OneCycleLR(
        live.optimizer, max_lr=0.1, total_steps=3, cycle_momentum=False
    )


def of_another(live):
    live.scheduler = job("AdamW", "warm-up").scheduler


def lbfgs(live):
    live.optimizer, live.scheduler = torch.optim.LBFGS(live.model.parameters()), None


def swapped(live):
    live.optimizer = live.scaler


NOT_TAKEN = {
    "not in the model": (not_in_the_model, 5, r"param_groups\[3\].*shape \(5,\).*not in the model"),
    "not in the optimizer": (
        not_in_the_optimizer,
        5,
        r"does not have extra.bias, extra.weight.*requires_grad_\(False\)",
    ),
    "plateau": (
        with_plateau,
        5,
        r"scheduler is a ReduceLROnPlateau.*in_state.*leave the scheduler",
    ),
    "ends": (with_an_end, 9, "OneCycleLR ends after 4 steps.*Fix: steps=4"),
    "of another": (of_another, 5, "scheduler is a LambdaLR of another optimizer"),
    "no steps": (lambda live: None, None, "no `steps`.*steps=10_000"),
    "steps": (lambda live: None, 0, "steps must be from 1"),
    "lbfgs": (lbfgs, None, "LBFGS evaluates the loss again"),
    "swapped": (swapped, None, "optimizer is GradScaler; expected the live one of torch.optim"),
}


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


def test_steps_without_a_scheduler_are_refused():
    with pytest.raises(ValueError, match="steps=5 without a scheduler"):
        torch_amp.take_over(*job("SGD").all, steps=5)


def spoil(live, taken, state, case):
    """The arguments of `give_back`, of which one is wrong."""
    _, optimizer, rule, _ = taken
    given = {"state": state, "optimizer": optimizer, "rule": rule, "model": live.model}
    given |= {"torch_optimizer": live.optimizer, "scaler": live.scaler}
    given["scheduler"] = live.scheduler
    if case == "swapped":
        given |= {"state": optimizer, "optimizer": state}
    elif case == "class":
        given["torch_optimizer"] = torch.optim.SGD(live.model.parameters())
    elif case == "other optimizer":
        given["torch_optimizer"] = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    elif case == "rule":
        given["rule"] = ps.DynamicScale()
    elif case == "model":
        given["model"] = nn.Linear(2, 2)
    elif case == "shapes":
        given["state"] = state._replace(params={n: p[:1] for n, p in state.params.items()})
    elif case == "no scheduler":
        given["scheduler"] = None
    elif case == "stepped meanwhile":
        far = state.opt_state._replace(applied=state.opt_state.applied - 9)
        given["state"] = state._replace(opt_state=far)
    elif case == "too far":
        far = state.opt_state._replace(applied=state.opt_state.applied + 1000)
        given["state"] = state._replace(opt_state=far)
    elif case == "beyond the table":
        later = state.opt_state._replace(applied=state.opt_state.applied + 10)
        given["state"] = state._replace(opt_state=later)
    elif case == "stacked":
        given["state"] = ps.stack_states([state, state])
    elif case == "in the state":
        given["optimizer"] = ps.from_torch(torch.optim.AdamW, in_state=("lr",))
    elif case == "partition":
        given["optimizer"] = ps.partition({"all": optimizer}, lambda name, param: "all")
        given["state"] = state._replace(opt_state={"all": state.opt_state})
    return given


NOT_GIVEN = {
    "swapped": "expected the TrainState.*Fix: give_back",
    "class": "OptState of AdamW, the live optimizer a SGD",
    "other optimizer": "the state has .* the live optimizer does not",
    "rule": "expected one that `interop.torch_amp.rule",
    "model": "the live optimizer does not",
    "shapes": "do not fit the model",
    "no scheduler": r"take_over was given a scheduler.*give_back\(..., scheduler\)",
    "stepped meanwhile": "the scheduler is at step 4, the state at -2",
    "too far": "994 steps were made beyond the 9",
    "beyond the table": r"4 steps were made beyond the 9 .*steps=13\)",
    "stacked": r"2 stacked ones.*member\(state, 0\)",
    "in the state": "lr is in the state, and a scheduler moves .*leave lr out",
    "partition": r"has the parts \['all'\].*to_torch_optimizer\(opt_state\[key\]",
}


@pytest.mark.parametrize("case", NOT_GIVEN)
def test_what_does_not_fit_is_refused_and_nothing_is_half_written(case):
    live = job("AdamW")
    live.scheduler = lr_scheduler.OneCycleLR(
        live.optimizer, max_lr=0.1, total_steps=50, cycle_momentum=False
    )
    live.train(batches(4))
    taken = torch_amp.take_over(*live.all, steps=9)
    state = train_here(taken, batches(3))
    before = copy.deepcopy(live.values())
    with pytest.raises((ValueError, TypeError), match=NOT_GIVEN[case]):
        torch_amp.give_back(**spoil(live, taken, state, case))
    assert same_bits(tensors(live.values()), tensors(before))
    assert str(live.values()[2:]) == str(before[2:])


def test_a_scheduler_that_ends_at_the_last_step_is_refused_and_nothing_is_half_written():
    live, rates = job("SGD"), [0.1, 0.2, 0.3]
    live.scheduler = lr_scheduler.LambdaLR(live.optimizer, lambda n: rates[n])
    taken = torch_amp.take_over(*live.all, steps=3)
    state = train_here(taken, batches(3))
    before = copy.deepcopy(live.values())
    with pytest.raises(ValueError, match=r"LambdaLR ends after 3 steps"):
        torch_amp.give_back(state, *taken[1:3], *live.all)
    assert same_bits(tensors(live.values()), tensors(before))
    assert str(live.values()[2:]) == str(before[2:])


def test_a_scheduler_that_was_not_taken_over_is_refused():
    live = job("SGD")
    _, optimizer, rule, state = torch_amp.take_over(*live.all)
    live.scheduler = warm_up(live.optimizer)
    with pytest.raises(ValueError, match="the rate of the optimizer is a number"):
        torch_amp.give_back(state, optimizer, rule, *live.all)
