"""float32 master weights of half parameters: the missing 16 bits of bfloat16, or a copy."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._optim.opt_state import is_wrapped
from .._optim.optimizer import Optimizer
from .._optim.optimizer_inputs import OptimizerInputs
from .._torch import flat_buffer, foreach
from .._torch.autocast import outside_autocast
from .._torch.dtensor import any_dtensor
from .._torch.dtypes import cast_saturating, is_half
from .._torch.tracing import host_can_read
from .._tree import pytree
from .._tree.hints import document_fields
from .._tree.leaves import describe
from .._tree.matching import leaves_like
from .._tree.pytree import Leaves, Tree, TreeT
from .._wrappers.schedule_free import ScheduleFreeState
from .._wrappers.wrapper import Wrapper, checked_state, leaves_by_param, on_shards


@document_fields
class MasterState(NamedTuple):
    """The state of `with_master_weights`.

    Attributes:
        inner: The state of the inner optimizer, for float32 parameters.
        rest: A tree like the parameters: int16, the lower half of the master, for a bfloat16
            parameter; float32, the master, for a float16 one; `()` for other dtypes.
    """

    inner: Any
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
    gradients, on an accelerator 1 GiB. A step has no derivative.

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
            `partition`. Parameters of parts without masters come back as they are. Within
            `with_schedule_free` masters are of the iterate: `master_weights(opt_state.iterate,
            opt_state.inner)`.

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
    leaves, structure = pytree.flatten(params)
    parts = list(map(masters_within, state.values())) if isinstance(state, dict) else []
    if parts := [part for part in parts if isinstance(part, MasterState)]:
        named, masters_of = (
            dict(zip(pytree.dotted_names(params), leaves, strict=True)),
            dict[str, Any](),
        )
        for part in parts:
            masters_of |= master_weights({name: named.get(name) for name in part.rest}, part)
        return structure.unflatten(
            [masters_of[n] if n in masters_of else pytree.clone(leaf) for n, leaf in named.items()]
        )
    rest = _rest_of(params, state)
    masters = []
    for leaf, other in zip(leaves, rest, strict=True):
        if not isinstance(leaf, Tensor):
            masters.append(leaf)
        elif leaf.dtype is torch.bfloat16:
            masters.append(on_shards(_join_leaf, leaf, other))
        else:
            masters.append((other if leaf.dtype is torch.float16 else leaf).clone())
    return structure.unflatten(masters)


def masters_within(state: Tree) -> Tree:
    """Return the state that has masters of the parameters, within other wrappers, else the
    innermost state or that of a `with_schedule_free`, where masters are of the iterate.
    """
    while is_wrapped(state) and not isinstance(state, (MasterState, ScheduleFreeState)):
        state = state.inner
    return state


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
    leaves, structure = pytree.flatten(masters)
    pairs: list[tuple[Any, Any]] = []
    for index, leaf in enumerate(leaves):
        if leaf is not None and getattr(leaf, "dtype", None) is not torch.float32:
            raise TypeError(
                f"{pytree.path(masters, 'masters', index)} is {describe(leaf)}; a master is "
                "float32. Fix: `.float()`, or leave it out."
            )
        pairs.append((None, None) if leaf is None else _split_leaf(leaf))
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
    leaves, structure = pytree.flatten(params)
    others = leaves_like("rest", rest, "params", params, structure)
    masters: Leaves = []
    for index, (leaf, low) in enumerate(zip(leaves, others, strict=True)):
        is_upper = leaf is None or getattr(leaf, "dtype", None) is torch.bfloat16
        if not (is_upper and _is_rest_of(leaf, low)):
            raise TypeError(
                f"{pytree.path(params, 'params', index)} is {describe(leaf)}, rest there "
                f"{describe(low)}; expected bfloat16 and int16 of one shape. Fix: what "
                "`split_masters` returned, or `master_weights(params, opt_state)`."
            )
        masters.append(None if leaf is None else on_shards(_join_leaf, leaf, low))
    return structure.unflatten(masters)


# ---- bits ----------------------------------------------------------------------------------------

_MAGNITUDE = 0x7FFFFFFF
# NaNs above this would carry into the sign when they are rounded, so they lose bit 15.
_LARGEST = 0x7FFF7FFF


def _join_leaf(hi: Tensor, low: Tensor) -> Tensor:
    """Return the master of a bfloat16 tensor and its rest."""
    return (hi.float().view(torch.int32) + low.to(torch.int32)).view(torch.float32)


def _split_leaf(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bfloat16 and the int16 half of a float32 tensor."""
    bits = on_shards(_bits, master)
    return on_shards(_upper_half, bits), bits.to(torch.int16)


def _upper_half(bits: Tensor) -> Tensor:
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


def _bits(master: Tensor) -> Tensor:
    """Return the bits of a float32 tensor, changed so that no NaN is rounded to a number or inf."""
    bits = master.view(torch.int32)
    # A sum is a tenth of the work, and is almost always finite if all elements are.
    if host_can_read([master]) and math.isfinite(master.sum()):
        return bits
    return torch.where((bits & _MAGNITUDE) > _LARGEST, bits & ~0x8000, bits)


# ---- the wrapper ---------------------------------------------------------------------------------


# What the state keeps for a parameter of this dtype; () for any other.
_REST: dict[Any, torch.dtype] = {torch.bfloat16: torch.int16, torch.float16: torch.float32}


