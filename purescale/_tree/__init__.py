"""Pytrees of tensors: flattened, compared, selected from, stacked; what a leaf may be.

Entry: `tree.flatten`. Hands on: leaves and their structure.
"""
