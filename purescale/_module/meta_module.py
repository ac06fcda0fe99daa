"""A copy of a module without its tensors, and calls of it with given tensors."""

from __future__ import annotations

import copy
import operator
import sys
import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._module.at_rest import AtRest
from .._module.norms import SyncBatchNorm
from .._module.references import class_attributes, references
from .._module.registered import Registered, Tensors
from .._torch import private
from .._torch.donation import storage_pointer

FIX = (
    "A parameter is an argument here. Fix: compute with a changed copy in forward, or change "
    "params between steps."
)

# Not empty while the compiler traces one microbatch as the body of a loop: such a body may not
# write into anything made outside of it.
active_compiled_regions: list[Any] = []

_NOTHING = torch.empty(0, device="meta")


# ---- placeholders between calls ------------------------------------------------------------------


class Absent(Tensor):
    """A placeholder for a tensor of the model between calls. It refuses every operation."""

    why: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves = private.pytree.tree_leaves((args, kwargs))
        found = (leaf.why for leaf in leaves if isinstance(leaf, Absent))
        raise RuntimeError(next(found, _outside("a tensor")))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Absent({self.why!r})"

    def __deepcopy__(self, memo: Any) -> Absent:
        return self  # immutable

    def __reduce_ex__(self, protocol: Any) -> Any:
        return absent, (self.why,)

    __hash__ = object.__hash__


def absent(why: str) -> Absent:
    stand_in: Absent = private.make_subclass(Absent, _NOTHING)
    stand_in.why = why
    return stand_in


def _outside(name: str) -> str:
    return (
        f"{name} of the model is read outside of a call of `apply`, where it has no value. Likely "
        "cause: a backward reads it through the module after torch.vmap or torch.func has ended, "
        "as torch.utils.checkpoint does; or an object that is not written in Python holds it, in "
        "which `apply` cannot replace it. Fix: take the gradient inside of the transform, without "
        "checkpointing; keep it in a list or an attribute."
    )


def _computed(where: str) -> str:
    return (
        f"{where} of the model was computed from a parameter or buffer, or is a view of one, made "
        "before make_functional: it would not change with params. Fix: compute it in forward."
    )


# ---- the copy without tensors --------------------------------------------------------------------


class _Place(NamedTuple):
    """A module of a skeleton and its tensors: own name -> dotted name in the model."""

    module: nn.Module
    parameters: dict[str, str]
    buffers: dict[str, str]
    registers: bool  # its forward may register tensors; those of torch's own layers do not


# The dict or list that holds a tensor, the key in it, the dotted name.
_Slot = tuple[Any, Any, str]


