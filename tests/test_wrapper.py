"""Optimizers around others: every nesting works from the first step on, or is refused in words, and
each keeps the laws of a step: skipped, donated, in pieces, mapped, compiled, over shards.
"""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from helpers import clone, in_processes, on_an_accelerator, same_bits, spread, started, whole
from helpers import tensors as leaves_of
from test_user_class_step import Lion
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import purescale as ps
from purescale._wrappers import pieces
from purescale.testing import assert_optimizer

SGD = ps.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)
AROUND = {
    "masters": ps.with_master_weights,
    "rounding": ps.with_stochastic_rounding,
    "narrow": lambda inner: ps.with_state_dtype(inner, {"*": torch.bfloat16}),
    "free": ps.with_schedule_free,
    "part": lambda inner: ps.partition({"b": SGD, "a": inner}, lambda name, p: "ab"[p.ndim - 1]),
}
DTYPES = {"half": (torch.bfloat16, torch.float16), "mixed": (torch.float32, torch.bfloat16)}


def heavy_ball(grads, state, params):
    """The update of an (init, update) pair."""
    new = dict(state)
    for name, g in grads.items():
        if g is not None:
            new[name] = (state[name] / 2 - 0.1 * g).to(state[name].dtype)
    return {name: None if g is None else new[name] for name, g in grads.items()}, new


INNERMOST = {
    "torch": ps.from_torch(torch.optim.AdamW, lr=0.01, counts="each"),
    "own": ps.from_torch(Lion, lr=0.1),
    "transformation": ps.from_transformation((clone, heavy_ball)),
}
IN_STATE = ("lr", "weight_decay", "betas")


def tensors(dtypes, seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"vector": (33,), "matrix": (5, 33)}
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for (name, shape), dtype in zip(shapes.items(), DTYPES[dtypes], strict=True)
    }


@pytest.mark.parametrize("innermost", INNERMOST)
def test_a_nesting_is_refused_before_the_first_step_or_makes_every_step(innermost, monkeypatch):
    """Donated or not, called as `step` or skipped by a flag, saved and loaded: the same bits, in
    pieces.
    """
    monkeypatch.setattr(pieces, "PIECE_NUMEL", 64)
    works = 0
    for nesting in [*itertools.product(AROUND), *itertools.product(AROUND, repeat=2)]:
        optimizer = INNERMOST[innermost]
        for name in reversed(nesting):
            optimizer = AROUND[name](optimizer)
        dtypes = "mixed" if len(nesting) == 1 else "half"
        params = tensors(dtypes, 0)
        try:
            given = params, optimizer.init(params)
        except ValueError:  # a part without parameters, slots that nobody knows
            continue
        works += 1
        for seed, skip in enumerate([False, True, False], start=1):
            grads = tensors(dtypes, seed) | ({"matrix": None} if seed > 1 else {})
            grads["vector"] = grads["vector"] * torch.nan if skip else grads["vector"]
            after = ps.maybe_step(optimizer, given[0], grads, given[1], skip)
            alone = given if skip else optimizer.step(given[0], grads, given[1])
            assert same_bits(alone, after), nesting
            if innermost != "own":  # which adds to its state in the first step
                form = pytree.tree_structure(given[1])
                assert pytree.tree_structure(after[1]) == form, nesting  # and order of keys
            assert seed == 1 or same_bits(after[0]["matrix"], given[0]["matrix"]), nesting
            copies = clone((given[0], grads, given[1]))
            donated = ps.maybe_step(optimizer, *copies, skip, donate=True)
            assert same_bits(donated, after), nesting
            given = ps.from_state_dict(ps.to_state_dict(after), after)
        assert not same_bits(given[0], params)
    assert works == (29 if innermost == "torch" else 19)


