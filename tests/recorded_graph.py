"""A graph of a CPU, which loses what a CUDA graph loses: by it the tests run what a GPU replays."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from purescale._jit.capture import compiling_nothing
from purescale._torch import private
from purescale._torch.donation import storage_pointer
from purescale._torch.reads import ReadError, is_read
from purescale._torch.tracing import PLAIN_TYPES


@dataclasses.dataclass
class Sparse:
    """A sparse COO tensor in the memory of its indices and values. Each replay checks the indices:
    poisoned ones would lead out of the memory of a dense tensor.
    """

    indices: Tensor
    values: Tensor
    size: torch.Size
    is_coalesced: bool

    def tensor(self) -> Tensor:
        settings = {"check_invariants": True, "is_coalesced": self.is_coalesced}
        return torch.sparse_coo_tensor(self.indices, self.values, self.size, **settings)


class RecordedGraph(TorchDispatchMode):
    """The operators that ran while it recorded. A replay runs them again over the same memory,
    without a line of the function. Before it, memory that they made is filled with what nobody
    should read. While it records, a read is an error.
    """

    replays = 0  # of all graphs
    alive: ClassVar[weakref.WeakSet[RecordedGraph]] = weakref.WeakSet()

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.made: dict[int, Tensor] = {}  # by the address of its storage
        self.tensors: list[Tensor] = []
        self.alive.add(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_read(func, args, kwargs):
            raise ReadError(func.overloadpacket.__name__)
        results = func(*args, **kwargs)
        leaves = [x for x in pytree.tree_leaves((args, kwargs, results)) if isinstance(x, Tensor)]
        if not all(type(leaf) in PLAIN_TYPES for leaf in leaves):
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
        if leaf.is_sparse:
            indices, values = map(self.alias, tensors(leaf))
            return Sparse(indices, values, leaf.shape, leaf.is_coalesced())
        self.tensors.append(leaf.detach())
        return self.tensors[-1]

    @contextlib.contextmanager
    def warming_up(self) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        # Reads without an operator. A mode that sees functions would be a setting of torch.
        with contextlib.ExitStack() as stack:
            for name in ("tolist", "numpy", "__array__", "__repr__"):
                stack.enter_context(mock.patch.object(Tensor, name, refuse))
            stack.enter_context(compiling_nothing())
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
                    args, kwargs = pytree.tree_map_only(Sparse, Sparse.tensor, (args, kwargs))
                    for old, new in zip(
                        tensors(results), tensors(func(*args, **kwargs)), strict=True
                    ):
                        if storage_pointer(old) != storage_pointer(new):
                            old.copy_(new)

    def reset(self) -> None:
        self.calls, self.made, self.tensors = [], {}, []


def uses_but_for_graphs(tensor: Tensor) -> int:
    """How many tensors see the memory of this one, without those of graphs: one of CUDA has
    addresses alone.
    """
    pointers = [storage_pointer(x) for graph in RecordedGraph.alive for x in graph.tensors]
    return private.required_storage_uses(tensor.untyped_storage()._cdata) - pointers.count(
        storage_pointer(tensor)
    )


def refuse(tensor: Tensor, *args: Any) -> Any:
    raise ReadError("_local_scalar_dense")


def tensors(tree: Any) -> list[Tensor]:
    """The tensors of a tree, those of a sparse one in its place."""
    listed = []
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Sparse):
            listed += [leaf.indices, leaf.values]
        elif isinstance(leaf, Tensor) and leaf.is_sparse:
            listed += [leaf.detach()._indices(), leaf.detach()._values()]
        elif isinstance(leaf, Tensor):
            listed.append(leaf)
    return listed


def poison(tensor: Tensor) -> None:
    """Fill all of a tensor's memory with NaN, or the largest whole number."""
    if tensor.layout is torch.strided:
        flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        is_whole = not (tensor.is_floating_point() or tensor.is_complex())
        whole = 1 if tensor.dtype is torch.bool or not is_whole else torch.iinfo(tensor.dtype).max
        flat.fill_(whole if is_whole else float("nan"))
