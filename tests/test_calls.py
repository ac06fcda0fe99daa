"""What a warm eager step runs beside the loop that it replaces."""

import torch
import torch.nn.functional as F
from helpers import Dispatched, cross_entropy_of
from torch import nn

import purescale as ps


def net():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 5),
    )


def batches(number):
    return [(torch.randn(8, 3, 8, 8), torch.randint(0, 5, (8,))) for _ in range(number)]


def a_step(number, max_norm=None):
    """A donated step of this package over `number` microbatches."""
    apply, params, buffers = ps.make_functional(net())
    optimizer, rule = ps.from_torch(torch.optim.AdamW, lr=1e-3), ps.DynamicScale()
    states = [ps.init_train_state(params, buffers, optimizer, rule)]
    data, loss_fn = batches(number), cross_entropy_of(apply)
    settings = {"loss_fn": loss_fn, "optimizer": optimizer, "rule": rule}
    settings |= {"max_norm": max_norm, "donate": True}

    def step():
        states[0] = ps.train_step(states[0], data, **settings)[0]

    return step


def grad_scalers_step(number, max_norm=None):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cpu")
    data = batches(number)

    def step():
        optimizer.zero_grad()
        for x, y in data:
            scaler.scale(F.cross_entropy(model(x), y) / number).backward()
        if max_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()

    return step


def operators(function):
    """The operators that the third call runs."""
    function(), function()
    with Dispatched() as run:
        function()
    return len(run.ops)


def test_a_warm_eager_step_runs_few_operators_beside_those_of_grad_scalers_loop():
    assert operators(a_step(1)) <= 1.5 * operators(grad_scalers_step(1))
