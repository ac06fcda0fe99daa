"""References to the live model from what calls share: functions, classes, objects written in C; and
placeholders for tensors that were computed from its parameters.
"""

from __future__ import annotations

import gc
import types
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from .._module.registered import Tensors
from .._torch import private
from .._torch.donation import storage_pointer

# Never changed by a forward, and never a reference to the model.
ATOMS = frozenset(
    {
        *(bool, int, float, complex, str, bytes, range, type(None), type(...), types.ModuleType),
        *(types.CodeType, type, torch.dtype, torch.device, torch.Size, torch.fx.Graph),
    }
)

Objects = list[tuple[str, Any]]  # with their paths in the model


def is_array(obj: Any) -> bool:
    """Return True for an array of NumPy, which may not be installed."""
    return (type(obj).__module__, type(obj).__name__) == ("numpy", "ndarray")


def check_references(objects: Objects, tensors: Tensors, modules: dict[str, nn.Module]) -> None:
    """Refuse a registered tensor or a module of the live model in objects that calls share."""
    live = {id(module): f"module {path or 'itself'}" for path, module in modules.items()}
    live |= {id(tensor): f"tensor {name}" for name, tensor in tensors.items()}
    seen: set[int] = set()
    for path, obj in objects:
        waiting = [obj]
        while waiting:
            obj = waiting.pop()
            if id(obj) in live:
                raise ValueError(
                    f"{path} of the model holds its {live[id(obj)]}, which `apply` cannot replace "
                    "there. Likely cause: a closure over the model, or a compiled method. Fix: a "
                    "method or functools.partial(function, module) in place of the closure; a "
                    "list, a dict or an attribute for a tensor; compile `apply`, not a part."
                )
            if id(obj) not in seen and type(obj) not in ATOMS and not isinstance(obj, type):
                seen.add(id(obj))
                waiting += _referents(obj)


def _referents(obj: Any) -> list[Any]:
    """Return the objects that an object refers to, and for a function those that it uses."""
    if isinstance(obj, types.FunctionType):
        names = [obj.__globals__.get(name) for name in obj.__code__.co_names]
        used = [v for v in names if isinstance(v, (nn.Module, Tensor, types.MethodType))]
        return [obj.__closure__, obj.__defaults__, obj.__kwdefaults__, vars(obj), *used]
    if isinstance(obj, weakref.ref):
        return [obj()]
    if is_array(obj):  # the garbage collector does not know its elements
        return list(obj.ravel().tolist()) if obj.dtype.hasobject else []
    return [] if isinstance(obj, Tensor) else gc.get_referents(obj)


def check_class_attributes(
    objects: Objects, tensors: Tensors, modules: dict[str, nn.Module]
) -> None:
    """Refuse a parameter, or a part with parameters, in a class attribute of one of `objects`: all
    calls share the class.
    """
    params = [item for item in tensors.items() if isinstance(item[1], nn.Parameter)]
    live: dict[Any, str] = {storage_pointer(p) or id(p): name for name, p in params}
    parts = [(path, part) for path, part in modules.items() if path]
    live |= {
        id(part): path for path, part in parts if next(nn.Module.parameters(part), None) is not None
    }
    for cls in dict.fromkeys(base for _, obj in objects for base in type(obj).__mro__):
        for key, value in list(vars(cls).items()):
            inside = isinstance(value, (dict, list, tuple))
            for leaf in private.pytree.tree_leaves(value) if inside else [value]:
                name = live.get(id(leaf)) if leaf is value else None
                if isinstance(leaf, Tensor):
                    name = live.get(storage_pointer(leaf) or id(leaf))
                    if name is None and isinstance(leaf, nn.Parameter) and leaf.requires_grad:
                        name = "a parameter"
                if name is not None:
                    raise ValueError(
                        f"the attribute {key} of the class {cls.__name__} holds {name}, or a view "
                        "of it, which would follow the live model and not params. Fix: register it "
                        f"in `__init__`, `self.{key} = ...`, and remove it from the class."
                    )


# ---- tensors without a value ---------------------------------------------------------------------

COMPUTED = (
    "{} of the model was computed from a parameter or buffer, or is a view of one, made before "
    "make_functional: it would not change with params. Fix: compute it in forward; if it is state "
    "that forward keeps, name it in `make_functional(model, state_attributes=...)`."
)


class Unreadable:
    """A placeholder that refuses arithmetic, for a tensor that has no value in a call."""

    def __init__(self, why: str) -> None:
        self.why = why

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(self.why)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = private.pytree.tree_leaves((args, kwargs))
        next(leaf for leaf in leaves if isinstance(leaf, cls))._refuse()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # what Python itself asks for, such as __deepcopy__
        self._refuse()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = _refuse
    __rmatmul__ = __truediv__ = __rtruediv__ = __pow__ = __neg__ = __getitem__ = _refuse
    __bool__ = __len__ = __iter__ = __float__ = __int__ = _refuse
