"""The stage `assemble` of a step: the next state, and what the step reports."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._loss_scale.rule_protocol import call_rule
from .._optim.decision import Decision
from .._step.decide import Outcome
from .._step.memory import Memory
from .._step.retry import FinalTry
from .._step.step_info import StepInfo
from .._step.step_options import FlatState, StepOptions
from .._step.train_state import TrainState
from .._torch.tracing import traced
from .._tree import tree as _tree
from .._tree.select import choose, copies, where, write_over
from .._tree.tree import FlatTree, Leaves, Tree, TreeDef


class Numbers(NamedTuple):
    """The small parts of a state."""

    scaler: Tree
    step: Tensor
    rng: Any
    guard: Tree


def assemble(
    state: TrainState,
    flat: FlatState,
    memory: Memory,
    tried: FinalTry,
    outcome: Outcome,
    updated: tuple[Tree, Tree],
    numbers: Numbers,
) -> tuple[TrainState, StepInfo]:
    """Return the next state and the report. `updated`: the new parameters and optimizer state."""
    window, (params, opt_state) = tried.window, updated
    used_scale = tried.scaler.tree.scale.clone()
    skip, skip_on_host = outcome.found_inf, outcome.decision.skip_on_host
    buffers = _next_buffers(memory, outcome.decision, flat.buffers.leaves, window.buffers)
    if memory.numbers and skip_on_host is None:
        before = Numbers(state.scaler, state.step, state.rng, state.guard)
        numbers = write_over(before, numbers)
    new_state = TrainState(
        params=params,
        buffers=flat.buffers.structure.unflatten(buffers),
        opt_state=opt_state,
        scaler=numbers.scaler,
        step=numbers.step,
        rng=numbers.rng,
        guard=numbers.guard,
    )
    reported = (outcome.grad_norm, outcome.grad_amax, outcome.rejected)
    norm, amax, rejected = [() if value is None else value for value in reported]
    info = StepInfo(
        loss=window.loss,
        found_inf=skip,
        scale=used_scale,
        grad_norm=norm,
        grad_amax=amax,
        retries=torch.full((), tried.retries, dtype=torch.int32, device=skip.device),
        aux=window.aux,
        rejected=rejected,
    )
    return new_state, info


def next_numbers(
    options: StepOptions, state: TrainState, scaler: FlatTree, tried: FinalTry, outcome: Outcome
) -> Numbers:
    """Return the numbers of the next state."""
    skip, skip_on_host = outcome.found_inf, outcome.decision.skip_on_host
    return Numbers(
        scaler=_next_scaler(options, scaler, tried, outcome),
        step=state.step + (~skip if skip_on_host is None else int(not skip_on_host)),
        rng=tried.rng,
        guard=() if outcome.verdict is None else _next_guard(outcome, *outcome.verdict),
    )


_FROM_RULE = "the state that the rule returned"


def _next_scaler(options: StepOptions, before: FlatTree, tried: FinalTry, outcome: Outcome) -> Tree:
    """Return the loss scale after the step."""
    used = tried.scaler.tree
    overflow, amax = _told_to_rule(options, tried, outcome)
    # If no try was finite, the scale ends as after one ordinary skip.
    start = used if used is before.tree else where(overflow, before.tree, used)
    updated_scaler = call_rule(options.rule, start, overflow, amax)
    new = _tree.matching_leaves(
        before.tree, updated_scaler, "state.scaler", _FROM_RULE, flat=before
    )[1]
    # `len`, because Dynamo cannot trace `not` of a tuple.
    unbounded = len(options.clip.tensor_bounds) == 0
    only_an_overflow_skips = tried.flags.must_skip is None and unbounded and options.guard is None
    if not (only_an_overflow_skips or outcome.decision.skip_on_host is False):
        # A skip that is not an overflow keeps the scale: no weight, an invalid bound, or a guard.
        # A lower scale at which a retry was finite is kept too.
        old = before.leaves if start is before.tree else _tree.flatten(start)[0]
        new = choose(outcome.found_inf & ~tried.flags.overflow, old, new)
    elif not traced():  # a rule may return its arguments
        given = [*before.leaves, overflow, *([] if amax is None else [amax])]
        new = _tree.leaves_apart(new, given)
    return before.structure.unflatten(new)


def _told_to_rule(
    options: StepOptions, tried: FinalTry, outcome: Outcome
) -> tuple[Tensor, Tensor | None]:
    """Return the flag and the largest gradient for `rule.update`.

    For a rule that takes amax, a loss that is not finite itself is not an overflow, because no
    scale could have prevented it. If such a loss skips the step, amax is unknown: NaN.
    """
    flags, amax = tried.flags, tried.stats.amax
    if amax is None:
        return flags.overflow, None
    # The loss of the step leaves out a microbatch that was dropped.
    dropped = options.on_nonfinite == "drop_microbatch"
    overflow = flags.retryable if dropped else flags.overflow
    bad = overflow & (tried.window.loss.abs() < math.inf)
    return bad, torch.where(outcome.found_inf & ~bad, torch.nan, amax)


def _next_guard(outcome: Outcome, old: Leaves, new: Leaves, structure: TreeDef, _: Tensor) -> Tree:
    """Return the new state of the guard, or the old one if something else skipped the step."""
    skipped_otherwise = outcome.found_inf & ~outcome.rejected  # type: ignore[operator]
    return structure.unflatten(choose(skipped_otherwise, old, new))


def _next_buffers(memory: Memory, decision: Decision, old: Leaves, new: Leaves) -> Leaves:
    """Return the buffers after the step in memory of their own, because a loss may keep the tensors
    that it returned, or return them as aux too.
    """
    skip = decision.skip_on_host
    if skip is False or (skip and not memory.buffers):
        return copies(old if skip else new)
    if not traced():  # buffers that require a gradient are not returned on their graph
        old = [t.detach() if isinstance(t, Tensor) and t.requires_grad else t for t in old]
    if skip:
        return list(old)
    return choose(decision.skip, old, new, in_place=memory.buffers)  # type: ignore[arg-type]
