"""Batch-norm statistics as values: accumulated, merged, written into buffers.

Entry: `bn_stats.accumulate_bn_stats`, `precise_bn.precise_bn`. Hands on: a `BNStatsState`.
"""
