"""What one read of the gradients tells: the largest magnitude, whether all are finite, the norm."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import _foreach, _torch, _tree
from ._foreach import at_least_float32, is_on_a_graph, widest_float
from ._torch import foreach


class Extent(NamedTuple):
    """How large some leaves are."""

    # the largest magnitude or a bound, one a dtype, at least float32; NaN if there is one
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
        or (torch.compiler.is_compiling() and len(leaves) <= _foreach.INLINE)
    )
    power = None if norm_type is None or norm_type == math.inf else norm_type
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
                norms.append(_norm(leaf.abs(), norm_type))
                tops.append(at_least_float32(value.abs().amax()))
            elif plain:
                tops.append(at_least_float32(value.abs().amax()))
                norms += [] if power is None else [_norm(value, power)]
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
        if norm_type == math.inf:
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
    if any(dtype.itemsize < 4 for dtype in set(map(_dtype, dense))):
        dense = [value.float() if value.dtype.itemsize < 4 else value for value in dense]
    lists = _by_dtype(dense)
    rows = [row for same in lists for row in _rows(same)]
    squares: list[Tensor] = []
    ends: list[Tensor] = []
    for row in rows:
        squares.append(torch.dot(row, row))
        ends += torch.aminmax(row) if exact and row.numel() else ()  # while it is in the cache
    count = sum(map(Tensor.numel, rows))
    if len(lists) > 1:
        squares = [square.double() for square in squares]
    total = torch.stack(squares).sum(dtype=torch.float64).item()
    divisor = 1.0 if scale is None else scale.item()
    bound = math.sqrt(total) if total >= 0 else math.nan  # no element is larger
    # bfloat16 ends a little below float32
    usable = 0 < divisor < math.inf and bound / divisor < torch.finfo(torch.bfloat16).max
    # Squares below float32's range are lost; what they could add to a sum above this is less than
    # its rounding.
    if not usable or (norm_type == 2 and total < count * 2.0**-100):
        return None  # inf or NaN, or finite numbers whose squares are not: the exact way tells
    top = torch.full((), bound, dtype=torch.float64, device="cpu")
    tops = [torch.stack(list(same)).abs().amax() for same in _by_dtype(ends)] if ends else [top]
    return Extent(tops, top if norm_type == 2 else None, scale)


def _by_dtype(values: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    dtypes = dict.fromkeys(map(_dtype, values))
    if len(dtypes) == 1:
        return [values]
    return [[value for value in values if value.dtype is dtype] for dtype in dtypes]


def _rows(values: Sequence[Tensor]) -> list[Tensor]:
    """The elements of `values` in rows, small ones put together, large ones cut."""
    rows: list[Tensor] = []
    small = list(values)
    sizes = list(map(Tensor.numel, values))
    if max(sizes) > SMALL:
        small = [value for value, size in zip(values, sizes, strict=True) if size <= SMALL]
        for value, size in zip(values, sizes, strict=True):
            if size > SMALL:
                row = value.view(-1) if value.is_contiguous() else value.reshape(-1)
                rows += [row] if size <= _PIECE else torch.split(row, _PIECE)
    for start in range(0, len(small), 1024):
        part = small[start : start + 1024]
        rows.append(torch.cat(part) if set(map(Tensor.dim, part)) == {1} else flat(part))
    return rows


def _extent(dense: Sequence[Tensor], power: float | None) -> list[Tensor]:
    """The largest magnitude of each dtype, in the order in which they come, and where there is a
    `power` the norm.
    """
    tops: list[Tensor] = []
    norms: list[Tensor] = []
    if not dense[0].is_cpu:  # an operation costs by itself there, however small
        for values in map(list, _by_dtype(dense)):
            tops.append(at_least_float32(torch.stack(foreach.norm(values, math.inf)).amax()))
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


_dtype = operator.attrgetter("dtype")
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
    return _torch.flatten_dense(values)


def _norm_of_list(values: list[Tensor], power: float) -> Tensor:
    wide = widest_float(values[0].device)
    if values[0].dtype.itemsize > 4 or wide is not torch.float64 or power > _SAFE_POWER:
        if values[0].dtype.itemsize < 4:
            return _norm(torch.stack([_norm(value, power) for value in values]), power)
        # in units of the largest of all, of whose norm the underflowing rest is no part
        unit = _unit(torch.stack(foreach.norm(values, math.inf)).amax())
        return _norm_of_units(foreach.div(values, unit), power, wide) * unit
    return _norm_of_units(values, power, wide)


def _norm_of_units(values: Sequence[Tensor], power: float, wide: torch.dtype) -> Tensor:
    each = torch.stack(foreach.norm(values, power, dtype=wide))
    norm: Tensor = torch.linalg.vector_norm(each, power)
    return norm


_SAFE_POWER = 4  # of float32's largest number, and of sums of it, fits into float64


def _norm(value: Tensor, norm_type: float) -> Tensor:
    """The norm in the widest dtype of the device, also where powers of `value` overflow its own."""
    wide = widest_float(value.device)
    if norm_type == math.inf:
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
    unit = _unit(value.abs().amax())
    scaled: Tensor = torch.linalg.vector_norm(value / unit, norm_type, dtype=wide)
    return scaled * unit


def _unit(largest: Tensor) -> Tensor:
    """What values of which this is the largest are to be divided by, before powers of them."""
    return torch.where((largest > 0) & torch.isfinite(largest), largest, 1)


def surely_fits(size: Extent, scale: Tensor) -> bool:
    """Whether it is known on the host that `scale` is usable, and what has this extent finite over
    it.
    """
    return size.fit_over is scale


def fits(size: Extent, scale: Tensor) -> Tensor:
    """Whether what has this extent is finite over `scale`: division is monotone, and what is not
    finite is not finite after it.
    """
    facts = [torch.isfinite(top / scale) for top in size.tops]
    return (
        torch.stack(facts).all() if facts else torch.ones((), dtype=torch.bool, device=scale.device)
    )


def stored_values(leaf: Tensor) -> Tensor:
    """What a leaf stores, as real numbers: a sparse leaf's summed values, a complex leaf's two
    parts.
    """
    if leaf.layout is not torch.strided:
        leaf = leaf.coalesce().values() if leaf.layout is torch.sparse_coo else leaf.values()
    if leaf.dtype.itemsize == 1:
        leaf = leaf.to(torch.float32)
    return torch.view_as_real(leaf.resolve_conj().resolve_neg()) if leaf.is_complex() else leaf