class Skeleton:
    """A copy of a model with `Absent` in place of its tensors, and a list of everything that a call
    may write into. Each module is listed once, even if it has several names.

    `shared`: by id, the objects that the copy shares with the model.
    """

    @private.never_compiled
    def __init__(self, model: nn.Module, shared: dict[int, Any]) -> None:
        memo = {**shared}
        root = copy.deepcopy(model, memo)
        own = {id(made) for key, made in memo.items() if id(made) != key}
        # By id, so that a tensor in several places has one name, its first.
        names = {id(tensor): name for name, tensor in root.named_buffers()}
        names |= {id(tensor): name for name, tensor in root.named_parameters()}
        self.root, self.shared = root, shared
        self.modules = list(root.modules())
        self.places = [_place(module, names) for module in self.modules]
        self.slots = _slots(self.places)
        stores = [store for module in self.modules for store in private.stores(module)]
        self.vacant = [
            (store, key) for store in stores for key, tensor in store.items() if tensor is None
        ]
        self.children = [(held, held.copy()) for held in map(private.children, self.modules)]
        everywhere = list(references(root))
        found = [
            (reference, names[id(reference.value)])
            for reference in everywhere
            if id(reference.value) in names and isinstance(reference.holder, (dict, list))
        ]
        index = {id(module): place for place, module in enumerate(self.modules)}
        # For each module: its own name of a child -> the place of that child.
        self.lineage = [
            {key: None if child is None else index[id(child)] for key, child in held.items()}
            for held, _ in self.children
        ]
        # References to a part of this copy. In modules made for one call they would not follow.
        self.bound = [
            reference.where
            for reference in everywhere
            if id(reference.value) in names or id(reference.value) in index
        ]
        self.others: list[_Slot] = [(where.holder, where.key, name) for where, name in found]
        self.owners = [where.owner for where, _ in found]
        self.entries = self.slots + self.others
        where_registered = _dotted_names(root, self.places)
        self.doubles = _doubles(self.entries, where_registered + [r.where for r, _ in found])
        self.stores = stores
        self.counts = list(map(len, stores))
        self.rest = AtRest(root, everywhere, own)
        self.idle: list[int] = []  # reference counts of the modules between calls

    def __reduce__(self) -> Any:  # for deepcopy too: all lists are made anew from the root
        return Skeleton, (self.root, self.shared)

    @private.only_inlined
    def is_kept(self) -> bool:
        """Return True if something else holds one of its modules, such as a graph whose backward
        will run a part of the forward again.
        """
        return any(map(operator.gt, self._references(), self.idle))

    @private.only_inlined
    def settle(self) -> None:
        """Count the references to each module, for `is_kept`. The caller holds none of them."""
        self.idle = self._references()

    @private.only_inlined
    def _references(self) -> list[int]:
        # Python versions count the references of a frame differently, so both counts are made here.
        return list(map(sys.getrefcount, self.modules))


def _place(module: nn.Module, names: dict[int, str]) -> _Place:
    parameters, buffers = (
        {key: names[id(tensor)] for key, tensor in store.items() if tensor is not None}
        for store in private.stores(module)
    )
    return _Place(module, parameters, buffers, not _registers_nothing(module))


def _registers_nothing(module: nn.Module) -> bool:
    return (
        type(module).__module__.startswith("torch.nn.modules.")
        and not isinstance(module, nn.RNNBase)
        and not private.has_hooks(module)
        and "forward" not in vars(module)
    )


def _slots(places: list[_Place]) -> list[_Slot]:
    slots: list[_Slot] = []
    for place in places:
        parameters, buffers = private.stores(place.module)
        slots += [(parameters, key, name) for key, name in place.parameters.items()]
        slots += [(buffers, key, name) for key, name in place.buffers.items()]
    return slots


def _dotted_names(root: nn.Module, places: list[_Place]) -> list[str]:
    """Return the dotted path of each of the `_slots`."""
    return [
        f"{path}.{key}" if path else key
        for (path, _), place in zip(root.named_modules(), places, strict=True)
        for key in (*place.parameters, *place.buffers)
    ]


def _doubles(entries: list[_Slot], where: list[str]) -> list[tuple[int, int, str]]:
    """Return the indices of the first and another place of each tensor in several places, and the
    path of that other place.
    """
    first: dict[str, int] = {}
    indices = [first.setdefault(name, index) for index, (_, _, name) in enumerate(entries)]
    return [(f, index, where[index]) for index, f in enumerate(indices) if f != index]


