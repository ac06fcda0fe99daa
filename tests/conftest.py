import os
import sys

import pytest
import torch
from helpers import CAPTURABLE
from hypothesis import HealthCheck, settings

from purescale._torch import tracing

# Two workers on two cores: one thread each.
torch.set_num_threads(1)

settings.register_profile(
    "default", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture(autouse=True)
def _same_random_numbers_for_every_test():
    torch.manual_seed(0)
    torch._dynamo.reset()


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
