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
from matplotlib.ticker import LogLocator
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from tqdm import tqdm

import purescale as ps

CHANNELS = 20  # few: see SECONDS
BATCH = 64
LEARNING_RATE = 2e-3
INIT_SCALE = 2.0**24  # far too high for float16, so that the first steps overflow
# far shorter than the usual 2000, so that the scale is seen to grow
GROWTH_INTERVAL = 60
SECONDS = (
    "A CPU without float16 units computes float16 convolutions in a slow kernel: compare the\n"
    "seconds of the two float16 rows with each other, not with those of float32."
)


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
        nn.Conv2d(1, CHANNELS, 3, padding=1, bias=False),
        nn.BatchNorm2d(CHANNELS),
        nn.ReLU(),
        Block(CHANNELS),
        nn.MaxPool2d(2),
        Block(CHANNELS),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(CHANNELS, 10),
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
    """Loss and scale of every run: ours thin and dark, over a broad light line for GradScaler's."""
    figure, (top, bottom) = plt.subplots(
        2, 1, sharex=True, figsize=(8, 5), height_ratios=(3, 2), layout="constrained"
    )
    styles = (
        {"color": "0.6", "linewidth": 1.2, "zorder": 1},  # float32
        {"color": "#0072B2", "linewidth": 1.5, "zorder": 3},
        {"color": "#E69F00", "linewidth": 6, "zorder": 2, "alpha": 0.45},
    )
    for run, style in zip(runs, styles, strict=True):
        top.plot(run.losses, label=run.title, **style)
        if run.skipped.any():
            steps, bits = run.skipped.nonzero().flatten(), run.scales.log2()
            label = f"{run.title}: {len(steps)} steps skipped"
            bottom.plot(bits, drawstyle="steps-post", label=label, **style)
            big = style["linewidth"] > 2
            marks = {"markersize": 10 if big else 6, "markeredgewidth": 3 if big else 1.5}
            shared = {name: style[name] for name in ("color", "zorder")}
            bottom.plot(steps, bits[steps], "x", **marks, **shared, alpha=style.get("alpha"))
    top.set(
        ylabel="training loss",
        yscale="log",
        title="A residual net on scikit-learn's digits: three trainings, the same batches",
    )
    top.yaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), major_formatter="{x:g}")
    top.yaxis.set_minor_formatter("")
    bottom.set(ylabel="log2 of the loss scale", xlabel="step (a cross: skipped)")
    bottom.margins(y=0.12)
    for axes in (top, bottom):
        axes.legend(loc="upper right", frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)


def main(argv: list[str] | None = None) -> list[Run]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
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
    print(table(runs), SECONDS, sep="\n\n")
    picture(runs, options.picture)
    print(f"\nwrote {options.picture}\n\n60 steps of 4 images, then at eval with")
    for kind, share in small_batches(data).items():
        print(f"{kind:24}{share:14.4f}")
    return runs


if __name__ == "__main__":
    main()
