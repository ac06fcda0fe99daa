"""One name for each memory of a module: tensors over the same elements are one, and what shares
memory in another way is right or refused with both names.
"""

import re

import helpers
import pytest
import torch
from helpers import Untouched, called, in_one_graph, module_of, same_bits, started
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import purescale as ps

SGD = ps.from_torch(torch.optim.SGD, lr=0.1)


def holds(add, frozen=False):
    """A model of a weight and what `add` registers; its forward uses all that is registered."""

    def forward(m, x):
        for tensor in (*m._parameters.values(), *m._buffers.values()):
            x = x + tensor.to(x.dtype).sum() + (tensor.to(x.dtype) ** 2).sum()
        return x

    w = nn.Parameter(torch.arange(9.0).reshape(3, 3) / 9, requires_grad=not frozen)
    model = module_of(forward, w=w, other=nn.Parameter(torch.ones(3)))
    add(model)
    return model


def trained(model, steps=3):
    """Parameters and buffers after some steps, and the losses."""
    apply, params, buffers = ps.make_functional(model)

    def loss_fn(params, buffers, x):
        out, buffers = apply(params, buffers, x)
        return out.sum(), buffers

    state, step = started(params, None, SGD, ps.NoScale(), loss_fn=loss_fn, buffers=buffers)
    state, infos = helpers.trained(state, step, [[torch.ones(3)]] * steps)
    return state, torch.stack([info.loss for info in infos])


HOW = {
    "eager": lambda fn: fn,
    "compiled": in_one_graph,
    "vmap": lambda fn: torch.vmap(fn, in_dims=(None, 0)),
}


def trained_by_torch(model, steps=3):
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.ones(3)).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


# ---- tied: the same elements in the same memory --------------------------------------------------


def tied_net(tie):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    tie(net[0], net[2])
    return net


def by_data(first, second):
    second.weight.data = first.weight.data


def by_a_parameter_of_its_own(first, second):
    second.weight = nn.Parameter(first.weight.data)


def as_one(first, second):
    second.weight = first.weight


@pytest.mark.parametrize(
    ("tie", "how"), [(by_data, "eager"), (by_data, "compiled"), (by_a_parameter_of_its_own, "vmap")]
)
def test_parameters_over_one_memory_are_tied_as_one_parameter_is(tie, how):
    def grads(tie):
        apply, params, buffers = ps.make_functional(tied_net(tie))
        grad = torch.func.grad(lambda params, x: apply(params, buffers, x)[0].pow(2).sum())
        return HOW[how](grad)(params, torch.linspace(-1, 1, 6).reshape(2, 3))

    ours = grads(tie)
    assert list(ours) == ["0.weight", "0.bias", "2.bias"]
    assert same_bits(ours, grads(as_one))


@pytest.mark.parametrize("tie", [by_data, by_a_parameter_of_its_own])
def test_tied_parameters_train_as_in_torch_where_steps_add_up_and_have_a_way_back(tie):
    state, losses = trained(tied_net(tie))
    model = tied_net(tie)
    torch.testing.assert_close(losses, trained_by_torch(tied_net(tie)))
    ps.load_into(model, state.params, state.buffers)
    assert same_bits(model[0].weight.detach(), state.params["0.weight"])
    assert same_bits(model[2].weight.detach(), state.params["0.weight"])
    _, apart, _ = ps.make_functional(tied_net(lambda first, second: None))
    with (
        Untouched(dict(model.named_parameters())),
        pytest.raises(ValueError, match=r"2\.weight is tied to 0\.weight in the model"),
    ):
        ps.load_into(model, apart, {})
    norms = nn.Sequential(nn.LayerNorm(3), nn.LayerNorm(3))
    tie(*norms)
    assert ps.make_functional(norms)[0].norm_params == {"0.weight", "0.bias", "1.bias"}


def test_a_parameter_that_is_a_buffer_too_trains():
    def add(model):
        model.register_buffer("again", model.w)

    _, params, buffers = ps.make_functional(holds(add))
    assert (list(params), list(buffers)) == (["w", "other"], [])
    state, losses = trained(holds(add))
    torch.testing.assert_close(losses, trained_by_torch(model := holds(add)))
    back = holds(add)
    ps.load_into(back, state.params, state.buffers)
    torch.testing.assert_close(back.again, model.w)


