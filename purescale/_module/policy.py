"""Mixed-precision policies: the dtypes of parameters, computation, outputs and norms."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._module.registered import Tensors, check_dicts
from .._torch.dtypes import HALF
from .._torch.tracing import under_transform
from .._tree.pytree import Tree, cast

_DTYPES = {
    **dict.fromkeys(("float16", "f16", "fp16", "half"), torch.float16),
    **dict.fromkeys(("bfloat16", "bf16"), torch.bfloat16),
    **dict.fromkeys(("float32", "f32", "fp32", "full"), torch.float32),
    **dict.fromkeys(("float64", "f64", "fp64"), torch.float64),
}
_FIELDS = ("params", "compute", "output", "norms")
_KEYS = {key: name for name in _FIELDS for key in (name, name[0])}


@dataclasses.dataclass(frozen=True)
class Policy:
    """The dtypes of a model: stored parameters, computation, outputs and normalisation layers.
    Usually made by `policy(text)`.

    Args:
        param_dtype: The dtype in which the state keeps parameters.
        compute_dtype: The dtype of the computation.
        output_dtype: The dtype of floating outputs. None leaves each as the model returns it.
        norm_dtype: The dtype of normalisation layers. None means float32, or `compute_dtype` if
            that is wider; with `autocast` None means torch's op lists.
        autocast: If True, torch's op lists for `compute_dtype` choose the dtype of each operator.

    Raises:
        TypeError: A dtype is not a floating `torch.dtype`.
        ValueError: `autocast` with a `compute_dtype` other than float16 or bfloat16.

    Example:
        >>> import torch
        >>> half = Policy(torch.float32, torch.float16, torch.float32)
        >>> half.cast_to_compute({"x": torch.ones(2), "labels": torch.tensor([1])})
        {'x': tensor([1., 1.], dtype=torch.float16), 'labels': tensor([1])}
    """

    param_dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype = torch.float32
    output_dtype: torch.dtype | None = torch.float32
    norm_dtype: torch.dtype | None = None
    autocast: bool = False

    def __post_init__(self) -> None:
        for name in ("param_dtype", "compute_dtype", "output_dtype", "norm_dtype"):
            value = getattr(self, name)
            if value is None and name in ("output_dtype", "norm_dtype"):
                continue
            if not (isinstance(value, torch.dtype) and value.is_floating_point):
                raise TypeError(
                    f"Policy.{name} must be a floating torch.dtype, got {value!r}. Fix: "
                    "torch.float32, or policy('params=float32,...')."
                )
        if self.autocast and self.compute_dtype not in HALF:
            raise ValueError(
                f"autocast computes in float16 or bfloat16, got {self.compute_dtype}. Fix: "
                "compute=autocast(bfloat16)."
            )
        if self.norm_dtype is None and not self.autocast:
            wide = torch.promote_types(self.compute_dtype, torch.float32)
            object.__setattr__(self, "norm_dtype", wide)

    def cast_to_param(self, tree: Tree) -> Tree:
        """Copy a tree and cast its floating tensors to `param_dtype`. The result shares no memory
        with `tree`.
        """
        return cast(tree, self.param_dtype, copy=True)

    def cast_to_compute(self, tree: Tree) -> Tree:
        """Copy a tree and cast its floating tensors to `compute_dtype`."""
        return cast(tree, self.compute_dtype, copy=True)

    def cast_to_output(self, tree: Tree) -> Tree:
        """Copy a tree and cast its floating tensors to `output_dtype`, if that is not None."""
        return cast(tree, self.output_dtype, copy=True)


def policy(text: str) -> Policy:
    """Equal to `Policy(params, compute, output, norms)` with the dtypes named in `text`.

    - Grammar: one dtype for all (`"bfloat16"`), or `key=dtype` pairs joined by commas.
    - Keys: `params`, `compute`, `output`, `norms` (or p, c, o, n).
    - Dtypes: float16, bfloat16, float32, float64 (or f16, fp16, half, bf16, f32, fp32, full, f64,
      fp64). `compute` also takes `autocast(float16)` and `autocast(bfloat16)`, torch's op lists.
    - Defaults: params is float32, compute is that of params, output that of compute. norms is
      float32, or compute if that is wider. With autocast, torch's op lists decide about norms, and
      outputs stay as the model returns them.

    Args:
        text: The policy in this grammar.

    Raises:
        TypeError: `text` is not a string.
        ValueError: A part of `text` is not in the grammar; the message names it.

    Example:
        >>> policy("params=float32,compute=float16,output=float32").compute_dtype
        torch.float16
        >>> policy("compute=autocast(bfloat16)").output_dtype is None
        True

    Source of the grammar: jmp.get_policy.
    """
    if not isinstance(text, str):
        raise TypeError(
            f"policy takes a string, got {text!r}. Fix: "
            "policy('params=float32,compute=float16,output=float32')."
        )
    names: dict[str, str] = {}  # of dtypes, by key
    for part in text.replace(" ", "").split(","):
        key, equals, value = part.partition("=")
        if not equals and "," not in text:
            names = dict.fromkeys(("params", "compute", "output"), key)
        elif key not in _KEYS or _KEYS[key] in names:
            raise ValueError(
                f"policy {text!r}: {part!r} is "
                f"{'given twice' if key in _KEYS else 'not understood'}. Expected key=dtype with "
                "the keys params, compute, output, norms. Fix: "
                "'params=float32,compute=float16,output=float32'."
            )
        else:
            names[_KEYS[key]] = value
    compute = names.get("compute", names.get("params", "float32"))
    autocast = re.fullmatch(r"autocast\((.*)\)", compute, re.DOTALL)
    compute_dtype = _dtype(text, autocast[1] if autocast else compute)
    default_output = None if autocast else compute_dtype  # as torch.autocast, which casts no output
    return Policy(
        param_dtype=_dtype(text, names.get("params", "float32")),
        compute_dtype=compute_dtype,
        output_dtype=_dtype(text, names["output"]) if "output" in names else default_output,
        norm_dtype=_dtype(text, names["norms"]) if "norms" in names else None,
        autocast=autocast is not None,
    )


_parse = policy  # with_policy has a parameter of that name


def _dtype(text: str, name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ValueError(
            f"policy {text!r}: unknown dtype {name!r}. Fix: one of {', '.join(_DTYPES)}; for "
            "compute also autocast(float16) and autocast(bfloat16)."
        )
    return _DTYPES[name]


def with_policy(
    apply: Callable[..., tuple[Any, dict[str, Tensor]]], policy: Policy | str
) -> Callable[..., tuple[Any, dict[str, Tensor]]]:
    """Equal to `lambda p, b, *a, **k: cast_to_output(apply(cast_to_compute(p),
    b, *cast_to_compute(a), **cast_to_compute(k)))`.

    - Parameters must be in `policy.param_dtype` (master weights). They are cast inside the call,
      so their gradients arrive in that dtype.
    - Batch, layer, group, instance and rms norms compute in `policy.norm_dtype`, float32 by
      default. Their output has the dtype of their input.
    - Floating inputs are cast to `policy.compute_dtype` and floating outputs to
      `policy.output_dtype`, in any container that torch's pytree knows.
    - Buffers are never cast and keep their dtype. Frozen parameters are cast like the others.
      Where the forward writes into one, as momentum encoders do, the write arrives in the dtype
      that the state keeps; elements that it leaves alone keep their bits.
    - With `compute=autocast(...)` nothing is cast, and torch's op lists choose the dtypes, with the
      results of `torch.autocast` around the module: a loss that the model returns is float32. Only
      `output=` casts outputs; `output=float32` is for a loss that is computed from them, outside of
      autocast. Norms leave the lists if `norms=` is given, and under torch.func, which lacks a rule
      for some. Use it for a net that adds floating buffers (such as positional encodings) to its
      activations, which fails in plain half compute.

    Args:
        apply: A function that `make_functional` returned, or one like it.
        policy: A `Policy` or the text of one.

    Returns:
        A pure function like `apply`, with its `norm_params` and `frozen_params`.

    Raises:
        TypeError: `policy` is of another type. From the call: a parameter is not in
            `policy.param_dtype`.
        RuntimeError: From the call, torch's own: half and other dtypes meet in an operator, where
            the forward uses a buffer or makes a tensor without a dtype (`compute=autocast(...)` is
            the cure); or the weight of an Embedding(sparse=True) is cast.

    Example:
        >>> import torch
        >>> from purescale import make_functional
        >>> apply, params, buffers = make_functional(torch.nn.Linear(2, 1))
        >>> half = with_policy(apply, "params=float32,compute=float16")
        >>> half(params, buffers, torch.ones(3, 2))[0].dtype
        torch.float16

    Source of the rule: jmp.Policy; mmpose's patch_norm_fp32 and apex's keep_batchnorm_fp32, which
    rewrite the module instead.
    """
    dtypes = _parse(policy) if isinstance(policy, str) else policy
    if not isinstance(dtypes, Policy):
        raise TypeError(
            f"with_policy takes a Policy or its string, got {policy!r}. Fix: "
            "policy('params=float32,compute=float16,output=float32')."
        )
    norm_params: frozenset[str] = getattr(apply, "norm_params", frozenset())
    frozen_params: frozenset[str] = getattr(apply, "frozen_params", frozenset())

    def cast_weights(weights: Tensors) -> Tensors:
        if dtypes.autocast:
            return weights
        return {
            name: weight.to(dtypes.norm_dtype if name in norm_params else dtypes.compute_dtype)
            if weight.is_floating_point()
            else weight
            for name, weight in weights.items()
        }

    @functools.wraps(apply)  # with its attributes, such as `norm_params`
    def cast_apply(
        params: Tensors, buffers: Tensors, *args: Any, **kwargs: Any
    ) -> tuple[Any, Tensors]:
        check_dicts(params, buffers)
        _check_params(params, dtypes)
        frozen = {name: buffer for name, buffer in buffers.items() if name in frozen_params}
        if not dtypes.autocast:
            args, kwargs = cast((args, kwargs), dtypes.compute_dtype)
        device = next((weight.device.type for weight in params.values()), "cpu")
        norm_dtype = dtypes.norm_dtype or (torch.float32 if under_transform() else None)
        norms = (
            nullcontext()
            if norm_dtype is None or {dtypes.compute_dtype, norm_dtype} == {torch.float32}
            else _NormsIn(norm_dtype, (dtypes.compute_dtype,))
        )
        with (
            torch.autocast(device, dtypes.compute_dtype) if dtypes.autocast else nullcontext(),
            norms,
        ):
            computed = cast_weights(frozen)
            out, new_buffers = apply(cast_weights(params), {**buffers, **computed}, *args, **kwargs)
        for name in computed.keys() & new_buffers.keys():
            new_buffers[name] = _frozen_after_forward(
                frozen[name], computed[name], new_buffers[name]
            )
        return cast(out, dtypes.output_dtype), new_buffers

    return cast_apply


def _frozen_after_forward(old: Tensor, computed: Tensor, new: Tensor) -> Tensor:
    """Return a frozen parameter after a forward, which was called with `computed`, its cast: the
    elements that it wrote are those of `new`, all others have the bits of `old`.
    """
    if new.dtype is old.dtype:
        return new.clone() if new is old else new
    return torch.where(new == computed, old, new.to(old.dtype))


def _check_params(params: Tensors, policy: Policy) -> None:
    for name, weight in params.items():
        if weight.is_floating_point() and weight.dtype is not policy.param_dtype:
            raise TypeError(
                f"params[{name!r}] is {weight.dtype}; the policy keeps parameters in "
                f"{policy.param_dtype} and casts them itself. Fix: `params = "
                "policy.cast_to_param(params)`, or "
                f"'params={str(weight.dtype).removeprefix('torch.')}' in the policy."
            )


# ---- norms ---------------------------------------------------------------------------------------

# For each norm: the positions of the running statistics that it updates in place.
_NORMS: dict[Callable[..., Any], tuple[tuple[int, str], ...]] = {
    **dict.fromkeys((F.layer_norm, F.group_norm, F.rms_norm), ()),
    **dict.fromkeys((torch.layer_norm, torch.group_norm, torch.rms_norm), ()),
    **dict.fromkeys((F.batch_norm, F.instance_norm), ((1, "running_mean"), (2, "running_var"))),
    **dict.fromkeys(
        (torch.batch_norm, torch.instance_norm), ((3, "running_mean"), (4, "running_var"))
    ),
}


class _NormsIn(TorchFunctionMode):
    """A mode in which norms with an input in one of `input_dtypes` compute in `dtype`: input,
    weights and running statistics are cast. The output has the dtype of the input.
    """

    def __init__(self, dtype: torch.dtype, input_dtypes: tuple[torch.dtype, ...]) -> None:
        super().__init__()
        self.dtype, self.input_dtypes = dtype, input_dtypes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        x = args[0] if args else kwargs.get("input")
        is_cast = isinstance(x, Tensor) and x.dtype in self.input_dtypes
        if func not in _NORMS or not is_cast:
            # Tensor.unflatten calls super(), which Dynamo does not follow in a mode.
            func = torch.unflatten if func is Tensor.unflatten else func
            return func(*args, **kwargs)

        cast_args, cast_kwargs = list(cast(args, self.dtype)), cast(kwargs, self.dtype)
        out = func(*cast_args, **cast_kwargs)
        # In eval mode the statistics are not written back, because a cast to a narrower dtype and
        # back would change them.
        training = kwargs.get("training", kwargs.get("use_input_stats", func is F.instance_norm))
        updates = args[5] if len(args) > 5 else training
        for position, name in _NORMS[func] if updates else ():
            by_position = position < len(args)
            stored = args[position] if by_position else kwargs.get(name)
            computed = cast_args[position] if by_position else cast_kwargs.get(name)
            if stored is not None and computed is not stored:
                stored.copy_(computed)
        return out.to(x.dtype)


class norms_in_float32(_NormsIn):  # noqa: N801, a context manager is used like a function
    """Equal to calling every norm of torch.nn.functional inside as `norm(x.float()).to(x.dtype)`.

    A context manager, for batch, layer, rms, group and instance norm. Only norms with half inputs
    change. Their weights are cast too; running statistics are updated in float32 and keep their
    dtype. Works under compile and vmap, where half BatchNorm otherwise raises.

    Example:
        >>> import torch
        >>> with norms_in_float32():
        ...     torch.nn.functional.layer_norm(torch.tensor([6e4, -6e4], dtype=torch.float16), (2,))
        tensor([ 1., -1.], dtype=torch.float16)

    Source of the rule: mmpose's patch_norm_fp32, apex's keep_batchnorm_fp32.
    """

    def __init__(self) -> None:
        super().__init__(torch.float32, HALF)
