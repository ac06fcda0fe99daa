"""The protocols of loss-scale rules and their states, and the checks of both."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from .._tree import tree as _tree
from .._tree.scalars import not_made


class HasScale(Protocol):
    """The protocol of the state of a rule: any NamedTuple of tensors with a 0-d `scale`."""

    @property
    def scale(self) -> Tensor: ...


State = TypeVar("State", bound=HasScale)


class Rule(Protocol[State]):
    """The protocol of a rule: any object with these two pure methods. Neither reads a tensor's
    value; they raise only for wrong arguments, such as the state of another rule. If the class has
    `takes_amax = True`, `update` gets `grad_amax` as a third argument.
    """

    def init(self, device: torch.device | str | None = None) -> State: ...

    def update(self, scaler: State, found_inf: Tensor, /, *args: Any, **kwargs: Any) -> State: ...


def takes_amax(rule: Any) -> bool:
    """Return True if `rule.update` takes the largest gradient."""
    return bool(getattr(rule, "takes_amax", False))


def call_rule(rule: Any, scaler: Any, found_inf: Tensor, amax: Any) -> Any:
    """Call `rule.update`, with `amax` if the rule takes it."""
    return rule.update(scaler, found_inf, *([amax] if takes_amax(rule) else []))


def check_rule(rule: Any) -> None:
    """Refuse an object that is not a rule, and an `update` that does not match `takes_amax`."""
    wants_amax = takes_amax(rule)
    if not torch.compiler.is_dynamo_compiling() and _CHECKED.get(type(rule)) is wants_amax:
        return
    if what := not_made(rule, "init", "update"):
        raise TypeError(
            f"rule is {what}; expected an object with `init(device)` and `update(scaler, "
            "found_inf)`. Fix: DynamicScale(); docs/recipes.md has a rule of your own."
        )
    if torch.compiler.is_dynamo_compiling():
        return
    arguments = "scaler, found_inf, amax" if wants_amax else "scaler, found_inf"
    try:
        inspect.signature(rule.update).bind(*arguments.split(", "))
    except ValueError:  # no signature, because it is not a Python function
        pass
    except TypeError:
        raise TypeError(
            f"{type(rule).__name__}.update cannot be called as update({arguments}), and takes_amax "
            f"is {wants_amax}. Fix: `takes_amax = True` in the class and `def update(self, scaler, "
            "found_inf, amax)` if the rule needs the largest gradient; otherwise neither."
        ) from None
    _CHECKED[type(rule)] = wants_amax


# The classes whose `update` was checked, because a signature costs as much as an update.
_CHECKED: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()

Update = TypeVar("Update", bound=Callable[..., Any])


def without_amax(update: Update) -> Update:
    """Decorate the `update` of a rule that takes no amax: it raises `TypeError` if it is
    given one.
    """

    @functools.wraps(update)
    def checked(rule: Any, scaler: Any, found_inf: Tensor, *amax: Any, **named: Any) -> Any:
        if amax or named:
            raise TypeError(
                f"{type(rule).__name__}.update takes no amax, only the flag. Fix: "
                "`rule.update(scaler, found_inf)`, or HeadroomScale(), which uses it."
            )
        return update(rule, scaler, found_inf)

    return checked  # type: ignore[return-value]


def checked_flag(found_inf: Any, scaler: Any, kind: type[Any]) -> Tensor:
    """Return `found_inf` as a 0-d bool tensor; refuse the state of another rule."""
    check_state(scaler, kind)
    return _tree.flag(found_inf, like=scaler.scale)


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
        f"scaler is {type(scaler).__name__}; expected a {kind.__name__}, a tuple of "
        f"{', '.join(kind._fields)}. It has {', '.join(present) or 'none of them'}; "
        f"missing: {', '.join(missing)}. Likely cause: {cause}. Fix: "
        f"{fix or '`scaler = rule.init(device)`'}."
    )
