"""HeadroomScale: a loss scale from the largest gradients of the last steps, which avoids overflows
before they happen.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._distributed.process_group import Group
from .._grads.measure import measure_amax
from .._loss_scale.rules import builtin_update, check_state
from .._torch.autocast import outside_autocast
from .._torch.dtypes import cast_saturating
from .._tree import scalars
from .._tree.gradients import Gradients
from .._tree.hints import document_fields
from .._tree.matching import device_of, flatten_gradients
from .._tree.pytree import Tree
from .._tree.scalars import as_flag, increment

_LARGEST = 65504.0  # of float16
_MOST_ZEROS = 2000  # steps; the usual interval of a rule that grows
_PATIENCE = 4  # skips in a row after which the scale may be why a loss is not finite
_LEAST_SCALE = 2.0**-111  # at a lower scale 2 * 65504 / scale overflows float32


@document_fields
class HeadroomState(NamedTuple):
    """The state of HeadroomScale, on one device; make it with `rule.init(device)`.

    Attributes:
        scale: float32 []. The factor of the loss.
        amax_history: float32 [window]. The largest gradients, the latest last; 0 where there was no
            step yet.
        consecutive_skips: int32 []. The number of overflows and of losses that are not finite, in a
            row, for `check_scaler`.
        consecutive_zeros: int32 []. The number of steps in a row in which all gradients were 0.
    """

    scale: Tensor
    amax_history: Tensor
    consecutive_skips: Tensor
    consecutive_zeros: Tensor


@dataclasses.dataclass(frozen=True)
class HeadroomScale:
    """The largest power of two that leaves `margin` bits between the largest gradient of the last
    `window` informative steps and float16's largest number.

    Equal, for a step whose largest unscaled gradient is `amax`, to

        skips = skips + 1 if found_inf or not amax < inf else 0
        overflow = found_inf or (skips > 0 and skips % 4 == 0)
        seen = 2 * 65504 / scale if overflow else amax
        if isfinite(seen) and seen > 0:             # informative
            history = [*history[1:], seen]
        elif seen == 0 and (scale < 1 or 2000 in a row):  # every gradient may be lost
            history = [past / 2 for past in history]
        scale = 2.0 ** (floor(log2(65504 / max(history))) - margin)

    in exact arithmetic, clamped to `[min_scale, max_scale]`. Before the first informative step the
    history is empty: `scale` stays as it is, and doubles if a history would be halved. Gradients up
    to `2**margin` times as large as any in the window do not overflow. One overflow lowers the
    scale by `margin + 1` bits at once, because it shows only that the gradients were too large.

    - Gradients that are all 0 raise a scale below 1, up to 1, because such a scale makes gradients
      smaller and may be the reason why they are 0. At 1 and above only 2000 such steps in a row
      raise it, by one bit: with sparse rewards most gradients are 0, and a rule that grew on them
      at once would overflow on the others. So every start works, and the scale recovers from any
      run of overflows and from any fall of the gradients.
    - If the loss itself is not finite, `train_step` passes `found_inf=False` and an `amax` of NaN.
      The step is skipped, and the scale stays, because the usual cause is the data. Every fourth
      skip in a row counts as an overflow all the same, because a loss that holds a gradient scaled
      by `scale` is finite at a lower one. So no loss is skipped for ever at a scale that is its
      cause. A loop by hand does the same with
      `rule.update(scaler, found_inf & torch.isfinite(loss), amax)`; over several ranks the loss in
      it must be that of all, or their scales part.

    `takes_amax` is True: `update` needs the result of `grad_amax`, which `train_step` passes to
    every such rule. The next update repairs a scale of 0, inf or NaN, as a damaged checkpoint may
    have.

    Args:
        init_scale: The scale until the first informative step: a power of two.
        margin: Bits, 0 to 39 (float16 has 40). Gradients of activations are larger than those of
            parameters, which 2 bits allow for; 6 cost no measurable precision, because float16
            gradients keep theirs over at least 16 bits of scale.
        window: The number of steps in the history. It should be longer than the time between two
            spikes, so that the history still holds the last spike when the next one comes.
        min_scale, max_scale: Powers of two, `min_scale <= init_scale <= max_scale`, from 2**-111 to
            2**127.

    Raises:
        ValueError: A setting is out of range.
        TypeError: A setting is not a number.

    Example:
        >>> import torch
        >>> rule = HeadroomScale(margin=6)
        >>> state = rule.update(rule.init(), torch.tensor(False), torch.tensor(1.0))
        >>> state.scale          # 512 * 2**6 * 1.0 is below 65504, 1024 * 2**6 * 1.0 above
        tensor(512.)

    Source of the rule: delayed scaling of TransformerEngine (amax history, margin), there for casts
    to float8. The factor 2 after an overflow is ours: without it a margin of 0 would not back off.
    """

    init_scale: float = 2.0**16
    margin: int = 6
    window: int = 64
    min_scale: float = 2.0**-24
    max_scale: float = 2.0**24

    takes_amax = True

    def __post_init__(self) -> None:
        scalars.normalize_fields(
            self, scalars.checked_power_of_two, "init_scale", "min_scale", "max_scale"
        )
        scalars.normalize_fields(
            self, functools.partial(scalars.checked_whole, least=0, most=39), "margin"
        )
        scalars.normalize_fields(self, functools.partial(scalars.checked_whole, least=1), "window")
        if not _LEAST_SCALE <= self.min_scale <= self.init_scale <= self.max_scale:
            raise ValueError(
                "2**-111 <= min_scale <= init_scale <= max_scale must hold, got "
                f"{self.min_scale!r}, {self.init_scale!r}, {self.max_scale!r}. Fix: move the bound "
                "that is crossed."
            )

    def init(self, device: torch.device | str | None = None) -> HeadroomState:
        """Return the state to start from, on `device` (that of the gradients)."""
        return HeadroomState(
            scale=torch.full((), self.init_scale, dtype=torch.float32, device=device),
            amax_history=torch.zeros(self.window, dtype=torch.float32, device=device),
            consecutive_skips=torch.zeros((), dtype=torch.int32, device=device),
            consecutive_zeros=torch.zeros((), dtype=torch.int32, device=device),
        )

    @builtin_update
    def update(
        self, scaler: HeadroomState, found_inf: Tensor, amax: Tensor | None = None
    ) -> HeadroomState:
        """Return the state for the next step. Reads no tensor value.

        Args:
            scaler: The state that scaled the loss.
            found_inf: 0-d bool, True if the step was bad.
            amax: 0-d, the largest magnitude of the unscaled gradients before clipping. Any value if
                the step was bad, NaN or inf if the loss was not finite, -1 if it is not known.

        Raises:
            TypeError: `amax` is missing, or `scaler` is the state of another rule.
            ValueError: `amax` is not 0-d, or the history has another length than `window`.
        """
        self._check(scaler, amax)
        scale, history = scaler.scale, scaler.amax_history
        found_inf, amax = as_flag(found_inf, like=scale), _as_amax(amax, scale)
        skips, not_finite = increment(scaler.consecutive_skips, True), ~(amax < math.inf)
        overflow = found_inf | (not_finite & (skips % _PATIENCE == 0))
        seen = torch.where(overflow, 2 * _LARGEST / scale, amax)
        informative = (seen > 0) & (seen < math.inf)
        all_zero = seen == 0
        zeros = scaler.consecutive_zeros.clamp(0, _MOST_ZEROS) + all_zero
        lost = all_zero & ((scale < 1) | (zeros >= _MOST_ZEROS))
        growth = 1 + lost
        history = (
            torch.where(informative, torch.cat([history[1:], seen.reshape(1)]), history) / growth
        )
        largest = history.nan_to_num(0.0, 0.0).amax()
        unchanged = scale.nan_to_num(0.0, 0.0, 0.0) * growth  # the clamp repairs 0 and less
        return HeadroomState(
            scale=torch.where(largest > 0, self._scale_for(largest), unchanged).clamp(
                self.min_scale, self.max_scale
            ),
            amax_history=history,
            consecutive_skips=skips * (found_inf | not_finite),
            consecutive_zeros=zeros.masked_fill(informative | lost, 0),
        )

    def _scale_for(self, largest: Tensor) -> Tensor:
        """Return `2**(floor(log2(65504 / largest)) - margin)` between the bounds. A logarithm would
        round, so exponents are subtracted, with a borrow if the mantissa of `largest` is the larger
        one.
        """
        mantissa, exponent = torch.frexp(largest)
        top_mantissa, top_exponent = math.frexp(_LARGEST)
        borrowed = (mantissa > top_mantissa).to(exponent.dtype)
        exponent = (top_exponent - self.margin) - exponent - borrowed
        # Clamped before ldexp, because that is not exact beyond the range of float32.
        low, high = (math.frexp(bound)[1] - 1 for bound in (self.min_scale, self.max_scale))
        one = torch.ones_like(largest)
        return torch.ldexp(one, exponent.clamp(low, high)).to(one.dtype)

    def _check(self, scaler: Tree, amax: Any) -> None:
        """Refuse a missing amax, and the state of another rule or window."""
        if amax is None:
            raise TypeError(
                f"{type(self).__name__}.update needs amax, the largest magnitude of the unscaled "
                "gradients. Fix: `rule.update(scaler, found_inf, grad_amax(grads))`."
            )
        check_state(scaler, HeadroomState)
        history = scaler.amax_history
        if history.shape != (self.window,):
            raise ValueError(
                f"scaler.amax_history has shape {tuple(history.shape)}, the rule has "
                f"window={self.window}. Fix: `scaler = rule.init(device)`; for stacked states, "
                "`torch.vmap`."
            )


def _as_amax(amax: Any, like: Tensor) -> Tensor:
    """Return `amax` as 0-d float32, detached, because the scale has no derivative."""
    if not isinstance(amax, Tensor):
        number, limit = scalars.checked_real("amax", amax), torch.finfo(torch.float32).max
        clamped = max(-limit, min(number, limit)) if math.isfinite(number) else number
        return torch.full_like(like, clamped)
    if amax.ndim or not amax.is_floating_point():
        raise ValueError(
            f"amax is {amax.dtype} {tuple(amax.shape)}; expected one real number, 0-d. Fix: "
            "`grad_amax(grads)`; for stacked states, call this under `torch.vmap`."
        )
    return cast_saturating(amax.detach(), torch.float32)


@outside_autocast()
def grad_amax(grads: Tree, group: Group | None = None) -> Tensor:
    """Equal to `max(g.abs().max() for g in tree_leaves(grads))`, from one pass and without a sync.

    Args:
        grads: A pytree of dense, sparse or distributed tensors of any floating or complex dtype;
            `None` and empty tensors are left out. Duplicate indices of a sparse gradient are summed
            first, and a complex number counts with the larger of its two parts, because each
            overflows by itself.
        group: A process group, for the maximum over its ranks (one all-reduce); by default this
            rank alone. DTensors always reduce over their own mesh.

    Returns:
        A 0-d float32 tensor: NaN if a gradient has a NaN, else inf if one has an inf; 0 without
        gradients. A finite float64 beyond float32 becomes float32's largest number.

    Raises:
        TypeError: A leaf is not floating or complex.
        ValueError: Leaves are on several devices.

    Example:
        >>> import torch
        >>> grad_amax({"w": torch.tensor([1.0, -3.0], dtype=torch.float16), "frozen": None})
        tensor(3.)
    """
    flat = flatten_gradients(grads)
    device = device_of(grads, flat.leaves, "grads")
    one = torch.ones((), dtype=torch.float32, device=device)
    return measure_amax(Gradients.of(flat), one, group)
