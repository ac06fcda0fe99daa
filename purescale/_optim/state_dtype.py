"""Optimizer state in a narrow dtype: chosen slots are cast up, stepped and cast down."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .._optim.opt_state import (
    OptState,
    are_parts,
    is_wrapped,
    parts_of,
    slots_like,
    values_of,
    without_wrappers,
)
from .._optim.partition import PartitionOptimizer
from .._optim.protocol import Optimizer
from .._optim.step_inputs import StepInputs
from .._optim.wrapper import Wrapper, stand_in, with_params
from .._torch import foreach
from .._torch.dtypes import HALF
from .._torch.half_bits import nearest_on_bits
from .._torch.tracing import constant_while_compiling
from .._tree import tree as _tree
from .._tree.tree import Leaves, Tree

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
            ...}`), or of both with a dot (`{"*.bias.exp_avg": ...}`). The last match wins.

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
        >>> {key: slot.dtype for key, slot in opt_state.slots["w"].items()}
        {'step': torch.float32, 'exp_avg': torch.bfloat16, 'exp_avg_sq': torch.float32}

    Source of the rule: Micikevicius et al. (2018) for the cast up; moments in bfloat16 as in
    DeepSeek-V3 (arXiv 2412.19437), section 3.3.3.
    """
    return StateDtypeOptimizer(optimizer, dtypes)


