"""The private functions and classes of torch in use, what needs each, and what happens without it.
Private attributes of its objects, such as `_cdata` of a storage, stand where they are read.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import optree
import torch
from torch import Tensor

T = TypeVar("T")
_Function = TypeVar("_Function", bound=Callable[..., Any])
_here: Any = sys.modules[__name__]  # whose `__getattr__` looks a name up


class Name(NamedTuple):
    """A private name of torch, and what happens without it."""

    path: str
    feature: str  # what needs it
    otherwise: Any = None  # takes its place where torch lacks it; None refuses the feature
    use: Callable[[Any], Any] | None = None  # turns the object into what is used


def look_up(name: Name) -> Any:
    """Return what a private name stands for.

    Raises:
        ImportError: This torch lacks it, and nothing takes its place.
    """
    try:
        value = _import(name.path)
        return value if name.use is None else name.use(value)
    except AttributeError:
        if name.otherwise is None:
            raise missing_name_error(name.path, name.feature) from None
    return name.otherwise


def _import(path: str) -> Any:
    """Return the object at a dotted path, importing modules on the way."""
    value: Any = torch
    parts = path.split(".")
    for end, part in enumerate(parts[1:], 2):
        if not hasattr(value, part):
            with contextlib.suppress(ImportError):
                importlib.import_module(".".join(parts[:end]))
        value = getattr(value, part)
    return value


def missing_name_error(what: str, feature: str) -> ImportError:
    """Return the refusal of a feature."""
    return ImportError(
        f"{feature} needs {what}, which torch {torch.__version__} does not have; the rest of "
        "purescale works. Likely cause: an untested torch, because private names of torch change "
        "without notice. Fix: a newer purescale, or a torch that docs/limits.md lists as tested.",
        name="torch",
    )


# ---- what takes the place of a missing name ------------------------------------------------------


def _run_backward(
    tensors: Any, grad_tensors: Any, retain: bool, create: bool, inputs: Any, *_: Any, **__: Any
) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(tensors, inputs, grad_tensors, retain, create, allow_unused=True)


# The same for dicts, lists and tuples. A container that was registered with torch is a leaf.
OPTREE: dict[str, Any] = {"none_is_leaf": True, "namespace": "purescale"}
_trees = SimpleNamespace(
    tree_leaves=functools.partial(optree.tree_leaves, **OPTREE),
    tree_flatten=functools.partial(optree.tree_flatten, **OPTREE),
    tree_map=functools.partial(optree.tree_map, **OPTREE),
    tree_unflatten=lambda leaves, structure: structure.unflatten(leaves),
)


def guard_one_by_one(*tensors: Tensor) -> Callable[..., bool]:
    """Return a function that is True for tensors that differ from these in values only."""
    expected = list(map(_metadata, tensors))
    return lambda *others: list(map(_metadata, others)) == expected


def _metadata(tensor: Tensor) -> Any:
    strides = tensor.stride() if tensor.layout is torch.strided else None
    lazy = tensor.is_conj(), tensor.is_neg(), tensor.is_inference()
    kind = type(tensor), tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad
    return kind, tensor.shape, strides, lazy


def _clone_one_by_one(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


# ---- what is used of a name ----------------------------------------------------------------------


def _metadata_guard(guards: Any) -> Callable[..., Callable[..., bool]]:
    dims: dict[str, Any] = {"dynamic_dims_sizes": None, "dynamic_dims_strides": None}
    return lambda *tensors: guards(*tensors, **dims).check


def _skip_frame(dynamo: Any) -> Callable[[Any], None]:
    action, set_strategy = dynamo._FrameAction, dynamo.set_code_exec_strategy
    strategy = dynamo._FrameExecStrategy(action.SKIP, action.DEFAULT)
    return lambda code: set_strategy(code, strategy)


def outside_of_modes(function: Callable[[], T]) -> T:
    """Return `function()` from a thread of its own: modes and transforms are of one thread."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


# ---- the names -----------------------------------------------------------------------------------

_TRANSFORMS = "a transform of torch.func"

