"""`capture` on a GPU: each kind of training, replayed, has the numbers of the step, and waits for
nothing. Skipped where there is none.
"""

import contextlib
import functools
import gc

import pytest
import torch
from helpers import assert_close, clone, tensors
from test_cuda import JITTED, NEAR, OPTIMIZERS, POLICY, job, windows
from test_cuda_jobs import BY_HAND, JOBS, WAITS, assert_agree, numbers
from test_loop_that_never_waits import page

import purescale as ps

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    # cuDNN wants the weights of an RNN in one block, and copies those of a functional call.
    pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous"),
]


@pytest.fixture(autouse=True)
def _float32_is_float32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@contextlib.contextmanager
def no_wait():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def run(step, state, some):
    """The state after these windows, and what the steps told. Warm calls wait for nothing."""
    told = []
    for number, window in enumerate(some):
        with no_wait() if number else contextlib.nullcontext():
            state, info = step(state, window)
        told.append(info)
    return state, told


def training(wrap=lambda step: step, name="AdamW", **settings):
    state, step, data = job(POLICY, OPTIMIZERS[name], max_norm=1.0, donate=True, **settings)
    return state, wrap(step), [[batch] for batch in windows(data[0])]


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize(
    "name", [name for name in JOBS if name not in (*WAITS, "`rng` in the state")]
)
def test_a_captured_job_has_the_numbers_of_the_job_and_does_not_wait(name, donate):
    state, step, some = JOBS[name]("cuda")
    if donate and name not in BY_HAND:
        step = functools.partial(step, donate=True)
    fast = ps.capture(step, donate=donate)
    actual, expected = run(fast, clone(state), some), run(step, clone(state), some)
    assert len(fast.programs) == 1
    assert_agree(name, numbers(*actual), numbers(*expected))


@pytest.mark.parametrize("wrap", [lambda step: step, JITTED], ids=["eager", "jitted"])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_a_captured_step_is_the_step_overflow_included(name, wrap):
    state, eager, some = training(name=name)
    fast = ps.capture(wrap(eager), donate=True)
    (ended, told), (expected, others) = run(fast, clone(state), some), run(eager, state, some)
    assert [info.found_inf.item() for info in told] == [x.found_inf.item() for x in others]
    assert_close([x.loss for x in told], [x.loss for x in others], **NEAR)
    assert_close(ended.scaler, expected.scaler, rtol=0, atol=0)
    assert_close(ended.params, expected.params, **NEAR)
    assert ended.step == 7


def test_a_window_of_one_batch_four_times_is_captured():
    state, step, some = training()
    some = [window * 4 for window in some]
    fast = ps.capture(step, donate=True)
    ended, expected = run(fast, clone(state), some)[0], run(step, state, some)[0]
    assert_close(ended.params, expected.params, **NEAR)


def test_a_state_stays_at_its_address_and_what_was_told_stays_as_it_was():
    state, step, some = training()
    fast = ps.capture(step, donate=True)
    state, first = fast(state, some[0])
    places, kept = [leaf.data_ptr() for leaf in tensors(state)], clone(first)
    state, _ = run(fast, state, some)
    assert [leaf.data_ptr() for leaf in tensors(state)] == places
    assert_close(first, kept, rtol=0, atol=0, equal_nan=True)


def test_two_states_in_turn_and_a_clone_that_is_returned_to():
    state, step, some = training()
    other = clone(state)
    other.params["0.weight"].mul_(2)
    expected = [run(step, clone(one), some)[0] for one in (state, other)]
    fast = ps.capture(step, donate=True)
    a, b = clone(state), clone(other)
    for window in some:
        a, b = fast(a, window)[0], fast(b, window)[0]
    again, _ = run(fast, ps.clone(state), some)
    for ended, right in zip((a, b, again), (*expected, expected[0]), strict=True):
        assert_close(ended.params, right.params, **NEAR)
    assert len(fast.programs) == 3


def test_dropout_draws_other_numbers_in_each_replay_by_the_seed():
    x = torch.ones(3000, device="cuda")
    fast = ps.capture(lambda state, x: (state + 1, torch.nn.functional.dropout(x, 0.5)))
    before = torch.cuda.get_rng_state()
    fast(x, x)  # which draws once
    torch.cuda.set_rng_state(before)
    one, two = fast(x, x)[1], fast(x, x)[1]
    assert not torch.equal(one, two)
    torch.cuda.set_rng_state(before)
    assert torch.equal(fast(x, x)[1], one)


