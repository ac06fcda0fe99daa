"""Gradient accumulation: a running weighted mean over a window of microbatches."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .._grads.measure import measure
from .._torch import dtensor
from .._torch.autocast import outside_autocast
from .._torch.donation import can_write_each
from .._torch.dtypes import real_dtype, wide_dtype, widest_float
from .._torch.foreach import weighted_sum
from .._torch.tracing import host_can_decide
from .._torch.transfer import to_device
from .._tree import pytree
from .._tree.gradients import Gradients
from .._tree.hints import document_fields
from .._tree.leaves import are_real_floating, dense
from .._tree.matching import (
    are_dense_alike,
    check_leaves,
    device_of,
    leaves_like,
    matching_leaves,
)
from .._tree.poison import poisons_donated
from .._tree.pytree import Tree, TreeDef
from .._tree.scalars import as_flag, as_float, checked_whole, short_repr

_HEAVIEST = 2.0**64  # beyond any count of tokens, and no sum of such weights overflows
OnNonfinite = Literal["drop_window", "drop_microbatch"]


@document_fields
class AccumState(NamedTuple):
    """The weighted mean of a window so far. Make one for each window with `init_accum`; it can be
    saved in mid-window and merged with another.

    Attributes:
        grads: A tree like the parameters, at least float32: the weighted mean over the good
            microbatches.
        weight: float64 [], float32 where there is none. The weight of the good microbatches.
        found_inf: bool []. True if a microbatch was bad.
        num_good: int32 []. The number of good microbatches.
        num_bad: int32 []. The number of bad microbatches.
        bad_weight: float64 []. The weight of the bad microbatches.
    """

    grads: Tree
    weight: Tensor
    found_inf: Tensor
    num_good: Tensor
    num_bad: Tensor
    bad_weight: Tensor


def init_accum(params: Tree, dtype: torch.dtype | None = None) -> AccumState:
    """Equal to `AccumState(tree_map(zeros_like, params), weight=0, found_inf=False, num_good=0,
    num_bad=0, bad_weight=0)`.

    Args:
        params: Parameters, or gradients of them: floating or complex leaves; `None` stays `None`.
        dtype: The dtype of the means: float32, bfloat16 (half the memory, 3 digits) or float64, and
            for complex leaves its complex counterpart. By default float32 for leaves that are
            narrower; float64 and complex128 keep their dtype.

    Returns:
        An empty `AccumState` on the device of `params`.

    Raises:
        TypeError: A leaf is an integer.
        ValueError: `dtype` is another one; float16 cannot hold unscaled gradients.

    Example:
        >>> import torch
        >>> init_accum({"w": torch.ones(2, dtype=torch.float16)}).grads
        {'w': tensor([0., 0.])}

    Source of the rule: main_grad of Megatron-LM, which is float32 for parameters of any dtype.
    """
    if dtype not in (None, torch.float32, torch.bfloat16, torch.float64):
        raise ValueError(
            f"init_accum got dtype={dtype}; expected torch.float32, torch.bfloat16, torch.float64 "
            "or None. Fix: leave dtype out; the mean of half gradients is then float32."
        )
    leaves = pytree.flatten(params)[0]
    check_leaves(params, leaves, "params", "gradient")
    device = device_of(params, leaves, "params")

    def zero_mean(leaf: Tensor) -> Tensor:
        return torch.zeros_like(dense(leaf.detach()), dtype=_mean_dtype(leaf, dtype))

    def zero(scalar_dtype: torch.dtype) -> Tensor:
        return torch.zeros((), dtype=scalar_dtype, device=device)

    return AccumState(
        grads=pytree.map(zero_mean, params),
        weight=zero(widest_float(device)),
        found_inf=zero(torch.bool),
        num_good=zero(torch.int32),
        num_bad=zero(torch.int32),
        bad_weight=zero(widest_float(device)),
    )


@outside_autocast()
@poisons_donated("accum")
def accumulate_grads(
    accum: AccumState,
    grads: Tree,
    weight: float | Tensor = 1.0,
    found_inf: Tensor | bool | None = None,
    donate: bool = False,
) -> AccumState:
    """Equal to `accum.grads * (1 - f) + grads * f` with `f = weight / (accum.weight + weight)`,
    unless `grads` are bad.

    The mean is right after every microbatch, so neither the number of microbatches nor their total
    weight need be known. Apart from rounding, it never grows beyond the largest gradient. A bad
    microbatch changes only `found_inf`, `num_bad` and `bad_weight`; `accumulated_grads` decides
    what follows from it.

    Args:
        accum: From `init_accum`, or the state that the last call returned.
        grads: The gradients of one microbatch, unscaled with the state that scaled them; the scale
            may change in mid-window. They match `accum.grads` in tree, shapes and devices, and in
            being real or complex; a leaf `None` counts as 0.
        weight: 1.0, samples or tokens, from 0 to 2**64; a microbatch of weight 0 is ignored, even
            if it is NaN. A 0-d tensor is not read: outside of that range, or NaN, it makes the
            microbatch bad.
        found_inf: The 0-d bool from `unscale_and_check`. By default `grads` are checked here, which
            reads them once more.
        donate: `accum` may be overwritten; the caller gives it up. Same bits.

    Returns:
        The next `AccumState`.

    Raises:
        ValueError: The weight is negative or not finite, the gradients do not match `accum.grads`,
            or float64 gradients meet a narrower mean, in which they could overflow.
        TypeError: A gradient is not a tensor, or the weight is not a number.

    Example:
        >>> import torch
        >>> accum = init_accum({"w": torch.zeros(1)})
        >>> accum = accumulate_grads(accum, {"w": torch.tensor([1.0])}, weight=3)
        >>> accumulate_grads(accum, {"w": torch.tensor([5.0])}, weight=1).grads
        {'w': tensor([2.])}

    Source of the rule: West's running weighted mean (CACM 22(9), 1979) in its convex form; optax's
    MultiSteps, whose accumulator stays NaN for ever after one bad microbatch.
    """
    means, new, structure = _flatten_both(accum, grads)
    checked_weight = as_weight("weight is", weight, accum.weight)
    if found_inf is None:
        one = torch.ones((), dtype=torch.float32, device=accum.weight.device)
        bad = measure(new, one)[0].overflow
    else:
        bad = as_flag(found_inf, like=accum.weight)
    in_place = donate and can_write_each([means.tensor_list], [*new.tensors, *accum[1:]])[0]
    added = add_microbatch(
        accum._replace(grads=means.tensors), new, checked_weight, bad, in_place=in_place
    )
    return added._replace(grads=structure.unflatten(means.as_leaves(added.grads)))


def add_microbatch(
    accum: AccumState, new: Gradients, weight: Tensor, bad: Tensor, *, in_place: bool
) -> AccumState:
    """`accumulate_grads` for lists of dense, real tensors: merge a window of one microbatch, whose
    gradients may still be scaled. Where the host can read that it is good, in few operators.
    """
    decides = host_can_decide([*accum[1:], weight, bad], accum.grads, new.tensors)
    if decides and not bad and accum.bad_weight.dtype is weight.dtype:
        number, before, num_good = weight.item(), accum.weight.item(), accum.num_good.item()
        if 0 < number <= _HEAVIEST and before >= 0:
            share = number / (before + number)
            grads = weighted_sum(
                accum.grads,
                new.tensors,
                share,
                True,
                old_weight=1 - share,
                scale=new.pending.divisor,
                in_place=in_place,
            )
            num_good = min(num_good + 1, torch.iinfo(accum.num_good.dtype).max)
            found_inf, _, num_bad, bad_weight = map(Tensor.item, accum[2:])
            numbers = before + number, found_inf, num_good, num_bad, bad_weight
            pairs = zip(accum[1:], numbers, strict=True)
            fields = [torch.full(old.shape, n, dtype=old.dtype, device="cpu") for old, n in pairs]
            return AccumState(grads, *fields)
    usable = is_valid_weight(weight)
    good = ~bad & usable & (weight > 0)
    bad = (bad & (weight > 0)) | ~usable
    microbatch = AccumState(
        grads=new.tensors,
        weight=torch.where(good, weight, 0),
        found_inf=bad,
        num_good=good.to(torch.int32),
        num_bad=bad.to(torch.int32),
        bad_weight=torch.where(bad & usable, weight, 0),
    )
    return _merged(accum, microbatch, scale=new.pending.divisor, in_place=in_place)


def _merged(
    a: AccumState, b: AccumState, *, scale: Tensor | None = None, in_place: bool
) -> AccumState:
    """`merge_accum` for lists of dense, real tensors. Those of `b` are still scaled by `scale`."""
    weight = a.weight + b.weight
    # The derivative of a division by 0 would be NaN even in a branch that is not taken.
    share = b.weight / torch.where(weight > 0, weight, 1)
    return AccumState(
        grads=weighted_sum(
            a.grads,
            b.grads,
            share,
            b.weight > 0,
            old_weight=1 - share,
            scale=scale,
            in_place=in_place,
        ),
        weight=weight,
        found_inf=a.found_inf | b.found_inf,
        num_good=_saturating_sum(a.num_good, b.num_good),
        num_bad=_saturating_sum(a.num_bad, b.num_bad),
        bad_weight=a.bad_weight + b.bad_weight,
    )


def _saturating_sum(a: Tensor, b: Tensor) -> Tensor:
    """Return `a + b`, at most the largest number of their dtype."""
    return torch.minimum(a, torch.iinfo(a.dtype).max - b) + b


@outside_autocast()
def accumulated_grads(
    accum: AccumState, on_nonfinite: OnNonfinite = "drop_window", donate: bool = False
) -> tuple[Tree, Tensor]:
    """Equal to `accum.grads, found_inf`: the mean over the window, and whether the step must be
    skipped.

    Give `accum.found_inf` to the rule of the loss scale, `rule.update(scaler, accum.found_inf)`,
    whatever `on_nonfinite` is: otherwise data that overflows would be left out for ever. A tensor
    weight that is invalid sets it too, so the scale backs off; `train_step` keeps it.

    Args:
        accum: The state at the end of the window. Start the next window with `init_accum`.
        on_nonfinite: `"drop_window"`: one bad microbatch skips the step, as in torch.
            `"drop_microbatch"`: the step uses the good microbatches, whose weights count as the
            whole. The mean times `accum.num_good / k` is the sum of a loop that backpropagates
            `loss / k` and drops the others.
        donate: The result may be the tensors of `accum`; the caller gives it up.

    Returns:
        The mean over the good microbatches, 0 if there are none, and `found_inf`, 0-d bool. A
        window in which nothing counted is always skipped. `found_inf` decides, because the mean is
        finite even if the step must be skipped.

    Raises:
        ValueError: `on_nonfinite` is another one.

    Example:
        >>> import torch
        >>> accum = init_accum([torch.zeros(1)])
        >>> for g in (2.0, float("inf"), 4.0):
        ...     accum = accumulate_grads(accum, [torch.tensor([g])])
        >>> accumulated_grads(accum)[1], accumulated_grads(accum, on_nonfinite="drop_microbatch")
        (tensor(True), ([tensor([3.])], tensor(False)))

    Source of the rule: torch.amp, Megatron-LM and DeepSpeed drop the window; optax's
    skip_not_finite drops the microbatch.
    """
    check_on_nonfinite(on_nonfinite)
    empty = ~(accum.weight > 0)
    found_inf = empty if on_nonfinite == "drop_microbatch" else accum.found_inf | empty
    return accum.grads if donate else pytree.map(torch.clone, accum.grads), found_inf


@outside_autocast()
@poisons_donated("a")
def merge_accum(a: AccumState, b: AccumState, donate: bool = False) -> AccumState:
    """Equal to one window over the microbatches of both: the halves of two workers, or of two
    processes.

    Associative and commutative up to rounding. Merging with `init_accum(params)` changes nothing.

    Args:
        a: The state of one half.
        b: The state of the other half, for the same parameters.
        donate: `a` may be overwritten; the caller gives it up. Same bits.

    Returns:
        The `AccumState` of the whole window.

    Raises:
        ValueError: The two were made for different parameters or in different dtypes.

    Example:
        >>> import torch
        >>> empty = init_accum(torch.zeros(1))
        >>> window = [
        ...     accumulate_grads(empty, torch.tensor([1.0]), weight=3),
        ...     accumulate_grads(empty, torch.tensor([5.0]), weight=1),
        ... ]
        >>> merge_accum(*window).grads
        tensor([2.])

    Source of the rule: Chan, Golub, LeVeque (1979), the mean of two samples.
    """
    why = "The halves of one window must belong to the same params."
    leaves, others, structure = matching_leaves(a.grads, b.grads, "a.grads", "b.grads", why)
    means, new = Gradients.of_leaves(leaves), Gradients.of_leaves(others)
    in_place = donate and can_write_each([means.tensor_list], [*new.tensors, *a[1:], *b[1:]])[0]
    lists = AccumState(means.tensors, *a[1:]), AccumState(new.tensors, *b[1:])
    merged = _merged(*lists, in_place=in_place)
    return AccumState(structure.unflatten(means.as_leaves(merged.grads)), *merged[1:])


@document_fields
class Window(NamedTuple):
    """The position of a microbatch in its window. The fields are host values: decide with `if`.

    Attributes:
        should_update: A bool. True for the last microbatch of its window: step now.
        should_sync: A bool. True if the gradients are to be reduced over the ranks now, and not
            before (`no_sync` of DistributedDataParallel).
        divisor: An int. The number of microbatches in this window, fewer if the run starts or ends
            in the middle of one.
    """

    should_update: bool
    should_sync: bool
    divisor: int


def accumulation_window(index: int, every: int, total: int | None = None, start: int = 0) -> Window:
    """Equal to `Window(last, last, divisor)`,
    `last = (index + 1) % every == 0 or index + 1 == total`: a step every `every` microbatches.

    Args:
        index: The index of this microbatch, from 0.
        every: The number of microbatches in a window.
        total: The number of microbatches in the run, if known. The last window may be shorter, and
            still makes a whole step.
        start: The index at which this run began with an empty `AccumState`; windows end where they
            would have ended, so the first may be shorter. A run that resumes with its saved
            `AccumState` leaves `start` at 0.

    Returns:
        A `Window`. Its `divisor` is for those who divide the loss by it; `accumulate_grads` does
        not need it.

    Raises:
        ValueError: `every` is below 1, or `index` is before `start` or not below `total`.
        TypeError: An argument is not an int.

    Example:
        >>> [accumulation_window(i, every=3, total=4).divisor for i in range(4)]
        [3, 3, 3, 1]
        >>> accumulation_window(3, every=3, total=4)
        Window(should_update=True, should_sync=True, divisor=1)

    Source of the rule: OptimWrapper of MMEngine, with two differences: there a step beyond `total`
    is twice as large, and one after an unaligned resume two thirds as large.
    """
    index, every = checked_whole("index", index, 0, None), checked_whole("every", every, 1, None)
    start = checked_whole("start", start, 0, None)
    total = None if total is None else checked_whole("total", total, 1, None)
    if total is not None and index >= total:
        raise ValueError(
            f"index {index} is beyond total={total}: the last microbatch has index {total - 1}. "
            "Fix: total=epochs * len(loader), or leave total out."
        )
    if index < start:
        raise ValueError(
            f"index {index} is before start={start}, the index at which this run began."
        )
    begin = index - index % every
    end = begin + every if total is None else min(begin + every, total)
    is_last = index + 1 == end
    return Window(should_update=is_last, should_sync=is_last, divisor=end - max(begin, start))


# ---- checks --------------------------------------------------------------------------------------


def check_on_nonfinite(on_nonfinite: Any) -> None:
    """Refuse an unknown policy."""
    if on_nonfinite not in ("drop_window", "drop_microbatch"):
        raise ValueError(
            f"on_nonfinite must be 'drop_window' or 'drop_microbatch', got {on_nonfinite!r}."
        )


def is_valid_weight(weight: Tensor) -> Tensor:
    """Return True if a tensor is a valid weight. An invalid one cannot raise, because it is not
    read, so it makes its microbatch bad.
    """
    return (weight >= 0) & (weight <= _HEAVIEST)


def as_weight(what: str, weight: Any, like: Tensor) -> Tensor:
    """Return the weight of a microbatch as a 0-d tensor on the device of `like`. `what` opens the
    error message.
    """
    dtype = widest_float(like.device)
    if isinstance(weight, Tensor):
        if weight.ndim or weight.is_complex():  # a bool is a weight: 0 if masked out
            raise ValueError(
                f"{what} a tensor of shape {tuple(weight.shape)}, {weight.dtype}; a weight is one "
                "number. Fix: `mask.sum()`."
            )
        return to_device(weight, like.device, dtype)
    number = as_float(weight)
    if number is None:
        raise TypeError(
            f"{what} {short_repr(weight)}; a weight is a number or a 0-d tensor. Fix: `mask.sum()`."
        )
    if not 0 <= number <= _HEAVIEST:
        raise ValueError(
            f"{what} {short_repr(weight)}; a weight is finite and not negative, 2**64 at most. "
            f"Fix: the number of samples or tokens; 0 to leave the microbatch out."
        )
    return torch.full((), number, dtype=dtype, device=like.device)


def _flatten_both(accum: AccumState, grads: Tree) -> tuple[Gradients, Gradients, TreeDef]:
    """Return the means, the leaves of `grads` in their order, with zeros for None, and the
    structure. Refuse, naming the leaf, one that cannot be averaged there.
    """
    means, structure = pytree.flatten(accum.grads)
    leaves = leaves_like("grads", grads, "accum.grads", accum.grads, structure)
    if are_dense_alike(means, leaves) and are_real_floating({mean.dtype for mean in means}):
        return Gradients.of_dense(means), Gradients.of_dense(leaves), structure
    check_leaves(accum.grads, leaves, "grads", "gradient")
    pairs = list(zip(leaves, means, strict=True))
    for index, (gradient, mean) in enumerate(pairs):
        reason = "" if gradient is None else _mismatch_reason(gradient, mean)
        if reason:
            raise ValueError(f"{pytree.path(accum.grads, 'grads', index)} {reason}")
    leaves = [
        torch.zeros_like(mean)
        if gradient is None and mean is not None
        else dtensor.redistribute_like(gradient, mean)
        for gradient, mean in pairs
    ]
    return Gradients.of_leaves(means), Gradients.of_leaves(leaves), structure


def _mismatch_reason(gradient: Tensor, mean: Tensor | None) -> str:
    """Return why a gradient cannot be averaged into a mean, and the fix; "" if it can."""
    fix = "Fix: init_accum(params) with the params of these gradients."
    if mean is None:
        return (
            "is a tensor, but None in accum.grads. Fix: init_accum(params) with a tensor for "
            "every parameter that is trained."
        )
    if gradient.shape != mean.shape or gradient.device != mean.device:
        return (
            f"is {tuple(gradient.shape)} on {gradient.device}, but {tuple(mean.shape)} on "
            f"{mean.device} in accum.grads. {fix}"
        )
    if reason := dtensor.placement_mismatch(gradient, mean):
        return reason
    if gradient.is_complex() != mean.is_complex():
        return f"has dtype {gradient.dtype}, its mean {mean.dtype}; one is complex. {fix}"
    if real_dtype(gradient.dtype) is torch.float64 is not real_dtype(mean.dtype):
        return (
            f"has dtype {gradient.dtype}, its mean {mean.dtype}, which it may not fit. Fix: "
            "init_accum(params, dtype=torch.float64)."
        )
    return ""


def _mean_dtype(leaf: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of the mean of a leaf: `dtype`, complex if the leaf is."""
    if dtype is None:
        return wide_dtype(leaf.dtype)
    if not leaf.is_complex():
        return dtype
    return torch.complex128 if dtype is torch.float64 else torch.complex64
