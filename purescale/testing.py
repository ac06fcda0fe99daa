"""For tests of your own: Hypothesis strategies, and checks of the laws that everything here keeps.

Needs hypothesis (`pip install purescale[testing]`), and is imported by itself:
`from purescale.testing import assert_scale_rule`. Each check raises an `AssertionError` that says
what was found, where, and what to do.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch import Tensor

from ._checkpoint import from_state_dict, load, save, to_state_dict
from ._laws import Untouched as Untouched
from ._laws import assert_pure as assert_pure
from ._laws import assert_single_graph as assert_single_graph
from ._laws import assert_sync_free as assert_sync_free
from ._laws import assert_vmap_equals_loop as assert_vmap_equals_loop
from ._laws import report, short
from ._laws import same_bits as same_bits
from ._laws import shares_memory as shares_memory
from ._loss_scale.rules import DynamicScale, NoScale, StaticScale
from ._optimizer_laws import assert_optimizer as assert_optimizer
from ._torch import private as _torch
from ._tree import tree as _tree
from ._tree.tree import Tree

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
    "same_bits",
    "shares_memory",
    "Untouched",
]


# ---- strategies ----------------------------------------------------------------------------------


def scale_rules(kind: type | None = None) -> st.SearchStrategy[Any]:
    """Rules of this package with any legal settings, short intervals preferred; of one `kind`.

    >>> from purescale import StaticScale
    >>> isinstance(scale_rules(StaticScale).example(), StaticScale)  # doctest: +SKIP
    True
    """
    kinds: dict[type, st.SearchStrategy[Any]] = {
        DynamicScale: st.builds(
            lambda init, interval, hysteresis, refill, low, high: DynamicScale(
                init_scale=2.0**init,
                growth_interval=interval,
                hysteresis=hysteresis,
                refill=refill,
                min_scale=2.0 ** (init - low),
                max_scale=2.0 ** (init + high),
            ),
            st.integers(-20, 20),
            st.integers(1, 5),
            st.integers(1, 3),
            st.sampled_from(["growth", "clean"]),
            st.integers(0, 20),
            st.integers(0, 20),
        ),
        StaticScale: st.builds(StaticScale, _powers(-24, 24)),
        NoScale: st.just(NoScale()),
    }
    return st.one_of(*kinds.values()) if kind is None else kinds[kind]


def _scale(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)


@st.composite
def scaler_states(draw: Any, rule: Any = None) -> Any:
    """States that `rule` (`DynamicScale()`) may be handed: after any run, and with a scale that a
    restored or damaged checkpoint may hold: any power of two, 0, inf, NaN, negative.
    """
    rule = DynamicScale() if rule is None else rule
    state = rule.init()
    for bad, amax in draw(st.lists(_steps(rule), max_size=12)):
        state = rule.update(*_arguments(state, bad, amax))
    scale = draw(st.none() | _powers(-149, 127) | st.sampled_from(_DAMAGED))
    return state if scale is None else state._replace(scale=_scale(scale))


def overflow_runs(size: int | None = None) -> st.SearchStrategy[list[bool]]:
    """`found_inf` of one step after another: up to 40, or of `size`; bursts and long clean
    stretches.
    """
    most = 40 if size is None else size

    def laid_out(gaps: list[int]) -> list[bool]:
        return [bad for gap in gaps for bad in [False] * gap + [True]]

    gaps = st.lists(st.integers(0, 25), max_size=max(1, most // 8)).map(laid_out)
    if size is None:
        return st.lists(st.booleans(), min_size=1, max_size=most) | gaps.map(
            lambda run: run[:most] or [False]
        )
    return gaps.map(lambda run: (run + [False] * most)[:most])


def grad_trees(like: Tree = None) -> st.SearchStrategy[Tree]:
    """Gradients: of any nesting, or in the structure, shapes and dtypes of `like`.

    float16, bfloat16, float32 and float64; 0-d, empty, `None`; zeros of both signs, subnormals,
    the largest numbers, inf and NaN among the elements.
    """
    if like is not None:
        leaves, structure = _tree.flatten(like)
        each = [st.none() if leaf is None else _leaf(leaf.dtype, leaf.shape) for leaf in leaves]
        return st.tuples(*each).map(lambda drawn: structure.unflatten(list(drawn)))
    dtypes = st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64])
    shapes = st.sampled_from([(3,), (), (0,), (2, 3), (1,)])
    leaf = st.none() | st.tuples(dtypes, shapes).flatmap(lambda kind: _leaf(*kind))
    return st.recursive(
        st.dictionaries(st.sampled_from("abc"), leaf, min_size=1),
        lambda inner: (
            st.dictionaries(st.sampled_from("xyz"), inner, min_size=1, max_size=2)
            | st.lists(inner, min_size=1, max_size=2)
            | st.tuples(inner, leaf)
        ),
        max_leaves=3,
    )


@st.composite
def params_and_grads(draw: Any) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
    """Finite float32 parameters by name, and gradients as `grad_trees` has them, or `None`."""
    shapes = draw(st.lists(st.sampled_from([(3,), (), (2, 3), (0,)]), min_size=1, max_size=4))
    finite = st.floats(-(2.0**20), 2.0**20, width=32)
    params = {
        f"layer{index}": draw(_leaf(torch.float32, shape, finite))
        for index, shape in enumerate(shapes)
    }
    grads = draw(grad_trees(params))
    return params, {name: draw(st.just(g) | st.none()) for name, g in grads.items()}


_DAMAGED = (0.0, -0.0, math.inf, -math.inf, math.nan, -8.0)


def _powers(low: int, high: int) -> st.SearchStrategy[float]:
    return st.integers(low, high).map(lambda exponent: 2.0**exponent)


def _elements(dtype: torch.dtype) -> st.SearchStrategy[float]:
    limits = torch.finfo(dtype)
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, limits.max, -limits.max, limits.tiny / 2]
    width: Any = {2: 16, 4: 32, 8: 64}[dtype.itemsize]
    return st.floats(width=width) | st.sampled_from(special)


def _leaf(
    dtype: torch.dtype, shape: Sequence[int], elements: st.SearchStrategy[float] | None = None
) -> st.SearchStrategy[Tensor]:
    count = math.prod(shape)
    each = _elements(dtype) if elements is None else elements
    values = st.lists(each, min_size=count, max_size=count)
    return values.map(lambda v: torch.tensor(v, dtype=torch.float64).to(dtype).reshape(shape))


def _takes_amax(rule: Any) -> bool:
    return bool(getattr(rule, "takes_amax", False))


def _steps(rule: Any) -> st.SearchStrategy[tuple[bool, float | None]]:
    """`found_inf`, and the largest gradient for a rule that takes it."""
    amax: st.SearchStrategy[Any] = st.none()
    if _takes_amax(rule):
        amax = _powers(-120, 120) | st.sampled_from([0.0, 1.0, 3.0, math.inf, math.nan])
    return st.tuples(st.booleans(), amax)


def _arguments(state: Any, bad: bool, amax: float | None) -> tuple[Any, ...]:
    given = (state, torch.tensor(bad))
    return given if amax is None else (*given, torch.tensor(amax, dtype=torch.float32))


# ---- a rule --------------------------------------------------------------------------------------


def assert_scale_rule(rule: Any, quirks: Sequence[str] = ()) -> None:
    """A rule of your own against all that `train_step` relies on: one line of test.

    Checked on runs that Hypothesis finds and shrinks, on hundreds of overflows and thousands of
    clean steps in a row, in each state of these with an overflow and with a clean step, on all
    short runs from the states whose next step grows the scale, and from damaged states:

    - `value`: the rule can be hashed and compared, and keeps nothing in its attributes
    - `init`: a NamedTuple of tensors with a 0-d float32 `scale`, on the device that was asked for
    - `raises`, `reads`, `pure`: `update` raises nothing, reads no value, changes no argument
    - `structure`: the state keeps its type, dtypes and shapes
    - `positive`, `finite`, `power_of_two`: what the scale is, for ever
    - `damaged`: it is so again one step after a scale of 0, inf, NaN or less than 0
    - `overflow`: one never raises the scale; `backs_off`: many lower it, unless the rule is static
      or at its `min_scale`; `clean`: a clean step never lowers it, unless it `takes_amax`
    - `round_trip`: a state that was saved and loaded goes on with the same bits
    - `compile`, `vmap`: one graph, and members equal to single runs; the same bits

    `quirks`: laws that it breaks on purpose, as the rules of `interop` do where their peer does.
    Each of them must be seen broken.

    Raises `AssertionError` with the state, the flag, what came, what should have come, and a fix.

    >>> from purescale import DynamicScale
    >>> assert_scale_rule(DynamicScale(growth_interval=2))
    """
    missing = [name for name in ("init", "update") if not callable(getattr(rule, name, None))]
    if isinstance(rule, type) or missing:
        what = f"the class {rule.__name__}" if isinstance(rule, type) else _name(rule)
        raise TypeError(
            f"rule is {what}; expected an object with `init(device)` and `update(scaler, "
            "found_inf)`. Fix: `assert_scale_rule(MyRule())`, one that was made."
        )
    broken = frozenset(quirks)
    unknown = sorted(broken - set(_CURES))
    if unknown:
        raise ValueError(f"quirks has {unknown}; expected some of {', '.join(_CURES)}.")
    battery = _Battery(rule, broken)
    for check in (battery.value, battery.init, battery.care, battery.endless, battery.runs,
                  battery.damaged, battery.round_trip, battery.compile, battery.vmap):  # fmt: skip
        check()
    kept = sorted(broken - battery.seen)
    assert not kept, (
        f"{_name(rule)} keeps {', '.join(kept)}, which quirks says it breaks. Fix: leave it out "
        "of quirks."
    )


_CURES = {
    "value": "`@dataclasses.dataclass(frozen=True)`; what changes belongs into the state.",
    "init": "`init(device)` returns a NamedTuple of tensors made with `device=device`, one of them "
    "`scale`, 0-d, float32, positive.",
    "raises": "return a state for any; what should stop training is check_scaler's to raise.",
    "reads": "`torch.where(found_inf, a, b)` in place of `if found_inf:`; no `.item()`.",
    "pure": "torch.where and others that make new tensors, in place of methods that end in `_`.",
    "structure": "every field as it was: `.to(scaler.scale.dtype)`, `torch.full_like(scaler.scale, "
    "x)` for a number, a counter as `torch.where(found_inf, 0, count + 1)`.",
    "positive": "`scale.clamp(min=self.min_scale)`, a floor such as 2.0**-24.",
    "finite": "`scale.clamp(max=self.max_scale)`, a ceiling such as 2.0**24.",
    "power_of_two": "factors and bounds that are powers of two: any other scale rounds every "
    "gradient twice.",
    "damaged": "`torch.where(torch.isfinite(scale) & (scale > 0), new, self.min_scale)`.",
    "overflow": "`torch.where(found_inf, scale * 0.5, ...)`: found_inf is True where the step was "
    "bad.",
    "backs_off": "multiply by a factor below 1 on an overflow, or training never moves again.",
    "clean": "decide by this step's found_inf, True where it was bad, in this update: a scale that "
    "moves a step late is not the one that scaled.",
    "round_trip": "tensors only in the state, nothing remembered elsewhere.",
    "compile": "torch.where in place of `if`; counters as 0-d tensors.",
    "vmap": "0-d operations and torch.where, as for one state.",
}
_RUN = [letter == "O" for letter in "...O.O...OOO....O...."]
_LONG = 320  # overflows: through all of float32 by halves
_STRETCH = 2500  # clean steps: beyond the usual interval
_LONGEST = 20_000  # clean steps: up to the interval of a rule that has a longer one
_EVENTS = 4  # states before a growth from which all runs of _DEPTH steps are tried
_DEPTH = 4


def _name(rule: Any) -> str:
    return type(rule).__name__


class _Battery:
    """The checks of one rule. Each leaves the next to go on where it was told of a quirk."""

    def __init__(self, rule: Any, quirks: frozenset[str]) -> None:
        self.rule, self.quirks = rule, quirks
        self.seen: set[str] = set()
        self.amax = 1.0 if _takes_amax(rule) else None
        self.growing: list[Any] = []  # states whose next clean step raises the scale

    def fail(
        self,
        law: str,
        came: str,
        should: str,
        *call: Any,
        cause: Exception | None = None,
        cure: str = "",
    ) -> None:
        """`call`: the arguments of the update."""
        if law in self.quirks:
            self.seen.add(law)
            return
        rows = dict(zip(("state", "flag", "amax"), map(_shown, call), strict=False))
        said = report(_name(self.rule), law, rows, came, should, cure or _CURES[law])
        raise AssertionError(said) from cause

    def update(self, state: Any, bad: bool, amax: float | None = None) -> Any:
        call = _arguments(state, bad, self.amax if amax is None else amax)
        try:
            return self.rule.update(*call)
        except Exception as error:
            self.fail("raises", f"{type(error).__name__}: {error}", "a state", *call, cause=error)
            raise

    def legal(self, new: Any, *call: Any, law: str = "") -> None:
        scale = float(new.scale)
        came = f"scale={scale!r}"
        if scale > 0 and math.isfinite(scale) and math.frexp(scale)[0] != 0.5:
            self.fail(law or "power_of_two", came, "a scale that is a power of two", *call)
        elif not math.isfinite(scale):
            self.fail(law or "finite", came, "a finite scale", *call)
        elif scale <= 0:
            self.fail(law or "positive", came, "a scale above 0", *call)

    def step(self, state: Any, bad: bool, amax: float | None = None, *, inside: bool = True) -> Any:
        """The next state of a run, once an overflow and a clean step were tried in this one. It may
        stand above a ceiling unless it is `inside`, so that a clean step lowers it.
        """
        tried = {}
        for flag in (True, False):
            new = tried[flag] = self.update(state, flag, amax)
            call = _arguments(state, flag, self.amax if amax is None else amax)
            self.alike(state, new, call)
            self.legal(new, *call)
            before, after = float(state.scale), float(new.scale)
            if flag and after > before:
                self.fail("overflow", f"scale={after!r}", f"at most {before!r}", *call)
            if not flag and after < before and inside and not _takes_amax(self.rule):
                self.fail("clean", f"scale={after!r}", f"at least {before!r}", *call)
        return tried[bad]

    def alike(self, state: Any, new: Any, call: tuple[Any, ...]) -> None:
        """The law that a state keeps its structure."""
        if type(new) is not type(state) or list(map(_kind, new)) != list(map(_kind, state)):
            self.fail("structure", _kinds(new), _kinds(state), *call)

    # ---- what is checked

    def value(self) -> None:
        try:
            hash(self.rule)
        except TypeError as error:
            self.fail("value", str(error), "a rule that can be hashed", cause=error)

    def init(self) -> None:
        state = self.rule.init("cpu")
        scale = getattr(state, "scale", None)
        if not (isinstance(state, tuple) and hasattr(state, "_fields")):
            return self.fail("init", f"a {type(state).__name__}", "a NamedTuple")
        if not isinstance(scale, Tensor) or scale.ndim or scale.dtype is not torch.float32:
            return self.fail("init", f"scale={short(scale)}", "a 0-d float32 tensor")
        for name, leaf in zip(state._fields, state, strict=True):
            if not all(isinstance(part, Tensor) for part in _tree.flatten(leaf)[0]):
                return self.fail("init", f"{name}={leaf!r}", "a tensor")
        self.legal(state, law="init")
        devices = {leaf.device.type for leaf in _tree.tensors(self.rule.init("meta"))}
        if devices != {"meta"}:
            self.fail("init", f"tensors on {sorted(devices)}", 'on what `init("meta")` names')

    def care(self) -> None:
        """What each call must leave alone."""
        state = self.rule.init()
        for bad in _RUN:
            call = _arguments(state, bad, self.amax)
            kept = {key: repr(value) for key, value in _attributes(self.rule).items()}
            new = self.update(state, bad)
            self.alike(state, new, call)
            for law, check in (("reads", assert_sync_free), ("pure", assert_pure)):
                try:
                    check(self.rule.update, *call)
                except AssertionError as error:
                    came, _, cure = str(error).partition(" Fix: ")
                    self.fail(law, came, "nothing of the kind", *call, cause=error, cure=cure)
            if {key: repr(value) for key, value in _attributes(self.rule).items()} != kept:
                self.fail("value", "an attribute of the rule changed", "the same", *call)
            state = new

    def endless(self) -> None:
        first = state = self.rule.init()
        for _ in range(_LONG):
            state = self.step(state, bad=True)
        low = float(state.scale)
        high = float(self.stretch(first).scale)
        for start in self.growing[:_EVENTS]:
            self.around(start)
        self.stretch(state)
        self.stretch(first._replace(scale=_scale(2.0**127)), inside=False)
        scale, floor = float(first.scale), getattr(self.rule, "min_scale", None) or 0.0
        if low >= scale and low > floor and high != scale:
            call = _arguments(first, True, self.amax)
            self.fail(
                "backs_off", f"scale={low!r} after {_LONG} overflows", f"below {scale!r}", *call
            )

    def stretch(self, state: Any, *, inside: bool = True) -> Any:
        """The state after as many clean steps as it takes to grow."""
        numbers = [n for n in _attributes(self.rule).values() if type(n) is int]
        for _ in range(min(max(_STRETCH, *numbers, 0) + 2, _LONGEST)):
            new = self.step(state, bad=False, inside=inside)
            if inside and float(new.scale) > float(state.scale):
                self.growing.append(state)
            state = new
        return state

    def around(self, state: Any) -> None:
        """All runs of `_DEPTH` steps."""
        states = [state]
        for _ in range(_DEPTH):
            states = [self.step(each, bad) for each in states for bad in (False, True)]

    def runs(self) -> None:
        @settings(
            max_examples=40,
            deadline=None,
            database=None,
            derandomize=True,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        @given(st.lists(_steps(self.rule), min_size=1, max_size=30))
        def run(steps: list[tuple[bool, float | None]]) -> None:
            state = self.rule.init()
            for bad, amax in steps:
                state = self.step(state, bad, amax)

        run()

    def damaged(self) -> None:
        whole = [self.rule.init(), *self.growing[:1]]
        for scale, bad in itertools.product(_DAMAGED, (False, True)):
            for state in (state._replace(scale=_scale(scale)) for state in whole):
                call = _arguments(state, bad, self.amax)
                self.legal(self.update(state, bad), *call, law="damaged")

    def round_trip(self) -> None:
        state = self.update(self.update(self.rule.init(), True), False)
        like, call = self.rule.init(), _arguments(state, False, self.amax)
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/state.pt"
            ways: list[Callable[[], Any]] = [
                lambda: _torch.pytree.tree_map(torch.clone, state),
                lambda: from_state_dict(to_state_dict(state), like=like),
                lambda: load(path, like=like),
            ]
            save(path, state)
            for way in ways:
                ours, theirs = self.update(state, False), self.update(way(), False)
                if not same_bits(ours, theirs):
                    self.fail("round_trip", _shown(theirs), _shown(ours), *call)

    def compile(self) -> None:
        state, calls, expected = self.rule.init(), [], []
        for bad in _RUN:
            calls.append(_arguments(state, bad, self.amax))
            state = self.update(state, bad)
            expected.append(state)
        self._agree(
            "compile", calls, expected, lambda: assert_single_graph(self.rule.update, *calls)
        )

    def vmap(self) -> None:
        state, states = self.rule.init(), []
        for bad in _RUN:
            states.append(state)
            state = self.update(state, bad)
        calls = [_arguments(state, bad, self.amax) for state in states for bad in (False, True)]
        stacked = _torch.pytree.tree_map(lambda *t: torch.stack(t), *calls)

        def members() -> list[Any]:
            together = assert_vmap_equals_loop(self.rule.update, *stacked)
            return [
                _torch.pytree.tree_map(lambda t, i=i: t[i], together) for i in range(len(calls))
            ]

        self._agree("vmap", calls, [self.rule.update(*call) for call in calls], members)

    def _agree(
        self, law: str, calls: list[Any], expected: list[Any], results: Callable[[], list[Any]]
    ) -> None:
        try:
            found = results()
        except AssertionError as error:
            came = str(error).partition(" Fix:")[0]
            return self.fail(law, came, "the same as eager", *calls[0], cause=error)
        for call, came, should in zip(calls, found, expected, strict=True):
            if not same_bits(came, should):
                self.fail(law, _shown(came), _shown(should), *call)


def _attributes(rule: Any) -> dict[str, Any]:
    return dict(getattr(rule, "__dict__", {}))


def _kind(value: Any) -> Any:
    return (value.dtype, value.shape) if isinstance(value, Tensor) else type(value)


def _kinds(state: Any) -> str:
    if not hasattr(state, "_fields"):
        return f"a {type(state).__name__}"
    fields = [
        f"{name}: {leaf.dtype} {tuple(leaf.shape)}"
        if isinstance(leaf, Tensor)
        else f"{name}: {type(leaf).__name__}"
        for name, leaf in zip(state._fields, state, strict=True)
    ]
    return f"{type(state).__name__}({', '.join(fields)})"


def _shown(value: Any) -> str:
    """A state as its numbers."""
    if isinstance(value, Tensor):
        return short(value.tolist(), 80)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        rows = zip(value._fields, value, strict=True)
        fields = ", ".join(f"{name}={_shown(leaf)}" for name, leaf in rows)
        return f"{type(value).__name__}({fields})"
    return short(value)
