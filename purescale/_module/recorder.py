"""A walk over all objects of a model, which finds what its calls make and what they share."""

from __future__ import annotations

import collections
import enum
import functools
import sys
import types
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .._module.norms import SyncBatchNorm
from .._module.plan import (
    STORES,
    Filled,
    Immutable,
    Links,
    Part,
    Place,
    Plan,
    Unreadable,
    empty,
    fill,
    new_frozenset,
    new_method,
    new_method_of_class,
    new_partial,
    new_reference,
    new_tuple,
    new_view,
    unchanged,
)
from .._module.references import ATOMS, class_attributes, is_array, references, slots
from .._torch.donation import storage_pointer
from .._torch.tracing import PLAIN_TYPES

# Layouts of memory, before those that they extend.
_CONTAINERS: tuple[type, ...] = (
    *(collections.OrderedDict, collections.defaultdict, dict, list, collections.deque, set),
)
# The containers of torch's own that each module has.
_TORCHS = frozenset(key for key, value in vars(nn.Module()).items() if type(value) in _CONTAINERS)
_HOOKS = frozenset(key for key in _TORCHS if "_hooks" in key)
# Those of which each module needs an empty one. Of the others, such as the numbers of hooks that
# take keywords, all modules may have the same.
_OF_ITS_OWN = frozenset(
    {
        *STORES,
        *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    }
)
# Attributes of a module that its forward does not use. torch.ao keeps a closure over the module in
# `qconfig`, for conversion.
_NOT_FOR_FORWARD = frozenset(
    {
        *("_state_dict_hooks", "_state_dict_pre_hooks", "_compiled_call_impl", "qconfig"),
        *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
    }
)
_FIELDS = ("objects", "containers", "tensors", "filled", "without_tensors", "with_tensors")


class Node(NamedTuple):
    """An object that calls make anew."""

    field: str  # of `_FIELDS`, which says where in a plan it stands
    pattern: Any  # what the plan holds of it
    # Of objects and containers, what a call replaces: key or attribute, place, path.
    parts: list[tuple[Any, str | int, str]]


