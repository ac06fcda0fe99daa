"""The microbatches of a step gone through again at a lower scale, with the same random numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .._grads.accumulate import OnNonfinite
from .._loss_scale.headroom import takes_amax, updated
from .._loss_scale.rules import Rule, is_usable
from .._step.microbatches import BNUpdate, Gathered, gather
from .._step.value_and_grad import LossFn
from .._torch import dtensor as _dtensor
from .._tree import tree as _tree
from .._tree.tree import Flat


def gather_until_finite(
    params: Flat,
    buffers: Flat,
    scaler: Flat,
    rng: Any,
    microbatches: list[Any],
    loss_fn: LossFn,
    rule: Rule[Any],
    weight_fn: Callable[[Any], float | Tensor] | None,
    on_nonfinite: OnNonfinite,
    bn_update: BNUpdate,
    max_retries: int,
    norm_type: float | None,
    group: Any = None,
) -> tuple[Any, Gathered, Any, int]:
    """Syncs with the host where `max_retries` is above 0. The scaler that was used, the window, the
    next `rng`, how many retries.

    Where no try is finite, the one that lost the fewest microbatches, and of those the one at the
    highest scale. With a `group` what is read is the same on every rank, so that all try again
    or none.
    """
    if max_retries and _dtensor.among(params.leaves):
        raise ValueError(
            f"max_retries={max_retries} with parameters that are DTensors: whether to try again is "
            "read from the loss of this rank, another rank may read otherwise, and each would wait "
            "for the other. Cure: max_retries=0; the next step is taken at the lower scale anyway."
        )
    device = scaler.tree.scale.device
    retries = 0
    best: tuple[Any, Gathered, Any] | None = None
    drawn = _generators(device) if max_retries else []
    exact = max_retries > 0
    while True:
        with _drawing_from(rng, device) as after:
            gathered = gather(
                params,
                buffers,
                scaler,
                microbatches,
                loss_fn,
                weight_fn,
                on_nonfinite,
                bn_update,
                norm_type,
                exact,
                takes_amax(rule),
                group,
            )
        if best is None or bool(gathered.lost < best[1].lost):
            best = scaler.tree, gathered, after()
        lower = None
        if retries < max_retries and bool(gathered.curable):
            lower = _backed_off(rule, scaler.tree)
        if lower is None:
            return (*best, retries)
        scaler, retries = _tree.flat(lower), retries + 1
        for module, where, before in drawn:
            module.set_rng_state(before, *where)


_PATIENCE = 100  # overflows that a rule may let pass before it lowers the scale


def _backed_off(rule: Rule[Any], scaler: Any) -> Any | None:
    """Syncs with the host. The first state with a lower scale, or a usable one, that overflows lead
    to; `None` at the smallest scale.
    """
    lower, bad = scaler, torch.ones((), dtype=torch.bool, device=scaler.scale.device)
    amax = torch.full_like(scaler.scale, torch.inf)  # what a skipped step has
    for _ in range(_PATIENCE):
        lower = updated(rule, lower, bad, amax)
        usable = is_usable(lower.scale) & ~is_usable(scaler.scale)
        if bool((lower.scale < scaler.scale) | usable):
            return lower
    return None


def _generators(device: torch.device) -> list[tuple[Any, tuple[Any, ...], Tensor]]:
    """The global generators that a loss may draw from, and where each stands."""
    generators: list[tuple[Any, tuple[Any, ...]]] = [(torch, ())]
    if device.type != "cpu":
        generators.append((getattr(torch, device.type), (device,)))
    return [(module, where, module.get_rng_state(*where)) for module, where in generators]


@contextlib.contextmanager
def _drawing_from(rng: Any, device: torch.device) -> Iterator[Callable[[], Any]]:
    """Draw random numbers from `rng`; yields a function that gives the next one. The global
    generator is put back.
    """
    if isinstance(rng, tuple):
        yield lambda: ()
        return
    module, where, before = _generators(device)[-1]
    after: list[Tensor] = []
    module.set_rng_state(rng.clone(), *where)
    try:
        yield lambda: after[0]
        after.append(module.get_rng_state(*where))
    finally:
        module.set_rng_state(before, *where)
