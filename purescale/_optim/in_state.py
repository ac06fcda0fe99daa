"""Settings that an optimizer's state holds as tensors: which, checked, made, read from a dict."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._optim.opt_state import described, each_of


def names_in_state(in_state: Any, lr_in_state: bool) -> tuple[str, ...]:
    """What from_torch was told to keep in the state, each name once."""
    if not isinstance(in_state, (tuple, list)):
        raise TypeError(
            f"in_state is {in_state!r}, expected a tuple of names of settings. Fix: "
            'in_state=("lr", "weight_decay"), with a comma where it is one.'
        )
    return tuple(dict.fromkeys((*in_state, "lr") if lr_in_state else in_state))


def check_setting(cls: Any, name: Any, values: Mapping[str, Any]) -> None:
    """Refuse what is no number among the settings of `cls`."""
    if name not in values:
        raise ValueError(
            f"in_state: {cls.__name__} has no setting {name!r}. It has: {', '.join(values)}."
        )
    if name == "lr" and issubclass(cls, torch.optim.Rprop):
        raise ValueError(
            "in_state: lr with Rprop, whose lr is only what its step sizes start from: they are in "
            "the state already, `opt_state.slots[name]['step_size']`. Fix: leave lr out."
        )
    if name != "lr" and issubclass(cls, torch.optim.Adafactor):
        raise ValueError(
            f"in_state: {name} of Adafactor, whose implementations in torch read values in Python. "
            f"Fix: leave {name} out of in_state, and make an optimizer for each value."
        )
    value = values[name]
    every = value if isinstance(value, (tuple, list)) else (value,)
    if not all(isinstance(one, numbers.Real) and not isinstance(one, bool) for one in every):
        raise TypeError(
            f"in_state: {name} of {cls.__name__} is {value!r}, expected a number or a tuple of "
            f"numbers. Fix: leave {name} out of in_state; {name}={value!r} stays a setting."
        )


def check_hyper(hyper: Any, starts: Mapping[str, Any]) -> None:
    """Refuse settings in a state that are not those that an optimizer keeps there."""
    expected = ", ".join(
        f"{name!r}: {f'a tuple of {len(value)}' if isinstance(value, tuple) else 'one'}"
        for name, value in starts.items()
    )
    if not isinstance(hyper, dict) or hyper.keys() != starts.keys():
        has = list(hyper) if isinstance(hyper, dict) else repr(hyper)
        raise ValueError(
            f"opt_state.hyper has {has}, this optimizer looks for {{{expected}}} there. Likely "
            "cause: the state of an optimizer with another in_state. Fix: "
            "`opt_state = optimizer.init(params)`, or from_torch(..., in_state=(...)) with "
            "the names that the state has."
        )
    for name, value in hyper.items():
        leaves, start = each_of({name: value}), starts[name]
        of_one_kind = isinstance(value, tuple) == isinstance(start, tuple)
        sound = of_one_kind and len(leaves) == len(each_of({name: start}))
        if not (sound and all(map(is_number, leaves))):
            has = list(map(described, leaves))
            raise ValueError(
                f"opt_state.hyper[{name!r}] is {', '.join(has)}; expected floating 0-d "
                f"tensors, {{{expected}}}. Fix: `opt_state._replace(hyper={{**opt_state.hyper, "
                f"{name!r}: ...}})` with torch.tensor(0.1), or a tuple of them for a tuple; a "
                "value for each member of an ensemble goes through torch.vmap."
            )


def is_number(leaf: Any) -> bool:
    """Whether it is a setting as a state holds it: a floating tensor of no dimensions."""
    return isinstance(leaf, Tensor) and leaf.ndim == 0 and leaf.is_floating_point()


def float32(number: Any, device: torch.device | None) -> Tensor:
    """In fresh memory."""
    if isinstance(number, Tensor):
        return number.detach().to(device, torch.float32, copy=True)
    return torch.full((), float(number), dtype=torch.float32, device=device)


def each_number(change: Callable[[Any], Any], hyper: Mapping[str, Any]) -> dict[str, Any]:
    """Settings, of which some are tuples, with `change` made to every number."""
    return {
        name: tuple(map(change, value)) if isinstance(value, (tuple, list)) else change(value)
        for name, value in hyper.items()
    }


def agreed(name: str, groups: Sequence[Mapping[str, Any]]) -> Any:
    """What all these groups of a state dict have; None where none has any."""
    found = [each_number(float, {name: group[name]})[name] for group in groups if name in group]
    if len(set(found)) > 1:
        what = "rates" if name == "lr" else f"values of {name}"
        raise ValueError(
            f"the state dict has the {what} {found} in groups that take theirs from the state, "
            "which holds one. Likely cause: groups with a setting of their own. Fix: "
            f"`overrides={{pattern: {{{name!r}: ...}}}}` for all of them but one."
        )
    return found[0] if found else None
