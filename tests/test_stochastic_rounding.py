"""Rounding by chance: unbiased, exact where it can be, the same bits wherever it runs."""

import functools

import pytest
import torch
from helpers import CLASSES, clone, examples, same_bits, stack, unstack
from hypothesis import given
from hypothesis import strategies as st

import purescale as ps
from purescale.testing import assert_pure

HALF = (torch.bfloat16, torch.float16)
SIZES = (5, 33, 300)
each_dtype = pytest.mark.parametrize("dtype", HALF)


def numbers(size, seed=0, scale=1.0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale


def neighbours(x, dtype):
    """The two numbers of `dtype` around each x, from torch's own cast, in float64."""
    near = x.to(dtype)
    away = torch.nextafter(near, torch.full_like(near, torch.inf))
    toward = torch.nextafter(near, torch.full_like(near, -torch.inf))
    below = torch.where(near.double() <= x.double(), near, toward).double()
    above = torch.where(near.double() >= x.double(), near, away).double()
    return below, above


# ---- the rule ------------------------------------------------------------------------------------


@each_dtype
def test_a_number_becomes_one_of_its_two_neighbours(dtype):
    for scale in (1.0, 1e-3, 3e-6, 1e-7, 1e3):
        x = numbers(3000, scale=scale)
        below, above = neighbours(x, dtype)
        found = ps.stochastic_round(x, dtype, seed=1).double()
        assert ((found == below) | (found == above)).all()
        assert (found == below).any()
        assert (found == above).any()


@each_dtype
@pytest.mark.parametrize("value", [1 + 2.0**-9, -1.3, 3.1e-6, 1.1e-7, 6.1e-5, 64999.5])
def test_rounding_is_unbiased(dtype, value):
    """The mean over elements, and over steps of one element, to four standard deviations."""
    count = 20000
    x = torch.full((count,), value)
    (below, above), exact = neighbours(x[:1], dtype), x[0].double()
    gap = (above - below).item()
    p = (exact - below) / gap if gap else torch.zeros(())
    bound = 4 * gap * (p * (1 - p) / count).sqrt().item() + 2.0**-16 * gap
    mean = ps.stochastic_round(x, dtype, seed=2).double().mean()
    assert (mean - exact).abs() <= bound
    steps = torch.arange(count)
    one = torch.vmap(lambda step: ps.stochastic_round(x[0], dtype, seed=2, step=step))(steps)
    assert (one.double().mean() - exact).abs() <= bound


@each_dtype
def test_what_the_dtype_can_hold_keeps_its_bits(dtype):
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    every = every[~every.isnan()]  # infinities and both zeros among them
    for wide in (torch.float32, torch.float64):
        assert same_bits(ps.stochastic_round(every.to(wide), dtype, seed=3), every)
    assert same_bits(ps.stochastic_round(every, dtype, seed=3), every)


@each_dtype
def test_the_other_half_dtype_is_rounded_as_its_float32(dtype):
    """Also the numbers of bfloat16 above the largest of float16, which stay finite."""
    (other,) = {*HALF} - {dtype}
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(other)
    every = every[~every.isnan()]
    rounded = ps.stochastic_round(every, dtype, seed=5)
    assert same_bits(rounded, ps.stochastic_round(every.float(), dtype, seed=5))
    assert torch.equal(rounded.isfinite(), every.isfinite())


@each_dtype
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_finite_stays_finite_and_what_is_not_stays_what_it_is(dtype, wide):
    limit, top = torch.finfo(dtype).max, torch.finfo(wide).max
    edge = torch.tensor(limit, dtype=wide)
    beyond = torch.nextafter(edge, torch.full_like(edge, torch.inf))
    x = torch.stack([beyond, -beyond, torch.full_like(edge, top), torch.full_like(edge, -top)])
    for step in range(20):
        found = ps.stochastic_round(x, dtype, seed=4, step=step)
        assert found.tolist() == [limit, -limit, limit, -limit]
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000], dtype=torch.int64)
    nans = bits.to(torch.int32).view(torch.float32)
    assert ps.stochastic_round(nans, dtype, seed=4).isnan().all()
    infinite = torch.tensor([torch.inf, -torch.inf], dtype=wide)
    assert ps.stochastic_round(infinite, dtype, seed=4).tolist() == [torch.inf, -torch.inf]


