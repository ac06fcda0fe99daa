"""What the numbers in each gradient look like."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch import dtensor
from .._torch.autocast import outside_autocast
from .._torch.dtypes import widest_float
from .._torch.tracing import traced
from .._tree import scalars as _checks
from .._tree import tree as _tree
from .._tree.leaves import stored_values
from .._tree.tree import Tree


class LeafReport(NamedTuple):
    """One gradient in four numbers, 0-d tensors each."""

    amax: Tensor  # at least float32: the largest magnitude; NaN or inf where there is one
    zeros: Tensor  # float32: the share of elements that are 0
    subnormal: Tensor  # float32: the share that is not 0 and below the dtype's normal range
    nonfinite: Tensor  # int64: how many are inf or NaN


class GradReport(NamedTuple):
    """A `LeafReport` for each gradient. `print(report)` reads it: a table, the worst first."""

    rows: dict[str, LeafReport]

    def __str__(self) -> str:
        facts = _read(self.rows)
        bad = [name for name, row in facts.items() if row.nonfinite]
        lines = ["every gradient is finite"]
        if bad:
            lines = [
                f"{len(bad)} of {len(facts)} gradients are not finite. First: {bad[0]}; last, "
                f"nearest to the loss: {bad[-1]}"
            ]
        lost = {name: row.zeros + row.subnormal for name, row in facts.items()}
        worst = sorted(facts, key=lambda name: (-facts[name].nonfinite, -lost[name]))
        width = max(len("leaf"), *map(len, worst[:_MOST]))
        lines.append(f"{'leaf':{width}}  {'amax':>9}  zeros  subnormal  not finite")
        for name in worst[:_MOST]:
            row = facts[name]
            lines.append(
                f"{name:{width}}  {row.amax:9.2e}  {row.zeros:5.0%}  {row.subnormal:9.0%}  "
                f"{row.nonfinite:10.0f}"
            )
        return "\n".join(lines + [f"and {len(worst) - _MOST} more"] * (len(worst) > _MOST))


_MOST = 30  # lines of a table


class _Read(NamedTuple):
    amax: float
    zeros: float
    subnormal: float
    nonfinite: float


def _read(rows: dict[str, LeafReport]) -> dict[str, _Read]:
    """On the host, by four copies however many rows there are; of stacked reports the largest."""
    columns = []
    for column in zip(*rows.values(), strict=True):
        wide = widest_float(column[0].device)
        each = torch.stack([fact.to(wide).max() for fact in column])
        columns.append(each.tolist())
    return {name: _Read(*facts) for name, *facts in zip(rows, *columns, strict=True)}


@outside_autocast()
def grad_report(grads: Tree, sample: int = 1) -> GradReport:
    """Equal to, for each leaf `g`, `amax = g.abs().amax()`, `zeros = (g == 0).float().mean()`,
    `subnormal = ((g != 0) & (g.abs() < torch.finfo(g.dtype).tiny)).float().mean()` and
    `nonfinite = (~g.isfinite()).sum()`.

    The answer to "which layer overflowed", and to "which one starves": a high share of zeros under
    a low scale. Zeros and subnormals are those of the dtype that a leaf has, so a float16 tensor
    tells more before it is widened. For a look now and then, not for every step.

    - `grads`: a pytree of floating or complex tensors. `None` has no row; an empty
      leaf has four zeros. Of a sparse leaf its summed values count, of a complex one both parts,
      each by itself. A DTensor is gathered.
    - `sample=n` looks at every n-th element of a leaf only.

    Returns tensors, on the device of the leaf, and reads none of them: that is left to `print`.
    Reports can be stacked (what is printed then is the worst of each) and come out of `torch.vmap`.

    Raises `TypeError`, naming the leaf, for what is no gradient, `ValueError` for a tree without
    tensors.

    >>> import torch
    >>> weight = torch.tensor([2.0, 0.0, 1e-7, float("inf")], dtype=torch.float16)
    >>> print(grad_report({"head": {"weight": weight, "bias": torch.ones(2)}}))
    1 of 2 gradients are not finite. First: head.weight; last, nearest to the loss: head.weight
    leaf              amax  zeros  subnormal  not finite
    head.weight        inf    25%        25%           1
    head.bias     1.00e+00     0%         0%           0

    Source of the rule: none. DeepSpeed's and apex's `prof_only_nonfinite` name no leaf; asked for
    in pytorch#67590 and #152279.
    """
    leaves, _ = _tree.flatten(grads)
    _tree.check_gradients(grads, leaves)
    sample = _checks.whole("sample", sample, least=1)
    names = [name for name, leaf in zip(_names(grads), leaves, strict=True) if leaf is not None]
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
        for (_, dtype), places in kinds.items():
            tiny = torch.finfo(dtype).tiny
            columns = _columns_of([present[index] for index in places], tiny, sample)
            for index, *facts in zip(places, *(c.unbind() for c in columns), strict=True):
                reports[index] = LeafReport(*facts)
    return GradReport(dict(zip(names, reports, strict=True)))


def _names(tree: Tree) -> list[str]:
    """The dotted names; where some are the same, each with its place in the tree."""
    names = [name or "grads" for name in _tree.names(tree)]
    if len(set(names)) == len(names):
        return names
    return [f"{name} ({index})" for index, name in enumerate(names)]


# ---- columns -------------------------------------------------------------------------------------

# The elements of all leaves stand in rows of this length, each leaf filled up to whole rows, so
# that a few reductions serve any number of leaves.
_ROW = 64


def _columns_of(leaves: Sequence[Tensor], tiny: float, sample: int) -> list[Tensor]:
    """`amax`, `zeros`, `subnormal` and `nonfinite` of leaves of one dtype and device: [n] each."""
    device, number = leaves[0].device, len(leaves)
    sizes, filled = [0] * number, [0] * number
    tops = torch.zeros(number, dtype=_wide(leaves[0].dtype), device=device)
    counts = torch.zeros(number, 3, dtype=torch.int64, device=device)
    for part in _portions(leaves, sample, 2**19 if leaves[0].is_cpu else 2**24):
        lengths = [-(-values.numel() // _ROW) for _, values in part]
        for (index, values), length in zip(part, lengths, strict=True):
            sizes[index] += values.numel()
            filled[index] += length * _ROW
        magnitude = _in_rows([values for _, values in part], lengths).abs()
        tests = (magnitude == 0, magnitude < tiny, magnitude < torch.inf)
        found = torch.stack([test.sum(1, dtype=torch.int32) for test in tests], 1)
        owner = torch.repeat_interleave(
            torch.tensor([index for index, _ in part], device=device),
            torch.tensor(lengths, device=device),
            output_size=sum(lengths),
        )
        tops = tops.scatter_reduce(0, owner, magnitude.amax(1).to(tops.dtype), "amax")
        counts = counts.index_add(0, owner, found.to(torch.int64))
    size, all_of_it = torch.tensor([sizes, filled], device=device).unbind()
    zeros, below, finite = counts.unbind(1)
    share = size.clamp(min=1).to(torch.float32)
    return [
        torch.where(tops.isnan(), torch.nan, tops),  # of one payload, however it was found
        (zeros - (all_of_it - size)).to(torch.float32) / share,
        (below - zeros).to(torch.float32) / share,
        all_of_it - finite,
    ]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def _portions(
    leaves: Sequence[Tensor], sample: int, most: int
) -> Iterator[list[tuple[int, Tensor]]]:
    """The elements of the leaves, each in pieces with its place, about `most` of them at a time."""
    part: list[tuple[int, Tensor]] = []
    size = 0
    for index, leaf in enumerate(leaves):
        values = _elements(stored_values(dtensor.full_tensor(leaf)))
        values = values[::sample] if sample > 1 else values
        for piece in torch.split(values, most) if values.numel() > most else [values]:
            part.append((index, piece))
            size += piece.numel()
            if size >= most:
                yield part
                part, size = [], 0
    if part:
        yield part


def _elements(leaf: Tensor) -> Tensor:
    """In one row, in whichever order needs no copy."""
    if not traced():
        leaf = leaf.permute(sorted(range(leaf.ndim), key=leaf.stride, reverse=True))
    return leaf.reshape(-1)


def _in_rows(values: list[Tensor], lengths: list[int]) -> Tensor:
    """[sum(lengths), _ROW]: each in as many rows as it needs, the last filled up with 0."""
    pads = [length * _ROW - v.numel() for v, length in zip(values, lengths, strict=True)]
    if any(pads):
        rest = torch.split(values[0].new_zeros(sum(pads)), pads)
        values = [part for pair in zip(values, rest, strict=True) for part in pair]
    row = torch.cat(values) if len(values) > 1 else values[0]
    return row.reshape(-1, _ROW)
