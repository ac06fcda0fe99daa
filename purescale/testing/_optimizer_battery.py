"""`assert_optimizer`: the laws of a custom optimizer as one check."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from .._optim.opt_state import with_iteration_counted
from .._optim.optimizer import Optimizer
from .._step.unscale_and_step import maybe_step
from .._torch.tracing import as_on_an_accelerator
from .._tree import pytree
from .._tree.pytree import Tree
from .._wrappers.master_weights import MasterState, master_weights
from .._wrappers.wrapper import Wrapper
from ._laws import FIXES, Battery, assert_pure, same_bits, saved_and_loaded, short


def assert_optimizer(optimizer: Optimizer, params: Tree = None, quirks: Sequence[str] = ()) -> None:
    """Check that an optimizer of your own keeps all laws that `maybe_step` and `train_step` rely
    on.

    The checks use some steps with random gradients:

    - `init`: it does not change `params`, and the state shares no memory with them
    - `structure`: a step returns `(params, opt_state)`, both as before except for values
    - `reads`, `pure`: a step does not read values, change arguments or keep anything outside of the
      state; it gives the same bits again, in memory of its own
    - `none`: a parameter with a gradient of None comes back with the same bits in fresh memory, and
      a step that moves one parameter alone returns fresh memory too; or such a gradient is refused
      by a ValueError which says that it is None
    - `dtype`: float16 parameters with float32 gradients, as unscaling gives them, and bfloat16 and
      float64 parameters keep their dtype
    - `found_inf`: `maybe_step` with gradients of inf and NaN returns parameters and state bit for
      bit if the step is skipped, and the result of `step` if it is not
    - `elementwise`: an optimizer that is said to be elementwise, such as one of
      `from_formula(..., elementwise=True)`, steps the halves of all parameters as it steps the
      whole, to 1e-4 of the largest change. One inside of a partition is checked by itself
    - `round_trip`: a saved and loaded state goes on with the same bits
    - `compile`, `vmap`: one graph, and members equal to single steps, to 1e-4
    - `absent`: `init` and a step take a dict with a parameter that is None, and return None for it;
      checked last, as many trainings do not need it

    Args:
        optimizer: The optimizer.
        params: A tree of floating tensors, for optimizers that take only some shapes. The default
            is a flat dict of five float32 tensors of 1 to 300 elements.
        quirks: Laws that it breaks on purpose. Each must be seen broken.

    Raises:
        AssertionError: A law is broken; with the state, the gradients, the result, the expected
            result, and a fix.
        TypeError: `optimizer` does not have the methods of an optimizer.
        ValueError: A quirk is not the name of a law.

    Example:
        >>> import torch
        >>> from purescale import from_torch
        >>> assert_optimizer(from_torch(torch.optim.SGD, lr=0.1, momentum=0.9))
    """
    _OptimizerBattery(optimizer, params, quirks).run()


_OTHER_PARAMS = (
    "If the optimizer takes only some shapes or names, `assert_optimizer(optimizer, "
    "params={'weight': torch.randn(4, 3)})`, a tree that it takes."
)
_FIXES = {
    "init": f"`init(params)` makes new tensors, as `torch.zeros_like(p)`. {_OTHER_PARAMS}",
    "structure": "make everything that a step keeps in `init`; return `(params, opt_state)` in the "
    f"structure of the arguments, with numbers that change as 0-d tensors. {_OTHER_PARAMS}",
    "none": "do not change a parameter whose gradient is None, nor its state: `p.clone() if g is "
    "None else ...`; or raise a ValueError that says 'is None'.",
    "dtype": "`(p - lr * g).to(p.dtype)`: the gradients of float16 parameters are float32.",
    "found_inf": "do not raise for inf and NaN; maybe_step drops the result.",
    "elementwise": "no `elementwise=True`: an element depends on others or on the shape.",
    "absent": "keep None for a parameter that is None: `None if p is None else ...`.",
    **FIXES,
}
_STEPS = 3
_FACTORS = (1.0, 1e3, 1e-3)  # of gradients, between which a threshold may lie
_SIZES = {"matrix": (4, 3), "few": (5,), "some": (33,), "many": (20, 15), "number": ()}


def _random_gradients(params: Tree, seed: int) -> Tree:
    generator = torch.Generator().manual_seed(seed)
    return pytree.map(
        lambda p: torch.randn(p.shape, generator=generator, dtype=torch.float32).to(p), params
    )


class _OptimizerBattery(Battery):
    """The checks of an optimizer."""

    kind = "optimizer"
    methods: ClassVar[dict[str, str]] = {"init": "params", "step": "params, grads, opt_state"}
    fixes = _FIXES
    labels = ("params", "grads", "state")
    # A broken `init` or `step` is a quirk, and the other checks need both.
    order = ("init", "steps", "purity", "none", "dtype", "elementwise", "found_inf", "round_trip",
             "transforms", "absent")  # fmt: skip
    takes_none = True

    def __init__(self, optimizer: Any, params: Tree, quirks: Sequence[str]) -> None:
        super().__init__(optimizer, quirks)
        usual = {n: torch.linspace(-1, 2, math.prod(s)).reshape(s) for n, s in _SIZES.items()}
        self.params = usual if params is None else pytree.clone(params)
        self.calls: list[tuple[Tree, Tree, Any]] = []  # the arguments of one step after another
        self.results: list[Any] = []

    def check_result(self, law: str, result: Any, *call: Any) -> bool:
        """Return True if the results have the structure, dtypes and shapes of the arguments."""
        params, _, state = call
        if not isinstance(result, tuple) or len(result) != 2:
            self.fail(law, short(result), "a tuple of two, (params, opt_state)", *call)
            return False
        return self.check_alike(law, "params", params, result[0], *call) and self.check_alike(
            law, "opt_state", state, result[1], *call
        )

    def attempt_step(
        self, law: str, *call: Any, step: Callable[..., Any] | None = None, should: str = "a step"
    ) -> Any:
        """Return the result of a step if it is like its arguments, else None."""
        result = self.attempt(law, should, step or self.subject.step, *call)
        return result if result is not None and self.check_result(law, result, *call) else None

    # ---- what is checked

    def init(self) -> bool:
        should = "a state in memory of its own"
        init = functools.partial(assert_pure, self.subject.init)
        self.state = self.attempt("init", should, init, self.params)
        return "init" not in self.broken

    def steps(self) -> bool:
        params, state = self.params, self.state
        for seed in range(_STEPS):
            call = (params, _random_gradients(params, seed), state)
            result = self.attempt_step("structure", *call)
            if result is None:
                return False
            self.calls.append(call)
            self.results.append(result)
            params, state = result
        return True

    def purity(self) -> None:
        self.check_purity(self.subject.step, *self.calls)
        for call, result in zip(self.calls, self.results, strict=True):
            self.check_bits("pure", result, "as before other steps", self.subject.step, *call)

    def none(self) -> None:
        params, grads, state = self.calls[-1]
        leaves, structure = pytree.flatten(grads)
        # A parameter that does not move is the one most likely to be returned without a copy, and
        # one that moves alone need not be joined with others.
        step = functools.partial(assert_pure, self.subject.step)
        indices = range(len(leaves))
        choices = [[None if i == at else leaves[i] for i in indices] for at in indices]
        choices += [[leaves[i] if i == at else None for i in indices] for at in indices]
        choices.append([None] * len(leaves))
        for chosen in choices:
            call = (params, structure.unflatten(chosen), state)
            if self.refuses_none(*call):
                self.takes_none = False
                return
            result = self.attempt_step("none", *call, step=step, should="a step in fresh memory")
            if result is None:
                return
            pairs = zip(
                chosen, pytree.flatten(params)[0], pytree.flatten(result[0])[0], strict=True
            )
            for index, (gradient, before, after) in enumerate(pairs):
                if gradient is None and not same_bits(before, after):
                    at = pytree.path(params, "params", index)
                    self.fail("none", f"{at} moved", "the same bits: its gradient is None", *call)

    def refuses_none(self, *call: Any) -> bool:
        """Return True if a step refuses a gradient because it is None."""
        try:
            self.subject.step(*call)
        except Exception as error:  # any other is told by the law
            return isinstance(error, ValueError) and "is None" in str(error)
        return False

    def absent(self) -> None:
        if not isinstance(self.params, dict):
            return
        params = {**self.params, "absent": None}
        state = self.attempt("absent", "a state", self.subject.init, params)
        if "absent" in self.broken:
            return
        self.attempt_step("absent", params, _random_gradients(params, 0), state)

    def dtype(self) -> None:
        for dtype in (torch.float16, torch.bfloat16, torch.float64):
            params = pytree.cast(self.params, dtype)
            state = self.attempt("dtype", "a state", self.subject.init, params)
            grads = _random_gradients(params, 0)
            grads = pytree.cast(grads, torch.float32) if dtype is torch.float16 else grads
            self.attempt_step("dtype", params, grads, state)

    def found_inf(self) -> None:
        params, grads, state = self.calls[-1]
        old = params, with_iteration_counted(state, in_place=False)
        for value in (torch.inf, torch.nan):
            bad = pytree.map(lambda g, value=value: torch.full_like(g, value), grads)
            what = "params and state as they were"
            self.check_bits("found_inf", old, what, self.maybe_step(True), params, bad, state)
        expected = self.subject.step(*self.calls[-1])
        applied = self.maybe_step(False)
        self.check_bits("found_inf", expected, "that of step", applied, *self.calls[-1])

    def maybe_step(self, bad: bool) -> Callable[..., Any]:
        """Return a function that makes or skips a step, without reading the flag, as on an
        accelerator.
        """

        def call(params: Tree, grads: Tree, state: Tree) -> tuple[Tree, Tree]:
            with as_on_an_accelerator():
                return maybe_step(self.subject, params, grads, state, torch.tensor(bad))

        return call

    def round_trip(self) -> None:
        params, grads, state = self.calls[-1]
        what, step = "that of the state that was saved", self.subject.step
        for restored in saved_and_loaded(state, self.state):
            self.check_bits("round_trip", self.results[-1], what, step, params, grads, restored)

    def transforms(self) -> None:
        self.check_transforms(self.subject.step, self.calls, _with_masters, rtol=1e-4, atol=1e-5)

    def elementwise(self) -> None:
        optimizer = self.subject
        while isinstance(optimizer, Wrapper):  # which may round by the place of an element
            optimizer = optimizer.optimizer
        if getattr(optimizer, "elementwise", None) is not True or not self.takes_none:
            return  # a class of torch that counts steps takes no None, and its formula is ours
        params = pytree.cast(self.params, torch.float64)  # in which a small change is seen
        leaves, structure = pytree.flatten(params)
        runs = [pytree.flatten(_random_gradients(params, seed))[0] for seed in range(_STEPS)]
        # One parameter at a time, because those that move together may be joined.
        for index in [i for i, leaf in enumerate(leaves) if leaf is not None]:
            alone = [
                [None if i != index else leaf * factor for i, leaf in enumerate(grads)]
                for grads, factor in zip(runs, _FACTORS, strict=True)
            ]
            gradients = list(map(structure.unflatten, alone))
            check = functools.partial(_assert_halves_equal_whole, optimizer)
            self.attempt("elementwise", "the step of the whole", check, params, gradients)


def _assert_halves_equal_whole(optimizer: Optimizer, params: Tree, gradients: list[Tree]) -> None:
    """Check that a run changes the halves of parameters as it changes the whole."""
    wholes = _changes(optimizer, params, gradients)
    for half in (_first_half, _second_half):
        parts = _changes(optimizer, *pytree.map(half, (params, gradients)))
        for whole, part in zip(itertools.chain(*wholes), itertools.chain(*parts), strict=True):
            # A number of the state is one for all elements.
            expected = half(whole) if part.numel() < whole.numel() else whole.flatten()
            atol = 1e-4 * max([0.0, *whole.abs().flatten().tolist()])
            torch.testing.assert_close(
                part.flatten(), expected, rtol=0.0, atol=atol, equal_nan=True
            )


def _first_half(tensor: Tensor) -> Tensor:
    return tensor.flatten()[: (tensor.numel() + 1) // 2]


def _second_half(tensor: Tensor) -> Tensor:
    return tensor.flatten()[tensor.numel() // 2 :]


def _changes(optimizer: Optimizer, params: Tree, gradients: list[Tree]) -> list[list[Tensor]]:
    """Return by how much each step changes the tensors of parameters and state."""
    changes, old = [], (params, optimizer.init(params))
    for grads in gradients:
        new = optimizer.step(old[0], grads, old[1])
        pairs = zip(pytree.tensors(old), pytree.tensors(new), strict=True)
        changes.append([after.double() - before.double() for before, after in pairs])
        old = new
    return changes


def _with_masters(result: tuple[Tree, Any]) -> tuple[Tree, Any]:
    """Return the result of a step with masters put together, because masters that are close can
    have halves that are not.
    """
    params, opt_state = result
    if not isinstance(opt_state, MasterState):
        return params, opt_state
    return master_weights(params, opt_state), opt_state.inner
