"""The state of an optimizer: torch's format in and out, and states that do not fit."""

import subprocess
import sys

import pytest
import torch
from helpers import assert_close, same_bits, shares_memory
from test_torch_optim import CASES, OPTIM, grads_at, implementation, make_params, ours, real

import purescale as ps

# ---- torch's own format


def assert_continues(found, expected, name, way):
    """To the bit. What torch computes of step counts in float32 where it reads nothing is computed
    in float64 here.
    """
    if way == "accelerator" and name in ("Adamax", "NAdam", "RAdam"):
        return assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert same_bits(found, expected)


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_a_state_moves_to_torch_and_continues_there(name, settings, way):
    optimizer = ps.from_torch(getattr(OPTIM, name), **settings)
    params, state = ours(optimizer, steps=4)
    moved = [p.clone().requires_grad_() for p in params.values()]
    theirs = getattr(OPTIM, name)(moved, **settings, **implementation(name, settings, way))
    sd = optimizer.to_state_dict(state)
    theirs.load_state_dict(
        {
            **sd,
            "param_groups": [
                {**theirs.state_dict()["param_groups"][0], "lr": sd["param_groups"][0]["lr"]}
            ],
        }
    )
    for step in (4, 5):
        for p, g in zip(moved, grads_at(step, params).values(), strict=True):
            p.grad = g
        theirs.step()
    expected, _ = ours(optimizer, steps=2, params=params, state=state, start=4)
    assert_continues(list(expected.values()), [p.detach() for p in moved], name, way)


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_a_state_comes_from_torch_and_continues_here(name, settings, way):
    params, theirs = real(name, settings, implementation(name, settings, way), steps=4)
    optimizer = ps.from_torch(getattr(OPTIM, name), **settings)
    state = optimizer.from_state_dict(theirs.state_dict(), params)
    continued, _ = ours(optimizer, steps=2, params=params, state=state, start=4)
    expected, _ = real(name, settings, implementation(name, settings, way), steps=6)
    assert_continues(continued, expected, name, way)
    assert state.applied == (4 if name not in ("SGD", "Muon") else int(bool(theirs.state)))


def test_the_groups_of_a_state_dict_are_torchs():
    optimizer = ps.from_torch(OPTIM.AdamW, lr=0.1, overrides={"gain": {"weight_decay": 0.0}})
    params = make_params()
    ours_ = optimizer.to_state_dict(optimizer.init(params))["param_groups"]
    theirs = OPTIM.AdamW(
        [
            {"params": [params["conv.weight"], params["head.weight"]]},
            {"params": [params["gain"]], "weight_decay": 0.0},
        ],
        lr=0.1,
    )
    assert ours_ == theirs.state_dict()["param_groups"]


def test_a_state_dict_shares_no_memory():
    optimizer = ps.from_torch(OPTIM.AdamW)
    params, state = ours(optimizer, steps=1)
    sd = optimizer.to_state_dict(state)
    assert not shares_memory(state, sd)
    assert not shares_memory(sd, optimizer.from_state_dict(sd, params))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda sd: sd["state"][0].pop("exp_avg"),
            r"the state of conv.weight has \['exp_avg_sq', 'step'\]",
        ),
        (
            lambda sd: sd["state"][1].update(exp_avg=torch.zeros(3)),
            r"the state of head.weight has exp_avg of shape \(3,\)",
        ),
        (
            lambda sd: sd["param_groups"][0]["params"].pop(),
            r"the state dict has groups of \[2\] parameters, this optimizer has \[3\]",
        ),
    ],
)
def test_a_state_dict_of_something_else_is_refused(spoil, message):
    optimizer = ps.from_torch(OPTIM.AdamW)
    params, state = ours(optimizer, steps=1)
    sd = optimizer.to_state_dict(state)
    spoil(sd)
    with pytest.raises(ValueError, match=message):
        optimizer.from_state_dict(sd, params)


COUNTLESS = [("SGD", {}), ("SGD", {"momentum": 0.9}), ("Muon", {})]


def migrated(name, settings, steps=5):
    """Parameters and torch's own optimizer after some steps under a cosine, and its scheduler."""
    weight = torch.nn.Parameter(torch.ones(2, 3))
    theirs = getattr(OPTIM, name)([weight], lr=0.1, **settings)
    scheduler = OPTIM.lr_scheduler.CosineAnnealingLR(theirs, T_max=10)
    for _ in range(steps):
        weight.grad = torch.ones(2, 3)
        theirs.step()
        scheduler.step()
    return {"w": weight.detach().clone()}, theirs, scheduler


def cosine(applied):
    return 0.05 * (1 + torch.cos(torch.pi * applied / 10))


@pytest.mark.parametrize(("name", "settings"), COUNTLESS)
def test_a_schedule_is_refused_a_state_dict_that_does_not_tell_how_many_steps_were_made(
    name, settings
):
    params, theirs, _ = migrated(name, settings)
    optimizer = ps.from_torch(getattr(OPTIM, name), lr=cosine, **settings)
    with pytest.raises(ValueError, match=r"schedule.*no step count.*applied=scheduler.last_epoch"):
        optimizer.from_state_dict(theirs.state_dict(), params)
    of_a_group = ps.from_torch(
        getattr(OPTIM, name), lr=0.1, overrides={"w": {"lr": cosine}}, **settings
    )
    with pytest.raises(ValueError, match="no step count"):
        of_a_group.from_state_dict(theirs.state_dict(), params)


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize(("name", "settings"), [*COUNTLESS, ("AdamW", {}), ("ASGD", {})])
def test_a_schedule_goes_on_from_the_count_that_is_told(name, settings, as_tensor):
    params, theirs, scheduler = migrated(name, settings)
    optimizer = ps.from_torch(getattr(OPTIM, name), lr=cosine, **settings)
    applied = torch.tensor(scheduler.last_epoch) if as_tensor else scheduler.last_epoch
    state = optimizer.from_state_dict(theirs.state_dict(), params, applied=applied)
    assert same_bits(state.applied, torch.tensor(5))
    stepped, _ = optimizer.step(params, {"w": torch.ones(2, 3)}, state)
    (weight,) = theirs.param_groups[0]["params"]
    theirs.step()
    torch.testing.assert_close(stepped["w"], weight.detach())


