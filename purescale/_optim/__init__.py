"""Optimizers as pure functions: classes of torch.optim, (init, update) pairs, those of a user.

The stage `flatten` is here, and what an optimizer does in the stage `update`: one call of
`conditional_step`, which skips or applies. Two engines make the step: torch's fused kernel
(`fused.py`) and torch's own formula (`unfused.py`).

Entry: `torch_optim.from_torch`, `protocol.from_transformation`; `step_inputs.flatten_step`.
Hands on: `step_inputs.StepInputs`, checked lists of tensors; new parameters and an
`opt_state.OptState`. What is to happen comes in as a `decision.Decision`.
May import: `_grads`, `_distributed`, `_tree`, `_torch`; not `_loss_scale`.
"""
