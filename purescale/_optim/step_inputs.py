"""The stage `flatten` of a step: its trees as matching lists of local tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._optim.opt_state import (
    OptState,
    are_parts,
    is_of_torch,
    scalars_of,
    slots_like,
    tensors_of,
    values_of,
    without_wrappers,
)
from .._torch import dtensor, foreach
from .._torch.foreach import same_memory_order
from .._torch.tensor_list import TensorList
from .._torch.tracing import end_graph, is_lazy
from .._tree import tree as _tree
from .._tree.gradients import Gradients, as_gradients
from .._tree.leaves import as_tensor_list, is_constant
from .._tree.tree import FlatDict, FlatTree, Leaves, Tree, TreeDef


class Position(NamedTuple):
    """The position of a piece within its parameter."""

    leaf: int  # the index among all leaves, counting None
    start: int  # the number of elements of this rank's part before the piece
    dtensor: Any  # the DTensor that this rank has a part of, or None


class StepLists(NamedTuple):
    """Lists of parameters and state that were recognised together."""

    params: TensorList
    # of parameters, then the slots of an OptState or all tensors of a dict of such states; None for
    # the state of any other optimizer
    targets: TensorList | None


class StepInputs(NamedTuple):
    """Parameters, their gradients in the same order, and the optimizer's state, on this rank."""

    structure: TreeDef  # of the parameters
    names: list[str]  # of every leaf
    params: Leaves  # with None; the local shard of a DTensor if the optimizer is elementwise
    grads: Gradients
    opt_state: Tree
    named_params: dict[str, Tensor]  # the parameters that are tensors, by dotted name
    dense_off_graph: bool  # True if parameters, state and given gradients all are
    dtensors: tuple[Leaves, Leaves] | None = (
        None  # the leaves of params and of the state before they were local, if sharded
    )
    lists: StepLists | None = None  # if all leaves are dense and off graph
    positions: dict[str, Position] | None = (
        None  # a `Position` by name, if the inputs are a piece of a larger step
    )

    @property
    def present_params(self) -> TensorList:
        """The parameters that are not None."""
        return (
            TensorList(list(self.named_params.values()))
            if self.lists is None
            else self.lists.params
        )

    @property
    def targets(self) -> TensorList:
        """The tensors that a step of a class of torch updates: parameters, then slots."""
        if self.lists is not None and self.lists.targets is not None:
            return self.lists.targets
        return TensorList([*self.named_params.values(), *values_of(self.opt_state.slots)])

    @property
    def replaced(self) -> tuple[TensorList, TensorList]:
        """The tensors of this rank that a step replaces: parameters and slots, and the rest of the
        state.
        """
        if self.lists is not None and self.lists.targets is not None:
            state = self.opt_state
            scalars = [state.applied, *scalars_of(state)] if isinstance(state, OptState) else []
            return self.lists.targets, TensorList(scalars, dense_off_graph=True)
        leaves = [*self.params, *_tree.flatten(self.opt_state)[0]]
        shards = [dtensor.shard(leaf, on_graph=False) for leaf in leaves if not is_constant(leaf)]
        return TensorList(shards, dense_off_graph=self.dense_off_graph), NOTHING

    @property
    def all_positions(self) -> dict[str, Position]:
        """The position of each parameter's elements, by name."""
        if self.positions is not None:
            return self.positions
        leaves = self.params if self.dtensors is None else self.dtensors[0]
        return {
            name: Position(index, 0, leaf if dtensor.is_dtensor(leaf) else None)
            for index, (name, leaf) in enumerate(zip(self.names, leaves, strict=True))
        }

    @property
    def grad_names(self) -> list[str]:
        """The dotted names of the gradients that are not None."""
        if self.grads.dense_real:
            return self.names
        return list(present(self.names, self.grads.likes))

    @property
    def named_grads(self) -> dict[str, Tensor]:
        """The gradients that are not None, as dense, real tensors by dotted name."""
        return dict(zip(self.grad_names, self.grads.tensors, strict=True))

    def params_tree(self, leaves: Leaves) -> Tree:
        """Return a tree like the parameters with these leaves, which are in their order."""
        return self.structure.unflatten(leaves)

    @property
    def local_grads(self) -> Leaves:
        """The gradients in the order and form of the parameters, with None. DTensors become local
        shards if the parameters are.
        """
        leaves = self.grads.leaves
        return leaves if self.dtensors is None else list(map(dtensor.shard, leaves))

    def unscaled(self, *, wide: bool = False) -> StepInputs:
        """Return the inputs with gradients for an optimizer, as `Gradients.unscaled`."""
        return self._replace(grads=self.grads.unscaled(wide=wide))

    def restore(self, params: Tree, opt_state: Tree) -> tuple[Tree, Tree]:
        """Return the results of a step, as DTensors if the arguments were."""
        if self.dtensors is None:
            return params, opt_state
        trees = []
        for tree, dtensors in zip((params, opt_state), self.dtensors, strict=True):
            leaves, structure = _tree.flatten(tree)
            pairs = zip(dtensors, leaves, strict=True)
            trees.append(structure.unflatten([dtensor.from_local_like(*pair) for pair in pairs]))
        return trees[0], trees[1]


