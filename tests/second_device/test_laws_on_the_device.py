"""The laws of a step and its four ways are those of the CPU, on a device where a step that waits is
an error.
"""

import pytest
import sim
import torch
from laws import LAWS, refuse_waiting

pytestmark = pytest.mark.slow
globals().update(LAWS)


@pytest.fixture(autouse=True)
def _on_the_device(request, monkeypatch):
    refuse_waiting(request, monkeypatch, sim.waiting)
    with torch.device("sim:0"):
        yield
