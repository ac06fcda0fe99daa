"""Stochastic rounding to half precision with hashed dice: unbiased and reproducible anywhere."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .._optim.optimizer import Optimizer
from .._optim.optimizer_inputs import OptimizerInputs
from .._torch import dtensor, flat_buffer, foreach
from .._torch.autocast import outside_autocast
from .._torch.dtypes import HALF, is_half
from .._torch.tracing import traced
from .._torch.transfer import send_once
from .._tree import pytree
from .._tree.hints import document_fields
from .._tree.leaves import unsupported_reason
from .._tree.pytree import Tree, TreeT
from .._tree.scalars import checked_whole
from .._wrappers.pieces import Position, positions_of
from .._wrappers.rounding import rounded_on_bits
from .._wrappers.wrapper import Wrapper, checked_state, on_shards


@outside_autocast()
def stochastic_round(
    tree: TreeT, dtype: torch.dtype, *, seed: int, step: int | Tensor = 0
) -> TreeT:
    """Equal to `x.to(dtype)`, but up or down by chance: a number between two of `dtype` becomes the
    upper one with the probability that makes the mean the number itself.

    The dice are a hash of `(seed, step, leaf, element)`, where `leaf` and `element` are indices. No
    generator is used: the same call gives the same bits eagerly, compiled, under vmap and on every
    replica; a DTensor gets those of the whole tensor. Numbers of `dtype`, inf and NaN do not
    change, and finite values stay finite. Probabilities are exact to 2**-16 of the distance of the
    two numbers (for a float64 leaf, to those of its float32). No derivative passes through.

    Args:
        tree: Any tree. Leaves that are not real and floating are copied.
        dtype: bfloat16 or float16.
        seed: A whole number.
        step: A whole number or a 0-d integer tensor, such as the number of applied steps. Another
            step gives other dice.

    Returns:
        The rounded tree in fresh memory.

    Raises:
        ValueError: If `dtype` is another one.
        TypeError: If `seed` or `step` is not whole, or a floating leaf is not dense.

    Example:
        >>> import torch
        >>> x = torch.full((10000,), 1.0 + 2.0**-9)  # a quarter of the way to the next bfloat16
        >>> rounded = stochastic_round(x, torch.bfloat16, seed=0)
        >>> sorted(set(rounded.tolist())), abs(rounded.double().mean() - x.mean()) < 1e-4
        ([1.0, 1.0078125], tensor(True))

    Source of the rule: Gupta et al., Deep Learning with Limited Numerical Precision (2015).
    """
    if dtype not in HALF:
        raise ValueError(
            f"stochastic_round rounds to torch.bfloat16 or torch.float16, got dtype={dtype!r}. "
            "Fix: `stochastic_round(tree, torch.bfloat16, seed=0)`."
        )
    leaves, structure = pytree.flatten(tree)
    dice = Dice.of(_checked_seed(seed), _as_count(step), len(leaves))
    results = []
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            results.append(leaf)
        elif not leaf.is_floating_point():
            results.append(leaf.clone())
        elif reason := unsupported_reason(leaf):
            raise TypeError(f"{pytree.path(tree, 'tree', index)} {reason}")
        else:
            position = Position(index, 0, leaf if dtensor.is_dtensor(leaf) else None)
            rounded = functools.partial(_round_leaf, dtype=dtype, dice=dice, position=position)
            results.append(on_shards(rounded, leaf))
    return structure.unflatten(results)


def _checked_seed(seed: Any) -> int:
    return checked_whole("seed", seed, least=-(2**63), most=2**63 - 1)


def _as_count(step: Any) -> Tensor:
    is_tensor = isinstance(step, Tensor)
    if is_tensor and not (step.ndim or step.is_floating_point() or step.is_complex()):
        return cast(Tensor, step.to(torch.int64))
    number = checked_whole("step", step, least=-(2**63), most=2**63 - 1)
    return torch.full((), number, dtype=torch.int64, device="cpu")


# ---- the dice ------------------------------------------------------------------------------------

_32_BITS, _31_BITS = 0xFFFFFFFF, 0x7FFFFFFF
_MULTIPLIER = 0x45D9F3B  # odd, below 2**27: its product with 32 bits stays below 2**63


def _hash(x: Any) -> Any:
    """Return a 32-bit hash of 32 bits in a Python number or an int64 tensor."""
    for _ in range(2):
        x = ((x ^ (x >> 16)) * _MULTIPLIER) & _32_BITS
    x = x ^ (x >> 16)
    # inductor inlines what it has not stored: of each use of x, twice as much in each line above.
    return x.as_strided(x.shape, x.stride()) if isinstance(x, Tensor) else x


class Dice(NamedTuple):
    """Two numbers below 2**31 for each leaf, which its dice are computed from."""

    factors: Tensor  # int32, odd
    shifts: Tensor  # int32

    @classmethod
    def of(cls, seed: int, step: Tensor, num_leaves: int) -> Dice:
        """Return the dice of one step, an int64 tensor."""
        mixed = _hash(_hash(seed & _32_BITS) ^ ((seed >> 32) & _32_BITS))
        mixed = _hash(_hash(mixed ^ (step & _32_BITS)) ^ ((step >> 32) & _32_BITS))
        row = _hash((mixed + torch.arange(num_leaves, device=mixed.device)) & _32_BITS)
        factors = ((_hash(row ^ 1) & _31_BITS) | 1).to(torch.int32)
        return cls(factors, (row & _31_BITS).to(torch.int32))

    def roll(self, numbers: Tensor, leaf_index: int | Tensor) -> Tensor:
        """Return 31 bits for each element, a hash of its number and its leaf."""
        x: Tensor
        # int32 wraps around, keeps the lower 31 bits of a product and is twice as fast as int64.
        # A compiler may compute int32 in wider integers, so traced code takes int64.
        factor, shift = self.factors[leaf_index], self.shifts[leaf_index]
        if traced():
            numbers = numbers.to(torch.int64)
            factor = factor.to(torch.int64)
        x = (numbers * factor + shift) & _31_BITS
        for _ in range(2):
            x = ((x ^ (x >> 15)) * _MULTIPLIER) & _31_BITS
        return (x ^ (x >> 16)).to(torch.int32)


def _element_indices(local: Tensor, position: Position) -> Tensor:
    """Return the index of each element in the whole leaf, int32, flat."""
    full: Any = position.dtensor
    count, start, device = local.numel(), position.start, local.device
    shape = local.shape if full is None else dtensor.local_shard(full).shape
    first = (0,) * len(shape) if full is None else dtensor.offsets(full)
    if full is None or shape[1:] == full.shape[1:]:  # the elements are consecutive
        if shape and first[0]:
            start += first[0] * shape[1:].numel()
        return _range(start, count, device)
    indices = torch.zeros((), dtype=torch.int32, device=device)
    for size, offset, full_size in zip(shape, first, full.shape, strict=True):
        indices = indices.unsqueeze(-1) * full_size + _range(offset, size, device)
    return indices.reshape(-1)[start : start + count]


def _range(start: int, count: int, device: torch.device) -> Tensor:
    # Beyond int32 it wraps around, as the dice do.
    return torch.arange(start, start + count, dtype=torch.int32, device=device)


# ---- rounding ------------------------------------------------------------------------------------

_BLOCK = 2**18  # elements that stay in a CPU cache from one operator to the next
_SMALL = 2**13  # elements: below this an operator takes a CPU longer than they do


def _round_leaf(x: Tensor, dtype: torch.dtype, dice: Dice, position: Position) -> Tensor:
    """Return the rounded elements of a dense tensor in its shape, in fresh memory."""
    if x.dtype is dtype:
        return x.clone()
    numbers = _element_indices(x, position)
    if traced() or foreach.is_on_accelerator(x) or x.numel() <= _BLOCK or not x.is_contiguous():
        bits = dice.roll(numbers, position.leaf_index).reshape(x.shape)
        return _up_or_down(x, bits, dtype)
    result = torch.empty_like(x, dtype=dtype)
    columns = [torch.split(t.view(-1), _BLOCK) for t in (result, x, numbers)]
    for target, row, some in zip(*columns, strict=True):
        target.copy_(_up_or_down(row, dice.roll(some, position.leaf_index), dtype))
    return result


def _round_leaves(
    tensors: Sequence[Tensor], dtype: torch.dtype, dice: Dice, rows: Tensor
) -> list[Tensor]:
    """Return `_round_leaf` of contiguous tensors of one kind, in operators over all their elements.
    `rows`: for each tensor its size, the number of its first element less the elements before it,
    and its leaf.
    """
    flat = flat_buffer.view_or_join(tensors)
    sizes, firsts, leaves = rows
    index = torch.repeat_interleave(sizes, output_size=flat.numel())
    numbers = torch.arange(flat.numel(), device=flat.device) + firsts[index]
    bits = dice.roll(numbers.to(torch.int32), leaves[index])
    return flat_buffer.split_views(_up_or_down(flat, bits, dtype), tensors)


def _up_or_down(x: Tensor, bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Add random bits to the bits that are dropped, so that a carry rounds up."""

    def multiple(small: Tensor) -> Tensor:
        return ((small * 2.0**40).to(torch.int32) + (bits >> 15)) >> 16

    return rounded_on_bits(x, dtype, lambda _, dropped: bits >> (31 - dropped), multiple)


