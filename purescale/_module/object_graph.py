"""All objects that can be reached from a model, as a graph with a node for each."""

from __future__ import annotations

import enum
import sys
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .._module.kinds import (
    Argument,
    BuiltinContainer,
    Computed,
    Immutable,
    Instance,
    Node,
    Part,
    PlainTensor,
    Refilled,
    Shared,
    TensorView,
)
from .._module.norms import SyncBatchNorm
from .._module.references import ATOMS, check_classes, check_shared, is_array, references, slots
from .._module.registered import MODULE_ATTRIBUTES, STORES
from .._module.unreadable import Unreadable
from .._torch.donation import storage_pointer
from .._torch.tracing import PLAIN_TYPES

PathOf = Callable[[str, Any], str]  # of an object and a key in it
_N = TypeVar("_N", bound=Node)

# A class is after those that extend its layout of memory.
_CONTAINERS: tuple[Any, ...] = (OrderedDict, defaultdict, dict, list, deque, set)
# The containers that each module has as attributes.
_MODULE_CONTAINERS = [key for key, cls in MODULE_ATTRIBUTES.items() if cls in _CONTAINERS]
# Attributes that no forward reads. torch.ao keeps a closure over the module in `qconfig`.
_NEVER_READ = {"_compiled_call_impl", "qconfig"}


