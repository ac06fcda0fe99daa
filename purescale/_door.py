"""What is static about the trees of a step is worked out once and remembered; the trees come in as
columns.

A column is one list of tensors: the parameters, their gradients, one moment.
"""

from __future__ import annotations

import bisect
import itertools
import operator
import sys
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ._leaf import is_nested, reach
from ._torch import TensorGuards

T = TypeVar("T")


class Marks(NamedTuple):
    """What must be as it was for what is known to hold, besides the tensors themselves."""

    donate: bool
    spent: bool
    absent: list[int]  # parameters without a gradient
    vacant: list[int]  # and those that are None
    names: list[str]  # in the state
    counts: list[int]
    keys: list[str]
    inference: bool


class Entered(NamedTuple):
    """Parameters, their gradients and their slots as columns."""

    names: list[str]
    weights: list[Any]  # None included, as in the tree
    state: list[Any]  # parameters and slots
    gradients: list[Any]
    keep: Sequence[Tensor]  # what is written into in no case
    marks: Marks


def enter(
    params: Any,
    grads: Any,
    slots: dict[str, dict[str, Tensor]],
    keep: Sequence[Tensor],
    *,
    donate: bool,
    spent: bool,
) -> Entered | None:
    """Flat dicts as columns; `None` for all other trees, which take the long way."""
    if type(params) is not dict or type(grads) is not dict:
        return None
    names, weights = list(params), list(params.values())
    if list(grads) == names:
        gradients = list(grads.values())
    elif grads.keys() == params.keys():
        gradients = [grads[name] for name in names]
    else:
        return None
    absent: list[int] = []
    vacant: list[int] = []
    held, present = weights, gradients
    if type(None) in set(map(type, gradients)):
        absent = [place for place, gradient in enumerate(gradients) if gradient is None]
        present = [gradient for gradient in gradients if gradient is not None]
        vacant = [place for place in absent if weights[place] is None]
        held = [weight for weight in weights if weight is not None]
    every = slots.values()
    state = [*held, *itertools.chain.from_iterable(map(dict.values, every))]
    marks = Marks(
        donate,
        spent,
        absent,
        vacant,
        list(slots),
        list(map(len, every)),
        list(itertools.chain.from_iterable(every)),
        torch.is_inference_mode_enabled(),
    )
    return Entered(names, weights, state, present, keep, marks)


# ---- what is remembered --------------------------------------------------------------------------


class _Pieces(NamedTuple):
    """Memory in pieces that do not overlap, in order."""

    gradients: list[int]  # where those of them that are gradients start, in the order of the column
    starts: list[int]
    ends: list[int]

    def beside(self, starts: Sequence[int], ends: Sequence[int]) -> bool:
        """Whether from none of `starts` to its end there is anything of them."""
        places = list(map(bisect.bisect_right, itertools.repeat(self.starts), starts))
        before, after = [0, *self.ends], [*self.starts, sys.maxsize]
        return all(map(operator.le, map(before.__getitem__, places), starts)) and all(
            map(operator.le, ends, map(after.__getitem__, places))
        )


class _Known(NamedTuple):
    names: list[str]
    marks: Marks
    guard: Any  # a TensorGuards
    graphs: list[int]  # which of the tensors may stand on a graph
    addresses: list[int] | None  # of the state, where something will be written
    starts: list[int]  # the memory of the state, in order
    ends: list[int]
    lengths: list[int]  # bytes from the first to the last element of each tensor of the state
    sizes: list[int]  # and of each gradient
    pieces: _Pieces | None  # of state and gradients together, where they stood the last time
    facts: Any

    def at(self, addresses: list[int]) -> _Known:
        """The same of a state that stands there."""
        ends = sorted(map(operator.add, addresses, self.lengths))
        return self._replace(addresses=addresses, starts=sorted(addresses), ends=ends, pieces=None)


