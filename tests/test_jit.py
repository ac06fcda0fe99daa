"""A function of trees as one graph: the results of the function, one graph for each kind of
arguments, and what is refused.
"""

import functools
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    assert_close,
    batch,
    clone,
    default_dtype,
    examples,
    job,
    scaled_by,
    stack,
    started,
    tensors,
    trained,
)
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

import purescale as ps
from purescale._jit import jit as jit_module
from purescale._torch import private
from purescale.testing import Untouched, grad_trees, same_bits

ADAMW = ps.from_torch(torch.optim.AdamW, lr=1e-2)
RULE = ps.DynamicScale(2.0**10, growth_interval=2)
# In float16 a compiler rounds in other places.
WIDE = "params=float32,compute=float32,output=float32"
in_order = functools.partial(ps.jit, backend="aot_eager")  # its operators one by one

BACKENDS = pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)


def windows(count=1):
    """Four windows, of which the second overflows."""
    made = [[batch(10 * w + i) for i in range(count)] for w in range(4)]
    x, y = made[1][-1]
    made[1][-1] = x * torch.inf, y
    return made


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor | None


# ---- the results of the function -----------------------------------------------------------------

STEPS = [
    {"max_norm": 1.0, "clip_value": 0.01, "bn_update": "window", "guard": ps.SpikeGuard(warmup=2)},
    pytest.param(
        {"on_nonfinite": "drop_microbatch", "weight_fn": lambda window: window[0].shape[0]},
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize("settings", STEPS, ids=["drop_window", "drop_microbatch"])
def test_a_step_has_the_results_of_the_eager_one_donated_in_the_memory_of_the_state(settings):
    state, step = job(ADAMW, RULE, **settings)
    guard = settings.get("guard")
    state = state._replace(guard=guard.init() if guard else ())
    expected = trained(state, step, windows(2))
    with Untouched(state):
        results = trained(state, in_order(step), windows(2))
    assert any(info.found_inf for info in expected[1]) or "weight_fn" in settings
    assert_close(results, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    own = clone(state)
    addresses = [tensor.data_ptr() for tensor in tensors(own)]
    own, told = trained(own, in_order(step, donate=0), windows(2))
    assert same_bits((own, told), results)
    assert [tensor.data_ptr() for tensor in tensors(own)] == addresses


@examples(10)
@given(grad_trees())
def test_any_tree_comes_back_as_it_is(tree):
    assume(all(t.layout is torch.strided for t in tensors(tree)))
    assert same_bits(in_order(lambda tree: tree)(tree), tree)


def test_a_view_that_a_function_closes_over_is_seen_through_later_writes():
    base = torch.arange(6.0)
    views = [base[1:4], base.view(2, 3).T, base[2].expand(4), base.view(3, 2)]
    jitted = in_order(lambda x: [x * view for view in views])
    for number in (1.0, 2.0):
        base.fill_(number)
        results = jitted(torch.tensor(3.0))
        assert same_bits(results, [torch.full(view.shape, 3.0 * number) for view in views])


@BACKENDS
def test_a_result_that_is_a_parameter_from_outside_is_off_the_graph_in_memory_of_its_own(backend):
    weight = nn.Parameter(torch.arange(3.0))

    def function(x):
        return weight * torch.ones(3), weight, x + weight

    for result in ps.jit(function, backend=backend)(torch.ones(3)):
        assert not result.requires_grad
        assert result.grad_fn is None
        result.zero_()
    assert weight.tolist() == [0.0, 1.0, 2.0]


def test_under_another_default_device_a_function_has_a_graph_of_its_own():
    jitted = in_order(lambda x: torch.zeros(3))
    for _ in range(2):
        for device in ("meta", "cpu"):
            with torch.device(device):
                assert jitted(torch.ones(3, device="cpu")).device.type == device


@pytest.mark.slow
def test_what_a_compiler_takes_for_its_argument_is_in_memory_of_its_own():
    one, constant = torch.ones(3), torch.arange(3.0)

    def function(x):
        y = x * 2
        return x * one, y, y + torch.zeros(3), constant / torch.ones(3)

    jitted, x = ps.jit(function), torch.arange(3.0)
    for _ in range(2):
        results = jitted(x)
        for result in results:
            result.zero_()
        assert x.tolist() == constant.tolist() == [0.0, 1.0, 2.0]
    assert len({result.data_ptr() for result in results}) == 4


def test_a_tree_keeps_its_containers_none_and_constants():
    def function(tree):
        return {"pair": Pair(tree["b"] + 1, None), "count": 3, "list": [tree["a"], "text", ()]}

    tree = {"b": torch.ones(2), "a": torch.zeros(3), "none": None}
    for _ in range(2):
        result = in_order(function)(tree)
        assert isinstance(result["pair"], Pair)
        assert list(result) == ["pair", "count", "list"]
        assert result["pair"].second is None
        assert result["count"] == 3
        assert result["list"][1:] == ["text", ()]


def test_a_transform_inside_has_the_results_of_the_eager_one():
    state, step = started({"w": torch.ones(33)}, lambda p, x: (p["w"] * x).square().sum(), ADAMW)
    states = stack([state, scaled_by(state, 2.0**127)])
    mapped, window = torch.vmap(step, in_dims=(0, None)), [torch.ones(33)]
    results, expected = in_order(mapped)(states, window), mapped(states, window)
    assert expected[1].found_inf.tolist() == [False, True]
    assert_close(results, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_a_state_is_made_inside():
    params = {"w": torch.ones(3)}

    def start(params):
        return ps.init_train_state(params, {}, ADAMW, RULE)

    assert same_bits(in_order(start)(params), start(params))


@pytest.mark.parametrize(
    "around",
    [
        lambda function: torch.vmap(function, in_dims=(0, None)),
        lambda function: torch.func.jacrev(function),
        in_order,
        lambda function: torch.compile(function, backend="eager", fullgraph=True),
    ],
)
def test_under_a_transform_or_a_compiler_it_is_the_function(around):
    def function(x, y):
        return torch.sin(x) * y

    x, y = torch.randn(3, 2), torch.randn(2)
    torch.testing.assert_close(around(in_order(function))(x, y), around(function)(x, y))


@BACKENDS
def test_dropout_draws_from_torchs_generator_in_each_call(backend):
    function = ps.jit(lambda x: F.dropout(x, 0.5), backend=backend)
    x = torch.ones(300)
    function(x)
    torch.manual_seed(0)
    first, second = function(x), function(x)
    torch.manual_seed(0)
    assert torch.equal(function(x), first)
    assert not torch.equal(first, second)
    assert set(first.tolist()) == {0.0, 2.0}
    torch.manual_seed(0)
    assert backend == "inductor" or torch.equal(first, F.dropout(x, 0.5))


def test_what_another_thread_draws_in_a_first_call_is_not_drawn_again():
    drawn = []

    def function(x):
        with ThreadPoolExecutor(1) as thread:
            drawn.append(thread.submit(torch.rand, 3).result())
        return x * 2

    torch.manual_seed(0)
    in_order(function)(torch.ones(3))
    drawn.append(torch.rand(3))
    torch.manual_seed(0)
    assert same_bits(drawn, [torch.rand(3), torch.rand(3)])


# ---- one graph for each kind of arguments --------------------------------------------------------


def counted():
    """(function, calls): a jitted function and the shapes with which it was traced."""
    calls = []

    def function(tree):
        calls.append([tuple(x.shape) for x in tensors(tree)])
        return tensors(tree)[0] * 2

    return in_order(function), calls


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.ones(3)},
        {"x": torch.ones(2, dtype=torch.float64)},
        {"x": torch.ones(4)[::2]},
        {"y": torch.ones(2)},
        [torch.ones(2)],
        {"x": torch.ones(2), "n": None},
    ],
)
def test_arguments_of_another_kind_get_a_graph_of_their_own(other):
    function, calls = counted()
    first = {"x": torch.zeros(2)}
    for tree in (first, other, first, other):
        assert torch.equal(function(tree), tensors(tree)[0] * 2)
    assert len(calls) == len(function.programs) == 2


def test_none_in_another_place_gets_a_graph_of_its_own():
    function = in_order(lambda tree: tree["x"] if tree["y"] is None else -tree["y"])
    x = torch.ones(2)
    assert torch.equal(function({"x": x, "y": None}), x)
    assert torch.equal(function({"x": None, "y": x}), -x)
    assert torch.equal(function({"x": x, "y": None}), x)
    assert torch.equal(function({"x": x, "y": x}), -x)


@pytest.mark.parametrize("recognised", [True, False])
def test_other_values_need_no_graph(recognised, monkeypatch):
    if not recognised:
        name = private.NAMES["metadata_guard"]
        monkeypatch.setattr(private, "metadata_guard", name.otherwise, raising=False)
    function, calls = counted()
    for value in (0.0, 1.0, torch.nan):
        function({"x": torch.full((5,), value)})
    assert len(calls) == 1


def test_the_settings_of_torch_are_those_of_the_call():
    function = in_order(lambda x: (x @ x, torch.zeros(1)))
    x = torch.eye(2)
    for _ in range(2):
        assert [t.dtype for t in function(x)] == [torch.float32, torch.float32]
        with torch.autocast("cpu", torch.bfloat16):
            assert function(x)[0].dtype == torch.bfloat16
        with default_dtype(torch.float64):
            assert function(x)[1].dtype == torch.float64
        with torch.inference_mode():
            assert torch.equal(function(x)[0], x)


@BACKENDS
def test_autocast_casts_where_the_function_is_under_it_and_nowhere_else(backend):
    def function(x):
        with torch.autocast("cpu", enabled=False):
            wide = x @ x
        return x @ x, wide

    x = torch.randn(5, 5)
    with torch.autocast("cpu", torch.bfloat16):
        results, expected = ps.jit(function, backend=backend)(x), function(x)
    assert [t.dtype for t in results] == [torch.bfloat16, torch.float32]
    assert_close(results, expected)


def test_threads_share_one_graph():
    function, calls = counted()
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(function, [{"x": torch.ones(2)}] * 4))
    assert [result.tolist() for result in results] == [[2.0, 2.0]] * 4
    assert len(calls) == 1


