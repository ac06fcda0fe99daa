"""One step: skipped or applied as a whole, replayed bit for bit."""

import contextlib
import functools
import math

import hypothesis.strategies as st
import optree
import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from helpers import (
    OldDouble,
    Untouched,
    any32,
    assert_donation_keeps_bits,
    at,
    batch,
    clone,
    examples,
    generator_of,
    job,
    same_bits,
    scaled_by,
    shares_memory,
    small_net,
    stack,
    started,
    trained,
    trees,
    unstack,
)
from hypothesis import given
from torch import nn

import purescale as ps
from purescale._torch import tracing
from purescale.testing import assert_sync_free

OPTIM = torch.optim


ADAMW = ps.from_torch(OPTIM.AdamW, lr=0.01)


SGD = ps.from_torch(OPTIM.SGD, lr=0.1, momentum=0.9)


RULE = ps.DynamicScale(init_scale=2.0**10, growth_interval=3)


optimizers = pytest.mark.parametrize(
    "optimizer", [ADAMW, SGD, ps.from_torch(OPTIM.RMSprop)], ids=["AdamW", "SGD", "RMSprop"]
)


OVERFLOWS = 2.0**24  # a scale under which the small net overflows float16


# ---- train_step


@optimizers
def test_train_step_equals_the_small_functions(optimizer):
    state, step = job(optimizer, RULE, max_norm=1.0)
    new, info = step(state, [batch()])

    apply, _, _ = ps.make_functional(small_net())
    apply = ps.with_policy(apply, "params=float32,compute=float16,output=float32")

    def scaled(params):
        logits, buffers = apply(params, state.buffers, batch()[0])
        loss = F.cross_entropy(logits, batch()[1])
        return ps.scale_loss(state.scaler, loss), (loss, buffers)

    grads, (_, (loss, buffers)) = torch.func.grad_and_value(scaled, has_aux=True)(state.params)
    grads, found_inf = ps.unscale_and_check(state.scaler, grads)
    grads, norm = ps.clip_by_global_norm(grads, 1.0)
    params, opt_state = ps.maybe_step(optimizer, state.params, grads, state.opt_state, found_inf)
    expected = (
        params,
        ps.select(found_inf, state.buffers, buffers),
        opt_state,
        RULE.update(state.scaler, found_inf),
        torch.tensor(1),
        (),
        (),
    )
    assert same_bits(tuple(new), expected)
    assert same_bits(
        (info.loss, info.found_inf, info.scale, info.grad_norm, info.aux),
        (loss, found_inf, state.scaler.scale, norm, ()),
    )


@optimizers
@pytest.mark.parametrize("donate", [False, True])
def test_a_skipped_step_returns_all_but_the_scaler_bit_for_bit(optimizer, donate):
    state, step = job(optimizer, RULE)
    state, _ = trained(state, step, [[batch(index)] for index in range(3)])
    state = scaled_by(state, OVERFLOWS)
    new, info = step(clone(state), [batch()], donate=donate)
    assert info.found_inf
    assert same_bits(new._replace(scaler=state.scaler), state)
    assert new.scaler.scale == OVERFLOWS / 2


@optimizers
def test_a_step_is_pure_and_replays_bit_for_bit(optimizer):
    state, step = job(optimizer, RULE)
    state, _ = trained(state, step, [[batch(0)], [batch(1)]])
    microbatches = [batch(5), batch(6)]
    with Untouched((state, microbatches)):
        once = step(state, microbatches)
    assert not shares_memory((state, microbatches), once)
    assert same_bits(once, step(state, microbatches))


@optimizers
def test_donation_gives_the_same_bits(optimizer):
    state, step = job(optimizer, RULE)
    other = clone(state)
    for index in range(8):  # overflow, growth and clean steps
        scale = OVERFLOWS if index == 2 else None
        state, other = (scaled_by(s, scale) if scale else s for s in (state, other))
        (state, info), (other, donated) = (
            step(state, [batch(index)]),
            step(other, [batch(index)], donate=True),
        )
        assert same_bits((state, info), (other, donated))


