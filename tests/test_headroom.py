"""A scale that looks ahead, what it looks at, and how a step hands it over."""

import dataclasses
import functools
import math
import unittest.mock
from fractions import Fraction
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from helpers import any32, assert_close, examples, in_processes, same_bits, tensors, trees
from hypothesis import given

import purescale as ps
from purescale._loss_scale import headroom
from purescale.testing import assert_pure, assert_vmap_equals_loop

TOP = 65504
ZEROS = 3  # in a row, where a test has no time for 2000
patched = functools.partial(unittest.mock.patch.multiple, headroom)
SGD = ps.from_torch(torch.optim.SGD, lr=0.1)

rules = st.builds(
    lambda init, margin, window, low, high: ps.HeadroomScale(
        init_scale=2.0**init,
        margin=margin,
        window=window,
        min_scale=2.0 ** (init - low),
        max_scale=2.0 ** (init + high),
    ),
    st.integers(-20, 20),
    st.integers(0, 12) | st.integers(0, 39),
    st.integers(1, 6),
    st.integers(0, 20) | st.just(91),
    st.integers(0, 20) | st.just(107),
)
edges = st.builds(  # powers of two, and where one more bit is borrowed
    lambda number, exponent: number * 2.0**exponent,
    st.sampled_from([2.0**-16, 2.0**16, 65504.0, 65504.0 + 2**-8]),
    st.integers(-133, 111),
)
amaxes = any32.map(abs) | st.just(0.0) | edges
steps = st.lists(st.tuples(st.booleans(), amaxes), min_size=1, max_size=30)


def run(rule, series, state=None):
    states = [rule.init() if state is None else state]
    for bad, amax in series:
        states.append(rule.update(states[-1], torch.tensor(bad), torch.tensor(amax)))
    return states


def clean(rule, *amaxes):
    return run(rule, [(False, amax) for amax in amaxes])[-1]


def updated(rule, state, bad, amax):
    amax = [torch.tensor(amax)] if isinstance(rule, ps.HeadroomScale) else []
    return rule.update(state, torch.tensor(bad), *amax)


def by_hand(rule, scale, history, skips, zeros, bad, amax):
    """The definition, in exact arithmetic."""
    skips = skips + 1 if bad or not amax < math.inf else 0
    bad = bad or (skips > 0 and skips % 4 == 0)
    seen = 2 * Fraction(TOP) / Fraction(scale) if bad else amax
    zeros += seen == 0
    if bad or (math.isfinite(amax) and amax > 0):
        history, zeros = [*history[1:], Fraction(seen)], 0
    elif amax == 0 and (scale < 1 or zeros == ZEROS):
        history, scale, zeros = [past / 2 for past in history], scale * 2, 0
    if max(history) > 0:
        exponent = -400
        while Fraction(2) ** (exponent + 1) <= Fraction(TOP) / max(history):
            exponent += 1
        scale = Fraction(2) ** (exponent - rule.margin)
    scale = min(max(Fraction(scale), Fraction(rule.min_scale)), Fraction(rule.max_scale))
    return scale, history, skips, zeros


# ---- the rule


@given(rules, steps)
def test_update_equals_its_definition_in_exact_arithmetic(rule, series):
    scale, history, skips, zeros = rule.init_scale, [0] * rule.window, 0, 0
    with patched(_MOST_ZEROS=ZEROS):
        states = run(rule, series)[1:]
    for (bad, amax), state in zip(series, states, strict=True):
        scale, history, skips, zeros = by_hand(rule, scale, history, skips, zeros, bad, amax)
        assert state.scale.item() == scale
        assert state.scale.dtype is torch.float32
        assert state.consecutive_skips == skips
        assert state.consecutive_zeros == zeros
        torch.testing.assert_close(  # halved, float32's smallest rounds
            state.amax_history, torch.tensor(list(map(float, history))), rtol=2e-7, atol=2e-45
        )


