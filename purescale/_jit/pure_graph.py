"""A pure function of tensors as one graph of operators, traced without values and compiled."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._jit.cut import (
    WRITE,
    Function,
    apart,
    compiled_in_stages,
    donate_inputs,
    has_operators,
    kind,
    memory,
    placeholders,
    separate_results,
)
from .._torch import private
from .._torch.autocast import outside_autocast
from .._torch.foreach import clone_list
from .._torch.reads import NoReads, ReadError
from .._torch.tracing import PLAIN_TYPES, innermost, is_unresolved, recording_in_jit


class PureGraph(NamedTuple):
    """A graph without writes, but for those into donated inputs at its end. No result shares memory
    with an input or another result.
    """

    module: Any  # a torch.fx.GraphModule of the inputs, then `closed_over`; it returns a list
    closed_over: list[Tensor]  # the tensors themselves, whose values may change
    examples: list[Tensor]  # fake tensors like all inputs, no two in one memory
    # by the index of a result, the input that takes its values, in place of a result
    donated: dict[int, int]

    def sources(self, number: int) -> list[int]:
        """Return the index of each of a number of results in the list of the inputs, then what the
        graph returns.
        """
        returned = itertools.count(len(self.examples))
        return [self.donated[x] if x in self.donated else next(returned) for x in range(number)]


def trace(
    function: Function, inputs: Sequence[Tensor], donate: Sequence[int] = (), literals: bool = True
) -> PureGraph:
    """Return the graph of a function that returns tensors. It is called once, with tensors that
    have no values.

    Args:
        function: A function of the inputs.
        inputs: Examples, which are not read.
        donate: The indices of inputs whose memory results may take.
        literals: If False, tensors such as `torch.tensor(1.0)` in the code are closed over: torch's
            scan takes no constants.

    Raises:
        ValueError: The function reads a value, or writes into an input or into a tensor that it
            closes over.
    """
    fake = _without_values()
    examples = apart(fake, inputs)
    outside = _Outside(fake)

    def watched(*tensors: Tensor) -> Sequence[Any]:
        with _PureOnly(tensors, outside):
            return function(*tensors)

    with explained(), recording_in_jit():
        module = _graph_of(watched, examples, fake)
        if any(getattr(node.target, "namespace", "") == "c10d" for node in module.graph.nodes):
            raise _EffectError(*_RANKS)
    closed_over = _lift(module, outside, literals)
    examples = apart(fake, [*inputs, *closed_over])
    # Without writes into what the function made. The graph has the casts of the function.
    module = outside_autocast()(_graph_of)(torch.func.functionalize(module), examples, fake)
    _check_unwritten(module, len(inputs))
    separate_results(module)
    donated = donate_inputs(module, donate)
    module.graph.lint()
    module.recompile()
    return PureGraph(module, closed_over, examples, donated)


def _without_values() -> Any:
    """Return a mode whose tensors refuse, in C too, what reads a number."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # imports sympy

    # Without a ShapeEnv torch 2.15 remembers the values of 0-d integers.
    shapes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    mode = private.FakeTensorMode
    return mode(shape_env=shapes, static_shapes=True, allow_non_fake_inputs=True)


def _graph_of(function: Function, inputs: Sequence[Tensor], fake: Any) -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx  # imports sympy

    with fake:  # what the function makes has no values either
        return make_fx(function, _allow_non_fake_inputs=True)(*inputs)


@outside_autocast()
def compiled(graph: PureGraph, backend: str = "inductor", mode: str | None = None) -> Function:
    """Return the graph as compiled code, a function of its inputs and `closed_over`."""
    options = None if mode is None else private.list_mode_options(mode)

    def compile(module: Any, examples: Sequence[Tensor]) -> Function:
        if backend == "inductor":
            return _compiled(module, examples, options)
        return torch.no_grad()(module)  # a tensor from outside may record

    return compiled_in_stages(graph.module, graph.examples, compile)


