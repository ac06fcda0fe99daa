"""What happens after backward, side by side: check, unscale, (clip,) skip or step. Run
`make bench`.

Every round measures all rows once, in turn; a row's figure is the median over the rounds of its
ratio to GradScaler with fused AdamW in the same round. `memcpy` is the yardstick: one read and one
write of every parameter.
"""

from __future__ import annotations

from typing import Any

import torch
from harness import SIZES, Rows, compare, memcpy, options

import purescale as ps

MAX_NORM = 1.0
SCALE = 2.0**10
RULE = ps.DynamicScale(init_scale=SCALE, growth_interval=10**9)


class GradScaler:
    """The hand-written torch loop after backward."""

    def __init__(
        self,
        shapes: list[tuple[int, ...]],
        device: str,
        clip: bool,
        cls: Any = torch.optim.AdamW,
        **implementation: bool,
    ) -> None:
        self.params = [torch.randn(s, device=device).requires_grad_() for s in shapes]
        self.fresh = [torch.randn_like(p) * SCALE for p in self.params]
        self.grads = [torch.empty_like(g) for g in self.fresh]
        self.optimizer = cls(self.params, lr=1e-4, **implementation)
        self.scaler = torch.amp.GradScaler(device, init_scale=SCALE, growth_interval=10**9)
        self.scaler.scale(torch.ones((), device=device))  # makes its tensors
        self.clip = clip

    def prepare(self) -> None:
        # Unscaled in place again and again, gradients would end as subnormal numbers, which a CPU
        # is slow at.
        torch._foreach_copy_(self.grads, self.fresh)
        for p, g in zip(self.params, self.grads, strict=True):
            p.grad = g

    def run(self) -> None:
        if self.clip:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.params, MAX_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Purescale:
    """`unscale_and_step` and `rule.update`."""

    def __init__(
        self,
        shapes: list[tuple[int, ...]],
        device: str,
        clip: bool,
        donate: bool,
        rule: ps.Rule[Any] = RULE,
        cls: Any = torch.optim.AdamW,
    ) -> None:
        self.params = {str(i): torch.randn(s, device=device) for i, s in enumerate(shapes)}
        self.fresh = [torch.randn_like(p) * SCALE for p in self.params.values()]
        self.grads = {n: torch.empty_like(p) for n, p in self.params.items()}
        self.optimizer = ps.from_torch(cls, lr=1e-4)
        self.state = self.optimizer.init(self.params)
        self.rule, self.scaler = rule, rule.init(device)
        self.amax = getattr(rule, "takes_amax", False)
        self.max_norm, self.donate = MAX_NORM if clip else None, donate

    def prepare(self) -> None:
        torch._foreach_copy_(list(self.grads.values()), self.fresh)

    def run(self) -> None:
        out = ps.unscale_and_step(
            self.optimizer,
            self.scaler,
            self.params,
            self.grads,
            self.state,
            max_norm=self.max_norm,
            amax=self.amax,
            donate=self.donate,
        )
        self.params, self.state = out.params, out.opt_state
        told = (out.found_inf, out.grad_amax) if self.amax else (out.found_inf,)
        self.scaler = self.rule.update(self.scaler, *told)


def main() -> None:
    given = options(__doc__)
    for size, shapes in SIZES.items():
        for clip in (False, True):
            rows: Rows = {
                "GradScaler + fused AdamW": lambda s=shapes, c=clip: GradScaler(
                    s, given.device, c, fused=True
                ),
                "GradScaler + foreach AdamW": lambda s=shapes, c=clip: GradScaler(
                    s, given.device, c, foreach=True
                ),
                "purescale, donate=True": lambda s=shapes, c=clip: Purescale(
                    s, given.device, c, donate=True
                ),
                "purescale": lambda s=shapes, c=clip: Purescale(s, given.device, c, donate=False),
                "memcpy": lambda s=shapes: memcpy(s, given.device),
            }
            compare(
                f"{size} tensors, {'max_norm' if clip else 'no clipping'}",
                rows,
                given,
                size=size,
                clip=clip,
            )


if __name__ == "__main__":
    main()
