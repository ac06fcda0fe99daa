"""Gradients as lists of dense, real tensors: measured, clipped, averaged.

Gradients are measured together: whether they overflow, their norm, and the largest magnitude. On a
CPU one pass gives overflow and 2-norm, and another one the largest magnitude; elsewhere, and for
another norm, one pass gives overflow and largest magnitude, and another one the norm.

Entry: `measure.measure`, whose specification is `measure.measure_exactly`, of which
`local_stats.local_stats` is the part of one rank, and `stats_over_ranks` what several tell each
other; `clip.as_clip_options` and `clip.clip_factor`; `accumulate.accumulate_grads`, a running mean
for a loop by hand. `Gradients` are in `_tree`, because optimizers take them too.
Hands on: `measure.GradStats`; `clip.ClipOptions`, the bounds of a step; `accumulate.AccumState`.
May import: `_distributed`, `_tree`, `_torch`.
"""
