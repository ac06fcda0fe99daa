"""Copies of a model, each made for one call.

A forward may change whatever it likes in its copy: attributes, lists, hooks, buffers. The copy is
dropped after the call, so nothing has to be put back. A graph whose backward runs a part of the
forward again (torch.utils.checkpoint) keeps the copy of its own call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .._module.kinds import Immutable, Instances, Row
from .._module.layout import Layout, Numbers, lay_out, layout_of, share_layout
from .._module.model_copy import ModelCopy
from .._module.object_graph import ObjectGraph
from .._module.registered import Tensors
from .._torch import private

Hook = Callable[[Tensor], Any]  # on the gradient of a parameter
Hooks = dict[str, tuple[Hook, ...]]  # by parameter


@dataclasses.dataclass
class FirstCalls:
    """The part of a blueprint that its first calls change; all else in it is made once."""

    instances: tuple[Instances, Instances]  # by `train`; until a forward fills what copies share
    watches_next: bool = True  # until a call in training was watched


@dataclasses.dataclass(frozen=True, eq=False)
class Blueprint:
    """A model, in the form from which `make` makes copies: its objects in the order of their
    numbers, and the layout.
    """

    first_calls: FirstCalls  # with the table of instances
    containers: list[Any]
    shared: list[Any]
    rows: list[Row]
    layout: Layout
    key: str  # of the layout
    root: int
    hooks: dict[str, tuple[int, ...]]  # by parameter, on its gradient
    can_watch: bool
    modes: tuple[list[bool], list[bool]] = ([], [])

    @staticmethod
    def of(
        model: nn.Module, names: dict[int, str], hooks: Hooks, state_containers: list[Any]
    ) -> Blueprint:
        """Return the blueprint of a model.

        Args:
            model: The module.
            names: The name of each argument by its id; tied ones have the same.
            hooks: The hooks on the gradients of parameters, which may be methods of `model`.
            state_containers: The lists and dicts in attributes that have state.
        """
        graph = ObjectGraph(model, names, hooks)
        numbers = Numbers(graph, [hook for functions in hooks.values() for hook in functions])
        key, layout = share_layout(lay_out(graph, numbers, state_containers))
        instances = Instances.of(numbers.instances, graph.is_copied)
        return Blueprint(
            FirstCalls((instances, instances)),
            containers=[node.template(graph.is_copied) for node in numbers.containers],
            shared=numbers.shared,
            rows=[node.numbered(numbers.of) for node in numbers.rows],
            layout=layout,
            key=key,
            root=numbers.of(model),
            hooks={name: tuple(map(numbers.of, functions)) for name, functions in hooks.items()},
            # A function mode would change what torch.compile makes of a part of the model.
            can_watch=bool(numbers.plain_tensors) and not graph.has_compiled,
        )

    def with_modes(self, evaluating: list[bool], training: list[bool]) -> Blueprint:
        """Return a blueprint with the modes of `model.modules()` in calls with `train=False` and
        `train=True`.
        """
        modes = evaluating, training
        tables = [
            table.with_modes(dict(zip(self.layout.modules, some, strict=True)))
            for table, some in zip(self.first_calls.instances, modes, strict=True)
        ]
        first_calls = FirstCalls((tables[0], tables[1]))
        return dataclasses.replace(self, first_calls=first_calls, modes=modes)

    def modules(self, tensors: Tensors) -> list[nn.Module]:
        """Return a copy of `model.modules()` around `tensors`."""
        return self.make(tensors, train=True, hooked=False).modules()

    def __reduce__(self) -> Any:
        """Describe an equal blueprint, by a model that is made around placeholders."""
        tensors = {name: torch.empty(0, device="meta") for name, _ in self.layout.arguments}
        copy = self.make(tensors, train=True, hooked=False)
        containers = [copy.objects[state.container] for state in self.layout.state_containers]
        return _blueprint_of, (
            copy.root,
            tensors,
            self._hooks(copy.objects),
            containers,
            self.modes,
        )

    @private.only_inlined
    def make(self, tensors: Tensors, *, train: bool, hooked: bool = True) -> ModelCopy:
        """Return a copy of the model around `tensors`. If `hooked`, copies stand for parameters
        with hooks on their gradients.
        """
        layout = layout_of(self.key)
        evaluating, training = self.first_calls.instances
        objects, contents = (training if train else evaluating).make()
        containers = [template.copy() for template in self.containers]
        contents += containers
        objects += containers
        first_argument = len(objects)
        objects += [tensors[name] for name, _ in layout.arguments]
        objects += self.shared
        first_row = len(objects)
        for row in self.rows:
            objects.append(row.make(objects))
        if self.hooks and hooked:
            tensors = dict(tensors)
            for name, hooks in self._hooks(objects).items():
                tensors[name] = Hooked.apply(tensors[name], hooks)  # type: ignore[no-untyped-call]
            for number, (name, _) in enumerate(layout.arguments, first_argument):
                objects[number] = tensors[name]
            for number, row in enumerate(self.rows, first_row):
                if isinstance(row, Immutable):  # which may hold such a parameter
                    objects[number] = row.make(objects)
        for container, key, number in layout.links:
            contents[container][key] = objects[number]
        for number, row in enumerate(self.rows, first_row):
            row.fill(objects[number], objects)
        if torch.compiler.is_dynamo_compiling():
            for module, container in layout.registers:
                contents[module]["register_buffer"] = Register(contents[container])
        # Attributes, because torch.compile would check arguments of the class for constants.
        copy = ModelCopy()
        copy.layout, copy.arguments = layout, tensors
        copy.objects, copy.contents = objects, contents
        copy.stores = [contents[store.container] for store in layout.stores]
        copy.before, copy.root = copy.registered(), objects[self.root]
        return copy

    def _hooks(self, objects: list[Any]) -> Hooks:
        return {
            name: tuple([objects[number] for number in numbers])
            for name, numbers in self.hooks.items()
        }

    @private.only_inlined
    def release_filled(self) -> bool:
        """If a forward has filled an empty container that all copies share, give later copies their
        own: its copy keeps them, because its backward may run a part of it again. Return True if
        one was filled.
        """
        evaluating, training = self.first_calls.instances
        filled = any(evaluating.shared_empty)
        if filled:
            self.first_calls.instances = evaluating.with_own_empty(), training.with_own_empty()
        return filled


def _blueprint_of(
    root: nn.Module,
    tensors: Tensors,
    hooks: Hooks,
    state_containers: list[Any],
    modes: tuple[list[bool], list[bool]],
) -> Blueprint:
    names = {id(tensor): name for name, tensor in tensors.items()}
    return Blueprint.of(root, names, hooks, state_containers).with_modes(*modes)


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
