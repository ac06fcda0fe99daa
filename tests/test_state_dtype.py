"""A narrow state: cast up, stepped, cast down, and nothing else."""

import pytest
import torch
from helpers import clone, same_bits, tensors
from test_stochastic_rounding import SOME, grads_of, made, params_of
from test_user_class_step import Lion

import purescale as ps
from purescale._wrappers import pieces
from purescale.testing import assert_pure

WIDE = (torch.float32, torch.float64)
NARROW = (torch.bfloat16, torch.float16)
MOMENTS = {"exp_avg*": torch.bfloat16}


def cast(state, dtype_of):
    """An OptState with its slots in other dtypes, by torch's own casts."""

    def one(name, key, value):
        dtype = dtype_of(name, key)
        if dtype is None or value.ndim == 0 or value.dtype is dtype:
            return value
        if dtype.itemsize < value.dtype.itemsize:  # what is finite stays finite
            limit = torch.finfo(dtype).max
            value = torch.where(value.isfinite(), value.clamp(-limit, limit), value)
        return value.to(dtype)

    slots = {k: {n: one(n, k, v) for n, v in slot.items()} for k, slot in state.slots.items()}
    return state._replace(slots=slots)


def up(state, params):
    return cast(state, lambda name, key: params[name].dtype)


def by_hand(optimizer, params, grads, state, dtype_of):
    params, wide = optimizer.step(params, grads, up(state, params))
    return params, cast(wide, dtype_of)


# ---- the step ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("name", SOME)
def test_a_step_is_cast_up_stepped_and_cast_down(name, dtype, way, monkeypatch):
    """Of every class, each slot narrow; donated or not, in one piece and in many."""
    optimizer = made(name)
    narrow, in_pieces = (ps.with_state_dtype(optimizer, {"*": dtype}) for _ in range(2))
    params = cut = params_of(WIDE)
    state = cut_state = narrow.init(params)
    assert same_bits(state, cast(optimizer.init(params), lambda *_: dtype))
    expected = params, state
    for index in range(3):
        grads = grads_of(params, 100 * index)
        expected = by_hand(optimizer, expected[0], grads, expected[1], lambda *_: dtype)
        given = clone((params, state))
        donated = ps.maybe_step(narrow, given[0], grads, given[1], False, donate=True)
        params, state = assert_pure(narrow.step, params, grads, state)
        assert same_bits((params, state), expected)
        assert same_bits(donated, expected)
        with monkeypatch.context() as patched:
            patched.setattr(pieces, "PIECE_NUMEL", 64)
            cut, cut_state = in_pieces.step(cut, grads, cut_state)
            assert same_bits((cut, cut_state), expected)


@pytest.mark.parametrize(
    ("pattern", "chosen"),
    [
        ("*_avg", lambda _, key: key.endswith("_avg")),
        ("float32_33", lambda name, _: name == "float32_33"),
        ("*avg*.*", lambda _, key: "avg" in key),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e30])
def test_the_chosen_slots_and_no_others_are_narrow(pattern, chosen, scale):
    optimizer = made("NAdam")
    narrow = ps.with_state_dtype(optimizer, {pattern: torch.float16})
    params = params_of((torch.float32,))
    state = narrow.init(params)
    grads = {n: g * scale for n, g in grads_of(params, 7).items()}

    def dtype_of(name, key):
        return torch.float16 if chosen(name, key) else None

    expected = by_hand(optimizer, params, grads, state, dtype_of)
    assert same_bits(narrow.step(params, grads, state), expected)


def test_of_several_patterns_the_last_one_holds():
    narrow = ps.with_state_dtype(
        made("AdamW"), {"exp_avg*": torch.bfloat16, "exp_avg_sq.*": torch.float16}
    )
    slots = narrow.init({"layer.weight": torch.ones(5)}).slots
    assert [slot["layer.weight"].dtype for slot in slots.values()] == [*NARROW]


# ---- with others ---------------------------------------------------------------------------------


def test_masters_inside_or_outside_have_the_same_bits(way):
    """Of the same step: masters are stepped, whatever the state is kept in."""
    outside = ps.with_state_dtype(ps.with_master_weights(made("AdamW")), MOMENTS)
    inside = ps.with_master_weights(ps.with_state_dtype(made("AdamW"), MOMENTS))
    params = params_of()
    wide = {n: p.float() if p.dtype in NARROW else p for n, p in params.items()}
    bare = ps.with_state_dtype(made("AdamW"), MOMENTS)
    one, other = ((params, each.init(params)) for each in (outside, inside))
    state = bare.init(wide)
    for index in range(3):
        grads = grads_of(params, 100 * index)
        one, other = outside.step(one[0], grads, one[1]), inside.step(other[0], grads, other[1])
        wide, state = bare.step(wide, {n: g.to(wide[n].dtype) for n, g in grads.items()}, state)
        assert same_bits(one, other)
        assert same_bits((ps.master_weights(*one), one[1].inner), (wide, state))


@pytest.mark.parametrize("between", [lambda inside: inside, ps.with_master_weights])
def test_one_around_another_equals_one_with_the_dtypes_of_both(between, way):
    first, second = {"exp_avg": torch.bfloat16}, {"exp_avg_sq": torch.float16}
    around = ps.with_state_dtype(between(ps.with_state_dtype(made("AdamW"), first)), second)
    alone = ps.with_state_dtype(between(made("AdamW")), {**first, **second})
    params = params_of(WIDE)
    one, other = ((params, each.init(params)) for each in (around, alone))
    for index in range(3):
        grads = grads_of(params, index)
        one, other = around.step(one[0], grads, one[1]), alone.step(other[0], grads, other[1])
        assert same_bits(one, other)


