"""Arithmetic over many tensors, by foreach, fused or plain ops.

Plain ops while compiling, where both kinds fuse the same, and inside torch.func transforms, which
have no rule for foreach.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._torch import columns as _columns
from .._torch import private as _torch
from .._torch.private import foreach
from .._tree import tree as _tree
from .._tree.tree import Leaves


def is_dense(leaf: Tensor) -> bool:
    """Whether foreach ops and their fast paths take `leaf`."""
    return leaf.layout is torch.strided and not isinstance(leaf, DTensor)


def divide(leaves: Sequence[Tensor | None], divisor: Tensor, *, donate: bool) -> Leaves:
    """Every leaf over a 0-d tensor, float16 in float32; in place where `donate` allows it or the
    leaf was just widened.
    """
    wide = at_least_float32_list(leaves, apart=True)
    owned = [donate or new is not old for new, old in zip(wide, leaves, strict=True)]
    return _each(torch.div, foreach.div, foreach.div_, wide, divisor, owned)


def multiply(leaves: Sequence[Tensor | None], factor: Tensor, *, donate: bool) -> Leaves:
    """Every leaf times a 0-d tensor, in the leaf's own dtype; in place where `donate` allows it."""
    return _each(torch.mul, foreach.mul, foreach.mul_, leaves, factor, [donate] * len(leaves))


def _each(
    plain: Callable[..., Tensor],
    listed: Callable[..., Any],
    listed_: Callable[..., Any],
    leaves: Sequence[Tensor | None],
    operand: Tensor,
    owned: Sequence[bool],
) -> Leaves:
    results: Leaves = list(leaves)
    apart: list[int] = []
    in_place: list[int] = []
    alone = _tree.writable(leaves) if any(owned) else owned
    mine = [a and b for a, b in zip(owned, alone, strict=True)]
    # foreach ops have no derivative by a 0-d operand
    plain_ops = _tree.traced() or is_on_a_graph([*leaves, operand])
    for index, leaf in enumerate(leaves):
        if leaf is None:
            continue
        if (
            plain_ops
            or leaf.ndim == 0
            or leaf.is_complex()
            or leaf.dtype.itemsize == 1
            or not is_dense(leaf)
        ):
            results[index] = on_values(
                functools.partial(_in_own_dtype, plain, operand=operand), leaf
            )
        else:
            (in_place if mine[index] else apart).append(index)
    if apart:
        for index, result in zip(
            apart, listed([leaves[index] for index in apart], operand), strict=True
        ):
            results[index] = result
    if in_place:
        listed_([leaves[index] for index in in_place], operand)
    if torch.compiler.is_compiling():
        results = [
            leaf.copy_(new) if own and leaf is not None else new
            for leaf, new, own in zip(leaves, results, mine, strict=True)
        ]
    return results


# elements: what one operation brought into a CPU's cache, the next still finds there
_BATCH = 2**20


def blend(
    old: Sequence[Tensor | None],
    new: Sequence[Tensor | None],
    share: Tensor,
    good: Tensor,
    *,
    owned: Sequence[bool],
    scale: Tensor | None = None,
) -> Leaves:
    """`old * (1 - share) + new / scale * share` where `good`, else `old`; written into those of
    `old` that are `owned`.

    The textbook `old + (new - old) * share` overflows on opposite signs. `share` is 0-d, and 0
    where not `good`. A `None` in `new` stands for 0. `new` is never written into.
    """
    results: Leaves = list(old)
    lists: dict[torch.dtype, list[int]] = {}
    for index, (a, n) in enumerate(zip(old, new, strict=True)):
        if a is None:
            continue
        if n is not None and not _tree.traced() and _takes_fused(a, n, share):
            lists.setdefault(a.dtype, []).append(index)
        else:
            results[index] = _blend_plain(a, n, share, good, scale)
    foreign = [index for places in lists.values() for index in places if not owned[index]]
    copies = _columns.clone([old[index] for index in foreign])  # type: ignore[misc]
    for index, copy in zip(foreign, copies, strict=True):
        results[index] = copy
    if torch.compiler.is_compiling():
        results = [
            a.copy_(result) if own and a is not None else result
            for a, result, own in zip(old, results, owned, strict=True)
        ]
    for dtype, places in lists.items():
        pairs: Any = [(results[index], new[index]) for index in places]
        rows = [(a, _laid_out_as(a, n)) for a, n in pairs]
        factor, bad = share.to(dtype), (~good).to(torch.float32)
        keep = (1 - share).to(dtype)
        for targets, news in _batches(rows):
            foreach.mul_(targets, keep)
            news = news if scale is None else list(foreach.div(news, scale))
            _torch.masked_add_(targets, news, factor, bad)
    return results


