"""The formulas of torch's classes, against torch's own steps and against themselves."""

import functools

import pytest
import torch
import torch.utils._pytree as pytree
from helpers import clone, default_dtype, examples, same_bits, slots_of
from hypothesis import given
from hypothesis import strategies as st

import purescale as ps
from purescale._torch import tracing
from purescale._torch_optim.kernels import ForLoopKernel

OPTIM = torch.optim

decay = st.sampled_from([0.0, 0.1])
share = st.floats(0.5, 0.99)
flag = st.booleans()
betas = st.tuples(st.floats(0.5, 0.95), st.floats(0.7, 0.999))
eps = st.sampled_from([1e-8, 1e-3])
lr = st.floats(2**-13, 2**-3, width=32)  # ASGD keeps its first rate in float32
of_adam = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": decay}

# Every class with each of its numbers and switches drawn.
SETTINGS = {
    "SGD": st.one_of(
        st.fixed_dictionaries({"lr": lr, "weight_decay": decay, "maximize": flag}),
        st.fixed_dictionaries({"lr": lr, "momentum": share, "nesterov": flag}),
        st.fixed_dictionaries({"lr": lr, "momentum": share, "dampening": share}),
    ),
    "Adam": st.fixed_dictionaries({**of_adam, "amsgrad": flag, "maximize": flag}),
    "AdamW": st.fixed_dictionaries({**of_adam, "amsgrad": flag, "maximize": flag}),
    "Adagrad": st.fixed_dictionaries(
        {"lr": lr, "lr_decay": decay, "weight_decay": decay, "eps": eps}
        | {"initial_accumulator_value": decay}
    ),
    "RMSprop": st.fixed_dictionaries(
        {"lr": lr, "alpha": share, "eps": eps, "weight_decay": decay, "centered": flag}
        | {"momentum": st.sampled_from([0.0, 0.9])}
    ),
    "Adadelta": st.fixed_dictionaries({"lr": lr, "rho": share, "eps": eps, "weight_decay": decay}),
    "Adamax": st.fixed_dictionaries({**of_adam, "maximize": flag}),
    "NAdam": st.fixed_dictionaries({**of_adam, "decoupled_weight_decay": flag}),
    "RAdam": st.fixed_dictionaries({**of_adam, "decoupled_weight_decay": flag}),
    "ASGD": st.fixed_dictionaries(
        {"lr": lr, "lambd": st.sampled_from([1e-4, 0.1]), "alpha": share}
        | {"t0": st.sampled_from([3.0, 1e6]), "weight_decay": decay}
    ),
    "Rprop": st.fixed_dictionaries(
        {"lr": lr, "etas": st.sampled_from([(0.5, 1.2), (0.3, 1.5)]), "maximize": flag}
    ),
    "Muon": st.fixed_dictionaries(
        {"lr": lr, "weight_decay": decay, "momentum": share, "nesterov": flag}
        | {"adjust_lr_fn": st.sampled_from([None, "match_rms_adamw"])}
    ),
    "Adafactor": st.fixed_dictionaries({"lr": lr, "weight_decay": decay}),
}
each_class = pytest.mark.parametrize("name", SETTINGS)
ELEMENTWISE = [name for name in SETTINGS if name not in ("Muon", "Adafactor")]


