"""Optimizer state in a narrow dtype: chosen slots are cast up, stepped and cast down."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._optim.opt_state import OptState, is_wrapped, map_opt_states, without_wrappers
from .._optim.optimizer import Optimizer
from .._optim.optimizer_inputs import OptimizerInputs
from .._torch import foreach
from .._torch.dtypes import HALF
from .._torch.private import constant_while_compiling
from .._tree import pytree
from .._tree.pytree import Leaves, Tree
from .._wrappers.rounding import nearest_on_bits
from .._wrappers.wrapper import Wrapper, stand_ins

DTYPES = (*HALF, torch.float32)


def with_state_dtype(
    optimizer: Optimizer, dtypes: Mapping[str, torch.dtype]
) -> StateDtypeOptimizer:
    """Equal to `params, wide = optimizer.step(params, grads, up(opt_state))`, `opt_state =
    down(wide)`, where `up` and `down` cast the chosen tensors of the state between the dtype in
    which `optimizer` makes them and a narrow one.

    `down` rounds to the nearest, and finite values stay finite. The step itself is in the wide
    dtype, in pieces of the model if it is eager and donated, and has no derivative. Step counts and
    other 0-d tensors, tensors that are not real and floating, and what wrappers keep are never
    cast.

    A narrow moving average can get stuck: in bfloat16, `exp_avg_sq` with the usual decay of 0.999
    can grow but never shrink, and in float16 squares below 3e-8 become 0. Use `betas=(0.9, 0.95)`,
    or keep it wide. Around `with_master_weights`, AdamW takes 8 bytes for a bfloat16 parameter in
    place of 12: weight, master and moments.

    Args:
        optimizer: An optimizer of a class of torch.optim or of `from_formula`, with or without
            wrappers, or a `partition` of such without wrappers. A pair of `from_transformation`
            chooses its own dtypes.
        dtypes: bfloat16, float16 or float32 by name or glob of a slot of torch (`{"exp_avg*":
            ...}`), of a parameter (`{"embedding.*": ...}`), or of both with a dot
            (`{"exp_avg.*.bias": ...}`). The last match wins.

    Returns:
        An optimizer whose state is that of `optimizer` with narrow tensors.

    Raises:
        TypeError: If `optimizer` is not an optimizer, or for other dtypes.
        ValueError: From `init`, if the state is of another optimizer, a name matches nothing, or a
            dtype is wider than the one that `optimizer` makes. One of the same size is not cast.

    Example:
        >>> import torch
        >>> from purescale import from_torch
        >>> adamw = from_torch(torch.optim.AdamW, lr=1e-3)
        >>> optimizer = with_state_dtype(adamw, {"exp_avg": torch.bfloat16})
        >>> params = {"w": torch.ones(2)}
        >>> params, opt_state = optimizer.step(params, {"w": torch.ones(2)}, optimizer.init(params))
        >>> {key: slot["w"].dtype for key, slot in opt_state.slots.items()}
        {'exp_avg': torch.bfloat16, 'exp_avg_sq': torch.float32}

    Source of the rule: Micikevicius et al. (2018) for the cast up; moments in bfloat16 as in
    DeepSeek-V3 (arXiv 2412.19437), section 3.3.3.
    """
    return StateDtypeOptimizer(optimizer, dtypes)


class StateDtypeOptimizer(Wrapper):
    """An optimizer with a narrow state; made by `with_state_dtype`."""

    made_by = "with_state_dtype"
    widens_params = False

    def __init__(self, optimizer: Optimizer, dtypes: Mapping[str, torch.dtype]) -> None:
        sound = isinstance(dtypes, Mapping) and len(dtypes) > 0
        if not sound or not all([dtype in DTYPES for dtype in dtypes.values()]):
            raise TypeError(
                f"dtypes is {dtypes!r}; expected names of slots, each with torch.bfloat16, "
                'torch.float16 or torch.float32. Fix: {"exp_avg": torch.bfloat16}.'
            )
        self._dtypes = dict(dtypes)
        super().__init__(optimizer, self._dtypes)

    def init(self, params: Tree) -> Tree:
        """Return the state before the first step."""
        state = self.optimizer.init(params)
        if self.may_add_slots or not _opt_states_of(state):
            raise ValueError(
                f"with_state_dtype around {self.optimizer!r}, whose state is not that of a class "
                "of torch.optim or of from_formula, made by `init`. Fix: of a partition around "
                "each part; a pair of from_transformation chooses its own dtypes."
            )
        paths, slots = _paths_and_slots(state)
        stored = [
            self._stored_dtype(p, slot, getattr(slot, "dtype", None))
            for p, slot in zip(paths, slots, strict=True)
        ]
        narrow = [path for path, dtype in zip(paths, stored, strict=True) if dtype is not None]
        matching = {pattern for path in narrow for pattern in self._patterns(path)}
        for pattern in self._dtypes:
            if pattern not in matching:
                keys = sorted({key for key, _ in paths})
                raise ValueError(
                    f"dtypes: {pattern!r} matches nothing that is cast in the state of "
                    f"{self.optimizer!r}. It has the slots: {pytree.join_names(keys, 20)}."
                )
        return _with_slots(state, _cast(slots, stored))

    def slot_dtype(
        self, path: tuple[str, ...], slot: Any, dtype: torch.dtype
    ) -> torch.dtype | None:
        """Return the dtype in which a state keeps this slot of a parameter of this dtype."""
        return self._stored_dtype(path, slot, super().slot_dtype(path, slot, dtype))

    def _stored_dtype(
        self, path: tuple[str, ...], slot: Any, wide: torch.dtype | None
    ) -> torch.dtype | None:
        """Return the dtype in which the state keeps a slot that the inner optimizer makes in
        `wide`; None if it is never cast.
        """
        if wide is None or not _can_be_cast(slot):
            return None
        matching = self._patterns(path)
        dtype = self._dtypes[matching[-1]] if matching else wide
        if dtype.itemsize > wide.itemsize:
            raise ValueError(
                f"dtypes: {'.'.join(path)} is made in {wide}, and {dtype} is wider. Fix: of half "
                "parameters with_state_dtype(with_master_weights(optimizer), dtypes)."
            )
        return dtype if dtype.itemsize < wide.itemsize else wide

    def _patterns(self, path: tuple[str, ...]) -> list[str]:
        """Return the patterns that match a part of a leaf's path, or all of it."""
        return _matching((*path, ".".join(path)), tuple(self._dtypes))

    # ---- the step

    def inner_state(self, opt_state: Tree) -> Tree:
        """Return the state itself, which has narrow tensors and no state within."""
        return opt_state

    def check_state(self, inputs: OptimizerInputs) -> None:
        """Refuse a state in other dtypes."""
        paths, slots = _paths_and_slots(inputs.opt_state)
        for path, slot, wide in zip(paths, slots, self._wide_dtypes(inputs), strict=True):
            expected = self._stored_dtype(path, slot, wide)
            if expected is not None and slot.dtype is not expected:
                raise TypeError(
                    f"opt_state: {'.'.join(path)} is {slot.dtype}, expected {expected}. Fix: "
                    "`opt_state = optimizer.init(params)`, or cast it there."
                )

    def _decoded_stand_ins(self, inputs: OptimizerInputs) -> OptimizerInputs:
        """Return inputs with the metadata of `decode(inputs)`."""
        wide = stand_ins(_paths_and_slots(inputs.opt_state)[1], self._wide_dtypes(inputs))
        return inputs.with_state(_with_slots(inputs.opt_state, wide))

    def decode(self, inputs: OptimizerInputs) -> OptimizerInputs:
        """Return the step's inputs with the state in the dtypes of the inner optimizer."""
        wide = _cast(_paths_and_slots(inputs.opt_state)[1], self._wide_dtypes(inputs))
        return inputs.with_state(_with_slots(inputs.opt_state, wide))

    def encode(
        self, inputs: OptimizerInputs, params: list[Tensor], state: Tree
    ) -> tuple[list[Tensor], Tree]:
        """Cast the state back to the dtypes that it had."""
        before, after = (_paths_and_slots(each)[1] for each in (inputs.opt_state, state))
        stored = [slot.dtype if _can_be_cast(slot) else None for slot in before]
        return params, _with_slots(state, _cast(after, stored))

    def _wide_dtypes(self, inputs: OptimizerInputs) -> list[torch.dtype | None]:
        """Return the dtype in which the inner optimizer makes each slot, None for what is never
        cast.
        """
        params = dict(zip(inputs.param_structure.names, inputs.params, strict=True))
        return [
            super(StateDtypeOptimizer, self).slot_dtype(path, slot, params[path[-1]].dtype)
            if path[-1] in params and _can_be_cast(slot)
            else None
            for path, slot in zip(*_paths_and_slots(inputs.opt_state), strict=True)
        ]


