"""Clipping, after unscaling and before the step."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _dtensor, _foreach, _meshes, _tree
from ._autocast import outside_autocast
from ._checks import as_float, bound, shown
from ._tree import Tree


@outside_autocast()
def clip_by_global_norm(
    grads: Tree, max_norm: float | Tensor, norm_type: float = 2.0, donate: bool = False
) -> tuple[Tree, Tensor]:
    """Equal to `grads = tree_map(lambda g: g * min(1, max_norm / (norm + 1e-6)), grads)`, with the
    norm before clipping.

    Arguments:
    - `grads`: a pytree of unscaled gradients; `None` passes through. Sparse and complex leaves
      count with their values.
    - `max_norm`: above 0; a number or a 0-d tensor. `inf` only measures.
    - `norm_type`: any p above 0, `math.inf` included.
    - `donate`: `grads` may be overwritten; the caller gives them up. Same bits.

    Returns the gradients in their own dtypes and the norm, 0-d float32 (float64 if a leaf is). The
    norm is exact also where squares overflow or vanish: gradients of 1e30 have a norm and are
    clipped to `max_norm`. With inf or NaN among them the norm is inf or NaN.

    Raises `ValueError` for `max_norm <= 0` or `norm_type <= 0`.

    >>> import torch
    >>> clip_by_global_norm({"w": torch.tensor([3e30, 4e30])}, max_norm=5.0)
    ({'w': tensor([3., 4.])}, tensor(5.0000e+30))

    Source of the rule: Pascanu et al. (arXiv 1211.5063); `torch.nn.utils.clip_grad_norm_`, whose
    is inf here.
    """
    max_norm, norm_type = bound("max_norm", max_norm), checked_norm_type(norm_type)
    leaves, structure = _tree.flatten(grads)
    _tree.check_gradients(grads, leaves)
    device, shards = _tree.device_of(grads, leaves, "grads"), _dtensor.shards(leaves)
    norm = _meshes.extent(shards.local, device, norm_type, over=shards.given).norm
    grads = grads if shards.none else structure.unflatten(list(shards.given))
    clipped = clip_to(grads, norm, max_norm, donate=donate)
    if donate:
        _tree.poison(grads, keep=(clipped, max_norm))
    return clipped


def clip_to(
    grads: Tree, norm: Any, max_norm: float | Tensor, *, donate: bool
) -> tuple[Tree, Tensor]:
    """`clip_by_global_norm` where the norm is known, in the widest dtype of its device."""
    leaves, structure = _tree.flatten(grads)
    factor, norm = clip_factor(leaves, norm, max_norm)
    shards = _dtensor.shards(leaves)
    clipped = _foreach.multiply(shards.local, factor, donate=donate)
    return structure.unflatten(shards.back(clipped)), norm


def clip_factor(leaves: list[Any], norm: Any, max_norm: float | Tensor) -> tuple[Tensor, Tensor]:
    """What to multiply the leaves by, and the norm, both in the dtype that the leaves call for."""
    # A float64 factor would take float32 leaves through a slower kernel.
    dtype = dtype_of(leaves)
    return _factor(norm, max_norm).to(dtype), norm.to(dtype)


def clip_divisor(
    leaves: list[Any], norm: Any, max_norm: float | Tensor, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What to divide leaves still scaled by `scale` by, to unscale and to clip them at once, and
    the norm; dtypes as in `clip_factor`.
    """
    factor, dtype = _factor(norm, max_norm), dtype_of(leaves)
    return ((1.0 if scale is None else scale) / factor).to(dtype), norm.to(dtype)


def dtype_of(leaves: list[Any]) -> torch.dtype:
    """float64 if a leaf is, else float32."""
    found = {leaf.dtype for leaf in leaves if leaf is not None}
    return torch.float32 if found.isdisjoint((torch.float64, torch.complex128)) else torch.float64


def _factor(norm: Any, max_norm: float | Tensor) -> Tensor:
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    unbounded = max_norm == math.inf
    if isinstance(unbounded, Tensor):
        return torch.where(unbounded, 1.0, factor)  # inf / inf is NaN
    return torch.ones_like(factor) if unbounded else factor


