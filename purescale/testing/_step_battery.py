"""`assert_step`: the laws of a whole training step as one check, of a pure one or of a trainer."""

from __future__ import annotations

import copy
import fnmatch
import inspect
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from .._torch import private
from .._tree import pytree
from .._tree.pytree import Tree, join_names
from .._tree.scalars import protocol_violation
from ._laws import (
    FIXES,
    Battery,
    Untouched,
    assert_single_graph,
    same_bits,
    saved_and_loaded,
    shares_memory,
    short,
)

_CHANGED_BY_A_SKIP = ("*scaler*", "*loss_scale*", "*rng*", "*iteration")


def assert_step(
    step: Any,
    state: Tree,
    batches: Sequence[Any],
    *,
    overflow: Callable[[Any], Any] | None = None,
    join: Callable[[list[Any]], Any] | Literal[False] | None = None,
    split: Callable[[Any], list[Any]] | None = None,
    skip_changes: Sequence[str] = _CHANGED_BY_A_SKIP,
    scale: str = "*scaler*scale",
    rtol: float = 0.05,
    quirks: Sequence[str] = (),
) -> None:
    """Check a whole training step of your own: a pure one, or a trainer that holds its state.

    Nothing has to be ported for it. A trainer is any object with `step(window)`, `state_dict()` and
    `load_state_dict(sd)`. A window is a list of batches that make one step together. torch's global
    generator is seeded alike before steps that are compared.

    - `moves`: a step of good batches changes the state and leaves no inf or NaN in it
    - `repeat`: the same state and window give the same bits; a pure step changes no argument
    - `resume`: a state that was saved, and loaded later, goes on with the same bits. Loading brings
      back all that a trainer has in its attributes: what has a `state_dict`, such as a GradScaler,
      and whole numbers
    - `window`: a window of two batches makes the step of both as one batch
    - `weights`: so does a window of unequal parts of one batch, as with padded tokens
    - `scale`: a step at a lower loss scale is the same step
    - `skip`: a window that overflows changes no bit but the loss scale, and the step after it is
      finite
    - `donate`: a step with `donate=True` has the same bits, if the step takes the word
    - `compile`: a pure step compiles, and gives the same to `rtol`

    Args:
        step: A function `step(state, window)` that returns `(state, info)`, such as
            `functools.partial(train_step, loss_fn=...)`; or a trainer.
        state: The state before a step; None for a trainer, whose own it is. A trainer comes back
            with the state that it had.
        batches: Four or more batches of equal size, each a tree of tensors.
        overflow: A function from a batch to one whose gradients overflow. By default its floating
            tensors become inf, or the loss scale if it has none.
        join: A function from a list of batches to one batch. By default tensors are joined along
            their first dimension. False: batches do not join, as with a hidden state that goes
            from one to the next; then `window` is not checked, and `weights` only with `split`.
        split: A function from a batch to two batches of unequal size: by default its first third
            and the rest.
        skip_changes: Globs of dotted paths in the state of what a skipped step may change. For a
            loop that calls `scheduler.step()` once a batch, `("*scaler*", "*scheduler*", "*.lr")`.
        scale: A glob of the dotted path of the loss scale. Without such a leaf `scale` is not
            checked.
        rtol: How far an update may be from the expected one, relative to the update, in most of the
            elements; counts are compared exactly.
        quirks: Laws that it breaks on purpose. Each must be seen broken. Dropout and batch norm
            depend on how samples are put together: `quirks=("window", "weights")`.

    Raises:
        AssertionError: A law is broken; with the paths in the state, what came, what should, and a
            fix.
        TypeError: `step` is neither a function nor a trainer.
        ValueError: Fewer than four batches, or a quirk that is not the name of a law.

    Example:
        >>> import functools
        >>> import purescale as ps
        >>> def loss_fn(params, buffers, batch):
        ...     return (params["w"] * batch).pow(2).mean(), buffers
        >>> optimizer, rule = ps.from_torch(torch.optim.SGD, lr=0.1), ps.DynamicScale(2.0**8)
        >>> step = functools.partial(
        ...     ps.train_step, loss_fn=loss_fn, optimizer=optimizer, rule=rule, weight_fn=len
        ... )
        >>> state = ps.init_train_state({"w": torch.ones(3)}, {}, optimizer, rule)
        >>> assert_step(step, state, [torch.randn(4, 3) for _ in range(4)])
    """
    batches = list(batches)
    if len(batches) < _BATCHES:
        raise ValueError(f"batches has {len(batches)} of at least {_BATCHES} batches. Fix: more.")
    run = _Trainer(step) if state is None else _Pure(step, state)
    split = split or (None if join is False else _third_and_rest)
    join = _joined if join is None else join
    battery = _StepBattery(
        run, batches, overflow or _not_finite, join, split, skip_changes, scale, rtol, quirks
    )
    with torch.random.fork_rng():
        try:
            battery.run()
        finally:
            if isinstance(run, _Trainer):
                run.trainer.load_state_dict(run.first)