def without_tensors(
    model: nn.Module, registered: Registered, hooks: Any
) -> tuple[nn.Module, nn.Module, Any, dict[int, Any]]:
    """Return two copies of `model`, a copy of `hooks`, and the objects that all copies share, by
    id. The first copy has `Absent` in place of tensors. The second has tensors on the meta device,
    because the compiler refuses `Absent`. Tensors that are tied stay tied.
    """
    tensors = registered.params | registered.buffers
    originals = {id(tensor): tensor for tensor in tensors.values()}
    by_name = {name: absent(_outside(name)) for name in tensors}
    stand_ins = {key: by_name[name] for key, name in registered.names.items()}
    memories = {storage_pointer(tensor) for tensor in originals.values()} - {None, 0}
    _check_classes(model, registered)
    shared: dict[int, Any] = {}
    for reference in references(model):
        value = reference.value
        if isinstance(value, dist.ProcessGroup):  # a handle, which cannot be copied
            shared[id(value)] = value
        # Tensors that torch.nn.utils.weight_norm and its like compute anew in each forward.
        # deepcopy refuses them.
        if (
            isinstance(value, Tensor)
            and id(value) not in stand_ins
            and (not value.is_leaf or storage_pointer(value) in memories)
        ):
            originals[id(value)] = value
            stand_ins[id(value)] = absent(_computed(reference.where))
    memo: dict[int, Any] = {**shared, **stand_ins}
    try:
        root = copy.deepcopy(model, memo)
    except Exception as error:
        what = str(error).partition(". ")[0]
        raise TypeError(
            f"the model cannot be copied without its tensors: {what}. Likely "
            "cause: an attribute that cannot be copied, such as a lock or an open file, or a "
            "wrapper, such as DistributedDataParallel. Fix: keep the attribute outside of the "
            "model, or make it in forward; for a wrapper `make_functional(wrapper.module)`."
        ) from error
    hooks = copy.deepcopy(hooks, memo)
    _check_bound(root, hooks, model)
    for module in root.modules():
        if type(module) is nn.SyncBatchNorm:
            module.__class__ = SyncBatchNorm
        if isinstance(module, nn.RNNBase):
            vars(module)["flatten_parameters"] = _left_as_they_are
    on_meta = {id(stand_ins[key]): _on_meta(tensor) for key, tensor in originals.items()}
    return root, copy.deepcopy(root, {**shared, **on_meta}), hooks, shared


def _check_classes(model: nn.Module, registered: Registered) -> None:
    """Refuse parameters in class attributes, which are not copied."""
    names = {key: name for key, name in registered.names.items() if name in registered.params}
    names |= {id(m): name for name, m in model.named_modules() if name and list(m.parameters())}
    by_memory = {storage_pointer(tensor): name for name, tensor in registered.params.items()}
    for where, kind, key, value in class_attributes(model):
        if id(value) in names:
            what = f"its {names[id(value)]}"
        elif not isinstance(value, Tensor):
            continue
        elif storage_pointer(value) and storage_pointer(value) in by_memory:
            what = f"a view of its {by_memory[storage_pointer(value)]}"
        elif isinstance(value, nn.Parameter) and value.requires_grad:
            what = "a parameter that is not registered"
        else:
            continue
        raise ValueError(
            f"{where} of the model is an attribute of its class {kind.__name__} and holds {what}. "
            "A call would read it from the class, so it would follow the live model and not "
            f"params. Fix: register it in `__init__`, `self.{key} = nn.Parameter(...)`, and remove "
            "it from the class."
        )


