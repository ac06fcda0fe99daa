"""The rules of the loss scale: transitions, bounds, and states of other rules."""

import math
import re
from fractions import Fraction
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from helpers import AsOnAnAccelerator, Dispatched, at, examples, legal_rules, stack, started
from hypothesis import given
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import purescale as ps
from purescale import interop
from purescale._loss_scale import rules
from purescale._torch import private
from purescale.testing import Untouched, assert_scale_rule, overflow_runs, same_bits, shares_memory

flags = overflow_runs()


def pattern(text):
    """`.` a clean step, `O` an overflow."""
    return [letter == "O" for letter in text]


def trace(rule, pattern, state=None):
    state = rule.init() if state is None else state
    scales = []
    for bad in pattern:
        state = rule.update(state, torch.tensor(bad))
        scales.append(state.scale.item())
    return scales


def is_power_of_two(value):
    return math.isfinite(value) and value > 0 and math.frexp(value)[0] == 0.5


# ---- transitions


@given(
    st.integers(-100, 100),
    flags,
    st.integers(1, 6),
    st.sampled_from([2.0, 4.0]),
    st.sampled_from([0.5, 0.25]),
    st.integers(0, 8),
)
def test_update_equals_torchs_operator_bit_for_bit(
    exponent, pattern, interval, growth, backoff, tracker
):
    rule = ps.DynamicScale(
        2.0**exponent, growth, backoff, interval, min_scale=2.0**-149, max_scale=2.0**127
    )
    state = rule.init()._replace(
        growth_tracker=torch.tensor(min(tracker, interval - 1), dtype=torch.int32)
    )
    scale, count = state.scale, state.growth_tracker
    for bad in pattern:
        expected, count = torch.ops.aten._amp_update_scale(
            scale, count, torch.tensor([float(bad)]), growth, backoff, interval
        )
        state = rule.update(state, torch.tensor(bad))
        if expected == 0:  # torch has lost its scale for good; the floor binds here
            assert state.scale == rule.min_scale
            return
        if scale * growth == math.inf and state.scale == rule.max_scale:
            return  # torch refuses to grow to inf; the ceiling binds here
        scale = expected
        assert same_bits((state.scale, state.growth_tracker), (scale, count))


OPERATOR = torch.ops.aten._amp_update_scale_.default