def test_what_a_function_closes_over_is_baked_in_but_the_values_of_tensors():
    settings, shift = {"factor": 2.0}, torch.zeros(2)
    function = in_order(lambda x: x * settings["factor"] + shift)
    x = torch.ones(2)
    assert function(x).tolist() == [2.0, 2.0]
    settings["factor"] = 3.0
    shift.add_(1.0)
    assert function(x).tolist() == [3.0, 3.0]
    assert function.trace(x)(x, shift)[0].tolist() == [4.0, 4.0]


# ---- donation ------------------------------------------------------------------------------------


def test_under_a_map_nothing_is_donated():
    states = stack([job(ADAMW, RULE)[0]] * 2)
    before = clone(states)
    around = torch.vmap(in_order(lambda state: (state, state.params), donate=0))
    assert same_bits(around(states)[0], before)
    assert same_bits(states, before)


SIZES = (1, 5, 33)


@st.composite
def shared_arguments(draw, outside):
    """Return a function that makes three arguments of one size, which may be one tensor, views of
    one memory or a tensor from outside.
    """
    size = draw(st.sampled_from(SIZES))
    kinds = ["fresh", "outside", "first", "overlapping"]
    drawn = [draw(st.sampled_from(kinds)) for _ in range(3)]

    def make():
        base = torch.arange(float(2 * size))
        made = {"first": base[:size], "outside": outside[size]}
        arguments = []
        for index, kind in enumerate(drawn):
            like = {"fresh": base[:size] * (index + 2), "overlapping": base[index : index + size]}
            arguments.append({**made, **like}[kind])
        return arguments

    return size, make