def inputs_of_dict(
    params: dict[str, Tensor],
    grads: Gradients,
    opt_state: Tree,
    *,
    dense_off_graph: bool,
    lists: StepLists | None = None,
    positions: dict[str, Position] | None = None,
) -> StepInputs:
    """Return the inputs of a step over parameters by dotted name, such as a part of a step."""
    return StepInputs(
        FlatDict(tuple(params)),
        list(params),
        list(params.values()),
        grads,
        opt_state,
        params,
        dense_off_graph,
        lists=lists,
        positions=positions,
    )


NOTHING = TensorList([], dense_off_graph=True)
NO_GRADS = FlatTree(None, [], None, NOTHING)  # of gradients that are still to be made


def flatten_step(
    optimizer: Any, params: Tree | FlatTree, grads: Tree, opt_state: Tree | FlatTree
) -> StepInputs:
    """Return the checked inputs of a step. Refuse, naming the leaf, gradients that do not fit
    `params`, tensors on a graph, and shards of a parameter that the optimizer needs as a whole.
    `grads=None` means that the gradients are still to be made.
    """
    if not isinstance(params, FlatTree):
        params, opt_state = flatten_together([params], opt_state)
        _tree.check_parameters(params)
    flat_grads = NO_GRADS if grads is None else _tree.gradients_like(params, grads)
    flat_state, (tree, leaves, structure, param_list) = opt_state, params
    state_list, grad_list = flat_state.tensor_list, flat_grads.tensor_list
    dense_off_graph = all([part.dense_off_graph for part in (param_list, state_list, grad_list)])
    if not optimizer.differentiable:
        end_graph()
    if not (optimizer.differentiable or dense_off_graph):
        _tree.reject_autograd_history(params=params, grads=flat_grads, opt_state=flat_state)
    gradients = flat_grads.leaves
    if not param_list.dense_off_graph:  # torch's kernels ignore lazy negation
        leaves = [
            leaf.resolve_conj().resolve_neg()
            if isinstance(leaf, Tensor) and is_lazy(leaf)
            else leaf
            for leaf in leaves
        ]
    names, opt_state = _tree.names(tree), flat_state.tree
    sharded = not dense_off_graph and dtensor.any_dtensor([*leaves, *gradients])
    if sharded and optimizer.elementwise is not None:
        flat = FlatTree(tree, leaves, structure, param_list)
        return _flatten_shards(optimizer, flat, names, gradients, opt_state)
    dense = grad_list.dense_off_graph
    return StepInputs(
        structure,
        names,
        leaves,
        Gradients(grad_list, gradients, True) if dense else as_gradients(gradients),
        opt_state,
        present(names, leaves),
        dense_off_graph,
        lists=_step_lists(param_list, state_list, opt_state) if dense_off_graph else None,
    )


def _flatten_shards(
    optimizer: Any, params: FlatTree, names: list[str], gradients: Leaves, opt_state: Tree
) -> StepInputs:
    """Return the inputs of a step over this rank's shards of DTensors."""
    leaves = params.leaves
    gradients = gradients or [None] * len(leaves)
    for index, (leaf, gradient) in enumerate(zip(leaves, gradients, strict=True)):
        if gradient is not None and (reason := dtensor.placement_mismatch(gradient, leaf)):
            raise ValueError(f"{_tree.path(params.tree, 'grads', index)} {reason}")
        _check_placements(leaf, params.tree, index, optimizer)
    _check_state_placements(opt_state, dict(zip(names, leaves, strict=True)))
    pairs = zip(gradients, leaves, strict=True)
    gradients = [dtensor.redistribute_like(gradient, leaf) for gradient, leaf in pairs]
    of_state, state = _tree.flatten(opt_state)
    on_graph = optimizer.differentiable
    local = [dtensor.shard(leaf, on_graph=on_graph) for leaf in leaves]
    return StepInputs(
        params.structure,
        names,
        local,
        as_gradients(gradients),
        state.unflatten([dtensor.shard(leaf, on_graph=on_graph) for leaf in of_state]),
        present(names, local),
        False,
        (leaves, of_state),
    )


def _step_lists(params: TensorList, state: TensorList, opt_state: Tree) -> StepLists:
    if isinstance(opt_state, OptState):
        end = len(state.tensors) - len(scalars_of(opt_state))
        return StepLists(params, params.joined(state.part(1, end)))
    return StepLists(params, params.joined(state) if are_parts(opt_state) else None)


