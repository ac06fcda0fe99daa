"""One body, four ways: eager, compiled as one graph, vmapped over states, differentiated."""

import functools

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    HALF,
    batch,
    job,
    same_bits,
    scaled_by,
    shares_memory,
    small_net,
    stack,
    tensors,
    unstack,
)
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import purescale as ps
from purescale.testing import assert_sync_free

OPTIM = torch.optim
OPTIMIZERS = {
    "AdamW": functools.partial(ps.from_torch, OPTIM.AdamW, lr=1e-3),
    "SGD-momentum": functools.partial(ps.from_torch, OPTIM.SGD, lr=0.05, momentum=0.9),
    "AdamW-in-state": functools.partial(
        ps.from_torch, OPTIM.AdamW, lr=1e-3, in_state=("lr", "weight_decay", "betas", "eps")
    ),
}
RULE = ps.DynamicScale(init_scale=2.0**23, growth_interval=6)

each = pytest.mark.parametrize("name", OPTIMIZERS)


def images(index, count=1):
    return [batch(10 * index + i) for i in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "microbatches"), [("AdamW-in-state", 1), ("SGD-momentum", 2)])
def test_compiled_is_one_graph_without_recompiling_over_overflow_and_growth(name, microbatches):
    """Agreement with eager to 2e-2, float16's rounding in other kernels; skips are bit-equal."""
    state, step = job(OPTIMIZERS[name](), RULE, max_norm=1.0)
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    counters.clear()
    eager, overflows, scales = state, 0, set()
    for index in range(20):
        eager, expected = step(eager, images(index, microbatches))
        before, (state, info) = state, compiled(state, images(index, microbatches))
        assert not info.found_inf or same_bits(state._replace(scaler=before.scaler), before)
        assert info.found_inf == expected.found_inf
        assert state.scaler.scale == eager.scaler.scale
        torch.testing.assert_close(info.loss, expected.loss, rtol=2e-2, atol=2e-2)
        overflows += info.found_inf.item()
        scales.add(state.scaler.scale.item())
    assert backend.frame_count == 1
    assert not counters["graph_break"]
    assert 0 < overflows < 15
    assert any(scale * 2 in scales for scale in scales)
    assert state.step == eager.step == 20 - overflows


@pytest.mark.slow
def test_compiled_by_inductor_with_donation_agrees():
    state, step = job(OPTIMIZERS["AdamW"](), RULE, policy="float32")
    compiled = torch.compile(functools.partial(step, donate=True), fullgraph=True)
    donated = torch.utils._pytree.tree_map(lambda t: t.clone(), state)
    for index in range(3):
        state, expected = step(state, images(index))
        before, (donated, info) = donated, compiled(donated, images(index))
        assert shares_memory(before.params, donated.params)
        torch.testing.assert_close(
            tensors((donated, info)), tensors((state, expected)), rtol=1e-4, atol=1e-4
        )


@pytest.mark.slow
def test_compiled_without_buffers_is_one_graph():
    """A net without BatchNorm has an empty dict of buffers, which optree cannot be traced over."""
    apply, params, buffers = ps.make_functional(torch.nn.Linear(3, 1))
    assert buffers == {}
    optimizer = OPTIMIZERS["AdamW"]()

    def loss_fn(params, buffers, x):
        out, buffers = apply(params, buffers, x)
        return out.square().mean(), buffers

    step = functools.partial(ps.train_step, loss_fn=loss_fn, optimizer=optimizer, rule=ps.NoScale())
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    state = ps.init_train_state(params, buffers, optimizer, ps.NoScale())
    torch.testing.assert_close(
        tensors(compiled(state, [torch.ones(2, 3)])),
        tensors(step(state, [torch.ones(2, 3)])),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.slow
def test_a_compiled_loop_written_by_hand_is_one_graph():
    optimizer, rule = OPTIMIZERS["SGD-momentum"](), RULE
    state, _ = job(optimizer, rule)
    apply, _, _ = ps.make_functional(small_net())
    half = ps.with_policy(apply, HALF)

    def step(params, buffers, opt_state, scaler, x, y):
        def scaled(params):
            out, new_buffers = half(params, buffers, x)
            return ps.scale_loss(scaler, F.cross_entropy(out, y)), new_buffers

        grads, (_, new_buffers) = torch.func.grad_and_value(scaled, has_aux=True)(params)
        grads, found_inf = ps.unscale_and_check(scaler, grads)
        grads, _ = ps.clip_by_global_norm(grads, 1.0)
        params, opt_state = ps.maybe_step(optimizer, params, grads, opt_state, found_inf)
        return (
            params,
            ps.select(found_inf, buffers, new_buffers),
            opt_state,
            rule.update(scaler, found_inf),
        )

    arguments = (
        state.params,
        state.buffers,
        state.opt_state,
        scaled_by(state, 8.0).scaler,
        *batch(),
    )
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    torch.testing.assert_close(
        tensors(compiled(*arguments)), tensors(step(*arguments)), rtol=1e-2, atol=1e-3
    )


@pytest.mark.parametrize(
    ("name", "policy"),
    [("AdamW", HALF), ("SGD-momentum", "float32"), ("AdamW-in-state", HALF)],
)
def test_vmapped_over_states_with_different_scales_equals_a_loop(name, policy):
    """To 1e-5 in float32, to 2e-2 in float16: batched kernels round otherwise."""
    state, step = job(OPTIMIZERS[name](), RULE, policy=policy)
    states = [
        scaled_by(state, scale)
        for scale in (2.0**4, 2.0**10, 2.0**24 if policy == HALF else 2.0**12)
    ]
    data = [batch(seed) for seed in range(3)]
    stacked, stacked_info = torch.vmap(lambda s, b: step(s, [b]))(stack(states), stack(data))
    tolerance = 2e-2 if policy == HALF else 1e-5
    for index in range(3):
        one, info = step(states[index], [data[index]])
        assert stacked_info.found_inf[index] == info.found_inf
        assert same_bits(unstack(stacked.scaler, index), one.scaler)
        assert same_bits(unstack(stacked.step, index), one.step)
        torch.testing.assert_close(
            unstack(stacked.params, index), one.params, rtol=tolerance, atol=tolerance
        )
    if policy == HALF:
        assert stacked_info.found_inf.tolist() == [False, False, True]
        assert same_bits(unstack(stacked.params, 2), state.params)


@pytest.mark.slow
def test_compiled_and_vmapped_agrees_with_vmapped():
    state, step = job(OPTIMIZERS["AdamW-in-state"](), RULE, policy="float32")
    states = stack([scaled_by(state, scale) for scale in (2.0, 8.0)])

    def both(states, data):
        return torch.vmap(lambda s, b: step(s, [b]))(states, data)

    data = stack([batch(0), batch(1)])
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        tensors(compiled(states, data)), tensors(both(states, data)), rtol=1e-4, atol=1e-5
    )


