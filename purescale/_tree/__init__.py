"""Pytrees of tensors: flatten, name, compare, select, stack; and what a leaf may be.

A state, its gradients and its buffers are trees. Here they become lists of leaves and trees again,
and what cannot be a parameter or a gradient is refused, naming the leaf, the cause and the fix.

Entry: `tree.flatten` and `tree.flatten_once`; `leaves.normalize`, which makes leaves dense, real
and local; `select.select`, old or new; `stack.stack_states`.
Hands on: `tree.Flat`, the leaves of a tree and its structure; `leaves.Normalized`, dense, real
tensors, with `restore`, the way back to leaves.
May import: `_torch`. `tree.py` is the only importer of optree.
"""
