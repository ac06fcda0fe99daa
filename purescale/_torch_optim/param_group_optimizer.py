"""Optimizers with settings and a state as those of torch.optim. Their steps are those of torch's
kernels or of a formula; for a class of a user's own see `user_class.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._optim.opt_state import OptState
from .._optim.optimizer import FlatOptimizer
from .._optim.optimizer_inputs import OptimizerInputs
from .._optim.param_structure import ParamStructure, named_params
from .._torch_optim.formula_step import FormulaStep
from .._torch_optim.formulas import LeafSlots
from .._torch_optim.in_state import with_stored
from .._torch_optim.kernel_in_trace import KernelStepInTrace
from .._torch_optim.kernel_step import KernelStep
from .._torch_optim.kernels import kernel_for
from .._torch_optim.param_groups import ParamGroup, build_param_groups, check_override_patterns
from .._torch_optim.settings import OptimizerConfig, StepSettings
from .._torch_optim.slots import COUNT, NO_SLOTS, SlotSpec, has_counts, slot_lists_of
from .._torch_optim.torch_state_dict import read_state_dict, write_state_dict
from .._tree import pytree
from .._tree.gradients import Gradients
from .._tree.leaves import describe
from .._tree.pytree import Tree


class ParamGroupOptimizer(FlatOptimizer):
    """An optimizer with settings by parameter group and an `OptState`, as torch.optim has them;
    made by `from_torch` and `from_formula`. It holds settings, never state. It is a
    `KernelOrFormulaOptimizer` or a `UserClassOptimizer`.
    """

    def __init__(self, config: OptimizerConfig) -> None:
        self.config, self.agreed_settings = config, config.agreed_settings
        self.runs_user_code = config.spec.runs_user_code
        self.differentiable, self.elementwise = config.differentiable, config.spec.elementwise

    def __repr__(self) -> str:
        return repr(self.config)

    def _init_slots(
        self, params: Mapping[str, Tensor], step_settings: StepSettings
    ) -> dict[str, LeafSlots]:
        """Return the slots of each parameter before its first step; by default none."""
        return {name: {} for name in params}

    def _with_slots(
        self, opt_state: OptState, params: Tree, slots: dict[str, LeafSlots]
    ) -> OptState:
        """Return the state with these slots, which are by parameter."""
        return opt_state._replace(slots=slots)

    def init(self, params: Tree) -> OptState:
        """Return the state before the first step, in fresh memory. Steps keep its structure, but
        for the first one of a class of your own."""
        opt_state, slots = self._init_state(params)
        if self.config.counts == "each" and self.config.needs_counts:
            for name, leaf in named_params(params).items():
                slots[name][COUNT] = torch.zeros((), dtype=torch.float32, device=leaf.device)
        return self._with_slots(opt_state, params, slots)

    def _init_state(self, params: Tree) -> tuple[OptState, dict[str, LeafSlots]]:
        """Return a new state without slots, and its slots by parameter."""
        named = named_params(params)
        check_override_patterns(self.config, tuple(named))
        device = next((leaf.device for leaf in named.values()), None)
        applied = torch.zeros((), dtype=torch.int64, device=device)
        iteration = applied.clone() if self.config.schedule_by == "iteration" else ()
        stored = self.config.init_stored(device)
        opt_state = with_stored(OptState(applied, {}, iteration=iteration), stored)
        if named:  # torch checks shapes, and needs no memory for it
            shapes = [torch.empty(p.shape, dtype=p.dtype, device="meta") for p in named.values()]
            self.config.spec.construct(shapes, self.config.for_all.values)
        return opt_state, self._init_slots(named, self.config.evaluate_settings(opt_state))

    def _checked_groups(self, inputs: OptimizerInputs) -> list[ParamGroup]:
        """Return the groups of a step. Refuse what is not a state of this optimizer."""
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
        self.config.check_state(opt_state)
        names = tuple(inputs.param_structure.names)
        if inputs.piece_positions is None:  # a piece need not have a parameter of each override
            check_override_patterns(self.config, names)
        return build_param_groups(self.config, names)

    def evaluate_settings(self, opt_state: OptState) -> StepSettings:
        """Return the settings of a step that may differ from those of the step before."""
        return self.config.evaluate_settings(opt_state)

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
                without names; if groups disagree on a setting in the state; if a schedule counts
                applied steps and `sd` has no count, or iterations and `iteration` is not given: no
                state dict of torch has it.
        """
        state, slots = read_state_dict(
            self.config, sd, *self._init_state(params), applied, iteration
        )
        return self._with_slots(state, params, slots)


