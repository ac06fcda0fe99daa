"""The stage `reduce` of a step: the windows of all ranks of a group as one window."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from .._distributed.buckets import reduction_of
from .._distributed.collectives import agree_on_all_ranks, describe_leaves, describe_setting, on_cpu
from .._distributed.process_group import Group, all_reduce, check_group, mesh_sizes
from .._step.microbatches import MicrobatchWeights, WindowResult, sent_for_nan
from .._step.train_state import FlatState, StepOptions
from .._torch import dtensor
from .._torch.dtypes import wide_dtype
from .._tree import tree as _tree
from .._tree.gradients import as_gradients
from .._tree.tree import Leaves, Tree


def reduce_window(
    options: StepOptions, window: WindowResult, flat: FlatState, num_microbatches: int
) -> WindowResult:
    """Return one window for all ranks: the mean of their means by weight, and of the buffers after
    them.

    Gradients that are on their way already are waited for; otherwise they are sent now. A buffer
    that no rank has changed keeps its bits. Of integer buffers the largest is taken, because they
    count.

    If only the mean is measured, no flag tells of an overflow: that of one rank is inf or NaN in
    the sum, so every rank measures the same. If a norm is measured, -inf is sent as inf, so that an
    overflow on several ranks has the norm inf, as in one process. `microbatches._summary` has
    already reduced the flags of single microbatches and of weights.
    """
    params, before, after = flat.params.leaves, flat.buffers.leaves, window.buffers
    reduction = window.reduction
    if reduction is None:
        reduction = reduction_of(params, before, window.divisor, options.group)
        leaves, nan = window.grads.leaves, sent_for_nan(options, num_microbatches)
        for index in reversed(range(len(params))):
            if index in reduction.bucket_of:
                reduction.put(index, leaves[index], nan=nan)
    for index, (old, new) in enumerate(zip(before, after, strict=True), len(params)):
        if index in reduction.bucket_of:
            reduction.put(index, _change_and_value(old, new, reduction.divisor))
    largest = _largest_integers(before, after, options.group)
    sums = reduction.get()
    averaged = [
        other if pair is None else _apply_mean_change(old, *pair)
        for old, pair, other in zip(before, sums[len(params) :], largest, strict=True)
    ]
    grads = as_gradients(sums[: len(params)], window.grads.divisor, owned=window.grads.owned)
    return window._replace(grads=grads, buffers=averaged, reduction=None)


def _change_and_value(old: Tensor, new: Tensor, divisor: Any) -> Tensor:
    """Return the two tensors of a buffer to be averaged: its change and its new value."""
    wide = new.to(wide_dtype(old.dtype))
    pair = torch.stack([wide - old.to(wide.dtype), wide])
    # A rank without a weight has the divisor inf, and inf / inf would be NaN.
    return torch.where(torch.isinf(divisor), 0, pair)


def _apply_mean_change(old: Tensor, change: Tensor, value: Tensor) -> Tensor:
    """Return a buffer after the mean of both. A buffer that counts uses its change, because the
    mean of values would be rounded if the number of ranks is not a power of 2. One that falls below
    half uses its value, which the change does not hold; so does one that comes from inf, such as a
    running minimum.
    """
    wide = old.to(value.dtype)
    near = torch.isfinite(change) & (value.abs() >= wide.abs() / 2)
    moved = torch.where(near, wide + change, value)
    return torch.where(change == 0, wide, moved).to(old.dtype)


def _largest_integers(before: Leaves, after: Leaves, group: Group | None) -> Leaves:
    """Return `after` with the largest value of each integer over the ranks, from one reduction."""
    places = [
        place
        for place, old in enumerate(before)
        if isinstance(old, Tensor) and not (old.is_floating_point() or old.is_complex())
    ]
    results = list(after)
    if not places:
        return results
    row = torch.cat([after[place].to(torch.int64).reshape(-1) for place in places])
    most = torch.split(all_reduce(row, "max", group), [after[p].numel() for p in places])
    for place, part in zip(places, most, strict=True):
        results[place] = part.reshape(after[place].shape).to(after[place].dtype)
    return results


# The arguments of a step, checked.
Checked: TypeAlias = tuple[FlatState, StepOptions, MicrobatchWeights]


def check_on_all_ranks(
    group: Group | None, check: Callable[[Group | None], Checked], state: Any
) -> Checked:
    """Return the result of `check(group)`, where the group of a single rank becomes None. If the
    ranks meet on a CPU, an error or a difference on one rank raises on every rank; otherwise
    nothing is compared.
    """
    if group is None:
        return check(None)
    group = check_group(group)
    several = dist.get_world_size(group) > 1

    def check_all() -> Checked:
        checked = check(group if several else None)
        _refuse_dtensors({name: getattr(state, name) for name in ("params", "buffers", "scaler")})
        return checked

    def describe(checked: Checked) -> list[str]:
        return _all_that_must_agree(checked[1].compared(), state)

    return agree_on_all_ranks(group, check_all, describe, sync=on_cpu(group))


def _all_that_must_agree(settings: dict[str, Any], state: Any) -> list[str]:
    """Return every setting and the structure of the whole state, a line each. Scales, rates and
    counts have their values too, because ranks that differ in them make different steps of equal
    gradients.
    """
    lines = [f"{name}={describe_setting(setting)}" for name, setting in settings.items()]
    for field, tree in state._asdict().items():
        for name, part in _fields(field, tree):
            lines += describe_leaves(name, part, with_strides=True)
            if isinstance(part, Tensor) and not part.ndim and field not in ("params", "buffers"):
                lines.append(f"{name} = {describe_setting(part)}")
    return lines


def _fields(name: str, tree: Tree) -> Iterator[tuple[str, Tree]]:
    """Yield the fields of a NamedTuple and of those in it, such as `opt_state.slots`, and the
    states that a partition has by key.
    """
    if isinstance(tree, dict) and any(hasattr(child, "_asdict") for child in tree.values()):
        for key, child in tree.items():
            yield from _fields(f"{name}[{key!r}]", child)
        return
    if not hasattr(tree, "_asdict"):
        yield name, tree
        return
    for key, child in tree._asdict().items():
        yield from _fields(f"{name}.{key}", child)


def _refuse_dtensors(trees: dict[str, Tree]) -> None:
    for name, tree in trees.items():
        for index, leaf in enumerate(_tree.flatten(tree)[0]):
            if dtensor.is_dtensor(leaf):
                at = _tree.path(tree, f"state.{name}", index)
                mesh = mesh_sizes(leaf.device_mesh)
                raise ValueError(
                    f"{at} is a DTensor, {leaf.placements} over a mesh of {mesh}; with a group "
                    "every rank must hold the whole leaf. Fix: leave group out, because a DTensor "
                    "is reduced over its own mesh."
                )
            if isinstance(leaf, Tensor) and leaf.layout is not torch.strided:
                at = _tree.path(tree, f"state.{name}", index)
                raise ValueError(
                    f"{at} is {leaf.layout}; ranks average dense tensors only. Fix: "
                    "`buffer.to_dense()`, or let loss_fn close over a tensor that no step changes."
                )
