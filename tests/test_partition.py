"""`partition`: each part has the bits of its own optimizer alone, and one flag is for all."""

import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import (
    Untouched,
    assert_close,
    clone,
    examples,
    in_processes,
    on_an_accelerator,
    same_bits,
    spread,
    started,
    tensors,
    whole,
)
from hypothesis import given, reject
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import purescale as ps
from purescale._distributed.collectives import describe_setting
from purescale._wrappers import pieces
from purescale.testing import assert_optimizer, assert_pure, assert_single_graph

ADAMW = ps.from_torch(torch.optim.AdamW, lr=1e-2)
MUON = ps.from_torch(torch.optim.Muon, lr=0.02)
MOMENTUM = ps.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)
RMSPROP = ps.from_torch(torch.optim.RMSprop, lr=1e-2)
GO, SKIP, ONE = torch.tensor(False), torch.tensor(True), torch.ones(1)


def by_shape(name, param):
    return "matrices" if param.ndim == 2 else "others"


def made(matrices=MUON, others=ADAMW, label=by_shape):
    return ps.partition({"matrices": matrices, "others": others}, label)


def randn(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


SHAPES = {"embed": (7,), "up": (4, 3), "norm": (3,), "down": (3, 4), "scale": ()}


def params_of(dtype=torch.float32, seed=0):
    return {n: randn(s, seed + i).to(dtype) for i, (n, s) in enumerate(SHAPES.items())}


def grads_of(params, seed):
    return {n: randn(p.shape, 100 * seed + i) for i, (n, p) in enumerate(params.items())}


def parts_of(tree, label, params):
    """A flat tree by label."""
    found = {}
    for name, leaf in tree.items():
        found.setdefault(label(name, params[name]), {})[name] = leaf
    return found


def alone(optimizers, label, params, grads, state):
    """The step of each optimizer over its own dict, put together by hand."""
    of = [parts_of(tree, label, params) for tree in (params, grads)]
    stepped = {k: ps.maybe_step(o, of[0][k], of[1][k], state[k], GO) for k, o in optimizers.items()}
    together = {name: leaf for part, _ in stepped.values() for name, leaf in part.items()}
    return {name: together[name] for name in params}, {k: s for k, (_, s) in stepped.items()}


# ---- the bits of each part -----------------------------------------------------------------------

EACH = ps.from_torch(torch.optim.AdamW, lr=1e-2, counts="each")
OF_RMSPROP = ps.from_torch(torch.optim.RMSprop, lr=1e-2, counts="each")
OF_WRAPPERS = [ps.with_master_weights(EACH), ps.with_stochastic_rounding(MOMENTUM)]
some = st.sampled_from([EACH, MOMENTUM, OF_RMSPROP, *OF_WRAPPERS])


@examples(12)
@given(
    optimizers=st.dictionaries(st.sampled_from("abc"), some, min_size=1),
    labels=st.lists(st.sampled_from("abc"), min_size=3, max_size=8),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    absent=st.integers(0, 7),
    donate=st.booleans(),
    forced=st.booleans(),
)
def test_each_part_has_the_bits_of_its_optimizer_alone(
    optimizers, labels, dtype, absent, donate, forced
):
    keys = list(optimizers)
    labels = [*keys, *[keys[ord(each) % len(keys)] for each in labels]]
    params = {str(i): randn((i, 2), i).to(dtype) for i in range(1, len(labels) + 1)}

    def label(name, param):
        return labels[int(name) - 1]

    optimizer = ps.partition(optimizers, label)
    of = parts_of(params, label, params)
    state = {key: each.init(of[key]) for key, each in optimizers.items()}
    assert same_bits(optimizer.init(params), state)
    found = params, state
    for seed in range(2):
        grads = {n: None if n == str(absent) else g for n, g in grads_of(params, seed).items()}
        with on_an_accelerator(forced):
            expected = alone(optimizers, label, params, grads, state)
            found = ps.maybe_step(optimizer, *clone((found[0], grads, found[1])), GO, donate=donate)
        assert same_bits(found, expected)
        params, state = expected


def test_any_tree_of_parameters_is_cut_by_dotted_name():
    seen = []

    def label(name, param):
        seen.append(name)
        return by_shape(name, param)

    flat = params_of()
    tree = {"a": {"embed": flat["embed"], "up": flat["up"]}, "b": [flat["norm"], (flat["down"],)]}
    tree["absent"] = None
    optimizer = made(label=label)
    state = optimizer.init(tree)
    assert set(seen) == {"a.embed", "a.up", "b.0", "b.1.0"}
    assert {key: list(next(iter(part.slots.values()))) for key, part in state.items()} == {
        "matrices": ["a.up", "b.1.0"],
        "others": ["a.embed", "b.0"],
    }
    new, _ = assert_pure(optimizer.step, tree, tree, state)
    assert new["absent"] is None
    assert same_bits(new["b"][1][0], made().step(flat, flat, made().init(flat))[0]["down"])
    assert_close(new["a"]["embed"] != flat["embed"], torch.ones(7, dtype=torch.bool))


@pytest.mark.parametrize("absent", ["a", "m", "z"])
@pytest.mark.parametrize("window", [1, 2])
def test_a_part_has_its_own_gradients_beside_a_complex_one_and_a_parameter_none(absent, window):
    params = {"b": torch.ones(3, dtype=torch.complex64), "w": 2 * torch.ones(2), "y": torch.ones(4)}
    params = dict(sorted({**params, absent: None}.items()))

    def loss(p, x):
        return sum([(p[n] * x).abs().square().sum() * k for n, k in (("b", 1), ("w", 2), ("y", 3))])

    sgd = ps.from_torch(torch.optim.SGD, lr=0.25)
    parts = ps.partition({"one": sgd, "two": sgd}, lambda name, _: "two" if name == "w" else "one")
    (alone, step), (cut, step_of_parts) = (started(params, loss, each) for each in (sgd, parts))
    expected, _ = step(alone, [ONE[0]] * window)
    assert same_bits(step_of_parts(cut, [ONE[0]] * window)[0].params, expected.params)


def test_overrides_and_schedules_are_those_of_a_part():
    decays = ps.from_torch(
        torch.optim.SGD, lr=lambda applied: 0.5**applied, overrides={"norm": {"lr": 0.0}}
    )
    optimizer = made(others=decays)
    params, state = params_of(), made(others=decays).init(params_of())
    for _ in range(2):
        params, state = optimizer.step(params, grads_of(params, 1), state)
    assert state["others"].applied == 2
    assert same_bits(params["norm"], params_of()["norm"])
    expected = params_of()["scale"] - 1.5 * grads_of(params, 1)["scale"]
    assert_close(params["scale"], expected)


# ---- one flag ------------------------------------------------------------------------------------


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("bad", ["up", "scale"])
def test_an_inf_in_one_gradient_skips_every_bit_of_every_part(bad, forced):
    optimizer, scaler = made(ps.with_master_weights(MUON)), ps.DynamicScale().init()
    params = params_of(torch.bfloat16)
    params, state = optimizer.step(params, grads_of(params, 0), optimizer.init(params))
    grads = grads_of(params, 1)
    grads[bad] = grads[bad] * torch.nan
    for donate in (False, True):
        trees = clone((params, grads, state))
        with on_an_accelerator(forced):
            out = ps.unscale_and_step(optimizer, scaler, *trees, max_norm=1.0, donate=donate)
        assert out.found_inf
        assert same_bits((out.params, out.opt_state), (params, state))


# ---- donation ------------------------------------------------------------------------------------


FORMULA = ps.from_formula(lambda p, g, slots, h, t: (p - g, {"m": slots["m"] + g}), ("m",))


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize(
    "matrices",
    [MOMENTUM, FORMULA, ps.with_master_weights(FORMULA)],
    ids=["kernel", "formula", "wrapped"],
)
def test_a_donated_step_writes_into_all_that_it_was_given(forced, matrices):
    optimizer = made(matrices, ADAMW)
    params, state = params_of(), optimizer.init(params_of())
    places = [t.data_ptr() for t in tensors((params, state)) if t.is_floating_point()]
    with on_an_accelerator(forced):
        found = ps.maybe_step(optimizer, params, grads_of(params, 0), state, GO, donate=True)
    assert [t.data_ptr() for t in tensors(found) if t.is_floating_point()] == places


@pytest.mark.parametrize("what", ["params", "state", "grads", "flag"])
@pytest.mark.parametrize("forced", [False, True])
def test_memory_that_two_parts_share_is_copied(what, forced):
    """No part sees it by itself: up and embed are of two parts."""
    optimizer, scaler = made(MOMENTUM, RMSPROP), ps.NoScale().init()
    params, grads = params_of(), grads_of(params_of(), 0)
    state = optimizer.init(params)
    shared = randn((12,), 5)
    at = {"params": params, "grads": grads}.get(what)
    if what == "state":
        state["matrices"].slots["momentum_buffer"]["up"] = shared.view(4, 3)
        state["others"].slots["square_avg"]["embed"] = shared[5:].abs_()
    elif what == "flag":
        scaler = ps.StaticScale(1.0).init()._replace(scale=params["scale"].fill_(1.0))
    else:
        at["up"], at["embed"] = shared.view(4, 3), shared[5:]
    expected = ps.unscale_and_step(optimizer, scaler, *clone((params, grads, state)), 1.0)
    before = shared.clone()
    with on_an_accelerator(forced):
        found = ps.unscale_and_step(optimizer, scaler, params, grads, state, 1.0, donate=True)
    assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert what == "flag" or same_bits(shared, before)
    assert scaler.scale == 1


def test_nothing_of_a_step_is_in_memory_that_was_given():
    optimizer = made(ps.with_master_weights(MUON), ps.with_stochastic_rounding(ADAMW))
    for dtype in (torch.float32, torch.bfloat16):
        params = params_of(dtype)
        state = assert_pure(optimizer.init, params)
        for flag in (GO, SKIP):
            step = functools.partial(ps.maybe_step, optimizer)
            assert_pure(step, params, grads_of(params, 0), state, flag)


# ---- compiled, mapped, derived, saved ------------------------------------------------------------


@pytest.mark.slow
def test_a_compiled_step_is_one_graph_and_equal_to_an_eager_one():
    optimizer = made(MUON, ps.with_master_weights(ADAMW))
    params = params_of()
    step = functools.partial(ps.maybe_step, optimizer)
    calls = []
    state = optimizer.init(params)
    for seed, flag in enumerate([GO, SKIP, GO]):
        calls.append((params, grads_of(params, seed), state, flag))
        params, state = step(*calls[-1])
    found = assert_single_graph(step, *calls)
    assert_close(found[-1], (params, state), rtol=1e-4, atol=1e-5)
    assert same_bits(found[1], (calls[1][0], calls[1][2]))
    donated = torch.compile(functools.partial(step, donate=True), fullgraph=True, backend="eager")
    given, expected = clone(calls[2]), step(*calls[2])
    assert_close(donated(*given), expected, rtol=1e-4, atol=1e-5)
    assert_close((given[0], given[2]), expected, rtol=1e-4, atol=1e-5)  # written into


def squares(params, x):
    return sum((p * x).square().sum() for p in params.values())


def chosen_one(chosen):
    return lambda name, param: "matrices" if name == chosen else "others"


def step_of(optimizer, params, grads, opt_state):
    return optimizer.step(params, grads, opt_state)


IN_ONE_GRAPH = torch.compile(step_of, fullgraph=True, backend="eager")


@pytest.mark.parametrize("step", [step_of, pytest.param(IN_ONE_GRAPH, marks=pytest.mark.slow)])
def test_labels_that_were_remembered_are_those_of_this_partition_and_of_these_names(step):
    params, ones = {n: torch.full((1,), 8.0 * ord(n)) for n in "xy"}, dict.fromkeys("xy", ONE)
    slow, fast = (ps.from_torch(torch.optim.SGD, lr=lr) for lr in (1.0, 2.0))
    for chosen in "xyx":
        optimizer = made(slow, fast, chosen_one(chosen))
        for names in ("xy", "yx", "xy"):
            trees = [{name: tree[name] for name in names} for tree in (params, ones)]
            moved = step(optimizer, *trees, optimizer.init(trees[0]))[0]
            assert moved == {name: params[name] - 2 + (name == chosen) for name in names}


def test_a_derivative_goes_through_every_part_or_is_refused():
    both = [ps.from_torch(torch.optim.SGD, lr=lr, differentiable=True) for lr in (0.5, 0.25)]
    params = {n: p.requires_grad_() for n, p in params_of().items()}
    grads = {n: p * 2 for n, p in params.items()}
    optimizer = made(*both)
    new, _ = ps.maybe_step(optimizer, params, grads, optimizer.init(params), GO)
    sum(p.sum() for p in new.values()).backward()
    assert (params["up"].grad == 1 - 0.5 * 2).all()
    assert (params["norm"].grad == 1 - 0.25 * 2).all()
    mixed = made(both[0], ADAMW)
    with pytest.raises(ValueError, match=r"grads\['embed'\] is a result of torch\.autograd"):
        mixed.step(params, {n: p * 2 for n, p in params.items()}, mixed.init(params))


def test_a_state_is_saved_and_loaded_and_that_of_other_parts_is_refused(tmp_path):
    params, rule = params_of(), ps.DynamicScale()
    state, step = started(params, squares, made(), rule)
    later, _ = step(state, [torch.ones(())])
    ps.save(tmp_path / "state.pt", later)
    loaded = ps.load(tmp_path / "state.pt", like=state)
    assert same_bits(loaded, later)
    assert same_bits(step(loaded, [torch.ones(())]), step(later, [torch.ones(())], donate=True))
    renamed = ps.partition(
        {"muon": MUON, "adamw": ADAMW}, lambda n, p: "muon" if p.ndim == 2 else "adamw"
    )
    with pytest.raises(ValueError, match=r"missing: .*'muon'.*not in like: .*'matrices'"):
        ps.load(tmp_path / "state.pt", like=ps.init_train_state(params, {}, renamed, rule))
    moved = made(label=lambda n, p: "others" if n == "down" else by_shape(n, p))
    with pytest.raises(ValueError, match=r"opt_state.*down"):
        ps.load(tmp_path / "state.pt", like=ps.init_train_state(params, {}, moved, rule))
    for other in (renamed, ADAMW):
        wrong = state._replace(opt_state=other.init(params))
        with Untouched(wrong), pytest.raises(ValueError, match=r"the parts .*this optimizer has"):
            step(wrong, [torch.ones(())])
    with pytest.raises(ValueError, match="opt_state knows the parameters up, params has up, down"):
        step(state._replace(opt_state=moved.init(params)), [torch.ones(())])


def test_ranks_are_told_of_another_label_and_of_another_part():
    other_parts = ps.partition({"others": ADAMW, "more": MUON}, by_shape)
    others = made(MOMENTUM), made(label=lambda n, p: "others"), other_parts
    assert len(set(map(describe_setting, (made(), *others)))) == 4
    assert describe_setting(made()) == describe_setting(made())


# ---- with others ---------------------------------------------------------------------------------

AROUND = {
    "masters": ps.with_master_weights,
    "masters and moments": lambda optimizer: ps.with_state_dtype(
        ps.with_master_weights(optimizer), {"exp_avg": torch.bfloat16}
    ),
}


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("wrap", AROUND.values(), ids=AROUND)
def test_a_wrapper_around_has_the_bits_of_wrappers_within(wrap, forced):
    """Rounding has other dice there: they are of the number of a leaf."""
    outer, inner = wrap(made(MOMENTUM, ADAMW)), made(ps.with_master_weights(MOMENTUM), wrap(ADAMW))
    params = params_of(torch.bfloat16)
    one, two = (params, outer.init(params)), (params, inner.init(params))
    for seed, flag in enumerate([GO, SKIP, GO]):
        for donate in (False, True):
            grads = grads_of(params, seed)
            with on_an_accelerator(forced):
                one = ps.maybe_step(outer, one[0], grads, one[1], flag, donate=donate)
                two = ps.maybe_step(inner, two[0], grads, two[1], flag, donate=donate)
            if forced:  # the unfused formulas run over other lists
                assert_close(one[0], two[0], rtol=2e-2, atol=1e-3)
            else:
                assert same_bits(one[0], two[0])
                masters = ps.master_weights(*one)
                of = parts_of(two[0], by_shape, params)
                for key, part in of.items():
                    assert same_bits(
                        {name: masters[name] for name in part}, ps.master_weights(part, two[1][key])
                    )


def test_narrow_moments_go_around_parts():
    narrow = ps.with_state_dtype(made(MOMENTUM, ADAMW), {"exp_avg": torch.bfloat16})
    slots = narrow.init(params_of())["others"].slots
    assert slots["exp_avg"]["norm"].dtype is torch.bfloat16


WITHIN = made(ps.with_master_weights(MOMENTUM), ps.with_stochastic_rounding(ADAMW))
NESTED = {
    "wrappers around": AROUND["masters and moments"](made(MUON, ADAMW)),
    "wrappers within": WITHIN,
    "a partition": ps.partition({"a": WITHIN, "b": RMSPROP}, lambda n, p: "a" if p.ndim else "b"),
}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", NESTED.values(), ids=NESTED)
def test_the_battery_for_optimizers_passes_for_nestings(optimizer):
    assert_optimizer(optimizer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_masters_of_parts_are_those_of_each(dtype):
    narrow = {"momentum_buffer": torch.bfloat16}
    wrapped = ps.with_state_dtype(ps.with_master_weights(MOMENTUM), narrow)
    optimizer, params = made(wrapped, ADAMW), params_of(dtype)
    params, state = optimizer.step(params, grads_of(params, 0), optimizer.init(params))
    masters = assert_pure(ps.master_weights, params, state)
    of = parts_of(params, by_shape, params)
    expected = {**ps.master_weights(of["matrices"], state["matrices"]), **of["others"]}
    assert list(masters) == list(params)
    assert same_bits(masters, {name: expected[name] for name in params})
    if dtype is not torch.float32:
        with pytest.raises(TypeError, match=r"\['up'\] is None, opt_state.rest there"):
            ps.master_weights({n: p for n, p in params.items() if n != "up"}, state)
    with pytest.raises(TypeError, match="opt_state is dict, expected MasterState"):
        ps.master_weights(params, made().init(params))


# ---- refused -------------------------------------------------------------------------------------


def test_a_label_that_names_no_optimizer_is_refused_with_the_name():
    optimizer = made(label=lambda name, param: "adamw" if name == "norm" else by_shape(name, param))
    words = r"label gives 'adamw' for norm, torch.float32 \(3,\); the optimizers are \['matrices'"
    with pytest.raises(ValueError, match=words):
        optimizer.init(params_of())
    with pytest.raises(ValueError, match=r"label gives \['others'\] for embed"):
        made(label=lambda name, param: ["others"]).init(params_of())
    with pytest.raises(ValueError, match=words):
        optimizer.step(params_of(), params_of(), made().init(params_of()))


def test_an_optimizer_without_a_parameter_is_refused_with_the_names():
    words = "no parameter has the label 'matrices'.* embed, up, norm, down, scale"
    with pytest.raises(ValueError, match=words):
        made(label=lambda name, param: "others").init(params_of())
    with pytest.raises(ValueError, match="no parameter has the label"):
        made().init({})


@pytest.mark.parametrize(
    "optimizers", [{}, [ADAMW], {"a": torch.optim.AdamW}, {1: ADAMW}, {"a": ADAMW}]
)
def test_what_is_no_dict_of_optimizers_or_no_label_is_refused(optimizers):
    label = {"up": "a"} if optimizers == {"a": ADAMW} else by_shape
    with pytest.raises(TypeError, match=r"non-empty dict of optimizers|an object with `init`"):
        ps.partition(optimizers, label)


class Fuse:
    """A user's code that fails when it runs for the n-th time after `left` is set."""

    def __init__(self):
        self.left = -1

    def burn(self):
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("no more memory")


class Stepping:
    """An optimizer with `step` alone that fails with the fuse."""

    def __init__(self, fuse):
        self.fuse = fuse

    def init(self, params):
        return {name: torch.zeros_like(param) for name, param in params.items()}

    def step(self, params, grads, opt_state):
        self.fuse.burn()
        return {n: p - 0.5 for n, p in params.items()}, {n: s + 1 for n, s in opt_state.items()}


WRAPS = {"masters": ps.with_master_weights, "rounding": ps.with_stochastic_rounding}


@st.composite
def nestings(draw, fuse, depth=2):
    """Any nesting of partitions and wrappers over optimizers that share a fuse."""

    def formula(param, grad, slots, settings, t):
        fuse.burn()
        return param - 0.5 * grad, {"m": slots["m"] + grad}

    def lr(applied):
        fuse.burn()
        return 0.1

    kinds = ["torch", "override", "step", "formula", "narrow"]
    kind = draw(st.sampled_from(["partition", *WRAPS, *kinds] if depth > 0 else kinds))
    if kind == "partition":
        inner, half = nestings(fuse, depth - 1), draw(st.integers(1, 4))
        return ps.partition(
            {"a": draw(inner), "b": draw(inner)},
            lambda name, param: "ab"[sum(map(ord, name)) % (half + 1) > 0],
        )
    if kind in WRAPS:
        return WRAPS[kind](draw(nestings(fuse, depth - 1)))
    if kind == "step":
        return Stepping(fuse)
    if kind == "formula":
        return ps.from_formula(formula, ("m",), draw(st.booleans()))
    if kind == "override":
        return ps.from_torch(torch.optim.SGD, lr=0.1, overrides={"*": {"lr": lr}})
    adamw = ps.from_torch(torch.optim.AdamW, lr=lr)
    return adamw if kind == "torch" else ps.with_state_dtype(adamw, {"exp_avg": torch.bfloat16})


@examples(15)
@given(data=st.data())
def test_a_step_that_raises_leaves_all_that_was_donated_as_it_was(data):
    fuse = Fuse()
    inner = nestings(fuse)
    label = lambda name, param: "ab"[int(name) % 2]  # noqa: E731
    optimizer = ps.partition({"a": data.draw(inner), "b": data.draw(inner)}, label)
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    params = {str(i): randn((1 + i % 3, 2), i).to(dtype) for i in range(24)}
    try:
        state = optimizer.init(params)
    except ValueError:  # a label that leaves a part without parameters
        reject()
    scaled = {name: 2 * grad for name, grad in grads_of(params, 1).items()}
    scaler = ps.StaticScale(2.0).init()
    forced, unscale = data.draw(st.booleans()), data.draw(st.booleans())
    fuse.left = data.draw(st.integers(1, 8) | st.integers(9, 30))
    piece = data.draw(st.sampled_from([1, 8, 2**21]))
    with on_an_accelerator(forced), mock.patch.object(pieces, "PIECE_NUMEL", piece):
        given_trees = clone((params, scaled, state))
        try:
            if unscale:
                ps.unscale_and_step(optimizer, scaler, *given_trees, 1.0, donate=True)
            else:
                ps.maybe_step(optimizer, *given_trees, GO, donate=True)
        except (RuntimeError, TypeError, ValueError):
            assert same_bits(given_trees, (params, scaled, state))


# ---- shards --------------------------------------------------------------------------------------


class Descent:
    """An optimizer of one's own, which gets DTensors as they are."""

    def init(self, params):
        return {"sum": {name: torch.zeros_like(leaf) for name, leaf in params.items()}}

    def step(self, params, grads, state):
        new = {name: p - 0.1 * grads[name] for name, p in params.items()}
        return new, {"sum": {name: s + grads[name] for name, s in state["sum"].items()}}


def _each_part_takes_its_own_shards(rank):
    mesh = init_device_mesh("cpu", (2,))
    unsharded = {
        "rows": randn((5, 3), 0),
        "columns": randn((3, 7), 1),
        "muon": randn((4, 4), 2),
        "plain": randn((3,), 3),
    }
    on = {"rows": [Shard(0)], "columns": [Shard(1)], "muon": [Replicate()]}

    def label(name, param):
        assert param.shape == unsharded[name].shape  # never that of a shard
        return "matrices" if name == "muon" else "others"

    plain, half = made(label=label), {n: x.bfloat16() for n, x in unsharded.items()}
    for optimizer, begun in (
        (plain, unsharded),
        (ps.with_master_weights(plain), half),
        (made(MUON, ps.with_master_weights(ADAMW), label), half),
        (made(MUON, Descent(), label), unsharded),
    ):
        scaler, weights = ps.DynamicScale(init_scale=4.0).init(), lambda params, _: params
        weights = weights if begun is unsharded else ps.master_weights
        params = spread(begun, mesh, on)
        one, many = (begun, optimizer.init(begun)), (params, optimizer.init(params))
        for index, donate in enumerate((False, True, True)):
            grads = {n: g / (index != 1) for n, g in grads_of(unsharded, index).items()}
            one = ps.unscale_and_step(optimizer, scaler, one[0], grads, one[1])
            arguments = many[0], spread(grads, mesh, on), many[1]
            many = ps.unscale_and_step(optimizer, scaler, *arguments, donate=donate)
            assert many.found_inf == (index == 1)
            # a vector ends elsewhere in a shard
            found = whole(weights(*many[:2]))
            assert_close(found, weights(*one[:2]), rtol=1e-6, atol=1e-8)

        def step(params, optimizer=optimizer):
            def loss(params, x):
                return sum([(p * x).square().sum().float() for p in whole(params).values()])

            state, step = started(params, loss, optimizer, ps.NoScale())
            return step(state, [torch.tensor(2.0)])[0].params

        assert_close(whole(step(spread(begun, mesh, on))), step(begun), rtol=1e-2, atol=1e-6)
    shards = spread(unsharded, mesh, on)
    wrong = made(label=lambda name, param: "matrices" if param.ndim == 2 else "others")
    with pytest.raises(ValueError, match=r"'rows'.*Shard.*Muon.* needs the whole"):
        ps.maybe_step(wrong, shards, shards, wrong.init(shards), GO)
    assert dist.get_rank() == rank


def _ranks_agree_on_every_part(rank):
    rates = ps.from_torch(torch.optim.SGD, lr=0.1, in_state=("lr",))
    params, window = params_of(), [torch.tensor(1.0 + rank)]
    begin = functools.partial(started, params, squares, rule=ps.NoScale(), group=dist.group.WORLD)
    optimizer = made(MOMENTUM, rates)
    state, step = begin(optimizer=optimizer)
    together, _ = step(state, window)
    slope = {n: 2 * p * (1 + 4) / 2 for n, p in params.items()}
    assert_close(together.params, optimizer.step(params, slope, state.opt_state)[0])
    with pytest.raises(ValueError, match=r"opt_state\['others'\]\.lr = .*0\.5.*1\.5"):
        step(ps.replace_settings(state, lr=0.5 + rank), window)
    moved = made(MOMENTUM, rates, lambda n, p: "others" if rank and n == "down" else by_shape(n, p))
    other = made(MOMENTUM, ps.from_torch(torch.optim.SGD, lr=0.1 + rank))
    for each, words in (
        (moved, r"the ranks do not hold the same: .*opt_state.*down"),
        (other, "optimizer=PartitionOptimizer"),
    ):
        state, step = begin(optimizer=each)
        with pytest.raises(ValueError, match=words):
            step(state, window)


@pytest.mark.slow
def test_ranks_agree_on_every_part():
    in_processes(_ranks_agree_on_every_part)


@pytest.mark.slow
def test_each_part_takes_its_own_shards():
    in_processes(_each_part_takes_its_own_shards)
