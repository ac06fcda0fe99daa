"""What the package makes and computes does not follow `torch.set_default_dtype`."""

import contextlib

import pytest
import torch
from helpers import cross_entropy_of, same_bits
from torch import nn

import purescale as ps
from purescale import interop, simulate
from purescale._tree.pytree import map as tree_map

OPTIM = torch.optim
OTHERS = [torch.float64, torch.bfloat16, torch.float16]
SIZES = (5, 33, 300)


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def assert_the_same_under(dtype, compute):
    expected = compute()
    with default_dtype(dtype):
        found = compute()
    assert same_bits(found, expected)


CLASSES = {
    **{name: {} for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam")},
    **{name: {} for name in ("RAdam", "RMSprop", "Rprop", "Muon")},
    "Adafactor": {"foreach": False},
    "SGD": {"momentum": 0.9, "dampening": 0.1},
}
RATES = {
    "number": {"lr": 0.1},
    "state": {"lr": 0.1, "in_state": ("lr",)},
    "schedule": {"lr": lambda applied: 0.1 * (applied + 1).to(torch.float32)},
}


def trees(name):
    """Parameters and gradients; without a number where a class takes no half or only matrices."""
    shapes = {"matrix": (5, 33)}
    if name != "Muon":
        shapes |= {f"of {size}": (size,) for size in SIZES} | {"number": ()}
    dtypes = dict.fromkeys(shapes, torch.float32)
    if name not in ("Muon", "Adafactor"):
        shapes["double"], dtypes["double"] = (33,), torch.float64
    generator = torch.Generator().manual_seed(0)
    return tuple(
        {
            key: torch.randn(shape, generator=generator, dtype=dtypes[key])
            for key, shape in shapes.items()
        }
        for _ in range(2)
    )


CASES = [(name, "schedule", OTHERS[index % 2]) for index, name in enumerate(CLASSES)]
CASES += [("AdamW", rate, dtype) for rate in RATES for dtype in OTHERS]


@pytest.mark.parametrize(("name", "rate", "dtype"), CASES)
def test_steps_states_and_state_dicts_of_an_optimizer(name, rate, dtype):
    params, grads = trees(name)

    def steps():
        optimizer = ps.from_torch(getattr(OPTIM, name), **RATES[rate], **CLASSES[name])
        state = optimizer.init(params)
        stepped = params
        for _ in range(2):
            stepped, state = optimizer.step(stepped, grads, state)
        scaler = ps.StaticScale(4.0).init()
        out = ps.unscale_and_step(optimizer, scaler, stepped, grads, state, max_norm=1.0)
        sd = optimizer.to_state_dict(state)
        return out, optimizer.from_state_dict(sd, params, applied=2)

    assert_the_same_under(dtype, steps)


@pytest.mark.parametrize("dtype", [torch.float64])
@pytest.mark.parametrize("name", [name for name in CLASSES if name != "Adafactor"])
def test_a_step_under_vmap_of_an_optimizer_made_before(name, dtype):
    params, grads = trees(name)
    optimizer = ps.from_torch(getattr(OPTIM, name), lr=0.1, **CLASSES[name])
    given = tree_map(
        lambda leaf: torch.stack([leaf, leaf]), (params, grads, optimizer.init(params))
    )
    assert_the_same_under(dtype, lambda: torch.vmap(optimizer.step)(*given))


def scalings():
    rules = [ps.DynamicScale(), ps.HeadroomScale(), ps.StaticScale(2.0), interop.apex.ApexScale()]
    return [
        simulate.simulate(rules[0], [True, False]),
        *(simulate.replay(rule, [1.0, 1e30, 2.7]) for rule in rules),
        ps.scale_loss(rules[0].init(), torch.tensor(2.0, dtype=torch.float16)),
    ]


def parts():
    grads = trees("AdamW")[1]
    halves = {name: grad.half() for name, grad in grads.items()}
    accum = ps.init_accum(halves)
    for weight in (1, 2.5, 0):
        accum = ps.accumulate_grads(accum, halves, weight=weight)
    return [
        ps.unscale_and_check(ps.DynamicScale().init(), halves),
        ps.clip_by_global_norm(grads, 1.0),
        ps.clip_by_global_norm(grads, 0.1, norm_type=3.0),
        ps.clip_by_value(grads, 0.1),
        ps.grad_amax(halves),
        [tuple(row) for row in ps.grad_report(halves).rows.values()],
        [tuple(row) for row in ps.update_report(halves, halves, halves).rows.values()],
        ps.accumulated_grads(ps.merge_accum(accum, accum), "drop_microbatch"),
    ]


with default_dtype(torch.float32):
    MODEL = nn.Sequential(nn.Linear(8, 33), nn.BatchNorm1d(33), nn.ReLU(), nn.Linear(33, 3))
    BATCH = torch.randn(16, 8), torch.arange(16) % 3


def training():
    apply, params, buffers = ps.make_functional(MODEL)
    optimizer, rule = ps.from_torch(OPTIM.AdamW), ps.DynamicScale()
    loss_fn = cross_entropy_of(apply)
    infos, state = [], ps.init_train_state(params, buffers, optimizer, rule)
    for settings in (
        {"on_nonfinite": "drop_microbatch"},
        {"bn_update": "window", "weight_fn": lambda batch: 2.5},
        {"max_norm": 1.0, "clip_value": 0.1, "max_retries": 1},
    ):
        state, info = ps.train_step(
            state, [BATCH, BATCH], loss_fn=loss_fn, optimizer=optimizer, rule=rule, **settings
        )
        infos.append(info)
    probe = ps.probe_scales(loss_fn, params, buffers, BATCH, exponents=[0, 8, 24])
    stats = ps.accumulate_bn_stats(ps.init_bn_stats(buffers), apply, params, buffers, BATCH[0])
    found = ps.bn_buffers(ps.merge_bn_stats(stats, stats), buffers)
    return state, infos, found, (probe.exponents, probe.zeros, probe.error)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("compute", [scalings, parts, training])
def test_everything_else(compute, dtype):
    assert_the_same_under(dtype, compute)
