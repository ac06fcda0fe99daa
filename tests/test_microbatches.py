"""Windows of several microbatches inside a step: what is dropped, what is tried again, what the
buffers see.
"""

import functools
import gc
import math
import weakref

import optree
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    AsOnAnAccelerator,
    OwnBackward,
    assert_close,
    assert_donation_keeps_bits,
    at,
    batch,
    clone,
    examples,
    function_of,
    job,
    scaled_by,
    stack,
    started,
    tensors,
)
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import purescale as ps
from purescale._step import window_mean
from purescale._step.backward import stream_gradients
from purescale._torch.tracing import as_on_an_accelerator
from purescale.testing import Untouched, assert_vmap_equals_loop, same_bits, shares_memory

INF = math.inf
SGD = ps.from_torch(torch.optim.SGD, lr=1.0)
RULE = ps.DynamicScale(init_scale=2.0**10, growth_interval=3)


def mean_job(weight_fn=None, rule=RULE, **settings):
    """A step whose gradient is the mean of its microbatches; it overflows where a microbatch times
    the scale leaves float32.
    """
    return started(
        {"w": torch.tensor(0.0)},
        rule=rule,
        loss_fn=lambda p, b, g: (p["w"] * g, {"mean": b["mean"] + g}, g),
        buffers={"mean": torch.tensor(0.0)},
        weight_fn=weight_fn,
        **settings,
    )


def numbers(*values):
    return [torch.tensor(float(v)) for v in values]


@pytest.mark.parametrize("policy", ["drop_window", "drop_microbatch"])
@pytest.mark.parametrize(("sizes", "overflow"), [([4, 8, 2], None), ([4, 8, 2], 2), ([8], None)])
@pytest.mark.parametrize(
    "clip", [{}, {"max_norm": 0.01}, {"max_norm": 0.01, "norm_type": INF, "clip_value": 0.005}]
)
def test_a_window_equals_the_small_functions(policy, sizes, overflow, clip):
    optimizer = ps.from_torch(torch.optim.AdamW, lr=0.01)
    settings = {"on_nonfinite": policy, "weight_fn": lambda b: len(b[1]), **clip}
    state, step = job(optimizer, RULE, policy="float32", **settings)
    microbatches = [batch(seed, size) for seed, size in enumerate(sizes)]
    if overflow is not None:
        microbatches[overflow] = (microbatches[overflow][0] * INF, microbatches[overflow][1])
    loss_fn, scaler = step.keywords["loss_fn"], state.scaler

    accum, buffers, losses = ps.init_accum(state.params), state.buffers, []
    for microbatch in microbatches:

        def scaled(params, buffers=buffers, microbatch=microbatch):
            loss, new_buffers = loss_fn(params, buffers, microbatch)
            return ps.scale_loss(scaler, loss), (loss, new_buffers)

        grads, (_, (loss, new)) = torch.func.grad_and_value(scaled, has_aux=True)(state.params)
        grads, bad = ps.unscale_and_check(scaler, grads)
        accum = ps.accumulate_grads(accum, grads, len(microbatch[1]), bad)
        buffers = ps.select(bad, buffers, new) if policy == "drop_microbatch" else new
        losses.append((loss, len(microbatch[1]), bad))
    grads, found_inf = ps.accumulated_grads(accum, on_nonfinite=policy)
    norm = ()
    if clip:
        grads, norm = ps.clip_by_global_norm(grads, 0.01, clip.get("norm_type", 2.0))
    if "clip_value" in clip:
        grads = ps.clip_by_value(grads, 0.005)
    params, opt_state = ps.maybe_step(optimizer, state.params, grads, state.opt_state, found_inf)
    buffers = ps.select(found_inf, state.buffers, buffers)
    scaler = RULE.update(scaler, accum.found_inf)

    with Untouched((state, microbatches)):
        new, info = step(state, microbatches)
    assert info.found_inf == (overflow is not None and policy == "drop_window")
    expected = params, buffers, opt_state, scaler
    # a mean that is checked and unscaled once, at its end
    summed = policy == "drop_window" and overflow is None
    if summed or "max_norm" in clip:  # clipping and unscaling are one division
        assert same_bits((new.scaler, new.opt_state.applied), (scaler, opt_state.applied))
        assert_close(tuple(new)[:4], expected, rtol=1e-6, atol=1e-6 if clip else 1e-7)
    else:
        assert same_bits(tuple(new)[:4], expected)
    if summed and clip:
        assert_close(info.grad_norm, norm, rtol=1e-6, atol=0)
    else:
        norm = norm if not (clip and info.found_inf) else torch.tensor(INF)
        assert same_bits(info.grad_norm, norm)
    counted = [(loss, n) for loss, n, bad in losses if policy == "drop_window" or not bad]
    mean = sum(loss * n for loss, n in counted) / sum(n for _, n in counted)
    torch.testing.assert_close(info.loss, mean, equal_nan=True)
    assert_donation_keeps_bits(lambda donate: step(clone(state), microbatches, donate=donate))


