"""A donated step on an accelerator returns the memory that it was given, which the replay of a
captured one (a CUDA graph) relies on: on fake CUDA tensors, and with values on a CPU that goes the
way of an accelerator.
"""

import functools

import pytest
import torch
from helpers import batch, clone, job, same_bits, shares_memory, tensors
from test_foreach import Launched, fake_cuda
from torch.overrides import TorchFunctionMode

import purescale as ps
from purescale._step import value_and_grad
from purescale._torch import donation, tracing
from purescale._tree import pytree as tree

SCHEDULE = {"lr": lambda applied: 1e-2 * 0.9**applied}
FUSED = {"AdamW": {"in_state": ("lr",)}, "Adam": SCHEDULE, "SGD": {"momentum": 0.9}, "Adagrad": {}}
FORMULA = {"RMSprop": {"in_state": ("lr",), "momentum": 0.9}, "NAdam": SCHEDULE, "Adafactor": {}}
OPTIMIZERS = {
    name: ps.from_torch(getattr(torch.optim, name), **settings)
    for name, settings in (FUSED | FORMULA).items()
    if name != "Adafactor"
}
RULE = ps.DynamicScale(init_scale=2.0**10, growth_interval=2)
RULES = [RULE, ps.HeadroomScale(window=4), ps.NoScale()]


def addresses(state):
    return [donation.storage_pointer(tensor) for tensor in tensors(state)]


# ---- on fake CUDA tensors ------------------------------------------------------------------------


