"""Masters: the bits of a run in float32, whatever the parameters are."""

import functools
from typing import Any, NamedTuple

import pytest
import torch
from helpers import clone, same_bits
from test_stochastic_rounding import HALF, SOME, grads_of, like, made, numbers, params_of, wide_of
from torch.utils._pytree import tree_map

import purescale as ps
from purescale._torch import tracing
from purescale._wrappers import pieces
from purescale.testing import assert_pure


def channels_last(leaf):
    return leaf.contiguous(memory_format=torch.channels_last) if leaf.ndim == 4 else leaf


# ---- split and join ------------------------------------------------------------------------------


def patterns():
    """Every kind of float32: any bits, subnormal, the largest, halfway, infinite."""
    generator = torch.Generator().manual_seed(0)
    some = torch.randint(-(2**31), 2**31, (200000,), generator=generator)
    edges = [0, 1, 0x7FFF, 0x8000, 0x8001, 0x7FFFFF, 0x800000, 0x3F808000, 0x3F80FFFF, 0x7F7F7FFF]
    edges += [0x7F7F8000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x7FC00001, 0x7FFF7FFF]
    both = torch.tensor([*edges, *[edge - 2**31 for edge in edges]])
    return torch.cat([both, some]).to(torch.int32).view(torch.float32)


def test_split_masters_join_to_the_same_bits():
    masters = patterns()
    params, rest = assert_pure(ps.split_masters, {"w": masters, "none": None})
    assert (params["w"].dtype, rest["w"].dtype) == (torch.bfloat16, torch.int16)
    joined = assert_pure(ps.join_masters, params, rest)
    assert joined["none"] is None
    carries = (masters.view(torch.int32) & 0x7FFFFFFF) > 0x7FFF7FFF
    assert torch.equal(joined["w"].view(torch.int32)[~carries], masters.view(torch.int32)[~carries])
    with tracing.as_on_an_accelerator():
        assert same_bits(ps.split_masters({"w": masters, "none": None}), (params, rest))


def test_a_nan_of_arithmetic_shows_as_nan():
    """The NaN of a GPU is 0x7fffffff, which would round up into the sign."""
    quiet = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000, 0x7FFF8000, -0x400000], dtype=torch.int64)
    for nans in (quiet.to(torch.int32).view(torch.float32), torch.full((2,), torch.nan)):
        params, rest = ps.split_masters(nans)
        assert params.isnan().all()
        assert ps.join_masters(params, rest).isnan().all()


def test_the_upper_half_is_the_nearest_number():
    masters = patterns()
    masters = masters[masters.isfinite()]
    params, _ = ps.split_masters(masters)
    bits = masters.view(torch.int32)
    away = (bits & 0xFFFF) == 0x8000  # ties: torch rounds them to even
    assert torch.equal(params[~away], masters[~away].bfloat16())
    assert (params[away].float().abs() > masters[away].abs()).all()


@pytest.mark.slow
def test_compiled_and_mapped_they_have_the_same_bits():
    masters = patterns()[:999]
    expected = ps.split_masters(masters)

    def both(masters):
        halves = ps.split_masters(masters)
        return halves, ps.join_masters(*halves)

    found, joined = torch.compile(both, fullgraph=True)(masters)
    assert same_bits(found, expected)
    assert same_bits(joined, ps.join_masters(*expected))
    assert same_bits(torch.vmap(both)(masters.reshape(3, 333))[0][0].reshape(-1), expected[0])


def test_what_is_no_master_and_no_half_is_refused():
    with pytest.raises(TypeError, match=r"masters\['w'\] is torch.bfloat16 \(2,\); a master is"):
        ps.split_masters({"w": torch.ones(2, dtype=torch.bfloat16)})
    params, rest = ps.split_masters({"w": torch.ones(2)})
    words = r"params\['w'\] is torch.float32.*Fix: what `split_masters"
    with pytest.raises(TypeError, match=words):
        ps.join_masters({"w": torch.ones(2)}, rest)
    with pytest.raises(TypeError, match=r"rest there torch.int16 \(1,\)"):
        ps.join_masters(params, {"w": rest["w"][:1]})


