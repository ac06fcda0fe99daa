"""The states of a run from which it is replayed, each with those of the random generators."""

from __future__ import annotations

import itertools
import math
import os
from typing import NamedTuple

from torch import Tensor

from .._checkpoint import load, save
from .._tree import pytree, scalars
from .._tree.pytree import Tree


class Moment(NamedTuple):
    """A run before one of its steps: its state, and the states of torch's generators."""

    state: Tree
    generators: list[Tensor]


def plan_kept_steps(number: int, every: int | None, in_a_folder: bool) -> tuple[list[int], int]:
    """Return the steps before which a state of the run is kept, and how many states at once there
    may be.
    """
    root = math.isqrt(number)
    if every is None and not in_a_folder:
        # Up to 500 steps those with which none is made more than twice, then as few as 32.
        slots = min(math.isqrt(2 * number), max(32, root))
        return steps_to_keep(0, number, slots), slots
    every = scalars.checked_whole("every", root if every is None else every, least=1)
    steps = list(range(0, number, every))
    return steps, len(steps) + every


def steps_to_keep(start: int, stop: int, slots: int) -> list[int]:
    """Return the steps of a segment before which a state is kept, at most `slots`: those with which
    the fewest steps are made again on the way back through the segment.

    Source: Griewank and Walther 2000, "Revolve". `comb(slots + times, times)` steps are the most
    of which each is made at most `times` times.
    """
    steps = []
    while slots and start < stop:
        steps.append(start)
        times = next(t for t in itertools.count(1) if math.comb(slots + t, t) >= stop - start)
        # The steps up to the next state have all slots again, and have been made once by then.
        most, least = math.comb(slots + times - 1, slots), math.comb(slots + times - 2, slots - 1)
        start += max(1, min(most, stop - start - least))
        slots -= 1
    return steps


class KeptStates:
    """The moments of a run that are kept, by the index of their step: in memory, or as files in a
    directory.
    """

    def __init__(self, directory: str | None, like: Moment) -> None:
        self._directory, self._like = directory, like
        self._in_memory: dict[int, Moment] = {}

    def keep(self, index: int, moment: Moment) -> None:
        if self._directory is None:
            self._in_memory[index] = Moment(pytree.clone(moment.state), moment.generators)
        else:
            save(os.path.join(self._directory, f"{index}.pt"), moment)

    def pop(self, index: int) -> Moment:
        """Return a moment and forget it."""
        if self._directory is None:
            return self._in_memory.pop(index)
        file = os.path.join(self._directory, f"{index}.pt")
        moment: Moment = load(file, like=self._like)
        os.remove(file)
        return moment
