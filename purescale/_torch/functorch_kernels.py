"""Kernels for symbolic sizes, for operators whose torch.func kernels need plain integers."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from .._torch import private
from .._torch.private import constant_while_compiling

# Under torch.func some operators use kernels that read sizes as plain integers
# (aten/src/ATen/functorch/PyTorchOperatorHacks.cpp). With these a compiled step takes a graph for
# each length of a sequence (linear) or fails at the second (dropout). A Python kernel at the same
# key takes precedence while something is traced; eager calls do not look for one. `linear`
# decomposes as it does without torch.func.


def kernels() -> dict[Any, Any]:
    """Return the kernel of each operator that needs one."""
    aten = torch.ops.aten
    by_operator: dict[Any, Any] = {aten.linear.default: aten.linear.default.decompose}
    for by_channel, alpha in ((False, False), (True, False), (False, True), (True, True)):
        name = f"{'feature_' * by_channel}{'alpha_' * alpha}dropout"
        kernel = functools.partial(_dropout, by_channel=by_channel, alpha=alpha)
        by_operator[getattr(aten, name).default] = kernel
        by_operator[getattr(aten, f"{name}_").default] = functools.partial(kernel, in_place=True)
    return by_operator


@constant_while_compiling
def register() -> None:
    """Register the kernels in this process, except for operators that have one from elsewhere."""
    _register()


@functools.cache
def _register() -> None:
    if not private.FUNCTORCH:
        return
    for operator, kernel in kernels().items():
        if private.FUNCTORCH not in operator.py_kernels:
            operator.py_impl(private.FUNCTORCH)(kernel)


_SELU_MINIMUM = -1.7580993408473766  # the limit of SELU at minus infinity


def _dropout(
    x: Tensor, p: float, train: bool, *, by_channel: bool, alpha: bool, in_place: bool = False
) -> Tensor:
    """Compute torch's dropouts without an in-place operator on the mask, so that each member of a
    vmap has its own mask, also if all share `x`.
    """
    if p == 0 or not train:
        return x
    factor, shift = torch.zeros_like(x), None
    if p < 1:
        shape = (*x.shape[:2], *(1,) * (x.dim() - 2)) if by_channel else x.shape
        kept = torch.bernoulli(x.new_empty(()).expand(shape), 1 - p)
        factor = kept / (1 - p)
        if alpha:
            scale = 1 / math.sqrt((_SELU_MINIMUM**2 * p + 1) * (1 - p))
            factor = kept * scale
            shift = (kept - 1) * (-_SELU_MINIMUM * scale) - _SELU_MINIMUM * scale * p
    multiply, add = (Tensor.mul_, Tensor.add_) if in_place else (torch.mul, torch.add)
    out: Tensor = multiply(x, factor)
    return out if shift is None else add(out, shift)
