"""One step: skipped or applied as a whole, replayed bit for bit."""

import contextlib
import functools
import math

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from helpers import (
    assert_donation_keeps_bits,
    at,
    batch,
    clone,
    examples,
    generator_of,
    job,
    scaled_by,
    stack,
    started,
    tensors,
)
from hypothesis import given
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import purescale as ps
from purescale.testing import Untouched, assert_sync_free, same_bits, shares_memory

OPTIM = torch.optim
ADAMW = ps.from_torch(OPTIM.AdamW, lr=0.01)
SGD = ps.from_torch(OPTIM.SGD, lr=0.1, momentum=0.9)
RULE = ps.DynamicScale(init_scale=2.0**10, growth_interval=3)
OVERFLOWS = 2.0**24  # a scale under which the small net overflows float16


def test_init_train_state_copies_what_it_was_given_off_the_graph():
    w, rng = torch.ones(2, requires_grad=True), torch.Generator().manual_seed(0).get_state()
    trees = {"w": w}, {"b": w.detach()}
    state = ps.init_train_state(*trees, SGD, RULE, rng=rng)
    assert not shares_memory((trees, rng), state)
    assert not any(leaf.requires_grad for leaf in tensors(state))


def test_a_step_reads_no_tensor_value():
    settings = {"max_norm": 1.0, "clip_value": 0.5, "weight_fn": lambda b: b[0].shape[0]}
    for optimizer, policy in ((ADAMW, "drop_window"), (SGD, "drop_microbatch")):
        state, step = job(optimizer, RULE, on_nonfinite=policy, **settings)
        state, _ = assert_sync_free(step, state, [batch(0), batch(1)])
        assert_sync_free(step, scaled_by(state, OVERFLOWS), [batch(0)], donate=True)


def test_a_step_draws_from_its_own_generator_if_it_has_one_and_else_from_torchs():
    def loss(params, x):
        return F.dropout(x @ params["w"], 0.5).square().mean()

    for rng in (generator_of(3).get_state(), None):
        state, step = started({"w": torch.ones(8, 8)}, loss, SGD, rng=rng)
        results = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            before = torch.get_rng_state()
            results.append(step(state, [torch.ones(4, 8)] * 2))
            assert torch.equal(torch.get_rng_state(), before) == (rng is not None)
        assert same_bits(results[0], results[1])
        assert same_bits(results[0], results[2]) == (rng is not None)
    assert state.rng == results[0][0].rng == ()


@pytest.mark.parametrize("retries", [0, 2])
@pytest.mark.parametrize("on_nonfinite", ["drop_window", "drop_microbatch"])
@pytest.mark.parametrize("bad", [(0, 0), (0, 1), (1, 1)])
def test_with_rng_what_is_skipped_or_dropped_draws_its_numbers_too(bad, on_nonfinite, retries):
    """As torch's generator moves in a loop over the same forwards."""
    generator = generator_of(0)
    state, step = started(
        {"w": torch.ones(33)}, lambda p, x: (p["w"] * torch.rand(33) * x).sum(), SGD,
        rng=generator.get_state(),
    )  # fmt: skip
    window = [torch.full((33,), math.inf if each else 1.0) for each in bad]
    new, _ = step(state, window, on_nonfinite=on_nonfinite, max_retries=retries)
    for _ in bad:
        torch.rand(33, generator=generator)
    assert torch.equal(new.rng, generator.get_state())


