"""The parameters of an optimizer's step as a list, beside its state."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from .._optim.opt_state import without_wrappers
from .._optim.param_structure import ParamStructure
from .._torch import dtensor, foreach
from .._torch.tensor_list import ListMetadata, TensorList
from .._torch.tracing import CallContext, is_unresolved, refuse_graph_end
from .._tree import pytree
from .._tree.gradients import Gradients
from .._tree.matching import check_names, refuse_autograd_history
from .._tree.pytree import FlatTree, Leaves, Tree


class OptimizerTraits(Protocol):
    """The attributes that decide which tensors an optimizer is given, as in `FlatOptimizer`."""

    differentiable: bool
    elementwise: bool | None


class OptimizerInputs(NamedTuple):
    """The inputs of one step of an optimizer besides its gradients, which may still be scaled:
    parameters and state, on this rank.
    """

    context: CallContext
    param_structure: ParamStructure
    param_list: TensorList
    opt_state: Tree
    # parameters, then all leaves of the state; None unless all are `dense_without_history`
    params_and_state: TensorList | None = None
    state_structure: Any = None  # of the state, if `params_and_state` is there
    # parameters and state with DTensors, of which `params` and `opt_state` are the shards
    global_trees: tuple[Tree, Tree] | None = None
    piece_positions: Any = None  # of a piece of a larger step, for the wrapper that makes it
    plan: Any = None  # what `FlatOptimizer.plan` returned
    step_settings: Any = None  # what `FlatOptimizer.evaluate_settings` returned

    @classmethod
    def of_dense_without_history(
        cls,
        context: CallContext,
        param_structure: ParamStructure,
        flat_params: FlatTree,
        flat_opt_state: FlatTree,
        metadata: ListMetadata | None = None,
        **others: Any,
    ) -> OptimizerInputs:
        """Return the inputs of a step whose tensors are `dense_without_history`. `metadata` is that
        of `params_and_state`; `others` are other fields.
        """
        leaves = [*flat_params.leaves, *flat_opt_state.leaves]
        return cls(
            context,
            param_structure,
            flat_params.tensor_list,
            flat_opt_state.tree,
            params_and_state=TensorList(leaves, metadata, dense_without_history=True),
            state_structure=flat_opt_state.structure,
            **others,
        )

    @property
    def params(self) -> list[Tensor]:
        """The parameters."""
        return self.param_list.tensors

    @property
    def global_params(self) -> list[Tensor]:
        """The parameters, or the DTensors of which they are the shards."""
        if self.global_trees is None:
            return self.params
        return self.param_structure.flatten_up_to(self.global_trees[0])

    def with_params_and_state(self, params: list[Tensor], opt_state: Tree) -> OptimizerInputs:
        """Return the inputs with other tensors in place of the parameters, and this state."""
        return self.with_state(opt_state)._replace(param_list=TensorList(params))

    def with_state(self, opt_state: Tree) -> OptimizerInputs:
        """Return the inputs with another state."""
        return self._replace(opt_state=opt_state, params_and_state=None)

    def leaves_and_state_structure(self) -> tuple[Leaves, Any]:
        """Return the parameters and all leaves of the state in one list, and the structure of the
        state.
        """
        if self.params_and_state is not None:
            return self.params_and_state.tensors, self.state_structure
        leaves, structure = pytree.flatten(self.opt_state)
        return [*self.params, *leaves], structure

    def make_gradients(self, flat_grads: FlatTree) -> Gradients:
        """Return the checked gradients of these parameters, in the order of the leaves. Refuse,
        naming the leaf, one that is not over the mesh of its parameter.
        """
        if self.params_and_state is not None:
            return Gradients.of(flat_grads)
        leaves = flat_grads.leaves
        params = self.param_structure.with_none(self.global_params)
        if dtensor.any_dtensor([*leaves, *params]):
            for index, (leaf, param) in enumerate(zip(leaves, params, strict=True)):
                if leaf is not None and (reason := dtensor.placement_mismatch(leaf, param)):
                    raise ValueError(f"{pytree.path(flat_grads.tree, 'grads', index)} {reason}")
        if self.global_trees is not None:
            leaves = list(map(dtensor.redistribute_like, leaves, params))
        return Gradients.of_leaves(leaves)

    def grads_of_params(self, grads: Gradients) -> list[Tensor | None]:
        """Return the gradient of each of `params`, in their order and form (a shard, complex); None
        for one without.
        """
        leaves = grads.leaves
        if self.global_trees is not None:
            leaves = list(map(dtensor.local_shard, leaves))
        return self.param_structure.pick_present(leaves)

    def grads_in_param_dtypes(self, grads: Gradients) -> list[Tensor | None]:
        """Return the gradients in the form and in the dtypes of the parameters."""
        leaves = self.grads_of_params(grads)
        pairs = [(g, p.dtype) for g, p in zip(leaves, self.params, strict=True) if g is not None]
        remaining = iter(
            foreach.cast_list_saturating([g for g, _ in pairs], [dtype for _, dtype in pairs])
        )
        return [None if leaf is None else next(remaining) for leaf in leaves]

    @property
    def local_trees(self) -> tuple[Tree, Tree]:
        """Parameters and state."""
        return self.param_structure.unflatten(self.params), self.opt_state

    def as_trees(self, params: list[Tensor], opt_state: Tree) -> tuple[Tree, Tree]:
        """Return the results of a step as trees, with DTensors if the arguments had them."""
        trees = self.param_structure.unflatten(params), opt_state
        if self.global_trees is None:
            return trees
        return pytree.map(dtensor.from_local_like, self.global_trees, trees)


def make_optimizer_inputs(
    optimizer: OptimizerTraits,
    context: CallContext,
    flat_params: FlatTree,
    flat_opt_state: FlatTree,
    flat_grads: FlatTree | None = None,
) -> OptimizerInputs:
    """Return the inputs of a step over checked parameters. Refuse, naming the leaf, tensors on a
    graph, and shards of a parameter that the optimizer needs as a whole. `flat_grads=None` means
    that the gradients are still to be made.
    """
    flat_trees = flat_params, flat_opt_state, flat_grads
    lists = [tree.tensor_list for tree in flat_trees if tree is not None]
    dense_without_history = all([some.dense_without_history for some in lists])
    grad_leaves = [] if flat_grads is None else flat_grads.leaves
    if not optimizer.differentiable:
        refuse_graph_end()
    if not (optimizer.differentiable or dense_without_history):
        refuse_autograd_history(params=flat_params, grads=flat_grads, opt_state=flat_opt_state)
    names, leaves = pytree.dotted_names(flat_params.tree), flat_params.leaves
    check_names(names)
    has_grad = [True] * len(leaves) if flat_grads is None else [g is not None for g in grad_leaves]
    is_present = [leaf is not None for leaf in leaves]
    param_structure = ParamStructure.of_names(flat_params.structure, names, is_present, has_grad)
    if dense_without_history:
        return OptimizerInputs.of_dense_without_history(
            context, param_structure, flat_params, flat_opt_state
        )
    leaves = [  # torch's kernels ignore lazy negation
        leaf.resolve_conj().resolve_neg()
        if isinstance(leaf, Tensor) and is_unresolved(leaf)
        else leaf
        for leaf in leaves
    ]
    state, global_trees = flat_opt_state.tree, None
    sharded = dtensor.any_dtensor([*leaves, *grad_leaves])
    if sharded and optimizer.elementwise is not None:
        _check_shards(optimizer, flat_params.tree, names, leaves, state)
        global_trees = flat_params.structure.unflatten(leaves), state
        shard = functools.partial(dtensor.local_shard, on_graph=optimizer.differentiable)
        leaves, state = list(map(shard, leaves)), pytree.map(shard, state)
    present = TensorList(param_structure.pick_present(leaves))
    return OptimizerInputs(context, param_structure, present, state, global_trees=global_trees)


def _check_shards(
    optimizer: OptimizerTraits, tree: Tree, names: list[str], leaves: Leaves, opt_state: Tree
) -> None:
    """Refuse DTensors whose shards this optimizer cannot step."""
    for index, leaf in enumerate(leaves):
        if not dtensor.is_dtensor(leaf):
            continue
        at = pytree.path(tree, "params", index)
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


def _check_state_placements(opt_state: Tree, params: dict[str, Any]) -> None:
    for key, column in getattr(without_wrappers(opt_state), "slots", {}).items():
        for name, slot in zip(pytree.dotted_names(column), pytree.flatten(column)[0], strict=True):
            both = [x for x in (slot, params.get(name)) if dtensor.is_dtensor(x)]
            placed = [(x.device_mesh, x.placements) for x in both]
            if dtensor.is_dtensor(slot) and placed[:1] != placed[1:]:
                raise ValueError(
                    f"opt_state: {key} of {name} has the placements {slot.placements}, its "
                    "parameter has others. Likely cause: the state of the parameters before they "
                    "were sharded. Fix: `opt_state = optimizer.init(params)` once they are."
                )
