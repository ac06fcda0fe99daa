"""The results of the package do not follow what a caller has switched in torch: the
default dtype, the default device, autocast. Inside of autocast only the loss is computed under it.
"""

import functools
from types import SimpleNamespace

import pytest
import torch
from helpers import (
    CLASSES,
    AsOnAnAccelerator,
    batch,
    clone,
    cross_entropy_of,
    default_dtype,
    in_float32,
    job,
    same_bits,
    scaled_by,
    stack,
)
from torch import nn

import purescale as ps
from purescale import interop, simulate
from purescale._torch import autocast as _autocast

OPTIM = torch.optim
F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
RULE = ps.DynamicScale(init_scale=2.0**10)
SGD = ps.from_torch(OPTIM.SGD, lr=0.1)


def autocast(dtype=BF16):
    return torch.autocast("cpu", dtype)


SWITCHES = {
    **{f"default {dtype}": functools.partial(default_dtype, dtype) for dtype in (F64, BF16, F16)},
    **{f"autocast({dtype})": functools.partial(autocast, dtype) for dtype in (BF16, F16)},
    "default device": lambda: torch.device("meta"),
}

# ---- optimizers ----------------------------------------------------------------------------------

OTHERS = {"Adafactor, by lists": {"foreach": True}, "SGD": {"momentum": 0.9, "dampening": 0.1}}
SETTINGS = CLASSES | OTHERS
RATES = {
    "a schedule": {"lr": lambda applied: 0.1 * (applied + 1).to(F32)},
    "a number": {"lr": 0.1},
    "in the state": {"lr": 0.1, "in_state": ("lr",)},
}


def trees(name):
    """Parameters and gradients; without a number where a class takes no half or only matrices."""
    shapes = {"matrix": (5, 33), "wide": (33, 300)}
    if name != "Muon":
        shapes |= {f"of {size}": (size,) for size in (5, 33, 300)} | {"number": ()}
    dtypes = dict.fromkeys(shapes, F32)
    if not name.startswith(("Muon", "Adafactor")):
        shapes["double"], dtypes["double"] = (33,), F64
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    return [{key: draw(shapes[key], dtype=dtypes[key]) for key in shapes} for _ in range(2)]


def optimizer_of(name, rate):
    return ps.from_torch(getattr(OPTIM, name.partition(",")[0]), **RATES[rate], **SETTINGS[name])


def steps_of(name, rate):
    """Steps of an optimizer that is made inside, and its state dict there and back."""
    params, grads = trees(name)

    def steps():
        optimizer, new = optimizer_of(name, rate), params
        state = optimizer.init(params)
        for _ in range(2):
            new, state = optimizer.step(new, grads, state)
        arguments, scaler = (new, grads, state), ps.StaticScale(4.0).init("cpu")
        return (
            ps.maybe_step(optimizer, *arguments, False),
            ps.unscale_and_step(optimizer, scaler, *arguments, max_norm=1.0, clip_value=0.1),
            optimizer.from_state_dict(optimizer.to_state_dict(state), params, applied=2),
        )

    return steps


def mapped_step_of(name):
    """A step under vmap of an optimizer that was made before."""
    (params, grads), optimizer = trees(name), optimizer_of(name, "a number")
    arguments = [stack([tree, tree]) for tree in (params, grads, optimizer.init(params))]
    return lambda: torch.vmap(optimizer.step)(*arguments)


def turned(params, grads):
    return {"w": params["w"] - grads["w"] @ grads["w"].T @ grads["w"]}


OWN = SimpleNamespace(
    init=lambda params: (),
    step=lambda params, grads, opt_state: (turned(params, grads), opt_state),
    update=lambda grads, state, params: (turned({"w": 0}, grads), state),
)


def step_by(optimizer):
    params, scaler = {"w": torch.randn(33, 5)}, RULE.init()
    arguments = params, params, optimizer.init(params)
    return lambda: (
        ps.maybe_step(optimizer, *arguments, False),
        ps.unscale_and_step(optimizer, scaler, *arguments, max_norm=1.0),
    )


