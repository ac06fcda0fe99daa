"""maybe_step and unscale_and_step: a step over gradients that the caller brings."""

import contextlib
import math

import hypothesis.strategies as st
import pytest
import torch
import torch.utils._pytree as pytree
from helpers import any32, assert_close, at, by_parts, clone, examples, powers_of_two, trees
from hypothesis import example, given
from test_train_step import ADAMW, OPTIM, RULE, SGD

import purescale as ps
from purescale._torch.tracing import as_on_an_accelerator
from purescale.testing import Untouched, same_bits, shares_memory

ADAMAX = ps.from_torch(OPTIM.Adamax)
DAMAGED = st.sampled_from([0.0, -1.0, -4.0, math.inf, math.nan])


@pytest.mark.parametrize("optimizer", [ADAMW, SGD, ADAMAX], ids=["AdamW", "SGD", "Adamax"])
@examples(20)
@given(
    trees(any32),
    powers_of_two | DAMAGED,
    st.sampled_from([None, 0.5]),
    st.sampled_from([None, 0.1]),
    st.booleans(),
    st.booleans(),
)
def test_unscale_and_step_equals_its_parts(
    optimizer, grads, scale, max_norm, clip_value, donate, amax
):
    """Bit for bit; the values to 1e-6 where clipping is one division with unscaling."""
    params = pytree.tree_map(lambda t: None if t is None else torch.ones_like(t), grads)
    scaler, state = at(scale), optimizer.init(params)
    expected = by_parts(optimizer, scaler, params, grads, state, max_norm, clip_value)
    largest = ps.grad_amax(ps.unscale_and_check(scaler, grads)[0]) if amax else ()
    arguments = params, grads, state
    with Untouched(arguments):
        out = ps.unscale_and_step(
            *(
                optimizer,
                scaler,
                *(clone(arguments) if donate else arguments),
                max_norm,
                clip_value,
            ),
            donate=donate,
            amax=amax,
        )
    assert donate or not shares_memory((scaler, arguments), out)
    usable = 0 < scale < math.inf
    assert usable or out.found_inf
    if amax and out.found_inf:
        assert not out.grad_amax.isfinite()
    else:
        assert same_bits(out.grad_amax, largest)
    if max_norm is None or out.found_inf:
        assert same_bits(tuple(out)[:3], expected[:3])
        # under a damaged scale a NaN, whose sign does not matter
        assert same_bits(out.grad_norm, expected[3]) or not (usable or out.grad_norm.isfinite())
    else:
        assert same_bits(out.found_inf, expected[2])
        assert_close(tuple(out)[:4], expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("skip", [False, True])
def test_parameters_come_back_off_the_graph_also_from_a_step_that_is_skipped(skip, donate):
    params, grads = {"w": torch.ones(5, requires_grad=True)}, {"w": torch.ones(5)}
    state = ADAMW.init(params)
    new, _ = ps.maybe_step(ADAMW, params, grads, state, torch.tensor(skip), donate=donate)
    assert not new["w"].requires_grad
    assert same_bits(new["w"], torch.ones(5)) == skip


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
