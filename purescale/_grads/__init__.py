"""Gradients as lists of dense, real tensors: measured, clipped, averaged.

The stage `measure` is here. It reads the gradients once: are they finite, how large is their norm,
which is the largest. On a CPU in eager mode it also knows the answers as Python numbers.

Entry: `measure.measure`; `clip.check_clip` and `clip.clip_factor`, all rules of clipping, NaN
included; `accumulate.accumulate_grads`, a running mean that the caller steps from.
Hands on: `measure.GradStats`; `clip.Clip`, the bounds of a step; `accumulate.AccumState`.
May import: `_distributed`, `_tree`, `_torch`.
"""
