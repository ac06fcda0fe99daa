"""The jobs of tests/second_device on a GPU: each kind of training has the numbers of the CPU, waits
for nothing, stays where it is when it is donated, and is captured. Skipped where there is none.
"""

import functools

import measured
import pytest
import torch
import torch.distributed as dist
from helpers import clone, tensors
from jobs import JOBS

import purescale as ps

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    # cuDNN wants the weights of an RNN in one block, and copies those of a functional call.
    pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous"),
]

WAITS = ("`max_retries=2`",)
BY_HAND = ("a loop by hand", "`accumulate_grads`", "an ensemble, by vmap")
# The state of a generator is on the host, and a rule in a loop by hand makes a scale anew.
NOT_CAPTURED = (*WAITS, *BY_HAND, "`rng` in the state", "`unscale_and_step`")
HALF = ("float16", "bfloat16", "masters", "rounding", "moments")


@pytest.fixture(autouse=True)
def _float32_is_float32(monkeypatch):
    """A convolution in TF32 has ten bits."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def trained(device, name, wrap=lambda step: step, **settings):
    """Return the last state of a job and what its steps told, on the CPU. No warm step waits."""
    state, step, windows = JOBS[name](device)
    step, told = wrap(step), []
    for window in windows:
        waits = device == "cpu" or name in WAITS
        torch.cuda.set_sync_debug_mode("default" if waits else "error")
        try:
            state, info = step(state, window, **settings)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        told.append(clone(info))
    return numbers(state, told)


def numbers(state, told):
    """Return these on the CPU, without the state of a generator, which is that of a device."""
    return measured.numbers(measured.Trained(state._replace(rng=()), told, []))


def assert_agree(name, actual, expected):
    rtol, atol = 1e-4, 1e-5
    if any(word in name for word in HALF):  # one unit in the last place
        rtol, atol = 2e-2, 4e-3
    if "Muon" in name:  # which orthogonalizes in bfloat16
        rtol, atol = 2e-2, 1e-2
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize("name", JOBS)
def test_a_job_has_the_numbers_of_the_cpu_and_does_not_sync(name):
    assert_agree(name, trained("cuda", name), trained("cpu", name))


@pytest.mark.parametrize("name", [name for name in JOBS if name not in BY_HAND])
def test_a_donated_job_has_the_numbers_of_one_in_fresh_memory(name):
    assert_agree(name, trained("cuda", name, donate=True), trained("cuda", name))


@pytest.mark.parametrize("name", [name for name in JOBS if name not in NOT_CAPTURED])
def test_a_donated_step_is_captured_and_replayed(name):
    state, step, windows = JOBS[name]("cuda")
    expected, told = clone(state), []
    window = clone(windows[0])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what libraries allocate in their first calls is no part of it
        warm = clone(state)
        for _ in range(2):
            warm, _ = step(warm, window, donate=True)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, info = step(state, window, donate=True)
    assert [t.data_ptr() for t in tensors(captured)] == [t.data_ptr() for t in tensors(state)]
    replayed = []
    for batches in windows:
        for old, new in zip(tensors(window), tensors(batches), strict=True):
            old.copy_(new)
        graph.replay()
        replayed.append(clone(info))
        expected, one = step(expected, batches)
        told.append(one)
    assert_agree(name, numbers(captured, replayed), numbers(expected, told))


# `jit` refuses what these do, in words that tests/test_jit.py asks for.
REFUSED = (*WAITS, "`rng` in the state", "transformer block, checkpointed")
RECURRENT = ("RNN", "LSTM", "GRU")
SPARSE = tuple(name for name in JOBS if "sparse" in name)  # on which inductor for GPUs fails


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in JOBS if name not in (*REFUSED, *SPARSE)])
def test_a_jitted_job_has_the_numbers_of_the_eager_one(name, monkeypatch):
    # torch.func cannot differentiate cuDNN's recurrent kernels (docs/limits.md).
    monkeypatch.setattr(torch.backends.cudnn, "enabled", name not in RECURRENT)
    state, step, windows = JOBS[name]("cuda")
    step = ps.jit(step, donate=0)
    step(clone(state), windows[0])  # which compiles
    jitted = trained("cuda", name, lambda _: step)
    assert_agree(name, jitted, trained("cuda", name))


def test_a_step_over_one_rank_of_nccl_is_the_step_alone(tmp_path):
    name = "3 microbatches"
    alone = trained("cuda", name)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        ranks = functools.partial(functools.partial, group=dist.group.WORLD)
        of_ranks = trained("cuda", name, ranks)
    finally:
        dist.destroy_process_group()
    assert_agree(name, of_ranks, alone)
