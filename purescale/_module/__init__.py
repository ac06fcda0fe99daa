"""Modules as pure functions of their parameters and buffers, and the dtypes in which they compute.

A call makes a copy of the model around its tensors, runs the forward in it, reads the buffers from
it and drops it. What a copy consists of is found once, so that later changes to the user's module
do not reach the function, and a call does not change the module.

once:    model -> registered_tensors (their names, state attributes among them) -> recipe_of
         -> Recipe (rows of all objects) -> with_modes, one for train=False and one for train=True
a call:  params, buffers -> Recipe.make_copy -> ModelCopy -> its forward -> new_buffers
         The first ones also warn of state that the copy takes with it: lost_state.py

Entry: `functional.make_functional`, `load_into.load_into`, its inverse, `policy.with_policy`,
`policy.norms_in_float32`.
Hands on: `Apply`, called as `apply(params, buffers, *args)`, and the two dicts `params` and
`buffers`; `policy.Policy`, the dtypes of parameters, computation, output and norms.
May import: `_tree`, `_torch`.
"""
