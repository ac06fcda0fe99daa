"""Many settings in one process, as a sweep has them: a compiled step never runs with the settings
of an earlier one.

Nothing is reset between the runs of a test. Agreement with the eager step to 1e-4: other kernels
round otherwise, Muon's in bfloat16. Which settings a graph has is decided before a backend sees it,
so the larger tests use the cheapest one.
"""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, batch, job, small_net, tensors
from torch._dynamo.testing import CompileCounterWithBackend

import purescale as ps
from purescale import interop

OPTIM = torch.optim
FEW, MANY = 2, 17  # tensors: traced into the compiler's own kernels, and as one node


@pytest.fixture(autouse=True)
def _many_graphs():
    # Left alone torch compiles a function eight times and then refuses.
    with torch._dynamo.config.patch(recompile_limit=64, accumulated_recompile_limit=512):
        yield


def compile(fn, backend="aot_eager"):
    return torch.compile(fn, fullgraph=True, backend=backend)


def three_steps(step, optimizer, count):
    params = {f"w{i}": torch.linspace(-1, 1, 6).view(2, 3) + i for i in range(count)}
    state = optimizer.init(params)
    for index in range(3):
        grads = {name: torch.full_like(p, 0.5 + index + len(name)) for name, p in params.items()}
        params, state = step(optimizer, params, grads, state, torch.tensor(index == 1))
    return params


def agrees(compiled, optimizer, count):
    expected = three_steps(ps.maybe_step, optimizer, count)
    assert_close(three_steps(compiled, optimizer, count), expected, rtol=1e-3, atol=1e-4)


