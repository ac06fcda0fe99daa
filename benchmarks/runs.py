"""`vjp_through` beside the training that it differentiates: time, and memory above its start.

CPU time of one thread, medians. `python benchmarks/runs.py`: each row is a process of its own.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import purescale as ps

REPEATS = 5


def measure(number: int, jitted: bool, every: int | None) -> str:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)
    apply, params, buffers = ps.make_functional(nn.Sequential(*layers))
    optimizer = ps.from_torch(torch.optim.AdamW, lr=2e-3, differentiable=True)
    rule, x, y = ps.NoScale(), torch.randn(1024, 64), torch.randint(0, 10, (1024,))
    items = list(torch.randint(0, 1024, (number, 128)))

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
        logits, buffers = apply(params, buffers, batch[0])
        return (batch[2] * F.cross_entropy(logits, batch[1], reduction="none")).mean(), buffers

    def step(state: Any, index: Any, weights: Any) -> Any:
        batch = x[index], y[index], weights[index]
        return ps.train_step(state, [batch], loss_fn=loss_fn, optimizer=optimizer, rule=rule)

    def query(state: Any) -> Any:
        return F.cross_entropy(apply(state.params, state.buffers, x[:64])[0], y[:64])

    step = ps.jit(step) if jitted else step
    start, weights = ps.init_train_state(params, buffers, optimizer, rule), torch.ones(1024)

    def train() -> None:
        state = start
        for item in items:
            state, _ = step(state, item, weights)

    def derive(items: list[Any] = items) -> None:
        ps.vjp_through(step, start, items, query, wrt=weights, every=every)

    train()
    derive(items[:4])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    training, derivative = seconds(train), seconds(derive)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    kind = "jitted" if jitted else "eager"
    ratio = derivative / training
    return f"| {number} | {kind} | {every or 'root'} | {ratio:.1f} | {grown:.1f} |"


def seconds(function: Callable[[], None]) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--row", nargs=3, help="steps, jitted or eager, every: one row, here")
    row = parser.parse_args().row
    if row:
        print(measure(int(row[0]), row[1] == "jitted", int(row[2]) or None), flush=True)
        return
    print("| steps | step | every | time of the training | MiB above the start |")
    print("|---|---|---|---|---|", flush=True)
    for kind in ("eager", "jitted"):
        for number, every in ((40, 0), (160, 0), (160, 1), (1000, 0)):
            row = [str(number), kind, str(every)]
            subprocess.run([sys.executable, __file__, "--row", *row], check=True)


if __name__ == "__main__":
    main()
