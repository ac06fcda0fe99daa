"""Steps by torch's own formulas, run on an optimizer object that is never constructed."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Set
from typing import Any

import torch
from torch import Tensor

from .._optim.formulas import (
    Dampening,
    FactorsOnHost,
    Number,
    PlainArithmetic,
    divides_by_the_rate,
    has_lists,
    without_reads,
)
from .._optim.fused import can_launch
from .._optim.in_state import each_number
from .._optim.opt_state import FIRST, Slots, each_of, of_rate, slots_like, values_of
from .._optim.param_groups import FLAGS, OptimizerSettings
from .._torch import foreach, private
from .._torch.dtypes import wide_dtype, widest_float
from .._torch.tracing import traced, under_transform

_CPU = torch.device("cpu")


class UnfusedStep:
    """The step of a class of torch.optim with these settings: torch's default on a host that reads
    step counts, or a formula that reads nothing.
    """

    def __init__(self, groups: OptimizerSettings) -> None:
        self._groups, self._layout = groups, groups.layout
        self._cls = groups.cls
        # torch's profiler wraps `step`.
        self._step = inspect.unwrap(groups.cls.step)
        self._has_lists = has_lists(groups.cls)
        # Of this object, because a cache for all classes would keep a user's alive.
        self._without_reads = functools.cache(functools.partial(without_reads, groups.cls))
        # torch fills this slot from the rate of the first step, `init` from the rate at that time.
        self._slot_initialised_from_lr = next(
            (slot for cls, slot in _INITIALISED_FROM_LR.items() if issubclass(groups.cls, cls)), ""
        )
        # torch's SGD over lists adds the momentum to the gradients themselves.
        self._writes_gradients = issubclass(groups.cls, torch.optim.SGD) and any(
            extra.get("nesterov") for extra in groups.every
        )

    def _picks_formula(self, weights: dict[str, Tensor], gradients: dict[str, Tensor]) -> bool:
        """Return True if no flag was named, or if the named flag would be wrong: a fused kernel in
        half precision on a CPU, or a division by a rate that may be 0.
        """
        settings = self._groups.settings
        if not self._groups.flag_named:
            return True
        if settings.get("fused"):
            return not can_launch(list(weights.values()), list(gradients.values()))
        return divides_by_the_rate(self._cls, settings)

    def on_host(
        self,
        weights: dict[str, Tensor],
        gradients: dict[str, Tensor],
        slots: Slots,
        lrs: list[Any],
    ) -> None:
        """Run torch's default step in place, on tensors that nobody else sees. Half tensors are
        computed in float32.
        """
        lrs = [rate.item() if isinstance(rate, Tensor) else rate for rate in lrs]
        flags: dict[str, Any] = {}
        if self._picks_formula(weights, gradients):
            flags = dict.fromkeys(FLAGS, False)
        elif self._writes_gradients and self._groups.settings.get("foreach"):
            gradients = dict(zip(gradients, foreach.clone(list(gradients.values())), strict=True))
        narrow = weights, slots
        if any([weight.dtype.itemsize == 2 for weight in weights.values()]):
            weights, slots, gradients = self._widened(weights, slots, gradients, counts=False)
        first = {name: g for name, g in gradients.items() if bool(slots[name].get(FIRST, False))}
        later = {name: g for name, g in gradients.items() if name not in first}
        # A mode intercepts every call, which doubles the time for small tensors.
        usual = torch.get_default_dtype() is torch.float32 and torch.get_default_device() == _CPU
        as_usual = usual or not issubclass(self._cls, torch.optim.ASGD)
        with torch.no_grad(), contextlib.nullcontext() if as_usual else FactorsOnHost():
            self._run(self._step, weights, later, slots, lrs, flags)
            if first:  # torch's SGD ignores dampening in the step that makes a momentum buffer
                self._run(self._step, weights, first, slots, lrs, {**flags, "dampening": 0})
                private.listops.zero_([slots[name][FIRST] for name in first])
            if weights is not narrow[0]:
                pairs = zip(_tensors(*narrow), _tensors(weights, slots), strict=True)
                for target, computed in pairs:
                    target.copy_(computed)

    def _widened(
        self,
        weights: dict[str, Tensor],
        slots: Slots,
        gradients: dict[str, Tensor],
        *,
        counts: bool,
    ) -> tuple[dict[str, Tensor], Slots, dict[str, Tensor]]:
        """Return float32 in place of half tensors, because in half precision an eps of 1e-8 is 0
        and a square can be inf. With `counts`, step counts are as wide as the Python numbers of a
        host.
        """
        dtypes = [wide_dtype(weight.dtype) for weight in weights.values()]
        for slot in slots.values():
            for key, value in slot.items():
                if not (value.is_floating_point() or value.is_complex()):
                    dtypes.append(value.dtype)
                elif self._layout.is_count(key):
                    dtypes.append(widest_float(value.device) if counts else value.dtype)
                else:
                    dtypes.append(wide_dtype(value.dtype))
        wide = iter(foreach.cast(_tensors(weights, slots), dtypes))
        new_weights = dict(zip(weights, wide, strict=False))
        given = list(gradients.values())
        given = foreach.cast(given, [wide_dtype(gradient.dtype) for gradient in given])
        return new_weights, slots_like(slots, wide), dict(zip(gradients, given, strict=True))

    def on_copies(
        self,
        key: str,
        weights: dict[str, Tensor],
        gradients: dict[str, Tensor],
        slots: Slots,
        rates: dict[int, Any],
        hyper: Any = (),
    ) -> tuple[dict[str, Tensor], Slots]:
        """Return the result of a step that reads no value, in fresh memory. Dynamo guards the
        arguments only: `key` stands for the settings, `rates` are the rates that move, `hyper` the
        other settings in the state.
        """
        lrs = [rates.get(index, rate) for index, rate in enumerate(self._groups.lrs)]
        lists = not hyper and self._over_lists([*_tensors(weights, slots), *gradients.values()])
        if self._writes_gradients and (lists or self._groups.settings.get("foreach")):
            gradients = {name: self.copy(gradient) for name, gradient in gradients.items()}
        later = self._stepped(weights, gradients, slots, lrs, hyper, lists=lists)
        if not self._layout.first_step_differs or lists:
            return later
        # Without dampening, -0.0 * momentum + g is g, which is what torch's first step computes. It
        # can be differentiated too.
        first = self._stepped(weights, gradients, slots, lrs, hyper, lists=lists, dampening=0)
        return _first_or_later(slots, gradients, first, later)

    def _stepped(
        self,
        weights: dict[str, Tensor],
        gradients: dict[str, Tensor],
        slots: Slots,
        lrs: list[Any],
        hyper: Any,
        *,
        lists: bool,
        **changed: Any,
    ) -> tuple[dict[str, Tensor], Slots]:
        old = _tensors(weights, slots)
        differentiable = traced() or self._groups.differentiable
        new = iter([self.copy(t) for t in old] if differentiable else foreach.clone(old))
        new_weights = dict(zip(weights, new, strict=False))
        new_slots = slots_like(slots, new)
        flags: dict[str, Any] = {}
        run = self._step
        if self._picks_formula(weights, gradients):
            flags = {"foreach": lists, "fused": False, "capturable": True}
            flags["differentiable"] = differentiable
            run = self._without_reads(lists=lists)
        flags |= changed
        # A formula tells a setting that is a tensor from a parameter by its 0 dimensions.
        single = {name for name, weight in weights.items() if weight.ndim == 0}
        given = self._widened(new_weights, new_slots, gradients, counts=bool(flags))
        new_weights, new_slots, gradients = self._shaped(single, (1,), *given)
        if under_transform():
            numbers = [*lrs, *each_of(hyper)]
            gradients = _batch_alike(new_weights, new_slots, gradients, numbers)
        arithmetic = contextlib.nullcontext() if lists else PlainArithmetic()
        with torch.set_grad_enabled(differentiable), arithmetic:
            self._run(run, new_weights, gradients, new_slots, lrs, flags, hyper, lists=lists)
        new_weights, new_slots, _ = self._shaped(single, (), new_weights, new_slots, {})
        with torch.set_grad_enabled(differentiable):
            computed = _tensors(new_weights, new_slots)
            new = iter(foreach.cast(computed, [t.dtype for t in old], bounded=False))
        return dict(zip(weights, new, strict=False)), slots_like(slots, new)

    def _shaped(
        self,
        names: Set[str],
        shape: tuple[int, ...],
        weights: dict[str, Tensor],
        slots: Slots,
        gradients: dict[str, Tensor],
    ) -> tuple[dict[str, Tensor], Slots, dict[str, Tensor]]:
        """Return the same with views in this shape for the parameters of these names, their
        gradients, and their slots except counts.
        """
        if not names:
            return weights, slots, gradients

        def shaped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return {n: t.reshape(shape) if n in names else t for n, t in tensors.items()}

        new_slots = {name: {**slot} for name, slot in slots.items()}
        for name in names:
            for key, value in slots[name].items():
                if not self._layout.is_count(key):
                    new_slots[name][key] = value.reshape(shape)
        return shaped(weights), new_slots, shaped(gradients)

    def _over_lists(self, tensors: list[Tensor]) -> bool:
        """Return True if launches dominate the cost of a step, and a formula exists whose number of
        launches does not grow with the number of tensors.
        """
        plain = self._groups.flag_named or self._groups.differentiable or traced()
        return self._has_lists and not plain and all(map(foreach.is_launch_bound, tensors))

    def copy(self, tensor: Tensor) -> Tensor:
        """Copy into fresh memory, on the graph only if the step is to be differentiated."""
        on_graph = self._groups.differentiable or traced()
        return (tensor if on_graph else tensor.detach()).clone()

    def _run(
        self,
        run: Callable[[Any], Any],
        weights: dict[str, Tensor],
        gradients: dict[str, Tensor],
        slots: Slots,
        lrs: list[Any],
        flags: dict[str, Any],
        hyper: Any = (),
        *,
        lists: bool = False,
    ) -> None:
        """Run torch's own `step` in place, on an optimizer object that was never constructed."""
        optimizer: Any = object.__new__(self._cls)
        optimizer.__dict__.update(
            defaults=self._groups.defaults,
            state=defaultdict(dict),
            **private.SILENT,
        )
        optimizer.param_groups = []
        by_tensor = bool(flags.get("capturable") or self._groups.differentiable) and not lists
        beginning: list[tuple[Any, list[dict[str, Tensor]]]] = []
        for names, group in self._groups.torch_groups(tuple(weights), range(len(lrs)), hyper):
            index = group["lr"]
            group["lr"] = lrs[index]
            group.update((name, value) for name, value in flags.items() if name in group)
            if isinstance(group["lr"], Tensor) and by_tensor:
                group["lr"] = Number.of(group["lr"])
            if hyper:
                _put_numbers(group)
            present = [name for name in names if name in gradients]
            if issubclass(self._cls, _DIVIDE_BY_A_SIZE):
                present = [name for name in present if weights[name].numel()]
            if lists and self._layout.first_step_differs:
                first = {name: slots[name] for name in present if FIRST in slots[name]}
                group["dampening"] = Dampening(
                    group["dampening"],
                    {id(slot["momentum_buffer"]): slot[FIRST] for slot in first.values()},
                )
            self._check_slots([slots[name] for name in present], group)
            if self._slot_initialised_from_lr and self._groups.moves[index]:
                beginning.append((lrs[index], [slots[name] for name in present]))
            optimizer.param_groups.append({**group, "params": [weights[name] for name in present]})
        try:
            for name, gradient in gradients.items():
                weights[name].grad = gradient
                optimizer.state[weights[name]] = slots[name]
            for rate, begun in beginning:
                _initialise_from_lr(self._slot_initialised_from_lr, rate, begun, lists=lists)
            run(optimizer)
            spent = [slots[name][FIRST] for name in gradients if FIRST in slots[name]]
            if lists and spent:
                private.listops.zero_(spent)
        except KeyError as error:
            raise self._layout.foreign(str(error)) from None
        finally:
            for name in gradients:
                weights[name].grad = None

    def _check_slots(self, slots: list[dict[str, Tensor]], group: dict[str, Any]) -> None:
        """Refuse a state with missing slots: torch would create them, and the structure of the
        state would change.
        """
        for slot in slots:
            if issubclass(self._cls, torch.optim.SGD):
                foreign = group["momentum"] != 0 and "momentum_buffer" not in slot
            else:
                foreign = not slot
            if foreign:
                raise self._layout.foreign("momentum_buffer" if slot else "state")


