"""All private names of torch in use, looked up on import. A torch without one is refused."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm

NAMES: list[str] = []  # all that were looked up


def _refused(what: str) -> ImportError:
    return ImportError(
        f"purescale needs {what}, which torch {torch.__version__} does not have. Likely cause: "
        f"an untested torch (2.11 to 2.15 were tested); private names of torch change without "
        f"notice. Fix: pip install 'torch>=2.11,<2.16', or a newer purescale.",
        name="torch",
    )


def _find(name: str) -> Any:
    """Return the object at a dotted name, importing modules on the way."""
    NAMES.append(name)
    found: Any = torch
    parts = name.split(".")
    for index, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            try:
                importlib.import_module(".".join(parts[:index]))
            except ImportError:
                raise _refused(name) from None
        try:
            found = getattr(found, part)
        except AttributeError:
            raise _refused(name) from None
    return found


# ---- transforms, modes, compilers ----------------------------------------------------------------

transforms_active: Callable[[], bool] = _find("torch._C._are_functorch_transforms_active")
is_wrapped: Callable[[Tensor], bool] = _find("torch._C._functorch.is_functorch_wrapped_tensor")
tracks_grad: Callable[[Tensor], bool] = _find("torch._C._functorch.is_gradtrackingtensor")
is_batched: Callable[[Tensor], bool] = _find("torch._C._functorch.is_batchedtensor")
unwrapped: Callable[[Tensor], Tensor] = _find("torch._C._functorch.get_unwrapped")
any_autocast: Callable[[], bool] = _find("torch._C._is_any_autocast_enabled")
AUTOCAST_DEVICES: tuple[str, ...] = tuple(_find("torch._C._autocast_supported_devices")())
function_modes: Callable[[], list[Any]] = _find("torch.overrides._get_current_function_mode_stack")
without_modes: Any = _find("torch.utils._python_dispatch._disable_current_modes")
without_transforms: Any = _find("torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack")
DispatchMode: Any = _find("torch.utils._python_dispatch.TorchDispatchMode")
allow_in_graph: Any = _find("torch._dynamo.allow_in_graph")
has_static_value: Any = _find("torch.fx.experimental.symbolic_shapes.has_static_value")
statically_known_true: Any = _find("torch.fx.experimental.symbolic_shapes.statically_known_true")
nonstrict_trace: Any = _find("torch._dynamo.nonstrict_trace")
# Both change at run time, so their values cannot be looked up once.
_find("torch.autograd.forward_ad._current_level")
_find("torch.compiler._is_compiling_flag")
_forward_ad: Any = torch.autograd.forward_ad
_compiler: Any = torch.compiler


_translator: Callable[[], Any] = _find(
    "torch._dynamo.symbolic_convert.InstructionTranslator.current_tx"
)
_SideEffects: Any = _find("torch._dynamo.side_effects.SideEffects")
_find("torch._dynamo.side_effects.SideEffects.is_modified")
for _name in ("id_to_variable", "store_attr_mutations"):
    if _name not in inspect.signature(_SideEffects).parameters:
        raise _refused(f"{_name} of torch._dynamo.side_effects.SideEffects")


def attributes_set() -> dict[int, list[str]]:
    """Return the attributes that the tracing compiler has seen set or deleted, by the id of the
    object.
    """
    effects = _translator().output.side_effects
    return {
        key: list(effects.store_attr_mutations.get(known, ()))
        for key, known in effects.id_to_variable.items()
    }


def raised(flag: str) -> list[int]:
    """Return the ids of objects whose attribute `flag` the tracing compiler has last seen set to
    True.
    """
    effects = _translator().output.side_effects
    return [
        key
        for key, known in effects.id_to_variable.items()
        if flag in (of_one := effects.store_attr_mutations.get(known, {}))
        and of_one[flag].as_python_constant() is True
    ]


def elements_changed(container: Any) -> bool:
    """Return True if the tracing compiler has seen a list, a dict or another container change."""
    effects = _translator().output.side_effects
    known = effects.id_to_variable.get(id(container))
    return known is not None and bool(effects.is_modified(known))


_skip_code: Callable[[Any], None] = _find("torch._dynamo.eval_frame.skip_code")
_Function = TypeVar("_Function", bound=Callable[..., Any])


def only_inlined(function: _Function) -> _Function:
    """Mark `function` so that torch compiles it as a part of a graph only. After a graph break
    torch would compile the remaining functions one by one; this one then runs as it is.
    """
    _skip_code(function.__code__)
    return function


def under_transform() -> bool:
    """Return True inside vmap, grad or another torch.func transform, or in forward mode.

    List operators have no vmap rule there, and fused kernels drop derivatives.
    """
    return transforms_active() or (
        not torch.compiler.is_dynamo_compiling() and _forward_ad._current_level >= 0
    )


def traced() -> bool:
    """Return True if plain operators are needed: while compiling, where all kinds fuse equally
    well, or under a transform.
    """
    # Written out, because every stage calls it. Dynamo must stop at the first line: it gets an
    # interpreter stack of None wrapped in an object that is not None.
    return (
        torch.compiler.is_dynamo_compiling()
        or _compiler._is_compiling_flag
        or transforms_active()
        or _forward_ad._current_level >= 0
    )


# The dispatch key of torch.func's own kernels, and methods to register others before them.
FUNCTORCH: Any = _find("torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode")
for _name in ("py_impl", "decompose"):
    _find(f"torch._ops.OpOverload.{_name}")


FakeTensorMode: Any = _find("torch._subclasses.fake_tensor.FakeTensorMode")
DataDependentOutput: Any = _find("torch._subclasses.fake_tensor.DataDependentOutputException")
FakeTensor: type[Tensor] = _find("torch._subclasses.fake_tensor.FakeTensor")
DynamicOutputShape: Any = _find("torch._subclasses.fake_tensor.DynamicOutputShapeException")


# ---- trees, ranks, modules -----------------------------------------------------------------------

run_backward: Callable[..., tuple[Tensor | None, ...]] = _find(
    "torch.autograd.graph._engine_run_backward"
)
pytree: Any = _find("torch.utils._pytree")
all_reduce: Callable[[Tensor, str, Any], Tensor] = _find(
    "torch.distributed._functional_collectives.all_reduce"
)
# 1 if two elements of a tensor share memory, as in an expanded tensor
overlap_within: Callable[[Tensor], int] = _find("torch._debug_has_internal_overlap")
storage_uses: Callable[[int], int] = _find("torch._C._storage_Use_Count")
object_device: Callable[[Any], str] = _find(
    "torch.distributed.distributed_c10d._get_object_coll_device"
)
local: Callable[[Tensor], Tensor] = _find("torch.distributed.tensor.DTensor._local_tensor").__get__
local_part: Callable[..., tuple[Any, Any]] = _find(
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset"
)
AsyncTensor: Any = _find("torch.distributed._functional_collectives.AsyncCollectiveTensor")


def arrived(tensor: Tensor) -> Tensor:
    """Return a tensor once the collective that fills it is done."""
    found: Tensor = tensor.wait() if isinstance(tensor, AsyncTensor) else tensor
    return found


NormBase: type[nn.Module] = _find("torch.nn.modules.batchnorm._NormBase")
BatchNorm: Any = _find("torch.nn.modules.batchnorm._BatchNorm")
InstanceNorm: type[nn.Module] = _find("torch.nn.modules.instancenorm._InstanceNorm")

for _name in ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"):
    if not isinstance(vars(nn.Module()).get(_name), dict):
        raise _refused(f"the dict torch.nn.Module().{_name}")


STORES = ("_parameters", "_buffers", "_modules")


def stores(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the dicts of a module's own parameters and of its own buffers."""
    return module._parameters, module._buffers


