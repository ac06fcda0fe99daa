"""An optimizer from a formula of one's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .._torch.tracing import innermost, recorded_by_make_fx, traced
from .._torch_optim.formulas import SIZES, Formula, LeafSlots, NewLeaf, Settings
from .._torch_optim.in_state import copied_number, map_numbers, numbers_of
from .._torch_optim.param_group_optimizer import KernelOrFormulaOptimizer, ParamGroupOptimizer
from .._torch_optim.schedule import Schedule, ScheduleBy
from .._torch_optim.settings import OptimizerConfig, OptimizerSpec, Overrides
from .._torch_optim.slots import COUNT, NO_SLOTS
from .._tree.aliasing import copy_aliased_leaves
from .._tree.leaves import describe, versions
from .._tree.scalars import short_repr

SlotInitializer = Callable[[Tensor], Tensor]


def from_formula(
    step: Callable[[Tensor, Tensor, LeafSlots, Settings, Tensor], NewLeaf],
    slots: Sequence[str] | Mapping[str, SlotInitializer] = (),
    elementwise: bool = False,
    *,
    lr: float | Tensor | Schedule = 1.0,
    overrides: Overrides | None = None,
    in_state: Sequence[str] = (),
    schedule_by: ScheduleBy = "applied",
    differentiable: bool = False,
    **settings: Any,
) -> ParamGroupOptimizer:
    """Equal, for each parameter of an optimizer with these settings, to

        param, slots = step(param, grad, slots, settings, t)

    The result has all that `from_torch` gives a class of torch.optim: overrides, schedules,
    settings in the state, donation, vmap, derivatives, state dicts in torch's format (without a
    count: `from_state_dict(sd, params, applied=n)`), wrappers and `partition`. A step reads no
    value and can be compiled.

    Args:
        step: A pure function of one parameter that returns the new parameter and a dict of its new
            slots, with plain operators: no list operator, nothing in place, no value read. `param`
            and `grad` are float32 where a half parameter is kept; `grad` is rounded to the dtype of
            the parameter before, as a `.grad` is. `slots` and `settings` go by name,
            `slots["exp_avg"]`, `settings["lr"]`. A setting is what was given here, or a 0-d tensor.
            `t` is the number of the step, a 0-d tensor, 1 in the first: one more than
            `opt_state.applied`, for all parameters, as in optax.
        slots: What is kept for each parameter: names of tensors that start as zeros like it, or
            `{name: function of the parameter}`, without a random draw.
        elementwise: A promise that no element of a result depends on other elements or on the
            shape, as it would by a norm, a mean or `param.ndim`; `assert_optimizer` checks it.
            `param` may then be several parameters joined into one vector, which costs few launches,
            a shard of a DTensor, or the two reals of a complex parameter in a last dimension.
            Without it the step is made leaf by leaf, and these two are refused.
        lr, overrides, in_state, schedule_by: As in `from_torch`.
        differentiable: True if `.backward()` may go through a step.
        settings: Numbers, tuples of numbers and other constants that the formula reads, with their
            values; a function is a schedule, of a number in the state. Names that a class of torch
            gives a meaning, such as `maximize`, are refused.

    Returns:
        An optimizer that holds settings and no state.

    Raises:
        TypeError: `step` is not a function of five arguments, or a slot is not a tensor.
        ValueError: `elementwise` is True, and a slot has another shape than its parameter. A slot
            has another dtype than its parameter, unless it is one number. A slot or a setting has a
            name with another meaning, or `lr` is a negative number. Also what `from_torch` refuses;
            and from a step, if `step` returns other slots than it was given or another shape.
        RuntimeError: From a step, if `step` writes into an argument. The first call is given
            copies, so that nothing of the caller's is overwritten then.

    Example:
        >>> import torch
        >>> def sign_descent(param, grad, slots, settings, t):
        ...     momentum = settings["beta"] * slots["momentum"] + grad
        ...     return param - settings["lr"] * momentum.sign(), {"momentum": momentum}
        >>> settings = {"lr": 0.5, "beta": 0.9}
        >>> optimizer = from_formula(sign_descent, ("momentum",), elementwise=True, **settings)
        >>> params = {"w": torch.tensor([1.0, 1.0])}
        >>> state = optimizer.init(params)
        >>> optimizer.step(params, {"w": torch.tensor([3.0, -3.0])}, state)[0]
        {'w': tensor([0.5000, 1.5000])}

    Source of the form: `optax.GradientTransformation`, for one leaf.
    """
    inspect.signature(step).bind(*range(5))  # raises Python's own error
    makers = slots if isinstance(slots, Mapping) else dict.fromkeys(slots, torch.zeros_like)
    _check_slots(makers, elementwise)
    _check_names("settings", settings, _RESERVED)
    name = getattr(step, "__name__", type(step).__name__)
    formula = Formula(
        _LeafStep(step, name),
        lambda param, _: {key: make(param).clone() for key, make in makers.items()},
        elementwise,
    )
    spec = _spec_of(name, formula, {**settings, "differentiable": differentiable})
    named = {**settings, "differentiable": True} if differentiable else settings
    return KernelOrFormulaOptimizer(
        OptimizerConfig(
            spec, lr, overrides or {}, named, in_state=in_state, schedule_by=schedule_by
        )
    )


class _LeafStep:
    """A user's `step` as the step of a formula. A result other than a new parameter and the same
    slots is refused, and so is a write into an argument.
    """

    def __init__(self, step: Any, name: str) -> None:
        self._step, self._name, self._was_called = step, name, False

    def __call__(
        self, param: Tensor, grad: Tensor, slots: LeafSlots, settings: Settings, t: Tensor
    ) -> NewLeaf:
        """Return what `step` returns for a leaf, in memory apart from its arguments."""
        is_first = not (self._was_called or recorded_by_make_fx())
        # By copies nothing of the caller's is overwritten, and a compiler sees that it would be.
        if is_first or torch.compiler.is_compiling():
            param, grad, t = param.clone(), grad.clone(), t.clone()
            slots = {key: slot.clone() for key, slot in slots.items()}
            settings = map_numbers(copied_number, settings)
        rows = [("param", param), ("grad", grad), ("t", t)]
        rows += [(f"slots[{key!r}]", slot) for key, slot in slots.items()]
        rows += [
            (f"settings[{name!r}]", number)
            for name, value in settings.items()
            for number in numbers_of({name: value})
            if isinstance(number, Tensor)
        ]
        names, arguments = map(list, zip(*rows, strict=True))
        before = _versions(arguments)
        result = self._step(param, grad, dict(slots), settings, t)
        if (after := _versions(arguments)) != before:
            name = names[list(map(int.__eq__, after, before)).index(False)]
            raise RuntimeError(
                f"{self._name} wrote into {name}; a step must not change its arguments, which are "
                f"the caller's. Likely cause: `{name}.mul_(0.9)`, or `{name} *= 0.9`. Fix: a new "
                f"tensor, `new = 0.9 * {name}`."
            )
        self._was_called |= is_first
        results = self._leaves_of(result, [param, *slots.values()], list(slots))
        new, *values = copy_aliased_leaves(results, arguments)
        return new, dict(zip(slots, values, strict=True))

    def _leaves_of(self, result: Any, likes: list[Tensor], keys: list[str]) -> list[Tensor]:
        """Return the new parameter and the new slots of a result, all of the shapes of `likes`."""
        is_pair = isinstance(result, (tuple, list)) and len(result) == 2
        if is_pair and isinstance(result[1], Mapping) and result[1].keys() == set(keys):
            leaves = [result[0], *map(result[1].get, keys)]
            pairs = zip(leaves, likes, strict=True)
            if all([isinstance(leaf, Tensor) and leaf.shape == like.shape for leaf, like in pairs]):
                return leaves
        got = f"({', '.join(map(_describe, result))})" if is_pair else describe(result)
        slots = dict(zip(keys, map(describe, likes[1:]), strict=True))
        raise ValueError(
            f"{self._name} returned {got}; expected a new parameter, {describe(likes[0])}, and a "
            f"dict of all new slots, {slots}. Likely cause: a typing error, a sum or a mean. Fix: "
            "`return param, {name: new for each slot}`, with `torch.full_like` for one number."
        )


def _describe(part: Any) -> str:
    if not isinstance(part, Mapping):
        return describe(part)
    return f"{{{', '.join(f'{key!r}: {describe(leaf)}' for key, leaf in part.items())}}}"


def _versions(tensors: list[Tensor]) -> list[int]:
    """Return `versions` of what transforms wrap, because they count no writes themselves."""
    if traced() and not torch.compiler.is_compiling():
        tensors = list(map(innermost, tensors))
    return versions(tensors)


def _spec_of(name: str, formula: Formula, defaults: dict[str, Any]) -> OptimizerSpec:
    def construct(probes: list[Tensor], settings: Settings) -> Any:
        lr = settings["lr"]
        if not (callable(lr) or isinstance(lr, Tensor) or lr >= 0):
            raise ValueError(f"lr is {lr}; expected a number that is not negative.")
        return SimpleNamespace(defaults={"lr": lr, **defaults, **settings})

    names = ["lr", *defaults]
    return OptimizerSpec(name, "from_formula", formula, None, names, 1.0, construct)


# Names of arguments of other functions, and keys of torch's state dicts.
_RESERVED = {"self", "params", "maximize", "foreach", "fused", "capturable"}
_RESERVED |= {"state", "param_names", "initial_lr"}
# Counts, numbers of torch's formulas, a list of holes.
_RESERVED_SLOTS = {COUNT, SIZES, NO_SLOTS}


def _check_names(kind: str, names: Collection[str], reserved: Set[str]) -> None:
    """Refuse names that have another meaning."""
    if taken := reserved & set(names):
        raise ValueError(
            f"{kind} have {min(taken)!r}, a name with a meaning of its own. Fix: another name; for "
            "maximize, `-grad` in the formula; for the number of the step, `t`."
        )


def _check_slots(makers: Mapping[str, SlotInitializer], elementwise: bool) -> None:
    """Refuse a slot that is not a tensor, or that joined leaves cannot have."""
    _check_names("slots", makers, _RESERVED_SLOTS)
    for dtype in (torch.float32, torch.bfloat16):
        probe = torch.zeros(2, 3, dtype=dtype, device="cpu")
        for name, make in makers.items():
            slot = make(probe) if callable(make) else make
            if not callable(make) or not isinstance(slot, Tensor):
                raise TypeError(
                    f"slots[{name!r}] gives {short_repr(slot)}; expected a function of the "
                    f"parameter that returns a tensor. Fix: `{{{name!r}: torch.zeros_like}}`."
                )
            if elementwise and slot.shape != probe.shape:
                raise ValueError(
                    f"slots[{name!r}] is {describe(slot)} for a parameter of shape (2, 3), and an "
                    "elementwise step has slots like its parameter. Fix: no `elementwise=True`."
                )
            if slot.dtype is not (dtype if slot.ndim else torch.float32):
                raise ValueError(
                    f"slots[{name!r}] is {slot.dtype} for a parameter of {dtype}; expected the "
                    "parameter's dtype, or float32 for one number. A half slot is given in "
                    f"float32. Fix: `{{{name!r}: torch.zeros_like}}`; `with_master_weights` keeps "
                    "slots in float32 for half parameters."
                )
