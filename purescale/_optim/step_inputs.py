"""The stage `flatten` of a step: its trees as lists of local tensors that go together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from .._optim.opt_state import OptState, values_of
from .._torch import dtensor
from .._torch.tracing import is_lazy
from .._tree import tree as _tree
from .._tree.leaves import Normalized, are_usual, normalize
from .._tree.tree import Flat, Leaves, Tree


class StepInputs(NamedTuple):
    """Parameters, their gradients in the same order, and the optimizer's state, on this rank."""

    structure: Any  # of the parameters
    names: list[str]  # of every leaf
    params: Leaves  # with None; of a DTensor the local shard, where the optimizer is elementwise
    grads: Normalized
    opt_state: Any
    named_params: dict[str, Any]  # the parameters that are tensors, by dotted name
    origins: tuple[Sequence[Any], Sequence[Any]] | None = None  # the DTensors of params and state

    @property
    def grad_names(self) -> list[str]:
        """The dotted names of the gradients that are there."""
        return list(_present(self.names, self.grads.given))

    @property
    def named_grads(self) -> dict[str, Any]:
        """The gradients that are there, as dense, real tensors by dotted name."""
        return dict(zip(self.grad_names, self.grads.tensors, strict=True))

    def params_tree(self, leaves: Leaves) -> Tree:
        """Leaves in the order of the parameters as a tree like theirs."""
        return self.structure.unflatten(leaves)

    def grads_tree(self, tensors: list[Any]) -> Tree:
        """What was computed of each gradient as a tree like the parameters."""
        return self.structure.unflatten(self.local_grads(tensors))

    def local_grads(self, tensors: list[Any]) -> Leaves:
        """What was computed of each gradient in the order and the dtypes of the parameters, with
        None; local shards where those of the parameters are.
        """
        leaves = self.grads.restore(tensors)
        return leaves if self.origins is None else list(map(dtensor.shard, leaves))

    def restore(self, params: Tree, opt_state: Any) -> tuple[Tree, Any]:
        """What a step made of these, as DTensors where the arguments were."""
        if self.origins is None:
            return params, opt_state
        trees = []
        for tree, origins in zip((params, opt_state), self.origins, strict=True):
            leaves, structure = _tree.flatten(tree)
            pairs = zip(origins, leaves, strict=True)
            trees.append(structure.unflatten([dtensor.from_local_like(*pair) for pair in pairs]))
        return trees[0], trees[1]


def flatten_step(optimizer: Any, params: Tree | Flat, grads: Tree, opt_state: Any) -> StepInputs:
    """The inputs of a step, checked. Refused, naming the leaf: gradients that are not those of
    `params`, what is on a graph, shards that the optimizer would take for the whole. `grads=None`:
    they are still to be made.
    """
    flat = params if isinstance(params, Flat) else _tree.flat(params)
    params = flat.tree
    if not optimizer.differentiable:
        state = _tree.Flat(opt_state, _state_leaves(opt_state), None)
        _tree.refuse_graphs(params=flat, grads=grads, opt_state=state)
    structure, weights, gradients = _tree.aligned(flat, grads)
    if not are_usual(weights):
        weights = list(map(_resolved, weights))
    names = _tree.names(params)
    sharded = dtensor.any_dtensor(weights) or dtensor.any_dtensor(gradients)
    if not sharded or optimizer.elementwise is None:
        unmade = Normalized([], gradients, usual=False)
        normalized = unmade if grads is None else normalize(gradients)
        return StepInputs(
            structure, names, weights, normalized, opt_state, _present(names, weights)
        )
    for index, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
        if gradient is not None and (reason := dtensor.placement_mismatch(gradient, weight)):
            raise ValueError(f"{_tree.path(params, 'grads', index)} {reason}")
        _check_placements(weight, params, index, optimizer)
    _check_state_placements(opt_state, dict(zip(names, weights, strict=True)))
    pairs = zip(gradients, weights, strict=True)
    gradients = [dtensor.redistribute_like(gradient, weight) for gradient, weight in pairs]
    leaves, state = _tree.flatten(opt_state)
    on_graph = optimizer.differentiable
    local = [dtensor.shard(weight, on_graph=on_graph) for weight in weights]
    return StepInputs(
        structure,
        names,
        local,
        normalize(gradients),
        state.unflatten([dtensor.shard(leaf, on_graph=on_graph) for leaf in leaves]),
        _present(names, local),
        (weights, leaves),
    )


def _present(names: list[str], leaves: Sequence[Any]) -> dict[str, Any]:
    return {name: leaf for name, leaf in zip(names, leaves, strict=True) if leaf is not None}


def _state_leaves(opt_state: Any) -> Leaves:
    """The leaves of an optimizer's state; of torch's classes without a walk through their dicts."""
    if not (isinstance(opt_state, OptState) and type(opt_state.slots) is dict):
        return _tree.flatten(opt_state)[0]
    rate = [opt_state.lr] if isinstance(opt_state.lr, Tensor) else []
    return [opt_state.applied, *values_of(opt_state.slots), *rate]


def _resolved(leaf: Any) -> Any:
    """A parameter as torch's kernels read it, which know nothing of lazy negation."""
    if not isinstance(leaf, Tensor) or not is_lazy(leaf):
        return leaf
    return leaf.resolve_conj().resolve_neg()


def _check_placements(weight: Any, params: Tree, index: int, optimizer: Any) -> None:
    if not isinstance(weight, DTensor):
        return
    at = _tree.path(params, "params", index)
    if any(placement.is_partial() for placement in weight.placements):
        raise ValueError(
            f"{at} has the placements {weight.placements}: it has a Partial placement, and to "
            "update each rank's part does not update their sum. Fix: "
            "`p.redistribute(placements=[Replicate()])`."
        )
    if not optimizer.elementwise and dtensor.is_sharded(weight):
        raise ValueError(
            f"{at} has the placements {weight.placements}, and {optimizer} needs the whole of a "
            "parameter for a step of any part, as do Muon and Adafactor. Fix: AdamW or another "
            "that moves each element by itself, or `p.redistribute(placements=[Replicate()])`, "
            "gradients too."
        )


def _check_state_placements(opt_state: Any, weights: dict[str, Any]) -> None:
    for name, slot in getattr(opt_state, "slots", {}).items():
        weight = weights.get(name)
        for key, value in slot.items():
            if isinstance(value, DTensor) and not (
                isinstance(weight, DTensor)
                and (value.device_mesh, value.placements) == (weight.device_mesh, weight.placements)
            ):
                has = f"{weight.placements}" if isinstance(weight, DTensor) else "none"
                raise ValueError(
                    f"opt_state: {key} of {name} has the placements {value.placements}, its "
                    f"parameter has {has}. Likely cause: the state of the parameters before they "
                    "were sharded. Fix: `opt_state = optimizer.init(params)` once they are."
                )