def test_init_train_state_shares_no_memory_with_what_it_was_given():
    _, params, buffers = ps.make_functional(nn.BatchNorm1d(2))
    rng = torch.Generator().manual_seed(0).get_state()
    assert not shares_memory(
        (params, buffers, rng), ps.init_train_state(params, buffers, SGD, RULE, rng=rng)
    )


def test_a_step_reads_no_tensor_value():
    for optimizer in (ADAMW, SGD):
        state, step = job(
            optimizer, RULE, max_norm=1.0, clip_value=0.5, weight_fn=lambda b: b[0].shape[0]
        )
        state, _ = assert_sync_free(step, state, [batch(0), batch(1)])
        assert_sync_free(step, scaled_by(state, OVERFLOWS), [batch(0)], donate=True)


def test_the_unscaled_loss_is_reported_in_float32():
    state, step = job(SGD, RULE)
    for scale in (1.0, OVERFLOWS):
        loss = step(scaled_by(state, scale), [batch()])[1].loss
        assert loss.dtype is torch.float32
        assert 0 < loss < 3


def test_a_half_loss_is_reported_in_float32():
    state, step = started({"w": torch.ones(1)}, lambda p, _: p["w"].half())
    assert step(state, [None])[1].loss.dtype is torch.float32
    assert step(state, [None])[1].loss.shape == ()


# ---- microbatches


@examples(20)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_any_split_weighted_by_samples_gives_the_full_batch_step(sizes):
    x, y = torch.randn(2, sum(sizes), 3, dtype=torch.float64)
    state, step = started(
        {"w": torch.randn(3, dtype=torch.float64)},
        lambda p, m: (m[0] @ p["w"] - m[1] @ p["w"].detach().sign()).square().mean(),
        weight_fn=lambda m: len(m[1]),
    )
    whole = step(state, [(x, y)])
    parts = step(state, list(zip(x.split(sizes), y.split(sizes), strict=True)))
    torch.testing.assert_close(parts[0].params, whole[0].params, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(parts[1].loss, whole[1].loss, rtol=1e-6, atol=1e-9)


def mean_job(weight_fn=None):
    """A step whose gradient is the weighted mean of its microbatches."""
    return started(
        {"w": torch.tensor(0.0)},
        loss_fn=lambda p, b, g: (p["w"] * g, {"n": b["n"] + 1}, g),
        buffers={"n": torch.tensor(0)},
        weight_fn=weight_fn,
    )


def test_microbatches_are_averaged():
    start, step = mean_job()
    state, info = step(start, [torch.tensor(1.0), torch.tensor(2.0), torch.tensor(6.0)])
    assert state.params["w"] == -3
    assert state.buffers["n"] == 3
    assert info.aux == (torch.tensor(1.0), torch.tensor(2.0), torch.tensor(6.0))


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_weights_are_numbers_or_tensors(kind):
    state, step = mean_job(lambda g: kind(1.0) if g < 5 else kind(3.0))
    assert step(state, [torch.tensor(2.0), torch.tensor(6.0)])[0].params["w"] == -5


def test_what_has_weight_zero_counts_for_nothing():
    state, step = mean_job(lambda g: 1.0 if torch.isfinite(g) else 0.0)
    for microbatches in ([math.nan, 2.0], [2.0, math.inf], [math.nan, 2.0, math.nan]):
        new, info = step(state, [torch.tensor(g) for g in microbatches])
        assert new.params["w"] == -2
        assert not info.found_inf


@pytest.mark.parametrize("weight", [math.nan, math.inf, -1.0, -0.5])
def test_a_weight_tensor_that_is_no_weight_skips_the_step(weight):
    state, step = mean_job(lambda g: torch.where(g > 1, weight, 1.0))
    new, info = step(state, [torch.tensor(1.0), torch.tensor(2.0)])
    assert info.found_inf
    assert same_bits(new, state)


def test_sparse_gradients_are_averaged_by_weight():
    state, step = started(
        {"w": torch.zeros(4, 2)}, lambda p, m: F.embedding(m, p["w"], sparse=True).sum()
    )
    microbatches = [torch.tensor([0, 0]), torch.tensor([1])]
    for weight_fn, expected in ((None, [1.0, 0.5, 0, 0]), (len, [4 / 3, 1 / 3, 0, 0])):
        new, _ = step(state, microbatches, weight_fn=weight_fn)
        torch.testing.assert_close(-new.params["w"][:, 0], torch.tensor(expected))


def test_a_parameter_that_is_none_passes_through():
    state, step = started({"w": torch.ones(1), "b": None}, lambda p, _: p["w"].square().sum(), SGD)
    assert step(state, [None])[0].params["b"] is None

    def loss_after(w):
        stepped, _ = step(state._replace(params={"w": w, "b": None}), [None])
        return stepped.params["w"].sum()

    assert torch.func.grad(loss_after)(torch.ones(1)).item() == pytest.approx(1 - 0.1 * 2)


# ---- random numbers


def dropout_job(seed=3):
    def loss(params, x):
        return F.dropout(x @ params["w"], 0.5).square().mean()

    rng = None if seed is None else generator_of(seed).get_state()
    state, step = started({"w": torch.ones(8, 8)}, loss, SGD, rng=rng)
    return state, lambda state: step(state, [torch.ones(4, 8)] * 2)


def test_with_rng_a_step_replays_bit_for_bit_whatever_the_global_generator():
    state, step = dropout_job()
    torch.manual_seed(1)
    once = step(state)
    torch.manual_seed(2)
    assert same_bits(once, step(state))


def test_with_rng_the_global_generator_is_left_as_it_was():
    state, step = dropout_job()
    before = torch.get_rng_state()
    step(state)
    assert torch.equal(torch.get_rng_state(), before)


def test_with_rng_the_next_step_draws_other_numbers():
    state, step = dropout_job()
    second, info = step(state)
    assert not torch.equal(second.rng, state.rng)
    assert step(second._replace(params=state.params))[1].loss != info.loss


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


def test_with_rng_the_generator_is_put_back_when_the_loss_raises():
    state, _ = dropout_job()
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError):
        ps.train_step(state, [1], loss_fn=lambda p, b, x: 1 / 0, optimizer=SGD, rule=RULE)
    assert torch.equal(torch.get_rng_state(), before)