def mix(
    sums: Leaves | None, new: Leaves, share: float | Tensor, counts: Tensor | None = None
) -> Leaves:
    """`sums + new * share`, written into `sums`; the first time `new * share`, in memory of its
    own. At least in float32.

    One pass. Shares whose sum is 1 cannot overflow but for rounding. A `share` that is a tensor is
    not read; it comes with the flag `counts`, and what does not count may be NaN. Uses up the list
    `new`, but writes into none of its tensors.
    """
    if _tree.traced() or (isinstance(share, Tensor) and is_on_a_graph([share])):
        return [
            _mixed(a, n, share, counts) for a, n in zip(sums or [None] * len(new), new, strict=True)
        ]
    if isinstance(share, Tensor):
        return _mix_unread(sums, new, share, counts)
    if sums is None:
        return _begun(new, share)
    if all(map(is_dense, new)):
        foreach.add_(sums, new, alpha=share)
        return sums
    return [_mixed(a, n, share, None) for a, n in zip(sums, new, strict=True)]


def _mix_unread(sums: Leaves | None, new: Leaves, share: Tensor, counts: Any) -> Leaves:
    sums = sums or [torch.zeros_like(n, dtype=wide_dtype(n.dtype)) for n in new]
    lists: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for index, (a, n) in enumerate(zip(sums, new, strict=True)):
        if _takes_fused(a, n, share):
            targets, news = lists.setdefault(a.dtype, ([], []))
            targets.append(a)
            news.append(_laid_out_as(a, n))
        else:
            sums[index] = _mixed(a, n, share, counts)
    for dtype, (targets, news) in lists.items():
        _torch.masked_add_(targets, news, share.to(dtype), (~counts).to(torch.float32))
    return sums


def _begun(new: Leaves, share: float) -> Leaves:
    """`new * share`; on a CPU a little at a time, in the memory of what was read before it: fresh
    memory is what is slow.
    """
    results: Leaves = []
    most = _BATCH // 8 if new and new[0].is_cpu else math.inf
    new.reverse()
    while new:
        batch, size = [], 0.0
        while new and size < most:
            batch.append(new.pop())
            size += batch[-1].numel()
        results += foreach.mul([n.to(wide_dtype(n.dtype)) for n in batch], share)
    return results


def _takes_fused(a: Tensor, n: Tensor, share: Tensor) -> bool:
    """Whether torch's fused kernels, which ignore strides, graphs and lazy negation, give the right
    result.
    """
    exact = a.dtype is torch.float32 or (a.dtype is torch.float64 and a.is_cpu)
    gapless = (
        is_dense(a)
        and is_dense(n)
        and _columns.is_gapless(a)
        and n.is_floating_point()
        and not (a.is_neg() or n.is_neg())
    )
    return exact and gapless and (a.is_cpu or a.is_cuda) and not is_on_a_graph([a, n, share])


def _laid_out_as(a: Tensor, n: Tensor) -> Tensor:
    alike = n.dtype is a.dtype and _columns.walked_together(a, n)
    return n if alike else torch.empty_like(a).copy_(n)


def is_on_a_graph(leaves: Sequence[Tensor | None]) -> bool:
    """Whether torch.autograd would differentiate through what is computed of these."""
    return torch.is_grad_enabled() and any(
        leaf is not None and leaf.requires_grad for leaf in leaves
    )


