"""A pure function of trees as one graph, traced without values and compiled.

The room knows nothing of losses, scales or optimizers: a step is a function like any other.

a call:  trees -> tensors and their form -> the program of that form -> tensors -> trees
once:    form -> `pure_graph.trace` -> `pure_graph.compiled`, or `pure_graph.scanned`

replay: trees -> tensors -> the program in whose memory the state is -> one graph of the device

Entry: `jit.jit`; `scan_steps.scan_steps`, many calls of a jitted step as one graph;
`capture.capture`, a step as a graph of the device.
Hands on: `pure_graph.PureGraph`, operators without writes; `jit.Program`, that graph compiled for
arguments that differ in values only.
May import: `_tree`, `_torch`.
"""
