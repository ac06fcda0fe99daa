"""A class of torch.optim run as a function: on copies, through an optimizer object that is never
constructed.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import inspect
import itertools
import numbers
import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _columns, _foreach, _plan, _torch, _tree
from ._door import Entered, Memo, enter
from ._formula import Dampening, PlainArithmetic, Rate, has_lists, without_reads
from ._kernels import Kernel, Treatment, kernel_of
from ._tree import Tree

Schedule = Callable[[Tensor], "Tensor | float"]
Slots = dict[str, dict[str, Tensor]]


class OptState(NamedTuple):
    """What a torch optimizer remembers. Its structure is final from `init` on."""

    applied: Tensor  # int64 []: steps applied; what a schedule is a function of
    # by parameter name, then by torch's own names: {"conv.weight": {"step": ..., "exp_avg": ...}}
    slots: Slots
    # float32 []: the rate that steps use, where from_torch was told lr_in_state=True; else ()
    lr: Any = ()


class Problem(NamedTuple):
    """What a step is over, by name."""

    structure: Any  # of the parameters
    names: list[str]  # of every leaf, None included
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]  # those that are there


class Plan(NamedTuple):
    """A step by torch's fused kernel that is checked and put in order; nothing is written yet."""

    kernel: Kernel
    facts: _plan.Facts
    columns: list[Tensor]
    gradients: list[Tensor]  # the last of the columns
    rates: list[Any]
    spent: bool
    rebuild: Callable[[list[Any]], Tree]  # all leaves of the parameters as a tree like theirs
    leaves: list[Any]  # of the parameters, None included
    opt_state: OptState

    def run(
        self,
        found_inf: Tensor | None,
        treatment: Treatment = Treatment(),  # noqa: B008
    ) -> tuple[Tree, OptState]:
        """The step over gradients that are still to be treated, and only where not `found_inf`."""
        results = _plan.run(
            self.kernel,
            self.facts,
            self.columns,
            self.rates,
            found_inf,
            treatment,
            spent=self.spent,
        )
        opt_state, slots = self.opt_state, self.opt_state.slots
        if self.facts.in_place and not self.facts.on_graphs:  # they are the results
            params = self.rebuild(self.leaves)
        else:
            moved = iter(results)
            params = self.rebuild([None if leaf is None else next(moved) for leaf in self.leaves])
            if not self.facts.in_place:
                slots = {name: {key: next(moved) for key in slot} for name, slot in slots.items()}
        lr = opt_state.lr.detach().clone() if isinstance(opt_state.lr, Tensor) else opt_state.lr
        return params, OptState(
            opt_state.applied + (1 if found_inf is None else ~found_inf), slots, lr
        )


