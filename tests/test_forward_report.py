"""`forward_report`: a row for each module that returned, and the module that overflowed first."""

import collections
import math
import threading

import pytest
import torch
import torch.nn.functional as F
from helpers import HALF, Untouched, module_of, same_bits, small_net, stack
from torch import nn

import purescale as ps
from purescale.testing import assert_sync_free

nan, inf = math.nan, math.inf


def tower(size=5, depth=3):
    def block():
        up, down = nn.Linear(size, size), nn.Linear(size, size)
        return module_of(lambda m, x: x + m.down(F.relu(m.up(x))), up=up, down=down)

    torch.manual_seed(0)
    return nn.Sequential(*[block() for _ in range(depth)])


def by_definition(out):
    values = out.double().flatten().tolist()
    finite = [abs(v) for v in values if math.isfinite(v)]
    some = [v for v in finite if v]
    return max(finite, default=0), min(some, default=0), len(values) - len(finite)


@pytest.mark.parametrize("size", [5, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_each_module_has_a_row_in_the_order_in_which_it_returned(size, dtype):
    model, x = tower(size).to(dtype), torch.randn(4, size, dtype=dtype)
    report, seen = reported(model, x), []
    for name, module in model.named_modules():
        module.register_forward_hook(
            lambda m, args, out, name=name or "(model)": seen.append((name, type(m).__name__, out))
        )
    model(x)
    assert [(row.name, row.kind) for row in report.rows] == [row[:2] for row in seen]
    for row, (_, _, out) in zip(report.rows, seen, strict=True):
        assert (row.amax.item(), row.smallest.item(), row.nonfinite.item()) == by_definition(out)
        assert row.amax.dtype == row.smallest.dtype == torch.float64
    assert report.first is None
    assert report.rows[0].name == "0.up"
    assert report.rows[-1].name == "(model)"


def reported(model, *inputs, change=None, policy=None, **options):
    """The report of a model whose parameters and buffers `change` has changed."""
    apply, params, buffers = ps.make_functional(model)
    for name, value in (change or {}).items():
        (params if name in params else buffers)[name] = value
    apply = apply if policy is None else ps.with_policy(apply, policy)
    return ps.forward_report(apply, params, buffers, *inputs, **options)


def overflowing():
    """A tower whose middle overflows in float16 and in no wider dtype."""
    apply, params, buffers = ps.make_functional(tower())
    params["1.down.weight"] = torch.full((5, 5), 3e4)
    params["1.up.bias"] = torch.full((5,), 10.0)
    return apply, params, buffers


def test_under_a_policy_it_names_the_first_module_that_overflows():
    apply, params, buffers = overflowing()

    def under(policy):
        wrapped = ps.with_policy(apply, policy)
        return ps.forward_report(wrapped, params, buffers, torch.ones(2, 5))

    for wide in ("float32", "params=float32,compute=bfloat16,output=float32"):
        assert under(wide).first is None
    for narrow in (HALF, "params=float32,compute=autocast(float16),output=float32"):
        report = under(narrow)
        assert report.first == "1.down"
        rows = {row.name: row.nonfinite for row in report.rows}
        assert (rows["1.down"], rows["1.up"], rows["1"]) == (10, 0, 10)


def test_the_callers_autocast_reaches_apply_and_not_the_facts():
    apply, params, buffers = overflowing()
    with torch.autocast("cpu", torch.float16):
        report = ps.forward_report(apply, params, buffers, torch.ones(2, 5))
    assert report.first == "1.down"
    assert {row.amax.dtype for row in report.rows} == {torch.float64}


def test_nothing_stays_behind_and_no_argument_changes():
    model = small_net()
    apply, params, buffers = ps.make_functional(model)
    x = torch.randn(4, 1, 6, 6)
    before = apply(params, buffers, x)
    hooks = [len(of_kind) for of_kind in _global_hooks()]
    assert len(hooks) >= 5
    with Untouched((params, buffers, x)):
        ps.forward_report(apply, params, buffers, x)
        with pytest.raises(RuntimeError, match=r"shape|dimension|channels"):
            ps.forward_report(apply, params, buffers, x[:, :, 0])
    assert [len(of_kind) for of_kind in _global_hooks()] == hooks
    assert same_bits(apply(params, buffers, x), before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def _global_hooks():
    named = vars(torch.nn.modules.module).items()
    return [of for name, of in named if name.startswith("_global_") and isinstance(of, dict)]


# ---- the first: faults put into a net, at every place of it


class Fault:
    """Where a fault is put in, and what it does; None for a net without one."""

    place, change = None, None

    @classmethod
    def reach(cls, place, values):
        return cls.change(values) if place == cls.place else values


class Dense(nn.Linear):
    def forward(self, x):
        return Fault.reach(self.place, super().forward(x))


class Norm(nn.LayerNorm):
    def forward(self, x):
        return Fault.reach(self.place, super().forward(x))


class Attention(nn.Module):
    def __init__(self, size, softmax):
        super().__init__()
        self.q, self.k, self.v, self.out = (Dense(size, size) for _ in range(4))
        self.softmax = nn.Softmax(-1) if softmax else None

    def forward(self, x, mask=None):
        scores = Fault.reach(self.place, self.q(x) @ self.k(x).mT)
        scores = scores if mask is None else scores + mask.to(x.dtype)
        weights = scores.softmax(-1) if self.softmax is None else self.softmax(scores)
        return self.out(weights @ self.v(x))


class Layer(nn.Module):
    def __init__(self, size, softmax):
        super().__init__()
        self.before, self.between = Norm(size), Norm(size)
        self.attention = Attention(size, softmax)
        self.mlp = nn.Sequential(Dense(size, 2 * size), nn.GELU(), Dense(2 * size, size))

    def forward(self, x, mask=None):
        x = Fault.reach(self.place, x + self.attention(self.before(x), mask=mask))
        return x + self.mlp(self.between(x))


class Future(nn.Module):
    def forward(self, x):
        return torch.full((x.shape[-2], x.shape[-2]), -inf).triu(1)


class Net(nn.Module):
    """A transformer: residual, nested, with a mask of -inf in one of the ways there are."""

    def __init__(self, masked, size=6, softmax=False):
        super().__init__()
        self.masked = masked
        self.layers = nn.ModuleList(Layer(size, softmax) for _ in range(2))
        self.head = nn.Sequential(Norm(size), Dense(size, 3))
        self.future = Future()
        self.register_buffer("mask", self.future(torch.ones(4, size)))
        for name, module in self.named_modules():
            module.place = name or "(model)"

    def forward(self, x, mask=None):
        if self.masked == "buffer":
            mask = self.mask
        elif self.masked == "module":
            mask = self.future(x)
        for layer in self.layers:
            x = Fault.reach("(model)", layer(x, mask))
        return self.head(x)


def faulty(net, place, change, *inputs, policy="compute=float32", **keywords):
    """The first that a report names while a fault is in the net, and whether that shows."""
    apply, params, buffers = net
    Fault.place, Fault.change = place, change
    try:
        report = ps.forward_report(
            ps.with_policy(apply, policy), params, buffers, *inputs, **keywords
        )
    finally:
        Fault.place, Fault.change = None, None
    return report.first, bool(report.rows[-1].nonfinite)


def one(value):
    def change(values):
        changed = values.clone()
        changed.view(-1)[-1] = value
        return changed

    return change


CHANGES = {
    "one NaN": one(nan),
    "one inf": one(inf),
    "overflow": lambda values: values * 1e39 * 1e39,
    "all NaN": lambda values: values * nan,
}
MASKS = {
    "buffer": lambda: ((), {}),
    "module": lambda: ((), {}),
    "argument": lambda: ((Future()(torch.ones(4, 6)),), {}),
    "keyword": lambda: ((), {"mask": Future()(torch.ones(4, 6))}),
    # with the distance in it, as of ALiBi
    "slope": lambda: ((Future()(torch.ones(4, 6)) - torch.arange(4.0),), {}),
}
PLACES = [
    name or "(model)"
    for name, module in Net("buffer").named_modules()
    if isinstance(module, (Dense, Norm, Attention, Layer, Net))
]
POLICIES = ("compute=float32", HALF, "compute=autocast(float16)")


def masked_net(masked, softmax=True):
    """The parts of a net with this mask, and a call of it as `faulty` has one."""
    torch.manual_seed(0)
    net = Net(masked, softmax=softmax)
    masks, keywords = MASKS[masked]()
    inputs = torch.randn(2, 4, 6), *masks
    functional = ps.make_functional(net)
    call = lambda place=None, change=None, **more: faulty(  # noqa: E731
        functional, place, change, *inputs, **keywords, **more
    )
    return (*masks, *keywords.values()), call


@pytest.mark.parametrize("masked", MASKS)
def test_the_first_is_the_module_whose_own_forward_makes_inf_or_nan_and_not_a_mask(masked):
    _, first_of = masked_net(masked, softmax=masked != "keyword")
    assert first_of() == (None, False)
    for index, place in enumerate(PLACES, len(masked)):  # each mask with others in each place
        change, policy = list(CHANGES.values())[index % 4], POLICIES[index % 3]
        assert first_of(place, change, policy=policy) == (place, True)


def test_an_overflow_to_minus_inf_is_told_from_a_mask():
    """By what becomes of it: softmax takes that of scores away, the next norm makes NaN of it."""
    _, first_of = masked_net("module", softmax=False)
    first = {place: first_of(place, one(-inf)) for place in PLACES}
    taken_away = {"layers.0.attention": (None, False), "layers.1.attention": (None, False)}
    assert first == {place: (place, True) for place in PLACES} | taken_away


@pytest.mark.parametrize(("masked", "softmax"), [("argument", True), ("keyword", False)])
def test_a_row_of_which_all_is_masked_is_a_fault_of_the_attention(masked, softmax):
    (mask,), first_of = masked_net(masked, softmax)
    mask[2] = -inf
    assert first_of() == ("layers.0.attention", True)


def test_inf_and_nan_that_came_in_belong_to_no_module():
    net, x = ps.make_functional(Net("buffer")), torch.randn(2, 4, 6)
    for value in (nan, inf):
        assert faulty(net, None, None, one(value)(x)) == ("(inputs)", True)
    # float16 cannot hold what comes in, so the policy makes inf of it
    assert faulty(net, None, None, x * 1e6, policy=HALF) == ("(inputs)", True)
    # but what a module made before it saw the rest is its own
    model = module_of(lambda m, x, y: m.a(x) + m.b(y), a=nn.Linear(2, 2), b=nn.Linear(2, 2))
    x, large = torch.ones(1, 2), {"b.weight": torch.full((2, 2), inf)}
    assert reported(model, x * nan, x, change=large).first == "b"


def test_a_parameter_that_is_not_finite_makes_its_module_the_first():
    apply, params, buffers = ps.make_functional(Net("buffer"))
    x = torch.randn(2, 4, 6)
    for name in ("layers.1.attention.v.weight", "layers.1.between.bias", "head.1.weight"):
        report = ps.forward_report(apply, params | {name: one(nan)(params[name])}, buffers, x)
        assert report.first == name.rpartition(".")[0]
        at_fault = {row.name for row in report.rows if row.held}
        assert at_fault == {report.first}
        assert "the first has inf or NaN in its own parameters or buffers" in str(report)
    large = params | {"head.1.weight": params["head.1.weight"] + 1e6}  # inf in float16
    report = ps.forward_report(ps.with_policy(apply, HALF), large, buffers, x)
    assert report.first == "head.1"
    assert {row.name: row.held.item() for row in report.rows}["head.1"] == 18


def test_statistics_that_are_not_finite_make_their_norm_the_first():
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    change = {"1.running_var": torch.tensor([nan, 1, 1])}
    report = reported(net, torch.randn(4, 3), change=change, train=False)
    assert report.first == "1"
    assert [row.held.item() for row in report.rows] == [0, 1, 0, 0]


def test_what_a_module_writes_into_its_argument_was_not_given():
    writes = module_of(lambda m, x: x.mul_(1e39))
    net = nn.Sequential(nn.Linear(3, 3), writes, nn.ReLU(inplace=True), nn.LayerNorm(3))
    report = reported(net, torch.randn(4, 3))
    assert report.first == "1"
    assert report.rows[1].given == 0


@pytest.mark.parametrize(
    ("forward", "first"),
    [
        # a keyword argument is an argument
        (lambda m, x: m.b(x, other=m.a(x) * 1e39 * 1e39), "(model)"),
        # taken away before another overflow
        (lambda m, x: m.softmax(m.low(x)) * 1e39 * 1e39, "(model)"),
        (lambda m, x: m.norm(m.low(x)) * 1e39 * 1e39, "low"),
        (lambda m, x: m.low(x).softmax(-1), None),
        (lambda m, x: m.low(x), "low"),
        (lambda m, x: m.low(x) - m.low(x), "low"),
        # what overflows beside it is not its parent's
        (lambda m, x: (m.low(x), m.a(x) * 1e39 * 1e39, m.high(x)), "high"),
    ],
)
def test_a_fault_between_two_modules_is_that_of_the_module_around_them(forward, first):
    torch.manual_seed(0)
    parts = {"a": nn.Linear(3, 3), "low": nn.Linear(3, 3), "high": nn.Linear(3, 3)}
    parts |= {"softmax": nn.Softmax(-1), "norm": nn.LayerNorm(3)}
    parts["b"] = module_of(lambda m, x, *, other: x * other)
    model = nn.Sequential(nn.Linear(3, 3), module_of(forward, **parts))
    change = {f"1.{n}.bias": torch.tensor([v, 0, 1]) for n, v in (("low", -inf), ("high", inf))}
    expected = None if first is None else {"(model)": "1"}.get(first, f"1.{first}")
    assert reported(model, torch.randn(2, 3), change=change).first == expected


def test_a_function_over_two_modules_has_no_module_of_its_own():
    (linear, params, _), (norm, scale, _) = map(
        ps.make_functional, (nn.Linear(3, 3), nn.LayerNorm(3))
    )

    def both(params, buffers, x, factor):
        return norm(scale, {}, linear(params, {}, x)[0] * factor)

    x = torch.randn(2, 3)
    kinds = [row.kind for row in ps.forward_report(both, params, {}, x, 1.0).rows]
    assert kinds == ["Linear", "LayerNorm"]
    assert ps.forward_report(both, params, {}, x, nan).first == "(inputs)"


@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_inf_and_nan_are_told_apart_and_what_is_all_of_them_has_no_magnitude(value):
    def report_of(*bias):
        model = nn.Sequential(nn.Linear(2, 3), nn.ReLU6())
        change = {"0.bias": torch.tensor(bias), "0.weight": torch.zeros(3, 2)}
        report = reported(model, torch.ones(4, 2), change=change)
        return report.rows[0], str(report).splitlines()[2].split()

    row, cells = report_of(value, 1.0, value)
    counts = (row.nonfinite.item(), row.nan.item(), row.posinf.item(), row.size)
    assert counts == (8, 8 * math.isnan(value), 8 * (value == inf), 12)
    assert cells == ["0", "Linear", *["1.00e+00"] * 2, *map(str, (8 - counts[1], counts[1], 0))]
    assert report_of(value, value, value)[1][2:4] == ["-", "-"]


Pair = collections.namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("out", "facts"),
    [
        (lambda x: {"a": x * 4, "b": [x * 0, None, "text"]}, (4, 4, 0)),
        (lambda x: Pair(x * nan, x.double() * 1e-300), (1e-300, 1e-300, 3)),
        (lambda x: torch.complex(x * 3, x * -8), (8, 3, 0)),
        (lambda x: torch.diag(x * 2).to_sparse(), (2, 2, 0)),
        (lambda x: x[:0], (0, 0, 0)),
        (lambda x: torch.stack([x * inf, x * -inf, x * nan, x * 0]), (0, 0, 9)),
        (lambda x: (x * 2.0**-149, x), (1, 2.0**-149, 0)),
        (lambda x: (x > 0, x.long()), None),
    ],
)
def test_all_floating_tensors_that_a_module_returns_count(out, facts):
    model = module_of(
        lambda m, x: (m.part(x), x * m.weight)[1],
        part=module_of(lambda m, x: out(x)),
        weight=nn.Parameter(torch.ones(3)),
    )
    rows = reported(model, torch.ones(3)).rows
    facts_of_part = [tuple(fact.item() for fact in row[2:5]) for row in rows if row.name == "part"]
    assert facts_of_part == ([] if facts is None else [facts])


def test_a_module_that_is_called_twice_has_two_rows_and_shared_ones_have_their_first_name():
    shared = nn.Linear(2, 2)
    rows = reported(module_of(lambda m, x: m.b(m.a(x)), a=shared, b=shared), torch.ones(1, 2)).rows
    assert [row.name for row in rows] == ["a", "a", "(model)"]


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
        # a batched matmul adds up in another order than single ones: a few roundings of float32
        largest = max(other.amax for other in alone)
        torch.testing.assert_close(row.amax, largest, rtol=1e-6, atol=0)


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
    assert ps.forward_report(apply, params, buffers, torch.full((2, 5), inf)).first == "(inputs)"


def test_it_prints_the_calls_around_the_first_that_is_not_finite():
    apply, params, buffers = overflowing()
    half = ps.with_policy(apply, HALF)
    lines = str(ps.forward_report(half, params, buffers, torch.ones(2, 5))).splitlines()
    assert lines[0] == "6 of 10 calls returned something not finite. First: 1.down"
    assert [line.split()[0] for line in lines[2:4]] == ["0.up", "0.down"]
    assert len(lines) == 12

    clean = str(reported(tower(depth=40), torch.ones(2, 5))).splitlines()
    assert clean[0] == "everything that a module returned is finite"
    broken = {"30.up.bias": torch.full((5,), nan)}
    lines = str(reported(tower(depth=40), torch.ones(2, 5), change=broken)).splitlines()
    assert lines[0].endswith("First: 30.up")
    assert lines[2] == "after 75 more"
    assert len(lines) == 34
    assert "30.up" in {line.split()[0] for line in lines}
    assert lines[-1] == "and 16 more"


def test_a_function_that_calls_no_module_is_refused():
    with pytest.raises(ValueError, match=r"no module returned.*Fix: .*make_functi"):
        ps.forward_report(lambda p, b, x: (p["w"] * x, b), {"w": torch.ones(1)}, {}, 1.0)


def test_the_printed_verdict_says_that_the_inputs_were_not_finite():
    apply, params, buffers = ps.make_functional(nn.Linear(1, 1))
    report = ps.forward_report(apply, params, buffers, torch.full((1, 1), math.nan))
    assert "the outermost module was given inf or NaN. First: (inputs)" in str(report)


def test_a_returned_tensor_of_a_dtype_without_arithmetic_is_left_out():
    model = module_of(lambda m, x: (x, x.to(torch.float8_e4m3fn)))
    report = ps.forward_report(*ps.make_functional(model), torch.full((1,), 2.0))
    assert [float(row.amax) for row in report.rows] == [2.0]
