"""Optimizers as pure functions, against the real ones."""

import copy
import functools
import inspect
import itertools
import math
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from helpers import (
    CAPTURABLE,
    Untouched,
    clone,
    same_bits,
    shares_memory,
    slots_of,
    tensors,
)
from torch.profiler import ProfilerActivity, profile

import purescale as ps
from purescale.testing import assert_sync_free

OPTIM = torch.optim


nan = float("nan")


# Each class in a plain and in its richest setting.
SETTINGS = {
    "Adadelta": [{}, {"rho": 0.8, "weight_decay": 0.1, "maximize": True}],
    "Adagrad": [{}, {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.5}],
    "Adam": [{}, {"amsgrad": True, "weight_decay": 0.1, "betas": (0.8, 0.9)}],
    "AdamW": [{}, {"amsgrad": True, "maximize": True}],
    "Adamax": [{}, {"weight_decay": 0.1}],
    "ASGD": [{}, {"t0": 3.0, "lambd": 0.01, "weight_decay": 0.1}],
    "NAdam": [{}, {"weight_decay": 0.1, "decoupled_weight_decay": True}],
    "RAdam": [{}, {"weight_decay": 0.1, "decoupled_weight_decay": True}],
    "RMSprop": [{}, {"momentum": 0.9, "centered": True, "weight_decay": 0.1}],
    "Rprop": [{}, {"etas": (0.4, 1.3)}],
    "SGD": [
        {},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.9, "dampening": 0.5},
    ],
    "Muon": [{}, {"nesterov": False}],
    "Adafactor": [{}, {"weight_decay": 0.1}],
}


CASES = [
    pytest.param(name, settings, id=f"{name}-{i}")
    for name, many in SETTINGS.items()
    for i, settings in enumerate(many)
]


FUSED = ("SGD", "Adam", "AdamW", "Adagrad")


