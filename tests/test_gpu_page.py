"""`make gpu`, as far as a machine without a GPU can tell."""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import same_bits
from test_capture import on_graphs

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import gpu
import harness

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
    assert page.count("| purescale, donate=True |") == 5
    assert "left out" not in page


# ---- rows ----------------------------------------------------------------------------------------

GIVEN = argparse.Namespace(
    device="cpu", dtype="bfloat16", rehearse=True, rounds=8, record=None, sizes=[], only=None
)


class Slept:
    """A row that takes this long in each round."""

    def __init__(self, seconds):
        self.seconds = seconds

    def prepare(self):
        pass

    def run(self):
        time.sleep(self.seconds)


def test_a_row_that_takes_too_long_is_left_out_and_named(capsys):
    rows = {"one": lambda: Slept(0), "slow": lambda: Slept(9), "two": lambda: Slept(0)}
    times = harness.measure(rows, 4, "cpu", harness.Budget(of_a_row=0.2))
    assert {name: len(of_row) for name, of_row in times.items()} == {"one": 4, "two": 4}
    assert "slow is left out: TimeoutError: it was not ready after" in capsys.readouterr().out


def batches(number):
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(4, 3, 32, 32, generator=generator),
            torch.randint(10, (4,), generator=generator),
        )
        for _ in range(number)
    ]


@pytest.mark.parametrize("feed", [gpu.as_they_are, gpu.sent, gpu.sent_ahead])
def test_each_way_to_feed_a_step_gives_it_each_batch_once_and_in_turn(feed):
    some = batches(5)
    assert same_bits([tuple(batch) for batch in feed(some, "cpu")], some)


@pytest.mark.parametrize(
    "table", [gpu.captured_steps, pytest.param(gpu.host_batches, marks=pytest.mark.slow)]
)
def test_the_rows_of_captured_steps_record_and_replay(table):
    with on_graphs():
        for _, rows in table(GIVEN):
            times = harness.measure(rows, 2, "cpu")
            assert times.keys() == rows.keys()
