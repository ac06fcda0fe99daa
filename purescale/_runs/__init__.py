"""Whole runs as values: the derivative of a training, by replay.

A step is a pure function, so a run can be replayed from any state of it, with the same bits.

Entry: `vjp_through.vjp_through`.
Hands on: a `vjp_through.RunGradient`.
May import: `_step`, `_jit`, `_loss_scale`, `_checkpoint.py`, `_tree`, `_torch`.
"""
