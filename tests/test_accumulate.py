"""The gradients of a window as a value: a weighted mean that can be split, merged, saved and read
under two policies.
"""

import math

import hypothesis.strategies as st
import pytest
import torch
import torch.utils._pytree as pytree
from helpers import (
    Untouched,
    assert_close,
    assert_donation_keeps_bits,
    at,
    clone,
    finite32,
    same_bits,
    stack,
    tensors,
    trees,
)
from hypothesis import example, given

import purescale as ps
from purescale._torch.tracing import as_on_an_accelerator
from purescale.testing import assert_pure, assert_vmap_equals_loop

INF = math.inf
weights = st.sampled_from([0, 1, 2.5, 1000, 0.001])
bad_values = st.sampled_from([INF, -INF, math.nan])


def window(gradients, weights=None, donate=False, **kwargs):
    """An AccumState over some gradients."""
    accum = ps.init_accum(gradients[0], **kwargs)
    for index, grads in enumerate(gradients):
        accum = ps.accumulate_grads(
            accum, grads, 1.0 if weights is None else weights[index], donate=donate
        )
    return accum


def scalars(*values):
    return [[torch.tensor([float(v)])] for v in values]


# ---- the mean


@given(
    trees(finite32),
    st.lists(
        st.tuples(st.floats(-1e6, 1e6, width=32) | bad_values, weights), min_size=1, max_size=5
    ),
)
def test_the_mean_is_that_of_what_is_good_in_float64_and_is_pure_and_the_same_donated(tree, parts):
    gradients = [
        pytree.tree_map(lambda t, f=f: None if t is None else t.clamp(-1e6, 1e6) + f, tree)
        for f, _ in parts
    ]
    plain, donated = ps.init_accum(tree), ps.init_accum(tree)
    for grads, (_, weight) in zip(gradients, parts, strict=True):
        plain = assert_pure(ps.accumulate_grads, plain, grads, weight)
        donated = ps.accumulate_grads(donated, grads, weight, donate=True)
    assert same_bits(plain, donated)
    assert same_bits(ps.merge_accum(plain, plain), ps.merge_accum(clone(plain), plain, donate=True))

    good = [(g, w) for g, (f, w) in zip(gradients, parts, strict=True) if w and math.isfinite(f)]
    bad, total = [w for f, w in parts if w and not math.isfinite(f)], sum(w for _, w in good)
    assert (plain.num_good, plain.num_bad, plain.found_inf) == (len(good), len(bad), bool(bad))
    assert (plain.weight, plain.bad_weight) == (pytest.approx(total), pytest.approx(sum(bad)))
    for index, mean in enumerate(tensors(plain.grads)):
        exact = sum(tensors(g)[index].double() * w for g, w in good) / (total or 1)
        exact = torch.as_tensor(exact, dtype=torch.float64).expand(mean.shape)
        # atol: 1e-6 of the largest
        torch.testing.assert_close(mean.double(), exact, rtol=1e-6, atol=1.0)

    grads, skip = assert_pure(ps.accumulated_grads, plain)
    assert skip == (bool(bad) or not good)
    assert ps.accumulated_grads(plain, on_nonfinite="drop_microbatch")[1] == (not good)
    assert same_bits(ps.accumulated_grads(donated, donate=True), (grads, skip))


def a_mean_is_the_weight():
    mean = torch.tensor(2.0).double()
    return ps.init_accum([mean])._replace(grads=[mean], weight=mean), [torch.tensor(3.0).double()]


def two_means_share_memory():
    shared = torch.tensor([1.0, 2.0])
    means = [torch.tensor([3.0]), shared, torch.tensor([4.0]), shared[:1]]
    accum = ps.init_accum(means)._replace(grads=means, weight=torch.tensor(1.0).double())
    return accum, [torch.full_like(mean, 5.0) for mean in means]


def a_mean_is_the_gradient():
    accum = window(scalars(3.0))
    return accum, accum.grads


