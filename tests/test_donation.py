"""Donated memory: what may be written into, and the bits of a call that donates."""

import contextlib
import inspect
from typing import NamedTuple

import hypothesis.strategies as st
import optree
import pytest
import torch
from helpers import Untouched, at, batch, clone, job, same_bits, started, tensors
from hypothesis import given
from torch import Tensor

import purescale as ps
from purescale._torch import tracing
from purescale._torch.donation import can_write
from purescale.testing import donated_poisoned

RULE = ps.DynamicScale(init_scale=2.0**10)
ADAMW = ps.from_torch(torch.optim.AdamW, lr=0.1)
ADAMAX = ps.from_torch(torch.optim.Adamax, lr=0.1)


def grads():
    return {
        "w": torch.tensor([3.0, 4.0]),
        "c": torch.tensor([1 + 2j]),
        "n": None,
        "h": torch.ones(2, dtype=torch.float16),
    }


def real():
    return {"w": torch.tensor([3.0, 4.0]), "n": None}


def window():
    return ps.accumulate_grads(ps.init_accum(real()), real(), weight=2)


def stepping(optimizer, call):
    params = {"w": torch.ones(2), "n": None}
    return lambda: (
        params_and_state := (clone(params), optimizer.init(params)),
        lambda donate: call(*params_and_state, donate),
    )


def applying(optimizer):
    """The call of `maybe_step` that applies a step of this optimizer."""
    flag = torch.tensor(False)
    return lambda p, s, donate: ps.maybe_step(optimizer, p, real(), s, flag, donate=donate)


def whole(params, opt_state, donate):
    return ps.unscale_and_step(
        ADAMW, at(4.0), params, real(), opt_state, max_norm=1.0, clip_value=0.5, donate=donate
    )


def pair(make, call):
    """(what is donated, a function of `donate`)"""

    def build():
        tree = make()
        return tree, lambda donate: call(tree, donate=donate)

    return build


CALLS = {
    "unscale_and_check": pair(grads, lambda g, **how: ps.unscale_and_check(at(4.0), g, **how)),
    "clip_by_global_norm": pair(grads, lambda g, **how: ps.clip_by_global_norm(g, 1.0, **how)),
    "all_reduce_grads": pair(grads, ps.all_reduce_grads),
    "clip_by_value": pair(real, lambda g, **how: ps.clip_by_value(g, 1.0, **how)),
    "accumulate_grads": pair(window, lambda a, **how: ps.accumulate_grads(a, real(), **how)),
    "accumulated_grads": pair(window, ps.accumulated_grads),
    "merge_accum": pair(window, lambda a, **how: ps.merge_accum(a, window(), **how)),
    "maybe_step": stepping(ADAMAX, applying(ADAMAX)),
    "maybe_step, fused": stepping(ADAMW, applying(ADAMW)),
    "unscale_and_step": stepping(ADAMW, whole),
    "train_step": lambda: _train(),
}


def _train():
    state, step = job(ADAMW, RULE)
    return state, lambda donate: step(state, [batch()], max_norm=1.0, donate=donate)


WAYS = {"on the host": contextlib.nullcontext, "as on an accelerator": tracing.as_on_an_accelerator}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CALLS)
def test_a_donated_call_has_the_bits_of_one_that_writes_nothing_and_moves_versions(name, way):
    given, call = CALLS[name]()
    before = clone(given)
    with WAYS[way]():
        expected = clone(call(donate=False))
        assert same_bits(given, before)
        leaves = [leaf for leaf in optree.tree_leaves(given) if leaf.ndim]
        olds, versions = clone(leaves), [leaf._version for leaf in leaves]
        assert same_bits(call(donate=True), expected)
    triples = zip(leaves, olds, versions, strict=True)
    assert all(torch.equal(leaf, old) or leaf._version > number for leaf, old, number in triples)


SAVING = {
    "Adam with amsgrad": ps.from_torch(torch.optim.Adam, lr=0.1, amsgrad=True),
    "AdamW": ADAMW,
    "Adagrad": ps.from_torch(torch.optim.Adagrad, lr=0.1),
    "Adamax": ADAMAX,
    "SGD": ps.from_torch(torch.optim.SGD, lr=0.1),
    "momentum": ps.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9),
    "a partition": ps.partition(
        {"a": ADAMW, "b": ADAMAX}, lambda name, param: "b" if name == "w1" else "a"
    ),
    "narrow slots": ps.with_state_dtype(ADAMW, {"exp_avg": torch.bfloat16}),
}


