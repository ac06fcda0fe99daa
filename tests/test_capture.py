"""`capture`: a step that is replayed has the bits of the step, and no two states share memory. On a
CPU, by a graph that loses what a CUDA graph loses; tests/test_cuda_capture.py is for a GPU.
"""

import contextlib
import functools
import gc
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock
from unittest.mock import Mock

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from helpers import (
    HALF,
    Untouched,
    batch,
    clone,
    cross_entropy_of,
    examples,
    function_of,
    same_bits,
    small_net,
    started,
    tensors,
    trained,
)
from helpers import job as job_of
from hypothesis import given
from recorded_graph import RecordedGraph, uses_but_for_graphs
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import purescale as ps
from purescale._jit import capture
from purescale._torch.tracing import as_on_an_accelerator
from purescale.testing import donated_poisoned

sys.path.append(str(Path(__file__).parent / "second_device"))
from jobs import ALIKE, JOBS

INF = float("inf")
ADAMW = ps.from_torch(torch.optim.AdamW, lr=1e-2)
SGD = ps.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)
RULE = ps.DynamicScale(2.0**10, growth_interval=3)


@contextlib.contextmanager
def on_graphs():
    """Within, a CPU decides as an accelerator, and captured steps are recorded there."""
    capture.GRAPHS["cpu"] = RecordedGraph
    try:
        with as_on_an_accelerator(), mock.patch.object(capture, "_uses", uses_but_for_graphs):
            yield
    finally:
        del capture.GRAPHS["cpu"]


WHERE = {"on graphs": on_graphs, "on a CPU": contextlib.nullcontext}


@pytest.fixture
def graphs():
    with on_graphs():
        yield


def training(optimizer=ADAMW, **settings):
    """A state and a donating step over lists of microbatches."""
    return job_of(optimizer, RULE, HALF, max_norm=1.0, donate=True, **settings)


def windows(number, overflows=(4,), size=8):
    """Windows of one batch, some of which overflow."""
    every = [batch(seed, size) for seed in range(number)]
    return [[(x * INF if index in overflows else x, y)] for index, (x, y) in enumerate(every)]


def agree(step, state, batches, graphs=1, **settings):
    """The captured step has the bits of the step over these, what it told included, and is recorded
    so often. Returns what both told, and the captured step.
    """
    fast = ps.capture(step, **{"donate": True, **settings})
    expected = trained(clone(state), step, batches)
    actual = trained(clone(state), fast, batches)
    assert same_bits(actual, expected)
    assert len(fast.programs) == graphs
    return actual[1], fast


def mean(state, x):
    """A step with few leaves: a mean and a count."""
    new = {"mean": state["mean"] + 0.5 * (x - state["mean"]), "count": state["count"] + 1}
    return new, (x - state["mean"]).square().sum()


def start(size=3):
    return {"mean": torch.zeros(size), "count": torch.zeros((), dtype=torch.int64)}


def xs(number, size=3):
    return [torch.full((size,), float(index)) for index in range(number)]


# ---- equal to the step ---------------------------------------------------------------------------

REFUSED = ("`rng` in the state", "`max_retries=2`")
BY_HAND = ("a loop by hand", "`accumulate_grads`", "an ensemble, by vmap")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ALIKE else ())
        for name in JOBS
        if name not in REFUSED
    ],
)
def test_a_captured_job_has_the_bits_of_the_job(name, graphs, monkeypatch):
    made, step, some = JOBS[name]("cpu")
    donate = name not in BY_HAND
    if donate:
        step = functools.partial(step, donate=True)
    fast = ps.capture(step, donate=donate)
    if name == "LSTM":  # that of oneDNN has other bits in a second run over the same memory
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    torch.manual_seed(1)
    expected = trained(clone(made), step, some)
    torch.manual_seed(1)
    actual = trained(clone(made), fast, some)
    assert same_bits(actual, expected)
    assert len(fast.programs) == 1


