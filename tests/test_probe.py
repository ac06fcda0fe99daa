"""`probe_scales`: its columns equal single runs, and its window is one that every leaf can live
with.
"""

import functools
import math

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    HALF,
    Untouched,
    batch,
    cross_entropy_of,
    examples,
    same_bits,
    shares_memory,
    small_net,
)
from hypothesis import given
from torch import nn

import purescale as ps

inf, nan = math.inf, math.nan


def problem(model, policy=HALF, seed=0):
    """(loss_fn, params, buffers, microbatch) of a model of images."""
    apply, params, buffers = ps.make_functional(model)
    return cross_entropy_of(ps.with_policy(apply, policy)), params, buffers, batch(seed)


def single_run(loss_fn, params, buffers, microbatch, exponent):
    """The unscaled gradients at one scale, and whether they are bad, as a step by hand has them."""
    scaler = ps.StaticScale(2.0**exponent).init()

    def scaled(params):
        return ps.scale_loss(scaler, loss_fn(params, buffers, microbatch)[0])

    return ps.unscale_and_check(scaler, torch.func.grad(scaled)(params))


def by_single_runs(problem, exponents, tol=1e-2):
    """The whole probe from its definition, one run a scale."""
    runs = [single_run(*problem, exponent) for exponent in exponents]
    fitting = [i for i, (_, bad) in enumerate(runs) if not bad]
    zeros = {n: [(g[n] == 0).double().mean().item() for g, _ in runs] for n in runs[0][0]}
    if not fitting:
        return zeros, None, None, None
    top = fitting[-1]
    error = {}
    for name, best in runs[top][0].items():
        rows = []
        for grads, bad in runs:
            distance = (grads[name] - best).double().norm()
            rows.append(inf if bad else (distance / best.double().norm()).item() if distance else 0)
        error[name] = rows
    low = {}
    for name, rows in error.items():
        safe = [i for i in range(top + 1) if all(e <= tol for e in rows[i : top + 1])]
        alone = safe == [top]
        low[name] = None if alone or zeros[name][top] == 1 else exponents[safe[0]]
    return zeros, error, low, exponents[top]


EXPONENTS = [-20, -8, 0, 8, 16, 24, 32]


@pytest.mark.parametrize(
    ("policy", "chunk_size"),
    [(HALF, None), ("float32", 1), ("compute=autocast(float16),output=float32", 3)],
)
def test_the_columns_equal_single_runs(policy, chunk_size):
    given = problem(small_net(), policy)
    probe = ps.probe_scales(*given, exponents=EXPONENTS, chunk_size=chunk_size)
    zeros, error, low, high = by_single_runs(given, EXPONENTS)
    assert probe.exponents.tolist() == EXPONENTS
    assert probe.overflow.tolist() == [bool(single_run(*given, e)[1]) for e in EXPONENTS]
    assert probe.high == high
    assert probe.low == low
    for name in given[1]:
        assert probe.zeros[name].tolist() == pytest.approx(zeros[name], abs=1e-2)
        # sums in half precision come in another order
        assert probe.error[name].tolist() == pytest.approx(error[name], rel=0.1, abs=2e-3)


def two_leaves(params, buffers, microbatch, weak=2.0**-20):
    """In float16, the gradient of `weak` a small part of that of `strong`."""
    strong = (params["strong"].half() * microbatch).float().sum()
    loss = strong + (params["weak"].half() * microbatch).float().sum() * weak
    return loss, buffers, {"strong": strong}


TWO = {"strong": torch.ones(3), "weak": torch.ones(3)}
MESSAGE = torch.tensor([1.0, 1.25, 1.5]).half()


@given(
    st.sets(st.integers(-40, 40), min_size=1, max_size=9),
    st.none() | st.integers(1, 4),
    st.sampled_from([1e-3, 1e-2, 0.5]),
)
@examples(25)
def test_whatever_the_exponents_it_equals_single_runs(exponents, chunk_size, tol):
    given = (two_leaves, TWO, {}, MESSAGE)
    probe = ps.probe_scales(*given, exponents=exponents, chunk_size=chunk_size, tol=tol)
    ordered = sorted(exponents)
    zeros, error, low, high = by_single_runs(given, ordered, tol)
    for name, rows in zeros.items():
        assert probe.zeros[name].tolist() == pytest.approx(rows)
    if high is None:
        assert probe.low == {"strong": None, "weak": None}
        assert all(math.isinf(e) for rows in probe.error.values() for e in rows.tolist())
        assert (probe.window, probe.starved, probe.silent) == (None, [], [])
    else:
        assert probe.low == low
        for name, rows in error.items():
            assert probe.error[name].tolist() == pytest.approx(rows)
    assert probe.high == high


