"""Donated values that are results: the old values, wherever they stand, while new values take the
memory of others.
"""

import contextlib

import pytest
import torch
from helpers import assert_close, clone, examples, started
from hypothesis import given
from hypothesis import strategies as st

import purescale as ps
from purescale._jit import pure_graph

COUNT = 20  # tensors, of which more than 16 are stepped by one operator that cuts the graph
ADAMW = ps.from_torch(torch.optim.AdamW, lr=0.1)
SGD = ps.from_torch(torch.optim.SGD, lr=0.1)
COMPILERS = ["drops copies", pytest.param("inductor", marks=pytest.mark.slow)]
# What a program does with a square matrix that it returns; the others change its values.
WAYS = {
    "itself": lambda w: w,
    "clone": torch.clone,
    "detach": torch.Tensor.detach,
    "turned": torch.t,
    "copy of turned": lambda w: w.T.contiguous(),
    "view": lambda w: w.view(1, -1),
    "rows": lambda w: torch.cat(w.split([1, w.shape[0] - 1])),
    "stacked": lambda w: torch.stack(list(w)),
    "written": lambda w: torch.zeros_like(w).copy_(w),
    "another dtype and back": lambda w: w.double().float(),
    "plus nothing": lambda w: w.view(1, -1) + torch.zeros(1, w.numel()),
    "times one": lambda w: w.T * torch.ones(w.shape),
    "first rows": lambda w: w[:2],
    "doubled": lambda w: w * 2,
}


@contextlib.contextmanager
def jit_by(compiler):
    """A context in which jit compiles with this compiler."""
    with pytest.MonkeyPatch.context() as patch:
        if compiler != "inductor":
            patch.setattr(pure_graph, "_compiled", without_copies)
        yield


def without_copies(module, *_, **__):
    """Return a graph without its copies, but for those that it returns, as inductor's is."""
    aten, output = torch.ops.aten, module.graph.output_node()
    for node in list(module.graph.nodes):
        if node.target in (aten.clone.default, aten.detach.default) and output not in node.users:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    module.recompile()
    return torch.no_grad()(module)


def places(count):
    """Draw what stands in each place of the results: whether it is old, of which tensor, and how it
    is returned.
    """
    way = st.sampled_from([*["itself"] * len(WAYS), *WAYS])
    return st.lists(
        st.tuples(st.booleans(), st.integers(0, count - 1), way), min_size=count, max_size=2 * count
    )


def returned(places, old, new):
    return [WAYS[way]((old if is_old else new)[index]) for is_old, index, way in places]


def matrices(count, size):
    return list(torch.randn(count, size, size))


@pytest.mark.parametrize("compiler", COMPILERS)
@examples(2)
@given(st.lists(places(3), min_size=12, max_size=12))
def test_a_donated_value_that_is_a_result_is_the_old_one(compiler, programs):
    def function(states, x):
        return [
            returned(places, state, [w - x for w in state])
            for places, state in zip(programs, states, strict=True)
        ]

    # Sizes differ, so that one program takes no memory of another.
    states, x = [matrices(3, 3 + size) for size in range(len(programs))], torch.tensor(0.5)
    expected = function(states, x)
    with jit_by(compiler):
        assert_close(ps.jit(function, donate=0)(clone(states), x), expected, rtol=0, atol=0)


def test_a_donated_value_that_is_returned_as_it_was_stays_in_its_memory():
    a, b, c = clone(matrices(3, 5))
    addresses = [w.data_ptr() for w in (b, a, c)]
    swap = ps.jit(
        lambda state: (state[1], state[0].detach(), -state[2]), donate=0, backend="aot_eager"
    )
    assert [w.data_ptr() for w in swap((a, b, c))] == addresses


def stepped(params, opt_state, x):
    grads = {name: (w * x).sin() for name, w in params.items()}
    return ADAMW.step(params, grads, opt_state)


def many(size=5):
    params = {str(index): w for index, w in enumerate(matrices(COUNT, size))}
    grads = {name: torch.randn_like(w) for name, w in params.items()}
    return ADAMW.step(params, grads, ADAMW.init(params))


@examples(2)
@given(places(COUNT), places(COUNT))
def test_beside_an_operator_of_the_library_a_donated_value_is_the_old_one(first, second):
    def function(state, x):
        new = stepped(*state, x)
        params = returned(first, list(state[0].values()), list(new[0].values()))
        averages = [list(each[1].slots["exp_avg"].values()) for each in (state, new)]
        return params, new[1], returned(second, *averages)

    state, x = many(), torch.tensor(0.5)
    expected = function(state, x)
    with jit_by("drops copies"):
        result = ps.jit(function, donate=0)(clone(state), x)
    assert_close(result, expected, rtol=1e-5, atol=1e-6)


@examples(2)
@given(st.permutations(range(COUNT)), st.permutations(range(COUNT)))
def test_scanned_steps_carry_and_return_the_old_values(order, others):
    def step(carry, x):
        params, opt_state, *last = carry
        new, opt_state = stepped(params, opt_state, x)
        turned = dict(zip(new, (params[str(index)] for index in order), strict=True))
        kept = {str(index): w.detach() for index, w in zip(others, last[1].values(), strict=True)}
        return (new, opt_state, turned, last[0]), (params, kept)

    params, opt_state = many()
    last = [dict(zip(params, matrices(COUNT, 5), strict=True)) for _ in range(2)]
    carry = params, opt_state, *last
    xs, before = torch.tensor([0.5, 1.0, 1.5]), clone(carry)
    expected = ps.scan_steps(step, carry, xs)
    with jit_by("drops copies"):
        assert_close(ps.scan_steps(ps.jit(step), carry, xs), expected, rtol=1e-5, atol=1e-6)
    assert_close(carry, before, rtol=0, atol=0)


def test_sparse_gradients_may_pass_through_a_donating_program():
    def loss_fn(params, buffers, batch):
        rows = torch.nn.functional.embedding(batch, params["w"], sparse=True)
        return rows.square().sum(), buffers, ()

    def step(state, batch):
        return ps.train_step(state, [batch], loss_fn=loss_fn, optimizer=SGD, rule=rule)

    rule = ps.StaticScale(4.0)
    state = ps.init_train_state({"w": torch.randn(8, 5)}, {}, SGD, rule)
    expected, _ = step(state, torch.tensor([1, 3]))
    with jit_by("drops copies"):  # inductor has no sparse tensors
        result, _ = ps.jit(step, donate=0)(clone(state), torch.tensor([1, 3]))
    assert_close(result.params, expected.params)


def test_a_scale_that_a_rule_returns_on_a_graph_is_not_written_into_the_old_one():
    factor = torch.tensor(2.0, requires_grad=True)

    class OnGraph(ps.DynamicScale):
        def update(self, scaler, found_inf):
            return scaler._replace(scale=scaler.scale * factor)

    rule = OnGraph(init_scale=4.0)
    state, step = started({"w": torch.ones(2)}, lambda p, x: (p["w"] * x).sum(), SGD, rule)
    new, _ = step(state, [torch.ones(2)], donate=True)
    assert torch.autograd.grad(new.scaler.scale, factor)[0] == 4.0
