"""Test helpers: Hypothesis strategies, and checks of the laws that purescale's functions keep.

Needs Hypothesis (`pip install '.[testing]'` in a copy of the repository), and is imported
separately: `from purescale.testing import assert_scale_rule`. Each check raises an `AssertionError`
with what was found, where, and a fix.
"""

from .._tree.poison import donated_poisoned as donated_poisoned
from ._laws import Untouched as Untouched
from ._laws import assert_pure as assert_pure
from ._laws import assert_single_graph as assert_single_graph
from ._laws import assert_sync_free as assert_sync_free
from ._laws import assert_vmap_equals_loop as assert_vmap_equals_loop
from ._laws import same_bits as same_bits
from ._laws import shares_memory as shares_memory
from ._optimizer_battery import assert_optimizer as assert_optimizer
from ._rule_battery import assert_guard as assert_guard
from ._rule_battery import assert_scale_rule as assert_scale_rule
from ._step_battery import assert_step as assert_step
from ._strategies import grad_trees as grad_trees
from ._strategies import overflow_runs as overflow_runs
from ._strategies import params_and_grads as params_and_grads
from ._strategies import scale_rules as scale_rules
from ._strategies import scaler_states as scaler_states

__all__ = [name for name in globals() if not name.startswith("_")]