class StateDtypeOptimizer(Wrapper):
    """An optimizer with a narrow state; made by `with_state_dtype`."""

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
        _check_parts(optimizer)
        self._inside = _others_inside(optimizer)

    def init(self, params: Tree) -> Tree:
        """Return the state before the first step."""
        state = self.optimizer.init(params)
        leaves = _slots(state)
        names = _names(state)
        self._check_all_match(names, leaves)
        pairs = zip(names, leaves, strict=True)
        return _with_slots(state, _cast(leaves, [self._kept_in(*pair) for pair in pairs]))

    def _matching(self, name: tuple[str, ...]) -> list[str]:
        """Return the patterns that match a part of a leaf's path, or all of it."""
        return _matching((*name, ".".join(name)), tuple(self._dtypes))

    def _kept_in(
        self, name: tuple[str, ...], leaf: Any, made: torch.dtype | None = None
    ) -> torch.dtype | None:
        """Return the dtype in which the state keeps a tensor that is made in `made` (by default its
        own dtype); None if it is never cast.
        """
        if not _can_be_cast(leaf):
            return None
        made = made or leaf.dtype
        matching = self._matching(name)
        dtype = self._dtypes[matching[-1]] if matching else made
        if dtype.itemsize > made.itemsize:
            raise ValueError(
                f"dtypes: {'.'.join(name)} is made in {made}, and {dtype} is wider. Likely cause: "
                "parameters in half precision, which give their dtype to the state. Fix: "
                "with_state_dtype(with_master_weights(optimizer), dtypes), where the state is made "
                "in float32."
            )
        return dtype if dtype.itemsize < made.itemsize else made

    def _check_all_match(self, names: list[tuple[str, ...]], leaves: Leaves) -> None:
        pairs = list(zip(names, leaves, strict=True))
        castable = [name for name, leaf in pairs if _can_be_cast(leaf)]
        left = self._dtypes.keys() - {p for name in castable for p in self._matching(name)}
        for pattern in left:
            never = any([pattern in self._matching(name) for name in names])
            slots = _tree.join_names(sorted({name[-1] for name in castable if name}), 20)
            raise ValueError(
                f"dtypes: {pattern!r} matches {'only what is never cast' if never else 'nothing'} "
                f"in the state of {self.optimizer!r}. It has the slots: {slots}; step counts and "
                "other 0-d tensors are never cast."
            )

    # ---- the step

    def stand_ins(self, inputs: StepInputs) -> StepInputs:
        """Return the step's inputs with a wide state without values."""
        leaves = _slots(inputs.opt_state)
        made = self._made_dtypes(inputs, leaves)
        if not torch.compiler.is_dynamo_compiling():  # Dynamo traces neither optree nor fnmatch
            self._check_dtypes(_names(inputs.opt_state), leaves, made)
        stand_ins: dict[Any, Tensor] = {}
        wide = [
            stand_in(leaf, dtype, stand_ins) if dtype and _is_narrow(leaf, dtype) else leaf
            for leaf, dtype in zip(leaves, made, strict=True)
        ]
        return with_params(inputs, inputs.params, _with_slots(inputs.opt_state, wide))

    def widen(self, inputs: StepInputs) -> StepInputs:
        """Return the step's inputs with the state in the dtypes of the inner optimizer."""
        leaves = _slots(inputs.opt_state)
        made = self._made_dtypes(inputs, leaves)
        pairs = zip(leaves, made, strict=True)
        wide = _cast(leaves, [dtype if _is_narrow(leaf, dtype) else None for leaf, dtype in pairs])
        return with_params(inputs, inputs.params, _with_slots(inputs.opt_state, wide))

    def narrow(
        self,
        inputs: StepInputs,
        stepped: tuple[Leaves, Any],
        *,
        write: bool,
    ) -> tuple[Leaves, Any]:
        """Cast the state back to the dtypes that it had."""
        params, state = stepped
        old, wide = _slots(inputs.opt_state), _slots(state)
        index = [
            i
            for i, (kept, new) in enumerate(zip(old, wide, strict=True))
            if isinstance(kept, Tensor) and _is_narrow(kept, new.dtype)
        ]
        new = _cast([wide[i] for i in index], [old[i].dtype for i in index])
        results = list(wide)
        for i, result in zip(index, new, strict=True):
            results[i] = result
        return params, _with_slots(state, results)

    def _made_dtypes(self, inputs: StepInputs, leaves: Leaves) -> list[torch.dtype | None]:
        """Return the dtype in which the inner optimizer makes each tensor of its state."""
        if parts_of(without_wrappers(inputs.opt_state)):
            names = _names(inputs.opt_state)
            dtypes = {name: self.inner_dtype(p.dtype) for name, p in inputs.named_params.items()}
            made = [dtypes.get(name) for name, _ in names]
            for other in self._inside:
                triples = zip(names, leaves, made, strict=True)
                made = [other._kept_in(*triple) for triple in triples]
            return made
        meta = [
            torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in inputs.params
        ]
        made = _slots(self.optimizer.init(inputs.params_tree(meta)))
        if len(made) != len(leaves):
            raise ValueError(
                f"opt_state has {len(leaves)} leaves, {self.optimizer!r} makes {len(made)} for "
                "these parameters. Likely cause: the state of another optimizer or model. Fix: "
                "`opt_state = optimizer.init(params)`."
            )
        return [getattr(leaf, "dtype", None) for leaf in made]

    def _check_dtypes(
        self, names: list[tuple[str, ...]], leaves: Leaves, made: list[torch.dtype | None]
    ) -> None:
        for name, leaf, dtype in zip(names, leaves, made, strict=True):
            expected = self._kept_in(name, leaf, dtype)
            if expected is not None and leaf.dtype is not expected:
                raise TypeError(
                    f"opt_state: {'.'.join(name)} is {leaf.dtype}, expected {expected}. Likely "
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


def _others_inside(optimizer: Any) -> list[StateDtypeOptimizer]:
    """Return the `StateDtypeOptimizer`s within an optimizer, the innermost first."""
    found: list[StateDtypeOptimizer] = []
    while isinstance(optimizer, Wrapper):
        if isinstance(optimizer, StateDtypeOptimizer):
            found.insert(0, optimizer)
        optimizer = optimizer.optimizer
    return found


@constant_while_compiling
def _matching(texts: tuple[str, ...], patterns: tuple[str, ...]) -> list[str]:
    return [p for p in patterns if any([fnmatch.fnmatchcase(text, p) for text in texts])]


# ---- the tensors of a state ----------------------------------------------------------------------


def _slots(state: Any) -> Leaves:
    """Return the leaves of a state that may be narrow, in order."""
    state = without_wrappers(state)
    parts = parts_of(state)
    if not parts:
        return _tree.flatten(state)[0]
    return [leaf for part in parts for leaf in values_of(part.slots)]


def _with_slots(state: Tree, leaves: Iterable[Any]) -> Tree:
    """Return the state with other leaves in place of `_slots`."""
    if is_wrapped(state):
        fields = zip(state._fields, state, strict=True)
        return type(state)(
            *[_with_slots(value, leaves) if name == "inner" else value for name, value in fields]
        )
    if isinstance(state, OptState):
        return OptState(state.applied, slots_like(state.slots, leaves), state.lr, state.hyper)
    if not are_parts(state):
        return _tree.flatten(state)[1].unflatten(leaves)
    rest = iter(leaves)
    return {key: _with_slots(part, rest) for key, part in state.items()}


def _names(state: Any) -> list[tuple[str, ...]]:
    """Return the path of each leaf of `_slots`; for torch's classes the parameter and the slot."""
    state = without_wrappers(state)
    parts = parts_of(state)
    if not parts:
        return _tree.keys(state)
    return [(name, key) for part in parts for name, slot in part.slots.items() for key in slot]


def _can_be_cast(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim > 0


def _is_narrow(leaf: Any, made: torch.dtype | None) -> bool:
    """Return True if a leaf is kept in a narrower dtype than it was made in."""
    return made is not None and _can_be_cast(leaf) and leaf.dtype.itemsize < made.itemsize


def _cast(leaves: Leaves, dtypes: list[torch.dtype | None]) -> Leaves:
    """Return leaves in these dtypes, in fresh memory; a leaf with None is returned as it is."""
    results = list(leaves)
    index = [
        i for i, dtype in enumerate(dtypes) if dtype is not None and leaves[i].dtype is not dtype
    ]
    targets: list[Any] = [dtypes[i] for i in index]
    if torch.compiler.is_compiling():
        cast = [
            nearest_on_bits(leaves[i], dtype) if dtype in HALF else leaves[i].to(dtype)
            for i, dtype in zip(index, targets, strict=True)
        ]
    else:
        cast = foreach.cast([leaves[i] for i in index], targets)
    for i, new in zip(index, cast, strict=True):
        results[i] = new
    return results
