"""float32 masters of half parameters: the 16 bits that bfloat16 lacks, a copy for float16."""

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
    chosen_like,
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
from .._tree.tree import Leaves, Tree


class MasterState(NamedTuple):
    """What `with_master_weights` remembers."""

    inner: Any  # the state of the inner optimizer, for float32 parameters
    # like the parameters: of bfloat16 the lower half of the master, int16; of float16 the master,
    # float32; of others ()
    rest: Tree


def with_master_weights(optimizer: Optimizer) -> MasterOptimizer:
    """Equal to `masters, inner = optimizer.step(masters, grads.float(), inner)`, `params =
    masters.to(dtype)`, where `masters` are float32 and never leave the state.

    A bfloat16 weight has 8 bits, so an update of less than 1/256 of it is lost when it is added:
    AdamW at a rate of 1e-3 never moves a weight of 1.0. Masters have 24. Of a bfloat16 parameter
    only the 16 bits that it lacks are kept: parameter and rest are 4 bytes in place of 6, and after
    any number of steps `master_weights(params, opt_state)` has the bits of a run in float32 on the
    same gradients.

    `optimizer`: of any kind. It steps masters, and its state for them is in float32
    (`with_state_dtype` makes that narrow). The state is `MasterState(inner, rest)`. For parameters
    of float32 and wider, and complex ones, nothing is kept, and steps have the bits of `optimizer`.
    Masters begin as the parameters; to begin with float32 weights, `params, rest =
    split_masters(weights)` and `optimizer.init(params)._replace(rest=rest)`. The master of a
    float16 parameter is in the state alone: what is written into the parameter between steps is
    lost; of bfloat16 it is the upper half of the master.

    An eager donated step of a class of torch.optim goes through the model in pieces: it takes at
    most 64 MiB beside state and gradients, whatever the size. Parameters are cut where a class
    moves each element by itself and they are contiguous; else the largest one counts. A compiled
    step has no such bound. A step has no derivative.

    Raises `TypeError` for what is no optimizer; `step` for parameters of another dtype than those
    that the state was made for.

    >>> import torch
    >>> from purescale import from_torch
    >>> optimizer = with_master_weights(from_torch(torch.optim.SGD, lr=2.0**-10))
    >>> params = {"w": torch.ones(1, dtype=torch.bfloat16)}
    >>> opt_state, grads = optimizer.init(params), {"w": torch.ones(1, dtype=torch.bfloat16)}
    >>> for _ in range(3):
    ...     params, opt_state = optimizer.step(params, grads, opt_state)
    >>> params["w"], opt_state.rest["w"], master_weights(params, opt_state)["w"]
    (tensor([0.9961], dtype=torch.bfloat16), tensor([16384], dtype=torch.int16), tensor([0.9971]))

    Source of the rule: Micikevicius et al., Mixed Precision Training (2018); halves of masters as
    in FlashOptim (arXiv 2602.23349), without its loss of bits.
    """
    return MasterOptimizer(optimizer)