class TorchOptimizer:
    """A torch.optim class as pure functions; made by `from_torch`. Holds settings, never state."""

    def __init__(
        self,
        cls: Any,
        lr: Any,
        overrides: Mapping[str, Mapping[str, Any]],
        settings: dict[str, Any],
        *,
        lr_in_state: bool = False,
    ) -> None:
        _check_class(cls, settings)
        self._cls = cls
        accepted = inspect.signature(cls).parameters
        self._accepted = [name for name in accepted if name != "params"]
        self._lr = accepted["lr"].default if lr is None else lr
        self._patterns = tuple(overrides)
        self._overrides = tuple(dict(extra) for extra in overrides.values())
        self._settings = settings
        self._flag_named = any(settings.get(name) is not None for name in _FLAGS)
        self._defaults, slots = self._probed("from_torch", {**settings, "lr": self._lr})
        for pattern, extra in overrides.items():
            slots |= self._probed(f"overrides[{pattern!r}]", {**settings, "lr": self._lr, **extra})[
                1
            ]
        # What torch keeps, learnt from a parameter of shape (2, 3): step counts and the like, and
        # what is shaped like its parameter.
        self._counts = {
            key: torch.float32 if key == "step" else value.dtype
            for key, value in slots.items()
            if value.ndim == 0
        }
        self._shaped = {key for key, value in slots.items() if value.shape == (2, 3)} | {
            "momentum_buffer"
        }
        self.differentiable = bool(settings.get("differentiable"))
        # torch's SGD ignores dampening in the step that makes a parameter's momentum buffer.
        self._first_step_differs = issubclass(cls, torch.optim.SGD) and any(
            extra.get("dampening") for extra in (settings, *self._overrides)
        )
        if self._first_step_differs:
            self._counts = {**self._counts, _FIRST: torch.bool}
        self._kernel = kernel_of(cls)
        self._memo: Memo[_plan.Facts] = Memo()
        self._has_lists = has_lists(cls)
        # torch's SGD over lists then adds the momentum to the gradients themselves.
        self._nesterov = issubclass(cls, torch.optim.SGD) and any(
            extra.get("nesterov") for extra in (settings, *self._overrides)
        )
        # What a class of somebody else's returns may stand in the memory of its arguments.
        self.steps_apart = (
            inspect.unwrap(cls.step).__module__.startswith("torch.optim.")
            and not self.differentiable
        )
        self._lrs = (self._lr, *(extra.get("lr") for extra in self._overrides))
        if lr_in_state and callable(self._lr):
            raise ValueError(
                f"lr_in_state=True with a schedule, lr={self._lr!r}: a rate is data or a function "
                "of the step count. Cure: lr=1e-3 to start from and `opt_state._replace(lr=...)` "
                "between steps, or leave lr_in_state out."
            )
        if lr_in_state and issubclass(cls, torch.optim.Rprop):
            raise ValueError(
                "lr_in_state=True with Rprop, whose lr is only what its step sizes start from: "
                "they are in the state already, `opt_state.slots[name]['step_size']`. Cure: leave "
                "lr_in_state out."
            )
        self._lr_in_state = lr_in_state
        self._tensor_lrs = {
            index: rate.clone() for index, rate in enumerate(self._lrs) if isinstance(rate, Tensor)
        }
        # Dynamo will not trace a torch optimizer; the compiler behind it traces this plain Python.
        # Nothing in there is guarded, so a compiled step is guarded by `_key` instead: all that the
        # formula reads but for its arguments.
        self._opaque = _torch.nonstrict_trace(self._formula)
        self._key = repr(
            (
                cls.__module__,
                cls.__qualname__,
                id(cls),
                self._patterns,
                self._plain(),
                self._lr_in_state,
            )
        )

    def _plain(self) -> list[Any]:
        """The settings that are numbers, strings and flags; rates that are tensors or schedules
        reach the formula as arguments.
        """
        every = ({**self._defaults, **self._settings, "lr": self._lr}, *self._overrides)
        return [
            sorted(
                (name, value)
                for name, value in extra.items()
                if not (isinstance(value, Tensor) or callable(value))
            )
            for extra in every
        ]

    def __repr__(self) -> str:
        extra = {"lr": self._lr, **self._settings}
        if self._lr_in_state:
            extra["lr_in_state"] = True
        if self._patterns:
            extra["overrides"] = dict(zip(self._patterns, self._overrides, strict=True))
        settings = ", ".join(f"{name}={value!r}" for name, value in extra.items())
        return f"from_torch({self._cls.__name__}, {settings})"

    # ---- what a user calls

    def init(self, params: Tree) -> OptState:
        """The state of an optimizer that has made no step, in fresh memory; no step changes its
        structure.
        """
        named = _by_name(params)
        device = next((leaf.device for leaf in named.values()), None)
        applied = torch.zeros((), dtype=torch.int64, device=device)
        lr: Any = ()
        if self._lr_in_state:
            given = self._tensor_lrs.get(0, self._lr)
            lr = (
                given.to(device, torch.float32, copy=True)
                if isinstance(given, Tensor)
                else torch.tensor(float(given), device=device)
            )
        slots: Slots = {}
        for names, group in self._groups(tuple(named), self._learning_rates(applied, lr)):
            # These stand in the memory of the parameters: torch makes the state from their shapes
            # and only that is kept.
            probes = [named[name].detach() for name in names]
            for probe in probes:
                probe.grad = probe.detach()
            for name, slot in zip(names, self._new_slots(probes, group), strict=True):
                slots[name] = slot
        return OptState(applied, {name: slots[name] for name in named}, lr)

    def _new_slots(self, probes: list[Tensor], group: dict[str, Any]) -> list[dict[str, Tensor]]:
        """What torch's class keeps for these tensors before their first step."""
        rate = group["lr"]
        optimizer = _with_slots(
            self._cls,
            probes,
            {name: value for name, value in group.items() if name in self._accepted},
            rate,
        )
        slots = []
        for probe in probes:
            slot = {key: value.to(probe.device) for key, value in optimizer.state[probe].items()}
            if issubclass(self._cls, torch.optim.SGD) and group["momentum"] != 0:
                # torch makes this buffer in the first step, as a copy of the gradient; -0.0 *
                # momentum + g is g for every g.
                slot["momentum_buffer"] = torch.full_like(probe, -0.0)
                if self._first_step_differs:
                    slot[_FIRST] = torch.ones((), dtype=torch.bool, device=probe.device)
            if issubclass(self._cls, torch.optim.ASGD) and isinstance(rate, Tensor):
                slot["eta"] = rate.to(slot["eta"], copy=True)  # torch detaches it
            if isinstance(slot.get("step"), Tensor):
                # what torch's kernels read, also under another default dtype
                slot["step"] = slot["step"].to(torch.float32)
            slots.append(slot)
        return slots

    def step(self, params: Tree, grads: Tree, opt_state: OptState) -> tuple[Tree, OptState]:
        """Parameters and state after one step, in fresh memory. A parameter whose gradient is None
        stays, as in torch.optim.
        """
        plan = self.plan(params, grads, opt_state)
        if plan is not None:
            return plan.run(found_inf=None)
        if not self.differentiable:
            _tree.refuse_graphs(params=params, grads=grads, opt_state=opt_state)
        problem = self.check(params, grads, opt_state)
        rates = self._moving(opt_state)
        run = self._opaque if torch.compiler.is_compiling() else self._formula
        stepped, slots = run(
            self._key, problem.weights, _cast_gradients(problem), opt_state.slots, rates
        )
        return _tree_of(problem, stepped), OptState(
            opt_state.applied + 1, slots, self._copy(opt_state.lr)
        )

    def to_state_dict(self, opt_state: OptState) -> dict[str, Any]:
        """Equal to `cls(groups).state_dict()` of an optimizer that made the same steps: tensors
        copied, `lr` as it is now. Syncs.

        The groups are, in order: the parameters that no override matches, then those that the
        overrides match.
        """
        slots = {
            name: {} if slot.get(_FIRST, False) else slot for name, slot in opt_state.slots.items()
        }
        state: dict[int, dict[str, Tensor]] = {}
        groups = []
        for names, group in self._groups(
            tuple(slots), self._learning_rates(opt_state.applied, opt_state.lr)
        ):
            indices = [len(state) + offset for offset in range(len(names))]
            # torch keeps step counts on the CPU, and moves them itself where an implementation
            # wants them elsewhere.
            for index, name in zip(indices, names, strict=True):
                state[index] = {
                    k: v.cpu().clone() if k == "step" else v.clone()
                    for k, v in slots[name].items()
                    if k != _FIRST
                }
            lr = group["lr"]
            groups.append(
                {**group, "lr": lr.clone() if isinstance(lr, Tensor) else lr, "params": indices}
            )
        return {
            "state": {index: slot for index, slot in state.items() if slot},
            "param_groups": groups,
        }

    def check(self, params: Tree, grads: Tree, opt_state: OptState) -> Problem:
        """What a step is over; refuses gradients and a state that are not those of `params`."""
        structure, leaves, gradients = _tree.aligned(params, grads)
        if not isinstance(opt_state, OptState):
            raise TypeError(
                f"opt_state is {type(opt_state).__name__}. Cure: `opt_state = "
                "optimizer.init(params)`, or what the last step returned."
            )
        names = _tree.names(params)
        weights = {name: leaf for name, leaf in zip(names, leaves, strict=True) if leaf is not None}
        if opt_state.slots.keys() != weights.keys():
            raise ValueError(
                f"opt_state knows the parameters {_tree.some(list(opt_state.slots))}, params has "
                f"{_tree.some(names)}. Cure: `opt_state = optimizer.init(params)` for these params."
            )
        for name, slot in opt_state.slots.items():
            for key, value in slot.items():
                if not self._fits(key, value, weights[name]):
                    raise self._misfit(key, value, name, weights[name])
        _check_rate_of(opt_state, self._lr_in_state)
        given = {name: g for name, g in zip(names, gradients, strict=True) if g is not None}
        # torch's kernels know nothing of lazy negation and conjugation
        if not torch.compiler.is_compiling():
            weights, given = (
                {name: _resolved(leaf) for name, leaf in column.items()}
                for column in (weights, given)
            )
        return Problem(structure, names, weights, given)

    def _fits(self, key: str, value: Tensor, weight: Tensor) -> bool:
        """Whether a slot is what `init` makes for this parameter: torch's kernels take its memory
        for that without a look.
        """
        if key in self._counts:
            return (
                value.ndim == 0
                and value.dtype is self._counts[key]
                and value.device == weight.device
            )
        alike = (
            value.dtype is weight.dtype
            and value.layout is weight.layout
            and value.device == weight.device
        )
        return key not in self._shaped or (alike and value.shape == weight.shape)

    def _misfit(self, key: str, value: Tensor, name: str, weight: Tensor) -> ValueError:
        what = (
            f"a count {self._counts[key]} ()"
            if key in self._counts
            else f"the parameter {_described(weight)}"
        )
        where = (
            f" on {value.device}, its parameter on {weight.device}"
            if value.device != weight.device
            else ""
        )
        return ValueError(
            f"opt_state: {key} of {name} is {_described(value)}, {what}{where}. Likely cause: the "
            "state of another model, or of the model before it was changed or moved. Cure: "
            "`opt_state = optimizer.init(params)`."
        )

    def from_state_dict(self, sd: Mapping[str, Any], params: Tree) -> OptState:
        """Syncs. The state in `cls(groups).state_dict()`, copied; of its settings only the rate,
        and only with lr_in_state.

        `params` are taken in the order in which `to_state_dict` lists them, or in their own where
        `sd` has one group. `applied` is the largest step count in `sd`; where the class keeps none
        (SGD, Muon) it is 1 if `sd` holds any state, else 0: `opt_state._replace(applied=...)` if a
        schedule needs the true one. Raises `ValueError` for another class's or another model's
        state.
        """
        saved_groups, states = _checked_state_dict(sd)
        fresh = self.init(params)
        groups = [names for names, _ in self._groups(tuple(fresh.slots), self._lrs)]
        if len(saved_groups) == 1:
            groups = [list(fresh.slots)]
        sizes = [len(group["params"]) for group in saved_groups]
        if sizes != list(map(len, groups)):
            raise ValueError(
                f"the state dict has groups of {sizes} parameters, this optimizer has "
                f"{list(map(len, groups))}. Likely cause: other params, or other overrides. Cure: "
                "overrides that match the groups of the optimizer that wrote it, in its order."
            )
        order = [name for names in groups for name in names]
        slots = fresh.slots  # replaced one by one, so that no two states are there at a time
        for name, index in zip(
            order, (index for group in saved_groups for index in group["params"]), strict=True
        ):
            saved = {
                key: value for key, value in states.get(index, {}).items() if value is not None
            }
            slots[name] = _restored(name, saved, slots[name])
        steps = [slot["step"] for slot in slots.values() if "step" in slot]
        if steps and not bool(torch.isfinite(torch.stack(steps)).all()):
            raise ValueError(
                "the state dict has a step count that is inf or NaN. Likely cause: a damaged "
                "file, or a step that was taken with such a count. Cure: an older state dict."
            )
        applied = (
            torch.stack(steps).max().to(torch.int64) if steps else fresh.applied + bool(states)
        )
        lr = fresh.lr
        if self._lr_in_state:
            rate = saved_groups[0].get("lr", lr)
            lr = _as_tensor(rate, lr).detach().to(lr.device, torch.float32, copy=True)
        return OptState(applied, slots, lr)

    # ---- the fused kernel, which skips and unscales by itself

    def has_fused_kernel(self, problem: Problem) -> bool:
        """Whether torch's fused kernel can make this step: static facts only."""
        if self._kernel is None or self._first_step_differs or _tree.under_transform():
            return False
        if torch.compiler.is_compiling() and (
            len(problem.weights) <= _foreach.INLINE
            or _foreach.is_on_a_graph([*problem.weights.values(), *problem.gradients.values()])
        ):
            return False
        if self._flag_named and not self._settings.get("fused"):
            return False
        return all(
            _foreach.is_dense(leaf) and leaf.is_floating_point() and (leaf.is_cpu or leaf.is_cuda)
            for leaf in (*problem.weights.values(), *problem.gradients.values())
        )

    def plan(
        self,
        params: Tree,
        grads: Tree,
        opt_state: OptState,
        *,
        donate: bool = False,
        spent: bool = False,
        keep: Sequence[Tensor] = (),
    ) -> Plan | None:
        """A step by torch's fused kernel; `None` where there is no kernel for it.

        With `donate` the step will write into the parameters and the state, and gradients that are
        `spent` may hold anything afterwards. What stands in the memory of another of these tensors,
        or of `keep`, is written into in no case.
        """
        known = self.remembered(params, grads, opt_state, donate=donate, spent=spent, keep=keep)
        if known is not None:
            return known
        if self._kernel is None or _tree.under_transform():
            return None
        problem = self.check(params, grads, opt_state)
        if not self.has_fused_kernel(problem):
            return None
        if not self.differentiable:
            _tree.refuse_graphs(params=params, grads=grads, opt_state=opt_state)
        columns = [*problem.weights.values(), *_slots_of(opt_state), *problem.gradients.values()]
        others = [opt_state.applied, *_tree.tensors(opt_state.lr), *keep]
        mine = (
            _tree.writable(columns, others, leaves_too=True)
            if donate or spent
            else [False] * len(columns)
        )
        count = len(columns) - len(problem.gradients)
        facts = _plan.facts(
            self._kernel,
            self._groups(tuple(problem.weights), range(len(self._lrs))),
            problem.weights,
            opt_state.slots,
            problem.gradients,
            [donate and own for own in mine[:count]] + mine[count:],
            self._foreign_state,
        )
        entered = self._entered(params, grads, opt_state, donate=donate, spent=spent, keep=keep)
        same = entered is not None and all(
            map(operator.is_, [*entered.state, *entered.gradients], columns)
        )
        # Only what does not depend on what else there is today is remembered.
        if (
            entered is not None
            and same
            and (not (donate or spent) or mine == _tree.writable(columns, leaves_too=True))
        ):
            self._memo.add(entered, facts)
        rates = self._learning_rates(opt_state.applied, opt_state.lr)
        leaves = [problem.weights.get(name) for name in problem.names]
        gradients = columns[count:]
        return Plan(
            self._kernel,
            facts,
            columns,
            gradients,
            rates,
            spent and facts.spendable,
            problem.structure.unflatten,
            leaves,
            opt_state,
        )

    def remembered(
        self,
        params: Tree,
        grads: Tree,
        opt_state: Any,
        *,
        donate: bool = False,
        spent: bool = False,
        keep: Sequence[Tensor] = (),
    ) -> Plan | None:
        """`plan` of arguments that differ from earlier ones in their values only, so that nothing
        need be checked again.
        """
        entered = self._entered(params, grads, opt_state, donate=donate, spent=spent, keep=keep)
        known = None if entered is None else self._memo.find(entered)
        if entered is None or known is None or self._kernel is None:
            return None
        facts, alone = known
        _check_rate_of(opt_state, self._lr_in_state)
        rates = self._learning_rates(opt_state.applied, opt_state.lr)
        columns = [*entered.state, *entered.gradients]
        spent = spent and alone and facts.spendable
        rebuild = functools.partial(_dict_of, entered.names)
        return Plan(
            self._kernel,
            facts,
            columns,
            entered.gradients,
            rates,
            spent,
            rebuild,
            entered.weights,
            opt_state,
        )

    def _entered(
        self,
        params: Tree,
        grads: Tree,
        opt_state: Any,
        *,
        donate: bool,
        spent: bool,
        keep: Sequence[Tensor],
    ) -> Entered | None:
        if (
            self._kernel is None
            or _tree.traced()
            or _tree.DEBUG_DONATION
            or not isinstance(opt_state, OptState)
        ):
            return None
        others = [opt_state.applied, *_tree.tensors(opt_state.lr), *keep]
        return enter(params, grads, opt_state.slots, others, donate=donate, spent=spent)

    # ---- torch's formula

    def _formula(
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
        traced = _tree.traced()
        differentiable = traced or self.differentiable
        lrs = [rates.get(index, rate) for index, rate in enumerate(self._lrs)]
        lists = not differentiable and self._over_lists(
            [*weights.values(), *gradients.values()], slots
        )
        flags: dict[str, bool] = {}
        run = inspect.unwrap(self._cls.step)
        if not self._flag_named:
            flags = {"foreach": lists, "fused": False, "capturable": True, "differentiable": traced}
            run = without_reads(self._cls, lists=lists)
        if self._nesterov and (lists or self._settings.get("foreach")):
            gradients = dict(zip(gradients, _columns.clone(list(gradients.values())), strict=True))

        def stepped(**changed: Any) -> tuple[dict[str, Tensor], Slots]:
            if differentiable:
                new_weights = {name: self._copy(weight) for name, weight in weights.items()}
                new_slots = {
                    name: {key: self._copy(value) for key, value in slot.items()}
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
            if self._lr_in_state and issubclass(self._cls, torch.optim.ASGD):
                # eta is made from the rate that `init` knew
                _begin_at(lrs[0], list(new_slots.values()), lists=lists)
            if _tree.under_transform():
                _batch_alike(new_weights, new_slots, gradients, lrs)
            arithmetic = contextlib.nullcontext() if lists else PlainArithmetic()
            with torch.set_grad_enabled(differentiable), arithmetic:
                self._run(run, new_weights, gradients, new_slots, lrs, {**flags, **changed})
            return new_weights, new_slots

        later = stepped()
        if not self._first_step_differs or lists:
            return later
        # -0.0 * momentum + g is g: without dampening, what torch does in the step that makes a
        # buffer, and to be differentiated too.
        first = stepped(dampening=0)

        def chosen(name: str, first: Tensor, later: Tensor) -> Tensor:
            return (
                torch.where(slots[name][_FIRST], first, later) if _FIRST in slots[name] else later
            )

        new_weights = {
            name: chosen(name, first[0][name], weight) for name, weight in later[0].items()
        }
        new_slots = {
            name: {key: chosen(name, first[1][name][key], value) for key, value in slot.items()}
            for name, slot in later[1].items()
        }
        for name in gradients:
            if _FIRST in new_slots[name]:
                new_slots[name][_FIRST] = torch.zeros_like(new_slots[name][_FIRST])
        return new_weights, new_slots

    def _over_lists(self, tensors: list[Tensor], slots: Slots) -> bool:
        """Whether launches are what a step costs, and torch has a formula whose launches do not
        grow with the tensors.
        """
        if self._flag_named or not self._has_lists:
            return False
        every = itertools.chain(
            tensors, (value for slot in slots.values() for value in slot.values())
        )
        return all(
            _columns.is_plain(tensor) and _columns.counts_launches(tensor) for tensor in every
        )

    def _copy(self, tensor: Any) -> Any:
        """In fresh memory, on the graph only where a step is to be differentiated."""
        if not isinstance(tensor, Tensor):
            return tensor
        return tensor.clone() if self.differentiable or _tree.traced() else tensor.detach().clone()

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
            defaults=self._defaults,
            state=defaultdict(dict),
            **_torch.SILENT,
        )
        optimizer.param_groups = []
        lists = flags.get("foreach", False)
        for names, group in self._groups(tuple(weights), lrs):
            group.update((name, value) for name, value in flags.items() if name in group)
            if isinstance(group["lr"], Tensor) and not (lists or self._flag_named):
                group["lr"] = Rate.of(group["lr"])
            present = [name for name in names if name in gradients]
            if lists and self._first_step_differs:
                first = {name: slots[name] for name in present if _FIRST in slots[name]}
                group["dampening"] = Dampening(
                    group["dampening"],
                    {id(slot["momentum_buffer"]): slot[_FIRST] for slot in first.values()},
                )
            for name in present:
                # Where this is missing torch would begin anew, and the structure of the state would
                # change.
                if issubclass(self._cls, torch.optim.SGD):
                    foreign = group["momentum"] != 0 and "momentum_buffer" not in slots[name]
                else:
                    foreign = not slots[name]
                if foreign:
                    raise self._foreign_state("momentum_buffer" if slots[name] else "state")
                weights[name].grad = gradients[name]
                optimizer.state[weights[name]] = slots[name]
            optimizer.param_groups.append({**group, "params": [weights[name] for name in present]})
        try:
            run(optimizer)
            spent = [slots[name][_FIRST] for name in gradients if _FIRST in slots[name]]
            if lists and spent:
                _torch.foreach.zero_(spent)
        except KeyError as error:
            raise self._foreign_state(str(error)) from None
        finally:
            for name in gradients:
                weights[name].grad = None

    def _foreign_state(self, missing: str) -> ValueError:
        return ValueError(
            f"opt_state has no {missing} that {self._cls.__name__} keeps. Likely cause: the state "
            "of another class or of other settings. Cure: `opt_state = optimizer.init(params)`."
        )

    # ---- settings

    def _groups(
        self, names: tuple[str, ...], lrs: Sequence[Any]
    ) -> list[tuple[list[str], dict[str, Any]]]:
        """torch's parameter groups: the names of each with its complete settings."""
        matches = _matching(names, self._patterns)
        canonical = {matching: self._canonical(matching) for matching in set(matches)}
        members: dict[tuple[int, ...], list[str]] = {}
        for name, matching in zip(names, matches, strict=True):
            members.setdefault(canonical[matching], []).append(name)
        groups = []
        for matching in sorted(members):
            settings = dict(self._defaults)
            rate = 0
            for index in matching:
                settings.update(self._overrides[index])
                rate = index + 1 if "lr" in self._overrides[index] else rate
            settings["lr"] = lrs[rate]
            groups.append((members[matching], settings))
        return groups

    def _canonical(self, matching: tuple[int, ...]) -> tuple[int, ...]:
        """The first of all patterns that says the same: `{"*.bias": no_decay, "norm.*": no_decay}`
        is one group.
        """
        if not matching:
            return matching
        merged: dict[str, Any] = {}
        for index in matching:
            merged.update(self._overrides[index])
        for index, extra in enumerate(self._overrides):
            if extra.keys() == merged.keys() and all(
                extra[k] is v or (not isinstance(v, Tensor) and extra[k] == v)
                for k, v in merged.items()
            ):
                return (index,)
        return matching

    def _learning_rates(self, count: Tensor, lr: Any) -> list[Any]:
        """The rate of from_torch, or that in the state, then of each override (None where it names
        none), after `count` steps.
        """
        rates: list[Any] = []
        for index, rate in enumerate(self._lrs):
            if index in self._tensor_lrs:
                rate = self._tensor_lrs[index]
            elif callable(rate):
                rate = rate(count)
                _check_scheduled(rate)
            if index == 0 and self._lr_in_state:
                rate = lr
            if (
                isinstance(rate, Tensor)
                and rate.requires_grad
                and torch.is_grad_enabled()
                and not (self.differentiable or _tree.traced())
            ):
                raise ValueError(
                    "the learning rate requires a gradient, and `.backward()` cannot go through a "
                    "step. Cure: torch.func.grad of a function that makes the step, or "
                    "from_torch(..., differentiable=True)."
                )
            rates.append(rate.to(count.device) if isinstance(rate, Tensor) else rate)
        return rates

    def _moving(self, opt_state: OptState) -> dict[int, Any]:
        """The learning rates that are no plain numbers of from_torch, as of the steps applied."""
        rates = self._learning_rates(opt_state.applied, opt_state.lr)
        moving = {
            index: rate
            for index, rate in enumerate(rates)
            if isinstance(rate, Tensor) or callable(self._lrs[index])
        }
        if not torch.compiler.is_compiling():
            return moving
        # it would take a number for a constant
        return {index: _as_tensor(rate, opt_state.applied) for index, rate in moving.items()}

    def _probed(
        self, where: str, settings: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Every setting of the class, with torch's own words for those that it refuses, and what it
        keeps for one parameter.
        """
        for name, value in settings.items():
            if name not in self._accepted:
                raise ValueError(
                    f"{where}: {self._cls.__name__} has no setting {name!r}. It has: "
                    f"{', '.join(self._accepted)}."
                )
            if isinstance(value, Tensor) and (
                name != "lr" or value.ndim or not value.is_floating_point()
            ):
                raise TypeError(
                    f"{where}: {name} is a tensor of shape {tuple(value.shape)}, {value.dtype}; "
                    f"only lr may be one, floating and 0-d, since torch's {self._cls.__name__} "
                    "reads the others in Python. Cure: a number."
                )
        _check_rate(where, settings["lr"])
        probe = torch.zeros(2, 3, device="cpu")
        probe.grad = torch.zeros_like(probe)
        optimizer = _with_slots(self._cls, [probe], settings, settings["lr"])
        return dict(optimizer.defaults), {
            key: value for key, value in optimizer.state[probe].items() if isinstance(value, Tensor)
        }


# stands where torch wants a number to check and a schedule or tensor will take its place
_ANY_LR = 1e-3
# a slot of our own: the momentum buffer of this parameter is still to be made
_FIRST = "is_first_step"
_FLAGS = ("foreach", "fused", "capturable", "differentiable")


def _cast_gradients(problem: Problem) -> dict[str, Tensor]:
    """The gradients in their parameters' dtypes."""
    return {
        name: _foreach.saturating(g, problem.weights[name].dtype)
        for name, g in problem.gradients.items()
    }


def _tree_of(problem: Problem, weights: dict[str, Tensor]) -> Tree:
    """Parameters in the structure of the given ones."""
    return problem.structure.unflatten([weights.get(name) for name in problem.names])


def _dict_of(names: list[str], leaves: list[Any]) -> dict[str, Any]:
    return dict(zip(names, leaves, strict=True))


def _slots_of(opt_state: OptState) -> list[Tensor]:
    return [tensor for slot in opt_state.slots.values() for tensor in slot.values()]


def _begin_at(rate: Any, slots: list[dict[str, Tensor]], *, lists: bool) -> None:
    """ASGD's step sizes of parameters that have made no step, from this rate."""
    if not lists:
        for slot in slots:
            slot["eta"] = torch.where(slot["step"] == 0, rate, slot["eta"]).to(slot["eta"].dtype)
    elif slots:
        etas = [slot["eta"] for slot in slots]
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


def _restored(name: str, saved: dict[str, Any], fresh: dict[str, Tensor]) -> dict[str, Tensor]:
    if not saved:
        return fresh
    kept = fresh.keys() - {_FIRST}
    if saved.keys() != kept:
        raise ValueError(
            f"the state of {name} has {sorted(map(str, saved))}, this optimizer keeps "
            f"{sorted(kept)}. Likely cause: the state dict of another class or of other settings "
            "(momentum, amsgrad, centered). Cure: from_torch with the class and settings that "
            "wrote it."
        )
    restored = {}
    for key, like in fresh.items():
        if key == _FIRST:
            restored[key] = torch.zeros_like(like)
            continue
        value = saved[key]
        if not isinstance(value, (Tensor, numbers.Real)):
            raise TypeError(
                f"the state of {name} has {key} = {type(value).__name__}; expected a tensor. Cure: "
                "`opt.state_dict()`, unchanged."
            )
        value = (
            value if isinstance(value, Tensor) else torch.tensor(float(value), device=like.device)
        )
        if value.shape != like.shape or (value.is_complex() and not like.is_complex()):
            raise ValueError(
                f"the state of {name} has {key} of shape {tuple(value.shape)}, {value.dtype}, "
                f"expected {tuple(like.shape)}, {like.dtype}. Cure: params in the order the "
                "optimizer had them."
            )
        restored[key] = value.detach().to(like.device, like.dtype, copy=True)
    return restored


def _checked_state_dict(sd: Any) -> tuple[list[Mapping[str, Any]], Mapping[Any, Any]]:
    """The groups and the states of `torch.optim.Optimizer.state_dict()`, refused in words where it
    is none.
    """
    groups: Any = sd.get("param_groups") if isinstance(sd, Mapping) else None
    states = sd.get("state") if isinstance(sd, Mapping) else None
    sound = isinstance(groups, (list, tuple)) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple))
        for group in groups
    )
    if not (
        sound
        and isinstance(states, Mapping)
        and all(isinstance(state, Mapping) for state in states.values())
    ):
        what = (
            f"a dict with the keys {_tree.some([repr(key) for key in sd])}"
            if isinstance(sd, Mapping)
            else type(sd).__name__
        )
        raise ValueError(
            f"sd is {what}; expected "
            "{'state': {index: slots}, 'param_groups': [{'params': [index, ...], ...}]}. "
            "Likely cause: a checkpoint that holds the optimizer's state dict among others, or a "
            "module's. Cure: `optimizer.from_state_dict(checkpoint['optimizer'], params)`, what "
            "`torch.optim.Optimizer.state_dict()` returned."
        )
    return list(groups), states


