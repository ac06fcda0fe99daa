"""A training step over microbatches, and the state that it maps to the next one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._grads.accumulate import OnNonfinite, check_on_nonfinite
from .._grads.clip import Clip, check_clip, check_ordered, factor_dtype
from .._loss_scale.rule_protocol import Rule, call_rule, check_rule, takes_amax
from .._loss_scale.rules import StaticScale
from .._loss_scale.scaling import check_device
from .._optim.decision import Decision, Memory
from .._optim.protocol import Optimizer, as_conditional
from .._optim.step_inputs import flatten_step, flatten_together
from .._step.decide import Outcome, decide
from .._step.microbatches import WindowGrads, check_weights
from .._step.optimizer_step import update
from .._step.reduce import check_on_all_ranks as check_on_all_ranks
from .._step.reduce import reduce_window
from .._step.retry import accumulate_until_finite
from .._step.spike_guard import Guard, call_guard, check_guarded, check_is_guard
from .._step.step_info import StepInfo
from .._step.step_options import BNUpdate, StepOptions
from .._step.value_and_grad import LossFn
from .._torch.autocast import outside_autocast
from .._torch.tracing import traced
from .._tree import tree as _tree
from .._tree.scalars import is_whole, not_made, short_repr
from .._tree.select import choose, copies, where, write_over
from .._tree.tree import Flat, Leaves, Tree


class TrainState(NamedTuple):
    """Everything that a step changes. Make it with `init_train_state`; a run resumed from a
    checkpoint of it continues with the same bits.
    """

    params: Tree
    buffers: Tree
    opt_state: Any
    scaler: Any
    step: Tensor  # int64 []: the number of steps applied, without the skipped ones
    rng: Any  # uint8 [n], the state of a generator; () for torch's global generator
    guard: Any = ()  # the state of a guard; () without one


def init_train_state(
    params: Tree,
    buffers: Tree,
    optimizer: Optimizer,
    rule: Rule[Any],
    rng: Tensor | None = None,
    guard: Guard[Any] | None = None,
) -> TrainState:
    """Equal to `TrainState(params, buffers, optimizer.init(params), rule.init(device), step=0, rng,
    guard.init(device))`, in fresh memory.

    Args:
        params: Floating or complex parameters, off the graph of torch.autograd. Inside torch.func
            the state can be differentiated with respect to `params` and `buffers`.
        buffers: The buffers, off the graph as well.
        optimizer: Anything with pure `init` and `step`, such as `from_torch(torch.optim.AdamW)`.
        rule: The rule of the loss scale, such as `DynamicScale()`.
        rng: The state of a generator on the device of the parameters, for example
            `torch.Generator(device).manual_seed(0).get_state()`. With it dropout is a function of
            the state, and a step replays bit for bit; without it torch's global generator is used.
        guard: The guard that `train_step` will be given, such as `SpikeGuard()`.

    Returns:
        A `TrainState` on the device of the parameters. Its `rng` and `guard` are `()` if not given.

    Raises:
        ValueError: `params` has no tensor, or a tensor has a history in torch.autograd.
        TypeError: A parameter is an integer, `rng` is not the state of a generator, or `optimizer`,
            `rule` or `guard` lacks its methods.

    Example:
        >>> import torch
        >>> from purescale import DynamicScale, from_torch
        >>> sgd = from_torch(torch.optim.SGD, lr=0.1)
        >>> state = init_train_state({"w": torch.ones(2)}, {}, sgd, DynamicScale())
        >>> state.step, state.scaler.scale
        (tensor(0), tensor(65536.))
    """
    _check_parts(optimizer, rule)
    if guard is not None:
        check_is_guard(guard)
    weights = _tree.tensors(params)
    if not weights:
        raise ValueError(
            f"params has no tensor: {params!r}. Fix: `apply, params, "
            "buffers = make_functional(model)`."
        )
    if rng is not None and not (isinstance(rng, Tensor) and rng.dtype is torch.uint8):
        raise TypeError(
            f"rng must be the state of a generator, a uint8 tensor, got {type(rng).__name__}. "
            f"Fix: rng=torch.Generator({weights[0].device.type!r}).manual_seed(0).get_state()."
        )
    _tree.reject_autograd_history(params=params, buffers=buffers)
    device = weights[0].device
    return TrainState(
        params=_tree.clone(params),
        buffers=_tree.clone(buffers),
        opt_state=optimizer.init(params),
        scaler=rule.init(device),
        step=torch.zeros((), dtype=torch.int64, device=device),
        rng=() if rng is None else rng.clone(),
        guard=() if guard is None else guard.init(device),
    )


@outside_autocast("loss_fn", "weight_fn")
def train_step(
    state: TrainState,
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
    group: Any = None,
    max_retries: int = 0,
    donate: bool = False,
    norm_type: float = 2.0,
    guard: Guard[Any] | None = None,
    unroll: bool = True,
) -> tuple[TrainState, StepInfo]:
    """Equal, for one microbatch and `s = state`, to the code below. Syncs with the host only if
    `max_retries` is above 0, or over a `group` whose ranks meet on a CPU.

        scaled = lambda params: scale_loss(s.scaler, loss_fn(params, s.buffers, microbatch)[0])
        out = unscale_and_step(optimizer, s.scaler, s.params, grad(scaled)(s.params),
                               s.opt_state, max_norm, clip_value)
        buffers = select(out.found_inf, s.buffers, new_buffers)
        s = TrainState(out.params, buffers, out.opt_state, rule.update(s.scaler, out.found_inf),
                       s.step + ~out.found_inf, rng)

    On an overflow parameters, optimizer state, buffers and `step` come back bit for bit, and the
    scale backs off. A rule that takes amax gets that of the averaged, unscaled gradients before
    clipping. If the loss itself is not finite, it gets `found_inf=False` and NaN, because no scale
    could have prevented that.

    A parameter that the loss does not use has a gradient of 0, so momentum and weight decay still
    move it; torch leaves a parameter without a gradient alone. Works under
    `torch.compile(fullgraph=True)`, `torch.vmap` and `torch.func.grad`. To differentiate with
    respect to the state, use torch.func, or `.backward()` with an optimizer that is
    `differentiable=True`. Inside the caller's `torch.autocast` only `loss_fn` and `weight_fn` run
    under autocast.

    Args:
        state: From `init_train_state`, or the state that the last step returned.
        microbatches: A list, `[batch]` for one batch. Its gradients are averaged in float32 and
            make one step.
        loss_fn: A function of `(params, buffers, microbatch)` that returns `(loss, new_buffers)` or
            `(loss, new_buffers, aux)`: a real loss of one element, not scaled. Return `buffers` if
            nothing changes them; the next microbatch is given the new ones.
        optimizer: The optimizer of `init_train_state`.
        rule: The rule of the loss scale, that of `init_train_state`.
        weight_fn: A function of a microbatch that returns its weight in the average, such as its
            number of samples or tokens: a number or a 0-d tensor, not negative. By default all
            weights are equal; a microbatch of weight 0 is ignored.
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
            microbatches and random numbers. Above 0 it syncs with the host and cannot be traced.
        donate: The tensors of `state` may be overwritten; the caller gives them up. Same bits.
        guard: Rejects a step by its loss and, with `max_norm`, its norm before clipping:
            `SpikeGuard()`, over a state of `init_train_state(..., guard=guard)`. A rejected step is
            skipped, and the rejection does not lower the loss scale.
        unroll: False makes a compiled step (torch 2.13) trace one microbatch and reuse its code for
            all with the same structure, shapes, strides and dtypes. `loss_fn` must then change
            nothing outside of it and return no aux; docs/limits.md lists what is unrolled all the
            same.

    Returns:
        The next `TrainState` and a `StepInfo`.

    Raises:
        TypeError: `microbatches` is not a list, or a setting, or what `loss_fn` returns, has the
            wrong type.
        ValueError: `microbatches` is empty, a setting is out of range, settings do not go together,
            or the new buffers do not match. Wrong arguments raise before any work, and a wrong
            return value of `loss_fn` before the state changes.

    Example:
        >>> import torch
        >>> from purescale import DynamicScale, from_torch
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
    shared: Any = {
        "rule": rule,
        "guard": guard,
        "on_nonfinite": on_nonfinite,
        "bn_update": bn_update,
        "max_retries": max_retries,
        "unroll": unroll,
    }
    bounds = {"max_norm": max_norm, "clip_value": clip_value, "norm_type": norm_type}
    settings = {**shared, **bounds, "optimizer": optimizer}
    # Over a group a wrong weight must raise before the other ranks wait for a reduction.
    asked = weight_fn if group is not None else None
    (flat, clip), group = check_on_all_ranks(
        group, lambda: _check_call(state, microbatches, settings, asked), settings, state
    )
    options = StepOptions(
        loss_fn=loss_fn,
        optimizer=as_conditional(optimizer),
        clip=clip,
        weight_fn=weight_fn,
        group=group,
        donate=donate,
        takes_amax=takes_amax(rule),
        **shared,
    )
    new_state, info = _stages(options, state, flat, microbatches)
    if donate:
        _tree.poison(state, keep=(new_state, info, microbatches, max_norm, clip_value))
    return new_state, info


