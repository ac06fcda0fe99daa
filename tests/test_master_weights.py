"""Masters: the bits of a run in float32, whatever the parameters are."""

import functools
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from helpers import clone, in_processes, same_bits, stack, tensors, unstack
from test_stochastic_rounding import (
    CLASSES,
    HALF,
    SIZES,
    grads_of,
    made,
    numbers,
    params_of,
    transformation,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_map

import purescale as ps
from purescale._torch import tracing
from purescale._wrappers import wrapper
from purescale.testing import assert_optimizer, assert_pure, assert_single_graph


def wide_of(params):
    return {n: p.float() if p.dtype in HALF else p for n, p in params.items()}


def like(grads, wide):
    return {n: g.to(wide[n].dtype) for n, g in grads.items()}


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


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_and_mapped_they_have_the_same_bits(backend):
    masters = patterns()[:999]
    expected = ps.split_masters(masters)

    def both(masters):
        halves = ps.split_masters(masters)
        return halves, ps.join_masters(*halves)

    found, joined = torch.compile(both, fullgraph=True, backend=backend)(masters)
    assert same_bits(found, expected)
    assert same_bits(joined, ps.join_masters(*expected))
    assert same_bits(torch.vmap(both)(masters.reshape(3, 333))[0][0].reshape(-1), expected[0])


def test_what_is_no_master_and_no_half_is_refused():
    with pytest.raises(TypeError, match=r"masters\['w'\] is torch.bfloat16 \(2,\); a master is"):
        ps.split_masters({"w": torch.ones(2, dtype=torch.bfloat16)})
    params, rest = ps.split_masters({"w": torch.ones(2)})
    with pytest.raises(
        TypeError, match=r"params\['w'\] is torch.float32.*Fix: what `split_masters"
    ):
        ps.join_masters({"w": torch.ones(2)}, rest)
    with pytest.raises(TypeError, match=r"rest there torch.int16 \(1,\)"):
        ps.join_masters(params, {"w": rest["w"][:1]})


# ---- steps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CLASSES)
def test_masters_have_the_bits_of_a_run_in_float32(name, way, monkeypatch):
    """Parameters of every dtype, donated or not, in one piece and in many."""
    optimizer = made(name)
    wrapped = ps.with_master_weights(optimizer)
    params = params_of()
    wide = wide_of(params)
    state, inner = wrapped.init(params), optimizer.init(wide)
    donated = cut = (params, state)
    for index in range(4):
        grads = grads_of(params, 100 * index)
        wide, inner = optimizer.step(wide, like(grads, wide), inner)
        params, state = assert_pure(wrapped.step, params, grads, state)
        assert same_bits(ps.master_weights(params, state), wide)
        assert same_bits(state.inner, inner)
        donated = ps.maybe_step(wrapped, *clone(donated)[:1], grads, clone(donated)[1], False, True)
        assert same_bits(donated, (params, state))
        with monkeypatch.context() as patched:
            patched.setattr(wrapper, "PIECE_NUMEL", 64)
            cut = wrapped.step(cut[0], grads, cut[1])
            assert same_bits(cut, (params, state))
    for key, p in params.items():
        if p.dtype is torch.float16:
            assert torch.equal(p, wide[key].half())
        elif p.dtype not in HALF:
            assert same_bits(p, wide[key])
            assert state.rest[key] == ()


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_scaled_step_has_those_bits_too(name, way):
    optimizer, scaler = made(name), ps.StaticScale(4.0).init()
    wrapped = ps.with_master_weights(optimizer)
    params = params_of((torch.bfloat16,))
    wide = wide_of(params)
    state, inner = wrapped.init(params), optimizer.init(wide)
    for index in range(3):
        grads = {n: 4 * g for n, g in grads_of(params, 100 * index).items()}
        bounds = {"clip_value": 0.3} if index else {}
        expected = ps.unscale_and_step(optimizer, scaler, wide, like(grads, wide), inner, **bounds)
        wide, inner = expected[:2]
        found = ps.unscale_and_step(
            wrapped, scaler, params, clone(grads), state, donate=index == 1, **bounds
        )
        params, state = found[:2]
        assert same_bits(ps.master_weights(params, state), wide)


@pytest.mark.parametrize("donate", [False, True])
def test_pieces_keep_the_settings_in_the_state(donate, way, monkeypatch):
    optimizer = made("AdamW", in_state=("lr", "weight_decay", "betas"))
    wrapped = ps.with_master_weights(optimizer)
    params = params_of()
    whole = cut = (params, wrapped.init(params))
    for index in range(3):
        grads = grads_of(params, 100 * index)
        whole = wrapped.step(whole[0], grads, whole[1])
        with monkeypatch.context() as patched:
            patched.setattr(wrapper, "PIECE_NUMEL", 64)
            given = clone(cut)
            cut = ps.maybe_step(wrapped, given[0], grads, given[1], False, donate)
        assert same_bits(cut, whole)
    assert cut[1].inner.hyper.keys() == {"weight_decay", "betas"}


@pytest.mark.parametrize("bounds", [{"max_norm": 0.1}, {"clip_value": 0.01}])
def test_pieces_unscale_and_clip_their_gradients(bounds, way, monkeypatch):
    wrapped, scaler = ps.with_master_weights(made("AdamW")), ps.StaticScale(4.0).init()
    params = params_of()
    state = wrapped.init(params)
    step = functools.partial(ps.unscale_and_step, wrapped, scaler, params, grads_of(params, 1))
    whole = step(state, **bounds)
    monkeypatch.setattr(wrapper, "PIECE_NUMEL", 64)
    assert same_bits(step(state, **bounds), whole)
    unbounded = ps.unscale_and_step(wrapped, scaler, params, grads_of(params, 1), state)
    assert not same_bits(unbounded.params, whole.params)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("wrap", [ps.with_master_weights, ps.with_stochastic_rounding])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop"])
@pytest.mark.parametrize("reordered", ["params", "state"])
def test_pieces_keep_slots_whose_memory_is_in_another_order(
    name, wrap, donate, reordered, monkeypatch
):
    """As of a checkpoint of the model before or after it was brought to channels_last."""
    wrapped = wrap(made(name))
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
        whole = ps.maybe_step(wrapped, given[0][0], grads, given[0][1], False, donate)
        with monkeypatch.context() as patched:
            patched.setattr(wrapper, "PIECE_NUMEL", 64)
            cut = ps.maybe_step(wrapped, given[1][0], grads, given[1][1], False, donate)
        assert same_bits(cut, whole)


def test_pieces_keep_overrides_counts_and_the_rest_of_the_tree(way, monkeypatch):
    """A nested tree with None, a schedule, a leaf that is cut, one gradient that is not there."""
    monkeypatch.setattr(wrapper, "PIECE_NUMEL", 64)
    optimizer = made(
        "AdamW",
        lr=lambda applied: 1e-2 / (1 + applied),
        overrides={"a.*": {"weight_decay": 0.5}, "b.0": {"lr": 1e-3}},
        counts="each",
    )
    wrapped = ps.with_master_weights(optimizer)
    wide = {"a": {"x": numbers((20, 15)), "none": None}, "b": [numbers(33), numbers(5)]}
    params, rest = ps.split_masters(wide)
    state, inner = wrapped.init(params)._replace(rest=rest), optimizer.init(wide)
    for index in range(3):
        grads = {"a": {"x": numbers((20, 15), index), "none": None}, "b": [None, numbers(5, index)]}
        wide, inner = optimizer.step(wide, grads, inner)
        params, state = wrapped.step(params, grads, state)
        assert same_bits(ps.master_weights(params, state), wide)
        assert same_bits(state.inner, inner)


class Layer(NamedTuple):
    weight: Any
    bias: Any


@pytest.mark.parametrize("tree", [Layer, lambda weight, bias: weight, lambda *pair: list(pair)])
def test_pieces_keep_every_structure_of_parameters(tree, way, monkeypatch):
    """A named tuple, whose masters are one too, and a tensor alone."""
    monkeypatch.setattr(wrapper, "PIECE_NUMEL", 64)
    optimizer = made("AdamW")
    wrapped = ps.with_master_weights(optimizer)
    wide = tree(numbers((20, 15)), numbers(33))
    params, rest = ps.split_masters(wide)
    state, inner = wrapped.init(params)._replace(rest=rest), optimizer.init(wide)
    for index, donate in enumerate((False, True)):
        grads = tree(numbers((20, 15), index), numbers(33, index))
        wide, inner = optimizer.step(wide, grads, inner)
        params, state = ps.maybe_step(wrapped, params, grads, state, False, donate=donate)
        assert same_bits(ps.master_weights(params, state), wide)
        assert same_bits(state.inner, inner)


def test_a_skipped_step_keeps_everything(way):
    wrapped = ps.with_master_weights(made("AdamW"))
    params = params_of()
    state = wrapped.init(params)
    params, state = wrapped.step(params, grads_of(params, 0), state)
    params["float16_5"].view(torch.int16)[0] = 0x7D01  # a NaN with a payload
    bad = {n: torch.full_like(g, torch.nan) for n, g in grads_of(params, 1).items()}
    for donate in (False, True):
        found = ps.maybe_step(wrapped, params, bad, state, torch.tensor(True), donate=donate)
        assert same_bits(found, (params, state))


def test_a_donated_step_is_made_in_place(way):
    wrapped = ps.with_master_weights(made("AdamW"))
    params = params_of()
    state, grads = wrapped.init(params), grads_of(params, 0)
    before = [leaf.data_ptr() for leaf in tensors((params, state.inner.slots, state.rest))]
    params, state = ps.maybe_step(wrapped, params, grads, state, False, donate=True)
    after = [leaf.data_ptr() for leaf in tensors((params, state.inner.slots, state.rest))]
    assert before == after


def test_gradients_that_share_memory_are_not_overwritten():
    wrapped = ps.with_master_weights(made("SGD"))
    params = {"a": torch.ones(5), "b": torch.ones(5), "c": torch.ones(5).bfloat16()}
    shared = torch.ones(5)
    grads = {"a": shared, "b": shared, "c": torch.ones(5).bfloat16()}
    scaler = ps.StaticScale(4.0).init()
    out = ps.unscale_and_step(wrapped, scaler, params, grads, wrapped.init(params), donate=True)
    assert same_bits(out.params["a"], out.params["b"])
    assert torch.allclose(out.params["a"], torch.full((5,), 1 - 1e-2 / 4))


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
@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop"])
def test_compiled_has_the_masters_of_a_compiled_run_in_float32(name):
    optimizer = made(name)
    wrapped = ps.with_master_weights(optimizer)
    params = params_of()
    wide = wide_of(params)
    calls = [(params, grads_of(params, 0), wrapped.init(params))]
    steps = [(wide, like(grads_of(params, 0), wide), optimizer.init(wide))]
    for index in range(2):
        new, state = wrapped.step(*calls[-1])
        calls.append((new, grads_of(params, index + 1), state))
        new, state = optimizer.step(*steps[-1])
        steps.append((new, like(grads_of(params, index + 1), wide), state))
    found = assert_single_graph(wrapped.step, *calls)
    expected = assert_single_graph(optimizer.step, *steps)
    for (new, state), (masters, inner) in zip(found, expected, strict=True):
        assert same_bits(ps.master_weights(new, state), masters)
        assert same_bits(state.inner, inner)


@pytest.mark.slow
def test_inductor_keeps_what_is_below_half_precision():
    """Compiled and donated: many small steps that bfloat16 alone would lose."""
    wrapped = ps.with_master_weights(made("SGD", lr=2.0**-12, momentum=0.0))
    params = {"w": torch.ones(33, dtype=torch.bfloat16)}
    state, grads = wrapped.init(params), {"w": torch.ones(33, dtype=torch.bfloat16)}
    step = torch.compile(functools.partial(ps.maybe_step, wrapped, donate=True), fullgraph=True)
    for _ in range(20):
        params, state = step(params, grads, state, torch.tensor(False))
    assert (ps.master_weights(params, state)["w"] == 1 - 20 * 2.0**-12).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "inline", "donate"),
    [("AdamW", 0, True), ("AdamW", 1000, False), ("RMSprop", 1000, True)],
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


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_mapped_equals_a_loop(name):
    wrapped = ps.with_master_weights(made(name))
    members = []
    for seed in range(3):
        params = {n: p + seed for n, p in params_of((torch.bfloat16, torch.float16)).items()}
        members.append((params, grads_of(params, seed), wrapped.init(params)))
    flags = torch.tensor([False, True, False])
    stacked = torch.vmap(functools.partial(ps.maybe_step, wrapped))(*stack(members), flags)
    for index, (params, grads, state) in enumerate(members):
        one = ps.maybe_step(wrapped, params, grads, state, flags[index])
        pair = unstack(stacked, index)
        masters = [ps.master_weights(*each) for each in (pair, one)]
        torch.testing.assert_close(*masters, rtol=1e-5, atol=1e-6)
        if flags[index]:
            assert same_bits(pair, (params, state))


