"""A whole training step over microbatches, and the state that it maps to the next."""

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
    """Everything a step changes. Make it with `init_train_state`; a checkpoint of it replays the
    run.
    """

    params: Tree
    buffers: Tree
    opt_state: Any
    scaler: Any
    step: Tensor  # int64 []: steps applied, skipped ones not counted
    rng: Any  # uint8 [n], a generator's state; () for torch's global generator
    guard: Any = ()  # what a guard remembers; () without one


def init_train_state(
    params: Tree,
    buffers: Tree,
    optimizer: Optimizer,
    rule: Rule[Any],
    rng: Tensor | None = None,
    guard: Guard[Any] | None = None,
) -> TrainState:
    """Equal to `TrainState(params, buffers, optimizer.init(params), rule.init(device),
    step=0, rng, guard.init(device))`, in fresh memory.

    Off the graph of torch.autograd; inside torch.func it can be differentiated with respect to
    `params` and `buffers`. `device` is that of the parameters. `rng`: the state of a generator of
    that device, `torch.Generator(device).manual_seed(0).get_state()`; with it dropout is a function
    of the state and a step replays bit for bit. Without it (`()` in the state) torch's global
    generator is used and moves on. `guard`: that of `train_step`, such as `SpikeGuard()`.

    Raises `ValueError` for params without a tensor, `TypeError` for integer parameters or an `rng`
    that is no generator state.

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
            f"init_train_state got params without a tensor, {params!r}. Fix: `apply, params, "
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
    """Syncs with the host only where `max_retries` is above 0, and over a `group` whose ranks meet
    on a CPU. Equal to, with one microbatch and `s = state`:

        scaled = lambda params: scale_loss(s.scaler, loss_fn(params, s.buffers, microbatch)[0])
        out = unscale_and_step(optimizer, s.scaler, s.params, grad(scaled)(s.params),
                               s.opt_state, max_norm, clip_value)
        buffers = select(out.found_inf, s.buffers, new_buffers)
        s = TrainState(out.params, buffers, out.opt_state, rule.update(s.scaler, out.found_inf),
                       s.step + ~out.found_inf, rng)

    Arguments:
    - `state`: from `init_train_state`, or what the last step returned.
    - `microbatches`: a list; its gradients are averaged in float32 and make one step. For one
      batch: `[batch]`. The mean loss of each is scaled whole, where torch's recipe scales
      `loss / k`: with k of them a dynamic scale settles k times lower than GradScaler's, at the
      same gradients. `interop.torch_amp.from_state_dict(d, accumulated=k)` takes one over.
    - `loss_fn(params, buffers, microbatch)` returns `(loss, new_buffers)` or
      `(loss, new_buffers, aux)`; loss unscaled, real, of one element. Buffers thread through the
      microbatches; return `buffers` where nothing changes them.
    - `weight_fn(microbatch)`: its weight in the average, a number or a 0-d tensor, not negative:
      samples or tokens. Default: equal. What has weight 0 counts for nothing. A step whose weights
      are all 0 leaves all but `rng` as it was. A tensor that is negative or not finite drops what
      an overflow would drop, and leaves the scale alone.
    - `on_nonfinite`: what one overflowing microbatch drops, `"drop_window"` or `"drop_microbatch"`
      (with what it did to the buffers), as in `accumulated_grads`. Either way the scale backs off
      once.
    - `max_norm`, `norm_type`, `clip_value`: as in `clip_by_global_norm` and `clip_by_value`, on the
      averaged, unscaled gradients.
    - `max_retries`: above 0 it syncs with the host. A window that overflows is gone through again,
      the same microbatches with the same random numbers of torch's generators, at the scale that
      the rule backs off to, until it is finite: the step is the one that this scale would have
      taken at once. If every retry overflows, the scale backs off once, as after a normal skip,
      and `"drop_microbatch"` steps with the try that lost the fewest. A loss that itself is not
      finite is not tried again. Not traceable.
    - `donate`: the tensors of `state` may be overwritten; the caller gives them up. Same bits, as
      in `maybe_step`.
    - `bn_update="each"`: batch norm updates its running averages with every microbatch, so k of
      them weigh as k steps. `"window"`: once, with the pooled statistics of the microbatches that
      count.
    - `group`: the ranks that make this step together, each with microbatches of its own, equal to
      one process with all of them: `info` is that of all (`aux` stays local), one flag decides,
      weights count over all ranks, a rank may have more microbatches than another, or weight 0.
      Gradients are reduced once, with the last microbatch, and ten numbers with them. Buffers are
      averaged by weight (with `"window"` their statistics are those of all), of integers the
      largest, so that every rank ends with the same. Ranks that meet on a CPU (gloo) first read 16
      bytes of each other: an error on one rank raises on all, and so does a difference in a
      setting of `optimizer` or `rule`, the structure of the state, or a scale, rate or count in it;
      `weight_fn` is called for that too. What `loss_fn` raises on one rank is an error on the
      others only when that rank ends, or the group's timeout does. DTensors, which are reduced over
      their own mesh, are refused.
    - `guard`: looks at the loss of the step and, with `max_norm`, at the norm before clipping, and
      may reject it: `SpikeGuard()`, over a state of `init_train_state(..., guard=guard)`. A
      rejected step is skipped as an overflow is, but the rejection itself does not lower the loss
      scale; an overflow in the same window does, of a microbatch that was dropped or of a try
      before the last. `info` has `found_inf` and `rejected`, and the loss and the norm that were
      rejected. It judges a window as a whole, and over a group all ranks alike. A step that is
      skipped for another reason leaves `state.guard` as it was. `check_guard(state.guard, n)`
      raises after more than n rejections in a row.

    - `unroll=False`: under `torch.compile` (torch 2.13) the compiler follows the gradient of one
      microbatch and calls its code for all of the same structure, shapes, strides and dtypes, so
      that seconds to compile hardly grow with their number. Same numbers, for a `loss_fn` that
      changes nothing outside of it and returns no aux. Elsewhere, and with what `docs/limits.md`
      lists, the window is unrolled as ever.

    Inside the caller's `torch.autocast` only `loss_fn` and `weight_fn` are computed under it.

    Returns the next state and `StepInfo`. On an overflow parameters, optimizer state, buffers and
    `step` come back bit for bit; the scale backs off. A rule that takes amax gets that of the
    averaged, unscaled gradients before clipping; where the loss itself is not finite it gets
    `found_inf=False` and NaN, as no scale could have cured it. Reads no tensor's value, so nothing
    syncs; works under `torch.compile(fullgraph=True)`, `torch.vmap` and `torch.func.grad`.
    Parameters that the loss does not use have a gradient of 0, so momentum and weight decay still
    move them, where torch leaves a parameter without a gradient alone. A derivative with respect to
    the state goes through torch.func, or by `.backward()` with an optimizer that is
    `differentiable=True`.

    Raises before any work is done: `TypeError` and `ValueError` for microbatches that are no list
    or an empty one and for settings; before anything is changed: for what `loss_fn` returns.

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
    # Over a group weights are asked for before others wait for what follows from them.
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
    """What of a state is needed flat, flattened once."""

    params: Flat
    buffers: Flat
    scaler: Flat
    opt_state: Flat


