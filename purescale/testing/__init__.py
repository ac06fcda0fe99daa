"""For tests of your own: Hypothesis strategies, and checks of the laws that everything here keeps.

Needs hypothesis (`pip install purescale[testing]`), and is imported by itself:
`from purescale.testing import assert_scale_rule`. Each check raises an `AssertionError` that says
what was found, where, and what to do.
"""

from ._guard_battery import assert_guard as assert_guard
from ._laws import Untouched as Untouched
from ._laws import assert_pure as assert_pure
from ._laws import assert_single_graph as assert_single_graph
from ._laws import assert_sync_free as assert_sync_free
from ._laws import assert_vmap_equals_loop as assert_vmap_equals_loop
from ._laws import same_bits as same_bits
from ._laws import shares_memory as shares_memory
from ._optimizer_battery import assert_optimizer as assert_optimizer
from ._rule_battery import assert_scale_rule as assert_scale_rule
from ._strategies import grad_trees as grad_trees
from ._strategies import overflow_runs as overflow_runs
from ._strategies import params_and_grads as params_and_grads
from ._strategies import scale_rules as scale_rules
from ._strategies import scaler_states as scaler_states

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
    "same_bits",
    "shares_memory",
    "Untouched",
]
