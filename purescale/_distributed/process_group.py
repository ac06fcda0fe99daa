"""The process group of a call, and an all-reduce over it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch import private
from .._tree.scalars import short_repr


def all_reduce(tensor: Tensor, op: str, group: Any) -> Tensor:
    """The "sum" or "max" of `tensor` over the ranks of `group` (`None`: all), out of place."""
    group = resolve_group(group)
    if not torch.compiler.is_compiling():
        # Waited for here: a view of a result that was not waited for would not wait either.
        return private.arrived(private.all_reduce(tensor, op, group))
    # Inductor (2.11 to 2.13) reduces a result of torch.cat in place, where the inputs of torch.cat
    # share its memory: read again, they have become the sum. A negation has memory of its own.
    return -private.all_reduce(-tensor, "min" if op == "max" else op, group)


def is_single_process(group: Any) -> bool:
    """Whether `group` is the default one and no process group was made."""
    return group is None and not (dist.is_available() and dist.is_initialized())


def resolve_group(group: Any) -> Any:
    """The process group (`None`: of all ranks); refused if this rank is not in it or if it was
    destroyed.
    """
    if torch.compiler.is_compiling():
        return dist.group.WORLD if group is None else group
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "group is one that this rank is not in. Likely cause: `dist.new_group(ranks)` is "
            "called by every rank, and returns a placeholder to those that are not in `ranks`. "
            "Fix: `if dist.get_rank() in ranks:` around what the group does."
        )
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "group is given, but there is no process group. Likely cause: "
            "`dist.destroy_process_group()` before the last step, or a group of an earlier run. "
            "Fix: `dist.init_process_group(...)` first, under torchrun; group=None for one rank."
        )
    group = dist.group.WORLD if group is None else group
    if isinstance(group, dist.ProcessGroup):
        try:
            dist.get_process_group_ranks(group)
        except (KeyError, ValueError):
            raise ValueError(
                "group is gone. Likely cause: `dist.destroy_process_group(group)`, or a default "
                "group that was destroyed and made anew. Fix: the group as it is now, for all "
                "ranks `dist.group.WORLD`."
            ) from None
    return group


def check_group(group: Any) -> Any:
    """`resolve_group`, where only a process group will do."""
    group = resolve_group(group)
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group is {short_repr(group)} ({type(group).__name__}); expected a process group. "
            "Fix: `dist.group.WORLD`, `dist.new_group(ranks)`, or of a DeviceMesh "
            "`mesh.get_group('dp')`."
        )
    return group
