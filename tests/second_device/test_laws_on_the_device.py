"""The laws of a step and its four ways are those of the CPU, on a device where a step that waits is
an error.
"""

import functools

import pytest
import sim
import test_four_ways
import test_laws_of_a_step
import torch
from test_laws_of_a_step import OF_NUMPY

import purescale as ps

pytestmark = pytest.mark.slow


def is_slow(law):
    return any(mark.name == "slow" for mark in getattr(law, "pytestmark", ()))


# Without what takes seconds, because it compiles, and what runs in processes of its own.
for module in (test_laws_of_a_step, test_four_ways):
    for name, law in vars(module).items():
        if name.startswith("test_") and "over_ranks" not in name and not is_slow(law):
            globals()[name] = law


def without_waiting(step):
    @functools.wraps(step)
    def call(*args, **kwargs):
        if torch.compiler.is_compiling():
            return step(*args, **kwargs)
        with sim.waiting(refused=not kwargs.get("max_retries")):
            return step(*args, **kwargs)

    return call


@pytest.fixture(autouse=True)
def _on_the_device(request, monkeypatch):
    if "how" in request.fixturenames and request.getfixturevalue("how") in OF_NUMPY:
        pytest.skip("NumPy has no memory of the device")
    for name in ("train_step", "unscale_and_step", "maybe_step"):
        monkeypatch.setattr(ps, name, without_waiting(getattr(ps, name)))
    with torch.device("sim:0"):
        yield
