"""The jobs, run on the second device and on the CPU. `python tests/second_device/measured.py`
writes what came out into docs/gpu.md.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))
    import conftest as _loads_the_device

import sim
import torch
from helpers import tensors
from jobs import JOBS, to

import purescale as ps

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
# torch's default step on a CPU takes the square root of `v - m * m`, where a formula has other bits
TOLERANCE = {"RMSprop, `max_norm`": 3e-5}
BEGIN, END = "<!-- measured -->\n", "<!-- end of measured -->"


class Measured(NamedTuple):
    launches: int  # of the last step
    reads: int  # of all steps
    copies: int  # of the last step, between devices
    difference: float  # of the numbers in the last state and in what the steps told


class Trained(NamedTuple):
    state: Any
    told: list[Any]  # by each step
    counts: list[sim.Counts]  # of each step


def trained(
    device: str, name: str, wrap: Callable[[Any], Any] = lambda step: step, **settings: Any
) -> Trained:
    """Run a job, its step as `wrap` returns it. A step that waits raises, unless it may."""
    state, step, windows = JOBS[name](device)
    step = wrap(step)
    told, counts = [], []
    for window in windows:
        with sim.waiting(refused="retries" not in name), sim.counted() as count:
            state, info = step(state, window, **settings)
        told.append(info)
        counts.append(count)
    return Trained(state, told, counts)


def numbers(run: Trained) -> list[torch.Tensor]:
    """Return what a run came to, on the CPU, masters as the numbers that they are."""
    state, masters = run.state, []
    if isinstance(state.opt_state, ps.MasterState):
        masters = tensors(ps.master_weights(state.params, state.opt_state))
        state = state._replace(opt_state=state.opt_state.inner)
    return tensors(to("cpu", (state, run.told, masters)))


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest difference, relative where numbers are above 1."""
    a, b = a.double(), b.double()
    apart = ((a - b).abs() / b.abs().clamp(min=1)).masked_fill(
        (a == b) | (a.isnan() & b.isnan()), 0.0
    )
    return apart.max().item() if apart.numel() else 0.0


@functools.cache
def measured(name: str) -> Measured:
    run, expected = trained("sim", name), trained("cpu", name)
    apart = map(difference, numbers(run), numbers(expected))
    *_, last = run.counts
    reads = sum(count.reads + count.to_host + count.waits for count in run.counts)
    return Measured(last.launches, reads, last.copies, max(apart))


# ---- the table -----------------------------------------------------------------------------------


def bound(value: float) -> float:
    """Return the power of ten above a difference."""
    return 10.0 ** math.ceil(math.log10(value)) if value else 0.0


def table() -> str:
    version = ".".join(torch.__version__.split(".")[:2])
    lines = [
        f"| a step of (torch {version}) | launches | reads | largest difference to the CPU |",
        "|---|---|---|---|",
    ]
    for name in JOBS:
        row = measured(name)
        largest = f"below {bound(row.difference):.0e}" if row.difference else "0"
        lines.append(f"| {name} | {row.launches} | {row.reads} | {largest} |")
    return "\n".join(lines) + "\n"


class Row(NamedTuple):
    launches: int
    reads: int
    below: float


def written() -> tuple[str, dict[str, Row]]:
    """Return torch's version and the rows of the table in docs/gpu.md."""
    lines = PAGE.read_text().split(BEGIN)[1].split(END)[0].splitlines()
    rows = {}
    for line in lines[2:]:
        name, launches, reads, below = [cell.strip() for cell in line.strip("|").split(" | ")]
        rows[name] = Row(int(launches), int(reads), float(below.removeprefix("below ")))
    return lines[0].split("torch ")[1].split(")")[0], rows


if __name__ == "__main__":
    assert _loads_the_device.WHY_NOT is None, _loads_the_device.WHY_NOT
    torch.set_num_threads(1)
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.split(END)[1])