# ---- steps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOME)
def test_masters_have_the_bits_of_a_run_in_float32(name, way, monkeypatch):
    """Parameters of every dtype, donated or not, in one piece and in many."""
    optimizer = made(name)
    wrapped, in_pieces = (ps.with_master_weights(optimizer) for _ in range(2))  # with plans of each
    params = params_of()
    wide = wide_of(params)
    state, inner = wrapped.init(params), optimizer.init(wide)
    donated = cut = (params, state)
    for index in range(3):
        grads = grads_of(params, 100 * index)
        wide, inner = optimizer.step(wide, like(grads, wide), inner)
        params, state = assert_pure(wrapped.step, params, grads, state)
        assert same_bits(ps.master_weights(params, state), wide)
        assert same_bits(state.inner, inner)
        donated = ps.maybe_step(wrapped, *clone(donated)[:1], grads, clone(donated)[1], False, True)
        assert same_bits(donated, (params, state))
        with monkeypatch.context() as patched:
            patched.setattr(pieces, "PIECE_NUMEL", 64)
            cut = in_pieces.step(cut[0], grads, cut[1])
            assert same_bits(cut, (params, state))
    for key, p in params.items():
        if p.dtype is torch.float16:
            assert torch.equal(p, wide[key].half())
        elif p.dtype not in HALF:
            assert same_bits(p, wide[key])
            assert state.rest[key] == ()


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_scaled_step_in_one_piece_and_in_many_has_those_bits_too(name, way, monkeypatch):
    optimizer, scaler = made(name), ps.StaticScale(4.0).init()
    wrapped = ps.with_master_weights(optimizer)
    params = params_of((torch.bfloat16,))
    wide = wide_of(params)
    state, inner = wrapped.init(params), optimizer.init(wide)
    for index in range(3):
        grads = {n: 4 * g for n, g in grads_of(params, 100 * index).items()}
        bounds = {"clip_value": 0.3} if index else {}
        if index == 2:
            monkeypatch.setattr(pieces, "PIECE_NUMEL", 64)
            wrapped = ps.with_master_weights(optimizer)
        expected = ps.unscale_and_step(optimizer, scaler, wide, like(grads, wide), inner, **bounds)
        wide, inner = expected[:2]
        found = ps.unscale_and_step(
            wrapped, scaler, params, clone(grads), state, donate=index == 1, **bounds
        )
        params, state = found[:2]
        assert same_bits(ps.master_weights(params, state), wide)


@pytest.mark.parametrize("wrap", [ps.with_master_weights, ps.with_stochastic_rounding])
@pytest.mark.parametrize("reordered", ["params", "state"])
def test_pieces_keep_slots_whose_memory_is_in_another_order(wrap, reordered, monkeypatch):
    """As of a checkpoint of the model before or after it was brought to channels_last."""
    wrapped, in_pieces = wrap(made("AdamW")), wrap(made("AdamW"))
    params = {"w": numbers((4, 3, 5, 5)).bfloat16(), "v": numbers(300).bfloat16()}
    state = wrapped.init(params)
    if reordered == "params":
        params = tree_map(channels_last, params)
    else:
        state = tree_map(channels_last, state)
    whole = cut = (params, state)
    for index in range(3):
        grads = grads_of(params, 100 * index)
        given = clone((whole, cut))
        whole = ps.maybe_step(wrapped, given[0][0], grads, given[0][1], False, donate=True)
        with monkeypatch.context() as patched:
            patched.setattr(pieces, "PIECE_NUMEL", 64)
            cut = ps.maybe_step(in_pieces, given[1][0], grads, given[1][1], False, donate=True)
        assert same_bits(cut, whole)


def test_a_parameter_that_is_none_has_no_leaf_in_the_state():
    """Or a stack of states would have one that is no tensor."""
    optimizer = ps.with_master_weights(ps.from_torch(torch.optim.SGD, lr=0.1))
    state = optimizer.init({"w": torch.ones(5), "none": None})
    assert state.rest["none"] == ()
    stacked = ps.stack_states([state, state])
    assert torch.vmap(lambda member: member.inner.applied + 1)(stacked).tolist() == [1, 1]


