"""Capture of the input statistics of each batch norm in a forward, with the name of its layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._module.registered import Tensors
from .._torch import private

ApplyFn = Callable[..., tuple[Any, Tensors]]


class BatchNormCall(NamedTuple):
    """One call of a batch norm in train mode."""

    running_mean: Tensor  # the argument itself: its identity tells the layer
    mean: Tensor
    var: Tensor  # unbiased; 0 for a single value
    values: int  # per channel
    momentum: float


class _Arguments(NamedTuple):
    """The arguments of `torch.nn.functional.batch_norm`."""

    input: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None = None
    bias: Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5


_ATEN = "input weight bias running_mean running_var training momentum eps cudnn_enabled"
_SIGNATURES: dict[Any, Sequence[str]] = {
    F.batch_norm: _Arguments._fields,
    torch.batch_norm: _ATEN.split(),
}

# Functions that draw random numbers in training: the position and name of the argument that decides
# it, and its value in eval mode.
_RANDOM: dict[Any, tuple[int, str, Any]] = {
    **dict.fromkeys((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d), (2, "training", False)),
    **dict.fromkeys((F.alpha_dropout, F.feature_alpha_dropout), (2, "training", False)),
    **dict.fromkeys(
        (torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout),
        (2, "train", False),
    ),
    F.rrelu: (3, "training", False),
    F.scaled_dot_product_attention: (4, "dropout_p", 0.0),
    F.multi_head_attention_forward: (13, "training", False),
}


_INTO = {Tensor.copy_, private.listops.copy_}  # the target is the first argument
_COPIES = {Tensor.clone, private.clone_list, *_INTO}


class CaptureBatchNorm(TorchFunctionMode):
    """A mode that records each call of a batch norm in train mode in `calls`. It does not change
    what the forward computes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[BatchNormCall] = []
        self.copies: list[tuple[Tensor, Tensor]] = []

    def __enter__(self) -> Self:  # torch.compile takes what torch's own returns for another object
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _COPIES and len(args) > (func is Tensor.copy_):
            return self._copied(func, args, kwargs)
        if func not in _SIGNATURES:
            return self._call(func, args, kwargs)
        arguments = {**dict(zip(_SIGNATURES[func], args, strict=False)), **kwargs}
        arguments.pop("cudnn_enabled", None)
        return self._batch_norm(_Arguments(**arguments))

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function that is not a batch norm."""
        return func(*args, **kwargs)

    def _copied(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Copy, and record that a copy of running statistics belongs to the same layer: a policy
        casts them and copies them back, and a second `apply` clones those of the first.
        """
        out = func(*args, **kwargs)
        source, copy = (args[1], args[0]) if func in _INTO else (args[0], out)
        pairs = [(source, copy)] if isinstance(copy, Tensor) else zip(source, copy, strict=True)
        running_means = [call.running_mean for call in self.calls] + [new for _, new in self.copies]
        # `is`, not `id`, which would guard a compiled step by the tensor itself.
        self.copies += [
            (old, new) for old, new in pairs if any(old is mean for mean in running_means)
        ]
        return out

    def _batch_norm(self, a: _Arguments) -> Tensor:
        if a.training and a.input.numel() == a.input.shape[1]:
            raise ValueError(
                "batch norm got one value per channel in training, an input of shape "
                f"{tuple(a.input.shape)}, which has no variance. Fix: drop_last=True in the loader."
            )
        affine = a.weight, a.bias
        if not a.training or a.running_mean is None or a.running_var is None:
            running = a.running_mean, a.running_var
            return _normalized(a.input, affine, running, a.training, a.momentum, a.eps)
        mean, var = torch.zeros_like(a.running_mean), torch.zeros_like(a.running_var)
        # Into zeros: with a momentum of 1 the kernel stores the statistics at no extra cost.
        out = _normalized(a.input, affine, (mean, var), True, 1.0, a.eps)
        for average, new in ((a.running_mean, mean), (a.running_var, var)):
            average.mul_(1 - a.momentum).add_(new * a.momentum)
        values = a.input.numel() // a.input.shape[1]
        self.calls.append(BatchNormCall(a.running_mean, mean, var, values, a.momentum))
        return out


