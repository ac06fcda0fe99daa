"""Host numbers, of whatever type they come in: settings of rules, bounds of clipping, weights,
counts.
"""

import decimal
import math
from fractions import Fraction

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from helpers import at, same_bits
from hypothesis import given

import purescale as ps
from purescale import interop

SGD = ps.from_torch(torch.optim.SGD, lr=1.0)


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
HALVES = [Fraction(1, 2), np.float32(0.5), np.array(0.5), np.float16(0.5)]


@pytest.mark.parametrize("name", CALLS)
def test_a_number_of_any_type_is_the_float_that_it_stands_for(name):
    for number in [*HALVES, 3, np.int64(3), np.uint8(3), Fraction(3)]:
        assert same_bits(CALLS[name](number), CALLS[name](float(number))), repr(number)


@pytest.mark.parametrize("number", [-3, Fraction(-1, 3), 0, np.float32(0), math.nan])
def test_a_bound_that_is_not_above_zero_is_refused_whatever_its_type(number):
    for name in CALLS.keys() - {"accumulate_grads", "weight_fn"}:
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


# ---- settings of rules


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
