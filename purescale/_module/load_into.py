"""Parameters and buffers back into a module: the inverse of `make_functional`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .._module.registered import Tensors, check_dicts, plain_attributes, registered_tensors
from .._torch import dtensor
from .._tree import pytree


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
        ValueError: Lists missing and unexpected names and wrong shapes; or tensors of the model
            share memory without being one.

    Example:
        >>> from torch import nn
        >>> from purescale import make_functional
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
        attributes = plain_attributes(model).items()
        state = {n: t for n, t in attributes if n in rest and isinstance(t, Tensor)}
        registered = registered_tensors(model, state)
    targets = registered.params | registered.buffers
    sources = {**params, **buffers}
    faults = [f"missing {name}" for name in targets if name not in sources]
    for name in sources:
        if name in registered.aliases:
            first = registered.first_name_of[id(registered.aliases[name])]
            faults.append(f"{name} is tied to {first} in the model, use that name")
        elif name not in targets:
            faults.append(f"{name} is not in the model")
    faults += [f"{name} is in both dicts" for name in params if name in buffers]
    reasons = {name: _unfit_reason(target, sources.get(name)) for name, target in targets.items()}
    faults += [f"{name} {reason}" for name, reason in reasons.items() if reason]
    if faults:
        raise ValueError(
            "params and buffers do not fit the model, so nothing was copied: "
            f"{pytree.join_names(faults, 8)}. Likely cause: they belong to another model, are "
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
    if target.is_inference() and not torch.is_inference_mode_enabled():
        return "of the model was made under inference_mode, make it outside"
    if target.layout is torch.strided and _is_expanded(target):
        return "of the model was expanded, so its elements share memory, `.clone()` it"
    if source is None:
        return ""
    if source.is_meta:
        return "is on meta, without values"
    if source.shape != target.shape:
        return f"has shape {tuple(source.shape)}, expected {tuple(target.shape)}"
    if source.is_complex() and not target.is_complex():
        return f"is {source.dtype}, expected {target.dtype}"
    kind, expected = (
        f"{'DTensor' if dtensor.is_dtensor(t) else 'Tensor'} of {t.layout}"
        for t in (source, target)
    )
    return "" if kind == expected else f"is {kind}, expected {expected}"


def _is_expanded(tensor: Tensor) -> bool:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and not stride for size, stride in sizes)
