"""A cache of checks on the metadata of long lists of tensors.

A list with the metadata of an earlier one is recognised by one comparison in C++. This saves half
of a step over 1000 small tensors on a CPU, and a quarter over 60 (benchmarks/README.md). The cache
keeps neither tensors nor values, so no question may refer to an object of a user's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .._torch import private
from .._torch.private import traced

T = TypeVar("T")

PLAIN_TYPES = frozenset((Tensor, nn.Parameter))  # a subclass may hold no values

_is_nested, _grad_fn = operator.attrgetter("is_nested"), operator.attrgetter("grad_fn")
_requires_grad = operator.attrgetter("requires_grad")


class Entry:
    """The cached metadata of a list and the answers to questions about it."""

    def __init__(self, tensors: Sequence[Tensor] = ()) -> None:
        self.is_like = private.metadata_guard(*tensors)
        self.may_have_graph = any(map(_requires_grad, tensors))
        self.answers: dict[Any, Any] = {}


class CachedList(list[Any]):
    """A list of tensors for which `leaves.are_dense_off_graph` is True, with the cached answers to
    questions about their metadata. It must not be modified.
    """

    entry: Entry


# At most `_LISTS` entries for each number of tensors, and `_LENGTHS` numbers.
_LENGTHS, _LISTS, _ANSWERS = 16, 4, 64
_entries: dict[int, tuple[Entry, ...]] = {}


def lookup(
    tensors: list[Any], are_dense_off_graph: Callable[[Sequence[Any]], bool]
) -> tuple[list[Any], bool]:
    """Return the list, with its cache entry if all tensors are dense and off graph, and whether
    they are.
    """
    # In inference mode the guard cannot tell ordinary tensors from inference tensors.
    nothing_known = traced() or torch.is_inference_mode_enabled()
    if nothing_known or not set(map(type, tensors)) <= PLAIN_TYPES:
        return tensors, are_dense_off_graph(tensors)
    known = _entries.get(len(tensors), ())
    # The comparison would crash the process on a nested tensor.
    if known and not any(map(_is_nested, tensors)):
        for entry in known:
            if entry.is_like(*tensors):
                if entry.may_have_graph and any(map(_grad_fn, tensors)):
                    return tensors, False
                return _cached_list(tensors, entry), True
    if not are_dense_off_graph(tensors):
        return tensors, False
    if not known and len(_entries) >= _LENGTHS:
        _entries.pop(next(iter(_entries)), None)
    entry = Entry(tensors)
    _entries[len(tensors)] = (entry, *known[: _LISTS - 1])
    return _cached_list(tensors, entry), True


def _cached_list(tensors: list[Any], entry: Entry) -> CachedList:
    cached_list = CachedList(tensors)
    cached_list.entry = entry
    return cached_list


def part(tensors: list[Any], start: int, stop: int) -> list[Any]:
    """Return `tensors[start:stop]`, with a cache entry if `tensors` has one."""
    if type(tensors) is not CachedList:
        return tensors[start:stop]
    some = CachedList(tensors[start:stop])
    some.entry = cached(("part", start, stop), Entry, tensors)
    return some


def picked(tensors: list[Any], indices: Sequence[int], question: Any) -> list[Any]:
    """Return `[tensors[index] for index in indices]`. `question` is their cache key."""
    some = list(map(tensors.__getitem__, indices))
    return (
        some
        if type(tensors) is not CachedList
        else _cached_list(some, cached(question, Entry, tensors))
    )


def joined(first: list[Any], second: list[Any]) -> list[Any]:
    """Return both lists in one."""
    both = [*first, *second]
    if type(first) is CachedList and type(second) is CachedList:
        return _cached_list(both, cached("joined", Entry, first, second))
    return both


def cached(question: Any, lookup: Callable[[], T], tensors: Sequence[Any], likes: Any = None) -> T:
    """Return `lookup()`, which must depend only on the metadata of `tensors` and `likes`. It is
    called once if both are cached lists; `question` is the cache key.
    """
    if type(tensors) is not CachedList:
        return lookup()
    if likes is not None:
        if type(likes) is not CachedList:
            return lookup()
        question = question, likes.entry
    answers = tensors.entry.answers
    if question not in answers:
        if len(answers) > _ANSWERS:
            answers.clear()
        answers[question] = lookup()
    return answers[question]


def dtypes(tensors: Sequence[Tensor]) -> set[torch.dtype]:
    return cached("dtypes", lambda: {tensor.dtype for tensor in tensors}, tensors)


def elements(tensors: Sequence[Tensor]) -> list[int]:
    return cached("elements", lambda: list(map(Tensor.numel, tensors)), tensors)
