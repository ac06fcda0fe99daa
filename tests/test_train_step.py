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
    at,
    batch,
    clone,
    examples,
    job,
    same_bits,
    scaled_by,
    shares_memory,
    small_net,
    stack,
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


def test_an_older_state_survives_later_donation():
    state, step = job(ADAMW, RULE)
    later, _ = step(state, [batch()])
    kept = clone(state)
    step(later, [batch()], donate=True)
    assert same_bits(state, kept)


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


def test_the_scale_grows_on_schedule_and_the_loss_falls():
    state, step = job(ADAMW, RULE)
    losses = []
    for _ in range(12):
        state, info = step(state, [batch()])
        losses.append(info.loss.item())
    assert state.step == 12
    assert state.scaler.scale == 2.0**14
    assert losses[-1] < 0.85 * losses[0]


def test_the_unscaled_loss_is_reported_in_float32():
    state, step = job(SGD, RULE)
    for scale in (1.0, OVERFLOWS):
        loss = step(scaled_by(state, scale), [batch()])[1].loss
        assert loss.dtype is torch.float32
        assert 0 < loss < 3


def test_a_half_loss_is_reported_in_float32():
    sgd = ps.from_torch(OPTIM.SGD, lr=1.0)
    state = ps.init_train_state({"w": torch.ones(1)}, {}, sgd, RULE)
    _, info = ps.train_step(
        state, [None], loss_fn=lambda p, b, _: (p["w"].half(), b), optimizer=sgd, rule=RULE
    )
    assert info.loss.dtype is torch.float32
    assert info.loss.shape == ()


# ---- microbatches


