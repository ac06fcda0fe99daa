"""Rules of other libraries: their transitions, the laws, their state dicts, Apex's opt levels."""

import dataclasses
import itertools
import math
import types

import hypothesis.strategies as st
import pytest
import torch
from helpers import batch, job, same_bits, shares_memory, stack, started, steered, tensors
from hypothesis import given

import purescale as ps
from purescale import interop
from purescale.testing import assert_pure, assert_scale_rule

PEERS = (
    *("torch_amp", "apex", "nnabla", "deepspeed", "megatron"),
    *("flax", "jmp", "keras", "fairseq", "mmengine"),
)

# One rule a behaviour, each with an interval that a few steps reach.
RULES = {
    "torch_amp": interop.torch_amp.rule(
        init_scale=8.0, growth_factor=2.1, backoff_factor=0.3, growth_interval=2
    ),
    "apex": interop.apex.rule(init_scale=8.0, scale_window=2, min_loss_scale=1.0),
    "apex-no-floor": interop.apex.rule(init_scale=8.0, scale_window=2),
    "apex-static": interop.apex.rule(loss_scale=128.0),
    "nnabla": interop.nnabla.rule(N=1),
    "deepspeed": interop.deepspeed.rule(init_scale=8.0, scale_window=2),
    "deepspeed-consecutive": interop.deepspeed.rule(
        init_scale=8.0, scale_window=2, consecutive_hysteresis=True
    ),
    "deepspeed-config": interop.deepspeed.rule(init_scale=8.0, scale_window=2, delayed_shift=1),
    "deepspeed-static": interop.deepspeed.rule(init_scale=8.0, dynamic=False, scale_window=5),
    "megatron": interop.megatron.rule(initial_scale=8.0, growth_interval=2),
    "flax": interop.flax.rule(scale=8.0, growth_interval=1),
    "flax-no-floor": interop.flax.rule(scale=8.0, growth_interval=1, minimum_scale=None),
    "jmp": interop.jmp.rule(loss_scale=8.0, period=2),
    "keras": interop.keras.rule(initial_scale=8.0, dynamic_growth_steps=2),
    "fairseq": interop.fairseq.rule(init_scale=8.0, scale_window=2, tolerance=0.3),
    "fairseq-threshold": interop.fairseq.rule(init_scale=8.0, scale_window=2, threshold=1.0),
    "mmengine": interop.mmengine.rule({"init_scale": 8.0, "growth_interval": 2}),
    "mmengine-fixed": interop.mmengine.rule(100.0),
}
each_rule = pytest.mark.parametrize("name", RULES)
each_peer = pytest.mark.parametrize("peer", PEERS)

flags = st.lists(st.booleans(), min_size=1, max_size=12)


def peer_of(name):
    return getattr(interop, name.partition("-")[0])


def states_of(rule, steps, state=None):
    """The first state and that after each step: flags, or a text in which `O` is an overflow."""
    states = [rule.init() if state is None else state]
    for step in steps:
        states.append(rule.update(states[-1], torch.tensor(step in (True, "O"))))
    return states


def run(rule, steps, state=None):
    return states_of(rule, steps, state)[-1]


# ---- oracles, written from the field's notes in plain Python floats


class ApexOracle:
    def __init__(self, *, dynamic, scale, window, floor, ceiling):
        self.dynamic, self.window, self.floor, self.ceiling = dynamic, window, floor, ceiling
        self.scale, self.unskipped = min(ceiling, scale) if dynamic else scale, 0

    def update(self, bad):
        if bad and self.dynamic:
            half = self.scale / 2
            self.scale = max(self.floor, half) if self.floor else half
            self.unskipped = 0
        else:
            self.unskipped += 1
        if self.unskipped == self.window and self.dynamic:
            self.scale = min(self.ceiling, 2 * self.scale)
            self.unskipped = 0


class NnablaOracle:
    def __init__(self, scale, factor, interval):
        self.scale, self.factor, self.interval, self.counter = scale, factor, interval, 0

    def update(self, bad):
        if bad:
            self.scale, self.counter = self.scale / self.factor, 0
            return
        if self.counter > self.interval:
            self.scale, self.counter = self.scale * self.factor, 0
        self.counter += 1


