"""Host numbers, of whatever type they come in: settings of rules, bounds of clipping, weights,
counts.
"""

import decimal
import math
import re
from fractions import Fraction

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from helpers import assert_close, at, same_bits
from hypothesis import given

import purescale as ps
from purescale import interop
from purescale._tree import scalars

HUGE = 10**400
ENORMOUS = 10**5000  # which Python does not even print
SGD = ps.from_torch(torch.optim.SGD, lr=1.0)


def _kind(number):
    return type(number).__name__


def grads():
    return [torch.tensor([3.0, 4.0])]


def stepped(**settings):
    rule = ps.DynamicScale()
    state = ps.init_train_state({"w": torch.ones(2)}, {}, SGD, rule)
    return ps.train_step(
        state,
        grads(),
        loss_fn=lambda p, b, g: ((p["w"] * g).sum(), b),
        optimizer=SGD,
        rule=rule,
        **settings,
    )


CALLS = {
    "clip_by_global_norm": lambda n: ps.clip_by_global_norm(grads(), n),
    "norm_type": lambda n: ps.clip_by_global_norm(grads(), 1.0, n),
    "clip_by_value": lambda n: ps.clip_by_value(grads(), n),
    "unscale_and_step": lambda n: ps.unscale_and_step(
        SGD, at(1.0), grads(), grads(), SGD.init(grads()), max_norm=n, clip_value=n, norm_type=n
    ),
    "train_step": lambda n: stepped(max_norm=n, clip_value=n, norm_type=n),
    "accumulate_grads": lambda n: ps.accumulate_grads(ps.init_accum(grads()), grads(), weight=n),
    "weight_fn": lambda n: stepped(weight_fn=lambda _: n),
}
NUMBERS = [Fraction(1, 2), np.float32(0.5), np.float64(0.5), np.array(0.5), np.float16(0.5)]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("number", NUMBERS, ids=_kind)
def test_a_number_of_any_type_is_the_float_that_it_stands_for(name, number):
    assert same_bits(CALLS[name](number), CALLS[name](0.5))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("number", [3, np.int64(3), np.uint8(3), Fraction(3)], ids=_kind)
def test_a_whole_number_of_any_type_is_the_float_that_it_stands_for(name, number):
    assert same_bits(CALLS[name](number), CALLS[name](3.0))


@pytest.mark.parametrize(
    "name", [name for name in CALLS if name not in ("accumulate_grads", "weight_fn")]
)
@pytest.mark.parametrize("number", [HUGE, Fraction(HUGE, 3), ENORMOUS], ids=_kind)
def test_a_bound_beyond_the_range_of_floats_is_no_bound(name, number):
    assert same_bits(CALLS[name](number), CALLS[name](math.inf))


@pytest.mark.parametrize("name", ["accumulate_grads", "weight_fn"])
@pytest.mark.parametrize(
    "number", [HUGE, -HUGE, ENORMOUS, -ENORMOUS, Fraction(HUGE, 3), math.nan], ids=_kind
)
def test_a_weight_beyond_the_range_of_floats_is_refused_in_words(name, number):
    with pytest.raises(
        ValueError, match=r"a weight is finite and not negative, 2\*\*64 at most.*Fix:"
    ):
        CALLS[name](number)


@pytest.mark.parametrize(
    "number",
    [-HUGE, -ENORMOUS, Fraction(-HUGE, 3), 0, Fraction(0), np.float32(0), math.nan],
    ids=_kind,
)
def test_a_bound_that_is_not_above_zero_is_refused_whatever_its_type(number):
    for name in (
        "clip_by_global_norm",
        "norm_type",
        "clip_by_value",
        "unscale_and_step",
        "train_step",
    ):
        with pytest.raises(ValueError, match="must be above 0"):
            CALLS[name](number)


