"""DTensors: every rank works on the shard that it holds, and one reduction a mesh makes them agree.

Each test starts its processes once, and shows one law on leaves of every placement.
"""

import contextlib
import functools
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils._pytree as pytree
from helpers import (
    AsOnAnAccelerator,
    at,
    by_parts,
    in_processes,
    on_all_ranks,
    same_bits,
    spread,
    whole,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import purescale as ps
from purescale._torch import tracing

SHARD, COPY = Shard(0), Replicate()
# Even, uneven and empty shards, along either dimension, copies, and what is not distributed.
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


def here(tree):
    return pytree.tree_map(lambda t: t.to_local() if isinstance(t, DTensor) else t, tree)


def close(a, b, tolerance=1e-6):
    """To `tolerance` of the largest number."""
    for x, y in zip(pytree.tree_leaves(whole(a)), pytree.tree_leaves(whole(b)), strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def run(check, ranks):
    in_processes(functools.partial(_on_meshes, check), ranks)


def _on_meshes(check, rank):
    """`check(rank, mesh, placements)` on a line of all ranks: of two also as a GPU would, with
    numbers, of four also on a grid.
    """
    ranks = dist.get_world_size()
    line = rank, init_device_mesh("cpu", (ranks,)), ON_A_LINE
    check(*line)
    if ranks == 2:
        with tracing.as_on_an_accelerator():
            check(*line)
    if ranks == 4:
        check(rank, init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")), ON_A_GRID)


CLASSES = {  # by torch's kernels, and by a formula
    "AdamW": {"amsgrad": True},
    "SGD": {"momentum": 0.9, "nesterov": True},
    "RMSprop": {"momentum": 0.5},
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
                arguments = optimizer, at(4.0), params, spread(grads, mesh, placements), state
                out = ps.unscale_and_step(*arguments, donate=donate, **clip)
                one = ps.unscale_and_step(optimizer, at(4.0), alone, grads, state_alone, **clip)
                params, state = out.params, out.opt_state
                alone, state_alone = one.params, one.opt_state
                close(out.grad_norm, one.grad_norm)
                assert not out.found_inf
                parts = ps.unscale_and_check(at(4.0), spread(grads, mesh, placements))[0]
                close(parts, ps.unscale_and_check(at(4.0), grads)[0], tolerance=0)
            close((params, state), (alone, state_alone))
            for key, leaf in params.items():
                assert type(leaf) is type(given[key])
                assert leaf.shape == given[key].shape
                assert leaf.stride() == given[key].stride()
                assert getattr(leaf, "placements", None) == getattr(given[key], "placements", None)
                same = here(leaf).data_ptr() == here(given[key]).data_ptr()
                assert same is donate or not here(leaf).numel()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_step_over_shards_equals_the_unsharded_step_and_is_donated_in_place(ranks):
    run(_steps, ranks)


def _one_inf(rank, mesh, placements):
    optimizer = ps.from_torch(torch.optim.AdamW, lr=0.01)
    rule = ps.DynamicScale(init_scale=4.0)
    for index, leaf in enumerate(LINE):
        for bad_rank in (0, dist.get_world_size() - 1):
            bad = (math.inf, math.nan)[(index + bad_rank) % 2]
            params, grads = (spread(values(seed), mesh, placements) for seed in (0, 1))
            if rank == bad_rank:
                here(grads[leaf]).reshape(-1)[-1:].fill_(bad)
            held = torch.tensor(here(grads[leaf]).numel() > 0 and rank == bad_rank)
            held = ps.all_reduce_found_inf(held)  # some hold nothing that could be bad
            state = optimizer.init(params)
            for max_norm in (None, 1.0):
                out = ps.unscale_and_step(optimizer, rule.init(), params, grads, state, max_norm)
                assert out.found_inf == held
                stays = same_bits(here((out.params, out.opt_state)), here((params, state)))
                assert stays is held.item()
                scale = rule.update(rule.init(), out.found_inf).scale
                assert scale == (2.0 if held else 4.0)
                assert max_norm is None or torch.isfinite(out.grad_norm) == ~held
            for donate in (True, False):
                copies = pytree.tree_map(torch.clone, grads)
                unscaled, found_inf = ps.unscale_and_check(rule.init(), copies, donate=donate)
                assert found_inf == held
            again = ps.maybe_step(optimizer, params, unscaled, state, found_inf)
            assert same_bits(here(again), here((params, state))) is held.item()
            assert torch.isfinite(ps.clip_by_global_norm(grads, 1.0)[1]) == ~held
            accum = ps.accumulate_grads(ps.init_accum(params), unscaled)
            assert accum.found_inf == held


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4])
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
    state, flag = optimizer.init(params), torch.tensor(False)
    for max_norm, norm_type in ((None, 2.0), (1.0, 2.0), (1.0, 1.0), (1.0, math.inf)):
        with AsOnAnAccelerator() as seen, CommDebugMode() as found:
            ps.unscale_and_step(
                optimizer, at(2.0), params, grads, state, max_norm, norm_type=norm_type
            )
        assert (found.get_total_counts(), seen.reads) == (1, 0)
    for count, call in (
        (1, lambda: ps.unscale_and_check(at(2.0), grads)),
        (1, lambda: ps.clip_by_global_norm(grads, 1.0)),
        (1, lambda: ps.accumulate_grads(ps.init_accum(params), grads)),
        (0, lambda: ps.accumulate_grads(ps.init_accum(params), grads, found_inf=flag)),
        (0, lambda: ps.clip_by_value(grads, 1.0)),
        (0, lambda: ps.maybe_step(optimizer, params, grads, state, flag)),
        (0, lambda: optimizer.step(params, grads, state)),
        (0, lambda: ps.select(torch.tensor(True), params, grads)),
    ):
        with CommDebugMode() as found:
            call()
        assert found.get_total_counts() == count


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_all_facts_of_a_step_cost_one_reduction_a_mesh(ranks):
    run(_counted, ranks)


def _norms(rank, mesh, placements):
    for norm_type in (1.0, 2.0, 3.0, math.inf):
        for size, dtype in (
            *((size, torch.float32) for size in (1.0, 1e30, 1e-30)),
            *((1e200, torch.float64), (1.0, torch.bfloat16)),
        ):
            grads = {name: leaf.to(dtype) * size for name, leaf in values(1).items()}
            ours, norm = ps.clip_by_global_norm(spread(grads, mesh, placements), 1.0, norm_type)
            theirs, expected = ps.clip_by_global_norm(grads, 1.0, norm_type)
            torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
            close(ours, theirs, tolerance=1e-2 if dtype is torch.bfloat16 else 1e-6)
            everything = torch.cat([leaf.double().reshape(-1) for leaf in grads.values()])
            exact = torch.linalg.vector_norm(everything / size, norm_type) * size
            torch.testing.assert_close(norm.double(), exact, rtol=1e-6, atol=0)
            if dtype is torch.float32:
                assert not ps.unscale_and_check(at(1.0), spread(grads, mesh, placements))[1]
            at_step = ps.from_torch(torch.optim.SGD, lr=1.0)
            params = spread({k: torch.zeros_like(v) for k, v in grads.items()}, mesh, placements)
            arguments = at(2.0), params, spread(grads, mesh, placements), at_step.init(params)
            out = ps.unscale_and_step(at_step, *arguments, max_norm=1.0, norm_type=norm_type)
            assert not out.found_inf
            torch.testing.assert_close(out.grad_norm, expected / 2, rtol=1e-6, atol=0)
    # in half precision, whose sum of squares overflows everywhere; and nothing at all
    half = {name: leaf.to(torch.float16) * 1e4 for name, leaf in values(1).items()}
    ours, found_inf = ps.unscale_and_check(at(2.0), spread(half, mesh, placements))
    close(ours, ps.unscale_and_check(at(2.0), half)[0], tolerance=0)
    assert not found_inf
    nothing = spread({"empty": torch.zeros(1, 3)}, mesh, placements)
    assert ps.clip_by_global_norm(nothing, 1.0)[1] == 0


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4])
def test_a_norm_over_shards_is_the_unsharded_norm(ranks):
    run(_norms, ranks)


