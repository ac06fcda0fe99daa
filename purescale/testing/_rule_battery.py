"""`assert_scale_rule` and `assert_guard`: the laws of a custom rule or guard as one check."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch import Tensor

from .._loss_scale.rules import takes_amax
from .._tree import pytree
from ._laws import FIXES, Battery, saved_and_loaded, short
from ._strategies import DAMAGED, as_scale, rule_steps, update_arguments


class _UpdateBattery(Battery):
    """The checks of an object with `init` and a pure `update`: a rule or a guard."""

    update: Callable[..., Any]  # checks the laws of one call, which must not raise
    samples: Callable[[], list[list[Any]]]  # some lists of calls of one structure

    def call_update(self, should: str, *call: Any) -> Any:
        """Return what `update` returns. Without it the checks cannot go on, even for a quirk."""
        try:
            return self.subject.update(*call)
        except Exception as error:
            self.fail("raises", f"{type(error).__name__}: {error}", should, *call, cause=error)
            raise

    def check_runs(self, runs: st.SearchStrategy[list[Any]], step: Callable[..., Any]) -> None:
        """Check runs that Hypothesis finds. `step` returns the next state."""

        @_EXAMPLES
        @given(runs)
        def run(steps: list[Any]) -> None:
            state = self.subject.init()
            for each in steps:
                state = step(state, *each)

        run()

    # ---- what is checked

    def value(self) -> None:
        """Check that the object can be hashed, as a setting."""
        try:
            hash(self.subject)
        except TypeError as error:
            self.fail("value", str(error), f"a {self.kind} that can be hashed", cause=error)

    def init(self) -> None:
        state = self.subject.init("cpu")
        leaves = pytree.flatten(state)[0]
        are_tensors = leaves and all(isinstance(leaf, Tensor) for leaf in leaves)
        if not (hasattr(state, "_fields") and are_tensors):
            return self.fail("init", short(state), "a NamedTuple of tensors")
        devices = {leaf.device.type for leaf in pytree.tensors(self.subject.init("meta"))}
        if devices != {"meta"}:
            self.fail("init", f"tensors on {sorted(devices)}", 'on meta for `init("meta")`')

    def purity(self) -> None:
        """Check that an update does not read values or change arguments or attributes."""
        for calls in self.samples():
            for call in calls:
                before = _attributes(self.subject)
                self.update(*call)
                self.check_purity(self.subject.update, call)
                if _attributes(self.subject) != before:
                    came = f"an attribute of the {self.kind} changed"
                    self.fail("value", came, "the same", *call)

    def round_trip(self) -> None:
        state, *rest = self.samples()[0][-1]
        expected = self.subject.update(state, *rest)
        for restored in saved_and_loaded(state, self.subject.init()):
            what = "that of the state that was saved"
            self.check_bits("round_trip", expected, what, self.subject.update, restored, *rest)

    def transforms(self) -> None:
        for calls in self.samples():
            self.check_transforms(self.subject.update, calls)


def _attributes(subject: Any) -> dict[str, str]:
    return {name: repr(value) for name, value in getattr(subject, "__dict__", {}).items()}


# Without a database, so that a battery gives the same verdict on every machine.
_EXAMPLES = settings(
    max_examples=40,
    deadline=None,
    database=None,
    derandomize=True,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)

# The fixes for laws of rules and guards.
_UPDATE_FIXES = {
    "value": "`@dataclasses.dataclass(frozen=True)`; put what changes into the state.",
    **FIXES,
}

# ---- rules ---------------------------------------------------------------------------------------


def assert_scale_rule(rule: Any, quirks: Sequence[str] = ()) -> None:
    """Check that a rule of your own keeps all laws that `train_step` relies on.

    The checks use runs that Hypothesis finds and shrinks, hundreds of overflows and thousands of
    clean steps in a row (each state with an overflow and with a clean step), all short runs before
    a growth, and damaged states:

    - `value`: the rule can be hashed and compared, and its attributes do not change
    - `init`: a NamedTuple of tensors with a 0-d float32 `scale`, on the requested device
    - `raises`, `reads`, `pure`: `update` does not raise, read values or change arguments
    - `structure`: the state keeps its type, dtypes and shapes
    - `positive`, `finite`, `power_of_two`: the scale always is
    - `damaged`: it is so again one step after a scale of 0, inf, NaN or less than 0
    - `overflow`: an overflow never raises the scale
    - `backs_off`: many overflows lower it, unless the rule is static or at its `min_scale`
    - `clean`: a clean step never lowers it, unless the rule `takes_amax`
    - `round_trip`: a saved and loaded state goes on with the same bits
    - `compile`, `vmap`: one graph, and members equal to single runs; the same bits

    Args:
        rule: The rule.
        quirks: Laws that it breaks on purpose, as some rules of `interop` do. Each must be seen
            broken.

    Raises:
        AssertionError: A law is broken; with the state, the flag, the result, the expected result,
            and a fix.
        TypeError: `rule` does not have the methods of a rule.
        ValueError: A quirk is not the name of a law.

    Example:
        >>> from purescale import DynamicScale
        >>> assert_scale_rule(DynamicScale(growth_interval=2))
    """
    _RuleBattery(rule, quirks).run()


_FIXES = {
    "init": "`init(device)` returns a NamedTuple of tensors made with `device=device`, one of them "
    "`scale`, 0-d, float32, positive.",
    "raises": "return a state for any flag and state; `check_scaler` is what stops training.",
    "structure": "every field as it was: `.to(scaler.scale.dtype)`, a counter as "
    "`torch.where(found_inf, 0, count + 1)`.",
    "positive": "`scale.clamp(min=self.min_scale)`, a floor such as 2.0**-24.",
    "finite": "`scale.clamp(max=self.max_scale)`, a ceiling such as 2.0**24.",
    "power_of_two": "factors and bounds that are powers of two: any other rounds every gradient.",
    "damaged": "`torch.where(torch.isfinite(scale) & (scale > 0), new, self.min_scale)`.",
    "overflow": "`torch.where(found_inf, scale * 0.5, ...)`: found_inf is True if the step was "
    "bad.",
    "backs_off": "multiply by a factor below 1 on an overflow, or training never moves again.",
    "clean": "decide by this step's found_inf: a scale that moves a step late is not the one that "
    "was used.",
    **_UPDATE_FIXES,
}
_RUN = [letter == "O" for letter in "...O.O...OOO....O...."]
_LONG = 320  # overflows: halving passes through all of float32
_STRETCH = 2500  # clean steps: beyond the usual interval
_LONGEST = 20_000  # clean steps at most, for rules with a longer interval
_EVENTS = 4  # states before a growth from which all runs of _DEPTH steps are tried, also with the
# smallest and the largest scale
_DEPTH = 4


class _RuleBattery(_UpdateBattery):
    """The checks of a rule."""

    kind = "rule"
    methods: ClassVar[dict[str, str]] = {"init": "device", "update": "scaler, found_inf"}
    fixes = _FIXES
    labels = ("state", "flag", "amax")
    order = ("value", "init", "first_scale", "purity", "long_runs", "runs", "damaged", "round_trip",
             "transforms")  # fmt: skip

    def __init__(self, rule: Any, quirks: Sequence[str]) -> None:
        super().__init__(rule, quirks)
        self.amax = 1.0 if takes_amax(rule) else None
        self.growing: list[Any] = []  # states whose next clean step raises the scale

    def arguments(self, state: Any, bad: bool, amax: float | None = None) -> tuple[Any, ...]:
        return update_arguments(state, bad, self.amax if amax is None else amax)

    def update(self, *call: Any) -> Any:
        new = self.call_update("a state", *call)
        self.check_alike("structure", "scaler", call[0], new, *call)
        return new

    def samples(self) -> list[list[Any]]:
        """Return an overflow and a clean step from each state of a run."""
        state, calls = self.subject.init(), []
        for bad in _RUN:
            calls += [self.arguments(state, flag) for flag in (True, False)]
            state = self.update(*self.arguments(state, bad))
        return [calls]

    def check_scale(self, new: Any, *call: Any, law: str = "") -> None:
        scale = new.scale.item()
        came = f"scale={scale!r}"
        if scale > 0 and math.isfinite(scale) and math.frexp(scale)[0] != 0.5:
            self.fail(law or "power_of_two", came, "a scale that is a power of two", *call)
        elif not math.isfinite(scale):
            self.fail(law or "finite", came, "a finite scale", *call)
        elif scale <= 0:
            self.fail(law or "positive", came, "a scale above 0", *call)

    def step(self, state: Any, bad: bool, amax: float | None = None) -> Any:
        """Return the next state of a run."""
        return self.next_states(state, amax)[bad]

    def next_states(
        self, state: Any, amax: float | None = None, *, inside: bool = True
    ) -> list[Any]:
        """Return the states after a clean step and after an overflow, and check their scales. A
        clean step may lower the scale of a state that is not `inside` the bounds.
        """
        states, before = [], state.scale.item()
        for bad in (False, True):
            call = self.arguments(state, bad, amax)
            # An update that reads nothing has one structure for all values, which was checked.
            new = self.call_update("a state", *call)
            states.append(new)
            self.check_scale(new, *call)
            after = new.scale.item()
            if bad and after > before:
                self.fail("overflow", f"scale={after!r}", f"at most {before!r}", *call)
            if not bad and after < before and inside and not takes_amax(self.subject):
                self.fail("clean", f"scale={after!r}", f"at least {before!r}", *call)
        return states

    # ---- what is checked

    def first_scale(self) -> None:
        state = self.subject.init("cpu")
        scale = getattr(state, "scale", None)
        if not isinstance(scale, Tensor) or scale.ndim or scale.dtype is not torch.float32:
            return self.fail("init", f"scale={short(scale)}", "a 0-d float32 tensor")
        self.check_scale(state, law="init")

    def long_runs(self) -> None:
        first = state = self.subject.init()
        for _ in range(_LONG):
            state = self.step(state, bad=True)
        scale, low = first.scale.item(), state.scale.item()
        high = self.clean_steps(first).scale.item()
        for start in (first, *self.growing[:_EVENTS]):
            self.short_runs(start)
            self.short_runs(start._replace(scale=as_scale(low)))
            self.short_runs(start._replace(scale=as_scale(2.0**127)), inside=False)
        floor = getattr(self.subject, "min_scale", None) or 0.0
        if low >= scale and low > floor and high != scale:
            came = f"scale={low!r} after {_LONG} overflows"
            self.fail("backs_off", came, f"below {scale!r}", *self.arguments(first, True))

    def clean_steps(self, state: Any) -> Any:
        """Return the state after enough clean steps for a growth."""
        values = getattr(self.subject, "__dict__", {}).values()
        numbers = [n for n in values if type(n) is int]
        for _ in range(min(max(_STRETCH, *numbers, 0) + 2, _LONGEST)):
            new = self.step(state, bad=False)
            if new.scale > state.scale:
                self.growing.append(state)
            state = new
        return state

    def short_runs(self, state: Any, *, inside: bool = True) -> None:
        """Check all runs of `_DEPTH` steps from a state."""
        states = [state]
        for _ in range(_DEPTH):
            states = [new for each in states for new in self.next_states(each, inside=inside)]

    def runs(self) -> None:
        self.check_runs(st.lists(rule_steps(self.subject), min_size=1, max_size=30), self.step)

    def damaged(self) -> None:
        sound = [self.subject.init(), *self.growing[:1]]
        for state, scale, bad in itertools.product(sound, DAMAGED, (False, True)):
            call = self.arguments(state._replace(scale=as_scale(scale)), bad)
            self.check_scale(self.update(*call), *call, law="damaged")


# ---- guards --------------------------------------------------------------------------------------


def assert_guard(guard: Any, quirks: Sequence[str] = ()) -> None:
    """Check that a guard of your own keeps all laws that `train_step` relies on.

    The checks use a steady run of 300 steps with spikes, inf and NaN, with and without a gradient
    norm, and runs that Hypothesis finds and shrinks:

    - `value`: the guard can be hashed and compared, and its attributes do not change
    - `init`: a NamedTuple of tensors on the requested device
    - `raises`, `reads`, `pure`: `update` does not raise, read values or change arguments
    - `pair`: it returns `(state, bad)`, `bad` a 0-d bool tensor
    - `structure`: the state keeps its type, dtypes and shapes
    - `finite`: a state of finite numbers stays finite for any loss and norm
    - `steady`: without spikes nine of ten steps are accepted, also after spikes, inf and NaN
    - `timely`: a verdict is about its own step: an accepted spike does not cause a later rejection
    - `round_trip`: a saved and loaded state goes on with the same bits
    - `compile`, `vmap`: one graph, and members equal to single runs; the same bits

    Args:
        guard: The guard.
        quirks: Laws that it breaks on purpose. Each must be seen broken.

    Raises:
        AssertionError: A law is broken; with the state, loss and norm, the result, the expected
            result, and a fix.
        TypeError: `guard` does not have the methods of a guard.
        ValueError: A quirk is not the name of a law.

    Example:
        >>> from purescale import SpikeGuard
        >>> assert_guard(SpikeGuard(warmup=10))
    """
    _GuardBattery(guard, quirks).run()


_GUARD_FIXES = {
    "init": "`init(device)` returns a NamedTuple of tensors made with `device=device`.",
    "raises": "return a state and a verdict for any loss and norm; `grad_norm` is () without one: "
    "`isinstance(grad_norm, torch.Tensor)`.",
    "pair": "`return new_state, loss > limit`, of 0-d tensors.",
    "structure": "every field as it was: `.to(state.mean.dtype)`, a counter as "
    "`torch.where(bad, 0, count + 1)`.",
    "finite": "`torch.where(torch.isfinite(loss), new, old)`: learn from finite numbers only.",
    "steady": "judge after a warmup, and do not learn from steps that are rejected or not finite.",
    "timely": "judge the loss and the norm of this call, `return new_state, loss > limit`.",
    **_UPDATE_FIXES,
}
_STEPS = 300
_SPIKES = {120: 1e4, 150: math.nan, 180: math.inf, 210: 3e38, 240: -math.inf}
_SOON = 10  # steps after a spike
_AROUND_SPIKES = (0, 1, 40, *sorted({step + i for step in _SPIKES for i in (0, 1)}))


def _steady_run() -> list[float]:
    """Return losses of a steady run, 2 plus or minus 0.1, with the spikes."""
    noise = torch.rand(_STEPS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = (2 + 0.2 * (noise - 0.5)).tolist()
    return [_SPIKES.get(step, value) for step, value in enumerate(values)]


def _call(state: Any, loss: float, norm: float | None) -> tuple[Any, Tensor, Any]:
    number = torch.tensor(loss, dtype=torch.float32)
    return state, number, () if norm is None else torch.tensor(norm, dtype=torch.float32)


class _GuardBattery(_UpdateBattery):
    """The checks of a guard."""

    kind = "guard"
    methods: ClassVar[dict[str, str]] = {"init": "device", "update": "state, loss, grad_norm"}
    fixes = _GUARD_FIXES
    labels = ("state", "loss", "norm")
    order = ("value", "init", "purity", "steady", "timely", "runs", "round_trip", "transforms")

    def update(self, *call: Any) -> Any:
        returned = self.call_update("a state and a verdict", *call)
        pair = isinstance(returned, tuple) and len(returned) == 2
        bad = returned[1] if pair else None
        if not isinstance(bad, Tensor) or bad.dtype is not torch.bool or bad.ndim:
            self.fail("pair", short(returned), "(state, bad), bad a 0-d bool tensor", *call)
        same = self.check_alike("structure", "state", call[0], returned[0], *call)
        if same and _is_finite(call[0]) and not _is_finite(returned[0]):
            self.fail("finite", short(returned[0]), "finite numbers", *call)
        return returned

    def calls(self, *, norm: bool) -> list[tuple[Any, Tensor, Any]]:
        """Return the arguments of each step of a run, with or without a norm."""
        state, calls = self.subject.init(), []
        for loss in _steady_run():
            calls.append(_call(state, loss, loss if norm else None))
            state = self.update(*calls[-1])[0]
        return calls

    def samples(self) -> list[list[Any]]:
        """Return the steps at and around the spikes, with and without a norm."""
        runs = [self.calls(norm=norm) for norm in (True, False)]
        return [[calls[step] for step in _AROUND_SPIKES] for calls in runs]

    # ---- what is checked

    def steady(self) -> None:
        for norm in (True, False):
            calls = [c for step, c in enumerate(self.calls(norm=norm)) if step not in _SPIKES]
            for part in (calls[:100], calls[-50:]):
                verdicts = [bool(self.update(*call)[1]) for call in part]
                rejected = sum(verdicts)
                if rejected > len(part) / 10:
                    came = f"{rejected} of {len(part)} steps rejected, this one first"
                    self.fail("steady", came, "one in ten at most", *part[verdicts.index(True)])

    def timely(self) -> None:
        for norm in (True, False):
            calls = self.calls(norm=norm)
            for step in _SPIKES:
                event = calls[step]
                after, bad = self.update(*event)
                # The same run with a calm step in place of the event, for comparison.
                calm = self.update(event[0], *calls[step - 1][1:])[0]
                for soon in range(step + 1, step + 1 + _SOON):
                    after, late = self.update(after, *calls[soon][1:])
                    calm, usual = self.update(calm, *calls[soon][1:])
                    if late and not bad and not usual:
                        came = f"accepted, and the calm step {soon - step} after it rejected"
                        self.fail("timely", came, "rejected itself, or no other for it", *event)

    def runs(self) -> None:
        def step(state: Any, loss: float, norm: float | None) -> Any:
            return self.update(*_call(state, loss, norm))[0]

        number = st.floats(width=32)
        steps = st.tuples(number, st.none() | number)
        self.check_runs(st.lists(steps, min_size=1, max_size=40), step)


def _is_finite(state: Any) -> bool:
    leaves = [leaf for leaf in pytree.tensors(state) if leaf.is_floating_point()]
    return all(bool(torch.isfinite(leaf).all()) for leaf in leaves)
