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
"""
CALLS = {
    "rule.init()": "ScalerState",
    "rule.update(scaler, flag)": "ScalerState",
    "ps.scale_loss(scaler, flag)": "Tensor",
    "ps.scale_loss(scaler, [flag])": "list[Tensor]",
    "ps.unscale_and_check(scaler, tree)": "tuple[dict[str, list[Tensor]], Tensor]",
    "ps.clip_by_global_norm(weights, 1.0)": "tuple[Net, Tensor]",
    "ps.clip_by_value(weights, 1.0)": "Net",
    "ps.all_reduce_grads(weights)": "Net",
    "ps.maybe_step(adamw, weights, weights, adamw.init(weights), flag)": "tuple[Net, OptState]",
    "ps.wanted_update(adamw, weights, weights, adamw.init(weights))": "Net",
    "ps.split_masters(weights)": "tuple[Net, Net]",
    "ps.join_masters(weights, weights)": "Net",
    "ps.stochastic_round(weights, torch.bfloat16, seed=0)": "Net",
    "ps.select(flag, weights, weights)": "Net",
    "ps.stack_states([state, state])": "TrainState",
    "ps.member(state, 0)": "TrainState",
    "ps.ema(weights, weights, 0.9)": "Net",
    "ps.from_state_dict({}, like=state)": "TrainState",
    "ps.load('run.pt', like=state)": "TrainState",
    "ps.replace_settings(state, lr=0.1)": "TrainState",
    "ps.accumulated_grads(ps.init_accum(weights))": "tuple[Any, Tensor]",
    "ps.check_scaler(scaler, rule)": "None",
}


@pytest.fixture(scope="module")
def complaints(tmp_path_factory):
    """Return the error that mypy gives for each call, or None, by call."""
    program = tmp_path_factory.mktemp("types") / "program.py"
    lines = [f"assert_type({call}, {kind})\n" for call, kind in CALLS.items()]
    program.write_text(PROGRAM + "".join(lines))
    command = [sys.executable, "-m", "mypy", "--no-incremental", str(program)]
    found = subprocess.run(command, capture_output=True, text=True)
    first = PROGRAM.count("\n") + 1
    errors = dict(re.findall(r"program\.py:(\d+): error: (.*)", found.stdout))
    assert re.search(r"^(Success|Found \d+ errors? in 1 file)", found.stdout, re.M), found
    assert all(int(line) >= first for line in errors), found.stdout
    return {call: errors.get(str(first + index)) for index, call in enumerate(CALLS)}


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_a_tree_comes_back_as_the_type_that_went_in(call, complaints):
    assert complaints[call] is None