@examples(20)
@given(
    rules,
    steps,
    st.lists(st.tuples(st.integers(0, 40), st.integers(-60, 60)), min_size=1, max_size=5),
)
def test_no_run_of_losses_and_overflows_is_skipped_for_ever(rule, before, batches):
    """Each batch has a loss that is finite up to a scale of its own, and gradients that overflow
    above another. At the lowest scale every batch is fine, so in a row at most four steps are
    skipped for each `margin + 1` bits above it.
    """
    state, row = run(rule, before)[-1], 0
    bits = math.log2(rule.max_scale / rule.min_scale)
    most = 4 * math.ceil(bits / (rule.margin + 1))
    for index in range(2 * most + 8):
        above, exponent = batches[index % len(batches)]
        scale, amax = state.scale.item(), min(2.0**exponent, TOP / rule.min_scale)
        is_finite = scale <= rule.min_scale * 2.0**above
        overflows = is_finite and amax * scale > TOP
        row = row + 1 if overflows or not is_finite else 0
        assert row <= most
        state = updated(rule, state, overflows, amax if is_finite else math.nan)


def test_2000_zeros_in_a_row_raise_a_scale_of_1_and_above_by_a_bit():
    rule = ps.HeadroomScale(window=4)
    for state in (rule.init(), clean(rule, 3.0)):
        later = state._replace(consecutive_zeros=torch.tensor(1998, dtype=torch.int32))
        scales = [(s.scale / state.scale).item() for s in run(rule, [(False, 0.0)] * 3, later)]
        assert scales == [1, 1, 2, 2]


@pytest.mark.parametrize("scale", [0.0, -0.0, math.inf, math.nan, -8.0, 2.0**-140])
@pytest.mark.parametrize("bad", [True, False])
def test_a_damaged_state_comes_back(scale, bad):
    rule = ps.HeadroomScale(window=3)
    for history in (0.0, 1.0, math.nan, math.inf, -1.0):
        damaged = ps.HeadroomState(
            torch.tensor(scale), torch.tensor([history] * 3), *torch.zeros(2, dtype=torch.int32)
        )
        for amax in (0.0, 1.0):
            state = run(rule, [(bad, amax)], damaged)[-1]
            assert math.frexp(state.scale.item())[0] == 0.5
            assert rule.min_scale <= state.scale <= rule.max_scale
        fresh = run(rule, [(False, 1.0)] * 3, state)[-1]
        assert same_bits(fresh, clean(rule, 1.0, 1.0, 1.0))


def test_the_state_of_a_rule_is_off_the_graph_of_amax():
    rule, amax = ps.HeadroomScale(window=3), torch.tensor(2.0, requires_grad=True)
    for value in (amax, amax * 3):
        after = rule.update(rule.init(), torch.tensor(False), value)
        assert not any(leaf.requires_grad for leaf in after)


def test_an_amax_of_any_dtype_or_a_number_will_do():
    rule = ps.HeadroomScale()
    expected = clean(rule, 3.0)
    for amax in (3, 3.0, *(torch.tensor(3.0, dtype=d) for d in (torch.float16, torch.float64))):
        assert same_bits(rule.update(rule.init(), torch.tensor(False), amax), expected)
    beyond = rule.update(rule.init(), False, torch.tensor(1e300, dtype=torch.float64))
    assert beyond.scale == rule.min_scale
    assert same_bits(rule.update(rule.init(), False, 1e300), beyond)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"margin": -1}, ValueError, "margin must be from 0 to 39, got -1"),
        ({"window": 0}, ValueError, "window must be from 1"),
        ({"init_scale": 3.0}, ValueError, "init_scale must be a power of two"),
        ({"max_scale": 2.0}, ValueError, r"2\*\*-111 <= min_scale <= init_scale <= max_scale.*Fix"),
        ({"min_scale": 2.0**-112}, ValueError, "-111 <= min_scale.*Fix: move the bound that is cr"),
        *(
            (settings, TypeError, "must be a whole number")
            for settings in ({"margin": 1.5}, {"window": True})
        ),
    ],
)
def test_settings_out_of_range_are_refused(settings, error, words):
    with pytest.raises(error, match=words):
        ps.HeadroomScale(**settings)


ONE = "expected one real number, 0-d. Fix"


