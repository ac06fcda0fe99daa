"""The stage `assemble` of a step: the next state, and what the step reports."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._loss_scale.rule_protocol import call_rule
from .._step.masked import Masked, Outcome
from .._step.memory import Memory
from .._step.retry import FinalTry
from .._step.spike_guard import Verdict
from .._step.step_info import StepInfo
from .._step.step_options import FlatState, StepOptions
from .._step.train_state import TrainState
from .._tree import tree as _tree
from .._tree.select import where, write_over
from .._tree.tree import FlatTree, Leaves, Tree


class Numbers(NamedTuple):
    """The small parts of a state."""

    scaler: Tree
    step: Tensor
    rng: Any
    guard: Tree


def assemble(
    engine: type[Masked],
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
    buffers = _next_buffers(engine, memory, outcome, flat.buffers, window.buffers)
    if memory.numbers:
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
    info = StepInfo(
        loss=window.loss,
        found_inf=outcome.found_inf,
        scale=used_scale,
        grad_norm=outcome.grad_norm,
        grad_amax=outcome.grad_amax,
        retries=torch.full((), tried.retries, dtype=torch.int32, device=used_scale.device),
        aux=window.aux,
        rejected=outcome.rejected,
    )
    return new_state, info


def next_numbers(
    engine: type[Masked],
    options: StepOptions,
    state: TrainState,
    scaler: FlatTree,
    tried: FinalTry,
    outcome: Outcome,
    verdict: Verdict | None,
) -> Numbers:
    """Return the numbers of the next state. If a guard alone skips the step, it keeps the state in
    which it rejected it.
    """
    guard: Tree = ()
    if verdict is not None:
        leaves = engine.choose(outcome.failed, verdict.old, verdict.new)
        guard = verdict.structure.unflatten(leaves)
    return Numbers(
        scaler=_next_scaler(engine, options, scaler, tried, outcome),
        step=state.step + _tree.negated(outcome.decision.skip),
        rng=tried.rng,
        guard=guard,
    )


_FROM_RULE = "the state that the rule returned"


def _next_scaler(
    engine: type[Masked],
    options: StepOptions,
    before: FlatTree,
    tried: FinalTry,
    outcome: Outcome,
) -> Tree:
    """Return the loss scale after the step."""
    used = tried.scaler.tree
    overflow, amax = _rule_arguments(options, tried, outcome)
    # If no try was finite, the scale ends as after one ordinary skip.
    start = used if used is before.tree else where(overflow, before.tree, used)
    updated_scaler = call_rule(options.rule, start, overflow, amax)
    new = _tree.matching_leaves(
        before.tree, updated_scaler, "state.scaler", _FROM_RULE, flat=before
    )[1]
    if outcome.keeps_scale is False:  # a rule may return its arguments
        arguments = [*before.leaves, overflow, *([] if amax is None else [amax])]
        new = _tree.leaves_apart(new, arguments)
    else:
        # A skip that is not an overflow keeps the scale: no weight, an invalid bound, or a guard.
        # A lower scale at which a retry was finite is kept too.
        old = before.leaves if start is before.tree else _tree.flatten(start)[0]
        new = engine.choose(outcome.keeps_scale, old, new)
    return before.structure.unflatten(new)


def _rule_arguments(
    options: StepOptions, tried: FinalTry, outcome: Outcome
) -> tuple[Tensor, Tensor | None]:
    """Return the flag and the largest gradient for `rule.update`.

    For a rule that takes amax, a loss that is not finite itself is not an overflow, because no
    scale could have prevented it. If such a loss skips the step, amax is unknown: NaN.
    """
    flags, amax = tried.flags, outcome.grad_amax
    if not options.takes_amax:
        return flags.overflow, None
    # The loss of the step leaves out a microbatch that was dropped.
    dropped = options.on_nonfinite == "drop_microbatch"
    overflow = flags.retryable if dropped else flags.overflow
    bad = overflow & (tried.window.loss.abs() < math.inf)
    return bad, torch.where(outcome.found_inf & ~bad, torch.nan, amax)


def _next_buffers(
    engine: type[Masked], memory: Memory, outcome: Outcome, before: FlatTree, new: Leaves
) -> Leaves:
    """Return the buffers after the step in memory of their own, because a loss may keep the tensors
    that it returned, or return them as aux too. Buffers that require a gradient are not returned on
    their graph.
    """
    old = before.leaves
    if not before.metadata.dense_off_graph or any([leaf.requires_grad for leaf in old]):
        old = [_tree.off_graph(t) if getattr(t, "requires_grad", False) else t for t in old]
    return engine.choose(outcome.decision.skip, old, new, overwrite=memory.buffers)