class FairseqOracle:
    """Two entry points: after a clean step, and on an overflow. Counts iterations, never clean
    steps.
    """

    def __init__(self, scale, factor, window, tolerance, threshold, minimum):
        self.scale, self.factor, self.window, self.tolerance = scale, factor, window, tolerance
        self.threshold, self.minimum = threshold, minimum
        self.iteration, self.overflow_at, self.rescaled_at, self.overflows = 0, -1, -1, 0

    def update(self, bad):
        if not bad:
            if (self.iteration - self.overflow_at) % self.window == 0:
                self.scale *= self.factor
                self.rescaled_at = self.iteration
        else:
            before, since = self.scale, self.iteration - self.rescaled_at
            self.overflow_at = self.iteration
            self.overflows += 1
            if self.overflows / float(since or 1000) >= self.tolerance:
                self.scale /= self.factor
                if self.threshold is not None:
                    self.scale = max(self.scale, self.threshold)
                self.rescaled_at, self.overflows = self.iteration, 0
            if self.scale <= self.minimum:
                self.scale = before
                raise FloatingPointError
        self.iteration += 1


def oracles(scale, window, factor, dynamic, floor, tolerance):
    """Each rule, its oracle, and what that calls the counts of the state."""
    first = {"init_scale": scale} if dynamic else {"loss_scale": str(scale)}
    bounds = {"min_loss_scale": floor, "max_loss_scale": 2.0**12}
    apex = ApexOracle(dynamic=dynamic, scale=scale, window=window, floor=floor, ceiling=2.0**12)
    yield interop.apex.rule(**first, scale_window=window, **bounds), apex, ["unskipped"]
    nnabla = interop.nnabla.rule(scale=scale, scaling_factor=factor, N=window - 1)
    yield nnabla, NnablaOracle(scale, factor, window - 1), ["counter"]
    minimum = 2.0**-90 if floor is None else 1e-4
    settings = scale, factor, window, tolerance, floor, minimum
    counts = ["iteration", "overflow_at", "rescaled_at", "overflows"]
    yield interop.fairseq.rule(*settings), FairseqOracle(*settings), counts


def assert_stays_beside(rule, oracle, counts, pattern):
    state = rule.init()
    for bad in pattern:
        bad = steered(bad, oracle.scale)
        state = rule.update(state, torch.tensor(bad))
        try:
            oracle.update(bad)
        except FloatingPointError:
            with pytest.raises(FloatingPointError, match="smallest scale"):
                ps.check_scaler(state, rule)
            return
        expected = [getattr(oracle, name) for name in ("scale", *counts)]
        assert [number.item() for number in state[: len(expected)]] == expected


@given(
    pattern=st.lists(st.booleans(), min_size=1, max_size=50),
    scale=st.integers(-10, 11).map(lambda exponent: 2.0**exponent),
    window=st.integers(1, 5),
    factor=st.sampled_from([2.0, 16.0]),
    dynamic=st.booleans(),
    floor=st.sampled_from([None, 0.0, 2.0**-11]),
    tolerance=st.sampled_from([0.0, 0.25, 1 / 3, 1.0]),
)
def test_apex_nnabla_and_fairseq_equal_their_oracles(pattern, **settings):
    for each in oracles(**settings):
        assert_stays_beside(*each, pattern)


MOST = torch.finfo(torch.float32).max  # flax's ceiling, which is no power of two


@given(
    flags,
    st.floats(2.0**-126, 2.0**127),
    st.floats(1.001, 20),
    st.floats(0.01, 0.999),
    st.integers(1, 4),
    st.integers(0, 5),
)
def test_torch_amp_equals_torchs_operator_with_any_setting(
    pattern, scale, growth, backoff, interval, count
):
    rule = interop.torch_amp.rule(scale, growth, backoff, interval)
    state = rule.init()._replace(growth_tracker=torch.tensor(count, dtype=torch.int32))
    expected = state[:2]
    for bad in pattern:
        expected = torch.ops.aten._amp_update_scale(
            *expected, torch.tensor([float(bad)]), growth, backoff, interval
        )
        state = rule.update(state, torch.tensor(bad))
        assert same_bits(state[:2], expected)


