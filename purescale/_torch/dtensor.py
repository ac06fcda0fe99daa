"""DTensors as the local shards of this rank, and back."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from .._torch.tracing import PLAIN_TYPES

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def dtensor_class() -> Any:
    """Return DTensor for `isinstance`. Until something imports it, which takes half as long as
    torch itself, nothing can be one: ().
    """
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())


def is_dtensor(leaf: Any) -> TypeGuard[DTensor]:
    """Return True for a DTensor."""
    return isinstance(leaf, dtensor_class())


def any_dtensor(leaves: Sequence[Any]) -> bool:
    """Return True if a leaf is a DTensor, or a parameter that is one."""
    dtensor = dtensor_class()
    return any([issubclass(kind, dtensor) for kind in set(map(type, leaves))])


def reduce_partial(leaf: Any) -> Any:
    """Return a DTensor with Partial placements, such as a gradient of a replicated parameter,
    summed over the ranks; anything else unchanged.
    """
    if not is_dtensor(leaf) or not any(p.is_partial() for p in leaf.placements):
        return leaf
    from torch.distributed.tensor import Replicate

    return leaf.redistribute(
        placements=[Replicate() if p.is_partial() else p for p in leaf.placements]
    )


def full_tensor(leaf: Any) -> Any:
    """Return a DTensor as a whole on every rank, on its graph; anything else unchanged."""
    return leaf.full_tensor() if is_dtensor(leaf) else leaf


def redistribute_like(leaf: Any, other: Any) -> Any:
    """Return `leaf` with the placements of `other`: those of a gradient may differ from its
    parameter's.
    """
    both = is_dtensor(leaf) and is_dtensor(other)
    if not both or leaf.placements == other.placements:
        return leaf
    return leaf.redistribute(placements=other.placements)


def placement_mismatch(leaf: Any, other: Any) -> str:
    """Return why two leaves are not over one mesh, and the fix; "" if they are."""
    mesh, other_mesh = (x.device_mesh if is_dtensor(x) else None for x in (leaf, other))
    if mesh is other_mesh or mesh == other_mesh:
        return ""
    if mesh is None or other_mesh is None:
        a, b = ("a plain tensor" if m is None else "a DTensor" for m in (mesh, other_mesh))
        return (
            f"is {a}, and {b}: a rank cannot match the two. Fix: "
            "`distribute_tensor(t, mesh, placements)` of the plain one."
        )
    return f"is over the mesh {mesh}, and over {other_mesh}. Fix: both over one mesh."


def is_sharded(leaf: Any) -> bool:
    """Return True if a rank holds only a part of `leaf`."""
    return is_dtensor(leaf) and not all(p.is_replicate() for p in leaf.placements)


def local_shard(leaf: Any, *, on_graph: bool = True) -> Any:
    """Return this rank's shard of a DTensor, not a copy; anything else unchanged."""
    if not is_dtensor(leaf):
        return leaf
    if torch.compiler.is_compiling() or (
        on_graph and leaf.requires_grad and torch.is_grad_enabled()
    ):
        return leaf.to_local()
    return wait_for(_local(leaf))


def _local(leaf: DTensor) -> Tensor:
    with torch.no_grad():
        return leaf.to_local()


def wait_for(tensor: Any) -> Tensor:
    """Return a tensor once the collective that fills it is done."""
    is_pending = type(tensor) not in PLAIN_TYPES and hasattr(tensor, "wait")
    whole: Tensor = tensor.wait() if is_pending else tensor
    return whole


def offsets(leaf: DTensor) -> tuple[int, ...]:
    """Return the offset of this rank's shard in each dimension of a DTensor."""
    (chunk,) = leaf.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return tuple(chunk.offsets)


def from_local_like(leaf: Any, result: Any) -> Any:
    """Return a result computed from the local shard of a DTensor as a DTensor with its placements;
    the result itself for any other leaf.
    """
    if not is_dtensor(leaf) or is_dtensor(result):
        return result
    if not torch.compiler.is_compiling() and result is _local(leaf):  # written in place
        return leaf.detach() if leaf.requires_grad else leaf
    from torch.distributed.tensor import DTensor

    shape: Any = leaf.shape
    return DTensor.from_local(
        result,
        leaf.device_mesh,
        leaf.placements,
        run_check=False,
        shape=shape,
        stride=leaf.stride(),
    )