# ---- the mean of a window


TOP = torch.tensor(torch.finfo(torch.float32).max * (1 - 1e-6)).item()


def as_number(weight):
    """A weight that is none is refused as a number."""
    return weight if 0 <= weight < INF else 1.0


HOW = {
    "equal": (lambda w: 1.0, None),
    "numbers": (as_number, lambda m: as_number(m[1])),
    "tensors": (lambda w: w, lambda m: torch.tensor(float(m[1]))),
}
POLICIES = st.sampled_from(["drop_window", "drop_microbatch"])


def counted(parts, scale, policy, dtype=torch.float32):
    """The gradients and weights of a window that count, and if the scale backs off. Of a window
    that is skipped none counts.
    """
    usable = [(torch.tensor(g, dtype=dtype), w) for g, w in parts if 0 < w < INF]
    good = [(g.double(), w) for g, w in usable if (g * scale).isfinite().all()]
    bad, invalid = len(good) < len(usable), not all(0 <= w < INF for _, w in parts)
    skipped = policy == "drop_window" and (bad or invalid)
    return ([] if skipped else good), bad


def mean_of(good):
    return sum(g * w for g, w in good) / sum(w for _, w in good)


def vector_job(how, dtype=torch.float32, rule=None, **settings):
    """A step from 0 against the mean of its microbatches, which are (gradient, weight)."""

    def loss_fn(params, buffers, m):
        return (params["v"] * m[0].to(dtype)).real.sum(), {"seen": buffers["seen"] + 1}

    return started(
        {"v": torch.zeros(3, dtype=dtype)},
        rule=ps.NoScale() if rule is None else rule,
        loss_fn=loss_fn,
        buffers={"seen": torch.zeros(())},
        **{"weight_fn": HOW[how][1], **settings},
    )


finite = st.floats(-TOP, TOP, width=32) | st.sampled_from([1.0, -3.0, TOP, -TOP])
bad = st.sampled_from([2.0**100, INF, -INF, math.nan])  # the first under a scale of 2**30


@examples(150)
@given(
    how=st.sampled_from(sorted(HOW)),
    policy=POLICIES,
    exponent=st.sampled_from([0, 30]),
    parts=st.lists(
        st.tuples(
            st.tuples(finite, finite, finite) | st.tuples(st.just(1.0), bad, st.just(0.0)),
            st.integers(0, 5) | st.sampled_from([math.nan, -1.0, INF]),
        ),
        min_size=1,
        max_size=6,
    ),
)
@example("numbers", "drop_window", 30, [((1.0, INF, 0.0), 0)])  # which the scale does not follow
@example("numbers", "drop_window", 30, [((1.0, 2.0, 0.0), 2.0**64), ((3.0, INF, 0.0), 1)])
@example("tensors", "drop_window", 0, [((1.0, 2.0, 0.0), 2.0**64), ((3.0, 1.0, 0.0), 1)])
@example("tensors", "drop_window", 0, [((1.0, 2.0, 0.0), math.nan), ((3.0, 1.0, 0.0), 1)])
def test_a_window_steps_by_the_mean_of_the_microbatches_that_count(how, policy, exponent, parts):
    """Also near the maximum of float32, where their sum would overflow."""
    rule = ps.DynamicScale(init_scale=2.0**exponent, max_scale=2.0**30)
    state, step = vector_job(how, rule=rule, on_nonfinite=policy)
    new, info = step(state, [(torch.tensor(g), w) for g, w in parts])
    parts = [(g, HOW[how][0](w)) for g, w in parts]
    good, backs_off = counted(parts, 2.0**exponent, policy)
    assert info.found_inf == (not good)
    assert new.scaler.scale == 2.0 ** (exponent - backs_off)
    if not good:
        assert same_bits(new._replace(scaler=state.scaler), state)
        sound = all(math.isfinite(x) for g, w in parts if 0 < w < INF for x in g)
        assert sound or not info.loss.isfinite(), "the loss says why"
        return
    assert new.buffers["seen"] == len(good)
    error = (-new.params["v"] - mean_of(good)).abs()
    assert (error <= 1e-6 * mean_of([(g.abs(), w) for g, w in good]) + 1e-37).all()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
