"""The rules of the loss scale: transitions, bounds, and states of other rules."""

import collections
import math
import re
import types
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
import torch
import torch.utils._pytree as pytree
from helpers import (
    AsOnAnAccelerator,
    Dispatched,
    Untouched,
    at,
    examples,
    legal_rules,
    same_bits,
    shares_memory,
    stack,
)
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

import purescale as ps
from purescale import interop
from purescale._loss_scale import rules
from purescale._torch import private, tracing
from purescale.testing import (
    assert_pure,
    assert_scale_rule,
    assert_sync_free,
    assert_vmap_equals_loop,
    overflow_runs,
    scale_rules,
    scaler_states,
)

flags = overflow_runs()


def trace(rule, pattern, state=None):
    state = rule.init() if state is None else state
    scales = []
    for bad in pattern:
        state = rule.update(state, torch.tensor(bad))
        scales.append(state.scale.item())
    return scales


def pattern(text):
    """`.` a clean step, `O` an overflow."""
    return [letter == "O" for letter in text]


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


def updated_as_by_the_formula(mode, rule, state, bad):
    """Return the update within `mode`, and what ran, if it is a formula's, and pure."""
    flag, before = torch.tensor(bad), [t.clone() for t in state]
    with mode() as run:
        new = rule.update(state, flag)
    assert same_bits(new, by_formula(rule, state, bad))
    assert same_bits(list(state), before)
    assert not shares_memory(new, [*state, flag])
    assert len({t.data_ptr() for t in new}) == 4
    return new, run


@examples(200)
@given(legal_rules | any_dynamic_scale, st.none() | damaged_states, flags)
def test_an_update_by_torchs_operator_is_the_formula_bit_for_bit(rule, state, pattern):
    state = rule.init() if state is None else state
    reaches_inf = rule.max_scale * rule.growth_factor > 2.0**127
    for bad in pattern:
        state, run = updated_as_by_the_formula(AsOnAnAccelerator, rule, state, bad)
        assert (OPERATOR in run.ops) is (rule.hysteresis == 1 and not reaches_inf)


class Reads(TorchFunctionMode):
    """Counts reads of a value on the host. It changes no metadata, as a mode of operators does."""

    def __init__(self):
        super().__init__()
        self.reads = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.reads += func in (torch.Tensor.item, torch.Tensor.__bool__)
        return func(*args, **(kwargs or {}))


@examples(200)
@given(legal_rules | any_dynamic_scale, st.none() | damaged_states, flags)
def test_an_update_on_the_host_is_the_formula_bit_for_bit(rule, state, pattern):
    state = rule.init() if state is None else state
    for bad in pattern:
        state, run = updated_as_by_the_formula(Reads, rule, state, bad)
        assert run.reads == 5


def test_lowering_the_hysteresis_below_the_tolerance_backs_off_at_once():
    state = ps.DynamicScale(16.0, hysteresis=3).init()
    assert trace(ps.DynamicScale(16.0), pattern("OO"), state) == [8, 4]
    assert trace(ps.DynamicScale(16.0, hysteresis=2), pattern("OO"), state) == [16, 8]


@pytest.mark.parametrize("refill", ["growth", "clean"])
def test_an_update_is_twelve_operators_and_no_read_on_an_accelerator(refill):
    rule = ps.DynamicScale(refill=refill)
    state, bad = rule.init(), torch.tensor(False)
    with AsOnAnAccelerator() as run:
        rule.update(state, bad)
    assert len(run.ops) <= 12
    assert OPERATOR in run.ops
    assert not run.reads
    with FakeTensorMode():
        state, bad = rule.init("cuda"), torch.zeros((), dtype=torch.bool, device="cuda")
        with Dispatched() as run:  # where a read raises
            new = rule.update(state, bad)
        assert {t.device.type for t in new} == {"cuda"}
    launches = [op for op in run.ops if op.namespace != "prim"]  # `.device` of a subclass
    assert len(launches) <= 12
    assert OPERATOR in launches


def as_a_subclass(state, bad):
    class Own(torch.Tensor):
        pass

    return ps.ScalerState(*(t.as_subclass(Own) for t in state)), bad


