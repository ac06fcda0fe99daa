"""The stage `flatten` of a step: its trees as matching lists of local tensors."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._optim.opt_state import (
    STEP,
    Columns,
    OptState,
    are_parts,
    columns_like,
    is_of_torch,
    param_names,
    scalars_of,
    tensors_of,
    values_of,
    with_columns,
    without_wrappers,
)
from .._torch import dtensor, foreach
from .._torch.foreach import same_memory_order
from .._torch.tensor_list import TensorList
from .._torch.tracing import end_graph, is_unresolved
from .._tree import tree as _tree
from .._tree.gradients import Gradients, as_gradients
from .._tree.leaves import as_tensor_list
from .._tree.tree import FlatDict, FlatTree, Leaves, Tree, TreeDef


class Position(NamedTuple):
    """The position of a piece within its parameter."""

    leaf: int  # the index among all leaves, counting None
    start: int  # the number of elements of this rank's part before the piece
    dtensor: Any  # the DTensor that this rank has a part of, or None


class StepInputs(NamedTuple):
    """The parameters, gradients and state of one step of an optimizer, on this rank."""

    structure: TreeDef  # of the parameters
    names: list[str]  # of the leaves of this structure
    params: dict[str, Tensor]  # by dotted name; a leaf that is None has no entry
    grads: Gradients  # in the order of `names`; without likes while they are still to be made
    opt_state: Tree
    param_list: TensorList  # of `params`, with what is known of them
    # what a step replaces: the parameters, then the slots of an OptState, or all tensors of any
    # other state; None unless all are known to be dense and off graph
    target_list: TensorList | None = None
    # parameters and state with DTensors, of which `params` and `opt_state` are the shards
    global_trees: tuple[Tree, Tree] | None = None
    positions: dict[str, Position] | None = None  # by name, if these are a piece of a larger step

    @classmethod
    def of_dict(
        cls,
        params: dict[str, Tensor],
        grads: Gradients,
        opt_state: Tree,
        param_list: TensorList | None = None,
        **others: Any,
    ) -> StepInputs:
        """Return the inputs of a step over a flat dict of parameters, such as a part of a step."""
        structure, param_list = FlatDict(tuple(params)), param_list or _list_of(params)
        return cls(structure, list(params), params, grads, opt_state, param_list, **others)

    def with_targets(self, targets: TensorList) -> StepInputs:
        """Return the inputs with what a step replaces, if that is in the order of `columns`."""
        if isinstance(self.opt_state, OptState):
            in_order = [*self.params.values(), *values_of(self.columns)]
            if not all(map(operator.is_, targets.tensors, in_order)):
                return self
        return self._replace(target_list=targets)

    def with_params(self, params: dict[str, Any], opt_state: Tree) -> StepInputs:
        """Return the inputs with other tensors in place of the parameters, and this state."""
        return self._replace(
            params=params, opt_state=opt_state, param_list=_list_of(params), target_list=None
        )

    def unscaled(self, *, wide: bool = False) -> StepInputs:
        """Return the inputs with gradients for an optimizer, as `Gradients.unscaled`."""
        return self._replace(grads=self.grads.unscaled(wide=wide))

    @property
    def columns(self) -> Columns:
        """The slots of an OptState by slot and parameter, then its counts."""
        trees = self.opt_state.slots
        if not isinstance(self.opt_state.counts, tuple):
            trees = {**trees, STEP: self.opt_state.counts}
        try:
            columns = {key: self.named(tree) for key, tree in trees.items()}
        except ValueError:
            raise foreign_parameters(param_names(self.opt_state), self.names) from None
        return {
            key: column
            if _tree.are_tensors(list(column.values()))
            else {name: x for name, x in column.items() if isinstance(x, Tensor)}
            for key, column in columns.items()
        }

    def with_columns(self, opt_state: OptState, columns: Columns) -> OptState:
        """Return a state with these columns, the inverse of `columns`."""
        return with_columns(opt_state, self.structure, self.names, columns)

    def writable(self, *, in_place: bool) -> tuple[StepInputs, Columns]:
        """Return the inputs with parameters, and columns, that a kernel may write into: these, off
        the graph, if `in_place`, else copies. Slots get the memory order of their parameter.
        """
        inputs, params, columns = self, self.params, self.columns
        old = self.target_list or TensorList([*params.values(), *values_of(columns)])
        if not in_place or old.any_requires_grad:
            new = old.tensors if in_place else foreach.clone(old.tensors)
            working = iter([t.detach() if t.requires_grad else t for t in new])
            inputs = self.with_params(dict(zip(params, working, strict=False)), self.opt_state)
            columns = columns_like(columns, working)
        if not old.are_contiguous:
            for column in columns.values():
                for name, slot in column.items():
                    param = inputs.params[name]
                    if slot.shape == param.shape and not same_memory_order(slot, param):
                        column[name] = torch.empty_like(param, dtype=slot.dtype).copy_(slot)
        return inputs, columns

    @property
    def grad_names(self) -> list[str]:
        """The names of the gradients that are not None; none while they are still to be made."""
        if self.grads.dense_real or not self.grads.likes:
            return self.names[: len(self.grads.likes)]
        return list(_by_name(self.names, self.grads.likes))

    @property
    def local_grads(self) -> dict[str, Tensor]:
        """The gradients by name, in the form of the parameters: shards if these are."""
        leaves = self.grads.leaves
        return _by_name(self.names, map(dtensor.shard, leaves) if self.global_trees else leaves)

    @property
    def all_positions(self) -> dict[str, Position]:
        """The position of each parameter's elements, by name."""
        if self.positions is not None:
            return self.positions
        leaves = self.named((self.global_trees or self.trees)[0])
        return {
            name: Position(index, 0, leaf if dtensor.is_dtensor(leaf) else None)
            for index, (name, leaf) in enumerate(leaves.items())
        }

    @property
    def trees(self) -> tuple[Tree, Tree]:
        """Parameters and state."""
        return self.params_tree(self.params), self.opt_state

    def params_tree(self, values: Mapping[str, Any]) -> Tree:
        """Return a tree like the parameters from values by name, with None for the others."""
        return self.structure.unflatten(list(map(values.get, self.names)))

    def named(self, tree: Tree) -> dict[str, Any]:
        """Return the leaves of a tree like the parameters by name, also those that are None."""
        return dict(zip(self.names, self.structure.flatten_up_to(tree), strict=True))

    def restore(self, params: Tree, opt_state: Tree) -> tuple[Tree, Tree]:
        """Return the results of a step, as DTensors if the arguments were."""
        if self.global_trees is None:
            return params, opt_state
        return _tree.map(dtensor.from_local_like, self.global_trees, (params, opt_state))