def _compiled(module: Any, inputs: Sequence[Tensor], options: Any, **more: Any) -> Function:
    # A small graph on a CPU waits for what calls its kernels: in C++ that takes three quarters. In
    # one file with the kernels it would compile for as long as they do, several times over.
    if options is None and all(tensor.is_cpu for tensor in inputs):
        options = {"cpp_wrapper": True, "cpp_wrapper_build_separate": True}
    # With it inductor takes a view of an input for `view + zeros`, also after a write (torch 2.13).
    more["joint_graph_constant_folding"] = not any(x.target is WRITE for x in module.graph.nodes)
    with _other_draws(inputs):
        run = private.compile_graph(module, inputs, {**(options or {}), **more})
    return _apart_from_inputs(run)


@contextlib.contextmanager
def _other_draws(inputs: Sequence[Tensor]) -> Iterator[None]:
    """A scope that leaves torch's generators as they were, and in which they draw other numbers:
    torch sets them back after compiling, so other threads would draw the same numbers twice.
    """
    devices = {tensor.device for tensor in inputs if tensor.is_cuda}
    with torch.random.fork_rng(devices):
        torch.default_generator.seed()
        for device in devices:
            torch.cuda.default_generators[device.index].seed()
        yield


def _apart_from_inputs(compiled: Function) -> Function:
    """Return a compiled function whose results share memory with no input and with no other result:
    inductor takes `x` for `x * ones` and `x + zeros`. Which do is the same in every call.
    """
    shared: list[int] | None = None

    def apart(*inputs: Tensor) -> list[Tensor]:
        nonlocal shared
        results = list(compiled(*inputs))
        if shared is None:
            memories = {x.untyped_storage().data_ptr() for x in inputs if x.numel()}
            shared = []
            for index, result in enumerate(results):
                pointer = result.untyped_storage().data_ptr()
                if result.numel() and pointer in memories:
                    shared.append(index)
                memories.add(pointer)
        for index in shared:
            results[index] = results[index].detach().clone()
        return results

    return apart


@outside_autocast()
def scanned(graph: PureGraph, inputs: Sequence[Tensor], carried: int) -> Function:
    """Return a compiled function of `inputs` and `closed_over` that repeats the graph: the first
    `carried` results are the first inputs of the next repetition, and all other inputs have one
    dimension more in front. It returns the last carried results, and all others stacked.
    """
    ends = placeholders(graph.module), graph.module.graph.output_node().args[0]
    old, new = ([kind(node) for node in nodes[:carried]] for nodes in ends)
    if old == new and has_operators(graph.module):
        return _looped(graph, len(inputs), carried)
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    fake = private.FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)

    def any_number(tensor: Tensor) -> Tensor:
        """Return a fake stack of such tensors with a symbolic length."""
        sizes = [DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * tensor.ndim]
        stack = torch.stack([tensor, tensor])  # lengths 0 and 1 would be constants
        context: Any = StatelessSymbolicContext(sizes)
        return fake.from_tensor(stack, symbolic_context=context)

    number = len(inputs)
    examples = [
        *apart(fake, inputs[:carried]),
        *map(any_number, inputs[carried:]),
        *apart(fake, graph.closed_over),
    ]

    def repeat(*tensors: Tensor) -> Sequence[Any]:
        carry, stacks, rest = tensors[:carried], tensors[carried:number], tensors[number:]
        return private.scan(once, list(carry), list(stacks), rest)

    def once(*tensors: Tensor) -> list[Tensor]:
        results = list(graph.module(*tensors))
        # inductor takes no scan with a single result (torch 2.13).
        return results if len(results) > 1 else [*results, results[0].clone()]

    # torch caches no graph with a scan unless it is told that the key has all of its body.
    cached = {"torch.ops.higher_order.scan": "1"}
    module = _graph_of(repeat, examples, fake)
    return _compiled(module, examples, None, unsafe_marked_cacheable_functions=cached)