class _FlatState(NamedTuple):
    """The parts of a state that the stages need flat, flattened once."""

    params: Flat
    buffers: Flat
    scaler: Flat
    opt_state: Flat


def _stages(
    options: StepOptions, state: TrainState, flat: _FlatState, microbatches: list[Any]
) -> tuple[TrainState, StepInfo]:
    """Run the stages of a step in order."""
    inputs = flatten_step(options.optimizer, flat.params, None, flat.opt_state)
    options.optimizer.check(inputs)
    params, buffers, scaler = flat.params, flat.buffers, flat.scaler
    tried = accumulate_until_finite(options, params, buffers, scaler, state.rng, microbatches)
    window, scale = tried.window, tried.scaler.scale
    if options.group is not None:
        window = reduce_window(options, window, params, buffers, scale)
    scaled_by = scale if window.scaled else None
    verdict: Any = () if options.guard is None else _judged(options, state, window)
    outcome = decide(
        window.stats,  # type: ignore[arg-type]
        options.clip,
        scaled_by,
        window.grads.tensors,
        window.must_skip,
        verdict[1] if verdict else None,
    )
    next_scaler = _next_scaler(options, scaler, tried.scaler, window, outcome)
    used_scale = scale.clone()
    skip, skip_on_host = outcome.found_inf, outcome.decision.skip_on_host
    step = state.step + (~skip if skip_on_host is None else int(not skip_on_host))
    read_only = _read_only_in_update(options, state, flat, window)
    memory = Memory(options.donate, may_overwrite_grads=not traced(), read_only=read_only)
    inputs = inputs._replace(grads=window.grads)
    new_params, opt_state = update(options.optimizer, inputs, outcome, memory)
    next_guard = _next_guard(verdict[0], outcome) if verdict else ()
    rest = (new_params, opt_state, next_scaler, window.aux, step, state.rng, next_guard)
    new_buffers = _next_buffers(options, outcome.decision, buffers.leaves, window, rest)
    rng = tried.rng
    if options.donate and skip_on_host is None:
        read_only = _tree.all_tensors((window.seen, options.clip.bounds, window.aux, new_buffers))
        before = (state.scaler, state.step, state.rng, state.guard)
        new = (next_scaler, step, rng, next_guard)
        next_scaler, step, rng, next_guard = write_over(before, new, read_only)
    new_state = TrainState(
        params=new_params,
        buffers=buffers.structure.unflatten(new_buffers),
        opt_state=opt_state,
        scaler=next_scaler,
        step=step,
        rng=rng,
        guard=next_guard,
    )
    info = StepInfo(
        loss=window.loss,
        found_inf=skip,
        scale=used_scale,
        grad_norm=outcome.grad_norm,
        grad_amax=outcome.grad_amax,
        retries=torch.full((), tried.retries, dtype=torch.int32, device=skip.device),
        aux=window.aux,
        rejected=outcome.rejected,
    )
    return new_state, info