@examples(4)
@given(
    lr=st.floats(1e-4, 1e-2),
    growth=st.integers(1, 4),
    overflows=st.sets(st.integers(0, 11), max_size=6),
    size=st.sampled_from([5, 33]),
    microbatches=st.sampled_from([1, 3]),
)
def test_any_run_with_overflows_and_growth_has_the_bits_of_the_step(
    lr, growth, overflows, size, microbatches
):
    adamw = ps.from_torch(torch.optim.AdamW, lr=lr)
    rule = ps.DynamicScale(2.0**6, growth_interval=growth)
    with on_graphs():
        made, step = job_of(adamw, rule, donate=True)
        some = [window * microbatches for window in windows(12, overflows, size)]
        told, _ = agree(step, made, some)
    assert {i for i, info in enumerate(told) if info.found_inf} >= overflows


@pytest.mark.slow
def test_a_step_with_a_compiled_loss_is_captured(graphs):
    made, step = training()
    apply, *_ = ps.make_functional(small_net())
    loss_fn = torch.compile(cross_entropy_of(apply), backend="aot_eager")
    agree(functools.partial(step, loss_fn=loss_fn), made, windows(6))


def of_rows(optimizer, **settings):
    """A training of a table whose gradient is sparse, with duplicates, one of which overflows."""

    def loss(params, batch):
        rows, weights = batch
        picked = nn.functional.embedding(rows, params["table"], sparse=True)
        return picked.square().sum(1) @ weights

    params = {"table": torch.arange(12.0).reshape(6, 2) / 12}
    state, step = started(params, loss, optimizer, **settings)
    some = [(torch.randint(6, (5,)), torch.rand(5)) for _ in range(8)]
    some[3] = some[3][0], INF * some[3][1]
    return state, step, [[one] for one in some]


JITTED = functools.partial(ps.jit, donate=0, backend="aot_eager")


@pytest.mark.parametrize(
    ("optimizer", "wrap"), [(SGD, lambda step: step), (ADAMW, JITTED)], ids=["SGD", "AdamW, jitted"]
)
def test_a_captured_step_with_sparse_gradients_has_the_bits_of_the_step(optimizer, wrap, graphs):
    made, step, some = of_rows(optimizer, max_norm=1.0)
    before = RecordedGraph.replays
    told, _ = agree(wrap(step), made, some)
    assert RecordedGraph.replays == before + len(some)
    assert [bool(info.found_inf) for info in told] == [index == 3 for index in range(8)]


def test_dropout_draws_other_numbers_in_each_replay_those_of_the_step(graphs):
    def step(state, x):
        return state + 1, nn.functional.dropout(x, 0.5)

    fast, x = ps.capture(step), torch.ones(300)
    torch.manual_seed(0)
    expected = [step(x, x)[1] for _ in range(4)]
    torch.manual_seed(0)
    actual = [fast(x, x)[1] for _ in range(4)]
    assert same_bits(actual, expected)
    assert not same_bits(*actual[:2])


def test_a_step_may_return_the_state_alone_or_with_anything(graphs):
    alone = ps.capture(lambda state, x: {"mean": state["mean"] + x}, donate=True)
    assert same_bits(alone({"mean": torch.ones(3)}, torch.ones(3)), {"mean": torch.full((3,), 2.0)})
    tuples = ps.capture(lambda state, x: (state[0] + x, state[1]), donate=True)
    assert same_bits(tuples((torch.ones(3), x := torch.zeros(2)), torch.ones(3))[1], x)
    tells = {"none": None, "name": "n"}
    more = ps.capture(lambda state, x: (state + x, {**tells, "x": x}), donate=True)
    told = more(torch.ones(3), torch.ones(3))[1]
    assert {name: told[name] for name in tells} == tells


# ---- nothing of the caller's changes -------------------------------------------------------------


def test_what_is_not_donated_never_changes(graphs):
    fast, state = ps.capture(mean), start()
    with Untouched(state):
        for x in xs(4):
            first = fast(state, x)
            assert same_bits(first, mean(state, x))


