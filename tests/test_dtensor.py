"""DTensors: every rank works on the shard that it holds, and one reduction a mesh makes them agree.

Each test starts its processes once, and shows one law on leaves of every placement.
"""

import functools
import math

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from helpers import at, in_processes, same_bits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import purescale as ps

SHARD, COPY = Shard(0), Replicate()
# Even, uneven and empty shards, along either dimension, copies, and tensors that are not distributed.
LINE = {
    "uneven": (5, 3),
    "empty": (1, 3),
    "columns": (3, 7),
    "copied": (4,),
    "plain": (3,),
    "scalar": (),
}
ON_A_LINE = {
    "uneven": [SHARD],
    "empty": [SHARD],
    "columns": [Shard(1)],
    "copied": [COPY],
    "scalar": [COPY],
}
ON_A_GRID = {
    "uneven": [COPY, SHARD],
    "empty": [SHARD, COPY],
    "columns": [Shard(1), SHARD],
    "copied": [COPY, COPY],
    "scalar": [COPY, COPY],
}


def values(seed, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * size for name, shape in LINE.items()}


def spread(tree, mesh, placements):
    """A tree as DTensors, in memory of its own, without any communication."""
    return {
        name: distribute_tensor(leaf.clone(), mesh, placements[name], src_data_rank=None)
        if name in placements
        else leaf.clone()
        for name, leaf in tree.items()
    }


def whole(tree):
    return pytree.tree_map(lambda t: t.full_tensor() if isinstance(t, DTensor) else t, tree)


def here(tree):
    return pytree.tree_map(lambda t: t.to_local() if isinstance(t, DTensor) else t, tree)


