"""An `nn.Module` as a pure function of its parameters and buffers."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .._module.blueprint import Blueprint, Hooks
from .._module.method import Call, Method, check_method
from .._module.model_copy import ModelCopy
from .._module.modes import modes_of
from .._module.new_buffers import new_buffers, refuse_new_registrations
from .._module.recompute import explain_checkpointing, forbid_recompute, prepare_recompute
from .._module.registered import (
    Tensors,
    check_shared_memory,
    disagree,
    registered_tensors,
)
from .._module.side_effects import Reads, SideEffects, warn_of_lost
from .._module.state_attributes import state_containers, state_tensors, tensors_in_attributes
from .._torch import dtensor, foreach, private
from .._torch.autocast import explain_autocast
from .._torch.tracing import PLAIN_TYPES, under_transform
from .._tree import tree as _tree
from .._tree.leaves import are_dense_real, is_constant

_WITHOUT_STATISTICS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.GroupNorm)


@dataclasses.dataclass(frozen=True, eq=False)
class Apply:
    """The function that `make_functional` returns: `apply(params, buffers, *args, train=True,
    method=None, **kwargs) -> (out, new_buffers)`.
    """

    _blueprint: Blueprint
    _params: frozenset[str]
    _buffers: frozenset[str]
    norm_params: frozenset[str]  # the weights and biases of normalisation layers
    # parameters with requires_grad=False, which are among the buffers
    frozen_params: frozenset[str]
    _renormalised: frozenset[str]  # weights of embeddings with max_norm, which write into them
    _not_in_half: tuple[str, ...]  # messages: parts that plain half compute cannot run
    without_statistics: tuple[str, ...]  # norms that keep no statistics of a batch
    _overlaps: dict[str, str]  # buffer -> a buffer that shares some of its memory in the model

    def __call__(
        self,
        params: Tensors,
        buffers: Tensors,
        *args: Any,
        train: bool = True,
        method: Method = None,
        **kwargs: Any,
    ) -> tuple[Any, Tensors]:
        if not (_are_tensors(params) and _are_tensors(buffers)):
            check_dicts(params, buffers)
        if params.keys() != self._params or buffers.keys() != self._buffers:
            raise RuntimeError(self._wrong_names(params, buffers))
        if method is not None:
            check_method(method)
        call = Call(args, kwargs, bool(train), method)
        # A buffer that is not dense, such as a sparse adjacency matrix, is returned as it is.
        constants = _constants(buffers)
        compiling, transformed = torch.compiler.is_dynamo_compiling(), under_transform()
        # List kernels have no vmap rule.
        copies = _copies(buffers, constants, one_by_one=compiling or transformed)
        if compiling:
            # Writes into these copies do not reach params. The compiler removes unused copies.
            tensors = {name: param.clone() for name, param in params.items()} | copies
            # If the graph breaks inside a `try`, Dynamo gives up this frame and runs it eagerly,
            # so the condition is read again.
            try:
                if torch.compiler.is_dynamo_compiling():
                    return self._forward(tensors, copies, call)[1:]
            except Exception:
                raise
        return self._eager(params, constants, copies, call, transformed)

    @private.only_inlined
    def _eager(
        self,
        params: Tensors,
        constants: Tensors,
        copies: Tensors,
        call: Call,
        transformed: bool,
    ) -> tuple[Any, Tensors]:
        blueprint = self._blueprint
        tensors = {**params, **copies}
        for name in self._renormalised:
            tensors[name] = params[name].clone()
        watched = params
        if constants or self._overlaps:
            watched = {**params, **constants, **{name: copies[name] for name in self._overlaps}}
        has_graph = torch.is_grad_enabled() and not transformed
        first = blueprint.first_calls.watches_next and call.train and has_graph
        forward: Callable[..., tuple[ModelCopy, Any, Tensors]] = self._forward
        if first:
            blueprint.first_calls.watches_next = False
            forward = self._watched if blueprint.can_watch else forward
        with SideEffects(
            params, watched, tensors, self._overlaps, transformed=transformed, thorough=first
        ):
            try:
                copy, out, new = forward(tensors, copies, call)
            except RuntimeError as error:
                if transformed:
                    explain_checkpointing(error)
                    explain_autocast(error)
                raise
            finally:
                filled = blueprint.release_filled()
            if filled:
                refuse_new_registrations(copy)
        if transformed:
            forbid_recompute(copy)
        elif has_graph:
            prepare_recompute(copy, copies, constants)
        return out, new

    @private.only_inlined
    def _forward(
        self, tensors: Tensors, copies: Tensors, call: Call
    ) -> tuple[ModelCopy, Any, Tensors]:
        """Run the forward in a copy of the model, and read the buffers that it leaves there."""
        copy = self._blueprint.make(tensors, train=call.train)
        out = call.run(copy.root)
        return copy, out, new_buffers(copy, copies)

    def _watched(self, *args: Any) -> tuple[ModelCopy, Any, Tensors]:
        """Run the forward, and warn of tensors in plain attributes whose values are lost."""
        with Reads() as reads:
            copy, out, new = self._forward(*args)
        warn_of_lost(copy, reads)
        return copy, out, new

    def _wrong_names(self, params: Tensors, buffers: Tensors) -> str:
        faults = []
        for which, tree, expected in (
            ("params", params, self._params),
            ("buffers", buffers, self._buffers),
        ):
            if set(tree) != expected:
                missing = sorted(expected - set(tree))
                extra = [str(name) for name in tree if name not in expected]
                faults.append(
                    f"{which} has the wrong names: missing {_tree.join_names(missing)}; not in the "
                    f"model: {_tree.join_names(extra)}"
                )
        cause = "they belong to another model, or to this one before it was changed"
        place = (
            "a parameter with requires_grad=False belongs in buffers, any other in params; if no "
            "parameter requires a gradient, as in a frozen teacher, all belong in params"
        )
        if set(params) == self._buffers and set(buffers) == self._params:
            cause = "params and buffers are swapped" + (
                "" if params and buffers else f", or {place}"
            )
        elif set(params) | set(buffers) == self._params | self._buffers:
            cause = place
        return (
            f"{'; '.join(faults)}. Likely cause: {cause}. Fix: `apply, params, buffers = "
            "make_functional(model)`, all three from one call."
        )


def check_dicts(params: Any, buffers: Any) -> None:
    """Check that `params` and `buffers` are dicts of tensors."""
    for which, tree in (("params", params), ("buffers", buffers)):
        if not isinstance(tree, dict):
            raise TypeError(
                f"{which} is {_tree.described(tree)}; expected the dict of tensors by dotted name "
                "that make_functional returns. Likely cause: a missing argument. Fix: "
                "`out, buffers = apply(params, buffers, x)`; a model without buffers takes {}."
            )
        for name, value in tree.items():
            if type(value) is not Tensor and not isinstance(value, Tensor):
                raise TypeError(
                    f"{which}[{name!r}] is {type(value).__name__} {value!r}; expected a tensor. "
                    f"Fix: pass the {which} that make_functional returned, or `torch.tensor(...)`."
                )


# ---- a call --------------------------------------------------------------------------------------


_requires_grad = operator.attrgetter("requires_grad")


def _are_tensors(tree: Any) -> bool:
    """Return True for a plain dict of plain tensors. Other valid dicts give False."""
    return type(tree) is dict and set(map(type, tree.values())) <= PLAIN_TYPES


def _copies(buffers: Tensors, constants: Tensors, *, one_by_one: bool) -> Tensors:
    """Return copies that the forward may write into. Constants are not copied."""
    values = buffers.values()
    if one_by_one or constants or not buffers or any(map(_requires_grad, values)):
        return {n: b if n in constants else b.clone() for n, b in buffers.items()}
    return dict(zip(buffers, foreach.clone_listed(list(values)), strict=True))


def _constants(buffers: Tensors) -> Tensors:
    """Return the buffers that are not dense tensors, which no call changes."""
    if not buffers or are_dense_real(list(buffers.values())):
        return {}
    return {name: buffer for name, buffer in buffers.items() if is_constant(buffer)}


def _gradient_hooks(params: Tensors) -> Hooks:
    for name, param in params.items():
        if private.has_accumulated_hooks(param):
            raise ValueError(
                f"{name} has a hook of register_post_accumulate_grad_hook, which would never run: "
                "gradients are values here, and `.grad` is not set. Fix: do its work between "
                "gradients and step, or use `weight.register_hook`, which is kept."
            )
    return {name: hooks for name, p in params.items() if (hooks := private.gradient_hooks(p))}


# ---- make_functional ---------------------------------------------------------------------------


def make_functional(
    model: nn.Module, state_attributes: tuple[str, ...] = ()
) -> tuple[Apply, Tensors, Tensors]:
    """Equal to `apply = lambda params, buffers, *args: (functional_call(model,
    {**params, **(b := copy(buffers))}, args), b)`.

    Call it as `out, new_buffers = apply(params, buffers, *args, train=True, method=None,
    **kwargs)`. It changes neither `params` nor `buffers`, and works under `torch.compile`,
    `torch.vmap` and `torch.func.grad`.

    - Each call of `apply` makes the modules anew, with the tensors of the call in them, and drops
      them afterwards. It does not change `model`, and later changes to `model` do not change
      `apply`. What cannot be made anew, such as a lock or a logger, all calls share with `model`.
    - Tied weights stay tied and have one name, their first. This holds for one parameter in several
      places, a parameter that is also a buffer, and two parameters over the same elements of
      memory. Their gradient is the sum over all places.
    - `train` sets the modes that `model.train(train)` would set, also where a class overrides that
      method. If `model` is in train mode, its modules in eval mode stay in eval mode.
    - `method` names what is called instead of `forward`: a method of the model ("decode"), or
      one of its parts. It may be a function of the module too: `method=lambda vae, x:
      vae.decode(vae.encode(x))`. As in torch, hooks of a module run if the module itself is called.
    - A parameter with `requires_grad=False` is in `buffers`, unless no parameter requires a
      gradient.
    - Buffers, persistent or not, are returned as new ones, except what is not a dense tensor: it
      is returned as it is. Other changes made by `forward`
      (attributes, tensors in them, hooks, lists, dicts, sets, helper objects) end with the call, so
      a cache is made anew in each call. A region that torch.utils.checkpoint runs again in the
      backward still sees them.
    - `apply` may be called inside of itself, again in the backward pass (checkpointing around it)
      and from several threads.
    - A parameter or buffer that is also in a list, a tuple, a dict, a set or an attribute of the
      model is replaced there too. Hooks of `weight.register_hook` run on the gradient of each call.
    - `out` is what the module returns. It may be an argument or a view of one.
    - `apply.norm_params` names the weights of torch's own normalisation layers, for `with_policy`.
      Add those of your own class with
      `dataclasses.replace(apply, norm_params=apply.norm_params | {"my_norm.weight"})`.
    - Dropout draws from torch's global generator, unless `train_step` is given an `rng`.

    Args:
        model: The module. It is not changed.
        state_attributes: Names or globs of tensors in plain attributes that are state, such as
            `("*.mem",)` for the membranes of a spiking net. They are among the buffers. In a list
            or dict, the name is `layer.attribute.key`; the forward may replace it by one with the
            same keys.

    Returns:
        `apply, params, buffers`. The last two are dicts of detached copies by dotted name.

    Raises:
        TypeError: `model` is not a module, or contains a torch.jit module, a
            DistributedDataParallel, or a module with `__slots__`. From `apply`: `method` is not one
            of the model, or is bound to a live module.
        ValueError: A lazy parameter has not seen a batch; a parameter is in a class attribute, or
            shares memory with a tensor that is not tied to it, such as a buffer that is a view of
            it; a name of `state_attributes` matches nothing, or what is not a tensor; or a closure,
            a hook, a patched or compiled forward, or an object written in C holds
            a part of the live model.
        RuntimeError: From `apply`: the names are of another model, a parameter is read after the
            call, or the forward does one of the following. It registers a parameter, buffer or
            module, replaces or removes a parameter, removes a buffer or replaces it in only one of
            two places, or writes into a parameter or into a buffer that shares memory with another.
            Writes into `.data` are found in the first call in training, on a CPU, and in all calls
            if `PURESCALE_DEBUG_DONATION=1` was set before the import. Under `torch.compile` all
            writes change a copy and are dropped.

    Warns:
        UserWarning: Once, in the first call in training: the forward reads a tensor in a plain
            attribute and then changes it, and the next call would not see the change.

    Example:
        >>> from torch import nn, ones
        >>> model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        >>> apply, params, buffers = make_functional(model)
        >>> out, new_buffers = apply(params, buffers, ones(4, 3))
        >>> buffers["1.num_batches_tracked"], new_buffers["1.num_batches_tracked"]
        (tensor(0), tensor(1))

    Source: torch.func.functional_call, which writes into the buffers it is given and keeps hold of
    the live module; `method` is that of flax's Module.apply.
    """
    _check_module(model)
    registered = registered_tensors(model, state_tensors(model, state_attributes))
    check_shared_memory(registered)
    frozen = {name: p for name, p in registered.params.items() if not p.requires_grad}
    if len(frozen) == len(registered.params):
        frozen = {}
    params = {name: p for name, p in registered.params.items() if name not in frozen}
    buffers = frozen | registered.buffers
    blueprint = Blueprint.of(
        model,
        registered.names,
        _gradient_hooks(params),
        state_containers(model, state_attributes),
    )
    modes = modes_of(model, lambda: blueprint.modules(_detached_copies(params | buffers)))
    apply = Apply(
        blueprint.with_modes(*modes),
        _params=frozenset(params),
        _buffers=frozenset(buffers),
        frozen_params=frozenset(frozen),
        _overlaps=dict((*registered.overlaps, *((b, a) for a, b in registered.overlaps))),
        **_facts_of_modules(model, registered.names),
    )
    return apply, _detached_copies(params), _detached_copies(buffers)


def _detached_copies(tensors: Tensors) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _check_module(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"make_functional takes an nn.Module, got {type(model).__name__}. Fix: pass the "
            "module; a plain function of tensors is pure already."
        )
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"{path or 'the model'} is a {type(module).__name__} of torch.jit, which cannot be "
                "copied without its tensors. Fix: pass the module that it was scripted or traced "
                "from, and compile the step for speed."
            )
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise TypeError(
                f"{path or 'the model'} is a {type(module).__name__}, whose reducer, written in "
                "C++, waits for gradients of the live parameters. Fix: "
                "`make_functional(wrapper.module)`, and `train_step(..., group=...)` for the ranks."
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ValueError(
                f"{name} is not initialised yet: a lazy module learns its shapes from the first "
                "batch. Fix: run `model(example_batch)` once before make_functional(model)."
            )


def _facts_of_modules(model: nn.Module, names: dict[int, str]) -> dict[str, Any]:
    """Return the fields of `Apply` that follow from the classes of the modules. `names`: the names
    of parameters by id.
    """
    norms, without_statistics, renormalised, not_in_half = set(), [], set(), []
    for path, module in model.named_modules():
        if isinstance(module, _WITHOUT_STATISTICS):
            without_statistics.append(path)
        if _is_norm(module):
            norms |= {names[id(p)] for p in module.parameters()}
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            if module.max_norm is not None:
                renormalised.add(names[id(module.weight)])
            if module.sparse:
                not_in_half.append(
                    f"{path or 'the model'} is {type(module).__name__}(sparse=True), whose sparse "
                    "gradient torch cannot cast. Fix: sparse=False, which gives the same values"
                )
        if private.is_spectral_norm(module):
            not_in_half.append(
                f"{path or 'the model'} is a spectral norm, which multiplies the cast weight by "
                "buffers, which are never cast. Fix: compute=autocast(float16)"
            )
    return {
        "norm_params": frozenset(norms),
        "_renormalised": frozenset(renormalised),
        "_not_in_half": tuple(not_in_half),
        "without_statistics": tuple(without_statistics),
    }


def _is_norm(module: nn.Module) -> bool:
    # The second holds for batch and instance norms, also those that other libraries derive from
    # torch's own base class.
    return isinstance(module, (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)) or (
        hasattr(module, "track_running_stats") and hasattr(module, "running_mean")
    )


def load_into(model: nn.Module, params: Tensors, buffers: Tensors) -> None:
    """Equal to `model.load_state_dict({**params, **buffers})`, also for tied and frozen weights and
    for buffers that are not persistent.

    The inverse of `make_functional`. Copies values into the existing tensors of `model`, so an
    optimizer, a tied weight or a hook that holds them sees the new values. Nothing is copied unless
    everything fits. Values in another dtype or on another device are converted, as by
    load_state_dict.

    Args:
        model: The module to write into.
        params: Parameters by the names that `make_functional` gives. Frozen parameters may be in
            either dict.
        buffers: Buffers by name, persistent or not, and tensors in plain attributes.

    Raises:
        TypeError: `model` is not a module, or a dict is not one of tensors.
        ValueError: Lists missing and unexpected names, wrong shapes, and different values for
            tensors that share memory.

    Example:
        >>> model = nn.BatchNorm1d(2)
        >>> apply, params, buffers = make_functional(model)
        >>> load_into(model, {**params, "weight": torch.tensor([2.0, 3.0])}, buffers)
        >>> model.weight.tolist()
        [2.0, 3.0]

    Source of the rule: torch.nn.Module.load_state_dict, which requires every name of a tied weight
    and rejects buffers that are not persistent.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"load_into takes an nn.Module first, got {type(model).__name__}. Fix: "
            "load_into(model, params, buffers)."
        )
    check_dicts(params, buffers)
    registered = registered_tensors(model)
    if rest := buffers.keys() - {*registered.params, *registered.buffers, *registered.aliases}:
        state = {n: t for n, t in tensors_in_attributes(model).items() if n in rest}
        registered = registered_tensors(model, state)
    targets = registered.params | registered.buffers
    sources = {**params, **buffers}
    faults = [f"missing {name}" for name in targets if name not in sources]
    for name in sources:
        if name in registered.aliases:
            first = registered.names[id(registered.aliases[name])]
            faults.append(f"{name} is tied to {first} in the model, use that name")
        elif name not in targets:
            faults.append(f"{name} is not in the model")
    faults += [f"{name} is in both dicts" for name in params if name in buffers]
    reasons = {name: _unfit_reason(target, sources.get(name)) for name, target in targets.items()}
    faults += [f"{name} {reason}" for name, reason in reasons.items() if reason]
    if not faults:
        faults = [
            f"{first} and {other} share memory in the model, and their values there differ"
            for first, other in registered.overlaps
            if disagree(targets[first], targets[other], sources[first], sources[other])
        ]
    if faults:
        raise ValueError(
            "params and buffers do not fit the model, so nothing was copied: "
            f"{_tree.join_names(faults, 8)}. Likely cause: they belong to another model, are "
            "stacked over an ensemble, or are incomplete. Fix: `load_into(model, state.params, "
            "state.buffers)` with the model that they were made from."
        )
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(sources[name])


