"""max_retries: the same window again at a lower scale."""

import concurrent.futures
import contextlib
import functools
import math
import threading

import pytest
import torch
from helpers import (
    Untouched,
    at,
    batch,
    clone,
    job,
    same_bits,
    scaled_by,
    stack,
)
from test_microbatches import INF, RULE, SGD, mean_job, numbers, overflowing
from torch import nn

import purescale as ps
from purescale._step.retry import Generators
from purescale.testing import assert_sync_free


def test_a_retried_window_is_the_step_that_the_lower_scale_would_have_taken():
    state, step, microbatches = overflowing(104)
    with Untouched((state, microbatches)):
        new, info = step(state, microbatches, max_retries=10)
    assert info.retries == 4
    assert info.scale == 2.0**100
    assert not info.found_inf
    scaler = state.scaler
    for _ in range(4):
        scaler = step.keywords["rule"].update(scaler, torch.tensor(True))
    expected, plain = step(state._replace(scaler=scaler), microbatches)
    assert same_bits(new, expected)
    assert same_bits(info._replace(retries=plain.retries), plain)


@pytest.mark.parametrize("retries", [1, 3])
def test_when_the_bound_is_reached_the_step_ends_as_one_ordinary_skip(retries):
    # nnabla leaves the scale divided by 2**101.
    state, step, microbatches = overflowing(104)
    new, info = step(state, microbatches, max_retries=retries)
    expected, _ = step(state, microbatches)
    assert same_bits(new, expected)
    assert info.retries == retries
    assert info.found_inf


def test_a_clean_window_is_not_tried_again():
    state, step, microbatches = overflowing(60)
    assert same_bits(step(state, microbatches, max_retries=5), step(state, microbatches))


@pytest.mark.parametrize(
    "microbatches", [numbers(math.nan), numbers(INF, 2.0**27), numbers(math.nan, 1)]
)
def test_a_loss_that_itself_is_not_finite_is_not_tried_again(microbatches):
    state, step, _ = overflowing(104)
    calls = []

    def loss_fn(params, buffers, g):
        calls.append(g)
        return (params["w"] + 1) * g, buffers

    new, info = step(state, microbatches, max_retries=5, loss_fn=loss_fn)
    assert len(calls) == len(microbatches)
    assert info.retries == 0
    assert same_bits(new, step(state, microbatches, loss_fn=loss_fn)[0])


def test_a_single_microbatch_is_tried_again():
    state, step, microbatches = overflowing(104)
    new, info = step(state, microbatches[:1], max_retries=10)
    assert info.retries == 4
    assert new.params["w"] == -(2.0**27)


def test_a_retry_saves_what_a_lower_scale_can_save_and_drops_the_rest():
    state, step, _ = overflowing(104)
    loss_fn = lambda p, b, g: (p["w"] * g + g * 0, b)  # noqa: E731
    new, info = step(
        state,
        numbers(2.0**27, math.nan, 2.0**26),
        max_retries=10,
        on_nonfinite="drop_microbatch",
        loss_fn=loss_fn,
    )
    assert info.retries == 4
    assert not info.found_inf
    assert new.params["w"] == -(2.0**27 + 2.0**26) / 2
    assert new.scaler.scale == 2.0**103, (
        "one microbatch is still bad: the scale ends as after one ordinary skip"
    )


def test_retries_stop_at_the_smallest_scale():
    rule = ps.DynamicScale(init_scale=2.0**10, min_scale=2.0**8)
    state, step = mean_job(rule=rule)
    new, info = step(
        state,
        numbers(1),
        max_retries=50,
        loss_fn=lambda p, b, g: (torch.where(p["w"] == 0, p["w"] * INF * 0 + p["w"], 0), b),
    )
    assert info.found_inf in (True, False)  # whatever it is, it ends
    overflow = lambda p, b, g: (Overflows.apply(p["w"]), b)  # noqa: E731
    new, info = step(state, numbers(1), max_retries=50, loss_fn=overflow)
    assert info.retries == 2
    assert new.scaler.scale == 2.0**9


class Overflows(torch.autograd.Function):
    """A finite loss whose gradient is inf at any scale."""

    @staticmethod
    def forward(ctx, w):
        return w * 1.0

    @staticmethod
    def backward(ctx, grad):
        return grad * INF


def test_a_retry_waits_for_the_rule_to_lower_the_scale():
    rule = ps.DynamicScale(init_scale=2.0**10, max_scale=2.0**120, hysteresis=3)
    state, step = mean_job(rule=rule)
    state = state._replace(scaler=at(2.0**102, hysteresis_tracker=3))
    new, info = step(state, numbers(2.0**27), max_retries=2)
    assert info.retries == 2
    assert info.scale == 2.0**100
    assert new.params["w"] == -(2.0**27)