@examples(20)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_any_split_weighted_by_samples_gives_the_full_batch_step(sizes):
    x, y = (
        torch.randn(sum(sizes), 3, dtype=torch.float64),
        torch.randn(sum(sizes), dtype=torch.float64),
    )
    params = {"w": torch.randn(3, dtype=torch.float64)}

    def loss_fn(params, buffers, microbatch):
        a, b = microbatch
        return (a @ params["w"] - b).square().mean(), buffers

    sgd = ps.from_torch(OPTIM.SGD, lr=1.0)
    state = ps.init_train_state(params, {}, sgd, ps.StaticScale(2.0**10))
    split = list(zip(x.split(sizes), y.split(sizes), strict=True))
    common = {
        "loss_fn": loss_fn,
        "optimizer": sgd,
        "rule": ps.StaticScale(2.0**10),
        "weight_fn": lambda m: len(m[1]),
    }
    whole, parts = ps.train_step(state, [(x, y)], **common), ps.train_step(state, split, **common)
    torch.testing.assert_close(parts[0].params, whole[0].params, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(parts[1].loss, whole[1].loss, rtol=1e-6, atol=1e-9)


def mean_job(weight_fn=None):
    """A step whose gradient is the weighted mean of its microbatches."""
    sgd = ps.from_torch(OPTIM.SGD, lr=1.0)
    state = ps.init_train_state({"w": torch.tensor(0.0)}, {"n": torch.tensor(0)}, sgd, RULE)

    def loss_fn(params, buffers, g):
        return params["w"] * g, {"n": buffers["n"] + 1}, g

    return state, lambda microbatches, s=state: ps.train_step(
        s, microbatches, loss_fn=loss_fn, optimizer=sgd, rule=RULE, weight_fn=weight_fn
    )


def test_microbatches_are_averaged():
    _, step = mean_job()
    state, info = step([torch.tensor(1.0), torch.tensor(2.0), torch.tensor(6.0)])
    assert state.params["w"] == -3
    assert state.buffers["n"] == 3
    assert info.aux == (torch.tensor(1.0), torch.tensor(2.0), torch.tensor(6.0))


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_weights_are_numbers_or_tensors(kind):
    _state, step = mean_job(lambda g: kind(1.0) if g < 5 else kind(3.0))
    assert step([torch.tensor(2.0), torch.tensor(6.0)])[0].params["w"] == -5


def test_what_has_weight_zero_counts_for_nothing():
    _state, step = mean_job(lambda g: 1.0 if torch.isfinite(g) else 0.0)
    for microbatches in ([math.nan, 2.0], [2.0, math.inf], [math.nan, 2.0, math.nan]):
        new, info = step([torch.tensor(g) for g in microbatches])
        assert new.params["w"] == -2
        assert not info.found_inf


def test_a_window_of_weight_zero_leaves_everything_as_it_was():
    state, step = mean_job(lambda g: 0.0)
    new, info = step([torch.tensor(1.0), torch.tensor(math.inf)])
    assert same_bits(new, state)
    assert info.found_inf


@pytest.mark.parametrize("weight", [math.nan, math.inf, -1.0])
def test_a_weight_tensor_that_is_no_weight_skips_the_step(weight):
    state, step = mean_job(lambda g: torch.tensor(weight) if g > 1 else torch.tensor(1.0))
    new, info = step([torch.tensor(1.0), torch.tensor(2.0)])
    assert info.found_inf
    assert same_bits(new, state)


def test_a_microbatch_of_weight_zero_does_not_reach_the_buffers():
    state = ps.init_train_state({"w": torch.tensor(1.0)}, {"mean": torch.tensor(0.0)}, SGD, RULE)
    new, _ = ps.train_step(
        state, [torch.tensor(1.0), torch.tensor(math.nan)], optimizer=SGD, rule=RULE,
        loss_fn=lambda p, b, x: (p["w"] * x, {"mean": b["mean"] + x}),
        weight_fn=lambda x: torch.isfinite(x).float(),
    )  # fmt: skip
    assert new.buffers["mean"] == 1


def test_sparse_gradients_are_averaged_by_weight():
    apply, params, buffers = ps.make_functional(nn.Embedding(4, 2, sparse=True))
    sgd = ps.from_torch(OPTIM.SGD, lr=1.0)

    def loss_fn(params, buffers, tokens):
        out, buffers = apply(params, buffers, tokens)
        return out.sum(), buffers

    state = ps.init_train_state(params, buffers, sgd, RULE)
    microbatches = [torch.tensor([0, 0]), torch.tensor([1])]
    for weight_fn, expected in (
        (None, [1.0, 0.5, 0, 0]),
        (lambda t: float(len(t)), [4 / 3, 1 / 3, 0, 0]),
    ):
        new, _ = ps.train_step(
            state, microbatches, loss_fn=loss_fn, optimizer=sgd, rule=RULE, weight_fn=weight_fn
        )
        torch.testing.assert_close(
            (params["weight"] - new.params["weight"])[:, 0], torch.tensor(expected)
        )


def test_a_parameter_that_is_none_passes_through():
    state = ps.init_train_state({"w": torch.ones(1), "b": None}, {}, SGD, RULE)
    new, _ = ps.train_step(
        state, [None], loss_fn=lambda p, b, _: (p["w"].sum(), b), optimizer=SGD, rule=RULE
    )
    assert new.params["b"] is None

    def loss_after(w):
        call = {
            "loss_fn": lambda p, b, _: (p["w"].square().sum(), b),
            "optimizer": SGD,
            "rule": RULE,
        }
        stepped, _ = ps.train_step(state._replace(params={"w": w, "b": None}), [None], **call)
        return stepped.params["w"].sum()

    assert torch.func.grad(loss_after)(torch.ones(1)).item() == pytest.approx(1 - 0.1 * 2)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_one_bad_microbatch_skips_the_window_and_the_next_window_steps(position):
    state, step = mean_job()
    bad = [torch.tensor(math.inf if i == position else 1.0) for i in range(3)]
    skipped, info = step(bad)
    assert info.found_inf
    assert same_bits(skipped._replace(scaler=state.scaler), state)
    assert step([torch.tensor(1.0)], skipped)[0].params["w"] == -1


def test_half_gradients_are_averaged_in_float32():
    sgd = ps.from_torch(OPTIM.SGD, lr=1.0)
    state = ps.init_train_state(
        {"w": torch.tensor([0.0], dtype=torch.bfloat16)}, {}, sgd, ps.NoScale()
    )
    small, n = torch.tensor(2.0**-9, dtype=torch.bfloat16), 8
    new, _ = ps.train_step(
        state, [torch.tensor(1.0, dtype=torch.bfloat16)] + [small] * (n - 1),
        loss_fn=lambda p, b, g: ((p["w"] * g).sum(), b), optimizer=sgd, rule=ps.NoScale(),
    )  # fmt: skip
    expected = torch.tensor((1.0 + (n - 1) * 2.0**-9) / n).to(torch.bfloat16)
    assert -new.params["w"] == expected


# ---- random numbers


def dropout_job(rng):
    apply, params, buffers = ps.make_functional(
        nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    )

    def loss_fn(params, buffers, x):
        out, buffers = apply(params, buffers, x)
        return out.square().mean(), buffers

    state = ps.init_train_state(params, buffers, SGD, RULE, rng=rng)
    return state, lambda s: ps.train_step(
        s, [torch.ones(4, 8)] * 2, loss_fn=loss_fn, optimizer=SGD, rule=RULE
    )


def test_with_rng_a_step_replays_bit_for_bit_whatever_the_global_generator():
    state, step = dropout_job(torch.Generator().manual_seed(3).get_state())
    torch.manual_seed(1)
    once = step(state)
    torch.manual_seed(2)
    assert same_bits(once, step(state))


def test_with_rng_the_global_generator_is_left_as_it_was():
    state, step = dropout_job(torch.Generator().manual_seed(3).get_state())
    before = torch.get_rng_state()
    step(state)
    assert torch.equal(torch.get_rng_state(), before)


def test_with_rng_the_next_step_draws_other_numbers():
    state, step = dropout_job(torch.Generator().manual_seed(3).get_state())
    second, info = step(state)
    assert not torch.equal(second.rng, state.rng)
    assert step(second._replace(params=state.params))[1].loss != info.loss


@pytest.mark.parametrize("retries", [0, 2])
@pytest.mark.parametrize("on_nonfinite", ["drop_window", "drop_microbatch"])
@pytest.mark.parametrize("bad", [(0, 0), (0, 1), (1, 1)])
def test_with_rng_what_is_skipped_or_dropped_draws_its_numbers_too(bad, on_nonfinite, retries):
    """As torch's generator moves in a loop over the same forwards."""
    generator = torch.Generator().manual_seed(0)
    state = ps.init_train_state({"w": torch.ones(33)}, {}, SGD, RULE, rng=generator.get_state())
    new, _ = ps.train_step(
        state,
        [torch.full((33,), math.inf if each else 1.0) for each in bad],
        loss_fn=lambda p, b, x: ((p["w"] * torch.rand(33) * x).sum(), b),
        optimizer=SGD,
        rule=RULE,
        on_nonfinite=on_nonfinite,
        max_retries=retries,
    )
    for _ in bad:
        torch.rand(33, generator=generator)
    assert torch.equal(new.rng, generator.get_state())


def test_with_rng_the_generator_is_put_back_when_the_loss_raises():
    state, _ = dropout_job(torch.Generator().manual_seed(3).get_state())
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
    def loss_fn(params, buffers, x):
        return (params["w"].half() * x).float().sum(), buffers

    rule, guard = ps.DynamicScale(init_scale=2.0**10), RejectsAll()
    state = ps.init_train_state({"w": torch.ones(1)}, {}, SGD, rule, guard=guard)
    window = [torch.ones(1).half(), torch.full((1,), 2.0**8 if overflows else 1.0).half()]
    parts = {"loss_fn": loss_fn, "optimizer": SGD, "rule": rule, "guard": guard, **settings}
    with tracing.as_on_an_accelerator() if forced else contextlib.nullcontext():
        new, info = ps.train_step(state, window, **parts)
    assert info.rejected
    assert new.step == 0
    assert (new.scaler.scale < state.scaler.scale) == falls


def test_unused_parameters_get_a_gradient_of_zero():
    sgd = ps.from_torch(OPTIM.SGD, lr=1.0, weight_decay=0.25)
    state = ps.init_train_state({"used": torch.ones(1), "unused": torch.ones(1)}, {}, sgd, RULE)
    new, info = ps.train_step(
        state, [None], loss_fn=lambda p, b, _: (p["used"].sum(), b), optimizer=sgd, rule=RULE
    )
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
    sgd = ps.from_torch(OPTIM.SGD, lr=1.0)
    state = ps.init_train_state({"w": torch.ones(1)}, {}, sgd, RULE)
    new, _ = ps.train_step(
        state,
        [None],
        loss_fn=lambda p, b, _: (OldDouble.apply(p["w"]).sum(), b),
        optimizer=sgd,
        rule=RULE,
    )
    assert new.params["w"] == -1


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (
            lambda w, b: w.sum(),
            TypeError,
            r"loss_fn returned Tensor; expected \(loss, new_buffers\)",
        ),
        (lambda w, b: (w.sum(),), TypeError, "returned a tuple of 1"),
        (lambda w, b: (w.sum(), b, 1, 2), TypeError, "returned a tuple of 4"),
        (lambda w, b: [w.sum(), b], TypeError, "returned list"),
        (lambda w, b: (b, w.sum()), TypeError, "returned dict as its loss"),
        (lambda w, b: (1.0, b), TypeError, "returned float as its loss"),
        (lambda w, b: (w, b), ValueError, r"has shape \(2,\); a loss is one number"),
        (lambda w, b: (w.sum().long(), b), TypeError, "dtype torch.int64"),
        (
            lambda w, b: (w.sum(), {}),
            ValueError,
            r"new_buffers does not match buffers: missing \['n'\]",
        ),
        (lambda w, b: (w.sum(), None), ValueError, "new_buffers does not match buffers"),
        (lambda w, b: (torch.ones(()), b), ValueError, "the loss does not depend on params"),
        (
            lambda w, b: (w.sum(), {"n": torch.ones(3)}),
            ValueError,
            r"buffers\['n'\] is torch.float32 \(1,\), but torch.float32 \(3,\) in new_buffers",
        ),
    ],
)
def test_a_loss_fn_that_returns_the_wrong_thing_is_refused_and_nothing_changes(
    returned, error, message
):
    state = ps.init_train_state({"w": torch.ones(2)}, {"n": torch.zeros(1)}, SGD, RULE)
    with Untouched(state), pytest.raises(error, match=message):
        ps.train_step(
            state, [None], loss_fn=lambda p, b, _: returned(p["w"], b), optimizer=SGD, rule=RULE
        )


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

        step = functools.partial(ps.train_step, loss_fn=loss_fn, optimizer=adamw, rule=RULE)
        params, buffers = make(torch.ones(3), torch.zeros(3)), make(torch.zeros(3), torch.zeros(3))
        start = ps.init_train_state(params, buffers, adamw, RULE)
        end, _ = WAYS[way](lambda state, x, step=step: step(state, [x]))(start, torch.ones(3))
        ends.append([*parts(end.params), *parts(end.buffers)])
    assert same_bits(*ends)


