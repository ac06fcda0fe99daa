"""Modules that torch distributes, in a loop by hand: DistributedDataParallel and FSDP2 reduce, and
purescale decides and steps in place. The same run as with torch's scalers, where those are right.
"""

import contextlib
import itertools
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import assert_close, in_processes, same_bits
from test_dtensor import whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import purescale as ps

EVERY = 3
MOMENTUM = ps.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)
RULE = ps.DynamicScale(init_scale=2.0**10, growth_interval=2)
SGD = ps.from_torch(torch.optim.SGD, lr=0.1)
SCALING = {"init_scale": 2.0**10, "growth_interval": 2}


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


class Wrapped:
    """A module over ranks, and its collectives only in the last microbatch of a window."""

    def __init__(self, module, mesh=None):
        if mesh is None:
            self.module = DistributedDataParallel(module)
            self.params = dict(module.named_parameters())
        else:
            for layer in (module[0], module[2]):
                fully_shard(layer, mesh=mesh)
            self.module = fully_shard(module, mesh=mesh)
            self.params = dict(self.module.named_parameters())

    def syncs(self, window):
        if isinstance(self.module, DistributedDataParallel):
            return contextlib.nullcontext() if window.should_sync else self.module.no_sync()
        self.module.set_requires_gradient_sync(window.should_sync)
        return contextlib.nullcontext()

    def loss(self, microbatch):
        x, y, factor = microbatch
        return F.cross_entropy(self.module(x), y) * factor


def data(rank, count, dtype=torch.float32, bad=()):
    """Microbatches of a rank; those whose number is in `bad` overflow in the backward."""
    generator = torch.Generator().manual_seed(rank)
    return [
        (
            torch.randn(4 + i % 2, 6, generator=generator, dtype=dtype),
            torch.randint(0, 3, (4 + i % 2,), generator=generator),
            torch.tensor(math.inf if i in bad else 1.0, dtype=dtype),
        )
        for i in range(count)
    ]


def by_parts(optimizer, scaler, params, grads, opt_state):
    grads, found_inf = ps.unscale_and_check(scaler, grads, donate=True)
    grads, norm = ps.clip_by_global_norm(grads, 10.0, donate=True)
    new = ps.maybe_step(optimizer, params, grads, opt_state, found_inf, donate=True)
    return *new, found_inf, norm


def in_one(*args):
    """With one reduction."""
    with CommDebugMode() as counted:
        out = ps.unscale_and_step(*args, max_norm=10.0, donate=True)
    assert counted.get_total_counts() == 1
    return out[:4]


def by_purescale(wrapped, microbatches, step=by_parts):
    params, scales = wrapped.params, []
    opt_state, scaler = MOMENTUM.init(params), RULE.init()
    for index, microbatch in enumerate(microbatches):
        window = ps.accumulation_window(index, EVERY, total=len(microbatches))
        with wrapped.syncs(window):
            ps.scale_loss(scaler, wrapped.loss(microbatch) / window.divisor).backward()
        if window.should_update:
            grads = {name: p.grad for name, p in params.items()}
            _, opt_state, found_inf, _ = step(MOMENTUM, scaler, params, grads, opt_state)
            scaler = RULE.update(scaler, found_inf)
            wrapped.module.zero_grad()
            scales.append(scaler.scale.item())
    return scales