# ---- the other functions -------------------------------------------------------------------------


def parts_of(size):
    """Functions of gradients of all kinds, most of them of this size."""
    dtypes = {str(dtype): torch.randn(size).to(dtype) for dtype in (F32, F16, BF16, F64)}
    complex_one = torch.randn(3, dtype=torch.complex64)
    kinds = {"0-d": torch.tensor(1.0), "complex": complex_one, "none": None}
    mixed = {**dtypes, **kinds, "sparse": torch.eye(2)[0].to_sparse()}
    real = {**mixed, "complex": None}
    scaler, good, bad = RULE.init(), torch.tensor(False), torch.tensor(True)
    accum = ps.accumulate_grads(ps.init_accum(dtypes), dtypes, weight=2)
    return {
        "scale_loss": lambda: [ps.scale_loss(scaler, grad.sum()) for grad in dtypes.values()],
        "unscale_and_check": lambda: [
            ps.unscale_and_check(scaler, clone(mixed), donate=donate) for donate in (False, True)
        ],
        "clip_by_global_norm": lambda: [
            ps.clip_by_global_norm(mixed, bound, p)
            for bound in (1.0, 0.1)
            for p in (2.0, 3.0, float("inf"))
        ],
        "clip_by_value": lambda: ps.clip_by_value(real, 0.1),
        "nothing": lambda: [
            *(ps.clip_by_global_norm([], 1.0), ps.unscale_and_check(scaler, {})),
            ps.init_accum([]),
        ],
        "accumulate_grads": lambda: [
            ps.accumulate_grads(accum, dtypes, weight=weight, found_inf=flag)
            for weight, flag in ((1, None), (2.5, bad), (0, good), (3, True), (3, False))
        ],
        "accumulated_grads": lambda: [
            ps.accumulated_grads(ps.merge_accum(accum, accum), how)
            for how in ("drop_window", "drop_microbatch")
        ],
        "grad_amax": lambda: ps.grad_amax(mixed),
        "grad_report": lambda: [tuple(row) for row in ps.grad_report(mixed).rows.values()],
        "update_report": lambda: [
            tuple(row) for row in ps.update_report(dtypes, dtypes, dtypes).rows.values()
        ],
        "select": lambda: [ps.select(flag, dtypes, dtypes) for flag in (good, True)],
        "all_reduce_grads": lambda: ps.all_reduce_grads(dtypes),
        "all_reduce_found_inf": lambda: ps.all_reduce_found_inf(good),
    }


def peers():
    names = "torch_amp megatron deepspeed flax keras nnabla fairseq apex mmengine"
    for peer in names.split():
        module = getattr(interop, peer)
        rule = module.rule()
        scaler = rule.init("cpu")
        yield (
            f"the rule of {peer}",
            lambda m=module, r=rule, s=scaler: (
                r.update(s, torch.tensor(False, device="cpu")),
                r.update(s, True),
                m.from_state_dict(m.to_state_dict(r, s), device="cpu")[1],
            ),
        )


FLAGS, AMAXES = torch.tensor([True, False]), torch.tensor([1.0, 1e30, 2.7])


def scalings():
    rules = [ps.DynamicScale(), ps.HeadroomScale(), ps.StaticScale(2.0), interop.apex.ApexScale()]
    replayed = [simulate.replay(rule, AMAXES) for rule in rules]
    return [simulate.simulate(rules[0], FLAGS), *replayed]


# ---- losses --------------------------------------------------------------------------------------