def test_without_rng_the_global_generator_decides():
    state, step = dropout_job(None)
    assert state.rng == ()
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(step(state)[1].loss.item())
    assert losses[0] == losses[1] != losses[2]


# ---- what the loss function may be


class RejectsAll:
    """A guard that rejects every step."""

    def init(self, device=None):
        return ()

    def update(self, state, loss, grad_norm):
        return state, torch.ones_like(loss, dtype=torch.bool)


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize(
    ("settings", "overflows", "falls"),
    [
        ({}, False, False),
        ({"on_nonfinite": "drop_microbatch"}, False, False),
        ({"on_nonfinite": "drop_microbatch"}, True, True),
        ({"max_retries": 30}, True, True),
    ],
)
def test_a_rejected_step_lowers_the_scale_only_for_an_overflow_in_its_window(
    settings, overflows, falls, forced
):
    state, step = started(
        {"w": torch.ones(1)},
        lambda p, x: (p["w"].half() * x).float().sum(),
        guard=RejectsAll(),
        **settings,
    )
    window = [torch.ones(1).half(), torch.full((1,), 2.0**8 if overflows else 1.0).half()]
    with tracing.as_on_an_accelerator() if forced else contextlib.nullcontext():
        new, info = step(state, window)
    assert info.rejected
    assert new.step == 0
    assert (new.scaler.scale < state.scaler.scale) == falls


