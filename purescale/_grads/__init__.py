"""Gradients as lists of dense, real tensors: measured, clipped, averaged.

Gradients are measured in one read: whether they overflow, their norm, and the largest magnitude,
by masks, or on a CPU in eager mode as Python numbers.

Entry: `measure.measure`, and for the two engines of a step `stats_by_masks` and `stats_on_host`;
`clip.check_clip` and `clip.clip_factor`; `accumulate.accumulate_grads`, a running mean for a loop
by hand.
Hands on: `measure.GradStats`; `clip.Clip`, the bounds of a step; `accumulate.AccumState`.
May import: `_distributed`, `_tree`, `_torch`.
"""
