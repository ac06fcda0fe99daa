"""Optimizers around others.

wrapper               what they share: decode what is stored, step, encode
pieces                a large step in pieces
master_weights        float32 masters of half parameters
stochastic_rounding   half parameters that are rounded by chance
state_dtype           chosen slots kept narrow
schedule_free         an average in place of a schedule
rounding              to half precision, on bits

Each is a `wrapper.Wrapper`: it decodes what is stored, lets the inner optimizer step, and encodes
the result.

Entry: `master_weights.with_master_weights`, `stochastic_rounding.with_stochastic_rounding`,
`state_dtype.with_state_dtype`, `schedule_free.with_schedule_free`.
May import: `_optim`, `_tree`, `_torch`.
"""