@pytest.mark.parametrize(("overflows", "scale"), [(10**8 - 2, 16.0), (10**8 - 1, 8.0)])
def test_fairseqs_share_of_overflows_is_not_rounded(overflows, scale):
    rule = interop.fairseq.rule(init_scale=16.0, tolerance=0.1)
    counts = {"iteration": 10**9, "last_rescale_iter": 0, "overflows_since_rescale": overflows}
    state = rule.init()._replace(**{name: torch.tensor(count) for name, count in counts.items()})
    assert rule.update(state, torch.tensor(True)).scale == scale


# ---- the field's notes, peer by peer: where growth comes, and how the tolerance is refilled


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (interop.deepspeed.rule(scale_window=3), "...+..+O...+"),
        (interop.megatron.rule(growth_interval=3), "..+..+O..+"),
        (interop.flax.rule(growth_interval=3), "...+...+O...+"),
        (interop.jmp.rule(loss_scale=8.0, period=3), "..+..+O..+"),
        (interop.keras.rule(dynamic_growth_steps=3), "..+..+O..+"),
    ],
    ids=lambda value: type(value).__name__ if dataclasses.is_dataclass(value) else None,
)
def test_growth_comes_where_the_peers_does(rule, expected):
    """At `+`: from the start, again, and after an overflow `O`; for others see their oracles."""
    scales = [state.scale for state in states_of(rule, expected)]
    for letter, (before, after) in zip(expected, itertools.pairwise(scales), strict=True):
        assert letter == "O" or (letter == "+") == (after > before)


@pytest.mark.parametrize(
    ("rule", "text", "expected"),
    [
        (interop.deepspeed.rule(16.0, delayed_shift=2, scale_window=1000), "O.O.OO",
         [16, 16, 8, 8, 4, 2]),
        (interop.deepspeed.rule(16.0, delayed_shift=2, scale_window=1000,
                                consecutive_hysteresis=True), "O.O.OO",
         [16, 16, 16, 16, 16, 8]),
        (interop.megatron.rule(16.0, hysteresis=2), "O.OO.O", [16, 16, 8, 4, 4, 2]),
        (interop.deepspeed.rule(0.25, min_scale=1.0, delayed_shift=1), "OO", [1, 1]),
        (interop.megatron.rule(2.0, min_scale=1.5, hysteresis=1), "OO", [1.5, 1.5]),
        (interop.jmp.rule(2.0), "OO", [1, 1]),
        (interop.fairseq.rule(8.0, threshold=3.0), "OOO", [4, 3, 3]),
        (interop.fairseq.rule(4.0, min_loss_scale=1.0, scale_window=2), "OOO....",
         [2, 1, 1, 1, 2, 2, 4]),
        (interop.flax.rule(scale=2.0**127, growth_interval=1), "...O",
         [2.0**127, MOST, MOST, MOST / 2]),
        (interop.torch_amp.rule(2.0**127, growth_interval=1), "..", [2.0**127] * 2),
        (interop.jmp.rule(2.0**127, period=1), "..", [2.0**127] * 2),
        (interop.megatron.rule(2.0**127, growth_interval=1), "..O", [math.inf] * 3),
        (interop.keras.rule(2.0**127, dynamic_growth_steps=1), "..O", [math.inf] * 3),
        (interop.torch_amp.rule(2.0**-148), "OOO.", [2.0**-149, 0, 0, 0]),
        (interop.apex.rule(init_scale=2.0**-148), "OOO.", [2.0**-149, 0, 0, 0]),
    ],
)  # fmt: skip
def test_tolerance_floor_and_ceiling_are_the_peers(rule, text, expected):
    assert [state.scale.item() for state in states_of(rule, text)[1:]] == expected


# ---- the laws


# What each does otherwise than the laws ask, because its peer does.
QUIRKS = {
    "torch_amp": "power_of_two positive",  # any factor; torch's has no floor
    "apex": "",
    "apex-static": "",
    "nnabla": "positive finite",
    "deepspeed": "finite",
    "deepspeed-static": "",
    "megatron": "finite",
    "flax": "power_of_two",  # after its ceiling, the largest float32
    "jmp": "",
    "keras": "positive finite",
    "fairseq": "finite",
    "mmengine-fixed": "init power_of_two",  # whatever number it was given
}


@pytest.mark.slow
@pytest.mark.parametrize("name", QUIRKS)
def test_each_rule_keeps_the_laws_but_for_the_quirks_of_its_peer(name):
    assert_scale_rule(RULES[name], quirks=["damaged", *QUIRKS[name].split()])


