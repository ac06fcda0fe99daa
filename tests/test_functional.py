"""A module as a pure function, for modules that nobody here wrote, as they come."""

import collections
import copy
import functools
import gc
import pickle
import types
import weakref
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    Untouched,
    called,
    in_one_graph,
    mean_square_of,
    module_of,
    same_bits,
    shares_memory,
    small_net,
    started,
    trained,
    with_its_double,
)
from torch import nn

import purescale as ps
from purescale.testing import assert_vmap_equals_loop


def tied_net():
    embed, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    head.weight = embed.weight
    return module_of(lambda m, tokens: m.head(m.embed(tokens)), embed=embed, head=head)


def stepped(params, buffers, loss_fn, *windows, **settings):
    """The state after a step for each window, and what the steps told."""
    sgd = ps.from_torch(torch.optim.SGD, lr=0.1)
    state, step = started(params, None, sgd, ps.DynamicScale(), loss_fn=loss_fn, **settings)
    return trained(state._replace(buffers=buffers), step, windows)


def two_names():
    """One module under two names, with a weight that is tied besides."""
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    b.weight = a.weight
    return module_of(lambda m, x: m.b(m.again(m.a(x))), a=a, again=a, b=b)


def structured():
    """Keyword arguments in, a nested structure out, a buffer that is replaced and one not saved."""

    def forward(m, x, *, scale=1.0, extra=None):
        m.calls = m.calls + 1
        out = m.linear(x) * scale + m.offset
        return {"out": out, "parts": [out[0], (extra, 3)]}

    model = module_of(forward, linear=nn.Linear(4, 2), calls=torch.zeros(()))
    model.register_buffer("offset", torch.ones(2), persistent=False)
    return model


TOKENS = torch.arange(10).reshape(2, 5) % 7
ROWS, FLAT = torch.arange(40.0).sin().reshape(2, 5, 4), torch.arange(24.0).sin().reshape(6, 4)
MODULES = {
    "tied weights": (tied_net, TOKENS),
    "one module twice": (two_names, FLAT),
    "lstm": (
        lambda: nn.LSTM(4, 3, num_layers=2, batch_first=True, bidirectional=True),
        ROWS,
    ),
    "attention": (lambda: nn.MultiheadAttention(4, 2, batch_first=True), (ROWS,) * 3),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
        ROWS,
    ),
    "weight_norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), FLAT),
    "spectral_norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)), FLAT),
    "spectral_norm, by a hook": (lambda: nn.utils.spectral_norm(nn.Linear(4, 3)), FLAT),
    "batch norm": (lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), FLAT),
    "structured": (structured, FLAT),
}


@pytest.fixture(params=MODULES, ids=str)
def case(request):
    make, inputs = MODULES[request.param]
    return make(), inputs if isinstance(inputs, tuple) else (inputs,)


def tensors_of(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def first(out):
    return out["out"] if isinstance(out, dict) else out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("train", [True, False])
def test_apply_equals_the_module(case, train):
    module, args = case
    apply, params, buffers = ps.make_functional(module)
    out, new_buffers = apply(params, buffers, *args, train=train)
    expected = module.train(train)(*args)
    torch.testing.assert_close(first(out), first(expected))
    torch.testing.assert_close(
        new_buffers, {name: b.detach() for name, b in module.named_buffers()}
    )


def test_gradients_equal_the_modules(case):
    module, args = case
    apply, params, buffers = ps.make_functional(module)
    grads = torch.func.grad(lambda p: first(apply(p, buffers, *args)[0]).square().sum())(params)
    first(module(*args)).square().sum().backward()
    torch.testing.assert_close(
        grads, {name: p.grad for name, p in module.named_parameters()}, rtol=1e-4, atol=1e-4
    )


def test_neither_the_module_nor_the_arguments_are_changed(case):
    module, args = case
    tensors = tensors_of(module)
    modes = [m.training for m in module.modules()]
    apply, params, buffers = ps.make_functional(module)
    with Untouched((tensors, params, buffers, args)):
        _, new_buffers = apply(params, buffers, *args)
    assert tensors_of(module).keys() == tensors.keys()
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


# torch has no vmap rule for the kernels of the other modules.
@pytest.mark.parametrize(
    "case",
    ["tied weights", "one module twice", "attention", "batch norm", "structured"],
    indirect=True,
)
def test_apply_under_vmap_equals_a_loop(case):
    module, args = case
    apply, params, buffers = ps.make_functional(module)

    def call(params, buffers):
        out, new_buffers = apply(params, buffers, *args)
        return first(out), new_buffers

    stacks = with_its_double((params, buffers))
    assert_vmap_equals_loop(call, *stacks, rtol=1.3e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("frozen", "names"),
    [([0], ["1.weight", "1.bias"]), ([0, 1], ["0.weight", "0.bias", "1.weight", "1.bias"])],
)
def test_a_parameter_without_gradient_is_a_buffer_but_in_a_model_that_is_frozen_as_a_whole(
    frozen, names
):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    for index in frozen:
        model[index].requires_grad_(False)
    apply, params, buffers = ps.make_functional(model)
    assert list(params) == names
    rest = [name for name, _ in model.named_parameters() if name not in names]
    assert list(buffers) == rest
    assert apply.frozen_params == set(rest)
    torch.testing.assert_close(apply(params, buffers, torch.ones(1, 2))[0], model(torch.ones(1, 2)))


class BatchNormOfALibrary(nn.modules.batchnorm._BatchNorm):
    """As apex.parallel.SyncBatchNorm."""


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)), {"1.weight", "1.bias"}),
        (nn.Sequential(nn.GroupNorm(1, 2), nn.RMSNorm(2)), {"0.weight", "0.bias", "1.weight"}),
        (nn.Sequential(nn.LayerNorm(2), nn.LSTM(2, 2)), {"0.weight", "0.bias"}),
        (nn.Sequential(nn.Linear(2, 2), BatchNormOfALibrary(2)), {"1.weight", "1.bias"}),
    ],
)
def test_norm_params_names_the_weights_of_norms(model, names):
    assert ps.make_functional(model)[0].norm_params == names


