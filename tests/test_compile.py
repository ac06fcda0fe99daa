"""What a compiled step costs: how often it is compiled, and what its code allocates."""

import functools
import math
import re

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from helpers import HALF, assert_close, batch, job, scaled_by, stack, started, tensors
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import fresh_cache, run_and_get_code

import purescale as ps
from purescale.testing import same_bits, shares_memory

ADAMW = functools.partial(ps.from_torch, torch.optim.AdamW, lr=1e-3)
RULE = ps.DynamicScale(init_scale=2.0**23, growth_interval=6)


def window(index, count):
    return [batch(10 * index + offset) for offset in range(count)]


@pytest.mark.slow
def test_a_window_of_another_length_costs_one_more_graph_and_then_none():
    state, step = job(ADAMW(), RULE, max_norm=1.0, donate=True)
    backend = CompileCounterWithBackend("eager")
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for count in (3, 2):
        state, _ = compiled(state, window(0, count))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for index, count in enumerate((3, 3, 2, 3, 2)):
            state, _ = compiled(state, window(index, count))
    assert backend.frame_count == 2


@pytest.mark.slow
def test_a_compiled_step_takes_bounds_that_are_tensors():
    names = "max_norm", "clip_value"
    state, step = job(ADAMW(), ps.DynamicScale(init_scale=2.0**8))

    def bounded(state, microbatches, bounds):
        return step(state, microbatches, **dict(zip(names, bounds, strict=True)))

    compiled = torch.compile(bounded, fullgraph=True, backend="aot_eager")
    for value in (0.5, math.nan):
        bounds = [torch.tensor(value) for _ in names]
        (new, info), (expected, told) = (
            f(state, window(0, 1), bounds) for f in (compiled, bounded)
        )
        assert info.found_inf == told.found_inf == math.isnan(value)
        assert new.scaler == expected.scaler
        torch.testing.assert_close(tensors(new.params), tensors(expected.params))


