"""Loss scaling as a value: a state, a rule that moves it, and the two functions that use it.

The state that scaled is the state that unscales; the transition comes last. Scales are powers of
two in float32, so that scaling and unscaling are exact.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from .._grads.measure import measure
from .._torch import foreach
from .._torch.autocast import outside_autocast
from .._torch.donation import can_write
from .._torch.dtypes import wide_dtype
from .._tree import leaves as _leaf
from .._tree import scalars as _checks
from .._tree import tree as _tree
from .._tree.leaves import normalize
from .._tree.tree import Tree


class ScalerState(NamedTuple):
    """What a rule remembers. Four 0-d tensors on one device; make it with `rule.init(device)`."""

    scale: Tensor  # float32: what the loss is multiplied by
    growth_tracker: Tensor  # int32: clean steps since the scale last moved
    hysteresis_tracker: Tensor  # int32: overflows still tolerated before the scale backs off
    consecutive_skips: Tensor  # int32: overflows in a row, for check_scaler


class HasScale(Protocol):
    """Any NamedTuple of 0-d tensors with a `scale`: what a rule of your own may keep."""

    @property
    def scale(self) -> Tensor: ...


State = TypeVar("State", bound=HasScale)


class Rule(Protocol[State]):
    """Anything with these two pure methods is a rule. Neither raises, but for arguments that are
    none of its own, and neither reads a tensor's
    value. Of one whose class says `takes_amax = True`, `update` gets `grad_amax` as a third.
    """

    def init(self, device: torch.device | str | None = None) -> State: ...

    def update(self, scaler: State, found_inf: Tensor, /, *args: Any, **kwargs: Any) -> State: ...


Update = TypeVar("Update", bound=Callable[..., Any])


def without_amax(update: Update) -> Update:
    """`update` of a rule that looks at the flag alone; what is one thing more, refused in words."""

    @functools.wraps(update)
    def checked(rule: Any, scaler: Any, found_inf: Tensor, *amax: Any, **named: Any) -> Any:
        if amax or named:
            raise TypeError(
                f"{type(rule).__name__}.update takes no amax: it looks at the flag alone. Fix: "
                "`rule.update(scaler, found_inf)`; for a rule that looks at the largest gradient, "
                "HeadroomScale(). A loop for every rule asks `getattr(rule, 'takes_amax', False)`."
            )
        return update(rule, scaler, found_inf)

    return checked  # type: ignore[return-value]


def flag(found_inf: Any, scaler: Any, kind: type[Any]) -> Tensor:
    """`found_inf` as a 0-d bool tensor, once it is sure that `scaler` is a state of this kind."""
    check_state(scaler, kind)
    return _tree.flag(found_inf, like=scaler.scale)


def check_state(scaler: Any, kind: type[Any]) -> None:
    """Refuse the state of another rule, which lacks what `update` is about to use."""
    if isinstance(scaler, kind):
        return
    there = [name for name in kind._fields if isinstance(getattr(scaler, name, None), Tensor)]
    missing = [name for name in kind._fields if name not in there]
    if not missing:
        return
    cause, cure = "a rule that was swapped in in mid-run, or a checkpoint of another rule", ""
    if hasattr(scaler, "scaler"):
        cause, cure = "the state of a whole step", "`rule.update(state.scaler, found_inf)`"
    elif isinstance(scaler, dict):
        cause, cure = "a state that was saved as a dict", f"`{kind.__name__}(**scaler)`"
    elif "scale" in there:
        device = str(scaler.scale.device)
        cure = f"`scaler = rule.init({device!r})._replace(scale=scaler.scale)`"
    raise TypeError(
        f"scaler is {type(scaler).__name__}; expected a {kind.__name__}: this rule's state is a "
        f"tuple of {', '.join(kind._fields)}. It has {', '.join(there) or 'none of them'}; "
        f"missing: {', '.join(missing)}. Likely cause: {cause}. Fix: "
        f"{cure or '`scaler = rule.init(device)`'}."
    )


def _fresh(scale: float, hysteresis: int, device: torch.device | str | None) -> ScalerState:
    def zero() -> Tensor:
        return torch.zeros((), dtype=torch.int32, device=device)

    return ScalerState(
        scale=torch.full((), scale, dtype=torch.float32, device=device),
        growth_tracker=zero(),
        hysteresis_tracker=zero() + hysteresis,
        consecutive_skips=zero(),
    )


@dataclasses.dataclass(frozen=True)
class DynamicScale:
    """Halve the scale on an overflow, double it after `growth_interval` clean steps in a row.

    Equal, for `hysteresis=1` and wherever floor and ceiling do not bind, bit for bit to
    `torch.ops.aten._amp_update_scale(scale, growth_tracker, found_inf,
    growth_factor, backoff_factor, growth_interval)`.

    Settings, checked when made (`ValueError`, `TypeError`):
    - `init_scale`, `growth_factor`, `backoff_factor`, `min_scale`, `max_scale`: powers of two that
      float32 holds, with `min_scale <= init_scale <= max_scale`, `growth_factor > 1` and
      `0 < backoff_factor < 1`. A power of two changes no bit of a mantissa; any other scale rounds
      every gradient twice.
    - `growth_interval`: steps; growth comes on exactly that clean step. Lowering it in mid-run
      works: the count is compared with >=.
    - `hysteresis`: how many overflows it takes to back off; until then the step is skipped and the
      scale stays.
    - `refill`: when the tolerance is restored. `"growth"` (Megatron-LM, DeepSpeed's default): when
      the growth interval is reached. `"clean"` (DeepSpeed's consecutive_hysteresis, apex's kernel):
      on every clean step.

    A scale of 0, inf or NaN, as a damaged checkpoint may hold, becomes `min_scale` on the next
    update; one outside of `[min_scale, max_scale]` is brought back to the nearer end.

    >>> import torch
    >>> rule = DynamicScale(init_scale=8.0, growth_interval=2)
    >>> state = rule.init()
    >>> for overflow in [True, False, False]:
    ...     state = rule.update(state, torch.tensor(overflow))
    ...     print(state.scale.item())
    4.0
    4.0
    8.0

    Source of the rule: Micikevicius et al., Mixed Precision Training (arXiv 1710.03740), and
    torch's `_amp_update_scale_`; hysteresis from Megatron-LM's DynamicGradScaler and apex's
    update_scale_hysteresis.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 2.0**-24
    max_scale: float = 2.0**24
    hysteresis: int = 1
    refill: str = "growth"

    def __post_init__(self) -> None:
        _checks.settle(
            self,
            _checks.power_of_two,
            "init_scale",
            "growth_factor",
            "backoff_factor",
            "min_scale",
            "max_scale",
        )
        _checks.settle(
            self, functools.partial(_checks.whole, least=1), "growth_interval", "hysteresis"
        )
        if self.growth_factor <= 1:
            raise ValueError(
                f"growth_factor must be above 1, got {self.growth_factor!r}: the scale would never "
                "grow. Fix: growth_factor=2.0, as usual."
            )
        if self.backoff_factor >= 1:
            raise ValueError(
                f"backoff_factor must lie between 0 and 1, got {self.backoff_factor!r}: an "
                "overflow would repeat for ever. Fix: backoff_factor=0.5, as usual."
            )
        if not self.min_scale <= self.init_scale <= self.max_scale:
            raise ValueError(
                f"min_scale <= init_scale <= max_scale must hold, got {self.min_scale!r}, "
                f"{self.init_scale!r}, {self.max_scale!r}. Fix: move the bound that is crossed; "
                "the widest are min_scale=2.0**-149 and max_scale=2.0**127."
            )
        if self.refill not in ("growth", "clean"):
            raise ValueError(
                f"refill must be 'growth' (Megatron-LM) or 'clean' (apex), got {self.refill!r}. "
                "Fix: refill='growth', the default."
            )

    def init(self, device: torch.device | str | None = None) -> ScalerState:
        """The state to start from, on `device` (that of the gradients)."""
        return _fresh(self.init_scale, self.hysteresis, device)

    @without_amax
    def update(self, scaler: ScalerState, found_inf: Tensor) -> ScalerState:
        """The state for the next step. `found_inf`: 0-d bool, True = the step was bad. Reads no
        value; raises only for another rule's state.
        """
        bad = flag(found_inf, scaler, ScalerState)
        scale, tolerance = scaler.scale, scaler.hysteresis_tracker

        clean_steps = (scaler.growth_tracker.clamp(0, 2**31 - 2) + 1).masked_fill(bad, 0)
        # >= and not ==, or lowering growth_interval below the count would stop growth for good.
        interval_reached = clean_steps >= self.growth_interval
        # Kept from going negative, so that a job that overflows for ever cannot wrap it around.
        tolerance = torch.add(tolerance, bad, alpha=-1).clamp(min=0)
        back_off = bad & (tolerance <= 0)

        moved = torch.where(interval_reached, scale * self.growth_factor, scale)
        moved = torch.where(back_off, scale * self.backoff_factor, moved)
        # inf and NaN are not below inf; what is not positive comes to min_scale by the clamp.
        moved = torch.where(scale < math.inf, moved, self.min_scale)
        return ScalerState(
            scale=moved.clamp(self.min_scale, self.max_scale),
            growth_tracker=clean_steps.masked_fill(interval_reached, 0),
            hysteresis_tracker=tolerance.masked_fill(
                interval_reached if self.refill == "growth" else ~bad, self.hysteresis
            ),
            consecutive_skips=(scaler.consecutive_skips + 1) * bad,
        )


@dataclasses.dataclass(frozen=True)
class StaticScale:
    """A scale that never moves. Steps that overflow are still skipped.

    `scale` is a power of two that float32 holds (`ValueError` otherwise). A restored state with
    another scale is brought back to it by the next update.

    >>> StaticScale(512.0).init().scale
    tensor(512.)

    Source of the rule: mmpose's Fp16OptimizerHook (512), apex's `loss_scale=128.0`; unlike those
    two, which step on inf.
    """

    scale: float

    def __post_init__(self) -> None:
        _checks.settle(self, _checks.power_of_two, "scale")

    def init(self, device: torch.device | str | None = None) -> ScalerState:
        """The state to start from, on `device` (that of the gradients)."""
        return _fresh(self.scale, 0, device)

    @without_amax
    def update(self, scaler: ScalerState, found_inf: Tensor) -> ScalerState:
        """The same scale whatever the state holds; `consecutive_skips` is counted, the other
        counters stay 0.
        """
        bad = flag(found_inf, scaler, ScalerState)
        return ScalerState(
            scale=torch.full_like(scaler.scale, self.scale),
            growth_tracker=torch.zeros_like(scaler.growth_tracker),
            hysteresis_tracker=torch.zeros_like(scaler.hysteresis_tracker),
            consecutive_skips=torch.where(bad, scaler.consecutive_skips + 1, 0),
        )


@dataclasses.dataclass(frozen=True)
class NoScale(StaticScale):
    """A static scale of 1: for float32 and bfloat16, so that a loop needs no `enabled=` branch. Bad
    steps are still skipped.

    >>> NoScale().init().scale
    tensor(1.)

    Source of the rule: jmp's NoOpLossScale.
    """

    scale: float = dataclasses.field(default=1.0, init=False)


def scale_loss(scaler: HasScale, loss: Tree) -> Tree:
    """Equal to `loss.float() * scaler.scale` (float64 stays float64), so a half loss cannot
    overflow here.

    `loss`: one tensor or a pytree of them, each floating and of one element. Returned in float32 or
    float64, same shape. Differentiate what comes back; the caller unscales the gradients with
    `unscale_and_check` and the same `scaler`.

    Raises `ValueError` for a loss of several elements or on another device than `scaler`,
    `TypeError` for one that is not floating.

    >>> import torch
    >>> scaler = DynamicScale(init_scale=2.0**16).init()
    >>> scale_loss(scaler, torch.tensor([2.0], dtype=torch.float16))
    tensor([131072.])

    Source of the rule: torch.amp.GradScaler.scale; there a float16 loss of shape (1,) becomes inf.
    """
    if isinstance(loss, Tensor):
        return wide_loss(loss, scaler.scale) * _tree.recordable(scaler.scale)
    leaves, structure = _tree.flatten(loss)
    wide = [
        None
        if leaf is None
        else wide_loss(leaf, scaler.scale, functools.partial(_path_of_loss, loss, index))
        for index, leaf in enumerate(leaves)
    ]
    scale = _tree.recordable(scaler.scale)
    return structure.unflatten([None if leaf is None else leaf * scale for leaf in wide])


@outside_autocast()
def unscale_and_check(
    scaler: HasScale, grads: Tree, donate: bool = False, group: Any = None
) -> tuple[Tree, Tensor]:
    """Equal to `grads = tree_map(lambda g: g.float() / scaler.scale, grads)` and
    `found_inf = not all(isfinite(grads))`.

    Arguments:
    - `scaler`: the state that scaled the loss of these gradients, not the next one.
    - `grads`: a pytree of dense, sparse or distributed tensors of any floating or complex dtype.
      float16 comes back as float32 (1e-3 * 2**-16 is 0 in float16), complex32 as complex64, all
      others in their own dtype; `None` stays `None`. A sparse gradient comes back dense; its
      duplicate indices are summed before unscaling, at least in float32, and a sum that overflows
      there is an overflow.
    - `donate`: `grads` may be overwritten; the caller gives them up. Same bits.
    - `group`: a process group whose ranks decide together; `None` decides for this rank alone.
      DTensors always reduce over their own mesh.

    Returns the gradients and `found_inf`, 0-d bool: True when an input or an unscaled output is not
    finite, or when the scale itself is 0, negative, inf or NaN. A sum or a norm that overflows is
    not an overflow. Without any gradient it is False.

    Raises `TypeError` for integer and bool leaves, `ValueError` for leaves on another device than
    `scaler`.

    >>> import torch
    >>> scaler = DynamicScale(init_scale=4.0).init()
    >>> grads = {"w": torch.tensor([4.0, 8.0], dtype=torch.float16), "frozen": None}
    >>> unscale_and_check(scaler, grads)
    ({'w': tensor([1., 2.]), 'frozen': None}, tensor(False))

    Source of the rule: torch's `_amp_foreach_non_finite_check_and_unscale_`, which checks its input
    only (finding 4 of pytorch#96755: scale 2**-140 makes a parameter inf), and flax's DynamicScale,
    which checks the output.
    """
    leaves, structure = _tree.flatten(grads)
    check_grads(scaler.scale, grads, leaves)
    flat = normalize(leaves)
    in_place = donate and can_write(flat.tensors, _tree.tensors(scaler))
    unscaled = foreach.divide(flat.tensors, scaler.scale, in_place=in_place)
    outputs = flat._replace(tensors=unscaled)
    found_inf = measure(outputs, scaler.scale, scaled=False, group=group).nonfinite
    result = structure.unflatten(flat.restore(unscaled))
    if donate:
        _tree.poison(grads, keep=(result, found_inf, scaler))
    return result, found_inf


def check_scaler(scaler: HasScale, rule: Any, max_skips: int | None = None) -> None:
    """Syncs with the host, and raises `FloatingPointError` when training has stopped moving. Call
    it now and then, not every step.

    Raises when the scale is not positive and finite; when the last step overflowed with the scale
    already at `rule.min_scale`; when the scale fell to a `min_scale` below 1, where gradients in
    half precision are lost, whether or not the last step overflowed; when more than `max_skips`
    steps in a row overflowed. Overflows are told from a state that counts them in
    `consecutive_skips`: `TypeError` for `max_skips` with one that does not.

    >>> rule = DynamicScale()
    >>> check_scaler(rule.init(), rule, max_skips=10)

    Source of the rule: fairseq's FloatingPointError at min_loss_scale, DeepSpeed's
    raise_error_at_min_scale.
    """
    if not isinstance(getattr(scaler, "scale", None), Tensor) or scaler.scale.ndim:
        raise TypeError(
            "check_scaler takes the state of one scaler, its `scale` a 0-d tensor, got "
            f"{_checks.shown(scaler)}. Fix: `check_scaler(state.scaler, rule)` of a TrainState; "
            "of an ensemble one at a time."
        )
    if max_skips is not None:
        max_skips = _checks.whole("max_skips", max_skips)
        if not hasattr(scaler, "consecutive_skips"):
            raise TypeError(
                f"max_skips={max_skips} with a {type(scaler).__name__}, which does not count "
                "skips. Fix: a field `consecutive_skips` in it, an int32 tensor that starts at 0 "
                "and that `update` sets to `torch.where(found_inf, scaler.consecutive_skips + 1, "
                "0)`."
            )
    scale = float(scaler.scale)
    skips = int(getattr(scaler, "consecutive_skips", 0))
    floor = getattr(rule, "min_scale", None)
    if not (math.isfinite(scale) and scale > 0):
        raise FloatingPointError(
            f"the loss scale is {scale}, and no step can be taken with it: the state was damaged, "
            "or it is that of an interop rule whose peer has no floor or no ceiling. DynamicScale "
            "comes back by itself. Fix: `scaler = rule.init(device)`."
        )
    if skips and floor is not None and scale <= floor:
        raise FloatingPointError(
            f"gradients overflow at the smallest scale, {scale} (min_scale), {skips} step(s) in a "
            "row. No scale helps: the loss or its gradients are inf or NaN by themselves. Look at "
            "the data, the learning rate, a division or log of 0."
        )
    if floor is not None and scale <= floor and scale < min(1.0, _start_of(rule)):
        raise FloatingPointError(
            f"the loss scale sits at the smallest that the rule allows, {scale} (min_scale). A "
            "scale so far below 1 makes float16 gradients 0, and then nothing moves though no step "
            "is bad. Likely cause: many batches in a row whose gradients were inf or NaN. Look at "
            "the data, the learning rate, a division or log of 0. Fix: then go on with `scaler = "
            "rule.init(device)`."
        )
    if max_skips is not None and skips > max_skips:
        raise FloatingPointError(
            f"{skips} steps in a row were skipped, more than max_skips={max_skips}; the scale is "
            f"{scale}. A few skips at the start are normal. Look at the data and the learning "
            f"rate, or start lower: DynamicScale(init_scale={max(scale, 2.0**-126)!r})."
        )


def _start_of(rule: Any) -> float:
    """The scale that `rule` starts from. At its smallest scale, one that starts there has not
    fallen.
    """
    return float(rule.init("cpu").scale)


# ---- checks --------------------------------------------------------------------------------------


def check_grads(scale: Tensor, grads: Tree, leaves: list[Any]) -> None:
    """Refuse, naming the leaf, what cannot be a gradient under `scale`."""
    _tree.check_gradients(grads, leaves)
    check_device(scale, grads, leaves, "grads")


def check_device(scale: Tensor, tree: Tree, leaves: list[Any], name: str) -> None:
    """Refuse, naming the leaf, what is not where the scaler is."""
    for index, leaf in enumerate(leaves):
        if leaf is not None and leaf.device != scale.device:
            at = _tree.path(tree, name, index)
            if leaf.is_meta:
                raise ValueError(
                    f"{at} is on meta, the scaler state on {scale.device}. "
                    f"{_leaf.elsewhere(leaf.device)}"
                )
            raise ValueError(
                f"{at} is on {leaf.device}, the scaler state on {scale.device}; they must be on "
                "one device, or each step would wait for a copy. Fix: `scaler = "
                f"rule.init(device={str(leaf.device)!r})`, or for a restored state `scaler = "
                f"type(scaler)(*(t.to({str(leaf.device)!r}) for t in scaler))`."
            )


def _path_of_loss(loss: Tree, index: int) -> str:
    return _tree.paths(loss, "loss")[index]


def wide_loss(loss: Any, scale: Tensor, path: Callable[[], str] = lambda: "loss") -> Tensor:
    """A loss at least in float32, as it is scaled; refused unless it is one number."""
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"{path()} is {type(loss).__name__} {loss!r}; a loss is a tensor. Fix: return what "
            "the loss function computed, not `.item()`."
        )
    if not loss.is_floating_point():
        raise TypeError(
            f"{path()} has dtype {loss.dtype}; a loss is real and floating. Likely cause: a count "
            "of errors, or predictions, instead of a loss. Fix: `loss.float()` if that is meant; "
            "`loss.abs()` of a complex one."
        )
    reason = _leaf.unsupported_reason(loss)
    if reason:
        raise TypeError(f"{path()} {reason}")
    if loss.numel() != 1:
        raise ValueError(
            f"{path()} has shape {tuple(loss.shape)}; a loss is one number. Likely cause: "
            "reduction='none'. Fix: `loss.mean()`; for one loss a member of an ensemble, call "
            "this under `torch.vmap`."
        )
    if loss.device != scale.device:
        raise ValueError(
            f"{path()} is on {loss.device}, the scaler state on {scale.device}; they must be on "
            f"one device. Fix: `scaler = rule.init(device={str(loss.device)!r})`."
        )
    return loss.to(wide_dtype(loss.dtype))
