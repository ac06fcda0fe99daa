"""What a forward does besides computing is refused, undone or told."""

import warnings

import numpy as np
import pytest
import torch
from helpers import Untouched, same_bits
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


def writes_into_data(weight, value):
    weight.data.copy_(value)


def writes_into_a_view_of_data(weight, value):
    weight.data.view(-1)[:2].mul_(value[:2])


WRITES = (replaces_data, writes_into_data, writes_into_a_view_of_data)


@pytest.mark.parametrize("write", WRITES)
def test_a_step_of_a_model_that_sets_its_weights_from_the_first_batch_is_refused(write):
    apply, params, buffers = ps.make_functional(Initialises(write))

    def loss_fn(params, buffers, x):
        out, buffers = apply(params, buffers, x)
        return out.square().mean(), buffers

    with pytest.raises(RuntimeError, match="wrote into its parameter scale"):
        ps.value_and_grad(loss_fn)(params, buffers, X)


def test_a_model_that_has_seen_a_batch_trains_as_torch_does():
    model = Initialises(replaces_data)
    model(X)
    apply, params, buffers = ps.make_functional(model)
    out, _ = apply(params, buffers, X)
    assert same_bits(out, model(X).detach())


def test_data_that_is_replaced_is_refused_in_every_call():
    class Replaces(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x, replace=False):
            if replace:
                self.w.data = self.w.data * 2
            return x * self.w

    apply, params, buffers = ps.make_functional(Replaces())
    for _ in range(2):
        apply(params, buffers, X)
        with pytest.raises(RuntimeError, match="wrote into its parameter w"):
            apply({"w": params["w"].clone()}, buffers, X, replace=True)


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


@pytest.mark.filterwarnings("ignore:mem of the model")
@pytest.mark.parametrize(
    ("write", "mapped"),
    # torch.vmap refuses a write of one member into what all have in common
    [("replaces", False), ("writes", False), ("sets", False), ("replaces", True), ("sets", True)],
)
def test_each_call_begins_with_the_tensors_and_arrays_of_make_functional(write, mapped):
    model = Spikes(write)
    apply, params, buffers = ps.make_functional(model)
    call = torch.vmap(lambda x: apply(params, buffers, x)[0]) if mapped else None
    outs = [call(X[None])[0] if mapped else apply(params, buffers, X)[0] for _ in range(3)]
    assert same_bits(outs[1:], outs[:1] * 2)
    torch.testing.assert_close(outs[0], model(X))


def given(model):
    apply, params, buffers = ps.make_functional(model)
    return apply, {name: p.requires_grad_() for name, p in params.items()}, buffers


@pytest.mark.parametrize("write", ["replaces", "writes"])
def test_a_tensor_that_a_forward_reads_and_changes_is_told_once_with_the_cure(write):
    apply, params, buffers = given(nn.Sequential(Spikes(write)))
    with pytest.warns(UserWarning, match=r"^0\.mem of the model .*Fix: .*state_attributes"):
        apply(params, buffers, X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply(params, buffers, X)


@pytest.mark.parametrize("write", ["sets", None])
def test_a_tensor_that_a_forward_only_sets_or_only_reads_is_not_told(write):
    apply, params, buffers = given(Spikes(write))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply(params, buffers, X)


def test_the_first_call_has_the_bits_of_the_second():
    apply, params, buffers = given(Spikes("sets"))
    assert same_bits(apply(params, buffers, X), apply(params, buffers, X))


def test_the_cure_of_the_warning_is_the_module_stepped_in_time():
    class Cured(Spikes):
        def __init__(self):
            super().__init__()
            del self.mem
            self.register_buffer("mem", torch.zeros(3))

        def forward(self, x):
            self.mem = 0.9 * self.mem + self.linear(x).mean(0)
            return self.mem

    model = Cured()
    apply, params, buffers = ps.make_functional(model)
    for _ in range(3):
        out, buffers = apply(params, buffers, X)
        assert same_bits(out, model(X).detach())


@pytest.mark.filterwarnings("ignore:mem of the model")
def test_neither_the_model_nor_its_arrays_change():
    model = Spikes("writes")
    apply, params, buffers = ps.make_functional(model)
    with Untouched((params, model.mem)):
        apply(params, buffers, X)
    assert model.seen.sum() == 0
