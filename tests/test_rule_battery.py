"""assert_scale_rule: a right rule passes, a wrong one is caught by the law that it breaks."""

import dataclasses
import re
from typing import NamedTuple

import pytest
import torch
from helpers import clone
from test_laws import nan
from torch import Tensor

import purescale as ps
from purescale.testing import assert_guard, assert_scale_rule


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
        (TiresOfCleanSteps, "clean", "decide by this step's found_inf"),
        (GrowsWhatIsDamaged, "damaged", "torch.where"),
        (ForgetsTheFloor, "positive", r"clamp\(min=self.min_scale\)"),
        (ForgetsTheCeiling, "finite", r"clamp\(max=self.max_scale\)"),
        (ByThirds, "power_of_two", "powers of two"),
        (ComesLate, "clean", "not the one that was used"),
        (NeverBacksOff, "backs_off", "a factor below 1"),
        (Syncs, "reads", "torch.where"),
        (Mutates, "pure", "methods that end in `_`"),
        (HandsBack, "pure", r"`\.clone\(\)`.*`state._replace"),
        (ReplacesByANumber, "structure", "full_like"),
        (GrowsOnTheWrongFlag, "overflow", "found_inf is True if the step was bad"),
        (GrowsOnceOnAnOverflow, "overflow", "found_inf is True if the step was bad"),
        (GrowsOnTheSecondOverflow, "overflow", "found_inf is True if the step was bad"),
        pytest.param(
            GrowsFromTheFloor,
            *("overflow", "found_inf is True if the step was bad"),
            marks=pytest.mark.slow,  # the last place in which the battery looks
        ),
        (Remembers, "value", "put what changes into the state"),
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
    assert re.search(rf"^  Fix: .*{words}", lines[-1])
    assert any(line.startswith("  came ") for line in lines)
    assert any(line.startswith("  should ") for line in lines)


@pytest.mark.parametrize(("rule", "words"), [(Halving, "the class Halving"), (None, "NoneType")])
def test_what_is_no_rule_is_refused(rule, words):
    with pytest.raises(TypeError, match=rf"rule is {words}.*Fix: `assert_scale_rule\(MyRule\(\)\)"):
        assert_scale_rule(rule)


def test_a_right_rule_of_ones_own_passes():
    assert_scale_rule(Halving())


class Foresees(Halving):
    takes_amax = True

    def update(self, state, bad, amax):
        return super().update(state, bad | (amax * state.scale > 2.0**15))


class ForeseesTooMuch(Foresees):
    def update(self, state, bad, amax):
        scale = torch.where(torch.isnan(amax) & ~bad, nan, super().update(state, bad, amax).scale)
        return Kept(scale, super().update(state, bad, amax).count)


@pytest.mark.slow
def test_a_rule_that_takes_amax_is_given_one():
    assert_scale_rule(Foresees())
    with pytest.raises(AssertionError, match=r"law `finite`[^$]*amax +nan"):
        assert_scale_rule(ForeseesTooMuch())


@pytest.mark.slow
def test_a_quirk_is_let_through_and_must_be_seen():
    assert_scale_rule(ByThirds(), quirks=["power_of_two"])
    with pytest.raises(AssertionError, match="keeps power_of_two, which quirks says it breaks"):
        assert_scale_rule(Halving(), quirks=["power_of_two"])
    with pytest.raises(ValueError, match=r"quirks has \['powers'\]; expected some of init, raises"):
        assert_scale_rule(Halving(), quirks=["powers"])


@dataclasses.dataclass(frozen=True)
class Raising(Halving):
    def update(self, scaler, found_inf):
        raise RuntimeError("no")


def test_to_raise_cannot_be_a_quirk():
    with pytest.raises(AssertionError, match="a rule such as Raising must keep this law"):
        assert_scale_rule(Raising(), quirks=["raises"])


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
        new = Last(torch.where(learn, loss, state.loss), state.count + bad.to(torch.int32))
        return new, bad


