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

os.environ.setdefault("KERAS_BACKEND", "jax")

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
powers = st.integers(-10, 20).map(lambda exponent: 2.0**exponent)
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
@given(
    overflow_patterns,
    any_scale,
    st.floats(0.001, 1),
    growths,
    backoffs,
    intervals,
    st.integers(1, 4),
    steps,
    growths,
    intervals,
)
def test_megatron_with_any_setting_changed_midway(
    pattern, scale, floor, growth, backoff, interval, hysteresis, change_at, new_growth, shorter
):
    floor = max(scale * floor, 2.0**-126)
    rule, state = None, None
    with megatron_on_cpu() as scaler_class:
        megatrons = scaler_class(scale, floor, growth, backoff, interval, hysteresis)
        for index, bad in enumerate(pattern):
            if index == change_at:
                # Over and back in the same breath: this is where the peer is changed too.
                d = megatrons.state_dict()
                growth, interval = new_growth, shorter
                megatrons = scaler_class(scale, floor, growth, backoff, interval, hysteresis)
                if torch.isfinite(d["scale"]):
                    given = {
                        "growth_factor": growth,
                        "backoff_factor": backoff,
                        "growth_interval": interval,
                        "hysteresis": hysteresis,
                    }
                    rule, state = interop.megatron.from_state_dict(
                        d, initial_scale=scale, min_scale=floor, **given
                    )
                    back = interop.megatron.to_state_dict(rule, state)
                    assert same_bits(back, d)
                    megatrons.load_state_dict(back)
                else:
                    rule = dataclasses.replace(rule, growth_factor=growth, growth_interval=interval)
                    megatrons.load_state_dict(d)
            if rule is None:
                rule = interop.megatron.rule(scale, floor, growth, backoff, interval, hysteresis)
                state = rule.init()
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
    return (
        scaler.cur_scale,
        scaler.cur_iter,
        scaler.last_overflow_iter,
        getattr(scaler, "cur_hysteresis", 1),
    )


def deepspeed_row(state):
    return tuple(leaf.item() for leaf in state[:4])


@settings(unshrunk, max_examples=20)
@given(
    overflow_patterns,
    powers,
    intervals,
    st.integers(-20, -5).map(lambda exponent: 2.0**exponent),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
    steps,
    intervals,
)
def test_deepspeed_in_both_refill_modes_over_and_back(
    pattern, scale, window, floor, shift, consecutive, raises, change_at, new_window
):
    rule = interop.deepspeed.rule(scale, window, floor, shift, consecutive, raises)
    state = rule.init()
    with deepspeed_alone("loss_scaler") as module:
        scaler_class = module.DynamicLossScaler
        deepspeeds = scaler_class(scale, window, floor, shift, consecutive, raises)
        for index, bad in enumerate(pattern):
            if index == change_at:
                rule, state = interop.deepspeed.from_state_dict(
                    {"loss_scaler": deepspeeds, "dynamic_loss_scale": True}, init_scale=scale
                )
                deepspeeds = scaler_class(1.0, 1, 1.0, 1, False)
                d = interop.deepspeed.to_state_dict(rule, state)
                vars(deepspeeds).update({key: d[key] for key in vars(deepspeeds) if key in d})
                rule, deepspeeds.scale_window = (
                    dataclasses.replace(rule, scale_window=new_window),
                    new_window,
                )
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
        return make(
            torch.optim.SGD([weight], lr=0.1),
            dynamic_loss_scale=True,
            dynamic_loss_args=arguments,
            verbose=False,
        )


@few
@given(
    st.sampled_from(["fused", "unfused"]),
    overflow_patterns,
    powers,
    intervals,
    st.sampled_from([0.25, 1.0]),
    steps,
)
def test_deepspeeds_fused_and_unfused_optimizers_over_and_back(
    kind, pattern, scale, window, floor, move_at
):
    optimizer = deepspeed_optimizer(kind, scale, window, floor)
    rule = interop.deepspeed.rule(
        scale, window, floor, delayed_shift=1, raise_error_at_min_scale=False
    )
    state = rule.init()
    for index, bad in enumerate(pattern):
        if index == move_at:
            d = optimizer.state_dict()
            restored, state = interop.deepspeed.from_state_dict(
                d, init_scale=scale, min_scale=floor
            )
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
    return jax.jit(
        lambda carry, given, xs: jax.lax.scan(lambda carry, x: step(carry, *given, *x), carry, xs)[
            1
        ]
    )


