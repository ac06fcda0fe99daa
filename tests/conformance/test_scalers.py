"""The scalers of other libraries, themselves, as oracles: transitions bit for bit, state dicts
there and back.
"""

import contextlib
import copy
import dataclasses
import functools
import importlib
import os
import types
import warnings
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from helpers import overflow_patterns, same_bits, steered
from hypothesis import Phase, given, settings

import purescale as ps
from purescale import interop

os.environ["KERAS_BACKEND"] = "jax"

# The peers warn about torch, about each other and about the machine.
pytestmark = pytest.mark.filterwarnings("ignore")


def peer(name):
    """The peer's module; the tests that ask for it are skipped where it is not installed."""
    pytest.importorskip(name.partition(".")[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


# Runs of 320 steps are compared as a whole: to shrink one takes minutes, and it stays long.
unshrunk = settings(phases=(Phase.explicit, Phase.reuse, Phase.generate), print_blob=True)
few = settings(unshrunk, max_examples=12)


def powers_of_two(low, high):
    return st.integers(low, high).map(lambda exponent: 2.0**exponent)


powers, floors = powers_of_two(-10, 20), powers_of_two(-110, 0)
power_factors = st.sampled_from([2.0, 4.0, 16.0])
intervals = st.integers(1, 9)
steps = st.integers(0, 319)
# Any float, not only powers of two; float32 and not.
growths = st.floats(1.001, 20)
backoffs = st.floats(0.01, 0.999)
any_scale = st.floats(2.0**-126, 2.0**127, width=32)


def flag(bad):
    return torch.tensor(bad)


def trace(rule, pattern, change_at, changes):
    """(the pattern that kept the scale in range, its scale and count after each step) of a rule
    that is changed once.
    """
    state, rows, fed = rule.init(), [], []
    for index, bad in enumerate(pattern):
        if index == change_at:
            rule = dataclasses.replace(rule, **changes)
        bad = steered(bad, state.scale.item())
        state = rule.update(state, flag(bad))
        fed.append(bad)
        rows.append((state.scale.item(), state.growth_tracker.item()))
    return fed, rows


# ---- Megatron-LM


@contextlib.contextmanager
def megatron_on_cpu():
    """Its scaler, which asks for CUDA in so many words."""
    module = peer("megatron.core.optimizer.grad_scaler")

    def tensor(*args, device=None, **kwargs):
        return torch.tensor(*args, **kwargs)

    on_cpu = types.SimpleNamespace(
        tensor=tensor,
        float=torch.float,
        max=torch.max,
        cuda=types.SimpleNamespace(current_device=lambda: 0),
    )
    with (
        mock.patch.object(module, "torch", on_cpu),
        mock.patch.object(torch.Tensor, "cuda", lambda self, device=None: self),
    ):
        yield module.DynamicGradScaler


def megatrons_row(scaler):
    return scaler.scale[0], scaler._growth_tracker, scaler._hysteresis_tracker


def megatron_row(state):
    return state.scale, state.growth_tracker.item(), state.hysteresis_tracker.item()


@few
@given(overflow_patterns, steps, any_scale, st.floats(0.001, 1), growths, intervals, st.data())
def test_megatron_with_any_setting_changed_midway(
    pattern, change_at, scale, floor, growth, interval, data
):
    bounds = {"initial_scale": scale, "min_scale": max(scale * floor, 2.0**-126)}
    others = st.fixed_dictionaries({"backoff_factor": backoffs, "hysteresis": st.integers(1, 4)})
    fixed = bounds | data.draw(others)
    rule = interop.megatron.rule(**fixed, growth_factor=growth, growth_interval=interval)
    state = rule.init()
    with megatron_on_cpu() as scaler_class:
        megatrons = scaler_class(**vars(rule))
        for index, bad in enumerate(pattern):
            if index == change_at:
                # Over and back in the same breath: this is where the peer is changed too.
                d = megatrons.state_dict()
                changed = {"growth_factor": data.draw(growths)}
                changed["growth_interval"] = data.draw(intervals)
                rule = dataclasses.replace(rule, **changed)
                megatrons = scaler_class(**vars(rule))
                if torch.isfinite(d["scale"]):
                    restored, state = interop.megatron.from_state_dict(d, **vars(rule))
                    assert restored == rule
                    assert same_bits(interop.megatron.to_state_dict(rule, state), d)
                megatrons.load_state_dict(d)
            megatrons.update(bad)
            state = rule.update(state, flag(bad))
            assert same_bits(megatron_row(state), megatrons_row(megatrons))


# ---- DeepSpeed


@contextlib.contextmanager
def deepspeed_alone(name):
    """A module of its, which asks the process group for the rank that may write to the log."""
    module = peer(f"deepspeed.runtime.fp16.{name}")
    with mock.patch.object(module, "dist", types.SimpleNamespace(get_rank=lambda: 1), create=True):
        yield module


def deepspeeds_row(scaler):
    counts = scaler.cur_iter, scaler.last_overflow_iter, getattr(scaler, "cur_hysteresis", 1)
    return scaler.cur_scale, *counts


def deepspeed_row(state):
    return tuple(leaf.item() for leaf in state[:4])


@settings(unshrunk, max_examples=20)
@given(
    overflow_patterns,
    st.tuples(
        powers, intervals, powers_of_two(-20, -5), st.integers(1, 4), st.booleans(), st.booleans()
    ),
    steps,
    intervals,
)
def test_deepspeed_in_both_refill_modes_over_and_back(pattern, settings, change_at, new_window):
    scale, _, floor, *_ = settings
    rule = interop.deepspeed.rule(*settings)
    state = rule.init()
    with deepspeed_alone("loss_scaler") as module:
        deepspeeds = module.DynamicLossScaler(*settings)
        for index, bad in enumerate(pattern):
            if index == change_at:
                rule, state = interop.deepspeed.from_state_dict(
                    {"loss_scaler": deepspeeds, "dynamic_loss_scale": True}, init_scale=scale
                )
                deepspeeds = module.DynamicLossScaler(1.0, 1, 1.0, 1, False)
                d = interop.deepspeed.to_state_dict(rule, state)
                vars(deepspeeds).update({key: d[key] for key in vars(deepspeeds) if key in d})
                rule = dataclasses.replace(rule, scale_window=new_window)
                deepspeeds.scale_window = new_window
            bad = steered(bad, state.scale.item())
            state = rule.update(state, flag(bad))
            try:
                deepspeeds.update_scale(bad)
            except Exception as error:  # it has no class of its own
                if "already at minimum" not in str(error):
                    raise
                with pytest.raises(FloatingPointError):
                    ps.check_scaler(state, rule)
                assert state.scale == floor
                return
            assert deepspeed_row(state) == deepspeeds_row(deepspeeds)


def deepspeed_optimizer(kind, scale, window, floor):
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.half))
    arguments = {"init_scale": scale, "scale_window": window, "min_scale": floor}
    with deepspeed_alone(f"{kind}_optimizer") as module:
        make = module.FP16_Optimizer if kind == "fused" else module.FP16_UnfusedOptimizer
        sgd, settings = torch.optim.SGD([weight], lr=0.1), {"dynamic_loss_args": arguments}
        return make(sgd, dynamic_loss_scale=True, verbose=False, **settings)


