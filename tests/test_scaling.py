"""scale_loss, unscale_and_check and check_scaler."""

import math
from typing import NamedTuple

import pytest
import torch
import torch.utils._pytree as pytree
from helpers import (
    Untouched,
    any32,
    at,
    examples,
    finite32,
    powers_of_two,
    same_bits,
    shares_memory,
    stack,
    tensors,
    trees,
)
from hypothesis import given

import purescale as ps
from purescale._torch import private
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


@examples(25)
@given(trees(any32), powers_of_two)
def test_unscaling_is_float64_division_pure_and_the_same_donated_and_mapped(tree, scale):
    def divided(t):
        return (t.double() / scale).float()

    unscaled, found_inf = assert_pure(ps.unscale_and_check, at(scale), tree)
    given, found = tensors(tree), tensors(unscaled)
    torch.testing.assert_close(found, list(map(divided, given)), rtol=0, atol=0, equal_nan=True)
    assert found_inf.item() is not all(bool(t.isfinite().all()) for t in [*given, *found])
    mapped = pytree.tree_map(lambda t: torch.zeros(2) if t is None else t, tree)
    stacks = stack([at(scale), at(2 * scale)]), stack([mapped, mapped])
    assert_vmap_equals_loop(ps.unscale_and_check, *stacks)
    assert same_bits(ps.unscale_and_check(at(scale), tree, donate=True), (unscaled, found_inf))


@pytest.mark.parametrize("scale", [2.0**-149, 2.0**-140, 2.0**-127, 2.0**126, 2.0**127])
def test_unscaling_is_exact_where_the_reciprocal_overflows(scale):
    unscaled, found_inf = ps.unscale_and_check(at(scale), [torch.tensor(3.0) * scale])
    assert unscaled[0] == (3.0 if scale < 2.0**127 else math.inf)
    assert found_inf.item() is (scale == 2.0**127)


