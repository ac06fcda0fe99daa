"""One microbatch added to the gradients of a window, and a window of four inside a step. Run
`make bench`.

The first baseline only adds, `torch._foreach_add_(sums, grads)`: no check, no weight. 1.33 is the
physical limit with a check: 16 bytes an element read and written in place of 12. The second is the
loop of GradScaler over a loss whose gradients cost next to nothing, so that what is seen is the
window, the check and the step; SGD.
"""

from __future__ import annotations

from typing import Any

import torch
from harness import SIZES, Call, Rows, compare, options
from torch import Tensor

import purescale as ps


def foreach_add(shapes: list[tuple[int, ...]], device: str) -> Call:
    """What a loop without checks or weights pays."""
    sums = [torch.zeros(s, device=device) for s in shapes]
    grads = [torch.randn(s, device=device) for s in shapes]
    return Call(lambda: torch._foreach_add_(sums, grads))


class Accumulate:
    """`accumulate_grads`, with the flag at hand or with the check in it."""

    def __init__(
        self, shapes: list[tuple[int, ...]], device: str, known: bool, donate: bool
    ) -> None:
        self.grads = [torch.randn(s, device=device) for s in shapes]
        self.accum = ps.init_accum(self.grads)
        self.found_inf = torch.zeros((), dtype=torch.bool, device=device) if known else None
        self.donate = donate

    def prepare(self) -> None:
        pass

    def run(self) -> None:
        self.accum = ps.accumulate_grads(
            self.accum, self.grads, 1.0, self.found_inf, donate=self.donate
        )


WINDOW = {"10M in 100": [(316, 316)] * 100, "64k in 1000": [(64,)] * 1000}
MICROBATCHES = 4


class Ready(torch.autograd.Function):
    """A loss of 1 whose gradients are filled with one number."""

    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> Tensor:
        ctx.shapes = [weight.shape for weight in weights]
        return weights[0].new_ones(())

    @staticmethod
    def backward(ctx: Any, *seed: Tensor) -> Any:
        return tuple(seed[0].new_full(shape, 1e-3) for shape in ctx.shapes)


def grad_scaler(shapes: list[tuple[int, ...]], device: str) -> Call:
    """What `.backward()` adds up."""
    weights = [torch.zeros(s, device=device, requires_grad=True) for s in shapes]
    scaler, sgd = (
        torch.amp.GradScaler(device, init_scale=2.0**10),
        torch.optim.SGD(weights, lr=1e-3, fused=True),
    )

    def step() -> None:
        sgd.zero_grad(set_to_none=True)
        for _ in range(MICROBATCHES):
            scaler.scale(Ready.apply(*weights) / MICROBATCHES).backward()
        scaler.step(sgd)
        scaler.update()

    return Call(step)


class Window:
    """`train_step` over several microbatches."""

    def __init__(self, shapes: list[tuple[int, ...]], device: str, **settings: Any) -> None:
        sgd, rule = ps.from_torch(torch.optim.SGD, lr=1e-3), ps.DynamicScale(init_scale=2.0**10)
        self.state = ps.init_train_state(
            {f"w{i}": torch.zeros(s, device=device) for i, s in enumerate(shapes)}, {}, sgd, rule
        )
        self.settings: Any = {
            "loss_fn": self.loss,
            "optimizer": sgd,
            "rule": rule,
            "donate": True,
            **settings,
        }

    def loss(self, params: dict[str, Tensor], buffers: Any, microbatch: None) -> Any:
        return Ready.apply(*params.values()), buffers

    def prepare(self) -> None:
        pass

    def run(self) -> None:
        self.state, _ = ps.train_step(self.state, [None] * MICROBATCHES, **self.settings)


def main() -> None:
    given = options(__doc__)
    for size, shapes in SIZES.items():
        rows: Rows = {
            "foreach add": lambda s=shapes: foreach_add(s, given.device),
            "flag known, donate=True": lambda s=shapes: Accumulate(
                s, given.device, known=True, donate=True
            ),
            "with the check, donate=True": lambda s=shapes: Accumulate(
                s, given.device, known=False, donate=True
            ),
            "with the check": lambda s=shapes: Accumulate(
                s, given.device, known=False, donate=False
            ),
        }
        compare(f"{size} tensors", rows, given, size=size)
    for size, shapes in WINDOW.items():
        rows = {
            "GradScaler": lambda s=shapes: grad_scaler(s, given.device),
            "train_step": lambda s=shapes: Window(s, given.device),
            "weights that are tensors": lambda s=shapes: Window(
                s, given.device, weight_fn=lambda m: torch.ones((), device=given.device)
            ),
            "drop_microbatch": lambda s=shapes: Window(
                s, given.device, on_nonfinite="drop_microbatch"
            ),
        }
        compare(f"{MICROBATCHES} microbatches, {size} tensors", rows, given, size=size)


if __name__ == "__main__":
    main()
