"""What a whole eager step costs above its floor, in CPU time of one thread. Run `make bench`.

The floor is a pure step that is written out for one net: no tree, no check, no other device, no
setting. Beside it are this package's loop by hand and `train_step`, and GradScaler's loop with
fused AdamW, the baseline. All clip by `max_norm`, and the pure ones are donated.

In each round every row makes some steps in a row, as a training does: a step after one of another
row would pay for caches that hold the other's code. The order of the rows is drawn. A repeat makes
all rows anew and takes the median over its rounds of the ratio to the baseline in the same round; a
figure is the median over the repeats.
"""

from __future__ import annotations

import argparse
import functools
import math
import random
import statistics
import time

import models
import torch
import torch.nn.functional as F
import train_step
from harness import Call, Job, Rows, options, record, warm
from torch import nn
from train_step import LR, SCALE, Task

MAX_NORM = 1.0


def tiny_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, models.CLASSES)
    )


def conv_net() -> nn.Module:
    layers = [
        layer
        for before in (1, 32, 32, 32)
        for layer in (nn.Conv2d(before, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
    ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 8 * 8, models.CLASSES))


TASKS = [
    Task("tiny MLP", tiny_mlp, (16, 8)),
    Task("conv net", conv_net, (16, 1, 8, 8)),
    Task("small transformer", functools.partial(models.transformer, dim=32, depth=2), (8, 16, 32)),
]


def floor(task: Task, given: argparse.Namespace) -> Job:
    """Forward, backward, one read, the fused kernel, the scale."""
    model, [(x, y)] = task.make(given.device)
    params = [p.detach().clone() for p in model.parameters()]
    buffers = [b.detach().clone() for b in model.buffers()]
    exp_avg, exp_avg_sq = (list(map(torch.zeros_like, params)) for _ in range(2))
    count, scale = torch.zeros(()), torch.tensor(SCALE)
    tracker = torch.zeros((), dtype=torch.int32)
    places = [
        (tensors, name)
        for kind in ("_parameters", "_buffers")
        for module in model.modules()
        for tensors in [getattr(module, kind)]
        for name in tensors
        if tensors[name] is not None
    ]
    adamw = {"lr": LR, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
    adamw |= {"amsgrad": False, "maximize": False}

    def step() -> None:
        nonlocal buffers, scale, tracker
        leaves = [p.detach().requires_grad_() for p in params]
        new_buffers = [b.clone() for b in buffers]
        for (tensors, name), tensor in zip(places, [*leaves, *new_buffers], strict=True):
            tensors[name] = tensor
        grads = torch.autograd.grad(F.cross_entropy(model(x), y) * scale, leaves)
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads))) / scale
        finite = math.isfinite(norm)
        if finite:
            divisor = scale / (MAX_NORM / (norm + 1e-6)).clamp(max=1.0)
            counts = [count.add_(1)] * len(params)
            moments = exp_avg, exp_avg_sq, []
            torch._fused_adamw_(params, grads, *moments, counts, grad_scale=divisor, **adamw)
            buffers = new_buffers
        found_inf = torch.full((), float(not finite))
        scale, tracker = scale.clone(), tracker.clone()
        torch._amp_update_scale_(scale, tracker, found_inf, 2.0, 0.5, 2000)

    return Call(step)


def grad_scaler(task: Task, given: argparse.Namespace) -> Job:
    """The loop of torch's documentation, without autocast."""
    model, [(x, y)] = task.make(given.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    scaler = torch.amp.GradScaler(given.device, init_scale=SCALE)

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()

    return Call(step)


def rows_of(task: Task, given: argparse.Namespace) -> Rows:
    settings = {"max_norm": MAX_NORM, "donate": True}
    return {
        "GradScaler + fused AdamW": lambda: grad_scaler(task, given),
        "the floor": lambda: floor(task, given),
        "purescale by hand, donate=True": lambda: train_step.by_hand(task, given, **settings),
        "purescale, donate=True": lambda: train_step.purescale(task, given, **settings),
    }


STEPS = 5  # in a row


def times_of(jobs: dict[str, Job], rounds: int) -> dict[str, list[float]]:
    """Microseconds of CPU time for a step of each row in each round."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    order = random.Random(0)
    for _ in range(rounds):
        for name, job in order.sample(list(jobs.items()), len(jobs)):
            job.run()  # after another row
            start = time.process_time()
            for _ in range(STEPS):
                job.run()
            times[name].append(1e6 * (time.process_time() - start) / STEPS)
    return times


def compare(task: Task, given: argparse.Namespace) -> None:
    rows = rows_of(task, given)
    baseline = next(iter(rows))
    medians: dict[str, list[float]] = {name: [] for name in rows}
    ratios: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(given.repeats):
        times = times_of(warm(rows, given.device), given.rounds)
        for name, values in times.items():
            medians[name].append(statistics.median(values))
            pairs = zip(values, times[baseline], strict=True)
            ratios[name].append(statistics.median([a / b for a, b in pairs]))
    sizes = [p.numel() for p in task.model().parameters()]
    title = f"{task.title}, {sum(sizes):,} parameters in {len(sizes)} tensors, max_norm"
    print(f"### {title}\n\n| row | us | against {baseline} | repeats |\n|---|---|---|---|")
    for name in rows:
        low, ratio, high = min(ratios[name]), statistics.median(ratios[name]), max(ratios[name])
        us = statistics.median(medians[name])
        print(f"| {name} | {us:.0f} | {ratio:.2f} | {low:.2f} to {high:.2f} |")
        figures = {"us": us, "ratio": ratio, "low": low, "high": high}
        record(given, title=title, row=name, baseline=baseline, task=task.title, **figures)
    print(flush=True)


def main() -> None:
    torch.set_num_threads(1)
    repeats = {"type": int, "default": 7, "help": "of all rounds, with rows made anew"}
    given = options(__doc__, rounds=30, device="cpu", repeats=repeats)
    for task in TASKS:
        compare(task, given)


if __name__ == "__main__":
    main()
