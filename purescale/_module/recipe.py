"""A model as a recipe, from which each call makes a copy: flat rows, and links between objects.

A forward may change whatever it likes in its copy: attributes, lists, hooks, buffers. The copy is
dropped after the call, so nothing has to be put back. A graph whose backward runs a part of the
forward again (torch.utils.checkpoint) keeps the copy of its own call.

An object has the same number in all copies: its index in the list of their objects.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import itertools
import sys
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._module.policy import SyncBatchNorm
from .._module.references import ATOMS, COMPUTED, Unreadable, check_references, is_array
from .._module.registered import MODULE_ATTRIBUTES, STORES, RegisteredTensors, Tensors, keys_of
from .._torch import private
from .._torch.donation import storage_pointer

_CONTAINERS: tuple[Any, ...] = (dict, list, set, collections.deque, OrderedDict)
_CONTAINERS += (collections.defaultdict, collections.Counter)
# The containers that each module has as attributes.
_OF_A_MODULE = [key for key, cls in MODULE_ATTRIBUTES.items() if cls in _CONTAINERS]
# Attributes that no forward reads. torch.ao keeps a closure over the module in `qconfig`.
_NEVER_READ = {"_compiled_call_impl", "qconfig"}

Number = tuple[str, int]  # of an object: the name of its rows, and an index in them
PathOf = Callable[[str, Any], str]  # of an object and a key in it


class Place(NamedTuple):
    """A place in which a copy has a parameter or buffer: `contents[container][key]`."""

    container: int
    key: Any
    path: str  # in the model
    in_store: bool  # in `_parameters` or `_buffers` of a module


class StateContainer(NamedTuple):
    """A list or dict with state attributes: its keys and its places in a copy of the model."""

    container: int
    keys: tuple[Any, ...]
    places: tuple[Place, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The place of everything in a copy of a model. Those of models that are alike are equal.

    Objects are known by their numbers. A container is the number of an instance, whose content is
    its `__dict__`, or of a container.
    """

    # (container, key, object): `contents[container][key] = objects[object]`. Plain tuples: a call
    # unpacks thousands, and Python unpacks a NamedTuple seven times as slowly.
    links: tuple[tuple[int, Any, int], ...]
    places: tuple[tuple[str, tuple[Place, ...]], ...]  # by argument; those in stores come first
    state: tuple[Place, ...]  # all places of state attributes
    state_containers: tuple[StateContainer, ...]
    modules: tuple[int, ...]  # in the order of `model.modules()`
    stores: tuple[tuple[int, int, str], ...]  # container, module, attribute
    views: tuple[tuple[int, str], ...]  # tensors that share memory in the model, with their paths
    registers: tuple[tuple[int, int], ...]  # module and store, if it has torch's register_buffer


class ModelCopy:
    """A copy of a model around the tensors of a call."""

    layout: Layout
    arguments: Tensors  # all parameters and buffers, as they are in it before the forward
    objects: list[Any]
    contents: list[Any]  # by number: the `__dict__` of an instance, a container itself
    stores: list[dict[str, Any]]  # the contents of `layout.stores`
    before: list[Any]  # what was registered before the forward
    root: nn.Module

    def modules(self) -> list[nn.Module]:
        """Return the copies of `model.modules()`."""
        return [self.objects[number] for number in self.layout.modules]

    def value(self, place: Place) -> Any:
        """Return what is in a place now; None if nothing is."""
        content = self.contents[place.container]
        if isinstance(content, dict):
            return content.get(place.key)
        return content[place.key] if place.key < len(content) else None

    def registered(self) -> list[Any]:
        """Return all parameters, buffers and modules that are registered, and the state."""
        contents, layout = self.contents, self.layout
        registered: list[Any] = list(itertools.chain.from_iterable(map(dict.values, self.stores)))
        if layout.state or layout.state_containers:
            registered += map(self.value, layout.state)
            for number, _, places in layout.state_containers:
                content = contents[number]
                registered += content.values() if isinstance(content, dict) else content
                registered += map(self.value, places)
        return registered