def test_frozen_parameters_over_one_memory_are_one_buffer():
    def add(model):
        model.v = nn.Parameter(model.w.data, requires_grad=False)
        model.register_buffer("again", model.w.data)

    _, params, buffers = ps.make_functional(holds(add, frozen=True))
    assert (list(params), list(buffers)) == (["other"], ["w"])


# ---- refused: memory that is shared in another way than as one -----------------------------------


def buffer(view):
    return lambda model: model.register_buffer("c", view(model.w))


def parameter(view, **options):
    return lambda model: setattr(model, "c", nn.Parameter(view(model.w.data), **options))


def buffers(view):
    """A complex table, and a view of it."""

    def add(model):
        model.register_buffer("table", torch.arange(6.0).reshape(3, 2) * (1 + 2j))
        model.register_buffer("c", view(model.table))

    return add


SHARED = {
    "a buffer, detached": buffer(torch.detach),
    "a buffer on the graph": buffer(lambda w: w.view(9)),
    "an element": buffer(lambda w: w.detach()[2, 2]),
    "other bits": buffer(lambda w: w.detach().view(torch.float16)),
    "a column as a parameter": parameter(lambda w: w[:, 1]),
    "a frozen parameter": parameter(lambda w: w, requires_grad=False),
    "frozen as a whole": lambda m: (m.register_buffer("c", m.w.detach()), m.requires_grad_(False)),
    "of a buffer, its real part": buffers(lambda table: table.real),
    "of a buffer, other bits": buffers(lambda table: table.view(torch.int64)),
    "of a buffer, conjugated": buffers(torch.conj),
    "of a buffer, another shape": buffers(lambda table: table.view(6)),
    "of a buffer, expanded": buffers(lambda table: table[0, 0].expand(3)),
}


@pytest.mark.parametrize("case", SHARED)
def test_what_shares_memory_in_another_way_than_as_one_is_refused_with_both_names(case):
    model = holds(SHARED[case])
    with pytest.raises(
        ValueError, match=r"^(w|table) and c of the model share memory.*Fix: .*\.clone"
    ):
        ps.make_functional(model)


# ---- taken: memory without a common element, or without an address -------------------------------


def test_weights_in_one_piece_of_memory_are_apart():
    rnn = nn.LSTM(3, 4, num_layers=2)
    weights = list(rnn.parameters())
    parts = torch.cat([p.detach().reshape(-1) for p in weights]).split([p.numel() for p in weights])
    for param, part in zip(weights, parts, strict=True):
        param.data = part.view_as(param)
    assert list(ps.make_functional(rnn)[1]) == [name for name, _ in rnn.named_parameters()]


def fake():
    with FakeTensorMode():
        return tied_net(lambda first, second: None)


def without_address():
    return nn.Sequential(nn.Linear(2, 2, device="meta"), nn.Linear(2, 2, device="meta"))


def empty():
    model, memory = nn.Module(), torch.ones(3)
    model.a, model.b = nn.Parameter(memory[1:1]), nn.Parameter(memory[1:1].view(0, 3))
    model.c = nn.Parameter(memory)
    return model


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("make", [without_address, fake, empty])
def test_what_has_no_address_is_apart(make):
    model = make()
    _, params, _ = ps.make_functional(model)
    assert list(params) == [name for name, _ in model.named_parameters()]


# ---- one buffer under two names ------------------------------------------------------------------


def two_names(keep, change):
    """A model with a buffer that stands in two places, of which `change` changes one."""

    def forward(m, x):
        change(m)
        b = m.inner.b
        b = b["a"] if isinstance(b, dict) else b[0] if isinstance(b, list) else b
        return x + m.a + 10 * b

    model = module_of(forward, a=torch.zeros(3), inner=nn.Module())
    keep(model)
    return model


TWICE = {  # where the buffer stands a second time
    "inner.b": lambda m: m.inner.register_buffer("b", m.a),
    "inner.b ": lambda m: m.inner.register_buffer("b", m.a.view(3)),
    " inner.b": lambda m: setattr(m.inner, "b", m.a),
    "inner.b['a']": lambda m: setattr(m.inner, "b", {"a": m.a}),
    "inner.b[0]": lambda m: setattr(m.inner, "b", [m.a]),
}


