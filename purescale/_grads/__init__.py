"""Gradients as lists of tensors: what one read of them tells, clipping, averaging over microbatches.

Entry: `grad_stats.grad_stats`. Hands on: a `GradStats`.
"""