def _looped(graph: PureGraph, number: int, carried: int) -> Function:
    """Return `scanned` as a loop over the compiled graph, which overwrites what is carried: within
    one graph operators of the library would copy it in each repetition.
    """
    results = len(graph.module.graph.output_node().args[0])
    graph = graph._replace(donated=donate_inputs(graph.module, range(carried)))
    once, sources = compiled(graph), graph.sources(results)

    def repeat(*tensors: Tensor) -> Sequence[Any]:
        stacks, closed_over = tensors[carried:number], tensors[number:]
        carry, columns = clone_list(tensors[:carried]), []
        for row in zip(*[stack.unbind() for stack in stacks], strict=True):
            inputs = [*carry, *row, *closed_over]
            outputs = [*inputs, *once(*inputs)]
            new = [outputs[index] for index in sources]
            carry = new[:carried]
            columns.append(new[carried:])
        return [*carry, *[torch.stack(column) for column in zip(*columns, strict=True)]]

    return torch.no_grad()(repeat)


# ---- the graph -----------------------------------------------------------------------------------


def _lift(module: Any, outside: _Outside, literals: bool) -> list[Tensor]:
    """Make inputs of the tensors that the function closes over, and return them. With `literals`,
    those of the code stay constants.
    """
    closed_over: list[Tensor] = []
    inputs: dict[str, Any] = {}
    last = ([None, *placeholders(module)])[-1]
    for node in list(module.graph.nodes):
        if node.op != "get_attr":
            continue
        name, value = node.target, getattr(module, node.target)
        if isinstance(value, torch.Generator):
            raise _refusal_error(*_DRAWS)
        if not isinstance(value, Tensor):  # a graph of its own, as of torch.cond
            continue
        if literals and all(
            user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users
        ):
            continue
        if name not in inputs:
            with module.graph.inserting_after(last):
                last = inputs[name] = module.graph.placeholder(f"closed_over_{len(inputs)}")
            closed_over.append(outside.original(value))
        node.replace_all_uses_with(inputs[name])
        module.graph.erase_node(node)
    for name in inputs:
        delattr(module, name)
    module.recompile()
    return closed_over


# ---- what cannot be a pure graph -----------------------------------------------------------------

Cause = tuple[str, str]  # what the function does, and the fix
_RETURN = "to change it, return the new value; to have it in fresh memory, `.clone()` it"
_WRITES_ARGUMENT = "writes into an argument", f"{_RETURN}; `donate` lets results take its memory"
_WRITES_OUTSIDE = "writes into a tensor that it closes over", f"make it an argument; {_RETURN}"
_READS = (
    "reads the value of a tensor",
    "`torch.where` in place of `if`; operators in place of a number, `x + t * y` for `torch.add(x, "
    "y, alpha=t)`, or a number of Python; return what is to be looked at",
)
_SHAPE = (
    "makes a tensor whose shape depends on values",
    "`torch.where(mask, x, 0)` in place of `x[mask]`",
)
_COMPILED = (
    "calls a function that torch.compile returned",
    "the function itself: its operators become a part of this graph",
)
_BACKWARD = (
    "calls backward, which writes into `.grad`",
    "purescale.value_and_grad, torch.func.grad or torch.autograd.grad",
)
_DRAWS = (
    "draws from a torch.Generator of its own",
    "torch's default generator, with torch.manual_seed before the call",
)
_REQUIRES_GRAD = (
    "calls requires_grad_ where torch.func differentiates or maps",
    "`torch.func.grad(function)(x)` in place of `torch.autograd.grad(function(x), x)`",
)
_LAZY = (
    "closes over a tensor whose conjugation or negation is pending",
    "`tensor.resolve_conj().resolve_neg()` before the function is made",
)
_VALIDATES = (
    "makes a torch.distributions.Distribution that checks its arguments, which reads them",
    "`validate_args=False`, as in `Categorical(logits=logits, validate_args=False)`",
)
_RANKS = (
    "calls torch.distributed",
    "the step without jit, whose loss may gather, and whose `group` averages the gradients",
)
_TENSOR_OF = (
    "makes a tensor of a list with tensors, which reads them",
    "`torch.stack([x[0], x.new_tensor(1.0)])` in place of `torch.tensor([x[0], 1.0])`",
)
_ENTRIES = (
    "makes a sparse tensor whose number of entries depends on values",
    "`x.to_dense()` in place of `x.coalesce()`; a step takes a sparse gradient as it is, and sums "
    "its duplicates",
)
# By words in the errors of `NoReads`, and of torch. Without them torch's error is raised as it is.
_CAUSES_OF_READS = {"_coalesce": _ENTRIES, "_to_sparse": _ENTRIES, "": _READS}
_CAUSES = {
    "data-dependent": _READS,
    "DataDependent": _READS,
    "DynamicOutputShape": _SHAPE,
    "data is not allocated yet": _TENSOR_OF,
    "Tensor.requires_grad_()": _REQUIRES_GRAD,
    "symbolically trace a dynamo-optimized function": _COMPILED,
}


