"""Inside the caller's `torch.autocast` only the loss is computed under it."""

from types import SimpleNamespace

import pytest
import torch
from helpers import in_float32, same_bits, stack

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


# The gradients of the last are taken one by one.
@pytest.mark.parametrize("shape", [(5, 33), (300, 33), (2**10, 2**9)])
def test_the_backward_is_computed_in_the_dtypes_of_the_forward(shape):
    state, x = state_of(*shape), torch.randn(5, shape[0])
    assert_the_same_inside(lambda: step(state, x))


def test_the_backward_under_vmap_too():
    states, x = stack([state_of(33, 5), state_of(33, 5)]), torch.randn(2, 5, 33)
    assert_the_same_inside(lambda: torch.vmap(step)(states, x))


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
        *((name, settings, "step") for name, settings in CLASSES),
        *(("Muon", {}, way) for way in ("maybe_step", "unscale_and_step", "vmap")),
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


@pytest.mark.parametrize("size", [33, 2**20])
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