def children(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the dict of a module's own modules."""
    return module._modules


def has_hooks(module: nn.Module) -> bool:
    """Return True if a hook runs before or after a module's forward."""
    return bool(module._forward_pre_hooks or module._forward_hooks)


def hook_dicts(module: nn.Module) -> list[dict[int, Any]]:
    """Return all dicts in which a module keeps hooks and data about them."""
    return [held for key, held in vars(module).items() if "_hooks" in key and held is not None]


_with_kwargs: dict[int, bool] = _find("torch.nn.modules.module._global_forward_hooks_with_kwargs")


def remove_global_hook(handle: Any) -> None:
    """Remove a hook on every module, and the entry that `handle.remove()` leaves in torch, from
    which torch.compile concludes that hooks exist.
    """
    handle.remove()
    _with_kwargs.pop(handle.id, None)


# Attributes of every module that are handled elsewhere, or that a forward does not use.
NOT_FOR_FORWARD = frozenset(
    {
        "_parameters",
        "_buffers",
        "_modules",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
    }
)
_ParametrizedSpectralNorm: Any = _find("torch.nn.utils.parametrizations._SpectralNorm")


def is_spectral_norm(module: nn.Module) -> bool:
    """Return True if a module has or is a spectral norm, of the older or the newer kind."""
    return isinstance(module, _ParametrizedSpectralNorm) or any(
        isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values()
    )


# ---- tensors -------------------------------------------------------------------------------------

base: Callable[[Tensor], Tensor | None] = _find("torch.Tensor._base").__get__
version: Callable[[Tensor], int] = _find("torch.Tensor._version").__get__
indices: Callable[[Tensor], Tensor] = _find("torch.Tensor._indices")  # sparse, coalesced or not
values: Callable[[Tensor], Tensor] = _find("torch.Tensor._values")
# Makes a leaf of the class from a tensor, off its graph; it can require a gradient.
make_subclass: Callable[..., Any] = _find("torch.Tensor._make_subclass")
flatten_dense: Callable[[list[Tensor]], Tensor] = _find("torch._utils._flatten_dense_tensors")
unflatten_dense: Callable[[Tensor, list[Tensor]], tuple[Tensor, ...]] = _find(
    "torch._utils._unflatten_dense_tensors"
)


_find("torch.Tensor._backward_hooks")
_find("torch.Tensor._post_accumulate_grad_hooks")


def gradient_hooks(tensor: Tensor) -> tuple[Callable[[Tensor], Any], ...]:
    """Return the hooks that `register_hook` added to a tensor."""
    return tuple((tensor._backward_hooks or {}).values())


def has_accumulated_hooks(tensor: Tensor) -> bool:
    """Return True if a tensor has a hook from `register_post_accumulate_grad_hook`."""
    return bool(tensor._post_accumulate_grad_hooks)


_TensorGuards: Any = _find("torch._C._dynamo.guards.TensorGuards")


def metadata_guard(*tensors: Tensor) -> Callable[..., bool]:
    """Return a function that is True for tensors with the classes, dtypes, devices, shapes, strides
    and dispatch keys of these, which must be strided and not nested.
    """
    dims: dict[str, Any] = {"dynamic_dims_sizes": None, "dynamic_dims_strides": None}
    same: Callable[..., bool] = _TensorGuards(*tensors, **dims).check
    return same


# ---- list kernels --------------------------------------------------------------------------------

_FOREACH = """
    abs add add_ addcdiv_ addcmul_ clamp_max clamp_max_ clamp_min clamp_min_ copy_ div div_ lerp_
    maximum_ minimum_ mul mul_ neg neg_ norm reciprocal_ sign sign_ sqrt sub_ zero_
"""
listops: Any = SimpleNamespace(**{op: _find(f"torch._foreach_{op}") for op in _FOREACH.split()})


def clone_by_two(tensors: list[Tensor]) -> Sequence[Tensor]:
    """Clone a list in torch 2.11, which lacks `_foreach_clone`, by a multiplication and a copy."""
    copies: Sequence[Tensor] = listops.mul(tensors, True)
    listops.copy_(copies, tensors)
    return copies


clone_list: Callable[[list[Tensor]], Sequence[Tensor]] = getattr(
    torch, "_foreach_clone", clone_by_two
)
_FUSED = ("adagrad_", "adam_", "adamw_", "sgd_")
fused: Any = SimpleNamespace(**{op: _find(f"torch._fused_{op}") for op in _FUSED})
_ADD = {"weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0}
_ADD |= {"nesterov": False, "maximize": False, "is_first_step": False}


def masked_add_(
    targets: list[Tensor], news: list[Tensor], factor: float | Tensor, bad: Tensor | None
) -> None:
    """Add `new * factor` to each target in one pass, unless `bad`, a float32 flag, is 1.

    This is the only list kernel that can leave out NaN.
    """
    fused.sgd_(targets, news, [], lr=-factor, found_inf=bad, **_ADD)


def _check_masked_add() -> None:
    # A kernel that ignores the flag, or inverts it, would be wrong silently.
    with without_modes(), torch.no_grad():
        for flag, new, expected in ((1.0, float("nan"), 1.0), (0.0, 2.0, 5.0)):
            row = torch.tensor([[1.0], [new], [flag]], dtype=torch.float32, device="cpu")
            target, added, bad = row.unbind()
            masked_add_([target], [added], 2.0, bad)
            if target.tolist() != [expected]:
                what = f"{expected} of 1 + 2 * {new} where found_inf is {flag}"
                raise _refused(f"that torch._fused_sgd_ makes {what}")


if not (torch.compiler.is_compiling() or transforms_active()):  # the check reads values
    _check_masked_add()


# ---- optimizers ----------------------------------------------------------------------------------

# torch's formulas read step counts by the first, except on the devices in the second. Copies of the
# formulas replace both.
VALUE = "_get_value"
DEVICES = "_get_capturable_supported_devices"
_WARNED = "_warned_capturable_if_run_uncaptured"
SILENT = {_WARNED: True}  # without it an optimizer that was never constructed warns
MADE_BY = ("step", "_init_group")  # the methods that make its steps and its state
group_alike: Any = _find("torch.optim.Optimizer._group_tensors_by_device_and_dtype")

_LOOKED_UP = {
    "ASGD": (VALUE, DEVICES),
    "Adadelta": (DEVICES,),
    "Adafactor": (),
    "Adagrad": (VALUE,),
    "Adam": (VALUE, DEVICES),
    "AdamW": (VALUE, DEVICES),
    "Adamax": (VALUE, DEVICES),
    "Muon": (),
    "NAdam": (VALUE, DEVICES),
    "RAdam": (VALUE, DEVICES),
    "RMSprop": (DEVICES,),
    "Rprop": (DEVICES,),
    "SGD": (),
}


class Formula(NamedTuple):
    """The functions that make a step of a class of torch.optim. Each calls the next by name."""

    step: Any
    functional: Any
    single: Any
    lists: Any  # like `single`, over lists of tensors; None if torch has none

    @property
    def names(self) -> tuple[str, str]:
        """The names by which `step` calls `functional`, and `functional` calls `single`."""
        return self.functional.__name__, self.single.__name__


def formula_of(cls: Any) -> Formula | None:
    """Return the formula of `cls`; None for a class that is not built like those of torch.optim."""
    step: Any = inspect.unwrap(cls.step)
    module = step.__globals__
    name = module.get("__name__", "").rpartition(".")[2].lstrip("_")
    functional, single = module.get(name), module.get(f"_single_tensor_{name}")
    if functional is None or single is None or not hasattr(cls, "_init_group"):
        return None
    lists = module.get(f"_multi_tensor_{name}")
    return Formula(step, *(f and inspect.unwrap(f) for f in (functional, single, lists)))


def new_state(optimizer: Any) -> None:
    """Create the state of the first group's parameters, which have gradients, like a step."""
    lists = len(inspect.signature(optimizer._init_group).parameters) - 1
    optimizer._init_group(optimizer.param_groups[0], *([] for _ in range(lists)))


def _check_formulas() -> None:
    # If torch renames a function, a copy that replaces the old name would read values again.
    for name, looked_up in _LOOKED_UP.items():
        formula = formula_of(_find(f"torch.optim.{name}"))
        if formula is None:
            raise _refused(
                f"torch.optim.{name}._init_group and a _single_tensor function beside it"
            )
        functional, single = formula.names
        calls = ((functional,), (single,), looked_up)
        for function, called in zip(formula[:3], calls, strict=True):
            for other in called:
                if other not in function.__code__.co_names:
                    raise _refused(f"that {function.__module__}.{function.__name__} calls {other}")


_check_formulas()
if not hasattr(torch.optim.SGD([torch.zeros(1, device="cpu")]), _WARNED):
    raise _refused(f"torch.optim.Optimizer().{_WARNED}")