def assert_a_run_resumes(optimizer, dtypes, path):
    """A few steps of a loss over parameters of these dtypes, saved and loaded, and one skipped."""
    rule = ps.DynamicScale(init_scale=8.0)
    shapes = {"w": (4, 3), "b": (3,), "c": (3,)}
    pairs = zip(shapes.items(), dtypes, strict=True)
    params = {name: numbers(shape).to(dtype) for (name, shape), dtype in pairs}

    def loss_fn(params, buffers, x):
        out = x @ params["w"].float() + params["b"].float()
        return (out.square().mean() + params["c"].square().sum()), buffers

    step = functools.partial(ps.train_step, loss_fn=loss_fn, optimizer=optimizer, rule=rule)
    state = ps.init_train_state(params, {}, optimizer, rule)
    like = state
    data = [numbers((2, 4), seed) for seed in range(6)]
    for index in range(3):
        state, info = step(state, data[index : index + 2], max_norm=1.0)
        assert not info.found_inf
    ps.save(path / "state.pt", state)
    loaded = ps.load(path / "state.pt", like=like)
    assert same_bits(loaded, state)
    skipped, info = step(state, [data[0] * torch.inf])
    assert info.found_inf
    assert same_bits(skipped.opt_state, state.opt_state)
    assert same_bits(step(loaded, data[:1]), step(state, data[:1], donate=True))


