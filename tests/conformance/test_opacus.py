"""Private training beside Opacus: gradients clipped per sample, summed, without their noise."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import purescale as ps

opacus = pytest.importorskip("opacus")

BOUND, ROWS = 0.3, 16


def batches():
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(ROWS, 8, generator=generator),
            torch.randint(0, 3, (ROWS,), generator=generator),
        )
        for _ in range(20)
    ]


def trained_by_opacus(model):
    private = opacus.GradSampleModule(model)
    sgd = torch.optim.SGD(private.parameters(), lr=0.1, momentum=0.9)
    settings = {"noise_multiplier": 0.0, "max_grad_norm": BOUND, "expected_batch_size": ROWS}
    optimizer = opacus.optimizers.DPOptimizer(sgd, **settings)
    for x, y in batches():
        F.cross_entropy(private(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


POLICIES = {
    "float32": ("float32", 1e-5),
    "float16": ("params=float32,compute=float16,output=float32", 3e-3),
}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("name", POLICIES)
def test_a_step_clipped_per_sample_is_that_of_opacus(name):
    policy, tolerance = POLICIES[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 3))
    expected = trained_by_opacus(copy.deepcopy(model))

    apply, params, _ = ps.make_functional(model)
    forward = ps.with_policy(apply, policy)
    optimizer = ps.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)
    rule = ps.DynamicScale(init_scale=2.0**10)
    state, scaler = optimizer.init(params), rule.init()

    def clipped(params, scaler, x, y):
        def scaled_loss(params):
            logits, _ = forward(params, {}, x[None])
            return ps.scale_loss(scaler, F.cross_entropy(logits, y[None]))

        grads, bad = ps.unscale_and_check(scaler, torch.func.grad(scaled_loss)(params))
        return ps.clip_by_global_norm(grads, BOUND)[0], bad

    for x, y in batches():
        rows, bad = torch.vmap(clipped, (None, None, 0, 0))(params, scaler, x, y)
        assert not bad.any()
        grads = {name: each.sum(0) / ROWS for name, each in rows.items()}
        params, state = ps.maybe_step(optimizer, params, grads, state, bad.any())
        scaler = rule.update(scaler, bad.any())
    torch.testing.assert_close(params, expected, rtol=tolerance, atol=tolerance)
