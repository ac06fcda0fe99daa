"""Norms in another dtype than their inputs, a SyncBatchNorm that can use the statistics of one
rank, and what makes a module a norm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .._torch import private
from .._torch.dtypes import HALF
from .._tree.pytree import cast

# For each norm: the positions of the running statistics that it updates in place.
_NORMS: dict[Callable[..., Any], tuple[tuple[int, str], ...]] = {
    **dict.fromkeys((F.layer_norm, F.group_norm, F.rms_norm), ()),
    **dict.fromkeys((torch.layer_norm, torch.group_norm, torch.rms_norm), ()),
    **dict.fromkeys((F.batch_norm, F.instance_norm), ((1, "running_mean"), (2, "running_var"))),
    **dict.fromkeys(
        (torch.batch_norm, torch.instance_norm), ((3, "running_mean"), (4, "running_var"))
    ),
}


class NormsIn(TorchFunctionMode):
    """A mode in which norms with an input in one of `input_dtypes` compute in `dtype`: input,
    weights and running statistics are cast. The output has the dtype of the input.
    """

    def __init__(self, dtype: torch.dtype, input_dtypes: tuple[torch.dtype, ...]) -> None:
        super().__init__()
        self.dtype, self.input_dtypes = dtype, input_dtypes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        x = args[0] if args else kwargs.get("input")
        is_cast = isinstance(x, Tensor) and x.dtype in self.input_dtypes
        if func not in _NORMS or not is_cast:
            # Tensor.unflatten calls super(), which Dynamo does not follow in a mode.
            func = torch.unflatten if func is Tensor.unflatten else func
            return func(*args, **kwargs)

        cast_args, cast_kwargs = list(cast(args, self.dtype)), cast(kwargs, self.dtype)
        out = func(*cast_args, **cast_kwargs)
        # In eval mode the statistics are not written back, because a cast to a narrower dtype and
        # back would change them.
        training = kwargs.get("training", kwargs.get("use_input_stats", func is F.instance_norm))
        updates = args[5] if len(args) > 5 else training
        for position, name in _NORMS[func] if updates else ():
            by_position = position < len(args)
            stored = args[position] if by_position else kwargs.get(name)
            computed = cast_args[position] if by_position else cast_kwargs.get(name)
            if stored is not None and computed is not stored:
                stored.copy_(computed)
        return out.to(x.dtype)


class norms_in_float32(NormsIn):  # noqa: N801, a context manager is used like a function
    """Equal to calling every norm of torch.nn.functional inside as `norm(x.float()).to(x.dtype)`.

    A context manager, for batch, layer, rms, group and instance norm. Only norms with half inputs
    change. Their weights are cast too; running statistics are updated in float32 and keep their
    dtype. Works under compile and vmap, where half BatchNorm otherwise raises.

    Example:
        >>> import torch
        >>> with norms_in_float32():
        ...     torch.nn.functional.layer_norm(torch.tensor([6e4, -6e4], dtype=torch.float16), (2,))
        tensor([ 1., -1.], dtype=torch.float16)

    Source of the rule: mmpose's patch_norm_fp32, apex's keep_batchnorm_fp32.
    """

    def __init__(self) -> None:
        super().__init__(torch.float32, HALF)


class LocalSyncBatchNorm(nn.SyncBatchNorm):
    """A SyncBatchNorm that uses the statistics of this rank alone inside a mode with
    `local_statistics`; these are reduced over ranks afterwards.
    """

    def forward(self, input: Tensor) -> Tensor:
        if any(getattr(mode, "local_statistics", False) for mode in private.function_modes()):
            out: Tensor = nn.BatchNorm1d.forward(self, input)
            return out
        return super().forward(input)


# ---- the norms of a model ------------------------------------------------------------------------


def norm_params(model: nn.Module, first_name_of: dict[int, str]) -> frozenset[str]:
    """Return the names of the weights and biases of normalisation layers."""
    norms = filter(_is_norm, model.modules())
    return frozenset(first_name_of[id(p)] for norm in norms for p in norm.parameters())


def _is_norm(module: nn.Module) -> bool:
    # The second holds for batch and instance norms, also those that other libraries derive from
    # torch's own base class.
    return isinstance(module, (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)) or (
        hasattr(module, "track_running_stats") and hasattr(module, "running_mean")
    )
