"""A module as a function of its parameters and buffers, and in which dtype it computes.

Entry: `functional.make_functional`, `policy.with_policy`. Hands on: `apply`, `params`, `buffers`.
"""