def make_params(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = {"conv.weight": (4, 3), "head.weight": (2, 4), "gain": (1, 1)}
    return {
        name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()
    }


def grads_at(step, params):
    generator = torch.Generator().manual_seed(100 + step)
    return {
        name: torch.randn(p.shape, generator=generator, dtype=p.dtype) for name, p in params.items()
    }


def implementation(name, settings, way, dtype=torch.float32):
    """The flags that name, on the real class, the implementation that runs by default here. torch's
    fused kernels are wrong on a CPU in half precision.
    """
    if name in FUSED and not settings.get("dampening") and dtype.itemsize >= 4:
        return {"fused": True}
    return {"foreach": False} if name in (*CAPTURABLE, *FUSED) else {}


def has_formula_alone(name, settings, way, dtype=torch.float32):
    """True where a step is made by the formula, which agrees with torch's to rounding."""
    return not implementation(name, settings, way, dtype).get("fused")


def real(name, settings, flags, steps=20, dtype=torch.float32, count=torch.float32):
    """torch's own optimizer, which computes with counts in `count`, and in float32 over what is
    half; it keeps the one in float32 and the other in `dtype`.
    """
    half = make_params(dtype)
    params = {n: p.float() if dtype.itemsize == 2 else p for n, p in half.items()}
    wide = params["gain"].dtype
    torch.set_default_dtype(count)  # in which torch makes its counts
    try:
        optimizer = getattr(OPTIM, name)(params.values(), **settings, **flags)
        for step in range(steps):
            for p, g in zip(params.values(), grads_at(step, half).values(), strict=True):
                p.grad = g.to(wide)
            optimizer.step()
            for p in params.values():
                for kept in (p, *optimizer.state[p].values()):
                    if isinstance(kept, torch.Tensor):
                        kept.copy_(kept.to(dtype if kept.ndim else torch.float32))
    finally:
        torch.set_default_dtype(torch.float32)
    return {n: p.to(dtype) for n, p in params.items()}, optimizer


def ours(optimizer, steps=20, params=None, state=None, start=0):
    params = make_params() if params is None else params
    state = optimizer.init(params) if state is None else state
    for step in range(start, start + steps):
        params, state = optimizer.step(params, grads_at(step, params), state)
    return params, state


# ---- agreement with torch


def agree(ours, theirs):
    """To 1e-6 of the largest element: one that cancels has the rounding of its terms."""
    for a, b in zip(tensors(ours), tensors(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6 * float(b.double().abs().max()))


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_twenty_steps_equal_the_real_optimizer(name, settings, way):
    """Bit for bit by torch's kernels, to 1e-6 by a formula, with torch's counts in float64, as a
    formula has them.
    """
    formula = has_formula_alone(name, settings, way)
    count = torch.float64 if formula else torch.float32
    expected, optimizer = real(name, settings, implementation(name, settings, way), count=count)
    params, state = ours(ps.from_torch(getattr(OPTIM, name), **settings))
    theirs = [
        {
            k: v.detach().float() if v.ndim == 0 else v.detach()
            for k, v in optimizer.state[p].items()
            if v is not None
        }
        for p in optimizer.param_groups[0]["params"]
    ]
    slots = [slots_of(state, name, theirs[0]) for name in params]
    if formula:
        assert [slot.keys() for slot in slots] == [slot.keys() for slot in theirs]
        agree((params, slots), (expected, theirs))
    else:
        assert same_bits((params, slots), (expected, theirs))


@pytest.mark.parametrize(
    "flags",
    [{"foreach": False}, {"foreach": True}, {"differentiable": True}, {"fused": True}],
    ids=str,
)
@pytest.mark.parametrize(("name", "settings"), CASES)
def test_a_named_flag_chooses_the_kernel_or_the_formula(name, settings, flags):
    accepted = inspect.signature(getattr(OPTIM, name)).parameters
    if not flags.keys() <= accepted.keys() or (name == "Adafactor"):
        flags = {}
    if not flags and name != "Adafactor":
        flags = {"foreach": False} if "foreach" in accepted else {}
    expected, _ = real(name, settings, flags)
    params, _ = ours(ps.from_torch(getattr(OPTIM, name), **settings, **flags))
    if name in FUSED and flags == {"fused": True} and not settings.get("dampening"):
        assert same_bits(params, expected)
    else:  # torch's counts are in float32
        torch.testing.assert_close(params, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_the_default_agrees_with_the_for_loop(name, settings):
    accepted = inspect.signature(getattr(OPTIM, name)).parameters
    flags = {"foreach": False} if "foreach" in accepted and "foreach" not in settings else {}
    expected, _ = real(name, settings, flags)
    torch.testing.assert_close(
        ours(ps.from_torch(getattr(OPTIM, name), **settings))[0], expected, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_the_default_reads_no_tensor_value(name, settings):
    optimizer = ps.from_torch(getattr(OPTIM, name), **settings)
    params = make_params()
    state = optimizer.init(params)
    grads = grads_at(0, params)
    assert_sync_free(ps.maybe_step, optimizer, params, grads, state, torch.tensor(False))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop"])
def test_other_dtypes_equal_the_real_optimizer(name, dtype, way):
    """Half precision: that in float32, rounded after each step."""
    expected, _ = real(name, {}, implementation(name, {}, way, dtype), dtype=dtype)
    params, _ = ours(ps.from_torch(getattr(OPTIM, name)), params=make_params(dtype))
    if has_formula_alone(name, {}, way, dtype):
        unit = max(torch.finfo(dtype).eps, 1e-12)
        torch.testing.assert_close(params, expected, rtol=unit, atol=unit)
    else:
        assert same_bits(params, expected)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop"])
def test_complex_parameters_equal_the_real_optimizer(name, way):
    flags = {"foreach": False, "differentiable": False}
    expected, _ = real(name, {}, flags, dtype=torch.complex64)
    torch.testing.assert_close(
        ours(ps.from_torch(getattr(OPTIM, name)), params=make_params(torch.complex64))[0], expected
    )


# torch's own Adagrad
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
def test_sparse_gradients_equal_the_real_optimizer(name):
    table = torch.randn(5, 3)
    grad = torch.sparse_coo_tensor(
        torch.tensor([[1, 1, 4]]), torch.randn(3, 3), (5, 3), check_invariants=True
    )
    p = table.clone().requires_grad_()
    p.grad = grad
    getattr(OPTIM, name)([p], lr=0.1, foreach=False).step()
    optimizer = ps.from_torch(getattr(OPTIM, name), lr=0.1)
    params, _ = optimizer.step({"t": table}, {"t": grad}, optimizer.init({"t": table}))
    torch.testing.assert_close(
        params["t"], p.detach(), rtol=1e-6, atol=1e-7
    )  # here it is made dense


# ---- laws


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_a_first_step_changes_no_structure(name, settings):
    optimizer = ps.from_torch(getattr(OPTIM, name), **settings)
    params = make_params()
    state = optimizer.init(params)
    _, after = optimizer.step(params, grads_at(0, params), state)
    facts = [[(t.shape, t.dtype) for t in pytree.tree_leaves(s)] for s in (state, after)]
    assert pytree.tree_structure(state) == pytree.tree_structure(after)
    assert facts[0] == facts[1]


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_a_step_is_pure(name, settings):
    optimizer = ps.from_torch(getattr(OPTIM, name), **settings)
    params, state = ours(ps.from_torch(getattr(OPTIM, name), **settings), steps=2)
    grads = grads_at(5, params)
    with Untouched((params, grads, state)):
        new = optimizer.step(params, grads, state)
    assert not shares_memory((params, grads, state), new)
    assert same_bits(new, optimizer.step(params, grads, state))
    assert all(p.grad is None for p in params.values())


@pytest.mark.parametrize(("name", "settings"), CASES)
@pytest.mark.parametrize("donate", [False, True])
def test_a_skipped_step_returns_everything_bit_for_bit(name, settings, donate):
    optimizer = ps.from_torch(getattr(OPTIM, name), **settings)
    params, state = ours(optimizer, steps=3)
    bad = {n: torch.full_like(g, nan) for n, g in grads_at(0, params).items()}
    skipped = ps.maybe_step(
        optimizer, clone(params), bad, clone(state), torch.tensor(True), donate=donate
    )
    assert same_bits(skipped, (params, state))


@pytest.mark.parametrize(("name", "settings"), CASES)
@pytest.mark.parametrize("donate", [False, True])
def test_a_clean_maybe_step_is_the_step(name, settings, donate):
    optimizer = ps.from_torch(getattr(OPTIM, name), **settings)
    params, state = ours(optimizer, steps=3)
    expected = optimizer.step(params, grads_at(3, params), state)
    stepped = ps.maybe_step(
        optimizer,
        clone(params),
        grads_at(3, params),
        clone(state),
        torch.tensor(False),
        donate=donate,
    )
    assert same_bits(stepped, expected)


def test_donation_writes_into_the_tensors_given_up():
    adam = ps.from_torch(OPTIM.AdamW)
    params = make_params()
    state = adam.init(params)
    new_params, new_state = ps.maybe_step(
        adam, params, grads_at(0, params), state, torch.tensor(False), donate=True
    )
    assert {t.data_ptr() for t in new_params.values()} == {t.data_ptr() for t in params.values()}
    assert shares_memory(state.slots, new_state.slots)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "RMSprop"])
def test_a_parameter_without_gradient_stays(name):
    optimizer = ps.from_torch(getattr(OPTIM, name), counts="each")
    params = make_params()
    state = optimizer.init(params)
    grads = {**grads_at(0, params), "gain": None}
    new_params, new_state = optimizer.step(params, grads, state)
    assert same_bits(
        (new_params["gain"], slots_of(new_state, "gain")), (params["gain"], slots_of(state, "gain"))
    )
    assert not same_bits(new_params["conv.weight"], params["conv.weight"])


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_a_step_under_vmap_equals_a_loop(name, settings):
    optimizer = ps.from_torch(getattr(OPTIM, name), **settings)
    runs = [
        ours(optimizer, steps=2, params=pytree.tree_map(lambda t, k=k: t * k, make_params()))
        for k in (1.0, 3.0)
    ]
    stacked = pytree.tree_map(lambda *t: torch.stack(t), *runs)
    grads = {n: torch.stack([g, 2 * g]) for n, g in grads_at(7, make_params()).items()}
    params, state = torch.vmap(optimizer.step)(stacked[0], grads, stacked[1])
    # Muon works in bfloat16
    tolerance = {"rtol": 2e-2, "atol": 1e-4} if name == "Muon" else {"rtol": 1e-5, "atol": 1e-6}
    for index, run in enumerate(runs):
        expected = optimizer.step(run[0], {n: g[index] for n, g in grads.items()}, run[1])
        torch.testing.assert_close(
            pytree.tree_leaves(pytree.tree_map(lambda t, i=index: t[i], (params, state))),
            pytree.tree_leaves(expected),
            **tolerance,
        )


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_a_step_differentiates(name, settings):
    optimizer = ps.from_torch(getattr(OPTIM, name), **settings)
    params = {n: p.double() for n, p in make_params().items()}
    _, state = ours(optimizer, steps=2, params=params)
    grads = {n: g.double() for n, g in grads_at(3, params).items()}

    def distance(w):
        stepped, _ = optimizer.step({**params, "gain": w}, {**grads, "gain": w * 3.0}, state)
        return stepped["gain"].sum()

    derivative = torch.func.grad(distance)(params["gain"])
    eps = 1e-6
    numeric = (distance(params["gain"] + eps) - distance(params["gain"] - eps)) / (2 * eps)
    torch.testing.assert_close(derivative.sum(), numeric.detach(), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SGD", "AdamW", "NAdam", "ASGD", "Muon", "Adagrad", "RMSprop"])
def test_a_step_compiles_in_one_graph(name):
    optimizer = ps.from_torch(getattr(OPTIM, name))
    compiled = torch.compile(
        functools.partial(ps.maybe_step, optimizer), fullgraph=True, backend="aot_eager"
    )
    params, state = ours(optimizer, steps=2)
    for step, bad in enumerate([False, True]):
        arguments = (params, grads_at(step, params), state, torch.tensor(bad))
        got, expected = compiled(*arguments), ps.maybe_step(optimizer, *arguments)
        torch.testing.assert_close(
            pytree.tree_leaves(got), pytree.tree_leaves(expected), rtol=2e-3, atol=1e-4
        )


# ---- bad input


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ps.from_torch(OPTIM.LBFGS), ValueError, "evaluates the loss again"),
        (lambda: ps.from_torch(OPTIM.SparseAdam), ValueError, "takes sparse gradients only"),
        (
            lambda: ps.from_torch(OPTIM.AdamW([torch.zeros(1)])),
            TypeError,
            r"an instance of AdamW\. Fix: .* = from_torch_optimizer\(torch_optimizer, model\)`",
        ),
        (lambda: ps.from_torch(torch.nn.Linear), TypeError, "takes a class of torch.optim"),
        (
            lambda: ps.from_torch(OPTIM.SGD, learning_rate=1.0),
            ValueError,
            "SGD has no setting 'learning_rate'. It has: lr, momentum",
        ),
        (lambda: ps.from_torch(OPTIM.SGD, lr=-1.0), ValueError, "Invalid learning rate"),
        (lambda: ps.from_torch(OPTIM.SGD, lr="fast"), TypeError, "lr must be a number"),
        (lambda: ps.from_torch(OPTIM.SGD, lr=torch.ones(2)), TypeError, "lr is a tensor of shape"),
        (
            lambda: ps.from_torch(OPTIM.AdamW, weight_decay=torch.tensor(0.1)),
            TypeError,
            r"only lr may be one.*a number to start from and in_state=\('weight_decay',\)",
        ),
        (
            lambda: ps.from_torch(OPTIM.SGD, momentum=torch.tensor(0.1)),
            TypeError,
            r"only lr may be one.*a number to start from and in_state=\('momentum',\)",
        ),
        (
            lambda: ps.from_torch(OPTIM.AdamW, betas=(torch.tensor(0.9), 0.999)),
            TypeError,
            r"betas holds a tensor of shape.*in_state=\('betas',\)",
        ),
        (
            lambda: ps.from_torch(OPTIM.SGD, make_params(), lr=0.1),
            TypeError,
            "given dict beside lr=0.1. Likely cause: parameters.*Fix: `optimizer = from_torch",
        ),
        *(
            (
                lambda given=given: ps.from_torch(OPTIM.AdamW, given),
                TypeError,
                f"got {type(given).__name__}. Likely cause: parameters.*Fix: `optimizer = from_",
            )
            for given in (
                make_params(),
                [{"params": [torch.zeros(1)]}],
                torch.nn.Linear(1, 1).parameters(),
            )
        ),
        (lambda: ps.from_torch(OPTIM.AdamW, [0.1, 0.2]), TypeError, "got list"),
        (
            lambda: ps.from_torch(OPTIM.SGD, overrides={"*": {"momentun": 0.9}}),
            ValueError,
            r"overrides\['\*'\]: SGD has no setting 'momentun'",
        ),
        (
            lambda: ps.from_transformation(torch.nn.Linear(1, 1)),
            TypeError,
            "takes an \\(init, update\\) pair",
        ),
    ],
)
def test_what_cannot_be_an_optimizer_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_an_override_that_matches_nothing_is_refused():
    with pytest.raises(
        ValueError, match=r"'\*.biass' matches no parameter. The names are: conv.weight"
    ):
        ps.from_torch(OPTIM.SGD, overrides={"*.biass": {"lr": 0.1}}).init(make_params())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda g: {n: t for n, t in g.items() if n != "gain"},
            r"grads does not match params: missing \['gain'\]",
        ),
        (lambda g: {**g, "extra": torch.ones(1)}, r"not in params: \['extra'\]"),
        (lambda g: {**g, "gain": {"deep": torch.ones(1)}}, r"\['gain'\]\['deep'\]"),
        (lambda g: list(g.values()), "grads does not match params"),
        (
            lambda g: {**g, "gain": torch.ones(7)},
            r"grads\['gain'\] has shape \(7,\), its parameter \(1, 1\)",
        ),
    ],
)
def test_gradients_that_do_not_match_the_parameters_are_refused_and_nothing_changes(spoil, message):
    adam = ps.from_torch(OPTIM.AdamW)
    params = make_params()
    state, grads = adam.init(params), spoil(grads_at(0, params))
    with Untouched((params, state, grads)), pytest.raises(ValueError, match=message):
        ps.maybe_step(adam, params, grads, state, torch.tensor(False), donate=True)
    with Untouched((params, state, grads)), pytest.raises(ValueError, match=message):
        ps.unscale_and_step(
            adam, ps.StaticScale(4.0).init(), params, grads, state, max_norm=1.0, donate=True
        )


