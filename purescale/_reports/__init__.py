"""Reports for use between two steps: safe loss scales, overflow and underflow of gradients, the
module that overflows first, the share of an update that arrives.

They read values on the host, so they are never part of a step. The first line of a public function
says if it syncs.

Entry: `probe.probe_scales`, one batch at many scales; `grad_report.grad_report`, a table of
gradients; `forward_report.forward_report`, a table of module outputs;
`update_report.update_report`, a table of the update that arrived in each parameter.
Hands on: `ScaleProbe`, `GradReport`, `ForwardReport`, `UpdateReport`; all print as tables
(`printing.py`).
May import: `_step`, `_loss_scale`, `_grads`, `_batch_norm`, `_wrappers`, `_torch_optim`, `_optim`,
`_module`, `_distributed`, `_tree`, `_torch`.
"""
