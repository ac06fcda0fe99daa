"""Reads of values on the host: a mode in which they raise, and the operators that need them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class ReadError(Exception):
    """A value was read on the host, by this operator or method."""


class NoReads(TorchFunctionMode):
    """A mode in which what a function reads on the host, by the methods that its author may call,
    raises a ReadError. A mode that sees operators would see all, and import the compiler.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS or (func is Tensor.__getitem__ and _reads_index(args[1])):
            raise ReadError(func.__name__)
        return func(*args, **(kwargs or {}))


def is_read(func: Any, args: Any, kwargs: Any) -> bool:
    """Return True for an operator whose result or shape needs values on the host."""
    name = func.overloadpacket.__name__
    if name in ("index", "index_put", "index_put_"):
        masks = (torch.bool, torch.uint8)
        return any(index is not None and index.dtype in masks for index in args[1])
    # Those that make a sparse tensor, of whose number of entries no tag speaks.
    if name == "_coalesce" or (name.startswith("_to_sparse") and args[0].layout is torch.strided):
        return True
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return bool(tags & set(func.tags)) and kwargs.get("output_size") is None


_READS = {torch.equal, torch.nonzero, torch.masked_select, torch.unique} | {
    getattr(Tensor, name)
    for name in (
        *("item", "tolist", "numpy", "equal", "nonzero", "masked_select", "unique", "is_nonzero"),
        *("__array__", "__bool__", "__complex__", "__float__", "__index__", "__int__"),
    )
}


def _reads_index(index: Any) -> bool:
    """Return True if an index is, or holds, a number to be read or a mask."""
    parts = index if isinstance(index, (list, tuple)) else (index,)
    return any(
        isinstance(part, Tensor) and (not part.ndim or part.dtype is torch.bool) for part in parts
    )
