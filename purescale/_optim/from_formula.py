"""An optimizer from a formula of one's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .._optim.formulas import SIZES, Formula, LeafSlots, NewLeaf, Settings
from .._optim.opt_state import NO_SLOTS, STEP
from .._optim.schedule import Schedule, ScheduleBy
from .._optim.settings import OptimizerSettings, OptimizerSpec, Overrides
from .._optim.torch_optim import TorchOptimizer
from .._torch.tracing import innermost, recorded_by_make_fx, traced
from .._tree.leaves import describe, versions
from .._tree.scalars import short_repr
from .._tree.tree import copy_aliased_leaves

NewSlot = Callable[[Tensor], Tensor]


def from_formula(
    step: Callable[[Tensor, Tensor, LeafSlots, Settings, Tensor], NewLeaf],
    slots: Sequence[str] | Mapping[str, NewSlot] = (),
    elementwise: bool = False,
    *,
    lr: float | Tensor | Schedule = 1.0,
    overrides: Overrides | None = None,
    in_state: Sequence[str] = (),
    schedule_by: ScheduleBy = "applied",
    differentiable: bool = False,
    **settings: Any,
) -> TorchOptimizer:
    """Equal, for each parameter of an optimizer with these settings, to

        param, slots = step(param, grad, slots, settings, t)

    The result has all that `from_torch` gives a class of torch.optim: overrides, schedules,
    settings in the state, donation, vmap, derivatives, state dicts in torch's format (without a
    count: `from_state_dict(sd, params, applied=n)`), wrappers and `partition`. A step reads no
    value and can be compiled.

    Args:
        step: A pure function of one parameter that returns the new parameter and a dict of its new
            slots, with plain operators: no list operator, nothing in place, no value read. `param`
            and `grad` are float32 where a half parameter is kept. `slots` and `settings` go by
            name, `slots["exp_avg"]`, `settings["lr"]`. A setting is what was given here, or a 0-d
            tensor. `t` is the number of the step, a 0-d tensor, 1 in the first: one more than
            `opt_state.applied`, for all parameters, as in optax.
        slots: What is kept for each parameter: names of tensors that start as zeros like it, or
            `{name: function of the parameter}`.
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
            has another dtype than its parameter, unless it is one number. A slot is drawn at
            random. A slot or a setting has a name with another meaning, or `lr` is a negative
            number. Also what `from_torch` refuses; and from a step, if `step` returns other slots
            than it was given or another shape (a TypeError if it returns no pair).
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
    _check_step(step)
    makers = slots if isinstance(slots, Mapping) else dict.fromkeys(slots, torch.zeros_like)
    _check_slots(makers, elementwise)
    _check_settings(settings)
    name = getattr(step, "__name__", type(step).__name__)
    formula = Formula(
        _LeafStep(step, name),
        lambda param, _: {key: make(param).clone() for key, make in makers.items()},
        elementwise,
    )
    spec = _spec_of(name, formula, {**settings, "differentiable": differentiable})
    named = {**settings, "differentiable": True} if differentiable else settings
    return TorchOptimizer(
        OptimizerSettings(
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
        arguments = [param, *slots.values(), grad, t]
        is_first = not (self._was_called or recorded_by_make_fx())
        # By copies nothing of the caller's is overwritten, and a compiler sees that it would be.
        if is_first or torch.compiler.is_compiling():
            arguments = [argument.clone() for argument in arguments]
            param, *values, grad, t = arguments
            slots = dict(zip(slots, values, strict=True))
        before = _versions(arguments)
        result = self._step(param, grad, dict(slots), settings, t)
        if (after := _versions(arguments)) != before:
            self._refuse_write(list(slots), list(map(int.__eq__, after, before)).index(False))
        self._was_called |= is_first
        new, new_slots = self._pair_of(result, slots)
        results = [new, *map(new_slots.get, slots)]
        for key, old, leaf in zip((None, *slots), arguments, results, strict=False):
            if not isinstance(leaf, Tensor) or leaf.shape != old.shape:
                self._refuse_shape(key, old, leaf)
        new, *values = copy_aliased_leaves(results, arguments)
        return new, dict(zip(slots, values, strict=True))

    def _pair_of(self, result: Any, slots: LeafSlots) -> NewLeaf:
        """Return the new parameter and the new slots."""
        is_pair = isinstance(result, (tuple, list)) and len(result) == 2
        if not (is_pair and isinstance(result[1], Mapping)):
            raise TypeError(
                f"{self._name} returned {describe(result)}; expected a pair, the new parameter and "
                "a dict of its new slots. Fix: `return param, slots`."
            )
        new, new_slots = result
        if new_slots.keys() != slots.keys():
            raise ValueError(
                f"{self._name} returned the slots {sorted(new_slots)}, expected {sorted(slots)}, "
                "which it was given. Likely cause: a typing error, which would leave a slot as it "
                "was. Fix: `return param, {name: new for each slot}`."
            )
        return new, new_slots

    def _refuse_shape(self, key: str | None, old: Tensor, leaf: Any) -> None:
        what = "param" if key is None else f"slots[{key!r}]"
        raise ValueError(
            f"{self._name} returned {describe(leaf)} for {what}, expected the shape of "
            f"{describe(old)}, which it was given. Likely cause: a sum or a mean. Fix: "
            "`torch.full_like(param, number)`; a slot of one number is made by `slots={name: "
            "lambda p: torch.zeros((), device=p.device)}`, without `elementwise`."
        )

    def _refuse_write(self, slots: list[str], index: int) -> None:
        name = ["param", *(f"slots[{key!r}]" for key in slots), "grad", "t"][index]
        raise RuntimeError(
            f"{self._name} wrote into {name}; a step must not change its arguments, which are the "
            f"caller's. Likely cause: `{name}.mul_(0.9)`, or `{name} *= 0.9`. Fix: a new tensor, "
            f"`new = 0.9 * {name}`."
        )


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


def _check_step(step: Any) -> None:
    """Refuse what cannot be called with five arguments."""
    try:
        inspect.signature(step).bind(*range(5))
    except TypeError as error:
        raise TypeError(
            f"step is {short_repr(step)}: {error}. Expected a function of five arguments. Fix: "
            "`def step(param, grad, slots, settings, t): return param, slots`."
        ) from None


_RESERVED = {"self", "params", "maximize", "foreach", "fused", "capturable"}
_RESERVED |= {"state"}  # an argument of `replace_settings`
_RESERVED |= {"param_names", "initial_lr"}  # of torch's state dicts
_RESERVED_SLOTS = {STEP, SIZES, NO_SLOTS}  # counts, numbers of torch's formulas, a column of holes


def _check_settings(settings: Mapping[str, Any]) -> None:
    """Refuse names of settings that have another meaning."""
    if taken := settings.keys() & _RESERVED:
        raise ValueError(
            f"settings have {min(taken)!r}, a name with a meaning of its own. Fix: "
            "another name; for maximize, `-grad` in the formula."
        )


def _check_slots(makers: Mapping[str, NewSlot], elementwise: bool) -> None:
    """Refuse a slot that is not a tensor, or that joined leaves cannot have."""
    if taken := makers.keys() & _RESERVED_SLOTS:
        raise ValueError(
            f"slots have {min(taken)!r}, a name that torch's formulas give a meaning. Fix: another "
            "name; the number of the step is `t`."
        )
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
            if not traced() and not torch.allclose(slot, make(probe), 0.0, 0.0, equal_nan=True):
                raise ValueError(
                    f"slots[{name!r}] gives other numbers when it is called again; expected those "
                    "of the parameter alone. Likely cause: a random draw. Fix: `torch.zeros_like`, "
                    "or `opt_state._replace(slots=...)` after `init`."
                )
