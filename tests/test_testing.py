"""The checks for users: each lets through what keeps its law, and catches what was written to break
it.
"""

import dataclasses
import re
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import find, given, settings
from torch import Tensor

import purescale as ps
from purescale import testing
from purescale._tree import tree as _tree
from purescale.testing import (
    Untouched,
    assert_pure,
    assert_scale_rule,
    assert_single_graph,
    assert_sync_free,
    assert_vmap_equals_loop,
    grad_trees,
    overflow_runs,
    params_and_grads,
    same_bits,
    scale_rules,
    scaler_states,
    shares_memory,
)

nan, inf = float("nan"), float("inf")


# ---- a rule of one's own, right, and wrong in one place each -------------------------------------


class Kept(NamedTuple):
    scale: Tensor
    count: Tensor


@dataclasses.dataclass(frozen=True)
class Halving:
    """Right: half on an overflow, twice after three clean steps, between bounds."""

    min_scale: float = 2.0**-10

    def init(self, device=None):
        return Kept(
            torch.full((), 2.0**10, device=device),
            torch.zeros((), dtype=torch.int32, device=device),
        )

    def moved(self, state, bad):
        grow = ~bad & (state.count >= 2)
        scale = torch.where(bad, state.scale / 2, torch.where(grow, state.scale * 2, state.scale))
        return Kept(scale, torch.where(bad | grow, 0, state.count + 1))

    def bounded(self, state):
        usable = torch.isfinite(state.scale) & (state.scale > 0)
        scale = torch.where(usable, state.scale, self.min_scale).clamp(self.min_scale, 2.0**20)
        return Kept(scale, state.count)

    def update(self, state, bad):
        return self.bounded(self.moved(self.bounded(state), bad))


class ForgetsTheFloor(Halving):
    def update(self, state, bad):
        return self.moved(state, bad)._replace(scale=self.moved(state, bad).scale.clamp(max=2**20))


class ForgetsTheCeiling(Halving):
    def update(self, state, bad):
        new = self.moved(self.bounded(state)._replace(scale=state.scale), bad)
        return new._replace(scale=new.scale.clamp(min=self.min_scale))


class ByThirds(Halving):
    def update(self, state, bad):
        new = super().update(state, bad)
        return self.bounded(Kept(torch.where(bad, state.scale / 3, new.scale), new.count))


class ComesLate(Halving):
    """Uses this step's flag in the next: what unscales is not what scaled."""

    def update(self, state, bad):
        before = state.count < 0
        moved = torch.where(before, state.scale / 2, state.scale).clamp(self.min_scale, 2.0**20)
        return Kept(moved, torch.where(bad, -1, 0).to(torch.int32))


class TheOtherWayOn(Halving):
    def update(self, state, bad):
        return super().update(state, ~bad)


class NeverBacksOff(Halving):
    def update(self, state, bad):
        new = super().update(state, bad)
        return new._replace(scale=torch.where(bad, state.scale, new.scale))


class Syncs(Halving):
    def update(self, state, bad):
        return super().update(state, torch.tensor(bool(bad.item())))


class Mutates(Halving):
    def update(self, state, bad):
        state.count.add_(1)
        return super().update(state, bad)


class HandsBack(Halving):
    def update(self, state, bad):
        return super().update(state, bad)._replace(count=state.count)


class Raises(Halving):
    def update(self, state, bad):
        if state.scale.item() <= self.min_scale:
            raise FloatingPointError("the scale is too small")
        return super().update(state, bad)


class Remembers(Halving):
    def update(self, state, bad):
        object.__setattr__(self, "steps", getattr(self, "steps", 0) + 1)
        return super().update(state, bad)


class OneAtATime(Halving):
    """Writes into memory that holds one member only."""

    def update(self, state, bad):
        new = super().update(state, bad)
        scale = torch.zeros((), device=bad.device)
        scale.copy_(new.scale)
        return Kept(scale, new.count)


class ChangesItsDtype(Halving):
    def update(self, state, bad):
        new = super().update(state, bad)
        return new._replace(count=new.count.long())


class Unhashable(Halving):
    __hash__ = None


class InFloat64(Halving):
    def init(self, device=None):
        return super().init(device)._replace(scale=torch.tensor(8.0, dtype=torch.float64))


class OnTheCpu(Halving):
    def init(self, device=None):
        return super().init("cpu")


class KeepsANumber(Halving):
    def init(self, device=None):
        return super().init(device)._replace(count=0)


