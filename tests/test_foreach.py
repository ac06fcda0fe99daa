"""Operators do not grow with the number of tensors: those of a step counted on fake CUDA tensors,
and what makes it so.
"""

import contextlib
import math
import struct

import pytest
import torch
from helpers import Untouched, assert_close, clone, on_an_accelerator, same_bits, shares_memory
from hypothesis import example, given
from hypothesis import strategies as st
from test_torch_optim import SETTINGS, grads_at, make_params
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import purescale as ps
from purescale._torch import donation, flat_buffer, foreach, memory_order, tracing
from purescale._torch.dtypes import cast_saturating
from purescale._tree.select import select_leaves

LISTS = {name: many for name, many in SETTINGS.items() if name not in ("Muon", "Adafactor")}
CASES = [
    pytest.param(name, settings, id=f"{name}-{i}")
    for name, many in LISTS.items()
    for i, settings in enumerate(many)
]
nan, inf = float("nan"), float("inf")
f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


# ---- operators, on fake CUDA tensors -------------------------------------------------------------


class Launched(TorchDispatchMode):
    """Counts operators that launch something: a view does not, nor what only makes room. Fused
    kernels are not run; reading a value of a fake tensor raises by itself.
    """

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        room = func is torch.ops.aten.empty_like.default or func.is_view
        if func.namespace != "prim" and not room:  # `.device` of a subclass
            self.ops.append(func)
        if func.overloadpacket.__name__.startswith("_fused_"):
            return None
        return func(*args, **(kwargs or {}))


