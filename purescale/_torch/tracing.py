"""Where a call runs, and which values the host can read.

traced                plain operators are needed: compiling, recorded by `jit`, or a transform
traced_or_recorded    or while make_fx records: the call is a part of something larger
recording_in_jit      makes this thread count as `traced` while `jit` records its operators
under_transform       vmap, grad or another of torch.func, forward mode, or recorded by `jit`
under_derivative      a transform that differentiates;  is_differentiated: through this tensor
recorded_by_make_fx   operators go into a graph of make_fx, whose code is that of eager mode
is_on_a_graph         torch.autograd records operators on these tensors
may_be_opaque         one operator may stand for a pass over many tensors, in a graph
whole_graph           a graph of torch.autograd must not end;  refuse_graph_end: where it would
current_context       some of these at the start of a step, which carries the answers
captured              inside of a function of `capture`, whose operators may be replayed
host_can_decide       by what is read: no graph of torch.autograd would miss it
host_can_read         a read neither waits nor is missing in a graph: a CPU, in eager mode
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._torch import private

PLAIN_TYPES = frozenset((Tensor, nn.Parameter))  # a subclass may hold no values
PLAIN_OR_FAKE = PLAIN_TYPES | {private.FakeTensor}

_in_jit: ContextVar[bool] = ContextVar("in_jit", default=False)  # `jit` records a graph
_in_whole_graph: ContextVar[bool] = ContextVar("in_whole_graph", default=False)
_captured: ContextVar[bool] = ContextVar("captured", default=False)
# For tests: if True, a step on a CPU reads no value, as on an accelerator.
_as_an_accelerator: ContextVar[bool] = ContextVar("as_an_accelerator", default=False)


@contextlib.contextmanager
def true_inside(flag: ContextVar[bool]) -> Iterator[None]:
    """Make a flag of this thread True inside."""
    token = flag.set(True)
    try:
        yield
    finally:
        flag.reset(token)


def recording_in_jit() -> AbstractContextManager[None]:
    """Make `traced` and `under_transform` True inside, in this thread."""
    return true_inside(_in_jit)


def traced() -> bool:
    """Return True under a compiler, `jit` or a transform of torch.func, as JAX calls all of these
    traced: plain operators are needed, which a compiler fuses, and memory cannot be compared.
    """
    # Dynamo must stop at the first line: it gets an interpreter stack of None wrapped in an object
    # that is not None.
    return (
        torch.compiler.is_compiling()
        or private.transforms_active()
        or private.in_forward_mode()
        or _in_jit.get()
    )


def under_transform() -> bool:
    """Return True inside vmap, grad or another torch.func transform, in forward mode, and while
    `jit` records. List operators have no vmap rule there, and fused kernels drop derivatives.
    """
    if private.transforms_active():
        return True
    eager = not torch.compiler.is_dynamo_compiling()
    return eager and (private.in_forward_mode() or _in_jit.get())


def is_on_a_graph(tensors: Sequence[Tensor | None]) -> bool:
    """Return True if torch.autograd records operators on these tensors, or on what a transform
    wraps in them.
    """
    if not torch.is_grad_enabled():
        return False
    if any([tensor is not None and tensor.requires_grad for tensor in tensors]):
        return True
    if not private.transforms_active() or torch.compiler.is_dynamo_compiling():
        return False
    return any([tensor is not None and innermost(tensor).requires_grad for tensor in tensors])


# Up to this number of tensors a compiler's own kernels are faster than one operator for all; for
# more it takes minutes to compile them.
MAX_INLINE_LEAVES = 16


def may_be_opaque(*lists: Sequence[Tensor]) -> bool:
    """Return True if, in a trace, one operator may stand for a pass over these lists: there are
    many tensors, and nothing needs its derivative or a rule for vmap.
    """
    if len(lists[0]) <= MAX_INLINE_LEAVES or any(map(is_on_a_graph, lists)):
        return False
    in_forward_mode = not torch.compiler.is_dynamo_compiling() and private.in_forward_mode()
    return not (private.transforms_active() or in_forward_mode)


class CallContext(NamedTuple):
    """The place in which a step runs, asked at its start and carried by it: another thread may
    change the answer of `traced`, because torch keeps some of it for the whole process. Functions
    that have no context ask again, such as those of `foreach`.
    """

    # The first, third and last are the answers of the functions of these names.
    traced: bool = False  # if True, all others are False
    # A plan may be found again. Else each call plans anew.
    reuses_plans: bool = False
    recorded_by_make_fx: bool = False
    host_can_read_cpu: bool = False  # the host may read plain tensors of a CPU
    captured: bool = False

    def host_can_decide(self, tensors: Sequence[Tensor]) -> bool:
        """Return the answer of `host_can_decide` in this context: True for plain tensors of a CPU,
        on no graph. A fake tensor has no value.
        """
        return self.host_can_read_cpu and all(
            [type(t) is Tensor and t.is_cpu and not t.requires_grad for t in tensors]
        )


def current_context() -> CallContext:
    """Return the context of a call. No plan is found again under a transform, a compiler and
    inference mode, and inside of `whole_graph`.
    """
    if traced():
        return CallContext(traced=True)
    recorded = recorded_by_make_fx()
    return CallContext(
        reuses_plans=not (torch.is_inference_mode_enabled() or _in_whole_graph.get()),
        recorded_by_make_fx=recorded,
        host_can_read_cpu=not (recorded or _as_an_accelerator.get()),
        captured=_captured.get(),
    )


def recorded_by_make_fx() -> bool:
    """Return True while `make_fx` records operators into a graph."""
    # Its import takes a third of a second, and without it nothing records.
    module: Any = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return module is not None and module.get_proxy_mode() is not None


def traced_or_recorded() -> bool:
    """Return True if `traced`, or while `make_fx` records: a call is a part of something larger."""
    return traced() or recorded_by_make_fx()


def is_unresolved(tensor: Tensor) -> bool:
    """Return True if a negation or conjugation is pending, which torch's kernels ignore."""
    return not torch.compiler.is_dynamo_compiling() and (tensor.is_neg() or tensor.is_conj())