def _unfit_reason(target: Tensor, source: Tensor | None) -> str:
    """Return the reason that `source` cannot be copied into `target`; "" if it can or is None."""
    if nn.parameter.is_lazy(target):
        return "is not initialised yet, run `model(example_batch)` once"
    if target.is_meta:
        return "of the model has no memory, run `model.to_empty(device=...)` first"
    if reason := _unwritable_reason(target):
        return f"of the model {reason}"
    if source is None:
        return ""
    if source.is_meta:
        return "is on meta, without values"
    if source.shape != target.shape:
        return f"has shape {tuple(source.shape)}, expected {tuple(target.shape)}"
    if source.is_complex() and not target.is_complex():
        return f"is {source.dtype}, expected {target.dtype}"
    if (source.layout, dtensor.is_dtensor(source)) != (target.layout, dtensor.is_dtensor(target)):
        return (
            f"is {type(source).__name__} of {source.layout}, expected "
            f"{type(target).__name__} of {target.layout}"
        )
    return ""


def _unwritable_reason(target: Tensor) -> str:
    """Return the reason that torch would refuse a copy into `target`, or ""."""
    if target.is_inference() and not torch.is_inference_mode_enabled():
        return "was made under inference_mode, make it outside"
    if target.layout is torch.strided and private.overlap_within(target) == 1:
        return "was expanded, so its elements share memory, register a `.clone()` of it"
    return ""
