"""Schedulers of torch as tables of rates."""

import copy
import functools
import math
import pickle

import hypothesis.strategies as st
import pytest
import torch
from helpers import AsOnAnAccelerator, clone, examples, same_bits, started
from hypothesis import given
from test_user_class_step import Lion
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import lr_scheduler as torchs

import purescale as ps
from purescale._distributed.collectives import describe_setting
from purescale._optim.opt_state import map_opt_states
from purescale.interop._schedulers import RateTable
from purescale.testing import assert_sync_free, assert_vmap_equals_loop

STEPS = 24


def warm_up_and_cosine(opt):
    parts = [
        torchs.LinearLR(opt, start_factor=0.1, total_iters=5),
        torchs.CosineAnnealingLR(opt, T_max=20),
        torchs.ExponentialLR(opt, gamma=0.9),
    ]
    return torchs.SequentialLR(opt, parts, milestones=[5, 18])


def chained(opt):
    parts = [
        torchs.ConstantLR(opt, factor=0.5, total_iters=4),
        torchs.ExponentialLR(opt, gamma=0.95),
        torchs.MultiStepLR(opt, milestones=[9, 20, 20]),
    ]
    return torchs.ChainedScheduler(parts)


def nested(opt):
    return torchs.ChainedScheduler([warm_up_and_cosine(opt), torchs.StepLR(opt, 8)])


def scheduler(name, *args, **settings):
    return lambda opt: getattr(torchs, name)(opt, *args, **settings)


MAKES = {
    "LambdaLR": scheduler("LambdaLR", lambda n: min(n / 10, 1.0)),
    "MultiplicativeLR": scheduler("MultiplicativeLR", lambda n: 0.9 + 0.001 * n),
    "StepLR": scheduler("StepLR", step_size=7, gamma=0.3),
    "MultiStepLR": scheduler("MultiStepLR", milestones=[3, 11, 12]),
    "ConstantLR": scheduler("ConstantLR", factor=0.2, total_iters=5),
    "LinearLR": scheduler("LinearLR", start_factor=0.01, total_iters=20),
    "ExponentialLR": scheduler("ExponentialLR", gamma=0.87),
    "PolynomialLR": scheduler("PolynomialLR", total_iters=30, power=1.7),
    "CosineAnnealingLR": scheduler("CosineAnnealingLR", T_max=13, eta_min=1e-5),
    "CosineAnnealingWarmRestarts": scheduler("CosineAnnealingWarmRestarts", T_0=5, T_mult=2),
    "CyclicLR": scheduler(
        *("CyclicLR", 1e-4, 1e-2, 6), mode="exp_range", gamma=0.99, cycle_momentum=False
    ),
    "OneCycleLR": scheduler("OneCycleLR", max_lr=0.1, total_steps=STEPS, cycle_momentum=False),
    "SequentialLR": warm_up_and_cosine,
    "ChainedScheduler": chained,
    "nested": nested,
    "SWALR": lambda opt: torch.optim.swa_utils.SWALR(opt, swa_lr=0.01, anneal_epochs=9),
}
each = pytest.mark.parametrize("name", MAKES)


def rates_of(make, lr=0.3, steps=STEPS):
    """torch's own scheduler in torch's own loop."""
    theirs = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    scheduler = make(theirs)
    rates = [theirs.param_groups[0]["lr"]]
    for _ in range(steps - 1):
        theirs.step()
        scheduler.step()
        rates.append(theirs.param_groups[0]["lr"])
    return torch.tensor(rates, dtype=torch.float32)


def table_of(name, lr=0.3, steps=STEPS):
    return ps.schedule_from_torch(MAKES[name], lr, steps)


# ---- what it is equal to


@each
def test_every_scheduler_of_torch_is_itself_to_the_bit(name, recwarn):
    schedule = table_of(name)
    assert not recwarn
    expected = rates_of(MAKES[name])
    rates = [schedule(torch.tensor(step)) for step in range(STEPS)]
    assert all(rate.dtype is torch.float32 and rate.shape == () for rate in rates)
    assert same_bits(torch.stack(rates), expected)
    assert same_bits(schedule(torch.arange(STEPS).view(4, -1)), expected.view(4, -1))