def test_unused_parameters_get_a_gradient_of_zero():
    sgd = ps.from_torch(OPTIM.SGD, lr=1.0, weight_decay=0.25)
    params = {"used": torch.ones(1), "unused": torch.ones(1)}
    state, step = started(params, lambda p, _: p["used"].sum(), sgd)
    new, info = step(state, [None])
    # decayed, as torch does for 0 and not for None
    assert (new.params["used"], new.params["unused"]) == (-0.25, 0.75)
    assert not info.found_inf


def test_a_step_trains_under_no_grad():
    state, step = job(SGD, RULE)
    with torch.no_grad():
        inside = step(state, [batch()])
    assert same_bits(inside, step(state, [batch()]))


def test_nothing_returned_carries_a_graph():
    state, step = job(SGD, RULE)
    assert not any(t.requires_grad for t in pytree.tree_leaves(step(state, [batch()])))


def test_an_autograd_function_of_the_older_form_is_taken():
    state, step = started({"w": torch.ones(1)}, lambda p, _: OldDouble.apply(p["w"]).sum())
    assert step(state, [None])[0].params["w"] == -1


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (lambda w, b: w.sum(), TypeError, r"returned Tensor; expected \(loss, new_buffers\)"),
        (lambda w, b: (w.sum(),), TypeError, "returned a tuple of 1"),
        (lambda w, b: (w.sum(), b, 1, 2), TypeError, "returned a tuple of 4"),
        (lambda w, b: [w.sum(), b], TypeError, "returned list"),
        (lambda w, b: (b, w.sum()), TypeError, "returned dict as its loss"),
        (lambda w, b: (1.0, b), TypeError, "returned float as its loss"),
        (lambda w, b: (w, b), ValueError, r"has shape \(2,\); a loss is one number"),
        (lambda w, b: (w.sum().long(), b), TypeError, "dtype torch.int64"),
        (lambda w, b: (w.sum(), {}), ValueError, r"does not match buffers: missing \['n'\]"),
        (lambda w, b: (w.sum(), None), ValueError, "new_buffers does not match buffers"),
        (lambda w, b: (torch.ones(()), b), ValueError, "the loss does not depend on params"),
        (
            lambda w, b: (w.sum(), {"n": torch.ones(3)}),
            ValueError,
            r"buffers\['n'\] is torch.float32 \(1,\), but torch.float32 \(3,\) in new_buffers",
        ),
        (
            lambda w, b: (w.sum(), {"n": b["n"].double()}),
            ValueError,
            r"buffers\['n'\] is torch.float32 \(1,\), but torch.float64 \(1,\) in new_buffers",
        ),
    ],
)
@pytest.mark.parametrize("donate", [False, True])
def test_a_loss_fn_that_returns_the_wrong_thing_is_refused_and_nothing_changes(
    returned, error, message, donate
):
    state, step = started(
        {"w": torch.ones(2)},
        loss_fn=lambda p, b, _: returned(p["w"], b),
        buffers={"n": torch.zeros(1)},
    )
    with Untouched(state), pytest.raises(error, match=message):
        step(state, [None], donate=donate)


class Line:
    """A container of one's own."""

    def __init__(self, slope, shift):
        self.slope, self.shift = slope, shift

    @property
    def parts(self):
        return [self.slope, self.shift]