@pytest.mark.parametrize("around", AROUND)
def test_a_step_keeps_the_structure_of_a_state_with_a_parameter_that_is_none(around):
    params = {**tensors("mixed", 0), "none": None}
    grads = {**tensors("mixed", 1), "none": None}
    optimizer = AROUND[around](INNERMOST["torch"])
    state = optimizer.init(params)
    form = pytree.tree_structure(state)
    params, state = optimizer.step(params, grads, state)
    params, state = ps.maybe_step(optimizer, params, grads, state, torch.tensor(False), donate=True)
    assert params["none"] is None
    assert pytree.tree_structure(state) == form


each_around = pytest.mark.parametrize("around", AROUND)


@each_around
@pytest.mark.parametrize("accelerator", [False, True])
def test_a_skipped_step_keeps_every_bit_and_a_donated_one_is_made_in_place(around, accelerator):
    optimizer = AROUND[around](INNERMOST["torch"])
    params, grads = tensors("half", 0), tensors("half", 1)
    with on_an_accelerator(accelerator):
        params, state = optimizer.step(params, grads, optimizer.init(params))
        params["vector"].view(torch.int16)[0] = 0x7F81  # a NaN with a payload
        bad = {name: grad * torch.nan for name, grad in grads.items()}
        for donate in (False, True):
            skipped = ps.maybe_step(optimizer, params, bad, state, torch.tensor(True), donate)
            assert same_bits(skipped, (params, state))
        before = [leaf.data_ptr() for leaf in leaves_of((params, state)) if leaf.ndim]
        applied = ps.maybe_step(optimizer, params, grads, state, torch.tensor(False), donate=True)
    assert [leaf.data_ptr() for leaf in leaves_of(applied) if leaf.ndim] == before


@each_around
@pytest.mark.parametrize("donate", [False, True])
def test_a_run_in_pieces_that_is_saved_and_resumed_is_that_of_one_piece(
    around, donate, monkeypatch, tmp_path
):
    def loss(params, x):
        return sum([(p.float() * x).square().sum() for p in params.values()])

    def trained(*, resumed):
        optimizer, rule = AROUND[around](INNERMOST["torch"]), ps.DynamicScale(2.0**4)
        first, step = started(tensors("mixed", 0), loss, optimizer, rule, max_norm=1.0)
        state = first
        for x in (1.0, torch.inf, 0.5):
            if resumed:
                ps.save(tmp_path / "state.pt", state)
                state = ps.load(tmp_path / "state.pt", like=clone(first))
            state, _ = step(state, [torch.tensor(x)], donate=donate)
        return state

    whole = trained(resumed=False)
    assert same_bits(trained(resumed=True), whole)
    monkeypatch.setattr(pieces, "PIECE_NUMEL", 20)
    cut = trained(resumed=False)
    for leaf, other in zip(*map(pytree.tree_leaves, (cut, whole)), strict=True):
        last_bits = 2 if leaf.dtype is torch.int16 else 1e-7  # of masters
        torch.testing.assert_close(leaf, other, rtol=1e-6, atol=last_bits)


def assert_near(new, old):
    """To one step of bfloat16: what is rounded may be rounded the other way."""
    for leaf, other in zip(*map(leaves_of, (new, old)), strict=True):
        if leaf.dtype is not torch.int16:  # the lower half of a master
            torch.testing.assert_close(leaf, other, rtol=2.0**-6, atol=1e-4)


@each_around
def test_a_mapped_step_is_a_loop(around):
    optimizer = AROUND[around](INNERMOST["torch"])
    members = []
    for seed in range(3):
        params, grads = tensors("half", seed), tensors("half", seed + 9)
        members.append((params, grads, optimizer.init(params), torch.tensor(seed == 1)))
    step = functools.partial(ps.maybe_step, optimizer)
    mapped = torch.vmap(step)(*map(ps.stack_states, zip(*members, strict=True)))
    for index, member in enumerate(members):
        one = ps.member(mapped, index)
        assert_near(one, step(*member))
        assert index != 1 or same_bits(one, (member[0], member[2]))


