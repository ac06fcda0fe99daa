"""The state of a class of torch.optim, and where it is in the states of other optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from .._tree import pytree
from .._tree.hints import document_fields
from .._tree.pytree import Tree


@document_fields
class OptState(NamedTuple):
    """The state of `from_torch` and `from_formula`. Its structure is final from `init` on, but for
    a class of your own, which makes slots in its first step.

    Attributes:
        applied: int64 []. The number of applied steps: `t` of the formulas, unless there are
            `counts`.
        slots: What the class keeps for each parameter, by torch's names: trees like the parameters,
            `{"exp_avg": ..., "exp_avg_sq": ...}`, with `()` in place of a parameter that lacks the
            slot, and `{"none": ...}` of `()` alone if it keeps nothing. A class of your own has its
            slots by parameter, `{"conv.weight": {...}}`.
        counts: A tree like the parameters of float32 [], the number of steps of each, with
            `from_torch(..., counts="each")`, or from a state dict in which they differ; else `()`.
        lr: float32 []. The rate that steps use (with a schedule a factor of it), with
            `in_state=("lr",)`; else `()`.
        hyper: The other settings in the state, float32 [] each, by name: `{"weight_decay": ...,
            "betas": (..., ...)}`; `()` if there are none.
        iteration: int64 []. The number of steps, skipped ones too, with `schedule_by="iteration"`;
            else `()`.
    """

    applied: Tensor
    slots: dict[str, Tree]
    counts: Tree = ()
    lr: Any = ()
    hyper: Any = ()
    iteration: Any = ()


# ---- the states of other optimizers --------------------------------------------------------------


def is_wrapped(state: Tree) -> bool:
    """Return True for the state of a wrapper, with another state inside. Tensors have a method
    `inner`.
    """
    return isinstance(state, tuple) and hasattr(state, "inner")


def without_wrappers(state: Tree) -> Tree:
    """Return the state of the innermost optimizer."""
    while is_wrapped(state):
        state = state.inner
    return state


def map_opt_states(
    change: Callable[[OptState, tuple[str, ...]], OptState], state: Tree, keys: tuple[str, ...] = ()
) -> Tree:
    """Return a state with `change(opt_state, keys)` in place of each state of torch's classes in
    it, wherever it is. `keys` are those of the dicts around it, such as the parts of a `partition`.
    """
    if isinstance(state, OptState):
        return change(state, keys)
    if isinstance(state, dict):
        children = {k: map_opt_states(change, part, (*keys, k)) for k, part in state.items()}
        return state if all(children[k] is part for k, part in state.items()) else children
    if not isinstance(state, (tuple, list)):
        return state
    parts = [map_opt_states(change, part, keys) for part in state]
    if all(new is old for new, old in zip(parts, state, strict=True)):
        return state
    return type(state)(*parts) if hasattr(state, "_fields") else type(state)(parts)


def with_step_counted(
    opt_state: OptState, skip: Tensor | None = None, *, in_place: bool = False
) -> OptState:
    """Return the state with one more applied step, unless it is skipped, and one more iteration:
    `in_place`, or in fresh memory with the settings that it holds.
    """
    applied, increment = opt_state.applied, 1 if skip is None else ~skip
    if in_place:
        counted = opt_state._replace(applied=applied.add_(increment))
    else:
        lr, hyper = pytree.map(Tensor.clone, (opt_state.lr, opt_state.hyper))
        counted = opt_state._replace(applied=applied + increment, lr=lr, hyper=hyper)
    return _count_iteration(counted, in_place=in_place)


def with_iteration_counted(state: Tree, *, in_place: bool) -> Tree:
    """Return the state after a skipped step: one more iteration, and nothing else changes."""
    return map_opt_states(lambda each, _: _count_iteration(each, in_place=in_place), state)


def _count_iteration(opt_state: OptState, *, in_place: bool) -> OptState:
    iteration = opt_state.iteration
    if not isinstance(iteration, Tensor):
        return opt_state
    return opt_state._replace(iteration=iteration.add_(1) if in_place else iteration + 1)