# ---- bad calls


@pytest.mark.parametrize(
    ("microbatches", "error", "message"),
    [
        ([], ValueError, "empty list"),
        (
            batch(),
            TypeError,
            r"is a tuple; expected a list.*`train_step\(state, \[batch\], \.\.\.\)`",
        ),
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
        (
            {"weight_fn": lambda b: torch.ones(2)},
            ValueError,
            r"weight_fn returned a tensor of shape \(2,\)",
        ),
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
def test_bad_settings_of_a_step_are_refused(settings, error, message):
    state, step = job(SGD, RULE)
    with pytest.raises(error, match=message):
        step(state, [batch()], **settings)


def test_a_state_that_is_no_train_state_is_refused():
    _, step = job(SGD, RULE)
    with pytest.raises(TypeError, match="takes a TrainState, got dict"):
        step({}, [batch()])


def stacked_into(way):
    """A step, or a part of it, of stacked states that is not mapped over them."""
    optimizer = ps.from_torch(torch.optim.AdamW, in_state=("lr",))
    state, step = job(optimizer, RULE)
    states, window = ps.stack_states([state, state]), [batch()]
    trees = states.params, states.params, states.opt_state
    {
        "a step": lambda: step(states, window),
        "jit": lambda: ps.jit(step, backend="aot_eager")(states, window),
        "another state mapped": lambda: torch.vmap(step, (None, 0))(states, [stack([*window] * 2)]),
        "scan": lambda: ps.scan_steps(step, states, stack([window] * 3)),
        "by hand": lambda: ps.unscale_and_step(optimizer, states.scaler, *trees),
        "scale_loss": lambda: ps.scale_loss(states.scaler, torch.ones(())),
        "unscale_and_check": lambda: ps.unscale_and_check(states.scaler, states.params),
        "maybe_step": lambda: ps.maybe_step(optimizer, *trees, torch.tensor(False)),
        "an optimizer": lambda: optimizer.step(*trees),
    }[way]()


@pytest.mark.parametrize(
    "way",
    [
        *("a step", "jit", "another state mapped", "scan", "by hand", "scale_loss"),
        *("unscale_and_check", "maybe_step", "an optimizer"),
    ],
)
def test_stacked_states_without_vmap_are_refused_with_the_cure(way):
    with pytest.raises(ValueError, match=r"\(2,\).*cause: .*stacked states.*Fix: .*`torch\.vmap\("):
        stacked_into(way)


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


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"optimizer": OPTIM.SGD([torch.zeros(1)])},
            r"optimizer is SGD.*Fix: from_torch\(torch.optim.AdamW",
        ),
        ({"rule": torch.amp.GradScaler("cpu")}, r"rule is GradScaler.*Fix: DynamicScale"),
    ],
)
def test_an_optimizer_or_rule_of_torch_is_refused_before_any_work(parts, message):
    state, step = job(SGD, RULE)
    with pytest.raises(TypeError, match=message):
        step(state, [batch()], **parts)
    with pytest.raises(TypeError, match=message):
        ps.init_train_state(state.params, {}, **{"optimizer": SGD, "rule": RULE, **parts})


