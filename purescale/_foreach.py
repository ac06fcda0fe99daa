"""Arithmetic over many tensors. The only module that chooses between foreach, fused and plain ops.

Plain ops while compiling, where both kinds fuse the same, and inside torch.func transforms, which
have no rule for foreach.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from . import _tree
from ._tree import Leaves


def is_dense(leaf: Tensor) -> bool:
    """Whether foreach ops and their fast paths take `leaf`."""
    return leaf.layout is torch.strided and not isinstance(leaf, DTensor)


def divide(leaves: Sequence[Tensor | None], divisor: Tensor, *, donate: bool) -> Leaves:
    """Every leaf over a 0-d tensor, float16 in float32; in place where `donate` allows it or the
    leaf was just widened.
    """
    wide = [None if leaf is None else at_least_float32(leaf) for leaf in leaves]
    owned = [donate or new is not old for new, old in zip(wide, leaves, strict=True)]
    return _each(torch.div, torch._foreach_div, torch._foreach_div_, wide, divisor, owned)


def multiply(leaves: Sequence[Tensor | None], factor: Tensor, *, donate: bool) -> Leaves:
    """Every leaf times a 0-d tensor, in the leaf's own dtype; in place where `donate` allows it."""
    return _each(
        torch.mul, torch._foreach_mul, torch._foreach_mul_, leaves, factor, [donate] * len(leaves)
    )


def _each(
    plain: Callable[..., Tensor],
    foreach: Callable[..., Any],
    foreach_: Callable[..., Any],
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
            apart, foreach([leaves[index] for index in apart], operand), strict=True
        ):
            results[index] = result
    if in_place:
        foreach_([leaves[index] for index in in_place], operand)
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
    lists: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for index, (a, n, own) in enumerate(zip(old, new, owned, strict=True)):
        if a is None:
            continue
        if n is not None and not _tree.traced() and _takes_fused(a, n, share):
            results[index] = a if own else a.clone()
            lists.setdefault(a.dtype, []).append((results[index], _laid_out_as(a, n)))
        else:
            results[index] = _blend_plain(a, n, share, good, scale)
    if torch.compiler.is_compiling():
        results = [
            a.copy_(result) if own and a is not None else result
            for a, result, own in zip(old, results, owned, strict=True)
        ]
    for dtype, rows in lists.items():
        factor, bad = share.to(dtype), (~good).to(torch.float32)
        keep = (1 - share).to(dtype)
        for targets, news in _batches(rows):
            torch._foreach_mul_(targets, keep)
            news = news if scale is None else list(torch._foreach_div(news, scale))
            add_unless(bad, targets, news, factor)
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
        torch._foreach_add_(sums, new, alpha=share)
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
        add_unless((~counts).to(torch.float32), targets, news, share.to(dtype))
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
        results += torch._foreach_mul([n.to(wide_dtype(n.dtype)) for n in batch], share)
    return results


def add_unless(
    bad: Tensor | None, targets: list[Tensor], news: list[Tensor], factor: float | Tensor
) -> None:
    """`target += new * factor` in one pass, left out where `bad`, a flag in float32: the one list
    kernel that can leave NaN behind.
    """
    settings = {
        "weight_decay": 0.0,
        "momentum": 0.0,
        "dampening": 0.0,
        "nesterov": False,
        "maximize": False,
        "is_first_step": False,
    }
    kernel: Any = torch._fused_sgd_
    kernel(targets, news, [], lr=-factor, found_inf=bad, **settings)


def _takes_fused(a: Tensor, n: Tensor, share: Tensor) -> bool:
    """Whether torch's fused kernels, which ignore strides, graphs and lazy negation, give the right
    result.
    """
    exact = a.dtype is torch.float32 or (a.dtype is torch.float64 and a.is_cpu)
    contiguous = (
        is_dense(a)
        and is_dense(n)
        and a.is_contiguous()
        and n.is_floating_point()
        and not (a.is_neg() or n.is_neg())
    )
    return exact and contiguous and (a.is_cpu or a.is_cuda) and not is_on_a_graph([a, n, share])


def _laid_out_as(a: Tensor, n: Tensor) -> Tensor:
    return n if n.dtype is a.dtype and n.is_contiguous() else torch.empty_like(a).copy_(n)


def is_on_a_graph(leaves: Sequence[Tensor | None]) -> bool:
    """Whether torch.autograd would differentiate through what is computed of these."""
    return torch.is_grad_enabled() and any(
        leaf is not None and leaf.requires_grad for leaf in leaves
    )