def test_a_state_of_other_parameters_is_refused():
    adam = ps.from_torch(OPTIM.AdamW)
    params = make_params()
    with pytest.raises(
        ValueError, match=r"opt_state knows the parameters other, params has conv\.weight"
    ):
        adam.step(params, grads_at(0, params), adam.init({"other": torch.ones(1)}))


def test_an_integer_parameter_is_refused():
    with pytest.raises(
        TypeError, match=r"params\['steps'\] has dtype torch\.int64; a parameter is floating"
    ):
        ps.from_torch(OPTIM.SGD).init({"steps": torch.tensor(1)})


# ---- layouts, dtypes, absences


def layouts():
    g = torch.randn(7, 5)
    return {
        "transposed": (torch.randn(5, 7), g.t()),
        "sliced": (torch.randn(7, 5), torch.randn(14, 10)[::2, ::2]),
        "expanded": (torch.randn(7, 5), torch.randn(7, 1).expand(7, 5)),
        "transposed weight": (torch.randn(5, 7).t(), g),
        "expanded weight": (torch.randn(7, 1).expand(7, 5), g),
        "channels last weight": (
            torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            torch.randn(2, 3, 4, 5),
        ),
        "channels last gradient": (
            torch.randn(2, 3, 4, 5),
            torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        ),
    }