# ---- memory that is shared


def aliasing_job(loss_fn, buffers):
    sgd = ps.from_torch(OPTIM.SGD, lr=1.0)
    state = ps.init_train_state({"w": torch.ones(3)}, buffers, sgd, RULE)
    return state, lambda s, **settings: ps.train_step(
        s, [torch.ones(3)], loss_fn=loss_fn, optimizer=sgd, rule=RULE, **settings
    )


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
    state, step = aliasing_job(
        lambda p, b, x: ((p["w"] * x).sum(), new_buffers(p, b), p["w"]),
        {"x": torch.zeros(3), "y": torch.full((3,), 2.0)},
    )
    expected = step(state)
    donating = functools.partial(step, donate=True)
    if way == "compiled":
        donating = torch.compile(donating, fullgraph=True, backend="aot_eager")
    assert same_bits(donating(clone(state)), expected)


def test_what_loss_fn_returns_shares_no_memory_with_the_state():
    state, step = aliasing_job(
        lambda p, b, x: (p["w"][0], b, (p["w"], b["x"], x)), {"x": torch.zeros(3)}
    )
    assert not shares_memory(state, step(state))


@pytest.mark.parametrize(
    "optimizer", [SGD, ps.from_torch(OPTIM.SGD, lr=0.1, foreach=False)], ids=["fused", "formula"]
)
def test_donation_of_one_tensor_in_two_places_gives_the_same_bits(optimizer):
    def given():
        t = torch.full((4,), 8.0)
        return {"a": t, "b": t, "c": t[:2]}, {
            "a": torch.ones(4),
            "b": 2 * torch.ones(4),
            "c": torch.ones(2),
        }

    results = []
    for donate in (False, True):
        params, grads = given()
        results.append(
            ps.maybe_step(
                optimizer, params, grads, optimizer.init(params), torch.tensor(False), donate=donate
            )
        )
    assert same_bits(*results)