def _tensors(weights: dict[str, Tensor], slots: Slots) -> list[Tensor]:
    return [*weights.values(), *values_of(slots)]


def check_in_state(groups: OptimizerSettings) -> None:
    """Refuse a setting in the state that torch's formula reads in Python or does not use. Each is
    tried once, in a step on tensors without values.
    """
    plain = {name: value for name, value in groups.settings.items() if name not in FLAGS}
    plain |= groups.settings_per_slot()
    for name, start in groups.hyper.items():
        alone = OptimizerSettings(groups.cls, 1e-3, {}, plain, in_state=(name,))
        with private.FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"):
            weight = torch.zeros(2, 3, dtype=torch.float32)
            slots = alone.new_slots({"": weight}, alone.lrs)
            hyper = each_number(
                lambda value: Number.of(torch.full((), float(value), dtype=torch.float64)),
                {name: start},
            )
            reason = "does not use it in a step"
            try:
                step = UnfusedStep(alone).on_copies
                step("", {"": weight}, {"": torch.zeros_like(weight)}, slots, {}, hyper)
            except (TypeError, RuntimeError) as error:
                reason = f"takes a Python number there ({type(error).__name__}: {error})"
            else:
                if any(number.used for number in each_of(hyper)):
                    continue
        raise TypeError(
            f"in_state: {name} of {groups.cls.__name__} cannot be in the state: torch's formula "
            f"{reason}. Fix: leave {name} out of in_state, and make an optimizer for each value."
        )