@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adagrad", "RMSprop"])
@pytest.mark.parametrize("donate", [False, True])
def test_memory_layout_does_not_matter(name, layout, donate):
    """torch's fused kernels walk weights and gradients by one pointer, whatever their strides."""
    weight, grad = layouts()[layout]
    optimizer = ps.from_torch(
        getattr(OPTIM, name), lr=0.1, **({"momentum": 0.9} if name == "SGD" else {})
    )
    results = []
    for w, g in ((weight, grad), (weight.contiguous().clone(), grad.contiguous().clone())):
        p, state = {"w": w.clone()}, optimizer.init({"w": w})
        for _ in range(2):
            p, state = ps.maybe_step(
                optimizer, p, {"w": g}, state, torch.tensor(False), donate=donate
            )
        results.append(p["w"].contiguous())
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["SGD", "RMSprop"])
def test_a_gradient_in_another_dtype_is_cast_to_its_parameters(name, dtype):
    optimizer = ps.from_torch(getattr(OPTIM, name))
    params = make_params()
    grads = {n: g.to(dtype) for n, g in grads_at(0, params).items()}
    expected = optimizer.step(
        params, {n: g.float() for n, g in grads.items()}, optimizer.init(params)
    )
    assert same_bits(optimizer.step(params, grads, optimizer.init(params)), expected)


def test_dampening_takes_a_parameter_without_gradient():
    sgd = ps.from_torch(OPTIM.SGD, lr=0.1, momentum=0.9, dampening=0.5, counts="each")
    params = make_params()
    state = sgd.init(params)
    stepped, _ = sgd.step(params, {**grads_at(0, params), "gain": None}, state)
    assert same_bits(stepped["gain"], params["gain"])


def test_dampening_before_the_first_step_moves_to_torch():
    params = {"w": torch.ones(1)}
    sgd = ps.from_torch(OPTIM.SGD, lr=0.1, momentum=0.9, dampening=0.5)
    assert sgd.to_state_dict(sgd.init(params))["state"] == {}


@pytest.mark.parametrize("name", ["SGD", "AdamW", "NAdam", "Muon", "Adagrad"])
def test_vmap_over_gradients_alone_equals_a_loop(name):
    optimizer = ps.from_torch(getattr(OPTIM, name))
    params, state = ours(optimizer, steps=1)
    grads = [grads_at(3, params), grads_at(4, params)]
    stacked = pytree.tree_map(lambda *t: torch.stack(t), *grads)
    batched = torch.vmap(lambda g: optimizer.step(params, g, state)[0])(stacked)
    for index, g in enumerate(grads):
        expected = optimizer.step(params, g, state)[0]
        torch.testing.assert_close(
            {n: t[index] for n, t in batched.items()},
            expected,
            rtol=2e-2 if name == "Muon" else 1e-5,
            atol=1e-4,
        )