@pytest.mark.parametrize(
    "make", [a_mean_is_the_weight, two_means_share_memory, a_mean_is_the_gradient]
)
def test_donation_of_what_shares_memory_gives_the_same_bits(make):
    assert_donation_keeps_bits(lambda donate: ps.accumulate_grads(*make(), weight=3, donate=donate))
    accum, _ = make()
    assert same_bits(ps.merge_accum(accum, accum, donate=True), ps.merge_accum(*[make()[0]] * 2))


def test_gradients_of_opposite_sign_near_the_maximum_do_not_overflow():
    # acc + (g - acc) * f would be inf.
    top = torch.finfo(torch.float32).max * (1 - 1e-6)
    for values, expected in (((top, -top), 0.0), ((top, top), top), ((-top, top, -top), -top / 3)):
        accum = window(scalars(*values))
        assert not accum.found_inf
        assert accum.grads[0].item() == pytest.approx(expected, rel=1e-6, abs=1e-6 * top)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_gradients_lose_no_bits_in_the_mean(dtype):
    torch.manual_seed(0)
    gradients = [{"w": torch.randn(64).to(dtype)} for _ in range(256)]
    accum = window(gradients)
    exact = torch.stack([g["w"].double() for g in gradients]).mean(0)
    assert accum.grads["w"].dtype is torch.float32
    assert (accum.grads["w"].double() - exact).norm() / exact.norm() < 1e-6  # a bfloat16 sum: 2e-2


@pytest.mark.parametrize(
    ("leaf", "dtype", "expected"),
    [
        (torch.float16, None, torch.float32),
        (torch.bfloat16, None, torch.float32),
        (torch.float64, None, torch.float64),
        (torch.complex64, None, torch.complex64),
        (torch.float16, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float64, torch.float64),
        (torch.complex64, torch.float64, torch.complex128),
        (torch.complex64, torch.float32, torch.complex64),
    ],
)
def test_the_dtype_of_the_mean(leaf, dtype, expected):
    params = {"w": torch.tensor([1.0], dtype=leaf, requires_grad=True)}
    accum = ps.accumulate_grads(
        ps.init_accum(params, dtype=dtype), {"w": torch.tensor([3.0], dtype=leaf)}, weight=2
    )
    accum = ps.accumulate_grads(accum, {"w": torch.tensor([6.0], dtype=leaf)}, weight=1)
    assert accum.grads["w"].dtype is expected
    assert accum.grads["w"].item() == 4
    assert not accum.grads["w"].requires_grad


def sparse(index, *values):
    """A row of 3, with these values at one index."""
    values = torch.tensor(values)
    indices = torch.full((1, len(values)), index)
    return torch.sparse_coo_tensor(indices, values, (3,), check_invariants=True)


@pytest.mark.parametrize("like", [torch.zeros(3), sparse(0, 1.0, 1.0)])
def test_sparse_gradients_are_averaged_into_a_dense_mean(like):
    accum = ps.init_accum([like])
    for index, value in ((0, 1.0), (2, 3.0), (1, INF)):
        accum = ps.accumulate_grads(accum, [sparse(index, value, value)])
    assert accum.grads[0].tolist() == [1, 0, 3]
    assert (accum.num_good, accum.num_bad) == (2, 1)


def test_none_passes_through_and_counts_as_zero_where_there_is_a_mean():
    accum = ps.init_accum({"w": torch.zeros(1), "frozen": None})
    accum = ps.accumulate_grads(accum, {"w": torch.tensor([4.0]), "frozen": None})
    accum = ps.accumulate_grads(accum, {"w": None, "frozen": None})
    assert accum.grads["frozen"] is None
    assert accum.grads["w"] == 2


def test_token_counts_beyond_2_to_the_24_are_added_exactly():
    accum = window(scalars(1.0, 1.0, 1.0), weights=[2**24, 1, 1])
    assert accum.weight == 2**24 + 2


def alike(a, b):
    assert_close(a.grads, b.grads, rtol=1e-5, atol=1e-2)  # 1e-5 of the largest gradient
    assert_close(a[1:], b[1:])


