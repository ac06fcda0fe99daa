"""What one step sends, counted: collectives and bytes of `train_step(group=...)`, as the page
docs/scaling.md claims them.

Ranks that are not there are those of torch's fake process group, whose collectives do nothing; with
`--gloo` the small numbers are real processes. `python benchmarks/scaling.py --gloo`.
"""

from __future__ import annotations

import argparse
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
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import purescale as ps

BUCKET = 25 * 2**20
LARGE = 2**20  # on a CPU a leaf of this size travels by itself
SCALARS = 8 + 9 * 8  # the weight of a rank, then what decides: in float64
COMPARED = 16  # a fingerprint, where the ranks meet on a CPU


class Sent(TorchDispatchMode):
    """Counts collectives and the bytes that a rank puts into them."""

    def __init__(self) -> None:
        super().__init__()
        self.reductions = self.gathers = self.reduced = self.gathered = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "c10d" in name and ("all_reduce" in name or "allreduce" in name):
            self.reductions += 1
            self.reduced += sum(t.nbytes for t in tree_leaves(args[0]) if isinstance(t, Tensor))
        elif "c10d" in name and "allgather" in name:
            self.gathers += 1
            self.gathered += sum(t.nbytes for t in tree_leaves(args[1]) if isinstance(t, Tensor))
        return func(*args, **(kwargs or {}))


class Claim(NamedTuple):
    reductions: int
    reduced: int


def claimed(params: dict[str, Tensor], buffers: dict[str, Tensor]) -> Claim:
    """Gradients and floating buffers in buckets, two reductions of scalars, one of integers."""
    order = [*reversed(params.values()), *(b for b in buffers.values() if b.is_floating_point())]
    buckets, filled = 0, math.inf
    for leaf in order:
        size = 4 * leaf.numel()
        if size >= LARGE:
            buckets += 1
            continue
        if filled + size > BUCKET:
            buckets, filled = buckets + 1, 0
        filled += size
    integers = [b for b in buffers.values() if not b.is_floating_point()]
    sent = sum(4 * leaf.numel() for leaf in order) + SCALARS + sum(8 * b.numel() for b in integers)
    return Claim(buckets + 2 + bool(integers), sent)


def step(name: str, microbatches: int) -> tuple[Sent, Claim, int]:
    torch.manual_seed(0)
    model, shape = {
        "transformer": (models.transformer(512, 4, 8), (2, 8, 32)),
        "ResNet": (models.resnet(3, 32, 3, 1), (2, 3, 16, 16)),
    }[name]
    apply, params, buffers = ps.make_functional(model)
    optimizer, rule = ps.from_torch(torch.optim.AdamW, lr=1e-3), ps.DynamicScale()

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
        out, buffers = apply(params, buffers, batch[0])
        return F.cross_entropy(out, batch[1]), buffers

    state = ps.init_train_state(params, buffers, optimizer, rule)
    data = [models.batch(*shape, device="cpu") for _ in range(microbatches)]
    with Sent() as sent:
        settings: Any = {"loss_fn": loss_fn, "optimizer": optimizer, "rule": rule}
        ps.train_step(state, data, group=dist.group.WORLD, max_norm=1.0, **settings)
    return sent, claimed(params, buffers), sum(p.numel() for p in params.values())


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


def on_rank(rank: int, port: int, ranks: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    report(ranks, "gloo")
    dist.barrier()
    os._exit(0)  # gloo's threads now and then abort a process that ends in the ordinary way


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gloo", action="store_true", help="2, 4 and 8 real processes too")
    given = parser.parse_args()
    print("| ranks | model | microbatches | collectives | MB given | MB sent by a ring |")
    print("|---|---|---|---|---|---|", flush=True)
    for ranks in (2, 4, 8) if given.gloo else ():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        mp.spawn(on_rank, args=(port, ranks), nprocs=ranks)
    for ranks in (2, 4, 8, 64, 512):
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
        report(ranks, "fake")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
