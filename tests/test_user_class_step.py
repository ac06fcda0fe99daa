"""Classes with a `step` of their own, beside the same classes in torch's loop."""

import contextlib
import functools

import pytest
import torch
from helpers import examples, same_bits, tensors
from hypothesis import given
from hypothesis import strategies as st

import purescale as ps
from purescale._torch import tracing
from purescale.testing import assert_pure

TWO = torch.ones(2)


class Lion(torch.optim.Optimizer):
    """Written as users write them, with state made in the first step and a Python counter."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"], state["calls"], state["scale"] = torch.zeros_like(p), 0, 1.0
                state["calls"] += 1
                state["scale"] *= 0.9
                if state["calls"] % 2 == 0:
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                update = (beta1 * state["m"] + (1 - beta1) * p.grad).sign()
                p.add_(update * state["scale"], alpha=-group["lr"])
                state["m"].lerp_(p.grad, 1 - beta2)


def test_a_rate_that_a_class_needs_is_asked_for():
    class Plain(torch.optim.Optimizer):
        def __init__(self, params, lr):
            super().__init__(params, {"lr": lr})

    with pytest.raises(TypeError, match=r"lr must be a number.*got None\. Fix: lr=1e-3"):
        ps.from_torch(Plain)


class Cautious(torch.optim.AdamW):
    """A subclass that changes gradients before torch's step."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad = p.grad.clamp(-0.5, 0.5)
        return super().step(closure)


class Renamed(torch.optim.AdamW):
    """A subclass that changes a default and nothing of the step."""

    def __init__(self, params, lr=0.5, **settings):
        super().__init__(params, lr, **settings)


CLASSES = [(Lion, {"weight_decay": 0.1}), (Cautious, {"weight_decay": 0.1}), (Renamed, {})]
each_class = pytest.mark.parametrize(("cls", "settings"), CLASSES)


