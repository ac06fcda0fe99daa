"""The derivative of a run: the unrolled gradient, differences, and what a replay must keep."""

import dataclasses
import gc
import itertools
import operator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from helpers import Untouched, clone, examples, generator_of, started
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import tree_map

import purescale as ps
from purescale.testing import same_bits

N, CLASSES = 6, 3
FLOAT64 = torch.float64


def batches(number, dtype=torch.float32, size=N):
    g = generator_of(number)
    draw = lambda: torch.randn(size, 5, generator=g).to(dtype)  # noqa: E731
    return [(draw(), torch.randint(0, CLASSES, (size,), generator=g)) for _ in range(number)]


def net(*extra, width=33, dtype=torch.float32):
    torch.manual_seed(0)
    layers = nn.Linear(5, width), *extra, nn.Tanh(), nn.Linear(width, CLASSES)
    return nn.Sequential(*layers).to(dtype)


def differentiable(cls=torch.optim.AdamW, **settings):
    return ps.from_torch(cls, **{"lr": 0.01, **settings}, differentiable=True)


def task(model=None, optimizer=None, rule=None, rng=None, window=1, policy=None, **settings):
    """A step by weights of its examples, its first state, and a loss of the last one."""
    optimizer, rule = optimizer or differentiable(), rule or ps.DynamicScale(init_scale=8.0)
    apply, params, buffers = ps.make_functional(model or net())
    forward = ps.with_policy(apply, policy) if policy else apply

    def loss_fn(params, buffers, microbatch):
        x, y, weights = microbatch
        out, buffers = forward(params, buffers, x)
        return (F.cross_entropy(out, y, reduction="none") * weights).mean(), buffers

    def step(state, batch, weights):
        rows = zip(*(part.chunk(window) for part in (*batch, weights)), strict=True)
        options = {"loss_fn": loss_fn, "optimizer": optimizer, "rule": rule, **settings}
        return ps.train_step(state, list(rows), **options)

    def query(state):
        return sum(p.square().sum() for p in state.params.values())

    return step, ps.init_train_state(params, buffers, optimizer, rule, rng=rng), query


def train(step, state, items, *wrt):
    for item in items:
        state, _ = step(state, item, *wrt)
    return state


def unrolled(step, state, items, query, weights):
    def run(params, weights):
        return query(train(step, state._replace(params=params), items, weights))

    return torch.func.grad(run, (0, 1))(state.params, weights)


def assert_is_unrolled_gradient(step, state, items, query, weights, **tolerance):
    run = ps.vjp_through(step, state, items, query, wrt=weights)
    by_params, by_weights = unrolled(step, state, items, query, weights)
    tolerance = tolerance or {"rtol": 0, "atol": 0}
    torch.testing.assert_close(run.state.params, by_params, **tolerance)
    torch.testing.assert_close(run.wrt, by_weights, **tolerance)
    final = train(step, state, items, weights)
    assert same_bits(run.final, final)
    assert same_bits(run.value, query(final))


def by_name(name, param):
    return "matrices" if param.ndim > 1 else "others"


def parts_by_name():
    return {"matrices": differentiable(torch.optim.SGD), "others": differentiable()}