# ---- the wrapper ---------------------------------------------------------------------------------


@document_fields
class RoundingState(NamedTuple):
    """The state of `with_stochastic_rounding`.

    Attributes:
        inner: The state of the inner optimizer, for float32 parameters.
        applied: int64 []. The number of applied steps, hashed for the dice.
    """

    inner: Any
    applied: Tensor


def with_stochastic_rounding(optimizer: Optimizer, seed: int = 0) -> RoundingOptimizer:
    """Equal to `wide, inner = optimizer.step(params.float(), grads.float(), inner)`, then
    `stochastic_round(wide, dtype, seed=seed, step=applied)` of half parameters.

    Rounding to the nearest loses an update that is smaller than half the distance between two half
    numbers: AdamW at a rate of 1e-3 never moves a bfloat16 weight of 1.0. Stochastic rounding keeps
    it on average and stores nothing. `with_master_weights` is exact and takes two more bytes a
    parameter.

    A skipped step does not advance the dice. Ranks that hold the same parameters round alike, and a
    shard of a DTensor gets the dice of its place in the whole. So do two parts of a `partition`
    with one seed, parameter by parameter: give each part its own, or put this around the partition.

    Args:
        optimizer: Any optimizer. It steps half parameters in float32, with float32 state
            (`with_state_dtype` narrows it); other parameters get its own bits.
        seed: The seed of the dice.

    Returns:
        An optimizer with the state `RoundingState(inner, applied)`.

    Raises:
        TypeError: If `optimizer` is not an optimizer, or `seed` is not whole.

    Example:
        >>> import torch
        >>> from purescale import from_torch
        >>> optimizer = with_stochastic_rounding(from_torch(torch.optim.SGD, lr=1.0))
        >>> params = {"w": torch.ones(1000, dtype=torch.bfloat16)}
        >>> grads = {"w": torch.full((1000,), -(2.0**-9), dtype=torch.bfloat16)}
        >>> params, opt_state = optimizer.step(params, grads, optimizer.init(params))
        >>> abs(params["w"].double().mean() - (1 + 2.0**-9)) < 1e-3, opt_state.applied
        (tensor(True), tensor(1))

    Source of the rule: arXiv 2502.20566.
    """
    return RoundingOptimizer(optimizer, _checked_seed(seed))


