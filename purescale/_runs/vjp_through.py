"""The derivative of a whole run: its steps are replayed and pulled back, the last one first."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._jit.jit import Jitted, jit
from .._jit.scan_steps import pair_of
from .._loss_scale.headroom import grad_amax
from .._loss_scale.rules import HasScale, NoScale, Rule, call_rule, checked_rule_traits, takes_amax
from .._loss_scale.scaling import unscale_and_check
from .._runs.kept_states import KeptStates, Moment, plan_kept_steps, steps_to_keep
from .._step.random_state import Generators
from .._step.retry import lower_scale
from .._torch.dtypes import wide_dtype
from .._torch.tracing import GraphEndError, refuse_in_trace_or_capture, traced, whole_graph
from .._tree import pytree, scalars
from .._tree.fingerprint import fingerprint
from .._tree.hints import document_fields
from .._tree.leaves import is_constant, versions
from .._tree.matching import matching_leaves
from .._tree.progress import progress_bar
from .._tree.pytree import Leaves, Tree

Step = Callable[..., tuple[Tree, Tree]]
# The buffers of a batch norm. It has no derivative with respect to them, and the run none through
# them. Its count tells it from a module that computes something of its own under these names.
_STATISTICS, _COUNT = ("running_mean", "running_var"), "num_batches_tracked"


@document_fields
class RunGradient(NamedTuple):
    """The result of `vjp_through`.

    Attributes:
        value: A 0-d tensor: what `cotangent` returned for the final state; `()` if it is a tree.
        state: The derivatives by the first state, a tree like it: a tensor for each floating leaf,
            `()` for other leaves and for the statistics of batch norms.
        wrt: The derivatives by `wrt`, in the same form.
        final: The state after the last step.
    """

    value: Tensor | Any
    state: Tree
    wrt: Tree
    final: Tree


class Floats(NamedTuple):
    """The floating leaves of a tree, of which derivatives are taken. The others are constant."""

    structure: Any
    places: tuple[int, ...]

    @classmethod
    def of(cls, tree: Tree) -> Floats:
        leaves, structure = pytree.flatten(tree)
        names = [".".join(keys).rpartition(".") for keys in pytree.key_paths(tree)]
        norms = {module for module, _, name in names if name == _COUNT}
        places = [
            place
            for place, (leaf, (module, _, name)) in enumerate(zip(leaves, names, strict=True))
            if isinstance(leaf, Tensor)
            and (leaf.is_floating_point() or leaf.is_complex())
            and not (name in _STATISTICS and module in norms)
        ]
        return cls(structure, tuple(places))

    def values(self, tree: Tree) -> Leaves:
        """Return the floating leaves of a tree of this structure."""
        leaves = pytree.flatten(tree)[0]
        return [leaves[place] for place in self.places]

    def replaced(self, tree: Tree, values: Sequence[Any]) -> Tree:
        """Return a tree of this structure with other floating leaves."""
        leaves = pytree.flatten(tree)[0]
        for place, value in zip(self.places, values, strict=True):
            leaves[place] = value
        return self.structure.unflatten(leaves)

    def only(self, values: Sequence[Any]) -> Tree:
        """Return these floating leaves in a tree that has `()` for all others."""
        at = dict(zip(self.places, values, strict=True))
        return self.structure.unflatten([at.get(x, ()) for x in range(self.structure.num_leaves)])


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
    """Equal to the code below, in the memory of some 32 states up to 1,000 steps, and of
    `sqrt(len(items))` beyond. Syncs with the host after each step that it pulls back.

        def run(state, wrt):
            for item in items:
                state, info = step(state, item, wrt)
            return cotangent(state), state

        (dstate, dwrt), (value, final) = torch.func.grad_and_value(run, (0, 1), has_aux=True)(
            state, wrt)

    The derivative of a training: by the weights of its examples, by its learning rates, by what it
    starts from. The run is done once, and some states of it are kept. Then each segment between two
    of them is replayed, the last one first, and its steps are pulled back one by one.

    - The bits are those of the unrolled gradient where both make the same operators. So the
      optimizer of an eager step should be `from_torch(..., differentiable=True)`. Without it, or
      with a loop by hand or a jitted function in the step, torch.func takes the derivative. That
      takes twice the time, holds the graphs of all microbatches of a step at once, and refuses a
      checkpointed region and a state with `rng`. A fused kernel makes the run then, and its formula
      the derivative.
    - A step whose `info.found_inf` is True is the identity. What comes out is the derivative of the
      run without it. A single microbatch that `on_nonfinite="drop_microbatch"` dropped is refused.
    - Dropout draws the same numbers in a replay, from `state.rng` or from torch's generators. Runs
      in several threads take turns.
    - `running_mean` and `running_var` of batch norms are constants, as in the unrolled gradient. So
      the derivative of a loss that reads them misses their part: with a batch norm take `cotangent`
      at `train=True`.
    - If `step` was made by `jit`, each step is pulled back in one graph as well, which is compiled
      once. A name that it closes over and that is bound anew later keeps its old value.

    Args:
        step: A pure function `step(state, item)`, or `step(state, item, wrt)` if `wrt` is given,
            that returns `(state, info)`, such as `train_step` with its settings. It must give the
            same result each time. It cannot have `donate=True` or a `group`.
        state: The state before the first step. It is not changed.
        items: A sequence of what the steps take, such as a list of batches: `items[i]` is asked for
            several times.
        cotangent: A function of the final state that returns a real scalar, such as a loss on
            validation data. Or a tree like the state: the derivatives by the final state, with
            `()` for 0, such as the `state` of a later run's `RunGradient`.
        wrt: A tree of other tensors that `step` takes, to be differentiated.
        every: How many steps a segment has, whose states are all kept while it is pulled back. By
            default segments of unequal lengths, in which the fewest steps are made again; with
            `folder` the square root of `len(items)`.
        rule: A rule for a loss scale of the cotangents, which underflow in a half backward as
            gradients do. A step whose cotangents overflow is pulled back again at a lower scale. A
            power of two changes no bit of a cotangent that fits. A rule that takes amax gets that
            of the derivatives by `state.params`, or by the whole state if it has none.
        progress: Show a progress bar over the steps that are pulled back (needs tqdm).
        folder: A directory for the kept states, in files that are removed afterwards. Only those
            of one segment are in memory then.

    Returns:
        A `RunGradient`: `value`, the derivatives `state` and `wrt`, and the `final` state. They are
        in the dtypes of the leaves, but float16 in float32, and sums by `wrt` at least in float32.

    Raises:
        FloatingPointError: A cotangent is not finite, and `rule` has no lower scale.
        RuntimeError: A step overwrote its state, its item or `wrt`, or the last one, made again,
            came out with other bits.
        ValueError: There are no items, a skipped step has moved an average, or this is called under
            torch.compile, torch.func, jit or inference_mode.
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
    root of a run: Chen et al. (arXiv 1604.06174); which states are kept: Griewank and Walther
    (revolve, 2000). The scale of the cotangents is ours.
    """
    _check(step, items, rule)
    number = len(items)
    steps, slots = plan_kept_steps(number, every, folder is not None)
    first, wrt = pytree.clone(state), pytree.clone(wrt)
    rule = NoScale() if rule is None else rule
    forms = Floats.of(first), Floats.of(wrt)
    takes_wrt = not (isinstance(wrt, tuple) and not wrt)
    pullback = Pullback(step, *forms, takes_wrt, takes_amax(rule))
    floats, generators = pullback.floats, Generators.of(_device(first))
    directory: Any = nullcontext()
    if folder is not None:  # removed at the end, with what is in it
        directory = tempfile.TemporaryDirectory(dir=folder, prefix="vjp_through_")
    with generators.locked(), directory as path:
        kept = KeptStates(path, Moment(first, generators.states()))
        run = _Run(pullback.call, items, wrt, generators)
        final, skipped = run.forward(first, steps, kept)
        value, cotangents = _first_cotangents(cotangent, final, floats)
        by_wrt = [
            torch.zeros_like(leaf, dtype=wide_dtype(leaf.dtype))
            for leaf in pullback.wanted.values(wrt)
        ]
        scaler = rule.init(cotangents[0].device if cotangents else None)
        derivatives, pull = _Derivatives(cotangents, by_wrt, scaler), pullback.compiled()
        bar = progress_bar("vjp_through", "step", number) if progress else nullcontext()
        with generators.unchanged(), bar as bar:
            after, index = final, number
            while steps:
                start = steps.pop()
                for before in run.backwards(start, index, kept.pop(start), slots - len(steps)):
                    index -= 1
                    if index == number - 1:
                        run.check_last(before, final)
                    if skipped[index]:
                        _check_skipped(index, floats, before.state, after, derivatives.by_state)
                    else:
                        generators.restore(before.generators)
                        at = before.state, items[index], wrt
                        derivatives = _pulled_back(pull, rule, at, derivatives, index)
                    after = before.state
                    if bar is not None:
                        bar.update()
    by_state, by_wrt = floats.only(derivatives.by_state), pullback.wanted.only(derivatives.by_wrt)
    return RunGradient(value, by_state, by_wrt, final)


def _device(state: Tree) -> torch.device:
    """Return the device whose generator the steps draw from."""
    devices = [leaf.device for leaf in pytree.tensors(state)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


# ---- the run -------------------------------------------------------------------------------------


class _Derivatives(NamedTuple):
    """The derivatives by a state, the sums of those by `wrt`, and the scale of cotangents."""

    by_state: Leaves
    by_wrt: Leaves
    scaler: HasScale


class _Arguments(NamedTuple):
    """The arguments of a step."""

    state: Tree
    item: Any
    wrt: Tree


class _Run(NamedTuple):
    """The steps of a run, and the generators that they draw from."""

    call: Step
    items: Sequence[Any]
    wrt: Tree
    generators: Generators

    def forward(self, state: Tree, steps: list[int], kept: KeptStates) -> tuple[Tree, list[bool]]:
        """Return the final state, and which steps were skipped."""
        flags, to_keep = [], set(steps)
        for index in range(len(self.items)):
            if index in to_keep:
                kept.keep(index, Moment(state, self.generators.states()))
            new, info = self._step(state, index)
            if not index:
                matching_leaves(state, new, "state", "the state that the step returned")
            flags.append(getattr(info, "found_inf", False))
            state = new
        return state, _read(flags)

    def _step(self, state: Tree, index: int) -> tuple[Tree, Any]:
        args = _Arguments(state, self.items[index], self.wrt)
        leaves = pytree.flatten(args)[0]
        before = versions(leaves)
        new, info = pair_of(self.call(*args))
        for place, (old, version) in enumerate(zip(before, versions(leaves), strict=True)):
            if version != old:
                path = pytree.path(args, "", place).removeprefix(".")
                raise RuntimeError(
                    f"step {index} overwrote {path}, which a replay needs again. Likely cause: "
                    "`donate=True` in train_step; an operator in place. Fix: a step that does not "
                    "donate; `x = x * 2` for `x *= 2`."
                )
        # What the step closes over may require a gradient, and would keep the graphs of all steps.
        if any(leaf.requires_grad for leaf in pytree.tensors(new)):
            new = pytree.map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, new)
        return new, info

    def backwards(self, start: int, stop: int, moment: Moment, slots: int) -> Iterator[Moment]:
        """Yield the moments before the steps of a segment, the last one first, of which at most
        `slots` are kept.
        """
        kept = [(start, moment)]
        while kept:
            first, moment = kept[-1]
            to_keep = set(steps_to_keep(first, stop, slots - len(kept) + 1))
            self.generators.restore(moment.generators)
            for index in range(first + 1, stop):
                state, _ = self._step(moment.state, index - 1)
                moment = Moment(state, self.generators.states())
                if index in to_keep:
                    kept.append((index, moment))
            yield moment
            stop -= 1
            if kept[-1][0] == stop:
                kept.pop()

    def check_last(self, before: Moment, final: Tree) -> None:
        """Refuse a step whose last call, made again, gives another state."""
        self.generators.restore(before.generators)
        again, _ = self._step(before.state, len(self.items) - 1)
        leaves = pytree.flatten(final)[0], pytree.flatten(again)[0]
        for path, old, new in zip(pytree.paths(final, "state"), *leaves, strict=True):
            if not is_constant(old) and fingerprint(old) != fingerprint(new):
                raise RuntimeError(
                    f"the last step, made again, gave another {path}. Likely cause: a step that "
                    "draws from NumPy or from a generator of its own, counts its calls, or gets "
                    "from items data that are made anew each time. Fix: items that are made once, "
                    "`list(itertools.islice(loader, 100))`; torch's generator."
                )


def _read(flags: list[Any]) -> list[bool]:
    """Return which steps were skipped, from one read."""
    tensors = [flag for flag in flags if isinstance(flag, Tensor)]
    if any([flag.ndim for flag in tensors]):
        raise ValueError(
            "info.found_inf is not a 0-d tensor; vjp_through follows one run. Fix: for an ensemble "
            "a run for each member, `vjp_through(step, member(states, i), ...)`."
        )
    read = iter(torch.stack(tensors).tolist() if tensors else [])
    return [bool(next(read)) if isinstance(flag, Tensor) else bool(flag) for flag in flags]


def _check_skipped(
    index: int, floats: Floats, before: Tree, after: Tree, cotangents: Leaves
) -> None:
    """Refuse a skipped step that has moved what a derivative goes through."""
    rows = floats.places, floats.values(before), floats.values(after), cotangents
    keys = pytree.key_paths(before)
    for place, old, new, cotangent in zip(*rows, strict=True):
        if torch.equal(old, new) or "scaler" in keys[place]:  # a derivative by a scale is rounding
            continue
        if bool((cotangent != 0).any()):
            raise ValueError(
                f"step {index} was skipped, and moved {pytree.path(before, 'state', place)}. "
                "Likely cause: an average that follows a skipped step. Fix: "
                "`select(info.found_inf, old, new)`."
            )


# ---- cotangents ----------------------------------------------------------------------------------


def _first_cotangents(cotangent: Any, final: Tree, floats: Floats) -> tuple[Any, Leaves]:
    """Return the value at the final state, and its derivatives by the floating leaves."""
    values = floats.values(final)
    if not callable(cotangent):
        return (), _cotangents_of(cotangent, final, floats, values)

    def value_of(values: Leaves) -> Tensor:
        value = cotangent(floats.replaced(final, values))
        if not (isinstance(value, Tensor) and value.is_floating_point() and not value.ndim):
            raise TypeError(
                f"cotangent returned {scalars.short_repr(value)}; expected a real 0-d tensor. Fix: "
                "`return loss.mean()`."
            )
        return value

    grads, value = torch.func.grad_and_value(value_of)(values)
    return value.detach(), grads


def _cotangents_of(tree: Tree, final: Tree, floats: Floats, likes: Leaves) -> Leaves:
    """Return the leaves of a tree of cotangents, zeros for `()`."""
    try:
        leaves = floats.structure.flatten_up_to(tree)
    except (ValueError, TypeError) as error:
        raise _cotangent_error("cotangent", tree, "a tree like the final state") from error
    cotangents = []
    for place, like in zip(floats.places, likes, strict=True):
        leaf = leaves[place]
        if isinstance(leaf, tuple) and not leaf:
            leaf = torch.zeros_like(like)
        elif not (isinstance(leaf, Tensor) and leaf.shape == like.shape):
            path = pytree.path(final, "cotangent", place)
            raise _cotangent_error(
                path, leaf, f"a tensor of shape {tuple(like.shape)}, or () for 0"
            )
        cotangents.append(leaf)
    return cotangents


def _cotangent_error(path: str, value: Any, expected: str) -> ValueError:
    return ValueError(
        f"{path} is {scalars.short_repr(value)}; expected {expected}. Fix: a function of the final "
        "state that returns a scalar, or the `state` of a later run's RunGradient."
    )


@dataclasses.dataclass(frozen=True)
class Pullback:
    """The derivative of one step, as a function of trees that `jit` can compile."""

    step: Step = dataclasses.field(compare=False)
    floats: Floats  # of the state
    wanted: Floats  # of wrt
    takes_wrt: bool
    takes_amax: bool

    def call(self, state: Tree, item: Any, wrt: Tree) -> tuple[Tree, Tree]:
        return self.step(state, item, wrt) if self.takes_wrt else self.step(state, item)

    def compiled(self) -> Callable[..., Any]:
        """Return this function, in one graph if the step is: the same for each run of the step."""
        if not isinstance(self.step, Jitted):
            return self
        plain, graphs = dataclasses.replace(self, step=self.step.fn), self.step.pullbacks
        if plain not in graphs:
            graphs[plain] = jit(plain, backend=self.step.backend, mode=self.step.mode)
        return graphs[plain]

    def __call__(
        self, state: Tree, item: Any, wrt: Tree, after: Leaves, sums: Leaves, scaler: HasScale
    ) -> tuple[Leaves, Leaves, Tensor, Any]:
        """Return the derivatives by the state before the step, from those by the state after it,
        the sums of those by wrt, whether they overflow, and the amax for a rule that takes it.
        """
        scaled = [
            (leaf.to(wide_dtype(leaf.dtype)) * scaler.scale).to(like.dtype)
            for leaf, like in zip(after, self.floats.values(state), strict=True)
        ]
        (by_state, by_wrt), overflow = unscale_and_check(
            scaler, self._pull(state, item, wrt, scaled)
        )
        # Those by moments are larger by far, and pass through no half backward.
        tree = self.floats.only(by_state)
        amax = grad_amax(getattr(tree, "params", tree)) if self.takes_amax else ()
        sums = [a + b for a, b in zip(sums, by_wrt, strict=True)]
        return by_state, sums, overflow, amax

    def _pull(self, state: Tree, item: Any, wrt: Tree, cotangents: Leaves) -> tuple[Leaves, Leaves]:
        values, others = self.floats.values(state), self.wanted.values(wrt)

        def step(values: Leaves, others: Leaves) -> Leaves:
            trees = self.floats.replaced(state, values), item, self.wanted.replaced(wrt, others)
            return self.floats.values(self.call(*trees)[0])

        if not traced():
            # Half the time of torch.func, and a checkpointed region is computed again.
            inputs = [leaf.detach().requires_grad_() for leaf in [*values, *others]]
            try:
                with torch.enable_grad(), whole_graph():
                    results = step(inputs[: len(values)], inputs[len(values) :])
            except GraphEndError:
                results = []
            recorded = [index for index, new in enumerate(results) if new.requires_grad]
            if recorded:
                grads = torch.autograd.grad(
                    [results[index] for index in recorded],
                    inputs,
                    [cotangents[index] for index in recorded],
                    allow_unused=True,
                    materialize_grads=True,
                )
                return list(grads[: len(values)]), list(grads[len(values) :])
        pulled: tuple[Leaves, Leaves] = torch.func.vjp(step, values, others)[1](cotangents)
        return pulled


def _pulled_back(
    pull: Callable[..., Any],
    rule: Rule[Any],
    at: tuple[Tree, Any, Tree],
    after: _Derivatives,
    index: int,
) -> _Derivatives:
    """Return the derivatives before a step of this index, which was taken `at` a state, an item and
    `wrt`, from those after it.
    """
    scaler = after.scaler
    while True:
        by_state, by_wrt, overflow, amax = pull(*at, *after[:2], scaler)
        if not overflow:
            return _Derivatives(by_state, by_wrt, call_rule(rule, scaler, overflow, amax))
        lower = lower_scale(rule, scaler)
        if lower is None:
            raise FloatingPointError(
                f"the derivative through step {index} is not finite, at a scale of "
                f"{float(scaler.scale):g} for the cotangents. Likely cause: a half backward that "
                "overflows, also that of a norm under autocast; a skipped step whose info has no "
                "`found_inf`; a microbatch that was dropped; a root or a norm of 0. Fix: "
                "`rule=HeadroomScale()`, a loss scale for the cotangents; for a norm "
                "`norms_in_float32()` around `apply`, or a policy; `on_nonfinite='drop_window'`."
            )
        scaler = lower


# ---- checks --------------------------------------------------------------------------------------


def _check(step: Any, items: Any, rule: Any) -> None:
    refuse_in_trace_or_capture(
        "vjp_through keeps states and reads flags, so it cannot be traced or mapped.",
        "call it outside of torch.compile, torch.func and jit; a jitted or mapped step inside.",
    )
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "vjp_through was called under torch.inference_mode, in which there are no derivatives. "
            "Fix: leave it before the call."
        )
    if isinstance(step, Jitted) and step.donate:
        raise ValueError(
            f"step donates {step.donate}, and a replay needs each state again. Fix: `jit(step)`."
        )
    if not len(items):
        raise ValueError("items is empty; a run has at least one step.")
    if rule is not None:
        checked_rule_traits(rule)
