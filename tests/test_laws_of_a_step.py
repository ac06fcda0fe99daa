"""The laws that a step keeps whatever makes it, through public functions only: for every class,
size and dtype, with bounds of every kind, and with memory that somebody else can see.
"""

import contextlib
import functools
import inspect
import itertools
import math

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from helpers import (
    CLASSES,
    assert_close,
    by_parts,
    clone,
    examples,
    function_of,
    generator_of,
    in_processes,
    on_an_accelerator,
    started,
    tensors,
)
from hypothesis import given

import purescale as ps
from purescale._grads.clip import clip_factor
from purescale._torch import foreach
from purescale._torch.tracing import as_on_an_accelerator
from purescale._torch_optim import param_group_optimizer
from purescale.testing import Untouched, same_bits, shares_memory

INF, NAN = math.inf, math.nan
FUSED = ("Adagrad", "Adam", "AdamW", "SGD")
SIZES = (5, 33, 70, 300)  # on both sides of what a processor takes at a time


def made(name, lr=0.1, **extra):
    return ps.from_torch(getattr(torch.optim, name), lr=lr, **{**CLASSES[name], **extra})


def gradients_like(params, size=1.0, seed=0):
    """Gradients between a half and twice `size`, of both signs."""
    generator = generator_of(seed)
    found = {}
    for name, leaf in params.items():
        values = torch.rand(leaf.shape, generator=generator, dtype=torch.float64) * 1.5 + 0.5
        signs = torch.randint(0, 2, leaf.shape, generator=generator) * 2 - 1
        found[name] = (values * signs * size).to(leaf.dtype)
    return found


def test_every_class_that_is_taken_is_here():
    for name, cls in vars(torch.optim).items():
        if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
            continue
        if name in CLASSES or cls is torch.optim.Optimizer:
            continue
        with pytest.raises((TypeError, ValueError)):
            ps.from_torch(cls, lr=0.1)


# ---- the values of a step ------------------------------------------------------------------------


def torchs_steps(name, params, steps, **extra):
    real = [leaf.clone().requires_grad_() for leaf in params.values()]
    theirs = getattr(torch.optim, name)(real, lr=0.1, **{**CLASSES[name], **extra})
    for grads in steps:
        for leaf, grad in zip(real, grads.values(), strict=True):
            leaf.grad = grad.clone()
        theirs.step()
    return {key: leaf.detach() for key, leaf in zip(params, real, strict=True)}


NEAR = {torch.float32: 1e-5, torch.float64: 1e-10, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize(
    ("name", "extra"), [*((n, {}) for n in CLASSES), *((n, {"fused": True}) for n in FUSED)]
)
def test_parameters_of_every_size_and_dtype_take_the_steps_of_torchs_default(name, extra, dtype):
    """The steps of a class by its default on a CPU, and by the fused kernel that is asked for."""
    params = {str(n): torch.ones(n, 1, dtype=dtype) for n in SIZES}
    steps = [gradients_like(params, seed=seed) for seed in range(3)]
    expected = torchs_steps(name, params, steps)
    optimizer, scaler = made(name, **extra), ps.StaticScale(4.0).init()
    by_step, by_unscaling = [(params, optimizer.init(params)) for _ in range(2)]
    for grads in steps:
        by_step = optimizer.step(by_step[0], grads, by_step[1])
        given = by_unscaling[0], {key: 4 * grad for key, grad in grads.items()}, by_unscaling[1]
        by_unscaling = ps.unscale_and_step(optimizer, scaler, *given)[:2]
    tolerance = NEAR[dtype]
    if name not in FUSED:  # step counts in float32; Muon works in bfloat16
        tolerance = 3e-2 if name == "Muon" else max(tolerance, 1e-5)
    for found in (by_step[0], by_unscaling[0]):
        assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FUSED)
def test_equal_steps_of_half_parameters_give_equal_bits(name, dtype):
    params = {str(n): torch.ones(n, dtype=dtype) for n in SIZES}
    optimizer = made(name)
    state, grads = optimizer.init(params), gradients_like(params)
    first = optimizer.step(params, grads, state)
    for donate in (False, True) * 3:
        given = clone((params, grads, state))
        assert same_bits(ps.maybe_step(optimizer, *given, False, donate=donate), first)