class Recipe:
    """All objects of a model of which each call has its own, in the order in which it makes them.

    Args:
        model: The module.
        registered: Its parameters, buffers and state attributes, with their names.
        state_containers: The lists and dicts in attributes that have state.

    Raises:
        TypeError: A call cannot make a module anew.
        ValueError: What calls share holds a part of the live model.
    """

    def __init__(
        self, model: nn.Module, registered: RegisteredTensors, state_containers: list[Any]
    ) -> None:
        self.names = list(dict.fromkeys(registered.names.values()))
        self.classes: list[Any] = []
        self.instances: list[dict[str, Any]] = []  # attributes
        self.containers: list[Any] = []
        self.own: list[Tensor] = []  # those that are not arguments
        self.shared: list[Any] = []  # what an immutable object refers to
        self.immutables: list[tuple[Callable[..., Any], Any, list[Any]]] = []
        # Empty containers in modules, which copies share until a forward fills one, as hardly any
        # does. Then, by instance, the attributes in which each copy gets new ones.
        self.shared_empty: list[Any] = []
        self.own_empty: list[dict[str, type]] = []
        self.watches_next = True  # until a call in training compared the values of parameters
        self._walk(model, registered, state_containers)
        self.by_mode = self.instances, self.instances  # by `train`

    def with_modes(self, evaluating: list[bool], training: list[bool]) -> None:
        """Set the modes of `model.modules()` in calls with `train=False` and `train=True`."""

        def table(modes: list[bool]) -> list[dict[str, Any]]:
            mode_of = dict(zip(self.layout.modules, modes, strict=True))
            return [
                {**attributes, "training": mode_of[n]} if n in mode_of else attributes
                for n, attributes in enumerate(self.instances)
            ]

        self.by_mode = table(evaluating), table(training)

    # ---- a call

    @private.only_inlined
    def make(self, tensors: Tensors, *, train: bool) -> ModelCopy:
        """Return a copy of the model around `tensors`."""
        layout = layout_of(self.key)
        evaluating, training = self.by_mode
        objects: list[Any] = list(map(object.__new__, self.classes))
        contents: list[Any] = [instance.__dict__ for instance in objects]
        list(map(dict.update, contents, training if train else evaluating))
        for content, empty in zip(contents, self.own_empty, strict=False):
            for key, cls in empty.items():
                content[key] = cls()
        containers = [template.copy() for template in self.containers]
        contents += containers
        objects += containers
        objects += [tensors[name] for name, _ in layout.places]
        objects += [tensor.clone() for tensor in self.own]
        objects += self.shared
        for build, pattern, parts in self.immutables:
            objects.append(build(pattern, [objects[part] for part in parts]))
        for container, key, number in layout.links:
            contents[container][key] = objects[number]
        if torch.compiler.is_dynamo_compiling():
            for module, store in layout.registers:
                contents[module]["register_buffer"] = Register(contents[store])
        # Attributes, because torch.compile would check arguments of the class for constants.
        copy = ModelCopy()
        copy.layout, copy.arguments = layout, tensors
        copy.objects, copy.contents = objects, contents
        copy.stores = [contents[store] for store, _, _ in layout.stores]
        copy.before, copy.root = copy.registered(), objects[layout.modules[0]]
        return copy

    @private.only_inlined
    def release_filled(self) -> bool:
        """If a forward has filled an empty container that all copies share, give later copies their
        own: its copy keeps them, because its backward may run a part of it again. Return True if
        one was filled.
        """
        empty = self.shared_empty
        if not any(empty):
            return False
        shared = set(map(id, empty))
        # In this order: another thread may make a copy in between.
        self.own_empty = [
            {key: type(value) for key, value in attributes.items() if id(value) in shared}
            for attributes in self.instances
        ]
        evaluating, training = (
            [
                {key: value for key, value in attributes.items() if id(value) not in shared}
                for attributes in table
            ]
            for table in self.by_mode
        )
        self.by_mode, self.shared_empty = (evaluating, training), []
        return True

    # ---- the walk

    def _walk(
        self, model: nn.Module, registered: RegisteredTensors, state_containers: list[Any]
    ) -> None:
        """Add all objects that can be reached from the model."""
        modules = dict(model.named_modules())
        tensors = {**registered.params, **registered.buffers, **registered.aliases}
        self._memories = set(map(storage_pointer, tensors.values())) - {None, 0}
        numbers = {name: ("names", index) for index, name in enumerate(self.names)}
        self._index: dict[int, Number | None] = {
            key: numbers[name] for key, name in registered.names.items()
        }
        self._links: list[tuple[Number, Any, Number, str]] = []
        self._stores: dict[Number, tuple[Number, str]] = {}  # with module and attribute
        self._visited: list[tuple[str, Any]] = []  # keeps objects alive, so that an id stays theirs
        self._shared: list[tuple[str, Any]] = []
        self._checked: set[type] = set()
        self._memories_of_own: Any = collections.defaultdict(list)
        self._waiting: list[tuple[Number, Any, list[tuple[Any, Any]], str, PathOf]] = []
        self._visit(model, "")
        while self._waiting:
            container, template, items, path, path_of = self._waiting.pop()
            for key, value in items:
                if (number := self._visit(value, path_of(path, key))) is not None:
                    self._links.append((container, key, number, path_of(path, key)))
                    template[key] = None
        check_references(self._visited, self._shared, tensors, modules)
        self.key, self.layout = share_layout(self._lay_out(modules, state_containers))
        del self._index, self._links, self._stores, self._visited, self._shared, self._waiting
        del self._memories, self._checked, self._memories_of_own

    def _visit(self, obj: Any, path: str) -> Number | None:
        """Return the number of an object, which is added if it is new; None if copies share it."""
        cls = type(obj)
        if cls in ATOMS or isinstance(obj, type):
            return None
        if id(obj) in self._index:
            return self._index[id(obj)]
        self._visited.append((path, obj))
        if isinstance(obj, Tensor):
            if obj.is_leaf and storage_pointer(obj) not in self._memories:
                number = self._add(obj, self.own, "own", obj.detach().clone())
                self._memories_of_own[storage_pointer(obj)].append((number, path))
                return number
            return self._add(obj, self.shared, "shared", Unreadable(COMPUTED.format(path)))
        if cls.__name__ == "OptimizedModule":  # by torch.compile: what it compiles
            self._index[id(obj)] = self._visit(obj._orig_mod, path)
            return self._index[id(obj)]
        if isinstance(obj, nn.Module):
            return self._module(obj, path)
        if cls in _CONTAINERS or (is_array(obj) and not obj.dtype.hasobject):
            return self._container(obj, path)
        if (immutable := _immutable(obj)) is not None:
            build, pattern, parts = immutable
            numbers = [self._visit(part, _item(path, i)) for i, part in enumerate(parts)]
            if any(numbers):
                places = [
                    number or self._row(self.shared, "shared", part)
                    for number, part in zip(numbers, parts, strict=True)
                ]
                return self._add(obj, self.immutables, "immutables", (build, pattern, places))
        elif _is_helper(cls):
            attributes = vars(obj).copy()
            number = self._add_instance(obj, cls, attributes)
            self._fill(number, attributes, attributes.items(), path, _attribute)
            return number
        self._index[id(obj)] = None
        self._shared.append((path, obj))
        return None

    def _add(self, obj: Any, rows: list[Any], name: str, row: Any) -> Number:
        number = self._index[id(obj)] = self._row(rows, name, row)
        return number

    @staticmethod
    def _row(rows: list[Any], name: str, row: Any) -> Number:
        rows.append(row)
        return name, len(rows) - 1

    def _fill(
        self, number: Number, template: Any, items: Iterable[Any], path: str, path_of: PathOf
    ) -> None:
        """Add later what an object holds. The template then has None for what each call has."""
        copied = [(key, value) for key, value in items if type(value) not in ATOMS]
        if copied:
            self._waiting.append((number, template, copied, path, path_of))

    def _add_instance(self, obj: Any, cls: type, attributes: dict[str, Any]) -> Number:
        self.classes.append(cls)
        return self._add(obj, self.instances, "instances", attributes)

    def _container(self, obj: Any, path: str) -> Number:
        template = obj.copy()
        number = self._add(obj, self.containers, "containers", template)
        if isinstance(obj, (dict, set)):
            keys = [key for key in obj if type(key) not in ATOMS]
            self._visited += [(f"a key of {path}", key) for key in keys]
            self._shared += [(f"a key of {path}", key) for key in keys]
        if not (isinstance(obj, set) or is_array(obj)):
            items = obj.items() if isinstance(obj, dict) else enumerate(obj)
            self._fill(number, template, items, path, _item)
        return number

    def _module(self, module: nn.Module, path: str) -> Number:
        cls = SyncBatchNorm if type(module) is nn.SyncBatchNorm else type(module)
        if cls not in self._checked:
            _check_class(cls, path)
            self._checked.add(cls)
        attributes = vars(module).copy()
        if isinstance(module, nn.RNNBase):  # on CUDA it moves the weights into one block of memory
            attributes["flatten_parameters"] = _left_as_they_are
            attributes["_flat_weight_refs"] = [None] * len(attributes["_flat_weights"])
        attributes |= dict.fromkeys(_NEVER_READ & attributes.keys())
        number = self._add_instance(module, cls, attributes)
        items = dict(attributes)
        # A layer of torch, whose forward registers no parameter, buffer or module.
        is_torchs = cls.__module__.startswith("torch.nn.modules.") and "forward" not in attributes
        for key in filter(attributes.__contains__, _OF_A_MODULE):
            value = attributes[key]
            if key in STORES and (value or not is_torchs):
                del items[key]
                template = dict(value)
                store = self._add(value, self.containers, "containers", template)
                self._stores[store] = number, key
                self._links.append((number, key, store, path))
                self._fill(store, template, value.items(), path, _attribute)
                attributes[key] = None
            elif not value or "state_dict" in key:  # which no forward reads
                del items[key]
                attributes[key] = type(value)()
                self.shared_empty.append(attributes[key])
        self._fill(number, attributes, items.items(), path, _attribute)
        return number

    def _lay_out(self, modules: dict[str, nn.Module], state_containers: list[Any]) -> Layout:
        """Number all objects, and return where everything is."""
        kinds = ("instances", "containers", "names", "own", "shared", "immutables")
        sizes = itertools.accumulate((len(getattr(self, kind)) for kind in kinds), initial=0)
        first = dict(zip(kinds, sizes, strict=False))

        def of(number: Any) -> int:
            return first[number[0]] + int(number[1])

        self.immutables = [
            (build, pattern, list(map(of, parts))) for build, pattern, parts in self.immutables
        ]
        places: dict[str, list[Place]] = {name: [] for name in self.names}
        of_containers: dict[int, Any] = {
            of(self._index[id(c)]): (tuple(keys_of(c)), []) for c in state_containers
        }
        for container, key, number, path in self._links:
            some = None
            if number[0] == "names":
                some = places[self.names[number[1]]]
            elif of(number) in of_containers:
                some = of_containers[of(number)][1]
            if some is not None:
                some.append(Place(of(container), key, path, container in self._stores))
        arguments = [
            (name, tuple(sorted(some, key=lambda p: (not p.in_store, p.path != name))))
            for name, some in places.items()
        ]
        stores = {of(store): (of(module), key) for store, (module, key) in self._stores.items()}
        return Layout(
            links=tuple((of(container), key, of(n)) for container, key, n, _ in self._links),
            places=tuple(arguments),
            state=tuple(p for _, some in arguments if not some[0].in_store for p in some),
            state_containers=tuple(
                StateContainer(number, keys, tuple(some))
                for number, (keys, some) in of_containers.items()
            ),
            modules=tuple(of(self._index[id(module)]) for module in modules.values()),
            stores=tuple((store, module, key) for store, (module, key) in stores.items()),
            views=tuple(
                (of(number), path)
                for pointer, some in self._memories_of_own.items()
                for number, path in (some if pointer and len(some) > 1 else ())
            ),
            registers=tuple(
                (module, store)
                for store, (module, key) in stores.items()
                if key == "_buffers"
                and self.classes[module].register_buffer is nn.Module.register_buffer
            ),
        )

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state)
        self.key, self.layout = share_layout(self.layout)