WHOLE = {"window": 3, "max_norm": 0.1}
KINDS = {
    "SGD": (lambda: differentiable(torch.optim.SGD, momentum=0.9, nesterov=True), {}),
    "Adam": (lambda: differentiable(torch.optim.Adam, amsgrad=True), {}),
    "NAdam": (lambda: differentiable(torch.optim.NAdam), {}),
    "Adagrad": (lambda: differentiable(torch.optim.Adagrad), {}),
    "RMSprop": (lambda: differentiable(torch.optim.RMSprop, momentum=0.9, centered=True), {}),
    "ASGD": (lambda: differentiable(torch.optim.ASGD), {}),
    "partition": (lambda: ps.partition(parts_by_name(), by_name), WHOLE),
    "masters": (lambda: ps.with_master_weights(differentiable()), WHOLE),
    "fused": (lambda: ps.from_torch(torch.optim.AdamW, lr=0.01), {}),
    "schedule": (lambda: differentiable(lr=lambda count: 0.1 / (1 + count)), WHOLE),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_step_has_the_unrolled_gradient(name):
    """Compare bits where the class is plain."""
    make, settings = KINDS[name]
    step, state, query = task(optimizer=make(), **settings)
    near = {"rtol": 1e-5, "atol": 1e-6} if settings or name == "fused" else {}
    assert_is_unrolled_gradient(step, state, batches(4), query, torch.ones(N), **near)


def differences(step, state, items, query, weights, eps=1e-6, seed=3):
    def value(weights):
        torch.manual_seed(seed)
        return query(train(step, state, items, weights))

    rows = eps * torch.eye(len(weights), dtype=weights.dtype)
    return torch.stack([(value(weights + d) - value(weights - d)) / (2 * eps) for d in rows])


@examples(8)
@given(number=st.integers(1, 13), every=st.integers(1, 15), on_disk=st.booleans())
def test_any_length_of_a_segment_has_the_same_bits_in_a_folder_too(
    tmp_path_factory, number, every, on_disk
):
    folder = tmp_path_factory.getbasetemp() if on_disk else None
    step, state, query = task(net(width=5), differentiable(torch.optim.SGD, momentum=0.9))
    items, weights = batches(number), torch.ones(N)
    run = ps.vjp_through(step, state, items, query, wrt=weights, every=every, folder=folder)
    assert same_bits(run, ps.vjp_through(step, state, items, query, wrt=weights))


def test_a_run_takes_the_memory_of_its_kept_states():
    number, most, peak = 160, 17, 0
    gc.collect()
    gc.freeze()  # which leaves tensors of earlier tests out of `get_objects`

    def step(x, item):
        nonlocal peak
        alive = [o for o in gc.get_objects() if type(o) is torch.Tensor and o.shape == x.shape]
        peak = max(peak, len(alive))
        return x * item, ()

    items = [1.0 + 2.0**-20 * i for i in range(number)]
    start = torch.linspace(1, 2, 33)
    run = ps.vjp_through(step, start, items, torch.sum)
    # Besides: the first state, the last one, the one at work, those around a pullback, cotangents.
    assert peak <= most + 10
    assert same_bits(run, ps.vjp_through(step, start, items, torch.sum, every=number))


# ---- steps of one's own --------------------------------------------------------------------------

ONE, UNSCALED = torch.tensor(1.0, dtype=FLOAT64), ps.NoScale()


def sgd(**settings):
    return ps.from_torch(torch.optim.SGD, **{"lr": 0.1, **settings})


def square(params, buffers, factor):
    return factor * params["w"] ** 2, buffers


def squaring(optimizer):
    return started({"w": ONE}, None, optimizer, UNSCALED, loss_fn=square)


def with_average(optimizer):
    """A step whose state holds an average beside the TrainState."""
    start, inner = squaring(optimizer)

    def step(pair, item, factor):
        state, average = pair
        state, info = inner(state, [factor])
        return (state, 0.5 * average + 0.5 * state.params["w"]), info

    return step, (start, ONE), lambda pair: pair[1]


def by_hand(optimizer):
    gradients = ps.value_and_grad(square)

    def step(pair, item, factor):
        _, grads = gradients(pair[0], {}, factor)
        return optimizer.step(pair[0], grads, pair[1]), ()

    return step, ({"w": ONE}, optimizer.init({"w": ONE})), lambda pair: pair[0]["w"]


def that_trains(optimizer):
    """A step that itself trains, from a constant."""

    def step(x, item, factor):
        inner, train_step = squaring(optimizer)
        for _ in range(2):
            inner, _ = train_step(inner, [factor])
        return x - 0.1 * (x - inner.params["w"]), ()

    return step, 2 * ONE, lambda x: x


def with_a_mean_of_its_own():
    """A buffer named as one of batch norm's, through which a derivative goes."""

    def loss_fn(params, buffers, factor):
        hidden = factor * params["w"]
        mean = 0.7 * buffers["running_mean"] + 0.3 * hidden
        return (hidden - buffers["running_mean"] - 2) ** 2, {"running_mean": mean}

    optimizer, buffers = sgd(differentiable=True), {"running_mean": ONE}
    state, inner = started({"w": ONE}, None, optimizer, UNSCALED, loss_fn=loss_fn, buffers=buffers)
    step = lambda state, item, factor: inner(state, [factor])  # noqa: E731
    return step, state, lambda state: state.params["w"]


OWN = {
    "an average, fused": lambda: with_average(sgd()),
    "an average": lambda: with_average(sgd(differentiable=True)),
    "by hand, fused": lambda: by_hand(sgd()),
    "by hand": lambda: by_hand(sgd(differentiable=True)),
    "a step that trains, fused": lambda: that_trains(sgd()),
    "a step that trains": lambda: that_trains(sgd(differentiable=True)),
    "a mean of its own": with_a_mean_of_its_own,
}


@pytest.mark.parametrize("name", OWN)
def test_a_step_of_ones_own_has_the_derivative_of_finite_differences(name):
    step, state, query = OWN[name]()
    run = ps.vjp_through(step, state, range(3), query, wrt=ONE)

    def value(factor):
        return query(train(step, state, range(3), factor))

    expected = (value(ONE + 1e-5) - value(ONE - 1e-5)) / 2e-5
    torch.testing.assert_close(run.wrt, expected, rtol=1e-6, atol=1e-8)


def test_an_average_that_follows_a_skipped_step_is_refused():
    step, state, query = with_average(sgd())
    bad = torch.tensor(torch.inf, dtype=FLOAT64)

    def step_or_skip(pair, item, factor):
        return step(pair, item, bad if item else factor)

    with pytest.raises(ValueError, match=r"step 2 was skipped, and moved state\[1\]"):
        ps.vjp_through(step_or_skip, state, [0, 0, 1, 0], query, wrt=ONE)


@given(
    number=st.integers(1, 4),
    index=st.integers(0, 3),
    cotangents=st.lists(st.sampled_from([-1.0, 0.0, 2.0]), min_size=5, max_size=5),
)
def test_a_skipped_step_may_move_only_what_no_derivative_is_taken_of(number, index, cotangents):
    def step(x, i):
        info = ps.StepInfo(*[torch.zeros(())] * 6, ())
        return x + 1, info._replace(found_inf=torch.tensor(i == index))

    def run():
        return ps.vjp_through(step, torch.ones(5), range(number), torch.tensor(cotangents))

    if index < number and any(cotangents):
        with pytest.raises(ValueError, match=f"step {index} was skipped, and moved state"):
            run()
    else:
        assert run().state.tolist() == cotangents


def test_sums_over_many_steps_are_wide():
    w, start = torch.tensor(0.0, dtype=torch.bfloat16), torch.tensor(0.0)
    run = ps.vjp_through(lambda x, i, w: (x + w, ()), start, range(1000), lambda x: x, wrt=w)
    assert run.wrt == 1000


def test_what_a_step_closes_over_keeps_no_graph_of_the_run():
    layer, start = nn.Linear(5, 5), torch.ones(5)
    run = ps.vjp_through(lambda x, i: (layer(x).tanh(), ()), start, range(7), torch.sum, every=2)
    assert not any(x.requires_grad for x in (run.final, run.value, run.state))


# ---- what is no parameter ------------------------------------------------------------------------


def test_running_statistics_are_constants():
    model = net(nn.BatchNorm1d(33), dtype=FLOAT64)
    step, state, query = task(model, differentiable(torch.optim.SGD, momentum=0.9))
    weights = torch.ones(N, dtype=FLOAT64)
    # Unrolled, the terms of a batch norm's derivative are added in another order.
    tolerance = {"rtol": 1e-12, "atol": 1e-12}
    assert_is_unrolled_gradient(step, state, batches(4, FLOAT64), query, weights, **tolerance)
    run = ps.vjp_through(step, state, batches(2, FLOAT64), query, wrt=weights)
    assert set(run.state.buffers.values()) == {()}


@pytest.mark.parametrize("seed", [None, 5])
def test_dropout_draws_the_numbers_of_the_run(seed):
    rng = None if seed is None else torch.Generator().manual_seed(seed).get_state()
    step, state, query = task(net(nn.Dropout(0.3), dtype=FLOAT64), rng=rng)
    items, weights = batches(5, FLOAT64), torch.ones(N, dtype=FLOAT64)
    torch.manual_seed(3)
    run = ps.vjp_through(step, state, items, query, wrt=weights)
    after = torch.get_rng_state()
    torch.testing.assert_close(run.wrt, differences(step, state, items, query, weights))
    torch.manual_seed(3)
    assert same_bits(run.final, train(step, state, items, weights))
    assert torch.equal(after, torch.get_rng_state())


@examples(10)
@given(index=st.integers(0, 4), value=st.sampled_from([float("inf"), float("nan")]))
def test_a_skipped_step_is_left_out_of_the_derivative(index, value):
    step, state, query = task(net(width=5))
    items, weights = batches(4), torch.ones(N)
    bad = torch.full_like(items[0][0], value), items[0][1]
    run = ps.vjp_through(step, state, [*items[:index], bad, *items[index:]], query, wrt=weights)
    assert run.final.step == 4
    without = ps.vjp_through(step, state, items, query, wrt=weights)
    assert same_bits((run.wrt, run.state.params), (without.wrt, without.state.params))


def test_a_dropped_microbatch_is_refused_and_its_window_skipped_by_default():
    step, state, query = task(window=2, on_nonfinite="drop_microbatch")
    items, weights = batches(3), torch.ones(N)
    items[1][0][-1] = torch.inf
    assert not step(state, items[1], weights)[1].found_inf
    with pytest.raises(FloatingPointError, match=r"step 1 .* that was dropped"):
        ps.vjp_through(step, state, items, query, wrt=weights)
    skipping, state, query = task(window=2)
    run = ps.vjp_through(skipping, state, items, query, wrt=weights)
    assert same_bits(run.wrt, ps.vjp_through(step, state, items[::2], query, wrt=weights).wrt)


def test_a_retried_step_has_the_derivative_of_its_last_try():
    policy = "params=float32,compute=float16,output=float32"
    high = task(policy=policy, rule=ps.DynamicScale(2.0**24), max_retries=40)
    items, weights = batches(3), torch.ones(N)
    a = ps.vjp_through(high[0], high[1], items, high[2], wrt=weights, rule=ps.DynamicScale())
    low = task(policy=policy, rule=ps.DynamicScale(a.final.scaler.scale.item()))
    b = ps.vjp_through(low[0], low[1], items, low[2], wrt=weights, rule=ps.DynamicScale())
    assert a.final.step == 3
    torch.testing.assert_close(a.wrt, b.wrt, rtol=1e-2, atol=1e-4)


# ---- the form ------------------------------------------------------------------------------------


def test_two_runs_in_a_row_are_one_run():
    step, state, query = task()
    items, weights = batches(6), torch.ones(N)
    whole = ps.vjp_through(step, state, items, query, wrt=weights)
    middle = train(step, state, items[:2], weights)
    second = ps.vjp_through(step, middle, items[2:], query, wrt=weights)
    first = ps.vjp_through(step, state, items[:2], second.state, wrt=weights)
    assert first.value == ()
    assert same_bits((first.state, second.value), (whole.state, whole.value))
    torch.testing.assert_close(first.wrt + second.wrt, whole.wrt)


def test_arguments_are_unchanged():
    step, state, query = task(net(nn.BatchNorm1d(33)))
    items, weights = batches(4), torch.ones(N)
    with Untouched((state, items, weights)):
        ps.vjp_through(step, state, items, query, wrt=weights)


def test_derivatives_come_in_trees_of_floating_leaves():
    def step(state, item, wrt):
        value = state["x"] * wrt["a"][0] + item
        return {"x": value, "count": state["count"] + 1}, ()

    state = {"x": torch.tensor(1.0), "count": torch.tensor(0)}
    wrt = {"a": [torch.tensor(2.0)], "index": torch.tensor(3)}
    run = ps.vjp_through(step, state, [1.0, 1.0], lambda state: state["x"], wrt=wrt)
    assert run.final == {"x": torch.tensor(7.0), "count": torch.tensor(2)}
    assert run.state == {"x": torch.tensor(4.0), "count": ()}
    assert run.wrt == {"a": [torch.tensor(5.0)], "index": ()}


def test_half_leaves_have_derivatives_in_float32():
    run = ps.vjp_through(
        lambda x, i: (x * i, ()), torch.ones(3).half(), [2.0] * 3, torch.Tensor.sum
    )
    assert torch.equal(run.state, torch.full((3,), 8.0))


# ---- a scale for cotangents ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inner", "rule"), [(0, ps.HeadroomScale()), (18, ps.DynamicScale())], ids=str
)
def test_a_float16_run_has_the_derivative_of_float32_at_every_inner_scale(inner, rule):
    items, weights = batches(16, size=300), torch.ones(300)
    optimizer = differentiable(torch.optim.SGD, lr=0.1, momentum=0.9)
    by_weights = []
    for policy in (None, "params=float32,compute=float16,output=float32"):
        settings = {"rule": ps.StaticScale(2.0**inner), "policy": policy}
        step, state, query = task(optimizer=optimizer, **settings)
        run = ps.vjp_through(step, state, items, query, wrt=weights, rule=rule)
        assert run.final.step == 16
        by_weights.append(run.wrt)
    assert (by_weights[1] - by_weights[0]).norm() < 2e-3 * by_weights[0].norm()