def looped(step, scale, count, given, pattern, intervals):
    """[(scale, count)] after each step of a peer that starts from `scale` and `count`."""
    jnp = peer("jax.numpy")
    pad = LENGTH - len(pattern)
    xs = jnp.asarray(pattern + [False] * pad, bool), jnp.asarray(intervals + [1] * pad, jnp.int32)
    rows = compiled_loop(step)(
        (jnp.float32(scale), jnp.int32(count)), tuple(map(jnp.float32, given)), xs
    )
    return list(zip(*(row.tolist() for row in rows), strict=True))[: len(pattern)]


def flax_step(carry, growth, backoff, floor, bad, interval):
    jnp, flaxs = peer("jax.numpy"), peer("flax.training.dynamic_scale")
    gradient = jnp.where(bad, jnp.nan, 1.0)
    before = flaxs.DynamicScale(
        growth, backoff, interval, scale=carry[0], fin_steps=carry[1], minimum_scale=floor
    )
    new, _, _, _ = before.value_and_grad(lambda weight: weight * gradient)(jnp.ones(()))
    return (new.scale, new.fin_steps), (new.scale, new.fin_steps)


@settings(unshrunk, max_examples=30)
@given(
    overflow_patterns,
    powers,
    power_factors,
    st.sampled_from([0.5, 0.25]),
    intervals,
    st.integers(-110, 0).map(lambda exponent: 2.0**exponent),
    steps,
    intervals,
)
def test_flax_changed_midway_over_and_back(
    pattern, scale, growth, backoff, interval, floor, change_at, new_interval
):
    rule = interop.flax.rule(growth, backoff, interval, scale=scale, minimum_scale=floor)
    pattern, rows = trace(rule, pattern, change_at, {"growth_interval": new_interval})
    before, after = [interval] * change_at, [new_interval] * (LENGTH - change_at)
    first = looped(flax_step, scale, 0, (growth, backoff, floor), pattern[:change_at], before)

    serialization, flaxs = peer("flax.serialization"), peer("flax.training.dynamic_scale")
    given = {
        "growth_factor": growth,
        "backoff_factor": backoff,
        "growth_interval": new_interval,
        "minimum_scale": floor,
    }
    reached = first[-1] if first else (scale, 0)
    held = serialization.to_state_dict(
        flaxs.DynamicScale(**given, scale=reached[0], fin_steps=reached[1])
    )
    d = interop.flax.to_state_dict(*interop.flax.from_state_dict(held, **given))
    back = serialization.from_state_dict(flaxs.DynamicScale(**given), d)
    assert (back.scale, back.fin_steps) == reached
    assert (
        first
        + looped(
            flax_step,
            back.scale,
            back.fin_steps,
            (growth, backoff, floor),
            pattern[change_at:],
            after,
        )
        == rows
    )


def states(rule, pattern):
    state, seen = rule.init(), []
    for bad in pattern:
        state = rule.update(state, flag(bad))
        seen.append(state)
    return seen


@pytest.mark.parametrize(
    ("given", "bad"),
    [({"scale": 2.0**126}, False), ({"scale": 2.0**-124}, True), ({"minimum_scale": None}, True)],
)
def test_flax_step_by_step_at_its_ceiling_and_its_floor(given, bad):
    jax, jnp, flaxs = (
        peer("jax"),
        peer("jax.numpy"),
        peer("flax.training.dynamic_scale").DynamicScale(growth_interval=1, **given),
    )
    step = jax.jit(
        lambda before: before.value_and_grad(lambda weight: weight * (jnp.nan if bad else 1.0))(
            1.0
        )[0]
    )
    for state in states(interop.flax.rule(growth_interval=1, **given), [bad] * 8):
        flaxs = step(flaxs)
        assert (state.scale.item(), state.growth_tracker.item()) == (flaxs.scale, flaxs.fin_steps)


def jmp_step(carry, factor, floor, bad, period):
    # Made anew at each step: as a pytree it would lose its floor.
    new = peer("jmp").DynamicLossScale(*carry, period, factor, floor).adjust(~bad)
    return (new.loss_scale, new.counter), (new.loss_scale, new.counter)