_BATCHES = 4
_OF_PARTS = (
    'If batch norm or dropout see each part alone, `quirks=("window", "weights")`. If samples are '
    "not along the first dimension, as in [layers, batch, width], join= and split=, or join=False."
)
_FIXES = {
    "moves": "batches that do not overflow, with gradients that are not 0; a lower loss scale.",
    "repeat": "keep what changes in the state, a generator's too; a pure step returns new tensors.",
    "resume": "save all that a step reads: optimizer, scaler, scheduler, generators, averages and "
    "counters; no gradient may wait for the next step, so clear `.grad`.",
    "window": "the mean over the window: `(loss / len(window)).backward()` for each batch, with "
    f"gradients cleared once, and one step of the scheduler and of each counter. {_OF_PARTS}",
    "weights": "weigh each part by its samples or tokens: divide the sum of the losses by the sum "
    f"of the weights; `weight_fn=` in train_step. {_OF_PARTS}",
    "scale": "unscale the gradients once, with the scale that scaled the loss, before they are "
    "clipped, measured or changed.",
    "skip": "one flag decides for everything, buffers, averages and step counts too: "
    "`select(found_inf, old, new)`; name what may change in skip_changes.",
    "donate": "a donated state may be overwritten and nothing else; do not keep tensors of it.",
    "compile": FIXES["compile"],
}


class _Pure:
    """A pure step."""

    is_pure = True

    def __init__(self, step: Any, state: Tree) -> None:
        if not callable(step) or isinstance(step, type):
            raise TypeError(
                f"step is {type(step).__name__}; expected a function `step(state, window)` that "
                "returns `(state, info)`. Fix: `functools.partial(train_step, loss_fn=..., ...)`; "
                "for a trainer `assert_step(trainer, None, batches)`."
            )
        self.step, self.first = step, state
        self.name = getattr(step, "__name__", "step")

    def __call__(self, state: Tree, window: list[Any], **settings: Any) -> Tree:
        """Return the state after a step."""
        torch.manual_seed(0)
        result = self.step(state, window, **settings)
        if not isinstance(result, tuple) or len(result) != 2:
            raise AssertionError(f"the step returned {short(result)}, expected (state, info).")
        return result[0]

    def resumed(self, state: Tree, windows: list[list[Any]]) -> list[tuple[Tree, Tree]]:
        """Return pairs that should be equal: the state after two windows, and that of a run that
        was stopped between them.
        """
        between = self(state, windows[0])
        expected = self(between, windows[1])
        self(expected, windows[2])
        loaded = saved_and_loaded(between, state)
        return [(expected, self(each, windows[1])) for each in loaded]


