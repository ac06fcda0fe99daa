"""What a user is told of compiling: a first call that takes long, and many graphs."""

import logging
import os
import subprocess
import sys
import time

import pytest
import torch

import purescale as ps
from purescale._jit import compile_log


def double(x):
    return 2 * x


def messages(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "purescale"]


def test_a_first_call_that_takes_long_says_so_once_and_later_calls_nothing(monkeypatch, caplog):
    monkeypatch.setattr(compile_log, "SECONDS", 0.05)

    def slow(x):
        time.sleep(0.2)
        return 2 * x

    jitted = ps.jit(slow, backend="aot_eager")
    for _ in range(2):
        assert torch.equal(jitted(torch.ones(3)), torch.full((3,), 2.0))
    (message,) = messages(caplog)
    assert "slow): tracing for more than 0.05 seconds" in message
    assert "TORCHINDUCTOR_VEC_ISA_OK=1 skips" in message


@pytest.mark.slow
def test_the_variable_that_it_names_is_one_of_torch():
    code = "from torch._inductor.cpu_vec_isa import VecAVX2; print(bool(VecAVX2()))"
    # With a compiler that does not exist, only what is not probed is there.
    settings = {"TORCHINDUCTOR_VEC_ISA_OK": "1", "CXX": "no_such_compiler"}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True)
    assert run.stdout == "True\n", run.stderr


def test_it_names_the_number_of_operators_while_it_compiles(monkeypatch, caplog):
    monkeypatch.setattr(compile_log, "SECONDS", 0.05)
    with compile_log.SlowCall("step") as call:
        call.compiles(834)
        time.sleep(0.2)
    assert "jit(step): compiling 834 operators" in messages(caplog)[0]


def test_a_quick_first_call_says_nothing(caplog):
    ps.jit(double, backend="aot_eager")(torch.ones(3))
    assert messages(caplog) == []


@pytest.mark.parametrize("number", [8, 9, 20])
def test_the_ninth_graph_names_the_shapes_that_vary_once(number, caplog):
    jitted = ps.jit(double, backend="aot_eager")
    for size in range(1, number + 1):
        jitted(torch.ones(4, size))
    said = messages(caplog)
    assert len(said) == (number > 8)
    for message in said:
        assert "jit(double) has made 9 graphs" in message
        assert "such as (4, 1), (4, 2), (4, 3)" in message
        assert "torch.compile(loss_fn)" in message


def test_graphs_for_other_structures_are_said_to_differ_in_structure(caplog):
    jitted = ps.jit(lambda tree: tree, backend="aot_eager")
    for size in range(1, 10):
        jitted({str(index): torch.ones(2) for index in range(size)})
    assert "differ in structure" in messages(caplog)[0]


def test_one_shape_says_nothing(caplog):
    caplog.set_level(logging.DEBUG, "purescale")
    jitted = ps.jit(double, backend="aot_eager")
    for _ in range(20):
        jitted(torch.ones(4))
    assert messages(caplog) == []
