"""`grad_report`: the facts of each leaf, and what it takes to find them."""

import math
import sys

import pytest
import torch
from helpers import Dispatched, Untouched, any32, same_bits, stack, trees, unstack
from hypothesis import given

import purescale as ps
from purescale._tree import pytree as _tree
from purescale.testing import assert_sync_free

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
nan, inf = math.nan, math.inf


def by_definition(leaf):
    """Slowly, in float64, one leaf at a time."""
    tiny = torch.finfo(leaf.dtype).tiny
    values = torch.view_as_real(leaf) if leaf.is_complex() else leaf
    values = values.double().flatten().tolist()
    finite = [abs(v) for v in values if math.isfinite(v)]
    return {
        "amax": nan if any(map(math.isnan, values)) else max(map(abs, values), default=0.0),
        "zeros": sum(v == 0 for v in finite) / max(len(values), 1),
        "subnormal": sum(0 < v < tiny for v in finite) / max(len(values), 1),
        "nonfinite": len(values) - len(finite),
    }


def agrees(row, leaf):
    for name, value in by_definition(leaf).items():
        found = getattr(row, name).item()
        assert found == pytest.approx(value, rel=1e-6, nan_ok=True), name


def values(dtype, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-160, 10, (count,), generator=generator).double()
    leaf = torch.randn(count, generator=generator, dtype=torch.float64) * 2**powers
    leaf[::7] = 0
    return leaf.to(dtype)


@given(trees(any32))
def test_every_fact_is_what_it_is_by_definition(tree):
    leaves = {
        name: leaf
        for name, leaf in zip(_tree.dotted_names(tree), _tree.flatten(tree)[0], strict=True)
        if leaf is not None
    }
    with Untouched(tree):
        rows = ps.grad_report(tree).rows
    assert list(rows) == list(leaves)
    for name, row in rows.items():
        agrees(row, leaves[name])


@pytest.mark.parametrize(
    ("dtype", "count"),
    [
        *((dtype, count) for dtype in DTYPES for count in (5, 33, 300)),
        (torch.float32, 2**19 + 1),  # in two chunks
    ],
)
def test_a_leaf_is_described_in_its_own_dtype_whatever_its_size(dtype, count):
    leaf = values(dtype, count)
    other = torch.full((3,), 1e-6, dtype=dtype)
    rows = ps.grad_report([other, leaf, other]).rows
    agrees(rows["1"], leaf)
    agrees(rows["0"], other)
    assert same_bits(rows["0"], rows["2"])


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(
    ("own", "judged"),
    [(own, torch.float16) for own in (*DTYPES, torch.complex32)]
    + [(torch.float64, torch.bfloat16), (torch.float16, torch.float32)],
)
def test_with_a_dtype_a_leaf_is_judged_as_it_would_be_in_that_dtype(own, judged):
    wide = values(torch.float64, 500)
    leaf = torch.complex(wide, wide.flip(0)) if own.is_complex else wide
    leaf = leaf.to(own)
    row = ps.grad_report(leaf, dtype=judged).rows["grads"]
    parts = torch.view_as_real(leaf) if own.is_complex else leaf
    agrees(row, parts.to(judged))
    assert row.amax.dtype == torch.float32
    assert same_bits(ps.grad_report(leaf, dtype=own.to_real()), ps.grad_report(leaf))


@pytest.mark.parametrize("wrong", ["float16", torch.complex64])
def test_a_dtype_that_judges_no_gradient_is_refused(wrong):
    with pytest.raises(TypeError, match=r"dtype must be a floating torch.dtype or None, got "):
        ps.grad_report(torch.ones(2), dtype=wrong)


def test_all_kinds_of_leaves_have_a_row_but_none():
    sparse = torch.sparse_coo_tensor([[0, 0, 2]], torch.tensor([1.0, 2.0, 0.0]), (4,))
    grads = {
        "sparse": sparse,
        "none": None,
        "scalar": torch.tensor(nan),
        "empty": torch.zeros(0, 3),
        "nested": [{"x": torch.tensor([inf, 1.0, -inf])}, (torch.zeros(2, 2),)],
        "wide": torch.tensor([1e300, 0.0], dtype=torch.float64),
        "conj": torch.tensor([3 - 4j]).conj(),
        "neg": torch.tensor([0 + 5j]).conj().imag,
    }
    rows = ps.grad_report(grads).rows
    found = {name: [fact.item() for fact in row] for name, row in rows.items()}
    assert math.isnan(found.pop("scalar")[0])
    assert found == {
        "sparse": [3, 0.5, 0, 0],
        "empty": [0, 0, 0, 0],
        "nested.0.x": [inf, 0, 0, 2],
        "nested.1.0": [0, 1, 0, 0],
        "wide": [1e300, 0.5, 0, 0],
        "conj": [4, 0, 0, 0],
        "neg": [5, 0, 0, 0],
    }
    assert {tuple(fact.dtype for fact in row)[1:] for row in rows.values()} == {
        (torch.float32, torch.float32, torch.int64)
    }


