"""Several optimizers, one for each kind of parameter, as one optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .._optim.opt_state import scalars_of
from .._optim.protocol import Optimizer
from .._optim.step_inputs import StepInputs, StepLists, flatten_step, inputs_of_dict
from .._optim.updater import Updater, as_updater
from .._torch.autocast import outside_autocast
from .._torch.dtensor import any_dtensor
from .._torch.tensor_list import TensorList
from .._tree import tree as _tree
from .._tree.gradients import Gradients
from .._tree.leaves import describe
from .._tree.scalars import not_made
from .._tree.tree import Leaves, Tree

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
    overwritten. `with_master_weights` may be around the partition or around a part; around a part a
    donated step goes in pieces. Each part takes its own DTensors, so AdamW may step shards beside a
    Muon with whole parameters.

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
        {'muon': ['linear.weight'], 'adamw': ['embed']}

    Source of the form: optax.multi_transform.
    """
    return PartitionOptimizer(optimizers, label)


@dataclasses.dataclass(frozen=True, eq=False)
class Members:
    """The parameters of one optimizer."""

    names: tuple[str, ...]
    indices: tuple[int, ...]  # among all leaves


class Part(NamedTuple):
    """One optimizer with the inputs of its part of a step."""

    key: str
    optimizer: Updater
    inputs: StepInputs


class PartitionOptimizer(Updater):
    """Several optimizers, each for its part of the parameters; made by `partition`."""

    # Each part gets DTensors as they are, because it decides itself whether to take shards.
    elementwise: bool | None = None

    def __init__(self, optimizers: Mapping[str, Optimizer], label: Label) -> None:
        _check(optimizers, label)
        self.optimizers, self.label = dict(optimizers), label
        self._parts = {key: as_updater(each) for key, each in self.optimizers.items()}
        self.calls_step = any(part.calls_step for part in self._parts.values())
        self.wide_grads = any(part.wide_grads for part in self._parts.values())
        self.may_add_slots = any(part.may_add_slots for part in self._parts.values())
        self._cache_key = object()  # keeps nothing else alive
        # A part that is not differentiable would detach what is on a graph.
        self.differentiable = all(part.differentiable for part in self._parts.values())
        self.compared = self.optimizers, label

    def __repr__(self) -> str:
        return f"partition({self.optimizers!r}, {self.label!r})"

    def init(self, params: Tree) -> dict[str, Any]:
        """Return the states of all optimizers by key, each for its part."""
        flat = _tree.flatten_once(params)
        _tree.check_parameters(flat)
        names = _tree.names(params)
        members = self._members(names, flat.leaves, flat.tensor_list)
        return {
            key: optimizer.init(_by_name(members[key], flat.leaves))
            for key, optimizer in self.optimizers.items()
        }

    @outside_autocast()
    def step(self, params: Tree, grads: Tree, opt_state: dict[str, Any]) -> tuple[Tree, Tree]:
        """Return parameters and state after one step of each part, in fresh memory."""
        inputs = flatten_step(self, params, grads, opt_state)
        self.check(inputs)
        return self.apply_step(inputs, self.current_settings(opt_state))

    def check(self, inputs: StepInputs) -> None:
        """Refuse a state that does not belong to these parts."""
        for part in self.split(inputs):
            part.optimizer.check(part.inputs)

    def current_settings(self, opt_state: dict[str, Any]) -> dict[str, Any]:
        """Return what each part prepares, by key."""
        return {key: part.current_settings(opt_state[key]) for key, part in self._parts.items()}

    def apply_step(self, inputs: StepInputs, current: Any) -> tuple[Tree, Tree]:
        """Return parameters and state after a step of each part, in fresh memory."""
        return self._joined(
            inputs, lambda key, part, of_part: part.apply_step(of_part, current[key])
        )

    def apply_step_unless(
        self, skip: Tensor, inputs: StepInputs, current: Any, *, in_place: bool = False
    ) -> tuple[Tree, Tree]:
        """Return parameters and state after a step of each part, skipped or not."""
        in_place = in_place and not self.calls_step  # a later part may raise
        return self._joined(
            inputs,
            lambda key, part, of_part: part.apply_step_unless(
                skip, of_part, current[key], in_place=in_place
            ),
        )

    def _joined(
        self, inputs: StepInputs, step: Callable[[str, Updater, StepInputs], tuple[Tree, Tree]]
    ) -> tuple[Tree, Tree]:
        """Return the parameters and states of all parts after `step` of each."""
        params: dict[str, Any] = {}
        opt_state: dict[str, Any] = {}
        for key, part, of_part in self.split(inputs):
            new_params, opt_state[key] = of_part.restore(*step(key, part, of_part))
            params.update(new_params)
        return inputs.params_tree(list(map(params.get, inputs.names))), opt_state

    def split(self, inputs: StepInputs, members: dict[str, Members] | None = None) -> list[Part]:
        """Return the inputs of each part. `members` are those of the parts, if they are known."""
        opt_state = inputs.opt_state
        if not (isinstance(opt_state, dict) and opt_state.keys() == self._parts.keys()):
            has = list(opt_state) if isinstance(opt_state, dict) else type(opt_state).__name__
            raise ValueError(
                f"opt_state has the parts {has}, this optimizer has {list(self.optimizers)}. "
                "Likely cause: the state of one optimizer alone, or of another partition. Fix: "
                "`opt_state = optimizer.init(params)`, or what the last step returned."
            )
        lists = inputs.lists
        present = None if lists is None else lists.params
        members = members or self._members(inputs.names, inputs.params, present)
        leaves = () if inputs.dense_off_graph else (*inputs.params, *inputs.grads.likes)
        if any_dtensor(leaves):
            return [
                Part(key, part, _part_of_dtensors(inputs, members[key], part, opt_state[key]))
                for key, part in self._parts.items()
            ]
        slots = _slots(inputs) if lists is not None and lists.targets is not None else {}
        return [
            Part(key, part, _part(inputs, members[key], opt_state[key], slots.get(key)))
            for key, part in self._parts.items()
        ]

    def _members(
        self, names: Sequence[str], leaves: Leaves, present: TensorList | None
    ) -> dict[str, Members]:
        if present is None or not present.dense_off_graph:
            return self._labelled(names, leaves)
        key = self._cache_key, *names
        return present.cached(key, lambda: self._labelled(names, leaves))

    def _labelled(self, names: Sequence[str], leaves: Leaves) -> dict[str, Members]:
        _tree.check_names(names)
        indices_of: dict[str, list[int]] = {key: [] for key in self._parts}
        for index, (name, leaf) in enumerate(zip(names, leaves, strict=True)):
            if leaf is None:
                continue
            key = self.label(name, leaf)
            if not (isinstance(key, str) and key in indices_of):
                raise ValueError(
                    f"label gives {key!r} for {name}, {describe(leaf)}; the optimizers are "
                    f"{list(indices_of)}. Likely cause: a kind of parameter that label does not "
                    "cover. Fix: a last line that returns a default key, such as that of AdamW."
                )
            indices_of[key].append(index)
        for key, indices in indices_of.items():
            if not indices:
                raise ValueError(
                    f"no parameter has the label {key!r}; the names are: "
                    f"{_tree.join_names(list(names), 20)}. Fix: correct `label(name, param)`, or "
                    f"leave {key!r} out of the optimizers."
                )
        return {
            key: Members(tuple([names[index] for index in indices]), tuple(indices))
            for key, indices in indices_of.items()
        }


