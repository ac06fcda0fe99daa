"""Protocols of an optimizer: `init` and `step`, conditional steps, (init, update) pairs."""

from __future__ import annotations

import functools
import inspect
from typing import Any, Protocol

import torch
from torch import Tensor

from .._optim.decision import Decision, unscale_and_clip
from .._optim.step_inputs import StepInputs
from .._torch.autocast import outside_autocast
from .._torch.tracing import traced
from .._tree import select
from .._tree import tree as _tree
from .._tree.tree import Tree


class Optimizer(Protocol):
    """The protocol of an optimizer: two pure methods. `purescale.testing.assert_optimizer` tests
    one.
    """

    def init(self, params: Tree) -> Tree:
        """Return the state before the first step: any tree of tensors, in fresh memory. Its
        structure is final; steps change values only. A parameter may be None.
        """

    def step(self, params: Tree, grads: Tree, opt_state: Tree) -> tuple[Tree, Tree]:
        """Return parameters and state after one step, in fresh memory, with unchanged shapes and
        dtypes.

        `grads` has the structure of `params`. A parameter whose gradient is None takes no part in
        this step: it comes back with the same bits and its state does not change, as in
        torch.optim. A gradient of zeros is different, because decay and momentum still act. The
        gradients of float16 parameters are float32. Values may be inf or NaN and must not be read:
        `maybe_step` drops such a result.
        """


class Conditional(Protocol):
    """The methods that a step calls beyond `init` and `step`, with defaults for an optimizer that
    lacks them. `as_conditional` makes one of any optimizer.
    """

    # True if `.backward()` may go through a step; otherwise tensors on a graph are refused.
    differentiable: bool = False
    # True if elements update independently, so that a shard can be stepped. None if that is
    # unknown: the optimizer then gets the DTensors themselves.
    elementwise: bool | None = None
    # True if a step calls `step` of an object that is an `Optimizer` and no more.
    calls_step: bool = False

    def check(self, inputs: StepInputs) -> None:
        """Refuse parameters and a state that do not belong together, before any work."""

    def prepare(self, inputs: StepInputs, decision: Decision, *, in_place: bool = False) -> Any:
        """Run the user's code for an applied step, such as schedules, and return its results for
        `conditional_step`. Whatever may raise does so here, before anything is overwritten.
        """

    def conditional_step(
        self,
        inputs: StepInputs,
        decision: Decision,
        *,
        in_place: bool = False,
        prepared: Any = None,
    ) -> tuple[Tree, Tree]:
        """Return parameters and state after the decided step, in fresh memory. With `in_place`,
        the caller guarantees that nobody else holds the tensors of `inputs`: they are overwritten.
        `prepared` is the result of `prepare`, which is called here if it is None.
        """


def as_conditional(optimizer: Any) -> Conditional:
    """Return the optimizer if it has a conditional step, else a `CalledOptimizer` of it."""
    return optimizer if hasattr(optimizer, "conditional_step") else CalledOptimizer(optimizer)


class CalledOptimizer:
    """A `Conditional` for an optimizer with `step` alone: call it, then select old or new."""

    calls_step = True

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.differentiable = getattr(optimizer, "differentiable", Conditional.differentiable)
        self.elementwise = getattr(optimizer, "elementwise", Conditional.elementwise)

    def __repr__(self) -> str:
        return repr(self.optimizer)

    def check(self, inputs: StepInputs) -> None:
        """Do nothing: `step` makes its own checks."""

    def prepare(
        self, inputs: StepInputs, decision: Decision, *, in_place: bool = False
    ) -> tuple[Tree, Tree]:
        """Return what `step` returns, checked."""
        grads = unscale_and_clip(inputs.grads.tensors, decision, in_place=inputs.grads.owned)
        old = inputs.params_tree(inputs.params), inputs.opt_state
        trees = old[0], inputs.grads_tree(grads), old[1]
        with torch.set_grad_enabled(torch.is_grad_enabled() and (traced() or self.differentiable)):
            stepped = self.optimizer.step(*trees)
            _tree.matching_leaves(old, stepped, "old", "new")
            if decision.skip_on_host is False:
                return _tree.copy_aliased(stepped, trees)
            # What is read must not be a part of what is written.
            return _tree.copy_aliased(stepped, old) if in_place else stepped

    def conditional_step(
        self,
        inputs: StepInputs,
        decision: Decision,
        *,
        in_place: bool = False,
        prepared: Any = None,
    ) -> tuple[Tree, Tree]:
        """Make the decided step, as in `Conditional`."""
        if decision.skip_on_host:
            return unchanged(inputs, in_place=in_place)
        stepped = prepared or self.prepare(inputs, decision, in_place=in_place)
        if decision.skip_on_host is False:
            return stepped
        old = inputs.params_tree(inputs.params), inputs.opt_state
        skip: Any = decision.skip
        with torch.set_grad_enabled(torch.is_grad_enabled() and (traced() or self.differentiable)):
            return select.where(skip, old, stepped, in_place=in_place)