def drawn(name, seed, dtype):
    """Parameters on both sides of a vector lane, and the gradients of some steps."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, 5), (3, 11)] if name == "Muon" else [(5,), (3, 11), (300,), (1,)]

    def tree():
        leaves = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
        return {f"w{i}": leaf.to(dtype) for i, leaf in enumerate(leaves)}

    return tree(), tree


def by_formula(optimizer, params, tree, steps):
    state = optimizer.init(params)
    with tracing.as_on_an_accelerator():
        for _ in range(steps):
            # A flag that is not read keeps fused kernels away.
            params, state = optimizer.step(params, tree(), state)
    return params, state


def by_torch(name, settings, params, tree, steps):
    """torch's loop over parameters, with counts that are kept in float32 and computed with in
    float64.
    """
    weights = {key: p.clone() for key, p in params.items()}
    flags = {} if name == "Muon" else {"foreach": False}
    with default_dtype(torch.float64):  # in which torch makes its counts
        optimizer = getattr(OPTIM, name)(weights.values(), **settings, **flags)
        for _ in range(steps):
            for p, g in zip(weights.values(), tree().values(), strict=True):
                p.grad = g
            optimizer.step()
            for slot in optimizer.state.values():
                for value in slot.values():
                    if isinstance(value, torch.Tensor) and value.ndim == 0:
                        value.copy_(value.float())
    return weights


# ---- agreement with torch


@each_class
@examples(8)
@given(data=st.data())
def test_twenty_steps_equal_torchs(name, data):
    """To rounding. One in bfloat16 of Muon's iteration differs by 2**-8 where its sums do."""
    dtype, tolerance = data.draw(st.sampled_from([(torch.float64, 1e-12), (torch.float32, 1e-6)]))
    settings = data.draw(SETTINGS[name])
    seed = data.draw(st.integers(0, 2**16))
    params, tree = drawn(name, seed, dtype)
    # `foreach` and `fused` are speed; a named one keeps torch's fused kernels away.
    flags = {"foreach": False} if name in ("SGD", "Adam", "AdamW", "Adagrad") else {}
    optimizer = ps.from_torch(getattr(OPTIM, name), **settings, **flags)
    got, _ = by_formula(optimizer, params, tree, 20)
    params, tree = drawn(name, seed, dtype)
    expected = by_torch(name, settings, params, tree, 20)
    for key in params:
        scale = expected[key].abs().max() + 20 * settings["lr"]
        if name == "Muon":
            tolerance = 1e-2
        assert ((got[key] - expected[key]).abs().max() <= tolerance * scale).item(), key


@pytest.mark.parametrize("name", ["Adam", "RMSprop", "Adadelta", "NAdam", "RAdam"])
def test_an_average_of_squares_has_the_range_of_torchs(name):
    """The square of 3e19 is out of the range of float32, a tenth of it is not."""
    leaf = torch.ones(3)
    theirs = getattr(OPTIM, name)([leaf.clone()], foreach=False)
    optimizer = ps.from_torch(getattr(OPTIM, name), foreach=False)
    params, grads = {"w": leaf}, {"w": torch.full((3,), 3e19)}
    theirs.param_groups[0]["params"][0].grad = grads["w"]
    theirs.step()
    (expected,) = theirs.state.values()
    _, state = by_formula(optimizer, params, lambda: grads, 1)
    assert any(value.ndim and (value > 1e35).all() for value in expected.values())
    for key, value in slots_of(state, "w").items():
        torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=0)


# ---- the ways agree


@pytest.mark.parametrize("name", ["RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam"])
@examples(12)
@given(data=st.data())
def test_torchs_function_of_a_class_without_a_fused_kernel_agrees_with_its_formula(name, data):
    """Parameters and state, over skips, donation, rates as data, and leaves without a gradient."""
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32]))
    settings, donate = data.draw(SETTINGS[name]), data.draw(flag)
    counts = data.draw(st.sampled_from(["one", "each"]))
    rate = settings.pop("lr")
    as_data = {"in_state": ("lr", "weight_decay")} if data.draw(flag) else {}
    schedule = data.draw(st.sampled_from([rate, lambda applied: rate / (1 + applied)]))
    optimizer = ps.from_torch(
        getattr(OPTIM, name), lr=schedule, counts=counts, **as_data, **settings
    )
    params, tree = drawn(name, data.draw(st.integers(0, 2**16)), dtype)
    by_kernel, formula = [(params, optimizer.init(params)) for _ in range(2)]
    scaler = ps.StaticScale(4.0).init()
    for index in range(6):
        grads = tree()
        if counts == "each" and index % 2:
            grads["w1"] = None
        if index == 3:
            grads["w2"] = torch.full_like(grads["w2"], torch.inf)
        arguments = optimizer, scaler, by_kernel[0], grads, by_kernel[1]
        by_kernel = ps.unscale_and_step(*clone(arguments), donate=donate)[:2]
        with tracing.as_on_an_accelerator():
            formula = ps.unscale_and_step(optimizer, scaler, formula[0], grads, formula[1])[:2]
    assert isinstance(optimizer.kernel, ForLoopKernel)
    for got, expected in zip(*map(pytree.tree_leaves, (by_kernel, formula)), strict=True):
        scale = expected.abs().max() + 6 * rate
        assert ((got - expected).abs().max() <= 2e-6 * scale).item(), (got, expected)


