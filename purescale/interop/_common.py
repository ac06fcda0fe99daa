"""The shared parts of the interop files: the update of a rule around its transition, checks of
settings, and state dicts by a table of their keys.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, NamedTuple

import torch
from torch import Tensor

from .._loss_scale.rules import ScalerState, State, check_factors, checked_flag, scaler_state
from .._tree import scalars
from .._tree.pytree import join_names
from .._tree.scalars import checked_positive, checked_whole, increment, short_repr

Device = torch.device | str | None

# ---- rules and states ----------------------------------------------------------------------------


def scalar(value: float, dtype: torch.dtype, device: Device) -> Tensor:
    """Return a number as a 0-d tensor."""
    return torch.full((), value, dtype=dtype, device=device)


class PeerRule(Generic[State]):
    """A rule whose state ends with the overflows in a row, for `check_scaler`. Its `_transition`
    takes the state and the flag of a bad step, and returns all other fields. They share no memory
    with the old ones, because a later donation would overwrite those.
    """

    state_kind: ClassVar[type[Any]]
    first_scale: ClassVar[str]  # the setting that is the first scale
    _transition: Callable[[State, Tensor], dict[str, Tensor]]

    def _check_positive(self, *names: str) -> None:
        """Store settings as positive floats, so that settings of equal value but other type make
        equal rules.
        """
        scalars.normalize_fields(self, checked_positive, *names)

    def _check_counts(self, *names: str, least: int = 1) -> None:
        """Store settings as ints of at least `least`."""
        scalars.normalize_fields(self, functools.partial(checked_whole, least=least), *names)

    def _check_factors(self, growth: str, *backoff: str) -> None:
        """Store a growth factor above 1 and a backoff factor below 1 as positive floats."""
        self._check_positive(growth, *backoff)
        check_factors(self, growth, *backoff)

    def update(self, scaler: State, found_inf: Tensor) -> State:
        """Return the state for the next step. `found_inf`: 0-d bool, True if the step was bad.
        Reads no value; raises only for another rule's state.
        """
        bad = checked_flag(found_inf, scaler, self.state_kind)
        skips: Tensor = scaler.consecutive_skips  # type: ignore[attr-defined]
        return self.state_kind(
            **self._transition(scaler, bad),
            consecutive_skips=torch.where(bad, increment(skips, True), 0),
        )


class ScaleAndCount(PeerRule[ScalerState]):
    """A rule whose state is a scale and one count of steps. `_next` is its transition."""

    state_kind = ScalerState
    first_count: ClassVar[str | None] = None  # the setting that is the first count, or 0
    _next: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # of scale, count and flag

    def init(self, device: Device = None) -> ScalerState:
        """Return the initial state, on `device` (that of the gradients)."""
        count = getattr(self, self.first_count) if self.first_count else 0
        return scaler_state(getattr(self, self.first_scale), count, device=device)

    def _transition(self, state: ScalerState, bad: Tensor) -> dict[str, Tensor]:
        scale, count = self._next(state.scale, state.growth_tracker, bad)
        unused = torch.zeros_like(state.hysteresis_tracker)
        return {"scale": scale, "growth_tracker": count, "hysteresis_tracker": unused}


def check_bool(name: str, value: Any) -> None:
    """Check that `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(
            f"{name} must be True or False, got {value!r} ({type(value).__name__}). Fix: "
            f"{name}=False, or True."
        )


# ---- state dicts ---------------------------------------------------------------------------------


def check_dict(
    d: Any, peer: str, required: Sequence[str], optional: Sequence[str] | None = ()
) -> None:
    """Check that `d` is a state dict of `peer`. With `optional=None` it may have any other keys."""
    if not isinstance(d, Mapping):
        raise TypeError(
            f"interop.{peer}.from_state_dict takes a state dict, got {type(d).__name__}. Fix: pass "
            "what `state_dict()` or torch.load returned, not the object or its path."
        )
    known = d if optional is None else {*required, *optional}
    if not (set(required) <= set(d) <= set(known)):
        expected, got = (join_names(list(map(repr, keys)), 12) for keys in (required, d))
        raise ValueError(
            f"interop.{peer}.from_state_dict expects {expected}; got {got}. Fix: the scaler's own "
            "dict as it was saved, by the file of the library that wrote it; for the empty one of "
            "a disabled scaler `NoScale()`."
        )


# ---- state dicts by a table ----------------------------------------------------------------------


class Entry(NamedTuple):
    """The entry under a key of a state dict: the scale or a count of the state."""

    field: str  # of the state
    least: int = 0  # of a count; the most is that of its dtype


SCALE = Entry("scale")
COUNT = Entry("growth_tracker")


@dataclasses.dataclass(frozen=True)
class Format:
    """The state dict of a peer as a table of its keys."""

    peer: str
    rule: Any  # its class
    entries: Mapping[str, Entry]  # of the state
    settings: Sequence[str] = ()  # which are keys too
    settings_required: bool = True

    def check(self, d: Any) -> None:
        """Refuse what is not a dict with these keys and no others."""
        required = [*self.entries, *(self.settings if self.settings_required else ())]
        check_dict(d, self.peer, required, self.settings)

    def read(
        self, d: Mapping[str, Any], settings: Mapping[str, Any], device: Device, **defaults: Any
    ) -> tuple[Any, Any]:
        """Return the rule and the state of `d`, which holds at least the scale. A count that it
        does not hold starts as in `init`; a first scale that is not given is the saved one.
        """
        key = next(key for key, entry in self.entries.items() if entry == SCALE)
        scale = checked_positive(key, d[key])
        # A key of the state is a setting too, if the peer starts from a setting of that name.
        names = {field.name for field in dataclasses.fields(self.rule)}
        keys = (*self.entries, *self.settings)
        saved = {key: d[key] for key in keys if key in names and key in d}
        for name, value in saved.items():
            if name in settings and settings[name] != value:
                raise ValueError(
                    f"{name}={short_repr(settings[name])} contradicts the state dict, which has "
                    f"{short_repr(value)}. Fix: leave it out; `dataclasses.replace` changes a rule."
                )
        rule = self.rule(**{self.rule.first_scale: scale, **defaults, **settings, **saved})

        state = rule.init(device)
        fields = {"scale": torch.full_like(state.scale, scale)}
        for key, (field, least) in self.entries.items():
            if field != "scale" and key in d:
                start = getattr(state, field)
                count = checked_whole(key, d[key], least, torch.iinfo(start.dtype).max)
                fields[field] = torch.full_like(start, count)
        return rule, state._replace(**fields)

    def write(self, rule: Any, scaler: Any) -> dict[str, Any]:
        """Return the state dict of a rule and its state, if the format can hold them."""
        kind = self.rule.state_kind
        if not (isinstance(rule, self.rule) and isinstance(scaler, kind)):
            raise TypeError(
                f"interop.{self.peer}.to_state_dict got {rule!r} and a {type(scaler).__name__}; "
                f"expected a rule that `interop.{self.peer}.rule(...)` returned and its "
                f"{kind.__name__}. Fix: to_state_dict(rule, state.scaler)."
            )
        if scaler.scale.ndim:
            raise ValueError("to_state_dict got stacked states. Fix: `member(state, i)`.")
        state = {key: getattr(scaler, field).item() for key, (field, _) in self.entries.items()}
        return {**state, **{key: getattr(rule, key) for key in self.settings}}
