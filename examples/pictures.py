"""Draw the pictures of the documentation: a skip and a retry, two rules side by side, the scales
that fit a batch, batch-norm statistics before and after `precise_bn`.

Run `python examples/pictures.py docs/images`; it takes some seconds. Every picture is drawn from a
short training of a small net. The picture in the README is that of `make demo`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import purescale as ps

BLUE, ORANGE, GREEN, YELLOW = "#0072B2", "#D55E00", "#009E73", "#E69F00"  # Okabe and Ito
STEPS = 120

# ---- a rare class whose gradients are large ------------------------------------------------------

EVERY, COST = 12, 2.0**12


def batch(index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, labels and weights. Every twelfth batch has samples of a rare class that weigh 4096
    times as much, so its gradients are larger by about as much.
    """
    generator = torch.Generator().manual_seed(100 + index)
    x, y, weight = torch.randn(32, 16, generator=generator), torch.zeros(32).long(), torch.ones(32)
    if index % EVERY == EVERY - 1:
        y[:4], weight[:4] = 1, COST
        x[:4, :4] += 3
    return x, y, weight


def make_problem() -> tuple[Any, Any, Any, Any]:
    """The loss in float16, and the net that it trains: apply, params and buffers."""
    torch.manual_seed(0)
    hidden = [layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.ReLU())]
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), *hidden, nn.Linear(32, 2))
    apply, params, buffers = ps.make_functional(model)
    half = ps.with_policy(apply, "params=float32,compute=float16,output=float32")

    def loss_fn(params, buffers, batch):
        x, y, weight = batch
        logits, buffers = half(params, buffers, x)
        return (weight * F.cross_entropy(logits, y, reduction="none")).mean(), buffers

    return loss_fn, apply, params, buffers


def train(rule: Any, max_retries: int = 0) -> tuple[ps.StepInfo, list[float]]:
    """A run, and after each step the loss on fresh samples of the rare class."""
    loss_fn, apply, params, buffers = make_problem()
    fresh_x, fresh_y, _ = (part[:4] for part in batch(100 * EVERY - 1))
    optimizer = ps.from_torch(torch.optim.AdamW, lr=1e-2)
    state = ps.init_train_state(params, buffers, optimizer, rule)
    settings = {"loss_fn": loss_fn, "optimizer": optimizer, "rule": rule, "max_norm": 1.0}
    infos, rare = [], []
    for index in range(STEPS):
        state, info = ps.train_step(state, [batch(index)], max_retries=max_retries, **settings)
        infos.append(info)
        logits, _ = apply(state.params, buffers, fresh_x)
        rare.append(F.cross_entropy(logits, fresh_y).item())
    return ps.stack_infos(infos), rare


def draw_scale(axes: Any, run: ps.StepInfo, color: str, label: str, line: str = "-") -> None:
    """The scale that each step used; a cross where the step was skipped."""
    bits, skipped = run.scale.log2(), run.found_inf.nonzero().flatten()
    label = f"{label}: {len(skipped)} skipped"
    axes.step(range(STEPS), bits, line, where="mid", color=color, linewidth=1.6, label=label)
    axes.plot(skipped, bits[skipped], "x", color=color, markersize=7, markeredgewidth=2)


def skip_and_retry() -> Any:
    """A run that skips every rare batch beside one that tries it again at a lower scale."""
    rule = ps.DynamicScale(growth_interval=4)
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 5), sharex=True, layout="constrained")
    for label, retries, color, line in (
        ("max_retries=0", 0, ORANGE, "-"),
        ("max_retries=24", 24, BLUE, "-"),
    ):
        run, rare = train(rule, max_retries=retries)
        top.plot(rare, line, color=color, linewidth=2, label=label)
        draw_scale(bottom, run, color, label, line)
    top.set(ylabel="loss on the rare class", yscale="log")
    bottom.set(ylabel="log2 of the scale used", xlabel="step (a cross: skipped)")
    bottom.set_ylim(None, 30)
    top.legend(frameon=False)
    bottom.legend(frameon=False, loc="upper left", ncols=2)
    return figure