def _read_only_in_update(
    options: StepOptions, state: TrainState, flat: _FlatState, window: WindowGrads
) -> list[Tensor]:
    """Return the tensors that the update must not overwrite: parts of a state may share memory, and
    microbatches may be views of it.
    """
    if not options.donate or traced():  # memory cannot be compared while tracing
        return []
    held: Any = (flat.buffers.leaves, window.buffers, flat.scaler.leaves, state.step, state.rng)
    if options.guard is not None:
        held += (state.guard,)
    return [*window.seen, *options.clip.bounds, *_tree.all_tensors(held)]


_FROM_RULE = "the state that the rule returned"


def _next_scaler(
    options: StepOptions, before: Flat, used: Any, window: WindowGrads, outcome: Outcome
) -> Any:
    """Return the loss scale after the step. `used`: the state that scaled the loss."""
    overflow, amax = _told_to_rule(options, window, outcome)
    # If no try was finite, the scale ends as after one ordinary skip.
    start = used if used is before.tree else where(overflow, before.tree, used)
    updated_scaler = call_rule(options.rule, start, overflow, amax)
    new = _tree.matching_leaves(
        before.tree, updated_scaler, "state.scaler", _FROM_RULE, flat=before
    )[1]
    # `len`, because Dynamo cannot trace `not` of a tuple.
    only_an_overflow_skips = (
        window.must_skip is None and len(options.clip.bounds) == 0 and options.guard is None
    )
    if not (only_an_overflow_skips or outcome.decision.skip_on_host is False):
        # A skip that is not an overflow keeps the scale: no weight, an invalid bound, or a guard.
        # A lower scale at which a retry was finite is kept too.
        old = before.leaves if start is before.tree else _tree.flatten(start)[0]
        new = choose(outcome.found_inf & ~window.overflow, old, new)
    elif not traced():  # a rule may return its arguments
        given = [*before.leaves, overflow, *([amax] if options.takes_amax else [])]
        new = _tree.leaves_apart(new, given)
    return before.structure.unflatten(new)