TO_THE_FORMULA = {
    "a float64 scale": lambda s, bad: (s._replace(scale=s.scale.double()), bad),
    "an int64 count": lambda s, bad: (s._replace(growth_tracker=s.growth_tracker.long()), bad),
    "stacked without vmap": lambda s, bad: (stack([s, s]), bad),
    "a scale that requires a gradient": lambda s, bad: (
        s._replace(scale=s.scale.clone().requires_grad_()),
        bad,
    ),
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


@pytest.mark.parametrize("bad", [False, True])
def test_another_record_with_the_fields_of_a_state_is_updated_as_the_state(bad):
    rule = ps.DynamicScale(8.0, growth_interval=1)
    state, flag = rule.init(), torch.tensor(bad)
    record = types.SimpleNamespace(**state._asdict(), more=3)
    assert same_bits(rule.update(record, flag), rule.update(state, flag))


def test_a_flag_of_another_device_is_not_handed_to_a_kernel_that_takes_addresses():
    with FakeTensorMode(allow_non_fake_inputs=True):
        state, elsewhere = ps.DynamicScale().init("cuda"), ps.DynamicScale().init("cpu")
        flags = {
            where: torch.zeros((), dtype=torch.bool, device=where)
            for where in ("cpu", "cuda", "cuda:1")
        }
        assert rules._takes_operator(state, flags["cuda"])
        assert not rules._takes_operator(state, flags["cpu"])
        assert not rules._takes_operator(state, flags["cuda:1"])
        apart = state._replace(growth_tracker=elsewhere.growth_tracker)
        assert not rules._takes_operator(apart, flags["cuda"])


def test_a_rule_whose_settings_change_decides_anew():
    class Own(ps.DynamicScale):
        def __getattribute__(self, name):
            return 2 if name == "growth_interval" else super().__getattribute__(name)

    for mode in (Dispatched, AsOnAnAccelerator):
        rule, state = Own(8.0), Own(8.0).init()
        for expected in (8, 16):
            with mode():
                state = rule.update(state, torch.tensor(False))
            assert state.scale == expected


def recorded(update, state, bad):
    with tracing.recording():
        return update(state, bad)


def mapped(update, state, bad):
    return torch.vmap(lambda s: update(s, bad))(stack([state, state]))


def in_forward_mode(update, state, bad):
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(state.scale, torch.tensor(1.0))
        new = update(state._replace(scale=dual), bad)
        assert torch.autograd.forward_ad.unpack_dual(new.scale).tangent == 0.5
    return new


def differentiated(update, state, bad):
    scale = state.scale
    slope = torch.func.grad(lambda scale: update(state._replace(scale=scale), bad).scale)(scale)
    assert slope == 0.5
    return state


@pytest.mark.parametrize("where", [recorded, mapped, in_forward_mode, differentiated])
def test_a_transform_goes_by_the_formula_also_after_an_eager_update(where):
    rule, bad = ps.DynamicScale(8.0), torch.tensor(True)
    rule.update(rule.init(), bad)
    with Dispatched() as run:
        where(rule.update, rule.init(), bad)
    assert OPERATOR not in run.ops


def test_a_derivative_by_backward_goes_through_the_scale():
    rule, scale = ps.DynamicScale(8.0), torch.tensor(8.0, requires_grad=True)
    state = rule.init()._replace(scale=scale)
    for bad in (True, True):
        state = rule.update(state, torch.tensor(bad))
    assert torch.autograd.grad(state.scale, scale)[0] == 0.25


@pytest.mark.parametrize("refill", ["growth", "clean"])
def test_a_compiled_update_is_one_graph_of_the_formula(refill):
    rule, graphs = ps.DynamicScale(8.0, growth_interval=2, refill=refill), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(rule.update, fullgraph=True, backend=backend)
    state = rule.init()
    for bad in (False, False, True):
        flag = torch.tensor(bad)
        new = rule.update(state, flag)
        assert same_bits(compiled(state, flag), new)
        state = new
    assert len(graphs) == 1
    assert "_amp_update_scale" not in graphs[0].code


class AgainstGradScaler(RuleBasedStateMachine):
    """Random runs of a real GradScaler and of ours over the same gradients, parameters included."""

    @initialize(
        exponent=st.integers(0, 20),
        interval=st.integers(1, 4),
        momentum=st.sampled_from([0.0, 0.5]),
    )
    def start(self, exponent, interval, momentum):
        self.rule = ps.DynamicScale(
            2.0**exponent, growth_interval=interval, min_scale=2.0**-120, max_scale=2.0**100
        )
        self.optimizer = ps.from_torch(torch.optim.SGD, lr=0.5, momentum=momentum, foreach=False)
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.params = {"w": torch.ones(3)}
        self.opt_state, self.state = self.optimizer.init(self.params), self.rule.init()
        self.torchs = torch.optim.SGD([self.weight], lr=0.5, momentum=momentum, foreach=False)
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=2.0**exponent, growth_interval=interval
        )

    @rule(
        grad=st.lists(st.floats(-4, 4, width=32), min_size=3, max_size=3),
        bad=st.sampled_from([None, math.inf, -math.inf, math.nan]),
    )
    def step(self, grad, bad):
        grad = torch.tensor([*grad[:2], grad[2] if bad is None else bad])
        self.torchs.zero_grad()
        self.scaler.scale((self.weight * grad).sum()).backward()
        self.scaler.step(self.torchs)
        self.scaler.update()

        def scaled(params):
            return ps.scale_loss(self.state, (params["w"] * grad).sum())

        out = ps.unscale_and_step(
            self.optimizer,
            self.state,
            self.params,
            torch.func.grad(scaled)(self.params),
            self.opt_state,
        )
        self.params, self.opt_state = out.params, out.opt_state
        self.state = self.rule.update(self.state, out.found_inf)

    @invariant()
    def same_scale_count_and_parameters(self):
        assert self.state.scale.item() == self.scaler.get_scale()
        assert self.state.growth_tracker.item() == self.scaler._get_growth_tracker()
        assert torch.equal(self.params["w"], self.weight.detach())


