"""A pure function of trees as one graph: traced from its arguments, as JAX does, and compiled."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .._jit.cut import Function
from .._jit.pure_graph import PureGraph, compiled, trace
from .._torch import private
from .._torch.autocast import active_autocast, outside_autocast
from .._torch.donation import can_write, storage_pointers
from .._torch.tracing import PLAIN_TYPES, refuse_graph_end, traced_or_recorded
from .._tree import pytree
from .._tree.cache import MetadataCache
from .._tree.hints import hint_keywords
from .._tree.leaves import as_tensor_list, describe
from .._tree.poison import is_poisoning, poison
from .._tree.pytree import Leaves, Tree, TreeDef
from .._tree.scalars import is_whole, short_repr

Backend = Literal["inductor", "aot_eager"]

CONSTANTS = (type(None), bool, int, float, complex, str)


class Results(NamedTuple):
    """The form of what a function returns."""

    structure: TreeDef
    leaves: Leaves  # the constants, and None for a tensor
    places: list[int]  # the indices of the tensors among the leaves

    def of(self, tensors: Sequence[Tensor]) -> Tree:
        """Return the tree with these tensors."""
        if len(tensors) == len(self.leaves):
            return self.structure.unflatten(tensors)
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        return self.structure.unflatten(leaves)


class FlatFunction:
    """A function of trees as one of tensors. `results` is the form of its results once it has run.

    Args:
        fn: The function.
        structure, leaves: Of the tuple of its arguments. Leaves are tensors or None.
    """

    results: Results

    def __init__(self, fn: Callable[..., Tree], structure: TreeDef, leaves: Leaves) -> None:
        self.fn, self.structure = fn, structure
        self.present = [leaf is not None for leaf in leaves]

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        remaining = iter(tensors)
        args = self.structure.unflatten([next(remaining) if x else None for x in self.present])
        returned = self.fn(*args)
        leaves, structure = pytree.flatten(returned)
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, (Tensor, *CONSTANTS)):
                raise _result_error(leaf, pytree.path(returned, "the result", index))
        places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.results = Results(structure, constants, places)
        return [leaves[place] for place in places]


class Program:
    """A graph and the function that runs it, for arguments that differ in values only.

    Args:
        tensors: Those of the arguments.
        graph, run, results: The graph, a function that runs it, and the form of its results.
    """

    def __init__(
        self, tensors: list[Tensor], graph: PureGraph, run: Function, results: Results
    ) -> None:
        self.run, self.results = run, results
        self.shapes = [tensor.shape for tensor in tensors]
        self.closed_over = graph.closed_over
        self.are_like = private.metadata_guard(*graph.closed_over)
        self.written = list(graph.donated.values())
        self.sources = graph.sources(len(results.places))
        written = [tensors[index] for index in self.written]
        tensor_list = as_tensor_list(written)
        self.are_plain = (
            tensor_list.dense_without_history
            and tensor_list.are_gapless
            and set(map(type, written)) <= {Tensor}
            and not tensor_list.any_requires_grad
        )

    def __call__(self, tensors: list[Tensor]) -> Tree:
        """Return the results for the tensors of arguments, of which donated ones may be
        overwritten.
        """
        inputs = [*tensors, *self.closed_over]
        if self.written:
            inputs = self._writable(inputs)
        outputs = [*inputs, *self.run(*inputs)]
        return self.results.of([outputs[index] for index in self.sources])

    def _writable(self, inputs: list[Tensor]) -> list[Tensor]:
        """Return the inputs, with copies of donated ones if somebody else may see their memory."""
        pointers = storage_pointers(inputs)
        if self.are_plain and len(set(pointers)) == len(pointers) and not is_poisoning():
            return inputs
        donated = [inputs[index] for index in self.written]
        others = [tensor for index, tensor in enumerate(inputs) if index not in self.written]
        ours = can_write(donated, others) and not is_poisoning()
        own = Tensor.detach if ours else Tensor.clone
        inputs = list(inputs)
        for index, tensor in zip(self.written, donated, strict=True):
            inputs[index] = own(tensor)
        return inputs


_LOCK = threading.Lock()  # torch records one graph at a time in all threads


class Programs:
    """The programs of one function, each made when arguments like its own first come."""

    def __init__(self, fn: Callable[..., Tree]) -> None:
        self._name = name_of(fn)
        self._programs: MetadataCache[Program] = MetadataCache(size=None)

    def of(self, tensors: list[Tensor], form: Any, make: Callable[[], Program]) -> Program:
        """Return the program for arguments like these. If there is none yet, make it."""
        with _LOCK:
            program = self.lookup(tensors, form)
            if program is None:
                with _telling_if_slow(self._name):
                    program = make()
                if active_autocast():  # the graph has the casts of the function
                    program.run = outside_autocast()(program.run)
                self._programs.add(tensors, (form, settings_of_torch()), program)
                if len(self._programs) == GRAPHS + 1:
                    warn(
                        "jit(%s) has made %d graphs, one for each kind of arguments, all compiled. "
                        "Likely cause: %s. Fix: pad to a few lengths and drop the last, smaller "
                        "batch; or `torch.compile(loss_fn)` alone, which takes any length.",
                        *(self._name, GRAPHS + 1, varying([one.shapes for one in self._programs])),
                    )
        return program

    def lookup(self, tensors: list[Tensor], form: Any) -> Program | None:
        """Return the program for arguments of this form like these, or None."""
        programs = self._programs.matching(tensors, (form, settings_of_torch()))
        # What the function closes over may differ in more than values now.
        return next((each for each in programs if each.are_like(*each.closed_over)), None)

    def closed_over(self) -> list[Tensor]:
        """Return the tensors that the function closes over, as views that keep their memory."""
        return [tensor.detach() for program in self._programs for tensor in program.closed_over]

    def __len__(self) -> int:
        return len(self._programs)


class Jitted:
    """The function that `jit` returns."""

    def __init__(
        self, fn: Callable[..., Tree], donate: tuple[int, ...], backend: Backend, mode: str | None
    ) -> None:
        functools.update_wrapper(self, fn, updated=())
        self.fn, self.donate, self.backend, self.mode = fn, donate, backend, mode
        self.programs, self.scans = Programs(fn), Programs(fn)
        self.pullbacks: dict[Any, Jitted] = {}  # those of vjp_through: as long as this function

    def __call__(self, *args: Tree) -> Tree:
        if traced_or_recorded():
            return self.fn(*args)  # a part of the graph, or of the transform, around it
        leaves, structure = pytree.flatten(args)
        tensors = [leaf for leaf in leaves if leaf is not None]

        def make() -> Program:
            _check_donate(self.donate, args)
            flat = FlatFunction(self.fn, structure, leaves)
            numbers = [number for number, arg in enumerate(args) for _ in pytree.tensors(arg)]
            donated = [index for index, number in enumerate(numbers) if number in self.donate]
            graph = trace(flat, tensors, donated)
            return Program(tensors, graph, compiled(graph, self.backend, self.mode), flat.results)

        form = form_of(structure, leaves, tensors)
        program = self.programs.lookup(tensors, form)
        if program is None:
            tensors = resolved(check_arguments(args, leaves))
            program = self.programs.of(tensors, form, make)
        results = program(tensors)
        if self.donate and is_poisoning():
            donated = [arg for index, arg in enumerate(args) if index in self.donate]
            kept = [arg for index, arg in enumerate(args) if index not in self.donate]
            poison(donated, [results, kept, program.closed_over])
        return results

    def trace(self, *args: Tree) -> torch.fx.GraphModule:
        """Return the graph for these arguments: a function of their tensors, then of the tensors
        that the function closes over, without writes, which returns the list of result tensors.
        """
        leaves, structure = pytree.flatten(args)
        flat = FlatFunction(self.fn, structure, leaves)
        return trace(flat, check_arguments(args, leaves)).module


def name_of(fn: Callable[..., Tree]) -> str:
    """Return the name of a function in warnings."""
    return getattr(fn, "__qualname__", None) or short_repr(fn)


def resolved(tensors: list[Tensor]) -> list[Tensor]:
    """Return tensors without a pending conjugation or negation, which inductor does not see."""
    return [tensor.resolve_conj().resolve_neg() for tensor in tensors]


def form_of(structure: TreeDef, leaves: Leaves, tensors: list[Tensor]) -> Any:
    """Return the structure of arguments, and where they have None, which is a leaf of it."""
    if len(tensors) == len(leaves):
        return structure, []
    return structure, [index for index, leaf in enumerate(leaves) if leaf is None]


def settings_of_torch() -> Any:
    """Return the global settings of torch that decide what a function computes."""
    modes = private.function_modes()
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        private.float32_precision("cuda", "matmul"),
        private.float32_precision("mkldnn", "matmul"),
        active_autocast(),
        [type(mode) for mode in modes],
        torch.get_default_device() if modes else None,
    )


# ---- what the logger says ------------------------------------------------------------------------

SECONDS = 5.0  # that a first call may take in silence
GRAPHS = 8  # that a function may have in silence
warn = logging.getLogger("purescale").warning


@contextlib.contextmanager
def _telling_if_slow(name: str) -> Iterator[None]:
    """A scope in which the logger says so if a first call takes longer than some seconds."""
    text = (
        "jit(%s): tracing and compiling for more than %g seconds. Later calls with arguments of "
        "the same shapes do not wait. In a new cache folder inductor first probes a CPU for some 8 "
        "seconds; TORCHINDUCTOR_VEC_ISA_OK=1 skips that check."
    )
    timer = threading.Timer(SECONDS, warn, (text, name, SECONDS))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def varying(shapes: Sequence[Sequence[torch.Size]]) -> str:
    """Return in what the arguments of graphs differ, from the shapes of those of each."""
    columns = [set(map(tuple, column)) for column in zip(*shapes, strict=False)]
    widest = max(columns, key=len, default=set())
    if len(widest) <= 1:
        return "arguments that differ in structure, dtype or strides"
    return f"shapes that vary, such as {', '.join(map(str, sorted(widest)[:3]))}"


# ---- checks --------------------------------------------------------------------------------------


def check_arguments(args: tuple[Tree, ...], leaves: Leaves, by: str = "jit") -> list[Tensor]:
    """Return the tensors among the leaves. Refuse, naming the leaf, what is not a plain tensor, or
    requires a gradient in grad mode. `by` is the name of the function that refuses.
    """
    for index, leaf in enumerate(leaves):
        if leaf is None:
            continue
        if not isinstance(leaf, Tensor):
            what = f"is {type(leaf).__name__} {short_repr(leaf)}; {by} takes trees of tensors"
            fix = (
                "`torch.tensor(...)` for a number that changes from call to call; "
                "functools.partial or a closure for what stays; for a container of your own "
                "`optree.register_pytree_node(cls, flatten, unflatten, namespace='purescale')`"
            )
        elif type(leaf) not in PLAIN_TYPES or leaf.layout is not torch.strided or leaf.is_nested:
            what = f"is {type(leaf).__name__} {describe(leaf)}; {by} takes plain, dense tensors"
            fix = "torch.compile, or `.to_dense()`"
        elif leaf.requires_grad and torch.is_grad_enabled():
            refuse_graph_end()
            what = f"requires a gradient, and the results of {by} have no graph"
            fix = "`torch.func.grad` inside of the function, or `with torch.no_grad():` around it"
        else:
            continue
        raise TypeError(f"{pytree.path(args, 'args', index)} {what}. Fix: {fix}.")
    return [leaf for leaf in leaves if leaf is not None]


def _check_donate(donate: Sequence[int], args: tuple[Tree, ...]) -> None:
    """Refuse the position of an argument that there is not."""
    if donate and max(donate) >= len(args):
        raise ValueError(
            f"donate is {tuple(donate)}, and the function was called with {len(args)} arguments. "
            "Likely cause: an argument that is counted from 1. Fix: `donate=(0,)` for the first."
        )


def _result_error(leaf: Any, at: str) -> TypeError:
    return TypeError(
        f"{at} is {type(leaf).__name__} {short_repr(leaf)}; a function under jit or capture "
        "returns trees of tensors. Fix: return its tensors, or register the container: "
        "`optree.register_pytree_node(cls, flatten, unflatten, namespace='purescale')`."
    )


# ---- jit -----------------------------------------------------------------------------------------


@hint_keywords
def jit(
    fn: Callable[..., Tree],
    *,
    donate: int | Sequence[int] = (),
    backend: Backend = "inductor",
    mode: str | None = None,
) -> Jitted:
    """Equal to `fn`, a pure function of trees of tensors, as one compiled graph: values to 1e-6,
    flags equal.

    The first call runs `fn` once with tensors that have no values, records its operators, and
    compiles them. Later calls with arguments of the same structure, shapes, strides, dtypes and
    devices run that graph and no line of `fn`. There is a graph for each kind of arguments; the
    logger `purescale` warns at the ninth, and of a first call that takes more than 5 seconds. No
    Dynamo is involved, so a call has nothing else to check; a small step is much faster than under
    `torch.compile`, and traced in a tenth of the time. `fn` may hold `train_step` or a loop by
    hand, `torch.vmap` and `torch.func.grad`, and other functions of `jit`, which become a part of
    its graph. Put jit outermost, `jit(torch.vmap(step), donate=0)`: under `torch.vmap`,
    `torch.func.grad` and torch.compile the result is `fn` itself, and jit neither compiles nor
    donates.

    Where a fused kernel of torch makes the step of more than 16 tensors, it stays one operator in
    the graph, and runs after the compiled code: by its formula, each parameter would take a third
    of a second to compile.

    What `fn` closes over is baked in when it is traced, as in JAX: settings, numbers, modules'
    code. A tensor that it closes over becomes an input of the graph: it is not copied, a later
    write into it and `tensor.data = new` are seen, and a new tensor under its name is not. Prints
    and other side effects happen in the first call only. Dropout draws from torch's generator in
    each call, other numbers than in eager mode with "inductor".

    Args:
        fn: A function of trees, called with positional arguments. It writes into no argument and
            nothing outside, and reads no value, of arguments or of what it closes over.
        donate: The positions of arguments that the caller gives up. Results take their memory where
            shape, strides, dtype and device are those of one of their tensors, in order. A donated
            tensor that is returned as it was stays in its memory, if no earlier result took it. If
            a donated tensor shares memory with another one, the results are in fresh memory. Inside
            of `fn`, `donate=True` does nothing.
        backend: `"inductor"` compiles the graph. `"aot_eager"` runs its operators one by one, on
            any device.
        mode: A mode of `torch.compile`, such as `"max-autotune"`. `"reduce-overhead"` captures a
            CUDA graph, but not with `donate`: torch captures no write into an argument.

    Returns:
        A function of the same arguments. Its results are off every graph, in memory of their own or
        of donated arguments. Its method `trace(*args)` returns the graph, a
        `torch.fx.GraphModule` of ATen operators, and of `purescale::fused_update`.

    Raises:
        TypeError: From a call: naming the leaf, if an argument holds a Python number, a tensor of a
            subclass, or an object that is not a tree; a result may hold constants.
        ValueError: From a call, mostly naming the line: `fn` reads a value, makes a tensor whose
            shape depends on one, or writes into an argument or into a tensor that it closes over.

    Example:
        >>> import torch
        >>> step = jit(lambda state, x: {"mean": state["mean"] + 0.1 * (x - state["mean"])})
        >>> step({"mean": torch.tensor(0.0)}, torch.tensor(10.0))
        {'mean': tensor(1.)}

    Source of the form: `jax.jit`.
    """
    if not callable(fn):
        raise TypeError(f"jit takes a function, got {short_repr(fn)}. Fix: `jit(step)`.")
    donated = (donate,) if is_whole(donate) else donate
    if not isinstance(donated, (tuple, list)) or not all(is_whole(i) and i >= 0 for i in donated):
        raise TypeError(
            f"donate is {short_repr(donate)}; expected positions of arguments. Fix: `donate=(0,)`."
        )
    if backend not in ("inductor", "aot_eager"):
        raise ValueError(f"backend must be 'inductor' or 'aot_eager', got {backend!r}.")
    if mode is not None and backend != "inductor":
        raise ValueError(
            f"mode={mode!r} is for inductor, and backend is {backend!r}. Fix: no mode."
        )
    return Jitted(fn, tuple(donated), backend, mode)