@each_class
@examples(3)
@given(data=st.data())
def test_members_of_a_vmap_are_a_loop_bit_for_bit(name, data):
    settings = data.draw(SETTINGS[name])
    optimizer = ps.from_torch(getattr(OPTIM, name), **settings, **alone(name))
    runs = []
    for seed in range(3):
        params, tree = drawn(name, seed, torch.float32)
        runs.append((params, tree(), optimizer.init(params)))
    stacked = ps.stack_states(runs)
    mapped = torch.vmap(optimizer.step)(*stacked)
    for index, run in enumerate(runs):
        expected = torch.vmap(optimizer.step)(*ps.stack_states([run]))
        pair = ps.member(mapped, index), ps.member(expected, 0)
        if name == "Muon":
            torch.testing.assert_close(*pair, rtol=1e-2, atol=1e-2)
        else:
            assert same_bits(*pair)


def alone(name):
    return {} if name in ("Muon", "Adafactor") else {"foreach": False}


def test_empty_leaves_are_stepped_in_any_order():
    """Alone, before and after others of their dtype."""
    optimizer = ps.from_torch(OPTIM.RMSprop, lr=0.1)
    kinds = (
        (0, torch.float64),
        (0, torch.float32),
        (3, torch.float32),
        (3, torch.half),
        (0, torch.half),
    )
    params = {str(i): torch.ones(size, dtype=dtype) for i, (size, dtype) in enumerate(kinds)}
    moved, state = by_formula(optimizer, params, lambda: params, 2)
    expected, after = params, optimizer.init(params)
    for _ in range(2):
        expected, after = optimizer.step(expected, params, after)
    torch.testing.assert_close((moved, state.slots), (expected, after.slots))


@pytest.mark.parametrize("name", ELEMENTWISE)
@examples(10)
@given(data=st.data())
def test_leaves_joined_into_one_step_as_each_alone(name, data):
    """Also where some have made fewer steps than others, in every dtype and layout."""
    settings = data.draw(SETTINGS[name])
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.complex64]
    dtype = data.draw(st.sampled_from(dtypes))
    optimizer = ps.from_torch(getattr(OPTIM, name), **settings, foreach=False, counts="each")
    params = {f"w{i}": torch.randn(n, 3, dtype=dtype) for i, n in enumerate((1, 2, 11, 100))}
    params["w1"] = params["w1"].t().contiguous().t()
    state = optimizer.init(params)
    with tracing.as_on_an_accelerator():
        for _ in range(data.draw(st.integers(1, 2))):
            grads = {key: torch.randn_like(p) for key, p in params.items()}
            if data.draw(flag):
                grads["w2"] = None
            alone_params, alone_slots = {}, {}
            for key in params:
                counts = {key: state.counts[key]} if state.counts else ()
                slots = {slot: {key: column[key]} for slot, column in state.slots.items()}
                part = state._replace(slots=slots, counts=counts)
                one, after = optimizer.step({key: params[key]}, {key: grads[key]}, part)
                alone_params |= one
                alone_slots[key] = slots_of(after, key)
            params, state = optimizer.step(params, grads, state)
            unit = 1e-6 if dtype.itemsize > 2 else torch.finfo(dtype).eps
            torch.testing.assert_close(params, alone_params, rtol=unit, atol=unit)
            together = {key: slots_of(state, key) for key in params}
            torch.testing.assert_close(together, alone_slots, rtol=unit, atol=unit)


@pytest.mark.slow
@each_class
def test_a_traced_step_is_the_eager_one(name):
    optimizer = ps.from_torch(getattr(OPTIM, name), **alone(name))
    params, tree = drawn(name, 0, torch.float32)
    call = params, tree(), optimizer.init(params), torch.tensor(False)
    step = functools.partial(ps.maybe_step, optimizer)
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    tolerance = 1e-2 if name == "Muon" else 1e-6
    torch.testing.assert_close(compiled(*call), step(*call), rtol=tolerance, atol=tolerance)
    assert same_bits(compiled(*call[:-1], torch.tensor(True)), call[:1] + call[2:3])