@pytest.mark.parametrize(
    "value", [True, np.True_, "1", 1j, None, decimal.Decimal("0.5"), [1.0], np.ones(1)], ids=repr
)
def test_what_is_no_real_number_is_refused_in_words(value):
    for name, call in CALLS.items():
        if value is None and name in ("unscale_and_step", "train_step"):
            continue  # leaves clipping out
        words = (
            "a weight is a number"
            if name in ("accumulate_grads", "weight_fn")
            else "must be (a number|above 0, a number)"
        )
        with pytest.raises((TypeError, ValueError), match=words):
            call(value)
    for rule in (ps.DynamicScale, interop.torch_amp.rule, interop.megatron.rule):
        with pytest.raises(TypeError, match="must be a number"):
            rule(growth_factor=value)
        with pytest.raises(TypeError, match="must be a whole number"):
            rule(growth_interval=value)


@pytest.mark.parametrize("tensor", [torch.tensor(True), torch.tensor(1 + 1j)])
def test_a_bound_that_is_a_tensor_is_real(tensor):
    for clip in (ps.clip_by_global_norm, ps.clip_by_value):
        with pytest.raises(TypeError, match=r"must be a real number, got a tensor of torch.*Fix:"):
            clip(grads(), tensor)


BAD = [None, True, "1", "much", 1j, math.nan, math.inf, -HUGE, ENORMOUS, -1, 0.5, 3.0, np.ones(2)]
BAD += [decimal.Decimal("2"), Fraction(1, 3), torch.tensor(1.0), torch.zeros(2), torch.tensor(1j)]
CHECKS = {
    "real": scalars.real,
    "whole": scalars.whole,
    "whole from 5 to 7": lambda name, value: scalars.whole(name, value, least=5, most=7),
    "whole from 5": lambda name, value: scalars.whole(name, value, least=5, most=None),
    "positive": scalars.positive,
    "power of two": scalars.power_of_two,
    "bound": scalars.checked_bound,
}


@pytest.mark.parametrize("check", CHECKS)
def test_what_is_refused_is_told_with_what_was_expected_and_a_cure(check):
    told = []
    for value in BAD:
        try:
            CHECKS[check]("setting", value)
        except (TypeError, ValueError) as error:
            told.append((value, str(error)))
    assert told
    for value, message in told:
        assert re.match(r"setting (must be|is a tensor of .*; expected) ", message), message
        if isinstance(value, torch.Tensor):
            shown = f"shape {tuple(value.shape)}", f"{value.dtype}"
        else:
            shown = (scalars.short_repr(value),)
        assert any(part in message for part in shown), message
        assert re.search(r"Fix: .+\.$", message), message


@given(st.integers() | st.floats(), st.integers(-9, 9), st.integers(0, 9) | st.none())
def test_the_cure_of_a_range_is_a_number_in_it(value, least, span):
    most = None if span is None else least + span
    try:
        assert scalars.whole("n", value, least, most) == value
    except (TypeError, ValueError) as error:
        cure = re.search(r"Fix: .*?(-?\d+)[.,]", str(error))
        if isinstance(error, ValueError):
            assert scalars.whole("n", int(cure.group(1)), least, most) in (least, most)
        else:
            scalars.whole("n", int(cure.group(1)), -(10**400), None)


# ---- settings of rules

POWERS = ("init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale")


@given(st.integers(-20, 20), st.sampled_from([Fraction, np.float32, np.float64, np.array, int]))
def test_a_rule_is_the_same_rule_whatever_type_its_settings_came_in(exponent, kind):
    scale = 2.0 ** abs(exponent) if kind is int else 2.0**exponent
    ours = ps.DynamicScale(
        kind(scale), kind(2), Fraction(1, 2), np.int64(7), kind(scale), kind(scale), np.uint8(3)
    )
    plain = ps.DynamicScale(scale, 2.0, 0.5, 7, scale, scale, 3)
    assert ours == plain
    assert hash(ours) == hash(plain)
    assert repr(ours) == repr(plain)
    state = plain.init()
    for bad in (True, False, True):
        assert same_bits(
            ours.update(state, torch.tensor(bad)), plain.update(state, torch.tensor(bad))
        )
        state = plain.update(state, torch.tensor(bad))
    assert ps.StaticScale(kind(scale)) == ps.StaticScale(scale)