@given(
    st.lists(
        st.tuples(st.floats(-1e3, 1e3, width=32) | bad_values, weights), min_size=2, max_size=6
    ),
    st.integers(0, 6),
)
def test_two_halves_merged_are_one_window_with_the_empty_one_as_unit(parts, cut):
    values, some_weights = [[torch.tensor([v])] for v, _ in parts], [w for _, w in parts]
    whole = window(values, some_weights)
    zero = [[torch.zeros(1)]]
    first = window(zero + values[:cut], [0, *some_weights[:cut]])
    second = window(zero + values[cut:], [0, *some_weights[cut:]])
    alike(assert_pure(ps.merge_accum, first, second), whole)
    alike(ps.merge_accum(second, first), whole)
    empty = ps.init_accum([torch.zeros(1)])
    for merged in (ps.merge_accum(whole, empty), ps.merge_accum(empty, whole)):
        assert_close(merged, whole, rtol=0, atol=0)


# ---- saved, compiled, vmapped, differentiated


def body(accum, grads, weight):
    accum = ps.accumulate_grads(accum, grads, weight)
    accum = ps.merge_accum(accum, accum)
    return (
        accum,
        ps.accumulated_grads(accum),
        ps.accumulated_grads(accum, on_nonfinite="drop_microbatch"),
    )


def some_windows(count=4):
    torch.manual_seed(0)
    shapes = {"w": (4, 3), "b": (3,), "s": ()}
    accums = [
        window([{k: torch.randn(s) for k, s in shapes.items()}], [i + 1]) for i in range(count)
    ]
    grads = [{k: torch.randn(s) for k, s in shapes.items()} for _ in range(count)]
    grads[1]["b"][0] = INF
    return accums, grads, [torch.tensor(w) for w in (1.0, 2.0, 0.0, math.nan)]


