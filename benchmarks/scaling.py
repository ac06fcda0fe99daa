"""What one step sends, counted: collectives and bytes of `train_step(group=...)`, and of a loop by
hand under FSDP2 and HSDP, as the page docs/scaling.md claims them.

Ranks that are not there are those of torch's fake process group, whose collectives do nothing; with
`--gloo` the small numbers are real processes. `python benchmarks/scaling.py --gloo`.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import math
import os
import socket
from typing import Any, NamedTuple

import models
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import purescale as ps

BUCKET = 25 * 2**20
LARGE = 2**20  # on a CPU a leaf of this size travels by itself
SCALARS = 8 + 10 * 8  # the weight of a rank, then what decides: in float64
COMPARED = 16  # a fingerprint, where the ranks meet on a CPU


class Sent(TorchDispatchMode):
    """Counts collectives and the bytes that a rank puts into them."""

    def __init__(self) -> None:
        super().__init__()
        self.reductions = self.gathers = self.reduced = self.gathered = 0
        self.scatters = self.scattered = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "c10d" in name and ("all_reduce" in name or "allreduce" in name):
            self.reductions += 1
            self.reduced += sum(t.nbytes for t in tree_leaves(args[0]) if isinstance(t, Tensor))
        elif "c10d" in name and "allgather" in name:
            self.gathers += 1
            self.gathered += sum(t.nbytes for t in tree_leaves(args[1]) if isinstance(t, Tensor))
        elif "c10d" in name and "reduce_scatter" in name:
            self.scatters += 1
            self.scattered += sum(t.nbytes for t in tree_leaves(args[1]) if isinstance(t, Tensor))
        return func(*args, **(kwargs or {}))


class Claim(NamedTuple):
    reductions: int
    reduced: int


def claimed(params: dict[str, Tensor], buffers: dict[str, Tensor]) -> Claim:
    """Gradients in buckets, and floating buffers, of which two numbers each travel; two reductions
    of scalars, one of integers.
    """
    floating = [b for b in buffers.values() if b.is_floating_point()]
    sizes = [4 * p.numel() for p in reversed(params.values())] + [8 * b.numel() for b in floating]
    buckets, filled = 0, math.inf
    for size in sizes:
        if size >= LARGE:
            buckets += 1
            continue
        if filled + size > BUCKET:
            buckets, filled = buckets + 1, 0
        filled += size
    integers = [b for b in buffers.values() if not b.is_floating_point()]
    sent = sum(sizes) + SCALARS + sum(8 * b.numel() for b in integers)
    return Claim(buckets + 2 + bool(integers), sent)


@functools.cache
def task(name: str) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model, shape = {
        "transformer": (models.transformer(512, 4, 8), (2, 2, 32)),
        "ResNet": (models.resnet(3, 32, 3, 1), (2, 3, 8, 8)),
    }[name]
    apply, params, buffers = ps.make_functional(model)

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
        out, buffers = apply(params, buffers, batch[0])
        return F.cross_entropy(out, batch[1]), buffers

    # what an optimizer does is no message
    settings = {"optimizer": ps.from_torch(torch.optim.SGD, lr=1e-3), "rule": ps.DynamicScale()}
    state = ps.init_train_state(params, buffers, **settings)
    return state, functools.partial(ps.train_step, loss_fn=loss_fn, **settings), shape


def step(name: str, microbatches: int, **settings: Any) -> tuple[Sent, Claim, int]:
    state, train_step, shape = task(name)
    data = [models.batch(*shape, device="cpu") for _ in range(microbatches)]
    with Sent() as sent:
        train_step(state, data, group=dist.group.WORLD, max_norm=1.0, **settings)
    count = sum(p.numel() for p in state.params.values())
    return sent, claimed(state.params, state.buffers), count


class Sharded(NamedTuple):
    """What a rank puts into a step: torch's collectives, and then ours."""

    gathers: int
    gathered: int
    scatters: int
    scattered: int
    reductions: int
    reduced: int
    ours: int


