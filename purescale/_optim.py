"""Optimizers as pure functions. None is written here: the arithmetic is torch.optim's, or that of
the transformation given.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from . import _tree
from ._autocast import outside_autocast
from ._groups import PARAMETERS_GIVEN, Schedule
from ._torch_optim import TorchOptimizer
from ._tree import Tree

P = ParamSpec("P")
T = TypeVar("T")


class Optimizer(Protocol):
    """Anything with these two pure methods."""

    def init(self, params: Tree) -> Any:
        """The state of an optimizer that has made no step."""

    def step(self, params: Tree, grads: Tree, opt_state: Any) -> tuple[Tree, Any]:
        """Parameters and state after one step, in fresh memory."""


def _without_parameters(make: Callable[P, T]) -> Callable[P, T]:
    """`from_torch`, with words for a call as that of torch's class, which begins with them."""

    @functools.wraps(make)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        if len(args) > 1 and "lr" in kwargs:
            raise TypeError(
                f"from_torch was given {type(args[1]).__name__} beside lr={kwargs['lr']!r}. "
                f"{PARAMETERS_GIVEN}"
            )
        return make(*args, **kwargs)

    return checked


@_without_parameters
def from_torch(
    cls: type[torch.optim.Optimizer],
    lr: float | Tensor | Schedule | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    lr_in_state: bool = False,
    **settings: Any,
) -> TorchOptimizer:
    """Equal to `opt = cls(params, lr=lr, **settings); opt.step()` on copies of everything, bit for
    bit.

    Arguments:
    - `cls`: a class of torch.optim, or a subclass that keeps its `step`.
    - `lr`: a number, a 0-d tensor, or a schedule: a function from the number of steps applied so
      far, a 0-d int64 tensor, to the learning rate. A skipped step is not applied, so a schedule
      never advances on it. As a tensor it can be differentiated. A schedule is tried once, here,
      and refused where it reads the value of the count.
    - `lr_in_state`: steps use `opt_state.lr`, a 0-d float32 tensor that `init` makes of `lr`: data,
      so that one compiled step serves every rate, a vmapped ensemble has one a member, and it is
      saved and differentiated. `opt_state._replace(lr=...)` between steps moves it. Rates in
      `overrides` stay settings. Without it `opt_state.lr` is `()`.
    - `overrides`: settings for some parameters, by dotted name or glob; later patterns win:
      `{"*.bias": {"weight_decay": 0.0}, "head.*": {"lr": 1e-2}}`.
    - `settings`: the class's own. A flag named here (`foreach`, `fused`, `capturable`,
      `differentiable`) is kept.

    Which of torch's implementations runs, where no flag is named: the fused kernel where the class
    has one and everything is floating and dense; else the capturable formula, or the for-loop where
    a class has neither. None of these reads a tensor's value in Python, so none syncs. Inside
    torch.func transforms it is the capturable and differentiable formula, inside torch.compile too
    up to 16 parameters, or where they are to be differentiated. The bits of these differ a little
    (1e-6 relative). Each can be differentiated; where torch's square root has an infinite
    derivative, at a gradient of exactly 0, it is taken for 0. `.backward()` goes through a step
    only with `differentiable=True`, and is refused in words otherwise.

    `optimizer.init(params)`, `optimizer.step(params, grads, opt_state)`,
    `optimizer.to_state_dict(opt_state)` and `optimizer.from_state_dict(sd, params)` (torch.optim's
    own format) take any pytree of parameters. Step hooks do not run.

    Raises `TypeError` or `ValueError` when made, and in torch's own words for settings that the
    class refuses: for parameters, which `init` takes; for LBFGS (needs a closure), SparseAdam
    (takes no dense gradients), Adafactor without a named `foreach` (each of torch's implementations
    reads three values per parameter, so name the one that may), classes outside of torch.optim's
    pattern. `init` and `step` raise for a pattern in `overrides` that matches no parameter; `step`
    for a state that is not that of these parameters (shapes, dtypes and devices of every slot),
    before torch's kernel is called.

    >>> import torch
    >>> optimizer = from_torch(torch.optim.SGD, lr=0.5, momentum=0.9)
    >>> params = {"w": torch.tensor([1.0])}
    >>> state = optimizer.init(params)
    >>> params, state = optimizer.step(params, {"w": torch.tensor([1.0])}, state)
    >>> params, state.applied
    ({'w': tensor([0.5000])}, tensor(1))

    Source of the rules: torch.optim.
    """
    if torch.compiler.is_compiling():
        raise ValueError(
            "from_torch was called inside of a compiled function, where torch's optimizers cannot "
            "be made. Cure: make the optimizer outside; a rate that the function is given goes "
            "through from_torch(..., lr_in_state=True) and opt_state._replace(lr=...)."
        )
    return TorchOptimizer(cls, lr, overrides or {}, settings, lr_in_state=lr_in_state)


def from_transformation(tx: Any) -> TransformationOptimizer:
    """Equal to `updates, opt_state = tx.update(grads, opt_state, params); params
    = tree_map(add, params, updates)`.

    `tx`: any optax-style pair, `init(params) -> state` and
    `update(grads, state, params) -> (updates, state)`, as an object or a tuple, on trees of torch
    tensors. TorchOpt's, which write into the gradients by default, are called with `inplace=False`.
    What its state holds must be tensors, or equal before and after a step.

    Raises `TypeError` for what has no `init` and `update`.

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

    def init(self, params: Tree) -> Any:
        """The state of `tx`, in fresh memory."""
        return _tree.clone(self._init(params))

    def check(self, params: Tree, grads: Tree, opt_state: Any) -> None:
        """Refuse gradients that are not those of `params`."""
        _tree.aligned(params, grads)

    @outside_autocast()
    def step(self, params: Tree, grads: Tree, opt_state: Any) -> tuple[Tree, Any]:
        """Parameters and state after one step. A parameter whose gradient is None is given to `tx`
        with None.
        """
        self.check(params, grads, opt_state)
        if self._params_by_keyword:
            updates, new_state = self._update(grads, opt_state, params=params)
        else:
            updates, new_state = self._update(grads, opt_state, params)
        stepped = _tree.map(
            lambda p, u: p.clone() if u is None else (p + u).to(p.dtype), params, updates
        )
        return stepped, _tree.apart(new_state, (params, grads, opt_state))
