"""Classes of torch.optim and (init, update) pairs as pure functions.

Entry: `torch_optim.from_torch`. Hands on: an optimizer whose state is an `OptState`.
"""