def test_donation_of_gradients_that_are_views_of_one_another_gives_the_same_bits():
    scaler = RULE.init()._replace(scale=torch.tensor(4.0))
    t = torch.full((4,), 8.0)
    unscaled, _ = ps.unscale_and_check(scaler, {"a": t, "b": t.view(2, 2), "c": t[:2]}, donate=True)
    assert {x.item() for leaf in unscaled.values() for x in leaf.flatten()} == {2.0}
    t = torch.full((4,), 8.0)
    clipped, _ = ps.clip_by_global_norm({"a": t, "b": t}, 8.0, donate=True)
    assert torch.equal(
        clipped["a"],
        ps.clip_by_global_norm({"a": torch.full((4,), 8.0), "b": torch.full((4,), 8.0)}, 8.0)[0][
            "a"
        ],
    )


@pytest.mark.parametrize("donate", [False, True])
def test_a_transformation_whose_state_keeps_the_parameters_is_safe(donate):
    optimizer = ps.from_transformation(
        (lambda p: {"prev": p}, lambda g, s, p: (pytree.tree_map(torch.neg, g), {"prev": p}))
    )
    params = {"w": torch.ones(1)}
    stepped, state = ps.maybe_step(
        optimizer,
        params,
        {"w": torch.ones(1)},
        optimizer.init(params),
        torch.tensor(False),
        donate=donate,
    )
    assert (stepped["w"], state["prev"]["w"]) == (0, 1)


def test_donated_gradients_may_be_the_parameters_themselves():
    params = {"w": torch.tensor([2.0])}
    out = ps.unscale_and_step(
        ps.from_torch(OPTIM.SGD, lr=0.5),
        RULE.init()._replace(scale=torch.tensor(2.0)),
        params,
        params,
        ps.from_torch(OPTIM.SGD, lr=0.5).init(params),
        donate=True,
    )
    assert out.params["w"] == 1.5


def test_a_gradient_in_another_layout_trains_the_same():
    sgd = ps.from_torch(OPTIM.SGD, lr=1.0)
    c = torch.randn(3, 2)
    state = ps.init_train_state({"w": torch.zeros(2, 3)}, {}, sgd, RULE)
    new, _ = ps.train_step(
        state, [c], loss_fn=lambda p, b, c: ((p["w"].t() * c).sum(), b), optimizer=sgd, rule=RULE
    )
    torch.testing.assert_close(new.params["w"], -c.t())


