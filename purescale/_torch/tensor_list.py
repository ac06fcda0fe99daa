"""Lists of tensors with what is known of them, besides their values and their memory.

What was computed from one list holds for all lists of the same metadata: a plan keeps it for them,
by `ListMetadata`. Neither tensors nor their values are kept.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import private
from .._torch.foreach import by_kind
from .._torch.memory_order import are_gapless
from .._torch.tracing import PLAIN_TYPES


def cached_by_metadata(compute: Callable[[TensorList], Any]) -> Any:
    """Make a property of `TensorList` that is computed when it is first asked for, then cached."""
    name = compute.__name__

    def get(tensor_list: TensorList) -> Any:
        cached_values = tensor_list.metadata.cached_values
        if name not in cached_values:
            cached_values[name] = compute(tensor_list)
        return cached_values[name]

    return property(get, doc=compute.__doc__)


_is_nested = operator.attrgetter("is_nested")


def are_comparable(leaves: Sequence[Any]) -> bool:
    """Return True if `metadata_matcher` may compare these. It sees no subclass, and would end the
    process on a nested tensor.
    """
    return PLAIN_TYPES.issuperset(map(type, leaves)) and not any(map(_is_nested, leaves))


def metadata_matcher(tensors: Sequence[Tensor]) -> Callable[[Sequence[Any]], bool]:
    """Return a function that is True for as many tensors that differ from these, which are plain
    and dense, in values only: in one call of C++, 1 to 2 us for 30, it compares shapes, strides,
    dtypes, devices and whether they require a gradient.
    """
    count, matcher = len(tensors), private.metadata_guard(*tensors)

    def compare(others: Sequence[Any]) -> bool:
        return len(others) == count and are_comparable(others) and bool(matcher(*others))

    return compare


class ListMetadata:
    """The facts about a list of tensors (dtypes, devices, kinds) that were computed, shared by all
    lists that differ from it in values only.

    Args:
        matcher: The `metadata_matcher` of the list, if a plan has one.
    """

    def __init__(self, matcher: Callable[[Sequence[Any]], bool] | None = None) -> None:
        self.cached_values: dict[Hashable, Any] = {}
        self.matcher = matcher


class TensorList:
    """A list of tensors, with what is known of it. One of leaves that are not all tensors, such as
    None, has no other facts than `dense_without_history`, which is False.
    """

    __slots__ = ("dense_without_history", "metadata", "tensors")

    def __init__(
        self,
        tensors: list[Any],
        metadata: ListMetadata | None = None,
        *,
        dense_without_history: bool = False,
    ) -> None:
        self.tensors = tensors
        self.metadata = ListMetadata() if metadata is None else metadata
        # True if it is known, see `are_dense_without_history`.
        self.dense_without_history = dense_without_history

    def matches(self, others: Sequence[Any]) -> bool:
        """Return True if it is known that `others` differ from these in values only."""
        return self.metadata.matcher is not None and self.metadata.matcher(others)

    @cached_by_metadata
    def num_elements(self) -> int:
        """The number of elements of all tensors together."""
        return sum(map(Tensor.numel, self.tensors))

    @cached_by_metadata
    def any_empty(self) -> bool:
        return 0 in map(Tensor.numel, self.tensors)

    @cached_by_metadata
    def dtypes(self) -> set[torch.dtype]:
        return {tensor.dtype for tensor in self.tensors}

    @cached_by_metadata
    def devices(self) -> set[torch.device]:
        return {tensor.device for tensor in self.tensors}

    @cached_by_metadata
    def are_on_cpu(self) -> bool:
        return self.devices <= {torch.device("cpu")}

    @cached_by_metadata
    def indices_by_kind(self) -> list[list[int]]:
        """The indices of tensors by device and dtype."""
        return by_kind(self.tensors)

    @cached_by_metadata
    def are_gapless(self) -> bool:
        return are_gapless(self.tensors)

    @cached_by_metadata
    def any_requires_grad(self) -> bool:
        return any([tensor.requires_grad for tensor in self.tensors])

    def take(self, indices: Sequence[int]) -> TensorList:
        """Return the tensors with these indices, in rising order."""
        if len(indices) == len(self.tensors):
            return self
        metadata = self.metadata.cached_values.setdefault(("take", *indices), ListMetadata())
        tensors = list(map(self.tensors.__getitem__, indices))
        return TensorList(tensors, metadata, dense_without_history=self.dense_without_history)
