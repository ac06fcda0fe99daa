"""The state of a training step, and its start."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor

from .._loss_scale.rules import Rule, State, checked_rule_traits
from .._optim.optimizer import Optimizer, check_optimizer
from .._step.spike_guard import Guard, check_is_guard
from .._tree import pytree
from .._tree.hints import document_fields, hint_attributes
from .._tree.matching import refuse_autograd_history
from .._tree.pytree import StateT, Tree, TreeT


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
    checked_rule_traits(rule)
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