@each_rule
@pytest.mark.parametrize("flag", [False, True])
def test_a_counter_at_its_end_does_not_wrap(name, flag):
    state = RULES[name].init()
    counts = [field for field in state._fields if getattr(state, field).dtype is torch.int32]
    state = state._replace(**dict.fromkeys(counts, torch.tensor(2**31 - 1, dtype=torch.int32)))
    for _ in range(3):
        state = RULES[name].update(state, torch.tensor(flag))
        assert min(getattr(state, field) for field in counts) >= 0
        assert not flag or state.consecutive_skips == 2**31 - 1


@each_rule
def test_overflows_in_a_row_are_counted_for_check_scaler(name):
    rule = RULES[name]
    assert [state.consecutive_skips for state in states_of(rule, "OO.O")] == [0, 1, 2, 0, 1]
    with pytest.raises(FloatingPointError):
        ps.check_scaler(run(rule, "OOO"), rule, max_skips=2)


PATTERN = "...O.O...OOO....O...."


@pytest.mark.slow
def test_all_rules_compiled_by_inductor_have_the_same_bits():
    def update(states, bad):
        return {name: RULES[name].update(state, bad) for name, state in states.items()}

    compiled = torch.compile(update, fullgraph=True)
    eager = other = {name: rule.init() for name, rule in RULES.items()}
    for step in PATTERN:
        bad = torch.tensor(step == "O")
        eager, other = update(eager, bad), compiled(other, bad)
        assert same_bits(eager, other)


@each_rule
@pytest.mark.parametrize("flag", [False, True])
def test_an_update_is_pure(name, flag):
    assert_pure(RULES[name].update, RULES[name].init(), torch.tensor(flag))


@each_rule
def test_a_rule_goes_where_dynamic_scale_goes(name):
    state, step = job(ps.from_torch(torch.optim.SGD, lr=0.1), RULES[name])
    first = state
    for index in range(3):
        state, info = step(state, [batch(index)])
        assert not info.found_inf
    assert type(state.scaler) is type(first.scaler)
    assert not same_bits(state.params, first.params)


# ---- state dicts


# What the state dict of the peer does not hold, for `from_state_dict`; `...` stands for all.
NOT_HELD = {
    **{"torch_amp": ("init_scale",), "apex": ..., "nnabla": (), "deepspeed": ("init_scale",)},
    **{"megatron": ..., "jmp": (), "keras": (), "fairseq": ("init_scale",)},
    **{"mmengine": ("init_scale",), "mmengine-fixed": ("loss_scale",)},
    "flax": ("growth_factor", "backoff_factor", "growth_interval", "minimum_scale"),
}


BEGAN_AT = {"nnabla": ("scale",), "flax": ("scale", "fin_steps")}
BEGAN_AT["jmp"] = ("loss_scale", "counter")


def given_settings(name, rule):
    names = NOT_HELD.get(name, NOT_HELD[name.partition("-")[0]])
    names = [field.name for field in dataclasses.fields(rule)] if names is ... else names
    return {key: getattr(rule, key) for key in names}


@each_rule
def test_a_state_dict_restores_rule_and_state(name, tmp_path):
    rule, peer = RULES[name], peer_of(name)
    for steps in ("", ".", PATTERN[:6], PATTERN[:9]):
        state = run(rule, steps)
        d = peer.to_state_dict(rule, state)
        assert not shares_memory(d, state)
        torch.save(d, tmp_path / "scaler.pt")
        d = torch.load(tmp_path / "scaler.pt", weights_only=True)
        restored_rule, restored = peer.from_state_dict(d, **given_settings(name, rule))
        assert same_bits(restored[:-1], state[:-1])
        assert restored.consecutive_skips == 0
        assert peer.to_state_dict(restored_rule, restored) == d
        # What init starts from is the saved state in those that call it scale and counter.
        began = {key: getattr(rule, key) for key in BEGAN_AT.get(name.partition("-")[0], ())}
        assert dataclasses.replace(restored_rule, **began) == rule


