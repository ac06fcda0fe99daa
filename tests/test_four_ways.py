"""One body, four ways: eager, compiled as one graph, vmapped over states, differentiated."""

import functools

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    HALF,
    assert_close,
    batch,
    clone,
    job,
    same_bits,
    scaled_by,
    shares_memory,
    small_net,
    stack,
    started,
    trained,
    unstack,
)

import purescale as ps
from purescale.testing import assert_sync_free

OPTIM = torch.optim
OPTIMIZERS = {
    "AdamW": ps.from_torch(OPTIM.AdamW, lr=1e-3),
    "SGD-momentum": ps.from_torch(OPTIM.SGD, lr=0.05, momentum=0.9),
    "AdamW-in-state": ps.from_torch(
        OPTIM.AdamW, lr=1e-3, in_state=("lr", "weight_decay", "betas", "eps")
    ),
}
RULE = ps.DynamicScale(init_scale=2.0**23, growth_interval=6)


@pytest.mark.slow
def test_compiled_by_inductor_with_donation_agrees():
    state, step = job(OPTIMIZERS["AdamW"], RULE, policy="float32")
    compiled = torch.compile(functools.partial(step, donate=True), fullgraph=True)
    donated = clone(state)
    for index in range(3):
        state, expected = step(state, [batch(index)])
        before, (donated, info) = donated, compiled(donated, [batch(index)])
        assert shares_memory(before.params, donated.params)
        assert_close((donated, info), (state, expected), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_compiled_loop_written_by_hand_is_one_graph():
    optimizer = OPTIMIZERS["SGD-momentum"]
    state, _ = job(optimizer, RULE)
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
        buffers = ps.select(found_inf, buffers, new_buffers)
        return params, buffers, opt_state, RULE.update(scaler, found_inf)

    arguments = *state[:3], scaled_by(state, 8.0).scaler, *batch()
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    assert_close(compiled(*arguments), step(*arguments), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "policy"),
    [("AdamW", HALF), ("SGD-momentum", "float32"), ("AdamW-in-state", HALF)],
)
def test_vmapped_over_states_with_different_scales_equals_a_loop(name, policy):
    """To 1e-5 in float32, to 2e-2 in float16: batched kernels round otherwise."""
    state, step = job(OPTIMIZERS[name], RULE, policy=policy)
    scales = 2.0**4, 2.0**10, 2.0**24 if policy == HALF else 2.0**12
    states = [scaled_by(state, scale) for scale in scales]
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
    state, step = job(OPTIMIZERS["AdamW-in-state"], RULE, policy="float32")
    states = stack([scaled_by(state, scale) for scale in (2.0, 8.0)])

    def both(states, data):
        return torch.vmap(lambda s, b: step(s, [b]))(states, data)

    data = stack([batch(0), batch(1)])
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    assert_close(compiled(states, data), both(states, data), rtol=1e-4, atol=1e-5)


def weights():
    """Weights on the default device."""
    return {"w": torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)}


def distance(params, x):
    return ((params["w"] - x) ** 2 * torch.arange(1, 4, dtype=torch.float64)).sum()


def distance_after(steps, optimizer):
    """A function of parameters, through whole train_steps in float64."""
    rule = ps.DynamicScale(init_scale=8.0, growth_interval=2)
    state, step = started(weights(), distance, optimizer, rule, max_norm=100.0)

    def final(params):
        new, _ = trained(state._replace(params=params), step, [[0.3]] * steps)
        return distance(new.params, 0.3)

    return final


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_differentiated_in_the_initial_parameters_agrees_with_finite_differences(name):
    final, params = distance_after(3, OPTIMIZERS[name]), weights()
    derivative = torch.func.grad(final)(params)["w"]
    eps = 1e-5
    for index, shift in enumerate(eps * torch.eye(3, dtype=torch.float64)):
        ahead, behind = (final({"w": params["w"] + sign * shift}) for sign in (1, -1))
        torch.testing.assert_close(
            derivative[index], (ahead - behind) / (2 * eps), rtol=1e-4, atol=1e-7
        )


@pytest.mark.slow
def test_a_gradient_of_gradients_compiles():
    differentiated = torch.func.grad(distance_after(1, OPTIMIZERS["AdamW"]))
    compiled = torch.compile(differentiated, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(weights()), differentiated(weights()))


def test_a_state_with_rng_is_refused_under_a_transform():
    state, step = job(OPTIMIZERS["SGD-momentum"], RULE)
    state = state._replace(rng=torch.get_rng_state())
    with pytest.raises(ValueError, match=r"cannot be traced.*state._replace\(rng=\(\)\)"):
        torch.func.grad(lambda p: step(state._replace(params=p), [batch()])[1].loss)(state.params)


def test_no_transform_reads_a_tensor_value():
    state, step = job(OPTIMIZERS["AdamW"], RULE)
    data = [batch()]
    assert_sync_free(torch.vmap(lambda s: step(s, data)), stack([state, state]))
    loss = torch.func.grad(lambda p: step(state._replace(params=p), data)[1].loss)
    assert_sync_free(loss, state.params)
