"""A donated tree as NaN: a test that it is not used again."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

import torch

from .._torch import dtensor
from .._torch.donation import can_write_each
from .._torch.tensor_list import TensorList
from .._torch.tracing import traced, true_inside
from .._tree import pytree
from .._tree.pytree import Tree

P = ParamSpec("P")
T = TypeVar("T")

_poisoning: ContextVar[bool] = ContextVar("poisoning", default=False)


@contextlib.contextmanager
def donated_poisoned() -> Iterator[None]:
    """Inside, what is donated is overwritten: a call that donates computes as one that does not,
    the same bits, and then fills what it was given up with NaN, integers with their largest number.

    A donated state that is read again holds plausible numbers, some of them new. Inside of this it
    does not. It is for eager calls with `donate=True` and for calls of `jit(..., donate=)`, in this
    thread; a step under torch.compile or a transform runs as it is. What shares memory with
    something that the caller keeps is left. Each call takes fresh memory, as without donation.

    Example:
        >>> import torch
        >>> from purescale import clip_by_value
        >>> grads = [torch.tensor([3.0, 0.5]), torch.tensor([9.0])]
        >>> with donated_poisoned():
        ...     clipped = clip_by_value(grads, 1.0, donate=True)
        >>> clipped, grads
        ([tensor([1.0000, 0.5000]), tensor([1.])], [tensor([nan, nan]), tensor([nan])])

    Source of the rule: JAX, where an array that was donated cannot be read.
    """
    with true_inside(_poisoning):
        yield


def is_poisoning() -> bool:
    """Return True inside of `donated_poisoned`, in a call that is not traced."""
    if torch.compiler.is_dynamo_compiling():  # which does not trace the next line
        return False
    return _poisoning.get() and not traced()


def poison(donated: Tree, others: Tree) -> None:
    """Fill the tensors that were donated, except those that share memory with `others`, or with
    each other, and those that a step would not write into.
    """
    shards = [dtensor.local_shard(leaf, on_graph=False) for leaf in pytree.all_tensors(donated)]
    others = [dtensor.local_shard(leaf, on_graph=False) for leaf in pytree.all_tensors(others)]
    with torch.no_grad():
        writable = can_write_each([TensorList([shard]) for shard in shards], others)
        for shard, is_writable in zip(shards, writable, strict=True):
            if is_writable:
                shard.fill_(_poison_of(shard.dtype))


def _poison_of(dtype: torch.dtype) -> float | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return True if dtype is torch.bool else torch.iinfo(dtype).max


def poisons_donated(*names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator of a function that takes `donate`: inside of `donated_poisoned` it does
    not donate, and its arguments of these names are filled once it has returned.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def donating(*args: P.args, **kwargs: P.kwargs) -> T:
            if not is_poisoning():
                return function(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            if not bound.arguments.get("donate"):
                return function(*args, **kwargs)
            bound.arguments["donate"] = False
            results = function(*bound.args, **bound.kwargs)
            donated = [bound.arguments.pop(name) for name in names]
            poison(donated, [results, list(bound.arguments.values())])
            return results

        return donating

    return decorate