def test_the_window_is_that_of_the_weakest_leaf_and_the_strongest():
    probe = ps.probe_scales(two_leaves, TWO, {}, MESSAGE, exponents=range(-16, 25))
    assert probe.low == {"strong": -16, "weak": -2}  # 1.25 * 2**-22 is a whole subnormal
    assert probe.high == 15  # 1.5 * 2**15 fits
    assert probe.window == (-2, 15)
    assert str(probe).startswith("Safe for every leaf: 2**-2 to 2**15.\n")


def test_the_leaf_without_a_safe_scale_is_named():
    probe = ps.probe_scales(functools.partial(two_leaves, weak=2.0**-38), TWO, {}, MESSAGE)
    assert probe.low == {"strong": -8, "weak": None}
    assert probe.starved == ["weak"]
    assert probe.window is None
    assert str(probe).startswith("No safe scale for 1 of 2 leaves: weak. ")


def test_a_leaf_of_zeros_is_named_and_narrows_no_window():
    given = {**TWO, "unused": torch.ones(2)}
    probe = ps.probe_scales(two_leaves, given, {}, MESSAGE)
    assert probe.silent == ["unused"]
    assert probe.starved == []
    assert probe.low["unused"] is None
    assert probe.window == (-2, 14)
    assert "Nothing but zeros at every scale" in str(probe)
    assert "unused  all zeros" in str(probe)


def test_it_changes_nothing_and_shares_nothing():
    loss_fn, params, buffers, microbatch = problem(small_net())
    generator = torch.get_rng_state()
    with Untouched((params, buffers, microbatch)):
        probe = ps.probe_scales(loss_fn, params, buffers, microbatch, exponents=EXPONENTS)
        again = ps.probe_scales(loss_fn, params, buffers, microbatch, exponents=EXPONENTS)
    assert same_bits(probe, again)
    assert torch.equal(torch.get_rng_state(), generator)
    assert not shares_memory(probe, (params, buffers, microbatch))
    assert all(p.grad is None and not p.requires_grad for p in params.values())


def test_one_forward_serves_every_scale():
    calls = []

    def loss_fn(params, buffers, microbatch):
        calls.append(1)
        mask = torch.rand(3) < 0.5  # as dropout: the same for every scale
        return (params["w"] * mask * microbatch).sum(), buffers

    probe = ps.probe_scales(loss_fn, {"w": torch.ones(3)}, {}, torch.ones(3))
    assert len(calls) == 1
    assert len(set(probe.zeros["w"].tolist())) == 1
    assert probe.low == {"w": -8}


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64], ids=str)
def test_wide_and_complex_parameters_are_probed(dtype):
    def loss_fn(params, buffers, x):
        return (params["w"] * x).abs().sum(), buffers

    given = {"w": torch.tensor([1.0, 2.0], dtype=dtype)}
    probe = ps.probe_scales(loss_fn, given, {}, torch.ones(2))
    assert probe.window == (-8, 24)
    assert probe.error["w"].max() == 0


def test_a_loss_that_is_nan_has_no_scale_that_fits():
    def loss_fn(params, buffers, x):
        return params["w"].sum() * nan, buffers

    probe = ps.probe_scales(loss_fn, {"w": torch.ones(2)}, {}, None)
    assert probe.high is None
    assert probe.overflow.all()
    assert str(probe).startswith("No scale fits")
    assert probe.plot() is not None


