"""What reads values on the host, and so never belongs inside a step.

A user looks at these between two steps: which scale fits a batch, and which gradients overflow,
underflow or are zero. Every public function says in its first line that it syncs, or reads nothing
until it is printed.

Entry: `probe.probe_scales`, one batch at many scales; `grad_report.grad_report`, a table of one
tree of gradients.
Hands on: `probe.ScaleProbe`, `grad_report.GradReport`; both are tables when printed.
May import: every other room. Only the contents page imports this one.
"""
