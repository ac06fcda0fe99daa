"""The states of a run from which it is replayed, each with those of the random generators."""

from __future__ import annotations

import os
import tempfile
from typing import NamedTuple

import torch
from torch import Tensor

from .._checkpoint import load, save
from .._step.retry import generators_of
from .._tree import tree as _tree
from .._tree.tree import Tree


class Moment(NamedTuple):
    """A run before one of its steps: its state, and the states of torch's generators."""

    state: Tree
    generators: list[Tensor]


class Generators:
    """The global generators of torch from which the steps of a run draw."""

    def __init__(self, device: torch.device) -> None:
        self.generators = generators_of(device)

    def __enter__(self) -> None:
        """Remember the states, which are restored at the end."""
        self._before = self.states()

    def __exit__(self, *error: object) -> None:
        self.restore(self._before)

    def states(self) -> list[Tensor]:
        return [module.get_rng_state(*where) for module, where in self.generators]

    def restore(self, states: list[Tensor]) -> None:
        for (module, where), state in zip(self.generators, states, strict=True):
            module.set_rng_state(state, *where)


class KeptStates:
    """The moments of a run that are kept, by the index of their step: in memory, or as files in a
    new directory under `folder`, which is removed afterwards.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, like: Moment) -> None:
        self._like, self._kept = like, dict[int, Moment]()
        self._directory = None
        if folder is not None:
            self._directory = tempfile.TemporaryDirectory(dir=folder, prefix="vjp_through_")

    def __enter__(self) -> KeptStates:
        return self

    def __exit__(self, *error: object) -> None:
        if self._directory is not None:
            self._directory.cleanup()

    def _file(self, index: int) -> str:
        assert self._directory is not None
        return os.path.join(self._directory.name, f"{index}.pt")

    def keep(self, index: int, moment: Moment) -> None:
        if self._directory is not None:
            save(self._file(index), moment)
        else:
            self._kept[index] = Moment(_tree.clone(moment.state), moment.generators)

    def pop(self, index: int) -> Moment:
        """Return a moment and forget it."""
        if self._directory is None:
            return self._kept.pop(index)
        moment: Moment = load(self._file(index), like=self._like)
        os.remove(self._file(index))
        return moment