def _with_slots(cls: Any, probes: list[Tensor], settings: dict[str, Any], rate: Any) -> Any:
    """An optimizer of torch that has made its state for parameters whose gradients are there."""
    # where torch has step counts, whatever the default device is
    with torch.device("cpu"), PlainArithmetic():
        optimizer = cls(
            probes,
            **{**settings, "lr": _ANY_LR if isinstance(rate, Tensor) or callable(rate) else rate},
        )
        if isinstance(rate, Tensor):  # the constructor would read it
            optimizer.param_groups[0]["lr"] = (
                Rate.of(rate) if issubclass(cls, torch.optim.Rprop) else rate
            )
        _torch.new_state(optimizer)
    return optimizer


def _resolved(leaf: Tensor) -> Tensor:
    return leaf.resolve_conj().resolve_neg() if leaf.is_neg() or leaf.is_conj() else leaf


def _described(tensor: Tensor) -> str:
    layout = "" if tensor.layout is torch.strided else f" {tensor.layout}"
    return f"{tensor.dtype} {tuple(tensor.shape)}{layout}"


# ---- learning rates


def _as_tensor(rate: Any, like: Tensor) -> Tensor:
    return (
        rate
        if isinstance(rate, Tensor)
        else torch.full((), rate, dtype=_foreach.widest_float(like.device), device=like.device)
    )