def test_apply_takes_inference_tensors():
    apply, params, buffers = ps.make_functional(nn.Linear(2, 1))
    with torch.inference_mode():
        params = {n: p.clone() for n, p in params.items()}
        apply(params, buffers, torch.ones(1, 2))


def test_the_weights_of_an_rnn_stay_where_they_are_in_memory(monkeypatch):
    def forward(m, x):
        m.rnn.flatten_parameters()
        return m.rnn(x)[0]

    def moved(rnn):  # as on CUDA
        with torch.no_grad():
            for weight in rnn._flat_weights:
                weight.set_(weight.clone())

    model = module_of(forward, rnn=nn.GRU(5, 3))
    apply, params, buffers = ps.make_functional(model)
    expected = model(torch.ones(2, 5)).detach()
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", moved)
    with Untouched(params):
        assert same_bits(apply(params, buffers, torch.ones(2, 5))[0], expected)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda apply: pickle.loads(pickle.dumps(apply))])
@pytest.mark.parametrize("make", [small_net, lambda: nn.Sequential(nn.Flatten(), nn.LSTM(36, 3))])
def test_a_copy_of_apply_does_the_same(how, make):
    apply, params, buffers = ps.make_functional(make())
    x = torch.randn(2, 1, 6, 6)
    out = apply(params, buffers, x)
    other = how(apply)
    for _ in range(2):
        again = other(params, buffers, x)
        assert same_bits((first(again[0]), again[1]), (first(out[0]), out[1]))


class BothError(nn.Module, Exception):
    pass


class Slots(nn.Linear):
    __slots__ = ("extra",)


def distributed():
    module = object.__new__(nn.parallel.DistributedDataParallel)  # one needs a process group
    nn.Module.__init__(module)
    return module


def with_hook(register):
    layer = nn.Linear(5, 5)
    getattr(layer.weight, register)(lambda grad: None)
    return layer


def patched():
    layer = nn.BatchNorm1d(5)
    old = layer.forward
    layer.forward = lambda x: old(x.float())
    return layer


def with_a_helper():
    layer, other = nn.Linear(5, 5), nn.Linear(5, 5)
    kept = {"deep": [Holder(other)]}
    layer.register_forward_hook(lambda module, inputs, out: kept["deep"][0].weight(out))
    return nn.Sequential(layer, other)


def over_a_global():
    GLOBALS["net"] = net = nn.Sequential(nn.Linear(5, 5), nn.ReLU())
    exec("def hook(module, inputs, out): return net[1](out)", GLOBALS)
    net[0].register_forward_hook(GLOBALS["hook"])
    return net


GLOBALS, HOOKED = {}, "1.weight has a hook on its gradient"


@pytest.mark.filterwarnings("ignore:.torch.jit.*deprecated")
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (nn.LazyBatchNorm1d, ValueError, r"1.weight is not initialised yet.*run `model\(example_b"),
        (lambda: nn.LazyBatchNorm1d(affine=False), ValueError, "1.running_mean is not initialised"),
        (lambda: torch.jit.trace(nn.ReLU(), torch.ones(5)), TypeError, r"1 is a \w+ of torch.jit"),
        (distributed, TypeError, r"1 is a DistributedDataParallel.*Fix: .*wrapper\.module"),
        (lambda: with_hook("register_hook"), ValueError, HOOKED),
        (lambda: with_hook("register_post_accumulate_grad_hook"), ValueError, HOOKED),
        (BothError, TypeError, "1 is a BothError, which a call cannot make anew.*"),
        (lambda: Slots(2, 2), TypeError, "1 is a Slots.*has __slots__.*remove"),
        (patched, ValueError, "1.forward.* of the model holds its module 1"),
        (with_a_helper, ValueError, "1.0._forward_hooks.* of the model holds its module 1.1"),
        (over_a_global, ValueError, "1.0._forward_hooks.* of the model holds its module 1"),
    ],
)
def test_a_part_that_a_call_cannot_have_is_refused_by_name(make, error, message):
    with pytest.raises(error, match=f"^{message}"):
        ps.make_functional(nn.Sequential(nn.ReLU(), make()))


