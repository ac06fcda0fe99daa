"""Settings that an optimizer's state holds as tensors: checked, created, restored, replaced."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._optim.opt_state import OptState, map_opt_states, numbers_of, stored_settings, with_stored
from .._torch.dtypes import on_device
from .._tree.leaves import describe
from .._tree.scalars import as_float
from .._tree.tree import Tree, join_names

S = TypeVar("S")

# The moments of a run that goes on with another in_state.
_MOVE_STATE = (
    "`opt_state = {new}.from_state_dict({old}.to_state_dict(opt_state), params, "
    "applied=opt_state.applied)`, which keeps the moments"
)


def check_stored(opt_state: OptState, expected: Mapping[str, Any]) -> None:
    """Refuse settings in a state that differ from those that the optimizer keeps there."""
    lr, hyper = opt_state.lr, opt_state.hyper or {}
    stored = {**({} if isinstance(lr, tuple) else {"lr": lr}), **hyper}
    if stored.keys() != expected.keys():
        raise ValueError(
            f"opt_state holds the settings {list(stored)}, this optimizer looks for "
            f"{_describe_form(expected)} there. Likely cause: the state of an optimizer with "
            "another in_state. Fix: from_torch(..., in_state=(...)) with the names that the state "
            "has; or, from the optimizer `old` of this state, "
            f"{_MOVE_STATE.format(new='optimizer', old='old')}."
        )
    for name, value in stored.items():
        leaves, likes = numbers_of({name: value}), numbers_of({name: expected[name]})
        alike = isinstance(value, tuple) == isinstance(expected[name], tuple)
        if not alike or len(leaves) != len(likes) or not all(map(is_float_scalar, leaves)):
            change = "lr=..." if name == "lr" else f"hyper={{**opt_state.hyper, {name!r}: ...}}"
            raise ValueError(
                f"opt_state holds {name} = {', '.join(map(describe, leaves))}; expected floating "
                f"0-d tensors, {_describe_form(expected)}. Fix: `opt_state._replace({change})` "
                "with torch.tensor(0.1); a value for each member goes through torch.vmap."
            )


def _describe_form(expected: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name!r}: {f'a tuple of {len(value)}' if isinstance(value, tuple) else 'one'}"
        for name, value in expected.items()
    ).join("{}")


def is_float_scalar(leaf: Any) -> bool:
    """Return True if a leaf is a floating 0-d tensor, as a state holds a setting."""
    return isinstance(leaf, Tensor) and leaf.ndim == 0 and leaf.is_floating_point()


def as_float32(number: Any, device: torch.device | None) -> Tensor:
    """Return a number as a 0-d float32 tensor in fresh memory."""
    if isinstance(number, Tensor):
        return number.detach().to(device, torch.float32, copy=True)
    _check_range("a setting in the state", float(number), torch.float32)
    return torch.full((), float(number), dtype=torch.float32, device=device)


def _check_range(what: str, number: float, dtype: torch.dtype) -> None:
    """Refuse a finite number that a tensor of this dtype cannot hold."""
    most = torch.finfo(dtype).max
    if math.isfinite(number) and abs(number) > most:
        raise ValueError(
            f"{what} is {number:g}, out of the range of {dtype}, in which a state holds it: "
            f"at most {most:.3g}. Likely cause: a wrong exponent, or a product that overflowed. "
            "Fix: a number in range, such as 1e-3."
        )


# ---- replaced ------------------------------------------------------------------------------------


def replace_settings(state: S, **settings: Any) -> S:
    """Equal to `opt_state._replace(lr=torch.full_like(opt_state.lr, lr))` of each state of
    `from_torch` in `state`, and the same for the settings in `opt_state.hyper`.

    It reads no value and works under `torch.compile` (give a number that changes there as a
    tensor), `torch.vmap` and `torch.func.grad`.

    Args:
        state: A `TrainState` or an `opt_state`, also of wrappers or of a `partition`. Everything
            that is not replaced is returned without a copy.
        settings: Numbers or tensors by the names in `in_state` (betas as a tuple of two), which
            take the dtype, device and shape of the old ones: in a stacked ensemble a number is for
            all members, a tensor has one value for each. A dict replaces only in these parts of a
            `partition`, `lr={"head": 1e-3}`; of a partition in another one its keys are the outer
            ones first, `lr={"body": {"matrices": 1e-3}}`.

    Returns:
        The state with new tensors for these settings. What has a schedule is a factor of it.
        Parameters for which `overrides` names a setting keep theirs.

    Raises:
        ValueError: If the state does not hold a setting, a tensor has another shape, or a number is
            out of the range of the state's dtype.
        TypeError: If a value is not a number.

    Example:
        >>> import torch
        >>> from purescale import from_torch
        >>> optimizer = from_torch(torch.optim.SGD, lr=0.5, in_state=("lr", "weight_decay"))
        >>> opt_state = replace_settings(optimizer.init({"w": torch.ones(2)}), lr=0.25)
        >>> opt_state.lr, opt_state.hyper
        (tensor(0.2500), {'weight_decay': tensor(0.)})

    Source of the form: optax.inject_hyperparams.
    """
    holders = _holders(state)
    by_part = {name: list(_values_by_part(value)) for name, value in settings.items()}
    for name, values in by_part.items():
        for part, _ in values:
            if not any([name in names and _is_within(keys, part) for keys, names in holders]):
                raise _missing_error(name, part, holders)

    def replaced(each: OptState, keys: Keys) -> OptState:
        values = {
            name: value
            for name, values in by_part.items()
            for part, value in values
            if _is_within(keys, part)
        }
        return _replace_in(each, values)

    return map_opt_states(replaced, state)


Keys = tuple[str, ...]  # of the parts around a state of from_torch, from the outermost
Holder = tuple[Keys, tuple[str, ...]]  # with the names of the settings that the state holds


def _holders(state: Tree) -> list[Holder]:
    """Return what each state of from_torch in `state` holds."""
    holders: list[Holder] = []

    def listed(each: OptState, keys: Keys) -> OptState:
        holders.append((keys, tuple(stored_settings(each))))
        return each

    map_opt_states(listed, state)
    return holders


def _replace_in(state: OptState, settings: Mapping[str, Any]) -> OptState:
    """Return the state with those of the settings that it holds."""
    stored = stored_settings(state)
    new = {n: _convert_like(stored[n], settings[n], n) for n in stored if n in settings}
    return with_stored(state, {**stored, **new}) if new else state


def _values_by_part(value: Any, part: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Yield the values of a setting, each with the keys of the dicts around it."""
    if not isinstance(value, Mapping):
        yield part, value
        return
    for key, inner in value.items():
        yield from _values_by_part(inner, (*part, key))


