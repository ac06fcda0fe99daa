"""A narrow state: cast up, stepped, cast down, and nothing else."""

import functools
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from helpers import clone, in_processes, same_bits, stack, tensors, unstack
from hypothesis import given
from hypothesis import strategies as st
from test_master_weights import assert_a_run_resumes
from test_stochastic_rounding import CLASSES, grads_of, made, numbers, params_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import purescale as ps
from purescale._wrappers import wrapper
from purescale.testing import assert_optimizer, assert_pure, assert_single_graph

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
@pytest.mark.parametrize("name", CLASSES)
def test_a_step_is_cast_up_stepped_and_cast_down(name, dtype, way, monkeypatch):
    """Of every class, each slot narrow; donated or not, in one piece and in many."""
    optimizer = made(name)
    narrow = ps.with_state_dtype(optimizer, {"*": dtype})
    params = cut = params_of(WIDE)
    state = pieces = narrow.init(params)
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
            patched.setattr(wrapper, "PIECE_NUMEL", 64)
            cut, pieces = narrow.step(cut, grads, pieces)
            assert same_bits((cut, pieces), expected)


@given(
    name=st.sampled_from(["AdamW", "RMSprop", "NAdam"]),
    dtype=st.sampled_from(NARROW),
    seed=st.integers(0, 2**31),
    scale=st.sampled_from([1.0, 1e-6, 1e6, 1e30]),
    pattern=st.sampled_from(["*_avg", "float32_33", "float32_*", "*avg*.*"]),
)
def test_the_chosen_slots_and_no_others_are_narrow(name, dtype, seed, scale, pattern):
    chosen = {
        "*_avg": lambda _, key: key.endswith("_avg"),
        "float32_33": lambda name, _: name == "float32_33",
        "float32_*": lambda name, _: name.startswith("float32_"),
        "*avg*.*": lambda _, key: "avg" in key,
    }[pattern]
    optimizer = made(name)
    narrow = ps.with_state_dtype(optimizer, {pattern: dtype})
    params = params_of((torch.float32,))
    state = narrow.init(params)
    grads = {n: g * scale for n, g in grads_of(params, seed).items()}

    def dtype_of(name, key):
        return dtype if chosen(name, key) else None

    expected = by_hand(optimizer, params, grads, state, dtype_of)
    assert same_bits(narrow.step(params, grads, state), expected)


def test_of_several_patterns_the_last_one_holds():
    narrow = ps.with_state_dtype(
        made("AdamW"), {"exp_avg*": torch.bfloat16, "exp_avg_sq.*": torch.float16}
    )
    slots = narrow.init({"layer.weight": torch.ones(5)}).slots
    assert [slot["layer.weight"].dtype for slot in slots.values()] == [*NARROW]


def test_a_skipped_step_keeps_everything(way):
    narrow = ps.with_state_dtype(made("AdamW"), MOMENTS)
    params = params_of(WIDE)
    params, state = narrow.step(params, grads_of(params, 0), narrow.init(params))
    state.slots["exp_avg"]["float32_5"].view(torch.int16)[0] = 0x7F81  # a NaN with a payload
    bad = {n: torch.full_like(g, torch.nan) for n, g in grads_of(params, 1).items()}
    for donate in (False, True):
        found = ps.maybe_step(narrow, params, bad, state, torch.tensor(True), donate=donate)
        assert same_bits(found, (params, state))


def test_a_donated_step_is_made_in_place(way):
    narrow = ps.with_state_dtype(made("AdamW"), MOMENTS)
    params = params_of(WIDE)
    state, grads = narrow.init(params), grads_of(params, 0)
    before = [leaf.data_ptr() for leaf in tensors((params, state.slots))]
    params, state = ps.maybe_step(narrow, params, grads, state, False, donate=True)
    assert before == [leaf.data_ptr() for leaf in tensors((params, state.slots))]


def test_what_is_finite_stays_finite():
    narrow = ps.with_state_dtype(made("Adagrad"), {"sum": torch.float16})
    params, grads = {"w": torch.ones(33)}, {"w": torch.full((33,), 1e4)}
    _, state = narrow.step(params, grads, narrow.init(params))
    assert (state.slots["sum"]["w"] == torch.finfo(torch.float16).max).all()


# ---- with others ---------------------------------------------------------------------------------


