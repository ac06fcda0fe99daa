"""A module as a pure function of its parameters and buffers, and in which dtype it computes.

The module is copied without its tensors, so that what happens to the user's module later cannot
reach the function, and no call leaves anything in it.

Entry: `functional.make_functional`, `policy.with_policy`, `norms.norms_in_float32`.
Hands on: `Apply`, called as `apply(params, buffers, *args)`, and the two dicts `params` and
`buffers`; `policy.Policy`, the dtypes of parameters, computation, output and norms.
May import: `_tree`, `_torch`.
"""