def test_vmap_over_the_rate_alone_equals_a_loop():
    params = make_params()

    def step(lr):
        optimizer = ps.from_torch(OPTIM.AdamW, lr=lr)
        return optimizer.step(params, grads_at(0, params), INIT)[0]

    INIT = ps.from_torch(OPTIM.AdamW).init(params)
    batched = torch.vmap(step, randomness="same")(torch.tensor([0.1, 0.2]))
    for index, lr in enumerate((0.1, 0.2)):
        torch.testing.assert_close(
            {n: t[index] for n, t in batched.items()}, step(torch.tensor(lr)), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("name", ["SGD", "RMSprop"])
def test_parameters_that_require_a_gradient_grow_no_graph(name):
    optimizer = ps.from_torch(getattr(OPTIM, name))
    params = {n: p.requires_grad_() for n, p in make_params().items()}
    for donate in (False, True):
        stepped, state = ps.maybe_step(
            optimizer,
            params,
            grads_at(0, params),
            optimizer.init(params),
            torch.tensor(False),
            donate=donate,
        )
        assert not any(t.requires_grad for t in pytree.tree_leaves((stepped, state)))


# ---- a first step is each parameter's own


def by_torch(steps, **settings):
    """The parameters after torch's own steps over these gradients, None where there are none."""
    params = {name: torch.zeros(1) for name in steps[0]}
    optimizer = OPTIM.SGD(params.values(), **settings)
    for grads in steps:
        for name, p in params.items():
            p.grad = None if grads[name] is None else torch.full((1,), grads[name])
        optimizer.step()
    return {name: p.detach() for name, p in params.items()}, optimizer


def by_us(optimizer, params, state, steps, **flags):
    for grads in steps:
        grads = {name: None if g is None else torch.full((1,), g) for name, g in grads.items()}
        params, state = ps.maybe_step(optimizer, params, grads, state, torch.tensor(False), **flags)
    return params, state


LATE = [{"a": 1.0, "b": None}, {"a": 1.0, "b": 1.0}, {"a": -2.0, "b": 0.5}, {"a": None, "b": 3.0}]


DAMPED = {"lr": 1.0, "momentum": 0.9, "dampening": 0.5}


@pytest.mark.parametrize("donate", [False, True])
def test_dampening_begins_with_each_parameters_first_gradient(donate):
    sgd = ps.from_torch(OPTIM.SGD, **DAMPED, counts="each")
    params = {"a": torch.zeros(1), "b": torch.zeros(1)}
    params, _ = by_us(sgd, params, sgd.init(params), LATE, donate=donate)
    assert same_bits(params, by_torch(LATE, **DAMPED)[0])


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_dampening_goes_on_after_a_state_dict_of_torch(cut):
    sgd = ps.from_torch(OPTIM.SGD, **DAMPED, counts="each")
    params, theirs = by_torch(LATE[:cut], **DAMPED)
    params, state = by_us(sgd, params, sgd.from_state_dict(theirs.state_dict(), params), LATE[cut:])
    assert same_bits(params, by_torch(LATE, **DAMPED)[0])
    again = sgd.from_state_dict(sgd.to_state_dict(state), params)
    assert same_bits(again.slots, state.slots)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_dampening_goes_on_in_torch(cut):
    sgd = ps.from_torch(OPTIM.SGD, **DAMPED, counts="each")
    params = {"a": torch.zeros(1), "b": torch.zeros(1)}
    params, state = by_us(sgd, params, sgd.init(params), LATE[:cut])
    theirs = OPTIM.SGD(params.values(), **DAMPED)
    theirs.load_state_dict(sgd.to_state_dict(state))
    for grads in LATE[cut:]:
        for name, p in params.items():
            p.grad = None if grads[name] is None else torch.full((1,), grads[name])
        theirs.step()
    assert same_bits({name: p.detach() for name, p in params.items()}, by_torch(LATE, **DAMPED)[0])


def test_a_skipped_first_step_is_still_to_come():
    sgd, params = ps.from_torch(OPTIM.SGD, **DAMPED), {"a": torch.zeros(1)}
    _, skipped = ps.maybe_step(
        sgd, params, {"a": torch.ones(1)}, sgd.init(params), torch.tensor(True)
    )
    assert skipped.applied == 0
    moved, _ = sgd.step(params, {"a": torch.ones(1)}, skipped)
    assert moved["a"] == -1


# ---- lazy negation and conjugation


def views(kind):
    """A tensor of that kind, as autograd gives it, and its values in plain memory."""
    z = torch.tensor([1 + 2j, -3 + 0.5j, 0.25 - 1j])
    if kind == "negative":
        lazy = z.conj().imag
        assert lazy.is_neg()
    else:
        lazy = z.conj()
        assert lazy.is_conj()
    return lazy, lazy.resolve_conj().resolve_neg().clone()


@pytest.mark.parametrize("kind", ["negative", "conjugate"])
@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adagrad", "RMSprop"])
@pytest.mark.parametrize("where", ["grads", "params"])
@pytest.mark.parametrize("donate", [False, True])
def test_a_lazy_view_makes_the_step_of_its_values(kind, name, where, donate):
    optimizer = ps.from_torch(getattr(OPTIM, name))
    lazy, plain = views(kind)
    results = []
    for leaf in (lazy, plain):
        given = {
            "params": {"w": torch.ones_like(plain)},
            "grads": {"w": torch.ones_like(plain)},
            where: {"w": leaf},
        }
        state = optimizer.init(given["params"])
        params, after = ps.maybe_step(
            optimizer, given["params"], given["grads"], state, torch.tensor(False), donate=donate
        )
        results.append((params, after.slots))
    assert same_bits(*results)
    if not donate:
        assert same_bits(lazy.resolve_conj().resolve_neg(), plain)


# ---- where a state is made


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_another_default_device_changes_nothing(name, settings):
    optimizer = ps.from_torch(getattr(OPTIM, name), **settings)
    expected = ours(optimizer, steps=2)
    params, gradients = make_params(), [grads_at(step, make_params()) for step in range(2)]
    with torch.device("meta"):
        optimizer = ps.from_torch(getattr(OPTIM, name), **settings)
        state = optimizer.init(params)
        for grads in gradients:
            params, state = optimizer.step(params, grads, state)
    assert same_bits((params, state), expected)


def test_a_schedule_is_made_on_another_default_device():
    with torch.device("meta"):
        optimizer = ps.from_torch(OPTIM.AdamW, lr=lambda applied: 0.1 / (1 + applied))
        params = {"w": torch.ones(2, device="cpu")}
        assert optimizer.step(params, params, optimizer.init(params))[0]["w"].is_cpu


def test_another_default_dtype_changes_no_count():
    torch.set_default_dtype(torch.float64)
    try:
        optimizer = ps.from_torch(OPTIM.AdamW)
        params = {"w": torch.ones(2, dtype=torch.float32)}
        params, state = optimizer.step(params, params, optimizer.init(params))
    finally:
        torch.set_default_dtype(torch.float32)
    assert state.applied.dtype is torch.int64


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_init_needs_no_memory_beyond_the_state(name, settings):
    """A model that just fits with its state must not fail at start-up."""
    optimizer = ps.from_torch(getattr(OPTIM, name), **settings)
    params = {f"w{index}": torch.zeros(300, 100) for index in range(5)}
    state = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as traced:
        state.append(optimizer.init(params))
    events = [
        event for event in traced.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    most = max(
        itertools.accumulate(
            event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())
        ),
        default=0,
    )
    kept = sum(t.numel() * t.element_size() for t in pytree.tree_leaves(state))
    assert most <= kept + 100_000  # of 120 kB a parameter


def test_init_leaves_the_parameters_alone():
    params = {"w": torch.ones(3, requires_grad=True)}
    params["w"].grad = torch.full((3,), 7.0)
    with Untouched(params):
        state = ps.from_torch(OPTIM.AdamW).init(params)
    assert params["w"].grad.tolist() == [7, 7, 7]
    assert not shares_memory(params, state)


# ---- a rate in the state


def table(rates):
    return lambda applied: torch.tensor(rates).take(applied)


# ---- words


def test_an_optimizer_made_inside_of_a_compiled_function_says_where_to_make_it():
    def step(rate):
        optimizer, params = ps.from_torch(OPTIM.SGD, lr=rate), {"w": torch.ones(2)}
        return optimizer.step(params, params, optimizer.init(params))

    with pytest.raises(Exception, match=r"inside of a compiled function.*in_state=\('lr',\)"):
        torch.compile(step, fullgraph=True, backend="eager")(torch.tensor(0.1))


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (lambda applied: None, "the schedule lr returned None.*a missing `return`"),
        (lambda applied: torch.ones(3), r"the schedule lr returned a tensor torch.float32 \(3,\)"),
        (lambda applied: applied, r"the schedule lr returned a tensor torch.int64 \(\)"),
        (lambda applied: math.cos(applied), "reads the value of the step count.*torch.cos"),
        (
            lambda applied: 0.1 if applied < 5 else 0.01,
            "reads the value of the step count.*torch.where",
        ),
        (lambda applied: [0.1, 0.2][applied], "reads the value of the step count"),
        (lambda applied: 0.1 * int(applied), "reads the value of the step count"),
        (lambda applied: 0.1 * applied.item(), "reads the value of the step count"),
        (lambda applied: 0.1 * applied.tolist(), "reads the value of the step count"),
        (lambda applied: np.cos(applied), "reads the value of the step count"),
        (
            lambda applied: torch.tensor([0.1, 0.2])[applied > 0].sum(),
            "reads the value of the step count",
        ),
    ],
)
@pytest.mark.parametrize("where", ["lr", "overrides"])
def test_a_schedule_that_would_break_later_is_refused_when_made(schedule, message, where):
    given = {"lr": schedule} if where == "lr" else {"overrides": {"*": {"lr": schedule}}}
    with pytest.raises(TypeError, match=message):
        ps.from_torch(OPTIM.AdamW, **given)


def test_a_scheduler_of_torch_is_refused_with_the_way_to_write_one():
    p = torch.nn.Parameter(torch.ones(1))
    scheduler = OPTIM.lr_scheduler.LambdaLR(OPTIM.SGD([p], lr=1.0), lambda n: 0.5)
    for lr in (scheduler, OPTIM.lr_scheduler.LambdaLR):
        with pytest.raises(
            TypeError, match=r"a function of the step count.*lr=schedule_from_torch.*LambdaLR"
        ):
            ps.from_torch(OPTIM.SGD, lr=lr)


@pytest.mark.parametrize(
    "sd",
    [
        {},
        None,
        {"state": None, "param_groups": []},
        {"state": {}, "param_groups": None},
        {"state": {}, "param_groups": [{}]},
        {"state": {0: 3}, "param_groups": [{"params": [0]}]},
    ],
    ids=str,
)
def test_what_is_no_state_dict_is_refused_in_words(sd):
    with pytest.raises(ValueError, match=r"expected \{'state':.*Fix: `optimizer.from_state_dict"):
        ps.from_torch(OPTIM.AdamW).from_state_dict(sd, {"w": torch.ones(2)})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda slot: {**slot, "step": torch.tensor(nan)}, "a step count that is inf or NaN"),
        (
            lambda slot: {**slot, "step": torch.tensor(float("inf"))},
            "a step count that is inf or NaN",
        ),
        (
            lambda slot: {**slot, "exp_avg": slot["exp_avg"] * 1j},
            r"exp_avg of shape \(2,\), torch.complex64, expected",
        ),
        (lambda slot: {**slot, "exp_avg": "no"}, "exp_avg = str; expected a tensor"),
    ],
)
def test_a_slot_that_cannot_be_restored_is_refused(spoil, message):
    adamw, params = ps.from_torch(OPTIM.AdamW), {"w": torch.ones(2)}
    sd = adamw.to_state_dict(adamw.step(params, params, adamw.init(params))[1])
    sd["state"][0] = spoil(sd["state"][0])
    with pytest.raises((ValueError, TypeError), match=message):
        adamw.from_state_dict(sd, params)