@pytest.mark.slow
@each_around
def test_a_compiled_step_is_the_eager_one(around):
    optimizer = AROUND[around](ps.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9))
    params, grads, no = tensors("half", 0), tensors("half", 1), torch.tensor(False)
    step = functools.partial(ps.maybe_step, optimizer)
    compiled = torch.compile(step, fullgraph=True)
    state = optimizer.init(params)
    assert_near(compiled(params, grads, state, no), step(params, grads, state, no))


@pytest.mark.slow
@pytest.mark.parametrize("around", ["rounding", "free"])  # for others see test_partition.py
def test_the_battery_for_optimizers_passes(around):
    assert_optimizer(AROUND[around](INNERMOST["torch"]))


def _shards_are_rounded_and_stepped_as_the_whole(rank):
    """By settings of the optimizer, and by those in its state."""
    mesh = init_device_mesh("cpu", (2,))
    placements = {
        **{"rows": [Shard(0)], "columns": [Shard(1)]},
        **{"copied": [Replicate()], "row": [Shard(0)]},
    }
    shapes = {"rows": (5, 3), "columns": (3, 7), "copied": (4,), "row": (7,)}

    def drawn(seed, dtype):
        generator = torch.Generator().manual_seed(seed)
        return {n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()}

    numbers = drawn(0, torch.float32)
    for dtype in DTYPES["half"]:
        rounded = functools.partial(ps.stochastic_round, dtype=dtype, seed=3, step=2)
        assert same_bits(whole(rounded(spread(numbers, mesh, placements))), rounded(numbers))
    # gloo gathers no int16, the lower half of a master
    views = {"masters": ps.master_weights, "rounding": lambda params, state: params}
    views |= {"narrow": lambda *both: both, "free": ps.averaged, "nothing": lambda *both: both}
    for (around, seen), in_state in itertools.product(views.items(), [(), IN_STATE]):
        adamw = ps.from_torch(torch.optim.AdamW, lr=0.01, in_state=in_state)
        optimizer = AROUND.get(around, lambda inner: inner)(adamw)
        for dtype in DTYPES["half"]:
            params = drawn(0, torch.float32 if around in ("narrow", "nothing") else dtype)
            one, many = (params, optimizer.init(params)), spread(params, mesh, placements)
            many = many, optimizer.init(many)
            for seed, (skip, donate) in enumerate([(False, False), (True, True), (False, True)]):
                grads = drawn(seed, torch.float32)
                one = ps.maybe_step(optimizer, one[0], grads, one[1], skip)
                shards = spread(grads, mesh, placements)
                many = ps.maybe_step(optimizer, many[0], shards, many[1], skip, donate)
                shards, expected = whole(seen(*many)), seen(*one)
                if around == "free":
                    torch.testing.assert_close(shards, expected)
                else:
                    assert same_bits(shards, expected), around
    assert dist.get_rank() == rank


@pytest.mark.slow
def test_shards_are_rounded_and_stepped_as_the_whole():
    in_processes(_shards_are_rounded_and_stepped_as_the_whole)


class Subclass(torch.Tensor):
    """A tensor of a user's."""


@pytest.mark.parametrize("around", ["nothing", "masters", "rounding"])
@pytest.mark.parametrize("inner", [SGD, ps.from_torch(torch.optim.AdamW, lr=0.1)], ids=repr)
def test_a_parameter_of_a_subclass_makes_none_of_the_others(inner, around):
    optimizer = inner if around == "nothing" else AROUND[around](inner)
    params = {"a": torch.ones(2).bfloat16().as_subclass(Subclass), "b": torch.ones(3)}
    old = params, optimizer.init(params)
    new = ps.maybe_step(optimizer, params, params, old[1], torch.tensor(False))
    assert list(map(type, leaves_of(new))) == list(map(type, leaves_of(old)))
    assert all(type(leaf) is torch.Tensor for leaf in leaves_of(new) if leaf.ndim == 0)  # counts
