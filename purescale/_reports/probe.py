"""A probe of one batch at many loss scales: overflows, and gradients that underflow."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._loss_scale.rules import NoScale
from .._loss_scale.scaling import unscale_and_check
from .._optim.param_structure import ParamStructure
from .._reports.printing import MAX_LINES, table
from .._step.backward import independent_loss_error
from .._step.forward_backward import ForwardBackward, LossFn
from .._torch.autocast import outside_autocast
from .._torch.dtypes import widest_float
from .._torch.tracing import current_context
from .._tree import pytree, scalars
from .._tree.hints import document_fields
from .._tree.leaves import dense, explicit_values
from .._tree.matching import check_parameters, device_of
from .._tree.pytree import FlatTree, Leaves, Tree


@document_fields
class ScaleProbe(NamedTuple):
    """The result of `probe_scales`. Names are dotted; `print(probe)` prints a table, `probe.plot()`
    makes a figure.

    Attributes:
        exponents: int64 [E], rising. The scales were `2**exponents`.
        overflow: bool [E]. True where a step at this scale would be skipped.
        zeros: A dict, from a leaf to float32 [E]: the share of its gradient that is 0.
        error: A dict, from a leaf to float32 [E]: the relative error of its unscaled gradient
            against that at `2**high`; inf at a scale that overflows.
        low: A dict, from a leaf to an int: the exponent from which on its error is within `tol`, or
            None.
        high: An int. The largest exponent that does not overflow; None if all do.
    """

    exponents: Tensor
    overflow: Tensor
    zeros: dict[str, Tensor]
    error: dict[str, Tensor]
    low: dict[str, int | None]
    high: int | None

    @property
    def window(self) -> tuple[int, int] | None:
        """The first and last exponent that is safe for every leaf that is not `silent`, or
        `None`.
        """
        lows = [low for low in self.low.values() if low is not None]
        return None if self.high is None or self.starved or not lows else (max(lows), self.high)

    @property
    def starved(self) -> list[str]:
        """The leaves without a safe scale: their gradients still change at the largest scale that
        fits.
        """
        return [name for name, zeros in self._without_low() if zeros < 1]

    @property
    def silent(self) -> list[str]:
        """The leaves whose gradient is 0 at every scale that fits: unused, behind a weight of 0, or
        too small for all of them.
        """
        return [name for name, zeros in self._without_low() if zeros == 1]

    def _without_low(self) -> list[tuple[str, float]]:
        """Return each leaf without `low`, and the share of zeros at the largest scale that fits."""
        if self.high is None:
            return []
        top = self.exponents.tolist().index(self.high)
        return [(n, float(self.zeros[n][top])) for n, low in self.low.items() if low is None]

    def __str__(self) -> str:
        parts = [self._verdict(), self._by_scale()]
        if self.high is not None:
            parts.append(table(("leaf", "safe from"), self._worst_first()))
        return "\n\n".join(map("\n".join, parts))

    def _verdict(self) -> list[str]:
        if self.high is None:
            lines = [
                "No scale fits: all overflow. Look at the loss and the data, or at lower exponents."
            ]
        elif self.starved:
            lines = [
                f"No safe scale for {len(self.starved)} of {len(self.low)} leaves: "
                f"{pytree.join_names(self.starved, 20)}. The largest that fits is 2**{self.high}."
            ]
        else:
            window = self.window
            safe = "none" if window is None else f"2**{window[0]} to 2**{window[1]}"
            lines = [f"Safe for every leaf: {safe}."]
        if self.silent:
            lines.append(
                "Nothing but zeros at every scale (unused, behind a weight of 0, or too small): "
                f"{pytree.join_names(self.silent, 20)}."
            )
        return lines

    def _by_scale(self) -> list[str]:
        exponents, overflow = self.exponents.tolist(), self.overflow.tolist()
        errors = {name: error.tolist() for name, error in self.error.items()}
        zeros = [share.tolist() for share in self.zeros.values()]
        cells = []
        for index, (exponent, bad) in enumerate(zip(exponents, overflow, strict=True)):
            if bad:
                cells.append((f"2**{exponent}", "overflow", "", "", ""))
                continue
            starving = sum(exponent < low for low in self.low.values() if low is not None)
            starving += len(self.starved)
            error, worst = max((row[index], name) for name, row in errors.items())
            most = max(row[index] for row in zeros)
            cells.append((f"2**{exponent}", f"{starving}", f"{error:.1e}", f"{most:.0%}", worst))
        header = ("scale", "leaves that starve", "largest error", "most zeros", "where")
        return table(header, cells)

    def _worst_first(self) -> list[tuple[str, str]]:
        """Return each leaf and from which scale on it is safe."""
        safe = {name: low for name, low in self.low.items() if low is not None}
        return [
            *((name, "no scale") for name in self.starved),
            *((name, "all zeros") for name in self.silent),
            *((name, f"2**{safe[name]}") for name in sorted(safe, key=lambda name: -safe[name])),
        ]

    def plot(self) -> Any:
        """Draw a matplotlib Figure of zeros and error over the exponents: a line for each of the
        first 30 leaves of the printed table, dashed without a safe scale, and the safe window
        shaded.
        """
        import matplotlib.pyplot as plt  # only when a figure is drawn

        names = list(dict(self._worst_first())) or list(self.zeros)
        figure, panels = plt.subplots(2, 1, sharex=True, figsize=(8, 8), layout="constrained")
        for panel, columns in zip(panels, (self.zeros, self.error), strict=True):
            if self.window is not None:
                panel.axvspan(*self.window, color="0.85", label="safe for every leaf")
            for index, name in enumerate(names[:MAX_LINES]):
                values = columns[name].double().where(~self.overflow, math.nan).tolist()
                (line,) = panel.plot(self.exponents.tolist(), values, label=name)
                line.set(color=f"C{index % 10}", marker=".^s"[index // 10], markersize=4)
                line.set_linestyle("--" if name in self.starved else "-")
        panels[0].set_ylabel("share of zeros")
        panels[1].set_ylabel(f"error relative to scale 2**{self.high}")
        panels[1].set_yscale("symlog", linthresh=1e-6)
        panels[1].set_xlabel("loss scale, as a power of two (without a line: overflows)")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        return figure


@outside_autocast("loss_fn")
def probe_scales(
    loss_fn: LossFn,
    params: Tree,
    buffers: Tree,
    microbatch: Any,
    exponents: Iterable[int] = range(-8, 25, 2),
    tol: float = 1e-2,
    chunk_size: int | None = None,
) -> ScaleProbe:
    """Syncs with the host. Equal to `unscale_and_check` of the gradients of `loss_fn` scaled by
    `2.0**e`, for each of `exponents`; from one forward and one vmapped backward.

    A scale that is too low sets no flag: small gradients of some leaf become 0. The probe names
    that leaf and the lowest scale that is safe for it.

    The reference is the gradient at the largest scale that fits. From exponent `low[name]` on, the
    relative error of a leaf is within `tol`. A leaf that is within `tol` only at the largest scale
    has no safe scale: `low[name]` is None, and `probe.starved` names it. A gradient that is 0 at
    every scale may be right or wrong: `low[name]` is None, `probe.silent` names it, and
    `probe.window` leaves it out.

    Args:
        loss_fn: As for `train_step`, under any policy. New buffers are dropped.
        params: The parameters. They are not changed.
        buffers: The buffers. They are not changed.
        microbatch: One microbatch. All scales share one forward, and so its random numbers.
        exponents: Whole numbers from -149 to 127, returned sorted and without duplicates.
        tol: The largest relative error of a safe gradient.
        chunk_size: The number of scales at once, which takes the memory of twice as many gradients
            and one more; None for all. 1 does not use vmap, for operators without support for it.

    Returns:
        A `ScaleProbe`.

    Raises:
        TypeError: An exponent is not a whole number.
        ValueError: `exponents` is empty or beyond float32, or the loss does not depend on `params`.

    Example:
        >>> import torch
        >>> def loss_fn(params, buffers, x):  # a gradient of 2**-20 of the scale, in float16
        ...     return ((params["w"].half() * x).float() * 2.0**-20).sum(), buffers
        >>> x = torch.ones(3, dtype=torch.float16)
        >>> probe = probe_scales(loss_fn, {"w": torch.ones(3)}, {}, x, exponents=[-8, 0, 8, 32, 40])
        >>> probe.low, probe.high, probe.window
        ({'w': 0}, 32, (0, 32))

    Source of the rule: users of torch and Megatron-LM compare scales in this way by hand.
    """
    chosen = _exponents(exponents)
    tol = scalars.checked_positive("tol", tol)
    chunk = (
        len(chosen)
        if chunk_size is None
        else scalars.checked_whole("chunk_size", chunk_size, least=1)
    )
    flat = FlatTree.of(params)
    check_parameters(flat)
    device = device_of(*flat[:2], "params")
    one = NoScale().init(device)
    forward_backward = ForwardBackward(
        flat,
        ParamStructure.of(flat),
        FlatTree.of(buffers),
        one.scale,
        loss_fn,
        current_context(),
    )
    if not forward_backward.present_params:
        raise ValueError(
            "params holds no tensor. Fix: `apply, params, buffers = make_functional(model)`."
        )
    inputs, outputs = forward_backward.run_forward(forward_backward.flat_buffers.leaves, microbatch)
    best: Leaves | None = None  # the gradients at the largest scale that fits
    high: int | None = None
    columns: list[tuple[Tensor, Tensor, Tensor]] = []  # overflow, zeros and error of a part
    for start in range(0, len(chosen), chunk):  # the largest first, which is the reference
        part = chosen[start : start + chunk]
        scales = torch.tensor([2.0**e for e in part], dtype=torch.float32, device=device)
        grads, overflow = torch.vmap(lambda s, g: unscale_and_check(one._replace(scale=s), g))(
            scales, _gradients_at_scales(outputs.loss, inputs, scales)
        )
        flags = overflow.tolist()
        if best is None and not all(flags):
            first = flags.index(False)
            high, best = part[first], [grad[first].clone() for grad in grads]
        reference = best or [grad[0] for grad in grads]  # of no importance: all overflow
        columns.append((overflow, *_zeros_and_errors(grads, overflow, reference)))
        del grads
    overflow, zeros, error = (torch.cat(parts, -1).flip(-1) for parts in zip(*columns, strict=True))
    chosen.reverse()
    names = forward_backward.param_structure.names
    return ScaleProbe(
        exponents=torch.tensor(chosen, device=device),
        overflow=overflow,
        zeros=dict(zip(names, zeros, strict=True)),
        error=dict(zip(names, error, strict=True)),
        low=dict(zip(names, _lows(chosen, zeros, error, high, tol), strict=True)),
        high=high,
    )


def _exponents(exponents: Iterable[int]) -> list[int]:
    """Check the exponents and sort them, the largest first."""
    chosen = {
        scalars.checked_whole("each of exponents", each, least=-149, most=127) for each in exponents
    }
    if not chosen:
        raise ValueError(
            "exponents is empty, so there is no scale to probe. Fix: `range(-8, 25, 2)`."
        )
    return sorted(chosen, reverse=True)


def _gradients_at_scales(loss: Tensor, inputs: Leaves, scales: Tensor) -> Leaves:
    """Return the gradients of `loss` times each scale, [C, ...], from one vmapped backward."""
    differentiate = functools.partial(
        torch.autograd.grad, loss, inputs, retain_graph=True, allow_unused=True
    )
    seeds = scales.to(loss.dtype)
    if len(scales) == 1:
        # torch.vmap does not support sparse gradients; `dense` sums their duplicates in float32.
        sparse_or_dense = differentiate(seeds[0])
        grads = [None if grad is None else dense(grad)[None] for grad in sparse_or_dense]
    else:
        try:
            grads = list(differentiate(seeds, is_grads_batched=True))
        except RuntimeError as error:
            raise RuntimeError(
                f"the backward of the loss failed under torch.vmap over {len(scales)} scales (see "
                "above). Likely cause: an operator without vmap, or memory ran out. Fix: "
                "probe_scales(..., chunk_size=1)."
            ) from error
    if all([grad is None for grad in grads]):
        raise independent_loss_error()
    return [
        leaf.detach().new_zeros(()).expand(len(scales), *leaf.shape) if grad is None else grad
        for leaf, grad in zip(inputs, grads, strict=True)
    ]


def _zeros_and_errors(grads: Leaves, overflow: Tensor, reference: Leaves) -> tuple[Tensor, Tensor]:
    """Return the shares of zeros and the errors against `reference`, [leaves, C] each."""
    zeros, errors = [], []
    wide = widest_float(overflow.device)  # squares of gradients underflow in float32
    for grad, best in zip(grads, reference, strict=True):
        values, ideal = (
            explicit_values(x).reshape(n, -1) for x, n in ((grad, len(grad)), (best, 1))
        )
        share = (values == 0).sum(1).to(torch.float32) / max(values.shape[1], 1)
        distance, size = (
            torch.linalg.vector_norm(rows, dim=1, dtype=wide) for rows in (values - ideal, ideal)
        )
        # A leaf that is 0 in both has an error of 0, not NaN.
        error = torch.where(distance == 0, 0, distance / size).to(share.dtype)
        zeros.append(share)
        errors.append(torch.where(overflow, math.inf, error))
    return torch.stack(zeros), torch.stack(errors)


def _lows(
    exponents: list[int], zeros: Tensor, error: Tensor, high: int | None, tol: float
) -> list[int | None]:
    """Return for each leaf the exponent from which on all errors up to `high` are within `tol`."""
    if high is None:
        return [None] * len(error)
    top = exponents.index(high)
    lows: list[int | None] = []
    for errors, zeros_at_top in zip(error.tolist(), zeros[:, top].tolist(), strict=True):
        low = top
        while low and errors[low - 1] <= tol:
            low -= 1
        # At the largest scale the error is 0, as the gradient is compared with itself; safe is what
        # a lower one agrees with.
        lows.append(None if zeros_at_top == 1 or low == top else exponents[low])
    return lows
