"""A donated step on a CPU that goes the way of an accelerator: it returns the memory that it was
given, on which the replay of a captured one relies. On a second device: `second_device/test_jobs`.
"""

import contextlib

import pytest
import torch
from helpers import AsOnAnAccelerator, batch, clone, job, same_bits, shares_memory, started, tensors

import purescale as ps
from purescale._torch import donation, tracing

SCHEDULE = {"lr": lambda applied: 1e-2 * 0.9**applied}
FORMULA = {"RMSprop": {"in_state": ("lr",), "momentum": 0.9}, "NAdam": SCHEDULE}
OPTIMIZERS = {
    name: ps.from_torch(getattr(torch.optim, name), **settings)
    for name, settings in ({"AdamW": {"in_state": ("lr",)}} | FORMULA).items()
}
RULE = ps.DynamicScale(init_scale=2.0**10, growth_interval=2)


def addresses(state):
    return [donation.storage_pointer(tensor) for tensor in tensors(state)]


def loss_fn(params, buffers, x):
    h = x * params["w"] + params["b"].sum()
    new = {"mean": 0.9 * buffers["mean"] + h.sum(0), "count": buffers["count"] + 1}
    return h.square().mean(), new


def a_job(optimizer, loss_fn=loss_fn):
    params = {"w": torch.ones(3, 4), "b": torch.ones(5)}
    buffers = {"mean": torch.zeros(4), "count": torch.zeros((), dtype=torch.int64)}
    return started(params, None, optimizer, RULE, loss_fn=loss_fn, buffers=buffers)


BATCHES = [batch(0), (batch(1)[0] * float("inf"), batch(1)[1]), batch(2), batch(3)]


ACCELERATOR = tracing.as_on_an_accelerator


@pytest.mark.parametrize(
    ("name", "way"), [("AdamW", contextlib.nullcontext), *((name, ACCELERATOR) for name in FORMULA)]
)
def test_a_donated_step_has_the_same_bits_and_stays_where_it_is(name, way):
    with way():
        state, step = job(OPTIMIZERS[name], RULE, bn_update="window", max_norm=1.0)
        state = expected = state._replace(rng=torch.Generator().manual_seed(3).get_state())
        state = clone(state)
        before = addresses(state)
        for index in range(4):
            window = [BATCHES[index], BATCHES[(3 * index) % 4]]
            expected, _ = step(expected, window)
            state, _ = step(state, window, donate=True)
            assert same_bits(state, expected)
            assert addresses(state) == before
    assert expected.step == 2  # the other two windows hold an overflow


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_stays_where_it_is_takes_few_operators(name):
    counts = []
    for donate in (False, True):
        state, step = a_job(OPTIMIZERS[name])
        with AsOnAnAccelerator() as run:
            step(state, [torch.ones(3, 4)], donate=donate)
        counts.append(len(run.ops))
    assert counts[1] <= counts[0] + 8  # a list of copies for each of the few dtypes


# ---- what others see -----------------------------------------------------------------------------


def with_one_counter(state):
    zero = torch.zeros((), dtype=torch.int32)
    scaler = state.scaler._replace(growth_tracker=zero, consecutive_skips=zero)
    return state._replace(scaler=scaler), None


@pytest.mark.parametrize(
    "share",
    [
        with_one_counter,
        lambda state: (state, state.step),  # in the microbatch
        lambda state: (state, state.scaler.scale.view(1)),
        lambda state: (state, state.opt_state.applied.view(1)),
    ],
)
def test_numbers_that_share_memory_are_not_written_into(share):
    def loss_and_seen(params, buffers, microbatch):
        loss, buffers = loss_fn(params, buffers, microbatch[0])
        return loss, buffers, microbatch[1]

    state, step = a_job(OPTIMIZERS["AdamW"], loss_and_seen)
    results = []
    with tracing.as_on_an_accelerator():
        for donate in (False, True):
            mine, seen = share(clone(state))
            kept = clone(seen)
            for index in range(3):
                x = torch.full((3, 4), 1.0 if index else float("inf"))
                mine, info = step(mine, [(x, seen)], donate=donate)
            assert same_bits(seen, kept)
            assert not shares_memory(mine, info)
            results.append((mine, info))
    assert same_bits(*results)


def test_a_rate_that_requires_a_gradient_stays_off_the_graph():
    optimizer, params = OPTIMIZERS["AdamW"], {"w": torch.ones(3)}
    state = optimizer.init(params)
    state = state._replace(lr=torch.tensor(0.1, requires_grad=True))
    with tracing.as_on_an_accelerator(), torch.no_grad():
        _, after = ps.maybe_step(optimizer, params, clone(params), state, False, donate=True)
    assert not after.lr.requires_grad
    assert after.lr == state.lr
    assert after.applied == 1
