"""Where a call runs: eagerly, compiled or under a transform; whether the host can see values."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# They read private names of torch, which stand in one file.
from .._torch import private
from .._torch.metadata_cache import PLAIN_TYPES as PLAIN_TYPES
from .._torch.metadata_cache import cached
from .._torch.private import traced as traced
from .._torch.private import under_transform as under_transform

# For tests: with it a CPU decides as an accelerator does, without reading a value.
_as_an_accelerator = False


def is_on_a_graph(tensors: Sequence[Tensor | None]) -> bool:
    """Whether torch.autograd would differentiate through what is computed of these."""
    return torch.is_grad_enabled() and any_requires_grad(tensors)


def any_requires_grad(tensors: Sequence[Tensor | None]) -> bool:
    """Whether one of them does."""
    return cached(
        "requires grad",
        lambda: any([tensor is not None and tensor.requires_grad for tensor in tensors]),
        tensors,
    )


def is_lazy(tensor: Tensor) -> bool:
    """Whether a negation or conjugation is still to be made: torch's kernels do not look."""
    return not torch.compiler.is_compiling() and (tensor.is_neg() or tensor.is_conj())


def innermost(tensor: Tensor) -> Tensor:
    """Under vmap and grad, the tensor that the transforms wrap."""
    while private.is_wrapped(tensor):
        tensor = private.unwrapped(tensor)
    return tensor


def is_differentiated(tensor: Tensor) -> bool:
    """Whether a transform of torch.func takes a derivative with respect to what this is made of."""
    while private.is_wrapped(tensor):
        if private.tracks_grad(tensor):
            return True
        tensor = private.unwrapped(tensor)
    return False


_is_cpu = operator.attrgetter("is_cpu")


def host_can_read(*lists: Sequence[Tensor]) -> bool:
    """Whether to read these waits for nothing: on a CPU, in eager mode, of no subclass without
    values.
    """
    if _as_an_accelerator or traced():
        return False
    return all(map(_hold_values_on_a_cpu, lists))


def _hold_values_on_a_cpu(tensors: Sequence[Tensor]) -> bool:
    return cached(
        "readable",
        lambda: set(map(type, tensors)) <= PLAIN_TYPES and all(map(_is_cpu, tensors)),
        tensors,
    )


@contextlib.contextmanager
def as_on_an_accelerator() -> Iterator[None]:
    """For tests: within it a CPU takes the way of an accelerator, which reads no value."""
    global _as_an_accelerator
    before, _as_an_accelerator = _as_an_accelerator, True
    try:
        yield
    finally:
        _as_an_accelerator = before
