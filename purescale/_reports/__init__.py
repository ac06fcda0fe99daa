"""Reports, which read values on the host, and so are never part of a step.

They are for use between two steps: which scale fits a batch, and which gradients overflow,
underflow or are zero. The first line of a public function says whether it syncs.

Entry: `probe.probe_scales`, one batch at many scales; `grad_report.grad_report`, a table of one
tree of gradients.
Hands on: `probe.ScaleProbe`, `grad_report.GradReport`; both print as tables.
May import: every room below it.
"""