class ObjectGraph:
    """A node for each object that can be reached from a model and from the hooks on its parameters,
    except numbers, strings and classes.

    Args:
        model: The module.
        names: The name of each argument by its id; tied ones have the same.
        hooks: By parameter, the hooks on its gradient.

    Raises:
        TypeError: A call cannot make a module anew.
        ValueError: What calls share holds a part of the live model.
    """

    def __init__(
        self, model: nn.Module, names: dict[int, str], hooks: dict[str, tuple[Any, ...]]
    ) -> None:
        self.modules = dict(model.named_modules())
        stores = [vars(module)[key] for module in self.modules.values() for key in STORES[:2]]
        tensors = [t for store in stores for t in store.values() if t is not None]
        self._memories = set(map(storage_pointer, tensors)) - {None, 0}
        self._hook_numbers: dict[int, int] = {}
        arguments = {name: Argument(name) for name in names.values()}
        self.nodes: dict[int, Node] = {key: arguments[name] for key, name in names.items()}
        self._visited: list[tuple[str, Any]] = []  # keeps objects alive, so that an id stays theirs

        self._walk(model, "")
        for name, functions in hooks.items():
            for function in functions:
                self._walk(function, f"a hook of {name}")
        # True if each copy of the model has its own. An object is after its components.
        self._immutables: dict[Immutable, bool] = {}
        for path, obj in self._visited:
            self.is_copied(obj)
            if any([self.is_copied(key.value) for key in _keys(obj, path)]):
                self.nodes[id(obj)], _ = self._refilled(obj, path)
        self._share_memory()

        self._by_kind: dict[type[Node], list[Any]] = defaultdict(list)
        for node in dict.fromkeys(self.nodes.values()):
            self._by_kind[type(node)].append(node)

        registered = [(names[id(tensor)], tensor) for tensor in tensors]
        self._shared = [
            (path, obj) for path, obj in self._visited if isinstance(self.nodes[id(obj)], Shared)
        ]
        check_classes(self._visited, registered, self.modules)
        check_shared(self._shared, registered, self.modules)

    def is_copied(self, obj: Any) -> bool:
        """Return True if each copy of the model has its own of an object."""
        node = self.nodes.get(id(obj))
        if not isinstance(node, Immutable):
            return node is not None and not isinstance(node, Shared)
        if node not in self._immutables:
            self._immutables[node] = any([self.is_copied(part) for part in node.components])
        return self._immutables[node]

    def all_of(self, kind: type[_N]) -> list[_N]:
        """Return all nodes of a kind."""
        return self._by_kind[kind]

    def copied_immutables(self) -> list[Immutable]:
        """Return the nodes of those immutable objects of which each copy has its own, each after
        its components.
        """
        return [node for node, is_copied in self._immutables.items() if is_copied]

    def _share_memory(self) -> None:
        """Let plain tensors over one memory be views of one tensor."""
        groups: dict[Any, list[PlainTensor]] = defaultdict(list)
        for node in self.nodes.values():
            if isinstance(node, PlainTensor) and type(node.tensor) in PLAIN_TYPES:
                groups[storage_pointer(node.tensor), node.tensor.dtype].append(node)
        for (pointer, _), nodes in groups.items():
            if pointer and len(nodes) > 1:
                tensor = nodes[0].tensor.detach()
                storage: Any = tensor.untyped_storage()
                memory = PlainTensor(tensor.new_empty(0).set_(storage), nodes[0].path)
                self.nodes[id(memory.tensor)] = memory
                for tensor, path in [(node.tensor, node.path) for node in nodes]:
                    layout = (tensor.shape, tensor.stride(), tensor.storage_offset())
                    self.nodes[id(tensor)] = TensorView(memory.tensor, layout, path)

    @property
    def has_compiled(self) -> bool:
        """Return True if torch.compile made a function that the model refers to."""
        return any(hasattr(obj, "_torchdynamo_orig_callable") for _, obj in self._shared)

    # ---- the walk

    def _walk(self, obj: Any, path: str) -> None:
        """Add the nodes of an object and of all that it refers to, depth first."""
        waiting = [Part(None, obj, path)]
        while waiting:
            _, obj, path = waiting.pop()
            if type(obj) in ATOMS or isinstance(obj, type) or id(obj) in self.nodes:
                continue
            self._visited.append((path, obj))
            node, parts = self._visit(obj, path)
            self.nodes[id(obj)] = node
            waiting += reversed(parts)

    def _visit(self, obj: Any, path: str) -> tuple[Node, list[Part]]:
        """Return the node of an object, and the objects that it refers to."""
        cls = type(obj)
        if isinstance(obj, Tensor):
            return self._tensor(obj, path), []
        if isinstance(obj, nn.Module):
            return self._module(obj, path)
        if cls in _CONTAINERS:
            parts = [] if cls is set else _parts(_items(obj), path, _item)
            return BuiltinContainer(obj, parts), [*_keys(obj, path), *parts]
        if isinstance(obj, _CONTAINERS) or cls is types.SimpleNamespace:
            return self._refilled(obj, path)
        if (immutable := Immutable.of(obj)) is not None:
            parts = _parts(enumerate(immutable.components), path, _item)
            return immutable, [] if cls is weakref.ref else parts
        if is_array(obj) and not obj.dtype.hasobject:
            return BuiltinContainer(obj, []), []
        if _is_helper(cls):
            return self._refilled(obj, path) if any(slots(obj)) else self._helper(obj, path)
        return Shared(), []

    def _tensor(self, tensor: Tensor, path: str) -> Node:
        if tensor.is_leaf and storage_pointer(tensor) not in self._memories:
            return PlainTensor(tensor, path)
        return Computed(
            Unreadable(
                f"{path} of the model was computed from a parameter or buffer, or is a view of "
                "one, made before make_functional: it would not change with params. Fix: compute "
                "it in forward."
            )
        )

    def _module(self, module: nn.Module, path: str) -> tuple[Node, list[Part]]:
        if type(module).__name__ == "OptimizedModule":  # by torch.compile: what it compiles
            self._walk(module._orig_mod, path)
            return self.nodes[id(module._orig_mod)], []
        cls = SyncBatchNorm if type(module) is nn.SyncBatchNorm else type(module)
        _check_class(module, cls, path)
        attributes = vars(module).copy()
        if isinstance(module, nn.RNNBase):  # on CUDA it moves the weights into one block of memory
            attributes["flatten_parameters"] = _left_as_they_are
            attributes["_flat_weight_refs"] = [None] * len(attributes["_flat_weights"])
        attributes |= dict.fromkeys(_NEVER_READ & attributes.keys())
        registers, inner, empty = not _registers_nothing(module), [], {}
        for key in filter(attributes.__contains__, _MODULE_CONTAINERS):
            value = attributes[key]
            if key in STORES and (value or registers):
                inner += self._container_of_torch(value, dict(value), path)
            elif not value or "state_dict" in key:  # which no forward reads
                attributes[key] = empty[key] = type(value)()
            elif "_hooks" in key:
                # Numbers that are the same for all models that are alike.
                hooks = type(value)((self._hook_number(old), hook) for old, hook in value.items())
                inner += self._container_of_torch(value, hooks, _attribute(path, key))
        items = [(key, value) for key, value in attributes.items() if key not in empty]
        parts = _parts(items, path, _attribute)
        return Instance(attributes, parts, cls, list(empty.values())), [*inner, *parts]

    def _container_of_torch(self, container: Any, content: Any, path: str) -> list[Part]:
        """Add the node of a container that torch has in a module; return what the content holds."""
        parts = _parts(content.items(), path, _attribute)
        self.nodes[id(container)] = BuiltinContainer(content, parts)
        return parts

    def _hook_number(self, old: int) -> int:
        return self._hook_numbers.setdefault(old, -1 - len(self._hook_numbers))

    def _helper(self, obj: Any, path: str) -> tuple[Node, list[Part]]:
        attributes = vars(obj).copy()
        if isinstance(obj, RemovableHandle):
            attributes["id"] = self._hook_number(obj.id)
        parts = _parts(attributes.items(), path, _attribute)
        return Instance(attributes, parts, type(obj), []), parts

    def _refilled(self, obj: Any, path: str) -> tuple[Node, list[Part]]:
        bases = (*_CONTAINERS, types.SimpleNamespace)
        base: Any = next((base for base in bases if isinstance(obj, base)), object)
        arguments: tuple[Any, ...] = ()
        if base is defaultdict:
            arguments = (obj.default_factory,)
        elif base is deque:
            arguments = ((), obj.maxlen)
        attributes = dict(getattr(obj, "__dict__", {}))
        attributes |= {key: getattr(obj, key) for key in slots(obj) if hasattr(obj, key)}
        elements: list[tuple[Any, ...]] = []
        if issubclass(base, dict):
            elements = list(base.items(obj))
        elif base in _CONTAINERS:
            elements = [(value,) for value in base.__iter__(obj)]
        parts = _parts(attributes.items(), path, _attribute)
        for index, element in enumerate(elements):
            at = element[0] if len(element) > 1 else index
            parts += _parts([(at, value) for value in element], path, _item)
        node = Refilled(type(obj), base, arguments, attributes, elements)
        # torch.compile cannot make a container of a user's class.
        if base is not object and type(obj) not in (*_CONTAINERS, Counter):
            reached = references(obj, path, set())
            if not any(isinstance(reference.value, (Tensor, nn.Module)) for reference in reached):
                node = node.with_example()
        return node, parts


