"""The objects that a model consists of, made anew for each call.

A forward may change whatever it likes in them: attributes, lists, hooks, buffers. They are dropped
after the call, so nothing has to be put back. A graph whose backward runs a part of the forward
again (torch.utils.checkpoint) keeps the objects of its own call.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .._module.plan import STORES, Links, Plan, built, empty, fill
from .._module.recorder import Recorder
from .._torch import private

Hook = Callable[[Tensor], Any]  # on the gradient of a parameter

# torch 2.11 cannot trace `update` of the attributes of an object.
_TRACES_UPDATE = torch.__version__ >= "2.12"


# Models that are alike share their links, so that they share what torch.compile makes of a call.
_keys: weakref.WeakKeyDictionary[Links, str] = weakref.WeakKeyDictionary()
_links: weakref.WeakValueDictionary[str, Links] = weakref.WeakValueDictionary()
_numbers = itertools.count()


@private.constant_while_compiling
def _links_of(key: str) -> Links:
    """Return the links with a key, which is all of them that torch.compile guards. Guards on
    thousands of numbers would be slow to make and to check.
    """
    return _links[key]


class Hooked(torch.autograd.Function):
    """A copy of a parameter; backward passes its gradient through the parameter's hooks."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, hooks: tuple[Hook, ...]) -> Tensor:
        return weight.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.hooks = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        for hook in ctx.hooks:
            changed = hook(grad)
            grad = grad if changed is None else changed
        return grad, None


class Objects:
    """The objects of one call."""

    plan: Plan
    links: Links
    things: list[Any]
    holders: list[Any]  # the `__dict__` of an object, a container itself
    stores: list[dict[str, Any]]  # the dicts of parameters, buffers and modules
    registered: list[Any]  # what was in these before the forward
    root: nn.Module

    def part(self, number: int, key: Any) -> Any:
        """Return what an object or container has now at a key; None if it has nothing there."""
        holder = self.holders[number]
        if isinstance(holder, dict):
            return holder.get(key)
        return holder[key] if key < len(holder) else None

    def in_stores(self) -> list[Any]:
        """Return all parameters, buffers and modules that are registered now."""
        return list(itertools.chain.from_iterable(map(dict.values, self.stores)))