# ---- a forward that writes into its parameters


def writes(write, frozen=False):
    """A model that does `write` to itself, without autograd, before it computes."""

    def forward(m, x):
        with torch.no_grad():
            write(m)
        return x @ m.w * m.v * m.running

    w, v = nn.Parameter(torch.full((3, 3), 2.0)), nn.Parameter(torch.ones(3), not frozen)
    return module_of(forward, w=w, v=v, running=torch.ones(3))


WRITES = {
    "clamp_": lambda m: m.w.clamp_(0, 1),
    "*=": lambda m: m.w.__imul__(0.5),
    "[0] =": lambda m: m.w.__setitem__(0, 0),
    "detached": lambda m: m.w.detach().zero_(),
    "nn.init": lambda m: nn.init.zeros_(m.w),
    "torch.clamp_": lambda m: torch.clamp_(m.w, 0, 1),
    "a view": lambda m: m.w[0].zero_(),
    "other data": lambda m: setattr(m.w, "data", m.w / 2),
    "a view of data": lambda m: m.w.data.view(-1)[:2].mul_(2),
    "foreach": lambda m: torch._foreach_zero_([m.w]),
}
HOW = {
    "eager": lambda f: f,
    "no_grad": torch.no_grad(),
    "inference_mode": torch.inference_mode(),
    "grad": torch.func.grad,
    "vmap": lambda f: lambda p: torch.vmap(lambda _: f(p))(torch.ones(2)),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(
    ("write", "how"),
    [*((write, "eager") for write in WRITES), *(("a view", how) for how in HOW if how != "eager")],
)
def test_a_forward_that_writes_into_a_parameter_is_an_error_that_names_it(write, how):
    apply, params, buffers = ps.make_functional(writes(WRITES[write]))
    with pytest.raises(RuntimeError, match=r"wrote into its parameter w, so params\['w'\] changed"):
        HOW[how](lambda p: apply(p, buffers, torch.ones(1, 3))[0].sum())(params)


@pytest.mark.parametrize(
    ("written", "write"), [(0, torch.zero_), (2, lambda t: setattr(t, "data", t.detach().clone()))]
)
def test_an_error_names_the_one_of_several_parameters_that_was_written(write, written):
    def forward(m, x):
        with torch.no_grad():
            write(m.parts[written])
        return x * sum(part.sum() for part in m.parts)

    parts = nn.ParameterList([torch.ones(n) for n in (1, 2, 3)])
    with pytest.raises(RuntimeError, match=rf"its parameter parts\.{written},"):
        called(module_of(forward, parts=parts), torch.ones(1))


@pytest.mark.parametrize("wanted", [False, True])
def test_flags_that_a_forward_switches_are_those_of_the_caller_after_the_call(wanted):
    def forward(m, x):
        m.a.requires_grad_(not wanted)
        m.mean.requires_grad_()
        return m.b(m.a(x)) + m.mean

    layers = {"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)}
    apply, params, buffers = ps.make_functional(module_of(forward, **layers, mean=torch.zeros(3)))
    for param in params.values():
        param.requires_grad_(wanted)
    _, new_buffers = apply(params, buffers, torch.ones(1, 3))
    assert {param.requires_grad for param in params.values()} == {wanted}
    assert not new_buffers["mean"].requires_grad


def test_a_compiled_forward_that_writes_into_a_parameter_leaves_params_alone():
    write = lambda m: (m.w.data.clamp_(0, 1), WRITES["a view"](m))  # noqa: E731
    apply, params, buffers = ps.make_functional(writes(write))
    forward = torch.func.grad(lambda p: apply(p, buffers, torch.ones(1, 3))[0].sum())
    with Untouched(params):
        in_one_graph(forward)(params)


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (lambda m: m.running.data.mul_(2), "running"),
        (lambda m: setattr(m.running, "data", m.running * 2), "running"),
        (lambda m: m.v.data.mul_(2), "v"),
    ],
)
def test_buffers_and_frozen_parameters_may_be_written_through_data(write, name):
    apply, params, buffers = ps.make_functional(writes(write, frozen=True))
    with Untouched(buffers):
        _, new_buffers = apply(params, buffers, torch.ones(1, 3))
    assert same_bits(new_buffers[name], torch.full((3,), 2.0))


def test_a_parameter_in_a_step_is_a_parameter_and_what_comes_out_is_a_tensor():
    def forward(m):
        assert isinstance(m.w, nn.Parameter)
        return {"w": m.w, "parts": [m.w.detach(), m.w * 2]}

    apply, params, buffers = ps.make_functional(module_of(forward, w=nn.Parameter(torch.ones(2))))

    def loss_fn(params, buffers, _):
        out, buffers = apply(params, buffers)
        return out["parts"][1].sum(), buffers, out

    _, infos = stepped(params, buffers, loss_fn, [None])
    out = infos[0].aux[0]
    assert {type(t) for t in (out["w"], *out["parts"])} == {torch.Tensor}


