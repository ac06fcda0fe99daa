"""Kept states: what comes back, and that nothing is left in the folder."""

import functools
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import purescale as ps
from purescale._runs.kept_states import KeptStates, Moment, steps_to_keep
from purescale.testing import same_bits


def moment(value):
    state = {"x": torch.full((33,), value), "count": torch.tensor(3), "none": None}
    return Moment(state, [torch.get_rng_state()])


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_moment_comes_back_with_its_bits_though_its_tensors_were_overwritten(on_disk, tmp_path):
    kept = [moment(float(index)) for index in range(3)]
    expected = [moment(float(index)) for index in range(3)]
    states = KeptStates(str(tmp_path) if on_disk else None, kept[0])
    for index, each in enumerate(kept):
        states.keep(index, each)
        each.state["x"].zero_()
    for index in (2, 0, 1):
        assert same_bits(states.pop(index).state, expected[index].state)


def test_nothing_is_left_in_the_folder_after_an_error(tmp_path):
    def fail(state):
        assert len(list(tmp_path.glob("*/*.pt"))) == 1
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk"):
        ps.vjp_through(lambda x, _: (x * 2, ()), torch.ones(2), [0], fail, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


@given(number=st.integers(1, 30), every=st.none() | st.integers(1, 40), in_a_folder=st.booleans())
def test_segments_of_one_length_make_each_step_again_at_most_once(
    tmp_path_factory, number, every, in_a_folder
):
    calls = Counter()

    def step(x, index):
        calls[index, x.requires_grad] += 1
        return x * 2, ()

    folder = tmp_path_factory.getbasetemp() if in_a_folder or not every else None
    ps.vjp_through(step, torch.ones(2), range(number), torch.sum, every=every, folder=folder)
    assert all(calls[index, True] == 1 for index in range(number))
    assert all(calls[index, False] <= 2 for index in range(number - 1))
    assert calls[number - 1, False] == 2  # the last one, to be compared
    assert folder is None or not list(folder.glob("vjp_through_*"))


@functools.cache
def fewest(number, slots):
    """How often steps are made on the way back: the minimum over all choices of the second one."""
    if slots == 1:
        return number * (number - 1) // 2
    ways = (n + fewest(number - n, slots - 1) + fewest(n, slots) for n in range(1, number))
    return min(ways, default=0)


def made(number, slots):
    steps = steps_to_keep(0, number, slots)
    assert len(steps) <= slots
    assert steps[0] == 0
    assert steps == sorted(set(steps))
    if len(steps) == 1:
        return number * (number - 1) // 2
    n = steps[1]
    assert steps[1:] == steps_to_keep(n, number, slots - 1)
    return n + made(number - n, slots - 1) + made(n, slots)


@given(number=st.integers(1, 60), slots=st.integers(1, 12))
def test_no_other_choice_of_kept_states_makes_fewer_steps_again(number, slots):
    assert made(number, slots) == fewest(number, slots)
