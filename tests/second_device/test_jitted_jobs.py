"""A step under `jit` on an accelerator: no wait, no copy between devices, the CPU's numbers."""

import functools

import pytest
from helpers import tensors
from jobs import ALIKE, JOBS
from measured import TOLERANCE, difference, numbers, trained

import purescale as ps

# `jit` refuses what these do, in words that tests/test_jit.py asks for.
REFUSED = ("`rng` in the state", "`max_retries=2`", "transformer block, checkpointed")


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in JOBS if n not in REFUSED and n not in ALIKE])
def test_a_jitted_step_waits_for_nothing_and_has_the_numbers_of_the_cpu(name):
    run = trained("sim", name, functools.partial(ps.jit, donate=0, backend="aot_eager"))
    assert run.counts[-1].reads == 0
    assert run.counts[-1].copies == 0
    assert {tensor.device.type for tensor in tensors(run.state)} == {"sim"}
    apart = map(difference, numbers(run), numbers(trained("cpu", name)))
    assert max(apart) <= TOLERANCE.get(name, 1e-6)
