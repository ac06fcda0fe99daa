"""Steps of public training programs, reduced and written anew, beside torch's own loop.

float32 is compared to the bit; float16 by its scale and its skips, and losses to half's rounding.
"""

import copy
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from helpers import cross_entropy_of, started, trained
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


# ---- nanoGPT: groups by dimension, warm-up and cosine by iteration, accumulation, clipping -------


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.attend = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=False),
            nn.Dropout(dropout),
        )

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.attend(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.project(y.transpose(1, 2).reshape(batch, length, width)))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary=33, length=8, width=16, dropout=0.1):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, 2, dropout) for _ in range(2)])
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.token.weight = self.head.weight

    def forward(self, tokens, targets):
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        logits = self.head(self.norm(self.blocks(x)))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def rate_at(iteration, warmup=2, total=6, peak=1e-2, least=1e-3):
    if iteration < warmup:
        return peak * (iteration + 1) / (warmup + 1)
    share = 0.5 * (1 + math.cos(math.pi * (iteration - warmup) / (total - warmup)))
    return least + share * (peak - least)


@pytest.mark.parametrize("half", [False, True], ids=["float32", "float16"])
def test_nanogpt(half):
    torch.manual_seed(0)
    model = GPT()
    # Of several microbatches in float16 torch's loop backpropagates loss / k, which overflows
    # later.
    windows = torch.randint(33, (6, 1 if half else 3, 4, 9))
    # the scale starts too high, so that the first steps are skipped
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24 if half else 1.0, enabled=half)

    apply, params, buffers = ps.make_functional(model)
    shared, groups = {"lr": 1e-2, "betas": (0.9, 0.95)}, {"*norm*": {"weight_decay": 0.0}}
    optimizer = ps.from_torch(
        torch.optim.AdamW, **shared, weight_decay=0.1, overrides=groups, in_state=("lr",)
    )
    rule = ps.DynamicScale(init_scale=2.0**24) if half else ps.NoScale()

    def loss_fn(params, buffers, tokens):
        with torch.autocast("cpu", torch.float16, enabled=half):
            (_, loss), buffers = apply(params, buffers, tokens[:, :-1], tokens[:, 1:])
        return loss, buffers

    settings = {"loss_fn": loss_fn, "buffers": buffers, "max_norm": 1.0}
    state, step = started(params, None, optimizer, rule, **settings)
    torch.manual_seed(1)
    losses, scales = [], []
    for iteration, window in enumerate(windows):
        state, info = step(ps.replace_settings(state, lr=rate_at(iteration)), list(window))
        losses.append(info.loss)
        scales.append(state.scaler.scale.item())

    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    plain = torch.optim.AdamW(groups, **shared, fused=True)
    torch.manual_seed(1)
    expected, expected_scales = [], []
    for iteration, window in enumerate(windows):
        for group in plain.param_groups:
            group["lr"] = rate_at(iteration)
        total = 0.0
        for tokens in window:
            with torch.autocast("cpu", torch.float16, enabled=half):
                _, loss = model(tokens[:, :-1], tokens[:, 1:])
            scaler.scale(loss / len(window)).backward()
            total += loss.detach() / len(window)
        scaler.unscale_(plain)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(plain)
        scaler.update()
        plain.zero_grad(set_to_none=True)
        expected.append(total)
        expected_scales.append(scaler.get_scale())

    tolerance = 2e-2 if half else 1e-6
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected), rtol=0, atol=tolerance)
    assert scales == expected_scales
    assert not half or scales[0] < 2.0**24
    if not half:
        torch.testing.assert_close(state.params, weights_of(model), rtol=1e-5, atol=1e-6)


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


# ---- SAC: an actor, two critics and their slow targets, a temperature ---------------------------


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.mean, self.log_std = nn.Linear(3, 16), nn.Linear(16, 2), nn.Linear(16, 2)

    def get_action(self, observation):
        x = F.relu(self.body(observation))
        mean, log_std = self.mean(x), -1.5 + 3.5 * torch.tanh(self.log_std(x))
        normal = torch.distributions.Normal(mean, log_std.exp())
        sample = normal.rsample()
        action = torch.tanh(sample)
        log_prob = normal.log_prob(sample) - torch.log(1 - action.square() + 1e-6)
        return action, log_prob.sum(-1)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = (
            nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1), nn.Flatten(0))
            for _ in range(2)
        )

    def forward(self, observation, action):
        x = torch.cat([observation, action], dim=-1)
        return self.one(x), self.two(x)