def _is_within(keys: Keys, part: Keys) -> bool:
    """Return True if a state with these keys is in the part."""
    return keys[: len(part)] == part


def _convert_like(old: Any, new: Any, name: str) -> Any:
    """Return a setting with the form of the old one, in fresh memory."""
    if isinstance(old, tuple):
        if not (isinstance(new, (tuple, list)) and len(new) == len(old)):
            raise TypeError(
                f"{name} is {new!r}; the state holds a tuple of {len(old)} there. Fix: "
                f"replace_settings(state, {name}=({', '.join(['0.9'] * len(old))}))."
            )
        return tuple([_convert_like(*pair, name) for pair in zip(old, new, strict=True)])
    if isinstance(new, Tensor) and not (new.is_complex() or new.dtype is torch.bool):
        if new.shape not in (old.shape, ()):
            raise ValueError(
                f"{name} is {describe(new)}, the state holds {describe(old)} there. Fix: a 0-d "
                "tensor; for an ensemble `replace_settings(stack_states(states), ...)`."
            )
        return on_device(new, old.device, old.dtype).expand(old.shape).clone()
    number = as_float(new)
    if number is not None and math.isfinite(number):
        _check_range(name, number, old.dtype)
        return torch.full_like(old, number)
    raise TypeError(
        f"{name} is {new!r}; expected a finite number or a tensor. Fix: "
        f"replace_settings(state, {name}=0.1)."
    )


def _missing_error(name: str, part: Keys, holders: Sequence[Holder]) -> ValueError:
    listed = [
        f"{'.'.join(keys)}{': ' if keys else ''}{join_names(list(names), 20)}"
        for keys, names in holders
    ]
    where = f"the part {'.'.join(part)!r} of the state" if part else "the state"
    return ValueError(
        f"{where} holds no setting {name!r}. It holds: {'; '.join(listed) or 'nothing'}. "
        "Likely cause: a setting that in_state does not name. Fix: `new = from_torch(..., "
        f"in_state=({name!r},))`, with the names that are there already, and "
        f"{_MOVE_STATE.format(new='new', old='optimizer')}; or "
        "`new.init(params)` in a new run."
    )
