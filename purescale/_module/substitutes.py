"""What a copy has in place of an object of the model that would do harm in it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .._torch import private


class LocalSyncBatchNorm(nn.SyncBatchNorm):
    """A SyncBatchNorm that uses the statistics of this rank alone inside a mode with
    `local_statistics`; these are reduced over ranks afterwards.
    """

    def forward(self, input: Tensor) -> Tensor:
        is_local = any(hasattr(mode, "local_statistics") for mode in private.function_modes())
        out: Tensor = (nn.BatchNorm1d if is_local else nn.SyncBatchNorm).forward(self, input)
        return out


def flatten_nothing() -> None:
    """Do nothing, in place of `RNNBase.flatten_parameters`."""


COMPUTED_TENSOR_ERROR = (
    "{} of the model was computed from a parameter or buffer, or is a view of one, made before "
    "make_functional: it would not change with params. Fix: compute it in forward; if it is state "
    "that forward keeps, name it in `make_functional(model, state_attributes=...)`."
)


class Unreadable:
    """A placeholder that refuses arithmetic, for a tensor that has no value in a call."""

    def __init__(self, why: str) -> None:
        self.why = why

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(self.why)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = private.pytree.tree_leaves((args, kwargs))
        next(leaf for leaf in leaves if isinstance(leaf, cls))._refuse()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # what Python itself asks for, such as __deepcopy__
        self._refuse()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = _refuse
    __rmatmul__ = __truediv__ = __rtruediv__ = __pow__ = __neg__ = __getitem__ = _refuse
    __bool__ = __len__ = __iter__ = __float__ = __int__ = _refuse
