"""Inside the caller's `torch.autocast` only the loss is computed under it."""

import contextlib
import re
from types import SimpleNamespace

import pytest
import torch
from helpers import assert_close, in_float32, same_bits, stack
from torch import nn

import purescale as ps
from purescale._torch import autocast as _autocast

OPTIM = torch.optim
RULE = ps.StaticScale(1.0)
SGD = ps.from_torch(OPTIM.SGD, lr=0.1)


def autocast(dtype=torch.bfloat16):
    return torch.autocast("cpu", dtype)


def assert_the_same_inside(compute):
    expected = compute()
    for dtype in (torch.bfloat16, torch.float16):
        with autocast(dtype):
            found = compute()
        assert same_bits(found, expected)


def state_of(*shape):
    return ps.init_train_state({"w": torch.randn(shape)}, {}, SGD, RULE)


def step(state, x, **settings):
    return ps.train_step(
        state, [x, x + 1], loss_fn=in_float32, optimizer=SGD, rule=RULE, **settings
    )


@pytest.mark.parametrize("size", [5, 33, 300])
def test_the_backward_is_computed_in_the_dtypes_of_the_forward(size):
    state, x = state_of(size, 33), torch.randn(5, size)
    assert_the_same_inside(lambda: step(state, x))


def test_the_backward_whose_gradients_are_taken_one_by_one_too():
    state, x = state_of(2**10, 2**9), torch.randn(5, 2**10)
    assert_the_same_inside(lambda: step(state, x))


def test_the_backward_under_vmap_too():
    states, x = stack([state_of(33, 5), state_of(33, 5)]), torch.randn(2, 5, 33)
    assert_the_same_inside(lambda: torch.vmap(step)(states, x))


@pytest.mark.slow
def test_the_backward_of_a_compiled_step_too():
    state, x = state_of(33, 5), torch.randn(5, 33)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_the_same_inside(lambda: compiled(state, x))


def test_the_backward_of_a_probe_too():
    params, x = {"w": torch.randn(33, 5)}, torch.randn(300, 33)

    def facts():
        probe = ps.probe_scales(in_float32, params, {}, x, exponents=[0, 4, 127])
        return probe.overflow, probe.zeros, probe.error, str(probe)

    assert_the_same_inside(facts)


def kinds_seen(state, x, **settings):
    """The dtypes of a product in `loss_fn`, and in `weight_fn`."""
    seen = []

    def loss_fn(params, buffers, x):
        out = x @ params["w"]
        seen.append(out.dtype)
        return out.float().mean(), buffers

    def weight_fn(x):
        seen.append((x @ x.T).dtype)
        return 1.0

    ps.train_step(
        state, [x], loss_fn=loss_fn, optimizer=SGD, rule=RULE, weight_fn=weight_fn, **settings
    )
    return set(seen)


@pytest.mark.parametrize("bn_update", ["each", "window"])
def test_the_loss_and_the_weight_are_computed_under_it(bn_update):
    state, x = state_of(33, 5), torch.randn(5, 33)
    with autocast():
        assert kinds_seen(state, x, bn_update=bn_update) == {torch.bfloat16}
    assert kinds_seen(state, x, bn_update=bn_update) == {torch.float32}


@pytest.mark.slow
def test_the_loss_of_a_compiled_step_is_computed_under_it_and_the_graph_guarded_by_it():
    def loss_fn(params, buffers, x):
        out = x @ params["w"]
        return out.float().mean(), buffers, out

    def step(state, x):
        return ps.train_step(state, [x], loss_fn=loss_fn, optimizer=SGD, rule=RULE)[1].aux[0]

    state, x = state_of(33, 5), torch.randn(5, 33)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert compiled(state, x).dtype is torch.float32
    with autocast():
        assert compiled(state, x).dtype is torch.bfloat16
    assert compiled(state, x).dtype is torch.float32


CLASSES = [
    *((name, {}) for name in ("Muon", "AdamW", "SGD", "NAdam", "ASGD", "Adadelta", "RMSprop")),
    *((name, {}) for name in ("RAdam", "Rprop", "Adamax", "Adagrad", "Adam")),
    ("Adafactor", {"foreach": False}),
    ("Adafactor", {"foreach": True}),
]


@pytest.mark.parametrize(
    ("name", "settings", "way"),
    [
        (name, settings, way)
        for name, settings in CLASSES
        for way in ("step", "maybe_step", "unscale_and_step", "vmap")
        if (name, way) != ("Adafactor", "vmap")  # it reads values
    ],
)
def test_the_formula_of_a_step_is_computed_outside_of_it(name, settings, way):
    optimizer = ps.from_torch(getattr(OPTIM, name), lr=0.1, **settings)
    params, grads = {"w": torch.randn(33, 300)}, {"w": torch.randn(33, 300)}
    state = optimizer.init(params)
    ways = {
        "step": lambda: optimizer.step(params, grads, state),
        "maybe_step": lambda: ps.maybe_step(optimizer, params, grads, state, torch.tensor(False)),
        "unscale_and_step": lambda: ps.unscale_and_step(
            optimizer, ps.StaticScale(4.0).init(), params, grads, state, max_norm=1.0
        ),
        "vmap": lambda: torch.vmap(optimizer.step)(
            *(stack([tree, tree]) for tree in (params, grads, state))
        ),
    }
    assert_the_same_inside(ways[way])