def assert_masters_make_these_steps(optimizer, wide, runs):
    """As the optimizer over the masters themselves; every second step is donated."""
    wrapped = ps.with_master_weights(optimizer)
    params, rest = ps.split_masters(wide)
    state, inner = wrapped.init(params)._replace(rest=rest), optimizer.init(wide)
    for index, grads in enumerate(runs):
        wide, inner = optimizer.step(wide, grads, inner)
        params, state = ps.maybe_step(wrapped, params, grads, state, False, donate=index % 2 == 1)
        assert same_bits(ps.master_weights(params, state), wide)
        assert same_bits(state.inner, inner)


def test_pieces_keep_overrides_counts_and_the_rest_of_the_tree(way, monkeypatch):
    """A nested tree with None, a schedule, a leaf that is cut, one gradient that is not there."""
    monkeypatch.setattr(pieces, "PIECE_NUMEL", 64)
    optimizer = made(
        "AdamW",
        lr=lambda applied: 1e-2 / (1 + applied),
        overrides={"a.*": {"weight_decay": 0.5}, "b.0": {"lr": 1e-3}},
        in_state=("betas",),
        counts="each",
    )
    wide = {"a": {"x": numbers((20, 15)), "none": None}, "b": [numbers(33), numbers(5)]}
    runs = [
        {"a": {"x": numbers((20, 15), index), "none": None}, "b": [None, numbers(5, index)]}
        for index in range(3)
    ]
    assert_masters_make_these_steps(optimizer, wide, runs)


class Layer(NamedTuple):
    weight: Any
    bias: Any


@pytest.mark.parametrize("tree", [Layer, lambda weight, bias: weight, lambda *pair: list(pair)])
def test_pieces_keep_every_structure_of_parameters(tree, way, monkeypatch):
    """A named tuple, whose masters are one too, and a tensor alone."""
    monkeypatch.setattr(pieces, "PIECE_NUMEL", 64)
    wide = tree(numbers((20, 15)), numbers(33))
    runs = [tree(numbers((20, 15), index), numbers(33, index)) for index in range(2)]
    assert_masters_make_these_steps(made("AdamW"), wide, runs)


def test_parameters_of_another_dtype_than_the_state_are_refused():
    wrapped = ps.with_master_weights(made("AdamW"))
    params = {"w": torch.ones(2, dtype=torch.bfloat16), "b": torch.ones(2)}
    state = wrapped.init(params)
    for other in (torch.float32, torch.float16):
        cast = {**params, "w": params["w"].to(other)}
        with pytest.raises(TypeError, match=r"\['w'\] is.*Fix: `opt_state = optimizer.init"):
            wrapped.step(cast, {n: p.float() for n, p in cast.items()}, state)
    with pytest.raises(TypeError, match=r"opt_state is OptState, expected MasterState"):
        wrapped.step(params, params, state.inner)
    with pytest.raises(ValueError, match=r"rest has another structure"):
        wrapped.step(params, params, state._replace(rest={"w": state.rest["w"]}))


# ---- the four ways -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "inline", "donate"), [("AdamW", 0, True), ("RMSprop", 1000, False)]
)
def test_inductor_steps_masters(name, inline, donate, monkeypatch):
    """By a fused kernel, which writes into the masters, and by a formula."""
    monkeypatch.setattr(tracing, "MAX_INLINE_LEAVES", inline)
    wrapped, params = ps.with_master_weights(made(name)), params_of()
    state, grads, no = wrapped.init(params), grads_of(params, 0), torch.tensor(False)
    expected = ps.maybe_step(wrapped, params, grads, state, no)
    step = functools.partial(ps.maybe_step, wrapped, donate=donate)
    found = torch.compile(step, fullgraph=True)(*clone((params, grads, state)), no)
    pairs = [ps.master_weights(*each) for each in (found, expected)]
    torch.testing.assert_close(*pairs, rtol=1e-5, atol=1e-6)