@pytest.mark.parametrize("bad", [None, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("scale", [1.0, 2.0**16, 2.0**126, 2.0**127, 2.0**-3, 3.0])
@pytest.mark.parametrize("size", [5, 33, 300])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_donated_gradients_have_the_bits_and_the_flag_of_those_without_torchs_operator(
    dtype, size, scale, bad, monkeypatch
):
    exponents = torch.arange(size * 2.0).remainder(200) - 130
    grads = (torch.exp2(exponents) * 1.2345 * scale).to(dtype).clamp(max=torch.finfo(dtype).max)
    grads[0] = torch.finfo(dtype).max  # inf over a scale below 1
    if bad is not None:
        grads[-1] = bad
    grads = [grads[:size], grads[size:].double()]

    def unscale():
        return ps.unscale_and_check(at(scale), [g.clone() for g in grads], donate=True)

    by_operator = unscale()
    monkeypatch.setattr(private, "unscale_and_check_", False, raising=False)
    assert same_bits(by_operator, unscale())


@pytest.mark.parametrize(
    ("scale", "is_used"),
    [(1.0, True), (2.0**126, True), (2.0**127, False), (0.5, False), (3.0, False)],
)
def test_torchs_operator_unscales_where_its_product_is_exact(scale, is_used, monkeypatch):
    calls, operator = [], private.unscale_and_check_

    def counted(*args):
        calls.append(args)
        return operator(*args)

    monkeypatch.setattr(private, "unscale_and_check_", counted, raising=False)
    ps.unscale_and_check(at(scale), [torch.ones(5)], donate=True)
    assert len(calls) == is_used


@pytest.mark.parametrize(("max_norm", "norm_type"), [(None, 2.0), (0.5, 2.0), (0.5, 3.0)])
@pytest.mark.parametrize("donate", [False, True])
def test_a_step_has_the_derivative_of_torch_func_with_respect_to_the_scale(
    donate, max_norm, norm_type
):
    sgd = ps.from_torch(torch.optim.SGD, lr=0.5, differentiable=True)

    def stepped(scale, donate=False):
        params, grads = torch.ones(5), torch.arange(5.0)
        scaler = at(1.0)._replace(scale=scale)
        clip = {"max_norm": max_norm, "norm_type": norm_type}
        new = ps.unscale_and_step(
            sgd, scaler, params, grads, sgd.init(params), donate=donate, **clip
        )
        return new.params.square().sum()

    scale = torch.tensor(4.0, requires_grad=True)
    [derivative] = torch.autograd.grad(stepped(scale, donate), scale)
    torch.testing.assert_close(derivative, torch.func.grad(stepped)(scale.detach()))


def test_unscaling_donated_gradients_has_a_derivative_with_respect_to_the_scale():
    scale = torch.tensor(4.0, requires_grad=True)
    unscaled, _ = ps.unscale_and_check(at(1.0)._replace(scale=scale), torch.ones(5), donate=True)
    assert torch.autograd.grad(unscaled.sum(), scale) == (-5 / 16,)


@pytest.mark.parametrize("wrap", [ps.with_master_weights, ps.with_stochastic_rounding])
def test_donated_half_gradients_below_the_range_of_bfloat16_reach_masters(wrap):
    optimizer = wrap(ps.from_torch(torch.optim.SGD, lr=2.0**126, momentum=0.9))
    params = torch.zeros(5, dtype=torch.bfloat16)

    def step(donate):
        grads = torch.full((5,), 1.2734375 * 2.0**-112, dtype=torch.bfloat16)
        state = optimizer.init(params)
        copy = params.clone()
        return ps.unscale_and_step(optimizer, at(2.0**16), copy, grads, state, donate=donate)

    assert same_bits(step(donate=True), step(donate=False))


@pytest.mark.parametrize("scale", [4.0, 3.0])
def test_a_write_into_donated_gradients_is_counted(scale):
    grads = [torch.ones(5), torch.ones(())]
    ps.unscale_and_check(at(scale), grads, donate=True)
    assert [grad._version for grad in grads] == [1, 1]


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_nothing_scaled_by_a_damaged_scale_is_trusted_even_without_a_gradient(scale):
    for grads in ([torch.ones(2)], [torch.zeros(0)], {"frozen": None}):
        assert ps.unscale_and_check(at(scale), grads)[1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_scaled_loss_is_at_least_float32(dtype, shape):
    scaled = ps.scale_loss(at(2.0**16), torch.full(shape, 2.0, dtype=dtype))
    assert scaled.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    assert scaled.shape == shape
    assert scaled.item() == 2.0**17


def test_a_tree_of_losses_is_scaled_leaf_by_leaf():
    losses = {"g": torch.tensor(1.0), "d": (torch.tensor(2.0), None)}
    scaled = assert_pure(ps.scale_loss, at(8.0), losses)
    assert scaled == {"g": torch.tensor(8.0), "d": (torch.tensor(16.0), None)}


# ---- check_scaler


def skipped(rule, times=2):
    state = rule.init()
    for _ in range(times):
        state = rule.update(state, torch.tensor(True))
    return state


MOVES, STATIC = ps.DynamicScale(), ps.StaticScale(1.0)
AT_THE_FLOOR = ps.DynamicScale(1.0, min_scale=1.0)


class Bare(NamedTuple):
    """A state that counts no skips: after 50 overflows in a row it would say none."""

    scale: torch.Tensor


def test_check_scaler_is_silent_while_training_moves():
    ps.check_scaler(skipped(MOVES, 1), MOVES, max_skips=1, loss=torch.tensor(math.nan))
    ps.check_scaler(skipped(STATIC), STATIC, max_skips=2)
    ps.check_scaler(AT_THE_FLOOR.init(), AT_THE_FLOOR)
    ps.check_scaler(Bare(torch.tensor(8.0)), MOVES)


@pytest.mark.parametrize("scale", [0.0, math.inf, math.nan])
def test_check_scaler_raises_on_a_damaged_scale(scale):
    with pytest.raises(FloatingPointError, match=r"rule\.init"):
        ps.check_scaler(at(scale), MOVES)


@pytest.mark.parametrize(
    ("rule", "loss", "words", "not_said"),
    [
        (STATIC, None, "2 steps in a row .*First check whether the loss itself is inf", None),
        (AT_THE_FLOOR, None, "smallest scale.*First check whether the loss itself is inf", None),
        (STATIC, torch.tensor(2.5), "finite, 2.5, .*`grad_report`.*init_scale", None),
        (AT_THE_FLOOR, 2.5, "finite, 2.5, .*`grad_report`", "init_scale"),
        (STATIC, math.inf, "never moves.*The loss itself is inf.*DynamicScale", "init_scale"),
        (AT_THE_FLOOR, torch.tensor([math.nan]).half(), "is nan.*forward_report", "DynamicScale"),
    ],
)
def test_check_scaler_says_whether_the_loss_or_the_scale_is_to_blame(rule, loss, words, not_said):
    with pytest.raises(FloatingPointError, match=words) as raised:
        ps.check_scaler(skipped(rule), rule, max_skips=1, loss=loss)
    assert not_said is None or not_said not in str(raised.value)


ONE_STATE = r"takes the state of one scaler.*Fix: `check_scaler\(state.scaler, rule\)`"
ONE_LOSS = r"loss must be that of one step.*Fix: loss=info.loss"
NO_COUNT = "max_skips=3 with a Bare, which does not count skips. Fix: a field `consecutive_skips`"
STATE = MOVES.init()


@pytest.mark.parametrize(
    ("scaler", "settings", "words"),
    [
        *((s, {"max_skips": 3}, ONE_STATE) for s in (stack([STATE, STATE]), MOVES, None, 8.0)),
        *((STATE, {"max_skips": n}, "max_skips must be a whole number") for n in (2.5, "3", True)),
        *((STATE, {"loss": loss}, ONE_LOSS) for loss in (torch.ones(2), "nan", torch.tensor(1j))),
        (Bare(torch.tensor(8.0)), {"max_skips": 3}, NO_COUNT),
    ],
)
def test_check_scaler_takes_one_state_that_counts_and_the_loss_of_one_step(scaler, settings, words):
    with pytest.raises(TypeError, match=words):
        ps.check_scaler(scaler, MOVES, **settings)


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


def test_a_flag_is_0d_and_may_be_a_number():
    rule = ps.DynamicScale(8.0)
    for flag in (True, torch.tensor(True), torch.tensor(1.0), torch.tensor(2)):
        assert rule.update(rule.init(), flag).scale == 4
        assert ps.select(flag, torch.zeros(1), torch.ones(1)) == 0
    with pytest.raises(ValueError, match="one flag decides"):
        rule.update(rule.init(), torch.tensor([True, False]))


# ---- kinds of gradients


def sparse(*rows):
    indices, values = torch.tensor([rows]), torch.tensor([2.0, 4.0])
    return torch.sparse_coo_tensor(indices, values, (3,), check_invariants=True)


@pytest.mark.parametrize(
    ("grad", "expected"), [(sparse(1, 1), [0, 3, 0]), (sparse(0, 2).coalesce(), [1, 0, 2])]
)
def test_a_sparse_gradient_comes_back_dense_with_its_duplicates_summed(grad, expected):
    [unscaled], _ = ps.unscale_and_check(at(2.0), [grad])
    assert unscaled.tolist() == expected
    assert not shares_memory(grad, unscaled)


def test_an_empty_gradient_is_finite():
    unscaled, found_inf = ps.unscale_and_check(at(2.0), [torch.ones(0, 3), torch.ones(1)])
    assert unscaled[0].shape == (0, 3)
    assert not found_inf


def test_bfloat16_gradients_stay_bfloat16():
    unscaled, _ = ps.unscale_and_check(
        at(2.0), [torch.ones(2, dtype=torch.bfloat16), torch.ones((), dtype=torch.bfloat16)]
    )
    assert [t.dtype for t in unscaled] == [torch.bfloat16] * 2


def test_compiled_and_donated_gradients_are_unscaled_in_their_own_memory():
    state, grads = ps.DynamicScale(init_scale=2.0).init(), {"w": torch.full((2,), 4.0)}
    unscale = torch.compile(
        lambda state, grads: ps.unscale_and_check(state, grads, donate=True),
        backend="eager",
        fullgraph=True,
    )
    address = grads["w"].data_ptr()
    new, _ = unscale(state, grads)
    assert new["w"].equal(torch.full((2,), 2.0))
    assert new["w"].data_ptr() == address
