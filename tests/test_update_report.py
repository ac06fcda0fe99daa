"""`update_report`: how much of the wanted update has arrived."""

import math

import pytest
import torch
from helpers import Dispatched, Untouched, same_bits, stack

import purescale as ps
from purescale.testing import assert_sync_free

nan, inf = math.nan, math.inf
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


def by_definition(old, new, wanted):
    """Slowly, in Python floats, one element at a time."""
    rows = [
        (torch.view_as_real(t) if t.is_complex() else t).double().flatten().tolist()
        for t in (old, new, wanted)
    ]
    every = list(zip(*rows, strict=True))
    size = math.fsum(w * w for *_, w in every)
    quality = math.fsum((b - a) * w for a, b, w in every) / size if size else 1
    asked = [(a, b) for a, b, w in every if w]
    return quality, sum(a == b for a, b in asked) / max(len(asked), 1)


def a_step(dtype, count, seed=0):
    """Weights around 1, and an update of which a half parameter loses some."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    old = (1 + 0.1 * torch.randn(count, generator=generator, dtype=wide)).to(dtype)
    size = {torch.bfloat16: 2e-3, torch.float16: 3e-4}.get(dtype, 1e-5)
    wanted = size * torch.randn(count, generator=generator, dtype=wide)
    wanted[::7] = 0
    return old, (old + wanted).to(dtype), wanted.to(torch.complex64 if dtype.is_complex else wide)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 5, 33, 300])
def test_both_numbers_are_what_they_are_by_definition(dtype, count):
    old, new, wanted = a_step(dtype, count)
    with Untouched((old, new, wanted)):
        row = ps.update_report({"w": old}, {"w": new}, {"w": wanted}).rows["w"]
    quality, lost = by_definition(old, new, wanted)
    assert row.quality.item() == pytest.approx(quality, rel=1e-9)
    assert row.lost.item() == pytest.approx(lost, rel=1e-6)
    assert (row.quality.dtype, row.lost.dtype) == (torch.float64, torch.float32)


def test_adamw_over_bfloat16_loses_what_it_is_asked_for_and_over_float32_nothing():
    wide = {"w": torch.ones(33), "b": torch.zeros(5)}
    grads = {"w": torch.ones(33), "b": torch.ones(5)}
    adamw = ps.from_torch(torch.optim.AdamW, lr=1e-3, weight_decay=0.0)

    def step(params):
        mine = {name: grad.to(params[name].dtype) for name, grad in grads.items()}
        return adamw.step(params, mine, adamw.init(params))[0]

    moved = step(wide)
    wanted = {name: moved[name] - wide[name] for name in wide}
    half = {name: p.bfloat16() for name, p in wide.items()}
    report = ps.update_report(half, step(half), wanted)
    assert (report.rows["w"].quality, report.rows["w"].lost) == (0, 1)
    assert report.rows["b"].quality == pytest.approx(1, rel=1e-2)
    assert report.rows["b"].lost == 0
    for row in ps.update_report(wide, moved, wanted).rows.values():
        assert row.quality == pytest.approx(1)


@pytest.mark.parametrize("size", [1e-200, 1e-40, 1e30, 1e200])
def test_squares_that_overflow_or_vanish_change_nothing(size):
    old = torch.zeros(5, dtype=torch.float64)
    wanted = size * torch.tensor([1.0, 2, 3, 0, 4], dtype=torch.float64)
    row = ps.update_report([old], [wanted / 2], [wanted]).rows["0"]
    assert (row.quality.item(), row.lost.item()) == (pytest.approx(0.5), 0)


def test_where_nothing_was_wanted_nothing_is_lost():
    old = {"still": torch.ones(3), "moved": torch.ones(3), "empty": torch.zeros(0), "none": None}
    new = old | {"moved": torch.full((3,), 2.0)}
    wanted = {"still": torch.zeros(3), "moved": torch.zeros(3), "empty": torch.zeros(0)}
    rows = ps.update_report(old, new, wanted | {"none": None}).rows
    assert {
        name: (row.quality.item(), row.lost.item()) for name, row in rows.items()
    } == dict.fromkeys(wanted, (1, 0))
    partly = ps.update_report(old, new, dict.fromkeys(old) | {"moved": torch.ones(3)})
    assert list(partly.rows) == ["moved"]


def test_large_leaves_are_taken_in_parts(monkeypatch):
    from purescale._reports import update_report

    monkeypatch.setattr(update_report, "_CHUNK", 32)
    given = a_step(torch.bfloat16, 300)
    quality, lost = by_definition(*given)
    row = ps.update_report(*given).rows["old"]
    assert row.quality.item() == pytest.approx(quality, rel=1e-9)
    assert row.lost.item() == pytest.approx(lost, rel=1e-6)
    transposed = [leaf.view(10, 30).t() for leaf in given]
    again = ps.update_report(transposed[0].contiguous(), *transposed[1:]).rows["old"]
    assert again.quality.item() == pytest.approx(quality, rel=1e-9)


def test_under_vmap_it_equals_a_loop():
    members = [{"a": a_step(torch.bfloat16, 33, seed)} for seed in range(3)]
    loop = stack([ps.update_report(*({"a": leaf} for leaf in each["a"])) for each in members])
    given = stack([[{"a": leaf} for leaf in each["a"]] for each in members])
    found = torch.vmap(lambda old, new, wanted: ps.update_report(old, new, wanted))(*given)
    torch.testing.assert_close(found, loop)
    worst = max(loop.rows["a"].quality.tolist(), key=lambda quality: abs(quality - 1))
    assert f"{worst:.4f}" in str(loop), "of stacked reports the worst is printed"


def test_compiled_it_is_one_graph_and_the_same():
    given = [{"a": leaf, "b": leaf[:5]} for leaf in a_step(torch.bfloat16, 33)]
    compiled = torch.compile(ps.update_report, fullgraph=True, backend="aot_eager")
    assert same_bits(compiled(*given), ps.update_report(*given))


def test_nothing_is_read_until_it_is_printed_and_it_is_no_part_of_a_graph():
    old, new, wanted = ({"w": torch.full((3,), x, requires_grad=True)} for x in (1.0, 1.0, 0.1))
    report = assert_sync_free(ps.update_report, old, new, wanted)
    assert not report.rows["w"].quality.requires_grad
    with Dispatched() as printing:
        str(report)
    assert printing.reads <= 2


def test_it_prints_the_worst_first_and_says_how_many_missed():
    old = {name: torch.zeros(4) for name in ("fine", "starved", "some", "far", "nan")}
    wanted = {name: torch.ones(4) for name in old}
    new = {
        "fine": torch.ones(4),
        "starved": torch.zeros(4),
        "some": torch.tensor([1.0, 1, 1, 0]),
        "far": torch.full((4,), 3.0),
        "nan": torch.full((4,), nan),
    }
    lines = str(ps.update_report(old, new, wanted)).splitlines()
    assert lines[0] == "3 of 5 leaves miss the wanted update by more than half of it"
    assert [line.split()[0] for line in lines[2:]] == ["nan", "far", "starved", "some", "fine"]
    assert lines[5].split() == ["some", "0.7500", "25%"]
    assert str(ps.update_report(old, wanted, wanted)).startswith("every leaf is within half")


def test_the_picture_has_a_bar_a_leaf():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    old, new, wanted = ({f"w{i}": torch.full((2,), x * i) for i in (1, 2)} for x in (0.0, 1.0, 2.0))
    figure = ps.update_report(old, new, wanted).plot()
    quality, lost = figure.axes
    assert [bar.get_width() for bar in quality.patches] == [0.5, 0.5]
    assert [bar.get_width() for bar in lost.patches] == [0, 0]
    assert {label.get_text() for label in quality.get_yticklabels()} == {"w1", "w2"}
    plt.close(figure)


@pytest.mark.parametrize(
    ("old", "new", "wanted", "error", "words"),
    [
        ({}, {}, {}, ValueError, r"no tensor.*Fix: "),
        ({"a": torch.ones(1)}, {"a": torch.ones(1)}, {"a": None}, ValueError, "no tensor"),
        ({"a": torch.ones(1)}, {"b": torch.ones(1)}, {}, ValueError, r"new does not match old"),
        ({"a": torch.ones(1)}, {"a": None}, {"a": None}, TypeError, r"new\['a'\]"),
        ({"a": torch.ones(2)}, {"a": torch.ones(3)}, {"a": None}, ValueError, r"new\['a'\] is \(3"),
        (
            {"a": None},
            {"a": None},
            {"a": torch.ones(1)},
            ValueError,
            r"wanted\['a'\].* old is None",
        ),
        ({"a": torch.ones(2) > 0}, {}, {}, TypeError, r"old\['a'\] has dtype torch.bool"),
    ],
)
def test_what_does_not_match_is_refused_by_name(old, new, wanted, error, words):
    with pytest.raises(error, match=words):
        ps.update_report(old, new, wanted)
