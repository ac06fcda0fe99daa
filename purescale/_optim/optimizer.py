"""The protocol of an optimizer, the methods that a step calls beyond `init` and `step`, and how a
step is skipped.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch
from torch import Tensor

from .._optim.opt_state import after_skip
from .._optim.planned import PlannedStep, plan_step_with_grads
from .._optim.step_inputs import StepInputs
from .._torch.autocast import outside_autocast
from .._torch.tracing import is_on_a_graph, traced, under_derivative
from .._tree import pytree
from .._tree.aliasing import copy_aliased
from .._tree.gradients import Gradients
from .._tree.matching import matching_leaves
from .._tree.plans import Plans
from .._tree.pytree import Tree
from .._tree.scalars import protocol_violation
from .._tree.select import select_masked


class Optimizer(Protocol):
    """The protocol of an optimizer: two pure methods. `purescale.testing.assert_optimizer` tests
    one. It may have attributes: `differentiable = True` if `.backward()` may go through its step,
    `elementwise = True` if elements update independently, so that shards of DTensors can be
    stepped, `may_add_slots = True` if its first step adds to the state, and `wide_grads = True` if
    it wants half gradients in float32.
    """

    def init(self, params: Tree) -> Tree:
        """Return the state before the first step: any tree of tensors, in fresh memory. Steps
        change values only, unless the first one may add to it. A parameter may be None.
        """

    def step(self, params: Tree, grads: Tree, opt_state: Tree) -> tuple[Tree, Tree]:
        """Return parameters and state after one step, in fresh memory, with unchanged shapes and
        dtypes.

        `grads` has the structure of `params`. A parameter whose gradient is None takes no part in
        this step: it comes back with the same bits and its state does not change, as in
        torch.optim. A gradient of zeros is different, because decay and momentum still act. What
        is unscaled of float16 parameters is float32. Values may be inf or NaN and must not be
        read: `maybe_step` drops such a result.
        """


class FlatOptimizer:
    """An optimizer over the lists of `StepInputs`. A step calls `plan` and `hyperparams` at its
    start (`planned.py`), and `step_planned` at its end. `as_flat_optimizer` makes one of any
    optimizer.
    """

    # True if `.backward()` may go through a step; otherwise tensors on a graph are refused.
    differentiable: bool = False
    # True if elements update independently, so that a shard can be stepped. None if that is
    # unknown: the optimizer then gets the DTensors themselves.
    elementwise: bool | None = None
    # True if a step runs code of a user's. It may raise, so nothing is overwritten before it has
    # returned.
    runs_user_code: bool = False
    # True if the first step may add to the state. Old and new then cannot be chosen by a mask, so
    # the flag of a skip is read.
    may_add_slots: bool = False
    # True if half gradients are to be unscaled and clipped in float32.
    wide_grads: bool = False
    # True if it lives for more than one call, so that a plan can be found.
    keeps_plans: bool = True
    must_agree: Any  # what ranks compare of it

    def init(self, params: Tree) -> Tree:
        """Return the state before the first step, as `Optimizer.init`."""
        raise NotImplementedError(f"{type(self).__name__} has no init")

    @outside_autocast()
    def step(self, params: Tree, grads: Tree, opt_state: Tree) -> tuple[Tree, Tree]:
        """Return parameters and state after one step, in fresh memory. A parameter whose gradient
        is None does not change, as in torch.optim.
        """
        return self.step_planned(*plan_step_with_grads(self, params, grads, opt_state))

    def step_planned(
        self,
        planned: PlannedStep,
        grads: Gradients,
        skip: Tensor | None = None,
        *,
        in_place: bool = False,
    ) -> tuple[Tree, Tree]:
        """Return the old parameters and state if `skip`, else those after the step with `grads`, in
        the trees of the arguments. `skip` is None where the host knows that the step is applied.
        """
        inputs = planned.inputs
        return inputs.as_trees(*self.step_unless(inputs, grads, skip, in_place=in_place))

    def grad_mode(self) -> torch.set_grad_enabled:
        """Return a context that records a graph only if a derivative may go through the step."""
        return torch.set_grad_enabled(torch.is_grad_enabled() and (traced() or self.differentiable))

    @functools.cached_property
    def plans(self) -> Plans[Any]:
        """The plans of steps with this optimizer."""
        return Plans()

    def plan(self, inputs: StepInputs) -> Any:
        """Return what settings, structure and metadata decide about a step; by default nothing.
        Refuse parameters and a state that do not belong together, before any work.
        """

    def hyperparams(self, opt_state: Tree) -> Any:
        """Return the settings of the next step that may differ from those of the last one.
        Schedules run here, before any work.
        """

    def step_unless(
        self,
        inputs: StepInputs,
        grads: Gradients,
        skip: Tensor | None = None,
        *,
        in_place: bool = False,
    ) -> tuple[list[Tensor], Tree]:
        """Equal to `select(skip, (old params, after_skip(old state)), self.apply_step(inputs,
        grads.apply_pending(wide=self.wide_grads)))`. `skip` is None where the host knows that the
        step is applied. With `in_place`, the caller guarantees that nobody else holds the tensors
        of `inputs`: they are overwritten.
        """
        if skip is not None and self.may_add_slots:
            if bool(skip):
                return pytree.clone((inputs.params, after_skip(inputs.opt_state, in_place=False)))
            skip = None
        if skip is not None and (
            self.differentiable
            or under_derivative()
            or (traced() and is_on_a_graph([*inputs.params, *grads.tensors]))
        ):
            # `where` sends a derivative of 0 into what it does not choose: 0 * inf is NaN.
            grads = grads.zeroed(skip)
        with self.grad_mode():
            new = self.apply_step(inputs, grads.apply_pending(wide=self.wide_grads))
            if self.may_add_slots:
                return new
            old = inputs.params, after_skip(inputs.opt_state, in_place=in_place)
            before, after, structure = matching_leaves(old, new, "old", "new")
            if skip is None and not in_place:
                return new
            flag = False if skip is None else skip
            return structure.unflatten(select_masked(flag, before, after, in_place=in_place))

    def apply_step(self, inputs: StepInputs, grads: Gradients) -> tuple[list[Tensor], Tree]:
        """Return parameters and state after the step with unscaled gradients, in fresh memory."""
        raise NotImplementedError(f"{type(self).__name__} has no apply_step")


def check_optimizer(optimizer: Any, name: str = "optimizer") -> None:
    """Refuse an object that is not an optimizer."""
    if what := protocol_violation(optimizer, "init", "step"):
        raise TypeError(
            f"{name} is {what}; expected an object with `init` and `step`. Fix: "
            "from_torch(torch.optim.AdamW, lr=1e-3), or from_transformation(tx)."
        )


def as_flat_optimizer(optimizer: Any) -> FlatOptimizer:
    """Return the optimizer if it is a flat optimizer, else an `AdaptedOptimizer` of it."""
    if isinstance(optimizer, FlatOptimizer):
        return optimizer
    check_optimizer(optimizer)
    return AdaptedOptimizer(optimizer)


class AdaptedOptimizer(FlatOptimizer):
    """A flat optimizer for an optimizer with `step` alone, which makes its own checks."""

    runs_user_code = True
    keeps_plans = False  # it is made in each call

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = self.must_agree = optimizer
        for name in ("differentiable", "elementwise", "may_add_slots", "wide_grads"):
            setattr(self, name, getattr(optimizer, name, getattr(FlatOptimizer, name)))

    def __repr__(self) -> str:
        return repr(self.optimizer)

    def init(self, params: Tree) -> Tree:
        """Return the state of the optimizer."""
        return self.optimizer.init(params)

    def apply_step(self, inputs: StepInputs, grads: Gradients) -> tuple[list[Tensor], Tree]:
        """Return what `step` returns, checked, in memory apart from the arguments."""
        old = inputs.trees
        trees = old[0], inputs.layout.unflatten(inputs.grads_like_params(grads)), old[1]
        stepped = self.optimizer.step(*trees)
        before, after = (old[0], stepped[0]) if self.may_add_slots else (old, stepped)
        matching_leaves(before, after, "old", "new")
        params, opt_state = copy_aliased(stepped, trees)
        return inputs.layout.flatten_up_to(params), opt_state