@pytest.mark.parametrize("compiled", [False, True])
def test_a_frozen_embedding_that_renormalises_its_weight_is_written_as_torch_writes_it(compiled):
    model = nn.Sequential(
        nn.Embedding.from_pretrained(torch.ones(5, 3), max_norm=0.5), nn.Linear(3, 2)
    )
    apply, params, buffers = ps.make_functional(model)
    call = in_one_graph(apply) if compiled else apply
    rows = torch.tensor([0, 3])
    with Untouched(buffers):
        out, new_buffers = call(params, buffers, rows)
    assert same_bits(out, model(rows))
    assert same_bits(new_buffers, {"0.weight": model[0].weight})


def tied_to_a_head():
    module = nn.Embedding(3, 2, max_norm=0.1)
    module.head = nn.Linear(2, 3, bias=False)
    module.head.weight = module.weight
    return module


@pytest.mark.parametrize(
    ("make", "rows"),
    [
        (lambda: nn.EmbeddingBag(3, 2, max_norm=0.1), [[0, 2]]),
        (tied_to_a_head, [0, 2]),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Embedding(3, 2, max_norm=0.1)), [0, 2]),
    ],
)
def test_an_embedding_that_renormalises_its_weight_leaves_params_alone(make, rows):
    module, rows = make(), torch.tensor(rows)
    apply, params, buffers = ps.make_functional(module)
    with Untouched(params):
        out, _ = apply(params, buffers, rows)
    assert same_bits(out, module(rows).detach())


# ---- nothing of a call stays


@pytest.mark.filterwarnings("ignore:the forward of the model left another value")
@pytest.mark.parametrize("make", [two_names, structured])
@pytest.mark.parametrize("fails", [False, True])
def test_no_tensor_of_a_call_is_kept_alive_and_the_next_call_is_as_before(make, fails):
    apply, params, buffers = ps.make_functional(make())
    before = apply(params, buffers, torch.ones(1, 4))
    mine = {name: p.clone() for name, p in params.items()}
    memory = [weakref.ref(p.untyped_storage()) for p in mine.values()]
    with pytest.raises(RuntimeError) if fails else nullcontext():
        apply(mine, buffers, torch.ones(1, 7 if fails else 4))
    del mine
    gc.collect()
    assert [ref() for ref in memory] == [None] * len(memory)
    assert same_bits(apply(params, buffers, torch.ones(1, 4)), before)


def replaces(m, x):
    m.mem = 0.9 * m.mem + x.mean(0)


@pytest.mark.filterwarnings("ignore:the forward of the model left another value")
@pytest.mark.parametrize(
    ("change", "mapped"),
    # torch.vmap refuses a write of one member into what all have in common
    [
        (lambda m, x: m.mem.add_(x.mean(0)), False),
        (lambda m, x: setattr(m, "mem", x.mean(0)), False),
        (replaces, True),
    ],
    ids=["writes", "sets", "replaces"],
)
def test_each_call_begins_with_the_tensors_and_arrays_of_make_functional(change, mapped):
    def forward(m, x):
        change(m, x)
        m.seen += 1
        return m.linear(x) + m.mem + float(m.seen[0])

    model, x = module_of(forward, linear=nn.Linear(3, 3)), FLAT[:4, :3]
    model.mem, model.seen = torch.zeros(3), np.zeros(2)
    apply, params, buffers = ps.make_functional(model)
    call = torch.vmap(lambda x: apply(params, buffers, x)[0]) if mapped else None
    with Untouched((params, model.mem)):
        outs = [call(x[None])[0] if mapped else apply(params, buffers, x)[0] for _ in range(3)]
    assert model.seen.sum() == 0
    assert same_bits(outs[1:], outs[:1] * 2)
    torch.testing.assert_close(outs[0], model(x))


@pytest.mark.parametrize("how", [lambda f: f, in_one_graph])
def test_apply_inside_of_apply_has_parameters_of_its_own(how):
    def forward(m, x, then=None):
        return m.linear(x) if then is None else then(m.linear(x)) + m.linear(x)

    apply, params, buffers = ps.make_functional(module_of(forward, linear=nn.Linear(3, 3)))
    others, x = {name: p * 2 for name, p in params.items()}, torch.ones(1, 3)
    nested = how(lambda p, q, x: apply(p, buffers, x, then=lambda y: apply(q, buffers, y)[0])[0])(
        params, others, x
    )
    inner = apply(params, buffers, x)[0]
    torch.testing.assert_close(nested, apply(others, buffers, inner)[0] + inner)