def _stages(
    options: StepOptions, state: TrainState, flat: _FlatState, microbatches: list[Any]
) -> tuple[TrainState, StepInfo]:
    """The stages of a step, one after the other; each is told of the whole step by one record."""
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
    """What must not be written into with the parameters: parts of a state may share memory, and
    microbatches may be made of it.
    """
    if not options.donate or traced():  # where memory is not compared
        return []
    held: Any = (flat.buffers.leaves, window.buffers, flat.scaler.leaves, state.step, state.rng)
    if options.guard is not None:
        held += (state.guard,)
    return [*window.seen, *options.clip.bounds, *_tree.all_tensors(held)]


_FROM_RULE = "the state that the rule gave"


def _next_scaler(
    options: StepOptions, before: Flat, used: Any, window: WindowGrads, outcome: Outcome
) -> Any:
    """The loss scale after the step, updated last. `used`: the state that scaled the loss."""
    overflow, amax = _told_to_rule(options, window, outcome)
    # Where no try was finite, the scale ends as after one ordinary skip.
    start = used if used is before.tree else where(overflow, before.tree, used)
    updated_scaler = call_rule(options.rule, start, overflow, amax)
    new = _tree.matching_leaves(
        before.tree, updated_scaler, "state.scaler", _FROM_RULE, flat=before
    )[1]
    # A compiler has no `not` of a tuple.
    only_an_overflow_skips = (
        window.must_skip is None and len(options.clip.bounds) == 0 and options.guard is None
    )
    if not (only_an_overflow_skips or outcome.decision.skip_on_host is False):
        # Weights that leave nothing, a bound that is none and a guard leave the scale as it was.
        # A lower scale at which a retry was finite stays.
        old = before.leaves if start is before.tree else _tree.flatten(start)[0]
        new = choose(outcome.found_inf & ~window.overflow, old, new)
    elif not traced():  # a rule may return what it was given
        given = [*before.leaves, overflow, *([amax] if options.takes_amax else [])]
        new = _tree.leaves_apart(new, given)
    return before.structure.unflatten(new)


