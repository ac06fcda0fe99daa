"""Several optimizers, one for each kind of parameter, as one optimizer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from .._optim.optimizer import FlatOptimizer, Optimizer, as_flat_optimizer, check_optimizer
from .._optim.optimizer_inputs import OptimizerInputs, make_optimizer_inputs
from .._optim.param_structure import ParamStructure, named_params
from .._torch.dtensor import any_dtensor
from .._torch.tensor_list import ListMetadata, TensorList
from .._tree import pytree
from .._tree.gradients import Gradients
from .._tree.leaves import describe
from .._tree.pytree import FlatTree, Tree
from .._tree.select import overwrite_tree

Label = Callable[[str, Tensor], str]


def partition(optimizers: Mapping[str, Optimizer], label: Label) -> PartitionOptimizer:
    """Equal to `for key, part in parts.items(): params[key], opt_state[key] =
    optimizers[key].step(params[key], grads[key], opt_state[key])`, where `parts` are the parameters
    of each label. This is for a model with several kinds of parameters, such as Muon for the
    matrices and AdamW for everything else.

    Each optimizer sees only its part, a flat dict by dotted name: patterns in `overrides` match its
    parameters alone, a schedule counts its own steps, and `muon.to_state_dict(opt_state["muon"])`
    is in torch's format. One flag decides for all parts: an inf in one gradient skips every part,
    and a step's `max_norm` bounds the norm over all of them. Memory that two parts share is never
    overwritten. A part whose step calls a function of yours goes first, so that nothing is
    overwritten if it raises. `with_master_weights` may be around the partition or around a
    part; around a part a donated step goes in pieces. Each part takes its own DTensors, so AdamW
    may step shards beside a Muon with whole parameters.

    Args:
        optimizers: Any optimizers, by key.
        label: A function `label(name, param)` that returns the key for a parameter from its dotted
            name, shape and dtype, never from its values. It is called in `init` and in steps, so it
            must always give the same key; a compiled step traces it (`name.endswith`, `in`,
            `param.ndim`; not `fnmatch`).

    Returns:
        An optimizer whose state is a dict: by key the state of each optimizer.

    Raises:
        TypeError: If `optimizers` is not a dict of optimizers, or `label` is not a function.
        ValueError: From `init` and `step`, before any work, if a label names no optimizer, if an
            optimizer has no parameter, or if the state has other parts.

    Example:
        >>> import torch
        >>> from purescale import from_torch
        >>> optimizers = {
        ...     "muon": from_torch(torch.optim.Muon, lr=0.02),
        ...     "adamw": from_torch(torch.optim.AdamW, lr=1e-3),
        ... }
        >>> def label(name, param):
        ...     return "muon" if param.ndim == 2 and "embed" not in name else "adamw"
        >>> optimizer = partition(optimizers, label)
        >>> params = {"embed": torch.ones(8, 2), "linear.weight": torch.ones(2, 2)}
        >>> opt_state = optimizer.init(params)
        >>> {key: list(state.slots) for key, state in opt_state.items()}
        {'muon': ['momentum_buffer'], 'adamw': ['exp_avg', 'exp_avg_sq']}
        >>> list(opt_state["muon"].slots["momentum_buffer"])
        ['linear.weight']

    Source of the form: optax.multi_transform.
    """
    return PartitionOptimizer(optimizers, label)


class PartitionOptimizer(FlatOptimizer):
    """Several optimizers, each for its part of the parameters; made by `partition`."""

    # Each part gets DTensors as they are, because it decides itself whether to take shards.
    elementwise: bool | None = None

    def __init__(self, optimizers: Mapping[str, Optimizer], label: Label) -> None:
        _check_arguments(optimizers, label)
        self.optimizers, self.label = dict(optimizers), label
        self.flat_optimizers = {
            key: as_flat_optimizer(each) for key, each in self.optimizers.items()
        }
        self.runs_user_code = any(each.runs_user_code for each in self.flat_optimizers.values())
        self.may_add_slots = any(each.may_add_slots for each in self.flat_optimizers.values())
        self.wide_grads = any(each.wide_grads for each in self.flat_optimizers.values())
        # A part that is not differentiable would detach what is on a graph.
        self.differentiable = all(each.differentiable for each in self.flat_optimizers.values())
        self.agreed_settings = self.optimizers, label

    def __repr__(self) -> str:
        return f"partition({self.optimizers!r}, {self.label!r})"

    def init(self, params: Tree) -> dict[str, Any]:
        """Return the states of all optimizers by key, each for its part."""
        named = named_params(params)
        names, leaves = list(named), list(named.values())
        return {
            key: self.optimizers[key].init({names[index]: leaves[index] for index in param_indices})
            for key, param_indices in self._members(names, leaves).items()
        }

    def plan(self, inputs: OptimizerInputs) -> dict[str, Part]:
        """Return the parts of a step by key. Refuse a state that does not belong to these parts."""
        opt_state = inputs.opt_state
        if not (isinstance(opt_state, dict) and opt_state.keys() == self.flat_optimizers.keys()):
            has = list(opt_state) if isinstance(opt_state, dict) else type(opt_state).__name__
            raise ValueError(
                f"opt_state has the parts {has}, this optimizer has {list(self.optimizers)}. "
                "Likely cause: the state of one optimizer alone, or of another partition. Fix: "
                "`opt_state = optimizer.init(params)`, or what the last step returned."
            )
        # Those that may raise come first, into fresh memory: nothing is overwritten then.
        order = sorted(
            self.flat_optimizers, key=lambda key: not self.flat_optimizers[key].runs_user_code
        )
        indices_of = self._members(inputs.param_structure.names, inputs.params)
        state_of = _state_of_each(inputs)
        parts = {}
        for key in order:
            param_structure = inputs.param_structure.take(indices_of[key])
            grad_indices = [inputs.param_structure.grad_indices[n] for n in indices_of[key]]
            place = indices_of[key], grad_indices, ListMetadata()
            part = Part(param_structure, *place, *state_of.get(key, ()))
            plan = self.flat_optimizers[key].plan(self.inputs_of(key, part, inputs))
            parts[key] = part._replace(plan=plan)
        return parts

    def inputs_of(self, key: str, part: Part, inputs: OptimizerInputs) -> OptimizerInputs:
        """Return the inputs of one part, with shards in place of DTensors if its optimizer takes
        shards.
        """
        param_structure, dense = part.param_structure, inputs.params_and_state
        opt_state = inputs.opt_state[key]
        params = inputs.param_list.take(part.param_indices)
        if dense is not None and part.state_slice is not None:
            leaves = [*params.tensors, *dense.tensors[part.state_slice]]
            dense = TensorList(leaves, part.leaves_metadata, dense_without_history=True)
            return OptimizerInputs(
                inputs.context, param_structure, params, opt_state, dense, part.state_structure
            )
        if any_dtensor(params.tensors):
            flat_params = FlatTree.of(param_structure.unflatten(params.tensors))
            part_inputs = make_optimizer_inputs(
                self.flat_optimizers[key], inputs.context, flat_params, FlatTree.of(opt_state)
            )
            return part_inputs._replace(param_structure=param_structure)
        return OptimizerInputs(inputs.context, param_structure, params, opt_state)

    def grads_of(self, part_inputs: OptimizerInputs, part: Part, grads: Gradients) -> Gradients:
        """Return the gradients of one part."""
        taken = grads.take(part.grad_indices)
        if not taken.are_sharded:
            return taken
        flat = FlatTree.of(part_inputs.param_structure.unflatten(taken.leaves))
        return part_inputs.make_gradients(flat)._replace(pending=grads.pending)

    def evaluate_settings(self, opt_state: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of each part, by key."""
        parts = self.flat_optimizers.items()
        return {key: part.evaluate_settings(opt_state[key]) for key, part in parts}

    def step_or_skip(
        self,
        inputs: OptimizerInputs,
        grads: Gradients,
        skip: Tensor | None = None,
        *,
        in_place: bool = False,
    ) -> tuple[list[Tensor], Tree]:
        """Return parameters and state after a step of each part, skipped or not."""
        plan: dict[str, Part] = inputs.plan
        part_inputs = {
            key: self.inputs_of(key, part, inputs)._replace(
                plan=part.plan, step_settings=inputs.step_settings[key]
            )
            for key, part in plan.items()
        }
        part_grads = {
            key: self.grads_of(part_inputs[key], part, grads) for key, part in plan.items()
        }
        stepped = {}
        for key in plan:
            optimizer = self.flat_optimizers[key]
            writes = in_place and not optimizer.runs_user_code
            stepped[key] = optimizer.step_or_skip(
                part_inputs[key], part_grads[key], skip, in_place=writes
            )
        for key, optimizer in self.flat_optimizers.items():
            if in_place and optimizer.runs_user_code and not optimizer.may_add_slots:
                old = part_inputs[key].params, part_inputs[key].opt_state
                stepped[key] = overwrite_tree(old, stepped[key])
        params, opt_state = list(inputs.params), {}
        for key in self.flat_optimizers:
            new, opt_state[key] = stepped[key]
            if part_inputs[key].global_trees is not None:
                tree, opt_state[key] = part_inputs[key].as_trees(*stepped[key])
                new = part_inputs[key].param_structure.flatten_up_to(tree)
            for index, param in zip(inputs.plan[key].param_indices, new, strict=True):
                params[index] = param
        return params, opt_state

    def _members(self, names: list[str], params: list[Tensor]) -> dict[str, list[int]]:
        """Return the indices of the parameters of each part."""
        indices_of: dict[str, list[int]] = {key: [] for key in self.flat_optimizers}
        for index, (name, param) in enumerate(zip(names, params, strict=True)):
            key = self.label(name, param)
            if not (isinstance(key, str) and key in indices_of):
                raise ValueError(
                    f"label gives {key!r} for {name}, {describe(param)}; the optimizers are "
                    f"{list(indices_of)}. Fix: a last line that returns a default key, such as "
                    "that of AdamW."
                )
            indices_of[key].append(index)
        unused = [key for key, indices in indices_of.items() if not indices]
        if unused:
            raise ValueError(
                f"no parameter has the label {unused[0]!r}; the names are: "
                f"{pytree.join_names(names, 20)}. Fix: correct `label(name, param)`, or leave the "
                "optimizer out."
            )
        return indices_of


