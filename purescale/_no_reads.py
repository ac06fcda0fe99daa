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


class PlainArithmetic(TorchFunctionMode):
    """`p.add_(g, alpha=t)` and its kin as mul, div and add, where torch would read a tensor `t` or has no vmap rule."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.clamp_ and torch._C._functorch.is_batchedtensor(args[0]):
            return args[0].copy_(args[0].clamp(*args[1:], **kwargs))
        plain = _tree.under_transform() and func in (Tensor.lerp_, Tensor.addcmul_, Tensor.addcdiv_)
        factor = kwargs.get("alpha", kwargs.get("value"))
        if not plain and not (isinstance(factor, Tensor) and func in _SCALED):
            return func(*args, **kwargs)
        target, first, *rest = args
        if func is Tensor.lerp_:
            return target.add_((first - target) * rest[0])
        if func is Tensor.addcdiv_:
            first = first / rest[0]
        elif func is Tensor.addcmul_:
            first = first * rest[0]
        return target.add_(first if factor is None else first * factor)


_SCALED = (Tensor.add_, Tensor.addcdiv_)
