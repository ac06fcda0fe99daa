"""torch.optim's own formulas, made to run without reading tensor values and under vmap."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._torch import private
from .._torch.dtypes import HALF
from .._torch.private import listops
from .._torch.tracing import under_transform


class _Everywhere(list[str]):
    """A list that contains every device. torch allows the capturable formula only on devices with
    graph capture, but it is right on all.
    """

    def __contains__(self, device: object) -> bool:
        return True


def without_reads(cls: type, *, lists: bool = False) -> Callable[[Any], Any]:
    """Return torch's own `cls.step` with helper functions that keep step counts as tensors instead
    of reading them.

    `lists` selects the implementation over lists of tensors. torch's functions are not changed:
    copies of them look up a few names elsewhere.
    """
    torchs = private.formula_of(cls)
    assert torchs is not None  # from_torch refuses such a class
    name, _ = torchs.names
    own = torchs.lists if lists and torchs.lists is not None else torchs.single
    formula = _OVER_LISTS.get(name) if lists else None
    formula = formula or _copy_of(
        own,
        **{
            private.DEVICES: lambda *args, **kwargs: _Everywhere(),
            private.VALUE: lambda value: value,
            **({"torch": _LISTS} if lists else {}),
        },
    )
    if name in _DIVIDE_BY_THE_RATE and not lists:
        formula = functools.partial(_as_if_it_could_read, formula)
    functional = _copy_of(torchs.functional, **{own.__name__: formula})
    return _copy_of(torchs.step, **{name: functional})


# Classes, by torch's names, whose formulas with these flags divide by the rate. At a rate of 0 they
# compute 0 / 0, which is NaN. Over lists they compute eps / 0, which is inf, so the update is 0.
_DIVIDE_BY_THE_RATE = {"adam": ("capturable", "differentiable"), "adamax": ("capturable",)}


def divides_by_the_rate(cls: type, settings: Mapping[str, Any]) -> bool:
    """Return True if torch's implementation with these flags divides 0 by the rate."""
    formula = private.formula_of(cls)
    flags = _DIVIDE_BY_THE_RATE.get(formula.names[0], ()) if formula else ()
    return any(settings.get(flag) for flag in flags) and not settings.get("foreach")


def _as_if_it_could_read(formula: Callable[..., None], *columns: Any, **settings: Any) -> None:
    """Call the branch of a formula that multiplies by the rate, which torch keeps for the host."""
    formula(*columns, **{**settings, "capturable": False, "differentiable": False})


def has_lists(cls: type) -> bool:
    """Return True if torch or this file implements `cls` over lists."""
    formula = private.formula_of(cls)
    assert formula is not None  # from_torch refuses such a class
    return formula.lists is not None or formula.names[0] in _OVER_LISTS


def _copy_of(function: Any, **names: Any) -> Callable[..., Any]:
    copied = types.FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


_NOTHING = torch.full((), float("nan"), dtype=torch.float32, device="cpu")


class Number(Tensor):
    """A stand-in for a setting that is a tensor, such as the learning rate, in torch's formulas.

    torch accepts a 0-d tensor as a number only if it is not differentiated: it refuses `p.add_(g,
    alpha=-lr)` before any mode sees it. It accepts this stand-in, and `PlainArithmetic` replaces it
    by the tensor.
    """

    value: Tensor
    used: bool  # True once a formula used it

    @staticmethod
    def of(value: Tensor) -> Number:
        if isinstance(value, Number):
            return value
        stand_in: Number = private.make_subclass(Number, _NOTHING)
        stand_in.value, stand_in.used = value, False
        return stand_in


