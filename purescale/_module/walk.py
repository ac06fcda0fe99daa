"""A walk over the objects of a model, once, which sorts them into the rows of a recipe.

What becomes of what a forward changes, and where that is decided:

- An attribute, a list that it appends to, a dict, a set, an array: the change ends with the call,
  because each copy has its own (`_Walk._add_container`).
- A helper object: the same, if its class is a user's and derives from no container
  (`_is_helper`). All calls share another object, such as a lock, a SimpleNamespace or one with
  `__slots__` (`_Walk.shared`). `_check_references` refuses one that holds a part of the model.
- A tuple, a partial, a bound method or a weak reference: each copy has its own if it leads to
  something of which each copy has its own (`_parts_of_immutable`).
- A list of the class of a module: it is not of the model, and keeps what is appended.
- A hook that it installs: it ends with the call (`Recipe.with_own_empty`).
- A buffer, or a tensor that `state_attributes` names: `apply` returns the new value, whether the
  forward writes into it or replaces it (`after_forward.new_buffers`).
- A list or dict whose elements `state_attributes` names: `apply` returns them, and refuses one
  with other keys than before (`after_forward._adopt_container`).
- A tensor in any other attribute: the change ends with the call (`Recipe.plain_tensors`).
"""

from __future__ import annotations

import collections
import functools
import gc
import itertools
import sys
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .._module.recipe import Layout, Place, Recipe, StateContainer, share_layout
from .._module.registered import (
    MODULE_ATTRIBUTES,
    REGISTRY_NAMES,
    RegisteredTensors,
    Tensors,
    keys_of,
)
from .._module.substitutes import (
    COMPUTED_TENSOR_ERROR,
    LocalSyncBatchNorm,
    Unreadable,
    flatten_nothing,
)
from .._torch import private
from .._torch.donation import storage_pointer

# Never changed by a forward, and never a reference to the model.
_ATOMS = frozenset(
    {
        *(bool, int, float, complex, str, bytes, range, type(None), type(...), types.ModuleType),
        *(types.CodeType, type, torch.dtype, torch.device, torch.Size, torch.fx.Graph),
    }
)

_CONTAINERS: tuple[Any, ...] = (dict, list, set, collections.deque, OrderedDict)
_CONTAINERS += (collections.defaultdict, collections.Counter)
# The containers that each module has as attributes.
_OF_A_MODULE = [key for key, cls in MODULE_ATTRIBUTES.items() if cls in _CONTAINERS]


def recipe_of(model: nn.Module, registered: RegisteredTensors) -> Recipe:
    """Return the recipe of a model.

    Args:
        model: The module.
        registered: Its parameters, buffers and state attributes, with their names.

    Raises:
        TypeError: A call cannot make a module anew.
        ValueError: What calls share holds a part of the live model.
    """
    walk = _Walk(registered)
    walk.visit_all(model)
    modules = dict(model.named_modules())
    _check_class_attributes(walk.visited, walk.tensors, modules)
    _check_references(walk.shared, walk.tensors, modules)
    return walk.recipe(list(modules.values()))


Objects = list[tuple[str, Any]]  # with their paths in the model
Identity = int | str  # of an object in a walk: its id; the name of a parameter or buffer