def _told_to_rule(
    options: StepOptions, window: WindowGrads, outcome: Outcome
) -> tuple[Tensor, Any]:
    """Return the flag and the largest gradient for `rule.update`.

    For a rule that takes amax, a loss that is not finite itself is not an overflow, because no
    scale could have prevented it. If such a loss skips the step, amax is unknown: NaN.
    """
    overflow = window.overflow
    if not options.takes_amax:
        return overflow, ()
    # The loss of the step leaves out a microbatch that was dropped.
    if options.on_nonfinite == "drop_microbatch":
        overflow = window.retryable
    bad = overflow & (window.loss.abs() < math.inf)
    amax: Any = window.stats.amax  # type: ignore[union-attr]
    return bad, torch.where(outcome.found_inf & ~bad, torch.nan, amax)


def _judged(options: StepOptions, state: TrainState, window: WindowGrads) -> tuple[Any, Tensor]:
    """Call the guard with the loss and norm that `StepInfo` reports. Return its state before and
    after, paired, and whether to reject the step.
    """
    norm: Any = window.stats.norm  # type: ignore[union-attr]
    norm = () if norm is None else norm.to(factor_dtype(window.grads.tensors))
    new, bad = call_guard(options.guard, state.guard, window.loss, norm)
    return _tree.matching_leaves(
        state.guard, new, "state.guard", "the state that the guard returned"
    ), bad


def _next_guard(states: Any, outcome: Outcome) -> Any:
    """Return the new state of the guard, or the old one if something else skipped the step."""
    old, new, structure = states
    return structure.unflatten(choose(outcome.found_inf & ~outcome.rejected, old, new))


def _next_buffers(
    options: StepOptions, decision: Decision, old: Leaves, window: WindowGrads, rest: Any
) -> Leaves:
    """Return the buffers after the step in memory of their own, because a loss may keep the tensors
    that it returned, or return them as aux too. `rest`: the other parts of the new state, which
    must not be overwritten.
    """
    skip, donate = decision.skip_on_host, options.donate
    if skip is False or (skip and not donate):
        return copies(old if skip else window.buffers)
    if not traced():  # buffers that require a gradient are not returned on their graph
        old = [t.detach() if isinstance(t, Tensor) and t.requires_grad else t for t in old]
    if skip:
        return list(old)
    read_only = [*window.seen, *_tree.all_tensors(rest)] if donate and not traced() else []
    return choose(decision.skip, old, window.buffers, donate=donate, read_only=read_only)  # type: ignore[arg-type]


