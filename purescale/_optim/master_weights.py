"""float32 master weights of half parameters: the missing 16 bits of bfloat16, or a copy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._optim.opt_state import described, is_wrapped
from .._optim.protocol import Optimizer
from .._optim.step_inputs import StepInputs
from .._optim.wrapper import (
    Wrapper,
    checked_state,
    is_half,
    with_params,
    with_stand_ins,
)
from .._torch import dtensor, foreach
from .._torch.autocast import outside_autocast
from .._torch.dtensor import any_dtensor
from .._torch.dtypes import saturating
from .._torch.half_bits import bitcast
from .._torch.tracing import host_can_read, traced
from .._tree import tree as _tree
from .._tree.tree import Leaves, Tree, TreeDef, TreeT


class MasterState(NamedTuple):
    """The state of `with_master_weights`."""

    inner: Any  # the state of the inner optimizer, for float32 parameters
    # A tree like the parameters: for bfloat16 the lower half of the master as int16, for float16
    # the float32 master, for other dtypes ().
    rest: Tree


def with_master_weights(optimizer: Optimizer) -> MasterOptimizer:
    """Equal to `masters, inner = optimizer.step(masters, grads.float(), inner)`, `params =
    masters.to(dtype)`, where `masters` are float32 and never leave the state.

    A bfloat16 weight has 8 bits, so an update of less than 1/512 of it is lost when it is added:
    AdamW at a rate of 1e-3 never moves a weight of 1.0. Masters have 24 bits. The state stores only
    the 16 bits that a bfloat16 parameter lacks (4 bytes in all, not 6), and after any number of
    steps `master_weights(params, opt_state)` has the bits of a float32 run on the same gradients.

    Masters start as the parameters. To start from float32 weights, take `params, rest =
    split_masters(weights)` and `optimizer.init(params)._replace(rest=rest)`. Parameters of float32,
    of wider dtypes and complex ones are stepped as by `optimizer`. An eager donated step of a class
    of torch.optim goes through the model in pieces and takes at most 64 MiB beside state and
    gradients. A step has no derivative.

    Args:
        optimizer: Any optimizer. It steps the masters, and its state is in float32
            (`with_state_dtype` narrows it).

    Returns:
        An optimizer with the state `MasterState(inner, rest)`.

    Raises:
        TypeError: If `optimizer` is not an optimizer; from `step`, if parameters have other dtypes
            than those that the state was made for.

    Example:
        >>> import torch
        >>> from purescale import from_torch
        >>> optimizer = with_master_weights(from_torch(torch.optim.SGD, lr=2.0**-10))
        >>> params = {"w": torch.ones(1, dtype=torch.bfloat16)}
        >>> opt_state, grads = optimizer.init(params), {"w": torch.ones(1, dtype=torch.bfloat16)}
        >>> for _ in range(3):
        ...     params, opt_state = optimizer.step(params, grads, opt_state)
        >>> params["w"], opt_state.rest["w"]
        (tensor([0.9961], dtype=torch.bfloat16), tensor([16384], dtype=torch.int16))
        >>> master_weights(params, opt_state)["w"]
        tensor([0.9971])

    Source of the rule: Micikevicius et al., Mixed Precision Training (2018); halves of masters as
    in FlashOptim (arXiv 2602.23349), without its loss of bits.
    """
    return MasterOptimizer(optimizer)


@outside_autocast()
def master_weights(params: TreeT, opt_state: MasterState) -> TreeT:
    """Return the float32 masters in a state of `with_master_weights`, in fresh memory: equal to
    `join_masters(params, opt_state.rest)` for bfloat16 parameters, to the stored master for
    float16, to the parameter for other dtypes.

    They are for evaluation, comparison, and checkpoints that others read.

    Args:
        params: The parameters.
        opt_state: The state that belongs to them, also within other wrappers or in parts of a
            `partition`. Parameters of parts without masters come back as they are.

    Returns:
        A tree like `params`.

    Raises:
        TypeError: If the state has no masters, or belongs to parameters of other dtypes.

    Example:
        >>> import torch
        >>> from purescale import from_torch
        >>> optimizer = with_master_weights(from_torch(torch.optim.SGD, lr=0.5))
        >>> params = {"w": torch.ones(2, dtype=torch.float16)}
        >>> master_weights(params, optimizer.init(params))
        {'w': tensor([1., 1.])}
    """
    state = masters_within(opt_state)
    leaves, structure = _tree.flatten(params)
    if isinstance(state, dict) and any(
        isinstance(masters_within(part), MasterState) for part in state.values()
    ):
        return structure.unflatten(_of_parts(_tree.names(params), leaves, state))
    _, rest = _state_and_rest(state, structure)
    _check_rest(_tree.names(params), leaves, rest)
    masters = []
    for leaf, kept in zip(leaves, rest, strict=True):
        if not isinstance(leaf, Tensor):
            masters.append(leaf)
            continue
        local, low = dtensor.shard(leaf), dtensor.shard(kept)
        if leaf.dtype is torch.bfloat16:
            made = _joined(local, low)
        else:
            made = (low if leaf.dtype is torch.float16 else local).clone()
        masters.append(dtensor.from_local_like(leaf, made))
    return structure.unflatten(masters)


def masters_within(state: Tree) -> Tree:
    """Return the state that has masters, within other wrappers, else the innermost state."""
    while not isinstance(state, MasterState) and is_wrapped(state):
        state = state.inner
    return state


def _of_parts(names: Sequence[str], leaves: Leaves, states: Mapping[str, Any]) -> Leaves:
    """Return the masters in the parts of a partition, by dotted name, and copies of other
    leaves.
    """
    named = dict(zip(names, leaves, strict=True))
    found = {}
    for state in map(masters_within, states.values()):
        if isinstance(state, MasterState):
            own = {name: named.get(name) for name in state.rest}
            found.update(master_weights(own, state))
    return [found[name] if name in found else _tree.clone(named[name]) for name in names]


@outside_autocast()
def split_masters(masters: TreeT) -> tuple[TreeT, TreeT]:
    """Equal to `hi, low` of each leaf where `low = bits & 0xffff` as int16 and `hi = (bits - low)
    >> 16` are the two halves of the bits of a float32: `hi` as bfloat16 is the leaf rounded to the
    nearest, ties away from zero.

    `join_masters` restores the same bits, also of subnormal numbers and infinities. Numbers within
    half a step of the largest float32 are inf in bfloat16. A NaN stays NaN; one whose payload would
    carry into the sign, like a GPU's, loses bit 15, and a signalling NaN may become inf in
    bfloat16.

    Args:
        masters: A tree of float32 tensors.

    Returns:
        Two trees like `masters`, bfloat16 and int16, in fresh memory.

    Raises:
        TypeError: If a leaf has another dtype.

    Example:
        >>> import torch
        >>> params, rest = split_masters({"w": torch.tensor([1.0, 1.001])})
        >>> params["w"].tolist(), rest["w"].tolist()
        ([1.0, 1.0], [0, 8389])
    """
    leaves, structure = _tree.flatten(masters)
    pairs = []
    for index, leaf in enumerate(leaves):
        if leaf is None:
            pairs.append((None, None))
            continue
        if not isinstance(leaf, Tensor) or leaf.dtype is not torch.float32:
            raise TypeError(
                f"{_tree.path(masters, 'masters', index)} is {described(leaf)}; a master is "
                "float32. Fix: `.float()`, or leave it out."
            )
        halves = _split(dtensor.shard(leaf))
        pairs.append(tuple(dtensor.from_local_like(leaf, half) for half in halves))
    return structure.unflatten([a for a, _ in pairs]), structure.unflatten([b for _, b in pairs])


@outside_autocast()
def join_masters(params: TreeT, rest: Tree) -> TreeT:
    """Equal to `((hi << 16) + low)` of each leaf, as float32: the inverse of `split_masters`.

    Args:
        params: A tree of bfloat16 tensors.
        rest: A tree of the same structure and shapes, int16.

    Returns:
        A tree of float32 tensors in fresh memory.

    Raises:
        TypeError: If a leaf has another dtype.
        ValueError: If the trees differ in structure.

    Example:
        >>> import torch
        >>> weights = {"w": torch.tensor([1.0, 1.001])}
        >>> join_masters(*split_masters(weights))
        {'w': tensor([1.0000, 1.0010])}
    """
    leaves, structure = _tree.flatten(params)
    others = _tree.leaves_like("rest", rest, "params", params, structure)
    for index, (leaf, low) in enumerate(zip(leaves, others, strict=True)):
        if leaf is None and low is None:
            continue
        if getattr(leaf, "dtype", None) is not torch.bfloat16 or not _fits(leaf, low):
            raise TypeError(
                f"{_tree.path(params, 'params', index)} is {described(leaf)}, rest there "
                f"{described(low)}; expected bfloat16 and int16 of one shape. Fix: what "
                "`split_masters` returned, or `master_weights(params, opt_state)` for a state with "
                "other dtypes."
            )
    return structure.unflatten(
        [
            leaf
            if leaf is None
            else dtensor.from_local_like(leaf, _joined(dtensor.shard(leaf), dtensor.shard(low)))
            for leaf, low in zip(leaves, others, strict=True)
        ]
    )


# ---- bits ----------------------------------------------------------------------------------------

_MAGNITUDE = 0x7FFFFFFF
# NaNs above this would carry into the sign when they are rounded, so they lose bit 15.
_LARGEST = 0x7FFF7FFF


def _joined(hi: Tensor, low: Tensor) -> Tensor:
    """Return the master of a bfloat16 tensor and its rest."""
    bits = (bitcast(hi, torch.int16).to(torch.int32) << 16) + low
    return bitcast(bits, torch.float32)


def _split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bfloat16 and the int16 half of a float32 tensor."""
    bits = _bits(master)
    hi = bitcast(((bits + 0x8000) >> 16).to(torch.int16), torch.bfloat16)
    return hi, bits.to(torch.int16)


