"""Optimizers as pure functions: classes of torch.optim, (init, update) pairs, those of a user.

A step plans once what structure decides, `planned.plan_step`: it makes lists of its trees,
`step_inputs.StepInputs`, and asks an optimizer for the rest by the methods of `updater.Updater`:
`plan`, then in each step `current_settings` and `step_unless(skip, ...)`.

updater         Optimizer, the protocol: `init` and `step`; Updater, what a step calls beyond it
planned         a step found by structure and metadata, or planned;  step_inputs  its lists
torch_optim     from_torch: a class of torch.optim. Its settings: settings, in_state, schedule.
                What it keeps for each parameter: slot_layout. Its state: opt_state,
                torch_state_dict. Its step: launches (fused) of torch's kernels (kernels),
                or its formula (formula_step, formulas); of a user's class its own (class_step)
from_formula    an optimizer from the mathematics of one leaf
transformation  (init, update) pairs, as those of optax, as optimizers and back
partition       several optimizers, one for each kind of parameter

Entry: `torch_optim.from_torch`, `from_formula.from_formula`; a step calls `updater.as_updater`.
Takes gradients that are still scaled, as `Gradients`; hands on new parameters and a new state.
May import: `_tree`, `_torch`.
"""
