"""What ranks must agree on. Out of place, usable in a compiled step."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._distributed.buckets import Reduction
from .._distributed.describe_settings import described
from .._distributed.mesh import mesh_sizes
from .._distributed.process_group import all_reduce, alone, check_group, member
from .._torch import donation
from .._torch import private as _torch
from .._torch.autocast import outside_autocast
from .._torch.tracing import traced
from .._tree import scalars as _checks
from .._tree import tree as _tree
from .._tree.tree import Leaves, Tree


def all_reduce_found_inf(found_inf: Tensor | bool, group: Any = None) -> Tensor:
    """Equal to `any(found_inf on rank for rank in group)`: one rank's overflow is every rank's
    skipped step.

    `found_inf` is 0-d bool and is left as it is; the result is 0-d bool on the same device. A
    Python bool is taken too and put on the device on which the group communicates, a number that
    is not 0 is `True`. `group=None` is the default process group, and the identity (a copy) where
    there is none. It communicates, but reads no value on the host.

    Raises `TypeError` for what is neither tensor nor bool, `ValueError` for a tensor that is not
    0-d, before it communicates.

    >>> import torch
    >>> all_reduce_found_inf(torch.tensor(True))          # no process group: one rank
    tensor(True)

    Source of the rule: Megatron-LM and DeepSpeed (MAX over the ranks). `torch.amp.GradScaler`
    reduces nothing, and ShardedGradScaler forgets it before a fused optimizer, after which ranks
    diverge.
    """
    flag = _tree.flag(found_inf)
    if alone(group):
        return flag.clone() if flag is found_inf else flag
    group = member(group)
    traced = torch.compiler.is_compiling()
    if not (isinstance(found_inf, Tensor) or traced) and isinstance(group, dist.ProcessGroup):
        flag = flag.to(_torch.object_device(group))
    return all_reduce(flag.to(torch.int32), "max", group).to(torch.bool)


@outside_autocast()
def all_reduce_grads(
    grads: Tree,
    group: Any = None,
    bucket_size_mb: float = 25,
    check: bool = True,
    donate: bool = False,
) -> Tree:
    """Syncs with the host where `check`. Equal to `tree_map(lambda *g: sum(g) / len(g), *(grads on
    rank for rank in group))`, on every rank, from one reduction a bucket.

    Arguments:
    - `grads`: a pytree of gradients, the same tree on every rank; `None` passes through, and so do
      DTensors, which are reduced over their own mesh. Sparse leaves are reduced and come back
      dense: each rank holds other rows. Half leaves are summed in float32 and rounded once.
    - `group=None` is the default process group, and the identity (a copy) where there is none.
    - `bucket_size_mb`: leaves of one dtype and device travel together, this many MiB at a time;
      while one bucket is on its way the next is put together. `inf`: one bucket a dtype.
    - `check`: exchange 16 bytes that tell whether trees, names, shapes, dtypes and kinds of device
      are the same; where not, or where one rank refuses its arguments, every rank raises. Left out
      while compiling. Without it trees that differ are a hang.
    - `donate`: `grads` may be overwritten; the caller gives them up. Same bits.

    Each rank divides before the sum, so that no sum of finite gradients overflows of which the mean
    is finite; inf and NaN come through on every rank. In buckets the same bits as a leaf at a time
    on two ranks; on more, where backends choose the order of the sum by place, up to its rounding.

    Raises `ValueError`, on every rank where `check`, for trees that differ (with the rank and the
    first leaf), for a group that this rank is not in or that is gone, for a `bucket_size_mb` that
    is not above 0; `TypeError` for leaves that are no gradients.

    >>> import torch
    >>> all_reduce_grads({"w": torch.tensor([1.0]), "frozen": None})    # no process group: one rank
    {'w': tensor([1.]), 'frozen': None}

    Source of the rule: DistributedDataParallel, which divides first; mmpose's `allreduce_grads`
    (coalesced, in buckets), which sums first.
    """

    def checked() -> tuple[Leaves, Any]:
        size = _checks.real("bucket_size_mb", bucket_size_mb)
        if not size > 0:
            raise ValueError(
                f"bucket_size_mb must be above 0, got {_checks.shown(bucket_size_mb)}. Fix: 25, "
                "as DistributedDataParallel; float('inf') for one bucket a dtype."
            )
        leaves, structure = _tree.flatten(grads)
        _tree.check_gradients(grads, leaves)
        return leaves, structure

    if alone(group):
        leaves, structure = checked()
        results = leaves if donate and not donation.DEBUG else _tree.clone(leaves)
    else:
        group = check_group(group)
        if check and not traced():
            agree(
                group,
                checked,
                lambda: [f"{bucket_size_mb=}", *lines_of("grads", grads, laid=False)],
            )
        leaves, structure = checked()
        size = float(bucket_size_mb) * 2**20
        reduction = Reduction(leaves, dist.get_world_size(group), group, size)
        for place in reduction.bucket_of:
            reduction.put(place, leaves[place])
        plain = [leaf for leaf in leaves if leaf is not None]
        own = donate and not traced() and donation.can_write(plain)
        results = [
            _as_it_was(mean, leaf, own=own)
            for mean, leaf in zip(reduction.get(), leaves, strict=True)
        ]
    if donate:
        _tree.poison(grads, keep=results)
    return structure.unflatten(results)


def _as_it_was(mean: Tensor | None, leaf: Any, *, own: bool) -> Any:
    """A mean in the dtype of what it is the mean of, and in its memory where that is ours."""
    if mean is None:
        return leaf if leaf is None or own else leaf.clone()
    return leaf.copy_(mean) if own else mean.to(leaf.dtype)


def on_cpu(group: Any) -> bool:
    """Whether the ranks of `group` can tell each other something without a wait for an
    accelerator: the same on every rank.
    """
    return not traced() and bool(_torch.object_device(group) == "cpu")


def lines_of(name: str, tree: Tree, *, laid: bool) -> list[str]:
    """What must be the same on every rank, a line a leaf; how it is `laid` out in memory too."""
    leaves = _tree.flatten(tree)[0]
    return [
        f"{name}{key and f' {key!r}'}: {_kind(leaf, laid=laid)}"
        for key, leaf in zip(_tree.names(tree), leaves, strict=True)
    ]


def _kind(leaf: Any, *, laid: bool) -> str:
    if not isinstance(leaf, Tensor):
        return described(leaf)
    strides = leaf.stride() if laid and leaf.layout is torch.strided else None
    # Not which device: each rank has another.
    told = _told(leaf.dtype, leaf.shape, strides, leaf.layout, leaf.device.type)
    if isinstance(leaf, DTensor):
        told += f" as {leaf.placements} over {mesh_sizes(leaf.device_mesh)}"
    return told


@functools.lru_cache(maxsize=1024)  # most leaves of a state are like another
def _told(dtype: Any, shape: Any, strides: Any, layout: Any, device: str) -> str:
    return f"{dtype} {tuple(shape)}{f' {strides}' if strides else ''} {layout} on {device}"


def agree(group: Any, check: Callable[[], Any], describe: Callable[[], list[str]]) -> None:
    """Syncs with the host. Raise on every rank of `group` where `check` refuses something on one of
    them, or what they `describe` is not the same.
    """
    refusal: Exception | None = None
    try:
        check()
        lines = describe()
    except Exception as error:  # whatever it is: the others wait for an answer
        refusal, lines = error, [f"{type(error).__name__}: {error}"]
    fingerprint = hashlib.blake2b("\n".join(lines).encode(), digest_size=16).digest()
    device = _torch.object_device(group)
    mine = torch.frombuffer(bytearray(fingerprint), dtype=torch.uint8).to(device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    rows = torch.stack(every).tolist()
    if rows.count(rows[0]) == len(rows):
        if refusal is not None:
            raise refusal
        return
    told: list[Any] = [None] * len(rows)
    dist.all_gather_object(told, (lines, refusal is not None), group=group)
    if refusal is not None:
        raise refusal
    for index, (theirs, refused) in enumerate(told):
        if refused:
            raise ValueError(f"{_rank(group, index)} refused its arguments: {theirs[0]}")
    other = next(index for index, row in enumerate(rows) if row != rows[0])
    pairs = itertools.zip_longest(told[0][0], told[other][0], fillvalue="nothing more")
    here, there = next((a, b) for a, b in pairs if a != b)
    raise ValueError(
        f"the ranks do not hold the same: {_rank(group, 0)} has {here}, {_rank(group, other)} has "
        f"{there}. What they reduce together must agree in names, order, shapes, dtypes and kind "
        "of device. Likely cause: other models or settings on some ranks, or a parameter that has "
        "no gradient (None) on one of them. Fix: one model and one optimizer for all, and zeros "
        "where a gradient is missing."
    )


def _rank(group: Any, index: int) -> str:
    return f"rank {dist.get_global_rank(group, index)}"