@pytest.mark.parametrize("moves", [lambda x: x, torch.clone], ids=["none", "another one"])
def test_a_graph_of_autograd_that_saved_a_donated_weight_refuses_its_backward(moves, graphs):
    """Also if another leaf comes in memory that is not the graph's."""
    x, w = torch.ones(3), torch.ones(3, requires_grad=True)
    fast = ps.capture(lambda state, x: ((state[0] + x, state[1] + x), x), donate=True)
    (saved, other), _ = fast((x, x + 1), x)
    loss, other = (w * saved).sum(), moves(other)
    fast((saved, other), x)
    assert len(fast.programs) == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- no two states in one memory -----------------------------------------------------------------


WHAT = ["step", "step", "step", "keep", "rewind", "drop", "swap", "exchange"]


@examples(25)
@given(
    order=st.lists(st.tuples(st.integers(0, 3), st.sampled_from(WHAT)), max_size=24),
    empty=st.booleans(),
)
def test_states_in_any_order_have_the_numbers_of_the_step(order, empty):
    """Four states through one captured function, rewound, with leaves in the places of others and
    with those of other states.
    """

    def step(state, x):
        new = {"w": state["w"] * 0.5 + x, "m": state["m"] + 10 * x, "n": state["n"] + 1}
        return {**state, **new}, state["w"].sum()

    def new(index):
        state = {"w": torch.full((3,), float(index)), "m": torch.zeros(3), "n": torch.zeros(())}
        return {**state, "none": torch.empty(0)} if empty else state

    with on_graphs():
        fast = ps.capture(step, donate=True, max_graphs=30)
        states, expected, kept = ([new(i) for i in range(4)] for _ in range(3))
        for count, (index, what) in enumerate(order):
            x = torch.full((3,), float(count))
            if what == "step":
                states[index], told = fast(states[index], x)
                expected[index], one = step(expected[index], x)
                assert same_bits(told, one)
            elif what == "keep":
                kept[index] = ps.clone(states[index])
            elif what == "rewind":
                states[index], expected[index] = ps.clone(kept[index]), clone(kept[index])
            elif what == "drop":
                states[index], expected[index] = new(index), new(index)
            else:
                for some in (states, expected):
                    one, other = some[index], some[index if what == "swap" else index - 1]
                    name = "w" if what == "swap" else "m"
                    one["m"], other[name] = other[name], one["m"]
            assert same_bits(states, expected)
        mixed = any(what == "exchange" for _, what in order)
        assert mixed or len(fast.programs) <= 4


def test_a_state_stays_where_it_is_also_if_another_graph_is_free(graphs):
    fast = ps.capture(mean, donate=True)
    state, _ = fast(start(), xs(1)[0])
    fast(start(), xs(1)[0])  # whose memory nobody sees any more
    places = [leaf.data_ptr() for leaf in tensors(state)]
    state, _ = fast(state, xs(1)[0])
    assert len(fast.programs) == 2
    assert [leaf.data_ptr() for leaf in tensors(state)] == places


TURNS = {
    "a ring": lambda s, x: ((s[0] - 0.5 * x, s[0], s[1]), s[2].sum()),
    "a swap": lambda s, x: ((s[1], s[0], s[2] + x), s[0].sum()),
    "one twice": lambda s, x: ((s[0], s[0], s[1] + s[2]), s[1]),
    "a rotation": lambda s, x: ((s[0].flip(0), s[2] + x, s[1]), s[0][1:]),
}


@pytest.mark.parametrize("name", TURNS)
def test_a_state_whose_leaves_change_places_has_the_numbers_of_the_step(name, graphs):
    agree(TURNS[name], tuple(torch.arange(3.0) + 10 * index for index in range(3)), xs(5))


STRIDES = {
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 3),
    "one": lambda x: x[:, :1, :1, :1],
}


@pytest.mark.parametrize("name", STRIDES)
def test_a_state_of_any_strides_is_recorded_once(name, graphs):
    state = STRIDES[name](torch.arange(48.0).reshape(2, 3, 2, 4))
    agree(lambda s, x: (s * 0.5 + x, x), state, [torch.tensor(float(i)) for i in range(3)])


