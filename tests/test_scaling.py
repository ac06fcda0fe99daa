"""scale_loss, unscale_and_check and check_scaler."""

import math

import hypothesis.strategies as st
import pytest
import torch
import torch.utils._pytree as pytree
from helpers import (
    Untouched,
    any32,
    at,
    finite32,
    in_one_graph,
    powers_of_two,
    same_bits,
    shares_memory,
    stack,
    trees,
)
from hypothesis import given

import purescale as ps
from purescale.testing import assert_pure, assert_vmap_equals_loop

# ---- scaling and unscaling


@given(trees(finite32), powers_of_two)
def test_unscaling_what_was_scaled_is_the_identity(tree, scale):
    state = at(scale)
    scaled = pytree.tree_map(
        lambda t: None if t is None else torch.vmap(lambda x: ps.scale_loss(state, x))(t), tree
    )
    unscaled, found_inf = ps.unscale_and_check(state, scaled)
    assert same_bits(unscaled, tree)
    assert not found_inf


@given(finite32, st.integers(-20, 20))
def test_the_identity_holds_on_the_step_where_the_scale_grows(value, exponent):
    rule = ps.DynamicScale(2.0**exponent, growth_interval=1)
    state = rule.init()
    grads = torch.func.grad(lambda w: ps.scale_loss(state, w * value))(torch.tensor(1.0))
    unscaled, found_inf = ps.unscale_and_check(state, grads)
    assert rule.update(state, found_inf).scale == 2 * state.scale
    assert unscaled == value


@given(trees(any32), powers_of_two)
def test_found_inf_is_whether_an_input_or_output_is_not_finite(tree, scale):
    leaves = [t for t in pytree.tree_leaves(tree) if t is not None]
    oracle = any(
        not torch.isfinite(t).all() or not torch.isfinite((t.double() / scale).float()).all()
        for t in leaves
    )
    assert ps.unscale_and_check(at(scale), tree)[1].item() is oracle


@given(trees(any32), powers_of_two)
def test_unscaling_agrees_with_float64_division(tree, scale):
    unscaled, _ = ps.unscale_and_check(at(scale), tree)
    expected = pytree.tree_map(lambda t: None if t is None else (t.double() / scale).float(), tree)
    torch.testing.assert_close(
        pytree.tree_leaves(unscaled), pytree.tree_leaves(expected), rtol=0, atol=0, equal_nan=True
    )


@given(trees(any32), powers_of_two)
def test_unscaling_is_pure(tree, scale):
    assert_pure(ps.unscale_and_check, at(scale), tree)


@given(trees(any32), powers_of_two)
def test_unscaling_with_donation_gives_the_same_bits(tree, scale):
    expected = ps.unscale_and_check(at(scale), tree)
    assert same_bits(ps.unscale_and_check(at(scale), tree, donate=True), expected)


def test_donation_divides_a_gradient_that_stands_twice_once():
    grad = torch.tensor([8.0])
    unscaled, _ = ps.unscale_and_check(at(4.0), {"a": grad, "b": grad}, donate=True)
    assert unscaled["a"] == unscaled["b"] == 2


@given(trees(any32), powers_of_two)
def test_unscaling_under_vmap_equals_a_loop(tree, scale):
    tree = pytree.tree_map(lambda t: torch.zeros(2) if t is None else t, tree)
    stacks = stack([at(scale), at(2 * scale)]), stack([tree, tree])
    assert_vmap_equals_loop(ps.unscale_and_check, *stacks)


def test_unscaling_differentiates():
    grad = torch.func.grad(lambda g: ps.unscale_and_check(at(4.0), {"w": g})[0]["w"].sum())(
        torch.ones(2)
    )
    assert grad.tolist() == [0.25, 0.25]


