"""torch's global generators in a step: set, read and put back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

ResultT = TypeVar("ResultT")

# A loss may make steps itself, so a thread may take its turn again.
_locks: dict[tuple[Any, ...], Any] = {}


class Generators(NamedTuple):
    """Global generators of torch, which are of the whole process: each one as the module that has
    it and its device.
    """

    sources: list[tuple[Any, tuple[Any, ...]]]

    @classmethod
    def of(cls, device: torch.device) -> Generators:
        """Return the generators that a loss may use."""
        sources: list[tuple[Any, tuple[Any, ...]]] = [(torch, ())]
        if device.type != "cpu":
            sources.append((getattr(torch, device.type), (device,)))
        return cls(sources)

    def states(self) -> list[Tensor]:
        return [module.get_rng_state(*where) for module, where in self.sources]

    def restore(self, states: list[Tensor]) -> None:
        for (module, where), state in zip(self.sources, states, strict=True):
            module.set_rng_state(state, *where)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Wait for the other threads whose steps set these generators."""
        with contextlib.ExitStack() as stack:
            for _, where in self.sources:
                stack.enter_context(_locks.setdefault(where, threading.RLock()))
            yield

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restore the states at the end, whatever is drawn or set."""
        before = self.states()
        try:
            yield
        finally:
            self.restore(before)


def run_with_rng(
    rng: Tensor, device: torch.device, run: Callable[[], ResultT]
) -> tuple[ResultT, Tensor]:
    """Return the result of `run`, which draws from the generator of the device in the state `rng`,
    and the state after it. The global generator is left unchanged.
    """
    generator = Generators(Generators.of(device).sources[-1:])
    with generator.locked(), generator.unchanged():
        generator.restore([rng.clone()])
        result = run()
        return result, generator.states()[0]