class StartsAgainAtTheTop(Halving):
    """Comes back from inf, but lets the scale go there."""

    def update(self, state, bad):
        new = self.moved(state, bad)
        good = torch.isfinite(new.scale) & (new.scale > 0)
        return new._replace(scale=torch.where(good, new.scale, 1.0).clamp(min=self.min_scale))


class TiresOfCleanSteps(Halving):
    def update(self, state, bad):
        count = torch.where(bad, 0, state.count + 1)
        lower = bad | (count > 600)
        scale = torch.where(lower, state.scale / 2, torch.clamp(state.scale, max=2.0**20))
        usable = torch.isfinite(scale) & (scale > 0)
        return Kept(torch.where(usable, scale, 1.0).clamp(self.min_scale, 2.0**20), count)


class GrowsWhatIsDamaged(Halving):
    """Repairs a scale, but for the step that grows it; and grows seldom."""

    def update(self, state, bad):
        grow = ~bad & (state.count >= 200)
        scale = torch.where(bad, state.scale / 2, state.scale)
        usable = torch.isfinite(scale) & (scale > 0)
        scale = torch.where(usable, scale, 1.0).clamp(self.min_scale, 2.0**20)
        grown = torch.where(state.scale < 2.0**20, state.scale * 2, 2.0**20)
        return Kept(torch.where(grow, grown, scale), torch.where(bad | grow, 0, state.count + 1))


class ReplacesByANumber(Halving):
    def update(self, state, bad):
        return state._replace(scale=1024.0)


class ReplacesInFloat64(Halving):
    def update(self, state, bad):
        return state._replace(scale=super().update(state, bad).scale.double())


class GrowsOnTheWrongFlag(Halving):
    """Counts clean steps, and grows in the first step after enough of them, whatever its flag."""

    interval = 200

    def update(self, state, bad):
        return self.bounded(self.grown(self.bounded(state), bad))

    def grown(self, state, bad):
        grow = state.count >= self.interval - 1
        scale = torch.where(bad, state.scale / 2, state.scale)
        scale = torch.where(grow, state.scale * 2, scale)
        return Kept(scale, torch.where(bad | grow, 0, state.count + 1))


@dataclasses.dataclass(frozen=True)
class GrowsOnceOnAnOverflow(GrowsOnTheWrongFlag):
    """The same, beyond what usual intervals reach."""

    interval: int = 5000


class GrowsOnTheSecondOverflow(Halving):
    """One overflow in the state that is about to grow is let pass, the next one raises."""

    def update(self, state, bad):
        state = self.bounded(state)
        ready = state.count >= 300
        due, after = bad & ready & (state.count < 1000), bad & (state.count >= 1000)
        scale = torch.where(due, state.scale, torch.where(after, state.scale * 2, state.scale))
        scale = torch.where(bad & ~ready, state.scale / 2, scale)
        scale = torch.where(~bad & ready, state.scale * 2, scale)
        count = torch.where(due, 1000, torch.where(bad | ready, 0, state.count + 1))
        return self.bounded(Kept(scale, count))


class GrowsFromTheFloor(Halving):
    """At its smallest scale, after 400 clean steps, an overflow takes it back to the start."""

    def update(self, state, bad):
        state = self.bounded(state)
        low = (state.scale <= self.min_scale) & (state.count >= 400)
        scale = torch.where(bad, state.scale / 2, state.scale)
        scale = torch.where(low & bad, 2.0**10, scale)
        grow = ~bad & (state.count >= 500)
        scale = torch.where(grow, scale * 2, scale)
        return self.bounded(Kept(scale, torch.where(bad | grow, 0, state.count + 1)))


