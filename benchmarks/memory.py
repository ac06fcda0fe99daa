"""Memory: the peak above what stands before, after backward and for a whole eager step, against
GradScaler and fused AdamW.

Run `make bench`. What stands before is 12 bytes a parameter, the parameter and its two moments, and
after backward 4 more for its gradient; the ratio is of that and the peak together.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from typing import Any

import models
import torch
from harness import SIZES, Rows, options, record
from post_backward import GradScaler, Purescale
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from train_step import Task, grad_scaler, purescale


def peak(run: Callable[[], object], device: str) -> int:
    """Bytes.

    On a CPU from the profiler, which hears of every allocation from torch's own allocator: the
    temporaries inside of a kernel too, as a dispatch mode would not, and nothing of what the
    process holds besides, as resident memory would. It is silent about what was allocated before it
    began, so a sum of its events is what this run added. What oneDNN takes for itself is not in it.
    """
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as traced:
        run()
    events = [
        event for event in traced.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def table(title: str, rows: Rows, before: int, parameters: int, given: argparse.Namespace) -> None:
    """`before`: bytes a parameter that stand there already."""
    print(
        f"### {title}\n\n| row | peak, MB | bytes a parameter | with what stands before, against "
        "the first |\n|---|---|---|---|"
    )
    first = 0
    for name, make in rows.items():
        job = make()
        for _ in range(2):  # the state of an optimizer is made in its first step
            job.prepare()
            job.run()
        job.prepare()
        extra = peak(job.run, given.device)
        del job
        gc.collect()
        total = before * parameters + extra
        first = first or total
        print(
            f"| {name} | {extra / 1e6:.1f} | {extra / parameters:.2f} | {total / first:.2f} |",
            flush=True,
        )
        record(
            given,
            title=title,
            row=name,
            bytes=extra,
            bytes_per_parameter=extra / parameters,
            ratio=total / first,
        )
    print()


class Cleared:
    """The hand-written loop where no gradients are left from the step before, which would count as
    standing there already.
    """

    def __init__(
        self, task: Task, given: argparse.Namespace, max_norm: float | None, microbatches: int = 1
    ) -> None:
        settings: Any = {"max_norm": max_norm, "microbatches": microbatches}
        self.run = grad_scaler(task, given, wrap=self.keep, fused=True, **settings).run

    def keep(self, model: nn.Module) -> nn.Module:
        self.model = model
        return model

    def prepare(self) -> None:
        self.model.zero_grad(set_to_none=True)


def after_backward(shapes: list[tuple[int, ...]], device: str, clip: bool) -> Rows:
    return {
        "GradScaler + fused AdamW": lambda: GradScaler(shapes, device, clip, fused=True),
        "purescale, donate=True": lambda: Purescale(shapes, device, clip, donate=True),
        "purescale": lambda: Purescale(shapes, device, clip, donate=False),
    }


def whole_step(task: Task, given: argparse.Namespace, max_norm: float | None) -> Rows:
    return {
        "GradScaler + fused AdamW": lambda: Cleared(task, given, max_norm),
        "purescale, donate=True": lambda: purescale(task, given, max_norm=max_norm, donate=True),
        "purescale": lambda: purescale(task, given, max_norm=max_norm),
    }


class Recomputed(nn.Module):
    """A layer that keeps its input alone and is computed again in the backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.layer, x, use_reentrant=False)
        return out


def deep(checkpoints: bool) -> nn.Module:
    layers = models.transformer(dim=64, depth=24)
    return nn.Sequential(
        *(
            Recomputed(layer) if checkpoints and isinstance(layer, models.Layer) else layer
            for layer in layers
        )
    )


def checkpointing(given: argparse.Namespace) -> Rows:
    plain, own = (
        Task("", lambda checkpoints=checkpoints: deep(checkpoints), (8, 256, 32))
        for checkpoints in (False, True)
    )
    return {
        "GradScaler + fused AdamW": lambda: Cleared(plain, given, None),
        "GradScaler + fused AdamW, own checkpointing": lambda: Cleared(own, given, None),
        "purescale": lambda: purescale(plain, given, donate=True),
        "purescale, own checkpointing": lambda: purescale(own, given, donate=True),
    }


def main() -> None:
    given = options(__doc__)
    size, shapes = next(iter(SIZES.items()))
    task = Task("transformer, width 512", lambda: models.transformer(dim=512), (4, 32, 32))
    model = task.model()
    step = f"A step, {task.title}, {models.describe(model)}, {given.dtype}"
    counts = (
        sum(torch.Size(shape).numel() for shape in shapes),
        sum(p.numel() for p in model.parameters()),
    )
    for how, max_norm in (("no clipping", None), ("max_norm", 1.0)):
        rows = after_backward(shapes, given.device, clip=max_norm is not None)
        table(f"After backward, {size} tensors, {how}", rows, 16, counts[0], given)
        table(f"{step}, {how}", whole_step(task, given, max_norm), 12, counts[1], given)
    window: Rows = {
        "GradScaler + fused AdamW": lambda: Cleared(task, given, 1.0, microbatches=4),
        "purescale, donate=True": lambda: purescale(
            task, given, max_norm=1.0, microbatches=4, donate=True
        ),
    }
    table(f"{step}, 4 microbatches, max_norm", window, 12, counts[1], given)
    deep_title = f"A step of 24 layers that checkpoint themselves, {given.dtype}, donated"
    count = sum(p.numel() for p in deep(False).parameters())
    table(deep_title, checkpointing(given), 12, count, given)


if __name__ == "__main__":
    main()
