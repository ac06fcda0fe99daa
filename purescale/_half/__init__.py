"""Optimizers around others for parameters and state in half precision.

master_weights        float32 masters of half parameters
stochastic_rounding   half parameters that are rounded by chance
state_dtype           chosen slots kept narrow

Each is a `_optim.wrapper.Wrapper`: it decodes what is stored, lets the inner optimizer step, and
encodes the result.

Entry: `master_weights.with_master_weights`, `stochastic_rounding.with_stochastic_rounding`,
`state_dtype.with_state_dtype`.
May import: `_optim`, `_tree`, `_torch`.
"""
