"""The Hypothesis strategies reach the values that they promise."""

import hypothesis.strategies as st
import pytest
import torch
from helpers import examples
from hypothesis import find, given, settings

import purescale as ps
from purescale._tree import pytree as _tree
from purescale.testing import (
    assert_pure,
    grad_trees,
    overflow_runs,
    params_and_grads,
    same_bits,
    scale_rules,
    scaler_states,
)


@pytest.mark.parametrize("kind", [None, ps.HeadroomScale])
@given(data=st.data())
@examples(30)
def test_rules_and_their_states_can_be_drawn(kind, data):
    rule = data.draw(scale_rules(kind))
    state = data.draw(scaler_states(rule))
    assert type(state) is type(rule.init())
    amax = [] if kind is None else [torch.tensor(data.draw(st.floats(0, 2.0**100)))]
    new = rule.update(state, torch.tensor(data.draw(st.booleans())), *amax)
    assert getattr(rule, "min_scale", 0) <= new.scale <= getattr(rule, "max_scale", 2.0**24)
    assert rule.init().scale > 0 < new.scale


@pytest.mark.parametrize("kind", [ps.SpikeGuard, "DynamicScale"])
def test_a_kind_of_rule_that_is_not_one_of_purescales_is_refused(kind):
    with pytest.raises(ValueError, match=r"expected one of DynamicScale,.*HeadroomScale.*Fix: "):
        scale_rules(kind)


REACHED = {
    "inf": lambda t: t.isinf().any(),
    "nan": lambda t: t.isnan().any(),
    "subnormal": lambda t: ((t != 0) & (t.abs() < torch.finfo(t.dtype).tiny)).any(),
    "negative zero": lambda t: ((t == 0) & t.signbit()).any(),
    "half": lambda t: t.dtype is torch.float16,
    "bfloat16": lambda t: t.dtype is torch.bfloat16,
    "float64": lambda t: t.dtype is torch.float64,
    "0-d": lambda t: t.ndim == 0,
    "empty": lambda t: t.numel() == 0,
}


@pytest.mark.slow
@pytest.mark.parametrize("what", [*REACHED, "none"])
def test_gradients_reach_every_corner(what):
    def reached(tree):
        if what == "none":
            return any(leaf is None for leaf in _tree.flatten(tree)[0])
        return any(bool(REACHED[what](leaf)) for leaf in _tree.tensors(tree))

    assert reached(find(grad_trees(), reached, settings=settings(max_examples=2000, database=None)))


LIKE = {
    "a": [torch.ones(2, 3).half(), None],
    "b": (torch.tensor(1.0), torch.ones(0)),
    "c": torch.ones(2) * 1j,
}


@given(grad_trees(like=LIKE))
@examples(10)
def test_gradients_like_a_tree_have_its_structure_shapes_and_dtypes(grads):
    assert _tree.dotted_names(grads) == _tree.dotted_names(LIKE)
    for ours, theirs in zip(_tree.tensors(grads), _tree.tensors(LIKE), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)


@given(params_and_grads(), st.booleans())
@examples(20)
def test_parameters_and_gradients_make_a_step_that_is_pure(drawn, bad):
    params, grads = drawn
    sgd = ps.from_torch(torch.optim.SGD, lr=0.5, foreach=False)
    stepped, _ = assert_pure(ps.maybe_step, sgd, params, grads, sgd.init(params), torch.tensor(bad))
    if bad:
        assert same_bits(stepped, params)


@given(overflow_runs(), overflow_runs(17))
@examples(20)
def test_runs_are_flags_of_the_size_asked_for(any_size, seventeen):
    assert 1 <= len(any_size) <= 40
    assert len(seventeen) == 17
    assert {type(bad) for bad in any_size + seventeen} == {bool}
