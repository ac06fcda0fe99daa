"""Train one small residual net three times on real images: float32, float16 through purescale,
float16 through GradScaler.

Run `make demo`. Prints a table and writes digits.png: loss and scale over the steps, skipped steps
marked. Then the test accuracy of a net that has seen a few small batches, with the running
statistics of BatchNorm and with precise ones.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from tqdm import tqdm

import purescale as ps

BATCH = 64
LEARNING_RATE = 2e-3
INIT_SCALE = 2.0**24  # far too high for float16, so that the first steps overflow
# far shorter than the usual 2000, so that the scale is seen to grow and overflow again
GROWTH_INTERVAL = 60


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        Block(32),
        nn.MaxPool2d(2),
        Block(32),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


class Data(NamedTuple):
    train_x: Tensor
    test_x: Tensor
    train_y: Tensor
    test_y: Tensor


def load() -> Data:
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images, labels, test_size=0.25, random_state=0, stratify=labels)
    train_x, test_x = (
        torch.tensor(x, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16 for x in split[:2]
    )
    train_y, test_y = (torch.tensor(y) for y in split[2:])
    return Data(train_x, test_x, train_y, test_y)


def batches(data: Data, epochs: int, title: str) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    steps = epochs * (len(data.train_x) // BATCH)
    # None: off where there is no terminal
    with tqdm(total=steps, desc=f"{title:22}", unit="step", disable=None) as bar:
        for _ in range(epochs):
            order = torch.randperm(len(data.train_x), generator=generator)
            for index in order.split(BATCH):
                if len(index) == BATCH:
                    yield data.train_x[index], data.train_y[index]
                    bar.update()


class Run(NamedTuple):
    title: str
    losses: Tensor
    scales: Tensor
    skipped: Tensor
    accuracy: float
    seconds: float


def accuracy(logits: Tensor, labels: Tensor) -> float:
    return (logits.argmax(-1) == labels).float().mean().item()


def with_purescale(title: str, policy: str, rule: object, data: Data, epochs: int) -> Run:
    apply, params, buffers = ps.make_functional(make_model())
    apply = ps.with_policy(apply, policy)
    optimizer = ps.from_torch(torch.optim.AdamW, lr=LEARNING_RATE)

    def loss_fn(params, buffers, batch):
        x, y = batch
        logits, buffers = apply(params, buffers, x)
        return F.cross_entropy(logits, y), buffers

    state = ps.init_train_state(params, buffers, optimizer, rule)
    infos = []
    start = time.perf_counter()
    for batch in batches(data, epochs, title):
        state, info = ps.train_step(
            state, [batch], loss_fn=loss_fn, optimizer=optimizer, rule=rule, donate=True
        )
        infos.append(info)
    seconds = time.perf_counter() - start

    logits, _ = apply(state.params, state.buffers, data.test_x, train=False)
    losses, scales, skipped = (
        torch.stack([getattr(info, name) for info in infos])
        for name in ("loss", "scale", "found_inf")
    )
    return Run(title, losses, scales, skipped, accuracy(logits, data.test_y), seconds)


def with_grad_scaler(title: str, data: Data, epochs: int) -> Run:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=INIT_SCALE, growth_interval=GROWTH_INTERVAL)
    losses, scales = [], []
    start = time.perf_counter()
    for x, y in batches(data, epochs, title):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            logits = model(x)
        loss = F.cross_entropy(logits.float(), y)
        scales.append(scaler.get_scale())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    seconds = time.perf_counter() - start

    scales.append(scaler.get_scale())
    skipped = torch.tensor([after < before for before, after in itertools.pairwise(scales)])
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        logits = model(data.test_x)
    return Run(
        title,
        torch.stack(losses),
        torch.tensor(scales[:-1]),
        skipped,
        accuracy(logits, data.test_y),
        seconds,
    )


def small_batches(data: Data, steps: int = 60, size: int = 4) -> dict[str, float]:
    """Test accuracy after a few steps at a small batch size: with running statistics, and with
    those of `precise_bn`.
    """
    apply, params, buffers = ps.make_functional(make_model())
    optimizer, rule = ps.from_torch(torch.optim.AdamW, lr=LEARNING_RATE), ps.NoScale()

    def loss_fn(params, buffers, index):
        logits, buffers = apply(params, buffers, data.train_x[index])
        return F.cross_entropy(logits, data.train_y[index]), buffers

    state = ps.init_train_state(params, buffers, optimizer, rule)
    order = torch.randperm(len(data.train_x), generator=torch.Generator().manual_seed(1))
    for index in order[: steps * size].split(size):
        state, _ = ps.train_step(
            state, [index], loss_fn=loss_fn, optimizer=optimizer, rule=rule, donate=True
        )

    loader = data.train_x.split(128)
    kinds = {
        "running averages": state.buffers,
        "precise_bn": ps.precise_bn(apply, state.params, state.buffers, loader),
        "precise_bn, sequential": ps.precise_bn(
            apply, state.params, state.buffers, loader, normalize="sequential"
        ),
    }
    return {
        kind: accuracy(apply(state.params, b, data.test_x, train=False)[0], data.test_y)
        for kind, b in kinds.items()
    }


def table(runs: list[Run]) -> str:
    rows = [f"{'':24}{'test accuracy':>14}{'skipped':>9}{'final scale':>13}{'seconds':>9}"]
    for run in runs:
        scale = f"2**{run.scales[-1].log2().item():.0f}"
        rows.append(
            f"{run.title:24}{run.accuracy:14.4f}{run.skipped.sum().item():9d}{scale:>13}{run.seconds:9.1f}"
        )
    return "\n".join(rows)


def picture(runs: list[Run], path: Path) -> None:
    figure, (top, bottom) = plt.subplots(2, 1, sharex=True, figsize=(9, 6), height_ratios=(3, 2))
    for number, run in enumerate(runs):
        color = f"C{number}"
        top.plot(run.losses, color=color, linewidth=1, alpha=0.8, label=run.title)
        if run.skipped.any():
            steps = run.skipped.nonzero().flatten()
            bottom.plot(
                run.scales.log2(), color=color, linewidth=1.5, drawstyle="steps-post", alpha=0.8
            )
            bottom.plot(
                steps,
                run.scales.log2()[steps],
                "x",
                color=color,
                label=f"{run.title}: {len(steps)} steps skipped",
            )
    top.set(
        ylabel="training loss",
        yscale="log",
        title="scikit-learn digits, a residual net with BatchNorm",
    )
    bottom.set(ylabel="log2 of the loss scale", xlabel="step")
    top.legend(loc="upper right")
    bottom.legend(loc="upper right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> list[Run]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--picture", type=Path, default=Path("digits.png"))
    options = parser.parse_args(argv)

    data = load()
    half = "params=float32,compute=float16,output=float32"
    dynamic = ps.DynamicScale(init_scale=INIT_SCALE, growth_interval=GROWTH_INTERVAL)
    each: list[Callable[[], Run]] = [
        lambda: with_purescale("float32", "float32", ps.NoScale(), data, options.epochs),
        lambda: with_purescale("float16, purescale", half, dynamic, data, options.epochs),
        lambda: with_grad_scaler("float16, GradScaler", data, options.epochs),
    ]
    runs = [run() for run in each]
    print(table(runs))
    picture(runs, options.picture)
    print(f"wrote {options.picture}\n\n60 steps of 4 images, then at eval with")
    for kind, share in small_batches(data).items():
        print(f"{kind:24}{share:14.4f}")
    return runs


if __name__ == "__main__":
    main()