def _check(optimizers: Any, label: Any) -> None:
    if not isinstance(optimizers, Mapping) or not optimizers:
        raise TypeError(
            f"optimizers is {optimizers!r}; expected a non-empty dict of optimizers. Fix: "
            'partition({"muon": from_torch(torch.optim.Muon), "adamw": '
            "from_torch(torch.optim.AdamW)}, label)."
        )
    for key, each in optimizers.items():
        if not isinstance(key, str) or not_made(each, "init", "step"):
            raise TypeError(
                f"optimizers[{key!r}] is {each!r}; expected an optimizer, an object with `init` "
                'and `step`, under a string. Fix: {"adamw": from_torch(torch.optim.AdamW, '
                "lr=1e-3)}."
            )
    if not callable(label):
        raise TypeError(
            f"label is {label!r}; expected a function of a parameter's dotted name and the "
            'parameter. Fix: lambda name, param: "muon" if param.ndim == 2 else "adamw".'
        )


def _by_name(members: Members, leaves: Leaves) -> dict[str, Any]:
    return dict(zip(members.names, map(leaves.__getitem__, members.indices), strict=True))


def _slots(inputs: StepInputs) -> dict[str, range]:
    """Return the range of each part's slots in `inputs.targets`."""
    ranges, stop = {}, len(inputs.params)
    for key, state in inputs.opt_state.items():
        start = stop + 1  # after `applied`
        stop = start + sum(map(len, state.slots.values()))
        ranges[key] = range(start, stop)
        stop += len(scalars_of(state))
    return ranges


def _part(inputs: StepInputs, members: Members, opt_state: Tree, slots: range | None) -> StepInputs:
    """Return the inputs of one part. What is known of the whole step is known of it. `slots` is the
    range of its slots in `inputs.targets`.
    """
    names, indices = members.names, members.indices
    params, lists = list(map(inputs.params.__getitem__, indices)), None
    if inputs.lists is not None:
        targets = None
        if inputs.lists.targets is not None and slots is not None:
            targets = inputs.lists.targets.picked((*indices, *slots), (members, slots))
        lists = StepLists(inputs.lists.params.picked(indices, members), targets)
    return inputs_of_dict(
        dict(zip(names, params, strict=True)),
        _grads_of(inputs.grads, members),
        opt_state,
        dense_off_graph=inputs.dense_off_graph,
        lists=lists,
    )


def _grads_of(grads: Gradients, members: Members) -> Gradients:
    """Return the gradients of these parameters, or the empty ones if they are still to be made."""
    if not grads.likes:
        return grads
    if grads.dense_real:
        return grads.picked(members.indices, members)
    remaining = iter(grads.tensors)
    tensors = [None if like is None else next(remaining) for like in grads.likes]
    tensor_list = TensorList(
        [tensors[index] for index in members.indices if tensors[index] is not None]
    )
    likes = [grads.likes[index] for index in members.indices]
    return grads._replace(tensor_list=tensor_list, likes=likes)


def _part_of_dtensors(
    inputs: StepInputs, members: Members, optimizer: Updater, opt_state: Tree
) -> StepInputs:
    """Return the inputs of one part with DTensors, flattened for its own optimizer."""
    grads = None
    if inputs.grads.likes:
        grads = _by_name(members, inputs.grads.leaves)
    part = flatten_step(optimizer, _by_name(members, inputs.params), grads, opt_state)
    return part._replace(grads=inputs.grads.with_tensors_of(part.grads)._replace(owned=False))
