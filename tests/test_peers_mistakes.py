"""Wrong answers of other libraries, as they were measured, each with the right answer."""

import math

import pytest
import torch
from helpers import at

import purescale as ps


@pytest.mark.parametrize(
    ("scale", "grad"),
    [(2.0**-140, torch.tensor([1e10 * 2.0**-140])), (2.0**-2, torch.tensor([3e38]))],
)
def test_a_finite_scaled_gradient_that_unscales_to_inf_is_found(scale, grad):
    # torch and apex look at their input only; the parameter becomes -inf.
    state = at(scale)
    true = grad.double() / scale
    unscaled, found_inf = ps.unscale_and_check(state, {"w": grad})
    assert found_inf.item() is (not torch.isfinite(true.float()).all().item())
    assert found_inf or torch.isfinite(unscaled["w"]).all()
    sgd = ps.from_torch(torch.optim.SGD, lr=1e-30)
    params = {"w": torch.ones(1)}
    for donate in (False, True):
        out = ps.unscale_and_step(
            sgd, state, params, {"w": grad.clone()}, sgd.init(params), donate=donate
        )
        assert out.found_inf == found_inf
        assert torch.isfinite(out.params["w"]).all()


def test_finite_gradients_whose_sum_or_norm_overflows_are_no_overflow():
    # DeepSpeed sums each gradient; 4 * 3e38 is inf. A foreach_norm squares 1e30.
    for grad in (torch.full((4,), 3e38), torch.full((4,), 1e30)):
        assert not ps.unscale_and_check(at(1.0), [grad])[1]


def test_float16_gradients_are_taken_and_do_not_underflow():
    # torch refuses them, or unscales in float16, where 1e-3 * 2**-16 is 0.
    unscaled, found_inf = ps.unscale_and_check(
        at(2.0**16), [torch.tensor([1e-3], dtype=torch.float16)]
    )
    assert unscaled[0].dtype is torch.float32
    assert unscaled[0].item() == torch.tensor(1e-3, dtype=torch.float16).item() * 2.0**-16
    assert not found_inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_duplicate_sparse_indices_that_overflow_together_are_found(dtype):
    # torch checks the stored values only; coalesced they are inf and the parameter becomes -inf.
    big = torch.finfo(torch.float32).max * 0.8 if dtype is torch.float32 else 6e4
    grad = torch.sparse_coo_tensor(
        torch.tensor([[1, 1]]), torch.tensor([big, big], dtype=dtype), (3,), check_invariants=True
    )
    unscaled, found_inf = ps.unscale_and_check(at(1.0), [grad])
    # 120000 fits in float32, into which float16 is unscaled
    assert found_inf.item() is (dtype is torch.float32)
    assert found_inf or unscaled[0].to_dense().tolist() == [
        0,
        2 * torch.tensor(6e4, dtype=dtype).item(),
        0,
    ]


@pytest.mark.parametrize("bad", [None, complex(math.inf, 0), complex(0, math.nan)])
def test_complex_gradients_are_taken(bad):
    # torch: not implemented.
    grad = torch.tensor([4 + 8j, 4 if bad is None else bad], dtype=torch.complex64)
    unscaled, found_inf = ps.unscale_and_check(at(4.0), [grad])
    assert found_inf.item() is (bad is not None)
    assert unscaled[0].dtype is torch.complex64
    assert unscaled[0][0] == 1 + 2j


@pytest.mark.parametrize("grads", [{"a": None, "b": [None]}, {}, ()])
def test_no_gradient_at_all_is_no_error_and_no_overflow(grads):
    # torch: AssertionError "No inf checks were recorded".
    unscaled, found_inf = ps.unscale_and_check(at(8.0), grads)
    assert unscaled == grads
    assert not found_inf