def test_apex_with_several_losses_keeps_them_in_order():
    _, rules = interop.apex.initialize("O1", num_losses=12)
    states = tuple(run(rule, [True] * index) for index, rule in enumerate(rules))
    d = interop.apex.to_state_dict(rules, states)
    assert list(d) == [f"loss_scaler{index}" for index in range(12)]
    reverse = dict(reversed(d.items()))
    restored_rules, restored = interop.apex.from_state_dict(reverse, init_scale=2.0**16)
    assert restored_rules == rules
    assert [state.scale.item() for state in restored] == [2.0 ** (16 - n) for n in range(12)]
    wrapped = interop.mmengine.to_state_dict(rules, states)
    assert wrapped == {"apex_amp": d}
    assert interop.mmengine.from_state_dict(wrapped, init_scale=2.0**16)[0] == rules


def test_deepspeeds_flat_format_has_no_hysteresis():
    d = {"dynamic_loss_scale": True, "cur_scale": 256.0, "cur_iter": 40, "last_overflow_iter": 30}
    d |= {"scale_factor": 2.0, "scale_window": 100}
    rule, state = interop.deepspeed.from_state_dict(
        {**d, "optimizer_state_dict": {}, "clip_grad": 0.0}, min_scale=0.25
    )
    assert (rule.delayed_shift, rule.min_scale, rule.scale_window) == (1, 0.25, 100)
    assert run(rule, [True] * 11, state).scale == 0.25


@pytest.mark.parametrize("as_object", [True, False])
def test_deepspeeds_zero_format_keeps_hysteresis(as_object):
    attributes = {
        **{"cur_scale": 256.0, "dynamic": True, "cur_iter": 40, "last_overflow_iter": 30},
        **{"scale_factor": 2.0, "scale_window": 100, "min_scale": 1, "delayed_shift": 3},
        **{"cur_hysteresis": 2, "consecutive_hysteresis": True, "dtype": torch.half},
        "raise_error_at_min_scale": False,
    }
    scaler = types.SimpleNamespace(**attributes) if as_object else attributes
    rule, state = interop.deepspeed.from_state_dict(
        {"loss_scaler": scaler, "dynamic_loss_scale": True, "overflow": False}
    )
    assert state.cur_hysteresis == 2
    assert rule == interop.deepspeed.rule(256.0, 100, 1.0, 3, True, False)


def test_deepspeeds_static_scaler():
    scaler = types.SimpleNamespace(cur_scale=128, dynamic=False)
    for more in ({"cur_scale": 128.0, "cur_iter": 3}, {"loss_scaler": scaler}):
        rule, state = interop.deepspeed.from_state_dict({"dynamic_loss_scale": False, **more})
        assert run(rule, [False, True, True], state).scale == 128


def test_fairseqs_optimizer_dict_restores_the_scale_and_starts_the_counts_anew():
    d = {"state": {}, "param_groups": [], "loss_scale": 64.0}
    rule, state = interop.fairseq.from_state_dict(d, scale_window=3)
    assert same_bits(state, interop.fairseq.rule(64.0, scale_window=3).init())
    assert rule.scale_window == 3


def test_a_fixed_scale_of_mmengine_uses_the_restored_one_once():
    dynamic = interop.mmengine.rule()
    d = interop.mmengine.to_state_dict(dynamic, run(dynamic, [False] * 3))
    rule, state = interop.mmengine.from_state_dict(d, loss_scale=512.0)
    assert (state.scale, state.growth_tracker) == (65536, 3)
    state = run(rule, [True, False], state)
    assert (state.scale, state.growth_tracker) == (512, 3)


@each_peer
def test_a_restored_state_is_on_the_device_that_is_asked_for(peer):
    module, rule = getattr(interop, peer), RULES[peer]
    d = module.to_state_dict(rule, rule.init())
    _, state = module.from_state_dict(d, device="meta", **given_settings(peer, rule))
    assert {t.device.type for t in tensors((state, rule.init("meta")))} == {"meta"}


# ---- bad state dicts


def sample(peer):
    return getattr(interop, peer).to_state_dict(RULES[peer], RULES[peer].init())


@each_peer
def test_another_peers_state_dict_is_refused(peer):
    mmcv = {"cur_scale": 4.0, "cur_iter": 1, "mode": "dynamic", "last_overflow_iter": -1}
    mmcv |= {"scale_factor": 2.0, "scale_window": 1000}
    others = [sample(other) for other in PEERS if other != peer]
    for d in (*others, mmcv, ps.DynamicScale().init()._asdict(), {"model": {}, "epoch": 3}):
        with pytest.raises((ValueError, TypeError), match=r"from_state_dict|dynamic_loss_scale"):
            getattr(interop, peer).from_state_dict(d)