def _on_meta(tensor: Tensor) -> Tensor:
    meta = tensor.detach().to("meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(meta, requires_grad=tensor.requires_grad)
    return meta


# The weak references of a copy refer to its placeholders, which refuse every read.
_CAN_FOLLOW = (dict, list, weakref.ref)


def _check_bound(root: nn.Module, hooks: Any, model: nn.Module) -> None:
    """Refuse references that a copy cannot replace: functions that hold parts of the live `model`,
    and tensors in immutable containers.
    """
    live = {id(module): f"module {name or 'itself'}" for name, module in model.named_modules()}
    registered = {id(t): name for name, t in (*root.named_parameters(), *root.named_buffers())}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        live.setdefault(id(tensor), f"tensor {name}")
    for reference in (*references(root), *references(hooks, "the hooks of parameters")):
        value, where = reference.value, reference.where
        if id(value) in live:
            raise ValueError(
                f"{where} of the model holds its {live[id(value)]}, which a copy cannot replace, "
                "so it would use the live model and not params. Likely cause: a hook or a patched "
                "forward that is a closure over the model, or a compiled method. Fix: pass the "
                "module as an argument, functools.partial(function, module), or use a method of "
                "it; compile `apply`, not a part; put torch.utils.checkpoint around `apply`."
            )
        if id(value) in registered and not isinstance(reference.holder, _CAN_FOLLOW):
            raise ValueError(
                f"{where} of the model holds its tensor {registered[id(value)]}, which `apply` "
                "cannot replace there. Likely cause: a tuple, a set, __slots__, the key of a "
                "dict, or an object that is not written in Python. Fix: use a list, the value of a "
                "dict or an attribute, or read it from the module in forward."
            )


def _left_as_they_are() -> None:
    """Replaces RNNBase.flatten_parameters, which on CUDA moves the weights into one memory block;
    here they are arguments of the call.
    """


# ---- a call --------------------------------------------------------------------------------------


@private.only_inlined
def call_eager(
    skeleton: Skeleton, tensors: Tensors, copies: Tensors, args: Any, kwargs: Any
) -> tuple[Any, Tensors]:
    """Run the forward with `tensors` in their places. Undo its other changes afterwards."""
    for holder, key, name in skeleton.entries:
        holder[key] = tensors[name]
    out = skeleton.root(*args, **kwargs)
    new_buffers = _taken(skeleton.slots, tensors, copies)
    _check_doubles(skeleton, skeleton.slots, tensors)
    for held, before in skeleton.children:
        if held != before:
            _refuse_child(skeleton)
    for store, key in skeleton.vacant:
        if key in store and store[key] is not None:
            _check_registered(skeleton.places)
    if list(map(len, skeleton.stores)) != skeleton.counts:
        _check_registered(skeleton.places)
    skeleton.rest.restore()
    return out, new_buffers


def call_under_dynamo(
    skeleton: Skeleton, tensors: Tensors, copies: Tensors, args: Any, kwargs: Any
) -> tuple[Any, Tensors]:
    """`call_eager` for Dynamo, which traces single assignments only, and needs each of them undone
    afterwards.
    """
    rest = skeleton.rest
    outer = rest.changes()  # those of an enclosing call
    rest.put_back()
    slots = _slots(skeleton.places)
    # meta tensors, or the tensors of an enclosing call
    before = {name: holder[key] for holder, key, name in slots}
    try:
        _put(skeleton, slots, tensors)
        out = skeleton.root(*args, **kwargs)
        new_buffers = _taken(slots, tensors, copies)
        _check_doubles(skeleton, slots, tensors)
        _check_registered([place for place in skeleton.places if place.registers])
    finally:
        rest.put_back()
        _put(skeleton, slots, before)
        rest.put(outer)
    return out, new_buffers


def call_in_fresh_modules(
    skeleton: Skeleton, tensors: Tensors, copies: Tensors, args: Any, kwargs: Any
) -> tuple[Any, Tensors]:
    """`call_under_dynamo` in modules that are made for this call only."""
    if skeleton.bound:
        raise RuntimeError(
            f"{skeleton.bound[0]} of the model refers to one of its modules, parameters or buffers "
            "outside of where it is registered. With unroll=False a compiled window makes new "
            "modules for each call, and this reference would not follow. Fix: unroll=True."
        )
    places = []
    rest = skeleton.rest
    made = rest.again()
    for index, place in enumerate(skeleton.places):  # modules are the first objects of `rest`
        module = object.__new__(type(place.module))
        for key, value in rest.anew(index, made).items():
            if key not in private.NOT_FOR_FORWARD:
                object.__setattr__(module, key, value)
        for key, names in zip(private.STORES, (place.parameters, place.buffers), strict=False):
            known = place.module.__dict__[key]
            own = {name: tensors[names[name]] if name in names else None for name in known}
            object.__setattr__(module, key, own)
        places.append(place._replace(module=module))
    for place, children in zip(places, skeleton.lineage, strict=True):
        below = {k: None if i is None else places[i].module for k, i in children.items()}
        object.__setattr__(place.module, private.STORES[2], below)
    out = places[0].module(*args, **kwargs)
    slots = _slots(places)
    new_buffers = _taken(slots, tensors, copies)
    _check_doubles(skeleton, slots, tensors)
    _check_registered([place for place in places if place.registers])
    return out, new_buffers


def _put(skeleton: Skeleton, slots: list[_Slot], tensors: Tensors) -> None:
    """Put `tensors` in all places, by assignments that Dynamo traces."""
    for store, key, name in slots:
        store[key] = tensors[name]
    for (holder, key, name), owner in zip(skeleton.others, skeleton.owners, strict=True):
        if owner is None:
            holder[key] = tensors[name]
        else:
            setattr(owner, key, tensors[name])


@private.only_inlined
def _taken(slots: list[_Slot], tensors: Tensors, copies: Tensors) -> Tensors:
    """Return the buffers after the forward, which wrote into them or replaced them."""
    new = dict(copies)
    for store, key, name in slots:
        if key in store and store[key] is tensors[name]:
            continue
        value = store.get(key)
        if name not in copies:
            raise RuntimeError(
                f"the forward of the model replaced its parameter {name} by another tensor. {FIX}"
            )
        if value is None:
            raise RuntimeError(
                f"the forward of the model removed its buffer {name}, or set it to None. "
                "Buffers are the state of a step and must be the same ones before and after. "
                "Fix: fill it with zeros, or keep values of one forward in a plain attribute."
            )
        value = value.clone()  # it may be an argument
        if value.is_floating_point() and copies[name].is_floating_point():
            value = value.to(copies[name].dtype)
        new[name] = value
    return new


@private.only_inlined
def _check_doubles(skeleton: Skeleton, slots: list[_Slot], tensors: Tensors) -> None:
    """Refuse a buffer that the forward replaced in only one of its places: the next call would put
    the new value in both.
    """
    for first, again, where in skeleton.doubles:
        store, key, name = slots[first]
        new = store.get(key)
        registered = again < len(slots)
        if registered:
            store, key, _ = slots[again]
            other = store.get(key)
        else:
            other = _element(skeleton, again - len(slots))
        # An attribute that a forward sets to something new is not state.
        if other is not new and (registered or other is tensors[name]):
            raise RuntimeError(
                f"the forward of the model replaced only one of its buffer {name} and {where}, "
                "which were one tensor with one value in `buffers`. Fix: write into it, "
                "`self.buffer.copy_(new)`, which both places see; or `.clone()` the second one "
                "where it is set."
            )


def _element(skeleton: Skeleton, index: int) -> Any:
    (holder, key, _), owner = skeleton.others[index], skeleton.owners[index]
    if owner is not None:
        return getattr(owner, key, None)
    if isinstance(holder, dict):
        return holder.get(key)
    return holder[key] if key < len(holder) else None


def _refuse_child(skeleton: Skeleton) -> None:
    for module, (held, before) in zip(skeleton.modules, skeleton.children, strict=True):
        if held != before:
            raise RuntimeError(
                f"the forward of the model put another module into {type(module).__name__}. Its "
                "tensors would not be arguments of `apply`. Fix: make it in `__init__`, or run "
                "`model(example_batch)` once before make_functional(model)."
            )


def _check_registered(places: list[_Place]) -> None:
    for place in places:
        for store, names in zip(
            private.stores(place.module), (place.parameters, place.buffers), strict=True
        ):
            for key, value in store.items():
                if value is not None and key not in names:
                    raise RuntimeError(
                        f"the forward of the model registered {key!r} in its "
                        f"{type(place.module).__name__}. Parameters and buffers are arguments and "
                        "results of `apply`, so all must exist from the start. Likely cause: the "
                        "first forward makes it. Fix: run `model(example_batch)` once before "
                        "make_functional(model)."
                    )