optree.register_pytree_node(
    Line, lambda line: (line.parts, None), lambda _, parts: Line(*parts), namespace="purescale"
)
pytree.register_pytree_node(Line, lambda line: (line.parts, None), lambda parts, _: Line(*parts))
WAYS = {
    "eager": lambda step: step,
    "jit": functools.partial(ps.jit, backend="aot_eager"),
    "vmap": lambda step: lambda *args: unstack(torch.vmap(step)(*(stack([a, a]) for a in args)), 0),
    "torch.compile": functools.partial(torch.compile, fullgraph=True, backend="eager"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_container_of_ones_own_is_a_tree_as_a_list_is(way):
    adamw = ps.from_torch(OPTIM.AdamW, lr=0.1, overrides={"0": {"weight_decay": 0.5}})
    ends = []
    for make, parts in ((Line, lambda line: line.parts), (lambda *x: list(x), list)):

        def loss_fn(params, buffers, x, make=make, parts=parts):
            slope, shift = parts(params)
            seen, last = parts(buffers)
            return (slope * x + shift).square().sum(), make(seen + 1, last + x)

        params, buffers = make(torch.ones(3), torch.zeros(3)), make(torch.zeros(3), torch.zeros(3))
        start, step = started(params, None, adamw, loss_fn=loss_fn, buffers=buffers)
        end, _ = WAYS[way](lambda state, x, step=step: step(state, [x]))(start, torch.ones(3))
        ends.append([*parts(end.params), *parts(end.buffers)])
    assert same_bits(*ends)


# ---- bad calls


@pytest.mark.parametrize(
    ("microbatches", "error", "message"),
    [
        ([], ValueError, "empty list"),
        (batch(), TypeError, r"is a tuple; .*`train_step\(state, \[batch\], \.\.\.\)`"),
        (torch.ones(2), TypeError, "is a Tensor; expected a list"),
        (iter([1]), TypeError, r"is a list_iterator; .*islice\("),
        ((b for b in [1]), TypeError, r"is a generator; .*islice\("),
        ({"x": 1}, TypeError, r"is a dict; expected a list.*\[batch\].* for one batch"),
        (1.0, TypeError, r"is a float; expected a list, which makes one step\. Fix: `train_"),
    ],
)
def test_microbatches_that_are_no_list_are_refused_before_any_work(microbatches, error, message):
    state, step = job(SGD, RULE)
    with pytest.raises(error, match=message):
        step(state, microbatches)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"max_norm": 0.0}, ValueError, "max_norm must be above 0"),
        ({"max_norm": "1"}, TypeError, "max_norm must be a number"),
        ({"clip_value": -1.0}, ValueError, "clip_value must be above 0"),
        ({"weight_fn": lambda b: -1.0}, ValueError, r"weight_fn returned -1\.0"),
        ({"weight_fn": lambda b: math.nan}, ValueError, "weight_fn returned nan"),
        ({"weight_fn": lambda b: "8"}, TypeError, "weight_fn returned '8'"),
        ({"weight_fn": lambda b: True}, TypeError, "weight_fn returned True"),
        ({"weight_fn": lambda b: torch.ones(2)}, ValueError, r"returned a tensor of shape \(2,\)"),
        (
            {"on_nonfinite": "ignore"},
            ValueError,
            "on_nonfinite must be 'drop_window' or 'drop_microbatch', got 'ignore'",
        ),
        ({"max_retries": -1}, ValueError, "max_retries must be a whole number, 0 or more, got -1"),
        ({"max_retries": True}, ValueError, "max_retries must be a whole number"),
        (
            {"max_retries": 1, "rule": ps.StaticScale(2.0)},
            ValueError,
            r"with StaticScale\(scale=2.0\), whose scale never moves",
        ),
        ({"max_norm": 1.0, "norm_type": 0}, ValueError, "norm_type must be above 0"),
        ({"bn_update": "never"}, ValueError, "bn_update must be 'each' or 'window', got 'never'"),
        ({"group": "world"}, ValueError, "group=None"),
    ],
)
def test_bad_settings_of_a_step_are_refused_before_loss_fn_is_called(settings, error, message):
    state, step = job(SGD, RULE)
    with pytest.raises(error, match=message):
        step(state, [batch()], **{"loss_fn": lambda *a: pytest.fail("called"), **settings})


def test_a_state_that_is_no_train_state_is_refused():
    _, step = job(SGD, RULE)
    with pytest.raises(TypeError, match="takes a TrainState, got dict"):
        step({}, [batch()])