SHAPES = r"torch.float32 \(1,\) on cpu, but torch.float32 \(3,\) on cpu in new_buffers"
OF_ANOTHER_SHAPE = rf"buffers\['n'\] is {SHAPES}"


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (lambda w, b: w.sum(), TypeError, r"returned Tensor; expected \(loss, new_buffers\)"),
        (lambda w, b: (w.sum(),), TypeError, "returned a tuple of 1"),
        (lambda w, b: [w.sum(), b], TypeError, "returned list"),
        (lambda w, b: (1.0, b), TypeError, "returned float as its loss"),
        (lambda w, b: (w, b), ValueError, r"has shape \(2,\); a loss is one number"),
        (lambda w, b: (w.sum().long(), b), TypeError, "dtype torch.int64"),
        (lambda w, b: (w.sum(), {}), ValueError, r"does not match buffers: missing \['n'\]"),
        (lambda w, b: (w.sum(), {"n": torch.ones(3)}), ValueError, OF_ANOTHER_SHAPE),
    ],
)
def test_a_loss_fn_that_returns_the_wrong_thing_is_refused_and_nothing_changes(
    returned, error, message
):
    def loss_fn(params, buffers, x):
        return returned(params["w"], buffers)

    params, buffers = {"w": torch.ones(2)}, {"n": torch.zeros(1)}
    state, step = started(params, loss_fn=loss_fn, buffers=buffers)
    with Untouched(state), pytest.raises(error, match=message):
        step(state, [None], donate=True)
    with pytest.raises(error, match=message):
        ps.value_and_grad(loss_fn)(params, buffers, None)


A_BATCH = r"is a tuple; .*`train_step\(state, \[batch\], \.\.\.\)`"
COMPLEX = ps.init_train_state({"w": torch.ones(1, dtype=torch.complex64)}, {}, SGD, RULE)
NO_ORDER = r"params\['w'\] has dtype torch.complex64; complex numbers have no order"
NEVER_MOVES = {"max_retries": 1, "rule": ps.StaticScale(2.0)}
POLICIES = "on_nonfinite must be 'drop_window' or 'drop_microbatch', got 'ignore'"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"state": {}}, TypeError, "takes a TrainState, got dict"),
        ({"microbatches": []}, ValueError, "empty list"),
        ({"microbatches": batch()}, TypeError, A_BATCH),
        ({"microbatches": (b for b in [1])}, TypeError, r"is a generator; .*islice\("),
        ({"microbatches": 1.0}, TypeError, r"is a float; expected a list, .* step\. Fix: `train_"),
        ({"max_norm": 0.0}, ValueError, "max_norm must be above 0"),
        ({"max_norm": "1"}, TypeError, "max_norm must be a number"),
        ({"clip_value": -1.0}, ValueError, "clip_value must be above 0"),
        ({"clip_value": 1.0, "state": COMPLEX}, TypeError, NO_ORDER),
        ({"weight_fn": lambda b: -1.0}, ValueError, r"weight_fn returned -1\.0"),
        ({"weight_fn": lambda b: "8"}, TypeError, "weight_fn returned '8'"),
        ({"weight_fn": lambda b: True}, TypeError, "weight_fn returned True"),
        ({"weight_fn": lambda b: torch.ones(2)}, ValueError, r"returned a tensor of shape \(2,\)"),
        ({"on_nonfinite": "ignore"}, ValueError, POLICIES),
        ({"max_retries": -1}, ValueError, "max_retries must be a whole number, 0 or more, got -1"),
        (NEVER_MOVES, ValueError, r"with StaticScale\(scale=2.0\), whose scale never moves"),
        ({"max_norm": 1.0, "norm_type": 0}, ValueError, "norm_type must be above 0"),
        ({"bn_update": "never"}, ValueError, "bn_update must be 'each' or 'window', got 'never'"),
        ({"group": "world"}, ValueError, "group=None"),
        *(
            ({"window_size": size}, ValueError, "window_size must be a whole number above 0")
            for size in (0, 1.5, True, "4")
        ),
    ],
)
def test_bad_arguments_of_a_step_are_refused_before_loss_fn_is_called(arguments, error, message):
    state, step = job(SGD, RULE)
    usual = {"state": state, "microbatches": [batch()], "loss_fn": lambda *a: pytest.fail("called")}
    with pytest.raises(error, match=message):
        step(**usual | arguments)


