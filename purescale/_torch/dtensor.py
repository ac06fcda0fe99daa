"""DTensors as the shards that this rank holds, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from .._torch import private
from .._torch.tracing import PLAIN_TYPES

_PLAIN_OR_NONE = PLAIN_TYPES | {type(None)}


def any_dtensor(leaves: Sequence[Any]) -> bool:
    """Whether a leaf is a DTensor, or a parameter that is one."""
    kinds = set(map(type, leaves))
    return not kinds <= _PLAIN_OR_NONE and any([issubclass(kind, DTensor) for kind in kinds])


def reduce_partial(leaf: Any) -> Any:
    """A DTensor whose value is a sum over ranks, as a gradient of a replicated parameter can be,
    with that sum on all of them; anything else as it is.
    """
    if not isinstance(leaf, DTensor) or not any(p.is_partial() for p in leaf.placements):
        return leaf
    return leaf.redistribute(
        placements=[Replicate() if p.is_partial() else p for p in leaf.placements]
    )


def full_tensor(leaf: Any) -> Any:
    """All of a DTensor on every rank, on its graph; anything else as it is."""
    return leaf.full_tensor() if isinstance(leaf, DTensor) else leaf


def redistribute_like(leaf: Any, other: Any) -> Any:
    """`leaf` with the placements of `other`: a gradient may have others than its parameter."""
    both = isinstance(leaf, DTensor) and isinstance(other, DTensor)
    if not both or leaf.placements == other.placements:
        return leaf
    return leaf.redistribute(placements=other.placements)


def placement_mismatch(leaf: Any, other: Any) -> str:
    """Why two leaves are not over one mesh, and the fix; nothing where they are."""
    here, there = (x.device_mesh if isinstance(x, DTensor) else None for x in (leaf, other))
    if here is there or here == there:
        return ""
    if here is None or there is None:
        a, b = ("a plain tensor" if mesh is None else "a DTensor" for mesh in (here, there))
        return (
            f"is {a}, and {b}: a rank cannot tell what it holds of the other. Fix: "
            "`distribute_tensor(t, mesh, placements)` of the plain one."
        )
    return f"is over the mesh {here}, and over {there}. Fix: both over one mesh."


def is_sharded(leaf: Any) -> bool:
    """Whether a rank holds a part of `leaf` only."""
    return isinstance(leaf, DTensor) and not all(p.is_replicate() for p in leaf.placements)


def shard(leaf: Any, *, on_graph: bool = True) -> Any:
    """What this rank holds of a DTensor, itself and no copy; anything else as it is."""
    if not isinstance(leaf, DTensor):
        return leaf
    if torch.compiler.is_compiling() or (
        on_graph and leaf.requires_grad and torch.is_grad_enabled()
    ):
        return leaf.to_local()
    return private.arrived(private.local(leaf))


def offsets(leaf: DTensor) -> tuple[int, ...]:
    """Where in each dimension of a DTensor this rank's shard begins."""
    return tuple(private.local_part(leaf.shape, leaf.device_mesh, leaf.placements)[1])


def from_local_like(leaf: Any, result: Any) -> Any:
    """What was computed of the local shard of a DTensor as a DTensor with its placements; of
    anything else the result itself.
    """
    if not isinstance(leaf, DTensor) or isinstance(result, DTensor):
        return result
    if not torch.compiler.is_compiling() and result is private.local(leaf):  # written in place
        return leaf.detach() if leaf.requires_grad else leaf
    shape: Any = leaf.shape
    return DTensor.from_local(
        result,
        leaf.device_mesh,
        leaf.placements,
        run_check=False,
        shape=shape,
        stride=leaf.stride(),
    )