def _check_call(
    state: TrainState,
    microbatches: Any,
    settings: dict[str, Any],
    weight_fn: Callable[[Any], float | Tensor] | None,
) -> tuple[_FlatState, Clip]:
    """Check everything; return the state, flat, and the bounds of the step."""
    rule, max_retries = settings["rule"], settings["max_retries"]
    if not isinstance(state, TrainState):
        raise TypeError(
            f"train_step takes a TrainState, got {type(state).__name__}. "
            f"Fix: `state = init_train_state(params, buffers, optimizer, rule)`."
        )
    _check_parts(settings["optimizer"], rule)
    _check_microbatches(microbatches)
    clip = check_clip(settings["max_norm"], settings["clip_value"], settings["norm_type"])
    trees = state.params, state.buffers, state.scaler
    flat = _FlatState(*flatten_together(*trees, opt_state=state.opt_state))
    leaves = flat.params.leaves
    _tree.check_parameters(flat.params, "state.params")
    check_device(state.scaler.scale, state.params, leaves, "state.params")
    if settings["guard"] is not None or state.guard != ():
        check_guarded(settings["guard"], state.guard)
    if clip.value is not None:
        check_ordered(state.params, leaves, "params")
    check_on_nonfinite(settings["on_nonfinite"])
    if settings["bn_update"] not in ("each", "window"):
        raise ValueError(f"bn_update must be 'each' or 'window', got {settings['bn_update']!r}.")
    if not isinstance(settings["unroll"], bool):
        raise TypeError(f"unroll must be True or False, got {short_repr(settings['unroll'])}.")
    if not is_whole(max_retries) or max_retries < 0:
        raise ValueError(
            f"max_retries must be a whole number, 0 or more, got {short_repr(max_retries)}."
        )
    if max_retries and isinstance(rule, StaticScale):
        raise ValueError(
            f"max_retries={max_retries} with {rule!r}, whose scale never moves: every retry would "
            "overflow again. Fix: DynamicScale(), or max_retries=0."
        )
    if max_retries and traced():
        raise ValueError(
            "max_retries reads a flag on the host, which a traced step cannot do. Fix: "
            "max_retries=0 under torch.compile and torch.func; the next step uses the lower scale "
            "anyway."
        )
    if not isinstance(state.rng, tuple) and traced():
        raise ValueError(
            "a step with rng in its state cannot be traced: torch.compile and torch.func do not "
            "follow torch's generators. Fix: state._replace(rng=()), torch.manual_seed before the "
            "step, and for vmap randomness='different'."
        )
    if weight_fn is not None:
        check_weights(microbatches, weight_fn, state.scaler.scale)
    return flat, clip


def _check_microbatches(microbatches: Any) -> None:
    if not isinstance(microbatches, list):
        single = isinstance(microbatches, (Tensor, tuple, Mapping))
        several = not single and isinstance(microbatches, Iterable)
        cause = "one (input, target) batch was passed. " if single else ""
        cure = "`train_step(state, [batch], ...)`, a list of one"
        if several:
            cause = "an iterator or a loader of unknown length was passed. "
            cure = (
                "the microbatches of one step, `list(itertools.islice(batches, 4))`; for one batch "
                "a step, `for batch in loader: train_step(state, [batch], ...)`"
            )
        raise TypeError(
            f"microbatches is a {type(microbatches).__name__}; expected a list, which makes one "
            f"step. {cause and f'Likely cause: {cause}'}Fix: {cure}."
        )
    if not microbatches:
        raise ValueError(
            "microbatches is an empty list; a step needs at least one. Likely cause: a loader "
            "that ran out. Fix: end the loop then."
        )


def _check_parts(optimizer: Any, rule: Any) -> None:
    if what := not_made(optimizer, "init", "step"):
        raise TypeError(
            f"optimizer is {what}; expected an object with `init` and `step`. "
            f"Fix: from_torch(torch.optim.AdamW, lr=1e-3), or from_transformation(tx)."
        )
    check_rule(rule)