@pytest.mark.parametrize(
    ("amax", "window", "error", "words"),
    [
        ((), 64, TypeError, r"update needs amax.*Fix: .*grad_amax\(grads\)"),
        ((torch.ones(1),), 64, ValueError, ONE),
        ((torch.tensor(1),), 64, ValueError, ONE),
        ((torch.tensor(1j),), 64, ValueError, ONE),
        ((1.0,), 16, ValueError, r"has shape \(64,\).*window=16.*Fix"),
    ],
)
def test_what_a_rule_cannot_learn_from_is_refused(amax, window, error, words):
    rule, state = ps.HeadroomScale(window=window), ps.HeadroomScale().init()
    with pytest.raises(error, match=words):
        rule.update(state, torch.tensor(False), *amax)


# ---- grad_amax


def oracle(grads):
    values = [abs(x) for t in tensors(grads) for x in t.double().reshape(-1).tolist()]
    if any(map(math.isnan, values)):
        return math.nan
    return max(values, default=0.0)


@given(trees(any32))
def test_grad_amax_is_the_largest_magnitude(grads):
    amax = assert_pure(ps.grad_amax, grads)
    assert amax.shape == ()
    assert amax.dtype is torch.float32
    expected = torch.tensor(oracle(grads)).float()
    assert same_bits(amax, expected) or (amax.isnan() and expected.isnan())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 40])
@pytest.mark.parametrize("size", [1, 70000])
def test_grad_amax_finds_one_element_anywhere(dtype, count, size):
    grads = [torch.randn(size).to(dtype) for _ in range(count)]
    for value in (-300.0, math.inf, -math.inf, math.nan):
        grads[count // 2][size // 3] = value
        amax = ps.grad_amax(grads)
        assert amax.dtype is torch.float32
        assert amax.isnan() if math.isnan(value) else amax == abs(value)


def test_grad_amax_of_kinds_of_leaves():
    assert ps.grad_amax({}) == 0
    assert ps.grad_amax({"a": None, "b": torch.empty(0)}) == 0
    assert ps.grad_amax([torch.tensor(-2.0), None, torch.tensor(3.0, dtype=torch.float16)]) == 3
    assert ps.grad_amax([torch.tensor([3 - 4j])]) == 4
    assert ps.grad_amax([torch.tensor([1e300], dtype=torch.float64)]).isfinite()
    assert ps.grad_amax([torch.tensor([math.inf], dtype=torch.float64)]) == math.inf
    twice = torch.sparse_coo_tensor([[1, 1, 0]], [3.0, 3.0, -5.0], (4,), check_invariants=True)
    assert ps.grad_amax([twice]) == 6
    assert ps.grad_amax([torch.arange(-3.0, 3.0)[::2].neg(), torch.ones(4, 4).t()]) == 3
    with pytest.raises(TypeError, match=r"grads\['n'\] has dtype torch.int64"):
        ps.grad_amax({"n": torch.tensor(1)})


def test_grad_amax_under_vmap_and_grad():
    grads = {"a": torch.randn(3, 5), "b": torch.randn(3, 2, 2)}
    assert_vmap_equals_loop(ps.grad_amax, grads)
    slope = torch.func.grad(lambda x: ps.grad_amax([x]))(torch.tensor([1.0, -3.0]))
    assert same_bits(slope, torch.tensor([0.0, -1.0]))


# ---- what a step hands over


def linear(params, buffers, x):
    return (params["w"].half() * x.half()).float().sum(), buffers


def start(rule, optimizer=SGD):
    return ps.init_train_state({"w": torch.zeros(4)}, {}, optimizer, rule)


def step(state, microbatches, rule, optimizer=SGD, **settings):
    return ps.train_step(
        state, microbatches, loss_fn=linear, optimizer=optimizer, rule=rule, **settings
    )


class Told(NamedTuple):
    scale: torch.Tensor
    amax: torch.Tensor
    bad: torch.Tensor


class Remembers:
    """A rule of one's own that keeps what it was told."""

    takes_amax = True

    def __init__(self, scale=4.0):
        self.scale = scale

    def init(self, device=None):
        return Told(torch.tensor(self.scale), torch.tensor(-1.0), torch.tensor(False))

    def update(self, scaler, found_inf, amax):
        return Told(scaler.scale.clone(), amax.clone(), found_inf.clone())


GRADIENT = torch.tensor([1.0, -3.0, 0.5, 2.0])
LARGE = GRADIENT * 2.0**14  # overflows float16 at a scale of 4, while the loss is finite


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_norm": 0.1, "clip_value": 0.1},
        {"on_nonfinite": "drop_microbatch", "max_norm": 0.1},
        {"max_norm": 0.1, "norm_type": math.inf},
        {"max_retries": 2},
        {"donate": True},
        {"weight_fn": lambda x: torch.tensor(2.0)},
    ],
)
@pytest.mark.parametrize(
    ("optimizer", "parts"), [(SGD, 1), (ps.from_torch(torch.optim.RMSprop, lr=0.1), 4)]
)
def test_a_rule_that_takes_amax_gets_that_of_the_averaged_gradient_before_clipping(
    settings, optimizer, parts
):
    rule = Remembers()
    microbatches = [GRADIENT * (1 + index) for index in range(parts)]
    state, info = step(start(rule, optimizer), microbatches, rule, optimizer, **settings)
    expected = torch.tensor(3.0 * (1 + parts) / 2)
    assert_close((info.grad_amax, state.scaler.amax), (expected, expected))
    assert not state.scaler.bad
    if "max_norm" in settings and settings.get("norm_type"):
        assert_close(info.grad_norm, expected)


