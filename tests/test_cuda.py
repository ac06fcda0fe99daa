"""On a GPU: no syncs, the results of the CPU, launches that do not grow, a captured step. Skipped
where there is none.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, clone, small_net, tensors
from torch.profiler import ProfilerActivity, profile

import purescale as ps

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

OPTIMIZERS = {
    name: ps.from_torch(getattr(torch.optim, name), lr=1e-2)
    for name in ("AdamW", "SGD", "Adagrad", "RMSprop")
}


@pytest.fixture
def syncs_are_errors():
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def job(policy, optimizer=OPTIMIZERS["AdamW"], **settings):
    apply, params, buffers = ps.make_functional(small_net())
    apply = ps.with_policy(apply, policy)
    rule = ps.DynamicScale(init_scale=2.0**10, growth_interval=3)

    def loss_fn(params, buffers, microbatch):
        x, y = microbatch
        logits, buffers = apply(params, buffers, x)
        return F.cross_entropy(logits, y), buffers

    params, buffers = ({n: t.cuda() for n, t in tree.items()} for tree in (params, buffers))
    state = ps.init_train_state(params, buffers, optimizer, rule)
    data = [
        (torch.randn(8, 1, 6, 6, device="cuda"), torch.randint(0, 3, (8,), device="cuda"))
        for _ in range(2)
    ]
    return (
        state,
        functools.partial(
            ps.train_step, loss_fn=loss_fn, optimizer=optimizer, rule=rule, **settings
        ),
        data,
    )


@pytest.mark.parametrize(
    "policy",
    ["params=float32,compute=float16,output=float32", "compute=autocast(float16),output=float32"],
)
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("donate", [False, True])
def test_a_step_on_a_gpu_does_not_sync(policy, name, donate, syncs_are_errors):
    state, step, data = job(policy, OPTIMIZERS[name], max_norm=1.0, clip_value=0.5, donate=donate)
    for microbatches in (data, data[:1]):
        state, _ = step(state, microbatches)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("donate", [False, True])
def test_a_step_on_a_gpu_agrees_with_the_cpu(name, max_norm, donate):
    optimizer, scaler = OPTIMIZERS[name], ps.DynamicScale(init_scale=2.0**10)
    params = {"w": torch.randn(300, 20), "b": torch.randn(20)}
    grads = {name: 2.0**10 * torch.randn_like(p) for name, p in params.items()}
    here = ps.unscale_and_step(
        optimizer, scaler.init(), params, grads, optimizer.init(params), max_norm
    )
    params, grads = ({n: t.cuda() for n, t in tree.items()} for tree in (params, grads))
    there = ps.unscale_and_step(
        optimizer,
        scaler.init("cuda"),
        params,
        grads,
        optimizer.init(params),
        max_norm,
        donate=donate,
    )
    assert_close(
        [t.cpu() for t in tensors(tuple(there))], tensors(tuple(here)), rtol=1e-5, atol=1e-6
    )


def test_launches_do_not_grow_with_the_number_of_tensors():
    launches = []
    for number in (10, 300):
        params = {str(i): torch.randn(64, device="cuda") for i in range(number)}
        state, scaler = OPTIMIZERS["AdamW"].init(params), ps.DynamicScale().init("cuda")
        step = functools.partial(ps.unscale_and_step, OPTIMIZERS["AdamW"], scaler, donate=True)
        step(clone(params), clone(params), clone(state))
        arguments = clone((params, params, state))
        torch.cuda.synchronize()
        with profile(
            activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], acc_events=True
        ) as traced:
            step(*arguments)
            torch.cuda.synchronize()
        launches.append(sum(event.name.startswith("cudaLaunchKernel") for event in traced.events()))
    assert launches[1] < 2 * launches[0]


POLICY = "compute=autocast(float16),output=float32"


def windows(data):
    """Eight batches of these, the sixth with an overflow."""
    return [(data[0] * (float("inf") if index == 5 else 1.0), data[1]) for index in range(8)]


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_a_donated_step_is_captured_once_and_replayed_overflow_included(name):
    state, step, data = job(POLICY, OPTIMIZERS[name], max_norm=1.0, donate=True)
    expected, x, y = clone(state), data[0][0].clone(), data[0][1]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what libraries allocate in their first calls is no part of it
        warm = clone(state)
        for _ in range(3):
            warm, _ = step(warm, [(x, y)])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, info = step(state, [(x, y)])
    assert [t.data_ptr() for t in tensors(captured)] == [t.data_ptr() for t in tensors(state)]
    for batch in windows(data[0]):
        x.copy_(batch[0])
        graph.replay()
        expected, told = step(expected, [batch])
        assert info.found_inf == told.found_inf
        assert_close((info.loss, info.scale), (told.loss, told.scale), rtol=1e-2, atol=1e-3)
    assert captured.step == 7
    assert_close(captured.scaler, expected.scaler, rtol=0, atol=0)
    assert_close(captured.params, expected.params, rtol=1e-2, atol=1e-3)


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
    assert_close(state.params, expected.params, rtol=1e-2, atol=1e-3)