class IndexedWithoutDriver(TorchFunctionMode):
    """`t[0]` and `t[1:3]` ask for the driver, also of a fake tensor."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__:
            tensor, index = args
            if isinstance(index, slice):
                first, end, _ = index.indices(len(tensor))
                return tensor.narrow(0, first, end - first)
            return tensor.select(0, index)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def cuda():
    """Without a driver torch records no graph over fake CUDA tensors: in place of a backward there
    are gradients of the right shapes. Kernels compute nothing.
    """

    def run_forward(self, buffers, microbatch):
        return (self.present_params, *self._scaled_loss(buffers, microbatch, self.present_params))

    with (
        fake_cuda(),
        Launched() as launched,
        IndexedWithoutDriver(),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(tree, "storage_pointer", donation.storage_pointer)
        patch.setattr(value_and_grad.ValueAndGrad, "run_forward", run_forward)
        patch.setattr(
            value_and_grad, "gradients_of", lambda loss, inputs: list(map(torch.empty_like, inputs))
        )
        yield launched


def loss_fn(params, buffers, x):
    h = x * params["w"] + params["b"].sum()
    new = {"mean": 0.9 * buffers["mean"] + h.sum(0), "count": buffers["count"] + 1}
    return h.square().mean(), new


def a_job(optimizer, rule=RULE, **settings):
    params = {"w": torch.ones(3, 4), "b": torch.ones(5)}
    buffers = {"mean": torch.zeros(4), "count": torch.zeros((), dtype=torch.int64)}
    step = functools.partial(
        ps.train_step, loss_fn=loss_fn, optimizer=optimizer, rule=rule, donate=True, **settings
    )
    return ps.init_train_state(params, buffers, optimizer, rule), step


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_warm_donated_train_step_allocates_nothing_that_it_returns_as_state(name, cuda):
    dropping = {"max_norm": 1.0, "on_nonfinite": "drop_microbatch"}
    for rule, number, settings in zip(RULES, (3, 1, 3), (dropping, {}, {}), strict=True):
        state, step = a_job(OPTIMIZERS[name], rule, **settings)
        window = [torch.ones(3, 4) for _ in range(number)]
        before = addresses(state)
        for _ in range(2):
            state, _ = step(state, window)
        assert addresses(state) == before
        assert len(set(before)) == len(before)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_donated_optimizer_step_returns_the_memory_that_it_was_given(name, cuda):
    optimizer = OPTIMIZERS[name]
    params = {"w": torch.ones(3, 4), "b": torch.ones(5)}
    state, scaler = optimizer.init(params), RULE.init("cuda")
    before = addresses((params, state))
    for _ in range(2):
        grads = {key: torch.ones_like(leaf) for key, leaf in params.items()}
        bad = torch.zeros((), dtype=torch.bool)
        params, state = ps.maybe_step(optimizer, params, grads, state, bad, donate=True)
        assert addresses((params, state)) == before
        out = ps.unscale_and_step(optimizer, scaler, params, grads, state, 1.0, donate=True)
        params, state = out.params, out.opt_state
        assert addresses((params, state)) == before


@pytest.mark.parametrize("name", ["AdamW", "RMSprop"])
def test_what_stays_where_it_is_takes_few_operators(name, cuda):
    counts = []
    for donate in (False, True):
        state, step = a_job(OPTIMIZERS[name])
        cuda.ops.clear()
        step(state, [torch.ones(3, 4)], donate=donate)
        counts.append(len(cuda.ops))
    assert counts[1] <= counts[0] + 8  # a list of copies for each of the few dtypes


# ---- with values ---------------------------------------------------------------------------------


def transformation():
    """SGD with momentum as an (init, update) pair, with a count of its own."""

    def init(params):
        zeros = {name: torch.zeros_like(leaf) for name, leaf in params.items()}
        return zeros, torch.zeros((), dtype=torch.int64)

    def update(grads, state, params):
        momentum = {name: 0.9 * m + grads[name] for name, m in state[0].items()}
        return {name: -0.1 * m for name, m in momentum.items()}, (momentum, state[1] + 1)

    return ps.from_transformation((init, update))


def seeded(state):
    return state._replace(rng=torch.Generator().manual_seed(3).get_state())


BATCHES = [batch(0), (batch(1)[0] * float("inf"), batch(1)[1]), batch(2), batch(3)]


@pytest.mark.parametrize("name", [*OPTIMIZERS, "transformation"])
def test_a_donated_step_has_the_bits_of_one_in_fresh_memory_and_stays_where_it_is(name):
    bn_update = "each" if name == "AdamW" else "window"
    optimizer = transformation() if name == "transformation" else OPTIMIZERS[name]
    with tracing.as_on_an_accelerator():
        state, step = job(optimizer, RULE, bn_update=bn_update, max_norm=1.0)
        state = expected = seeded(state)
        state = clone(state)
        before = addresses(state)
        for index in range(4):
            window = [BATCHES[index], BATCHES[(3 * index) % 4]]
            expected, _ = step(expected, window)
            state, _ = step(state, window, donate=True)
            assert same_bits(state, expected)
            assert addresses(state) == before
    assert expected.step == 2  # the other two windows hold an overflow


# ---- what others see -----------------------------------------------------------------------------


def one_counter(state):
    zero = torch.zeros((), dtype=torch.int32)
    return state._replace(
        scaler=state.scaler._replace(growth_tracker=zero, consecutive_skips=zero)
    ), None


def count_in_the_microbatch(state):
    return state, state.step


def scale_in_the_microbatch(state):
    return state, state.scaler.scale.view(1)


def count_of_the_optimizer_in_the_microbatch(state):
    return state, state.opt_state.applied.view(1)


@pytest.mark.parametrize(
    "share",
    [
        one_counter,
        count_in_the_microbatch,
        scale_in_the_microbatch,
        count_of_the_optimizer_in_the_microbatch,
    ],
)
def test_numbers_that_share_memory_are_not_written_into(share):
    optimizer = OPTIMIZERS["AdamW"]

    def loss_and_seen(params, buffers, microbatch):
        loss, buffers = loss_fn(params, buffers, microbatch[0])
        return loss, buffers, microbatch[1]

    settings = {"loss_fn": loss_and_seen, "optimizer": optimizer, "rule": RULE}
    results = []
    with tracing.as_on_an_accelerator():
        for donate in (False, True):
            state, seen = share(clone(a_job(optimizer)[0]))
            kept = clone(seen)
            for index in range(3):
                x = torch.full((3, 4), 1.0 if index else float("inf"))
                state, info = ps.train_step(state, [(x, seen)], donate=donate, **settings)
            assert same_bits(seen, kept)
            assert not shares_memory(state, info)
            results.append((state, info))
    assert same_bits(*results)


def test_a_rate_that_requires_a_gradient_stays_off_the_graph():
    optimizer = OPTIMIZERS["AdamW"]
    params = {"w": torch.ones(3)}
    state = optimizer.init(params)
    state = state._replace(lr=torch.tensor(0.1, requires_grad=True))
    with tracing.as_on_an_accelerator(), torch.no_grad():
        _, after = ps.maybe_step(
            optimizer, params, {"w": torch.ones(3)}, state, torch.tensor(False), donate=True
        )
    assert not after.lr.requires_grad
    assert after.lr == state.lr
    assert after.applied == 1