@outside_autocast()
def master_weights(params: Tree, opt_state: MasterState) -> Tree:
    """The float32 masters of a state of `with_master_weights`, in fresh memory: equal to
    `join_masters(params, opt_state.rest)` where parameters are bfloat16, to the master itself of
    float16, to the parameter of other dtypes.

    For evaluation, checkpoints for others, and comparison. The state may be within that of other
    wrappers, or in parts of a `partition`; parameters of its other parts come back as they are.

    Raises `TypeError` for another state, and for one of parameters of another dtype.

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


def masters_within(state: Any) -> Any:
    """The state that has masters, within those of other wrappers; else that inside of all."""
    while not isinstance(state, MasterState) and is_wrapped(state):
        state = state.inner
    return state


def _of_parts(names: Sequence[str], leaves: Leaves, states: Mapping[str, Any]) -> Leaves:
    """The masters in the parts of a partition, which are by dotted name; of others the leaves."""
    named = dict(zip(names, leaves, strict=True))
    found = {}
    for state in map(masters_within, states.values()):
        if isinstance(state, MasterState):
            own = {name: named.get(name) for name in state.rest}
            found.update(master_weights(own, state))
    return [found[name] if name in found else _tree.clone(named[name]) for name in names]


@outside_autocast()
def split_masters(masters: Tree) -> tuple[Tree, Tree]:
    """Equal to `hi, low` of each leaf where `low = bits & 0xffff` as int16 and `hi = (bits - low)
    >> 16` are the two halves of the bits of a float32: `hi` as bfloat16 is the leaf rounded to the
    nearest, ties away from zero.

    `masters`: a tree of float32 tensors. Two trees of its structure, bfloat16 and int16, in fresh
    memory. `join_masters` gives the same bits again, of subnormal numbers and infinities too.
    Numbers within half a step of the largest float32 show as inf in bfloat16. A NaN shows as NaN
    (a signalling one, which no arithmetic makes, may as inf); one whose payload would carry into
    the sign, as that of a GPU, loses bit 15 of it.

    Raises `TypeError` for a leaf of another dtype.

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
def join_masters(params: Tree, rest: Tree) -> Tree:
    """Equal to `((hi << 16) + low)` of each leaf, as float32: the inverse of `split_masters`.

    `params` bfloat16, `rest` int16, of one structure and the same shapes; fresh memory.

    Raises `TypeError` for other dtypes, `ValueError` where the trees differ.

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
                "`split_masters` returned; of a state with other dtypes `master_weights(params, "
                "opt_state)`."
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
# NaNs of more than this would carry into the sign when they are rounded: they lose bit 15.
_LARGEST = 0x7FFF7FFF


def _joined(hi: Tensor, low: Tensor) -> Tensor:
    """The master of a bfloat16 tensor and its rest."""
    bits = (bitcast(hi, torch.int16).to(torch.int32) << 16) + low
    return bitcast(bits, torch.float32)


def _split(master: Tensor) -> tuple[Tensor, Tensor]:
    """bfloat16 and int16 of a float32 tensor."""
    bits = _bits(master)
    hi = bitcast(((bits + 0x8000) >> 16).to(torch.int16), torch.bfloat16)
    return hi, bits.to(torch.int16)


def _bits(master: Tensor) -> Tensor:
    """The bits of a float32 tensor, of which no NaN would be rounded to another kind of number."""
    bits = bitcast(master, torch.int32)
    # A sum is a tenth of the work, and finite of almost all that is.
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
    """Whether this is what is kept of a parameter."""
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
            f"params: {name} is {described(leaf)}, and what the state keeps of its master is "
            f"{described(kept)}; expected int16 of bfloat16, float32 of float16, () of others, in "
            "one shape on one device. Likely cause: parameters that were cast or changed after "
            "`init`. Fix: `opt_state = optimizer.init(params)` of these."
        )


class MasterOptimizer(Wrapper):
    """An optimizer that steps masters; made by `with_master_weights`."""

    def init(self, params: Tree) -> MasterState:
        """The state of an optimizer that has made no step: masters are the parameters."""
        leaves, structure = _tree.flatten(params)
        wide = [leaf.detach().float() if is_half(leaf) else leaf for leaf in leaves]
        rest = structure.unflatten(list(map(_rest_of, leaves)))
        return MasterState(self.optimizer.init(structure.unflatten(wide)), rest)

    def stand_ins(self, inputs: StepInputs) -> StepInputs:
        """Masters without values, and the inner state."""
        state, rest = _state_and_rest(inputs.opt_state, inputs.structure)
        _check_rest(inputs.names, inputs.params, rest)
        return with_stand_ins(inputs, state.inner)

    def widen(self, inputs: StepInputs) -> StepInputs:
        """Masters, and the inner state."""
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
        skip: Tensor | None,
        stepped: tuple[list[Any], Any],
        *,
        write: bool,
    ) -> tuple[list[Any], Any]:
        """Masters in two halves, or rounded to the nearest."""
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
            params[index] = chosen_like(inputs.params[index], half, skip)
            rest[index] = masters[index]
        return params, MasterState(inner, inputs.structure.unflatten(rest))


def _state_and_rest(opt_state: Any, structure: Any) -> tuple[MasterState, Leaves]:
    """The state, refused if it is another's, and what it keeps in the order of the parameters."""
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
    """The places of the parameters of this dtype."""
    return [index for index, leaf in enumerate(params) if getattr(leaf, "dtype", None) is dtype]


def _masters(params: list[Tensor], rest: list[Tensor]) -> list[Tensor]:
    """`_joined` of each. Outside of a trace in one piece of memory, which the step overwrites."""
    if traced() or any_dtensor(params):
        pairs = [
            (dtensor.shard(hi), dtensor.shard(low)) for hi, low in zip(params, rest, strict=True)
        ]
        # inductor cannot write a step into a view of another dtype, and leaves out a clone: less
        # 0.0 every number is itself.
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
    """`_split` of each, written into these."""
    for indices in foreach.by_kind(masters):
        given = [masters[i] for i in indices]
        bits = _bits(foreach.gather(given))
        foreach.copy_([rest[i] for i in indices], foreach.views(bits, given))
        bits = (bits + 0x8000).bitwise_right_shift_(16)
        halves = [params[i].view(torch.int16) for i in indices]
        foreach.copy_(halves, foreach.views(bits, given))


def _halves(masters: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """`_split` of each."""
    pairs = [_split(dtensor.shard(master)) for master in masters]
    split = [
        [dtensor.from_local_like(m, half) for half in pair]
        for m, pair in zip(masters, pairs, strict=True)
    ]
    return [a for a, _ in split], [b for _, b in split]
