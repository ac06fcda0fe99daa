"""The battery for an optimizer: it lets through what keeps the laws, and catches what was written
to break one.
"""

import functools
import re

import pytest
import torch
from test_rule_battery import assert_caught
from torch import optim

import purescale as ps
from purescale._tree.pytree import map as tree_map
from purescale.testing import assert_optimizer

# ---- an optimizer of one's own, right, and wrong in one place each -------------------------------


class Momentum:
    """Right: a running mean of the gradients, and a count."""

    def __init__(self, lr=0.1):
        self.lr = lr

    def init(self, params):
        mean = tree_map(lambda p: torch.zeros_like(p, dtype=torch.float32), params)
        return {"mean": mean, "count": torch.zeros((), dtype=torch.int64)}

    def moved(self, mean, grad):
        return mean.clone() if grad is None else 0.9 * mean + 0.1 * grad.float()

    def stepped(self, param, grad, mean):
        return param.clone() if grad is None else (param - self.lr * mean).to(param.dtype)

    def step(self, params, grads, state):
        mean = tree_map(self.moved, state["mean"], grads)
        params = tree_map(self.stepped, params, grads, mean)
        return params, {"mean": mean, "count": state["count"] + 1}


class HandsBack(Momentum):
    def step(self, params, grads, state):
        params, new = super().step(params, grads, state)
        return params, {**new, "count": state["count"]}


class KeepsTheParameters(Momentum):
    def init(self, params):
        return {"mean": tree_map(lambda p: p, params), "count": torch.tensor(0)}


class GrowsItsState(Momentum):
    def init(self, params):
        return {}

    def step(self, params, grads, state):
        params, state = super().step(params, grads, state or super().init(params))
        return params, state


class GivesParametersOnly(Momentum):
    def step(self, params, grads, state):
        return super().step(params, grads, state)[0]


class GivesFloat32(Momentum):
    def stepped(self, param, grad, mean):
        return param.clone() if grad is None else param - self.lr * mean


class MovesWithoutAGradient(Momentum):
    def stepped(self, param, grad, mean):
        return (param - self.lr * mean).to(param.dtype)


class HandsBackWhatStays(Momentum):
    def stepped(self, param, grad, mean):
        return param if grad is None else super().stepped(param, grad, mean)


class HandsBackWhatMovesAlone(Momentum):
    def step(self, params, grads, state):
        params, new = super().step(params, grads, state)
        alone = [grad is None for grad in grads.values()].count(False) == 1
        return params, {**new, "count": state["count"]} if alone else new


class TakesNoNone(Momentum):
    def moved(self, mean, grad):
        return 0.9 * mean + 0.1 * grad.float()


class Reads(Momentum):
    def moved(self, mean, grad):
        if grad is not None and grad.isnan().any():
            return mean.clone()
        return super().moved(mean, grad)


class RemembersTheLast(Momentum):
    """The same bits when called again, and others after another call in between."""

    last, before = None, 0.0

    def step(self, params, grads, state):
        if self.last is not grads:
            self.last, self.before = grads, self.before + 1
        self.lr = 0.1 * self.before
        return super().step(params, grads, state)


class KnowsItsStateByName(Momentum):
    """A side table by the identity of a tensor, which a loaded state does not have."""

    def __init__(self):
        super().__init__()
        self.known = {}

    def init(self, params):
        state = super().init(params)
        self.known[id(state["count"])] = (state["count"], 1.0)
        return state

    def step(self, params, grads, state):
        rate = self.known.get(id(state["count"]), (None, 0.5))[1]
        self.lr = 0.1 * rate
        params, state = super().step(params, grads, state)
        self.known[id(state["count"])] = (state["count"], rate)
        return params, state


class RefusesNan(Momentum):
    def moved(self, mean, grad):
        if grad is not None and grad.isnan().any():
            raise FloatingPointError("a gradient is NaN")
        return super().moved(mean, grad)


class Prints(Momentum):
    def step(self, params, grads, state):
        torch._dynamo.graph_break()
        return super().step(params, grads, state)


