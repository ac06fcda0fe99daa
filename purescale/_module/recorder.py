"""A walk over all objects of a model, which finds what its calls make and what they share."""

from __future__ import annotations

import collections
import enum
import functools
import itertools
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .._module.norms import SyncBatchNorm
from .._module.plan import (
    STORES,
    Late,
    Links,
    Part,
    Place,
    Plan,
    Rare,
    Unreadable,
    empty,
    fill,
    new_frozenset,
    new_method,
    new_method_of_class,
    new_partial,
    new_tuple,
    new_view,
    new_weak,
    unchanged,
)
from .._module.references import class_attributes, is_array, references, slots
from .._torch.donation import storage_pointer
from .._torch.tracing import PLAIN_TYPES

# Never changed by a forward, and never a reference to the model.
ATOMS = frozenset(
    {
        *(bool, int, float, complex, str, bytes, range, type(None), type(...), types.ModuleType),
        *(types.CodeType, type, torch.dtype, torch.device, torch.Size, torch.fx.Graph),
    }
)
_COPIED = (dict, collections.OrderedDict, collections.defaultdict, list, set, collections.deque)
# A layout of memory -> what its `__init__` takes besides elements.
_CONTAINERS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    collections.OrderedDict: lambda thing: (),
    collections.defaultdict: lambda thing: (thing.default_factory,),
    dict: lambda thing: (),
    list: lambda thing: (),
    collections.deque: lambda thing: ((), thing.maxlen),
    set: lambda thing: (),
}
# The containers of torch's own that each module has.
_TORCHS = frozenset(key for key, value in vars(nn.Module()).items() if type(value) in _COPIED)
HOOKS = frozenset(key for key in _TORCHS if "_hooks" in key)
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
NOT_FOR_FORWARD = frozenset(
    {
        *("_state_dict_hooks", "_state_dict_pre_hooks", "_compiled_call_impl", "qconfig"),
        *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
    }
)


class Node(NamedTuple):
    """An object that calls make anew: its field in a `Plan`, what that field holds of it, and for
    objects and containers the parts that a call replaces, by key or attribute.
    """

    field: str
    pattern: Any
    parts: list[tuple[Any, str | int, str]]  # with their paths