STACKED = {  # a step, or a part of it, of stacked states that is not mapped over them
    "a step": lambda s, w, o, step, trees: step(s, w),
    "jit": lambda s, w, o, step, trees: ps.jit(step, backend="aot_eager")(s, w),
    "another state mapped": lambda s, w, o, step, trees: torch.vmap(step, (None, 0))(
        s, [stack([*w] * 2)]
    ),
    "scan": lambda s, w, o, step, trees: ps.scan_steps(step, s, stack([w] * 3)),
    "by hand": lambda s, w, o, step, trees: ps.unscale_and_step(o, s.scaler, *trees),
    "scale_loss": lambda s, w, o, step, trees: ps.scale_loss(s.scaler, torch.ones(())),
    "unscale_and_check": lambda s, w, o, step, trees: ps.unscale_and_check(s.scaler, s.params),
    "maybe_step": lambda s, w, o, step, trees: ps.maybe_step(o, *trees, torch.tensor(False)),
    "an optimizer": lambda s, w, o, step, trees: o.step(*trees),
}


@pytest.mark.parametrize("way", STACKED)
def test_stacked_states_without_vmap_are_refused_with_the_cure(way):
    optimizer = ps.from_torch(torch.optim.AdamW, in_state=("lr",))
    state, step = job(optimizer, RULE)
    states = ps.stack_states([state, state])
    trees = states.params, states.params, states.opt_state
    with pytest.raises(ValueError, match=r"\(2,\).*cause: .*stacked states.*Fix: .*`torch\.vmap\("):
        STACKED[way](states, [batch()], optimizer, step, trees)


@pytest.mark.parametrize("params", [{}, {"w": None}, []])
def test_a_state_without_parameters_is_refused(params):
    with pytest.raises(ValueError, match="params has no tensor"):
        ps.init_train_state(params, {}, SGD, RULE)


@pytest.mark.parametrize("rng", [0, torch.Generator(), torch.ones(4)])
def test_an_rng_that_is_no_generator_state_is_refused(rng):
    with pytest.raises(
        TypeError, match=r"rng=torch.Generator\('cpu'\).manual_seed\(0\).get_state\(\)"
    ):
        ps.init_train_state({"w": torch.ones(1)}, {}, SGD, RULE, rng=rng)


# ---- memory that is shared


@pytest.mark.slow
@pytest.mark.parametrize("way", ["eager", "compiled"])
@pytest.mark.parametrize(
    "new_buffers",
    [
        lambda p, b: {"x": p["w"], "y": b["y"]},
        lambda p, b: {"x": b["y"], "y": b["x"]},
        lambda p, b: {"x": p["w"].view(3), "y": p["w"]},
    ],
    ids=["target network", "swapped", "views"],
)
def test_donation_gives_the_same_bits_when_new_buffers_are_old_tensors(new_buffers, way):
    state, step = started(
        {"w": torch.ones(3)},
        loss_fn=lambda p, b, x: ((p["w"] * x).sum(), new_buffers(p, b), p["w"]),
        buffers={"x": torch.zeros(3), "y": torch.full((3,), 2.0)},
    )
    x, donating = [torch.ones(3)], functools.partial(step, donate=True)
    if way == "compiled":
        donating = torch.compile(donating, fullgraph=True, backend="aot_eager")
    expected = step(state, x)
    assert same_bits(donating(clone(state), x), expected)