def test_masters_inside_or_outside_have_the_same_bits(way):
    """Of the same step: masters are stepped, whatever the state is kept in."""
    outside = ps.with_state_dtype(ps.with_master_weights(made("AdamW")), MOMENTS)
    inside = ps.with_master_weights(ps.with_state_dtype(made("AdamW"), MOMENTS))
    params = params_of()
    wide = {n: p.float() if p.dtype in NARROW else p for n, p in params.items()}
    bare = ps.with_state_dtype(made("AdamW"), MOMENTS)
    states = [outside.init(params), inside.init(params), bare.init(wide)]
    both = [params, params]
    for index in range(3):
        grads = grads_of(params, 100 * index)
        for i, each in enumerate((outside, inside)):
            both[i], states[i] = each.step(both[i], grads, states[i])
        wide, states[2] = bare.step(
            wide, {n: g.to(wide[n].dtype) for n, g in grads.items()}, states[2]
        )
        assert same_bits((both[0], states[0]), (both[1], states[1]))
        assert same_bits(ps.master_weights(both[0], states[0]), wide)
        assert same_bits(states[0].inner, states[2])


@pytest.mark.parametrize("between", [lambda inside: inside, ps.with_master_weights])
def test_one_around_another_equals_one_with_the_dtypes_of_both(between, way):
    first, second = {"exp_avg": torch.bfloat16}, {"exp_avg_sq": torch.float16}
    around = ps.with_state_dtype(between(ps.with_state_dtype(made("AdamW"), first)), second)
    alone = ps.with_state_dtype(between(made("AdamW")), {**first, **second})
    params = params_of(WIDE)
    states, both = [around.init(params), alone.init(params)], [params, params]
    for index in range(3):
        for i, each in enumerate((around, alone)):
            both[i], states[i] = each.step(both[i], grads_of(params, index), states[i])
        assert same_bits((both[0], states[0]), (both[1], states[1]))


@pytest.mark.slow
def test_one_around_another_is_one_graph():
    inside = ps.with_state_dtype(made("SGD"), {"*": torch.bfloat16})
    around = ps.with_state_dtype(inside, {"momentum*": torch.float16})
    params = params_of(WIDE)
    state, grads = around.init(params), grads_of(params, 0)
    (found,) = assert_single_graph(around.step, (params, grads, state))
    torch.testing.assert_close(found, around.step(params, grads, state), rtol=2.0**-7, atol=1e-7)


def test_with_masters_adamw_takes_8_bytes():
    optimizer = ps.with_state_dtype(ps.with_master_weights(made("AdamW")), MOMENTS)
    params = {"w": torch.zeros(1000, dtype=torch.bfloat16)}
    state = optimizer.init(params)
    kept = tensors((params, state.rest, state.inner.slots))
    assert sum(leaf.nbytes for leaf in kept if leaf.ndim) == 8 * 1000


def test_rounding_by_chance_goes_around_it():
    bare = ps.with_state_dtype(made("AdamW"), MOMENTS)
    optimizer = ps.with_stochastic_rounding(bare, seed=11)
    params = params_of((torch.bfloat16,))
    state, grads = optimizer.init(params), grads_of(params, 0)
    wide = {n: p.float() for n, p in params.items()}
    stepped, inner = bare.step(wide, {n: g.float() for n, g in grads.items()}, bare.init(wide))
    found, state = optimizer.step(params, grads, state)
    assert same_bits(found, ps.stochastic_round(stepped, torch.bfloat16, seed=11))
    assert same_bits(state.inner, inner)


class Moments(NamedTuple):
    count: Any
    mu: Any


def momentum():
    """An optax-style pair with a count, and an average in the dtype of the parameters."""

    def init(params):
        return Moments(torch.zeros(()), {n: torch.zeros_like(p) for n, p in params.items()})

    def update(grads, state, params):
        mu = {n: 0.9 * m + grads[n] for n, m in state.mu.items()}
        return {n: -0.1 * m for n, m in mu.items()}, Moments(state.count + 1, mu)

    return ps.from_transformation((init, update))


def test_a_field_of_another_state_is_narrow():
    narrow, params = ps.with_state_dtype(momentum(), {"mu": torch.bfloat16}), params_of(WIDE)
    state = narrow.init(params)
    assert {leaf.dtype for leaf in state.mu.values()} == {torch.bfloat16}
    for index in range(3):
        grads = grads_of(params, index)
        wide = Moments(state.count, {n: m.to(params[n].dtype) for n, m in state.mu.items()})
        expected, stepped = momentum().step(params, grads, wide)
        params, state = assert_pure(narrow.step, params, grads, state)
        assert same_bits(params, expected)
        assert same_bits(state.mu, {n: m.bfloat16() for n, m in stepped.mu.items()})
        assert state.count == index + 1


