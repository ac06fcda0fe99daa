"""A class of torch.optim as pure functions: init, step, and the step that can skip by itself."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _checks, _columns, _foreach, _plan, _slots, _torch, _tree
from ._autocast import outside_autocast
from ._door import Entered, Memo, enter
from ._formula_step import FormulaStep
from ._groups import Groups
from ._kernels import Kernel, Treatment, kernel_of
from ._slots import Kept, OptState, Slots
from ._spread import is_elementwise, over_shards
from ._torch import foreach
from ._tree import Tree


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


class FormulaPlan(NamedTuple):
    """A step by torch's formula, on a CPU, that is checked; nothing is written yet."""

    formula: FormulaStep
    entered: Entered
    rates: list[Any]
    opt_state: OptState
    spent: bool  # the gradients may hold anything afterwards
    listed: bool  # one list operation takes them all

    @property
    def gradients(self) -> list[Tensor]:
        return self.entered.gradients

    def unscaled(self, scale: Tensor) -> list[Any]:
        """The gradients over `scale`, in memory of their own or given up."""
        if not (self.spent and self.listed):
            return _foreach.divide(self.gradients, scale, donate=self.spent)
        with torch.no_grad():
            foreach.div_(self.gradients, scale)
        return self.gradients

    def run(self, gradients: list[Tensor]) -> tuple[Tree, OptState]:
        """The step over these gradients, which are unscaled and known to be finite: in place where
        that is donated.
        """
        names, leaves, state, _, _, marks = self.entered
        tensors = iter(state if marks.donate else _columns.clone(state))
        present = [n for n, leaf in zip(names, leaves, strict=True) if leaf is not None]
        # torch looks for a gradient at its parameter, which is not to be seen at the caller's
        weights = {name: next(tensors).detach() for name in present}
        slots = {
            name: {
                key: tensor.detach() if (tensor := next(tensors)).requires_grad else tensor
                for key in slot
            }
            for name, slot in self.opt_state.slots.items()
        }
        given = [name for index, name in enumerate(names) if index not in marks.absent]
        dtypes = [weights[name].dtype for name in given]
        cast = _foreach.cast_list(gradients, dtypes, apart=False)
        self.formula.in_place(weights, dict(zip(given, cast, strict=True)), slots, self.rates)
        lr = self.formula.copy(self.opt_state.lr)
        params = {name: weights.get(name) for name in names}
        return params, OptState(self.opt_state.applied + 1, slots, lr)


