"""A parameter as the code of a user sees it: an argument, which is not to be written into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .._torch.private import ParameterLike, subclass_leaf

CURE = (
    "A parameter is an argument here. Cure: compute with a changed copy in forward, or change "
    "params between steps."
)


class Argument(ParameterLike):
    """A parameter as a forward sees it: in its memory and on its graph, but refusing to be written
    into.
    """

    at: str
    reads: list[Tensor]

    def detach(self) -> Tensor:
        return argument(self.at, super().detach())

    def _read(self) -> Tensor:
        # Versions do not count what is written through the real `.data`, and in inference mode
        # nothing.
        with torch.inference_mode(False):
            read = super().detach().clone()
        if not torch.compiler.is_compiling():
            vars(self).setdefault("reads", []).append(read)
        return read

    def _assign(self, value: Tensor) -> None:
        raise RuntimeError(f"the forward assigns to `.data` of its parameter {self.at}. {CURE}")

    data = property(_read, _assign)


def _refusing(method: str) -> Callable[..., Any]:
    def refuse(self: Argument, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"the forward would write into its parameter {self.at} (`{method}`). {CURE}"
        )

    return refuse


for _name in dir(Tensor):
    # __iadd__, and not __iter__
    _operator = _name.startswith("__i") and hasattr(Tensor, f"__{_name[3:]}")
    if (
        _operator
        or _name == "__setitem__"
        or (_name.endswith("_") and not _name.startswith("_") and _name != "requires_grad_")
    ):
        setattr(Argument, _name, _refusing(_name))


def argument(name: str, tensor: Tensor) -> Tensor:
    """`tensor` as an `Argument`, known to errors by `name`; one of a class of its own stays what it
    is.
    """
    if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
        return tensor
    alias = tensor.as_subclass(Argument)
    alias.at = name
    return alias


def leaf(name: str, tensor: Tensor) -> Tensor:
    """`argument(name, tensor.detach()).requires_grad_()`, at less of a price."""
    if type(tensor) is not Tensor:
        return argument(name, tensor.detach()).requires_grad_()
    alias: Argument = subclass_leaf(Argument, tensor, True)
    alias.at = name
    return alias