def test_all_schedulers_of_torch_are_drawn():
    classes = {name: cls for name, cls in vars(torchs).items() if isinstance(cls, type)}
    every = {name for name, cls in classes.items() if issubclass(cls, torchs.LRScheduler)}
    assert every - MAKES.keys() == {"LRScheduler", "_LRScheduler", "ReduceLROnPlateau"}


def test_beyond_the_end_the_rate_is_the_last():
    schedule = table_of("ExponentialLR", steps=5)
    last = rates_of(MAKES["ExponentialLR"], steps=5)[-1]
    assert same_bits(schedule(torch.tensor([4, 5, 2**40])), last.expand(3))


# ---- by iteration --------------------------------------------------------------------------------

RUN = [True, False, True, True, False, False, True, False]  # a job that starts with an overflow


def of_torch(name, **settings):
    return lambda **lr: ps.from_torch(getattr(torch.optim, name), **settings, **lr)


def in_parts(**lr):
    parts = {
        "all": ps.with_master_weights(ps.from_torch(torch.optim.SGD, **lr)),
        "other": ps.from_torch(torch.optim.SGD, lr=0.1),
    }
    return ps.partition(parts, lambda name, _: "other" if name == "bias" else "all")


ADAMW = of_torch("AdamW")
BY_ITERATION = {
    **{"SGD": of_torch("SGD", momentum=0.9), "AdamW": ADAMW, "RMSprop": of_torch("RMSprop")},
    "masters": lambda **lr: ps.with_master_weights(ADAMW(**lr)),
    "moments": lambda **lr: ps.with_state_dtype(ADAMW(**lr), {"exp_avg": torch.bfloat16}),
    "partition": in_parts,
    "a class of one's own": lambda **lr: ps.from_torch(Lion, **lr),
    "a step of one's own": lambda **lr: Around(ps.from_torch(torch.optim.SGD, **lr)),
}
each_by_iteration = pytest.mark.parametrize("kind", BY_ITERATION)


