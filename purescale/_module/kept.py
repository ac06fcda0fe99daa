"""Skeletons that a graph keeps, as one does whose backward runs a part of the forward again."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections import deque
from contextlib import ExitStack
from typing import Any

from torch import nn

from .._module.meta_module import Skeleton
from .._module.registered import Tensors
from .._torch import private

# With the list that each goes back to. One thread at a time owns what it took out.
kept: deque[tuple[Skeleton, list[Skeleton]]] = deque()


@private.only_inlined
def keep(skeleton: Skeleton, idle: list[Skeleton]) -> None:
    """Leave a skeleton as it is until no graph keeps it, and then put it to the `idle` ones."""
    kept.append((skeleton, idle))


@private.only_inlined
def release() -> None:
    """Empty the skeletons that no graph keeps any more, so that they keep no tensors alive."""
    for _ in range(len(kept)):
        try:
            skeleton, idle = kept.popleft()
        except IndexError:  # another thread was faster
            return
        if skeleton.is_kept():
            kept.append((skeleton, idle))
        else:
            skeleton.rest.restore()
            idle.append(skeleton)


@private.only_inlined
def fill(skeleton: Skeleton, tensors: Tensors, before: Tensors) -> None:
    """Put there what the forward was given, for a backward that runs a part of it again. `before`:
    the buffers that it may have written into, as they were. What it does to them the second time
    is lost.
    """
    again = {name: buffer.clone() for name, buffer in before.items()}
    given = {**tensors, **again}
    for holder, key, name in skeleton.entries:
        holder[key] = given[name]
    if modes := private.function_modes():
        for module in skeleton.modules:
            vars(module)["forward"] = functools.partial(_under, modes, _weak(module))


def _under(modes: list[Any], forward: Any, *args: Any, **kwargs: Any) -> Any:
    """A forward under the modes of the call, which may have ended."""
    with ExitStack() as entered:
        active = private.function_modes()
        for mode in modes:
            if not any(mode is each for each in active):
                entered.enter_context(mode)
        return forward()(*args, **kwargs)


def _weak(module: nn.Module) -> Any:
    """A function that returns the module's forward and does not keep the module."""
    forward = module.forward
    if inspect.ismethod(forward) and forward.__self__ is module:
        return weakref.WeakMethod(forward)
    return lambda: forward


def explain(error: RuntimeError) -> None:
    """Add to torch's refusal what in a model it is about."""
    # torch 2.11 names a part of its checkpoints under torch.vmap.
    if "saved tensor hooks" in str(error) or "_NoopSaveInputs" in str(error):
        error.add_note(
            "The model checkpoints a part of itself (torch.utils.checkpoint), which torch.func "
            "does not follow. Fix: turn that off before make_functional, as by transformers' "
            "`model.gradient_checkpointing_disable()`; or let value_and_grad or train_step "
            "differentiate in eager mode, which torch.autograd does."
        )
