"""Optimizers as pure functions: classes of torch.optim, (init, update) pairs, those of a user.

A step makes lists of its trees, `step_inputs.StepInputs`, and calls a `FlatOptimizer` in this
order: `plan(inputs)`, whose result is found again if arguments are alike (`find_step`);
`step_settings`; `run_step`, by `step_or_keep`. That calls `apply_step` and selects old or new by a
mask; that of `from_torch` launches torch's kernel if one fits, for which no mask is needed.

optimizer       Optimizer, the protocol of trees, `init` and `step`; FlatOptimizer, that of lists:
                its step is found by structure and metadata, or prepared, and skipped or applied
param_layout    the place of each parameter in its tree
step_inputs     parameters as a list, and the state, of a step
from_torch      an optimizer from a class of torch.optim
from_formula    an optimizer from the mathematics of one leaf
param_groups    the optimizers of both, with parameter groups. Settings: settings (a config),
                in_state, schedule. Their state: opt_state, torch_state_dict. Their step: launches
                (kernel_step) of torch's kernels (kernels), or the formula (formula_step, formulas);
                of a user's class its own (user_class_step)
transformation  (init, update) pairs, as those of optax, as optimizers and back
partition       several optimizers, one for each kind of parameter

Entry: `from_torch.from_torch`, `from_formula.from_formula`; a step calls `as_flat_optimizer`.
Takes `Gradients`, which may still be scaled; hands on new parameters and a new state.
May import: `_tree`, `_torch`.
"""
