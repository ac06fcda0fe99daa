"""The shared parts of the batteries, each of which checks all laws of one object: the report of a
broken law, quirks, and the checks that all have.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from .._checkpoint import from_state_dict, load, save, to_state_dict
from .._tree import pytree
from .._tree.matching import matching_leaves
from .._tree.scalars import protocol_violation
from .._tree.states import stack_states
from . import _laws

# The fixes for the laws that several batteries check.
FIXES = {
    "reads": "`torch.where(flag, a, b)` in place of `if flag:`; no `.item()`.",
    "pure": "new tensors in place of methods that end in `_`; keep what changes in the state.",
    "round_trip": "keep only tensors in the state: a loaded state has other tensor objects.",
    "compile": "torch.where in place of `if`; no attribute that changes; counts as 0-d tensors.",
    "vmap": "operations that torch.vmap has rules for: no `out=`, no `torch._foreach_*`.",
}


class Battery:
    """The checks of one object. A broken law that is among the quirks is noted without an error,
    and the check goes on.
    """

    kind: ClassVar[str]  # the name of the argument
    methods: ClassVar[dict[str, str]] = {}  # required method -> its arguments
    fixes: ClassVar[dict[str, str]]  # by law
    labels: ClassVar[tuple[str, ...]] = ()  # of the arguments of a call, for the report
    # The methods that check, each after those that it relies on. One that returns False is the last
    # one that runs.
    order: tuple[str, ...]

    def __init__(self, subject: Any, quirks: Sequence[str]) -> None:
        if what := protocol_violation(subject, *self.methods):
            expected = " and ".join(f"`{name}({args})`" for name, args in self.methods.items())
            raise TypeError(
                f"{self.kind} is {what}; expected an object with {expected}. Fix: an instance of a "
                "class with these methods; `from_torch` for a class of torch.optim."
            )
        self.subject, self.quirks = subject, frozenset(quirks)
        self.name = type(subject).__name__
        self.broken: set[str] = set()
        unknown = sorted(self.quirks - set(self.fixes))
        if unknown:
            raise ValueError(
                f"quirks has {unknown}; expected some of {', '.join(self.fixes)}. Fix: remove it."
            )

    def run(self) -> None:
        """Run all checks, then check that each quirk was seen."""
        for name in self.order:
            if getattr(self, name)() is False:
                break
        unbroken = sorted(self.quirks - self.broken)
        assert not unbroken, (
            f"{self.name} keeps {', '.join(unbroken)}, which quirks says it breaks. Fix: remove it."
        )

    def fail(
        self, law: str, came: str, should: str, *call: Any, cause: Any = None, fix: str = ""
    ) -> None:
        """Report that `law` is broken, with the arguments `call` of the method."""
        if law in self.quirks:
            self.broken.add(law)
            return
        arguments = dict(zip(self.labels, map(_laws.short, call), strict=False))
        rows = {**arguments, "came": came, "should": should}
        lines = [f"  {label:6}  {value}" for label, value in rows.items()]
        fix = fix or self.fixes[law]
        raise AssertionError(
            "\n".join([f"{self.name} breaks the law `{law}`", *lines, f"  Fix: {fix}"])
        ) from cause

    def attempt(self, law: str, should: str, function: Callable[..., Any], *call: Any) -> Any:
        """Return the function's result, or None if it raises and that is a quirk."""
        try:
            return function(*call)
        except Exception as error:
            came, _, fix = str(error).partition(" Fix: ")
            if not isinstance(error, AssertionError):
                came, fix = f"{type(error).__name__}: {error}", ""
            self.fail(law, " ".join(came.split()), should, *call, cause=error, fix=fix)
            return None

    # ---- what all have

    def check_alike(self, law: str, name: str, old: Any, new: Any, *call: Any) -> bool:
        """Return True if `new` is like `old` except for values."""
        try:
            matching_leaves(old, new, name, "what came", "")
        except (TypeError, ValueError) as error:
            came = str(error).partition(" Fix:")[0]
            self.fail(law, came, "as before, except for values", *call, cause=error)
            return False
        return True

    def check_bits(
        self, law: str, expected: Any, what: str, function: Callable[..., Any], *call: Any
    ) -> None:
        """Check that a function gives the expected bits, which are `what`."""
        should = f"{what}, {_laws.short(expected)}"
        result = self.attempt(law, should, function, *call)
        if result is not None and not _laws.same_bits(result, expected):
            self.fail(law, _laws.short(result), should, *call)

    def check_purity(self, function: Callable[..., Any], *calls: Any) -> None:
        """Check that the function does not read values or change arguments."""
        for law, check in (("reads", _laws.assert_sync_free), ("pure", _laws.assert_pure)):
            for call in calls:
                self.attempt(law, "not that", functools.partial(check, function), *call)

    def check_transforms(
        self,
        function: Callable[..., Any],
        calls: list[Any],
        compared: Callable[[Any], Any] = lambda result: result,
        rtol: float = 0.0,
        atol: float = 0.0,
    ) -> None:
        """Check that the function, compiled and under vmap, gives what it gives for each call.
        `compared` returns what of a result is compared.
        """

        def compiled(*_: Any) -> None:
            results = list(map(compared, _laws.assert_single_graph(function, *calls)))
            expected = [compared(function(*call)) for call in calls]
            torch.testing.assert_close(results, expected, rtol=rtol, atol=atol, equal_nan=True)

        def mapped(*_: Any) -> None:
            def of_member(*call: Any) -> Any:
                return compared(function(*call))

            _laws.assert_vmap_equals_loop(of_member, *stack_states(calls), rtol=rtol, atol=atol)

        self.attempt("compile", "the same as eager", compiled, *calls[0])
        self.attempt("vmap", "each member as by itself", mapped, *calls[0])


def saved_and_loaded(state: Any, like: Any) -> list[Any]:
    """Return three copies of the state: a clone, one through a dict and one through a file."""
    with tempfile.TemporaryDirectory() as folder:
        save(f"{folder}/state.pt", state)
        return [
            pytree.clone(state),
            from_state_dict(to_state_dict(state), like=like),
            load(f"{folder}/state.pt", like=like),
        ]
