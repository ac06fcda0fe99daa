"""The records of a step: the state, and its report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor

from .._loss_scale.rules import Rule, State, check_rule
from .._optim.optimizer import Optimizer, check_optimizer
from .._step.spike_guard import Guard, check_is_guard
from .._torch.autocast import outside_autocast
from .._tree import pytree
from .._tree.hints import document_fields, hint_attributes
from .._tree.matching import refuse_autograd_history
from .._tree.pytree import StateT, Tree, TreeT
from .._tree.scalars import short_repr
from .._tree.stacking import stacked


@document_fields
@hint_attributes
class TrainState(NamedTuple, Generic[TreeT, StateT]):
    """Everything that a step changes. Make it with `init_train_state`; a run resumed from a
    checkpoint of it continues with the same bits.

    Attributes:
        params: A tree of floating or complex tensors, the parameters.
        buffers: A tree of tensors, such as the running means of batch norms.
        opt_state: The state of the optimizer, for a class of torch.optim an `OptState`.
        scaler: The state of the rule, such as a `ScalerState`. Its `scale` is that of the next
            step.
        step: int64 []. The number of applied steps, without the skipped ones.
        rng: uint8 [n]. The state of a generator; `()` for torch's global generator.
        guard: The state of the guard, such as a `SpikeState`; `()` without one.
    """

    params: TreeT
    buffers: Tree
    opt_state: Tree
    scaler: StateT
    step: Tensor
    rng: Tensor | Any
    guard: Any = ()


def init_train_state(
    params: TreeT,
    buffers: Tree,
    optimizer: Optimizer,
    rule: Rule[State],
    rng: Tensor | None = None,
    guard: Guard[Any] | None = None,
) -> TrainState[TreeT, State]:
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
            torch has one generator a device for all threads, so steps with `rng` take turns.
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
    check_optimizer(optimizer)
    check_rule(rule)
    if guard is not None:
        check_is_guard(guard)
    tensors = pytree.tensors(params)
    if not tensors:
        raise ValueError(
            f"params has no tensor: {params!r}. Fix: `apply, params, "
            "buffers = make_functional(model)`."
        )
    if rng is not None and not (isinstance(rng, Tensor) and rng.dtype is torch.uint8):
        raise TypeError(
            f"rng must be the state of a generator, a uint8 tensor, got {type(rng).__name__}. "
            f"Fix: rng=torch.Generator({tensors[0].device.type!r}).manual_seed(0).get_state()."
        )
    refuse_autograd_history(params=params, buffers=buffers)
    device = tensors[0].device
    return TrainState(
        params=pytree.clone(params),
        buffers=pytree.clone(buffers),
        opt_state=optimizer.init(params),
        scaler=rule.init(device),
        step=torch.zeros((), dtype=torch.int64, device=device),
        rng=() if rng is None else rng.clone(),
        guard=() if guard is None else guard.init(device),
    )


# ---- the report of a step ------------------------------------------------------------------------


@document_fields
@hint_attributes
class StepInfo(NamedTuple):
    """The report of a step: 0-d tensors, and what `loss_fn` returns as aux, so that infos can be
    stacked. Reading one syncs; do it when you log.

    Attributes:
        loss: float32 [], float64 for a float64 loss. Unscaled, the weighted mean of the
            microbatches that count and are not dropped; with `window_size`, their sum divided by
            it.
        found_inf: bool []. True if the step was skipped, for an overflow or something else. That
            of `rule.update` is an overflow alone.
        scale: float32 []. The loss scale of this step.
        grad_norm: float32 [], float64 for float64 gradients. The norm of the averaged, unscaled
            gradients before clipping. Not finite if `found_inf`, unless `rejected`; `()` if
            `max_norm` is None.
        grad_amax: float32 []. The largest magnitude in these gradients, of a complex number that of
            its larger part, finite or not as `grad_norm`; `()` if the rule does not take amax.
        retries: int32 []. How often the window was run again.
        aux: A tuple with one entry a microbatch: what `loss_fn` returned as its third value,
            `(aux,)` for one microbatch. `()` if it returns two values.
        rejected: bool []. True if the guard alone skipped the step; `()` without a guard.
    """

    loss: Tensor
    found_inf: Tensor
    scale: Tensor
    grad_norm: Tensor | Any
    grad_amax: Tensor | Any
    retries: Tensor
    aux: tuple[Any, ...]
    rejected: Tensor | Any = ()


@outside_autocast()
def stack_infos(infos: Sequence[StepInfo]) -> StepInfo:
    """Equal to `StepInfo(*(torch.stack(values) for values in zip(*infos)))`, leaf by leaf: a run as
    one value, each tensor with one dimension more, [T] in front.

    Reads no value, so keep infos as they come and look at them now and then:

        infos += [info]                                             # each step
        if step % 100 == 0:
            run = stack_infos(infos)
            print(f"{step}: loss {run.loss[-100:].mean():.4f}, scale {run.scale[-1]:g}, "
                  f"{run.found_inf.sum()} skipped, norm {run.grad_norm[-1]:.3g}")

    To see what the scale follows, five lines:

        run = stack_infos(infos)
        plt.semilogy(run.scale, base=2, drawstyle="steps-post", label="scale")
        plt.semilogy(65504 / run.grad_amax, base=2, label="above this float16 overflows")
        plt.vlines(torch.where(run.found_inf)[0], *plt.ylim(), linestyles=":", label="skipped")
        plt.xlabel("step"), plt.legend(), plt.savefig("scale.png")

    Args:
        infos: A list of `StepInfo`, alike in what they have: `aux` has the same nesting of tensors
            of the same shapes in each, and what is not a tensor is equal in all.

    Returns:
        A `StepInfo`. Fields that are `()` stay `()`.

    Raises:
        ValueError: The list is empty, or infos differ in what they have or in shapes.
        TypeError: An item is not a `StepInfo`.

    Example:
        >>> import torch
        >>> fields = dict(found_inf=torch.tensor(False), scale=torch.tensor(8.0), grad_norm=())
        >>> fields |= dict(grad_amax=(), retries=torch.tensor(0), aux=())
        >>> infos = [StepInfo(loss=torch.tensor(loss), **fields) for loss in (2.0, 1.0)]
        >>> run = stack_infos(infos)
        >>> run.loss, run.grad_norm
        (tensor([2., 1.]), ())
    """
    if isinstance(infos, StepInfo) or not isinstance(infos, Iterable):
        got = "one StepInfo" if isinstance(infos, StepInfo) else short_repr(infos)
        raise TypeError(f"stack_infos takes a list, got {got}. Fix: `infos += [info]`.")
    infos = list(infos)
    if not infos:
        raise ValueError("stack_infos got no infos. Fix: `infos += [info]` after each step.")
    for index, info in enumerate(infos):
        if not isinstance(info, StepInfo):
            raise TypeError(
                f"infos[{index}] is {short_repr(info)}; expected a StepInfo. Fix: `state, info = "
                "train_step(...)`, then `infos += [info]`, not `infos += info`."
            )
    cause = (
        "Likely cause: a smaller last batch. Fix: return a mean or a sum in loss_fn, or "
        "`info._replace(aux=())` before stacking."
    )
    run: StepInfo = stacked("infos", infos, cause)
    return run
