"""Several optimizers, one for each kind of parameter, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from .._optim.opt_state import are_parts, scalars_of, tensors_of
from .._optim.protocol import Optimizer
from .._optim.step_inputs import StepInputs, flatten_step, named_params
from .._optim.updater import Updater, as_updater, check_optimizer
from .._torch.dtensor import any_dtensor
from .._torch.tensor_list import TensorList
from .._tree import tree as _tree
from .._tree.leaves import describe
from .._tree.states import write_over
from .._tree.tree import Tree

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


class PartitionOptimizer(Updater):
    """Several optimizers, each for its part of the parameters; made by `partition`."""

    # Each part gets DTensors as they are, because it decides itself whether to take shards.
    elementwise: bool | None = None

    def __init__(self, optimizers: Mapping[str, Optimizer], label: Label) -> None:
        _check(optimizers, label)
        self.optimizers, self.label = dict(optimizers), label
        self.parts = {key: as_updater(each) for key, each in self.optimizers.items()}
        self.calls_step = any(part.calls_step for part in self.parts.values())
        self.may_raise = any(part.may_raise for part in self.parts.values())
        self.may_add_slots = any(part.may_add_slots for part in self.parts.values())
        self.wide_grads = any(part.wide_grads for part in self.parts.values())
        self._cache_key = object()  # keeps nothing else alive
        # A part that is not differentiable would detach what is on a graph.
        self.differentiable = all(part.differentiable for part in self.parts.values())
        self.compared = self.optimizers, label

    def __repr__(self) -> str:
        return f"partition({self.optimizers!r}, {self.label!r})"

    def init(self, params: Tree) -> dict[str, Any]:
        """Return the states of all optimizers by key, each for its part."""
        named = named_params(params)
        names, leaves = list(named), list(named.values())
        return {
            key: self.optimizers[key].init({names[index]: leaves[index] for index in members})
            for key, members in self._members(named).items()
        }

    def check(self, inputs: StepInputs) -> None:
        """Refuse a state that does not belong to these parts."""
        for key, part in self.split(inputs).items():
            self.parts[key].check(part)

    def current_settings(self, opt_state: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of each part, by key."""
        return {key: part.current_settings(opt_state[key]) for key, part in self.parts.items()}

    def apply_step(self, inputs: StepInputs, current: dict[str, Any]) -> tuple[Tree, Tree]:
        """Return parameters and state after a step of each part, in fresh memory."""
        parts = self.split(inputs)
        stepped = {
            key: self.parts[key].apply_step(part, current[key]) for key, part in parts.items()
        }
        return self._joined(inputs, parts, stepped)

    def apply_step_unless(
        self, skip: Tensor, inputs: StepInputs, current: dict[str, Any], *, in_place: bool = False
    ) -> tuple[Tree, Tree]:
        """Return parameters and state after a step of each part, skipped or not."""
        parts, stepped = self.split(inputs), {}
        # Those that may raise come first, into fresh memory: nothing is overwritten then.
        for key, part in sorted(self.parts.items(), key=lambda item: not item[1].may_raise):
            stepped[key] = part.apply_step_unless(
                skip, parts[key], current[key], in_place=in_place and not part.may_raise
            )
        for key, part in self.parts.items():
            if in_place and part.may_raise and not part.may_add_slots:
                stepped[key] = write_over(parts[key].trees, stepped[key])
        return self._joined(inputs, parts, stepped)

    def _joined(
        self,
        inputs: StepInputs,
        parts: dict[str, StepInputs],
        stepped: Mapping[str, tuple[Tree, Tree]],
    ) -> tuple[Tree, Tree]:
        """Return the parameters and the state of all parts."""
        params: dict[str, Any] = {}
        opt_state: dict[str, Any] = {}
        for key, part in parts.items():
            new_params, opt_state[key] = part.restore(*stepped[key])
            params.update(new_params)
        return inputs.params_tree(params), opt_state

    def split(self, inputs: StepInputs) -> dict[str, StepInputs]:
        """Return the inputs of each part by key. What is known of the whole step is known of it."""
        opt_state, targets = inputs.opt_state, inputs.target_list
        if not (isinstance(opt_state, dict) and opt_state.keys() == self.parts.keys()):
            has = list(opt_state) if isinstance(opt_state, dict) else type(opt_state).__name__
            raise ValueError(
                f"opt_state has the parts {has}, this optimizer has {list(self.optimizers)}. "
                "Likely cause: the state of one optimizer alone, or of another partition. Fix: "
                "`opt_state = optimizer.init(params)`, or what the last step returned."
            )
        if targets is None:
            members = self._members(inputs.params)
        else:
            key = self._cache_key, *inputs.params
            members = inputs.param_list.cached(key, lambda: self._members(inputs.params))
        if targets is None and any_dtensor([*inputs.params.values(), *inputs.grads.likes]):
            return {
                key: _part_of_dtensors(inputs, members[key], part, opt_state[key])
                for key, part in self.parts.items()
            }
        slots = _slot_ranges(inputs) if targets is not None and are_parts(opt_state) else {}
        return {
            key: _part(
                inputs,
                members[key],
                opt_state[key],
                None if part.calls_step else slots.get(key),  # whose slots are by parameter
            )
            for key, part in self.parts.items()
        }

    def _members(self, params: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
        """Return the indices of the parameters of each part."""
        indices_of: dict[str, list[int]] = {key: [] for key in self.parts}
        for index, (name, param) in enumerate(params.items()):
            key = self.label(name, param)
            if not (isinstance(key, str) and key in indices_of):
                raise ValueError(
                    f"label gives {key!r} for {name}, {describe(param)}; the optimizers are "
                    f"{list(indices_of)}. Likely cause: a kind of parameter that label does not "
                    "cover. Fix: a last line that returns a default key, such as that of AdamW."
                )
            indices_of[key].append(index)
        for key, indices in indices_of.items():
            if not indices:
                raise ValueError(
                    f"no parameter has the label {key!r}; the names are: "
                    f"{_tree.join_names(list(params), 20)}. Fix: correct `label(name, param)`, or "
                    f"leave {key!r} out of the optimizers."
                )
        return {key: tuple(indices) for key, indices in indices_of.items()}


def _check(optimizers: Any, label: Any) -> None:
    if not isinstance(optimizers, Mapping) or not optimizers:
        raise TypeError(
            f"optimizers is {optimizers!r}; expected a non-empty dict of optimizers. Fix: "
            'partition({"muon": from_torch(torch.optim.Muon), "adamw": '
            "from_torch(torch.optim.AdamW)}, label)."
        )
    for key, each in optimizers.items():
        check_optimizer(each, f"optimizers[{key!r}]")
        if not isinstance(key, str):
            raise TypeError(
                f"optimizers has the key {key!r}; expected strings, which label returns. Fix: "
                '{"adamw": from_torch(torch.optim.AdamW, lr=1e-3)}.'
            )
    if not callable(label):
        raise TypeError(
            f"label is {label!r}; expected a function of a parameter's dotted name and the "
            'parameter. Fix: lambda name, param: "muon" if param.ndim == 2 else "adamw".'
        )


def _slot_ranges(inputs: StepInputs) -> dict[str, range]:
    """Return the range of each part's slots and counts in `inputs.target_list`."""
    ranges, stop = {}, len(inputs.params)
    for key, state in inputs.opt_state.items():
        start, stop = stop + 1, stop + len(tensors_of(state))  # after `applied`
        ranges[key] = range(start, stop - len(scalars_of(state)))
    return ranges


def _part(
    inputs: StepInputs, members: tuple[int, ...], opt_state: Tree, slots: range | None
) -> StepInputs:
    """Return the inputs of one part. `slots` is the range of its slots in `inputs.target_list`."""
    names = list(map(list(inputs.params).__getitem__, members))
    param_list, grads = inputs.param_list.picked(members), inputs.grads
    if grads.dense_real and grads.likes:
        grads = grads.picked(members)
    else:
        tensors = dict(zip(inputs.grad_names, grads.tensors, strict=True))
        tensor_list = TensorList([tensors[name] for name in names if name in tensors])
        likes = dict(zip(inputs.names, grads.likes, strict=False))  # none if still to be made
        of_part = [likes[name] for name in names if name in likes]
        grads = grads._replace(tensor_list=tensor_list, likes=of_part)
    params = dict(zip(names, param_list.tensors, strict=True))
    part = StepInputs.of_dict(params, grads, opt_state, param_list)
    if slots is None:
        return part
    targets = inputs.target_list.picked((*members, *slots))  # type: ignore[union-attr]
    return part.with_targets(targets)


def _part_of_dtensors(
    inputs: StepInputs, members: tuple[int, ...], optimizer: Updater, opt_state: Tree
) -> StepInputs:
    """Return the inputs of one part with DTensors, flattened for its own optimizer."""
    part = _part(inputs, members, opt_state, None)
    part = flatten_step(optimizer, part.params, part.params_tree(part.local_grads), opt_state)
    return part._replace(grads=inputs.grads.with_tensors_of(part.grads)._replace(owned=False))
