"""What a user is told: of a wrong name the words of Python and the cure where the name is known
from elsewhere; of a field of a public NamedTuple what `help` says, against what it holds.
"""

import copy
import importlib
import inspect
import io
import itertools
import pickle
import pkgutil
import pydoc
import re
import sys
import types
from collections import namedtuple

import pytest
import torch
from helpers import same_bits, tensors
from torch import Tensor

import purescale as ps
from purescale import interop
from purescale._tree.hints import HINTS
from purescale._tree.progress import progress_bar

INFO = ps.StepInfo(torch.ones(()), torch.tensor(False), torch.ones(()), (), (), torch.zeros(()), ())
STATE = ps.init_train_state({"w": torch.ones(2)}, {}, ps.from_torch(torch.optim.SGD), ps.NoScale())
OWNERS = {"purescale": ps, "StepInfo": INFO, "TrainState": STATE}
FUNCTIONS = {name: getattr(ps, name) for name in HINTS if name not in OWNERS}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_keyword_of_another_library_is_refused_with_its_cure_and_another_as_by_python(name):
    function = FUNCTIONS[name]
    for keyword in HINTS[name]:
        words = rf"^{name}\(\) got an unexpected keyword argument '{keyword}', .* Fix: .*\.$"
        with pytest.raises(TypeError, match=words):
            function(**{keyword: 1.0})
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected .* 'max_nrom'"):
        function(max_nrom=1.0)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_hints_leave_a_function_what_it_is(name):
    function = FUNCTIONS[name]
    assert not inspect.signature(function).parameters.keys() & HINTS[name].keys()
    assert pickle.loads(pickle.dumps(function)) is function
    assert function.__name__ == function.__qualname__ == name
    assert ">>>" in function.__doc__


@pytest.mark.parametrize("owner", OWNERS)
def test_an_attribute_of_another_library_is_refused_with_its_cure(owner, monkeypatch):
    monkeypatch.delattr(ps, "testing", raising=False)
    for name in HINTS[owner]:
        with pytest.raises(AttributeError, match=rf"has no attribute '{name}'\. Fix: .*\.$"):
            getattr(OWNERS[owner], name)


@pytest.mark.parametrize("owner", OWNERS)
def test_any_other_attribute_is_the_error_of_python(owner):
    thing = OWNERS[owner]
    plain = types.ModuleType("purescale") if thing is ps else namedtuple(owner, "")()
    with pytest.raises(AttributeError) as expected:
        plain.nothing  # noqa: B018
    with pytest.raises(AttributeError) as refused:
        thing.nothing  # noqa: B018
    assert str(refused.value) == str(expected.value)
    assert (refused.value.name, refused.value.obj) == ("nothing", thing)


def test_a_cure_names_what_there_is():
    cures = [cure for hints in HINTS.values() for cure in hints.values()]
    named = {name for cure in cures for name in re.findall(r"purescale\.(\w+)", cure)}
    assert named <= {*ps.__all__, "testing"}


def test_the_cure_for_a_state_moves_it():
    move = re.search(r"`(torch\.utils\..*)`$", HINTS["TrainState"]["to"]).group(1)
    moved = eval(move, {"torch": torch, "state": STATE, "device": "meta"})
    assert type(moved) is ps.TrainState
    assert {leaf.device.type for leaf in tensors(moved)} == {"meta"}


def test_state_and_report_are_read_in_a_compiled_function():
    def read(state, info):
        has = hasattr(state, "to"), hasattr(info, "aux"), getattr(info, "nothing", 7)
        return state.params["w"] + state.step, info.loss + info.scale, has

    weights, loss, has = torch.compile(read, fullgraph=True, backend="eager")(STATE, INFO)
    assert (weights.tolist(), loss, has) == ([1.0, 1.0], 2.0, (False, True, 7))


@pytest.mark.parametrize("record", [INFO, STATE], ids=["StepInfo", "TrainState"])
def test_a_record_is_copied_and_pickled(record):
    for other in (copy.copy(record), copy.deepcopy(record), pickle.loads(pickle.dumps(record))):
        assert type(other) is type(record)
        assert same_bits(other, record)


# ---- fields --------------------------------------------------------------------------------------


def public_namedtuples():
    names = [name for _, name, _ in pkgutil.walk_packages(ps.__path__, "purescale.")]
    modules = [importlib.import_module(name) for name in names if "._" not in name]
    things = [getattr(ps, name) for name in (*ps.__all__, *ps.types.__all__)]
    things += [
        thing
        for module in modules
        for thing in vars(module).values()
        if getattr(thing, "__module__", "") == module.__name__
    ]
    return {
        thing.__name__: thing
        for thing in things
        if isinstance(thing, type) and issubclass(thing, tuple) and thing.__name__[0] != "_"
    }