class Around:
    """An optimizer with `init` and `step` alone."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def init(self, params):
        return (self.optimizer.init(params),)

    def step(self, params, grads, state):
        params, inner = self.optimizer.step(params, grads, *state)
        return params, (inner,)


def parameters(kind):
    half = torch.bfloat16 if kind in ("masters", "partition") else torch.float32
    return {"weight": torch.linspace(-1, 1, 6).reshape(2, 3).to(half), "bias": torch.ones(3)}


def run_of(optimizer, params, flags, step=ps.maybe_step, **settings):
    """Parameters and states after each step of a run with these overflows."""
    params, after = clone(params), []
    state = optimizer.init(params)
    for index, bad in enumerate(flags):
        grads = {name: torch.sin(p.float() + index).to(p.dtype) for name, p in params.items()}
        grads = {name: g + (torch.inf if bad else 0) for name, g in grads.items()}
        params, state = step(optimizer, params, grads, state, torch.tensor(bad), **settings)
        after.append((clone(params), clone(state)))
    return after


def rate(count):
    return 0.01 * count  # a warm-up that starts at 0


@each_by_iteration
def test_a_rate_by_iteration_is_that_of_the_step_with_the_skipped_ones(kind, way):
    """Each applied step is that of the same optimizer with the rate of this iteration."""
    make, flags = BY_ITERATION[kind], [False, *RUN]
    optimizer, params = make(lr=rate, schedule_by="iteration"), parameters(kind)
    fixed = make(lr=1.0, in_state=("lr",))
    after = run_of(optimizer, params, flags, donate=True)

    def at_the_rate(optimizer, params, grads, state, bad):
        state = ps.replace_settings(state, lr=rate(next(iterations)))
        return (params, state) if bad else optimizer.step(params, grads, state)

    iterations = iter(range(len(flags)))
    expected = run_of(fixed, params, flags, at_the_rate)
    for (got, _), (wanted, _) in zip(after, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-7)


@each_by_iteration
def test_a_skipped_step_changes_no_bit_but_the_number_of_iterations(kind):
    optimizer = BY_ITERATION[kind](lr=rate, schedule_by="iteration")
    after = run_of(optimizer, parameters(kind), [False, *RUN], donate=True)
    pairs = zip(RUN, after, after[1:], strict=False)
    for count, (bad, before, (params, state)) in enumerate(pairs, 2):
        assert same_bits(iterations_of(state), [torch.tensor(count)])
        if bad:
            assert same_bits(params, before[0])
            assert same_bits(one_iteration_before(state), before[1])


def iterations_of(state):
    numbers = []
    map_opt_states(lambda each, _: numbers.append(each.iteration) or each, state)
    return [number for number in numbers if number != ()]


def one_iteration_before(state):
    def before(each, _):
        return each if each.iteration == () else each._replace(iteration=each.iteration - 1)

    return map_opt_states(before, state)


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")  # of a skipped epoch
@examples(15)
@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(1, 4))
def test_an_epoch_of_iterations_is_that_of_torchs_loop_whatever_is_skipped(skips, steps_per_epoch):
    def make(opt):
        return torchs.ExponentialLR(opt, gamma=0.5)

    schedule = ps.schedule_from_torch(make, lr=1.0, steps=20)
    optimizer = ps.from_torch(
        torch.optim.SGD,
        lr=lambda count: schedule(count // steps_per_epoch),
        schedule_by="iteration",
    )
    weight = torch.zeros((), dtype=torch.float64)
    theirs, gradient = weight.clone(), -torch.ones_like(weight)
    state, sgd = optimizer.init(weight), torch.optim.SGD([theirs], lr=1.0)
    scheduler, theirs.grad = make(sgd), gradient
    for index, skipped in enumerate(skips, 1):
        weight, state = ps.maybe_step(optimizer, weight, gradient, state, torch.tensor(skipped))
        if not skipped:
            sgd.step()
        if index % steps_per_epoch == 0:
            scheduler.step()
    assert weight == theirs


class RejectsFives:
    def init(self, device=None):
        return torch.zeros((), device=device)

    def update(self, state, loss, grad_norm):
        return state, loss == 5


def test_a_scaled_loop_counts_each_step_once_whatever_skips_it():
    """An overflow, a bound that is 0, no weight, a guard; retries count once."""
    optimizer, rule = ADAMW(lr=rate, schedule_by="iteration"), ps.DynamicScale()
    guard = RejectsFives()
    state, step = started(
        {"w": torch.ones(2)}, lambda p, x: (p["w"] * x).sum(), optimizer, rule, guard=guard
    )
    ways = [
        {},
        {"microbatches": [torch.tensor(torch.inf)]},
        {"max_norm": torch.tensor(0.0)},
        {"weight_fn": lambda batch: 0.0},
        {"microbatches": [torch.tensor(2.5)]},
        {"microbatches": [torch.tensor(1e34)], "max_retries": 9},
    ]
    applied = 0
    for count, settings in enumerate(ways, 1):
        windows = settings.pop("microbatches", [torch.tensor(1.0)])
        state, info = step(state, windows, **settings)
        applied += not info.found_inf
        assert (state.opt_state.iteration, state.opt_state.applied) == (count, applied)
    assert applied == 2


def test_members_of_an_ensemble_count_their_own_iterations():
    optimizer, params = ADAMW(lr=rate, schedule_by="iteration"), parameters("AdamW")
    states = ps.stack_states([s for _, s in run_of(optimizer, params, [False, *RUN[:2]])])
    every, flags = ps.stack_states([params] * 3), torch.tensor([True, False, True])
    step = functools.partial(ps.maybe_step, optimizer)
    assert_vmap_equals_loop(step, every, every, states, flags, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["partition", "AdamW"])  # of masters and another
def test_one_graph_serves_every_iteration(kind):
    optimizer = BY_ITERATION[kind](lr=rate, schedule_by="iteration")
    step = functools.partial(ps.maybe_step, optimizer)
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    after = run_of(optimizer, parameters(kind), RUN)
    once = run_of(optimizer, parameters(kind), RUN, lambda _, *args: compiled(*args))
    torch.testing.assert_close(once, after, rtol=1e-2 if kind != "AdamW" else 1e-5, atol=1e-6)


def test_a_count_by_iteration_goes_through_torchs_state_dict_and_a_checkpoint(tmp_path):
    optimizer = ADAMW(lr=rate, schedule_by="iteration")
    params, state = run_of(optimizer, parameters("AdamW"), RUN)[-1]
    ps.save(tmp_path / "state.pt", state)
    assert same_bits(ps.load(tmp_path / "state.pt", like=optimizer.init(params)), state)
    sd = optimizer.to_state_dict(state)
    assert sd["param_groups"][0]["lr"] == pytest.approx(rate(len(RUN)))
    assert same_bits(optimizer.from_state_dict(sd, params, iteration=len(RUN)), state)
    with pytest.raises(ValueError, match=r"goes by iteration.*iteration=scheduler.last_epoch"):
        optimizer.from_state_dict(sd, params)
    with pytest.raises(ValueError, match=r"iteration is 3, but the schedules .* count applied"):
        ADAMW(lr=rate).from_state_dict(sd, params, iteration=3)


def test_a_state_with_another_count_is_refused():
    by_applied, by_iteration = (ADAMW(lr=rate, schedule_by=by) for by in ("applied", "iteration"))
    params = parameters("AdamW")
    with pytest.raises(ValueError, match=r"iteration is \(\), .*a 0-d int64.*applied.clone"):
        by_iteration.step(params, params, by_applied.init(params))
    with pytest.raises(ValueError, match=r"made with schedule_by='applied'; expected \(\)"):
        by_applied.step(params, params, by_iteration.init(params))
    with pytest.raises(ValueError, match=r"schedule_by is 'epoch', expected \"applied\""):
        ps.from_torch(torch.optim.SGD, schedule_by="epoch")


# ---- one graph, one rate a member, no read


def test_members_with_counts_of_their_own_have_rates_of_their_own():
    assert_vmap_equals_loop(table_of("SequentialLR"), torch.tensor([0, 9, 1000]))


def test_compiled_code_tells_two_tables_of_one_length_apart():
    @functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
    def rate(schedule, applied):
        return schedule(applied)

    torch.compiler.reset()
    for name in ("ExponentialLR", "StepLR", "ExponentialLR"):
        schedule = table_of(name)
        # as on every device but the host's: a tensor of its own, which the compiler takes as it is
        schedule._copies[torch.device("cpu")] = schedule.rates.clone()
        assert same_bits(rate(schedule, torch.tensor(9)), schedule(torch.tensor(9)))


def test_a_step_reads_no_count():
    optimizer = ps.from_torch(torch.optim.SGD, lr=table_of("SequentialLR"))
    params = {"w": torch.linspace(-1, 1, 5)}
    state = optimizer.init(params)._replace(applied=torch.tensor(3))
    expected = optimizer.step(params, params, state)
    with AsOnAnAccelerator() as ran:
        forced = assert_sync_free(optimizer.step, params, params, state)
    torch.testing.assert_close(forced, expected)
    assert ran.reads == 0


@pytest.mark.parametrize("first", ["vmap", "grad", "fake", "inference"])
def test_the_copy_on_a_device_is_an_ordinary_tensor_wherever_it_was_first_asked_for(first):
    schedule, counts = table_of("StepLR"), torch.arange(3, device="meta")
    if first == "vmap":
        torch.vmap(schedule)(counts)
    elif first == "grad":
        torch.func.grad(lambda x: x * schedule(counts).sum())(torch.ones((), device="meta"))
    elif first == "fake":
        with FakeTensorMode(allow_non_fake_inputs=True):
            schedule(torch.arange(3, device="meta"))
    else:
        with torch.inference_mode():
            schedule(counts)
    (copied,) = schedule._copies.values()
    assert type(copied) is torch.Tensor
    assert copied.is_meta
    assert not copied.is_inference()
    assert torch._C._functorch.maybe_get_level(copied) == -1


# ---- a setting like others


def test_tables_of_equal_rates_are_equal_settings_also_as_ranks_compare_them():
    one, same, other = table_of("StepLR"), table_of("StepLR"), table_of("StepLR", lr=0.3001)
    assert one == same != other
    assert hash(one) == hash(same)
    assert RateTable.of([1.0, 2.0], start=1) != RateTable.of([1.0, 2.0])
    compared = [describe_setting(of_torch("SGD")(lr=table)) for table in (one, same, other)]
    assert compared[0] == compared[1] != compared[2]


def test_it_is_copied_and_pickled():
    schedule = table_of("StepLR")
    for other in (copy.deepcopy(schedule), pickle.loads(pickle.dumps(schedule))):
        assert other == schedule
        assert same_bits(other(torch.arange(9)), schedule(torch.arange(9)))


# ---- what is refused


def by_factors(factor):
    return scheduler("LambdaLR", factor)


def of_another_optimizer(opt):
    return torchs.StepLR(torch.optim.SGD([torch.zeros(1)], lr=1.0), 3)


def moves_weight_decay(opt):
    group = opt.param_groups[0]
    return torchs.LambdaLR(opt, lambda n: group.update(weight_decay=0.1 * n) or 1.0)


STEP, CYCLE = MAKES["StepLR"], MAKES["OneCycleLR"]
CYCLE_OF_MOMENTUM = scheduler("OneCycleLR", max_lr=0.1, total_steps=STEPS)
CYCLIC = scheduler("CyclicLR", 0.1, 0.2, base_momentum=0.9, max_momentum=0.95)
TOO_SHORT = scheduler("OneCycleLR", max_lr=0.1, total_steps=10, cycle_momentum=False)
PLATEAU = r"ReduceLROnPlateau.*in_state=\('lr',\).*get_last_lr"
MOMENTUM = "OneCycleLR moves momentum.*cycle_momentum=False.*setting='momentum'"
NO_MOMENTUM = "OneCycleLR does not move the momentum.*cycle_momentum=True"
NO_SETTING = 'setting is \'betas\', expected "lr" or "momentum"'
NO_SCHEDULER = r"make\(optimizer\) is NoneType.*Fix: `lambda opt"
TOO_LARGE = "the rate of step 0 is .* out of the range of float32"


@pytest.mark.parametrize(
    ("make", "settings", "error", "words"),
    [
        (torchs.ReduceLROnPlateau, {}, ValueError, PLATEAU),
        (CYCLE_OF_MOMENTUM, {}, ValueError, MOMENTUM),
        (CYCLIC, {}, ValueError, "CyclicLR moves momentum.*cycle_momentum=False"),
        (TOO_SHORT, {}, ValueError, "Tried to step 11 times"),
        (of_another_optimizer, {}, ValueError, "a StepLR of another optimizer"),
        (moves_weight_decay, {}, ValueError, "LambdaLR moves weight_decay"),
        (lambda opt: None, {}, TypeError, NO_SCHEDULER),
        (lambda opt: math.cos, {}, TypeError, "expected a scheduler of torch"),
        (CYCLE, {"setting": "momentum"}, ValueError, NO_MOMENTUM),
        (CYCLE, {"setting": "betas"}, ValueError, NO_SETTING),
        (STEP, {"steps": 0}, ValueError, "steps must be"),
        (STEP, {"steps": 2.5}, TypeError, "steps must be"),
        (STEP, {"lr": torch.tensor(0.1)}, TypeError, "lr is a tensor"),
        (by_factors(lambda n: 1.0), {"lr": 1e39}, ValueError, TOO_LARGE),
        (by_factors(lambda n: 1.0), {"lr": math.inf}, ValueError, TOO_LARGE),
        (
            by_factors(lambda n: 10.0**n),
            {"lr": 1e38},
            ValueError,
            r"the rate of step 1 is 1e\+39, out of the range",
        ),
        (
            by_factors(lambda n: -0.5 if n else 1.0),
            {"lr": 1.0},
            ValueError,
            "the rate of step 1 is .*refuse negative rates and NaN",
        ),
    ],
)
def test_what_is_no_table_of_rates_is_refused(make, settings, error, words):
    with pytest.raises(error, match=words):
        ps.schedule_from_torch(make, **{"lr": 0.3, "steps": STEPS, **settings})


def test_a_schedule_that_misses_0_by_rounding_is_taken():
    schedule = ps.schedule_from_torch(by_factors(lambda n: 1 - n), 1e-17, 3)
    assert schedule(torch.tensor(2)) == torch.tensor(-1e-17)
