"""`apply(..., method=)`: what a model offers besides `forward`, as its authors call it."""

import copy

import pytest
import torch
from helpers import same_bits
from torch import nn

import purescale as ps


class Autoencoder(nn.Module):
    """A VAE with a batch norm in its encoder, dropout and a count of what it decoded."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.moments, self.drop = nn.Linear(8, 4), nn.Dropout(0.5)
        self.decoder = nn.Linear(2, 6)
        self.register_buffer("decoded", torch.zeros((), dtype=torch.int64))

    def encode(self, x):
        return self.moments(self.encoder(x)).chunk(2, dim=-1)

    def decode(self, z):
        self.decoded += len(z)
        return torch.sigmoid(self.decoder(z))

    def get_action(self, x):
        action, mean, log_variance = self(x)
        return action.tanh(), (mean.square() + log_variance).sum(-1)

    @torch.no_grad()
    def generate(self, z, number):
        for _ in range(number):
            _, z, _ = self(torch.bernoulli(self.decode(z)))
        return z

    def forward(self, x):
        mean, log_variance = self.encode(x)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decode(self.drop(z)), mean, log_variance


CALLS = {
    "one that counts in a buffer": ("decode", (2,)),
    "one that draws by way of forward": ("get_action", (6,)),
    "one that asks for no gradient": ("generate", (2,), 5),
}


@pytest.fixture(params=CALLS, name="call")
def _call(request):
    torch.manual_seed(0)
    method, size, *rest = CALLS[request.param]
    return Autoencoder(), method, (torch.randn(33, *size), *rest)


@pytest.mark.parametrize("train", [True, False])
def test_a_method_returns_what_that_of_the_module_returns_and_leaves_the_same_buffers(call, train):
    model, method, args = call
    apply, params, buffers = ps.make_functional(model)
    module = copy.deepcopy(model).train(train)
    torch.manual_seed(1)
    expected = getattr(module, method)(*args)
    torch.manual_seed(1)
    out, new = apply(params, buffers, *args, method=method, train=train)
    assert same_bits(out, expected)
    assert same_bits(new, {name: b for name, b in module.named_buffers() if name in buffers})
    assert same_bits(buffers, dict(model.named_buffers()))


def test_gradients_go_through_a_method_that_draws():
    model, x = Autoencoder(), torch.randn(33, 6)
    apply, params, buffers = ps.make_functional(model)

    def loss_fn(params, buffers, x):
        torch.manual_seed(1)
        (action, log_prob), buffers = apply(params, buffers, x, method="get_action")
        return action.sum() - log_prob.mean(), buffers

    _, grads = ps.value_and_grad(loss_fn)(params, buffers, x)
    torch.manual_seed(1)
    action, log_prob = model.get_action(x)
    (action.sum() - log_prob.mean()).backward()
    assert same_bits(grads, {name: p.grad for name, p in model.named_parameters()})


def test_a_function_of_the_module_and_its_part_are_called_like_a_method():
    model, x = Autoencoder(), torch.randn(5, 6)
    apply, params, buffers = ps.make_functional(model)
    out, _ = apply(params, buffers, x, method=Autoencoder.encode)
    assert same_bits(out, apply(params, buffers, x, method="encode")[0])
    out, _ = apply(params, buffers, x, method=lambda vae, x: vae.decode(vae.encode(x)[0]))
    mean = apply(params, buffers, x, method="encode")[0][0]
    assert same_bits(out, apply(params, buffers, mean, method="decode")[0])
    assert same_bits(apply(params, buffers, x, method="encoder")[0], model.encoder(x))


def test_a_compiled_method_equals_an_eager_one():
    method = lambda model, z: model.decode(z) + 1  # noqa: E731
    apply, params, buffers = ps.make_functional(Autoencoder())

    def decode(params, buffers, z):
        return apply(params, buffers, z, method=method)

    z = torch.randn(3, 2)
    compiled = torch.compile(decode, backend="aot_eager", fullgraph=True)
    (out, new), (expected, buffers) = compiled(params, buffers, z), decode(params, buffers, z)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    assert new["decoded"] == buffers["decoded"] == 3


def test_a_method_of_a_live_module_is_refused():
    apply, params, buffers = ps.make_functional(Autoencoder())
    with pytest.raises(TypeError, match=r"bound to a live module.*Fix: method='decode'"):
        apply(params, buffers, torch.randn(3, 2), method=Autoencoder().decode)
