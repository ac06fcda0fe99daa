"""K small models, each with a loss scale of its own, in one step. Run `make bench`.

`torch.vmap` of `train_step`, eager and compiled, against K GradScaler loops in turn, with and
without `torch.compile(model)`.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import models
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from harness import DTYPES, Call, Job, compare, options
from torch import Tensor, nn

import purescale as ps

LR = 1e-3
SCALES = [2.0**exponent for exponent in range(8, 12)]  # none that overflows under float16


def net(index: int, device: str) -> nn.Module:
    torch.manual_seed(index)
    return nn.Sequential(
        nn.Linear(64, 128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, models.CLASSES),
    ).to(device)


def in_turn(
    count: int, given: argparse.Namespace, wrap: Callable[[nn.Module], Any] = lambda model: model
) -> Job:
    def loop(index: int) -> Callable[[], None]:
        model = net(index, given.device)
        forward = wrap(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
        scaler = torch.amp.GradScaler(given.device, init_scale=SCALES[index % 4])
        x, y = models.batch(32, 64, device=given.device)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(
                given.device, DTYPES[given.dtype], enabled=given.dtype != "float32"
            ):
                loss = F.cross_entropy(forward(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

        return step

    steps = [loop(index) for index in range(count)]
    return Call(lambda: [step() for step in steps])


def vmapped(
    count: int,
    given: argparse.Namespace,
    wrap: Callable[[Any], Any] = lambda step: step,
    donate: bool = False,
) -> Job:
    optimizer, rule = ps.from_torch(torch.optim.AdamW, lr=LR), ps.DynamicScale()

    def start(index: int) -> ps.TrainState:
        _, params, buffers = ps.make_functional(net(index, given.device))
        state = ps.init_train_state(params, buffers, optimizer, rule)
        return state._replace(
            scaler=state.scaler._replace(
                scale=torch.full_like(state.scaler.scale, SCALES[index % 4])
            )
        )

    apply, *_ = ps.make_functional(net(0, given.device))
    if given.dtype != "float32":
        apply = ps.with_policy(
            apply, f"params=float32,compute=autocast({given.dtype}),output=float32"
        )

    def loss_fn(
        params: dict[str, Tensor], buffers: dict[str, Tensor], batch: tuple[Tensor, Tensor]
    ) -> Any:
        logits, buffers = apply(params, buffers, batch[0])
        return F.cross_entropy(logits, batch[1]), buffers

    step = functools.partial(
        ps.train_step, loss_fn=loss_fn, optimizer=optimizer, rule=rule, donate=donate
    )
    every = wrap(torch.vmap(lambda state, batch: step(state, [batch])))
    states = pytree.tree_map(
        lambda *leaves: torch.stack(leaves), *(start(index) for index in range(count))
    )
    data = tuple(
        torch.stack(part)
        for part in zip(
            *(models.batch(32, 64, device=given.device) for _ in range(count)), strict=True
        )
    )

    def once() -> None:
        nonlocal states
        states, _ = every(states, data)

    return Call(once)


def main() -> None:
    given = options(__doc__)
    whole = functools.partial(torch.compile, fullgraph=True, dynamic=False)
    for count in (4, 16, 64):
        torch.compiler.reset()
        rows = {
            "GradScaler + fused AdamW in turn": lambda count=count: in_turn(count, given),
            "the same, torch.compile(model)": lambda count=count: in_turn(
                count, given, torch.compile
            ),
            "purescale, vmap": lambda count=count: vmapped(count, given),
            "purescale, vmap, compiled": lambda count=count: vmapped(count, given, whole),
            "purescale, vmap, donate=True, compiled": lambda count=count: vmapped(
                count, given, whole, donate=True
            ),
        }
        compare(
            f"{count} MLPs 64-128-128-10, batch of 32 each, {given.dtype}",
            rows,
            given,
            models=count,
        )


if __name__ == "__main__":
    main()
