"""A graph of a CPU, which loses what a CUDA graph loses: by it the tests run what a GPU replays."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from purescale._torch.donation import storage_pointer
from purescale._torch.tracing import PLAIN_TYPES, ReadError, is_read


class RecordedGraph(TorchDispatchMode):
    """The operators that ran while it recorded. A replay runs them again over the same memory,
    without a line of the function. Before it, memory that they made is filled with what nobody
    should read. While it records, a read is an error.
    """

    replays = 0  # of all graphs

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.made: dict[int, Tensor] = {}  # by the address of its storage
        self.tensors: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_read(func, args, kwargs):
            raise ReadError(func.overloadpacket.__name__)
        results = func(*args, **kwargs)
        if not all(type(leaf) in PLAIN_TYPES for leaf in tensors((args, kwargs, results))):
            return results  # of a trace: for `jit` tensors within a mode are of another kind
        alias = self.alias  # of an object of its own, off the graph of torch.autograd
        inputs = set(map(storage_pointer, tensors((args, kwargs))))
        call = pytree.tree_map(alias, (args, kwargs, results))
        for result in tensors(call[2]):
            if storage_pointer(result) not in inputs:
                self.made[storage_pointer(result)] = result
        self.calls.append((func, *call))
        return results

    def alias(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        self.tensors.append(leaf.detach())
        return self.tensors[-1]

    @contextlib.contextmanager
    def warming_up(self) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        # Reads without an operator. A mode that sees functions would be a setting of torch.
        with contextlib.ExitStack() as stack:
            for name in ("tolist", "numpy", "__array__"):
                stack.enter_context(mock.patch.object(Tensor, name, refuse))
            stack.enter_context(self)
            yield

    def wait(self) -> None:
        pass

    def replay(self) -> None:
        type(self).replays += 1
        with torch.no_grad():
            for tensor in self.made.values():
                poison(tensor)
            for func, args, kwargs, results in self.calls:
                if not func.is_view:
                    for old, new in zip(
                        tensors(results), tensors(func(*args, **kwargs)), strict=True
                    ):
                        if storage_pointer(old) != storage_pointer(new):
                            old.copy_(new)

    def reset(self) -> None:
        self.calls, self.made, self.tensors = [], {}, []


def refuse(tensor: Tensor, *args: Any) -> Any:
    torch.ops.aten._local_scalar_dense(tensor.flatten()[0])


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def poison(tensor: Tensor) -> None:
    """Fill all of a tensor's memory with NaN, or the largest whole number."""
    if tensor.layout is torch.strided:
        flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        is_whole = not (tensor.is_floating_point() or tensor.is_complex())
        whole = 1 if tensor.dtype is torch.bool or not is_whole else torch.iinfo(tensor.dtype).max
        flat.fill_(whole if is_whole else float("nan"))