def test_names_that_are_the_same_are_told_apart():
    rows = ps.grad_report({"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}).rows
    assert [row.amax.item() for row in rows.values()] == [1, 0]


@pytest.mark.parametrize("sample", [2, 33, 500])
def test_a_sample_is_every_nth_element(sample):
    leaf = values(torch.float32, 300)
    agrees(ps.grad_report(leaf, sample=sample).rows["grads"], leaf[::sample])


def grads_with(special, count=5):
    return {str(i): torch.tensor([special, 0.0, 1e-40, i]) for i in range(count)}


def test_under_vmap_it_equals_a_loop():
    dtype = torch.bfloat16
    members = [{"a": values(dtype, 100, seed), "b": [values(dtype, 3, seed)]} for seed in range(3)]
    members[1]["b"][0][0] = nan
    loop = stack([ps.grad_report(member) for member in members])
    assert same_bits(torch.vmap(ps.grad_report)(stack(members)), loop)
    assert same_bits(unstack(loop, 1), ps.grad_report(members[1]))


def test_compiled_it_is_one_graph_and_the_same():
    grads = grads_with(inf, 3)
    compiled = torch.compile(ps.grad_report, fullgraph=True, backend="eager")
    assert same_bits(compiled(grads), ps.grad_report(grads))


def test_it_is_no_part_of_a_derivative():
    def loss(weight):
        return weight.sum() + ps.grad_report(weight).rows["grads"].amax

    assert torch.equal(torch.func.grad(loss)(torch.ones(3)), torch.ones(3))
    assert not ps.grad_report(torch.ones(3, requires_grad=True)).rows["grads"].amax.requires_grad


def test_nothing_is_read_until_it_is_printed():
    report = assert_sync_free(ps.grad_report, grads_with(nan))
    with Dispatched() as printing:
        str(report)
    assert printing.reads <= 4


def test_it_prints_the_worst_first_and_names_the_first_bad_leaf():
    grads = {
        "fine": torch.ones(4),
        "starved": torch.tensor([0.0, 0.0, 1e-40, 1.0]),
        "inf": torch.tensor([1.0, inf]),
        "nan": torch.tensor([nan, nan, 0.0]),
    }
    lines = str(ps.grad_report(grads)).splitlines()
    assert lines[0] == (
        "2 of 4 gradients are not finite. First: inf; last, nearest to the loss: nan"
    )
    assert [line.split()[0] for line in lines[2:]] == ["nan", "inf", "starved", "fine"]
    assert lines[4].split() == ["starved", "1.00e+00", "50%", "25%", "0"]


def of_gradients():
    return ps.grad_report({"fine": torch.ones(4), "some": torch.tensor([0, 1e-40, inf, 2])})


def of_an_update():
    old, new, wanted = ({f"w{i}": torch.ones(2) * x * i for i in range(3)} for x in (0, 1, 2))
    return ps.update_report(old, new, wanted)


def of_a_forward():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    return ps.forward_report(*ps.make_functional(model), torch.tensor([1.0, inf]))


def of_scales():
    return ps.probe_scales(lambda p, b, x: (p["w"].sum(), b), {"w": torch.ones(2)}, {}, None)


@pytest.mark.parametrize(
    ("make", "columns", "first", "last"),
    [
        (of_gradients, ("amax", "zeros", "subnormal", "nonfinite"), "some", "fine"),
        (of_an_update, ("quality", "lost"), "w1", "w0 (no update wanted)"),
        (of_a_forward, ("amax", "smallest", "nonfinite"), "0", "(model)"),
    ],
)
def test_the_picture_has_a_bar_a_row_for_each_column(make, columns, first, last, plt):
    report = make()
    figure, rows = report.plot(), report.rows
    rows = list(rows.values()) if isinstance(rows, dict) else rows
    for name, panel in zip(columns, figure.axes, strict=True):
        drawn = sorted(bar.get_width() for bar in panel.patches)
        numbers = [getattr(row, name).item() for row in rows]
        assert drawn == sorted(number if math.isfinite(number) else 0 for number in numbers)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert (labels[-1], labels[0]) == (first, last)


@pytest.mark.parametrize("make", [of_gradients, of_an_update, of_a_forward, of_scales])
def test_matplotlib_is_imported_only_when_a_picture_is_asked_for(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    report = make()
    with pytest.raises(ImportError, match="matplotlib"):
        report.plot()


def test_what_is_no_gradient_is_refused_by_name():
    with pytest.raises(ValueError, match=r"no tensor.*Fix: pass the gradients"):
        ps.grad_report({"a": None, "b": {}})
    with pytest.raises(TypeError, match=r"grads\['a'\]\['mask'\] has dtype torch.bool"):
        ps.grad_report({"a": {"mask": torch.ones(2) > 0}})
    with pytest.raises(ValueError, match="sample must be from 1"):
        ps.grad_report(torch.ones(2), sample=0)