def _told_to_rule(
    options: StepOptions, window: WindowGrads, outcome: Outcome
) -> tuple[Tensor, Any]:
    """The flag and the largest gradient for `rule.update`.

    A rule that takes amax is not told of an overflow where the loss itself was not finite, because
    no scale could have cured it. Where such a loss skips the step, nothing is known: amax is NaN.
    """
    overflow = window.overflow
    if not options.takes_amax:
        return overflow, ()
    # A microbatch that is dropped by itself has no part in the loss of the step.
    if options.on_nonfinite == "drop_microbatch":
        overflow = window.retryable
    bad = overflow & (window.loss.abs() < math.inf)
    amax: Any = window.stats.amax  # type: ignore[union-attr]
    return bad, torch.where(outcome.found_inf & ~bad, torch.nan, amax)


def _judged(options: StepOptions, state: TrainState, window: WindowGrads) -> tuple[Any, Tensor]:
    """What the guard makes of the step, before anything moves: its state before and after, paired,
    and whether to reject. It is told what `StepInfo` tells.
    """
    norm: Any = window.stats.norm  # type: ignore[union-attr]
    norm = () if norm is None else norm.to(factor_dtype(window.grads.tensors))
    new, bad = call_guard(options.guard, state.guard, window.loss, norm)
    return _tree.matching_leaves(
        state.guard, new, "state.guard", "the state that the guard gave"
    ), bad


def _next_guard(states: Any, outcome: Outcome) -> Any:
    """The state of the guard after the step: what it said, unless the step was skipped for another
    reason.
    """
    old, new, structure = states
    return structure.unflatten(choose(outcome.found_inf & ~outcome.rejected, old, new))


def _next_buffers(
    options: StepOptions, decision: Decision, old: Leaves, window: WindowGrads, rest: Any
) -> Leaves:
    """The buffers after the step, in memory of the state's own: a loss may keep the tensors that it
    returned, or return them as aux too. `rest`: that of the new state, into which they are not
    written.
    """
    skip, donate = decision.skip_on_host, options.donate
    if skip is False or (skip and not donate):
        return copies(old if skip else window.buffers)
    if not traced():  # off the graph of buffers that require a gradient
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
    """The state, flat, and the bounds of the step, once everything is checked."""
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
            f"max_retries={max_retries} with {rule!r}, whose scale never moves: every try would "
            "overflow again. Fix: DynamicScale(), or max_retries=0."
        )
    if max_retries and traced():
        raise ValueError(
            "max_retries reads the flag on the host, which a traced step cannot. Fix: "
            "max_retries=0 under torch.compile and torch.func; the next step is taken at the "
            "lower scale anyway."
        )
    if not isinstance(state.rng, tuple) and traced():
        raise ValueError(
            "a step with rng in its state cannot be traced: torch's generators are outside of "
            "torch.compile and torch.func. Fix: state._replace(rng=()), torch.manual_seed before "
            "the step, and for vmap randomness='different'."
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
            cause = "an iterator or a loader was passed, whose length is not known. "
            cure = (
                "`list(microbatches)` of those of one step, as `list(itertools.islice(batches, "
                "4))`; for one batch a step, `for batch in loader: train_step(state, [batch], ...)`"
            )
        raise TypeError(
            f"microbatches is a {type(microbatches).__name__}; expected a list, one step for all "
            f"of it. {cause and f'Likely cause: {cause}'}Fix: {cure}."
        )
    if not microbatches:
        raise ValueError(
            "microbatches is an empty list; a step needs at least one. Likely cause: a loader "
            "that ran out. Fix: end the loop there."
        )


def _check_parts(optimizer: Any, rule: Any) -> None:
    if what := not_made(optimizer, "init", "step"):
        raise TypeError(
            f"optimizer is {what}; expected an object with `init` and `step`. "
            f"Fix: from_torch(torch.optim.AdamW, lr=1e-3), or from_transformation(tx)."
        )
    check_rule(rule)