@few
@given(
    st.sampled_from(["fused", "unfused"]),
    overflow_patterns,
    st.tuples(powers, intervals, st.sampled_from([0.25, 1.0])),
    steps,
)
def test_deepspeeds_fused_and_unfused_optimizers_over_and_back(kind, pattern, settings, move_at):
    scale, _, floor = settings
    optimizer = deepspeed_optimizer(kind, *settings)
    rule = interop.deepspeed.rule(*settings, delayed_shift=1, raise_error_at_min_scale=False)
    state = rule.init()
    for index, bad in enumerate(pattern):
        if index == move_at:
            d, of_rule = optimizer.state_dict(), {"init_scale": scale, "min_scale": floor}
            restored, state = interop.deepspeed.from_state_dict(d, **of_rule)
            assert restored == rule
            optimizer = deepspeed_optimizer(kind, 1.0, 1, floor)
            optimizer.load_state_dict({**d, **interop.deepspeed.to_state_dict(restored, state)})
        bad = steered(bad, state.scale.item())
        optimizer._update_scale(bad)
        state = rule.update(state, flag(bad))
        assert deepspeed_row(state) == deepspeeds_row(optimizer.loss_scale_config)


# ---- flax and jmp

# One compiled loop of this length for all examples: what differs between them, the interval too, is
# data.
LENGTH = 320