def test_sac():
    torch.manual_seed(0)
    actor, critic = Actor(), Critic()
    target, log_alpha = copy.deepcopy(critic), nn.Parameter(torch.zeros(()))
    batches = [
        (torch.randn(33, 3), torch.randn(33, 2).tanh(), torch.randn(33), torch.randn(33, 3))
        for _ in range(4)
    ]
    gamma, tau, entropy = 0.99, 0.995, -2.0

    act, actor_params, _ = ps.make_functional(actor)
    value, critic_params, _ = ps.make_functional(critic)
    optimizer, rule = ps.from_torch(torch.optim.Adam, lr=1e-2), ps.NoScale()
    first = {"actor": actor_params, "critic": critic_params, "alpha": {"log": torch.zeros(())}}
    states = {k: ps.init_train_state(each, {}, optimizer, rule) for k, each in first.items()}
    slow = critic_params

    def action_of(params, observation):
        return act(params, {}, observation, method="get_action")[0]

    def loss_of_critic(params, buffers, batch):
        observation, action, wanted = batch
        one, two = value(params, {}, observation, action)[0]
        return F.mse_loss(one, wanted) + F.mse_loss(two, wanted), buffers

    def loss_of_actor(params, buffers, observation):
        action, log_prob = action_of(params, observation)
        one, two = value(states["critic"].params, {}, observation, action)[0]
        return (alpha * log_prob - torch.minimum(one, two)).mean(), buffers

    def loss_of_alpha(params, buffers, log_prob):
        return (-params["log"].exp() * (log_prob + entropy)).mean(), buffers

    def update(key, batch, loss_fn):
        states[key], info = ps.train_step(
            states[key], [batch], loss_fn=loss_fn, optimizer=optimizer, rule=rule
        )
        return info.loss

    torch.manual_seed(1)
    losses = []
    for observation, action, reward, after in batches:
        alpha = states["alpha"].params["log"].exp()
        next_action, log_prob = action_of(states["actor"].params, after)
        worst = torch.minimum(*value(slow, {}, after, next_action)[0])
        wanted = reward + gamma * (worst - alpha * log_prob)
        loss = [update("critic", (observation, action, wanted), loss_of_critic)]
        loss.append(update("actor", observation, loss_of_actor))
        _, log_prob = action_of(states["actor"].params, observation)
        loss.append(update("alpha", log_prob, loss_of_alpha))
        slow = ps.ema(slow, states["critic"].params, tau)
        losses.append(torch.stack(loss))

    trains = {"actor": actor.parameters(), "critic": critic.parameters(), "alpha": [log_alpha]}
    plain = {k: torch.optim.Adam(each, lr=1e-2, fused=True) for k, each in trains.items()}
    torch.manual_seed(1)
    for (observation, action, reward, after), ours in zip(batches, losses, strict=True):
        with torch.no_grad():
            alpha = log_alpha.exp()
            next_action, log_prob = actor.get_action(after)
            worst = torch.minimum(*target(after, next_action))
            wanted = reward + gamma * (worst - alpha * log_prob)
        one, two = critic(observation, action)
        loss = [F.mse_loss(one, wanted) + F.mse_loss(two, wanted)]
        steps(plain["critic"], loss[0])
        new, log_prob = actor.get_action(observation)
        loss.append((alpha * log_prob - torch.minimum(*critic(observation, new))).mean())
        steps(plain["actor"], loss[1])
        with torch.no_grad():
            _, log_prob = actor.get_action(observation)
        loss.append((-log_alpha.exp() * (log_prob + entropy)).mean())
        steps(plain["alpha"], loss[2])
        with torch.no_grad():
            for old, new in zip(target.parameters(), critic.parameters(), strict=True):
                old.lerp_(new, 1 - tau)
        assert same_bits(ours, torch.stack(loss).detach())
    assert equal(states["actor"].params, actor)
    assert equal(states["critic"].params, critic)
    assert same_bits(states["alpha"].params["log"], log_alpha.detach())


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


# ---- DINO: a teacher that follows by a schedule, a centre, crops, a decay by iteration ----------


class Dino(nn.Module):
    def __init__(self, width=16, out=20):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, width), nn.LayerNorm(width), nn.GELU())
        self.last = nn.Linear(width, out, bias=False)

    def forward(self, crops):
        return self.last(F.normalize(self.body(torch.cat(crops)), dim=-1)).chunk(len(crops))


def cosine(first, last, total, count):
    return last + 0.5 * (first - last) * (1 + math.cos(math.pi * count / total))


def dino_loss(student, teacher, center):
    """Return the loss of each global crop of the teacher against each other crop of the student,
    and the new centre.
    """
    targets = [F.softmax((t - center) / 0.04, dim=-1) for t in teacher]
    terms = [
        torch.sum(-target * F.log_softmax(crop / 0.1, dim=-1), dim=-1).mean()
        for i, target in enumerate(targets)
        for j, crop in enumerate(student)
        if i != j
    ]
    return sum(terms) / len(terms), 0.9 * center + 0.1 * torch.cat(teacher).mean(0)