class Asked(NamedTuple):
    """What is remembered of the arguments of a step, and what was found out on the way."""

    plan: Plan | None
    entered: Entered | None
    rates: list[Any] | None  # None where nothing is remembered at all
    formula: FormulaPlan | None = None


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
        self._groups = Groups(cls, lr, overrides, settings, lr_in_state=lr_in_state)
        self._kept = Kept(cls, self._groups.slots, self._groups.every)
        self._kernel = kernel_of(cls)
        # of a step by the formula, whether its gradients are `listed`
        self._memo: Memo[_plan.Facts | bool] = Memo()
        self.differentiable = self._groups.differentiable
        self.elementwise = is_elementwise(cls)
        # What a class of somebody else's returns may stand in the memory of its arguments.
        self.steps_apart = (
            inspect.unwrap(cls.step).__module__.startswith("torch.optim.")
            and not self.differentiable
        )
        # Dynamo will not trace a torch optimizer; the compiler behind it traces this plain Python.
        # Nothing in there is guarded, so a compiled step is guarded by `_key` instead: all that the
        # formula reads but for its arguments.
        self._formula = FormulaStep(self._groups, self._kept)
        self._opaque = _torch.nonstrict_trace(self._formula.__call__)
        self._key = self._groups.key()

    def __repr__(self) -> str:
        return repr(self._groups)

    def init(self, params: Tree) -> OptState:
        """The state of an optimizer that has made no step, in fresh memory; no step changes its
        structure.
        """
        named = _by_name(params)
        device = next((leaf.device for leaf in named.values()), None)
        applied = torch.zeros((), dtype=torch.int64, device=device)
        lr = self._groups.lr_of(device)
        slots: Slots = {}
        for names, group in self._groups.of(tuple(named), self._groups.rates(applied, lr)):
            # These stand in the memory of the parameters: torch makes the state from their shapes
            # and only that is kept.
            probes = [named[name].detach() for name in names]
            for probe in probes:
                probe.grad = probe.detach()
            for name, slot in zip(
                names, self._kept.new(probes, group, self._groups.accepted), strict=True
            ):
                slots[name] = slot
        return OptState(applied, {name: slots[name] for name in named}, lr)

    @outside_autocast()
    @over_shards
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
        rates = self._groups.moving(opt_state)
        run = self._opaque if torch.compiler.is_compiling() else self._formula
        stepped, slots = run(
            self._key, problem.weights, _cast_gradients(problem), opt_state.slots, rates
        )
        return _tree_of(problem, stepped), OptState(
            opt_state.applied + 1, slots, self._formula.copy(opt_state.lr)
        )

    def to_state_dict(self, opt_state: OptState) -> dict[str, Any]:
        """Equal to `cls(groups).state_dict()` of an optimizer that made the same steps: tensors
        copied, `lr` as it is now. Syncs.

        The groups are, in order: the parameters that no override matches, then those that the
        overrides match.
        """
        rates = self._groups.rates(opt_state.applied, opt_state.lr)
        return _slots.state_dict(opt_state.slots, self._groups.of(tuple(opt_state.slots), rates))

    def from_state_dict(
        self, sd: Mapping[str, Any], params: Tree, applied: int | Tensor | None = None
    ) -> OptState:
        """Syncs. The state in `cls(groups).state_dict()`, copied; of its settings only the rate,
        and only with lr_in_state.

        `params` are taken in the order in which `to_state_dict` lists them, or in their own where
        `sd` has one group. `applied`: the steps that were applied, which a schedule goes on from,
        `scheduler.last_epoch` of a scheduler that stepped with the optimizer. Left out it is the
        largest step count in `sd`; where the class keeps none (SGD, Muon) it is 1 if `sd` holds any
        state, else 0, and an error where the rate is a schedule. Raises `ValueError` for another
        class's or another model's state, and for one with two rates where the state holds one.
        """
        saved_groups, states = _slots.checked_state_dict(sd)
        known = None if applied is None else _whole_count(applied)
        fresh = self.init(params)
        groups = [names for names, _ in self._groups.of(tuple(fresh.slots), self._groups.lrs)]
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
            slots[name] = _slots.restored(name, saved, slots[name])
        steps = [slot["step"] for slot in slots.values() if "step" in slot]
        if steps and not bool(torch.isfinite(torch.stack(steps)).all()):
            raise ValueError(
                "the state dict has a step count that is inf or NaN. Likely cause: a damaged "
                "file, or a step that was taken with such a count. Cure: an older state dict."
            )
        if known is None and not steps and any(map(callable, self._groups.lrs)):
            raise ValueError(
                f"the rate is a schedule, and {self._groups.cls.__name__}'s state dict has no step "
                "count to go on from. Cure: `optimizer.from_state_dict(sd, params, "
                "applied=scheduler.last_epoch)`, the steps made so far; 0 of an optimizer that has "
                "made none."
            )
        if known is not None:
            count = torch.full_like(fresh.applied, known)
        elif steps:
            count = torch.stack(steps).max().to(torch.int64)
        else:
            count = fresh.applied + bool(states)
        lr = self._groups.saved_lr(saved_groups, tuple(fresh.slots), fresh.lr)
        return OptState(count, slots, lr)

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
        self._kept.check(opt_state.slots, weights)
        self._groups.check(opt_state)
        given = {name: g for name, g in zip(names, gradients, strict=True) if g is not None}
        # torch's kernels know nothing of lazy negation and conjugation
        if not torch.compiler.is_compiling():
            weights, given = (
                {name: _resolved(leaf) for name, leaf in column.items()}
                for column in (weights, given)
            )
        return Problem(structure, names, weights, given)

    # ---- the fused kernel, which skips and unscales by itself

    def has_fused_kernel(self, problem: Problem) -> bool:
        """Whether torch's fused kernel can make this step: static facts only."""
        if self._kernel is None or self._kept.first_step_differs or _tree.under_transform():
            return False
        if torch.compiler.is_compiling() and (
            len(problem.weights) <= _foreach.INLINE
            or _foreach.is_on_a_graph([*problem.weights.values(), *problem.gradients.values()])
        ):
            return False
        if self._groups.flag_named and not self._groups.settings.get("fused"):
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
        asked: Asked | None = None,
    ) -> Plan | None:
        """A step by torch's fused kernel; `None` where there is no kernel for it. `asked`: what
        `ask` said of the same arguments.

        With `donate` the step will write into the parameters and the state, and gradients that are
        `spent` may hold anything afterwards. What stands in the memory of another of these tensors,
        or of `keep`, is written into in no case.
        """
        if self._kernel is None:
            return None
        if asked is None:
            asked = self.ask(params, grads, opt_state, donate=donate, spent=spent, keep=keep)
        known, entered, rates, _ = asked
        if known is not None:
            return known
        if _tree.under_transform():
            return None
        problem = self.check(params, grads, opt_state)
        if not self.has_fused_kernel(problem):
            return None
        if not self.differentiable:
            _tree.refuse_graphs(params=params, grads=grads, opt_state=opt_state)
        slots = [tensor for slot in opt_state.slots.values() for tensor in slot.values()]
        columns = [*problem.weights.values(), *slots, *problem.gradients.values()]
        if rates is None:
            rates = self._groups.rates(opt_state.applied, opt_state.lr)
        others = _besides(opt_state, rates, keep)
        mine = (
            _tree.writable(columns, others, leaves_too=True)
            if donate or spent
            else [False] * len(columns)
        )
        count = len(columns) - len(problem.gradients)
        facts = _plan.facts(
            self._kernel,
            self._groups.of(tuple(problem.weights), range(len(self._groups.lrs))),
            problem.weights,
            opt_state.slots,
            problem.gradients,
            [donate and own for own in mine[:count]] + mine[count:],
            self._kept.foreign,
        )
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

    def remember(self, asked: Asked, problem: Problem) -> None:
        """What was checked, so that the next step by the formula need not be, where it can be made
        on these very tensors.
        """
        entered = asked.entered
        if self._kernel is not None or entered is None or asked.formula is not None:
            return
        state, gradients = entered.state, entered.gradients
        columns = [*state, *gradients]
        same = entered.names == problem.names
        same = same and all(map(operator.is_, state, problem.weights.values()))
        same = same and all(map(operator.is_, gradients, problem.gradients.values()))
        simple = not (self._groups.flag_named or self._kept.first_step_differs)
        if not (same and simple and self.steps_apart and _columns.are_plain(columns)):
            return
        # A module's own parameters are written into in every step or, as here, in none.
        alone = not entered.marks.donate or all(_tree.writable(columns))
        on_cpu = all(leaf.is_cpu and leaf.is_floating_point() for leaf in columns)
        if alone and on_cpu and not any(g.requires_grad for g in gradients):
            listed = all(g.dtype is torch.float32 and g.ndim > 0 for g in gradients)
            self._memo.add(entered, listed and all(map(_columns.is_gapless, gradients)))

    def ask(
        self,
        params: Tree,
        grads: Tree,
        opt_state: Any,
        *,
        donate: bool = False,
        spent: bool = False,
        keep: Sequence[Tensor] = (),
    ) -> Asked:
        """`plan` of arguments that differ from earlier ones in their values only, so that nothing
        need be checked again.
        """
        sound = isinstance(opt_state, OptState) and isinstance(opt_state.applied, Tensor)
        if _tree.traced() or _tree.DEBUG_DONATION or not sound:
            return Asked(None, None, None)
        rates = self._groups.rates(opt_state.applied, opt_state.lr)
        others = _besides(opt_state, rates, keep)
        entered = enter(params, grads, opt_state.slots, others, donate=donate, spent=spent)
        known = None if entered is None else self._memo.find(entered)
        if entered is None or known is None:
            return Asked(None, entered, rates)
        facts, alone = known
        self._groups.check(opt_state)
        if isinstance(facts, bool) or self._kernel is None:
            if list(grads) != entered.names:  # a norm is summed in the order of the gradients
                return Asked(None, entered, rates)
            spent = entered.marks.spent and alone
            formula = FormulaPlan(self._formula, entered, rates, opt_state, spent, facts is True)
            return Asked(None, entered, rates, formula)
        plan = Plan(
            self._kernel,
            facts,
            [*entered.state, *entered.gradients],
            entered.gradients,
            rates,
            entered.marks.spent and alone and facts.spendable,
            functools.partial(_dict_of, entered.names),
            entered.weights,
            opt_state,
        )
        return Asked(plan, entered, rates)


