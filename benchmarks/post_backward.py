"""What happens after backward, side by side: check, unscale, (clip,) skip or step. Run `make bench`.

Every round measures all rows once, in turn; a row's figure is the median over the rounds of its ratio to GradScaler with
fused AdamW in the same round. `memcpy` is the yardstick: one read and one write of every parameter.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import purescale as ps

SIZES = {  # name: shapes of the parameters
    "transformer-like, 27M in 147": [(512, 512)] * 48 + [(2048, 512)] * 12 + [(512,)] * 86 + [(3300, 512)],
    "small conv net, 0.2M in 60": [(32, 32, 3, 3)] * 20 + [(32,)] * 40,
}
MAX_NORM = 1.0
SCALE = 2.0**10


def sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class GradScaler:
    """The hand-written torch loop after backward."""

    def __init__(self, shapes: list[tuple[int, ...]], device: str, clip: bool, **implementation: bool) -> None:
        self.params = [torch.randn(s, device=device).requires_grad_() for s in shapes]
        self.fresh = [torch.randn_like(p) * SCALE for p in self.params]
        self.grads = [torch.empty_like(g) for g in self.fresh]
        self.optimizer = torch.optim.AdamW(self.params, lr=1e-4, **implementation)
        self.scaler = torch.amp.GradScaler(device, init_scale=SCALE, growth_interval=10**9)
        self.scaler.scale(torch.ones((), device=device))  # makes its tensors
        self.clip = clip

    def prepare(self) -> None:
        # Unscaled in place again and again, gradients would end as subnormal numbers, which a CPU is slow at.
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

    def __init__(self, shapes: list[tuple[int, ...]], device: str, clip: bool, donate: bool) -> None:
        self.params = {str(i): torch.randn(s, device=device) for i, s in enumerate(shapes)}
        self.fresh = [torch.randn_like(p) * SCALE for p in self.params.values()]
        self.grads = {n: torch.empty_like(p) for n, p in self.params.items()}
        self.optimizer = ps.from_torch(torch.optim.AdamW, lr=1e-4)
        self.state = self.optimizer.init(self.params)
        self.rule = ps.DynamicScale(init_scale=SCALE, growth_interval=10**9)
        self.scaler = self.rule.init(device)
        self.max_norm, self.donate = MAX_NORM if clip else None, donate

    def prepare(self) -> None:
        torch._foreach_copy_(list(self.grads.values()), self.fresh)

    def run(self) -> None:
        out = ps.unscale_and_step(
            self.optimizer, self.scaler, self.params, self.grads, self.state, max_norm=self.max_norm, donate=self.donate
        )
        self.params, self.state = out.params, out.opt_state
        self.scaler = self.rule.update(self.scaler, out.found_inf)


class Memcpy:
    """One read and one write of each parameter."""

    def __init__(self, shapes: list[tuple[int, ...]], device: str) -> None:
        self.source: list[Tensor] = [torch.randn(s, device=device) for s in shapes]
        self.target = [torch.empty_like(t) for t in self.source]

    def prepare(self) -> None:
        pass

    def run(self) -> None:
        torch._foreach_copy_(self.target, self.source)


def measure(rows: dict[str, Callable[[], object]], rounds: int, device: str) -> dict[str, list[float]]:
    """Milliseconds of each row in each round, the rows in turn so that a slow moment hits all of them."""
    jobs = {name: make() for name, make in rows.items()}
    times: dict[str, list[float]] = {name: [] for name in rows}
    for index in range(rounds + 3):
        for name, job in jobs.items():
            job.prepare()
            sync(device)
            start = time.perf_counter()
            job.run()
            sync(device)
            if index >= 3:
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()

    where = torch.cuda.get_device_name() if options.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {where}, median of {options.rounds} rounds\n")
    for size, shapes in SIZES.items():
        for clip in (False, True):
            baseline = "GradScaler + fused AdamW"
            rows: dict[str, Callable[[], object]] = {
                baseline: lambda s=shapes, c=clip: GradScaler(s, options.device, c, fused=True),
                "GradScaler + foreach AdamW": lambda s=shapes, c=clip: GradScaler(s, options.device, c, foreach=True),
                "purescale, donate=True": lambda s=shapes, c=clip: Purescale(s, options.device, c, donate=True),
                "purescale": lambda s=shapes, c=clip: Purescale(s, options.device, c, donate=False),
                "memcpy": lambda s=shapes: Memcpy(s, options.device),
            }
            times = measure(rows, options.rounds, options.device)
            print(f"### {size} tensors, {'max_norm' if clip else 'no clipping'}\n")
            print("| row | ms | against GradScaler + fused | quartiles |\n|---|---|---|---|")
            for name, values in times.items():
                ratios = [a / b for a, b in zip(values, times[baseline], strict=True)]
                low, middle, high = statistics.quantiles(ratios, n=4)
                print(f"| {name} | {statistics.median(values):.2f} | {middle:.2f} | {low:.2f} to {high:.2f} |")
            print()


if __name__ == "__main__":
    main()
