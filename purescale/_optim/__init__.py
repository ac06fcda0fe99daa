"""The protocol of an optimizer as pure functions, that of one over lists, and optimizers made of
others.

A step makes lists of its trees, `optimizer_inputs.OptimizerInputs`, and calls a `FlatOptimizer` in
this order: `plan(inputs)`, whose result `find_planned_step` finds again if arguments are alike;
`evaluate_settings`; `run_step`. Eagerly on a CPU `run_step` reads the flag of a skip, and a skipped
step returns the old state. Elsewhere, and if a derivative may go through the step, `step_or_skip`
calls `compute_step` and selects old or new by a mask, unless a subclass can skip a step itself.

optimizer         Optimizer, the protocol of trees, `init` and `step`; FlatOptimizer, that of lists:
                  its step is found by structure and metadata, or planned, and run
optimizer_inputs  parameters as a list, and the state, of a step
param_structure   the place of each parameter in its tree
opt_state         the state of a class of torch.optim, and where it is in the states of others
transformation    (init, update) pairs, as those of optax, as optimizers and back
partition         several optimizers, one for each kind of parameter

The classes of torch.optim are in `_torch_optim`, optimizers around another one in `_wrappers`.
Entry: `as_flat_optimizer`. Takes `Gradients`, which may still be scaled; hands on new parameters
and a new state.
May import: `_tree`, `_torch`.
"""