TestAgainstGradScaler = AgainstGradScaler.TestCase
TestAgainstGradScaler.settings = examples(20)


@given(legal_rules, flags)
def test_the_scale_stays_a_power_of_two_between_floor_and_ceiling(rule, pattern):
    for scale in trace(rule, pattern):
        assert is_power_of_two(scale)
        assert rule.min_scale <= scale <= rule.max_scale


@given(
    legal_rules, st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, -8.0]), st.booleans()
)
def test_a_damaged_scale_is_repaired_to_the_floor(rule, scale, bad):
    assert rule.update(at(scale), torch.tensor(bad)).scale == rule.min_scale


@pytest.mark.parametrize(("scale", "expected"), [(2.0**-20, 2.0**-4), (2.0**20, 2.0**4)])
def test_a_restored_scale_outside_of_the_bounds_is_brought_back(scale, expected):
    rule = ps.DynamicScale(1.0, min_scale=2.0**-4, max_scale=2.0**4)
    assert rule.update(at(scale), torch.tensor(False)).scale == expected


def test_growth_comes_on_exactly_the_interval():
    assert trace(ps.DynamicScale(8.0, growth_interval=3), pattern("...O......")) == [
        8,
        8,
        16,
        8,
        8,
        8,
        16,
        16,
        16,
        32,
    ]


def test_lowering_the_interval_below_the_count_still_grows():
    assert trace(
        ps.DynamicScale(8.0, growth_interval=3),
        pattern("."),
        at(8.0, growth_tracker=1000, hysteresis_tracker=1),
    ) == [16]


def test_hysteresis_refilled_by_growth_is_megatrons():
    # field notes, Megatron H=2: O.OO.O -> 16,16,8,4,4,2
    rule = ps.DynamicScale(16.0, growth_interval=1000, hysteresis=2, refill="growth")
    assert trace(rule, pattern("O.OO.O")) == [16, 16, 8, 4, 4, 2]


def test_hysteresis_refilled_by_growth_is_deepspeeds_default():
    # field notes, DeepSpeed h=2 not consecutive: O.O.OO -> 16,16,8,8,4,2
    rule = ps.DynamicScale(16.0, growth_interval=1000, hysteresis=2, refill="growth")
    assert trace(rule, pattern("O.O.OO")) == [16, 16, 8, 8, 4, 2]


def test_hysteresis_refilled_by_clean_steps_is_deepspeeds_consecutive():
    # field notes, DeepSpeed h=2 consecutive: O.O.OO -> 16,16,16,16,16,8
    rule = ps.DynamicScale(16.0, growth_interval=1000, hysteresis=2, refill="clean")
    assert trace(rule, pattern("O.O.OO")) == [16, 16, 16, 16, 16, 8]


def test_growth_restores_the_tolerance():
    rule = ps.DynamicScale(16.0, growth_interval=2, hysteresis=2, refill="growth")
    assert trace(rule, pattern("O..O")) == [16, 16, 32, 32]


