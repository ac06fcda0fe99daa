"""Where a call runs: eagerly, compiled or under a transform; whether the host can see values."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

# They read private names of torch, which stand in one file.
from .._torch import private
from .._torch.private import traced as traced
from .._torch.private import under_transform as under_transform

# For tests: with it a CPU decides as an accelerator does, without reading a value.
_as_an_accelerator = False


def is_on_a_graph(tensors: Iterable[Tensor | None]) -> bool:
    """Whether torch.autograd would differentiate through what is computed of these."""
    if not torch.is_grad_enabled():
        return False
    return any([tensor is not None and tensor.requires_grad for tensor in tensors])


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
PLAIN_TYPES = frozenset((Tensor, nn.Parameter))  # a subclass may hold no values


def host_can_read(*tensors: Tensor) -> bool:
    """Whether to read these waits for nothing: on a CPU, in eager mode, of no subclass without
    values.
    """
    if _as_an_accelerator or traced():
        return False
    return set(map(type, tensors)) <= PLAIN_TYPES and all(map(_is_cpu, tensors))


@contextlib.contextmanager
def as_on_an_accelerator() -> Iterator[None]:
    """For tests: within it a CPU takes the way of an accelerator, which reads no value."""
    global _as_an_accelerator
    before, _as_an_accelerator = _as_an_accelerator, True
    try:
        yield
    finally:
        _as_an_accelerator = before
