"""A step by torch's fused kernels over whole columns: what is static about it, and the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _columns
from ._kernels import Batch, Kernel, Treatment, folded, update

Slots = dict[str, dict[str, Tensor]]


class Launch(NamedTuple):
    """The parameters of one launch, as places in the columns of a step."""

    settings: dict[str, Any]  # of their group; "lr" is the place of its rate
    gradients: list[int]
    unlike: list[int]  # which of the gradients are laid out otherwise than their parameter
    steps: list[int]
    targets: list[list[int]]  # the parameters, then a column for each slot that the kernel names
    in_place: bool  # all of these stand where they may be written into


class Facts(NamedTuple):
    """What is static about a step over columns: parameters, then all slots, then gradients."""

    launches: list[Launch]
    own: list[bool]  # parameters and slots that may be written into
    in_place: bool  # all of them
    on_graphs: bool  # some of them require a gradient
    spendable: bool  # the gradients may be written into, as far as their kind goes


def facts(
    kernel: Kernel,
    groups: list[tuple[list[str], dict[str, Any]]],
    weights: dict[str, Tensor],
    slots: Slots,
    gradients: dict[str, Tensor],
    mine: list[bool],
    missing: Callable[[str], Exception],
) -> Facts:
    """The facts of a step. `mine`: which of the columns may be written into; `missing(slot)` is
    raised where one is not there.
    """
    places: dict[tuple[str, str], int] = {(name, ""): place for place, name in enumerate(weights)}
    for name, slot in slots.items():
        for key in slot:
            places[name, key] = len(places)
    given = {name: len(places) + index for index, name in enumerate(gradients)}
    own = mine[: len(places)]
    launches = []
    for names, settings in groups:
        keys = kernel.slots(settings)
        present = [name for name in names if name in given]
        for name in present:
            for key in keys:
                if key not in slots[name]:
                    raise missing(key)
        for device, dtype in dict.fromkeys(
            (weights[name].device, weights[name].dtype) for name in present
        ):
            alike = [
                name
                for name in present
                if weights[name].device == device and weights[name].dtype is dtype
            ]
            targets = [[places[name, key] for name in alike] for key in ("", *keys)]
            steps = [places[name, "step"] for name in alike if "step" in slots[name]]
            in_place = all(own[place] for column in (steps, *targets) for place in column) and all(
                _alike(slots[name][key], weights[name]) for name in alike for key in keys
            )
            unlike = [
                index
                for index, name in enumerate(alike)
                if not _alike(gradients[name], weights[name])
            ]
            launches.append(
                Launch(settings, [given[name] for name in alike], unlike, steps, targets, in_place)
            )
    in_place = all(own) and all(launch.in_place for launch in launches)
    on_graphs = any(weight.requires_grad for weight in weights.values())
    return Facts(launches, own, in_place, on_graphs, all(mine[len(places) :]))


def run(
    kernel: Kernel,
    facts: Facts,
    columns: Sequence[Tensor],
    rates: Sequence[Any],
    found_inf: Tensor | None,
    treatment: Treatment,
    *,
    spent: bool,
) -> list[Tensor]:
    """Parameters and slots after the step over gradients that are still to be treated, where not
    `found_inf`.
    """
    if not torch.compiler.is_compiling():  # else when the graph runs
        treatment = folded(treatment)
    own = facts.own
    results: list[Any] = list(columns[: len(own)])
    with torch.no_grad():
        if not facts.in_place:
            for place, mine in enumerate(own):
                if not mine:
                    results[place] = None
        for launch in facts.launches:
            old = [] if launch.in_place else _make_room(launch, columns, results)
            grads = [columns[place] for place in launch.gradients]
            for index in launch.unlike:
                # torch's fused kernels walk all of a parameter's tensors by one pointer.
                like = results[launch.targets[0][index]]
                grads[index] = torch.empty_like(like, dtype=grads[index].dtype).copy_(
                    grads[index].detach()
                )
            targets = [[results[place] for place in column] for column in launch.targets]
            batch = Batch(grads, [results[place] for place in launch.steps], targets, old)
            settings = {**launch.settings, "lr": rates[launch.settings["lr"]]}
            update(kernel, settings, batch, found_inf, treatment, spent=spent)
    if facts.in_place and not facts.on_graphs:
        return results
    return [
        column.detach().clone()
        if result is None
        else result.detach()
        if result.requires_grad
        else result
        for result, column in zip(results, columns, strict=False)
    ]


def _make_room(
    launch: Launch, columns: Sequence[Tensor], results: list[Any]
) -> list[list[Tensor | None]]:
    """Memory for what may not be written where it stands; what each target that holds nothing yet
    shall hold.
    """
    missing = [place for place in launch.steps if results[place] is None]
    for place, copy in zip(
        missing, _columns.clone([columns[place] for place in missing]), strict=True
    ):
        results[place] = copy
    every: list[list[Tensor | None]] = []
    weights = launch.targets[0]
    for column in launch.targets:
        if not torch.compiler.is_compiling() and _columns.counts_launches(columns[column[0]]):
            # Where the layouts agree, as nearly always, a column is copied in one go.
            alike = [
                place
                for place, weight in zip(column, weights, strict=True)
                if results[place] is None and columns[place].stride() == columns[weight].stride()
            ]
            for place, copy in zip(
                alike, _columns.clone([columns[place] for place in alike]), strict=True
            ):
                results[place] = copy
        held: list[Tensor | None] = []
        for place, weight in zip(column, weights, strict=True):
            old, like = columns[place], columns[weight] if place == weight else results[weight]
            held.append(None)
            if results[place] is not None and _alike(old, like):
                continue
            results[place] = new = torch.empty_like(like, dtype=old.dtype, requires_grad=False)
            if _alike(old, new):
                held[-1] = old.detach()
            else:
                new.copy_(old.detach())
        every.append(held)
    return every


def _alike(tensor: Tensor, weight: Tensor) -> bool:
    return tensor.stride() == weight.stride() or tensor.ndim == 0 or tensor.shape != weight.shape