def test_with_masters_adamw_takes_8_bytes():
    optimizer = ps.with_state_dtype(ps.with_master_weights(made("AdamW")), MOMENTS)
    params = {"w": torch.zeros(1000, dtype=torch.bfloat16)}
    state = optimizer.init(params)
    kept = tensors((params, state.rest, state.inner.slots))
    assert sum(leaf.nbytes for leaf in kept if leaf.ndim) == 8 * 1000


def test_settings_in_the_state_stay_wide():
    narrow = ps.with_state_dtype(made("AdamW", in_state=("lr", "betas")), {"*": torch.bfloat16})
    params = params_of(WIDE)
    params, state = narrow.step(params, grads_of(params, 0), narrow.init(params))
    assert {leaf.dtype for leaf in tensors((state.lr, state.hyper))} == {torch.float32}


# ---- refused -------------------------------------------------------------------------------------


def test_names_that_match_nothing_are_refused():
    params = {"layer.weight": torch.ones(5)}
    for pattern, name in (("exp_average", "AdamW"), ("mu_product", "NAdam")):  # a 0-d tensor
        narrow = ps.with_state_dtype(made(name), {**MOMENTS, pattern: torch.bfloat16})
        with pytest.raises(ValueError, match=rf"'{pattern}' matches nothing.*slots: exp_avg, exp_"):
            narrow.init(params)
    with pytest.raises(ValueError, match=r"It has the slots: nothing"):
        ps.with_state_dtype(made("SGD", momentum=0), {"*": torch.bfloat16}).init(params)


def test_dtypes_that_are_wider_are_refused():
    narrow = ps.with_state_dtype(made("AdamW"), {"exp_avg": torch.float32})
    words = r"exp_avg.w is made in torch.bfloat16, and torch.float32 is"
    with pytest.raises(ValueError, match=words):
        narrow.init({"w": torch.ones(5, dtype=torch.bfloat16)})
    assert narrow.init({"w": torch.ones(5)}).slots["exp_avg"]["w"].dtype is torch.float32
    same_size = ps.with_state_dtype(made("AdamW"), {"exp_avg": torch.bfloat16})
    params = {"w": torch.ones(5, dtype=torch.float16)}
    state, grads = same_size.init(params), {"w": torch.ones(5)}
    assert same_bits(state, made("AdamW").init(params))
    expected = made("AdamW").step(params, grads, state)
    assert same_bits(same_size.step(params, grads, state), expected)


@pytest.mark.parametrize(
    "dtypes", [{}, {"exp_avg": torch.int16}, {"exp_avg": torch.float8_e4m3fn}, torch.bfloat16, None]
)
def test_what_are_no_dtypes_by_name_is_refused(dtypes):
    with pytest.raises(TypeError, match=r"expected names of slots.*Fix: {\"exp_avg\":"):
        ps.with_state_dtype(made("AdamW"), dtypes)


def test_the_state_of_another_optimizer_is_refused(way):
    narrow, params = ps.with_state_dtype(made("AdamW"), MOMENTS), {"w": torch.ones(5)}
    wide = made("AdamW").init(params)
    with pytest.raises(TypeError, match=r"exp_avg.w is torch.float32, expected torch.bfloat16"):
        narrow.step(params, params, wide)
    other = ps.with_state_dtype(made("AdamW"), {"exp_avg": torch.bfloat16})
    with pytest.raises(TypeError, match=r"exp_avg_sq.w is torch.bfloat16, expected torch.float32"):
        other.step(params, params, narrow.init(params))
    with pytest.raises(TypeError, match=r"opt_state is dict"):
        narrow.step(params, params, {"mu": torch.ones(5)})
    with pytest.raises(TypeError, match=r"expected an object with `init`.*Fix: from_torch"):
        ps.with_state_dtype(torch.optim.AdamW, MOMENTS)


def test_a_state_whose_slots_nobody_knows_at_init_is_refused():
    own, adamw = ps.from_torch(Lion), made("AdamW")
    pair = ps.from_transformation((lambda params: torch.zeros(()), lambda g, s, p: (g, s)))
    label = lambda name, param: "ab"[name.endswith("33")]  # noqa: E731
    params = params_of((torch.float32,))
    for optimizer in (
        *(own, pair, ps.with_master_weights(own)),
        ps.partition({"a": own, "b": adamw}, label),
        ps.partition({"a": adamw, "b": ps.with_master_weights(adamw)}, label),
    ):
        with pytest.raises(ValueError, match=r"not that of a class of torch.optim.*each part"):
            ps.with_state_dtype(optimizer, {"*": torch.bfloat16}).init(params)


def test_a_narrow_state_is_refused_by_the_optimizer_inside_after_steps_around_it():
    """What was seen of the narrow tensors must not answer for the wide ones."""
    inner, params = made("AdamW"), params_of((torch.float32,))
    narrow = ps.with_state_dtype(inner, MOMENTS)
    grads, state = grads_of(params, 0), narrow.init(params)
    for _ in range(2):
        narrow.step(params, grads, state)
        with pytest.raises(ValueError, match=r"exp_avg of float32_5 is torch.bfloat16"):
            inner.step(params, grads, state)