def _put_numbers(group: dict[str, Any]) -> None:
    """Put stand-ins into a group for its settings that are in the state."""
    momentum = group.get("momentum")
    if isinstance(momentum, Tensor) and "dampening" in group:  # SGD has no dampening at momentum 0
        group["dampening"] = group["dampening"] * torch.ne(momentum, 0).to(momentum.dtype)
    others = {name: value for name, value in group.items() if name != "lr"}
    group |= each_number(lambda one: Number.of(one) if isinstance(one, Tensor) else one, others)


def _first_or_later(
    slots: Slots,
    gradients: dict[str, Tensor],
    first: tuple[dict[str, Tensor], Slots],
    later: tuple[dict[str, Tensor], Slots],
) -> tuple[dict[str, Tensor], Slots]:
    """Select for each parameter the first step if its momentum buffer was still to be created."""

    def chosen(name: str, first: Tensor, later: Tensor) -> Tensor:
        return torch.where(slots[name][FIRST], first, later) if FIRST in slots[name] else later

    weights = {name: chosen(name, first[0][name], weight) for name, weight in later[0].items()}
    new_slots = {
        name: {key: chosen(name, first[1][name][key], value) for key, value in slot.items()}
        for name, slot in later[1].items()
    }
    for name in gradients:
        if FIRST in new_slots[name]:
            new_slots[name][FIRST] = torch.zeros_like(new_slots[name][FIRST])
    return weights, new_slots


