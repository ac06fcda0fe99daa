"""What a GPU shows, on one page: the GPU tests, then the rows that matter most. Run `make gpu`.

It takes the torch of the machine, 2.13 or newer, and nothing from a network. After nine minutes
(`--seconds`) it begins no other table, and says so on the page.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import importlib.util
import io
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]  # `make gpu` installs nothing

import ensemble  # noqa: E402
import post_backward  # noqa: E402
import torch  # noqa: E402
import train_step  # noqa: E402
import update  # noqa: E402
from harness import SIZES, Job, Rows, compare  # noqa: E402

import purescale as ps  # noqa: E402

# ---- the rows ------------------------------------------------------------------------------------


def replayed(make: Callable[[], Job]) -> Job:
    """A step that is replayed as a CUDA graph of its third call, without a call of it: the floor of
    `capture`.
    """
    job = make()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # libraries allocate in their first calls
        job.run()
        job.run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        job.run()
    run = job.run  # which has the tensors that the graph reads
    job.run = lambda: (graph.replay(), run)[0]  # type: ignore[method-assign]
    return job


CAPTURE = functools.partial(ps.capture, donate=True)
JIT = functools.partial(ps.jit, donate=0)


def captured(
    step: Callable[..., Job],
    name: str,
    given: argparse.Namespace,
    wrap: Callable[[Any], Any] = lambda step: step,
) -> Rows:
    """A step under `capture`, which is the step itself on a CPU, and the replay of its graph."""
    rows: Rows = {f"{name}, capture": lambda: step(wrap=lambda made: CAPTURE(wrap(made)))}
    if given.device == "cuda":
        rows[f"{name}, the replay alone"] = lambda: replayed(lambda: step(wrap=wrap))
    return rows


def after_backward(given: argparse.Namespace) -> Iterator[tuple[str, Rows]]:
    for size in given.sizes:
        shapes = SIZES[size]
        for clip in (False, True):
            make = functools.partial(post_backward.GradScaler, shapes, given.device, clip)
            step = functools.partial(post_backward.Purescale, shapes, given.device, clip)
            yield (
                f"After backward, {size} tensors, {'max_norm' if clip else 'no clipping'}",
                {
                    "GradScaler + fused AdamW": functools.partial(make, fused=True),
                    "GradScaler + foreach AdamW": functools.partial(make, foreach=True),
                    "purescale, donate=True": functools.partial(step, donate=True),
                    "purescale": functools.partial(step, donate=False),
                },
            )


def whole_steps(given: argparse.Namespace) -> Iterator[tuple[str, Rows]]:
    for task in train_step.TASKS[1:2] if given.rehearse else train_step.TASKS:
        rows = train_step.with_settings(task, given, max_norm=1.0)
        step = functools.partial(train_step.purescale, task, given, donate=True, max_norm=1.0)
        rows |= captured(step, "purescale, donate=True", given)
        rows |= captured(
            functools.partial(step, microbatches=4), "purescale, a window of 4, donate=True", given
        )
        yield f"Whole step, {task.title}, {given.dtype}, max_norm", rows


def compiled_steps(given: argparse.Namespace) -> Iterator[tuple[str, Rows]]:
    for task in (train_step.COMPILED[0], train_step.COMPILED[-1]):
        rows = train_step.compiled(task, given)
        step = functools.partial(train_step.purescale, task, given)
        rows |= captured(step, "purescale, jit, donate=0", given, JIT)
        yield f"Compiled step, {task.title}, {given.dtype}", rows


def half_parameters(given: argparse.Namespace) -> Iterator[tuple[str, Rows]]:
    shapes = SIZES[given.sizes[0]]
    for compiled in (False, True):
        how = "compiled" if compiled else "eager"
        rows: Rows = {
            way: functools.partial(update.Step, way, shapes, given.device, compiled=compiled)
            for way in ("float32", "bfloat16, masters", "bfloat16, rounded by chance")
        }
        yield f"Half parameters, after backward, {given.sizes[0]} tensors, {how}", rows


def ensembles(given: argparse.Namespace) -> Iterator[tuple[str, Rows]]:
    whole = functools.partial(torch.compile, fullgraph=True, dynamic=False)
    rows: Rows = {
        "GradScaler + fused AdamW in turn": lambda: ensemble.in_turn(16, given),
        "purescale, vmap": lambda: ensemble.vmapped(16, given),
        "purescale, vmap, donate=True, compiled": lambda: ensemble.vmapped(
            16, given, whole, donate=True
        ),
    }
    yield f"Ensemble of 16 MLPs, {given.dtype}", rows


TABLES = (after_backward, whole_steps, compiled_steps, ensembles, half_parameters)
REHEARSED = (after_backward, whole_steps)  # what needs no compiler


# ---- the page ------------------------------------------------------------------------------------


class Page(io.StringIO):
    """Text that is shown, and written to a file, while it comes."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path

    def write(self, text: str) -> int:
        sys.__stdout__.write(text)  # type: ignore[union-attr]
        sys.__stdout__.flush()  # type: ignore[union-attr]
        length = super().write(text)
        self.path.write_text(self.getvalue())
        return length


