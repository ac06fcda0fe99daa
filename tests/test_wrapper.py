"""Optimizers around others: every nesting works from the first step on, or is refused in words."""

import itertools

import pytest
import torch
import torch.utils._pytree as pytree
from helpers import clone, same_bits

import purescale as ps
from purescale._wrappers import wrapper

SGD = ps.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)
AROUND = {
    "masters": ps.with_master_weights,
    "rounding": ps.with_stochastic_rounding,
    "narrow": lambda inner: ps.with_state_dtype(inner, {"*": torch.bfloat16}),
    "free": ps.with_schedule_free,
    "part": lambda inner: ps.partition({"a": inner, "b": SGD}, lambda name, p: "ab"[p.ndim - 1]),
}
DTYPES = {
    "half": (torch.bfloat16, torch.float16),
    "mixed": (torch.float32, torch.bfloat16),
}


class Counting(torch.optim.SGD):
    """A class of a user's own, which makes its slots in its first step."""

    def step(self):
        for p in self.param_groups[0]["params"]:
            self.state[p]["seen"] = self.state[p].get("seen", 0) + 1
            p.data.sub_(p.grad, alpha=0.1)


def heavy_ball(grads, state, params):
    """The update of an (init, update) pair."""
    new = dict(state)
    for name, g in grads.items():
        if g is not None:
            new[name] = (state[name] / 2 - 0.1 * g).to(state[name].dtype)
    return {name: None if g is None else new[name] for name, g in grads.items()}, new


INNERMOST = {
    "torch": ps.from_torch(torch.optim.AdamW, lr=0.01, counts="each"),
    "own": ps.from_torch(Counting),
    "transformation": ps.from_transformation((clone, heavy_ball)),
}


def tensors(dtypes, seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"vector": (33,), "matrix": (5, 33)}
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for (name, shape), dtype in zip(shapes.items(), DTYPES[dtypes], strict=True)
    }


def refused(build, *args):
    """Return what `build` makes, or None if it refuses."""
    try:
        return build(*args)
    except ValueError:
        return None


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("innermost", INNERMOST)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_nesting_is_refused_before_the_first_step_or_makes_every_step(
    depth, innermost, dtypes, monkeypatch
):
    """Donated or not, called as `step` or skipped by a flag, saved and loaded: the same bits."""
    works = 0
    for nesting in itertools.product(AROUND, repeat=depth):
        optimizer = INNERMOST[innermost]
        for name in reversed(nesting):
            optimizer = optimizer and refused(AROUND[name], optimizer)
        params = tensors(dtypes, 0)
        state = optimizer and refused(optimizer.init, params)
        if state is None:
            continue
        works += 1
        given = params, state
        for seed, skip in enumerate([False, True, False], start=1):
            grads = tensors(dtypes, seed) | ({"matrix": None} if skip else {})
            for piece in (64, 2**20):
                monkeypatch.setattr(wrapper, "PIECE_NUMEL", piece)
                copies = clone((given[0], grads, given[1]))
                after = ps.maybe_step(optimizer, given[0], grads, given[1], skip)
                donated = ps.maybe_step(optimizer, *copies, skip, donate=True)
                assert same_bits(donated, after), nesting
            alone = given if skip else optimizer.step(given[0], grads, given[1])
            assert same_bits(alone, after), nesting
            given = ps.from_state_dict(ps.to_state_dict(after), after)
        assert not same_bits(given[0], params)
    assert works >= 3


@pytest.mark.parametrize("way", ["step", "donated"])
@pytest.mark.parametrize("around", AROUND)
def test_a_step_keeps_the_structure_of_a_state_with_a_parameter_that_is_none(around, way):
    params = {**tensors("mixed", 0), "none": None}
    grads = {**tensors("mixed", 1), "none": None}
    optimizer = AROUND[around](INNERMOST["torch"])
    state = optimizer.init(params)
    form, skip = pytree.tree_structure(state), torch.tensor(False)
    for _ in range(2):
        if way == "step":
            params, state = optimizer.step(params, grads, state)
        else:
            params, state = ps.maybe_step(optimizer, params, grads, state, skip, donate=True)
    assert params["none"] is None
    assert pytree.tree_structure(state) == form


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("around", AROUND)
def test_a_train_step_in_pieces_is_that_of_one_piece(around, donate, monkeypatch):
    def loss_fn(params, buffers, x):
        return sum([(p.float() * x).square().sum() for p in params.values()]), buffers

    def trained():
        optimizer, rule = AROUND[around](INNERMOST["torch"]), ps.DynamicScale(2.0**4)
        state = ps.init_train_state(tensors("mixed", 0), {}, optimizer, rule)
        settings = {"loss_fn": loss_fn, "optimizer": optimizer, "rule": rule, "donate": donate}
        for x in (1.0, torch.inf, 0.5):
            state, _ = ps.train_step(state, [torch.tensor(x)], max_norm=1.0, **settings)
        return state

    whole = trained()
    monkeypatch.setattr(wrapper, "PIECE_NUMEL", 20)
    for leaf, other in zip(*map(pytree.tree_leaves, (trained(), whole)), strict=True):
        last_bits = 2 if leaf.dtype is torch.int16 else 1e-7  # of masters
        torch.testing.assert_close(leaf, other, rtol=1e-6, atol=last_bits)
