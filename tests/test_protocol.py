"""from_transformation and to_transformation: (init, update) pairs as optimizers, and back."""

import types

import pytest
import torch
import torch.utils._pytree as pytree
from helpers import Untouched, clone, same_bits
from test_torch_optim import OPTIM, grads_at, make_params, nan, ours

import purescale as ps


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


@pytest.mark.parametrize("form", ["object", "tuple"])
def test_a_transformation_equals_torchs_sgd(form):
    tx = momentum_transformation(0.1, 0.9)
    optimizer = ps.from_transformation(tx if form == "object" else (tx.init, tx.update))
    torch.testing.assert_close(
        ours(optimizer, steps=5)[0],
        ours(ps.from_torch(OPTIM.SGD, lr=0.1, momentum=0.9), steps=5)[0],
    )


@pytest.mark.parametrize("donate", [False, True])
def test_a_transformations_state_stands_still_on_a_skipped_step(donate):
    optimizer = ps.from_transformation(momentum_transformation(0.1, 0.9))
    params, state = ours(optimizer, steps=2)
    bad = pytree.tree_map(lambda p: torch.full_like(p, nan), params)
    assert same_bits(
        ps.maybe_step(
            optimizer, clone(params), bad, clone(state), torch.tensor(True), donate=donate
        ),
        (params, state),
    )


def test_a_transformation_that_writes_by_default_is_told_not_to():
    def update(grads, state, *, params=None, inplace=True):
        assert params is not None
        return pytree.tree_map(lambda g: g.mul_(-1.0) if inplace else g * -1.0, grads), state

    optimizer = ps.from_transformation((lambda params: (), update))
    params = make_params()
    grads = grads_at(0, params)
    with Untouched(grads):
        optimizer.step(params, grads, optimizer.init(params))


def test_a_transformation_that_counts_in_python_cannot_be_skipped():
    optimizer = ps.from_transformation(
        (lambda p: {"count": 0}, lambda g, s, p: (g, {"count": s["count"] + 1}))
    )
    params = make_params()
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


@pytest.mark.parametrize("keywords", [False, True])
def test_there_and_back_is_the_same_optimizer(keywords):
    optimizer = ps.from_torch(OPTIM.AdamW, lr=0.1)
    tx = ps.to_transformation(optimizer)
    if keywords:  # as TorchOpt's pairs are called
        update = tx.update

        def by_keyword(grads, state, *, params=None, inplace=True):
            return update(grads, state, params=params, inplace=inplace)

        tx = (tx.init, by_keyword)
    torch.testing.assert_close(ours(ps.from_transformation(tx), steps=5), ours(optimizer, steps=5))


def test_a_gradient_that_is_none_has_no_update():
    init, update = ps.to_transformation(ps.from_torch(OPTIM.AdamW, lr=0.1, counts="each"))
    params = {"a": torch.ones(5), "b": torch.ones(3)}
    updates, _ = update({"a": None, "b": torch.ones(3)}, init(params), params)
    assert updates["a"] is None
    torch.testing.assert_close(updates["b"], torch.full((3,), -0.101))


def test_a_mapped_update_equals_a_loop():
    init, update = ps.to_transformation(ps.from_torch(OPTIM.AdamW, lr=0.1))
    params = [{"w": torch.randn(5)} for _ in range(3)]
    grads = [{"w": torch.randn(5)} for _ in range(3)]
    states = [init(member) for member in params]
    mapped = torch.vmap(update)(*map(ps.stack_states, (grads, states, params)))
    for index, member in enumerate(zip(grads, states, params, strict=True)):
        torch.testing.assert_close(ps.member(mapped, index), update(*member))


def test_an_update_without_parameters_is_refused():
    init, update = ps.to_transformation(ps.from_torch(OPTIM.SGD, lr=0.1))
    params = {"w": torch.ones(5)}
    with pytest.raises(ValueError, match=r"got no params.*update\(grads, state, params\)"):
        update(params, init(params))