def test_a_transposed_weight_that_is_returned_is_no_weight_in_its_place(graphs):
    agree(lambda state, x: (state.mT.contiguous(), x), torch.arange(9.0).reshape(3, 3), xs(3))
    fast, state = ps.capture(lambda state, x: (state.mT, x)), torch.arange(9.0).reshape(3, 3)
    assert same_bits(fast(state, state)[0], state.mT.contiguous())


def test_a_view_that_a_step_kept_for_a_while_frees_no_memory_that_a_caller_sees(graphs):
    kept = []

    def step(state, x):
        kept.append(state[:1])
        return state + x, x

    fast, x = ps.capture(step, donate=True), torch.ones(3)
    state, _ = fast(torch.zeros(3), x)
    kept.clear()
    fast(torch.full((3,), 50.0), x)
    assert same_bits(state, torch.ones(3))


def test_two_captured_functions_take_turns_with_one_state(graphs):
    made, step = training()
    clipped = functools.partial(step, max_norm=0.1)
    fast, other = (ps.capture(one, donate=True) for one in (step, clipped))
    state, expected = clone(made), clone(made)
    for index, window in enumerate(windows(8)):
        state, one = (fast if index % 2 else other)(state, window)
        expected, two = (step if index % 2 else clipped)(expected, window)
        assert same_bits((state, one), (expected, two))
    assert len(fast.programs) == len(other.programs) == 1


def test_no_two_threads_are_in_one_captured_function(graphs, monkeypatch):
    fast, running, most = ps.capture(mean, donate=True), [], []
    fast(start(), xs(1)[0])
    replay = RecordedGraph.replay

    def slow(graph):
        running.append(0)
        time.sleep(0.02)
        most.append(len(running))
        replay(graph)
        running.pop()

    monkeypatch.setattr(RecordedGraph, "replay", slow)
    with ThreadPoolExecutor(3) as pool:
        ended = list(pool.map(lambda _: trained(start(), fast, xs(3)), range(3)))
    assert most == [1] * 9
    assert same_bits(ended, [trained(start(), mean, xs(3))] * 3)


# ---- how a graph is found ------------------------------------------------------------------------


def test_another_batch_size_has_a_graph_of_its_own_and_the_state_goes_on(graphs):
    made, step = training()
    some = [windows(8, size=5 if index % 3 == 2 else 8)[index] for index in range(8)]
    agree(step, made, some, graphs=2)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x,
        nn.Parameter,
        lambda x: torch.stack([x, x], 1)[:, 0],
        lambda x: torch.cat([x, x])[3:],
        lambda x: x[:1].expand(3),
        lambda x: x.mul(2).requires_grad_().detach(),
    ],
    ids=["plain", "parameter", "strided", "slice", "expanded", "detached"],
)
def test_leaves_that_differ_in_kind_and_not_in_form_share_a_graph(change, graphs):
    fast = ps.capture(mean)
    with torch.no_grad():
        for x in (torch.ones(3), torch.arange(3.0)):
            x = change(x)
            assert same_bits(fast(start(), x), mean(start(), x.detach()))
            fast(start(), torch.ones(3))
    assert len(fast.programs) == 1


@contextlib.contextmanager
def set_backend(name, value):
    """Within, `torch.backends` has another value there."""
    *path, last = name.split(".")
    owner = functools.reduce(getattr, path, torch.backends)
    before = getattr(owner, last)
    setattr(owner, last, value)
    try:
        yield
    finally:
        setattr(owner, last, before)


REDUCED = "cuda.matmul.allow_{}_reduced_precision_reduction"
ATTENTION = [
    *(SDPBackend.MATH, SDPBackend.FLASH_ATTENTION),
    *(SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION),
]
SETTINGS = [
    *(functools.partial(torch.autocast, "cpu", half) for half in (torch.bfloat16, torch.float16)),
    torch.no_grad,
    functools.partial(set_backend, "cudnn.benchmark", not torch.backends.cudnn.benchmark),
    *(
        functools.partial(set_backend, f"{operators}.fp32_precision", "ieee")
        for operators in ("cuda.matmul", "mkldnn.matmul", "cudnn.conv", "cudnn.rnn")
    ),
    *(functools.partial(set_backend, REDUCED.format(half), False) for half in ("fp16", "bf16")),
    *(functools.partial(sdpa_kernel, [x for x in ATTENTION if x != left]) for left in ATTENTION),
]