@pytest.mark.parametrize("way", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
def test_what_loss_fn_returns_shares_no_memory_with_state_and_microbatch(way):
    state, step = started(
        {"w": torch.ones(3)},
        loss_fn=lambda p, b, x: ((p["w"] * x).sum(), b, (p["w"], b["x"], x)),
        buffers={"x": torch.zeros(3)},
    )
    if way == "compiled":
        step = torch.compile(step, fullgraph=True, backend="aot_eager")
    x = torch.ones(3)
    assert not shares_memory((state, x), step(state, [x]))


class Swap:
    """An optimizer that swaps its parameters."""

    init = staticmethod(lambda params: ())
    step = staticmethod(lambda params, grads, s: ({"a": params["b"], "b": params["a"]}, s))


KEEPS = ps.from_transformation(
    (lambda p: {"prev": p}, lambda g, s, p: (pytree.tree_map(torch.neg, g), {"prev": p}))
)
UNFUSED, HALF_SGD = (
    ps.from_torch(OPTIM.SGD, lr=0.5, foreach=False),
    ps.from_torch(OPTIM.SGD, lr=2.0**15),
)
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


def test_gradients_that_are_views_of_one_another_are_each_divided_once():
    t = torch.full((4,), 8.0)
    given = {"a": t, "b": t.view(2, 2), "c": t[:2]}
    unscaled, _ = ps.unscale_and_check(at(4.0), given, donate=True)
    assert {x.item() for leaf in unscaled.values() for x in leaf.flatten()} == {2.0}


def test_clipping_donated_gradients_that_are_one_tensor_gives_the_same_bits():
    def call(donate):
        t = torch.full((4,), 8.0)
        return ps.clip_by_global_norm({"a": t, "b": t}, 8.0, donate=donate)

    assert_donation_keeps_bits(call)


def test_a_transformation_whose_state_keeps_the_parameters_has_those_before_the_step():
    params, grads = {"w": torch.ones(1)}, {"w": torch.ones(1)}
    stepped, state = ps.maybe_step(KEEPS, params, grads, KEEPS.init(params), torch.tensor(False))
    assert (stepped["w"], state["prev"]["w"]) == (0, 1)


def test_a_gradient_in_another_layout_trains_the_same():
    c = torch.randn(3, 2)
    state, step = started({"w": torch.zeros(2, 3)}, lambda p, c: (p["w"].t() * c).sum())
    torch.testing.assert_close(step(state, [c])[0].params["w"], -c.t())


# ---- properties over random runs


@examples(30)
@given(trees(any32), st.sampled_from([ADAMW, SGD]), st.booleans())
def test_maybe_step_is_pure_and_keeps_everything_on_a_skip(tree, optimizer, bad):
    params = pytree.tree_map(lambda t: None if t is None else torch.zeros_like(t), tree)
    state, flag = optimizer.init(params), torch.tensor(bad)
    with Untouched((params, tree, state, flag)):
        new = ps.maybe_step(optimizer, params, tree, state, flag)
    assert not shares_memory((params, tree, state), new)
    assert new[1].applied == int(not bad)
    if bad:
        assert same_bits(new, (params, state))


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


# ---- rules and optimizers that are none


class OnlyUpdate:
    def update(self, scaler, found_inf):
        return scaler


class OnlyInit:
    def init(self, device=None):
        return RULE.init(device)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (ps.DynamicScale, "rule is the class DynamicScale; "),
        (OnlyUpdate(), r"rule is OnlyUpdate; .*`init\(device\)`"),
        (OnlyInit(), r"rule is OnlyInit; .*`update\(scaler, found_inf\)`"),
        (torch.amp.GradScaler("cpu"), r"rule is GradScaler; .*Fix: DynamicScale\(\)"),
        (None, "rule is NoneType; "),
    ],
    ids=["class", "no init", "no update", "GradScaler", "None"],
)
def test_what_is_no_rule_is_refused_with_what_is_expected(rule, words):
    state, step = job(SGD, RULE)
    with pytest.raises(TypeError, match=words):
        step(state, [batch()], rule=rule)
    with pytest.raises(TypeError, match=words):
        ps.init_train_state(state.params, state.buffers, SGD, rule)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            OPTIM.AdamW,
            "the class AdamW; expected an object with `init` and `step`.*Fix: from_torch",
        ),
        (type(SGD), "the class TorchOptimizer; expected an object with .*Fix: from_torch"),
        (OPTIM.SGD([torch.zeros(1)]), r"SGD.*Fix: from_torch\(torch.optim.AdamW"),
    ],
    ids=["class of torch", "class of ours", "of torch"],
)
def test_what_is_no_optimizer_is_refused_with_what_is_expected(wrong, words):
    state, step = job(SGD, RULE)
    with pytest.raises(TypeError, match=f"optimizer is {words}"):
        step(state, [batch()], optimizer=wrong)
    with pytest.raises(TypeError, match=f"optimizer is {words}"):
        ps.init_train_state(state.params, {}, wrong, RULE)