def test_dino():
    torch.manual_seed(0)
    student, total = Dino(), 6
    teacher = copy.deepcopy(student)
    crops = [[torch.randn(5, 6) for _ in range(4)] for _ in range(total)]
    momenta = [cosine(0.9, 1.0, total, count) for count in range(total)]

    def no_decay(name):
        return name.endswith("bias") or name == "body.1.weight"

    apply, params, _ = ps.make_functional(student)
    optimizer = ps.from_torch(
        torch.optim.AdamW,
        lr=lambda count: 0.5 * 1e-2 * (1 + torch.cos(torch.pi * count / total)),
        weight_decay=lambda count: 0.4 - 0.18 * (1 + torch.cos(torch.pi * count / total)),
        overrides={name: {"weight_decay": 0.0} for name in params if no_decay(name)},
        in_state=("weight_decay",),
        schedule_by="iteration",
        counts="each",  # torch counts no step of the frozen layer
    )
    opt_state, slow, buffers = optimizer.init(params), params, {"center": torch.zeros(20)}

    def loss_fn(params, buffers, crops):
        targets = apply(slow, {}, crops[:2])[0]
        loss, center = dino_loss(apply(params, {}, crops)[0], targets, buffers["center"])
        return loss, {"center": center}

    gradient = ps.value_and_grad(loss_fn)
    losses = []
    for count, batch in enumerate(crops):
        (loss, buffers), grads = gradient(params, buffers, batch)
        grads = {name: ps.clip_by_global_norm({"": g}, 0.05)[0][""] for name, g in grads.items()}
        if count < 2:  # the last layer is frozen at first
            grads["last.weight"] = None
        params, opt_state = optimizer.step(params, grads, opt_state)
        slow = ps.ema(slow, params, momenta[count])
        losses.append(loss)

    named = dict(student.named_parameters())
    groups = [
        {"params": [p for n, p in named.items() if not no_decay(n)]},
        {"params": [p for n, p in named.items() if no_decay(n)], "weight_decay": 0.0},
    ]
    plain = torch.optim.AdamW(groups, lr=1e-2)
    center = torch.zeros(20)
    for count, batch in enumerate(crops):
        plain.param_groups[0]["weight_decay"] = cosine(0.04, 0.4, total, count)
        for group in plain.param_groups:
            group["lr"] = cosine(1e-2, 0.0, total, count)
        with torch.no_grad():
            targets = teacher(batch[:2])
        loss, center = dino_loss(student(batch), targets, center)
        plain.zero_grad()
        loss.backward()
        for p in named.values():
            nn.utils.clip_grad_norm_(p, 0.05)
        if count < 2:
            student.last.weight.grad = None
        plain.step()
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
                old.mul_(momenta[count]).add_((1 - momenta[count]) * new)
        torch.testing.assert_close(losses[count], loss.detach(), rtol=1e-5, atol=1e-6)
    close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
    close(params, weights_of(student))
    close(slow, weights_of(teacher))
    close(buffers["center"], center)


# ---- SAM: the gradient at the worst point nearby -------------------------------------------------


def test_sam():
    rho = 0.05
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 33), nn.BatchNorm1d(33), nn.ReLU(), nn.Linear(33, 4))
    batches = [(torch.randn(16, 6), torch.randint(4, (16,))) for _ in range(4)]
    apply, params, buffers = ps.make_functional(model)
    optimizer = ps.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)
    opt_state = optimizer.init(params)
    gradient = ps.value_and_grad(cross_entropy_of(apply))
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    for batch in batches:
        (loss, buffers), grads = gradient(params, buffers, batch)
        norm = torch.stack([g.norm() for g in grads.values()]).norm()
        worst = {name: p + grads[name] * (rho / (norm + 1e-12)) for name, p in params.items()}
        _, grads = gradient(worst, buffers, batch)  # whose running statistics are dropped
        params, opt_state = optimizer.step(params, grads, opt_state)

        expected = F.cross_entropy(model(batch[0]), batch[1])
        expected.backward()
        weights, kept = list(model.parameters()), copy.deepcopy(dict(model.named_buffers()))
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in weights]).norm()
            old = [p.clone() for p in weights]
            for p in weights:
                p.add_(p.grad * (rho / (norm + 1e-12)))
        plain.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        with torch.no_grad():
            for p, value in zip(weights, old, strict=True):
                p.copy_(value)
            for name, buffer in model.named_buffers():
                buffer.copy_(kept[name])
        plain.step()
        plain.zero_grad()
        assert same_bits(loss, expected.detach())
    assert equal(params, model)
    assert equal_buffers(buffers, model)


