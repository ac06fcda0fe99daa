"""The types that an editor sees: a tree comes back as the type that went in."""

import re
import subprocess
import sys

import pytest

PROGRAM = """
from typing import Any, assert_type
import torch
from torch import Tensor
import purescale as ps
from purescale import OptState, ScalerState, TrainState

class Net(dict[str, Tensor]): ...

weights: Net
tree: dict[str, list[Tensor]]
flag: Tensor
rule = ps.DynamicScale()
scaler = rule.init()
adamw = ps.from_torch(torch.optim.AdamW, lr=1e-3)
state = ps.init_train_state(weights, {}, adamw, rule)
stepped = ps.unscale_and_step(adamw, scaler, weights, weights, adamw.init(weights))

def loss_fn(params: Net, buffers: Any, x: Tensor) -> tuple[Tensor, Any]:
    return (params["w"] * x).sum(), buffers

state, info = ps.train_step(state, [flag], loss_fn=loss_fn, optimizer=adamw, rule=rule)

def log(state: ps.TrainState, info: ps.StepInfo, stepped: ps.Stepped) -> None:
    print(float(info.grad_norm), info.grad_norm > 1.0, stepped.grad_norm.item(), info.aux[0])
    print(state.scaler.scale, state.params["w"], state.guard)

log(state, info, stepped)
"""
CALLS = {
    "rule.init()": "ScalerState",
    "rule.update(scaler, flag)": "ScalerState",
    "ps.scale_loss(scaler, [flag])": "list[Tensor]",
    "ps.unscale_and_check(scaler, tree)": "tuple[dict[str, list[Tensor]], Tensor]",
    "ps.clip_by_global_norm(weights, 1.0)": "tuple[Net, Tensor]",
    "ps.maybe_step(adamw, weights, weights, adamw.init(weights), flag)": "tuple[Net, OptState]",
    "ps.wanted_update(adamw, weights, weights, adamw.init(weights))": "Net",
    "ps.stochastic_round(weights, torch.bfloat16, seed=0)": "Net",
    "ps.select(flag, weights, weights)": "Net",
    "ps.stack_states([state, state])": "TrainState[Net, ScalerState]",
    "ps.ema(weights, weights, 0.9)": "Net",
    "ps.from_state_dict({}, like=state)": "TrainState[Net, ScalerState]",
    "ps.replace_settings(state, lr=0.1)": "TrainState[Net, ScalerState]",
    "ps.accumulated_grads(ps.init_accum(weights))": "tuple[Any, Tensor]",
    "state.scaler": "ScalerState",
    "ps.init_train_state(weights, {}, adamw, ps.HeadroomScale()).scaler": "ps.HeadroomState",
    "rule.update(state.scaler, info.found_inf)": "ScalerState",
    "info.loss": "Tensor",
    "stepped.opt_state": "OptState",
}
# What an editor completes is what there is.
WRONG = {
    "info.grad_norm.itme()": "itme",
    "stepped.grad_norm.itme()": "itme",
    "state.params.weight": "weight",
    "state.scaler.loss_scale": "loss_scale",
    "info.skipped": "skipped",
    "ps.GradScaler": "GradScaler",
    "ps.train_step(state, [flag], loss_fn=loss_fn, optimizer=adamw, rule=rule, max_nrom=1.0)": (
        "max_nrom"
    ),
}


@pytest.fixture(scope="module")
def complaints(tmp_path_factory):
    """Return the error that mypy gives for each call, or None, by call."""
    program = tmp_path_factory.mktemp("types") / "program.py"
    lines = [f"assert_type({call}, {kind})\n" for call, kind in CALLS.items()]
    program.write_text(PROGRAM + "".join([*lines, *(f"{line}\n" for line in WRONG)]))
    command = [sys.executable, "-m", "mypy", "--no-incremental", str(program)]
    found = subprocess.run(command, capture_output=True, text=True)
    first = PROGRAM.count("\n") + 1
    errors = dict(re.findall(r"program\.py:(\d+): error: (.*)", found.stdout))
    assert re.search(r"^(Success|Found \d+ errors? in 1 file)", found.stdout, re.M), found
    assert all(int(line) >= first for line in errors), found.stdout
    return {call: errors.get(str(first + index)) for index, call in enumerate([*CALLS, *WRONG])}


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_a_tree_comes_back_as_the_type_that_went_in(call, complaints):
    assert complaints[call] is None


@pytest.mark.slow
@pytest.mark.parametrize("line", WRONG)
def test_a_name_that_there_is_not_is_an_error(line, complaints):
    assert f'"{WRONG[line]}"' in str(complaints[line])
