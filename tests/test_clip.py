"""Clipping."""

import functools
import itertools
import math

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from helpers import (
    AsOnAnAccelerator,
    Dispatched,
    Untouched,
    at,
    clone,
    examples,
    finite32,
    in_processes,
    same_bits,
    shares_memory,
    tensors,
    trees,
)
from hypothesis import example, given
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import purescale as ps
from purescale._grads import clip
from purescale._grads.measure import StatsOptions, measure, measure_exactly
from purescale._torch import dtensor
from purescale._tree.gradients import Gradients, Pending
from purescale.testing import assert_pure, assert_vmap_equals_loop

norm_types = st.sampled_from([1.0, 2.0, 3.0, 0.5, math.inf])
bounds = st.sampled_from([1e-3, 0.5, 1.0, 100.0, math.inf])
moderate = st.floats(-1e4, 1e4, width=32).filter(lambda x: x == 0 or abs(x) > 1e-4)


@given(trees(moderate), bounds, st.sampled_from([1.0, 2.0, 3.0, math.inf]))
def test_clipping_by_norm_agrees_with_torch_is_pure_and_donates(tree, max_norm, norm_type):
    mirror = [torch.zeros_like(t).requires_grad_() for t in tensors(tree)]
    for m, t in zip(mirror, tensors(tree), strict=True):
        m.grad = t.clone()
    expected = torch.nn.utils.clip_grad_norm_(mirror, max_norm, norm_type)
    clipped, norm = assert_pure(ps.clip_by_global_norm, tree, max_norm, norm_type)
    torch.testing.assert_close(norm, expected, rtol=2e-6, atol=0)
    torch.testing.assert_close(tensors(clipped), [m.grad for m in mirror], rtol=2e-6, atol=1e-30)
    donated = ps.clip_by_global_norm(tree, max_norm, norm_type, donate=True)
    assert same_bits(donated, (clipped, norm))


ANY = st.floats(width=32, allow_nan=True, allow_infinity=True)
SCALES = st.sampled_from([1.0, 2.0**16, 2.0**-24, 0.0, math.inf, math.nan])


@given(
    trees(ANY),
    SCALES,
    st.sampled_from([None, "scale", 4.0, 0.0]),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float64]),
)
@example([torch.full((5,), 1e35)], 2.0**-24, "scale", True, torch.float32)  # beyond float32
@example([torch.full((9000,), 1e-25)], 1.0, "scale", True, torch.float32)  # squares vanish
@example([torch.full((5,), 1e30)], math.nan, 4.0, False, torch.float32)
def test_what_a_cpu_reads_is_what_the_specification_computes(tree, scale, divisor, amax, dtype):
    scale = torch.tensor(scale)
    if divisor is not None:
        divisor = scale if divisor == "scale" else torch.tensor(divisor)
    for norm_type, owned in itertools.product((None, 2.0, 3.0), (False, True)):
        leaves = [leaf.to(dtype, copy=True) for leaf in tensors(tree)]
        grads = Gradients.of_leaves(leaves, Pending(divisor), owned=owned)
        options = StatsOptions(norm_type, amax=amax)
        exact, (read, _) = measure_exactly(grads, scale, options), measure(grads, scale, options)
        assert read.overflow == exact.overflow
        for number, expected in ((read.norm, exact.norm), (read.amax, exact.amax)):
            assert (number is None) == (expected is None)
            if number is not None and not exact.overflow:
                measured = torch.as_tensor(number, dtype=expected.dtype)
                torch.testing.assert_close(measured, expected, rtol=2e-6, atol=0)


@given(trees(finite32), norm_types)
def test_the_norm_agrees_with_float64(tree, norm_type):
    _, norm = ps.clip_by_global_norm(tree, math.inf, norm_type)
    every = torch.cat([t.double().flatten() for t in tensors(tree)])
    expected = norm_as_tensor([tree], norm_type) if every.any() else every.new_zeros(())
    torch.testing.assert_close(norm.double(), expected, rtol=1e-5, atol=1e-44)


