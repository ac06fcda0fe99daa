"""Scaling of a loss, unscaling of gradients, and the check that the scale still lets training go
on.

Gradients are unscaled with the state that scaled the loss. Scales are powers of two in float32, so
that scaling and unscaling are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._distributed.process_group import Group
from .._grads.measure import StatsOptions, measure
from .._loss_scale.rules import HasScale
from .._torch.autocast import outside_autocast
from .._torch.dtypes import wide_dtype
from .._torch.tensor_list import TensorList
from .._tree import pytree
from .._tree.gradients import Gradients, Pending
from .._tree.leaves import device_hint, unsupported_reason
from .._tree.matching import flatten_gradients
from .._tree.poison import poisons_donated
from .._tree.pytree import Tree, TreeT


def scale_loss(scaler: HasScale, loss: TreeT) -> TreeT:
    """Equal to `loss.float() * scaler.scale` (float64 stays float64), so a half loss cannot
    overflow here.

    Args:
        scaler: The state of the rule. Unscale the gradients with the same one.
        loss: One tensor or a pytree of them, each floating and of one element.

    Returns:
        The scaled loss in float32 or float64, of the same shape, to be differentiated.

    Raises:
        ValueError: A loss has several elements or is on another device than `scaler`.
        TypeError: A loss is not a floating tensor.

    Example:
        >>> import torch
        >>> from purescale import DynamicScale
        >>> scaler = DynamicScale(init_scale=2.0**16).init()
        >>> scale_loss(scaler, torch.tensor([2.0], dtype=torch.float16))
        tensor([131072.])

    Source of the rule: torch.amp.GradScaler.scale; there a float16 loss of shape (1,) becomes inf.
    """
    leaves, structure = pytree.flatten(loss)
    _check_of_one_state(scaler.scale)
    scale = pytree.as_normal_tensor(scaler.scale)

    def scaled(index: int, leaf: Any) -> Any:
        if leaf is None:
            return None
        wide = wide_loss(leaf, scaler.scale, lambda: pytree.path(loss, "loss", index))
        return wide * scale

    return structure.unflatten([scaled(index, leaf) for index, leaf in enumerate(leaves)])


@outside_autocast()
@poisons_donated("grads")
def unscale_and_check(
    scaler: HasScale, grads: TreeT, donate: bool = False, group: Group | None = None
) -> tuple[TreeT, Tensor]:
    """Equal to `grads = tree_map(lambda g: g / scaler.scale, grads)`, float16 first cast to float32
    and complex32 to complex64, and `found_inf = not all(isfinite(grads))`.

    Args:
        scaler: The state that scaled the loss of these gradients, not the next one.
        grads: A pytree of dense, sparse or distributed tensors of any floating or complex dtype;
            `None` stays `None`. Duplicate indices of a sparse gradient are summed before unscaling,
            at least in float32.
        donate: `grads` may be overwritten; the caller gives them up. Same bits.
        group: A process group whose ranks decide together; by default this rank decides alone.
            DTensors always reduce over their own mesh.

    Returns:
        The gradients, dense, and `found_inf`, 0-d bool. float16 becomes float32 (1e-3 * 2**-16 is 0
        in float16) and complex32 becomes complex64; all others keep their dtype. `found_inf` is
        True if an input, a sum of duplicate indices or an unscaled output is not finite, or if the
        scale itself is 0, negative, inf or NaN. Finite gradients whose sum or norm overflows do not
        count. Without gradients it is False.

    Raises:
        TypeError: A leaf is not floating or complex.
        ValueError: A leaf is on another device than `scaler`.

    Example:
        >>> import torch
        >>> from purescale import DynamicScale
        >>> scaler = DynamicScale(init_scale=4.0).init()
        >>> grads = {"w": torch.tensor([4.0, 8.0], dtype=torch.float16), "frozen": None}
        >>> unscale_and_check(scaler, grads)
        ({'w': tensor([1., 2.]), 'frozen': None}, tensor(False))

    Source of the rule: torch's `_amp_foreach_non_finite_check_and_unscale_`, which checks its input
    only (finding 4 of pytorch#96755: scale 2**-140 makes a parameter inf), and flax's DynamicScale,
    which checks the output.
    """
    flat = flatten_gradients(grads)
    check_device_of_scale(scaler.scale, grads, flat.leaves, "grads", flat.tensor_list)
    gradients = Gradients.of(flat)
    if donate:
        gradients = gradients.owned_unless_shared(pytree.tensors(scaler))
    gradients = gradients._replace(pending=Pending(divisor=scaler.scale))
    stats, gradients = measure(gradients, scaler.scale, StatsOptions(group=group))
    return flat.structure.unflatten(gradients.apply_pending().leaves), stats.overflow


# ---- checks --------------------------------------------------------------------------------------


def check_device_of_scale(
    scale: Tensor,
    tree: Tree,
    leaves: Sequence[Any],
    name: str,
    tensor_list: TensorList,
) -> None:
    """Refuse the scales of several states, and, naming the leaf, a tensor on another device than
    the scaler.
    """
    _check_of_one_state(scale)
    device = scale.device
    if tensor_list.dense_without_history and tensor_list.devices <= {device}:
        return
    for index, leaf in enumerate(leaves):
        if leaf is not None and leaf.device != device:
            at = pytree.path(tree, name, index)
            if leaf.is_meta:
                raise ValueError(
                    f"{at} is on meta, the scaler state on {scale.device}. "
                    f"{device_hint(leaf.device)}"
                )
            raise ValueError(
                f"{at} is on {leaf.device}, the scaler state on {scale.device}. Fix: `scaler = "
                f"rule.init(device={str(leaf.device)!r})`, or for a restored state `scaler = "
                f"type(scaler)(*(t.to({str(leaf.device)!r}) for t in scaler))`."
            )


def _check_of_one_state(scale: Tensor) -> None:
    if scale.ndim:
        raise ValueError(
            f"the scale of the state has shape {tuple(scale.shape)}; that of one state is 0-d. "
            "Likely cause: stacked states. Fix: `torch.vmap(step, in_dims=(0, None))(states, "
            "batch)`, or `member(states, 0)`."
        )


def wide_loss(loss: Any, scale: Tensor, path: Callable[[], str] = lambda: "loss") -> Tensor:
    """Return a loss at least in float32; refuse a loss that is not one real number."""
    is_float = type(loss) is Tensor and not loss.ndim and loss.dtype is torch.float32
    if is_float and loss.layout is torch.strided and loss.device == scale.device:
        return loss  # nearly always
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"{path()} is {type(loss).__name__} {loss!r}; a loss is a tensor. Fix: no `.item()`."
        )
    if not loss.is_floating_point():
        raise TypeError(
            f"{path()} has dtype {loss.dtype}; a loss is real and floating. Fix: `loss.float()`, "
            "or `loss.abs()` for a complex loss."
        )
    if reason := unsupported_reason(loss):
        raise TypeError(f"{path()} {reason}")
    if loss.numel() != 1:
        raise ValueError(
            f"{path()} has shape {tuple(loss.shape)}; a loss is one number. Fix: `loss.mean()`, or "
            "`torch.vmap` for one loss per member."
        )
    if loss.device != scale.device:
        raise ValueError(
            f"{path()} is on {loss.device}, the scaler state on {scale.device}; they must be on "
            f"one device. Fix: `scaler = rule.init(device={str(loss.device)!r})`."
        )
    return loss.to(wide_dtype(loss.dtype))
