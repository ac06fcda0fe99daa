"""`assert_guard`: the laws of a custom guard as one check."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import hypothesis.strategies as st
import torch
from torch import Tensor

from .._tree import tree as _tree
from ._battery import UPDATE_FIXES, UpdateBattery, shown
from ._laws import short


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


_FIXES = {
    "value": UPDATE_FIXES["value"],
    "init": "`init(device)` returns a NamedTuple of tensors made with `device=device`.",
    "raises": "return a state and a verdict for any loss and norm; `grad_norm` is () if "
    "train_step has no max_norm: `isinstance(grad_norm, torch.Tensor)`.",
    "reads": "`torch.where(bad, a, b)` in place of `if bad:`; no `.item()`.",
    "pair": "`return new_state, loss > limit`, of 0-d tensors.",
    "structure": "every field as it was: `.to(state.mean.dtype)`, a counter as "
    "`torch.where(bad, 0, count + 1)`.",
    "finite": "`torch.where(torch.isfinite(loss), new, old)`: learn from finite numbers only.",
    "steady": "judge only after a warmup, by the usual values of the run, and do not learn from "
    "steps that are rejected or not finite.",
    "timely": "judge the loss and the norm of this call, `return new_state, loss > limit`, not "
    "those of an earlier one: a bad step must be rejected before it changes anything.",
    **UPDATE_FIXES,
}
_STEPS = 300
_EVENTS = {120: 1e4, 150: math.nan, 180: math.inf, 210: 3e38, 240: -math.inf}
_SOON = 10  # steps after an event
_AROUND_EVENTS = (0, 1, 40, *sorted({step + i for step in _EVENTS for i in (0, 1)}))


def _run() -> list[float]:
    """Return losses of a steady run, 2 plus or minus 0.1, with the events."""
    noise = torch.rand(_STEPS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = (2 + 0.2 * (noise - 0.5)).tolist()
    return [_EVENTS.get(step, value) for step, value in enumerate(values)]


def _call(state: Any, loss: float, norm: float | None) -> tuple[Any, Tensor, Any]:
    number = torch.tensor(loss, dtype=torch.float32)
    return state, number, () if norm is None else torch.tensor(norm, dtype=torch.float32)


class _GuardBattery(UpdateBattery):
    """The checks of a guard."""

    kind = "guard"
    methods: ClassVar[dict[str, str]] = {"init": "device", "update": "state, loss, grad_norm"}
    fix_for_kind = "`assert_guard(MyGuard())`, an instance"
    fixes = _FIXES
    labels = ("state", "loss", "norm")

    def checks(self) -> tuple[Callable[[], bool | None], ...]:
        return (self.value, self.init, self.purity, self.steady, self.timely, self.runs,
                self.round_trip, self.compile, self.vmap)  # fmt: skip

    def update(self, call: tuple[Any, Tensor, Any]) -> tuple[Any, Tensor]:
        """Return the next state and the verdict, and check the laws of one call."""
        returned = self.call_update("a state and a verdict", *call)
        pair = isinstance(returned, tuple) and len(returned) == 2
        bad = returned[1] if pair else None
        if not isinstance(bad, Tensor) or bad.dtype is not torch.bool or bad.ndim:
            self.fail("pair", short(returned), "(state, bad), bad a 0-d bool tensor", *call)
            raise self.required_law("pair")
        new = returned[0]
        same = self.check_alike("structure", "state", call[0], new, *call)
        if same and _is_finite(call[0]) and not _is_finite(new):
            self.fail("finite", shown(new), "finite numbers", *call)
        return new, bad

    def calls(self, *, norm: bool = True) -> list[tuple[Any, Tensor, Any]]:
        """Return the arguments of each step of a run."""
        state, calls = self.subject.init(), []
        for loss in _run():
            calls.append(_call(state, loss, loss if norm else None))
            state = self.update(calls[-1])[0]
        return calls

    def calls_around_events(self, *, norm: bool) -> list[tuple[Any, Tensor, Any]]:
        """Return the arguments of the steps at and around the events."""
        calls = self.calls(norm=norm)
        return [calls[step] for step in _AROUND_EVENTS]

    # ---- what is checked

    def init(self) -> None:
        state = self.first_state()
        if state is None:
            return None
        leaves = _tree.flatten(state)[0]
        if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
            return self.fail("init", shown(state), "tensors")
        self.check_device()

    def purity(self) -> None:
        for norm in (True, False):
            for call in self.calls_around_events(norm=norm):
                self.check_update_is_pure(*call)

    def steady(self) -> None:
        for norm in (True, False):
            calls = [c for step, c in enumerate(self.calls(norm=norm)) if step not in _EVENTS]
            for part in (calls[:100], calls[-50:]):
                verdicts = [bool(self.update(call)[1]) for call in part]
                rejected = sum(verdicts)
                if rejected > len(part) / 10:
                    came = f"{rejected} of {len(part)} steps rejected, this one first"
                    self.fail("steady", came, "one in ten at most", *part[verdicts.index(True)])

    def timely(self) -> None:
        for norm in (True, False):
            calls = self.calls(norm=norm)
            for step in _EVENTS:
                event = calls[step]
                after, bad = self.update(event)
                # The same run with a calm step in place of the event, for comparison.
                calm = self.update((event[0], *calls[step - 1][1:]))[0]
                for soon in range(step + 1, step + 1 + _SOON):
                    after, late = self.update((after, *calls[soon][1:]))
                    calm, usual = self.update((calm, *calls[soon][1:]))
                    if late and not bad and not usual:
                        came = f"accepted, and the calm step {soon - step} after it rejected"
                        self.fail("timely", came, "rejected itself, or no other for it", *event)

    def runs(self) -> None:
        def step(state: Any, loss: float, norm: float | None) -> Any:
            return self.update(_call(state, loss, norm))[0]

        number = st.floats(width=32)
        steps = st.tuples(number, st.none() | number)
        self.check_runs(st.lists(steps, min_size=1, max_size=40), step)

    def round_trip(self) -> None:
        self.check_resumed(*self.calls()[-1])

    def compile(self) -> None:
        for norm in (True, False):
            self.check_one_graph(self.calls_around_events(norm=norm))

    def vmap(self) -> None:
        self.check_members(self.calls_around_events(norm=True))


def _is_finite(state: Any) -> bool:
    leaves = [leaf for leaf in _tree.tensors(state) if leaf.is_floating_point()]
    return all(bool(torch.isfinite(leaf).all()) for leaf in leaves)
