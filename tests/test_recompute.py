"""Activation checkpointing inside of a model: the bits of the model without it."""

import functools
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    assert_close,
    cross_entropy_of,
    examples,
    generator_of,
    module_of,
    same_bits,
    shares_memory,
    started,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import purescale as ps

NORMS = {
    "layer": nn.LayerNorm,
    "batch": nn.BatchNorm1d,
    "rms": nn.RMSNorm,
    "group": functools.partial(nn.GroupNorm, 3),
    "spectral": nn.Identity,
}
POLICIES = [
    "params=float32,compute=float32",
    "params=float32,compute=float16,output=float32",
    "params=float32,compute=bfloat16,output=float32",
    "params=float32,compute=autocast(bfloat16),output=float32",
    "params=float32,compute=autocast(float16),output=float32,norms=float32",
]


class Block(nn.Module):
    """Checkpoints itself as timm and transformers do: a module, or a function over its parts."""

    def __init__(self, norm="layer", dropout=0.0, checkpoints=True):
        super().__init__()
        self.norm, self.linear = NORMS[norm](6), nn.Linear(6, 6)
        if norm == "spectral":
            nn.utils.parametrizations.spectral_norm(self.linear)
        self.mlp = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))
        self.dropout, self.checkpoints = nn.Dropout(dropout), checkpoints

    def part(self, x, scale):
        return x + self.dropout(self.linear(self.norm(x))) * scale

    def forward(self, x):
        if not self.checkpoints:
            return self.part(x, 0.5) + self.mlp(x)
        first = checkpoint(self.part, x, 0.5, use_reentrant=False)
        return first + checkpoint(self.mlp, x, use_reentrant=False)


def net(checkpoints=True, depth=2, **options):
    torch.manual_seed(0)
    blocks = [Block(checkpoints=checkpoints, **options) for _ in range(depth)]
    return nn.Sequential(*blocks, nn.Linear(6, 3))


def batches(count=3, seed=1):
    g = generator_of(seed)
    draw = lambda: (torch.randn(5, 6, generator=g), torch.randint(3, (5,), generator=g))  # noqa: E731
    return [draw() for _ in range(count)]


ADAMW, SGD = (ps.from_torch(cls, lr=1e-2) for cls in (torch.optim.AdamW, torch.optim.SGD))


def training(model, policy=POLICIES[0], optimizer=ADAMW, rule=None, **settings):
    """(state, step)"""
    apply, params, buffers = ps.make_functional(model)
    loss_fn = cross_entropy_of(ps.with_policy(apply, policy))
    rule = rule or ps.DynamicScale(2.0**12, growth_interval=2)
    return started(params, None, optimizer, rule, loss_fn=loss_fn, buffers=buffers, **settings)


def trained(model, policy=POLICIES[0], **settings):
    state, step = training(model, policy, **settings)
    torch.manual_seed(2)
    for seed in range(3):
        state, _ = step(state, batches(seed=seed))
    return state


@pytest.mark.slow
@examples(8)
@given(
    # A spectral norm draws nearer to its vectors in each run, in torch too.
    norm=st.sampled_from([norm for norm in NORMS if norm != "spectral"]),
    policy=st.sampled_from(POLICIES),
    dropout=st.sampled_from([0.0, 0.4]),
    options=st.sampled_from(
        [
            {},
            {"donate": True, "max_norm": 0.1},
            {"on_nonfinite": "drop_microbatch"},
            {"max_retries": 3},
            {"bn_update": "window"},
            {"rng": torch.Generator().manual_seed(7).get_state()},
        ]
    ),
)
def test_steps_have_the_bits_of_a_model_that_does_not_checkpoint(norm, policy, dropout, options):
    kind = {"norm": norm, "dropout": dropout}
    plain, other = (trained(net(c, **kind), policy, **options) for c in (False, True))
    assert same_bits(other, plain)


@pytest.mark.parametrize(("norm", "policy"), [("batch", POLICIES[4]), ("layer", POLICIES[1])])
def test_a_step_whose_loss_overflows_has_the_same_bits(norm, policy):
    rule, results = ps.DynamicScale(2.0**40, max_scale=2.0**40), []
    for checkpoints in (False, True):
        state, step = training(net(checkpoints, norm=norm), policy, SGD, rule, max_retries=40)
        results.append(step(state, batches()))
    assert same_bits(*results)