def test_the_mean_of_a_window_is_that_of_float64(how, dtype):
    torch.manual_seed(0)
    state, step = vector_job(how, dtype)
    microbatches = [(torch.randn(3).to(dtype).real.double(), w) for w in (3, 1, 0, 2, 5, 1, 1)]
    weights = torch.tensor([HOW[how][0](w) for _, w in microbatches], dtype=torch.float64)
    weighted = torch.stack([g for g, _ in microbatches]) * (weights / weights.sum())[:, None]
    new, _ = step(state, microbatches)
    got, expected = -new.params["v"].real, weighted.sum(0)
    if dtype.itemsize == 2:  # in which the parameters are kept, not the mean
        assert torch.equal(got, expected.to(dtype))
    else:
        assert ((got - expected).abs() <= 1e-6 * weighted.abs().sum(0)).all()


@pytest.mark.parametrize("on_nonfinite", ["drop_window", "drop_microbatch"])
def test_windows_under_vmap_equal_a_loop(on_nonfinite):
    """To 1e-6: other kernels."""
    settings = {"weight_fn": lambda m: m[1], "max_norm": 1.0, "on_nonfinite": on_nonfinite}
    state, step = vector_job("equal", **settings)
    weights = ((1.0, 2.0, 3.0), (0.0, 1.0, 1.0), (1.0, math.nan, 1.0), (0.0,) * 3, (1.0, 1.0, 2.0))
    windows = [[(torch.randn(3), torch.tensor(w)) for w in ws] for ws in weights]
    for index, value in ((1, math.nan), (4, INF)):
        windows[index][0] = (torch.full((3,), value), windows[index][0][1])
    states = [scaled_by(state, 2.0**i) for i in range(5)]
    assert_vmap_equals_loop(step, stack(states), stack(windows), rtol=1e-6, atol=1e-6)


@examples(60)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(st.lists(st.floats(width=32), min_size=2, max_size=5))
@example([3e38, 3e38])
@example([math.inf, -math.inf])
def test_the_loss_of_a_window_is_the_mean_of_its_microbatches_whether_it_may_be_read_or_not(
    dtype, numbers
):
    window = [torch.tensor(number, dtype=dtype) for number in numbers]
    params, rule = {"w": torch.ones(5, dtype=dtype)}, ps.NoScale()
    state, step = started(params, lambda p, number: number + 0 * p["w"].sum(), rule=rule)
    read = step(state, window)[1].loss
    with as_on_an_accelerator():
        unread = step(state, window)[1].loss
    expected = torch.stack(window).double().mean().to(dtype)
    for loss in (read, unread):
        assert loss.dtype is dtype
        assert_close(loss, expected, equal_nan=True, rtol=1e-7, atol=0)


@pytest.mark.parametrize("how", HOW)
def test_a_window_is_one_pass_a_microbatch_and_one_look(how):
    state, step = vector_job(how)
    passes = []
    for number in (2, 8):
        with AsOnAnAccelerator() as counted:
            step(state, [(torch.ones(3), 1.0)] * number)
        names = [str(op) for op in counted.ops]
        assert counted.reads == 0
        assert sum("aminmax" in name for name in names) == 1
        passes.append(sum("_foreach" in name or "_fused_sgd_" in name for name in names))
    assert passes[1] - passes[0] == 6


@pytest.mark.parametrize("donate", [False, True])
def test_a_step_flattens_each_of_its_trees_once(donate, monkeypatch):
    state, step = job(SGD, RULE, policy="float32", donate=donate)
    state, _ = step(state, [batch(0), batch(1)])  # what is static is remembered from here on
    microbatches = [batch(index) for index in range(8)]
    trees = {name: getattr(state, name) for name in ("params", "buffers", "opt_state", "scaler")}
    trees |= {f"microbatch {index}": one for index, one in enumerate(microbatches)}
    leaves = {name: {id(leaf) for leaf in tensors(tree)} for name, tree in trees.items()}
    flatten, counts = optree.tree_flatten, dict.fromkeys(trees, 0)

    def counting(tree, **kwargs):
        flat, structure = flatten(tree, **kwargs)
        for name, mine in leaves.items():
            counts[name] += any(id(leaf) in mine for leaf in flat)
        return flat, structure

    monkeypatch.setattr(optree, "tree_flatten", counting)
    step(state, microbatches)
    # For whose memory is whose the few tensors of a scaler are looked at once more, and all of a
    # state that is donated.
    counts["scaler"] -= 1
    assert all(count <= 1 + donate for count in counts.values()), counts


@pytest.mark.parametrize(
    ("on_nonfinite", "dtype"),
    [("drop_window", torch.bfloat16), ("drop_microbatch", torch.float32)],
)
def test_from_its_second_microbatch_on_a_window_holds_parameters_and_mean_and_no_gradients(
    dtype, on_nonfinite
):
    number, in_memory = 10_007, []

    def loss(params, x):
        gc.collect()
        every = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.numel() >= number]
        in_memory.append(sum({t.untyped_storage().data_ptr(): t.nbytes for t in every}.values()))
        return (params["w"].abs().float() * x).sum()

    state, step = started({"w": torch.ones(number, dtype=dtype)}, loss, on_nonfinite=on_nonfinite)
    step(state, [torch.tensor(1e-3)] * 3)
    mean = number * max(dtype.itemsize, 4)
    assert in_memory[1:] == [in_memory[0] + mean] * 2


