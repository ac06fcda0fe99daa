"""The derivative of a run beside torchopt's, whose graph holds all steps."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import purescale as ps

torchopt = pytest.importorskip("torchopt")

STEPS = 9


def trained(apply, params, buffers, batches, tx, weights):
    """The ordinary way: steps by hand on one graph."""
    params = {name: p.clone().requires_grad_() for name, p in params.items()}
    state = tx.init(params)
    for x, y in batches:
        logits, _ = apply(params, buffers, x)
        loss = (weights * F.cross_entropy(logits, y, reduction="none")).mean()
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        named = dict(zip(params, grads, strict=True))
        updates, state = tx.update(named, state, params=params, inplace=False)
        params = torchopt.apply_updates(params, updates, inplace=False)
    return params


# bergson's settings of AdamW; its constant under the root keeps a derivative smooth
PAIRS = {
    "adamw": lambda: torchopt.adamw(1e-2, betas=(0.95, 0.975), eps_root=1e-2),
    "sgd": lambda: torchopt.sgd(0.1, momentum=0.9),
}


@pytest.mark.parametrize("name", PAIRS)
def test_weights_of_a_run_have_the_derivative_of_torchopts_graph(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 3))
    apply, params, buffers = ps.make_functional(model)
    batches = [(torch.randn(6, 8), torch.randint(0, 3, (6,))) for _ in range(STEPS + 1)]
    tx, rule = PAIRS[name](), ps.DynamicScale(init_scale=2.0**8)
    optimizer = ps.from_transformation(tx)

    def query(params):
        x, y = batches[STEPS]
        return F.cross_entropy(apply(params, buffers, x)[0], y)

    def loss_fn(params, buffers, batch):
        x, y, weights = batch
        logits, buffers = apply(params, buffers, x)
        return (weights * F.cross_entropy(logits, y, reduction="none")).mean(), buffers

    def step(state, batch, weights):
        options = {"loss_fn": loss_fn, "optimizer": optimizer, "rule": rule}
        return ps.train_step(state, [(*batch, weights)], **options)

    weights = torch.ones(6, requires_grad=True)
    final = trained(apply, params, buffers, batches[:STEPS], tx, weights)
    (expected,) = torch.autograd.grad(query(final), weights)
    state = ps.init_train_state(params, buffers, optimizer, rule)
    run = ps.vjp_through(
        step, state, batches[:STEPS], lambda state: query(state.params), wrt=torch.ones(6)
    )
    torch.testing.assert_close(run.wrt, expected, rtol=1e-5, atol=1e-7)
