"""A training state by way of `torch.distributed.checkpoint`, written and read by different numbers
of ranks, in shards and whole: bit for bit, and the run goes on.
"""

import functools
import os
import re

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import assert_close, in_processes, same_bits
from test_dtensor import LINE, ON_A_LINE, here, spread, values, whole
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import purescale as ps

ADAMW = ps.from_torch(torch.optim.AdamW, lr=0.01)
RULE = ps.DynamicScale(init_scale=8.0, growth_interval=2)


def step(state, seed, way=lambda tree: tree):
    """On gradients of this seed, scaled by the scale of the state; of seed 2 with a NaN."""
    grads = {name: g * state.scaler.scale for name, g in values(seed).items()}
    grads["uneven"][-1] *= torch.nan if seed == 2 else 1.0
    out = ps.unscale_and_step(ADAMW, state.scaler, state.params, way(grads), state.opt_state, 1.0)
    return state._replace(
        params=out.params,
        opt_state=out.opt_state,
        scaler=RULE.update(state.scaler, out.found_inf),
        step=state.step + ~out.found_inf,
    )


def start(params):
    buffers = {"running_mean": torch.randn(3, generator=torch.Generator().manual_seed(7))}
    generator = torch.Generator().manual_seed(8)
    return ps.init_train_state(params, buffers, ADAMW, RULE, generator.get_state())


def sharded():
    """How this many ranks hold a tree: uneven and empty shards, copies and plain tensors."""
    return functools.partial(
        spread, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), placements=ON_A_LINE
    )


def plain(tree):
    return tree


def nothing():
    return start({name: torch.full_like(leaf, torch.nan) for name, leaf in values(0).items()})


def saved(folder, in_shards, rank):
    way = sharded() if in_shards else plain
    state = start(way(values(0)))
    for seed in (1, 2, 3):
        state = step(state, seed, way)
    dcp.save(ps.to_state_dict(state), checkpoint_id=folder)
    everything = whole(state)
    if rank == 0:
        ps.save(os.path.join(folder, "whole.pt"), everything)


def loaded(folder, in_shards, rank):
    way = sharded() if in_shards else plain
    expected = ps.load(os.path.join(folder, "whole.pt"), like=nothing())
    assert expected.step == expected.opt_state.applied == 2
    like = start(way(nothing().params))
    d = ps.to_state_dict(like)
    dcp.load(d, checkpoint_id=folder)
    state = ps.from_state_dict(d, like)
    assert same_bits(whole(state), expected)
    assert same_bits(here(like), here(state))  # in place, for those who give it up
    for name, leaf in state.params.items():
        assert isinstance(leaf, DTensor) is (in_shards and name in ON_A_LINE)
        assert getattr(leaf, "placements", None) == getattr(like.params[name], "placements", None)
    assert_close(whole(step(state, 4, way)), step(expected, 4), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), [((2, True), (3, True)), ((2, True), (1, False)), ((1, False), (2, True))]
)
def test_a_state_is_read_by_another_number_of_ranks_bit_for_bit(before, after, tmp_path):
    """From two ranks to three, to a process with plain tensors, and from that back to two."""
    in_processes(functools.partial(saved, str(tmp_path), before[1]), before[0])
    in_processes(functools.partial(loaded, str(tmp_path), after[1]), after[0])


def test_without_any_ranks_a_sharded_state_is_read_too(tmp_path, recwarn):
    in_processes(functools.partial(saved, str(tmp_path), True))
    like = nothing()
    d = ps.to_state_dict(like)
    dcp.load(d, checkpoint_id=tmp_path, no_dist=True)
    assert same_bits(ps.from_state_dict(d, like), ps.load(tmp_path / "whole.pt", like=like))


def _cured(folder, rank):
    tree = {"params": sharded()(values(0))}
    path = os.path.join(folder, "state.pt")
    with pytest.raises(TypeError, match="is a DTensor, ") as refused:
        ps.save(path, tree)
    cure = re.search(r"DTensor, .*?, `(.*?)`;", str(refused.value))[1]
    eval(cure, {"torch": torch, "to_state_dict": ps.to_state_dict, "tree": tree})
    like = {"params": sharded()({name: torch.zeros(shape) for name, shape in LINE.items()})}
    d = ps.to_state_dict(like)
    dcp.load(d, checkpoint_id=path)
    assert same_bits(here(ps.from_state_dict(d, like)), here(tree))


def _of_each(folder, rank):
    """A plain leaf is taken for the same on every rank; what is not has a name for each."""
    mine = torch.tensor([rank + 1.0])
    tree = {"all": torch.ones(2), "rng": {rank: mine}}
    dcp.save(ps.to_state_dict(tree), checkpoint_id=os.path.join(folder, "each"))
    like = {"all": torch.zeros(2), "rng": {rank: torch.zeros(1)}}
    d = ps.to_state_dict(like)
    dcp.load(d, checkpoint_id=os.path.join(folder, "each"))
    assert same_bits(ps.from_state_dict(d, like), tree)


def _cured_and_of_each(folder, rank):
    _cured(folder, rank)
    _of_each(folder, rank)


def test_the_cure_for_a_dtensor_works_and_what_differs_by_rank_is_kept_by_rank(tmp_path):
    in_processes(functools.partial(_cured_and_of_each, str(tmp_path)))


def _not_there(folder, rank):
    """A tree that is not the one saved is an error on every rank, and nobody waits."""
    like = start(sharded()(nothing().params))
    other = like._replace(params={**like.params, "more": torch.zeros(2)})
    with pytest.raises(dcp.CheckpointException, match="more"):
        dcp.load(ps.to_state_dict(other), checkpoint_id=folder)
    d = ps.to_state_dict(like)
    dcp.load(d, checkpoint_id=folder)
    with pytest.raises(ValueError, match=r"missing: d\['tree'\]\['params'\]\['more'\]"):
        ps.from_state_dict(d, other)


@pytest.mark.slow
def test_a_sharded_state_of_another_tree_is_refused_on_every_rank(tmp_path):
    in_processes(functools.partial(saved, str(tmp_path), True))
    in_processes(functools.partial(_not_there, str(tmp_path)), 3)
