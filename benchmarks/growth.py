"""What follows backward, as it grows with parameters, with tensors and with microbatches. Run
`make bench`.

The baseline is GradScaler with fused AdamW; beside it fused AdamW that neither scales nor checks,
and memcpy.
"""

from __future__ import annotations

import torch
from harness import Call, Job, Rows, compare, memcpy, options
from post_backward import SCALE, GradScaler, Purescale

import purescale as ps

Shapes = list[tuple[int, ...]]


def unscaled(shapes: Shapes, device: str) -> Job:
    """What no loss scaling at all would pay."""
    params = [torch.randn(s, device=device).requires_grad_() for s in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    return Call(torch.optim.AdamW(params, lr=1e-4, fused=True).step)


class GradScalerWindow(GradScaler):
    """As autograd adds the microbatches: the first becomes `.grad`, the others are added to it."""

    def __init__(self, shapes: Shapes, device: str, microbatches: int) -> None:
        super().__init__(shapes, device, clip=False, fused=True)
        self.more = [
            [torch.randn_like(p) * SCALE for p in self.params] for _ in range(microbatches - 1)
        ]

    def run(self) -> None:
        for grads in self.more:
            torch._foreach_add_(self.grads, grads)
        super().run()


class PurescaleWindow(Purescale):
    """`unscale_and_check` and `accumulate_grads` for each microbatch, then `maybe_step`."""

    def __init__(self, shapes: Shapes, device: str, microbatches: int, donate: bool) -> None:
        super().__init__(shapes, device, clip=False, donate=donate)
        self.more = [
            {n: torch.randn_like(p) * SCALE for n, p in self.params.items()}
            for _ in range(microbatches - 1)
        ]

    def run(self) -> None:
        accum = ps.init_accum(self.params)
        for scaled in (self.grads, *self.more):
            grads, found_inf = ps.unscale_and_check(self.scaler, scaled)
            accum = ps.accumulate_grads(accum, grads, 1.0, found_inf, donate=self.donate)
        grads, found_inf = ps.accumulated_grads(accum, donate=self.donate)
        self.params, self.state = ps.maybe_step(
            self.optimizer, self.params, grads, self.state, found_inf, donate=self.donate
        )
        self.scaler = self.rule.update(self.scaler, accum.found_inf)


def one(shapes: Shapes, device: str) -> Rows:
    return {
        "GradScaler + fused AdamW": lambda: GradScaler(shapes, device, clip=False, fused=True),
        "fused AdamW, unscaled": lambda: unscaled(shapes, device),
        "purescale, donate=True": lambda: Purescale(shapes, device, clip=False, donate=True),
        "purescale": lambda: Purescale(shapes, device, clip=False, donate=False),
        "memcpy": lambda: memcpy(shapes, device),
    }


def window(shapes: Shapes, device: str, microbatches: int) -> Rows:
    return {
        **one(shapes, device),
        "GradScaler + fused AdamW": lambda: GradScalerWindow(shapes, device, microbatches),
        "purescale, donate=True": lambda: PurescaleWindow(
            shapes, device, microbatches, donate=True
        ),
        "purescale": lambda: PurescaleWindow(shapes, device, microbatches, donate=False),
    }


def main() -> None:
    given = options(__doc__, rounds=15)
    for millions in (1, 3, 10, 30):
        shapes = [(100 * millions, 100)] * 100
        compare(
            f"{millions}M parameters in 100 tensors",
            one(shapes, given.device),
            given,
            parameters=millions * 10**6,
        )
    for tensors in (10, 100, 1000):
        shapes = [(1000, 1000 // tensors)] * tensors
        compare(
            f"1M parameters in {tensors} tensors", one(shapes, given.device), given, tensors=tensors
        )
    for count in (1, 2, 4, 8):
        rows = window([(1000, 100)] * 100, given.device, count)
        compare(
            f"10M parameters in 100 tensors, microbatches: {count}", rows, given, microbatches=count
        )


if __name__ == "__main__":
    main()
