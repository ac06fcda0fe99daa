"""Communication between ranks: flags, gradients in buckets, settings that must agree.

The stage `reduce` (`_step/reduce.py`) decides what is reduced and when; `_grads/measure.py`
does so for DTensors.

Entry: `collectives.all_reduce_grads` and `collectives.all_reduce_found_inf`, by hand;
`buckets.reduction_of`, many tensors in few messages, each sent while the next is filled;
`collectives.agree_on_all_ranks`, which raises on all ranks if one raises.
Hands on: a `buckets.Reduction`, whose `get` waits for the sums.
May import: `_tree`, `_torch`.
"""
