"""Settings that an optimizer's state holds as tensors: checked, created, restored, replaced."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._optim.opt_state import OptState, map_opt_states
from .._torch.transfer import to_device
from .._tree.leaves import describe
from .._tree.pytree import join_names
from .._tree.scalars import as_float

S = TypeVar("S")
Keys = tuple[str, ...]  # of the parts around a state of from_torch, from the outermost


def stored_settings(opt_state: OptState) -> dict[str, Any]:
    """Return the settings that a state holds, the learning rate too."""
    lr = {"lr": opt_state.lr} if isinstance(opt_state.lr, Tensor) else {}
    return {**lr, **(opt_state.hyper or {})}


def with_stored(opt_state: OptState, stored: Mapping[str, Any]) -> OptState:
    """Return the state with these settings, the inverse of `stored_settings`."""
    hyper = {name: value for name, value in stored.items() if name != "lr"}
    return opt_state._replace(lr=stored.get("lr", ()), hyper=hyper or ())


def numbers_of(settings: Any) -> list[Any]:
    """Return every number of the settings in the state, also those within tuples."""
    values = settings.values() if settings else ()
    return [one for v in values for one in (v if isinstance(v, tuple) else (v,))]


def map_numbers(change: Callable[[Any], Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with `change` applied to every number, also within tuples."""
    return {
        name: tuple(map(change, value)) if isinstance(value, (tuple, list)) else change(value)
        for name, value in settings.items()
    }


def read_numbers(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with a Python number for each tensor, which is read."""
    return map_numbers(lambda value: value.item() if isinstance(value, Tensor) else value, settings)


def copied_number(number: Any) -> Any:
    """Return a number, in memory of its own if it is a tensor: a rate that is not in the state may
    share a parameter's memory, which a kernel overwrites.
    """
    return number.clone() if isinstance(number, Tensor) else number


# ---- checked -------------------------------------------------------------------------------------


def check_stored(opt_state: OptState, expected: Mapping[str, Any]) -> None:
    """Refuse settings in a state that differ from those that the optimizer keeps there."""
    lr, hyper = opt_state.lr, opt_state.hyper or {}
    stored = {**({} if isinstance(lr, tuple) else {"lr": lr}), **hyper}
    numbers = numbers_of(stored)
    if _numbers_of_each(stored) != _numbers_of_each(expected) or not all(
        map(is_float_scalar, numbers)
    ):
        raise ValueError(
            f"opt_state holds the settings {map_numbers(describe, stored)}; expected floating 0-d "
            f"tensors, as many as in {_numbers_of_each(expected)}. Likely cause: the state of an "
            "optimizer with another in_state. Fix: from_torch(..., in_state=(...)) with the names "
            "that the state has; a value for each member of an ensemble goes through torch.vmap."
        )


def _numbers_of_each(settings: Mapping[str, Any]) -> dict[str, int]:
    return {n: len(value) if isinstance(value, tuple) else 1 for n, value in settings.items()}


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
    replacements = [
        (name, part, value)
        for name, values in settings.items()
        for part, value in _values_by_part(values)
    ]
    missing = {(name, part): True for name, part, _ in replacements}
    holders: list[str] = []

    def replaced(each: OptState, keys: Keys) -> OptState:
        stored = stored_settings(each)
        holders.append(f"{'.'.join(keys)}{': ' if keys else ''}{join_names(list(stored), 20)}")
        new = dict(stored)
        for name, part, value in replacements:
            if name in stored and keys[: len(part)] == part:
                missing[name, part] = False
                new[name] = _convert_like(stored[name], value, name)
        return with_stored(each, new)

    new_state = map_opt_states(replaced, state)
    for (name, part), is_missing in missing.items():
        if is_missing:
            where = f"the part {'.'.join(part)!r} of the state" if part else "the state"
            raise ValueError(
                f"{where} holds no setting {name!r}. It holds: {'; '.join(holders) or 'nothing'}. "
                "Likely cause: a setting that in_state does not name. Fix: "
                f"from_torch(..., in_state=({name!r},)); its `from_state_dict` takes the moments "
                "of the old optimizer's `to_state_dict(opt_state)`."
            )
    return new_state


def _values_by_part(value: Any, part: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Yield the values of a setting, each with the keys of the dicts around it."""
    if not isinstance(value, Mapping):
        yield part, value
        return
    for key, inner in value.items():
        yield from _values_by_part(inner, (*part, key))


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
        return to_device(new, old.device, old.dtype).expand(old.shape).clone()
    number = as_float(new)
    if number is not None and math.isfinite(number):
        _check_range(name, number, old.dtype)
        return torch.full_like(old, number)
    raise TypeError(
        f"{name} is {new!r}; expected a finite number or a tensor. Fix: "
        f"replace_settings(state, {name}=0.1)."
    )
