"""What a step costs, counted and not timed: operators, passes over the gradients, memory, syncs."""

import functools
import itertools
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from helpers import Dispatched, batch, clone, job, small_net, started, tensors
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

import purescale as ps
from purescale._grads import local_stats
from purescale._torch_optim.kernels import keyword_arguments
from purescale.testing import assert_sync_free

ADAMW = ps.from_torch(torch.optim.AdamW, lr=0.1, weight_decay=0.1)
OPTIM = torch.optim
SETTINGS = {
    "AdamW": (OPTIM.AdamW, {"weight_decay": 0.1}),
    "AdamW, amsgrad": (OPTIM.AdamW, {"lr": torch.tensor(0.1), "amsgrad": True}),
    "Adam": (OPTIM.Adam, {"weight_decay": 0.1, "maximize": True}),
    "SGD": (OPTIM.SGD, {}),
    "SGD, momentum": (OPTIM.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "Adagrad": (OPTIM.Adagrad, {"lr_decay": 0.1}),
    "overrides": (OPTIM.AdamW, {"overrides": {"0": {"lr": 0.5, "weight_decay": 0.0}}}),
}


def made(name, **others):
    cls, settings = SETTINGS[name]
    return ps.from_torch(cls, **{"lr": 0.1, **settings, **others})


FUSED = {name: made(name) for name in SETTINGS}
SCALE = 1024.0
VIEWS = (
    *("view", "_unsafe_view", "split", "detach", "alias", "as_strided", "unsqueeze", "slice"),
    *("select", "expand", "reshape"),
)


def problem(shapes, optimizer=ADAMW, dtype=torch.float32, grad_dtype=None):
    """(scaler, params, scaled gradients, state) after a first step."""
    g = torch.Generator().manual_seed(0)
    params = {str(i): torch.randn(shape, generator=g).to(dtype) for i, shape in enumerate(shapes)}
    grads = {n: SCALE * torch.randn(p.shape, generator=g) for n, p in params.items()}
    grads = {n: grad.to(grad_dtype or dtype) for n, grad in grads.items()}
    state = optimizer.init(params)
    params, state = optimizer.step(params, {n: g.to(dtype) for n, g in grads.items()}, state)
    return ps.DynamicScale(init_scale=SCALE).init(), params, grads, state


# ---- counts --------------------------------------------------------------------------------------


def step_over(shapes, optimizer=ADAMW, **settings):
    arguments = problem(shapes, optimizer)
    return arguments, lambda: ps.unscale_and_step(optimizer, *arguments, **settings)


class Reads(Dispatched):
    """Count the elements of some tensors that operators read."""

    def __init__(self, watched):
        super().__init__()
        self.storages = {t.untyped_storage().data_ptr() for t in watched}
        self.read = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ not in (*VIEWS, "new_zeros"):
            given = tensors((args, kwargs))
            seen = [t for t in given if t.untyped_storage().data_ptr() in self.storages]
            self.read += sum(t.numel() for t in seen)
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("shapes", [[(2**19,), (2**18,)], [(8,)] * 100])
def test_a_donated_step_reads_the_gradients_once_to_check_and_once_to_step(shapes, max_norm):
    """The norm is the check's own read; a kernel that divides leaves the gradients divided."""
    (_, _, grads, _), step = step_over(shapes, donate=True, max_norm=max_norm)
    total = sum(g.numel() for g in grads.values())
    with Reads(grads.values()) as reads:
        step()
    assert reads.read == 2 * total


def test_a_donated_step_reads_parameters_and_moments_once():
    (_, params, _, state), step = step_over([(2**19,), (2**18,), (8,)], donate=True)
    watched = tensors((params, state.slots["exp_avg"], state.slots["exp_avg_sq"]))
    with Reads(watched) as reads:
        step()
    assert reads.read == sum(t.numel() for t in watched)


def peak(run):
    """Bytes above what stood before, from the events of torch's own allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as traced:
        result = run()
    every = traced.profiler.kineto_results.events()
    events = sorted((e for e in every if e.name() == "[memory]"), key=lambda e: e.start_ns())
    now = list(itertools.accumulate(event.nbytes() for event in events))
    del result
    return max(now, default=0)


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_donated_step_needs_the_memory_of_a_row_of_small_tensors_whatever_the_size(max_norm):
    for shapes in ([(2**22,)], [(2**20,)] * 12, [(64,)] * 2000):
        _, step = step_over(shapes, donate=True, max_norm=max_norm)
        assert peak(step) < 2**20


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("wrap", [ps.with_master_weights, ps.with_stochastic_rounding])
def test_a_wrapped_donated_step_needs_at_most_64_mib_whatever_the_size(wrap, dtype):
    optimizer = wrap(ps.from_torch(torch.optim.NAdam, lr=0.1))
    optimizer = ps.with_state_dtype(optimizer, {"exp_avg*": torch.bfloat16})
    params = {str(i): torch.ones(2**21, dtype=dtype) for i in range(3)}
    params["large"] = torch.ones(3, 2**21, dtype=dtype)
    arguments = ps.StaticScale(1.0).init(), params, clone(params), optimizer.init(params)
    step = functools.partial(ps.unscale_and_step, optimizer, *arguments, donate=True)
    assert peak(step) < 64 * 2**20


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_step_without_donation_needs_its_results_and_a_copy_of_the_gradients(max_norm):
    _, step = step_over([(2**20,)] * 4, donate=False, max_norm=max_norm)
    assert peak(step) < 4 * 4 * 2**22 + 2**20


@pytest.mark.parametrize("name", sorted(FUSED))
@pytest.mark.parametrize("donate", [False, True])
def test_nothing_is_read_by_the_host_on_an_accelerator(name, donate):
    settings = {"max_norm": torch.tensor(1.0), "clip_value": 0.5, "donate": donate}
    _, step = step_over([(300, 1000), (5,)], FUSED[name], **settings)
    assert_sync_free(step)


# ---- the check -----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [0, 2**18 - 1, 2**18, 2**19 + 36])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.complex64])
def test_one_bad_element_is_found_wherever_it_is(where, dtype):
    leaf, scaler = torch.zeros(2**19 + 37, dtype=dtype), ps.NoScale().init()
    assert not ps.unscale_and_check(scaler, [leaf, torch.ones(3)])[1]
    for value in (float("nan"), float("inf"), -float("inf")):
        leaf[where] = value
        assert ps.unscale_and_check(scaler, [torch.ones(3), leaf])[1]


@given(
    st.integers(1, 16),
    st.integers(1, 64),
    st.lists(st.integers(0, 70), min_size=1, max_size=6),
    st.floats(1.0, 4.0),
)
def test_the_norm_in_rows_and_chunks_equals_float64(length, chunk, sizes, power):
    leaves = [torch.randn(size) * 10.0 ** (7 * index) for index, size in enumerate(sizes)]
    row = torch.cat(leaves).double()
    sizes_of_rows = {"_FEW": chunk, "_ROW": length, "_CHUNK": 2 * chunk, "_SMALL": chunk}
    with mock.patch.multiple(local_stats, **sizes_of_rows):
        for p in (2.0, power):
            norm = ps.clip_by_global_norm(leaves, float("inf"), p)[1]
            expected = torch.linalg.vector_norm(row, p).float()
            torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)


# ---- as one node of a compiled graph -------------------------------------------------------------


CHECKS = ("test_schema", "test_faketensor")


@pytest.mark.parametrize("name", ["AdamW, amsgrad", "SGD, momentum", "Adagrad"])
def test_the_node_of_an_update_does_what_its_schema_says(name):
    optimizer = FUSED[name]
    scaler, params, grads, state = problem([(3, 5), (40,)], optimizer)
    kernel = optimizer.kernel
    step_settings = optimizer.config.evaluate_settings(state)
    settings = optimizer.config.settings_of((), step_settings)
    columns = [state.slots[key] for key in kernel.slot_conditions if key in state.slots]
    targets = [*params.values(), *(leaf for column in columns for leaf in column.values())]
    for lr, skip, divisor, factor in (
        (None, torch.tensor(False), scaler.scale, torch.tensor(0.5, dtype=torch.float64)),
        (torch.tensor(0.1), None, None, None),
    ):
        arguments = (
            targets,
            list(grads.values()),
            kernel.name,
            [0.1, *map(float, keyword_arguments(settings, kernel.setting_names).values())],
            [torch.tensor(1.0)],
            [lr, skip, divisor, factor, None],
        )
        for operator in (torch.ops.purescale.fused_update_, torch.ops.purescale.fused_update):
            torch.library.opcheck(operator.default, arguments, test_utils=CHECKS)


def test_a_mapped_step_that_is_not_differentiated_chooses_once_for_each_tensor_of_its_state():
    sgd = ps.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)
    params = {"a": torch.ones(2, 3), "b": torch.ones(2)}
    state = torch.vmap(sgd.init)(params)
    skip = torch.tensor([True, False])
    with Dispatched() as run:
        torch.vmap(functools.partial(ps.maybe_step, sgd))(params, params, state, skip)
    chosen = [op for op in run.ops if "where" in str(op)]
    assert len(chosen) == len(tensors((params, state)))


@pytest.mark.slow
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_jitted_donated_step_needs_the_memory_of_its_gradients(max_norm):
    def loss(params, x):
        for weight in params.values():
            x = torch.relu(x @ weight)
        return x.square().mean()

    params = {str(index): torch.randn(1024, 1024) / 32 for index in range(5)}
    start, step = started(params, loss, ADAMW, max_norm=max_norm)
    jitted = ps.jit(lambda state, x: step(state, [x]), donate=0)
    x, state = torch.randn(8, 1024), [start]

    def run():
        state[0], info = jitted(state[0], x)
        return info

    run()
    assert peak(run) < 1.02 * sum(weight.nbytes for weight in params.values())


def by_grad_scaler(window):
    """A step of torch's own loop."""
    model, scaler = small_net(), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    def step():
        optimizer.zero_grad()
        for x, y in window:
            scaler.scale(F.cross_entropy(model(x), y) / len(window)).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def test_a_warm_eager_step_runs_few_operators_beside_those_of_grad_scalers_loop():
    window, (state, step) = [batch()], job(ADAMW, ps.DynamicScale(), "float32", donate=True)
    states, counts = [state], []

    def ours():
        states[0] = step(states[0], window)[0]

    for call in (ours, by_grad_scaler(window)):
        call(), call()
        with Dispatched() as run:
            call()
        counts.append(len(run.ops))
    assert counts[0] <= 1.5 * counts[1]
