"""A module without its tensors, and a call of it with tensors in their places."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._module.argument import CURE
from .._torch import private as _torch

Tensors = dict[str, Tensor]

# torch 2.11's compiler does not: there an attribute that a forward adds stays
_FOLLOWS_DICTS = torch.__version__ >= "2.12"
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}


class _Place(NamedTuple):
    """A module of a skeleton, and which tensors go into it: its own name for one -> the dotted
    name.
    """

    module: nn.Module
    parameters: dict[str, str]
    buffers: dict[str, str]
    children: tuple[nn.Module | None, ...]
    # its own, which its forward may set; None for torch's modules, where it sets nothing
    attributes: frozenset[str] | None


# Where a module keeps a tensor, its own name for it, the dotted name.
_Entry = tuple[dict[str, Any], str, str]


class Skeleton(NamedTuple):
    """A copy of the model whose tensors lie on the meta device; each of its modules is one place,
    whatever names it has.
    """

    root: nn.Module
    places: tuple[_Place, ...]
    entries: list[_Entry]
    stores: list[dict[str, Any]]  # all dicts that modules keep tensors in
    lengths: list[int]  # of each
    vacant: list[tuple[dict[str, Any], str]]  # names that hold None there


# ---- made ----


def skeleton_of(root: nn.Module) -> Skeleton:
    # By identity: one tensor has one name, its first, in all of its places.
    parameters = {id(tensor): name for name, tensor in root.named_parameters()}
    buffers = {id(tensor): name for name, tensor in root.named_buffers()}
    places = tuple(
        _Place(
            module,
            {
                key: parameters[id(tensor)]
                for key, tensor in _torch.stores(module)[0].items()
                if tensor is not None
            },
            {
                key: buffers[id(tensor)]
                for key, tensor in _torch.stores(module)[1].items()
                if tensor is not None
            },
            _torch.children(module),
            None if _is_torchs(module) else frozenset(vars(module)) - _OF_EVERY_MODULE,
        )
        for module in root.modules()
    )
    stores = [store for place in places for store in _torch.stores(place.module)]
    vacant = [(store, key) for store in stores for key, value in store.items() if value is None]
    return Skeleton(root, places, _entries(places), stores, list(map(len, stores)), vacant)


def _is_torchs(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.modules.") and not _torch.has_hooks(module)


def without_tensors(model: nn.Module) -> nn.Module:
    """A copy of `model` whose parameters and buffers lie on the meta device; what was one tensor in
    two places stays one.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in vars(module).values():
            # Left by torch.nn.utils.weight_norm and its kind, computed anew in each forward;
            # deepcopy refuses such tensors.
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().to("meta")
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(
            parameter.detach().to("meta"), requires_grad=parameter.requires_grad
        )
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    skeleton = copy.deepcopy(model, memo)
    for module in skeleton.modules():
        if type(module) is nn.SyncBatchNorm:
            module.__class__ = _SyncBatchNorm
    return skeleton


class _SyncBatchNorm(nn.SyncBatchNorm):
    """SyncBatchNorm that can be told to look at this rank alone: its statistics are then gathered
    here and reduced afterwards.
    """

    def forward(self, input: Tensor) -> Tensor:
        if any(getattr(mode, "local_statistics", False) for mode in _torch.function_modes()):
            out: Tensor = _torch.BatchNorm.forward(self, input)
            return out
        return super().forward(input)


# ---- called ----