def test_apply_holds_no_memory_of_the_model():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.LSTM(2, 2))
    apply, params, buffers = ps.make_functional(model)
    apply(params, buffers, torch.ones(2, 2))
    memory = [weakref.ref(t.untyped_storage()) for t in (*model.parameters(), *model.buffers())]
    modules = [weakref.ref(module) for module in model.modules()]
    del model
    gc.collect()
    assert [ref() for ref in memory + modules if ref() is not None] == []


def test_a_call_while_another_goes_on_does_not_see_the_hooks_that_it_installed():
    def forward(m, x, then):
        m.layer.register_forward_hook(lambda module, inputs, out: out * 2)
        return m.layer(x), then()

    apply, params, buffers = ps.make_functional(module_of(forward, layer=nn.Linear(3, 3)))
    x = torch.ones(2, 3)

    def another():
        return apply(params, buffers, x, lambda: None)[0][0]

    (outer, inner), _ = apply(params, buffers, x, another)
    assert same_bits(inner, outer)
    assert same_bits(inner, 2 * F.linear(x, params["layer.weight"], params["layer.bias"]))


# ---- buffers that come, go and change


def does(what, state=None):
    """A model that does `what` to itself before it computes."""

    def forward(m, x):
        what(m, x)
        return m.relu(m.linear(x))

    model = module_of(
        forward,
        linear=nn.Linear(3, 3),
        relu=nn.ReLU(),
        layers=nn.ModuleList(),
        w=nn.Parameter(torch.ones(2)),
        state=torch.zeros(2) if state is None else state,
    )
    model.register_buffer("later", None)
    return model


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (lambda m, x: m.register_buffer("cos", x), "registered 'cos' in its Made.*Fix: run `model"),
        (lambda m, x: setattr(m, "later", x), "registered 'later' in its Made"),
        (lambda m, x: setattr(m, "more", nn.Parameter(x)), "registered 'more' in its Made"),
        (lambda m, x: m.layers or m.layers.append(nn.Linear(3, 3)), "of the model registered"),
        (lambda m, x: setattr(m.relu, "late", nn.Parameter(x)), "of the model registered"),
        (lambda m, x: setattr(m, "relu", nn.Linear(3, 3)), "registered 'relu' in its Made.*Fix: "),
        (lambda m, x: setattr(m, "relu", nn.Sequential(m.relu, nn.BatchNorm1d(3))), "d 'relu' in"),
        (lambda m, x: setattr(m, "state", None), "removed its buffer state, or set it to None"),
        (lambda m, x: delattr(m, "state"), "removed its buffer state, or set it to None"),
        (lambda m, x: setattr(m, "w", nn.Parameter(m.w / 2)), "replaced its parameter w.*Fix: "),
        (lambda m, x: delattr(m, "w"), "removed its parameter w.*Fix: "),
    ],
)
def test_what_is_not_there_in_every_call_is_refused_every_time(what, message):
    apply, params, buffers = ps.make_functional(does(what))
    for _ in range(3):
        with pytest.raises(RuntimeError, match=message):
            apply(params, buffers, torch.ones(2, 3))


def test_a_buffer_that_was_none_and_gets_a_value_is_refused_in_every_mapped_call():
    apply, params, buffers = ps.make_functional(does(lambda m, x: setattr(m, "later", x)))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"registered 'later' in its Made.*Fix: "):
            torch.vmap(apply, (None, None, 0))(params, buffers, torch.ones(4, 3))


def test_a_module_of_the_same_tensors_may_take_the_place_of_another():
    def forward(m, x):  # as BigBird does for short inputs
        m.layer = nn.Sequential(nn.Tanh(), m.layer[0])
        return m.layer(x)

    layer, x = nn.Sequential(nn.Linear(3, 3)), torch.ones(4, 3)
    apply, params, buffers = ps.make_functional(module_of(forward, layer=layer))
    for _ in range(2):
        out, _ = apply(params, buffers, x)
        assert same_bits(out, layer[0](torch.tanh(x)).detach())


def test_what_is_put_into_an_empty_module_is_refused_in_a_compiled_call_too():
    empty = module_of(lambda m, x: (m.register_buffer("late", x), x)[1])
    apply, params, buffers = ps.make_functional(nn.Sequential(nn.Linear(3, 3), empty))
    compiled = torch.compile(lambda p, x: apply(p, buffers, x)[0], backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="the forward of the model registered"):
        compiled(params, torch.ones(1, 3))


@pytest.mark.parametrize("with_graph", [True, False])
def test_a_buffer_that_is_replaced_by_an_argument_shares_no_memory_with_it(with_graph):
    model, x = does(lambda m, x: setattr(m, "state", x)), torch.ones(1, 3)
    with nullcontext() if with_graph else torch.no_grad():
        new = called(model, x)[1]["state"]
    assert same_bits(new, x)
    assert not shares_memory(new, x)