def test_a_count_that_is_told_goes_before_that_of_the_state_dict():
    params, theirs, _ = migrated("AdamW", {})
    optimizer = ps.from_torch(OPTIM.AdamW, lr=cosine)
    assert optimizer.from_state_dict(theirs.state_dict(), params).applied == 5
    state = optimizer.from_state_dict(theirs.state_dict(), params, applied=2**31 - 1)
    assert state.applied == 2**31 - 1
    assert state.slots["w"]["step"] == 5


@pytest.mark.parametrize("applied", [-1, 0.5, True, "five", torch.ones(2)])
def test_a_count_that_is_none_is_refused(applied):
    params, theirs, _ = migrated("SGD", {})
    with pytest.raises((TypeError, ValueError), match="applied"):
        ps.from_torch(OPTIM.SGD).from_state_dict(theirs.state_dict(), params, applied=applied)


def test_without_a_schedule_no_count_is_asked_for():
    params, theirs, _ = migrated("SGD", {"momentum": 0.9})
    sgd = ps.from_torch(OPTIM.SGD, momentum=0.9, lr_in_state=True)
    state = sgd.from_state_dict(theirs.state_dict(), params)
    assert same_bits(state.lr, torch.tensor(theirs.param_groups[0]["lr"]))


def test_the_rate_of_a_state_is_that_of_the_groups_that_take_it():
    params = {"a": torch.ones(1), "b": torch.ones(1)}
    groups = [{"params": [params["a"]], "lr": 0.25}, {"params": [params["b"]], "lr": 0.5}]
    sd = OPTIM.SGD(groups).state_dict()
    own = ps.from_torch(OPTIM.SGD, lr_in_state=True, overrides={"a": {"lr": 0.25}, "b": {}})
    assert own.from_state_dict(sd, params).lr == 0.5
    one = ps.from_torch(OPTIM.SGD, lr_in_state=True, overrides={"b": {"momentum": 0.0}})
    with pytest.raises(ValueError, match=r"the rates \[0.25, 0.5\] in groups.*Fix: `overrides"):
        one.from_state_dict(sd, params)


# ---- states that do not fit


def test_no_kernel_is_called_with_a_slot_that_is_not_its_parameters():
    """In a process of its own: torch's kernels would write past the end of what is too short."""
    program = """
import itertools, torch, purescale as ps
wrong = {
    "0-d": lambda t: torch.tensor(1.0),
    "short": lambda t: torch.zeros(2),
    "long": lambda t: torch.zeros(t.numel() + 1),
    "reshaped": lambda t: torch.zeros(2, t.numel() // 2),
    "double": lambda t: t.double(),
    "half": lambda t: t.half(),
    "complex": lambda t: t.to(torch.complex64),
    "meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
}
counts = {
    "1-d": lambda t: t.reshape(1),
    "long": lambda t: torch.ones(8),
    "double": lambda t: t.double(),
    "meta": lambda t: t.to("meta"),
}
O = torch.optim
refused = 0
classes = {O.AdamW: {"amsgrad": True}, O.SGD: {"momentum": 0.9}}
classes |= {cls: {} for cls in (O.Adam, O.Adagrad, O.RMSprop, O.NAdam)}
calls = ("maybe_step", "unscale_and_step", "step")
for cls, settings in classes.items():
    optimizer, params = ps.from_torch(cls, **settings), {"s": torch.ones(8)}
    for key, slot in optimizer.init(params).slots["s"].items():
        spoilt = (wrong if slot.ndim else counts).items()
        for (kind, spoil), donate, call in itertools.product(spoilt, (False, True), calls):
            state = optimizer.init(params)
            state.slots["s"][key] = spoil(slot)
            grads = {"s": torch.ones(8)}
            try:
                if call == "step":
                    optimizer.step(params, grads, state)
                elif call == "maybe_step":
                    ps.maybe_step(optimizer, params, grads, state, False, donate=donate)
                else:
                    scaler = ps.NoScale().init()
                    ps.unscale_and_step(optimizer, scaler, params, grads, state, donate=donate)
            except ValueError as error:
                assert f"opt_state: {key} of s is" in str(error), error
                refused += 1
            else:
                taken = f"{key} {kind} was taken by {call}, donate={donate}"
                raise SystemExit(f"{cls.__name__}: {taken}")
assert params["s"].tolist() == [1.0] * 8
print("refused", refused)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[-1]) > 300


def test_the_state_of_a_0_d_parameter_is_not_that_of_a_longer_one():
    adamw = ps.from_torch(OPTIM.AdamW)
    state = adamw.init({"s": torch.tensor(1.0)})
    with pytest.raises(
        ValueError, match=r"exp_avg of s is torch.float32 \(\), the parameter torch.float32 \(8,\)"
    ):
        ps.maybe_step(adamw, {"s": torch.ones(8)}, {"s": torch.ones(8)}, state, False, donate=True)