class _Trainer:
    """A trainer that holds its state, as a function of the state."""

    is_pure = False

    def __init__(self, trainer: Any) -> None:
        if what := protocol_violation(trainer, "step", "state_dict", "load_state_dict"):
            raise TypeError(
                f"step is {what}, and state is None; expected a trainer, an object with "
                "`step(window)`, `state_dict()` and `load_state_dict(sd)`. Fix: a class with these "
                "around your loop; for a function `assert_step(step, state, batches)`."
            )
        self.trainer, self.name = trainer, type(trainer).__name__
        self.first = self._state()

    def _state(self) -> Tree:
        return copy.deepcopy(self.trainer.state_dict())

    def _parts(self) -> dict[str, Any]:
        """Return what its attributes have: state dicts and whole numbers."""
        parts = {}
        for path, leaf in _leaves(dict(getattr(self.trainer, "__dict__", {}))):
            if not protocol_violation(leaf, "state_dict"):
                parts[path] = copy.deepcopy(leaf.state_dict())
            elif type(leaf) is int:
                parts[path] = leaf
        return parts

    def _go_on(self, window: list[Any]) -> Tree:
        torch.manual_seed(0)
        self.trainer.step(window)
        return self._state()

    def __call__(self, state: Tree, window: list[Any]) -> Tree:
        """Return the state after a step from this state."""
        self.trainer.load_state_dict(copy.deepcopy(state))
        return self._go_on(window)

    def resumed(self, state: Tree, windows: list[list[Any]]) -> list[tuple[Tree, Tree]]:
        """Return pairs that should be equal: the parts of the trainer before it goes on and after
        it was stopped there, and the states a step later. The trainer itself goes on, so that what
        is not saved has moved.
        """
        between = self(state, windows[0])
        parts = self._parts()
        expected = self._go_on(windows[1])
        self._go_on(windows[2])
        self.trainer.load_state_dict(copy.deepcopy(between))
        return [(parts, self._parts()), (expected, self._go_on(windows[1]))]