@pytest.mark.parametrize(
    ("own", "value", "how"),
    [
        (torch.zeros(3), lambda old: (old + 0.5).half(), in_one_graph),
        (torch.zeros(3, dtype=torch.int64), lambda old: old + 0.5, lambda f: f),
    ],
)
def test_a_buffer_that_is_replaced_in_another_dtype_keeps_its_own_unless_it_would_be_truncated(
    own, value, how
):
    model = does(lambda m, x: setattr(m, "state", value(m.state)), own)
    apply, params, buffers = ps.make_functional(model)
    _, new = how(apply)(params, buffers, torch.ones(1, 3))
    assert same_bits(new["state"], torch.full((3,), 0.5))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (lambda p, b, x: (p, x), TypeError, r"buffers is a tensor of shape \(4, 2\).*Fix: `out, b"),
        (lambda p, b, x: (list(p.values()), b, x), TypeError, "params is list"),
        (lambda p, b, x: (p | {"weight": 1}, b, x), TypeError, r"params\['weight'\] is int"),
        (lambda p, b, x: ({}, b, x), RuntimeError, "params has .*: missing bias, weight; not in "),
        (lambda p, b, x: (p, b | {"k": x}, x), RuntimeError, "buffers has .*not in the model: k"),
    ],
)
def test_what_are_no_params_and_buffers_of_the_model_is_refused(arguments, error, message):
    apply, params, buffers = ps.make_functional(nn.BatchNorm1d(2))
    for call in (apply, ps.with_policy(apply, "float32")):
        with pytest.raises(error, match=message):
            call(*arguments(params, buffers, torch.ones(4, 2)))


# ---- and back


class Everything(nn.Module):
    """Tied, frozen and normal parameters; buffers that are saved, are not, are sparse."""

    def __init__(self):
        super().__init__()
        self.tied = tied_net()
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("offset", torch.randn(2), persistent=False)
        self.register_buffer("adjacency", torch.eye(2).to_sparse())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_load_into_is_the_way_back_of_make_functional_in_any_dtype(dtype):
    source, target = Everything().to(dtype), Everything()
    before = tensors_of(target)
    _, params, buffers = ps.make_functional(source)
    ps.load_into(target, params, buffers)
    assert all(tensors_of(target)[name] is tensor for name, tensor in before.items())
    assert not shares_memory(before, (params, buffers))
    assert target.tied.head.weight is target.tied.embed.weight
    expected = {name: t.detach().to(before[name].dtype) for name, t in tensors_of(source).items()}
    assert same_bits({name: t.detach() for name, t in tensors_of(target).items()}, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p, b: (p | {"weight": torch.ones(3)}, b), r"weight has shape \(3,\), .* \(2,\)"),
        (lambda p, b: (p, {}), "missing running_mean, missing running_var, missing num_batches"),
        (lambda p, b: (p | {"gamma": p["weight"]}, b), "gamma is not in the model"),
        (lambda p, b: (p | b, b), "running_mean is in both dicts"),
        (lambda p, b: (p | {"bias": p["bias"].to("meta")}, b), "bias is on meta"),
        (lambda p, b: (p | {"bias": p["bias"] * 1j}, b), "bias is torch.complex64, expected torch"),
        (lambda p, b: (p | {"bias": p["bias"].to_sparse()}, b), "bias is Tensor of torch.sparse"),
    ],
)
def test_load_into_names_what_does_not_fit_and_changes_nothing(change, message):
    model = nn.BatchNorm1d(2)
    _, params, buffers = ps.make_functional(nn.BatchNorm1d(2))
    params = {name: p + 1 for name, p in params.items()}
    with Untouched(tensors_of(model)), pytest.raises(ValueError, match=message):
        ps.load_into(model, *change(params, buffers))


@torch.inference_mode()
def of_inference_mode():
    return nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize(
    ("bias", "words"),
    [
        (of_inference_mode, "was made under"),
        (lambda: nn.Parameter(torch.zeros(1).expand(2)), "was expanded"),
        (lambda: nn.Parameter(torch.zeros(2, device="meta")), "has no memory"),
    ],
)
def test_load_into_writes_nothing_if_a_later_tensor_cannot_be_written(bias, words):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    _, params, buffers = ps.make_functional(model)
    model[1].bias = bias()
    params = {name: leaf + 1 for name, leaf in params.items()}
    message = rf"1\.bias of the model {words}"
    with Untouched(list(model.parameters())[:-1]), pytest.raises(ValueError, match=message):
        ps.load_into(model, params, buffers)


def test_what_is_no_model_and_no_dict_is_refused():
    for arguments in ((torch.ones(1), {}, {}), (nn.Linear(1, 1), {}, None)):
        with pytest.raises(TypeError, match="Fix: "):
            ps.load_into(*arguments)
    with pytest.raises(TypeError, match=r"takes an nn\.Module, got function"):
        ps.make_functional(lambda x: x)


# ---- sparse buffers


