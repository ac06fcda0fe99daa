"""The exact update of an optimizer, in float64, before it is rounded to the parameters' dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._optim.partition import PartitionOptimizer
from .._optim.protocol import Optimizer
from .._optim.step_inputs import StepInputs, flatten_step
from .._optim.torch_optim import TorchOptimizer
from .._optim.updater import CalledOptimizer, as_updater
from .._optim.wrapper import Wrapper, with_params
from .._torch.autocast import outside_autocast
from .._torch.dtensor import from_local_like
from .._torch.dtypes import widest_float
from .._torch.tensor_list import TensorList
from .._tree import tree as _tree
from .._tree.tree import Leaves, Tree, TreeT


@outside_autocast()
def wanted_update(optimizer: Optimizer, params: TreeT, grads: Tree, opt_state: Tree) -> TreeT:
    """Equal to `optimizer.step(wide, grads, wide_state)[0] - wide`, with `wide` the parameters (or
    their masters) in float64, and `wide_state` the state for them.

    This is the update that a step adds to the parameters before rounding, for
    `update_report(old, new, wanted)`.

    Args:
        optimizer: Any optimizer. Wrappers round, so the update is that of the innermost optimizer;
            a `partition` has that of each part. One that computes in half itself, as Muon does,
            does so here too.
        params: The parameters before the step. Nothing is changed.
        grads: Unscaled and clipped gradients, as `optimizer.step` takes them. None gives an update
            of 0.
        opt_state: The state of the optimizer before the step.

    Returns:
        A tree like `params` in float64 or complex128; in float32 or complex64 on a device without
        float64.

    Raises:
        TypeError: An argument is of the wrong type, as for `optimizer.step`.
        ValueError: The arguments do not belong together, as for `optimizer.step`.

    Example:
        >>> import torch
        >>> from purescale import from_torch, update_report
        >>> sgd = from_torch(torch.optim.SGD, lr=2.0**-10)
        >>> old = {"w": torch.ones(2, dtype=torch.bfloat16)}
        >>> opt_state = sgd.init(old)
        >>> wanted = wanted_update(sgd, old, old, opt_state)
        >>> wanted
        {'w': tensor([-0.0010, -0.0010], dtype=torch.float64)}
        >>> new, _ = sgd.step(old, old, opt_state)
        >>> print(update_report(old, new, wanted))
        1 of 1 leaves miss the wanted update by more than half of it
        leaf  quality  did not move
        w      0.0000          100%

    Source of the rule: the exact update of Collage (arXiv 2405.03637).
    """
    updater = as_updater(optimizer)
    inputs = flatten_step(updater, params, grads, opt_state)
    updater.check(inputs)
    with torch.no_grad():
        return inputs.params_tree(_wanted(updater, inputs))


def _wanted(optimizer: Any, inputs: StepInputs) -> Leaves:
    """Return the update of each parameter in order, as a DTensor for one."""
    if isinstance(optimizer, Wrapper):
        return _wanted(optimizer.updater, optimizer.decode(inputs))
    if isinstance(optimizer, PartitionOptimizer):
        by_name: dict[str, Any] = {}
        for _, part, of_part in optimizer.split(inputs):
            by_name.update(zip(of_part.names, _wanted(part, of_part), strict=True))
        return list(map(by_name.get, inputs.names))
    old = list(map(_wide, inputs.params))
    wide_grads = TensorList(list(map(_wide, inputs.grads.tensors)))
    grads = inputs.grads._replace(tensor_list=wide_grads)
    wide = with_params(inputs, old, _wide_state(optimizer, inputs))._replace(grads=grads)
    new = inputs.structure.flatten_up_to(_stepped(optimizer, wide))
    likes = inputs.params if inputs.dtensors is None else inputs.dtensors[0]
    return [
        None if before is None else from_local_like(leaf, after - before)
        for leaf, before, after in zip(likes, old, new, strict=True)
    ]


def _stepped(optimizer: Any, inputs: StepInputs) -> Tree:
    if not isinstance(optimizer, CalledOptimizer):
        return optimizer.apply_step(inputs, optimizer.prepare(inputs.opt_state))[0]
    # The optimizer itself is called, as it may keep its state in a dtype of its own.
    trees = inputs.params_tree(inputs.params), inputs.params_tree(inputs.local_grads)
    return optimizer.optimizer.step(*trees, inputs.opt_state)[0]


def _wide(leaf: Any) -> Any:
    """Cast floating and complex tensors to at least float64, or to float32 on a device without."""
    if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
        return leaf
    return leaf.detach().to(torch.promote_types(leaf.dtype, widest_float(leaf.device)))


def _wide_state(optimizer: Any, inputs: StepInputs) -> Tree:
    """Return the state for the wide parameters."""
    opt_state = inputs.opt_state
    if isinstance(optimizer, TorchOptimizer):
        return optimizer.widened(opt_state, widest_float(opt_state.applied.device))
    return _tree.map(_wide, opt_state)
