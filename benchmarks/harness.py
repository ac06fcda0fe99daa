"""What every benchmark here shares: sizes, interleaved rounds, the table."""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from typing import Protocol

import torch

SIZES = {  # name: shapes of the parameters
    "transformer-like, 27M in 147": [(512, 512)] * 48 + [(2048, 512)] * 12 + [(512,)] * 86 + [(3300, 512)],
    "small conv net, 0.2M in 60": [(32, 32, 3, 3)] * 20 + [(32,)] * 40,
}


class Job(Protocol):
    """One row: `run` is timed, `prepare` is not."""

    def prepare(self) -> None: ...
    def run(self) -> None: ...


def options(description: str | None) -> argparse.Namespace:
    """The command line; prints where this runs."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    where = torch.cuda.get_device_name() if given.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {where}, median of {given.rounds} rounds\n")
    return given


def sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(rows: dict[str, Callable[[], Job]], rounds: int, device: str) -> dict[str, list[float]]:
    """Milliseconds of each row in each round, the rows in turn so that a slow moment hits all of them."""
    jobs = {name: make() for name, make in rows.items()}
    times: dict[str, list[float]] = {name: [] for name in rows}
    for index in range(rounds + 3):
        for name, job in jobs.items():
            job.prepare()
            sync(device)
            start = time.perf_counter()
            job.run()
            sync(device)
            if index >= 3:
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


def compare(title: str, rows: dict[str, Callable[[], Job]], given: argparse.Namespace) -> None:
    """Print each row against the first: the median over the rounds of the ratio in the same round, and its quartiles."""
    baseline = next(iter(rows))
    times = measure(rows, given.rounds, given.device)
    print(f"### {title}\n\n| row | ms | against {baseline} | quartiles |\n|---|---|---|---|")
    for name, values in times.items():
        ratios = [a / b for a, b in zip(values, times[baseline], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"| {name} | {statistics.median(values):.2f} | {middle:.2f} | {low:.2f} to {high:.2f} |")
    print()