def _bits(master: Tensor) -> Tensor:
    """Return the bits of a float32 tensor, changed so that no NaN is rounded to a number or inf."""
    bits = bitcast(master, torch.int32)
    # A sum is a tenth of the work, and is almost always finite if all elements are.
    if host_can_read([master]) and math.isfinite(master.sum()):
        return bits
    return torch.where((bits & _MAGNITUDE) > _LARGEST, bits & ~0x8000, bits)


# ---- the wrapper ---------------------------------------------------------------------------------


def _rest_of(leaf: Any) -> Any:
    if not is_half(leaf):
        return ()
    if leaf.dtype is torch.float16:
        return leaf.detach().float()
    return torch.zeros_like(leaf.detach(), dtype=torch.int16)


def _fits(leaf: Any, kept: Any) -> bool:
    """Return True if `kept` is what a state stores for the parameter `leaf`."""
    kinds: dict[Any, torch.dtype] = {torch.bfloat16: torch.int16, torch.float16: torch.float32}
    expected = kinds.get(getattr(leaf, "dtype", None))
    if expected is None:  # a None among the parameters may be one in `split_masters` too
        return (isinstance(kept, tuple) and not kept) or leaf is kept is None
    return (
        isinstance(kept, Tensor)
        and kept.dtype is expected
        and kept.shape == leaf.shape
        and kept.device == leaf.device
    )