def _elementwise(rank, mesh, placements):
    grads = values(1, size=3.0)
    close(ps.clip_by_value(spread(grads, mesh, placements), 0.5), ps.clip_by_value(grads, 0.5), 0)
    old, new = values(2), values(3)
    spread_out = spread(old, mesh, placements)
    copy = ps.clone(spread_out)
    for leaf in here(spread_out).values():
        leaf.fill_(math.nan)
    close(copy, old, 0)
    for flag in (torch.tensor(True), torch.tensor(False)):
        chosen = ps.select(flag, spread(old, mesh, placements), spread(new, mesh, placements))
        close(chosen, old if flag else new, 0)
    accum, one = ps.init_accum(spread(grads, mesh, placements)), ps.init_accum(grads)
    other = one
    for seed, weight in ((4, 1.0), (5, 3.0)):
        grads = spread(values(seed), mesh, placements)
        accum = ps.accumulate_grads(accum, grads, weight, donate=True)
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


@pytest.mark.parametrize("ranks", [4])
def test_what_goes_element_by_element_is_done_on_shards_and_sums_are_summed_first(ranks):
    run(_both, ranks)


def _refused(rank):
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    weight = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    on = functools.partial(distribute_tensor, device_mesh=mesh, src_data_rank=None)
    sharded, copied = {"w": on(weight, placements=[SHARD])}, {"w": on(weight, placements=[COPY])}
    flag = torch.tensor(False)
    for cls, settings in (("Muon", {}), ("Adafactor", {})):
        optimizer = ps.from_torch(getattr(torch.optim, cls), lr=0.1, **settings)
        needs = rf"\['w'\] has the placements \(Shard\(dim=0\),\), and from_torch\({cls}.*: AdamW"
        with pytest.raises(ValueError, match=needs):
            ps.maybe_step(optimizer, sharded, sharded, optimizer.init(sharded), flag)
        with pytest.raises(ValueError, match=needs):
            optimizer.step(sharded, sharded, optimizer.init(sharded))
        with pytest.raises(ValueError, match=needs):
            ps.unscale_and_step(optimizer, at(1.0), sharded, sharded, optimizer.init(sharded))
        plain = {"w": weight}
        moved, _ = ps.maybe_step(optimizer, copied, copied, optimizer.init(copied), flag)
        close(moved, optimizer.step(plain, plain, optimizer.init(plain))[0])

    sgd = ps.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)
    state = sgd.init(sharded)
    for params, grads in ((sharded, {"w": weight}), ({"w": weight}, sharded)):
        with pytest.raises(ValueError, match=r"grads\['w'\] is a .*Fix: `distribute_tensor"):
            ps.maybe_step(sgd, params, grads, sgd.init(params), flag)
    with pytest.raises(ValueError, match=r"momentum_buffer of w has the placements \(Replicate"):
        ps.maybe_step(sgd, sharded, sharded, sgd.init(copied), flag)
    large = on(torch.zeros(8, 4), placements=[SHARD])
    with pytest.raises(ValueError, match=r"grads\['w'\] has .* \(8, 4\), its parameter \(4, 4\)"):
        ps.maybe_step(sgd, sharded, {"w": large}, state, flag)
    sums = {"w": DTensor.from_local(weight, mesh, [Partial()])}
    with pytest.raises(ValueError, match=r"params\['w'\] has .* \(Partial\(sum\),\).*redistribute"):
        ps.maybe_step(sgd, sums, sharded, sgd.init(sharded), flag)
    # All ranks sum the gradients, also one that then refuses its state.
    partial = {"w": DTensor.from_local(weight, mesh, [Partial()])}
    of_others = ps.from_torch(torch.optim.SGD, lr=0.1).init(copied)
    words = "opt_state has no momentum_buffer"
    with pytest.raises(ValueError, match=words) if rank else contextlib.nullcontext():
        sgd.step(copied, partial, of_others if rank else sgd.init(copied))
    with pytest.raises(TypeError, match=r"old\['w'\] is a DTensor, and a plain tensor"):
        ps.select(flag, sharded, {"w": weight})

    train_state = ps.init_train_state(sharded, {}, sgd, ps.DynamicScale())
    retried = {"optimizer": sgd, "rule": ps.DynamicScale(), "max_retries": 1}
    with pytest.raises(ValueError, match=r"max_retries=1 with parameters that are DTensors.*Fix"):
        ps.train_step(train_state, [weight], loss_fn=lambda p, b, x: (p["w"].sum(), b), **retried)

    class Own(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    # a class whose step nobody knows, and a pair, are given the DTensors themselves
    optimizer, plain = ps.from_torch(Own, lr=0.1, momentum=0.9), {"w": weight}
    expected = of_plain = None
    for params in (plain, sharded, copied):
        opt_state = optimizer.init(params)
        for donate in (False, True, True):
            grads = {"w": params["w"] * 0.5}
            params = {"w": params["w"].clone()}
            arguments = optimizer, params, grads, opt_state, flag
            params, opt_state = ps.maybe_step(*arguments, donate=donate)
        of_plain = of_plain or params
        expected = expected or opt_state.slots
        close(params, of_plain)
        close(opt_state.slots, expected)
    tx = ps.from_transformation(
        (lambda params: (), lambda g, s, params: ({"w": -g["w"] / g["w"].norm()}, s))
    )
    out = ps.unscale_and_step(tx, at(2.0), sharded, sharded, (), max_norm=1e9)
    close(out.params["w"], weight - weight / torch.linalg.vector_norm(weight))
    assert out.params["w"].placements == (SHARD,)
    here(sharded["w"]).fill_(math.nan if rank else 1.0)
    out = ps.unscale_and_step(tx, at(2.0), sharded, sharded, ())
    assert out.found_inf
    assert same_bits(here(out.params), here(sharded))


def test_what_cannot_be_done_on_a_shard_is_refused_on_every_rank():
    in_processes(_refused)


def _several_meshes(rank):
    """A leaf over all ranks, one over two of them, one that is plain: one reduction each mesh."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    row = grid["b"]
    every = {"all": [COPY, SHARD], "some": [SHARD]}
    leaves = {name: torch.ones(3, 2) for name in ("all", "some", "plain")}

    def tree():
        return {
            "all": distribute_tensor(leaves["all"].clone(), grid, every["all"], src_data_rank=None),
            "some": distribute_tensor(leaves["some"].clone(), row, [SHARD], src_data_rank=None),
            "plain": leaves["plain"].clone(),
        }

    with CommDebugMode() as counted:
        norm = ps.clip_by_global_norm(tree(), 1.0)[1]
    assert counted.get_total_counts() == 2
    torch.testing.assert_close(norm, torch.tensor(18.0).sqrt())
    for name in leaves:
        for bad_rank in range(4):
            grads = tree()
            if rank == bad_rank:
                here(grads[name]).fill_(math.nan)
            assert ps.unscale_and_check(at(1.0), grads)[1]  # also where it is another mesh's
            assert not torch.isfinite(ps.clip_by_global_norm(grads, 1.0)[1])
    with CommDebugMode() as counted:
        assert ps.clip_by_global_norm({"some": tree()["some"]}, 1.0)[1] ** 2 == pytest.approx(6)
    assert counted.get_total_counts() == 1


def test_leaves_over_several_meshes_are_known_to_all_ranks():
    in_processes(_several_meshes, 4)


def _compiled(rank):
    mesh = init_device_mesh("cpu", (2,))
    optimizer = ps.from_torch(torch.optim.SGD, lr=0.01, momentum=0.9)
    for step in (by_parts, ps.unscale_and_step):
        function = functools.partial(step, optimizer, max_norm=1.0)
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        for bad in (1.0, math.inf):
            both = ({n: values(seed)[n] for n in ("uneven", "copied")} for seed in (0, 1))
            params, grads = (spread(tree, mesh, ON_A_LINE) for tree in both)
            here(grads["uneven"])[-1:] *= bad if rank else 1.0
            # as the gradient of a copied parameter comes: a sum over the ranks
            grads["copied"] = DTensor.from_local(here(grads["copied"]), mesh, [Partial()])
            arguments = at(2.0), params, grads, optimizer.init(params)
            ours, theirs = compiled(*arguments), function(*arguments)
            assert ours[2] == theirs[2] == (bad == math.inf)
            close(ours, theirs)
            assert ours[0]["uneven"].placements == (SHARD,)


@pytest.mark.slow
def test_a_step_over_dtensors_is_one_graph():
    in_processes(_compiled)


# ---- where torch's own scalers let ranks diverge -------------------------------------------------

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def _torch_steps(scaler, optimizer, params, grads):
    scaler.scale(torch.ones(1))  # torch makes its scale here
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    scaler.step(optimizer)
    scaler.update()
    return on_all_ranks(scaler.get_scale())


def _sharded_grad_scaler(rank):
    """It reduces the flag in `unscale_`, which a fused optimizer's step leaves out."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    grad = torch.tensor([1.0, math.inf if rank == 1 else 1.0])
    param = nn.Parameter(torch.zeros(2))
    scaler = ShardedGradScaler("cpu", init_scale=8.0, process_group=dist.group.WORLD)
    optimizer = torch.optim.AdamW([param], lr=0.1, fused=True)
    assert _torch_steps(scaler, optimizer, [param], [grad.clone()]) == [8.0, 4.0]
    theirs = on_all_ranks(param[0].item())
    assert theirs[0] != theirs[1] == 0.0

    ours, rule = ps.from_torch(torch.optim.AdamW, lr=0.1), ps.DynamicScale(init_scale=8.0)
    mesh = init_device_mesh("cpu", (2,))
    plain, shards = {"w": torch.zeros(2)}, {"w": DTensor.from_local(torch.zeros(2), mesh, [SHARD])}
    sharded = {"w": DTensor.from_local(grad, mesh, [SHARD])}
    for params, grads, group in ((plain, {"w": grad}, dist.group.WORLD), (shards, sharded, None)):
        state = ours.init(params)
        out = ps.unscale_and_step(ours, rule.init(), params, grads, state, group=group)
        assert on_all_ranks(rule.update(rule.init(), out.found_inf).scale.item()) == [4.0, 4.0]
        assert on_all_ranks(here(out.params["w"])[0].item()) == [0.0, 0.0]


def _first_placement(rank):
    """It looks at the placement of the first gradient only."""
    mesh = init_device_mesh("cpu", (2,))

    def leaf(values, placement):
        return DTensor.from_local(values.clone(), mesh, [placement])

    bad = torch.tensor([1.0, math.inf if rank == 1 else 1.0])
    values = [(torch.zeros(2), torch.ones(2), COPY), (torch.zeros(2), bad, SHARD)]
    weights = [leaf(weight, placement) for weight, _, placement in values]
    grads = [leaf(grad, placement) for _, grad, placement in values]
    params = [nn.Parameter(weight.clone()) for weight in weights]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(params, lr=1.0)
    assert _torch_steps(scaler, optimizer, params, [g.clone() for g in grads]) == [8.0, 4.0]
    theirs = on_all_ranks(here(params[0].detach())[0].item())
    assert theirs == [-0.125, 0.0]  # a replicated parameter

    ours, rule = ps.from_torch(torch.optim.SGD, lr=1.0), ps.DynamicScale(init_scale=8.0)
    for order in (slice(None), slice(None, None, -1)):
        arguments = weights[order], grads[order], ours.init(weights[order])
        out = ps.unscale_and_step(ours, rule.init(), *arguments)
        assert on_all_ranks(rule.update(rule.init(), out.found_inf).scale.item()) == [4.0, 4.0]
        assert same_bits(here(out.params), here(weights[order]))


@pytest.mark.skipif(TORCH > (2, 15), reason="torch may have mended them")
def test_ranks_agree_where_those_of_torchs_scalers_do_not():
    in_processes((_sharded_grad_scaler, _first_placement))


# ---- a whole step --------------------------------------------------------------------------------


def _trained(rank):
    """train_step, and value_and_grad, over parameters that are DTensors, from data that each rank
    has a part of.
    """
    mesh, replicas = init_device_mesh("cpu", (2, 2)), [COPY]
    optimizer, rule = ps.from_torch(torch.optim.AdamW, lr=0.01), ps.DynamicScale(init_scale=4.0)
    weights = values(0)
    weights = {"w": weights["columns"], "b": weights["plain"][:1].repeat(3)}
    data = [values(seed, size=2.0)["uneven"].repeat(2, 7)[:4, :7].contiguous() for seed in (1, 2)]

    def loss_fn(params, buffers, x):
        return F.linear(x, params["w"], params["b"]).pow(2).mean(), buffers

    def on(leaf, placements):
        return distribute_tensor(leaf.clone(), mesh, placements, src_data_rank=None)

    alone = ps.init_train_state(weights, {}, optimizer, rule)
    for ways in ({"w": COPY, "b": COPY}, {"w": SHARD, "b": SHARD}):
        params = {name: on(leaf, [*replicas, ways[name]]) for name, leaf in weights.items()}
        state, one = ps.init_train_state(params, {}, optimizer, rule), alone
        for batches in (data[:1], data, [data[0], data[1] * math.inf]):
            settings = {"loss_fn": loss_fn, "optimizer": optimizer, "rule": rule, "max_norm": 0.1}
            for on_nonfinite in ("drop_window", "drop_microbatch"):
                spread_out = [on(x, [SHARD] * mesh.ndim) for x in batches]
                kwargs = {**settings, "on_nonfinite": on_nonfinite}
                new, info = ps.train_step(state, spread_out, **kwargs)
                expected, told = ps.train_step(one, batches, **kwargs)
                close(new.params, expected.params)
                close(info.grad_norm, told.grad_norm, 1e-5)
                assert info.found_inf == told.found_inf
                if not told.found_inf:
                    close(info.loss, told.loss, 1e-5)
                assert new.params["w"].placements == (*replicas, ways["w"])
            state, one = new, expected
        gradients = ps.value_and_grad(loss_fn)
        (loss, _), grads = gradients(params, {}, spread_out[0], scaler=at(4.0))
        (same, _), expected = gradients(weights, {}, data[0], scaler=at(4.0))
        close((loss, grads), (same, expected), 1e-5)
        assert all(grads[name].placements == params[name].placements for name in params)


@pytest.mark.slow
def test_a_train_step_and_gradients_over_dtensors_equal_those_of_one_process():
    """Over replicas of shards."""
    in_processes(_trained, 4)
