"""State that ends with a call is named once: in plain attributes, and what a backward writes."""

import collections
import functools
import warnings

import pytest
import torch
from helpers import mean_square_of, module_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import purescale as ps
from purescale._torch.tracing import as_on_an_accelerator


class Helper:
    calls = 0


class Part(nn.Module):
    """A layer with `kept` in an attribute, which `keep(part, x, y)` may change in each forward."""

    def __init__(self, kept, keep):
        super().__init__()
        self.linear, self.kept, self.keep = nn.Linear(3, 3), kept, keep

    def forward(self, x):
        y = self.linear(x)
        self.keep(self, x, y)
        return y


def sets(value_of):
    def keep(part, x, y):
        part.kept = value_of(part.kept, x, y)

    return keep


def calls(method):
    def keep(part, x, y):
        method(part.kept, x, y)

    return keep


def zeros():
    return torch.zeros(5, 3)


# What a part keeps at first, how it changes it, and the name of it.
STATE = {
    "a tensor on the graph": (lambda: None, sets(lambda h, x, y: y), "kept"),
    "a detached tensor": (lambda: None, sets(lambda h, x, y: y.detach()), "kept"),
    "a tensor instead of one": (zeros, sets(lambda h, x, y: h + x), "kept"),
    "a tensor instead of a number": (lambda: 0.0, sets(lambda h, x, y: h + x), "kept"),
    "a tensor that is written": (zeros, calls(lambda h, x, y: h.add_(x)), "kept"),
    "an element of a list": (lambda: [zeros()], calls(lambda h, x, y: h[0].add_(x)), "kept.0"),
    "a list instead of one": (lambda: [zeros()], sets(lambda h, x, y: [h[0] + x]), "kept.0"),
    "a value of a dict": (dict, calls(lambda h, x, y: h.update(h=y)), "kept.h"),
    "a tuple": (lambda: (zeros(), zeros()), sets(lambda h, x, y: (x, h[0])), "kept"),
    "a tuple instead of nothing": (lambda: None, sets(lambda h, x, y: (y, y)), "kept"),
    "a list that grows": (list, calls(lambda h, x, y: h.append(1.0)), "kept"),
    "a full deque": (
        lambda: collections.deque([0.0, 0.0], maxlen=2),
        calls(lambda h, x, y: h.append(float(x.detach().sum()))),
        "kept",
    ),
    "a count": (lambda: 0, sets(lambda h, x, y: h + 1), "kept"),
    "a helper": (Helper, calls(lambda h, x, y: setattr(h, "calls", h.calls + 1)), "kept.calls"),
}


def warned(model, *, train=True, with_grads=True, count=3, states=(), **options):
    """The warnings of calls with other batches, and the buffers after them."""
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        apply, params, buffers = ps.make_functional(model, states)
        loss_fn = mean_square_of(functools.partial(apply, train=train, **options))
        for x in torch.randn(count, 5, 3):
            if with_grads:
                (_, buffers), _ = ps.value_and_grad(loss_fn)(params, buffers, x)
            else:
                buffers = loss_fn(params, buffers, x)[1]
    return [str(message.message) for message in messages], buffers


# ---- plain attributes


@pytest.mark.parametrize("kind", STATE)
def test_state_in_an_attribute_is_named_once_and_its_cure_keeps_it(kind):
    make, keep, path = STATE[kind]
    for train, with_grads in ((True, True), (True, False), (False, False)):
        model = nn.Sequential(nn.Linear(3, 3), Part(make(), keep))
        (message,), _ = warned(model, train=train, with_grads=with_grads)
        assert f"its plain attributes 1.{path}, which end with the call" in message
    if kind == "a count":
        assert "self.register_buffer('count', torch.tensor(0))" in message
    if f"state_attributes=('1.{path}',)" not in message:
        return
    with torch.no_grad():
        model(torch.randn(5, 3))
    messages, buffers = warned(model, states=(f"1.{path}",))
    assert (messages, list(buffers)) == ([], [f"1.{path}"])


# What modules fill at their first call, or at each one, and what holds no state.
CACHES = {
    "a table": (lambda: None, sets(lambda h, x, y: torch.arange(len(x)).cos())),
    "tables by length": (dict, calls(lambda h, x, y: h.setdefault(len(x), torch.ones(3)))),
    "two tables": (lambda: None, sets(lambda h, x, y: (torch.ones(3), torch.zeros(3)))),
    "a flag": (lambda: False, sets(lambda h, x, y: True)),
    "a shape": (lambda: None, sets(lambda h, x, y: x.shape)),
    "a length": (lambda: None, sets(lambda h, x, y: len(x))),
    "what is reset": (zeros, sets(lambda h, x, y: None)),
}


