"""The shared parts of the checks of rules, guards and optimizers: laws, quirks, runs, report."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch import Tensor

from .._checkpoint import from_state_dict, load, save, to_state_dict
from .._torch import private
from .._tree import tree as _tree
from .._tree.scalars import not_made
from ._laws import (
    assert_pure,
    assert_single_graph,
    assert_sync_free,
    assert_vmap_equals_loop,
    same_bits,
    short,
)


class Battery:
    """The checks of one object. A broken law that is among the quirks is noted without an error,
    and the check goes on.
    """

    kind: ClassVar[str]  # the name of the argument
    methods: ClassVar[dict[str, str]]  # required method -> its arguments
    fix_for_kind: ClassVar[str]
    fixes: ClassVar[dict[str, str]]  # by law
    labels: ClassVar[tuple[str, ...]]  # of the arguments of a call, for the report

    def __init__(self, subject: Any, quirks: Sequence[str]) -> None:
        if what := not_made(subject, *self.methods):
            expected = " and ".join(f"`{name}({args})`" for name, args in self.methods.items())
            raise TypeError(
                f"{self.kind} is {what}; expected an object with {expected}. Fix: "
                f"{self.fix_for_kind}."
            )
        self.subject, self.quirks = subject, frozenset(quirks)
        self.name = type(subject).__name__
        self.broken: set[str] = set()
        unknown = sorted(self.quirks - set(self.fixes))
        if unknown:
            raise ValueError(
                f"quirks has {unknown}; expected some of {', '.join(self.fixes)}. Fix: leave it "
                "out."
            )

    def run(self) -> None:
        """Run all checks, then check that each quirk was seen."""
        for check in self.checks():
            if check() is False:
                break
        unbroken = sorted(self.quirks - self.broken)
        assert not unbroken, (
            f"{self.name} keeps {', '.join(unbroken)}, which quirks says it breaks. Fix: leave it "
            "out of quirks."
        )

    def checks(self) -> tuple[Callable[[], bool | None], ...]:
        """Return the checks, each after those that it relies on. One that returns False is the
        last one that runs.
        """
        raise NotImplementedError

    def fail(
        self,
        law: str,
        came: str,
        should: str,
        *call: Any,
        cause: Exception | None = None,
        fix: str = "",
    ) -> None:
        """Report that `law` is broken, with the arguments `call` of the method."""
        if law in self.quirks:
            self.broken.add(law)
            return
        arguments = dict(zip(self.labels, map(shown, call), strict=False))
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

    def check_alike(self, law: str, name: str, old: Any, new: Any, *call: Any) -> bool:
        """Return True if `new` is like `old` except for values."""
        try:
            _tree.matching_leaves(old, new, name, "what came", "")
        except (TypeError, ValueError) as error:
            came = str(error).partition(" Fix:")[0]
            self.fail(law, came, "as before, except for values", *call, cause=error)
            return False
        return True

    def check_purity(self, function: Callable[..., Any], *calls: Any) -> None:
        """Check that the function does not read values or change arguments."""
        for law, check in (("reads", assert_sync_free), ("pure", assert_pure)):
            for call in calls:
                self.attempt(law, "not that", functools.partial(check, function), *call)


class UpdateBattery(Battery):
    """The checks of an object with `init` and a pure `update`: a rule or a guard."""

    def value(self) -> None:
        """Check that the object can be hashed, as a setting."""
        try:
            hash(self.subject)
        except TypeError as error:
            self.fail("value", str(error), f"a {self.kind} that can be hashed", cause=error)

    def first_state(self) -> Any:
        """Return the initial state, or None if it is not a NamedTuple and that is a quirk."""
        state = self.subject.init("cpu")
        if _is_named_tuple(state):
            return state
        self.fail("init", f"a {type(state).__name__}", "a NamedTuple")
        return None

    def check_device(self) -> None:
        """Check that the initial state is on the requested device."""
        devices = {leaf.device.type for leaf in _tree.tensors(self.subject.init("meta"))}
        if devices != {"meta"}:
            self.fail("init", f"tensors on {sorted(devices)}", 'on meta for `init("meta")`')

    def check_update_is_pure(self, *call: Any) -> None:
        """Check that an update does not read values or change arguments or attributes."""
        before = _attributes(self.subject)
        self.check_purity(self.subject.update, call)
        if _attributes(self.subject) != before:
            self.fail("value", f"an attribute of the {self.kind} changed", "the same", *call)

    def call_update(self, should: str, *call: Any) -> Any:
        """Return the result of `update`, which must not raise."""
        try:
            return self.subject.update(*call)
        except Exception as error:
            self.fail("raises", f"{type(error).__name__}: {error}", should, *call, cause=error)
            raise self.required_law("raises") from error

    def required_law(self, law: str) -> AssertionError:
        """Return the error for a quirk without which the checks cannot go on."""
        return AssertionError(
            f"quirks has `{law}`, but a {self.kind} such as {self.name} must keep this law."
        )

    def check_runs(self, runs: st.SearchStrategy[list[Any]], step: Callable[..., Any]) -> None:
        """Check runs that Hypothesis finds. `step` returns the next state."""

        @_EXAMPLES
        @given(runs)
        def run(steps: list[Any]) -> None:
            state = self.subject.init()
            for each in steps:
                state = step(state, *each)

        run()

    def check_resumed(self, *call: Any) -> None:
        """Check that an update of a saved and loaded state has the same bits."""
        ours = self.subject.update(*call)
        for restored in saved_and_loaded(call[0], self.subject.init()):
            theirs = self.subject.update(restored, *call[1:])
            if not same_bits(ours, theirs):
                self.fail("round_trip", shown(theirs), shown(ours), *call)

    def check_one_graph(self, calls: list[Any]) -> None:
        """Check that a compiled update equals the eager one."""
        run = functools.partial(assert_single_graph, self.subject.update, *calls)
        self._check_equal("compile", calls, run)

    def check_members(self, calls: list[Any]) -> None:
        """Check that updates under vmap equal single ones."""
        stacked = private.pytree.tree_map(lambda *t: torch.stack(t), *calls)

        def run() -> list[Any]:
            together = assert_vmap_equals_loop(self.subject.update, *stacked)
            return [
                private.pytree.tree_map(lambda t, i=i: t[i], together) for i in range(len(calls))
            ]

        self._check_equal("vmap", calls, run)

    def _check_equal(self, law: str, calls: list[Any], run: Callable[[], list[Any]]) -> None:
        expected = [self.subject.update(*call) for call in calls]
        try:
            results = run()
        except AssertionError as error:
            came = str(error).partition(" Fix:")[0]
            return self.fail(law, came, "the same as eager", *calls[0], cause=error)
        for call, came, should in zip(calls, results, expected, strict=True):
            if not same_bits(came, should):
                self.fail(law, shown(came), shown(should), *call)


# The fixes for laws of a pure `update`.
UPDATE_FIXES = {
    "value": "`@dataclasses.dataclass(frozen=True)`; put what changes into the state.",
    "pure": "torch.where and others that make new tensors, in place of methods that end in `_`.",
    "round_trip": "keep only tensors in the state, and nothing elsewhere.",
    "compile": "torch.where in place of `if`; counters as 0-d tensors.",
    "vmap": "0-d operations and torch.where, as for one state.",
}

# Without a database, so that a battery gives the same verdict on every machine.
_EXAMPLES = settings(
    max_examples=40,
    deadline=None,
    database=None,
    derandomize=True,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)


def saved_and_loaded(state: Any, like: Any) -> list[Any]:
    """Return three copies of the state: a clone, one through a dict and one through a file."""
    with tempfile.TemporaryDirectory() as folder:
        save(f"{folder}/state.pt", state)
        return [
            _tree.clone(state),
            from_state_dict(to_state_dict(state), like=like),
            load(f"{folder}/state.pt", like=like),
        ]


def shown(value: Any) -> str:
    """Format a state with its numbers."""
    if isinstance(value, Tensor):
        return short(value.tolist(), 80)
    if _is_named_tuple(value):
        rows = zip(value._fields, value, strict=True)
        fields = ", ".join(f"{name}={shown(leaf)}" for name, leaf in rows)
        return f"{type(value).__name__}({fields})"
    return short(value)


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _attributes(subject: Any) -> dict[str, str]:
    return {name: repr(value) for name, value in getattr(subject, "__dict__", {}).items()}
