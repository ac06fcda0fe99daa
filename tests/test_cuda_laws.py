"""The laws of a step and its four ways on a GPU, where a step that waits is an error. Skipped where
there is none.
"""

import contextlib

import pytest
import torch
from laws import LAWS, refuse_waiting

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
globals().update(LAWS)


@contextlib.contextmanager
def waiting(*, refused):
    torch.cuda.set_sync_debug_mode("error" if refused else "default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(autouse=True)
def _on_the_device(request, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    refuse_waiting(request, monkeypatch, waiting)
    with torch.device("cuda"):
        yield
