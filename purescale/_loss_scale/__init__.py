"""The loss scale: rules that move it, scaling of a loss, unscaling of gradients.

Entry: `rules.DynamicScale`, `scaling.unscale_and_check`. Hands on: a `ScalerState`.
"""