class Recorder:
    """A walk over all objects of a model. The place of an object is the index of its node until
    `plan` numbers them.

    Args:
        model: The module to record.
        names: The name of each registered tensor by its id; tied ones have the same.
    """

    def __init__(self, model: nn.Module, names: dict[int, str]) -> None:
        self.modules = {id(module): (path, module) for path, module in model.named_modules()}
        self.names = names
        self.nodes: list[Node] = []
        self.places: dict[int, Place] = {}  # by id
        self.visited: list[tuple[str, Any]] = []  # keeps them alive, so that an id stays theirs
        self.shared: list[tuple[str, Any]] = []
        self.weak: list[tuple[int, Any]] = []
        self.plain_tensors: dict[tuple[int, torch.dtype], list[tuple[int, Tensor]]] = {}
        self.hook_numbers: dict[int, int] = {}
        self.stores: list[tuple[int, int, str]] = []
        self.empty: list[tuple[int, str, Any]] = []
        self.empty_for_all: dict[str, Any] = {}
        self.numbers: dict[int, int] = {}  # of nodes, in the order of the plan
        stores = [vars(module)[key] for _, module in self.modules.values() for key in STORES[:2]]
        self.registered = [t for store in stores for t in store.values() if t is not None]
        self.memories = {storage_pointer(tensor) for tensor in self.registered} - {None, 0}

    def place(self, thing: Any, path: str) -> Place:
        """Return where a call finds `thing`, which has this path in the model."""
        if type(thing) in ATOMS or isinstance(thing, type):
            return None
        if id(thing) in self.names:
            return self.names[id(thing)]
        if id(thing) not in self.places:
            self.visited.append((path, thing))
            self._record(thing, path)
        return self.places[id(thing)]

    def _record(self, thing: Any, path: str) -> None:
        kind = type(thing)
        base = next((base for base in _CONTAINERS if isinstance(thing, base)), None)
        if isinstance(thing, Tensor):
            self._plain_tensor(thing, path)
        elif isinstance(thing, nn.Module):
            self._module(thing, path)
        elif kind in _CONTAINERS and not self._replaces_keys(thing, path):
            self._container(thing, thing.copy(), path)
        elif base is not None:
            self._filled(thing, base, path)
        elif isinstance(thing, tuple):
            self._immutable(thing, new_tuple, kind, list(tuple.__iter__(thing)), path)
        elif isinstance(thing, frozenset):
            self._immutable(thing, new_frozenset, kind, list(frozenset.__iter__(thing)), path)
        elif kind is functools.partial:
            parts = [thing.func, *thing.args, *thing.keywords.values()]
            self._immutable(thing, new_partial, list(thing.keywords), parts, path)
        elif kind is types.MethodType:
            owner, function = thing.__self__, thing.__func__
            name = getattr(function, "__name__", "")
            of_class = getattr(type(owner), name, None) is function
            build, pattern = (new_method_of_class, name) if of_class else (new_method, function)
            self._immutable(thing, build, pattern, [owner], f"{path} (its 'self')")
        elif is_array(thing) and not thing.dtype.hasobject:
            self._node(thing, "containers", thing.copy())
        elif kind is weakref.ref:
            self.weak.append((self._node(thing, "without_tensors", None), thing))
        elif kind is types.SimpleNamespace or (_is_helper(kind) and any(slots(thing))):
            self._filled(thing, kind if kind is types.SimpleNamespace else object, path)
        elif _is_helper(kind):
            self._helper(thing, path)
        else:
            self.places[id(thing)] = None
            self.shared.append((path, thing))

    def _node(self, thing: Any, field: str, pattern: Any) -> int:
        number = self.places[id(thing)] = len(self.nodes)
        self.nodes.append(Node(field, pattern, []))
        return number

    # ---- tensors and modules

    def _plain_tensor(self, tensor: Tensor, path: str) -> None:
        number = self._node(tensor, "tensors", (tensor.detach().clone(), path))
        if type(tensor) in PLAIN_TYPES and (memory := storage_pointer(tensor)):
            self.plain_tensors.setdefault((memory, tensor.dtype), []).append((number, tensor))

    def _share_memory(self) -> None:
        """Make plain tensors over one memory views of one copy of it."""
        for tensors in self.plain_tensors.values():
            if len(tensors) > 1:
                number, first = tensors[0]
                storage: Any = first.untyped_storage()
                memory = first.detach().new_empty(0).set_(storage.clone())
                base = Part(len(self.nodes))
                self.nodes.append(Node("tensors", (memory, self.nodes[number].pattern[1]), []))
                for index, tensor in tensors:
                    layout = tensor.shape, tensor.stride(), tensor.storage_offset()
                    self.nodes[index] = Node(
                        "without_tensors", Immutable(new_view, layout, [base]), []
                    )

    def _module(self, module: nn.Module, path: str) -> None:
        if type(module).__name__ == "OptimizedModule":  # by torch.compile: what it compiles
            self.places[id(module)] = self.place(module._orig_mod, path)
            return
        kind = SyncBatchNorm if type(module) is nn.SyncBatchNorm else type(module)
        _check_kind(module, kind, path)
        attributes = vars(module).copy()
        if isinstance(module, nn.RNNBase):  # on CUDA it moves the weights into one block of memory
            attributes["flatten_parameters"] = _left_as_they_are
            attributes["_flat_weight_refs"] = [None] * len(attributes["_flat_weights"])
        number = self._node(module, "objects", (kind, attributes))
        registers = not _registers_nothing(module)
        for key, value in attributes.items():
            if key in STORES and (value or registers):
                self.stores.append(
                    (self._inner(number, key, value, dict(value), path), number, key)
                )
            elif key in _NOT_FOR_FORWARD and type(value) not in _CONTAINERS:
                attributes[key] = None
            elif key in _TORCHS and (not value or key in _NOT_FOR_FORWARD):
                attributes[key] = self._shared_container(number, key, type(value))
            elif key in _HOOKS:
                # Numbers that are the same for all models that are alike.
                hooks = type(value)((self._hook_number(old), hook) for old, hook in value.items())
                self._inner(number, key, value, hooks, _join(path, key))
            else:
                self._part(number, attributes, key, value, _join(path, key))

    def _inner(self, module: int, key: str, container: Any, pattern: Any, path: str) -> int:
        """Record a container of torch in a module."""
        self.visited.append((path, container))
        self.nodes[module].pattern[1][key] = None
        number = self._node(container, "containers", pattern)
        self.nodes[module].parts.append((key, number, path))
        for name, value in list(pattern.items()):
            self._part(number, pattern, name, value, _join(path, name))
        return number

    def _shared_container(self, number: int, key: str, kind: type) -> Any:
        """Return an empty container for the calls to share, not that of the live module."""
        container = self.empty_for_all.get(key)
        if container is None:
            container = kind()
            self.empty.append((number, key, container))
            if key not in _OF_ITS_OWN:
                self.empty_for_all[key] = container
        return container

    def _hook_number(self, old: int) -> int:
        return self.hook_numbers.setdefault(old, -1 - len(self.hook_numbers))

    # ---- other objects

    def _helper(self, thing: Any, path: str) -> None:
        attributes = vars(thing).copy()
        if isinstance(thing, RemovableHandle):
            attributes["id"] = self._hook_number(thing.id)
        number = self._node(thing, "objects", (type(thing), attributes))
        for key, value in attributes.items():
            self._part(number, attributes, key, value, f"{path}.{key}")

    def _container(self, thing: Any, pattern: Any, path: str) -> None:
        number = self._node(thing, "containers", pattern)
        if not isinstance(pattern, set):
            items = pattern.items() if isinstance(pattern, dict) else enumerate(pattern)
            for key, value in list(items):
                self._part(number, pattern, key, value, f"{path}[{key!r}]")

    def _part(self, number: int, pattern: Any, key: Any, value: Any, path: str) -> None:
        """Record one attribute or element, and take it out of the pattern if a call replaces it."""
        if type(value) in ATOMS:
            return
        if self._was_computed(value):
            pattern[key] = Unreadable(_computed(path))
            return
        place = self.place(value, path)
        if place is not None:
            self.nodes[number].parts.append((key, place, path))
            pattern[key] = None

    def _filled(self, thing: Any, base: type, path: str) -> None:
        arguments: tuple[Any, ...] = ()
        if base is collections.defaultdict:
            arguments = (thing.default_factory,)
        elif base is collections.deque:
            arguments = ((), thing.maxlen)
        record = Filled(type(thing), base, arguments, {}, [], None)
        number = self._node(thing, "filled", record)
        attributes = dict(getattr(thing, "__dict__", {}))
        attributes |= {key: getattr(thing, key) for key in slots(thing) if hasattr(thing, key)}
        for key, value in attributes.items():
            record.attributes[key] = self._wrapped(value, f"{path}.{key}")
        elements: list[Any] = []
        paths: list[Any] = []
        if issubclass(base, dict):
            elements = list(base.items(thing))
            paths = [(f"a key of {path}", f"{path}[{key!r}]") for key, _ in elements]
        elif base in _CONTAINERS:
            elements = [(value,) for value in base.__iter__(thing)]  # type: ignore[attr-defined]
            paths = [(f"{path}[{index}]",) for index in range(len(elements))]
        for element, at in zip(elements, paths, strict=True):
            record.elements.append(tuple(map(self._wrapped, element, at)))
        # torch.compile cannot make a container of a user's class.
        if base is not object and type(thing) not in (*_CONTAINERS, collections.Counter):
            reached = references(thing, path, set())
            if not any(isinstance(reference.value, (Tensor, nn.Module)) for reference in reached):
                example = empty(record)
                fill(example, record._replace(attributes=attributes, elements=elements), [], {})
                self.nodes[number] = Node("filled", record._replace(example=example), [])

    def _immutable(self, thing: Any, build: Any, pattern: Any, parts: list[Any], path: str) -> None:
        wrapped = [self._wrapped(part, f"{path}[{index}]") for index, part in enumerate(parts)]
        if id(thing) in self.places:  # one of its parts holds it
            return
        if all(new is part for new, part in zip(wrapped, parts, strict=True)):
            self.places[id(thing)] = None
            return
        record = Immutable(build, pattern, wrapped)
        self._node(thing, self._field_of(record), record)

    def _wrapped(self, value: Any, path: str) -> Any:
        if self._was_computed(value):
            return Unreadable(_computed(path))
        place = self.place(value, path)
        return value if place is None else Part(place)

    def _replaces_keys(self, thing: Any, path: str) -> bool:
        if isinstance(thing, (list, collections.deque)):
            return False
        keys = [key for key in thing if type(key) not in ATOMS]
        return any([self.place(key, f"a key of {path}") is not None for key in keys])

    def _was_computed(self, value: Any) -> bool:
        """Return True for a tensor that was computed from a registered one, or is a view of it."""
        if not isinstance(value, Tensor) or id(value) in self.names:
            return False
        return not value.is_leaf or storage_pointer(value) in self.memories

    # ---- what follows from all of them

    def check(self) -> None:
        """Refuse a parameter that is read from a class, and a part of the live model within an
        object that all calls share.
        """
        self._check_classes()
        live = {key: f"module {path or 'itself'}" for key, (path, _) in self.modules.items()}
        live |= {key: f"tensor {name}" for key, name in self.names.items()}
        seen: set[int] = set()
        for path, thing in self.shared:
            for reference in references(thing, path, seen):
                if id(reference.value) in live:
                    raise ValueError(
                        f"{reference.path} of the model holds its {live[id(reference.value)]}, "
                        "which `apply` cannot replace there, so it would use the live model and "
                        "not params. Likely cause: a hook or a patched forward that is a closure "
                        "over the model, a compiled method, or an object that is not written in "
                        "Python. Fix: pass the module as an argument, functools.partial(function, "
                        "module), or use a method of it; keep a tensor in a list, a dict or an "
                        "attribute; compile `apply`, not a part; put torch.utils.checkpoint around "
                        "`apply`."
                    )

    def _check_classes(self) -> None:
        """Refuse parameters in class attributes, which all calls share."""
        attributes = list(class_attributes(self.visited))
        if not attributes:
            return
        params = [tensor for tensor in self.registered if isinstance(tensor, nn.Parameter)]
        trained = {id(param): self.names[id(param)] for param in params}
        trained |= {
            key: path
            for key, (path, module) in self.modules.items()
            if path and next(module.parameters(), None) is not None
        }
        by_memory = {storage_pointer(param): self.names[id(param)] for param in params}
        for path, kind, key, value in attributes:
            memory = storage_pointer(value)
            if id(value) in trained:
                what = f"its {trained[id(value)]}"
            elif memory and memory in by_memory:
                what = f"a view of its {by_memory[memory]}"
            elif isinstance(value, nn.Parameter) and value.requires_grad:
                what = "a parameter that is not registered"
            else:
                continue
            raise ValueError(
                f"{path} of the model is an attribute of its class {kind.__name__} and holds "
                f"{what}. A call would read it from the class, so it would follow the live model "
                f"and not params. Fix: register it in `__init__`, `self.{key} = "
                "nn.Parameter(...)`, and remove it from the class."
            )

    @property
    def compiled(self) -> bool:
        """Return True if torch.compile made a function that the model refers to."""
        return any(hasattr(thing, "_torchdynamo_orig_callable") for _, thing in self.shared)

    # ---- the plan

    def plan(self) -> tuple[Plan, Links]:
        """Return the plan, and number all nodes in its order."""
        self._share_memory()
        self._refer_weakly()
        rank = {field: index for index, field in enumerate(_FIELDS)}
        order = sorted(range(len(self.nodes)), key=lambda index: rank[self.nodes[index].field])
        self.numbers = {index: number for number, index in enumerate(order)}
        nodes = [self.nodes[index] for index in order]
        patterns = {
            field: [node.pattern for node in nodes if node.field == field] for field in _FIELDS
        }
        kinds = [kind for kind, _ in patterns["objects"]]
        plan = Plan(
            size=len(nodes),
            kinds=kinds,
            attributes=[attributes for _, attributes in patterns["objects"]],
            containers=patterns["containers"],
            tensors=[tensor for tensor, _ in patterns["tensors"]],
            tensor_paths=[path for _, path in patterns["tensors"]],
            filled=[
                record._replace(
                    attributes={key: self._numbered(x) for key, x in record.attributes.items()},
                    elements=[tuple(map(self._numbered, element)) for element in record.elements],
                )
                for record in patterns["filled"]
            ],
            without_tensors=list(map(self._numbered_parts, patterns["without_tensors"])),
            with_tensors=list(map(self._numbered_parts, patterns["with_tensors"])),
            empty=[container for _, _, container in self.empty],
            owners=[(self.numbers[index], key) for index, key, _ in self.empty],
            fresh=[],
        )
        return plan, self._links(nodes, kinds)

    def _refer_weakly(self) -> None:
        """Record the weak references, once all that they may refer to is recorded."""
        for index, reference in self.weak:
            target = self.places.get(id(reference()), self.names.get(id(reference())))
            record = Immutable(unchanged, reference, [])
            if target is not None:
                record = Immutable(new_reference, None, [Part(target)])
            self.nodes[index] = Node(self._field_of(record), record, [])

    def _field_of(self, record: Immutable) -> str:
        """Return the field of the plan: a tensor of the call among its parts, or in one of them."""
        places = [part.place for part in record.parts if isinstance(part, Part)]
        has_tensors = any(
            [isinstance(p, str) or self.nodes[p].field == "with_tensors" for p in places]
        )
        return "with_tensors" if has_tensors else "without_tensors"

    def _links(self, nodes: list[Node], kinds: list[Any]) -> Links:
        places = [(number, *part) for number, node in enumerate(nodes) for part in node.parts]
        tensors = [(number, key, name) for number, key, name, _ in places if isinstance(name, str)]
        stores = [(self.numbers[n], self.numbers[m], key) for n, m, key in self.stores]
        buffers = {number: module for number, module, key in stores if key == "_buffers"}
        return Links(
            tensors=tuple(tensors),
            parts=tuple((n, key, self.numbers[p]) for n, key, p, _ in places if isinstance(p, int)),
            modules=tuple(self.number(module) for _, module in self.modules.values()),
            stores=tuple(stores),
            buffers=tuple(row for row in tensors if row[0] in buffers),
            registers=tuple(
                (module, number)
                for number, module in buffers.items()
                if kinds[module].register_buffer is nn.Module.register_buffer
            ),
            paths=tuple(path for _, _, name, path in places if isinstance(name, str)),
        )

    def number(self, thing: Any) -> int:
        """Return the number of an object in the plan, or -1 for one that calls share."""
        place = self.places.get(id(thing))
        return self.numbers[place] if isinstance(place, int) else -1

    def _numbered(self, value: Any) -> Any:
        if isinstance(value, Part) and isinstance(value.place, int):
            return Part(self.numbers[value.place])
        return value

    def _numbered_parts(self, record: Immutable) -> Immutable:
        return record._replace(parts=list(map(self._numbered, record.parts)))


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _check_kind(module: nn.Module, kind: type, path: str) -> None:
    """Refuse a module that `object.__new__` and its `__dict__` do not make."""
    try:
        object.__new__(kind)
        for key in slots(module):
            raise TypeError(f"{key} is in its __slots__")
    except TypeError as error:
        raise TypeError(
            f"{path or 'the model'} is a {kind.__name__}, which a call cannot make anew "
            f"({error}). Likely cause: its class derives from one that is written in C besides "
            "nn.Module, or has __slots__. Fix: keep an object of that class in an attribute; "
            "remove the __slots__."
        ) from None