# ---- edges that a careless change would break


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("scale", [0.0, -1.0, -4.0, math.inf, math.nan])
@pytest.mark.parametrize("optimizer", [SGD, ps.from_torch(OPTIM.Adamax)], ids=["fused", "formula"])
def test_nothing_that_was_scaled_by_a_damaged_scale_is_trusted(optimizer, scale, donate):
    params, grads = {"w": torch.ones(2)}, {"w": torch.ones(2)}
    for bound in ({}, {"max_norm": 1.0}):
        given = clone(params), clone(grads), optimizer.init(params)
        out = ps.unscale_and_step(optimizer, at(scale), *given, donate=donate, **bound)
        assert out.found_inf
        assert same_bits(out.params, params)
        assert not bound or not torch.isfinite(out.grad_norm)


def test_a_flag_may_be_a_number_tensor():
    assert ps.select(torch.tensor(1.0), torch.zeros(1), torch.ones(1)) == 0
    assert ps.select(torch.tensor(2), torch.zeros(1), torch.ones(1)) == 0


@pytest.mark.slow
def test_a_compiled_step_returns_aux_that_is_no_tensor():
    state, step = started(
        {"w": torch.ones(3)},
        loss_fn=lambda p, b, x: ((p["w"] * x).sum(), b, {"name": "a", "x": x, "none": None}),
        buffers={"n": None},
    )
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert same_bits(compiled(state, [torch.ones(3)]), step(state, [torch.ones(3)]))


def test_a_loss_that_is_aux_too_lies_in_memory_of_its_own():
    def loss_fn(params, buffers, x):
        loss = params["w"].sum()
        return loss, {"n": loss + 1}, (loss, x * 2)

    buffers = {"n": torch.ones(())}
    state, step = started({"w": torch.ones(3)}, loss_fn=loss_fn, buffers=buffers)
    _, info = step(state, [torch.ones(3)], donate=True)
    assert not shares_memory(info.loss, info.aux)
    assert info.aux[0][0] == info.loss == 3


def test_init_train_state_leaves_the_graph_behind():
    w = torch.ones(2, requires_grad=True)
    state = ps.init_train_state({"w": w}, {"b": w.detach() * 2}, SGD, RULE)
    assert not any(t.requires_grad for t in pytree.tree_leaves(state))


def test_a_donated_step_writes_into_the_state_given_up():
    state, step = job(SGD, RULE)
    with tracing.as_on_an_accelerator():
        new, _ = step(state, [batch()], donate=True)
    for tree, old in ((new.params, state.params), (new.buffers, state.buffers)):
        assert {t.data_ptr() for t in tree.values()} == {t.data_ptr() for t in old.values()}


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


@pytest.mark.slow
def test_compiled_donation_of_gradients_that_are_the_parameters_gives_the_same_bits():
    sgd, scaler = ps.from_torch(OPTIM.SGD, lr=0.5), at(2.0)

    def step(params, grads, state):
        return ps.unscale_and_step(
            sgd, scaler, params, grads, state, max_norm=1e9, donate=True
        ).params

    params = {"w": torch.tensor([2.0])}
    expected = step(clone(params), clone(params), sgd.init(params))
    assert same_bits(
        torch.compile(step, fullgraph=True, backend="aot_eager")(params, params, sgd.init(params)),
        expected,
    )


PAIR = ps.from_transformation((lambda p: (), lambda g, s, p: (g, s)))


@pytest.mark.parametrize(
    ("optimizer", "settings", "grad", "like", "message"),
    [
        (PAIR, {}, torch.ones(2), {"w": torch.ones(3)}, r"grads\['w'\] has shape \(2,\)"),
        (
            ps.from_torch(OPTIM.Adadelta),
            {},
            torch.ones(3),
            {"v": torch.ones(3)},
            "parameters v, params has w",
        ),
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