def _parts(items: Iterable[tuple[Any, Any]], path: str, path_of: PathOf) -> list[Part]:
    return [
        Part(key, value, path_of(path, key)) for key, value in items if type(value) not in ATOMS
    ]


def _items(container: Any) -> Iterable[tuple[Any, Any]]:
    return container.items() if isinstance(container, dict) else enumerate(container)


def _keys(obj: Any, path: str) -> list[Part]:
    """Return the keys of a dict and the elements of a set, if `obj` is one of a built-in type."""
    if type(obj) not in _CONTAINERS or isinstance(obj, (list, deque)):
        return []
    return [Part(None, key, f"a key of {path}") for key in obj if type(key) not in ATOMS]


def _attribute(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _item(path: str, key: Any) -> str:
    return f"{path}[{key!r}]"


def _check_class(module: nn.Module, cls: type, path: str) -> None:
    """Refuse a module that `object.__new__` and its `__dict__` do not make."""
    try:
        object.__new__(cls)
        for key in slots(module):
            raise TypeError(f"{key} is in its __slots__")
    except TypeError as error:
        raise TypeError(
            f"{path or 'the model'} is a {cls.__name__}, which a call cannot make anew "
            f"({error}). Likely cause: its class derives from one that is written in C besides "
            "nn.Module, or has __slots__. Fix: keep an object of that class in an attribute; "
            "remove the __slots__."
        ) from None


def _registers_nothing(module: nn.Module) -> bool:
    """Return True for a layer of torch, whose forward registers no parameter, buffer or module."""
    return type(module).__module__.startswith("torch.nn.modules.") and "forward" not in vars(module)


def _is_helper(cls: type) -> bool:
    """Return True if an object of this class is all in its attributes, and a forward may set them.
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
    try:
        object.__new__(cls)
    except TypeError:  # laid out in C
        return False
    return True


def _left_as_they_are() -> None:
    """Replaces RNNBase.flatten_parameters."""