def unchanged(inputs: StepInputs, *, in_place: bool) -> tuple[Tree, Tree]:
    """Return parameters and state of a skipped step: the given tensors, or copies."""
    old = inputs.params_tree(inputs.params), inputs.opt_state
    if not in_place:
        return _tree.clone(old)
    return _tree.map(
        lambda leaf: leaf.detach() if isinstance(leaf, Tensor) and leaf.requires_grad else leaf,
        old,
    )


# ---- (init, update) pairs ------------------------------------------------------------------------


def from_transformation(tx: Any) -> TransformationOptimizer:
    """Equal to `updates, opt_state = tx.update(grads, opt_state, params); params = tree_map(add,
    params, updates)`.

    Args:
        tx: Any optax-style pair, `init(params) -> state` and `update(grads, state, params) ->
            (updates, state)`, as an object or a tuple, on trees of torch tensors. Leaves of its
            state must be tensors, or equal before and after a step. TorchOpt's pairs are called
            with `inplace=False`, because by default they write into the gradients.

    Returns:
        An optimizer.

    Raises:
        TypeError: If `tx` has no `init` and `update`.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> def update(grads, state, params):
        ...     return {"w": -0.5 * grads["w"]}, state
        >>> sgd = SimpleNamespace(init=lambda params: (), update=update)
        >>> from_transformation(sgd).step({"w": torch.tensor(1.0)}, {"w": torch.tensor(1.0)}, ())
        ({'w': tensor(0.5000)}, ())

    Source of the form: optax.GradientTransformation.
    """
    return TransformationOptimizer(tx)


class TransformationOptimizer:
    """An (init, update) pair as an optimizer; made by `from_transformation`."""

    def __init__(self, tx: Any) -> None:
        init, update = getattr(tx, "init", None), getattr(tx, "update", None)
        if init is None and update is None and isinstance(tx, tuple) and len(tx) == 2:
            init, update = tx
        if init is None or update is None or not (callable(init) and callable(update)):
            raise TypeError(
                f"from_transformation takes an (init, update) pair of functions, got {tx!r}."
            )
        self._init = init
        parameters = inspect.signature(update).parameters
        self._update = (
            functools.partial(update, inplace=False) if "inplace" in parameters else update
        )
        self._params_by_keyword = (
            "params" in parameters and parameters["params"].kind is inspect.Parameter.KEYWORD_ONLY
        )

    def init(self, params: Tree) -> Tree:
        """Return the state of `tx`, in fresh memory."""
        return _tree.clone(self._init(params))

    @outside_autocast()
    def step(self, params: Tree, grads: Tree, opt_state: Tree) -> tuple[Tree, Tree]:
        """Return parameters and state after one step. `tx` gets None for a gradient that is
        None.
        """
        flat = _tree.flatten_once(params)
        _tree.check_parameters(flat)
        _tree.gradients_like(flat, grads)
        if self._params_by_keyword:
            updates, new_state = self._update(grads, opt_state, params=params)
        else:
            updates, new_state = self._update(grads, opt_state, params)
        stepped = _tree.map(
            lambda p, u: p.clone() if u is None else (p + u).to(p.dtype), params, updates
        )
        return stepped, _tree.copy_aliased(new_state, (params, grads, opt_state))