def test_recording_leaves_the_generators_as_they_were():
    x = torch.ones(3000, device="cuda")
    fast = ps.capture(lambda state, x: (state + 1, x * 2))
    before = torch.cuda.get_rng_state(), torch.get_rng_state()
    fast(x, x)
    assert_close((torch.cuda.get_rng_state(), torch.get_rng_state()), before)


@pytest.mark.parametrize("pinned", [False, True])
def test_a_batch_on_the_host_may_be_refilled_after_the_call(pinned):
    fast = ps.capture(lambda state, x: (state + x.sum(), x.sum()), donate=True)
    host = torch.zeros(1 << 20, pin_memory=pinned)
    state, told = torch.zeros((), device="cuda"), []
    for index in range(20):
        host.fill_(index)
        state, total = fast(state, host)
        told.append(total)
        host.fill_(-1)
    assert [int(total) >> 20 for total in told] == list(range(20))
    assert len(fast.programs) == 1


def test_calls_on_two_streams_follow_each_other():
    fast = ps.capture(lambda state, x: (state * 0.5 + x, state.sum()), donate=True)
    x, state = torch.ones(1 << 22, device="cuda"), torch.zeros(1 << 22, device="cuda")
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for index in range(40):
        with torch.cuda.stream(streams[index % 2]):
            state, _ = fast(state, x)
    torch.cuda.synchronize()
    expected = torch.zeros((), device="cuda")
    for _ in range(40):
        expected = expected * 0.5 + 1
    assert (state == expected).all()


READS = {
    "item": lambda x: x * x.sum().item(),
    "cpu": lambda x: x.cpu().sum(),
    "tolist": lambda x: x * x.tolist()[0],
    "mask": lambda x: x[x > 0].sum(),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_is_refused_with_the_line_and_the_next_capture_works(name):
    x = torch.ones(3, device="cuda")
    with pytest.raises(ValueError, match=r"reads the value.*test_cuda_capture\.py"):
        ps.capture(lambda state, x: (state, READS[name](x)))(x, x)
    fast = ps.capture(lambda state, x: (state + x, x), donate=True)
    assert torch.equal(fast(x, x)[0], x + x)


def test_duplicates_of_a_sparse_tensor_are_summed_in_a_graph_and_counted_in_none():
    rows = torch.zeros(1, 3, dtype=torch.int64, device="cuda")

    def sparse(x):
        return torch.sparse_coo_tensor(rows, x, (3,), check_invariants=False)

    x = torch.ones(3, device="cuda")
    fast = ps.capture(lambda state, x: (state + x, sparse(x).to_dense()), donate=True)
    assert [fast(x.clone(), n * x)[1].tolist() for n in (1, 2)] == [[3, 0, 0], [6, 0, 0]]
    with pytest.raises(ValueError, match=r"number of entries depends.*test_cuda_capture\.py"):
        ps.capture(lambda state, x: (state, sparse(x).coalesce().to_dense()))(x, x)


def test_an_exception_in_the_recording_leaves_the_stream_and_the_next_capture_works():
    calls, x = [], torch.ones(3, device="cuda")

    def step(state, x):
        calls.append(0)
        if len(calls) == 3:
            raise KeyError("here")
        return state + x, x

    fast, stream = ps.capture(step, donate=True), torch.cuda.current_stream()
    with pytest.raises(KeyError, match="here"):
        fast(x, x)
    assert torch.cuda.current_stream() == stream
    assert torch.equal(fast(x, x)[0], x + x)


def test_release_frees_the_memory_of_the_graphs():
    x = torch.ones(1 << 24, device="cuda")
    fast = ps.capture(lambda state, x: (state * 2 + x, x.sum()), donate=True)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    state, told = fast(x.clone(), x)
    del state, told
    fast.release()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)


def test_within_a_capture_by_hand_it_is_the_step():
    x = torch.ones(3, device="cuda")
    fast, graph = ps.capture(lambda state, x: state + x), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = fast(x, x)
    graph.replay()
    assert torch.equal(result, x + x)
    assert len(fast.programs) == 0


def test_the_loop_that_never_waits_waits_for_nothing_between_two_logs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names, training = page("cuda")
    advance, calls = names["advance"], []

    def watched(state, batches):
        calls.append(0)
        with no_wait() if calls[1:] else contextlib.nullcontext():  # the first call records
            return advance(state, batches)

    exec(training, names | {"advance": watched})
    assert len(calls) == 4