@pytest.mark.parametrize("rule", [None, ps.StaticScale(2.0**10), ps.DynamicScale()], ids=repr)
def test_a_derivative_that_no_scale_makes_finite_is_refused(rule):
    arguments = lambda x, item: ((x - item).sqrt(), ()), torch.ones(2), [0.0, 1.0, -1.0]
    with pytest.raises(FloatingPointError, match="the derivative through step 1 is not finite"):
        ps.vjp_through(*arguments, torch.Tensor.sum, rule=rule)


class Recorded:
    """A rule, and the scales and largest derivatives that it was given."""

    def __init__(self, rule):
        self.rule, self.takes_amax = rule, getattr(rule, "takes_amax", False)
        self.scales, self.amaxes = [], []

    def init(self, device=None):
        return self.rule.init(device)

    def update(self, scaler, found_inf, *amax):
        self.scales.append(scaler.scale.item())
        self.amaxes += amax
        return self.rule.update(scaler, found_inf, *amax)


@given(number=st.integers(1, 9), interval=st.integers(1, 3), init=st.integers(-3, 3))
def test_the_scale_of_the_cotangents_follows_the_rule_from_step_to_step(number, interval, init):
    rule = Recorded(ps.DynamicScale(2.0**init, growth_interval=interval))
    ps.vjp_through(lambda x, i: (x * 2, ()), torch.ones(5), range(number), torch.sum, rule=rule)
    assert rule.scales == [2.0 ** (init + index // interval) for index in range(number)]


@pytest.mark.parametrize("size", [5, 33, 300])
@examples(10)
@given(shares=st.lists(st.integers(-9, 9), min_size=1, max_size=5), of_slot=st.integers(-9, 9))
def test_a_rule_is_given_the_largest_derivative_by_the_parameters_alone(size, shares, of_slot):
    class State(NamedTuple):
        params: dict
        slot: torch.Tensor

    def step(state, factor):
        params = {name: factor * p for name, p in state.params.items()}
        return State(params, 2.0**of_slot * state.slot), ()

    def query(state):
        return state.params["a"].sum() - 2 * state.params["b"].max() + state.slot.sum()

    rule = Recorded(ps.HeadroomScale())
    state = State({"a": torch.ones(size), "b": torch.arange(size) + 1.0}, torch.ones(size))
    factors = [2.0**share for share in shares]
    ps.vjp_through(step, state, factors, query, rule=rule)
    expected = itertools.accumulate(reversed(factors), initial=2.0, func=operator.mul)
    assert rule.amaxes == list(expected)[1:]


# ---- jit -----------------------------------------------------------------------------------------


class Unhashable(ps.DynamicScale):
    __hash__ = None


@pytest.mark.parametrize(
    ("is_wrapped", "backend"),
    [
        *((False, "aot_eager"), (True, "aot_eager")),
        pytest.param(False, "inductor", marks=pytest.mark.slow),
    ],
)
def test_a_jitted_step_has_the_derivative_of_the_eager_one(is_wrapped, backend):
    """As it is or within a function, and by rules of any class."""
    # A bias before a batch norm has noise for a gradient, which SGD does not amplify.
    optimizer = differentiable(torch.optim.SGD, momentum=0.9)
    step, state, query = task(net(nn.BatchNorm1d(33)), optimizer, window=2, max_norm=0.1)
    jitted = ps.jit(step, backend=backend)
    taken = (lambda *args: jitted(*args)) if is_wrapped else jitted
    items, weights = batches(3), torch.ones(N)
    eager = ps.vjp_through(step, state, items, query, wrt=weights)
    close = {"rtol": 1e-4, "atol": 1e-5} if backend == "inductor" else {"rtol": 1e-6, "atol": 1e-9}
    for rule in (ps.HeadroomScale(), Unhashable(2.0**24)):
        run = ps.vjp_through(taken, state, items, query, wrt=weights, rule=rule)
        torch.testing.assert_close(run.wrt, eager.wrt, **close)
        torch.testing.assert_close(run.state.params, eager.state.params, **close)


@dataclasses.dataclass
class AtRate:
    """A step that counts its traces, an object without a hash."""

    traces: int = 0

    def __call__(self, x, item, rate):
        self.traces += 1
        return x - rate * (x - item), ()


def test_a_second_run_of_a_jitted_step_traces_nothing():
    step, one, numbers = ps.jit(AtRate(), backend="aot_eager"), torch.tensor(1.0), []
    for number, rule in ((3, None), (5, ps.StaticScale(8.0)), (2, ps.DynamicScale())):
        ps.vjp_through(step, 2 * one, [one] * number, torch.square, wrt=one, rule=rule)
        numbers.append(step.fn.traces)
    assert numbers == [2] * 3  # the step, and its derivative


# ---- refusals ------------------------------------------------------------------------------------


def donating(cls, jit=False):
    optimizer = ps.from_torch(cls, lr=0.01)
    step = task(net(width=5), optimizer, donate=not jit)[0]
    step = ps.jit(step, donate=0, backend="aot_eager") if jit else step
    return task(net(width=5), optimizer), step, "state"


def writing(path, into):
    """A step that writes into what this function returns of its arguments."""
    step, state, query = task(net(width=5))

    def writes(*args):
        returned = step(*args)
        into(*args).zero_()
        return returned

    return (step, state, query), writes, path


OVERWRITES = {
    "donate, fused": lambda: donating(torch.optim.AdamW),
    "donate, by its formula": lambda: donating(torch.optim.RMSprop),
    "jit(donate=0)": lambda: donating(torch.optim.SGD, jit=True),
    "a parameter": lambda: writing("state.params", lambda s, b, w: s.params["2.weight"]),
    "a moment": lambda: writing(
        "state.opt_state", lambda s, b, w: s.opt_state.slots["exp_avg"]["0.bias"]
    ),
    "its item": lambda: writing(r"item\[1\]\[0\]", lambda s, b, w: b[0]),
    "wrt": lambda: writing("wrt", lambda s, b, w: w),
}


@pytest.mark.parametrize("name", OVERWRITES)
def test_a_step_that_overwrites_what_it_takes_is_refused_whichever_it_is(name):
    (step, state, query), overwrites, path = OVERWRITES[name]()
    before = clone(state)

    @examples(5)
    @given(number=st.integers(1, 5), index=st.integers(0, 4), every=st.none() | st.integers(1, 5))
    def check(number, index, every):
        def either(state, item, weights):
            return (overwrites if item[0] == index else step)(state, item[1], weights)

        index = min(index, number - 1)
        items = list(enumerate(batches(number)))
        with pytest.raises(RuntimeError, match=f"step {index} overwrote {path}"):
            ps.vjp_through(either, state, items, query, wrt=torch.ones(N), every=every)
        assert same_bits(before, state)

    check()


def test_a_step_that_is_not_a_function_of_its_arguments_is_refused():
    calls = itertools.count()

    def step(x, item):
        return x * (1 + 0.1 * next(calls)), ()

    with pytest.raises(RuntimeError, match="made again, gave another state"):
        ps.vjp_through(step, torch.ones(2), [0, 0, 0], torch.Tensor.sum)


ENSEMBLE = ps.StepInfo(*[torch.zeros(2)] * 6, ())
BAD = {
    "an ensemble": ({"step": lambda x, item: (x, ENSEMBLE)}, ValueError, "found_inf is not a 0-d"),
    "an iterator": ({"items": iter([1.0])}, TypeError, "list_iterator"),
    "no items": ({"items": []}, ValueError, "items is empty"),
    "no rule": ({"rule": ps.DynamicScale}, TypeError, "rule is the class DynamicScale"),
    "a length of 0": ({"every": 0}, ValueError, "every"),
    "a step without info": ({"step": lambda x, item: x}, TypeError, "expected a pair"),
    "a jitted step that donates": (
        {"step": ps.jit(lambda x, item: (x, ()), donate=0)},
        *(ValueError, "donates"),
    ),
    "another state": ({"step": lambda x, i: (x[0], ())}, ValueError, "the step returned"),
    "another tree": ({"cotangent": {"a": 1.0}}, ValueError, "cotangent is .*RunGradient"),
    "another shape": ({"cotangent": torch.ones(3)}, ValueError, "expected a tensor of shape"),
    "no scalar": ({"cotangent": lambda x: x}, TypeError, "real 0-d tensor"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_argument_is_refused_by_name(name):
    changed, kind, match = BAD[name]
    arguments = {
        "step": lambda x, item: (x * item, ()),
        "state": torch.ones(2),
        "items": [2.0],
        "cotangent": torch.sum,
    }
    with pytest.raises(kind, match=match):
        ps.vjp_through(**{**arguments, **changed})


def test_a_traced_call_and_one_under_inference_mode_are_refused():
    def run(x):
        return ps.vjp_through(lambda x, i: (x, ()), x, [0], torch.sum).value

    with pytest.raises(ValueError, match="cannot be traced"):
        torch.func.grad(run)(torch.ones(2))
    with pytest.raises(ValueError, match="under torch"), torch.inference_mode():
        run(torch.ones(2))


def test_a_wrt_without_floating_leaves_is_passed_on():
    whole = torch.tensor(3)
    run = ps.vjp_through(lambda x, i, w: (x * w, ()), torch.ones(2), [0], torch.sum, wrt=whole)
    assert (run.value, run.wrt) == (6, ())


def test_runs_in_threads_with_their_own_generators_draw_as_runs_alone():
    rngs = [torch.Generator().manual_seed(seed).get_state() for seed in range(4)]
    tasks = [task(net(nn.Dropout(0.3)), rng=rng) for rng in rngs]

    def derive(parts):
        step, state, query = parts
        return ps.vjp_through(step, state, batches(5), query, wrt=torch.ones(N)).wrt

    alone = list(map(derive, tasks))
    with ThreadPoolExecutor(4) as pool:
        # not the bits: on some CPUs a product of matrices rounds otherwise in another thread
        torch.testing.assert_close(list(pool.map(derive, tasks)), alone, rtol=1e-5, atol=1e-6)


def test_a_bar_shows_the_steps_that_are_pulled_back(capfd):
    ps.vjp_through(lambda x, i: (x * i, ()), torch.ones(2), [1.0] * 4, torch.sum, progress=True)
    assert "4/4" in capfd.readouterr().err


def weight_sgd():
    def loss_fn(params, buffers, x):
        return (params["w"] * params["v"] * x).square().sum(), buffers

    state, step = started({"w": torch.ones(2), "v": torch.ones(2)}, loss_fn=loss_fn)
    return state, lambda state, x: step(state, [x])


def test_a_cotangent_is_a_tree_like_the_state_and_an_empty_tuple_is_zero():
    state, step = weight_sgd()
    zero = tree_map(lambda _: (), state)
    ones = zero._replace(params={"w": torch.ones(2), "v": ()})
    by_w = ps.vjp_through(step, state, [torch.ones(2)], ones)
    by_sum = ps.vjp_through(step, state, [torch.ones(2)], lambda final: final.params["w"].sum())
    assert same_bits(by_w.state.params, by_sum.state.params)
    with pytest.raises(ValueError, match="expected a tree like the final state"):
        ps.vjp_through(step, state, [torch.ones(2)], [1])


def test_what_a_skipped_step_moves_may_have_no_part_in_the_derivative():
    state, step = weight_sgd()

    def counted(pair, x):
        new, info = step(pair[0], x)
        return (new, {"a": pair[1]["a"] * 0.9}), info

    def run(cotangent):
        pair, bad = (state, {"a": torch.ones(2)}), torch.tensor([torch.inf, 1.0])
        return ps.vjp_through(counted, pair, [bad], cotangent).state[0].params["w"]

    assert run(lambda final: final[0].params["w"].sum()).equal(torch.ones(2))
    with pytest.raises(ValueError, match="step 0 was skipped, and moved"):
        run(lambda final: final[1]["a"].sum())