def test_under_vmap_it_equals_a_loop():
    """To 1e-6: other kernels."""
    accums, grads, some_weights = some_windows()
    given = stack(accums), stack(grads), torch.stack(some_weights)
    assert_vmap_equals_loop(body, *given, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_compiled_it_is_one_graph_for_any_weight_and_agrees():
    """To 1e-6: other kernels."""
    accums, grads, some_weights = some_windows()

    def step(accum, grads, weight):
        return ps.accumulate_grads(accum, grads, weight, donate=True)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for arguments in zip(accums, grads, some_weights, strict=True):
            expected = step(*clone(arguments))
            assert_close(compiled(*clone(arguments)), expected, rtol=1e-6, atol=1e-6)


@given(
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    st.lists(
        st.tuples(
            st.floats(-1e3, 1e3, width=16) | bad_values,
            weights | st.sampled_from([2.0**64, -1.0, INF, math.nan]),
            st.sampled_from([None, False, True]),
        ),
        min_size=1,
        max_size=5,
    ),
)
def test_where_the_host_reads_nothing_a_window_is_the_same(dtype, parts):
    def one_window():
        accum = ps.init_accum([torch.zeros(size, dtype=dtype) for size in (5, 33, 300)])
        for value, weight, flag in parts:
            grads = [torch.full((size,), value, dtype=dtype) for size in (5, 33, 300)]
            found_inf = None if flag is None else torch.tensor(flag or not math.isfinite(value))
            accum = ps.accumulate_grads(accum, grads, torch.tensor(weight), found_inf)
        return accum

    read = one_window()
    with as_on_an_accelerator():
        expected = one_window()
    assert same_bits(read[1:], expected[1:])
    assert_close(read.grads, expected.grads, rtol=1e-6, atol=1e-6)


def test_a_weight_in_the_memory_of_a_donated_mean_is_read_before_it_is_overwritten():
    grads = [torch.tensor([3.0, 5.0], dtype=torch.float64)]
    accum = ps.accumulate_grads(ps.init_accum(grads), grads, weight=2.0)
    expected = ps.accumulate_grads(accum, grads, weight=accum.grads[0][0])
    donated = ps.accumulate_grads(accum, grads, weight=accum.grads[0][0], donate=True)
    assert same_bits(donated, expected)
    assert donated.weight == 5.0


def test_the_dtypes_of_a_window_do_not_depend_on_what_is_good():
    accum = ps.init_accum([torch.zeros(2)])
    accum = accum._replace(weight=accum.weight.float(), bad_weight=accum.bad_weight.float())
    good, bad = (ps.accumulate_grads(accum, [torch.full((2,), x)]) for x in (1.0, INF))
    assert [t.dtype for t in tensors(good)] == [t.dtype for t in tensors(bad)]


# ---- windows as host arithmetic


def test_without_a_total_all_windows_are_full():
    assert {ps.accumulation_window(i, every=3).divisor for i in range(10)} == {3}


@given(st.integers(1, 7), st.integers(1, 40), st.integers(0, 39))
@example(3, 10, 0)  # divisors 3, 3, 3, 1
@example(3, 103, 97)  # 2, 3, 1
def test_the_shares_of_every_window_sum_to_one(every, total, start):
    """Also of the first after an unaligned resume (OptimWrapper: 2/3 of a step) and of the last."""
    divisors = []
    for index in range(min(start, total), total):
        window = ps.accumulation_window(index, every, total, start=min(start, total))
        divisors.append(window.divisor)
        assert window.should_update == ((index + 1) % every == 0 or index + 1 == total)
        assert window.should_sync == window.should_update
        if window.should_update:
            assert divisors == [len(divisors)] * len(divisors)
            divisors = []
    assert divisors == []


# ---- bad input

ACCUM = {"w": torch.zeros(2), "c": torch.zeros(1, dtype=torch.complex64), "none": None}
C64, I64, TWO = torch.complex64, torch.int64, torch.zeros(2)


@pytest.mark.parametrize(
    ("grads", "weight", "error", "message"),
    [
        ({}, -1, ValueError, "weight is -1; a weight is finite and not negative"),
        ({}, 1e308, ValueError, r"2\*\*64 at most"),
        ({}, "3", TypeError, "weight is '3'; a weight is a number or a 0-d tensor"),
        ({}, torch.ones(2), ValueError, r"weight is a tensor of shape \(2,\)"),
        ({"w": torch.zeros(3)}, 1, ValueError, r"w'\] is \(3,\) on cpu, but \(2,\) .*init_accum"),
        ({"w": TWO.to(C64)}, 1, ValueError, r"torch.complex64, its mean torch.float32"),
        ({"w": TWO.double()}, 1, ValueError, r"Fix: init_accum\(params, dtype=torch.float64\)"),
        ({"w": TWO.to(I64)}, 1, TypeError, r"grads\['w'\] has dtype torch.int64"),
        ({"none": TWO}, 1, ValueError, r"grads\['none'\] is a tensor, but None in accum.grads"),
        ({"more": TWO}, 1, ValueError, r"missing nothing; not in accum.grads: \['more'\]"),
    ],
)
def test_bad_gradients_and_weights_are_refused_before_anything_is_written(
    grads, weight, error, message
):
    accum = ps.init_accum(ACCUM)
    with Untouched(accum), pytest.raises(error, match=message):
        ps.accumulate_grads(accum, {**ACCUM, **grads}, weight, donate=True)


def merged(other):
    return lambda: ps.merge_accum(ps.init_accum(ACCUM), ps.init_accum(other))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ps.accumulation_window(0, 0), ValueError, "every must be at least 1, got 0"),
        (lambda: ps.accumulation_window(0, 2.0), TypeError, r"every must be a whole number, got 2"),
        (lambda: ps.accumulation_window(-1, 2), ValueError, "index must be at least 0"),
        (
            lambda: ps.accumulation_window(10, 3, 10),
            ValueError,
            r"10 is .*=epochs \* len\(loader\)",
        ),
        (lambda: ps.accumulation_window(1, 3, 10, 2), ValueError, "index 1 is before start=2"),
        (merged({"w": TWO}), ValueError, r"does not match a.grads: missing \['c'\], \['none'\]"),
        (merged({**ACCUM, "w": torch.zeros(3)}), ValueError, r"a.grads\['w'\] is .* in b.grads"),
        (lambda: ps.init_accum({"n": TWO.to(I64)}), TypeError, r"'n'\] has dtype torch.int64"),
        (lambda: ps.init_accum(ACCUM, torch.float16), ValueError, "float16; expected torch.float3"),
        (
            lambda: ps.accumulated_grads(ps.init_accum(ACCUM), on_nonfinite="drop"),
            ValueError,
            "on_nonfinite must be 'drop_window' or 'drop_microbatch', got 'drop'",
        ),
        (lambda: ps.check_grad_norm(()), TypeError, "expected the 0-d tensor that clip_by_global"),
    ],
)
def test_a_wrong_argument_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("empty", [{}, {"w": None}, []])
def test_a_tree_without_tensors_is_accumulated(empty):
    accum = ps.accumulate_grads(ps.init_accum(empty), empty)
    accum = ps.merge_accum(accum, ps.accumulate_grads(accum, empty))
    grads, bad = ps.accumulated_grads(accum)
    assert grads == empty
    assert (bad.item(), accum.num_good.item()) == (False, 3)