def test_a_transformations_state_shares_no_memory_with_what_it_was_given():
    def update(grads, state, params):
        return grads, {
            "last": grads["w"][:2],
            "view": params["w"].view(-1),
            "twice": [state["last"], state["last"]],
        }

    tx = ps.from_transformation((lambda params: {"last": params["w"][:2]}, update))
    params, grads, state = (
        {"w": torch.ones(4)},
        {"w": torch.full((4,), 2.0)},
        {"last": torch.zeros(2)},
    )
    stepped, after = tx.step(params, grads, state)
    assert not shares_memory((params, grads, state), (stepped, after))
    assert not shares_memory(after["twice"][0], after["twice"][1])


# ---- edges that a careless change would break


SGD = ps.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    "tx",
    [
        (lambda p: {"prev": p}, lambda g, s, p: (pytree.tree_map(torch.neg, g), {"prev": p})),
        (lambda p: {"g": p}, lambda g, s, p: (g, {"g": g})),
        (lambda p: {"s": pytree.tree_map(torch.zeros_like, p)}, lambda g, s, p: (g, s)),
    ],
)
def test_a_transformation_gives_fresh_memory(tx):
    optimizer = ps.from_transformation(tx)
    params, grads = {"w": torch.ones(2)}, {"w": torch.ones(2)}
    state = optimizer.init(params)
    assert not shares_memory(params, state)
    assert not shares_memory((params, grads, state), optimizer.step(params, grads, state))


def test_an_update_of_none_leaves_the_parameter_in_fresh_memory():
    optimizer = ps.from_transformation((lambda p: (), lambda g, s, p: ({"w": None}, s)))
    params = {"w": torch.ones(2)}
    stepped, _ = optimizer.step(params, {"w": None}, ())
    assert same_bits(stepped, params)
    assert not shares_memory(stepped, params)


def test_a_transformation_keeps_the_parameters_dtype():
    optimizer = ps.from_transformation((lambda p: (), lambda g, s, p: ({"w": -g["w"].float()}, s)))
    params = {"w": torch.ones(2, dtype=torch.float16)}
    stepped, _ = ps.maybe_step(optimizer, params, params, (), torch.tensor(False))
    assert stepped["w"].dtype is torch.float16


def test_a_transformation_refuses_gradients_of_other_parameters():
    optimizer = ps.from_transformation((lambda p: (), lambda g, s, p: (p, s)))
    with pytest.raises(ValueError, match="grads does not match params"):
        optimizer.step({"w": torch.ones(1)}, {}, ())


def test_a_pair_that_is_not_callable_is_refused():
    with pytest.raises(TypeError, match="pair of functions"):
        ps.from_transformation((1, 2))


def test_one_saved_group_is_taken_in_the_order_of_params():
    overrides = {"conv.weight": {"weight_decay": 0.5}}
    params = {"conv.weight": torch.randn(2, 2), "gain": torch.randn(2, 2)}
    theirs = OPTIM.AdamW([p.clone().requires_grad_() for p in params.values()])
    for p in theirs.param_groups[0]["params"]:
        p.grad = torch.full_like(p, p.sum().item())
    theirs.step()
    state = ps.from_torch(OPTIM.AdamW, overrides=overrides).from_state_dict(
        theirs.state_dict(), params
    )
    means = state.slots["exp_avg"].values()
    for mean, p in zip(means, theirs.param_groups[0]["params"], strict=True):
        assert same_bits(mean, theirs.state[p]["exp_avg"])


def test_the_first_momentum_keeps_the_sign_of_zero():
    sgd = ps.from_torch(OPTIM.SGD, lr=1.0, momentum=0.9)
    params = {"w": torch.zeros(1)}
    _, state = sgd.step(params, {"w": torch.tensor([-0.0])}, sgd.init(params))
    assert same_bits(state.slots["momentum_buffer"]["w"], torch.tensor([-0.0]))


def test_a_state_in_another_layout_trains_the_same():
    weight = torch.randn(3, 4).t()
    adam = ps.from_torch(OPTIM.AdamW, lr=0.1)
    state = adam.init({"w": weight})
    contiguous = pytree.tree_map(lambda t: t.contiguous(), state)
    slots = {key: {"w": torch.randn(4, 3).abs()} for key in contiguous.slots}
    g = torch.randn(4, 3)
    results = [
        adam.step({"w": w}, {"w": g}, state._replace(slots=slots))[0]["w"].contiguous()
        for w in (weight, weight.contiguous())
    ]
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)


def test_two_leaves_of_one_dotted_name_are_refused():
    with pytest.raises(ValueError, match="two leaves have the same dotted name"):
        SGD.init({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}})


def test_dampening_in_an_override_spares_the_first_step():
    sgd = ps.from_torch(OPTIM.SGD, lr=1.0, momentum=0.5, overrides={"b": {"dampening": 0.5}})
    params = {"a": torch.zeros(1), "b": torch.zeros(1)}
    stepped, _ = sgd.step(params, {"a": torch.ones(1), "b": torch.ones(1)}, sgd.init(params))
    assert (stepped["a"], stepped["b"]) == (-1, -1)


def test_applied_is_the_largest_step_count():
    sd = {
        "state": {
            0: {"step": torch.tensor(3.0), "exp_avg": torch.zeros(1), "exp_avg_sq": torch.zeros(1)},
            1: {"step": torch.tensor(5.0), "exp_avg": torch.zeros(1), "exp_avg_sq": torch.zeros(1)},
        },
        "param_groups": [{"params": [0, 1]}],
    }
    assert (
        ps.from_torch(OPTIM.Adam)
        .from_state_dict(sd, {"a": torch.ones(1), "b": torch.ones(1)})
        .applied
        == 5
    )


def test_a_state_dict_has_the_rate_as_it_is_now():
    sgd = ps.from_torch(OPTIM.SGD, lr=lambda applied: 0.5**applied)
    state = sgd.init({"w": torch.ones(1)})
    assert (
        sgd.to_state_dict(state._replace(applied=torch.tensor(2)))["param_groups"][0]["lr"] == 0.25
    )