@settings(unshrunk, max_examples=30)
@given(
    overflow_patterns,
    powers,
    power_factors,
    intervals,
    st.integers(-110, 0).map(lambda exponent: 2.0**exponent),
    steps,
    intervals,
)
def test_jmp_changed_midway_over_and_back(
    pattern, scale, factor, period, floor, change_at, new_period
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
    last = looped(
        jmp_step,
        d["loss_scale"],
        d["counter"],
        (d["factor"], d["min_loss_scale"]),
        pattern[change_at:],
        after,
    )
    assert first + last == rows


def test_jmp_step_by_step_at_the_top_of_float32_and_through_a_pytree():
    jmp, jax, jnp = peer("jmp"), peer("jax"), peer("jax.numpy")
    jmps, rule = (
        jmp.DynamicLossScale(jnp.float32(2.0**126), period=1),
        interop.jmp.rule(2.0**126, period=1),
    )
    for state in states(rule, [False] * 5):
        jmps = jmps.adjust(jnp.asarray(True))
        assert state.scale.item() == jmps.loss_scale
    # The floor that jmp forgets under jit is 1.0, which is the default here.
    jmps = jmp.DynamicLossScale(jnp.float32(2.0), min_loss_scale=jnp.float32(2.0**-10))
    forgetful = jax.jit(lambda scale: scale.adjust(jnp.asarray(False)))
    for state in states(interop.jmp.rule(2.0), [True] * 3):
        jmps = forgetful(jmps)
        assert state.scale.item() == jmps.loss_scale


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
    """Its own update: in a compiled loop where its backend is jax, which refuses the other way,
    else step by step.
    """
    keras = peer("keras")
    if keras.backend.backend() != "jax":
        rows = []
        for bad in pattern:
            optimizer.apply([keras.ops.convert_to_tensor(float("inf") if bad else 0.0)], [weight])
            rows.append(keras_row(optimizer))
        return rows
    jax, jnp = peer("jax"), peer("jax.numpy")
    places = [
        next(index for index, variable in enumerate(optimizer.variables) if variable is wanted)
        for wanted in (optimizer.dynamic_scale, optimizer.step_counter)
    ]

    def step(variables, bad):
        _, new = optimizer.stateless_apply(
            variables, [jnp.where(bad, jnp.inf, 0.0)], [weight.value]
        )
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
    held = {
        "step_counter": optimizer.step_counter.numpy(),
        "dynamic_scale": optimizer.dynamic_scale.numpy(),
    }
    d = interop.keras.to_state_dict(
        *interop.keras.from_state_dict(held, dynamic_growth_steps=new_steps)
    )

    optimizer, weight = new_keras(d["initial_scale"], d["dynamic_growth_steps"])
    optimizer.step_counter.assign(d["step_counter"])
    optimizer.dynamic_scale.assign(d["dynamic_scale"])
    assert keras_row(optimizer) == (rows[change_at - 1] if change_at else (scale, 0))
    assert first + keras_rows(optimizer, weight, pattern[change_at:]) == rows


def test_keras_beyond_float32():
    optimizer, weight = new_keras(2.0**126, 1)
    pattern = [False] * 3 + [True] * 2
    rows = [
        (state.scale.item(), state.growth_tracker.item())
        for state in states(interop.keras.rule(2.0**126, 1), pattern)
    ]
    assert keras_rows(optimizer, weight, pattern) == rows


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
    return wrapper_class(
        loss_scale=loss_scale, optimizer=torch.optim.SGD([weight], lr=0.0, foreach=False)
    ), weight


def wrapper_step(wrapper, weight, bad):
    wrapper.update_params(weight * (torch.inf if bad else 1.0))
    return wrapper.loss_scaler.get_scale(), wrapper.loss_scaler._get_growth_tracker()


@few
@given(
    overflow_patterns,
    st.one_of(
        st.just("dynamic"),
        any_scale,
        st.fixed_dictionaries(
            {
                "init_scale": any_scale,
                "growth_interval": intervals,
                "growth_factor": growths,
                "backoff_factor": backoffs,
            }
        ),
    ),
    steps,
)
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
                given = (
                    {}
                    if isinstance(rule, interop.torch_amp.TorchAmpScale)
                    else {"loss_scale": loss_scale}
                )
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
