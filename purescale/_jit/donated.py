"""Results of a graph: in memory of their own, or of donated inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .._jit.cut import WRITE, memory, placeholders, separated

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