def _check_rate(where: str, lr: Any) -> None:
    """Refuse what is no learning rate; of a schedule also one that reads the count, which would
    break later, in a traced step.
    """
    if isinstance(lr, (bool, type)) or not (callable(lr) or isinstance(lr, (Tensor, numbers.Real))):
        likely = (
            "a scheduler of torch, which holds an optimizer and counts by itself. "
            if _is_scheduler(lr)
            else "a string, or None. "
        )
        raise TypeError(
            f"{where}: lr must be a number, a 0-d tensor or a function of the step count, got "
            f"{lr!r}. Likely cause: {likely}Cure: lr=1e-3, or lr=lambda applied: 1e-3 * "
            "0.95**applied."
        )
    if not callable(lr) or _tree.traced():
        return
    try:
        with _torch.FakeTensorMode(allow_non_fake_inputs=True):
            rate = lr(torch.zeros((), dtype=torch.int64, device="cpu"))
    except (_torch.DataDependentOutput, _torch.DynamicOutputShape):
        raise TypeError(
            f"{where}: the schedule {lr!r} reads the value of the step count. It works step by "
            "step and breaks when the step is compiled or vmapped, or makes a GPU wait. Likely "
            "cause: math.cos, an `if`, `int(applied)` or a list indexed by the count. Cure: "
            "torch.cos, torch.where(applied < 100, a, b), torch.tensor(rates).take(applied)."
        ) from None
    _check_scheduled(rate)


