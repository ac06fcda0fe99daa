"""The steps of an optimizer, planned: what settings, structure and metadata decide about them is
decided once for arguments that are alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .._optim.step_inputs import ParamLayout, StepInputs, flatten_step
from .._torch.tensor_list import Cache
from .._torch.tracing import Situation, current_situation
from .._tree import pytree
from .._tree.gradients import Gradients
from .._tree.leaves import are_real_floating
from .._tree.plans import add_plan, find_plan
from .._tree.pytree import FlatTree, Leaves, Tree


class StepPlan(NamedTuple):
    """The decisions about the steps of an optimizer over arguments that are alike."""

    layout: ParamLayout
    updater_plan: Any  # what `Updater.plan` returned
    leaves_cache: Cache | None = None  # of `StepInputs.replaced_leaves`
    # Each leaf is gapless and requires no gradient: a step may write into it if nothing else shares
    # its memory.
    all_writable: bool = False
    all_readable: bool = False  # the host may read each leaf


class PlannedStep(NamedTuple):
    """The arguments of a step, flat, and its plan."""

    # parameters, the state of the optimizer, and the others; empty by hand if no plan was found
    trees: list[FlatTree]
    inputs: StepInputs
    plan: StepPlan
    situation: Situation | None
    leaves: Leaves = []  # noqa: RUF012  # of all trees, if the plan was found; never written

    @property
    def was_found(self) -> bool:
        """True if a plan was found: arguments like these were checked before."""
        return len(self.leaves) > 0


# Returns checked trees, flat, and the inputs of a step over them.
Check = Callable[[], tuple[list[FlatTree], StepInputs]]


def plan_step(
    updater: Any, trees: tuple[Tree, ...], check: Check, *, over_grads: bool = False
) -> PlannedStep:
    """Return a step over `trees`: parameters, the state of the optimizer and more, the gradients
    first if it is `over_grads`. If trees like these were not planned before, `check` and
    `Updater.plan` refuse what does not fit.
    """
    situation = current_situation()
    plan_key = situation if updater.keeps_plans else None
    if plan_key and (match := find_plan(updater.plans, plan_key, trees)):
        flat_trees, leaves, plan = match
        params, opt_state, *_ = flat_trees
        inputs = StepInputs.of_dense(plan.layout, params, opt_state, plan.leaves_cache)
        return PlannedStep(flat_trees, inputs, plan, situation, leaves)
    checked, inputs = check()
    plan = StepPlan(inputs.layout, updater.plan(inputs))
    # What is refused of parameters that are not dense and real depends on settings of the step.
    is_dense = inputs.replaced_leaves is not None and are_real_floating(inputs.param_list.dtypes)
    if plan_key and is_dense:
        flat_trees = list(map(pytree.flatten_once, trees))
        params, _, grads, *_ = flat_trees
        if not over_grads or params.structure == grads.structure:  # the dicts have one order
            _keep(updater, plan_key, flat_trees, plan)
    return PlannedStep(checked, inputs, plan, situation)


def _keep(updater: Any, situation: Situation, trees: list[FlatTree], plan: StepPlan) -> None:
    """Keep the plan of a step over trees that are dense, with what is known of their leaves."""
    lists = [tree.tensor_list for tree in trees]
    if not all([some.dense_off_graph for some in lists]):
        return
    plan = plan._replace(
        leaves_cache=Cache(),
        all_writable=all(
            [x.are_gapless and not (x.any_empty or x.any_requires_grad) for x in lists]
        ),
        all_readable=situation.host_reads and all([x.are_on_cpu for x in lists]),
    )
    add_plan(updater.plans, situation, trees, plan)


def plan_step_by_hand(
    updater: Any,
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
    checked: list[Gradients] = []

    def check() -> tuple[list[FlatTree], StepInputs]:
        inputs, gradients = flatten_step(updater, params, grads, opt_state)
        check_gradients(gradients)
        checked.append(gradients)
        return [], inputs

    planned = plan_step(updater, (params, opt_state, grads, *others), check, over_grads=True)
    return planned, checked[0] if checked else planned.inputs.gradients(planned.trees[2])
