"""A whole data-parallel step over 2 gloo ranks, one thread each.

The baseline is DistributedDataParallel with GradScaler and fused AdamW, which sends a bucket while
the backward goes on, as `train_step(group=...)` does. Each rank runs the rows in
turn; figures are those of rank 0. `python benchmarks/data_parallel.py --rounds 9`.
"""

from __future__ import annotations

import argparse
import functools
import os
import socket
import statistics
from collections.abc import Callable
from typing import Any

import models
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from harness import Call, seconds
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import purescale as ps

LR, SCALE = 1e-3, 2.0**10
TASKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "transformer, batch of 8": (
        functools.partial(models.transformer, 512, 8, 8),
        (8, 32, 32),
    ),
    "MLP, batch of 64": (functools.partial(models.mlp, 2048, 7), (64, 2048)),
}


def made(task: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model, shape = TASKS[task]
    torch.manual_seed(dist.get_rank())
    return model(), models.batch(*shape, device="cpu")


def ddp(task: str, **settings: Any) -> Call:
    """The loop of torch's documentation."""
    model, (x, y) = made(task)
    wrapped = DistributedDataParallel(model, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(F.cross_entropy(wrapped(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()

    return Call(step)


class Step:
    """`train_step` over a group, or the same by hand."""

    def __init__(self, task: str, **settings: Any) -> None:
        model, self.batch = made(task)
        self.apply, params, buffers = ps.make_functional(model)
        self.optimizer = ps.from_torch(torch.optim.AdamW, lr=LR)
        self.rule = ps.DynamicScale(init_scale=SCALE)
        self.state = ps.init_train_state(params, buffers, self.optimizer, self.rule)
        self.settings = settings

    def prepare(self) -> None:
        pass

    def loss_fn(self, params: Any, buffers: Any, batch: Any) -> Any:
        out, buffers = self.apply(params, buffers, batch[0])
        return F.cross_entropy(out, batch[1]), buffers

    def run(self) -> None:
        self.state, _ = ps.train_step(
            self.state,
            [self.batch],
            loss_fn=self.loss_fn,
            optimizer=self.optimizer,
            rule=self.rule,
            donate=True,
            **self.settings,
        )


def rows(task: str) -> dict[str, Callable[[], Any]]:
    return {
        "DDP + GradScaler": lambda: ddp(task),
        "the same, gradients as views": lambda: ddp(task, gradient_as_bucket_view=True),
        "train_step": lambda: Step(task, group=dist.group.WORLD),
        "train_step, this rank alone": lambda: Step(task),
    }


def on_rank(rank: int, port: int, given: argparse.Namespace) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=given.ranks)
    for task in TASKS:
        jobs = {name: make() for name, make in rows(task).items()}
        times: dict[str, list[float]] = {name: [] for name in jobs}
        for turn in range(given.rounds + 2):
            for name, job in jobs.items():
                dist.barrier()
                took = seconds(job.run, "cpu")
                times[name] += [took] if turn >= 2 else []
        if rank == 0:
            described = models.describe(made(task)[0])
            print(
                f"### {task}, {described}\n\n| row | ms | against DDP | quartiles |\n"
                "|---|---|---|---|"
            )
            for name, values in times.items():
                ratios = [a / b for a, b in zip(values, times["DDP + GradScaler"], strict=True)]
                low, ratio, high = statistics.quantiles(ratios, n=4)
                ms = 1e3 * statistics.median(values)
                print(f"| {name} | {ms:.0f} | {ratio:.2f} | {low:.2f} to {high:.2f} |")
            print(flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads now and then abort a process that ends in the ordinary way


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    print(f"torch {torch.__version__}, {given.ranks} gloo ranks, median of {given.rounds} rounds\n")
    mp.spawn(on_rank, args=(port, given), nprocs=given.ranks)


if __name__ == "__main__":
    main()