def test_an_inf_gradient_stays_inf_in_a_narrower_parameter():
    sgd = ps.from_torch(OPTIM.SGD, lr=1.0)
    params = {"w": torch.ones(1, dtype=torch.float16)}
    stepped, _ = sgd.step(params, {"w": torch.tensor([math.inf])}, sgd.init(params))
    assert stepped["w"] == -math.inf


def test_a_long_list_of_names_says_how_many_more():
    names = [f"p{i}" for i in range(7)]
    with pytest.raises(ValueError, match="and 2 more"):
        SGD.step({n: torch.ones(1) for n in names}, {}, SGD.init({n: torch.ones(1) for n in names}))


def test_a_differentiable_optimizer_keeps_the_graph():
    sgd = ps.from_torch(OPTIM.SGD, lr=0.5, differentiable=True)
    w = torch.tensor([3.0], requires_grad=True)
    state = sgd.init({"w": w})
    for step in (
        lambda: sgd.step({"w": w}, {"w": w * 2}, state)[0],
        lambda: ps.maybe_step(sgd, {"w": w}, {"w": w * 2}, state, False)[0],
    ):
        (derivative,) = torch.autograd.grad(step()["w"].sum(), w)
        assert derivative == 0


@pytest.mark.parametrize("name", ["SGD", "RMSprop"])
def test_a_step_outside_of_maybe_step_grows_no_graph(name):
    optimizer = ps.from_torch(getattr(OPTIM, name))
    w = torch.ones(2, requires_grad=True)
    stepped, state = optimizer.step({"w": w}, {"w": w.detach() * 2}, optimizer.init({"w": w}))
    assert not any(t.requires_grad for t in pytree.tree_leaves((stepped, state)))


@pytest.mark.parametrize("cls", [OPTIM.AdamW, OPTIM.RMSprop], ids=["fused", "formula"])
def test_the_state_of_a_model_of_another_shape_is_refused(cls):
    optimizer = ps.from_torch(cls)
    params = {"w": torch.ones(300)}
    with pytest.raises(
        ValueError,
        match=r"(exp_avg|square_avg) of w is torch.float32 \(2,\) on cpu; "
        r"expected torch.float32 \(300,\)",
    ):
        ps.maybe_step(
            optimizer,
            params,
            {"w": torch.ones(300)},
            optimizer.init({"w": torch.ones(2)}),
            torch.tensor(False),
        )


@pytest.mark.parametrize(
    ("cls", "other"),
    [(OPTIM.AdamW, OPTIM.SGD), (OPTIM.RMSprop, OPTIM.Adagrad), (OPTIM.RMSprop, OPTIM.SGD)],
)
def test_the_state_of_another_class_is_refused(cls, other):
    optimizer, params = ps.from_torch(cls), {"w": torch.ones(3)}
    with pytest.raises(ValueError, match=rf"opt_state has no .* that {cls.__name__} keeps"):
        ps.maybe_step(
            optimizer, params, params, ps.from_torch(other).init(params), torch.tensor(False)
        )
    with pytest.raises(
        TypeError, match=r"opt_state is dict. Fix: `opt_state = optimizer.init\(params\)`"
    ):
        optimizer.step(params, params, {})


def test_the_state_of_another_class_is_refused_by_sgd():
    sgd, params = ps.from_torch(OPTIM.SGD, momentum=0.9), {"w": torch.ones(3)}
    with pytest.raises(ValueError, match="opt_state has no momentum_buffer that SGD keeps"):
        sgd.step(params, params, ps.from_torch(OPTIM.AdamW).init(params))


def test_a_refused_state_leaves_no_gradient_on_donated_parameters():
    sgd = ps.from_torch(OPTIM.SGD, lr=0.1, momentum=0.9, foreach=False)
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    state, grads = sgd.init(params), {"a": torch.ones(2), "b": torch.ones(2)}
    state.slots["momentum_buffer"]["b"] = ()
    with pytest.raises(ValueError, match="opt_state has no momentum_buffer that SGD keeps"):
        ps.maybe_step(sgd, params, grads, state, torch.tensor(False), donate=True)
    assert params["a"].grad is None


@pytest.mark.parametrize(
    ("grad", "error", "message"),
    [
        (torch.ones(2, dtype=torch.int64), TypeError, r"grads\['w'\] has dtype torch.int64"),
        (1.0, TypeError, r"grads\['w'\] is float"),
        (
            torch.ones(2, dtype=torch.complex64),
            ValueError,
            r"grads\['w'\] has dtype torch.complex64, its parameter torch.float32",
        ),
        (
            torch.ones(2, device="meta"),
            ValueError,
            r"grads\['w'\] has device meta, its parameter cpu",
        ),
    ],
)
def test_a_gradient_that_could_not_be_added_to_its_parameter_is_refused(grad, error, message):
    params = {"w": torch.ones(2)}
    with pytest.raises(error, match=message):
        ps.maybe_step(SGD, params, {"w": grad}, SGD.init(params), torch.tensor(False))


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad", "RMSprop", "NAdam"])
@pytest.mark.parametrize("batched", ["state", "params"])
def test_vmap_over_one_part_alone_equals_a_loop(name, batched):
    settings = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = ps.from_torch(getattr(OPTIM, name), weight_decay=0.1, **settings)
    params = {"w": torch.arange(1.0, 4.0)}
    grads = {"w": torch.tensor([0.1, -0.2, 0.3])}
    _, state = optimizer.step(params, grads, optimizer.init(params))
    given = state if batched == "state" else params
    stacked = pytree.tree_map(
        lambda t: (
            torch.stack([t, t * 2]) if t.is_floating_point() and t.ndim else torch.stack([t, t])
        ),
        given,
    )

    def step(part):
        return (
            optimizer.step(params, grads, part)[0]
            if batched == "state"
            else optimizer.step(part, grads, state)[0]
        )

    out = torch.vmap(step)(stacked)["w"]
    for index in range(2):
        expected = step(pytree.tree_map(lambda t, i=index: t[i], stacked))["w"]
        torch.testing.assert_close(out[index], expected, rtol=1e-5, atol=1e-6)


