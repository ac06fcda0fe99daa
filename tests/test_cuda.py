"""On a GPU: no syncs, the results of the CPU, launches that do not grow, a captured step. Skipped
where there is none.
"""

import contextlib
import functools

import helpers
import pytest
import torch
from helpers import Checkpointed, assert_close, clone, cross_entropy_of, mean_square_of, tensors
from jobs import to
from torch import nn
from torch.profiler import ProfilerActivity, profile

import purescale as ps

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

DEVICE = "cuda"
# A gradient that is rounding alone makes no step.
OPTIMIZERS = {
    name: ps.from_torch(getattr(torch.optim, name), lr=1e-2, eps=1e-2)
    for name in ("AdamW", "Adagrad", "RMSprop")
}
OPTIMIZERS["SGD"] = ps.from_torch(torch.optim.SGD, lr=1e-2)


@pytest.fixture
def syncs_are_errors():
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@contextlib.contextmanager
def syncs_allowed():
    """For what a test does besides the step."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    yield
    torch.cuda.set_sync_debug_mode(before)


def job(policy, optimizer=OPTIMIZERS["AdamW"], **settings):
    rule = ps.DynamicScale(init_scale=2.0**10, growth_interval=3)
    state, step = helpers.job(optimizer, rule, policy, **settings)
    data = [
        (torch.randn(8, 1, 6, 6, device=DEVICE), torch.randint(0, 3, (8,), device=DEVICE))
        for _ in range(2)
    ]
    return to(DEVICE, state), step, data


@pytest.mark.parametrize(
    "policy",
    ["params=float32,compute=float16,output=float32", "compute=autocast(float16),output=float32"],
)
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("donate", [False, True])
def test_a_step_on_a_gpu_does_not_sync(policy, name, donate, syncs_are_errors):
    with syncs_allowed():
        state, step, data = job(
            policy, OPTIMIZERS[name], max_norm=1.0, clip_value=0.5, donate=donate
        )
    for microbatches in (data, data[:1]):
        state, _ = step(state, microbatches)


WRAPS = {
    "none": (lambda optimizer: optimizer, torch.float32),
    "masters": (ps.with_master_weights, torch.bfloat16),
    "rounding": (ps.with_stochastic_rounding, torch.bfloat16),
    "narrow": (lambda o: ps.with_state_dtype(o, {"exp_avg": torch.bfloat16}), torch.float32),
}


@pytest.mark.parametrize("name", WRAPS)
def test_launches_do_not_grow_with_the_number_of_tensors(name):
    launches = []
    wrap, dtype = WRAPS[name]
    optimizer = wrap(OPTIMIZERS["AdamW"])
    for number in (10, 300):
        params = {str(i): torch.randn(64, device="cuda").to(dtype) for i in range(number)}
        state, scaler = optimizer.init(params), ps.DynamicScale().init("cuda")
        step = functools.partial(ps.unscale_and_step, optimizer, scaler, donate=True)
        step(clone(params), clone(params), clone(state))
        arguments = clone((params, params, state))
        torch.cuda.synchronize()
        activities = [ProfilerActivity.CUDA, ProfilerActivity.CPU]
        with profile(activities=activities, acc_events=True) as traced:
            step(*arguments)
            torch.cuda.synchronize()
        launches.append(sum(event.name.startswith("cudaLaunchKernel") for event in traced.events()))
    assert launches[1] < 2 * launches[0]


POLICY = "compute=autocast(float16),output=float32"


def windows(data):
    """Eight batches of these, the sixth with an overflow."""
    return [(data[0] * (float("inf") if index == 5 else 1.0), data[1]) for index in range(8)]


JITTED = functools.partial(ps.jit, donate=0)
NEAR = {"rtol": 1e-2, "atol": 1e-3, "equal_nan": True}  # float16; the overflow has no loss


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_a_donated_jitted_step_is_the_eager_one_and_does_not_sync(name, mode):
    state, eager, data = job(POLICY, OPTIMIZERS[name], max_norm=1.0, donate=True)
    step, expected = JITTED(eager, mode=mode), clone(state)
    for number, batch in enumerate(windows(data[0])):
        expected, told = eager(expected, [batch])
        torch.compiler.cudagraph_mark_step_begin()
        # The first calls compile, and record a graph.
        torch.cuda.set_sync_debug_mode("error" if number > 2 else "default")
        state, info = step(state, [batch])
        torch.cuda.set_sync_debug_mode("default")
        assert info.found_inf == told.found_inf
        assert_close((info.loss, info.scale), (told.loss, told.scale), **NEAR)
    assert_close(state.scaler, expected.scaler, rtol=0, atol=0)
    assert_close(state.params, expected.params, **NEAR)


def test_a_compiled_donated_step_is_a_cuda_graph_overflow_included():
    state, step, data = job(POLICY, max_norm=1.0, donate=True)
    expected, eager = clone(state), []
    for batch in windows(data[0]):
        expected, info = step(clone(expected), [batch])
        eager.append(info.found_inf.item())
    for tensor in tensors(state):
        # they stay where they are, which a graph that writes into them must know
        torch._dynamo.mark_static_address(tensor)
    compiled = torch.compile(step, fullgraph=True, mode="reduce-overhead")
    flags = []
    for batch in windows(data[0]):
        torch.compiler.cudagraph_mark_step_begin()
        state, info = compiled(state, [batch])
        flags.append(info.found_inf.item())
    assert flags == eager
    assert_close(state.params, expected.params, **NEAR)


# ---- numbers that are tensors --------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_a_bound_or_a_weight_that_is_a_tensor_does_not_sync(device, syncs_are_errors):
    """0-d tensors of the CPU too, which torch sends to the GPU."""
    with syncs_allowed():
        grads = {"w": torch.linspace(-3, 3, 33, device=DEVICE)}
        half, most = (torch.tensor(number, device=device) for number in (0.5, torch.inf))
        scaler, accum = ps.DynamicScale().init(DEVICE), ps.init_accum(grads)
        state = ADAMW.init(grads)
    clipped, _ = ps.clip_by_global_norm(grads, half)
    unclipped, _ = ps.clip_by_global_norm(grads, most)
    clamped = ps.clip_by_value(grads, half)
    average = ps.ema(grads, clamped, half)
    accum = ps.accumulate_grads(accum, grads, weight=half)
    steps = [
        ps.unscale_and_step(ADAMW, scaler, grads, grads, state, bound, half, donate=False)
        for bound in (half, most)
    ]
    with syncs_allowed():
        there, bound = to("cpu", grads), half.item()
        assert_close(to("cpu", clipped), ps.clip_by_global_norm(there, bound)[0])
        assert_close(to("cpu", unclipped), there)
        assert_close(to("cpu", clamped), ps.clip_by_value(there, bound))
        assert_close(to("cpu", average), ps.ema(there, ps.clip_by_value(there, bound), bound))
        assert_close(to("cpu", ps.accumulated_grads(accum)[0]), there)
        assert not any(step.found_inf for step in steps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_a_schedule_on_a_gpu_steps_as_on_the_cpu_and_does_not_sync(name, dtype, syncs_are_errors):
    """Whatever the dtype of its rates."""
    rate = lambda step: torch.exp(-step.to(dtype))  # noqa: E731
    optimizer = ps.from_torch(getattr(torch.optim, name), lr=rate)
    with syncs_allowed():
        params = {"w": torch.linspace(-3, 3, 33)}
        ways = [to(device, (params, optimizer.init(params))) for device in ("cpu", DEVICE)]
    ends = []
    for weights, state in ways:
        for _ in range(3):
            weights, state = optimizer.step(weights, weights, state)
        ends.append(weights)
    with syncs_allowed():
        assert_close(to("cpu", ends[1]), ends[0], rtol=1e-5, atol=1e-6)


# ---- wrappers, partitions, guards, checkpoints, the loop by hand: beside the CPU -----------------

ADAMW = OPTIMIZERS["AdamW"]
AROUND = {
    "masters": (ps.with_master_weights(ADAMW), torch.bfloat16),
    "rounding": (ps.with_stochastic_rounding(ADAMW), torch.bfloat16),
    "partition": (
        ps.partition({"sgd": OPTIMIZERS["SGD"], "adamw": ADAMW}, lambda name, p: name),
        torch.float32,
    ),
}
AROUND["masters of a partition"] = (ps.with_master_weights(AROUND["partition"][0]), torch.bfloat16)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("name", AROUND)
def test_what_stands_around_an_optimizer_agrees_with_the_cpu(name, donate, syncs_are_errors):
    optimizer, dtype = AROUND[name]
    scaler = ps.DynamicScale(2.0**10)
    params = {"sgd": torch.randn(300, 20).to(dtype), "adamw": torch.randn(20).to(dtype)}
    grads = {name: 2.0**10 * torch.randn_like(p) for name, p in params.items()}
    given = scaler.init(), params, grads, optimizer.init(params)
    with syncs_allowed():
        there = to(DEVICE, given)
    stepped = ps.unscale_and_step(optimizer, *there, 1.0, donate=donate)
    with syncs_allowed():
        here, stepped = ps.unscale_and_step(optimizer, *given, 1.0), to("cpu", tuple(stepped))
        if "masters" in name:
            masters = [ps.master_weights(*step[:2]) for step in (stepped, here)]
            assert_close(*map(tensors, masters), rtol=1e-5, atol=1e-6)
            # The lower half of a master is another number where the upper half is rounded up.
            stepped, here = (
                (new, state.inner, *rest) for new, state, *rest in (stepped, tuple(here))
            )
        # Roundings to bfloat16 are drawn, or fall to the other side: one unit in the last place.
        assert_close(tensors(stepped), tensors(tuple(here)), rtol=2.0**-7, atol=1e-6)


def test_a_guard_rejects_the_step_that_it_rejects_on_the_cpu(syncs_are_errors):
    guard = ps.SpikeGuard(warmup=3)

    def loss(params, scale):
        return (params["w"] * scale).square().mean()

    rejected = []
    for device in ("cpu", DEVICE):
        with syncs_allowed():
            params = {"w": torch.linspace(1, 2, 33, device=device)}
            settings = {"optimizer": OPTIMIZERS["SGD"], "rule": ps.DynamicScale(2.0**10)}
            state, step = helpers.started(params, loss, **settings, guard=guard)
            scales = [torch.tensor(s, device=device) for s in (1.0, 1.0, 1.1, 1.0, 1e4, 1.0)]
        verdicts = []
        for scale in scales:
            state, info = step(state, [scale])
            verdicts.append(info.rejected)
        with syncs_allowed():
            rejected.append([bool(verdict) for verdict in verdicts])
    assert rejected[0] == rejected[1] == [False, False, False, False, True, False]


@pytest.mark.parametrize("policy", ["compute=float32", "compute=float16,output=float32"])
def test_a_model_that_checkpoints_itself_has_the_gradients_of_one_that_does_not(policy):
    results = []
    for checkpoints in (False, True):
        apply, params, buffers = ps.make_functional(Checkpointed(checkpoints).to(DEVICE))
        loss_fn = mean_square_of(ps.with_policy(apply, f"params=float32,{policy}"))
        torch.manual_seed(1)
        x = torch.randn(33, 6, device=DEVICE)
        results.append(ps.value_and_grad(loss_fn)(params, buffers, x))
    assert_close(*results, rtol=1e-6, atol=1e-7)


def test_a_loop_by_hand_agrees_with_the_cpu_and_does_not_sync(syncs_are_errors):
    apply, params, buffers = ps.make_functional(nn.Linear(6, 3))
    rule = ps.DynamicScale(2.0**10)
    gradients, ends = ps.value_and_grad(cross_entropy_of(apply)), []
    with syncs_allowed():
        batches = [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(3)]
        states = [
            to(device, (params, buffers, ADAMW.init(params), rule.init(), batches))
            for device in ("cpu", DEVICE)
        ]
    for weights, state, opt_state, scaler, data in states:
        for batch in data:
            (_, state), grads = gradients(weights, state, batch, scaler=scaler)
            grads, found_inf = ps.unscale_and_check(scaler, grads)
            grads, _ = ps.clip_by_global_norm(grads, 1.0)
            weights, opt_state = ps.maybe_step(ADAMW, weights, grads, opt_state, found_inf)
            scaler = rule.update(scaler, found_inf)
        ends.append(weights)
    with syncs_allowed():
        assert_close(to("cpu", ends[1]), ends[0], rtol=1e-4, atol=1e-5)