def _batches(pairs: list[tuple[Tensor, Tensor]]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """The gapless tensors of `pairs` in batches of about `_BATCH` elements, large ones in
    pieces; where launches are what costs, in one.
    """
    if _columns.counts_launches(pairs[0][0]):
        yield [target for target, _ in pairs], [new for _, new in pairs]
        return
    targets: list[Tensor] = []
    news: list[Tensor] = []
    size = 0
    for pair in pairs:
        for target, new in cut(pair, _BATCH):
            targets.append(target)
            news.append(new)
            size += target.numel()
            if size >= _BATCH:
                yield targets, news
                targets, news, size = [], [], 0
    if targets:
        yield targets, news


def cut(tensors: Sequence[Tensor], size: int) -> list[tuple[Tensor, ...]]:
    """Dense tensors that are laid out alike in pieces of at most `size` elements, those of one
    place together.
    """
    if tensors[0].numel() <= size:
        return [tuple(tensors)]
    return list(
        zip(*(torch.split(in_memory_order(tensor), size) for tensor in tensors), strict=True)
    )


def in_memory_order(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in one row, whatever its layout."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def _blend_plain(
    a: Tensor, n: Tensor | None, share: Tensor, good: Tensor, scale: Tensor | None
) -> Tensor:
    wide = wide_dtype(a.dtype)
    kept = a.to(wide) * (1 - share).to(real_dtype(wide))
    if n is None:
        return kept.to(a.dtype)
    mean = _mixed(kept, n, share, good, scale)
    if a.dtype is torch.bfloat16:
        # what is finite must not round to inf
        mean = mean.clamp(-torch.finfo(a.dtype).max, torch.finfo(a.dtype).max)
    return mean.to(a.dtype)


def _mixed(
    a: Tensor | None,
    n: Tensor,
    share: float | Tensor,
    counts: Tensor | None,
    scale: Tensor | None = None,
) -> Tensor:
    """`a + n / scale * share` where `n` counts, in plain ops."""
    wide = wide_dtype(n.dtype) if a is None else a.dtype
    factor: Any = share.to(real_dtype(wide)) if isinstance(share, Tensor) else share

    def counted(values: Tensor) -> Tensor:
        values = values.to(wide)
        values = values if scale is None else _in_own_dtype(torch.div, values, operand=scale)
        values = values if counts is None else torch.where(counts, values, 0)
        return values.mul(factor).to(wide)

    added = on_values(counted, n)
    if a is None:
        return added
    # torch takes dense + sparse in this order only.
    return added + a if added.layout is torch.strided else a + added


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the parts of what has this dtype."""
    return {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)


def _in_own_dtype(plain: Callable[..., Tensor], leaf: Tensor, *, operand: Tensor) -> Tensor:
    if leaf.is_complex():
        # Complex division is not exact where real division is: 0 / 2**-149 is NaN.
        return torch.view_as_complex(
            plain(torch.view_as_real(leaf.resolve_conj().resolve_neg()), operand)
        )
    own = leaf.to(torch.float32) if leaf.dtype.itemsize == 1 else leaf
    # Two 0-d tensors promote to the wider dtype, so a 0-d bfloat16 leaf would come back as float32.
    result: Tensor = (
        plain(own.reshape(1), operand).reshape(()) if own.ndim == 0 else plain(own, operand)
    )
    return result.to(leaf.dtype)


def on_values(fn: Callable[[Tensor], Tensor], leaf: Tensor) -> Tensor:
    """`fn` on a dense leaf, or on the stored values of a sparse one, whose duplicate indices are
    then summed.
    """
    if leaf.layout is torch.strided:
        return fn(leaf)
    if leaf.layout is torch.sparse_coo:
        values = fn(_torch.values(leaf))
        return torch.sparse_coo_tensor(
            _torch.indices(leaf).clone(),
            values,
            leaf.shape,
            device=leaf.device,
            is_coalesced=leaf.is_coalesced(),
            check_invariants=False,
        ).coalesce()
    return torch.sparse_compressed_tensor(
        *_compressed_indices(leaf),
        fn(leaf.values()),
        leaf.shape,
        layout=leaf.layout,
        device=leaf.device,
        check_invariants=False,
    )


def _compressed_indices(leaf: Tensor) -> tuple[Tensor, Tensor]:
    if leaf.layout in (torch.sparse_csr, torch.sparse_bsr):
        return leaf.crow_indices().clone(), leaf.col_indices().clone()
    return leaf.ccol_indices().clone(), leaf.row_indices().clone()


def dense(leaf: Tensor) -> Tensor:
    """`leaf` as a dense tensor. Rows of a sparse one that stand there twice are summed at least in
    float32: in half precision their sum may be beyond its range.
    """
    if leaf.layout is torch.strided:
        return leaf
    return leaf.to(wide_dtype(leaf.dtype)).to_dense()


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """`dtype`, or float32 where that is wider; torch promotes no float8."""
    return torch.float32 if dtype.itemsize == 1 else torch.promote_types(dtype, torch.float32)


def at_least_float32(leaf: Tensor) -> Tensor:
    """float16 and narrower in float32, complex32 in complex64; bfloat16 has float32's range and
    stays.
    """
    narrow = (
        leaf.is_floating_point() and leaf.dtype.itemsize <= 2 and leaf.dtype is not torch.bfloat16
    )
    if narrow or leaf.dtype is torch.complex32:
        return on_values(
            lambda values: values.to(torch.float32 if narrow else torch.complex64), leaf
        )
    return leaf


def at_least_float32_list(leaves: Sequence[Tensor | None], *, apart: bool) -> Leaves:
    """`at_least_float32` of each; `apart` as in `cast_list`."""
    if not _counts_launches(leaves):
        return [None if leaf is None else at_least_float32(leaf) for leaf in leaves]
    halves = [
        leaf if leaf is not None and leaf.dtype is torch.float16 and is_dense(leaf) else None
        for leaf in leaves
    ]
    wide = cast_list(halves, torch.float32, apart=apart)
    return [
        new if leaf is None or new is not None else at_least_float32(leaf)
        for leaf, new in zip(leaves, wide, strict=True)
    ]


def _counts_launches(leaves: Sequence[Tensor | None]) -> bool:
    """Whether launches are what `leaves` cost; they stand on one device."""
    first = next((leaf for leaf in leaves if leaf is not None), None)
    return first is not None and _columns.counts_launches(first)


def cast_list(
    leaves: Sequence[Tensor | None], dtypes: torch.dtype | Sequence[torch.dtype], *, apart: bool
) -> Leaves:
    """`saturating` of each; on an accelerator in a few operators for all of one kind. `apart`: with
    memory for each, as what may be donated later needs it.
    """
    if isinstance(dtypes, torch.dtype):
        dtypes = [dtypes] * len(leaves)
    if not _counts_launches(leaves):
        return [
            None if leaf is None else saturating(leaf, dtype)
            for leaf, dtype in zip(leaves, dtypes, strict=True)
        ]
    results: Leaves = list(leaves)
    listed = not (_tree.traced() or is_on_a_graph(leaves))
    columns: dict[Any, list[int]] = {}
    for index, (leaf, dtype) in enumerate(zip(leaves, dtypes, strict=True)):
        if leaf is None or leaf.dtype is dtype:
            continue
        if listed and _takes_lists(leaf) and dtype.is_floating_point and dtype.itemsize > 1:
            columns.setdefault((leaf.device, leaf.dtype, dtype), []).append(index)
        else:
            results[index] = saturating(leaf, dtype)
    for (_, old, new), places in columns.items():
        column: Any = [leaves[index] for index in places]
        wanted = (
            [torch.empty_like(leaf, dtype=new) for leaf in column]
            if apart
            else _columns.room(column, new)
        )
        foreach.copy_(wanted, _bounded(column, old, new))
        for index, cast in zip(places, wanted, strict=True):
            results[index] = cast
    return results


def _takes_lists(leaf: Tensor) -> bool:
    """Whether launches are what `leaf` costs, and list kernels walk it by one pointer."""
    return (
        _columns.counts_launches(leaf)
        and leaf.is_floating_point()
        and leaf.dtype.itemsize > 1
        and _columns.is_plain(leaf)
        and _columns.is_gapless(leaf)
    )


def _bounded(column: list[Any], old: torch.dtype, new: torch.dtype) -> Any:
    """What is finite within the range of `new`."""
    limit = _limit(old, new)
    if limit is None:
        return column
    bounded = foreach.clamp_min(column, -limit)
    foreach.clamp_max_(bounded, limit)
    # inf again where it was; of what is finite too little to change a bit, 4 of 65280 at most
    foreach.add_(bounded, column, alpha=torch.finfo(old).tiny)
    return bounded


def _limit(old: torch.dtype, new: torch.dtype) -> float | None:
    """The largest number of `old` within the range of `new`; None where all of its are."""
    most = torch.finfo(new).max
    if most >= torch.finfo(old).max:
        return None
    part, exponent = math.frexp(most)
    step = torch.finfo(old).eps / 2  # 65504 is no bfloat16: it would round to 65536
    return math.ldexp(part // step * step, exponent)


def saturating(leaf: Tensor, dtype: torch.dtype) -> Tensor:
    """`leaf` in another dtype: what is finite stays finite where that is narrower, what is not
    stays as it is.
    """
    if leaf.dtype is dtype:
        return leaf
    limit = None if leaf.is_complex() else _limit(leaf.dtype, dtype)
    if limit is None:
        return leaf.to(dtype)
    return on_values(
        lambda values: torch.where(torch.isfinite(values), values.clamp(-limit, limit), values).to(
            dtype
        ),
        leaf,
    )


def clamp(leaf: Tensor, bound: float | Tensor, *, in_place: bool = False) -> Tensor:
    """`leaf` between plus and minus `bound`; NaN stays NaN."""
    # A bound beyond the dtype's range is no bound, but torch refuses it.
    limit: Any = (
        bound.to(leaf)
        if isinstance(bound, Tensor)
        else min(float(bound), torch.finfo(leaf.dtype).max)
    )
    if leaf.dtype.itemsize == 1:  # in which torch does not compute
        return clamp(leaf.to(torch.float32), bound).to(leaf.dtype)
    if in_place:
        return leaf.clamp_(-limit, limit)
    summed = leaf.coalesce() if leaf.layout is torch.sparse_coo else leaf
    return on_values(lambda values: values.clamp(-limit, limit), summed)


def clamp_list(
    leaves: Sequence[Tensor | None], bound: float | Tensor, owned: Sequence[bool] = ()
) -> Leaves:
    """`clamp` of each, in place where it is `owned`; on an accelerator in a few operators for all
    leaves of one dtype.
    """
    results: Leaves = list(leaves)
    owned = owned or [False] * len(leaves)
    listed = not (_tree.traced() or is_on_a_graph([*leaves, *_tree.tensors(bound)]))
    columns: dict[Any, list[int]] = {}
    for index, (leaf, own) in enumerate(zip(leaves, owned, strict=True)):
        if leaf is None:
            continue
        if listed and _takes_lists(leaf):
            columns.setdefault((leaf.device, leaf.dtype, own), []).append(index)
        else:
            results[index] = clamp(leaf, bound, in_place=own)
    for (_, dtype, own), places in columns.items():
        column: Any = [leaves[index] for index in places]
        if isinstance(bound, Tensor):
            # A list of 0-d tensors would be a launch for each.
            low: Any = _columns.room(column, dtype, -bound.to(column[0]))
        else:
            low = -min(bound, torch.finfo(dtype).max)
        if own:
            foreach.clamp_min_(column, low)
        else:
            column = foreach.clamp_min(column, low)
        foreach.clamp_max_(column, foreach.neg(low) if isinstance(low, list) else -low)
        for index, leaf in zip(places, column, strict=True):
            results[index] = leaf
    return results


def widest_float(device: torch.device) -> torch.dtype:
    """For a handful of 0-d tensors, whose precision costs nothing."""
    return torch.float32 if device.type == "mps" else torch.float64


# tensors: up to here a compiler's own kernels are faster than one node, beyond it takes minutes to
# make them
INLINE = 16
