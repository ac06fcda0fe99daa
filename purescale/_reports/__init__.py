"""Reports, which read values on the host, and so are never part of a step.

They are for use between two steps: which scale fits a batch, which gradients overflow, underflow or
are zero, which module overflows first, how much of an update arrives. The first line of a public
function says whether it syncs.

Entry: `probe.probe_scales`, one batch at many scales; `grad_report.grad_report`, a table of one
tree of gradients; `forward_report.forward_report`, one of what each module returned;
`update_report.update_report`, one of what has arrived in each parameter.
Hands on: `ScaleProbe`, `GradReport`, `ForwardReport`, `UpdateReport`; all print as tables
(`printing.py`).
May import: every room below it.
"""