class Memo(Generic[T]):
    """Static facts of the columns of a step: pure, since they are known again by what they follow
    from, not by identity.

    That is names, class, dtype, device, shape, strides, whether a gradient is required, lazy
    negation and conjugation, and where something will be written, the addresses. No tensor is kept
    alive, no value remembered, and to forget changes no bit.
    """

    KEPT = 4  # of the latest

    def __init__(self) -> None:
        self._known: tuple[_Known, ...] = ()

    def find(self, entered: Entered) -> tuple[T, bool] | None:
        """What is known of such columns, and whether the gradients stand in memory of their own."""
        names, _, state, gradients, keep, marks = entered
        before = self._known
        for place, known in enumerate(before):
            if known.marks != marks or known.names != names:
                continue
            try:
                addresses = known.addresses and list(map(Tensor.data_ptr, state))
                moved = addresses != known.addresses
                if moved and marks.donate:
                    continue
                others = gradients if addresses and not moved else [*state, *gradients]
                if any(map(is_nested, others)) or not known.guard.check(*state, *gradients):
                    continue
                if (
                    addresses is not None and moved
                ):  # nothing is written into it: it need only stand apart from gradients
                    known = known.at(addresses)
                alone: bool | None = True
                if addresses is not None:
                    known, alone = self._alone(known, gradients, keep)
            except (TypeError, RuntimeError, AttributeError, NotImplementedError):
                return None  # no plain tensors
            if alone is None or (
                known.graphs
                and any((*state, *gradients)[index].grad_fn is not None for index in known.graphs)
            ):
                return None
            if known is not before[0]:
                # One assignment: another thread sees the memo as it was or as it is.
                self._known = (known, *before[:place], *before[place + 1 :])
            return known.facts, alone
        return None

    @staticmethod
    def _alone(
        known: _Known, gradients: Sequence[Tensor], keep: Sequence[Tensor]
    ) -> tuple[_Known, bool | None]:
        """Whether the gradients stand in memory of their own; `None` where something stands in that
        of the state.
        """
        starts = list(map(Tensor.data_ptr, gradients))
        pieces = known.pieces
        if pieces is None or pieces.gradients != starts:
            # An allocator soon hands out the same memory in each step, so this is seldom.
            every = sorted(known.starts + starts)
            ends = sorted(known.ends + list(map(operator.add, starts, known.sizes)))
            pieces = _Pieces(starts, every, ends) if _apart(every, ends) else None
            known = known._replace(pieces=pieces)
        # What is kept may share memory with itself.
        storages = list(map(Tensor.untyped_storage, keep))
        kept = list(map(torch.UntypedStorage.data_ptr, storages))
        ends = list(map(operator.add, kept, map(torch.UntypedStorage.nbytes, storages)))
        if pieces is not None and pieces.beside(kept, ends):
            return known, True
        given = list(map(operator.add, starts, known.sizes))
        state = _Pieces([], known.starts, known.ends)
        return known, False if state.beside([*starts, *kept], [*given, *ends]) else None

    def add(self, entered: Entered, facts: T) -> None:
        """Remember `facts`, and forget what was added longest ago."""
        tensors = [*entered.state, *entered.gradients]
        if not all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in tensors):
            return
        known = _Known(
            entered.names,
            entered.marks,
            TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None),
            [place for place, tensor in enumerate(tensors) if tensor.requires_grad],
            None,
            [],
            [],
            list(map(reach, entered.state)),
            list(map(reach, entered.gradients)),
            None,
            facts,
        )
        if entered.marks.donate or entered.marks.spent:
            known = known.at(list(map(Tensor.data_ptr, entered.state)))
        # One assignment: another thread sees the memo as it was or as it is.
        self._known = (known, *self._known[: self.KEPT - 1])

    def __deepcopy__(self, memo: Any) -> Memo[T]:
        return Memo()  # a guard of torch's cannot be copied, and to forget changes no bit

    def clear(self) -> None:
        """Forget everything."""
        self._known = ()


def _apart(starts: list[int], ends: list[int]) -> bool:
    """Whether no two pieces of memory overlap: both in order, each ends before the next begins."""
    return all(map(operator.le, ends, starts[1:]))
