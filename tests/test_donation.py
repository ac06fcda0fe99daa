"""PURESCALE_DEBUG_DONATION: what was given up is NaN afterwards, and nothing else is."""

import math
import os
import subprocess
import sys

import hypothesis.strategies as st
import pytest
import torch
from helpers import at, batch, clone, job, same_bits, tensors
from hypothesis import given

import purescale as ps
from purescale._tree.leaves import reach

RULE = ps.DynamicScale(init_scale=2.0**10)
ADAMW = ps.from_torch(torch.optim.AdamW, lr=0.1)
ADAMAX = ps.from_torch(torch.optim.Adamax, lr=0.1)


@pytest.fixture
def debug(monkeypatch):
    monkeypatch.setattr("purescale._tree.tree.DEBUG_DONATION", True)


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


def by_flag(params, opt_state, donate):
    return ps.maybe_step(ADAMAX, params, real(), opt_state, torch.tensor(False), donate=donate)


def by_kernel(params, opt_state, donate):
    return ps.maybe_step(ADAMW, params, real(), opt_state, torch.tensor(False), donate=donate)


def whole(params, opt_state, donate):
    return ps.unscale_and_step(
        ADAMW, at(4.0), params, real(), opt_state, max_norm=1.0, clip_value=0.5, donate=donate
    )


def pair(make, call):
    """(what is donated, a function of `donate`)"""

    def build():
        given = make()
        return given, lambda donate: call(given, donate)

    return build


CALLS = {
    "unscale_and_check": pair(
        grads, lambda g, donate: ps.unscale_and_check(at(4.0), g, donate=donate)
    ),
    "clip_by_global_norm": pair(
        grads, lambda g, donate: ps.clip_by_global_norm(g, 1.0, donate=donate)
    ),
    "clip_by_value": pair(real, lambda g, donate: ps.clip_by_value(g, 1.0, donate=donate)),
    "accumulate_grads": pair(
        window, lambda a, donate: ps.accumulate_grads(a, real(), donate=donate)
    ),
    "accumulated_grads": pair(window, lambda a, donate: ps.accumulated_grads(a, donate=donate)),
    "merge_accum": pair(window, lambda a, donate: ps.merge_accum(a, window(), donate=donate)),
    "maybe_step": stepping(ADAMAX, by_flag),
    "maybe_step, fused": stepping(ADAMW, by_kernel),
    "unscale_and_step": stepping(ADAMW, whole),
    "train_step": lambda: _train(),
}


def _train():
    state, step = job(ADAMW, RULE)
    return state, lambda donate: step(state, [batch()], max_norm=1.0, donate=donate)


@pytest.mark.parametrize("name", CALLS)
def test_what_was_donated_is_nan_and_the_results_have_the_same_bits(name, debug):
    given, call = CALLS[name]()
    expected = clone(call(donate=False))
    integers = clone([t for t in tensors(given) if not (t.is_floating_point() or t.is_complex())])
    assert same_bits(call(donate=True), expected)
    floats = [t for t in tensors(given) if t.is_floating_point() or t.is_complex()]
    assert floats
    assert all(t.isnan().all() for t in floats)
    assert same_bits(
        [t for t in tensors(given) if not (t.is_floating_point() or t.is_complex())], integers
    )


@pytest.mark.parametrize("name", CALLS)
def test_without_donation_nothing_is_written(name, debug):
    given, call = CALLS[name]()
    before = clone(given)
    call(donate=False)
    assert same_bits(given, before)


def test_an_average_that_is_the_given_state_is_seen_at_once(debug):
    state, step = job(ADAMW, RULE)
    average = state.params
    state, _ = step(state, [batch()], donate=True)
    assert all(t.isnan().all() for t in average.values())
    assert all(t.isfinite().all() for t in state.params.values())


def test_what_shares_memory_with_what_the_caller_keeps_is_left(debug):
    # donation would not have written there either
    x = torch.tensor([3.0, 4.0])
    for call in (
        lambda: ps.accumulate_grads(ps.init_accum([x])._replace(grads=[x]), [x], donate=True),
        lambda: ps.maybe_step(ADAMW, [x], [x], ADAMW.init([x]), torch.tensor(False), donate=True),
        lambda: ps.unscale_and_check(at(4.0)._replace(scale=x[0]), [x[1:]], donate=True),
        lambda: ps.unscale_and_check(at(4.0), [x, x.view(2)], donate=True),
        lambda: ps.clip_by_global_norm([x], x[0], donate=True),
        lambda: ps.clip_by_value([x[1:]], x[0], donate=True),
    ):
        call()
        assert x.tolist() == [3.0, 4.0]


PIECES = st.lists(st.tuples(st.integers(0, 11), st.integers(0, 4), st.integers(1, 2)), max_size=5)


