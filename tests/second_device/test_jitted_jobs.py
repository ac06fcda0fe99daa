"""A step under `jit` on an accelerator: no wait, no copy between devices, the CPU's numbers."""

import pytest
import sim
from helpers import tensors
from jobs import JOBS
from measured import Trained, difference, numbers, trained

import purescale as ps

# `jit` refuses what these do, in words that tests/test_jit.py asks for.
REFUSED = ("`rng` in the state", "`max_retries=2`", "transformer block, checkpointed")
# torch's default step on a CPU takes the square root of `v - m * m`, where a formula has other bits
TOLERANCE = {"RMSprop, `max_norm`": 3e-5}


def jitted(device, name):
    state, step, windows = JOBS[name](device)
    step = ps.jit(step, donate=0, backend="aot_eager")
    told, counts = [], []
    for window in windows:
        with sim.waiting(refused=True), sim.counted() as count:
            state, info = step(state, window)
        told.append(info)
        counts.append(count)
    return Trained(state, told, counts)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in JOBS if name not in REFUSED])
def test_a_jitted_step_waits_for_nothing_and_has_the_numbers_of_the_cpu(name):
    run = jitted("sim", name)
    assert run.counts[-1].reads == 0
    assert run.counts[-1].copies == 0
    assert {tensor.device.type for tensor in tensors(run.state)} == {"sim"}
    apart = map(difference, numbers(run), numbers(trained("cpu", name)))
    assert max(apart) <= TOLERANCE.get(name, 1e-6)