def check_shared(backend, data):
    outside = {size: torch.linspace(-1, 1, size) for size in SIZES}
    size, make = data.draw(shared_arguments(outside))
    donate = data.draw(st.sampled_from([(), (0,), (0, 1), (0, 1, 2)]))

    def function(a, b, c):
        return {"a": a + 2 * b, "b": b * outside[size] + c, "c": c - a}

    jitted = ps.jit(function, donate=donate, backend=backend)
    seen = clone(outside)
    for arguments in (make(), [torch.full((size,), 1.0 + i) for i in range(3)], make()):
        kept = [argument for index, argument in enumerate(arguments) if index not in donate]
        before, expected = clone(kept), function(*clone(arguments))
        assert_close(jitted(*arguments), expected, rtol=1e-6, atol=1e-6)
        assert same_bits((outside, kept), (seen, before))


@examples(15)
@given(data=st.data())
def test_arguments_that_share_memory_have_the_results_of_the_function_now_and_later(data):
    check_shared("aot_eager", data)


@pytest.mark.slow
@examples(3)
@given(data=st.data())
def test_compiled_arguments_that_share_memory_have_the_results_of_the_function(data):
    check_shared("inductor", data)


@pytest.mark.parametrize("kind", [torch.Tensor.detach, nn.Parameter])
def test_a_tensor_from_outside_is_the_one_that_it_is_now(kind):
    weight = kind(torch.ones(3))
    function = in_order(lambda x: x * weight)
    x = torch.arange(3.0)
    function(x)
    for data in (torch.full((3,), 2.0), torch.full((1,), 3.0), torch.ones(3, dtype=torch.float64)):
        weight.data = data
        result = function(x)
        assert same_bits(result, x * data)
        assert not result.requires_grad
    assert len(function.programs) == 3  # of which each knows shape and dtype


