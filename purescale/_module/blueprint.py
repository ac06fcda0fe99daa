"""Copies of a model, each made for one call.

A forward may change whatever it likes in its copy: attributes, lists, hooks, buffers. The copy is
dropped after the call, so nothing has to be put back. A graph whose backward runs a part of the
forward again (torch.utils.checkpoint) keeps the copy of its own call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .._module.plan import Links, Plan, links_of, number_records, share_links, without_shared
from .._module.recorder import Recorder
from .._module.records import Immutable, PlainTensor, resolve
from .._module.registered import Tensors
from .._torch import private

Hook = Callable[[Tensor], Any]  # on the gradient of a parameter
Hooks = dict[str, tuple[Any, ...]]  # by parameter

# torch 2.11 cannot trace `update` of the attributes of an object.
_TRACES_UPDATE = torch.__version__ >= "2.12"


class ModelCopy:
    """A copy of the model, with the tensors of a call in it."""

    plan: Plan
    links: Links
    objects: list[Any]  # by number
    containers: list[Any]  # by number: the `__dict__` of an instance, a container itself
    stores: list[dict[str, Any]]  # the containers of `links.stores`
    before: list[Any]  # what was registered before the forward
    root: nn.Module

    def get(self, container: int, key: Any) -> Any:
        """Return what a container has now at a key; None if it has nothing there."""
        content = self.containers[container]
        if isinstance(content, dict):
            return content.get(key)
        return content[key] if key < len(content) else None

    def registered(self) -> list[Any]:
        """Return all parameters, buffers and modules that are registered now, and the state."""
        registered = list(itertools.chain.from_iterable(map(dict.values, self.stores)))
        if self.links.state:
            registered += [self.get(container, key) for container, key, _, _ in self.links.state]
        return registered


class Blueprint:
    """A record of a model, by which `make` copies it.

    Args:
        model: The module to record.
        names: The name of each registered tensor by its id; tied ones have the same.
        hooks: By parameter, the hooks on its gradient, which may be methods of `model`.
    """

    watches_next = True  # until a call in training was watched

    def __init__(
        self, model: nn.Module, names: dict[int, str], hooks: dict[str, tuple[Hook, ...]]
    ) -> None:
        recorder = Recorder(model, names)
        recorder.record(model, "")
        self.hooks: Hooks = {
            name: tuple(recorder.record(hook, f"a hook of {name}") or hook for hook in functions)
            for name, functions in hooks.items()
        }
        recorder.finish()
        plan, links = number_records(recorder)
        self.key, self.links = share_links(links)
        self.plans = [plan, plan]  # by `train`
        self.root = recorder.number(model)
        # A function mode would change what torch.compile makes of a part of the model.
        plain = any(isinstance(record, PlainTensor) for record in plan.others)
        self.can_watch = plain and not recorder.compiled
        self.names = sorted(set(names.values()))

    def set_modes(self, evaluating: list[bool], training: list[bool]) -> None:
        """Set the modes of `model.modules()` in calls with `train=False` and `train=True`."""
        self.modes = evaluating, training
        for train, modes in enumerate(self.modes):
            plan = self.plans[train]
            attributes = list(plan.attributes)
            for number, mode in zip(self.links.modules, modes, strict=True):
                attributes[number] = {**attributes[number], "training": mode}
            self.plans[train] = plan._replace(attributes=attributes)

    def modules(self, tensors: Tensors) -> list[nn.Module]:
        """Return a copy of `model.modules()` around `tensors`."""
        copy = self.make(tensors, train=True, hooked=False)
        return [copy.objects[number] for number in self.links.modules]

    def __reduce__(self) -> Any:
        """Describe an equal blueprint, by a model that is made around placeholders."""
        tensors = {name: torch.empty(0, device="meta") for name in self.names}
        copy = self.make(tensors, train=True, hooked=False)
        return _blueprint_of, (copy.root, tensors, self._hooks(copy.objects, tensors), self.modes)

    @private.only_inlined
    def make(self, tensors: Tensors, *, train: bool, hooked: bool = True) -> ModelCopy:
        """Return a copy of the model around `tensors`. If `hooked`, copies stand for parameters
        with hooks on their gradients.
        """
        evaluating, training = self.plans
        plan, links = training if train else evaluating, links_of(self.key)
        objects: list[Any] = list(map(object.__new__, plan.classes))
        containers: list[Any] = [instance.__dict__ for instance in objects]
        if _TRACES_UPDATE or not torch.compiler.is_dynamo_compiling():
            list(map(dict.update, containers, plan.attributes))
        else:
            for container, attributes in zip(containers, plan.attributes, strict=True):
                for key, value in attributes.items():
                    container[key] = value
        copied = [content.copy() for content in plan.containers]
        objects += copied
        containers += copied
        for record in plan.others:
            objects.append(record.make(objects, tensors))
        if self.hooks and hooked:
            tensors = dict(tensors)
            for name, functions in self._hooks(objects, tensors).items():
                tensors[name] = Hooked.apply(tensors[name], functions)  # type: ignore[no-untyped-call]
            for record in plan.others:
                if isinstance(record, Immutable):  # which may hold a parameter
                    objects[record.number] = record.make(objects, tensors)
        for number, key, name, _ in links.tensors:
            containers[number][key] = tensors[name]
        for number, key, part in links.objects:
            containers[number][key] = objects[part]
        for number, key, cls in plan.own:
            containers[number][key] = cls()
        for record in plan.others:
            record.fill(objects[record.number], objects, tensors)
        if torch.compiler.is_dynamo_compiling():
            for module, number in links.registers:
                containers[module]["register_buffer"] = Register(containers[number])
        # Attributes, because torch.compile would check arguments of the class for constants.
        copy = ModelCopy()
        copy.plan, copy.links, copy.objects, copy.containers = plan, links, objects, containers
        copy.stores = [containers[number] for number, _, _ in links.stores]
        copy.before, copy.root = copy.registered(), objects[self.root]
        return copy

    def _hooks(self, objects: list[Any], tensors: Tensors) -> Hooks:
        return {
            name: tuple(resolve(hook, objects, tensors) for hook in functions)
            for name, functions in self.hooks.items()
        }

    @private.only_inlined
    def release_shared(self) -> bool:
        """If a forward has filled an empty container that all copies share, give later copies their
        own: its copy keeps them, because its backward may run a part of it again. Return True if
        one was filled.
        """
        filled = any(self.plans[0].shared_empty)
        if filled:
            self.plans = list(map(without_shared, self.plans))
        return filled


def _blueprint_of(
    root: nn.Module, tensors: Tensors, hooks: Hooks, modes: tuple[list[bool], list[bool]]
) -> Blueprint:
    names = {id(tensor): name for name, tensor in tensors.items()}
    blueprint = Blueprint(root, names, hooks)
    blueprint.set_modes(*modes)
    return blueprint


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