def told(norm: Any, found_inf: Tensor) -> Any:
    """The norm that a step reports: not finite where it is skipped, be it for what was dropped
    before or for another rank.
    """
    return (
        torch.where(found_inf, norm.clamp(min=math.inf), norm) if isinstance(norm, Tensor) else norm
    )


def check_grad_norm(norm: Tensor) -> None:
    """Syncs with the host, and raises `FloatingPointError` when the norm is inf or NaN:
    `error_if_nonfinite=True` of torch.

    `norm`: what `clip_by_global_norm` returned, or `StepInfo.grad_norm`. A training loop with a
    loss scale need not call it: there an overflow is a skipped step. It is for float32 loops that
    must stop instead.

    >>> check_grad_norm(clip_by_global_norm([torch.ones(4)], max_norm=1.0)[1])

    Source of the rule: `torch.nn.utils.clip_grad_norm_`.
    """
    if not (isinstance(norm, Tensor) and norm.ndim == 0):
        raise TypeError(
            f"norm is {norm!r}; expected the 0-d tensor that clip_by_global_norm returns. Cure: "
            "give train_step a max_norm."
        )
    value = float(norm)
    if not math.isfinite(value):
        raise FloatingPointError(
            f"the global norm of the gradients is {value}. Likely cause: an overflow, or a loss "
            "that is not finite. Cure: skip the step, with `found_inf` of unscale_and_check and "
            "maybe_step."
        )


@outside_autocast()
def clip_by_value(grads: Tree, clip_value: float | Tensor, donate: bool = False) -> Tree:
    """Equal to `tree_map(lambda g: g.clamp(-clip_value, clip_value), grads)`.

    `clip_value`: above 0, a number or a 0-d tensor. `None` passes through, NaN stays NaN; check for
    inf before, since inf becomes `clip_value`. `donate`: `grads` may be overwritten; same bits.
    Dtypes and shapes stay.

    Raises `ValueError` for `clip_value <= 0`, `TypeError` for complex gradients, which have no
    order.

    >>> import torch
    >>> clip_by_value([torch.tensor([-3.0, 0.5])], clip_value=1.0)
    [tensor([-1.0000,  0.5000])]

    Source of the rule: `torch.nn.utils.clip_grad_value_`.
    """
    clip_value = bound("clip_value", clip_value)
    leaves, structure = _tree.flatten(grads)
    _tree.check_gradients(grads, leaves)
    check_ordered(grads, leaves)
    shards = _dtensor.shards(leaves)
    mine = _tree.writable(shards.local) if donate else [False] * len(leaves)
    clamped = _foreach.clamp_list(shards.local, clip_value, mine)
    clipped = structure.unflatten(shards.back(clamped))
    if donate:
        _tree.poison(grads, keep=(clipped, clip_value))
    return clipped


def check_ordered(grads: Tree, leaves: list[Any], name: str = "grads") -> None:
    """Refuse, naming the leaf, gradients that cannot be clipped by value."""
    for index, leaf in enumerate(leaves):
        if leaf is not None and leaf.is_complex():
            raise TypeError(
                f"{_tree.paths(grads, name)[index]} has dtype {leaf.dtype}; complex numbers have "
                "no order to clip by. Cure: clip_by_global_norm."
            )


class Clip(NamedTuple):
    """How the averaged, unscaled gradients are bounded."""

    max_norm: float | Tensor | None
    value: float | Tensor | None
    norm_type: float


def checked(max_norm: Any, clip_value: Any, norm_type: Any) -> Clip:
    """Bounds as floats and tensors; refuses what is neither None nor above 0."""
    return Clip(
        None if max_norm is None else bound("max_norm", max_norm),
        None if clip_value is None else bound("clip_value", clip_value),
        checked_norm_type(norm_type),
    )


def checked_norm_type(norm_type: Any) -> float:
    """The p of a p-norm."""
    power = as_float(norm_type)
    if power is None or not power > 0:
        raise ValueError(
            f"norm_type must be above 0, a number or math.inf, got {shown(norm_type)}. Cure: 2.0, "
            "the usual norm."
        )
    return power