def by_torch(wrapped, microbatches, scaler):
    optimizer, scales = torch.optim.SGD(wrapped.params.values(), lr=0.1, momentum=0.9), []
    for index, microbatch in enumerate(microbatches):
        window = ps.accumulation_window(index, EVERY, total=len(microbatches))
        with wrapped.syncs(window):
            scaler.scale(wrapped.loss(microbatch) / window.divisor).backward()
        if window.should_update:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(wrapped.params.values(), 10.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
    return scales


def _as_with_torch(rank):
    ranks = dist.get_world_size()
    replicas = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))  # of two shards each
    meshes = [init_device_mesh("cpu", (ranks,)), replicas]
    # 11 microbatches, four windows, the last of two; the second overflows on the last rank alone
    microbatches = data(rank, 11, bad=(4,) if rank == ranks - 1 else ())
    for mesh, step in ((None, by_parts), *itertools.product(meshes, (by_parts, in_one))):
        ours = Wrapped(net(), mesh)
        scales = by_purescale(ours, microbatches, step)
        assert scales == [2.0**10, 2.0**9, 2.0**9, 2.0**10]
        peers = [torch.amp.GradScaler("cpu", **SCALING)]
        if mesh is not None and mesh.ndim == 1:
            peers.append(ShardedGradScaler("cpu", **SCALING))
        for peer in peers:
            theirs = Wrapped(net(), mesh)
            assert by_torch(theirs, microbatches, peer) == scales
            assert_close(whole(ours.params), whole(theirs.params), rtol=1e-6, atol=1e-7)
        told = [None] * ranks
        dist.all_gather_object(told, whole(ours.params))
        assert all(same_bits(told[0], other) for other in told)
        assert not same_bits(told[0], dict(net().named_parameters()))


@pytest.mark.slow
def test_the_run_is_that_of_torchs_scalers_under_ddp_fsdp2_and_hsdp():
    """Windows, a short last one, an overflow of one rank; scales are the same numbers."""
    in_processes(_as_with_torch, 4)


# ---- ranks with different numbers of microbatches ------------------------------------------------


def _uneven(rank):
    """Two windows on every rank, the last of one to three microbatches. Torch takes the mean over
    ranks: each microbatch counts by its share of the samples that all ranks have in this window.
    """
    ranks, dtype = dist.get_world_size(), torch.float64
    shares = [data(other, EVERY + 1 + other % EVERY, dtype) for other in range(ranks)]
    windows = [[share[:EVERY] for share in shares], [share[EVERY:] for share in shares]]
    apply, params, _ = ps.make_functional(net(dtype))

    def loss_fn(params, buffers, microbatch):
        return F.cross_entropy(apply(params, {}, microbatch[0])[0], microbatch[1]), buffers

    settings = {"loss_fn": loss_fn, "optimizer": SGD, "rule": RULE}
    settings["weight_fn"] = lambda microbatch: len(microbatch[1])
    one = grouped = ps.init_train_state(params, {}, SGD, RULE)
    for window in windows:
        one, _ = ps.train_step(one, [m for share in window for m in share], **settings)
        grouped, _ = ps.train_step(grouped, window[rank], group=dist.group.WORLD, **settings)
    assert_close(grouped.params, one.params, rtol=1e-12, atol=1e-12)

    for mesh in (None, init_device_mesh("cpu", (ranks,))):
        wrapped, scaler = Wrapped(net(dtype), mesh), RULE.init()
        opt_state, mine = SGD.init(wrapped.params), [(m, len(m[1])) for m in shares[rank]]
        if mesh is not None:  # FSDP2 gathers in each forward: all ranks go as often, some for 0
            mine += [(mine[-1][0], 0)] * (2 * EVERY - len(mine))
        for index, (microbatch, samples) in enumerate(mine):
            window = ps.accumulation_window(index, EVERY, total=len(mine))
            if index % EVERY == 0:
                total = torch.tensor(float(sum(n for _, n in mine[index : index + EVERY])))
                dist.all_reduce(total)
            with wrapped.syncs(window):
                loss = wrapped.loss(microbatch) * (samples * ranks / total.double())
                ps.scale_loss(scaler, loss).backward()
            if window.should_update:
                grads = {name: p.grad for name, p in wrapped.params.items()}
                arguments = SGD, scaler, wrapped.params, grads, opt_state
                out = ps.unscale_and_step(*arguments, donate=True)
                opt_state, scaler = out.opt_state, RULE.update(scaler, out.found_inf)
                wrapped.module.zero_grad()
        assert_close(whole(wrapped.params), one.params, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_last_windows_of_different_lengths_make_the_step_of_one_process():
    in_processes(_uneven, 3)