def by_formula(rule, state, bad):
    """The update of a torch that lacks the operator."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(private, "update_scale", False, raising=False)
        with AsOnAnAccelerator() as run:
            new = rule.update(state, torch.tensor(bad))
    assert OPERATOR not in run.ops
    return new


int32s = st.integers(-(2**31), 2**31 - 1)
counts = st.integers(-2, 6) | st.sampled_from([-(2**31), 2**31 - 2, 2**31 - 1]) | int32s
damaged_states = st.builds(
    at,
    st.floats(width=32, allow_subnormal=True) | st.integers(-149, 127).map(lambda n: 2.0**n),
    growth_tracker=counts,
    hysteresis_tracker=counts,
    consecutive_skips=counts,
)
powers = st.integers(-149, 127).map(lambda n: 2.0**n)
any_dynamic_scale = st.builds(
    lambda scales, *settings, **more: ps.DynamicScale(
        sorted(scales)[1], *settings, min_scale=min(scales), max_scale=max(scales), **more
    ),
    st.tuples(powers, powers, powers),
    st.integers(1, 127).map(lambda n: 2.0**n),
    st.integers(1, 149).map(lambda n: 2.0**-n),
    st.integers(1, 5) | st.sampled_from([2**31 - 2, 2**31 - 1]),
    hysteresis=st.integers(1, 2),
    refill=st.sampled_from(["growth", "clean"]),
)


class Reads(TorchFunctionMode):
    """Counts reads of a value on the host. It changes no metadata, as a mode of operators does."""

    reads = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.reads += func in (torch.Tensor.item, torch.Tensor.__bool__)
        return func(*args, **(kwargs or {}))


@examples(100)
@given(legal_rules | any_dynamic_scale, st.none() | damaged_states, flags)
def test_an_update_by_torchs_operator_and_on_the_host_is_the_formula_bit_for_bit(
    rule, state, pattern
):
    state = rule.init() if state is None else state
    takes_operator = rule.hysteresis == 1 and rule.max_scale * rule.growth_factor <= 2.0**127
    for bad in pattern:
        flag, expected = torch.tensor(bad), by_formula(rule, state, bad)
        before = [t.clone() for t in state]
        for mode in (AsOnAnAccelerator, Reads):
            with mode() as run:
                new = rule.update(state, flag)
            assert same_bits(new, expected)
            assert same_bits(list(state), before)
            assert not shares_memory(new, [*state, flag])
            assert len({t.data_ptr() for t in new}) == 4
            if mode is Reads:
                assert run.reads == 5
            else:
                assert (OPERATOR in run.ops) is takes_operator
        state = expected


def as_a_subclass(state, bad):
    class Own(torch.Tensor):
        pass

    return ps.ScalerState(*(t.as_subclass(Own) for t in state)), bad


def with_a_derivative(state, bad):
    return state._replace(scale=state.scale.clone().requires_grad_()), bad


TO_THE_FORMULA = {
    "a float64 scale": lambda s, bad: (s._replace(scale=s.scale.double()), bad),
    "an int64 count": lambda s, bad: (s._replace(growth_tracker=s.growth_tracker.long()), bad),
    "stacked without vmap": lambda s, bad: (stack([s, s]), bad),
    "a scale that requires a gradient": with_a_derivative,
    "a subclass of a tensor": as_a_subclass,
    "meta tensors": lambda s, bad: (ps.DynamicScale().init("meta"), bad.to("meta")),
}


@pytest.mark.parametrize("case", TO_THE_FORMULA)
def test_a_state_that_no_kernel_takes_goes_by_the_formula(case):
    rule = ps.DynamicScale(8.0)
    state, bad = TO_THE_FORMULA[case](rule.init(), torch.tensor(True))
    with Dispatched() as run:
        new = rule.update(state, bad)
    assert OPERATOR not in run.ops
    assert not run.reads
    assert new.scale.shape == state.scale.shape
    if not new.scale.is_meta:
        assert (new.scale == 4).all()


def test_a_flag_of_another_device_is_not_handed_to_a_kernel_that_takes_addresses():
    with FakeTensorMode(allow_non_fake_inputs=True):
        state, elsewhere = ps.DynamicScale().init("cuda"), ps.DynamicScale().init("cpu")
        places = ("cpu", "cuda", "cuda:1")
        flags = {where: torch.zeros((), dtype=torch.bool, device=where) for where in places}
        assert rules._takes_operator(state, flags["cuda"])
        assert not rules._takes_operator(state, flags["cpu"])
        assert not rules._takes_operator(state, flags["cuda:1"])
        apart = state._replace(growth_tracker=elsewhere.growth_tracker)
        assert not rules._takes_operator(apart, flags["cuda"])


@given(legal_rules, flags, st.sampled_from([None, 0.0, -0.0, math.inf, math.nan, -8.0]))
def test_the_scale_is_a_power_of_two_between_floor_and_ceiling_also_after_damage(
    rule, pattern, damage
):
    state = rule.init() if damage is None else at(damage)
    scales = trace(rule, pattern, state)
    assert damage is None or scales[:1] in ([], [rule.min_scale])
    for scale in scales:
        assert is_power_of_two(scale)
        assert rule.min_scale <= scale <= rule.max_scale


NARROW = {"min_scale": 2.0**-4, "max_scale": 2.0**4}
BY_GROWTH = {"growth_interval": 1000, "hysteresis": 2, "refill": "growth"}
BY_CLEAN, GROWS_SOON = BY_GROWTH | {"refill": "clean"}, BY_GROWTH | {"growth_interval": 2}
OF_THREE = ps.DynamicScale(16.0, hysteresis=3).init()
END = 2**31 - 1  # of an int32


def of(scale=8.0, **settings):
    return ps.DynamicScale(scale, **settings)


def counted(clean_steps):
    return at(8.0, growth_tracker=clean_steps, hysteresis_tracker=1)


TRACES = {  # the rule, the steps, the scale after each, and the state before the first
    "growth on exactly the interval": (of(growth_interval=3), "...O...", [8, 8, 16, 8, 8, 8, 16]),
    "an interval below the count": (of(growth_interval=3), ".", [16], counted(1000)),
    "a count at the end of its range": (of(growth_interval=END), ".", [16], counted(END)),
    "a damaged count": (of(growth_interval=1), ".", [16], at(8.0, growth_tracker=-5)),
    # field notes, Megatron H=2, DeepSpeed h=2 not consecutive and consecutive
    "Megatron": (of(16.0, **BY_GROWTH), "O.OO.O", [16, 16, 8, 4, 4, 2]),
    "DeepSpeed": (of(16.0, **BY_GROWTH), "O.O.OO", [16, 16, 8, 8, 4, 2]),
    "DeepSpeed, consecutive": (of(16.0, **BY_CLEAN), "O.O.OO", [16, 16, 16, 16, 16, 8]),
    "growth restores the tolerance": (of(16.0, **GROWS_SOON), "O..O", [16, 16, 32, 32]),
    "a hysteresis below the tolerance": (of(16.0), "OO", [8, 4], OF_THREE),
    "one that is not yet below it": (of(16.0, hysteresis=2), "OO", [16, 8], OF_THREE),
    "below the floor": (of(1.0, **NARROW), ".", [2.0**-4], at(2.0**-20)),
    "above the ceiling": (of(1.0, **NARROW), ".", [2.0**4], at(2.0**20)),
    "a damaged static scale": (ps.StaticScale(512.0), ".", [512], at(math.nan)),
}


@pytest.mark.parametrize("name", TRACES)
def test_a_run_has_the_scales_that_were_worked_out_by_hand(name):
    rule, steps, expected, *state = TRACES[name]
    assert trace(rule, pattern(steps), *state) == expected


def test_consecutive_skips_are_counted_and_forgotten():
    rule, state = ps.DynamicScale(), ps.DynamicScale().init()
    counts = []
    for bad in pattern("OO.O"):
        state = rule.update(state, torch.tensor(bad))
        counts.append(state.consecutive_skips.item())
    assert counts == [1, 2, 0, 1]


RULES = [
    ps.DynamicScale(),
    pytest.param(
        ps.DynamicScale(1.0, 4.0, 0.25, 3, 2.0**-149, 2.0**127, 3, "clean"), marks=pytest.mark.slow
    ),
    ps.StaticScale(512.0),
    ps.HeadroomScale(8.0, margin=0, window=3, min_scale=2.0**-111, max_scale=2.0**127),
    pytest.param(ps.HeadroomScale(), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_keeps_every_law(rule):
    assert_scale_rule(rule)


def test_rules_are_values():
    for one, same in (
        (ps.DynamicScale(), ps.DynamicScale(2**16)),
        (ps.StaticScale(2.0), ps.StaticScale(2)),
        (ps.HeadroomScale(), ps.HeadroomScale(2**16, margin=6)),
        (ps.SpikeGuard(), ps.SpikeGuard(sigma=6, warmup=20)),
    ):
        assert one == same
        assert hash(one) == hash(same)
    with pytest.raises(AttributeError):
        ps.DynamicScale().init_scale = 1.0


# ---- a state of another rule


STATES = {
    type(rule).__name__: (rule, rule.init())
    for rule in (
        *(ps.DynamicScale(), ps.StaticScale(4.0), ps.HeadroomScale(window=3)),
        *(interop.torch_amp.rule(), interop.deepspeed.rule(), interop.megatron.rule()),
    )
}


def told(rule):
    return (torch.tensor(False), *([torch.tensor(1.0)] if hasattr(rule, "takes_amax") else []))


@pytest.mark.parametrize("name", STATES)
def test_what_is_no_state_of_the_rule_is_refused_with_a_cure(name):
    rule, own = STATES[name]
    sgd = ps.from_torch(torch.optim.SGD)
    causes = rf"`state\.scaler`.*`{type(own).__name__}\(\*\*saved\)`"
    state = ps.init_train_state({"w": torch.ones(2)}, {}, sgd, rule)
    for wrong in (None, own._asdict(), state):
        with pytest.raises(TypeError, match=f"Likely cause: .*{causes}.*Fix: .*rule.init"):
            rule.update(wrong, *told(rule))
    for _, foreign in STATES.values():
        if type(foreign) is type(own):
            continue
        foreign = foreign._replace(scale=torch.tensor(32.0))
        words = rf"is {type(foreign).__name__}; expected a .*Fix: `scaler = (.*)`\.$"
        with pytest.raises(TypeError, match=words) as error:
            rule.update(foreign, *told(rule))
        cure = re.search(words, str(error.value)).group(1)
        carried = eval(cure, {"rule": rule, "scaler": foreign})
        assert type(carried) is type(own)
        assert carried.scale == 32.0
        assert type(rule.update(carried, *told(rule))) is type(own)


def test_a_training_with_another_rules_state_stops_before_anything_is_written():
    params, rule = {"w": torch.ones(2)}, ps.HeadroomScale()
    state, step = started(params, lambda p, x: (p["w"] * x).sum(), rule=rule)
    with Untouched(state), pytest.raises(TypeError, match="expected a ScalerState"):
        step(state, [torch.ones(2)], rule=ps.DynamicScale(), donate=True)


def test_a_foreign_state_is_refused_while_tracing():
    (rule, _), (_, foreign) = STATES["DynamicScale"], STATES["HeadroomScale"]
    words = "scaler is HeadroomState; expected a ScalerState"
    with pytest.raises(TypeError, match=words):
        torch.compile(rule.update, backend="eager")(foreign, torch.tensor(False))
    with pytest.raises(TypeError, match=words):
        torch.vmap(lambda s: rule.update(s, torch.tensor(False)))(stack([foreign, foreign]))


@pytest.mark.parametrize(
    "rule",
    [ps.DynamicScale(), ps.StaticScale(8.0), ps.NoScale(), ps.HeadroomScale()],
    ids=lambda rule: type(rule).__name__,
)
def test_a_job_that_overflows_for_ever_is_still_seen_by_check_scaler(rule):
    state = rule.init()
    state = state._replace(consecutive_skips=torch.tensor(2**31 - 1, dtype=torch.int32))
    for _ in range(2):
        given = (torch.tensor(1.0),) if rules.takes_amax(rule) else ()
        state = rule.update(state, torch.tensor(True), *given)
        assert state.consecutive_skips == 2**31 - 1
        with pytest.raises(FloatingPointError):
            ps.check_scaler(state, rule, max_skips=100)


# ---- bad input


POWERS = ("init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale")
NO_POWERS = (0.0, -2.0, -2, math.nan, math.inf, 3.0, 3, Fraction(1, 3), 1000, 2.0**128, 2.0**-150)


@pytest.mark.parametrize(
    ("rule", "name"), [*((ps.DynamicScale, name) for name in POWERS), (ps.StaticScale, "scale")]
)
def test_a_setting_that_is_no_power_of_two_is_refused_by_name_whatever_its_type(rule, name):
    for value in NO_POWERS:
        with pytest.raises(ValueError, match=rf"{name} must be a power of two.*Fix: {name}="):
            rule(**{name: value})


IN_ORDER = "min_scale <= init_scale <= max_scale"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"growth_interval": 2**31}, "growth_interval must be from 1"),
        ({"growth_factor": 1.0}, "growth_factor must be above 1"),
        ({"backoff_factor": 1.0}, "backoff_factor must lie between 0 and 1"),
        ({"hysteresis": 0}, "hysteresis must be from 1"),
        ({"min_scale": 4.0, "init_scale": 8.0, "max_scale": 2.0}, IN_ORDER),
        (
            {"init_scale": 2.0**30},
            rf"{IN_ORDER} must hold, got .*Fix: move the bound that is crossed",
        ),
        ({"refill": "sometimes"}, "refill must be 'growth'"),
    ],
)
def test_settings_that_contradict_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ps.DynamicScale(**settings)


@pytest.mark.parametrize("scale", [2.0**-149, 2.0**127])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex32])
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_complex_zeros_unscale_to_zeros_at_every_scale(scale, dtype):
    unscaled, found_inf = ps.unscale_and_check(at(scale), [torch.zeros(2, dtype=dtype)])
    assert unscaled[0].tolist() == [0, 0]
    assert unscaled[0].dtype is torch.complex64
    assert not found_inf


def test_a_state_with_the_fields_of_a_rule_and_more_is_one_of_the_rule():
    class Wider(NamedTuple):
        scale: torch.Tensor
        growth_tracker: torch.Tensor
        hysteresis_tracker: torch.Tensor
        consecutive_skips: torch.Tensor
        other: int = 0

    rule = ps.DynamicScale()
    state, bad = rule.init(), torch.tensor(True)
    assert same_bits(rule.update(Wider(*state), bad), rule.update(state, bad))


def test_an_update_whose_signature_python_does_not_know_is_taken():
    class Rule(ps.DynamicScale):
        update = max

    assert not rules.checked_rule_traits(Rule()).takes_amax