@functools.cache
def compiled_loop(step):
    jax = peer("jax")

    def loop(carry, given, xs):
        return jax.lax.scan(lambda carry, x: (step(carry, *given, *x),) * 2, carry, xs)[1]

    return jax.jit(loop)


def looped(step, scale, count, given, pattern, intervals):
    """[(scale, count)] after each step of a peer that starts from `scale` and `count`."""
    jnp = peer("jax.numpy")
    pad = LENGTH - len(pattern)
    xs = jnp.asarray(pattern + [False] * pad, bool), jnp.asarray(intervals + [1] * pad, jnp.int32)
    start = jnp.float32(scale), jnp.int32(count)
    rows = compiled_loop(step)(start, tuple(map(jnp.float32, given)), xs)
    return list(zip(*(row.tolist() for row in rows), strict=True))[: len(pattern)]


def flax_step(carry, growth, backoff, floor, bad, interval):
    jnp, flaxs = peer("jax.numpy"), peer("flax.training.dynamic_scale")
    gradient = jnp.where(bad, jnp.nan, 1.0)
    before = flaxs.DynamicScale(
        growth, backoff, interval, scale=carry[0], fin_steps=carry[1], minimum_scale=floor
    )
    new, _, _, _ = before.value_and_grad(lambda weight: weight * gradient)(jnp.ones(()))
    return new.scale, new.fin_steps


@settings(unshrunk, max_examples=30)
@given(
    overflow_patterns,
    powers,
    st.tuples(power_factors, st.sampled_from([0.5, 0.25]), floors),
    steps,
    intervals,
    intervals,
)
def test_flax_changed_midway_over_and_back(
    pattern, scale, numbers, change_at, interval, new_interval
):
    given = dict(zip(("growth_factor", "backoff_factor", "minimum_scale"), numbers, strict=True))
    rule = interop.flax.rule(**given, growth_interval=interval, scale=scale)
    pattern, rows = trace(rule, pattern, change_at, {"growth_interval": new_interval})
    before, after = [interval] * change_at, [new_interval] * (LENGTH - change_at)
    first = looped(flax_step, scale, 0, numbers, pattern[:change_at], before)

    serialization, flaxs = peer("flax.serialization"), peer("flax.training.dynamic_scale")
    given["growth_interval"] = new_interval
    reached = first[-1] if first else (scale, 0)
    held = serialization.to_state_dict(
        flaxs.DynamicScale(**given, scale=reached[0], fin_steps=reached[1])
    )
    d = interop.flax.to_state_dict(*interop.flax.from_state_dict(held, **given))
    back = serialization.from_state_dict(flaxs.DynamicScale(**given), d)
    assert (back.scale, back.fin_steps) == reached
    rest = looped(flax_step, back.scale, back.fin_steps, numbers, pattern[change_at:], after)
    assert first + rest == rows


def rows_of(rule, pattern):
    """The scale and the count after each step."""
    state, rows = rule.init(), []
    for bad in pattern:
        state = rule.update(state, flag(bad))
        rows.append((state.scale.item(), state.growth_tracker.item()))
    return rows


@pytest.mark.parametrize(
    ("given", "bad"),
    [({"scale": 2.0**126}, False), ({"scale": 2.0**-124}, True), ({"minimum_scale": None}, True)],
)
def test_flax_step_by_step_at_its_ceiling_and_its_floor(given, bad):
    flaxs = peer("flax.training.dynamic_scale").DynamicScale(growth_interval=1, **given)
    gradient = peer("jax.numpy").nan if bad else 1.0
    step = peer("jax").jit(lambda before: before.value_and_grad(lambda w: w * gradient)(1.0)[0])
    for row in rows_of(interop.flax.rule(growth_interval=1, **given), [bad] * 8):
        flaxs = step(flaxs)
        assert row == (flaxs.scale, flaxs.fin_steps)