def test_a_sparse_gradient_may_come_after_a_dense_one():
    def loss(params, m):
        w = params["w"]
        return F.embedding(m, w, sparse=True).sum() if m is not None else w.sum()

    state, step = started({"w": torch.zeros(4, 1)}, loss)
    for microbatches in ([None, torch.tensor([1, 1, 3])], [torch.tensor([1, 1, 3]), None]):
        new, info = step(state, microbatches)
        assert not info.found_inf
        assert new.params["w"].flatten().tolist() == [-0.5, -1.5, -0.5, -1.0]


def test_a_hook_that_a_loss_hangs_on_a_parameter_acts_on_its_own_microbatch_only():
    def loss_fn(params, buffers, g):
        params["w"].register_hook(lambda grad: grad * 2)
        return params["w"] * g, buffers

    state, step = mean_job()
    assert step(state, numbers(1, 2, 3), loss_fn=loss_fn)[0].params["w"] == pytest.approx(-4)


def test_a_window_that_may_be_tried_again_has_the_bits_of_one_that_may_not():
    state, step = vector_job("tensors", rule=RULE)
    microbatches = [(torch.randn(3), w) for w in (3, 1, 2)]
    assert same_bits(step(state, microbatches, max_retries=3), step(state, microbatches))


def test_a_rule_that_changes_dtypes_is_refused():
    class Wider(ps.DynamicScale):
        def update(self, scaler, found_inf):
            return (new := super().update(scaler, found_inf))._replace(
                growth_tracker=new.growth_tracker.long()
            )

    state, step = mean_job(rule=Wider(init_scale=2.0**10))
    with Untouched(state), pytest.raises(ValueError, match=r"growth_tracker is torch\.int32"):
        step(state, numbers(1, 1), donate=True)


# ---- retries


def overflowing(scale):
    """A state whose next window fits float32 at 2**100 and not above."""
    rule = ps.DynamicScale(init_scale=2.0**10, max_scale=2.0**120, growth_interval=3)
    state, step = mean_job(rule=rule)
    return state._replace(scaler=at(2.0**scale)), step, numbers(2.0**27, 2.0**26)


def test_retries_that_only_underflow_the_others_are_not_used():
    """One microbatch has a finite loss and a NaN gradient at any scale; at the lowest scale the
    other one vanishes in float16.
    """

    def loss(params, m):
        w = params["w"]
        return w.sum().abs().sqrt() if m is None else (w.half() * m).sum()

    rule = ps.DynamicScale(init_scale=2.0**12)
    state, step = started({"w": torch.zeros(2)}, loss, rule=rule, on_nonfinite="drop_microbatch")
    microbatches = [torch.tensor(1e-6).half(), None]
    plain, _ = step(state, microbatches)
    new, info = step(state, microbatches, max_retries=25)
    assert same_bits(new, plain)
    assert info.scale == 2.0**12
    assert info.retries == 25
    assert new.params["w"][0] < 0


def test_an_invalid_weight_beside_an_overflow_is_not_tried_again_and_the_scale_backs_off():
    state, step, microbatches = overflowing(104)
    weigh = {"weight_fn": lambda g: torch.where(g == 2.0**26, math.nan, 1.0)}
    for retries in (0, 5):
        new, info = step(state, microbatches, max_retries=retries, **weigh)
        assert info.retries == 0
        assert new.scaler.scale == 2.0**103


def test_a_retry_waits_for_a_tolerance_that_was_restored_and_for_rules_of_ones_own():
    wide = {"init_scale": 2.0**10, "max_scale": 2.0**120}
    patient = ps.DynamicScale(**wide, hysteresis=3, refill="clean")

    class Patient:
        """Backs off at every third overflow, and says nothing of it."""

        init, update = staticmethod(patient.init), staticmethod(patient.update)

    state, step, microbatches = overflowing(102)
    state = state._replace(scaler=at(2.0**102, hysteresis_tracker=7))
    for rule in (ps.DynamicScale(**wide), Patient()):
        _, info = step(state, microbatches, max_retries=5, rule=rule)
        assert info.retries == 2
        assert not info.found_inf


