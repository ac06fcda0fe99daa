"""Which modules train is what the model's own `train` and `eval` say."""

import pytest
import torch
from helpers import module_of, same_bits
from torch import nn

import purescale as ps


class NormEval(nn.Module):
    """Keeps its batch norm in eval mode, as detectors do."""

    def __init__(self):
        super().__init__()
        self.linear, self.bn = nn.Linear(3, 3), nn.BatchNorm1d(3)

    def train(self, mode=True):
        super().train(mode)
        self.bn.eval()
        return self

    def forward(self, x):
        return self.bn(self.linear(x))


class AlwaysDrops(nn.Dropout):
    """Drops in eval mode too, as Monte Carlo dropout does."""

    def train(self, mode=True):
        return super().train(True)


class Merges(nn.Module):
    """Adds its low-rank part to its weight in eval mode, as loralib does."""

    def __init__(self):
        super().__init__()
        self.w, self.low = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.full((3, 1), 2.0))
        self.merged = False

    def train(self, mode=True):
        super().train(mode)
        if mode == self.merged:
            self.w.data += (-1 if mode else 1) * (self.low @ self.low.T).data
            self.merged = not mode
        return self

    def forward(self, x):
        return x @ self.w if self.merged else x @ self.w + x @ self.low @ self.low.T


def called(model, x, train):
    apply, params, buffers = ps.make_functional(model)
    torch.manual_seed(0)
    return apply(params, buffers, x, train=train)


def of_the_module(model, x, mode):
    model.train(mode)
    torch.manual_seed(0)
    return model(x).detach(), dict(model.named_buffers())


X = torch.arange(12.0).reshape(4, 3)


@pytest.mark.parametrize("start", [None, True, False])
@pytest.mark.parametrize("mode", [True, False])
def test_an_overridden_train_is_followed(start, mode):
    model = nn.Sequential(NormEval(), AlwaysDrops(0.5))
    if start is not None:
        model.train(start)
    assert same_bits(called(model, X, mode), of_the_module(model, X, mode))


@pytest.mark.parametrize("mode", [True, False])
def test_a_train_that_reads_and_writes_weights_leaves_the_model_alone(mode):
    model = Merges()
    weight = model.w.detach().clone()
    apply, params, buffers = ps.make_functional(model)
    out, _ = apply(params, buffers, X, train=mode)
    assert same_bits(model.w.detach(), weight)
    assert not model.merged
    torch.testing.assert_close(out, model.train(mode)(X).detach())


def test_a_hook_that_an_overridden_train_installs_is_in_no_call():
    class Hooked(nn.Linear):
        def train(self, mode=True):
            self.register_forward_hook(lambda module, inputs, out: out + 1)
            return super().train(mode)

    model = Hooked(3, 3)
    assert same_bits(called(model, X, True)[0], model(X).detach())


@pytest.mark.parametrize(
    "train",  # none of which anybody asked for
    [
        lambda self, x_pos, x_neg: 1 / 0,
        lambda self, data: 1 / 0,
        lambda self, mode, data: 1 / 0,
        lambda self, *, mode: 1 / 0,
        lambda self: 1 / 0,
    ],
    ids=["two batches", "data", "a mode and data", "a mode by name", "nothing"],
)
@pytest.mark.parametrize("mode", [True, False])
def test_a_train_that_takes_something_else_is_not_called(train, mode):
    parts = {"linear": nn.Linear(3, 3), "drop": nn.Dropout(0.5)}
    model = module_of(lambda m, x: m.drop(m.linear(x)), **parts)
    type(model).train = train
    out, _ = called(nn.Sequential(model), torch.ones(300, 3), mode)
    assert bool((out == 0).any()) is mode


def test_an_overridden_eval_is_followed():
    def half(self):
        self.first.training = False
        return self

    drops = {"first": nn.Dropout(0.5), "second": nn.Dropout(0.5)}
    model = module_of(lambda m, x: (m.first(x), m.second(x)), **drops)
    type(model).eval = half
    (first, second), _ = called(model, torch.ones(300), False)
    assert not (first == 0).any()
    assert (second == 0).any()


def test_what_a_user_put_into_eval_mode_stays_there():
    model = nn.Sequential(NormEval(), nn.Dropout(0.5))
    model[1].eval()
    out, _ = called(model, X, True)
    assert not (out == 0).any()