def tree(generator):
    shapes = {"a": (5,), "b": (3, 11), "c": (300,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def in_torchs_loop(cls, settings, seed, skips):
    generator = torch.Generator().manual_seed(seed)
    params = tree(generator)
    optimizer = cls(params.values(), **settings)
    for skip in skips:
        for p, g in zip(params.values(), tree(generator).values(), strict=True):
            p.grad = g
        if not skip:
            optimizer.step()
    return params, optimizer


def by_purescale(cls, settings, seed, skips, **how):
    generator = torch.Generator().manual_seed(seed)
    params = tree(generator)
    optimizer = ps.from_torch(cls, **settings)
    state = optimizer.init(params)
    for skip in map(torch.tensor, skips):
        params, state = ps.maybe_step(optimizer, params, tree(generator), state, skip, **how)
    return params, state, optimizer


@each_class
@pytest.mark.parametrize("way", [contextlib.nullcontext, tracing.as_on_an_accelerator])
@examples(8)
@given(skips=st.lists(st.booleans(), max_size=6), seed=st.integers(0, 99), donate=st.booleans())
def test_steps_and_skips_are_those_of_torchs_loop(way, cls, settings, skips, seed, donate):
    """Also a skip before the first step, which makes the state."""
    expected, theirs = in_torchs_loop(cls, settings, seed, skips)
    with way():
        params, state, _ = by_purescale(cls, settings, seed, skips, donate=donate)
    if cls is Renamed:  # torch's default is its loop, ours its fused kernel
        torch.testing.assert_close(params, {n: p.detach() for n, p in expected.items()})
        return
    assert same_bits(params, {n: p.detach() for n, p in expected.items()})
    for name, p in expected.items():
        for key, value in theirs.state[p].items():
            number = value.sum().item() if isinstance(value, torch.Tensor) else value
            assert number == state.slots[name][key].sum().item()


def test_masters_of_a_class_whose_first_step_makes_its_state_make_its_steps():
    optimizer = ps.with_master_weights(ps.from_torch(Lion, lr=0.1))
    params = {"w": torch.ones(4, dtype=torch.bfloat16)}
    grads = {"w": torch.tensor([1.0, -2.0, 3.0, -4.0], dtype=torch.bfloat16)}
    expected = torch.ones(4)
    theirs, state = Lion([expected], lr=0.1), optimizer.init(params)
    for donate in (False, True, True):
        expected.grad = grads["w"].float()
        theirs.step()
        params, state = ps.maybe_step(optimizer, params, grads, state, False, donate=donate)
    assert same_bits(ps.master_weights(params, state), {"w": expected.detach()})


def test_a_checkpoint_is_a_going_on(tmp_path):
    params, state, optimizer = by_purescale(Lion, {}, 0, [False, True, False])
    ps.save(tmp_path / "state.pt", state)
    loaded = ps.load(tmp_path / "state.pt", like=state)
    grads = tree(torch.Generator().manual_seed(7))
    assert same_bits(optimizer.step(params, grads, loaded), optimizer.step(params, grads, state))


@pytest.mark.parametrize("cls", [Lion, Cautious])
def test_a_traced_step_is_refused_by_the_name_of_the_class(cls):
    optimizer = ps.from_torch(cls)
    params = tree(torch.Generator().manual_seed(0))
    state = optimizer.init(params)
    stacked = ps.stack_states([params, params])
    mapped = torch.vmap(functools.partial(optimizer.step, opt_state=state))
    with pytest.raises(ValueError, match=f"{cls.__name__} has a step of its own.*Fix: call"):
        mapped(stacked, stacked)


def test_a_subclass_that_keeps_the_step_keeps_the_formula():
    optimizer = ps.from_torch(Renamed)
    params = tree(torch.Generator().manual_seed(0))
    stacked = ps.stack_states([params, params])
    state = ps.stack_states([optimizer.init(params)] * 2)
    mapped, _ = torch.vmap(optimizer.step)(stacked, stacked, state)
    expected, _ = optimizer.step(params, params, optimizer.init(params))
    torch.testing.assert_close(ps.member(mapped, 0), expected)


def test_a_state_that_is_no_number_is_refused_by_its_name():
    class Listing(Lion):
        def step(self, closure=None):
            super().step()
            for slot in self.state.values():
                slot["history"] = [1, 2]

    optimizer = ps.from_torch(Listing)
    params = tree(torch.Generator().manual_seed(0))
    with pytest.raises(TypeError, match=r"history of a = \[1, 2\].*expected a tensor or a number"):
        optimizer.step(params, params, optimizer.init(params))


class OfOneLine(torch.optim.Optimizer):
    """A class whose step is `line(self, state, p)` for each parameter."""

    line = None

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.calls = {"of": [], "number": torch.zeros(())}

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.line(self.state[p], p)
            p.sub_(0.1 * p.grad)


def appends(self, state, p):
    self.calls["of"].append(1)
    p.mul_(len(self.calls["of"]))


def counts_in_a_tensor(self, state, p):
    p.mul_(self.calls["number"].add_(1))


def changes_the_gradient(self, state, p):
    p.grad.add_(p)


def keeps_the_gradient(self, state, p):
    state["last"] = p.grad


def keeps_the_parameter(self, state, p):
    state["last"] = p


LINES = appends, counts_in_a_tensor, changes_the_gradient, keeps_the_gradient, keeps_the_parameter


@pytest.mark.parametrize("line", LINES)
def test_a_step_is_pure_whatever_the_class_writes_and_keeps(line):
    optimizer = ps.from_torch(type("Mine", (OfOneLine,), {"line": line}))
    params = tree(torch.Generator().manual_seed(0))
    grads = tree(torch.Generator().manual_seed(1))
    new = assert_pure(optimizer.step, params, grads, optimizer.init(params))
    pointers = [leaf.untyped_storage().data_ptr() for leaf in tensors(new)]
    assert len(set(pointers)) == len(pointers)


@pytest.mark.parametrize("shape", [(), (33,)])
def test_a_python_number_in_the_state_stays_one(shape):
    def counts(self, state, p):
        number = state.setdefault("n", 0)
        assert type(number) is int
        state["n"] = number + 1

    optimizer = ps.from_torch(type("Mine", (OfOneLine,), {"line": counts}))
    params = {"w": torch.ones(shape)}
    state = optimizer.init(params)
    for _ in range(3):
        params, state = optimizer.step(params, params, state)
    assert state.slots["w"]["n"].item() == 3


def test_a_tensor_that_would_come_back_as_a_number_is_refused_and_no_other():
    value = None

    def keeps(self, state, p):
        state["n"] = value

    optimizer, params = ps.from_torch(type("Mine", (OfOneLine,), {"line": keeps})), {"w": TWO}
    for value in (torch.tensor(0), torch.tensor(True)):  # noqa: B007, what is kept
        with pytest.raises(TypeError, match=r"n of w = .*stands for a Python number. Fix: a num"):
            optimizer.step(params, params, optimizer.init(params))
    value = torch.tensor(2, dtype=torch.int32)
    _, state = optimizer.step(params, params, optimizer.init(params))
    _, state = optimizer.step(params, params, state)
    assert same_bits(state.slots["w"]["n"], value)


def test_the_state_of_other_parameters_is_refused():
    optimizer = ps.from_torch(Lion, lr=0.1)
    with pytest.raises(ValueError, match="opt_state knows the parameters v, params has w"):
        optimizer.step({"w": TWO}, {"w": TWO}, optimizer.init({"v": TWO}))