@pytest.mark.parametrize(
    ("rule", "law", "words"),
    [
        (StartsAgainAtTheTop, "clean", "decide by this step's found_inf"),
        (TiresOfCleanSteps, "clean", "decide by this step's found_inf"),
        (GrowsWhatIsDamaged, "damaged", "torch.where"),
        (ForgetsTheFloor, "positive", r"clamp\(min=self.min_scale\)"),
        (ForgetsTheCeiling, "finite", r"clamp\(max=self.max_scale\)"),
        (ByThirds, "power_of_two", "powers of two"),
        (ComesLate, "clean", "not the one that scaled"),
        (TheOtherWayOn, "clean", "found_inf, True where it was bad"),
        (NeverBacksOff, "backs_off", "a factor below 1"),
        (Syncs, "reads", "torch.where"),
        (Mutates, "pure", "methods that end in `_`"),
        (HandsBack, "pure", r"`\.clone\(\)`.*`state._replace"),
        (ReplacesByANumber, "structure", "full_like"),
        (ReplacesInFloat64, "structure", r"\.to\(scaler.scale.dtype\)"),
        (GrowsOnTheWrongFlag, "overflow", "found_inf is True where the step was bad"),
        (GrowsOnceOnAnOverflow, "overflow", "found_inf is True where the step was bad"),
        (GrowsOnTheSecondOverflow, "overflow", "found_inf is True where the step was bad"),
        (GrowsFromTheFloor, "overflow", "found_inf is True where the step was bad"),
        (Raises, "reads", "torch.where"),
        (Remembers, "value", "belongs into the state"),
        (ChangesItsDtype, "structure", "a counter as"),
        (Unhashable, "value", "frozen=True"),
        (InFloat64, "init", "float32"),
        (OnTheCpu, "init", "device=device"),
        (KeepsANumber, "init", "a NamedTuple of tensors"),
        (OneAtATime, "vmap", "as for one state"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_a_wrong_rule_is_caught_with_its_cure(rule, law, words):
    with pytest.raises(AssertionError, match=rf"{rule.__name__} breaks the law `{law}`") as caught:
        assert_scale_rule(rule())
    lines = str(caught.value).splitlines()
    cure = lines[-1].partition("Fix: ")
    assert cure[1]
    assert re.search(words, cure[2])
    assert any(line.startswith("  came ") for line in lines)
    assert any(line.startswith("  should ") for line in lines)


@pytest.mark.parametrize(("rule", "words"), [(Halving, "the class Halving"), (None, "NoneType")])
def test_what_is_no_rule_is_refused(rule, words):
    with pytest.raises(
        TypeError, match=rf"rule is {words}.*Fix: `assert_scale_rule\(MyRule\(\)\)`"
    ):
        assert_scale_rule(rule)


def test_a_right_rule_of_ones_own_passes():
    assert_scale_rule(Halving())


def test_the_counterexample_can_be_read():
    with pytest.raises(AssertionError) as caught:
        assert_scale_rule(ComesLate())
    assert str(caught.value).splitlines() == [
        "ComesLate breaks the law `clean`",
        "  state   Kept(scale=1024.0, count=-1)",
        "  flag    False",
        "  came    scale=512.0",
        "  should  at least 1024.0",
        "  Fix: decide by this step's found_inf, True where it was bad, in this update: a scale "
        "that moves a step late is not the one that scaled.",
    ]


class Foresees(Halving):
    takes_amax = True

    def update(self, state, bad, amax):
        return super().update(state, bad | (amax * state.scale > 2.0**15))


class ForeseesTooMuch(Foresees):
    def update(self, state, bad, amax):
        scale = torch.where(torch.isnan(amax) & ~bad, nan, super().update(state, bad, amax).scale)
        return Kept(scale, super().update(state, bad, amax).count)


def test_a_rule_that_takes_amax_is_given_one():
    assert_scale_rule(Foresees())
    with pytest.raises(AssertionError, match=r"law `finite`[^$]*amax +nan"):
        assert_scale_rule(ForeseesTooMuch())


def test_a_quirk_is_let_through_and_must_be_seen():
    assert_scale_rule(ByThirds(), quirks=["power_of_two"])
    with pytest.raises(AssertionError, match="keeps power_of_two, which quirks says it breaks"):
        assert_scale_rule(Halving(), quirks=["power_of_two"])
    with pytest.raises(ValueError, match=r"quirks has \['powers'\]; expected some of value, init"):
        assert_scale_rule(Halving(), quirks=["powers"])


# ---- pure ----------------------------------------------------------------------------------------


def test_what_is_pure_passes_and_its_result_comes_back():
    params = {"w": torch.ones(2)}
    assert same_bits(assert_pure(lambda p: {"w": p["w"] * 2}, params), {"w": torch.full((2,), 2.0)})


drawn = []
IMPURE = {
    "writes": (lambda p: p["w"].mul_(2) * 1, r"written into: \[0\]\['w'\].*Fix: `x = x \+ 1`"),
    "takes it back": (lambda p: p["w"].add_(0) * 1, "written into"),
    "aliases": (lambda p: p["w"][:1], r"memory of argument\[0\]\['w'\].*Fix: `.clone\(\)`"),
    "hands back": (lambda p: p, "stands in the memory"),
    "draws": (lambda p: p["w"] + torch.rand(2), r"random numbers.*Fix: a torch.Generator"),
    "remembers": (
        lambda p: (drawn.append(1), p["w"] + len(drawn))[1],
        r"the same arguments gave .*Fix: keep it in the state",
    ),
}


@pytest.mark.parametrize("name", IMPURE)
def test_what_is_not_pure_is_caught(name):
    fn, words = IMPURE[name]
    with pytest.raises(AssertionError, match=words):
        assert_pure(fn, {"w": torch.ones(2)})


def test_untouched_sees_what_was_written_and_lets_errors_through():
    with pytest.raises(AssertionError, match=r"\['b'\]"), Untouched(tree := {"b": torch.ones(1)}):
        tree["b"][0] = 2
    with pytest.raises(KeyError), Untouched(tree):
        {}[tree["b"].add_(1)]


# ---- nothing read --------------------------------------------------------------------------------

x = torch.tensor([1.0, 0.0, 2.0])
SYNCS = {
    "item": lambda: x.sum().item(),
    "float": lambda: float(x[0]),
    "int": lambda: int(x[0]),
    "bool": lambda: bool(x[0]),
    "if": lambda: 1 if x.any() else 2,
    "tolist": lambda: x.tolist(),
    "numpy": lambda: x.numpy(),
    "nonzero": lambda: x.nonzero(),
    "where of one": lambda: torch.where(x > 0),
    "boolean indexing": lambda: x[x > 0],
    "boolean assignment": lambda: torch.zeros(3).index_put((x > 0,), torch.ones(2)),
    "masked_select": lambda: x.masked_select(x > 0),
    "unique": lambda: x.unique(),
    "equal": lambda: torch.equal(x, x),
    "allclose": lambda: torch.allclose(x, x),
    "in": lambda: 1.0 in x,
    "repeat_interleave": lambda: x.repeat_interleave(torch.tensor([1, 2, 3])),
}


@pytest.mark.parametrize("name", SYNCS)
def test_what_reads_is_caught_where_it_reads(name):
    words = r"value was read: .* in test_testing.py:\d+, `.*Fix: `torch.where"
    with pytest.raises(AssertionError, match=words):
        assert_sync_free(SYNCS[name])


def test_what_reads_nothing_passes():
    assert_sync_free(lambda: torch.where(x > 0, x, 0).cumsum(0)[torch.tensor([0, 1])])
    assert_sync_free(lambda: x.repeat_interleave(torch.tensor([1, 2, 3]), output_size=6))
    assert_sync_free(ps.grad_report, {"a": x, "b": torch.ones(100)})


def test_the_look_at_a_sum_that_a_cpu_allows_is_no_read():
    grads = {"w": torch.ones(3)}
    grads, bad = assert_sync_free(ps.unscale_and_check, ps.DynamicScale().init(), grads)
    assert not bad


# ---- one graph, members --------------------------------------------------------------------------


def test_one_graph_for_many_calls_passes():
    calls = [(torch.tensor(float(i)), torch.tensor(i > 1)) for i in range(4)]
    found = assert_single_graph(lambda a, bad: torch.where(bad, a, -a), *calls)
    assert [t.item() for t in found] == [0, -1, 2, 3]


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda a, n: a + 1 if a.sum() > 0 else a, r"not one graph.*Fix: torch.where"),
        (lambda a, n: a * n, r"traced again.*Fix: keep it as a 0-d tensor"),
    ],
)
def test_a_branch_and_a_number_that_changes_are_caught(fn, words):
    with pytest.raises(AssertionError, match=words):
        assert_single_graph(fn, *((torch.ones(2), n) for n in (1.5, 2.5, 3.5)))


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda a: a if a.sum() > 0 else -a, r"torch.vmap does not take it.*Fix: torch.where"),
        (lambda a: a / a.new_tensor(torch.is_tensor(a) and a._is_view()), "member 0 is"),
    ],
)
def test_what_vmap_does_not_take_or_gives_otherwise_is_caught(fn, words):
    with pytest.raises(AssertionError, match=words):
        assert_vmap_equals_loop(fn, torch.ones(2, 3))