class Reads(torch.autograd.Function):
    """Twice its argument. Its backward reads a value, which vmap refuses."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        assert not grad.isnan().any().item()
        return grad * 2


def embedded(w, sparse):
    return F.embedding(torch.tensor([0, 0, 1]), w, sparse=sparse)


@pytest.mark.parametrize(
    ("value", "same"),
    [
        (Reads.apply, lambda w: w * 2),
        (lambda w: embedded(w, sparse=True), lambda w: embedded(w, sparse=False)),
    ],
    ids=["it reads", "its gradient is sparse"],
)
def test_a_backward_without_a_rule_for_vmap_goes_one_scale_at_a_time(value, same):
    def probe(of, **settings):
        loss_fn = lambda p, b, x: (of(p["w"]).sum(), b)  # noqa: E731
        return ps.probe_scales(loss_fn, {"w": torch.ones(4, 2)}, {}, None, **settings)

    with pytest.raises(RuntimeError, match=r"failed under torch.vmap.*Fix: .*chunk_size=1"):
        probe(value)
    assert same_bits(tuple(probe(value, chunk_size=1)), tuple(probe(same)))


# ---- the table and the picture -------------------------------------------------------------------


def test_the_table_has_a_line_for_each_scale_and_each_leaf():
    text = str(ps.probe_scales(two_leaves, TWO, {}, MESSAGE, exponents=[-8, 0, 8, 16, 24]))
    by_scale, by_leaf = text.split("\n\n")[1:]
    rows = [line.split() for line in by_scale.splitlines()[1:]]
    assert [row[0] for row in rows] == ["2**-8", "2**0", "2**8", "2**16", "2**24"]
    assert rows[0][1:] == ["1", "1.0e+00", "100%", "weak"]
    assert [row[1] for row in rows[1:3]] == ["0", "0"]
    assert rows[3][1:] == rows[4][1:] == ["overflow"]
    leaves = [line.split() for line in by_leaf.splitlines()[1:]]
    assert leaves == [["weak", "2**0"], ["strong", "2**-8"]]


def test_the_picture_has_a_line_for_thirty_leaves_axes_with_names_and_the_window_shaded(plt):
    given = {f"more{index}": torch.ones(1) for index in range(40)} | TWO
    probe = ps.probe_scales(two_leaves, given, {}, MESSAGE)
    zeros, error = probe.plot().axes
    assert "zeros" in zeros.get_ylabel()
    assert "error" in error.get_ylabel()
    assert "power of two" in error.get_xlabel()
    for panel, facts in ((zeros, probe.zeros), (error, probe.error)):
        drawn = {line.get_label(): line.get_ydata() for line in panel.get_lines()}
        assert len(drawn) == 30
        for name, line in drawn.items():
            fits = [v for v in line if not math.isnan(v)]
            assert fits == pytest.approx(facts[name][~probe.overflow].tolist())
        (window,) = [patch for patch in panel.patches if "safe" in patch.get_label()]
        assert window.get_x() == probe.window[0]
        assert window.get_x() + window.get_width() == probe.window[1]


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"exponents": []}, ValueError, r"exponents is empty.*Fix: `range\(-8, 25, 2\)`"),
        ({"exponents": [0, 0.5]}, TypeError, "each of exponents must be a whole number, got 0.5"),
        ({"exponents": [128]}, ValueError, "from -149 to 127, got 128"),
        ({"tol": 0}, ValueError, "tol must be positive"),
        ({"chunk_size": 0}, ValueError, "chunk_size must be from 1"),
        ({"params": {"a": None}}, ValueError, r"params holds no tensor.*Fix: "),
        ({"params": {"n": torch.tensor([1])}}, TypeError, r"params\['n'\] has dtype torch.int64"),
    ],
)
def test_what_makes_no_probe_is_refused(given, error, words):
    usual = {"loss_fn": two_leaves, "params": TWO, "buffers": {}, "microbatch": MESSAGE}
    with pytest.raises(error, match=words):
        ps.probe_scales(**usual | given)


@pytest.mark.parametrize(("recorded", "chunk_size"), [(False, None), (True, 1)])
def test_a_loss_that_does_not_depend_on_params_is_refused(recorded, chunk_size):
    model = nn.Linear(3, 1)

    def loss_fn(params, buffers, x):
        with torch.set_grad_enabled(recorded):
            return model(x).sum(), buffers

    with pytest.raises(ValueError, match=r"does not depend on params.*Fix: "):
        ps.probe_scales(loss_fn, {"w": torch.ones(2)}, {}, torch.ones(3), chunk_size=chunk_size)