STACKED = {  # a step, or a part of it, of stacked states that is not mapped over them
    "a step": lambda s, w, o, step, trees: step(s, w),
    "jit": lambda s, w, o, step, trees: ps.jit(step, backend="aot_eager")(s, w),
    "another state mapped": lambda s, w, o, step, trees: torch.vmap(step, (None, 0))(
        s, [stack([*w] * 2)]
    ),
    "by hand": lambda s, w, o, step, trees: ps.unscale_and_step(o, s.scaler, *trees),
    "scale_loss": lambda s, w, o, step, trees: ps.scale_loss(s.scaler, torch.ones(())),
    "maybe_step": lambda s, w, o, step, trees: ps.maybe_step(o, *trees, torch.tensor(False)),
}


@pytest.mark.parametrize("way", STACKED)
def test_stacked_states_without_vmap_are_refused_with_the_cure(way):
    optimizer = ps.from_torch(torch.optim.AdamW, in_state=("lr",))
    state, step = job(optimizer, RULE)
    states = ps.stack_states([state, state])
    trees = states.params, states.params, states.opt_state
    with pytest.raises(ValueError, match=r"\(2,\).*cause: .*stacked states.*Fix: .*`torch\.vmap\("):
        STACKED[way](states, [batch()], optimizer, step, trees)


def test_a_first_state_without_parameters_or_of_another_generator_is_refused():
    for params in ({}, {"w": None}):
        with pytest.raises(ValueError, match="params has no tensor"):
            ps.init_train_state(params, {}, SGD, RULE)
    for rng in (0, torch.Generator(), torch.ones(4)):
        with pytest.raises(TypeError, match=r"rng=torch.Generator\('cpu'\).manual_seed\(0\)"):
            ps.init_train_state({"w": torch.ones(1)}, {}, SGD, RULE, rng=rng)


