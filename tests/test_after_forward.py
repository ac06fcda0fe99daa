"""What a forward leaves besides its output: buffers arrive, and all else is refused or ends."""

import numpy as np
import pytest
import torch
from helpers import Untouched, called, same_bits
from torch import nn

import purescale as ps

X = torch.arange(12.0).reshape(4, 3)


class Initialises(nn.Module):
    """Sets its weight from the first batch, as ActNorm and learned step sizes do."""

    def __init__(self, write):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("initialised", torch.tensor(False))
        self.write = write

    def forward(self, x):
        if not self.initialised:
            self.write(self.scale, 1 / x.std(0))
            self.initialised.fill_(True)
        return x * self.scale


def replaces_data(weight, value):
    weight.data = value


def writes_into_a_view_of_data(weight, value):
    weight.data.view(-1)[:2].mul_(value[:2])


@pytest.mark.parametrize("write", [replaces_data, writes_into_a_view_of_data])
def test_a_step_of_a_model_that_sets_its_weights_from_the_first_batch_is_refused(write):
    apply, params, buffers = ps.make_functional(Initialises(write))

    def loss_fn(params, buffers, x):
        out, buffers = apply(params, buffers, x)
        return out.square().mean(), buffers

    with pytest.raises(RuntimeError, match="wrote into its parameter scale"):
        ps.value_and_grad(loss_fn)(params, buffers, X)
    model = Initialises(write)
    model(X)
    assert same_bits(called(model, X)[0], model(X).detach())


@pytest.mark.parametrize(
    ("written", "write"), [(0, torch.zero_), (2, lambda t: setattr(t, "data", t.detach().clone()))]
)
def test_an_error_names_the_one_of_several_parameters_that_was_written(write, written):
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ParameterList([torch.ones(n) for n in (1, 2, 3)])

        def forward(self, x):
            with torch.no_grad():
                write(self.parts[written])
            return x * sum(part.sum() for part in self.parts)

    with pytest.raises(RuntimeError, match=rf"its parameter parts\.{written},"):
        called(Writes(), X)


@pytest.mark.parametrize("wanted", [False, True])
def test_flags_that_a_forward_switches_are_those_of_the_caller_after_the_call(wanted):
    class Freezes(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x):
            self.a.requires_grad_(not wanted)
            self.mean.requires_grad_()
            return self.b(self.a(x)) + self.mean

    apply, params, buffers = ps.make_functional(Freezes())
    for param in params.values():
        param.requires_grad_(wanted)
    _, new_buffers = apply(params, buffers, X)
    assert {param.requires_grad for param in params.values()} == {wanted}
    assert not new_buffers["mean"].requires_grad


# ---- tensors in plain attributes -----------------------------------------------------------------


class Spikes(nn.Module):
    """A leaky neuron whose membrane is a plain attribute."""

    def __init__(self, write="replaces"):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.mem, self.seen, self.write = torch.zeros(3), np.zeros(2), write

    def forward(self, x):
        if self.write == "replaces":
            self.mem = 0.9 * self.mem + self.linear(x).mean(0)
        elif self.write == "writes":
            self.mem += x.mean(0)
        elif self.write == "sets":
            self.mem = x.mean(0)
        self.seen += 1
        return self.linear(x) + self.mem + float(self.seen[0])


@pytest.mark.filterwarnings("ignore:the forward of the model left another value")
@pytest.mark.parametrize(
    ("write", "mapped"),
    # torch.vmap refuses a write of one member into what all have in common
    [("writes", False), ("sets", False), ("replaces", True)],
)
def test_each_call_begins_with_the_tensors_and_arrays_of_make_functional(write, mapped):
    model = Spikes(write)
    apply, params, buffers = ps.make_functional(model)
    call = torch.vmap(lambda x: apply(params, buffers, x)[0]) if mapped else None
    with Untouched((params, model.mem)):
        outs = [call(X[None])[0] if mapped else apply(params, buffers, X)[0] for _ in range(3)]
    assert model.seen.sum() == 0
    assert same_bits(outs[1:], outs[:1] * 2)
    torch.testing.assert_close(outs[0], model(X))


# ---- modules and buffers that a forward puts in place of others ----------------------------------


class Swaps(nn.Module):
    """Puts another module around its layer in place of it, as BigBird does for short inputs."""

    def __init__(self, make):
        super().__init__()
        self.layer, self.make = nn.Sequential(nn.Linear(3, 3)), make
        self.register_buffer("seen", None)

    def forward(self, x):
        self.layer = self.make(self.layer)
        return self.layer(x)


def test_a_module_of_the_same_tensors_may_take_the_place_of_another():
    model = Swaps(lambda layer: nn.Sequential(nn.Tanh(), layer[0]))
    apply, params, buffers = ps.make_functional(model)
    for _ in range(2):
        out, _ = apply(params, buffers, X)
        assert same_bits(out, model.layer[-1](torch.tanh(X)).detach())


@pytest.mark.parametrize(
    "make", [lambda layer: nn.Linear(3, 3), lambda layer: nn.Sequential(layer, nn.BatchNorm1d(3))]
)
def test_a_module_with_tensors_of_its_own_is_refused(make):
    apply, params, buffers = ps.make_functional(Swaps(make))
    with pytest.raises(RuntimeError, match=r"registered 'layer' in its Swaps.*Fix: "):
        apply(params, buffers, X)


@pytest.mark.parametrize("transform", [lambda f: f, lambda f: torch.vmap(f, (None, None, 0))])
def test_a_buffer_that_was_none_and_gets_a_value_is_refused_in_every_call(transform):
    model = nn.Sequential(Swaps(lambda layer: layer))
    model[0].register_forward_pre_hook(lambda module, args: setattr(module, "seen", args[0] + 1))
    apply, params, buffers = ps.make_functional(model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"registered 'seen' in its Swaps.*Fix: "):
            transform(apply)(params, buffers, X)