def test_each_setting_of_torch_has_a_graph_of_its_own_which_is_found_again(graphs):
    fast, x = ps.capture(lambda state, x: (state, x @ x), max_graphs=20), torch.eye(8) / 3
    fast(x, x)
    for number, setting in enumerate(SETTINGS):
        for _ in range(2):
            with setting():
                assert same_bits(fast(x, x)[1], x @ x)
            fast(x, x)
            assert len(fast.programs) == number + 2


def test_a_weight_that_autocast_has_cached_is_cast_in_each_replay(graphs):
    w = nn.Parameter(torch.eye(3))

    def cached(state, x):
        return state + 1, nn.functional.linear(x, w).float()

    x = torch.arange(9.0).reshape(3, 3)
    fast = ps.capture(cached)
    with torch.autocast("cpu", torch.bfloat16):
        fast(torch.zeros(()), x)
        with torch.no_grad():
            w.mul_(2)
        assert same_bits(fast(torch.zeros(()), x)[1], 2 * x)


def test_a_ninth_state_that_is_held_is_refused_and_a_free_graph_is_given_up(graphs):
    fast = ps.capture(mean, donate=True, max_graphs=3)
    held = [fast(start(), xs(1)[0])[0] for _ in range(3)]
    with pytest.raises(RuntimeError, match=r"3 graphs were recorded.*max_graphs=6"):
        fast(start(), xs(1)[0])
    held.pop()
    before = clone(held)
    fast(start(5), xs(1, 5)[0])  # of another form
    assert len(fast.programs) == 3
    assert same_bits(held, before)


def test_of_a_graph_that_is_freed_for_another_one_the_logger_warns_once(graphs, caplog):
    fast = ps.capture(mean, donate=True, max_graphs=2)
    for size in (3, 4, 5, 3, 4, 5):
        fast(start(size), xs(1, size)[0])
    [warning] = [record.getMessage() for record in caplog.records]
    assert warning.startswith("capture(mean) has 2 graphs, and frees one")
    assert "shapes that vary, such as (3,), (4,)" in warning
    assert "max_graphs=4" in warning


def test_a_state_in_a_cycle_does_not_hold_its_graph(graphs):
    fast = ps.capture(mean, donate=True, max_graphs=1)
    for _ in range(3):
        cycle = [fast(start(), xs(1)[0])]
        cycle.append(cycle)
        del cycle
        fast(start(), xs(1)[0])


# ---- a donated state -----------------------------------------------------------------------------


@pytest.mark.parametrize("where", WHERE)
def test_a_donated_state_that_is_used_again_is_refused(where):
    with WHERE[where]():
        fast, x = ps.capture(mean, donate=True), xs(1)[0]
        first = start()
        second, _ = fast(first, x)
        third, _ = fast(second, x)
        before = clone(third)
        for old in (first, second, {**third, "count": second["count"]}):
            with pytest.raises(RuntimeError, match=r"state\['\w+'\] was donated.*clone"):
                fast(old, x)
        with pytest.raises(RuntimeError, match="was donated"):
            ps.capture(mean, donate=True)(second, x)
        assert same_bits(third, before)
        fast(third, x)


@pytest.mark.parametrize("where", WHERE)
def test_a_step_that_poisons_what_it_was_given_has_the_same_bits(where):
    with WHERE[where](), donated_poisoned():
        made, step = training()
        agree(step, made, windows(4), graphs=where == "on graphs")


