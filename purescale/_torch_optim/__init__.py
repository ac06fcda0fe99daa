"""Optimizers with parameter groups and a state as those of torch.optim: its classes, a formula of
one leaf, a class of a user's own.

from_torch       an optimizer from a class of torch.optim, or of a user's
from_formula     an optimizer from the mathematics of one leaf
param_group_optimizer  the base of these optimizers: their state, state dicts; the plan of a step
                 by a kernel or a formula
settings         numbers and constants, for all parameters and by override (in_state: those that a
                 state holds; schedule: functions of a count)
param_groups     the parameters that the same overrides match
kernel_step      a step by launches of torch's kernels (kernels); of many tensors in a trace
                 kernel_in_trace
formula_step     a step by formulas (formulas), where no kernel fits
slots            the slots of a class, as lists, and what they must be
user_class       a step by the `step` of a user's class, on copies
torch_state_dict state dicts of torch, written and read

A kernel makes a step if it is right for the settings (`kernel_for`), the tensors
(`supports_tensors`, in the plan) and the values (`supports_step`); one that cannot take scaled
gradients (`_grads_are_ready`) gets unscaled ones.

Entry: `from_torch.from_torch`, `from_formula.from_formula`.
A step: `param_group_optimizer.KernelOrFormulaOptimizer`: `plan`, once for arguments that are alike,
then `step_or_skip`, which takes `Gradients` that may still be scaled.
May import: `_optim`, `_tree`, `_torch`.
"""