@pytest.mark.parametrize(
    "number",
    [HUGE, ENORMOUS, Fraction(HUGE, 3), -HUGE, Fraction(1, 3)],
    ids=["HUGE", "ENORMOUS", "Fraction", "negative", "third"],
)
def test_a_setting_that_is_no_power_of_two_is_refused_whatever_its_type(number):
    for name in POWERS:
        with pytest.raises(ValueError, match=rf"{name} must be a power of two.*Fix: {name}="):
            ps.DynamicScale(**{name: number})
    with pytest.raises(ValueError, match="scale must be a power of two"):
        ps.StaticScale(number)


@pytest.mark.parametrize("number", [HUGE, ENORMOUS, -ENORMOUS], ids=_kind)
def test_a_count_that_no_step_reaches_is_refused_in_words(number):
    for call in (
        lambda: ps.DynamicScale(growth_interval=number),
        lambda: interop.torch_amp.rule(growth_interval=number),
        lambda: interop.nnabla.rule(N=number),
        lambda: interop.apex.initialize(num_losses=number),
    ):
        with pytest.raises(ValueError, match="must be from"):
            call()
    with pytest.raises(ValueError, match="max_retries must be a whole number"):
        stepped(max_retries=-ENORMOUS)


@pytest.mark.parametrize(
    "call",
    [
        lambda n: interop.torch_amp.rule(init_scale=n),
        lambda n: interop.apex.rule(max_loss_scale=n),
        lambda n: interop.apex.rule(loss_scale=n),
        lambda n: interop.nnabla.rule(scale=n),
        lambda n: interop.deepspeed.rule(min_scale=n),
        lambda n: interop.megatron.rule(initial_scale=n),
        lambda n: interop.flax.rule(minimum_scale=n),
        lambda n: interop.jmp.rule(n),
        lambda n: interop.keras.rule(initial_scale=n),
        lambda n: interop.fairseq.rule(min_loss_scale=n),
        lambda n: interop.mmengine.rule(n),
    ],
)
def test_a_peers_setting_is_a_float_whatever_type_it_came_in_or_refused_in_words(call):
    assert call(Fraction(8)) == call(np.float32(8)) == call(8) == call(8.0)
    for number in (HUGE, ENORMOUS, -ENORMOUS, Fraction(HUGE, 3)):
        with pytest.raises(ValueError, match=r"must be (positive|finite)"):
            call(number)


def test_a_saved_number_beyond_any_float_is_refused_in_words():
    d = torch.amp.GradScaler("cpu").state_dict()
    for number in (HUGE, ENORMOUS):
        with pytest.raises(ValueError, match="the saved scale, scale, is"):
            interop.torch_amp.from_state_dict({**d, "scale": number})
        with pytest.raises(ValueError, match="_growth_tracker must be from"):
            interop.torch_amp.from_state_dict({**d, "_growth_tracker": number})
        with pytest.raises(ValueError, match=r"growth_factor=.* contradicts the state dict"):
            interop.torch_amp.from_state_dict(d, growth_factor=number)


def test_a_window_takes_the_whole_numbers_of_numpy():
    window = ps.accumulation_window(
        np.int64(3), every=np.int32(3), total=np.uint8(4), start=np.int64(0)
    )
    assert window == ps.accumulation_window(3, 3, 4)
    assert [type(part) for part in window] == [bool, bool, int]
    assert ps.accumulation_window(HUGE, 3).should_update is (HUGE % 3 == 2)
    for value in (np.float64(3), Fraction(3), torch.tensor(3), True):
        with pytest.raises(TypeError, match=r"index (must be a whole number|is a tensor)"):
            ps.accumulation_window(value, 3)


@pytest.mark.slow
def test_a_compiled_function_takes_a_bound_as_an_argument():
    compiled = torch.compile(
        lambda g, n: ps.clip_by_global_norm(ps.clip_by_value([g], n), n),
        fullgraph=True,
        backend="eager",
    )
    for bound in (0.5, 2.0, 3):
        assert_close(
            compiled(*grads(), bound),
            ps.clip_by_global_norm(ps.clip_by_value(grads(), bound), bound),
            rtol=1e-6,
            atol=0,
        )
