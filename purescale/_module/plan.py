"""The records of a model as lists, from which a call makes thousands of objects at once."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from typing import Any, NamedTuple

from torch import nn

from .._module.recorder import STORES, Recorder
from .._module.records import Composite, Container, Immutable, Instance, Record, Registered
from .._torch import private

# What refers to what in a copy of the model. These are plain tuples: a call unpacks thousands, and
# Python unpacks a NamedTuple seven times as slowly.
#
# (container, key, name, path): `containers[container][key] = tensors[name]`; the path of the place.
TensorLink = tuple[int, Any, str, str]
# (container, key, number): `containers[container][key] = objects[number]`.
ObjectLink = tuple[int, Any, int]
# (container, module, attribute): `getattr(objects[module], attribute) is containers[container]`.
Store = tuple[int, int, str]


@dataclasses.dataclass(frozen=True)
class Links:
    """The links of a model. Those of models that are alike are equal."""

    tensors: tuple[TensorLink, ...]
    objects: tuple[ObjectLink, ...]
    modules: tuple[int, ...]  # in the order of `model.modules()`
    stores: tuple[Store, ...]
    buffers: tuple[TensorLink, ...]  # those of `tensors` in a store of buffers, or state
    state: tuple[TensorLink, ...]  # those of `tensors` that are state in plain attributes
    registers: tuple[tuple[int, int], ...]  # (module, its buffers), by torch's `register_buffer`


class EmptyContainer(NamedTuple):
    """A container of torch in a module that is empty before the forward."""

    module: int
    attribute: str
    cls: type


class Plan(NamedTuple):
    """The patterns of the objects of a copy, in the order of their numbers: instances, by their
    classes and attributes; containers, by what they contain; the others, one by one.
    """

    classes: list[type]
    attributes: list[dict[str, Any]]
    containers: list[Any]
    others: list[Record]
    # Empty containers that all copies share, such as dicts of hooks, because hardly any forward
    # fills one. Once one was filled, each copy has its own.
    shared_empty: list[Any]
    own: list[EmptyContainer]


def number_records(recorder: Recorder) -> tuple[Plan, Links]:
    """Number the records of a model, and return their lists and links."""
    instances = [record for record in recorder.records if isinstance(record, Instance)]
    containers = [record for record in recorder.records if isinstance(record, Container)]
    others = [record for record in recorder.records if not isinstance(record, Composite)]
    others.sort(key=lambda record: isinstance(record, Immutable))  # which are made of the others
    for number, record in enumerate((*instances, *containers, *others)):
        record.number = number
    plan = Plan(
        classes=[record.cls for record in instances],
        attributes=[record.content for record in instances],
        containers=[record.content for record in containers],
        others=others,
        shared_empty=recorder.empty,
        own=[],
    )
    return plan, _links(recorder, instances, containers)


def _links(recorder: Recorder, instances: list[Instance], containers: list[Container]) -> Links:
    tensors: list[TensorLink] = []
    objects: list[ObjectLink] = []
    stores: list[Store] = []
    for composite in (*instances, *containers):
        for key, record, path in composite.parts:
            if isinstance(record, Registered):
                tensors.append((composite.number, key, record.name, path))
                continue
            objects.append((composite.number, key, record.number))
            if key in STORES and _is_module(composite):
                stores.append((record.number, composite.number, key))
    buffers = {number: module for number, module, attribute in stores if attribute == "_buffers"}
    stored = {number for number, _, _ in stores}
    registered = {name for number, _, name, _ in tensors if number in stored}
    state = tuple(link for link in tensors if link[2] not in registered)
    return Links(
        tensors=tuple(tensors),
        objects=tuple(objects),
        modules=tuple(map(recorder.number, recorder.modules.values())),
        stores=tuple(stores),
        buffers=(*(link for link in tensors if link[0] in buffers), *state),
        state=state,
        registers=tuple(
            (module, number)
            for number, module in buffers.items()
            if instances[module].cls.register_buffer is nn.Module.register_buffer
        ),
    )


def _is_module(record: Composite) -> bool:
    return isinstance(record, Instance) and issubclass(record.cls, nn.Module)


def without_shared(plan: Plan) -> Plan:
    """Return a plan by which each copy has empty containers of its own."""
    shared = set(map(id, plan.shared_empty))
    own = [
        EmptyContainer(number, key, type(value))
        for number, attributes in enumerate(plan.attributes)
        for key, value in attributes.items()
        if id(value) in shared
    ]
    attributes = [
        {key: value for key, value in attributes.items() if id(value) not in shared}
        for attributes in plan.attributes
    ]
    return plan._replace(attributes=attributes, shared_empty=[], own=own)


# ---- links of models that are alike --------------------------------------------------------------

# torch.compile guards the key alone: guards on thousands of numbers would be slow to make and to
# check. Models that are alike have the same key, and so share a graph.
_keys: weakref.WeakKeyDictionary[Links, str] = weakref.WeakKeyDictionary()
_links_by_key: weakref.WeakValueDictionary[str, Links] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def share_links(links: Links) -> tuple[str, Links]:
    """Return a key and the links that it stands for, which are equal to `links`."""
    key = _keys.setdefault(links, f"links {next(_numbers)}")
    return key, _links_by_key.setdefault(key, links)


@private.constant_while_compiling
def links_of(key: str) -> Links:
    """Return the links with a key, which a blueprint holds."""
    return _links_by_key[key]