@pytest.mark.parametrize("scale", [2.0**-149, 2.0**-140, 2.0**-127, 2.0**126, 2.0**127])
def test_unscaling_is_exact_where_the_reciprocal_overflows(scale):
    unscaled, found_inf = ps.unscale_and_check(at(scale), [torch.tensor(3.0) * scale])
    assert unscaled[0] == (3.0 if scale < 2.0**127 else math.inf)
    assert found_inf.item() is (scale == 2.0**127)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_nothing_scaled_by_a_damaged_scale_is_trusted(scale):
    assert ps.unscale_and_check(at(scale), [torch.ones(2)])[1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_scaled_loss_is_at_least_float32(dtype, shape):
    scaled = ps.scale_loss(at(2.0**16), torch.full(shape, 2.0, dtype=dtype))
    assert scaled.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    assert scaled.shape == shape
    assert scaled.item() == 2.0**17


def test_a_tree_of_losses_is_scaled_leaf_by_leaf():
    scaled = ps.scale_loss(at(8.0), {"g": torch.tensor(1.0), "d": (torch.tensor(2.0), None)})
    assert scaled == {"g": torch.tensor(8.0), "d": (torch.tensor(16.0), None)}


def test_scaling_the_loss_is_pure():
    assert_pure(ps.scale_loss, at(1.0), torch.tensor(3.0))


# ---- check_scaler


def test_check_scaler_is_silent_while_training_moves():
    rule = ps.DynamicScale()
    ps.check_scaler(rule.update(rule.init(), torch.tensor(True)), rule, max_skips=1)


@pytest.mark.parametrize("scale", [0.0, math.inf, math.nan])
def test_check_scaler_raises_on_a_damaged_scale(scale):
    with pytest.raises(FloatingPointError, match=r"rule\.init"):
        ps.check_scaler(at(scale), ps.DynamicScale())


def test_check_scaler_raises_at_the_floor():
    rule = ps.DynamicScale(1.0, min_scale=1.0)
    with pytest.raises(FloatingPointError, match="smallest scale"):
        ps.check_scaler(rule.update(rule.init(), torch.tensor(True)), rule)


def test_check_scaler_raises_after_too_many_skips():
    rule = ps.StaticScale(1.0)
    state = rule.update(rule.update(rule.init(), torch.tensor(True)), torch.tensor(True))
    ps.check_scaler(state, rule, max_skips=2)
    with pytest.raises(FloatingPointError, match="2 steps in a row"):
        ps.check_scaler(state, rule, max_skips=1)


STOPPED = {
    "too many skips": (ps.StaticScale(1.0), 1),
    "at the floor": (ps.DynamicScale(1.0, min_scale=1.0), None),
}


def stopped(name, loss):
    rule, max_skips = STOPPED[name]
    state = rule.update(rule.update(rule.init(), torch.tensor(True)), torch.tensor(True))
    with pytest.raises(FloatingPointError) as raised:
        ps.check_scaler(state, rule, max_skips, loss=loss)
    return str(raised.value)


@pytest.mark.parametrize("name", STOPPED)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_check_scaler_does_not_blame_the_scale_for_a_loss_that_is_not_finite(name, value):
    for loss in (value, torch.tensor(value), torch.tensor([value], dtype=torch.float16)):
        told = stopped(name, loss)
        assert f"The loss itself is {value}. Look at the data" in told
        assert "forward_report" in told
        assert "init_scale" not in told


@pytest.mark.parametrize("name", STOPPED)
def test_check_scaler_tells_that_gradients_overflow_where_the_loss_is_finite(name):
    told = stopped(name, torch.tensor(2.5))
    assert "The loss is finite, 2.5, so its gradients overflow: `grad_report`" in told
    assert ("init_scale" in told) == (name == "too many skips")


@pytest.mark.parametrize("name", STOPPED)
def test_check_scaler_without_the_loss_asks_for_it_first(name):
    assert "First check whether the loss itself is inf or NaN" in stopped(name, None)


def test_check_scaler_tells_that_a_static_scale_cannot_follow_a_loss_that_a_lower_one_mends():
    told = stopped("too many skips", math.inf)
    assert "the scale is 1.0, which never moves" in told
    assert "the loss holds a gradient of its own, scaled by the scale: DynamicScale()" in told
    assert "DynamicScale" not in stopped("at the floor", math.inf)


def test_one_loss_that_is_not_finite_stops_no_training():
    rule = ps.DynamicScale()
    state = rule.update(rule.init(), torch.tensor(True))
    ps.check_scaler(state, rule, max_skips=1, loss=torch.tensor(math.nan))


@pytest.mark.parametrize("loss", [torch.ones(2), "nan", torch.tensor(1j)])
def test_check_scaler_takes_the_loss_of_one_step(loss):
    with pytest.raises(TypeError, match=r"loss must be that of one step.*Fix: loss=info.loss"):
        ps.check_scaler(ps.DynamicScale().init(), ps.DynamicScale(), loss=loss)


# ---- bad input


SHAPE, DTYPE = r"loss\['g'\] has shape .*Fix: `loss.mean\(\)`", "dtype torch.{}"


@pytest.mark.parametrize(
    ("loss", "error", "words"),
    [
        *(({"g": torch.ones(shape)}, ValueError, SHAPE) for shape in (2, (1, 2), 0)),
        ({"d": torch.tensor(1.0), "g": torch.ones(2)}, ValueError, SHAPE),
        (torch.tensor(1), TypeError, DTYPE.format("int64")),
        (torch.tensor(True), TypeError, DTYPE.format("bool")),
        (torch.tensor(1j), TypeError, DTYPE.format("complex64")),
        (1.5, TypeError, "a loss is a tensor"),
    ],
    ids=str,
)
def test_what_is_no_loss_is_refused(loss, error, words):
    with pytest.raises(error, match=words):
        ps.scale_loss(at(1.0), loss)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        *(
            (torch.ones(2, dtype=d), f"has dtype {d}")
            for d in (torch.int64, torch.bool, torch.uint8)
        ),
        (1.0, "is float"),
    ],
)
def test_what_is_no_gradient_is_refused_by_path_and_nothing_is_changed(mask, words):
    grads = {"conv": {"weight": torch.ones(2)}, "mask": [mask]}
    with Untouched(grads), pytest.raises(TypeError, match=rf"grads\['mask'\]\[0\] {words}"):
        ps.unscale_and_check(at(2.0), grads, donate=True)


