"""Whatever is trained: a step on an accelerator does not wait, copies nothing between devices, has
the results of the CPU, and with `donate=True` stays where it is.
"""

import gc

import pytest
import sim
import torch
from helpers import find_no_plans, same_bits, tensors
from jobs import JOBS, to
from measured import TOLERANCE, Trained, difference, measured, numbers, trained, written

import purescale as ps
from purescale._torch import dtypes
from purescale._torch_optim import kernels

each = pytest.mark.parametrize("name", JOBS)


@each
def test_a_step_is_as_its_row_in_the_docs_says(name):
    """A warm one copies nothing between devices, and has the numbers of the CPU. `python
    tests/second_device/measured.py` writes the table.
    """
    (version, rows), row = written(), measured(name)
    assert row.copies == 0
    assert row.difference <= TOLERANCE.get(name, 1e-6)
    assert row.reads == rows[name].reads
    assert (row.reads > 0) is (name == "`max_retries=2`")
    if torch.__version__.startswith(version):
        assert row.launches == pytest.approx(rows[name].launches, rel=0.25)


def test_the_table_in_the_docs_is_that_of_these_jobs_and_the_docstring_says_what_waits():
    assert list(written()[1]) == list(JOBS)
    first = " ".join(ps.train_step.__doc__.split("\n\n")[0].split())
    assert "Syncs with the host only if `max_retries` is above 0" in first


def test_the_second_window_of_a_job_overflows():
    for name in ("AdamW, `max_norm`", "masters of bfloat16", "3 microbatches"):
        told = trained("sim", name).told
        assert [bool(info.found_inf) for info in told] == [False, True, False, False]


# ---- other devices -------------------------------------------------------------------------------


@pytest.mark.slow
@each
def test_a_device_as_mps_has_the_same_numbers_without_float64_and_fused_kernels(name, monkeypatch):
    monkeypatch.setattr(kernels, "DEVICES_THAT_SKIP", ())
    monkeypatch.setattr(dtypes, "WITHOUT_FLOAT64", ("sim",))
    # plans of the jobs' optimizers, which are those of the module, are for another device
    find_no_plans(monkeypatch)
    with sim.without_float64(), sim.launched() as names:
        found = trained("sim", name)
    assert not any(launch.startswith("aten::_fused_") for launch in names)
    apart = map(difference, numbers(found), numbers(trained("cpu", name)))
    assert max(apart) <= TOLERANCE.get(name, 5e-6)  # powers of step counts are float32's


@pytest.mark.slow
@each
def test_a_job_on_the_second_of_two_devices_stays_there(name):
    run = trained("sim:1", name)  # the current one is the first
    devices = {tensor.device for tensor in tensors((run.state._replace(rng=()), run.told))}
    assert devices == {torch.device("sim:1")}
    assert same_bits(numbers(run), numbers(trained("sim:0", name)))


# ---- donated steps, which a graph captures -------------------------------------------------------

DONATED = [
    name
    for name in JOBS
    if name not in ("a loop by hand", "`accumulate_grads`", "an ensemble, by vmap")
]


def captured(name, state):
    """Return the tensors in which a graph works: not the state of a generator, which the host has,
    and not the scale that a rule makes anew in a loop by hand.
    """
    state = state._replace(rng=())
    return tensors(state._replace(scaler=()) if name == "`unscale_and_step`" else state)


@pytest.mark.parametrize("name", DONATED)
def test_a_donated_step_has_the_bits_of_one_in_fresh_memory_and_stays_where_it_is(name):
    """And a warm one allocates nothing that outlives it but what it tells."""
    state, step, windows = JOBS[name]("sim")
    addresses, told = [tensor.data_ptr() for tensor in captured(name, state)], []
    assert len(set(addresses)) == len(addresses)
    gc.collect()  # of earlier tests
    # a thread of its own for the backward lets go of its last tensors after the step has returned
    with torch.autograd.set_multithreading_enabled(False):
        for index, window in enumerate(windows):
            with sim.waiting(refused="retries" not in name), sim.counted() as counts:
                state, info = step(state, window, donate=True)
            assert [tensor.data_ptr() for tensor in captured(name, state)] == addresses
            memory = {tensor.untyped_storage().data_ptr() for tensor in tensors(info)}
            assert index == 0 or counts.blocks == len(memory)
            told.append(to("cpu", info))
            del info
    assert same_bits(numbers(Trained(state, told, [])), numbers(trained("sim", name)))
