"""A class of torch.optim run as a function: on copies, through an optimizer object that is never constructed."""

from __future__ import annotations

import fnmatch
import functools
import inspect
import itertools
import numbers
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _foreach, _tree
from ._fused import Row, Treatment, kernel_of, update
from ._no_reads import PlainArithmetic, without_reads
from ._tree import Tree

Schedule = Callable[[Tensor], "Tensor | float"]
Slots = dict[str, dict[str, Tensor]]


class OptState(NamedTuple):
    """What a torch optimizer remembers. Its structure is final from `init` on."""

    applied: Tensor  # int64 []: steps applied; what a schedule is a function of
    slots: Slots  # by parameter name, then by torch's own names: {"conv.weight": {"step": ..., "exp_avg": ...}}


class Problem(NamedTuple):
    """What a step is over, by name."""

    structure: Any  # of the parameters
    names: list[str]  # of every leaf, None included
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]  # those that are there


class Plan(NamedTuple):
    """A step that is ready to run."""

    problem: Problem
    work: list[tuple[dict[str, Any], list[Row]]]  # the settings of a group, and what is updated under them
    weights: dict[str, Tensor]  # what will be the result
    opt_state: OptState  # likewise, but for the count
    spent: bool


class TorchOptimizer:
    """A torch.optim class as pure functions; made by `from_torch`. Holds settings, never state."""

    def __init__(self, cls: Any, lr: Any, overrides: Mapping[str, Mapping[str, Any]], settings: dict[str, Any]) -> None:
        _check_class(cls, settings)
        self._cls = cls
        accepted = inspect.signature(cls).parameters
        self._accepted = [name for name in accepted if name != "params"]
        self._lr = accepted["lr"].default if lr is None else lr
        self._patterns = tuple(overrides)
        self._overrides = tuple(dict(extra) for extra in overrides.values())
        self._settings = settings
        self._flag_named = any(settings.get(name) is not None for name in _FLAGS)
        self._defaults = self._checked_defaults("from_torch", {**settings, "lr": self._lr})
        for pattern, extra in overrides.items():
            self._checked_defaults(f"overrides[{pattern!r}]", {**settings, "lr": self._lr, **extra})
        self.differentiable = bool(settings.get("differentiable"))
        # torch's SGD ignores dampening in the step that makes the momentum buffer.
        self._first_step_differs = issubclass(cls, torch.optim.SGD) and any(
            extra.get("dampening") for extra in (settings, *self._overrides)
        )
        self._kernel = kernel_of(cls)
        self._lrs = (self._lr, *(extra.get("lr") for extra in self._overrides))
        self._tensor_lrs = {str(index): rate.clone() for index, rate in enumerate(self._lrs) if isinstance(rate, Tensor)}
        # Dynamo will not trace a torch optimizer; the compiler behind it traces this plain Python.
        self._opaque = torch._dynamo.nonstrict_trace(self._formula)

    def __repr__(self) -> str:
        extra = {"lr": self._lr, **self._settings}
        if self._patterns:
            extra["overrides"] = dict(zip(self._patterns, self._overrides, strict=True))
        return f"from_torch({self._cls.__name__}, {', '.join(f'{name}={value!r}' for name, value in extra.items())})"

    # ---- what a user calls

    def init(self, params: Tree) -> OptState:
        """The state of an optimizer that has made no step, in fresh memory; no step changes its structure."""
        named = _by_name(params)
        device = next((leaf.device for leaf in named.values()), None)
        applied = torch.zeros((), dtype=torch.int64, device=device)
        probes = {name: leaf.detach().clone() for name, leaf in named.items()}
        for probe in probes.values():
            probe.grad = torch.zeros_like(probe)
        slots: Slots = {}
        for names, group in self._groups(tuple(named), self._learning_rates(applied, self._tensor_lrs)):
            constructor = {name: value for name, value in group.items() if name in self._accepted}
            optimizer = self._cls([probes[name] for name in names], **{**constructor, "lr": _ANY_LR})
            optimizer.param_groups[0]["lr"] = group["lr"]  # the constructor would read a tensor
            lists = len(inspect.signature(optimizer._init_group).parameters) - 1
            optimizer._init_group(optimizer.param_groups[0], *([] for _ in range(lists)))
            for name in names:
                probe = probes[name]
                slots[name] = {key: value.to(probe.device) for key, value in optimizer.state[probe].items()}
                if issubclass(self._cls, torch.optim.SGD) and group["momentum"] != 0:
                    # torch makes this buffer in the first step, as a copy of the gradient; -0.0 * momentum + g is g for every g.
                    slots[name]["momentum_buffer"] = torch.full_like(probe, -0.0)
        return OptState(applied, {name: slots[name] for name in named})

    def step(self, params: Tree, grads: Tree, opt_state: OptState) -> tuple[Tree, OptState]:
        """Parameters and state after one step, in fresh memory. A parameter whose gradient is None stays, as in torch.optim."""
        problem = self.check(params, grads, opt_state)
        if self.has_fused_kernel(problem):
            return self.run_fused(self.plan_fused(problem, opt_state), found_inf=None)
        weights, gradients = problem.weights, _cast_gradients(problem)
        run = self._opaque if torch.compiler.is_compiling() else self._formula
        stepped, slots = run(weights, gradients, opt_state.slots, opt_state.applied, self._tensor_lrs)
        return _tree_of(problem, stepped), OptState(opt_state.applied + 1, slots)

    def to_state_dict(self, opt_state: OptState) -> dict[str, Any]:
        """Equal to `cls(groups).state_dict()` of an optimizer that made the same steps: tensors copied, `lr` as it is now. Syncs.

        The groups are, in order: the parameters that no override matches, then those that the overrides match.
        """
        if self._first_step_differs and opt_state.applied == 0:
            opt_state = opt_state._replace(slots={name: {} for name in opt_state.slots})
        state: dict[int, dict[str, Tensor]] = {}
        groups = []
        for names, group in self._groups(tuple(opt_state.slots), self._learning_rates(opt_state.applied, self._tensor_lrs)):
            indices = [len(state) + offset for offset in range(len(names))]
            # torch keeps step counts on the CPU, and moves them itself where an implementation wants them elsewhere.
            for index, name in zip(indices, names, strict=True):
                state[index] = {k: v.cpu().clone() if k == "step" else v.clone() for k, v in opt_state.slots[name].items()}
            lr = group["lr"]
            groups.append({**group, "lr": lr.clone() if isinstance(lr, Tensor) else lr, "params": indices})
        return {"state": {index: slot for index, slot in state.items() if slot}, "param_groups": groups}

    def check(self, params: Tree, grads: Tree, opt_state: OptState) -> Problem:
        """What a step is over; refuses gradients and a state that are not those of `params`."""
        structure, leaves, gradients = _tree.aligned(params, grads)
        if not isinstance(opt_state, OptState):
            raise TypeError(
                f"opt_state is {type(opt_state).__name__}. Cure: `opt_state = optimizer.init(params)`, or what the last step returned."
            )
        names = _tree.names(params)
        weights = {name: leaf for name, leaf in zip(names, leaves, strict=True) if leaf is not None}
        if opt_state.slots.keys() != weights.keys():
            raise ValueError(
                f"opt_state knows the parameters {_tree.some(list(opt_state.slots))}, params has {_tree.some(names)}. "
                f"Cure: `opt_state = optimizer.init(params)` for these params."
            )
        for name, slot in opt_state.slots.items():
            weight = weights[name]
            shape, dtype = weight.shape, weight.dtype
            for key, value in slot.items():
                # torch's fused kernels would walk past the end of a shorter one. Adafactor's factors have shapes of their own.
                if value.ndim and key not in _FACTORS and (value.shape != shape or value.dtype is not dtype):
                    raise ValueError(
                        f"opt_state: {key} of {name} is {value.dtype} {tuple(value.shape)}, the parameter {dtype} "
                        f"{tuple(shape)}. Likely cause: the state of another model, or of the model before it was changed. "
                        f"Cure: `opt_state = optimizer.init(params)`."
                    )
        return Problem(structure, names, weights, {name: g for name, g in zip(names, gradients, strict=True) if g is not None})

    def from_state_dict(self, sd: Mapping[str, Any], params: Tree) -> OptState:
        """The state in `cls(groups).state_dict()`, copied. The settings in it are not read: `from_torch` has them.

        `params` are taken in the order in which `to_state_dict` lists them, or in their own where `sd` has one group.
        `applied` is the largest step count in `sd`; where the class keeps none (SGD, Muon) it is 1 if `sd` holds any state,
        else 0: `opt_state._replace(applied=...)` if a schedule needs the true one. Raises `ValueError` for another class's
        or another model's state.
        """
        fresh = self.init(params)
        groups = [names for names, _ in self._groups(tuple(fresh.slots), self._lrs)]
        saved_groups = [list(group["params"]) for group in sd["param_groups"]]
        if len(saved_groups) == 1:
            groups = [list(fresh.slots)]
        if list(map(len, saved_groups)) != list(map(len, groups)):
            raise ValueError(
                f"the state dict has groups of {list(map(len, saved_groups))} parameters, this optimizer has "
                f"{list(map(len, groups))}. Likely cause: other params, or other overrides. "
                f"Cure: overrides that match the groups of the optimizer that wrote it, in its order."
            )
        order = [name for names in groups for name in names]
        slots: Slots = {}
        for name, index in zip(order, (index for group in saved_groups for index in group), strict=True):
            saved = {key: value for key, value in sd["state"].get(index, {}).items() if value is not None}
            slots[name] = _restored(name, saved, fresh.slots[name])
        steps = [slot["step"] for slot in slots.values() if "step" in slot]
        applied = torch.stack(steps).max().to(torch.int64) if steps else fresh.applied + bool(sd["state"])
        return OptState(applied, {name: slots[name] for name in fresh.slots})

    # ---- the fused kernel, which skips and unscales by itself

    def has_fused_kernel(self, problem: Problem) -> bool:
        """Whether torch's fused kernel can make this step: static facts only."""
        if self._kernel is None or self._first_step_differs or _tree.under_transform():
            return False
        if torch.compiler.is_compiling() and (
            len(problem.weights) <= _foreach.INLINE or _foreach.is_on_a_graph([*problem.weights.values(), *problem.gradients.values()])
        ):
            return False
        if self._flag_named and not self._settings.get("fused"):
            return False
        return all(
            _foreach.is_dense(leaf) and leaf.is_floating_point() and (leaf.is_cpu or leaf.is_cuda)
            for leaf in (*problem.weights.values(), *problem.gradients.values())
        )

    def plan_fused(
        self, problem: Problem, opt_state: OptState, *, donate: bool = False, spent: bool = False, keep: Sequence[Tensor] = ()
    ) -> Plan:
        """All of a step but the arithmetic; nothing is written yet.

        With `donate` the step will write into the parameters and the state, and gradients that are `spent` may hold anything
        afterwards. What stands in the memory of another of these tensors, or of `keep`, is written into in no case.
        """
        assert self._kernel is not None
        weights, gradients = dict(problem.weights), problem.gradients
        groups = self._groups(tuple(weights), self._learning_rates(opt_state.applied, self._tensor_lrs))
        given = list(gradients.values())
        state: list[Tensor] = []
        for members, _ in groups:
            for name in members:
                state.append(weights[name])
                state += opt_state.slots[name].values()
        all_of_them = [*state, *given]
        mine = _tree.writable(all_of_them, [opt_state.applied, *keep]) if donate or spent else [False] * len(all_of_them)
        spent = spent and all(mine[len(state) :])
        owned = iter(mine) if donate else itertools.repeat(False)
        slots: Slots = {}
        work = []
        for members, settings in groups:
            rows = []
            updated = self._kernel.slots(settings)
            for name in members:
                weight, slot = weights[name], opt_state.slots[name]
                if name in gradients:
                    row, slots[name] = self._row(weight, gradients[name], slot, updated, owned)
                    weights[name] = row.targets[0]
                    rows.append(row)
                else:
                    weights[name] = _kept(weight, next(owned))
                    slots[name] = {key: _kept(value, next(owned)) for key, value in slot.items()}
            work.append((settings, rows))
        return Plan(problem, work, weights, OptState(opt_state.applied, {name: slots[name] for name in opt_state.slots}), spent)

    def run_fused(self, plan: Plan, found_inf: Tensor | None, treatment: Treatment = Treatment()) -> tuple[Tree, OptState]:  # noqa: B008
        """`step` over gradients that are still to be treated, and only where not `found_inf`."""
        assert self._kernel is not None
        with torch.no_grad():
            for settings, rows in plan.work:
                update(self._kernel, settings, rows, found_inf, treatment, spent=plan.spent)
        applied = plan.opt_state.applied + (1 if found_inf is None else ~found_inf)
        return _tree_of(plan.problem, plan.weights), OptState(applied, plan.opt_state.slots)

    def _row(
        self, weight: Tensor, gradient: Tensor, slot: dict[str, Tensor], updated: tuple[str, ...], owned: Iterator[bool]
    ) -> tuple[Row, dict[str, Tensor]]:
        """What the kernel writes into for one parameter, and its next slots, which are some of the same tensors."""
        for key in updated:
            if key not in slot:
                raise self._foreign_state(key)
        fresh: list[int] = []
        old: list[Tensor] = []

        def target(place: int, tensor: Tensor, like: Tensor) -> Tensor:
            if next(owned) and (tensor is like or _alike(tensor, like)):
                return tensor.detach() if tensor.requires_grad else tensor
            new = torch.empty_like(like, dtype=tensor.dtype, requires_grad=False)
            if not _alike(tensor, new):
                return new.copy_(tensor.detach())
            fresh.append(place)
            old.append(tensor.detach())
            return new

        new_weight = target(0, weight, weight)
        new_slot = {}
        for key, value in slot.items():
            new_slot[key] = target(1 + updated.index(key), value, new_weight) if key in updated else _kept(value, next(owned))
        if not _alike(gradient, new_weight):
            # torch's fused kernels walk all of a parameter's tensors by one pointer.
            gradient = torch.empty_like(new_weight, dtype=gradient.dtype).copy_(gradient.detach())
        return Row(gradient, new_slot.get("step"), [new_weight, *[new_slot[key] for key in updated]], fresh, old), new_slot

    # ---- torch's formula

    def _formula(
        self, weights: dict[str, Tensor], gradients: dict[str, Tensor], slots: Slots, count: Tensor, tensor_lrs: dict[str, Tensor]
    ) -> tuple[dict[str, Tensor], Slots]:
        traced = _tree.traced()
        differentiable = traced or self.differentiable

        def mine(tensor: Tensor) -> Tensor:
            return tensor.clone() if differentiable else tensor.detach().clone()

        lrs = self._learning_rates(count, tensor_lrs)
        flags: dict[str, bool] = {}
        run = inspect.unwrap(self._cls.step)
        if not self._flag_named:
            flags = {"foreach": False, "fused": False, "capturable": True, "differentiable": traced}
            run = without_reads(self._cls)

        def stepped(slots: Slots) -> tuple[dict[str, Tensor], Slots]:
            new_weights = {name: mine(weight) for name, weight in weights.items()}
            new_slots = {name: {key: mine(value) for key, value in slot.items()} for name, slot in slots.items()}
            if _tree.under_transform():
                _batch_alike(new_weights, new_slots, gradients, lrs)
            with torch.set_grad_enabled(differentiable), PlainArithmetic():
                self._run(run, new_weights, gradients, new_slots, lrs, flags)
            return new_weights, new_slots

        later: tuple[dict[str, Tensor], Slots] = stepped(slots)
        if not self._first_step_differs:
            return later
        first = stepped({name: {} if name in gradients else slot for name, slot in slots.items()})
        chosen: tuple[dict[str, Tensor], Slots] = _tree.map(functools.partial(torch.where, count == 0), first, later)
        return chosen

    def _run(
        self,
        run: Callable[[Any], Any],
        weights: dict[str, Tensor],
        gradients: dict[str, Tensor],
        slots: Slots,
        lrs: list[Any],
        flags: dict[str, bool],
    ) -> None:
        """torch's own `step` over these very tensors, in place, through an optimizer object that was never constructed."""
        optimizer: Any = object.__new__(self._cls)
        optimizer.__dict__.update(defaults=self._defaults, state=defaultdict(dict), _warned_capturable_if_run_uncaptured=True)
        optimizer.param_groups = []
        for names, group in self._groups(tuple(weights), lrs):
            group.update((name, value) for name, value in flags.items() if name in group)
            present = [name for name in names if name in gradients]
            for name in present:
                # Where this is missing torch would begin anew, and the structure of the state would change.
                if issubclass(self._cls, torch.optim.SGD):
                    foreign = group["momentum"] != 0 and "momentum_buffer" not in slots[name] and not self._first_step_differs
                else:
                    foreign = not slots[name]
                if foreign:
                    raise self._foreign_state("momentum_buffer" if slots[name] else "state")
                weights[name].grad = gradients[name]
                optimizer.state[weights[name]] = slots[name]
            optimizer.param_groups.append({**group, "params": [weights[name] for name in present]})
        try:
            run(optimizer)
        except KeyError as error:
            raise self._foreign_state(str(error)) from None
        finally:
            for name in gradients:
                weights[name].grad = None

    def _foreign_state(self, missing: str) -> ValueError:
        return ValueError(
            f"opt_state has no {missing} that {self._cls.__name__} keeps. Likely cause: the state of another class or of other settings. "
            f"Cure: `opt_state = optimizer.init(params)`."
        )

    # ---- settings

    def _groups(self, names: tuple[str, ...], lrs: Sequence[Any]) -> list[tuple[list[str], dict[str, Any]]]:
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
        """The first of all patterns that says the same: `{"*.bias": no_decay, "norm.*": no_decay}` is one group."""
        if not matching:
            return matching
        merged: dict[str, Any] = {}
        for index in matching:
            merged.update(self._overrides[index])
        for index, extra in enumerate(self._overrides):
            if extra.keys() == merged.keys() and all(
                extra[k] is v or (not isinstance(v, Tensor) and extra[k] == v) for k, v in merged.items()
            ):
                return (index,)
        return matching

    def _learning_rates(self, count: Tensor, tensor_lrs: dict[str, Tensor]) -> list[Any]:
        """The rate of from_torch, then of each override (None where it names none), as of `count` steps applied."""
        rates: list[Any] = []
        for index, rate in enumerate(self._lrs):
            value = tensor_lrs[str(index)] if str(index) in tensor_lrs else rate(count) if callable(rate) else rate
            rates.append(value.to(count.device) if isinstance(value, Tensor) else value)
        return rates

    def _checked_defaults(self, where: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Every setting of the class; torch's own words for those that it refuses."""
        for name, value in settings.items():
            if name not in self._accepted:
                raise ValueError(f"{where}: {self._cls.__name__} has no setting {name!r}. It has: {', '.join(self._accepted)}.")
            if isinstance(value, Tensor) and (name != "lr" or value.ndim):
                raise TypeError(
                    f"{where}: {name} is a tensor of shape {tuple(value.shape)}; only lr may be one, 0-d, "
                    f"since torch's {self._cls.__name__} reads the others in Python. Cure: a number."
                )
        lr = settings["lr"]
        if not (callable(lr) or isinstance(lr, (Tensor, numbers.Real))) or isinstance(lr, bool):
            raise TypeError(f"{where}: lr must be a number, a 0-d tensor or a function of the step count, got {lr!r}.")
        fixed = {**settings, "lr": _ANY_LR if callable(lr) or isinstance(lr, Tensor) else lr}
        return dict(self._cls([torch.zeros(1, 1)], **fixed).defaults)


_ANY_LR = 1e-3  # stands where torch wants a number to check and a schedule or tensor will take its place
_FACTORS = ("row_var", "col_var")
_FLAGS = ("foreach", "fused", "capturable", "differentiable")


def _cast_gradients(problem: Problem) -> dict[str, Tensor]:
    """The gradients in their parameters' dtypes."""
    return {name: _foreach.saturating(g, problem.weights[name].dtype) for name, g in problem.gradients.items()}


def _tree_of(problem: Problem, weights: dict[str, Tensor]) -> Tree:
    """Parameters in the structure of the given ones."""
    return problem.structure.unflatten([weights.get(name) for name in problem.names])


def _alike(tensor: Tensor, weight: Tensor) -> bool:
    return tensor.stride() == weight.stride() or tensor.ndim == 0 or tensor.shape != weight.shape


def _kept(tensor: Tensor, own: bool) -> Tensor:
    if not own:
        return tensor.detach().clone()
    return tensor.detach() if tensor.requires_grad else tensor


def _batch_alike(weights: dict[str, Tensor], slots: Slots, gradients: dict[str, Tensor], lrs: list[Any]) -> None:
    """Under vmap a batched value cannot be written into an unbatched one: make weights and slots as batched as what they meet."""
    rates = [rate for rate in lrs if isinstance(rate, Tensor)]
    for name, gradient in gradients.items():
        met = torch.zeros_like(gradient)
        for value in (weights[name], *slots[name].values(), *rates):
            met = met + torch.zeros_like(value, dtype=gradient.dtype)
        everywhere = torch.ones_like(met, dtype=torch.bool)  # where(everywhere, a, b) is a, as batched as both and the mask
        weights[name] = torch.where(everywhere, weights[name], gradient)
        for key, value in slots[name].items():
            if value.shape == gradient.shape and value.dtype == gradient.dtype:
                slots[name][key] = torch.where(everywhere, value, gradient)


def _restored(name: str, saved: dict[str, Any], fresh: dict[str, Tensor]) -> dict[str, Tensor]:
    if not saved:
        return fresh
    if saved.keys() != fresh.keys():
        raise ValueError(
            f"the state of {name} has {sorted(saved)}, this optimizer keeps {sorted(fresh)}. Likely cause: the state dict of another class "
            f"or of other settings (momentum, amsgrad, centered). Cure: from_torch with the class and settings that wrote it."
        )
    restored = {}
    for key, like in fresh.items():
        value = torch.as_tensor(saved[key])
        if value.shape != like.shape:
            raise ValueError(
                f"the state of {name} has {key} of shape {tuple(value.shape)}, expected {tuple(like.shape)}. Cure: params in "
                f"the order the optimizer had them."
            )
        restored[key] = value.detach().to(like.device, like.dtype, copy=True)
    return restored


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # of names and patterns, which dynamo need not look into
def _matching(names: tuple[str, ...], patterns: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """For each name the patterns that match it."""
    return _cached_matching(names, patterns)


@functools.lru_cache(maxsize=64)
def _cached_matching(names: tuple[str, ...], patterns: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    matching = tuple(tuple(i for i, pattern in enumerate(patterns) if fnmatch.fnmatchcase(name, pattern)) for name in names)
    for index, pattern in enumerate(patterns):
        if not any(index in hits for hits in matching):
            raise ValueError(
                f"overrides: {pattern!r} matches no parameter. The names are: {_tree.some(list(names), 20)}. A glob is '*.bias'."
            )
    return matching


def _by_name(params: Tree) -> dict[str, Tensor]:
    leaves = _tree.flatten(params)[0]
    named = dict(zip(_tree.names(params), leaves, strict=True))
    if len(named) != len(leaves):
        raise ValueError("params: two leaves have the same dotted name, such as {'a.b': ...} beside {'a': {'b': ...}}. Cure: rename one.")
    for name, leaf in named.items():
        if leaf is not None and not (isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())):
            what = leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__
            raise TypeError(f"params: {name} is {what}; a parameter is a floating or complex tensor. Cure: put it among the buffers.")
    return {name: leaf for name, leaf in named.items() if leaf is not None}


def _check_class(cls: Any, settings: dict[str, Any]) -> None:
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise TypeError(
            f"from_torch takes a class of torch.optim, got {cls!r}. Cure: from_torch(torch.optim.AdamW, lr=1e-3), the class and "
            f"not an instance."
        )
    if issubclass(cls, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS evaluates the loss again inside its step, so it is no function of gradients. Cure: torch.optim.AdamW, or "
            "your own loop around LBFGS."
        )
    if issubclass(cls, torch.optim.SparseAdam):
        raise ValueError(
            "SparseAdam takes sparse gradients only and counts its steps in Python. Cure: SGD or Adagrad, which take sparse gradients here."
        )
    if issubclass(cls, torch.optim.Adafactor) and settings.get("foreach") is None:
        raise ValueError(
            "each of torch's implementations of Adafactor reads three values per parameter in Python (a sync on a GPU, and no compile or "
            "vmap). Cure: name the one that may, from_torch(Adafactor, foreach=False)."
        )
    module = inspect.unwrap(cls.step).__globals__
    name = module.get("__name__", "").rpartition(".")[2].lstrip("_")
    if not hasattr(cls, "_init_group") or f"_single_tensor_{name}" not in module:
        raise ValueError(
            f"{cls.__name__} is not built like the classes of torch.optim, so its state cannot be found before its first step. "
            f"Cure: from_transformation(tx) with an (init, update) pair, or an object of your own with `init` and `step`."
        )