@pytest.mark.parametrize(
    "settings", [{"donate": True}, {"on_nonfinite": "drop_microbatch", "max_retries": 1}]
)
def test_a_step_of_a_net_over_a_graph_keeps_its_sparse_adjacency(settings):
    parts = {"linear": nn.Linear(3, 2), "adjacency": torch.eye(4).to_sparse()}
    model = module_of(
        lambda m, x: (m.calls.add_(1), m.adjacency @ m.linear(x))[1], calls=torch.zeros(()), **parts
    )
    apply, params, buffers = ps.make_functional(model)
    x, adjacency = torch.ones(4, 3), buffers["adjacency"]
    windows = [[x, x], [x * torch.inf] * 2, [x, x]]
    state, _ = stepped(params, buffers, mean_square_of(apply), *windows, **settings)
    assert state.buffers["adjacency"] is adjacency
    assert state.buffers["calls"] == 4
    assert torch.equal(adjacency.to_dense(), torch.eye(4))


def test_a_forward_that_writes_into_a_sparse_buffer_is_an_error_that_names_it():
    def forward(m, x):
        return m.adjacency.mul_(0.5) @ (x * m.w)

    tensors = {"w": nn.Parameter(torch.ones(4)), "adjacency": torch.eye(4).to_sparse()}
    with pytest.raises(RuntimeError, match=r"its buffer adjacency, which is not dense.*Fix: "):
        called(module_of(forward, **tensors), torch.ones(4))


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("value", [1.0, torch.inf])
def test_buffers_that_require_a_gradient_are_off_the_graph_after_a_step(donate, value):
    state, _ = stepped(
        {"w": torch.ones(3)},
        {"frozen": torch.ones(3, requires_grad=True)},
        lambda p, b, x: ((p["w"] * x * b["frozen"]).sum(), b),
        [torch.full((3,), value)],
        donate=donate,
    )
    assert not state.buffers["frozen"].requires_grad


# ---- tensors and modules that stand elsewhere in the model too


class Holder:
    def __init__(self, weight):
        self.weight = weight


Pair = collections.namedtuple("Pair", "first second")


def elsewhere(keep, read):
    """A model whose weight stands in one more place, from which the forward reads it."""
    w, offset = nn.Parameter(torch.eye(5) * 3), torch.ones(5)
    model = module_of(lambda m, x: F.linear(x, read(m.kept).t()) + m.offset, w=w, offset=offset)
    model.kept = keep(model)
    return model


FOLLOWED = {
    "a list": (lambda m: [m.w], lambda kept: kept[0]),
    "a list in a dict in a tuple": (lambda m: ({"a": [1, m.w]},), lambda kept: kept[0]["a"][1]),
    "a helper object": (lambda m: Holder(m.w), lambda kept: kept.weight),
    "a module in a list, with a tied weight": (lambda m: [tied(m.w)], lambda kept: kept[0].weight),
    "a partial": (lambda m: functools.partial(dict, w=m.w), lambda kept: kept()["w"]),
    "its module in a tuple": (lambda m: (m,), lambda kept: kept[0].w),
    "a method": (lambda m: m.parameters, lambda kept: next(kept())),
    "a named tuple": (lambda m: Pair(1, m.w), lambda kept: kept.second),
    "positional arguments": (lambda m: functools.partial(torch.mul, m.w), lambda kept: kept(1)),
    "a deque": (lambda m: collections.deque([m.w]), lambda kept: kept[0]),
    "a weak reference": (lambda m: weakref.ref(m.w), lambda kept: kept()),
}
REFUSED = {
    "a set": lambda m: {m.w},
    "a key": lambda m: {m.w: 1},
    "a namespace": lambda m: types.SimpleNamespace(deep=[m]),
    # objects that are not written in Python
    "a method of the tensor": lambda m: m.w.t,
    "a closure": lambda m: lambda: m.w,
    "a cached method": lambda m: functools.lru_cache(m.parameters),
    "the function of a method": lambda m: types.MethodType(lambda part: m.w, m),
    "a factory of defaults": lambda m: collections.defaultdict(m.parameters),
    "an array": lambda m: np.array([m, None], dtype=object),
}


def tied(weight):
    linear = nn.Linear(5, 5, bias=False)
    linear.weight = weight
    return linear


@pytest.mark.parametrize(
    ("where", "how"),
    [
        *((where, lambda f: f) for where in FOLLOWED),
        *((where, in_one_graph) for where in ("a list", "a method")),
    ],
)
def test_a_weight_that_stands_elsewhere_too_is_that_of_the_call(where, how):
    apply, params, buffers = ps.make_functional(elsewhere(*FOLLOWED[where]))
    for factor in (1.0, 2.0):
        moved = {"w": params["w"] * factor}
        grad = torch.func.grad(lambda p: apply(p, buffers, torch.ones(2, 5))[0].sum())
        assert same_bits(how(grad)(moved)["w"], torch.full((5, 5), 2.0))
        assert same_bits(apply(moved, buffers, torch.eye(5))[0], moved["w"] + 1)


@pytest.mark.parametrize("where", REFUSED)
def test_a_weight_where_none_can_be_put_is_refused_by_name(where):
    model = nn.Sequential(nn.ReLU(), elsewhere(REFUSED[where], None))
    named = r"^((a key|an element) of )?1\.kept\S* of the model holds its .* 1.*Fix: "
    with pytest.raises(ValueError, match=named):
        ps.make_functional(model)


