"""A report on each gradient: largest magnitude, shares of zeros and subnormals, inf and NaN."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._reports.printing import Row, bars, leaf_names, read_rows, table
from .._torch import dtensor
from .._torch.autocast import outside_autocast
from .._torch.dtypes import real_dtype, wide_dtype
from .._tree import scalars
from .._tree.hints import document_fields
from .._tree.leaves import explicit_values
from .._tree.matching import flatten_gradients
from .._tree.pytree import Tree


@document_fields
class LeafReport(NamedTuple):
    """Four statistics of one gradient, as 0-d tensors.

    Attributes:
        amax: At least float32 []. The largest magnitude; NaN or inf if the gradient has any.
        zeros: float32 []. The share of elements that are 0.
        subnormal: float32 []. The share of elements that are subnormal in the dtype.
        nonfinite: int64 []. The number of inf and NaN.
    """

    amax: Tensor
    zeros: Tensor
    subnormal: Tensor
    nonfinite: Tensor


@document_fields
class GradReport(NamedTuple):
    """A `LeafReport` for each gradient. `print(report)` syncs and prints a table, the worst first;
    `report.plot()` makes a figure.

    Attributes:
        rows: A dict, from the dotted name of a gradient to its `LeafReport`.
    """

    rows: dict[str, LeafReport]

    def __str__(self) -> str:
        rows = read_rows(self.rows)
        bad = [name for name, *_, nonfinite in rows if nonfinite]
        lines = ["every gradient is finite"]
        if bad:
            lines = [
                f"{len(bad)} of {len(rows)} gradients are not finite. First: {bad[0]}; last, "
                f"nearest to the loss: {bad[-1]}"
            ]
        cells = [
            (name, f"{amax:.2e}", f"{zeros:.0%}", f"{subnormal:.0%}", f"{nonfinite:.0f}")
            for name, amax, zeros, subnormal, nonfinite in _worst_first(rows)
        ]
        header = ("leaf", "amax", "zeros", "subnormal", "not finite")
        return "\n".join(lines + table(header, cells))

    def plot(self) -> Any:
        """Syncs with the host. Draw a matplotlib Figure with bars for the columns of the table."""
        rows = _worst_first(read_rows(self.rows))
        return bars(rows, "largest magnitude", "zeros", "subnormal", "not finite", log=1)


def _worst_first(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (-row[4], -(row[2] + row[3])))


@outside_autocast()
def grad_report(grads: Tree, sample: int = 1, dtype: torch.dtype | None = None) -> GradReport:
    """Equal to, for each leaf `g`, `amax = g.abs().amax()`, `zeros = (g == 0).float().mean()`,
    `subnormal = ((g != 0) & (g.abs() < torch.finfo(g.dtype).tiny)).float().mean()` and
    `nonfinite = (~g.isfinite()).sum()`; with `dtype`, for `g.to(dtype)`.

    It shows which layer overflowed and which one underflows: a high share of zeros and subnormals
    under a low scale. For occasional use, not for every step.

    Give it the gradients of the scaled loss with `dtype=torch.float16` if a policy computes in
    float16. Autograd widens gradients of float32 parameters to float32, in which hardly any value
    is subnormal; the cast back is exact. Norms compute in float32: `apply.norm_params` names their
    weights.

    Args:
        grads: A pytree of floating or complex tensors. Sparse leaves count with their summed
            values, complex leaves with both parts; DTensors are gathered, and None has no row.
        sample: Use only every n-th element of a leaf.
        dtype: The dtype that decides what is 0, subnormal or inf; None for that of each leaf.

    Returns:
        A `GradReport` of tensors on the device of each leaf; only printing it reads values. Reports
        can be returned from `torch.vmap` and stacked; then the worst of each is printed.

    Raises:
        TypeError: A leaf is not a gradient, or `dtype` is not real and floating.
        ValueError: The tree has no tensors.

    Example:
        >>> import torch
        >>> weight = torch.tensor([2.0, 0.0, 1e-7, float("inf")], dtype=torch.float16)
        >>> print(grad_report({"head": {"weight": weight, "bias": torch.ones(2)}}))
        1 of 2 gradients are not finite. First: head.weight; last, nearest to the loss: head.weight
        leaf             amax  zeros  subnormal  not finite
        head.weight       inf    25%        25%           1
        head.bias    1.00e+00     0%         0%           0
        >>> widened = torch.tensor([1e-6, 1.0])  # 1e-6 is subnormal in float16
        >>> grad_report(widened, dtype=torch.float16).rows["grads"].subnormal
        tensor(0.5000)

    Source of the rule: requested in pytorch#67590 and #152279; DeepSpeed and apex do not name the
    leaf.
    """
    leaves = flatten_gradients(grads).leaves
    sample = scalars.checked_whole("sample", sample, least=1)
    if not (dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)):
        raise TypeError(
            f"dtype must be a floating torch.dtype or None, got {scalars.short_repr(dtype)}."
        )
    pairs = zip(leaf_names(grads, "grads"), leaves, strict=True)
    present = [(name, leaf) for name, leaf in pairs if leaf is not None]
    if not present:
        raise ValueError(
            "grads holds no tensor, so there is nothing to report. Fix: pass the gradients that "
            "`torch.func.grad(loss_fn)(params)` returns."
        )
    with torch.no_grad():
        return GradReport(
            {name: _row(leaf, dtype or real_dtype(leaf.dtype), sample) for name, leaf in present}
        )


_CHUNK = 2**19  # elements at a time, which stay in a cache


def _row(leaf: Tensor, dtype: torch.dtype, sample: int) -> LeafReport:
    """Return the statistics of one leaf, judged in `dtype`, summed over chunks."""
    values = explicit_values(dtensor.full_tensor(leaf)).reshape(-1)[::sample]
    amax = torch.zeros((), dtype=wide_dtype(dtype), device=values.device)
    counts = torch.zeros(3, dtype=torch.int64, device=values.device)
    for part in torch.split(values, _CHUNK) if values.numel() else ():
        magnitude = part.to(dtype).abs()
        subnormal = (magnitude > 0) & (magnitude < torch.finfo(dtype).tiny)
        tests = magnitude == 0, subnormal, ~(magnitude < torch.inf)
        amax = torch.maximum(amax, magnitude.amax().to(amax.dtype))
        counts = counts + torch.stack([test.sum() for test in tests])
    zeros, subnormal = counts[:2].to(torch.float32) / max(values.numel(), 1)
    amax = torch.where(amax.isnan(), torch.nan, amax)  # the same bits for every NaN
    return LeafReport(amax, zeros, subnormal, counts[2])