@pytest.mark.parametrize("norm", [torch.tensor(INF), torch.tensor(math.nan)])
def test_a_norm_that_is_not_finite_can_be_made_an_error(norm):
    with pytest.raises(FloatingPointError, match=r"the global norm of the gradients is (inf|nan)"):
        ps.check_grad_norm(norm)
    ps.check_grad_norm(torch.tensor(1e30))


# ---- edges


def test_a_sparse_mean_takes_none_and_dense_gradients():
    accum = ps.accumulate_grads(ps.init_accum([sparse(0, 1.0)]), [sparse(0, 1.0)])
    assert ps.accumulate_grads(accum, [None]).grads[0].to_dense().tolist() == [0.5, 0, 0]
    assert ps.accumulate_grads(accum, [torch.ones(3)]).grads[0].tolist() == [1, 0.5, 0.5]


def test_a_sparse_gradient_that_stores_nothing_is_finite():
    nothing = sparse(0)
    assert not ps.unscale_and_check(at(2.0), [nothing])[1]
    assert ps.clip_by_global_norm([nothing], 1.0)[1] == 0
    assert not ps.accumulate_grads(ps.init_accum([torch.zeros(3)]), [nothing]).found_inf


@pytest.mark.parametrize("weight", [0.0, math.nan])
def test_a_weight_of_zero_has_a_finite_derivative(weight):
    def mean(w):
        accum = ps.accumulate_grads(ps.init_accum([torch.ones(1)]), [torch.ones(1)], w)
        merged = ps.merge_accum(
            accum, ps.accumulate_grads(ps.init_accum([torch.ones(1)]), [torch.ones(1) * 3], w)
        )
        return ps.accumulate_grads(merged, [torch.ones(1) * 3], 1.0).grads[0].sum()

    assert torch.isfinite(torch.func.grad(mean)(torch.tensor(weight)))


def test_a_bfloat16_mean_does_not_round_to_inf():
    accum = ps.accumulate_grads(
        ps.init_accum([torch.zeros(1)], dtype=torch.bfloat16), [torch.tensor([3.4e38])]
    )
    assert torch.isfinite(accum.grads[0]).all()


@pytest.mark.parametrize("weight", [math.nan, INF, -1.0, 1e308])
def test_a_weight_tensor_that_is_no_weight_makes_its_microbatch_bad(weight):
    accum = window(scalars(1.0, 2.0), weights=[1, torch.tensor(weight, dtype=torch.float64)])
    assert accum.found_inf
    assert accum.num_bad == 1
    assert accum.bad_weight == 0
    assert accum.grads[0] == 1
    assert accum.weight == 1


def test_a_window_begun_in_inference_mode_is_taken():
    with torch.inference_mode():
        accum = ps.init_accum([torch.zeros(2)])
    assert ps.accumulate_grads(accum, [torch.ones(2)], donate=True).grads[0].tolist() == [1, 1]


@pytest.mark.parametrize("field", ["num_good", "num_bad"])
def test_a_count_of_microbatches_at_its_end_does_not_wrap(field):
    grads = {"w": torch.ones(1) if field == "num_good" else torch.full((1,), torch.inf)}
    last = torch.tensor(2**31 - 1, dtype=torch.int32)
    full = ps.init_accum(grads)._replace(**{field: last})
    for _ in range(2):
        full = ps.accumulate_grads(full, grads)
        assert getattr(full, field) == last
    assert getattr(ps.merge_accum(full, full), field) == last
