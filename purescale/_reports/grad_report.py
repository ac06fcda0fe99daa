"""A report on each gradient: largest magnitude, share of zeros and subnormals, nonfinite values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._reports.printing import leaf_names, read, table
from .._torch import dtensor
from .._torch.autocast import outside_autocast
from .._torch.dtypes import real_dtype, wide_dtype
from .._torch.tracing import traced
from .._tree import scalars
from .._tree import tree as _tree
from .._tree.leaves import stored_values
from .._tree.tree import Tree


class LeafReport(NamedTuple):
    """One gradient in four numbers, 0-d tensors each."""

    amax: Tensor  # at least float32: the largest magnitude; NaN or inf where there is one
    zeros: Tensor  # float32: the share of elements that are 0
    subnormal: Tensor  # float32: the share that is subnormal in the dtype
    nonfinite: Tensor  # int64: the number of inf and NaN


class GradReport(NamedTuple):
    """A `LeafReport` for each gradient. `print(report)` syncs, and prints a table, the
    worst first.
    """

    rows: dict[str, LeafReport]

    def __str__(self) -> str:
        columns = map(read, zip(*self.rows.values(), strict=True))
        rows = list(zip(self.rows, *columns, strict=True))
        bad = [name for name, *_, nonfinite in rows if nonfinite]
        lines = ["every gradient is finite"]
        if bad:
            lines = [
                f"{len(bad)} of {len(rows)} gradients are not finite. First: {bad[0]}; last, "
                f"nearest to the loss: {bad[-1]}"
            ]
        cells = [
            (name, f"{amax:.2e}", f"{zeros:.0%}", f"{subnormal:.0%}", f"{nonfinite:.0f}")
            for name, amax, zeros, subnormal, nonfinite in sorted(
                rows, key=lambda row: (-row[4], -(row[2] + row[3]))
            )
        ]
        header = ("leaf", "amax", "zeros", "subnormal", "not finite")
        return "\n".join(lines + table(header, cells))


@outside_autocast()
def grad_report(grads: Tree, sample: int = 1) -> GradReport:
    """Equal to, for each leaf `g`, `amax = g.abs().amax()`, `zeros = (g == 0).float().mean()`,
    `subnormal = ((g != 0) & (g.abs() < torch.finfo(g.dtype).tiny)).float().mean()` and
    `nonfinite = (~g.isfinite()).sum()`.

    It shows which layer overflowed, and which one underflows: a high share of zeros under a low
    scale. Zeros and subnormals are counted in the dtype of the leaf, so look at float16 gradients
    before they are widened. For occasional use, not for every step.

    - `grads`: a pytree of floating or complex tensors. `None` has no row; the row of an
      empty leaf is four zeros. Of a sparse leaf its summed values count, of a complex leaf both
      parts. A DTensor is gathered.
    - `sample=n`: use only every n-th element of a leaf.

    Returns tensors on the device of the leaf and reads no value; `print` does. Reports can be
    stacked (then the worst of each is printed) and returned from `torch.vmap`.

    Raises `TypeError`, naming the leaf, for a leaf that is no gradient, `ValueError` for a tree
    without tensors.

    >>> import torch
    >>> weight = torch.tensor([2.0, 0.0, 1e-7, float("inf")], dtype=torch.float16)
    >>> print(grad_report({"head": {"weight": weight, "bias": torch.ones(2)}}))
    1 of 2 gradients are not finite. First: head.weight; last, nearest to the loss: head.weight
    leaf             amax  zeros  subnormal  not finite
    head.weight       inf    25%        25%           1
    head.bias    1.00e+00     0%         0%           0

    Source of the rule: none. Requested in pytorch#67590 and #152279; DeepSpeed and apex name no
    leaf.
    """
    leaves, _ = _tree.flatten(grads)
    _tree.check_gradients(grads, leaves)
    sample = scalars.whole("sample", sample, least=1)
    names = [
        name
        for name, leaf in zip(leaf_names(grads, "grads"), leaves, strict=True)
        if leaf is not None
    ]
    if not names:
        raise ValueError(
            "grads holds no tensor, so there is nothing to report. Likely cause: the `.grad` of "
            "parameters before a backward, or a tree of None. Fix: the gradients that "
            "`torch.func.grad(loss_fn)(params)` returns."
        )
    present = [leaf for leaf in leaves if leaf is not None]
    kinds: dict[Any, list[int]] = {}
    for index, leaf in enumerate(present):
        kinds.setdefault((leaf.device, leaf.dtype), []).append(index)
    reports: list[Any] = [None] * len(present)
    with torch.no_grad():
        for (_, dtype), indices in kinds.items():
            tiny = torch.finfo(dtype).tiny
            columns = _reports_of([present[index] for index in indices], tiny, sample)
            for index, *row in zip(indices, *(c.unbind() for c in columns), strict=True):
                reports[index] = LeafReport(*row)
    return GradReport(dict(zip(names, reports, strict=True)))


# ---- reductions over many leaves -----------------------------------------------------------------

# The elements of all leaves are put into rows of this length, each leaf padded to whole rows, so
# that a few reductions do for any number of leaves.
_ROW = 64


def _reports_of(leaves: Sequence[Tensor], tiny: float, sample: int) -> list[Tensor]:
    """`amax`, `zeros`, `subnormal` and `nonfinite` of leaves of one dtype and device: [n] each."""
    device, number = leaves[0].device, len(leaves)
    sizes, padded = [0] * number, [0] * number
    amax = torch.zeros(number, dtype=real_dtype(wide_dtype(leaves[0].dtype)), device=device)
    counts = torch.zeros(number, 3, dtype=torch.int64, device=device)
    for part in _chunks(leaves, sample, 2**19 if leaves[0].is_cpu else 2**24):
        lengths = [-(-values.numel() // _ROW) for _, values in part]
        for (index, values), length in zip(part, lengths, strict=True):
            sizes[index] += values.numel()
            padded[index] += length * _ROW
        magnitude = _in_rows([values for _, values in part], lengths).abs()
        tests = (magnitude == 0, magnitude < tiny, magnitude < torch.inf)
        row_counts = torch.stack([test.sum(1, dtype=torch.int32) for test in tests], 1)
        leaf_of_row = torch.repeat_interleave(
            torch.tensor([index for index, _ in part], device=device),
            torch.tensor(lengths, device=device),
            output_size=sum(lengths),
        )
        amax = amax.scatter_reduce(0, leaf_of_row, magnitude.amax(1).to(amax.dtype), "amax")
        counts = counts.index_add(0, leaf_of_row, row_counts.to(torch.int64))
    size, padded_size = torch.tensor([sizes, padded], device=device).unbind()
    zeros, below, finite = counts.unbind(1)
    divisor = size.clamp(min=1).to(torch.float32)
    return [
        torch.where(amax.isnan(), torch.nan, amax),  # the same bits for every NaN
        (zeros - (padded_size - size)).to(torch.float32) / divisor,
        (below - zeros).to(torch.float32) / divisor,
        padded_size - finite,
    ]


def _chunks(
    leaves: Sequence[Tensor], sample: int, limit: int
) -> Iterator[list[tuple[int, Tensor]]]:
    """The elements of the leaves, about `limit` at a time, each part with the index of its leaf."""
    chunk: list[tuple[int, Tensor]] = []
    size = 0
    for index, leaf in enumerate(leaves):
        values = _elements(stored_values(dtensor.full_tensor(leaf)))
        values = values[::sample] if sample > 1 else values
        for part in torch.split(values, limit) if values.numel() > limit else [values]:
            chunk.append((index, part))
            size += part.numel()
            if size >= limit:
                yield chunk
                chunk, size = [], 0
    if chunk:
        yield chunk


def _elements(leaf: Tensor) -> Tensor:
    """All elements in one row, in the order of the memory, which needs no copy."""
    if not traced():
        leaf = leaf.permute(sorted(range(leaf.ndim), key=leaf.stride, reverse=True))
    return leaf.reshape(-1)


def _in_rows(values: list[Tensor], lengths: list[int]) -> Tensor:
    """[sum(lengths), _ROW]: the elements of each in rows of its own, the last padded with 0."""
    pads = [length * _ROW - v.numel() for v, length in zip(values, lengths, strict=True)]
    if any(pads):
        zeros = torch.split(values[0].new_zeros(sum(pads)), pads)
        values = [part for pair in zip(values, zeros, strict=True) for part in pair]
    row = torch.cat(values) if len(values) > 1 else values[0]
    return row.reshape(-1, _ROW)