@pytest.mark.parametrize("kind", CACHES)
def test_a_cache_is_no_state(kind):
    make, keep = CACHES[kind]
    for train, with_grads in ((True, True), (False, False)):
        model = nn.Sequential(nn.Linear(3, 3), Part(make(), keep))
        assert warned(model, train=train, with_grads=with_grads)[0] == []


def spectral():
    new = nn.utils.parametrizations.spectral_norm
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 3)), new(nn.Linear(3, 3)))


def lazy():
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    model(torch.randn(5, 3))
    return model


def checkpointed(use_reentrant=False):
    part, head = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), nn.Linear(3, 3)
    run = functools.partial(checkpoint, use_reentrant=use_reentrant)
    return module_of(lambda m, x: m.head(run(m.part, x)), part=part, head=head)


@pytest.mark.parametrize("make", [spectral, lazy, checkpointed])
def test_the_modules_of_torch_keep_no_state_but_buffers(make):
    assert warned(make())[0] == []


def test_a_function_as_method_sees_the_attributes_itself():
    make, keep, _ = STATE["a list that grows"]
    assert warned(Part(make(), keep), method=lambda part, x: part(x) + len(part.kept))[0] == []


@pytest.mark.parametrize(
    ("kind", "transform"),
    [("a tensor instead of one", "vmap"), ("a count", "grad"), ("a list that grows", "jit")],
)
def test_a_transform_names_state_too(kind, transform):
    make, keep, path = STATE[kind]
    apply, params, buffers = ps.make_functional(Part(make(), keep))

    def loss(params, x):
        return apply(params, buffers, x)[0].sum()

    x = torch.randn(2, 5, 3)
    run = {
        "vmap": lambda: torch.vmap(loss, (None, 0))(params, x),
        "grad": lambda: torch.func.grad(loss)(params, x[0]),
        "jit": lambda: ps.jit(loss, backend="aot_eager")(params, x[0]),
    }[transform]
    with pytest.warns(UserWarning, match=f"plain attributes {path}, which"):
        run()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run()


@pytest.mark.parametrize(
    ("state", "count"),
    [
        (STATE["a tensor instead of one"][:2], 1),
        (STATE["a tensor that is written"][:2], 1),
        (CACHES["a table"], 0),
    ],
)
def test_nothing_is_read_on_an_accelerator(state, count):
    make, keep = state
    with as_on_an_accelerator():
        assert len(warned(Part(make(), keep))[0]) == count


# ---- what a backward writes


def writes(part, grad):
    part.norm.copy_(grad.norm())


def counted():
    """A layer with a buffer, into which a backward hook of it writes."""

    def forward(m, x):
        y = m.linear(x)
        y.register_hook(functools.partial(writes, m))
        return y

    return module_of(forward, linear=nn.Linear(3, 3), norm=torch.zeros(()))


@pytest.mark.parametrize("by_hand", [True, False])
def test_what_a_backward_writes_into_a_buffer_is_named_once(by_hand):
    apply, params, buffers = ps.make_functional(nn.Sequential(counted(), nn.Linear(3, 3)))
    loss_fn = mean_square_of(apply)

    def train():
        for x in torch.randn(2, 5, 3):
            if by_hand:
                leaves = {key: param.clone().requires_grad_() for key, param in params.items()}
                loss_fn(leaves, buffers, x)[0].backward()
            else:
                ps.value_and_grad(loss_fn)(params, buffers, x)

    with pytest.warns(UserWarning, match=r"wrote into its buffer 0\.norm after the call") as seen:
        train()
    assert len(seen) == 1


def test_what_a_caller_writes_into_new_buffers_is_no_write_of_a_backward(recwarn):
    apply, params, buffers = ps.make_functional(nn.BatchNorm1d(3))
    _, new = apply(params, buffers, torch.randn(5, 3))
    new.pop("running_mean").zero_()
    assert not recwarn.list


def test_what_a_backward_writes_into_a_buffer_is_lost_under_a_transform_too():
    apply, params, buffers = ps.make_functional(counted())

    def loss_and_buffers(params):
        out, new = apply(params, buffers, torch.ones(2, 3))
        return out.sum(), new

    _, new = torch.func.grad(loss_and_buffers, has_aux=True)(params)
    assert new["norm"] == 0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_a_checkpoint_counts_again_is_meant_to_be_lost(use_reentrant):
    apply, params, buffers = ps.make_functional(checkpointed(use_reentrant))
    for _ in range(2):
        leaves = {key: param.clone().requires_grad_() for key, param in params.items()}
        out, buffers = apply(leaves, buffers, torch.randn(5, 3).requires_grad_())
        out.sum().backward()
    assert buffers["part.1.num_batches_tracked"] == 2