@pytest.mark.parametrize("scale", [0.0, math.nan, INF])
def test_a_window_at_an_unusable_scale_is_tried_again_at_a_usable_one(scale):
    state, step, _ = overflowing(10)
    _, info = step(state._replace(scaler=at(scale)), numbers(1.0, 2.0), max_retries=3)
    assert info.retries >= 1
    assert not info.found_inf
    for microbatches in (numbers(1.0), numbers(1.0, 2.0)):
        assert step(state._replace(scaler=at(scale)), microbatches)[1].found_inf


# ---- the norm that a step reports


VALUES = st.sampled_from([0.0, 1.0, -2.0, 5.0, 3e38, INF, math.nan])
WEIGHTS = st.sampled_from([0.0, 1.0, 3.0, math.nan, -1.0])


@examples(60)
@given(
    st.lists(st.tuples(VALUES, VALUES, WEIGHTS), min_size=1, max_size=4),
    POLICIES,
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([1.0, INF]),
    st.sampled_from([0, 2]),
    st.booleans(),
    st.sampled_from([SGD, ps.from_torch(torch.optim.Adamax, lr=1.0)]),
    st.sampled_from([1.0, 2.0, INF]),
)
def test_a_skipped_step_has_no_finite_norm_and_one_that_was_taken_has_the_true_one(
    parts, policy, dtype, max_norm, retries, weighted, optimizer, p
):
    state, step = started(
        {"v": torch.zeros(2, dtype=dtype)},
        lambda params, m: (params["v"] * m[0]).sum(),
        optimizer,
        ps.DynamicScale(init_scale=4.0),
        weight_fn=(lambda m: m[1]) if weighted else None,
        on_nonfinite=policy,
    )
    microbatches = [(torch.tensor([a, b], dtype=dtype), torch.tensor(w)) for a, b, w in parts]
    _, info = step(state, microbatches, max_norm=max_norm, norm_type=p, max_retries=retries)
    assert info.grad_norm.dtype is dtype
    if info.found_inf:
        assert not torch.isfinite(info.grad_norm)
        with pytest.raises(FloatingPointError, match="the global norm of the gradients is"):
            ps.check_grad_norm(info.grad_norm)
        return
    parts = [((a, b), w if weighted else 1.0) for a, b, w in parts]
    mean = mean_of(counted(parts, info.scale, policy, dtype)[0])
    expected = torch.linalg.vector_norm(mean / 1e38, p).item() * 1e38
    if expected < torch.finfo(dtype).max:
        assert info.grad_norm.item() == pytest.approx(expected, rel=1e-5)


def test_half_weights_do_not_overflow_together():
    state, step = mean_job(lambda g: torch.tensor(6e4).half(), rule=ps.NoScale())
    new, info = step(state, numbers(1, 3))
    assert not info.found_inf
    assert new.params["w"] == -2


# ---- windows that are made one by one ------------------------------------------------------------


def dropout_net():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    apply, params, buffers = ps.make_functional(model)

    def loss_fn(params, buffers, batch):
        logits, buffers = apply(params, buffers, batch["x"])
        return logits.square().mean(), buffers

    state, step = started(params, loss_fn=loss_fn, buffers=buffers)
    return step, state, loss_fn


def drawn():
    """A batch of random numbers from torch's generator."""
    return {"x": torch.randn(5, 6)}


@pytest.mark.parametrize("bn_update", ["each", "window"])
@pytest.mark.parametrize("on_nonfinite", ["drop_window", "drop_microbatch"])
def test_functions_in_a_window_make_the_step_of_what_they_return(on_nonfinite, bn_update):
    step, state, _ = dropout_net()
    settings = {"on_nonfinite": on_nonfinite, "bn_update": bn_update, "donate": True}
    data = [drawn() for _ in range(4)]
    data[1]["x"][0] = torch.inf
    functions = [lambda: data[0], functools.partial(dict, data[1]), iter(data[2:]).__next__]
    results = []
    for window in (data[:3], functions):
        torch.manual_seed(1)
        results.append(step(clone(state), window, **settings))
    assert same_bits(*results)


def test_random_numbers_are_drawn_in_the_order_of_torchs_loop():
    """Those of the first batch, of its dropout, of the second batch, of its dropout."""
    step, state, loss_fn = dropout_net()
    torch.manual_seed(2)
    _, info = step(state, [drawn] * 3)
    after = torch.get_rng_state()
    torch.manual_seed(2)
    losses, buffers = [], state.buffers
    for _ in range(3):
        loss, buffers = loss_fn(state.params, buffers, drawn())
        losses.append(loss.detach())
    torch.testing.assert_close(info.loss, torch.stack(losses).mean())
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("on_nonfinite", ["drop_window", "drop_microbatch"])
def test_memory_holds_one_microbatch_at_a_time(on_nonfinite):
    step, state, _ = dropout_net()
    alive, others_alive = [], []

    def make():
        others_alive.append(sum(each() is not None for each in alive))
        batch = drawn()
        alive.append(weakref.ref(batch["x"]))
        return batch

    step(state, [make] * 5, donate=True, on_nonfinite=on_nonfinite)
    assert others_alive == [0] * 5
    assert alive[-1]() is None


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("donate", [False, True])
def test_what_a_step_returns_shares_no_memory_with_what_a_function_keeps(donate, number):
    """As a queue of keys, which is a batch."""
    kept = [torch.ones(3), torch.full((3,), 2.0)]
    start, step = started(
        {"w": torch.ones(3)},
        loss_fn=lambda p, b, batch: ((p["w"] * batch[0]).sum(), {"queue": batch[0]}, batch[1]),
        buffers={"queue": torch.zeros(3)},
    )
    state, info = step(start, [lambda: kept] * number, donate=donate)
    assert same_bits([state.buffers["queue"], info.aux[0]], kept)
    assert not shares_memory((state, info), kept)