def test_of_two_threads_with_one_state_the_second_is_refused(graphs, monkeypatch):
    fast, start = ps.capture(lambda state, x: (state + x, x), donate=True), threading.Barrier(2)
    state, form_of = fast(torch.zeros(300), torch.ones(300))[0], capture.form_of

    def meet(*args):  # before the calls take turns
        start.wait(5)
        return form_of(*args)

    def work(_):
        try:
            return fast(state, torch.ones(300))[0].sum().item()
        except RuntimeError as error:
            return str(error)

    monkeypatch.setattr(capture, "form_of", meet)
    with ThreadPoolExecutor(2) as pool:
        told = list(pool.map(work, range(2)))
    assert 600.0 in told
    assert any("was donated" in str(one) for one in told)


def test_a_state_is_given_up_by_a_call_that_fails_after_its_memory_was_written(graphs, monkeypatch):
    fast, x = ps.capture(mean, donate=True), xs(2)[1]
    state, _ = fast(start(), x)
    with monkeypatch.context() as patch:
        patch.setattr(capture.foreach, "detach_and_clone", Mock(side_effect=torch.OutOfMemoryError))
        with pytest.raises(torch.OutOfMemoryError):
            fast(state, x)
    with pytest.raises(RuntimeError, match="was donated"):
        fast(state, x)


def test_a_call_that_is_refused_gives_nothing_up(graphs):
    fast, state = ps.capture(mean, donate=True), start()
    with pytest.raises(RuntimeError):
        fast(state, torch.ones(4))
    fast(state, torch.ones(3))


# ---- exceptions, memory --------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [1, 2, 3], ids=["warm-up", "second warm-up", "recording"])
def test_an_exception_while_a_graph_is_made_changes_and_keeps_nothing(failing, graphs):
    calls, seen = [], []

    def step(state, x):
        calls.append(0)
        seen.append(weakref.ref(state["mean"].untyped_storage()))
        torch.rand(3)
        new = mean(state, x)
        if len(calls) == failing:
            raise ArithmeticError
        return new

    fast, state, before = ps.capture(step, donate=True), start(), torch.get_rng_state()
    held, _ = ps.capture(mean, donate=True)(start(), xs(1)[0])
    with Untouched((state, held)), pytest.raises(ArithmeticError):
        fast(state, xs(1)[0])
    assert same_bits(torch.get_rng_state(), before)
    gc.collect()
    assert len(seen) == failing
    assert not any(one() for one in seen)
    assert len(fast.programs) == 0
    torch.manual_seed(3)
    expected = mean(start(), xs(1)[0])
    assert same_bits(fast(state, xs(1)[0]), expected)


def test_release_frees_all_graphs_but_for_states_that_are_held(graphs):
    fast = ps.capture(mean, donate=True)
    state, told = trained(start(), fast, xs(3))
    gone = weakref.ref(next(iter(fast.programs)))
    expected = clone((state, told))
    fast.release()
    gc.collect()
    assert gone() is None
    assert len(fast.programs) == 0
    assert same_bits((state, told), expected)
    assert same_bits(fast(state, xs(1)[0]), mean(expected[0], xs(1)[0]))


def test_a_graph_keeps_the_tensors_that_the_step_closes_over(graphs):
    """A CUDA graph has their addresses alone."""
    outside = {"table": torch.arange(3.0)}
    cached = []

    def step(state, x):
        if not cached:  # made in the first run
            cached.append(torch.full((3,), 2.0))
        return state + outside["table"] * cached[0], x

    fast = ps.capture(step)
    fast(torch.zeros(3), torch.zeros(3))
    read = [tensor.data_ptr() for tensor in next(iter(fast.programs)).read]
    assert {outside["table"].data_ptr(), cached[0].data_ptr()} == set(read)


@pytest.mark.parametrize("wrap", [lambda step: step, JITTED], ids=["eager", "jitted"])
def test_a_graph_keeps_the_memory_of_a_tensor_whose_data_is_replaced(wrap, graphs):
    """As `module.to` does."""
    table = torch.arange(3.0)
    fast = ps.capture(wrap(lambda state, x: (state + table, x)))
    fast(torch.zeros(3), torch.zeros(3))
    place = table.data_ptr()
    table.data = torch.ones(3)
    assert place in [tensor.data_ptr() for tensor in next(iter(fast.programs)).read]