@pytest.mark.parametrize("size", [1e30, 1e-20, 1e-30, 3e38])
def test_clipping_is_that_of_float64_where_squares_overflow_or_vanish(size):
    mirror = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    mirror.grad = torch.full((4,), size).double()
    expected = torch.nn.utils.clip_grad_norm_([mirror], size)
    clipped, norm = ps.clip_by_global_norm([torch.full((4,), size)], max_norm=size)
    torch.testing.assert_close(norm, expected.float(), rtol=1e-6, atol=0)
    torch.testing.assert_close(clipped[0], mirror.grad.float(), rtol=1e-6, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("sizes", [[700], [2**20 + 7], [2**17 + 513] * 4, [300] * 1000])
def test_the_norm_of_many_similar_gradients_is_that_of_float64(sizes, forced):
    """A sum in float32 rounds to one side with each of them."""
    for size in (0.0101, 1.0, 1.1, 1.37, 1.9):
        for draw in (torch.ones, torch.randn):
            grads = [draw(n) * size for n in sizes]
            expected = math.sqrt(sum(g.double().square().sum().item() for g in grads))
            with AsOnAnAccelerator() if forced else Dispatched():
                norm = ps.clip_by_global_norm(grads, math.inf)[1]
            assert abs(norm.item() / expected - 1) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_dtypes_stay(dtype):
    grads = [torch.full((4,), 3, dtype=dtype), torch.tensor(0, dtype=dtype)]
    clipped, norm = ps.clip_by_global_norm(grads, 3.0)
    assert [t.dtype for t in clipped] == [dtype, dtype]
    assert norm.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    torch.testing.assert_close(clipped[0].abs().float(), torch.full((4,), 1.5), rtol=1e-2, atol=0)


def sparse(*values):
    """A row of 2, with these values, one on the other, at its beginning."""
    indices = torch.zeros(1, len(values), dtype=torch.int64)
    return torch.sparse_coo_tensor(indices, torch.tensor(values), (2,), check_invariants=True)


def test_a_sparse_gradient_counts_with_its_summed_values():
    clipped, norm = ps.clip_by_global_norm([sparse(3.0, 1.0), torch.tensor([3.0])], 2.5)
    assert norm == 5
    torch.testing.assert_close(clipped[0].to_dense(), torch.tensor([2.0, 0.0]))
    assert ps.clip_by_value([sparse(3.0, 3.0)], 1.0)[0].to_dense().tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("grads", "norm"),
    [({"frozen": None}, 0.0), ({"none": torch.ones(0, 3), "w": torch.ones(1)}, 1)],
)
def test_what_is_empty_counts_nothing_in_the_norm_and_below_the_bound_bits_stay(grads, norm):
    assert same_bits(ps.clip_by_global_norm(grads, 5.0), (grads, torch.tensor(float(norm))))


@given(trees(moderate), st.sampled_from([1e-3, 1.0, 100.0]))
def test_clipping_by_value_agrees_with_torch_is_pure_and_donates(tree, bound):
    clipped = assert_pure(ps.clip_by_value, tree, bound)
    assert same_bits(tensors(clipped), [t.clamp(-bound, bound) for t in tensors(tree)])
    assert same_bits(ps.clip_by_value(tree, bound, donate=True), clipped)


@examples(20)
@given(trees(moderate), bounds)
def test_clipping_under_vmap_equals_a_loop(tree, max_norm):
    def clip(grads):
        return ps.clip_by_value(ps.clip_by_global_norm(grads, max_norm)[0], 10.0)

    tree = pytree.tree_map(lambda t: torch.zeros(2) if t is None else t, tree)
    stacked = pytree.tree_map(lambda t: torch.stack([t, 3 * t]), tree)
    assert_vmap_equals_loop(clip, stacked, rtol=2e-6, atol=1e-30)


