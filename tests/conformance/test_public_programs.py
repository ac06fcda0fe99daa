"""Steps of public training programs, reduced and written anew, beside torch's own loop.

float32 is compared to the bit; float16 by its scale and its skips, and losses to half's rounding.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import started
from torch import nn

import purescale as ps
from purescale.testing import same_bits

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")


def weights_of(model):
    return {name: p.detach() for name, p in model.named_parameters()}


def equal(params, model):
    return same_bits(params, weights_of(model))


def equal_buffers(buffers, model):
    return same_bits(buffers, dict(model.named_buffers()))


def steps(optimizer, loss):
    """A step of torch's own loop."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


# ---- DCGAN: two networks, one forward of the generator, two losses ------------------------------


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
        assert equal(state.params, net)
        assert equal_buffers(state.buffers, net)


# ---- MoCo: a queue of keys, and an encoder that follows by momentum -----------------------------


class MoCo(nn.Module):
    def __init__(self, size=7, keys=20, momentum=0.9, temperature=0.2):
        super().__init__()
        self.momentum, self.temperature = momentum, temperature
        self.query = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, size)
        )
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(size, keys), dim=0))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, one, two):
        q = F.normalize(self.query(one), dim=1)
        with torch.no_grad():
            for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
                slow.mul_(self.momentum).add_(fast, alpha=1 - self.momentum)
            k = F.normalize(self.key(two), dim=1)
        positive = (q * k).sum(1, keepdim=True)
        logits = torch.cat([positive, q @ self.queue.clone()], dim=1) / self.temperature
        with torch.no_grad():
            places = (self.place + torch.arange(len(k))) % self.queue.shape[1]
            self.queue[:, places] = k.T.to(self.queue.dtype)
            self.place.add_(len(k)).remainder_(self.queue.shape[1])
        return logits, torch.zeros(len(k), dtype=torch.long)


@pytest.mark.parametrize("half", [False, True], ids=["float32", "float16"])
def test_moco(half):
    torch.manual_seed(0)
    model = MoCo()
    batches = [(torch.randn(5, 6), torch.randn(5, 6)) for _ in range(5)]
    start = 2.0**24 if half else 1.0
    scaler = torch.amp.GradScaler("cpu", init_scale=start, enabled=half)
    apply, params, buffers = ps.make_functional(model)
    shared = {"lr": 0.03, "momentum": 0.9, "weight_decay": 1e-4}
    optimizer = ps.from_torch(torch.optim.SGD, **shared)
    rule = ps.DynamicScale(init_scale=start) if half else ps.NoScale()

    def loss_fn(params, buffers, batch):
        with torch.autocast("cpu", torch.float16, enabled=half):
            (logits, labels), buffers = apply(params, buffers, *batch)
        return F.cross_entropy(logits.float(), labels), buffers

    state, step = started(params, None, optimizer, rule, loss_fn=loss_fn, buffers=buffers)
    plain = torch.optim.SGD(model.parameters(), **shared, fused=True)
    skips = 0
    for batch in batches:
        before = state
        state, info = step(state, [batch])
        with torch.autocast("cpu", torch.float16, enabled=half):
            logits, labels = model(*batch)
        loss = F.cross_entropy(logits.float(), labels)
        plain.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(plain)
        scaler.update()
        assert state.scaler.scale.item() == scaler.get_scale()
        skips += int(info.found_inf)
        if info.found_inf:
            # torch has moved the queue and the slow encoder; here a skip leaves every bit.
            assert same_bits(state.buffers, before.buffers)
            ps.load_into(model, state.params, state.buffers)
        else:
            torch.testing.assert_close(info.loss, loss.detach(), rtol=0, atol=2e-2 if half else 0)
    assert bool(skips) == half
    if not half:
        names = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
        assert same_bits(state.params, names)
        assert same_bits(state.buffers, {n: model.state_dict()[n] for n in state.buffers})
