"""The checks of functions: each lets through what keeps its law, and catches what was written to
break it.
"""

import numpy as np
import pytest
import torch
from helpers import started
from torch.fx.experimental.proxy_tensor import make_fx

import purescale as ps
from purescale.testing import (
    Untouched,
    assert_pure,
    assert_single_graph,
    assert_sync_free,
    assert_vmap_equals_loop,
    same_bits,
    shares_memory,
)

nan, inf = float("nan"), float("inf")


# ---- pure ----------------------------------------------------------------------------------------


def test_what_is_pure_passes_and_its_result_comes_back():
    params = {"w": torch.ones(2)}
    assert same_bits(assert_pure(lambda p: {"w": p["w"] * 2}, params), {"w": torch.full((2,), 2.0)})


drawn = []


IMPURE = {
    "writes": (lambda p: p["w"].mul_(2) * 1, r"written into: \[0\]\['w'\].*Fix: `x = x \+ 1`"),
    "takes it back": (lambda p: p["w"].add_(0) * 1, "written into"),
    "aliases": (lambda p: p["w"][:1], r"memory with argument\[0\]\['w'\].*Fix: `.clone\(\)`"),
    "hands back": (lambda p: p, "shares memory with argument"),
    "draws": (lambda p: p["w"] + torch.rand(2), r"random generator.*Fix: pass a torch.Generator"),
    "remembers": (
        lambda p: (drawn.append(1), p["w"] + len(drawn))[1],
        r"the same arguments gave .*Fix: keep it in the state",
    ),
}


@pytest.mark.parametrize("name", IMPURE)
def test_what_is_not_pure_is_caught(name):
    fn, words = IMPURE[name]
    with pytest.raises(AssertionError, match=words):
        assert_pure(fn, {"w": torch.ones(2)})


def test_untouched_sees_what_was_written_and_lets_errors_through():
    with pytest.raises(AssertionError, match=r"\['b'\]"), Untouched(tree := {"b": torch.ones(1)}):
        tree["b"][0] = 2
    with pytest.raises(KeyError), Untouched(tree):
        {}[tree["b"].add_(1)]


# ---- nothing read --------------------------------------------------------------------------------


x = torch.tensor([1.0, 0.0, 2.0])


SYNCS = {
    "item": lambda: x.sum().item(),
    "float": lambda: float(x[0]),
    "bool": lambda: bool(x[0]),
    "if": lambda: 1 if x.any() else 2,
    "tolist": lambda: x.tolist(),
    "numpy": lambda: x.numpy(),
    "asarray": lambda: np.asarray(x),
    "repr": lambda: repr(x),
    "nonzero": lambda: x.nonzero(),
    "boolean indexing": lambda: x[x > 0],
    "boolean assignment": lambda: torch.zeros(3).index_put((x > 0,), torch.ones(2)),
    "masked_select": lambda: x.masked_select(x > 0),
    "unique": lambda: x.unique(),
    "coalesce": lambda: torch.sparse_coo_tensor([[0, 0, 1]], x, (3,)).coalesce(),
    "to_sparse": lambda: x.to_sparse(),
    "equal": lambda: torch.equal(x, x),
    "in": lambda: 1.0 in x,
    "repeat_interleave": lambda: x.repeat_interleave(torch.tensor([1, 2, 3])),
}


@pytest.mark.parametrize("name", SYNCS)
def test_what_reads_is_caught_where_it_reads(name):
    words = r"value was read: .* in test_laws.py:\d+, `.*Fix: `torch.where"
    with pytest.raises(AssertionError, match=words):
        assert_sync_free(SYNCS[name])


def test_what_reads_nothing_passes():
    assert_sync_free(lambda: torch.where(x > 0, x, 0).cumsum(0)[torch.tensor([0, 1])])
    assert_sync_free(lambda: x.repeat_interleave(torch.tensor([1, 2, 3]), output_size=6))
    assert_sync_free(ps.grad_report, {"a": x, "b": torch.ones(100)})
    assert_sync_free(lambda: torch.sparse_coo_tensor([[0, 0, 1]], x, (3,)).to_dense())


def test_the_look_at_a_sum_that_a_cpu_allows_is_no_read():
    grads = {"w": torch.ones(3)}
    grads, bad = assert_sync_free(ps.unscale_and_check, ps.DynamicScale().init(), grads)
    assert not bad


# ---- one graph, members --------------------------------------------------------------------------