def test_what_equals_a_loop_passes_and_comes_back():
    a = torch.randn(3, 4, 4)
    assert same_bits(assert_vmap_equals_loop(torch.neg, a), -a)
    assert_vmap_equals_loop(lambda m: {"x": m @ m, "n": m.sum()}, a, rtol=1e-4, atol=1e-5)


# ---- bits and memory -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (torch.tensor(nan), torch.tensor(nan), True),
        (torch.tensor(0.0), torch.tensor(-0.0), False),
        (torch.tensor(1.0), torch.tensor(1.0, dtype=torch.float64), False),
        (torch.tensor(1.0), 1.0, False),
        (1, 1, True),
        (1, True, False),
        ({"a": 1}, {"b": 1}, False),
        ([torch.ones(1)], (torch.ones(1),), False),
        (torch.ones(2).to_sparse(), torch.ones(2), False),
        (torch.ones(2).to_sparse(), torch.ones(2).to_sparse(), True),
        (torch.ones(2) * 1j, torch.ones(2) * 1j, True),
        (torch.ones(1).to(torch.float8_e5m2), torch.zeros(1).to(torch.float8_e5m2), False),
    ],
    ids=str,
)
def test_same_bits_tells_what_equality_does_not(a, b, same):
    assert same_bits(a, b) is same