# ---- WGAN-GP: a gradient within a loss -----------------------------------------------------------


def test_wgan_gp():
    torch.manual_seed(0)
    nets = {
        "g": nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6)),
        "d": nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)),
    }
    batches = [(torch.randn(33, 6), torch.randn(33, 4), torch.rand(33, 1)) for _ in range(6)]
    (g, g_params, _), (d, d_params, _) = (ps.make_functional(net) for net in nets.values())
    shared = {"lr": 1e-2, "betas": (0.5, 0.9)}
    optimizer, rule = ps.from_torch(torch.optim.Adam, **shared), ps.NoScale()

    def penalty(judge, real, fake, share):
        mixed = (share * real + (1 - share) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(judge(mixed).sum(), mixed, create_graph=True)
        return 10 * (slope.norm(2, dim=1) - 1).square().mean()

    def loss_of_critic(params, buffers, batch):
        real, fake, share = batch

        def judge(x):
            return d(params, {}, x)[0]

        distance = judge(fake).mean() - judge(real).mean()
        return distance + penalty(judge, real, fake, share), buffers

    def loss_of_maker(params, buffers, noise):
        return -d(critic.params, {}, g(params, {}, noise)[0])[0].mean(), buffers

    critic, step_of_critic = started(d_params, None, optimizer, rule, loss_fn=loss_of_critic)
    maker, step_of_maker = started(g_params, None, optimizer, rule, loss_fn=loss_of_maker)
    plain = {k: torch.optim.Adam(n.parameters(), **shared, fused=True) for k, n in nets.items()}
    for index, (real, noise, share) in enumerate(batches):
        fake = g(maker.params, {}, noise)[0]
        critic, info = step_of_critic(critic, [(real, fake, share)])
        fake = nets["g"](noise).detach()
        loss = nets["d"](fake).mean() - nets["d"](real).mean()
        loss = loss + penalty(nets["d"], real, fake, share)
        steps(plain["d"], loss)
        torch.testing.assert_close(info.loss, loss.detach(), rtol=1e-6, atol=1e-6)
        if index % 3 == 2:
            maker, info = step_of_maker(maker, [noise])
            loss = -nets["d"](nets["g"](noise)).mean()
            steps(plain["g"], loss)
            torch.testing.assert_close(info.loss, loss.detach(), rtol=1e-6, atol=1e-6)
    assert equal(critic.params, nets["d"])
    assert equal(maker.params, nets["g"])


# ---- GCN: a sparse graph, two groups of decay ----------------------------------------------------


class GCN(nn.Module):
    def __init__(self, adjacency):
        super().__init__()
        self.first, self.second = nn.Linear(7, 16, bias=False), nn.Linear(16, 3, bias=False)
        self.register_buffer("adjacency", adjacency)

    def forward(self, x):
        x = F.relu(self.adjacency @ self.first(F.dropout(x, 0.5, self.training)))
        return self.adjacency @ self.second(F.dropout(x, 0.5, self.training))


def test_gcn():
    torch.manual_seed(0)
    edges = torch.rand(33, 33) < 0.1
    graph = (edges | edges.T | torch.eye(33, dtype=torch.bool)).float()
    degree = graph.sum(1).rsqrt()
    model = GCN((degree[:, None] * graph * degree).to_sparse())
    x, labels, mask = torch.randn(33, 7), torch.randint(3, (33,)), torch.rand(33) < 0.5
    apply, params, buffers = ps.make_functional(model)
    groups = {"first.*": {"weight_decay": 5e-4}}
    optimizer = ps.from_torch(torch.optim.Adam, lr=1e-2, overrides=groups)

    def loss_fn(params, buffers, batch):
        logits, buffers = apply(params, buffers, batch[0])
        return F.cross_entropy(logits[mask], batch[1][mask]), buffers

    settings = {"loss_fn": loss_fn, "buffers": buffers}
    torch.manual_seed(1)
    state, infos = trained(
        *started(params, None, optimizer, ps.NoScale(), **settings), [[(x, labels)]] * 5
    )
    groups = [
        {"params": model.first.parameters(), "weight_decay": 5e-4},
        {"params": model.second.parameters(), "weight_decay": 0.0},
    ]
    plain = torch.optim.Adam(groups, lr=1e-2, fused=True)
    torch.manual_seed(1)
    for info in infos:
        loss = F.cross_entropy(model(x)[mask], labels[mask])
        steps(plain, loss)
        assert same_bits(info.loss, loss.detach())
    assert equal(state.params, model)
    logits = apply(state.params, state.buffers, x, train=False)[0], model.eval()(x)
    one, other = (each.argmax(1).eq(labels).float().mean() for each in logits)
    assert one == other
