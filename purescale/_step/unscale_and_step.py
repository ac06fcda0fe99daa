"""One step of an optimizer by hand, skipped or applied."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor

from .._distributed.process_group import Group
from .._grads.clip import as_clip_options, refuse_complex
from .._grads.measure import StatsOptions, measure
from .._loss_scale.rules import HasScale
from .._loss_scale.scaling import check_device_of_scale
from .._optim.optimizer import Optimizer, as_flat_optimizer
from .._step.decide import decide
from .._step.memory import decide_writes_by_hand
from .._torch.autocast import outside_autocast
from .._tree import pytree
from .._tree.gradients import Pending
from .._tree.hints import document_fields, hint_keywords
from .._tree.poison import poisons_donated
from .._tree.pytree import StateT, Tree, TreeT
from .._tree.scalars import as_flag


@document_fields
class Stepped(NamedTuple, Generic[TreeT, StateT]):
    """The result of `unscale_and_step`.

    Attributes:
        params: The parameters after the step, a tree like those before.
        opt_state: The state of the optimizer after the step.
        found_inf: bool []. True if the step was skipped.
        grad_norm: float32 [], float64 for float64 gradients. The norm of the unscaled gradients
            before clipping. Not finite if `found_inf`; `()` if `max_norm` is None.
        grad_amax: float32 []. The largest magnitude in these gradients, finite or not as
            `grad_norm`; `()` if it was not asked for.
    """

    params: TreeT
    opt_state: StateT
    found_inf: Tensor
    grad_norm: Tensor | Any
    grad_amax: Tensor | Any = ()


@outside_autocast()
@poisons_donated("params", "opt_state")
def maybe_step(
    optimizer: Optimizer,
    params: TreeT,
    grads: Tree,
    opt_state: StateT,
    found_inf: Tensor | bool,
    donate: bool = False,
) -> tuple[TreeT, StateT]:
    """Equal to `select(found_inf, (params, opt_state), optimizer.step(params, grads, opt_state))`.

    Args:
        optimizer: Anything with pure `init` and `step`, such as `from_torch(torch.optim.AdamW)`.
        params: The parameters.
        grads: Their unscaled gradients; they need not be finite if `found_inf` is True.
        opt_state: The state of the optimizer.
        found_inf: 0-d bool. If it is True, parameters and optimizer state come back bit for bit,
            but for the count of iterations that `schedule_by="iteration"` asks for; no value is
            read on an accelerator to decide this, but for a class with a `step` of your own, whose
            first step may add to its state.
        donate: `params` and `opt_state` may be overwritten; the caller gives them up. Same bits.
            Inside torch.compile, no two donated tensors may share memory, because that cannot be
            seen there.

    Returns:
        Parameters and optimizer state. Without `donate` they share no memory with the arguments.

    Raises:
        ValueError: `grads` do not match `params`, or `opt_state` belongs to other parameters.

    Example:
        >>> import torch
        >>> from purescale import from_torch
        >>> sgd = from_torch(torch.optim.SGD, lr=1.0)
        >>> params = {"w": torch.tensor([1.0])}
        >>> grads = {"w": torch.tensor([float("nan")])}
        >>> maybe_step(sgd, params, grads, sgd.init(params), torch.tensor(True))[0]
        {'w': tensor([1.])}

    Source of the rule: apply_if_finite of optax; the flag as a tensor from torch's fused
    optimizers.
    """
    flat_optimizer = as_flat_optimizer(optimizer)
    planned, gradients = flat_optimizer.plan_step_by_hand(params, grads, opt_state)
    skip = as_flag(found_inf, like=next(iter(planned.inputs.params), None))
    in_place = donate and decide_writes_by_hand(flat_optimizer, planned, gradients, [skip])[0]
    return flat_optimizer.run_step(planned.inputs, gradients, skip, in_place=in_place)


@hint_keywords
@outside_autocast()
@poisons_donated("params", "scaled_grads", "opt_state")
def unscale_and_step(
    optimizer: Optimizer,
    scaler: HasScale,
    params: TreeT,
    scaled_grads: Tree,
    opt_state: StateT,
    max_norm: float | Tensor | None = None,
    clip_value: float | Tensor | None = None,
    group: Group | None = None,
    donate: bool = False,
    norm_type: float = 2.0,
    amax: bool = False,
    norm_group: Group | None = None,
) -> Stepped[TreeT, StateT]:
    """Equal to `unscale_and_check`, `clip_by_global_norm`, `clip_by_value` and `maybe_step` in
    turn, in the fewest passes over memory.

    With `donate=True`, `from_torch`'s Adam, AdamW, SGD and Adagrad need one pass that measures the
    gradients, on an accelerator with `max_norm` two and one that keeps a quotient of scale and
    clipping in range, and one pass for the rest. Without it, with `clip_value`, and for half
    gradients, a pass that unscales comes between them. Flags, skips, counts and values are those of
    the parts, bit for bit, except with `max_norm` and these classes: values then agree to 1e-6,
    because unscaling and clipping are one division. On an accelerator and while tracing no value is
    read, but for an optimizer that runs a `step` of your own, as in `maybe_step`.

    Args:
        optimizer: As in `maybe_step`.
        scaler: The state that scaled the loss of these gradients.
        params: The parameters.
        scaled_grads: Their gradients, still scaled.
        opt_state: The state of the optimizer.
        max_norm, clip_value: The bounds, or None to leave that clipping out; `max_norm=math.inf`
            only measures. A tensor bound that is 0, negative or NaN skips the step.
        group: The ranks that hold the same parameters, with gradients of their own, as in
            `unscale_and_check`: an overflow on one of them skips the step on all.
        donate: `params`, `scaled_grads` and `opt_state` may be overwritten; the caller gives them
            up. Same bits.
        norm_type: As in `clip_by_global_norm`.
        amax: Also return `grad_amax` of the unscaled gradients, over `group`, for a rule that takes
            it. On a CPU, beside a norm, it takes a read of its own.
        norm_group: The ranks that hold other parts of the model, as `group` of
            `clip_by_global_norm`: norm, amax and flag are those of all parts, from one all-reduce.
            DTensors need no group for their own mesh.

    Returns:
        `Stepped(params, opt_state, found_inf, grad_norm, grad_amax)`. `grad_norm` is `()` if
        `max_norm` is None, and `grad_amax` is `()` without `amax`.

    Raises:
        ValueError: A number is not above 0, the trees do not match, or tensors are on several
            devices.
        TypeError: A leaf is not a floating or complex tensor, or `clip_value` meets complex
            gradients.

    Example:
        >>> import torch
        >>> from purescale import DynamicScale, from_torch
        >>> sgd, scaler = from_torch(torch.optim.SGD, lr=1.0), DynamicScale(init_scale=4.0).init()
        >>> params, grads = {"w": torch.tensor([1.0])}, {"w": torch.tensor([2.0])}
        >>> unscale_and_step(sgd, scaler, params, grads, sgd.init(params)).params
        {'w': tensor([0.5000])}
    """
    clip = as_clip_options(max_norm, clip_value, norm_type)
    flat_optimizer = as_flat_optimizer(optimizer)
    scale = scaler.scale

    # With the scaler, so that `all_readable` speaks of the scale too.
    planned, grads = flat_optimizer.plan_step_by_hand(params, scaled_grads, opt_state, scaler)
    leaves = grads.tensors if grads.source_leaves is None else grads.source_leaves
    check_device_of_scale(scale, params, leaves, "grads", grads.tensor_list)
    if clip.clip_value is not None and grads.source_leaves is not None:
        refuse_complex(params, grads.source_leaves, "grads")
    in_place = owned = False
    if donate:
        read_only = [*pytree.all_tensors(planned.flat_trees[-1].leaves), *clip.tensor_bounds]
        in_place, owned = decide_writes_by_hand(flat_optimizer, planned, grads, read_only)
    # Not owned under a compiler, which fuses what follows: a write would only add work. Nor beside
    # a user's code, which may raise: nothing is overwritten before it has returned.
    owned &= not (flat_optimizer.runs_user_code or torch.compiler.is_compiling())
    grads = grads._replace(pending=Pending(divisor=scale), owned=owned)
    stats_options = StatsOptions(
        clip.norm_type,
        amax=amax,
        group=group,
        norm_group=norm_group,
        all_readable=planned.all_readable,
    )
    stats, grads = measure(grads, scale, stats_options)
    decision = decide(stats, clip, grads)
    stepped = flat_optimizer.run_step(
        planned.inputs, decision.grads, decision.skip_or_none, in_place=in_place
    )
    return Stepped(*stepped, decision.skip, decision.grad_norm, decision.grad_amax)
