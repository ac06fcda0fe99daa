"""A pure function of tensors as one graph of operators, traced without values and compiled."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._torch import private
from .._torch.tracing import NoReads, ReadError

Function = Callable[..., Sequence[Any]]


class PureGraph(NamedTuple):
    """A graph without writes, but for those into donated inputs at its end. No result shares memory
    with an input or another result.
    """

    module: Any  # a torch.fx.GraphModule of the inputs, then `closed_over`; it returns a list
    closed_over: list[Tensor]
    # by the index of a result, the input that takes its values, in place of a result
    donated: dict[int, int]


def trace(function: Function, inputs: Sequence[Tensor], donate: Sequence[int] = ()) -> PureGraph:
    """Return the graph of a function that returns tensors. It is called with tensors that have no
    values: once, and again for the tensors that it turns out to close over.

    Args:
        function: A function of the inputs.
        inputs: Examples, which are not read.
        donate: The indices of inputs whose memory results may take.

    Raises:
        ValueError: The function reads a value, or writes into an input or into a tensor that it
            closes over.
    """
    closed_over: list[Tensor] = []
    module = None
    while module is None:
        recorder = _Recorder(function, len(inputs), closed_over)
        pure = torch.func.functionalize(recorder)
        record = _make_fx(pure, tracing_mode="fake", _allow_non_fake_inputs=True)
        error = None
        try:
            # An example in two places stands for two inputs.
            module = record(*[tensor.detach() for tensor in (*inputs, *closed_over)])
        except Exception as raised:
            error = raised
        if recorder.outside and not isinstance(error, _WriteError):
            closed_over += recorder.outside
            module = None
        elif error is not None:
            cause = _cause(error)
            if cause is None:
                raise error
            raise _refusal(*cause, error) from error
    _check(module)
    _separate(module)
    donated = _donate(module, donate)
    module.graph.lint()
    module.recompile()
    return PureGraph(module, [tensor.detach() for tensor in closed_over], donated)


def compiled(graph: PureGraph, inputs: Sequence[Tensor], options: dict[str, Any]) -> Function:
    """Return the graph as compiled by inductor, a function of its inputs and `closed_over`."""
    function: Function = private.compile_graph(
        graph.module, [*inputs, *graph.closed_over], options or None
    )
    return function


def scanned(graph: PureGraph, inputs: Sequence[Tensor], carried: int) -> Function:
    """Return a compiled function of `inputs` and `closed_over` that repeats the graph: the first
    `carried` results are the first inputs of the next repetition, and all other inputs have one
    dimension more in front. It returns the last carried results, and all others stacked.
    """
    from torch.fx.experimental.symbolic_shapes import (
        DimDynamic,
        ShapeEnv,
        StatelessSymbolicContext,
    )

    fake = private.FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)

    def any_number(tensor: Tensor) -> Tensor:
        """Return a fake stack of such tensors with a symbolic length."""
        sizes = [DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * tensor.ndim]
        stack = torch.stack([tensor, tensor])  # lengths 0 and 1 would be constants
        context: Any = StatelessSymbolicContext(sizes)
        symbolic: Tensor = fake.from_tensor(stack, symbolic_context=context)
        return symbolic

    number = len(inputs)
    examples = [
        *(fake.from_tensor(tensor, static_shapes=True) for tensor in inputs[:carried]),
        *map(any_number, inputs[carried:]),
        *(fake.from_tensor(tensor, static_shapes=True) for tensor in graph.closed_over),
    ]

    def repeat(*tensors: Tensor) -> Sequence[Any]:
        carry, stacks, rest = tensors[:carried], tensors[carried:number], tensors[number:]
        results: Sequence[Any] = private.scan(graph.module, list(carry), list(stacks), rest)
        return results

    module = _make_fx(repeat)(*examples)
    # The loop around the graph is in C++ on a CPU, and in Python elsewhere.
    on_a_cpu = all(tensor.is_cpu for tensor in inputs)
    options = {"cpp_wrapper": True} if on_a_cpu else None
    function: Function = private.compile_graph(module, examples, options)
    return function


def _make_fx(function: Function, **settings: Any) -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx  # imports sympy

    return make_fx(function, **settings)


# ---- the graph -----------------------------------------------------------------------------------


def _placeholders(module: Any) -> list[Any]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def _output(module: Any) -> Any:
    return next(iter(reversed(module.graph.nodes)))


def _memory(node: Any) -> Any:
    """Return what is equal for nodes that share memory."""
    return node.meta["val"].untyped_storage()._cdata


def _separate(module: Any) -> None:
    """Copy the results that share memory with an input or an earlier result."""
    taken = {_memory(node) for node in _placeholders(module)}
    output = _output(module)
    results = list(output.args[0])
    with module.graph.inserting_before(output):
        for index, node in enumerate(results):
            if _memory(node) in taken:
                results[index] = copy = module.graph.call_function(
                    torch.ops.aten.clone.default, (node,)
                )
                copy.meta["val"] = node.meta["val"].clone()
            taken.add(_memory(node))
    output.args = (results,)


def _donate(module: Any, donate: Sequence[int]) -> dict[int, int]:
    """Write results into donated inputs that are like them, in order, at the end of the graph.
    Return the input of each such result.
    """
    if not donate:
        return {}
    placeholders, output = _placeholders(module), _output(module)
    free: dict[Any, list[int]] = {}
    for index in reversed(donate):
        free.setdefault(_kind(placeholders[index]), []).append(index)
    donated, rest = {}, []
    with module.graph.inserting_before(output):
        for place, node in enumerate(output.args[0]):
            if like := free.get(_kind(node)):
                donated[place] = like.pop()
                module.graph.call_function(
                    torch.ops.aten.copy_.default, (placeholders[donated[place]], node)
                )
            else:
                rest.append(node)
    output.args = (rest,)
    return donated


def _kind(node: Any) -> Any:
    value = node.meta["val"]
    return value.shape, value.stride(), value.dtype, value.device


# ---- what cannot be a pure graph -----------------------------------------------------------------

Cause = tuple[str, str]  # what the function does, and the fix
_RETURN = "to change it, return the new value; to have it in fresh memory, `.clone()` it"
_WRITES_ARGUMENT = "writes into an argument", f"{_RETURN}; `donate` lets results take its memory"
_WRITES_OUTSIDE = "writes into a tensor that it closes over", f"make it an argument; {_RETURN}"
_READS = (
    "reads the value of a tensor",
    "`torch.where` in place of `if`; return what is to be looked at",
)
_SHAPE = (
    "makes a tensor whose shape depends on values",
    "`torch.where(mask, x, 0)` in place of `x[mask]`",
)
_COMPILED = (
    "calls a function that torch.compile returned",
    "the function itself: its operators become a part of this graph",
)
_MAKES_PARAMETER = (
    "makes a parameter",
    "make the module outside, with make_functional, and pass its parameters",
)
_DRAWS = (
    "draws from a torch.Generator of its own",
    "torch's default generator, with torch.manual_seed before the call",
)
_DIFFERENTIATES = (
    "calls torch.autograd",
    "torch.func.grad, or purescale.value_and_grad",
)
# By words in torch's errors. Without them torch's error is raised as it is.
_CAUSES = {
    "data-dependent": _READS,
    "DataDependent": _READS,
    "DynamicOutputShape": _SHAPE,
    "non-functional tensor": _WRITES_OUTSIDE,
    "does not require grad": _DIFFERENTIATES,
    "inside a functorch transform": _DIFFERENTIATES,
    "torch._C.Generator": _DRAWS,
    "symbolically trace a dynamo-optimized function": _COMPILED,
}


class _WriteError(Exception):
    """A write, with its cause."""


class _Recorder:
    """A function to be traced, of inputs and of what is known of the tensors that it closes over.
    `outside` are those that it uses besides.
    """

    def __init__(self, function: Function, count: int, closed_over: Sequence[Tensor]) -> None:
        self.function, self.count, self.closed_over = function, count, closed_over
        self.outside: list[Tensor] = []

    def __call__(self, *tensors: Tensor) -> list[Any]:
        inputs, rest = tensors[: self.count], tensors[self.count :]
        with _PureOnly(inputs, self.closed_over, rest) as mode:
            results = [mode.inside(result) for result in self.function(*inputs)]
        self.outside = mode.outside
        return results


class _PureOnly(NoReads):
    """A mode that refuses a read, and a write into an input or a tensor from outside. In place of
    tensors from outside their stand-ins are used.
    """

    def __init__(
        self, inputs: Sequence[Tensor], closed_over: Sequence[Tensor], rest: Sequence[Tensor]
    ) -> None:
        super().__init__()
        # The objects are kept alive, so that an id stays theirs.
        self.inputs, self.rest = list(map(_storage, inputs)), list(map(_storage, rest))
        self.stand_ins = dict(zip(map(id, closed_over), rest, strict=True))
        self.outside: list[Tensor] = []

    def inside(self, value: Any) -> Any:
        """Return the stand-in of a tensor from outside, and anything else as it is."""
        # Fake tensors consist of tensors on meta, which torch's own code looks at.
        if not isinstance(value, Tensor) or value.is_meta:
            return value
        if isinstance(torch.func.debug_unwrap(value), private.FakeTensor):
            return value
        if id(value) not in self.stand_ins:
            self.stand_ins[id(value)] = value
            self.outside.append(value)
        return self.stand_ins[id(value)]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = private.pytree.tree_map(self.inside, (args, kwargs or {}))
        for tensor in _written(func, args, kwargs):
            storage = _storage(tensor)
            if any(storage is own for own in self.inputs):
                raise _WriteError(*_WRITES_ARGUMENT)
            outside = any(tensor is other for other in self.outside)
            if outside or any(storage is own for own in self.rest):
                raise _WriteError(*_WRITES_OUTSIDE)
        return super().__torch_function__(func, types, args, kwargs)


def _storage(tensor: Tensor) -> Any:
    return torch.func.debug_unwrap(tensor).untyped_storage()


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
    if args and (in_place or name in ("__setitem__", "__set__") or name.startswith("__i")):
        targets.append(args[0])
    flat = [part for x in targets for part in (x if isinstance(x, (list, tuple)) else (x,))]
    return [target for target in flat if isinstance(target, Tensor)]


def _check(module: Any) -> None:
    """Refuse a graph that writes into its inputs or holds a state, for what `_PureOnly` does not
    see.
    """
    inputs = {_memory(node) for node in _placeholders(module)}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            value = getattr(module, node.target)
            if not isinstance(value, Tensor):
                raise _refusal(*_DRAWS)
            if isinstance(value, private.FakeTensor):
                raise _refusal(*_MAKES_PARAMETER)
        if node.op == "call_function" and any(_memory(x) in inputs for x in _targets(node)):
            raise _refusal(*_WRITES_ARGUMENT)


def _targets(node: Any) -> list[Any]:
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
    flat = [part for x in targets for part in (x if isinstance(x, (list, tuple)) else (x,))]
    return [target for target in flat if isinstance(target, torch.fx.Node)]


def _cause(error: Exception) -> Cause | None:
    if isinstance(error, _WriteError):
        return error.args
    if isinstance(error, ReadError):
        return _READS
    text = f"{type(error).__name__} {error}"
    return next((cause for words, cause in _CAUSES.items() if words in text), None)


def _refusal(what: str, fix: str, error: Exception | None = None) -> ValueError:
    return ValueError(
        f"the function {what}{_where(error)}, and a graph for all values cannot do that. "
        f"Fix: {fix}."
    )


_LIBRARIES = str(Path(torch.__file__).parent), str(Path(__file__).parent.parent)


def _where(error: Exception | None) -> str:
    """Return the line of the user's file from which an error comes."""
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    own = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, "<"))]
    if not own:
        return ""
    return f" ({own[-1].filename}, line {own[-1].lineno}: `{own[-1].line}`)"