class GuardSyncs(Doubled):
    def update(self, state, loss, grad_norm):
        return super().update(state, torch.tensor(loss.item()), grad_norm)


class GuardHandsBack(Doubled):
    def update(self, state, loss, grad_norm):
        new, bad = super().update(state, loss, grad_norm)
        return new._replace(count=state.count), bad


class WantsANorm(Doubled):
    def update(self, state, loss, grad_norm):
        return super().update(state, loss + 0 * grad_norm, grad_norm)


class NoPair(Doubled):
    def update(self, state, loss, grad_norm):
        return super().update(state, loss, grad_norm)[0]


class NoFlag(Doubled):
    def update(self, state, loss, grad_norm):
        new, bad = super().update(state, loss, grad_norm)
        return new, bad.float()


class Widens(Doubled):
    def update(self, state, loss, grad_norm):
        new, bad = super().update(state, loss, grad_norm)
        return new._replace(loss=new.loss.double()), bad


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


class GuardRemembers(Doubled):
    def update(self, state, loss, grad_norm):
        object.__setattr__(self, "steps", getattr(self, "steps", 0) + 1)
        return super().update(state, loss, grad_norm)


class Elsewhere(Doubled):
    def init(self, device=None):
        return super().init()


class GuardOneAtATime(Doubled):
    def update(self, state, loss, grad_norm):
        new, bad = super().update(state, loss, grad_norm)
        kept = torch.zeros(())
        kept.copy_(new.loss)
        return Last(kept, new.count), bad


class GuardUnhashable(Doubled):
    __hash__ = None


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


WRONG = [
    (GuardSyncs, "reads", "torch.where"),
    (GuardHandsBack, "pure", r"\.clone\(\)"),
    (WantsANorm, "raises", r"grad_norm. is \(\)"),
    (NoPair, "pair", "return new_state"),
    (NoFlag, "pair", "return new_state"),
    (Widens, "structure", "every field as it was"),
    (LearnsAnything, "finite", "finite numbers only"),
    (Nervous, "steady", "after a warmup"),
    (Late, "timely", "of this call"),
    (LateByTheNorm, "timely", "of this call"),
    (GuardRemembers, "value", "put what changes into the state"),
    (Elsewhere, "init", "device=device"),
    (GuardOneAtATime, "vmap", "as for one state"),
    (GuardUnhashable, "value", "frozen=True"),
]


@dataclasses.dataclass(frozen=True)
class InARow(Doubled):
    """Right: accepts a spike that stands alone."""

    def update(self, state, loss, grad_norm):
        new, spike = super().update(state, loss, grad_norm)
        row = torch.where(spike, state.count + 1, 0)
        return Last(new.loss, row), spike & (row > 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "guard", [Doubled(), InARow(), ps.SpikeGuard(warmup=200), ps.SpikeGuard(patience=1)], ids=repr
)
def test_a_right_guard_passes(guard):
    assert_guard(guard)


@pytest.mark.parametrize(("kind", "law", "fix"), WRONG, ids=lambda value: str(value))
def test_a_wrong_guard_is_caught_with_its_cure(kind, law, fix):
    with pytest.raises(AssertionError) as caught:
        assert_guard(kind())
    report = str(caught.value)
    assert report.startswith(f"{kind.__name__} breaks the law `{law}`")
    assert re.search(rf"came .*should .*Fix: .*{fix}", report, re.S), report


def test_a_quirk_is_let_through_and_must_be_seen_of_a_guard():
    assert_guard(Nervous(), quirks=["steady"])
    with pytest.raises(AssertionError, match="Doubled keeps steady, which quirks says it breaks"):
        assert_guard(Doubled(), quirks=["steady"])


@pytest.mark.parametrize("guard", [ps.SpikeGuard, ps.DynamicScale, None])
def test_what_is_no_guard_is_refused(guard):
    with pytest.raises(TypeError, match=r"guard is .*expected an object with `init.*Fix: "):
        assert_guard(guard)
