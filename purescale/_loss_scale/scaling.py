"""Scaling of a loss, unscaling of gradients, and the check that the scale still lets training go
on.

Gradients are unscaled with the state that scaled the loss. Scales are powers of two in float32, so
that scaling and unscaling are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._distributed.process_group import Group
from .._grads.measure import StatsOptions, measure
from .._loss_scale.rules import HasScale, StaticScale
from .._torch.autocast import outside_autocast
from .._torch.dtypes import wide_dtype
from .._torch.tensor_list import TensorList
from .._tree import pytree, scalars
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


def check_scaler(
    scaler: HasScale,
    rule: Any,
    max_skips: int | None = None,
    loss: Tensor | float | None = None,
) -> None:
    """Raise `FloatingPointError` if training has stopped moving. Syncs with the host: call it now
    and then, not in every step.

    Args:
        scaler: The state of one scaler.
        rule: Its rule.
        max_skips: How many steps in a row may be skipped for an overflow or a loss that is not
            finite, counted by the field `consecutive_skips` of the state. By default any number.
            Give it for a rule that never lowers its scale, such as StaticScale.
        loss: The loss of the last step, `info.loss`. It only makes the error say whether the loss
            itself is inf or NaN or the gradients overflow.

    Raises:
        FloatingPointError: The scale is not positive and finite; the last step overflowed with the
            scale at `rule.min_scale`; the scale fell to a `min_scale` below 1, where half-precision
            gradients are lost, even if the last step did not overflow; or more than `max_skips`
            steps in a row overflowed.
        TypeError: `scaler` is not the state of one scaler, or does not count skips for `max_skips`.

    Example:
        >>> from purescale import DynamicScale
        >>> rule = DynamicScale()
        >>> check_scaler(rule.init(), rule, max_skips=10)

    Source of the rule: fairseq's FloatingPointError at min_loss_scale, DeepSpeed's
    raise_error_at_min_scale.
    """
    max_skips = None if max_skips is None else scalars.checked_whole("max_skips", max_skips)
    _check_state_and_loss(scaler, max_skips, loss)
    scale = float(scaler.scale)
    skips = int(getattr(scaler, "consecutive_skips", 0))
    floor = getattr(rule, "min_scale", None)
    if not (math.isfinite(scale) and scale > 0):
        raise FloatingPointError(
            f"the loss scale is {scale}, so no step can be taken. Likely cause: a damaged state. "
            "Fix: `scaler = rule.init(device)`."
        )
    if skips and floor is not None and scale <= floor:
        raise FloatingPointError(
            f"gradients overflow at the smallest scale, {scale} (min_scale), {skips} step(s) in a "
            "row. No scale helps: the loss or its gradients are inf or NaN by themselves. "
            f"{_where_to_look(loss)}"
        )
    # min(): a rule that starts at its smallest scale has not fallen
    if floor is not None and scale <= floor and scale < min(1.0, float(rule.init("cpu").scale)):
        raise FloatingPointError(
            f"the loss scale is at the smallest that the rule allows, {scale} (min_scale), which "
            "makes float16 gradients 0. Fix: look at the data and the learning rate, then `scaler "
            "= rule.init(device)`."
        )
    if max_skips is not None and skips > max_skips:
        raise FloatingPointError(
            f"{skips} steps in a row were skipped, more than max_skips={max_skips}; the scale is "
            f"{scale}{', which never moves' if isinstance(rule, StaticScale) else ''}. "
            f"{_where_to_look(loss, max(scale, 2.0**-126))}"
        )


def _check_state_and_loss(scaler: Any, max_skips: Any, loss: Any) -> None:
    """Refuse a state that is not that of one scaler, and a loss that is not that of one step."""
    if not isinstance(getattr(scaler, "scale", None), Tensor) or scaler.scale.ndim:
        raise TypeError(
            "check_scaler takes the state of one scaler, its `scale` a 0-d tensor, got "
            f"{scalars.short_repr(scaler)}. Fix: `check_scaler(state.scaler, rule)`."
        )
    if max_skips is not None and not hasattr(scaler, "consecutive_skips"):
        raise TypeError(
            f"max_skips={max_skips} with a {type(scaler).__name__}, which does not count skips. "
            "Fix: a field `consecutive_skips`, an int32 tensor that `update` sets."
        )
    is_one_number = isinstance(loss, float | int) or (
        isinstance(loss, Tensor) and loss.numel() == 1 and not loss.is_complex()
    )
    if loss is not None and not is_one_number:
        raise TypeError(
            f"loss must be that of one step, a number or a tensor with one element, got "
            f"{scalars.short_repr(loss)}. Fix: loss=info.loss; for stacked infos `info.loss[-1]`."
        )


def _where_to_look(loss: Any, lower: float | None = None) -> str:
    """Return advice for a run of skips. `lower`: a scale to start from, if a lower one may help."""
    if loss is not None and not math.isfinite(loss):
        within = "" if lower is None else " A lower scale helps only if the loss holds a gradient "
        within += within and "of its own, scaled by the scale: DynamicScale() then lowers it."
        return (
            f"The loss itself is {float(loss)}. Look at the data, the learning rate, and whether "
            "parameters are finite; `forward_report(apply, params, buffers, *inputs).first` names "
            f"the module in which it arose.{within}"
        )
    look = "look at the data, the learning rate, a division or log of 0"
    if lower is not None:
        look += f"; at the start of a run fewer are skipped with DynamicScale(init_scale={lower!r})"
    if loss is not None:
        return (
            f"The loss is finite, {float(loss):.4g}, so its gradients overflow: `grad_report` "
            f"names them. Then {look}."
        )
    return (
        "First check whether the loss itself is inf or NaN: `check_scaler(..., loss=info.loss)`. "
        f"If it is finite, {look}."
    )


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
