"""A walk over all objects of a model, which records those that calls make anew."""

from __future__ import annotations

import enum
import operator
import sys
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .._module import records
from .._module.norms import SyncBatchNorm
from .._module.records import (
    Composite,
    Container,
    Elementwise,
    Immutable,
    Instance,
    Part,
    PlainTensor,
    Record,
    Registered,
    Unreadable,
)
from .._module.references import ATOMS, check_classes, check_shared, is_array, references, slots
from .._torch.donation import storage_pointer
from .._torch.tracing import PLAIN_TYPES

_R = TypeVar("_R", bound=Record)

# A class is after those that extend its layout of memory.
_CONTAINERS: tuple[Any, ...] = (OrderedDict, defaultdict, dict, list, deque, set)
# The containers that each module has as attributes; the first hold what is registered.
STORES = ("_parameters", "_buffers", "_modules")
_TORCH_ATTRIBUTES = [key for key, value in vars(nn.Module()).items() if type(value) in _CONTAINERS]
# Attributes that no forward reads. torch.ao keeps a closure over the module in the second.
_NOT_READ = {"_compiled_call_impl", "qconfig"}


class Recorder:
    """A walk over all objects of a model.

    Args:
        model: The module to record.
        names: The name of each registered tensor by its id; tied ones have the same.
    """

    def __init__(self, model: nn.Module, names: dict[int, str]) -> None:
        self.modules = dict(model.named_modules())
        self.records: list[Record] = []  # all but those of registered tensors
        self.by_id: dict[int, Record | None] = {key: Registered(n) for key, n in names.items()}
        self.visited: list[tuple[str, Any]] = []  # keeps objects alive, so that an id stays theirs
        self.shared: list[tuple[str, Any]] = []  # with None in `by_id`
        self.empty: list[Any] = []  # containers of torch in modules, which calls share
        self._weak: list[Immutable] = []
        self._plain: dict[Any, list[tuple[PlainTensor, Tensor]]] = {}  # by memory and dtype
        self._hook_numbers: dict[int, int] = {}
        stores = [vars(module)[key] for module in self.modules.values() for key in STORES[:2]]
        tensors = [t for store in stores for t in store.values() if t is not None]
        self._registered = [(names[id(tensor)], tensor) for tensor in tensors]
        self._memories = set(map(storage_pointer, tensors)) - {None, 0}

    def record(self, obj: Any, path: str) -> Record | None:
        """Return the record of an object with this path in the model; None if calls share it."""
        if type(obj) in ATOMS or isinstance(obj, type):
            return None
        if id(obj) not in self.by_id:
            self.visited.append((path, obj))
            self._visit(obj, path)
        return self.by_id[id(obj)]

    def _visit(self, obj: Any, path: str) -> None:
        cls = type(obj)
        if isinstance(obj, Tensor):
            self._plain_tensor(obj, path)
        elif isinstance(obj, nn.Module):
            self._module(obj, path)
        elif isinstance(obj, _CONTAINERS):
            self._container(obj, path)
        elif (immutable := records.immutable_record(obj)) is not None:
            self._immutable(obj, immutable, path)
        elif is_array(obj) and not obj.dtype.hasobject:
            self._add(obj, Container(obj.copy()))
        elif cls is weakref.ref:
            self._weak.append(self._add(obj, Immutable(records.new_reference, obj, [])))
        elif cls is types.SimpleNamespace:
            self._elementwise(obj, cls, path)
        elif _is_helper(cls):
            self._helper(obj, path)
        else:
            self.by_id[id(obj)] = None
            self.shared.append((path, obj))

    def _add(self, obj: Any, record: _R) -> _R:
        self.by_id[id(obj)] = record
        self.records.append(record)
        return record

    # ---- the parts of an object

    def _part(self, obj: Any, path: str) -> Any:
        """Return what stands for a part of an object in its record: a record, or the part itself if
        calls share it.
        """
        if type(obj) in ATOMS:
            return obj
        if self._was_computed(obj):
            return Unreadable(
                f"{path} of the model was computed from a parameter or buffer, or is a view of "
                "one, made before make_functional: it would not change with params. Fix: compute "
                "it in forward."
            )
        record = self.record(obj, path)
        return obj if record is None else record

    def _was_computed(self, obj: Any) -> bool:
        """Return True for a tensor that was computed from a registered one, or is a view of it."""
        if not isinstance(obj, Tensor) or isinstance(self.by_id.get(id(obj)), Registered):
            return False
        return not obj.is_leaf or storage_pointer(obj) in self._memories

    def _parts(self, composite: Composite, path: str, path_of: Callable[[str, Any], str]) -> None:
        """Record the parts of a composite, and take those that a call makes out of its content."""
        content = composite.content
        items = content.items() if isinstance(content, dict) else enumerate(content)
        for key, value in list(items):
            if type(value) not in ATOMS:
                part = self._part(value, path_of(path, key))
                if isinstance(part, Record):
                    composite.parts.append(Part(key, part, path_of(path, key)))
                    part = None
                content[key] = part

    # ---- tensors and modules

    def _plain_tensor(self, tensor: Tensor, path: str) -> None:
        record = self._add(tensor, PlainTensor(tensor.detach().clone(), path))
        if type(tensor) in PLAIN_TYPES and (memory := storage_pointer(tensor)):
            self._plain.setdefault((memory, tensor.dtype), []).append((record, tensor))

    def _module(self, module: nn.Module, path: str) -> None:
        if type(module).__name__ == "OptimizedModule":  # by torch.compile: what it compiles
            self.by_id[id(module)] = self.record(module._orig_mod, path)
            return
        cls = SyncBatchNorm if type(module) is nn.SyncBatchNorm else type(module)
        _check_class(module, cls, path)
        attributes = vars(module).copy()
        if isinstance(module, nn.RNNBase):  # on CUDA it moves the weights into one block of memory
            attributes["flatten_parameters"] = _left_as_they_are
            attributes["_flat_weight_refs"] = [None] * len(attributes["_flat_weights"])
        attributes |= dict.fromkeys(_NOT_READ & attributes.keys())
        record = self._add(module, Instance(attributes, cls))
        registers, empty = not _registers_nothing(module), {}
        for key in filter(attributes.__contains__, _TORCH_ATTRIBUTES):
            value = attributes[key]
            if key in STORES and (value or registers):
                self._own_container(record, key, dict(value), path)
            elif not value or "state_dict" in key:  # which no forward reads
                attributes[key], empty[key] = None, type(value)()
            elif "_hooks" in key:
                # Numbers that are the same for all models that are alike.
                hooks = type(value)((self._hook_number(old), hook) for old, hook in value.items())
                self._own_container(record, key, hooks, _attribute(path, key))
        self._parts(record, path, _attribute)
        attributes.update(empty)
        self.empty += empty.values()

    def _own_container(self, module: Instance, key: str, content: Any, path: str) -> None:
        """Record a container of torch in a module."""
        container = self._add(module.content[key], Container(content))
        module.content[key] = None
        module.parts.append(Part(key, container, path))
        self._parts(container, path, _attribute)

    def _hook_number(self, old: int) -> int:
        return self._hook_numbers.setdefault(old, -1 - len(self._hook_numbers))

    # ---- other objects

    def _container(self, obj: Any, path: str) -> None:
        base = next(base for base in _CONTAINERS if isinstance(obj, base))
        if type(obj) is not base or self._replaces_keys(obj, path):
            self._elementwise(obj, base, path)
            return
        record = self._add(obj, Container(obj.copy()))
        if base is not set:
            self._parts(record, path, _item)

    def _replaces_keys(self, obj: Any, path: str) -> bool:
        if isinstance(obj, (list, deque)):
            return False
        keys = [key for key in obj if type(key) not in ATOMS]
        return any([self.record(key, f"a key of {path}") is not None for key in keys])

    def _immutable(self, obj: Any, record: Immutable, path: str) -> None:
        old = record.components
        new = [self._part(part, _item(path, index)) for index, part in enumerate(old)]
        if id(obj) in self.by_id:  # one of its components holds it
            return
        if all(map(operator.is_, new, old)):
            self.by_id[id(obj)] = None
            return
        record.components = new
        self._add(obj, record)

    def _helper(self, obj: Any, path: str) -> None:
        if any(slots(obj)):
            self._elementwise(obj, object, path)
            return
        attributes = vars(obj).copy()
        if isinstance(obj, RemovableHandle):
            attributes["id"] = self._hook_number(obj.id)
        self._parts(self._add(obj, Instance(attributes, type(obj))), path, _attribute)

    def _elementwise(self, obj: Any, base: Any, path: str) -> None:
        """Record a container of a user's class, one of which a call replaces keys, or an object
        that has `__slots__`.
        """
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
        record = self._add(obj, Elementwise(type(obj), base, arguments))
        for key, value in attributes.items():
            record.attributes[key] = self._part(value, _attribute(path, key))
        for index, element in enumerate(elements):
            at = _item(path, element[0] if len(element) > 1 else index)
            record.elements.append(tuple([self._part(part, at) for part in element]))
        # torch.compile cannot make a container of a user's class.
        if base is not object and type(obj) not in (*_CONTAINERS, Counter):
            reached = references(obj, path, set())
            if not any(isinstance(reference.value, (Tensor, nn.Module)) for reference in reached):
                example = Elementwise(type(obj), base, arguments, attributes, elements)
                record.example = example.make([], {})
                example.fill(record.example, [], {})

    # ---- what follows from all of them

    def finish(self) -> None:
        """Complete the records that depend on others, of weak references and of plain tensors over
        one memory. Refuse what the records miss: parts of the live model in what calls share.
        """
        for reference in self._weak:
            target = self.by_id.get(id(reference.pattern()))
            reference.components += [target] if target is not None else []
        for rows in self._plain.values():
            if len(rows) > 1:
                record, first = rows[0]
                storage: Any = first.untyped_storage()
                memory = first.detach().new_empty(0).set_(storage.clone())
                base = PlainTensor(memory, record.path)
                self.records.insert(0, base)  # before its views
                for record, tensor in rows:
                    layout = tensor.shape, tensor.stride(), tensor.storage_offset()
                    record.memory, record.layout = base, layout
        check_classes(self.visited, self._registered, self.modules)
        check_shared(self.shared, self._registered, self.modules)

    def number(self, obj: Any) -> int:
        """Return the number of an object that calls make anew."""
        record = self.by_id[id(obj)]
        assert record is not None
        return record.number

    @property
    def compiled(self) -> bool:
        """Return True if torch.compile made a function that the model refers to."""
        return any(hasattr(obj, "_torchdynamo_orig_callable") for _, obj in self.shared)


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