@given(legal_rules, st.integers(1, 5))
def test_floor_and_ceiling_survive_a_pytree_round_trip(rule, steps):
    """They are settings of the rule, not leaves of the state."""
    lowest = rule.init()._replace(scale=torch.tensor(rule.min_scale))
    highest = rule.init()._replace(scale=torch.tensor(rule.max_scale))
    for _ in range(max(steps, rule.hysteresis)):
        turned = pytree.tree_map(torch.clone, lowest)
        lowest = rule.update(turned, torch.tensor(True))
        assert same_bits(lowest, rule.update(turned, torch.tensor(True)))
    for _ in range(steps):
        grown = torch.full_like(highest.growth_tracker, rule.growth_interval - 1)
        turned = pytree.tree_map(torch.clone, highest._replace(growth_tracker=grown))
        highest = rule.update(turned, torch.tensor(False))
    assert lowest.scale == rule.min_scale
    assert highest.scale == rule.max_scale


@pytest.mark.parametrize("rule", [ps.StaticScale(512.0), ps.NoScale()])
@given(pattern=flags)
def test_a_static_scale_never_moves(rule, pattern):
    assert set(trace(rule, pattern)) == {rule.scale}


def test_a_static_scale_comes_back_from_a_damaged_state():
    assert ps.StaticScale(512.0).update(at(math.nan), torch.tensor(False)).scale == 512


def test_consecutive_skips_are_counted_and_forgotten():
    rule, state = ps.DynamicScale(), ps.DynamicScale().init()
    counts = []
    for bad in pattern("OO.O"):
        state = rule.update(state, torch.tensor(bad))
        counts.append(state.consecutive_skips.item())
    assert counts == [1, 2, 0, 1]


@given(scale_rules(), st.data(), st.booleans())
def test_update_is_pure_reads_nothing_and_maps_over_members(rule, data, bad):
    states = [data.draw(scaler_states(rule)) for _ in range(3)]
    assert_pure(rule.update, states[0], torch.tensor(bad))
    assert_sync_free(rule.update, states[0], torch.tensor(bad))
    flags = torch.tensor([bad, not bad, bad])
    assert_vmap_equals_loop(rule.update, stack(states), flags)


