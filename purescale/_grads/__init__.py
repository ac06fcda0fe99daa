"""Gradients as lists of dense, real tensors: measured, clipped, averaged.

The stage `measure` is here. It reads the gradients once: whether they are finite, their norm, and
the largest magnitude. On a CPU in eager mode it also returns these as Python numbers.

Entry: `measure.measure`; `clip.check_clip` and `clip.clip_factor`; `accumulate.accumulate_grads`, a
running mean for a loop by hand.
Hands on: `measure.GradStats`; `clip.Clip`, the bounds of a step; `accumulate.AccumState`.
May import: `_distributed`, `_tree`, `_torch`.
"""