@examples(20)
@given(seed=st.integers(-(2**63), 2**63 - 1), step=st.integers(0, 2**40))
def test_leaves_steps_and_seeds_do_not_share_their_dice(seed, step):
    x = torch.full((4000,), 1 + 2.0**-8)  # halfway
    up = {}
    for name, s, t in (("same", seed, step), ("step", seed, step + 1), ("seed", seed ^ 1, step)):
        tree = ps.stochastic_round([x, x], torch.bfloat16, seed=s, step=t)
        up[name] = [(leaf > 1).double() * 2 - 1 for leaf in tree]
    rows = [row for pair in up.values() for row in pair]
    for index, row in enumerate(rows):
        others = rows[index + 1 :]
        found = [row.mean(), (row[1:] * row[:-1]).mean(), *[(row * o).mean() for o in others]]
        assert max(abs(value.item()) for value in found) < 6.5 / 4000**0.5


def test_the_bits_are_these():
    """A change of the hash would change what a run that is resumed comes to."""
    found = ps.stochastic_round(torch.full((12,), 1 + 2.0**-8), torch.bfloat16, seed=7, step=5)
    assert (found > 1).int().tolist() == BITS


BITS = [1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 1]


# ---- one function, everywhere --------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("size", [*SIZES, 2**18 + 5])
def test_the_same_bits_in_blocks_and_with_a_step_that_is_a_tensor(dtype, size):
    tree = {"a": numbers(size), "b": numbers((size, 2))[:, 1]}  # no contiguous memory
    tree |= {"none": None, "n": torch.arange(3)}
    found = assert_pure(functools.partial(ps.stochastic_round, dtype=dtype, seed=5, step=9), tree)
    assert same_bits(found, ps.stochastic_round(tree, dtype, seed=5, step=torch.tensor(9)))
    assert (found["none"], found["n"].tolist(), found["a"].dtype) == (None, [0, 1, 2], dtype)
    for start in (0, size // 2):  # of its place in the leaf
        part = {**tree, "a": tree["a"][: start + 1]}
        some = ps.stochastic_round(part, dtype, seed=5, step=9)
        assert same_bits(some["a"], found["a"][: start + 1])


@pytest.mark.slow
def test_compiled_has_the_same_bits():
    def both(tree, step):
        return [ps.stochastic_round(tree, dtype, seed=5, step=step) for dtype in HALF]

    compiled = torch.compile(both, fullgraph=True)
    tree = {str(size): numbers(size) for size in SIZES}
    tree |= {"small": numbers(33, scale=1e-6), "double": numbers(33).double()}
    assert same_bits(compiled(tree, torch.tensor(3)), both(tree, 3))


@each_dtype
def test_mapped_has_the_same_bits(dtype):
    round = functools.partial(ps.stochastic_round, dtype=dtype, seed=5)
    trees = [{"a": numbers(33, seed), "b": numbers(5, seed)} for seed in range(3)]
    steps = torch.tensor([4, 4, 9])
    found = torch.vmap(lambda tree, step: round(tree, step=step))(stack(trees), steps)
    for index, tree in enumerate(trees):
        assert same_bits(unstack(found, index), round(tree, step=steps[index]))


def test_what_is_no_half_precision_and_no_number_is_refused():
    ones, half = torch.ones(2), torch.bfloat16
    with pytest.raises(ValueError, match=r"bfloat16 or torch.float16, got dtype=torch.float32"):
        ps.stochastic_round(ones, torch.float32, seed=0)
    with pytest.raises(TypeError, match=r"seed must be"):
        ps.stochastic_round(ones, half, seed=0.5)
    with pytest.raises(TypeError, match=r"step is a tensor of shape.*expected a whole number"):
        ps.stochastic_round(ones, half, seed=0, step=torch.tensor(1.0))
    with pytest.raises(TypeError, match=r"tree\['a'\] has the layout torch.sparse_coo"):
        ps.stochastic_round({"a": ones.to_sparse()}, half, seed=0)
    with pytest.raises(TypeError, match=r"expected an object with `init`.*Fix: from_torch"):
        ps.with_stochastic_rounding(torch.optim.AdamW)


# ---- the wrapper ---------------------------------------------------------------------------------

SETTINGS = {**CLASSES, "RMSprop": {"momentum": 0.9}}
# With a fused kernel, by a formula, with slots of other shapes, over whole matrices.
SOME = ("AdamW", "SGD", "RMSprop", "Adafactor", "Muon")


def made(name, lr=1e-2, **extra):
    return ps.from_torch(getattr(torch.optim, name), lr=lr, **{**SETTINGS[name], **extra})


def params_of(dtypes=(*HALF, torch.float32, torch.float64)):
    return {
        f"{str(dtype)[6:]}_{size}": numbers((size, 1), seed=size).to(dtype)
        for dtype in dtypes
        for size in SIZES
    }


def grads_of(params, seed):
    """float16's in float32, as unscaling gives them."""
    grads = {}
    for index, (name, p) in enumerate(params.items()):
        dtype = torch.float32 if p.dtype is torch.float16 else p.dtype
        grads[name] = numbers(p.shape, seed + index).to(dtype)
    return grads


def wide_of(params):
    return {n: p.float() if p.dtype in HALF else p for n, p in params.items()}


def like(grads, wide):
    return {n: g.to(wide[n].dtype) for n, g in grads.items()}


def by_hand(optimizer, params, grads, inner, count):
    """The step in float32 and then the rounding, of public functions."""
    wide = wide_of(params)
    new, inner = optimizer.step(wide, like(grads, wide), inner)
    rounded = {dtype: ps.stochastic_round(new, dtype, seed=11, step=count) for dtype in HALF}
    return {n: rounded[p.dtype][n] if p.dtype in HALF else new[n] for n, p in params.items()}, inner


@pytest.mark.parametrize("name", SOME)
def test_a_step_is_that_in_float32_rounded(name, way):
    optimizer = made(name)
    wrapped = ps.with_stochastic_rounding(optimizer, seed=11)
    params = params_of()
    state, expected = wrapped.init(params), params
    inner = optimizer.init(wide_of(params))
    assert same_bits(state.inner, inner)
    for index in range(3):
        grads = grads_of(params, 100 * index)
        expected, inner = by_hand(optimizer, expected, grads, inner, index)
        old = clone((params, state))
        donated = ps.maybe_step(wrapped, old[0], grads, old[1], False, donate=True)
        params, state = assert_pure(wrapped.step, params, grads, state)
        assert same_bits(params, expected)
        assert same_bits(state, ps.RoundingState(inner, torch.tensor(index + 1)))
        assert same_bits(donated, (params, state))


def test_a_transformation_is_stepped_in_float32():
    def update(grads, state, params):
        assert all(p.dtype is torch.float32 for p in params.values())
        return {n: -0.1 * g for n, g in grads.items()}, state + 1

    tx = ps.from_transformation((lambda params: torch.zeros(()), update))
    wrapped = ps.with_stochastic_rounding(tx, seed=11)
    params = params_of((torch.bfloat16,))
    grads, state = grads_of(params, 0), wrapped.init(params)
    found, state = wrapped.step(params, grads, state)
    exact = {n: p.float() - 0.1 * grads[n].float() for n, p in params.items()}
    assert same_bits(found, ps.stochastic_round(exact, torch.bfloat16, seed=11))
    assert (state.inner, state.applied) == (1, 1)