@pytest.mark.parametrize("name", CLASSES)
def test_empty_parameters_stay_beside_others_that_move(name):
    shapes = [(0, 3), (3, 0), *([] if name == "Muon" else [(0,)])]  # which takes matrices only
    alone = {"w": torch.ones(3, 2)}
    params = {**{str(shape): torch.zeros(shape) for shape in shapes}, **alone}
    optimizer = made(name)
    moved, _ = optimizer.step(params, params, optimizer.init(params))
    expected, _ = optimizer.step(alone, alone, optimizer.init(alone))
    assert [leaf.shape for leaf in moved.values()] == [leaf.shape for leaf in params.values()]
    assert same_bits(moved["w"], expected["w"])


# ---- a rate of 0 ---------------------------------------------------------------------------------

F32 = torch.float32
DTYPES = (F32, torch.float64, torch.float16, torch.bfloat16, torch.complex64)
WAYS = ("host", "accelerator", "formula", "lists", "vmap", "in_state", "differentiable")
# Rprop's rate is what its step sizes start from, which have bounds of their own.
RATED = [name for name in CLASSES if name != "Rprop"]
# AdamW as one more setting of Adam; the others have no second form.
SETTINGS = {name: [settings] for name, settings in CLASSES.items()}
SETTINGS["Adam"] += [{"maximize": True, "weight_decay": 0.1}]
SETTINGS["AdamW"] += [{"amsgrad": True, "maximize": True}]
SETTINGS["Adamax"] += [{"weight_decay": 0.1, "maximize": True}]


@contextlib.contextmanager
def going(way):
    """A CPU goes this way; the accelerator's without fused kernels too, where torch has lists or
    goes tensor by tensor.
    """
    if way not in ("accelerator", "formula", "lists"):
        yield
        return
    with pytest.MonkeyPatch.context() as patch, as_on_an_accelerator():
        if way != "accelerator":
            patch.setattr(param_group_optimizer, "kernel_for", lambda config: None)
        if way == "lists":
            patch.setattr(foreach, "is_on_accelerator", lambda tensor: True)
        yield


def can_go(name, way, dtype):
    if name in ("Adafactor", "Muon") and dtype.is_complex:
        return False
    if name == "Adafactor":  # reads
        return way in ("host", "accelerator")
    flags = inspect.signature(getattr(torch.optim, name)).parameters
    if way == "in_state":
        return "weight_decay" in flags
    return way != "differentiable" or "differentiable" in flags


def optimizer_of(name, way, settings, **rate):
    extra = {"differentiable": True} if way == "differentiable" else {}
    if way == "in_state":
        rate["in_state"] = (*rate.get("in_state", ()), "weight_decay")
    return ps.from_torch(getattr(torch.optim, name), **{**settings, **extra, **rate})


def mapped(step):
    """A step as that of the second of two equal members."""

    def of_two(*trees):
        stacked = pytree.tree_map(lambda leaf: torch.stack([leaf, leaf]), trees)
        return ps.member(torch.vmap(step)(*stacked), 1)

    return of_two


def step_of(optimizer, way):
    return mapped(optimizer.step) if way == "vmap" else optimizer.step


