"""Optimizer state in a narrow dtype: chosen slots are cast up, stepped and cast down."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._optim.opt_state import (
    OptState,
    is_wrapped,
    map_opt_states,
    opt_states_of,
    without_wrappers,
)
from .._optim.partition import PartitionOptimizer
from .._optim.step_inputs import StepInputs
from .._optim.updater import Optimizer
from .._torch import foreach
from .._torch.dtypes import HALF, nearest_on_bits
from .._torch.tracing import constant_while_compiling
from .._tree import tree as _tree
from .._tree.tree import Leaves, Tree
from .._wrappers.wrapper import Piece, Wrapper, stand_ins

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
        optimizer: Any optimizer.
        dtypes: bfloat16, float16 or float32 by name or glob of a slot of torch (`{"exp_avg*":
            ...}`), of a parameter (`{"embedding.*": ...}`), of a field of another state (`{"mu":
            ...}`), or of both with a dot (`{"exp_avg.*.bias": ...}`). The last match wins.

    Returns:
        An optimizer whose state is that of `optimizer` with narrow tensors.

    Raises:
        TypeError: If `optimizer` is not an optimizer, or for other dtypes.
        ValueError: If a part of a `partition` has wrappers of its own; from `init`, if a name
            matches nothing, or a dtype is wider than the one that `optimizer` makes. One of the
            same size is not cast.

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
        if self.may_add_slots:
            raise ValueError(
                f"with_state_dtype around {optimizer!r}, where a class of your own makes its state "
                "in its first step. Fix: a class of torch.optim, or from_formula."
            )
        _check_parts(optimizer)

    def init(self, params: Tree) -> Tree:
        """Return the state before the first step."""
        state = self.optimizer.init(params)
        paths, slots = _paths(state), _castable(state)
        self._check_all_match(paths, slots)
        return _with_castable(state, _cast(slots, list(map(self._stored_dtype, paths, slots))))

    def slot_dtype(
        self, path: tuple[str, ...], slot: Any, dtype: torch.dtype
    ) -> torch.dtype | None:
        """Return the dtype in which a state keeps this slot of a parameter of this dtype."""
        return self._stored_dtype(path, slot, super().slot_dtype(path, slot, dtype))

    def _stored_dtype(
        self, path: tuple[str, ...], slot: Any, wide: torch.dtype | None = None
    ) -> torch.dtype | None:
        """Return the dtype in which the state keeps a slot that the inner optimizer makes in
        `wide`, by default its own dtype; None if it is never cast.
        """
        if not _can_be_cast(slot):
            return None
        wide = wide or slot.dtype
        matching = self._patterns(path)
        dtype = self._dtypes[matching[-1]] if matching else wide
        if dtype.itemsize > wide.itemsize:
            raise ValueError(
                f"dtypes: {'.'.join(path)} is made in {wide}, and {dtype} is wider. Likely cause: "
                "parameters in half precision, which give their dtype to the state. Fix: "
                "with_state_dtype(with_master_weights(optimizer), dtypes)."
            )
        return dtype if dtype.itemsize < wide.itemsize else wide

    def _patterns(self, path: tuple[str, ...]) -> list[str]:
        """Return the patterns that match a part of a leaf's path, or all of it."""
        return _matching((*path, ".".join(path)), tuple(self._dtypes))

    def _check_all_match(self, paths: list[tuple[str, ...]], slots: Leaves) -> None:
        to_cast = [path for path, slot in zip(paths, slots, strict=True) if _can_be_cast(slot)]
        matched = {pattern for path in to_cast for pattern in self._patterns(path)}
        for pattern in [pattern for pattern in self._dtypes if pattern not in matched]:
            never = any([pattern in self._patterns(path) for path in paths])
            names = _tree.join_names(sorted({path[0] for path in to_cast if path}), 20)
            name, _, key = pattern.rpartition(".")
            turned = f"{key}.{name}"
            fits = any([_matching((".".join(path),), (turned,)) for path in to_cast])
            raise ValueError(
                f"dtypes: {pattern!r} matches {'only what is never cast' if never else 'nothing'} "
                f"in the state of {self.optimizer!r}. It has the slots: {names}; step counts and "
                f"other 0-d tensors are never cast.{f' Fix: {turned!r}.' if fits else ''}"
            )

    # ---- the step

    def inner_state(self, opt_state: Tree) -> Tree:
        """Return the state itself, which has narrow tensors and no state within."""
        return opt_state

    def plan(self, inputs: StepInputs) -> list[Piece]:
        """Return the pieces of a step. Refuse a state in other dtypes, and what the inner optimizer
        refuses.
        """
        state, slots = inputs.opt_state, _castable(inputs.opt_state)
        if not torch.compiler.is_dynamo_compiling():  # Dynamo traces neither optree nor fnmatch
            self._check_dtypes(_paths(state), slots, self._wide_dtypes(inputs, slots))
        return super().plan(inputs)

    def _as_decoded(self, inputs: StepInputs) -> StepInputs:
        """Return inputs with the metadata of `decode(inputs)`."""
        slots = _castable(inputs.opt_state)
        wide = stand_ins(slots, self._wide_dtypes(inputs, slots))
        return inputs.with_params(inputs.params, _with_castable(inputs.opt_state, wide))

    def decode(self, inputs: StepInputs) -> StepInputs:
        """Return the step's inputs with the state in the dtypes of the inner optimizer."""
        slots = _castable(inputs.opt_state)
        wide = _cast(slots, self._wide_dtypes(inputs, slots))
        return inputs.with_params(inputs.params, _with_castable(inputs.opt_state, wide))

    def encode(
        self, inputs: StepInputs, params: list[Tensor], state: Tree
    ) -> tuple[list[Tensor], Tree]:
        """Cast the state back to the dtypes that it had."""
        stored = [_castable_dtype(slot) for slot in _castable(inputs.opt_state)]
        return params, _with_castable(state, _cast(_castable(state), stored))

    def _wide_dtypes(self, inputs: StepInputs, slots: Leaves) -> list[torch.dtype | None]:
        """Return the dtype in which the inner optimizer makes each tensor of its state, None for
        what is never cast.
        """
        if opt_states_of(inputs.opt_state):
            params = dict(zip(inputs.names, inputs.params, strict=True))
            wide_dtype = super().slot_dtype
            pairs = zip(_paths(inputs.opt_state), slots, strict=True)
            return [
                wide_dtype(path, slot, params[path[-1]].dtype)
                if path[-1] in params and _can_be_cast(slot)
                else None
                for path, slot in pairs
            ]
        meta = [torch.empty(p.shape, dtype=p.dtype, device="meta") for p in inputs.params]
        new = _castable(self.optimizer.init(inputs.tree(meta)))
        if len(new) != len(slots):
            raise ValueError(
                f"opt_state has {len(slots)} leaves, {self.optimizer!r} makes {len(new)} for "
                "these parameters. Likely cause: the state of another optimizer or model. Fix: "
                "`opt_state = optimizer.init(params)`."
            )
        return list(map(_castable_dtype, new))

    def _check_dtypes(
        self, paths: list[tuple[str, ...]], slots: Leaves, wide: list[torch.dtype | None]
    ) -> None:
        for path, slot, dtype in zip(paths, slots, wide, strict=True):
            expected = self._stored_dtype(path, slot, dtype)
            if expected is not None and slot.dtype is not expected:
                raise TypeError(
                    f"opt_state: {'.'.join(path)} is {slot.dtype}, expected {expected}. Likely "
                    "cause: the state of an optimizer with other dtypes, or without. Fix: "
                    "`opt_state = optimizer.init(params)`, or cast it there."
                )


