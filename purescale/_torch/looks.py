"""Looks at the metadata of thousands of tensors, remembered: a list with the metadata of an earlier
one is known by one comparison in C++. It saves half of a step over 1000 small tensors on a CPU, and
a quarter over 60 (benchmarks/README.md). No tensor and no value is kept.
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


class Seen:
    """What was seen of a list's metadata."""

    def __init__(self, tensors: Sequence[Tensor] = ()) -> None:
        self.is_like = private.metadata_guard(*tensors)
        self.may_have_graph = any(map(_requires_grad, tensors))
        self.answers: dict[Any, Any] = {}


class Looked(list[Any]):
    """A list of ordinary tensors, as `leaves.are_ordinary` says, of which something was seen; it is
    not written into.
    """

    seen: Seen


# By the number of tensors: lists that differed in something else.
_LENGTHS, _LISTS, _ANSWERS = 16, 4, 64
_seen: dict[int, tuple[Seen, ...]] = {}


def look(
    tensors: list[Any], are_ordinary: Callable[[Sequence[Any]], bool]
) -> tuple[list[Any], bool]:
    """The list, so that what is seen of it is known for the next with its metadata, and whether it
    is ordinary.
    """
    # In inference mode the guard takes ordinary tensors for what its own are outside of it.
    nothing_known = traced() or torch.is_inference_mode_enabled()
    if nothing_known or not set(map(type, tensors)) <= PLAIN_TYPES:
        return tensors, are_ordinary(tensors)
    known = _seen.get(len(tensors), ())
    # The comparison would end the process over a nested tensor.
    if known and not any(map(_is_nested, tensors)):
        for seen in known:
            if seen.is_like(*tensors):
                if seen.may_have_graph and any(map(_grad_fn, tensors)):
                    return tensors, False
                return _looked(tensors, seen), True
    if not are_ordinary(tensors):
        return tensors, False
    if not known and len(_seen) >= _LENGTHS:
        _seen.pop(next(iter(_seen)), None)
    seen = Seen(tensors)
    _seen[len(tensors)] = (seen, *known[: _LISTS - 1])
    return _looked(tensors, seen), True


def _looked(tensors: list[Any], seen: Seen) -> Looked:
    looked = Looked(tensors)
    looked.seen = seen
    return looked


def part(tensors: list[Any], start: int, stop: int) -> list[Any]:
    """`tensors[start:stop]`."""
    if type(tensors) is not Looked:
        return tensors[start:stop]
    some = Looked(tensors[start:stop])
    some.seen = once(("part", start, stop), Seen, tensors)
    return some


def picked(tensors: list[Any], indices: Sequence[int], question: Any) -> list[Any]:
    """`[tensors[index] for index in indices]`; `question` stands for these indices."""
    some = list(map(tensors.__getitem__, indices))
    return some if type(tensors) is not Looked else _looked(some, once(question, Seen, tensors))


def joined(first: list[Any], second: list[Any]) -> list[Any]:
    """Both lists in one."""
    both = [*first, *second]
    if type(first) is Looked and type(second) is Looked:
        return _looked(both, once("joined", Seen, first, second))
    return both


def once(question: Any, look: Callable[[], T], tensors: Sequence[Any], likes: Any = None) -> T:
    """`look()`, which asks `question` of the metadata of `tensors`, and of `likes`, and of nothing
    else; once where both are known.
    """
    if type(tensors) is not Looked:
        return look()
    if likes is not None:
        if type(likes) is not Looked:
            return look()
        question = question, likes.seen
    answers = tensors.seen.answers
    if question not in answers:
        if len(answers) > _ANSWERS:
            answers.clear()
        answers[question] = look()
    return answers[question]  # type: ignore[no-any-return]


def dtypes(tensors: Sequence[Tensor]) -> set[torch.dtype]:
    """The dtypes of a list."""
    return once("dtypes", lambda: {tensor.dtype for tensor in tensors}, tensors)


def elements(tensors: Sequence[Tensor]) -> list[int]:
    """The number of elements of each."""
    return once("elements", lambda: list(map(Tensor.numel, tensors)), tensors)