def test_nothing_is_stepped_when_new_buffers_come_in_another_dtype():
    state, step = aliasing_job(
        lambda p, b, x: (p["w"].sum(), {"x": b["x"].double()}), {"x": torch.zeros(3)}
    )
    with (
        Untouched(state),
        pytest.raises(
            ValueError,
            match=r"buffers\['x'\] is torch.float32 \(3,\), "
            r"but torch.float64 \(3,\) in new_buffers",
        ),
    ):
        step(state, donate=True)


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
    step = functools.partial(
        ps.train_step,
        loss_fn=lambda p, b, g: ((p["w"] * g).sum(), {"n": b["n"] + 1}),
        optimizer=SGD,
        rule=rule,
    )
    clean = ps.init_train_state({"w": torch.zeros(2)}, {"n": torch.tensor(0)}, SGD, rule)
    state = clone(clean)
    scaler = rule.init()
    for g in gradients:
        state, info = step(state, [torch.tensor([g, 1.0])], donate=donate)
        scaler = rule.update(scaler, torch.tensor(not math.isfinite(g)))
        if math.isfinite(g):
            clean, _ = step(clean, [torch.tensor([g, 1.0])])
        assert info.found_inf.item() is not math.isfinite(g)
        assert same_bits(state.scaler, scaler)
        assert same_bits(
            (state.params, state.opt_state, state.buffers, state.step),
            (clean.params, clean.opt_state, clean.buffers, clean.step),
        )


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


def test_the_class_of_an_optimizer_is_no_optimizer():
    state, step = job(SGD, RULE)
    for wrong, name in ((torch.optim.AdamW, "AdamW"), (type(SGD), "TorchOptimizer")):
        with pytest.raises(
            TypeError,
            match=rf"optimizer is the class {name}; expected an object with `init` and `step`"
            r".*Fix: from_torch",
        ):
            step(state, [batch()], optimizer=wrong)


# ---- edges that a careless change would break


def test_donation_when_gradients_are_other_parameters_gives_the_same_bits():
    def given():
        a, b = torch.arange(4.0), torch.full((4,), 2.0)
        return {"a": a, "b": b}, {"a": b, "b": a}

    results = []
    for donate in (False, True):
        params, grads = given()
        results.append(
            ps.maybe_step(SGD, params, grads, SGD.init(params), torch.tensor(False), donate=donate)
        )
    assert same_bits(*results)


def test_donation_of_one_tensor_in_two_places_gives_the_same_bits_where_the_updates_differ():
    optimizer = ps.from_torch(OPTIM.SGD, lr=1.0, foreach=False)
    results = []
    for donate in (False, True):
        t = torch.full((4,), 8.0)
        params, grads = {"a": t, "b": t}, {"a": torch.ones(4), "b": 2 * torch.ones(4)}
        results.append(
            ps.maybe_step(
                optimizer, params, grads, optimizer.init(params), torch.tensor(False), donate=donate
            )
        )
    assert same_bits(*results)


def test_donation_to_an_optimizer_that_swaps_its_parameters_gives_the_same_bits():
    class Swap:
        init = staticmethod(lambda params: ())
        step = staticmethod(lambda params, grads, s: ({"a": params["b"], "b": params["a"]}, s))

    results = [
        ps.maybe_step(
            Swap(),
            {"a": torch.zeros(2), "b": torch.ones(2)},
            {"a": None, "b": None},
            (),
            torch.tensor(False),
            donate=d,
        )
        for d in (False, True)
    ]
    assert same_bits(*results)


def test_float64_gradients_of_float32_parameters_give_the_same_bits_donated():
    sgd = ps.from_torch(OPTIM.SGD, lr=1e-30)
    params = {"w": torch.ones(2)}
    grads = {"w": torch.full((2,), 1e40, dtype=torch.float64)}
    outs = [
        ps.unscale_and_step(
            sgd, at(2.0**16), clone(params), clone(grads), sgd.init(params), donate=d
        )
        for d in (False, True)
    ]
    assert same_bits(*outs)


def test_the_one_pass_step_trusts_nothing_scaled_by_a_damaged_scale():
    for scale in (0.0, -1.0, math.inf, math.nan):
        params = {"w": torch.ones(2)}
        out = ps.unscale_and_step(
            SGD, at(scale), clone(params), {"w": torch.ones(2)}, SGD.init(params), donate=True
        )
        assert out.found_inf
        assert same_bits(out.params, params)