# ---- derivatives


NUMBERS = {
    "SGD": {"momentum": 0.9, "dampening": 0.4, "weight_decay": 0.1},
    "Adam": {"betas": (0.8, 0.97), "weight_decay": 0.1, "eps": 1e-2},
    "AdamW": {"betas": (0.8, 0.97), "weight_decay": 0.1, "eps": 1e-2},
    "Adagrad": {"lr_decay": 0.1, "eps": 1e-2, "weight_decay": 0.1},
    "RMSprop": {"alpha": 0.9, "eps": 1e-2, "weight_decay": 0.1, "momentum": 0.9},
    "Adadelta": {"rho": 0.8, "eps": 1e-2, "weight_decay": 0.1},
    "Adamax": {"betas": (0.8, 0.97), "eps": 1e-2, "weight_decay": 0.1},
    "NAdam": {"betas": (0.8, 0.97), "eps": 1e-2, "weight_decay": 0.1, "momentum_decay": 0.1},
    "RAdam": {"betas": (0.8, 0.9), "eps": 1e-2, "weight_decay": 0.1},
    "ASGD": {"lambd": 0.05, "alpha": 0.6, "t0": 0.5, "weight_decay": 0.1},
    "Rprop": {"etas": (0.4, 1.3), "step_sizes": (1e-6, 50.0)},
    "Adafactor": {"weight_decay": 0.1, "d": 1.0, "beta2_decay": -0.8},
}


@pytest.mark.parametrize("name", NUMBERS)
def test_derivatives_are_those_of_finite_differences(name):
    """With respect to parameters, gradients, slots and every setting in the state, in float64."""
    settings = NUMBERS[name]
    rate = () if name == "Rprop" else ("lr",)
    optimizer = ps.from_torch(
        getattr(OPTIM, name), lr=0.05, in_state=(*settings, *rate), **settings
    )
    params, tree = drawn(name, 3, torch.float64)
    params = {"w1": params["w1"][:2, :3].clone()}
    grads = [{"w1": tree()["w1"][:2, :3].clone()} for _ in range(7)]
    state = optimizer.init(params)
    wide = {
        key: tuple(map(torch.Tensor.double, value)) if isinstance(value, tuple) else value.double()
        for key, value in state.hyper.items()
    }
    state = state._replace(hyper=wide, lr=state.lr.double() if rate else state.lr)
    for gradients in grads[:-1]:
        params, state = optimizer.step(params, gradients, state)
    state = state._replace(hyper=wide)
    # Rprop's step jumps where the gradient before it was 0.
    slots = {key: t for key, t in slots_of(state, "w1").items() if t.ndim and key != "prev"}
    probed = {"p": params["w1"], "g": grads[-1]["w1"], "slots": slots, "hyper": wide}
    probed |= {"lr": state.lr} if rate else {}
    leaves, structure = pytree.tree_flatten(probed)

    def moved(*leaves):
        at = pytree.tree_unflatten(list(leaves), structure)
        columns = {key: {"w1": slot} for key, slot in at["slots"].items()}
        slots = {**state.slots, **columns}
        there = state._replace(slots=slots, hyper=at["hyper"], lr=at.get("lr", ()))
        new, after = optimizer.step({"w1": at["p"]}, {"w1": at["g"]}, there)
        total = (new["w1"] * torch.arange(1.0, 7.0).reshape(2, 3)).sum()
        return total + sum(t.sum() for t in slots_of(after, "w1").values() if t.ndim)

    derivatives = torch.func.grad(moved, argnums=tuple(range(len(leaves))))(*leaves)
    for index, (leaf, derivative) in enumerate(zip(leaves, derivatives, strict=True)):
        direction = torch.linspace(0.5, 1.0, leaf.numel()).reshape(leaf.shape).double()
        step = 1e-6 * (leaf.abs().max() + 1e-3)
        ahead, behind = (
            moved(*(t + sign * step * direction if i == index else t for i, t in enumerate(leaves)))
            for sign in (1, -1)
        )
        numeric = (ahead - behind) / (2 * step)
        exact = (derivative * direction).sum()
        torch.testing.assert_close(exact, numeric, rtol=2e-4, atol=2e-6)