CLASSES = public_namedtuples()


def a_step(dtype):
    """A step with everything that a report can have, and the parts of the same step by hand."""
    guard, rule = ps.SpikeGuard(), ps.HeadroomScale()
    optimizer = ps.from_torch(
        torch.optim.AdamW, lr=0.1, in_state=("lr", "weight_decay"), schedule_by="iteration"
    )
    rng = torch.Generator().manual_seed(0).get_state()
    params = {"w": torch.ones(5, dtype=dtype)}
    state = ps.init_train_state(params, {}, optimizer, rule, rng=rng, guard=guard)
    state, info = ps.train_step(
        state,
        [torch.ones(5), torch.zeros(5)],
        loss_fn=lambda p, b, x: ((p["w"] * x).sum(), b, x.sum()),
        optimizer=optimizer,
        rule=rule,
        max_norm=1.0,
        guard=guard,
    )
    stepped = ps.unscale_and_step(
        optimizer, state.scaler, state.params, params, state.opt_state, 1.0, amax=True
    )
    return [state, info, stepped, state.opt_state, state.scaler, state.guard, state.guard.loss]


OTHERS = [
    ps.DynamicScale().init(),
    ps.init_accum({"w": torch.ones(5)}),
    ps.accumulation_window(0, every=2),
    ps.init_bn_stats({"n.running_mean": torch.ones(5), "n.running_var": torch.ones(5)}),
    ps.init_bn_stats({"n.running_mean": torch.ones(5), "n.running_var": torch.ones(5)}).layers["n"],
    interop.deepspeed.rule().init(),
    interop.fairseq.rule().init(),
    ps.grad_report({"w": torch.ones(5)}).rows["w"],
    ps.update_report({"w": torch.ones(5)}, {"w": torch.ones(5)}, {"w": torch.ones(5)}).rows["w"],
]


@pytest.mark.parametrize("name", CLASSES)
def test_each_field_is_described_in_the_docstring_and_in_help(name):
    cls = CLASSES[name]
    for field in cls._fields:
        text = getattr(cls, field).__doc__
        assert text.endswith(".")
        assert not text.startswith("Alias")
        assert f"{field}: {text[:20]}" in cls.__doc__
    assert "Alias for" not in pydoc.plain(pydoc.render_doc(cls))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_and_rank_of_a_field_are_those_that_its_description_names(dtype):
    for state in [*a_step(dtype), *OTHERS]:
        for field, value in state._asdict().items():
            text = getattr(type(state), field).__doc__
            if isinstance(value, Tensor):
                dtypes = re.findall(r"\b(?:bool|u?int\d+|float\d+)\b", text.partition(". ")[0])
                assert str(value.dtype).removeprefix("torch.") in dtypes, (field, text)
                assert len(re.search(r"\[(.*?)\]", text)[1].split()) == value.ndim, (field, text)
            elif isinstance(value, bool | int):
                assert text.startswith(f"{'A bool' if isinstance(value, bool) else 'An int'}.")


def test_aux_is_a_tuple_with_one_entry_a_microbatch_as_its_description_says():
    assert "A tuple with one entry a microbatch" in ps.StepInfo.aux.__doc__
    info = a_step(torch.float32)[1]
    assert type(info.aux) is tuple
    assert [float(x) for x in info.aux] == [5.0, 0.0]


# ---- the progress bar: in a terminal, in a log, without tqdm


def test_a_bar_without_tqdm_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)  # as if it was not installed
    with pytest.raises(ImportError, match=r"Fix: `pip install '\.\[progress\]'` in a copy of the"):
        progress_bar("run", "step")


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_in_a_log_is_a_line_a_minute(terminal, monkeypatch):
    tqdm = pytest.importorskip("tqdm.std")

    class Screen(io.StringIO):
        def isatty(self):
            return terminal

    clock = itertools.count()  # a second between any two looks at it
    monkeypatch.setattr(tqdm, "time", lambda: float(next(clock)))
    monkeypatch.setattr(sys, "stderr", Screen())
    with progress_bar("run", "step", 100) as bar:
        for _ in range(100):
            bar.update()
    lines = sys.stderr.getvalue().count("run")
    assert lines > 90 if terminal else 3 <= lines < 10
    assert "run: 100%" in sys.stderr.getvalue()