def _registers_nothing(module: nn.Module) -> bool:
    """Return True for a layer of torch, whose forward registers no parameter, buffer or module."""
    return type(module).__module__.startswith("torch.nn.modules.") and "forward" not in vars(module)


def _is_helper(kind: type) -> bool:
    """Return True if an object of this class is all in its attributes, and a forward may set them.
    Those of the standard library and of torch, such as loggers and meshes, are for all to share.
    """
    room = kind.__module__.partition(".")[0]
    if room in sys.stdlib_module_names or (
        room == "torch" and not kind.__module__.startswith(("torch.nn.", "torch.utils.hooks"))
    ):
        return False
    if issubclass(kind, enum.Enum) or hasattr(kind, "__del__"):
        return False
    for name in ("__deepcopy__", "__reduce__", "__reduce_ex__"):
        if getattr(kind, name, None) is not getattr(object, name, None):
            return False
    try:
        object.__new__(kind)
    except TypeError:  # laid out in C
        return False
    return True


def _left_as_they_are() -> None:
    """Replaces RNNBase.flatten_parameters."""


def _computed(path: str) -> str:
    return (
        f"{path} of the model was computed from a parameter or buffer, or is a view of one, made "
        "before make_functional: it would not change with params. Fix: compute it in forward."
    )
