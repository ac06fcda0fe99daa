"""maybe_step and unscale_and_step: a step over gradients that the caller brings."""

import contextlib

import hypothesis.strategies as st
import pytest
import torch
import torch.utils._pytree as pytree
from helpers import (
    Untouched,
    any32,
    assert_close,
    clone,
    examples,
    powers_of_two,
    same_bits,
    shares_memory,
    trees,
)
from hypothesis import example, given
from test_train_step import ADAMW, OPTIM, RULE, SGD

import purescale as ps
from purescale._torch.tracing import as_on_an_accelerator


@examples(20)
@given(
    trees(any32),
    powers_of_two,
    st.sampled_from([None, 0.5]),
    st.sampled_from([None, 0.1]),
    st.booleans(),
    st.booleans(),
)
def test_unscale_and_step_equals_its_parts(grads, scale, max_norm, clip_value, donate, amax):
    """Bit for bit; the values to 1e-6 where clipping is one division with unscaling."""
    scaler = RULE.init()._replace(scale=torch.tensor(scale))
    params = pytree.tree_map(lambda t: None if t is None else torch.ones_like(t), grads)
    for optimizer in (ADAMW, SGD):
        state = optimizer.init(params)
        parts, found_inf = ps.unscale_and_check(scaler, grads)
        norm, most = (), ps.grad_amax(parts)
        if max_norm is not None:
            parts, norm = ps.clip_by_global_norm(parts, max_norm)
        if clip_value is not None:
            parts = ps.clip_by_value(parts, clip_value)
        expected = (*ps.maybe_step(optimizer, params, parts, state, found_inf), found_inf, norm)
        with Untouched((params, grads, state) if not donate else ()):
            out = ps.unscale_and_step(
                optimizer,
                scaler,
                *(
                    (clone(params), clone(grads), clone(state))
                    if donate
                    else (params, grads, state)
                ),
                max_norm,
                clip_value,
                donate=donate,
                amax=amax,
            )
        assert donate or not shares_memory((scaler, params, grads, state), out)
        if amax and out.found_inf:
            assert not out.grad_amax.isfinite()
        else:
            assert same_bits(out.grad_amax, most if amax else ())
        if max_norm is None or found_inf:
            assert same_bits(tuple(out)[:4], expected)
        else:
            assert same_bits(out.found_inf, found_inf)
            assert_close(tuple(out)[:4], expected, rtol=2e-6, atol=1e-6)


def test_a_live_optimizer_of_torch_is_refused_with_the_cure():
    params, live = {"w": torch.ones(3)}, torch.optim.AdamW([torch.ones(3)])
    message = "optimizer is .*expected an object with `init`.*from_torch"
    with pytest.raises(TypeError, match=message):
        ps.maybe_step(live, params, params, (), False)
    with pytest.raises(TypeError, match=message):
        ps.unscale_and_step(live, RULE.init(), params, params, ())


@pytest.mark.parametrize("optimizer", [SGD, ps.from_torch(torch.optim.AdamW, counts="each")])
def test_gradients_of_none_are_a_missing_gradient_or_refused(optimizer):
    leaf, tree, skip = torch.ones(3), {"w": torch.ones(3)}, torch.tensor(False)
    new, state = ps.maybe_step(optimizer, leaf, None, optimizer.init(leaf), skip)
    assert same_bits(new, leaf)
    assert state.applied == 1
    with pytest.raises((TypeError, ValueError), match="grads"):
        ps.maybe_step(optimizer, tree, None, optimizer.init(tree), skip)


EXPONENTS = {"bound": (-116, 8), "scale": (0, 24), "size": (-6, 6)}  # of 2; 1e-35 is 2**-116


@pytest.mark.parametrize("name", ["SGD", "RMSprop"])
@pytest.mark.parametrize("forced", [False, True])
@examples(20)
@given(
    exponents=st.fixed_dictionaries({k: st.integers(*v) for k, v in EXPONENTS.items()}),
    dtypes=st.sets(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), min_size=1),
    count=st.sampled_from([1, 5, 33, 300]),
    donate=st.booleans(),
)
@example({"bound": -116, "scale": 10, "size": 6}, {torch.float32, torch.float64}, 5, False)
def test_a_parameter_moves_by_its_clipped_gradient_whatever_dtypes_are_beside_it(
    name, forced, exponents, dtypes, count, donate
):
    """Also where `scale * norm / max_norm` is beyond float32."""
    bound, scale, size = (2.0 ** exponents[key] for key in EXPONENTS)
    settings = {"lr": 1 / bound} if name == "SGD" else {"lr": 1 / bound, "alpha": 1.0, "eps": 1.0}
    optimizer = ps.from_torch(getattr(OPTIM, name), **settings)
    params = {str(dtype): torch.zeros(count, dtype=dtype) for dtype in dtypes}
    grads = {key: torch.full_like(leaf, size * scale) for key, leaf in params.items()}
    norm = size * (count * len(dtypes)) ** 0.5
    expected = -size * min(1.0, bound / (norm + 1e-6)) / bound
    scaler = RULE.init()._replace(scale=torch.tensor(scale))
    state = optimizer.init(params)
    with as_on_an_accelerator() if forced else contextlib.nullcontext():
        new = ps.unscale_and_step(optimizer, scaler, params, grads, state, bound, donate=donate)
    for leaf in new.params.values():
        tolerance = 2e-2 if leaf.dtype is torch.bfloat16 else 1e-5
        assert_close(leaf, torch.full_like(leaf, expected), rtol=tolerance, atol=0)


@pytest.mark.parametrize("count", [5, 33, 300])
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, float("inf")])
def test_a_step_clips_by_the_magnitudes_of_complex_numbers_as_torch_does(p, count):
    torch.manual_seed(0)
    params = {"c": torch.randn(count, dtype=torch.complex64), "r": torch.randn(count), "n": None}
    grads = {"c": torch.randn(count, dtype=torch.complex64), "r": torch.randn(count), "n": None}
    scaler, state = ps.DynamicScale(8.0).init(), SGD.init(params)
    mirror = {key: leaf.clone().requires_grad_() for key, leaf in params.items() if key != "n"}
    for key, leaf in mirror.items():
        leaf.grad = grads[key].clone()
    norm = torch.nn.utils.clip_grad_norm_(mirror.values(), 0.5, p)
    torch.optim.SGD(mirror.values(), lr=0.1, momentum=0.9).step()
    scaled = {key: None if leaf is None else leaf * 8 for key, leaf in grads.items()}
    out = ps.unscale_and_step(SGD, scaler, params, scaled, state, 0.5, norm_type=p)
    assert_close(out.grad_norm, norm, rtol=1e-6, atol=0)
    for key, leaf in mirror.items():
        assert_close(out.params[key], leaf.detach(), rtol=1e-6, atol=1e-6)
