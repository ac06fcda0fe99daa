"""Wrong names: the words of Python, and the cure where the name is known from elsewhere."""

import copy
import inspect
import pickle
import re
import types
from collections import namedtuple

import hypothesis.strategies as st
import pytest
import torch
from helpers import same_bits, tensors
from hypothesis import given

import purescale as ps
from purescale._tree.hints import HINTS

INFO = ps.StepInfo(torch.ones(()), torch.tensor(False), torch.ones(()), (), (), torch.zeros(()), ())
STATE = ps.init_train_state({"w": torch.ones(2)}, {}, ps.from_torch(torch.optim.SGD), ps.NoScale())
OWNERS = {"purescale": ps, "StepInfo": INFO, "TrainState": STATE}
FUNCTIONS = {name: getattr(ps, name) for name in HINTS if name not in OWNERS}
KEYWORDS = [(name, keyword) for name in FUNCTIONS for keyword in HINTS[name]]
TAKES_SETTINGS = {"from_torch"}  # whose other keywords are those of a class
ATTRIBUTES = [(owner, name) for owner in OWNERS for name in HINTS[owner]]


def test_names_that_newcomers_tried_are_known():
    assert {"max_grad_norm", "clip_grad_norm", "has_aux"} <= HINTS["train_step"].keys()
    assert {"max_grad_norm", "clip_grad_norm"} <= HINTS["unscale_and_step"].keys()
    assert {"GradScaler", "autocast", "clip_grad_norm_"} <= HINTS["purescale"].keys()
    assert {"clip_grad_norm", "EMA", "scan", "state_dict", "Adam", "copy"} <= HINTS[
        "purescale"
    ].keys()
    assert {"to", "state_dict", "copy"} <= HINTS["TrainState"].keys()
    assert {"skipped", "lr"} <= HINTS["StepInfo"].keys()


@pytest.mark.parametrize(("function", "keyword"), KEYWORDS)
def test_a_keyword_of_another_library_is_refused_with_its_cure(function, keyword):
    words = rf"^{function}\(\) got an unexpected keyword argument '{keyword}', .* Fix: .*\.$"
    with pytest.raises(TypeError, match=words):
        FUNCTIONS[function](**{keyword: 1.0})


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in TAKES_SETTINGS])
def test_any_other_keyword_is_refused_in_the_words_of_python(name):
    def plain():
        pass

    plain.__name__ = plain.__qualname__ = name
    with pytest.raises(TypeError) as expected:
        plain(max_nrom=1.0)
    with pytest.raises(TypeError) as refused:
        FUNCTIONS[name](max_nrom=1.0)
    # Python 3.13 adds a name that is like it, which `plain` does not have.
    assert str(refused.value).partition(". Did you mean")[0] == str(expected.value)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_hints_leave_a_function_what_it_is(name):
    function = FUNCTIONS[name]
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    assert takes_any is (name in TAKES_SETTINGS)
    assert not parameters.keys() & HINTS[name].keys()
    assert pickle.loads(pickle.dumps(function)) is function
    assert function.__name__ == function.__qualname__ == name
    assert ">>>" in function.__doc__


@pytest.mark.parametrize(("owner", "name"), ATTRIBUTES)
def test_an_attribute_of_another_library_is_refused_with_its_cure(owner, name, monkeypatch):
    monkeypatch.delattr(ps, "testing", raising=False)
    assert not hasattr(OWNERS[owner], name)
    with pytest.raises(AttributeError, match=rf"has no attribute '{name}'\. Fix: .*\.$"):
        getattr(OWNERS[owner], name)


@given(name=st.from_regex(r"[a-z_]{1,12}", fullmatch=True))
@pytest.mark.parametrize("owner", OWNERS)
def test_any_other_attribute_is_the_error_of_python(owner, name):
    thing = OWNERS[owner]
    plain = types.ModuleType("purescale") if thing is ps else namedtuple(owner, "")()
    if hasattr(thing, name) or hasattr(plain, name) or name in HINTS[owner]:
        return
    with pytest.raises(AttributeError) as expected:
        getattr(plain, name)
    with pytest.raises(AttributeError) as refused:
        getattr(thing, name)
    assert str(refused.value) == str(expected.value)
    assert (refused.value.name, refused.value.obj) == (name, thing)


@pytest.mark.parametrize("hints", HINTS.values(), ids=HINTS)
def test_a_cure_names_what_there_is(hints):
    for cure in hints.values():
        for name in re.findall(r"purescale\.(\w+)", cure):
            assert name in (*ps.__all__, "testing")


def test_the_cure_for_a_state_moves_it():
    move = re.search(r"`(torch\.utils\..*)`$", HINTS["TrainState"]["to"]).group(1)
    moved = eval(move, {"torch": torch, "state": STATE, "device": "meta"})
    assert type(moved) is ps.TrainState
    assert {leaf.device.type for leaf in tensors(moved)} == {"meta"}


def test_a_state_is_read_in_a_compiled_function():
    read = torch.compile(
        lambda state: (state.params["w"] + state.step, hasattr(state, "to")),
        fullgraph=True,
        backend="eager",
    )
    weights, has = read(STATE)
    assert (weights.tolist(), has) == ([1.0, 1.0], False)


@pytest.mark.parametrize("record", [INFO, STATE], ids=["StepInfo", "TrainState"])
def test_a_record_is_copied_and_pickled(record):
    for other in (copy.copy(record), copy.deepcopy(record), pickle.loads(pickle.dumps(record))):
        assert type(other) is type(record)
        assert same_bits(other, record)


def test_a_report_is_read_in_a_compiled_function():
    read = torch.compile(
        lambda info: (info.loss + info.scale, getattr(info, "nothing", 7), hasattr(info, "aux")),
        fullgraph=True,
        backend="eager",
    )
    assert read(INFO) == (2.0, 7, True)