@constant_while_compiling
def _matching(texts: tuple[str, ...], patterns: tuple[str, ...]) -> list[str]:
    return [p for p in patterns if any([fnmatch.fnmatchcase(text, p) for text in texts])]


# ---- the slots of a state ------------------------------------------------------------------------


def _paths_and_slots(state: Tree) -> tuple[list[tuple[str, str]], Leaves]:
    """Return the slots of a state in order, and for each its name and that of its parameter."""
    paths, slots = [], []
    for opt_state in _opt_states_of(state):
        for key, tree in opt_state.slots.items():
            paths += [(key, name) for name in pytree.dotted_names(tree)]
            slots += pytree.flatten(tree)[0]
    return paths, slots


def _with_slots(state: Tree, slots: Leaves) -> Tree:
    """Return the state with other slots."""
    if is_wrapped(state):
        return state._replace(inner=_with_slots(state.inner, slots))
    remaining = iter(slots)
    return map_opt_states(
        lambda each, _: each._replace(slots=pytree.map(lambda _: next(remaining), each.slots)),
        state,
    )


def _can_be_cast(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim > 0


def _cast(leaves: Leaves, dtypes: Sequence[torch.dtype | None]) -> Leaves:
    """Return leaves in these dtypes. A leaf with None, or of this dtype already, is returned as it
    is.
    """
    new = {
        index: dtype
        for index, dtype in enumerate(dtypes)
        if dtype is not None and leaves[index].dtype is not dtype
    }
    tensors = [leaves[index] for index in new]
    if torch.compiler.is_compiling():
        results = [
            nearest_on_bits(tensor, dtype) if dtype in HALF else tensor.to(dtype)
            for tensor, dtype in zip(tensors, new.values(), strict=True)
        ]
    else:
        results = foreach.cast_list_saturating(tensors, list(new.values()))
    cast = dict(zip(new, results, strict=True))
    return [cast.get(index, leaf) for index, leaf in enumerate(leaves)]


def _opt_states_of(state: Tree) -> list[OptState]:
    """Return the states of torch's classes in a state, which may be of wrappers and of a
    `partition`; an empty list for the state of any other optimizer.
    """
    state = without_wrappers(state)
    parts = list(state.values()) if type(state) is dict else [state]
    return parts if all(isinstance(part, OptState) for part in parts) else []
