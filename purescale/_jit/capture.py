"""A pure step as one graph of the device, which is recorded once and replayed for other values."""

from __future__ import annotations

import contextlib
import functools
import gc
import operator
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .._jit.jit import (
    FlatFunction,
    Jitted,
    check_arguments,
    form_of,
    name_of,
    resolved,
    settings_of_torch,
    varying,
    warn,
)
from .._jit.pure_graph import explained
from .._torch import foreach, memory_order, private
from .._torch.donation import storage_pointer
from .._torch.reads import ReadError, is_read
from .._torch.tracing import PLAIN_TYPES, captured, capturing, traced_or_recorded
from .._tree import pytree
from .._tree.cache import MetadataCache
from .._tree.matching import device_of, matching_leaves
from .._tree.pytree import Tree
from .._tree.scalars import checked_whole, short_repr

_data_ptr, _data = Tensor.data_ptr, operator.attrgetter("data")
_cdata = operator.attrgetter("_cdata")
_GIVEN_UP = "purescale_given_up"  # the attribute of a tensor that was donated
_RECORDING = threading.Lock()  # warming up moves the generators, which are of all threads


# ---- a graph of the device -----------------------------------------------------------------------


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


# What records, by the type of the device; on any other one a captured step is the step.
GRAPHS: dict[str, type[CudaGraph]] = {"cuda": CudaGraph}


