"""What a GPU shows, on one page: the GPU tests, then the rows that matter most. Run `make gpu`.

It takes the torch of the machine, 2.13 or newer, and nothing from a network. It takes about eight
minutes (`--seconds`), and a row of a table at most one and a half (`--row-seconds`): what is left
out for want of time, the page names. `--only captured_steps host_batches` runs these tables alone.
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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]  # `make gpu` installs nothing

import ensemble  # noqa: E402
import models  # noqa: E402
import post_backward  # noqa: E402
import torch  # noqa: E402
import train_step  # noqa: E402
import update  # noqa: E402
from harness import SIZES, Budget, Call, Job, Rows, compare  # noqa: E402
from torch import Tensor  # noqa: E402

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
        yield f"Whole step, {task.title}, {given.dtype}, max_norm", rows
        if "4 images" not in task.title or given.rehearse:
            rows = train_step.with_settings(task, given, max_norm=1.0, microbatches=4)
            del rows["purescale"]
            rows |= captured(
                functools.partial(step, microbatches=4), "purescale, donate=True", given
            )
            yield f"A window of 4, {task.title}, {given.dtype}, max_norm", rows


def decoder_task(vocabulary: int, rows: int, length: int, **size: int) -> train_step.Task:
    return train_step.Task(
        "a GPT",
        functools.partial(models.decoder, vocabulary, length, **size),
        (rows, length),
        batch=functools.partial(models.tokens, vocabulary),
    )


DECODER = decoder_task(3300, 8, 256, dim=512, depth=8, heads=8)
SMALL_DECODER = decoder_task(33, 4, 16, dim=16, depth=1, heads=2)


def captured_steps(given: argparse.Namespace) -> Iterator[tuple[str, Rows]]:
    """Yield the rows of a model whose kernels are not short, eager and jitted."""
    task = SMALL_DECODER if given.rehearse else DECODER
    step = functools.partial(train_step.purescale, task, given, max_norm=1.0)
    donating = functools.partial(step, donate=True)
    rows: Rows = {
        "GradScaler + fused AdamW": lambda: train_step.grad_scaler(
            task, given, fused=True, max_norm=1.0
        ),
        "purescale, donate=True": donating,
        **captured(donating, "purescale, donate=True", given),
    }
    if not given.rehearse:  # it wants a compiler
        rows["purescale, jit, donate=0"] = functools.partial(step, wrap=JIT)
        rows |= captured(step, "purescale, jit, donate=0", given, JIT)
    size = models.describe(task.model())
    yield f"Whole step, {task.title}, {size}, {given.dtype}, max_norm", rows


# ---- batches on the host -------------------------------------------------------------------------

Batch = tuple[Tensor, Tensor]
IN_TURN = 8  # steps in a row of the table, with a batch each: what one waits for, the next one has


def pinned(batches: list[Batch]) -> list[Batch]:
    """The batches in pinned memory, where there is a GPU."""
    if not torch.cuda.is_available():
        return batches
    return [(x.pin_memory(), y.pin_memory()) for x, y in batches]


def as_they_are(batches: list[Batch], device: str) -> Iterable[Batch]:
    return batches


def sent(batches: list[Batch], device: str) -> Iterator[Batch]:
    """Each batch on the device, by a copy that the host does not wait for."""
    for x, y in batches:
        yield x.to(device, non_blocking=True), y.to(device, non_blocking=True)


def sent_ahead(batches: list[Batch], device: str) -> Iterator[Batch]:
    """Each batch on the device, which was copied by a stream of its own during the step before."""
    if device == "cpu":
        yield from sent(batches, device)
        return
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()
    ready: Batch | None = None
    for batch in [*batches, None]:
        current.wait_stream(side)  # for the copy of the batch that is ready
        following = None
        if batch is not None:
            with torch.cuda.stream(side):
                [following] = sent([batch], device)
        if ready is not None:
            for part in ready:
                part.record_stream(current)
            yield ready
        ready = following


def fed(
    step: Callable[..., tuple[Callable[[train_step.Window], None], train_step.Window]],
    feed: Callable[[list[Batch], str], Iterable[Batch]],
    given: argparse.Namespace,
    place: Callable[[list[Batch]], list[Batch]] = pinned,
) -> Job:
    """Some steps, each with the next batch of the host."""
    one, [(x, y)] = step()
    batches = place([(x.cpu().clone(), y.cpu().clone()) for _ in range(IN_TURN)])

    def run() -> None:
        for batch in feed(batches, given.device):
            one([batch])

    return Call(run)


def on_the_device(given: argparse.Namespace) -> Callable[[list[Batch]], list[Batch]]:
    return lambda batches: [(x.to(given.device), y.to(given.device)) for x, y in batches]


def host_batches(given: argparse.Namespace) -> Iterator[tuple[str, Rows]]:
    """Steps whose batches come from the host, by a copy that waits or that does not."""
    task = train_step.TASKS[1]
    if not given.rehearse:
        task = train_step.TASKS[0]._replace(title="small conv net", shape=(256, 3, 32, 32))
    of_torch = functools.partial(train_step.torch_step, task, given, fused=True, max_norm=1.0)
    eager = functools.partial(train_step.pure_step, task, given, donate=True, max_norm=1.0)
    fast = functools.partial(eager, wrap=CAPTURE)
    rows: Rows = {
        "GradScaler + fused AdamW, pinned, non_blocking=True": lambda: fed(of_torch, sent, given),
        "purescale, donate=True, pinned, non_blocking=True": lambda: fed(eager, sent, given),
        "capture, batches on the device": lambda: fed(
            fast, as_they_are, given, on_the_device(given)
        ),
        "capture, pageable, which waits": lambda: fed(fast, as_they_are, given, list),
        "capture, pinned, which waits": lambda: fed(fast, as_they_are, given),
        "capture, pinned, non_blocking=True": lambda: fed(fast, sent, given),
        "capture, pinned, copied a step ahead": lambda: fed(fast, sent_ahead, given),
    }
    images = task.shape[0]
    yield f"{IN_TURN} steps, {task.title}, {images} images of the host, {given.dtype}", rows


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


TABLES = {
    table.__name__: table
    for table in (
        whole_steps,
        captured_steps,
        host_batches,
        after_backward,
        compiled_steps,
        ensembles,
        half_parameters,
    )
}
# What needs no compiler.
REHEARSED = ("whole_steps", "captured_steps", "host_batches", "after_backward")


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


def gpu_tests(seconds: float) -> str:
    """The last lines of the GPU tests, which fail where a step waits for the GPU."""
    command = [sys.executable, "-m", "pytest", "--no-header", "-rfE", "-m", "not slow"]
    if importlib.util.find_spec("xdist"):
        command += ["-n", "8", "-p", "no:benchmark"]
    try:
        run = subprocess.run(
            [*command, *[f"tests/test_cuda{name}.py" for name in ("", "_jobs", "_capture")]],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return f"They were not done after {seconds:.0f} s: run `pytest tests/test_cuda.py`."
    lines = [line for line in run.stdout.splitlines() if re.match("FAILED|ERROR|[0-9]+ ", line)]
    return "\n".join(lines or (run.stdout + run.stderr).splitlines()[-20:])


def tables(given: argparse.Namespace, budget: Budget) -> None:
    for name in given.only or (REHEARSED if given.rehearse else TABLES):
        for title, rows in TABLES[name](given):
            torch.compiler.reset()
            if budget.left <= 0:
                print(f"{title}: left out, for want of time.\n")
            else:
                compare(title, rows, given, budget)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--dtype", default="float16", help="of autocast")
    parser.add_argument("--seconds", type=int, default=480, help="after which no row is begun")
    parser.add_argument("--row-seconds", type=int, default=90, help="the most that a row may take")
    parser.add_argument("--only", nargs="+", choices=TABLES, help="these tables, without the tests")
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
    budget = Budget(given.row_seconds, given.seconds)
    name = re.sub("[^a-z0-9]+", "-", title.splitlines()[0].lower()).strip("-")
    path = Path(__file__).parent / "results" / "gpu" / f"{name}-torch-{torch.__version__[:4]}.md"
    if given.rehearse or given.only:  # which is no whole page
        path = ROOT / "build" / "gpu.md"
    with contextlib.redirect_stdout(Page(path)):
        print(title)
        if not given.rehearse and not given.only:
            print(f"## Tests\n\n```\n{gpu_tests(given.seconds / 2)}\n```\n")
        print("## Figures\n")
        tables(given, budget)
        print(f"All of this took {time.monotonic() - started:.0f} s.")
    whole = "" if given.rehearse or given.only else " Commit it, or send it in."
    print(f"Written: {path.relative_to(ROOT)}.{whole}")


if __name__ == "__main__":
    main()