@BACKENDS
@pytest.mark.parametrize("donate", [(), (0,)])
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
def test_what_is_pending_on_an_argument_is_done_before(donate, backend):
    z = torch.complex(torch.arange(5.0), torch.ones(5))
    before = z.clone()
    function = ps.jit(lambda lazy: [2 * x for x in lazy], donate=donate, backend=backend)
    for _ in range(2):
        lazy = [z.conj(), z.conj().imag, torch._neg_view(z.conj())]
        expected = [2 * x.resolve_conj().resolve_neg() for x in lazy]
        assert same_bits(function(lazy), expected)
        assert same_bits(z, before)


@pytest.mark.parametrize("donate", [(), 0])
def test_a_parameter_is_taken_where_no_gradient_is_recorded_and_comes_back_off_the_graph(donate):
    function = in_order(lambda tree: {"w": tree["w"] + 1}, donate=donate)
    parameter = nn.Parameter(torch.zeros(2))
    with torch.no_grad():
        result = function({"w": parameter})["w"]
    assert result.tolist() == [1.0, 1.0]
    assert not result.requires_grad
    assert (result.data_ptr() == parameter.data_ptr()) is (donate == 0)


def test_a_donated_position_without_an_argument_is_refused_before_anything_is_written():
    x = torch.zeros(2)
    with pytest.raises(ValueError, match=r"donate is \(0, 1\), and .* called with 1 arguments"):
        in_order(lambda x: x + 1, donate=(0, 1))(x)
    assert not x.any()


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"lr": 0.1}, r"args\[0\]\['lr'\] is float 0.1; jit takes.*Fix: `torch.tensor"),
        ({"name": "text"}, r"args\[0\]\['name'\] is str 'text'; jit takes trees of tensors"),
        (torch.ones(2, requires_grad=True), r"args\[0\] requires a gradient.*torch.func.grad"),
        (torch.eye(2).to_sparse(), r"args\[0\] is Tensor .*torch.sparse_coo; jit takes plain"),
        (torch.ones(2), r"the result\['o'\] is object"),
    ],
)
def test_an_argument_or_a_result_that_is_no_plain_tensor_is_refused_by_its_path(argument, message):
    with pytest.raises(TypeError, match=message):
        in_order(lambda tree: {"o": object()})(argument)


def test_a_function_without_arguments_may_hold_the_step_of_many_tensors():
    def train():
        params = {str(index): torch.full((3,), float(index)) for index in range(20)}
        return ADAMW.step(params, params, ADAMW.init(params))

    assert_close(ps.jit(train, backend="aot_eager")(), train())


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: x if x.sum() else -x, r"reads the value of a tensor .*`\(lambda x: x if"),
        (lambda x: 2 * x.mul_(0.5), r"writes into an argument .*mul_"),
    ],
)
def test_what_reads_or_writes_is_refused_with_the_line_and_nothing_is_changed(function, words):
    x = torch.ones(3)
    with Untouched(x), pytest.raises(ValueError, match=words):
        in_order(function)(x)


