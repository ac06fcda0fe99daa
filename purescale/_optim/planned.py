"""The steps of an optimizer, planned: what settings, structure and metadata decide about them is
decided once for arguments that are alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from .._optim.param_layout import ParamLayout
from .._optim.step_inputs import StepInputs, StepTraits, flatten_step
from .._torch.tensor_list import ListMetadata, are_comparable
from .._torch.tracing import EagerMode, current_eager_mode
from .._tree import pytree
from .._tree.gradients import Gradients
from .._tree.leaves import are_real_floating
from .._tree.plans import Plans, add_plan, find_plan
from .._tree.pytree import FlatTree, Leaves, Tree


class PlansSteps(StepTraits, Protocol):
    """The methods of `FlatOptimizer` by which its steps are planned."""

    keeps_plans: bool

    @property
    def plans(self) -> Plans[Any]: ...

    def plan(self, inputs: StepInputs) -> Any: ...

    def hyperparams(self, opt_state: Tree) -> Any: ...


class StepPlan(NamedTuple):
    """The decisions about the steps of an optimizer over arguments that are alike."""

    layout: ParamLayout
    optimizer_plan: Any  # what `FlatOptimizer.plan` returned
    leaves_metadata: ListMetadata  # of `StepInputs.dense_leaves`
    # Each leaf is plain, gapless, not empty, and requires no gradient: a step may write into it if
    # nothing else shares its memory.
    all_writable: bool
    all_readable: bool  # the host may read each leaf and its gradient, which are on no graph


class PlannedStep(NamedTuple):
    """The arguments of a step, flat, and its plan."""

    params: FlatTree
    opt_state: FlatTree
    others: list[FlatTree]  # the other arguments of the call, in its order
    leaves: Leaves  # of all these
    inputs: StepInputs
    plan: StepPlan
    eager_mode: EagerMode | None


def find_step(
    optimizer: PlansSteps, eager_mode: EagerMode | None, trees: tuple[Tree, ...]
) -> PlannedStep | None:
    """Return a step over `trees`: parameters, the state of the optimizer, and others. None if trees
    like these were not planned before.
    """
    if eager_mode is None or not optimizer.keeps_plans:
        return None
    match = find_plan(optimizer.plans, eager_mode, trees)
    if match is None:
        return None
    (params, opt_state, *others), leaves, plan = match
    inputs = StepInputs.of_dense(
        plan.layout,
        params,
        opt_state,
        plan.leaves_metadata,
        optimizer_plan=plan.optimizer_plan,
        hyperparams=optimizer.hyperparams(opt_state.tree),
    )
    return PlannedStep(params, opt_state, others, leaves, inputs, plan, eager_mode)


def plan_step(
    optimizer: PlansSteps,
    eager_mode: EagerMode | None,
    trees: list[FlatTree],
    inputs: StepInputs,
    *,
    keep: bool = True,
) -> PlannedStep:
    """Return a step over checked trees, as in `find_step`, which finds it from now on if it is to
    `keep` the plan. `FlatOptimizer.plan` refuses what does not fit.
    """
    lists = [tree.tensor_list for tree in trees]
    # Complex or sparse parameters may be refused by a setting, such as `clip_value`: they are
    # checked in each step.
    are_plain = all([some.dense_off_graph for some in lists])
    are_plain = are_plain and are_real_floating(inputs.param_list.dtypes)
    plain_mode = eager_mode if are_plain else None
    plan = StepPlan(
        inputs.layout,
        optimizer.plan(inputs),
        leaves_metadata=ListMetadata(),
        all_writable=plain_mode is not None
        and all([x.are_gapless and not (x.any_empty or x.any_requires_grad) for x in lists]),
        all_readable=plain_mode is not None
        and plain_mode.host_reads
        and not optimizer.differentiable
        and all([x.are_on_cpu and are_comparable(x.tensors) for x in lists]),
    )
    if plain_mode and keep and optimizer.keeps_plans:
        add_plan(optimizer.plans, plain_mode, trees, plan)
    leaves = [leaf for tree in trees for leaf in tree.leaves]
    hyperparams = optimizer.hyperparams(inputs.opt_state)
    inputs = inputs._replace(optimizer_plan=plan.optimizer_plan, hyperparams=hyperparams)
    params, opt_state, *others = trees
    return PlannedStep(params, opt_state, others, leaves, inputs, plan, eager_mode)


def plan_step_with_grads(
    optimizer: PlansSteps,
    params: Tree,
    grads: Tree,
    opt_state: Tree,
    *others: Tree,
    check_gradients: Callable[[Gradients], None] = lambda gradients: None,
) -> tuple[PlannedStep, Gradients]:
    """Return a step over these and other trees, and its gradients, which `check_gradients` may
    refuse before the step is planned. Refuse, naming the leaf, gradients that do not fit `params`,
    and a state that belongs to others.
    """
    eager_mode = current_eager_mode()
    planned = find_step(optimizer, eager_mode, (params, opt_state, grads, *others))
    if planned is not None:
        return planned, planned.inputs.gradients(planned.others[0])
    trees, inputs = flatten_step(optimizer, params, grads, opt_state)
    gradients = inputs.gradients(trees[2])
    check_gradients(gradients)
    # `find_plan` flattens `grads` in their own order: the plan is kept if that is the parameters'.
    same_order = eager_mode is not None and pytree.flatten(grads)[1] == trees[0].structure
    trees += map(pytree.flatten_once, others)
    return plan_step(optimizer, eager_mode, trees, inputs, keep=same_order), gradients
