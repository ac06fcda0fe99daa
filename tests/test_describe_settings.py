"""Settings as text: equal for equal settings, whatever process they were made in, and different
for any that a step reads.
"""

import dataclasses
import functools
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from helpers import in_processes, small_net
from hypothesis import given
from test_reduce import OPTIMIZERS, RULES
from torch import nn

import purescale as ps
from purescale._distributed.describe_settings import describe_setting


class Doubling:
    def __init__(self, start):
        self.start = start

    def rate(self, applied):
        return self.start * 2**applied

    def __call__(self, applied):
        return self.rate(applied)


PAIRS = {
    **OPTIMIZERS,
    **{f"rule, {name}": pair for name, pair in RULES.items()},
    "strings": ("clean", "growth"),
    "bool and number": (True, 1),
    "None and its name": (None, "None"),
    "tensors": (torch.tensor([1.0]), torch.tensor([2.0])),
    "dtypes": (torch.float32, torch.float64),
    "keys": ({"a": 1}, {"b": 1}),
    "order of overrides": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "partials": (functools.partial(max, key=abs), functools.partial(max)),
    "names of functions": (max, min),
    "names of one's own functions": (small_net, in_processes),
    "methods": (Doubling(1).rate, Doubling(2).rate),
}


@pytest.mark.parametrize("name", PAIRS)
def test_settings_that_differ_are_told_apart(name):
    one, other = PAIRS[name]
    assert describe_setting(one) == describe_setting(one)
    assert describe_setting(one) != describe_setting(other)


def test_whole_numbers_beyond_a_float_are_told_apart():
    assert describe_setting(2**60) != describe_setting(2**60 + 1)
    assert describe_setting(10**400) == describe_setting(10**400)
    assert describe_setting(2**60) == describe_setting(2.0**60)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda items: st.lists(items, max_size=3) | st.dictionaries(st.text(), items, max_size=3),
    max_leaves=8,
)


@given(plain, plain)
def test_data_is_told_by_value(one, other):
    again = eval(repr(one), {"nan": float("nan"), "inf": float("inf")})
    assert describe_setting(again) == describe_setting(one)
    if one != other and repr(one) != repr(other):
        assert describe_setting(one) != describe_setting(other)


def test_1_and_1_0_are_one_setting_and_a_default_may_be_named():
    assert describe_setting(ps.StaticScale(8)) == describe_setting(ps.StaticScale(8.0))
    named = ps.from_torch(torch.optim.SGD, momentum=0, lr=1e-3)
    assert describe_setting(named) == describe_setting(ps.from_torch(torch.optim.SGD))
    assert describe_setting(frozenset("abc")) == describe_setting(frozenset("cba"))


PROGRAM = """
from test_describe_settings import PAIRS, describe_setting
print([describe_setting(one) for pair in PAIRS.values() for one in pair])
"""


@pytest.mark.slow
def test_every_process_says_the_same():
    """With hashes and addresses of its own."""
    told = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parent,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert told[0] == told[1]
    assert " at 0x" not in told[0]


@dataclasses.dataclass
class Unset:
    there: int = 1
    missing: int = dataclasses.field(init=False)


class Own:
    """An optimizer of a user, with what is no setting beside what is one."""

    def __init__(self, lr, name):
        self.lr, self.me = lr, self
        self.log, self.lock, self.net = logging.getLogger(name), threading.Lock(), nn.Linear(1, 1)

    def step(self, params, grads, opt_state): ...


def test_of_what_is_no_setting_the_kind_is_told():
    assert describe_setting(Own(0.1, "rank 0")) == describe_setting(Own(0.1, "rank 1"))
    assert describe_setting(Own(0.1, "rank 0")) != describe_setting(Own(0.2, "rank 0"))
    assert describe_setting(Unset()) == "Unset(there=1, missing=None)"
    assert describe_setting(torch.zeros(1000)) == "torch.float32 (1000,)"
    assert describe_setting(torch.zeros(2, device="meta")) == "torch.float32 (2,)"


def test_functions_are_told_by_their_qualified_name_alone():
    """Their values are told if they are the fields of an object or of a partial."""

    def schedule(start):
        return lambda applied: start * 2**applied

    assert describe_setting(schedule(1)) == describe_setting(schedule(2))
    assert describe_setting(schedule(1)) != describe_setting(lambda applied: 2**applied)
    name = (
        "test_functions_are_told_by_their_qualified_name_alone.<locals>.schedule.<locals>.<lambda>"
    )
    assert describe_setting(schedule(1)) == f"{__name__}.{name}"


def test_a_compiled_function_is_that_which_was_compiled():
    def schedule(applied):
        return 0.1 * applied

    assert describe_setting(torch.compile(schedule)) == describe_setting(schedule)
