"""Programs of the JAX world, written with purescale: equal to the same mathematics by hand."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, small_net, started
from torch import nn

import purescale as ps

# ---- flax's imagenet: batch norm, a dynamic scale, warm-up, a decay of kernels only --------------

BASE_LR, WARMUP, STEPS, DECAY = 0.2, 3, 10, 1e-2


def warmup_cosine(count):
    """Return the rate of `optax.warmup_cosine_decay_schedule(0.0, BASE_LR, WARMUP, STEPS)`."""
    cosine = 0.5 * BASE_LR * (1 + torch.cos(math.pi * (count - WARMUP) / (STEPS - WARMUP)))
    return torch.where(count < WARMUP, BASE_LR * count / WARMUP, cosine)


def imagenet(apply, backend):
    """Return optimizer, rule and `step(state, batch) -> (state, metrics)`, which donates."""
    optimizer = ps.from_torch(
        torch.optim.SGD,
        lr=warmup_cosine,
        momentum=0.9,
        nesterov=True,
        weight_decay=DECAY,
        overrides={pattern: {"weight_decay": 0.0} for pattern in ("*.bias", "1.*")},
    )
    rule = ps.DynamicScale(2.0**20, growth_interval=2)

    def loss_fn(params, buffers, batch):
        x, y = batch
        logits, buffers = apply(params, buffers, x)
        return F.cross_entropy(logits.float(), y), buffers, logits

    def step(state, batch):
        lr = warmup_cosine(state.step)
        state, info = ps.train_step(state, [batch], loss_fn=loss_fn, optimizer=optimizer, rule=rule)
        (logits,) = info.aux
        accuracy = (logits.argmax(-1) == batch[1]).float().mean()
        metrics = {"loss": info.loss, "accuracy": accuracy, "lr": lr, "skipped": info.found_inf}
        return state, metrics

    return optimizer, rule, ps.jit(step, donate=0, backend=backend)


def imagenet_by_hand(model, batches):
    """Return scale and number of steps after the same steps, and their metrics. The decay is in the
    loss, as in flax.
    """
    scale, clean, count, log = 2.0**20, 0, 0, []
    params, buffers = list(model.parameters()), list(model.buffers())
    momenta = [torch.zeros_like(p) for p in params]
    for x, y in batches:
        lr = BASE_LR * count / WARMUP
        if count >= WARMUP:
            lr = BASE_LR * 0.5 * (1 + math.cos(math.pi * (count - WARMUP) / (STEPS - WARMUP)))
        before = [buffer.clone() for buffer in buffers]
        with torch.autocast("cpu", torch.float16):
            logits = model(x)
        loss = F.cross_entropy(logits.float(), y)
        penalty = 0.5 * DECAY * sum(p.square().sum() for p in params if p.ndim > 1)
        grads = [g / scale for g in torch.autograd.grad((loss + penalty) * scale, params)]
        skipped = not all(grad.isfinite().all() for grad in grads)
        accuracy = (logits.argmax(-1) == y).float().mean()
        log.append({"loss": loss.detach(), "accuracy": accuracy, "lr": lr, "skipped": skipped})
        if skipped:
            scale, clean = scale / 2, 0
            for buffer, old in zip(buffers, before, strict=True):
                buffer.copy_(old)
            continue
        clean, count = clean + 1, count + 1
        if clean == 2:
            scale, clean = scale * 2, 0
        with torch.no_grad():
            for p, grad, momentum in zip(params, grads, momenta, strict=True):
                momentum.mul_(0.9).add_(grad)
                p.sub_(lr * (grad + 0.9 * momentum))
    return scale, count, log


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_an_imagenet_training_in_float16(backend):
    torch.manual_seed(0)
    batches = [(torch.randn(8, 1, 6, 6), torch.randint(0, 3, (8,))) for _ in range(12)]
    model = small_net()
    apply, params, buffers = ps.make_functional(model)
    apply = ps.with_policy(apply, "params=float32,compute=autocast(float16)")
    optimizer, rule, step = imagenet(apply, backend)
    state, log = ps.init_train_state(params, buffers, optimizer, rule), []
    for batch in batches:
        state, metrics = step(state, batch)
        log.append(metrics)
    scale, count, expected = imagenet_by_hand(model, batches)
    assert (state.scaler.scale, state.step) == (scale, count)
    assert 4 < count < 10  # both after the warm-up and not without a skip
    # Inductor keeps in float32 what eager mode rounds to float16 between two operators.
    rounding = 2.0**-10 if backend == "inductor" else 1e-5
    for metrics, by_hand in zip(log, expected, strict=True):
        assert metrics["skipped"] == by_hand.pop("skipped")
        for name, value in by_hand.items():
            assert metrics[name].item() == pytest.approx(float(value), rel=rounding)
    trained = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert_close({**state.params, **state.buffers}, trained, rtol=rounding, atol=rounding / 10)


# ---- optax's meta-learning: a rate that is learned, and MAML -------------------------------------


def line_loss(params, buffers, batch):
    x, y = batch
    return (params["w"] * x + params["b"] - y).square().mean(), buffers


def lines(number):
    x = torch.rand(number, 16)
    return x, 10 * x + 4 + 0.1 * torch.randn(number, 16)


def meta_learning(backend):
    """Return `init()` and `step(state, batches) -> (state, loss)`. Each step trains on all batches
    but the last, and moves the rate against the derivative of the loss on the last by it.
    """
    inner = ps.from_torch(torch.optim.RMSprop, lr=0.1, in_state=("lr",))
    outer = ps.from_torch(torch.optim.Adam, lr=0.3)

    def init():
        params, eta = {"w": torch.zeros(()), "b": torch.zeros(())}, {"eta": torch.tensor(-3.0)}
        return params, inner.init(params), eta, outer.init(eta)

    def step(state, batches):
        params, opt_state, eta, eta_state = state
        *seen, unseen = zip(*(leaf.unbind() for leaf in batches), strict=True)

        def loss_after(eta):
            new, new_state = params, ps.replace_settings(opt_state, lr=torch.sigmoid(eta["eta"]))
            for batch in seen:
                _, grads = ps.value_and_grad(line_loss)(new, {}, batch)
                new, new_state = inner.step(new, grads, new_state)
            return line_loss(new, {}, unseen)[0], (new, new_state)

        grads, (loss, trained) = torch.func.grad_and_value(loss_after, has_aux=True)(eta)
        return (*trained, *outer.step(eta, grads, eta_state)), loss

    return init, ps.jit(step, backend=backend)


def meta_learning_by_hand(windows):
    w, b, eta = torch.zeros(()), torch.zeros(()), torch.tensor(-3.0)
    averages, m, v, log = [torch.zeros(()), torch.zeros(())], 0.0, 0.0, []
    for number, (x, y) in enumerate(windows, 1):
        eta.requires_grad_()
        params = [w.requires_grad_(), b.requires_grad_()]
        for i in range(len(x) - 1):
            loss = (params[0] * x[i] + params[1] - y[i]).square().mean()
            grads = torch.autograd.grad(loss, params, create_graph=True)
            averages = [0.99 * a + 0.01 * g * g for a, g in zip(averages, grads, strict=True)]
            params = [
                p - torch.sigmoid(eta) * g / (a.sqrt() + 1e-8)
                for p, g, a in zip(params, grads, averages, strict=True)
            ]
        loss = (params[0] * x[-1] + params[1] - y[-1]).square().mean()
        (slope,) = torch.autograd.grad(loss, eta)
        w, b = (p.detach() for p in params)
        averages = [a.detach() for a in averages]
        m, v = 0.9 * m + 0.1 * slope, 0.999 * v + 0.001 * slope**2
        m_hat, v_hat = m / (1 - 0.9**number), v / (1 - 0.999**number)
        eta = eta.detach() - 0.3 * m_hat / (v_hat.sqrt() + 1e-8)
        log.append(loss.detach())
    return w, b, eta, torch.stack(log)


def test_a_rate_that_is_learned_while_training():
    torch.manual_seed(0)
    windows = [lines(4) for _ in range(12)]
    init, step = meta_learning("aot_eager")
    state, losses = init(), []
    for window in windows:
        state, loss = step(state, window)
        losses.append(loss)
    params, _, eta, _ = state
    results = params["w"], params["b"], eta["eta"], torch.stack(losses)
    assert_close(results, meta_learning_by_hand(windows), rtol=1e-4, atol=1e-5)
    assert torch.sigmoid(eta["eta"]) > 2 * torch.sigmoid(torch.tensor(-3.0))


def sines(tasks):
    """Return points of as many sines, (x, y), [tasks, seen or not, points, 1] each."""
    x = 8 * torch.rand(tasks, 2, 10, 1) - 4
    return x, torch.sin(x + torch.rand(tasks, 1, 1, 1))


def maml(net, params):
    """Return a state and `step(state, tasks)`: three steps of SGD within the loss."""
    inner = ps.from_torch(torch.optim.SGD, lr=0.05)

    def task_loss(params, buffers, batch):
        return F.mse_loss(net(params, {}, batch[0])[0], batch[1]), buffers

    def loss_fn(params, buffers, tasks):
        def loss_of_one(x, y):
            new, opt_state = params, inner.init(params)
            for _ in range(3):
                _, grads = ps.value_and_grad(task_loss)(new, {}, (x[0], y[0]))
                new, opt_state = inner.step(new, grads, opt_state)
            return task_loss(new, {}, (x[1], y[1]))[0]

        return torch.vmap(loss_of_one)(*tasks).mean(), buffers

    adam, rule = ps.from_torch(torch.optim.Adam, lr=1e-2), ps.DynamicScale(2.0**10)
    state, step = started(params, None, adam, rule, loss_fn=loss_fn)
    return state, ps.jit(lambda state, x: step(state, [x]), donate=0, backend="aot_eager")


def maml_by_hand(model, batches):
    optimizer, log = torch.optim.Adam(model.parameters(), lr=1e-2), []
    for batch in batches:
        losses = []
        for x, y in zip(*batch, strict=True):
            params = dict(model.named_parameters())
            for _ in range(3):
                loss = F.mse_loss(torch.func.functional_call(model, params, x[0]), y[0])
                grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
                pairs = zip(params.items(), grads, strict=True)
                params = {name: p - 0.05 * grad for (name, p), grad in pairs}
            losses.append(F.mse_loss(torch.func.functional_call(model, params, x[1]), y[1]))
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
        log.append(torch.stack(losses).mean().detach())
    return torch.stack(log)


def test_maml():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    (state, step), losses = maml(*ps.make_functional(model)[:2]), []
    batches = [sines(tasks=4) for _ in range(5)]
    for batch in batches:
        state, info = step(state, batch)
        losses.append(info.loss)
    assert_close(torch.stack(losses), maml_by_hand(model, batches), rtol=1e-4, atol=1e-6)
    assert_close(state.params, dict(model.named_parameters()), rtol=1e-4, atol=1e-5)


# ---- a scanned loop with dropout, mapped over rates ----------------------------------------------

RATES, KEEP = (1e-3, 1e-2, 1e-1), 0.75


def mlp(w1, w2, x, noise):
    return (torch.tanh(x @ w1) * (noise < KEEP) / KEEP) @ w2


def sweep():
    """Return states, one for each rate, and `step(state, batch) -> (state, info)`."""
    adamw = ps.from_torch(torch.optim.AdamW, lr=1.0, in_state=("lr",))
    rule = ps.DynamicScale(2.0**10, growth_interval=2)

    def loss(params, batch):
        x, y, noise = batch
        return F.mse_loss(mlp(*params, x, noise), y)

    params = [torch.randn(4, 8), torch.randn(8, 1)]
    one, step = started(params, loss, adamw, rule, max_norm=1.0)
    states = ps.replace_settings(ps.stack_states([one] * len(RATES)), lr=torch.tensor(RATES))
    return states, lambda state, batch: step(state, [batch])


def training_by_hand(params, rate, batches):
    """Return parameters, scale, losses and flags of one training with torch's own scaler."""
    params = [p.clone().requires_grad_() for p in params]
    optimizer = torch.optim.AdamW(params, lr=rate)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    losses, skips = [], []
    for x, y, noise in zip(*batches, strict=True):
        optimizer.zero_grad()
        loss = F.mse_loss(mlp(*params, x, noise), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(params, 1.0)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
        skips.append(scaler.get_scale() < before)
    return params, scaler.get_scale(), torch.stack(losses), skips


def scanned(step, states, batches, way):
    if way == "vmap of scan_steps":
        return torch.vmap(lambda state: ps.scan_steps(step, state, batches))(states)
    steps = ps.jit(torch.vmap(step, in_dims=(0, None)))
    states, infos = ps.scan_steps(steps, states, batches)
    return states, infos._replace(loss=infos.loss.T, found_inf=infos.found_inf.T)


@pytest.mark.parametrize(
    "way",
    ["vmap of scan_steps", pytest.param("scan_steps of vmap, one graph", marks=pytest.mark.slow)],
)
def test_a_scanned_sweep_with_dropout_that_overflows_in_the_middle(way):
    torch.manual_seed(0)
    x, y, noise = torch.randn(7, 16, 4), torch.randn(7, 16, 1), torch.rand(7, 16, 8)
    y[3, 0] = torch.inf
    states, step = sweep()
    results, infos = scanned(step, states, (x, y, noise), way)
    for index, rate in enumerate(RATES):
        start = ps.member(states, index).params
        params, scale, losses, skips = training_by_hand(start, rate, (x, y, noise))
        member = ps.member(results, index)
        assert_close(member.params, params, rtol=1e-5, atol=1e-6)
        assert_close(infos.loss[index], losses, rtol=1e-5, atol=1e-6)
        assert infos.found_inf[index].tolist() == skips == [number == 3 for number in range(7)]
        assert member.scaler.scale == scale