@each_peer
def test_the_empty_dict_of_a_disabled_scaler_is_named(peer):
    held = [{}, {"state": {}, "param_groups": [], "loss_scaler": {}}]
    for d in held[: 1 + (peer == "mmengine")]:
        with pytest.raises(ValueError, match=r"disabled scaler .*NoScale\(\)"):
            getattr(interop, peer).from_state_dict(d)


@each_peer
@pytest.mark.parametrize("d", [None, "scaler.pt", torch.ones(1)])
def test_what_is_no_dict_is_refused(peer, d):
    for other in (d, {"loss_scaler": d})[: 1 + (peer in ("deepspeed", "mmengine"))]:
        with pytest.raises(TypeError, match="takes a state dict"):
            getattr(interop, peer).from_state_dict(other)


def innermost(d):
    """The dict that holds the numbers."""
    for key in ("apex_amp", "loss_scaler", "loss_scaler0"):
        if key in d:
            return innermost(d[key])
    return d


RUBBISH = [
    *(None, True, "x", {}, [1], object(), -(2**70), 2**70, torch.tensor(1.0), torch.ones(2)),
    *(0.0, -1.0, math.inf, math.nan, 1e39, 1e-60),
]


@each_peer
def test_a_damaged_state_dict_is_a_clear_error_or_a_usable_state(peer):
    from_state_dict = getattr(interop, peer).from_state_dict
    for key, value in itertools.product(innermost(sample(peer)), (*RUBBISH, ...)):
        d = sample(peer)
        innermost(d)[key] = value
        if value is ...:
            del innermost(d)[key]
        try:
            rule, state = from_state_dict(d)
        except (TypeError, ValueError) as error:
            is_right = "from_state_dict" in str(error) or key in str(error)
        else:
            is_right = 0 < rule.update(state, torch.tensor(False)).scale < math.inf
        assert is_right, (key, value)


def test_of_a_scale_below_megatrons_own_floor_check_scaler_tells():
    d = {**sample("megatron"), "scale": torch.tensor([0.5])}
    rule, state = interop.megatron.from_state_dict(d)
    with pytest.raises(FloatingPointError, match=r"smallest that the rule allows, 0\.5"):
        ps.check_scaler(rule.update(state, torch.tensor(False)), rule)


def test_a_setting_that_contradicts_the_state_dict_is_refused():
    contradictions = {
        **{"torch_amp": {"growth_interval": 3}, "apex": {"loss_scale": 4.0}, "nnabla": {"N": 3}},
        **{"deepspeed": {"delayed_shift": 9}, "flax": {"fin_steps": 3}, "jmp": {"period": 3}},
        **{"keras": {"dynamic_growth_steps": 3}, "fairseq": {"tolerance": 0.5}},
        "mmengine": {"loss_scale": {"growth_factor": 4.0}},
    }
    for peer, contradiction in contradictions.items():
        with pytest.raises(ValueError, match="contradicts"):
            getattr(interop, peer).from_state_dict(sample(peer), **contradiction)


@each_peer
def test_a_rule_or_state_that_the_format_cannot_hold_is_refused(peer):
    module, rule = getattr(interop, peer), RULES[peer]
    for pair in ((ps.DynamicScale(), rule.init()), (rule, {"scale": 8.0})):
        with pytest.raises(TypeError, match="expected a rule that"):
            module.to_state_dict(*pair)
    with pytest.raises(ValueError, match="got stacked states"):
        module.to_state_dict(rule, stack([rule.init(), rule.init()]))


# ---- bad settings

