"""Calls of Python and C functions of a warm eager step, beside GradScaler's loop.

    python benchmarks/calls.py

Counts, not times: they tell what a small step pays for, and vary by a few with what ran before.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import purescale as ps

Function = Callable[[], None]


def net() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)),
    )


def batches(number: int) -> list[Any]:
    return [(torch.randn(8, 3, 8, 8), torch.randint(0, 5, (8,))) for _ in range(number)]


def pure_step(number: int, max_norm: float | None) -> Function:
    apply, params, buffers = ps.make_functional(net())
    optimizer, rule = ps.from_torch(torch.optim.AdamW, lr=1e-3), ps.DynamicScale()
    state, data = [ps.init_train_state(params, buffers, optimizer, rule)], batches(number)

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
        out, buffers = apply(params, buffers, batch[0])
        return F.cross_entropy(out, batch[1]), buffers

    def step() -> None:
        state[0], _ = ps.train_step(
            *(state[0], data),
            loss_fn=loss_fn,
            optimizer=optimizer,
            rule=rule,
            max_norm=max_norm,
            donate=True,
        )

    return step


def grad_scalers_step(number: int, max_norm: float | None) -> Function:
    model, scaler = net(), torch.amp.GradScaler("cpu")
    optimizer, data = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), batches(number)

    def step() -> None:
        optimizer.zero_grad()
        for x, y in data:
            scaler.scale(F.cross_entropy(model(x), y) / number).backward()
        if max_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()

    return step


def calls(function: Function) -> int:
    """Return the number of calls in a warm run."""
    for _ in range(3):
        function()
    gc.collect()  # what torch calls when a module dies is not of the step
    count = 0

    def counted(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


for number in (1, 4):
    for max_norm in (None, 1.0):
        ours, theirs = (calls(f(number, max_norm)) for f in (pure_step, grad_scalers_step))
        print(f"{number} microbatches, {max_norm=}: {ours} / {theirs} = {ours / theirs:.2f}")
