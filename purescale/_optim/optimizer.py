"""The protocol of an optimizer, and an optimizer over lists. Its steps are planned: what settings,
structure and metadata decide about them is decided once for arguments that are alike.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .._optim.opt_state import with_iteration_counted
from .._optim.optimizer_inputs import OptimizerInputs, make_optimizer_inputs
from .._optim.param_structure import ParamStructure
from .._torch.autocast import outside_autocast
from .._torch.tensor_list import ListMetadata, are_comparable
from .._torch.tracing import (
    CallContext,
    current_context,
    is_on_a_graph,
    under_derivative,
)
from .._tree import pytree
from .._tree.aliasing import copy_aliased
from .._tree.cache import TreeCache
from .._tree.gradients import Gradients
from .._tree.matching import check_parameters, grads_like_params, matching_leaves
from .._tree.pytree import FlatTree, Tree
from .._tree.scalars import protocol_violation
from .._tree.select import select_leaves


class Optimizer(Protocol):
    """The protocol of an optimizer: two pure methods. `purescale.testing.assert_optimizer` tests
    one. It may have attributes: `differentiable = True` if `.backward()` may go through its step,
    `elementwise = True` if elements update independently, so that it is given shards in place of
    DTensors (False: sharded ones are refused; by default DTensors come whole), `may_add_slots =
    True` if its first step adds to the state, and `wide_grads = True` if it wants half gradients in
    float32.
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


class CachedPlan(NamedTuple):
    """The decisions that hold for all steps over arguments that are alike: fields of
    `OptimizerInputs` and of `PlannedStep`.
    """

    param_structure: ParamStructure
    plan: Any
    leaves_metadata: ListMetadata  # of `params_and_state`
    all_writable: bool
    all_readable: bool


class PlannedStep(NamedTuple):
    """The inputs of a step, planned, and what is known of all arguments of its call."""

    inputs: OptimizerInputs
    flat_trees: list[FlatTree]  # the arguments: parameters, state, and others
    # Each leaf is plain, gapless, not empty, and requires no gradient: a step may write into it if
    # nothing else shares its memory.
    all_writable: bool = False
    all_readable: bool = False  # the host may read each leaf and its gradient; none has a history


