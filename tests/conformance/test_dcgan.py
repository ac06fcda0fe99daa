"""DCGAN's loop, reduced and written anew, beside torch's own: two networks, one forward of the
generator, two losses. Compared to the bit.
"""

import torch
import torch.nn.functional as F
from helpers import started
from torch import nn

import purescale as ps
from purescale.testing import same_bits


def steps(optimizer, loss):
    """A step of torch's own loop."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def generator():
    return nn.Sequential(
        nn.ConvTranspose2d(8, 16, 4, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 3, 4, stride=2, padding=1, bias=False),
        nn.Tanh(),
    )


def discriminator():
    return nn.Sequential(
        nn.Conv2d(3, 16, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.LeakyReLU(0.2),
        nn.Conv2d(16, 1, 4, bias=False),
        nn.Flatten(0),
    )


def test_dcgan():
    torch.manual_seed(0)
    nets = {"g": generator(), "d": discriminator()}
    batches = [(torch.randn(5, 3, 8, 8).tanh(), torch.randn(5, 8, 1, 1)) for _ in range(4)]
    bce = F.binary_cross_entropy_with_logits
    (g, g_params, g_buffers), (d, d_params, d_buffers) = map(ps.make_functional, nets.values())
    shared = {"lr": 2e-3, "betas": (0.5, 0.999)}
    optimizer = ps.from_torch(torch.optim.Adam, **shared)
    rule = ps.DynamicScale(init_scale=2.0**8)

    def loss_of_d(params, buffers, batch):
        real, fake = batch
        on_real, buffers = d(params, buffers, real)
        on_fake, buffers = d(params, buffers, fake)
        ones, zeros = torch.ones_like(on_real), torch.zeros_like(on_real)
        return bce(on_real, ones) + bce(on_fake, zeros), buffers

    of_g = ps.init_train_state(g_params, g_buffers, optimizer, rule)
    of_d, step_of_d = started(d_params, None, optimizer, rule, loss_fn=loss_of_d, buffers=d_buffers)
    losses = []
    for real, noise in batches:
        leaves = {n: p.detach().requires_grad_() for n, p in of_g.params.items()}
        fake, g_buffers = g(leaves, of_g.buffers, noise)
        of_d, info = step_of_d(of_d, [(real, fake.detach())])
        # The generator's loss, on the graph of the forward above.
        judged, d_buffers = d(of_d.params, of_d.buffers, fake)
        loss = bce(judged, torch.ones_like(judged))
        scaled = ps.scale_loss(of_g.scaler, loss)
        grads = dict(zip(leaves, torch.autograd.grad(scaled, list(leaves.values())), strict=True))
        out = ps.unscale_and_step(optimizer, of_g.scaler, of_g.params, grads, of_g.opt_state)
        of_d = of_d._replace(buffers=d_buffers)
        of_g = of_g._replace(
            params=out.params,
            opt_state=out.opt_state,
            buffers=ps.select(out.found_inf, of_g.buffers, g_buffers),
            scaler=rule.update(of_g.scaler, out.found_inf),
        )
        losses.append((info.loss, loss.detach()))

    plain = {k: torch.optim.Adam(n.parameters(), **shared, fused=True) for k, n in nets.items()}
    for (real, noise), (loss_d, loss_g) in zip(batches, losses, strict=True):
        on_real = nets["d"](real)
        error = bce(on_real, torch.ones_like(on_real))
        fake = nets["g"](noise)
        on_fake = nets["d"](fake.detach())
        error = error + bce(on_fake, torch.zeros_like(on_fake))
        steps(plain["d"], error)
        judged = nets["d"](fake)
        error_g = bce(judged, torch.ones_like(judged))
        steps(plain["g"], error_g)
        assert same_bits(loss_d, error.detach())
        assert same_bits(loss_g, error_g.detach())
    for state, net in ((of_g, nets["g"]), (of_d, nets["d"])):
        assert same_bits(state.params, {name: p.detach() for name, p in net.named_parameters()})
        assert same_bits(state.buffers, dict(net.named_buffers()))
