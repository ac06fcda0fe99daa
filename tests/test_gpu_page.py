"""`make gpu`, as far as a machine without a GPU can tell."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


def make_gpu(*arguments):
    command = [sys.executable, ROOT / "benchmarks" / "gpu.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_gpu_it_says_so_and_stops():
    run = make_gpu()
    assert run.returncode == 1
    assert run.stdout == ""
    assert "No GPU: torch" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.slow
def test_a_rehearsal_writes_the_page_with_the_machine_and_the_tables():
    run = make_gpu("--rehearse", "--rounds", "2")
    assert run.returncode == 0, run.stderr
    page = (ROOT / "build" / "gpu.md").read_text()
    assert f"torch {torch.__version__}" in page
    assert page.count("| purescale, donate=True |") == 3
    assert "left out" not in page
