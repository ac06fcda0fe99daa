"""The methods of an optimizer that a step calls beyond `init` and `step`, and how it is skipped."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._optim.opt_state import after_skip
from .._optim.protocol import Optimizer
from .._optim.step_inputs import StepInputs, flatten_step
from .._torch.autocast import outside_autocast
from .._torch.tensor_list import Cache
from .._torch.tracing import can_plan, end_graph, is_on_a_graph, traced, under_derivative
from .._tree import tree as _tree
from .._tree.gradients import Gradients
from .._tree.leaves import are_real
from .._tree.plans import Plans, add_plan, find_plan
from .._tree.scalars import not_made
from .._tree.states import select_masked
from .._tree.tree import FlatTree, Tree


class Updater:
    """An optimizer as a step calls it, over the lists of `StepInputs`: `plan`, `current_settings`,
    then `apply_step_unless`. `as_updater` makes one of any optimizer.
    """

    # True if `.backward()` may go through a step; otherwise tensors on a graph are refused.
    differentiable: bool = False
    # True if elements update independently, so that a shard can be stepped. None if that is
    # unknown: the optimizer then gets the DTensors themselves.
    elementwise: bool | None = None
    # True if a step calls a `step` of a user's.
    calls_step: bool = False
    # True if it calls a `step` or a formula of a user's, before which nothing is overwritten.
    may_raise: bool = False
    # True if the first step may add to the state. Old and new then cannot be chosen by a mask, so
    # the flag of a skip is read.
    may_add_slots: bool = False
    # True if half gradients are to be unscaled and clipped in float32.
    wide_grads: bool = False
    # True if it lives for more than one call, so that a plan can be found.
    keeps_plans: bool = True
    compared: Any  # what ranks compare of it

    @outside_autocast()
    def step(self, params: Tree, grads: Tree, opt_state: Tree) -> tuple[Tree, Tree]:
        """Return parameters and state after one step, in fresh memory. A parameter whose gradient
        is None does not change, as in torch.optim.
        """
        inputs, plan = planned_step(self, params, grads, opt_state)
        current = self.current_settings(inputs.opt_state)
        return inputs.restore(*self.apply_step(inputs, plan, current))

    def grad_mode(self) -> torch.set_grad_enabled:
        """Return a context that records a graph only if a derivative may go through the step."""
        return torch.set_grad_enabled(torch.is_grad_enabled() and (traced() or self.differentiable))

    @functools.cached_property
    def plans(self) -> Plans[Any]:
        """The plans of steps with this optimizer."""
        return Plans()

    def plan(self, inputs: StepInputs) -> Any:
        """Return what settings, structure and metadata decide about a step. Refuse parameters and a
        state that do not belong together, before any work.
        """

    def current_settings(self, opt_state: Tree) -> Any:
        """Return the settings of the next step. Schedules run here, before anything is written."""

    def apply_step(self, inputs: StepInputs, plan: Any, current: Any) -> tuple[list[Tensor], Tree]:
        """Return parameters and state after the step with these settings, in fresh memory. The
        gradients may still be scaled.
        """
        raise NotImplementedError

    def apply_step_unless(
        self,
        skip: Tensor | bool,
        inputs: StepInputs,
        plan: Any,
        current: Any,
        *,
        in_place: bool = False,
    ) -> tuple[list[Tensor], Tree]:
        """Equal to `select(skip, (old params, old state), self.apply_step(inputs, plan, current))`.
        With `in_place`, the caller guarantees that nobody else holds the tensors of `inputs`: they
        are overwritten. `skip` is False where the host knows it.
        """
        old = inputs.params, inputs.opt_state
        skip = _tree.flag(skip, like=next(iter(inputs.params), None))
        if self.may_add_slots:
            if not bool(skip):
                return self.apply_step(inputs, plan, current)
            return _tree.clone((old[0], after_skip(old[1], in_place=False)))
        if (
            self.differentiable
            or under_derivative()
            or (traced() and is_on_a_graph([*inputs.params, *inputs.grads.tensors]))
        ):
            # `where` sends a derivative of 0 into what it does not choose: 0 * inf is NaN.
            inputs = inputs._replace(grads=inputs.grads.zeroed(skip))
        new = self.apply_step(inputs, plan, current)
        old = old[0], after_skip(old[1], in_place=in_place)
        with self.grad_mode():
            before, after, structure = _tree.matching_leaves(old, new, "old", "new")
            return structure.unflatten(select_masked(skip, before, after, in_place=in_place))


class Planned(NamedTuple):
    """The decisions about steps of an optimizer whose arguments are alike."""

    names: list[str]  # of the parameters
    update: Any  # what the optimizer planned
    replaced: Cache  # of all that a step replaces
    # each leaf fills a range of memory and requires no gradient: it may be written into if nothing
    # else shares its memory
    are_writable: bool
    on_cpu: bool  # each leaf

    def inputs(self, params: FlatTree, grads: Gradients, opt_state: FlatTree) -> StepInputs:
        """Return the inputs of a step."""
        return StepInputs.of_dense(
            self.names, params, grads, opt_state, self.replaced, are_writable=self.are_writable
        )


def known_plan(updater: Updater, trees: Sequence[Tree]) -> tuple[list[FlatTree], Planned] | None:
    """Return the trees, flat, and what was planned for trees like them; None if nothing was."""
    planned = find_plan(updater.plans, trees) if updater.keeps_plans and can_plan() else None
    if planned and not updater.differentiable:
        end_graph()
    return planned


def can_keep_plan(updater: Updater, inputs: StepInputs) -> bool:
    """Return True if a step like this one may be planned: over real parameters, dense like all
    else, because what is refused of others depends on settings of the step.
    """
    is_dense = inputs.replaced is not None and are_real(inputs.param_list.dtypes)
    return updater.keeps_plans and is_dense


def keep_plan(updater: Updater, trees: Sequence[FlatTree], inputs: StepInputs, update: Any) -> None:
    """Keep the plan of a step for trees like these."""
    lists = [tree.tensor_list for tree in trees]
    if not all([some.dense_off_graph for some in lists]):
        return
    are_writable = all(
        [s.are_gapless and 0 not in s.elements and not s.any_requires_grad for s in lists]
    )
    on_cpu = all([some.devices <= {torch.device("cpu")} for some in lists])
    planned = Planned(inputs.names, update, Cache(), are_writable, on_cpu)
    add_plan(updater.plans, trees, planned)


def planned_step(
    updater: Updater, params: Tree, grads: Tree, opt_state: Tree
) -> tuple[StepInputs, Any]:
    """Return the checked inputs of a step, and its plan. Refuse, naming the leaf, gradients that do
    not fit `params`, and a state that belongs to others.
    """
    trees = params, grads, opt_state
    if known := known_plan(updater, trees):
        (of_params, of_grads, of_state), planned = known
        gradients = Gradients(of_grads.tensor_list, of_grads.leaves, True)
        return planned.inputs(of_params, gradients, of_state), planned.update
    inputs = flatten_step(updater, *trees)
    update = updater.plan(inputs)
    if can_keep_plan(updater, inputs):
        flat = list(map(_tree.flatten_once, trees))
        if flat[0].structure == flat[1].structure:  # the dicts have one order
            keep_plan(updater, flat, inputs, update)
    return inputs, update


def check_optimizer(optimizer: Any, name: str = "optimizer") -> None:
    """Refuse an object that is not an optimizer."""
    if what := not_made(optimizer, "init", "step"):
        raise TypeError(
            f"{name} is {what}; expected an object with `init` and `step`. Fix: "
            "from_torch(torch.optim.AdamW, lr=1e-3), or from_transformation(tx)."
        )


def as_updater(optimizer: Any) -> Updater:
    """Return the optimizer if it is an updater, else a `CalledOptimizer` of it."""
    if isinstance(optimizer, Updater):
        return optimizer
    check_optimizer(optimizer)
    return CalledOptimizer(optimizer)


class CalledOptimizer(Updater):
    """An updater for an optimizer with `step` alone, which makes its own checks."""

    calls_step = may_raise = True
    keeps_plans = False  # it is made in each call

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = self.compared = optimizer
        for name in ("differentiable", "elementwise", "may_add_slots", "wide_grads"):
            setattr(self, name, getattr(optimizer, name, getattr(Updater, name)))

    def __repr__(self) -> str:
        return repr(self.optimizer)

    def apply_step(self, inputs: StepInputs, plan: Any, current: Any) -> tuple[list[Tensor], Tree]:
        """Return what `step` returns, checked, in memory apart from the arguments."""
        inputs = inputs.unscaled(wide=self.wide_grads)
        old = inputs.trees
        trees = old[0], inputs.tree(inputs.local_grads), old[1]
        with self.grad_mode():
            stepped = self.optimizer.step(*trees)
            before, after = (old[0], stepped[0]) if self.may_add_slots else (old, stepped)
            _tree.matching_leaves(before, after, "old", "new")
            params, opt_state = _tree.copy_aliased(stepped, trees)
            return inputs.leaves(params), opt_state