@pytest.mark.slow
def test_the_formula_of_a_compiled_step_too():
    optimizer = ps.from_torch(OPTIM.Muon, lr=0.1)
    params = {"w": torch.randn(33, 5)}
    state = optimizer.init(params)
    compiled = torch.compile(optimizer.step, fullgraph=True, backend="aot_eager")
    assert_the_same_inside(lambda: compiled(params, params, state))


class Rotates:
    """An optimizer of one's own."""

    def init(self, params):
        return ()

    def step(self, params, grads, opt_state):
        return {"w": params["w"] - grads["w"] @ grads["w"].T @ grads["w"]}, opt_state


def test_an_optimizer_of_ones_own_is_called_outside_of_it():
    params = {"w": torch.randn(33, 5)}
    assert_the_same_inside(
        lambda: ps.maybe_step(Rotates(), params, params, (), torch.tensor(False))
    )
    assert_the_same_inside(
        lambda: ps.unscale_and_step(Rotates(), RULE.init(), params, params, (), max_norm=1.0)
    )


def test_a_transformation_is_called_outside_of_it():
    def update(grads, state, params):
        return {"w": -grads["w"] @ grads["w"].T @ grads["w"]}, state

    tx = ps.from_transformation(SimpleNamespace(init=lambda params: (), update=update))
    params = {"w": torch.randn(33, 5)}
    assert_the_same_inside(lambda: tx.step(params, params, ()))


@pytest.mark.parametrize("size", [5, 33, 300, 2**20])
def test_unscaling_clipping_and_accumulating_are_outside_of_it(size):
    """torch refuses to stack float16 under an autocast to bfloat16 on a CPU."""
    dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
    grads = {str(dtype): torch.randn(size).to(dtype) for dtype in dtypes}
    scaler = ps.DynamicScale(init_scale=4.0).init()

    def parts():
        accum = ps.accumulate_grads(ps.init_accum(grads), grads, weight=2)
        accum = ps.accumulate_grads(accum, grads)
        return [
            ps.unscale_and_check(scaler, grads),
            ps.clip_by_global_norm(grads, 1.0),
            ps.clip_by_global_norm(grads, 1.0, norm_type=3.0),
            ps.clip_by_value(grads, 0.1),
            ps.accumulated_grads(ps.merge_accum(accum, accum)),
            ps.grad_amax(grads),
            [tuple(row) for row in ps.grad_report(grads).rows.values()],
            [tuple(row) for row in ps.update_report(grads, grads, grads).rows.values()],
            ps.select(torch.tensor(False), grads, grads),
            ps.all_reduce_grads(grads),
            ps.scale_loss(scaler, torch.tensor(1.0, dtype=torch.float16)),
        ]

    assert_the_same_inside(parts)


def test_the_callers_autocast_is_as_it_was_also_after_an_error():
    with autocast():
        with pytest.raises(ValueError, match="max_norm"):
            ps.clip_by_global_norm({"w": torch.ones(1)}, max_norm=-1.0)
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16


def test_each_device_with_an_autocast_of_torchs_own_is_looked_at():
    assert set(torch._C._autocast_supported_devices()) <= set(_autocast._DEVICES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [5, 33, 300])
def test_autocast_around_a_mapped_batch_norm_names_the_policy_that_works(size, dtype):
    net = nn.Sequential(nn.Linear(size, size), nn.BatchNorm1d(size))
    apply, params, buffers = ps.make_functional(net)
    states = [
        ps.init_train_state({n: p + i for n, p in params.items()}, buffers, SGD, RULE)
        for i in range(2)
    ]
    xs = torch.randn(2, 7, size)

    def step_of(apply, under):
        def loss_fn(params, buffers, x):
            with under:
                out, buffers = apply(params, buffers, x)
            return (out.float() * x).mean(), buffers

        settings = {"loss_fn": loss_fn, "optimizer": SGD, "rule": RULE, "max_norm": torch.inf}
        return lambda state, x: ps.train_step(state, [x], **settings)[1].grad_norm

    step = step_of(apply, autocast(dtype))
    with pytest.raises(RuntimeError, match="expected scalar type") as refused:
        torch.vmap(step)(stack(states), xs)
    [note] = refused.value.__notes__
    text = re.search(r"Fix: a policy in its place, `apply = with_policy\(apply, '(.*)'\)`", note)[1]
    mapped = torch.vmap(step_of(ps.with_policy(apply, text), contextlib.nullcontext()))
    alone = [step(*each) for each in zip(states, xs, strict=True)]
    assert_close(mapped(stack(states), xs), torch.stack(alone), atol=0, rtol=0.03)
    assert ps.policy(text).compute_dtype is dtype


def test_another_error_of_a_mapped_forward_says_nothing_of_autocast():
    class Wrong(nn.Linear):
        def forward(self, x):
            raise RuntimeError("of its own")

    apply, params, buffers = ps.make_functional(Wrong(5, 5))
    with autocast(), pytest.raises(RuntimeError) as refused:
        torch.vmap(lambda x: apply(params, buffers, x)[0])(torch.ones(2, 5))
    assert not hasattr(refused.value, "__notes__")