# ---- what is refused -----------------------------------------------------------------------------


def slope(x):
    x = x.clone().requires_grad_()
    reads = function_of(lambda ctx, x: x * 2, lambda ctx, grad: grad * float(grad.sum()))
    return torch.autograd.grad(reads(x).sum(), x)[0]


READS = {
    "item": lambda x: x * float(x.sum().item()),
    "in a backward": slope,
    "bool": lambda x: x if x.sum() else -x,
    "mask": lambda x: x[x > 0].sum(),
    "tolist": lambda x: x * x.tolist()[0],
    "numpy": lambda x: x * float(x.numpy()[0]),
}


@pytest.mark.parametrize("name", READS)
def test_a_step_that_reads_a_value_is_refused_with_the_line(name, graphs):
    fast, state = ps.capture(lambda state, x: (state, READS[name](x)), donate=True), start()
    line = "" if name in ("tolist", "numpy") else r".*test_capture\.py"  # which have no operator
    with Untouched(state), pytest.raises(ValueError, match=f"reads the value{line}"):
        fast(state, torch.ones(3))
    fast, x = ps.capture(mean, donate=True), torch.ones(3)
    fast(state, x)


def sparse_of(x):
    """A sparse tensor of one element, with duplicates."""
    return torch.sparse_coo_tensor(torch.zeros(1, 3).long(), x, (3,), check_invariants=False)