def quadratics_start():
    params = {"w": torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)}
    return params, torch.full((3,), 0.3, dtype=torch.float64)


def quadratic(optimizer, steps=3, scale=8.0):
    """final loss as a function of the initial parameters and of the data, through whole train_steps
    in float64
    """
    rule = ps.DynamicScale(init_scale=scale, growth_interval=2)

    def final(params, data):
        state = ps.init_train_state(
            {"w": torch.zeros(3, dtype=torch.float64)}, {}, optimizer, rule
        )._replace(params=params)

        def loss_fn(params, buffers, x):
            weights = torch.arange(1, 4, dtype=torch.float64)
            return ((params["w"] - x) ** 2 * weights).sum(), buffers

        for _ in range(steps):
            state, _ = ps.train_step(
                state, [data], loss_fn=loss_fn, optimizer=optimizer, rule=rule, max_norm=100.0
            )
        return loss_fn(state.params, {}, data)[0]

    return final


@each
def test_differentiated_in_the_initial_parameters_agrees_with_finite_differences(name):
    final = quadratic(OPTIMIZERS[name]())
    params, data = quadratics_start()
    derivative = torch.func.grad(final)(params, data)["w"]
    eps = 1e-5
    for index, shift in enumerate(eps * torch.eye(3, dtype=torch.float64)):
        ahead, behind = (final({"w": params["w"] + sign * shift}, data) for sign in (1, -1))
        numeric = (ahead - behind) / (2 * eps)
        torch.testing.assert_close(derivative[index], numeric, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("cls", "settings"), [(OPTIM.AdamW, {}), (OPTIM.SGD, {"momentum": 0.9})])
def test_differentiated_in_the_learning_rate_agrees_with_finite_differences(cls, settings):
    params, data = quadratics_start()

    def final(lr):
        return quadratic(ps.from_torch(cls, lr=lr, **settings))(params, data)

    lr, eps = torch.tensor(0.05, dtype=torch.float64), 1e-6
    numeric = (final(lr + eps) - final(lr - eps)) / (2 * eps)
    torch.testing.assert_close(torch.func.grad(final)(lr), numeric, rtol=1e-4, atol=1e-7)


def test_differentiated_in_half_precision_is_close_to_float32():
    def final(policy):
        state, step = job(
            OPTIMIZERS["SGD-momentum"](), ps.DynamicScale(init_scale=8.0), policy=policy
        )

        def loss(params):
            s = state._replace(params=params)
            for index in range(2):
                s, info = step(s, images(index))
            return info.loss

        return torch.func.grad(loss)(state.params)["5.weight"]

    torch.testing.assert_close(final(HALF), final("float32"), rtol=5e-2, atol=5e-2)


@pytest.mark.slow
def test_a_gradient_of_gradients_compiles():
    optimizer, rule = ps.from_torch(OPTIM.AdamW, lr=0.1), ps.DynamicScale(init_scale=8.0)
    params, data = quadratics_start()
    state = ps.init_train_state(params, {}, optimizer, rule)

    def loss_fn(params, buffers, x):
        return ((params["w"] - x) ** 2).sum(), buffers

    def final(params, x):
        options = {"loss_fn": loss_fn, "optimizer": optimizer, "rule": rule}
        new, _ = ps.train_step(state._replace(params=params), [x], **options)
        return new.params["w"].square().sum()

    differentiated = torch.func.grad(final)
    compiled = torch.compile(differentiated, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(params, data), differentiated(params, data))


def test_a_state_with_rng_is_refused_under_a_transform():
    state, step = job(OPTIMIZERS["SGD-momentum"](), RULE)
    state = state._replace(rng=torch.get_rng_state())
    with pytest.raises(ValueError, match=r"cannot be traced.*state._replace\(rng=\(\)\)"):
        torch.func.grad(lambda p: step(state._replace(params=p), images(0))[1].loss)(state.params)


def test_no_transform_reads_a_tensor_value():
    state, step = job(OPTIMIZERS["AdamW"](), RULE)
    data = images(0)
    assert_sync_free(torch.vmap(lambda s: step(s, data)), stack([state, state]))
    loss = torch.func.grad(lambda p: step(state._replace(params=p), data)[1].loss)
    assert_sync_free(loss, state.params)