def _is_scheduler(lr: Any) -> bool:
    kind = lr if isinstance(lr, type) else type(lr)
    return issubclass(kind, torch.optim.lr_scheduler.LRScheduler)


def _check_scheduled(rate: Any) -> None:
    if isinstance(rate, Tensor):
        sound = rate.ndim == 0 and rate.is_floating_point()
    else:
        sound = (
            isinstance(rate, (numbers.Real, torch.SymFloat))
            and rate is not True
            and rate is not False
        )
    if sound:
        return
    what = f"a tensor {rate.dtype} {tuple(rate.shape)}" if isinstance(rate, Tensor) else repr(rate)
    raise TypeError(
        f"the schedule lr returned {what}; a learning rate is a number or a floating 0-d tensor. "
        "Likely cause: a missing `return`, or a table of rates. Cure: `lambda applied: 1e-3 * "
        "0.95**applied`; of a table, `rates.take(applied)`."
    )


def _check_rate_of(opt_state: OptState, in_state: bool) -> None:
    lr = opt_state.lr
    if (
        (isinstance(lr, Tensor) and lr.ndim == 0 and lr.is_floating_point())
        if in_state
        else isinstance(lr, tuple)
    ):
        return
    if in_state:
        raise ValueError(
            f"opt_state.lr is {_described(lr) if isinstance(lr, Tensor) else repr(lr)}, expected a "
            "floating 0-d tensor: this optimizer was made with lr_in_state=True. Cure: `opt_state "
            "= optimizer.init(params)`, or `opt_state._replace(lr=torch.tensor(1e-3))`; a rate "
            "for each member of an ensemble goes through torch.vmap."
        )
    raise ValueError(
        f"opt_state.lr is {lr!r}, but this optimizer takes its rate from from_torch, and it would "
        "be passed over. Cure: from_torch(..., lr_in_state=True)."
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # of names and patterns, which dynamo need not look into
def _matching(names: tuple[str, ...], patterns: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """For each name the patterns that match it."""
    return _cached_matching(names, patterns)


@functools.lru_cache(maxsize=64)
def _cached_matching(
    names: tuple[str, ...], patterns: tuple[str, ...]
) -> tuple[tuple[int, ...], ...]:
    matching = tuple(
        tuple(i for i, pattern in enumerate(patterns) if fnmatch.fnmatchcase(name, pattern))
        for name in names
    )
    for index, pattern in enumerate(patterns):
        if not any(index in hits for hits in matching):
            raise ValueError(
                f"overrides: {pattern!r} matches no parameter. The names are: "
                f"{_tree.some(list(names), 20)}. A glob is '*.bias'."
            )
    return matching


def _by_name(params: Tree) -> dict[str, Tensor]:
    leaves = _tree.flatten(params)[0]
    named = dict(zip(_tree.names(params), leaves, strict=True))
    if len(named) != len(leaves):
        raise ValueError(
            "params: two leaves have the same dotted name, such as {'a.b': ...} beside "
            "{'a': {'b': ...}}. Cure: rename one."
        )
    for name, leaf in named.items():
        if leaf is not None and not (
            isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
        ):
            what = leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__
            raise TypeError(
                f"params: {name} is {what}; a parameter is a floating or complex tensor. Cure: put "
                "it among the buffers."
            )
    _tree.check_parameters(params, leaves)
    return {name: leaf for name, leaf in named.items() if leaf is not None}


def _check_class(cls: Any, settings: dict[str, Any]) -> None:
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise TypeError(
            f"from_torch takes a class of torch.optim, got {cls!r}. Cure: "
            "from_torch(torch.optim.AdamW, lr=1e-3), the class and not an instance."
        )
    if issubclass(cls, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS evaluates the loss again inside its step, so it is no function of gradients. "
            "Cure: torch.optim.AdamW, or your own loop around LBFGS."
        )
    if issubclass(cls, torch.optim.SparseAdam):
        raise ValueError(
            "SparseAdam takes sparse gradients only and counts its steps in Python. Cure: SGD or "
            "Adagrad, which take sparse gradients here."
        )
    if issubclass(cls, torch.optim.Adafactor) and settings.get("foreach") is None:
        raise ValueError(
            "each of torch's implementations of Adafactor reads three values per parameter in "
            "Python (a sync on a GPU, and no compile or vmap). Cure: name the one that may, "
            "from_torch(Adafactor, foreach=False)."
        )
    if _torch.formula_of(cls) is None:
        raise ValueError(
            f"{cls.__name__} is not built like the classes of torch.optim, so its state cannot be "
            "found before its first step. Cure: from_transformation(tx) with an (init, update) "
            "pair, or an object of your own with `init` and `step`."
        )
