"""Kept states: what comes back, and that nothing is left in the folder."""

import pytest
import torch

import purescale as ps
from purescale._runs.kept_states import Generators, KeptStates, Moment
from purescale.testing import same_bits


def moment(value):
    state = {"x": torch.full((33,), value), "count": torch.tensor(3), "none": None}
    return Moment(state, Generators(torch.device("cpu")).states())


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_moment_comes_back_with_its_bits_though_its_tensors_were_overwritten(on_disk, tmp_path):
    kept = [moment(float(index)) for index in range(3)]
    expected = [moment(float(index)) for index in range(3)]
    with KeptStates(tmp_path if on_disk else None, kept[0]) as states:
        for index, each in enumerate(kept):
            states.keep(index, each)
            each.state["x"].zero_()
        for index in (2, 0, 1):
            assert same_bits(states.pop(index).state, expected[index].state)


def test_nothing_is_left_in_the_folder_after_an_error(tmp_path):
    def fail():
        with KeptStates(tmp_path, moment(0.0)) as states:
            states.keep(0, moment(1.0))
            assert len(list(tmp_path.iterdir())) == 1
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_generators_draw_the_same_numbers_after_they_are_restored():
    generators = Generators(torch.device("cpu"))
    before = generators.states()
    first = torch.rand(5)
    generators.restore(before)
    assert torch.equal(torch.rand(5), first)


def test_generators_are_restored_after_an_error():
    before = torch.get_rng_state()

    def draw_and_fail():
        with Generators(torch.device("cpu")):
            torch.rand(5)
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk"):
        draw_and_fail()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_in_a_folder_leaves_no_file(tmp_path):
    ps.vjp_through(lambda x, i: (x * i, ()), torch.ones(2), [2.0] * 5, torch.sum, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []
