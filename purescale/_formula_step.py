"""A step by torch's own formula: on copies, through an optimizer object never constructed."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _columns, _torch, _tree
from ._formula import Dampening, PlainArithmetic, Rate, has_lists, without_reads
from ._groups import Groups
from ._slots import FIRST, Kept, Slots


class FormulaStep:
    """The step that a class of torch.optim makes of these settings."""

    def __init__(self, groups: Groups, kept: Kept) -> None:
        self._groups, self._kept = groups, kept
        self._cls = groups.cls
        self._has_lists = has_lists(groups.cls)
        # What torch makes of the rate of a parameter's first step, and `init` of the rate there.
        self._begins = next(
            (slot for cls, slot in _MADE_OF_THE_RATE.items() if issubclass(groups.cls, cls)), ""
        )
        # torch's SGD over lists then adds the momentum to the gradients themselves.
        self._nesterov = issubclass(groups.cls, torch.optim.SGD) and any(
            extra.get("nesterov") for extra in groups.every
        )

    def __call__(
        self,
        key: str,
        weights: dict[str, Tensor],
        gradients: dict[str, Tensor],
        slots: Slots,
        rates: dict[int, Any],
    ) -> tuple[dict[str, Tensor], Slots]:
        """A step. A compiler looks only at the arguments: `key` stands for the settings, `rates`
        are the rates that move.
        """
        differentiable = _tree.traced() or self._groups.differentiable
        lrs = [rates.get(index, rate) for index, rate in enumerate(self._groups.lrs)]
        lists = not differentiable and self._over_lists(
            [*weights.values(), *gradients.values()], slots
        )
        if self._nesterov and (lists or self._groups.settings.get("foreach")):
            gradients = dict(zip(gradients, _columns.clone(list(gradients.values())), strict=True))

        def stepped(**changed: Any) -> tuple[dict[str, Tensor], Slots]:
            if differentiable:
                new_weights = {name: self.copy(weight) for name, weight in weights.items()}
                new_slots = {
                    name: {key: self.copy(value) for key, value in slot.items()}
                    for name, slot in slots.items()
                }
            else:
                copies = iter(
                    _columns.clone(
                        [*weights.values(), *(t for slot in slots.values() for t in slot.values())]
                    )
                )
                new_weights = {name: next(copies) for name in weights}
                new_slots = {
                    name: {key: next(copies) for key in slot} for name, slot in slots.items()
                }
            self.in_place(new_weights, gradients, new_slots, lrs, lists=lists, **changed)
            return new_weights, new_slots

        later = stepped()
        if not self._kept.first_step_differs or lists:
            return later
        # -0.0 * momentum + g is g: without dampening, what torch does in the step that makes a
        # buffer, and to be differentiated too.
        first = stepped(dampening=0)

        def chosen(name: str, first: Tensor, later: Tensor) -> Tensor:
            return torch.where(slots[name][FIRST], first, later) if FIRST in slots[name] else later

        new_weights = {
            name: chosen(name, first[0][name], weight) for name, weight in later[0].items()
        }
        new_slots = {
            name: {key: chosen(name, first[1][name][key], value) for key, value in slot.items()}
            for name, slot in later[1].items()
        }
        for name in gradients:
            if FIRST in new_slots[name]:
                new_slots[name][FIRST] = torch.zeros_like(new_slots[name][FIRST])
        return new_weights, new_slots

    def in_place(
        self,
        weights: dict[str, Tensor],
        gradients: dict[str, Tensor],
        slots: Slots,
        lrs: list[Any],
        *,
        lists: bool = False,
        **changed: Any,
    ) -> None:
        """The step over these very tensors, which nobody else sees, on the graph only where it is
        to be differentiated.
        """
        traced = _tree.traced()
        differentiable = traced or self._groups.differentiable
        flags: dict[str, bool] = {}
        run = inspect.unwrap(self._cls.step)
        if not self._groups.flag_named:
            flags = {"foreach": lists, "fused": False, "capturable": True, "differentiable": traced}
            run = without_reads(self._cls, lists=lists)
        if _tree.under_transform():
            _batch_alike(weights, slots, gradients, lrs)
        # A formula that is capturable has factors that are tensors only where a rate is one.
        plain = not (differentiable or self._groups.flag_named)
        plain = plain and "capturable" in self._groups.defaults
        plain = plain and not any(isinstance(rate, Tensor) for rate in lrs)
        arithmetic = contextlib.nullcontext() if lists or plain else PlainArithmetic()
        with torch.set_grad_enabled(differentiable), arithmetic:
            self._run(run, weights, gradients, slots, lrs, {**flags, **changed})

    def _over_lists(self, tensors: list[Tensor], slots: Slots) -> bool:
        """Whether launches are what a step costs, and torch has a formula whose launches do not
        grow with the tensors.
        """
        if self._groups.flag_named or not self._has_lists:
            return False
        every = itertools.chain(
            tensors, (value for slot in slots.values() for value in slot.values())
        )
        return all(
            _columns.is_plain(tensor) and _columns.counts_launches(tensor) for tensor in every
        )

    def copy(self, tensor: Any) -> Any:
        """In fresh memory, on the graph only where a step is to be differentiated."""
        if not isinstance(tensor, Tensor):
            return tensor
        return (
            tensor.clone()
            if self._groups.differentiable or _tree.traced()
            else tensor.detach().clone()
        )

    def _run(
        self,
        run: Callable[[Any], Any],
        weights: dict[str, Tensor],
        gradients: dict[str, Tensor],
        slots: Slots,
        lrs: list[Any],
        flags: dict[str, bool],
    ) -> None:
        """torch's own `step` over these very tensors, in place, through an optimizer object that
        was never constructed.
        """
        optimizer: Any = object.__new__(self._cls)
        optimizer.__dict__.update(
            defaults=self._groups.defaults,
            state=defaultdict(dict),
            **_torch.SILENT,
        )
        optimizer.param_groups = []
        beginning: list[tuple[Any, list[dict[str, Tensor]]]] = []
        lists = flags.get("foreach", False)
        for names, group in self._groups.of(tuple(weights), range(len(lrs))):
            index = group["lr"]
            group["lr"] = lrs[index]
            group.update((name, value) for name, value in flags.items() if name in group)
            if isinstance(group["lr"], Tensor) and not (lists or self._groups.flag_named):
                group["lr"] = Rate.of(group["lr"])
            present = [name for name in names if name in gradients]
            if lists and self._kept.first_step_differs:
                first = {name: slots[name] for name in present if FIRST in slots[name]}
                group["dampening"] = Dampening(
                    group["dampening"],
                    {id(slot["momentum_buffer"]): slot[FIRST] for slot in first.values()},
                )
            for name in present:
                # Where this is missing torch would begin anew, and the structure of the state would
                # change.
                if issubclass(self._cls, torch.optim.SGD):
                    foreign = group["momentum"] != 0 and "momentum_buffer" not in slots[name]
                else:
                    foreign = not slots[name]
                if foreign:
                    raise self._kept.foreign("momentum_buffer" if slots[name] else "state")
                weights[name].grad = gradients[name]
                optimizer.state[weights[name]] = slots[name]
            if self._begins and self._groups.moves[index]:
                beginning.append((lrs[index], [slots[name] for name in present]))
            optimizer.param_groups.append({**group, "params": [weights[name] for name in present]})
        try:
            for rate, begun in beginning:
                _begin_at(self._begins, rate, begun, lists=lists)
            run(optimizer)
            spent = [slots[name][FIRST] for name in gradients if FIRST in slots[name]]
            if lists and spent:
                _torch.foreach.zero_(spent)
        except KeyError as error:
            raise self._kept.foreign(str(error)) from None
        finally:
            for name in gradients:
                weights[name].grad = None


_MADE_OF_THE_RATE: dict[Any, str] = {torch.optim.ASGD: "eta", torch.optim.Rprop: "step_size"}


def _begin_at(key: str, rate: Any, slots: list[dict[str, Tensor]], *, lists: bool) -> None:
    """This slot of parameters that make their first step, from this rate."""
    if key == "step_size" or not lists:
        for slot in slots:
            old = slot[key]
            begun = torch.full_like(old.real, 1.0) * rate
            begun = torch.complex(begun, begun) if old.is_complex() else begun
            slot[key] = torch.where(slot["step"] == 0, begun.to(old.dtype), old)
    elif slots:
        etas = [slot[key] for slot in slots]
        begun = torch.where(
            torch.stack([slot["step"] for slot in slots]) == 0, rate, torch.stack(etas)
        )
        _torch.foreach.copy_(etas, begun.unbind())


def _batch_alike(
    weights: dict[str, Tensor], slots: Slots, gradients: dict[str, Tensor], lrs: list[Any]
) -> None:
    """Under vmap a batched value cannot be written into an unbatched one: make weights and slots as
    batched as what they meet.
    """
    rates = [rate for rate in lrs if isinstance(rate, Tensor)]
    for name, gradient in gradients.items():
        met = torch.zeros_like(gradient)
        for value in (weights[name], *slots[name].values(), *rates):
            met = met + torch.zeros_like(value, dtype=gradient.dtype)
        # where(everywhere, a, b) is a, as batched as both and the mask
        everywhere = torch.ones_like(met, dtype=torch.bool)
        weights[name] = torch.where(everywhere, weights[name], gradient)
        for key, value in slots[name].items():
            if value.shape == gradient.shape and value.dtype == gradient.dtype:
                slots[name][key] = torch.where(everywhere, value, gradient)