class Part(NamedTuple):
    """A part of a step: its place in the lists of the whole one, and the plan of its optimizer."""

    param_structure: ParamStructure
    param_indices: list[int]
    grad_indices: list[int | None]  # among the gradients; None for one without a gradient
    leaves_metadata: ListMetadata  # of its dense leaves
    state_slice: slice | None = None  # of the leaves of its state among all; None if not all dense
    state_structure: Any = None
    plan: Any = None


def _state_of_each(inputs: OptimizerInputs) -> dict[str, tuple[slice, Any]]:
    """Return by key the place of its state among `params_and_state`, and its structure; none if the
    leaves are not known to be dense.
    """
    if inputs.params_and_state is None:
        return {}
    structures = inputs.state_structure.children()
    num_leaves = [structure.num_leaves for structure in structures]
    ends = list(itertools.accumulate(num_leaves, initial=len(inputs.params)))
    slices = map(slice, ends, ends[1:])
    return dict(zip(inputs.opt_state, zip(slices, structures, strict=True), strict=True))


def _check_arguments(optimizers: Any, label: Any) -> None:
    by_key = isinstance(optimizers, Mapping) and len(optimizers) > 0 and callable(label)
    if not by_key or not all(isinstance(key, str) for key in optimizers):
        raise TypeError(
            f"partition got {optimizers!r} and {label!r}; expected a non-empty dict of optimizers "
            "by strings, and a function of a parameter's dotted name and the parameter that "
            'returns one of these. Fix: partition({"muon": from_torch(torch.optim.Muon), "adamw": '
            'from_torch(torch.optim.AdamW)}, lambda name, param: "muon" if param.ndim == 2 else '
            '"adamw").'
        )
    for key, each in optimizers.items():
        check_optimizer(each, f"optimizers[{key!r}]")
