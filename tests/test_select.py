"""select: the old tree if a step is skipped, else the new one."""

import hypothesis.strategies as st
import pytest
import torch
import torch.utils._pytree as pytree
from helpers import (
    Untouched,
    any32,
    same_bits,
    shares_memory,
    trees,
)
from hypothesis import given

import purescale as ps


@given(trees(any32), st.booleans())
def test_select_takes_one_tree_whole(tree, bad):
    other = pytree.tree_map(lambda t: None if t is None else t + 1, tree)
    with Untouched((tree, other)):
        picked = ps.select(torch.tensor(bad), tree, other)
    assert same_bits(picked, tree if bad else other)
    assert not shares_memory((tree, other), picked)


def test_select_under_vmap_equals_a_loop():
    picked = torch.vmap(ps.select)(
        torch.tensor([True, False]),
        {"a": torch.tensor([1.0, 2.0])},
        {"a": torch.tensor([3.0, 4.0])},
    )
    assert picked["a"].tolist() == [1, 4]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            {"a": torch.ones(1)},
            {"b": torch.ones(1)},
            r"new does not match old: missing \['a'\]; not in old: \['b'\]",
        ),
        (
            {"a": torch.ones(1)},
            {"a": torch.ones(2)},
            r"old\['a'\] is torch.float32 \(1,\), but torch.float32 \(2,\) in new",
        ),
        ({"a": torch.ones(1)}, {"a": torch.ones(1).half()}, r"torch.float16 \(1,\) in new"),
        ({"a": 1}, {"a": 2}, r"old\['a'\] is 1, but 2 in new"),
        ({"a": torch.ones(1)}, {"a": None}, r"old\['a'\] is .*, but None in new"),
    ],
)
def test_select_refuses_trees_that_differ(old, new, message):
    with pytest.raises(ValueError, match=message):
        ps.select(torch.tensor(True), old, new)


def test_one_flag_decides_so_it_is_0d():
    with pytest.raises(ValueError, match="one flag decides"):
        ps.select(torch.tensor([True]), torch.ones(1), torch.ones(1))
    with pytest.raises(TypeError, match="found_inf must be a 0-d bool tensor"):
        ps.select(None, torch.ones(1), torch.ones(1))


@pytest.mark.parametrize("flag", [True, False, torch.tensor(True)])
@given(old=trees(any32))
def test_a_flag_that_comes_last_is_refused_with_the_order(flag, old):
    with pytest.raises(TypeError, match=r"Fix: `select\(found_inf, old, new\)`"):
        ps.select(old, old, flag)


@pytest.mark.parametrize("bad", [True, False])
def test_a_flag_may_be_selected_by_a_flag(bad):
    old, new = torch.tensor(False), torch.tensor(True)
    assert ps.select(torch.tensor(bad), old, new).item() is not bad