@pytest.mark.parametrize("norm", ["batch", "spectral"])
def test_gradients_are_those_of_the_module_by_itself(norm):
    model = net(dropout=0.4, norm=norm)
    apply, params, buffers = ps.make_functional(model)
    fn = ps.value_and_grad(cross_entropy_of(apply))
    x, labels = batches(1)[0]
    torch.manual_seed(5)
    (loss, _), grads = fn(params, buffers, (x, labels))
    torch.manual_seed(5)
    expected = F.cross_entropy(model(x), labels)
    expected.backward()
    assert same_bits(loss, expected.detach())
    assert same_bits(grads, {name: p.grad for name, p in model.named_parameters()})


def test_a_backward_again_over_a_graph_that_was_retained_gives_the_same_bits():
    apply, params, buffers = ps.make_functional(net(norm="batch"))
    weights = {name: p.requires_grad_() for name, p in params.items()}
    out, _ = apply(weights, buffers, batches(1)[0][0])
    first = torch.autograd.grad(out.sum(), list(weights.values()), retain_graph=True)
    apply(params, buffers, batches(1)[0][0])
    assert same_bits(torch.autograd.grad(out.sum(), list(weights.values())), first)


def test_a_window_is_a_part_of_memory_of_what_it_is_without():
    """Of what the graph saves, in bytes."""
    saved = []
    for checkpoints in (False, True):
        apply, params, buffers = ps.make_functional(net(checkpoints, depth=8))
        weights = {name: p.requires_grad_() for name, p in params.items()}
        storages = {}

        def pack(tensor, storages=storages):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out, _ = apply(weights, buffers, torch.randn(300, 6))
        saved.append(sum(storages.values()))
        del out
    assert saved[1] < saved[0] / 2


@pytest.mark.parametrize("donate", [False, True])
def test_no_old_parameter_lives_on_after_a_step(donate):
    state, step = training(net(norm="batch"), POLICIES[1], SGD)
    old = [weakref.ref(tensor) for tensor in (*state.params.values(), *state.buffers.values())]
    state, _ = step(state, batches(), donate=donate)
    gc.collect()
    new = {id(tensor) for tensor in (*state.params.values(), *state.buffers.values())}
    assert not [ref for ref in old if ref() is not None and id(ref()) not in new]


@pytest.mark.parametrize("backward", [True, False])
def test_a_loop_by_hand_lets_the_old_parameters_go_with_their_graph(backward):
    apply, params, buffers = ps.make_functional(net())
    weights = {name: p.clone().requires_grad_() for name, p in params.items()}
    out, _ = apply(weights, buffers, batches(1)[0][0])
    if backward:
        out.sum().backward()
    old = [weakref.ref(tensor) for tensor in weights.values()]
    del weights, out
    assert not any(ref() is not None for ref in old)


class Helper:
    value = 1.0


class Reads(nn.Module):
    """Changes something, then computes with it in a checkpointed region."""

    def __init__(self, change, value, checkpoints=True):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("seen", torch.ones(3))
        self.register_buffer("later", torch.ones(3))
        self.factor, self.factors, self.held = 1.0, [1.0], {"by": 1.0}
        self.helper, self.parts = Helper(), [self.linear]
        self.change, self.value, self.checkpoints = change, value, checkpoints

    def region(self, x):
        return self.linear(x).sin() * self.value(self)

    def forward(self, x):
        self.change(self, x)
        if self.checkpoints == "closure":
            parts, value = [self.linear], {"value": self.value}

            def run(x):
                return parts[0](x).sin() * value["value"](self)

            return checkpoint(run, x, use_reentrant=False)
        return (
            checkpoint(self.region, x, use_reentrant=False) if self.checkpoints else self.region(x)
        )