class Register:
    """`register_buffer` of a module, in the form in which torch.compile follows a buffer that a
    forward replaces: `nn.Module.__setattr__` looks at `__func__`, which torch.compile does not see
    of a method of a module that is made within the graph.
    """

    def __init__(self, buffers: dict[str, Tensor]) -> None:
        self.__func__ = nn.Module.register_buffer
        self.buffers = buffers

    def __call__(self, name: str, tensor: Tensor, persistent: bool = True) -> None:
        self.buffers[name] = tensor


# ---- layouts of models that are alike ------------------------------------------------------------

# torch.compile guards the key alone: guards on thousands of numbers would be slow to make and to
# check. Models that are alike have the same key, and so share a graph.
_keys: weakref.WeakKeyDictionary[Layout, str] = weakref.WeakKeyDictionary()
_by_key: weakref.WeakValueDictionary[str, Layout] = weakref.WeakValueDictionary()
_key_numbers = itertools.count()


def share_layout(layout: Layout) -> tuple[str, Layout]:
    """Return a key and the layout that it stands for, which is equal to `layout`."""
    key = _keys.setdefault(layout, f"layout {next(_key_numbers)}")
    return key, _by_key.setdefault(key, layout)


@private.constant_while_compiling
def layout_of(key: str) -> Layout:
    """Return the layout with a key, which a recipe holds."""
    return _by_key[key]


