"""Text tables, figures and leaf names for the reports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch.dtypes import widest_float
from .._tree import pytree
from .._tree.pytree import Tree

MAX_LINES = 30
Row = tuple[Any, ...]  # the name of a leaf and its numbers


def table(header: Sequence[str], rows: Sequence[Sequence[str]], first: int = 0) -> list[str]:
    """Return lines of aligned columns, the first flush left, the others right; at most `MAX_LINES`
    rows, from the row `first` on.
    """
    shown = rows[first : first + MAX_LINES]
    widths = [max(map(len, column)) for column in zip(header, *shown, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in (header, *shown)
    ]
    if first:
        lines.insert(1, f"after {first} more")
    rest = len(rows) - first - len(shown)
    return lines + [f"and {rest} more"] * (rest > 0)


def read(column: Sequence[Tensor]) -> list[float]:
    """Read a column with one copy from the device. Syncs with the host. A stacked report gives its
    largest value.
    """
    device = column[0].device
    wide = widest_float(device)
    return torch.stack([value.max().to(device, wide) for value in column]).tolist()


def read_rows(rows: dict[str, Any]) -> list[Row]:
    """Read NamedTuples of tensors with one copy for each field. Syncs with the host."""
    return list(zip(rows, *map(read, zip(*rows.values(), strict=True)), strict=True))


def leaf_names(tree: Tree, whole: str) -> list[str]:
    """Return the dotted name of each leaf, or `whole` for a tree that is one tensor. If two names
    are equal, all have their positions.
    """
    names = [name or whole for name in pytree.dotted_names(tree)]
    if len(set(names)) == len(names):
        return names
    return [f"{name} ({index})" for index, name in enumerate(names)]


def bars(rows: Sequence[Row], *labels: str, log: int = 0) -> Any:
    """Return a new Figure with a panel of bars for each column of the first rows, the first `log`
    of them on a logarithmic scale. A number that is not finite has no bar.
    """
    import matplotlib.pyplot as plt  # only when a figure is drawn

    names, *columns = zip(*rows[:MAX_LINES][::-1], strict=True)  # bars are drawn from below
    height, places = 1.5 + 0.25 * len(names), range(len(names))
    figure, panels = plt.subplots(
        1, len(labels), sharey=True, figsize=(8, height), layout="constrained"
    )
    for index, (panel, column) in enumerate(zip(panels, columns, strict=True)):
        panel.barh(places, [number if math.isfinite(number) else 0 for number in column])
        panel.set_xlabel(labels[index])
        if index < log:
            panel.set_xscale("symlog", base=2, linthresh=2.0**-24)
            panel.xaxis.get_major_locator().set_params(numticks=4)
    panels[0].set_yticks(places, names)
    return figure
