"""A training step over microbatches: its arguments checked, and its stages in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._distributed.process_group import Group
from .._grads.accumulate import OnNonfinite
from .._grads.clip import as_clip_options
from .._grads.measure import measure
from .._loss_scale.rules import HasScale, Rule, checked_rule_traits
from .._optim.optimizer import Optimizer, as_flat_optimizer
from .._step.agree import prepare_on_all_ranks
from .._step.decide import call_guard, decide
from .._step.forward_backward import LossFn
from .._step.memory import decide_writes
from .._step.microbatches import FUNCTION_TYPES, accumulate_microbatches, weigh_microbatches
from .._step.next_state import advance_control, assemble_state
from .._step.options import BNUpdate, TrainStepOptions, check_options
from .._step.pooled_batch_norm import accumulate_with_pooled_statistics
from .._step.prepare import PreparedStep, prepare_state
from .._step.reduce import reduce_window
from .._step.retry import run_with_retries
from .._step.spike_guard import Guard, check_guard_state
from .._step.step_info import StepInfo
from .._step.train_state import TrainState
from .._step.window_result import MeasuredWindow, window_flags
from .._torch.autocast import outside_autocast
from .._torch.tracing import refuse_in_capture, refuse_in_trace_or_capture
from .._tree.hints import hint_keywords
from .._tree.poison import poisons_donated
from .._tree.pytree import StateT, TreeT


@hint_keywords
@outside_autocast("loss_fn", "weight_fn")
@poisons_donated("state")
def train_step(
    state: TrainState[TreeT, StateT],
    microbatches: list[Any],
    *,
    loss_fn: LossFn,
    optimizer: Optimizer,
    rule: Rule[Any],
    weight_fn: Callable[[Any], float | Tensor] | None = None,
    max_norm: float | Tensor | None = None,
    clip_value: float | Tensor | None = None,
    on_nonfinite: OnNonfinite = "drop_window",
    bn_update: BNUpdate = "each",
    group: Group | None = None,
    max_retries: int = 0,
    donate: bool = False,
    norm_type: float = 2.0,
    guard: Guard[Any] | None = None,
    window_size: int | None = None,
) -> tuple[TrainState[TreeT, StateT], StepInfo]:
    """Equal, for one microbatch, `s = state` and a step that only an overflow may skip, to the code
    below. Syncs with the host only if `max_retries` is above 0, over a `group` whose ranks meet on
    a CPU, or on an accelerator with an optimizer whose first step may add to its state, as a class
    of your own in `from_torch`.

        scaled = lambda params: scale_loss(s.scaler, loss_fn(params, s.buffers, microbatch)[0])
        out = unscale_and_step(optimizer, s.scaler, s.params, grad(scaled)(s.params),
                               s.opt_state, max_norm, clip_value)
        buffers = select(out.found_inf, s.buffers, new_buffers)
        s = TrainState(out.params, buffers, out.opt_state, rule.update(s.scaler, out.found_inf),
                       s.step + ~out.found_inf, rng)

    If an overflow skips the step, parameters, optimizer state, buffers and `step` come back bit for
    bit, the scale backs off, and `rng` moves on by what the forward has drawn. If something else
    skips the step (a guard, a tensor bound that is 0, negative or NaN, or no weight), the scale
    stays. A rule that takes amax gets that of the averaged, unscaled gradients before clipping. If
    the loss itself is not finite and skips the step, it gets `found_inf=False` and NaN, because the
    scale is seldom the cause of that.

    A parameter that the loss does not use has a gradient of 0, so momentum and weight decay still
    move it; torch leaves a parameter without a gradient alone. Works under
    `torch.compile(fullgraph=True)`, `torch.vmap` and `torch.func.grad`. To differentiate with
    respect to the state, use torch.func, or `.backward()` with an optimizer that is
    `differentiable=True`. Inside the caller's `torch.autocast` only `loss_fn` and `weight_fn` run
    under autocast.

    Args:
        state: From `init_train_state`, or the state that the last step returned.
        microbatches: A list, `[batch]` for one batch. Its gradients are averaged in float32 and
            make one step. A function in the list, as in `[iter(loader).__next__] * 4`, is called
            without arguments when its turn comes, and the microbatch that it returns is freed after
            its backward.
        loss_fn: A function of `(params, buffers, microbatch)` that returns `(loss, new_buffers)` or
            `(loss, new_buffers, aux)`: a real loss of one element, not scaled. Return `buffers` if
            nothing changes them; the next microbatch is given the new ones.
        optimizer: The optimizer of `init_train_state`.
        rule: The rule of the loss scale, that of `init_train_state`.
        weight_fn: A function of a microbatch that returns its weight in the average, such as its
            number of samples or tokens: a number or a 0-d tensor, not negative. By default all
            weights are equal; a microbatch of weight 0 is ignored. All weights are asked for before
            the first backward, so if an entry is a function, `weight_fn` receives that function,
            not its microbatch. `rng` in the state is for `loss_fn` and for such functions.
        max_norm, clip_value, norm_type: As in `clip_by_global_norm` and `clip_by_value`, for the
            averaged, unscaled gradients.
        on_nonfinite: `"drop_window"` skips the step if a microbatch overflows, and
            `"drop_microbatch"` drops that microbatch and what it did to the buffers. The scale
            backs off once in both cases.
        bn_update: `"each"` updates the running averages of batch norm with each microbatch, so that
            k of them count as k updates. `"window"` updates them once, with the pooled statistics
            of the microbatches that count.
        group: The process group of the ranks that make this step together, each with microbatches
            of its own: equal to one process with all of them. docs/scaling.md says what they
            exchange.
        max_retries: How often a window that overflows is run again at a lower scale, with the same
            microbatches and random numbers. Above 0 it syncs with the host and cannot be traced,
            and takes no functions that make microbatches.
        donate: The tensors of `state` may be overwritten; the caller gives them up. Same bits.
        guard: Rejects a step by its loss and, with `max_norm`, its norm before clipping:
            `SpikeGuard()`, over a state of `init_train_state(..., guard=guard)`. A rejected step is
            skipped, and the rejection does not lower the loss scale.
        window_size: The number of microbatches of a full window, on each rank of a group. A shorter
            one, such as the last of an epoch, is then a smaller step: loss and gradients are sums
            divided by this number, as in a loop that backpropagates `loss / k`. What
            `"drop_microbatch"` drops is missing in these sums. By default every window is a full
            step, the mean over its own microbatches that are not dropped.

    Returns:
        The next `TrainState` and a `StepInfo`.

    Raises:
        TypeError: `microbatches` is not a list, `loss_fn` does not take three arguments, or a
            setting, or what `loss_fn` returns, has the wrong type.
        ValueError: `microbatches` is empty, a setting is out of range, settings do not go together,
            or the new buffers do not match. Wrong arguments raise before any work, and a wrong
            return value of `loss_fn` before the state changes.

    Example:
        >>> import torch
        >>> from purescale import DynamicScale, from_torch, init_train_state
        >>> optimizer, rule = from_torch(torch.optim.SGD, lr=0.5), DynamicScale(growth_interval=1)
        >>> state = init_train_state({"w": torch.tensor([1.0])}, {}, optimizer, rule)
        >>> def loss_fn(params, buffers, x):
        ...     return (params["w"] * x).pow(2).sum(), buffers
        >>> state, info = train_step(
        ...     state, [torch.tensor([1.0])], loss_fn=loss_fn, optimizer=optimizer, rule=rule
        ... )
        >>> state.params, info.loss, info.scale, state.scaler.scale
        ({'w': tensor([0.])}, tensor(1.), tensor(65536.), tensor(131072.))
    """

    def check_and_prepare(resolved_group: Group | None) -> PreparedStep:
        options = TrainStepOptions(
            loss_fn=loss_fn,
            optimizer=as_flat_optimizer(optimizer),
            rule=rule,
            clip=as_clip_options(max_norm, clip_value, norm_type),
            weight_fn=weight_fn,
            on_nonfinite=on_nonfinite,
            bn_update=bn_update,
            group=resolved_group,
            max_retries=max_retries,
            donate=donate,
            guard=guard,
            window_size=window_size,
            rule_traits=checked_rule_traits(rule),
        )
        check_options(options)
        _check_arguments(state, microbatches, options)
        flat_state = prepare_state(state, options)
        weights = weigh_microbatches(options, microbatches, flat_state.train_state.scaler.scale)
        return PreparedStep(flat_state, options, microbatches, weights)

    if group is None:
        prepared = check_and_prepare(None)
    else:
        prepared = prepare_on_all_ranks(group, check_and_prepare, state)
    return _run_stages(prepared)


def _run_stages(prepared: PreparedStep) -> tuple[TrainState, StepInfo]:
    """Run the stages of a step in order."""
    flat_state, options = prepared.flat_state, prepared.options
    memory, may_write = decide_writes(prepared)
    stats_options = prepared.stats_options
    pooled = options.bn_update == "window"
    accumulate = accumulate_with_pooled_statistics if pooled else accumulate_microbatches

    def run_window(scaler: HasScale) -> MeasuredWindow:
        window = accumulate(prepared, scaler.scale, memory)
        window = reduce_window(window, prepared)
        # Still scaled, unless the check has divided them.
        stats, grads = measure(window.grads, scaler.scale, stats_options)
        window = window._replace(grads=grads)
        return MeasuredWindow(window, stats, window_flags(window, stats.overflow), scaler)

    # Once, or again with `max_retries`; from the generator of the state, if it has one.
    measured = run_with_retries(prepared, run_window)
    window, stats = measured.window, measured.stats
    scale = measured.scaler.scale.clone()  # `assemble_state` may write into it
    guard_state = flat_state.train_state.guard
    guard_state, guard_rejects = call_guard(options.guard, guard_state, window, stats)
    decision = decide(stats, options.clip, window.grads, measured.flags, guard_rejects)
    # Before anything is overwritten: what rule and guard return may be refused.
    control = advance_control(prepared, measured, decision, guard_state)
    # It unscales and clips too, what is pending in `decision.grads`: for a class of torch in
    # `KernelOrFormulaOptimizer.step_or_skip`.
    stepped = options.optimizer.run_step(
        flat_state.optimizer_inputs,
        decision.grads,
        decision.skip_or_none,
        in_place=may_write.params_and_state,
    )
    info = StepInfo(
        loss=window.loss,
        found_inf=decision.skip,
        scale=scale,
        grad_norm=decision.grad_norm,
        grad_amax=decision.grad_amax,
        retries=torch.full((), measured.retries, dtype=torch.int32, device=scale.device),
        aux=window.aux,
        rejected=decision.rejected,
    )
    return assemble_state(flat_state, stepped, control, window.buffers, decision, may_write), info


def _check_arguments(state: Any, microbatches: Any, options: TrainStepOptions) -> None:
    """Refuse a state and microbatches of other types, and what does not go with the options."""
    if not isinstance(state, TrainState):
        raise TypeError(
            f"train_step takes a TrainState, got {type(state).__name__}. "
            f"Fix: `state = init_train_state(params, buffers, optimizer, rule)`."
        )
    if not isinstance(microbatches, list):
        raise TypeError(
            f"microbatches is a {type(microbatches).__name__}; expected a list, which makes one "
            "step. Fix: `train_step(state, [batch], ...)` for one batch, "
            "`list(itertools.islice(batches, 4))` for those of an iterator."
        )
    if not microbatches:
        raise ValueError(
            "microbatches is an empty list. Likely cause: a loader that ran out. Fix: end the loop."
        )
    max_retries = options.max_retries
    if any(isinstance(entry, FUNCTION_TYPES) for entry in microbatches):
        refuse_in_capture(
            "takes no functions that make microbatches: a replay would not call them.",
            "`[make() for make in functions]`, as an argument of the captured function.",
        )
        if max_retries:
            raise ValueError(
                f"max_retries={max_retries} runs a window again, and a function in it would make "
                "another microbatch. Fix: `[make() for make in microbatches]`, or max_retries=0."
            )
    if options.guard is not None or state.guard != ():
        check_guard_state(options.guard, state.guard)
    if not isinstance(state.rng, tuple):
        refuse_in_trace_or_capture(
            "a step with rng in its state cannot be traced or captured: torch.compile, torch.func "
            "and CUDA graphs do not follow torch's generators.",
            "state._replace(rng=()), torch.manual_seed before the step, and for vmap "
            "randomness='different'.",
        )
