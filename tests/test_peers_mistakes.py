"""Wrong answers of other libraries, as they were measured, each with the right answer."""

import pytest
import torch
from helpers import at

import purescale as ps


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
