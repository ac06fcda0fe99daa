"""What ranks must agree on. Out of place, usable in a compiled step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import _torch


def all_reduce(tensor: Tensor, op: str, group: Any) -> Tensor:
    """`tensor` reduced over the ranks of `group` (`None`: all of them), out of place."""
    return _torch.all_reduce(tensor, op, dist.group.WORLD if group is None else group)


def all_reduce_found_inf(found_inf: Tensor, group: Any = None) -> Tensor:
    """Equal to `any(found_inf on rank for rank in group)`: one rank's overflow is every rank's
    skipped step.

    `found_inf` is 0-d bool and is left as it is; the result is 0-d bool on the same device.
    `group=None` is the default process group, and the identity (a copy) where there is none. It
    communicates, but reads no value on the host.

    >>> import torch
    >>> all_reduce_found_inf(torch.tensor(True))          # no process group: one rank
    tensor(True)

    Source of the rule: Megatron-LM and DeepSpeed (MAX over the ranks). `torch.amp.GradScaler`
    reduces nothing, and ShardedGradScaler forgets it before a fused optimizer, after which ranks
    diverge.
    """
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return found_inf.clone()
    return all_reduce(found_inf.to(torch.int32), "max", group).to(torch.bool)
