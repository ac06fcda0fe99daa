"""A report on a forward: how large what each module returned is, and which was first not finite."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _module

from .._reports.printing import MAX_LINES, pyplot, read, table
from .._torch import private
from .._torch.autocast import outside_autocast
from .._torch.dtensor import full_tensor
from .._torch.dtypes import wide_dtype, widest_float
from .._torch.tracing import innermost
from .._tree.leaves import stored_values, unsupported_reason
from .._tree.tree import Tree

WHOLE = "(model)"  # its dotted name in torch is "", which is easily overlooked


class ModuleReport(NamedTuple):
    """What one call of a module returned, over all its floating tensors."""

    name: str  # dotted, as in the model; "(model)" for all of it
    kind: str  # the name of its class
    amax: Tensor  # float64 []: the largest finite magnitude; 0 where there is none
    smallest: Tensor  # float64 []: the smallest finite magnitude that is not 0; 0 where none is
    nonfinite: Tensor  # int64 []: the number of inf and NaN


class ForwardReport(NamedTuple):
    """A `ModuleReport` for each call of a module, in the order in which they returned.
    `print(report)` and `report.first` sync; `report.plot()` makes a figure.
    """

    rows: tuple[ModuleReport, ...]

    @property
    def first(self) -> str | None:
        """Syncs with the host. The first module that returned something not finite; None if none
        did.
        """
        return next((name for name, *_, nonfinite in _read(self) if nonfinite), None)

    def __str__(self) -> str:
        rows = _read(self)
        bad = [index for index, row in enumerate(rows) if row[4]]
        lines = ["everything that a module returned is finite"]
        if bad:
            lines = [
                f"{len(bad)} of {len(rows)} calls returned something not finite. "
                f"First: {rows[bad[0]][0]}"
            ]
        largest = max(range(len(rows)), key=lambda index: rows[index][2])
        middle = bad[0] if bad else largest
        start = max(0, min(middle - MAX_LINES // 2, len(rows) - MAX_LINES))
        cells = [
            (name, kind, f"{amax:.2e}", f"{smallest:.2e}", f"{nonfinite:.0f}")
            for name, kind, amax, smallest, nonfinite in rows
        ]
        header = ("module", "kind", "amax", "smallest", "not finite")
        return "\n".join(lines + table(header, cells, start))

    def plot(self) -> Any:
        """Syncs with the host. A matplotlib Figure: largest and smallest magnitude, module by
        module, with those that are not finite marked.
        """
        return _plot(_read(self))


_Row = tuple[str, str, float, float, float]


def _read(report: ForwardReport) -> list[_Row]:
    """Syncs with the host: three copies for any number of rows."""
    names, kinds, *columns = zip(*report.rows, strict=True)
    return list(zip(names, kinds, *map(read, columns), strict=True))


@outside_autocast("apply")
def forward_report(
    apply: Callable[..., Any], params: Tree, buffers: Tree, *args: Any, **kwargs: Any
) -> ForwardReport:
    """Equal to, for each module of `apply(params, buffers, *args, **kwargs)` and the `out` that it
    returns, `amax = finite.abs().amax()`, `smallest = finite[finite != 0].abs().amin()` and
    `nonfinite = (~out.isfinite()).sum()`, with `finite = out[out.isfinite()]`.

    It names the module in which a forward overflows, which a loss of inf does not. A row is made
    when a module returns, so a part stands before what contains it, and the first row that is not
    finite is the innermost cause. A module that is called twice has two rows; one that a forward
    makes goes by its class, after the name of the module that makes it.

    - `apply`, `params`, `buffers`, `args`, `kwargs`: a call of what `make_functional` or
      `with_policy` returns, or of any function that calls modules; under a policy values are those
      in the dtype in which a module returned them. None of them is changed, nothing stays behind
      in a module, and the results of the call are dropped. Random numbers are drawn as in any call.
      What `torch.compile` has compiled runs eagerly here. Under `torch.vmap` inside of `apply` a
      row is about all members.
    - Of an `out` in any container that torch's pytree knows all floating and complex tensors count,
      of complex ones both parts; a DTensor is gathered. What returns none has no row.

    Reads no value until it is printed, drawn, or asked for `.first`; for occasional use, since it
    reads every activation.

    Raises `ValueError` if no module returns a floating tensor, and what `apply` raises.

    >>> import torch
    >>> from purescale import make_functional, with_policy
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1))
    >>> apply, params, buffers = make_functional(net)
    >>> apply = with_policy(apply, "params=float32,compute=float16")
    >>> params["0.bias"] += 30000.0
    >>> params = {**params, "2.weight": torch.full((1, 2), 2.0)}
    >>> forward_report(apply, params, buffers, torch.ones(1, 2)).first
    '2'

    Source of the rule: none. Requested in transformers#11274 and TransformerEngine#1441;
    `DebugUnderflowOverflow` of transformers puts hooks into the model.
    """
    rows: list[ModuleReport] = []
    names: dict[int, str] = {}  # "" is all of it
    roots: list[nn.Module] = []  # held, so that no other module gets the id of one of theirs
    running: list[nn.Module] = []
    thread = threading.get_ident()

    def entered(module: nn.Module, inputs: Any) -> None:
        if threading.get_ident() != thread:
            return
        if id(module) not in names:
            roots.append(module)
            path = [names[id(running[-1])], type(module).__name__] if running else []
            for name, part in module.named_modules():
                names.setdefault(id(part), ".".join(filter(None, [*path, name])))
        running.append(module)

    def returned(module: nn.Module, inputs: Any, out: Any) -> None:
        if threading.get_ident() != thread:
            return
        running.pop()
        if (found := _measured(out)) is not None:
            rows.append(ModuleReport(names[id(module)] or WHOLE, type(module).__name__, *found))

    hooks = [
        _module.register_module_forward_pre_hook(entered),
        _module.register_module_forward_hook(returned, always_call=True),
    ]
    try:
        with torch.compiler.set_stance("force_eager"):
            apply(params, buffers, *args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    if not rows:
        raise ValueError(
            "no module returned a floating tensor, so there is nothing to report. Likely cause: "
            "`apply` is a function that calls no module. Fix: `apply, params, buffers = "
            "make_functional(model)`."
        )
    return ForwardReport(tuple(rows))


def _measured(out: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    """`amax`, `smallest` and `nonfinite` over the floating tensors of `out`; None without any."""
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    with torch.no_grad():
        for leaf in private.pytree.tree_leaves(out):
            if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
                continue
            leaf = innermost(leaf.detach())
            if not unsupported_reason(leaf, sparse=True):
                found.append(_facts(stored_values(full_tensor(leaf))))
        if len(found) < 2:
            return found[0] if found else None
        amax, smallest, nonfinite = (torch.stack(each) for each in zip(*found, strict=True))
        some = torch.where(smallest > 0, smallest, torch.inf).amin()
        return amax.amax(), torch.where(amax.amax() > 0, some, 0), nonfinite.sum()


def _facts(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    wide = widest_float(values.device)
    if not values.numel():
        zero = torch.zeros((), dtype=wide, device=values.device)
        return zero, zero, zero.to(torch.int64)
    magnitude = values.to(wide_dtype(values.dtype)).abs()
    finite = magnitude < torch.inf
    amax = torch.where(finite, magnitude, 0).amax()
    smallest = torch.where(finite & (magnitude > 0), magnitude, torch.inf).amin()
    smallest = torch.where(amax > 0, smallest, 0)
    return amax.to(wide), smallest.to(wide), (~finite).sum()


def _plot(rows: list[_Row]) -> Any:
    plt = pyplot("report.plot()")
    figure, panel = plt.subplots(figsize=(8, 4.5), layout="constrained")
    places = range(len(rows))
    for label, column, colour in (("largest", 2, "#0072B2"), ("smallest, not 0", 3, "#E69F00")):
        values = [row[column] or float("nan") for row in rows]
        panel.plot(places, values, marker=".", color=colour, label=label)
    for place in places:
        if rows[place][4]:
            panel.axvline(place, color="#D55E00", linestyle=":", linewidth=1)
    every = -(-len(rows) // MAX_LINES)
    panel.set_xticks(places[::every], [row[0] for row in rows[::every]], rotation=90)
    panel.set_yscale("log", base=2)
    panel.set_ylabel("magnitude of what it returned")
    panel.set_xlabel("module, in the order of the forward (dotted: not finite)")
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend()
    return figure
