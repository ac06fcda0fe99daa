"""Optimizers as pure functions, against the real ones."""

import copy
import functools
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
    with_its_double,
)
from torch.profiler import ProfilerActivity, profile

import purescale as ps
from purescale._torch import private
from purescale.testing import assert_sync_free, assert_vmap_equals_loop

OPTIM = torch.optim

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
each_case = pytest.mark.parametrize(("name", "settings"), CASES)
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


def agree(ours, theirs):
    """To 1e-6 of the largest element: one that cancels has the rounding of its terms."""
    for a, b in zip(tensors(ours), tensors(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6 * float(b.double().abs().max()))


@each_case
def test_twenty_steps_equal_the_real_optimizer(name, settings, way):
    """Bit for bit by torch's kernels, to 1e-6 by a formula, with torch's counts in float64, as a
    formula has them.
    """
    formula = has_formula_alone(name, settings, way)
    count = torch.float64 if formula else torch.float32
    expected, optimizer = real(name, settings, implementation(name, settings, way), count=count)
    params, state = ours(ps.from_torch(getattr(OPTIM, name), **settings))
    entries = [optimizer.state[p].items() for p in optimizer.param_groups[0]["params"]]
    theirs = [
        {k: v.detach() if v.ndim else v.detach().float() for k, v in entry if v is not None}
        for entry in entries
    ]
    slots = [slots_of(state, name, theirs[0]) for name in params]
    if formula:
        assert [slot.keys() for slot in slots] == [slot.keys() for slot in theirs]
        agree((params, slots), (expected, theirs))
    else:
        assert same_bits((params, slots), (expected, theirs))


@pytest.mark.parametrize("name", FUSED)
def test_a_named_flag_chooses_the_kernel_or_the_formula(name, monkeypatch):
    """The formula is also what there is without torch's kernels."""
    of = functools.partial(ps.from_torch, getattr(OPTIM, name), lr=0.05)
    by_kernel = ours(of())
    flags = {"foreach": False}, {"foreach": True}, {"fused": False}, {"differentiable": True}
    by_flag = [ours(of(**flag)) for flag in flags]
    for flag in ({"fused": True}, {"foreach": None}, {"differentiable": False}):
        assert same_bits(ours(of(**flag)), by_kernel)
    monkeypatch.setattr(private, "fused_kernel", lambda name: None)
    by_formula = ours(of())
    torch.testing.assert_close(by_formula, by_kernel, rtol=1e-5, atol=1e-6)
    assert not same_bits(by_formula, by_kernel)
    assert all(same_bits(result, by_formula) for result in by_flag[:3])
    torch.testing.assert_close(by_flag[3], by_formula, rtol=1e-6, atol=1e-7)  # leaf by leaf


# torch's own Adagrad
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
def test_sparse_gradients_equal_the_real_optimizer(name):
    """Here they are made dense, without a read."""
    table = torch.randn(5, 3)
    grad = torch.sparse_coo_tensor(
        torch.tensor([[1, 1, 4]]), torch.randn(3, 3), (5, 3), check_invariants=True
    )
    p = table.clone().requires_grad_()
    p.grad = grad
    getattr(OPTIM, name)([p], lr=0.1, foreach=False).step()
    optimizer = ps.from_torch(getattr(OPTIM, name), lr=0.1)
    call = {"t": table}, {"t": grad}, optimizer.init({"t": table})
    params, _ = assert_sync_free(optimizer.step, *call)
    torch.testing.assert_close(params["t"], p.detach(), rtol=1e-6, atol=1e-7)


@each_case
def test_a_step_is_pure_and_keeps_the_structure_of_the_state(name, settings):
    """Also of a first step; and it reads no value."""
    optimizer, params = ps.from_torch(getattr(OPTIM, name), **settings), make_params()
    state = optimizer.init(params)
    for step in range(2):
        grads = grads_at(step, params)
        with Untouched((params, grads, state)):
            new = optimizer.step(params, grads, state)
        assert not shares_memory((params, grads, state), new)
        assert same_bits(optimizer.step(params, grads, state), new)
        facts = [[(t.shape, t.dtype) for t in pytree.tree_leaves(s)] for s in (state, new[1])]
        assert pytree.tree_structure(state) == pytree.tree_structure(new[1])
        assert facts[0] == facts[1]
        params, state = new
    assert_sync_free(ps.maybe_step, optimizer, params, grads, state, torch.tensor(False))


@each_case
def test_copies_of_an_optimizer_and_one_made_for_another_default_device_make_its_steps(
    name, settings
):
    params, grads = make_params(), grads_at(0, make_params())

    def two_steps(optimizer):
        stepped, state = params, optimizer.init(params)
        for _ in range(2):
            stepped, state = optimizer.step(stepped, grads, state)
        return stepped, state

    optimizer = ps.from_torch(getattr(OPTIM, name), **settings)
    expected = two_steps(optimizer)
    assert same_bits(two_steps(copy.copy(optimizer)), expected)
    assert same_bits(two_steps(copy.deepcopy({"mine": [optimizer]})["mine"][0]), expected)
    with torch.device("meta"):
        assert same_bits(two_steps(ps.from_torch(getattr(OPTIM, name), **settings)), expected)


RATES = {
    "number": {},
    "schedule": {"lr": lambda applied: 0.1 / (1 + applied)},
    "in the state": {"in_state": ("lr",)},
    "overridden": {"overrides": {"head.*": {"lr": 0.01}}},
}


@each_case
@pytest.mark.parametrize("donate", [False, True])
def test_a_step_by_hand_is_the_step_or_the_old_state_bit_for_bit(name, settings, donate):
    """Also of a step whose plan was found, and of finite gradients, which are not chosen for."""
    scaler = ps.DynamicScale(init_scale=4.0).init()
    for kind, rate in RATES.items():
        if (name, kind) == ("Rprop", "in the state"):  # refused
            continue
        optimizer = ps.from_torch(getattr(OPTIM, name), **{"lr": 0.05, **settings, **rate})
        params = make_params()
        expected = params, optimizer.init(params)
        by_flag, by_scale = clone(expected), clone(expected)
        for step in range(4):
            grads, bad = grads_at(step, params), step % 2 == 1
            if bad:
                grads["gain"] = grads["gain"] / 0
            else:
                expected = optimizer.step(expected[0], grads, expected[1])
            scaled = {key: 4 * grad for key, grad in grads.items()}
            call = optimizer, scaler, by_scale[0], scaled, by_scale[1]
            *by_scale, found_inf = ps.unscale_and_step(*call, donate=donate)[:3]
            call = optimizer, by_flag[0], grads, by_flag[1], torch.tensor(bad)
            by_flag = ps.maybe_step(*call, donate=donate)
            assert found_inf == bad
            assert same_bits(by_flag, expected)
            assert same_bits(tuple(by_scale), expected)


@pytest.mark.parametrize("name", ["AdamW", *CAPTURABLE])
def test_a_donated_step_of_finite_gradients_makes_no_second_state(name):
    optimizer = ps.from_torch(getattr(OPTIM, name), lr=0.05)
    scaler, params = ps.DynamicScale(init_scale=4.0).init(), make_params()
    state = optimizer.init(params)
    places = [t.data_ptr() for t in pytree.tree_leaves((params, state.slots))]
    for step in range(2):
        grads = grads_at(step, params)
        out = ps.unscale_and_step(optimizer, scaler, params, grads, state, donate=True)
        params, state = out.params, out.opt_state
    assert places == [t.data_ptr() for t in pytree.tree_leaves((params, state.slots))]


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad", "RMSprop", "NAdam", "Muon"])
@pytest.mark.parametrize("batched", ["params", "grads", "state"])
def test_vmap_over_one_part_alone_equals_a_loop(name, batched):
    settings = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = ps.from_torch(getattr(OPTIM, name), weight_decay=0.1, **settings)
    params, state = ours(optimizer, steps=1)
    parts = {"params": params, "grads": grads_at(3, params), "state": state}
    close = {"rtol": 2e-2, "atol": 1e-4} if name == "Muon" else {"rtol": 1e-5, "atol": 1e-6}
    assert_vmap_equals_loop(
        lambda part: optimizer.step(*{**parts, batched: part}.values())[0],
        with_its_double(parts[batched]),
        **close,
    )


def test_vmap_over_the_rate_alone_equals_a_loop():
    params, grads = make_params(), grads_at(0, make_params())
    state = ps.from_torch(OPTIM.AdamW).init(params)
    assert_vmap_equals_loop(
        lambda lr: ps.from_torch(OPTIM.AdamW, lr=lr).step(params, grads, state)[0],
        torch.tensor([0.1, 0.2]),
        **{"rtol": 1e-4, "atol": 1e-5},
    )


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adafactor", "Rprop"])
def test_init_needs_no_memory_beyond_the_state_and_leaves_the_parameters_alone(name):
    """A model that just fits with its state must not fail at start-up."""
    optimizer = ps.from_torch(getattr(OPTIM, name))
    params = {f"w{index}": torch.zeros(300, 100, requires_grad=True) for index in range(5)}
    params["w0"].grad = torch.full((300, 100), 7.0)
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
    with Untouched(params), profiler as traced:
        state = optimizer.init(params)
    events = [e for e in traced.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    kept = sum(t.numel() * t.element_size() for t in pytree.tree_leaves(state))
    assert max(itertools.accumulate(changes), default=0) <= kept + 100_000  # of 120 kB a parameter
    assert (params["w0"].grad == 7).all()
    assert not shares_memory(params, state)


sgd, adamw = (functools.partial(ps.from_torch, cls) for cls in (OPTIM.SGD, OPTIM.AdamW))
TYPO = {"*": {"momentun": 0.9}}, {"*.biass": {"lr": 0.1}}
REFUSED = [
    (lambda: ps.from_torch(OPTIM.LBFGS), "evaluates the loss again"),
    (lambda: ps.from_torch(OPTIM.SparseAdam), "takes sparse gradients only"),
    (lambda: ps.from_torch(OPTIM.AdamW([torch.zeros(1)])), "an instance of AdamW.*from_torch_opti"),
    (lambda: ps.from_torch(torch.nn.Linear), "takes a class of torch.optim"),
    (lambda: sgd(learning_rate=1.0), "no setting 'learning_rate'. It has: lr"),
    (lambda: sgd(lr=-1.0), "Invalid learning rate"),
    (lambda: adamw(lr=-1.0, in_state=("lr",)), "nvalid learning rate"),
    (lambda: sgd(lr="fast"), "lr must be a number"),
    (lambda: sgd(lr=torch.ones(2)), "lr is a tensor of shape"),
    (lambda: sgd(momentum=torch.tensor(0.1)), r"only lr.*\('momentum',\)"),
    (lambda: adamw(betas=(ONE[0], 0.999)), r"betas holds a tensor of shape.*in_state=\('betas',\)"),
    (lambda: sgd(make_params(), lr=0.1), "multiple values for argument 'lr'"),
    (lambda: adamw([{"params": []}]), "got list. .*parameters.*from_torch"),
    (lambda: adamw([0.1, 0.2]), "got list"),
    (lambda: sgd(lr=OPTIM.lr_scheduler.StepLR), "lr=schedule_from_torch"),
    (lambda: sgd(overrides=TYPO[0]), r"overrides\['\*'\]: SGD has no setting 'momentun'"),
    (
        lambda: sgd(overrides=TYPO[1]).init(make_params()),
        r"'\*.biass' matches no parameter. The names are: conv.weight",
    ),
    (lambda: adamw(counts="all"), r"counts is 'all', expected \"one\" or"),
    (lambda: SGD.init({"steps": torch.tensor(1)}), r"params\['steps'\] has dtype torch\.int64"),
    (lambda: SGD.init({"a.b": ONE, "a": {"b": ONE}}), "two leaves have the same dotted name"),
    (lambda: SGD.step(ONES, ONES, {}), r"opt_state is dict. Fix: `opt_state = optimizer.init\(par"),
    (
        lambda: SGD.step(ONES, ONES, SGD.init({"other": ONE})),
        "opt_state knows the parameters other, params has w",
    ),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_what_cannot_be_an_optimizer_or_its_state_is_refused(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


GRADIENTS = [
    ({}, r"grads does not match params: missing \['w'\]"),
    ({"w": torch.ones(2), "extra": torch.ones(1)}, r"not in params: \['extra'\]"),
    ({"w": {"deep": torch.ones(1)}}, r"\['w'\]\['deep'\]"),
    ([torch.ones(2)], "grads does not match params"),
    ({"w": torch.ones(7)}, r"grads\['w'\] has shape \(7,\), its parameter \(2,\)"),
    ({"w": torch.ones(2, dtype=torch.int64)}, r"grads\['w'\] has dtype torch.int64"),
    ({"w": 1.0}, r"grads\['w'\] is float"),
    ({"w": torch.ones(2, dtype=torch.complex64)}, "complex64, its parameter torch.float32"),
    ({"w": torch.ones(2, device="meta")}, r"grads\['w'\] has device meta, its parameter cpu"),
]


@pytest.mark.parametrize(("grads", "message"), GRADIENTS)
def test_gradients_that_do_not_match_the_parameters_are_refused_and_nothing_changes(grads, message):
    adam, params = ps.from_torch(OPTIM.AdamW), {"w": torch.ones(2)}
    state, scaler = adam.init(params), ps.StaticScale(4.0).init()
    for step in (
        lambda: ps.maybe_step(adam, params, grads, state, torch.tensor(False), donate=True),
        lambda: ps.unscale_and_step(adam, scaler, params, grads, state, 1.0, donate=True),
    ):
        with Untouched((params, state)), pytest.raises((TypeError, ValueError), match=message):
            step()


def layouts():
    g, image = torch.randn(7, 5), torch.randn(2, 3, 4, 5)
    channels_last = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    return {
        "transposed": (torch.randn(5, 7), g.t()),
        "sliced": (torch.randn(7, 5), torch.randn(14, 10)[::2, ::2]),
        "expanded": (torch.randn(7, 5), torch.randn(7, 1).expand(7, 5)),
        "transposed weight": (torch.randn(5, 7).t(), g),
        "expanded weight": (torch.randn(7, 1).expand(7, 5), g),
        "channels last weight": (channels_last, image),
        "channels last gradient": (image, channels_last),
    }


@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adagrad", "RMSprop"])
def test_memory_layout_does_not_matter(name, layout):
    """torch's fused kernels walk weights, slots and gradients by one pointer, whatever their
    strides.
    """
    weight, grad = layouts()[layout]
    momentum = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = ps.from_torch(getattr(OPTIM, name), lr=0.1, **momentum)
    start = torch.rand(weight.shape)  # in the layout of neither
    results = []
    for donate in (False, True):
        for w, g in ((weight, grad), (weight.contiguous().clone(), grad.contiguous().clone())):
            p, state = {"w": w.clone()}, optimizer.init({"w": w})
            state = state._replace(slots={key: {"w": start.clone()} for key in state.slots})
            for _ in range(2):
                flag = torch.tensor(False)
                p, state = ps.maybe_step(optimizer, p, {"w": g}, state, flag, donate=donate)
            results.append(p["w"].contiguous())
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["SGD", "RMSprop"])
def test_a_gradient_in_another_dtype_is_cast_to_its_parameters(name):
    optimizer, params = ps.from_torch(getattr(OPTIM, name)), make_params()
    state = optimizer.init(params)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        grads = {n: g.to(dtype) for n, g in grads_at(0, params).items()}
        expected = optimizer.step(params, {n: g.float() for n, g in grads.items()}, state)
        assert same_bits(optimizer.step(params, grads, state), expected)
    half = {"w": torch.ones(1, dtype=torch.float16)}  # of which inf stays, and 1e6 is not
    for grad, is_finite in ((math.inf, False), (1e6, True)):
        stepped, _ = optimizer.step(half, {"w": torch.tensor([grad])}, optimizer.init(half))
        assert stepped["w"].isfinite() == is_finite


def views(kind):
    """A tensor of that kind, as autograd gives it, and its values in plain memory."""
    z = torch.tensor([1 + 2j, -3 + 0.5j, 0.25 - 1j])
    lazy = z.conj().imag if kind == "negative" else z.conj()
    assert lazy.is_neg() or lazy.is_conj()
    return lazy, lazy.resolve_conj().resolve_neg().clone()


@pytest.mark.parametrize("kind", ["negative", "conjugate"])
@pytest.mark.parametrize("name", ["AdamW", "RMSprop"])
@pytest.mark.parametrize("where", ["grads", "params"])
@pytest.mark.parametrize("donate", [False, True])
def test_a_lazy_view_makes_the_step_of_its_values(kind, name, where, donate):
    optimizer = ps.from_torch(getattr(OPTIM, name))
    lazy, plain = views(kind)
    results = []
    for leaf in (lazy, plain):
        one = {"w": torch.ones_like(plain)}
        params, grads = ({"w": leaf}, one) if where == "params" else (one, {"w": leaf})
        state, flag = optimizer.init(params), torch.tensor(False)
        stepped, after = ps.maybe_step(optimizer, params, grads, state, flag, donate=donate)
        results.append((stepped, after.slots))
    assert same_bits(*results)
    if not donate:
        assert same_bits(lazy.resolve_conj().resolve_neg(), plain)


def by_torch(steps, **settings):
    """The parameters after torch's own steps over these gradients, None where there are none."""
    params = {name: torch.zeros(1) for name in "ab"}
    optimizer = OPTIM.SGD(params.values(), **settings)
    torchs_steps(optimizer, params, steps)
    return {name: p.detach() for name, p in params.items()}, optimizer


def torchs_steps(optimizer, params, steps):
    for grads in steps:
        for name, p in params.items():
            p.grad = None if grads[name] is None else torch.full((1,), grads[name])
        optimizer.step()


def by_us(optimizer, params, state, steps, **flags):
    for grads in steps:
        grads = {name: None if g is None else torch.full((1,), g) for name, g in grads.items()}
        params, state = ps.maybe_step(optimizer, params, grads, state, torch.tensor(False), **flags)
    return params, state


LATE = [{"a": 1.0, "b": None}, {"a": 1.0, "b": 1.0}, {"a": -2.0, "b": 0.5}, {"a": None, "b": 3.0}]
DAMPED = {"lr": 1.0, "momentum": 0.9, "dampening": 0.5}


@pytest.mark.parametrize("cut", [0, 1, 2, 3])
def test_dampening_begins_with_each_parameters_first_gradient(cut):
    """Here, and from and to a state dict of torch's after some steps."""
    sgd = ps.from_torch(OPTIM.SGD, **DAMPED, counts="each")
    expected, _ = by_torch(LATE, **DAMPED)
    params, theirs = by_torch(LATE[:cut], **DAMPED)
    state = sgd.from_state_dict(theirs.state_dict(), params)
    params, state = by_us(sgd, params, state, LATE[cut:])
    assert same_bits(params, expected)
    assert same_bits(sgd.from_state_dict(sgd.to_state_dict(state), params).slots, state.slots)

    params = {"a": torch.zeros(1), "b": torch.zeros(1)}
    state = sgd.init(params)
    assert sgd.to_state_dict(state)["state"] == {}
    params, state = by_us(sgd, params, state, LATE[:cut], donate=True)
    theirs = OPTIM.SGD(params.values(), **DAMPED)
    theirs.load_state_dict(sgd.to_state_dict(state))
    torchs_steps(theirs, params, LATE[cut:])
    assert same_bits({name: p.detach() for name, p in params.items()}, expected)


def test_dampening_begins_with_the_first_step_that_is_not_skipped_also_in_an_override():
    sgd = ps.from_torch(OPTIM.SGD, lr=1.0, momentum=0.5, overrides={"b": {"dampening": 0.5}})
    params, ones = {"a": torch.zeros(1), "b": torch.zeros(1)}, {"a": ONE, "b": ONE}
    _, skipped = ps.maybe_step(sgd, params, ones, sgd.init(params), torch.tensor(True))
    assert skipped.applied == 0
    stepped, _ = sgd.step(params, ones, skipped)
    assert (stepped["a"], stepped["b"]) == (-1, -1)


def test_dampening_begins_within_a_run_as_in_torchs():
    """The first step is that of the optimizer without it."""
    weight, grads = torch.randn(33), [torch.randn(33) for _ in range(4)]
    theirs = weight.clone().requires_grad_()
    sgd = torch.optim.SGD([theirs], lr=0.1, momentum=0.5)
    optimizer = ps.from_torch(torch.optim.SGD, lr=0.1, momentum=0.5)
    params, state = {"w": weight}, optimizer.init({"w": weight})
    for step, grad in enumerate(grads):
        if step == 2:
            sgd.param_groups[0]["dampening"] = 0.25
            optimizer = ps.from_torch(torch.optim.SGD, lr=0.1, momentum=0.5, dampening=0.25)
        theirs.grad = grad
        sgd.step()
        params, state = optimizer.step(params, {"w": grad}, state)
    torch.testing.assert_close(params["w"], theirs.detach(), rtol=1e-6, atol=1e-6)


def table(rates):
    return lambda applied: torch.tensor(rates).take(applied)


def test_an_optimizer_made_inside_of_a_compiled_function_says_where_to_make_it():
    def step(rate):
        optimizer, params = ps.from_torch(OPTIM.SGD, lr=rate), {"w": torch.ones(2)}
        return optimizer.step(params, params, optimizer.init(params))

    with pytest.raises(Exception, match=r"inside of a compiled function.*in_state=\('lr',\)"):
        torch.compile(step, fullgraph=True, backend="eager")(torch.tensor(0.1))


READS = "reads the value of the step count.*torch.cos.*torch.where"
SCHEDULES = [
    (lambda applied: None, "the schedule lr returned None.*a missing `return`"),
    (lambda applied: torch.ones(3), r"the schedule lr returned a tensor torch.float32 \(3,\)"),
    (lambda applied: applied, r"the schedule lr returned a tensor torch.int64 \(\)"),
    (lambda applied: math.cos(applied), READS),
    (lambda applied: 0.1 if applied < 5 else 0.01, READS),
    (lambda applied: [0.1, 0.2][applied], READS),
    (lambda applied: 0.1 * applied.item(), READS),
    (lambda applied: np.cos(applied), READS),
    (lambda applied: torch.tensor([0.1, 0.2])[applied > 0].sum(), READS),
]


@pytest.mark.parametrize(("schedule", "message"), SCHEDULES)
def test_a_schedule_that_would_break_later_is_refused_when_made(schedule, message):
    for settings in ({"lr": schedule}, {"overrides": {"*": {"lr": schedule}}}):
        with pytest.raises(TypeError, match=message):
            ps.from_torch(OPTIM.AdamW, **settings)


@pytest.mark.parametrize(
    "sd",
    [
        *({}, None, {"state": {}, "param_groups": None}, {"state": {}, "param_groups": [{}]}),
        {"state": {0: 3}, "param_groups": [{"params": [0]}]},
    ],
    ids=str,
)
def test_what_is_no_state_dict_is_refused_in_words(sd):
    with pytest.raises(ValueError, match=r"expected \{'state':.*Fix: `optimizer.from_state_dict"):
        ps.from_torch(OPTIM.AdamW).from_state_dict(sd, {"w": torch.ones(2)})


ONE = torch.ones(1)
ONES = {"w": torch.ones(3)}
SGD = ps.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)


def test_another_default_device_changes_no_schedule():
    params = {"w": torch.ones(2)}
    with torch.device("meta"):
        optimizer = ps.from_torch(OPTIM.AdamW, lr=lambda applied: 0.1 / (1 + applied))
        assert optimizer.step(params, params, optimizer.init(params))[0]["w"].is_cpu


def test_the_first_momentum_keeps_the_sign_of_zero():
    sgd = ps.from_torch(OPTIM.SGD, lr=1.0, momentum=0.9)
    params = {"w": torch.zeros(1)}
    _, state = sgd.step(params, {"w": torch.tensor([-0.0])}, sgd.init(params))
    assert same_bits(state.slots["momentum_buffer"]["w"], torch.tensor([-0.0]))


def test_a_rate_given_as_a_tensor_is_copied():
    lr = torch.tensor(1.0)
    sgd, params = ps.from_torch(OPTIM.SGD, lr=lr), {"w": torch.zeros(1)}
    lr.fill_(100.0)
    assert sgd.step(params, {"w": torch.ones(1)}, sgd.init(params))[0]["w"] == -1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_a_rate_that_is_data_begins_the_step_sizes_of_a_single_number(dtype):
    rprop = ps.from_torch(OPTIM.Rprop, lr=lambda applied: torch.tensor(0.1))
    number, row = torch.ones((), dtype=dtype), torch.ones(1, dtype=dtype)
    params = {"number": number, "row": row}
    stepped, state = rprop.step(params, params, rprop.init(params))
    assert same_bits(stepped["number"].reshape(1), stepped["row"])
    assert type(state.slots["step_size"]["number"]) is torch.Tensor


@pytest.mark.parametrize("name", ["Adagrad", "RMSprop"])
def test_a_formula_reads_nothing_of_complex_parameters(name):
    optimizer = ps.from_torch(getattr(OPTIM, name), lr=0.05)
    params = {"w": torch.ones(3, dtype=torch.complex64)}
    assert_sync_free(optimizer.step, params, params, optimizer.init(params))


class Layer(NamedTuple):
    w: torch.Tensor
    b: torch.Tensor


@pytest.mark.parametrize(
    "layer", [Layer(torch.ones(2), torch.ones(1)), OrderedDict(w=torch.ones(2), b=torch.ones(1))]
)
def test_a_dict_of_other_containers_steps_as_its_leaves(layer):
    optimizer, nested = ps.from_torch(torch.optim.AdamW, lr=0.1), {"a": layer, "z": torch.ones(3)}
    params, state = optimizer.step(nested, nested, optimizer.init(nested))
    flat = dict(enumerate(tensors(nested)))
    expected, _ = optimizer.step(flat, flat, optimizer.init(flat))
    assert type(params["a"]) is type(layer)
    assert same_bits(tensors(params), list(expected.values()))
    assert list(state.slots) == ["exp_avg", "exp_avg_sq"]


@pytest.mark.parametrize(
    "moving",
    [
        *({"lr": lambda applied: 0.1 * 0.5**applied}, {"lr": torch.tensor(0.1)}),
        *({"in_state": ("lr",)}, {"overrides": {"gain": {"lr": lambda n: torch.full((), 0.1)}}}),
    ],
)
def test_a_rate_that_torchs_lists_refuse_as_a_tensor_reaches_them_as_a_number(moving):
    expected, _ = ours(ps.from_torch(OPTIM.AdamW, **moving), steps=3)
    got, _ = ours(ps.from_torch(OPTIM.AdamW, foreach=True, **moving), steps=3)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_no_parameters_have_a_state_without_slots():
    state = ps.from_torch(OPTIM.AdamW, lr=0.1).init({})
    assert not tensors(state.slots)
    assert not state.applied


def test_a_complex_parameter_is_refused_by_a_class_that_needs_the_whole_of_it():
    with pytest.raises(ValueError, match="given a complex parameter"):
        ps.from_torch(OPTIM.Adafactor, lr=0.1).init({"w": torch.ones(2, 2, dtype=torch.complex64)})
