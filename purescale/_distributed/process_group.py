"""Which ranks are meant, and what is reduced over them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch import private as _torch
from .._tree import scalars as _checks


def all_reduce(tensor: Tensor, op: str, group: Any) -> Tensor:
    """The "sum" or "max" of `tensor` over the ranks of `group` (`None`: all), out of place."""
    group = member(group)
    if not torch.compiler.is_compiling():
        # Waited for here: what is left of a view of it would still be a tensor on its way.
        return _torch.arrived(_torch.all_reduce(tensor, op, group))
    # Inductor (2.11 to 2.13) sums a result of torch.cat where it stands, and what it was made of
    # stands there too, and is read again afterwards as the sum. What is negated stands apart.
    return -_torch.all_reduce(-tensor, "min" if op == "max" else op, group)


def alone(group: Any) -> bool:
    """Whether the default group is meant and there is none."""
    return group is None and not (dist.is_available() and dist.is_initialized())


def member(group: Any) -> Any:
    """The group that is meant (`None`: all ranks); refused where this rank is not in it, or it is
    gone.
    """
    if torch.compiler.is_compiling():
        return dist.group.WORLD if group is None else group
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "group is one that this rank is not in. Likely cause: `dist.new_group(ranks)` is "
            "called by every rank, and gives those that are not in `ranks` only a mark. Fix: `if "
            "dist.get_rank() in ranks:` around what the group does."
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
    """`member`, for what takes nothing but process groups."""
    group = member(group)
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group is {_checks.shown(group)} ({type(group).__name__}); expected a process group. "
            "Fix: `dist.group.WORLD`, `dist.new_group(ranks)`, or of a DeviceMesh "
            "`mesh.get_group('dp')`."
        )
    return group