@given(PIECES)
def test_pieces_of_one_memory_are_written_to_where_they_stand_apart(pieces):
    """As the parts of a bucket do; what overlaps is left, and so is what lies between them."""
    row = torch.arange(1.0, 21.0)
    before = row.clone()
    grads = [row[first : first + step * size : step] for first, size, step in pieces]
    places = [set(range(g.storage_offset(), g.storage_offset() + reach(g) // 4)) for g in grads]
    with torch.no_grad():
        expected, _ = ps.unscale_and_check(at(2.0), clone(grads))
        found, _ = ps.unscale_and_check(at(2.0), grads, donate=True)
    assert same_bits(found, expected)
    mine = set()
    for index, (gradient, new) in enumerate(zip(grads, found, strict=True)):
        others = set().union(*places[:index], *places[index + 1 :])
        apart = gradient.is_contiguous() and not places[index] & others
        if gradient.numel():
            assert (new.data_ptr() == gradient.data_ptr()) == apart
        mine |= places[index] if apart else set()
    kept = [place for place in range(20) if place not in mine]
    assert same_bits(row[kept], before[kept])


def test_a_piece_of_what_is_kept_is_left():
    row = torch.ones(4)
    first, rest = row.split(2)
    scaler = at(2.0)._replace(scale=rest[0])
    found, _ = ps.unscale_and_check(scaler, [first], donate=True)
    assert same_bits(found, [first])


def test_gradients_in_one_bucket_are_unscaled_by_the_kernel_itself():
    """Where they stand, without a copy of each; DistributedDataParallel has them as views."""
    params = {"w": torch.ones(3, 4), "b": torch.ones(3)}
    weight, bias = torch.arange(15.0).split([12, 3])
    state = ADAMW.init(params)
    plan = ADAMW.plan(params, {"w": weight.view(3, 4), "b": bias}, state, spent=True)
    assert plan.spent
    again = ADAMW.plan(params, {"w": weight.view(3, 4), "b": weight[1:4]}, state, spent=True)
    assert not again.spent


def test_a_microbatch_in_the_memory_of_the_state_is_left(debug):
    shared = torch.ones(3)
    state = ps.init_train_state({"w": torch.ones(3)}, {"x": torch.zeros(3)}, ADAMW, RULE)._replace(
        buffers={"x": shared}
    )
    new, _ = ps.train_step(
        state,
        [shared],
        loss_fn=lambda p, b, x: ((p["w"] * x).sum(), b),
        optimizer=ADAMW,
        rule=RULE,
        donate=True,
    )
    assert shared.tolist() == [1.0] * 3
    assert new.buffers["x"].tolist() == [1.0] * 3


def test_a_leaf_on_the_graph_and_a_sparse_one_are_left(debug):
    leaf = torch.ones(2, requires_grad=True)
    (gradient,) = torch.autograd.grad(
        ps.clip_by_global_norm([leaf * 3.0], 1.0, donate=True)[0][0].sum(), leaf
    )
    assert gradient.isfinite().all()
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[1]]), torch.tensor([2.0]), (3,), check_invariants=True
    )
    ps.unscale_and_check(at(4.0), [sparse], donate=True)
    assert sparse.to_dense().tolist() == [0.0, 2.0, 0.0]


def test_nothing_is_poisoned_under_a_transform_or_while_compiling(debug):
    stacked = torch.tensor([[3.0, 4.0]])
    assert torch.vmap(lambda g: ps.clip_by_value([g], 1.0, donate=True)[0])(stacked).tolist() == [
        [1.0, 1.0]
    ]
    assert stacked.tolist() == [[3.0, 4.0]]
    torch.compile(
        lambda g: ps.clip_by_value([g], 1.0, donate=True)[0], fullgraph=True, backend="eager"
    )(stacked)
    assert not stacked.isnan().any()


def test_it_is_off_unless_the_environment_says_so():
    code = (
        "import torch, purescale as ps; x = torch.ones(2); "
        "ps.clip_by_value([x], 2.0, donate=True); print(x.isnan().any().item())"
    )
    for value, expected in ((None, "False"), ("", "False"), ("0", "False"), ("1", "True")):
        environment = {k: v for k, v in os.environ.items() if k != "PURESCALE_DEBUG_DONATION"}
        environment |= {} if value is None else {"PURESCALE_DEBUG_DONATION": value}
        environment["PYTHONPATH"] = os.path.dirname(os.path.dirname(ps.__file__))
        out = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert out.stdout.strip() == expected


def test_switched_off_donation_writes_in_place():
    x = torch.tensor([3.0, 4.0])
    assert ps.clip_by_value([x], 1.0, donate=True)[0].data_ptr() == x.data_ptr()
    assert math.isfinite(x.sum())
