"""A module as a pure function, for modules that nobody here wrote, as they come."""

import pytest
import torch
from helpers import Untouched, same_bits, shares_memory
from torch import nn

import purescale as ps

# torch says so of the LSTM with projections, and takes another kernel.
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.embed(tokens))


class TwiceTheSame(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.layers = nn.ModuleList([self.layer, self.layer])

    def forward(self, x):
        return self.layers[1](self.layers[0](x))


class Structured(nn.Module):
    """Keyword arguments in, a nested structure out, a buffer that is replaced and one that is not saved."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("offset", torch.ones(2), persistent=False)

    def forward(self, x, *, scale=1.0, extra=None):
        self.calls = self.calls + 1
        out = self.linear(x) * scale + self.offset
        return {"out": out, "parts": [out[0], (extra, 3)]}


def lstm():
    return nn.LSTM(4, 3, num_layers=2, batch_first=True, bidirectional=True)


def tokens():
    return (torch.randint(0, 7, (2, 5)),)


def rows():
    return (torch.randn(2, 5, 4),)


def flat():
    return (torch.randn(6, 4),)


MODULES = {
    "tied weights": (Tied, tokens),
    "one module twice": (TwiceTheSame, flat),
    "lstm": (lstm, rows),
    "gru": (lambda: nn.GRU(4, 3), rows),
    "lstm with projection": (lambda: nn.LSTM(4, 3, proj_size=2), rows),
    "attention": (lambda: nn.MultiheadAttention(4, 2, batch_first=True), lambda: rows() * 3),
    "transformer": (lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), rows),
    "weight_norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), flat),
    "spectral_norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)), flat),
    "orthogonal": (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)), flat),
    "batch norm": (lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), flat),
    "group norm": (lambda: nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4)), flat),
    "conv": (lambda: nn.Conv1d(5, 3, 2, padding_mode="circular", padding=1), rows),
    "structured": (Structured, flat),
}


NO_VMAP_RULE = {"lstm", "gru", "lstm with projection", "transformer", "weight_norm", "spectral_norm"}


@pytest.fixture(params=MODULES, ids=str)
def case(request):
    make, inputs = MODULES[request.param]
    torch.manual_seed(0)
    return make(), inputs()


def first(out):
    return out["out"] if isinstance(out, dict) else out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("train", [True, False])
def test_apply_equals_the_module(case, train):
    module, args = case
    apply, params, buffers = ps.make_functional(module)
    out, new_buffers = apply(params, buffers, *args, train=train)
    expected = module.train(train)(*args)
    torch.testing.assert_close(first(out), first(expected))
    torch.testing.assert_close(new_buffers, {name: b.detach() for name, b in module.named_buffers()})


def test_gradients_equal_the_modules(case):
    module, args = case
    apply, params, buffers = ps.make_functional(module)
    grads = torch.func.grad(lambda p: first(apply(p, buffers, *args)[0]).square().sum())(params)
    first(module(*args)).square().sum().backward()
    torch.testing.assert_close(grads, {name: p.grad for name, p in module.named_parameters()}, rtol=1e-4, atol=1e-4)


def test_neither_the_module_nor_the_arguments_are_changed(case):
    module, args = case
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    modes = [m.training for m in module.modules()]
    apply, params, buffers = ps.make_functional(module)
    with Untouched((tensors, params, buffers, args)):
        _, new_buffers = apply(params, buffers, *args)
    assert {**dict(module.named_parameters()), **dict(module.named_buffers())}.keys() == tensors.keys()
    assert modes == [m.training for m in module.modules()]
    assert not shares_memory((tensors, args), (params, buffers))
    assert not shares_memory((params, buffers), new_buffers)


def test_later_changes_to_the_module_do_not_reach_apply(case):
    module, args = case
    apply, params, buffers = ps.make_functional(module)
    before = apply(params, buffers, *args)
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    for child in list(module.modules()):
        child.training = False
        child.register_forward_pre_hook(lambda *_: 1 / 0)
    assert same_bits(first(apply(params, buffers, *args)[0]), first(before[0]))


def test_the_same_call_gives_the_same_bits(case):
    module, args = case
    apply, params, buffers = ps.make_functional(module)
    once, twice = apply(params, buffers, *args), apply(params, buffers, *args)
    assert same_bits((first(once[0]), once[1]), (first(twice[0]), twice[1]))


# torch has no vmap rule for the kernels of the other modules.
@pytest.mark.parametrize("case", sorted(MODULES.keys() - NO_VMAP_RULE), indirect=True)
def test_apply_under_vmap_equals_a_loop(case):
    module, args = case
    apply, params, buffers = ps.make_functional(module)
    stacks = [{name: torch.stack([t, t if t.dtype is torch.int64 else 2 * t]) for name, t in tree.items()} for tree in (params, buffers)]
    out, new_buffers = torch.vmap(lambda p, b: (first(r[0]) if (r := apply(p, b, *args)) else None, r[1]))(*stacks)
    for index in range(2):
        p, b = ({name: t[index] for name, t in tree.items()} for tree in stacks)
        expected = apply(p, b, *args)
        torch.testing.assert_close(out[index], first(expected[0]))
        torch.testing.assert_close({name: t[index] for name, t in new_buffers.items()}, expected[1])


def test_tied_weights_have_one_name_and_one_gradient():
    apply, params, buffers = ps.make_functional(Tied())
    assert list(params) == ["embed.weight"]
    moved = {"embed.weight": params["embed.weight"] + 1}
    tokens = torch.tensor([[1, 2]])
    expected = moved["embed.weight"][tokens] @ moved["embed.weight"].T
    torch.testing.assert_close(apply(moved, buffers, tokens)[0], expected)


def test_keyword_arguments_and_structures_pass_through():
    apply, params, buffers = ps.make_functional(Structured())
    out, new_buffers = apply(params, buffers, torch.ones(3, 4), scale=2.0, extra="label")
    assert out["parts"][1] == ("label", 3)
    assert new_buffers["calls"] == 1
    assert buffers["calls"] == 0
    assert "offset" in buffers


def test_a_module_in_eval_mode_inside_a_model_in_train_mode_stays_frozen():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    model[0].eval()
    apply, params, buffers = ps.make_functional(model)
    _, new_buffers = apply(params, buffers, torch.randn(4, 2) + 3)
    assert same_bits(new_buffers["0.running_mean"], buffers["0.running_mean"])
    assert not same_bits(new_buffers["1.running_mean"], buffers["1.running_mean"])


@pytest.mark.parametrize("train", [True, False])
def test_train_decides_for_a_model_that_is_in_eval_mode_as_a_whole(train):
    apply, params, buffers = ps.make_functional(nn.BatchNorm1d(2).eval())
    _, new_buffers = apply(params, buffers, torch.randn(4, 2), train=train)
    assert new_buffers["num_batches_tracked"] == int(train)


def test_a_parameter_without_gradient_is_a_buffer():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    apply, params, buffers = ps.make_functional(model)
    assert list(params) == ["1.weight", "1.bias"]
    assert list(buffers) == ["0.weight", "0.bias"]
    assert apply.frozen_params == {"0.weight", "0.bias"}
    torch.testing.assert_close(apply(params, buffers, torch.ones(1, 2))[0], model(torch.ones(1, 2)))


def test_a_model_that_is_frozen_as_a_whole_keeps_its_parameters():
    _, params, buffers = ps.make_functional(nn.Linear(2, 2).requires_grad_(False))
    assert list(params) == ["weight", "bias"]
    assert buffers == {}


def test_the_old_weight_norm_with_its_computed_attribute_is_taken():
    with pytest.warns(FutureWarning):
        module = nn.utils.weight_norm(nn.Linear(3, 2))
    apply, params, buffers = ps.make_functional(module)
    torch.testing.assert_close(apply(params, buffers, torch.ones(1, 3))[0], module(torch.ones(1, 3)))


def test_norm_params_names_the_weights_of_norms():
    apply, _, _ = ps.make_functional(nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.GroupNorm(1, 2), nn.RMSNorm(2)))
    assert apply.norm_params == {"1.weight", "1.bias", "2.weight", "2.bias", "3.weight"}


@pytest.mark.parametrize("make", [lambda: nn.LazyLinear(2), lambda: nn.Sequential(nn.LazyBatchNorm1d())])
def test_a_lazy_parameter_is_refused_by_name(make):
    with pytest.raises(ValueError, match=r"is not initialised yet.*run `model\(example_batch\)` once"):
        ps.make_functional(make())


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match=r"takes an nn\.Module, got function"):
        ps.make_functional(lambda x: x)


def test_an_embedding_that_renormalises_its_weight_leaves_params_alone():
    module = nn.Embedding(3, 2, max_norm=0.1)
    apply, params, buffers = ps.make_functional(module)
    with Untouched(params):
        out, _ = apply(params, buffers, torch.tensor([0, 2]))
    torch.testing.assert_close(out, module(torch.tensor([0, 2])).detach())


def test_a_module_that_writes_into_its_parameter_is_refused_by_name_before_it_is_written():
    class Clamped(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))

        def forward(self, x):
            with torch.no_grad():
                self.w.clamp_(max=0.5)
            return x * self.w

    apply, params, buffers = ps.make_functional(Clamped())
    with Untouched(params), pytest.raises(RuntimeError, match=r"would write into its parameter w \(`clamp_`\).*Cure: "):
        apply(params, buffers, torch.ones(2))