class RoundingOptimizer(Wrapper):
    """An optimizer that rounds by chance; made by `with_stochastic_rounding`."""

    made_by = "with_stochastic_rounding"

    def __init__(self, optimizer: Optimizer, seed: int) -> None:
        super().__init__(optimizer, seed)
        self._seed = seed
        self._rows: dict[tuple[Any, ...], Tensor] = {}  # of `send_once`

    def init(self, params: Tree) -> RoundingState:
        """Return the state before the first step."""
        wide = pytree.map(lambda p: p.float() if is_half(p) else p, params)
        device = next((p.device for p in pytree.tensors(params)), None)
        applied = torch.zeros((), dtype=torch.int64, device=device)
        return RoundingState(self.optimizer.init(wide), applied)

    def check_state(self, inputs: OptimizerInputs) -> None:
        """Refuse a state without a count."""
        checked_state(inputs.opt_state, RoundingState)

    def decode(self, inputs: OptimizerInputs) -> OptimizerInputs:
        """Return the step's inputs with half parameters in float32."""
        params = inputs.params
        wide = [torch.float32 if is_half(param) else param.dtype for param in params]
        return inputs.with_params_and_state(
            foreach.cast_list_saturating(params, wide), inputs.opt_state.inner
        )

    def encode(
        self, inputs: OptimizerInputs, params: list[Tensor], state: Tree
    ) -> tuple[list[Tensor], Tree]:
        """Round the parameters that were half."""
        applied, positions = inputs.opt_state.applied, positions_of(inputs)
        count = 1 + max([position.leaf_index for position in positions], default=0)
        dice = Dice.of(self._seed, applied, count)
        results, old = list(params), inputs.params
        alone = {index for index, param in enumerate(old) if is_half(param)}
        for indices in _indices_of_small(alone, old, params, positions):
            tensors, dtype = [params[n] for n in indices], old[indices[0]].dtype
            rows = self._rows_of(tensors, [positions[n] for n in indices])
            rounded = _round_leaves(tensors, dtype, dice, rows)
            for index, tensor in zip(indices, rounded, strict=True):
                results[index] = tensor
            alone.difference_update(indices)
        for index in alone:
            dtype, position = old[index].dtype, positions[index]
            one = functools.partial(_round_leaf, dtype=dtype, dice=dice, position=position)
            results[index] = on_shards(one, params[index])
        return results, RoundingState(state, applied + 1)

    def _rows_of(self, tensors: Sequence[Tensor], positions: Sequence[Position]) -> Tensor:
        """Return the `rows` of `_round_leaves`, on the device of the tensors."""
        sizes = tuple(map(Tensor.numel, tensors))
        before = itertools.accumulate(sizes[:-1], initial=0)
        firsts = [position.start - b for position, b in zip(positions, before, strict=True)]
        table = sizes, tuple(firsts), tuple([position.leaf_index for position in positions])
        return send_once(table, tensors[0].device, self._rows)


def _indices_of_small(
    halves: Iterable[int], old: list[Tensor], params: list[Tensor], positions: Sequence[Position]
) -> list[list[int]]:
    """Return the indices of parameters that are rounded together: of one kind, and so small that
    an operator takes longer than its elements, as all are on an accelerator. None in a trace.
    """
    if traced():
        return []
    kinds: dict[Any, list[int]] = {}
    for index in halves:
        new = params[index]
        small = foreach.is_on_accelerator(new) or new.numel() <= _SMALL
        if small and positions[index].dtensor is None and new.is_contiguous():
            kinds.setdefault((new.device, new.dtype, old[index].dtype), []).append(index)
    return [indices for indices in kinds.values() if len(indices) > 1]