RULES = [
    ps.DynamicScale(),
    ps.DynamicScale(8.0, growth_interval=2, hysteresis=2),
    ps.DynamicScale(1.0, 4.0, 0.25, 3, 2.0**-149, 2.0**127, 3, "clean"),
    ps.DynamicScale(8.0, min_scale=8.0, max_scale=8.0),
    ps.StaticScale(512.0),
    ps.NoScale(),
    ps.HeadroomScale(8.0, margin=0, window=3, min_scale=2.0**-111, max_scale=2.0**127),
    pytest.param(ps.HeadroomScale(), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_keeps_every_law(rule):
    assert_scale_rule(rule)


@pytest.mark.parametrize("takes_amax", [True, False])
def test_each_rule_of_a_class_is_refused_by_its_own_takes_amax(takes_amax):
    class Own:
        def __init__(self, takes_amax):
            self.takes_amax = takes_amax

        def init(self, device=None):
            return ps.StaticScale(8.0).init(device)

        if takes_amax:

            def update(self, scaler, found_inf, amax):
                return scaler
        else:

            def update(self, scaler, found_inf):
                return scaler

    def start(rule):
        optimizer = ps.from_torch(torch.optim.SGD, lr=0.1)
        return ps.init_train_state({"w": torch.ones(3)}, {}, optimizer, rule)

    for _ in range(2):
        assert start(Own(takes_amax)).scaler.scale == 8
        with pytest.raises(TypeError, match=rf"takes_amax is {not takes_amax}. Fix: "):
            start(Own(not takes_amax))


def test_rules_are_values():
    assert ps.DynamicScale() == ps.DynamicScale()
    assert hash(ps.StaticScale(2.0)) == hash(ps.StaticScale(2.0))
    with pytest.raises(AttributeError):
        ps.DynamicScale().init_scale = 1.0


# ---- a state of another rule


STATES = {
    type(rule).__name__: (rule, rule.init())
    for rule in (
        *(ps.DynamicScale(), ps.StaticScale(4.0), ps.NoScale(), ps.HeadroomScale(window=3)),
        *(interop.torch_amp.rule(), interop.apex.rule(), interop.nnabla.rule()),
        *(interop.deepspeed.rule(), interop.megatron.rule(), interop.flax.rule()),
        *(interop.jmp.rule(8.0), interop.keras.rule(), interop.fairseq.rule()),
        interop.mmengine.rule(8.0),
    )
}


def told(rule):
    return (torch.tensor(False), *([torch.tensor(1.0)] if hasattr(rule, "takes_amax") else []))


@pytest.mark.parametrize("theirs", STATES)
@pytest.mark.parametrize("name", STATES)
def test_the_state_of_another_rule_is_refused_with_a_cure_that_carries_the_scale_over(name, theirs):
    rule, own = STATES[name]
    foreign = STATES[theirs][1]._replace(scale=torch.tensor(32.0))
    if type(foreign) is type(own):
        return
    with pytest.raises(TypeError, match=f"scaler is {type(foreign).__name__}; expected a") as error:
        rule.update(foreign, *told(rule))
    missing = set(own._fields) - set(foreign._fields)
    there = [field for field in own._fields if field in foreign._fields]
    assert f"It has {', '.join(there)}; missing: " in str(error.value)
    assert all(field in str(error.value).partition("missing: ")[2] for field in missing)
    cure = re.search(r"Fix: `scaler = (.*)`\.$", str(error.value)).group(1)
    carried = eval(cure, {"rule": rule, "scaler": foreign})
    assert type(carried) is type(own)
    assert carried.scale == 32.0
    assert type(rule.update(carried, *told(rule))) is type(own)


@pytest.mark.parametrize("name", STATES)
def test_what_is_no_state_of_a_rule_is_refused_in_words(name):
    rule, own = STATES[name]
    whole = ps.init_train_state({"w": torch.ones(2)}, {}, ps.from_torch(torch.optim.SGD), rule)
    for wrong, cure in (
        (None, r"rule\.init\(device\)"),
        (torch.tensor(2.0), r"rule\.init\(device\)"),
        (own._asdict(), rf"{type(own).__name__}\(\*\*scaler\)"),
        (whole, r"rule\.update\(state\.scaler, found_inf\)"),
    ):
        with pytest.raises(TypeError, match=f"Likely cause: .*Fix: .*{cure}"):
            rule.update(wrong, *told(rule))


@pytest.mark.parametrize("donate", [False, True])
def test_a_training_with_another_rules_state_stops_before_anything_is_written(donate):
    sgd = ps.from_torch(torch.optim.SGD, lr=1.0)
    state = ps.init_train_state({"w": torch.ones(2)}, {}, sgd, ps.HeadroomScale())
    with Untouched(state), pytest.raises(TypeError, match="expected a ScalerState"):
        ps.train_step(
            state,
            [torch.ones(2)],
            loss_fn=lambda p, b, x: ((p["w"] * x).sum(), b),
            optimizer=sgd,
            rule=ps.DynamicScale(),
            donate=donate,
        )


def test_the_fields_of_a_state_count_and_not_its_class():
    mine = collections.namedtuple("Mine", (*ps.ScalerState._fields, "more"))
    rule = ps.DynamicScale()
    state = rule.init()
    bad = torch.tensor(True)
    assert same_bits(rule.update(mine(*state, torch.tensor(0)), bad), rule.update(state, bad))


@pytest.mark.parametrize("name", ["DynamicScale", "HeadroomScale", "DeepSpeedScale"])
def test_a_foreign_state_is_refused_while_tracing(name):
    rule, own = STATES[name]
    foreign = STATES["DynamicScale" if name == "HeadroomScale" else "HeadroomScale"][1]
    words = f"scaler is {type(foreign).__name__}; expected a {type(own).__name__}"
    with pytest.raises(TypeError, match=words):
        torch.compile(rule.update, backend="eager")(foreign, *told(rule))
    with pytest.raises(TypeError, match=words):
        torch.vmap(lambda s: rule.update(s, *told(rule)))(stack([foreign, foreign]))


@pytest.mark.parametrize("name", ["DynamicScale", "HeadroomScale", "DeepSpeedScale"])
def test_the_look_for_a_foreign_state_adds_nothing_to_a_graph(name, monkeypatch):
    rule, own = STATES[name]
    compiled = torch.compile(rule.update, fullgraph=True, backend="eager")
    assert same_bits(compiled(own, *told(rule)), rule.update(own, *told(rule)))
    mapped = torch.vmap(lambda s: rule.update(s, *told(rule)))(stack([own, own]))
    assert type(mapped) is type(own)

    def operators():
        graph = make_fx(lambda *given: rule.update(*given))(own, *told(rule)).graph
        return [node.target for node in graph.nodes if node.op == "call_function"]

    checked = operators()
    monkeypatch.setattr(rules, "check_state", lambda scaler, kind: None)
    assert checked == operators()


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


@pytest.mark.parametrize("value", [0.0, -2.0, math.nan, math.inf, 3.0, 1000, 2.0**128, 2.0**-150])
@pytest.mark.parametrize(
    "name", ["init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale"]
)
def test_a_setting_that_is_no_power_of_two_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=rf"{name} must be a power of two.*Fix: {name}="):
        ps.DynamicScale(**{name: value})


@pytest.mark.parametrize("value", ["65536", None, True, [2.0]])
def test_a_scale_that_is_no_number_is_refused(value):
    with pytest.raises(TypeError, match="init_scale must be a number"):
        ps.DynamicScale(init_scale=value)
    with pytest.raises(TypeError, match="scale must be a number"):
        ps.StaticScale(value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"growth_factor": 1.0}, "growth_factor must be above 1"),
        ({"growth_factor": 0.5}, "growth_factor must be above 1"),
        ({"backoff_factor": 1.0}, "backoff_factor must lie between 0 and 1"),
        ({"backoff_factor": 2.0}, "backoff_factor must lie between 0 and 1"),
        ({"growth_interval": 0}, "growth_interval must be from 1"),
        ({"hysteresis": 0}, "hysteresis must be from 1"),
        (
            {"min_scale": 4.0, "init_scale": 8.0, "max_scale": 2.0},
            "min_scale <= init_scale <= max_scale",
        ),
        (
            {"init_scale": 2.0**30},
            r"<= max_scale must hold, got .*Fix: move the bound that is crossed",
        ),
        ({"refill": "sometimes"}, "refill must be 'growth'"),
    ],
)
def test_settings_that_contradict_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ps.DynamicScale(**settings)


