"""Which modules of a model are in train mode, as `model.train()` and `model.eval()` decide."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn


def modes_of(
    model: nn.Module, copied: Callable[[], list[nn.Module]]
) -> tuple[list[bool], list[bool]]:
    """Return the modes of `model.modules()` after `model.eval()` and after `model.train()`. If
    `model` is in train mode, what it has in eval mode stays there.

    `copied()` returns a new copy of these modules. A class may override `train`, to freeze a batch
    norm or to merge weights, so it is called on a copy.
    """
    modules = list(model.modules())

    def modes_after(call: Callable[[nn.Module], Any]) -> list[bool]:
        copy = copied()
        call(copy[0])
        return [module.training for module in copy]

    evaluating, training = [False for _ in modules], [True for _ in modules]
    if type(model).eval is not nn.Module.eval:
        evaluating = modes_after(lambda root: root.eval())
        training = modes_after(lambda root: _set_mode(root, True))
    elif any([type(module).train is not nn.Module.train for module in modules]):
        evaluating = modes_after(lambda root: _set_mode(root, False))
        training = modes_after(lambda root: _set_mode(root, True))
    if model.training:
        training = [t and module.training for t, module in zip(training, modules, strict=True)]
    return evaluating, training


def _set_mode(module: nn.Module, mode: bool) -> None:
    """Equal to `module.train(mode)`, where a `train` that takes something else is left alone."""
    if type(module).train is not nn.Module.train and _takes_mode(module):
        module.train(mode)
        return
    module.training = mode
    for child in module.children():
        _set_mode(child, mode)


def _takes_mode(module: nn.Module) -> bool:
    signature = inspect.signature(module.train)
    try:
        signature.bind(True)
    except TypeError:
        return False
    first = next(iter(signature.parameters.values()))
    return first.name == "mode" or isinstance(first.default, bool)