def a_table(dtype, count=2):
    """Parameters, and gradients at a step, of which rows were not seen yet: their gradient and
    second moment are 0.
    """
    generator = generator_of(0)
    params = {str(i): torch.randn(6, 3, generator=generator).to(dtype) for i in range(count)}

    def grads_at(step):
        grads = gradients_like(params, seed=step)
        return {
            name: torch.where(torch.arange(6)[:, None] < 2 + step // 2, grad, 0)
            for name, grad in grads.items()
        }

    return params, grads_at


NO_RATES = {
    "float": {"lr": 0.0},
    "tensor": {"lr": torch.tensor(0.0)},
    "schedule": {"lr": lambda applied: 0.01 * applied},
    "state": {"lr": 0.0, "in_state": ("lr",)},
}


@pytest.mark.parametrize("way", ["host", "vmap", "in_state"])
@pytest.mark.parametrize("name", RATED)
def test_a_rate_of_0_moves_nothing_however_it_is_given(name, way):
    if not can_go(name, way, F32):
        return
    params, grads_at = a_table(F32)
    for rate in NO_RATES.values():
        optimizer = optimizer_of(name, way, SETTINGS[name][-1], **rate)
        state = optimizer.init(params)
        found, after = step_of(optimizer, way)(params, grads_at(0), state)
        assert same_bits(found, params)
        assert all(bool(leaf.isfinite().all()) for leaf in tensors(after))


def torchs_warm_up(name, settings, params, grads_at, count):
    """torch's own class with the rate set by hand, by its for-loop; over half parameters what it
    makes in float32, rounded after each step.
    """
    half = {key: leaf.dtype for key, leaf in params.items() if leaf.dtype.itemsize == 2}
    real = [leaf.float() if key in half else leaf.clone() for key, leaf in params.items()]
    plain = {} if name == "Muon" else {"foreach": False}
    theirs = getattr(torch.optim, name)(real, **{**plain, **settings, "lr": 0.0})
    for step in range(count):
        theirs.param_groups[0]["lr"] = 0.01 * step
        for leaf, grad in zip(real, grads_at(step).values(), strict=True):
            leaf.grad = grad.to(leaf.dtype)
        theirs.step()
        for leaf in real if half else ():
            for kept in (leaf, *theirs.state[leaf].values()):
                if isinstance(kept, torch.Tensor) and kept.ndim:
                    kept.copy_(kept.to(next(iter(half.values()))))
    return {k: leaf.to(params[k].dtype) for k, leaf in zip(params, real, strict=True)}


WARM_UPS = [
    *(("host", dtype) for dtype in DTYPES),
    *(("vmap", dtype) for dtype in (F32, torch.float16, torch.complex64)),
    *itertools.product(("accelerator", "in_state"), (F32, torch.float16)),
    *itertools.product(("formula", "differentiable"), (torch.float64, torch.bfloat16)),
    *itertools.product(("lists",), (F32, torch.complex64)),
]


@pytest.mark.parametrize(("way", "dtype"), WARM_UPS)
@pytest.mark.parametrize("name", CLASSES)
def test_a_warm_up_from_0_is_that_of_torchs_class(name, way, dtype):
    """The first step moves nothing. To 2e-6 and in half precision to one unit in the last place;
    Muon under vmap to 1e-2 of the update.
    """
    if not can_go(name, way, dtype):
        return
    params, grads_at = a_table(dtype)
    for extra in SETTINGS[name]:
        found, count = params, 4
        with going(way):
            optimizer = optimizer_of(name, way, extra, lr=lambda applied: 0.01 * applied)
            state, step = optimizer.init(params), step_of(optimizer, way)
            for index in range(count):
                found, state = step(found, grads_at(index), state)
                assert index or name == "Rprop" or same_bits(found, params)
        expected = torchs_warm_up(name, extra, params, grads_at, count)
        tolerance = torch.finfo(dtype).eps if dtype.itemsize == 2 else 2e-6
        if name == "Muon" and way == "vmap":
            tolerance = max(tolerance, 0.01 * 0.15)
        assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("way", "dtype"),
    [
        *((way, F32) for way in ("accelerator", "lists", "vmap", "in_state")),
        *((way, torch.float64) for way in ("accelerator", "formula", "in_state")),
    ],
)
@pytest.mark.parametrize("name", [name for name in CLASSES if name != "Muon"])
def test_the_first_updates_of_every_way_are_those_of_the_host(name, way, dtype):
    """To 1e-6 of the update, in float64 to 1e-9: bias corrections and ASGD's factors are not those
    of float32. NAdam keeps a product of all its momenta in float32.
    """
    if not can_go(name, way, dtype):
        return
    wide = dtype is torch.float64
    _, grads_at = a_table(dtype)
    begun = {key: torch.full_like(grad, float(wide)) for key, grad in grads_at(0).items()}
    rate = {"lr": torch.tensor(0.5, dtype=torch.float64)}
    if name in ("ASGD", "Rprop"):  # which keep what they make of it
        rate = {"lr": 0.5}
    optimizer = optimizer_of(name, "host", CLASSES[name], **rate)
    state = optimizer.init(begun)
    for index in range(3):
        expected, after = optimizer.step(begun, grads_at(index), state)
        with going(way):
            other = optimizer_of(name, way, CLASSES[name], **rate)
            given = state._replace(hyper=other.init(begun).hyper)
            found, _ = step_of(other, way)(begun, grads_at(index), given)
        tolerance = (1e-7 if name == "NAdam" else 1e-9) if wide else 1e-6
        assert_close(found, expected, rtol=tolerance, atol=tolerance / 10)
        state = after


@pytest.mark.parametrize("way", ["host", "accelerator", "formula", "lists", "vmap"])
@pytest.mark.parametrize("rate", [torch.tensor(0.01), lambda applied: 0.01 * 0.5**applied])
def test_rprop_begins_both_parts_of_complex_parameters_at_a_rate_that_is_data(rate, way):
    params = {"w": torch.randn(5, dtype=torch.complex64)}
    results = []
    with going(way):
        for lr in (0.01, rate):
            optimizer = ps.from_torch(torch.optim.Rprop, lr=lr)
            moved, state = params, optimizer.init(params)
            assert (torch.view_as_real(state.slots["step_size"]["w"]) == torch.tensor(0.01)).all()
            for sign in (1, 1, -1):
                grads = {"w": sign * params["w"]}
                moved, state = step_of(optimizer, way)(moved, grads, state)
            results.append(moved["w"])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("rate", [0.0, 0.01])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adamax"])
