"""from_transformation: (init, update) pairs as optimizers."""

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