BOUNDED = {"max_norm": 0.5, "norm_type": 3.0, "clip_value": 0.1}
BOUNDED["weight_fn"] = lambda m: float(len(m[0]))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"max_norm": 1.0}, BOUNDED], ids=["2", "3 and weights"])
def test_with_dynamic_shapes_batches_of_any_size_are_one_graph_and_agree(settings):
    torch.manual_seed(0)
    layers = 9 if settings == {"max_norm": 1.0} else 1  # as nodes, and in plain operators
    params = {str(k): torch.randn(16, 16) for k in range(layers)} | {
        f"{k}.bias": torch.randn(16) for k in range(layers)
    }

    def loss(params, m):
        x = m[0]
        for k in range(layers):
            x = torch.tanh(x @ params[str(k)] + params[f"{k}.bias"])
        return (x - m[1]).square().mean()

    state, step = started(params, loss, ADAMW(), RULE, **settings)
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (4, 7, 5):
        window = [(torch.randn(rows + k, 16), torch.randn(rows + k, 16)) for k in range(2)]
        with torch._dynamo.config.patch(error_on_recompile=rows != 4):
            result = compiled(state, window)
        assert_close(result, step(state, window), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_with_static_shapes_a_step_with_dropout_takes_batches_of_any_size():
    def loss(params, m):
        return F.mse_loss(F.dropout(F.linear(m[0], params["w"]), 1.0), m[1])

    state, step = started({"w": torch.randn(5, 3)}, loss, ADAMW(), RULE)
    compiled = torch.compile(step, fullgraph=True, dynamic=False, backend="aot_eager")
    for rows in (4, 7):
        window = [(torch.randn(rows, 3), torch.randn(rows, 5))]
        assert_close(compiled(state, window), step(state, window), rtol=1e-5, atol=1e-6)


WEIGHT = (48, 40)


def linear(**settings):
    """(state, step, data) of one layer, whose weight has a size that nothing else here has."""

    def loss(params, microbatch):
        x, y = microbatch
        return F.mse_loss(F.linear(x, params["w"], params["b"]), y)

    params = {"w": torch.randn(WEIGHT), "b": torch.zeros(WEIGHT[0])}
    started_with = started(params, loss, ADAMW(), ps.DynamicScale(), **settings)
    return *started_with, [(torch.randn(8, WEIGHT[1]), torch.randn(8, WEIGHT[0]))]


def allocated(code):
    """How many buffers of the size of the weight the generated code asks for."""
    shapes = [
        re.findall(r"\d+", shape)
        for shape in re.findall(r"= empty_strided\w*\(\(([\d, ]*)\)", code)
    ]
    assert shapes
    return sum(math.prod(map(int, shape)) == math.prod(WEIGHT) for shape in shapes)


@pytest.mark.slow
def test_a_donated_compiled_step_writes_in_place_and_allocates_nothing_but_the_gradient():
    state, step, data = linear(donate=True, max_norm=1.0)
    before = [tensor.data_ptr() for tensor in tensors((state.params, state.opt_state.slots))]
    with fresh_cache():
        (state, info), codes = run_and_get_code(torch.compile(step, fullgraph=True), state, data)
    assert not info.found_inf
    after = tensors((state.params, state.opt_state.slots))
    assert [tensor.data_ptr() for tensor in after] == before
    assert sum(map(allocated, codes)) <= 1


@pytest.mark.slow
def test_a_vmapped_ensemble_is_one_graph_with_no_loop_over_its_members():
    settings = {"max_norm": 1.0, "clip_value": 0.1}
    settings |= {"on_nonfinite": "drop_microbatch", "bn_update": "window"}
    state, step = job(ADAMW(), RULE, policy=HALF, **settings)
    members = stack([scaled_by(state, scale) for scale in (2.0, 2.0**10, 2.0**24)])
    data = stack([window(index, 2) for index in range(3)])
    ensemble = torch.vmap(step)
    loops = torch._C._functorch._is_vmap_fallback_enabled()
    # an operator without a batching rule is an error now
    torch._C._functorch._set_vmap_fallback_enabled(False)
    try:
        expected, _ = ensemble(members, data)
        _, info = torch.compile(ensemble, fullgraph=True, backend="aot_eager")(members, data)
    finally:
        torch._C._functorch._set_vmap_fallback_enabled(loops)
    assert info.found_inf.tolist() == [False, False, True]
    assert all(tensor.isfinite().all() for tensor in tensors(expected.params))


@pytest.mark.slow
def test_a_compiled_step_makes_no_tensor_on_another_device():
    """One CPU scalar would keep a CUDA graph away, or make each step wait; the meta device stands
    for the GPU.
    """
    settings = {"weight_fn": lambda batch: batch[1].ge(0).sum(), "on_nonfinite": "drop_microbatch"}
    state, step, data = linear(donate=True, max_norm=1.0, **settings)
    state, data = torch.utils._pytree.tree_map(lambda t: t.to("meta"), (state, data))
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    torch.compile(step, fullgraph=True, backend=aot_autograd(fw_compiler=keep))(state, data * 2)
    made = [
        node.meta["val"]
        for graph in graphs
        for node in graph.graph.nodes
        if isinstance(node.meta.get("val"), torch.Tensor)
    ]
    assert {value.device.type for value in made} == {"meta"}


def test_a_compiled_step_refuses_a_state_of_other_parameters():
    state, step, data = linear()
    state.opt_state.slots["exp_avg"]["w"] = torch.zeros(40, 48)
    with pytest.raises((ValueError, torch._dynamo.exc.Unsupported), match="exp_avg of w"):
        torch.compile(step, fullgraph=True, backend="eager")(state, data)


def test_a_compiled_step_of_many_tensors_shares_no_memory_with_a_parameter_without_a_gradient():
    """Its launches are one operator each, which returns what took part."""
    optimizer = ADAMW(counts="each")
    params = {str(index): torch.ones(3) for index in range(20)}
    grads = {**params, "7": None}
    state = optimizer.init(params)
    new = torch.compile(optimizer.step, backend="aot_eager")(params, grads, state)
    assert same_bits(new, optimizer.step(params, grads, state))
    assert not shares_memory((params, grads, state), new)


def test_a_compiled_step_that_donates_counts_in_the_memory_of_the_counts():
    optimizer, scaler = ADAMW(counts="each"), RULE.init()
    params = {str(index): torch.ones(3) for index in range(20)}
    state = optimizer.init(params)
    addresses = {count.data_ptr() for count in state.counts.values()}
    step = functools.partial(ps.unscale_and_step, optimizer, donate=True)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    out = compiled(scaler, params, ps.clone(params), state)
    assert {count.data_ptr() for count in out.opt_state.counts.values()} == addresses
    assert all(count == 1 for count in out.opt_state.counts.values())


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ({"w": torch.ones(2)}, {"v": torch.ones(2)}, r"missing \['w'\]; not in old: \['v'\]"),
        ([{"w": torch.ones(2)}], [{"w": torch.ones(3)}], r"old\[0\]\['w'\] is torch.float32"),
    ],
)
def test_an_error_names_the_paths_while_compiling_too(old, new, words):
    select = torch.compile(ps.select, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=words):
        select(torch.tensor(True), old, new)
