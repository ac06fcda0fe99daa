"""Optimizers as pure functions: classes of torch.optim, (init, update) pairs, those of a user.

A step makes lists of its trees, `step_inputs.StepInputs`, and calls an `Updater` in this order:
`plan(inputs)`, found again if arguments are alike (`planned.find_step`); `hyperparams`;
`step_unless(skip, ...)`. That launches torch's kernel if one fits, else it calls `apply_step`, and
selects old or new by a mask.

updater         Optimizer, the protocol: `init` and `step`; Updater, what a step calls beyond it
planned         a step found by structure and metadata, or planned
step_inputs     its lists, by the layout of the parameters in their tree
from_torch      an optimizer from a class of torch.optim
from_formula    an optimizer from the mathematics of one leaf
torch_optim     the optimizers of both. Settings: settings (a config), in_state, schedule. What
                they keep for each parameter: slot_spec. Their state: opt_state, torch_state_dict.
                Their step: launches (fused) of torch's kernels (kernels), or the formula
                (formula_step, formulas); of a user's class its own (user_class_step)
transformation  (init, update) pairs, as those of optax, as optimizers and back
partition       several optimizers, one for each kind of parameter

Entry: `from_torch.from_torch`, `from_formula.from_formula`; a step calls `updater.as_updater`.
Takes gradients that are still scaled, as `Gradients`; hands on new parameters and a new state.
May import: `_tree`, `_torch`.
"""