# ---- kinds of objects ----------------------------------------------------------------------------


def _attribute(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _item(path: str, key: Any) -> str:
    return f"{path}[{key!r}]"


def _check_class(cls: type, path: str) -> None:
    """Refuse a module that `object.__new__` and its `__dict__` do not make."""
    try:
        object.__new__(cls)
        if any(base.__dict__.get("__slots__") for base in cls.__mro__):
            raise TypeError("it has __slots__")
    except TypeError as error:
        raise TypeError(
            f"{path or 'the model'} is a {cls.__name__}, which a call cannot make anew "
            f"({error}). Likely cause: a base class in C besides nn.Module, or __slots__. Fix: "
            "keep an object of that base class in an attribute; remove the __slots__."
        ) from None


def _is_helper(cls: type) -> bool:
    """Return True if an object of this class is all in its `__dict__`, and a forward may change it.
    Those of the standard library and of torch, such as loggers and meshes, are for all to share.
    """
    package = cls.__module__.partition(".")[0]
    if package in sys.stdlib_module_names or (
        package == "torch" and not cls.__module__.startswith(("torch.nn.", "torch.utils.hooks"))
    ):
        return False
    if issubclass(cls, enum.Enum) or hasattr(cls, "__del__"):
        return False
    for name in ("__deepcopy__", "__reduce__", "__reduce_ex__"):
        if getattr(cls, name, None) is not getattr(object, name, None):
            return False
    if any(base.__dict__.get("__slots__") for base in cls.__mro__):
        return False
    try:
        return hasattr(object.__new__(cls), "__dict__")
    except TypeError:  # laid out in C
        return False


def _left_as_they_are() -> None:
    """Replaces RNNBase.flatten_parameters."""


def _immutable(obj: Any) -> tuple[Callable[..., Any], Any, list[Any]] | None:
    """Return how to build a tuple, a partial, a bound method or a weak reference of its parts:
    `build(pattern, parts)`; None for an object of another kind. If a call has its own of no part,
    it shares the object too.
    """
    cls = type(obj)
    if isinstance(obj, tuple):
        return _new_tuple, cls, list(tuple.__iter__(obj))
    if cls is functools.partial:
        return _new_partial, list(obj.keywords), [obj.func, *obj.args, *obj.keywords.values()]
    if cls is types.MethodType:
        owner, function = obj.__self__, obj.__func__
        name = getattr(function, "__name__", "")
        if getattr(type(owner), name, None) is function:
            return _new_method_of_class, name, [owner]
        return _new_method, function, [owner]
    if cls is weakref.ref:
        return _new_reference, None, [obj()]
    return None


def _new_tuple(cls: type, parts: list[Any]) -> Any:
    return tuple.__new__(cls, parts)


def _new_partial(keywords: list[str], parts: list[Any]) -> Any:
    count = len(parts) - len(keywords)
    function, *args = parts[:count]
    return functools.partial(function, *args, **dict(zip(keywords, parts[count:], strict=True)))


def _new_method(function: Any, parts: list[Any]) -> Any:
    return types.MethodType(function, parts[0])


def _new_method_of_class(name: str, parts: list[Any]) -> Any:
    return getattr(parts[0], name)  # torch.compile does not follow MethodType


def _new_reference(_: None, parts: list[Any]) -> Any:
    return weakref.ref(parts[0])