def innermost(tensor: Tensor) -> Tensor:
    """Return the tensor that the transforms wrap, under vmap and grad."""
    return torch.func.debug_unwrap(tensor)


def is_differentiated(tensor: Tensor) -> bool:
    """Return True if a transform of torch.func differentiates through this tensor."""
    while not private.tracks_grad(tensor):
        inner = torch.func.debug_unwrap(tensor, recurse=False)
        if inner is tensor:
            return False
        tensor = inner
    return True


def under_derivative() -> bool:
    """Return True inside a transform of torch.func that differentiates, in forward mode, and while
    Dynamo traces a transform of any kind.
    """
    if not under_transform() or torch.compiler.is_dynamo_compiling():
        return under_transform()
    # Such a transform wraps what is created inside it.
    return private.in_forward_mode() or is_differentiated(torch.empty((), device="cpu"))


_is_cpu = operator.attrgetter("is_cpu")


def host_can_read(*lists: Sequence[Tensor]) -> bool:
    """Return True if reading these tensors does not wait, and no graph is recorded that would miss
    what it decides: on a CPU, in eager mode, without subclasses that may hold no values.
    """
    if traced_or_recorded() or _as_an_accelerator.get():
        return False
    return all(set(map(type, x)) <= PLAIN_TYPES and all(map(_is_cpu, x)) for x in lists)


def host_can_decide(*lists: Sequence[Tensor]) -> bool:
    """Return True if `host_can_read` these tensors, and torch.autograd records no operator on them:
    what they decide may be decided in Python.
    """
    return host_can_read(*lists) and not is_on_a_graph(list(itertools.chain(*lists)))


class GraphEndError(Exception):
    """A graph of torch.autograd ends here, by which a derivative would be lost."""


def whole_graph() -> AbstractContextManager[None]:
    """Make what would end a graph of torch.autograd raise a `GraphEndError`."""
    return true_inside(_in_whole_graph)


def refuse_graph_end() -> None:
    """Raise a `GraphEndError` inside of `whole_graph`: what follows is on no graph of
    torch.autograd.
    """
    if not traced() and _in_whole_graph.get() and torch.is_grad_enabled():
        raise GraphEndError


def captured() -> bool:
    """Return True inside of a function of `capture`, also where no graph is recorded."""
    return _captured.get()


def capturing() -> AbstractContextManager[None]:
    """Make `captured` True inside, so that what a captured step cannot do is refused."""
    return true_inside(_captured)


def refuse_in_trace_or_capture(what: str, fix: str) -> None:
    """Refuse what neither a traced nor a captured step can do."""
    if traced() or captured():
        raise ValueError(f"{what} Fix: {fix}")


def refuse_in_capture(what: str, fix: str) -> None:
    """Refuse what a captured step cannot do."""
    if captured():
        raise ValueError(f"a captured step {what} Fix: {fix}")


def as_on_an_accelerator() -> AbstractContextManager[None]:
    """Make a step on a CPU read no value, as on an accelerator. For tests."""
    return true_inside(_as_an_accelerator)