class WithoutDriver(TorchFunctionMode):
    """`~t` asks for the driver, also of a fake tensor."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        func = torch.logical_not if func is torch.Tensor.__invert__ else func
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def fake_cuda():
    """Tensors in here say that they are on a GPU. Their memory has no address, so each storage is
    told by its identity.
    """
    with (
        pytest.MonkeyPatch.context() as patch,
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.device("cuda"),
        WithoutDriver(),
    ):
        patch.setattr(donation, "storage_pointer", lambda leaf: leaf.untyped_storage()._cdata)
        yield


def problem(optimizer, count, dtypes=(torch.float32, torch.float32), lay=lambda t: t):
    params, grads = (
        {str(i): lay(torch.empty(8, 4, 2, 2, dtype=dtype)) for i in range(count)}
        for dtype in dtypes
    )
    return ps.DynamicScale().init("cuda"), params, grads, optimizer.init(params)


def maybe_step(optimizer, scaler, params, grads, state, **how):
    bad = torch.zeros((), dtype=torch.bool)
    return ps.maybe_step(optimizer, params, grads, state, bad, **how)


def operators(optimizer, count, *kind, step=ps.unscale_and_step, **how):
    """How many a step over `count` tensors takes."""
    with fake_cuda():
        given = problem(optimizer, count, *kind)
        with Launched() as launched:
            step(optimizer, *given, **how)
    return len(launched.ops)


def operators_of_any(optimizer, *kind, counts=(10, 40), **how):
    """How many a step takes, the same over any number of tensors."""
    found = {count: operators(optimizer, count, *kind, **how) for count in counts}
    assert len(set(found.values())) == 1, found
    return found[counts[0]]


HOW = [{}, {"max_norm": 1.0}, {"max_norm": 1.0, "clip_value": 1.0, "donate": True}]
MIXED = [(f32, f16), (f32, bf16), (f32, f64), (f64, f16), (f64, f32)]
FORMATS = {
    "transposed": lambda t: t.transpose(0, 1),
    "channels_last_3d": lambda t: t.unsqueeze(0).permute(0, 4, 1, 2, 3),
}
# A class with its settings, dtypes of parameters and gradients, a layout, how it is stepped, and
# how many operators that takes at most.
CLIPPED = [
    ("AdamW", {}, (f32, kind), None, {"max_norm": 1.0, "norm_type": power}, 75)
    for kind in (f16, f32)
    for power in (3.0, inf)
]
STEPS = [
    *(
        (name, settings, (f32, f32), None, how, 60 if name == "AdamW" else 120)
        for name, many in LISTS.items()
        for settings in many
        for how in (HOW[1:] if settings else HOW[:1])
    ),
    *(
        (name, {}, dtypes, None, how, most)
        for name, most in (("AdamW", 75), ("RMSprop", 120))
        for dtypes in (*MIXED, (f16, f32), (bf16, bf16))
        for how in HOW[:2]
    ),
    *(
        (name, {}, (f16, f32), format, HOW[2], most)
        for name, most in (("AdamW", 60), ("RMSprop", 120))
        for format in FORMATS
    ),
]


@pytest.mark.parametrize(
    ("name", "settings", "dtypes", "format", "how", "most"),
    [*CLIPPED, *(pytest.param(*row, marks=pytest.mark.slow) for row in STEPS)],
)
def test_a_step_over_lists_is_few_operators_whatever_the_number_of_tensors(
    name, settings, dtypes, format, how, most
):
    optimizer = ps.from_torch(getattr(torch.optim, name), **settings)
    lay = FORMATS.get(format, lambda t: t)
    assert operators_of_any(optimizer, dtypes, lay, counts=(5, 25), **how) <= most


OF_GRADIENTS = {
    "accumulate_grads": ps.accumulate_grads,
    "accumulate_grads, weighted": lambda accum, grads, donate: ps.accumulate_grads(
        accum, grads, 3, torch.zeros((), dtype=torch.bool), donate=donate
    ),
    "grad_amax": lambda accum, grads, donate: ps.grad_amax(grads),
}


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", OF_GRADIENTS)
def test_functions_of_gradients_of_any_layout_are_few_operators(name, format, donate):
    counts = set()
    for number in (5, 25):
        with fake_cuda():
            grads = {str(i): FORMATS[format](torch.empty(8, 4, 2, 2)) for i in range(number)}
            accum = ps.init_accum(grads)
            with Launched() as launched:
                OF_GRADIENTS[name](accum, grads, donate=donate)
        counts.add(len(launched.ops))
    assert len(counts) == 1
    assert name != "grad_amax" or counts.pop() < 10


@pytest.mark.parametrize("lay", ["channels_last", "transposed", "permuted"])
def test_a_mean_of_gradients_has_the_same_bits_in_any_layout(lay):
    rows = [{"w": torch.randn(2, 3, 4, 5)} for _ in range(3)]
    means = []
    for change in (lambda t: t, LAYOUTS[lay]):
        accum = ps.init_accum(rows[0])
        accum = accum._replace(grads={"w": change(accum.grads["w"])})
        for row in rows:
            accum = ps.accumulate_grads(accum, {"w": change(row["w"])}, donate=True)
        means.append(accum.grads["w"])
    assert means[1].stride() == LAYOUTS[lay](rows[0]["w"]).stride()
    assert same_bits(means[1].contiguous(), means[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SGD", "ASGD", "NAdam"])
@pytest.mark.parametrize("lr", ["schedule", "tensor", "state"])
def test_a_rate_that_is_data_is_not_read(name, lr):
    settings = {"dampening": 0.5, "momentum": 0.9} if name == "SGD" else {}
    settings |= {
        "schedule": {"lr": lambda applied: 1e-3 * 0.9**applied},
        "tensor": {"lr": torch.tensor(1e-3)},
        "state": {"in_state": ("lr",)},
    }[lr]
    optimizer = ps.from_torch(getattr(torch.optim, name), **settings)
    assert operators_of_any(optimizer, step=lambda opt, _, *given: opt.step(*given)) <= 100


def resnet_buffers():
    """267 as a ResNet-50 has: means, variances and counts of 53 layers and more."""
    count = torch.zeros((), dtype=torch.int64)
    return [count.clone() if i % 3 == 2 else torch.zeros(64) for i in range(267)]


@pytest.mark.parametrize("donate", [False, True])
def test_267_buffers_stand_still_in_a_handful_of_operators(donate):
    with fake_cuda():
        old, new = resnet_buffers(), resnet_buffers()
        bad = torch.zeros((), dtype=torch.bool)
        with Launched() as launched:
            select_leaves(bad, old, new, in_place=donate)
    assert len(launched.ops) <= 12


# ---- old or new ----------------------------------------------------------------------------------


@contextlib.contextmanager
def over_lists():
    """A CPU goes the way of an accelerator, over lists where that has fewer launches."""
    with pytest.MonkeyPatch.context() as patch, tracing.as_on_an_accelerator():
        patch.setattr(foreach, "is_on_accelerator", lambda tensor: True)
        yield


SPECIAL = [0.0, -0.0, 1.0, inf, -inf, nan, 2.0**-149, -(2.0**-149), 1e-310, 3e38, 1e300]
PAYLOADS = [
    struct.unpack("d", struct.pack("Q", bits))[0]
    for bits in (0x7FF8000000000001, 0xFFF8000000000000, 0xFFF80000DEAD0000)
]


def of_four_dimensions(lay):
    return lambda t: lay(t) if t.ndim == 4 else t


LAYOUTS = {
    "contiguous": lambda t: t,
    "channels_last": of_four_dimensions(lambda t: t.to(memory_format=torch.channels_last)),
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1) if t.ndim > 1 else t,
    "permuted": of_four_dimensions(
        lambda t: t.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2)
    ),
    "strided": lambda t: torch.stack([t, t], dim=-1)[..., 0],
    "expanded": lambda t: t[:1].expand_as(t) if t.ndim and t.numel() else t,
}
KINDS = [f32, f64, f16, bf16, torch.int64, torch.int32, torch.bool, torch.complex64]


@st.composite
def leaf_pairs(draw):
    """An old and a new tensor of one shape and dtype, each in a layout of its own, full of special
    values.
    """
    dtype = draw(st.sampled_from(KINDS))
    shape = draw(st.sampled_from([(), (0,), (1,), (7,), (33,), (2, 3), (2, 3, 4, 5)]))
    numbers = st.sampled_from(SPECIAL + ([] if dtype in (f16, bf16) else PAYLOADS))

    def filled():
        values = torch.tensor(draw(st.lists(numbers, min_size=5, max_size=5))).double()
        if not dtype.is_floating_point:
            values = values.nan_to_num(1.0, 2.0, 3.0)
        count = torch.Size(shape).numel()
        lay = LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))]
        return lay(values.repeat(count)[:count].reshape(shape).to(dtype))

    return filled(), filled()


@given(
    pairs=st.lists(leaf_pairs(), max_size=6),
    bad=st.booleans().map(torch.tensor),
    donate=st.booleans(),
    lists=st.booleans(),
)
def test_a_choice_over_lists_has_the_bits_of_torch_where_in_memory_of_its_own(
    pairs, bad, donate, lists
):
    old, new = ([pair[side] for pair in pairs] for side in (0, 1))
    expected = [torch.where(bad, *pair) for pair in pairs]
    with over_lists() if lists else contextlib.nullcontext():
        given = [leaf.clone(memory_format=torch.preserve_format) for leaf in old]
        with Untouched(new if donate else (given, new)):
            found = foreach.where(bad, given, clone(new), in_place=donate)
        assert same_bits(found, expected)
        assert not donate or all(a is b for a, b in zip(found, given, strict=True))
        with Untouched(new if donate else pairs):
            in_place = donate and donation.can_write(old, new)
            found = select_leaves(bad, old, new, in_place=in_place)
    assert same_bits(found, expected)
    assert not shares_memory(new, found)
    assert donate or not shares_memory(old, found)
    memories = [t.untyped_storage().data_ptr() for t in found if t.numel()]
    assert donate or len(set(memories)) == len(memories)  # else none of them could be donated later


@given(
    st.lists(st.integers(0, 4), max_size=4).flatmap(
        lambda shape: st.tuples(st.just(shape), st.permutations(range(len(shape))))
    ),
    st.integers(1, 2),
)
def test_what_has_no_gap_is_what_torch_calls_dense_and_not_overlapping(layout, every):
    shape, order = layout
    tensor = torch.zeros(shape).permute(order)[..., ::every] if shape else torch.zeros(())
    expected = torch.ops.aten.is_non_overlapping_and_dense(tensor) or tensor.is_contiguous()
    assert memory_order.is_gapless(tensor) is expected
    assert not memory_order.is_gapless(torch.zeros(3, 1).expand(3, 4))


# ---- casts and bounds over lists -----------------------------------------------------------------


FLOATS = [f64, f32, bf16, f16]
EDGES = [0.0, -0.0, 1.0, -1.5, inf, -inf, nan, 65504.0, 65519.0, 65520.0, -7e4, 3.3895e38, 3.4e38]
EDGES += [-3.4028e38, 1e300, 2.0**-149, -(2.0**-126), 2.0**-24, 2.0**-14, 1e-310, 5e-324]


@st.composite
def floats(draw):
    """A tensor of numbers at the ends of ranges, in some layout."""
    values = draw(st.lists(st.one_of(st.sampled_from(EDGES), st.floats()), min_size=1, max_size=9))
    count = torch.Size(draw(st.sampled_from([(), (0,), (7,), (2, 3), (2, 3, 4, 5)])))
    flat = torch.tensor(values, dtype=f64).repeat(count.numel())[: count.numel()]
    laid_out = LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](flat.reshape(count))
    return laid_out.to(draw(st.sampled_from(FLOATS)))


def _one_nan(leaf):
    return torch.where(leaf.isnan(), nan, leaf)


@given(leaf=floats(), dtype=st.sampled_from(FLOATS))
def test_a_saturating_cast_keeps_what_is_finite_finite(leaf, dtype):
    cast = cast_saturating(leaf, dtype)
    finite = leaf.isfinite()
    assert bool(cast.double().isfinite()[finite].all())
    within = finite & (leaf.double().abs() <= torch.finfo(dtype).max)
    assert same_bits(cast.double()[within], leaf.to(dtype).double()[within])


@given(
    leaves=st.lists(floats(), max_size=6),
    dtypes=st.lists(st.sampled_from(FLOATS), min_size=6, max_size=6),
)
def test_a_cast_over_lists_has_the_bits_and_the_layout_of_that_tensor_by_tensor(leaves, dtypes):
    wanted = dtypes[: len(leaves)]
    expected = [cast_saturating(t, dtype) for t, dtype in zip(leaves, wanted, strict=True)]
    with over_lists(), Untouched(leaves):
        found = foreach.cast_list_saturating(leaves, wanted)
    assert same_bits(*([_one_nan(t) for t in leaves] for leaves in (found, expected)))
    new = [t for t, old in zip(found, leaves, strict=True) if t is not old and t.numel()]
    given = [t for t, old in zip(expected, leaves, strict=True) if t is not old and t.numel()]
    assert [t.stride() for t in new] == [t.stride() for t in given]
    assert not shares_memory(leaves, new)
    assert len({t.untyped_storage().data_ptr() for t in new}) == len(new)


@given(
    leaves=st.lists(floats(), max_size=6),
    bound=st.sampled_from([1.0, 65504.0, 1e39, inf, 2.0**-20, nan]),
    kind=st.sampled_from([None, *FLOATS]),
    in_place=st.booleans(),
)
@example(leaves=[torch.tensor([0.0, inf])], bound=inf, kind=None, in_place=False)
def test_a_bound_over_lists_has_the_bits_of_that_tensor_by_tensor(leaves, bound, kind, in_place):
    if kind is not None:
        bound = torch.tensor(bound, dtype=kind)
    elif math.isnan(bound):
        bound = 1.0

    def limit(dtype):
        if kind is not None:
            return bound.to(dtype)
        # torch's clamp refuses a finite number beyond the range of the dtype, and takes inf
        return bound if bound == inf else min(bound, torch.finfo(dtype).max)

    expected = [t.clamp(-limit(t.dtype), limit(t.dtype)) for t in leaves]
    given = [t.contiguous() if in_place else t for t in clone(leaves)]
    with over_lists(), Untouched([] if in_place else given):
        found = foreach.clamp(given, bound, in_place=in_place)
    assert same_bits(*([_one_nan(t) for t in leaves] for leaves in (found, expected)))
    assert not in_place or all(a is b for a, b in zip(found, given, strict=True))


@given(
    leaves=st.lists(floats(), min_size=1, max_size=6),
    operand=st.sampled_from([0.5, 3.0, 1024.0, 2.0**-20]),
    wide=st.booleans(),
    in_place=st.booleans(),
)
def test_products_and_quotients_over_lists_have_the_bits_of_those_tensor_by_tensor(
    leaves, operand, wide, in_place
):
    operand = torch.tensor(operand, dtype=f64 if wide else f32)
    quotients = [(t.float() if t.dtype is f16 else t).reshape(-1) / operand for t in leaves]
    products = [t.reshape(-1) * operand for t in leaves]
    with over_lists():
        for ours, expected, same in (
            (foreach.divide, quotients, lambda t: t.dtype is not f16),
            (foreach.multiply, products, lambda t: True),
        ):
            given = [t.contiguous() if in_place else t for t in clone(leaves)]
            with Untouched([] if in_place else given):
                found = ours(given, operand, in_place=in_place)
            assert [t.shape for t in found] == [t.shape for t in leaves]
            assert same_bits(
                [_one_nan(t).reshape(-1) for t in found],
                [_one_nan(t).to(new.dtype) for t, new in zip(expected, found, strict=True)],
            )
            for old, new in zip(given, found, strict=True):
                assert new.dtype is (old.dtype if same(old) else f32)
                assert (new is old) == (in_place and same(old))


# ---- formulas over lists -------------------------------------------------------------------------


def steps(optimizer, params, count=4, skipped=1):
    """`count` steps of which one is bad."""
    state = optimizer.init(params)
    for step in range(count):
        grads = grads_at(step, params)
        if step == skipped:
            grads = {name: g * nan for name, g in grads.items()}
        skip = torch.tensor(step == skipped)
        params, state = ps.maybe_step(optimizer, params, grads, state, skip)
    return params, state


def made(name, settings):
    """An optimizer that takes the formula, also where there is a fused kernel, as it does for
    complex parameters.
    """
    optimizer = ps.from_torch(getattr(torch.optim, name), **settings)
    optimizer.kernel = None
    return optimizer


@pytest.mark.parametrize("name", ["Adam", "SGD"])
def test_the_formula_of_a_class_with_a_fused_kernel_is_few_operators_too(name):
    assert operators_of_any(made(name, {}), step=maybe_step) <= 100


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_a_formula_over_lists_agrees_with_that_tensor_by_tensor_is_pure_and_skips(name, settings):
    optimizer, fine = made(name, settings), torch.tensor(False)
    expected = steps(optimizer, make_params())
    with over_lists():
        params, state = steps(optimizer, make_params())
        assert_close((params, state), expected, rtol=1e-5, atol=1e-6)
        grads = grads_at(5, params)
        with Untouched((params, grads, state)):
            new = optimizer.step(params, grads, state)
            chosen = ps.maybe_step(optimizer, params, grads, state, fine)
        assert not shares_memory((params, grads, state), (new, chosen))
        assert same_bits(new, chosen)
        bad = {n: torch.full_like(g, nan) for n, g in params.items()}
        with Untouched((grads, bad)):
            given = clone((params, state))
            donated = ps.maybe_step(optimizer, given[0], grads, given[1], fine, donate=True)
            given = clone((params, state))
            skipped = ps.maybe_step(optimizer, given[0], bad, given[1], ~fine, donate=True)
        assert same_bits(new, donated)
        assert same_bits(skipped, (params, state))
        assert not shares_memory(grads, donated)


@pytest.mark.parametrize("name", ["RMSprop", "Rprop"])
def test_leaves_that_lists_do_not_take_go_tensor_by_tensor(name):
    params = {"a": torch.randn(3), "b": torch.randn(3, 2).t()[:, ::2], "c": torch.randn(2)}
    grads = {
        n: torch._neg_view(torch.randn_like(p)) if n == "c" else torch.randn(p.shape)
        for n, p in params.items()
    }
    optimizer = ps.from_torch(getattr(torch.optim, name))
    state = optimizer.init(params)
    expected = optimizer.step(params, grads, state)
    with over_lists():
        assert_close(optimizer.step(params, grads, state), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("accelerator", [False, True])
def test_a_large_half_gradient_stays_finite_beside_a_complex_parameter(accelerator):
    params = {"half": torch.zeros(5, dtype=torch.float16), "complex": torch.zeros(3) * 1j}
    grads = {"half": torch.full((5,), 2.0**13, dtype=torch.float16), "complex": params["complex"]}
    sgd, scaler = ps.from_torch(torch.optim.SGD, lr=1.0), ps.StaticScale(2.0**-4).init()
    with on_an_accelerator(accelerator):
        out = ps.unscale_and_step(sgd, scaler, params, grads, sgd.init(params))
    assert not out.found_inf
    assert out.params["half"].tolist() == [-65504.0] * 5


def test_the_flat_view_of_tensors_in_two_storages_is_a_copy():
    x = torch.arange(6.0)
    parts = [x[:3], torch.zeros(6)[3:]]
    assert flat_buffer.view_or_join(parts).equal(torch.cat(parts))
    parts = [torch.empty(0), torch.ones(3)]
    assert flat_buffer.view_or_join(parts).equal(torch.ones(3))
