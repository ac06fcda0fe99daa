"""Skeletons held by an autograd graph whose backward runs a part of the forward again
(checkpointing).
"""

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

# Each with the list of idle skeletons that it goes back to. A thread owns what it has popped.
kept: deque[tuple[Skeleton, list[Skeleton]]] = deque()


@private.only_inlined
def keep(skeleton: Skeleton, idle: list[Skeleton]) -> None:
    """Keep a skeleton filled while a graph holds it. `release` then moves it to `idle`."""
    kept.append((skeleton, idle))


@private.only_inlined
def release() -> None:
    """Empty the skeletons that no graph holds any more, which frees their tensors."""
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
    """Put the tensors of the call back, for a backward that runs a part of the forward again.
    `before`: the buffers that the forward may write into, as they were. Second writes are dropped.
    """
    again = {name: buffer.clone() for name, buffer in before.items()}
    given = {**tensors, **again}
    for holder, key, name in skeleton.entries:
        holder[key] = given[name]
    if modes := private.function_modes():
        for module in skeleton.modules:
            vars(module)["forward"] = functools.partial(_under, modes, _weak(module))


def _under(modes: list[Any], forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a forward under the modes of the call, even after they were exited."""
    with ExitStack() as entered:
        active = private.function_modes()
        for mode in modes:
            if not any(mode is each for each in active):
                entered.enter_context(mode)
        return forward()(*args, **kwargs)


def _weak(module: nn.Module) -> Any:
    """Return a function that returns the module's forward without keeping the module alive."""
    forward = module.forward
    if inspect.ismethod(forward) and forward.__self__ is module:
        return weakref.WeakMethod(forward)
    return lambda: forward


def explain(error: RuntimeError) -> None:
    """Add a note on checkpointing to torch's error about saved tensor hooks."""
    # Under torch.vmap torch 2.11 names an internal class of its checkpoints.
    if "saved tensor hooks" in str(error) or "_NoopSaveInputs" in str(error):
        error.add_note(
            "The model checkpoints a part of itself (torch.utils.checkpoint), which torch.func "
            "does not support. Fix: turn that off before make_functional, in transformers by "
            "`model.gradient_checkpointing_disable()`; or use value_and_grad or train_step in "
            "eager mode, which call torch.autograd."
        )
