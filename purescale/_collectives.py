"""What ranks must agree on. Out of place, usable in a compiled step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import _tree


def all_reduce(tensor: Tensor, op: str, group: Any) -> Tensor:
    """`tensor` reduced over the ranks of `group` (`None`: all of them), out of place."""
    from torch.distributed._functional_collectives import all_reduce

    ranks: Any = dist.group.WORLD if group is None else group
    reduced: Tensor = all_reduce(tensor, op, ranks)
    return reduced


def all_reduce_found_inf(found_inf: Tensor, group: Any = None) -> Tensor:
    """Equal to `any(found_inf on rank for rank in group)`: one rank's overflow is every rank's skipped step.

    `found_inf` is 0-d bool and is left as it is; the result is 0-d bool on the same device. `group=None` is the default
    process group, and the identity (a copy) where there is none. It communicates, but reads no value on the host.

    >>> import torch
    >>> all_reduce_found_inf(torch.tensor(True))          # no process group: one rank
    tensor(True)

    Source of the rule: Megatron-LM and DeepSpeed (MAX over the ranks). `torch.amp.GradScaler` reduces nothing, and
    ShardedGradScaler forgets it before a fused optimizer, after which ranks diverge.
    """
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return found_inf.clone()
    return all_reduce(found_inf.to(torch.int32), "max", group).to(torch.bool)


def all_reduce_bn_stats(stats: Any, group: Any = None) -> Any:
    """Equal to `functools.reduce(merge_bn_stats, [stats on rank for rank in group])`, on every rank, from two reductions.

    `stats`: a `BNStatsState`, left as it is; a rank without data counts for nothing. `group=None` is the default process
    group, and the identity (a copy) where there is none. It communicates, but reads no value on the host. The ranks must have
    the same layers.

    >>> from purescale import init_bn_stats
    >>> all_reduce_bn_stats(init_bn_stats({"running_mean": torch.zeros(1), "running_var": torch.ones(1)})).num_batches
    tensor(0)

    Source of the rule: Chan, Golub, LeVeque (1979). mmpretrain averages means and variances of ranks, which drops what lies
    between them; fvcore and `swa_utils.update_bn` reduce nothing.
    """
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return _tree.clone(stats)
    layers = list(stats.layers.values())
    sizes = [layer.mean.numel() for layer in layers]
    wide = layers[0].mean.dtype
    scalars = torch.stack([layer.count for layer in layers] + [layer.calls for layer in layers] + [stats.num_batches, stats.num_skipped])
    vectors = [(layer.mean * layer.count).reshape(-1) for layer in layers] + [layer.within.reshape(-1) for layer in layers]
    sums = all_reduce(torch.cat([scalars.to(wide), *vectors]), "sum", group)
    scalars, *vectors = torch.split(sums, [len(scalars), *sizes, *sizes])
    counts, calls = scalars[: len(layers)], scalars[len(layers) : 2 * len(layers)]
    means = [total / torch.where(count > 0, count, 1) for total, count in zip(vectors, counts, strict=False)]
    # From the common mean: two passes, so that nothing cancels.
    m2 = [layer.m2.reshape(-1) + layer.count * (layer.mean.reshape(-1) - mean).square() for layer, mean in zip(layers, means, strict=True)]
    reduced = torch.split(all_reduce(torch.cat(m2), "sum", group), sizes)
    parts = zip(stats.layers, layers, counts, means, reduced, vectors[len(layers) :], calls, strict=True)

    def rebuilt(layer: Any, count: Tensor, *rest: Tensor) -> Any:
        *vectors, calls = rest
        return type(layer)(count.clone(), *(vector.clone().view_as(layer.mean) for vector in vectors), calls.clone())

    return type(stats)(
        layers={name: rebuilt(*part) for name, *part in parts},
        num_batches=scalars[-2].to(torch.int64),
        num_skipped=scalars[-1].to(torch.int64),
    )
