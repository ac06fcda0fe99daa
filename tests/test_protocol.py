"""from_transformation and to_transformation: (init, update) pairs as optimizers, and back."""

import types

import pytest
import torch
import torch.utils._pytree as pytree
from helpers import Untouched, same_bits, shares_memory, tensors
from test_torch_optim import OPTIM, grads_at, make_params, ours

import purescale as ps
from purescale.testing import assert_pure, assert_vmap_equals_loop


def momentum_transformation(rate, decay):
    def init(params):
        return {"trace": pytree.tree_map(torch.zeros_like, params), "count": torch.tensor(0)}

    def update(grads, state, params=None):
        trace = pytree.tree_map(lambda m, g: decay * m + g, state["trace"], grads)
        return pytree.tree_map(lambda m: -rate * m, trace), {
            "trace": trace,
            "count": state["count"] + 1,
        }

    return types.SimpleNamespace(init=init, update=update)


def test_a_transformation_equals_torchs_sgd():
    tx = momentum_transformation(0.1, 0.9)
    expected, _ = ours(ps.from_torch(OPTIM.SGD, lr=0.1, momentum=0.9), steps=5)
    for form in (tx, (tx.init, tx.update)):
        torch.testing.assert_close(ours(ps.from_transformation(form), steps=5)[0], expected)


def test_a_transformation_that_writes_by_default_is_told_not_to():
    def update(grads, state, *, params=None, inplace=True):
        assert params is not None
        return pytree.tree_map(lambda g: g.mul_(-1.0) if inplace else g * -1.0, grads), state

    optimizer = ps.from_transformation((lambda params: (), update))
    params = make_params()
    grads = grads_at(0, params)
    with Untouched(grads):
        optimizer.step(params, grads, optimizer.init(params))


UPDATES = {
    "parameters": lambda g, s, p: (pytree.tree_map(torch.neg, g), {"last": p["w"], "twice": s}),
    "gradients": lambda g, s, p: (g, {"last": g["w"][:2], "twice": [g["w"], g["w"]]}),
    "state": lambda g, s, p: (g, {"last": s["last"].view(-1), "twice": [s["last"]] * 2}),
    "none": lambda g, s, p: ({"w": None}, s),
}


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
def test_results_of_a_transformation_are_in_memory_of_their_own(update):
    optimizer = ps.from_transformation((lambda params: {"last": params["w"][:2]}, update))
    params, grads = {"w": torch.ones(4)}, {"w": torch.full((4,), 2.0)}
    state = optimizer.init(params)
    assert not shares_memory(params, state)
    new = assert_pure(optimizer.step, params, grads, state)
    pointers = [leaf.data_ptr() for leaf in tensors(new)]
    assert len(set(pointers)) == len(pointers)
    assert update is not UPDATES["none"] or same_bits(new[0], params)


def test_what_is_no_transformation_is_refused():
    for tx in (torch.nn.Linear(1, 1), (1, 2)):
        with pytest.raises(TypeError, match=r"takes an \(init, update\) pair of functions"):
            ps.from_transformation(tx)
    counting = lambda g, s, p: (g, {"count": s["count"] + 1})  # noqa: E731
    optimizer = ps.from_transformation((lambda p: {"count": 0}, counting))
    params = make_params()
    with pytest.raises(ValueError, match="grads does not match params"):
        optimizer.step(params, {}, optimizer.init(params))
    with pytest.raises(
        ValueError, match=r"is 0, but 1 in new. What changes in a step must be a tensor"
    ):
        ps.maybe_step(optimizer, params, params, optimizer.init(params), torch.tensor(False))


# ---- to_transformation ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["SGD", "AdamW", "Rprop", "Adafactor"])
def test_updates_added_to_the_parameters_are_the_step(name, dtype):
    torch.manual_seed(0)
    optimizer = ps.from_torch(getattr(OPTIM, name), lr=0.01)
    init, update = ps.to_transformation(optimizer)
    params = {f"w{n}": torch.randn(n, dtype=dtype) for n in (5, 33, 300)}
    state = init(params)
    assert same_bits(state, optimizer.init(params))
    for _ in range(3):
        grads = {key: torch.randn_like(p, dtype=dtype) for key, p in params.items()}
        with Untouched((params, grads, state)):
            updates, new_state = update(grads, state, params)
        old, (params, state) = params, optimizer.step(params, grads, state)
        assert same_bits(new_state, state)
        for key, change in updates.items():
            assert change.dtype is dtype
            rounding = torch.finfo(dtype).eps * float(old[key].abs().max())
            torch.testing.assert_close(old[key] + change, params[key], rtol=0, atol=rounding)


def test_there_and_back_is_the_same_optimizer():
    optimizer = ps.from_torch(OPTIM.AdamW, lr=0.1)
    tx = ps.to_transformation(optimizer)

    def by_keyword(grads, state, *, params=None, inplace=True):  # as TorchOpt's pairs are called
        return tx.update(grads, state, params=params, inplace=inplace)

    for form in (tx, (tx.init, by_keyword)):
        again = ps.from_transformation(form)
        torch.testing.assert_close(ours(again, steps=5), ours(optimizer, steps=5))


def test_a_gradient_that_is_none_has_no_update():
    init, update = ps.to_transformation(ps.from_torch(OPTIM.AdamW, lr=0.1, counts="each"))
    params = {"a": torch.ones(5), "b": torch.ones(3)}
    updates, _ = update({"a": None, "b": torch.ones(3)}, init(params), params)
    assert updates["a"] is None
    torch.testing.assert_close(updates["b"], torch.full((3,), -0.101))


def test_a_mapped_update_equals_a_loop():
    init, update = ps.to_transformation(ps.from_torch(OPTIM.AdamW, lr=0.1))
    params, grads = ([{"w": torch.randn(5)} for _ in range(3)] for _ in range(2))
    trees = grads, [init(member) for member in params], params
    assert_vmap_equals_loop(update, *map(ps.stack_states, trees), rtol=1.3e-6, atol=1e-5)


def test_an_update_without_parameters_is_refused():
    init, update = ps.to_transformation(ps.from_torch(OPTIM.SGD, lr=0.1))
    params = {"w": torch.ones(5)}
    with pytest.raises(ValueError, match=r"got no params.*update\(grads, state, params\)"):
        update(params, init(params))