ONE = {"w": torch.ones(1)}
NO_BOUNDS = [0, -1.0, math.nan, torch.ones(2)]
BOUND, P = r"must be above 0|0-d tensor, got shape", "norm_type must be above 0, a number, got "
WRONG = {"w": torch.tensor([1])}


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        *((lambda b=b: ps.clip_by_global_norm(ONE, b), ValueError, BOUND) for b in NO_BOUNDS),
        *((lambda b=b: ps.clip_by_value(ONE, b), ValueError, BOUND) for b in NO_BOUNDS),
        *(
            (lambda p=p: ps.clip_by_global_norm(ONE, 1.0, p), ValueError, P)
            for p in (0, -1.0, "2", None, torch.tensor(2.0))
        ),
        (lambda: ps.clip_by_global_norm(WRONG, 1.0), TypeError, r"grads\['w'\]"),
        (lambda: ps.clip_by_value(WRONG, 1.0), TypeError, r"grads\['w'\]"),
        (lambda: ps.clip_by_value({"w": torch.ones(1) * 1j}, 1.0), TypeError, "torch.complex64"),
        (lambda: ps.clip_by_global_norm(ONE, 1.0, group="pp"), ValueError, "no process group"),
        (lambda: _stepped(ONE, ONE, at(1.0), norm_group="pp"), ValueError, "no process .*Fix: "),
    ],
)
def test_a_wrong_argument_is_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize("bound", [1e5, torch.tensor(1e5)])
@pytest.mark.parametrize("grad", [torch.tensor([-2.0, 2.0]).half(), torch.tensor(2.0).half()])
def test_a_bound_beyond_the_range_of_the_dtype_is_no_bound(grad, bound):
    assert same_bits(ps.clip_by_value([grad], bound), [grad])


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("bound", [math.inf, torch.tensor(math.inf)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_bound_of_inf_keeps_inf_as_torch_does(dtype, bound, forced):
    grads = [torch.tensor([-math.inf, math.inf, 2.0]).to(dtype) for _ in range(3)]
    with AsOnAnAccelerator() if forced else Dispatched():
        clipped = ps.clip_by_value(grads, bound)
    assert same_bits(clipped, [g.clamp(-math.inf, math.inf) for g in grads])


@pytest.mark.parametrize(
    ("p", "value", "size", "rtol"),
    [
        (0.1, 1e-30, 300_000, 1e-4),
        (10.0, 1e-44, 2, 2e-2),
        (100.0, 1e-40, 2, 1e-5),
        (3.0, 1e38, 2, 1e-5),
        (0.5, 1e-40, 2, 1e-5),
    ],
)
def test_norms_of_any_p_neither_overflow_nor_vanish(p, value, size, rtol):
    leaf = torch.full((size,), value)
    clipped, norm = ps.clip_by_global_norm([leaf], 1.0, norm_type=p)
    assert norm.item() == pytest.approx(leaf[0].item() * size ** (1 / p), rel=rtol)
    assert torch.isfinite(clipped[0]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_norm_of_zeros_has_a_finite_derivative(dtype):
    zeros, ones = torch.zeros(2, dtype=dtype), torch.ones(2, dtype=dtype)
    by_ones, by_zeros = torch.func.grad(
        lambda a, b: ps.clip_by_global_norm([a, b], 1.0)[1], argnums=(0, 1)
    )(ones, zeros)
    assert torch.isfinite(by_ones).all()
    assert by_zeros.tolist() == [0, 0]
    assert torch.isfinite(
        torch.func.grad(lambda x: ps.clip_by_global_norm([x], 1.0)[0][0].sum())(zeros)
    ).all()


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("bound", [math.inf, torch.tensor(math.inf)])
def test_a_bound_of_inf_only_measures_also_what_is_not_finite(bound, bad):
    grads = [torch.tensor([bad, 1.0])]
    assert same_bits(ps.clip_by_global_norm(grads, bound), (grads, torch.tensor(bad)))


@pytest.mark.parametrize("clip", [ps.clip_by_global_norm, ps.clip_by_value])
def test_clipping_writes_into_the_gradients_given_up(clip):
    grads = {"w": torch.ones(4)}
    assert shares_memory(clip(grads, 1.0, donate=True), grads)


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("bound", [1e-6, torch.tensor(1e-6)], ids=["number", "tensor"])
def test_clipping_has_torchs_epsilon(bound, forced):
    grads, zeros = [torch.tensor([1e-6])], [torch.zeros(1)]
    assert ps.clip_by_global_norm(zeros, bound)[0][0].item() == 0
    with AsOnAnAccelerator() if forced else Dispatched():
        clipped, _ = ps.clip_by_global_norm(grads, bound)
        out = ps.unscale_and_step(SGD, at(1.0), zeros, grads, SGD.init(zeros), bound)
    assert clipped[0].item() == pytest.approx(5e-7)
    assert out.params[0].item() == pytest.approx(-5e-7)


@pytest.mark.parametrize("clip", [ps.clip_by_global_norm, ps.clip_by_value])
@pytest.mark.parametrize("value", [-1.0, 0.0, math.nan])
def test_a_tensor_bound_that_is_none_leaves_no_gradient(clip, value):
    grads = {n: torch.linspace(-3, 3, n) for n in (5, 33, 300)}
    for dtype in (torch.float32, torch.float64):
        clipped = clip(grads, torch.tensor(value, dtype=dtype))
        clipped = clipped[0] if len(clipped) == 2 else clipped
        assert all(leaf.isnan().all() for leaf in tensors(clipped))


# ---- over ranks that hold other parts of a model -------------------------------------------------

SGD = ps.from_torch(torch.optim.SGD, lr=1.0)


def part(rank, size=1.0, dtype=torch.float32, count=5):
    """What one rank holds: other names, shapes and numbers than the others."""
    g = torch.Generator().manual_seed(rank)
    leaf = torch.randn(count + 3 * rank, generator=g, dtype=torch.float64)
    more = torch.randn(2, 1 + rank, generator=g, dtype=torch.float64)
    return {f"w{rank}": (leaf * size).to(dtype), "b": (more * size).to(dtype)}


def norm_as_tensor(parts, p):
    """In float64, in units of the largest."""
    every = torch.cat([leaf.double().reshape(-1) for tree in parts for leaf in tensors(tree)])
    unit = every.abs().max()
    return torch.linalg.vector_norm(every / unit, p) * unit


def _norms_of_parts(rank):
    world = dist.group.WORLD
    for p in (1.0, 2.0, 3.0, 0.5, 7.0, math.inf):
        for size, dtype, count in (
            (1.0, torch.float32, 300),
            (1e30, torch.float32, 5),
            (1e-30, torch.float32, 33),
            (1e200, torch.float64, 33),
            (1.0, torch.bfloat16, 300),
        ):
            parts = [part(r, size, dtype, count) for r in range(dist.get_world_size())]
            expected = norm_as_tensor(parts, p)
            with Untouched(parts[rank]), Dispatched() as run:
                clipped, norm = ps.clip_by_global_norm(parts[rank], size, p, group=world)
            assert run.reductions == 1
            assert norm.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
            torch.testing.assert_close(norm.double(), expected, rtol=1e-6, atol=0)
            factor = min(1.0, size / (expected.item() + 1e-6))
            wanted = [(leaf.double() * factor).to(dtype) for leaf in tensors(parts[rank])]
            low = 1e-2 if dtype is torch.bfloat16 else 2e-6
            torch.testing.assert_close(tensors(clipped), wanted, rtol=low, atol=1e-44)
            given = clone(parts[rank])
            again = ps.clip_by_global_norm(given, size, p, donate=True, group=world)
            assert same_bits(again, (clipped, norm))
            with AsOnAnAccelerator() as run:
                forced = ps.clip_by_global_norm(parts[rank], size, p, group=world)
            assert run.reads == 0
            assert same_bits(forced, (clipped, norm))
    huge = {"w": torch.full((4,), 3e38) if rank else torch.zeros(1)}
    assert ps.clip_by_global_norm(huge, 1.0, group=world)[1].isinf(), "beyond float32"
    alone = {"w": torch.tensor([3 + 4j])} if rank == 1 else {"frozen": None}
    assert ps.clip_by_global_norm(alone, 1.0, 1.0, group=world)[1] == 5
    for bad in (math.inf, math.nan):
        grads = {"w": torch.tensor([bad if rank else 1.0])}
        assert not ps.clip_by_global_norm(grads, 1.0, group=world)[1].isfinite()


def _stepped(params, grads, scaler, **settings):
    params, grads = clone(params), clone(grads)
    return ps.unscale_and_step(SGD, scaler, params, grads, SGD.init(params), **settings)


def _steps_of_parts(rank):
    world, ranks = dist.group.WORLD, dist.get_world_size()
    for p, amax in ((2.0, False), (1.0, True), (3.0, False), (math.inf, True)):
        for bad in (None, 0, ranks - 1):
            parts = [part(r, 40.0, torch.float16, 33) for r in range(ranks)]
            if bad is not None:
                parts[bad]["b"][0, 0] = math.inf
            params = {name: grad.float() for name, grad in parts[rank].items()}
            settings = {"max_norm": 1.0, "norm_type": p, "amax": amax, "norm_group": world}
            step = functools.partial(_stepped, params, parts[rank], at(4.0), **settings)
            with Dispatched() as run:
                out = step()
            assert run.reductions == 1
            assert same_bits(step(donate=True), out)
            with AsOnAnAccelerator() as run:
                forced = step()
            assert run.reads == 0
            assert out.found_inf.item() is forced.found_inf.item() is (bad is not None)
            torch.testing.assert_close(forced.params, out.params, rtol=1e-6, atol=1e-7)
            assert out.grad_norm.isfinite().item() is (bad is None)
            if bad is not None:
                assert same_bits(out.params, params)
                continue
            unscaled = [{k: g.float() / 4 for k, g in each.items()} for each in parts]
            norm = norm_as_tensor(unscaled, p)
            assert same_bits(forced.grad_norm, out.grad_norm)
            torch.testing.assert_close(out.grad_norm.double(), norm, rtol=1e-6, atol=0)
            if amax:
                assert out.grad_amax == norm_as_tensor(unscaled, math.inf)
            for name, grad in unscaled[rank].items():
                expected = params[name] - grad * (1 / (norm.item() + 1e-6))
                torch.testing.assert_close(out.params[name], expected, rtol=1e-5, atol=1e-5)
    # the flag alone: without a bound no norm is measured
    grads = {"w": torch.tensor([4.0, math.inf if rank else 4.0])}
    out = _stepped({"w": torch.ones(2)}, grads, at(4.0), norm_group=world)
    assert out.found_inf
    assert out.grad_norm == ()


def _compiled_parts(rank):
    world, ranks = dist.group.WORLD, dist.get_world_size()
    mine = part(rank)
    params, scaler = {k: torch.ones_like(g) for k, g in mine.items()}, at(4.0)
    opt_state = SGD.init(params)

    def step(grads):
        clipped, norm = ps.clip_by_global_norm(grads, 1.0, group=world)
        return norm, ps.unscale_and_step(
            SGD, scaler, params, clipped, opt_state, 0.1, norm_group=world
        )

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for factor in (1.0, 3.0, math.inf):
        grads = {name: grad * (factor if rank == ranks - 1 else 1.0) for name, grad in mine.items()}
        torch.testing.assert_close(compiled(grads), step(grads), equal_nan=True)


@pytest.mark.slow
def test_a_norm_over_ranks_that_hold_other_parts_is_that_of_the_whole_model_in_one_graph_too():
    in_processes((_norms_of_parts, _steps_of_parts, _compiled_parts), 3)


def _stages_and_replicas(rank):
    """Two stages (rank // 2), each in two replicas; then each in two shards."""
    stage = rank // 2
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "replica"))
    stages, replicas = grid.get_group("stage"), grid.get_group("replica")
    parts = [part(each, 4.0) for each in range(2)]
    params = {name: torch.zeros_like(grad) for name, grad in parts[stage].items()}
    for bad in (None, 0, 1, 2, 3):
        grads = clone(parts[stage])
        if rank == bad:
            grads["b"][0, 0] = math.nan
        settings = {"max_norm": 1.0, "group": replicas, "norm_group": stages}
        out = _stepped(params, grads, at(4.0), **settings)
        # known to the stages of one replica, then to each stage in every replica
        assert out.found_inf.item() is (bad is not None)
        if bad is None:
            expected = norm_as_tensor(parts, 2.0) / 4
            torch.testing.assert_close(out.grad_norm.double(), expected, rtol=1e-6, atol=0)
    mesh = grid["replica"]
    shards = {
        name: distribute_tensor(grad, mesh, [Shard(0)], src_data_rank=None)
        for name, grad in parts[stage].items()
    }
    for p in (1.0, 2.0, math.inf):
        clipped, norm = ps.clip_by_global_norm(shards, 1.0, p, group=stages)
        torch.testing.assert_close(norm.double(), norm_as_tensor(parts, p), rtol=1e-6, atol=0)
        name = f"w{stage}"
        expected = parts[stage][name] / (norm + 1e-6)
        torch.testing.assert_close(clipped[name].full_tensor(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_stages_of_replicas_and_stages_of_shards_know_the_norm_of_all_stages():
    in_processes(_stages_and_replicas, 4)


@given(norm=st.floats(0, 100), max_norm=st.floats(1e-3, 100))
def test_the_factor_is_rounded_once_of_numbers_and_of_tensors_and_none_for_a_number_of_1(
    norm, max_norm
):
    expected = min(1.0, max_norm / (norm + 1e-6))
    assert clip.clip_factor(torch.tensor(norm, dtype=torch.float64), max_norm).item() == expected
    assert clip.clip_factor_of_number(norm, max_norm) == (expected if expected < 1 else None)


ON_META = ps.DynamicScale().init("meta")


@pytest.mark.parametrize(
    ("refuse", "dtype", "message"),
    [
        (lambda g: ps.unscale_and_check(ON_META, g), torch.float32, "the scaler state on"),
        (lambda g: ps.clip_by_value(g, 1.0), torch.complex64, "complex"),
        (
            lambda g: ps.clip_by_global_norm({**g, "v": torch.ones(2, device="meta")}, 1.0),
            torch.float32,
            "must be on one device",
        ),
    ],
)
def test_gradients_are_refused_before_one_is_reduced_or_made_dense(
    refuse, dtype, message, monkeypatch
):
    def reduce(leaf):
        raise AssertionError("work before a check")

    monkeypatch.setattr(dtensor, "reduce_partial", reduce)
    with pytest.raises((TypeError, ValueError), match=message):
        refuse({"w": torch.ones(5, dtype=dtype).to_sparse()})
