"""Pytrees of tensors: flatten, name, compare, select, stack; and checks of their leaves.

A state, its gradients and its buffers are trees. This room turns them into lists of leaves and
back, and refuses what cannot be a parameter or a gradient, naming the leaf, the cause and the fix.

Entry: `pytree.flatten` and `FlatTree.of`; `matching.matching_leaves`, of two trees in one
order; `aliasing.copy_aliased`, results apart from arguments; `gradients.Gradients.of_leaves`, which
makes leaves dense, real and local; `select.select`, old or new; `stacking.stack_states`, `ema.ema`,
`fingerprint.fingerprint`; `cache.TreeCache`, in which a plan is found by the trees of a call.
Hands on: `pytree.FlatTree`, the leaves of a tree and its structure; `gradients.Gradients`, dense,
real tensors with `as_leaves`, which turns results back into leaves.
What is known of a list: `dense_without_history`, that all are dense, real tensors of torch's own
types, without a `grad_fn`, made outside of inference mode. Of gradients: `owned`, that nobody else
can see their memory.
It is the lowest room that knows trees, so it has what all need besides trees: `scalars`,
checks of numbers; `hints`, for mistaken names; `poison`, for donated arguments.
May import: `_torch`. Only `pytree.py` and `_torch/private.py` call optree.
"""