# [microbatches], weights, what is dropped, and what a rule is told: bad, amax
LOST = torch.full((4,), math.nan)
WINDOWS = {
    "the loss is NaN": ([LOST], None, "drop_window", False, math.nan),
    "the gradient is": ([LARGE], None, "drop_window", True, None),
    "one gradient of two": ([LARGE, GRADIENT], None, "drop_window", True, None),
    "one of each": ([LARGE, LOST], None, "drop_window", False, math.nan),
    "a loss without a weight": ([GRADIENT, LOST], [1.0, 0.0], "drop_window", False, 3.0),
    "a loss with a weight": ([GRADIENT, LOST], [1.0, 0.5], "drop_window", False, math.nan),
    "a gradient with a weight": ([GRADIENT, LARGE], [1.0, 0.5], "drop_window", True, None),
    "a loss alone, dropped": ([LOST], None, "drop_microbatch", False, math.nan),
    "a loss dropped": ([GRADIENT, LOST], None, "drop_microbatch", False, 3.0),
    "a gradient dropped": ([GRADIENT, LARGE], None, "drop_microbatch", True, None),
    "one of each dropped": ([GRADIENT, LARGE, LOST], None, "drop_microbatch", True, None),
    "a loss with a weight, dropped": ([GRADIENT, LOST], [1.0, 2.0], "drop_microbatch", False, 3.0),
}


def weighted(microbatches, weights):
    """The setting by which these microbatches have these weights."""
    if weights is None:
        return {}
    weight_of = dict(zip(map(id, microbatches), weights, strict=True))
    return {"weight_fn": lambda x: weight_of[id(x)]}


@pytest.mark.parametrize("name", WINDOWS)
def test_a_loss_that_is_not_finite_is_no_overflow_to_a_rule_that_takes_amax_alone(name):
    microbatches, weights, on_nonfinite, bad, amax = WINDOWS[name]
    for retries, kind in ((0, list), (1, torch.tensor)):
        rule, settings = Remembers(), {"max_retries": retries, "on_nonfinite": on_nonfinite}
        settings |= weighted(microbatches, kind(weights) if weights else None)
        state, info = step(start(rule), microbatches, rule, **settings)
        assert state.scaler.bad == bad
        if not bad:
            assert same_bits(state.scaler.amax, torch.tensor(amax))
        good = on_nonfinite == "drop_microbatch" and any(x is GRADIENT for x in microbatches)
        assert info.found_inf == (not good and name != "a loss without a weight")
        assert info.grad_amax.isfinite() == ~info.found_inf
    rule, settings = ps.DynamicScale(init_scale=4.0), weighted(microbatches, weights)
    state, _ = step(start(rule), microbatches, rule, on_nonfinite=on_nonfinite, **settings)
    assert state.scaler.scale == (4.0 if name == "a loss without a weight" else 2.0)