# What a forward reads of a tensor that has no value in a call.
OPERATIONS = [
    lambda w, x: x @ w,
    lambda w, x: F.linear(x, w),
    lambda w, x: torch.cat([x, w]),
    lambda w, x: 1 - w,
    lambda w, x: w.shape,
    lambda w, x: w[0],
    lambda w, x: bool(w),
    lambda w, x: x.mul_(w),
]


@pytest.mark.parametrize(
    ("view", "keep", "operation"),
    [
        (lambda w: w.t(), lambda t: [t], lambda w, x: x @ w),
        (lambda w: w * 2, lambda t: (t,), lambda w, x: x @ w),
        *((lambda w: w.detach(), lambda t: t, operation) for operation in OPERATIONS),
    ],
)
def test_what_was_computed_from_a_weight_before_is_refused_where_it_is_read(view, keep, operation):
    def read(kept):
        return operation(kept if isinstance(kept, torch.Tensor) else kept[0], torch.ones(5, 5))

    model = elsewhere(lambda m: keep(view(m.w)), read)
    with pytest.raises(RuntimeError, match=r"kept\S* of the model was computed from a par.*Fix: "):
        called(model, torch.ones(5, 5))


class ReadsLater(torch.autograd.Function):
    """A product whose backward reads the weight of the module."""

    @staticmethod
    def forward(ctx, x, module, weight):
        ctx.module = module
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.module.w.t(), None, None


def test_a_weight_that_is_read_in_the_backward_pass_is_that_of_the_call():
    def forward(m, x, then=lambda: None):
        then()
        return ReadsLater.apply(x, m, m.w)

    apply, params, buffers = ps.make_functional(module_of(forward, w=nn.Parameter(torch.eye(5))))
    x = torch.ones(2, 5, requires_grad=True)
    outs = [apply({"w": params["w"] * k}, buffers, x)[0] for k in (2, 3)]
    for k, out in zip((2, 3), outs, strict=True):
        (grad,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
        assert same_bits(grad, torch.full((2, 5), float(k)))
    # also during another call
    apply({"w": params["w"] * 7}, buffers, x, then=lambda: outs[0].sum().backward())
    assert same_bits(x.grad, torch.full((2, 5), 2.0))


class Hook:
    def __init__(self, other):
        self.other = other

    def __call__(self, module, inputs, out):
        return self.other(out)


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net[0].register_forward_hook(Hook(net[1])),
        lambda net: net.__setitem__(0, torch.compile(net[0], backend="eager")),
        lambda net: net[0].compile(backend="eager"),
    ],
    ids=["a method for a hook", "a compiled child", "a module that compiles itself"],
)
def test_what_deepcopy_follows_works_on_the_copy(change):
    net = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))
    change(net)
    apply, params, buffers = ps.make_functional(net)
    x = torch.randn(4, 5)
    with Untouched(tensors_of(net)):
        out, new_buffers = apply(params, buffers, x)
        moved = {name: p + 1 for name, p in params.items()}
        assert not same_bits(apply(moved, buffers, x)[0], out)
    torch.testing.assert_close(out, net(x).detach())
    torch.testing.assert_close(new_buffers, dict(net.named_buffers()))


class Computed(nn.Linear):
    """It keeps a tensor that was computed from its weight."""

    def __init__(self, use):
        super().__init__(2, 2)
        self.double, self.use = 2 * self.weight, use

    def forward(self, x):
        return super().forward(x) + self.use(self.double)


def test_a_method_of_a_computed_tensor_is_refused_and_a_copy_is_not():
    x = torch.ones(1, 2)
    apply, params, buffers = ps.make_functional(Computed(lambda t: t.sum()))
    with pytest.raises(RuntimeError, match="double of the model was computed from a parameter"):
        apply(params, buffers, x)
    model = Computed(lambda t: float(copy.copy(t) is t))
    apply, params, buffers = ps.make_functional(model)
    assert apply(params, buffers, x)[0].equal(nn.functional.linear(x, model.weight, model.bias))


def test_a_method_that_is_a_partial_is_bound_to_the_copy():
    model = nn.Linear(2, 2)
    model.twice = types.MethodType(functools.partial(lambda self, x: 2 * self(x)), model)
    holder = nn.Sequential(model)
    holder.forward = functools.partial(lambda m, x: m.twice(x), model)
    apply, params, buffers = ps.make_functional(holder)
    zeros = {name: torch.zeros_like(leaf) for name, leaf in params.items()}
    assert apply(zeros, buffers, torch.ones(1, 2))[0].equal(torch.zeros(1, 2))


def test_a_closure_over_a_weak_reference_to_a_part_is_refused():
    model = nn.Sequential(nn.Linear(2, 2))
    part = weakref.ref(model[0])
    model.call = lambda x: part()(x)
    with pytest.raises(ValueError, match="holds its module 0, which `apply` cannot replace"):
        ps.make_functional(model)
