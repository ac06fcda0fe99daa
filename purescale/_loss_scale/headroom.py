"""A loss scale that looks ahead: it follows the largest gradient of the last steps, so that
overflows are foreseen instead of suffered.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._grads.measure import is_usable, measure_amax
from .._loss_scale.rule_protocol import check_state
from .._torch.autocast import outside_autocast
from .._torch.dtypes import saturating
from .._tree import scalars as _checks
from .._tree import tree as _tree
from .._tree.leaves import normalize
from .._tree.tree import Tree

_LARGEST = 65504.0  # of float16
_LEAST_SCALE = 2.0**-111  # below it an overflow at that scale stands for more than float32 holds


class HeadroomState(NamedTuple):
    """What HeadroomScale remembers, on one device; make it with `rule.init(device)`."""

    scale: Tensor  # float32 []: what the loss is multiplied by
    amax_history: Tensor  # float32 [window]: the largest gradients, the latest last; 0: none yet
    consecutive_skips: Tensor  # int32 []: overflows in a row, for check_scaler


@dataclasses.dataclass(frozen=True)
class HeadroomScale:
    """The largest power of two that leaves `margin` bits between the largest gradient of the last
    `window` informative steps and float16's largest number.

    Equal, for a step whose largest unscaled gradient is `amax`, to

        seen = 2 * 65504 / scale if found_inf else amax
        if isfinite(seen) and seen > 0:             # informative
            history = [*history[1:], seen]
        elif seen == 0 and scale < 1:               # every gradient was lost
            history = [past / 2 for past in history]
        scale = 2.0 ** (floor(log2(65504 / max(history))) - margin)

    in exact arithmetic, clamped to `[min_scale, max_scale]`. Until a first step was informative
    there is no history: `scale` stays as it is, and doubles where a history would be halved. So
    gradients up to `2**margin` times as large as any in the window do not overflow, and one
    overflow lowers the scale by `margin + 1` bits at once: all that it tells is that the gradients
    were too large.

    - Gradients of zeros raise a scale below 1, up to 1: such a scale makes gradients smaller, and
      may be why they are 0. So no start is too low, and no bad stretch is final. At 1 and above
      they tell nothing: a rule that grew on them would skip the steps that teach where rewards are
      sparse.
    - An `amax` that is inf or NaN in a step that was not bad changes neither scale nor history.
      `train_step` hands over `found_inf=False` and NaN where the loss itself was not finite: the
      step is skipped, but no scale could have cured it. A loop by hand does the same with
      `rule.update(scaler, found_inf & torch.isfinite(loss), amax)`. `consecutive_skips` counts
      overflows, and such a step is none; `StepInfo.found_inf` tells of both.

    Settings, checked when made (`ValueError`, `TypeError`):
    - `init_scale`, `min_scale`, `max_scale`: powers of two, `min_scale <= init_scale <= max_scale`,
      from 2**-111 to 2**127. After the first informative step `init_scale` is forgotten.
    - `margin`: bits, 0 to 39 (float16 has 40). 2 cover what activations have above the gradients of
      parameters; 6 cost nothing measurable, as float16's gradients keep their precision over 16
      bits of scale and more.
    - `window`: steps, and floats in the state. Longer than the time between two spikes, so that a
      spike is remembered when the next one comes.

    It is a rule that takes amax: `update` needs what `grad_amax` tells, which `train_step` hands to
    every rule whose `takes_amax` is True. A scale of 0, inf or NaN, as a damaged checkpoint may
    hold, comes back with the next update.

    >>> import torch
    >>> rule = HeadroomScale(margin=6)
    >>> state = rule.update(rule.init(), torch.tensor(False), torch.tensor(1.0))
    >>> state.scale          # 512 * 2**6 * 1.0 is below 65504, 1024 * 2**6 * 1.0 above
    tensor(512.)

    Source of the rule: delayed scaling of TransformerEngine (amax history, margin), there for casts
    to float8. The factor 2 after an overflow is new: without it a margin of 0 would not back off.
    """

    init_scale: float = 2.0**16
    margin: int = 6
    window: int = 64
    min_scale: float = 2.0**-24
    max_scale: float = 2.0**24

    takes_amax = True

    def __post_init__(self) -> None:
        _checks.settle(self, _checks.power_of_two, "init_scale", "min_scale", "max_scale")
        _checks.settle(self, functools.partial(_checks.whole, least=0, most=39), "margin")
        _checks.settle(self, functools.partial(_checks.whole, least=1), "window")
        if not _LEAST_SCALE <= self.min_scale <= self.init_scale <= self.max_scale:
            raise ValueError(
                f"2**-111 <= min_scale <= init_scale <= max_scale must hold, got "
                f"{self.min_scale!r}, {self.init_scale!r}, {self.max_scale!r}. Fix: move the "
                "bound that is crossed; the widest are min_scale=2.0**-111 and "
                "max_scale=2.0**127."
            )

    def init(self, device: torch.device | str | None = None) -> HeadroomState:
        """The state to start from, on `device` (that of the gradients)."""
        return HeadroomState(
            scale=torch.full((), self.init_scale, dtype=torch.float32, device=device),
            amax_history=torch.zeros(self.window, dtype=torch.float32, device=device),
            consecutive_skips=torch.zeros((), dtype=torch.int32, device=device),
        )

    def update(
        self, scaler: HeadroomState, found_inf: Tensor, amax: Tensor | None = None
    ) -> HeadroomState:
        """The state for the next step. `found_inf`: 0-d bool, True = the step was bad; `amax`: 0-d,
        the largest magnitude of the unscaled gradients before clipping, of any value where the step
        was bad, NaN where nothing is known of them. Reads no value.

        Raises `TypeError` without an `amax` and for the state of another rule, `ValueError` for an
        `amax` that is not 0-d and for a history of another length than `window`.
        """
        self._check(scaler, amax)
        scale, history = scaler.scale, scaler.amax_history
        bad = _tree.flag(found_inf, like=scale)
        seen = torch.where(bad, 2 * _LARGEST / scale, _as_amax(amax, scale))
        told = (seen > 0) & (seen < math.inf)
        growth = 1 + ((seen == 0) & (scale < 1)).to(scale.dtype)  # 2 where every gradient was lost
        history = torch.where(told, torch.cat([history[1:], seen.reshape(1)]), history) / growth
        most = torch.where(history < math.inf, history, 0).amax()
        kept = torch.where(is_usable(scale), scale * growth, self.min_scale)
        return HeadroomState(
            scale=torch.where(most > 0, self._scale_for(most), kept).clamp(
                self.min_scale, self.max_scale
            ),
            amax_history=history,
            consecutive_skips=torch.where(bad, scaler.consecutive_skips + 1, 0),
        )

    def _scale_for(self, most: Tensor) -> Tensor:
        """`2**(floor(log2(65504 / most)) - margin)` between the bounds. A logarithm would round:
        the exponents are subtracted, and the mantissas tell whether there is one more to borrow.
        """
        mantissa, exponent = torch.frexp(most)
        top_mantissa, top_exponent = math.frexp(_LARGEST)
        borrowed = (mantissa > top_mantissa).to(exponent.dtype)
        exponent = (top_exponent - self.margin) - exponent - borrowed
        # Clamped here, as a power that float32 does not hold need not be exact.
        low, high = (math.frexp(bound)[1] - 1 for bound in (self.min_scale, self.max_scale))
        one = torch.ones_like(most)
        return torch.ldexp(one, exponent.clamp(low, high)).to(one.dtype)

    def _check(self, scaler: Any, amax: Any) -> None:
        if amax is None:
            raise TypeError(
                f"{type(self).__name__}.update needs amax, the largest magnitude of the unscaled "
                "gradients. Fix: `rule.update(scaler, found_inf, grad_amax(grads))` of what "
                "unscale_and_check returned, before clipping; train_step hands it over by itself."
            )
        check_state(scaler, HeadroomState)
        history = scaler.amax_history
        if history.shape != (self.window,):
            raise ValueError(
                f"scaler.amax_history has shape {tuple(history.shape)}, the rule looks at "
                f"window={self.window} steps. Likely cause: a state that was saved under another "
                "window. Fix: that window, or `scaler = rule.init(device)`, which is back in its "
                "band after one step; for stacked states, call this under `torch.vmap`."
            )


def _as_amax(amax: Any, like: Tensor) -> Tensor:
    """`amax` as 0-d float32, off every graph: what the scale is made of has no derivative."""
    if not isinstance(amax, Tensor):
        number, most = _checks.real("amax", amax), torch.finfo(torch.float32).max
        within = max(-most, min(number, most)) if math.isfinite(number) else number
        return torch.full_like(like, within)
    if amax.ndim or not amax.is_floating_point():
        raise ValueError(
            f"amax is {amax.dtype} {tuple(amax.shape)}; expected one real number, 0-d. Fix: "
            "`grad_amax(grads)`; for stacked states, call this under `torch.vmap`."
        )
    return saturating(amax.detach(), torch.float32)


@outside_autocast()
def grad_amax(grads: Tree, group: Any = None) -> Tensor:
    """Equal to `max(g.abs().max() for g in tree_leaves(grads))`, from one read and with no sync.

    `grads`: a pytree of dense, sparse or distributed tensors of any floating or complex dtype;
    `None` and tensors without an element count for nothing, duplicate indices of a sparse gradient
    are summed first. Of a complex number the larger of its two parts, which is what overflows.
    `group`: a process group, over whose ranks the largest is taken (one all-reduce); `None` is this
    rank alone. DTensors always reduce over their own mesh.

    Returns a 0-d float32 tensor: NaN where a gradient is, else inf where one is, 0 without
    gradients. What is finite in float64 stays finite.

    Raises `TypeError` for integer and bool leaves, `ValueError` for leaves on several devices.

    >>> import torch
    >>> grad_amax({"w": torch.tensor([1.0, -3.0], dtype=torch.float16), "frozen": None})
    tensor(3.)
    """
    leaves, _ = _tree.flatten(grads)
    _tree.check_gradients(grads, leaves)
    device = _tree.device_of(grads, leaves, "grads")
    one = torch.ones((), dtype=torch.float32, device=device)
    return measure_amax(normalize(leaves), one, group)