NAN = math.nan
OUT_OF_RANGE = {
    "torch_amp": {
        **{"init_scale": [-1.0, NAN], "growth_factor": [1.0]},
        **{"backoff_factor": [1.0, -1.0], "growth_interval": [0]},
    },
    "apex": {"loss_scale": [0.0, "inf"], "min_loss_scale": [-2.0], "scale_window": [0]},
    "nnabla": {"N": [-1], "scaling_factor": [1.0]},
    "deepspeed": {"delayed_shift": [0], "scale_factor": [0.5], "min_scale": [0.0]},
    "megatron": {"hysteresis": [0]},
    "flax": {"minimum_scale": [0.0], "fin_steps": [-1]},
    "jmp": {"factor": [1], "period": [0]},
    "keras": {"dynamic_growth_steps": [0]},
    "fairseq": {"tolerance": [1.5], "threshold": [-1.0], "min_loss_scale": [NAN]},
    "mmengine": {"loss_scale": [0.0]},
}
NO_NUMBERS = {
    "torch_amp": {"init_scale": ["65536", torch.tensor(8.0)], "growth_interval": [2.5]},
    "apex": {"loss_scale": [True, None]},
    "nnabla": {"N": [2.5]},
    "deepspeed": {"consecutive_hysteresis": [1]},
    "jmp": {"loss_scale": [[8.0]]},
    "fairseq": {"threshold": ["1"]},
    "mmengine": {"loss_scale": [None]},
}


@pytest.mark.parametrize(
    ("error", "peer", "name", "value"),
    [
        (error, peer, name, value)
        for error, settings in ((ValueError, OUT_OF_RANGE), (TypeError, NO_NUMBERS))
        for peer, by_name in settings.items()
        for name, values in by_name.items()
        for value in values
    ],
)
def test_a_setting_out_of_range_or_of_the_wrong_type_is_refused_by_name(error, peer, name, value):
    given = {"loss_scale": 8.0} if peer == "jmp" else {}
    with pytest.raises(error, match=rf"{name} (must|is a tensor).*Fix: "):
        getattr(interop, peer).rule(**given | {name: value})


def test_a_word_that_is_none_and_bounds_that_cross_are_refused():
    with pytest.raises(ValueError, match="min_loss_scale <= max_loss_scale"):
        interop.apex.rule(min_loss_scale=2.0**30)
    with pytest.raises(ValueError, match="min_scale <= initial_scale"):
        interop.megatron.rule(min_scale=2.0**40)
    with pytest.raises(ValueError, match="'dynamic', a float, or a dict"):
        interop.mmengine.rule("dynamik")


# ---- Apex's opt levels

LEVELS = {
    "O0": ("params=float32,compute=float32,output=float32", 1.0),
    "O1": ("params=float32,compute=autocast(float16),norms=float32", "dynamic"),
    "O2": ("params=float32,compute=float16,output=float32,norms=float32", "dynamic"),
    "O3": ("params=float16,compute=float16,output=float32,norms=float16", 1.0),
}


@pytest.mark.parametrize("level", LEVELS)
def test_an_opt_level_is_apexs_and_o1_the_default(level):
    policy, rule = interop.apex.initialize(*[level] * (level != "O1"))
    assert policy == ps.policy(LEVELS[level][0])
    assert rule == interop.apex.rule(loss_scale=LEVELS[level][1])


def test_scale_floor_and_ceiling_reach_the_rule():
    assert interop.apex.initialize("O0", loss_scale="dynamic")[1] == interop.apex.rule()
    assert interop.apex.initialize("O1", loss_scale="128.0")[1].init().scale == 128
    rule = interop.apex.initialize("O2", min_loss_scale=4.0, max_loss_scale=16.0)[1]
    assert (rule.init().scale, rule.min_scale) == (16.0, 4.0)
    assert run(rule, [True] * 5).scale == 4


def policy_of(params, compute, output, norms):
    return f"params={params},compute={compute},output={output},norms={norms}"


F16, F32, AUTO = "float16", "float32", "autocast(float16)"


@pytest.mark.parametrize(
    ("level", "overrides", "expected"),
    [
        ("O2", {"keep_batchnorm_fp32": "False"}, policy_of(F32, F16, F32, F16)),
        ("O2", {"master_weights": False}, policy_of(F16, F16, F32, F32)),
        ("O2", {"cast_model_type": torch.bfloat16}, policy_of(F32, "bfloat16", F32, F32)),
        ("O2", {"cast_model_type": False}, F32),
        ("O3", {"keep_batchnorm_fp32": "True"}, policy_of(F16, F16, F32, F32)),
        ("O3", {"master_weights": True}, policy_of(F32, F16, F32, F16)),
        ("O1", {"patch_torch_functions": False}, F32),
        ("O1", {"cast_model_type": torch.float32}, policy_of(F32, AUTO, F32, F32)),
        ("O1", {"cast_model_outputs": torch.float16}, policy_of(F32, AUTO, F16, F32)),
    ],
)
def test_an_override_changes_the_policy(level, overrides, expected):
    assert interop.apex.initialize(level, **overrides)[0] == ps.policy(expected)


