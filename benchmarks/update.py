"""The update of half parameters: bytes, memory, time after backward and loss of each way, against
AdamW over float32. Run `make bench`.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable
from typing import Any

import models
import torch
import torch.nn.functional as F
from harness import SIZES, Rows, compare, options, record
from memory import peak
from torch import Tensor

import purescale as ps

Wrap = Callable[[ps.Optimizer], ps.Optimizer]
MOMENTS = {"exp_avg*": torch.bfloat16}
SEEDS, STEPS = range(3), 400


def narrow(optimizer: ps.Optimizer) -> ps.Optimizer:
    return ps.with_state_dtype(optimizer, MOMENTS)


def narrow_mean(optimizer: ps.Optimizer) -> ps.Optimizer:
    return ps.with_state_dtype(optimizer, {"exp_avg": torch.bfloat16})


# name: dtype of the parameters, and what goes around AdamW, in order
WAYS: dict[str, tuple[torch.dtype, list[Wrap]]] = {
    "float32": (torch.float32, []),
    "float32, moments bfloat16": (torch.float32, [narrow]),
    "bfloat16": (torch.bfloat16, []),
    "bfloat16, rounded by chance": (torch.bfloat16, [ps.with_stochastic_rounding]),
    "bfloat16, masters": (torch.bfloat16, [ps.with_master_weights]),
    "bfloat16, masters, exp_avg bfloat16": (
        torch.bfloat16,
        [ps.with_master_weights, narrow_mean],
    ),
    "bfloat16, masters, moments bfloat16": (torch.bfloat16, [ps.with_master_weights, narrow]),
}


def made(wraps: list[Wrap], **settings: Any) -> ps.Optimizer:
    optimizer: ps.Optimizer = ps.from_torch(torch.optim.AdamW, **settings)
    for wrap in wraps:
        optimizer = wrap(optimizer)
    return optimizer


class Step:
    """`unscale_and_step` on the same gradients again and again."""

    def __init__(
        self, way: str, shapes: list[tuple[int, ...]], device: str, *, compiled: bool
    ) -> None:
        dtype, wraps = WAYS[way]
        generator = torch.Generator(device).manual_seed(0)

        def drawn() -> dict[str, Tensor]:
            draw = functools.partial(torch.randn, device=device, generator=generator)
            return {str(i): draw(s).to(dtype) for i, s in enumerate(shapes)}

        optimizer = made(wraps, lr=1e-4)
        self.params, self.grads = drawn(), drawn()
        self.state, self.scaler = optimizer.init(self.params), ps.NoScale().init(device)
        self.step = functools.partial(ps.unscale_and_step, optimizer, donate=True)
        if compiled:
            self.step = torch.compile(self.step, fullgraph=True)
        # A donated gradient is overwritten.
        self.fresh = [grad.clone() for grad in self.grads.values()]

    def prepare(self) -> None:
        torch._foreach_copy_(list(self.grads.values()), self.fresh)

    def run(self) -> None:
        out = self.step(self.scaler, self.params, self.grads, self.state)
        self.params, self.state = out.params, out.opt_state

    def kept(self) -> float:
        """Bytes a parameter, its moments among them."""
        tensors = torch.utils._pytree.tree_leaves((self.params, self.state))
        count = sum(p.numel() for p in self.params.values())
        return sum(t.nbytes for t in tensors if t.ndim > 0) / count


def table_of_bytes(shapes: list[tuple[int, ...]], given: argparse.Namespace) -> None:
    print(
        "### Bytes\n\n| way | bytes a parameter | peak of a step beside them, MiB |\n|---|---|---|"
    )
    for way in WAYS:
        job = Step(way, shapes, given.device, compiled=False)
        job.prepare()
        job.run()
        job.prepare()
        extra = peak(job.run, given.device) / 2**20
        print(f"| {way} | {job.kept():.0f} | {extra:.0f} |", flush=True)
        record(given, title="bytes", row=way, kept=job.kept(), peak=extra)
    print()


def text(device: str) -> Tensor:
    """Words of a fixed list in a random order, as characters."""
    words = [
        "a",
        "pure",
        "function",
        "maps",
        "a",
        "state",
        "to",
        "the",
        "next",
        "state",
        "and",
        "leaves",
        "the",
        "first",
        "one",
        "as",
        "it",
        "was",
    ]
    generator = torch.Generator().manual_seed(0)
    order = torch.randint(0, len(words), (4000,), generator=generator)
    line = " ".join(words[i] for i in order.tolist())
    return torch.tensor([ord(c) - 32 for c in line], device=device)


def learnt(way: str, seed: int, betas: tuple[float, float], device: str) -> float:
    """The loss of a character GPT on its text after some hundred small steps."""
    dtype, wraps = WAYS[way]
    torch.manual_seed(seed)
    model = models.GPT(96, length=64, dim=64, depth=2, heads=4).to(device, dtype)
    apply, params, buffers = ps.make_functional(model)
    optimizer, rule = made(wraps, lr=3e-4, betas=betas, weight_decay=0.01), ps.NoScale()
    state = ps.init_train_state(params, buffers, optimizer, rule)
    data, generator = text(device), torch.Generator().manual_seed(seed)

    def loss_fn(params: Any, buffers: Any, rows: Tensor) -> tuple[Tensor, Any]:
        out, buffers = apply(params, buffers, rows[:, :-1])
        return F.cross_entropy(out.float().flatten(0, 1), rows[:, 1:].flatten()), buffers

    step = functools.partial(
        ps.train_step, loss_fn=loss_fn, optimizer=optimizer, rule=rule, max_norm=1.0, donate=True
    )
    losses = []
    for _ in range(STEPS):
        starts = torch.randint(0, len(data) - 49, (16,), generator=generator).tolist()
        state, info = step(state, [torch.stack([data[s : s + 49] for s in starts])])
        losses.append(info.loss)
    return torch.stack(losses[-50:]).mean().item()


def table_of_losses(given: argparse.Namespace) -> None:
    for betas in ((0.9, 0.999), (0.9, 0.95)):
        print(
            f"### Loss of a character GPT after {STEPS} steps, betas={betas}\n\n| way | mean over "
            f"{len(SEEDS)} seeds | against float32 |\n|---|---|---|"
        )
        base = None
        for way in WAYS:
            loss = statistics.mean(learnt(way, seed, betas, given.device) for seed in SEEDS)
            base = loss if base is None else base
            print(f"| {way} | {loss:.4f} | {loss - base:+.4f} |", flush=True)
            record(given, title=f"loss, betas={betas}", row=way, loss=loss)
        print()


def main() -> None:
    given = options(__doc__, rounds=9)
    size, shapes = next(iter(SIZES.items()))
    table_of_bytes(shapes, given)
    for compiled in (False, True) if given.slow else (False,):
        rows: Rows = {
            way: functools.partial(Step, way, shapes, given.device, compiled=compiled)
            for way in WAYS
        }
        how = "compiled" if compiled else "eager"
        compare(f"After backward, {size} tensors, {how}", rows, given, size=size, compiled=compiled)
    table_of_losses(given)


if __name__ == "__main__":
    main()
