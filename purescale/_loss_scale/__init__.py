"""The loss scale: rules that update it, scaling of a loss, unscaling of gradients.

A rule is settings with two pure methods, `init(device)` and `update(scaler, found_inf)`. Gradients
are unscaled with the state that scaled the loss; `update` returns another one.

Entry: `rules.DynamicScale` and its kin, `headroom.HeadroomScale`; `scaling.scale_loss`,
`scaling.unscale_and_check`, `check_scaler.check_scaler`; `rules.call_rule`, how a step calls a
rule.
Hands on: a state with a `scale`, `rules.ScalerState` or `headroom.HeadroomState`.
May import: `_grads`, `_distributed`, `_tree`, `_torch`.
"""