def _list_of(params: dict[str, Any]) -> TensorList:
    return TensorList(list(params.values()))


def _by_name(names: Sequence[str], leaves: Iterable[Any]) -> dict[str, Any]:
    """Return by name the leaves that are not None."""
    return {name: leaf for name, leaf in zip(names, leaves, strict=True) if leaf is not None}


def foreign_parameters(in_state: list[str], in_params: list[str]) -> ValueError:
    """Return the error of a state for other parameters."""
    return ValueError(
        f"opt_state knows the parameters {_tree.join_names(in_state)}, params has "
        f"{_tree.join_names(in_params)}. Fix: `opt_state = optimizer.init(params)` for these "
        "params."
    )


def flatten_step(optimizer: Any, params: Tree, grads: Tree, opt_state: Tree) -> StepInputs:
    """Return the checked inputs of a step over trees, as `step_inputs`. Refuse, naming the leaf,
    gradients that do not fit `params`.
    """
    flat_params, flat_state = flatten_together([params], opt_state)
    _tree.check_parameters(flat_params)
    flat_grads = _tree.gradients_like(flat_params, grads)
    return step_inputs(optimizer, flat_params, flat_state, flat_grads)


def step_inputs(
    optimizer: Any, params: FlatTree, opt_state: FlatTree, grads: FlatTree | None = None
) -> StepInputs:
    """Return the inputs of a step over checked parameters. Refuse, naming the leaf, tensors on a
    graph, and shards of a parameter that the optimizer needs as a whole. `grads=None` means that
    the gradients are still to be made.
    """
    lists = [tree.tensor_list for tree in (params, opt_state, grads) if tree is not None]
    dense_off_graph = all([some.dense_off_graph for some in lists])
    grad_leaves = [] if grads is None else grads.leaves
    if not optimizer.differentiable:
        end_graph()
    if not (optimizer.differentiable or dense_off_graph):
        _tree.reject_autograd_history(params=params, grads=grads, opt_state=opt_state)
    names, structure = _tree.names(params.tree), params.structure
    state_list, state = opt_state.tensor_list, opt_state.tree
    if dense_off_graph:
        param_list, named = params.tensor_list, _by_name(names, params.leaves)
        grad_list = TensorList([]) if grads is None else grads.tensor_list
        gradients = Gradients(grad_list, grad_leaves, dense_real=grads is not None)
        inputs = StepInputs(structure, names, named, gradients, state, param_list)
        if isinstance(state, OptState):  # its slots and counts alone
            state_list = state_list.part(1, len(opt_state.leaves) - len(scalars_of(state)))
        # The slots of a class of a user's own are by parameter.
        if not (isinstance(state, OptState) and optimizer.calls_step):
            inputs = inputs.with_targets(param_list.joined(state_list))
    else:
        inputs = _flatten_unknown(optimizer, params, names, grad_leaves, state)
    if len(inputs.params) < len(names):
        _tree.check_names(names)
    return inputs


