"""Which training digits made a net better or worse at the test digits: the derivative of its test
loss by the weight of each, through the whole training, checked by training again without some.

Run `python examples/attribution.py`; it takes some seconds. Notebook 11 explains it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import purescale as ps

torch.manual_seed(0)
torch.set_num_threads(1)
digits = load_digits()
order = torch.randperm(len(digits.target))
images = torch.as_tensor(digits.data, dtype=torch.float32)[order] / 16
labels = torch.as_tensor(digits.target)[order]
train, test = 1024, slice(1024, 1088)
batches = torch.cat([torch.randperm(train).view(-1, 128) for _ in range(5)])

# -- a smooth net, and an eps that is not tiny: else the derivative predicts little
model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
apply, params, buffers = ps.make_functional(model)
optimizer = ps.from_torch(torch.optim.AdamW, lr=2e-3, eps=1e-4, differentiable=True)
rule = ps.NoScale()


def loss_fn(params, buffers, batch):
    x, y, weights = batch
    logits, buffers = apply(params, buffers, x)
    return (weights * F.cross_entropy(logits, y, reduction="none")).mean(), buffers


def step(state, index, weights):
    batch = images[index], labels[index], weights[index]
    return ps.train_step(state, [batch], loss_fn=loss_fn, optimizer=optimizer, rule=rule)


def test_loss(state):
    return F.cross_entropy(apply(state.params, state.buffers, images[test])[0], labels[test])


# -- the derivative
state = ps.init_train_state(params, buffers, optimizer, rule)
run = ps.vjp_through(step, state, batches, test_loss, wrt=torch.ones(train))
ranked = run.wrt.argsort()
print(f"test loss {run.value:.4f}")
for what, indices in (("helpful", ranked[:5]), ("harmful", ranked.flip(0)[:5])):
    print(what, ", ".join(f"a {labels[i]} ({1e4 * run.wrt[i]:+.1f}e-4)" for i in indices))

# -- the ordinary way to know: train again without 1 % of the digits, here all trainings in one call
without = torch.ones(40, train)
for weights in without:
    weights[torch.randperm(train)[:10]] = 0


def loss_after(weights):
    after = state
    for index in batches:
        after, _ = step(after, index, weights)
    return test_loss(after)


happened = torch.vmap(loss_after)(without)
predicted = run.value + (without - 1) @ run.wrt
ranks = [values.argsort().argsort().float() for values in (predicted, happened)]
score = torch.corrcoef(torch.stack(ranks))[0, 1]
print(f"rank correlation of predicted and real losses of {len(without)} trainings: {score:.3f}")
