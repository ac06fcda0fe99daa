"""`wanted_update`: the update of torch's own step in float64, whatever is rounded around it."""

import functools

import pytest
import torch
from helpers import Untouched, assert_close, in_processes, same_bits, stack, tensors, unstack
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import purescale as ps
from purescale.testing import assert_pure

SETTINGS = {
    "SGD": {"momentum": 0.9, "weight_decay": 0.1},
    "Adam": {},
    "AdamW": {"amsgrad": True},
    "Adamax": {},
    "ASGD": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9},
    "Rprop": {},
    "Adagrad": {},
    "Adadelta": {},
}
SHAPES = {"matrix": (4, 3), "vector": (5,), "number": ()}


def made(name="AdamW", **extra):
    cls = getattr(torch.optim, name)
    return ps.from_torch(cls, **{"lr": 1e-2, **SETTINGS.get(name, {}), **extra})


def params_of(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in SHAPES.items()}


def begun(optimizer, dtype=torch.float32, seed=0):
    """Parameters, gradients and a state that has made a step."""
    params = params_of(dtype, seed)
    first, grads = params_of(dtype, seed + 1), params_of(dtype, seed + 2)
    params, state = optimizer.step(params, first, optimizer.init(params))
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SETTINGS)
def test_it_is_what_torch_adds_to_parameters_in_float64(name, dtype):
    optimizer = made(name)
    arguments = begun(optimizer, dtype)
    found = assert_pure(ps.wanted_update, optimizer, *arguments)
    expected = by_torch(getattr(torch.optim, name), optimizer, *arguments)
    assert {leaf.dtype for leaf in tensors(found)} == {torch.float64}
    assert_close(found, expected, rtol=1e-6, atol=1e-12)


def test_an_update_that_float32_cannot_hold_is_seen_all_the_same():
    sgd = ps.from_torch(torch.optim.SGD, lr=2.0**-40)
    params = {"w": torch.ones(3)}
    state = sgd.init(params)
    wanted = ps.wanted_update(sgd, params, params, state)
    assert same_bits(wanted, {"w": torch.full((3,), -(2.0**-40), dtype=torch.float64)})
    row = ps.update_report(params, sgd.step(params, params, state)[0], wanted).rows["w"]
    assert (row.quality, row.lost) == (0, 1)


WRAPPERS = {
    "masters": ps.with_master_weights,
    "rounding": ps.with_stochastic_rounding,
    "masters and moments": lambda optimizer: ps.with_state_dtype(
        ps.with_master_weights(optimizer), {"exp_avg": torch.bfloat16}
    ),
}


@given(
    name=st.sampled_from(sorted(SETTINGS)),
    kind=st.sampled_from(["masters", "rounding"]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    seed=st.integers(0, 99),
)
def test_under_a_wrapper_it_is_that_of_the_optimizer_within(name, kind, dtype, seed):
    inner = made(name)
    optimizer = WRAPPERS[kind](inner)
    params, grads, state = begun(optimizer, dtype, seed)
    wide = {n: p.float() for n, p in params.items()}
    if kind == "masters":
        wide = ps.master_weights(params, state)
    widened = {n: g.float() for n, g in grads.items()}
    expected = ps.wanted_update(inner, wide, widened, state.inner)
    assert same_bits(ps.wanted_update(optimizer, params, grads, state), expected)


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
    [
        (bare, ps.with_master_weights, torch.bfloat16),
        (ps.with_master_weights, bare, torch.float32),
    ],
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


def test_of_muon_it_is_what_its_step_does_to_the_bits_of_its_products():
    optimizer = ps.from_torch(torch.optim.Muon, lr=0.02, weight_decay=0.0)
    params = {"w": params_of()["matrix"]}
    grads = {"w": params_of(seed=3)["matrix"]}
    state = optimizer.init(params)
    new, _ = optimizer.step(params, grads, state)
    row = ps.update_report(params, new, ps.wanted_update(optimizer, params, grads, state)).rows["w"]
    assert row.quality == pytest.approx(1, abs=2e-2)


def test_settings_in_the_state_and_schedules_are_those_of_the_step():
    optimizer = ps.from_torch(
        torch.optim.SGD, lr=lambda applied: 0.5**applied, in_state=("lr", "weight_decay")
    )
    params, grads, state = begun(optimizer)
    state = ps.replace_settings(state, lr=0.25, weight_decay=0.5)
    found = ps.wanted_update(optimizer, params, grads, state)
    expected = {n: -0.125 * (grads[n].double() + 0.5 * p.double()) for n, p in params.items()}
    assert_close(found, expected, rtol=1e-12, atol=1e-15)


def test_nothing_is_wanted_of_a_parameter_without_a_gradient():
    optimizer = ps.with_master_weights(made())
    params, grads, state = begun(optimizer, torch.bfloat16)
    found = ps.wanted_update(optimizer, params, {**grads, "vector": None}, state)
    assert same_bits(found["vector"], torch.zeros(5, dtype=torch.float64))
    assert (found["matrix"] != 0).all()
    params = {**params_of(), "absent": None}
    found = ps.wanted_update(made(), params, params, made().init(params))
    assert found["absent"] is None


def test_of_complex_parameters_it_is_complex():
    optimizer = made("SGD", weight_decay=0.0, momentum=0.0)
    params = {"w": torch.tensor([1 + 2j, 3 - 1j])}
    found = ps.wanted_update(optimizer, params, params, optimizer.init(params))
    assert_close(found, {"w": params["w"].to(torch.complex128) * -1e-2}, rtol=1e-12, atol=0)


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


def test_gradients_and_state_are_as_wide_as_the_parameters_of_that_step():
    """An operator that takes one dtype says so."""

    def update(grads, state, params):
        state = {n: torch.lerp(state[n], grads[n], 0.5) for n in grads}
        return {n: -m for n, m in state.items()}, state

    init = functools.partial(torch.utils._pytree.tree_map, torch.zeros_like)
    optimizer = ps.from_transformation((init, update))
    params = {"w": torch.full((3,), 0.25).bfloat16()}
    found = ps.wanted_update(optimizer, params, params, optimizer.init(params))
    assert same_bits(found["w"], torch.full((3,), -0.125, dtype=torch.float64))


def test_a_first_step_and_counts_are_what_they_are():
    """torch leaves dampening out of the first step, and divides by a count in others."""
    optimizer = made("SGD", dampening=0.5, weight_decay=0.0)
    params = params_of()
    state = optimizer.init(params)
    with Untouched(state):
        found = ps.wanted_update(optimizer, params, params, state)
    assert_close(found, {n: -1e-2 * p.double() for n, p in params.items()}, rtol=1e-12, atol=0)
    optimizer = made()
    wide = optimizer.widened(optimizer.init(params), torch.float64).slots["number"]
    assert {key: slot.dtype for key, slot in wide.items() if key in ("step", "exp_avg")} == {
        "step": torch.float32,
        "exp_avg": torch.float64,
    }


def test_mapped_equals_a_loop():
    optimizer = ps.with_master_weights(made())
    members = [begun(optimizer, torch.bfloat16, seed) for seed in range(3)]
    stacked = torch.vmap(lambda *each: ps.wanted_update(optimizer, *each))(*stack(members))
    for index, member in enumerate(members):
        expected = ps.wanted_update(optimizer, *member)
        assert_close(unstack(stacked, index), expected, rtol=1e-9, atol=1e-15)


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
        optimizer = kind(
            ps.partition(
                {"sgd": made("SGD"), "adamw": made()},
                lambda name, p: "sgd" if p.ndim == 2 else "adamw",
            )
        )
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
