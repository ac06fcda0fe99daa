"""The derivative of a whole run: its steps are replayed and pulled back, the last one first."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._loss_scale.headroom import grad_amax
from .._loss_scale.rule_protocol import HasScale, Rule, call_rule, check_rule, takes_amax
from .._loss_scale.rules import NoScale
from .._loss_scale.scaling import unscale_and_check
from .._runs.kept_states import Generators, KeptStates, Moment
from .._step.jit import Jitted, jit
from .._step.retry import backed_off
from .._torch.dtypes import wide_dtype
from .._torch.progress import progress_bar
from .._torch.tracing import refuse_in_a_trace, traced
from .._tree import scalars
from .._tree import tree as _tree
from .._tree.fields import document_fields
from .._tree.leaves import versions
from .._tree.tree import Leaves, Tree

Step = Callable[..., tuple[Tree, Tree]]
# Batch norm has no derivative with respect to them, and the run has none through them.
CONSTANTS = ("running_mean", "running_var")


@document_fields
class RunGradient(NamedTuple):
    """The result of `vjp_through`.

    Attributes:
        value: A 0-d tensor: what `cotangent` returned for the final state; `()` if it is a tree.
        state: The derivatives by the first state, a tree like it: a tensor for each floating leaf,
            `()` for other leaves and for `running_mean` and `running_var`.
        wrt: The derivatives by `wrt`, in the same form.
        final: The state after the last step.
    """

    value: Tensor | Any
    state: Tree
    wrt: Tree
    final: Tree


class Floats:
    """A tree as floating leaves, of which derivatives are taken, and a rest that is constant."""

    def __init__(self, tree: Tree) -> None:
        self.leaves, self.structure = _tree.flatten(tree)
        names = [keys[-1].rpartition(".")[2] if keys else "" for keys in _tree.keys(tree)]
        self.places = [
            place
            for place, (leaf, name) in enumerate(zip(self.leaves, names, strict=True))
            if isinstance(leaf, Tensor)
            and (leaf.is_floating_point() or leaf.is_complex())
            and name not in CONSTANTS
        ]
        self.values: list[Tensor] = self.of(self.leaves)

    def of(self, leaves: Leaves) -> Leaves:
        """Return the floating leaves among the leaves of a tree like this one."""
        return [leaves[place] for place in self.places]

    def with_values(self, values: Sequence[Any]) -> Tree:
        """Return the tree with these floating leaves."""
        return self._tree(self.leaves, values)

    def only(self, values: Sequence[Any]) -> Tree:
        """Return these floating leaves in a tree that has `()` for all others."""
        return self._tree([() for _ in self.leaves], values)

    def _tree(self, leaves: Leaves, values: Sequence[Any]) -> Tree:
        leaves = list(leaves)
        for place, value in zip(self.places, values, strict=True):
            leaves[place] = value
        return self.structure.unflatten(leaves)


def vjp_through(
    step: Step,
    state: Tree,
    items: Sequence[Any],
    cotangent: Callable[[Tree], Tensor] | Tree,
    *,
    wrt: Tree = (),
    every: int | None = None,
    rule: Rule[Any] | None = None,
    progress: bool = False,
    folder: str | os.PathLike[str] | None = None,
) -> RunGradient:
    """Equal to the code below, in the memory of some `2 * sqrt(len(items))` states. Syncs with the
    host after each step that it pulls back.

        def run(state, wrt):
            for item in items:
                state, info = step(state, item, wrt)
            return cotangent(state), state

        (dstate, dwrt), (value, final) = torch.func.grad_and_value(run, (0, 1), has_aux=True)(
            state, wrt)

    The derivative of a training: by the weights of its examples, by its learning rates, by what it
    starts from. The run is done once, and every `every`-th state of it is kept. Then each segment
    between two of them is replayed, the last one first, and its steps are pulled back one by one.
    The bits are those of the unrolled gradient where both make the same operators. So the
    optimizer of an eager step should be `from_torch(..., differentiable=True)`: a fused kernel
    rounds otherwise than the formula that is differentiated.

    - A step whose `info.found_inf` is True is the identity. What comes out is the derivative of the
      run without it.
    - Dropout draws the same numbers in a replay. A generator in the state, `state.rng`, is set
      before a step is pulled back, because torch.func cannot follow it.
    - `running_mean` and `running_var` are constants, as in the unrolled gradient.
    - If `step` was made by `jit`, each step is pulled back in one graph as well, which is compiled
      once.

    Args:
        step: A pure function `step(state, item)`, or `step(state, item, wrt)` if `wrt` is given,
            that returns `(state, info)`, such as `train_step` with its settings. It must give the
            same result each time, so it cannot have `donate=True`, nor `max_retries` or `group`.
        state: The state before the first step. It is not changed.
        items: A sequence of what the steps take, such as a list of batches: `items[i]` is asked for
            up to three times.
        cotangent: A function of the final state that returns a real scalar, such as a loss on
            validation data. Or a tree like the state: the derivatives by the final state, with
            `()` for 0, such as the `state` of a later run's `RunGradient`.
        wrt: A tree of other tensors that `step` takes, to be differentiated.
        every: How many steps a segment has. By default the square root of `len(items)`.
        rule: A rule for a loss scale of the cotangents, as in a half backward they underflow
            like gradients. A step whose cotangents overflow is pulled back again at a lower scale.
            A power of two changes no bit of a cotangent that fits.
        progress: Show a progress bar over the steps that are pulled back (needs tqdm).
        folder: A directory for the kept states, in files that are removed afterwards. By default
            they are in memory.

    Returns:
        A `RunGradient`: `value`, the derivatives `state` and `wrt`, and the `final` state. They are
        in the dtypes of the leaves, but in float32 for float16.

    Raises:
        FloatingPointError: A cotangent is not finite, and `rule` has no lower scale.
        RuntimeError: The step overwrote its state, or a replay came out with other bits.
        ValueError: There are no items, or this is called under torch.compile, torch.func or jit.
        TypeError: An argument is of a wrong kind, or `items` can be read only once.

    Example:
        >>> import torch
        >>> def step(x, item, rate):
        ...     return x - rate * (x - item), ()
        >>> start, rate = torch.tensor(1.0), torch.tensor(0.5)
        >>> run = vjp_through(step, start, [2.0, 2.0], torch.square, wrt=rate)
        >>> run.final, run.value, run.state, run.wrt
        (tensor(1.7500), tensor(3.0625), tensor(0.8750), tensor(3.5000))

    Source of the method: MAGIC (arXiv 2503.13751), there with torchopt; checkpoints of the square
    root of a run: Chen et al. (arXiv 1604.06174). The scale of the cotangents is ours.
    """
    _check(step, items, rule)
    number = len(items)
    every = scalars.whole("every", math.isqrt(number) if every is None else every, least=1)
    takes_wrt = bool(Floats(wrt).places)
    call = step if takes_wrt else lambda state, item, wrt: step(state, item)
    first = _tree.clone(state)
    generators = Generators(_tree.tensors(first))
    with KeptStates(folder, Moment(first, generators.states())) as kept:
        final, flags = _run(call, first, items, wrt, every, kept, generators)
        after, skipped = generators.states(), _read(flags)
        value, cotangents = _first_cotangents(cotangent, final)
        derivative = _Cotangents(_pullback_of(step, takes_wrt), cotangents, wrt, rule)
        with (
            progress_bar("vjp_through", "step", number)
            if progress
            else contextlib.nullcontext() as bar
        ):
            for start in range((number - 1) // every * every, -1, -every):
                stop = min(start + every, number)
                moments = _replay(call, items, wrt, start, stop, kept.pop(start), generators)
                if stop == number:
                    _check_replayed(call, items[-1], wrt, moments[-1], final, generators)
                for index in reversed(range(start, stop)):
                    before = moments.pop()
                    if not skipped[index]:
                        before_step = generators.set_to(before)
                        derivative.pull_back(before_step, items[index], index)
                    if bar is not None:
                        bar.update()
        generators.restore(after)
    by_state = Floats(first).only(derivative.of_state)
    return RunGradient(value, by_state, Floats(wrt).only(derivative.of_wrt), final)


# ---- the run -------------------------------------------------------------------------------------


def _run(
    call: Step,
    state: Tree,
    items: Sequence[Any],
    wrt: Tree,
    every: int,
    kept: KeptStates,
    generators: Generators,
) -> tuple[Tree, list[Any]]:
    """Return the final state, and what each step says of whether it was skipped."""
    flags = []
    for index in range(len(items)):
        if index % every == 0:
            kept.keep(index, Moment(state, generators.states()))
        leaves = _tree.tensors(state) if index == 0 else []
        before = versions(leaves)
        new, info = call(state, items[index], wrt)
        if versions(leaves) != before:
            raise RuntimeError(
                "the step overwrote its state, which a replay needs again. Likely cause: "
                "`donate=True` in train_step. Fix: a step that does not donate."
            )
        flags.append(getattr(info, "found_inf", False))
        state = new
    return state, flags


def _replay(
    call: Step,
    items: Sequence[Any],
    wrt: Tree,
    start: int,
    stop: int,
    moment: Moment,
    generators: Generators,
) -> list[Moment]:
    """Return the moments before the steps of a segment."""
    generators.restore(moment.generators)
    moments = [moment]
    for index in range(start, stop - 1):
        state, _ = call(moments[-1].state, items[index], wrt)
        moments.append(Moment(state, generators.states()))
    return moments


def _check_replayed(
    call: Step, item: Any, wrt: Tree, before: Moment, final: Tree, generators: Generators
) -> None:
    """Refuse a step whose last call, made again, gives another state."""
    generators.restore(before.generators)
    again, _ = call(before.state, item, wrt)
    leaves = _tree.flatten(final)[0], _tree.flatten(again)[0]
    for path, old, new in zip(_tree.paths(final, "state"), *leaves, strict=True):
        if isinstance(old, Tensor) and not torch.equal(old.nan_to_num(), new.nan_to_num()):
            raise RuntimeError(
                f"the last step, made again, gave another {path}. Likely cause: a step that draws "
                "from NumPy or from a generator of its own, counts its calls, reads data that "
                "items makes anew each time, or runs a kernel whose sums vary from call to call. "
                "Fix: items that are made once, `list(itertools.islice(batches, 100))`; "
                "torch's generator; `torch.use_deterministic_algorithms(True)`."
            )


def _read(flags: list[Any]) -> list[bool]:
    """Return which steps were skipped, from one read."""
    for flag in flags:
        if isinstance(flag, Tensor) and flag.ndim:
            raise ValueError(
                f"info.found_inf has shape {tuple(flag.shape)}; vjp_through follows one run. "
                "Likely cause: a step of an ensemble, by torch.vmap. Fix: a run for each member, "
                "`vjp_through(step, member(states, i), ...)`."
            )
    tensors = [flag for flag in flags if isinstance(flag, Tensor)]
    read = iter(torch.stack(tensors).tolist() if tensors else [])
    return [bool(next(read)) if isinstance(flag, Tensor) else bool(flag) for flag in flags]


# ---- cotangents ----------------------------------------------------------------------------------


def _first_cotangents(cotangent: Any, final: Tree) -> tuple[Any, Leaves]:
    """Return the value at the final state, and its derivatives by the floating leaves."""
    floats = Floats(final)
    if not callable(cotangent):
        return (), _given_cotangents(cotangent, final, floats)

    def value_of(values: Leaves) -> Tensor:
        value = cotangent(floats.with_values(values))
        if not (isinstance(value, Tensor) and value.is_floating_point() and not value.ndim):
            raise TypeError(
                f"cotangent returned {scalars.short_repr(value)}; expected a real 0-d tensor. Fix: "
                "`return loss.mean()`."
            )
        return value

    grads, value = torch.func.grad_and_value(value_of)(floats.values)
    return value.detach(), grads


def _given_cotangents(tree: Tree, final: Tree, floats: Floats) -> Leaves:
    try:
        leaves = floats.of(floats.structure.flatten_up_to(tree))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"cotangent is {_tree.described(tree)}, and not a tree like the final state, "
            f"{_tree.described(final)}. Fix: a function of the final state that returns a scalar, "
            "or `state._replace(params=...)` with () for each other field."
        ) from error
    paths = _tree.paths(final, "cotangent")
    for place, leaf, like in zip(floats.places, leaves, floats.values, strict=True):
        if not (
            (isinstance(leaf, tuple) and leaf == ()) or getattr(leaf, "shape", None) == like.shape
        ):
            raise ValueError(
                f"{paths[place]} is {scalars.short_repr(leaf)}; expected a tensor of shape "
                f"{tuple(like.shape)}, or () for 0."
            )
    return [
        torch.zeros_like(like) if isinstance(leaf, tuple) else leaf
        for leaf, like in zip(leaves, floats.values, strict=True)
    ]


Pull = Callable[[Tree, Any, Tree, Leaves], tuple[Leaves, Leaves]]


def _pull(
    step: Step, takes_wrt: bool, state: Tree, item: Any, wrt: Tree, cotangents: Leaves
) -> tuple[Leaves, Leaves]:
    """Return the cotangents before a step, of the state and of `wrt`, from those after it."""
    floats, wanted = Floats(state), Floats(wrt)

    def after(values: Leaves, others: Leaves) -> Leaves:
        extra = [wanted.with_values(others)] if takes_wrt else []
        new, _ = step(floats.with_values(values), item, *extra)
        return floats.of(_tree.flatten(new)[0])

    inputs, size = [*floats.values, *wanted.values], len(floats.values)
    if not traced():
        # Half the time of torch.func, and a checkpointed region is computed again.
        inputs = [leaf.detach().requires_grad_() for leaf in inputs]
        with torch.enable_grad():
            results = after(inputs[:size], inputs[size:])
        if not _loses_derivative(floats.values, results, cotangents):
            recorded = [index for index, new in enumerate(results) if new.requires_grad]
            grads = torch.autograd.grad(
                [results[index] for index in recorded],
                inputs,
                [cotangents[index] for index in recorded],
                allow_unused=True,
                materialize_grads=True,
            )
            return list(grads[:size]), list(grads[size:])
        del results
    _, vjp = torch.func.vjp(after, floats.values, wanted.values)
    pulled: tuple[Leaves, Leaves] = vjp(cotangents)
    return pulled


def _loses_derivative(before: Leaves, after: Leaves, cotangents: Leaves) -> bool:
    """Return True if a step moves a leaf off the graph: a fused kernel, or an optimizer without
    `differentiable=True`.
    """
    triples = zip(before, after, cotangents, strict=True)
    return any(
        not new.requires_grad and not torch.equal(old, new) and bool((cotangent != 0).any())
        for old, new, cotangent in triples
    )


# The pullbacks of jitted steps, so that a second run compiles nothing.
_pullbacks: weakref.WeakKeyDictionary[Jitted, dict[bool, Pull]] = weakref.WeakKeyDictionary()


def _pullback_of(step: Step, takes_wrt: bool) -> Pull:
    if not (isinstance(step, Jitted) and step.compiles()):
        return functools.partial(_pull, step, takes_wrt)
    pullbacks = _pullbacks.setdefault(step, {})
    if takes_wrt not in pullbacks:
        pullbacks[takes_wrt] = jit(functools.partial(_pull, step.fn, takes_wrt), mode=step.mode)
    return pullbacks[takes_wrt]


class _Cotangents:
    """The derivatives by a state, pulled back through one step after the other, and the sum of
    those by `wrt`.
    """

    def __init__(self, pull: Pull, cotangents: Leaves, wrt: Tree, rule: Rule[Any] | None) -> None:
        self.pull, self.of_state = pull, cotangents
        self.wrt, self.of_wrt = wrt, [torch.zeros_like(leaf) for leaf in Floats(wrt).values]
        self.rule: Rule[Any] = NoScale() if rule is None else rule
        device = cotangents[0].device if cotangents else None
        self.scaler: HasScale = self.rule.init(device)

    def pull_back(self, state: Tree, item: Any, index: int) -> None:
        """Replace the derivatives by those before the step of this index."""
        dtypes = [leaf.dtype for leaf in Floats(state).values]
        while True:
            scaled = [
                (leaf.to(wide_dtype(leaf.dtype)) * self.scaler.scale).to(dtype)
                for leaf, dtype in zip(self.of_state, dtypes, strict=True)
            ]
            both = self.pull(state, item, self.wrt, scaled)
            unscaled, overflow = unscale_and_check(self.scaler, both)
            if not overflow:
                break
            lower = backed_off(self.rule, self.scaler)
            if lower is None:
                raise _not_finite(index, self.scaler.scale, self.rule)
            self.scaler = lower
        amax = grad_amax(unscaled) if takes_amax(self.rule) else None
        self.scaler = call_rule(self.rule, self.scaler, overflow, amax)
        self.of_state, of_wrt = unscaled
        self.of_wrt = [a + b for a, b in zip(self.of_wrt, of_wrt, strict=True)]


def _not_finite(index: int, scale: Tensor, rule: Any) -> FloatingPointError:
    fix = "`rule=HeadroomScale()`, a loss scale for the cotangents"
    if not isinstance(rule, NoScale):
        fix = "a rule with a lower `min_scale`; a square root or a norm of 0 in the loss"
    return FloatingPointError(
        f"the derivative through step {index} is not finite, at a scale of {float(scale):g} for "
        "the cotangents. Likely cause: a half backward that overflows, a skipped step whose info "
        "has no `found_inf`, or a function that has no finite derivative there, such as a root of "
        f"0. Fix: {fix}."
    )


# ---- checks --------------------------------------------------------------------------------------


def _check(step: Any, items: Any, rule: Any) -> None:
    refuse_in_a_trace(
        "vjp_through keeps states and reads flags, so it cannot be traced or mapped.",
        "call it outside of torch.compile, torch.func and jit; a jitted or mapped step inside.",
    )
    if not callable(step):
        raise TypeError(f"step is {scalars.short_repr(step)}; expected a function.")
    if isinstance(step, Jitted) and step.donate:
        raise ValueError(
            f"step donates {step.donate}, and a replay needs each state again. Fix: `jit(step)`."
        )
    if not (hasattr(items, "__len__") and hasattr(items, "__getitem__")):
        raise TypeError(
            f"items is {type(items).__name__}; a replay asks for each item again. Fix: a sequence, "
            "such as `list(itertools.islice(loader, 100))`."
        )
    if not len(items):
        raise ValueError("items is empty; a run has at least one step.")
    if rule is not None:
        check_rule(rule)
