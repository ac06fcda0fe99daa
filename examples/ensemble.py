"""A sweep of learning rates as an ensemble: eight nets, each with its own rate and loss scale, in
one compiled step.

Then one of them again, alone, with torch's own AdamW: the same numbers.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import purescale as ps

torch.manual_seed(0)
images, labels = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
images = images.float() / 16
train, test = slice(0, 1500), slice(1500, None)
rates = torch.logspace(-4, -0.5, 8)


def net():
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))


model = net()
apply, params, buffers = ps.make_functional(model)
optimizer = ps.from_torch(torch.optim.AdamW, lr=1e-3, in_state=("lr",))
rule = ps.DynamicScale(init_scale=2.0**10)


def loss_fn(params, buffers, batch):
    x, y = batch
    logits, buffers = apply(params, buffers, x)
    return F.cross_entropy(logits, y), buffers


def step(state, batch):
    return ps.train_step(state, [batch], loss_fn=loss_fn, optimizer=optimizer, rule=rule)


# -- one state a rate, stacked
state = ps.init_train_state(params, buffers, optimizer, rule)
states = [ps.replace_settings(state, lr=rate) for rate in rates]
ensemble = ps.stack_states(states)
# -- every member sees the same batch
every = torch.compile(torch.vmap(step, in_dims=(0, None)), fullgraph=True)

batches = [
    (images[train][at : at + 50], labels[train][at : at + 50]) for at in range(0, 1500, 50)
] * 4
for batch in batches:
    ensemble, info = every(ensemble, batch)

logits = torch.vmap(lambda params: apply(params, buffers, images[test])[0])(ensemble.params)
accuracy = (logits.argmax(-1) == labels[test]).float().mean(-1)
print(" rate      loss   test accuracy")
for row in zip(rates.tolist(), info.loss.tolist(), accuracy.tolist(), strict=True):
    print("{:.5f}   {:.4f}   {:.3f}".format(*row))

# -- the ordinary way, for one of the rates
member = 4
alone = torch.optim.AdamW(model.parameters(), lr=rates[member].item())
for x, y in batches:
    alone.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    alone.step()
print(
    f"rate {rates[member]:.5f} alone with torch.optim.AdamW: loss {loss.item():.4f}, in the "
    f"ensemble {info.loss[member].item():.4f}"
)
