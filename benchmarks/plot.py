"""Draws figure.png from what post_backward.py and growth.py wrote with --record."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from harness import RESULTS
from matplotlib.axes import Axes

BASELINE = "GradScaler + fused AdamW"
COLOURS = {
    BASELINE: "black",
    "GradScaler + foreach AdamW": "tab:gray",
    "fused AdamW, unscaled": "tab:green",
    "purescale, donate=True": "tab:red",
    "purescale": "tab:orange",
    "memcpy": "tab:blue",
}

Lines = list[dict[str, Any]]


def ratios(ax: Axes, lines: Lines) -> None:
    titles = list(dict.fromkeys(line["title"] for line in lines))
    for row in [row for row in COLOURS if row != BASELINE]:
        chosen = [line for line in lines if line["row"] == row]
        middle = [line["ratio"] for line in chosen]
        spread = [
            [line["ratio"] - line["low"] for line in chosen],
            [line["high"] - line["ratio"] for line in chosen],
        ]
        ax.errorbar(
            middle,
            [titles.index(line["title"]) for line in chosen],
            xerr=spread,
            fmt="o",
            markersize=5,
            color=COLOURS[row],
        )
    ax.axvline(1, color=COLOURS[BASELINE], linewidth=1)
    ax.set_yticks(
        range(len(titles)), [title.replace(" tensors, ", " tensors,\n") for title in titles]
    )
    ax.invert_yaxis()
    ax.set(xscale="log", xlabel=f"time / time of {BASELINE}", title="After backward")
    ticks = [0.1, 0.2, 0.5, 1, 2, 4]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    ax.grid(axis="x", alpha=0.3)


def growth(ax: Axes, lines: Lines, over: str, title: str) -> None:
    lines = [line for line in lines if over in line]
    for row, colour in COLOURS.items():
        points = sorted((line[over], line["ms"]) for line in lines if line["row"] == row)
        if points:
            ax.plot(*zip(*points, strict=True), "o-", markersize=4, color=colour)
    ax.set(xscale="log", yscale="log", xlabel=over, ylabel="ms", title=title)
    ax.grid(alpha=0.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("figure.png"))
    given = parser.parse_args()
    sizes, grown = (
        [json.loads(line) for line in (RESULTS / given.device / name).open()]
        for name in ("post_backward.jsonl", "growth.jsonl")
    )
    figure, axes = plt.subplots(
        1, 3, figsize=(14, 4.8), width_ratios=(1.2, 1, 1), layout="constrained"
    )
    ratios(axes[0], sizes)
    growth(axes[1], grown, "parameters", "After backward, 100 tensors")
    growth(axes[2], grown, "tensors", "After backward, 1M parameters")
    handles = [
        plt.Line2D([], [], marker="o", color=colour, label=row) for row, colour in COLOURS.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(given.out, dpi=100)


if __name__ == "__main__":
    main()
