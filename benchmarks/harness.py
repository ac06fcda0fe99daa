"""What every benchmark here shares: sizes, interleaved rounds, the table."""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

RESULTS = Path(__file__).parent / "results"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _resnet18() -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    for before, after in ((64, 64), (64, 128), (128, 256), (256, 512)):
        convs = [
            (after, before, 3, 3),
            *[(after, after, 3, 3)] * 3,
            *[(after, before, 1, 1)] * (before != after),
        ]
        shapes += [shape for conv in convs for shape in (conv, (after,), (after,))]
    return [*shapes, (1000, 512), (1000,)]


SIZES = {  # name: shapes of the parameters
    "transformer-like, 27M in 147": [(512, 512)] * 48
    + [(2048, 512)] * 12
    + [(512,)] * 86
    + [(3300, 512)],
    "ResNet-18, 11.7M in 62": _resnet18(),
    "small conv net, 0.2M in 60": [(32, 32, 3, 3)] * 20 + [(32,)] * 40,
    "tiny, 64K in 1000": [(64,)] * 1000,
}


class Job(Protocol):
    """One row: `run` is timed, `prepare` is not."""

    def prepare(self) -> None: ...
    def run(self) -> None: ...


Rows = dict[str, Callable[[], Job]]


class Call:
    """A row with nothing to prepare."""

    def __init__(self, once: Callable[[], object]) -> None:
        self.run = once

    def prepare(self) -> None:
        pass


def memcpy(shapes: list[tuple[int, ...]], device: str) -> Call:
    """The yardstick: one read and one write of each parameter."""
    source: list[Tensor] = [torch.randn(s, device=device) for s in shapes]
    target = [torch.empty_like(t) for t in source]
    return Call(lambda: torch._foreach_copy_(target, source))


def options(
    description: str | None, rounds: int = 25, device: str | None = None, **more: dict[str, Any]
) -> argparse.Namespace:
    """The command line; prints where this runs. `device`: the only one, where there is but one;
    `more`: what else a benchmark takes.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=rounds)
    accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device or accelerator, choices=device and [device])
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="of autocast, where there is a forward; default: float16 on CUDA, else float32",
    )
    parser.add_argument(
        "--slow", action="store_true", help="also what takes many minutes to compile"
    )
    parser.add_argument(
        "--record", action="store_true", help="write the tables to results/ too, for plot.py"
    )
    for name, settings in more.items():
        parser.add_argument(f"--{name}", **settings)
    given = parser.parse_args()
    given.dtype = given.dtype or ("float16" if given.device == "cuda" else "float32")
    where = (
        torch.cuda.get_device_name()
        if given.device == "cuda"
        else f"{torch.get_num_threads()} CPU threads"
    )
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {where}, median of "
        f"{given.rounds} rounds\n"
    )
    if given.record:
        given.record = RESULTS / given.device / f"{Path(sys.argv[0]).stem}.jsonl"
        given.record.parent.mkdir(parents=True, exist_ok=True)
        given.record.write_text("")
    return given


def record(given: argparse.Namespace, **fields: Any) -> None:
    if given.record:
        with given.record.open("a") as file:
            file.write(json.dumps(fields) + "\n")


def sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(run: Callable[[], object], device: str) -> float:
    sync(device)
    start = time.perf_counter()
    run()
    sync(device)
    return time.perf_counter() - start


class Budget:
    """The seconds that each row may take, and all rows together; the time begins now."""

    def __init__(self, of_a_row: float = float("inf"), of_all: float = float("inf")) -> None:
        self.of_a_row, self._end = of_a_row, time.monotonic() + of_all

    @property
    def left(self) -> float:
        """The seconds that the next row may take."""
        return min(self.of_a_row, self._end - time.monotonic())

    @contextlib.contextmanager
    def spent_on_a_row(self) -> Iterator[None]:
        """Raise a TimeoutError where a row begins too late, or inside when it has taken too long.
        Only the main thread of a POSIX system can be interrupted.
        """
        if (left := self.left) <= 0:
            raise TimeoutError("no time is left")
        if left == float("inf"):
            yield
            return

        def stop(*_: Any) -> None:
            raise TimeoutError(f"it was not ready after {left:.0f} s")

        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, left)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


UNBOUNDED = Budget()


def warm(rows: Rows, device: str, budget: Budget = UNBOUNDED) -> dict[str, Job]:
    """The rows that can run here, after three rounds; what is left out says so."""
    jobs = {}
    for name, make in rows.items():
        try:
            with budget.spent_on_a_row():
                job = make()
                for _ in range(3):
                    job.prepare()
                    job.run()
                sync(device)
            jobs[name] = job
        except (ImportError, RuntimeError, ValueError, TimeoutError) as error:
            print(
                f"{name} is left out: {type(error).__name__}: "
                f"{str(error).strip().splitlines()[0]}\n"
            )
    return jobs


LEAST_ROUNDS = 3  # of which a median is told


def measure(
    rows: Rows, rounds: int, device: str, budget: Budget = UNBOUNDED
) -> dict[str, list[float]]:
    """Milliseconds of each row in each round, the rows in turn so that a slow moment hits all of
    them. Rounds after the third begin within what the budget has for these rows.
    """
    jobs = warm(rows, device, budget)
    times: dict[str, list[float]] = {name: [] for name in jobs}
    end = time.monotonic() + budget.left * len(jobs)
    for number in range(rounds):
        if number >= LEAST_ROUNDS and (time.monotonic() > end or budget.left <= 0):
            break
        for name, job in jobs.items():
            job.prepare()
            times[name].append(1e3 * seconds(job.run, device))
    return times


def compare(
    title: str,
    rows: Rows,
    given: argparse.Namespace,
    budget: Budget = UNBOUNDED,
    **axes: Any,
) -> None:
    """Print each row against the first: the median over the rounds of the ratio in the same round,
    and its quartiles.

    `axes` are recorded beside the figures, for a plot over them.
    """
    times = measure(rows, given.rounds, given.device, budget)
    baseline = next(iter(rows))
    if baseline not in times:
        print(f"{title} is left out, for want of its first row.\n")
        return
    rounds = len(times[baseline])
    note = "" if rounds == given.rounds else f"Median of {rounds} rounds.\n\n"
    print(f"### {title}\n\n{note}| row | ms | against {baseline} | quartiles |\n|---|---|---|---|")
    for name, values in times.items():
        ratios = [a / b for a, b in zip(values, times[baseline], strict=True)]
        low, ratio, high = statistics.quantiles(ratios, n=4)
        ms = statistics.median(values)
        print(f"| {name} | {ms:.2f} | {ratio:.2f} | {low:.2f} to {high:.2f} |")
        record(
            given,
            title=title,
            row=name,
            baseline=baseline,
            ms=ms,
            ratio=ratio,
            low=low,
            high=high,
            **axes,
        )
    print(flush=True)
