"""A graph in stages: compiled code, the operators of the library, compiled code that follows; and
its results, in memory of their own or of donated inputs.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from .._torch.foreach import clone_list
from .._torch.memory_order import is_gapless
from .._torch.operators import IN_PLACE

Function = Callable[..., Sequence[Any]]
Compile = Callable[[Any, Sequence[Tensor]], Function]  # of a graph and fake inputs like its own
Stage = Callable[[list[Any]], Sequence[Any]]  # returns new values, from all that there are
Nodes = list[fx.Node]
WRITE = torch.ops.aten.copy_.default


def compiled_in_stages(module: Any, examples: Sequence[Tensor], compile: Compile) -> Function:
    """Return a function that runs a graph, whose only writes are those into donated inputs at its
    end. `compile` is given what is before the operators of the library, and what follows them. The
    operators run between, in place where a donated input takes their result: within compiled code
    they would take copies of all operands, and twice the time to compile.
    """
    calls = [node for node in module.graph.nodes if node.target in IN_PLACE]
    later = _followers(module, calls)
    if not calls or any(not later.isdisjoint(call.all_input_nodes) for call in calls):
        return compile(module, examples)
    writes = _writes_in_place(module, calls, later)
    _keep_values(module, calls, later, writes)
    inputs, output = placeholders(module), module.graph.output_node()
    outside = {*inputs, output, *calls, *writes.values()}.union(*[call.users for call in calls])
    nodes = [node for node in module.graph.nodes if node not in outside]
    stages = _Stages(module, inputs, compile)
    stages.add_compiled([node for node in nodes if node not in later])
    for call in calls:
        stages.add_call(call, writes)
    stages.add_compiled([node for node in nodes if node in later])
    return stages.function(list(output.args[0]))


def placeholders(module: Any) -> Nodes:
    """Return the inputs of a graph."""
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def has_operators(module: Any) -> bool:
    """Return True if a graph has operators of the library."""
    return any(node.target in IN_PLACE for node in module.graph.nodes)


def memory(node: fx.Node) -> Any:
    """Return what is equal for nodes that share memory. A sparse tensor has none of its own."""
    value = node.meta["val"]
    return value.untyped_storage()._cdata if value.layout is torch.strided else node


def apart(fake: Any, tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return fake tensors like these, each in memory of its own: one tensor in two places stands
    for two inputs, and a view for an input like others. Strides stay, also where elements share
    memory.
    """
    empty = torch.empty_strided
    with fake:
        return [empty(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in tensors]


def separated(module: Any, node: fx.Node, taken: set[Any]) -> fx.Node:
    """Return a node whose memory is not in `taken`, to which it is added: a copy if need be."""
    if memory(node) in taken:
        place = node if node.op != "placeholder" else placeholders(module)[-1]
        with module.graph.inserting_after(place):
            copy = module.graph.call_function(torch.ops.aten.clone.default, (node,))
        copy.meta["val"] = node.meta["val"].clone()
        node = copy
    taken.add(memory(node))
    return node


def _targets(call: fx.Node) -> Nodes:
    """Return what an operator writes into."""
    targets: Any = call.args[0]
    return list(targets)


def _followers(module: Any, calls: Nodes) -> set[fx.Node]:
    """Return the nodes that need results of operators, and these themselves."""
    later = set(calls)
    for node in module.graph.nodes:
        if not later.isdisjoint(node.all_input_nodes):
            later.add(node)
    return later


def _writes_in_place(module: Any, calls: Nodes, later: set[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Return by donated input the write of an operator's result into its own target, if nothing
    else reads that input later.
    """
    writes = {node.args[0]: node for node in module.graph.nodes if node.target is WRITE}
    in_place = {}
    for call in calls:
        targets = _targets(call)
        for index, target in enumerate(targets):
            write = writes.get(target)
            if write is None or write not in later or targets.count(target) > 1:
                continue
            is_own = write.args[1].args == (call, index)
            if is_own and later & target.users.keys() == {call, write}:
                in_place[target] = write
    return in_place


def _keep_values(
    module: Any, calls: Nodes, later: set[fx.Node], writes: dict[fx.Node, fx.Node]
) -> None:
    """Copy what an operator takes if somebody else has its memory: it may overwrite all of it. Copy
    donated inputs that are read later, and have a new value by then.
    """
    results = [node for node in module.graph.output_node().args[0] if node not in later]
    taken = set(map(memory, [*placeholders(module), *results]))
    old = {x.args[0] for x in module.graph.nodes if x.target is WRITE and x not in later}

    def own(node: fx.Node) -> fx.Node:
        if not is_gapless(node.meta["val"]):  # elements may share memory
            taken.add(memory(node))
        return separated(module, node, taken)

    def stays(node: fx.Node) -> bool:
        return node in later or (node.op == "placeholder" and node not in old)

    @functools.cache
    def kept(node: fx.Node) -> fx.Node:
        return node if stays(node) else own(node)

    for node in list(module.graph.nodes):
        if node in calls:
            targets = [x if x in writes or stays(x) else own(x) for x in _targets(node)]
            node.args = (targets, *map_arg(node.args[1:], own))
        elif node in later and node.op != "output":
            node.args, node.kwargs = map_arg(node.args, kept), map_arg(node.kwargs, kept)


class _Stages:
    """The stages of a graph, and where each finds the values of nodes among all so far."""

    def __init__(self, module: Any, inputs: Nodes, compile: Compile) -> None:
        self._module, self._compile = module, compile
        self._place = {node: place for place, node in enumerate(inputs)}
        self._number = len(inputs)
        self._stages: list[Stage] = []

    def add_compiled(self, nodes: Nodes) -> None:
        """Add nodes of the graph as a graph of their own."""
        if not nodes:
            return
        own, graph, new = set(nodes), fx.Graph(), {}
        ins = list(dict.fromkeys(x for node in nodes for x in node.all_input_nodes if x not in own))
        outs = [node for node in nodes if not own.issuperset(node.users)]
        for node in ins:
            new[node] = graph.placeholder(node.name)
        for node in nodes:
            new[node] = graph.node_copy(node, new.__getitem__)
        graph.output([new[node] for node in outs])
        values = [node.meta["val"] for node in ins]
        examples = [apart(value.fake_mode, [value])[0] for value in values]
        run = self._compile(fx.GraphModule(self._module, graph), examples)
        of_ins = self._getter(ins)
        self._add(lambda values: run(*of_ins(values)), dict(enumerate(outs)))

    def add_call(self, call: fx.Node, writes: Mapping[fx.Node, fx.Node]) -> None:
        """Add an operator, which writes into its targets, or a copy of an input not in `writes`."""
        function, operands = IN_PLACE[call.target], list(map(self._getter, call.args[1:]))
        nodes, of_targets = _targets(call), self._getter(call.args[0])
        copied = [
            i for i, node in enumerate(nodes) if node.op == "placeholder" and node not in writes
        ]

        @torch.no_grad()
        def run(values: list[Any]) -> list[Any]:
            targets = of_targets(values)
            copies = clone_list([targets[index] for index in copied])
            for index, copy in zip(copied, copies, strict=True):
                targets[index] = copy
            function(targets, *[operand(values) for operand in operands])
            return targets

        results: dict[Any, Any] = dict.fromkeys(range(len(nodes)))
        for node in call.users:
            results[node.args[1]] = node
        self._add(run, results)

    def function(self, results: Nodes) -> Function:
        """Return a function of the inputs that runs all stages."""
        stages, of_results = self._stages, self._getter(results)

        def run(*inputs: Any) -> Sequence[Any]:
            values = list(inputs)
            for stage in stages:
                values += stage(values)
            return of_results(values)

        return run

    def _add(self, stage: Stage, new: dict[int, Any]) -> None:
        self._stages.append(stage)
        self._place |= {node: self._number + index for index, node in new.items()}
        self._number += len(new)

    def _getter(self, arg: Any) -> Callable[[list[Any]], Any]:
        """Return a function that returns an argument of a node from all values."""
        if isinstance(arg, fx.Node):
            return operator.itemgetter(self._place[arg])
        if isinstance(arg, (list, tuple)) and any(isinstance(x, fx.Node) for x in arg):
            getters = list(map(self._getter, arg))
            return lambda values: [get(values) for get in getters]
        return lambda values: arg


# ---- results in memory of their own, or of donated inputs ----------------------------------------

_aten = torch.ops.aten
_COPIES = _aten.clone.default, _aten.alias.default, _aten.detach.default, _aten.view.default
# Their results may be elements of an argument: a compiler drops those that change nothing.
_MOVES = {
    *(_aten.clone, _aten.copy, _aten._to_copy, _aten._unsafe_view, _aten.narrow_copy),
    *(_aten.cat, _aten.stack, _aten.repeat, _aten.constant_pad_nd, _aten.slice_scatter),
    *(_aten.select_scatter, _aten.diagonal_scatter, _aten.as_strided_scatter),
    *(_aten.pow, _aten.ceil, _aten.floor, _aten.round, _aten.trunc),
}


def separate_results(module: Any) -> None:
    """Copy the results that share memory with an input or an earlier result."""
    taken = set(map(memory, placeholders(module)))
    output = module.graph.output_node()
    output.args = ([separated(module, node, taken) for node in output.args[0]],)


def donate_inputs(module: Any, donate: Sequence[int]) -> dict[int, int]:
    """Write results into donated inputs that are like them, in order, at the end of the graph.
    Return the input of each such result. A donated input that is a result as it was keeps its
    memory. What may be elements of another one takes none: a compiler drops a copy, and reads those
    elements at the end of the graph, where they may be overwritten.
    """
    if not donate:
        return {}
    inputs, output = placeholders(module), module.graph.output_node()
    indices = {inputs[index]: index for index in donate}
    free: dict[Any, list[fx.Node]] = {}
    for node in indices:
        free.setdefault(kind(node), []).append(node)
    donated, rest, written, origins = {}, [], set(indices), _origins(module)
    with module.graph.inserting_before(output):
        for place, node in enumerate(output.args[0]):
            like, source = free.get(kind(node), []), _copied(node)
            target = source if source in like else next(iter(like), None)
            if target is None or not origins[memory(node)] & written <= {target}:
                rest.append(node)
                continue
            like.remove(target)
            donated[place] = indices[target]
            if target is source:
                written.remove(target)
            else:
                module.graph.call_function(WRITE, (target, node))
    results, output.args = output.args[0], (rest,)
    for node in results:
        if not node.users:  # the copy of an input that is as it was
            module.graph.erase_node(node)
    return donated


def _origins(module: Any) -> dict[Any, set[fx.Node]]:
    """Return, by memory, the inputs of which elements may stand in it as they were."""
    origins = {memory(node): {node} for node in placeholders(module)}
    for node in module.graph.nodes:
        if isinstance(node.meta.get("val"), Tensor):
            moves = getattr(node.target, "overloadpacket", None) in _MOVES
            parts = [origins[memory(arg)] for arg in node.all_input_nodes if moves]
            origins.setdefault(memory(node), set().union(*parts))  # one of a view is there
    return origins


def _copied(node: Any) -> Any:
    """Return the node of which a node is a copy with the same strides, or the node itself."""
    while node.target in _COPIES and kind(node) == kind(node.args[0]):
        node = node.args[0]
    return node


def kind(node: fx.Node) -> Any:
    """Return what is equal for nodes of which one may take the memory of the other."""
    value = node.meta["val"]
    return value.shape, value.stride(), value.dtype, value.device