def test_one_graph_for_many_calls_passes():
    calls = [(torch.tensor(float(i)), torch.tensor(i > 1)) for i in range(4)]
    found = assert_single_graph(lambda a, bad: torch.where(bad, a, -a), *calls)
    assert [t.item() for t in found] == [0, -1, 2, 3]


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda a, n: a + 1 if a.sum() > 0 else a, r"not one graph.*Fix: torch.where"),
        (lambda a, n: a * n, r"traced again.*Fix: keep the number as a 0-d tensor"),
    ],
)
def test_a_branch_and_a_number_that_changes_are_caught(fn, words):
    with pytest.raises(AssertionError, match=words):
        assert_single_graph(fn, *((torch.ones(2), n) for n in (1.5, 2.5, 3.5)))


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda a: a if a.sum() > 0 else -a, r"torch.vmap does not take it.*Fix: torch.where"),
        (lambda a: a / a.new_tensor(torch.is_tensor(a) and a._is_view()), "member 0 is"),
    ],
)
def test_what_vmap_does_not_take_or_gives_otherwise_is_caught(fn, words):
    with pytest.raises(AssertionError, match=words):
        assert_vmap_equals_loop(fn, torch.ones(2, 3))


def test_what_equals_a_loop_passes_and_comes_back():
    a = torch.randn(3, 4, 4)
    assert same_bits(assert_vmap_equals_loop(torch.neg, a), -a)
    assert_vmap_equals_loop(lambda m: {"x": m @ m, "n": m.sum()}, a, rtol=1e-4, atol=1e-5)


# ---- bits and memory -----------------------------------------------------------------------------


QUANTIZED = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (torch.tensor(nan), torch.tensor(nan), True),
        (torch.tensor(0.0), torch.tensor(-0.0), False),
        (torch.tensor(1.0), torch.tensor(1.0, dtype=torch.float64), False),
        (torch.tensor(1.0), 1.0, False),
        (1, 1, True),
        (1, True, False),
        ({"a": 1}, {"b": 1}, False),
        ([torch.ones(1)], (torch.ones(1),), False),
        (torch.ones(2).to_sparse(), torch.ones(2), False),
        (torch.ones(2).to_sparse(), torch.ones(2).to_sparse(), True),
        (torch.ones(2, device="meta"), torch.ones(2, device="meta"), True),
        (torch.ones(2, device="meta"), torch.ones(2), False),
        (torch.ones(2) * 1j, torch.ones(2) * 1j, True),
        (torch.ones(1).to(torch.float8_e5m2), torch.zeros(1).to(torch.float8_e5m2), False),
        (QUANTIZED, QUANTIZED.clone(), True),
    ],
    ids=str,
)
def test_same_bits_tells_what_equality_does_not(a, b, same):
    assert same_bits(a, b) is same


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_same_bits_looks_into_compressed_layouts():
    a = torch.eye(2)
    assert same_bits(a.to_sparse_csr(), a.to_sparse_csr())
    assert not same_bits(a.to_sparse_csr(), 2 * a.to_sparse_csr())
    assert not same_bits(a.to_sparse_csr(), a.to_sparse_csc())


def test_memory_is_shared_by_views_and_by_sparse_values():
    a = torch.ones(4)
    assert shares_memory({"x": a}, [a[2:]])
    assert not shares_memory(a, a.clone())
    sparse = torch.sparse_coo_tensor([[0, 1, 2, 3]], a, (4,))
    assert shares_memory(sparse, a)
    indices = torch.tensor([[0, 2]])
    pair = [torch.sparse_coo_tensor(indices, torch.ones(2), (4,), is_coalesced=True) for _ in "ab"]
    assert shares_memory(*pair)
    assert not shares_memory(torch.ones(2, device="meta"), torch.ones(2, device="meta"))


# ---- what make_fx records ------------------------------------------------------------------------


def test_a_step_that_make_fx_records_with_values_reads_none_and_skips_an_overflow():
    apply, params, buffers = ps.make_functional(torch.nn.BatchNorm1d(3))
    optimizer, rule = ps.from_torch(torch.optim.AdamW, lr=0.1), ps.DynamicScale(8.0)

    def loss_fn(params, buffers, x):
        out, buffers = apply(params, buffers, x)
        return out.exp().square().mean(), buffers

    settings = {"loss_fn": loss_fn, "buffers": buffers, "max_norm": 0.1}
    state, step = started(params, None, optimizer, rule, **settings)
    good = torch.randn(5, 3)
    graph = make_fx(step)(state, [good])
    for x, bad in ((good + 1, False), (torch.full((5, 3), inf), True)):
        (expected, info), (came, _) = step(state, [x]), graph(state, [x])
        assert info.found_inf.item() is bad
        torch.testing.assert_close(came, expected)
    assert same_bits(came.params, state.params)
