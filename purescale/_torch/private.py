"""The uses of private names of torch. The names are in `private_names.py`."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from .._torch.private_names import NAMES, look_up
from .._torch.private_names import fused_kernel as fused_kernel
from .._torch.private_names import listops as listops
from .._torch.private_names import outside_of_modes as outside_of_modes

_Function = TypeVar("_Function", bound=Callable[..., Any])
_here: Any = sys.modules[__name__]


def __getattr__(name: str) -> Any:
    """Look up a name of the table when it is first needed, as `private.pytree`, and keep it."""
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = look_up(NAMES[name])
    return value


# ---- modes, compilers ----------------------------------------------------------------------------


def in_forward_mode() -> bool:
    """Return True if torch carries tangents, by `torch.func.jvp` or a dual level."""
    return bool(_here.forward_ad._current_level >= 0)


def constant_while_compiling(function: _Function) -> _Function:
    """Equal to `torch.compiler.assume_constant_result`, which would import the compiler. Dynamo
    runs the function and takes its result for a constant.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class Opaque:
    """A function that Dynamo calls and does not trace, by a decorator of torch. As that imports the
    compiler, it decorates when Dynamo is there.
    """

    def __init__(self, function: Callable[..., Any], decorator: Callable[[], Any]) -> None:
        self._function, self._decorator = function, decorator
        self._decorated: list[Any] = []
        if "torch._dynamo" in sys.modules:  # all that are made from now on share a graph
            with contextlib.suppress(ImportError):  # a lacking name is refused where it is needed
                self._decorate()

    @constant_while_compiling
    def _decorate(self) -> None:
        if not self._decorated:
            self._decorated.append(self._decorator()(self._function))

    def __call__(self, *args: Any) -> Any:
        self._decorate()
        return self._decorated[0](*args)


def only_inlined(function: _Function) -> _Function:
    """Mark `function` so that torch compiles it as a part of a graph only. After a graph break
    torch would compile the remaining functions one by one; this one then runs as it is.
    """
    _here.skip_frame(function.__code__)
    return function


def without_compiler(cls: Any) -> Any:
    """Return a class of torch.optim that can be constructed without an import of the compiler,
    which is as expensive as that of torch: `add_param_group` calls `torch._disable_dynamo`.
    """
    if "torch._dynamo" in sys.modules or not cls.__module__.startswith("torch.optim"):
        return cls
    add_param_group = inspect.unwrap(cls.add_param_group)
    return type(cls.__name__, (cls,), {"add_param_group": add_param_group})


# ---- modules and tensors -------------------------------------------------------------------------


def remove_global_hook(handle: Any) -> None:
    """Remove a hook on every module, and the entry that `handle.remove()` leaves in torch, from
    which torch.compile concludes that hooks exist.
    """
    handle.remove()
    _here.with_kwargs.pop(handle.id, None)


def gradient_hooks(tensor: Tensor) -> tuple[Callable[[Tensor], Any], ...]:
    """Return the hooks that `register_hook` added to a tensor."""
    return tuple((_here.hooks(tensor) or {}).values())


def has_accumulated_hooks(tensor: Tensor) -> bool:
    """Return True if a tensor has a hook from `register_post_accumulate_grad_hook`."""
    return bool(_here.accumulated_hooks(tensor))
