"""A compiled window that is not unrolled: the bits of the unrolled one, from code that is followed
once.
"""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers import HALF, assert_close, clone, same_bits, stack
from test_lengths import GPT, POLICIES, ConvNet, batch, job
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.testing import CompileCounterWithBackend

import purescale as ps
from purescale._step.compiled_window import CAN_REPEAT

repeats = pytest.mark.skipif(not CAN_REPEAT, reason="this torch follows a region each time")
SGD, SCALE = ps.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9), ps.DynamicScale(2.0**10)


class Net(nn.Module):
    """Batch norm, a weight in two places, a norm that is called as a function."""

    def __init__(self, p=0.0):
        super().__init__()
        self.first, self.second = (nn.Conv1d(3, 3, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm1d(3) for _ in range(2))
        self.second.weight = self.first.weight
        self.gain = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(3, 11)

    def forward(self, x):
        out = F.relu(self.norms[0](self.first(x)))
        self.kept = self.norms[1](self.second(out)) + x
        return self.head(F.layer_norm(self.kept.transpose(1, 2), (3,), self.gain))


def batch_of(net, rows=3, length=5):
    if net is Net:
        return torch.randn(rows, 3, length), torch.randint(11, (rows, length))
    return batch(net, rows, length)


def compiled(step, backend="aot_eager"):
    """`step` compiled as a whole, and what it finds: (regions, calls, outputs of each) a graph."""
    found = []

    def look(graph, inputs):
        repeat = torch.ops.higher_order.invoke_subgraph
        calls = [node for node in graph.graph.nodes if node.target is repeat]
        names = {node.args[0].target for node in calls}
        outputs = [len(getattr(graph, name).graph.output_node().args[0]) for name in names]
        found.append((len(names), len(calls), *outputs))
        return lookup_backend(backend)(graph, inputs)

    torch._dynamo.reset()
    return torch.compile(step, fullgraph=True, backend=look), found


def check(step, state, window, expected, *windows, **tolerance):
    """One compiled step that is not unrolled: `expected` regions and calls, the bits of the
    unrolled one, and close to eager mode. The same for other `windows` of that kind.
    """
    windows, results = (window, *windows), []
    for unroll in (True, False):
        function, found = compiled(functools.partial(step, unroll=unroll))
        torch.manual_seed(0)
        results.append([function(clone(state), clone(window)) for window in windows])
        wanted = expected if CAN_REPEAT and not unroll else (0, 0)
        assert found[-1][:2] == wanted  # floats may have it traced again
    assert same_bits(*results)
    if tolerance:
        eager = [step(clone(state), window) for window in windows]
        assert_close(results[1], eager, equal_nan=True, **tolerance)
    return found


def small(loss_fn, params=None, buffers=(), **settings):
    """(state, step) of a loss of one vector."""
    params = params or {"w": torch.tensor([1.0, 2.0, 3.0])}
    settings = {"optimizer": SGD, "rule": SCALE, **settings}
    parts = settings["optimizer"], settings["rule"]
    state = ps.init_train_state(params, dict(buffers), *parts, guard=settings.get("guard"))
    return state, functools.partial(ps.train_step, loss_fn=loss_fn, **settings)


def weighted_sum(params, buffers, microbatch):
    return (params["w"] * microbatch).square().sum(), buffers


VECTORS = [torch.randn(3, generator=torch.Generator().manual_seed(k)) for k in range(4)]

# ---- numbers -------------------------------------------------------------------------------------

SETTINGS = [
    {"max_norm": 0.1, "clip_value": 0.01},
    {"weight_fn": lambda microbatch: (microbatch[1] > 4).sum()},
    {"weight_fn": lambda microbatch: 2.0},
    {"on_nonfinite": "drop_microbatch", "max_norm": 1.0},
    {"on_nonfinite": "drop_microbatch", "weight_fn": lambda microbatch: (microbatch[1] > 4).sum()},
    {"rule": ps.HeadroomScale(), "donate": True},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: " ".join(settings))
def test_in_eager_mode_it_changes_no_bit(settings):
    state, step = job(Net, HALF, **settings)
    window = [batch_of(Net) for _ in range(3)]
    a, b = (step(clone(state), window, unroll=unroll) for unroll in (True, False))
    assert same_bits(a, b)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("net", "policy"),
    list(zip((Net, GPT, GPT, Net, ConvNet), (*POLICIES, HALF), strict=True)),
)
def test_a_window_is_followed_once_and_has_the_bits_of_one_that_is_unrolled(net, policy):
    state, step = job(net, policy, p=0.0)
    window = [batch_of(net) for _ in range(2)]
    found = check(step, state, window, (1, 2), rtol=2e-2, atol=4e-3)
    # the loss, the buffers, the sums of the gradients: nothing else leaves a region
    expected = 1 + len(state.buffers) + len(state.params)
    assert not CAN_REPEAT or found[-1] == (1, 2, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [*SETTINGS, {"guard": ps.SpikeGuard(), "max_norm": 1.0}],
    ids=lambda settings: " ".join(settings),
)
def test_every_setting_has_the_numbers_of_eager_mode_with_and_without_an_overflow(settings):
    """Also of buffers, which go through the microbatches in order."""

    def loss_fn(params, buffers, microbatch):
        x, labels = microbatch
        loss = (params["w"] * x * buffers["n"]).square().sum() * labels.sum()
        return loss, {"n": buffers["n"] * 2 + x}

    state, step = small(loss_fn, buffers={"n": torch.ones(3)}, **settings)
    labels = torch.tensor([3, 5, 7])
    window = [(vector, labels + index) for index, vector in enumerate(VECTORS[:3])]
    bad = [window[0], (window[1][0] * float("inf"), labels), window[2]]
    check(step, state, window, (1, 3), bad, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_each_microbatch_draws_a_dropout_of_its_own():
    def loss_fn(params, buffers, microbatch):
        return F.dropout(microbatch * params["w"], 0.5).sum(), buffers

    state, step = small(loss_fn, {"w": torch.ones(300)})
    check(step, state, [torch.ones(300)] * 3, (1, 3))
    for backend in ("aot_eager", "inductor"):
        function, _ = compiled(functools.partial(step, unroll=False), backend)
        found = (
            (1 - function(state, [torch.ones(300)] * 4)[0].params["w"]).mul(10).round(decimals=3)
        )
        # a mean of four draws of 0 and 2: one mask for all would have two values
        assert set(found.unique().tolist()) == {0.0, 0.5, 1.0, 1.5, 2.0}


@pytest.mark.slow
def test_inductor_repeats_it_too():
    state, step = job(Net, HALF, donate=True, max_norm=1.0)
    function, found = compiled(functools.partial(step, unroll=False), "inductor")
    given = clone(state)
    for _ in range(2):
        window = [batch_of(Net) for _ in range(2)]
        state, info = step(state, window)
        given, same = function(given, window)
        assert_close((given, same), (state, info), rtol=2e-2, atol=4e-3)
    assert not CAN_REPEAT or [graph[:2] for graph in found] == [(1, 2)]


# ---- what is one kind of microbatch --------------------------------------------------------------


def any_sum(params, buffers, microbatch):
    leaves = torch.utils._pytree.tree_leaves(microbatch)
    return sum((params["w"].sum() * leaf).sum().square() for leaf in leaves), buffers


A, B = torch.randn(2, 3), torch.randn(2, 3)
TURNED = [t.t().contiguous().t() for t in (A, B)]
# The code of one call stands where it is called; equal code stands once.
WINDOWS = {
    "sizes": ([A, B, torch.randn(1, 3)], (1, 2)),
    "strides": ([A, TURNED[0], B, TURNED[1]], (2, 4)),
    "dtypes": ([A, B.double(), B, A.double()], (2, 4)),
    "structures": ([(A, B), [B, A], (B, A), {"x": A, "y": B}, {"y": A, "x": B}], (1, 5)),
    "0-d": ([torch.tensor(1.0), torch.tensor(2.0)], (1, 2)),
    "views of one tensor": (list(torch.randn(4, 3)), (1, 4)),
    "one tensor twice": ([(A, A), (A, B), (B, A), (B, B)], (1, 4)),
    "conjugates": ([torch.complex(A, B), torch.complex(A, B).conj()], (1, 2)),
    "numbers": ([(A, 1), (A, 2), (A, 2), (B, 1)], (0, 0)),
    "a number in one": ([(A, B), (B, A), (A, 2.0)], (1, 2)),
    "one": ([A], (0, 0)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        name if name in ("numbers", "one") else pytest.param(name, marks=pytest.mark.slow)
        for name in WINDOWS
    ],
)
def test_what_differs_in_more_than_values_has_code_of_its_own(name):
    window, expected = WINDOWS[name]

    def loss_fn(params, buffers, microbatch):
        loss, buffers = any_sum(params, buffers, microbatch)
        return loss.abs(), buffers

    state, step = small(loss_fn)
    check(step, state, window, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_lengths_that_change_are_two_graphs_with_the_numbers_of_eager_mode():
    state, step = job(GPT, "float32", p=0.0, max_norm=1.0, unroll=False)
    backend = CompileCounterWithBackend("eager")
    function = torch.compile(step, fullgraph=True, backend=backend)
    for length in (5, 33, 7):
        window = [batch_of(GPT, 3, length) for _ in range(2)]
        expected, found = step(state, window), function(state, window)
        assert_close(found, expected, rtol=1e-4, atol=1e-5)
        state = found[0]
    assert backend.frame_count == 2


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(3, 3, 3), (3, 5, 3, 5, 3)])
def test_a_loss_may_fix_a_size_that_the_compiler_made_symbolic(lengths):
    def loss_fn(params, buffers, microbatch):
        hidden = torch.zeros(2, 3)
        for step in range(microbatch.shape[1]):
            hidden = torch.tanh(hidden * params["w"] + microbatch[:, step])
        return hidden.square().sum(), buffers

    state, step = small(loss_fn, unroll=False)
    window = [torch.randn(2, length, 3) for length in lengths]
    function = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    assert_close(function(state, window), step(state, window), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_models_and_steps_in_one_graph_have_code_of_their_own():
    first, step = job(Net, "float32")
    second, other = job(ConvNet, HALF, p=0.0)

    def both(states, window, unroll=True):
        a, _ = step(states[0], window, unroll=unroll)
        a, _ = step(a, window[:2], unroll=unroll)
        return a, other(states[1], window, unroll=unroll)

    check(both, (first, second), [batch_of(Net) for _ in range(3)], (3, 8))


@pytest.mark.slow
def test_one_tensor_may_stand_in_several_places_of_a_state():
    def loss_fn(params, buffers, microbatch):
        loss = ((params["a"] * 2 + params["b"]) * microbatch * buffers["u"]).square().sum()
        return loss, {"u": buffers["u"] + 1, "v": buffers["v"] * 2}

    one = torch.tensor([1.0, 2.0, 3.0])
    state, step = small(loss_fn, {"a": one, "b": one}, {"u": one, "v": one})
    state = state._replace(params={"a": one, "b": one}, buffers={"u": one, "v": one})
    check(lambda *a, **k: step(*a, **k), state, VECTORS, (1, 4))


@pytest.mark.slow
def test_what_the_loss_closes_over_and_what_is_missing_among_the_parameters():
    factor = torch.tensor([2.0, 3.0, 4.0])

    def loss_fn(params, buffers, microbatch):
        return (params["w"] * microbatch * factor).square().sum(), buffers

    state, step = small(loss_fn, {"w": torch.ones(3), "none": None, "unused": torch.ones(2)})
    check(step, state, VECTORS, (1, 4), rtol=1e-5, atol=1e-6)


# ---- unrolled as ever ----------------------------------------------------------------------------


@pytest.mark.slow
def test_where_it_cannot_be_had_the_window_is_unrolled():
    state, step = job(Net, "float32", bn_update="window")
    check(step, state, [batch_of(Net)] * 2, (0, 0))
    state, step = small(weighted_sum)
    window = VECTORS[:2]
    check(lambda s, w, unroll: torch.vmap(functools.partial(step, unroll=unroll), (0, None))(s, w),
          stack([state, state]), window, (0, 0))  # fmt: skip

    def slope(state, window, unroll):
        def loss(params):
            return step(state._replace(params=params), window, unroll=unroll)[0].params["w"].sum()

        return torch.func.grad(loss)(state.params)

    check(slope, state, window, (0, 0))
    params = {"w": torch.ones(3, requires_grad=True)}
    check(lambda s, w, unroll: step(s._replace(params=params), w, unroll=unroll), state, window,
          (0, 0))  # fmt: skip


# ---- refused -------------------------------------------------------------------------------------


def refused(step, state, window, words):
    function, _ = compiled(functools.partial(step, unroll=False), "eager")
    with pytest.raises(Exception, match=words):
        function(state, window)


def test_it_is_true_or_false():
    state, step = small(weighted_sum)
    with pytest.raises(TypeError, match="unroll must be True or False, got 2"):
        step(state, VECTORS, unroll=2)


@repeats
def test_aux_is_refused_in_words():
    state, step = small(lambda params, buffers, m: (*weighted_sum(params, buffers, m), m))
    refused(
        step, state, VECTORS, r"loss_fn returned \(loss, new_buffers, aux\).*Fix: return no aux"
    )


class Listed(nn.Linear):
    """Reaches itself by another way than its place in the model."""

    def __init__(self, what):
        super().__init__(3, 3)
        self.bound = [self.weight if what == "parameter" else self]

    def forward(self, x):
        return F.linear(x, getattr(self.bound[0], "weight", self.bound[0]))


@repeats
@pytest.mark.parametrize("what", ["parameter", "module"])
def test_a_model_that_refers_to_its_parts_elsewhere_reads_those_of_the_call(what):
    apply, params, buffers = ps.make_functional(Listed(what))

    def loss_fn(params, buffers, microbatch):
        out, buffers = apply(params, buffers, microbatch)
        return out.sum(), buffers

    state, step = small(loss_fn, params, buffers)
    function, _ = compiled(functools.partial(step, unroll=False), "eager")
    torch.testing.assert_close(function(state, VECTORS)[0].params, step(state, VECTORS)[0].params)


class Counter:
    n = 0


SEEN, COUNTS, COUNTER, NUMBERS = [], {}, Counter(), itertools.count(1)
KEPT = 0


def appended():
    SEEN.append(1)
    return len(SEEN)


def stored():
    COUNTS["n"] = COUNTS.get("n", 0) + 1
    return COUNTS["n"]


def counted():
    COUNTER.n = COUNTER.n + 1
    return COUNTER.n


def kept():
    global KEPT
    KEPT = KEPT + 1
    return KEPT


def by_default(seen=[]):  # noqa: B006
    seen.append(1)
    return len(seen)


def counting():
    n = 0

    def count():
        nonlocal n
        n += 1
        return n

    return count


@pytest.mark.slow
@repeats
@pytest.mark.filterwarnings("ignore:Pickle, copy, and deepcopy support")  # of itertools, by torch
@pytest.mark.parametrize(
    "effect",
    [appended, stored, counted, kept, by_default, counting(), lambda: next(NUMBERS)],
)
def test_torch_itself_refuses_a_loss_that_changes_what_is_outside_of_it(effect):
    """Where this fails a promise that is broken would be wrong numbers in silence."""

    def loss_fn(params, buffers, microbatch):
        loss, buffers = weighted_sum(params, buffers, microbatch)
        return loss * effect(), buffers

    state, step = small(loss_fn)
    refused(step, state, VECTORS, "Expected FakeTensor")
