"""A CUDA graph of a function, and a mode that sees what the operators of a function read."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import private
from .._torch.donation import storage_pointer
from .._torch.reads import ReadError, is_read, read_error
from .._torch.tracing import PLAIN_TYPES


class CudaGraph:
    """The operators that a function ran, to be run again over the same memory without it: a CUDA
    graph, which is replayed on the current stream of its device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._graph = device, torch.cuda.CUDAGraph()
        # Of its own: `reset` clears the workspaces of the stream, which another graph may read.
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._last = torch.cuda.current_stream(device)

    @contextlib.contextmanager
    def warming_up(self) -> Iterator[None]:
        """Run on the stream of the graph what libraries allocate in their first calls."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record operators in place of running them. Other threads may use the device."""
        gc.collect()  # a graph in a cycle must not be destroyed meanwhile
        try:
            # The outer context restores the stream where the end of a capture raises.
            with (
                torch.cuda.stream(self._stream),
                torch.cuda.graph(
                    self._graph, stream=self._stream, capture_error_mode="thread_local"
                ),
            ):
                yield
        except Exception as error:
            error.add_note(
                "This was raised while a CUDA graph was recorded; the first of these errors has "
                "the line. Likely cause: that line waits for the device or copies to the host, as "
                "`.item()`, `print` and `.cpu()` do. Fix: return what is to be looked at."
            )
            raise

    def wait(self) -> None:
        """Make the current stream wait for a replay on another one."""
        current = torch.cuda.current_stream(self._device)
        if current != self._last:
            current.wait_stream(self._last)
            self._last = current

    def replay(self) -> None:
        """Run the operators."""
        self._graph.replay()

    def reset(self) -> None:
        """Free the graph and its memory."""
        torch.cuda.synchronize(self._device)
        self._graph.reset()


def compiling_nothing() -> Any:
    """Run functions of torch.compile as they are: it does not compile within such a mode."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    set_stance: Any = torch.compiler.set_stance
    return set_stance("force_eager")


def watching(inputs: Sequence[Tensor]) -> Any:
    """Return a mode in which an operator that reads a value of the device of `inputs` raises a
    ReadError. Its list `read` keeps the memory that operators read and did not make, but that of
    `inputs`.
    """
    memory = set(map(storage_pointer, inputs))  # in whose memory is an input or a result
    device = inputs[0].device

    class Watching(private.DispatchMode):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.read: list[Tensor] = []

        def __enter__(self) -> Any:
            self._nothing_compiled = compiling_nothing()  # which begins when it is made
            self._nothing_compiled.__enter__()
            return super().__enter__()

        def __exit__(self, *error: Any) -> None:
            super().__exit__(*error)
            self._nothing_compiled.__exit__(*error)

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            tensors = _tensors((args, kwargs))
            here = any([tensor.device == device for tensor in tensors])
            if here and is_read(func, args, kwargs or {}):
                raise read_error(func)
            for tensor in tensors:
                if (pointer := storage_pointer(tensor)) not in memory:
                    memory.add(pointer)
                    self.read.append(tensor.detach())  # `tensor.data` may be replaced
            returned = func(*args, **(kwargs or {}))
            results = _tensors(returned)
            is_copy = func.overloadpacket.__name__ in ("_to_copy", "copy_")
            if here and is_copy and any([x.device.type != device.type for x in results]):
                raise ReadError("a copy to the host")
            memory.update(map(storage_pointer, results))
            return returned

    return Watching()


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in private.pytree.tree_leaves(tree) if type(leaf) in PLAIN_TYPES]
