"""apex.amp: its static and dynamic scaler as a rule, and its opt levels as a policy and a rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._loss_scale.rules import NoScale, ScalerState, scaler_state
from .._module.policy import Policy
from .._tree.scalars import checked_positive, checked_real, checked_whole, increment
from ._common import COUNT, SCALE, Device, Format, ScaleAndCount, check_bool, check_dict

# ---- the scaler ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ApexScale(ScaleAndCount):
    """Equal to `LossScaler.update_scale()`: `max(min_loss_scale, scale / 2), 0` when bad, else
    `min(max_loss_scale, scale * 2)`.

    Equal bit for bit within float32's range if both bounds are powers of two; apex computes in
    Python floats. It follows apex where `DynamicScale` does not:

    - Without a floor the scale can become 0 and then stays 0: no step is taken, and `check_scaler`
      raises.
    - `max_loss_scale` also clamps `init_scale`.
    - The count is compared with `==`.

    One difference is deliberate: with a static scale apex takes a step that overflows, and here
    every overflow is skipped.

    Args:
        loss_scale: "dynamic", or a number, also as a string, for a static scale.
        init_scale: The first scale.
        scale_factor: Accepted and not used, as in apex.
        scale_window: The number of clean steps before a growth.
        min_loss_scale: The floor; None or 0.0 for a scale without one.
        max_loss_scale: The ceiling.

    Raises:
        TypeError, ValueError: A setting is not a number, or out of range.

    Example:
        >>> from purescale.simulate import simulate
        >>> simulate(rule(init_scale=2.0**30, scale_window=1), [True, False, False]).scale
        tensor([16777216.,  8388608., 16777216., 16777216.])

    Source of the rule: apex/amp/scaler.py.
    """

    loss_scale: float | str = "dynamic"
    init_scale: float = 2.0**16
    scale_factor: float = 2.0
    scale_window: int = 2000
    min_loss_scale: float | None = None
    max_loss_scale: float = 2.0**24

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss_scale", _loss_scale(self.loss_scale))
        self._check_positive("init_scale", "scale_factor", "max_loss_scale")
        self._check_counts("scale_window")
        if self.min_loss_scale is not None and checked_real("min_loss_scale", self.min_loss_scale):
            self._check_positive("min_loss_scale")
        if (self.min_scale or 0.0) > self.max_loss_scale:
            raise ValueError(
                f"min_loss_scale <= max_loss_scale must hold, got {self.min_loss_scale!r} and "
                f"{self.max_loss_scale!r}. Fix: lower min_loss_scale or raise max_loss_scale."
            )

    @property
    def dynamic(self) -> bool:
        """Return True if the scale moves."""
        return self.loss_scale == "dynamic"

    @property
    def min_scale(self) -> float | None:
        """The floor under the name that `check_scaler` reads, or None."""
        return (self.min_loss_scale or None) if self.dynamic else None

    def init(self, device: Device = None) -> ScalerState:
        """Return the initial state, on `device` (that of the gradients)."""
        return scaler_state(
            min(self.init_scale, self.max_loss_scale) if self.dynamic else float(self.loss_scale),
            device=device,
        )

    def _next(self, scale: Tensor, count: Tensor, bad: Tensor) -> tuple[Tensor, Tensor]:
        unskipped = increment(count, True)
        if not self.dynamic:
            return scale.clone(), unskipped
        interval_reached = ~bad & (unskipped == self.scale_window)
        grown = (scale * 2).clamp(max=self.max_loss_scale)
        lowered = scale / 2
        if self.min_scale is not None:
            lowered = lowered.clamp(min=self.min_scale)
        return (
            torch.where(bad, lowered, torch.where(interval_reached, grown, scale)),
            torch.where(bad | interval_reached, 0, unskipped),
        )


rule = ApexScale
_FORMAT = Format("apex", ApexScale, {"loss_scale": SCALE, "unskipped": COUNT})  # of one loss


def _loss_scale(value: Any) -> float | str:
    """Return `"dynamic"` or the number, which may be a string, as apex reads it."""
    if value == "dynamic":
        return "dynamic"
    return checked_positive("loss_scale", float(value) if isinstance(value, str) else value)


# ---- state dicts ---------------------------------------------------------------------------------

Rules = ApexScale | tuple[ApexScale, ...]
States = ScalerState | tuple[ScalerState, ...]


def from_state_dict(
    d: Mapping[str, Any], *, device: Device = None, **settings: Any
) -> tuple[Rules, States]:
    """Equal to `rule(**settings), state of d["loss_scaler0"]`; with several losses, a tuple of
    rules and a tuple of states.

    Args:
        d: What `apex.amp.state_dict()` returned. It does not hold settings.
        device: The device of the gradients.
        settings: The job's settings of `rule`, one set for all losses.

    Returns:
        The rule and its state, or a tuple of each.

    Raises:
        TypeError: A value is not a number.
        ValueError: `d` is another library's dict or the `{}` of a disabled amp, its scale cannot
            train, or a static `loss_scale` differs from the saved one.

    Example:
        >>> d = {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 7}}
        >>> scaler, state = from_state_dict(d, scale_window=500)
        >>> state.scale, state.growth_tracker
        (tensor(1024.), tensor(7, dtype=torch.int32))

    Source of the format: state_dict of apex/amp/frontend.py.
    """
    count = len(d) if isinstance(d, Mapping) and d else 1
    names = [f"loss_scaler{index}" for index in range(count)]
    check_dict(d, "apex", names)
    pairs = [_read_loss(d[name], device, settings) for name in names]
    if len(pairs) == 1:
        return pairs[0]
    rules, states = zip(*pairs, strict=True)
    return rules, states


def _read_loss(
    d: Any, device: Device, settings: Mapping[str, Any]
) -> tuple[ApexScale, ScalerState]:
    """Return the rule and the state of one loss."""
    _FORMAT.check(d)
    scale = checked_positive("loss_scale", d["loss_scale"])
    scaler = rule(**{"init_scale": scale, **settings})
    if scaler.loss_scale not in ("dynamic", scale):
        raise ValueError(
            f"loss_scale={scaler.loss_scale!r} contradicts the state dict, which has {scale!r}. "
            "Fix: loss_scale='dynamic', the default, if the job was dynamic."
        )
    return scaler, scaler_state(scale, checked_whole("unskipped", d["unskipped"]), device=device)


def to_state_dict(rule: Rules, scaler: States) -> dict[str, Any]:
    """Syncs with the host. Equal to what `apex.amp.state_dict()` returns at this point, for
    `amp.load_state_dict`.

    Args:
        rule: An `ApexScale`, or a tuple of one for each loss, as `initialize` returns.
        scaler: Its state, or a tuple of states.

    Returns:
        The state dict.

    Raises:
        TypeError: A rule is another library's.
        ValueError: A state is stacked, or the tuples have different lengths.

    Example:
        >>> to_state_dict(rule(), rule().init())
        {'loss_scaler0': {'loss_scale': 65536.0, 'unskipped': 0}}
    """
    rules = rule if isinstance(rule, tuple) else (rule,)
    states = scaler if type(scaler) is tuple else (scaler,)  # a ScalerState is a tuple too
    return {
        f"loss_scaler{index}": _FORMAT.write(*pair)
        for index, pair in enumerate(zip(rules, states, strict=True))
    }


# ---- opt levels ----------------------------------------------------------------------------------


class _Level(NamedTuple):
    """apex's properties of an opt level; as overrides, None means not given."""

    cast_model_type: Any  # False, as None: no cast
    patch_torch_functions: bool | None
    keep_batchnorm_fp32: bool | None
    master_weights: bool | None
    loss_scale: Any


