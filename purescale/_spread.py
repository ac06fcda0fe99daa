"""A step over DTensors is a step over the shards that this rank holds, where each element moves by
itself.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from . import _dtensor, _foreach, _meshes, _tree
from ._clip import Clip, dtype_of, unusable
from ._dtensor import Shards
from ._extent import surely_fits
from ._headroom import largest
from ._scaler import overflowed
from ._tree import Leaves, Tree


class Spread(NamedTuple):
    """The trees of a step, of plain tensors only."""

    params: Tree
    grads: Tree
    opt_state: Any
    gradients: Leaves  # as they lie over their meshes, where their parameters do
    shards: tuple[Shards, Shards]  # of the parameters, of the state

    @property
    def is_sparse(self) -> bool:
        """Whether duplicate indices have to be summed, which is done after unscaling."""
        layouts = {leaf.layout for leaf in self.gradients if leaf is not None}
        return not layouts <= {torch.strided}

    def unscaled(self, scale: Tensor) -> Spread:
        """The same with gradients over `scale`."""
        shards = _dtensor.shards(self.gradients)
        local = _foreach.divide(shards.local, scale, donate=False)
        grads = _tree.flatten(self.grads)[1].unflatten(local)
        return self._replace(grads=grads, gradients=shards.back(local))

    def back(self, params: Tree, opt_state: Any) -> tuple[Tree, Any]:
        """What the step made of these, as DTensors that lie as they did."""
        trees = []
        for tree, shards in zip((params, opt_state), self.shards, strict=True):
            leaves, structure = _tree.flatten(tree)
            trees.append(structure.unflatten(shards.back(leaves)))
        return trees[0], trees[1]


def spread(optimizer: Any, params: Tree, grads: Tree, opt_state: Any) -> Spread | None:
    """The shards of a step; `None` where there are none, or where `optimizer` does not say whether
    it is `elementwise`: then it is given the DTensors themselves.

    Refuses what does not lie as its parameter does, and a shard that `optimizer` would take for the
    whole.
    """
    elementwise = getattr(optimizer, "elementwise", None)
    if elementwise is None or not any(map(_dtensor.among, map(_tree.tensors, (params, grads)))):
        return None
    on_graph = getattr(optimizer, "differentiable", False)
    if not on_graph:
        _tree.refuse_graphs(params=params, grads=grads, opt_state=opt_state)
    structure, weights, gradients = _tree.aligned(params, grads)
    for index, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
        misfit = "" if gradient is None else _dtensor.apart(gradient, weight)
        if misfit:
            raise ValueError(f"{_tree.path(params, 'grads', index)} {misfit}")
        _check_parameter(weight, params, index, optimizer, elementwise)
    _check_state(opt_state, dict(zip(_tree.names(params), weights, strict=True)))
    gradients = _dtensor.alike(gradients, weights)
    leaves, state = _tree.flatten(opt_state)
    parts = [_dtensor.shards(some, on_graph=on_graph) for some in (weights, gradients, leaves)]
    return Spread(
        structure.unflatten(parts[0].local),
        structure.unflatten(parts[1].local),
        state.unflatten(parts[2].local),
        list(parts[1].given),
        (parts[0], parts[2]),
    )


def over_shards(step: Callable[..., tuple[Tree, Any]]) -> Callable[..., tuple[Tree, Any]]:
    """A method `step(params, grads, opt_state)` that takes DTensors too."""

    @functools.wraps(step)
    def stepped(self: Any, params: Tree, grads: Tree, opt_state: Any) -> tuple[Tree, Any]:
        over = spread(self, params, grads, opt_state)
        if over is None:
            return step(self, params, grads, opt_state)
        return over.back(*step(self, *over[:3]))

    return stepped


_ELEMENTWISE = "asgd|adadelta|adagrad|adam|adamax|adamw|nadam|radam|rmsprop|rprop|sgd"


def is_elementwise(cls: Any) -> bool:
    """Whether a step of a part of a parameter is that part of its step: so it is where the class
    keeps the step of torch's that moves each element by itself; of any other nobody knows.
    """
    module = inspect.unwrap(cls.step).__module__
    return re.fullmatch(rf"torch\.optim\.({_ELEMENTWISE})", module) is not None


def _check_parameter(
    weight: Any, params: Tree, index: int, optimizer: Any, elementwise: bool
) -> None:
    if not isinstance(weight, DTensor):
        return
    if any(placement.is_partial() for placement in weight.placements):
        raise ValueError(
            f"{_tree.path(params, 'params', index)} lies as {weight.placements}: its value is a "
            "sum over ranks, and a step of each addend is no step of the sum. Cure: "
            "`p.redistribute(placements=[Replicate()])`."
        )
    if not elementwise and _dtensor.is_sharded(weight):
        raise ValueError(
            f"{_tree.path(params, 'params', index)} lies as {weight.placements}, and {optimizer} "
            "needs the whole of a parameter for a step of any part, as do Muon and Adafactor. "
            "Cure: AdamW or another that moves each element by itself, or "
            "`p.redistribute(placements=[Replicate()])`, gradients too."
        )


def _check_state(opt_state: Any, weights: dict[str, Any]) -> None:
    for name, slot in getattr(opt_state, "slots", {}).items():
        weight = weights.get(name)
        for key, value in slot.items():
            if isinstance(value, DTensor) and not (
                isinstance(weight, DTensor)
                and (value.device_mesh, value.placements) == (weight.device_mesh, weight.placements)
            ):
                lies = f"{weight.placements}" if isinstance(weight, DTensor) else "a plain tensor"
                raise ValueError(
                    f"opt_state: {key} of {name} lies as {value.placements}, its parameter is "
                    f"{lies}. Likely cause: the state of the parameters before they were "
                    "sharded. Cure: `opt_state = optimizer.init(params)` once they are."
                )


class Read(NamedTuple):
    """What a step asks of its gradients."""

    found_inf: Tensor
    norm: Tensor | None  # unscaled; where it was asked for
    largest: Any = ()  # unscaled; `()` where it was not asked for
    finite: bool = False  # known on the host that `found_inf` is False: nothing need be chosen


def facts(
    leaves: list[Any],
    clip: Clip,
    scale: Tensor,
    known: Read | None,
    group: Any,
    *,
    scaled: bool,
    dense: bool = False,
    amax: bool = False,
) -> Read:
    """`read` for what clipping needs; what is known already is not read again, nor anything where
    all is.
    """
    norm_type = None if clip.max_norm is None else clip.norm_type
    if known is not None and (known.norm is not None or norm_type is None):
        return known
    found = read(*(leaves, norm_type, scale, group, known), scaled=scaled, dense=dense, amax=amax)
    bad = unusable(clip)
    return found if bad is None else found._replace(found_inf=found.found_inf | bad, finite=False)


def read(
    leaves: list[Any],
    norm_type: float | None,
    scale: Tensor,
    group: Any = None,
    known: Read | None = None,
    *,
    scaled: bool,
    dense: bool = False,
    amax: bool = False,
) -> Read:
    """What one read of `leaves` tells; the flag that is `known` stays."""
    over = scale if scaled else None
    # Of float64 leaves the norm may be inf before they are unscaled; one sum on a CPU tells.
    wide = scaled and norm_type is not None and dtype_of(leaves) is torch.float64
    first = None if wide and scale.device.type != "cpu" else norm_type
    size = _meshes.extent(leaves, scale.device, first, over, dense=dense, exact=amax)
    norm = size.norm if over is None or size.norm is None else size.norm / over
    if wide and not surely_fits(size, scale):
        norm = _norm_unscaled(leaves, norm_type, scale)
    most = largest(size, scale.device, over, group) if amax else ()
    if known is not None:
        return Read(known.found_inf, norm, most, known.finite)
    found_inf = overflowed(size, scale, scaled=scaled, group=group)
    return Read(found_inf, norm, most, group is None and scaled and surely_fits(size, scale))


def _norm_unscaled(leaves: list[Any], norm_type: float | None, scale: Tensor) -> Tensor | None:
    """The norm of `leaves` over `scale`, where that of float64 leaves still scaled may be inf."""
    shards = _dtensor.shards(leaves)
    local = _foreach.divide(shards.local, scale, donate=False)
    return _meshes.extent(local, scale.device, norm_type, over=shards.given).norm