@pytest.mark.parametrize("way", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
def test_old_tensors_that_a_loss_returns_are_apart_in_the_result_donated_or_not(way):
    def loss_fn(params, buffers, x):
        w, twice = params["w"], params["w"] * 2
        if way == "eager":  # a loss may keep what it returns
            kept.append(twice)
        new = {"x": buffers["y"], "y": buffers["x"], "target": w, "view": w.view(3), "twice": twice}
        return (w * x).sum(), new, (w, buffers["x"], x, twice)

    names, kept = ("x", "y", "target", "view", "twice"), []
    buffers = {name: torch.full((3,), float(index)) for index, name in enumerate(names)}
    state, step = started({"w": torch.ones(3)}, loss_fn=loss_fn, buffers=buffers)
    x, donating = torch.ones(3), functools.partial(step, donate=True)
    expected = step(state, [x])
    if way == "compiled":
        step, donating = (
            torch.compile(f, fullgraph=True, backend="aot_eager") for f in (step, donating)
        )
    new = step(state, [x])
    assert same_bits(new, expected)
    assert not shares_memory((state, x, kept), new)
    assert not shares_memory(*new)
    assert same_bits(donating(clone(state), [x]), expected)


class Swap:
    """An optimizer that swaps its parameters."""

    init = staticmethod(lambda params: ())
    step = staticmethod(lambda params, grads, s: ({"a": params["b"], "b": params["a"]}, s))


KEEPS = ps.from_transformation(
    (lambda p: {"prev": p}, lambda g, s, p: (pytree.tree_map(torch.neg, g), {"prev": p}))
)
UNFUSED = ps.from_torch(OPTIM.SGD, lr=0.5, foreach=False)
HALF_SGD = ps.from_torch(OPTIM.SGD, lr=2.0**15)
ONES, TWOS = torch.ones(4), torch.full((4,), 2.0)
ALIASED = {  # (optimizer, params, grads) of a tensor of 8s and one of 0 to 3
    "one tensor in two places": lambda t, u: (
        SGD, {"a": t, "b": t, "c": t[:2]}, {"a": +ONES, "b": +TWOS, "c": torch.ones(2)}),
    "one tensor in two places, formula": lambda t, u: (
        UNFUSED, {"a": t, "b": t, "c": t[:2]}, {"a": +ONES, "b": +TWOS, "c": torch.ones(2)}),
    "one gradient in two places": lambda t, u: (
        SGD, {"a": +ONES, "b": +ONES, "c": torch.ones(2)}, {"a": t, "b": t, "c": t[:2]}),
    "gradients are other parameters": lambda t, u: (SGD, {"a": u, "b": t}, {"a": t, "b": u}),
    "gradients are the parameters": lambda t, u: (SGD, {"w": t}, {"w": t}),
    "an optimizer that swaps": lambda t, u: (Swap(), {"a": t, "b": u}, {"a": None, "b": None}),
    "an optimizer that keeps its parameters": lambda t, u: (KEEPS, {"w": t}, {"w": u}),
    "float64 gradients": lambda t, u: (
        ps.from_torch(OPTIM.SGD, lr=1e-30), {"w": t}, {"w": u.double() * 1e40}),
    "half gradients of half parameters": lambda t, u: (
        HALF_SGD, {"w": torch.zeros(2).half()}, {"w": torch.full((2,), 1e-3).half()}),
}  # fmt: skip


@pytest.mark.parametrize("whole", [False, True], ids=["maybe_step", "unscale_and_step"])
@pytest.mark.parametrize("name", ALIASED)
def test_donation_of_what_shares_memory_gives_the_same_bits(name, whole):
    def call(donate):
        optimizer, params, grads = ALIASED[name](torch.full((4,), 8.0), torch.arange(4.0))
        trees = params, grads, optimizer.init(params)
        if whole:
            return ps.unscale_and_step(optimizer, at(2.0**16), *trees, donate=donate)
        return ps.maybe_step(optimizer, *trees, torch.tensor(False), donate=donate)

    assert_donation_keeps_bits(call)


@examples(15)
@given(
    st.lists(st.sampled_from([0.5, -2.0, math.inf, math.nan]), min_size=1, max_size=12),
    st.integers(1, 4),
    st.booleans(),
)
def test_a_run_is_the_clean_steps_and_the_rules_trace(gradients, interval, donate):
    """Skipped steps might as well not have been there, but for the scale."""
    rule = ps.DynamicScale(2.0**4, growth_interval=interval)
    clean, step = started(
        {"w": torch.zeros(2)}, None, SGD, rule, buffers={"n": torch.tensor(0)},
        loss_fn=lambda p, b, g: ((p["w"] * g).sum(), {"n": b["n"] + 1}),
    )  # fmt: skip
    state, scaler = clone(clean), rule.init()
    for g in gradients:
        state, info = step(state, [torch.tensor([g, 1.0])], donate=donate)
        scaler = rule.update(scaler, torch.tensor(not math.isfinite(g)))
        if math.isfinite(g):
            clean, _ = step(clean, [torch.tensor([g, 1.0])])
        assert info.found_inf.item() is not math.isfinite(g)
        assert same_bits(state, clean._replace(scaler=scaler))


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (ps.DynamicScale, "rule is the class DynamicScale; "),
        (SGD, r"rule is KernelOrFormulaOptimizer; .*`update\(scaler, found_inf\)`"),
        (torch.amp.GradScaler("cpu"), r"rule is GradScaler; .*Fix: DynamicScale\(\)"),
    ],
    ids=["class", "no update", "GradScaler"],
)
def test_what_is_no_rule_is_refused_with_what_is_expected(rule, words):
    state, step = job(SGD, RULE)
    with pytest.raises(TypeError, match=words):
        step(state, [batch()], rule=rule)
    with pytest.raises(TypeError, match=words):
        ps.init_train_state(state.params, state.buffers, SGD, rule)


