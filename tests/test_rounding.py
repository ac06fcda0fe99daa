"""Rounding on bits: what torch's own cast gives, and what no compiler leaves out."""

import pytest
import torch
from helpers import same_bits

from purescale._torch.dtypes import HALF, cast_saturating
from purescale._wrappers.rounding import nearest_on_bits

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
    expected, found = cast_saturating(x, dtype), nearest_on_bits(x, dtype)
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
    assert same_bits(compiled(x), cast_saturating(x, dtype).float() + 0.0)


@each_dtype
def test_the_nearest_is_the_same_mapped_and_mapped_twice(dtype):
    x = numbers_near(dtype)[:30000]
    x = x[x.isfinite()][:29700].view(3, 300, 33)

    def rounded(x):
        return nearest_on_bits(x, dtype)

    for mapped in (torch.vmap(rounded), torch.vmap(torch.vmap(rounded))):
        assert same_bits(mapped(x), cast_saturating(x, dtype))