def _check_rest(names: Sequence[str], params: Leaves, rest: Leaves) -> None:
    for name, leaf, kept in zip(names, params, rest, strict=True):
        if _fits(leaf, kept):
            continue
        raise TypeError(
            f"params: {name} is {described(leaf)}, and the state keeps {described(kept)} for its "
            "master; expected int16 for bfloat16, float32 for float16, () for other dtypes, of "
            "the same shape on the same device. Likely cause: parameters that were cast or changed "
            "after `init`. Fix: `opt_state = optimizer.init(params)` for these params."
        )


class MasterOptimizer(Wrapper):
    """An optimizer that steps masters; made by `with_master_weights`."""

    def init(self, params: Tree) -> MasterState:
        """Return the state before the first step. Masters are the parameters."""
        leaves, structure = _tree.flatten(params)
        wide = [leaf.detach().float() if is_half(leaf) else leaf for leaf in leaves]
        rest = structure.unflatten(list(map(_rest_of, leaves)))
        return MasterState(self.optimizer.init(structure.unflatten(wide)), rest)

    def stand_ins(self, inputs: StepInputs) -> StepInputs:
        """Return the step's inputs with masters without values and the inner state."""
        state, rest = _state_and_rest(inputs.opt_state, inputs.structure)
        _check_rest(inputs.names, inputs.params, rest)
        return with_stand_ins(inputs, state.inner)

    def widen(self, inputs: StepInputs) -> StepInputs:
        """Return the step's inputs with the masters and the inner state."""
        state, rest = _state_and_rest(inputs.opt_state, inputs.structure)
        params = list(inputs.params)
        split = _indices(params, torch.bfloat16)
        masters = _masters([params[i] for i in split], [rest[i] for i in split])
        for index, master in zip(split, masters, strict=True):
            params[index] = master
        for index in _indices(params, torch.float16):
            params[index] = rest[index]
        return with_params(inputs, params, state.inner)

    def narrow(
        self,
        inputs: StepInputs,
        stepped: tuple[Leaves, Any],
        *,
        write: bool,
    ) -> tuple[Leaves, Any]:
        """Split masters into two halves, or round them to the nearest float16."""
        _, rest = _state_and_rest(inputs.opt_state, inputs.structure)
        masters, inner = stepped
        params = list(masters)
        split = _indices(inputs.params, torch.bfloat16)
        wide = [masters[i] for i in split]
        if write:
            halves = [inputs.params[i] for i in split], [rest[i] for i in split]
            _write_halves(wide, *halves)
        else:
            halves = _halves(wide)
        for index, half, low in zip(split, *halves, strict=True):
            params[index], rest[index] = half, low
        for index in _indices(inputs.params, torch.float16):
            half = saturating(dtensor.shard(masters[index]), torch.float16)
            params[index] = dtensor.from_local_like(inputs.params[index], half)
            rest[index] = masters[index]
        return params, MasterState(inner, inputs.structure.unflatten(rest))


