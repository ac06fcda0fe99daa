"""What `help` says of the fields of a public NamedTuple, against what they hold."""

import importlib
import pkgutil
import pydoc
import re

import pytest
import torch
from torch import Tensor

import purescale as ps
from purescale import interop


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