class PlainArithmetic(TorchFunctionMode):
    """A mode that replaces operators of torch's formulas that read a tensor, or that lack a vmap
    rule or a derivative.

    `p.add_(g, alpha=t)` and similar calls become mul, div and add. Under a transform, tensors that
    a derivative needs are not overwritten. A square root has the derivative 0 at 0, because torch's
    is inf and 0 * inf is NaN.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        numbers = [value for value in (*args, *kwargs.values()) if isinstance(value, Number)]
        if not numbers:
            return self._plain(func, args, kwargs)
        if func in _READS:
            raise TypeError(f"it calls {func.__name__} on it")
        for number in numbers:
            number.used = True
        if isinstance(args[0], Number):
            # `if weight_decay != 0` and the like must not read: applying a 0 changes nothing.
            if func in _CONDITIONS and not isinstance(args[1], Tensor) and args[1] == 0:
                return True
            # torch would write into the gradient if a weight decay requires a gradient.
            if func == _REQUIRES_GRAD:
                return False
            # torch's Adam casts betas to the parameter's dtype, in which 0.999 may be 1.
            if func is Tensor.to:
                return args[0]
        args = (_value(args[0]), *map(_operand, args[1:]))
        kwargs = {name: _value(value) for name, value in kwargs.items()}
        result = self._with_numbers(func, args, kwargs)
        # A result computed from numbers alone is a number again.
        return (
            Number.of(result)
            if isinstance(result, Tensor) and result.ndim == 0 and func not in _WRITES
            else result
        )

    def _with_numbers(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute in float32 if a half tensor meets a number. torch would round a 0-d tensor to
        half first, which it does not do with a Python number.
        """
        if func is Tensor.eq and isinstance(args[1], Tensor):  # Rprop looks for its own factors
            return self._plain(func, (args[0], args[1].to(args[0].dtype)), kwargs)
        half = [arg for arg in args if isinstance(arg, Tensor) and arg.dtype in HALF]
        if not half:
            return self._plain(func, args, kwargs)
        wide = [
            arg.float() if isinstance(arg, Tensor) and arg.dtype in HALF else arg for arg in args
        ]
        result = self._plain(func, tuple(wide), kwargs)
        if not isinstance(result, Tensor):
            return result
        in_place = func.__name__.endswith("_") and not func.__name__.endswith("__")
        return args[0].copy_(result) if in_place else result.to(half[0].dtype)

    def _plain(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        transformed = under_transform() or (
            torch.is_grad_enabled() and any([_is_differentiated(value) for value in args])
        )
        if transformed and func is torch.maximum and "out" in kwargs:
            return kwargs["out"].copy_(torch.maximum(args[0].clone(), args[1]))
        if transformed and func is torch.addmm and args[0].dtype in HALF:
            # vmap rounds in between, which Muon's iteration amplifies to 3 to 9 % of its update.
            return func(*map(Tensor.float, args), **kwargs).to(args[0].dtype)
        if func is Tensor.clamp_ and private.is_batched(args[0]):
            return args[0].copy_(args[0].clamp(*args[1:], **kwargs))
        if transformed and func in _ROOTS:
            root = _root(args[0])
            return args[0].copy_(root) if func is Tensor.sqrt_ else root
        if transformed and func in _POWERS and isinstance(args[1], float) and args[1] == 0.5:
            return _root(args[0].clamp(min=0))  # torch's NaN below 0 is never used
        if transformed and func in (Tensor.norm, Tensor.mul_):
            # Muon divides by the norm in place, and ASGD overwrites its factors.
            first, *rest = args
            rest = [
                value.clone() if isinstance(value, Tensor) and value.ndim == 0 else value
                for value in rest
            ]
            return func(first.clone() if func is Tensor.norm else first, *rest, **kwargs)
        factor = kwargs.get("alpha", kwargs.get("value"))
        plain = transformed and func in (Tensor.lerp_, Tensor.addcmul_, Tensor.addcdiv_)
        plain = plain or (func in _LERPS and isinstance(args[2], Tensor))
        if not plain and not (isinstance(factor, Tensor) and func in _SCALED):
            return func(*args, **kwargs)
        target, first, *rest = args
        # Muon's updates are in bfloat16.
        first = first.to(torch.promote_types(first.dtype, target.dtype))
        if func in _LERPS:
            mean = _lerp(target, first, rest[0])
            return target.copy_(mean) if func is Tensor.lerp_ else mean
        if func is Tensor.addcdiv_:
            first = first / rest[0]
        elif func is Tensor.addcmul_:
            first = first * rest[0].clone() if rest[0].ndim == 0 else first * rest[0]
        if func is Tensor.add:
            # A weight decay's derivative needs the parameter, which is overwritten later.
            return target + (first.clone() if torch.is_grad_enabled() else first) * factor
        return target.add_(first if factor is None else first * factor)


class FactorsOnHost(TorchFunctionMode):
    """A mode for torch's formulas that read on the host. ASGD's factors are float32 on the CPU,
    whatever torch's default dtype and device are.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.as_tensor and not isinstance(args[0], Tensor):
            kwargs = {"dtype": torch.float32, "device": "cpu", **kwargs}
        return func(*args, **kwargs)


_SCALED = (Tensor.add, Tensor.add_, Tensor.addcdiv_, Tensor.addcmul_)
_WRITES = (
    Tensor.mul_,
    Tensor.add_,
    Tensor.addcdiv_,
    Tensor.addcmul_,
    Tensor.copy_,
    Tensor.sub_,
    Tensor.div_,
)
_LERPS = (Tensor.lerp, Tensor.lerp_)
_ROOTS = (Tensor.sqrt, Tensor.sqrt_, torch.sqrt)
_POWERS = (Tensor.pow, Tensor.__pow__, torch.pow)
_CONDITIONS = (Tensor.ne, Tensor.gt)
_REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_READS = (
    Tensor.item,
    Tensor.tolist,
    Tensor.__bool__,
    Tensor.__float__,
    Tensor.__int__,
    Tensor.__index__,
)


def _value(argument: Any) -> Any:
    return argument.value if isinstance(argument, Number) else argument


def _is_differentiated(argument: Any) -> bool:
    return isinstance(argument, Tensor) and argument.requires_grad


def _operand(argument: Any) -> Any:
    """Return the value of an operand, copied if a derivative needs it: ASGD overwrites its
    factors.
    """
    if isinstance(argument, Tensor) and not isinstance(argument, Number) and argument.ndim == 0:
        return argument.clone() if torch.is_grad_enabled() else argument
    return _value(argument)


def _lerp(start: Tensor, end: Tensor, weight: Tensor | float) -> Tensor:
    """Interpolate from the nearer end, like torch, so that a weight of 1 gives `end` itself."""
    way = end - start
    if isinstance(weight, Tensor):
        return torch.where(weight < 0.5, start + weight * way, end - way * (1 - weight))
    return start + weight * way if weight < 0.5 else end - way * (1 - weight)


def _root(square: Tensor) -> Tensor:
    """Return the square root. At 0 it is `square` itself, also -0.0, and has no derivative."""
    none = square == 0
    return torch.where(none, square.detach(), torch.where(none, 1, square).sqrt())


# ---- over lists ----------------------------------------------------------------------------------


class Dampening:
    """A stand-in for `dampening` in torch's SGD over lists, which uses one number for all
    parameters. Here it is 0 for a parameter whose momentum buffer is created in this step.
    """

    def __init__(self, dampening: float, first: dict[int, Tensor]) -> None:
        self._share = 1 - dampening
        self._first = first  # by the identity of the buffer

    def __rsub__(self, one: float) -> Dampening:
        return self

    def shares(self, buffers: Sequence[Tensor]) -> Any:
        first = torch.stack([self._first[id(buffer)] for buffer in buffers])
        wide = torch.float32 if first.device.type == "mps" else torch.float64
        return torch.where(
            first, torch.ones((), dtype=wide, device=first.device), self._share
        ).unbind()


class _Lists:
    """torch, with list operators that do not read a factor that is a tensor."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def _foreach_add_(targets: Any, others: Any, **settings: Any) -> None:
        alpha = settings.get("alpha")
        if isinstance(alpha, (Dampening, Tensor)):
            factor = alpha.shares(targets) if isinstance(alpha, Dampening) else alpha
            others, settings = listops.mul(others, factor), {}
        listops.add_(targets, others, **settings)


_LISTS = _Lists()


def _columns_of(
    columns: Sequence[Sequence[Tensor]], steps: list[Tensor], has_complex: bool, maximize: bool
) -> Iterator[list[Any]]:
    """Yield the columns (parameters and gradients first) and the step counts, increased by 1, for
    each device and dtype. Complex tensors are viewed as real.
    """
    grouped = private.group_alike([*columns, steps])
    for (*alike, counts), _ in grouped.values():
        if has_complex:
            alike = [
                [torch.view_as_real(t) if t.is_complex() else t for t in column] for column in alike
            ]
        if maximize:
            alike[1] = listops.neg(alike[1])
        listops.add_(counts, 1)
        yield [*alike, counts]


# torch's list implementations of these three loop over tensors in some places.


def _adagrad(
    params: list[Tensor], grads: list[Tensor], sums: list[Tensor], steps: list[Tensor], *, lr: Any,
    weight_decay: float, lr_decay: float, eps: float, maximize: bool, has_complex: bool, **_: Any,
) -> None:  # fmt: skip
    for weights, gradients, squares, counts in _columns_of(
        [params, grads, sums], steps, has_complex, maximize
    ):
        if weight_decay != 0:
            gradients = listops.add(gradients, weights, alpha=weight_decay)
        rates = -lr / (1 + (torch.stack(counts) - 1) * lr_decay)
        listops.addcmul_(squares, gradients, gradients, value=1)
        roots = listops.sqrt(squares)
        listops.add_(roots, eps)
        listops.addcdiv_(weights, listops.mul(gradients, rates.unbind()), roots)


def _radam(
    params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor],
    steps: list[Tensor], *, beta1: float, beta2: float, lr: Any, weight_decay: float, eps: float,
    decoupled_weight_decay: bool, maximize: bool, has_complex: bool, **_: Any,
) -> None:  # fmt: skip
    for weights, gradients, means, squares, counts in _columns_of(
        [params, grads, exp_avgs, exp_avg_sqs], steps, has_complex, maximize
    ):
        if weight_decay != 0 and decoupled_weight_decay:
            listops.mul_(weights, 1 - lr * weight_decay)
        elif weight_decay != 0:
            gradients = listops.add(gradients, weights, alpha=weight_decay)
        listops.lerp_(means, gradients, 1 - beta1)
        listops.mul_(squares, beta2)
        listops.addcmul_(squares, gradients, gradients, 1 - beta2)

        step, most = torch.stack(counts), 2 / (1 - beta2) - 1
        bias1, bias2 = 1 - beta1**step, 1 - beta2**step
        # The length of a simple moving average with the same weight.
        length = most - beta2**step * step * 2 / bias2
        root = ((length - 4) * (length - 2) * most / (length * ((most - 4) * (most - 2)))).sqrt()
        rectified = torch.where(length > 5.0, root, 0.0)
        alone = -((rectified <= 0).to(bias1.dtype) * lr / bias1)
        scale = -(bias2.sqrt() * lr * rectified) / bias1

        factors = listops.sqrt(squares)
        listops.add_(factors, eps)
        listops.div_(factors, scale.unbind())
        listops.reciprocal_(factors)
        listops.add_(factors, alone.unbind())
        listops.addcmul_(weights, means, factors)