def _batches(pairs: list[tuple[Tensor, Tensor]]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """The contiguous tensors of `pairs` in batches of about `_BATCH` elements, large ones in
    pieces.
    """
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
    kept = a.to(wide) * (1 - share).to(_real(wide))
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
    factor: Any = share.to(_real(wide)) if isinstance(share, Tensor) else share

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


def _real(dtype: torch.dtype) -> torch.dtype:
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
        values = fn(leaf._values())
        return torch.sparse_coo_tensor(
            leaf._indices().clone(),
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


def saturating(leaf: Tensor, dtype: torch.dtype) -> Tensor:
    """`leaf` in another dtype: what is finite stays finite where that is narrower, what is not
    stays as it is.
    """
    if leaf.dtype is dtype:
        return leaf
    limit = torch.finfo(dtype).max
    if leaf.is_complex() or limit >= torch.finfo(leaf.dtype).max:
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


def clamp_list(leaves: Sequence[Tensor], bound: float | Tensor) -> list[Tensor]:
    """`clamp` of dense leaves, out of place."""
    if isinstance(bound, Tensor) or _tree.traced() or leaves[0].is_cpu:
        return [clamp(leaf, bound) for leaf in leaves]
    limit = min(float(bound), torch.finfo(leaves[0].dtype).max)
    clamped = torch._foreach_clamp_min(list(leaves), -limit)
    torch._foreach_clamp_max_(clamped, limit)
    return list(clamped)


def widest_float(device: torch.device) -> torch.dtype:
    """For a handful of 0-d tensors, whose precision costs nothing."""
    return torch.float32 if device.type == "mps" else torch.float64


def stored_values(leaf: Tensor) -> Tensor:
    """What a leaf stores, as real numbers: a sparse leaf's summed values, a complex leaf's two
    parts.
    """
    if leaf.layout is not torch.strided:
        leaf = leaf.coalesce().values() if leaf.layout is torch.sparse_coo else leaf.values()
    if leaf.dtype.itemsize == 1:
        leaf = leaf.to(torch.float32)
    return torch.view_as_real(leaf.resolve_conj().resolve_neg()) if leaf.is_complex() else leaf


def full(value: Tensor) -> Tensor:
    """A reduction of a sharded DTensor is partial until it is gathered; on any other tensor this
    does nothing.
    """
    return value.full_tensor() if isinstance(value, DTensor) else value


# tensors: up to here a compiler's own kernels are faster than one node, beyond it takes minutes to
# make them
INLINE = 16


class Extent(NamedTuple):
    """How large some leaves are."""

    # The largest magnitude or a bound, one a dtype, at least float32; NaN if there is one.
    tops: list[Tensor]
    norm: Tensor | None  # in the widest dtype of the device
    fit_over: Tensor | None = None  # a usable scale over which they are known to be finite


def extent(
    leaves: Sequence[Tensor | None],
    device: torch.device,
    norm_type: float | None = None,
    scale: Tensor | None = None,
    *,
    dense: bool = False,
    exact: bool = False,
) -> Extent:
    """The extent of `leaves`, from one read of them and with no host sync; the norm where a
    `norm_type` asks for it.

    `scale`: what they will be divided by. `dense`: they are all known to be dense, real and there.
    `exact`: the largest magnitudes themselves, where a bound may be faster.
    """
    if dense and not _tree.traced():
        with torch.no_grad():
            quick = _quick_extent(leaves, norm_type, scale, exact)  # type: ignore[arg-type]
        if quick is not None:
            return quick
    plain = (
        _tree.under_transform()
        or is_on_a_graph(leaves)
        or (torch.compiler.is_compiling() and len(leaves) <= INLINE)
    )
    power = None if norm_type is None or math.isinf(norm_type) else norm_type
    tops: list[Tensor] = []
    norms: list[Tensor] = []
    values: list[Tensor] = []
    with contextlib.nullcontext() if plain else torch.no_grad():
        for leaf in leaves:
            if leaf is None or leaf.numel() == 0:
                continue
            value = stored_values(leaf)
            if value.numel() == 0:
                continue
            if leaf.is_complex() and norm_type not in (None, 2):
                # a complex number counts with its magnitude
                norms.append(full(_norm(leaf.abs(), norm_type)))
                tops.append(at_least_float32(full(value.abs().amax())))
            elif plain or isinstance(value, DTensor):
                tops.append(at_least_float32(full(value.abs().amax())))
                norms += [] if power is None else [full(_norm(value, power))]
            else:
                values.append(value)
        if values and not tops and not torch.compiler.is_compiling():
            quick = None if plain or dense else _quick_extent(values, norm_type, scale, exact)
            if quick is not None:
                return quick
        if values:
            found = (
                _extent_node(values, power)
                if torch.compiler.is_compiling()
                else _extent(values, power)
            )
            tops += found if power is None else found[:-1]
            norms += [] if power is None else found[-1:]
        if norm_type is None:
            return Extent(tops, None)
        wide = widest_float(device)
        if math.isinf(norm_type):
            norms += [top.to(wide) for top in tops]
        if not norms:
            return Extent(tops, torch.zeros((), dtype=wide, device=device))
        return Extent(tops, _norm(torch.stack(norms), norm_type) if len(norms) > 1 else norms[0])


def _quick_extent(
    dense: Sequence[Tensor], norm_type: float | None, scale: Tensor | None, exact: bool = False
) -> Extent | None:
    """On a CPU: the extent from the sum of squares, the fastest read there is, where that sum says
    enough.

    It is looked at here, and nowhere else: on a CPU, where nothing is traced, to read a number
    waits for nothing.
    """
    if norm_type not in ((2,) if exact else (None, 2)) or not dense or not dense[0].is_cpu:
        return None
    if not set(map(type, dense)) <= {Tensor, torch.nn.Parameter}:
        return None  # a subclass may hold no numbers to look at
    half = [value.float() for value in dense if value.dtype.itemsize < 4]
    wide = [value for value in dense if value.dtype.itemsize >= 4] if half else dense
    rows = [row for same in _by_dtype([*wide, *half]) for row in _rows(same)]
    squares: list[Tensor] = []
    ends: list[Tensor] = []
    for row in rows:
        squares.append(torch.dot(row, row))
        ends += torch.aminmax(row) if exact else ()  # while it is in the cache
    count = sum(map(Tensor.numel, rows))
    alike = len({square.dtype for square in squares}) == 1
    total = (
        torch.stack(squares if alike else [square.double() for square in squares])
        .double()
        .sum()
        .item()
    )
    divisor = 1.0 if scale is None else scale.item()
    bound = math.sqrt(total) if total >= 0 else math.nan  # no element is larger
    usable = 0 < divisor < math.inf and bound / divisor < torch.finfo(torch.float32).max
    # Squares below float32's range are lost; what they could add to a sum above this is less than
    # its rounding.
    if not usable or (norm_type == 2 and total < count * 2.0**-100):
        return None  # inf or NaN, or finite numbers whose squares are not: the exact way tells
    top = torch.full((), bound, dtype=torch.float64, device="cpu")
    tops = [torch.stack(list(same)).abs().amax() for same in _by_dtype(ends)] if ends else [top]
    return Extent(tops, top if norm_type == 2 else None, scale)


def _by_dtype(values: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    dtypes = dict.fromkeys(value.dtype for value in values)
    return (
        [values]
        if len(dtypes) == 1
        else [[value for value in values if value.dtype is dtype] for dtype in dtypes]
    )


def _rows(values: Sequence[Tensor]) -> list[Tensor]:
    """The elements of `values` in rows, small ones put together, large ones cut."""
    sizes = list(map(Tensor.numel, values))
    small = [value for value, size in zip(values, sizes, strict=True) if size <= SMALL]
    parts = [small[start : start + 1024] for start in range(0, len(small), 1024)]
    rows = [
        torch.cat(part) if {value.ndim for value in part} == {1} else flat(part) for part in parts
    ]
    for value, size in zip(values, sizes, strict=True) if len(small) < len(values) else ():
        if size > SMALL:
            row = value.view(-1) if value.is_contiguous() else value.reshape(-1)
            rows += [row] if size <= _PIECE else torch.split(row, _PIECE)
    return rows


def _extent(dense: Sequence[Tensor], power: float | None) -> list[Tensor]:
    """The largest magnitude of each dtype, in the order in which they come, and where there is a
    `power` the norm.
    """
    tops: list[Tensor] = []
    norms: list[Tensor] = []
    if not dense[0].is_cpu:  # an operation costs by itself there, however small
        for values in map(list, _by_dtype(dense)):
            tops.append(at_least_float32(torch.stack(torch._foreach_norm(values, math.inf)).amax()))
            if power is not None:
                norms.append(_norm_of_list(values, power))
        return (
            tops
            if power is None
            else [*tops, norms[0] if len(norms) == 1 else _norm(torch.stack(norms), power)]
        )
    for dtype in dict.fromkeys(value.dtype for value in dense):
        ends: list[Tensor] = []
        units: list[Tensor] = []
        squares: list[Tensor] = []
        scratch: Tensor | None = None  # fresh memory is what is slow
        for piece in _pieces(
            [value for value in dense if value.dtype is dtype], cut=power is not None
        ):
            # aminmax propagates NaN, and on a CPU takes a tenth of the time of isfinite().all().
            low, high = torch.aminmax(piece)
            ends += (low, high)
            if power == 2 and piece.is_cpu and piece.ndim == 1:
                # In units of its largest element no square overflows; dot takes a third of the time
                # of vector_norm.
                unit = torch.maximum(-low, high).to(torch.promote_types(dtype, torch.float32))
                unit = unit.clamp(torch.finfo(unit.dtype).tiny, torch.finfo(unit.dtype).max)
                if scratch is None or scratch.numel() < piece.numel():
                    scratch = torch.empty(
                        max(_PIECE, piece.numel()), dtype=unit.dtype, device=unit.device
                    )
                scaled = torch.div(piece.to(unit.dtype), unit, out=scratch[: piece.numel()])
                units.append(unit)
                squares.append(torch.dot(scaled, scaled))
            elif power is not None:
                norms.append(_norm(piece, power))
        tops.append(at_least_float32(torch.stack(ends)).abs().amax())
        if units:
            wide = widest_float(units[0].device)
            norms.append(_norm(torch.stack(squares).sqrt().to(wide) * torch.stack(units), 2))
    return tops if power is None else [*tops, _norm(torch.stack(norms), power)]


@torch.library.custom_op("purescale::extent", mutates_args=())
def _extent_node(dense: Sequence[Tensor], power: float | None) -> list[Tensor]:
    """`_extent` as one node of a compiled graph, in place of a reduction for each leaf; the norm as
    of an eager step.
    """
    quick = _quick_extent(dense, 2, None) if power == 2 else None
    return (
        _extent(dense, power)
        if quick is None or quick.norm is None
        else [*_extent(dense, None), quick.norm]
    )


@_extent_node.register_fake
def _(dense: Sequence[Tensor], power: float | None) -> list[Tensor]:
    tops = [
        at_least_float32(dense[0].new_empty((), dtype=dtype))
        for dtype in dict.fromkeys(value.dtype for value in dense)
    ]
    return (
        tops
        if power is None
        else [*tops, dense[0].new_empty((), dtype=widest_float(dense[0].device))]
    )


SMALL = 2**13  # elements: below this a call costs more than a copy
_PIECE = 2**19  # elements: what a CPU keeps in its cache from one read to the next


def _pieces(values: list[Tensor], *, cut: bool) -> Iterator[Tensor]:
    """`values`, small ones put together so that few operations do for all; large ones in pieces of
    about that size where `cut`.
    """
    small: list[Tensor] = []
    size = 0
    for value in values:
        count = value.numel()
        if count > (_PIECE // 16 if cut else SMALL):
            yield from (
                torch.split(value.view(-1), _PIECE)
                if cut and value.is_cpu and value.is_contiguous()
                else [value]
            )
        else:
            small.append(value)
            size += count
            if size > _PIECE:
                yield flat(small)
                small, size = [], 0
    if small:
        yield flat(small) if len(small) > 1 else small[0].reshape(-1)


def flat(values: list[Tensor]) -> Tensor:
    """The elements of all in one row."""
    row: Tensor = torch._utils._flatten_dense_tensors(values)  # type: ignore[no-untyped-call]
    return row


def _norm_of_list(values: list[Tensor], power: float) -> Tensor:
    wide = widest_float(values[0].device)
    if values[0].dtype.itemsize > 4 or wide is not torch.float64 or power > _SAFE_POWER:
        return _norm(torch.stack([_norm(value, power) for value in values]), power)
    each = torch.stack(torch._foreach_norm(values, power, dtype=wide))
    norm: Tensor = torch.linalg.vector_norm(each, power)
    return norm


_SAFE_POWER = 4  # of float32's largest number, and of sums of it, fits into float64


def _norm(value: Tensor, norm_type: float) -> Tensor:
    """The norm in the widest dtype of the device, also where powers of `value` overflow its own."""
    wide = widest_float(value.device)
    if math.isinf(norm_type):
        return value.abs().amax().to(wide)
    if (
        not value.is_cpu
        and value.dtype.itemsize <= 4
        and wide is torch.float64
        and norm_type <= _SAFE_POWER
    ):
        norm: Tensor = torch.linalg.vector_norm(value, norm_type, dtype=wide)  # 3e38 ** 4 fits
        return norm
    value = value.to(torch.promote_types(value.dtype, torch.float32))
    unit = value.abs().amax()
    unit = torch.where((unit > 0) & torch.isfinite(unit), unit, 1)
    scaled: Tensor = torch.linalg.vector_norm(value / unit, norm_type, dtype=wide)
    return scaled * unit


def all_finite(leaves: Sequence[Tensor | None], scale: Tensor) -> Tensor:
    """Whether every element of every `leaf / scale` is finite: a 0-d bool tensor."""
    return fits(extent(leaves, scale.device), scale)


def fits(size: Extent, scale: Tensor) -> Tensor:
    """Whether what has this extent is finite over `scale`: division is monotone, and what is not
    finite is not finite after it.
    """
    facts = [torch.isfinite(top / scale) for top in size.tops]
    return (
        torch.stack(facts).all() if facts else torch.ones((), dtype=torch.bool, device=scale.device)
    )
