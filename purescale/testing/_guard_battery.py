"""The laws of a guard of one's own, as one check."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import hypothesis.strategies as st
import torch
from hypothesis import given
from torch import Tensor

from .._tree import tree
from ._battery import EXAMPLES, Battery, shown
from ._laws import short


def assert_guard(guard: Any, quirks: Sequence[str] = ()) -> None:
    """Check that a guard of your own keeps all laws that `train_step` relies on.

    Checked on a steady run of 300 steps with spikes, inf and NaN in it, with a gradient norm and
    without, and on runs that Hypothesis finds and shrinks:

    - `value`: the guard can be hashed and compared, and keeps nothing in its attributes
    - `init`: a NamedTuple of tensors on the device that was asked for
    - `raises`, `reads`, `pure`: `update` raises nothing, reads no value, changes no argument
    - `pair`: it returns `(state, bad)`, `bad` a 0-d bool tensor
    - `structure`: the state keeps its type, dtypes and shapes
    - `finite`: a state of finite numbers stays one, whatever it is told
    - `steady`: where nothing spikes, nine of ten steps are accepted, also after spikes, inf and NaN
    - `timely`: a verdict is about the step that it came with: a spike that is accepted has no step
      after it rejected
    - `round_trip`: a state that was saved and loaded goes on with the same bits
    - `compile`, `vmap`: one graph, and members equal to single runs; the same bits

    `quirks`: laws that it breaks on purpose. Each of them must be seen broken.

    Raises `AssertionError` with the state, loss and norm, what came, what should have come, and a
    fix; `TypeError` for what is no guard.

    >>> from purescale import SpikeGuard
    >>> assert_guard(SpikeGuard(warmup=10))
    """
    _GuardBattery(guard, quirks).run()


_FIXES = {
    "value": "`@dataclasses.dataclass(frozen=True)`; what changes belongs into the state.",
    "init": "`init(device)` returns a NamedTuple of tensors made with `device=device`.",
    "raises": "return a state and a verdict for any loss and norm; `grad_norm` is () where "
    "train_step has no max_norm: `isinstance(grad_norm, torch.Tensor)`.",
    "reads": "`torch.where(bad, a, b)` in place of `if bad:`; no `.item()`.",
    "pure": "torch.where and others that make new tensors, in place of methods that end in `_`.",
    "pair": "`return new_state, loss > limit`, of 0-d tensors.",
    "structure": "every field as it was: `.to(state.mean.dtype)`, a counter as "
    "`torch.where(bad, 0, count + 1)`.",
    "finite": "`torch.where(torch.isfinite(loss), new, old)`: learn from finite numbers only.",
    "steady": "judge after a warmup only, by what is usual in the run, and learn nothing from what "
    "is rejected or not finite.",
    "timely": "judge the loss and the norm of this call, `return new_state, loss > limit`, not what"
    " the state kept of an earlier one: a bad step must be rejected before it changes anything.",
    "round_trip": "tensors only in the state, nothing remembered elsewhere.",
    "compile": "torch.where in place of `if`; counters as 0-d tensors.",
    "vmap": "0-d operations and torch.where, as for one state.",
}
_STEPS = 300
_EVENTS = {120: 1e4, 150: math.nan, 180: math.inf, 210: 3e38, 240: -math.inf}
_SOON = 10  # steps after an event
_LOOKED_AT = (0, 1, 40, *sorted({step + i for step in _EVENTS for i in (0, 1)}))


def _run() -> list[float]:
    """A steady run: about 2, give or take a tenth."""
    noise = torch.rand(_STEPS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = (2 + 0.2 * (noise - 0.5)).tolist()
    return [_EVENTS.get(step, value) for step, value in enumerate(values)]


def _call(state: Any, loss: float, norm: float | None) -> tuple[Any, Tensor, Any]:
    number = torch.tensor(loss, dtype=torch.float32)
    return state, number, () if norm is None else torch.tensor(norm, dtype=torch.float32)


class _GuardBattery(Battery):
    """The checks of one guard."""

    kind = "guard"
    methods: ClassVar[dict[str, str]] = {"init": "device", "update": "state, loss, grad_norm"}
    fix_for_kind = "`assert_guard(MyGuard())`, one that was made"
    fixes = _FIXES
    labels = ("state", "loss", "norm")

    def check(self) -> None:
        for check in (self.value, self.init, self.purity, self.steady, self.timely, self.runs,
                      self.round_trip, self.compile, self.vmap):  # fmt: skip
            check()

    def update(self, call: tuple[Any, Tensor, Any]) -> tuple[Any, Tensor]:
        """The next state and the verdict, after all that one call can break was checked."""
        returned = self.updated("a state and a verdict", *call)
        pair = isinstance(returned, tuple) and len(returned) == 2
        bad = returned[1] if pair else None
        if not isinstance(bad, Tensor) or bad.dtype is not torch.bool or bad.ndim:
            self.fail("pair", short(returned), "(state, bad), bad a 0-d bool tensor", *call)
            raise AssertionError(f"quirks has `pair`, without which {self.name} is no guard.")
        new = returned[0]
        same = self.alike("structure", "state", call[0], new, *call)
        if same and _is_finite(call[0]) and not _is_finite(new):
            self.fail("finite", shown(new), "finite numbers", *call)
        return new, bad

    def calls(self, *, norm: bool = True) -> list[tuple[Any, Tensor, Any]]:
        """The arguments of a run, each with the state that the one before has led to."""
        state, calls = self.subject.init(), []
        for loss in _run():
            calls.append(_call(state, loss, loss if norm else None))
            state = self.update(calls[-1])[0]
        return calls

    def looked_at(self, *, norm: bool) -> list[tuple[Any, Tensor, Any]]:
        """Those of a run at which something happens."""
        every = self.calls(norm=norm)
        return [every[step] for step in _LOOKED_AT]

    # ---- what is checked

    def init(self) -> None:
        state = self.subject.init("cpu")
        if not (isinstance(state, tuple) and hasattr(state, "_fields")):
            return self.fail("init", f"a {type(state).__name__}", "a NamedTuple")
        leaves = tree.flatten(state)[0]
        if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
            return self.fail("init", shown(state), "tensors")
        self.device()

    def purity(self) -> None:
        """An update reads no value, changes no argument and no attribute of the guard."""
        for norm in (True, False):
            for call in self.looked_at(norm=norm):
                self.pure(*call)

    def steady(self) -> None:
        for norm in (True, False):
            calls = [c for step, c in enumerate(self.calls(norm=norm)) if step not in _EVENTS]
            for some in (calls[:100], calls[-50:]):
                verdicts = [bool(self.update(call)[1]) for call in some]
                rejected = sum(verdicts)
                if rejected > len(some) / 10:
                    came = f"{rejected} of {len(some)} steps rejected, this one first"
                    self.fail("steady", came, "one in ten at most", *some[verdicts.index(True)])

    def timely(self) -> None:
        for norm in (True, False):
            calls = self.calls(norm=norm)
            for step in _EVENTS:
                event = calls[step]
                after, bad = self.update(event)
                # the same run with a calm step in place of the event
                calm = self.update((event[0], *calls[step - 1][1:]))[0]
                for soon in range(step + 1, step + 1 + _SOON):
                    after, late = self.update((after, *calls[soon][1:]))
                    calm, usual = self.update((calm, *calls[soon][1:]))
                    if late and not bad and not usual:
                        came = f"accepted, and the calm step {soon - step} after it rejected"
                        self.fail("timely", came, "rejected itself, or no other for it", *event)

    def runs(self) -> None:
        number = st.floats(width=32)

        @EXAMPLES
        @given(st.lists(st.tuples(number, st.none() | number), min_size=1, max_size=40))
        def run(steps: list[tuple[float, float | None]]) -> None:
            state = self.subject.init()
            for loss, norm in steps:
                state = self.update(_call(state, loss, norm))[0]

        run()

    def round_trip(self) -> None:
        self.resumed(*self.calls()[-1])

    def compile(self) -> None:
        for norm in (True, False):
            self.one_graph(self.looked_at(norm=norm))

    def vmap(self) -> None:
        self.members(self.looked_at(norm=True))


def _is_finite(state: Any) -> bool:
    leaves = [leaf for leaf in tree.tensors(state) if leaf.is_floating_point()]
    return all(bool(torch.isfinite(leaf).all()) for leaf in leaves)
