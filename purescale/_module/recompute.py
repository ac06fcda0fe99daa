"""The copy of a model that a graph keeps: its backward may run a part of the forward again in it,
as torch.utils.checkpoint does.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from contextlib import ExitStack
from typing import Any

from torch import nn

from .._module.recipe import ModelCopy
from .._module.references import Unreadable
from .._torch import private


@private.only_inlined
def keep_modes(copy: ModelCopy) -> None:
    """Let what runs again run under the function modes of the call, even after they were exited."""
    if modes := private.function_modes():
        for module in copy.modules():
            vars(module)["forward"] = functools.partial(_call_under, modes, _weak_forward(module))


def _call_under(modes: list[Any], forward: Any, *args: Any, **kwargs: Any) -> Any:
    with ExitStack() as entered:
        active = private.function_modes()
        for mode in modes:
            if not any(mode is other for other in active):
                entered.enter_context(mode)
        return forward()(*args, **kwargs)


def _weak_forward(module: nn.Module) -> Any:
    """Return a function that returns the module's forward without keeping the module alive."""
    forward = module.forward
    if inspect.ismethod(forward) and forward.__self__ is module:
        return weakref.WeakMethod(forward)
    return lambda: forward


def forbid_recompute(copy: ModelCopy) -> None:
    """Leave placeholders in the modules of a call under a transform, whose tensors have no values
    once it has ended.
    """
    for name, places in copy.layout.places:
        why = (
            f"{name} of the model is read outside of a call of `apply`, where it has no value. "
            "Likely cause: a backward reads it through the module after torch.vmap or torch.func "
            "has ended, as torch.utils.checkpoint does. Fix: take the gradient inside of the "
            "transform, without checkpointing."
        )
        for place in places:
            if place.in_store:
                copy.contents[place.container][place.key] = Unreadable(why)


def explain_checkpointing(error: RuntimeError) -> None:
    """Add a note on checkpointing to torch's error about saved tensor hooks."""
    # Under torch.vmap torch names an internal class of its checkpoints.
    if "saved tensor hooks" in str(error) or "_NoopSaveInputs" in str(error):
        error.add_note(
            "The model checkpoints a part of itself (torch.utils.checkpoint), which torch.func "
            "does not support. Fix: turn that off before make_functional, in transformers by "
            "`model.gradient_checkpointing_disable()`; or use value_and_grad or train_step in "
            "eager mode, which call torch.autograd."
        )