def sharded(microbatches: int, shape: tuple[int, ...]) -> tuple[Sharded, Sharded]:
    """Counted and claimed, a layer a group, over a mesh of this shape: replicas, then shards."""
    torch.manual_seed(0)
    model = models.transformer(64, 4, 4)
    layers = [layer for layer in model if isinstance(layer, models.Layer)]
    # a shard has as many rows as the fullest one: more ranks than rows are padding
    width = shape[-1]
    sizes = [
        sum(4 * -(-p.shape[0] // width) * p[0].numel() for p in module.parameters())
        for module in (*layers, model)
    ]
    total, root = sizes[-1], sizes[-1] - sum(sizes[:-1])
    replicas = len(shape) > 1
    claim = Sharded(
        microbatches * (2 * len(layers) + 1),  # what is in no layer stays until its backward
        microbatches * (2 * (total - root) + root),
        len(sizes),
        width * total,
        replicas * len(sizes),
        replicas * total,
        16 * math.prod(shape),
    )
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
    for module in (*layers, model):
        fully_shard(module, mesh=mesh)
    params = dict(model.named_parameters())
    optimizer, rule = ps.from_torch(torch.optim.SGD, lr=1e-3), ps.DynamicScale()
    opt_state, scaler = optimizer.init(params), rule.init()
    with Sent() as sent:
        for index in range(microbatches):
            x, y = models.batch(2, 2, 32, device="cpu")
            window = ps.accumulation_window(index, microbatches)
            model.set_requires_gradient_sync(window.should_sync)
            ps.scale_loss(scaler, F.cross_entropy(model(x), y)).backward()
    grads = {name: p.grad for name, p in params.items()}
    with Sent() as told:
        ps.unscale_and_step(optimizer, scaler, params, grads, opt_state, 1.0, donate=True)
    assert (told.reductions, told.gathers, told.scatters) == (1, 0, 0)
    theirs = sent.gathers, sent.gathered, sent.scatters, sent.scattered
    return Sharded(*theirs, sent.reductions, sent.reduced, told.reduced), claim


def report_sharded(ranks: int, kind: str) -> None:
    for shape in ((ranks,), (2, ranks // 2)) if ranks > 2 else ((ranks,),):
        for microbatches in (1, 4):
            counted, claim = sharded(microbatches, shape)
            assert counted == claim, (counted, claim)
            if dist.get_rank() == 0:
                width = shape[-1]
                ring = (width - 1) * (counted.gathered + counted.scattered / width)
                ring += counted.reduced  # of two replicas
                print(
                    f"| {ranks} {kind} | {' x '.join(map(str, shape))} | {microbatches} | "
                    f"{counted.gathers} + {counted.scatters} + {counted.reductions} | "
                    f"{ring / 1e6:.3f} | 1 | {counted.ours} |",
                    flush=True,
                )
    sent, claim, _ = step("ResNet", 2, bn_update="window")
    means = [b for key, b in task("ResNet")[0].buffers.items() if key.endswith("running_mean")]
    channels, layers = sum(b.numel() for b in means), len(means)
    statistics = 8 * (2 * channels + 3 * layers + 2) + 8 * channels
    assert (sent.reductions - claim.reductions, sent.reduced - claim.reduced) == (2, statistics)


def report(ranks: int, kind: str) -> None:
    for name in ("transformer", "ResNet"):
        for microbatches in (1, 4):
            sent, claim, count = step(name, microbatches)
            assert (sent.reductions, sent.reduced) == claim, (sent.reductions, sent.reduced, claim)
            assert (sent.gathers, sent.gathered) == (1, COMPARED)
            ring = 2 * (ranks - 1) / ranks * sent.reduced
            if dist.get_rank() == 0:
                print(
                    f"| {ranks} {kind} | {name}, {count / 1e6:.1f}M | {microbatches} | "
                    f"{sent.reductions} + {sent.gathers} | {sent.reduced / 1e6:.3f} | "
                    f"{ring / 1e6:.3f} |",
                    flush=True,
                )


def on_rank(rank: int, port: int, ranks: int, which: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    patience = datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=patience)
    which(ranks, "gloo")
    dist.barrier()
    os._exit(0)  # gloo's threads now and then abort a process that ends in the ordinary way


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gloo", action="store_true", help="2, 4 and 8 real processes too")
    given = parser.parse_args()
    torch.set_num_threads(1)  # several that wait for each other are slow on a machine that is busy
    for which, title in (
        (report, "| ranks | model | microbatches | collectives | MB given | MB sent by a ring |"),
        (
            report_sharded,
            "| ranks | mesh | microbatches | gathers + scatters + reductions | MB sent by a ring | "
            "ours | bytes |",
        ),
    ):
        print(title)
        print("|---" * (title.count("|") - 1) + "|", flush=True)
        for ranks in (2, 4, 8) if given.gloo else ():
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            mp.spawn(on_rank, args=(port, ranks, which), nprocs=ranks)
        for ranks in (2, 4, 8, 64, 512):
            dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
            which(ranks, "fake")
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