class Recorder:
    """A walk over all objects of a model. The place of an object is the index of its node until
    `plan` numbers them.
    """

    def __init__(self, model: nn.Module, names: dict[int, str]) -> None:
        self.modules = {id(module): (name, module) for name, module in model.named_modules()}
        self.names = names
        self.nodes: list[Node] = []
        self.places: dict[int, Place] = {}  # by id
        self.visited: list[tuple[str, Any]] = []  # keeps them alive, so that an id stays theirs
        self.shared: list[tuple[str, Any]] = []
        self.weak: list[tuple[int, Any]] = []
        self.own: dict[tuple[int, torch.dtype], list[tuple[int, Tensor]]] = {}  # by memory
        self.hook_numbers: dict[int, int] = {}
        self.unused: dict[str, Any] = {}
        self.numbers: dict[int, int] = {}  # of nodes, in the order of the plan
        self.stores: list[tuple[int, int, str]] = []
        self.empty: list[tuple[int, str, Any]] = []
        stores = [vars(module)[key] for _, module in self.modules.values() for key in STORES[:2]]
        self.tensors = [t for store in stores for t in store.values() if t is not None]
        self.memories = {storage_pointer(tensor) for tensor in self.tensors} - {None, 0}

    def place(self, thing: Any, where: str) -> Place:
        """Return where a call finds `thing`, which has the path `where` in the model."""
        if type(thing) in ATOMS or isinstance(thing, type):
            return None
        if id(thing) in self.names:
            return self.names[id(thing)]
        if id(thing) not in self.places:
            self.visited.append((where, thing))
            self._record(thing, where)
        return self.places[id(thing)]

    def _record(self, thing: Any, where: str) -> None:
        kind = type(thing)
        base = next((base for base in _CONTAINERS if isinstance(thing, base)), None)
        if isinstance(thing, Tensor):
            self._own(thing, where)
        elif isinstance(thing, nn.Module):
            self._module(thing, where)
        elif kind in _COPIED and not self._replaces_keys(thing, where):
            self._container(thing, where)
        elif base is not None:
            self._rare(thing, base, where)
        elif isinstance(thing, tuple):
            self._late(thing, new_tuple, kind, list(tuple.__iter__(thing)), where)
        elif isinstance(thing, frozenset):
            self._late(thing, new_frozenset, kind, list(frozenset.__iter__(thing)), where)
        elif kind is functools.partial:
            keywords, parts = list(thing.keywords), [thing.func, *thing.args]
            self._late(thing, new_partial, keywords, parts + list(thing.keywords.values()), where)
        elif kind is types.MethodType:
            owner, function = thing.__self__, thing.__func__
            name = getattr(function, "__name__", "")
            of_class = getattr(type(owner), name, None) is function
            build, pattern = (new_method_of_class, name) if of_class else (new_method, function)
            self._late(thing, build, pattern, [owner], f"{where} (its 'self')")
        elif is_array(thing) and not thing.dtype.hasobject:
            self._node(thing, "containers", thing.copy())
        elif kind is weakref.ref:
            self.weak.append((self._node(thing, "late", None), thing))
        elif kind is types.SimpleNamespace:
            self._rare(thing, kind, where)
        elif _is_helper(kind):
            self._helper(thing, where)
        else:
            self.places[id(thing)] = None
            self.shared.append((where, thing))

    def _node(self, thing: Any, field: str, pattern: Any) -> int:
        number = len(self.nodes)
        self.nodes.append(Node(field, pattern, []))
        self.places[id(thing)] = number
        return number

    # ---- kinds of objects

    def _own(self, tensor: Tensor, where: str) -> None:
        number = self._node(tensor, "own", (tensor.detach().clone(), where))
        if type(tensor) in PLAIN_TYPES and (memory := storage_pointer(tensor)):
            self.own.setdefault((memory, tensor.dtype), []).append((number, tensor))

    def _share_memory(self) -> None:
        """Make tensors of the model over one memory views of one copy of it."""
        for tensors in self.own.values():
            if len(tensors) > 1:
                number, first = tensors[0]
                storage: Any = first.untyped_storage()
                memory = first.detach().new_empty(0).set_(storage.clone())
                base = Part(len(self.nodes))
                self.nodes.append(Node("own", (memory, self.nodes[number].pattern[1]), []))
                for index, tensor in tensors:
                    layout = tensor.shape, tensor.stride(), tensor.storage_offset()
                    self.nodes[index] = Node("late", Late(new_view, layout, [base]), [])

    def _module(self, module: nn.Module, where: str) -> None:
        if type(module).__name__ == "OptimizedModule":  # by torch.compile: what it compiles
            self.places[id(module)] = self.place(module._orig_mod, where)
            return
        attributes = vars(module).copy()
        kind = SyncBatchNorm if type(module) is nn.SyncBatchNorm else type(module)
        try:
            object.__new__(kind)
            for key in slots(module):
                raise TypeError(f"{key} is in its __slots__")
        except TypeError as error:
            raise TypeError(
                f"{where or 'the model'} is a {kind.__name__}, which a call cannot make anew "
                f"({error}). Likely cause: its class derives from one that is written in C besides "
                "nn.Module, or has __slots__. Fix: keep an object of that class in an attribute; "
                "remove the __slots__."
            ) from None
        number = self._node(module, "objects", (kind, attributes))
        if isinstance(module, nn.RNNBase):  # on CUDA it moves the weights into one block of memory
            attributes["flatten_parameters"] = _left_as_they_are
            attributes["_flat_weight_refs"] = [None] * len(attributes["_flat_weights"])
        registers = not _registers_nothing(module)
        for key, value in attributes.items():
            if key in STORES and (value or registers):
                self._store(number, key, value, where)
            elif key in NOT_FOR_FORWARD and type(value) not in _COPIED:
                attributes[key] = None
            elif key in _TORCHS and (not value or key in NOT_FOR_FORWARD):
                attributes[key] = self._shared_container(number, key, type(value))
            elif key in HOOKS:
                self._hooks(number, key, value, f"{where}.{key}" if where else key)
            else:
                self._part(number, attributes, key, value, f"{where}.{key}" if where else key)

    def _shared_container(self, number: int, key: str, kind: type) -> Any:
        """Return an empty container for the calls to share, not that of the live module."""
        if key in _OF_ITS_OWN:
            container = kind()
        elif key in self.unused:
            return self.unused[key]
        else:
            container = self.unused[key] = kind()
        self.empty.append((number, key, container))
        return container

    def _store(self, module: int, key: str, store: dict[str, Any], where: str) -> None:
        pattern = dict(store)
        number = self._node(store, "containers", pattern)
        self.nodes[module].parts.append((key, number, where))
        self.nodes[module].pattern[1][key] = None
        self.visited.append((where, store))
        self.stores.append((number, module, key))
        for name, value in store.items():
            self._part(number, pattern, name, value, f"{where}.{name}" if where else name)

    def _hooks(self, module: int, key: str, hooks: dict[int, Any], where: str) -> None:
        """Record hooks of a module, by numbers that are the same for all models that are alike."""
        pattern = type(hooks)((self._hook_number(old), hook) for old, hook in hooks.items())
        number = self._node(hooks, "containers", pattern)
        self.nodes[module].parts.append((key, number, where))
        self.nodes[module].pattern[1][key] = None
        self.visited.append((where, hooks))
        for old, hook in hooks.items():
            self._part(number, pattern, self._hook_number(old), hook, f"{where}[{old}]")

    def _hook_number(self, old: int) -> int:
        return self.hook_numbers.setdefault(old, -1 - len(self.hook_numbers))

    def _helper(self, thing: Any, where: str) -> None:
        if any(True for _ in slots(thing)):
            self._rare(thing, object, where)
            return
        attributes = vars(thing).copy()
        if isinstance(thing, RemovableHandle):
            attributes["id"] = self._hook_number(thing.id)
        number = self._node(thing, "objects", (type(thing), attributes))
        for key, value in attributes.items():
            self._part(number, attributes, key, value, f"{where}.{key}")

    def _container(self, thing: Any, where: str) -> None:
        pattern = thing.copy()
        number = self._node(thing, "containers", pattern)
        if not isinstance(pattern, set):
            items = pattern.items() if isinstance(pattern, dict) else enumerate(pattern)
            for key, value in list(items):
                self._part(number, pattern, key, value, f"{where}[{key!r}]")

    def _part(self, number: int, pattern: Any, key: Any, value: Any, where: str) -> None:
        """Record one attribute or element, and take it out of the pattern if a call replaces it."""
        if type(value) in ATOMS:
            return
        if self._was_computed(value):
            pattern[key] = Unreadable(_computed(where))
            return
        place = self.place(value, where)
        if place is not None:
            self.nodes[number].parts.append((key, place, where))
            pattern[key] = None

    def _rare(self, thing: Any, base: type, where: str) -> None:
        arguments = _CONTAINERS[base](thing) if base in _CONTAINERS else ()
        rare = Rare(type(thing), base, arguments, {}, [], None)
        number = self._node(thing, "rare", rare)
        own = dict(getattr(thing, "__dict__", {}))
        own |= {key: getattr(thing, key) for key in slots(thing) if hasattr(thing, key)}
        for key, value in own.items():
            rare.attributes[key] = self._wrapped(value, f"{where}.{key}")
        elements: list[Any] = []
        if issubclass(base, dict):
            elements = list(base.items(thing))
            for key, value in elements:
                at = f"a key of {where}", f"{where}[{key!r}]"
                rare.elements.append((self._wrapped(key, at[0]), self._wrapped(value, at[1])))
        elif base in _CONTAINERS:
            elements = [(value,) for value in base.__iter__(thing)]  # type: ignore[attr-defined]
            for index, (value,) in enumerate(elements):
                rare.elements.append((self._wrapped(value, f"{where}[{index}]"),))
        plain = base is object or type(thing) in (*_COPIED, collections.Counter)
        parts = [*rare.attributes.values(), *itertools.chain(*rare.elements)]
        if not plain and not self._reach_tensors(parts, set()):
            example = empty(rare)
            fill(example, rare._replace(attributes=own, elements=elements), [], {})
            self.nodes[number] = Node("rare", rare._replace(example=example), [])

    def _reach_tensors(self, parts: list[Any], seen: set[int]) -> bool:
        """Return True if one of these is or holds a tensor or a module."""
        for part in parts:
            if not isinstance(part, Part) or part.place in seen:
                continue
            if isinstance(part.place, str):
                return True
            seen.add(part.place)
            field, pattern, own = self.nodes[part.place]
            inner = [Part(place) for _, place, _ in own]
            if field == "rare":
                inner += [*pattern.attributes.values(), *itertools.chain(*pattern.elements)]
            elif field == "late" and pattern is not None:
                inner += pattern.parts
            if (
                field == "own"
                or (field == "objects" and issubclass(pattern[0], nn.Module))
                or self._reach_tensors(inner, seen)
            ):
                return True
        return False

    def _late(self, thing: Any, build: Any, pattern: Any, parts: list[Any], where: str) -> None:
        wrapped = [self._wrapped(part, f"{where}[{index}]") for index, part in enumerate(parts)]
        if id(thing) in self.places:  # one of its parts holds it
            return
        if all(new is part for new, part in zip(wrapped, parts, strict=True)):
            self.places[id(thing)] = None
        else:
            self._node(thing, "late", Late(build, pattern, wrapped))

    def _wrapped(self, value: Any, where: str) -> Any:
        if self._was_computed(value):
            return Unreadable(_computed(where))
        place = self.place(value, where)
        return value if place is None else Part(place)

    def _replaces_keys(self, thing: Any, where: str) -> bool:
        if isinstance(thing, (list, collections.deque)):
            return False
        keys = [key for key in thing if type(key) not in ATOMS]
        return any([self.place(key, f"a key of {where}") is not None for key in keys])

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
        live = {key: f"module {name or 'itself'}" for key, (name, _) in self.modules.items()}
        live |= {key: f"tensor {name}" for key, name in self.names.items()}
        self._check_classes()
        seen: set[int] = set()
        for where, thing in self.shared:
            for reference in references(thing, where, seen):
                if id(reference.value) in live:
                    raise ValueError(
                        f"{reference.where} of the model holds its {live[id(reference.value)]}, "
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
        params = [tensor for tensor in self.tensors if isinstance(tensor, nn.Parameter)]
        own = {id(param): self.names[id(param)] for param in params}
        own |= {
            key: name
            for key, (name, module) in self.modules.items()
            if name and next(module.parameters(), None) is not None
        }
        by_memory = {storage_pointer(param): self.names[id(param)] for param in params}
        for where, kind, key, value in attributes:
            if id(value) in own:
                what = f"its {own[id(value)]}"
            elif not isinstance(value, Tensor):
                continue
            elif storage_pointer(value) and storage_pointer(value) in by_memory:
                what = f"a view of its {by_memory[storage_pointer(value)]}"
            elif isinstance(value, nn.Parameter) and value.requires_grad:
                what = "a parameter that is not registered"
            else:
                continue
            raise ValueError(
                f"{where} of the model is an attribute of its class {kind.__name__} and holds "
                f"{what}. A call would read it from the class, so it would follow the live model "
                f"and not params. Fix: register it in `__init__`, `self.{key} = "
                "nn.Parameter(...)`, and remove it from the class."
            )

    @property
    def compiled(self) -> bool:
        """Return True if torch.compile made a function that the model refers to."""
        return any(hasattr(thing, "_torchdynamo_orig_callable") for _, thing in self.shared)

    # ---- the result

    def plan(self) -> tuple[Plan, Links]:
        """Return the plan, and number all nodes in its order."""
        self._share_memory()
        for index, reference in self.weak:
            target = self.places.get(id(reference()), self.names.get(id(reference())))
            late = Late(unchanged, reference, [])
            if target is not None:
                late = Late(new_weak, None, [Part(target)])
            self.nodes[index] = self.nodes[index]._replace(pattern=late)
        ranks = [self._rank(node) for node in self.nodes]
        order = sorted(range(len(ranks)), key=lambda index: (ranks[index], index))
        self.numbers = dict(zip(order, range(len(order)), strict=True))
        nodes = [self.nodes[index] for index in order]
        patterns = {
            field: [node.pattern for node in nodes if node.field == field]
            for field in ("objects", "containers", "own", "rare", "late")
        }
        kinds = [kind for kind, _ in patterns["objects"]]
        plan = Plan(
            kinds=kinds,
            attributes=[attributes for _, attributes in patterns["objects"]],
            containers=patterns["containers"],
            own=[tensor for tensor, _ in patterns["own"]],
            where_own=[where for _, where in patterns["own"]],
            rare=list(map(self._rare_in_order, patterns["rare"])),
            late=[x._replace(parts=list(map(self._in_order, x.parts))) for x in patterns["late"]],
            without_tensors=ranks.count(_LATE),
            empty=[container for _, _, container in self.empty],
            owners=[(self.numbers[number], key) for number, key, _ in self.empty],
            fresh=[],
        )
        return plan, self._links(nodes, kinds)

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
            where=tuple(where for _, _, name, where in places if isinstance(name, str)),
        )

    def number(self, thing: Any) -> int:
        """Return the number of an object in the plan, or -1 for one that calls share."""
        place = self.places.get(id(thing))
        return self.numbers[place] if isinstance(place, int) else -1

    def _rank(self, node: Node) -> int:
        """Return where in the order of a plan a node stands."""
        if node.field != "late":
            return ("objects", "containers", "own", "rare").index(node.field)
        places = [part.place for part in node.pattern.parts if isinstance(part, Part)]
        parts = [self.nodes[place] for place in places if isinstance(place, int)]
        after = [self._rank(part) > _LATE for part in parts if part.field == "late"]
        return _LATE + (any(after) or any(isinstance(place, str) for place in places))

    def _in_order(self, value: Any) -> Any:
        if isinstance(value, Part) and isinstance(value.place, int):
            return Part(self.numbers[value.place])
        return value

    def _rare_in_order(self, rare: Rare) -> Rare:
        return rare._replace(
            attributes={key: self._in_order(value) for key, value in rare.attributes.items()},
            elements=[tuple(map(self._in_order, element)) for element in rare.elements],
        )


_LATE = 4  # the rank of late objects without tensors of the call; those with tensors come after


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


def _computed(where: str) -> str:
    return (
        f"{where} of the model was computed from a parameter or buffer, or is a view of one, made "
        "before make_functional: it would not change with params. Fix: compute it in forward."
    )
