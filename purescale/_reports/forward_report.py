"""A report on a forward pass: the range of each module's output, and the first inf or NaN."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _module

from .._reports.printing import MAX_LINES, bars, read, table
from .._torch import private
from .._torch.autocast import outside_autocast
from .._torch.dtensor import full_tensor
from .._torch.dtypes import wide_dtype, widest_float
from .._torch.tracing import innermost
from .._tree.hints import document_fields
from .._tree.leaves import explicit_values, unsupported_reason
from .._tree.pytree import Tree

WHOLE = "(model)"  # its dotted name in torch is "", which is easily overlooked
INPUTS = "(inputs)"  # `first` if the outermost module was already given inf or NaN


@document_fields
class ModuleReport(NamedTuple):
    """The range of the floating tensors that one call of a module returned, and the counts of inf
    and NaN in its output, arguments, parameters and buffers.

    Attributes:
        name: A str. The dotted name in the model; "(model)" for the whole model.
        kind: A str. The name of the class.
        amax: float64 []. The largest finite magnitude, or 0.
        smallest: float64 []. The smallest finite magnitude that is not 0, or 0.
        nonfinite: int64 []. The number of inf and NaN.
        nan: int64 []. How many of them are NaN.
        posinf: int64 []. How many of them are +inf; all others are -inf.
        masked: int64 []. How many are -inf in masks, tensors of only 0 and -inf.
        given: int64 []. The number of inf and NaN in the arguments, without masks.
        given_neginf: int64 []. How many of these are -inf.
        held: int64 []. The number of inf and NaN in the module's own parameters and buffers,
            without masks.
        size: An int. The number of values that it returned.
        inside: An int. How many of the rows before this one are calls that it made.
    """

    name: str
    kind: str
    amax: Tensor
    smallest: Tensor
    nonfinite: Tensor
    nan: Tensor
    posinf: Tensor
    masked: Tensor
    given: Tensor
    given_neginf: Tensor
    held: Tensor
    size: int
    inside: int


@document_fields
class ForwardReport(NamedTuple):
    """A `ModuleReport` for each call of a module, in the order in which they returned.
    `print(report)` and `report.first` sync; `report.plot()` makes a figure.

    Attributes:
        rows: A tuple of `ModuleReport`, one a call.
    """

    rows: tuple[ModuleReport, ...]

    @property
    def first(self) -> str | None:
        """Syncs with the host. The first module that returned inf or NaN and was given only finite
        values; `"(inputs)"` if the outermost module was given inf or NaN; None without a fault.
        """
        rows = _read_rows(self)
        first = _first(rows)
        return first if isinstance(first, str | None) else rows[first].name

    def __str__(self) -> str:
        rows = _read_rows(self)
        header = ("module", "kind", "amax", "smallest", "inf", "NaN", "inf or NaN given")
        lines = table(header, list(map(_cells, rows)), _start(rows))
        return "\n".join([_verdict(rows), *lines])

    def plot(self) -> Any:
        """Syncs with the host. Draw a matplotlib Figure with bars for the rows of the table."""
        rows = _read_rows(self)
        shown = [(r.name, r.amax, r.smallest, r.nonfinite) for r in rows[_start(rows) :]]
        return bars(shown, "largest magnitude", "smallest, not 0", "inf and NaN", log=2)


class _ReadReport(ModuleReport):
    """A `ModuleReport` with Python numbers in place of tensors."""

    @property
    def poisoned(self) -> bool:
        """Return True if it returned NaN or +inf, which masks do not hold."""
        return bool(self.nan + self.posinf > 0)

    @property
    def lowered(self) -> bool:
        """Return True if it returned -inf outside of masks."""
        return bool(self.nonfinite > self.nan + self.posinf + self.masked)


def _read_rows(report: ForwardReport) -> list[_ReadReport]:
    """Read all rows with one copy from the device. Syncs with the host."""
    numbers = iter(read([fact for row in report.rows for fact in row if isinstance(fact, Tensor)]))
    return [
        _ReadReport._make(next(numbers) if isinstance(fact, Tensor) else fact for fact in row)
        for row in report.rows
    ]


# ---- the first -----------------------------------------------------------------------------------


def _first(rows: list[_ReadReport]) -> int | str | None:
    """Return the index of the call in which inf or NaN arose first, or `INPUTS`, or None.

    This call was given finite values and returned others. Nested calls come before the call that
    makes them, so it is the innermost. -inf alone may be intended, as in attention: it counts if
    it leads to NaN or +inf, or if the outermost module returns it.
    """
    lowered: int | None = None  # the call in which the current -inf arose
    turned: int | None = None  # the first call that made NaN or +inf from -inf alone
    for index, row in enumerate(rows):
        if row.poisoned and row.given == row.given_neginf:  # no NaN or +inf among its arguments
            if lowered is not None and (row.given or lowered >= index - row.inside):
                return lowered
            if not row.given:
                return index
            turned = index if turned is None else turned
        elif row.lowered and not row.given and lowered is None:
            lowered = index
        elif row.given_neginf and not row.nonfinite:
            lowered = None
    if any(row.poisoned for row in rows):
        return INPUTS if turned is None else turned
    return lowered if any(rows[index].lowered for index in _outermost(rows)) else None


def _outermost(rows: list[_ReadReport]) -> Iterator[int]:
    """Yield the calls that are not nested in another, the last first."""
    index = len(rows) - 1
    while index >= 0:
        yield index
        index -= rows[index].inside + 1


def _start(rows: list[_ReadReport]) -> int:
    """Return the first row of the table, in whose middle is the fault, or the largest magnitude."""
    first, bad = _first(rows), [index for index, row in enumerate(rows) if row.nonfinite]
    largest = max(range(len(rows)), key=lambda index: float(rows[index].amax))
    middle = first if isinstance(first, int) else bad[0] if bad else largest
    return max(0, min(middle - MAX_LINES // 2, len(rows) - MAX_LINES))


def _verdict(rows: list[_ReadReport]) -> str:
    first, bad = _first(rows), sum(row.nonfinite > 0 for row in rows)
    if not bad:
        return "everything that a module returned is finite"
    verdict = f"{bad} of {len(rows)} calls returned something not finite"
    if first is None:
        return f"{verdict}: -inf, as in a mask, which did not lead to NaN"
    if isinstance(first, str):
        return f"{verdict}; the outermost module was given inf or NaN. First: {first}"
    if rows[first].held:
        verdict += "; the first has inf or NaN in its own parameters or buffers"
    return f"{verdict}. First: {rows[first].name}"


def _cells(row: _ReadReport) -> list[str]:
    """Return the columns of the printed table."""
    magnitudes = ["-", "-"]
    if not row.nonfinite == row.size > 0:
        magnitudes = [f"{row.amax:.2e}", f"{row.smallest:.2e}"]
    counts = (row.nonfinite - row.nan, row.nan, row.given)
    return [row.name, row.kind, *magnitudes, *(f"{count:.0f}" for count in counts)]


# ---- the forward ---------------------------------------------------------------------------------


@outside_autocast("apply")
def forward_report(
    apply: Callable[..., Any], params: Tree, buffers: Tree, *args: Any, **kwargs: Any
) -> ForwardReport:
    """Equal to, for each module of `apply(params, buffers, *args, **kwargs)` and the `out` that it
    returns, `amax = finite.abs().amax()`, `smallest = finite[finite != 0].abs().amin()` and
    `nonfinite = (~out.isfinite()).sum()`, with `finite = out[out.isfinite()]`.

    It names the module in which a forward overflows. For occasional use, since it measures every
    activation. It syncs only when printed, drawn, or asked for `.first`.

    - `.first` is the module in which inf or NaN arose: the first to return some although its
      arguments were finite. A value computed between two modules counts for the module around them.
      `"(inputs)"` means that the outermost module was given inf or NaN, after the casts of a
      policy. -inf alone may be intended, as in a mask: it is a fault if it leads to NaN or +inf, or
      if the model returns it.
    - The printed table counts inf and NaN separately, and those among a module's arguments.
      `row.held` counts those in its own parameters and buffers.
    - Rows are in the order in which modules return, so a part comes before the module around it. A
      module that is called twice has two rows. A module made in a forward is named by its class,
      after the module that makes it.
    - An output counts with all its floating and complex tensors, in any container that torch's
      pytree knows. Complex tensors count as two real ones, and DTensors are gathered. A module that
      returns no such tensor has no row.
    - Compiled functions run eagerly here. Under `torch.vmap` inside of `apply` a row is about all
      members.

    Args:
        apply: A function of `make_functional` or `with_policy`, or any function that calls modules.
            Under a policy, values are those in the dtype that a module returned.
        params: The parameters. Neither they nor the other arguments are changed.
        buffers: The buffers.
        args: Further positional arguments of `apply`.
        kwargs: Keyword arguments of `apply`.

    Returns:
        A `ForwardReport`. The results of the call are dropped.

    Raises:
        ValueError: No module returns a floating tensor.

    Example:
        >>> import torch
        >>> from purescale import make_functional, with_policy
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1))
        >>> apply, params, buffers = make_functional(net)
        >>> apply = with_policy(apply, "params=float32,compute=float16")
        >>> params["0.bias"] += 30000.0
        >>> params = {**params, "2.weight": torch.full((1, 2), 2.0)}
        >>> forward_report(apply, params, buffers, torch.ones(1, 2)).first
        '2'

    Source of the rule: requested in transformers#11274 and TransformerEngine#1441;
    `DebugUnderflowOverflow` of transformers puts hooks into the model.
    """
    rows: list[ModuleReport] = []
    names: dict[nn.Module, str] = {}  # "" is the whole model
    running: list[_OpenCall] = []
    thread = threading.get_ident()

    def entered(module: nn.Module, args: Any) -> None:
        if threading.get_ident() != thread:
            return
        if module not in names:
            path = [names[running[-1].module], type(module).__name__] if running else []
            for name, part in module.named_modules():
                names.setdefault(part, ".".join(filter(None, [*path, name])))
        registered = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        # Measured before the forward, which may write into them.
        running.append(_OpenCall(module, len(rows), _measured(args), _measured(registered)))

    def returned(module: nn.Module, args: Any, *kwargs_and_out: Any) -> None:
        if threading.get_ident() != thread:
            return
        call = running.pop()
        *kwargs, out = kwargs_and_out  # torch omits kwargs if the forward raised
        if facts := _measured(out):
            call.arguments.extend(_measured(kwargs))  # only this hook receives them
            rows.append(_module_report(names[module] or WHOLE, call, facts, len(rows)))

    hooks = [
        _module.register_module_forward_pre_hook(entered),
        _module.register_module_forward_hook(returned, with_kwargs=True, always_call=True),
    ]
    try:
        with torch.compiler.set_stance("force_eager"):
            apply(params, buffers, *args, **kwargs)
    finally:
        for hook in hooks:
            private.remove_global_hook(hook)
    if not rows:
        raise ValueError(
            "no module returned a floating tensor, so there is nothing to report. Fix: `apply, "
            "params, buffers = make_functional(model)`."
        )
    return ForwardReport(tuple(rows))


class _Facts(NamedTuple):
    """Statistics of one tensor."""

    amax: Tensor
    smallest: Tensor  # not 0; inf if there is none
    counts: Tensor  # int64 [4]: of inf and NaN, of NaN, of +inf, of -inf in masks
    size: int


class _OpenCall(NamedTuple):
    """A call of a module that has not returned yet."""

    module: nn.Module
    start: int  # the number of rows before it
    arguments: list[_Facts]
    registered: list[_Facts]  # of its own parameters and buffers


def _module_report(name: str, call: _OpenCall, out: list[_Facts], rows: int) -> ModuleReport:
    """Combine the statistics of a call, on the device of the first tensor that it returned."""
    amaxes, smallest, counts = (
        torch.stack([fact.to(facts[0].device, facts[0].dtype) for fact in facts])
        for facts in zip(*(part[:3] for part in out), strict=True)
    )
    amax = amaxes.amax()
    nonfinite, nan, posinf, masked = counts.sum(0).unbind()
    none = torch.zeros_like(counts[0])
    in_arguments, in_own = (
        torch.stack([none, *(part.counts.to(none.device) for part in parts)]).sum(0)
        for parts in (call.arguments, call.registered)
    )
    return ModuleReport(
        name=name,
        kind=type(call.module).__name__,
        amax=amax,
        smallest=torch.where(amax > 0, smallest.amin(), 0),
        nonfinite=nonfinite,
        nan=nan,
        posinf=posinf,
        masked=masked,
        given=in_arguments[0] - in_arguments[3],
        given_neginf=in_arguments[0] - in_arguments[1:].sum(),
        held=in_own[0] - in_own[3],
        size=sum(part.size for part in out),
        inside=rows - call.start,
    )


@torch.no_grad()
def _measured(tree: Any) -> list[_Facts]:
    """Return the statistics of each floating tensor of `tree`."""
    parts = []
    for leaf in private.pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            leaf = innermost(leaf.detach())
            if not unsupported_reason(leaf, sparse=True):
                parts.append(_facts(explicit_values(full_tensor(leaf))))
    return parts


def _facts(values: Tensor) -> _Facts:
    """Return the statistics of one dense, real tensor."""
    wide, size = widest_float(values.device), values.numel()
    if not size:
        values = values.new_zeros(1)
    magnitude = values.to(wide_dtype(values.dtype)).abs()
    finite = magnitude < torch.inf
    amax = torch.where(finite, magnitude, 0).amax()
    smallest = torch.where(finite & (magnitude > 0), magnitude, torch.inf).amin()
    nonfinite, nan, posinf = (each.sum() for each in (~finite, values.isnan(), values == torch.inf))
    is_mask = (amax == 0) & finite.any() & (nan + posinf == 0)
    counts = torch.stack([nonfinite, nan, posinf, torch.where(is_mask, nonfinite, 0)])
    return _Facts(amax.to(wide), smallest.to(wide), counts, size)