_DIVIDE_BY_A_SIZE = (torch.optim.Adafactor, torch.optim.Muon)  # which may be 0
_INITIALISED_FROM_LR: dict[Any, str] = {torch.optim.ASGD: "eta", torch.optim.Rprop: "step_size"}


def _initialise_from_lr(
    key: str, rate: Any, slots: list[dict[str, Tensor]], *, lists: bool
) -> None:
    """Fill this slot from the rate for parameters that make their first step."""
    if key == "step_size" or not lists:
        for slot in slots:
            slot[key] = torch.where(slot["step"] == 0, of_rate(slot[key], rate), slot[key])
    elif slots:
        etas = [slot[key] for slot in slots]
        begun = torch.where(
            torch.stack([slot["step"] for slot in slots]) == 0, rate, torch.stack(etas)
        )
        private.listops.copy_(etas, begun.unbind())


def _batch_alike(
    weights: dict[str, Tensor], slots: Slots, gradients: dict[str, Tensor], numbers: list[Any]
) -> dict[str, Tensor]:
    """Make weights and slots as batched as the gradients and numbers, and return the gradients as
    batched. Under vmap a batched value cannot be written into an unbatched tensor.
    """
    rates = [number for number in numbers if isinstance(number, Tensor)]
    batched = {}
    for name, gradient in gradients.items():
        met = torch.zeros_like(gradient)
        for value in (weights[name], *slots[name].values(), *rates):
            met = met + torch.zeros_like(value, dtype=gradient.dtype)
        # where(everywhere, a, b) equals a and is as batched as a, b and the mask together.
        everywhere = torch.ones_like(met, dtype=torch.bool)
        weights[name] = torch.where(everywhere, weights[name], gradient)
        for key, value in slots[name].items():
            if value.shape == gradient.shape and value.dtype == gradient.dtype:
                slots[name][key] = torch.where(everywhere, value, gradient)
            elif value.ndim == 0 and value.is_floating_point():  # NAdam's mu_product
                for rate in rates:
                    value = torch.where(torch.ones_like(rate, dtype=torch.bool), value, value)
                slots[name][key] = value
        batched[name] = torch.where(everywhere, gradient, gradient)
    return batched
