"""The protocols of a loss scale's rule and state, how a step calls a rule, and what is refused."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from .._tree import tree


class HasScale(Protocol):
    """Any NamedTuple of 0-d tensors with a `scale`: what a rule of your own may keep."""

    @property
    def scale(self) -> Tensor: ...


State = TypeVar("State", bound=HasScale)


class Rule(Protocol[State]):
    """Anything with these two pure methods is a rule. Neither reads a tensor's value; they raise
    only for wrong arguments, such as the state of another rule. If the class says `takes_amax =
    True`, `update` gets `grad_amax` as a third argument.
    """

    def init(self, device: torch.device | str | None = None) -> State: ...

    def update(self, scaler: State, found_inf: Tensor, /, *args: Any, **kwargs: Any) -> State: ...


def takes_amax(rule: Any) -> bool:
    """Whether `rule.update` takes the largest gradient."""
    return bool(getattr(rule, "takes_amax", False))


def call_rule(rule: Any, scaler: Any, found_inf: Tensor, amax: Any) -> Any:
    """`rule.update`, with `amax` for a rule that takes it."""
    return rule.update(scaler, found_inf, *([amax] if takes_amax(rule) else []))


def check_rule(rule: Any) -> None:
    """Refuse what is no rule, and a rule whose `update` does not match its `takes_amax`."""
    if isinstance(rule, type):
        raise TypeError(
            f"rule is the class {rule.__name__}; expected one that was made. Fix: "
            f"rule={rule.__name__}()."
        )
    missing = [name for name in ("init", "update") if not callable(getattr(rule, name, None))]
    if missing:
        raise TypeError(
            f"rule is {type(rule).__name__}, without "
            f"{' and '.join(f'`{name}`' for name in missing)}; expected an object with "
            "`init(device)`, which gives the state to start from, and `update(scaler, "
            "found_inf)`, which gives the next one. Fix: DynamicScale(), StaticScale(512.0) or "
            "NoScale(); docs/recipes.md has a rule of your own."
        )
    if torch.compiler.is_dynamo_compiling():
        return
    cls: Any = type(rule)
    function, wants = getattr(cls, "update", None), takes_amax(rule)
    if function is None or _accepts(cls, function, wants):
        return
    given = "scaler, found_inf, amax" if wants else "scaler, found_inf"
    raise TypeError(
        f"{type(rule).__name__}.update cannot be called as update({given}), and takes_amax is "
        f"{wants}. Fix: `takes_amax = True` in the class and `def update(self, scaler, found_inf, "
        "amax)` for a rule that looks at the largest gradient; neither for one that does not."
    )


@functools.lru_cache(maxsize=64)
def _accepts(cls: Any, function: Any, wants: bool) -> bool:
    given = [None] * (3 if wants else 2)
    if not isinstance(inspect.getattr_static(cls, "update"), (staticmethod, classmethod)):
        given.append(None)  # self
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # not a Python function
        return True
    try:
        signature.bind(*given)
    except TypeError:
        return False
    return True


Update = TypeVar("Update", bound=Callable[..., Any])


def without_amax(update: Update) -> Update:
    """A decorator for `update` of a rule that takes no amax: raises `TypeError` if it is
    given one.
    """

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
    """`found_inf` as a 0-d bool tensor; raises if `scaler` is not a state of this kind."""
    check_state(scaler, kind)
    return tree.flag(found_inf, like=scaler.scale)


def check_state(scaler: Any, kind: type[Any]) -> None:
    """Refuse the state of another rule, which lacks fields that `update` uses."""
    if isinstance(scaler, kind):
        return
    present = [name for name in kind._fields if isinstance(getattr(scaler, name, None), Tensor)]
    missing = [name for name in kind._fields if name not in present]
    if not missing:
        return
    cause, fix = "a rule that was replaced in mid-run, or a checkpoint of another rule", ""
    if hasattr(scaler, "scaler"):
        cause, fix = "the state of a whole step", "`rule.update(state.scaler, found_inf)`"
    elif isinstance(scaler, dict):
        cause, fix = "a state that was saved as a dict", f"`{kind.__name__}(**scaler)`"
    elif "scale" in present:
        device = str(scaler.scale.device)
        fix = f"`scaler = rule.init({device!r})._replace(scale=scaler.scale)`"
    raise TypeError(
        f"scaler is {type(scaler).__name__}; expected a {kind.__name__}: this rule's state is a "
        f"tuple of {', '.join(kind._fields)}. It has {', '.join(present) or 'none of them'}; "
        f"missing: {', '.join(missing)}. Likely cause: {cause}. Fix: "
        f"{fix or '`scaler = rule.init(device)`'}."
    )
