"""Gradient clipping by norm and by value: the bounds and the factor. `_step/decide.py` decides when
an invalid bound skips the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._distributed.process_group import Group, object_device, resolve_group
from .._grads.measure import StatsOptions, measure, norm_as_tensor
from .._torch.autocast import outside_autocast
from .._torch.transfer import to_device
from .._tree import pytree
from .._tree.gradients import Gradients
from .._tree.matching import device_of, flatten_gradients
from .._tree.poison import poisons_donated
from .._tree.pytree import Tree, TreeT
from .._tree.scalars import as_float, checked_bound, short_repr


class ClipOptions(NamedTuple):
    """The bounds for the averaged, unscaled gradients of a step."""

    max_norm: float | Tensor | None
    clip_value: float | Tensor | None
    norm_type: float | None  # the p of the norm to measure; None if no norm is needed

    @property
    def tensor_bounds(self) -> list[Tensor]:
        """The bounds that are tensors."""
        return [bound for bound in (self.max_norm, self.clip_value) if isinstance(bound, Tensor)]


def as_clip_options(max_norm: Any, clip_value: Any, norm_type: Any) -> ClipOptions:
    """Return the bounds as floats and tensors; refuse a number that is not above 0."""
    p = as_norm_type(norm_type)
    max_norm = None if max_norm is None else checked_bound("max_norm", max_norm)
    value = None if clip_value is None else checked_bound("clip_value", clip_value)
    return ClipOptions(max_norm, value, None if max_norm is None else p)


def as_norm_type(norm_type: Any) -> float:
    """Return the p of a p-norm as a float."""
    p = as_float(norm_type)
    if p is None or not p > 0:
        raise ValueError(f"norm_type must be above 0, a number, got {short_repr(norm_type)}.")
    return p


def refuse_complex(grads: Tree, leaves: Sequence[Any], name: str = "grads") -> None:
    """Refuse complex gradients, which cannot be clipped by value, and name the leaf."""
    for index, leaf in enumerate(leaves):
        if leaf is not None and leaf.is_complex():
            raise TypeError(
                f"{pytree.path(grads, name, index)} has dtype {leaf.dtype}; complex numbers have "
                "no order to clip by. Fix: clip_by_global_norm."
            )


# ---- the factor ----------------------------------------------------------------------------------


def clip_factor(norm: Tensor, max_norm: float | Tensor) -> Tensor:
    """Return the factor for gradients of this norm: `min(1, max_norm / (norm + 1e-6))`."""
    # A tensor, because torch computes number / tensor as reciprocal * number, with other bits.
    if not isinstance(max_norm, Tensor):
        factor = (torch.full_like(norm, max_norm) / (norm + 1e-6)).clamp(max=1.0)
        return torch.ones_like(factor) if max_norm == math.inf else factor
    max_norm = to_device(max_norm, norm.device)  # `where` would wait for a flag from the host
    factor = (_or_nan(max_norm) / (norm + 1e-6)).clamp(max=1.0)
    return torch.where(max_norm == math.inf, 1.0, factor)  # inf / inf is NaN


def clip_factor_of_number(norm: float, max_norm: Any) -> float | None:
    """Return `clip_factor` of numbers; None for 1."""
    factor = 1.0 if is_unbounded(max_norm) else max_norm / (norm + 1e-6)
    return None if factor >= 1 else factor


def is_unbounded(max_norm: float | Tensor | None) -> bool:
    """Return True if gradients of any norm are within the bound, which only asks for it."""
    return max_norm is None or (not isinstance(max_norm, Tensor) and max_norm == math.inf)


def _or_nan(bound: Tensor) -> Tensor:
    """Return a tensor bound, or NaN if it is invalid (0, negative or NaN)."""
    return torch.where(bound > 0, bound, torch.nan)


# ---- public --------------------------------------------------------------------------------------


@outside_autocast()
@poisons_donated("grads")
def clip_by_global_norm(
    grads: TreeT,
    max_norm: float | Tensor,
    norm_type: float = 2.0,
    donate: bool = False,
    group: Group | None = None,
) -> tuple[TreeT, Tensor]:
    """Equal to `grads = tree_map(lambda g: g * min(1, max_norm / (norm + 1e-6)), grads)`, with the
    norm before clipping.

    Args:
        grads: A pytree of unscaled gradients; `None` passes through. Sparse and complex leaves
            count with their values.
        max_norm: A number or a 0-d tensor above 0; `inf` only measures. A tensor is never read on
            the host: if it is 0, negative or NaN, all gradients become NaN.
        norm_type: Any p above 0, `math.inf` included.
        donate: `grads` may be overwritten; the caller gives them up. Same bits.
        group: The process group of the ranks that hold the other parts of the model, such as
            pipeline stages or experts: the norm is that of all parts, from one all-reduce. Ranks
            that hold replicas must not be in it; docs/scaling.md says which group to pass.

    Returns:
        The gradients in their own dtypes, and the norm, 0-d float32 (float64 if a leaf is). The
        norm is exact even if squares overflow or vanish: gradients of 1e30 have a norm and are
        clipped to `max_norm`. If a gradient is inf or NaN, the norm is inf or NaN and the gradients
        are invalid: check `found_inf` of `unscale_and_check` first. That flag knows nothing of a
        tensor bound that is 0, negative or NaN. `train_step` and `unscale_and_step` skip the step
        in all these cases.

    Raises:
        ValueError: `max_norm` or `norm_type` is a number that is not above 0, or leaves are on
            several devices.
        TypeError: `max_norm` is not a real number, or a leaf is not a floating or complex tensor.

    Example:
        >>> import torch
        >>> clip_by_global_norm({"w": torch.tensor([3e30, 4e30])}, max_norm=5.0)
        ({'w': tensor([3., 4.])}, tensor(5.0000e+30))

    Source of the rule: Pascanu et al. (arXiv 1211.5063); `torch.nn.utils.clip_grad_norm_`, whose
    norm is inf here.
    """
    max_norm, norm_type = checked_bound("max_norm", max_norm), as_norm_type(norm_type)
    flat = flatten_gradients(grads)
    device = device_of(grads, flat.leaves, "grads")
    if group is not None:
        group = resolve_group(group)
        if not pytree.tensors(grads) and isinstance(group, dist.ProcessGroup):
            device = torch.device(object_device(group))
    one = torch.ones((), dtype=torch.float32, device=device)
    gradients = Gradients.of(flat)
    options = StatsOptions(norm_type, norm_group=group)
    norm = norm_as_tensor(measure(gradients, one, options)[0], device)
    factor = clip_factor(norm, max_norm).to(gradients.scalar_dtype)
    if donate:
        gradients = gradients.owned_unless_shared([max_norm])
    clipped = flat.structure.unflatten(gradients.multiplied(factor).leaves)
    return clipped, norm.to(factor.dtype)


def check_grad_norm(norm: Tensor) -> None:
    """Raise `FloatingPointError` if the norm is inf or NaN. Syncs with the host.

    Equal to `error_if_nonfinite=True` of torch. For float32 loops that must stop; a training loop
    with a loss scale does not need it, because it skips a step that overflows.

    Args:
        norm: The norm that `clip_by_global_norm` returned, or `StepInfo.grad_norm`.

    Raises:
        FloatingPointError: The norm is inf or NaN.
        TypeError: The norm is not a 0-d tensor.

    Example:
        >>> check_grad_norm(clip_by_global_norm([torch.ones(4)], max_norm=1.0)[1])

    Source of the rule: `torch.nn.utils.clip_grad_norm_`.
    """
    if not (isinstance(norm, Tensor) and norm.ndim == 0):
        raise TypeError(
            f"norm is {norm!r}; expected the 0-d tensor that clip_by_global_norm returns. Fix: "
            "give train_step a max_norm."
        )
    value = float(norm)
    if not math.isfinite(value):
        raise FloatingPointError(
            f"the global norm of the gradients is {value}. Likely cause: an overflow. Fix: give "
            "`found_inf` of unscale_and_check to maybe_step."
        )


@outside_autocast()
@poisons_donated("grads")
def clip_by_value(grads: TreeT, clip_value: float | Tensor, donate: bool = False) -> TreeT:
    """Equal to `tree_map(lambda g: g.clamp(-clip_value, clip_value), grads)`.

    Args:
        grads: A pytree of real, unscaled gradients; `None` passes through. NaN stays NaN, but inf
            becomes a finite `clip_value` (at most the largest number of the dtype), so check for
            inf before.
        clip_value: A number or a 0-d tensor above 0. If a tensor is 0, negative or NaN, all
            gradients become NaN.
        donate: `grads` may be overwritten; the caller gives them up. Same bits.

    Returns:
        The gradients in their own dtypes and shapes.

    Raises:
        ValueError: `clip_value` is a number that is not above 0.
        TypeError: A gradient is complex: complex numbers have no order.

    Example:
        >>> import torch
        >>> clip_by_value([torch.tensor([-3.0, 0.5])], clip_value=1.0)
        [tensor([-1.0000,  0.5000])]

    Source of the rule: `torch.nn.utils.clip_grad_value_`.
    """
    clip_value = checked_bound("clip_value", clip_value)
    limit = _or_nan(clip_value) if isinstance(clip_value, Tensor) else clip_value
    flat = flatten_gradients(grads)
    refuse_complex(grads, flat.leaves)
    gradients = Gradients.of(flat)
    if donate:
        gradients = gradients.owned_unless_shared([clip_value])
    return flat.structure.unflatten(gradients.clamped(limit).leaves)