class OneAtATime(Momentum):
    def stepped(self, param, grad, mean):
        if grad is None:
            return param.clone()
        return torch.zeros(param.shape, dtype=param.dtype).copy_(param - self.lr * mean)


class NeedsEveryParameter(Momentum):
    """Its `init` takes no parameter that is None."""

    def init(self, params):
        mean = {name: torch.zeros(p.shape, dtype=torch.float32) for name, p in params.items()}
        return {"mean": mean, "count": torch.zeros((), dtype=torch.int64)}


class DropsWhatIsAbsent(Momentum):
    def step(self, params, grads, state):
        params, state = super().step(params, grads, state)
        return {name: p for name, p in params.items() if p is not None}, state


@pytest.mark.parametrize(
    ("optimizer", "law", "words"),
    [
        (KeepsTheParameters, "init", r"`\.clone\(\)` what is passed through"),
        (GrowsItsState, "structure", "make everything that a step keeps in `init`"),
        (GivesParametersOnly, "structure", r"return `\(params, opt_state\)`"),
        (Reads, "reads", "torch.where"),
        (HandsBack, "pure", r"`\.clone\(\)` what is passed through"),
        (RemembersTheLast, "pure", "keep what changes in the state"),
        (MovesWithoutAGradient, "none", "do not change a parameter whose gradient is None"),
        (HandsBackWhatStays, "none", r"`\.clone\(\)` what is passed through"),
        (HandsBackWhatMovesAlone, "none", r"`\.clone\(\)` what is passed through"),
        (TakesNoNone, "none", "do not change a parameter whose gradient is None"),
        (GivesFloat32, "dtype", r"\.to\(p\.dtype\)"),
        (KnowsItsStateByName, "round_trip", "a loaded state has other tensor objects"),
        (Prints, "compile", "do not read or print"),
        (OneAtATime, "vmap", "do not read values or write into an argument"),
        (NeedsEveryParameter, "absent", "None if p is None"),
        (DropsWhatIsAbsent, "absent", "keep None for a parameter that is None"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_a_wrong_optimizer_is_caught_with_its_cure(optimizer, law, words):
    assert_caught(assert_optimizer, optimizer, law, words, ("came", "should", "params"))


def test_a_right_optimizer_of_ones_own_passes():
    assert_optimizer(Momentum())


def test_one_that_raises_on_nan_cannot_be_skipped():
    with pytest.raises(AssertionError, match=r"law `found_inf`[^$]*a gradient is NaN"):
        assert_optimizer(RefusesNan(), quirks=["reads", "compile", "vmap"])


def test_a_transformation_passes_once_it_takes_none():
    def taking(none):
        def fn(grads, state, params):
            return {
                key: None if none and g is None else -0.1 * g for key, g in grads.items()
            }, state

        return ps.from_transformation((lambda params: (), fn))

    params = {"w": torch.ones(5), "b": torch.ones(33)}
    with pytest.raises(AssertionError, match="TransformationOptimizer breaks the law `none`"):
        assert_optimizer(taking(False), params)
    assert_optimizer(taking(True), params)


def test_an_optimizer_that_takes_some_shapes_only_is_told_how_to_name_them():
    muon = ps.from_torch(optim.Muon, lr=0.1)
    with pytest.raises(AssertionError, match="breaks the law `init`") as caught:
        assert_optimizer(muon)
    cure = re.search(r"`(assert_optimizer\(optimizer, params=.*?\))`", str(caught.value))[1]
    eval(cure, {"assert_optimizer": assert_optimizer, "optimizer": muon, "torch": torch})


def test_a_quirk_of_an_optimizer_is_let_through():
    assert_optimizer(GivesFloat32(), quirks=["dtype"])


def test_what_is_no_optimizer_is_refused():
    words = r"optimizer is partial; expected.*Fix: .*`from_torch`"
    with pytest.raises(TypeError, match=words):
        assert_optimizer(functools.partial(optim.SGD))
