"""max_retries: the same window again at a lower scale."""

import concurrent.futures
import contextlib
import functools
import math
import threading

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_donation_keeps_bits, clone, generator_of, scaled_by, started
from test_microbatches import INF, numbers, overflowing

import purescale as ps
from purescale.testing import Untouched, same_bits


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


def test_a_retry_saves_what_a_lower_scale_can_save_and_drops_the_rest():
    state, step, _ = overflowing(104)
    step = functools.partial(step, max_retries=10, on_nonfinite="drop_microbatch")
    window = numbers(2.0**27, math.nan, 2.0**26)
    new, info = step(state, window, loss_fn=lambda p, b, g: (p["w"] * g + g * 0, b))
    assert info.retries == 4
    assert not info.found_inf
    assert new.params["w"] == -(2.0**27 + 2.0**26) / 2
    assert new.scaler.scale == 2.0**103, (
        "one microbatch is still bad: the scale ends as after one ordinary skip"
    )


@pytest.mark.parametrize("own_rng", [False, True])
def test_a_retry_draws_the_same_random_numbers_and_consumes_nothing(own_rng):
    seen = []

    def loss(params, x):
        seen.append(F.dropout(x @ params["w"], 0.5).detach())
        return (seen[-1] * params["w"]).square().mean() * 1e4

    rule = ps.DynamicScale(init_scale=2.0**10, max_scale=2.0**127)
    rng = generator_of(3).get_state() if own_rng else None
    state, step = started({"w": torch.ones(8, 8)}, loss, rule=rule, rng=rng)
    state, microbatches = scaled_by(state, 2.0**125), [torch.ones(8, 8)] * 2
    torch.manual_seed(1)
    new, info = step(state, microbatches, max_retries=20)
    after = torch.get_rng_state()
    assert info.retries > 0
    assert all(torch.equal(seen[i], seen[i % 2]) for i in range(len(seen)))
    assert not torch.equal(seen[0], seen[1])
    torch.manual_seed(1)
    scaler = state.scaler
    for _ in range(info.retries):
        scaler = rule.update(scaler, torch.tensor(True))
    expected, _ = step(state._replace(scaler=scaler), microbatches)
    assert same_bits(new, expected)
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("retries", [2, 10])
def test_retries_work_with_donation(retries):
    state, step, window = overflowing(104)
    assert_donation_keeps_bits(
        lambda donate: step(clone(state), window, max_retries=retries, donate=donate)
    )


# ---- threads -------------------------------------------------------------------------------------


def drawing(wait):
    """A loss that draws, lets other threads draw, and draws again."""

    def loss_fn(params, buffers, x):
        drawn = [torch.rand(())]
        wait()
        drawn.append(torch.rand(()))
        return (params["w"] * torch.stack(drawn)).sum(), buffers

    return loss_fn


def seeded(seed=3, **settings):
    """(state, step) with a generator of its own."""
    rng = generator_of(seed).get_state()
    return started({"w": torch.ones(2)}, rng=rng, **settings)


@pytest.mark.parametrize("flags", [{}, {"max_retries": 1}])
def test_steps_with_rng_in_two_threads_replay_their_own_bits(flags):
    barrier = threading.Barrier(2)

    def meet():
        with contextlib.suppress(threading.BrokenBarrierError):
            barrier.wait(0.3)

    jobs = [seeded(seed, **flags) for seed in range(2)]
    expected = [step(state, [1, 2], loss_fn=drawing(lambda: None)) for state, step in jobs]
    before = torch.get_rng_state()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(step, state, [1, 2], loss_fn=drawing(meet)) for state, step in jobs]
    assert same_bits([run.result() for run in runs], expected)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_step_with_rng_inside_of_another_takes_its_turn_again():
    state, step = seeded(loss_fn=drawing(lambda: None))
    outer = drawing(lambda: step(state, [1]))
    assert same_bits(step(state, [1], loss_fn=outer), step(state, [1]))


def test_a_loss_that_raises_ends_its_turn():
    state, step = seeded()
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError):
        step(state, [1], loss_fn=drawing(lambda: 1 / 0))
    assert torch.equal(torch.get_rng_state(), before)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(step, state, [1], loss_fn=drawing(lambda: None)).result(timeout=60)
