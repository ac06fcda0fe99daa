"""All-reduce of flags and of gradients, and the check that all ranks agree, also in settings."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import itertools
import numbers
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._distributed.buckets import Reduction
from .._distributed.process_group import (
    Group,
    all_reduce,
    as_group,
    is_single_process,
    mesh_sizes,
    naming_other_ranks,
    object_device,
    resolve_group,
)
from .._torch import donation, dtensor
from .._torch.autocast import outside_autocast
from .._torch.tracing import traced
from .._tree import pytree, scalars
from .._tree.matching import flatten_gradients
from .._tree.poison import poisons_donated
from .._tree.pytree import Leaves, Tree, TreeT
from .._tree.scalars import as_flag

T = TypeVar("T")


def all_reduce_found_inf(found_inf: Tensor | bool, group: Group | None = None) -> Tensor:
    """Equal to `any(found_inf on rank for rank in group)`: an overflow of one rank skips the step
    on every rank.

    Communicates, but reads no value on the host.

    Args:
        found_inf: 0-d bool; another dtype counts as True if it is not 0. A Python bool is put on
            the device on which the group communicates.
        group: The process group, by default that of all ranks. Without a process group the result
            is a copy.

    Returns:
        0-d bool on the same device.

    Raises:
        TypeError: `found_inf` is neither a tensor nor a bool.
        ValueError: The tensor is not 0-d. Both raise before it communicates.

    Example:
        >>> import torch
        >>> all_reduce_found_inf(torch.tensor(True))          # no process group: one rank
        tensor(True)

    Source of the rule: Megatron-LM and DeepSpeed (MAX over the ranks). `torch.amp.GradScaler`
    reduces nothing, and ShardedGradScaler forgets it before a fused optimizer, after which ranks
    diverge.
    """
    flag = as_flag(found_inf)
    if is_single_process(group):
        return flag.clone() if flag is found_inf else flag
    group = resolve_group(group)
    of_host = not (isinstance(found_inf, Tensor) or torch.compiler.is_compiling())
    if of_host and isinstance(group, dist.ProcessGroup):
        flag = flag.to(object_device(group))
    return all_reduce(flag.to(torch.int32), "max", group).to(torch.bool)


@outside_autocast()
@poisons_donated("grads")
def all_reduce_grads(
    grads: TreeT,
    group: Group | None = None,
    bucket_size_mb: float = 25,
    check: bool = True,
    donate: bool = False,
) -> TreeT:
    """Equal to `tree_map(lambda *g: sum(g) / len(g), *(grads on rank for rank in group))`, on every
    rank, from one reduction per bucket. Syncs with the host if `check`.

    Each rank divides before the sum, so that a sum overflows only if the mean does; inf and NaN
    reach every rank. On two ranks buckets give the same bits as one leaf at a time; on more ranks
    they may differ by rounding, because backends choose the order of a sum by position.

    Args:
        grads: A pytree of gradients, the same tree on every rank. `None` and DTensors pass through;
            sparse leaves come back dense, and half leaves are summed in float32 and rounded once.
        group: The process group, by default that of all ranks. Without a process group the result
            is a copy.
        bucket_size_mb: Leaves of one dtype and device are sent together, this many MiB at a time,
            each bucket while the next is filled. `inf`: one bucket per dtype.
        check: Exchange 16 bytes that show whether trees, names, shapes, dtypes and kinds of device
            agree, unless compiling. Without the check, trees that differ deadlock.
        donate: `grads` may be overwritten; the caller gives them up. Same bits.

    Returns:
        The mean gradients, in the dtypes of `grads`.

    Raises:
        ValueError: The trees differ, `bucket_size_mb` is not above 0, or the group was destroyed or
            does not hold this rank. With `check` all ranks raise, naming the rank and the first
            leaf.
        TypeError: A leaf is not a gradient.

    Example:
        >>> import torch
        >>> all_reduce_grads({"w": torch.tensor([1.0]), "frozen": None})  # no process group
        {'w': tensor([1.]), 'frozen': None}

    Source of the rule: DistributedDataParallel, which divides first; mmpose's `allreduce_grads`
    (coalesced, in buckets), which sums first.
    """

    def checked_leaves() -> tuple[Leaves, Any]:
        size = scalars.checked_real("bucket_size_mb", bucket_size_mb)
        if not size > 0:
            raise ValueError(
                f"bucket_size_mb must be above 0, got {scalars.short_repr(bucket_size_mb)}. Fix: "
                "25."
            )
        flat = flatten_gradients(grads)
        return flat.leaves, flat.structure

    if is_single_process(group):
        leaves, structure = checked_leaves()
        results = leaves if donate else pytree.clone(leaves)
    else:
        group = as_group(group)
        leaves, structure = agree_on_all_ranks(
            group,
            checked_leaves,
            lambda _: [f"{bucket_size_mb=}", *describe_leaves("grads", grads, with_strides=False)],
            sync=check and not traced(),
        )
        size = float(bucket_size_mb) * 2**20
        reduction = Reduction(leaves, dist.get_world_size(group), group, size)
        for index in reduction.bucket_of:
            reduction.put(index, leaves[index])
        plain = [leaf for leaf in leaves if leaf is not None]
        writable = donate and not traced() and donation.can_write(plain)
        results = [
            _in_dtype_of(leaf, mean, writable=writable)
            for mean, leaf in zip(reduction.get(), leaves, strict=True)
        ]
    return structure.unflatten(results)


def _in_dtype_of(leaf: Any, mean: Tensor | None, *, writable: bool) -> Any:
    """Return the mean in the dtype of the leaf, in its memory if `writable`."""
    if mean is None:
        return leaf if leaf is None or writable else leaf.clone()
    return leaf.detach().copy_(mean) if writable else mean.to(leaf.dtype)


def meets_on_cpu(group: Group | None) -> bool:
    """Return True if the ranks of `group` exchange objects without waiting for an accelerator. The
    answer is the same on every rank.
    """
    return not traced() and object_device(group) == "cpu"


def describe_leaves(name: str, tree: Tree, *, with_strides: bool) -> list[str]:
    """Return one line per leaf with what must agree between ranks, strides if asked for."""
    leaves = pytree.flatten(tree)[0]
    return [
        f"{name}{key and f' {key!r}'}: {_describe_leaf(leaf, with_strides=with_strides)}"
        for key, leaf in zip(pytree.dotted_names(tree), leaves, strict=True)
    ]


def _describe_leaf(leaf: Any, *, with_strides: bool) -> str:
    if not isinstance(leaf, Tensor):
        return describe_setting(leaf)
    strides = leaf.stride() if with_strides and leaf.layout is torch.strided else None
    # Only the type of the device, because each rank has its own.
    text = _describe_metadata(leaf.dtype, leaf.shape, strides, leaf.layout, leaf.device.type)
    if dtensor.is_dtensor(leaf):
        text += f" as {leaf.placements} over {mesh_sizes(leaf.device_mesh)}"
    return text


@functools.lru_cache(maxsize=1024)  # many leaves have the same metadata
def _describe_metadata(dtype: Any, shape: Any, strides: Any, layout: Any, device: str) -> str:
    return f"{dtype} {tuple(shape)}{f' {strides}' if strides else ''} {layout} on {device}"


def agree_on_all_ranks(
    group: Group | None, check: Callable[[], T], describe: Callable[[T], list[str]], *, sync: bool
) -> T:
    """Return the result of `check`. With `sync`, raise on every rank of `group` if `check` raises
    on one of them, or if the lines of `describe(result)` differ between ranks. Syncs with the
    host if `sync`.
    """
    if not sync:
        return check()
    refusal: Exception | None = None
    try:
        result = check()
        lines = describe(result)
    except Exception as error:  # any, because the other ranks wait for an answer
        refusal, lines = error, [f"{type(error).__name__}: {error}"]
    fingerprint = hashlib.blake2b("\n".join(lines).encode(), digest_size=16).digest()
    device = object_device(group)
    local = torch.frombuffer(bytearray(fingerprint), dtype=torch.uint8).to(device)
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    with naming_other_ranks():
        dist.all_gather(gathered, local, group=group)
    rows = torch.stack(gathered).tolist()
    if rows.count(rows[0]) == len(rows):
        if refusal is not None:
            raise refusal
        return result
    answers: list[Any] = [None] * len(rows)
    with naming_other_ranks():
        dist.all_gather_object(answers, (lines, refusal is not None), group=group)
    if refusal is not None:
        raise refusal
    for index, (others, refused) in enumerate(answers):
        if refused:
            raise ValueError(f"{_rank_name(group, index)} refused its arguments: {others[0]}")
    other = next(index for index, row in enumerate(rows) if row != rows[0])
    pairs = itertools.zip_longest(answers[0][0], answers[other][0], fillvalue="nothing more")
    first, second = next((a, b) for a, b in pairs if a != b)
    raise ValueError(
        f"the ranks do not hold the same: {_rank_name(group, 0)} has {first}, "
        f"{_rank_name(group, other)} has {second}. Likely cause: other models or settings on some "
        "ranks, or a parameter without a gradient (None). Fix: one model and one optimizer for "
        "all, and zeros for a missing gradient."
    )


def _rank_name(group: Group | None, index: int) -> str:
    return f"rank {dist.get_process_group_ranks(group)[index]}"


# ---- settings as text, equal in every process with the same settings -----------------------------

_MAX_VALUES = 64  # a tensor with more is compared by dtype and shape only


def describe_setting(setting: Any) -> str:
    """Return what can be compared of `setting` between processes. Numbers, strings, dtypes,
    containers and small tensors on a CPU have their values; functions their qualified name; rules,
    optimizers and functools.partial their fields. Other objects, and tensors on an accelerator,
    whose values would need a sync, have their type only.
    """
    return _text(setting, ())


def _text(value: Any, parents: tuple[int, ...]) -> str:
    if value is None or isinstance(value, (bool, str, bytes, complex, torch.dtype)):
        return repr(value)
    if isinstance(value, numbers.Integral):
        return repr(int(value))
    if isinstance(value, numbers.Real):  # 1 and 1.0 are the same setting
        number = float(value)
        return repr(int(number) if number.is_integer() else number)
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        return f"{value.__module__}.{value.__qualname__}"
    if id(value) in parents:  # it contains itself
        return "..."
    parents = (*parents, id(value))
    if isinstance(value, Mapping):
        items = (f"{_text(k, parents)}: {_text(v, parents)}" for k, v in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, (set, frozenset)):  # the order differs between processes
        return f"{{{', '.join(sorted(_text(item, parents) for item in value))}}}"
    if isinstance(value, (list, tuple)):
        name = type(value).__name__ if hasattr(value, "_fields") else ""
        return f"{name}({', '.join(_text(item, parents) for item in value)})"
    if isinstance(value, functools.partial):
        return _text((value.func, value.args, sorted(value.keywords.items())), parents)
    if isinstance(value, types.MethodType):
        return f"{_text(value.__self__, parents)}.{_text(value.__func__, parents)}"
    return _object(value, parents)


def _tensor(tensor: Tensor) -> str:
    kind = f"{tensor.dtype} {tuple(tensor.shape)}"
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not plain or tensor.device.type != "cpu" or tensor.numel() > _MAX_VALUES:
        return kind
    return f"{kind} {tensor.tolist()}"


def _object(value: Any, parents: tuple[int, ...]) -> str:
    """Return the class and the fields of a rule, an optimizer or another object with settings. If
    it has an attribute `agreed_settings`, only that is compared: other fields may hold what one
    process saw.
    """
    name = type(value).__qualname__
    if hasattr(value, "agreed_settings"):
        return f"{name}{_text(value.agreed_settings, parents)}"
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        fields = {key: getattr(value, key, None) for key in names}
    elif _has_settings(value):
        fields = dict(getattr(value, "__dict__", {}))
    else:
        return name
    settings = (f"{key}={_text(setting, parents)}" for key, setting in fields.items())
    return f"{name}({', '.join(settings)})"


def _has_settings(value: Any) -> bool:
    """Return True if the fields of an object are settings, unlike those of a logger or a lock."""
    methods = [callable(getattr(value, name, None)) for name in ("init", "update", "step")]
    of_a_user = not type(value).__module__.startswith(("torch.", "builtins", "logging"))
    return of_a_user and (any(methods) or callable(value)) and not inspect.ismodule(value)
