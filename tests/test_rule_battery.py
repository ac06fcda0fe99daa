"""assert_scale_rule and assert_guard: what is right passes, what is wrong is caught by the law that
it breaks.
"""

import dataclasses
import functools
import re
from typing import NamedTuple

import pytest
import torch
from helpers import clone
from torch import Tensor

import purescale as ps
from purescale.testing import assert_guard, assert_scale_rule

nan = float("nan")
where = torch.where


def wrong(base, name, **methods):
    """A subclass whose methods are functions of what `base` returns and of the arguments."""

    def around(method):
        return lambda self, *args: methods[method](getattr(super(kind, self), method)(*args), *args)

    kind = type(name, (base,), {method: around(method) for method in methods})
    return kind


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
        scale = where(bad, state.scale / 2, where(grow, state.scale * 2, state.scale))
        return Kept(scale, where(bad | grow, 0, state.count + 1))

    def bounded(self, state):
        usable = torch.isfinite(state.scale) & (state.scale > 0)
        scale = where(usable, state.scale, self.min_scale).clamp(self.min_scale, 2.0**20)
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


class ComesLate(Halving):
    """Uses this step's flag in the next: what unscales is not what scaled."""

    def update(self, state, bad):
        moved = where(state.count < 0, state.scale / 2, state.scale)
        return Kept(moved.clamp(self.min_scale, 2.0**20), where(bad, -1, 0).to(torch.int32))


class Remembers(Halving):
    def update(self, state, bad):
        object.__setattr__(self, "steps", getattr(self, "steps", 0) + 1)
        return super().update(state, bad)


class TiresOfCleanSteps(Halving):
    def moved(self, state, bad):
        count = where(bad, 0, state.count + 1)
        return Kept(where(bad | (count > 600), state.scale / 2, state.scale), count)


class GrowsWhatIsDamaged(Halving):
    """Repairs a scale, but for the step that grows it; and grows seldom."""

    def update(self, state, bad):
        grow = ~bad & (state.count >= 200)
        scale = self.bounded(Kept(where(bad, state.scale / 2, state.scale), state.count)).scale
        grown = where(state.scale < 2.0**20, state.scale * 2, 2.0**20)
        return Kept(where(grow, grown, scale), where(bad | grow, 0, state.count + 1))


@dataclasses.dataclass(frozen=True)
class GrowsOnTheWrongFlag(Halving):
    """Counts clean steps, and grows in the first step after enough of them, whatever its flag."""

    interval: int = 5000  # beyond what usual ones reach

    def moved(self, state, bad):
        grow = state.count >= self.interval - 1
        scale = where(bad, state.scale / 2, state.scale)
        return Kept(where(grow, state.scale * 2, scale), where(bad | grow, 0, state.count + 1))


class GrowsOnTheSecondOverflow(Halving):
    """One overflow in the state that is about to grow is let pass, the next one raises."""

    def moved(self, state, bad):
        ready = state.count >= 300
        due, after = bad & ready & (state.count < 1000), bad & (state.count >= 1000)
        scale = where(due, state.scale, where(after, state.scale * 2, state.scale))
        scale = where(bad & ~ready, state.scale / 2, scale)
        scale = where(~bad & ready, state.scale * 2, scale)
        return Kept(scale, where(due, 1000, where(bad | ready, 0, state.count + 1)))


class GrowsFromTheFloor(Halving):
    """At its smallest scale, after 400 clean steps, an overflow takes it back to the start."""

    def moved(self, state, bad):
        low = (state.scale <= self.min_scale) & (state.count >= 400)
        scale = where(bad, state.scale / 2, state.scale)
        scale = where(low & bad, 2.0**10, scale)
        grow = ~bad & (state.count >= 500)
        return Kept(where(grow, scale * 2, scale), where(bad | grow, 0, state.count + 1))


def with_scale(scale):
    return lambda new, state, bad: new._replace(scale=scale(new, state, bad))