def jmp_step(carry, factor, floor, bad, period):
    # Made anew at each step: as a pytree it would lose its floor.
    new = peer("jmp").DynamicLossScale(*carry, period, factor, floor).adjust(~bad)
    return new.loss_scale, new.counter


@settings(unshrunk, max_examples=30)
@given(overflow_patterns, powers, power_factors, floors, steps, intervals, intervals)
def test_jmp_changed_midway_over_and_back(
    pattern, scale, factor, floor, change_at, period, new_period
):
    jmp, jnp = peer("jmp"), peer("jax.numpy")
    rule = interop.jmp.rule(scale, period=period, factor=factor, min_loss_scale=floor)
    pattern, rows = trace(rule, pattern, change_at, {"period": new_period})
    before, after = [period] * change_at, [new_period] * (LENGTH - change_at)
    first = looped(jmp_step, scale, 0, (factor, floor), pattern[:change_at], before)

    reached = first[-1] if first else (scale, 0)
    held = jmp.DynamicLossScale(
        jnp.float32(reached[0]), jnp.int32(reached[1]), new_period, factor, jnp.float32(floor)
    )
    d = interop.jmp.to_state_dict(*interop.jmp.from_state_dict(dataclasses.asdict(held)))
    assert d == dataclasses.asdict(held)
    given = d["factor"], d["min_loss_scale"]
    last = looped(jmp_step, d["loss_scale"], d["counter"], given, pattern[change_at:], after)
    assert first + last == rows


def test_jmp_step_by_step_at_the_top_of_float32_and_through_a_pytree():
    jmp, jax, jnp = peer("jmp"), peer("jax"), peer("jax.numpy")
    jmps = jmp.DynamicLossScale(jnp.float32(2.0**126), period=1)
    for scale, _ in rows_of(interop.jmp.rule(2.0**126, period=1), [False] * 5):
        jmps = jmps.adjust(jnp.asarray(True))
        assert scale == jmps.loss_scale
    # The floor that jmp forgets under jit is 1.0, which is the default here.
    jmps = jmp.DynamicLossScale(jnp.float32(2.0), min_loss_scale=jnp.float32(2.0**-10))
    forgetful = jax.jit(lambda scale: scale.adjust(jnp.asarray(False)))
    for scale, _ in rows_of(interop.jmp.rule(2.0), [True] * 3):
        jmps = forgetful(jmps)
        assert scale == jmps.loss_scale


# ---- Keras


def new_keras(scale, steps):
    keras = peer("keras")
    weight = keras.Variable(0.0)
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.0), initial_scale=scale, dynamic_growth_steps=steps
    )
    optimizer.build([weight])
    return optimizer, weight


def keras_row(optimizer):
    return float(optimizer.dynamic_scale), int(optimizer.step_counter)


def keras_rows(optimizer, weight, pattern):
    """Its own update, in a compiled loop."""
    jax, jnp = peer("jax"), peer("jax.numpy")
    places = [
        next(index for index, variable in enumerate(optimizer.variables) if variable is wanted)
        for wanted in (optimizer.dynamic_scale, optimizer.step_counter)
    ]

    def step(variables, bad):
        gradients = [jnp.where(bad, jnp.inf, 0.0)]
        _, new = optimizer.stateless_apply(variables, gradients, [weight.value])
        return new, [new[place] for place in places]

    variables, rows = jax.lax.scan(
        step, [variable.value for variable in optimizer.variables], jnp.asarray(pattern, bool)
    )
    for variable, value in zip(optimizer.variables, variables, strict=True):
        variable.assign(value)
    return list(zip(*(row.tolist() for row in rows), strict=True))