def test_leaves_that_are_no_tensors_agree_in_type():
    with pytest.raises(ValueError, match=r"old\['a'\] is 1, but True in new"):
        ps.select(torch.tensor(True), {"a": 1}, {"a": True})


def test_a_flag_may_be_a_number_tensor():
    assert ps.select(torch.tensor(1.0), torch.zeros(1), torch.ones(1)) == 0
    assert ps.select(torch.tensor(2), torch.zeros(1), torch.ones(1)) == 0


def test_aux_shares_no_memory_with_the_microbatch():
    state = ps.init_train_state({"w": torch.ones(3)}, {}, SGD, RULE)
    x = torch.ones(3)
    step = ps.train_step(
        state, [x], loss_fn=lambda p, b, x: ((p["w"] * x).sum(), b, x), optimizer=SGD, rule=RULE
    )
    assert not shares_memory(x, step[1].aux)


@pytest.mark.slow
def test_a_compiled_step_returns_aux_that_is_no_tensor():
    state = ps.init_train_state({"w": torch.ones(3)}, {"n": None}, SGD, RULE)
    step = functools.partial(
        ps.train_step,
        loss_fn=lambda p, b, x: ((p["w"] * x).sum(), b, {"name": "a", "x": x, "none": None}),
        optimizer=SGD,
        rule=RULE,
    )
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert same_bits(compiled(state, [torch.ones(3)]), step(state, [torch.ones(3)]))


def test_a_loss_that_is_aux_too_lies_in_memory_of_its_own():
    def loss_fn(params, buffers, x):
        loss = params["w"].sum()
        return loss, {"n": loss + 1}, (loss, x * 2)

    state = ps.init_train_state({"w": torch.ones(3)}, {"n": torch.ones(())}, SGD, RULE)
    _, info = ps.train_step(
        state, [torch.ones(3)], loss_fn=loss_fn, optimizer=SGD, rule=RULE, donate=True
    )
    assert not shares_memory(info.loss, info.aux)
    assert info.aux[0][0] == info.loss == 3


def test_bad_settings_are_refused_before_loss_fn_is_called():
    state, _step = job(SGD, RULE)
    called = []
    for bounds in ({"max_norm": 0.0}, {"clip_value": -1.0}):
        with pytest.raises(ValueError, match="must be above 0"):
            ps.train_step(
                state,
                [batch()],
                loss_fn=lambda *a: called.append(1),
                optimizer=SGD,
                rule=RULE,
                **bounds,
            )
    assert not called


def test_one_gradient_in_two_places_is_unscaled_once():
    results = []
    for donate in (False, True):
        g = torch.full((4,), 4.0)
        params = {"a": torch.ones(4), "b": torch.ones(4), "c": torch.ones(2)}
        results.append(
            ps.unscale_and_step(
                SGD, at(2.0), params, {"a": g, "b": g, "c": g[:2]}, SGD.init(params), donate=donate
            )
        )
    assert same_bits(*results)


def test_init_train_state_leaves_the_graph_behind():
    w = torch.ones(2, requires_grad=True)
    state = ps.init_train_state({"w": w}, {"b": w.detach() * 2}, SGD, RULE)
    assert not any(t.requires_grad for t in pytree.tree_leaves(state))


@pytest.mark.slow
def test_a_compiled_step_shares_no_memory():
    state = ps.init_train_state({"w": torch.ones(3)}, {"x": torch.zeros(3)}, SGD, RULE)
    x = torch.ones(3)
    compiled = torch.compile(
        lambda s, x: ps.train_step(
            s,
            [x],
            loss_fn=lambda p, b, x: ((p["w"] * x).sum(), b, (p["w"], x)),
            optimizer=SGD,
            rule=RULE,
        ),
        fullgraph=True,
        backend="aot_eager",
    )
    assert not shares_memory((state, x), compiled(state, x))


def test_donated_parameters_on_a_graph_come_back_off_it():
    w = torch.ones(2, requires_grad=True) * 1
    with torch.no_grad():
        stepped, state = ps.maybe_step(
            SGD,
            {"w": w},
            {"w": torch.ones(2)},
            SGD.init({"w": w}),
            torch.tensor(False),
            donate=True,
        )
    assert not any(t.requires_grad for t in pytree.tree_leaves((stepped, state)))