SWEEPS = {
    "AdamW": [
        {"lr": 1e-3},
        {"lr": 1e-1},
        {"lr": 1e-1, "weight_decay": 0.5},
        {"lr": 1e-1, "betas": (0.5, 0.6)},
        {"lr": 1e-1, "maximize": True},
        {"lr": 1e-1, "amsgrad": True},
        {"lr": 1e-1, "overrides": {"w0": {"lr": 1.0}}},
        {"lr": 1e-1, "overrides": {("w1", "w1*"): {"lr": 1.0}}},
        {"lr": 1e-1, "overrides": {"w1": {"weight_decay": 1.0}}},
        {"lr": torch.tensor(0.1)},
        {"lr": torch.tensor(0.5)},
        {"lr": lambda applied: 0.1 + 0.1 * applied},
        {"lr": lambda applied: 0.5 / (1 + applied)},
        {"lr": 1e-1, "in_state": ("lr",)},
        {"lr": 1e-1, "weight_decay": 0.5, "in_state": ("lr", "weight_decay")},
        {"lr": 1e-1, "betas": (0.5, 0.6), "in_state": ("betas",)},
    ],
    "SGD": [
        {"lr": 0.1},
        {"lr": 1.0},
        {"lr": 0.1, "momentum": 0.9},
        {"lr": 0.1, "momentum": 0.5, "dampening": 0.5},
        {"lr": 0.1, "momentum": 0.5, "dampening": 0.9},
        {"lr": 0.1, "momentum": 0.5, "nesterov": True},
        {"lr": 0.1, "foreach": False},
    ],
    "RMSprop": [
        {"lr": 0.1},
        {"lr": 0.1, "alpha": 0.5},
        {"lr": 0.1, "centered": True},
        {"lr": lambda applied: 1.0 + applied},
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"), [("AdamW", FEW), ("RMSprop", FEW), ("AdamW", MANY), ("SGD", MANY)]
)
def test_one_compiled_function_serves_every_optimizer_with_its_own_settings(name, count):
    compiled = compile(lambda *arguments: ps.maybe_step(*arguments), "eager")
    optimizers = [ps.from_torch(getattr(OPTIM, name), **settings) for settings in SWEEPS[name]]
    for optimizer in (*optimizers, *reversed(optimizers)):
        agrees(compiled, optimizer, count)


@pytest.mark.slow
def test_classes_take_turns_in_one_compiled_function():
    compiled = compile(lambda *arguments: ps.maybe_step(*arguments), "eager")
    mine = type("Mine", (OPTIM.AdamW,), {})
    classes = [OPTIM.AdamW, OPTIM.Adam, OPTIM.RMSprop, mine]
    for cls in (*classes, *classes):
        agrees(compiled, ps.from_torch(cls, lr=0.1), 2)


@pytest.mark.slow
def test_equal_settings_share_a_graph():
    counter = CompileCounterWithBackend("eager")
    compiled = compile(lambda *arguments: ps.maybe_step(*arguments), counter)
    for _ in range(3):
        agrees(compiled, ps.from_torch(OPTIM.AdamW, lr=0.1, weight_decay=0.2), 2)
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("count", [FEW, MANY])
def test_a_schedule_that_reads_a_cell_sees_what_is_in_it(count):
    peak = 0.1

    def schedule(applied):
        return peak * (1 + applied)

    optimizer = ps.from_torch(OPTIM.RMSprop if count == FEW else OPTIM.AdamW, lr=schedule)
    compiled = compile(lambda *arguments: ps.maybe_step(*arguments), "eager")
    for peak in (0.1, 1.0, 0.3, 0.1):  # noqa: B007, what the schedule reads
        agrees(compiled, optimizer, count)


RATES = [{"lr": rate} for rate in (0.1, 1.0, 0.01)]
HYPERS = [
    {"weight_decay": decay, "eps": eps} for decay, eps in ((0.1, 1e-3), (0.0, 0.1), (0.5, 1e-8))
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count", "values"),
    [
        *((name, FEW, RATES) for name in ("ASGD", "Muon")),
        *((name, FEW, HYPERS) for name in ("AdamW", "NAdam")),
        *(("AdamW", MANY, values) for values in (RATES, HYPERS)),
    ],
)
def test_settings_in_the_state_are_one_graph_for_every_value(name, count, values):
    cls, close = getattr(OPTIM, name), {"rtol": 1e-3, "atol": 1e-4}
    if values is HYPERS:
        close = {"rtol": 1e-6, "atol": 1e-6}
    optimizer = ps.from_torch(cls, lr=0.1, in_state=tuple(values[0]))
    counter = CompileCounterWithBackend("eager")
    compiled = compile(functools.partial(ps.maybe_step, optimizer), counter)
    params = {f"w{i}": torch.linspace(-1, 1, 6).view(2, 3) + i for i in range(count)}
    grads = {name: torch.full_like(p, 0.5) for name, p in params.items()}
    for settings in values:
        state = ps.replace_settings(optimizer.init(params), **settings)
        fixed = ps.from_torch(cls, **{"lr": 0.1, **settings})
        expected, _ = fixed.step(params, grads, fixed.init(params))
        new, after = compiled(params, grads, state, torch.tensor(False))
        assert_close(new, expected, **close)
        assert_close((after.lr, after.hyper), (state.lr, state.hyper), rtol=0, atol=0)
        skipped = compiled(params, grads, state, torch.tensor(True))
        assert_close(skipped, (params, state), rtol=0, atol=0)
    assert counter.frame_count == 1


RULES = [
    ps.DynamicScale(init_scale=2.0**8, growth_interval=2),
    ps.DynamicScale(init_scale=2.0**8, growth_interval=3),
    ps.DynamicScale(init_scale=2.0**8, growth_interval=2, min_scale=2.0**8),
    ps.DynamicScale(init_scale=2.0**8, growth_interval=2, max_scale=2.0**8),
    ps.DynamicScale(init_scale=2.0**8, growth_interval=2, backoff_factor=0.25),
    ps.DynamicScale(init_scale=2.0**8, growth_interval=2, growth_factor=4.0),
    ps.DynamicScale(init_scale=2.0**8, growth_interval=2, hysteresis=2),
    ps.DynamicScale(init_scale=2.0**8, growth_interval=2, hysteresis=2, refill="clean"),
    ps.StaticScale(8.0),
    ps.StaticScale(16.0),
    ps.NoScale(),
    *(interop.torch_amp.rule(init_scale=2.0**8, growth_interval=n) for n in (1, 2)),
    *(interop.megatron.rule(initial_scale=2.0**8, min_scale=1.0, growth_factor=2.0,
                            backoff_factor=0.5, growth_interval=n, hysteresis=h)
      for n, h in ((1, 1), (2, 1), (2, 2))),
    *(ps.HeadroomScale(init_scale=2.0**8, **settings)
      for settings in ({}, {"margin": 2}, {"window": 2}, {"max_scale": 2.0**8})),
]  # fmt: skip


@pytest.mark.slow
def test_one_compiled_function_serves_every_rule():
    def update(rule, state, bad):
        amax = [torch.full((), 2.0**-9)] if getattr(rule, "takes_amax", False) else []
        return rule.update(state, bad, *amax)

    compiled = compile(update, "eager")
    for rule in (*RULES, *reversed(RULES)):
        eager = state = rule.init()
        for bad in (False, True, True, False, False, False):
            flag = torch.tensor(bad)
            eager, state = update(rule, eager, flag), compiled(rule, state, flag)
            torch.testing.assert_close(tensors(state), tensors(eager), rtol=0, atol=0)


@pytest.mark.slow
def test_one_compiled_train_step_serves_every_rule_policy_and_bound():
    def body(state, data, max_norm, clip_value, **parts):
        return ps.train_step(state, [data], max_norm=max_norm, clip_value=clip_value, **parts)

    compiled = compile(body, "eager")
    rules = (RULES[0], RULES[4], RULES[-1])
    policies = ("float32", "params=float32,compute=bfloat16,norms=bfloat16,output=float32")
    bounds = ((0.1, None), (0.01, 1e-3))
    runs = [(rule, policies[0], (None, None)) for rule in rules]
    runs += [(rules[0], policy, (None, None)) for policy in policies[1:]]
    runs += [(rules[0], policies[0], bound) for bound in bounds]
    made = {policy: job(ps.from_torch(OPTIM.SGD, lr=1.0), rules[0], policy) for policy in policies}
    for rule, policy, bound in (*runs, *reversed(runs)):
        state, step = made[policy]
        state, parts = state._replace(scaler=rule.init()), {**step.keywords, "rule": rule}
        expected, told = body(state, batch(), *bound, **parts)
        new, info = compiled(state, batch(), *bound, **parts)
        assert_close((new, info), (expected, told), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_two_models_with_the_same_names_take_turns_in_one_compiled_loss():
    def loss(apply, params, buffers, x, y):
        return F.cross_entropy(apply(params, buffers, x)[0], y)

    compiled = compile(torch.func.grad(loss, argnums=1), "eager")
    with_tanh = torch.nn.Sequential(*small_net()[:2], torch.nn.Tanh(), *small_net()[3:])
    parts = [ps.make_functional(net) for net in (small_net(), with_tanh)]
    for (apply, params, buffers), policy in itertools.product(
        parts, ["float32", "params=float32,compute=bfloat16"]
    ):
        apply = ps.with_policy(apply, policy)
        expected = torch.func.grad(loss, argnums=1)(apply, params, buffers, *batch())
        assert_close(compiled(apply, params, buffers, *batch()), expected, rtol=2e-2, atol=2e-2)
