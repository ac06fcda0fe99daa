"""torch.optim's own formulas without the places where they read a tensor's value in Python, or have no vmap rule."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from . import _tree


class _Everywhere(list[str]):
    """The devices on which the capturable formula is allowed. It is right on all; torch lists those with graph capture."""

    def __contains__(self, device: object) -> bool:
        return True


@functools.cache
def without_reads(cls: type) -> Callable[[Any], Any]:
    """torch's own `cls.step`, whose helper functions keep step counts as tensors instead of reading them.

    torch's functions are not changed: copies of them look up a few names elsewhere.
    """
    step: Any = inspect.unwrap(cls.step)  # type: ignore[attr-defined]
    module = step.__globals__
    name = module["__name__"].rpartition(".")[2].lstrip("_")
    single = _copy_of(
        module[f"_single_tensor_{name}"],
        _get_capturable_supported_devices=lambda *args, **kwargs: _Everywhere(),
        _get_value=lambda value: value,
    )
    functional = _copy_of(module[name], **{f"_single_tensor_{name}": single})
    return _copy_of(step, **{name: functional})


def _copy_of(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    plain: Any = inspect.unwrap(function)
    copied = types.FunctionType(plain.__code__, {**plain.__globals__, **names}, plain.__name__, plain.__defaults__, plain.__closure__)
    copied.__kwdefaults__ = plain.__kwdefaults__
    return copied


_NOTHING = torch.full((), float("nan"), device="cpu")


class Rate(Tensor):
    """Stands for a learning rate that is data, in torch's formulas.

    torch takes a 0-d tensor for a number only where it is not being differentiated: `p.add_(g, alpha=-lr)` is refused before any
    mode can see it. This stand-in is taken, and `PlainArithmetic` puts the rate itself in its place.
    """

    rate: Tensor

    @staticmethod
    def of(rate: Tensor) -> Rate:
        stand_in: Rate = Tensor._make_subclass(Rate, _NOTHING)
        stand_in.rate = rate
        return stand_in


class PlainArithmetic(TorchFunctionMode):
    """torch's formulas where they would read a tensor, have no vmap rule, or no derivative.

    `p.add_(g, alpha=t)` and its kin are mul, div and add. Under a transform nothing that a derivative needs is written over, and
    a square root has the derivative 0 at 0, where torch has inf, and 0 * inf is NaN.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if not any(isinstance(value, Rate) for value in (*args, *kwargs.values())):
            return self._plain(func, args, kwargs)
        args = tuple(value.rate if isinstance(value, Rate) else value for value in args)
        kwargs = {name: value.rate if isinstance(value, Rate) else value for name, value in kwargs.items()}
        result = self._plain(func, args, kwargs)
        # What is computed of a rate alone is a rate; of a rate and a parameter, what torch makes of it.
        return Rate.of(result) if isinstance(result, Tensor) and result.ndim == 0 and func not in _WRITES else result

    def _plain(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        under_transform = _tree.under_transform()
        if func is Tensor.clamp_ and torch._C._functorch.is_batchedtensor(args[0]):
            return args[0].copy_(args[0].clamp(*args[1:], **kwargs))
        if func is torch.full_like and isinstance(args[1], Tensor):
            return func(args[0], 0.0, **kwargs) + args[1]
        if under_transform and func in _ROOTS:
            root = _root(args[0])
            return args[0].copy_(root) if func is Tensor.sqrt_ else root
        if under_transform and func in _POWERS and args[1] == 0.5:
            return _root(args[0].clamp(min=0))  # below 0 the result is NaN, and chosen by nobody
        if under_transform and func in (Tensor.norm, Tensor.mul_):
            # Muon divides by the norm in place, ASGD writes its factors anew.
            first, *rest = args
            rest = [value.clone() if isinstance(value, Tensor) and value.ndim == 0 else value for value in rest]
            return func(first.clone() if func is Tensor.norm else first, *rest, **kwargs)
        factor = kwargs.get("alpha", kwargs.get("value"))
        plain = under_transform and func in (Tensor.lerp_, Tensor.addcmul_, Tensor.addcdiv_)
        if not plain and not (isinstance(factor, Tensor) and func in _SCALED):
            return func(*args, **kwargs)
        target, first, *rest = args
        first = first.to(torch.promote_types(first.dtype, target.dtype))  # Muon's updates are in bfloat16
        if func is Tensor.lerp_:
            return target.add_((first - target) * rest[0])
        if func is Tensor.addcdiv_:
            first = first / rest[0]
        elif func is Tensor.addcmul_:
            first = first * rest[0].clone() if rest[0].ndim == 0 else first * rest[0]
        if func is Tensor.add:
            return target + first * factor
        return target.add_(first if factor is None else first * factor)


_SCALED = (Tensor.add, Tensor.add_, Tensor.addcdiv_, Tensor.addcmul_)
_WRITES = (Tensor.mul_, Tensor.add_, Tensor.addcdiv_, Tensor.addcmul_, Tensor.copy_, Tensor.sub_, Tensor.div_)
_ROOTS = (Tensor.sqrt, Tensor.sqrt_, torch.sqrt)
_POWERS = (Tensor.pow, Tensor.__pow__, torch.pow)


def _root(square: Tensor) -> Tensor:
    """The square root; at 0 it is `square` itself, be it -0.0, and has no derivative."""
    none = square == 0
    return torch.where(none, square.detach(), torch.where(none, 1, square).sqrt())