def donating(optimizer, params):
    """By name, a function of gradients that makes a step over the memory of these parameters."""
    state = optimizer.init(params)

    def jitted(grads):
        step = ps.jit(optimizer.step, donate=(0, 2), backend="aot_eager")
        return step(params, grads, state)

    return {
        "maybe_step": lambda g: ps.maybe_step(optimizer, params, g, state, False, donate=True),
        "unscale_and_step": lambda g: ps.unscale_and_step(
            optimizer, at(8.0), params, g, state, 1.0, donate=True
        ),
        "jit": jitted,
    }


STEPS = [(name, call) for name in SAVING for call in ("maybe_step", "unscale_and_step")]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "call"), [*STEPS, ("AdamW", "jit")])
def test_a_graph_that_saved_donated_weights_raises(name, call, way):
    params = {f"w{index}": torch.ones(size) for index, size in enumerate([1, 5, 33, 300] * 5)}
    losses = [(torch.ones_like(w).requires_grad_() * w).sum() for w in params.values()]
    with WAYS[way]():
        donating(SAVING[name], params)[call](clone(params))
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize(("name", "call"), STEPS[-4:])
def test_a_donated_step_inside_of_a_loss_is_a_write_and_refused(name, call):
    optimizer = SAVING[name]

    def loss_fn(params, buffers, x):
        loss = sum((leaf * x).sum() for leaf in params.values())
        donating(optimizer, params)[call]({name: torch.ones(5) for name in params})
        return loss, buffers

    state = ps.init_train_state({f"w{i}": torch.ones(5) for i in range(2)}, {}, optimizer, RULE)
    with pytest.raises(RuntimeError, match="loss_fn wrote into the parameter w0"):
        ps.train_step(state, [torch.ones(5)], loss_fn=loss_fn, optimizer=optimizer, rule=RULE)


def test_what_shares_memory_with_what_the_caller_keeps_is_left():
    x = torch.tensor([3.0, 4.0])
    for call in (
        lambda: ps.accumulate_grads(ps.init_accum([x])._replace(grads=[x]), [x], donate=True),
        lambda: ps.maybe_step(ADAMW, [x], [x], ADAMW.init([x]), torch.tensor(False), donate=True),
        lambda: ps.unscale_and_check(at(4.0)._replace(scale=x[0]), [x[1:]], donate=True),
        lambda: ps.unscale_and_check(at(4.0), [x, x.view(2)], donate=True),
        lambda: ps.clip_by_global_norm([x], x[0], donate=True),
        lambda: ps.clip_by_global_norm([x, x.view(2)], 1.0, donate=True),
        lambda: ps.clip_by_value([x[1:]], x[0], donate=True),
    ):
        call()
        assert x.tolist() == [3.0, 4.0]


PIECES = st.lists(st.tuples(st.integers(0, 11), st.integers(1, 4), st.integers(1, 2)), max_size=5)


@given(PIECES)
def test_all_gradients_are_written_into_or_none(pieces):
    """Those that share a storage, as the parts of a bucket do, are not; nor is what has a gap."""
    row = torch.arange(1.0, 21.0)
    parts = [row[first : first + step * size : step] for first, size, step in pieces]
    own = [torch.arange(1.0, 1.0 + size) for _, size, _ in pieces]
    for grads in (parts, own, [*own, *parts]):
        may = all(g.is_contiguous() for g in grads) and (grads is own or len(parts) <= 1)
        before, kept = clone(grads), row.clone()
        expected, _ = ps.unscale_and_check(at(2.0), before)
        found, _ = ps.unscale_and_check(at(2.0), grads, donate=True)
        assert same_bits(found, expected)
        for gradient, new in zip(grads, found, strict=True):
            assert (new.data_ptr() == gradient.data_ptr()) == may
        if not may:
            assert same_bits((grads, row), (before, kept))


def product(params, x):
    return (params["w"] * x).sum()