def _flatten_unknown(
    optimizer: Any, params: FlatTree, names: list[str], grads: Leaves, opt_state: Tree
) -> StepInputs:
    """Return the inputs of a step over tensors of any kind."""
    leaves = [  # torch's kernels ignore lazy negation
        leaf.resolve_conj().resolve_neg()
        if isinstance(leaf, Tensor) and is_unresolved(leaf)
        else leaf
        for leaf in params.leaves
    ]
    global_trees = None
    sharded = dtensor.any_dtensor([*leaves, *grads])
    if sharded and optimizer.elementwise is not None:
        _check_shards(optimizer, params.tree, names, leaves, grads, opt_state)
        global_trees = params.structure.unflatten(leaves), opt_state
        grads = list(map(dtensor.redistribute_like, grads, leaves))  # none if still to be made
        shard = functools.partial(dtensor.shard, on_graph=optimizer.differentiable)
        leaves, opt_state = list(map(shard, leaves)), _tree.map(shard, opt_state)
    named = _by_name(names, leaves)
    gradients, structure, param_list = as_gradients(grads), params.structure, _list_of(named)
    return StepInputs(
        structure, names, named, gradients, opt_state, param_list, global_trees=global_trees
    )


def _check_shards(
    optimizer: Any,
    tree: Tree,
    names: list[str],
    leaves: Leaves,
    grads: Leaves,
    opt_state: Tree,
) -> None:
    """Refuse DTensors whose shards this optimizer cannot step."""
    for index, (leaf, gradient) in enumerate(itertools.zip_longest(leaves, grads)):
        if gradient is not None and (reason := dtensor.placement_mismatch(gradient, leaf)):
            raise ValueError(f"{_tree.path(tree, 'grads', index)} {reason}")
        if not dtensor.is_dtensor(leaf):
            continue
        at = _tree.path(tree, "params", index)
        if any(placement.is_partial() for placement in leaf.placements):
            raise ValueError(
                f"{at} has the placements {leaf.placements}: it has a Partial placement, and "
                "updating each rank's part does not update their sum. Fix: "
                "`p.redistribute(placements=[Replicate()])`."
            )
        if not optimizer.elementwise and dtensor.is_sharded(leaf):
            raise ValueError(
                f"{at} has the placements {leaf.placements}, and {optimizer} needs the whole of a "
                "parameter. Fix: AdamW or another optimizer that updates each element by itself, "
                "such as from_formula(..., elementwise=True), or "
                "`p.redistribute(placements=[Replicate()])`, for gradients too."
            )
    _check_state_placements(opt_state, dict(zip(names, leaves, strict=True)))


def flatten_together(trees: Sequence[Tree], *opt_states: Tree) -> list[FlatTree]:
    """Flatten each tree and each state of an optimizer, with one check of all leaves. The state of
    a class of torch, and a dict of such states, has no structure: it is never rebuilt from its
    leaves.
    """
    pairs = [*map(_tree.flatten, trees), *map(_flatten_opt_state, opt_states)]
    trees = *trees, *opt_states
    joined = as_tensor_list([leaf for leaves, _ in pairs for leaf in leaves])
    flats, start = [], 0
    for tree, (leaves, structure) in zip(trees, pairs, strict=True):
        stop = start + len(leaves)
        flats.append(FlatTree(tree, leaves, structure, joined.part(start, stop)))
        start = stop
    return flats


def _flatten_opt_state(opt_state: Tree) -> tuple[Leaves, Any]:
    # Listing the tensors is faster than walking through the dicts.
    if is_of_torch(opt_state):
        return tensors_of(opt_state), None
    if are_parts(opt_state):
        return [leaf for state in opt_state.values() for leaf in tensors_of(state)], None
    return _tree.flatten(opt_state)


def _check_state_placements(opt_state: Tree, params: dict[str, Any]) -> None:
    for key, column in getattr(without_wrappers(opt_state), "slots", {}).items():
        for name, slot in zip(_tree.names(column), _tree.flatten(column)[0], strict=True):
            param = params.get(name)
            if dtensor.is_dtensor(slot) and not (
                dtensor.is_dtensor(param)
                and (slot.device_mesh, slot.placements) == (param.device_mesh, param.placements)
            ):
                has = f"{param.placements}" if dtensor.is_dtensor(param) else "none"
                raise ValueError(
                    f"opt_state: {key} of {name} has the placements {slot.placements}, its "
                    f"parameter has {has}. Likely cause: the state of the parameters before they "
                    "were sharded. Fix: `opt_state = optimizer.init(params)` once they are."
                )


def named_params(params: Tree) -> dict[str, Tensor]:
    """Return the parameters that are not None by dotted name, or refuse a leaf that is not one."""
    flat, names = _tree.flatten_once(params), _tree.names(params)
    _tree.check_names(names)
    _tree.check_parameters(flat)
    return _by_name(names, flat.leaves)