def _first_rest(param: Any) -> Any:
    """Return what the state keeps for a parameter that is its own master."""
    if not is_half(param):
        return ()
    if param.dtype is torch.float16:
        return param.detach().float()
    return torch.zeros_like(param.detach(), dtype=torch.int16)


def _is_rest_of(param: Any, rest: Any) -> bool:
    """Return True if a state may keep `rest` for this parameter."""
    dtype = _REST.get(getattr(param, "dtype", None))
    if dtype is None:  # `split_masters` gives None for None
        return rest == () if isinstance(rest, tuple) else rest is param is None
    return (
        isinstance(rest, Tensor)
        and rest.dtype is dtype
        and rest.shape == param.shape
        and rest.device == param.device
    )


def _rest_of(params: Tree, opt_state: Tree) -> Leaves:
    """Return `rest` in the order of the parameters, or refuse a state that is not of these."""
    state = checked_state(opt_state, MasterState)
    expected = "int16 for bfloat16, float32 for float16, () for other dtypes"
    return leaves_by_param(state, "rest", params, _is_rest_of, expected)


class MasterOptimizer(Wrapper):
    """An optimizer that steps masters; made by `with_master_weights`."""

    made_by = "with_master_weights"

    def init(self, params: Tree) -> MasterState:
        """Return the state before the first step. Masters are the parameters."""
        wide = pytree.map(lambda p: p.detach().float() if is_half(p) else p, params)
        leaves, structure = pytree.flatten(params)
        rest = structure.unflatten(list(map(_first_rest, leaves)))
        return MasterState(self.optimizer.init(wide), rest)

    def check_state(self, inputs: OptimizerInputs) -> None:
        """Refuse a state without the rest of these parameters."""
        _rest_of(inputs.param_structure.unflatten(inputs.params), inputs.opt_state)

    def decode(self, inputs: OptimizerInputs) -> OptimizerInputs:
        """Return the step's inputs with the masters and the inner state."""
        params, state = list(inputs.params), inputs.opt_state
        rest = inputs.param_structure.flatten_up_to(state.rest)
        halves = _of_dtype(params, torch.bfloat16)
        for index in _of_dtype(params, torch.float16):
            params[index] = rest[index]
        rows = [params[n] for n in halves], [rest[n] for n in halves]
        joined = _join_leaves(*rows, traced=inputs.context.traced)
        for index, master in zip(halves, joined, strict=True):
            params[index] = master
        return inputs.with_params_and_state(params, state.inner)

    def encode(
        self, inputs: OptimizerInputs, params: list[Tensor], state: Tree
    ) -> tuple[list[Tensor], Tree]:
        """Split masters into two halves, or round them to the nearest float16."""
        old, stored = inputs.params, list(params)
        rest = inputs.param_structure.flatten_up_to(inputs.opt_state.rest)
        halves = _of_dtype(old, torch.bfloat16)
        masters = [params[index] for index in halves]
        if inputs.context.traced or any_dtensor(masters):
            pairs = list(map(_split_leaf, masters))
        else:
            pairs = [(torch.empty_like(old[n]), torch.empty_like(rest[n])) for n in halves]
            _write_halves(masters, [hi for hi, _ in pairs], [low for _, low in pairs])
        for index, pair in zip(halves, pairs, strict=True):
            stored[index], rest[index] = pair
        for index in _of_dtype(old, torch.float16):
            stored[index] = on_shards(lambda m: cast_saturating(m, torch.float16), params[index])
            rest[index] = params[index]
        rest_tree = inputs.param_structure.unflatten(rest, inputs.opt_state.rest)
        return stored, MasterState(state, rest_tree)


def _of_dtype(params: list[Tensor], dtype: torch.dtype) -> list[int]:
    """Return the indices of the parameters of a dtype."""
    return [index for index, param in enumerate(params) if param.dtype is dtype]


def _join_leaves(params: list[Tensor], rest: list[Tensor], *, traced: bool) -> list[Tensor]:
    """Return `_join_leaf` of each, in one buffer unless traced or sharded, for the step to
    overwrite.
    """
    if traced or any_dtensor(params):
        # inductor cannot write a step into a view of another dtype, and removes a clone.
        # Subtracting 0.0 keeps every number and makes a new tensor.
        return [on_shards(_join_leaf, *pair) - 0.0 for pair in zip(params, rest, strict=True)]
    masters = list(params)
    for indices in foreach.by_kind(params):
        hi, low = ([column[i] for i in indices] for column in (params, rest))
        flat = flat_buffer.join(hi, hi).float()
        flat.view(torch.int32).add_(flat_buffer.join(low, hi))
        for index, master in zip(indices, flat_buffer.split_views(flat, hi), strict=True):
            masters[index] = master
    return masters


def _write_halves(masters: list[Tensor], params: list[Tensor], rest: list[Tensor]) -> None:
    """Write `_split_leaf` of each master into these tensors."""
    for indices in foreach.by_kind(masters):
        some = [masters[i] for i in indices]
        bits = _bits(flat_buffer.view_or_join(some))
        halves = _upper_half(bits), bits.to(torch.int16)
        for targets, half in zip((params, rest), halves, strict=True):
            foreach.detach_and_copy_(
                [targets[i] for i in indices], flat_buffer.split_views(half, some)
            )