@pytest.mark.parametrize("wrong", [OPTIM.AdamW, type(SGD), OPTIM.SGD([torch.zeros(1)])])
def test_what_is_no_optimizer_is_refused_with_what_is_expected(wrong):
    (state, step), params = job(SGD, RULE), {"w": torch.ones(3)}
    words = "optimizer is .*expected an object with `init` and `step`.*Fix: from_torch"
    for call in (
        lambda: step(state, [batch()], optimizer=wrong),
        lambda: ps.init_train_state(params, {}, wrong, RULE),
        lambda: ps.maybe_step(wrong, params, params, (), False),
        lambda: ps.unscale_and_step(wrong, RULE.init(), params, params, ()),
    ):
        with pytest.raises(TypeError, match=words):
            call()


@pytest.mark.parametrize("cls", [OPTIM.AdamW, OPTIM.Adadelta], ids=["fused", "formula"])
@pytest.mark.parametrize(
    "tie",
    [
        lambda s: s._replace(buffers={"e": s.params["w"]}),
        lambda s: s._replace(step=s.opt_state.applied),
        lambda s: s._replace(buffers={"e": next(iter(s.opt_state.slots.values()))["w"]}),
    ],
    ids=["a buffer is the parameter", "step is the optimizer's count", "a buffer is a slot"],
)
def test_donation_of_a_state_whose_parts_share_memory_gives_the_same_bits(cls, tie):
    state, step = started(
        {"w": torch.arange(4.0)},
        optimizer=ps.from_torch(cls, lr=0.1),
        loss_fn=lambda p, b, x: ((p["w"] * x).sum(), {"e": b["e"] + 1}),
        buffers={"e": torch.zeros(4)},
    )
    assert_donation_keeps_bits(
        lambda donate: step(tie(clone(state)), [torch.ones(4)], donate=donate)
    )


PAIR = ps.from_transformation((lambda p: (), lambda g, s, p: (g, s)))
ADADELTA = ps.from_torch(OPTIM.Adadelta)


@pytest.mark.parametrize(
    ("optimizer", "settings", "grad", "like", "message"),
    [
        (PAIR, {}, torch.ones(2), {"w": torch.ones(3)}, r"grads\['w'\] has shape \(2,\)"),
        (ADADELTA, {}, torch.ones(3), {"v": torch.ones(3)}, "parameters v, params has w"),
        (SGD, {"clip_value": 1.0}, torch.ones(3).cfloat(), None, "complex numbers have no order"),
    ],
    ids=["a shape", "another state", "complex and clip_value"],
)
def test_what_is_refused_is_refused_before_gradients_are_donated(
    optimizer, settings, grad, like, message
):
    params, grads = {"w": torch.ones(3, dtype=grad.dtype)}, {"w": grad}
    opt_state = optimizer.init(like or params)
    with (
        Untouched((grads, params, opt_state)),
        pytest.raises((ValueError, TypeError), match=message),
    ):
        ps.unscale_and_step(optimizer, at(4.0), params, grads, opt_state, donate=True, **settings)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("inside", [True, False])
def test_a_step_over_fake_tensors_reads_no_value_inside_of_their_mode_and_outside(inside, number):
    max_norm = 1.0 if inside else None  # outside torch joins no number to a fake tensor
    with FakeTensorMode() as mode:
        params, window = {"w": torch.zeros(5)}, [torch.ones(5)] * number
        state, step = started(params, lambda p, x: (p["w"] * x).sum(), ADAMW, RULE)
    with mode if inside else contextlib.nullcontext():
        state, info = step(state, window, max_norm=max_norm)
    assert isinstance(info.loss, FakeTensor)


def test_the_state_of_an_optimizer_with_init_and_step_alone_may_hold_none():
    class Plain:
        def init(self, params):
            return {"none": None, "too": None}

        def step(self, params, grads, opt_state):
            return {name: p - grads[name] for name, p in params.items()}, opt_state

    state, step = started({"w": torch.ones(2)}, lambda p, x: (p["w"] * x).sum(), Plain())
    new, _ = step(state, [torch.ones(2)])
    assert new.opt_state == {"none": None, "too": None}
    assert new.params["w"].equal(torch.zeros(2))
