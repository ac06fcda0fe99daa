"""The parameter groups of torch: the parameters that the same overrides match by name."""

from __future__ import annotations

import fnmatch
import functools
import re
from typing import Any, NamedTuple

from torch import Tensor

from .._torch import private
from .._torch_optim.settings import OptimizerConfig, Pattern, StepSettings
from .._tree import pytree


class ParamGroup(NamedTuple):
    """A parameter group of torch."""

    indices: list[int]  # of its parameters
    names: list[str]
    override_indices: tuple[int, ...]  # that match them, or a single one with the same settings
    settings: dict[str, Any]  # complete; of a scheduled one the function


def build_param_groups(
    config: OptimizerConfig, names: tuple[str, ...], step_settings: StepSettings | None = None
) -> list[ParamGroup]:
    """Return torch's parameter groups, with `step_settings`, if there are any, in place of the
    settings that were given.
    """
    step_settings = config.no_step_settings if step_settings is None else step_settings
    members: dict[tuple[int, ...], list[int]] = {}
    matches = _match_patterns(names, tuple(config.overrides))[0]
    first_equal = {matching: _first_equal(config, matching) for matching in set(matches)}
    for index, matching in enumerate(matches):
        members.setdefault(first_equal[matching], []).append(index)
    groups = []
    for override_indices in sorted(members):
        indices = members[override_indices]
        member_names = [names[index] for index in indices]
        settings = config.settings_of(override_indices, step_settings)
        groups.append(ParamGroup(indices, member_names, override_indices, settings))
    return groups


def _first_equal(config: OptimizerConfig, matching: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index of the first pattern with the same settings, so that `{"*.bias":
    no_decay, "norm.*": no_decay}` is one group; `matching` if there is none.
    """
    overrides = list(config.overrides.values())
    merged = {name: value for index in matching for name, value in overrides[index].items()}
    for index, extra in enumerate(overrides if matching else []):
        if extra.keys() == merged.keys() and all(
            _is_same_setting(extra[name], value) for name, value in merged.items()
        ):
            return (index,)
    return matching


def check_override_patterns(config: OptimizerConfig, names: tuple[str, ...]) -> None:
    """Refuse a pattern that matches none of the names of all parameters."""
    unmatched = _match_patterns(names, tuple(config.overrides))[1]
    if unmatched is not None:
        raise ValueError(
            f"overrides: {unmatched!r} matches no parameter. The names are: "
            f"{pytree.join_names(list(names), 20)}. Likely cause: a typing error, or a frozen "
            "parameter, which is a buffer. Fix: one of these names, or a glob, '*.bias'."
        )


# ---- patterns ------------------------------------------------------------------------------------


def _is_same_setting(a: Any, b: Any) -> bool:
    """Return True if settings are equal. Tensors are not read, so they must be the same one."""
    return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b)


@private.constant_while_compiling  # Dynamo need not trace it
def _match_patterns(
    names: tuple[str, ...], patterns: tuple[Pattern, ...]
) -> tuple[tuple[tuple[int, ...], ...], str | None]:
    """Return for each name the indices of the patterns that match it, and the first name or glob in
    them that matches none.
    """
    return _match_cached(names, patterns)


@functools.lru_cache(maxsize=64)
def _match_cached(
    names: tuple[str, ...], patterns: tuple[Pattern, ...]
) -> tuple[tuple[tuple[int, ...], ...], str | None]:
    matches: dict[str, list[int]] = {name: [] for name in names}
    unmatched = None
    for index, pattern in enumerate(patterns):
        for text in (pattern,) if isinstance(pattern, str) else pattern:
            matching = [text] if text in matches else []
            if re.search(r"[*?[]", text):
                matching = [name for name in names if fnmatch.fnmatchcase(name, text)]
            if not matching and unmatched is None:
                unmatched = text
            for name in matching:
                matches[name].append(index)
    return tuple([tuple(dict.fromkeys(indices)) for indices in matches.values()]), unmatched