class _StepBattery(Battery):
    """The checks of a step."""

    kind = "step"
    fixes = _FIXES

    def __init__(
        self,
        step: Any,
        batches: list[Any],
        overflow: Callable[[Any], Any],
        join: Callable[[list[Any]], Any] | Literal[False],
        split: Callable[[Any], list[Any]] | None,
        skip_changes: Sequence[str],
        scale: str,
        rtol: float,
        quirks: Sequence[str],
    ) -> None:
        super().__init__(step, quirks)
        self.name, self.step, self.batches, self.rtol = step.name, step, batches, rtol
        self.overflow, self.join, self.split = overflow, join, split
        self.skip_changes, self.scale_glob = skip_changes, scale
        # What a trainer does not save shows in both; a pure step may have written into its state.
        twice = ("repeat", "resume") if step.is_pure else ("resume", "repeat")
        self.order = ("moves", *twice, "window", "weights", "scale", "skip")
        if step.is_pure:
            self.order = (*self.order, "donate", "compile")

    def check_same(self, law: str, expected: Tree, came: Tree, free: Sequence[str] = ()) -> None:
        """Check that two states have the same bits, but for paths that match a glob of `free`."""
        differing = [path for path in _differing(expected, came) if not _matches(path, free)]
        if differing:
            self.fail(law, f"{join_names(differing)} differ", "the same bits")

    def check_close(self, law: str, expected: Tree, came: Tree) -> None:
        """Check that two states after one step agree up to rounding."""
        reasons = _far(self.state, expected, came, self.rtol, (self.scale_glob,))
        if reasons:
            self.fail(law, join_names(reasons), f"the same update, to {self.rtol:g} of it")

    def check_finite(self, law: str, state: Tree, when: str) -> bool:
        """Return True if no leaf of the state after a step has inf or NaN."""
        infinite = [path for path, leaf in _leaves(state) if not _is_finite(leaf)]
        if infinite:
            self.fail(law, f"{join_names(infinite)} not finite {when}", "a finite step")
        return not infinite

    # ---- what is checked

    def moves(self) -> bool:
        """Check a few steps, and keep the state after them: the first may overflow."""
        self.state = self.step.first
        for batch in self.batches[:_BATCHES]:
            before = self.state
            self.state = self.step(before, [batch])
        if all(_matches(path, self.skip_changes) for path in _differing(before, self.state)):
            self.fail("moves", "a state that did not move", "a step that moves the state")
            return False
        return self.check_finite("moves", self.state, f"after {_BATCHES} steps")

    def repeat(self) -> None:
        window = [self.batches[0]]

        def untouched() -> Tree:
            with Untouched((self.state, window)):
                return self.step(self.state, window)

        expected = self.attempt("repeat", "a state in memory of its own", untouched)
        if "repeat" in self.broken:
            return
        if self.step.is_pure and shares_memory(expected, (self.state, window)):
            self.fail("repeat", "a state that shares memory with an argument", "fresh memory")
        self.check_same("repeat", expected, self.step(self.state, window))

    def resume(self) -> None:
        windows = [[batch] for batch in self.batches[:3]]
        for expected, came in self.step.resumed(self.state, windows):
            self.check_same("resume", expected, came)

    def window(self) -> None:
        some, join = self.batches[:2], self.join
        if join:
            self.check_parts("window", lambda: (some, join(some)))

    def weights(self) -> None:
        whole, split = self.batches[0], self.split
        if split:
            self.check_parts("weights", lambda: (split(whole), whole))

    def check_parts(self, law: str, cut: Callable[[], tuple[list[Any], Any]]) -> None:
        """Check that the parts that `cut` returns make the step of the whole."""

        def steps() -> tuple[Tree, Tree]:
            parts, whole = cut()
            return self.step(self.state, [whole]), self.step(self.state, parts)

        both = self.attempt(law, "a step of the whole and of its parts", steps)
        if both is not None:
            self.check_close(law, *both)

    def scale(self) -> None:
        lower = _replaced(self.state, self.scale_glob, lambda number: number / 4)
        if same_bits(lower, self.state):  # without a loss scale
            return
        window = [self.batches[0]]
        self.check_close("scale", self.step(self.state, window), self.step(lower, window))

    def skip(self) -> None:
        batch = self.batches[0]
        bad, state = self.overflow(batch), self.state
        if same_bits(bad, batch):  # without a floating tensor
            state = _replaced(state, self.scale_glob, lambda number: number * math.inf)
            if same_bits(state, self.state):
                raise ValueError(
                    "nothing makes a step overflow: no floating tensor in the batches, no loss "
                    'scale in the state. Fix: overflow=, or scale="*.loss_scale", its path.'
                )
        skipped = self.step(state, [bad])
        self.check_same("skip", state, skipped, self.skip_changes)
        if state is self.state:
            self.check_finite("skip", self.step(skipped, [batch]), "in the step after it")

    def donate(self) -> None:
        if "donate" not in inspect.signature(self.step.step).parameters:
            return
        window = [self.batches[0]]
        came = self.step(pytree.clone(self.state), window, donate=True)
        self.check_same("donate", self.step(self.state, window, donate=False), came)

    def compile(self) -> None:
        call = self.state, [self.batches[0]]
        results = self.attempt("compile", "one graph", assert_single_graph, self.step.step, call)
        if results is not None:
            self.check_close("compile", self.step(*call), results[0][0])


# ---- batches -------------------------------------------------------------------------------------


def _not_finite(batch: Any) -> Any:
    """Return a batch with inf in its floating tensors."""

    def spoilt(leaf: Tensor) -> Tensor:
        return torch.full_like(leaf, math.inf) if leaf.is_floating_point() else leaf

    return private.pytree.tree_map_only(Tensor, spoilt, batch)


def _joined(batches: list[Any]) -> Any:
    """Return batches as one, joined along the first dimension."""

    def cat(*leaves: Any) -> Any:
        first = leaves[0]
        return torch.cat(leaves) if isinstance(first, Tensor) and first.ndim else first

    return private.pytree.tree_map(cat, *batches)