def heading(given: argparse.Namespace) -> str:
    name = torch.cuda.get_device_name() if given.device == "cuda" else platform.processor()
    driver = torch.version.cuda if given.device == "cuda" else "none"
    return (
        f"# {name or 'CPU'}\n\nMeasured on {datetime.date.today()} by `make gpu`: torch "
        f"{torch.__version__}, CUDA {driver}, Python {platform.python_version()}, "
        f"{os.cpu_count()} CPU cores, median of {given.rounds} rounds.\n"
    )


def gpu_tests() -> str:
    """The last lines of the GPU tests, which fail where a step waits for the GPU."""
    command = [sys.executable, "-m", "pytest", "--no-header", "-rfE", "-m", "not slow"]
    if importlib.util.find_spec("xdist"):
        command += ["-n", "8", "-p", "no:benchmark"]
    run = subprocess.run(
        [*command, *[f"tests/test_cuda{name}.py" for name in ("", "_jobs", "_capture")]],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
    )
    lines = [line for line in run.stdout.splitlines() if re.match("FAILED|ERROR|[0-9]+ ", line)]
    return "\n".join(lines or (run.stdout + run.stderr).splitlines()[-20:])


def tables(given: argparse.Namespace, started: float) -> None:
    for table in REHEARSED if given.rehearse else TABLES:
        for title, rows in table(given):
            torch.compiler.reset()
            if time.monotonic() - started > given.seconds:
                print(f"{title}: left out, for want of time.\n")
            else:
                compare(title, rows, given)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--dtype", default="float16", help="of autocast")
    parser.add_argument("--seconds", type=int, default=540, help="after which no table is begun")
    parser.add_argument(
        "--rehearse", action="store_true", help="on the CPU, without the tests: is all in order?"
    )
    given = parser.parse_args()
    given.device, given.record = "cuda", None
    given.sizes = [size for size in SIZES if "ResNet" not in size]
    if given.rehearse:
        given.device, given.dtype, given.sizes = "cpu", "bfloat16", [*SIZES][2:3]
    elif not torch.cuda.is_available():
        sys.exit(
            f"No GPU: torch {torch.__version__} sees none here. `make gpu` takes the torch of the "
            "machine, so run it where `python3 -c 'import torch; print(torch.cuda.is_available())'`"
            " prints True."
        )
    started, title = time.monotonic(), heading(given)
    name = re.sub("[^a-z0-9]+", "-", title.splitlines()[0].lower()).strip("-")
    path = Path(__file__).parent / "results" / "gpu" / f"{name}-torch-{torch.__version__[:4]}.md"
    if given.rehearse:
        path = ROOT / "build" / "gpu.md"
    with contextlib.redirect_stdout(Page(path)):
        print(title)
        if not given.rehearse:
            print(f"## Tests\n\n```\n{gpu_tests()}\n```\n")
        print("## Figures\n")
        tables(given, started)
    print(f"Written: {path.relative_to(ROOT)}. Commit it, or send it in.")


if __name__ == "__main__":
    main()
