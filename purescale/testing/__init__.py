"""Test helpers: Hypothesis strategies, and checks of the laws that purescale's functions keep.

Needs Hypothesis (`pip install '.[testing]'` in a copy of the repository), and is imported
separately: `from purescale.testing import assert_scale_rule`. Each check raises an `AssertionError`
with what was found, where, and a fix.
"""

from .._tree.poison import donated_poisoned
from ._laws import (
    Untouched,
    assert_pure,
    assert_single_graph,
    assert_sync_free,
    assert_vmap_equals_loop,
    same_bits,
    shares_memory,
)
from ._optimizer_battery import assert_optimizer
from ._rule_battery import assert_guard, assert_scale_rule
from ._step_battery import assert_step
from ._strategies import grad_trees, overflow_runs, params_and_grads, scale_rules, scaler_states

__all__ = [  # noqa: RUF022  strategies, then checks
    "scale_rules",
    "scaler_states",
    "overflow_runs",
    "grad_trees",
    "params_and_grads",
    "assert_pure",
    "assert_sync_free",
    "assert_single_graph",
    "assert_vmap_equals_loop",
    "assert_scale_rule",
    "assert_optimizer",
    "assert_guard",
    "assert_step",
    "same_bits",
    "shares_memory",
    "Untouched",
    "donated_poisoned",
]