def _state_and_rest(opt_state: Tree, structure: TreeDef) -> tuple[MasterState, Leaves]:
    """Return the checked state, and `rest` in the order of the parameters."""
    state = checked_state(opt_state, MasterState)
    try:
        rest = structure.flatten_up_to(state.rest)
    except (ValueError, KeyError):
        raise ValueError(
            "opt_state.rest has another structure than params. Likely cause: the state of other "
            "parameters. Fix: `opt_state = optimizer.init(params)` for these params."
        ) from None
    return state, rest


def _indices(params: Leaves, dtype: torch.dtype) -> list[int]:
    return [index for index, leaf in enumerate(params) if getattr(leaf, "dtype", None) is dtype]


def _masters(params: list[Tensor], rest: list[Tensor]) -> list[Tensor]:
    """Return `_joined` of each, in one buffer unless traced or sharded. The step overwrites it."""
    if traced() or any_dtensor(params):
        pairs = [
            (dtensor.shard(hi), dtensor.shard(low)) for hi, low in zip(params, rest, strict=True)
        ]
        # inductor cannot write a step into a view of another dtype, and removes a clone.
        # Subtracting 0.0 keeps every number and makes a new tensor.
        made = [_joined(*pair) - 0.0 for pair in pairs]
        return [dtensor.from_local_like(leaf, new) for leaf, new in zip(params, made, strict=True)]
    masters = list(params)
    for indices in foreach.by_kind(params):
        hi = [params[i] for i in indices]
        bits = hi[0].new_empty(sum(map(Tensor.numel, hi)), dtype=torch.int32)
        low = torch.empty_like(bits)
        made = foreach.views(bits.view(torch.float32), hi)
        foreach.copy_(made, hi)
        foreach.copy_(foreach.views(low, hi), [rest[i] for i in indices])
        bits.add_(low)
        for index, master in zip(indices, made, strict=True):
            masters[index] = master
    return masters


def _write_halves(masters: list[Tensor], params: list[Tensor], rest: list[Tensor]) -> None:
    """Write `_split` of each master into these tensors."""
    for indices in foreach.by_kind(masters):
        given = [masters[i] for i in indices]
        bits = _bits(foreach.gather(given))
        foreach.copy_([rest[i] for i in indices], foreach.views(bits, given))
        bits = (bits + 0x8000).bitwise_right_shift_(16)
        halves = [params[i].view(torch.int16) for i in indices]
        foreach.copy_(halves, foreach.views(bits, given))


def _halves(masters: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return `_split` of each master."""
    pairs = [_split(dtensor.shard(master)) for master in masters]
    split = [
        [dtensor.from_local_like(m, half) for half in pair]
        for m, pair in zip(masters, pairs, strict=True)
    ]
    return [a for a, _ in split], [b for _, b in split]
