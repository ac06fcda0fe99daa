"""The agreement of all ranks of a group about a step, before any work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._distributed.collectives import (
    agree_on_all_ranks,
    describe_leaves,
    describe_setting,
    meets_on_cpu,
)
from .._distributed.process_group import Group, as_group, mesh_sizes
from .._step.prepare import PreparedStep
from .._torch import dtensor
from .._tree import pytree
from .._tree.pytree import Tree


def prepare_on_all_ranks(
    group: Group, prepare: Callable[[Group | None], PreparedStep], state: Any
) -> PreparedStep:
    """Return the result of `prepare(group)`, where the group of a single rank becomes None. If the
    ranks meet on a CPU, an error or a difference on one rank raises on every rank; otherwise
    nothing is compared.
    """
    group = as_group(group)
    several = dist.get_world_size(group) > 1

    def prepare_and_check() -> PreparedStep:
        prepared = prepare(group if several else None)
        _refuse_sharded_and_sparse(
            {name: getattr(state, name) for name in ("params", "buffers", "scaler")}
        )
        return prepared

    def describe(prepared: PreparedStep) -> list[str]:
        return _all_agreed_settings(prepared.options.agreed_settings, state)

    return agree_on_all_ranks(group, prepare_and_check, describe, sync=meets_on_cpu(group))


def _all_agreed_settings(settings: dict[str, Any], state: Any) -> list[str]:
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


def _refuse_sharded_and_sparse(trees: dict[str, Tree]) -> None:
    for name, tree in trees.items():
        for index, leaf in enumerate(pytree.flatten(tree)[0]):
            if dtensor.is_dtensor(leaf):
                at = pytree.path(tree, f"state.{name}", index)
                mesh = mesh_sizes(leaf.device_mesh)
                raise ValueError(
                    f"{at} is a DTensor, {leaf.placements} over a mesh of {mesh}; with a group "
                    "every rank must hold the whole leaf. Fix: leave group out, because a DTensor "
                    "is reduced over its own mesh."
                )
            if isinstance(leaf, Tensor) and leaf.layout is not torch.strided:
                at = pytree.path(tree, f"state.{name}", index)
                raise ValueError(
                    f"{at} is {leaf.layout}; ranks average dense tensors only. Fix: "
                    "`buffer.to_dense()`, or let loss_fn close over a tensor that no step changes."
                )