def _check_parts(optimizer: Any) -> None:
    """Refuse parts with wrappers of their own, whose state must not be cast."""
    while isinstance(optimizer, Wrapper):
        optimizer = optimizer.optimizer
    if isinstance(optimizer, PartitionOptimizer):
        for key, part in optimizer.optimizers.items():
            if isinstance(part, (Wrapper, PartitionOptimizer)):
                raise ValueError(
                    f"with_state_dtype around a partition whose part {key!r} is {part!r}. Fix: "
                    f"partition({{{key!r}: with_state_dtype({key}, dtypes), ...}}, label)."
                )


@constant_while_compiling
def _matching(texts: tuple[str, ...], patterns: tuple[str, ...]) -> list[str]:
    return [p for p in patterns if any([fnmatch.fnmatchcase(text, p) for text in texts])]


# ---- the tensors of a state ----------------------------------------------------------------------


def _castable(state: Tree) -> Leaves:
    """Return the leaves of a state that may be narrow, in order."""
    if opt_states := opt_states_of(state):
        return [leaf for each in opt_states for _, leaf in _named_slots(each)]
    return _tree.flatten(without_wrappers(state))[0]


def _paths(state: Tree) -> list[tuple[str, ...]]:
    """Return the path of each leaf of `_castable`; for torch's classes parameter and slot."""
    if not (opt_states := opt_states_of(state)):
        return _tree.keys(without_wrappers(state))
    return [path for each in opt_states for path, _ in _named_slots(each)]


def _named_slots(opt_state: OptState) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each slot, with its name and that of its parameter."""
    for key, tree in opt_state.slots.items():
        for name, leaf in zip(_tree.names(tree), _tree.flatten(tree)[0], strict=True):
            yield (key, name), leaf


def _with_castable(state: Tree, leaves: Iterable[Any]) -> Tree:
    """Return the state with other leaves in place of `_castable`."""
    if is_wrapped(state):
        return state._replace(inner=_with_castable(state.inner, leaves))
    if not opt_states_of(state):
        return _tree.flatten(state)[1].unflatten(leaves)
    remaining = iter(leaves)
    return map_opt_states(
        lambda each, _: each._replace(slots=_tree.map(lambda _: next(remaining), each.slots)), state
    )


def _can_be_cast(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim > 0


def _castable_dtype(leaf: Any) -> torch.dtype | None:
    """Return the dtype of a leaf, None if it is never cast."""
    return leaf.dtype if _can_be_cast(leaf) else None


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
        results = foreach.cast(tensors, list(new.values()))
    cast = dict(zip(new, results, strict=True))
    return [cast.get(index, leaf) for index, leaf in enumerate(leaves)]