_LEVELS = {
    "O0": _Level(torch.float32, False, None, False, 1.0),
    "O1": _Level(None, True, None, None, "dynamic"),
    "O2": _Level(torch.float16, False, True, True, "dynamic"),
    "O3": _Level(torch.float16, False, False, False, 1.0),
}


def initialize(
    opt_level: str = "O1",
    loss_scale: float | str | None = None,
    cast_model_type: Any = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    enabled: bool = True,
) -> tuple[Policy, Any]:
    """Equal to `policy(...), rule(...)` for what `apex.amp.initialize` would do to a model and its
    optimizer.

    | opt_level | policy | loss_scale |
    |---|---|---|
    | O0 | params=float32,compute=float32,output=float32 | 1.0 |
    | O1 | params=float32,compute=autocast(float16),norms=float32 | "dynamic" |
    | O2 | params=float32,compute=float16,output=float32,norms=float32 | "dynamic" |
    | O3 | params=float16,compute=float16,output=float32,norms=float16 | 1.0 |

    An argument that is not None overrides that of the level. Overflows of a static scale are
    skipped here, but not in apex.

    Args:
        opt_level: "O0", "O1", "O2" or "O3".
        loss_scale: "dynamic" or a number, also as a string.
        cast_model_type: The dtype of the computation; False for no cast.
        patch_torch_functions: If True, torch's op lists choose the dtypes. Only in O1.
        keep_batchnorm_fp32: If True, all norms compute in float32. May be "True" or "False".
        master_weights: If False, parameters are kept in `cast_model_type` and not in float32.
        cast_model_outputs: The dtype of the outputs, float32 by default. In O1 each output is left
            in its own dtype by default.
        num_losses: The number of losses; above 1 the second result is a tuple of rules.
        min_loss_scale: The floor of the scale, see `ApexScale`.
        max_loss_scale: The ceiling of the scale.
        enabled: If False, the result is a float32 policy and `NoScale()`.

    Returns:
        The policy and the rule.

    Raises:
        RuntimeError: As in apex: an unknown `opt_level`, or an argument that contradicts it. In O1
            these are `cast_model_type`, `keep_batchnorm_fp32` and `master_weights`, in other
            levels `patch_torch_functions=True`.
        TypeError: A value has the wrong type.
        ValueError: apex does not accept a value.

    Example:
        >>> policy, scaler = initialize("O2", loss_scale="128.0", keep_batchnorm_fp32="True")
        >>> policy.compute_dtype, policy.norm_dtype, scaler.loss_scale
        (torch.float16, torch.float32, 128.0)

    Source of the levels: apex/amp/frontend.py, apex/amp/_initialize.py.
    """
    count = checked_whole("num_losses", num_losses, least=1)
    if not enabled:
        return Policy(), NoScale() if count == 1 else (NoScale(),) * count
    keep_norms: Any = keep_batchnorm_fp32
    keep_norms = {"True": True, "False": False}.get(str(keep_norms), keep_norms)
    overrides = cast_model_type, patch_torch_functions, keep_norms, master_weights, loss_scale
    level = _resolved_level(opt_level, _Level(*overrides))
    scaling = ApexScale(
        level.loss_scale, min_loss_scale=min_loss_scale, max_loss_scale=max_loss_scale
    )
    policy = _policy(level, cast_model_outputs)
    return policy, scaling if count == 1 else (scaling,) * count