def test_weight_decay_reaches_a_parameter_that_the_loss_does_not_use():
    sgd = ps.from_torch(OPTIM.SGD, lr=1.0, weight_decay=0.5)
    state = ps.init_train_state({"used": torch.ones(1), "unused": torch.ones(1)}, {}, sgd, RULE)
    new, _ = ps.train_step(
        state, [None], loss_fn=lambda p, b, _: (p["used"].sum(), b), optimizer=sgd, rule=RULE
    )
    assert new.params["unused"] == 0.5


def test_half_gradients_of_half_parameters_give_the_same_bits_donated():
    sgd = ps.from_torch(OPTIM.SGD, lr=2.0**15)
    outs = []
    for donate in (False, True):
        params = {"w": torch.zeros(2, dtype=torch.float16)}
        grads = {"w": torch.full((2,), 1e-3, dtype=torch.float16)}
        outs.append(
            ps.unscale_and_step(sgd, at(2.0**16), params, grads, sgd.init(params), donate=donate)
        )
    assert same_bits(*outs)


def test_train_step_clips_by_value():
    sgd = ps.from_torch(OPTIM.SGD, lr=1.0)
    state = ps.init_train_state({"w": torch.tensor(0.0)}, {}, sgd, RULE)
    new, _ = ps.train_step(
        state,
        [8.0],
        loss_fn=lambda p, b, x: (p["w"] * x, b),
        optimizer=sgd,
        rule=RULE,
        clip_value=0.5,
    )
    assert new.params["w"] == -0.5


def test_a_donated_step_writes_into_the_state_given_up():
    state, step = job(SGD, RULE)
    with tracing.as_on_an_accelerator():
        new, _ = step(state, [batch()], donate=True)
    assert {t.data_ptr() for t in new.params.values()} == {
        t.data_ptr() for t in state.params.values()
    }
    assert {t.data_ptr() for t in new.buffers.values()} == {
        t.data_ptr() for t in state.buffers.values()
    }


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
    optimizer = ps.from_torch(cls, lr=0.1)
    call = {
        "loss_fn": lambda p, b, x: ((p["w"] * x).sum(), {"e": b["e"] + 1}),
        "optimizer": optimizer,
        "rule": RULE,
    }
    state = ps.init_train_state({"w": torch.arange(4.0)}, {"e": torch.zeros(4)}, optimizer, RULE)
    expected = ps.train_step(tie(clone(state)), [torch.ones(4)], **call)
    assert same_bits(
        ps.train_step(tie(clone(state)), [torch.ones(4)], donate=True, **call), expected
    )


def test_a_gradient_that_is_the_microbatch_itself_is_not_written_into():
    class Dot(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w, x):
            ctx.save_for_backward(x)
            return (w * x).sum()

        @staticmethod
        def backward(ctx, grad):
            return ctx.saved_tensors[0], None

    sgd = ps.from_torch(OPTIM.SGD, lr=1.0)
    state, x = ps.init_train_state({"w": torch.ones(3)}, {}, sgd, RULE), torch.ones(3)
    with Untouched((state, x)):
        _, info = ps.train_step(
            state,
            [x],
            loss_fn=lambda p, b, x: (Dot.apply(p["w"], x), b, x * 2),
            optimizer=sgd,
            rule=RULE,
        )
    assert info.aux[0].tolist() == [2, 2, 2]


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


def test_gradients_that_a_transformation_could_not_take_are_refused_before_they_are_donated():
    optimizer = ps.from_transformation((lambda p: (), lambda g, s, p: (g, s)))
    params, grads = {"w": torch.ones(3)}, {"w": torch.ones(2)}
    with (
        Untouched((params, grads)),
        pytest.raises(ValueError, match=r"grads\['w'\] has shape \(2,\)"),
    ):
        ps.unscale_and_step(optimizer, at(4.0), params, grads, (), donate=True)


@pytest.mark.parametrize(
    ("settings", "grads", "state"),
    [
        ({}, {"w": torch.ones(3)}, {"v": torch.ones(3)}),
        ({"clip_value": 1.0}, {"w": torch.ones(3, dtype=torch.complex64)}, None),
    ],
    ids=["another state", "complex and clip_value"],
)
def test_what_is_refused_is_refused_before_gradients_are_donated(settings, grads, state):
    optimizer = ps.from_torch(OPTIM.Adadelta)
    params = {"w": torch.ones_like(grads["w"])}
    opt_state = optimizer.init(state or params)
    with Untouched((grads, params, opt_state)), pytest.raises((ValueError, TypeError)):
        ps.unscale_and_step(optimizer, at(4.0), params, grads, opt_state, donate=True, **settings)
