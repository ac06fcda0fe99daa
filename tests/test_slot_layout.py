"""The slots of an optimizer: states that do not fit."""

import contextlib
import subprocess
import sys

import pytest
import torch
from helpers import Untouched
from test_torch_optim import OPTIM

import purescale as ps
from purescale._torch import tracing


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
numbers = {
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
    optimizer = ps.from_torch(cls, counts="each", **settings)
    params = {"s": torch.ones(8)}
    state = optimizer.init(params)
    for key, column in {**state.slots, "step": state.counts}.items():
        if not column:
            continue
        slot = column["s"]
        spoilt = (wrong if slot.ndim else numbers).items()
        for (kind, spoil), donate, call in itertools.product(spoilt, (False, True), calls):
            state = optimizer.init(params)
            {**state.slots, "step": state.counts}[key]["s"] = spoil(slot)
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
        ValueError,
        match=r"exp_avg of s is torch.float32 \(\) on cpu; expected torch.float32 \(8,\)",
    ):
        ps.maybe_step(adamw, {"s": torch.ones(8)}, {"s": torch.ones(8)}, state, False, donate=True)


def in_a_partition(optimizer):
    sgd = ps.from_torch(OPTIM.SGD, lr=0.1, momentum=0.9)
    return ps.partition(
        {"sgd": sgd, "own": optimizer}, lambda name, _: "own" if "b" in name else "sgd"
    )


def columns_of(state):
    return (
        columns_of(state["own"])
        if isinstance(state, dict)
        else getattr(state, "inner", state).slots
    )


AROUND = {
    "alone": lambda optimizer: optimizer,
    "in a partition": in_a_partition,
    "under masters": ps.with_master_weights,
}


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", ["AdamW", "Adagrad", "RMSprop", "NAdam", "Rprop", "Adafactor"])
def test_a_step_whose_state_lacks_a_slot_changes_nothing(name, around, forced):
    """Also if the slot is that of a later group, part or piece."""
    settings = {"lr": 0.1, "overrides": {"last b": {"lr": 0.01}}}
    optimizer = AROUND[around](ps.from_torch(getattr(OPTIM, name), **settings))
    shapes = {"first": (5,), "b": (33,), "last b": (3, 11)}
    params = {key: torch.ones(shape, dtype=torch.bfloat16) for key, shape in shapes.items()}
    if around != "under masters":
        params = {key: leaf.float() for key, leaf in params.items()}
    state = optimizer.init(params)
    columns = columns_of(state)
    missing = [key for key, column in columns.items() if column["last b"] != ()][-1]
    columns[missing]["last b"] = ()
    grads = {name: torch.ones_like(p) for name, p in params.items()}
    mode = tracing.as_on_an_accelerator() if forced else contextlib.nullcontext()
    with mode, Untouched((params, state)), pytest.raises(ValueError, match=f"has no {missing}"):
        ps.maybe_step(optimizer, params, grads, state, torch.tensor(False), donate=True)


def test_dampening_begins_within_a_run_as_in_torchs():
    """The first step is that of the optimizer without it."""
    weight, grads = torch.randn(33), [torch.randn(33) for _ in range(4)]
    theirs = weight.clone().requires_grad_()
    sgd = torch.optim.SGD([theirs], lr=0.1, momentum=0.5)
    optimizer = ps.from_torch(torch.optim.SGD, lr=0.1, momentum=0.5)
    params, state = {"w": weight}, optimizer.init({"w": weight})
    for step, grad in enumerate(grads):
        if step == 2:
            sgd.param_groups[0]["dampening"] = 0.25
            optimizer = ps.from_torch(torch.optim.SGD, lr=0.1, momentum=0.5, dampening=0.25)
        theirs.grad = grad
        sgd.step()
        params, state = optimizer.step(params, {"w": grad}, state)
    torch.testing.assert_close(params["w"], theirs.detach(), rtol=1e-6, atol=1e-6)