def test_patterns_that_say_the_same_are_one_group():
    no_decay = {"weight_decay": 0.0}
    params = {
        "fc.weight": torch.ones(2, 2),
        "fc.bias": torch.ones(2),
        "norm.weight": torch.ones(2),
        "norm.bias": torch.ones(2),
    }
    optimizer = ps.from_torch(OPTIM.AdamW, overrides={"*.bias": no_decay, "norm.*": no_decay})
    names, groups = list(params), optimizer.to_state_dict(optimizer.init(params))["param_groups"]
    assert [len(group["params"]) for group in groups] == [1, 3]
    theirs = OPTIM.AdamW(
        [
            {"params": [("fc.weight", params["fc.weight"])]},
            {"params": [(n, params[n]) for n in names[1:]], **no_decay},
        ]
    )
    assert groups == theirs.state_dict()["param_groups"]


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize(("name", "settings"), CASES)
def test_an_optimizer_can_be_copied_also_after_a_step(name, settings, donate):
    optimizer = ps.from_torch(getattr(OPTIM, name), lr=0.05, **settings)
    scaler, params = ps.DynamicScale(init_scale=4.0).init(), make_params()

    def two_steps(optimizer):
        stepped, state = clone(params), optimizer.init(params)
        for step in range(2):
            out = ps.unscale_and_step(
                optimizer, scaler, stepped, grads_at(step, params), state, donate=donate
            )
            stepped, state = out.params, out.opt_state
        return stepped, state

    expected = two_steps(optimizer)
    assert same_bits(two_steps(copy.deepcopy(optimizer)), expected)
    assert same_bits(two_steps(copy.copy(optimizer)), expected)
    assert same_bits(two_steps(copy.deepcopy({"mine": [optimizer]})["mine"][0]), expected)


def test_a_rate_given_as_a_tensor_is_copied():
    lr = torch.tensor(1.0)
    sgd, params = ps.from_torch(OPTIM.SGD, lr=lr), {"w": torch.zeros(1)}
    lr.fill_(100.0)
    assert sgd.step(params, {"w": torch.ones(1)}, sgd.init(params))[0]["w"] == -1


RATES = {
    "number": {},
    "schedule": {"lr": lambda applied: 0.1 / (1 + applied)},
    "in the state": {"in_state": ("lr",)},
    "overridden": {"overrides": {"head.*": {"lr": 0.01}}},
}


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize(
    ("name", "settings", "rates"),
    [
        pytest.param(*case.values, rate, id=f"{case.id}-{kind}")
        for case in CASES
        for kind, rate in RATES.items()
        if (case.values[0], kind) != ("Rprop", "in the state")  # refused
    ],
)
def test_steps_in_a_row_with_overflows_equal_their_parts_bit_for_bit(name, settings, donate, rates):
    """By then what is static is remembered, and finite gradients are not chosen for."""
    optimizer = ps.from_torch(getattr(OPTIM, name), **{"lr": 0.05, **settings, **rates})
    scaler = ps.DynamicScale(init_scale=4.0).init()
    params = make_params()
    theirs, state = clone(params), optimizer.init(params)
    their_state = clone(state)
    for step in range(6):
        grads = grads_at(step, params)
        if step in (2, 4):
            grads["gain"] = grads["gain"] / 0
        whole, found_inf = ps.unscale_and_check(scaler, grads)
        theirs, their_state = ps.maybe_step(optimizer, theirs, whole, their_state, found_inf)
        out = ps.unscale_and_step(optimizer, scaler, params, grads, state, donate=donate)
        params, state = out.params, out.opt_state
        assert same_bits((params, state, out.found_inf), (theirs, their_state, found_inf))


@pytest.mark.parametrize("name", CAPTURABLE)
def test_a_donated_step_of_finite_gradients_makes_no_second_state(name):
    optimizer = ps.from_torch(getattr(OPTIM, name), lr=0.05)
    scaler, params = ps.DynamicScale(init_scale=4.0).init(), make_params()
    state = optimizer.init(params)
    for step in range(3):
        places = [t.data_ptr() for t in pytree.tree_leaves((params, state.slots))]
        out = ps.unscale_and_step(
            optimizer, scaler, params, grads_at(step, params), state, donate=True
        )
        params, state = out.params, out.opt_state
    assert places == [t.data_ptr() for t in pytree.tree_leaves((params, state.slots))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_a_rate_that_is_data_begins_the_step_sizes_of_a_single_number(dtype):
    rprop = ps.from_torch(OPTIM.Rprop, lr=lambda applied: torch.tensor(0.1))
    number, row = torch.ones((), dtype=dtype), torch.ones(1, dtype=dtype)
    params = {"number": number, "row": row}
    stepped, state = rprop.step(params, params, rprop.init(params))
    assert same_bits(stepped["number"].reshape(1), stepped["row"])
    assert type(state.slots["step_size"]["number"]) is torch.Tensor


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, "complex") for name in ("Adagrad", *CAPTURABLE) if name not in ("NAdam", "RAdam")]
    + [("Adagrad", "sparse")],
)
def test_a_formula_reads_nothing_of_what_no_kernel_takes(name, kind):
    optimizer = ps.from_torch(getattr(OPTIM, name), lr=0.05)
    params = {"w": torch.ones(3, dtype=torch.complex64 if kind == "complex" else torch.float32)}
    grads = params if kind == "complex" else {"w": params["w"].to_sparse()}
    state = optimizer.init(params)
    assert_sync_free(optimizer.step, params, grads, state)


class Layer(NamedTuple):
    w: torch.Tensor
    b: torch.Tensor


@pytest.mark.parametrize(
    "nested",
    [
        {"a": Layer(torch.ones(2), torch.ones(1)), "z": torch.ones(3)},
        {"a": OrderedDict(w=torch.ones(2), b=torch.ones(1)), "z": torch.ones(3)},
    ],
)
def test_a_dict_of_other_containers_steps_as_its_leaves(nested):
    optimizer = ps.from_torch(torch.optim.AdamW, lr=0.1)
    params, state = optimizer.step(nested, nested, optimizer.init(nested))
    flat = dict(enumerate(tensors(nested)))
    expected, _ = optimizer.step(flat, flat, optimizer.init(flat))
    assert type(params["a"]) is type(nested["a"])
    assert same_bits(tensors(params), list(expected.values()))
    assert list(state.slots) == ["exp_avg", "exp_avg_sq"]


@pytest.mark.parametrize(
    "moving",
    [
        {"lr": lambda applied: 0.1 * 0.5**applied},
        {"lr": torch.tensor(0.1)},
        {"in_state": ("lr",)},
        {"overrides": {"gain": {"lr": lambda applied: torch.full((), 0.1)}}},
    ],
)
def test_a_rate_that_torchs_lists_refuse_as_a_tensor_reaches_them_as_a_number(moving):
    expected, _ = ours(ps.from_torch(OPTIM.AdamW, **moving))
    got, _ = ours(ps.from_torch(OPTIM.AdamW, foreach=True, **moving))
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_a_negative_rate_is_refused_also_where_it_is_in_the_state():
    with pytest.raises(ValueError, match="learning rate"):
        ps.from_torch(torch.optim.AdamW, lr=-1.0, in_state=("lr",))


def test_a_flag_that_is_named_with_its_default_changes_nothing():
    params = {"w": torch.randn(300)}
    results = []
    for named in ({}, {"differentiable": False}, {"foreach": None}):
        optimizer = ps.from_torch(OPTIM.AdamW, lr=0.1, **named)
        state = optimizer.init(params)
        for _ in range(3):
            new, state = optimizer.step(params, params, state)
        results.append((new, state))
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])