def test_an_interval_that_is_no_whole_number_is_refused():
    with pytest.raises(TypeError, match="growth_interval must be a whole number"):
        ps.DynamicScale(growth_interval=10.5)


@pytest.mark.parametrize("scale", [2.0**-149, 2.0**-130, 2.0**127])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex32])
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_complex_zeros_unscale_to_zeros_at_every_scale(scale, dtype):
    unscaled, found_inf = ps.unscale_and_check(at(scale), [torch.zeros(2, dtype=dtype)])
    assert unscaled[0].tolist() == [0, 0]
    assert unscaled[0].dtype is torch.complex64
    assert not found_inf


def test_a_count_at_the_end_of_its_range_does_not_wrap():
    state = at(8.0, growth_tracker=2**31 - 1, hysteresis_tracker=1)
    assert ps.DynamicScale(growth_interval=2**31 - 1).update(state, torch.tensor(False)).scale == 16


class Bare(NamedTuple):
    scale: torch.Tensor


def test_a_state_that_counts_no_skips_cannot_be_asked_how_many_there_were():
    # after 50 overflows in a row the check would pass
    state = Bare(torch.tensor(8.0))
    ps.check_scaler(state, ps.DynamicScale())
    with pytest.raises(
        TypeError,
        match=r"max_skips=3 with a Bare, which does not count skips. "
        r"Fix: a field `consecutive_skips`",
    ):
        ps.check_scaler(state, ps.DynamicScale(), max_skips=3)


# ---- edges that a careless change would break


RULE = ps.DynamicScale(init_scale=2.0**10, growth_interval=3)


def test_the_tolerance_never_falls_below_zero():
    rule, state = RULE, RULE.init()
    for _ in range(3):
        state = rule.update(state, torch.tensor(True))
    assert state.hysteresis_tracker == 0


def test_a_damaged_count_is_brought_back():
    assert (
        ps.DynamicScale(8.0, growth_interval=1)
        .update(at(8.0, growth_tracker=-5, hysteresis_tracker=1), torch.tensor(False))
        .scale
        == 16
    )


def test_an_interval_beyond_int32_is_refused():
    with pytest.raises(ValueError, match="growth_interval must be from 1"):
        ps.DynamicScale(growth_interval=2**31)
