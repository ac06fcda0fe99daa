"""`update_report`: how much of the wanted update has arrived."""

import functools
import math

import pytest
import torch
import torch.utils._pytree as pytree
from helpers import Dispatched, Untouched, assert_close, in_processes, same_bits, stack, tensors
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import purescale as ps
from purescale._reports import update_report
from purescale.testing import (
    assert_pure,
    assert_single_graph,
    assert_sync_free,
    assert_vmap_equals_loop,
)

nan = math.nan
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


def by_definition(old, new, wanted):
    """Slowly, in Python floats, one element at a time."""
    rows = [
        (torch.view_as_real(t) if t.is_complex() else t).double().flatten().tolist()
        for t in (old, new, wanted)
    ]
    every = list(zip(*rows, strict=True))
    size = math.fsum(w * w for *_, w in every)
    quality = math.fsum((b - a) * w for a, b, w in every) / size if size else 1
    asked = [(a, b) for a, b, w in every if w]
    return quality, sum(a == b for a, b in asked) / max(len(asked), 1)


def a_step(dtype, count, seed=0):
    """Weights around 1, and an update of which a half parameter loses some."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    old = (1 + 0.1 * torch.randn(count, generator=generator, dtype=wide)).to(dtype)
    size = {torch.bfloat16: 2e-3, torch.float16: 3e-4}.get(dtype, 1e-5)
    wanted = size * torch.randn(count, generator=generator, dtype=wide)
    wanted[::7] = 0
    return old, (old + wanted).to(dtype), wanted.to(torch.complex64 if dtype.is_complex else wide)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("count", "chunk"), [(5, 2**22), (33, 2**22), (300, 2**22), (300, 32)])
def test_both_numbers_are_what_they_are_by_definition(dtype, count, chunk, monkeypatch):
    monkeypatch.setattr(update_report, "_CHUNK", chunk)
    old, new, wanted = a_step(dtype, count)
    with Untouched((old, new, wanted)):
        row = ps.update_report({"w": old}, {"w": new}, {"w": wanted}).rows["w"]
    quality, lost = by_definition(old, new, wanted)
    assert row.quality.item() == pytest.approx(quality, rel=1e-9)
    assert row.lost.item() == pytest.approx(lost, rel=1e-6)
    assert (row.quality.dtype, row.lost.dtype) == (torch.float64, torch.float32)


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_squares_that_overflow_or_vanish_change_nothing(size):
    old = torch.zeros(5, dtype=torch.float64)
    wanted = size * torch.tensor([1.0, 2, 3, 0, 4], dtype=torch.float64)
    row = ps.update_report([old], [wanted / 2], [wanted]).rows["0"]
    assert (row.quality.item(), row.lost.item()) == (pytest.approx(0.5), 0)


def test_where_nothing_was_wanted_nothing_is_lost():
    old = {"still": torch.ones(3), "moved": torch.ones(3), "empty": torch.zeros(0), "none": None}
    new = old | {"moved": torch.full((3,), 2.0)}
    wanted = {"still": torch.zeros(3), "moved": torch.zeros(3), "empty": torch.zeros(0)}
    rows = ps.update_report(old, new, wanted | {"none": None}).rows
    assert {
        name: (row.quality.item(), row.lost.item()) for name, row in rows.items()
    } == dict.fromkeys(wanted, (1, 0))
    partly = ps.update_report(old, new, dict.fromkeys(old) | {"moved": torch.ones(3)})
    assert list(partly.rows) == ["moved"]


def test_under_vmap_it_equals_a_loop():
    members = [{"a": a_step(torch.bfloat16, 33, seed)} for seed in range(3)]
    given = stack([[{"a": leaf} for leaf in each["a"]] for each in members])
    report = assert_vmap_equals_loop(ps.update_report, *given, rtol=1e-7, atol=1e-7)
    worst = max(report.rows["a"].quality.tolist(), key=lambda quality: abs(quality - 1))
    for each in (report, pytree.tree_map(lambda numbers: numbers.flip(0), report)):
        assert f"{worst:.4f}" in str(each), "of stacked reports the worst is printed"


def test_compiled_it_is_one_graph_and_the_same():
    given = [{"a": leaf, "b": leaf[:5]} for leaf in a_step(torch.bfloat16, 33)]
    [report] = assert_single_graph(ps.update_report, given)
    assert same_bits(report, ps.update_report(*given))


def test_nothing_is_read_until_it_is_printed_and_it_is_no_part_of_a_graph():
    old, new, wanted = ({"w": torch.full((3,), x, requires_grad=True)} for x in (1.0, 1.0, 0.1))
    report = assert_sync_free(ps.update_report, old, new, wanted)
    assert not report.rows["w"].quality.requires_grad
    with Dispatched() as printing:
        str(report)
    assert printing.reads <= 3, "one for each number of a row"


def test_it_prints_the_worst_first_and_says_how_many_missed():
    """A leaf without a wanted update comes after the others."""
    new = {
        "fine": torch.ones(4),
        "still": torch.zeros(4),
        "starved": torch.zeros(4),
        "some": torch.tensor([1.0, 1, 1, 0]),
        "far": torch.full((4,), 3.0),
        "nan": torch.full((4,), nan),
    }
    old = {name: torch.zeros(4) for name in new}
    wanted = {name: torch.full((4,), float(name != "still")) for name in new}
    report = ps.update_report(old, new, wanted)
    lines = str(report).splitlines()
    assert lines[0] == "3 of 6 leaves miss the wanted update by more than half of it"
    names = ["nan", "far", "starved", "some", "fine", "still"]
    assert [line.split()[0] for line in lines[2:]] == names
    assert lines[4].split() == ["starved", "0.0000", "100%"]
    assert lines[5].split() == ["some", "0.7500", "25%"]
    assert lines[6].split() == ["fine", "1.0000", "0%"]
    assert lines[7].split() == ["still", "no", "update", "wanted"]
    assert (report.rows["still"].quality, report.rows["still"].lost) == (1, 0)
    assert str(ps.update_report(old, wanted, wanted)).startswith("every leaf is within half")


def test_gradients_of_zero_are_not_an_update_that_arrived():
    sgd = ps.from_torch(torch.optim.SGD, lr=0.1)
    params, grads = {"w": torch.ones(5), "b": torch.ones(())}, {"w": torch.zeros(5), "b": None}
    wanted = ps.wanted_update(sgd, params, grads, sgd.init(params))
    text = str(ps.update_report(params, params, wanted))
    assert text.startswith("no update wanted\n")
    assert "1.0" not in text


@pytest.mark.parametrize(
    ("old", "new", "wanted", "error", "words"),
    [
        ({"a": torch.ones(1)}, {"a": torch.ones(1)}, {"a": None}, ValueError, "no tensor"),
        ({"a": torch.ones(1)}, {"b": torch.ones(1)}, {}, ValueError, r"new does not match old"),
        ({"a": torch.ones(1)}, {"a": None}, {"a": None}, TypeError, r"new\['a'\]"),
        ({"a": torch.ones(2)}, {"a": torch.ones(3)}, {"a": None}, ValueError, r"new\['a'\] is \(3"),
        ({"a": None}, {"a": None}, {"a": torch.ones(1)}, ValueError, r"wanted\['a'\].*old is None"),
        ({"a": torch.ones(2) > 0}, {}, {}, TypeError, r"old\['a'\] has dtype torch.bool"),
    ],
)
def test_what_does_not_match_is_refused_by_name(old, new, wanted, error, words):
    with pytest.raises(error, match=words):
        ps.update_report(old, new, wanted)


# ---- the update that was wanted ------------------------------------------------------------------


SETTINGS = {
    "SGD": {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
    "AdamW": {"amsgrad": True},
    "RMSprop": {"momentum": 0.9},
    **{name: {} for name in ("Adam", "Adamax", "ASGD", "NAdam", "RAdam", "Rprop")},
    **{name: {} for name in ("Adagrad", "Adadelta")},
}
SHAPES = {"matrix": (4, 3), "vector": (5,), "number": ()}


def made(name="AdamW", **extra):
    cls = getattr(torch.optim, name)
    return ps.from_torch(cls, **{"lr": 1e-2, **SETTINGS.get(name, {}), **extra})


def params_of(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in SHAPES.items()}


def begun(optimizer, dtype=torch.float32, seed=0, steps=1):
    """Parameters, gradients and a state that has made steps."""
    params, first, grads = (params_of(dtype, seed + index) for index in range(3))
    state = optimizer.init(params)
    for _ in range(steps):
        params, state = optimizer.step(params, first, state)
    return params, grads, state


def by_torch(cls, optimizer, params, grads, state):
    """The difference that torch's own class makes to float64 parameters, from the same state."""
    wide = {n: p.double() for n, p in params.items()}
    theirs = cls(list(wide.values()))
    theirs.load_state_dict(optimizer.to_state_dict(state))
    before = {n: p.clone() for n, p in wide.items()}
    for name, param in wide.items():
        param.grad = grads[name].double()
    theirs.step()
    return {n: p - before[n] for n, p in wide.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "steps"),
    [*((name, 1) for name in SETTINGS), ("SGD", 0)],  # torch leaves dampening out of the first
)
def test_it_is_what_torch_adds_to_parameters_in_float64(name, steps, dtype):
    optimizer = made(name)
    arguments = begun(optimizer, dtype, steps=steps)
    found = assert_pure(ps.wanted_update, optimizer, *arguments)
    expected = by_torch(getattr(torch.optim, name), optimizer, *arguments)
    assert {leaf.dtype for leaf in tensors(found)} == {torch.float64}
    assert_close(found, expected, rtol=1e-6, atol=1e-12)


