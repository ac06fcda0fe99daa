"""The exponential moving average of a state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._torch.dtypes import wide_dtype
from .._torch.transfer import to_device
from .._tree import pytree, scalars
from .._tree.leaves import describe, describe_with_device
from .._tree.matching import leaves_like
from .._tree.pytree import TreeT


def ema(old: TreeT, new: TreeT, decay: float | Tensor) -> TreeT:
    """Equal to `tree_map(lambda o, n: decay * o + (1 - decay) * n, old, new)`: an exponential
    moving average, one step on.

    It does not know which steps were skipped; to leave those out, use `select(info.found_inf,
    average, ema(average, params, 0.99))`. Derivatives pass through. Elements that are equal in
    `old` and `new` keep their bits.

    Args:
        old: The average. Keep that of half-precision weights in float32, because half precision
            rounds away a change of 1/1000.
        new: The latest value, a tree of the same structure, shapes and devices.
        decay: A number from 0 (`new`) to 1 (`old`), or a 0-d tensor, which is not read.

    Returns:
        A tree in fresh memory. Floating and complex leaves are averaged in at least float32 and
        have the dtype of `old`; other leaves come from `new`.

    Raises:
        ValueError: If, naming the leaf, the trees do not match, or `decay` is outside of [0, 1].
        TypeError: If `decay` is not a number, or a 0-d floating tensor.

    Example:
        >>> import torch
        >>> ema({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, 2.0])}, decay=0.75)
        {'w': tensor([1.5000, 2.0000])}

    Source of the rule: torch.optim.swa_utils.get_ema_multi_avg_fn, which writes into the average.
    """
    decay = _checked_decay(decay)
    leaves, structure = pytree.flatten(old)
    others = leaves_like("new", new, "old", old, structure)
    for position, (a, b) in enumerate(zip(leaves, others, strict=True)):
        if not _have_average(a, b):
            raise ValueError(
                f"{pytree.path(old, 'new', position)} is {describe_with_device(b)}, but "
                f"{describe_with_device(a)} in old; expected dense tensors of one shape, device "
                "and kind of number. Likely cause: the average of another model. Fix: start with a "
                "copy, `clone(params)`."
            )
    return structure.unflatten(
        [_averaged(a, b, decay) for a, b in zip(leaves, others, strict=True)]
    )


def _checked_decay(decay: Any) -> float | Tensor:
    if isinstance(decay, Tensor):
        if decay.ndim or not decay.is_floating_point():
            raise TypeError(
                f"decay is {describe(decay)}; expected a number or a 0-d floating tensor. Fix: one "
                "decay for all leaves; for one a member, call this under `torch.vmap`."
            )
        return decay
    number = scalars.checked_real("decay", decay)
    if not 0 <= number <= 1:
        raise ValueError(f"decay must lie between 0 and 1, got {number!r}. Fix: decay=0.999.")
    return number


def _is_averaged(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _have_average(a: Any, b: Any) -> bool:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return type(a) is type(b)
    alike = a.shape == b.shape and a.device == b.device
    if not (alike and a.layout is torch.strided and b.layout is torch.strided):
        return False
    averaged = _is_averaged(a) and _is_averaged(b) and a.is_complex() is b.is_complex()
    return averaged or a.dtype is b.dtype


def _averaged(a: Any, b: Any, decay: float | Tensor) -> Any:
    if not isinstance(a, Tensor):
        return b
    if not _is_averaged(a):
        return b.clone()
    wide = torch.promote_types(wide_dtype(a.dtype), wide_dtype(b.dtype))
    share = 1 - (to_device(decay, a.device, wide) if isinstance(decay, Tensor) else decay)
    a_wide, b_wide = a.to(wide), b.to(wide)
    # lerp keeps equal elements, which a sum of two products would round. But it gives NaN for equal
    # infinities, is not finite if the difference overflows, and gives 0.0 for two -0.0.
    average = torch.lerp(a_wide, b_wide, share)
    products = a_wide * (1 - share) + b_wide * share
    return torch.where(average.isfinite() & (average != 0), average, products).to(a.dtype)