def test_the_derivative_by_a_rate_is_that_of_differences_at_0_too(name, rate, named):
    """Also where gradient and second moment are 0; by torch.func and by `.backward()`."""
    settings = CLASSES[name]
    params, grads_at = a_table(torch.float64)

    def total(lr, grad):
        extra = {**settings, "differentiable": named or None}
        optimizer = ps.from_torch(getattr(torch.optim, name), lr=lr, **extra)
        moved, state = params, optimizer.init(params)
        for index in range(3):
            moved, state = optimizer.step(moved, {"0": grad, "1": grads_at(index)["1"]}, state)
        return sum((leaf * leaf).sum() for leaf in moved.values())

    lr, grad = torch.tensor(rate, dtype=torch.float64), grads_at(0)["0"]
    if named:
        lr.requires_grad_(), grad.requires_grad_()
        found = torch.autograd.grad(total(lr, grad), (lr, grad))
        lr, grad = lr.detach(), grad.detach()
    else:
        found = torch.func.grad(total, argnums=(0, 1))(lr, grad)
    width = 1e-6
    by_rate = (total(lr + width, grad) - total(lr - width, grad)) / (2 * width)
    torch.testing.assert_close(found[0], by_rate.detach(), rtol=1e-5, atol=1e-7)
    assert found[1].isfinite().all()


# ---- a backward inside of the loss ---------------------------------------------------------------


def plain_loss(params, buffers, x):
    return (params["w"].square() * x).sum() + params["b"].sum() * x[0], buffers


def attacked_loss(params, buffers, x):
    """As `plain_loss`, after a backward by hand that reaches the parameters too; else NaN."""
    (params["w"] * 7).sum().backward()
    assert params["b"].grad is None
    loss, buffers = plain_loss(params, buffers, x)
    return torch.where((params["w"].grad == 7).all(), loss, NAN), buffers


def penalised_loss(params, buffers, x):
    """Fast gradient signs: the data one step uphill, by a backward of the same loss."""
    data = x.clone().requires_grad_()
    plain_loss(params, buffers, data)[0].backward()
    return plain_loss(params, buffers, x + 0.5 * data.grad.sign())


def uphill_loss(params, buffers, x):
    """What `penalised_loss` comes to, without a backward inside."""
    data = x.clone().requires_grad_()
    loss, _ = plain_loss(params, buffers, data)
    (slope,) = torch.autograd.grad(loss, [data])
    return plain_loss(params, buffers, x + 0.5 * slope.sign())


ATTACKS = (plain_loss, attacked_loss), (uphill_loss, penalised_loss)


def begun(size, name="SGD", rule=None, **extra):
    params = {"w": torch.linspace(-1, 1, size), "b": torch.ones(3)}
    return started(params, None, made(name, **extra), rule or ps.NoScale(), loss_fn=plain_loss)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("size", [33, 2**18 + 3])
def test_a_backward_inside_of_the_loss_is_no_part_of_the_step(size, number):
    state, step = begun(size)
    data = [torch.full((size,), 1.0 + index) for index in range(number)]
    for without, within in ATTACKS:
        assert same_bits(
            step(state, data, loss_fn=within, max_norm=INF),
            step(state, data, loss_fn=without, max_norm=INF),
        )


@pytest.mark.parametrize("number", [1, 2])
def test_a_backward_inside_of_the_loss_leaves_nothing_on_tensors_of_the_caller(number):
    parameters = {"w": torch.nn.Parameter(torch.ones(33)), "b": torch.nn.Parameter(torch.ones(3))}
    for leaf in parameters.values():
        leaf.grad = torch.full_like(leaf, 5.0)
    state, step = begun(33)
    state = state._replace(params=parameters)
    with Untouched(state):
        new, _ = step(state, [torch.ones(33)] * number, loss_fn=attacked_loss)
    assert all((leaf.grad == 5).all() for leaf in parameters.values())
    assert all(leaf.grad is None for leaf in tensors(new))


