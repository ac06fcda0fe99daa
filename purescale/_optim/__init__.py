"""Optimizers as pure functions: classes of torch.optim, (init, update) pairs, those of a user.

This room has the stage `flatten`, and the optimizer's part of the stage `update`: `applied`, the
step from gradients that are unscaled and clipped. Whether it is skipped is decided by the engines
of a step; only torch's fused kernels skip by themselves (`masked`). torch's fused kernel makes the
step (`fused.py`), the class's own `step` (`class_step.py`), or its formula (`formulas.py`,
`formula_step.py`).

Entry: `torch_optim.from_torch`, `protocol.from_transformation`; `step_inputs.flatten_step`.
Takes: gradients that are still scaled, as `Gradients`, and the caller's `skip`.
Hands on: `step_inputs.StepInputs`, checked lists of tensors; new parameters and an
`opt_state.OptState`.
May import: `_tree`, `_torch`.
"""
