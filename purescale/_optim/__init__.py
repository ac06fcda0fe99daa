"""Optimizers as pure functions: classes of torch.optim, (init, update) pairs, those of a user.

A step makes lists of its trees, `step_inputs.StepInputs`, and asks an optimizer for the rest by the
methods of `updater.Updater`: `plan`, `current_settings`, `apply_step_unless(skip, ...)`.

protocol        Optimizer, `init` and `step`; (init, update) pairs
torch_optim     from_torch: a class of torch.optim. Its settings: settings, in_state, schedule.
                What it keeps for each parameter: slot_layout. Its state: opt_state,
                torch_state_dict. Its step: torch's fused kernel (fused), or its
                formula (formula_step, formulas); of a user's class its own (class_step)
from_formula    an optimizer from the mathematics of one leaf
partition       several optimizers, one for each kind of parameter
wrapper         an optimizer around another: schedule_free; those of half precision are in `_half`

Entry: `torch_optim.from_torch`, `from_formula.from_formula`; a step calls `updater.as_updater`.
Takes gradients that are still scaled, as `Gradients`; hands on new parameters and a new state.
May import: `_tree`, `_torch`.
"""