def close(a, b, tolerance=1e-6):
    """To `tolerance` of the largest number."""
    for x, y in zip(pytree.tree_leaves(whole(a)), pytree.tree_leaves(whole(b)), strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def on_meshes(check):
    """`check(rank, mesh, placements)` on a line of all ranks, and with four of them on a grid too."""

    def body(rank):
        ranks = dist.get_world_size()
        check(rank, init_device_mesh("cpu", (ranks,)), ON_A_LINE)
        if ranks == 4:
            check(rank, init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")), ON_A_GRID)

    return body


def run(check, ranks):
    in_processes(functools.partial(_run, check), ranks)


def _run(check, rank):
    on_meshes(check)(rank)


RANKS = pytest.mark.parametrize("ranks", [2, 3, 4])
CLASSES = {
    "AdamW": {"amsgrad": True},
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Adagrad": {},
    "RMSprop": {"momentum": 0.5},
    "NAdam": {},
    "Adamax": {},
    "Rprop": {},
}


def _steps(rank, mesh, placements):
    for name, settings in CLASSES.items():
        optimizer = ps.from_torch(getattr(torch.optim, name), lr=0.01, **settings)
        for donate, max_norm in ((False, None), (True, 0.5), (True, None)):
            alone, params = values(0), spread(values(0), mesh, placements)
            state_alone, state = optimizer.init(alone), optimizer.init(params)
            given = params
            for seed, clip in ((1, {}), (2, {"clip_value": 0.3})):
                clip = {"max_norm": max_norm, **clip}
                grads = values(seed, size=4.0)
                out = ps.unscale_and_step(
                    optimizer,
                    at(4.0),
                    params,
                    spread(grads, mesh, placements),
                    state,
                    donate=donate,
                    **clip,
                )
                one = ps.unscale_and_step(optimizer, at(4.0), alone, grads, state_alone, **clip)
                params, state, alone, state_alone = (
                    out.params,
                    out.opt_state,
                    one.params,
                    one.opt_state,
                )
                close(out.grad_norm, one.grad_norm)
                assert not out.found_inf
                parts = ps.unscale_and_check(at(4.0), spread(grads, mesh, placements))[0]
                close(parts, ps.unscale_and_check(at(4.0), grads)[0], tolerance=0)
            close((params, state), (alone, state_alone))
            for key, leaf in params.items():
                assert (type(leaf), leaf.shape, leaf.stride()) == (type(given[key]),) + (
                    given[key].shape,
                    given[key].stride(),
                )
                assert getattr(leaf, "placements", None) == getattr(given[key], "placements", None)
                same = here(leaf).data_ptr() == here(given[key]).data_ptr()
                assert same is donate or not here(leaf).numel()


@RANKS
def test_a_step_over_shards_equals_the_unsharded_step_and_is_donated_in_place(ranks):
    run(_steps, ranks)


def _one_inf(rank, mesh, placements):
    optimizer = ps.from_torch(torch.optim.AdamW, lr=0.01)
    rule = ps.DynamicScale(init_scale=4.0)
    for leaf in LINE:
        for bad_rank in range(dist.get_world_size()):
            for bad in (math.inf, math.nan):
                params, grads = (spread(values(seed), mesh, placements) for seed in (0, 1))
                if rank == bad_rank:
                    here(grads[leaf]).reshape(-1)[-1:].fill_(bad)
                held = torch.tensor(here(grads[leaf]).numel() > 0 and rank == bad_rank)
                held = ps.all_reduce_found_inf(held)  # some hold nothing that could be bad
                state = optimizer.init(params)
                for max_norm in (None, 1.0):
                    out = ps.unscale_and_step(
                        optimizer, rule.init(), params, grads, state, max_norm
                    )
                    assert out.found_inf == held
                    assert (
                        same_bits(here((out.params, out.opt_state)), here((params, state)))
                        is held.item()
                    )
                    scale = rule.update(rule.init(), out.found_inf).scale
                    assert scale == (2.0 if held else 4.0)
                    assert max_norm is None or torch.isfinite(out.grad_norm) == ~held
                unscaled, found_inf = ps.unscale_and_check(rule.init(), grads)
                assert found_inf == held
                again = ps.maybe_step(optimizer, params, unscaled, state, found_inf)
                assert same_bits(here(again), here((params, state))) is held.item()
                assert torch.isfinite(ps.clip_by_global_norm(grads, 1.0)[1]) == ~held
                accum = ps.accumulate_grads(ps.init_accum(params), unscaled)
                assert accum.found_inf == held


@RANKS
def test_inf_on_one_rank_in_one_leaf_is_every_ranks_skipped_step(ranks):
    run(_one_inf, ranks)


def _counted(rank, mesh, placements):
    optimizer = ps.from_torch(torch.optim.AdamW, lr=0.01)
    shapes = list(placements)
    many = {f"{name}{i}": name for i in range(4) for name in (*shapes, "plain")}

    def tree(seed):
        once = spread(values(seed), mesh, placements)
        return {key: once[name].clone() for key, name in many.items()}

    params, grads = tree(0), tree(1)
    state = optimizer.init(params)
    for max_norm, norm_type in ((None, 2.0), (1.0, 2.0), (1.0, 1.0), (1.0, math.inf)):
        with CommDebugMode() as found:
            ps.unscale_and_step(
                optimizer, at(2.0), params, grads, state, max_norm, norm_type=norm_type
            )
        assert found.get_total_counts() == 1
    for count, call in (
        (1, lambda: ps.unscale_and_check(at(2.0), grads)),
        (1, lambda: ps.clip_by_global_norm(grads, 1.0)),
        (1, lambda: ps.accumulate_grads(ps.init_accum(params), grads)),
        (
            0,
            lambda: ps.accumulate_grads(
                ps.init_accum(params), grads, found_inf=torch.tensor(False)
            ),
        ),
        (0, lambda: ps.clip_by_value(grads, 1.0)),
        (0, lambda: ps.maybe_step(optimizer, params, grads, state, torch.tensor(False))),
        (0, lambda: optimizer.step(params, grads, state)),
        (0, lambda: ps.select(torch.tensor(True), params, grads)),
    ):
        with CommDebugMode() as found:
            call()
        assert found.get_total_counts() == count


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_facts_of_a_step_cost_one_reduction_a_mesh(ranks):
    run(_counted, ranks)


def _norms(rank, mesh, placements):
    for norm_type in (1.0, 2.0, 3.0, 7.0, math.inf):
        for size, dtype in (
            (1.0, None),
            (1e30, None),
            (1e-30, None),
            (1e200, torch.float64),
            (1.0, torch.bfloat16),
        ):
            grads = {
                name: (leaf.to(dtype or leaf.dtype) * size) for name, leaf in values(1).items()
            }
            ours, norm = ps.clip_by_global_norm(spread(grads, mesh, placements), 1.0, norm_type)
            theirs, expected = ps.clip_by_global_norm(grads, 1.0, norm_type)
            torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
            close(ours, theirs, tolerance=1e-2 if dtype is torch.bfloat16 else 1e-6)
            everything = torch.cat([leaf.double().reshape(-1) for leaf in grads.values()])
            exact = torch.linalg.vector_norm(everything / size, norm_type) * size
            torch.testing.assert_close(norm.double(), exact, rtol=1e-6, atol=0)
            if dtype is None:
                assert not ps.unscale_and_check(at(1.0), spread(grads, mesh, placements))[1]
            at_step = ps.from_torch(torch.optim.SGD, lr=1.0)
            params = spread({k: torch.zeros_like(v) for k, v in grads.items()}, mesh, placements)
            out = ps.unscale_and_step(
                *(at_step, at(2.0), params, spread(grads, mesh, placements), at_step.init(params)),
                max_norm=1.0,
                norm_type=norm_type,
            )
            assert not out.found_inf
            torch.testing.assert_close(out.grad_norm, expected / 2, rtol=1e-6, atol=0)
    # in half precision, whose sum of squares overflows everywhere; and nothing at all
    half = {name: leaf.to(torch.float16) * 1e4 for name, leaf in values(1).items()}
    ours, found_inf = ps.unscale_and_check(at(2.0), spread(half, mesh, placements))
    close(ours, ps.unscale_and_check(at(2.0), half)[0], tolerance=0)
    assert not found_inf
    nothing = spread({"empty": torch.zeros(1, 3)}, mesh, placements)
    assert ps.clip_by_global_norm(nothing, 1.0)[1] == 0


@RANKS
def test_a_norm_over_shards_is_the_unsharded_norm(ranks):
    run(_norms, ranks)


def _elementwise(rank, mesh, placements):
    grads = values(1, size=3.0)
    close(ps.clip_by_value(spread(grads, mesh, placements), 0.5), ps.clip_by_value(grads, 0.5), 0)
    old, new = values(2), values(3)
    for flag in (torch.tensor(True), torch.tensor(False)):
        chosen = ps.select(flag, spread(old, mesh, placements), spread(new, mesh, placements))
        close(chosen, old if flag else new, 0)
    accum, one = ps.init_accum(spread(grads, mesh, placements)), ps.init_accum(grads)
    other = one
    for seed, weight in ((4, 1.0), (5, 3.0)):
        accum = ps.accumulate_grads(
            accum, spread(values(seed), mesh, placements), weight, donate=True
        )
        one = ps.accumulate_grads(one, values(seed), weight)
    both = ps.merge_accum(accum, accum)
    close(ps.accumulated_grads(accum)[0], ps.accumulated_grads(one)[0])
    close(both.grads, ps.merge_accum(one, other).grads)
    assert {type(leaf) for leaf in both.grads.values()} == {DTensor, torch.Tensor}


def _sums(rank, mesh, placements):
    """A gradient may be a sum over ranks, or lie otherwise than its parameter."""
    sgd = ps.from_torch(torch.optim.SGD, lr=1.0)
    every = [COPY] * mesh.ndim
    params = {
        "w": distribute_tensor(torch.zeros(5, 3), mesh, placements["uneven"], src_data_rank=None)
    }
    mine = torch.full((5, 3), 1.0 + rank)
    total = torch.full((5, 3), sum(1.0 + r for r in range(dist.get_world_size())))
    addends = {"w": DTensor.from_local(mine, mesh, [Partial()] * mesh.ndim)}
    unscaled, found_inf = ps.unscale_and_check(at(2.0), addends)
    close(unscaled["w"], total / 2)
    assert not found_inf
    _, norm = ps.clip_by_global_norm(addends, 1.0)
    torch.testing.assert_close(norm, torch.linalg.vector_norm(total))
    for grads in (addends, {"w": distribute_tensor(total, mesh, every, src_data_rank=None)}):
        out = ps.unscale_and_step(sgd, at(2.0), params, grads, sgd.init(params), max_norm=1e9)
        close(out.params["w"], -total / 2)
        torch.testing.assert_close(out.grad_norm, torch.linalg.vector_norm(total / 2))
        assert out.params["w"].placements == params["w"].placements
        accum = ps.accumulate_grads(ps.init_accum(params), grads)
        close(accum.grads["w"], total)
    # finite addends, a sum that is not
    large = {"w": DTensor.from_local(torch.full((5, 3), 3e38), mesh, [Partial()] * mesh.ndim)}
    assert ps.unscale_and_check(at(2.0), large)[1]


def _both(rank, mesh, placements):
    _elementwise(rank, mesh, placements)
    _sums(rank, mesh, placements)


@pytest.mark.parametrize("ranks", [3, 4])
def test_what_goes_element_by_element_is_done_on_shards_and_sums_are_summed_first(ranks):
    run(_both, ranks)