NAMES = {
    # transforms, modes, compilers; without the first two each call is made as under a transform
    "transforms_active": Name(
        "torch._C._are_functorch_transforms_active", _TRANSFORMS, lambda: True
    ),
    "forward_ad": Name(
        "torch.autograd.forward_ad._current_level",
        "forward-mode differentiation",
        SimpleNamespace(_current_level=0),
        lambda level: torch.autograd.forward_ad,  # the level changes
    ),
    "tracks_grad": Name("torch._C._functorch.is_gradtrackingtensor", _TRANSFORMS),
    "function_modes": Name(  # without it a region that runs again does so outside of all modes
        "torch.overrides._get_current_function_mode_stack",
        "a norm in a part of a model that is computed again in the backward",
        list,
    ),
    "DispatchMode": Name(
        "torch.utils._python_dispatch.TorchDispatchMode", "assert_no_host_reads or capture"
    ),
    "nonstrict_trace": Name("torch._dynamo.nonstrict_trace", "a compiled step of torch.optim"),
    "compile_graph": Name("torch._inductor.compile", "jit"),
    "FakeTensorMode": Name("torch._subclasses.fake_tensor.FakeTensorMode", "scan_steps"),
    "scan": Name("torch.ops.higher_order.scan", "scan_steps"),
    "list_mode_options": Name("torch._inductor.list_mode_options", "a mode of jit"),
    # Without it each function after a graph break is compiled by itself: a block net with one break
    # takes 2.4 times the seconds to compile, and a warm call 1.9 times as long.
    "skip_frame": Name(
        "torch._C._dynamo.eval_frame",
        "a graph break",
        lambda code: None,
        _skip_frame,
    ),
    "any_autocast": Name(  # without it each type of device is asked
        "torch._C._is_any_autocast_enabled", "torch.autocast", lambda: True
    ),
    "FakeTensor": Name("torch._subclasses.fake_tensor.FakeTensor", "a fake tensor", Tensor),
    "metadata_guard": Name(
        "torch._C._dynamo.guards.TensorGuards",
        "a list that is recognised",
        guard_one_by_one,
        _metadata_guard,
    ),
    # trees, gradients, ranks, modules
    "pytree": Name("torch.utils._pytree", "a container that is registered with torch", _trees),
    "run_backward": Name("torch.autograd.graph._engine_run_backward", "a backward", _run_backward),
    "all_reduce": Name(
        "torch.distributed._functional_collectives.all_reduce", "a process group or a DTensor"
    ),
    "with_kwargs": Name(
        "torch.nn.modules.module._global_forward_hooks_with_kwargs", "a forward report", {}
    ),
    # tensors; without a count of uses memory counts as shared, and without versions or hooks no
    # write and no hook is noticed
    # AccumulateGrad copies a gradient that is kept elsewhere, but not one of which a view is kept.
    "storage_uses_or_zero": Name(
        "torch._C._storage_Use_Count", "gradients in place", lambda cdata: 0
    ),
    # Without it two states could be in one memory.
    "required_storage_uses": Name("torch._C._storage_Use_Count", "capture on a GPU"),
    "version": Name(
        "torch.Tensor._version", "a write", lambda tensor: 0, lambda version: version.__get__
    ),
    "values": Name("torch.Tensor._values", "a sparse tensor", Tensor.values),
    "hooks": Name(
        "torch.Tensor._backward_hooks", "a hook", lambda tensor: None, lambda hooks: hooks.__get__
    ),
    "accumulated_hooks": Name(
        "torch.Tensor._post_accumulate_grad_hooks",
        "a hook",
        lambda tensor: None,
        lambda hooks: hooks.__get__,
    ),
    # The public functions raise where the settings of two backends differ. Without it a change of
    # the precision makes no new program.
    "float32_precision": Name(
        "torch._C._get_fp32_precision_getter", "jit or capture", lambda backend, operators: "none"
    ),
    # lists, optimizers
    "clone_list": Name("torch._foreach_clone", "a copy", _clone_one_by_one),
    # the loss scale; without the first the rule is a formula of more than twice as many kernels,
    # without the second a norm is read and then a pass unscales, in three times the time
    "update_scale": Name("torch._amp_update_scale_", "DynamicScale", False),
    "unscale_and_check_": Name(
        "torch._amp_foreach_non_finite_check_and_unscale_", "unscaling", False
    ),
}


def __getattr__(name: str) -> Any:
    """Look up a name of the table when it is first needed, as `private.pytree`, and keep it."""
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = look_up(NAMES[name])
    return value


# ---- list operators, which torch documents -------------------------------------------------------


def list_operator(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise missing_name_error(f"torch._foreach_{name}", "arithmetic over lists")

    operator: Callable[..., Any] = getattr(torch, f"_foreach_{name}", refuse)
    return operator


def fused_kernel(name: str) -> Callable[..., None] | None:
    """Return torch's kernel of an optimizer, such as "adamw"; None if this torch lacks it, and the
    formula makes the steps. The functions of torch.optim around it take a count for each parameter.
    """
    kernel: Callable[..., None] | None = getattr(torch, f"_fused_{name}_", None)
    return kernel


_FOREACH = "add_ clamp_max_ clamp_min clamp_min_ copy_ div div_ mul mul_ norm"
listops: Any = SimpleNamespace(**{name: list_operator(name) for name in _FOREACH.split()})


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


class NonstrictTraced:
    """A function that Dynamo calls and does not trace, by `nonstrict_trace`. As that imports the
    compiler, it decorates when Dynamo is there.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._decorated: list[Any] = []
        if "torch._dynamo" in sys.modules:  # all that are made from now on share a graph
            with contextlib.suppress(ImportError):  # a lacking name is refused where it is needed
                self._decorate()

    @constant_while_compiling
    def _decorate(self) -> None:
        if not self._decorated:
            self._decorated.append(_here.nonstrict_trace(self._function))

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


def has_gradient_hook(tensor: Tensor) -> bool:
    """Return True if a tensor has a hook of `register_hook`, or of
    `register_post_accumulate_grad_hook`.
    """
    return bool(_here.hooks(tensor) or _here.accumulated_hooks(tensor))