def test_a_state_on_another_device_than_the_gradients_is_refused():
    with pytest.raises(ValueError, match=r"grads\['w'\] is on meta, the scaler state on cpu"):
        ps.unscale_and_check(at(1.0), {"w": torch.ones(2, device="meta")})
    with pytest.raises(ValueError, match="loss is on meta, the scaler state on cpu"):
        ps.scale_loss(at(1.0), torch.ones((), device="meta"))


def test_a_flag_that_is_not_0d_is_refused():
    with pytest.raises(ValueError, match="one flag decides"):
        ps.DynamicScale().update(ps.DynamicScale().init(), torch.tensor([True, False]))


def test_check_scaler_takes_one_state():
    state = ps.DynamicScale().init()
    words = r"check_scaler takes the state of one scaler.*Fix: `check_scaler\(state.scaler, rule\)`"
    for wrong in (stack([state, state]), ps.DynamicScale(), None, 8.0):
        with pytest.raises(TypeError, match=words):
            ps.check_scaler(wrong, ps.DynamicScale(), max_skips=3)
    for bound in (2.5, "3", True):
        with pytest.raises(TypeError, match="max_skips must be a whole number"):
            ps.check_scaler(state, ps.DynamicScale(), max_skips=bound)


# ---- edges that a careless change would break


def test_a_coalesced_sparse_gradient_shares_no_indices_with_its_result():
    grad = torch.sparse_coo_tensor(
        torch.tensor([[0, 2]]), torch.ones(2), (3,), check_invariants=True
    ).coalesce()
    assert not shares_memory(grad, ps.unscale_and_check(at(2.0), [grad])[0])


def test_a_sparse_gradient_comes_back_dense_with_its_duplicates_summed():
    grad = torch.sparse_coo_tensor(
        torch.tensor([[1, 1]]), torch.tensor([2.0, 4.0]), (3,), check_invariants=True
    )
    assert ps.unscale_and_check(at(2.0), [grad])[0][0].tolist() == [0, 3, 0]


def test_an_expanded_gradient_is_donated_safely():
    grad = torch.full((1,), 8.0).expand(3)
    assert ps.unscale_and_check(at(2.0), [grad], donate=True)[0][0].tolist() == [4, 4, 4]


def test_unscaling_writes_into_the_gradients_given_up():
    grads = {"w": torch.ones(4)}
    assert shares_memory(ps.unscale_and_check(at(2.0), grads, donate=True)[0], grads)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    "layout", [torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc]
)
def test_a_compressed_sparse_gradient_is_refused_by_path(layout):
    block = {"blocksize": (1, 2)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}
    grad = torch.eye(2, 4).to_sparse(layout=layout, **block)
    message = rf"grads\['w'\] has the layout {layout}; expected dense or sparse COO. Fix: "
    with pytest.raises(TypeError, match=message):
        ps.unscale_and_check(at(2.0), {"w": grad})


def test_an_empty_gradient_is_finite():
    unscaled, found_inf = ps.unscale_and_check(at(2.0), [torch.ones(0, 3), torch.ones(1)])
    assert unscaled[0].shape == (0, 3)
    assert not found_inf


def test_a_scale_of_zero_is_bad_even_without_a_gradient():
    assert ps.unscale_and_check(at(0.0), [torch.zeros(0)])[1]
    assert ps.unscale_and_check(at(0.0), {"frozen": None})[1]


def test_check_scaler_is_silent_at_the_floor_without_an_overflow():
    rule = ps.DynamicScale(1.0, min_scale=1.0)
    ps.check_scaler(rule.init(), rule)


def test_bfloat16_gradients_stay_bfloat16():
    unscaled, _ = ps.unscale_and_check(
        at(2.0), [torch.ones(2, dtype=torch.bfloat16), torch.ones((), dtype=torch.bfloat16)]
    )
    assert [t.dtype for t in unscaled] == [torch.bfloat16] * 2


def test_compiled_donation_writes_into_the_gradients_given_up():
    grads = {"w": torch.ones(4)}
    compiled = in_one_graph(lambda s, g: ps.unscale_and_check(s, g, donate=True))
    assert shares_memory(compiled(at(2.0), grads)[0], grads)