def test_a_microbatch_in_the_memory_of_the_state_is_left():
    shared = torch.ones(3)
    state, step = started({"w": torch.ones(3)}, product, ADAMW)
    new, _ = step(state._replace(buffers={"x": shared}), [shared], donate=True)
    assert shared.tolist() == new.buffers["x"].tolist() == [1.0] * 3


def test_a_leaf_on_the_graph_and_a_sparse_one_are_left():
    leaf = torch.ones(2, requires_grad=True)
    clipped = ps.clip_by_global_norm([leaf * 3.0], 1.0, donate=True)[0][0]
    assert torch.autograd.grad(clipped.sum(), leaf)[0].isfinite().all()
    indices, values = torch.tensor([[1]]), torch.tensor([2.0])
    sparse = torch.sparse_coo_tensor(indices, values, (3,), check_invariants=True)
    ps.unscale_and_check(at(4.0), [sparse], donate=True)
    assert sparse.to_dense().tolist() == [0.0, 2.0, 0.0]


# ---- whose memory it is --------------------------------------------------------------------------


def test_what_may_be_written_into():
    x, row = torch.ones(4), torch.ones(8)
    weight = torch.ones(2, requires_grad=True)
    assert can_write([x, row, weight, torch.ones(2, 3).t()])
    assert can_write([row[:4]])  # the rest of it is nobody's that is known here
    assert not can_write([row[:4], row[4:]])
    assert not can_write([x], [row, x[:2]])
    assert not can_write([x, row[::2]])  # has gaps
    assert not can_write([x, torch.ones(1).expand(3)])
    assert not can_write([x, weight * 2])  # is on a graph
    assert not can_write([x, torch._neg_view(row)])
    with torch.inference_mode():
        inside = torch.ones(2)
        assert can_write([inside])
    assert not can_write([x, inside])
    refused = []
    torch.vmap(lambda t: refused.append(not can_write([t])) or t)(x)
    assert refused == [True]


class Sum(NamedTuple):
    scale: Tensor
    clean: Tensor  # 0-d float64


class Summing:
    def init(self, device=None):
        return Sum(torch.ones((), device=device), torch.zeros((), dtype=torch.float64))

    def update(self, scaler, found_inf):
        return Sum(scaler.scale.clone(), scaler.clean + torch.where(found_inf, 0, 1))


@pytest.mark.slow
def test_a_compiled_donated_step_keeps_0d_numbers_of_float64():
    """What compiled code writes into such an input on a CPU is lost (torch 2.13)."""

    def loss_fn(params, buffers, x):
        return product(params, x), {"seen": buffers["seen"] + x}

    one, sgd = torch.ones((), dtype=torch.float64), ps.from_torch(torch.optim.SGD, lr=0.5)
    settings = {"loss_fn": loss_fn, "buffers": {"seen": 0 * one}, "donate": True}
    state, step = started({"w": one}, None, sgd, Summing(), **settings)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        state, _ = compiled(state, [2 * one])
    assert state.scaler.clean == 3
    assert state.buffers["seen"] == 6
    assert state.params["w"] == 1 - 3 * 0.5 * 2


class Raises:
    def init(self, params):
        return ()

    def step(self, *args):
        raise RuntimeError("full")


@pytest.mark.parametrize(
    "optimizer", [Raises(), ps.from_formula(Raises().step)], ids=["step", "formula"]
)
def test_gradients_stay_as_they_were_if_an_optimizer_of_ones_own_raises(optimizer):
    params, given = {"w": torch.ones(3)}, {"w": torch.full((3,), 8.0)}
    state = optimizer.init(params)
    with Untouched((params, given, state)), pytest.raises(RuntimeError, match="full"):
        ps.unscale_and_step(optimizer, RULE.init(), params, given, state, donate=True)


SGD = ps.from_torch(torch.optim.SGD, lr=0.5, differentiable=True)
FLAG, FULL = torch.tensor(False), {"w": torch.full((3,), 8.0)}
ON_A_GRAPH = {
    "train_step": lambda s, step, **how: step(s, [torch.ones(3)], **how)[0].params,
    "unscale_and_step": lambda s, step, **how: (
        ps.unscale_and_step(SGD, s.scaler, s.params, clone(FULL), s.opt_state, **how).params
    ),
    "maybe_step": lambda s, step, **how: ps.maybe_step(
        SGD, s.params, clone(FULL), s.opt_state, FLAG, **how
    )[0],
}


