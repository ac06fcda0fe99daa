"""Placeholders for tensors that have no value in a call."""

from __future__ import annotations

from typing import Any

from .._torch import private


class Unreadable:
    """A placeholder that refuses every use, for a tensor that has no value in a call."""

    def __init__(self, why: str) -> None:
        vars(self)["why"] = why

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(vars(self)["why"])

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves = private.pytree.tree_leaves((args, kwargs))
        next(leaf for leaf in leaves if isinstance(leaf, cls))._refuse()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # what Python itself asks for, such as __deepcopy__
        self._refuse()

    def __reduce__(self) -> Any:
        return Unreadable, (vars(self)["why"],)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = _refuse
    __rmatmul__ = __truediv__ = __rtruediv__ = __pow__ = __neg__ = __getitem__ = _refuse
    __bool__ = __len__ = __iter__ = __float__ = __int__ = _refuse