def trainings():
    """Calls of which one computes a loss, which is under the caller's autocast."""
    state, step = job(ps.from_torch(OPTIM.Adamax, lr=0.1), RULE)
    overflowing, window = scaled_by(state, 2.0**30), [batch(), batch(1)]
    x = window[0][0]
    apply, params, buffers = ps.make_functional(
        nn.Sequential(nn.Flatten(), nn.Linear(36, 33), nn.BatchNorm1d(33), nn.Linear(33, 3))
    )
    loss_fn, bn = cross_entropy_of(apply), ps.init_bn_stats(buffers)

    def probe():
        result = ps.probe_scales(loss_fn, params, buffers, window[0], exponents=[0, 8, 24])
        return result.exponents, result.zeros, result.error

    def statistics():
        stats = ps.accumulate_bn_stats(bn, apply, params, buffers, x)
        return ps.bn_buffers(ps.merge_bn_stats(stats, stats), buffers)

    return {
        "train_step": lambda: step(state, window[:1], max_norm=1.0),
        "train_step, two": lambda: step(state, window, max_norm=1.0, clip_value=0.1),
        "train_step, retried": lambda: step(overflowing, window[:1], max_retries=2),
        "train_step that drops": lambda: step(state, window, on_nonfinite="drop_microbatch"),
        "train_step, by windows": lambda: step(
            state, window, bn_update="window", weight_fn=lambda b: 2.5
        ),
        "make_functional": lambda: apply(params, buffers, x),
        "probe_scales": probe,
        "accumulate_bn_stats": statistics,
        "check_scaler": lambda: ps.check_scaler(state.scaler, RULE, max_skips=3),
    }


# ---- a loss that leaves autocast, whose backward would not


def state_of(*shape):
    return ps.init_train_state({"w": torch.randn(shape)}, {}, SGD, RULE)


def backwards():
    def step(state, x):
        return ps.train_step(state, [x, x + 1], loss_fn=in_float32, optimizer=SGD, rule=RULE)

    # The gradients of the last are taken one by one.
    for shape in ((5, 33), (300, 33), (2**10, 2**9)):
        arguments = state_of(*shape), torch.randn(5, shape[0])
        yield f"a backward of {shape}", functools.partial(step, *arguments)
    states, xs = stack([state_of(33, 5), state_of(33, 5)]), torch.randn(2, 5, 33)
    yield "a backward, mapped", lambda: torch.vmap(step)(states, xs)
    params, x = {"w": torch.randn(33, 5)}, torch.randn(300, 33)

    def facts():
        probe = ps.probe_scales(in_float32, params, {}, x, exponents=[0, 4, 127])
        return probe.overflow, probe.zeros, probe.error, str(probe)

    yield "a backward of a probe", facts


# The rate of Rprop is what it begins with, and no setting of its state.
PAIRS = [(n, rate) for n in SETTINGS for rate in RATES if (n, rate) != ("Rprop", "in the state")]
LOSSES = trainings()
CALLS = {
    **{f"{name}, {rate}": steps_of(name, rate) for name, rate in PAIRS},
    **{f"{n}, mapped": mapped_step_of(n) for n in SETTINGS if not n.startswith("Adafactor")},
    "an optimizer of one's own": step_by(OWN),
    "a transformation": step_by(ps.from_transformation(OWN)),
    **{f"{name}, {size}": call for size in (33, 2**20) for name, call in parts_of(size).items()},
    **dict(peers()),
    "simulate": scalings,
    **dict(backwards()),
    **LOSSES,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_the_same_whatever_is_switched(name):
    expected = CALLS[name]()
    for what, switch in SWITCHES.items():
        if name in LOSSES and "autocast" in what:
            continue  # a loss is computed under it
        with switch():
            result = CALLS[name]()
        assert same_bits(result, expected), what


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_reads_nothing_makes_nothing_on_the_default_device(name):
    with AsOnAnAccelerator():
        expected = CALLS[name]()
    with AsOnAnAccelerator(), torch.device("meta"):
        result = CALLS[name]()
    assert same_bits(result, expected)


# ---- what the caller's autocast reaches


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


def test_the_callers_autocast_is_as_it_was_also_after_an_error():
    with autocast():
        with pytest.raises(ValueError, match="max_norm"):
            ps.clip_by_global_norm({"w": torch.ones(1)}, max_norm=-1.0)
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16


def test_each_device_with_an_autocast_of_torchs_own_is_looked_at():
    assert set(torch._C._autocast_supported_devices()) <= set(_autocast._DEVICES)
