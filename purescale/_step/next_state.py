"""The stages `advance_control` and `assemble_state` of a step: the next state."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor

from .._loss_scale.rules import HasScale, call_rule, may_update_on_host, update_on_host
from .._step.decide import Decision
from .._step.memory import MayWrite
from .._step.options import TrainStepOptions
from .._step.prepare import FlatState, PreparedStep
from .._step.train_state import TrainState
from .._step.window_result import MeasuredWindow
from .._torch import foreach
from .._tree import pytree
from .._tree.aliasing import copy_aliased_leaves
from .._tree.matching import matching_leaves
from .._tree.pytree import FlatTree, Leaves, Tree
from .._tree.select import overwrite_leaves, select, select_leaves

_requires_grad = operator.attrgetter("requires_grad")


def advance_control(
    prepared: PreparedStep,
    measured: MeasuredWindow,
    decision: Decision,
    guard_state: Tree,
) -> Leaves:
    """Return the leaves of the next scaler, step count, generator and guard, in the order of
    `FlatState.control`. `guard_state` is the guard's new state. It is kept if the step is
    applied, or if only the guard rejected it.
    """
    flat_state, options = prepared.flat_state, prepared.options
    guard: Leaves = []
    if isinstance(decision.rejected, Tensor):
        names = "state.guard", "the state that the guard returned"
        old, new, _ = matching_leaves(flat_state.train_state.guard, guard_state, *names)
        guard = select_leaves(decision.skip & ~decision.rejected, old, new)
    scaler = _next_scaler(options, flat_state.train_state.scaler, measured, decision)
    count = flat_state.train_state.step + (1 if decision.known_applied else ~decision.skip)
    generator = [] if isinstance(measured.rng, tuple) else [measured.rng]
    return [*scaler, count, *generator, *guard]


def assemble_state(
    flat_state: FlatState,
    stepped: tuple[Tree, Tree],
    control: Leaves,
    buffers: Leaves,
    decision: Decision,
    may_write: MayWrite,
) -> TrainState:
    """Return the next state, from the results of `run_step` and `advance_control`, and the buffers
    after the last microbatch.
    """
    params, opt_state = stepped
    leaves = _next_buffers(flat_state.buffers, buffers, decision, in_place=may_write.buffers)
    if may_write.control:
        control = _overwrite_control(flat_state, control)
    scaler, step, rng, guard = flat_state.control.structure.unflatten(control)
    return TrainState(
        params=params,
        buffers=flat_state.buffers.structure.unflatten(leaves),
        opt_state=opt_state,
        scaler=scaler,
        step=step,
        rng=rng,
        guard=guard,
    )


def _overwrite_control(flat_state: FlatState, new: Leaves) -> Leaves:
    """Return scaler, count, generator and guard after `new` was written into those of the state. If
    a rule or a guard returned tensors on a graph, nothing is written.
    """
    old = flat_state.control.leaves
    if not flat_state.all_writable or any(map(_requires_grad, new)):
        return overwrite_leaves(old, new)
    foreach.copy_list_(old, new)
    return old


def _next_scaler(
    options: TrainStepOptions, before: HasScale, measured: MeasuredWindow, decision: Decision
) -> Leaves:
    """Return the leaves of the loss scale after the step."""
    used, overflow, rule = measured.scaler, decision.overflow, options.rule
    on_host = decision.known_applied and options.rule_traits.is_dynamic
    if on_host and may_update_on_host(used, overflow):
        return list(update_on_host(rule, used, overflow=False))  # type: ignore[arg-type]
    # If no try was finite, the scale ends as after one ordinary skip.
    scaler = used if used is before else select(overflow, before, used)
    found_inf, amax = overflow, None
    if options.rule_traits.takes_amax:
        found_inf, amax = _overflow_and_amax(options, measured, decision)
    updated = call_rule(rule, scaler, found_inf, amax)
    is_unaliased = options.rule_traits.is_builtin and type(updated) is type(scaler)
    if is_unaliased:
        new = list(updated)
    else:
        names = "state.scaler", "the state that the rule returned"
        new = matching_leaves(before, updated, *names)[1]
    if decision.skip is overflow:  # no mask is needed, but a rule may return its arguments
        arguments = pytree.tensors([before, found_inf, amax])
        return new if is_unaliased else copy_aliased_leaves(new, arguments)
    # A skip that is not an overflow keeps the scale: no weight, an invalid bound, or a guard. A
    # lower scale at which a retry was finite is kept too.
    return select_leaves(decision.skip & ~overflow, pytree.flatten(scaler)[0], new)


def _overflow_and_amax(
    options: TrainStepOptions, measured: MeasuredWindow, decision: Decision
) -> tuple[Tensor, Tensor]:
    """Return `found_inf` and the largest gradient for a rule that takes it.

    A loss that is not finite itself is not an overflow, because the scale is seldom its cause. If
    such a loss skips the step, amax is NaN.
    """
    overflow, flags = decision.overflow, measured.flags
    # The loss of the step leaves out a microbatch that was dropped.
    if flags is not None and options.drops_microbatches:
        overflow = flags.retryable
    found_inf = overflow & (measured.window.loss.abs() < math.inf)
    amax: Any = decision.grad_amax
    return found_inf, amax.masked_fill(decision.skip & ~found_inf, torch.nan)


def _next_buffers(before: FlatTree, new: Leaves, decision: Decision, *, in_place: bool) -> Leaves:
    """Return the buffers after the step in memory of their own, because a loss may keep the tensors
    that it returned, or return them as aux too. Buffers that require a gradient are not returned on
    their graph.
    """
    old, dense_without_history = before.leaves, before.tensor_list.dense_without_history
    if not old:
        return []
    if not dense_without_history or any(map(_requires_grad, old)):
        old = [
            pytree.detach_unless_transformed(t) if getattr(t, "requires_grad", False) else t
            for t in old
        ]
    if not (dense_without_history and decision.known_applied):
        return select_leaves(decision.skip, old, new, in_place=in_place)
    if not in_place:
        return foreach.detach_and_clone(new)
    foreach.copy_list_(old, new)  # each in memory of its own, or the old one itself
    return old
