"""Whatever is trained: a step on an accelerator does not wait, copies nothing between devices, has
the results of the CPU, and with `donate=True` stays where it is.
"""

import gc

import pytest
import sim
import torch
from helpers import same_bits, tensors
from jobs import JOBS
from measured import measured, numbers, trained, written

import purescale as ps
from purescale._optim import fused

each = pytest.mark.parametrize("name", JOBS)
# torch's default step on a CPU takes the square root of `v - m * m`, where a formula has other bits
TOLERANCE = {"RMSprop, `max_norm`": 3e-5}


@each
def test_a_step_waits_only_where_the_docstring_says_so(name):
    if name == "`max_retries=2`":
        assert measured(name).reads > 0
        assert "only if\n    `max_retries` is above 0" in ps.train_step.__doc__.split("\n\n")[0]
    else:
        assert measured(name).reads == 0


@each
def test_a_warm_step_copies_nothing_between_devices(name):
    assert measured(name).copies == 0


@each
def test_the_numbers_are_those_of_the_cpu(name):
    assert measured(name).difference <= TOLERANCE.get(name, 1e-6)


def test_the_second_window_of_a_job_overflows():
    for name in ("AdamW, `max_norm`", "masters of bfloat16", "3 microbatches"):
        told = trained("sim", name).told
        assert [bool(info.found_inf) for info in told] == [False, True, False, False]


def test_the_table_in_the_docs_is_that_of_these_jobs():
    """`python tests/second_device/measured.py` writes it."""
    version, rows = written()
    assert list(rows) == list(JOBS)
    for name, row in rows.items():
        found = measured(name)
        assert found.reads == row.reads
        assert found.difference <= max(row.below, TOLERANCE.get(name, 1e-6))
        if torch.__version__.startswith(version):
            assert found.launches == pytest.approx(row.launches, rel=0.1), name


# ---- without fused kernels -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Adagrad", "Adam", "AdamW", "SGD"])
def test_a_device_without_masked_fused_kernels_has_the_same_numbers(name, monkeypatch):
    monkeypatch.setattr(fused, "MASKED_BY_KERNELS", set())
    with sim.launched() as names:
        found = trained("sim", f"{name}, `max_norm`")
    assert not any("fused" in launch for launch in names)
    expected = trained("cpu", f"{name}, `max_norm`")
    torch.testing.assert_close(
        numbers(found), numbers(expected), rtol=1e-6, atol=1e-6, equal_nan=True
    )


# ---- donated steps, which a graph captures -------------------------------------------------------

DONATED = [
    name
    for name in JOBS
    if name not in ("a loop by hand", "`accumulate_grads`", "an ensemble, by vmap")
]


@pytest.mark.parametrize("name", DONATED)
def test_a_donated_step_has_the_bits_of_one_in_fresh_memory(name):
    found, expected = trained("sim", name, donate=True), trained("sim", name)
    assert same_bits(numbers(found), numbers(expected))


# Left out: what the host reads; the loop whose rule makes a new scale by hand.
CAPTURED = [
    name
    for name in DONATED
    if name not in ("`rng` in the state", "`max_retries=2`", "`unscale_and_step`")
]


@pytest.mark.parametrize("name", CAPTURED)
def test_a_warm_donated_step_keeps_each_tensor_of_the_state_at_its_address(name):
    state, step, windows = JOBS[name]("sim")
    before = [tensor.data_ptr() for tensor in tensors(state)]
    assert len(set(before)) == len(before)
    for window in windows:
        state, _ = step(state, window, donate=True)
        assert [tensor.data_ptr() for tensor in tensors(state)] == before


@pytest.mark.parametrize("name", CAPTURED)
def test_a_warm_donated_step_allocates_nothing_that_outlives_it_but_what_it_tells(name):
    state, step, windows = JOBS[name]("sim")
    # a thread of its own for the backward lets go of its last tensors after the step has returned
    with torch.autograd.set_multithreading_enabled(False):
        state, _ = step(state, windows[0], donate=True)
        del _
        gc.collect()  # of earlier tests
        for window in windows[1:]:
            with sim.counted() as counts:
                state, told = step(state, window, donate=True)
            memory = {tensor.untyped_storage().data_ptr() for tensor in tensors(told)}
            assert counts.blocks == len(memory)
            del told