broken = functools.partial(wrong, Halving)
BY_THIRDS = broken("ByThirds", moved=with_scale(lambda n, s, bad: where(bad, s[0] / 3, n[0])))
SAME_SCALE = broken("NeverBacksOff", moved=with_scale(lambda n, s, bad: where(bad, s[0], n[0])))
SYNCS = broken("Syncs", moved=lambda new, s, bad: (bad.item(), new)[1])
HANDS_BACK = broken("HandsBack", update=lambda new, s, bad: new._replace(count=s.count))
RAISES = broken("Raises", update=lambda new, s, bad: 1 // 0)
WIDENS = broken("Widens", update=lambda new, s, bad: new._replace(count=new.count.long()))
UNHASHABLE = type("Unhashable", (Halving,), {"__hash__": None})
IN_FLOAT64 = broken("InFloat64", init=lambda new, device=None: new._replace(scale=new[0].double()))
ON_THE_CPU = broken("OnTheCpu", init=lambda new, device=None: Halving().init())
KEEPS_A_NUMBER = broken("KeepsANumber", init=lambda new, device=None: new._replace(count=0))
OF_THE_RIGHT_FLAG = "found_inf is True if the step was bad"
WRONG_RULES = [
    (TiresOfCleanSteps, "clean", "decide by this step's found_inf"),
    (GrowsWhatIsDamaged, "damaged", "torch.where"),
    (ForgetsTheFloor, "positive", r"clamp\(min=self.min_scale\)"),
    (ForgetsTheCeiling, "finite", r"clamp\(max=self.max_scale\)"),
    (BY_THIRDS, "power_of_two", "powers of two"),
    (ComesLate, "clean", "not the one that was used"),
    (SAME_SCALE, "backs_off", "a factor below 1"),
    (SYNCS, "reads", "torch.where"),
    (HANDS_BACK, "pure", r"`\.clone\(\)`.*`state._replace"),
    (RAISES, "raises", "`check_scaler` is what stops"),
    (GrowsOnTheWrongFlag, "overflow", OF_THE_RIGHT_FLAG),
    (GrowsOnTheSecondOverflow, "overflow", OF_THE_RIGHT_FLAG),
    (GrowsFromTheFloor, "overflow", OF_THE_RIGHT_FLAG),
    (Remembers, "value", "put what changes into the state"),
    (WIDENS, "structure", "a counter as"),
    (UNHASHABLE, "value", "frozen=True"),
    (IN_FLOAT64, "init", "float32"),
    (ON_THE_CPU, "init", "device=device"),
    (KEEPS_A_NUMBER, "init", "a NamedTuple of tensors"),
]


def assert_caught(check, kind, law, words, labels=("came", "should")):
    with pytest.raises(AssertionError, match=rf"{kind.__name__} breaks the law `{law}`") as caught:
        check(kind())
    lines = str(caught.value).splitlines()
    assert re.search(rf"^  Fix: .*{words}", lines[-1])
    assert set(labels) <= {line.split()[0] for line in lines}


@pytest.mark.parametrize(("rule", "law", "words"), WRONG_RULES)
def test_a_wrong_rule_is_caught_with_its_cure(rule, law, words):
    assert_caught(assert_scale_rule, rule, law, words)


@pytest.mark.parametrize(
    ("check", "subject", "words"),
    [
        (assert_scale_rule, Halving, "rule is the class Halving"),
        (assert_scale_rule, None, "rule is NoneType"),
        (assert_guard, ps.DynamicScale, "guard is the class DynamicScale"),
    ],
)
def test_what_is_no_rule_and_no_guard_is_refused(check, subject, words):
    with pytest.raises(TypeError, match=rf"{words}; expected an object with `init.*Fix: an inst"):
        check(subject)


def test_a_right_rule_of_ones_own_passes():
    assert_scale_rule(Halving())


class Foresees(Halving):
    takes_amax = True

    def update(self, state, bad, amax):
        return super().update(state, bad | (amax * state.scale > 2.0**15))


class ForeseesTooMuch(Foresees):
    def update(self, state, bad, amax):
        scale = where(torch.isnan(amax) & ~bad, nan, super().update(state, bad, amax).scale)
        return Kept(scale, super().update(state, bad, amax).count)


@pytest.mark.slow
def test_a_rule_that_takes_amax_is_given_one():
    assert_scale_rule(Foresees())
    with pytest.raises(AssertionError, match=r"law `finite`[^$]*amax +tensor\(nan\)"):
        assert_scale_rule(ForeseesTooMuch())


@pytest.mark.slow
def test_a_quirk_is_let_through_and_must_be_seen():
    assert_scale_rule(BY_THIRDS(), quirks=["power_of_two"])
    with pytest.raises(AssertionError, match="keeps power_of_two, which quirks says it breaks"):
        assert_scale_rule(Halving(), quirks=["power_of_two"])


def test_a_quirk_that_is_no_law_is_refused():
    with pytest.raises(ValueError, match=r"quirks has \['powers'\]; expected some of init, raises"):
        assert_scale_rule(Halving(), quirks=["powers"])


def test_the_error_of_an_update_that_raises_ends_the_checks_also_as_a_quirk():
    with pytest.raises(ZeroDivisionError):
        assert_scale_rule(RAISES(), quirks=["raises"])


# ---- guards --------------------------------------------------------------------------------------


class Last(NamedTuple):
    loss: Tensor
    count: Tensor


@dataclasses.dataclass(frozen=True)
class Doubled:
    """Right: rejects a loss that is twice the last that was accepted."""

    factor: float = 2.0

    def init(self, device=None):
        loss = torch.full((), torch.inf, device=device)
        return Last(loss, torch.zeros((), dtype=torch.int32, device=device))

    def update(self, state, loss, grad_norm):
        bad = loss > self.factor * state.loss
        learn = torch.isfinite(loss) & ~bad
        new = Last(where(learn, loss, state.loss), state.count + bad.to(torch.int32))
        return new, bad


class WantsANorm(Doubled):
    def update(self, state, loss, grad_norm):
        return super().update(state, loss + 0 * grad_norm, grad_norm)


class LearnsAnything(Doubled):
    def init(self, device=None):
        return super().init(device)._replace(loss=torch.ones((), device=device))

    def update(self, state, loss, grad_norm):
        new, bad = super().update(state, loss, grad_norm)
        return new._replace(loss=loss.clone()), bad


class Nervous(Doubled):
    def update(self, state, loss, grad_norm):
        new, bad = super().update(state, loss, grad_norm)
        return new, bad | (loss > 1.95)


class Pending(NamedTuple):
    inner: Last
    bad: Tensor


class Late(Doubled):
    """Rejects a step after a spike."""

    delay = 4

    def init(self, device=None):
        pending = torch.zeros(self.delay, dtype=torch.bool, device=device)
        return Pending(super().init(device), pending)

    def update(self, state, loss, grad_norm):
        inner, bad = super().update(state.inner, loss, grad_norm)
        pending = torch.cat([state.bad[1:], bad.reshape(1)])
        return Pending(inner, pending), state.bad[0].clone()


class LateByTheNorm(Late):
    def update(self, state, loss, grad_norm):
        if not isinstance(grad_norm, Tensor):
            return Pending(*map(clone, state)), torch.zeros_like(loss, dtype=torch.bool)
        return super().update(state, grad_norm, grad_norm)


def wrong_guard(name, change):
    return wrong(Doubled, name, update=lambda new, state, *_: change(*new, state))


def in_memory_of_one_member(new, bad, state):
    return new._replace(loss=torch.zeros(()).copy_(new.loss)), bad


OF_THE_STATE = wrong_guard("HandsBack", lambda new, bad, state: (new._replace(count=state[1]), bad))
NO_PAIR = wrong_guard("NoPair", lambda new, bad, state: new._replace(count=()))
NO_FLAG = wrong_guard("NoFlag", lambda new, bad, state: (new, bad.float()))
WIDER = wrong_guard("Wider", lambda new, bad, state: (new._replace(loss=new.loss.double()), bad))
ELSEWHERE = wrong(Doubled, "Elsewhere", init=lambda new, device=None: Doubled().init())
NO_HASH = type("NoHash", (Doubled,), {"__hash__": None})
WRONG_GUARDS = [
    (OF_THE_STATE, "pure", r"\.clone\(\)"),
    (WantsANorm, "raises", r"grad_norm. is \(\)"),
    (NO_PAIR, "pair", "return new_"),
    (NO_FLAG, "pair", "return new_state"),
    (WIDER, "structure", "every field as it was"),
    (LearnsAnything, "finite", "finite numbers only"),
    (Nervous, "steady", "after a warmup"),
    (Late, "timely", "of this call"),
    (LateByTheNorm, "timely", "of this call"),
    (ELSEWHERE, "init", "device=device"),
    (wrong_guard("OneAtATime", in_memory_of_one_member), "vmap", "write into an argument"),
    (NO_HASH, "value", "frozen=True"),
]


@dataclasses.dataclass(frozen=True)
class InARow(Doubled):
    """Right: accepts a spike that stands alone."""

    def update(self, state, loss, grad_norm):
        new, spike = super().update(state, loss, grad_norm)
        row = where(spike, state.count + 1, 0)
        return Last(new.loss, row), spike & (row > 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "guard", [Doubled(), InARow(), ps.SpikeGuard(warmup=200), ps.SpikeGuard(patience=1)], ids=repr
)
def test_a_right_guard_passes(guard):
    assert_guard(guard)


@pytest.mark.parametrize(("guard", "law", "words"), WRONG_GUARDS)
def test_a_wrong_guard_is_caught_with_its_cure(guard, law, words):
    assert_caught(assert_guard, guard, law, words)


def test_a_quirk_of_a_guard_is_let_through():
    assert_guard(Nervous(), quirks=["steady"])
