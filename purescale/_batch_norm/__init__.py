"""Batch-norm statistics as values: captured in a forward, accumulated, merged, written to buffers.

Means and squared deviations are merged without loss, over batches and over ranks. The running
averages of a window (`bn_update="window"`) come from here too.

Entry: `precise_bn.precise_bn`, for a whole loader; `bn_stats.accumulate_bn_stats`, batch by batch;
`bn_inputs.CaptureBatchNorm`, the statistics that each batch norm of a forward computes.
Hands on: a `bn_stats.BNStatsState`; `bn_stats.bn_buffers` makes buffers of it.
May import: `_module`, `_distributed`, `_tree`, `_torch`.
"""
