"""Compiled windows that are not unrolled: the compiler traces one microbatch, and its code is
called for all that are like it.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._module.norms import norms_in_float32
from .._step.step_options import StepOptions
from .._step.value_and_grad import MicrobatchResult, ValueAndGrad
from .._torch import private
from .._torch.tracing import constant_while_compiling, in_dynamo_alone
from .._tree import tree as _tree
from .._tree.gradients import as_gradients
from .._tree.select import select_masked
from .._tree.tree import Leaves

_region_keys = itertools.count(1)
_active: list[Any] = []  # the microbatches that are being traced as regions


@constant_while_compiling
def _new_region_key() -> str:  # an int would become a symbolic one
    return str(next(_region_keys))


def _key(key: int, *tensors: Tensor) -> int:
    return key


def _region(key: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(_active[-1](tensors))


_nested: Any = torch.compiler.nested_compile_region
CAN_REPEAT = "reuse_hash_fn" in inspect.signature(_nested).parameters  # False for torch 2.11
if CAN_REPEAT:
    _region = _nested(_region, reuse_hash_fn=_key, max_reuse_entries=2**30)


def can_repeat(
    options: StepOptions, value_and_grad: ValueAndGrad, buffers: Leaves, number: int
) -> bool:
    """Return True if one traced microbatch may stand for all, as `unroll=False` asks."""
    if options.unroll or number == 1 or not (CAN_REPEAT and in_dynamo_alone()):
        return False
    # A region returns tensors only, and the momenta of batch norms are numbers.
    if options.bn_update == "window" or options.group is not None:
        return False
    arguments = [*value_and_grad.inputs, *buffers, value_and_grad.scale]
    return _tree.are_tensors(arguments) and not any([t.requires_grad for t in arguments])


def keep_buffers_if_dropped(counts: bool | Tensor, before: Leaves, after: Leaves) -> Leaves:
    """Return the buffers for the next microbatch."""
    if isinstance(counts, bool):
        return after if counts else before
    return select_masked(~counts, before, after)


class RegionCaller:
    """Adds the gradients of microbatches to a mean that has started, by one compiled region."""

    def __init__(self, mean: Any, value_and_grad: ValueAndGrad) -> None:
        self.mean, self.value_and_grad = mean, value_and_grad
        self.seen: list[tuple[Any, list[Tensor], int]] = []
        # Dynamo takes the first mode in a step for a side effect, which a region must not have.
        with norms_in_float32():
            pass

    def __call__(self, index: int, carried: Leaves, microbatch: Any) -> MicrobatchResult:
        """Return loss and buffers of a microbatch whose leaves are all tensors."""
        mean, value_and_grad = self.mean, self.value_and_grad
        leaves, structure = private.pytree.tree_flatten(microbatch)
        weighed = mean.weights.of(index)
        weights = [value.clone() for value in weighed if isinstance(value, Tensor)]
        parts = (value_and_grad.inputs, [value_and_grad.scale], carried, mean.state, weights)
        sizes = [len(tensors) for tensors in parts]

        def repeated(tensors: Sequence[Tensor]) -> list[Tensor]:
            rest = list(tensors)
            columns = [[rest.pop(0) for _ in range(n)] for n in sizes]
            inputs, (scale,), before, state, of_weights = columns
            weights = [of_weights.pop(0) if isinstance(w, Tensor) else w for w in weighed]
            batch = private.pytree.tree_unflatten(rest, structure)
            out = value_and_grad.call_torch_func(inputs, scale, before, batch)
            _check_aux(out.aux)
            resumed = mean.resumed(state, scale, weights)
            counts = resumed.add(0, as_gradients(out.grads, scale))
            after = keep_buffers_if_dropped(counts, before, out.buffers)
            return [out.loss, *after, *resumed.state, *resumed.overflows]

        # The inputs of a region must not share memory, and microbatches often do.
        tensors = [tensor for part in parts for tensor in part] + [leaf.clone() for leaf in leaves]
        key, symbolic = self._key_of(structure, tensors), _symbolic_sizes(tensors)
        _active.append(repeated)
        loss, *rest = _region(key, *tensors)
        _active.pop()
        if _symbolic_sizes(tensors) != symbolic:
            # Code in which a size was symbolic cannot be called once that size is fixed.
            self.seen.clear()
        buffers, mean.state, overflows = _cut(rest, len(carried), len(mean.state))
        mean.overflows += overflows
        return MicrobatchResult([], loss, buffers, [])

    def _key_of(self, structure: Any, tensors: list[Tensor]) -> int:
        """Return the number of the code for such tensors, that of the first call with
        similar ones.
        """
        key = 0
        for other, examples, number in self.seen:
            if key == 0 and other == structure and _alike(examples, tensors):
                key = number
        if key == 0:
            key = int(_new_region_key())
            self.seen.append((structure, tensors, key))
        return key


def _check_aux(aux: list[Any]) -> None:
    if aux:
        raise ValueError(
            "loss_fn returned (loss, new_buffers, aux); expected (loss, new_buffers), because "
            "with unroll=False a compiled step cannot return aux. Fix: return no aux, or "
            "unroll=True."
        )


def _cut(tensors: list[Tensor], *sizes: int) -> list[list[Tensor]]:
    """Return parts of these sizes, and the rest."""
    ends = [0, *itertools.accumulate(sizes), len(tensors)]
    return [tensors[start:end] for start, end in itertools.pairwise(ends)]


def _symbolic_sizes(tensors: list[Tensor]) -> int:
    """Return the number of sizes that the compiler has not fixed."""
    sizes = [size for tensor in tensors for size in tensor.shape]
    from torch.fx.experimental.symbolic_shapes import has_static_value  # imports sympy

    fixed: int = sum(map(has_static_value, sizes))
    return len(sizes) - fixed


def _alike(some: list[Tensor], others: list[Tensor]) -> bool:
    """Return True if one code fits both, without a guard on a symbolic size."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    for a, b in zip(some, others, strict=True):
        if a is b:
            continue
        if a.dtype is not b.dtype or a.device != b.device or a.ndim != b.ndim:
            return False
        for m, n in zip((*a.shape, *a.stride()), (*b.shape, *b.stride()), strict=True):
            if not statically_known_true(m == n):
                return False
    return True