class _Walk:
    """A walk over all objects that can be reached from a model, which sorts into rows those of
    which each copy has its own, by identity.
    """

    def __init__(self, registered: RegisteredTensors) -> None:
        self.instances: dict[Identity, tuple[type, dict[str, Any]]] = {}  # class and attributes
        self.registries: dict[Identity, dict[str, Any]] = {}  # with what is registered in a module
        self.containers: dict[Identity, Any] = {}
        self.arguments = dict.fromkeys(registered.first_name_of.values())
        self.plain_tensors: dict[Identity, Tensor] = {}
        self.shared_parts: dict[Identity, Any] = {id(None): None}  # None may be registered
        self.immutables: dict[Identity, tuple[Callable[..., Any], list[Identity]]] = {}
        self.shared_empty: list[Any] = []
        self.empty_places: list[tuple[Identity, str, type]] = []  # of these
        self.links: list[tuple[Identity, Any, Identity, str]] = []  # holder, key, object, path
        self.owner_of_registry: dict[Identity, tuple[Identity, str]] = {}  # module, attribute
        # By id. None: copies share the object.
        self.identities: dict[int, Identity | None] = {**registered.first_name_of}
        self.visited: Objects = []  # keeps objects alive, so that an id stays theirs
        self.shared: Objects = []  # by all copies; the walk does not enter them
        self.waiting: list[tuple[Identity, Any, list[tuple[Any, Any]], str]] = []
        self.tensors = {**registered.params, **registered.buffers, **registered.aliases}
        self.memories = set(map(storage_pointer, self.tensors.values())) - {None, 0}

    def visit_all(self, model: nn.Module) -> None:
        """Visit all objects that can be reached, in a loop: a chain of them may be long."""
        self._visit(model, "")
        while self.waiting:
            holder, template, items, path = self.waiting.pop()
            has_attributes = holder not in self.containers
            for key, value in items:
                inner = f"{path}.{key}".lstrip(".") if has_attributes else f"{path}[{key!r}]"
                if (identity := self._visit(value, inner)) is not None:
                    self.links.append((holder, key, identity, inner))
                    template[key] = None

    def _visit(self, obj: Any, path: str) -> Identity | None:
        """Return the identity of an object, which is added if new; None if copies share it."""
        cls = type(obj)
        if cls in _ATOMS or isinstance(obj, type):
            return None
        if id(obj) in self.identities:
            return self.identities[id(obj)]
        self.visited.append((path, obj))
        if isinstance(obj, Tensor):
            if obj.is_leaf and storage_pointer(obj) not in self.memories:
                return self._add(self.plain_tensors, obj, obj.detach().clone())
            return self._add(self.shared_parts, obj, Unreadable(COMPUTED_TENSOR_ERROR.format(path)))
        if cls.__name__ == "OptimizedModule":  # by torch.compile: what it compiles
            self.identities[id(obj)] = self._visit(obj._orig_mod, path)
            return self.identities[id(obj)]
        if isinstance(obj, nn.Module):
            return self._add_module(obj, path)
        if cls in _CONTAINERS or (_is_array(obj) and not obj.dtype.hasobject):
            return self._add_container(obj, path)
        if (immutable := _parts_of_immutable(obj)) is not None:
            build, parts = immutable
            identities = [self._visit(part, f"{path}[{n}]") for n, part in enumerate(parts)]
            if any(identities):
                for n, part in enumerate(parts):
                    if identities[n] is None:
                        self.shared_parts[id(part)], identities[n] = part, id(part)
                return self._add(self.immutables, obj, (build, identities))
        elif _is_helper(cls):
            attributes = vars(obj).copy()
            identity = self._add(self.instances, obj, (cls, attributes))
            self._visit_later(identity, attributes, attributes.items(), path)
            return identity
        self.identities[id(obj)] = None
        self.shared.append((path, obj))
        return None

    def _add(self, rows: dict[Identity, Any], obj: Any, row: Any) -> Identity:
        rows[id(obj)] = row
        self.identities[id(obj)] = id(obj)
        return id(obj)

    def _visit_later(
        self, identity: Identity, template: Any, items: Iterable[tuple[Any, Any]], path: str
    ) -> None:
        """Visit what an object holds. The template then has None for what each copy has."""
        if items := [(key, value) for key, value in items if type(value) not in _ATOMS]:
            self.waiting.append((identity, template, items, path))

    def _add_container(self, obj: Any, path: str) -> Identity:
        template = obj.copy()
        identity = self._add(self.containers, obj, template)
        if isinstance(obj, (dict, set)):
            kind = "a key" if isinstance(obj, dict) else "an element"
            keys = [(f"{kind} of {path}", key) for key in obj if type(key) not in _ATOMS]
            self.visited += keys
            self.shared += keys
        if isinstance(obj, collections.defaultdict):
            self.shared.append((f"{path}.default_factory", obj.default_factory))
        if not (isinstance(obj, set) or _is_array(obj)):
            items = obj.items() if isinstance(obj, dict) else enumerate(obj)
            self._visit_later(identity, template, items, path)
        return identity

    def _add_module(self, module: nn.Module, path: str) -> Identity:
        cls = LocalSyncBatchNorm if type(module) is nn.SyncBatchNorm else type(module)
        if obstacle := _obstacle(cls):
            raise TypeError(
                f"{path or 'the model'} is a {cls.__name__}, which a call cannot make anew "
                f"({obstacle}). Likely cause: a base class in C besides nn.Module, or __slots__. "
                "Fix: keep an object of that base class in an attribute; remove the __slots__."
            )
        attributes = vars(module).copy()
        if isinstance(module, nn.RNNBase):  # on CUDA it moves the weights into one block of memory
            attributes["flatten_parameters"] = flatten_nothing
            attributes["_flat_weight_refs"] = [None] * len(attributes["_flat_weights"])
        if "_compiled_call_impl" in attributes:  # of `module.compile()`
            attributes["_compiled_call_impl"] = None
        identity = self._add(self.instances, module, (cls, attributes))
        items = dict(attributes)
        # A layer of torch, whose own forward registers no parameter, buffer or module.
        is_torchs = cls.__module__.startswith("torch.nn.modules.") and "forward" not in attributes
        for key in filter(attributes.__contains__, _OF_A_MODULE):
            value = attributes[key]
            if key in REGISTRY_NAMES and (value or not is_torchs):
                template, attributes[key], items[key] = dict(value), None, None
                self.containers.pop(id(value), None)  # an attribute may have led to it before
                registry = self._add(self.registries, value, template)
                self.owner_of_registry[registry] = identity, key
                self.links.append((identity, key, registry, path))
                self._visit_later(registry, template, value.items(), path)
            elif not value or "state_dict" in key:  # which no forward reads
                attributes[key], items[key] = type(value)(), None
                self.shared_empty.append(attributes[key])
                self.empty_places.append((identity, key, type(value)))
        self._visit_later(identity, attributes, items.items(), path)
        return identity

    # ---- what it amounts to

    def recipe(self, modules: list[nn.Module]) -> Recipe:
        """Return the recipe, in which objects have numbers in place of identities."""
        rows = (
            self.instances,
            self.registries,
            self.containers,
            self.arguments,
            self.plain_tensors,
        )
        identities = itertools.chain(*rows, self.shared_parts, self.immutables)
        numbers = {identity: number for number, identity in enumerate(identities)}
        key, layout = share_layout(self._layout(numbers, modules))
        classes, attributes = map(list, zip(*self.instances.values(), strict=True))
        return Recipe(
            classes=classes,
            attributes=attributes,
            containers=[*self.registries.values(), *self.containers.values()],
            plain_tensors=list(self.plain_tensors.values()),
            shared_parts=list(self.shared_parts.values()),
            immutables=[
                (build, [numbers[part] for part in parts])
                for build, parts in self.immutables.values()
            ],
            shared_empty=self.shared_empty,
            empty_places=[(numbers[module], key, cls) for module, key, cls in self.empty_places],
            layout=layout,
            key=key,
        )

    def _layout(self, numbers: dict[Any, int], modules: list[nn.Module]) -> Layout:
        places: dict[Any, list[Place]] = collections.defaultdict(list)
        for holder, key, identity, path in self.links:
            place = Place(numbers[holder], key, path, holder in self.owner_of_registry)
            places[identity].append(place)
        places_of_arguments = tuple(
            tuple(sorted(places[name], key=lambda p: (not p.in_registry, p.path != name)))
            for name in self.arguments
        )
        # Of tensors in plain attributes, and in lists and dicts there.
        holders_of_state = {
            first.holder for first, *_ in places_of_arguments if not first.in_registry
        }
        linked = {(holder, key): obj for holder, key, obj, _ in self.links}
        plain = [(path, t) for path, t in self.visited if id(t) in self.plain_tensors]
        in_memory: Any = collections.Counter(filter(None, (storage_pointer(t) for _, t in plain)))
        return Layout(
            links=tuple((numbers[holder], key, numbers[obj]) for holder, key, obj, _ in self.links),
            arguments=tuple(self.arguments),
            places_of_arguments=places_of_arguments,
            state_containers=tuple(
                StateContainer(numbers[identity], tuple(keys_of(c)), tuple(places[identity]))
                for identity, c in self.containers.items()
                if numbers[identity] in holders_of_state
            ),
            has_state=bool(holders_of_state),
            modules=tuple(numbers[self.identities[id(module)]] for module in modules),
            registry_rows=tuple(
                (numbers[registry], numbers[module], key)
                for registry, (module, key) in self.owner_of_registry.items()
            ),
            registry_values=tuple(
                numbers[linked.get((registry, key), id(None))]
                for registry, template in self.registries.items()
                for key in template
            ),
            views=tuple(
                (numbers[id(t)], path) for path, t in plain if in_memory[storage_pointer(t)] > 1
            ),
        )


