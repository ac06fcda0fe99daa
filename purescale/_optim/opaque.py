"""Functions of an optimizer that Dynamo calls and does not trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .._optim.schedule import is_scheduled
from .._optim.settings import OptimizerConfig
from .._torch import private


def opaque_in_dynamo(
    config: OptimizerConfig, function: Callable[..., Any], decorator: Callable[[], Any]
) -> Callable[..., Any]:
    """Return `opaque(names, *operands)`, equal to `function(groups, *operands)` with the groups of
    `config`, which Dynamo does not trace. Dynamo guards on arguments only: the constant settings
    are passed as text, so that others compile anew.
    """

    def call(key: str, names: list[str], *operands: Any) -> Any:
        return function(config.build_param_groups(tuple(names)), *operands)

    opaque, key = private.Opaque(call, decorator), _constant_settings(config)
    return lambda names, *operands: opaque(key, names, *operands)


def _constant_settings(config: OptimizerConfig) -> str:
    """Return as text all settings that a step reads. Rates that are tensors or schedules are left
    out, because they reach the formula as arguments.
    """
    constant = [
        {k: v for k, v in settings.items() if not (isinstance(v, Tensor) or is_scheduled(v))}
        for settings in (config.all_settings, *config.overrides.values())
    ]
    spec = config.spec
    kind = spec.name, id(spec.cls), id(spec.formula)
    return repr((kind, list(config.overrides), constant, config.in_state))