def _besides(opt_state: OptState, rates: list[Any], keep: Sequence[Tensor]) -> list[Tensor]:
    """What is looked at after the first launch has written: a schedule may return what stands in
    the memory of a parameter.
    """
    lr = opt_state.lr
    moving = [rate for rate in rates if isinstance(rate, Tensor) and rate is not lr]
    return [opt_state.applied, *_tree.tensors(lr), *moving, *keep]


def _whole_count(applied: Any) -> int:
    if isinstance(applied, Tensor) and applied.ndim == 0:
        applied = applied.item()
    return _checks.whole("applied", applied, least=0)


def _cast_gradients(problem: Problem) -> dict[str, Tensor]:
    """The gradients in their parameters' dtypes."""
    dtypes = [problem.weights[name].dtype for name in problem.gradients]
    cast = _foreach.cast_list(list(problem.gradients.values()), dtypes, apart=False)
    return dict(zip(problem.gradients, cast, strict=True))


def _tree_of(problem: Problem, weights: dict[str, Tensor]) -> Tree:
    """Parameters in the structure of the given ones."""
    return problem.structure.unflatten([weights.get(name) for name in problem.names])


def _dict_of(names: list[str], leaves: list[Any]) -> dict[str, Any]:
    return dict(zip(names, leaves, strict=True))


def _resolved(leaf: Tensor) -> Tensor:
    return leaf.resolve_conj().resolve_neg() if leaf.is_neg() or leaf.is_conj() else leaf


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
