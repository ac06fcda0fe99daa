"""Rounding on bits: what torch's own cast gives, and what no compiler leaves out."""

import pytest
import torch
from helpers import same_bits

from purescale._torch import half_bits
from purescale._torch.dtypes import HALF, saturating
from purescale._torch.half_bits import bitcast, nearest_on_bits

each_dtype = pytest.mark.parametrize("dtype", HALF)


def numbers_near(dtype):
    """All numbers of a half dtype, halfway between two, beside that, and any bits of float32."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).float()
    finite = every[every.isfinite()].sort().values
    halfway = ((finite[1:].double() + finite[:-1].double()) / 2).float()
    up, down = torch.full_like(halfway, torch.inf), torch.full_like(halfway, -torch.inf)
    beside = [torch.nextafter(halfway, up), torch.nextafter(halfway, down)]
    bits = torch.randint(-(2**31), 2**31, (200000,), generator=torch.Generator().manual_seed(0))
    return torch.cat([every, halfway, *beside, bits.to(torch.int32).view(torch.float32)])


@each_dtype
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_the_nearest_is_torchs_own(dtype, wide):
    x = numbers_near(dtype).to(wide)
    expected, found = saturating(x, dtype), nearest_on_bits(x, dtype)
    assert same_bits(found.isnan(), expected.isnan())
    assert same_bits(found[~found.isnan()], expected[~expected.isnan()])


@each_dtype
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiler_keeps_the_rounding_between_two_steps(dtype, backend):
    """A cast down and up again in one graph rounds; inductor leaves out casts that do that."""

    def there_and_back(x):
        return nearest_on_bits(x, dtype).float() + 0.0

    x = numbers_near(dtype)
    x = x[x.isfinite()]
    compiled = torch.compile(there_and_back, fullgraph=True, backend=backend)
    assert same_bits(compiled(x), saturating(x, dtype).float() + 0.0)


# the second is what the first calls under a transform of torch 2.11
@pytest.mark.slow
@pytest.mark.parametrize("cast", [bitcast, half_bits._bitcast])
@pytest.mark.parametrize(
    ("dtype", "other"), [(torch.float32, torch.int32), (torch.int16, torch.bfloat16)]
)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_bitcast_is_the_view_also_mapped_and_mapped_twice(cast, dtype, other, compiled):
    bits = torch.tensor([[0, 1, -1, 0x7F80], [0x3F80, -0x8000, 0x7FC0, 5]], dtype=torch.int16)
    x = bits.repeat(1, 2).view(dtype)
    for mapped in (
        cast,
        torch.vmap(cast, (0, None)),
        torch.vmap(torch.vmap(cast, (0, None)), (0, None)),
    ):
        if compiled:
            mapped = torch.compile(mapped, fullgraph=True, backend="aot_eager")
        assert same_bits(mapped(x, other), x.view(other))