class CaptureForEval(CaptureBatchNorm):
    """A mode that records statistics for use in eval mode, in a forward in train mode. Running
    statistics are not updated, half inputs are computed in float32, dropout is off, one value per
    channel is accepted, SyncBatchNorm is local, and the first `num_final` calls normalise with
    their running statistics.
    """

    local_statistics = True  # LocalSyncBatchNorm of `substitutes.py` reads this

    def __init__(self, num_final: int) -> None:
        super().__init__()
        self.num_final = num_final

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function as in eval mode, if it draws random numbers."""
        if func in _RANDOM:
            position, name, off = _RANDOM[func]
            if len(args) > position:
                args = (*args[:position], off, *args[position + 1 :])
            else:
                kwargs = {**kwargs, name: off}
        return func(*args, **kwargs)

    def _batch_norm(self, a: _Arguments) -> Tensor:
        if not a.input.numel():
            return a.input.clone()
        wide = torch.promote_types(a.input.dtype, torch.float32)
        x, affine = a.input.to(wide), (_to(a.weight, wide), _to(a.bias, wide))
        running = _to(a.running_mean, wide), _to(a.running_var, wide)
        if not a.training or a.running_mean is None or a.running_var is None:
            out = _normalized(x, affine, running, a.training, a.momentum, a.eps)
            return out.to(a.input.dtype)

        values = a.input.numel() // a.input.shape[1]
        mean, var = (torch.zeros_like(t, dtype=wide) for t in (a.running_mean, a.running_var))
        if len(self.calls) < self.num_final:
            mean, var = torch.aminmax(x.detach())  # only to check that the input is finite
            out = _normalized(x, affine, running, False, a.momentum, a.eps)
        elif values == 1:
            mean = x.detach().reshape(-1).clone()
            out = _normalized(x, affine, (mean, var), False, a.momentum, a.eps)
        else:
            out = _normalized(x, affine, (mean, var), True, 1.0, a.eps)
        self.calls.append(BatchNormCall(a.running_mean, mean, var, values, a.momentum))
        return out.to(a.input.dtype)


def _normalized(
    x: Tensor, affine: Any, statistics: Any, training: bool, momentum: float, eps: float
) -> Tensor:
    # Not a function in `_SIGNATURES`, because a forward compiled by the backend "eager" runs this
    # while the mode is still on.
    return torch.ops.aten.batch_norm.default(
        x, *affine, *statistics, training, momentum, eps, torch.backends.cudnn.enabled
    )


def _to(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def calls_of(
    apply: ApplyFn, params: Tensors, buffers: Tensors, args: Any, kwargs: Any, num_final: int = 0
) -> tuple[Any, list[tuple[str, BatchNormCall]]]:
    """Run one forward for statistics to be used in eval mode. Return its output, and the calls of
    its batch norms with the names of their layers.
    """
    with torch.no_grad(), CaptureForEval(num_final) as capture:
        returned = apply(params, buffers, *args, **kwargs)
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict)):
        raise TypeError(
            f"apply returned {type(returned).__name__}; expected (out, new_buffers). Fix: apply, "
            "params, buffers = make_functional(model)."
        )
    return returned[0], named_calls(capture, returned[1])


def named_calls(capture: CaptureBatchNorm, new_buffers: Tensors) -> list[tuple[str, BatchNormCall]]:
    """Return each call with the name of its layer, known by the identity of its running mean.

    A call without a name raises in `CaptureForEval`. In training it is left out: the statistics of
    that batch norm are not among the buffers.
    """
    named = []
    layers = [(name, new_buffers[key_of(name, "running_mean")]) for name in layers_of(new_buffers)]
    for call in capture.calls:
        aliases = [call.running_mean]
        for old, new in capture.copies:
            aliases += [new] if any(old is alias for alias in aliases) else []
        layer = next((name for alias in aliases for name, mean in layers if mean is alias), None)
        if layer is not None:
            named.append((layer, call))
        elif isinstance(capture, CaptureForEval):
            raise ValueError(
                "a batch norm was given running statistics that are not among the new_buffers of "
                "apply, so its layer is unknown. Fix: return them unchanged, not copied or cast."
            )
    return named


def key_of(name: str, buffer: str) -> str:
    """Return the dotted name of a buffer of a layer."""
    return f"{name}.{buffer}" if name else buffer


def layers_of(buffers: Tensors) -> list[str]:
    """Return the names of the layers that keep running statistics."""
    names = [
        key.removesuffix("running_mean").removesuffix(".")
        for key in buffers
        if key.split(".")[-1] == "running_mean"
    ]
    return [name for name in names if key_of(name, "running_var") in buffers]
