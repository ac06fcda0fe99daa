"""Loss-scale rules without training: their states over given overflows, or over gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._loss_scale.rules import Rule, call_rule, checked_rule_traits, takes_amax
from ._torch.autocast import outside_autocast
from ._tree import pytree, scalars
from ._tree.leaves import describe
from ._tree.matching import matching_leaves
from ._tree.pytree import Tree


@outside_autocast()
def simulate(rule: Rule[Any], found_infs: Tensor | Sequence[bool]) -> Any:
    """Equal to `states = [rule.init()]; for bad in found_infs: states += [rule.update(states[-1],
    bad)]`, stacked.

    Reads no value. Compiled, it is one graph of T updates; compile `rule.update` for long runs. Use
    `torch.vmap` for many runs at once, or for many settings of a rule of your own that holds them
    as tensors.

    Args:
        rule: The rule. One that takes amax gets -1, which tells it nothing; use `replay` for such a
            rule.
        found_infs: bool [T], True if the step was bad; or a list of bools.

    Returns:
        The states of the rule, stacked: one more dimension in front, [T + 1], with the state before
        step t at index t, on the device of `found_infs`.

    Raises:
        TypeError: `rule` is not a rule, or an item of `found_infs` is not a bool.
        ValueError: `found_infs` is not bool [T].

    Example:
        >>> from purescale import DynamicScale
        >>> rule = DynamicScale(init_scale=8.0, growth_interval=2)
        >>> simulate(rule, [True, False, False]).scale
        tensor([8., 4., 4., 8.])
    """
    flags = _series("found_infs", found_infs, "bool", lambda t: t.dtype is torch.bool)
    nothing = torch.full((), -1.0, dtype=torch.float32, device=flags.device)
    return _run(rule, flags, lambda scaler, bad: (bad, bad, nothing))[0]


@outside_autocast()
def replay(
    rule: Rule[Any], amaxes: Tensor | Sequence[float], largest: float = 65504.0
) -> tuple[Any, Tensor]:
    """Equal to `simulate` with the overflows that the rule's own scale causes: a step is bad unless
    `amax * scale <= largest`.

    A recording does not contain the effect of a skipped step on later gradients, so near the start
    of a run the result is an approximation.

    Args:
        rule: The rule.
        amaxes: Floating [T], the largest unscaled gradient of each step of a run, from `StepInfo`
            or `grad_amax`. inf and NaN are bad at any scale; a rule that takes amax gets
            found_inf=False there, as in `train_step` if a loss is not finite.
        largest: The largest number of the dtype in which gradients are computed, by default
            float16.

    Returns:
        The states [T + 1], as `simulate` does, and the flags, bool [T].

    Raises:
        TypeError: `rule` is not a rule, or an item of `amaxes` is not a number.
        ValueError: `amaxes` is not floating [T], or `largest` is not positive.

    Example:
        >>> from purescale import HeadroomScale
        >>> states, found_infs = replay(HeadroomScale(init_scale=2.0**16), [4.0, 4.0, 128.0])
        >>> found_infs, states.scale.int()
        (tensor([ True, False, False]), tensor([65536,   512,   128,     4], dtype=torch.int32))
    """
    limit = scalars.checked_positive("largest", largest)
    series = _series("amaxes", amaxes, "floating", Tensor.is_floating_point).to(torch.float32)

    follows_amax = takes_amax(rule)

    def step(scaler: Tree, amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        bad = ~(amax * scaler.scale <= limit)
        return bad, bad & torch.isfinite(amax) if follows_amax else bad, amax

    return _run(rule, series, step)


def _run(rule: Any, series: Tensor, step: Any) -> tuple[Any, Tensor]:
    """Return the stacked states and flags of a run. `step` gives the flag of a step, and what the
    rule gets: found_inf and amax.
    """
    checked_rule_traits(rule)
    scaler = rule.init(series.device)
    first, structure = pytree.flatten(scaler)
    rows, flags = [first], [torch.zeros_like(series[:0], dtype=torch.bool)]
    for item in series.unbind():
        bad, found_inf, amax = step(scaler, item)
        new = call_rule(rule, scaler, found_inf, amax)
        rows.append(matching_leaves(scaler, new, "rule.init()", "what rule.update returned")[1])
        flags.append(bad.reshape(1))
        scaler = new
    stacked = [torch.stack(list(leaves)) for leaves in zip(*rows, strict=True)]
    return structure.unflatten(stacked), torch.cat(flags)


def _series(name: str, values: Any, kind: str, fits: Any) -> Tensor:
    """Return a tensor or a list of numbers as a tensor [T], checked to be of a `kind`."""
    series = values
    if isinstance(values, Iterable) and not isinstance(values, (Tensor, str, bytes)):
        # float32 for fractions, because the default dtype may be narrower.
        listed = [
            torch.as_tensor(v, dtype=torch.float32 if type(v) is float else None) for v in values
        ]
        series = torch.stack(listed) if listed else torch.zeros(0).to(_DTYPES[kind])
    if not isinstance(series, Tensor) or series.ndim != 1 or not fits(series):
        raise ValueError(
            f"{name} is {describe(series)}; expected {kind} [T], one per step, or a list. Fix: "
            f"`.to({_DTYPES[kind]})`; for many runs at once, `torch.vmap` over the first dimension."
        )
    return series


_DTYPES = {"bool": torch.bool, "floating": torch.float32}