def test_a_whole_train_step_saved_and_resumed(tmp_path):
    dtypes = torch.bfloat16, torch.float16, torch.float32
    assert_a_run_resumes(ps.with_master_weights(made("AdamW")), dtypes, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALF)
def test_the_battery_for_optimizers_passes(dtype):
    assert_optimizer(ps.with_master_weights(made("AdamW")), params=params_of((dtype,)))


def test_a_transformation_steps_masters():
    inner = transformation()
    wrapped = ps.with_master_weights(inner)
    params = params_of(HALF)
    wide, state = wide_of(params), wrapped.init(params)
    for index in range(3):
        grads = grads_of(params, index)
        wide, _ = inner.step(wide, like(grads, wide), torch.zeros(()))
        params, state = ps.maybe_step(wrapped, params, grads, state, False, donate=True)
        assert same_bits(ps.master_weights(params, state), wide)
    assert state.inner == 3


# ---- shards --------------------------------------------------------------------------------------


def _shards_are_stepped_as_the_whole(rank):
    mesh = init_device_mesh("cpu", (2,))
    whole = {"rows": numbers((5, 3)), "columns": numbers((3, 7)), "copied": numbers((4,))}
    on = {"rows": Shard(0), "columns": Shard(1), "copied": Replicate()}

    def spread(tree):
        return {n: distribute_tensor(x, mesh, [on[n]], src_data_rank=None) for n, x in tree.items()}

    for dtype in HALF:
        wrapped = ps.with_master_weights(made("AdamW"))
        halves = {n: x.to(dtype) for n, x in whole.items()}
        params = spread(halves)
        one, many = (halves, wrapped.init(halves)), (params, wrapped.init(params))
        for donate in (False, True):
            one = wrapped.step(one[0], whole, one[1])
            many = ps.maybe_step(wrapped, many[0], spread(whole), many[1], False, donate=donate)
            masters = ps.master_weights(*many)
            found = {n: x.full_tensor() for n, x in masters.items()}
            assert same_bits(found, ps.master_weights(*one))
    assert dist.get_rank() == rank


@pytest.mark.slow
def test_shards_are_stepped_as_the_whole():
    in_processes(_shards_are_stepped_as_the_whole)


def test_sizes_are_on_both_sides_of_a_vector():
    assert {p.numel() for p in params_of().values()} == set(SIZES)


SGD = ps.from_torch(torch.optim.SGD, lr=0.1)
WIDENING = {"masters": ps.with_master_weights, "rounding": ps.with_stochastic_rounding}


@pytest.mark.parametrize("outer", WIDENING)
@pytest.mark.parametrize("inner", WIDENING)
def test_an_optimizer_that_would_be_given_no_half_parameters_is_refused(outer, inner):
    within = WIDENING[inner](SGD)
    narrow = ps.with_state_dtype(within, {"exp_avg": torch.bfloat16})
    for optimizer in (within, narrow, ps.partition({"all": within}, lambda name, param: "all")):
        with pytest.raises(ValueError, match=r"do nothing\. Fix: one of the two"):
            WIDENING[outer](optimizer)
    ps.with_state_dtype(within, {"exp_avg": torch.bfloat16})  # which steps in the dtype it is given
