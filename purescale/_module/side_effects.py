"""The effects of a forward on tensors that are not its own: each is refused, undone or told."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._module.model_copy import ModelCopy
from .._module.registered import Tensors
from .._torch import donation, private
from .._torch.tracing import PLAIN_TYPES, host_can_read, innermost, recorded_by_make_fx
from .._tree.leaves import versions

FIX = (
    "A parameter is an argument here. Fix: compute with a changed copy in forward, or change "
    "params between steps. If the forward alone moves it, like a codebook, call "
    "`requires_grad_(False)` on it before make_functional: it is then a buffer."
)
_requires_grad = operator.attrgetter("requires_grad")


class SideEffects:
    """A context in which a forward may not write into some tensors. What it does to `requires_grad`
    is undone at the end.

    Args:
        params: The parameters that the caller gave.
        watched: These, the buffers that are constants, and the copies of buffers that share memory
            in the model.
        tensors: All tensors that the forward is given.
        overlaps: By buffer, one that shares its memory in the model.
        transformed: If True, the call is in a transform, whose tensors have no memory.
        thorough: If True, values are compared too, which finds writes through `.data`.
    """

    def __init__(
        self,
        params: Tensors,
        watched: Tensors,
        tensors: Tensors,
        overlaps: dict[str, str],
        *,
        transformed: bool,
        thorough: bool,
    ) -> None:
        self.params, self.watched, self.overlaps = params, watched, overlaps
        self.tensors = tensors.values()
        self.counted: Collection[Tensor] = watched.values()
        if transformed:
            self.counted = list(map(innermost, self.counted))
        self.flags = list(map(_requires_grad, self.tensors))
        self.versions = versions(self.counted)
        self.addresses = [] if transformed else _addresses(params)
        # Not while a graph is recorded, in which no value may be read.
        thorough = thorough and host_can_read(list(params.values())) and not recorded_by_make_fx()
        self.values: Tensors = {}
        if (donation.DEBUG or thorough) and not transformed:
            self.values = {name: param.detach().clone() for name, param in params.items()}

    def __enter__(self) -> None:
        pass

    def __exit__(self, error: Any, *_: Any) -> None:
        if list(map(_requires_grad, self.tensors)) != self.flags:
            for tensor, flag in zip(self.tensors, self.flags, strict=True):
                if tensor.is_leaf:
                    tensor.requires_grad_(flag)
        if error is None:
            self._check()

    def _check(self) -> None:
        counts = versions(self.counted)
        if counts != self.versions:
            name = _first_difference(self.watched, self.versions, counts)
            if name in self.params:
                raise RuntimeError(_written(name))
            other = self.overlaps.get(name)
            raise RuntimeError(_written_overlap(name, other) if other else _written_constant(name))
        if self.addresses:
            addresses = list(map(Tensor.data_ptr, self.params.values()))
            if addresses != self.addresses:
                raise RuntimeError(
                    _written(_first_difference(self.params, self.addresses, addresses))
                )
        for name, value in self.values.items():
            if not torch.allclose(self.params[name], value, rtol=0, atol=0, equal_nan=True):
                raise RuntimeError(_written(name))


def _addresses(params: Tensors) -> list[int]:
    """Return the addresses of plain tensors; none if one is sparse, fake or of a user's class."""
    try:
        if set(map(type, params.values())) <= PLAIN_TYPES:
            return list(map(Tensor.data_ptr, params.values()))
    except RuntimeError:
        pass
    return []


def _first_difference(tensors: Tensors, before: list[int], after: list[int]) -> str:
    rows = zip(tensors, before, after, strict=True)
    return next(name for name, a, b in rows if a != b)


def _written(name: str) -> str:
    return (
        f"the forward of the model wrote into its parameter {name}, so params[{name!r}] "
        f"changed. {FIX}"
    )


def _written_constant(name: str) -> str:
    return (
        f"the forward of the model wrote into its buffer {name}, which is not dense and therefore "
        f"a constant: buffers[{name!r}] changed. Fix: compute with a changed copy in forward, or "
        "make the buffer dense, `.to_dense()`."
    )


def _written_overlap(name: str, other: str) -> str:
    return (
        f"the forward of the model wrote into its buffer {name}, which shares memory with {other} "
        "in the model. There the write changes both; as arguments they are separate. Fix: compute "
        f"one from the other in forward, or `.clone()` {other} where it is registered."
    )


# ---- tensors in plain attributes -----------------------------------------------------------------


class Reads(TorchFunctionMode):
    """A mode that records which tensors a forward reads. It makes a forward slow, so it is on in
    the first call only, and only in that of a model with tensors in plain attributes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves = private.pytree.tree_leaves((args, kwargs))
        self.ids.update(id(leaf) for leaf in leaves if isinstance(leaf, Tensor))
        return func(*args, **(kwargs or {}))


def warn_of_lost(copy: ModelCopy, reads: Reads) -> None:
    """Warn of tensors in plain attributes that the forward read, and then changed or replaced."""
    for path, tensor, is_replaced in copy.plain_tensors():
        if id(tensor) in reads.ids and (is_replaced or versions([tensor]) != [0]):
            warnings.warn(
                f"{path} of the model is a tensor in a plain attribute, which the forward "
                "reads and then changes. Each call of `apply` begins with its value at "
                "make_functional, so what a call leaves there is lost to the next one. Fix: name "
                "it in make_functional(model, state_attributes=(...,)), which makes it a buffer "
                "that `apply` takes and returns.",
                stacklevel=4,
            )