def test_what_a_function_keeps_stays_apart_from_the_results_of_later_microbatches():
    kept = []

    def make():
        kept.append(torch.full((3,), 2.0))
        return kept[-1]

    state, step = started(
        {"w": torch.ones(3)}, loss_fn=lambda p, b, x: ((p["w"] * x).sum(), b, kept[0])
    )
    _, info = step(state, [make, make, torch.ones(3)])
    assert same_bits(list(info.aux), [kept[0]] * 3)
    assert not shares_memory(info.aux, kept)


def test_an_object_that_can_be_called_is_a_microbatch():
    """As the graphs of torch_geometric are."""

    class Graph:
        x = torch.ones(2)

        def __call__(self):
            raise AssertionError("called")

    state, step = started({"w": torch.ones(2)}, lambda p, graph: (p["w"] * graph.x).sum())
    assert step(state, [Graph()])[0].params["w"].tolist() == [0, 0]


def test_a_function_that_raises_leaves_the_state_and_functions_are_not_tried_again():
    step, state, _ = dropout_net()
    before = clone(state)
    with pytest.raises(StopIteration):
        step(state, [drawn, iter([]).__next__], donate=True)
    assert same_bits(state, before)
    with pytest.raises(ValueError, match=r"max_retries=2 runs a window again.*\[make\(\) for make"):
        step(state, [drawn], max_retries=2)


# ---- a shorter window ----------------------------------------------------------------------------


