"""What the examples over several ranks share: the digits, a small net, and the check at the end,
that the ranks together did what one process does with all their data.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import purescale as ps

EVERY = 3  # microbatches of a rank in a step
MAX_NORM = 1.0
OPTIMIZER = ps.from_torch(torch.optim.AdamW, lr=3e-3)
# far too high for float16, and soon higher again, so that steps are skipped
RULE = ps.DynamicScale(init_scale=2.0**20, growth_interval=6)
# Sums in float32 over microbatches and ranks come in another order; AdamW divides by their root.
TOLERANCE = 3e-5

Microbatch = tuple[Tensor, Tensor]


@contextmanager
def ranks() -> Iterator[tuple[int, int]]:
    """This rank and how many there are, started by torchrun. A rank that waits for one that is gone
    raises after a minute.
    """
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    torch.set_num_threads(1)
    yield dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 36, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def microbatches(size: int = 16) -> list[Microbatch]:
    """The digits in one order; the last microbatch is smaller."""
    images, labels = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    images = images.float().reshape(-1, 1, 8, 8) / 16
    return [(images[index], labels[index]) for index in order.split(size)]


def loss_of(policy: str) -> ps.LossFn:
    apply = ps.with_policy(ps.make_functional(make_model())[0], policy)

    def loss_fn(params, buffers, microbatch):
        x, y = microbatch
        logits, buffers = apply(params, buffers, x)
        return F.cross_entropy(logits, y), buffers

    return loss_fn


def start() -> ps.TrainState:
    _, params, buffers = ps.make_functional(make_model())
    return ps.init_train_state(params, buffers, OPTIMIZER, RULE)


def samples(microbatch: Microbatch) -> int:
    return len(microbatch[1])


def alone(shares: list[list[Microbatch]], policy: str) -> ps.TrainState:
    """One process that makes each step with the microbatches of all ranks."""
    state, loss_fn = start(), loss_of(policy)
    for first in range(0, len(shares[0]), EVERY):
        state, _ = ps.train_step(
            state,
            [microbatch for share in shares for microbatch in share[first : first + EVERY]],
            loss_fn=loss_fn,
            optimizer=OPTIMIZER,
            rule=RULE,
            weight_fn=samples,
            max_norm=MAX_NORM,
            donate=True,
        )
    return state


def check(params, opt_state, scaler, shares: list[list[Microbatch]], policy: str) -> None:
    """Raises unless every rank holds the same scale and parameters, and those of one process."""
    params = {
        name: p.full_tensor() if hasattr(p, "full_tensor") else p.detach()
        for name, p in params.items()
    }
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (scaler.scale, params))
    for scale, theirs in everywhere:
        assert torch.equal(scale, scaler.scale)
        assert all(torch.equal(p, params[name]) for name, p in theirs.items())
    if dist.get_rank() == 0:
        one = alone(shares, policy)
        assert torch.equal(one.scaler.scale, scaler.scale)
        assert torch.equal(one.opt_state.applied, opt_state.applied)
        apart = max((params[name] - p).abs().max().item() for name, p in one.params.items())
        assert apart <= TOLERANCE, apart
        steps = -(-len(shares[0]) // EVERY)
        print(
            f"{len(everywhere)} ranks: {opt_state.applied.item()} steps applied of "
            f"{steps}, scale 2**{scaler.scale.log2().item():.0f} on every rank, parameters within "
            f"{apart:.1e} of one process (at most {TOLERANCE:.0e})",
            flush=True,
        )