class _EffectError(Exception):
    """A write or a backward inside of `_PureOnly`, with its cause."""


class _PureOnly(NoReads):
    """A mode that refuses a read, a write into an input or a tensor from outside, and a backward
    that writes into `.grad`. What is from outside comes to torch as a fake tensor, so that torch
    too refuses to read it.
    """

    def __init__(self, inputs: Sequence[Tensor], outside: _Outside) -> None:
        super().__init__()
        self.inputs, self.outside = list(map(_storage, inputs)), outside

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.backward:
            raise _EffectError(*_BACKWARD)
        args, kwargs = self.outside.replaced(args), self.outside.replaced(kwargs or {})
        for tensor in _written(func, args, kwargs):
            storage = _storage(tensor)
            if any(storage is of_input for of_input in self.inputs):
                raise _EffectError(*_WRITES_ARGUMENT)
            if self.outside.holds(tensor):
                raise _EffectError(*_WRITES_OUTSIDE)
        return super().__torch_function__(func, types, args, kwargs)


class _Outside:
    """The tensors that a function closes over, and a fake tensor in place of each."""

    def __init__(self, fake: Any) -> None:
        self._fake = fake
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}  # by the id of the tensor

    def replaced(self, value: Any) -> Any:
        """Return the arguments of a function with fake tensors in place of those from outside."""
        if isinstance(value, Tensor):
            return self._fake_for(value) if _is_plain(value) else value
        if type(value) in (tuple, list):
            return type(value)(map(self.replaced, value))
        if type(value) is dict:
            return {key: self.replaced(part) for key, part in value.items()}
        if type(value) is slice:
            return slice(*map(self.replaced, (value.start, value.stop, value.step)))
        return value

    def _fake_for(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._pairs:
            if is_unresolved(tensor):
                raise _EffectError(*_LAZY)
            # A view is recorded as one of its base, of which nobody keeps the original.
            plain = tensor if tensor.requires_grad else private.outside_of_modes(tensor.detach)
            # It shares memory with those of other views, as theirs, so that writes are noticed.
            self._pairs[id(tensor)] = tensor, self._fake.from_tensor(plain)
        return self._pairs[id(tensor)][1]

    def holds(self, tensor: Tensor) -> bool:
        """Return True if a tensor is, or is in the memory of, one from outside."""
        storage = _storage(tensor)
        return not isinstance(innermost(tensor), private.FakeTensor) or any(
            storage is _storage(fake) for _, fake in self._pairs.values()
        )

    def original(self, value: Tensor) -> Tensor:
        """Return the tensor for which a fake one stands."""
        return next((tensor for tensor, fake in self._pairs.values() if fake is value), value)


def _is_plain(tensor: Tensor) -> bool:
    """Return True for a tensor that has values, and is under no transform."""
    return (
        type(tensor) in PLAIN_TYPES
        and innermost(tensor) is tensor
        and tensor.layout is torch.strided
        and not tensor.is_nested
    )


def _storage(tensor: Tensor) -> Any:
    return innermost(tensor).untyped_storage()


_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
_BITWISE = ("and", "or", "xor", "lshift", "rshift")
_WRITING = {"__setitem__", "__set__", *(f"__i{name}__" for name in (*_OPERATORS, *_BITWISE))}


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that a function of torch writes into, by its name."""
    if func in (F.batch_norm, F.instance_norm):  # which update running statistics
        bound = inspect.signature(func).bind(*args, **kwargs).arguments
        training = bound.get("training", bound.get("use_input_stats", func is F.instance_norm))
        statistics = [bound.get("running_mean"), bound.get("running_var")] if training else []
        return [tensor for tensor in statistics if tensor is not None]
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    targets = [kwargs.get("out")]
    if args and (in_place or name in _WRITING):
        targets.append(args[0])
    return _each(Tensor, targets)


def _check_unwritten(module: Any, count: int) -> None:
    """Refuse a graph that writes into its inputs, for what `_PureOnly` does not see. The first
    `count` are arguments.
    """
    memories = list(map(memory, placeholders(module)))
    arguments, outside = set(memories[:count]), set(memories[count:])
    for node in module.graph.nodes:
        written = set(map(memory, _written_nodes(node)))
        if written & arguments:
            raise _refusal_error(*_WRITES_ARGUMENT)
        if written & outside:
            raise _refusal_error(*_WRITES_OUTSIDE)


def _written_nodes(node: Any) -> list[Any]:
    """Return the arguments that a node of a graph writes into."""
    schema = getattr(node.target, "_schema", None)
    if node.target is torch.ops.aten.native_batch_norm.default:  # whose schema does not say so
        targets = list(node.args[3:5]) if node.args[5] else []
    elif schema is None or not schema.is_mutable:
        return []
    else:
        pairs = zip(schema.arguments, node.args, strict=False)
        targets = [arg for formal, arg in pairs if formal.is_write]
        targets += [node.kwargs.get(x.name) for x in schema.arguments if x.is_write]
    return _each(torch.fx.Node, targets)


def _each(cls: type, targets: list[Any]) -> list[Any]:
    """Return the targets of a class, also those in lists."""
    flat = [part for x in targets for part in (x if isinstance(x, (list, tuple)) else (x,))]
    return [part for part in flat if isinstance(part, cls)]


@contextlib.contextmanager
def explained(kind: type[Exception] = Exception) -> Iterator[None]:
    """Refuse, naming the line, what a function does inside and no graph for all values can do."""
    try:
        yield
    except kind as error:
        if (cause := _cause(error)) is None:
            raise
        raise _refusal_error(*cause, error) from error


def _cause(error: Exception) -> Cause | None:
    if isinstance(error, _EffectError):
        return error.args
    text = f"{type(error).__name__} {error}"
    causes = _CAUSES_OF_READS if isinstance(error, ReadError) else _CAUSES
    cause = next((cause for words, cause in causes.items() if words in text), None)
    if cause is _READS and _is_from(_DISTRIBUTIONS, error):
        return _VALIDATES
    by_ranks = isinstance(error, RuntimeError) and _is_from(_RANKS_FOLDER, error)
    return _RANKS if cause is None and by_ranks else cause


def _refusal_error(what: str, fix: str, error: Exception | None = None) -> ValueError:
    return ValueError(
        f"the function {what}{_where(error)}, which no graph for all values can do. Fix: {fix}."
    )


_LIBRARIES = str(Path(torch.__file__).parent), str(Path(__file__).parent.parent)
_DISTRIBUTIONS = str(Path(torch.distributions.__file__).parent)
_RANKS_FOLDER = str(Path(torch.distributed.__file__).parent)


def _is_from(folder: str, error: Exception) -> bool:
    """Return True if code of a folder was running."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(frame.filename.startswith(folder) for frame in frames)


def _where(error: Exception | None) -> str:
    """Return the line of the user's file from which an error comes."""
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    callers = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, "<"))]
    if not callers:
        return ""
    return f" ({callers[-1].filename}, line {callers[-1].lineno}: `{callers[-1].line}`)"