def _resolved_level(opt_level: str, overrides: _Level) -> _Level:
    """Check the overrides and apply them to the level."""
    if opt_level not in list(_LEVELS):
        raise RuntimeError(
            f"unknown opt_level {opt_level!r}; expected 'O0', 'O1', 'O2' or 'O3'. Fix: "
            "opt_level='O1', the default."
        )
    flags = ("patch_torch_functions", "keep_batchnorm_fp32", "master_weights")
    for name in flags:
        if getattr(overrides, name) is not None:
            check_bool(name, getattr(overrides, name))
    allowed: dict[str, tuple[Any, ...]] = {"patch_torch_functions": (None, False)}
    if opt_level == "O1":  # it casts operator by operator
        allowed = {"keep_batchnorm_fp32": (None,), "master_weights": (None,)}
        allowed["cast_model_type"] = (None, False, torch.float32)
    for name, values in allowed.items():
        if (value := getattr(overrides, name)) not in values:
            raise RuntimeError(
                f"{name}={value} contradicts opt_level={opt_level!r}. Fix: leave it out; for "
                "torch's op lists opt_level='O1', for a model that is cast 'O2'."
            )
    pairs = zip(_LEVELS[opt_level], overrides, strict=True)
    return _Level(*(default if override is None else override for default, override in pairs))


def _policy(level: _Level, output: torch.dtype | None) -> Policy:
    if output is None and (level.cast_model_type or not level.patch_torch_functions):
        output = torch.float32  # apex casts the outputs of a model that it has cast
    if level.patch_torch_functions:
        # Norms are among the float32 operators in apex's lists.
        half, wide = torch.float16, torch.float32
        return Policy(compute_dtype=half, output_dtype=output, norm_dtype=wide, autocast=True)
    compute = level.cast_model_type or torch.float32
    wide = torch.promote_types(compute, torch.float32)
    return Policy(
        param_dtype=wide if level.master_weights else compute,
        compute_dtype=compute,
        output_dtype=output,
        norm_dtype=wide if level.keep_batchnorm_fp32 else compute,
    )