ENTRIES = {
    "coalesce": lambda x: sparse_of(x).coalesce().to_dense(),
    "to_sparse": lambda x: x.to_sparse().to_dense(),
    "to_sparse of rows": lambda x: x.diag().to_sparse(1).to_dense(),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_a_sparse_tensor_whose_entries_depend_on_values_is_refused_with_the_line(name, graphs):
    fast, state = ps.capture(lambda state, x: (state, ENTRIES[name](x)), donate=True), start()
    match = r"number of entries depends on values \(.*test_capture\.py.*Fix: `x\.to_dense\(\)`"
    with Untouched(state), pytest.raises(ValueError, match=match):
        fast(state, torch.ones(3))
    summed = ps.capture(lambda state, x: (state, sparse_of(x).to_dense()))
    for x in xs(3):
        assert same_bits(summed(state, x)[1], sparse_of(x).to_dense())


class Own(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


def simple(optimizer=SGD, **parts):
    return started(W, lambda p, x: (p["w"] * x).square().sum(), optimizer, **parts)


OWN = ps.from_torch(Own, lr=0.1)
W, ONES = {"w": torch.ones(3)}, torch.ones(3)


def by_hand(state, grads):
    return ps.maybe_step(OWN, state[0], grads, state[1], torch.tensor(False)), grads


def unscaled(state, grads):
    return ps.unscale_and_step(OWN, RULE.init(), state[0], grads, state[1])[:2], grads


def of_functions():
    state, step = simple()
    return state, lambda state, x: step(state, [lambda: x] * 2), ONES


def widened(state, x):
    return {**state, "mean": x.double()}, x


NO_STEP = "Own has a step of its own"
OF_FLOAT32 = r"state\['mean'\] is torch.float32"
WEIGHT, NO_GRAPH = torch.ones(3, requires_grad=True), "the results of capture have no graph"
RNG, SPARSE = torch.Generator().manual_seed(0).get_state(), ONES.to_sparse()
ARE_REFUSED = {  # (state, step, batch), words
    "rng": (lambda: (*simple(rng=RNG), [ONES]), "rng in its state cannot be traced or captured"),
    "retries": (lambda: (*simple(max_retries=1), [ONES]), "max_retries reads a flag"),
    "a step of its own": (lambda: (*simple(OWN), [ONES]), NO_STEP),
    "a step of its own by hand": (lambda: ((W, OWN.init(W)), by_hand, W), NO_STEP),
    "a step of its own unscaled": (lambda: ((W, OWN.init(W)), unscaled, W), NO_STEP),
    "functions": (of_functions, "a captured step takes no functions that make microbatches"),
    "a number in the state": (
        lambda: ({**start(), "lr": 0.1}, mean, ONES),
        r"args\[0\]\['lr'\] is float 0.1",
    ),
    "a sparse leaf": (lambda: (start(), mean, SPARSE), "capture takes plain, dense tensors"),
    "a leaf that requires grad": (lambda: (start(), mean, WEIGHT), NO_GRAPH),
    "a new form": (lambda: (start(), widened, ONES), rf"{OF_FLOAT32}.*memory of the old one"),
    "a new structure": (lambda: (start(), lambda state, x: ({"mean": x}, x), ONES), "state"),
}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", ARE_REFUSED)
def test_what_a_graph_cannot_have_is_refused_on_a_cpu_too(name, where):
    make, words = ARE_REFUSED[name]
    state, step, x = make()
    before = clone(state)
    with WHERE[where](), pytest.raises((TypeError, ValueError), match=words):
        ps.capture(step, donate=True)(state, x)
    assert same_bits(state, before)


@pytest.mark.parametrize("where", WHERE)
def test_a_group_is_refused(where, tmp_path):
    state, step = simple()
    grads = {"w": torch.ones(3)}
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
    try:
        with WHERE[where]():
            for function in (
                functools.partial(step, group=dist.group.WORLD),
                lambda state, x: (state, ps.all_reduce_grads(grads)),
                lambda state, x: (
                    state,
                    ps.unscale_and_check(state.scaler, grads, group=dist.group.WORLD),
                ),
            ):
                with pytest.raises(ValueError, match="a captured step has no collectives"):
                    ps.capture(function)(state, [torch.ones(3)])
        step(state, [torch.ones(3)], group=dist.group.WORLD)  # the context has ended
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "arguments",
    [{"step": 3}, {"donate": 0}, {"max_graphs": 0}, {"max_graphs": 1.5}, {"warmup": 0}],
    ids=str,
)
def test_wrong_settings_are_refused(arguments):
    (name,) = arguments
    step = arguments.get("step", mean)
    arguments = {key: value for key, value in arguments.items() if key != "step"}
    with pytest.raises((TypeError, ValueError), match="capture" if name == "step" else name):
        ps.capture(step, **arguments)


def test_a_step_runs_as_often_as_it_is_warmed_up_and_once_to_be_recorded(graphs):
    for warmup in (1, 2, 5):
        calls = []

        def step(state, x, calls=calls):
            calls.append(None)
            return mean(state, x)

        trained(start(), ps.capture(step, donate=True, warmup=warmup), xs(4))
        assert len(calls) == warmup + 1


# ---- where it is the step itself -----------------------------------------------------------------


def test_in_a_transform_a_trace_and_another_capture_it_is_the_step(graphs):
    fast, x = ps.capture(mean, donate=True), torch.ones(2, 3)
    states = ps.stack_states([start(), start()])
    expected = torch.vmap(mean)(states, x)
    assert same_bits(torch.vmap(fast)(states, x), expected)
    assert same_bits(torch.func.vjp(lambda x: fast(start(), x)[1], x[0])[0], mean(start(), x[0])[1])
    jitted = ps.jit(lambda state, x: fast(state, x), backend="aot_eager")
    assert same_bits(jitted(start(), x[0]), mean(start(), x[0]))
    outer = ps.capture(lambda state, x: fast(state, x), donate=True)
    assert same_bits(outer(start(), x[0]), mean(start(), x[0]))
    with torch.inference_mode():
        fast(start(), x[0])
    assert len(fast.programs) == 0
    assert len(outer.programs) == 1


# ---- the graph of a CPU --------------------------------------------------------------------------


def test_the_graph_of_a_cpu_loses_what_nobody_may_read_after_a_replay():
    x, made = torch.ones(3), []
    graph = RecordedGraph(torch.device("cpu"))
    with graph.recording():
        made.append(x * 2)
        result = made[0] + x
    graph.calls = graph.calls[1:]  # as if it had been made before
    graph.replay()
    assert result.isnan().all()