@pytest.mark.parametrize("own_rng", [False, True])
def test_a_retry_draws_the_same_random_numbers_and_consumes_nothing(own_rng):
    apply, params, buffers = ps.make_functional(
        nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    )
    rule = ps.DynamicScale(init_scale=2.0**10, max_scale=2.0**127)
    rng = torch.Generator().manual_seed(3).get_state() if own_rng else None
    state = ps.init_train_state(params, buffers, SGD, rule, rng=rng)
    seen = []

    def loss_fn(params, buffers, x):
        out, buffers = apply(params, buffers, x)
        seen.append(out.detach().clone())
        return out.square().mean() * 1e4, buffers

    step = functools.partial(ps.train_step, loss_fn=loss_fn, optimizer=SGD, rule=rule)
    microbatches = [torch.ones(4, 8)] * 2
    torch.manual_seed(1)
    new, info = step(scaled_by(state, 2.0**125), microbatches, max_retries=20)
    after = torch.get_rng_state()
    assert info.retries > 0
    assert all(torch.equal(seen[i], seen[i % 2]) for i in range(len(seen)))
    assert not torch.equal(seen[0], seen[1])
    torch.manual_seed(1)
    scaler = scaled_by(state, 2.0**125).scaler
    for _ in range(info.retries):
        scaler = rule.update(scaler, torch.tensor(True))
    expected, _ = step(state._replace(scaler=scaler), microbatches)
    assert same_bits(new, expected)
    assert torch.equal(torch.get_rng_state(), after)


def test_retries_work_with_donation():
    state, step, microbatches = overflowing(104)
    for retries in (2, 10):
        expected = step(state, microbatches, max_retries=retries)
        assert same_bits(
            step(clone(state), microbatches, max_retries=retries, donate=True), expected
        )


def test_without_retries_nothing_is_read():
    state, step = job(SGD, RULE, on_nonfinite="drop_microbatch", weight_fn=lambda b: len(b[1]))
    assert_sync_free(step, state, [batch(0), batch(1)])


def test_retries_are_refused_where_they_cannot_be():
    state, step, microbatches = overflowing(104)
    with pytest.raises(
        ValueError,
        match="max_retries reads a flag on the host, which a traced or captured step cannot do",
    ):
        torch.vmap(lambda s: step(s, microbatches, max_retries=1))(stack([state, state]))


# ---- threads -------------------------------------------------------------------------------------


def drawing(wait):
    """A loss that draws, lets other threads draw, and draws again."""

    def loss_fn(params, buffers, x):
        drawn = [torch.rand(())]
        wait()
        drawn.append(torch.rand(()))
        return (params["w"] * torch.stack(drawn)).sum(), buffers

    return loss_fn


@pytest.mark.parametrize("flags", [{}, {"max_retries": 1}])
def test_steps_with_rng_in_two_threads_replay_their_own_bits(flags):
    barrier = threading.Barrier(2)

    def meet():
        with contextlib.suppress(threading.BrokenBarrierError):
            barrier.wait(0.3)

    rule = ps.DynamicScale()
    step = functools.partial(ps.train_step, optimizer=SGD, rule=rule, **flags)
    states = [
        ps.init_train_state(
            {"w": torch.ones(2)}, {}, SGD, rule, rng=torch.Generator().manual_seed(i).get_state()
        )
        for i in range(2)
    ]
    expected = [step(state, [1, 2], loss_fn=drawing(lambda: None)) for state in states]
    before = torch.get_rng_state()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(step, state, [1, 2], loss_fn=drawing(meet)) for state in states]
    assert same_bits([job.result() for job in jobs], expected)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_step_with_rng_inside_of_another_takes_its_turn_again():
    inner = functools.partial(
        ps.train_step, loss_fn=drawing(lambda: None), optimizer=SGD, rule=RULE
    )
    rng = torch.Generator().manual_seed(3).get_state()
    state = ps.init_train_state({"w": torch.ones(2)}, {}, SGD, RULE, rng=rng)
    outer = drawing(lambda: inner(state, [1]))
    plain = inner(state, [1])
    assert same_bits(ps.train_step(state, [1], loss_fn=outer, optimizer=SGD, rule=RULE), plain)


def test_a_loss_that_raises_ends_its_turn():
    rng = torch.Generator().manual_seed(3).get_state()
    state = ps.init_train_state({"w": torch.ones(2)}, {}, SGD, RULE, rng=rng)
    step = functools.partial(ps.train_step, state, [1], optimizer=SGD, rule=RULE)
    with pytest.raises(ZeroDivisionError):
        step(loss_fn=drawing(lambda: 1 / 0))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(step, loss_fn=drawing(lambda: None)).result(timeout=60)


def test_generators_draw_the_same_numbers_after_they_are_restored():
    generators = Generators.of(torch.device("cpu"))
    before = generators.states()
    first = torch.rand(5)
    generators.restore(before)
    assert torch.equal(torch.rand(5), first)


def test_generators_are_restored_after_an_error():
    before = torch.get_rng_state()

    def draw_and_fail():
        with Generators.of(torch.device("cpu")).unchanged():
            torch.rand(5)
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk"):
        draw_and_fail()
    assert torch.equal(torch.get_rng_state(), before)
