"""Lists of tensors with what is known of them, besides their values and their memory.

A list with the metadata of an earlier one is recognised by one comparison in C++, and what was
computed from the earlier one holds for it. Without that, a donated `unscale_and_step` on a CPU
takes 1.65 of its time over 1000 tiny tensors and 1.2 over 60 small ones; a whole `train_step` 1.18
over 200 small parameters, 1.06 for a tiny MLP and 1.01 for a conv net of 3 ms. Neither tensors nor
their values are kept, so a key must not refer to an object of a user's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar, overload

import torch
from torch import Tensor

from .._torch import private
from .._torch.foreach import are_contiguous, by_kind, is_gapless, same_memory_order
from .._torch.tracing import PLAIN_TYPES, traced

T = TypeVar("T")

_is_nested, _grad_fn = operator.attrgetter("is_nested"), operator.attrgetter("grad_fn")
_requires_grad = operator.attrgetter("requires_grad")


class Fact(Generic[T]):
    """An attribute of `TensorList` that is computed when it is first asked for, then cached."""

    def __init__(self, compute: Callable[[TensorList], T]) -> None:
        self.compute, self.name = compute, compute.__name__
        self.__doc__ = compute.__doc__

    @overload
    def __get__(self, tensor_list: None, owner: Any) -> Fact[T]: ...
    @overload
    def __get__(self, tensor_list: TensorList, owner: Any) -> T: ...
    def __get__(self, tensor_list: TensorList | None, owner: Any) -> Fact[T] | T:
        if tensor_list is None:
            return self
        values = tensor_list.cache.values
        if self.name not in values:
            values[self.name] = self.compute(tensor_list)
        value: T = values[self.name]
        return value


class Cache:
    """The values that were computed from the metadata of a list. All lists alike share them."""

    def __init__(self) -> None:
        self.values: dict[Hashable, Any] = {}


class TensorList:
    """A list of tensors, with what is known of it."""

    __slots__ = ("cache", "dense_off_graph", "tensors")

    def __init__(
        self, tensors: list[Any], cache: Cache | None = None, *, dense_off_graph: bool = False
    ) -> None:
        self.tensors = tensors
        self.cache = Cache() if cache is None else cache
        self.dense_off_graph = dense_off_graph  # known to be so: see `are_dense_off_graph`

    @Fact
    def elements(self) -> list[int]:
        """The number of elements of each tensor."""
        return [tensor.numel() for tensor in self.tensors]

    @Fact
    def dtypes(self) -> set[torch.dtype]:
        return {tensor.dtype for tensor in self.tensors}

    @Fact
    def devices(self) -> set[torch.device]:
        return {tensor.device for tensor in self.tensors}

    @Fact
    def kinds(self) -> list[list[int]]:
        """The indices of tensors by device and dtype."""
        return by_kind(self.tensors)

    @Fact
    def are_contiguous(self) -> bool:
        return are_contiguous(self.tensors)

    @Fact
    def are_gapless(self) -> bool:
        return self.are_contiguous or all(map(is_gapless, self.tensors))

    @Fact
    def any_requires_grad(self) -> bool:
        return any([tensor.requires_grad for tensor in self.tensors])

    def cached(self, key: Hashable, compute: Callable[[], T], other: TensorList | None = None) -> T:
        """Return `compute()`, which must depend only on the key and the metadata of this list
        and of `other`. Lists alike share the result.
        """
        values = self.cache.values
        if other is not None:
            key = key, other.cache
        if key not in values:
            if len(values) > _VALUES:
                values.clear()
            values[key] = compute()
        value: T = values[key]
        return value

    def part(self, start: int, stop: int) -> TensorList:
        """Return the list of `tensors[start:stop]`."""
        cache = self.cached(("part", start, stop), Cache)
        return TensorList(self.tensors[start:stop], cache, dense_off_graph=self.dense_off_graph)

    def picked(self, indices: Sequence[int]) -> TensorList:
        """Return the tensors with these indices, in rising order."""
        if len(indices) == len(self.tensors):
            return self
        cache = self.cached(("picked", *indices), Cache)
        picked = list(map(self.tensors.__getitem__, indices))
        return TensorList(picked, cache, dense_off_graph=self.dense_off_graph)

    def joined(self, other: TensorList) -> TensorList:
        """Return both lists as one."""
        return TensorList(
            [*self.tensors, *other.tensors],
            self.cached("joined", Cache, other),
            dense_off_graph=self.dense_off_graph and other.dense_off_graph,
        )


def have_one_order(some: TensorList, others: TensorList) -> bool:
    """Return True if `same_memory_order` of each two tensors, which have the same shape."""
    return (some.are_contiguous and others.are_contiguous) or all(
        map(same_memory_order, some.tensors, others.tensors)
    )


# ---- lists that are alike ------------------------------------------------------------------------


class KnownList:
    """The guard that finds lists like an earlier one, and what they share."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.is_like = private.metadata_guard(*tensors)
        self.may_have_graph = any(map(_requires_grad, tensors))
        self.cache = Cache()


# At most `_LISTS` known lists for each number of tensors, and `_LENGTHS` numbers.
_LENGTHS, _LISTS, _VALUES = 16, 4, 64
_known_lists: dict[int, tuple[KnownList, ...]] = {}


def lookup(tensors: list[Any], are_dense_off_graph: Callable[[Sequence[Any]], bool]) -> TensorList:
    """Return a list with the cache of an earlier one like it, if all tensors are dense and off
    graph.
    """
    # In inference mode the guard cannot tell ordinary tensors from inference tensors.
    unknown = traced() or torch.is_inference_mode_enabled()
    if unknown or not set(map(type, tensors)) <= PLAIN_TYPES:
        return TensorList(tensors, dense_off_graph=are_dense_off_graph(tensors))
    of_this_length = _known_lists.get(len(tensors), ())
    # The comparison would crash the process on a nested tensor.
    if of_this_length and not any(map(_is_nested, tensors)):
        for known in of_this_length:
            if known.is_like(*tensors):
                off_graph = not (known.may_have_graph and any(map(_grad_fn, tensors)))
                cache = known.cache if off_graph else None
                return TensorList(tensors, cache, dense_off_graph=off_graph)
    if not are_dense_off_graph(tensors):
        return TensorList(tensors)
    if not of_this_length and len(_known_lists) >= _LENGTHS:
        _known_lists.pop(next(iter(_known_lists)), None)
    known = KnownList(tensors)
    _known_lists[len(tensors)] = (known, *of_this_length[: _LISTS - 1])
    return TensorList(tensors, known.cache, dense_off_graph=True)