def _over_ranks(rank):
    world = dist.group.WORLD
    for size in (33, 2**18 + 3):
        state, step = begun(size)
        for number in (1, 2):
            data = [torch.full((size,), 1.0 + rank + index) for index in range(number)]
            for without, within in ATTACKS:
                assert same_bits(
                    step(state, data, loss_fn=within, group=world),
                    step(state, data, loss_fn=without, group=world),
                )
        for how, keeps in KEEPERS.items():
            kept = []
            loss_fn = functools.partial(keeps, kept)
            new, _ = step(state, [torch.ones(size)], loss_fn=loss_fn, group=world)
            assert all((values(k) == 16).all() for k in kept), how
            assert_close(new.params["w"], state.params["w"] - 0.1 * 16, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_over_ranks_too_a_backward_inside_is_left_out_and_what_is_kept_is_left_alone():
    in_processes(_over_ranks)


# ---- one flag ------------------------------------------------------------------------------------

BOUNDS = [None, 0.1, 1e3, INF]
UNUSABLE = [0.0, -0.0, -1.0, -INF, NAN]
bounds = st.sampled_from(BOUNDS) | st.sampled_from([0.1, 1e-44, INF, *UNUSABLE]).map(torch.tensor)


def is_unusable(bound):
    return isinstance(bound, torch.Tensor) and not bound > 0


def limits(bound):
    return bound is not None and not is_unusable(bound) and bound < INF


def counted_loss(size, dtype, params, buffers, bad):
    """Gradients of about that size, not finite in a microbatch that is bad."""
    grads = gradients_like(params, size)
    loss = sum((params[name] * grads[name].to(dtype)).sum() for name in params)
    return loss * (INF if bad else 1.0), {"seen": buffers["seen"] + 1}


def check_one_story(before, new, info, number):
    """Everything moved, or nothing did."""
    if info.found_inf:
        assert same_bits((new.params, new.opt_state), (before.params, before.opt_state))
        assert same_bits((new.buffers, new.step), (before.buffers, before.step))
        assert new.scaler.scale <= before.scaler.scale
    else:
        assert all(leaf.isfinite().all() for leaf in tensors(new.params))
        assert new.opt_state.applied == before.opt_state.applied + 1
        assert new.step == before.step + 1
        assert new.buffers["seen"] == before.buffers["seen"] + number
        assert new.scaler.scale == min(2 * before.scaler.scale, 2.0**24)


@examples(100)
@given(
    name=st.sampled_from(sorted(CLASSES)),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    size=st.sampled_from([0.0, 1e-30, 1.0, 1e15, 1e30, 1e35]),
    exponent=st.sampled_from([-24, 0, 8, 16]),
    max_norm=bounds,
    clip_value=bounds,
    bad=st.lists(st.sampled_from([False, False, False, True]), min_size=1, max_size=2),
    donate=st.booleans(),
)
def test_applied_step_buffers_scale_and_found_inf_tell_the_same_story(
    name, dtype, size, exponent, max_norm, clip_value, bad, donate
):
    bounded = limits(max_norm) or limits(clip_value)
    size = size if bounded else min(size, 1e15)  # else formulas themselves overflow
    params = {"a": torch.ones(3, 11, dtype=dtype), "b": torch.ones(10, 7, dtype=dtype)}
    state, step = started(
        params,
        optimizer=made(name),
        rule=ps.DynamicScale(init_scale=2.0**exponent, growth_interval=1),
        loss_fn=functools.partial(counted_loss, size, dtype),
        buffers={"seen": torch.tensor(0)},
    )
    for _ in range(2):
        before = clone(state)
        state, info = step(state, bad, max_norm=max_norm, clip_value=clip_value, donate=donate)
        check_one_story(before, state, info, len(bad))
        fits = 1000 * size * before.scaler.scale < 1e38  # the loss too
        unusable = is_unusable(max_norm) or is_unusable(clip_value)
        if unusable or any(bad):
            assert info.found_inf
        elif fits:
            assert not info.found_inf
        if unusable and fits and not any(bad):
            assert same_bits(state.scaler, before.scaler)


@pytest.mark.parametrize(
    ("size", "scale", "max_norm"),
    [
        (1e35, 256.0, 0.1),
        (1e35, 1.0, torch.tensor(0.1)),
        (1e38, 2.0**-24, 0.1),
        (1.5e38, 1.0, 1e-3),  # whose norm is beyond float32
        (1.0, 2.0**16, torch.tensor(1e-44)),
        (1e35, 1.0, torch.tensor(1e-300, dtype=torch.float64)),
        (1e-30, 1.0, 1e35),
    ],
)
@pytest.mark.parametrize("name", ["AdamW", "Adagrad", "SGD", "NAdam", "Muon"])
def test_a_finite_bound_and_finite_gradients_make_the_clipped_step_of_the_parts(
    name, size, scale, max_norm
):
    params = {str(n): torch.ones(n, 1) for n in SIZES}
    optimizer, scaler = made(name), ps.StaticScale(scale).init()
    grads = {key: grad * scale for key, grad in gradients_like(params, size).items()}
    given = (params, grads, optimizer.init(params))
    expected = by_parts(optimizer, scaler, *given, max_norm)
    ways = contextlib.nullcontext, as_on_an_accelerator
    for way, donate in itertools.product(ways, (False, True)):
        with way():
            out = ps.unscale_and_step(optimizer, scaler, *clone(given), max_norm, donate=donate)
        assert not out.found_inf
        assert out.opt_state.applied == 1
        # a dot in float32, or a norm in float64
        assert_close(out.grad_norm, expected[3], rtol=2e-6, atol=0)
        assert_close((out.params, out.opt_state), expected[:2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("retries", [0, 2])
@pytest.mark.parametrize("rule", [ps.DynamicScale(growth_interval=2), ps.HeadroomScale()])
def test_a_bound_that_is_none_is_no_overflow_of_the_scale(rule, retries):
    """No scale could cure it: the rule's state stays, and nothing is tried again."""
    calls = []

    def loss(params, x):
        calls.append(x)
        return (params["w"] * x).sum()

    state, step = started({"w": torch.ones(33)}, loss, made("AdamW"), rule)
    state, _ = step(state, [1.0])
    skipped, info = step(state, [1.0], max_norm=torch.tensor(NAN), max_retries=retries)
    assert info.found_inf
    assert info.retries == 0
    assert len(calls) == 2
    assert same_bits(skipped, state)


@pytest.mark.slow
def test_a_compiled_step_decides_by_the_same_flag():
    params = {str(n): torch.ones(n % 40 + 1) for n in range(20)}
    optimizer, scaler = made("AdamW"), ps.StaticScale(256.0).init()
    grads = {key: grad * 256 for key, grad in gradients_like(params, 1e35).items()}
    state = optimizer.init(params)

    def stepped(bound):
        return ps.unscale_and_step(optimizer, scaler, params, grads, state, bound)

    compiled = torch.compile(stepped, fullgraph=True, backend="aot_eager")
    for bound in (0.1, NAN):
        out, expected = compiled(torch.tensor(bound)), stepped(torch.tensor(bound))
        assert out.found_inf == expected.found_inf == (not bound > 0)
        assert_close((out.params, out.opt_state), (expected.params, expected.opt_state))


def test_each_member_of_a_batch_has_a_bound_and_a_flag_of_its_own():
    params, optimizer, scaler = {"w": torch.ones(33)}, made("AdamW"), ps.StaticScale(8.0).init()
    grads, state = gradients_like(params), optimizer.init(params)

    def stepped(bound):
        return ps.unscale_and_step(optimizer, scaler, params, grads, state, bound)

    row = torch.tensor([0.1, 0.0, NAN, -1.0, INF])
    out = torch.vmap(stepped)(row)
    assert out.found_inf.tolist() == [False, True, True, True, False]
    for index, bound in enumerate(row):
        assert_close(out.params["w"][index], stepped(bound).params["w"])


# ---- memory that somebody else can see -----------------------------------------------------------


def returning(returned):
    """A loss whose gradient is what `returned(buffer of 16s)` makes of a buffer that is kept."""

    def loss_fn(kept, params, buffers, x):
        weight = params["w"]

        def backward(ctx, grad):
            kept.append(torch.full(weight.shape, 16.0))
            return returned(kept[-1])

        return function_of(lambda ctx, weight: weight.sum(), backward)(weight), buffers

    return loss_fn


def numpys(kept, params, buffers, x):
    """A backward that works in an array of its own."""

    def of_array(buffer):
        array = buffer.clone().numpy().copy()
        kept.append(array)
        return torch.from_numpy(array)

    return returning(of_array)(kept, params, buffers, x)


def hooked(keep):
    def loss_fn(kept, params, buffers, x):
        params["w"].register_hook(lambda grad: kept.append(keep(grad)))
        return (params["w"] * 16).sum() + 0 * params["b"].sum(), buffers

    return loss_fn


def afterwards(kept, params, buffers, x):
    """A hook that looks at `.grad`, which a backward by hand fills."""
    weight = params["w"]
    weight.register_post_accumulate_grad_hook(lambda leaf: kept.append(leaf.grad))
    return (weight * 16).sum() + 0 * params["b"].sum(), buffers


def values(kept):
    return kept if isinstance(kept, torch.Tensor) else torch.as_tensor(kept)


KEEPERS = {
    "itself": returning(lambda buffer: buffer),
    "detached": returning(lambda buffer: buffer.detach()),
    "a view": returning(lambda buffer: buffer.view(buffer.shape)),
    "a slice": returning(lambda buffer: buffer[:]),
    "turned": returning(lambda buffer: buffer.flip(0).flip(0).t()),
    "an array": numpys,
    "a hook": hooked(lambda grad: grad),
    "a hook, detached": hooked(lambda grad: grad.detach()),
    "a hook, a view": hooked(lambda grad: grad[:2]),
    "a hook, an array": hooked(lambda grad: grad.numpy()),
    "a hook, the memory": hooked(lambda grad: torch.frombuffer(grad.numpy(), dtype=grad.dtype)),
    "a hook after it": afterwards,
}


@pytest.mark.parametrize(("max_norm", "donate"), [(None, False), (None, True), (1.0, True)])
@pytest.mark.parametrize(("name", "number"), [("AdamW", 1), ("NAdam", 1), ("AdamW", 2)])
@pytest.mark.parametrize("how", KEEPERS)
def test_a_gradient_that_somebody_else_can_see_is_not_written_into(
    how, name, number, max_norm, donate
):
    data = [torch.ones(33)] * number
    state, step = begun(33, name, ps.StaticScale(1.0))
    unseen = functools.partial(hooked(lambda grad: None), [])
    alone, _ = step(state, data, loss_fn=unseen, max_norm=max_norm)
    state, step = begun(33, name, ps.StaticScale(8.0))
    for _ in range(2):  # with nothing remembered, then with all
        kept = []
        settings = {"loss_fn": functools.partial(KEEPERS[how], kept), "max_norm": max_norm}
        new, _ = step(clone(state), data, **settings, donate=donate)
        expected = 16 if how in RETURNED else 128  # of what is returned, or of a scaled loss
        assert all((values(k) == expected).all() for k in kept)
        if expected == 128:
            assert_close(new.params, alone.params)


RETURNED = ("itself", "detached", "a view", "a slice", "turned", "an array")
OF_NUMPY = ("an array", "a hook, an array", "a hook, the memory")  # for other devices


# ---- what there is of the gradients --------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("max_norm", [None, 1.0, INF])
@pytest.mark.parametrize("name", ["AdamW", "NAdam"])
def test_the_largest_gradient_is_told_where_all_of_a_dtype_are_empty(name, max_norm, dtype):
    optimizer, scaler, none = made(name), ps.StaticScale(8.0).init(), torch.zeros(0, dtype=dtype)
    for other in (torch.ones(33), torch.ones(300, dtype=torch.float64), None):
        params = {"empty": none, "other": other}
        grads = {"empty": none, "other": None if other is None else -other}
        given = params, grads, optimizer.init(params)
        out = ps.unscale_and_step(optimizer, scaler, *given, max_norm, amax=True)
        assert not out.found_inf
        assert out.grad_amax == (0 if other is None else 0.125)
        assert out.grad_amax.dtype is torch.float32


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, INF])
@pytest.mark.parametrize("name", ["AdamW", "NAdam"])
def test_the_norm_of_the_largest_float64_is_that_of_unscaled_gradients(name, norm_type):
    params = {str(n): torch.ones(n, dtype=torch.float64) for n in (5, 33)}
    grads = {key: torch.full_like(leaf, 1.7e308) for key, leaf in params.items()}
    optimizer, scaler = made(name), ps.StaticScale(256.0).init()
    given = (params, grads, optimizer.init(params))
    out = ps.unscale_and_step(optimizer, scaler, *given, 1.0, norm_type=norm_type)
    unscaled, _ = ps.unscale_and_check(scaler, grads)
    clipped, norm = ps.clip_by_global_norm(unscaled, 1.0, norm_type=norm_type)
    assert not out.found_inf
    assert norm.isfinite()
    assert_close(out.grad_norm, norm)
    assert_close(out.params, optimizer.step(params, clipped, given[2])[0])
    measured = ps.unscale_and_step(optimizer, scaler, *given, INF, norm_type=norm_type)
    assert_close(measured.grad_norm, norm)
    assert not measured.found_inf


@pytest.mark.parametrize("number", [1, 2])
def test_train_step_tells_the_norm_of_the_largest_float64(number):
    given = {"w": torch.zeros(33, dtype=torch.float64)}, lambda params, x: (params["w"] * x).sum()
    state, step = started(*given, made("AdamW"), ps.StaticScale(256.0), max_norm=1.0)
    _, info = step(state, [1.7e308 / 256] * number)
    assert not info.found_inf
    assert_close(info.grad_norm, torch.tensor(1.7e308 / 256 * math.sqrt(33), dtype=torch.float64))


# ---- what a step returns -------------------------------------------------------------------------


def descent():
    """An (init, update) pair that keeps a state."""

    def init(params):
        return {name: torch.zeros_like(leaf) for name, leaf in params.items()}

    def update(grads, state, params):
        state = {name: 0.5 * state[name] + grads[name] for name in grads}
        return {name: -0.1 * value for name, value in state.items()}, state

    return ps.from_transformation((init, update))


OF_EVERY_KIND = {
    "fused": lambda: made("AdamW"),
    "unfused": lambda: made("RMSprop"),
    "pair": descent,
}


@pytest.mark.parametrize("unread", [False, True])
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("kind", OF_EVERY_KIND)
def test_parameters_that_require_a_gradient_are_stepped_off_the_graph(kind, donate, unread):
    optimizer, leaf = OF_EVERY_KIND[kind](), torch.linspace(-1, 1, 5)
    grads, flag = {"w": torch.ones(5)}, torch.tensor(False)
    state = optimizer.init({"w": leaf})
    for skip in (flag, ~flag):
        given = {"w": torch.nn.Parameter(leaf.clone())}
        with on_an_accelerator(unread):
            found = ps.maybe_step(optimizer, given, grads, clone(state), skip, donate=donate)
            expected = ps.maybe_step(optimizer, {"w": leaf}, grads, state, skip)
        assert not any(tensor.requires_grad for tensor in tensors(found))
        assert same_bits(found, expected)


@pytest.mark.parametrize("kind", OF_EVERY_KIND)
def test_a_whole_step_is_made_by_optimizers_of_every_kind(kind):
    optimizer = OF_EVERY_KIND[kind]()
    params = {"w": torch.linspace(-1, 1, 33), "b": torch.ones(3)}
    state, step = started(params, None, optimizer, ps.NoScale(), loss_fn=plain_loss)
    new, _ = step(state, [torch.full((33,), 2.0)])
    grads = {"w": 4 * params["w"], "b": torch.full((3,), 2.0)}
    expected = ps.maybe_step(optimizer, params, grads, state.opt_state, False)
    assert_close((new.params, new.opt_state), expected, rtol=1e-6, atol=1e-7)


class Unmoved(ps.StaticScale):
    """A rule that returns the state that it was given."""

    def update(self, scaler, found_inf):
        return scaler


def test_what_a_step_returns_shares_no_memory_with_what_rules_and_losses_return_twice():
    def loss_fn(params, buffers, x):
        loss, _ = plain_loss(params, buffers, x)
        return loss, buffers, loss

    state, step = begun(5, rule=Unmoved(8.0))
    new, info = step(state, [torch.ones(5)], loss_fn=loss_fn)
    assert not shares_memory(new, state)
    assert not shares_memory(info.aux, info.loss)
    assert same_bits(info.aux[0], info.loss)


def test_a_factor_is_rounded_once_whether_the_host_reads_it_or_not():
    for size in range(1, 50):
        norm = torch.tensor(size / 7, dtype=torch.float64)
        expected = min(1.0, 0.7 / (size / 7 + 1e-6))
        assert clip_factor(norm, 0.7).item() == expected


class Tagged(torch.Tensor):
    """A subclass, whose values the host does not read."""


@pytest.mark.parametrize("name", CLASSES)
def test_a_flag_of_a_subclass_skips_the_step(name):
    params = {str(n): torch.ones(n, 2) for n in SIZES}
    optimizer = made(name)
    state, grads = optimizer.init(params), gradients_like(params)
    flag = torch.tensor(True).as_subclass(Tagged)
    for arguments in ((grads, state, flag), (grads, state, flag, True)):
        stepped = ps.maybe_step(optimizer, *clone((params, *arguments[:2])), *arguments[2:])
        assert same_bits(plain(stepped), (params, state))
    overflowed = {key: (g * torch.inf).as_subclass(Tagged) for key, g in grads.items()}
    scaler = ps.StaticScale(4.0).init()
    out = ps.unscale_and_step(optimizer, scaler, params, overflowed, state)
    assert out.found_inf
    assert same_bits(plain(out[:2]), (params, state))


def plain(tree):
    return pytree.tree_map(lambda leaf: leaf.as_subclass(torch.Tensor), tree)