@examples(25)
@given(
    st.lists(st.booleans(), min_size=1, max_size=6),
    st.integers(0, 3),
    st.sampled_from([5, 33, 300]),
    st.booleans(),
)
def test_a_window_of_a_size_is_torchs_loop_that_drops_what_overflows(bad, missing, size, retries):
    """`loss / k` is backpropagated for each, and gradients with an inf are not added."""
    generator, window_size = torch.Generator().manual_seed(0), len(bad) + missing
    window = [
        torch.randn(size, generator=generator, dtype=torch.float64) * (INF if each else 1)
        for each in bad
    ]
    weight = torch.ones(size, dtype=torch.float64)
    state, step = started({"w": weight}, lambda params, x: ((params["w"] * x) ** 2).mean())
    settings = {"on_nonfinite": "drop_microbatch", "max_retries": int(retries)}
    state, info = step(state, window, window_size=window_size, **settings)
    total, summed = torch.zeros_like(weight), torch.zeros_like(weight[0])
    for x in window:
        leaf = weight.clone().requires_grad_()
        loss = ((leaf * x) ** 2).mean() / window_size
        loss.backward()
        if leaf.grad.isfinite().all():
            total, summed = total + leaf.grad, summed + loss.detach()
    torch.testing.assert_close(state.params["w"], weight - total, rtol=1e-12, atol=1e-12)
    assert info.found_inf == all(bad)
    if all(bad):
        assert info.loss == INF, "the loss says why"
    else:
        torch.testing.assert_close(info.loss, summed, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("retries", [0, 3])
def test_each_microbatch_is_weighed_once_however_often_its_window_runs(retries):
    """A `weight_fn` with a state of its own would else weigh the second run in another way."""
    state, step, microbatches = overflowing(104)
    weights = iter(range(1, 100))
    by_hand = {id(microbatch): weight for weight, microbatch in enumerate(microbatches, 1)}
    assert same_bits(
        step(state, microbatches, max_retries=retries, weight_fn=lambda _: next(weights)),
        step(state, microbatches, max_retries=retries, weight_fn=lambda m: by_hand[id(m)]),
    )
    assert next(weights) == len(microbatches) + 1


# ---- gradients that are added as the backward makes them -----------------------------------------


def written(ctx, seed):
    grad = seed * ctx.x
    ctx.w.grad = grad if ctx.w.grad is None else ctx.w.grad + grad
    return seed * ctx.w, None


def of_detached(ctx, x, w):
    ctx.x, ctx.w = x.detach(), w
    return x * w


# `x * w`, whose backward writes `w.grad` itself
writes_grad = function_of(of_detached, written)


def doubled_by_a_hook(p, x):
    p["w"].register_hook(lambda grad: 2 * grad)
    return (p["w"] * x).sum()


LOSSES = {
    "two uses": lambda p, x: (p["w"] * x).sum() + (p["w"] ** 2).sum() + p["v"].sum(),
    "one unused": lambda p, x: (p["w"] * x).sum(),
    "a sparse gradient": lambda p, x: (
        F.embedding(torch.tensor([0, 2, 2]), p["v"], sparse=True).sum() + (p["w"] * x).sum()
    ),
    "a hook": doubled_by_a_hook,
    "a part that runs again": lambda p, x: torch.utils.checkpoint.checkpoint(
        lambda w: (w * x).tanh().sum(), p["w"], use_reentrant=False
    ),
    "a written gradient": lambda p, x: writes_grad(p["v"].mean() * x, p["w"]).sum(),
    "a gradient, then a written one": lambda p, x: (
        writes_grad(p["v"].mean() * x, p["w"]).sum() + (p["w"] * x).sum()
    ),
    "a backward of its own": lambda p, x: (
        OwnBackward.apply(p["v"].mean() * x, p["w"]).sum() + (p["w"] * x).sum()
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("kind", LOSSES)
@examples(8)
@given(data=st.data())
def test_gradients_that_are_added_as_they_are_made_give_the_step_of_whole_lists(kind, dtype, data):
    number = data.draw(st.integers(2, 4))
    xs = numbers(*[data.draw(st.integers(-8, 8)) / 8 for _ in range(number)])
    if data.draw(st.booleans()):
        xs[-1] = torch.tensor(INF)
    weights = data.draw(st.sampled_from([None, lambda x: float(abs(x)) if abs(x) < 1 else 0.5]))
    settings = {"max_norm": data.draw(st.sampled_from([None, 0.5])), "weight_fn": weights}
    params = {"w": torch.linspace(-1, 1, 33).to(dtype), "v": torch.ones(5, 2, dtype=dtype)}

    def loss_fn(p, buffers, x):
        return LOSSES[kind](p, x), {"seen": buffers["seen"] + 1}

    settings |= {"rule": ps.DynamicScale(init_scale=8.0), "buffers": {"seen": torch.tensor(0.0)}}
    state, step = started(params, loss_fn=loss_fn, **settings)
    stepped = []
    for large in (-1, 2**40):
        with pytest.MonkeyPatch.context() as patch, Untouched((state, xs)):
            patch.setattr(window_mean, "_LARGE", large)
            stepped.append(step(state, xs))
    near = {"rtol": 2e-3 if dtype is torch.float16 else 1e-5, "atol": 1e-6, "equal_nan": True}
    assert_close(*stepped, **near)


def test_a_window_of_large_gradients_holds_their_mean_and_one_of_them():
    """As torch's loop does, where `.grad` is the sum; and as many again for lists."""
    alive, grads = [], []

    def count(ctx, seed):
        """Counts the gradients that stand when that of a parameter is made."""
        alive.append(len([g for g in grads if g() is not None]))
        grad = seed.expand(2**17).clone()
        grads.append(weakref.ref(grad.untyped_storage()))
        return grad

    seen = function_of(lambda ctx, w: w.sum(), count)
    params = {f"w{i}": torch.ones(2**17) for i in range(8)}
    state, step = started(params, lambda p, x: sum(map(seen, p.values())) * x, donate=True)
    step(state, numbers(1, 1, 1))
    assert max(alive) <= 10, alive


def test_a_window_of_large_gradients_keeps_no_parameter_of_a_microbatch_alive(monkeypatch):
    monkeypatch.setattr(window_mean, "_LARGE", -1)
    leaves = []

    def loss(p, x):
        leaves.append(weakref.ref(p["w"]))
        return (p["w"] * x).sum()

    state, step = started({"w": torch.ones(5)}, loss)
    gc.collect()
    gc.disable()
    try:
        step(state, numbers(1, 2))
        assert [leaf() for leaf in leaves] == [None, None]
    finally:
        gc.enable()


def test_a_gradient_that_a_backward_writes_is_sent_once_or_refused():
    def forward(ctx, x, holder):
        ctx.leaf = holder[0]
        return x.sum()

    def backward(ctx, seed):
        ctx.leaf.grad = seed * torch.ones(3)
        return seed.expand(3), None

    leaves = [nn.Parameter(torch.ones(3)) for _ in range(2)]

    def send(twice=False, refuse_repeats=True):
        sent, loss = {}, function_of(forward, backward)(leaves[1], leaves[:1])
        loss = loss + (2 * leaves[0]).sum() if twice else loss
        stream_gradients(
            loss,
            torch.ones(()),
            leaves,
            lambda n, g: sent.setdefault(n, []).append(g),
            refuse_repeats=refuse_repeats,
        )
        return {n: sum(grad.pop() for grad in grads).tolist() for n, grads in sent.items()}

    assert send() == {0: [1.0] * 3, 1: [1.0] * 3}
    assert send(twice=True, refuse_repeats=False) == {0: [3.0] * 3, 1: [1.0] * 3}
    with pytest.raises(RuntimeError, match="in two pieces"):
        send(twice=True)


@pytest.fixture(params=[-1, 2**40], ids=["as they are made", "lists"])
def _large(request, monkeypatch):
    monkeypatch.setattr(window_mean, "_LARGE", request.param)


@pytest.mark.usefixtures("_large")
def test_a_later_backward_through_a_parameter_that_a_loss_has_kept_is_not_of_the_window():
    kept, last = [], []

    def loss(p, x):
        kept.append(p["w"])
        if last:
            last.pop().backward()
        last.append((p["w"] * 1000).sum())
        return (p["w"] * x).pow(2).sum()

    state, step = started({"w": torch.ones(5)}, loss)
    assert step(state, numbers(1, 1))[0].params["w"].tolist() == [-1.0] * 5
    kept[-1].grad = None
    kept[-1].pow(2).sum().backward()
    assert kept[-1].grad.tolist() == [2.0] * 5


@pytest.mark.usefixtures("_large")
def test_a_gradient_that_a_backward_writes_stays_its_own():
    own = torch.ones(5)

    def forward(ctx, w):
        ctx.w = w
        return w.sum()

    def backward(ctx, seed):
        ctx.w.grad = own

    def loss(p, x):
        return 3 * p["w"].sum() + function_of(forward, backward)(p["w"])

    state, step = started({"w": torch.zeros(5)}, loss, rule=ps.NoScale())
    new, _ = step(state, numbers(0, 0))
    assert (new.params["w"].tolist(), own.tolist()) == ([-4.0] * 5, [1.0] * 5)


@pytest.mark.usefixtures("_large")
@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_of_a_backward_that_records_its_own_are_on_no_graph():
    def forward(ctx, x, w):
        ctx.w = w
        return x * w.detach()

    def backward(ctx, seed):
        with torch.enable_grad():
            (ctx.w.tanh()).backward(seed, create_graph=True)
        return seed, None

    def update(grads, opt_state, params):
        assert not any(grad.requires_grad for grad in grads.values())
        return grads, opt_state

    def loss(p, x):
        return function_of(forward, backward)(p["v"], p["w"]).sum() + p["v"].sum()

    own = ps.from_transformation((lambda params: {}, update))
    state, step = started({"v": torch.ones(5), "w": torch.ones(5)}, loss, own)
    step(state, numbers(1, 1))


@pytest.mark.parametrize("exponent", [-149, -130, -126, 0, 127])
def test_a_window_that_drops_takes_every_scale(exponent):
    state, step = started(
        {"w": torch.ones(4)},
        lambda p, x: (p["w"] * x).sum() * 2.0**-8,
        rule=ps.StaticScale(2.0**exponent),
    )
    new, _ = step(state, [1.0, 3.0], on_nonfinite="drop_microbatch")
    if exponent > -130:  # below that a gradient of 2**-8 underflows
        assert new.params["w"].tolist() == [1 - 2.0**-7] * 4


def test_large_gradients_that_are_all_none_are_those_of_an_independent_loss():
    class Independent(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sum()

        @staticmethod
        def backward(ctx, grad):
            return None

    def loss_fn(params, buffers, x):
        return Independent.apply(params["w"]), buffers

    state, step = started({"w": torch.ones(2**17)}, None, SGD, RULE, loss_fn=loss_fn)
    with pytest.raises(ValueError, match="the loss does not depend on params"):
        step(state, [torch.ones(1)] * 2)


def test_a_window_in_which_nothing_has_a_weight_is_skipped():
    state, step = started(
        {"w": torch.ones(2)}, lambda p, x: (p["w"] * x).sum(), weight_fn=lambda x: 0.0
    )
    new, info = step(state, [torch.ones(2)] * 2)
    assert new.params["w"].equal(torch.ones(2))
    assert info.found_inf


def test_a_microbatch_may_be_a_function_under_a_transform():
    state, step = started({"w": torch.ones(2)}, lambda p, x: (p["w"] * x).sum(), SGD, RULE)

    def total(x):
        return step(state, [lambda: x])[0].params["w"].sum()

    assert torch.func.grad(total)(torch.ones(2)).equal(-torch.ones(2))
