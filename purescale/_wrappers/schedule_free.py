"""Schedule-free training: gradients at a mix of the optimizer's iterate and of its average."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._optim.optimizer import Optimizer
from .._optim.optimizer_inputs import OptimizerInputs
from .._torch.autocast import outside_autocast
from .._torch.dtypes import wide_dtype, widest_float
from .._tree import pytree
from .._tree.hints import document_fields
from .._tree.matching import same_metadata
from .._tree.pytree import Tree, TreeT
from .._tree.scalars import checked_real
from .._wrappers.wrapper import Wrapper, checked_state, leaves_by_param


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
        TypeError: `optimizer` has no `init` and `step`; from `step`, if the state is of another
            optimizer or of parameters of other shapes or dtypes.

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
    beta = checked_real("beta", beta)
    if not 0 < beta < 1:
        raise ValueError(f"beta is {beta}; expected a number above 0 and below 1, such as 0.9.")
    return ScheduleFreeOptimizer(optimizer, beta)


class ScheduleFreeOptimizer(Wrapper):
    """An optimizer whose gradients are taken near an average; made by `with_schedule_free`."""

    made_by = "with_schedule_free"
    rounds = widens_params = False

    def __init__(self, optimizer: Optimizer, beta: float) -> None:
        super().__init__(optimizer, beta)
        self._beta = beta

    def init(self, params: Tree) -> ScheduleFreeState:
        """Return the state before the first step, at which x, y and z are the parameters."""
        device = next((leaf.device for leaf in pytree.tensors(params)), torch.device("cpu"))
        return ScheduleFreeState(
            self.optimizer.init(params),
            pytree.clone(params),
            torch.zeros((), dtype=torch.int64, device=device),
            torch.full((), self._beta, dtype=widest_float(device), device=device),
        )

    def check_state(self, inputs: OptimizerInputs) -> None:
        """Refuse a state without the iterate of these parameters."""
        _check_iterate(inputs.param_structure.unflatten(inputs.params), inputs.opt_state)

    def decode(self, inputs: OptimizerInputs) -> OptimizerInputs:
        """Return the step's inputs with a copy of the iterate in place of the parameters."""
        iterate = inputs.param_structure.flatten_up_to(inputs.opt_state.iterate)
        return inputs.with_params_and_state(
            list(map(Tensor.clone, iterate)), inputs.opt_state.inner
        )

    def encode(
        self, inputs: OptimizerInputs, params: list[Tensor], state: Tree
    ) -> tuple[list[Tensor], Tree]:
        """Average the new iterate in, and mix both. `params` are the iterate after the step."""
        _, iterate, applied, beta = inputs.opt_state
        param_structure = inputs.param_structure
        old, applied = param_structure.flatten_up_to(iterate), applied + 1
        mixed = []
        for index, (y, before, new) in enumerate(zip(inputs.params, old, params, strict=True)):
            if param_structure.grad_indices[index] is None:
                mixed.append(y.clone())
                continue
            x, z = _average(y, before, beta), new.to(wide_dtype(y.dtype))
            x = x + (z - x) / applied
            mixed.append((z + beta * (x - z)).to(y.dtype))
        new = param_structure.unflatten(params, iterate)
        return mixed, ScheduleFreeState(state, new, applied, beta.clone())


def _average(y: Tensor, z: Tensor, beta: Tensor) -> Tensor:
    """Return the average that parameters are a mix of."""
    wide = wide_dtype(y.dtype)
    y, z = y.to(wide), z.to(wide)
    return z + (y - z) / beta


def _check_iterate(params: Tree, opt_state: Tree) -> None:
    """Refuse a state that is not of these parameters."""
    state = checked_state(opt_state, ScheduleFreeState)
    leaves_by_param(state, "iterate", params, same_metadata, "one of its dtype")


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
        TypeError: `opt_state` is the state of another optimizer, or of parameters of other shapes
            or dtypes.
        ValueError: It is the state of other parameters.

    Example:
        >>> import torch
        >>> from purescale import from_torch
        >>> sgd = with_schedule_free(from_torch(torch.optim.SGD, lr=0.5))
        >>> params = {"w": torch.tensor(1.0)}
        >>> averaged(params, sgd.init(params))
        {'w': tensor(1.)}

    Source of the rule: Defazio et al. (2024); `schedule_free_eval_params` of optax.contrib.
    """
    _check_iterate(params, opt_state)
    beta = opt_state.beta
    return pytree.map(lambda y, z: _average(y, z, beta).to(y.dtype), params, opt_state.iterate)
