"""Gradient statistics of one rank: largest magnitude, norm and whether all are finite."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from .._torch.dtypes import unscaled_dtype, wide_dtype, widest_float
from .._torch.flat_buffer import bounded_groups, join, join_row_major
from .._torch.foreach import can_use_foreach, cast_list_saturating, is_on_accelerator
from .._torch.private import listops
from .._torch.tensor_list import TensorList
from .._torch.tracing import MAX_INLINE_LEAVES


class LocalStats(NamedTuple):
    """The largest magnitudes and the norm of tensors on this rank."""

    # the largest magnitude of each dtype before unscaling, at least float32, NaN or inf too
    scaled_amaxes: dict[torch.dtype, Tensor]
    # of the unscaled tensors, in the widest dtype of the device; None if not asked for
    norm: Tensor | None

    def are_finite(self, divisor: Tensor) -> Tensor:
        """Return True if every element is finite over `divisor`, in the dtype of an unscaled
        gradient.

        The largest magnitude is enough: division is monotone, and inf and NaN stay so.
        """
        # of what is not negative; torch.isfinite takes four operators
        finite = [
            (amax / divisor).to(unscaled_dtype(dtype)) < math.inf
            for dtype, amax in self.scaled_amaxes.items()
        ]
        if not finite:
            return torch.ones((), dtype=torch.bool, device=divisor.device)
        return finite[0] if len(finite) == 1 else torch.stack(finite).all()


# ---- on the host ---------------------------------------------------------------------------------


def norm_on_host(tensor_list: TensorList) -> float:
    """Return the 2-norm, by the fastest read that a CPU has. It is off by less than 2e-6.

    A sum in float32 loses about the same with each of many similar squares: a `dot` over 2**18 of
    them is off by 1.2e-4. So few elements are summed in float64, and of more the single rows in
    float32, and their results in float64.
    """
    if tensor_list.any_empty:
        tensor_list = TensorList([tensor for tensor in tensor_list.tensors if tensor.numel()])
    tensors, kinds = tensor_list.tensors, tensor_list.indices_by_kind
    if len(kinds) == 1 and tensor_list.num_elements <= _FEW:
        return torch.linalg.vector_norm(join_row_major(tensors), dtype=torch.float64).item()
    lists = [[tensors[i] for i in indices] for indices in kinds]
    parts = [torch.linalg.vector_norm(rows, dim=1) for kind in lists for rows in _rows(kind)]
    norms = torch.cat([part.double() for part in parts])
    return math.sqrt(torch.dot(norms, norms).item())


_FEW = 2**13  # elements: up to here fewer operators are faster
_ROW = 2**10
_CHUNK = 2**18  # elements that stay in a cache
_SMALL = 2**13  # elements: below this a call costs more than a copy


def _rows(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the elements of tensors of one dtype in rows of `_ROW`, many at a time, the last row
    filled up with zeros. Half precision is yielded in float32, in chunks, because all of it would
    take twice the memory of the gradients.
    """
    for rows in _rows_in_own_dtype(tensors):
        if rows.dtype.itemsize >= 4:
            yield rows
        else:
            for start in range(0, len(rows), _CHUNK // _ROW):
                yield rows[start : start + _CHUNK // _ROW].float()


def _rows_in_own_dtype(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the rows of each large tensor, and those of small tensors and the ends of large ones
    together.
    """
    small: list[Tensor] = []
    size = 0
    numels = list(map(Tensor.numel, tensors))
    if sum(numels) <= _CHUNK:
        yield _in_rows(list(tensors), sum(numels))
        return
    for tensor, numel in zip(tensors, numels, strict=True):
        rest = numel % _ROW if numel > _SMALL else numel
        if rest < numel:
            flat = tensor.reshape(-1)
            yield (flat[:-rest] if rest else flat).view(-1, _ROW)
        if rest:
            small.append(flat[-rest:] if rest < numel else tensor)
            size += rest
        if size > _CHUNK:
            yield _in_rows(small, size)
            small, size = [], 0
    if small:
        yield _in_rows(small, size)


def _in_rows(tensors: list[Tensor], size: int) -> Tensor:
    """Return `size` elements in rows, the last one filled up with zeros."""
    if missing := -size % _ROW:
        tensors.append(tensors[0].new_zeros(missing))
    return join_row_major(tensors).view(-1, _ROW)


# ---- exactly -------------------------------------------------------------------------------------


def local_stats(tensors: Sequence[Tensor], divisor: Tensor, norm_type: float | None) -> LocalStats:
    """Return the stats of dense, real tensors that `divisor` unscales, exact even if squares
    overflow or vanish.
    """
    present = [tensor for tensor in tensors if tensor.numel()]
    if can_use_foreach([*present, divisor]):
        with torch.no_grad():
            amaxes, norms = _list_stats(present, divisor, norm_type)
    else:
        amaxes, norms = _inline_stats(present, divisor, norm_type)
    if norm_type is None:
        return LocalStats(amaxes, None)
    device = divisor.device
    norms = norms or [torch.zeros((), dtype=widest_float(device), device=device)]
    return LocalStats(amaxes, norm_of_norms(norms, norm_type))


# The largest magnitude of each dtype, and norms of parts, none if norm_type is None.
_AmaxesAndNorms: TypeAlias = tuple[dict[torch.dtype, Tensor], list[Tensor]]


def _inline_stats(
    tensors: Sequence[Tensor], divisor: Tensor, norm_type: float | None
) -> _AmaxesAndNorms:
    """Return stats in plain operators. Many tensors are joined: a compiler takes seconds for each
    dozen of reductions.
    """
    if len(tensors) > MAX_INLINE_LEAVES:
        kinds = [(tensor.device, tensor.dtype) for tensor in tensors]
        tensors = [
            join_row_major([tensors[i] for i in group]) for group in bounded_groups(tensors, kinds)
        ]
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(_at_least_float32(tensor.abs().amax()))
    amaxes = {dtype: torch.stack(each).amax() for dtype, each in by_dtype.items()}
    if norm_type is None or not amaxes:
        return amaxes, []
    # In the derivative of a step that is skipped, 0 * inf would be NaN.
    finite = LocalStats(amaxes, None).are_finite(divisor)
    divisor, *tensors = [torch.where(finite, x, x.detach()) for x in (divisor, *tensors)]
    return amaxes, [_vector_norm(tensor, norm_type, divisor) for tensor in tensors]


def _list_stats(
    tensors: Sequence[Tensor], divisor: Tensor, norm_type: float | None
) -> _AmaxesAndNorms:
    """`_inline_stats` over lists: on an accelerator the number of operators does not grow."""
    amaxes, norms = {}, []
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        same = [tensor for tensor in tensors if tensor.dtype is dtype]
        if is_on_accelerator(same[0]):
            same = _join_small(same)
            amax = _at_least_float32(torch.stack(listops.norm(same, math.inf)).amax())
        else:
            ends = [end for rows in _rows(same) for end in torch.aminmax(rows)]
            amax = _at_least_float32(torch.stack(ends)).abs().amax()
        amaxes[dtype] = amax
        if norm_type is not None:
            norms.append(_norm_of_list(same, norm_type, amax, divisor))
    return amaxes, norms


def _join_small(tensors: list[Tensor]) -> list[Tensor]:
    """Return tensors with the elements of these, small ones joined: in the norm of a list each
    tensor takes the host as long as a copy of `_JOINED` elements takes an accelerator.
    """
    small = [tensor for tensor in tensors if tensor.numel() <= _JOINED]
    if len(small) < 2:
        return tensors
    return [join(small, small), *[tensor for tensor in tensors if tensor.numel() > _JOINED]]


_JOINED = 2**18  # elements


def _norm_of_list(tensors: list[Tensor], norm_type: float, amax: Tensor, divisor: Tensor) -> Tensor:
    """Return the p-norm of `tensors / divisor`, of one dtype, whose largest magnitude is `amax`."""
    widest = widest_float(tensors[0].device)
    if norm_type == math.inf:
        return (amax / divisor).to(widest)
    if tensors[0].dtype.itemsize <= 4 and widest is torch.float64 and norm_type <= _SAFE_POWER:
        norm: Tensor = torch.linalg.vector_norm(
            torch.stack(listops.norm(tensors, norm_type, dtype=widest)), norm_type
        )
        return norm / divisor
    # In units of the largest magnitude: what underflows then adds nothing to the norm.
    unit = _unit(amax)
    # A quotient in half precision would be rounded.
    tensors = cast_list_saturating(tensors, unit.dtype)
    norms = listops.norm(listops.div(tensors, unit), norm_type, dtype=widest)
    in_units: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return in_units * (unit / divisor)


_SAFE_POWER = 4  # float64 holds this power of the largest float32, and sums of it


def _vector_norm(values: Tensor, norm_type: float, divisor: Tensor) -> Tensor:
    """Return the p-norm of `values / divisor` in the widest dtype of the device, even if powers
    overflow there.
    """
    widest = widest_float(values.device)
    if values.dtype.itemsize <= 4 and widest is torch.float64 and norm_type <= _SAFE_POWER:
        return torch.linalg.vector_norm(values, norm_type, dtype=widest) / divisor
    values = _at_least_float32(values)
    unit = _unit(values.detach().abs().amax())  # the norm does not depend on it
    norm: Tensor = torch.linalg.vector_norm(values / unit, norm_type, dtype=widest)
    return norm * (unit / divisor)


def norm_of_norms(norms: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the p-norm of all tensors from the p-norms of parts."""
    if len(norms) == 1:
        return norms[0]
    stacked = torch.stack(list(norms))
    if norm_type == math.inf:
        return stacked.amax()
    return _vector_norm(stacked, norm_type, torch.ones_like(norms[0]))


def _unit(amax: Tensor) -> Tensor:
    """Return the largest magnitude, a divisor before powers are taken; 1 if it is 0, inf or NaN."""
    return torch.where((amax > 0) & torch.isfinite(amax), amax, 1)


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(wide_dtype(tensor.dtype))
