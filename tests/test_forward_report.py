"""`forward_report`: a row for each module that returned, and the module that overflowed first."""

import collections
import math
import threading

import pytest
import torch
import torch.nn.functional as F
from helpers import Untouched, same_bits, small_net, stack
from torch import nn

import purescale as ps
from purescale._torch import private
from purescale.testing import assert_sync_free

nan, inf = math.nan, math.inf
HALF = "params=float32,compute=float16,output=float32"


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.up, self.down = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x):
        return x + self.down(F.relu(self.up(x)))


def tower(size=5, depth=3):
    torch.manual_seed(0)
    return nn.Sequential(*[Block(size) for _ in range(depth)])


class Seen:
    """The oracle: what each module returns, from hooks of its own on the live model."""

    def __init__(self, model):
        self.outs = []
        for name, module in model.named_modules():
            module.register_forward_hook(
                lambda m, args, out, name=name: self.outs.append((name or "(model)", m, out))
            )


def by_definition(out):
    values = out.double().flatten().tolist()
    finite = [abs(v) for v in values if math.isfinite(v)]
    some = [v for v in finite if v]
    return max(finite, default=0), min(some, default=0), len(values) - len(finite)


@pytest.mark.parametrize("size", [5, 33, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_each_module_has_a_row_in_the_order_in_which_it_returned(size, dtype):
    model = tower(size).to(dtype)
    apply, params, buffers = ps.make_functional(model)
    x = torch.randn(4, size, dtype=dtype)
    report = ps.forward_report(apply, params, buffers, x)
    seen = Seen(model)
    model(x)
    assert [row.name for row in report.rows] == [name for name, _, _ in seen.outs]
    assert [row.kind for row in report.rows] == [type(m).__name__ for _, m, _ in seen.outs]
    for row, (_, _, out) in zip(report.rows, seen.outs, strict=True):
        assert (row.amax.item(), row.smallest.item(), row.nonfinite.item()) == by_definition(out)
        assert row.amax.dtype == row.smallest.dtype == torch.float64
    assert report.first is None
    assert report.rows[0].name == "0.up"
    assert report.rows[-1].name == "(model)"


def overflowing(dtype=torch.float32):
    """A tower whose middle overflows in float16 and in no wider dtype."""
    apply, params, buffers = ps.make_functional(tower())
    params["1.down.weight"] = torch.full((5, 5), 3e4)
    params["1.up.bias"] = torch.full((5,), 10.0)
    return apply, params, buffers


def test_under_a_policy_it_names_the_first_module_that_overflows():
    apply, params, buffers = overflowing()
    x = torch.ones(2, 5)
    assert ps.forward_report(apply, params, buffers, x).first is None
    for text in (HALF, "params=float32,compute=autocast(float16),output=float32"):
        report = ps.forward_report(ps.with_policy(apply, text), params, buffers, x)
        assert report.first == "1.down"
        rows = {row.name: row for row in report.rows}
        assert rows["1.down"].nonfinite == 10
        assert rows["1.up"].nonfinite == 0
        assert rows["1"].nonfinite == 10
    wide = "params=float32,compute=bfloat16,output=float32"
    assert ps.forward_report(ps.with_policy(apply, wide), params, buffers, x).first is None


def test_the_callers_autocast_reaches_apply_and_not_the_facts():
    apply, params, buffers = overflowing()
    with torch.autocast("cpu", torch.float16):
        report = ps.forward_report(apply, params, buffers, torch.ones(2, 5))
    assert report.first == "1.down"
    assert {row.amax.dtype for row in report.rows} == {torch.float64}


def test_nothing_stays_behind_and_no_argument_changes():
    apply, params, buffers = ps.make_functional(small_net())
    x = torch.randn(4, 1, 6, 6)
    before = apply(params, buffers, x)
    hooks = [len(held) for held in _global_hooks()]
    with Untouched((params, buffers, x)):
        ps.forward_report(apply, params, buffers, x)
        with pytest.raises(RuntimeError, match=r"shape|dimension|channels"):
            ps.forward_report(apply, params, buffers, x[:, :, 0])
    assert [len(held) for held in _global_hooks()] == hooks
    assert same_bits(apply(params, buffers, x), before)
    assert not any(private.has_hooks(m) for m in apply._roots[True].modules())


def _global_hooks():
    held = vars(torch.nn.modules.module)
    return [held["_global_forward_hooks"], held["_global_forward_pre_hooks"]]


class Many(nn.Module):
    """Returns what its name says."""

    def __init__(self, out):
        super().__init__()
        self.out = out

    def forward(self, x):
        return self.out(x)


Pair = collections.namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("out", "facts"),
    [
        (lambda x: {"a": x * 4, "b": [x * 0, None, "text"]}, (4, 4, 0)),
        (lambda x: Pair(x * nan, x.double() * 1e-300), (1e-300, 1e-300, 3)),
        (lambda x: torch.complex(x * 3, x * -8), (8, 3, 0)),
        (lambda x: torch.diag(x * 2).to_sparse(), (2, 2, 0)),
        (lambda x: x[:0], (0, 0, 0)),
        (lambda x: x * 0, (0, 0, 0)),
        (lambda x: torch.stack([x * inf, x * -inf, x * nan, x * 0]), (0, 0, 9)),
        (lambda x: (x * 2.0**-149, x), (1, 2.0**-149, 0)),
        (lambda x: (x > 0, x.long()), None),
    ],
)
def test_all_floating_tensors_that_a_module_returns_count(out, facts):
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Many(out)
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            self.part(x)
            return x * self.weight

    apply, params, buffers = ps.make_functional(Holder())
    rows = ps.forward_report(apply, params, buffers, torch.ones(3)).rows
    found = [tuple(fact.item() for fact in row[2:]) for row in rows if row.name == "part"]
    assert found == ([] if facts is None else [facts])


def test_a_module_that_is_called_twice_has_two_rows_and_shared_ones_have_their_first_name():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = self.b = nn.Linear(2, 2)

        def forward(self, x):
            return self.b(self.a(x))

    apply, params, buffers = ps.make_functional(Twice())
    rows = ps.forward_report(apply, params, buffers, torch.ones(1, 2)).rows
    assert [row.name for row in rows] == ["a", "a", "(model)"]


def test_a_module_that_a_forward_makes_goes_by_its_class_where_it_was_made():
    class Maker(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x):
            return nn.Sequential(nn.ReLU(), self.linear)(nn.ReLU()(x))

    apply, params, buffers = ps.make_functional(nn.Sequential(Maker()))
    rows = ps.forward_report(apply, params, buffers, torch.ones(1, 2)).rows
    assert [row.name for row in rows] == [
        "0.ReLU",
        "0.Sequential.0",
        "0.linear",
        "0.Sequential",
        "0",
        "(model)",
    ]


def test_a_row_under_vmap_is_about_all_members():
    apply, params, buffers = ps.make_functional(tower())
    members = [{name: p * factor for name, p in params.items()} for factor in (1, nan, 2)]
    x = torch.ones(2, 5)

    def ensemble(params, buffers, x):
        return torch.vmap(lambda p: apply(p, buffers, x)[0])(params)

    report = ps.forward_report(ensemble, stack(members), buffers, x)
    each = [ps.forward_report(apply, member, buffers, x) for member in members]
    assert [row.name for row in report.rows] == [row.name for row in each[0].rows]
    for row, *alone in zip(report.rows, *(other.rows for other in each), strict=True):
        assert row.nonfinite == sum(other.nonfinite for other in alone) > 0
        # torch's batched matmul may round another way
        torch.testing.assert_close(row.amax.item(), max(other.amax.item() for other in alone))


def test_what_was_compiled_runs_eagerly_and_what_other_threads_run_is_not_seen():
    apply, params, buffers = ps.make_functional(tower())
    x = torch.ones(2, 5)
    expected = ps.forward_report(apply, params, buffers, x)
    compiled = torch.compile(apply, backend="aot_eager")
    compiled(params, buffers, x)
    assert same_bits(ps.forward_report(compiled, params, buffers, x), expected)

    def beside(params, buffers, x):
        other = threading.Thread(target=nn.Linear(5, 5), args=(x,))
        other.start()
        other.join()
        return apply(params, buffers, x)

    assert same_bits(ps.forward_report(beside, params, buffers, x), expected)


def test_nothing_is_read_until_it_is_asked():
    apply, params, buffers = overflowing()
    report = assert_sync_free(ps.forward_report, apply, params, buffers, torch.ones(2, 5))
    assert report.first is None
    assert ps.forward_report(apply, params, buffers, torch.full((2, 5), inf)).first == "0.up"


def test_it_prints_the_calls_around_the_first_that_is_not_finite():
    apply, params, buffers = overflowing()
    half = ps.with_policy(apply, HALF)
    lines = str(ps.forward_report(half, params, buffers, torch.ones(2, 5))).splitlines()
    assert lines[0] == "6 of 10 calls returned something not finite. First: 1.down"
    assert [line.split()[0] for line in lines[2:4]] == ["0.up", "0.down"]
    assert len(lines) == 12

    apply, params, buffers = ps.make_functional(tower(depth=40))
    clean = str(ps.forward_report(apply, params, buffers, torch.ones(2, 5))).splitlines()
    assert clean[0] == "everything that a module returned is finite"
    params["30.up.bias"] = torch.full((5,), nan)
    lines = str(ps.forward_report(apply, params, buffers, torch.ones(2, 5))).splitlines()
    assert lines[0].endswith("First: 30.up")
    assert lines[2] == "after 75 more"
    assert len(lines) == 34
    assert "30.up" in {line.split()[0] for line in lines}
    assert lines[-1] == "and 16 more"


def test_the_picture_has_a_point_a_module_and_marks_what_is_not_finite():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    apply, params, buffers = overflowing()
    half = ps.with_policy(apply, HALF)
    report = ps.forward_report(half, params, buffers, torch.ones(2, 5))
    figure = report.plot()
    (panel,) = figure.axes
    largest, smallest, *marks = panel.get_lines()
    shown = [v for v in largest.get_ydata() if not math.isnan(v)]
    assert shown == [row.amax.item() for row in report.rows if row.amax]
    assert len(smallest.get_ydata()) == len(report.rows)
    bad = [place for place, row in enumerate(report.rows) if row.nonfinite]
    assert [mark.get_xdata()[0] for mark in marks] == bad
    assert [label.get_text() for label in panel.get_xticklabels()][:2] == ["0.up", "0.down"]
    plt.close(figure)


def test_matplotlib_is_imported_only_when_a_picture_is_asked_for(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.pyplot", None)
    apply, params, buffers = overflowing()
    report = ps.forward_report(apply, params, buffers, torch.ones(2, 5))
    with pytest.raises(ImportError, match="Fix: pip install matplotlib"):
        report.plot()


def test_a_function_that_calls_no_module_is_refused():
    with pytest.raises(ValueError, match=r"no module returned.*Likely cause: .*Fix: .*make_functi"):
        ps.forward_report(lambda p, b, x: (p["w"] * x, b), {"w": torch.ones(1)}, {}, 1.0)