# ---- kinds of objects ----------------------------------------------------------------------------


def _is_array(obj: Any) -> bool:
    """Return True for an array of NumPy, which may not be installed."""
    return (type(obj).__module__, type(obj).__name__) == ("numpy", "ndarray")


def _obstacle(cls: type) -> str:
    """Return why `object.__new__` and a `__dict__` do not make an object of this class; "" if they
    do.
    """
    if any(base.__dict__.get("__slots__") for base in cls.__mro__):
        return "it has __slots__"
    try:
        return "" if hasattr(object.__new__(cls), "__dict__") else "it has no __dict__"
    except TypeError as error:  # laid out in C
        return str(error)


def _is_helper(cls: type) -> bool:
    """Return True if an object of this class is all in its `__dict__`, and a forward may change it.
    Those of the standard library and of torch, such as loggers and meshes, are for all to share.
    """
    package = cls.__module__.partition(".")[0]
    is_of_torch = package == "torch" and not cls.__module__.startswith(
        ("torch.nn.", "torch.utils.hooks")
    )
    special = ("__deepcopy__", "__reduce__", "__reduce_ex__", "__del__")
    return not (
        is_of_torch
        or package in sys.stdlib_module_names
        or any(getattr(cls, name, None) is not getattr(object, name, None) for name in special)
        or _obstacle(cls)
    )