WRAPPERS = {
    "masters": ps.with_master_weights,
    "rounding": ps.with_stochastic_rounding,
    "masters and moments": lambda optimizer: ps.with_state_dtype(
        ps.with_master_weights(optimizer), {"exp_avg": torch.bfloat16}
    ),
}


@pytest.mark.parametrize(
    ("name", "kind", "dtype"),
    [
        ("AdamW", "masters", torch.bfloat16),
        ("SGD", "rounding", torch.float16),
        ("RMSprop", "masters", torch.float32),
        ("Rprop", "rounding", torch.bfloat16),
    ],
)
def test_under_a_wrapper_it_is_that_of_the_optimizer_within(name, kind, dtype):
    inner = made(name)
    optimizer = WRAPPERS[kind](inner)
    params, grads, state = begun(optimizer, dtype)
    wide = {n: p.float() for n, p in params.items()}
    if kind == "masters":
        wide = ps.master_weights(params, state)
    widened = {n: g.float() for n, g in grads.items()}
    expected = ps.wanted_update(inner, wide, widened, state.inner)
    assert same_bits(ps.wanted_update(optimizer, params, grads, state), expected)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "RMSprop"])
def test_of_schedule_free_it_is_what_a_step_adds_in_float64(name):
    optimizer = ps.with_schedule_free(made(name))
    params, grads, state = begun(optimizer, torch.float64)
    new, _ = optimizer.step(params, grads, state)
    added = {n: new[n] - p for n, p in params.items()}
    assert_close(ps.wanted_update(optimizer, params, grads, state), added, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("kind", WRAPPERS)
def test_masters_hold_what_is_wanted_and_half_weights_do_not(kind):
    optimizer = WRAPPERS[kind](made(lr=1e-4, weight_decay=0.0))
    old = {"w": torch.linspace(1, 2, 64).bfloat16()}
    grads = {"w": torch.ones(64).bfloat16()}
    state = optimizer.init(old)
    wanted = ps.wanted_update(optimizer, old, grads, state)
    assert_close(wanted["w"], torch.full((64,), -1e-4, dtype=torch.float64), rtol=1e-3, atol=0)
    new, after = optimizer.step(old, grads, state)
    if kind == "rounding":
        assert ps.update_report(old, new, wanted).rows["w"].lost > 0.5
        return
    assert ps.update_report(old, new, wanted).rows["w"].lost == 1
    masters = ps.master_weights(old, state), ps.master_weights(new, after)
    row = ps.update_report(*masters, wanted).rows["w"]
    assert row.quality == pytest.approx(1, abs=1e-2)


def bare(optimizer):
    return optimizer


@pytest.mark.parametrize(
    ("around", "within", "dtype"),
    [(bare, ps.with_master_weights, torch.bfloat16), (ps.with_master_weights, bare, torch.float32)],
)
def test_of_a_partition_it_is_that_of_each_part(around, within, dtype):
    parts = {"sgd": made("SGD"), "adamw": within(made())}
    optimizer = around(ps.partition(parts, lambda name, p: "sgd" if p.ndim == 2 else "adamw"))
    params, grads, state = begun(optimizer, dtype)
    found = ps.wanted_update(optimizer, params, grads, state)
    state = getattr(state, "inner", state)
    for key, names in (("sgd", ["matrix"]), ("adamw", ["vector", "number"])):
        own = [{n: tree[n] for n in names} for tree in (params, grads)]
        expected = ps.wanted_update(parts[key], *own, state[key])
        assert same_bits({n: found[n] for n in names}, expected)


def test_settings_in_the_state_and_schedules_are_those_of_the_step():
    optimizer = ps.from_torch(
        torch.optim.SGD, lr=lambda applied: 0.5**applied, in_state=("lr", "weight_decay")
    )
    params, grads, state = begun(optimizer)
    state = ps.replace_settings(state, lr=0.25, weight_decay=0.5)
    found = ps.wanted_update(optimizer, params, grads, state)
    expected = {n: -0.125 * (grads[n].double() + 0.5 * p.double()) for n, p in params.items()}
    assert_close(found, expected, rtol=1e-12, atol=1e-15)


def test_a_schedule_is_called_once_and_no_plan_of_a_training_goes():
    counts = []

    def schedule(count):
        counts.append(count)
        return 0.1 / (1 + count)

    optimizer = ps.from_torch(torch.optim.SGD, lr=schedule)
    params = {"w": torch.ones(3)}
    state = optimizer.init(params)
    counts.clear()
    ps.wanted_update(optimizer, params, params, state)
    assert len(counts) == 1
    assert len(optimizer.cache) == 0


def test_nothing_is_wanted_of_a_parameter_without_a_gradient():
    optimizer = ps.with_master_weights(made(counts="each"))
    params, grads, state = begun(optimizer, torch.bfloat16)
    found = ps.wanted_update(optimizer, params, {**grads, "vector": None}, state)
    assert same_bits(found["vector"], torch.zeros(5, dtype=torch.float64))
    assert (found["matrix"] != 0).all()
    params = {**params_of(), "absent": None}
    found = ps.wanted_update(made(), params, params, made().init(params))
    assert found["absent"] is None


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_optimizer_of_ones_own_is_asked_for_a_wide_step(wrapped):
    """Its state may keep its own dtypes."""

    def update(grads, state, params):
        moments = {n: 0.5 * state["m"][n].float() + grads[n].float() for n in grads}
        return {n: -(2.0**-30) * m for n, m in moments.items()}, {"m": moments, "n": state["n"] + 1}

    def init(params):
        return {"m": {n: torch.zeros_like(p) for n, p in params.items()}, "n": torch.tensor(0)}

    optimizer = ps.from_transformation((init, update))
    optimizer = ps.with_master_weights(optimizer) if wrapped else optimizer
    params = {"w": torch.ones(3)}
    found = ps.wanted_update(optimizer, params, params, optimizer.init(params))
    assert_close(found["w"], torch.full((3,), -(2.0**-30), dtype=torch.float64), rtol=1e-6, atol=0)


def test_mapped_equals_a_loop():
    optimizer = ps.with_master_weights(made())
    members = stack([begun(optimizer, torch.bfloat16, seed) for seed in range(3)])
    wanted = functools.partial(ps.wanted_update, optimizer)
    assert_vmap_equals_loop(wanted, *members, rtol=1e-9, atol=1e-15)


def test_what_a_step_refuses_is_refused():
    optimizer = made()
    params, grads, state = begun(optimizer)
    with Untouched((params, state)), pytest.raises(ValueError, match="grads does not match"):
        ps.wanted_update(optimizer, params, {"matrix": grads["matrix"]}, state)
    with pytest.raises(TypeError, match="opt_state is MasterState"):
        ps.wanted_update(optimizer, params, grads, ps.with_master_weights(optimizer).init(params))


def _of_shards_it_is_sharded(rank):
    mesh = init_device_mesh("cpu", (2,))
    for kind in (lambda optimizer: optimizer, ps.with_master_weights):
        parts = {"sgd": made("SGD"), "adamw": made()}
        optimizer = kind(ps.partition(parts, lambda name, p: "sgd" if p.ndim == 2 else "adamw"))
        params, grads, _ = begun(optimizer)
        params, grads = ({n: tree[n] for n in ("matrix", "vector")} for tree in (params, grads))
        whole = ps.wanted_update(optimizer, params, grads, optimizer.init(params))
        spread = [
            {n: distribute_tensor(x, mesh, [Shard(0)]) for n, x in tree.items()}
            for tree in (params, grads)
        ]
        found = ps.wanted_update(optimizer, *spread, optimizer.init(spread[0]))
        assert all(isinstance(leaf, DTensor) for leaf in found.values())
        assert same_bits({n: leaf.full_tensor() for n, leaf in found.items()}, whole)


@pytest.mark.slow
def test_of_shards_it_is_sharded():
    in_processes(_of_shards_it_is_sharded)
