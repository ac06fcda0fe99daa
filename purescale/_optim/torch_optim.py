"""Classes of torch.optim as pure functions: `from_torch`, `init`, `step`, state dicts."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._optim.formula_step import FormulaStep
from .._optim.fused import FusedStep, TorchPlan
from .._optim.in_state import map_numbers, stored_settings, with_stored
from .._optim.opt_state import (
    NO_SLOTS,
    STEP,
    OptState,
    Tensors,
    count_step,
    has_counts,
    with_columns,
)
from .._optim.schedule import Schedule, ScheduleBy
from .._optim.settings import (
    Counts,
    CurrentSettings,
    OptimizerConfig,
    Overrides,
    spec_of_class,
)
from .._optim.slot_layout import SlotLayout
from .._optim.step_inputs import ParamLayout, StepInputs, foreign_parameters, named_params
from .._optim.torch_state_dict import read_state_dict, write_state_dict
from .._optim.updater import Updater
from .._optim.user_class_step import step_of_user_class
from .._torch import foreach
from .._torch.tracing import captured, traced
from .._tree import pytree
from .._tree.gradients import Gradients
from .._tree.leaves import describe
from .._tree.pytree import Tree


def from_torch(
    cls: type[torch.optim.Optimizer],
    lr: float | Tensor | Schedule | None = None,
    overrides: Overrides | None = None,
    in_state: Sequence[str] = (),
    schedule_by: ScheduleBy = "applied",
    counts: Counts = "one",
    **settings: Any,
) -> TorchOptimizer:
    """Equal to `opt = cls(params, lr=lr, **settings); opt.step()` on copies of everything: bit for
    bit where torch's fused kernel runs, to 1e-6 where the class's formula does. For half
    parameters it is equal to that step in float32, rounded to the dtypes that are kept.

    The result has `init(params)`, `step(params, grads, opt_state)`, `to_state_dict(opt_state)` and
    `from_state_dict(sd, params)`, in torch.optim's format, for any pytree of parameters. Step hooks
    do not run. `.backward()` can go through a step only with `differentiable=True`; without it, it
    is refused.

    A step uses torch's fused kernel if the class has one for the dtypes and device, and otherwise
    the class's formula, which never syncs and can be compiled, mapped and differentiated. These
    agree to 1e-6 (Muon, which iterates in bfloat16, to 1e-2 of the update).

    Args:
        cls: A class of torch.optim, a subclass, or a class of your own. A class with a `step` of
            its own is called eagerly, on copies. It makes its slots in its first step. What changes
            must be in its `state`: a list or a dict that is an attribute is as before in each step.
            A step reads the flag of such a class, and waits for it on an accelerator.
        lr: A number, a 0-d tensor (which can be differentiated), or a schedule: a function from a
            count of steps, a 0-d int64 tensor, to the learning rate. `schedule_from_torch` makes
            one from a scheduler of torch. A negative number is refused, also from a schedule where
            the host can read it (on a CPU, in eager mode). A tensor that is given here, in
            `overrides` or in the state is not checked: a step with a negative rate goes up the
            gradient, which finite differences at 0 need.
        overrides: Settings for some parameters, by dotted name or glob, or by a tuple of these.
            `{("*.bias", "norm*"): {"weight_decay": 0.0}, "head.*": {"lr": 1e-2}}`. A setting of a
            parameter is that of its last override with such a name, else the number in the state
            times its schedule, if it has these, else what is given here.
        in_state: Names of settings to keep in the state as 0-d float32 tensors, so that one
            compiled step serves every value and they can be vmapped, saved and differentiated. The
            rate is `opt_state.lr`, the others are in `opt_state.hyper`;
            `replace_settings(state, lr=...)` changes them. Each of these numbers may be a schedule,
            as `weight_decay=lambda count: 0.04 + 1e-4 * count`; the state then holds a factor of
            it, which starts at 1.
        schedule_by: What schedules count: `"applied"` steps, or by `"iteration"`, that is skipped
            steps too, as a loop of torch does that calls `scheduler.step()` once a batch or once an
            epoch. The count is `opt_state.iteration`, and a skipped step changes nothing else.
        counts: `"one"` counts the steps of all parameters together, in `opt_state.applied`, and a
            step refuses a gradient that is None if the class counts steps. `"each"` counts those of
            each parameter as torch does, in `opt_state.counts`: one whose gradient is None makes
            none, as where one optimizer trains two models in turn.
        settings: The settings of the class. If a flag of torch's implementations is named
            (`foreach`, `capturable`, `fused=False`), or with `differentiable=True`, the formula
            runs.

    Returns:
        An optimizer that holds settings and no state.

    Raises:
        TypeError, ValueError: If torch refuses a setting; if a schedule reads the value of the
            count, or stands for a setting that is not in the state; if a name in `in_state` is not
            a number of the formula. Also for parameters (give them to `init`), LBFGS and
            SparseAdam. `init` and `step` raise if a pattern in `overrides` matches no parameter;
            `step` raises before any work if the state does not fit the parameters.

    Example:
        >>> import torch
        >>> optimizer = from_torch(torch.optim.SGD, lr=0.5, momentum=0.9)
        >>> params = {"w": torch.tensor([1.0])}
        >>> state = optimizer.init(params)
        >>> params, state = optimizer.step(params, {"w": torch.tensor([1.0])}, state)
        >>> params, state.applied
        ({'w': tensor([0.5000])}, tensor(1))

    Source of the rules: torch.optim.
    """
    if torch.compiler.is_compiling():
        raise ValueError(
            "from_torch was called inside of a compiled function, where torch's optimizers cannot "
            "be made. Fix: make the optimizer outside; a rate that the function is given goes "
            "through from_torch(..., in_state=('lr',)) and replace_settings(opt_state, lr=...)."
        )
    spec = spec_of_class(cls)
    return TorchOptimizer(
        OptimizerConfig(
            spec,
            lr,
            overrides or {},
            settings,
            in_state=in_state,
            schedule_by=schedule_by,
            counts=counts,
        )
    )


class TorchOptimizer(Updater):
    """A class of torch.optim as pure functions; made by `from_torch` and `from_formula`. It
    holds settings, never state.
    """

    def __init__(self, config: OptimizerConfig) -> None:
        self.config, self.must_agree = config, config.must_agree
        self.may_add_slots = config.spec.calls_user_step  # in its first step
        self.runs_user_code = config.spec.runs_user_code
        self.differentiable, self.elementwise = config.differentiable, config.spec.elementwise
        self._slot_layout = SlotLayout(config)
        counts_steps = self._slot_layout.counts_steps
        self._fused_step = FusedStep(config, counts_steps=counts_steps)
        self._step: Any = (
            functools.partial(step_of_user_class, config)
            if self.config.spec.calls_user_step
            else FormulaStep(config, self._slot_layout)
        )

    def __repr__(self) -> str:
        return repr(self.config)

    def init(self, params: Tree) -> OptState:
        """Return the state before the first step, in fresh memory. Steps keep its structure, but
        for the first one of a class of your own."""
        opt_state, slots = self._init_state(params)
        if self.config.counts == "each" and self._slot_layout.counts_steps:
            for name, leaf in named_params(params).items():
                slots[name][STEP] = torch.zeros((), dtype=torch.float32, device=leaf.device)
        return self._with_slots(opt_state, params, slots)

    def _init_state(self, params: Tree) -> tuple[OptState, dict[str, Tensors]]:
        """Return a new state without slots, and its slots by parameter."""
        named = named_params(params)
        self.config.check_names(tuple(named))
        device = next((leaf.device for leaf in named.values()), None)
        applied = torch.zeros((), dtype=torch.int64, device=device)
        iteration = applied.clone() if self.config.schedule_by == "iteration" else ()
        stored = self.config.init_stored(device)
        opt_state = with_stored(OptState(applied, {}, iteration=iteration), stored)
        return opt_state, self._slot_layout.init_slots(named, self.config.current(opt_state))

    def _with_slots(self, opt_state: OptState, params: Tree, slots: dict[str, Tensors]) -> OptState:
        """Return the state with these slots by parameter, the count of each among them."""
        if self.config.spec.calls_user_step:
            return opt_state._replace(slots=slots)
        structure, names = pytree.flatten(params)[1], pytree.names(params)
        keys = dict.fromkeys([key for entry in slots.values() for key in entry]) or [NO_SLOTS]
        columns = {key: [slots.get(name, {}).get(key, ()) for name in names] for key in keys}
        return with_columns(opt_state, {k: structure.unflatten(c) for k, c in columns.items()})

    def plan(self, inputs: StepInputs) -> TorchPlan:
        """Return how a step is made. Refuse a state that does not belong to these parameters."""
        opt_state = inputs.opt_state
        if not isinstance(opt_state, OptState):
            raise TypeError(
                f"opt_state is {type(opt_state).__name__}. Fix: `opt_state = "
                "optimizer.init(params)`, or what the last step returned."
            )
        if opt_state.applied.ndim:
            raise ValueError(
                f"opt_state: applied is {describe(opt_state.applied)}; expected one number. Likely "
                "cause: stacked states outside of torch.vmap. Fix: "
                "`torch.vmap(optimizer.step)(params, grads, opt_state)`."
            )
        if self.config.spec.calls_user_step and (traced() or captured()):
            raise ValueError(
                f"{self.config.spec.name} has a step of its own, which is called and cannot "
                "be compiled, captured, mapped or differentiated. Fix: call the step eagerly, take "
                "a class of torch.optim, or write an (init, update) pair for from_transformation."
            )
        names = tuple(inputs.layout.names)
        groups = self.config.torch_groups(names)
        if self.config.spec.calls_user_step:
            plan = TorchPlan(groups)
            if opt_state.slots.keys() != set(names):
                raise foreign_parameters(list(opt_state.slots), list(names))
        else:
            self._slot_layout.check(inputs.columns, dict(zip(names, inputs.params, strict=True)))
            if self._slot_layout.counts_steps and not has_counts(opt_state):
                _check_counts(self.config, inputs.layout)
            plan = self._fused_step.plan(inputs, groups)
        self.config.check(opt_state)
        if inputs.piece_positions is None:  # a piece need not have a parameter of each override
            self.config.check_names(names)
        return plan

    def current_settings(self, opt_state: OptState) -> CurrentSettings:
        """Return the settings of a step that may differ from those of the step before."""
        return self.config.current(opt_state)

    def apply_step(
        self, inputs: StepInputs, grads: Gradients, plan: TorchPlan, current: CurrentSettings
    ) -> tuple[list[Tensor], Tree]:
        """Return parameters and state after the step by the formula, or the class, in fresh
        memory.
        """
        leaves = _cast_gradients(inputs.grads_like_params(grads), inputs.params)
        params, state = self._step(inputs, leaves, plan.groups, current)
        return params, self._counted(state)

    def step_unless(
        self,
        skip: Tensor | None,
        inputs: StepInputs,
        grads: Gradients,
        plan: TorchPlan,
        current: CurrentSettings,
        *,
        in_place: bool = False,
    ) -> tuple[list[Tensor], Tree]:
        """Return parameters and state after a step that a fused kernel skips itself, if one can."""
        fused_step = self._fused_step
        if not fused_step.can_run(plan, inputs, grads, current):
            return super().step_unless(skip, inputs, grads, plan, current, in_place=in_place)
        if not plan.in_trace:
            params, state = fused_step(plan, inputs, grads, current, skip, in_place=in_place)
            return params, count_step(state, skip, in_place=True)
        if torch.compiler.is_dynamo_compiling():
            params, state = fused_step.in_dynamo(inputs, grads, current, skip, in_place=in_place)
        else:
            params, state = fused_step.in_a_graph(plan, inputs, grads, current, skip)
        return params, self._counted(state, skip)

    def _counted(self, state: OptState, skip: Tensor | None = None) -> OptState:
        """Return the state after a step that has not been counted yet, in fresh memory."""
        stored = map_numbers(self._copy, stored_settings(state))
        return with_stored(count_step(state, skip), stored)

    def _copy(self, tensor: Tensor) -> Tensor:
        """Copy into fresh memory, on the graph only if the step is to be differentiated."""
        return (tensor if self.differentiable or traced() else tensor.detach()).clone()

    def widened(self, opt_state: OptState, dtype: torch.dtype) -> OptState:
        """Return the state for parameters of at least this dtype. Step counts keep theirs."""

        def widen(slot: Tensor) -> Tensor:
            return slot.to(torch.promote_types(slot.dtype, dtype))

        slots = {
            key: tree if self._slot_layout.is_scalar(key) else pytree.map(widen, tree)
            for key, tree in opt_state.slots.items()
        }
        return opt_state._replace(slots=slots)

    # ---- state dicts

    def to_state_dict(
        self,
        opt_state: OptState,
        initial_lr: float | None = None,
        like: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Equal to `cls(groups).state_dict()` of an optimizer that was made with names and made the
        same steps, with copied tensors and the current `lr`. Syncs with the host.

        The first group has the parameters that no override matches; the groups of the overrides
        follow, and each has its `param_names`. torch's `load_state_dict` goes by position and does
        not look at the names: give it `to_state_dict(opt_state, like=theirs.state_dict())`, or make
        `theirs` from the groups of this dict, `cls([{"params": [(n, model.get_parameter(n)) for n
        in group["param_names"]]} for group in sd["param_groups"]])`.

        torch takes the flags of a loaded optimizer from the dict, so to load it into
        `AdamW(params, fused=True)` without `like`, make this optimizer with `fused=True` too.

        Args:
            opt_state: The state of this optimizer.
            initial_lr: The rate that a new scheduler of torch multiplies, such as `LambdaLR(theirs,
                f, last_epoch=...)`. By default it is the larger of a schedule's first and current
                rate (for a schedule that warms up, give its peak), or `opt_state.lr` if the
                schedule multiplies a rate in the state.
            like: The state dict of the torch optimizer that will load the result, which then has
                its groups, order, flags, and what it has of other parameters. Parameters are found
                in it as `from_state_dict` finds them.

        Raises:
            ValueError: If `like` has other parameters, several groups without names, or the
                parameters of two groups in one.
        """
        return write_state_dict(self.config, opt_state, initial_lr, like)

    def from_state_dict(
        self,
        sd: Mapping[str, Any],
        params: Tree,
        applied: int | Tensor | None = None,
        iteration: int | Tensor | None = None,
    ) -> OptState:
        """Return the state in `cls(groups).state_dict()`, copied. Syncs with the host. A
        setting is taken from the dict only if `in_state` names it.

        Parameters are found by name if the groups of `sd` have `param_names`, as `to_state_dict`
        writes them, and torch for an optimizer made from `model.named_parameters()`. Without names
        `sd` must be one group with the parameters in the order of `params`.

        Args:
            sd: A state dict of torch.optim or of `to_state_dict`. To name the parameters of one
                without names, put a list `param_names` into each group.
            params: The parameters. What `sd` has of others is left out if it has names.
            applied: The number of applied steps, from which a schedule goes on:
                `scheduler.last_epoch` of a scheduler that stepped with the optimizer. By default it
                is the largest step count in `sd`. A class without step counts (SGD, Muon) starts at
                1 if `sd` has any state, else at 0.
            iteration: The number of steps with the skipped ones, from which a schedule by iteration
                goes on: `scheduler.last_epoch` of a scheduler that stepped once a batch. Without a
                schedule it is `applied` by default.

        Raises:
            ValueError: If the state is that of another class or model; if `sd` has several groups
                without names; if groups disagree on a setting in the state; if a schedule needs a
                count and `sd` has none; none has that of iterations.
        """
        counts_steps = self._slot_layout.counts_steps
        state, slots = read_state_dict(
            self.config, sd, *self._init_state(params), applied, iteration, counts_steps
        )
        return self._with_slots(state, params, slots)