def _parts_of_immutable(obj: Any) -> tuple[Callable[..., Any], list[Any]] | None:
    """Return how to build a tuple, a partial, a bound method or a weak reference of its parts:
    `build(*parts)`; None for an object of another kind.
    """
    cls = type(obj)
    if isinstance(obj, tuple):
        return functools.partial(_new_tuple, cls), list(tuple.__iter__(obj))
    if cls is functools.partial:
        parts = [obj.func, obj.args, tuple(obj.keywords.values())]
        return functools.partial(_new_partial, tuple(obj.keywords)), parts
    if cls is types.MethodType:
        return _new_method, [obj.__func__, obj.__self__]
    if cls is weakref.ref:
        return weakref.ref, [obj()]
    return None


def _new_tuple(cls: type, *parts: Any) -> Any:
    if hasattr(cls, "n_sequence_fields"):  # a struct sequence, such as torch.return_types.max
        return cls(parts)
    return tuple.__new__(cls, parts)


def _new_method(function: Any, owner: Any) -> Any:
    if isinstance(function, types.FunctionType):
        return function.__get__(owner)  # torch.compile does not follow MethodType
    return types.MethodType(function, owner)


def _new_partial(
    keywords: tuple[str, ...], function: Any, args: tuple[Any, ...], values: tuple[Any, ...]
) -> Any:
    return functools.partial(function, *args, **dict(zip(keywords, values, strict=True)))


# ---- references to the live model, in what calls share -------------------------------------------


def _check_references(objects: Objects, tensors: Tensors, modules: dict[str, nn.Module]) -> None:
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
            if id(obj) not in seen and type(obj) not in _ATOMS and not isinstance(obj, type):
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
    if _is_array(obj):  # the garbage collector does not know its elements
        return list(obj.ravel().tolist()) if obj.dtype.hasobject else []
    return [] if isinstance(obj, Tensor) else gc.get_referents(obj)


def _check_class_attributes(
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
            for leaf in private.pytree.tree_leaves(value):
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