@few
@given(overflow_patterns, powers, intervals, steps, intervals)
def test_keras_changed_midway_over_and_back(pattern, scale, steps, change_at, new_steps):
    rule = interop.keras.rule(scale, steps)
    pattern, rows = trace(rule, pattern, change_at, {"dynamic_growth_steps": new_steps})
    optimizer, weight = new_keras(scale, steps)
    first = keras_rows(optimizer, weight, pattern[:change_at])
    held = {name: getattr(optimizer, name).numpy() for name in ("step_counter", "dynamic_scale")}
    restored = interop.keras.from_state_dict(held, dynamic_growth_steps=new_steps)
    d = interop.keras.to_state_dict(*restored)

    optimizer, weight = new_keras(d["initial_scale"], d["dynamic_growth_steps"])
    optimizer.step_counter.assign(d["step_counter"])
    optimizer.dynamic_scale.assign(d["dynamic_scale"])
    assert keras_row(optimizer) == (rows[change_at - 1] if change_at else (scale, 0))
    assert first + keras_rows(optimizer, weight, pattern[change_at:]) == rows


def test_keras_beyond_float32():
    optimizer, weight = new_keras(2.0**126, 1)
    pattern = [False] * 3 + [True] * 2
    assert keras_rows(optimizer, weight, pattern) == rows_of(
        interop.keras.rule(2.0**126, 1), pattern
    )


# ---- MMEngine


@contextlib.contextmanager
def mmengine_on_cpu():
    """Its wrapper, which asks for CUDA in so many words."""
    module = peer("mmengine.optim.optimizer.amp_optimizer_wrapper")
    scaler = functools.partial(torch.amp.GradScaler, "cpu")
    with (
        mock.patch.object(module, "GradScaler", scaler),
        mock.patch.object(module, "is_cuda_available", return_value=True),
    ):
        yield module.AmpOptimWrapper


def amp_wrapper(wrapper_class, loss_scale):
    weight = torch.nn.Parameter(torch.ones(()))
    sgd = torch.optim.SGD([weight], lr=0.0, foreach=False)
    return wrapper_class(loss_scale=loss_scale, optimizer=sgd), weight


def wrapper_step(wrapper, weight, bad):
    wrapper.update_params(weight * (torch.inf if bad else 1.0))
    return wrapper.loss_scaler.get_scale(), wrapper.loss_scaler._get_growth_tracker()


scaler_settings = st.fixed_dictionaries(
    {"init_scale": any_scale, "growth_interval": intervals}
    | {"growth_factor": growths, "backoff_factor": backoffs}
)


@few
@given(overflow_patterns, st.just("dynamic") | any_scale | scaler_settings, steps)
def test_mmengines_amp_wrapper_over_and_back(pattern, loss_scale, move_at):
    with mmengine_on_cpu() as wrapper_class:
        wrapper, weight = amp_wrapper(wrapper_class, loss_scale)
        rule = interop.mmengine.rule(loss_scale)
        state = rule.init()
        for index, bad in enumerate(pattern):
            bad = steered(bad, wrapper.loss_scaler.get_scale())
            expected = wrapper_step(wrapper, weight, bad)
            state = rule.update(state, flag(bad))
            assert (state.scale.item(), state.growth_tracker.item()) == expected
            if index == move_at:
                d = wrapper.state_dict()
                given = {"loss_scale": loss_scale} if isinstance(loss_scale, float) else {}
                rule, state = interop.mmengine.from_state_dict(d, **given)
                back = interop.mmengine.to_state_dict(rule, state)
                assert back["loss_scaler"] == d["loss_scaler"]
                wrapper, weight = amp_wrapper(wrapper_class, loss_scale)
                wrapper.load_state_dict({**d, **back})


def test_mmengines_apex_wrapper_loads_what_was_written():
    """Apex itself cannot be had: a stand-in for `apex.amp` with its two functions and format."""
    module = peer("mmengine.optim.optimizer.apex_optimizer_wrapper")
    held = {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 7}}
    apex = types.SimpleNamespace(
        state_dict=lambda: copy.deepcopy(held), load_state_dict=held.update
    )
    with mock.patch.object(module, "apex_amp", apex):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(()))], lr=0.1)
        optimizer._amp_stash = None  # how the wrapper knows that apex was initialised
        wrapper = module.ApexOptimWrapper(optimizer=optimizer)
        d = wrapper.state_dict()
        rule, state = interop.mmengine.from_state_dict(d)
        state = rule.update(state, flag(True))
        wrapper.load_state_dict({**d, **interop.mmengine.to_state_dict(rule, state)})
        assert held == {"loss_scaler0": {"loss_scale": 512.0, "unskipped": 0}}