def replaces_both(model):
    model.a = model.inner.b = model.a + 1


REPLACES = {
    "the first": lambda m: setattr(m, "a", m.a + 1),
    "the second": lambda m: setattr(m.inner, "b", m.a + 1),
    "each": lambda m: (setattr(m, "a", m.a + 1), setattr(m.inner, "b", m.a + 1)),
    "both": replaces_both,
    "none": lambda m: m.a.add_(1),
}


@pytest.mark.parametrize(
    ("keep", "change", "how"),
    [
        *((keep, "the first", "eager") for keep in TWICE),
        *(("inner.b", change, "vmap") for change in ("the first", "the second", "each")),
        ("inner.b", "the first", "compiled"),
    ],
)
def test_a_buffer_that_is_replaced_in_one_of_two_places_is_refused_with_both(keep, change, how):
    apply, params, buffers = ps.make_functional(two_names(TWICE[keep], REPLACES[change]))
    run = HOW[how](lambda params, x: apply(params, buffers, x))
    names = f"replaced only one of its buffer a and {re.escape(keep.strip())}"
    names += "" if how == "compiled" else ", which .*Fix: "
    with Untouched(buffers), pytest.raises(RuntimeError, match=names):
        run(params, torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("keep", "change", "how"),
    [
        *((keep, "none", "eager") for keep in ("inner.b", "inner.b ")),
        ("inner.b[0]", "none", "compiled"),
        ("inner.b", "both", "eager"),
        (" inner.b", "the second", "eager"),  # what a forward sets in an attribute is no state
    ],
)
def test_a_buffer_with_two_names_that_stays_one_counts_as_in_torch(keep, change, how):
    model = two_names(TWICE[keep], REPLACES[change])
    apply, params, buffers = ps.make_functional(model)
    run = HOW[how](apply)
    for _ in range(3):
        out, buffers = run(params, buffers, torch.zeros(3))
        assert same_bits(out, model(torch.zeros(3)))


# ---- attributes of classes -----------------------------------------------------------------------


def in_a_class(value_of):
    """A net whose class has this value in an attribute, which its forward does not read."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

        def forward(self, x):
            return self.linear(x)

    net = Net()
    Net.shared = value_of(net)
    return net


@pytest.mark.parametrize(
    ("value_of", "name"),
    [
        (lambda net: net.linear.weight, "linear.weight"),
        (lambda net: net.linear.weight.detach(), "linear.weight"),
        (lambda net: {"w": [net.linear.weight]}, "linear.weight"),
        (lambda net: net.linear, "linear"),
        (lambda net: nn.Parameter(torch.ones(3)), "a parameter"),
    ],
)
def test_a_parameter_in_a_class_which_no_copy_has_is_refused_by_name(value_of, name):
    with pytest.raises(ValueError, match=rf"attribute shared of the class Net holds {name},.*Fix"):
        ps.make_functional(nn.Sequential(in_a_class(value_of))[0])


@pytest.mark.parametrize(
    "value_of",
    [
        lambda net: nn.Parameter(torch.ones(3, 3), requires_grad=False),
        lambda net: torch.ones(3, 3),
        lambda net: net,
        lambda net: [net],
    ],
)
def test_constants_and_instances_in_a_class_are_taken(value_of):
    net, x = in_a_class(value_of), torch.ones(1, 3)
    assert same_bits(called(net, x)[0], net(x).detach())


def test_a_model_is_made_functional_under_a_transform():
    def scaled(weight):
        apply, params, buffers = ps.make_functional(module_of(lambda m, x: m.w * x, w=weight))
        return apply(params, buffers, 3.0)[0]

    assert torch.vmap(scaled)(torch.ones(2, 1)).equal(torch.full((2, 1), 3.0))


def test_a_model_that_is_not_initialised_takes_no_parameters():
    params = {"weight": torch.ones(3, 2), "bias": torch.ones(3)}
    with pytest.raises(ValueError, match="weight is not initialised yet"):
        ps.load_into(nn.LazyLinear(3), params, {})
