"""A whole training step over microbatches, and the state that it maps to the next."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _tree
from ._accum import OnNonfinite, check_on_nonfinite
from ._autocast import outside_autocast
from ._checks import shown
from ._clip import Clip, check_ordered, checked, told
from ._differentiate import LossFn
from ._headroom import check_rule, takes_amax, updated
from ._infos import StepInfo
from ._optim import Optimizer
from ._ranks import checked as checked_group
from ._ranks import together
from ._retry import gather_until_finite
from ._scaler import Rule, StaticScale, check_device
from ._select import choose, where
from ._spread import Read
from ._step import skip_or_step
from ._tree import Leaves, Tree
from ._window import BNUpdate, check_weights


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


def init_train_state(
    params: Tree, buffers: Tree, optimizer: Optimizer, rule: Rule[Any], rng: Tensor | None = None
) -> TrainState:
    """Equal to `TrainState(params, buffers, optimizer.init(params), rule.init(device),
    step=0, rng)`, in fresh memory.

    Off the graph of torch.autograd; inside torch.func it can be differentiated with respect to
    `params` and `buffers`. `device` is that of the parameters. `rng`: the state of a generator of
    that device, `torch.Generator(device).manual_seed(0).get_state()`; with it dropout is a function
    of the state and a step replays bit for bit. Without it (`()` in the state) torch's global
    generator is used and moves on.

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
    weights = _tree.tensors(params)
    if not weights:
        raise ValueError(
            f"init_train_state got params without a tensor, {params!r}. Cure: `apply, params, "
            "buffers = make_functional(model)`."
        )
    if rng is not None and not (isinstance(rng, Tensor) and rng.dtype is torch.uint8):
        raise TypeError(
            f"rng must be the state of a generator, a uint8 tensor, got {type(rng).__name__}. "
            f"Cure: rng=torch.Generator({weights[0].device.type!r}).manual_seed(0).get_state()."
        )
    _tree.refuse_graphs(params=params, buffers=buffers)
    device = weights[0].device
    return TrainState(
        params=_tree.clone(params),
        buffers=_tree.clone(buffers),
        opt_state=optimizer.init(params),
        scaler=rule.init(device),
        step=torch.zeros((), dtype=torch.int64, device=device),
        rng=() if rng is None else rng.clone(),
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
      taken at once. Where no try is, the scale ends as after one ordinary skip, and
      `"drop_microbatch"` steps with the try that lost the fewest. A loss that itself is not finite
      is not tried again. Not traceable.
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
      bytes of each other: what one refuses or holds otherwise, every rank refuses; `weight_fn` is
      called for that too. What `loss_fn` raises on one rank is an error on the others only when
      that rank ends, or the group's timeout does. DTensors, which are reduced over their own mesh,
      are refused.

    Inside the caller's `torch.autocast` only `loss_fn` and `weight_fn` are computed under it.

    Returns the next state and `StepInfo`. On an overflow parameters, optimizer state, buffers and
    `step` come back bit for bit; the scale backs off. A rule that takes amax gets that of the
    averaged, unscaled gradients before clipping. Reads no tensor's value, so nothing syncs;
    works under `torch.compile(fullgraph=True)`, `torch.vmap` and `torch.func.grad`. Parameters that
    the loss does not use have a gradient of 0.

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
    # What is no TrainState is about to be refused.
    params, buffers, before = (
        _tree.flat(getattr(state, name, ())) for name in ("params", "buffers", "scaler")
    )
    group = checked_group(
        group,
        lambda: _check_call(
            state,
            params.leaves,
            microbatches,
            optimizer,
            rule,
            checked(max_norm, clip_value, norm_type),
            on_nonfinite,
            bn_update,
            max_retries,
            weight_fn if group is not None else None,
        ),
        lambda: (
            f"{max_retries=}, {on_nonfinite=}, {bn_update=}, max_norm={_told(max_norm)}, "
            f"clip_value={_told(clip_value)}, norm_type={_told(norm_type)}, rule={_told(rule)}"
        ),
        lambda: {"params": state.params, "buffers": state.buffers, "scaler": state.scaler},
    )
    clip = checked(max_norm, clip_value, norm_type)
    norm = None if max_norm is None else clip.norm_type
    scaler, gathered, rng, retries = gather_until_finite(
        *(params, buffers, before, state.rng),
        *(microbatches, loss_fn, rule, weight_fn),
        *(on_nonfinite, bn_update, max_retries, norm),
        group,
    )
    if group is not None:
        gathered = together(
            *(gathered, params, buffers, scaler.scale, norm),
            takes_amax(rule),
            group,
        )
    skip, overflow = gathered.found_inf, gathered.overflow
    # Where no try was finite, the scale ends as after one ordinary skip.
    used = scaler if retries == 0 else where(overflow, state.scaler, scaler, donate=False)
    next_scaler = updated(rule, used, overflow, gathered.amax)
    # a window that its weights alone made empty leaves the scale as it was
    if overflow is not skip:
        next_scaler = where(skip & ~overflow, state.scaler, next_scaler, donate=False)
    else:
        name = "the state that the rule gave"
        _tree.paired(state.scaler, next_scaler, "state.scaler", name, flat=before)

    # A gradient may be the very tensor that a custom backward returned, and parts of a state may
    # share memory.
    keep: list[Tensor] = []
    if not _tree.traced():
        known_leaves = (*buffers.leaves, *gathered.buffers, *before.leaves, *gathered.seen)
        tried = scaler if retries else ()
        keep = [leaf for leaf in known_leaves if isinstance(leaf, Tensor)]
        keep += _tree.all_tensors((next_scaler, state.step, state.rng, gathered.aux, tried))
    out = skip_or_step(
        optimizer,
        state.params,
        gathered.grads,
        state.opt_state,
        clip,
        scaler.scale,
        donate=donate,
        scaled=gathered.scaled,
        spent=True,
        keep=keep,
        known=Read(skip, gathered.norm, (), gathered.finite),
    )
    # before buffers are written, whose memory they may stand in
    step, scale = state.step + (1 if gathered.finite else ~skip), scaler.scale.clone()
    bad = False if gathered.finite else skip
    new_buffers = choose(bad, buffers.leaves, gathered.buffers, donate=donate)
    new_state = TrainState(
        params=out.params,
        buffers=buffers.structure.unflatten(new_buffers),
        opt_state=out.opt_state,
        scaler=next_scaler,
        step=step,
        rng=rng,
    )
    info = StepInfo(
        loss=gathered.loss,
        found_inf=skip,
        scale=scale,
        grad_norm=out.grad_norm,
        grad_amax=told(gathered.amax, skip),
        retries=torch.full((), retries, dtype=torch.int32, device=skip.device),
        aux=gathered.aux,
    )
    if donate:
        _tree.poison(state, keep=(new_state, info, microbatches, max_norm, clip_value))
    return new_state, info


def _check_call(
    state: TrainState,
    leaves: Leaves,
    microbatches: Any,
    optimizer: Any,
    rule: Any,
    clip: Clip,
    on_nonfinite: str,
    bn_update: str,
    max_retries: Any,
    weight_fn: Callable[[Any], float | Tensor] | None,
) -> None:
    if not isinstance(state, TrainState):
        raise TypeError(
            f"train_step takes a TrainState, got {type(state).__name__}. "
            f"Cure: `state = init_train_state(params, buffers, optimizer, rule)`."
        )
    _check_parts(optimizer, rule)
    if not isinstance(microbatches, list):
        raise TypeError(
            f"microbatches is a {type(microbatches).__name__}; expected a list, one step for all "
            "of it. Likely cause: one (input, target) batch was passed. Cure: `train_step(state, "
            "[batch], ...)`."
        )
    if not microbatches:
        raise ValueError(
            "microbatches is an empty list; a step needs at least one. Likely cause: a loader "
            "that ran out. Cure: end the loop there."
        )
    _tree.check_parameters(state.params, leaves, "state.params")
    check_device(state.scaler.scale, state.params, leaves, "state.params")
    if clip.value is not None:
        check_ordered(state.params, leaves, "params")
    check_on_nonfinite(on_nonfinite)
    if bn_update not in ("each", "window"):
        raise ValueError(f"bn_update must be 'each' or 'window', got {bn_update!r}.")
    if (
        isinstance(max_retries, bool)
        or not isinstance(max_retries, numbers.Integral)
        or max_retries < 0
    ):
        raise ValueError(
            f"max_retries must be a whole number, 0 or more, got {shown(max_retries)}."
        )
    if max_retries and isinstance(rule, StaticScale):
        raise ValueError(
            f"max_retries={max_retries} with {rule!r}, whose scale never moves: every try would "
            "overflow again. Cure: DynamicScale(), or max_retries=0."
        )
    if max_retries and _tree.traced():
        raise ValueError(
            "max_retries reads the flag on the host, which a traced step cannot. Cure: "
            "max_retries=0 under torch.compile and torch.func; the next step is taken at the "
            "lower scale anyway."
        )
    if not isinstance(state.rng, tuple) and _tree.traced():
        raise ValueError(
            "a step with rng in its state cannot be traced: torch's generators are outside of "
            "torch.compile and torch.func. Cure: state._replace(rng=()), torch.manual_seed before "
            "the step, and for vmap randomness='different'."
        )
    if weight_fn is not None:  # before others wait for what follows from it
        check_weights(microbatches, weight_fn, state.scaler.scale)


def _told(setting: Any) -> str:
    """What ranks compare of a setting, by which one could look ahead or try again alone: not where
    a tensor or an object stands.
    """
    if dataclasses.is_dataclass(setting):
        values = [getattr(setting, field.name) for field in dataclasses.fields(setting)]
        return f"{type(setting).__name__}({', '.join(map(_told, values))})"
    return str(float(setting)) if isinstance(setting, numbers.Real) else type(setting).__name__


def _check_parts(optimizer: Any, rule: Any) -> None:
    if isinstance(optimizer, type) or not (
        callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "step", None))
    ):
        got = (
            f"the class {optimizer.__name__}"
            if isinstance(optimizer, type)
            else type(optimizer).__name__
        )
        raise TypeError(
            f"optimizer is {got}; expected an object with `init` and `step`. "
            f"Cure: from_torch(torch.optim.AdamW, lr=1e-3), or from_transformation(tx)."
        )
    check_rule(rule)
