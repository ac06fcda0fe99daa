"""Plans: found for arguments that differ in values only, and by nothing else."""

import gc
import threading
import weakref

import optree
import pytest
import torch
from torch import nn

from purescale._torch import private, private_names
from purescale._tree.plans import Plans


def kept(*tensors, key="key", size=8):
    plans = Plans(size)
    plans.add(tensors, key, "plan")
    return plans


LIKE = torch.zeros(2, 3)


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(3, 2),
        torch.zeros(2, 3, 1),
        torch.zeros(3, 2).t(),
        LIKE.double(),
        LIKE.clone().requires_grad_(),
        nn.Parameter(LIKE),
        LIKE.to("meta"),
        torch.nested.nested_tensor([[1.0], [2.0]], layout=torch.jagged),
        LIKE.to_sparse(),
        None,
        0.0,
    ],
    ids=repr,
)
def test_a_plan_is_not_found_for_other_metadata(other):
    assert list(kept(LIKE).matching([LIKE + 1], "key")) == ["plan"]
    assert list(kept(LIKE).matching([other], "key")) == []


def test_a_plan_is_found_without_torchs_guard(monkeypatch):
    monkeypatch.setattr(private, "metadata_guard", private_names.guard_one_by_one, raising=False)
    assert list(kept(LIKE).matching([LIKE + 1], "key")) == ["plan"]
    assert list(kept(LIKE).matching([LIKE.double()], "key")) == []


def test_a_plan_is_found_by_an_equal_key_alone():
    structures = [optree.tree_flatten(tree)[1] for tree in ({"a": 0}, {"a": 0}, {"b": 0}, [0])]
    plans = kept(LIKE, key=(structures[0], True))
    assert list(plans.matching([LIKE], (structures[1], True))) == ["plan"]
    for key in ((structures[0], False), (structures[2], True), (structures[3], True)):
        assert list(plans.matching([LIKE], key)) == []


def test_a_key_that_cannot_be_compared_is_not_found():
    key = torch.zeros(2)  # whose truth is ambiguous
    assert list(kept(LIKE, key=key).matching([LIKE], key + 0)) == []


def test_all_plans_that_match_are_found_the_newest_first():
    plans = Plans()
    for number in range(3):
        plans.add([LIKE], "key", number)
        plans.add([LIKE.double()], "key", -number)
    assert list(plans.matching([LIKE], "key")) == [2, 1, 0]


@pytest.mark.parametrize("size", [1, 8, None])
def test_the_oldest_plan_goes_where_there_are_too_many(size):
    plans = Plans(size)
    for length in range(100):
        plans.add([torch.zeros(length)], "key", length)
    expected = list(range(99, 99 - (size or 100), -1))
    assert list(plans) == expected
    assert len(plans) == len(expected)
    for length in (0, 99):
        present = [length] if length in expected else []
        assert list(plans.matching([torch.zeros(length)], "key")) == present


def test_a_plan_that_is_discarded_is_found_no_more():
    plans = kept(LIKE)
    plans.add([LIKE], "key", "other")
    plans.discard("other")
    assert list(plans.matching([LIKE], "key")) == ["plan"]
    assert len(plans) == 1


def test_plans_keep_no_tensor_alive():
    tensor = torch.zeros(3)
    plans, alive = kept(tensor), weakref.ref(tensor)
    list(plans.matching([tensor], "key"))
    del tensor
    gc.collect()
    assert alive() is None


def test_threads_that_add_and_look_find_whole_plans():
    plans = Plans(4)

    def work(length):
        for _ in range(200):
            plans.add([torch.zeros(length)], "key", length)
            assert set(plans.matching([torch.zeros(length)], "key")) <= {length}

    threads = [threading.Thread(target=work, args=(length,)) for length in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1 <= len(plans) <= 4