def _third_and_rest(batch: Any) -> list[Any]:
    """Return the first third of a batch's samples, at least one, and the others."""

    def parts(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.ndim:
            return leaf, leaf
        return leaf.tensor_split([max(1, len(leaf) // 3)])

    leaves, spec = private.pytree.tree_flatten(batch)
    columns = zip(*map(parts, leaves), strict=True)
    return [private.pytree.tree_unflatten(column, spec) for column in columns]


# ---- states --------------------------------------------------------------------------------------


def _leaves(state: Tree) -> list[tuple[str, Any]]:
    """Return the dotted path of each leaf, and the leaf."""
    paths = [".".join(keys) for keys in pytree.key_paths(state)]
    return list(zip(paths, pytree.flatten(state)[0], strict=True))


def _matches(path: str, globs: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(path, glob) for glob in globs)


def _differing(a: Tree, b: Tree) -> list[str]:
    """Return the paths in which two states differ by a bit."""
    left, right = dict(_leaves(a)), dict(_leaves(b))
    return [
        path
        for path in dict.fromkeys((*left, *right))
        if not (path in left and path in right and same_bits(left[path], right[path]))
    ]


def _is_finite(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return not leaf.is_floating_point() or bool(torch.isfinite(leaf).all())
    return not isinstance(leaf, float) or math.isfinite(leaf)


def _replaced(state: Tree, glob: str, change: Callable[[Any], Any]) -> Tree:
    """Return the state with its leaves at `glob` changed."""
    leaves = [change(leaf) if _matches(path, (glob,)) else leaf for path, leaf in _leaves(state)]
    return pytree.flatten(state)[1].unflatten(leaves)


def _far(old: Tree, expected: Tree, came: Tree, rtol: float, free: Sequence[str]) -> list[str]:
    """Return how two states after one step differ by more than rounding: counts that are not
    equal, and updates that differ in more than a quarter of all elements. A leaf whose gradient is
    0 up to rounding, such as a bias before a norm, may differ.
    """
    before, left, right = dict(_leaves(old)), dict(_leaves(expected)), dict(_leaves(came))
    if left.keys() != right.keys():
        return [f"{path} is missing" for path in left.keys() ^ right.keys()]
    reasons, far, total = [], [], 0
    for path, wanted in left.items():
        got = right[path]
        if _matches(path, free):
            continue
        if isinstance(wanted, Tensor) and wanted.is_floating_point() and wanted.ndim:
            total += wanted.numel()
            if not _is_near(before.get(path), wanted, got, rtol):
                far.append(path)
        elif not _is_equal(wanted, got, rtol):
            reasons.append(f"{path} is {short(got)}, expected {short(wanted)}")
    if sum(left[path].numel() for path in far) > total / 4:
        reasons.append(f"the updates of {join_names(far)} differ")
    return reasons


def _is_near(old: Any, wanted: Tensor, got: Any, rtol: float) -> bool:
    if not isinstance(got, Tensor) or got.shape != wanted.shape:
        return False
    wanted, got = wanted.detach().double(), got.detach().double()
    start = old.detach().double() if isinstance(old, Tensor) else torch.zeros_like(wanted)
    update = (wanted - start).norm()
    rounding = 1e-6 * wanted.norm()
    return bool((got - wanted).norm() <= rtol * update + rounding)


def _is_equal(wanted: Any, got: Any, rtol: float) -> bool:
    """Compare counts and settings; floats, such as a rate, up to rounding."""
    values = [each.item() if isinstance(each, Tensor) and not each.ndim else each
              for each in (wanted, got)]  # fmt: skip
    if all(isinstance(value, numbers.Real) for value in values):
        return math.isclose(*map(float, values), rel_tol=rtol / 10, abs_tol=1e-12)
    return same_bits(wanted, got)