def test_a_window_of_weight_0_tells_a_rule_nothing():
    rule = ps.HeadroomScale(window=4)
    first = start(rule)
    state, info = step(first, [GRADIENT], rule, weight_fn=lambda x: 0.0)
    assert same_bits(state.scaler, first.scaler)
    assert info.found_inf


def test_a_retry_is_an_overflow_in_the_history_and_then_what_the_last_try_saw():
    rule = ps.HeadroomScale(init_scale=2.0**24, window=4)
    state, info = step(start(rule), [GRADIENT], rule, max_retries=5)
    assert info.retries == 2
    assert not info.found_inf
    assert info.scale == 2.0**10
    history = [0, 2 * TOP / 2.0**24, 2 * TOP / 2.0**17, 3]
    assert_close(state.scaler.amax_history, torch.tensor(history))
    by_steps, told = start(rule), None
    while told is None or told.found_inf:
        by_steps, told = step(by_steps, [GRADIENT], rule)
    assert same_bits(by_steps, state)


@pytest.mark.parametrize("rule", [ps.HeadroomScale(), ps.DynamicScale(growth_interval=99)])
def test_check_scaler_speaks_up_at_a_scale_that_fell_to_its_floor_without_an_overflow(rule):
    state = rule.init()
    for _ in range(45):
        state = updated(rule, state, True, math.inf)
    state = updated(rule, state, False, 2.0**40)
    assert state.scale == rule.min_scale
    assert state.consecutive_skips == 0
    with pytest.raises(FloatingPointError, match=r"is at the smallest.*\(min_scale\).*Fix"):
        ps.check_scaler(state, rule)
    at_one = dataclasses.replace(rule, min_scale=1.0)
    ps.check_scaler(state._replace(scale=torch.tensor(1.0)), at_one)  # which loses nothing
    lowest = dataclasses.replace(rule, init_scale=rule.min_scale)
    ps.check_scaler(lowest.init(), lowest)


NOT_AS_IT_SAYS = [
    ({"update": lambda self, scaler, found_inf: scaler}, "scaler, found_inf, amax"),
    ({"takes_amax": False}, "scaler, found_inf"),
]


@pytest.mark.parametrize(("own", "takes"), NOT_AS_IT_SAYS)
def test_a_rule_whose_update_does_not_take_what_it_says_is_refused(own, takes):
    rule = type("Own", (Remembers,), own)()
    words = rf"Own\.update cannot be called as update\({takes}\)"
    with pytest.raises(TypeError, match=words + ".*Fix: `takes_amax = True` in the class"):
        start(rule)
    with pytest.raises(TypeError, match=words):
        step(start(Remembers()), [GRADIENT], rule)
    with pytest.raises(TypeError, match=words):
        ps.simulate.simulate(rule, [True])


# ---- over ranks

LONE = {  # what each of two ranks has, what is dropped, and what a rule is told on both: bad, amax
    "a loss": (([GRADIENT], [LOST]), "drop_window", False, math.nan),
    "a gradient": (([GRADIENT], [LARGE]), "drop_window", True, None),
    "one of each": (([LARGE], [LOST]), "drop_window", False, math.nan),
    "a loss dropped": (([GRADIENT], [LOST]), "drop_microbatch", False, 3.0),
    "a gradient dropped": (([GRADIENT, LARGE], [LOST]), "drop_microbatch", True, None),
    "all losses": (([LOST], [LOST, LOST]), "drop_microbatch", False, math.nan),
}


def _told_on_each_rank(rank):
    for name, (shares, on_nonfinite, bad, amax) in LONE.items():
        for retries in (0, 1):
            rule = Remembers()
            settings = {"on_nonfinite": on_nonfinite, "max_retries": retries}
            state, _ = step(start(rule), shares[rank], rule, group=dist.group.WORLD, **settings)
            assert state.scaler.bad == bad, name
            assert bad or same_bits(state.scaler.amax, torch.tensor(amax)), name


@pytest.mark.slow
def test_every_rank_is_told_the_same_of_a_loss_that_is_not_finite_on_one():
    in_processes(_told_on_each_rank)