def called(
    skeleton: Skeleton, tensors: Tensors, copies: Tensors, args: Any, kwargs: Any
) -> tuple[Any, Tensors]:
    """The forward with `tensors` in their places, and nothing of it left there afterwards."""
    kept = []
    for place in skeleton.places:
        own = vars(place.module)
        kept.append(own)
        # attributes that the forward sets go with it
        object.__setattr__(place.module, "__dict__", own.copy())
    before = _put(skeleton.entries, tensors)
    out = skeleton.root(*args, **kwargs)
    for place in skeleton.places:
        if _torch.children(place.module) != place.children:
            raise RuntimeError(
                f"the forward of the model put another module into {type(place.module).__name__}. "
                "Its tensors would be no arguments of `apply`. Cure: make it in `__init__`, or "
                "run `model(example_batch)` once before make_functional(model)."
            )
    new_buffers = _taken(skeleton.entries, tensors, copies)
    if list(map(len, skeleton.stores)) != skeleton.lengths or any(
        store.get(key) is not None for store, key in skeleton.vacant
    ):
        _check_registered(skeleton)
    _put(skeleton.entries, before)
    for place, own in zip(skeleton.places, kept, strict=True):
        object.__setattr__(place.module, "__dict__", own)
    return out, new_buffers


def traced(
    skeleton: Skeleton, tensors: Tensors, copies: Tensors, args: Any, kwargs: Any
) -> tuple[Any, Tensors]:
    """`called` for a compiler, which follows single attributes only, and only where they are put
    back one by one.
    """
    kept = [
        (place.module, {key: place.module.__dict__[key] for key in place.attributes})
        for place in skeleton.places
        if place.attributes is not None
    ]
    entries = _entries(skeleton.places)
    before = _put(entries, tensors)
    out = skeleton.root(*args, **kwargs)
    new_buffers = _taken(entries, tensors, copies)
    _check_registered(skeleton)
    _put(entries, before)
    for module, attributes in kept:
        if _FOLLOWS_DICTS:
            for key in [
                key
                for key in module.__dict__
                if key not in _OF_EVERY_MODULE and key not in attributes
            ]:
                delattr(module, key)
        for key, value in attributes.items():
            if key not in module.__dict__ or module.__dict__[key] is not value:
                setattr(module, key, value)
    return out, new_buffers


def _entries(places: tuple[_Place, ...]) -> list[_Entry]:
    entries = []
    for place in places:
        parameters, buffers = _torch.stores(place.module)
        entries += [(parameters, key, name) for key, name in place.parameters.items()]
        entries += [(buffers, key, name) for key, name in place.buffers.items()]
    return entries


def _put(entries: list[_Entry], tensors: Tensors) -> Tensors:
    """What stood where `tensors` stand now: nothing but shapes, or in a compiled call inside of
    another the tensors of that one.
    """
    before = {}
    for store, key, name in entries:
        before[name] = store[key]
        store[key] = tensors[name]
    return before


def _taken(entries: list[_Entry], tensors: Tensors, copies: Tensors) -> Tensors:
    """What the forward left where the buffers stood: written in place, or replaced."""
    new = dict(copies)
    for store, key, name in entries:
        value = store.get(key)
        if value is tensors[name]:
            continue
        if name not in copies:
            raise RuntimeError(
                "the forward of the model put another tensor in the place of its "
                f"parameter {name}. {CURE}"
            )
        if value is None:
            raise RuntimeError(
                f"the forward of the model removed its buffer {name}, or set it to None. "
                "Buffers are the state of a step and the same ones before and after. "
                "Cure: fill it with zeros, or keep in a plain attribute what lives within "
                "one forward."
            )
        new[name] = value.clone()  # it may be an argument
    return new


def _check_registered(skeleton: Skeleton) -> None:
    for place in skeleton.places:
        for store, names in zip(
            _torch.stores(place.module), (place.parameters, place.buffers), strict=True
        ):
            if len(store) == len(names):
                continue
            for key, value in store.items():
                if value is not None and key not in names:
                    raise RuntimeError(
                        f"the forward of the model registered {key!r} in its "
                        f"{type(place.module).__name__}. Parameters and buffers are arguments and "
                        "results of `apply`, so all must be there from the start. Likely cause: "
                        "it is made in the first forward. Cure: run `model(example_batch)` once "
                        "before make_functional(model)."
                    )