def flatten_together(trees: Sequence[Tree], *opt_states: Tree) -> list[FlatTree]:
    """Flatten each tree and each state of an optimizer, with one check of all leaves. The state of
    a class of torch, and a dict of such states, has no structure: it is never rebuilt from its
    leaves.
    """
    pairs = [*map(_tree.flatten, trees), *map(_flatten_state, opt_states)]
    trees = *trees, *opt_states
    joined = as_tensor_list([leaf for leaves, _ in pairs for leaf in leaves])
    flats, start = [], 0
    for tree, (leaves, structure) in zip(trees, pairs, strict=True):
        stop = start + len(leaves)
        flats.append(FlatTree(tree, leaves, structure, joined.part(start, stop)))
        start = stop
    return flats


def present(names: Sequence[str], leaves: Sequence[Any]) -> dict[str, Any]:
    """Return by name the leaves that are not None."""
    return {name: leaf for name, leaf in zip(names, leaves, strict=True) if leaf is not None}


def _flatten_state(opt_state: Tree) -> tuple[Leaves, Any]:
    # Listing the tensors is faster than walking through the dicts.
    if is_of_torch(opt_state):
        return tensors_of(opt_state), None
    if are_parts(opt_state):
        return [leaf for state in opt_state.values() for leaf in tensors_of(state)], None
    return _tree.flatten(opt_state)


def _check_placements(param: Any, params: Tree, index: int, optimizer: Any) -> None:
    if not dtensor.is_dtensor(param):
        return
    at = _tree.path(params, "params", index)
    if any(placement.is_partial() for placement in param.placements):
        raise ValueError(
            f"{at} has the placements {param.placements}: it has a Partial placement, and "
            "updating each rank's part does not update their sum. Fix: "
            "`p.redistribute(placements=[Replicate()])`."
        )
    if not optimizer.elementwise and dtensor.is_sharded(param):
        raise ValueError(
            f"{at} has the placements {param.placements}, and {optimizer} needs the whole of a "
            "parameter. Fix: AdamW or another optimizer that updates each element by itself, or "
            "`p.redistribute(placements=[Replicate()])`, for gradients too."
        )


def _check_state_placements(opt_state: Tree, params: dict[str, Any]) -> None:
    for name, slot in getattr(without_wrappers(opt_state), "slots", {}).items():
        param = params.get(name)
        for key, value in slot.items():
            if dtensor.is_dtensor(value) and not (
                dtensor.is_dtensor(param)
                and (value.device_mesh, value.placements) == (param.device_mesh, param.placements)
            ):
                has = f"{param.placements}" if dtensor.is_dtensor(param) else "none"
                raise ValueError(
                    f"opt_state: {key} of {name} has the placements {value.placements}, its "
                    f"parameter has {has}. Likely cause: the state of the parameters before they "
                    "were sharded. Fix: `opt_state = optimizer.init(params)` once they are."
                )


def working_copies(inputs: StepInputs, *, in_place: bool) -> StepInputs:
    """Return the inputs with parameters and slots that a kernel may write into: the given ones off
    the graph if `in_place`, else copies. Slots get the memory order of their parameter.
    """
    params, slots = inputs.named_params, inputs.opt_state.slots
    old, lists = inputs.targets, inputs.lists
    if in_place and not old.any_requires_grad:
        new_params, new_slots = params, {name: {**slot} for name, slot in slots.items()}
    else:
        new = old.tensors if in_place else foreach.clone(old.tensors)
        working = iter([t.detach() if t.requires_grad else t for t in new])
        new_params = dict(zip(params, working, strict=False))
        new_slots = slots_like(slots, working)
        lists = StepLists(TensorList(list(new_params.values())), None)
    if not old.are_contiguous:
        for name, slot in new_slots.items():
            param = new_params[name]
            for key, value in slot.items():
                if value.shape == param.shape and not same_memory_order(value, param):
                    slot[key] = torch.empty_like(param, dtype=value.dtype).copy_(value)
    applied, _, *numbers = inputs.opt_state
    opt_state = OptState(applied, new_slots, *numbers)
    return inputs._replace(named_params=new_params, opt_state=opt_state, lists=lists)


def named_params(params: Tree) -> dict[str, Tensor]:
    """Return the parameters that are not None by dotted name, or refuse a leaf that is not one."""
    flat = _tree.flatten_once(params)
    leaves = flat.leaves
    names = _tree.names(params)
    _tree.check_names(names)
    named = dict(zip(names, leaves, strict=True))
    for name, leaf in named.items():
        if leaf is not None and not (
            isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
        ):
            what = leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__
            raise TypeError(
                f"params: {name} is {what}; a parameter is a floating or complex tensor. Fix: put "
                "it among the buffers."
            )
    _tree.check_parameters(flat)
    return {name: leaf for name, leaf in named.items() if leaf is not None}
