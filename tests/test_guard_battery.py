"""assert_guard: a right guard passes, a wrong one is caught by the law that it breaks."""

import dataclasses
import re
from typing import NamedTuple

import pytest
import torch
from helpers import clone
from torch import Tensor

import purescale as ps
from purescale.testing import assert_guard


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


class Syncs(Doubled):
    def update(self, state, loss, grad_norm):
        return super().update(state, torch.tensor(loss.item()), grad_norm)


class HandsBack(Doubled):
    def update(self, state, loss, grad_norm):
        new, bad = super().update(state, loss, grad_norm)
        return new._replace(count=state.count), bad


class Mutates(Doubled):
    def update(self, state, loss, grad_norm):
        state.count.add_(1)
        return super().update(state, loss, grad_norm)


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


class Remembers(Doubled):
    def update(self, state, loss, grad_norm):
        object.__setattr__(self, "steps", getattr(self, "steps", 0) + 1)
        return super().update(state, loss, grad_norm)


class Elsewhere(Doubled):
    def init(self, device=None):
        return super().init()


class OneAtATime(Doubled):
    def update(self, state, loss, grad_norm):
        new, bad = super().update(state, loss, grad_norm)
        kept = torch.zeros(())
        kept.copy_(new.loss)
        return Last(kept, new.count), bad


class Unhashable(Doubled):
    __hash__ = None


class Pending(NamedTuple):
    inner: Last
    bad: Tensor


class Late(Doubled):
    """Rejects the step after a spike."""

    delay = 1

    def init(self, device=None):
        pending = torch.zeros(self.delay, dtype=torch.bool, device=device)
        return Pending(super().init(device), pending)

    def update(self, state, loss, grad_norm):
        inner, bad = super().update(state.inner, loss, grad_norm)
        pending = torch.cat([state.bad[1:], bad.reshape(1)])
        return Pending(inner, pending), state.bad[0].clone()


class Later(Late):
    delay = 4


class LateByTheNorm(Late):
    def update(self, state, loss, grad_norm):
        if not isinstance(grad_norm, Tensor):
            return Pending(*map(clone, state)), torch.zeros_like(loss, dtype=torch.bool)
        return super().update(state, grad_norm, grad_norm)


WRONG = [
    (Syncs, "reads", "torch.where"),
    (HandsBack, "pure", r"\.clone\(\)"),
    (Mutates, "pure", "of methods that end"),
    (WantsANorm, "raises", r"grad_norm. is \(\)"),
    (NoPair, "pair", "return new_state"),
    (NoFlag, "pair", "return new_state"),
    (Widens, "structure", "every field as it was"),
    (LearnsAnything, "finite", "finite numbers only"),
    (Nervous, "steady", "after a warmup"),
    (Late, "timely", "of this call"),
    (Later, "timely", "of this call"),
    (LateByTheNorm, "timely", "of this call"),
    (Remembers, "value", "put what changes into the state"),
    (Elsewhere, "init", "device=device"),
    (OneAtATime, "vmap", "as for one state"),
    (Unhashable, "value", "frozen=True"),
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


def test_a_quirk_is_let_through_and_must_be_seen():
    assert_guard(Nervous(), quirks=["steady"])
    with pytest.raises(AssertionError, match="Doubled keeps steady, which quirks says it breaks"):
        assert_guard(Doubled(), quirks=["steady"])


@pytest.mark.parametrize("guard", [ps.SpikeGuard, ps.DynamicScale, None])
def test_what_is_no_guard_is_refused(guard):
    with pytest.raises(TypeError, match=r"guard is .*expected an object with `init.*Fix: "):
        assert_guard(guard)