def _rprop(
    params: list[Tensor], grads: list[Tensor], prevs: list[Tensor], step_sizes: list[Tensor],
    steps: list[Tensor], *, step_size_min: float, step_size_max: float, etaminus: float,
    etaplus: float, maximize: bool, has_complex: bool, **_: Any,
) -> None:  # fmt: skip
    for weights, gradients, before, sizes, _counts in _columns_of(
        [params, grads, prevs, step_sizes], steps, has_complex, maximize
    ):
        signs = listops.mul(gradients, before)
        listops.sign_(signs)
        same, opposite = listops.clamp_min(signs, 0), listops.clamp_max(signs, 0)
        # Two of the three terms are 0, so a factor is etaplus, etaminus or 1.
        factors = listops.abs(signs)
        listops.neg_(factors)
        listops.add_(factors, 1)
        listops.add_(factors, same, alpha=etaplus)
        listops.add_(factors, opposite, alpha=-etaminus)
        listops.mul_(sizes, factors)
        listops.clamp_min_(sizes, step_size_min)
        listops.clamp_max_(sizes, step_size_max)
        # The gradient is clamped to 0 where its sign changed, and to infinite bounds elsewhere.
        bounds = listops.abs(opposite)
        listops.reciprocal_(bounds)
        listops.sub_(bounds, 1)
        listops.copy_(before, gradients)
        listops.minimum_(before, bounds)
        listops.neg_(bounds)
        listops.maximum_(before, bounds)
        listops.add_(before, 0)  # makes 0 of -0
        listops.addcmul_(weights, listops.sign(before), sizes, value=-1)


_OVER_LISTS: dict[str, Callable[..., None]] = {
    "adagrad": _adagrad,
    "radam": _radam,
    "rprop": _rprop,
}