def test_disabled_is_float32_without_a_scale_whatever_the_level():
    assert interop.apex.initialize("O2", enabled=False) == (ps.policy("float32"), ps.NoScale())
    assert interop.apex.initialize(None, num_losses=2, enabled=False)[1] == (ps.NoScale(),) * 2


def contradicting(level, name, value):
    return level, {name: value}, RuntimeError, f"{name}={value} contradicts .*{level}.*Fix"


UNKNOWN = r"unknown opt_level .*'O0', 'O1', .*Fix: opt_level='O"
NOT_TAKEN = [
    *({"loss_scale": "dynamik"}, {"keep_batchnorm_fp32": "yes"}, {"master_weights": 1}),
    *({"cast_model_type": "float16"}, {"cast_model_type": torch.int8}, {"num_losses": 0}),
    *({"cast_model_outputs": False}, {"max_loss_scale": None}, {"min_loss_scale": "4"}),
]


@pytest.mark.parametrize(
    ("level", "overrides", "error", "words"),
    [
        *((level, {}, RuntimeError, UNKNOWN) for level in ("o1", None, ["O1"])),
        contradicting("O1", "cast_model_type", torch.float16),
        contradicting("O1", "keep_batchnorm_fp32", False),
        contradicting("O1", "master_weights", True),
        contradicting("O2", "patch_torch_functions", True),
        *(("O2", one, (TypeError, ValueError), "must be|could not convert") for one in NOT_TAKEN),
    ],
)
def test_what_apex_does_not_take_is_refused(level, overrides, error, words):
    with pytest.raises(error, match=words):
        interop.apex.initialize(level, **overrides)


# ---- a job that accumulated


@pytest.mark.parametrize("k", [1, 4])
def test_a_job_that_scaled_a_kth_of_each_loss_goes_on_with_the_same_overflows(k):
    """GradScaler over `loss / k`, k times a step, beside a step over k microbatches; gradients in
    float16, which overflow.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9, growth_interval=2)
    weight = torch.nn.Parameter(torch.tensor(0.0))
    optimizer = torch.optim.SGD([weight], lr=1.0)

    def loss_of(w, g):
        return (w.half() * g).float()

    def theirs(window):
        scale = scaler.get_scale()
        optimizer.zero_grad()
        for g in window:
            scaler.scale(loss_of(weight, g) / k).backward()
        scaler.step(optimizer)
        scaler.update()
        return scale, scaler.get_scale() < scale

    windows = [[torch.tensor(float(3 + (i + j) % 5)).half() for j in range(k)] for i in range(30)]
    for window in windows[:12]:
        theirs(window)
    rule, state = interop.torch_amp.from_state_dict(scaler.state_dict(), accumulated=k)
    assert interop.torch_amp.to_state_dict(rule, state, accumulated=k) == scaler.state_dict()
    params = {"w": weight.detach().clone()}
    ours, step = started(params, lambda p, g: loss_of(p["w"], g), rule=rule)
    ours, skips = ours._replace(scaler=state), 0
    for window in windows[12:]:
        scale, overflow = theirs(window)
        ours, info = step(ours, window)
        assert (info.scale.item() * k, info.found_inf.item()) == (scale, overflow)
        skips += overflow
    assert skips
    torch.testing.assert_close(ours.params["w"], weight.detach())
    assert interop.torch_amp.to_state_dict(rule, ours.scaler, accumulated=k) == scaler.state_dict()


def test_an_accumulated_that_is_no_power_of_two_is_refused():
    rule = interop.torch_amp.rule()
    with pytest.raises(ValueError, match=r"power of two.*=4"):
        interop.torch_amp.to_state_dict(rule, rule.init(), 3)
    with pytest.raises(TypeError, match="whole"):
        interop.torch_amp.from_state_dict(sample("torch_amp"), accumulated=2.0)


def test_mmengines_accumulative_counts_are_taken_over():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10).state_dict()
    d = {"state": {}, "param_groups": [], "loss_scaler": scaler}
    assert interop.mmengine.from_state_dict(d, accumulated=4)[1].scale == 2.0**8