class KernelOrFormulaPlan(NamedTuple):
    """The plan of a `KernelOrFormulaOptimizer`."""

    groups: list[ParamGroup]
    kernel_step: KernelStep | None = None  # None if no kernel takes these tensors


class KernelOrFormulaOptimizer(ParamGroupOptimizer):
    """A class of torch.optim or a formula of a user's: a step is torch's kernel or the formula."""

    can_step_in_pieces = True

    def __init__(self, config: OptimizerConfig) -> None:
        super().__init__(config)
        self.slot_spec = SlotSpec(config)
        self.kernel = kernel_for(config)
        self._formula_step = FormulaStep(config, self.slot_spec)

    def _init_slots(
        self, params: Mapping[str, Tensor], step_settings: StepSettings
    ) -> dict[str, LeafSlots]:
        """Return the slots of each parameter before its first step."""
        return self.slot_spec.init_slots(params, step_settings)

    def _with_slots(
        self, opt_state: OptState, params: Tree, slots: dict[str, LeafSlots]
    ) -> OptState:
        """Return the state with a tree like the parameters for each slot."""
        structure, names = pytree.flatten(params)[1], pytree.dotted_names(params)
        keys = dict.fromkeys([key for each in slots.values() for key in each]) or [NO_SLOTS]
        trees = {
            key: structure.unflatten([slots.get(name, {}).get(key, ()) for name in names])
            for key in keys
        }
        counts = trees.pop(COUNT, ())
        return opt_state._replace(slots=trees, counts=counts)

    def plan(self, inputs: OptimizerInputs) -> KernelOrFormulaPlan:
        """Return how a step is made. Refuse a state that does not belong to these parameters, as
        torch's kernels do not check what they read.
        """
        groups = self._checked_groups(inputs)
        params = dict(zip(inputs.param_structure.names, inputs.params, strict=True))
        self.slot_spec.check_slots(slot_lists_of(inputs.opt_state, inputs.param_structure), params)
        if self.config.needs_counts and not has_counts(inputs.opt_state):
            _check_counts(self.config, inputs.param_structure)
        if self.kernel is None or not self.kernel.supports_tensors(
            inputs.param_list, inputs.context
        ):
            return KernelOrFormulaPlan(groups)
        step_class = KernelStepInTrace if inputs.context.traced else KernelStep
        kernel_step = step_class(self.config, self.kernel, inputs, groups)
        return KernelOrFormulaPlan(groups, kernel_step)

    def step_or_skip(
        self,
        inputs: OptimizerInputs,
        grads: Gradients,
        skip: Tensor | None = None,
        *,
        in_place: bool = False,
    ) -> tuple[list[Tensor], Tree]:
        """Return parameters and state after a step, by a kernel if one can make or skip it."""
        kernel_step = inputs.plan.kernel_step
        if kernel_step is not None and kernel_step.supports_step(inputs, grads, skip):
            return kernel_step.run(inputs, grads, skip, in_place=in_place)
        return super().step_or_skip(inputs, grads, skip, in_place=in_place)

    def compute_step(
        self, inputs: OptimizerInputs, grads: Gradients
    ) -> tuple[list[Tensor], OptState]:
        """Return parameters and state after the step by the formula, in fresh memory."""
        return self._formula_step.run(inputs, grads)


def _check_counts(config: OptimizerConfig, param_structure: ParamStructure) -> None:
    """Refuse a gradient that is None where one count stands for the steps of all parameters."""
    pairs = zip(param_structure.names, param_structure.grad_indices, strict=True)
    if missing := [name for name, index in pairs if index is None]:
        raise ValueError(
            f"grads: that of {missing[0]} is None, and opt_state has one count of steps for all "
            f"parameters. {config.spec.name} needs that of each, because torch does not count a "
            "step without a gradient. Likely cause: a loss of some of the parameters, or one "
            'optimizer for two models. Fix: `from_torch(..., counts="each")`, and its `init`; or '
            "zeros, as `value_and_grad` returns them, which let momentum and decay go on."
        )
