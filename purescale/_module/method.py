"""The forward, or another method, which a call of `apply` runs in its copy of the model."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

from torch import nn

from .._tree import tree as _tree

Method = str | Callable[..., Any] | None


class Call(NamedTuple):
    """The arguments of a call of `apply`, and what it runs with them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    train: bool
    method: Method  # None: the module itself

    def run(self, root: nn.Module) -> Any:
        """Return what the method of a copy of the model returns."""
        function: Any = self.method
        if function is None:
            return root(*self.args, **self.kwargs)
        if isinstance(function, str):
            return _method_of(root, function)(*self.args, **self.kwargs)
        return function(root, *self.args, **self.kwargs)


def check_method(method: Any) -> None:
    """Refuse what cannot be a method of a copy."""
    if isinstance(method, MethodType) and isinstance(method.__self__, nn.Module):
        cls, name = type(method.__self__).__name__, method.__name__
        raise TypeError(
            f"method is {cls}.{name} of a module, bound to its live tensors; expected a name or a "
            f"function of the module. Fix: method={name!r}, or method={cls}.{name}."
        )
    if not (isinstance(method, str) or callable(method)):
        raise TypeError(
            f"method is {type(method).__name__} {method!r}; expected the name of a method of the "
            'model, or a function whose first argument is the module. Fix: method="decode".'
        )


def _method_of(root: nn.Module, name: str) -> Callable[..., Any]:
    function = getattr(root, name, None)
    if not callable(function):
        names = [key for key in vars(type(root)) if not key.startswith("_")]
        names += [key for key, _ in root.named_children()]
        raise TypeError(
            f"method={name!r} is not a method of {type(root).__name__}, which has "
            f"{_tree.join_names(names)}. Likely cause: a typing error, or a method of a "
            "part. Fix: for a method of a part, "
            f"`method=lambda model, *args: model.part.{name}(*args)`."
        )
    return function