def test_memory_is_shared_by_views_and_by_sparse_values():
    a = torch.ones(4)
    assert shares_memory({"x": a}, [a[2:]])
    assert not shares_memory(a, a.clone())
    sparse = torch.sparse_coo_tensor([[0, 1, 2, 3]], a, (4,))
    assert shares_memory(sparse, a)


# ---- strategies ----------------------------------------------------------------------------------


@given(scale_rules(), st.data())
@settings(max_examples=30)
def test_rules_and_their_states_can_be_drawn(rule, data):
    state = data.draw(scaler_states(rule))
    assert type(state) is type(rule.init())
    new = rule.update(state, torch.tensor(data.draw(st.booleans())))
    assert rule.init().scale > 0
    assert new.scale > 0


REACHED = {
    "inf": lambda t: t.isinf().any(),
    "nan": lambda t: t.isnan().any(),
    "subnormal": lambda t: ((t != 0) & (t.abs() < torch.finfo(t.dtype).tiny)).any(),
    "negative zero": lambda t: ((t == 0) & t.signbit()).any(),
    "half": lambda t: t.dtype is torch.float16,
    "bfloat16": lambda t: t.dtype is torch.bfloat16,
    "float64": lambda t: t.dtype is torch.float64,
    "0-d": lambda t: t.ndim == 0,
    "empty": lambda t: t.numel() == 0,
}


@pytest.mark.slow
@pytest.mark.parametrize("what", REACHED)
def test_gradients_reach_every_corner(what):
    def reached(tree):
        return any(bool(REACHED[what](leaf)) for leaf in _tree.tensors(tree))

    assert reached(find(grad_trees(), reached, settings=settings(max_examples=2000, database=None)))


def test_gradients_reach_none():
    def reached(tree):
        return None in [leaf for leaf in _tree.flatten(tree)[0] if leaf is None]

    find(grad_trees(), reached, settings=settings(max_examples=2000, database=None))


LIKE = {"a": [torch.ones(2, 3).half(), None], "b": (torch.tensor(1.0), torch.ones(0))}


@given(grad_trees(like=LIKE))
@settings(max_examples=10)
def test_gradients_like_a_tree_have_its_structure_shapes_and_dtypes(grads):
    assert _tree.names(grads) == _tree.names(LIKE)
    for ours, theirs in zip(_tree.tensors(grads), _tree.tensors(LIKE), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)


@given(params_and_grads(), st.booleans())
@settings(max_examples=20)
def test_parameters_and_gradients_make_a_step_that_is_pure(drawn, bad):
    params, grads = drawn
    sgd = ps.from_torch(torch.optim.SGD, lr=0.5, foreach=False)
    stepped, _ = assert_pure(ps.maybe_step, sgd, params, grads, sgd.init(params), torch.tensor(bad))
    if bad:
        assert same_bits(stepped, params)


@given(overflow_runs(), overflow_runs(17))
@settings(max_examples=20)
def test_runs_are_flags_of_the_size_asked_for(any_size, seventeen):
    assert 1 <= len(any_size) <= 40
    assert len(seventeen) == 17
    assert {type(bad) for bad in any_size + seventeen} == {bool}


def test_what_is_public_is_there():
    assert all(hasattr(testing, name) for name in testing.__all__)
    assert "testing" not in ps.__all__