def test_settings_in_the_state_stay_wide():
    narrow = ps.with_state_dtype(made("AdamW", in_state=("lr", "betas")), {"*": torch.bfloat16})
    params = params_of(WIDE)
    params, state = narrow.step(params, grads_of(params, 0), narrow.init(params))
    assert {leaf.dtype for leaf in tensors((state.lr, state.hyper))} == {torch.float32}


# ---- the four ways -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_compiled_is_one_graph(name):
    """The narrow bits to one step of their dtype: a compiled AdamW differs by 1e-7 before it."""
    narrow, params = ps.with_state_dtype(made(name), {"*": torch.bfloat16}), params_of(WIDE)
    calls = [(params, grads_of(params, 0), narrow.init(params))]
    for index in range(2):
        new, state = narrow.step(*calls[-1])
        calls.append((new, grads_of(params, index + 1), state))
    for call, (new, state) in zip(calls, assert_single_graph(narrow.step, *calls), strict=True):
        expected = narrow.step(*call)
        torch.testing.assert_close(new, expected[0], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(state.slots, expected[1].slots, rtol=2.0**-7, atol=1e-7)


@pytest.mark.slow
def test_a_compiled_transformation_is_narrow_too():
    narrow, params = ps.with_state_dtype(momentum(), {"mu": torch.bfloat16}), params_of(WIDE)
    state, grads = narrow.init(params), grads_of(params, 0)
    (found,) = assert_single_graph(narrow.step, (params, grads, state))
    assert same_bits(found, narrow.step(params, grads, state))


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_mapped_equals_a_loop(name):
    narrow = ps.with_state_dtype(made(name), {"*": torch.bfloat16})
    members = []
    for seed in range(3):
        params = {n: p + seed for n, p in params_of(WIDE).items()}
        params, state = narrow.step(params, grads_of(params, seed), narrow.init(params))
        members.append((params, grads_of(params, seed + 9), state))
    flags = torch.tensor([False, True, False])
    stacked = torch.vmap(functools.partial(ps.maybe_step, narrow))(*stack(members), flags)
    for index, (params, grads, state) in enumerate(members):
        one = ps.maybe_step(narrow, params, grads, state, flags[index])
        pair = unstack(stacked, index)
        if flags[index]:
            assert same_bits(pair, (params, state))
        torch.testing.assert_close(pair[0], one[0], rtol=1e-5, atol=1e-6)
        assert [x.dtype for x in tensors(pair)] == [x.dtype for x in tensors(one)]
        torch.testing.assert_close(tensors(pair[1]), tensors(one[1]), rtol=2.0**-7, atol=1e-6)


def test_a_whole_train_step_saved_and_resumed(tmp_path):
    narrow = ps.with_state_dtype(made("AdamW"), MOMENTS)
    assert_a_run_resumes(narrow, [torch.float32] * 3, tmp_path)


@pytest.mark.slow
def test_the_battery_for_optimizers_passes():
    narrow = ps.with_state_dtype(made("AdamW"), MOMENTS)
    assert_optimizer(narrow, params=params_of((torch.float32,)))
    halves = params_of((torch.bfloat16,))
    masters = ps.with_state_dtype(ps.with_master_weights(made("SGD")), {"*": torch.bfloat16})
    assert_optimizer(masters, params=halves)


# ---- refused -------------------------------------------------------------------------------------


def test_names_that_match_nothing_are_refused():
    params = {"layer.weight": torch.ones(5)}
    for pattern, said in (
        ("exp_average", r"'exp_average' matches nothing in.*slots: exp_avg, exp_avg_sq; step"),
        ("mu_product", r"'mu_product' matches only what is never cast in"),
        ("layer.weight.exp_avg", r"matches nothing in.* Fix: 'exp_avg.layer.weight'"),
        ("*.weight.exp_avg_sq", r"matches nothing in.* Fix: 'exp_avg_sq.\*.weight'"),
    ):
        name = "NAdam" if pattern == "mu_product" else "AdamW"
        narrow = ps.with_state_dtype(made(name), {**MOMENTS, pattern: torch.bfloat16})
        with pytest.raises(ValueError, match=said):
            narrow.init(params)
    with pytest.raises(ValueError, match=r"It has the slots: nothing;"):
        ps.with_state_dtype(made("SGD", momentum=0), {"*": torch.bfloat16}).init(params)


def test_dtypes_that_are_wider_are_refused():
    narrow = ps.with_state_dtype(made("AdamW"), {"exp_avg": torch.float32})
    with pytest.raises(
        ValueError, match=r"exp_avg.w is made in torch.bfloat16, and torch.float32 is"
    ):
        narrow.init({"w": torch.ones(5, dtype=torch.bfloat16)})
    assert narrow.init({"w": torch.ones(5)}).slots["exp_avg"]["w"].dtype is torch.float32
    same_size = ps.with_state_dtype(made("AdamW"), {"exp_avg": torch.bfloat16})
    params = {"w": torch.ones(5, dtype=torch.float16)}
    state = same_size.init(params)
    assert same_bits(state, made("AdamW").init(params))
    assert same_bits(
        same_size.step(params, {"w": torch.ones(5)}, state),
        made("AdamW").step(params, {"w": torch.ones(5)}, state),
    )


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
    another = ps.with_state_dtype(momentum(), {"mu": torch.bfloat16})
    with pytest.raises(ValueError, match=r"opt_state has 1 leaves.*makes 2"):
        another.step(params, params, {"mu": torch.ones(5)})
    with pytest.raises(TypeError, match=r"expected an object with `init`.*Fix: from_torch"):
        ps.with_state_dtype(torch.optim.AdamW, MOMENTS)


class MakesItsState(torch.optim.SGD):
    def step(self):
        super().step()


def test_a_class_that_makes_its_state_in_its_first_step_is_refused():
    own = ps.from_torch(MakesItsState, lr=0.1, momentum=0.9)
    both = ps.partition({"own": own, "adamw": made("AdamW")}, lambda name, param: "adamw")
    for optimizer in (own, both, ps.with_master_weights(both)):
        with pytest.raises(ValueError, match=r"in its first step\. Fix: a class of torch.optim"):
            ps.with_state_dtype(optimizer, {"*": torch.bfloat16})


def test_a_narrow_state_is_refused_by_the_optimizer_inside_after_steps_around_it():
    """What was seen of the narrow tensors must not answer for the wide ones."""
    inner, params = made("AdamW"), params_of((torch.float32,))
    narrow = ps.with_state_dtype(inner, MOMENTS)
    grads, state = grads_of(params, 0), narrow.init(params)
    for _ in range(2):
        narrow.step(params, grads, state)
        with pytest.raises(ValueError, match=r"exp_avg of float32_5 is torch.bfloat16"):
            inner.step(params, grads, state)


# ---- shards --------------------------------------------------------------------------------------


def _shards_are_narrow_as_the_whole_is(rank):
    mesh = init_device_mesh("cpu", (2,))
    whole = {"rows": numbers((5, 3)), "columns": numbers((3, 7)), "copied": numbers((4,))}
    on = {"rows": Shard(0), "columns": Shard(1), "copied": Replicate()}
    spread = {n: distribute_tensor(x, mesh, [on[n]], src_data_rank=None) for n, x in whole.items()}
    narrow = ps.with_state_dtype(made("AdamW"), MOMENTS)
    one, many = (whole, narrow.init(whole)), (spread, narrow.init(spread))
    for _ in range(2):
        one = narrow.step(one[0], whole, one[1])
        many = ps.maybe_step(narrow, many[0], spread, many[1], False, donate=True)
        assert same_bits({n: p.full_tensor() for n, p in many[0].items()}, one[0])
        for key, slot in many[1].slots.items():
            assert same_bits({n: v.full_tensor() for n, v in slot.items()}, one[1].slots[key])
    assert dist.get_rank() == rank


@pytest.mark.slow
def test_shards_are_narrow_as_the_whole_is():
    in_processes(_shards_are_narrow_as_the_whole_is)


def test_a_state_that_is_one_tensor_is_kept_narrow():
    """A tensor has a method `inner`, which is no state within."""

    def update(grads, state, params):
        state = 0.5 * state + grads["w"]
        return {"w": -state}, state

    sums = ps.from_transformation((lambda params: torch.zeros_like(params["w"]), update))
    optimizer = ps.with_state_dtype(sums, {"*": torch.bfloat16})
    params = {"w": torch.ones(3)}
    state = optimizer.init(params)
    assert state.dtype is torch.bfloat16
    params, state = optimizer.step(params, {"w": torch.ones(3)}, state)
    assert same_bits((params["w"], state), (torch.zeros(3), torch.ones(3).bfloat16()))


def test_of_several_names_that_match_nothing_the_first_is_told():
    names = [f"absent_{index}" for index in range(16)]
    optimizer = ps.with_state_dtype(
        ps.from_torch(torch.optim.AdamW, lr=1e-3), dict.fromkeys(names, torch.bfloat16)
    )
    with pytest.raises(ValueError, match=r"dtypes: 'absent_0' matches nothing"):
        optimizer.init({"w": torch.ones(3)})