class FlatOptimizer:
    """An optimizer over the lists of `OptimizerInputs`. A subclass has `init`, `compute_step` (or
    `step_or_skip`, if it can skip a step itself), and perhaps `agreed_settings`, `plan` and
    `evaluate_settings`; `as_flat_optimizer` makes one of any optimizer. A `train_step` plans the
    step at its start, by `find_planned_step` or `plan_step`, and runs it at its end, by
    `run_step`.
    """

    # True if `.backward()` may go through a step; otherwise tensors on a graph are refused.
    differentiable: bool = False
    # True if elements update independently, so that a shard can be stepped; otherwise shards are
    # refused. None if the optimizer takes the DTensors themselves.
    elementwise: bool | None = False
    # True if a step runs code of a user's. It may raise, so nothing is overwritten before it has
    # returned.
    runs_user_code: bool = False
    # True if the first step may add to the state. Old and new then cannot be chosen by a mask, so
    # the flag of a skip is read.
    may_add_slots: bool = False
    # True if half gradients are to be unscaled and clipped in float32.
    wide_grads: bool = False
    # True if its state is an `OptState` with slots like the parameters, or one around it, so that a
    # wrapper may make a step in pieces.
    can_step_in_pieces: bool = False
    # True if it lives for more than one call, so that a cache is of use.
    caches_plans: bool = True
    agreed_settings: Any  # what ranks compare of it, if it has this

    def init(self, params: Tree) -> Tree:
        """Return the state before the first step, as `Optimizer.init`."""
        raise NotImplementedError(f"{type(self).__name__} has no init")

    @outside_autocast()
    def step(self, params: Tree, grads: Tree, opt_state: Tree) -> tuple[Tree, Tree]:
        """Return parameters and state after one step, in fresh memory. A parameter whose gradient
        is None does not change, as in torch.optim.
        """
        planned, gradients = self.plan_step_by_hand(params, grads, opt_state)
        return self.run_step(planned.inputs, gradients)

    def grad_mode(self, context: CallContext) -> torch.set_grad_enabled:
        """Return a context manager inside of which a graph is recorded only if a derivative may go
        through the step.
        """
        records = torch.is_grad_enabled() and (context.traced or self.differentiable)
        return torch.set_grad_enabled(records)

    def plan(self, inputs: OptimizerInputs) -> Any:
        """Return what settings, structure and metadata decide about a step; by default nothing. A
        plan is the place to refuse, before any work, parameters and a state that do not fit.
        """

    def evaluate_settings(self, opt_state: Tree) -> Any:
        """Return the settings of the next step that may differ from those of the last one.
        Schedules run here, before any work.
        """

    # ---- a step, planned

    @functools.cached_property
    def cache(self) -> TreeCache:
        """Each `CachedPlan` of this optimizer."""
        return TreeCache()

    def with_plan_and_settings(self, inputs: OptimizerInputs) -> OptimizerInputs:
        """Return the inputs with the plan and the settings of their step."""
        plan, step_settings = self.plan(inputs), self.evaluate_settings(inputs.opt_state)
        return inputs._replace(plan=plan, step_settings=step_settings)

    def find_planned_step(
        self, context: CallContext, trees: tuple[Tree, ...]
    ) -> PlannedStep | None:
        """Return the planned step over trees: parameters, the state of the optimizer, and other
        arguments. None if no plan for trees like these is cached.
        """
        if not (self.caches_plans and context.reuses_plans):  # Dynamo cannot make the cache
            return None
        if (hit := self.cache.find_trees(context, trees)) is None:
            return None
        flat_trees, cached = hit
        flat_params, flat_opt_state = flat_trees[:2]
        inputs = OptimizerInputs.of_dense_without_history(
            context,
            cached.param_structure,
            flat_params,
            flat_opt_state,
            metadata=cached.leaves_metadata,
            plan=cached.plan,
            step_settings=self.evaluate_settings(flat_opt_state.tree),
        )
        return PlannedStep(inputs, flat_trees, cached.all_writable, cached.all_readable)

    def plan_step(self, flat_trees: list[FlatTree], inputs: OptimizerInputs) -> PlannedStep:
        """Return the planned step over checked trees: `find_planned_step` finds the plan from now
        on. `plan` refuses what does not fit.
        """
        inputs, context = self.with_plan_and_settings(inputs), inputs.context
        lists = [tree.tensor_list for tree in flat_trees]
        if not (context.reuses_plans and all([x.dense_without_history for x in lists])):
            return PlannedStep(inputs, flat_trees)
        writable = all([x.are_gapless and not (x.any_empty or x.any_requires_grad) for x in lists])
        readable = context.host_can_read_cpu and not self.differentiable
        readable = readable and all([x.are_on_cpu and are_comparable(x.tensors) for x in lists])
        if self.caches_plans:
            cached = CachedPlan(
                param_structure=inputs.param_structure,
                plan=inputs.plan,
                leaves_metadata=ListMetadata(),
                all_writable=writable,
                all_readable=readable,
            )
            self.cache.add_trees(context, flat_trees, cached)
        return PlannedStep(inputs, flat_trees, writable, readable)

    def plan_step_by_hand(
        self, params: Tree, grads: Tree, opt_state: Tree, *others: Tree
    ) -> tuple[PlannedStep, Gradients]:
        """Return the planned step over these and other trees, and its gradients. Refuse, naming the
        leaf, gradients that do not fit `params`, and a state that belongs to others.
        """
        context = current_context()
        planned = self.find_planned_step(context, (params, opt_state, grads, *others))
        if planned is not None:
            return planned, planned.inputs.make_gradients(planned.flat_trees[2])
        flat_trees, inputs, gradients = self.flatten_by_hand(context, params, grads, opt_state)
        return self.plan_step([*flat_trees, *map(FlatTree.of, others)], inputs), gradients

    def flatten_by_hand(
        self, context: CallContext, params: Tree, grads: Tree, opt_state: Tree
    ) -> tuple[list[FlatTree], OptimizerInputs, Gradients]:
        """Return parameters, state and gradients, flat and checked, the inputs of a step over them,
        without a plan, and its gradients. All ranks reduce partial DTensors here, before a plan may
        be refused on one of them.
        """
        flat_params, flat_opt_state = FlatTree.of(params), FlatTree.of(opt_state)
        check_parameters(flat_params)
        flat_grads = grads_like_params(flat_params, grads)
        inputs = make_optimizer_inputs(self, context, flat_params, flat_opt_state, flat_grads)
        flat_trees = [flat_params, flat_opt_state, flat_grads]
        return flat_trees, inputs, inputs.make_gradients(flat_grads)

    # ---- a step, run

    def run_step(
        self,
        inputs: OptimizerInputs,
        grads: Gradients,
        skip: Tensor | None = None,
        *,
        in_place: bool = False,
    ) -> tuple[Tree, Tree]:
        """Return `step_or_skip` in the trees of the arguments. Where `skip` may be read (or must,
        because the first step may add to the state), a skipped step returns the old state at once.
        """
        # What a skipped, differentiable step does not use has a derivative of 0, so it is made.
        if skip is not None and (
            self.may_add_slots
            or (not self.differentiable and inputs.context.host_can_decide([skip]))
        ):
            if skip:
                with self.grad_mode(inputs.context):
                    old = inputs.params, with_iteration_counted(inputs.opt_state, in_place=in_place)
                    leaves, structure = pytree.flatten(old)
                    kept = select_leaves(True, leaves, leaves, in_place=in_place)
                return inputs.as_trees(*structure.unflatten(kept))
            skip = None
        return inputs.as_trees(*self.step_or_skip(inputs, grads, skip, in_place=in_place))

    def step_or_skip(
        self,
        inputs: OptimizerInputs,
        grads: Gradients,
        skip: Tensor | None = None,
        *,
        in_place: bool = False,
    ) -> tuple[list[Tensor], Tree]:
        """Equal to `select(skip, (old params, with_iteration_counted(old state)),
        self.compute_step(inputs, grads.apply_pending(wide=self.wide_grads)))`, to rounding where a
        kernel divides by scale and clip factor at once. `skip` is None where the host knows that
        the step is applied, and if `may_add_slots`. With `in_place`, the caller guarantees that
        nobody else holds the tensors of `inputs`: they may be overwritten. Classes of torch
        (`KernelOrFormulaOptimizer`), a partition and wrappers have their own.
        """
        with self.grad_mode(inputs.context):
            new = self.compute_step(inputs, self.unscale_and_clip(inputs, grads, skip))
            if self.may_add_slots:
                return new
            old = inputs.params, with_iteration_counted(inputs.opt_state, in_place=in_place)
            before, after, structure = matching_leaves(old, new, "old", "new")
            if skip is None and not in_place:
                return new
            flag = False if skip is None else skip
            return structure.unflatten(select_leaves(flag, before, after, in_place=in_place))

    def unscale_and_clip(
        self, inputs: OptimizerInputs, grads: Gradients, skip: Tensor | None
    ) -> Gradients:
        """Return unscaled and clipped gradients. They are zeros in a skipped step that is
        differentiated, because `where` sends a derivative of 0 into what it does not choose, and
        0 * inf is NaN.
        """
        if skip is not None and (
            self.differentiable
            or under_derivative()
            or (inputs.context.traced and is_on_a_graph([*inputs.params, *grads.tensors]))
        ):
            grads = grads.zeroed(skip)
        return grads.apply_pending(wide=self.wide_grads)

    def compute_step(self, inputs: OptimizerInputs, grads: Gradients) -> tuple[list[Tensor], Tree]:
        """Return parameters and state after the step with unscaled gradients, in fresh memory.

        `inputs.params` pair with `inputs.grads_of_params(grads)`, and with the leaves that
        `inputs.param_structure.flatten_up_to` returns of a state like the parameters. float16
        gradients of a step are float32.
        """
        raise NotImplementedError(f"{type(self).__name__} has no compute_step")


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
    """A flat optimizer for one with `init` and `step` alone, which alone checks its arguments."""

    runs_user_code = True
    caches_plans = False  # it is made in each call

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = self.agreed_settings = optimizer
        self.elementwise = getattr(optimizer, "elementwise", None)
        for name in ("differentiable", "may_add_slots", "wide_grads"):
            setattr(self, name, getattr(optimizer, name, False))

    def __repr__(self) -> str:
        return repr(self.optimizer)

    def compute_step(self, inputs: OptimizerInputs, grads: Gradients) -> tuple[list[Tensor], Tree]:
        """Return what `step` returns, checked, in memory apart from the arguments."""
        old = inputs.local_trees
        trees = old[0], inputs.param_structure.unflatten(inputs.grads_of_params(grads)), old[1]
        stepped = self.optimizer.step(*trees)
        before, after = (old[0], stepped[0]) if self.may_add_slots else (old, stepped)
        matching_leaves(before, after, "old", "new")
        params, opt_state = copy_aliased(stepped, trees)
        return inputs.param_structure.flatten_up_to(params), opt_state