class Blueprint:
    """A record of the objects of a model; `make` makes them anew around the tensors of a call.

    Args:
        model: The module to record.
        names: The name of each registered tensor by its id; tied ones have the same.
        hooks: By parameter, the hooks on its gradient, which may be methods of `model`.
    """

    unwatched = True  # until a call in training was watched

    def __init__(
        self, model: nn.Module, names: dict[int, str], hooks: dict[str, tuple[Hook, ...]]
    ) -> None:
        recorder = Recorder(model, names)
        recorder.place(model, "")
        for name, hooks_of_one in hooks.items():
            for hook in hooks_of_one:
                recorder.place(hook, f"a hook of {name}")
        recorder.check()
        plan, links = recorder.plan()
        self.key = _keys.setdefault(links, f"links {next(_numbers)}")
        self.links = _links.setdefault(self.key, links)
        self.root = recorder.number(model)
        self.hooks = {
            name: [(hook, recorder.number(hook)) for hook in hooks_of_one]
            for name, hooks_of_one in hooks.items()
        }
        self.plans = [plan, plan]  # by `train`
        # A function mode would change what torch.compile makes of a part of the model.
        self.can_watch = bool(plan.tensors) and not recorder.compiled
        self.names = sorted(set(names.values()))

    def set_modes(self, evaluating: list[bool], training: list[bool]) -> None:
        """Set the modes of `model.modules()` in calls with `train=False` and `train=True`."""
        self.modes = evaluating, training
        self.plans = [_in_mode(self.plans[0], self.links.modules, mode) for mode in self.modes]

    def modules(self, tensors: dict[str, Tensor]) -> list[nn.Module]:
        """Return a copy of `model.modules()` around `tensors`."""
        objects = self.make(tensors, train=True, hooked=False)
        return [objects.things[number] for number in self.links.modules]

    def __reduce__(self) -> Any:
        """Describe a copy, by a model that is made around placeholders."""
        tensors = {name: torch.empty(0, device="meta") for name in self.names}
        objects = self.make(tensors, train=True, hooked=False)
        return _recorded, (objects.root, tensors, self._hooks(objects.things), self.modes)

    @private.only_inlined
    def make(
        self,
        tensors: dict[str, Tensor],
        *,
        train: bool,
        hooked: bool = True,
    ) -> Objects:
        """Return the objects of a call around `tensors`. If `hooked`, copies stand for parameters
        with hooks on their gradients.
        """
        evaluating, training = self.plans
        plan, links = training if train else evaluating, _links_of(self.key)
        things: list[Any] = list(map(object.__new__, plan.kinds))
        holders: list[Any] = [thing.__dict__ for thing in things]
        if _TRACES_UPDATE or not torch.compiler.is_dynamo_compiling():
            list(map(dict.update, holders, plan.attributes))
        else:
            for holder, attributes in zip(holders, plan.attributes, strict=True):
                for key, value in attributes.items():
                    holder[key] = value
        containers = [container.copy() for container in plan.containers]
        things += containers
        holders += containers
        if len(things) < plan.size or self.hooks:
            tensors = self._make_others(plan, things, tensors, hooked)
        for number, key, name in links.tensors:
            holders[number][key] = tensors[name]
        for number, key, other in links.parts:
            holders[number][key] = things[other]
        for number, key, kind in plan.fresh:
            holders[number][key] = kind()
        for number, record in enumerate(plan.filled, len(holders) + len(plan.tensors)):
            fill(things[number], record, things, tensors)
        if torch.compiler.is_dynamo_compiling():
            for module, store in links.registers:
                holders[module]["register_buffer"] = Register(holders[store])
        # Attributes, because torch.compile would check arguments of the class for constants.
        objects = Objects()
        objects.plan, objects.links, objects.things, objects.holders = plan, links, things, holders
        objects.stores = [holders[number] for number, _, _ in links.stores]
        objects.registered, objects.root = objects.in_stores(), things[self.root]
        return objects

    @private.only_inlined
    def _make_others(
        self, plan: Plan, things: list[Any], tensors: dict[str, Tensor], hooked: bool
    ) -> dict[str, Tensor]:
        """Add what is neither an object nor a container to `things`. Return the tensors of the call
        with copies for those with hooks.
        """
        things += [tensor.clone() for tensor in plan.tensors]
        things += [empty(record) for record in plan.filled]
        for record in plan.without_tensors:
            things.append(built(record, things, tensors))
        if self.hooks and hooked:
            tensors = dict(tensors)
            for name, hooks in self._hooks(things).items():
                tensors[name] = Hooked.apply(tensors[name], hooks)  # type: ignore[no-untyped-call]
        for record in plan.with_tensors:
            things.append(built(record, things, tensors))
        return tensors

    @private.only_inlined
    def release_shared(self) -> list[tuple[int, str, str]]:
        """Leave the shared containers to a call whose forward has filled one, as its backward may
        run a part of it again; later calls make all of them anew. Return what was registered in
        them: the number of the module, the store, the name.
        """
        plan = self.plans[0]
        if not any(plan.empty):
            return []
        rows = zip(plan.owners, plan.empty, strict=True)
        registered = [(*owner, next(iter(x))) for owner, x in rows if x and owner[1] in STORES]
        self.plans = [_without_shared(plan) for plan in self.plans]
        return registered

    def _hooks(self, things: list[Any]) -> dict[str, tuple[Any, ...]]:
        return {
            name: tuple(hook if number < 0 else things[number] for hook, number in numbered)
            for name, numbered in self.hooks.items()
        }


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


def _recorded(
    root: nn.Module,
    tensors: dict[str, Tensor],
    hooks: dict[str, tuple[Any, ...]],
    modes: tuple[list[bool], list[bool]],
) -> Blueprint:
    names = {id(tensor): name for name, tensor in tensors.items()}
    blueprint = Blueprint(root, names, hooks)
    blueprint.set_modes(*modes)
    return blueprint


def _without_shared(plan: Plan) -> Plan:
    shared = set(map(id, plan.empty))
    return plan._replace(
        attributes=[
            {key: value for key, value in attributes.items() if id(value) not in shared}
            for attributes in plan.attributes
        ],
        empty=[],
        owners=[],
        fresh=[
            (number, key, type(value))
            for number, attributes in enumerate(plan.attributes)
            for key, value in attributes.items()
            if id(value) in shared
        ],
    )


def _in_mode(plan: Plan, modules: tuple[int, ...], mode: list[bool]) -> Plan:
    attributes = list(plan.attributes)
    for number, training in zip(modules, mode, strict=True):
        attributes[number] = {**attributes[number], "training": training}
    return plan._replace(attributes=attributes)
