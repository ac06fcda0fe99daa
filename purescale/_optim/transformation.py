"""(init, update) pairs, as those of optax, as optimizers and back."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from .._optim.optimizer import Optimizer
from .._torch.autocast import outside_autocast
from .._tree import pytree
from .._tree.aliasing import copy_aliased
from .._tree.hints import document_fields
from .._tree.matching import check_parameters, grads_like_params
from .._tree.pytree import FlatTree, Tree


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
        return pytree.clone(self._init(params))

    @outside_autocast()
    def step(self, params: Tree, grads: Tree, opt_state: Tree) -> tuple[Tree, Tree]:
        """Return parameters and state after one step. `tx` gets None for a gradient that is
        None.
        """
        flat = FlatTree.of(params)
        check_parameters(flat)
        grads_like_params(flat, grads)
        if self._params_by_keyword:
            updates, new_state = self._update(grads, opt_state, params=params)
        else:
            updates, new_state = self._update(grads, opt_state, params)
        stepped = pytree.map(
            lambda p, u: p.clone() if u is None else (p + u).to(p.dtype), params, updates
        )
        return stepped, copy_aliased(new_state, (params, grads, opt_state))


@document_fields
class Transformation(NamedTuple):
    """An optax-style pair of pure functions.

    Attributes:
        init: A function, `init(params) -> state`.
        update: A function, `update(grads, state, params) -> (updates, state)`.
    """

    init: Callable[[Tree], Tree]
    update: Callable[..., tuple[Tree, Tree]]


def to_transformation(optimizer: Optimizer) -> Transformation:
    """Equal to `(optimizer.init, lambda grads, state, params: (new - params, new_state))`, where
    `new, new_state = optimizer.step(params, grads, state)`.

    The inverse of `from_transformation`: libraries that take (init, update) pairs, such as TorchOpt
    and posteriors, can then use the classes of torch.optim. Adding the updates to the parameters
    gives those of `step`, to one rounding.

    Args:
        optimizer: Any optimizer. The gradients that `update` gets are unscaled and clipped.

    Returns:
        `init, update`. `update` needs the parameters, as `params` by position or keyword. It takes
        TorchOpt's `inplace` and writes into nothing. Where a gradient is None, so is the update.

    Raises:
        ValueError: From `update`, if it gets no parameters.

    Example:
        >>> import torch
        >>> from purescale import from_torch
        >>> init, update = to_transformation(from_torch(torch.optim.SGD, lr=0.5))
        >>> params, grads = {"w": torch.tensor(1.0)}, {"w": torch.tensor(3.0)}
        >>> updates, state = update(grads, init(params), params)
        >>> updates
        {'w': tensor(-1.5000)}

    Source of the form: optax.GradientTransformation.
    """

    def update(
        grads: Tree, state: Tree, params: Tree = None, *, inplace: bool = False
    ) -> tuple[Tree, Tree]:
        if params is None:
            raise ValueError(
                "update of to_transformation got no params, from which the step of an optimizer "
                "starts. Fix: `updates, state = update(grads, state, params)`."
            )
        new, new_state = optimizer.step(params, grads, state)
        return pytree.map(_difference, grads, new, params), new_state

    return Transformation(optimizer.init, update)


def _difference(grad: Tensor | None, new: Tensor | None, old: Tensor | None) -> Tensor | None:
    return None if grad is None or new is None or old is None else new - old
