import gc
import os
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo  # which the first test would import
from helpers import CAPTURABLE, EXAMPLES
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from purescale._torch import tracing

# Its jobs and laws are those of a GPU too.
sys.path.append(str(Path(__file__).parent / "second_device"))

# Two workers on two cores: one thread each, unless more are asked for.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

# The examples of a check are the same on every machine; `make fuzz` draws fresh ones.
settings.register_profile(
    "fuzz",
    settings.get_profile("default"),
    deadline=None,
    max_examples=10 * EXAMPLES,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "checks", settings.get_profile("fuzz"), max_examples=EXAMPLES, derandomize=True
)
settings.register_profile("matrix", settings.get_profile("checks"), max_examples=EXAMPLES // 5)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "checks"))
if settings.get_current_profile_name() != "fuzz":
    # Hypothesis draws constants that it reads in the local modules that happen to be imported:
    # which ones depends on the tests before, and on the path of the clone.
    providers.is_local_module_file = lambda path: False


def pytest_ignore_collect(collection_path, config):
    """Leave out the tests of the second device unless they are named: torch takes it for the
    accelerator of the machine, so they want a process of their own.
    """
    if collection_path.name == "second_device":
        return not any("second_device" in arg for arg in config.args) or None
    return None


def pytest_collection_finish():
    """Leave what is imported out of garbage collections, which would look at it each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_random_numbers_for_every_test():
    torch.manual_seed(0)
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _no_inductor_on_another_kind_of_cpu(monkeypatch):
    """With these variables what inductor compiles corrupts memory (torch 2.13)."""
    if {"ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"} & os.environ.keys():
        name = "torch._inductor.compile_fx.compile_fx"
        monkeypatch.setattr(name, lambda *a, **k: pytest.skip("runs inductor"))


@pytest.fixture
def plt():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    yield plt
    plt.close("all")


@pytest.fixture(params=["host", "accelerator"])
def way(request, monkeypatch):
    """How a step decides: on the host, by torch's default formula, or as on an accelerator, by the
    capturable one. torch refuses that on a CPU, where it is a correct oracle nevertheless.
    """
    if request.param == "host":
        yield request.param
        return
    for name in (*CAPTURABLE, "Adam"):
        module = sys.modules[getattr(torch.optim, name).__module__]
        monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda *a, **k: ["cpu"])
    with tracing.as_on_an_accelerator():
        yield request.param
