"""Schedule-free training: gradients at a mix of the optimizer's iterate and of its average."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._optim.protocol import Optimizer
from .._optim.updater import as_updater
from .._torch.autocast import outside_autocast
from .._torch.dtypes import wide_dtype, widest_float
from .._tree import tree as _tree
from .._tree.hints import document_fields
from .._tree.scalars import real
from .._tree.tree import Tree, TreeT


@document_fields
class ScheduleFreeState(NamedTuple):
    """The state of `with_schedule_free`.

    Attributes:
        inner: The state of the inner optimizer.
        iterate: A tree like the parameters: what the inner optimizer steps, z in the paper.
        applied: int64 []. The number of applied steps.
        beta: float64 [], float32 where there is none. The share of x in the parameters.
    """

    inner: Tree
    iterate: Tree
    applied: Tensor
    beta: Tensor


def with_schedule_free(optimizer: Optimizer, beta: float = 0.9) -> ScheduleFreeOptimizer:
    """Equal, for the iterate z, its average x and the parameters y = (1 - beta) z + beta x, to

        z = optimizer.step(z, grads_at_y)
        x = x + (z - x) / (applied + 1)
        y = (1 - beta) * z + beta * x

    A rate without a schedule, warmed up at most, trains as one that decays to 0. `averaged(params,
    opt_state)` is x, the parameters to evaluate and to keep. There is no train mode and no eval
    mode: both are functions of one state. Batch norms have the statistics of y; `precise_bn` at x
    gives those of x. Half parameters lose small updates of x: put
    `with_master_weights` around, and x is `averaged(master_weights(params, opt_state),
    opt_state.inner)`.

    Args:
        optimizer: Any optimizer. Its decay acts on z. `betas=(0.0, ...)` is usual for Adam and
            AdamW, because `beta` is the momentum.
        beta: Above 0 and below 1.

    Returns:
        An optimizer.

    Raises:
        ValueError: `beta` is out of range.
        TypeError: `optimizer` has no `init` and `step`.

    Example:
        >>> import torch
        >>> from purescale import from_torch
        >>> sgd = with_schedule_free(from_torch(torch.optim.SGD, lr=0.5), beta=0.5)
        >>> params, state = {"w": torch.tensor(1.0)}, sgd.init({"w": torch.tensor(1.0)})
        >>> for _ in range(2):
        ...     params, state = sgd.step(params, {"w": torch.tensor(1.0)}, state)
        >>> params, averaged(params, state)
        ({'w': tensor(0.1250)}, {'w': tensor(0.2500)})

    Source of the rule: Defazio et al., The Road Less Scheduled (2024), and the reference wrapper
    of their package schedule_free.
    """
    beta = real("beta", beta)
    if not 0 < beta < 1:
        raise ValueError(f"beta is {beta}; expected a number above 0 and below 1, such as 0.9.")
    return ScheduleFreeOptimizer(optimizer, beta)


class ScheduleFreeOptimizer:
    """An optimizer whose gradients are taken near an average; made by `with_schedule_free`."""

    def __init__(self, optimizer: Optimizer, beta: float) -> None:
        self.optimizer, self.beta = optimizer, beta
        inner = as_updater(optimizer)
        self.differentiable, self.may_add_slots = inner.differentiable, inner.may_add_slots
        self.wide_grads = inner.wide_grads

    def __repr__(self) -> str:
        return f"with_schedule_free({self.optimizer!r}, beta={self.beta})"

    def init(self, params: Tree) -> ScheduleFreeState:
        """Return the state before the first step, at which x, y and z are the parameters."""
        device = next((leaf.device for leaf in _tree.tensors(params)), torch.device("cpu"))
        return ScheduleFreeState(
            self.optimizer.init(params),
            _tree.clone(params),
            torch.zeros((), dtype=torch.int64, device=device),
            torch.full((), self.beta, dtype=widest_float(device), device=device),
        )

    @outside_autocast()
    def step(self, params: Tree, grads: Tree, opt_state: ScheduleFreeState) -> tuple[Tree, Any]:
        """Return parameters and state after one step."""
        iterate, inner = self.optimizer.step(opt_state.iterate, grads, opt_state.inner)
        applied = opt_state.applied + 1

        def mixed(y: Tensor, old: Tensor, new: Tensor, grad: Any) -> Tensor:
            if grad is None:
                return y.clone()
            x, z = _average(y, old, opt_state.beta), new.to(wide_dtype(new.dtype))
            x = x + (z - x) / applied
            return (z + opt_state.beta * (x - z)).to(y.dtype)

        leaves, structure = _tree.flatten(params)
        rows = zip(
            leaves,
            structure.flatten_up_to(opt_state.iterate),
            structure.flatten_up_to(iterate),
            structure.flatten_up_to(grads),
            strict=True,
        )
        new = [None if row[0] is None else mixed(*row) for row in rows]
        return structure.unflatten(new), ScheduleFreeState(
            inner, iterate, applied, opt_state.beta.clone()
        )


def _average(y: Tensor, z: Tensor, beta: Tensor) -> Tensor:
    """Return the average that parameters are a mix of."""
    wide = wide_dtype(y.dtype)
    y, z = y.to(wide), z.to(wide)
    return z + (y - z) / beta


@outside_autocast()
def averaged(params: TreeT, opt_state: ScheduleFreeState) -> TreeT:
    """Equal to `tree_map(lambda y, z: z + (y - z) / beta, params, opt_state.iterate)`: the average
    of the iterates, for evaluation and for the end of a training.

    Args:
        params: The parameters of a `with_schedule_free`.
        opt_state: Its state.

    Returns:
        A tree like `params`, in fresh memory.

    Raises:
        TypeError: `opt_state` is the state of another optimizer.

    Example:
        >>> import torch
        >>> from purescale import from_torch
        >>> sgd = with_schedule_free(from_torch(torch.optim.SGD, lr=0.5))
        >>> params = {"w": torch.tensor(1.0)}
        >>> averaged(params, sgd.init(params))
        {'w': tensor(1.)}

    Source of the rule: Defazio et al. (2024); `schedule_free_eval_params` of optax.contrib.
    """
    if not isinstance(opt_state, ScheduleFreeState):
        raise TypeError(
            f"opt_state is {type(opt_state).__name__}; expected the state of with_schedule_free. "
            "Fix: `averaged(state.params, state.opt_state)`."
        )
    return _tree.map(
        lambda y, z: _average(y, z, opt_state.beta).to(y.dtype).clone(), params, opt_state.iterate
    )