@pytest.mark.parametrize("call", ON_A_GRAPH)
def test_a_donated_step_on_a_graph_is_that_without_donation(call):
    results = []
    for donate in (False, True):
        state, step = started({"w": torch.ones(3)}, product, SGD, RULE)
        state.params["w"].requires_grad_()
        results.append(ON_A_GRAPH[call](state, step, donate=donate)["w"])
    assert same_bits(*results)
    assert results[1].requires_grad


# ---- a donated state as NaN ----------------------------------------------------------------------


def is_poison(leaf):
    if leaf.dtype is torch.bool:
        return bool(leaf.all())
    if leaf.is_floating_point() or leaf.is_complex():
        return bool(leaf.isnan().all())
    return bool((leaf == torch.iinfo(leaf.dtype).max).all())


def test_each_function_that_donates_is_drawn_below():
    functions = [getattr(ps, name) for name in ps.__all__ if callable(getattr(ps, name))]
    takes = {f.__name__ for f in functions if "donate" in inspect.signature(f).parameters}
    assert takes - {"jit", "capture"} == {name.partition(",")[0] for name in CALLS}


@pytest.mark.parametrize("name", CALLS)
def test_inside_what_was_donated_is_nan_and_results_are_the_same_bits(name):
    given, call = CALLS[name]()
    expected = clone(call(donate=False))
    with donated_poisoned():
        assert same_bits(call(donate=False), expected)
        assert not any(map(is_poison, [leaf for leaf in tensors(given) if leaf.ndim]))
        assert same_bits(call(donate=True), expected)
    if name != "accumulated_grads":  # whose result is what it is given, into which nothing writes
        assert all(map(is_poison, tensors(given)))
    given, call = CALLS[name]()
    assert same_bits(call(donate=True), expected)
    assert not any(map(is_poison, [leaf for leaf in tensors(given) if leaf.ndim]))


def a_step_of_one_rate(state, x):
    return {"w": state["w"] - state["lr"] * x, "lr": state["lr"], "n": state["n"] + 1}, x * 2


def test_what_a_jitted_call_was_given_up_is_nan_inside():
    def start():
        return {"w": torch.arange(5.0), "lr": torch.tensor(0.5), "n": torch.tensor(3)}

    x, step = torch.ones(5), ps.jit(a_step_of_one_rate, donate=0, backend="aot_eager")
    expected = clone(step(start(), x))
    state = start()
    with donated_poisoned(), Untouched(x):
        results = step(state, x)
        again = step(state, x)[0]
    assert same_bits(results, expected)
    assert all(map(is_poison, tensors(state)))
    assert again["w"].isnan().all()
    assert same_bits(step(start(), x), expected)


def test_a_tensor_in_two_donated_states_shows_inside():
    """Without it, each of them counts the steps of both."""
    scaler = RULE.init()
    (one, step), (other, _) = job(ADAMW, RULE), job(ADAMW, RULE)
    one, other = one._replace(scaler=scaler), other._replace(scaler=scaler)
    with donated_poisoned():
        step(one, [batch()], donate=True)
        _, info = step(other, [batch()], donate=True)
    assert info.scale.isnan()


def test_what_shares_memory_with_what_is_kept_is_not_nan_inside():
    row = torch.arange(1.0, 9.0)
    with donated_poisoned():
        ps.clip_by_value([row[:4], row[4:]], 1.0, donate=True)
        ps.clip_by_value([row], row[0], donate=True)
        ps.jit(lambda a, b: a + b, donate=0, backend="aot_eager")(row, row.view(8))
        ps.jit(lambda a: a + row, donate=0, backend="aot_eager")(row)
    assert row.tolist() == list(range(1, 9))


def test_what_is_traced_runs_inside_as_it_is():
    rows = torch.tensor([[3.0, 0.5], [4.0, 0.25]])

    def clipped(row):
        return ps.clip_by_value([row], 1.0, donate=True)[0]

    expected = rows.clamp(max=1.0)
    with donated_poisoned():
        assert same_bits(torch.vmap(clipped)(rows), expected)
        assert same_bits(ps.jit(clipped, backend="aot_eager")(rows), expected)
        assert rows.max() == 4
