"""A large step in pieces, so that what a wrapper decodes takes a bounded amount of memory."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from torch import Tensor

from .._optim.optimizer_inputs import OptimizerInputs
from .._torch import dtensor, foreach
from .._torch.tensor_list import TensorList
from .._tree import pytree
from .._tree.gradients import Gradients
from .._tree.pytree import Tree

# The number of elements that are widened at a time. An element takes 6 to 26 bytes meanwhile,
# depending on class and wrapper, so that a cache holds them, and 64 MiB with what an allocator
# keeps. On an accelerator, where a launch takes the time of many elements, it is 32 times that
# number and at most 1 GiB.
PIECE_NUMEL = 2**18

# The fields of a state that are cut with the parameters: by name in an OptState, else a tree like
# these.
BY_PARAM = ("counts", "rest", "iterate")


class Position(NamedTuple):
    """The position of a piece within its parameter."""

    leaf_index: int  # the index among all leaves, counting None
    start: int  # the number of elements of this rank's part before the piece
    dtensor: Any  # the DTensor that this rank has a part of, or None


def positions_of(inputs: OptimizerInputs) -> list[Position]:
    """Return the position of each parameter's elements."""
    if inputs.piece_positions is not None:
        return cast(list[Position], inputs.piece_positions)
    pairs = zip(inputs.param_structure.leaf_indices, inputs.global_params, strict=True)
    return [Position(n, 0, leaf if dtensor.is_dtensor(leaf) else None) for n, leaf in pairs]


Cut = dict[int, slice]  # by the index of a parameter: its elements in a piece


class Piece(NamedTuple):
    """A part of a step with a bounded number of elements."""

    cut: Cut | None  # None for the whole step
    plan: Any  # of the inner optimizer


def plan_cuts(inputs: OptimizerInputs, *, cut_leaves: bool) -> list[Cut]:
    """Return the elements of the parameters in each piece: whole parameters up to a number of
    elements, or a part of a larger one.
    """
    params = inputs.params
    launch_bound = any(map(foreach.is_on_accelerator, params))
    size = 32 * PIECE_NUMEL if launch_bound else PIECE_NUMEL
    cuts: list[Cut] = [{}]
    if sum(map(Tensor.numel, params)) <= size:
        return cuts
    # A part of a tensor in another memory order would be a copy, and writes into it lost.
    cut_leaves &= all([leaf.is_contiguous() for leaf in pytree.tensors(inputs.opt_state)])
    room = size
    for index, leaf in enumerate(params):
        count = max(leaf.numel(), 1)
        step = size if cut_leaves and leaf.is_contiguous() else count
        for start in range(0, count, step):
            stop = min(start + step, leaf.numel())
            if stop - start > room and cuts[-1]:
                cuts.append({})
                room = size
            cuts[-1][index] = slice(start, stop)
            room -= stop - start
    return cuts


def inputs_of_pieces(inputs: OptimizerInputs, cuts: list[Cut]) -> list[OptimizerInputs]:
    """Return the inputs of each piece, which share the memory of `inputs`."""
    positions, pieces = positions_of(inputs), []
    for cut in cuts:
        starts = [(positions[n], span.start) for n, span in cut.items()]
        piece = OptimizerInputs(
            inputs.context,
            inputs.param_structure.take(cut),
            TensorList(
                [_take_span(inputs.params[n], inputs.params[n], span) for n, span in cut.items()]
            ),
            _cut_state(inputs.opt_state, inputs, cut, last=cut is cuts[-1]),
            piece_positions=[
                position._replace(start=position.start + start) for position, start in starts
            ],
            step_settings=inputs.step_settings,
        )
        pieces.append(piece)
    return pieces


def grads_of_piece(inputs: OptimizerInputs, grads: Gradients, cut: Cut) -> Gradients:
    """Return the gradients of a piece, which share the memory of `grads`."""
    leaves = inputs.grads_of_params(grads)
    parts = [_take_span(leaves[n], inputs.params[n], span) for n, span in cut.items()]
    return Gradients.of_leaves(parts, grads.pending, owned=grads.owned)


def _take_span(value: Any, param: Tensor, span: slice) -> Any:
    """Return this part of a tensor that belongs to a parameter. A tensor of another shape, such as
    a step count, belongs to the last part; the other parts get copies.
    """
    if not isinstance(value, Tensor) or span == slice(0, param.numel()):
        return value
    if value.shape == param.shape:
        return value.reshape(-1)[span]
    return value if span.stop == param.numel() else value.clone()


def _cut_state(state: Tree, inputs: OptimizerInputs, cut: Cut, *, last: bool) -> Tree:
    """Return what a piece has of an optimizer's state. Numbers of the whole state belong to the
    last piece; the other pieces get copies.
    """

    def part(tree: Tree) -> dict[str, Any]:
        values, names = inputs.param_structure.flatten_up_to(tree), inputs.param_structure.names
        return {names[n]: _take_span(values[n], inputs.params[n], span) for n, span in cut.items()}

    fields = {}
    for field, value in state._asdict().items():
        if field == "inner":
            fields[field] = _cut_state(value, inputs, cut, last=last)
        elif field == "slots":
            fields[field] = {key: part(tree) for key, tree in value.items()}
        elif field in BY_PARAM and value != ():
            fields[field] = part(value)
        else:
            fields[field] = value if last else pytree.clone(value)
    return type(state)(**fields)