def headroom() -> Any:
    """Two rules on the same batches, from a scale that is too high; halfway the loss, and with it
    every gradient, becomes 1024 times as large.
    """
    _, apply, params, buffers = make_problem()
    half = ps.with_policy(apply, "params=float32,compute=float16,output=float32")
    optimizer = ps.from_torch(torch.optim.AdamW, lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS, 32, 16, generator=generator)
    y = torch.randint(2, (STEPS, 32), generator=generator)

    def loss_fn(params, buffers, index):
        logits, buffers = half(params, buffers, x[index])
        factor = 1.0 if index < STEPS // 2 else 1024.0
        return factor * F.cross_entropy(logits, y[index]), buffers

    figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    for rule, color in (
        (ps.DynamicScale(init_scale=2.0**24, growth_interval=20), ORANGE),
        (ps.HeadroomScale(init_scale=2.0**24, max_scale=2.0**24), BLUE),
    ):
        state = ps.init_train_state(params, buffers, optimizer, rule)
        infos = []
        for index in range(STEPS):
            state, info = ps.train_step(
                state, [index], loss_fn=loss_fn, optimizer=optimizer, rule=rule
            )
            infos.append(info)
        run = ps.stack_infos(infos)
        draw_scale(axes, run, color, type(rule).__name__)
    fits = (65504 / run.grad_amax).log2()
    fits[run.found_inf] = torch.nan
    axes.plot(fits, ".", color="0.6", markersize=4, label="largest scale that fits the gradients")
    axes.set(xlabel="step (a cross: skipped)", ylabel="log2 of the scale used")
    axes.legend(frameon=False, loc="upper right")
    return figure


def probe() -> Any:
    """The scales that fit one usual batch."""
    loss_fn, _, params, buffers = make_problem()
    found = ps.probe_scales(loss_fn, params, buffers, batch(0), range(-30, 31, 2))
    figure = found.plot()
    figure.set_size_inches(8, 6)
    return figure


# ---- batch-norm statistics -----------------------------------------------------------------------


def batch_norm() -> Any:
    """What leaves the first batch norm at evaluation, by running averages and by `precise_bn`."""
    generator = torch.Generator().manual_seed(0)
    teacher = torch.randn(16, 3, generator=generator)
    offsets = 1.5 * torch.randn(8, 1, 16, generator=generator)  # of eight sources of data
    images = torch.randn(8, 256, 16, generator=generator) + offsets
    labels = (images @ teacher).argmax(-1)
    loader = [  # each batch comes from one source
        (images[source, at : at + 32], labels[source, at : at + 32])
        for at in range(0, 256, 32)
        for source in range(8)
    ]
    torch.manual_seed(0)
    apply, params, buffers = ps.make_functional(
        nn.Sequential(
            nn.Linear(16, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3)
        )
    )
    optimizer, rule = ps.from_torch(torch.optim.AdamW, lr=3e-3), ps.DynamicScale()

    def loss_fn(params, buffers, batch):
        logits, buffers = apply(params, buffers, batch[0])
        return F.cross_entropy(logits, batch[1]), buffers

    state = ps.init_train_state(params, buffers, optimizer, rule)
    for index in torch.randint(len(loader), (256,), generator=generator):
        state, _ = ps.train_step(
            state, [loader[index]], loss_fn=loss_fn, optimizer=optimizer, rule=rule
        )
    precise = ps.precise_bn(
        apply, state.params, state.buffers, loader, call=lambda forward, b: forward(b[0])
    )
    given = images.flatten(0, 1) @ state.params["0.weight"].T  # what the batch norm is given
    figure, panels = plt.subplots(1, 2, figsize=(8, 2.8), sharey=True, layout="constrained")
    rows = {"running averages": (state.buffers, YELLOW), "precise_bn": (precise, BLUE)}
    for row, (held, color) in enumerate(rows.values()):
        out = (given - held["1.running_mean"]) / (held["1.running_var"] + 1e-5).sqrt()
        spread = row + 0.15 * torch.linspace(-1, 1, 32)
        for axes, values in zip(panels, (out.mean(0), out.var(0)), strict=True):
            axes.plot(values, spread, "o", color=color, alpha=0.6)
    for axes, name, exact in zip(panels, ("mean", "variance"), (0, 1), strict=True):
        axes.axvline(exact, color="0.3", linestyle=":")
        axes.set(xlabel=f"{name} (dotted: {exact}, as it should be)")
        axes.set(yticks=range(2), yticklabels=list(rows), ylim=(1.5, -0.5))
    panels[1].set_xlim(0, None)
    figure.suptitle(
        "What leaves a batch norm at evaluation, before its weight and bias: a dot per channel",
        fontsize="medium",
    )
    return figure


# ---- all of them ---------------------------------------------------------------------------------

PICTURES = {
    "skip_and_retry": skip_and_retry,
    "headroom": headroom,
    "probe": probe,
    "batch_norm": batch_norm,
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("docs/images"))
    options = parser.parse_args(argv)
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        figure = draw()
        for axes in figure.axes:
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(options.folder / f"{name}.png", dpi=90)
        plt.close(figure)
        print(f"wrote {options.folder / name}.png")


if __name__ == "__main__":
    main()