@pytest.mark.parametrize("what", ["max_retries", "rng"])
def test_a_step_that_cannot_be_traced_is_refused_in_the_words_of_the_step(what):
    state, step = job(ADAMW, RULE, **({"max_retries": 2} if what == "max_retries" else {}))
    if what == "rng":
        state = state._replace(rng=torch.Generator().manual_seed(0).get_state())
    with pytest.raises(ValueError, match=rf"^(a step with )?{what} .*Fix: "):
        in_order(step)(state, windows()[0])


@pytest.mark.parametrize(
    ("function", "settings", "error", "message"),
    [
        (torch.sin, {"donate": -1}, TypeError, r"donate is -1.*Fix: `donate=\(0,\)`"),
        (torch.sin, {"donate": "state"}, TypeError, "donate is 'state'"),
        (torch.sin, {"backend": "aot_eager", "mode": "default"}, ValueError, "is for inductor"),
        (torch.sin, {"backend": "eager"}, ValueError, "backend must be"),
        (3, {}, TypeError, r"jit takes a function, got 3"),
        (torch.sin, {"donate_argnums": 0}, TypeError, r"of jax.jit. Fix: `donate=\(0,\)`"),
        (torch.sin, {"static_argnums": 0}, TypeError, r"Fix: close over .*functools.partial"),
    ],
)
def test_a_wrong_setting_is_refused(function, settings, error, message):
    with pytest.raises(error, match=message):
        ps.jit(function, **settings)


# ---- what the logger says ------------------------------------------------------------------------


def messages(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "purescale"]


def messages_of_graphs(caplog):
    """All but those of a slow compilation, which a busy machine may add."""
    return [message for message in messages(caplog) if "tracing and compiling" not in message]


def test_a_first_call_that_takes_long_says_so_once_and_later_calls_nothing(monkeypatch, caplog):
    monkeypatch.setattr(jit_module, "SECONDS", 0.05)

    def slow(x):
        time.sleep(0.2)
        return 2 * x

    jitted = in_order(slow)
    for _ in range(2):
        assert torch.equal(jitted(torch.ones(3)), torch.full((3,), 2.0))
    (message,) = messages(caplog)
    assert "slow): tracing and compiling for more than 0.05 seconds" in message


@pytest.mark.slow
def test_the_variable_that_it_names_is_one_of_torch():
    code = "from torch._inductor.cpu_vec_isa import VecAVX2; print(bool(VecAVX2()))"
    # With a compiler that does not exist, only what is not probed is there.
    settings = {"TORCHINDUCTOR_VEC_ISA_OK": "1", "CXX": "no_such_compiler"}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True)
    assert run.stdout == "True\n", run.stderr


def test_the_ninth_graph_names_the_shapes_that_vary_once(caplog):
    jitted = in_order(lambda x: 2 * x)
    for size in range(1, 12):
        jitted(torch.ones(4, size))
        assert len(messages_of_graphs(caplog)) == (size > 8)
    (message,) = messages_of_graphs(caplog)
    assert "has made 9 graphs" in message
    assert "such as (4, 1), (4, 2), (4, 3)" in message


def test_graphs_for_other_structures_are_said_to_differ_in_structure(caplog):
    jitted = in_order(lambda tree: tree)
    for size in range(1, 10):
        jitted({str(index): torch.ones(2) for index in range(size)})
    (message,) = messages_of_graphs(caplog)
    assert "differ in structure" in message


def test_a_write_by_an_operator_into_a_tensor_from_outside_is_refused():
    outside = torch.zeros(2)
    step = ps.jit(lambda x: torch.ops.aten.add_.Tensor(outside, x), backend="aot_eager")
    with pytest.raises(ValueError, match="writes into a tensor that it closes over"):
        step(torch.ones(2))


def test_a_function_with_a_loop_of_operators_is_jitted():
    def double(x):
        return torch.ops.higher_order.while_loop(
            lambda n, x: n < 3, lambda n, x: (n + 1, 2 * x), (torch.tensor(0), x), ()
        )[1]

    assert ps.jit(double, backend="aot_eager")(torch.ones(2)).equal(torch.full((2,), 8.0))