def _check_counts(config: OptimizerConfig, params: ParamLayout) -> None:
    """Refuse a gradient that is None where one count stands for the steps of all parameters."""
    pairs = zip(params.names, params.grad_indices, strict=True)
    if missing := [name for name, index in pairs if index is None]:
        raise ValueError(
            f"grads: that of {missing[0]} is None, and opt_state has one count of steps for all "
            f"parameters. {config.spec.name} needs that of each, because torch does not count a "
            "step without a gradient. Likely cause: a loss of some of the parameters, or one "
            'optimizer for two models. Fix: `from_torch(..., counts="each")`, and its `init`; or '
            "zeros, as `value_and_grad` returns them, which let momentum and decay go on."
        )


def _cast_gradients(grad_leaves: list[Tensor | None], params: list[Tensor]) -> list[Tensor | None]:
    """Return the gradients in the dtype of their parameters. Complex ones are not clamped to a
    range.
    """
    pairs = [(g, p.dtype) for g, p in zip(grad_leaves, params, strict=True) if g is not None]
    leaves, dtypes = [g for g, _ in pairs], [dtype for _, dtype in pairs]
    remaining = iter(foreach.cast(leaves, dtypes, bounded=not any(map(Tensor.is_complex, leaves))))
    return [None if gradient is None else next(remaining) for gradient in grad_leaves]