def compiling_nothing() -> Any:
    """Run functions of torch.compile as they are: it does not compile within such a mode."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    set_stance: Any = torch.compiler.set_stance
    return set_stance("force_eager")


def _watching(inputs: Sequence[Tensor]) -> Any:
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
                raise ReadError(func.overloadpacket.__name__)
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


# ---- programs ------------------------------------------------------------------------------------


class Program:
    """A step as a graph over memory of its own, for arguments that differ in values only.

    Args:
        owner: The captured function.
        step: Its step, of tensors.
        tensors: Those of the arguments, the first `count` of which are donated.
    """

    def __init__(
        self, owner: Captured, step: FlatFunction, tensors: list[Tensor], count: int
    ) -> None:
        device = tensors[0].device
        self.graph, self.inputs = GRAPHS[device.type](device), foreach.detach_and_clone(tensors)
        # In whose memory is the new state after a replay.
        self.state = self.inputs[:count]
        self.pointers = list(map(_data_ptr, self.state))
        # Before `step` can keep a view, which may die later.
        self.uses = list(map(_uses, self.state))

        def run() -> list[Tensor]:
            torch.clear_autocast_cache()  # a cast weight of the last run would not be recorded
            return step(*[tensor.detach() for tensor in self.inputs])

        # A step of `jit` reads no value, and knows what it closes over.
        jitted = owner.step if isinstance(owner.step, Jitted) else None
        watched = _watching(self.inputs)
        draws = torch.random.fork_rng([device] if device.type == "cuda" else [])
        with _RECORDING, draws, capturing(), explained(ReadError):
            with self.graph.warming_up():
                for _ in range(owner.warmup - 1):
                    run()
                # In the last run: what the first one has cached is read from outside. Within a
                # mode `jit` would trace once more.
                with contextlib.nullcontext() if jitted else watched:
                    run()
            with self.graph.recording():
                self.others = self._settled(run())
        self.results = step.results
        self.read = jitted.programs.closed_over() if jitted else watched.read

    def _settled(self, results: list[Tensor]) -> list[Tensor]:
        """Write the new state into the memory of the old one. Return all other results, of which
        none is in that memory.
        """
        count = len(self.state)
        memory = {storage_pointer(tensor) for tensor in self.state if tensor.numel()}
        places = [*map(_place, self.state), *[None] * (len(results) - count)]
        # Copies come before the first write: a result may be a view of the old state.
        results = [
            x.detach().clone()
            if _place(x) != place and storage_pointer(x) in memory
            else x.detach()
            for x, place in zip(results, places, strict=True)
        ]
        moved = [index for index in range(count) if _place(results[index]) != places[index]]
        foreach.detach_and_copy_([self.state[i] for i in moved], [results[i] for i in moved])
        return results[count:]

    def pointers_of(self, tensors: list[Tensor]) -> list[int]:
        """Return the addresses of the donated ones of the tensors of arguments."""
        return list(map(_data_ptr, tensors[: len(self.state)]))

    def are_in_place(self, tensors: list[Tensor]) -> list[bool]:
        """Return for each donated tensor if it is in its memory; an empty one has none."""
        pointers = zip(self.pointers_of(tensors), self.pointers, strict=True)
        return [0 != pointer == own for pointer, own in pointers]

    def is_free(self, tensors: list[Tensor] | None = None) -> bool:
        """Return True if nobody sees the memory of the state, but for donated ones of these tensors
        that are in their places.
        """
        pointers = self.pointers_of(tensors) if tensors else [-1] * len(self.state)
        facts = zip(pointers, self.pointers, self.state, self.uses, strict=True)
        return pointers == self.pointers or all(
            pointer == own or _uses(x) <= n for pointer, own, x, n in facts
        )

    def __call__(self, tensors: list[Tensor]) -> Tree:
        """Return the results, the new state in the memory of this program."""
        self.graph.wait()
        pointers, count = self.pointers_of(tensors), len(self.state)
        moved, stayed = [*range(count, len(tensors))], tensors[:count]
        if pointers != self.pointers:
            moved += [i for i in range(count) if pointers[i] != self.pointers[i]]
            stayed = [
                x
                for x, one, own in zip(tensors, pointers, self.pointers, strict=False)
                if one == own
            ]
        foreach.detach_and_copy_([self.inputs[i] for i in moved], [tensors[i] for i in moved])
        self.graph.replay()
        # A CUDA graph moves none. The new state has objects with versions of their own.
        torch.autograd.graph.increment_version(stayed)
        return self.results.of([*map(_data, self.state), *foreach.detach_and_clone(self.others)])


def _uses(tensor: Tensor) -> int:
    """Return how many tensors see the memory of this one."""
    return private.required_storage_uses(_cdata(tensor.untyped_storage()))


def _place(tensor: Tensor) -> Any:
    """Return what is equal for tensors of one shape and dtype that are the same elements."""
    return tensor.data_ptr(), tensor.stride(), tensor.is_conj(), tensor.is_neg()


class Captured:
    """The function that `capture` returns."""

    def __init__(
        self, step: Callable[..., Tree], donate: bool, warmup: int, max_graphs: int
    ) -> None:
        functools.update_wrapper(self, step, updated=())
        self.step, self.donate, self.warmup, self.max_graphs = step, donate, warmup, max_graphs
        self.programs: MetadataCache[Program] = MetadataCache(size=None)
        self._lock = threading.Lock()
        self._has_warned = False  # that a graph was freed for another one

    def __call__(self, state: Tree, *others: Tree) -> Tree:
        cuda: Any = torch.cuda
        by_hand = cuda.is_initialized() and cuda.is_current_stream_capturing()
        if traced_or_recorded() or captured() or by_hand or torch.is_inference_mode_enabled():
            return self.step(state, *others)
        args = state, *others
        structure: Any
        leaves, structure = pytree.flatten(args)
        tensors = [leaf for leaf in leaves if leaf is not None]
        of_state = leaves[: structure.child(0).num_leaves]
        donated = [leaf for leaf in of_state if leaf is not None] if self.donate else []
        key = form_of(structure, leaves, tensors), settings_of_torch(), _settings_of_kernels()
        with self._lock:  # until the results are copied
            if any([hasattr(leaf, _GIVEN_UP) for leaf in donated]):
                raise _donated_error(state, of_state)
            program = self._lookup(tensors, key)  # which has plain tensors on one device
            if program is None:
                tensors = check_arguments(args, leaves, by="capture")
                device = device_of(state, of_state, "state")
                if device.type in GRAPHS:
                    tensors = _entering(tensors, device)
                    flat = FlatFunction(self._checked, structure, leaves)
                    program = self._lookup(tensors, key)
                    program = program or self._recorded(flat, key, tensors, len(donated))
            if program is not None:
                try:
                    returned = program(tensors)
                finally:  # a replay that fails may have overwritten the state
                    _give_up(donated)
        if program is None:
            with capturing():
                returned = _other_objects(self._checked(*args), donated)
            _give_up(donated)
        return returned

    def _checked(self, state: Tree, *others: Tree) -> Tree:
        """Return what the step returns. Refuse a new state that cannot take the place of the old
        one.
        """
        returned = self.step(state, *others)
        if self.donate:
            is_pair = type(returned) is tuple and len(returned) == 2
            is_state = pytree.flatten(returned)[1] == pytree.flatten(state)[1]
            new = returned[0] if is_pair and not is_state else returned
            matching_leaves(state, new, "state", "the returned state", _REASON)
        return returned

    def _lookup(self, tensors: list[Tensor], key: Any) -> Program | None:
        """Return the program for arguments like these in which the state is, else one whose memory
        nobody sees.
        """
        alike = list(self.programs.matching(tensors, key))
        if len(alike) > 1:
            alike.sort(key=lambda program: -sum(program.are_in_place(tensors)))
        return next((program for program in alike if program.is_free(tensors)), None)

    def _recorded(self, step: FlatFunction, key: Any, tensors: list[Tensor], count: int) -> Program:
        """Return a new program, in place of one whose memory nobody sees if there are too many."""
        if len(self.programs):
            # A cycle may hold a state.
            gc.collect()
            if (program := self._lookup(tensors, key)) is not None:
                return program
        if len(self.programs) >= self.max_graphs:
            free = [program for program in self.programs if program.is_free()]
            if not free:
                raise _capacity_error(self.max_graphs)
            if not self._has_warned:
                shapes = [[tensor.shape for tensor in one.inputs] for one in self.programs]
                warn(
                    "capture(%s) has %d graphs, and frees one to record another, which takes "
                    "longer than three steps. Likely cause: %s. Fix: pad to a few lengths and drop "
                    "the last, smaller batch; or max_graphs=%d.",
                    *(name_of(self.step), self.max_graphs, varying(shapes), 2 * self.max_graphs),
                )
                self._has_warned = True
            self.programs.discard(free[-1])  # the oldest
            free[-1].graph.reset()
        program = Program(self, step, tensors, count)
        self.programs.add(program.inputs, key, program)
        return program

    def release(self) -> None:
        """Free all graphs and their memory, but for that of states which somebody holds. The next
        call records anew.
        """
        with self._lock:
            for program in self.programs:
                program.graph.reset()
            self.programs = MetadataCache(size=None)


def _settings_of_kernels() -> Any:
    """Return the global settings of torch that decide by which kernels a GPU computes."""
    cudnn: Any = torch.backends.cudnn
    cuda: Any = torch.backends.cuda
    return (
        (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        [private.float32_precision("cuda", operators) for operators in ("conv", "rnn")],
        cuda.matmul.allow_fp16_reduced_precision_reduction,
        cuda.matmul.allow_bf16_reduced_precision_reduction,
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.math_sdp_enabled(),
    )


def _entering(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """Return plain tensors like these on the device, off every graph, gapless, each an object of
    its own. What comes from the host is copied before this returns.
    """
    tensors = [tensor.detach().to(device) for tensor in resolved(tensors)]
    return [tensor if memory_order.is_gapless(tensor) else tensor.clone() for tensor in tensors]


def _give_up(donated: Iterable[Tensor]) -> None:
    for leaf in donated:
        setattr(leaf, _GIVEN_UP, True)


def _other_objects(returned: Tree, donated: list[Tensor]) -> Tree:
    """Return a tree without a tensor that is an object of the donated ones."""
    leaves, structure = pytree.flatten(returned)
    objects = set(map(id, donated))
    return structure.unflatten([x.detach() if id(x) in objects else x for x in leaves])


# ---- what is refused -----------------------------------------------------------------------------

_REASON = "With donate=True a captured step writes the new state into the memory of the old one."


def _donated_error(state: Tree, leaves: list[Any]) -> RuntimeError:
    index = next(index for index, leaf in enumerate(leaves) if hasattr(leaf, _GIVEN_UP))
    return RuntimeError(
        f"{pytree.path(state, 'state', index)} was donated to an earlier call, which may have "
        "overwritten it. Likely cause: a state is used again after a step. Fix: `state, info = "
        "step(state, batch)`; keep `purescale.clone(state)` before a call to return to a state."
    )


def _capacity_error(max_graphs: int) -> RuntimeError:
    return RuntimeError(
        f"{max_graphs} graphs were recorded, and a state in the memory of each is held: none can "
        "be freed. Likely cause: a list of old states, or an exception that is kept. Fix: keep "
        f"`purescale.clone(state)` of old states, or `max_graphs={2 * max_graphs}`."
    )


# ---- capture -------------------------------------------------------------------------------------


def capture(
    step: Callable[..., Tree], *, donate: bool = False, warmup: int = 2, max_graphs: int = 8
) -> Captured:
    """Equal to `step`, on a GPU by a CUDA graph of all its operators, which is recorded once and
    replayed for other values.

        fast = capture(step, donate=True)   # or capture(jit(step, donate=0), donate=True)
        for batch in loader:
            state, info = fast(state, batch)

    A replay runs no Python of the step, and launches all kernels at once. The first call with
    arguments of a structure, shapes, strides, dtypes and settings of torch (autocast, grad mode,
    determinism, precision, kernels) runs the step on copies, records it once more, and replays
    that. Nothing that the caller has changes by this, nor do torch's generators. Later
    calls with arguments like these replay. Each graph has memory of its own for its arguments. With
    `donate` the state stays there from call to call, without a copy, and other arguments are copied
    in; all other results are copied out. A graph whose memory holds a state that somebody still has
    is not used for another state, which gets a graph of its own: so several states may take turns,
    and a `clone` may be returned to.

    A new scale, a skipped step, a schedule of a step count and dropout work as in `step`: they are
    tensors, and draws from torch's default generator. What `step` closes over is baked in: numbers,
    and the addresses of tensors, which are kept alive. On a CPU or a device without CUDA graphs, in
    inference mode, inside of torch.func, torch.compile, `jit` and another capture the result is
    `step` itself. What a graph cannot have is refused on a CPU too, so a program that runs there
    runs on a GPU. Calls of one captured function take turns, also from several threads. While it
    records, no other thread may draw from torch's generators.

    Args:
        step: A pure function `step(state, *others)` of trees of tensors that returns `(new_state,
            more)` or `new_state`; without `donate` any tree. It reads no value. A new state differs
            from the old one in values only.
        donate: The caller gives up the state that he passes in. A tensor that was given up is
            refused in later calls.
        warmup: How often the step runs before it is recorded: libraries allocate in the first run,
            and what that one caches is read in the second. A step that caches nothing needs 1.
        max_graphs: The largest number of graphs. One more takes the place of one whose memory
            nobody sees, of which the logger `purescale` warns once.

    Returns:
        A function of the same arguments. Arguments on the host are copied to the device of the
        state, which waits for them. Results are off every graph of torch.autograd. Its method
        `release()` frees all graphs; call it before `torch.distributed` ends.

    Raises:
        TypeError: From a call: naming the leaf, if an argument holds a number, a sparse tensor or
            another object.
        ValueError: From a call: the step reads a value, naming the line; it has `rng` in the state,
            `max_retries`, a `group`, a class with a `step` of its own or functions that make
            microbatches; or the new state has another form than the old one.
        RuntimeError: From a call: a state is used again that was donated, or the memory of all
            `max_graphs` graphs is seen by states that somebody holds.

    Example:
        >>> import torch
        >>> step = capture(lambda state, x: {"mean": state["mean"] + 0.1 * (x - state["mean"])})
        >>> step({"mean": torch.tensor(0.0)}, torch.tensor(10.0))
        {'mean': tensor(1.)}

    Source of the form: `torch.cuda.make_graphed_callables`, which takes modules and fixed shapes.
    """
    if not callable(step):
        raise TypeError(f"capture takes a function, got {short_repr(step)}. Fix: `capture(step)`.")
    if not isinstance(donate, bool):
        raise TypeError(
            f"donate is {short_repr(donate)}; expected True or False: only the first argument, the "
            "state, can be donated. Fix: `capture(step, donate=True)`."
        )
    checked_whole("warmup", warmup, least=1)
    checked_whole("max_graphs", max_graphs, least=1)
    return Captured(step, donate, warmup, max_graphs)