CHANGED = {  # what the forward does, and what the region reads
    "replaces a buffer": (lambda m, x: setattr(m, "seen", m.seen * 3), lambda m: m.seen),
    "writes a buffer": (lambda m, x: m.seen.mul_(3), lambda m: m.seen),
    "sets an attribute": (lambda m, x: setattr(m, "factor", m.factor * 3), lambda m: m.factor),
    "changes a list": (lambda m, x: m.factors.append(3.0), lambda m: m.factors[-1]),
    "changes a dict": (lambda m, x: m.held.update(by=3.0), lambda m: m.held["by"]),
    "changes a helper": (lambda m, x: setattr(m.helper, "value", 3.0), lambda m: m.helper.value),
    "keeps a tensor": (lambda m, x: setattr(m, "scale", x.detach().sum()), lambda m: m.scale),
}


@pytest.mark.filterwarnings("ignore:the forward of the model left another value")
@pytest.mark.parametrize("change", CHANGED)
@pytest.mark.parametrize("how", [True, "closure"])
def test_a_region_reads_what_the_forward_wrote_before_it(change, how):
    x = torch.arange(6.0).reshape(2, 3)
    results = []
    for checkpoints in (False, how):
        torch.manual_seed(0)
        apply, params, buffers = ps.make_functional(Reads(*CHANGED[change], checkpoints))
        loss_fn = lambda p, b, x, apply=apply: (lambda out, b: (out.sum(), b))(*apply(p, b, x))  # noqa: E731
        results.append([ps.value_and_grad(loss_fn)(params, buffers, x) for _ in range(2)])
    assert same_bits(results[1][0], results[0][0])
    assert same_bits(results[1][1], results[1][0])


@pytest.mark.filterwarnings("ignore:the forward of the model left another value")
def test_regions_of_threads_read_their_own_weights():
    apply, params, buffers = ps.make_functional(Reads(*CHANGED["sets an attribute"]))
    x = torch.arange(6.0).reshape(2, 3)

    def grads(factor):
        weights = {n: (p * factor).detach().requires_grad_() for n, p in params.items()}
        return torch.autograd.grad(apply(weights, buffers, x)[0].sum(), list(weights.values()))

    expected = {factor: grads(factor) for factor in (1, 2, 3)}

    def work(factor):
        for _ in range(20):
            assert_close(grads(factor), expected[factor])

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, expected))


def squared(module, args, *kwargs_and_output):
    return kwargs_and_output[-1].square()


def test_a_region_runs_again_with_the_hooks_that_the_first_forward_installed():
    def forward(m, x):
        m.lin.register_forward_hook(squared, with_kwargs=True)
        return checkpoint(m.lin, x, use_reentrant=False)

    x, net = torch.randn(4, 3), module_of(forward, lin=nn.Linear(3, 3))
    apply, params, buffers = ps.make_functional(net)
    net(x).sin().sum().backward()
    for _ in range(3):
        loss = ps.value_and_grad(lambda p, b, x: (apply(p, b, x)[0].sin().sum(), b))
        _, grads = loss(params, buffers, x)
        assert torch.equal(grads["lin.weight"], net.lin.weight.grad)


def normalises():
    def forward(m, x):
        buffers = m.mean, m.var, None, None, True
        return checkpoint(F.batch_norm, x * m.scale, *buffers, use_reentrant=False)

    scale = nn.Parameter(torch.ones(3))
    return module_of(forward, scale=scale, mean=torch.zeros(3), var=torch.ones(3))


def with_a_list():
    frozen = nn.ParameterList([nn.Parameter(torch.ones(3), requires_grad=False)])
    return nn.ModuleList([nn.Linear(3, 3), frozen])


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    ("make", "read"),
    [
        (lambda: nn.Sequential(nn.BatchNorm1d(3)), lambda m, x: (m(x), m[0].running_mean)),
        (lambda: nn.Sequential(nn.BatchNorm1d(3)), lambda m, x: (m(x), m)),
        (normalises, lambda m, x: (m(x), m.mean)),
        (with_a_list, lambda m, x: (m[0](x), m[1][0])),
    ],
)
def test_a_write_into_the_buffers_that_a_call_returned_reaches_neither_its_graph_nor_its_result(
    make, read, train
):
    apply, params, buffers = ps.make_functional(make())
    weights = {name: leaf.requires_grad_() for name, leaf in params.items()}
    for _ in range(2):
        (out, kept), new = apply(weights, buffers, torch.randn(4, 3), method=read, train=train)
        assert not shares_memory((out, kept), new)
        for leaf in new.values():
            leaf.zero_()
        out.sum().backward()
